#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/analyse.h"
#include "tools/bench_bias_measure.h"

namespace satchel::tool {
namespace {

constexpr double kRounding = 0x1p-20;  // sums of float32 in another order are no bias
constexpr double kNegligible = 1e-5;
constexpr uint64_t kDraws = 1000;  // first run of the roundings

/// Sums of ‖g_p‖² and of g_p: enough for the variance over parts.
struct PartSums {
  at::Tensor sum;
  double squares = 0;
};

/// Σ of the values' variances over so many parts.
double variance_of(const PartSums& s, int64_t parts) {
  const auto count = static_cast<double>(parts);
  const double of_mean = s.sum.square().sum().item<double>() / (count * count);
  return std::max(0.0, (s.squares / count - of_mean) * count / (count - 1));
}

}  // namespace

std::vector<WeightStudy> study_gradients(Subject& subject, const std::vector<satchel::Method>& methods, int64_t draws, int64_t parts) {
  const satchel::Method exact = parse_method("fp32");
  const std::vector<std::string> names = subject.weights();
  std::vector<PartSums> sums(names.size());
  for (int64_t p = 0; p < parts; ++p) {
    const std::vector<at::Tensor> g = subject.gradients(exact, 0, p);
    for (size_t i = 0; i < g.size(); ++i) {
      const at::Tensor one = g[i].to(at::kCPU, at::kDouble).reshape({-1});
      sums[i].sum = p == 0 ? one : sums[i].sum + one;
      sums[i].squares += one.square().sum().item<double>();
    }
  }
  const std::vector<at::Tensor> truth = subject.gradients(exact, 0, subject.reference());
  std::vector<WeightStudy> studies;
  for (size_t i = 0; i < names.size(); ++i) {
    WeightStudy s;
    s.name = names[i];
    s.values = truth[i].numel();
    s.gradient = truth[i].to(at::kDouble).norm().item<double>();
    const double square = std::max(s.gradient * s.gradient, 1e-300);
    s.batch_variance = variance_of(sums[i], parts) / square;
    studies.push_back(std::move(s));
  }
  double total = 0;
  for (const WeightStudy& s : studies) total += s.gradient * s.gradient;
  for (WeightStudy& s : studies) s.negligible = s.gradient <= kNegligible * std::sqrt(total);
  for (const satchel::Method& m : methods) {
    std::vector<at::Tensor> errors;
    for (const at::Tensor& g : truth) errors.push_back(at::empty({draws, g.numel()}, g.options().memory_format(c10::nullopt)));
    for (int64_t d = 0; d < draws; ++d) {
      const std::vector<at::Tensor> got = subject.gradients(m, kDraws + static_cast<uint64_t>(d), subject.reference());
      for (size_t i = 0; i < got.size(); ++i) errors[i][d].copy_((got[i] - truth[i]).reshape({-1}));
    }
    for (size_t i = 0; i < names.size(); ++i) {
      const TensorBias b = bias_of(errors[i], truth[i].reshape({1, -1}), kRounding);
      errors[i].reset();
      studies[i].methods.push_back({m.name, b.bias, b.z, b.t, b.variance, b.cosine});
    }
  }
  return studies;
}

}  // namespace satchel::tool
