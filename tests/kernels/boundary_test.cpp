// Where bytes could come apart: values within an ulp of the point at which their code flips, and indices beyond 32
// bits.
#include <sys/mman.h>

#include <cmath>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

uint32_t noise_at(uint64_t seed, int64_t i) { return noise(seed, Stream::rounding, static_cast<uint64_t>(i)); }

/// 2^16·y by another road. In double x − low is exact for exponents at most 29 apart and a product of two floats always
/// is, so each conversion to float rounds exactly once, as fma and the multiplication do; a quotient survives the
/// detour too.
float position_by_doubles(float x, Header h) {
  const float inverse = static_cast<float>(65536.0 / double{h.step});
  const float d = static_cast<float>(double{x} - double{h.low});
  return static_cast<float>(double{d} * double{inverse});
}

/// y in steps at which level `c` (in 2^16ths of a code) stands.
double step_of(double c, const LevelTable& levels) {
  const double code = c / 65536;
  if (levels.even) return code;
  const int below = std::min(static_cast<int>(code), (1 << levels.bits) - 2);
  return levels.at[below] + (code - below) * (double{levels.at[below + 1]} - double{levels.at[below]});
}

struct Cliff {
  BlockCode code;
  Floats x;
  Header header;
};

/// A block between `least` and `most` whose values stand within `reach` ulps of where rint(2^16·y) + noise gains a
/// code.
Cliff make_cliff(const BlockCode& code, float least, float most, uint64_t seed, int reach, Random& random) {
  const int top = (1 << code.levels.bits) - 1;
  Cliff c = {code, {least, most}, make_header(least, most, true, top, code.header)};
  for (int64_t i = 2; i < code.grid.values; ++i) {
    const uint32_t u = code.rounding == Rounding::nearest ? kNearestNoise : noise_at(seed, i);
    const double edge = 65536.0 * static_cast<double>(random.below(top)) + 65536.0 - u - 0.5;
    float x = static_cast<float>(c.header.low + step_of(edge, code.levels) * c.header.step);
    for (int64_t steps = random.below(2 * reach + 1) - reach; steps != 0; steps += steps < 0 ? 1 : -1) {
      x = std::nextafterf(x, steps < 0 ? -INFINITY : INFINITY);
    }
    c.x.push_back(std::clamp(x, least, most));
  }
  return c;
}

TEST(Boundary, SameCodesWithinAnUlpOfTheCliff) {
  Random random(11);
  int64_t undecided = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int bits = trial % 8 + 1;
    const BlockCode code = {grid_of(1024, 1024), random.one_in(2) ? HeaderType::bf16 : HeaderType::f32,
                            random.one_in(4) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(bits, random.one_in(2) ? Levels::even : Levels::optimal, 1024)};
    const float least = random.one_in(3) ? 0.0f : random.normal(), most = least + std::abs(random.normal()) + 0.01f;
    const uint64_t seed = random.bits();
    const Cliff c = make_cliff(code, least, most, seed, 3, random);
    const Bytes x = as_type(c.x, DType::f32);
    SCOPED_TRACE(describe(code, DType::f32));
    const Coded truth = encode(kScalar, code, x, DType::f32, seed);
    for (const CpuKernels* k : supported_kernels()) ASSERT_EQ(encode(*k, code, x, DType::f32, seed), truth) << k->name;
    for (int64_t i = 2; i < code.grid.values; ++i) {
      const float y16 = position(c.x[static_cast<size_t>(i)], make_ruler(c.header));
      ASSERT_EQ(bits_of(y16), bits_of(position_by_doubles(c.x[static_cast<size_t>(i)], c.header))) << i;
      if (!code.levels.even) continue;
      undecided += std::abs(y16 - std::floor(y16) - 0.5f) <= std::nextafterf(y16, INFINITY) - y16;
      const uint32_t u = code.rounding == Rounding::nearest ? kNearestNoise : noise_at(seed, i);
      const double held = std::min<double>(y16, 65536.0 * ((1 << bits) - 1));
      ASSERT_EQ(get_code(truth.codes.data(), bits, i), (static_cast<uint32_t>(std::nearbyint(held)) + u) >> 16) << i;
    }
  }
  // A step of x is about one of y16, so of 7 equally likely places the 3 in the middle count: well over a tenth in any
  // case.
  EXPECT_GT(undecided, 300 * 1022 / 2 / 10);
}

