// The room's functions as torch ops: tensors and numbers only, on CPU, CUDA and Meta (sizes without data).
// The spec travels as SpecNumbers (codec_layout.h). Of what pack leaves out of its result, packed_strides tells the strides, and
// inner is the stride of the channels' dimension (1 where that has size 1).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <optional>

#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

#define SATCHEL_SPEC                                                                                                               \
  int64_t bits, int64_t block, bool per_sample, int64_t levels, int64_t rounding, int64_t header, int64_t side, int64_t transform, \
      int64_t p0, int64_t p1, bool p2
#define SATCHEL_NUMBERS \
  SpecNumbers { bits, block, per_sample, levels, rounding, header, side, transform, p0, p1, p2 }

constexpr const char* kSpec =
    "int bits, int block, bool per_sample, int levels, int rounding, int header, int side, int transform, int p0, "
    "int p1, bool p2";

at::Tensor pack_op(const at::Tensor& x, const at::Tensor& seed, SATCHEL_SPEC) {
  return pack(x, spec_of(SATCHEL_NUMBERS, "pack"), seed).bytes;
}

at::Tensor empty_bytes(const at::Tensor& x, const CodecSpec& spec, int64_t channels, const char* op) {
  check_float(x, op, true);
  const CodecLayout layout = plan_of(x.sizes(), dtype_of(x.scalar_type()), spec, channels, 1, op);
  return at::empty({layout.at.total}, at::TensorOptions().dtype(at::kByte).device(x.device()));
}

at::Tensor pack_meta(const at::Tensor& x, const at::Tensor&, SATCHEL_SPEC) {
  return empty_bytes(x, spec_of(SATCHEL_NUMBERS, "pack"), 0, "pack");
}

at::Tensor pack_side_op(const at::Tensor& x, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta, int64_t dim,
                        SATCHEL_SPEC) {
  return pack_side(x, spec_of(SATCHEL_NUMBERS, "pack_side"), seed, gamma, beta, dim).bytes;
}

at::Tensor pack_side_meta(const at::Tensor& x, const at::Tensor&, const at::Tensor& gamma, const at::Tensor& beta, int64_t dim,
                          SATCHEL_SPEC) {
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, "pack_side");
  check_affine(x, spec, gamma, beta, dim, "pack_side");
  return empty_bytes(x, spec, gamma.numel(), "pack_side");
}

std::vector<int64_t> packed_strides(const at::Tensor& x, SATCHEL_SPEC) {
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, "packed_strides");
  check_float(x, "packed_strides", true);
  return keeps_order(x, spec) ? strides_of(x) : contiguous_strides(x.sizes());
}

int64_t packed_bytes_op(at::IntArrayRef shape, at::ScalarType dtype, int64_t channels, SATCHEL_SPEC) {
  return packed_bytes(shape, dtype, spec_of(SATCHEL_NUMBERS, "packed_bytes"), channels);
}

Packed packed_of(const at::Tensor& bytes, const std::optional<at::Tensor>& seed, at::IntArrayRef shape, at::IntArrayRef strides,
                 at::ScalarType dtype, const CodecSpec& spec, int64_t channels, int64_t inner) {
  return {bytes, seed.value_or(at::Tensor()), shape.vec(), strides.vec(), dtype, spec, channels, inner};
}

at::Tensor unpack_op(const at::Tensor& bytes, const std::optional<at::Tensor>& seed, at::IntArrayRef shape, at::IntArrayRef strides,
                     at::ScalarType dtype, SATCHEL_SPEC, int64_t channels, int64_t inner) {
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, "unpack");
  return unpack(packed_of(bytes, seed, shape, strides, dtype, spec, channels, inner));
}

at::Tensor unpack_meta(const at::Tensor& bytes, const std::optional<at::Tensor>& seed, at::IntArrayRef shape, at::IntArrayRef strides,
                       at::ScalarType dtype, SATCHEL_SPEC, int64_t channels, int64_t inner) {
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, "unpack");
  check_packed(packed_of(bytes, seed, shape, strides, dtype, spec, channels, inner), "unpack", true);
  return at::empty_strided(shape, strides, bytes.options().dtype(dtype));
}

at::Tensor transposed_product_op(const at::Tensor& bytes, const std::optional<at::Tensor>& seed, const at::Tensor& g, at::IntArrayRef shape,
                                 at::IntArrayRef strides, at::ScalarType dtype, SATCHEL_SPEC, int64_t channels, int64_t inner) {
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, "transposed_product");
  return transposed_product(packed_of(bytes, seed, shape, strides, dtype, spec, channels, inner), g);
}

