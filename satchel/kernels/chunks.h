// How a tensor's values are shared out over threads on the CPU. Bytes never depend on it. No torch; private to the library.
#pragma once

#include <cstdint>

#include "satchel/kernels/cpu/cpu.h"
#include "satchel/kernels/parallel.h"

namespace satchel {

constexpr int64_t kChunk = 4096;          // values: 16 KiB of fp32 stay in a core's first cache
constexpr int64_t kLongestChunk = 65536;  // values that one thread still measures and encodes in one go

/// Least common multiple, at most 2^62.
int64_t common_multiple(int64_t a, int64_t b);

/// The block that starts at `value` or holds it; behind the last value, the number of blocks.
int64_t first_block_after(const Grid& grid, int64_t value);

/// The fewest values after which a block and a whole byte of codes start together.
int64_t quantum_of(const Grid& grid);

/// Calls run(first, last) for chunks of [0, values), each `chunk` long but the last, on all threads.
void for_chunks(int64_t values, int64_t chunk, const RangeFunction& run);

/// One chunk: the multiple of `quantum` nearest below kChunk, or `quantum` itself.
int64_t chunk_of(int64_t quantum);

/// measure(blocks), then encode(values): chunk by chunk where blocks are short, else first all of one, then of the other.
void encode_in_chunks(const Grid& grid, const RangeFunction& measure, const RangeFunction& encode);

/// Least and most of a block too long for one thread: its parts are measured on all threads. `high` is NaN where a value
/// or the range was not finite.
Range measure_long_block(const Grid& grid, Source x, int64_t block);

/// Should blocks be measured by measure_long_block, one after the other?
bool has_long_blocks(const Grid& grid);

}  // namespace satchel
