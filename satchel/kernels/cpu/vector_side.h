// The side code over a vector type V, bit for bit what core/side.h does one value at a time.
#pragma once

#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

template <class V>
struct SideCodec {
  using Base = Codec<V>;
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;

  /// Between which numbers thresholds lie; −∞ and ∞ unless all are finite and all γ positive.
  struct Span {
    float least = float_of(0xff800000u), most = float_of(0x7f800000u);
  };

  /// A tile's channels, one array a field.
  struct Columns {
    const float *threshold, *gamma, *beta, *off_mean;
    Span span;
  };

  /// Channel fields in columns, for the tiles of [first, last) one after the other. Where neighbouring values are neighbouring
  /// channels a tile reads a window of a table that wraps around; else the table is one tile, filled by runs.
  class Channels {
   public:
    Channels(const SideCode& code, const Channel* channels, int64_t first, int64_t last) : code_(code), channels_(channels) {
      wraps_ = channels != nullptr && code.inner == 1;
      stride_ = kTile + (wraps_ ? Base::least_of(code.channels, last - first) : 0);
      table_ = new float[static_cast<size_t>(4 * stride_)];  // not std::vector, see vector.h
      if (channels == nullptr) {
        fill(0, kTile, relu_channel());
        span_ = {0.0f, 0.0f};
        return;
      }
      channel_ = first / code.inner % code.channels;
      end_ = (first / code.inner + 1) * code.inner;
      if (!wraps_) return;
      step_ = kTile % code.channels;
      for (int64_t at = 0, c = channel_; at < stride_; c = 0) {
        const int64_t to = Base::least_of(stride_, at + code.channels - c);
        for (; at + 4 <= to; at += 4, c += 4) put_four(at, channels + c);
        for (; at < to; ++at, ++c) put(at, channels[c]);
      }
      apart_ = code.channels % kTile == 0;
      spans_ = new Span[static_cast<size_t>(apart_ ? stride_ / kTile : 1)];
      if (!apart_) spans_[0] = span_of(0, stride_);
      for (int64_t at = 0; apart_ && at + kTile <= stride_; at += kTile) spans_[at / kTile] = span_of(at, at + kTile);
    }

    Channels(const Channels&) = delete;
    Channels& operator=(const Channels&) = delete;
    ~Channels() {
      delete[] table_;
      delete[] spans_;
    }

    [[gnu::always_inline]] Columns tile(int64_t i) {
      const float* t = table_;
      if (wraps_) {
        t += at_;
        span_ = spans_[apart_ ? at_ / kTile : 0];
        at_ += step_;
        if (at_ >= code_.channels) at_ -= code_.channels;
      } else if (channels_ != nullptr) {
        fill_runs(i);
      }
      return {t, t + stride_, t + 2 * stride_, t + 3 * stride_, span_};
    }

   private:
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
      span_ = span_of(0, stride_);
    }

    Span span_of(int64_t from, int64_t to) const {
      const auto t = Base::template raw_extremes<DType::f32>(table_, from, to);
      const auto gamma = Base::template raw_extremes<DType::f32>(table_ + stride_, from, to);
      return t.finite && gamma.finite && gamma.least > 0.0f ? Span{t.least, t.most} : Span{};
    }

    void put(int64_t at, const Channel& c) {
      const bool flat = c.gamma == 0.0f;  // its side begins at the range's low end, wherever that is
      float* t = table_ + at;
      t[0] = flat ? float_of(0xff800000u) : c.threshold;
      t[stride_] = c.gamma;
      t[2 * stride_] = c.beta;
      t[3 * stride_] = off_value(c);
    }

