// What the fused kernels of norms and activations take, from specs and packed bytes: for the rooms tensor and stable. No torch.
#pragma once

#include <cstdint>
#include <optional>

#include "satchel/kernels/codec_layout.h"
#include "satchel/kernels/cuda/row_norm.h"

namespace satchel {

/// Activation and dropout. Throws `[op] rule, got value` unless 0 ≤ dropout < 1, the slope is finite and the origin a multiple of 8.
Chain make_chain(int64_t values, int64_t channels, double dropout, double slope, int64_t origin, const char* op);

/// Is this a code of blocks, and of nothing else?
inline bool is_block_code(const CodecLayout& layout) { return layout.coding == Coding::block && !layout.projected; }

/// Null where there are no bytes.
inline cuda::CodeParts code_parts(const CodecLayout& layout, void* bytes) {
  if (bytes == nullptr) return {nullptr, nullptr};
  return {static_cast<uint8_t*>(bytes), static_cast<uint8_t*>(bytes) + layout.at.headers};
}
inline cuda::RowCode row_code(const CodecLayout& layout, void* bytes, const uint64_t* seed) {
  return {layout.block, code_parts(layout, bytes), seed};
}

/// How x̂ of rows × channels is kept in a one-sided code; nothing where the fused kernels do not serve it.
std::optional<CodecLayout> norm_act_layout(int64_t rows, int64_t channels, const CodecSpec& spec, const char* op);
cuda::NormActCode norm_act_code(const CodecLayout& layout, void* bytes, const Chain& chain, const uint64_t* seed);

/// … x̂ in blocks, and the sum with a skip, values of `type`, in its ReLU form. No `sum`: x̂ alone.
struct NormAddLayouts {
  CodecLayout norm;
  std::optional<CodecLayout> sum;
};
std::optional<NormAddLayouts> norm_add_layouts(int64_t rows, int64_t channels, DType type, const CodecSpec& norm,
                                               const std::optional<CodecSpec>& sum, const char* op);
cuda::NormAddCode norm_add_code(const NormAddLayouts& layouts, int64_t channels, void* norm, void* sum);

}  // namespace satchel
