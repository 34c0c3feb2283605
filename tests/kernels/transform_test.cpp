// Low-pass windows and projection matrices.
#include <cmath>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr LowPassShape kShapes[] = {
    {3, 1, 1, 64, 8}, {3, 1, 1, 67, 8}, {2, 1, 1, 5, 8},   {2, 1, 1, 1, 8},  {2, 1, 16, 24, 8}, {3, 1, 13, 9, 4}, {2, 1, 3, 50, 7},
    {2, 8, 8, 8, 4},  {2, 5, 7, 11, 3}, {1, 1, 56, 56, 8}, {4, 2, 3, 3, 16}, {3, 1, 6, 7, 1},   {0, 1, 8, 8, 8},  {2, 9, 1, 17, 5},
};

/// Sum of a line as its header says: neighbours in pairs, missing ones +0.
float pair_up(Floats line) {
  while (line.size() > 1) {
    if (line.size() % 2 != 0 || (line.size() & (line.size() - 1)) != 0) {
      line.push_back(0.0f);
      continue;
    }
    for (size_t i = 0; i < line.size() / 2; ++i) line[i] = line[2 * i] + line[2 * i + 1];
    line.resize(line.size() / 2);
  }
  return line[0];
}

struct Window {
  double sum = 0, magnitude = 0;
  int64_t count = 0;
  float tree = 0;
};

/// Window of value i of a map.
int64_t window_at(const LowPassShape& s, int64_t i) {
  const auto across = [&](int64_t n) { return (n + s.size - 1) / s.size; };
  const int64_t d = i / (s.height * s.width), h = i / s.width % s.height, c = i % s.width;
  return (d / s.size * across(s.height) + h / s.size) * across(s.width) + c / s.size;
}

/// The windows of one map in the order of their means, by brute force over its values.
std::vector<Window> windows_of(const LowPassShape& s, const float* map) {
  std::vector<Window> windows(static_cast<size_t>(s.windows()));
  std::vector<std::map<int64_t, std::map<int64_t, Floats>>> lines(windows.size());
  for (int64_t i = 0; i < s.map_values(); ++i) {
    const size_t w = static_cast<size_t>(window_at(s, i));
    const float v = flush(map[i]);
    windows[w].sum += v;
    windows[w].magnitude += std::abs(v);
    ++windows[w].count;
    lines[w][i / (s.height * s.width)][i / s.width % s.height].push_back(v);
  }
  for (size_t w = 0; w < windows.size(); ++w) {
    Floats planes;
    for (const auto& [d, rows] : lines[w]) {
      Floats sums;
      for (const auto& [h, line] : rows) sums.push_back(pair_up(line));
      planes.push_back(pair_up(sums));
    }
    windows[w].tree = pair_up(planes);
  }
  return windows;
}

TEST(LowPass, MeansAndRests) {
  Random random(71);
  for (const LowPassShape& s : kShapes) {
    for (const DType type : kTypes) {
      const int64_t n = s.maps * s.map_values();
      const Bytes x = as_type(mixed_values(n, random), type);
      const Floats seen = floats_of(x, type);
      Guarded means(s.maps * s.windows() * 2), rest(n * 4);
      low_pass_split(s, {x.data(), type}, reinterpret_cast<uint16_t*>(means.data()), reinterpret_cast<float*>(rest.data()), 0, s.maps);
      ASSERT_TRUE(means.intact() && rest.intact());
      const Bytes mean_bytes = means.bytes(), rest_bytes = rest.bytes();
      for (int64_t m = 0; m < s.maps; ++m) {
        const std::vector<Window> windows = windows_of(s, seen.data() + m * s.map_values());
        for (int64_t w = 0; w < s.windows(); ++w) {
          const Window& own = windows[static_cast<size_t>(w)];
          const double mean = own.sum / static_cast<double>(own.count);
          const float got = load(mean_bytes.data(), DType::bf16, m * s.windows() + w);
          // A tree of depth log2(count) + 3 (a line, a plane and a body may each be padded) rounds by 2^−24 of the
          // magnitudes a level, the division once more; bf16, of 8 significant bits, by 2^−8 of the mean.
          const double tree = (std::log2(static_cast<double>(own.count)) + 4) * 0x1p-24 * own.magnitude / static_cast<double>(own.count);
          ASSERT_LE(std::abs(got - mean), std::abs(mean) * 0x1p-8 + tree * 1.01) << w;
          ASSERT_EQ(got, from_bf16(to_bf16(flush(own.tree / static_cast<float>(own.count))))) << "not the fixed tree, window " << w;
        }
        for (int64_t i = 0; i < s.map_values(); ++i) {
          const int64_t at = m * s.map_values() + i;
          const float mean = load(mean_bytes.data(), DType::bf16, m * s.windows() + window_at(s, i));
          ASSERT_EQ(bits_of(load(rest_bytes.data(), DType::f32, at)), bits_of(flush(seen[static_cast<size_t>(at)]) - mean)) << at;
        }
      }
    }
  }
}

