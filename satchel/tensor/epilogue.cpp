#include "satchel/tensor/epilogue.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/kernels/cuda/per_sample.h"
#include "satchel/kernels/epilogue_codes.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/split_product.h"

namespace satchel {
namespace {

// Each with its own name in errors.
constexpr const char *kActOp = "norm_act", *kAddOp = "norm_add", *kBlockOp = "norm_block", *kImageOp = "norm_image",
                     *kLowPassOp = "norm_low_pass", *kProductOp = "norm_act_product";

const char* op_of(FusedNorm pass) {
  constexpr const char* kOps[] = {kActOp, kAddOp, kBlockOp, kImageOp, kLowPassOp};
  return kOps[static_cast<size_t>(pass)];
}

// Pointers; null for what is undefined. What kernels write goes through room().

const float* numbers(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
float* room(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }
const void* values(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
uint8_t* bits(const at::Tensor& t) { return t.defined() ? static_cast<uint8_t*>(t.data_ptr()) : nullptr; }
const uint64_t* seed_or_null(const at::Tensor& seed) { return seed.defined() ? seed_pointer(seed) : nullptr; }
F32Header* headers_in(const at::Tensor& ranges) { return reinterpret_cast<F32Header*>(room(ranges)); }

DType type_of(const at::Tensor& t) { return dtype_of(t.scalar_type()); }

at::Tensor floats(int64_t count, const at::Tensor& like) { return at::empty({count}, like.options().dtype(at::kFloat)); }
at::Tensor room_of_bytes(int64_t count, const at::Tensor& like) {
  return at::empty({count}, at::TensorOptions().device(like.device()).dtype(at::kByte));
}

bool is_cuda_float(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return x.is_cuda() && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && x.numel() > 0;
}

CodecLayout layout_for(at::IntArrayRef shape, at::ScalarType type, const CodecSpec& spec, const char* op) {
  return plan_of(shape, dtype_of(type), spec, 0, 1, op);
}
CodecLayout layout_for(const Packed& p, const char* op) { return plan_of(p.shape, dtype_of(p.dtype), p.spec, p.channels, p.inner, op); }

cuda::Moments moments_to(const ColumnMoments& to, const RunningMoments& running) {
  return {room(to.mean), room(to.rstd), nullptr, room(running.mean), room(running.var), running.eps, running.momentum};
}

/// Room for the code of values that lie as x does: rows, or an image in an order of its own.
Packed packed_like(const at::Tensor& x, at::ScalarType type, const CodecSpec& spec, int64_t channels, const char* op) {
  Packed packed;
  packed.shape = x.sizes().vec();
  packed.strides = x.dim() == 2 ? contiguous_strides(x.sizes()) : strides_of(x);
  packed.dtype = type;
  packed.spec = spec;
  packed.channels = channels;
  packed.bytes = room_of_bytes(layout_for(packed, op).at.total, x);
  return packed;
}

cuda::CodeParts code_parts(const CodecLayout& layout, const Packed& packed) { return code_parts(layout, packed.bytes.data_ptr()); }

/// The forward pass. z's memory comes first: asking for it may move memory that x or skip share with copies.
cuda::NormPass pass_of(const NormInput& in, const at::Tensor& z) {
  void* to = z.mutable_data_ptr();
  const cuda::NormParameters with{numbers(in.moments.mean), numbers(in.moments.rstd), numbers(in.gamma), numbers(in.beta)};
  return {values(in.x), type_of(in.x), with, to, values(in.skip)};
}

/// What a pass is about to write.
NormResult result_of(FusedNorm pass, const NormInput& in, Packed code) {
  NormSave save;
  save.pass = pass;
  save.code = std::move(code);
  save.moments = in.moments;
  return {std::move(save), in.into.defined() ? in.into : at::empty_like(in.x)};
}

/// The last pass: skip's gradient over g unless x's goes there; null sums: the statistics were not the batch's.
cuda::NormBack back_of(const at::Tensor& g, const at::Tensor& dx, const at::Tensor& gamma, const at::Tensor& rstd,
                       const NormActSums& sums) {
  void* own = g.mutable_data_ptr();
  void* to = dx.defined() ? dx.mutable_data_ptr() : nullptr;
  return {own, type_of(g), numbers(gamma), numbers(rstd), numbers(sums.beta), numbers(sums.gamma), to == own ? nullptr : own, to};
}

cuda::NormActCode act_code(const Packed& code, const at::Tensor& seed, const ChainOptions& options, const ExtraBit& extra) {
  cuda::NormActCode made =
      norm_act_code(layout_for(code, kActOp), code.bytes.data_ptr(), chain_of(code.shape, options), seed_or_null(seed));
  made.extra = extra_bit_view(code, extra);
  return made;
}

/// One or two, rows × columns of floats beside the code, each row in one piece, all of one width and type.
bool match(const Packed& code, const std::vector<at::Tensor>& gs) {
  const auto fits = [&](const at::Tensor& g) {
    return g.defined() && g.device() == code.bytes.device() && is_cuda_float(g) && g.dim() == 2 && g.size(0) == code.shape[0] &&
           (g.stride(1) == 1 || g.size(1) == 1) && g.size(1) == gs[0].size(1) && g.scalar_type() == gs[0].scalar_type();
  };
  return !gs.empty() && gs.size() <= 2 && std::ranges::all_of(gs, fits);
}

cuda::ProductGradients gradients_of(const std::vector<at::Tensor>& gs) {
  cuda::ProductGradients p;
  p.type = type_of(gs[0]);
  p.tf32 = allows_tf32();
  p.count = static_cast<int>(gs.size());
  p.width = gs[0].size(1);
  for (size_t i = 0; i < gs.size(); ++i) {
    p.g[i] = values(gs[i]);
    p.stride[i] = gs[i].stride(0);
  }
  return p;
}

cuda::NormAddCode add_code(const NormSave& s) {
  NormAddLayouts layouts{layout_for(s.code, kAddOp), std::nullopt};
  if (!s.sum.bytes.defined()) return norm_add_code(layouts, s.code.shape[1], s.code.bytes.data_ptr(), nullptr);
  layouts.sum = layout_for(s.sum, kAddOp);
  cuda::NormAddCode code = norm_add_code(layouts, s.code.shape[1], s.code.bytes.data_ptr(), s.sum.bytes.data_ptr());
  code.extra = extra_bit_view(s.sum, s.extra);
  return code;
}

cuda::NormBlockCode block_code(const NormSave& s) {
  const CodecLayout layout = layout_for(s.code, kBlockOp);
  return {layout.block,         chain_of(s.code.shape, s.chain), code_parts(layout, s.code), bits(s.on), bits(s.kept),
          seed_or_null(s.seed), numbers(s.moments.mean),         numbers(s.moments.rstd)};
}

/// Blocks that fill all values are the same with one sample and with many.
cuda::NormImageCode image_code(const BlockCode& block, int64_t channels) {
  return {1, block.grid.values, channels, block.grid.block, block.levels.bits, block.header, block.rounding};
}
cuda::NormImageCode image_code(const PerSampleCode& c, int64_t channels) {
  return {c.samples, c.values, channels, c.block, 0, c.header, c.rounding};
}

cuda::NormImageCode image_code(const NormSave& s) {
  cuda::NormImageCode code;
  if (s.code.budget > 0) {
    const PerSampleCode per_sample = per_sample_code(s.code, kImageOp);
    uint8_t* bytes = bits(s.code.bytes);
    code = image_code(per_sample, s.code.shape[1]);
    code.at = {bytes, bytes + per_sample.headers_at()};
    code.entries = reinterpret_cast<const uint32_t*>(bytes + per_sample.entries_at());
  } else {
    const CodecLayout layout = layout_for(s.code, kImageOp);
    code = image_code(layout.block, s.code.shape[1]);
    code.at = code_parts(layout, s.code);
  }
  code.on = bits(s.on);
  return code;
}

cuda::NormLowPassCode low_pass_code(const NormSave& s) {
  const CodecLayout layout = layout_for(s.code, kLowPassOp);
  const Parts at = parts_of(layout, s.code.bytes);
  return {{layout.maps, layout.block, s.code.shape[1], at.codes, at.headers, at.means},
          bits(s.on),
          numbers(s.moments.mean),
          numbers(s.moments.rstd)};
}

/// Calls run(code, bytes of its sums' scratch) with the pass's own view of what is kept.
template <class Run>
void with_code(const NormSave& s, const Run& run) {
  switch (s.pass) {
    case FusedNorm::act: return run(act_code(s.code, s.seed, s.chain, s.extra), cuda::norm_act_scratch_bytes());
    case FusedNorm::add: return run(add_code(s), cuda::norm_scratch_bytes());
    case FusedNorm::block: return run(block_code(s), cuda::norm_scratch_bytes());
    case FusedNorm::image: return run(image_code(s), cuda::norm_scratch_bytes());
    case FusedNorm::low_pass: {
      const cuda::NormLowPassCode code = low_pass_code(s);
      return run(code, cuda::norm_low_pass_scratch_bytes(code.parts));
    }
  }
}

/// Bits of samples by the extremes of their blocks, which come back: float32[blocks, 2].
at::Tensor allocate_bits(const NormInput& in, const NormSave& save, const Place& place) {
  const PerSampleCode per_sample = per_sample_code(save.code, kImageOp);
  const cuda::NormImageCode code = image_code(save);
  const at::Tensor ranges = at::empty({per_sample.samples * per_sample.blocks(), 2}, in.x.options().dtype(at::kFloat));
  const at::Tensor squares = at::empty({per_sample.samples}, in.x.options().dtype(at::kDouble));
  const cuda::NormParameters with{numbers(in.moments.mean), numbers(in.moments.rstd), nullptr, nullptr};
  cuda::norm_image_measure(code, {values(in.x), type_of(in.x), with, nullptr}, headers_in(ranges), place.stream());
  cuda::per_sample_squares(per_sample, headers_in(ranges), squares.mutable_data_ptr<double>(), place.stream());
  cuda::per_sample_allocate(per_sample, squares.const_data_ptr<double>(), nullptr, code.at.codes, place.stream());
  return ranges;
}

/// Throws the rule unless `other`, where it is given, has x's sizes and type, without gaps.
void check_like(const at::Tensor& x, const at::Tensor& other, const char* op, const char* rule) {
  if (!other.defined()) return;
  const bool whole = other.is_contiguous() || is_channels_last(other);
  if (!whole || other.sizes() != x.sizes() || other.scalar_type() != x.scalar_type()) fail(op, rule, other.sizes());
}

}  // namespace

at::Tensor for_kernels(const at::Tensor& x) {
  const at::Tensor rows = x.contiguous();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlign == 0 ? rows : rows.clone();
}

ColumnMoments column_moments(const at::Tensor& x, const RunningMoments& running) {
  const Place place(x.device(), "column_moments");
  const int64_t channels = x.size(1);
  const ColumnMoments result{floats(channels, x), floats(channels, x)};
  const at::Tensor scratch = room_of_bytes(cuda::column_moments_scratch_bytes(channels), x);
  cuda::column_moments(values(x), type_of(x), x.size(0), channels, moments_to(result, running), scratch.mutable_data_ptr(), place.stream());
  return result;
}

bool sums_columns(const at::Tensor& g) {
  const bool known = g.scalar_type() == at::kFloat || g.scalar_type() == at::kHalf || g.scalar_type() == at::kBFloat16;
  return cuda::compiled() && g.is_cuda() && known && g.dim() == 2 && g.numel() > 0 && g.is_contiguous() && !g.is_neg();
}

at::Tensor sum_columns(const at::Tensor& g) {
  const Place place(g.device(), "column_sums");
  const at::Tensor sums = floats(g.size(1), g), scratch = room_of_bytes(cuda::column_sums_scratch_bytes(g.size(0), g.size(1)), g);
  cuda::column_sums(values(g), type_of(g), g.size(0), g.size(1), room(sums), scratch.mutable_data_ptr(), place.stream());
  return sums;
}

void MomentsOfParts::add(const at::Tensor& x) {
  const Place place(x.device(), "column_moments");
  const int64_t channels = x.size(1), before = rows_;
  const ColumnMoments some{floats(channels, x), floats(channels, x)};
  const at::Tensor var = floats(channels, x), scratch = room_of_bytes(cuda::column_moments_scratch_bytes(channels), x);
  cuda::Moments to = moments_to(some, {});
  to.var = room(var);
  cuda::column_moments(values(x), type_of(x), x.size(0), channels, to, scratch.mutable_data_ptr(), place.stream());
  const at::Tensor mean = some.mean.to(at::kDouble), squares = var.to(at::kDouble).mul_(static_cast<double>(x.size(0)));
  rows_ += x.size(0);
  if (before == 0) {
    mean_ = mean;
    squares_ = squares;
    return;
  }
  const double share = static_cast<double>(x.size(0)) / static_cast<double>(rows_);
  const at::Tensor apart = mean.sub(mean_);
  squares_.add_(squares).add_(apart.square(), share * static_cast<double>(before));
  mean_.add_(apart, share);
}

ColumnMoments MomentsOfParts::all(const RunningMoments& running) const {
  if (rows_ == 0) fail("column_moments", "there must be at least one row", 0);
  const auto blend = [&](const at::Tensor& old, const at::Tensor& now) {
    if (old.defined()) old.mul_(1 - running.momentum).add_(now.to(at::kFloat), running.momentum);
  };
  blend(running.mean, mean_);
  blend(running.var, squares_.div(static_cast<double>(rows_ - 1)));
  const at::Tensor rstd = squares_.div(static_cast<double>(rows_)).add_(running.eps).rsqrt_();
  return {mean_.to(at::kFloat), rstd.to(at::kFloat)};
}

void norm_rows_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& along, const at::Tensor& offset) {
  const Place place(g.device(), "norm");
  cuda::norm_rows_back(g.mutable_data_ptr(), values(x), type_of(g), g.size(0), g.size(1), {numbers(scale), numbers(along), numbers(offset)},
                       place.stream());
}

bool fuses_norm_act(const at::Tensor& x, const CodecSpec& spec) {
  return x.is_cuda() && x.dim() == 2 && norm_act_layout(x.size(0), x.size(1), spec, kActOp);
}

bool fuses_norm_add(const at::Tensor& x, const CodecSpec& norm, const std::optional<CodecSpec>& sum) {
  return is_cuda_float(x) && x.dim() == 2 && norm_add_layouts(x.size(0), x.size(1), type_of(x), norm, sum, kAddOp);
}

bool fuses_norm_block(const at::Tensor& x, const CodecSpec& spec) {
  if (!is_cuda_float(x) || x.dim() != 2 || spec.side != Side::none) return false;
  const CodecLayout layout = layout_for(x.sizes(), x.scalar_type(), spec, kBlockOp);
  return is_block_code(layout) && cuda::norm_block_fits(layout.block, x.size(1));
}

bool fuses_norm_image(const at::Tensor& x, const CodecSpec& spec, bool per_sample) {
  if (!is_cuda_float(x) || !is_channels_last(x) || spec.side != Side::none) return false;
  if (per_sample) {
    if (!takes_per_sample_bits(spec)) return false;
    const PerSampleCode code{x.size(0), x.numel() / x.size(0), spec.block, x.size(0), spec.header, spec.rounding};
    return x.size(0) <= kMostSamples && cuda::norm_image_fits(image_code(code, x.size(1)));
  }
  const CodecLayout layout = layout_for(x.sizes(), at::kFloat, spec, kImageOp);
  return is_block_code(layout) && layout.block.grid.is_straight() && layout.block.levels.even &&
         cuda::norm_image_fits(image_code(layout.block, x.size(1)));
}

bool fuses_norm_low_pass(const at::Tensor& x, const CodecSpec& spec) {
  if (!is_cuda_float(x) || x.dim() != 4 || !is_channels_last(x) || spec.side != Side::none) return false;
  const CodecLayout layout = layout_for(x.sizes(), x.scalar_type(), spec, kLowPassOp);
  const c10::DeviceGuard guard(x.device());  // GPUs differ in the shared memory that a thread block may have
  return layout.coding == Coding::low_pass && !layout.projected && layout.part == Part::both &&
         cuda::norm_low_pass_fits({layout.maps, layout.block, x.size(1), nullptr, nullptr, nullptr}, layout.type);
}

NormResult norm_act_encode(const NormInput& in, const CodeChoice& how, const ChainOptions& options, const ExtraBit& extra) {
  const Place place(in.x.device(), kActOp);
  NormResult result = result_of(FusedNorm::act, in, packed_like(in.x, at::kFloat, how.spec, in.x.size(1), kActOp));
  NormSave& save = result.save;
  save.chain = options;
  save.extra = extra;
  if (options.dropout > 0) save.seed = how.seed;
  const cuda::NormPass pass = pass_of(in, result.z);
  const at::Tensor scratch = room_of_bytes(cuda::norm_act_scratch_bytes(), in.x);
  cuda::norm_encode(act_code(save.code, how.seed, options, extra), pass, scratch.mutable_data_ptr(), place.stream());
  return result;
}

NormResult norm_add_encode(const NormInput& in, const CodeChoice& norm, const CodeChoice& sum, const ExtraBit& extra, const RowsOf& rows,
                           int64_t each) {
  const bool adds = in.skip.defined();
  if (adds && in.skip.sizes() != in.x.sizes()) fail(kAddOp, "x and skip must have the same sizes", in.skip.sizes());
  if (adds && in.skip.scalar_type() != in.x.scalar_type())
    fail(kAddOp, "x and skip must be of one type", c10::toString(in.skip.scalar_type()));
  if (rows && !in.into.defined()) fail(kAddOp, "the result's memory must be given where x comes in parts");
  const Place place(in.x.device(), kAddOp);
  NormResult result = result_of(FusedNorm::add, in, packed_like(in.x, at::kFloat, norm.spec, 0, kAddOp));
  if (adds) result.save.sum = packed_like(in.x, in.x.scalar_type(), sum.spec, 0, kAddOp);
  result.save.extra = extra;
  cuda::NormAddCode code = add_code(result.save);
  code.norm_seed = seed_pointer(norm.seed);
  code.sum_seed = seed_or_null(sum.seed);
  if (!rows) cuda::norm_encode(code, pass_of(in, result.z), place.stream());
  const int64_t count = rows ? in.x.size(0) : 0;
  for (int64_t first = 0, last = 0; first < count; first = last) {
    last = (count - first - each) * in.x.size(1) < kRangeBlock ? count : first + each;  // less than a block goes with the part before
    NormInput part = in;
    part.x = for_kernels(rows(first, last));
    cuda::NormPass pass = pass_of(part, result.z);
    pass.first_row = first;
    pass.rows = part.x.size(0);
    cuda::norm_encode(code, pass, place.stream());
  }
  return result;
}

NormResult norm_block_encode(const NormInput& in, const CodeChoice& how, const NormBlockDropout& dropout) {
  const Place place(in.x.device(), kBlockOp);
  NormResult result = result_of(FusedNorm::block, in, packed_like(in.x, in.x.scalar_type(), how.spec, 0, kBlockOp));
  NormSave& save = result.save;
  save.on = room_of_bytes(ceil_div(in.x.numel(), 8), in.x);
  save.chain.dropout = dropout.chance;
  if (dropout.chance > 0 && dropout.keeps_mask) save.kept = at::empty_like(save.on);
  if (dropout.chance > 0 && !dropout.keeps_mask) save.seed = dropout.seed;
  const cuda::NormPass pass = pass_of(in, result.z);
  cuda::NormBlockCode code = block_code(save);
  code.code_seed = seed_pointer(how.seed);
  code.drop_seed = seed_or_null(dropout.seed);
  cuda::norm_encode(code, pass, place.stream());
  return result;
}

NormResult norm_image_encode(const NormInput& in, const CodeChoice& how, double mean_bits) {
  check_like(in.x, in.skip, kImageOp, "skip must have x's sizes and type");
  const Place place(in.x.device(), kImageOp);
  const bool per_sample = mean_bits > 0;
  NormResult result = result_of(FusedNorm::image, in,
                                per_sample ? room_for_per_sample(in.image, at::kFloat, how.spec, mean_bits)
                                           : packed_like(in.image, at::kFloat, how.spec, 0, kImageOp));
  NormSave& save = result.save;
  const at::Tensor ranges = per_sample ? allocate_bits(in, save, place) : at::Tensor();
  if (in.relu || in.skip.defined()) save.on = room_of_bytes(in.x.numel() / 8, in.x);
  if (in.takes_ranges) result.z_ranges = at::empty({in.x.numel() / kRangeBlock, 2}, in.x.options().dtype(at::kFloat));
  const cuda::NormPass pass = pass_of(in, result.z);
  cuda::NormImageCode code = image_code(save);
  code.seed = seed_pointer(how.seed);
  cuda::norm_encode(code, pass, headers_in(ranges), headers_in(result.z_ranges), place.stream());
  return result;
}

NormResult norm_low_pass_encode(const NormInput& in, const RunningMoments& running, const CodeChoice& how) {
  check_like(in.x, in.skip, kLowPassOp, "skip must be like x");
  check_like(in.x, in.into, kLowPassOp, "the result's memory must be like x");
  const Place place(in.x.device(), kLowPassOp);
  NormResult result = result_of(FusedNorm::low_pass, in, packed_like(in.image, in.x.scalar_type(), how.spec, 0, kLowPassOp));
  NormSave& save = result.save;
  zero_gaps(layout_for(save.code, kLowPassOp), save.code.bytes);
  save.moments = {floats(in.x.size(1), in.x), floats(in.x.size(1), in.x)};
  if (in.relu) save.on = room_of_bytes(in.x.numel() / 8, in.x);  // channels are a multiple of 8
  const cuda::NormPass pass = pass_of({in.x, save.moments, in.gamma, in.beta, in.skip}, result.z);
  const cuda::NormLowPassCode code = low_pass_code(save);
  const at::Tensor scratch = room_of_bytes(cuda::norm_low_pass_scratch_bytes(code.parts), in.x);
  cuda::norm_low_pass_measure(code.parts, pass.x, pass.type, moments_to(save.moments, running), scratch.mutable_data_ptr(), place.stream());
  cuda::norm_encode(code, pass, seed_pointer(how.seed), place.stream());
  return result;
}

NormActSums norm_sums(const at::Tensor& g, const NormSave& save) {
  const Place place(g.device(), op_of(save.pass));
  NormActSums sums{floats(g.size(1), g), floats(g.size(1), g)};
  with_code(save, [&](const auto& code, int64_t scratch_bytes) {
    const at::Tensor scratch = room_of_bytes(scratch_bytes, g);
    cuda::norm_sums(code, {values(g), type_of(g), room(sums.beta), room(sums.gamma), scratch.mutable_data_ptr()}, place.stream());
  });
  return sums;
}

void norm_back_(const at::Tensor& g, const at::Tensor& dx, const NormSave& save, const at::Tensor& gamma, const NormActSums& sums,
                at::Tensor* squares) {
  const Place place(g.device(), op_of(save.pass));
  const int64_t samples = save.code.shape[0];
  at::Tensor by_block;
  if (squares != nullptr) by_block = at::empty({samples, g.numel() / samples / kRangeBlock}, g.options().dtype(at::kFloat));
  cuda::NormBack back = back_of(g, dx, gamma, save.moments.rstd, sums);
  back.squares = room(by_block);
  with_code(save, [&](const auto& code, int64_t) { cuda::norm_back(code, back, place.stream()); });
  if (squares != nullptr) *squares = by_block.sum(1);
}

void norm_back_rows_(const at::Tensor& g, const at::Tensor& dx, int64_t first, const NormSave& save, const at::Tensor& gamma,
                     const NormActSums& sums) {
  const int64_t channels = g.size(1), begin = first * channels, block = begin / kRangeBlock;
  if (save.pass != FusedNorm::add || save.extra.defined()) fail(kAddOp, "rows can be had of add alone, without an extra bit", "another");
  if (begin % (4 * kRangeBlock) != 0) fail(kAddOp, "rows must start with a fourth block", first);  // headers at multiples of 16 bytes
  const Place place(g.device(), kAddOp);
  const CodecLayout norm = layout_for(save.code, kAddOp), sum = layout_for(save.sum, kAddOp);
  cuda::NormAddCode code = add_code(save);
  code.norm.grid.values = code.norm.grid.span = code.sum.grid.values = code.sum.grid.span = dx.numel();
  code.norm_at.codes += begin / 8 * norm.block.levels.bits;
  code.norm_at.headers = static_cast<uint8_t*>(code.norm_at.headers) + block * header_bytes(norm.block.header);
  code.sum_at.codes += begin / 8 * sum.side.table.bits;
  code.sum_at.headers = static_cast<uint8_t*>(code.sum_at.headers) + block * header_bytes(sum.side.header);
  cuda::NormBack back = back_of(g.narrow(0, first, dx.size(0)), dx, gamma, save.moments.rstd, sums);
  back.rows = g.size(0);
  cuda::norm_back(code, back, place.stream());
}

// What else is read of norm_act's code.

bool fuses_norm_act(const Packed& code) {
  if (!code.bytes.is_cuda() || code.spec.side != Side::one_sided || code.shape.size() != 2 || code.channels != code.shape[1]) return false;
  const CodecLayout layout = check_packed(code, kActOp);
  return layout.coding == Coding::side && layout.values > 0 && cuda::norm_act_fits(layout.side);
}

at::Tensor norm_act_input(const Packed& code, const at::Tensor& seed, const ChainOptions& options, int64_t first, int64_t last,
                          at::ScalarType type, const ExtraBit& extra) {
  const Place place(code.bytes.device(), kActOp);
  const at::Tensor z = at::empty({last - first, code.shape[1]}, code.bytes.options().dtype(type));
  cuda::norm_act_input(act_code(code, seed, options, extra), first, last, z.mutable_data_ptr(), dtype_of(type), place.stream());
  return z;
}

bool fuses_norm_act_product(const Packed& code, const std::vector<at::Tensor>& gs) {
  if (!fuses_norm_act(code) || !match(code, gs)) return false;
  const Place place(code.bytes.device(), kProductOp);
  return cuda::norm_act_product_fits(check_packed(code, kProductOp).side, gradients_of(gs));
}

std::vector<at::Tensor> norm_act_product(const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                                         const std::vector<at::Tensor>& gs) {
  if (!fuses_norm_act_product(code, gs)) fail(kProductOp, "fuses_norm_act_product must be true of code and gradients");
  const Place place(code.bytes.device(), kProductOp);
  const SideCode side = check_packed(code, kProductOp).side;
  cuda::ProductGradients p = gradients_of(gs);
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < gs.size(); ++i) {
    products.push_back(at::empty({p.width, code.shape[1]}, code.bytes.options().dtype(at::kFloat)));
    p.out[i] = room(products[i]);
  }
  const at::Tensor scratch = room_of_bytes(cuda::norm_act_product_scratch_bytes(side, p), code.bytes);
  cuda::norm_act_product(side, chain_of(code.shape, options), code.bytes.const_data_ptr<uint8_t>(), seed_or_null(seed), p,
                         scratch.mutable_data_ptr(), place.stream());
  return products;
}

}  // namespace satchel
