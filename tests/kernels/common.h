// What the kernel tests share: guarded outputs, inputs, and whole passes of a code.
#pragma once

#include <gtest/gtest.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "satchel/core/levels.h"
#include "satchel/kernels/cpu/cpu.h"

namespace satchel::test {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

inline std::vector<const CpuKernels*> supported_kernels() {
  std::vector<const CpuKernels*> all;
  for (const CpuKernels* k : cpu_kernels()) {
    if (k->supported()) all.push_back(k);
  }
  return all;
}

/// A test of one kernel; instantiated by EACH_KERNEL(suite).
class EachKernel : public testing::TestWithParam<const CpuKernels*> {};
inline std::string kernel_name(const testing::TestParamInfo<const CpuKernels*>& info) { return info.param->name; }
#define EACH_KERNEL(suite) INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(supported_kernels()), kernel_name)

/// The same numbers on every machine and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  /// Mean 0, variance 1: four uniforms of variance 1/12 each make 1/3.
  float normal() {
    const uint64_t b = engine_();
    const double sum = static_cast<double>((b & 0xffff) + (b >> 16 & 0xffff) + (b >> 32 & 0xffff) + (b >> 48)) + 2;
    return static_cast<float>((sum / 65536 - 2) * 1.7320508075688772);
  }
  template <class Range>
  auto pick(const Range& range) {
    return range[static_cast<size_t>(below(static_cast<int64_t>(std::size(range))))];
  }

 private:
  std::mt19937_64 engine_;
};

