// Checks before times: what a kernel made must be what the scalar kernel and theory say.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "tools/bench.h"

namespace satchel::tool {
namespace {

constexpr int64_t kSample = int64_t{1} << 18;

struct Expected {
  double variance, bound;  // of one value's error
  bool counts;             // does the value take part?
};

/// Variance and bound of stochastic rounding of d between its neighbours among `count` levels (times unit).
Expected between_levels(double d, const float* levels, int count, double unit) {
  int i = 0;
  while (i + 2 < count && d >= levels[i + 1] * unit) ++i;
  const double below = levels[i] * unit, above = levels[i + 1] * unit;
  return {std::max(0.0, (d - below) * (above - d)), above - below, true};
}

Expected expected(const BlockCode& code, const Trial& t, int64_t i) {
  const Header h = load_header(t.headers, code.header, code.grid.block_of(i));
  const int top = (1 << code.levels.bits) - 1;
  const double y = std::clamp(position(load(t.x.data, t.x.type, i), make_ruler(h)) / 65536.0, 0.0, static_cast<double>(top));
  if (!code.levels.even) return between_levels(y * h.step, code.levels.at, top + 1, h.step);
  const double p = y - std::floor(y);
  return {p * (1 - p) * h.step * h.step, h.step, true};
}

Expected expected(const SideCode& code, const Trial& t, int64_t i) {
  const Channel c = t.channels == nullptr ? relu_channel() : t.channels[i / code.inner % code.channels];
  const Range r = load_range(t.headers, code.header, code.grid.block_of(i));
  const float x = flush(load(t.x.data, t.x.type, i));
  if (!is_on(x, c)) return {0, 0, false};
  const Stretch s = stretch_of(true, c, r);
  const double d = std::clamp<double>(s.up ? x - s.from : s.from - x, 0.0, s.length);
  return between_levels(d, s.is_long ? code.table.on_long : code.table.on_short, code.table.on, s.length);
}

int bits_of(const BlockCode& code) { return code.levels.bits; }
int bits_of(const SideCode& code) { return code.table.bits; }

void scalar_encode(const BlockCode& c, const Trial& t, void* headers, uint8_t* codes, int64_t first, int64_t last) {
  kScalar.measure(c, t.x, headers, c.grid.block_of(first), c.grid.block_of(last - 1) + 1);
  kScalar.encode(c, t.x, t.seed, headers, codes, first, last);
}
void scalar_encode(const SideCode& c, const Trial& t, void* headers, uint8_t* codes, int64_t first, int64_t last) {
  kScalar.side_measure(c, t.x, headers, c.grid.block_of(first), c.grid.block_of(last - 1) + 1);
  kScalar.side_encode(c, t.x, t.channels, t.seed, headers, codes, first, last);
}
void scalar_decode(const BlockCode& c, const Trial& t, Target x, int64_t first, int64_t last) {
  kScalar.decode(c, t.codes, t.headers, x, first, last);
}
void scalar_decode(const SideCode& c, const Trial& t, Target x, int64_t first, int64_t last) {
  kScalar.side_decode(c, t.codes, t.channels, t.headers, x, first, last);
}

void compare_bytes(const std::string& who, const char* what, const void* a, const void* b, int64_t first, int64_t count) {
  const auto *x = static_cast<const uint8_t*>(a), *y = static_cast<const uint8_t*>(b);
  const auto [at, other] = std::mismatch(x, x + count, y);
  if (at != x + count)
    fail("bench", who + " must give the scalar kernel's " + what, "a difference at byte " + std::to_string(first + (at - x)));
}

/// Mean square of rounding to the type, over x²: (ulp/x)²/12 with 1/m² averaged over a log-uniform mantissa, .541.
double output_rounding(DType type) { return type == DType::f32 ? 0.0 : 0.541 / 12 * (type == DType::bf16 ? 0x1p-14 : 0x1p-20); }

struct Sums {
  double error = 0, predicted = 0;
  int64_t count = 0;
};

template <class Code>
void compare_with_scalar(const Code& code, const Trial& t, std::vector<uint8_t>& headers, std::vector<uint8_t>& codes, int64_t first,
                         int64_t last) {
  scalar_encode(code, t, headers.data(), codes.data(), first, last);
  const int64_t size = header_bytes(code.header), h0 = code.grid.block_of(first) * size, h1 = (code.grid.block_of(last - 1) + 1) * size;
  compare_bytes(t.who, "headers", headers.data() + h0, static_cast<const uint8_t*>(t.headers) + h0, h0, h1 - h0);
  const int64_t c0 = code_bytes(first, bits_of(code)), c1 = code_bytes(last, bits_of(code));
  compare_bytes(t.who, "codes", codes.data() + c0, t.codes + c0, c0, c1 - c0);
  const int64_t item = size_of(t.back.type);
  std::vector<uint8_t> back(static_cast<size_t>((last - first) * item));
  scalar_decode(code, t, {back.data(), t.back.type, first}, first, last);
  compare_bytes(t.who, "values", back.data(), static_cast<const uint8_t*>(t.back.data) + first * item, first * item, (last - first) * item);
}

template <class Code>
void compare_with_theory(const Code& code, const Trial& t, int64_t first, int64_t last, Sums& sums) {
  const double half_ulp = t.back.type == DType::f32 ? 0x1p-22 : t.back.type == DType::f16 ? 0x1p-11 : 0x1p-8;
  for (int64_t i = first; i < last; ++i) {
    const Expected e = expected(code, t, i);
    if (!e.counts) continue;
    const double x = load(t.x.data, t.x.type, i), back = load(t.back.data, t.back.type, i), error = std::abs(back - x);
    // A level either side of x, then rounding of the sum low + level·step and of the output.
    if (!(error <= e.bound * (1 + 0x1p-16) + (std::abs(x) + std::abs(back) + e.bound) * half_ulp)) {
      fail("bench", t.who + " must be within a step of the value, " + std::to_string(e.bound),
           std::to_string(error) + " at " + std::to_string(i));
    }
    sums.error += error * error;
    sums.predicted += e.variance + output_rounding(t.back.type) * back * back;
    ++sums.count;
  }
}

template <class Code>
double check(const Code& code, const Trial& t) {
  const Grid& grid = code.grid;
  std::vector<uint8_t> headers(static_cast<size_t>(grid.blocks() * header_bytes(code.header)));
  std::vector<uint8_t> codes(static_cast<size_t>(code_bytes(grid.values, bits_of(code))));
  const int64_t quantum = quantum_of(grid), length = quantum * std::max<int64_t>(1, kSample / quantum);
  Sums sums;
  for (const int64_t first : {int64_t{0}, std::max<int64_t>(grid.values - length, 0) / quantum * quantum}) {
    const int64_t last = first == 0 ? std::min(length, grid.values) : grid.values;
    compare_with_scalar(code, t, headers, codes, first, last);
    compare_with_theory(code, t, first, last, sums);
  }
  // An error's square has a standard deviation of at most twice its mean: six standard errors, and .02 for the positions' own rounding.
  const double ratio = sums.predicted > 0 ? sums.error / sums.predicted : 1.0;
  if (!(std::abs(ratio - 1) <= 12 / std::sqrt(static_cast<double>(std::max<int64_t>(sums.count, 1))) + 0.02)) {
    fail("bench", t.who + " must have the predicted mean square error", std::to_string(ratio) + " times it");
  }
  double square = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < grid.values; ++i) {
    const float x = load(t.x.data, t.x.type, i);
    if constexpr (std::is_same_v<Code, SideCode>) {
      if (!is_on(x, t.channels == nullptr ? relu_channel() : t.channels[i / code.inner % code.channels])) continue;
    }
    const double error = static_cast<double>(load(t.back.data, t.back.type, i)) - x;
    square += error * error;
    ++count;
  }
  const double rmse = std::sqrt(square / static_cast<double>(std::max<int64_t>(count, 1)));
  if (!std::isfinite(rmse)) fail("bench", t.who + " must have a finite error", rmse);
  return rmse;
}

}  // namespace