TEST(LowPass, JoinAddsTheMeansBack) {
  Random random(72);
  for (const LowPassShape& s : kShapes) {
    const int64_t n = s.maps * s.map_values();
    const Floats x = mixed_values(n, random);
    std::vector<uint16_t> means(static_cast<size_t>(s.maps * s.windows()));
    Floats rest(x.size());
    low_pass_split(s, {x.data(), DType::f32}, means.data(), rest.data(), 0, s.maps);
    for (const DType type : kTypes) {
      Guarded y(n * size_of(type));
      low_pass_join(s, means.data(), rest.data(), {y.data(), type}, 0, s.maps);
      ASSERT_TRUE(y.intact());
      const Bytes got = y.bytes();
      for (int64_t i = 0; i < n; ++i) {
        const float mean = from_bf16(means[static_cast<size_t>(i / s.map_values() * s.windows() + window_at(s, i % s.map_values()))]);
        const float sum = rest[static_cast<size_t>(i)] + mean;
        Bytes want(static_cast<size_t>(size_of(type)));
        store(want.data(), type, 0, sum);
        ASSERT_EQ(slice(got, type, i, i + 1), want) << i;
        // One subtraction and one addition round by 2^−24 of at most |x| + 2·|mean| each.
        ASSERT_LE(std::abs(sum - x[static_cast<size_t>(i)]), (std::abs(x[static_cast<size_t>(i)]) + 2 * std::abs(mean)) * 0x1p-23f);
      }
    }
  }
}

class EachLowPass : public EachKernel {};
EACH_KERNEL(EachLowPass);

// A mean and a rest that overflow together come back as the largest finite number, on every kernel.
TEST_P(EachLowPass, JoinSaturates) {
  const CpuKernels* const k = GetParam();
  const LowPassShape s = {1, 1, 1, 37, 8};
  const std::vector<uint16_t> means(static_cast<size_t>(s.windows()), to_bf16(-3e38f));
  const Floats rest(37, -3e38f);
  for (const DType type : kTypes) {
    Guarded y(37 * size_of(type));
    k->low_pass_join(s, means.data(), rest.data(), {y.data(), type}, 0, 1);
    ASSERT_TRUE(y.intact());
    const float least = type == DType::f32 ? -float_of(0x7f7fffffu) : type == DType::bf16 ? -float_of(0x7f7f0000u) : -65504.0f;
    for (int64_t i = 0; i < 37; ++i) ASSERT_EQ(load(y.data(), type, i), least) << k->name << " " << i;
  }
}

// Maps one at a time, each from memory of its own, give what all give at once.
TEST(LowPass, MapsOneAtATime) {
  Random random(73);
  for (const LowPassShape& s : kShapes) {
    const int64_t n = s.map_values();
    const Floats x = mixed_values(s.maps * n, random);
    std::vector<uint16_t> means(static_cast<size_t>(s.maps * s.windows())), own_means(means.size());
    Floats rest(x.size());
    low_pass_split(s, {x.data(), DType::f32}, means.data(), rest.data(), 0, s.maps);
    for (int64_t m = s.maps - 1; m >= 0; --m) {
      const Floats map(x.begin() + m * n, x.begin() + (m + 1) * n);
      Floats own(map.size()), back(map.size()), all(x.size());
      low_pass_split(s, {map.data(), DType::f32, m * n}, own_means.data(), own.data(), m, m + 1);
      ASSERT_EQ(own, Floats(rest.begin() + m * n, rest.begin() + (m + 1) * n));
      low_pass_join(s, means.data(), own.data(), {back.data(), DType::f32, m * n}, m, m + 1);
      low_pass_join(s, means.data(), rest.data(), {all.data(), DType::f32}, 0, s.maps);
      ASSERT_EQ(back, Floats(all.begin() + m * n, all.begin() + (m + 1) * n));
    }
    ASSERT_EQ(own_means, means);
  }
}

/// Every kernel's own split and join against the general ones, from memory that starts at map `first`.
void compare_kernels(const LowPassShape& s, const Bytes& x, DType type, int64_t first) {
  const int64_t n = (s.maps - first) * s.map_values();
  const Bytes part = slice(x, type, first * s.map_values(), s.maps * s.map_values());
  const Source from = {part.data(), type, first * s.map_values()};
  std::vector<uint16_t> means(static_cast<size_t>(s.maps * s.windows()), 0x4242);
  Bytes rest(static_cast<size_t>(n * 4)), values(part.size());
  low_pass_split(s, from, means.data(), reinterpret_cast<float*>(rest.data()), first, s.maps);
  low_pass_join(s, means.data(), reinterpret_cast<float*>(rest.data()), {values.data(), type, from.origin}, first, s.maps);
  for (const CpuKernels* k : supported_kernels()) {
    std::vector<uint16_t> own(means.size(), 0x4242);
    Guarded own_rest(n * 4), back(n * size_of(type));
    k->low_pass_split(s, from, own.data(), reinterpret_cast<float*>(own_rest.data()), first, s.maps);
    ASSERT_TRUE(own_rest.intact()) << k->name;
    ASSERT_EQ(own, means) << k->name;
    ASSERT_EQ(own_rest.bytes(), rest) << k->name;
    k->low_pass_join(s, means.data(), reinterpret_cast<float*>(rest.data()), {back.data(), type, from.origin}, first, s.maps);
    ASSERT_TRUE(back.intact()) << k->name;
    ASSERT_EQ(back.bytes(), values) << k->name;
  }
}

