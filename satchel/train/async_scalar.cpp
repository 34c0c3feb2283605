#include "satchel/train/async_scalar.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "satchel/core/error.h"

namespace satchel {

AsyncScalar::AsyncScalar(const at::Tensor& number) {
  if (!number.defined() || number.numel() != 1) fail("late_number", "there must be one value", number.defined() ? number.numel() : 0);
  host_ = number.detach();
  if (!number.is_cuda()) return;
  host_ = at::empty({}, number.options().device(at::kCPU).pinned_memory(true));
  host_.copy_(number.detach().reshape({}), /*non_blocking=*/true);
  const auto type = number.device().type();
  copied_.emplace(type);
  copied_->record(c10::impl::VirtualGuardImpl(type).getStream(number.device()));
}

double AsyncScalar::read() const {
  if (copied_) copied_->synchronize();
  return host_.item<double>();
}

}  // namespace satchel
