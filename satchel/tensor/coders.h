// The codings of a plan, on either device: values in coding order (gapless memory) to packed bytes and back. Private.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/kernels/cpu/cpu.h"
#include "satchel/tensor/codec_layout.h"
#include "satchel/tensor/device.h"

namespace satchel {

DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType type);

/// The memory of a gapless tensor as one line.
at::Tensor flat(const at::Tensor& x);

/// All coded values into `bytes` (uint8, plan.at.total of them). `x` is one line of plan.values values of plan.type;
/// a side code's thresholds stand in the bytes already.
void encode(const CodecLayout& plan, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);

/// Zeros in the few bytes between the parts, so that equal tensors have equal bytes.
void zero_gaps(const CodecLayout& plan, const at::Tensor& bytes);

/// Coded values [first, last) into `x`, one line of that many values of any of the three types. first is a multiple of
/// decode_step(plan, device), last too unless it is the end.
void decode(const CodecLayout& plan, const at::Tensor& bytes, const at::Tensor& x, int64_t first, int64_t last, const Place& place);
int64_t decode_step(const CodecLayout& plan, bool cuda);

/// The same for any first and last, as a line of its own; a little more is decoded where they stand inside a block or a byte.
at::Tensor decoded(const CodecLayout& plan, const at::Tensor& bytes, at::ScalarType type, int64_t first, int64_t last, const Place& place);

/// Pointers into packed bytes.
struct Parts {
  uint8_t* codes;
  uint8_t* headers;
  uint16_t* means;
  Channel* channels;  // null where there are none
  uint8_t* plane;     // of off values; null where there is none
};
Parts parts_of(const CodecLayout& plan, const at::Tensor& bytes);

/// The plan's side code with its off plane in these bytes, where it has one.
SideCode side_code_of(const CodecLayout& plan, const Parts& parts);

/// The channels' numbers as floats (channels × 4: threshold, γ, β, off mean), inside the packed bytes.
at::Tensor channel_table(const CodecLayout& plan, const at::Tensor& bytes);

/// What encode and decode call, a coding each.
void encode_block(const CodecLayout& plan, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);
void decode_block(const CodecLayout& plan, const Parts& from, Target x, int64_t first, int64_t last, const Place& place);
void encode_side(const CodecLayout& plan, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);
void decode_side(const CodecLayout& plan, const Parts& from, Target x, int64_t first, int64_t last, const Place& place);
void encode_low_pass(const CodecLayout& plan, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);
void decode_low_pass(const CodecLayout& plan, const Parts& from, Target x, int64_t first, int64_t last, const Place& place);

/// The low-pass of tensors whose memory is not in the shape's order: all of x, and the maps [first, first + x's) into x.
void encode_low_pass_last(const CodecLayout& plan, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes,
                          const Place& place);
void decode_low_pass_last(const CodecLayout& plan, const at::Tensor& bytes, const at::Tensor& x, int64_t first, const Place& place);

/// Where the low-pass puts its means: inside the bytes, or in `own` where the high part alone is kept.
Parts low_pass_parts(const CodecLayout& plan, const at::Tensor& bytes, at::Tensor& own);

/// Activation and dropout of rows × channels as the kernels take them.
struct ChainOptions;
Chain chain_of(at::IntArrayRef shape, const ChainOptions& options);

/// The seed where a kernel reads it: at once on the CPU, from device memory on CUDA.
inline uint64_t seed_value(const at::Tensor& seed) { return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()); }
inline const uint64_t* seed_pointer(const at::Tensor& seed) { return reinterpret_cast<const uint64_t*>(seed.const_data_ptr<int64_t>()); }

/// The grid of values [first, last) of a grid as a grid of its own; both ends stand where blocks start.
Grid part_of(const Grid& grid, int64_t first, int64_t last);

/// Headers of a part that starts at value `first`, and its codes.
const uint8_t* headers_from(const Grid& grid, HeaderType type, const uint8_t* headers, int64_t first);
const uint8_t* codes_from(const uint8_t* codes, int bits, int64_t first);

}  // namespace satchel
