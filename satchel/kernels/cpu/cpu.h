// The CPU's implementations, best first. Each takes a range, so that callers share the work out over threads as they like.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "satchel/kernels/chain.h"
#include "satchel/kernels/codec.h"
#include "satchel/kernels/sparse.h"

namespace satchel {

/// Values in memory: data[0] is the tensor's value number `origin`, so a chunk that was made in a buffer can be coded too.
struct Source {
  const void* data;
  DType type;
  int64_t origin = 0;
};
struct Target {
  void* data;
  DType type;
  int64_t origin = 0;
  bool streaming = false;  // larger than the caches and not read soon: write past them
};

struct CpuKernels {
  const char* name;
  bool (*supported)();

  /// Headers of blocks [first, last).
  void (*measure)(const BlockCode&, Source x, void* headers, int64_t first, int64_t last);
  /// Codes of values [first, last); first is a multiple of 8, last too unless it is the end of the tensor.
  void (*encode)(const BlockCode&, Source x, uint64_t seed, const void* headers, uint8_t* codes, int64_t first, int64_t last);
  /// Values [first, last), first a multiple of 8.
  void (*decode)(const BlockCode&, const uint8_t* codes, const void* headers, Target x, int64_t first, int64_t last);

  /// The same three for side codes; `channels` is null for the relu form. Where the code has an off plane, its key stands there and its
  /// other bytes are 0 before the first call of side_encode.
  void (*side_measure)(const SideCode&, Source x, void* headers, int64_t first, int64_t last);
  void (*side_encode)(const SideCode&, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes, int64_t first,
                      int64_t last);
  void (*side_decode)(const SideCode&, const uint8_t* codes, const Channel* channels, const void* headers, Target x, int64_t first,
                      int64_t last);

  /// One bit a value, 1 where x > 0: bytes [first / 8, …) of mask.
  void (*mask)(Source x, uint8_t* mask, int64_t first, int64_t last);

  /// As the functions of these names below, to the bit.
  void (*off_sums)(const SideCode&, Source x, const Channel* channels, double* sums, int64_t first, int64_t last);
  void (*low_pass_split)(const LowPassShape&, Source x, uint16_t* means, float* rest, int64_t first, int64_t last);
  void (*low_pass_join)(const LowPassShape&, const uint16_t* means, const float* rest, Target x, int64_t first, int64_t last);

  /// Rows [first, last) of y = A·x, summed as sparse.h says; x and y have `width` columns, row after row.
  void (*multiply)(const Sparse&, const float* x, int64_t width, float* y, int64_t first, int64_t last);

  /// The chain of chain.h over places [first, last) of a buffer that starts at the tensor's value `origin`; first is a multiple
  /// of 8. `gamma` and `beta` are both null for y = x. z may be x, out may be g.
  void (*chain)(const Chain&, const float* x, const float* gamma, const float* beta, const uint8_t* on, uint64_t seed, float* z,
                int64_t first, int64_t last);
  /// out = g·factor; all are on where `on` is null.
  void (*chain_back)(const Chain&, const float* g, const uint8_t* on, uint64_t seed, float* out, int64_t first, int64_t last);
  /// One bit a value, 1 where y > 0.
  void (*chain_on)(const Chain&, const float* x, const float* gamma, const float* beta, uint8_t* on, int64_t first, int64_t last);
  /// The same bits from a side code's codes.
  void (*side_on)(const SideCode&, const uint8_t* codes, uint8_t* on, int64_t first, int64_t last);
};

extern const CpuKernels kScalar, kAvx2, kAvx512;

/// All that are compiled in, best first.
std::span<const CpuKernels* const> cpu_kernels();

/// The one of that name; throws with the list of names if there is none or this CPU lacks it.
const CpuKernels& cpu_kernel(std::string_view name);

/// The best this CPU supports, or the one that SATCHEL_KERNEL names.
const CpuKernels& best_cpu_kernel();

/// A run of one channel's values is summed in this many parts, value by value in turn, so that vectors can follow.
constexpr int kSumLanes = 16;

/// Sum and count of each channel's off values in [first, last), added to sums[2·c] and sums[2·c + 1].
void off_sums(const SideCode&, Source x, const Channel* channels, double* sums, int64_t first, int64_t last);

/// Low-pass of maps [first, last): window means (bf16, for all windows of those maps) and what is left of x (fp32, from the first map on).
void low_pass_split(const LowPassShape&, Source x, uint16_t* means, float* rest, int64_t first, int64_t last);
/// x = rest + means, for maps [first, last); rest starts at the first map.
void low_pass_join(const LowPassShape&, const uint16_t* means, const float* rest, Target x, int64_t first, int64_t last);

/// Matrices [first, last) of a projection, columns × width fp32 each, entries ±1/√width.
void draw_projection(const Projection&, uint64_t seed, float* matrices, int64_t first, int64_t last);

/// Integers as `bits` (0..64) each above `least`, in the same bit stream as codes. Ranges as in encode.
void narrow(const int64_t* x, int64_t least, int bits, uint8_t* codes, int64_t first, int64_t last);
void widen(const uint8_t* codes, int64_t least, int bits, int64_t* x, int64_t first, int64_t last);

/// Bits needed for integers from least to most.
constexpr int bits_needed(int64_t least, int64_t most) {
  uint64_t span = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
  int bits = 0;
  for (; span != 0; span >>= 1) ++bits;
  return bits;
}

}  // namespace satchel
