#include "satchel/tensor/norm_image.h"

#include <ATen/ops/empty.h>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/norm_image.h"
#include "satchel/kernels/cuda/per_sample.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_image";

const float* numbers(const at::Tensor& t) { return t.const_data_ptr<float>(); }
const void* values_or_null(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
const uint8_t* bits_or_null(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<uint8_t>() : nullptr; }

CodecLayout layout_for(at::IntArrayRef shape, const CodecSpec& spec) { return plan_of(shape, DType::f32, spec, 0, 1, kOp); }

/// Blocks that fill all values are the same with one sample and with many.
cuda::NormImageCode code_of(const BlockCode& block, int64_t channels) {
  return {1, block.grid.values, channels, block.grid.block, block.levels.bits, block.header, block.rounding, nullptr, nullptr, nullptr};
}

cuda::NormImageCode code_of(const PerSampleCode& mixed, int64_t channels) {
  return {mixed.samples, mixed.values, channels, mixed.block, 0, mixed.header, mixed.rounding, nullptr, nullptr, nullptr};
}

cuda::NormImageCode code_by_sample(const Packed& packed) {
  const PerSampleCode per_sample = per_sample_code(packed, kOp);
  cuda::NormImageCode code = code_of(per_sample, packed.shape[1]);
  auto* const bytes = static_cast<uint8_t*>(packed.bytes.data_ptr());
  code.codes = bytes;
  code.headers = bytes + per_sample.headers_at();
  code.entries = reinterpret_cast<const uint32_t*>(bytes + per_sample.entries_at());
  return code;
}

cuda::NormImageCode code_of(const Packed& packed) {
  if (packed.budget > 0) return code_by_sample(packed);
  const CodecLayout layout = layout_for(packed.shape, packed.spec);
  cuda::NormImageCode code = code_of(layout.block, packed.shape[1]);
  const Parts at = parts_of(layout, packed.bytes);
  code.codes = at.codes;
  code.headers = at.headers;
  return code;
}

F32Header* headers_in(const at::Tensor& ranges) { return reinterpret_cast<F32Header*>(ranges.mutable_data_ptr<float>()); }

cuda::NormParameters parameters_of(const NormImageInput& in) {
  return {numbers(in.moments.mean), numbers(in.moments.rstd), numbers(in.gamma), numbers(in.beta)};
}

/// The one pass; codes stand where `result` has room for them.
void encode(const NormImageInput& in, const F32Header* ranges, const at::Tensor& seed, NormImageResult& result, const Place& place) {
  if (in.skip.defined() && (in.skip.sizes() != in.x.sizes() || in.skip.scalar_type() != in.x.scalar_type())) {
    fail(kOp, "skip must have x's sizes and type", in.skip.sizes());
  }
  const bool relu = in.relu || in.skip.defined();
  if (relu) result.on = at::empty({in.x.numel() / 8}, in.x.options().dtype(at::kByte));
  result.z = in.into.defined() ? in.into : at::empty(in.x.sizes(), in.x.options());
  void* z = result.z.mutable_data_ptr();  // first: it may move memory that x or skip share with copies
  if (in.takes_ranges) result.z_ranges = at::empty({in.x.numel() / kRangeBlock, 2}, in.x.options().dtype(at::kFloat));
  const cuda::NormImagePass pass{in.x.const_data_ptr(),
                                 values_or_null(in.skip),
                                 ranges,
                                 relu ? result.on.mutable_data_ptr<uint8_t>() : nullptr,
                                 z,
                                 in.takes_ranges ? headers_in(result.z_ranges) : nullptr};
  cuda::norm_image_encode(code_of(result.code), pass, dtype_of(in.x.scalar_type()), parameters_of(in), seed_pointer(seed), place.stream());
}

}  // namespace

