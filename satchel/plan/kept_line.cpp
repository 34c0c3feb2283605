#include "satchel/plan/kept_line.h"

#include <variant>

#include "satchel/core/error.h"
#include "satchel/core/per_sample.h"
#include "satchel/kernels/codec_layout.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";

int64_t code_bytes_of(const Keep& keep, const KeptSizes& sizes) {
  if (has_per_sample_bits(keep)) return per_sample_bytes(sizes.coded, keep.spec);
  const bool threshold = keep.spec.side == Side::one_sided || keep.spec.side == Side::both;
  const int64_t thresholds = !threshold ? 0 : keep.of == Of::normalised ? sizes.coded.back() : 1;
  const DType type = keep.of == Of::normalised ? DType::f32 : sizes.computed;
  return plan_of(sizes.coded, type, keep.spec, thresholds, 1, kOp).at.total;
}

}  // namespace

bool has_per_sample_bits(const Keep& keep) { return keep.per_sample_bits && keep.spec.bits <= kMostSampleBits; }

int64_t per_sample_bytes(const std::vector<int64_t>& shape, const CodecSpec& spec) {
  const bool fits = spec.levels == Levels::even && spec.block > 0 && spec.block % kGroup == 0 && spec.side == Side::none &&
                    std::holds_alternative<Identity>(spec.transform);
  if (!fits) {
    fail(kOp, "bits by sample take even levels, blocks of a multiple of 8 values and no transform (adaptive=no takes others)",
         to_string(spec));
  }
  if (shape[0] > kMostSamples) fail(kOp, "bits by sample take at most 2^25 samples (adaptive=no takes more)", shape[0]);
  const int64_t values = count_of(shape, kOp) / shape[0];
  return PerSampleCode{shape[0], values, spec.block, per_sample_budget(shape[0], spec.bits), spec.header}.total();
}

SavedTensor kept_line(const std::string& layer, const Keep& keep, const KeptSizes& sizes) {
  const auto line = [&](std::vector<int64_t> shape, int bits, int64_t bytes, int64_t fp32_bytes) {
    return SavedTensor{layer, name_of(keep.kind), std::move(shape), bits, bytes, fp32_bytes};
  };
  switch (keep.kind) {
    case Kind::mask:
    case Kind::dropout: {
      const int64_t values = count_of(sizes.masked, kOp);
      return line(sizes.masked, 1, ceil_div(values, 8), values);
    }
    case Kind::seed: return line({1}, 64, 8, 8);
    case Kind::affine: {
      const int64_t channels = sizes.coded.back(), bytes = 8 * channels;
      return line({2, channels}, 32, bytes, bytes);
    }
    case Kind::statistics: {
      const int64_t bytes = 4 * keep.numbers * sizes.statistics;
      const std::vector<int64_t> one = {sizes.statistics}, two = {keep.numbers, sizes.statistics};
      return line(keep.numbers == 1 ? one : two, 32, bytes, bytes);
    }
    default: return line(sizes.coded, keep.spec.bits, code_bytes_of(keep, sizes), 4 * count_of(sizes.coded, kOp));
  }
}

}  // namespace satchel
