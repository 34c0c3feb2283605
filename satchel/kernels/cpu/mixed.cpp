// A sample is coded by the block code's own kernels, as if it were a stretch of one long tensor of its bits.
#include "satchel/kernels/cpu/mixed.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace satchel {
namespace {

/// The block code of sample n: it starts at element 8·groups·n, where its noise does, and the tensor ends with it.
BlockCode code_of_sample(const MixedCode& mixed, int64_t n, int bits) {
  const int64_t span = mixed.groups() * kGroup;
  BlockCode code;
  code.grid = {n * span + mixed.values, mixed.block, span};
  code.header = mixed.header;
  code.rounding = mixed.rounding;
  code.levels = level_table(bits, Levels::even, mixed.block);
  return code;
}

const void* sample_at(const MixedCode& mixed, const void* x, DType type, int64_t n) {
  return static_cast<const uint8_t*>(x) + n * mixed.values * size_of(type);
}

uint32_t share_of(const MixedCode& mixed, const uint8_t* bytes, int64_t n) {
  uint32_t share;
  std::memcpy(&share, bytes + mixed.shares_at() + n * 4, 4);
  return share;
}

/// Where the codes of element 0 would stand if all elements before this sample had its bits. An address only: nothing is read there.
template <class Byte>
Byte* codes_before(const MixedCode& mixed, Byte* bytes, int64_t n, uint32_t share) {
  const auto at = reinterpret_cast<uintptr_t>(bytes + mixed.unit() * share_before(share));
  return reinterpret_cast<Byte*>(at - static_cast<uintptr_t>(n * mixed.groups() * share_bits(share)));
}

}  // namespace

void mixed_measure(const MixedCode& mixed, Source x, F32Header* ranges, double* squares, int64_t first, int64_t last) {
  SideCode extremes;
  extremes.grid = {mixed.values, mixed.block, mixed.values};
  extremes.header = HeaderType::f32;
  const int64_t blocks = mixed.blocks();
  for (int64_t n = first; n < last; ++n) {
    F32Header* const r = ranges + n * blocks;
    best_cpu_kernel().side_measure(extremes, {sample_at(mixed, x.data, x.type, n), x.type}, r, 0, blocks);
    double parts[kRangeLanes] = {};
    for (int64_t b = 0; b < blocks; ++b) parts[b % kRangeLanes] += squared_range({r[b].low, r[b].step});
    for (int half = kRangeLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    }
    squares[n] = parts[0];
  }
}

void mixed_share(const MixedCode& mixed, std::span<const double> squares, const float* weights, uint32_t* shares) {
  using Step = std::tuple<double, int, size_t>;  // −gain, bits before it, sample
  std::vector<Step> steps;
  steps.reserve(squares.size() * (kMostMixed - kLeastMixed));
  for (size_t n = 0; n < squares.size(); ++n) {
    const double c = mixed_sensitivity(squares[n], weights == nullptr ? 1.0f : weights[n]);
    for (int bits = kLeastMixed; bits < kMostMixed; ++bits) steps.emplace_back(-(c * bit_gain(bits)), bits, n);
  }
  const auto taken = steps.begin() + (mixed.budget - mixed.samples * kLeastMixed);
  if (taken != steps.end()) std::nth_element(steps.begin(), taken, steps.end());
  std::fill_n(shares, squares.size(), static_cast<uint32_t>(kLeastMixed));
  for (auto step = steps.begin(); step != taken; ++step) ++shares[std::get<size_t>(*step)];
  uint32_t before = 0;
  for (size_t n = 0; n < squares.size(); ++n) {
    const uint32_t bits = shares[n];
    shares[n] = make_share(before, bits);
    before += bits;
  }
}

void mixed_encode(const MixedCode& mixed, Source x, uint64_t seed, const F32Header* ranges, uint8_t* bytes, int64_t first, int64_t last) {
  const int64_t blocks = mixed.blocks(), span = mixed.groups() * kGroup;
  uint8_t* const headers = bytes + mixed.headers_at();
  for (int64_t n = first; n < last; ++n) {
    const uint32_t share = share_of(mixed, bytes, n);
    const int bits = share_bits(share);
    for (int64_t b = n * blocks; b < (n + 1) * blocks; ++b) {
      store_header(headers, mixed.header, b, mixed_header({ranges[b].low, ranges[b].step}, bits, mixed.header));
    }
    uint8_t* const codes = bytes + mixed.unit() * share_before(share);
    const int64_t used = code_bytes(mixed.values, bits);
    std::memset(codes + used, 0, static_cast<size_t>(mixed.unit() * bits - used));
    best_cpu_kernel().encode(code_of_sample(mixed, n, bits), {sample_at(mixed, x.data, x.type, n), x.type, n * span}, seed, headers,
                             codes_before(mixed, bytes, n, share), n * span, n * span + mixed.values);
  }
}

void mixed_decode(const MixedCode& mixed, const uint8_t* bytes, void* x, DType type, int64_t origin, int64_t first, int64_t last) {
  const int64_t span = mixed.groups() * kGroup;
  for (int64_t n = first; n < last; ++n) {
    const uint32_t share = share_of(mixed, bytes, n);
    auto* const to = static_cast<uint8_t*>(x) + (n - origin) * mixed.values * size_of(type);
    best_cpu_kernel().decode(code_of_sample(mixed, n, share_bits(share)), codes_before(mixed, bytes, n, share), bytes + mixed.headers_at(),
                             {to, type, n * span}, n * span, n * span + mixed.values);
  }
}

}  // namespace satchel