bool fuses_norm_image(const at::Tensor& x, const CodecSpec& spec, bool per_sample) {
  const bool floats = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!x.is_cuda() || !floats || x.numel() == 0 || !is_channels_last(x) || spec.side != Side::none) return false;
  if (per_sample) {
    if (!takes_per_sample_bits(spec)) return false;
    const PerSampleCode code{x.size(0), x.numel() / x.size(0), spec.block, x.size(0), spec.header, spec.rounding};
    return x.size(0) <= kMostSamples && cuda::norm_image_fits(code_of(code, x.size(1)));
  }
  const CodecLayout layout = layout_for(x.sizes(), spec);
  return layout.coding == Coding::block && !layout.projected && layout.block.grid.is_straight() && layout.block.levels.even &&
         cuda::norm_image_fits(code_of(layout.block, x.size(1)));
}

NormImageResult norm_image_encode(const NormImageInput& in, const CodecSpec& spec, const at::Tensor& seed) {
  const Place place(in.x.device(), kOp);
  NormImageResult result;
  Packed& packed = result.code;
  packed.shape = in.map.sizes().vec();
  packed.strides = strides_of(in.map);
  packed.spec = spec;
  packed.bytes = at::empty({layout_for(packed.shape, spec).at.total}, in.x.options().dtype(at::kByte));
  encode(in, nullptr, seed, result, place);
  return result;
}

NormImageResult norm_image_encode_per_sample(const NormImageInput& in, const CodecSpec& spec, const at::Tensor& seed, double mean_bits) {
  const Place place(in.x.device(), kOp);
  NormImageResult result;
  result.code = room_for_per_sample(in.map, at::kFloat, spec, mean_bits);
  const PerSampleCode per_sample = per_sample_code(result.code, kOp);
  const cuda::NormImageCode code = code_of(result.code);
  const at::Tensor ranges = at::empty({per_sample.samples * per_sample.blocks(), 2}, in.x.options().dtype(at::kFloat));
  const at::Tensor squares = at::empty({per_sample.samples}, in.x.options().dtype(at::kDouble));
  F32Header* const extremes = headers_in(ranges);
  cuda::norm_image_measure(code, in.x.const_data_ptr(), dtype_of(in.x.scalar_type()), parameters_of(in), extremes, place.stream());
  cuda::per_sample_squares(per_sample, extremes, squares.mutable_data_ptr<double>(), place.stream());
  cuda::per_sample_allocate(per_sample, squares.const_data_ptr<double>(), nullptr, code.codes, place.stream());
  encode(in, extremes, seed, result, place);
  return result;
}

NormActSums norm_image_sums(const at::Tensor& g, const Packed& packed, const at::Tensor& on) {
  const Place place(g.device(), kOp);
  const auto floats = g.options().dtype(at::kFloat);
  const NormActSums sums{at::empty({g.size(1)}, floats), at::empty({g.size(1)}, floats)};
  const at::Tensor scratch = at::empty({cuda::norm_image_scratch_bytes()}, floats.dtype(at::kByte));
  cuda::norm_image_sums(code_of(packed), bits_or_null(on), g.const_data_ptr(), dtype_of(g.scalar_type()),
                        sums.beta.mutable_data_ptr<float>(), sums.gamma.mutable_data_ptr<float>(), scratch.mutable_data_ptr(),
                        place.stream());
  return sums;
}

void norm_image_back_(const at::Tensor& g, const at::Tensor& dx, const Packed& packed, const at::Tensor& on, const at::Tensor& gamma,
                      const at::Tensor& rstd, const NormActSums& sums, at::Tensor* squares) {
  const Place place(g.device(), kOp);
  const int64_t samples = packed.shape[0];
  at::Tensor by_block;
  if (squares != nullptr) by_block = at::empty({samples, g.numel() / samples / kRangeBlock}, g.options().dtype(at::kFloat));
  void* own = g.mutable_data_ptr();
  void* to = dx.defined() ? dx.mutable_data_ptr() : nullptr;
  cuda::norm_image_back(code_of(packed), bits_or_null(on), own, dtype_of(g.scalar_type()), numbers(gamma), numbers(rstd),
                        numbers(sums.beta), numbers(sums.gamma),
                        {to == own ? nullptr : own, to, squares == nullptr ? nullptr : by_block.mutable_data_ptr<float>()}, place.stream());
  if (squares != nullptr) *squares = by_block.sum(1);
}

}  // namespace satchel
