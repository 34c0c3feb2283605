#include "satchel/kernels/epilogue_codes.h"

#include <cmath>

#include "satchel/core/error.h"
#include "satchel/kernels/coding.h"

namespace satchel {

Chain make_chain(int64_t values, int64_t channels, double dropout, double slope, int64_t origin, const char* op) {
  constexpr int64_t kNoises = 1 << 16;
  if (!(dropout >= 0 && dropout < 1)) fail(op, "dropout must be in [0, 1)", dropout);
  const auto drop = static_cast<int64_t>(std::llround(dropout * static_cast<double>(kNoises)));
  if (drop == kNoises) fail(op, "dropout must leave 1 of 2^16 values", dropout);
  if (!std::isfinite(static_cast<float>(slope))) fail(op, "slope must be finite", slope);
  if (origin < 0 || origin % kGroup != 0) fail(op, "origin must be a multiple of 8", origin);
  Chain c;
  c.values = values;
  c.channels = channels;
  c.slope = static_cast<float>(slope);
  c.drop = static_cast<uint32_t>(drop);
  c.scale = static_cast<float>(static_cast<double>(kNoises) / static_cast<double>(kNoises - drop));
  c.origin = origin;
  return c;
}

std::optional<CodecLayout> norm_act_layout(int64_t rows, int64_t channels, const CodecSpec& spec, const char* op) {
  const int64_t shape[] = {rows, channels};
  if (rows * channels == 0 || spec.side != Side::one_sided) return std::nullopt;
  const CodecLayout layout = plan_of(shape, DType::f32, spec, channels, 1, op);
  return layout.coding == Coding::side && cuda::norm_act_fits(layout.side) ? std::optional(layout) : std::nullopt;
}

cuda::NormActCode norm_act_code(const CodecLayout& layout, void* bytes, const Chain& chain, const uint64_t* seed) {
  return {side_code_of(layout, parts_of(layout, bytes)), chain, static_cast<uint8_t*>(bytes), seed};
}

std::optional<NormAddLayouts> norm_add_layouts(int64_t rows, int64_t channels, DType type, const CodecSpec& norm,
                                               const std::optional<CodecSpec>& sum, const char* op) {
  const int64_t shape[] = {rows, channels};
  if (rows * channels == 0 || norm.side != Side::none || (sum && sum->side != Side::relu)) return std::nullopt;
  NormAddLayouts layouts{plan_of(shape, DType::f32, norm, 0, 1, op), std::nullopt};
  if (!is_block_code(layouts.norm)) return std::nullopt;
  if (sum) layouts.sum = plan_of(shape, type, *sum, 0, 1, op);
  if (sum && (layouts.sum->coding != Coding::side || layouts.sum->projected)) return std::nullopt;
  return cuda::norm_add_fits(norm_add_code(layouts, channels, nullptr, nullptr)) ? std::optional(layouts) : std::nullopt;
}

cuda::NormAddCode norm_add_code(const NormAddLayouts& layouts, int64_t channels, void* norm, void* sum) {
  cuda::NormAddCode code{layouts.norm.block, {}, channels, code_parts(layouts.norm, norm), {}};
  code.alone = !layouts.sum;
  if (!layouts.sum) return code;
  code.sum = layouts.sum->side;
  code.sum_at = code_parts(*layouts.sum, sum);
  return code;
}

}  // namespace satchel