TEST(LowPass, SameBytesOnEveryKernel) {
  Random random(74);
  std::vector<LowPassShape> shapes(std::begin(kShapes), std::end(kShapes));
  for (const int64_t depth : {1, 2, 8, 11}) {
    for (const int64_t height : {1, 3, 7, 8, 9, 17}) {
      for (const int64_t width : {1, 4, 7, 8, 9, 15, 16, 17, 24, 31, 56, 64, 71, 192, 511, 521}) {
        shapes.push_back({2, depth, height, width, 8});
      }
    }
  }
  for (const LowPassShape& s : shapes) {
    const DType type = random.pick(kTypes);
    Floats x = mixed_values(s.maps * s.map_values(), random);
    for (float& v : x) v = random.one_in(9) ? v * 0x1p-125f : v;  // some of them subnormal
    for (const int64_t first : {int64_t{0}, s.maps / 2}) {
      SCOPED_TRACE(std::to_string(s.depth) + " x " + std::to_string(s.height) + " x " + std::to_string(s.width) + ' ' + name_of(type));
      compare_kernels(s, as_type(x, type), type, first);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(LowPass, NaNStaysInItsWindow) {
  const LowPassShape s = {1, 1, 16, 16, 8};
  for (const float bad : {NAN, INFINITY}) {
    Floats x(256, 1.0f), rest(256), y(256);
    x[5 * 16 + 12] = bad;
    uint16_t means[4];
    low_pass_split(s, {x.data(), DType::f32}, means, rest.data(), 0, 1);
    low_pass_join(s, means, rest.data(), {y.data(), DType::f32}, 0, 1);
    for (int i = 0; i < 256; ++i) {
      const bool hurt = window_at(s, i) == 1;
      EXPECT_EQ(std::isfinite(rest[static_cast<size_t>(i)]), !hurt) << i;
      EXPECT_EQ(std::isfinite(y[static_cast<size_t>(i)]), !hurt) << i;
    }
  }
}

TEST(Projection, EntriesAreTheDefinition) {
  for (const bool hadamard : {false, true}) {
    for (const auto& [columns, width] :
         {std::pair{1, 1}, {2, 1}, {3, 2}, {7, 3}, {64, 8}, {100, 13}, {129, 17}, {256, 32}, {300, 300}, {1, 5}}) {
      if (hadamard && width > (1 << log2_up(columns))) continue;
      const Projection p = {1000, columns, width, 100, hadamard};
      const uint64_t seed = 0x123456789abcdefull + static_cast<uint64_t>(columns);
      for (const int64_t first : {int64_t{0}, int64_t{3}, (int64_t{1} << 32) - 1}) {
        const int64_t each = int64_t{columns} * width;
        Guarded out(2 * each * 4);
        draw_projection(p, seed, reinterpret_cast<float*>(out.data()), first, first + 2);
        ASSERT_TRUE(out.intact());
        const Floats got = floats_of(out.bytes(), DType::f32);
        const float unit = 1.0f / std::sqrt(static_cast<float>(width));
        for (int64_t j = 0; j < 2 * each; ++j) {
          const int d = static_cast<int>(j % each / width), r = static_cast<int>(j % width);
          ASSERT_EQ(got[static_cast<size_t>(j)], is_negative(p, seed, first + j / each, d, r) ? -unit : unit) << d << ' ' << r;
        }
      }
    }
  }
}

// With all 2^k columns taken, the rows of a Hadamard form are orthogonal: its columns are all different.
TEST(Projection, HadamardColumnsDiffer) {
  for (const int size : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    const Projection p = {1, size, size, 1, true};
    Floats m(static_cast<size_t>(size) * static_cast<size_t>(size));
    draw_projection(p, 4, m.data(), 0, 1);
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b <= a; ++b) {
        double dot = 0;
        for (int r = 0; r < size; ++r) dot += double{m[static_cast<size_t>(a * size + r)]} * double{m[static_cast<size_t>(b * size + r)]};
        // size products of ±(1/size)·(1 ± 2^−23) each.
        ASSERT_NEAR(dot, a == b ? 1.0 : 0.0, 0x1p-22) << size << ' ' << a << ' ' << b;
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
