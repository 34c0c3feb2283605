// The chain of kernels/chain.h over a vector type V, in tiles of 64 values, bit for bit what scalar.cpp does.
#pragma once

#include "satchel/kernels/chain.h"
#include "satchel/kernels/cpu/vector.h"

namespace satchel::simd {

template <class V>
struct ChainCodec {
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;
  static constexpr int kLanes = V::kLanes;

  /// γ and β of one tile after the other: windows of a table that wraps around.
  class Affine {
   public:
    Affine(const Chain& c, const float* gamma, const float* beta, int64_t first, int64_t last) : channels_(c.channels) {
      if (gamma == nullptr) return;
      stride_ = kTile + (c.channels < last - first ? c.channels : last - first);
      table_ = new float[static_cast<size_t>(2 * stride_)];  // not std::vector, see vector.h
      step_ = kTile % c.channels;
      int64_t channel = (c.origin + first) % c.channels;
      for (int64_t at = 0; at < stride_; ++at) {
        table_[at] = gamma[channel];
        table_[stride_ + at] = beta[channel];
        channel = channel + 1 < c.channels ? channel + 1 : 0;
      }
    }

    Affine(const Affine&) = delete;
    Affine& operator=(const Affine&) = delete;
    ~Affine() { delete[] table_; }

    F apply(F x, int j) const {
      if (table_ == nullptr) return x;
      return V::fma(V::load_f32(table_ + at_ + j), x, V::load_f32(table_ + stride_ + at_ + j));
    }
    void next() {
      at_ += step_;
      if (at_ >= channels_) at_ -= channels_;
    }

   private:
    float* table_ = nullptr;
    int64_t channels_, stride_ = 0, at_ = 0, step_ = 0;
  };

  /// What values are multiplied by.
  class Factors {
   public:
    Factors(const Chain& c, uint64_t seed)
        : keys_(seed),
          group_(c.origin / kGroup),
          drop_(static_cast<int>(c.drop)),
          on_(chain_factor(c, true, true)),
          off_(chain_factor(c, false, true)) {}

    void draw(int64_t i) {
      if (drop_ == 0) return;
      alignas(64) uint16_t words[kTile];
      simd::draw(keys_, static_cast<uint64_t>(group_ + i / kGroup), Stream::dropout, words);
      with_noise<V>(words, 0, [&](int v, I noise) { noise_[v] = noise; });
    }
    F at(int j, M on) const {
      const F factor = V::select(on, V::set(on_), V::set(off_));
      if (drop_ == 0) return factor;
      return V::select(V::gt_i(V::set_i(drop_), noise_[j / kLanes]), V::set(0.0f), factor);
    }

   private:
    I noise_[kTile / kLanes];
    Keys<V> keys_;
    int64_t group_;
    int drop_;
    float on_, off_;
  };

  static int count_of(int64_t i, int64_t last) { return static_cast<int>(last - i < kTile ? last - i : kTile); }

  /// A tile as loads see it: in place, or in a zero-padded copy at the end.
  static const float* source(const float* x, int count, Lane64& copy) {
    if (count == kTile) return x;
    std::memset(copy.v, 0, sizeof(copy.v));
    std::memcpy(copy.v, x, static_cast<size_t>(count) * sizeof(float));
    return copy.v;
  }

  /// A tile's bits, those past `count` 0.
  static uint64_t bits_at(const uint8_t* on, int64_t i, int count) {
    uint64_t word = 0;
    std::memcpy(&word, on + i / 8, static_cast<size_t>(code_bytes(count, 1)));
    return word;
  }

  /// Tile by tile: to[i] = value(from[i], place in the tile, bits of `on` or all ones).
  template <class Next, class Value>
  static void map(const float* from, const uint8_t* on, float* to, int64_t first, int64_t last, const Next& next, const Value& value) {
    for (int64_t i = first; i < last; i += kTile) {
      const int count = count_of(i, last);
      Lane64 in_copy, out_copy;
      const float* in = source(from + i, count, in_copy);
      float* out = count == kTile ? to + i : out_copy.v;
      const uint64_t bits = on == nullptr ? ~uint64_t{0} : bits_at(on, i, count);
      next(i);
      for (int j = 0; j < kTile; j += kLanes) {
        V::template store<DType::f32>(out, j, value(V::load_f32(in + j), j, V::mask_of(static_cast<uint32_t>(bits >> j))));
      }
      if (count < kTile) std::memcpy(to + i, out, static_cast<size_t>(count) * sizeof(float));
    }
  }

