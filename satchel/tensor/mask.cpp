// One bit a value: where x is positive.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/chunks.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/pack.h"

namespace satchel {

PackedMask pack_mask(const at::Tensor& x) {
  constexpr const char* op = "pack_mask";
  check_tensor(x, op);
  const bool flags = x.scalar_type() == at::kBool;
  if (!flags) check_float(x, op);
  const Place place(x.device(), op);
  const at::Tensor real = flags ? x.to(at::kHalf) : x.detach().resolve_neg();
  const at::Tensor line = real.contiguous();
  PackedMask mask{at::empty({ceil_div(line.numel(), 8)}, line.options().dtype(at::kByte)), line.sizes().vec()};
  if (line.numel() == 0) return mask;
  auto* bits = mask.bits.mutable_data_ptr<uint8_t>();
  const Source source{line.const_data_ptr(), dtype_of(line.scalar_type())};
  if (place.cuda()) {
    cuda::mask(source.data, source.type, line.numel(), bits, place.stream());
  } else {
    for_chunks(line.numel(), kChunk, [&](int64_t first, int64_t last) { best_cpu_kernel().mask(source, bits, first, last); });
  }
  return mask;
}

at::Tensor unpack_mask(const PackedMask& mask) {
  constexpr const char* op = "unpack_mask";
  check_tensor(mask.bits, op);
  const int64_t values = count_of(mask.shape, op);
  if (mask.bits.scalar_type() != at::kByte) fail(op, "bits must be uint8", c10::toString(mask.bits.scalar_type()));
  if (mask.bits.numel() != ceil_div(values, 8) || !mask.bits.is_contiguous()) {
    fail(op, "bits must be " + std::to_string(ceil_div(values, 8)) + " contiguous bytes", mask.bits.numel());
  }
  const Place place(mask.bits.device(), op);
  const at::Tensor out = at::empty(mask.shape, mask.bits.options().dtype(at::kBool));
  if (values == 0) return out;
  const auto* bits = mask.bits.const_data_ptr<uint8_t>();
  auto* flags = static_cast<uint8_t*>(out.mutable_data_ptr());
  if (place.cuda()) {
    cuda::unmask(bits, values, flags, place.stream());
    return out;
  }
  for_chunks(values, kChunk, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) flags[i] = bits[i >> 3] >> (i & 7) & 1;
  });
  return out;
}

}  // namespace satchel
