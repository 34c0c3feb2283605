#include "satchel/tensor/rows.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "satchel/tensor/coders.h"

namespace satchel {

int64_t stretch_values(bool cuda) { return int64_t{1} << (cuda ? 24 : 20); }

at::Tensor aligned(const at::Tensor& bytes) {
  return reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) % kAlign == 0 ? bytes : bytes.clone();
}

Rows::Rows(const Plan& plan, const at::Tensor& bytes, const Place& place)
    : plan_(plan), bytes_(aligned(bytes)), place_(place), step_(decode_step(plan, place.cuda())) {}

at::Tensor Rows::read(int64_t first, int64_t last, at::ScalarType type) {
  if (step_ > stretch_values(place_.cuda())) {
    if (!whole_.defined()) {
      whole_ = at::empty({plan_.values}, bytes_.options().dtype(at::kFloat));
      decode(plan_, bytes_, whole_, 0, plan_.values, place_);
    }
    return whole_.narrow(0, first * plan_.row, (last - first) * plan_.row).view({last - first, plan_.row}).to(type, false, /*copy=*/true);
  }
  const int64_t begin = first * plan_.row / step_ * step_;
  const int64_t end = std::min(plan_.values, ceil_div(last * plan_.row, step_) * step_);
  const at::Tensor line = at::empty({end - begin}, bytes_.options().dtype(type));
  decode(plan_, bytes_, line, begin, end, place_);
  return line.narrow(0, first * plan_.row - begin, (last - first) * plan_.row).view({last - first, plan_.row});
}

}  // namespace satchel