at::Tensor transposed_product_meta(const at::Tensor& bytes, const std::optional<at::Tensor>& seed, const at::Tensor& g,
                                   at::IntArrayRef shape, at::IntArrayRef strides, at::ScalarType dtype, SATCHEL_SPEC, int64_t channels,
                                   int64_t inner) {
  constexpr const char* op = "transposed_product";
  const CodecSpec spec = spec_of(SATCHEL_NUMBERS, op);
  check_packed(packed_of(bytes, seed, shape, strides, dtype, spec, channels, inner), op, true);
  check_product(shape, g, bytes.device(), op);
  return at::empty({shape.back(), g.size(-1)}, g.options().dtype(at::kFloat));
}

at::Tensor pack_mask_op(const at::Tensor& x) { return pack_mask(x).bits; }
at::Tensor pack_mask_meta(const at::Tensor& x) {
  return at::empty({ceil_div(x.numel(), 8)}, at::TensorOptions().dtype(at::kByte).device(x.device()));
}

at::Tensor unpack_mask_op(const at::Tensor& bits, at::IntArrayRef shape) { return unpack_mask({bits, shape.vec()}); }
at::Tensor unpack_mask_meta(const at::Tensor& bits, at::IntArrayRef shape) { return at::empty(shape, bits.options().dtype(at::kBool)); }

at::Tensor narrow_op(const at::Tensor& x, int64_t least, int64_t most) { return narrow(x, least, most).bytes; }
at::Tensor narrow_meta(const at::Tensor& x, int64_t least, int64_t most) {
  const int64_t bytes = code_bytes(x.numel(), bits_needed(least, most));
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(x.device()));
}

at::Tensor widen_op(const at::Tensor& bytes, at::IntArrayRef shape, at::ScalarType dtype, int64_t least, int64_t bits) {
  if (bits < 0 || bits > 64) fail("widen", "bits must be 0 to 64", bits);
  return widen({bytes, shape.vec(), dtype, least, static_cast<int>(bits)});
}
at::Tensor widen_meta(const at::Tensor& bytes, at::IntArrayRef shape, at::ScalarType dtype, int64_t, int64_t) {
  return at::empty(shape, bytes.options().dtype(dtype));
}

void define(torch::Library& m) {
  const std::string spec = kSpec, packed = "int[] shape, int[] strides, ScalarType dtype, " + spec + ", int channels=0, int inner=1";
  m.def(("pack(Tensor x, Tensor seed, " + spec + ") -> Tensor").c_str());
  m.def(("pack_side(Tensor x, Tensor seed, Tensor gamma, Tensor beta, int dim, " + spec + ") -> Tensor").c_str());
  m.def(("unpack(Tensor bytes, Tensor? seed, " + packed + ") -> Tensor").c_str());
  m.def(("transposed_product(Tensor bytes, Tensor? seed, Tensor g, " + packed + ") -> Tensor").c_str());
  m.def("pack_mask(Tensor x) -> Tensor");
  m.def("unpack_mask(Tensor bits, int[] shape) -> Tensor");
  m.def("narrow(Tensor x, int least, int most) -> Tensor");
  m.def("widen(Tensor bytes, int[] shape, ScalarType dtype, int least, int bits) -> Tensor");
  m.def(("packed_strides(Tensor x, " + spec + ") -> int[]").c_str(), &packed_strides);
  m.def(("packed_bytes(int[] shape, ScalarType dtype, int channels, " + spec + ") -> int").c_str(), &packed_bytes_op);
}

void implement(torch::Library& m) {
  m.impl("pack", &pack_op);
  m.impl("pack_side", &pack_side_op);
  m.impl("unpack", &unpack_op);
  m.impl("transposed_product", &transposed_product_op);
  m.impl("pack_mask", &pack_mask_op);
  m.impl("unpack_mask", &unpack_mask_op);
  m.impl("narrow", &narrow_op);
  m.impl("widen", &widen_op);
}

}  // namespace

TORCH_LIBRARY(satchel, m) { define(m); }
TORCH_LIBRARY_IMPL(satchel, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(satchel, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(satchel, Meta, m) {
  m.impl("pack", &pack_meta);
  m.impl("pack_side", &pack_side_meta);
  m.impl("unpack", &unpack_meta);
  m.impl("transposed_product", &transposed_product_meta);
  m.impl("pack_mask", &pack_mask_meta);
  m.impl("unpack_mask", &unpack_mask_meta);
  m.impl("narrow", &narrow_meta);
  m.impl("widen", &widen_meta);
}

}  // namespace satchel