  static void chain(const Chain& c, const float* x, const float* gamma, const float* beta, const uint8_t* on, uint64_t seed, float* z,
                    int64_t first, int64_t last) {
    Affine affine(c, gamma, beta, first, last);
    Factors factors(c, seed);
    const F zero = V::set(0.0f);
    map(
        x, on, z, first, last,
        [&](int64_t i) {
          if (i > first) affine.next();
          factors.draw(i);
        },
        [&](F v, int j, M bits) {
          const F y = affine.apply(v, j);
          return V::add_f(V::mul(y, factors.at(j, on == nullptr ? V::gt(y, zero) : bits)), zero);
        });
  }

  static void chain_back(const Chain& c, const float* g, const uint8_t* on, uint64_t seed, float* out, int64_t first, int64_t last) {
    Factors factors(c, seed);
    map(
        g, on, out, first, last, [&](int64_t i) { factors.draw(i); }, [&](F v, int j, M bits) { return V::mul(v, factors.at(j, bits)); });
  }

  static void chain_on(const Chain& c, const float* x, const float* gamma, const float* beta, uint8_t* on, int64_t first, int64_t last) {
    Affine affine(c, gamma, beta, first, last);
    for (int64_t i = first; i < last; i += kTile) {
      const int count = count_of(i, last);
      Lane64 copy;
      const float* in = source(x + i, count, copy);
      uint64_t word = 0;
      for (int j = 0; j < kTile; j += kLanes) {
        word |= static_cast<uint64_t>(V::bits(V::gt(affine.apply(V::load_f32(in + j), j), V::set(0.0f)))) << j;
      }
      if (count < kTile) word &= (uint64_t{1} << count) - 1;  // β alone may be positive
      std::memcpy(on + i / 8, &word, static_cast<size_t>(code_bytes(count, 1)));
      affine.next();
    }
  }

  /// `off` codes are a power of two, 2^low of them: a code is on where any of its bits from `low` up is set. pext gathers one
  /// bit of every code.
  template <int bits>
  static void any_bit(const uint8_t* codes, int low, uint8_t* on, int64_t first, int64_t last) {
    constexpr int kCodes = bits == 2 ? 32 : 16, kBytes = kCodes / 8 * bits;
    uint64_t lowest = 0;
    for (int k = 0; k < kCodes; ++k) lowest |= uint64_t{1} << (k * bits);
    for (int64_t i = first; i < last; i += kCodes) {
      const int64_t left = last - i, count = left < kCodes ? left : kCodes;
      uint64_t word = 0;
      std::memcpy(&word, codes + i / 8 * bits, static_cast<size_t>(count == kCodes ? kBytes : code_bytes(count, bits)));
      uint64_t any = 0;
      for (int b = low; b < bits; ++b) any |= word >> b;
      uint64_t out = _pext_u64(any, lowest);
      if (count < kCodes) out &= (uint64_t{1} << count) - 1;
      std::memcpy(on + i / 8, &out, static_cast<size_t>(count == kCodes ? kCodes / 8 : code_bytes(count, 1)));
    }
  }

  static void side_on(const SideCode& code, const uint8_t* codes, uint8_t* on, int64_t first, int64_t last) {
    const int off = code.table.off, bits = code.table.bits;
    int low = 0;
    while (low < bits && (1 << low) < off) ++low;
    if ((1 << low) != off) return kScalar.side_on(code, codes, on, first, last);
    switch (bits) {
      case 2: return any_bit<2>(codes, low, on, first, last);
      case 3: return any_bit<3>(codes, low, on, first, last);
      case 4: return any_bit<4>(codes, low, on, first, last);
      default: return kScalar.side_on(code, codes, on, first, last);
    }
  }
};

}  // namespace satchel::simd
