#include "satchel/tensor/norm_act_product.h"

#include <ATen/ops/empty.h>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/norm_act_product.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/split_product.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_act_product";

/// Rows × columns of floats beside the code, each row in one piece.
bool stands_beside(const Packed& code, const at::Tensor& g) {
  const auto known = [](at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; };
  return g.defined() && g.device() == code.bytes.device() && known(g.scalar_type()) && g.dim() == 2 && g.size(0) == code.shape[0] &&
         (g.stride(1) == 1 || g.size(1) == 1);
}

bool match(const Packed& code, const std::vector<at::Tensor>& gs) {
  if (gs.empty() || gs.size() > 2) return false;
  for (const at::Tensor& g : gs) {
    if (!stands_beside(code, g) || g.size(1) != gs[0].size(1) || g.scalar_type() != gs[0].scalar_type()) return false;
  }
  return true;
}

cuda::ProductGradients gradients_of(const std::vector<at::Tensor>& gs) {
  cuda::ProductGradients p;
  p.type = dtype_of(gs[0].scalar_type());
  p.tf32 = allows_tf32();
  p.count = static_cast<int>(gs.size());
  p.width = gs[0].size(1);
  for (size_t i = 0; i < gs.size(); ++i) {
    p.g[i] = gs[i].const_data_ptr();
    p.stride[i] = gs[i].stride(0);
  }
  return p;
}

}  // namespace

bool fuses_norm_act_product(const Packed& code, const std::vector<at::Tensor>& gs) {
  if (!fuses_norm_act(code) || !match(code, gs)) return false;
  const Place place(code.bytes.device(), kOp);
  return cuda::norm_act_product_fits(check_packed(code, kOp).side, gradients_of(gs));
}

std::vector<at::Tensor> norm_act_product(const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                                         const std::vector<at::Tensor>& gs) {
  if (!fuses_norm_act_product(code, gs)) fail(kOp, "fuses_norm_act_product must be true of code and gradients");
  const Place place(code.bytes.device(), kOp);
  const CodecLayout layout = check_packed(code, kOp);
  cuda::ProductGradients p = gradients_of(gs);
  const at::TensorOptions floats = code.bytes.options().dtype(at::kFloat);
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < gs.size(); ++i) {
    products.push_back(at::empty({p.width, code.shape[1]}, floats));
    p.out[i] = products[i].mutable_data_ptr<float>();
  }
  const at::Tensor scratch = at::empty({cuda::norm_act_product_scratch_bytes(layout.side, p)}, code.bytes.options());
  cuda::norm_act_product(layout.side, chain_of(code.shape, options), code.bytes.const_data_ptr<uint8_t>(),
                         seed.defined() ? seed_pointer(seed) : nullptr, p, scratch.mutable_data_ptr(), place.stream());
  return products;
}

}  // namespace satchel
