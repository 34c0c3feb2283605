// `satchel analyse`: how a model's activations lie in their blocks, what rounding does to them, and which weight's gradient a method hurts.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/analyse_subject.h"

namespace satchel::tool {

struct AnalyseCommand : SubjectOptions {
  std::string blocks, bits = "2", project = "8", json;  // blocks empty: those of the kind of model
  int64_t values = 1000000;                             // most that are looked at of a save
  bool gradients = false;
  std::string methods = "exact,blockwise,satchel";  // of the gradients; images: actnn, division, satchel
  bool methods_given = false;
  int64_t draws = 8, parts = 8, threads = 0;
};

/// One block size on one save.
struct BlockStudy {
  struct Bits {
    int bits = 2;
    double uniform = 0, normal = 0, measured = 0;     // variance with even levels, in steps²
    double optimal_normal = 0, optimal_measured = 0;  // with optimal ones
    bool has_optimal = false;                         // 2 to 4 bits
    double gain() const { return 1 - optimal_measured / measured; }
    double expected_gain() const { return 1 - optimal_normal / normal; }
  };
  std::string name;   // "row", "64rows", "256"
  int64_t block = 0;  // values
  int64_t blocks = 0, constant = 0, nonfinite = 0;
  std::vector<double> histogram;
  double js_uniform = 0, js_normal = 0;
  std::vector<Bits> bits;
};

/// One tensor that a layer would pack, as it is or projected.
struct SaveStudy {
  std::string name, kind;
  std::vector<int64_t> shape;
  bool projected = false;
  std::vector<BlockStudy> blocks;
};

constexpr int kHistogramBins = 60;

/// Of every save of the subject, projected ones after those that they were made from.
std::vector<SaveStudy> study_saves(Subject& subject, const AnalyseCommand& command);

/// Of one tensor's sampled values, x of two dimensions (rows) or more (samples first).
BlockStudy study_block(const at::Tensor& x, const std::string& block, const std::vector<int>& bits);

/// What a method does to the gradient of one weight.
struct WeightStudy {
  std::string name;
  int64_t values = 0;
  double gradient = 0;        // ‖g‖
  bool negligible = false;    // ‖g‖ below 1e-5 of all gradients together: rounding, as of a bias before a BatchNorm
  double batch_variance = 0;  // over the parts: Σ of the values' variances / ‖g‖²
  struct Method {
    std::string method;
    double bias = 0, z = 0, t = 0, variance = 0, cosine = 0;
  };
  std::vector<Method> methods;
};
std::vector<WeightStudy> study_gradients(Subject& subject, const std::vector<satchel::Method>& methods, int64_t draws, int64_t parts);

void add_analyse(CLI::App& app);

}  // namespace satchel::tool
