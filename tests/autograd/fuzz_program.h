// Random programs of the library's functions, each of which also runs with torch's own.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel::test {

/// One execution of a program: its numbers as they are now.
struct FuzzRun {
  bool ours = false;
  at::ScalarType type = at::kDouble;
  SavePolicy saving;
  std::vector<at::Tensor> values, weights;
  std::vector<at::Tensor> masks;                   // by step: what dropout multiplied with; our run writes them, torch's reads them
  size_t step = 0;                                 // the step that runs
  std::vector<at::Tensor> retained;                // retain_grad() was called on them
  std::vector<std::shared_ptr<at::Tensor>> heard;  // what hooks heard
};

struct FuzzStep {
  std::string text;                                                    // "v3 = relu(v2)"
  std::vector<std::vector<int64_t>> weights;                           // shapes of its own; undefined ones are empty lists
  std::function<at::Tensor(FuzzRun&, const at::Tensor* weights)> run;  // undefined: no new value (a change in place, a hook)
};

struct FuzzProgram {
  std::string method;
  std::string input_text;
  std::function<at::Tensor(at::Tensor)> layout;  // how the input lies in memory
  std::vector<int64_t> input;
  bool input_needs_gradient = true;
  std::vector<FuzzStep> steps;
  std::vector<size_t> outputs;  // values that the loss reads
  std::vector<size_t> asked;    // values whose gradients grad() is asked for
  bool twice = false;           // backward runs twice
  std::vector<bool> frozen;     // by weight: needs no gradient

  std::string text() const;
};

/// Every step works in torch; how the whole differentiates is not known.
FuzzProgram random_program(uint64_t seed);

/// Values and weights for a program, the same for every type; then all steps. Throws what a step throws.
void run_forward(const FuzzProgram& program, uint64_t data_seed, FuzzRun& run);

}  // namespace satchel::test