// With low 0 and a step of ¼, 2^16·y = m + ½ exactly for m below 2^23 (7 bits): every code hangs on rint's rule for
// ties.
TEST(Boundary, TiesGoToEven) {
  Random random(12);
  for (int bits = 1; bits <= 7; ++bits) {
    const int64_t top = (1 << bits) - 1;
    const BlockCode code = {grid_of(2048, 2048), HeaderType::bf16, Rounding::stochastic, levels_of(bits, Levels::even, 2048)};
    Floats x = {0.0f, static_cast<float>(top) * 0.25f};
    std::vector<int64_t> m = {0, 0};
    for (int64_t i = 2; i < 2048; ++i) {
      const int64_t flip = 65536 * random.below(top) + 65536 - noise_at(9, i);  // the least rint(2^16·y) with one code more
      m.push_back(std::min(flip - 1 + random.below(2), 65536 * top - 1));
      x.push_back(static_cast<float>((static_cast<double>(m.back()) + 0.5) * 0.25 / 65536));
    }
    const Bytes bytes = as_type(x, DType::f32);
    for (const CpuKernels* k : supported_kernels()) {
      const Coded own = encode(*k, code, bytes, DType::f32, 9);
      for (int64_t i = 2; i < 2048; ++i) {
        const int64_t tie = m[static_cast<size_t>(i)], even = tie + (tie & 1);
        ASSERT_EQ(get_code(own.codes.data(), bits, i), static_cast<uint32_t>((even + noise_at(9, i)) >> 16)) << k->name << ' ' << i;
      }
    }
  }
}

// The ends of the levels are codes 0 and B whatever the noise: a rounded bend must not reach half a 2^16th.
TEST(Boundary, LevelsEndAtTheirEnds) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (int64_t block = 1; block < int64_t{1} << 40; block += 1 + block / 16) {
      const LevelTable levels = level_table(bits, Levels::optimal, block);
      const uint32_t top = (1u << bits) - 1;
      ASSERT_EQ(code_of(0.0f, levels, 65535), 0u) << bits << " bits, block " << block;
      ASSERT_EQ(code_of(static_cast<float>(top) * 65536.0f, levels, 0), top) << bits << " bits, block " << block;
      ASSERT_EQ(code_of(static_cast<float>(top) * 65536.5f, levels, 65535), top) << bits << " bits, block " << block;
    }
  }
}

/// Address space without memory: pages exist once they are written.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    at_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() {
    if (ok()) munmap(at_, bytes_);
  }
  bool ok() const { return at_ != MAP_FAILED; }
  uint8_t* data() const { return static_cast<uint8_t*>(at_); }

 private:
  size_t bytes_;
  void* at_;
};

constexpr int64_t kPowers[] = {31, 32, 33, 35, 36};  // 2^35 values are 2^32 noise groups

/// The last values of a tensor, around value 2^power: [first, values) is coded, from `origin` on is in memory.
struct Tail {
  Grid grid;
  int64_t first, origin;
};

Tail tail_at(int64_t power, int64_t block, bool spans) {
  Tail t;
  const int64_t around = int64_t{1} << power;
  t.grid = grid_of(around + 203, block, spans ? 1000003 : 0);
  t.first = around - 136;
  t.origin = t.grid.begin(t.grid.block_of(t.first));
  return t;
}

