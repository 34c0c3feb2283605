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

  /// A tile's channels, one array a field.
  struct Columns {
    const float *threshold, *gamma, *beta, *off_mean;
  };

  /// Channel fields in columns. Where neighbouring values are neighbouring channels a tile reads a window of a table that wraps
  /// around; else each tile is filled by runs.
  class Channels {
   public:
    Channels(const SideCode& code, const Channel* channels) : code_(code), channels_(channels) {
      wraps_ = channels != nullptr && code.inner == 1;
      stride_ = wraps_ ? code.channels + kTile : kTile;
      table_ = new float[static_cast<size_t>(4 * stride_)];  // not std::vector, see vector.h
      if (wraps_) {
        for (int64_t c = 0; c < stride_; ++c) put(c, channels[c % code.channels]);
      } else if (channels == nullptr) {
        for (int64_t c = 0; c < stride_; ++c) put(c, relu_channel());
      }
    }

    Channels(const Channels&) = delete;
    Channels& operator=(const Channels&) = delete;
    ~Channels() { delete[] table_; }

    Columns tile(int64_t i) {
      int64_t at = 0;
      if (wraps_) {
        at = i % code_.channels;
      } else if (channels_ != nullptr) {
        int64_t run = i / code_.inner;
        int64_t end = (run + 1) * code_.inner;
        for (int64_t j = 0; j < kTile; ++j) {
          if (i + j == end) {
            ++run;
            end += code_.inner;
          }
          put(j, channels_[run % code_.channels]);
        }
      }
      const float* t = table_ + at;
      return {t, t + stride_, t + 2 * stride_, t + 3 * stride_};
    }

   private:
    void put(int64_t at, const Channel& c) {
      float* t = table_ + at;
      t[0] = c.threshold;
      t[stride_] = c.gamma;
      t[2 * stride_] = c.beta;
      t[3 * stride_] = off_value(c);
    }

    const SideCode& code_;
    const Channel* channels_;
    bool wraps_ = false;
    int64_t stride_ = 0;
    float* table_ = nullptr;
  };

  /// Low and high of every value of a tile.
  struct Ranges {
    Lane64 low, high;
  };

  static void fill_ranges(const SideCode& code, const void* headers, int64_t i, int count, int64_t b, Ranges& r) {
    if (b >= 0) {
      const Range range = load_range(headers, code.header, b);
      Base::fill(r.low.v, r.low.v + kTile, range.low);
      Base::fill(r.high.v, r.high.v + kTile, range.high);
      return;
    }
    Base::fill(r.low.v, r.low.v + kTile, 0.0f);
    Base::fill(r.high.v, r.high.v + kTile, 0.0f);
    Base::for_each_part(code.grid, i, count, [&](int64_t part, int from, int to) {
      const Range range = load_range(headers, code.header, part);
      Base::fill(r.low.v + from, r.low.v + to, range.low);
      Base::fill(r.high.v + from, r.high.v + to, range.high);
    });
  }

  struct Stretch {
    F from, length;
    M up, is_long;
  };

  static Stretch stretch_of(M on, F threshold, F gamma, F low, F high) {
    const M flat = V::eq(gamma, V::set(0.0f)), falls = V::gt(V::set(0.0f), gamma);
    const M up = V::either(flat, V::exclusive(on, falls));
    const F from = V::select(flat, low, V::min(V::max(threshold, low), high));
    const F length = V::select(up, V::sub(high, from), V::sub(from, low));
    return {from, length, up, V::gt(length, V::mul(V::set(0.8f), V::sub(high, low)))};
  }

  /// Level of distance d on a stretch: as side_level of core/side.h.
  static I level_of(F d, const Stretch& s, const float* usual, const float* longer, int count, F u) {
    F mark = V::set(0.0f);
    I level = V::set_i(0);
    for (int i = 1; i < count; ++i) {
      const F next = V::mul(V::select(s.is_long, V::set(longer[i]), V::set(usual[i])), s.length);
      const M beyond = V::gt(d, V::fma(u, V::sub(next, mark), mark));
      level = V::add(level, V::select_i(beyond, V::set_i(1), V::set_i(0)));
      mark = next;
    }
    return level;
  }

  static I codes_of(F x, const SideTable& t, F threshold, F gamma, F beta, F low, F high, I noise) {
    const F v = V::flush(x);
    const M on = V::gt(V::fma(gamma, v, beta), V::set(0.0f));
    const Stretch s = stretch_of(on, threshold, gamma, low, high);
    const F d = V::magnitude(V::sub(v, s.from));
    const F u = V::sub(V::offset_noise(noise), V::set(127.99999237060547f));
    const I passing = V::add(V::set_i(t.off), level_of(d, s, t.on_short, t.on_long, t.on, u));
    const I blocked = t.off == 1 ? V::set_i(0) : V::sub_i(V::set_i(t.off - 1), level_of(d, s, t.off_short, t.off_long, t.off, u));
    return V::select_i(V::eq(high, high), V::select_i(on, passing, blocked), V::set_i(0));  // a poisoned block is all 0
  }

  template <int bits, DType type>
  static void encode_tiles(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes,
                           int64_t first, int64_t last) {
    Channels columns(code, channels);
    Base::for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      alignas(64) uint16_t noise[kTile];
      I out[Base::kVectors];
      Lane64 copy;
      Ranges r;
      const void* in = Base::template tile_source<type>(x, i, count, copy);
      const Columns c = columns.tile(i);
      Base::draw_noise(code.rounding, seed, i, noise);
      fill_ranges(code, headers, i, count, b, r);
      for (int v = 0, j = 0; v < Base::kVectors; ++v, j += kLanes) {
        out[v] = codes_of(V::template load<type>(in, j), code.table, V::load_f32(c.threshold + j), V::load_f32(c.gamma + j),
                          V::load_f32(c.beta + j), V::load_f32(r.low.v + j), V::load_f32(r.high.v + j), V::load_noise(noise + j));
      }
      Base::template write_codes<bits>(out, codes, i, count);
    });
  }

  static void side_encode(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes,
                          int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      with_bits(code.table.bits, [&](auto bits) {
        if constexpr (bits() >= 2 && bits() <= 4) encode_tiles<bits(), type()>(code, x, channels, seed, headers, codes, first, last);
      });
    });
  }

  struct Tables {
    typename V::Table on_short, on_long, off_short, off_long;
  };

  static Tables load_tables(const SideTable& t) {
    const auto wide = [](const float* eight) {
      alignas(64) float sixteen[16] = {};
      std::memcpy(sixteen, eight, sizeof(float) * kMaxSideLevels);
      return V::load_table(sixteen);
    };
    return {wide(t.on_short), wide(t.on_long), wide(t.off_short), wide(t.off_long)};
  }

  static F values_of(I code, const SideTable& t, const Tables& tables, F threshold, F gamma, F off_mean, F low, F high) {
    const M on = V::gt_i(code, V::set_i(t.off - 1));
    const Stretch s = stretch_of(on, threshold, gamma, low, high);
    const I on_level = V::sub_i(code, V::set_i(t.off)), off_level = V::sub_i(V::set_i(t.off - 1), code);
    const I level = V::select_i(on, on_level, off_level);
    const F passing = V::select(s.is_long, V::lookup(tables.on_long, level), V::lookup(tables.on_short, level));
    const F blocked = V::select(s.is_long, V::lookup(tables.off_long, level), V::lookup(tables.off_short, level));
    const F signed_length = V::select(s.up, s.length, V::sub(V::set(0.0f), s.length));
    F v = V::flush(V::fma(V::select(on, passing, blocked), signed_length, s.from));
    if (t.off == 1) v = V::select(on, v, off_mean);
    return V::select(V::eq(high, high), v, V::set(float_of(kCanonicalNaN)));
  }

  template <int bits, DType type>
  static void decode_tiles(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x,
                           int64_t first, int64_t last) {
    Channels columns(code, channels);
    const Tables tables = load_tables(code.table);
    Base::for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      alignas(64) uint8_t code_copy[kTile];
      Lane64 copy;
      Ranges r;
      char* at = static_cast<char*>(x.data) + (i - x.origin) * size_of(type);
      void* out = count == kTile ? static_cast<void*>(at) : copy.v;
      const Columns c = columns.tile(i);
      const uint8_t* in = Base::template code_source<bits>(codes, i, count, code_copy);
      fill_ranges(code, headers, i, count, b, r);
      for (int n = 0, j = 0; n < Base::kVectors; ++n, j += kLanes) {
        const F v = values_of(Base::template codes_at<bits>(in, n), code.table, tables, V::load_f32(c.threshold + j), V::load_f32(c.gamma + j),
                              V::load_f32(c.off_mean + j), V::load_f32(r.low.v + j), V::load_f32(r.high.v + j));
        V::template store<type>(out, j, v);
      }
      if (count < kTile) std::memcpy(at, copy.v, static_cast<size_t>(count * size_of(type)));
    });
  }

  static void side_decode(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x,
                          int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      with_bits(code.table.bits, [&](auto bits) {
        if constexpr (bits() >= 2 && bits() <= 4) decode_tiles<bits(), type()>(code, codes, channels, headers, x, first, last);
      });
    });
  }
};

}  // namespace satchel::simd
