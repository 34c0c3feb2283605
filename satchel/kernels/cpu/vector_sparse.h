// The sparse product over a vector type V: a tile of columns stays in registers while the row's entries pass by. Every column
// is summed in the order of kernels/sparse.h, so the bits are those of scalar.cpp.
#pragma once

#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

template <class V>
struct SparseProduct {
  using F = typename V::F;
  using Part = typename V::Part;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMostVectors = 8;
  static constexpr int64_t kTileColumns = kMostVectors * kLanes;

  /// One tile of columns, seen from its first one. Only `tail` of the last vector exists.
  struct Task {
    const Sparse& a;
    const float* x;
    float* y;
    int64_t width, first, last;
    Part tail;
  };

  template <int vectors, bool whole>
  struct Tile {
    F v[vectors];

    [[gnu::always_inline]] static F load(const float* p, int k, Part tail) {
      return whole || k + 1 < vectors ? V::load_f32(p + k * kLanes) : V::load_part(p + k * kLanes, tail);
    }
    [[gnu::always_inline]] void store(float* p, Part tail) const {
      for (int k = 0; k + 1 < vectors; ++k) V::template store<DType::f32>(p, k * kLanes, v[k]);
      constexpr int kLast = (vectors - 1) * kLanes;
      if constexpr (whole) {
        V::template store<DType::f32>(p, kLast, v[vectors - 1]);
      } else {
        V::store_part(p + kLast, tail, v[vectors - 1]);
      }
    }
  };

  /// x is read at random: the row of an entry further on is asked for while this one is added. 4 KiB of rows on their way fill a
  /// core's line buffers; far more would push each other out of its first cache.
  template <int vectors>
  static constexpr int64_t kEntriesAhead = vectors* kLanes >= 128 ? 8 : 16;

  template <int vectors>
  [[gnu::always_inline]] static void ask_for(const float* row) {
    for (int at = 0; at < vectors * kLanes; at += 16) _mm_prefetch(row + at, _MM_HINT_T0);
  }

  template <int vectors, bool whole>
  [[gnu::always_inline]] static Tile<vectors, whole> stretch(const Task& t, int64_t from, int64_t to, int64_t end) {
    Tile<vectors, whole> sum;
    for (F& v : sum.v) v = V::set(0.0f);
    for (int64_t e = from; e < to; ++e) {
      const int64_t c = t.a.column[e], ahead = e + kEntriesAhead<vectors>;
      if (ahead < end) ask_for<vectors>(t.x + t.a.column[ahead] * t.width);
      const float value = t.a.value == nullptr ? 1.0f : t.a.value[e];
      const F w = V::set(t.a.column_scale == nullptr ? value : value * t.a.column_scale[c]);
      const float* row = t.x + c * t.width;
      for (int k = 0; k < vectors; ++k) sum.v[k] = V::fma(w, sum.load(row, k, t.tail), sum.v[k]);
    }
    return sum;
  }

  template <int vectors, bool whole>
  static void rows(const Task& t) {
    const int64_t end_of_all = t.a.start[t.last];
    for (int64_t i = t.first; i < t.last; ++i) {
      const int64_t begin = t.a.start[i], end = t.a.start[i + 1];
      auto sum = stretch<vectors, whole>(t, begin, end - begin < kStretch ? end : begin + kStretch, end_of_all);
      for (int64_t from = begin + kStretch; from < end; from += kStretch) {
        const auto more = stretch<vectors, whole>(t, from, end - from < kStretch ? end : from + kStretch, end_of_all);
        for (int k = 0; k < vectors; ++k) sum.v[k] = V::add_f(sum.v[k], more.v[k]);
      }
      if (t.a.row_scale != nullptr) {
        for (F& v : sum.v) v = V::mul(V::set(t.a.row_scale[i]), v);
      }
      sum.store(t.y + i * t.width, t.tail);
    }
  }

  template <int vectors>
  static void tile(const Task& t, int64_t columns) {
    if (columns == vectors * kLanes) return rows<vectors, true>(t);
    rows<vectors, false>(t);
  }

  /// Tile after tile, each over all the rows: the part of x that a pass reads at random is smaller than x.
  static void multiply(const Sparse& a, const float* x, int64_t width, float* y, int64_t first, int64_t last) {
    if (first >= last) return;
    for (int64_t at = 0; at < width; at += kTileColumns) {
      const int64_t columns = width - at < kTileColumns ? width - at : kTileColumns;
      const int64_t vectors = (columns + kLanes - 1) / kLanes;
      const Task t = {a, x + at, y + at, width, first, last, V::part(static_cast<int>(columns - (vectors - 1) * kLanes))};
      switch (vectors) {
        case 1: tile<1>(t, columns); break;
        case 2: tile<2>(t, columns); break;
        case 3: tile<3>(t, columns); break;
        case 4: tile<4>(t, columns); break;
        case 5: tile<5>(t, columns); break;
        case 6: tile<6>(t, columns); break;
        case 7: tile<7>(t, columns); break;
        default: tile<8>(t, columns); break;
      }
    }
  }
};

}  // namespace satchel::simd
