#include "satchel/tensor/norm_block.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "satchel/kernels/cuda/norm_block.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

constexpr const char* kOp = "norm_block";

CodecLayout layout_for(at::IntArrayRef shape, at::ScalarType type, const CodecSpec& spec) {
  return plan_of(shape, dtype_of(type), spec, 0, 1, kOp);
}

const float* numbers(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }

const uint64_t* seed_or_null(const at::Tensor& seed) { return seed.defined() ? seed_pointer(seed) : nullptr; }

uint8_t* bits_or_null(const at::Tensor& mask) { return mask.defined() ? static_cast<uint8_t*>(mask.data_ptr()) : nullptr; }

/// The saves and what else both ways need.
struct Call {
  CodecLayout layout;
  Chain chain;
  cuda::NormBlockSaves saves;
  cuda::NormParameters with;

  Call(const NormBlockSave& s, const at::Tensor& gamma, const at::Tensor& beta)
      : layout(layout_for(s.code.shape, s.code.dtype, s.code.spec)),
        chain(chain_of(s.code.shape, {s.dropout, 0})),
        with{numbers(s.moments.mean), numbers(s.moments.rstd), numbers(gamma), numbers(beta)} {
    const Parts parts = parts_of(layout, s.code.bytes);
    saves = {parts.codes, parts.headers, bits_or_null(s.on), bits_or_null(s.kept)};
  }
};

}  // namespace

bool fuses_norm_block(const at::Tensor& x, const CodecSpec& spec) {
  const bool floats = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!x.is_cuda() || !floats || x.dim() != 2 || x.numel() == 0 || spec.side != Side::none) return false;
  const CodecLayout layout = layout_for(x.sizes(), x.scalar_type(), spec);
  return layout.coding == Coding::block && !layout.projected && cuda::norm_block_fits(layout.block, x.size(1));
}

at::Tensor for_kernels(const at::Tensor& x) {
  const at::Tensor rows = x.contiguous();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlign == 0 ? rows : rows.clone();
}

NormBlockResult norm_block_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                                  const CodecSpec& spec, const NormBlockSeeds& seeds, double dropout, bool keeps_mask,
                                  const at::Tensor& into) {
  const Place place(x.device(), kOp);
  const auto bytes = x.options().dtype(at::kByte);
  NormBlockSave save;
  save.code.shape = x.sizes().vec();
  save.code.strides = contiguous_strides(x.sizes());
  save.code.dtype = x.scalar_type();
  save.code.spec = spec;
  save.code.bytes = at::empty({layout_for(x.sizes(), x.scalar_type(), spec).at.total}, bytes);
  save.moments = moments;
  save.on = at::empty({ceil_div(x.numel(), 8)}, bytes);
  save.dropout = dropout;
  if (dropout > 0 && keeps_mask) save.kept = at::empty_like(save.on);
  if (dropout > 0 && !keeps_mask) save.seed = seeds.dropout;
  const at::Tensor z = into.defined() ? into : at::empty(x.sizes(), x.options());
  void* to = z.mutable_data_ptr();  // first: it may move memory that x shares with copies
  const Call call(save, gamma, beta);
  cuda::norm_block_encode(call.layout.block, call.chain, x.const_data_ptr(), call.layout.type, call.with, seed_pointer(seeds.code),
                          seed_or_null(seeds.dropout), call.saves, to, place.stream());
  return {std::move(save), z};
}

NormActSums norm_block_sums(const at::Tensor& g, const NormBlockSave& save) {
  const Place place(g.device(), kOp);
  const auto floats = g.options().dtype(at::kFloat);
  const NormActSums sums{at::empty({g.size(1)}, floats), at::empty({g.size(1)}, floats)};
  const at::Tensor scratch = at::empty({cuda::norm_block_scratch_bytes()}, floats.dtype(at::kByte));
  const Call call(save, {}, {});
  cuda::norm_block_sums(call.layout.block, call.chain, g.const_data_ptr(), dtype_of(g.scalar_type()), call.with, seed_or_null(save.seed),
                        call.saves, sums.beta.mutable_data_ptr<float>(), sums.gamma.mutable_data_ptr<float>(), scratch.mutable_data_ptr(),
                        place.stream());
  return sums;
}

void norm_block_back_(const at::Tensor& g, const NormBlockSave& save, const at::Tensor& gamma, const NormActSums& sums) {
  const Place place(g.device(), kOp);
  void* to = g.mutable_data_ptr();
  const Call call(save, gamma, {});
  cuda::norm_block_back(call.layout.block, call.chain, call.with, seed_or_null(save.seed), call.saves, numbers(sums.beta),
                        numbers(sums.gamma), to, dtype_of(g.scalar_type()), place.stream());
}

}  // namespace satchel
