#include "satchel/tensor/norm_low_pass.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/norm_low_pass.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_low_pass";

const float* numbers(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
float* numbers_of(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

CodecLayout layout_for(at::IntArrayRef shape, at::ScalarType type, const CodecSpec& spec) {
  return plan_of(shape, dtype_of(type), spec, 0, 1, kOp);
}

cuda::LowPassParts parts_for(const CodecLayout& layout, const Packed& code) {
  const Parts at = parts_of(layout, code.bytes);
  return {layout.maps, layout.block, code.shape[1], at.codes, at.headers, at.means};
}
cuda::LowPassParts parts_for(const Packed& code) { return parts_for(layout_for(code.shape, code.dtype, code.spec), code); }

Packed packed_like(const at::Tensor& x, const CodecSpec& spec, const CodecLayout& layout) {
  Packed packed;
  packed.bytes = at::empty({layout.at.total}, at::TensorOptions().device(x.device()).dtype(at::kByte));
  packed.shape = x.sizes().vec();
  packed.strides = strides_of(x);
  packed.dtype = x.scalar_type();
  packed.spec = spec;
  zero_gaps(layout, packed.bytes);
  return packed;
}

void check_like(const at::Tensor& x, const at::Tensor& other, const char* rule) {
  const bool alike = other.sizes() == x.sizes() && other.scalar_type() == x.scalar_type() && is_channels_last(other);
  if (!alike) fail(kOp, rule, other.toString());
}

at::Tensor scratch_for(const cuda::LowPassParts& parts, const at::Tensor& x) {
  return at::empty({cuda::norm_low_pass_scratch_bytes(parts)}, at::TensorOptions().device(x.device()).dtype(at::kByte));
}

/// Where backward reads the save; γ may be undefined.
cuda::NormParameters parameters(const NormLowPassSave& save, const at::Tensor& gamma) {
  return {numbers(save.moments.mean), numbers(save.moments.rstd), numbers(gamma), nullptr};
}

const uint8_t* bits_of_mask(const at::Tensor& on) { return on.defined() ? on.const_data_ptr<uint8_t>() : nullptr; }

}  // namespace

bool fuses_norm_low_pass(const at::Tensor& x, const CodecSpec& spec) {
  const bool floats = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!x.is_cuda() || !floats || x.dim() != 4 || x.numel() == 0 || !is_channels_last(x) || spec.side != Side::none) return false;
  const CodecLayout layout = layout_for(x.sizes(), x.scalar_type(), spec);
  const c10::DeviceGuard guard(x.device());  // GPUs differ in the shared memory that a thread block may have
  return layout.coding == Coding::low_pass && !layout.projected && layout.part == Part::both &&
         cuda::norm_low_pass_fits({layout.maps, layout.block, x.size(1), nullptr, nullptr, nullptr}, layout.type);
}

NormLowPassResult norm_low_pass_encode(const at::Tensor& x, const NormLowPassCall& call, const CodecSpec& spec, const at::Tensor& seed,
                                       const at::Tensor& into) {
  if (call.skip.defined()) check_like(x, call.skip, "skip must be like x");
  if (into.defined()) check_like(x, into, "the result's memory must be like x");
  const Place place(x.device(), kOp);
  const auto floats = at::TensorOptions().device(x.device()).dtype(at::kFloat);
  const CodecLayout layout = layout_for(x.sizes(), x.scalar_type(), spec);
  NormLowPassResult result;
  NormLowPassSave& save = result.save;
  save.code = packed_like(x, spec, layout);
  save.moments = {at::empty({x.size(1)}, floats), at::empty({x.size(1)}, floats)};
  if (call.relu) save.on = at::empty({x.numel() / 8}, floats.dtype(at::kByte));  // channels are a multiple of 8
  result.z = into.defined() ? into : at::empty_like(x);
  void* z = result.z.mutable_data_ptr();  // first: it may move memory that x or skip share with copies
  const cuda::LowPassParts parts = parts_for(layout, save.code);
  const cuda::Moments moments{numbers_of(save.moments.mean),
                              numbers_of(save.moments.rstd),
                              nullptr,
                              numbers_of(call.running_mean),
                              numbers_of(call.running_var),
                              call.eps,
                              call.momentum};
  cuda::norm_low_pass_measure(parts, x.const_data_ptr(), layout.type, moments, scratch_for(parts, x).mutable_data_ptr(), place.stream());
  cuda::norm_low_pass_encode(parts, x.const_data_ptr(), call.skip.defined() ? call.skip.const_data_ptr() : nullptr, layout.type,
                             {moments.mean, moments.rstd, numbers(call.gamma), numbers(call.beta)}, seed_pointer(seed),
                             save.on.defined() ? save.on.mutable_data_ptr<uint8_t>() : nullptr, z, place.stream());
  return result;
}

NormActSums norm_low_pass_sums(const at::Tensor& g, const NormLowPassSave& save) {
  const Place place(g.device(), kOp);
  const auto floats = at::TensorOptions().device(g.device()).dtype(at::kFloat);
  const NormActSums sums{at::empty({g.size(1)}, floats), at::empty({g.size(1)}, floats)};
  const cuda::LowPassParts parts = parts_for(save.code);
  cuda::norm_low_pass_sums(parts, g.const_data_ptr(), dtype_of(g.scalar_type()), bits_of_mask(save.on), parameters(save, {}),
                           numbers_of(sums.beta), numbers_of(sums.gamma), scratch_for(parts, g).mutable_data_ptr(), place.stream());
  return sums;
}

void norm_low_pass_back_(const at::Tensor& g, const at::Tensor& dx, const NormLowPassSave& save, const at::Tensor& gamma,
                         const NormActSums& sums) {
  const Place place(g.device(), kOp);
  void* own = g.mutable_data_ptr();
  void* to = dx.defined() ? dx.mutable_data_ptr() : nullptr;
  cuda::norm_low_pass_back(parts_for(save.code), own, dtype_of(g.scalar_type()), bits_of_mask(save.on), parameters(save, gamma),
                           numbers(sums.beta), numbers(sums.gamma), to == own ? nullptr : own, to, place.stream());
}

}  // namespace satchel
