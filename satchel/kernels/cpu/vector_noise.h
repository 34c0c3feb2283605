// Noise over a vector type V: Philox of core/noise.h, one counter a 64-bit lane.
#pragma once

#include <immintrin.h>

#include "satchel/core/code.h"
#include "satchel/core/noise.h"

namespace satchel::simd {

constexpr int kTile = 64;  // values at a time: 8 noise groups, 8·bits bytes of codes

/// Philox's keys, one a round.
template <class V>
struct Keys {
  typename V::I k0[kNoiseRounds], k1[kNoiseRounds];
  explicit Keys(uint64_t seed) {
    for (uint32_t round = 0; round < kNoiseRounds; ++round) {
      k0[round] = V::set_long(static_cast<uint32_t>(seed) + round * kPhiloxW0);
      k1[round] = V::set_long(static_cast<uint32_t>(seed >> 32) + round * kPhiloxW1);
    }
  }
};

/// The noises of a tile. A round waits for the one before: other work may be put between them.
template <class V>
class Rounds {
  using I = typename V::I;
  static constexpr int kSets = 16 / V::kLanes;  // of counters, each for the noises of four vectors

 public:
  [[gnu::always_inline]] Rounds(const Keys<V>& keys, uint64_t group, Stream stream) : keys_(keys) {
    for (int s = 0; s < kSets; ++s) {
      x0_[s] = V::count_up(group + static_cast<uint64_t>(s * V::kLanes / 2));
      x1_[s] = V::upper(x0_[s]);
      x2_[s] = V::set_long(static_cast<uint32_t>(stream));
      x3_[s] = V::set_long(0);
    }
  }

  [[gnu::always_inline]] void run(int round) {
    for (int s = 0; s < kSets; ++s) {
      const I p0 = V::product(x0_[s], kPhiloxM0), p1 = V::product(x2_[s], kPhiloxM1);
      if (round + 1 < kNoiseRounds) {
        x0_[s] = V::exclusive_i(V::upper(p1), x1_[s], keys_.k0[round]);
        x2_[s] = V::exclusive_i(V::upper(p0), x3_[s], keys_.k1[round]);
        x1_[s] = p1;
        x3_[s] = p0;
      } else {  // the products with their halves swapped are words 1 and 3 above what words 0 and 2 are made of
        x0_[s] = V::exclusive_swapped(p1, x1_[s], keys_.k0[round]);
        x2_[s] = V::exclusive_swapped(p0, x3_[s], keys_.k1[round]);
      }
    }
  }

  /// After the last round. Vectors of noises lie so that unpack_low() gives the first half and unpack_high() the other.
  void store(uint16_t* noise) const {
    for (int s = 0; s < kSets; ++s) V::store_noise(noise + s * 4 * V::kLanes, x0_[s], x2_[s]);
  }

 private:
  const Keys<V>& keys_;
  I x0_[kSets], x1_[kSets], x2_[kSets], x3_[kSets];
};

/// Noises of the 64 values from 8·group on.
template <class V>
[[gnu::always_inline]] inline void draw(const Keys<V>& keys, uint64_t group, Stream stream, uint16_t* noise) {
  Rounds<V> all(keys, group, stream);
#pragma GCC unroll 7
  for (int round = 0; round < kNoiseRounds; ++round) all.run(round);
  all.store(noise);
}

/// Calls f(v, noise) for the vectors of a tile. `upper` stands above each noise's 16 bits.
template <class V, class Use>
[[gnu::always_inline]] inline void with_noise(const uint16_t* noise, int upper, const Use& use) {
#pragma GCC unroll 4
  for (int v = 0; v < kTile / V::kLanes; v += 2) {
    const typename V::I two = V::load_words(noise + v * V::kLanes);
    use(v, V::unpack_low(two, V::set_words(upper)));
    use(v + 1, V::unpack_high(two, V::set_words(upper)));
  }
}

/// Rounding noise, tile after tile; nearest rounding has the same constant everywhere.
template <class V>
class TileNoise {
 public:
  TileNoise(Rounding rounding, uint64_t seed, int64_t first) : keys_(seed), is_drawn_(rounding == Rounding::stochastic) {
    for (uint16_t& n : words_) n = static_cast<uint16_t>(kNearestNoise);
    if (is_drawn_) draw(keys_, static_cast<uint64_t>(first / kGroup), Stream::rounding, words_);
  }

  /// Of the tile that comes next.
  const uint16_t* words() const { return words_; }

  /// with_noise() for the tile of value i, and the next tile's noise: between the vectors where registers allow it, else after them.
  template <class Use>
  [[gnu::always_inline]] void spend(int64_t i, int upper, const Use& use) {
    const uint64_t group = static_cast<uint64_t>(i + kTile) / kGroup;
    if (!is_drawn_ || V::kLanes < 16) {
      with_noise<V>(words_, upper, use);
      if (is_drawn_) draw(keys_, group, Stream::rounding, words_);
      return;
    }
    Rounds<V> next(keys_, group, Stream::rounding);
    with_noise<V>(words_, upper, [&](int v, typename V::I noise) {
      use(v, noise);
      for (int round = 2 * v; round < 2 * v + 2 && round < kNoiseRounds; ++round) next.run(round);
    });
    next.store(words_);
  }

 private:
  alignas(64) uint16_t words_[kTile];
  Keys<V> keys_;
  bool is_drawn_;
};

}  // namespace satchel::simd
