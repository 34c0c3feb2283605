#include "satchel/tensor/loss.h"

#include <ATen/ops/empty.h>

#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

bool is_known(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

/// Memory that a kernel can take for a line of numbers.
bool is_plain(const at::Tensor& x) {
  return x.is_cuda() && x.layout() == at::kStrided && is_known(x.scalar_type()) && x.is_contiguous() && !x.is_neg();
}

}  // namespace

bool fuses_cross_entropy(const at::Tensor& logits) {
  return cuda::compiled() && is_plain(logits) && logits.dim() == 2 && logits.numel() > 0;
}

at::Tensor cross_entropy_rows_(const at::Tensor& logits, const at::Tensor& labels, int64_t counted, bool write, double scale) {
  const Place place(logits.device(), "cross_entropy_");
  const auto bytes = logits.options().dtype(at::kByte);
  const at::Tensor loss = at::empty({}, logits.options().dtype(at::kFloat)), line = labels.contiguous();
  const at::Tensor scratch = at::empty({cuda::cross_entropy_scratch_bytes()}, bytes);
  void* values = write ? logits.mutable_data_ptr() : const_cast<void*>(logits.const_data_ptr());
  cuda::cross_entropy({logits.size(0), logits.size(1), counted, scale}, values, dtype_of(logits.scalar_type()),
                      line.const_data_ptr<int64_t>(), write, loss.mutable_data_ptr<float>(), scratch.mutable_data_ptr(), place.stream());
  return loss;
}

void scale_(const at::Tensor& x, const at::Tensor& factor) {
  const bool one_number = factor.is_cuda() && factor.device() == x.device() && factor.scalar_type() == at::kFloat && factor.numel() == 1;
  if (!cuda::compiled() || !is_plain(x) || !one_number || factor.is_neg()) {
    x.mul_(factor);
    return;
  }
  const Place place(x.device(), "scale_");
  cuda::scale(x.mutable_data_ptr(), dtype_of(x.scalar_type()), x.numel(), factor.const_data_ptr<float>(), place.stream());
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();  // whoever saved x sees that it may have changed
}

}  // namespace satchel
