// Projection matrices, redrawn from counters (core/projection.h).
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "satchel/kernels/cpu/cpu.h"

namespace satchel {
namespace {

void draw_independent(const Projection& p, uint64_t seed, int64_t matrix, float unit, float* out) {
  const int64_t entries = static_cast<int64_t>(p.columns) * p.width;
  for (int64_t first = 0; first < entries; first += 128) {
    const Words w = projection_words(seed, matrix, static_cast<uint32_t>(first / 128), 0);
    for (int64_t j = first; j < std::min(first + 128, entries); ++j) {
      out[j] = (w.w[j % 128 / 32] >> (j % 32) & 1u) != 0 ? -unit : unit;
    }
  }
}

void draw_hadamard(const Projection& p, uint64_t seed, int64_t matrix, float unit, float* out) {
  std::vector<uint32_t> column(static_cast<size_t>(p.width));
  for (int r = 0; r < p.width; ++r) column[static_cast<size_t>(r)] = hadamard_column(seed, matrix, r, log2_up(p.columns));
  Words w{};
  for (int d = 0; d < p.columns; ++d) {
    if (d % 128 == 0) w = projection_words(seed, matrix, static_cast<uint32_t>(d) / 128, 1);
    const uint32_t sign = w.w[d % 128 / 32] >> (d % 32) & 1u;
    for (int r = 0; r < p.width; ++r) {
      const uint32_t parity = static_cast<uint32_t>(std::popcount(static_cast<uint32_t>(d) & column[static_cast<size_t>(r)])) & 1u;
      out[static_cast<int64_t>(d) * p.width + r] = (parity ^ sign) != 0 ? -unit : unit;
    }
  }
}

}  // namespace

void draw_projection(const Projection& p, uint64_t seed, float* matrices, int64_t first, int64_t last) {
  const float unit = 1.0f / std::sqrt(static_cast<float>(p.width));
  for (int64_t m = first; m < last; ++m) {
    float* out = matrices + (m - first) * p.columns * p.width;
    (p.hadamard ? draw_hadamard : draw_independent)(p, seed, m, unit, out);
  }
}

}  // namespace satchel
