// A sample is coded by the block code's own kernels, as if it were a stretch of one long tensor of its bits.
#include "satchel/kernels/cpu/per_sample.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "satchel/core/levels.h"

namespace satchel {
namespace {

/// The block code of sample n: it starts at element 8·groups·n, where its noise does, and the tensor ends with it.
BlockCode code_of_sample(const PerSampleCode& per_sample, int64_t n, int bits) {
  const int64_t span = per_sample.groups() * kGroup;
  BlockCode code;
  code.grid = {n * span + per_sample.values, per_sample.block, span};
  code.header = per_sample.header;
  code.rounding = per_sample.rounding;
  code.levels = level_table(bits, Levels::even, per_sample.block);
  return code;
}

const void* sample_at(const PerSampleCode& per_sample, const void* x, DType type, int64_t n) {
  return static_cast<const uint8_t*>(x) + n * per_sample.values * size_of(type);
}

uint32_t entry_of(const PerSampleCode& per_sample, const uint8_t* bytes, int64_t n) {
  uint32_t entry;
  std::memcpy(&entry, bytes + per_sample.entries_at() + n * 4, 4);
  return entry;
}

/// Where the codes of element 0 would stand if all elements before this sample had its bits. An address only: nothing is read there.
template <class Byte>
Byte* codes_before(const PerSampleCode& per_sample, Byte* bytes, int64_t n, uint32_t entry) {
  const auto at = reinterpret_cast<uintptr_t>(bytes + per_sample.unit() * entry_before(entry));
  return reinterpret_cast<Byte*>(at - static_cast<uintptr_t>(n * per_sample.groups() * entry_bits(entry)));
}

}  // namespace

void per_sample_measure(const PerSampleCode& per_sample, Source x, F32Header* ranges, double* squares, int64_t first, int64_t last) {
  SideCode extremes;
  extremes.grid = {per_sample.values, per_sample.block, per_sample.values};
  extremes.header = HeaderType::f32;
  const int64_t blocks = per_sample.blocks();
  for (int64_t n = first; n < last; ++n) {
    F32Header* const r = ranges + n * blocks;
    best_cpu_kernel().side_measure(extremes, {sample_at(per_sample, x.data, x.type, n), x.type}, r, 0, blocks);
    double parts[kRangeLanes] = {};
    for (int64_t b = 0; b < blocks; ++b) parts[b % kRangeLanes] += squared_range({r[b].low, r[b].step});
    for (int half = kRangeLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    }
    squares[n] = parts[0];
  }
}

void per_sample_allocate(const PerSampleCode& per_sample, std::span<const double> squares, const float* weights, uint32_t* entries) {
  using Step = std::tuple<double, int, size_t>;  // −gain, bits before it, sample
  std::vector<Step> steps;
  steps.reserve(squares.size() * (kMostSampleBits - kLeastSampleBits));
  for (size_t n = 0; n < squares.size(); ++n) {
    const double c = per_sample_sensitivity(squares[n], weights == nullptr ? 1.0f : weights[n]);
    for (int bits = kLeastSampleBits; bits < kMostSampleBits; ++bits) steps.emplace_back(-(c * bit_gain(bits)), bits, n);
  }
  const auto taken = steps.begin() + (per_sample.budget - per_sample.samples * kLeastSampleBits);
  if (taken != steps.end()) std::nth_element(steps.begin(), taken, steps.end());
  std::fill_n(entries, squares.size(), static_cast<uint32_t>(kLeastSampleBits));
  for (auto step = steps.begin(); step != taken; ++step) ++entries[std::get<size_t>(*step)];
  uint32_t before = 0;
  for (size_t n = 0; n < squares.size(); ++n) {
    const uint32_t bits = entries[n];
    entries[n] = make_entry(before, bits);
    before += bits;
  }
}

void per_sample_encode(const PerSampleCode& per_sample, Source x, uint64_t seed, const F32Header* ranges, uint8_t* bytes, int64_t first,
                       int64_t last) {
  const int64_t blocks = per_sample.blocks(), span = per_sample.groups() * kGroup;
  uint8_t* const headers = bytes + per_sample.headers_at();
  for (int64_t n = first; n < last; ++n) {
    const uint32_t entry = entry_of(per_sample, bytes, n);
    const int bits = entry_bits(entry);
    for (int64_t b = n * blocks; b < (n + 1) * blocks; ++b) {
      store_header(headers, per_sample.header, b, per_sample_header({ranges[b].low, ranges[b].step}, bits, per_sample.header));
    }
    uint8_t* const codes = bytes + per_sample.unit() * entry_before(entry);
    const int64_t used = code_bytes(per_sample.values, bits);
    std::memset(codes + used, 0, static_cast<size_t>(per_sample.unit() * bits - used));
    best_cpu_kernel().encode(code_of_sample(per_sample, n, bits), {sample_at(per_sample, x.data, x.type, n), x.type, n * span}, seed,
                             headers, codes_before(per_sample, bytes, n, entry), n * span, n * span + per_sample.values);
  }
}

void per_sample_decode(const PerSampleCode& per_sample, const uint8_t* bytes, void* x, DType type, int64_t origin, int64_t first,
                       int64_t last) {
  const int64_t span = per_sample.groups() * kGroup;
  for (int64_t n = first; n < last; ++n) {
    const uint32_t entry = entry_of(per_sample, bytes, n);
    auto* const to = static_cast<uint8_t*>(x) + (n - origin) * per_sample.values * size_of(type);
    best_cpu_kernel().decode(code_of_sample(per_sample, n, entry_bits(entry)), codes_before(per_sample, bytes, n, entry),
                             bytes + per_sample.headers_at(), {to, type, n * span}, n * span, n * span + per_sample.values);
  }
}

}  // namespace satchel