double check_code(const BlockCode& code, const Trial& trial) { return check(code, trial); }
double check_code(const SideCode& code, const Trial& trial) { return check(code, trial); }

void check_projection(const std::string& who, const Projection& p, Source h, uint64_t seed, const float* z) {
  const double unit = 1 / std::sqrt(static_cast<double>(p.width));
  for (const int64_t row : {int64_t{0}, p.rows / 2, p.rows - 1}) {
    for (int r = 0; r < p.width; ++r) {
      double sum = 0, size = 0;
      for (int d = 0; d < p.columns; ++d) {
        const double x = load(h.data, h.type, row * p.columns + d) * unit;
        sum += is_negative(p, seed, row / p.per_matrix, d, r) ? -x : x;
        size += std::abs(x);
      }
      // Every one of the sum's D additions is off by at most 2^−24 of the sum of sizes.
      const double bound = (p.columns + 1) * 0x1p-24 * size, error = std::abs(static_cast<double>(z[row * p.width + r]) - sum);
      if (!(error <= bound))
        fail("bench", who + " must project within " + std::to_string(bound), std::to_string(error) + " in row " + std::to_string(row));
    }
  }
}

double check_low_pass(const LowPassShape& maps, const BlockCode& code, Trial t, const uint16_t* means) {
  const Source x = t.x, back = t.back;
  const int64_t values = code.grid.values, windows = maps.maps * maps.windows();
  std::vector<float> rest(static_cast<size_t>(values)), rest_back(rest.size());
  std::vector<uint16_t> own(static_cast<size_t>(windows));
  low_pass_split(maps, x, own.data(), rest.data(), 0, maps.maps);
  compare_bytes(t.who, "means", own.data(), means, 0, windows * 2);
  best_cpu_kernel().decode(code, t.codes, t.headers, {rest_back.data(), DType::f32}, 0, values);
  t.x = {rest.data(), DType::f32};
  t.back = {rest_back.data(), DType::f32};
  const double rmse = check_code(code, t);
  std::vector<uint8_t> joined(static_cast<size_t>(values * size_of(back.type)));
  low_pass_join(maps, means, rest_back.data(), {joined.data(), back.type}, 0, maps.maps);
  compare_bytes(t.who, "joined values", joined.data(), back.data, 0, static_cast<int64_t>(joined.size()));
  return rmse;
}

void set_off_means(std::vector<Channel>& channels, const std::vector<double>& sums) {
  for (size_t c = 0; c < channels.size(); ++c) {
    channels[c].off_mean = sums[2 * c + 1] > 0 ? static_cast<float>(sums[2 * c] / sums[2 * c + 1]) : 0.0f;
  }
}

void check_off_means(const std::string& who, const SideCode& code, Source x, const std::vector<Channel>& channels) {
  if (code.table.off != 1) return;
  std::vector<double> sums(channels.size() * 2);
  off_sums(code, x, channels.data(), sums.data(), 0, code.grid.values);
  std::vector<Channel> own = channels;
  set_off_means(own, sums);
  for (size_t c = 0; c < own.size(); ++c) {
    const double a = own[c].off_mean, b = channels[c].off_mean;
    if (!(std::abs(a - b) <= 1e-4 * std::max(1.0, std::abs(a)))) fail("bench", who + " must have the off mean " + std::to_string(a), b);
  }
}

double root_mean_square(const std::vector<float>& x) {
  double square = 0;
  for (const float v : x) square += static_cast<double>(v) * v;
  return x.empty() ? 0.0 : std::sqrt(square / static_cast<double>(x.size()));
}

}  // namespace satchel::tool