    /// put() for four neighbours.
    void put_four(int64_t at, const Channel* c) {
      __m128 t = _mm_loadu_ps(&c[0].threshold), gamma = _mm_loadu_ps(&c[1].threshold), beta = _mm_loadu_ps(&c[2].threshold),
             mean = _mm_loadu_ps(&c[3].threshold);
      _MM_TRANSPOSE4_PS(t, gamma, beta, mean);
      const __m128 exponent = _mm_and_ps(mean, _mm_set1_ps(float_of(0x7f800000u)));
      const __m128 normal = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_castps_si128(exponent), _mm_setzero_si128()));
      const __m128 finite = _mm_cmplt_ps(exponent, _mm_set1_ps(float_of(0x7f800000u)));
      const __m128 flat = _mm_cmpeq_ps(gamma, _mm_setzero_ps());
      float* to = table_ + at;
      _mm_storeu_ps(to, _mm_blendv_ps(t, _mm_set1_ps(float_of(0xff800000u)), flat));
      _mm_storeu_ps(to + stride_, gamma);
      _mm_storeu_ps(to + 2 * stride_, beta);
      _mm_storeu_ps(to + 3 * stride_, _mm_blendv_ps(_mm_set1_ps(float_of(kCanonicalNaN)), _mm_and_ps(mean, normal), finite));
    }

    void fill(int64_t from, int64_t to, const Channel& c) {
      put(from, c);
      for (float* t = table_; t < table_ + 4 * stride_; t += stride_) Base::fill(t + from, t + to, t[from]);
    }

    const SideCode& code_;
    const Channel* channels_;
    float* table_ = nullptr;
    Span* spans_ = nullptr;  // of every tile's window where kTile divides the channels, else one of the whole table
    Span span_;
    bool wraps_ = false, apart_ = false, one_run_ = false;
    int64_t stride_ = 0, at_ = 0, step_ = 0;
    int64_t channel_ = 0, end_ = 0;  // the run that the next tile begins in, or one before it
  };

  /// The range of a tile inside one block that is not poisoned.
  struct OneRange {
    static constexpr bool kMayBePoisoned = false, kUsual = false;
    F lows, highs, longs;
    explicit OneRange(Range r) : lows(V::set(r.low)), highs(V::set(r.high)), longs(V::set(0.8f * (r.high - r.low))) {}
    F low(int) const { return lows; }
    F high(int) const { return highs; }
    F long_at(int) const { return longs; }
  };

  /// The same where thresholds lie inside the range, γ are positive, and all sides are long or none is: what most tiles are.
  struct Usual : OneRange {
    static constexpr bool kUsual = true;
    bool is_long;
    Usual(Range r, bool is_long) : OneRange(r), is_long(is_long) {}
  };

  /// Ranges of a tile over several blocks, or of a poisoned one.
  struct Ranges {
    static constexpr bool kMayBePoisoned = true, kUsual = false;
    Lane64 lows, highs;
    Ranges(const SideCode& code, const void* headers, int64_t i, int count) {
      Base::fill(lows.v + count, lows.v + kTile, 0.0f);
      Base::fill(highs.v + count, highs.v + kTile, 0.0f);
      Base::for_each_part(code.grid, i, count, [&](int64_t part, int from, int to) {
        const Range range = load_range(headers, code.header, part);
        Base::fill(lows.v + from, lows.v + to, range.low);
        Base::fill(highs.v + from, highs.v + to, range.high);
      });
    }
    F low(int j) const { return V::load_f32(lows.v + j); }
    F high(int j) const { return V::load_f32(highs.v + j); }
    F long_at(int j) const { return V::mul(V::set(0.8f), V::sub(high(j), low(j))); }
  };

  /// Calls f with the ranges of a tile.
  template <int off, class Use>
  static void with_ranges(const SideCode& code, const void* headers, int64_t i, int count, int64_t b, Span t, const Use& use) {
    if (b >= 0) {
      const Range r = load_range(headers, code.header, b);
      const float long_from = 0.8f * (r.high - r.low);
      const bool all_short = r.high - t.least <= long_from && (off == 1 || t.most - r.low <= long_from);
      const bool all_long = off == 1 && r.high - t.most > long_from;
      if (!is_poisoned(r) && r.low <= t.least && t.most <= r.high && (all_short || all_long)) return use(Usual(r, all_long));
      if (!is_poisoned(r)) return use(OneRange(r));
    }
    use(Ranges(code, headers, i, count));
  }

  /// From `from` to the far end of a value's side. Where the off side has a single code only on values need theirs.
  struct Stretch {
    F from, way, length;
    M is_long;
  };

  template <int off, class R>
  static Stretch stretch_of(M on, const Columns& c, const R& range, int j) {
    if constexpr (R::kUsual) {
      const F from = V::load_f32(c.threshold + j), way = V::sub(off == 1 ? range.highs : V::select(on, range.highs, range.lows), from);
      return {from, way, off == 1 ? way : V::magnitude(way), M{}};
    }
    const F gamma = V::load_f32(c.gamma + j), low = range.low(j), high = range.high(j);
    const F from = V::min(V::max(V::load_f32(c.threshold + j), low), high);
    const M falls = V::gt(V::set(0.0f), gamma);
    F way;
    if constexpr (off == 1) {
      way = V::sub(V::select(falls, low, high), from);
    } else {
      const M up = V::either(V::eq(gamma, V::set(0.0f)), V::exclusive(on, falls));
      way = V::sub(V::select(up, high, low), from);
    }
    return {from, way, V::magnitude(way), V::gt(V::magnitude(way), range.long_at(j))};
  }

  template <class R>
  static F mark_of(const R& range, M is_long, float longer, float usual) {
    if constexpr (R::kUsual) return V::set(range.is_long ? longer : usual);
    return V::select(is_long, V::set(longer), V::set(usual));
  }

  /// Level of distance d on a stretch, added to `level`: as side_level of core/side.h. The last mark is the stretch's end.
  template <int count, class R>
  static I level_of(I level, F d, const Stretch& s, const R& range, const float* usual, const float* longer, F u) {
    F mark = V::set(0.0f);
#pragma GCC unroll 8
    for (int i = 1; i < count; ++i) {
      const F next = i + 1 == count ? s.length : V::mul(mark_of(range, s.is_long, longer[i], usual[i]), s.length);
      const F cliff = i == 1 ? V::mul(u, next) : V::fma(u, V::sub(next, mark), mark);
      level = V::count(level, V::gt(d, cliff));
      mark = next;
    }
    return level;
  }

  /// uniform_of() of core/side.h for noise under the exponent of 128.
  static constexpr int kUpper = 0x4300;
  static F uniform_of(I noise) { return V::sub(V::as_float(noise), V::set(127.99999237060547f)); }

  template <int bits, int off, class R>
  static I codes_of(F x, const SideTable& t, const Columns& c, const R& range, int j, I noise) {
    const F v = V::flush(x);
    const F y = V::fma(V::load_f32(c.gamma + j), v, V::load_f32(c.beta + j));
    const M on = V::gt(y, V::set(0.0f));
    const Stretch s = stretch_of<off>(on, c, range, j);
    const F d = V::magnitude(V::sub(v, s.from));
    const F u = uniform_of(noise);
    const I passing = level_of<(1 << bits) - off>(V::set_i(off), d, s, range, t.on_short, t.on_long, u);
    I code;
    if constexpr (off == 1) {
      code = V::where(on, passing);
    } else {
      code = V::select_i(on, passing, V::sub_i(V::set_i(off - 1), level_of<off>(V::set_i(0), d, s, range, t.off_short, t.off_long, u)));
    }
    if constexpr (!R::kMayBePoisoned) return code;
    const F high = range.high(j);
    const I passes = V::set_i(off);  // poisoned_code_of()
    const I poisoned = V::select_i(V::eq(y, y), V::select_i(on, passes, V::set_i(0)), passes);
    return V::select_i(V::eq(high, high), code, poisoned);
  }

  // ---- the off plane -------------------------------------------------------------------------------------------------

  static const Channel& channel_at(const SideCode& code, const Channel* channels, int64_t i) {
    return channels[i / code.inner % code.channels];
  }

  /// How many blocks the block of a tile stands for; 0: it is not drawn, or poisoned.
  static uint32_t weight_of(const SideCode& code, OffKey key, const void* headers, int64_t b) {
    const uint32_t weight = off_weight(code, key, b);
    return weight > 0 && !is_poisoned(load_range(headers, code.header, b)) ? weight : 0;
  }

  /// The way from `from` to the far end of an off value's side.
  static F off_way(const Columns& c, const OneRange& range, F from, int j) {
    const F gamma = V::load_f32(c.gamma + j), zero = V::set(0.0f);
    const M up = V::either(V::eq(gamma, zero), V::gt(zero, gamma));
    return V::sub(V::select(up, range.highs, range.lows), from);
  }

  static F off_from(const Columns& c, const OneRange& range, int j) {
    return V::min(V::max(V::load_f32(c.threshold + j), range.lows), range.highs);
  }

  /// Bits of a tile that lies in a drawn block.
  template <DType type>
  static void write_plane(const SideCode& code, const void* in, const Columns& c, const OneRange& range, const uint16_t* noise, int64_t b,
                          int64_t i, int count) {
    uint64_t word = 0;
    Base::with_noise(noise, kUpper, [&](int k, I own) {
      const int j = k * kLanes;
      const F v = V::flush(V::template load<type>(in, j)), from = off_from(c, range, j), way = off_way(c, range, from, j);
      const uint32_t on = V::bits(V::gt(V::fma(V::load_f32(c.gamma + j), v, V::load_f32(c.beta + j)), V::set(0.0f)));
      const uint32_t beyond = V::bits(V::gt(V::magnitude(V::sub(v, from)), V::mul(uniform_of(own), V::magnitude(way))));
      word |= static_cast<uint64_t>(beyond & ~on) << j;
    });
    if (count < kTile) word &= (uint64_t{1} << count) - 1;
    uint8_t* to = code.plane.bytes + off_byte(code, b, i);
    for (int k = 0; k * 8 < count; ++k) to[k] = static_cast<uint8_t>(to[k] | word >> (8 * k));
  }

  /// Values of the off codes of such a tile, eight a byte of `word`.
  static F plane_values(uint64_t word, uint32_t weight, const Columns& c, const OneRange& range, int j) {
    const F from = off_from(c, range, j), mean = V::load_f32(c.off_mean + j);
    const F v = V::select(V::mask_of(static_cast<uint32_t>(word >> j)), V::add_f(from, off_way(c, range, from, j)), from);
    const F value = V::flush(V::fma(V::set(static_cast<float>(weight)), V::sub(V::flush(v), mean), mean));
    return V::select(V::eq(mean, mean), value, mean);
  }

  static uint64_t read_plane(const SideCode& code, int64_t b, int64_t i, int count) {
    uint64_t word = 0;
    std::memcpy(&word, code.plane.bytes + off_byte(code, b, i), static_cast<size_t>(ceil_div(count, 8)));
    return word;
  }

  /// Calls f(block, weight, value) for the values of a tile over several blocks that stand in drawn ones.
  template <class Visit>
  static void for_each_drawn(const SideCode& code, OffKey key, const void* headers, int64_t i, int count, const Visit& visit) {
    Base::for_each_part(code.grid, i, count, [&](int64_t b, int from, int to) {
      const uint32_t weight = weight_of(code, key, headers, b);
      for (int64_t at = i + from; weight > 0 && at < i + to; ++at) visit(b, weight, at);
    });
  }

  // ---- tiles ---------------------------------------------------------------------------------------------------------

  /// Calls f with the table's bits and off codes; on codes are what is left.
  template <class Use>
  static void with_table(const SideTable& t, const Use& use) {
    with_bits(t.bits, [&](auto bits) {
      if constexpr (bits() == 2 || bits() == 3) {
        if (t.off == 1) return use(bits, std::integral_constant<int, 1>());
        if (bits() == 3 && t.off == 2) return use(bits, std::integral_constant<int, 2>());
      }
      if constexpr (bits() >= 2 && bits() <= 4) use(bits, std::integral_constant<int, (1 << (bits() - 1))>());
    });
  }

  template <int bits, int off, DType type>
  static void encode_tiles(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes,
                           int64_t first, int64_t last) {
    Channels columns(code, channels, first, last);
    const typename V::Keys keys(seed);
    const SideTable table = code.table;
    const bool planes = bits == 2 && off == 1 && code.plane.bytes != nullptr;
    const OffKey key = planes ? stored_key(code) : OffKey{};
    alignas(64) uint16_t noise[kTile];
    Base::draw_noise(code.rounding, keys, first, noise);
    Base::for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      I out[Base::kVectors];
      Lane64 copy;
      const void* in = Base::template tile_source<type>(x, i, count, copy);
      const Columns c = columns.tile(i);
      with_ranges<off>(code, headers, i, count, b, c.span, [&](const auto& range) {
        Base::with_noise(noise, kUpper, [&](int v, I own) {
          out[v] = codes_of<bits, off>(V::template load<type>(in, v * kLanes), table, c, range, v * kLanes, own);
        });
      });
      if (planes && b >= 0 && weight_of(code, key, headers, b) > 0) {
        write_plane<type>(code, in, c, OneRange(load_range(headers, code.header, b)), noise, b, i, count);
      } else if (planes && b < 0) {
        for_each_drawn(code, key, headers, i, count, [&](int64_t part, uint32_t, int64_t at) {
          const uint32_t own =
              code.rounding == Rounding::nearest ? kNearestNoise : satchel::noise(seed, Stream::rounding, static_cast<uint64_t>(at));
          const Range range = load_range(headers, code.header, part);
          const bool bit = off_bit_of(load(x.data, type, at - x.origin), channel_at(code, channels, at), range, own);
          if (bit) code.plane.bytes[off_byte(code, part, at)] |= static_cast<uint8_t>(1u << (at % 8));
        });
      }
      Base::draw_noise(code.rounding, keys, i + kTile, noise);  // of the next tile: work to do until this one's codes are there
      Base::template write_codes<bits>(out, codes, i, count);
    });
  }

  static void side_encode(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes,
                          int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      with_table(code.table,
                 [&](auto bits, auto off) { encode_tiles<bits(), off(), type()>(code, x, channels, seed, headers, codes, first, last); });
    });
  }

  /// Where each code sits on a side of usual length and on a longer one, 16 of them: those of 2 and 3 bits repeat. An only off code is
  /// negative.
  struct Tables {
    typename V::Table usual, longer;
  };

  template <int bits, int off>
  static Tables load_tables(const SideTable& t) {
    alignas(64) float usual[16], longer[16];
    for (int c = 0; c < 16; ++c) {
      const int own = c % (1 << bits), level = own < off ? off - 1 - own : own - off;
      usual[c] = own >= off ? t.on_short[level] : off == 1 ? -1.0f : t.off_short[level];
      longer[c] = own >= off ? t.on_long[level] : off == 1 ? -1.0f : t.off_long[level];
    }
    return {V::load_table(usual), V::load_table(longer)};
  }

  template <int bits>
  static F lookup(const typename V::Table& table, I code) {
    if constexpr (bits == 2) return V::lookup_two(table, code);
    if constexpr (bits == 3) return V::lookup_low(table, code);
    return V::lookup(table, code);
  }

  template <int bits, class R>
  static F level_at(I code, const Tables& tables, const R& range, M is_long) {
    if constexpr (R::kUsual) return lookup<bits>(range.is_long ? tables.longer : tables.usual, code);
    return V::select(is_long, lookup<bits>(tables.longer, code), lookup<bits>(tables.usual, code));
  }

  /// `code` may have other codes' bits above its own.
  template <int bits, int off, class R>
  static F values_of(I code, const Tables& tables, const Columns& c, const R& range, int j) {
    const M on = V::any_of(code, (1 << bits) - off);  // code ≥ off: off is a power of two
    const Stretch s = stretch_of<off>(on, c, range, j);
    const F level = level_at<bits>(code, tables, range, s.is_long);
    F v = V::flush(V::fma(level, s.way, s.from));
    if constexpr (off == 1) v = V::select_negative(level, V::load_f32(c.off_mean + j), v);
    if constexpr (!R::kMayBePoisoned) return v;
    const F high = range.high(j);
    return V::select(V::eq(high, high), v, V::set(float_of(kCanonicalNaN)));
  }

  template <int bits>
  static I codes_at(const uint8_t* in, int v) {
    if constexpr (bits == 2) return V::two_bit_codes(in, v);
    return Base::template codes_at<bits>(in, v);
  }

  template <int bits, int off, DType type>
  static void decode_tiles(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x,
                           int64_t first, int64_t last) {
    Channels columns(code, channels, first, last);
    const Tables tables = load_tables<bits, off>(code.table);
    const bool planes = bits == 2 && off == 1 && code.plane.bytes != nullptr;
    const OffKey key = planes ? stored_key(code) : OffKey{};
    Base::for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      alignas(64) uint8_t code_copy[kTile];
      Lane64 copy;
      char* at = static_cast<char*>(x.data) + (i - x.origin) * size_of(type);
      void* out = count == kTile ? static_cast<void*>(at) : copy.v;
      const Columns c = columns.tile(i);
      const uint8_t* in = Base::template code_source<bits>(codes, i, count, code_copy);
      if constexpr (bits == 2 && off == 1) {
        if (const uint32_t weight = planes && b >= 0 ? weight_of(code, key, headers, b) : 0; weight > 0) {
          const OneRange range(load_range(headers, code.header, b));
          const uint64_t word = read_plane(code, b, i, count);
          for (int v = 0, j = 0; v < Base::kVectors; ++v, j += kLanes) {
            const I own = codes_at<bits>(in, v);
            const F value = values_of<bits, off>(own, tables, c, range, j), blocked = plane_values(word, weight, c, range, j);
            V::template store<type>(out, j, V::select(V::any_of(own, 3), value, blocked));
          }
          if (count < kTile) std::memcpy(at, copy.v, static_cast<size_t>(count * size_of(type)));
          return;
        }
      }
      with_ranges<off>(code, headers, i, count, b, c.span, [&](const auto& range) {
        for (int v = 0, j = 0; v < Base::kVectors; ++v, j += kLanes) {
          V::template store<type>(out, j, values_of<bits, off>(codes_at<bits>(in, v), tables, c, range, j));
        }
      });
      if (count < kTile) std::memcpy(at, copy.v, static_cast<size_t>(count * size_of(type)));
      if (!planes || b >= 0) return;
      for_each_drawn(code, key, headers, i, count, [&](int64_t part, uint32_t weight, int64_t k) {
        if (get_code(codes, bits, k) != 0) return;
        const bool bit = (code.plane.bytes[off_byte(code, part, k)] >> (k % 8) & 1) != 0;
        const float value = off_value_of(bit, weight, channel_at(code, channels, k), load_range(headers, code.header, part));
        satchel::store(x.data, type, k - x.origin, value);
      });
    });
  }

  static void side_decode(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x, int64_t first,
                          int64_t last) {
    with_type(x.type, [&](auto type) {
      with_table(code.table,
                 [&](auto bits, auto off) { decode_tiles<bits(), off(), type()>(code, codes, channels, headers, x, first, last); });
    });
  }
};

}  // namespace satchel::simd
