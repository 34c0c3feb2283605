// Entries of the random projection P (theory.md 4), redrawn from counters: nothing is stored.
//
//   P[d][r] = ±1/√R. Independent signs: bit d·R + r of the matrix' noise, 128 bits a Philox call.
//   Hadamard form: sign(d) · (−1)^popcount(d & column(r)), column(r) = a ⊗ r ⊕ b in GF(2^k), 2^k ≥ D. Any two columns are
//   uniform among unequal ones, which is all that the variance (2^k − R)/R of random columns without repetition asks for.
#pragma once

#include <cstdint>

#include "satchel/core/noise.h"
#include "satchel/core/portable.h"

namespace satchel {

struct Projection {
  int64_t rows = 0;        // of H
  int columns = 0;         // D, of H
  int width = 0;           // R, of Z
  int64_t per_matrix = 0;  // rows that share one matrix
  bool hadamard = false;

  SATCHEL_HD constexpr int64_t matrices() const { return per_matrix == 0 ? 0 : (rows + per_matrix - 1) / per_matrix; }
};

constexpr int kMaxProjectionLog = 20;  // D up to 2^20

SATCHEL_HD constexpr int log2_up(int n) {
  int k = 0;
  while ((1 << k) < n) ++k;
  return k;
}

/// Irreducible polynomial of degree k over GF(2), without its leading term.
SATCHEL_HD constexpr uint32_t field_polynomial(int k) {
  constexpr uint32_t low[kMaxProjectionLog + 1] = {0,   0x1, 0x3,  0x3,  0x3, 0x5,  0x3, 0x3, 0x1b, 0x3, 0x9,
                                                   0x5, 0x9, 0x1b, 0x21, 0x3, 0x2b, 0x9, 0x9, 0x27, 0x9};
  return low[k];
}

/// a·b in GF(2^k).
SATCHEL_HD constexpr uint32_t field_product(uint32_t a, uint32_t b, int k) {
  uint32_t product = 0;
  for (int i = 0; i < k; ++i) {
    product ^= (b >> i & 1u) != 0 ? a : 0u;
    const bool carry = (a >> (k - 1) & 1u) != 0;
    a = ((a << 1) & ((1u << k) - 1)) ^ (carry ? field_polynomial(k) : 0u);
  }
  return product;
}

/// 128 bits of the matrix' noise; the Hadamard form draws its row signs from `part` 1 and its columns from `part` 2.
SATCHEL_HD constexpr Words projection_words(uint64_t seed, int64_t matrix, uint32_t index, uint32_t part) {
  return philox(seed, {index, static_cast<uint32_t>(matrix), static_cast<uint32_t>(Stream::projection),
                       static_cast<uint32_t>(static_cast<uint64_t>(matrix) >> 32) << 2 | part});
}

/// Column of the Walsh–Hadamard matrix that column r of P takes.
SATCHEL_HD constexpr uint32_t hadamard_column(uint64_t seed, int64_t matrix, int r, int log_size) {
  if (log_size == 0) return 0;
  const Words w = projection_words(seed, matrix, 0, 2);
  const uint32_t mask = (1u << log_size) - 1;
  return field_product(1 + w.w[0] % mask, static_cast<uint32_t>(r), log_size) ^ (w.w[1] & mask);
}

/// Is P[d][r] negative? The definition; kernels that draw whole matrices share the Philox calls.
SATCHEL_HD constexpr bool is_negative(const Projection& p, uint64_t seed, int64_t matrix, int d, int r) {
  if (p.hadamard) {
    const Words w = projection_words(seed, matrix, static_cast<uint32_t>(d) / 128, 1);
    uint32_t both = static_cast<uint32_t>(d) & hadamard_column(seed, matrix, r, log2_up(p.columns));
    uint32_t parity = w.w[d % 128 / 32] >> (d % 32) & 1u;
    for (; both != 0; both &= both - 1) parity ^= 1u;
    return parity != 0;
  }
  const uint64_t bit = static_cast<uint64_t>(d) * static_cast<uint64_t>(p.width) + static_cast<uint64_t>(r);
  const Words w = projection_words(seed, matrix, static_cast<uint32_t>(bit / 128), 0);
  return (w.w[bit % 128 / 32] >> (bit % 32) & 1u) != 0;
}

}  // namespace satchel
