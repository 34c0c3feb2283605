// The SIMD kernels, written once over a vector type V (see avx2.cpp and avx512.cpp): tiles of 64 values, bit for bit what
// scalar.cpp does. Everything is a template over V and nothing is from the standard library's templates, so that no copy
// compiled for one instruction set can be the one the linker keeps for another.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "satchel/kernels/cpu/cpu.h"
#include "satchel/kernels/cpu/vector_noise.h"
#include "satchel/kernels/dispatch.h"

namespace satchel::simd {

constexpr int64_t kAhead = 16384;  // bytes: callers' next chunk, which they measure as soon as this one is coded

/// Numbers for every value of a tile that spans blocks.
struct alignas(64) Lane64 {
  float v[kTile];
};

/// Channels, a vector a field.
template <class V>
struct Fields {
  typename V::F threshold, gamma, beta, off_mean;
};

template <class V>
struct Codec {
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;

  static constexpr int kVectors = kTile / kLanes;

  /// 64 codes, one a byte, into 8·bits bytes: pext gathers the low bits of 8 bytes.
  template <int bits>
  static void squeeze_bytes(const uint8_t* code, uint8_t* out) {
    constexpr uint64_t kMask = 0x0101010101010101ull * ((1u << bits) - 1);
    for (int g = 0; g < 8; ++g) {
      uint64_t eight;
      std::memcpy(&eight, code + 8 * g, 8);
      eight = _pext_u64(eight, kMask);
      std::memcpy(out + g * bits, &eight, bits);
    }
  }

  /// A tile of codes into the stream. What is past `count` becomes 0.
  template <int bits>
  static void write_codes(const I (&c)[kVectors], uint8_t* codes, int64_t i, int count) {
    uint8_t* out = codes + i / 8 * bits;
    if constexpr (bits == 2) {
      if (count == kTile) return V::squeeze_two(c, out);
    }
    alignas(64) uint8_t code[kTile];
    for (int v = 0; v < kVectors; ++v) V::store_bytes(code + v * kLanes, c[v]);
    if (count == kTile) return squeeze_bytes<bits>(code, out);
    std::memset(code + count, 0, static_cast<size_t>(kTile - count));
    uint8_t tail[kTile];
    squeeze_bytes<bits>(code, tail);
    std::memcpy(out, tail, static_cast<size_t>(code_bytes(count, bits)));
  }

  /// A tile's bytes of codes, padded with 0 at the tensor's end.
  template <int bits>
  static const uint8_t* code_source(const uint8_t* codes, int64_t i, int count, uint8_t* copy) {
    if (count == kTile) return codes + i / 8 * bits;
    std::memset(copy, 0, kTile);
    std::memcpy(copy, codes + i / 8 * bits, static_cast<size_t>(code_bytes(count, bits)));
    return copy;
  }

  /// Vector v of a tile's codes: pdep spreads 8 codes out over 8 bytes.
  template <int bits>
  static I codes_at(const uint8_t* in, int v) {
    constexpr uint64_t kMask = 0x0101010101010101ull * ((1u << bits) - 1);
    uint64_t eight[kLanes / 8];
    for (int g = 0; g < kLanes / 8; ++g) {
      uint64_t packed = 0;
      std::memcpy(&packed, in + (v * (kLanes / 8) + g) * bits, bits);
      eight[g] = _pdep_u64(packed, kMask);
    }
    return V::widen_bytes(eight);
  }

  static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

  /// Not std::fill: a library template compiled here must not be the copy that others link to.
  static void fill(float* from, float* to, float v) {
    for (; from < to; ++from) *from = v;
  }

  // ---- headers -------------------------------------------------------------------------------------------------------

  struct Extremes {
    float least, most;
    bool finite;
  };

  /// Without what is subnormal flushed.
  template <DType type>
  static Extremes raw_extremes(const void* x, int64_t begin, int64_t end) {
    F least = V::set(float_of(0x7f800000u)), most = V::set(float_of(0xff800000u)), poison = V::set(0.0f), poison2 = poison;
    int64_t i = begin;
    const auto add = [&](F v, F& bad) {
      least = V::min(v, least);
      most = V::max(v, most);
      bad = V::fma(v, V::set(0.0f), bad);  // 0·∞ and 0·NaN are NaN, all else stays 0
    };
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      add(V::template load<type>(x, i), poison);
      add(V::template load<type>(x, i + kLanes), poison2);
    }
    if (i + kLanes <= end) {
      add(V::template load<type>(x, i), poison);
      i += kLanes;
    }
    Extremes e = {V::least(least), V::most(most), V::all_zero(V::add_f(poison, poison2))};
    for (; i < end; ++i) {
      const float v = satchel::load(x, type, i);
      e.finite = e.finite && is_finite(v);
      e.least = v < e.least ? v : e.least;
      e.most = v > e.most ? v : e.most;
    }
    return e;
  }

