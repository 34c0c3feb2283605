#include "satchel/kernels/chunks.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace satchel {
namespace {

constexpr int64_t kLongBlock = int64_t{1} << 20;

}  // namespace

int64_t first_block_after(const Grid& grid, int64_t value) { return value >= grid.values ? grid.blocks() : grid.block_of(value); }

int64_t common_multiple(int64_t a, int64_t b) {
  constexpr int64_t kMost = int64_t{1} << 62;
  const int64_t rest = a / std::gcd(a, b);
  return rest > kMost / b ? kMost : rest * b;
}

int64_t quantum_of(const Grid& grid) {
  const int64_t unit = grid.is_straight() ? grid.block : grid.span;
  return common_multiple(unit, kGroup);
}

void for_chunks(int64_t values, int64_t chunk, const RangeFunction& run) {
  const int64_t grain = std::max<int64_t>(1, 8 * kChunk / chunk);
  parallel_for(0, ceil_div(values, chunk), grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) run(c * chunk, std::min(values, (c + 1) * chunk));
  });
}

int64_t chunk_of(int64_t quantum) { return quantum * std::max<int64_t>(1, kChunk / quantum); }

void encode_in_chunks(const Grid& grid, const RangeFunction& measure, const RangeFunction& encode) {
  const int64_t quantum = quantum_of(grid);
  if (std::min(quantum, grid.values) <= kLongestChunk) {
    for_chunks(grid.values, chunk_of(quantum), [&](int64_t first, int64_t last) {
      measure(grid.block_of(first), first_block_after(grid, last));
      encode(first, last);
    });
    return;
  }
  if (has_long_blocks(grid)) {
    measure(0, grid.blocks());
  } else {
    parallel_for(0, grid.blocks(), std::max<int64_t>(1, 8 * kChunk / grid.block), measure);
  }
  for_chunks(grid.values, kChunk, encode);
}

bool has_long_blocks(const Grid& grid) { return grid.block >= kLongBlock && grid.blocks() < 4 * thread_count(); }

Range measure_long_block(const Grid& grid, Source x, int64_t block) {
  const int64_t begin = grid.begin(block), count = grid.end(block) - begin;
  SideCode part;
  part.grid = {count, kLongestChunk, count};
  part.header = HeaderType::f32;  // exact extremes
  const char* data = static_cast<const char*>(x.data) + (begin - x.origin) * size_of(x.type);
  std::vector<F32Header> parts(static_cast<size_t>(part.grid.blocks()));
  parallel_for(0, part.grid.blocks(), 1, [&](int64_t first, int64_t last) {
    best_cpu_kernel().side_measure(part, {data, x.type}, parts.data(), first, last);
  });
  Range whole{parts[0].low, parts[0].step};
  for (const F32Header& p : parts) {
    if (!is_finite(p.step) || !is_finite(whole.high)) return {0.0f, float_of(kCanonicalNaN)};
    whole = {std::min(whole.low, p.low), std::max(whole.high, p.step)};
  }
  return whole;
}

}  // namespace satchel
