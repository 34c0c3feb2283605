// Sums of the off values over a vector type V, added up in the very order of off_sums in scalar.cpp.
#pragma once

#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

template <class V>
struct OffSums {
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = kSumLanes / kLanes;
  static constexpr int64_t kRowBlock = 16384;  // values that stay in the cache while column after column walks down them

  static Channel channel_at(const Channel* channels, int64_t c) { return channels == nullptr ? relu_channel() : channels[c]; }

  /// Sums and counts of kSumLanes values side by side.
  struct Lanes {
    typename V::Doubles sum[kVectors];
    I count[kVectors];

    template <DType type>
    void add(const void* x, int64_t at, const F* gamma, const F* beta) {
      for (int v = 0; v < kVectors; ++v) {
        const F own = V::template load<type>(x, at + v * kLanes);
        const M off = V::not_gt(V::fma(V::flush(own), gamma[v], beta[v]), V::set(0.0f));
        sum[v] = V::template add_flushed<type>(sum[v], off, own, x, at + v * kLanes);
        count[v] = V::count(count[v], off);
      }
    }

    void load(const double* sums) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = V::load_doubles(sums + v * kLanes);
        count[v] = V::set_i(0);
      }
    }

    void store(double* sums, int32_t* counts) const {
      for (int v = 0; v < kVectors; ++v) {
        V::store_doubles(sums + v * kLanes, sum[v]);
        V::store_i(counts + v * kLanes, count[v]);
      }
    }
  };

  /// Rows [0, rows) of kSumLanes neighbouring channels, the first `skip` of which have been counted already.
  template <DType type>
  static void add_columns(const void* x, int64_t at, int64_t rows, int64_t stride, const Channel* channels, int64_t c, int64_t skip,
                          double* sums) {
    F gamma[kVectors], beta[kVectors];
    double* pairs = sums + 2 * c;
    Lanes lanes;
    for (int v = 0; v < kVectors; ++v) {
      const Fields<V> own = channels == nullptr ? Fields<V>{F{}, V::set(1.0f), F{}, F{}} : V::load_fields(channels + c + v * kLanes);
      gamma[v] = own.gamma;
      beta[v] = own.beta;
      lanes.sum[v] = V::load_sums(pairs + 2 * v * kLanes);
      lanes.count[v] = V::set_i(0);
    }
    for (int64_t r = 0; r < rows; ++r) lanes.template add<type>(x, at + r * stride, gamma, beta);
    double counted[2 * kSumLanes];
    std::memcpy(counted, pairs, static_cast<size_t>(skip) * 2 * sizeof(double));
    for (int v = 0; v < kVectors; ++v) V::store_sums(pairs + 2 * v * kLanes, lanes.sum[v], lanes.count[v]);
    std::memcpy(pairs, counted, static_cast<size_t>(skip) * 2 * sizeof(double));
  }

  /// Whole rows of channels that lie side by side. The last columns overlap where kSumLanes does not divide their number.
  template <DType type>
  static void add_rows(const void* x, int64_t at, int64_t rows, int64_t width, const Channel* channels, double* sums) {
    const int64_t most = kRowBlock / width > kSumLanes ? kRowBlock / width : kSumLanes;
    for (int64_t r = 0; r < rows; r += most) {
      const int64_t some = rows - r < most ? rows - r : most;
      for (int64_t c = 0; c < width; c += kSumLanes) {
        const int64_t from = c + kSumLanes <= width ? c : width - kSumLanes;
        add_columns<type>(x, at + r * width + from, some, width, channels, from, c - from, sums);
      }
    }
  }

  template <DType type>
  static void add_each(const void* x, int64_t from, int64_t to, const Channel& channel, double* sum) {
    for (; from < to; ++from) {
      const float v = satchel::flush(satchel::load(x, type, from));
      if (is_on(v, channel)) continue;
      sum[0] += v;
      sum[1] += 1.0;
    }
  }

  /// A run of one channel: what does not fill the lanes first, then lane by lane.
  template <DType type>
  static void add_run(const void* x, int64_t from, int64_t to, const Channel& channel, double* sum) {
    const int64_t whole = from + (to - from) / kSumLanes * kSumLanes;
    add_each<type>(x, whole, to, channel, sum);
    if (whole == from) return;
    F gamma[kVectors], beta[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      gamma[v] = V::set(channel.gamma);
      beta[v] = V::set(channel.beta);
    }
    alignas(64) double lane[kSumLanes] = {};
    alignas(64) int32_t counts[kSumLanes];
    Lanes lanes;
    lanes.load(lane);
    for (; from < whole; from += kSumLanes) lanes.template add<type>(x, from, gamma, beta);
    lanes.store(lane, counts);
    for (int l = 0; l < kSumLanes; ++l) {
      sum[0] += lane[l];
      sum[1] += counts[l];
    }
  }

  template <DType type>
  static void add_runs(const SideCode& code, Source x, const Channel* channels, double* sums, int64_t first, int64_t last) {
    int64_t c = first / code.inner % code.channels, end = (first / code.inner + 1) * code.inner;
    for (int64_t i = first; i < last; i = end, end += code.inner, c = c + 1 < code.channels ? c + 1 : 0) {
      const int64_t to = end < last ? end : last;
      add_run<type>(x.data, i - x.origin, to - x.origin, channel_at(channels, c), sums + 2 * c);
    }
  }

  static void off_sums(const SideCode& code, Source x, const Channel* channels, double* sums, int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      const int64_t width = code.channels, head = ceil_div(first, width) * width, tail = last / width * width;
      if (code.inner > 1 || width < kSumLanes || head >= tail) return add_runs<type()>(code, x, channels, sums, first, last);
      add_runs<type()>(code, x, channels, sums, first, head);
      add_rows<type()>(x.data, head - x.origin, (tail - head) / width, width, channels, sums);
      add_runs<type()>(code, x, channels, sums, tail, last);
    });
  }
};

}  // namespace satchel::simd
