#include "satchel/tensor/row_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>

#include <utility>

#include "satchel/kernels/epilogue_codes.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

constexpr const char *kRowNormOp = "row_norm", *kSmoothOp = "smooth";

/// Values of a type that kernels know, in memory as they are.
bool is_on_cuda(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  const bool known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  return x.is_cuda() && known && x.numel() > 0 && !x.is_neg() && !x._is_zerotensor();
}

bool is_aligned(const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlign == 0; }

const float* line(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
float* line_to_write(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

cuda::RowShape shape_of(const at::Tensor& rows) { return {rows.size(0), rows.size(1)}; }
/// Any values, as one row of groups of 8.
cuda::RowShape flat_shape(int64_t values) { return {values / 8, 8}; }

/// A code of blocks, and of nothing else, in bits that the kernels know.
bool fits(at::IntArrayRef shape, const CodecSpec& spec, bool (*serves)(const BlockCode&)) {
  if (spec.side != Side::none || spec.bits == kKeep) return false;
  const CodecLayout layout = plan_of(shape, DType::f32, spec, 0, 1, kRowNormOp);
  return is_block_code(layout) && serves(layout.block);
}

/// Room for the code of values that lie as x does; unpack() gives `type`.
Packed room_for(const at::Tensor& x, at::ScalarType type, const CodecSpec& spec) {
  Packed packed;
  packed.shape = x.sizes().vec();
  packed.strides = strides_of(x);
  packed.dtype = type;
  packed.spec = spec;
  const CodecLayout layout = plan_of(packed.shape, dtype_of(type), spec, 0, 1, kRowNormOp);
  packed.bytes = at::empty({layout.at.total}, at::TensorOptions().device(x.device()).dtype(at::kByte));
  zero_gaps(layout, packed.bytes);
  return packed;
}

cuda::RowCode code_in(const Packed& packed, const at::Tensor& seed = {}) {
  const CodecLayout layout = plan_of(packed.shape, dtype_of(packed.dtype), packed.spec, 0, 1, kRowNormOp);
  return row_code(layout, packed.bytes.data_ptr(), seed.defined() ? seed_pointer(seed) : nullptr);
}

cuda::RowNorm norm_in(const RowNormInput& in) {
  return {line_to_write(in.mean), line_to_write(in.rstd), line(in.gamma), line(in.beta), in.eps, in.centred};
}

}  // namespace

bool fuses_row_norm(const at::Tensor& rows, const CodecSpec& norm) {
  return is_on_cuda(rows) && rows.dim() == 2 && cuda::row_norm_fits(shape_of(rows)) && fits(rows.sizes(), norm, cuda::row_norm_code_fits);
}

bool fuses_row_norm(const at::Tensor& rows, const CodecSpec& norm, const CodecSpec& slope) {
  return fuses_row_norm(rows, norm) && fits(rows.sizes(), slope, cuda::slope_code_fits);
}

bool fuses_smooth(const at::Tensor& x, const CodecSpec& slope) {
  return is_on_cuda(x) && x.numel() % 8 == 0 && keeps_order(x, slope) && is_aligned(x) && cuda::row_norm_fits(flat_shape(x.numel())) &&
         fits(x.sizes(), slope, cuda::slope_code_fits);
}

at::Tensor row_norm(RowNormInput& in) {
  const Place place(in.x.device(), kRowNormOp);
  const auto numbers = in.x.options().dtype(at::kFloat);
  in.mean = at::empty({in.x.size(0), 1, 1, 1}, numbers);
  in.rstd = at::empty({in.x.size(0), 1, 1, 1}, numbers);
  const at::Tensor y = at::empty_like(in.x);
  cuda::row_norm(shape_of(in.x), norm_in(in), in.x.const_data_ptr(), dtype_of(in.x.scalar_type()), y.mutable_data_ptr(), place.stream());
  return y;
}

Packed row_norm_encode(const RowNormInput& in, const CodeChoice& norm) {
  const Place place(in.x.device(), kRowNormOp);
  const Packed packed = room_for(in.x, at::kFloat, norm.spec);
  cuda::row_encode(shape_of(in.x), norm_in(in), code_in(packed, norm.seed), {}, Smooth::none, in.x.const_data_ptr(),
                   dtype_of(in.x.scalar_type()), nullptr, place.stream());
  return packed;
}

SmoothResult row_norm_encode(const RowNormInput& in, const CodeChoice& norm, Smooth act, const CodeChoice& slope) {
  const Place place(in.x.device(), kRowNormOp);
  SmoothResult made{at::empty_like(in.x), room_for(in.x, in.x.scalar_type(), slope.spec), room_for(in.x, at::kFloat, norm.spec)};
  cuda::row_encode(shape_of(in.x), norm_in(in), code_in(made.norm, norm.seed), code_in(made.slope, slope.seed), act, in.x.const_data_ptr(),
                   dtype_of(in.x.scalar_type()), made.z.mutable_data_ptr(), place.stream());
  return made;
}

SmoothResult smooth_encode(const at::Tensor& x, Smooth act, const CodeChoice& slope) {
  const Place place(x.device(), kSmoothOp);
  SmoothResult made{at::empty_like(x), room_for(x, x.scalar_type(), slope.spec)};
  cuda::row_encode(flat_shape(x.numel()), {}, {}, code_in(made.slope, slope.seed), act, x.const_data_ptr(), dtype_of(x.scalar_type()),
                   made.z.mutable_data_ptr(), place.stream());
  return made;
}

NormActSums row_norm_back_(const at::Tensor& g, const RowNormInput& in, const Packed& norm, const Packed* slope, bool corrects,
                           bool needs_x) {
  const Place place(g.device(), kRowNormOp);
  const auto numbers = g.options().dtype(at::kFloat);
  const NormActSums sums{at::empty({g.size(1)}, numbers), at::empty({g.size(1)}, numbers)};
  const cuda::RowShape shape = shape_of(g);
  const at::Tensor scratch = at::empty({cuda::row_back_scratch_bytes(shape)}, g.options().dtype(at::kByte));
  void* own = g.mutable_data_ptr();
  const cuda::RowGradients to{
      own, dtype_of(g.scalar_type()), needs_x ? own : nullptr, line_to_write(sums.gamma), line_to_write(sums.beta), corrects};
  cuda::row_back(shape, norm_in(in), code_in(norm), slope != nullptr ? code_in(*slope) : cuda::RowCode(), to, scratch.mutable_data_ptr(),
                 place.stream());
  return sums;
}

at::Tensor slope_gradient(const at::Tensor& g, const Packed& slope) {
  const bool alike = g.sizes() == at::IntArrayRef(slope.shape) && g.strides() == at::IntArrayRef(slope.strides);
  if (!alike || !fuses_smooth(g, slope.spec)) return at::mul(g, unpack(slope));
  const Place place(g.device(), kSmoothOp);
  const at::Tensor out = at::empty_like(g);
  cuda::slope_back(flat_shape(g.numel()), code_in(slope), g.const_data_ptr(), dtype_of(g.scalar_type()), out.mutable_data_ptr(),
                   place.stream());
  return out;
}

at::Tensor smooth_function(const at::Tensor& y, Smooth act) {
  switch (act) {
    case Smooth::gelu: return at::gelu(y, "none");
    case Smooth::gelu_tanh: return at::gelu(y, "tanh");
    case Smooth::silu: return at::silu(y);
    case Smooth::sigmoid: return at::sigmoid(y);
    case Smooth::tanh: return at::tanh(y);
    case Smooth::none: return y;
  }
  return y;
}

SmoothValues smooth_values(const at::Tensor& y, Smooth act) {
  if (is_on_cuda(y) && y.is_non_overlapping_and_dense()) {
    const Place place(y.device(), kSmoothOp);
    const SmoothValues made{at::empty_like(y), at::empty_like(y, y.options().dtype(at::kFloat))};
    cuda::smooth(act, y.const_data_ptr(), dtype_of(y.scalar_type()), y.numel(), made.z.mutable_data_ptr(), line_to_write(made.slope),
                 place.stream());
    return made;
  }
  const at::Tensor z = smooth_function(y, act), one = at::ones_like(y);
  switch (act) {
    case Smooth::gelu: return {z, at::gelu_backward(one, y, "none")};
    case Smooth::gelu_tanh: return {z, at::gelu_backward(one, y, "tanh")};
    case Smooth::silu: return {z, at::silu_backward(one, y)};
    case Smooth::sigmoid: return {z, at::sigmoid_backward(one, z)};
    case Smooth::tanh: return {z, at::tanh_backward(one, z)};
    case Smooth::none: break;
  }
  return {z, one};
}

}  // namespace satchel
