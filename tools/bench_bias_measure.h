// Are a net's gradients right on average? Errors of many passes against torch's own gradients, and two tests of each weight tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "satchel/core/method.h"

namespace satchel::tool {

struct BiasNet;
enum class NetLoss : uint8_t { cross_entropy, squares };

/// A weight tensor, g its true gradient, e_j the error of pass j.
struct TensorBias {
  std::string name;
  int64_t values = 0, passes = 0;
  double gradient = 0;  // ‖g‖
  double noise = 0;     // of a single pass: √mean ‖e_j‖² / ‖g‖
  double t = 0;         // Student's t of ⟨e_j, g⟩/‖g‖: bias along the gradient
  double z = 0;         // of T = mean of ⟨e_j, e_k⟩ over j ≠ k, which is ‖bias‖² on average: bias in any direction
  double bias = 0;      // √max(T, 0) / ‖g‖
  double variance = 0;  // of a single pass around the mean of all: Σ of the values' variances / ‖g‖²
  double cosine = 0;    // of g + e_j and g, in the mean
  bool is_biased() const;
};

/// The limit of |t| and of z.
constexpr double kMostBias = 5;

/// Both tests of errors, passes × values, against gradients of the same passes (or one for all). Float32 sums in another order than
/// torch's are no bias: errors up to `rounding`·‖g‖ count for nothing.
TensorBias bias_of(const at::Tensor& errors, const at::Tensor& gradients, double rounding);

/// One net with one loss at weights that training passes through: 30 steps of plain torch from the start.
class BiasProbe {
 public:
  BiasProbe(const BiasNet& net, NetLoss loss, at::Device device);
  ~BiasProbe();
  BiasProbe(BiasProbe&&) noexcept;

  /// Per weight tensor ‖error‖/‖g‖ of the method `satchel,bits=32`, in which nothing is rounded: equal masks and formulas, and what is
  /// left of float32's rounding. Throws where it is more than 2e-3.
  const std::vector<double>& check_unrounded();

  std::vector<TensorBias> measure(const Method& method, int64_t passes, uint64_t first_pass);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace satchel::tool
