// What the tests of products on tensor cores share: who may run them, what float64 gives, and how far from it they may be.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/kernels/cuda/split_product.h"

namespace satchel {

using Tensors = std::vector<at::Tensor>;

class SplitProduct : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (!IsSkipped() && !cuda::split_fits()) GTEST_SKIP() << "no Hopper";
  }
  Tf32 off_{false};
};

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

/// Of Σ|x||w|: two pieces leave 2⁻²² of each factor and of their product; eight cut-off steps of tensor cores; so many roundings in line.
inline double share_of(int64_t roundings) { return 3 * 0x1p-22 + static_cast<double>(roundings + 8) * 0x1p-23; }

/// A chunk of 32 of the depth is a rounding, and so is the bias.
inline double share_of(const Tensors& factors) {
  int64_t chunks = 0;
  for (const at::Tensor& f : factors) chunks += up(f.size(0), 32);
  return share_of(chunks + 1);
}

/// … of a gradient: a share of the rows goes chunk by chunk, 132 multiprocessors and eight chunks a share at least; eight warps add the
/// shares, then each other's sums and what stood there.
inline double gradient_share(int64_t rows, int64_t g_columns, int64_t x_columns) {
  const int64_t tiles = up(g_columns, 128) * up(x_columns, 128), shares = std::max<int64_t>(1, std::min(132 / tiles, up(rows, 256)));
  return share_of(up(up(rows, 32), shares) + up(shares, 8) + 8 + 1);
}

/// Σ a[i]·b[i] + bias in float64, and the sum of its terms' magnitudes.
struct Exact {
  at::Tensor value, sizes;

  Exact(const Tensors& a, const Tensors& b, const at::Tensor& bias = {}) : Exact(a, a, b, bias) {}
  /// `magnitudes`: of a's, where these are sums themselves.
  Exact(const Tensors& a, const Tensors& magnitudes, const Tensors& b, const at::Tensor& bias) {
    for (size_t i = 0; i < a.size(); ++i) {
      const at::Tensor w = b[i].to(at::kDouble), product = a[i].to(at::kDouble).mm(w);
      const at::Tensor terms = magnitudes[i].to(at::kDouble).abs().mm(w.abs());
      value = i == 0 ? product : value + product;
      sizes = i == 0 ? terms : sizes + terms;
    }
    if (!bias.defined()) return;
    value = value + bias;
    sizes = sizes + bias.abs();
  }

  /// The largest error in units of what is allowed; NaN where a value is not a number.
  double over(const at::Tensor& got, double share) const {
    return ((got.to(at::kDouble) - value).abs() / (sizes * share + 0x1p-140)).max().item<double>();
  }
  double frobenius(const at::Tensor& got) const { return ((got.to(at::kDouble) - value).norm() / value.norm()).item<double>(); }
  double bias(const at::Tensor& got) const {
    return ((value.sign() * (got.to(at::kDouble) - value)).sum() / value.abs().sum()).item<double>();
  }
};

}  // namespace satchel
