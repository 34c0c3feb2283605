#include "satchel/tensor/norm_add.h"

#include <ATen/ops/empty.h>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/norm_add.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_add";

CodecLayout layout_for(at::IntArrayRef shape, at::ScalarType type, const CodecSpec& spec) {
  return plan_of(shape, dtype_of(type), spec, 0, 1, kOp);
}

const float* numbers(const at::Tensor& t) { return t.const_data_ptr<float>(); }

bool is_float(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

Packed packed_of(const at::Tensor& x, at::ScalarType type, const CodecSpec& spec) {
  Packed packed;
  packed.bytes = at::empty({layout_for(x.sizes(), type, spec).at.total}, x.options().dtype(at::kByte));
  packed.shape = x.sizes().vec();
  packed.strides = contiguous_strides(x.sizes());
  packed.dtype = type;
  packed.spec = spec;
  return packed;
}

cuda::CodeParts code_parts(const CodecLayout& layout, const Packed& packed) {
  const Parts at = parts_of(layout, packed.bytes);
  return {at.codes, at.headers};
}

/// Both codes as the kernels take them.
cuda::NormAddCode code_of(const Packed& norm, const Packed& sum, const ExtraBit& extra) {
  const CodecLayout a = layout_for(norm.shape, norm.dtype, norm.spec), b = layout_for(sum.shape, sum.dtype, sum.spec);
  return {a.block, b.side, norm.shape[1], code_parts(a, norm), code_parts(b, sum), extra_bit_view(sum, extra)};
}

}  // namespace

bool fuses_norm_add(const at::Tensor& x, const CodecSpec& norm, const CodecSpec& sum) {
  if (!x.is_cuda() || !is_float(x) || x.dim() != 2 || x.numel() == 0 || norm.side != Side::none || sum.side != Side::relu) return false;
  const CodecLayout a = layout_for(x.sizes(), at::kFloat, norm), b = layout_for(x.sizes(), x.scalar_type(), sum);
  return a.coding == Coding::block && !a.projected && b.coding == Coding::side &&
         cuda::norm_add_fits({a.block, b.side, x.size(1), {nullptr, nullptr}, {nullptr, nullptr}});
}

NormAddResult norm_add_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                              const at::Tensor& skip, const CodecSpec& norm, const CodecSpec& sum, const at::Tensor& seed_norm,
                              const at::Tensor& seed_sum, const at::Tensor& into, const ExtraBit& extra) {
  if (skip.sizes() != x.sizes()) fail(kOp, "x and skip must have the same sizes", skip.sizes());
  if (skip.scalar_type() != x.scalar_type()) fail(kOp, "x and skip must be of one type", c10::toString(skip.scalar_type()));
  const Place place(x.device(), kOp);
  NormAddResult result{packed_of(x, at::kFloat, norm), packed_of(x, x.scalar_type(), sum),
                       into.defined() ? into : at::empty(x.sizes(), x.options())};
  void* z = result.z.mutable_data_ptr();  // first: it may move memory that x or skip share with copies
  const cuda::NormParameters with{numbers(moments.mean), numbers(moments.rstd), numbers(gamma), numbers(beta)};
  cuda::norm_add_encode(code_of(result.norm, result.sum, extra), x.const_data_ptr(), skip.const_data_ptr(), dtype_of(x.scalar_type()), with,
                        seed_pointer(seed_norm), seed_pointer(seed_sum), z, place.stream());
  return result;
}

NormActSums norm_add_sums(const at::Tensor& g, const NormAddCodes& codes) {
  const Place place(g.device(), kOp);
  const auto floats = g.options().dtype(at::kFloat);
  const NormActSums sums{at::empty({g.size(1)}, floats), at::empty({g.size(1)}, floats)};
  const at::Tensor scratch = at::empty({cuda::norm_add_scratch_bytes()}, floats.dtype(at::kByte));
  cuda::norm_add_sums(code_of(codes.norm, codes.sum, codes.extra), g.const_data_ptr(), dtype_of(g.scalar_type()),
                      sums.beta.mutable_data_ptr<float>(), sums.gamma.mutable_data_ptr<float>(), scratch.mutable_data_ptr(),
                      place.stream());
  return sums;
}

void norm_add_back_(const at::Tensor& g, const at::Tensor& dx, const NormAddCodes& codes, const at::Tensor& gamma, const at::Tensor& rstd,
                    const NormActSums& sums, bool training) {
  const Place place(g.device(), kOp);
  void* own = g.mutable_data_ptr();
  void* to = dx.defined() ? dx.mutable_data_ptr() : nullptr;
  cuda::norm_add_back(code_of(codes.norm, codes.sum, codes.extra), own, dtype_of(g.scalar_type()), numbers(gamma), numbers(rstd),
                      training ? numbers(sums.beta) : nullptr, training ? numbers(sums.gamma) : nullptr, to == own ? nullptr : own, to,
                      place.stream());
}

}  // namespace satchel
