// Random programs of the library's functions at 32 bits, where nothing is rounded, beside the same in plain torch: values, gradients of
// inputs, weights and values in between, what hooks hear. SATCHEL_FUZZ_SECONDS (60) says how long, SATCHEL_FUZZ_SEED (1) where to start;
// a failure prints its program and seed, and SATCHEL_FUZZ_SEED=that SATCHEL_FUZZ_SECONDS=0 runs it alone.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "tests/autograd/fuzz_program.h"

namespace satchel::test {
namespace {

struct Named {
  std::string name;
  at::Tensor tensor;  // undefined: no gradient came
};

/// Everything that is compared, or what was thrown.
struct Outcome {
  std::vector<Named> seen;
  std::string error;
};

at::Tensor weighted(const at::Tensor& v, uint64_t seed) {
  // cos of a counter: the same weights for every type and device.
  const at::Tensor w = at::arange(v.numel(), at::kDouble).mul_(1.7).add_(static_cast<double>(seed % 100)).cos_().reshape(v.sizes());
  return (v * w.to(v.scalar_type())).sum();
}

Outcome execute(const FuzzProgram& program, uint64_t data_seed, FuzzRun& run) {
  Outcome o;
  const auto see = [&](const std::string& name, const at::Tensor& t) {
    o.seen.push_back({name, t.defined() ? t.detach().to(at::kDouble).clone() : t});
  };
  try {
    run_forward(program, data_seed, run);
    for (size_t i = 0; i < run.values.size(); ++i) see("v" + std::to_string(i), run.values[i]);
    at::Tensor loss;
    for (const size_t v : program.outputs) {
      const at::Tensor part = weighted(run.values[v], v);
      loss = loss.defined() ? loss + part : part;
    }
    if (!loss.requires_grad()) return o;
    std::vector<at::Tensor> wanted;
    std::vector<std::string> names;
    const auto want = [&](const std::string& name, const at::Tensor& t) {
      if (!t.defined() || !t.requires_grad()) return;
      wanted.push_back(t);
      names.push_back("gradient of " + name);
    };
    want("v0", run.values[0]);
    for (size_t i = 0; i < run.weights.size(); ++i) want("w" + std::to_string(i), run.weights[i]);
    for (const size_t v : program.asked) want("v" + std::to_string(v), run.values[v]);
    if (wanted.empty()) return o;
    for (int time = program.twice ? 0 : 1; time < 2; ++time) {
      // Retained gradients are written by backward() alone.
      if (program.asked.empty() && time == 1) {
        torch::autograd::backward({loss}, {}, /*retain_graph=*/false);
        for (size_t i = 0; i < wanted.size(); ++i) see(names[i], wanted[i].grad());
        break;
      }
      const auto got = torch::autograd::grad({loss}, wanted, {}, /*retain_graph=*/time == 0, false, /*allow_unused=*/true);
      for (size_t i = 0; i < wanted.size(); ++i) see(names[i], got[i]);
    }
    for (size_t i = 0; program.asked.empty() && i < run.retained.size(); ++i) see("retained " + std::to_string(i), run.retained[i].grad());
    for (size_t i = 0; i < run.heard.size(); ++i) see("heard " + std::to_string(i), *run.heard[i]);
  } catch (const std::exception& e) {
    o.error = std::string(e.what()).substr(0, 300);
  }
  return o;
}

/// What differs by more than rounding explains: 64 times what float32 costs torch itself, or 2^−12 of the largest value.
std::string difference(const Outcome& got, const Outcome& exact, const Outcome& single) {
  for (size_t i = 0; i < exact.seen.size(); ++i) {
    const auto& [name, want] = exact.seen[i];
    if (i >= got.seen.size()) return name + " is missing";
    const at::Tensor& ours = got.seen[i].tensor;
    const auto size_of = [](const at::Tensor& t) { return t.defined() && t.numel() > 0 ? t.abs().max().item<double>() : 0.0; };
    if (!want.defined() || !ours.defined()) {
      // No gradient and a gradient of zeros are the same to whoever trains.
      if (size_of(want.defined() ? want : ours) > 0) return name + (ours.defined() ? ": torch has none" : ": none, torch has one");
      continue;
    }
    if (ours.sizes() != want.sizes()) return name + " has another shape";
    const at::Tensor off = ours - want;
    const double bound = std::max(64 * size_of(single.seen[i].tensor.defined() ? single.seen[i].tensor - want : at::Tensor()),
                                  0x1p-12 * std::max(size_of(want), 1e-2));
    if (!(size_of(off) <= bound) && !(want.numel() > 0 && !want.isfinite().all().item<bool>())) {
      return name + " is off by " + std::to_string(size_of(off)) + ", its largest value is " + std::to_string(size_of(want));
    }
  }
  return "";
}

struct Verdict {
  bool ran = false;  // torch differentiates it
  std::string what;  // empty: equal
};

Verdict judge(const FuzzProgram& program, uint64_t data_seed) {
  FuzzRun ours;
  ours.ours = true;
  ours.type = at::kFloat;
  ours.saving = {parse_method(program.method), "layer"};
  const Outcome got = execute(program, data_seed, ours);
  FuzzRun doubles, floats;
  floats.type = at::kFloat;
  doubles.masks = floats.masks = ours.masks;
  const Outcome exact = execute(program, data_seed, doubles), single = execute(program, data_seed, floats);
  if (!exact.error.empty() || !single.error.empty()) return {};
  if (!got.error.empty()) return {true, "it throws: " + got.error};
  return {true, difference(got, exact, single)};
}

/// A value that rounding puts on the other side of a kink differs by more; it does so with one set of numbers, not with another.
std::string check(const FuzzProgram& program, uint64_t seed, bool& ran) {
  const Verdict first = judge(program, seed);
  ran = first.ran;
  if (first.what.empty()) return "";
  for (const uint64_t other : {seed + 1, seed + 2}) {
    const Verdict again = judge(program, other);
    if (again.ran && !again.what.empty()) return first.what;
  }
  return "";
}

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(Fuzz, ProgramsEqualTorchAt32Bits) {
  const uint64_t first = from_environment("SATCHEL_FUZZ_SEED", 1), seconds = from_environment("SATCHEL_FUZZ_SECONDS", 60);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const uint64_t most_failures = from_environment("SATCHEL_FUZZ_FAILURES", 5);
  uint64_t seed = first, programs = 0, failures = 0;
  do {
    const FuzzProgram program = random_program(seed);
    bool ran = false;
    const std::string what = check(program, seed, ran);
    programs += ran ? 1 : 0;
    if (!what.empty()) {
      ++failures;
      ADD_FAILURE() << "seed " << seed << ": " << what << "\n" << program.text();
    }
    ++seed;
  } while (std::chrono::steady_clock::now() < end && failures < most_failures);
  std::printf("seeds %llu to %llu: %llu programs compared\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(seed - 1), static_cast<unsigned long long>(programs));
  if (seconds >= 10) {
    EXPECT_GE(programs, 100u) << "too few programs to mean anything";
  }
}

}  // namespace
}  // namespace satchel::test
