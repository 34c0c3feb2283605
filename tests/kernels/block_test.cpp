// The block code of every kernel against the scalar one, byte for byte.
#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr int64_t kBlocks[] = {1, 2, 3, 7, 8, 16, 31, 32, 49, 63, 64, 65, 100, 196, 255, 256, 257, 1000, 4096};
constexpr int64_t kLengths[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097, 10007};
constexpr int64_t kSpans[] = {1, 8, 9, 33, 64, 100, 300, 1001, 20000};
constexpr Levels kLevels[] = {Levels::even, Levels::optimal};
constexpr Rounding kRoundings[] = {Rounding::stochastic, Rounding::nearest};
constexpr HeaderType kHeaders[] = {HeaderType::bf16, HeaderType::f32};

BlockCode random_code(int64_t values, int64_t block, int bits, Random& random) {
  const int64_t span = values > 0 && random.one_in(3) ? random.pick(kSpans) : 0;
  const Levels levels = random.one_in(3) ? Levels::even : Levels::optimal;
  return {grid_of(values, block, span), random.pick(kHeaders), random.one_in(4) ? Rounding::nearest : Rounding::stochastic,
          levels_of(bits, levels, block)};
}

/// Encodes with every kernel, decodes what it wrote with every kernel, and compares all of it with the scalar kernel.
void compare_all(const BlockCode& code, const Bytes& x, DType in, DType out, uint64_t seed, bool streaming) {
  SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
  const Coded truth = encode(kScalar, code, x, in, seed);
  const Bytes values = decode(kScalar, code, truth, out);
  for (const CpuKernels* a : supported_kernels()) {
    const Coded own = encode(*a, code, x, in, seed);
    ASSERT_EQ(own.headers, truth.headers) << a->name;
    ASSERT_EQ(own.codes, truth.codes) << a->name;
    for (const CpuKernels* b : supported_kernels()) {
      ASSERT_EQ(decode(*b, code, own, out, streaming), values) << "encoded by " << a->name << ", decoded by " << b->name;
    }
  }
}

TEST(BlockKernels, SameBytesForEveryShape) {
  Random random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t block : kBlocks) {
      for (const int64_t length : kLengths) {
        const DType in = random.pick(kTypes), out = random.pick(kTypes);
        const BlockCode code = random_code(length, block, bits, random);
        compare_all(code, as_type(mixed_values(length, random), in), in, out, random.bits(), random.one_in(2));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(BlockKernels, SameBytesForEveryOption) {
  Random random(2);
  for (const auto& [values, block, span] : {std::array<int64_t, 3>{331, 256, 0}, {600, 256, 300}, {523, 49, 101}}) {
    const Floats x = mixed_values(values, random);
    for (int option = 0; option < 8 * 3 * 3 * 8; ++option) {
      const int bits = option % 8 + 1, in = option / 8 % 3, out = option / 24 % 3, rest = option / 72;
      const BlockCode code = {grid_of(values, block, span), kHeaders[rest & 1], kRoundings[rest >> 1 & 1],
                              levels_of(bits, kLevels[rest >> 2], block)};
      compare_all(code, as_type(x, kTypes[in]), kTypes[in], kTypes[out], random.bits(), out == 0 && (rest & 1) != 0);
      if (HasFatalFailure()) return;
    }
  }
}

/// Cuts [0, n) at random multiples of 8, the last end first: what spills over an end stays visible.
std::vector<std::pair<int64_t, int64_t>> random_pieces(int64_t n, Random& random) {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t last = n; last > 0;) {
    const int64_t first = std::max<int64_t>(0, (last - 1 - random.below(300)) / 8 * 8);
    pieces.emplace_back(first, last);
    last = first;
  }
  return pieces;
}

Coded encode_in_pieces(const CpuKernels& k, const BlockCode& code, const Bytes& x, DType type, uint64_t seed, Random& random) {
  const auto measure = [&](void* headers) {
    for (int64_t last = code.grid.blocks(); last > 0;) {
      const int64_t first = std::max<int64_t>(0, last - 1 - random.below(5)), origin = code.grid.begin(first);
      const Bytes own = slice(x, type, origin, code.grid.end(last - 1));
      k.measure(code, {own.data(), type, origin}, headers, first, last);
      last = first;
    }
  };
  return coded(code, measure, [&](void* headers, uint8_t* codes) {
    for (const auto& [first, last] : random_pieces(code.grid.values, random)) {
      const Bytes own = slice(x, type, first, last);
      k.encode(code, {own.data(), type, first}, seed, headers, codes, first, last);
    }
  });
}

TEST(BlockKernels, PiecesAndOriginsGiveTheSameBytes) {
  Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int bits = trial % 8 + 1;
    const DType in = random.pick(kTypes);
    const BlockCode code = random_code(1 + random.below(3000), random.pick(kBlocks), bits, random);
    const Bytes x = as_type(mixed_values(code.grid.values, random), in);
    const uint64_t seed = random.bits();
    SCOPED_TRACE(describe(code, in));
    const Coded truth = encode(kScalar, code, x, in, seed);
    for (const CpuKernels* k : supported_kernels()) {
      ASSERT_EQ(encode_in_pieces(*k, code, x, in, seed, random), truth) << k->name;
    }
  }
}

TEST(BlockKernels, DecodesAnyRange) {
  Random random(4);
  for (int trial = 0; trial < 200; ++trial) {
    const DType out = random.pick(kTypes);
    const BlockCode code = random_code(1 + random.below(2000), random.pick(kBlocks), trial % 8 + 1, random);
    const Coded in = encode(kScalar, code, as_type(mixed_values(code.grid.values, random), DType::f32), DType::f32, 5);
    const Bytes all = decode(kScalar, code, in, out);
    const int64_t first = random.below(code.grid.values) / 8 * 8, last = first + random.below(code.grid.values - first + 1);
    const int64_t origin = first - random.below(first + 1);
    SCOPED_TRACE(describe(code, out));
    for (const CpuKernels* k : supported_kernels()) {
      Guarded values((last - origin) * size_of(out));
      const Bytes before = values.bytes();
      k->decode(code, in.codes.data(), in.headers.data(), {values.data(), out, origin, random.one_in(2)}, first, last);
      ASSERT_TRUE(values.intact()) << k->name;
      ASSERT_EQ(slice(values.bytes(), out, first - origin, last - origin), slice(all, out, first, last)) << k->name;
      ASSERT_EQ(slice(values.bytes(), out, 0, first - origin), slice(before, out, 0, first - origin)) << k->name;
    }
  }
}

// What the scalar kernel writes is what core says of each value on its own.
TEST(BlockKernels, ScalarIsCore) {
  Random random(5);
  const BlockCode code = {grid_of(600, 256, 300), HeaderType::bf16, Rounding::stochastic, levels_of(3, Levels::optimal, 256)};
  const Floats x = mixed_values(600, random);
  const Coded in = encode(kScalar, code, as_type(x, DType::f32), DType::f32, 77);
  for (int64_t i = 0; i < 600; ++i) {
    const Header h = load_header(in.headers.data(), code.header, i < 256 ? 0 : i < 300 ? 1 : i < 556 ? 2 : 3);
    const uint32_t code_i =
        code_of(position(x[static_cast<size_t>(i)], make_ruler(h)), code.levels, noise(77, Stream::rounding, static_cast<uint64_t>(i)));
    ASSERT_EQ(get_code(in.codes.data(), 3, i), code_i) << i;
  }
}

}  // namespace
}  // namespace satchel::test
