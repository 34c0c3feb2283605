// DIVISION's two frequencies (theory.md 6): bf16 averages of windows, and what is left.
//
// The sum of a window is a fixed binary tree, so that every backend gets the same bits: first along the width, then over the
// height, then over the depth, each line of n numbers as a tree over n rounded up to a power of two, missing numbers +0.
#include <algorithm>

#include "satchel/kernels/cpu/cpu.h"

namespace satchel {
namespace {

/// Tree sum of get(0..n−1), padded with +0 to the next power of two.
template <class Get>
float tree_sum(int64_t n, int64_t padded, const Get& get, int64_t first = 0) {
  if (first >= n) return 0.0f;
  if (padded == 1) return get(first);
  return tree_sum(n, padded / 2, get, first) + tree_sum(n, padded / 2, get, first + padded / 2);
}

int64_t power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

/// Visits every window of a map: number and bounds.
template <class Visit>
void for_each_window(const LowPassShape& s, const Visit& visit) {
  int64_t w = 0;
  for (int64_t d = 0; d < s.depth; d += s.size) {
    for (int64_t h = 0; h < s.height; h += s.size) {
      for (int64_t c = 0; c < s.width; c += s.size, ++w) {
        visit(w, d, std::min(d + s.size, s.depth), h, std::min(h + s.size, s.height), c, std::min(c + s.size, s.width));
      }
    }
  }
}

float window_mean(const LowPassShape& s, Source x, int64_t map, int64_t d0, int64_t d1, int64_t h0, int64_t h1, int64_t c0, int64_t c1) {
  const auto line = [&](int64_t d, int64_t h) {
    const int64_t at = map * s.map_values() + (d * s.height + h) * s.width - x.origin;
    return tree_sum(c1 - c0, power_of_two(c1 - c0), [&](int64_t c) { return flush(load(x.data, x.type, at + c0 + c)); });
  };
  const auto plane = [&](int64_t d) { return tree_sum(h1 - h0, power_of_two(h1 - h0), [&](int64_t h) { return line(d, h0 + h); }); };
  const float sum = tree_sum(d1 - d0, power_of_two(d1 - d0), [&](int64_t d) { return plane(d0 + d); });
  return sum / static_cast<float>((d1 - d0) * (h1 - h0) * (c1 - c0));
}

}  // namespace

void low_pass_split(const LowPassShape& s, Source x, uint16_t* means, float* rest, int64_t first, int64_t last) {
  for (int64_t map = first; map < last; ++map) {
    for_each_window(s, [&](int64_t w, int64_t d0, int64_t d1, int64_t h0, int64_t h1, int64_t c0, int64_t c1) {
      const uint16_t mean = to_bf16(flush(window_mean(s, x, map, d0, d1, h0, h1, c0, c1)));
      means[map * s.windows() + w] = mean;
      for (int64_t d = d0; d < d1; ++d) {
        for (int64_t h = h0; h < h1; ++h) {
          const int64_t line = (d * s.height + h) * s.width, at = map * s.map_values() + line - x.origin;
          float* out = rest + (map - first) * s.map_values() + line;
          for (int64_t c = c0; c < c1; ++c) out[c] = flush(load(x.data, x.type, at + c)) - from_bf16(mean);
        }
      }
    });
  }
}

void low_pass_join(const LowPassShape& s, const uint16_t* means, const float* rest, Target x, int64_t first, int64_t last) {
  for (int64_t map = first; map < last; ++map) {
    for_each_window(s, [&](int64_t w, int64_t d0, int64_t d1, int64_t h0, int64_t h1, int64_t c0, int64_t c1) {
      const float mean = from_bf16(means[map * s.windows() + w]);
      for (int64_t d = d0; d < d1; ++d) {
        for (int64_t h = h0; h < h1; ++h) {
          const int64_t line = (d * s.height + h) * s.width, at = map * s.map_values() + line - x.origin;
          const float* in = rest + (map - first) * s.map_values() + line;
          for (int64_t c = c0; c < c1; ++c) store(x.data, x.type, at + c, bounded(in[c] + mean));
        }
      }
    });
  }
}

}  // namespace satchel
