#include "satchel/tensor/pack.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/per_sample.h"
#include "satchel/tensor/project.h"
#include "satchel/tensor/rows.h"

namespace satchel {

at::Tensor channel_table(const CodecLayout& layout, const at::Tensor& bytes) {
  return bytes.narrow(0, layout.at.channels, layout.channels * static_cast<int64_t>(sizeof(Channel)))
      .view(at::kFloat)
      .view({layout.channels, 4});
}

namespace {

/// Without γ and β: one channel with threshold 0.
void write_channels(const CodecLayout& layout, const at::Tensor& bytes, const at::Tensor& gamma, const at::Tensor& beta) {
  const at::Tensor table = channel_table(layout, bytes);
  if (!gamma.defined()) {
    table.zero_();
    table.select(1, 1).fill_(1);
    return;
  }
  const at::Tensor g = gamma.detach().to(at::kFloat), b = beta.detach().to(at::kFloat);
  const at::Tensor zero = at::zeros_like(g);
  table.copy_(at::stack({at::where(g.eq(0), zero, b.neg().div(g)), g, b, zero}, 1));
}

/// Everything is checked; γ and β are undefined where a side code takes threshold 0, `dim` is theirs.
Packed pack_checked(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta,
                    int64_t dim, const char* op) {
  const Place place(x.device(), op);
  const at::Tensor in_order = ordered(x.detach(), spec);
  Packed packed;
  packed.shape = in_order.sizes().vec();
  packed.strides = strides_of(in_order);
  packed.dtype = x.scalar_type();
  packed.spec = spec;
  if (gamma.defined()) {
    packed.channels = gamma.numel();
    packed.inner = inner_of(packed.shape, packed.strides, dim);
  }
  const CodecLayout layout = plan_of(packed.shape, dtype_of(packed.dtype), spec, packed.channels, packed.inner, op);
  packed.channels = layout.channels;
  packed.bytes = at::empty({layout.at.total}, x.options().dtype(at::kByte).memory_format(c10::nullopt));
  if (layout.channels > 0) write_channels(layout, packed.bytes, gamma, beta);
  if (layout.projected) {
    packed.seed = seed.detach().view({1}).clone();
    const at::Tensor h = flat(in_order).view({layout.projection.rows, layout.projection.columns});
    encode_projected(layout, h, packed.seed, packed.bytes, place);
  } else if (layout.coding == Coding::low_pass && !is_in_shape_order(packed.shape, packed.strides)) {
    encode_low_pass_last(layout, in_order, seed, packed.bytes, place);
  } else {
    encode(layout, flat(in_order), seed, packed.bytes, place);
  }
  return packed;
}

}  // namespace

at::Tensor seed_tensor(uint64_t seed, at::Device device) {
  return at::full({1}, static_cast<int64_t>(seed), at::TensorOptions().dtype(at::kLong).device(device));
}

void advance_seed(const at::Tensor& seed) {
  constexpr const char* op = "advance_seed";
  check_tensor(seed, op);
  check_seed(seed, seed.device(), op);
  const Place place(seed.device(), op);
  auto* number = reinterpret_cast<uint64_t*>(seed.mutable_data_ptr<int64_t>());
  if (place.cuda()) {
    cuda::advance_seed(number, place.stream());
  } else {
    *number = derive_seed(*number, 1, 0, 0);
  }
}

Packed pack(const at::Tensor& x, const CodecSpec& spec, uint64_t seed) {
  check_float(x, "pack");
  return pack(x, spec, seed_tensor(seed, x.device()));
}

Packed pack(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed) {
  check_float(x, "pack");
  validate(spec, "pack");
  check_seed(seed, x.device(), "pack");
  return pack_checked(x, spec, seed, {}, {}, 0, "pack");
}

Packed pack_side(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta,
                 int64_t dim) {
  constexpr const char* op = "pack_side";
  check_float(x, op);
  validate(spec, op);
  check_seed(seed, x.device(), op);
  dim = check_affine(x, spec, gamma, beta, dim, op);
  if (gamma.numel() == 0) return pack_checked(x, spec, seed, {}, {}, 0, op);
  return pack_checked(x, spec, seed, gamma, beta, dim, op);
}

at::Tensor unpack(const Packed& packed) {
  if (packed.budget > 0) return unpack_per_sample(packed);
  const CodecLayout layout = check_packed(packed, "unpack");
  const Place place(packed.bytes.device(), "unpack");
  const at::Tensor out = at::empty_strided(packed.shape, packed.strides, packed.bytes.options().dtype(packed.dtype));
  if (layout.values == 0) return out;
  const at::Tensor bytes = aligned(packed.bytes);
  if (layout.projected) {
    unpack_projected(layout, packed, flat(out).view({layout.projection.rows, layout.projection.columns}), place);
  } else if (layout.coding == Coding::low_pass && !is_in_shape_order(packed.shape, packed.strides)) {
    decode_low_pass_last(layout, bytes, out, 0, place);
  } else {
    decode(layout, bytes, flat(out), 0, layout.values, place);
  }
  return out;
}

at::Tensor unpack_samples(const Packed& packed, int64_t first, int64_t last) {
  if (packed.budget > 0) return unpack_per_sample(packed, first, last);
  constexpr const char* op = "unpack_samples";
  const CodecLayout layout = check_packed(packed, op);
  if (packed.shape.empty()) fail(op, "packed tensor must have one dimension or more", 0);
  const int64_t samples = packed.shape[0];
  if (first < 0 || first > last || last > samples) {
    fail(op, "samples must lie within 0 to " + std::to_string(samples), std::to_string(first) + " to " + std::to_string(last));
  }
  const int64_t count = last - first;
  if (count == samples) return unpack(packed);
  std::vector<int64_t> shape = packed.shape;
  shape[0] = count;
  const auto options = packed.bytes.options().dtype(packed.dtype);
  if (layout.values == 0 || count == 0) return at::empty_strided(shape, packed.strides, options);
  const int64_t sample = layout.values / samples;
  if (layout.projected || packed.strides[0] != sample) return unpack(packed).narrow(0, first, count);
  const Place place(packed.bytes.device(), op);
  const at::Tensor bytes = aligned(packed.bytes);
  if (layout.coding == Coding::low_pass && !is_in_shape_order(packed.shape, packed.strides)) {
    const at::Tensor out = at::empty_strided(shape, packed.strides, options);
    decode_low_pass_last(layout, bytes, out, first * sample / layout.maps.map_values(), place);
    return out;
  }
  const at::Tensor line = decoded(layout, bytes, packed.dtype, first * sample, last * sample, place);
  return line.as_strided(shape, packed.strides, line.storage_offset());
}

int64_t packed_bytes(at::IntArrayRef shape, at::ScalarType dtype, const CodecSpec& spec, int64_t channels) {
  constexpr const char* op = "packed_bytes";
  validate(spec, op);
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) {
    fail(op, "dtype must be float32, float16 or bfloat16", c10::toString(dtype));
  }
  return plan_of(shape, dtype_of(dtype), spec, channels, 1, op).at.total;
}

int64_t saved_bytes(const Packed& packed) {
  const auto bytes_of = [](const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; };
  return bytes_of(packed.bytes) + bytes_of(packed.seed);
}

}  // namespace satchel