  template <DType type>
  static Extremes extremes(const void* x, int64_t begin, int64_t end) {
    const Extremes e = raw_extremes<type>(x, begin, end);
    return {flush(e.least), flush(e.most), e.finite};
  }

  static void measure(const BlockCode& code, Source x, void* headers, int64_t first, int64_t last) {
    const int top = (1 << code.levels.bits) - 1;
    with_type(x.type, [&](auto type) {
      for (int64_t b = first; b < last; ++b) {
        const Extremes e = extremes<type()>(x.data, code.grid.begin(b) - x.origin, code.grid.end(b) - x.origin);
        store_header(headers, code.header, b, make_header(e.least, e.most, e.finite, top, code.header));
      }
    });
  }

  static void side_measure(const SideCode& code, Source x, void* headers, int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      for (int64_t b = first; b < last; ++b) {
        const Extremes e = extremes<type()>(x.data, code.grid.begin(b) - x.origin, code.grid.end(b) - x.origin);
        store_range(headers, code.header, b, make_range(e.least, e.most, e.finite, code.header));
      }
    });
  }

  // ---- what tiles share ----------------------------------------------------------------------------------------------

  /// While a tile's chunk is coded from cache, the next comes in from memory.
  template <DType type>
  static void fetch_ahead(const void* in) {
    for (int64_t line = 0; line < kTile * size_of(type); line += 64)
      _mm_prefetch(static_cast<const char*>(in) + kAhead + line, _MM_HINT_T0);
  }

  /// A tile's values as loads see them: straight from memory, or from a zero-padded copy at the tensor's end.
  template <DType type>
  static const void* tile_source(Source x, int64_t i, int count, Lane64& copy) {
    const char* at = static_cast<const char*>(x.data) + (i - x.origin) * size_of(type);
    if (count == kTile) return at;
    std::memset(copy.v, 0, sizeof(copy.v));
    std::memcpy(copy.v, at, static_cast<size_t>(count * size_of(type)));
    return copy.v;
  }

  /// Calls f(i, count, block or −1): the tiles of [first, last), with their block where they lie in a single one.
  template <class Visit>
  static void for_each_tile(const Grid& grid, int64_t first, int64_t last, const Visit& visit) {
    int64_t b = -1, end = first;
    for (int64_t i = first; i < last; i += kTile) {
      const int count = static_cast<int>(last - i < kTile ? last - i : kTile);
      if (i >= end) {
        b = grid.block_of(i);
        end = grid.end(b);
      }
      visit(i, count, i + count <= end ? b : -1);
    }
  }

  /// Calls f(i, tiles, count, block or −1) for the tiles of [first, last): so many whole ones in a single block, of which f does one or
  /// more and says how many; or one that spans blocks or ends the tensor and has `count` values.
  template <class Visit>
  static void for_each_run(const Grid& grid, int64_t first, int64_t last, const Visit& visit) {
    int64_t b = -1, end = first;
    for (int64_t i = first; i < last;) {
      if (i >= end) {
        b = grid.block_of(i);
        end = least_of(grid.end(b), last);
      }
      const int64_t count = least_of(last - i, kTile), tiles = (end - i) / kTile;
      i += kTile * visit(i, tiles > 0 ? tiles : 1, static_cast<int>(count), i + count <= end ? b : -1);
    }
  }

  /// Calls f(block, from, to): the parts of a tile by block.
  template <class Visit>
  static void for_each_part(const Grid& grid, int64_t i, int count, const Visit& visit) {
    for (int64_t at = i; at < i + count;) {
      const int64_t b = grid.block_of(at), end = least_of(grid.end(b), i + count);
      visit(b, static_cast<int>(at - i), static_cast<int>(end - i));
      at = end;
    }
  }

  // ---- block code ----------------------------------------------------------------------------------------------------

  /// 2^16·y onto the levels, in 2^16ths of a code.
  template <int bits>
  static F on_levels(F y16, const LevelTable& levels) {
    constexpr int kTop = (1 << bits) - 1;
    F c = V::fma(y16, V::set(levels.slope), V::set(levels.base));
    for (int p = 1; 2 * p < kTop; ++p) {
      const F held = V::min(V::max(y16, V::set(levels.at[p] * 65536.0f)), V::set(levels.at[kTop - p] * 65536.0f));
      c = V::fma(held, V::set(levels.bend[p]), c);
    }
    return c;
  }

  template <int bits, bool even>
  static I quantise(F y16, const LevelTable& levels, I noise) {
    F c = V::min(y16, V::set(static_cast<float>((1 << bits) - 1) * 65536.0f));
    if constexpr (!even) c = on_levels<bits>(c, levels);
    return V::shift16(V::add(V::rint(c), noise));
  }

  /// A tile inside one block.
  template <int bits, bool even, DType type>
  static void encode_one_block(const LevelTable& levels, Header h, const void* in, int64_t i, TileNoise<V>& noise, I (&out)[kVectors]) {
    const Ruler r = make_ruler(h);
    noise.spend(i, 0, [&](int v, I own) {
      const F d = V::fma_flushed(V::template load<type>(in, v * kLanes), V::set(r.scale), V::set(r.offset));
      out[v] = quantise<bits, even>(V::mul(d, V::set(r.inverse)), levels, own);
    });
  }

  /// A tile over several blocks: every value has its own ruler.
  template <int bits, bool even, DType type>
  static void encode_parts(const BlockCode& code, const void* headers, int64_t i, int count, const void* in, TileNoise<V>& noise,
                           I (&out)[kVectors]) {
    Lane64 scale, offset, inverse;
    fill(scale.v + count, scale.v + kTile, 0.0f);
    fill(offset.v + count, offset.v + kTile, 0.0f);
    fill(inverse.v + count, inverse.v + kTile, 0.0f);
    for_each_part(code.grid, i, count, [&](int64_t part, int from, int to) {
      const Ruler r = make_ruler(load_header(headers, code.header, part));
      fill(scale.v + from, scale.v + to, r.scale);
      fill(offset.v + from, offset.v + to, r.offset);
      fill(inverse.v + from, inverse.v + to, r.inverse);
    });
    noise.spend(i, 0, [&](int v, I own) {
      const int j = v * kLanes;
      const F d = V::fma_flushed(V::template load<type>(in, j), V::load_f32(scale.v + j), V::load_f32(offset.v + j));
      const F y16 = V::max(V::mul(d, V::load_f32(inverse.v + j)), V::set(0.0f));  // NaN of a poisoned block → 0
      out[v] = quantise<bits, even>(y16, code.levels, own);
    });
  }

  template <int bits, bool even, DType type>
  static void encode_tiles(const BlockCode& code, Source x, uint64_t seed, const void* headers, uint8_t* codes, int64_t first,
                           int64_t last) {
    TileNoise<V> noise(code.rounding, seed, first);
    for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      Lane64 copy;
      I out[kVectors];
      const void* in = tile_source<type>(x, i, count, copy);
      fetch_ahead<type>(in);
      const Header h = b >= 0 ? load_header(headers, code.header, b) : poisoned();
      if (b >= 0 && !is_poisoned(h)) {
        encode_one_block<bits, even, type>(code.levels, h, in, i, noise, out);
      } else {
        encode_parts<bits, even, type>(code, headers, i, count, in, noise, out);
      }
      write_codes<bits>(out, codes, i, count);
    });
  }

  static void encode(const BlockCode& code, Source x, uint64_t seed, const void* headers, uint8_t* codes, int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      with_bits(code.levels.bits, [&](auto bits) {
        if constexpr (bits() >= 2 && bits() <= 4) {
          if (!code.levels.even) return encode_tiles<bits(), false, type()>(code, x, seed, headers, codes, first, last);
        }
        encode_tiles<bits(), true, type()>(code, x, seed, headers, codes, first, last);
      });
    });
  }

  /// Values of a tile inside one block: up to 16 codes by table, more by arithmetic.
  template <int bits, class Put>
  static void decode_one_block(typename V::Table positions, Header h, const uint8_t* in, const Put& put) {
    if constexpr (bits <= 4) {
      const auto loaded = V::value_table(positions, h);
      for (int v = 0; v < kVectors; ++v) {
        // The table repeats, so a 2-bit code may come with its neighbour's bits above it.
        if constexpr (bits == 2) {
          put(v * kLanes, V::lookup_two(loaded, V::two_bit_codes(in, v)));
        } else {
          put(v * kLanes, V::lookup(loaded, codes_at<bits>(in, v)));
        }
      }
    } else {
      for (int v = 0; v < kVectors; ++v) {
        put(v * kLanes, V::flush(V::fma(V::to_float(codes_at<bits>(in, v)), V::set(h.step), V::set(h.low))));
      }
    }
  }

  template <int bits, class Put>
  static void decode_parts(const BlockCode& code, const void* headers, typename V::Table positions, int64_t i, int count, const uint8_t* in,
                           const Put& put) {
    Lane64 low, step;
    fill(low.v + count, low.v + kTile, 0.0f);
    fill(step.v + count, step.v + kTile, 0.0f);
    for_each_part(code.grid, i, count, [&](int64_t b, int from, int to) {
      const Header h = load_header(headers, code.header, b);
      fill(low.v + from, low.v + to, h.low);
      fill(step.v + from, step.v + to, h.step);
    });
    for (int v = 0, j = 0; v < kVectors; ++v, j += kLanes) {
      const I c = codes_at<bits>(in, v);
      const F level = bits > 4 ? V::to_float(c) : V::lookup(positions, c);
      put(j, V::flush(V::fma(level, V::load_f32(step.v + j), V::load_f32(low.v + j))));
    }
  }

  /// Where the codes sit, 16 of them: those of 1 to 3 bits repeat.
  static typename V::Table positions_of(const LevelTable& levels) {
    alignas(64) float at[16];
    for (int c = 0; c < 16; ++c) {
      const int own = levels.bits < 4 ? c & ((1 << levels.bits) - 1) : c;
      at[c] = levels.even ? static_cast<float>(own) : levels.at[own];
    }
    return V::load_table(at);
  }

  template <int bits, DType type>
  static void decode_tiles(const BlockCode& code, const uint8_t* codes, const void* headers, Target x, int64_t first, int64_t last) {
    const auto positions = positions_of(code.levels);
    for_each_tile(code.grid, first, last, [&](int64_t i, int count, int64_t b) {
      alignas(64) uint8_t code_copy[kTile];
      Lane64 copy;
      char* at = static_cast<char*>(x.data) + (i - x.origin) * size_of(type);
      void* out = count == kTile ? static_cast<void*>(at) : copy.v;
      const uint8_t* in = code_source<bits>(codes, i, count, code_copy);
      const auto decode_into = [&](const auto& put) {
        if (b >= 0) {
          decode_one_block<bits>(positions, load_header(headers, code.header, b), in, put);
        } else {
          decode_parts<bits>(code, headers, positions, i, count, in, put);
        }
      };
      if (type == DType::f32 && x.streaming && count == kTile && reinterpret_cast<uintptr_t>(at) % 64 == 0) {
        decode_into([&](int j, F v) { V::stream(static_cast<float*>(out) + j, v); });
      } else {
        decode_into([&](int j, F v) { V::template store<type>(out, j, v); });
      }
      if (count < kTile) std::memcpy(at, copy.v, static_cast<size_t>(count * size_of(type)));
    });
    if (x.streaming) _mm_sfence();
  }

  static void decode(const BlockCode& code, const uint8_t* codes, const void* headers, Target x, int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      with_bits(code.levels.bits, [&](auto bits) { decode_tiles<bits(), type()>(code, codes, headers, x, first, last); });
    });
  }

  // ---- masks ---------------------------------------------------------------------------------------------------------

  static void mask(Source x, uint8_t* mask, int64_t first, int64_t last) {
    with_type(x.type, [&](auto type) {
      for (int64_t i = first; i < last; i += kTile) {
        const int count = static_cast<int>(last - i < kTile ? last - i : kTile);
        Lane64 copy;
        const void* in = tile_source<type()>(x, i, count, copy);
        fetch_ahead<type()>(in);
        uint64_t word = 0;
        for (int j = 0; j < kTile; j += kLanes) {
          word |= static_cast<uint64_t>(V::bits(V::gt(V::flush(V::template load<type()>(in, j)), V::set(0.0f)))) << j;
        }
        std::memcpy(mask + i / 8, &word, static_cast<size_t>(code_bytes(count, 1)));
      }
    });
  }
};

}  // namespace satchel::simd
