// The side code over a vector type V, bit for bit what core/side.h does one value at a time.
#pragma once

#include "satchel/kernels/cpu/vector_channels.h"

namespace satchel::simd {

template <class V>
struct SideCodec {
  using Base = Codec<V>;
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;

  using Columns = simd::Columns<V>;
  using Channels = simd::Channels<V>;

  /// The range of a tile inside one block that is not poisoned.
  struct OneRange {
    static constexpr bool kMayBePoisoned = false, kUsual = false;
    using Argument = OneRange;  // in registers
    Range range;
    explicit OneRange(Range r) : range(r) {}
    F low(int = 0) const { return V::set(range.low); }
    F high(int = 0) const { return V::set(range.high); }
    F long_at(int) const { return V::set(0.8f * (range.high - range.low)); }
  };

  /// The same where thresholds lie inside the range, γ are positive, and all sides are long or none is: what most tiles are.
  struct Usual : OneRange {
    static constexpr bool kUsual = true;
    using Argument = Usual;
    bool is_long;
    Usual(Range r, bool is_long) : OneRange(r), is_long(is_long) {}
  };

  /// Ranges of a tile over several blocks, or of a poisoned one.
  struct Ranges {
    static constexpr bool kMayBePoisoned = true, kUsual = false;
    using Argument = const Ranges&;
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

  /// What a tile's sides are like. Where thresholds lie inside the range, γ are positive, and all are long or none is, less is to do.
  enum class Sides { any, short_ones, long_ones };

  template <int off>
  static Sides sides_of(Range r, Span t) {
    const float long_from = 0.8f * (r.high - r.low);
    if (!(r.low <= t.least && t.most <= r.high)) return Sides::any;
    if (off == 1 && r.high - t.most > long_from) return Sides::long_ones;
    return r.high - t.least <= long_from && (off == 1 || t.most - r.low <= long_from) ? Sides::short_ones : Sides::any;
  }

  /// Calls f(ranges, tiles) for one tile, or for as many as can be coded alike of those that lie in block b. Returns how many.
  template <int off, class Use>
  static int64_t with_ranges(const SideCode& code, const void* headers, int64_t i, int64_t tiles, int count, int64_t b, Channels& channels,
                             const Use& use) {
    tiles = channels.prepare(i, tiles);
    const Range r = b >= 0 ? load_range(headers, code.header, b) : Range{0.0f, float_of(kCanonicalNaN)};
    if (is_poisoned(r)) return use(Ranges(code, headers, i, count), 1);
    Sides sides = sides_of<off>(r, channels.span());
    if (sides == Sides::any && channels.has_tile_spans()) {
      Columns c = channels.columns;
      sides = sides_of<off>(r, channels.tile_span(c.at));
      int64_t alike = 1;
      for (c.next(); alike < tiles && sides_of<off>(r, channels.tile_span(c.at)) == sides; c.next()) ++alike;
      tiles = alike;
    }
    return sides == Sides::any ? use(OneRange(r), tiles) : use(Usual(r, sides == Sides::long_ones), tiles);
  }

  /// From `from` to the far end of a value's side. Where the off side has a single code only on values need theirs.
  struct Stretch {
    F from, way, length;
    M is_long;
  };

