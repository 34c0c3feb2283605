// Integers in the fewest bits, lossless.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

constexpr int64_t kPart = int64_t{1} << 22;  // values of a shorter type that stand as int64 at a time

bool is_integer(at::ScalarType type) {
  return type == at::kBool || type == at::kByte || type == at::kChar || type == at::kShort || type == at::kInt || type == at::kLong;
}

void check_integer(const at::Tensor& x, const char* op) {
  check_tensor(x, op);
  if (!is_integer(x.scalar_type())) {
    fail(op, "tensor must be bool, uint8 or int8 to int64", c10::toString(x.scalar_type()));
  }
}

/// Calls run(first, last) for parts of [0, values), a multiple of 8 long but the last.
template <class Run>
void for_parts(int64_t values, bool whole, const Run& run) {
  const int64_t part = whole ? std::max<int64_t>(values, 1) : kPart;
  for (int64_t first = 0; first < values; first += part) run(first, std::min(values, first + part));
}

}  // namespace

Narrowed narrow(const at::Tensor& x) {
  check_integer(x, "narrow");
  if (x.numel() == 0) return narrow(x, 0, 0);
  const auto [least, most] = at::aminmax(x.scalar_type() == at::kBool ? x.to(at::kByte) : x);
  return narrow(x, least.item().toLong(), most.item().toLong());
}

Narrowed narrow(const at::Tensor& x, int64_t least, int64_t most) {
  constexpr const char* op = "narrow";
  check_integer(x, op);
  if (least > most) fail(op, "least must not be above most, " + std::to_string(most), least);
  const Place place(x.device(), op);
  const at::Tensor line = x.contiguous().view({-1});
  const int bits = bits_needed(least, most);
  const auto bytes = at::empty({code_bytes(x.numel(), bits)}, x.options().dtype(at::kByte).memory_format(c10::nullopt));
  Narrowed out{bytes, x.sizes().vec(), x.scalar_type(), least, bits};
  if (bits == 0) return out;
  auto* codes = bytes.mutable_data_ptr<uint8_t>();
  for_parts(x.numel(), x.scalar_type() == at::kLong, [&](int64_t first, int64_t last) {
    const at::Tensor part = line.narrow(0, first, last - first).to(at::kLong);
    const auto* data = part.const_data_ptr<int64_t>();
    uint8_t* to = codes + code_bytes(first, bits);
    if (place.cuda()) {
      cuda::narrow(data, last - first, least, bits, to, place.stream());
    } else {
      for_chunks(last - first, kChunk, [&](int64_t begin, int64_t end) { narrow(data, least, bits, to, begin, end); });
    }
  });
  return out;
}

at::Tensor widen(const Narrowed& narrowed) {
  constexpr const char* op = "widen";
  check_tensor(narrowed.bytes, op);
  const at::Tensor& bytes = narrowed.bytes;
  const at::ScalarType dtype = narrowed.dtype;
  const int64_t least = narrowed.least;
  const int bits = narrowed.bits;
  if (!is_integer(dtype)) fail(op, "dtype must be bool, uint8 or int8 to int64", c10::toString(dtype));
  if (bits < 0 || bits > 64) fail(op, "bits must be 0 to 64", bits);
  const int64_t values = count_of(narrowed.shape, op), expected = code_bytes(values, bits);
  if (bytes.scalar_type() != at::kByte) fail(op, "bytes must be uint8", c10::toString(bytes.scalar_type()));
  if (bytes.numel() != expected || !bytes.is_contiguous()) {
    fail(op, "bytes must be " + std::to_string(expected) + " in one contiguous line", bytes.numel());
  }
  const Place place(bytes.device(), op);
  const at::Tensor out = at::empty(narrowed.shape, bytes.options().dtype(dtype)), line = out.view({-1});
  const auto* codes = bytes.const_data_ptr<uint8_t>();
  for_parts(values, dtype == at::kLong, [&](int64_t first, int64_t last) {
    const at::Tensor to = line.narrow(0, first, last - first);
    const at::Tensor part = dtype == at::kLong ? to : at::empty({last - first}, to.options().dtype(at::kLong));
    auto* data = part.mutable_data_ptr<int64_t>();
    const uint8_t* from = codes + code_bytes(first, bits);
    if (place.cuda()) {
      cuda::widen(from, last - first, least, bits, data, place.stream());
    } else {
      for_chunks(last - first, kChunk, [&](int64_t begin, int64_t end) { widen(from, least, bits, data, begin, end); });
    }
    if (!part.is_same(to)) to.copy_(part);
  });
  return out;
}

}  // namespace satchel