/// n bytes on a 64-byte boundary, filled with a pattern that goes on for 64 bytes on both sides.
class Guarded {
 public:
  explicit Guarded(int64_t n) : n_(static_cast<size_t>(n)), store_(n_ + 3 * kMargin, kPattern) {
    begin_ = kMargin + (kMargin - reinterpret_cast<uintptr_t>(store_.data()) % kMargin) % kMargin;
  }
  uint8_t* data() { return store_.data() + begin_; }
  /// The bytes alone, in memory of their own in which a sanitizer sees every step past the end.
  Bytes bytes() const {
    const auto from = store_.begin() + static_cast<std::ptrdiff_t>(begin_);
    return Bytes(from, from + static_cast<std::ptrdiff_t>(n_));
  }
  bool intact() const {
    for (size_t i = 0; i < store_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + n_) && store_[i] != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kMargin = 64;
  static constexpr uint8_t kPattern = 0xa5;
  size_t n_, begin_ = 0;
  Bytes store_;
};

inline Bytes as_type(const Floats& x, DType type) {
  Bytes out(x.size() * static_cast<size_t>(size_of(type)));
  for (size_t i = 0; i < x.size(); ++i) store(out.data(), type, static_cast<int64_t>(i), x[i]);
  return out;
}

inline Bytes slice(const Bytes& x, DType type, int64_t first, int64_t last) {
  return Bytes(x.begin() + first * size_of(type), x.begin() + last * size_of(type));
}

/// Runs of different scales and offsets, of zeros, of constants, some of outliers; finite in fp16 too.
inline Floats mixed_values(int64_t n, Random& random) {
  Floats x;
  while (static_cast<int64_t>(x.size()) < n) {
    const int64_t run = 1 + random.below(400), kind = random.below(8);
    const float scale = std::ldexp(1.0f, static_cast<int>(random.below(17)) - 12), offset = random.normal() * scale * 8;
    for (int64_t i = 0; i < run && static_cast<int64_t>(x.size()) < n; ++i) {
      const float v = random.normal() * scale;
      x.push_back(kind == 0   ? 0.0f
                  : kind == 1 ? offset
                  : kind == 2 ? std::max(v, 0.0f)
                  : kind == 3 ? v * (random.one_in(50) ? 100.0f : 1.0f)
                  : kind == 4 ? v + offset
                              : v);
    }
  }
  return x;
}

inline const LevelTable& levels_of(int bits, Levels levels, int64_t block) {
  static std::map<std::tuple<int, Levels, int64_t>, LevelTable> made;
  const auto [at, is_new] = made.try_emplace({bits, levels, block});
  if (is_new) at->second = level_table(bits, levels, block);
  return at->second;
}

inline Grid grid_of(int64_t values, int64_t block, int64_t span = 0) { return {values, block, span == 0 ? values : span}; }

inline std::string describe(const BlockCode& code, DType type) {
  std::ostringstream text;
  text << code.grid.values << " values, block " << code.grid.block << ", span " << code.grid.span << ", " << code.levels.bits << " bits, "
       << (code.levels.even ? "even" : "optimal") << (code.rounding == Rounding::nearest ? ", nearest" : "")
       << (code.header == HeaderType::f32 ? ", f32 headers, " : ", ") << name_of(type);
  return text.str();
}

struct Coded {
  Bytes codes, headers;
  bool operator==(const Coded&) const = default;
};

inline int bits_of_code(const BlockCode& code) { return code.levels.bits; }
inline int bits_of_code(const SideCode& code) { return code.table.bits; }

/// Runs measure and encode into guarded memory. `measure` and `encode` are called with (headers) and (headers, codes).
template <class Code, class Measure, class Encode>
Coded coded(const Code& code, const Measure& measure, const Encode& encode) {
  Guarded headers(code.grid.blocks() * header_bytes(code.header)), codes(code_bytes(code.grid.values, bits_of_code(code)));
  measure(headers.data());
  encode(headers.data(), codes.data());
  EXPECT_TRUE(headers.intact()) << "wrote past the headers";
  EXPECT_TRUE(codes.intact()) << "wrote past the codes";
  return {codes.bytes(), headers.bytes()};
}

inline Coded encode(const CpuKernels& k, const BlockCode& code, const Bytes& x, DType type, uint64_t seed) {
  const Source source = {x.data(), type};
  return coded(
      code, [&](void* headers) { k.measure(code, source, headers, 0, code.grid.blocks()); },
      [&](void* headers, uint8_t* codes) { k.encode(code, source, seed, headers, codes, 0, code.grid.values); });
}

inline Coded encode(const CpuKernels& k, const SideCode& code, const Channel* channels, const Bytes& x, DType type, uint64_t seed) {
  const Source source = {x.data(), type};
  return coded(
      code, [&](void* headers) { k.side_measure(code, source, headers, 0, code.grid.blocks()); },
      [&](void* headers, uint8_t* codes) { k.side_encode(code, source, channels, seed, headers, codes, 0, code.grid.values); });
}

inline Bytes decode(const CpuKernels& k, const BlockCode& code, const Coded& in, DType type, bool streaming = false) {
  Guarded out(code.grid.values * size_of(type));
  k.decode(code, in.codes.data(), in.headers.data(), {out.data(), type, 0, streaming}, 0, code.grid.values);
  EXPECT_TRUE(out.intact()) << "wrote past the values";
  return out.bytes();
}

inline Bytes decode(const CpuKernels& k, const SideCode& code, const Channel* channels, const Coded& in, DType type,
                    bool streaming = false) {
  Guarded out(code.grid.values * size_of(type));
  k.side_decode(code, in.codes.data(), channels, in.headers.data(), {out.data(), type, 0, streaming}, 0, code.grid.values);
  EXPECT_TRUE(out.intact()) << "wrote past the values";
  return out.bytes();
}

inline Floats floats_of(const Bytes& x, DType type) {
  Floats out(x.size() / static_cast<size_t>(size_of(type)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = load(x.data(), type, static_cast<int64_t>(i));
  return out;
}

#ifdef __x86_64__
/// Subnormals count as zero, in and out, while this lives.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;
  ~Flushing() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#endif

/// |z| that chance exceeds once in 10^6: Φ⁻¹(1 − 5·10⁻⁷).
constexpr double kZ = 4.8916;

}  // namespace satchel::test
