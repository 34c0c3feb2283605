// The channels of a side code over a vector type V, tile after tile.
#pragma once

#include <new>

#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

/// Between which numbers thresholds lie; −∞ and ∞ unless all are numbers and all γ positive and finite.
struct Span {
  float least = float_of(0xff800000u), most = float_of(0x7f800000u);
};

/// A tile's channels, one array a field: a window of a table that the next tile's window follows, around its end.
template <class V>
struct Columns {
  using F = typename V::F;
  const float* table = nullptr;
  int64_t stride = 0, at = 0, step = 0, around = 1;
  F threshold(int j) const { return V::load_f32(table + at + j); }
  F gamma(int j) const { return V::load_f32(table + at + stride + j); }
  F beta(int j) const { return V::load_f32(table + at + 2 * stride + j); }
  F off_mean(int j) const { return V::load_f32(table + at + 3 * stride + j); }
  void next() {
    at += step;
    if (at >= around) at -= around;
  }
};

/// Channel fields in columns, for the tiles of [first, last) one after the other. Where neighbouring values are neighbouring
/// channels tiles read windows of one table; else the table is one tile, filled by runs.
template <class V>
class Channels {
  using Base = Codec<V>;
  using F = typename V::F;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;

 public:
  Columns<V> columns;

  Channels(const SideCode& code, const Channel* channels, int64_t first, int64_t last) : code_(code), channels_(channels) {
    wraps_ = channels != nullptr && code.inner == 1;
    apart_ = wraps_ && code.channels % kTile == 0;
    const bool whole = apart_ && code.channels <= last - first;  // then no window goes past the channels
    stride_ = ceil_div((whole ? 0 : kTile) + (wraps_ ? Base::least_of(code.channels, last - first) : 0), 16) * 16;
    table_ = static_cast<float*>(operator new(static_cast<size_t>(4 * stride_) * sizeof(float), kLine));  // see vector.h on std::vector
    columns.table = table_;
    columns.stride = stride_;
    if (channels == nullptr) {
      fill(0, kTile, relu_channel());
      all_ = {0.0f, 0.0f};
      return;
    }
    channel_ = first / code.inner % code.channels;
    end_ = (first / code.inner + 1) * code.inner;
    if (!wraps_) return;
    columns.step = kTile % code.channels;
    columns.around = code.channels;
    for (int64_t at = 0, c = channel_; at < stride_; c = 0) {
      const int64_t to = Base::least_of(stride_, at + code.channels - c);
      for (; at + kLanes <= to; at += kLanes, c += kLanes) put_some(at, V::load_fields(channels + c));
      for (; at < to; ++at, ++c) put(at, channels[c]);
    }
    all_ = span_of(0, stride_);
  }

  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;
  ~Channels() {
    operator delete(table_, kLine);
    delete[] spans_;
  }

  /// Gets ready for the tile of value i; of so many tiles, those from there on that the table will do for.
  int64_t prepare(int64_t i, int64_t tiles) {
    if (wraps_ || channels_ == nullptr) return tiles;
    fill_runs(i);
    return one_run_ ? Base::least_of(tiles, (end_ - i) / kTile) : 1;
  }

  /// Of all channels of the table.
  Span span() const { return all_; }
  /// Do tiles have spans of their own? Made when they are first asked for.
  bool has_tile_spans() {
    if (apart_ && spans_ == nullptr) {
      spans_ = new Span[static_cast<size_t>(stride_ / kTile)];
      for (int64_t at = 0; at + kTile <= stride_; at += kTile) spans_[at / kTile] = span_of(at, at + kTile);
    }
    return apart_;
  }
  Span tile_span(int64_t at) const { return spans_[at / kTile]; }

 private:
  static constexpr std::align_val_t kLine{64};

  int64_t after(int64_t channel) const { return channel + 1 < code_.channels ? channel + 1 : 0; }

  [[gnu::noinline]] void fill_runs(int64_t i) {
    if (one_run_ && i + kTile <= end_) return;
    for (; end_ <= i; end_ += code_.inner) channel_ = after(channel_);
    one_run_ = i + kTile <= end_;
    int64_t c = channel_;
    for (int64_t from = 0, to = end_ - i; from < kTile; from = to, to += code_.inner, c = after(c)) {
      to = Base::least_of(to, kTile);
      fill(from, to, channels_[c]);
    }
    all_ = span_of(0, stride_);
  }

  /// Of at least kLanes channels.
  Span span_of(int64_t from, int64_t to) const {
    const F most = V::set(float_of(0x7f800000u)), least = V::set(float_of(0xff800000u)), zero = V::set(0.0f);
    F low = most, high = least;
    M odd = V::gt(zero, zero);
    for (int64_t i = from; i < to; i += kLanes) {
      const float* at = table_ + Base::least_of(i, to - kLanes);
      const F t = V::load_f32(at), gamma = V::load_f32(at + stride_);
      low = V::min(t, low);
      high = V::max(t, high);
      odd = V::either(odd, V::either(V::not_gt(t, least), V::either(V::not_gt(gamma, zero), V::not_gt(most, gamma))));
    }
    return V::bits(odd) == 0 ? Span{V::least(low), V::most(high)} : Span{};
  }

  void put(int64_t at, const Channel& c) {
    const bool flat = c.gamma == 0.0f;  // its side begins at the range's low end, wherever that is
    float* t = table_ + at;
    t[0] = flat ? float_of(0xff800000u) : c.threshold;
    t[stride_] = c.gamma;
    t[2 * stride_] = c.beta;
    t[3 * stride_] = off_value(c);
  }

  /// put() for kLanes neighbours.
  void put_some(int64_t at, const Fields<V>& c) {
    const F zero = V::set(0.0f);
    const M finite = V::eq(V::mul(c.off_mean, zero), zero);
    V::template store<DType::f32>(table_, at, V::select(V::eq(c.gamma, zero), V::set(float_of(0xff800000u)), c.threshold));
    V::template store<DType::f32>(table_, at + stride_, c.gamma);
    V::template store<DType::f32>(table_, at + 2 * stride_, c.beta);
    V::template store<DType::f32>(table_, at + 3 * stride_, V::select(finite, V::flush(c.off_mean), V::set(float_of(kCanonicalNaN))));
  }

  void fill(int64_t from, int64_t to, const Channel& c) {
    put(from, c);
    for (float* t = table_; t < table_ + 4 * stride_; t += stride_) Base::fill(t + from, t + to, t[from]);
  }

  const SideCode& code_;
  const Channel* channels_;
  float* table_ = nullptr;
  Span* spans_ = nullptr;  // of the tiles' windows, where kTile divides the channels
  Span all_;               // of the whole table
  bool wraps_ = false, apart_ = false, one_run_ = false;
  int64_t stride_ = 0;
  int64_t channel_ = 0, end_ = 0;  // the run that the next tile begins in, or one before it
};

}  // namespace satchel::simd
