#include "satchel/tensor/norm_act.h"

#include <ATen/ops/empty.h>

#include "satchel/kernels/cuda/norm_rows.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_act";

CodecLayout layout_for(at::IntArrayRef shape, const CodecSpec& spec) { return plan_of(shape, DType::f32, spec, shape[1], 1, kOp); }

const uint64_t* seed_or_null(const at::Tensor& seed) { return seed.defined() ? seed_pointer(seed) : nullptr; }

DType type_of(const at::Tensor& t) { return dtype_of(t.scalar_type()); }

at::TensorOptions floats(const at::Tensor& like) { return like.options().dtype(at::kFloat); }

float* numbers(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

/// The plan's code with its off plane, if any, in `bytes`.
SideCode code_in(const CodecLayout& layout, const at::Tensor& bytes) { return side_code_of(layout, parts_of(layout, bytes)); }

at::Tensor scratch_of(const CodecLayout& layout, const at::Tensor& like) {
  return at::empty({cuda::norm_act_scratch_bytes(layout.side)}, like.options().dtype(at::kByte));
}

}  // namespace

bool fuses_norm_act(const at::Tensor& x, const CodecSpec& spec) {
  if (!x.is_cuda() || x.dim() != 2 || x.numel() == 0 || spec.side != Side::one_sided) return false;
  const CodecLayout layout = layout_for(x.sizes(), spec);
  return layout.coding == Coding::side && cuda::norm_act_fits(layout.side);
}

bool fuses_norm_act(const Packed& code) {
  if (!code.bytes.is_cuda() || code.spec.side != Side::one_sided || code.shape.size() != 2 || code.channels != code.shape[1]) return false;
  const CodecLayout layout = check_packed(code, kOp);
  return layout.coding == Coding::side && layout.values > 0 && cuda::norm_act_fits(layout.side);
}

ColumnMoments column_moments(const at::Tensor& x, const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                             double momentum) {
  const Place place(x.device(), kOp);
  const int64_t channels = x.size(1);
  const ColumnMoments result{at::empty({channels}, floats(x)), at::empty({channels}, floats(x))};
  const at::Tensor scratch = at::empty({cuda::column_moments_scratch_bytes(channels)}, x.options().dtype(at::kByte));
  const cuda::Moments to{numbers(result.mean), numbers(result.rstd), nullptr, numbers(running_mean), numbers(running_var), eps, momentum};
  cuda::column_moments(x.const_data_ptr(), type_of(x), x.size(0), channels, to, scratch.mutable_data_ptr(), place.stream());
  return result;
}

NormActResult norm_act_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                              const CodecSpec& spec, const at::Tensor& seed, const ChainOptions& options, const at::Tensor& into,
                              const ExtraBit& extra) {
  const Place place(x.device(), kOp);
  const CodecLayout layout = layout_for(x.sizes(), spec);
  NormActResult result;
  result.code.bytes = at::empty({layout.at.total}, x.options().dtype(at::kByte));
  result.code.shape = x.sizes().vec();
  result.code.strides = contiguous_strides(x.sizes());
  result.code.spec = spec;
  result.code.channels = layout.channels;
  result.z = into.defined() ? into : at::empty(x.sizes(), x.options());
  void* z = result.z.mutable_data_ptr();  // first: it may move memory that x shares with copies
  const at::Tensor scratch = scratch_of(layout, x);
  const cuda::NormParameters with{moments.mean.const_data_ptr<float>(), moments.rstd.const_data_ptr<float>(), gamma.const_data_ptr<float>(),
                                  beta.const_data_ptr<float>()};
  cuda::norm_act_encode(code_in(layout, result.code.bytes), chain_of(x.sizes(), options), x.const_data_ptr(), type_of(x), with,
                        seed_pointer(seed), result.code.bytes.mutable_data_ptr<uint8_t>(), z, scratch.mutable_data_ptr(), place.stream(),
                        extra_bit_view(result.code, extra));
  return result;
}

NormActSums norm_act_sums(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                          const ExtraBit& extra) {
  const Place place(g.device(), kOp);
  const CodecLayout layout = layout_for(code.shape, code.spec);
  const NormActSums sums{at::empty({g.size(1)}, floats(g)), at::empty({g.size(1)}, floats(g))};
  const at::Tensor scratch = scratch_of(layout, g);
  cuda::norm_act_sums(code_in(layout, code.bytes), chain_of(code.shape, options), g.const_data_ptr(), type_of(g),
                      code.bytes.const_data_ptr<uint8_t>(), seed_or_null(seed), numbers(sums.beta), numbers(sums.gamma),
                      scratch.mutable_data_ptr(), place.stream(), extra_bit_view(code, extra));
  return sums;
}

void norm_act_back_(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options, const at::Tensor& rstd,
                    const NormActSums& sums, bool training, const ExtraBit& extra) {
  const Place place(g.device(), kOp);
  const CodecLayout layout = layout_for(code.shape, code.spec);
  cuda::norm_act_back(code_in(layout, code.bytes), chain_of(code.shape, options), code.bytes.const_data_ptr<uint8_t>(), seed_or_null(seed),
                      rstd.const_data_ptr<float>(), training ? sums.beta.const_data_ptr<float>() : nullptr,
                      training ? sums.gamma.const_data_ptr<float>() : nullptr, g.mutable_data_ptr(), type_of(g), place.stream(),
                      extra_bit_view(code, extra));
}

at::Tensor norm_act_input(const Packed& code, const at::Tensor& seed, const ChainOptions& options, int64_t first, int64_t last,
                          at::ScalarType type, const ExtraBit& extra) {
  const Place place(code.bytes.device(), kOp);
  const CodecLayout layout = layout_for(code.shape, code.spec);
  const at::Tensor z = at::empty({last - first, code.shape[1]}, code.bytes.options().dtype(type));
  cuda::norm_act_input(code_in(layout, code.bytes), chain_of(code.shape, options), code.bytes.const_data_ptr<uint8_t>(), seed_or_null(seed),
                       first, last, z.mutable_data_ptr(), dtype_of(type), place.stream(), extra_bit_view(code, extra));
  return z;
}

void norm_rows_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& along, const at::Tensor& offset) {
  const Place place(g.device(), kOp);
  cuda::norm_rows_back(g.mutable_data_ptr(), x.const_data_ptr(), type_of(g), g.size(0), g.size(1),
                       {numbers(scale), numbers(along), numbers(offset)}, place.stream());
}

}  // namespace satchel
