// The low-pass over windows of 8 a side, 8 values of a line at a time: the summation tree of low_pass.cpp, where missing lines
// and values add +0. Eight lanes for every V, which is here to give each instruction set copies of its own (see vector.h).
#pragma once

#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

template <class V>
struct LowPassCodec {
  using F = typename V::F;
  using Eight = __m256;
  static constexpr int kSide = 8;
  static constexpr int64_t kStrip = 512;  // columns whose means are spread out at a time

  /// `count` values of a line from x[at] on, flushed; the others are +0.
  template <DType type>
  static Eight load_line(const void* x, int64_t at, int64_t count) {
    const char* from = static_cast<const char*>(x) + at * size_of(type);
    Eight v;
    if constexpr (type == DType::f32) {
      const auto* line = reinterpret_cast<const float*>(from);
      v = count == kSide ? _mm256_loadu_ps(line) : _mm256_maskload_ps(line, first_of(count));
    } else {
      const __m128i h = count == kSide ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)) : load_halves(from, count);
      v = type == DType::f16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7f800000));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256())), v);
  }

  static __m256i first_of(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  /// Fewer than eight 16-bit numbers: the first four and the last four, less those that both have.
  static __m128i load_halves(const char* from, int64_t count) {
    uint64_t low = 0, high = 0;
    if (count < 4) {
      for (int64_t i = 0; i < count; ++i) {
        uint16_t h;
        std::memcpy(&h, from + 2 * i, 2);
        low |= static_cast<uint64_t>(h) << (16 * i);
      }
    } else {
      std::memcpy(&low, from, 8);
      std::memcpy(&high, from + 2 * (count - 4), 8);
      high = count == 4 ? 0 : high >> (16 * (kSide - count));
    }
    return _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
  }

  static void store_line(float* out, Eight v, int64_t count) {
    if (count == kSide) return _mm256_storeu_ps(out, v);
    _mm256_maskstore_ps(out, first_of(count), v);
  }

  /// Sums of four lines.
  static __m128 four_sums(Eight a, Eight b, Eight c, Eight d) {
    const Eight halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }

  static float sum_of(__m128 low, __m128 high) {
    const __m128 pairs = _mm_hadd_ps(low, high), fours = _mm_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ss(fours, _mm_movehdup_ps(fours)));
  }

  /// One window: first value, and what it has of lines and values a line.
  struct Window {
    int64_t at, depth, height, width;
  };

  template <DType type>
  static float plane_sum(const void* x, int64_t at, int64_t stride, const Window& w) {
    Eight line[kSide];
    for (int64_t h = 0; h < kSide; ++h) {
      line[h] = h < w.height ? load_line<type>(x, at + h * stride, w.width) : _mm256_setzero_ps();
    }
    return sum_of(four_sums(line[0], line[1], line[2], line[3]), four_sums(line[4], line[5], line[6], line[7]));
  }

  template <DType type>
  static uint16_t split_window(const LowPassShape& s, const void* x, float* rest, const Window& w) {
    alignas(16) float plane[kSide] = {};
    for (int64_t d = 0; d < w.depth; ++d) plane[d] = plane_sum<type>(x, w.at + d * s.height * s.width, s.width, w);
    const float sum = w.depth == 1 ? plane[0] : sum_of(_mm_load_ps(plane), _mm_load_ps(plane + 4));
    const uint16_t mean = to_bf16(satchel::flush(sum / static_cast<float>(w.depth * w.height * w.width)));
    for (int64_t d = 0; d < w.depth; ++d) {
      for (int64_t h = 0; h < w.height; ++h) {
        const int64_t at = w.at + (d * s.height + h) * s.width;
        store_line(rest + at, _mm256_sub_ps(load_line<type>(x, at, w.width), _mm256_set1_ps(from_bf16(mean))), w.width);
      }
    }
    return mean;
  }

  /// Eight whole windows of a single line, one beside the other.
  template <DType type>
  static void split_eight(const void* x, int64_t at, uint16_t* means, float* rest) {
    Eight line[kSide];
    for (int w = 0; w < kSide; ++w) line[w] = load_line<type>(x, at + w * kSide, kSide);
    alignas(16) float sum[kSide];
    _mm_store_ps(sum, four_sums(line[0], line[1], line[2], line[3]));
    _mm_store_ps(sum + 4, four_sums(line[4], line[5], line[6], line[7]));
    for (int w = 0; w < kSide; ++w) {
      means[w] = to_bf16(satchel::flush(sum[w] / static_cast<float>(kSide)));
      _mm256_storeu_ps(rest + at + w * kSide, _mm256_sub_ps(line[w], _mm256_set1_ps(from_bf16(means[w]))));
    }
  }

  static int64_t up_to_side(int64_t left) { return left < kSide ? left : kSide; }

  template <DType type>
  static void split_map(const LowPassShape& s, const void* x, uint16_t* means, float* rest) {
    for (int64_t d = 0; d < s.depth; d += kSide) {
      for (int64_t h = 0; h < s.height; h += kSide) {
        Window w = {(d * s.height + h) * s.width, up_to_side(s.depth - d), up_to_side(s.height - h), kSide};
        int64_t c = 0;
        if (w.depth == 1 && w.height == 1) {
          constexpr int64_t kMany = kSide * kSide;
          for (; c + kMany <= s.width; c += kMany, w.at += kMany, means += kSide) split_eight<type>(x, w.at, means, rest);
        } else if (w.depth == 1 && w.height == kSide) {
          for (; c + kSide <= s.width; c += kSide, w.at += kSide) {
            *means++ = split_window<type>(s, x, rest, {w.at, 1, kSide, kSide});
          }
        }
        for (; c < s.width; c += kSide, w.at += kSide) {
          w.width = up_to_side(s.width - c);
          *means++ = split_window<type>(s, x, rest, w);
        }
      }
    }
  }

  static void split(const LowPassShape& s, Source x, uint16_t* means, float* rest, int64_t first, int64_t last) {
    if (s.size != kSide) return satchel::low_pass_split(s, x, means, rest, first, last);
    with_type(x.type, [&](auto type) {
      const int64_t values = s.map_values(), windows = s.windows();
      for (int64_t map = first; map < last; ++map) {
        const char* from = static_cast<const char*>(x.data) + (map * values - x.origin) * size_of(type());
        split_map<type()>(s, from, means + map * windows, rest + (map - first) * values);
      }
    });
  }

  // ---- join ----------------------------------------------------------------------------------------------------------

  /// x[at …] = rest + mean for n neighbours. The last vector overlaps the one before it.
  template <DType type>
  static void add_means(const float* rest, const float* mean, void* x, int64_t at, int64_t n) {
    const auto put = [&](int64_t i) {
      V::template store<type>(x, at + i, V::saturate(V::add_f(V::load_f32(rest + i), V::load_f32(mean + i)), float_of(0x7f7fffffu)));
    };
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) put(i);
    if (i == n) return;
    if (n >= V::kLanes) return put(n - V::kLanes);
    for (; i < n; ++i) satchel::store(x, type, at + i, bounded(rest[i] + mean[i]));
  }

  static void spread(const uint16_t* means, float* line, int64_t width) {
    for (int64_t c = 0; c < width; c += kSide) Codec<V>::fill(line + c, line + c + up_to_side(width - c), from_bf16(means[c / kSide]));
  }

  /// `height` lines that share their windows' means. Short lines are joined all at once: they are neighbours in memory.
  template <DType type>
  static void join_lines(const uint16_t* means, const float* rest, void* x, int64_t at, int64_t height, int64_t width) {
    alignas(64) float mean[kStrip];
    if (height * width <= kStrip) {
      spread(means, mean, width);
      for (int64_t h = 1; h < height; ++h) std::memcpy(mean + h * width, mean, static_cast<size_t>(width) * sizeof(float));
      return add_means<type>(rest + at, mean, x, at, height * width);
    }
    for (int64_t c = 0; c < width; c += kStrip) {
      const int64_t n = width - c < kStrip ? width - c : kStrip;
      spread(means + c / kSide, mean, n);
      for (int64_t h = 0; h < height; ++h) add_means<type>(rest + at + h * width + c, mean, x, at + h * width + c, n);
    }
  }

  template <DType type>
  static void join_map(const LowPassShape& s, const uint16_t* means, const float* rest, void* x) {
    const int64_t across = ceil_div(s.width, kSide), down = ceil_div(s.height, kSide);
    for (int64_t d = 0; d < s.depth; ++d) {
      for (int64_t h = 0; h < s.height; h += kSide) {
        const uint16_t* own = means + (d / kSide * down + h / kSide) * across;
        join_lines<type>(own, rest, x, (d * s.height + h) * s.width, up_to_side(s.height - h), s.width);
      }
    }
  }

  static void join(const LowPassShape& s, const uint16_t* means, const float* rest, Target x, int64_t first, int64_t last) {
    if (s.size != kSide) return satchel::low_pass_join(s, means, rest, x, first, last);
    with_type(x.type, [&](auto type) {
      const int64_t values = s.map_values(), windows = s.windows();
      for (int64_t map = first; map < last; ++map) {
        char* to = static_cast<char*>(x.data) + (map * values - x.origin) * size_of(type());
        join_map<type()>(s, means + map * windows, rest + (map - first) * values, to);
      }
    });
  }
};

}  // namespace satchel::simd
