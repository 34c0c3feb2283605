// The codings of a whole tensor over raw memory, on either device: values in coding order (gapless) to packed bytes and back. Threads are
// parallel.h's; stream and scratch memory are the caller's. No torch.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "satchel/kernels/codec_layout.h"
#include "satchel/kernels/cpu/cpu.h"
#include "satchel/kernels/cuda/cuda.h"

namespace satchel {

/// Where the work is done.
struct Device {
  bool cuda = false;
  cuda::StreamHandle stream = nullptr;
  std::function<void*(int64_t bytes)> scratch = {};  // memory of the device that stays until the work is queued; encode() asks for it
};

/// Pointers into packed bytes.
struct Parts {
  uint8_t* codes;
  uint8_t* headers;
  uint16_t* means;
  Channel* channels;  // null where there are none
  uint8_t* plane;     // of off values; null where there is none
};
Parts parts_of(const CodecLayout& layout, void* bytes);
/// … to write: a low-pass of which the high part alone is kept has its means in scratch memory.
Parts parts_to_write(const CodecLayout& layout, void* bytes, const Device& device);

/// The layout's side code with its off plane in these bytes, where it has one.
SideCode side_code_of(const CodecLayout& layout, const Parts& parts);

/// [first, last).
struct Interval {
  int64_t first, last;
};

/// Bytes that are zeros before encode(), some of none: those between the parts, so that equal tensors have equal bytes, and the off plane,
/// of which encode() sets bits.
std::array<Interval, 3> gaps_of(const CodecLayout& layout);

/// All values of x, which has none but these, to `to`. A side code's channels stand there, and gaps_of() are zero. Not for Coding::keep.
/// `rows`: how x lies where it has gaps; for block codes.
void encode(const CodecLayout& layout, Source x, const uint64_t* seed, const Parts& to, const Device& device, RowsWithGaps rows = {});

/// Values [first, last) to x, whose origin is `first`: a multiple of decode_step(), and `last` too unless it is the end. Not for
/// Coding::keep.
void decode(const CodecLayout& layout, const Parts& from, Target x, int64_t first, int64_t last, const Device& device);
int64_t decode_step(const CodecLayout& layout, bool cuda);
/// What decode() takes, around any [first, last).
Interval decode_stretch(const CodecLayout& layout, int64_t first, int64_t last, bool cuda);

/// On the CPU: values of a block code that make(buffer, first, last) puts into a buffer, `chunk` at a time. Chunks hold whole blocks and
/// whole bytes.
using MakeValues = std::function<void(void* buffer, int64_t first, int64_t last)>;
void encode_made(const BlockCode& code, DType type, int64_t chunk, uint64_t seed, const Parts& to, const MakeValues& make);

/// The grid of values [first, last) of a grid as a grid of its own; both ends stand where blocks start.
Grid part_of(const Grid& grid, int64_t first, int64_t last);
/// Headers of a part that starts at value `first`, and its codes.
const uint8_t* headers_from(const Grid& grid, HeaderType type, const uint8_t* headers, int64_t first);
const uint8_t* codes_from(const uint8_t* codes, int bits, int64_t first);

}  // namespace satchel
