#include "satchel/tensor/coders.h"

#include <ATen/ops/empty.h>

namespace satchel {

DType dtype_of(at::ScalarType type) { return type == at::kHalf ? DType::f16 : type == at::kBFloat16 ? DType::bf16 : DType::f32; }

at::ScalarType scalar_type_of(DType type) { return type == DType::f16 ? at::kHalf : type == DType::bf16 ? at::kBFloat16 : at::kFloat; }

at::Tensor flat(const at::Tensor& x) { return x.as_strided({x.numel()}, {1}); }

void* Scratch::operator()(int64_t count) { return held_.emplace_back(at::empty({count}, options_)).data_ptr(); }

void zero_gaps(const CodecLayout& layout, const at::Tensor& bytes) {
  for (const auto& [first, last] : gaps_of(layout)) {
    if (first < last) bytes.narrow(0, first, last - first).zero_();
  }
}

void encode(const CodecLayout& layout, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  if (layout.values == 0) return;
  zero_gaps(layout, bytes);
  if (layout.coding == Coding::keep) {
    bytes.narrow(0, 0, layout.values * size_of(layout.type)).copy_(x.view(at::kByte));
    return;
  }
  Scratch scratch(bytes);
  const Device device = scratch.at(place);
  encode(layout, {x.const_data_ptr(), layout.type}, seed_pointer(seed), parts_to_write(layout, bytes.data_ptr(), device), device);
}

void decode(const CodecLayout& layout, const at::Tensor& bytes, const at::Tensor& x, int64_t first, int64_t last, const Place& place) {
  if (first >= last) return;
  constexpr size_t kCaches = size_t{32} << 20;  // what is larger is written past the caches: nothing of it would still be there
  if (layout.coding == Coding::keep) {
    const int64_t size = size_of(layout.type);
    x.copy_(bytes.narrow(0, first * size, (last - first) * size).view(scalar_type_of(layout.type)));
    return;
  }
  const Target target{x.data_ptr(), dtype_of(x.scalar_type()), first, x.nbytes() > kCaches};
  decode(layout, parts_of(layout, bytes), target, first, last, {place.cuda(), place.stream()});
}

at::Tensor decoded(const CodecLayout& layout, const at::Tensor& bytes, at::ScalarType type, int64_t first, int64_t last,
                   const Place& place) {
  const auto [begin, end] = decode_stretch(layout, first, last, place.cuda());
  const at::Tensor line = at::empty({end - begin}, bytes.options().dtype(type));
  decode(layout, bytes, line, begin, end, place);
  return line.narrow(0, first - begin, last - first);
}

}  // namespace satchel
