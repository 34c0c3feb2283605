#include "satchel/tensor/rows.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "satchel/tensor/coders.h"

namespace satchel {

int64_t stretch_values(bool cuda) { return int64_t{1} << (cuda ? 24 : 20); }

at::Tensor aligned(const at::Tensor& bytes) {
  return reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) % kAlign == 0 ? bytes : bytes.clone();
}

Rows::Rows(const CodecLayout& layout, const at::Tensor& bytes, const Place& place)
    : layout_(layout), bytes_(aligned(bytes)), place_(place), step_(decode_step(layout, place.cuda())) {}

at::Tensor Rows::read(int64_t first, int64_t last, at::ScalarType type) {
  if (step_ > stretch_values(place_.cuda())) {
    if (!whole_.defined()) {
      whole_ = at::empty({layout_.values}, bytes_.options().dtype(at::kFloat));
      decode(layout_, bytes_, whole_, 0, layout_.values, place_);
    }
    return whole_.narrow(0, first * layout_.row, (last - first) * layout_.row)
        .view({last - first, layout_.row})
        .to(type, false, /*copy=*/true);
  }
  const int64_t begin = first * layout_.row / step_ * step_;
  const int64_t end = std::min(layout_.values, ceil_div(last * layout_.row, step_) * step_);
  const at::Tensor line = at::empty({end - begin}, bytes_.options().dtype(type));
  decode(layout_, bytes_, line, begin, end, place_);
  return line.narrow(0, first * layout_.row - begin, (last - first) * layout_.row).view({last - first, layout_.row});
}

}  // namespace satchel