TEST(Boundary, BlockCodesBeyond32Bits) {
  Random random(13);
  for (const int64_t power : kPowers) {
    for (const int64_t block : {int64_t{1}, int64_t{100}, int64_t{256}}) {
      const int bits = static_cast<int>(power) % 8 + 1;
      const Tail t = tail_at(power, block, block == 100);
      const BlockCode code = {t.grid, HeaderType::bf16, Rounding::stochastic, levels_of(bits, Levels::optimal, block)};
      const Floats x = mixed_values(t.grid.values - t.origin, random);
      const int64_t b0 = t.grid.block_of(t.first), n = t.grid.values - t.first;
      SCOPED_TRACE(describe(code, DType::f32));
      for (const CpuKernels* k : supported_kernels()) {
        const Sparse codes(code_bytes(t.grid.values, bits)), headers(t.grid.blocks() * 4);
        if (!codes.ok() || !headers.ok()) GTEST_SKIP() << "no address space for 2^" << power << " values";
        k->measure(code, {x.data(), DType::f32, t.origin}, headers.data(), b0, t.grid.blocks());
        k->encode(code, {x.data(), DType::f32, t.origin}, 3, headers.data(), codes.data(), t.first, t.grid.values);
        Floats back(static_cast<size_t>(n));
        k->decode(code, codes.data(), headers.data(), {back.data(), DType::f32, t.first}, t.first, t.grid.values);
        for (int64_t i = t.first; i < t.grid.values; ++i) {
          const Header h = load_header(headers.data(), code.header, t.grid.block_of(i));
          const uint32_t want = code_of(position(x[static_cast<size_t>(i - t.origin)], make_ruler(h)), code.levels, noise_at(3, i));
          ASSERT_EQ(get_code(codes.data(), bits, i), want) << k->name << ' ' << i;
          ASSERT_EQ(bits_of(back[static_cast<size_t>(i - t.first)]), bits_of(value_of(want, h, code.levels))) << k->name << ' ' << i;
        }
      }
    }
  }
}

TEST(Boundary, SideCodesAndMasksBeyond32Bits) {
  Random random(14);
  for (const int64_t power : kPowers) {
    for (const int64_t inner : {int64_t{1}, int64_t{3}}) {
      const Tail t = tail_at(power, 256, false);
      const SideCode code = {t.grid, HeaderType::bf16, Rounding::stochastic, side_table(3, Side::one_sided, Levels::optimal, 256), 7,
                             inner};
      std::vector<Channel> channels;
      for (int c = 0; c < 7; ++c) channels.push_back({0.1f * static_cast<float>(c), 1.0f, -0.1f * static_cast<float>(c), 0.0f});
      const Floats x = mixed_values(t.grid.values - t.origin, random);
      const Source source = {x.data(), DType::f32, t.origin};
      for (const CpuKernels* k : supported_kernels()) {
        const Sparse codes(code_bytes(t.grid.values, 3)), headers(t.grid.blocks() * 4), mask(code_bytes(t.grid.values, 1));
        if (!codes.ok() || !headers.ok() || !mask.ok()) GTEST_SKIP() << "no address space for 2^" << power << " values";
        k->side_measure(code, source, headers.data(), t.grid.block_of(t.first), t.grid.blocks());
        k->side_encode(code, source, channels.data(), 3, headers.data(), codes.data(), t.first, t.grid.values);
        k->mask(source, mask.data(), t.first, t.grid.values);
        for (int64_t i = t.first; i < t.grid.values; ++i) {
          const float v = x[static_cast<size_t>(i - t.origin)];
          const Range r = load_range(headers.data(), code.header, t.grid.block_of(i));
          const Channel& c = channels[static_cast<size_t>(i / inner % 7)];
          ASSERT_EQ(get_code(codes.data(), 3, i), side_code_of(v, c, r, code.table, noise_at(3, i))) << k->name << ' ' << i;
          ASSERT_EQ(get_code(mask.data(), 1, i), v > 0 ? 1u : 0u) << k->name << ' ' << i;
        }
      }
    }
  }
}

TEST(Boundary, NarrowBeyond32Bits) {
  const int64_t first = (int64_t{1} << 33) - 64, last = first + 133;
  const Sparse x(last * 8), codes(code_bytes(last, 5)), back(last * 8);
  if (!x.ok() || !codes.ok() || !back.ok()) GTEST_SKIP() << "no address space for 2^33 integers";
  int64_t* in = reinterpret_cast<int64_t*>(x.data());
  int64_t* out = reinterpret_cast<int64_t*>(back.data());
  for (int64_t i = first; i < last; ++i) in[i] = i % 32 - 7;
  narrow(in, -7, 5, codes.data(), first, last);
  widen(codes.data(), -7, 5, out, first, last);
  for (int64_t i = first; i < last; ++i) ASSERT_EQ(out[i], in[i]) << i;
}

}  // namespace
}  // namespace satchel::test