  template <int off, class R>
  static Stretch stretch_of(M on, const Columns& c, const R& range, int j) {
    if constexpr (R::kUsual) {
      const F from = c.threshold(j), way = V::sub(off == 1 ? range.high() : V::select(on, range.high(), range.low()), from);
      return {from, way, off == 1 ? way : V::magnitude(way), M{}};
    }
    const F gamma = c.gamma(j), low = range.low(j), high = range.high(j);
    const F from = V::min(V::max(c.threshold(j), low), high);
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

  /// Calls f(i, is d beyond it) for the cliffs of a stretch, as side_level of core/side.h. The last mark is the stretch's end.
  template <int count, class R, class Use>
  static void for_each_cliff(F d, const Stretch& s, const R& range, const float* usual, const float* longer, F u, const Use& use) {
    F mark = V::set(0.0f);
#pragma GCC unroll 8
    for (int i = 1; i < count; ++i) {
      const F next = i + 1 == count ? s.length : V::mul(mark_of(range, s.is_long, longer[i], usual[i]), s.length);
      use(i - 1, V::gt(d, i == 1 ? V::mul(u, next) : V::fma(u, V::sub(next, mark), mark)));
      mark = next;
    }
  }

  /// uniform_of() of core/side.h for noise under the exponent of 128.
  static constexpr int kUpper = 0x4300;
  static F uniform_of(I noise) { return V::sub(V::as_float(noise), V::set(127.99999237060547f)); }

  /// A tile's codes: as numbers or, where they have 2 bits and one is off, as the steps that V makes bytes of.
  struct Numbers {
    I code[Base::kVectors];
  };
  template <int bits, int off>
  using Codes = std::conditional_t<bits == 2 && off == 1, typename V::Steps, Numbers>;

  /// Codes of vector v of a tile. In a poisoned block, where no value is beyond a cliff, they are those of poisoned_code_of().
  template <int bits, int off, class R>
  static void put_codes(Codes<bits, off>& out, int v, F x, const SideTable& t, const Columns& c, const R& range, I noise) {
    const int j = v * kLanes;
    // Where γ is no number, 0·γ + β is not β.
    const F y = R::kUsual ? V::fma_flushed(x, c.gamma(j), c.beta(j)) : V::fma(V::flush(x), c.gamma(j), c.beta(j));
    M on = V::gt(y, V::set(0.0f)), whole{};
    if constexpr (R::kMayBePoisoned) {
      whole = V::eq(range.high(j), range.high(j));
      on = V::either(on, V::neither(whole, V::eq(y, y)));
    }
    const Stretch s = stretch_of<off>(on, c, range, j);
    const F d = V::distance_flushed(x, s.from), u = uniform_of(noise);
    constexpr int kOn = (1 << bits) - off;
    if constexpr (bits == 2 && off == 1) {
      M beyond[2];
      for_each_cliff<kOn>(d, s, range, t.on_short, t.on_long, u, [&](int i, M m) { beyond[i] = m; });
      out.put(v, on, beyond[0], beyond[1]);
    } else {
      I code = V::set_i(off);
      for_each_cliff<kOn>(d, s, range, t.on_short, t.on_long, u, [&](int, M m) { code = V::count(code, m); });
      I level = V::set_i(0);
      for_each_cliff<off>(d, s, range, t.off_short, t.off_long, u, [&](int, M m) { level = V::count(level, m); });
      code = V::select_i(on, code, V::sub_i(V::set_i(off - 1), level));
      if constexpr (R::kMayBePoisoned) code = V::where(V::either(whole, on), code);
      out.code[v] = code;
    }
  }

  template <int bits>
  static void write(const Numbers& out, uint8_t* codes, int64_t i, int count) {
    Base::template write_codes<bits>(out.code, codes, i, count);
  }

  template <int bits>
  static void write(const typename V::Steps& out, uint8_t* codes, int64_t i, int count) {
    if (count == kTile) return out.write(codes + i / 4);
    uint8_t bytes[kTile / 4];
    out.write(bytes);
    write_tail(bytes, codes + i / 4, count);
  }

  /// The first codes of a tile, and 0 in what is left of the last byte. Not inlined: it would cost whole tiles registers.
  [[gnu::noinline]] static void write_tail(uint8_t* bytes, uint8_t* to, int count) {
    if (count % 4 != 0) bytes[count / 4] = static_cast<uint8_t>(bytes[count / 4] & ((1 << (count % 4 * 2)) - 1));
    std::memcpy(to, bytes, static_cast<size_t>(code_bytes(count, 2)));
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
    const F gamma = c.gamma(j), zero = V::set(0.0f);
    const M up = V::either(V::eq(gamma, zero), V::gt(zero, gamma));
    return V::sub(V::select(up, range.high(), range.low()), from);
  }

  static F off_from(const Columns& c, const OneRange& range, int j) { return V::min(V::max(c.threshold(j), range.low()), range.high()); }

  /// Bits of a tile that lies in a drawn block.
  template <DType type>
  static void write_plane(const SideCode& code, const void* in, const Columns& c, const OneRange& range, const uint16_t* noise, int64_t b,
                          int64_t i, int count) {
    uint64_t word = 0;
    with_noise<V>(noise, kUpper, [&](int k, I own) {
      const int j = k * kLanes;
      const F v = V::flush(V::template load<type>(in, j)), from = off_from(c, range, j), way = off_way(c, range, from, j);
      const uint32_t on = V::bits(V::gt(V::fma(c.gamma(j), v, c.beta(j)), V::set(0.0f)));
      const uint32_t beyond = V::bits(V::gt(V::magnitude(V::sub(v, from)), V::mul(uniform_of(own), V::magnitude(way))));
      word |= static_cast<uint64_t>(beyond & ~on) << j;
    });
    if (count < kTile) word &= (uint64_t{1} << count) - 1;
    uint8_t* to = code.plane.bytes + off_byte(code, b, i);
    for (int k = 0; k * 8 < count; ++k) to[k] = static_cast<uint8_t>(to[k] | word >> (8 * k));
  }

  /// Values of the off codes of such a tile, eight a byte of `word`.
  static F plane_values(uint64_t word, uint32_t weight, const Columns& c, const OneRange& range, int j) {
    const F from = off_from(c, range, j), mean = c.off_mean(j);
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

  /// Tiles whose values follow `in`. Not inlined: what it works with is to stay in registers.
  template <int bits, int off, DType type, class R>
  [[gnu::noinline]] static int64_t encode_run(const char* in, const SideTable& table, Columns& columns, typename R::Argument range,
                                              TileNoise<V>& noise, uint8_t* codes, int64_t i, int64_t tiles, int count) {
    Columns c = columns;
    for (int64_t k = 0; k < tiles; ++k, i += kTile, in += kTile * size_of(type), c.next()) {
      Codes<bits, off> out;
      Base::template fetch_ahead<type>(in);
      noise.spend(i, kUpper,
                  [&](int v, I own) { put_codes<bits, off>(out, v, V::template load<type>(in, v * kLanes), table, c, range, own); });
      write<bits>(out, codes, i, count);
    }
    columns.at = c.at;
    return tiles;
  }

  template <int bits, int off, DType type>
  static void encode_tiles(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes,
                           int64_t first, int64_t last) {
    Channels own(code, channels, first, last);
    const SideTable table = code.table;
    const bool planes = bits == 2 && off == 1 && code.plane.bytes != nullptr;
    const OffKey key = planes ? stored_key(code) : OffKey{};
    TileNoise<V> noise(code.rounding, seed, first);
    Base::for_each_run(code.grid, first, last, [&](int64_t i, int64_t tiles, int count, int64_t b) {
      Lane64 copy;
      const auto* in = static_cast<const char*>(Base::template tile_source<type>(x, i, count, copy));
      const bool drawn = planes && b >= 0 && weight_of(code, key, headers, b) > 0;
      return with_ranges<off>(code, headers, i, drawn ? 1 : tiles, count, b, own, [&](const auto& range, int64_t some) {
        using R = std::decay_t<decltype(range)>;
        if (drawn) {
          write_plane<type>(code, in, own.columns, OneRange(load_range(headers, code.header, b)), noise.words(), b, i, count);
        } else if (planes && b < 0) {
          for_each_drawn(code, key, headers, i, count, [&](int64_t part, uint32_t, int64_t at) {
            const uint32_t chance =
                code.rounding == Rounding::nearest ? kNearestNoise : satchel::noise(seed, Stream::rounding, static_cast<uint64_t>(at));
            const Range part_range = load_range(headers, code.header, part);
            const bool bit = off_bit_of(load(x.data, type, at - x.origin), channel_at(code, channels, at), part_range, chance);
            if (bit) code.plane.bytes[off_byte(code, part, at)] |= static_cast<uint8_t>(1u << (at % 8));
          });
        }
        return encode_run<bits, off, type, R>(in, table, own.columns, range, noise, codes, i, some, count);
      });
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
    if constexpr (off == 1) v = V::select_negative(level, c.off_mean(j), v);
    if constexpr (!R::kMayBePoisoned) return v;
    const F high = range.high(j);
    return V::select(V::eq(high, high), v, V::set(float_of(kCanonicalNaN)));
  }

  template <int bits>
  static I codes_at(const uint8_t* in, int v) {
    if constexpr (bits == 2) return V::two_bit_codes(in, v);
    return Base::template codes_at<bits>(in, v);
  }

  /// Tiles whose codes follow `in`. Not inlined: what it works with is to stay in registers.
  template <int bits, int off, DType type, class R>
  [[gnu::noinline]] static int64_t decode_run(const uint8_t* in, const Tables& tables, Columns& columns, typename R::Argument range,
                                              char* out, int64_t tiles, bool past_caches) {
    Columns c = columns;
    const auto run = [&](const auto& put) {
      for (int64_t k = 0; k < tiles; ++k, in += kTile / 8 * bits, out += kTile * size_of(type), c.next()) {
        for (int v = 0, j = 0; v < Base::kVectors; ++v, j += kLanes)
          put(j, values_of<bits, off>(codes_at<bits>(in, v), tables, c, range, j));
      }
    };
    if (type == DType::f32 && past_caches) {
      run([&](int j, F v) { V::stream(reinterpret_cast<float*>(out) + j, v); });
    } else {
      run([&](int j, F v) { V::template store<type>(out, j, v); });
    }
    columns.at = c.at;
    return tiles;
  }

  template <int bits, int off, DType type>
  static void decode_tiles(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x,
                           int64_t first, int64_t last) {
    Channels own(code, channels, first, last);
    const Tables tables = load_tables<bits, off>(code.table);
    const bool planes = bits == 2 && off == 1 && code.plane.bytes != nullptr;
    const OffKey key = planes ? stored_key(code) : OffKey{};
    Base::for_each_run(code.grid, first, last, [&](int64_t i, int64_t tiles, int count, int64_t b) {
      alignas(64) uint8_t code_copy[kTile];
      Lane64 copy;
      char* at = static_cast<char*>(x.data) + (i - x.origin) * size_of(type);
      char* out = count == kTile ? at : reinterpret_cast<char*>(copy.v);
      const uint8_t* in = Base::template code_source<bits>(codes, i, count, code_copy);
      const uint32_t weight = planes && b >= 0 ? weight_of(code, key, headers, b) : 0;
      const bool changes = weight > 0 || (planes && b < 0);  // are off values put in afterwards?
      const bool past_caches = x.streaming && count == kTile && !changes && reinterpret_cast<uintptr_t>(at) % 64 == 0;
      const int64_t done = with_ranges<off>(code, headers, i, weight > 0 ? 1 : tiles, count, b, own, [&](const auto& range, int64_t some) {
        using R = std::decay_t<decltype(range)>;
        const Columns c = own.columns;
        decode_run<bits, off, type, R>(in, tables, own.columns, range, out, some, past_caches);
        if constexpr (bits == 2 && off == 1) {
          const uint64_t word = weight > 0 ? read_plane(code, b, i, count) : 0;
          for (int v = 0, j = 0; weight > 0 && v < Base::kVectors; ++v, j += kLanes) {
            const F value = V::template load<type>(out, j),
                    drawn = plane_values(word, weight, c, OneRange(load_range(headers, code.header, b)), j);
            V::template store<type>(out, j, V::select(V::any_of(codes_at<bits>(in, v), 3), value, drawn));
          }
        }
        return some;
      });
      if (count < kTile) std::memcpy(at, copy.v, static_cast<size_t>(count * size_of(type)));
      if (!planes || b >= 0) return done;
      for_each_drawn(code, key, headers, i, count, [&](int64_t part, uint32_t part_weight, int64_t k) {
        if (get_code(codes, bits, k) != 0) return;
        const bool bit = (code.plane.bytes[off_byte(code, part, k)] >> (k % 8) & 1) != 0;
        const float value = off_value_of(bit, part_weight, channel_at(code, channels, k), load_range(headers, code.header, part));
        satchel::store(x.data, type, k - x.origin, value);
      });
      return done;
    });
    if (x.streaming) _mm_sfence();
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
