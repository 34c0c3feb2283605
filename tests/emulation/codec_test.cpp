// The CUDA kernels of codes, emulated on the CPU: bytes and values of the scalar kernel, whatever sizes, types and addresses.
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/kernels/slope.h"
#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

constexpr int64_t kBlocks[] = {1, 7, 8, 16, 49, 64, 100, 128, 256, 512, 1000, 1024, 2048, 10000};
constexpr int64_t kLengths[] = {1, 7, 8, 9, 255, 256, 257, 1000, 4097, 10007};

TEST(EmulatedCodec, BlocksAreTheScalarKernels) {
  Random random(61);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t block : kBlocks) {
      for (const int64_t length : kLengths) {
        const DType in = random.pick(kTypes), out = random.pick(kTypes);
        const int64_t span = random.one_in(4) ? 300 : 0;
        const BlockCode code = {grid_of(length, block, span), random.one_in(2) ? HeaderType::bf16 : HeaderType::f32,
                                random.one_in(4) ? Rounding::nearest : Rounding::stochastic,
                                levels_of(bits, random.one_in(2) ? Levels::even : Levels::optimal, block)};
        SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
        Floats values = mixed_values(length, random);
        if (random.one_in(10)) values[static_cast<size_t>(random.below(length))] = random.one_in(2) ? NAN : INFINITY;
        const Bytes x = as_type(values, in);
        const uint64_t seed = random.bits();
        const Coded truth = encode(kScalar, code, x, in, seed);
        Placed source(x, shift_of(in, random));
        const Coded own = coded(
            code, [](void*) {},
            [&](void* headers, uint8_t* codes) { cuda::encode(code, source.data(), in, &seed, codes, headers, nullptr); });
        ASSERT_EQ(own.headers, truth.headers);
        ASSERT_EQ(own.codes, truth.codes);
        Placed target(length * size_of(out), shift_of(out, random));
        cuda::decode(code, own.codes.data(), own.headers.data(), target.data(), out, nullptr);
        ASSERT_TRUE(target.memory.intact());
        ASSERT_EQ(target.bytes(), decode(kScalar, code, truth, out));
      }
    }
  }
}

/// Blocks of 256 values of every kind that a kernel may tell apart, one after the other: on both sides of 0, on one, with zeros of both
/// signs, subnormal numbers as the least or the most, ranges and values just inside and outside of what is usual (2^-30 and 2^60),
/// constants, and what is no number.
Floats blocks_of_all_kinds(int64_t length, Random& random) {
  constexpr float kSizes[] = {1.0f, 0x1p-29f, 0x1p-32f, 0x1p-33f, 0x1p58f, 0x1p62f, 0x1p-100f};
  Floats v;
  for (int64_t i = 0; i < length; ++i) {
    const int64_t block = i / 256, kind = block % 11;
    float x = random.normal() * (block % 3 == 0 ? kSizes[block / 3 % 7] : 1.0f);
    if (kind == 1) x = std::abs(x);
    if (kind == 2) x = -std::abs(x);
    if (kind == 3) x = x < 0 ? -0.0f : x;
    if (kind == 4) x = x < 0 ? x : 0x1p-130f;
    if (kind == 5) x = x < 0 ? -0x1p-130f : x;
    if (kind == 6) x = 0.75f;
    if (kind == 7) x = 3 + x * 0x1p-12f;
    if (kind == 8 && i % 256 == 77) x = block % 2 == 0 ? NAN : -NAN;
    if (kind == 9 && i % 256 == 255) x = block % 2 == 0 ? INFINITY : -INFINITY;
    v.push_back(x);
  }
  return v;
}

// Long enough for teams of threads to take several blocks each: 9,600 threads hold the values, the emulated GPU 2,048.
TEST(EmulatedCodec, BlocksOfAllKindsAreTheScalarKernels) {
  Random random(67);
  for (const DType in : kTypes) {
    for (const int bits : {1, 2, 3, 4, 5, 8}) {
      for (const Levels levels : {Levels::even, Levels::optimal}) {
        if (levels == Levels::optimal && (bits < 2 || bits > 4)) continue;
        const int64_t length = 256 * 600 + 8 * random.below(31);
        const BlockCode code = {grid_of(length, 256, 0), random.one_in(6) ? HeaderType::f32 : HeaderType::bf16,
                                random.one_in(6) ? Rounding::nearest : Rounding::stochastic, levels_of(bits, levels, 256)};
        SCOPED_TRACE(describe(code, in));
        Placed source(stored(blocks_of_all_kinds(length, random), in));
        const uint64_t seed = random.bits();
        const Coded truth = encode(kScalar, code, source.bytes(), in, seed);
        const Coded own = coded(
            code, [](void*) {},
            [&](void* headers, uint8_t* codes) { cuda::encode(code, source.data(), in, &seed, codes, headers, nullptr); });
        ASSERT_EQ(own.headers, truth.headers);
        ASSERT_EQ(own.codes, truth.codes);
        for (const DType out : kTypes) {
          Placed target(length * size_of(out));
          cuda::decode(code, own.codes.data(), own.headers.data(), target.data(), out, nullptr);
          ASSERT_TRUE(target.intact());
          ASSERT_EQ(target.bytes(), decode(kScalar, code, truth, out)) << name_of(out);
        }
      }
    }
  }
}

TEST(EmulatedCodec, RowsWithGapsAreTheScalarKernels) {
  Random random(65);
  const int64_t blocks[] = {8, 16, 64, 100, 256, 256, 256, 512, 1024, 2048}, widths[] = {8, 24, 64, 256, 264, 768};
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t width = random.pick(widths), gap = 8 * (1 + random.below(40)), rows = 1 + random.below(20), length = rows * width;
    const int64_t block = random.pick(blocks);
    const DType in = random.pick(kTypes);
    const BlockCode code = {grid_of(length, block, 0), random.one_in(2) ? HeaderType::bf16 : HeaderType::f32,
                            random.one_in(4) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(1 + trial % 8, random.one_in(2) ? Levels::even : Levels::optimal, block)};
    SCOPED_TRACE(describe(code, in) + ", rows of " + std::to_string(width) + ", " + std::to_string(gap) + " apart");
    const Bytes x = as_type(mixed_values(length, random), in);
    const int64_t row = width * size_of(in), pitch = (width + gap) * size_of(in);
    Placed source(rows * pitch - gap * size_of(in), 0);
    std::memset(source.data(), 0x7f, static_cast<size_t>(rows * pitch - gap * size_of(in)));  // what is not part of a row is large
    for (int64_t r = 0; r < rows; ++r) std::memcpy(source.data() + r * pitch, x.data() + r * row, static_cast<size_t>(row));
    const uint64_t seed = random.bits();
    const Coded truth = encode(kScalar, code, x, in, seed);
    const Coded own = coded(
        code, [](void*) {},
        [&](void* headers, uint8_t* codes) {
          cuda::encode(code, source.data(), in, &seed, codes, headers, nullptr, {width, width + gap});
        });
    ASSERT_EQ(own.headers, truth.headers);
    ASSERT_EQ(own.codes, truth.codes);
  }
}

// exp and log are the CPU's here. They differ from CUDA's in their last bits.
TEST(EmulatedCodec, PowersAreTheScalarKernelsOfPowers) {
  Random random(66);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t block : kBlocks) {
      for (const int64_t length : kLengths) {
        const BlockCode code = {grid_of(length, block, 0), HeaderType::f32, Rounding::stochastic,
                                levels_of(bits, random.one_in(2) ? Levels::even : Levels::optimal, block)};
        SCOPED_TRACE(describe(code, DType::f32));
        Floats x = mixed_values(length, random);
        for (float& v : x) v = -std::abs(v);
        if (random.one_in(10)) x[static_cast<size_t>(random.below(length))] = random.one_in(2) ? NAN : -INFINITY;
        Floats powers;
        for (const float v : x) powers.push_back(std::exp(v));
        const uint64_t seed = random.bits();
        const Coded truth = encode(kScalar, code, as_type(powers, DType::f32), DType::f32, seed);
        Placed source(as_type(x, DType::f32), shift_of(DType::f32, random));
        const auto* from = reinterpret_cast<const float*>(source.data());
        const Coded own = coded(
            code, [](void*) {}, [&](void* headers, uint8_t* codes) { cuda::encode_exp(code, from, &seed, codes, headers, nullptr); });
        ASSERT_EQ(own.headers, truth.headers);
        ASSERT_EQ(own.codes, truth.codes);
        Placed target(length * 4, shift_of(DType::f32, random));
        cuda::decode_log(code, own.codes.data(), own.headers.data(), reinterpret_cast<float*>(target.data()), nullptr);
        ASSERT_TRUE(target.memory.intact());
        const Bytes decoded = decode(kScalar, code, truth, DType::f32);
        for (int64_t i = 0; i < length; ++i) {
          const float expected = std::log(load(decoded.data(), DType::f32, i)), found = load(target.data(), DType::f32, i);
          ASSERT_TRUE(found == expected || (std::isnan(found) && std::isnan(expected))) << found << " for " << expected << " at " << i;
        }
      }
    }
  }
}

TEST(EmulatedCodec, SidesAreTheScalarKernels) {
  Random random(62);
  const int64_t blocks[] = {49, 100, 256, 256, 256, 1000};
  for (int trial = 0; trial < 150; ++trial) {
    const SideForm form = random.pick(kForms);
    const int64_t counts[] = {1, 3, 16, 64, 128, 200, 256, 801}, inners[] = {1, 1, 1, 3, 64};
    const int64_t count = random.pick(counts), inner = random.pick(inners), length = trial % 30 == 0 ? 256 * 256 : random.pick(kLengths);
    const SideCode code = side_code(form, length, random.pick(blocks), count, inner, random);
    const DType in = random.pick(kTypes), out = random.pick(kTypes);
    SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
    std::vector<Channel> channels = channels_of(count, random);
    const bool has_channels = form.side != Side::relu;
    const Bytes x = as_type(mixed_values(length, random), in);
    const uint64_t seed = random.bits();
    const Coded truth = encode(kScalar, code, has_channels ? channels.data() : nullptr, x, in, seed);
    Placed source(x, shift_of(in, random));
    std::vector<uint64_t> scratch(static_cast<size_t>(cuda::side_scratch_bytes(code)) / 8 + 2);
    std::vector<Channel> own_channels = channels;
    const Coded own = coded(
        code, [](void*) {},
        [&](void* headers, uint8_t* codes) {
          cuda::side_encode(code, source.data(), in, has_channels ? own_channels.data() : nullptr, &seed, codes, headers, scratch.data(),
                            nullptr);
        });
    ASSERT_EQ(own.headers, truth.headers);
    ASSERT_EQ(own.codes, truth.codes);
    if (has_channels && code.table.off == 1) {
      std::vector<double> sums(static_cast<size_t>(2 * count));
      kScalar.off_sums(code, {x.data(), in}, channels.data(), sums.data(), 0, length);
      for (size_t c = 0; c < channels.size(); ++c) {
        const double mean = sums[2 * c + 1] == 0 ? 0 : sums[2 * c] / sums[2 * c + 1];
        const float found = own_channels[c].off_mean;
        // float32 sums of at most 65,536 values of one size: n·2^−24 of the largest, and their mean is smaller than that
        if (!std::isfinite(channels[c].gamma) || !std::isfinite(channels[c].beta)) continue;
        ASSERT_NEAR(found, mean, 0.004 * (1 + std::abs(mean))) << c;
      }
      channels = own_channels;  // off codes decode to these
    }
    Placed target(length * size_of(out), shift_of(out, random));
    cuda::side_decode(code, own.codes.data(), has_channels ? channels.data() : nullptr, own.headers.data(), target.data(), out, nullptr);
    ASSERT_TRUE(target.memory.intact());
    ASSERT_EQ(target.bytes(), decode(kScalar, code, has_channels ? channels.data() : nullptr, truth, out));
  }
}

// Codes of 2 bits have short ways to decode a block of usual size: beside blocks of every other kind, in every type, with a broken last
// block.
TEST(EmulatedCodec, SidesOfAllKindsDecodeAsTheScalarKernels) {
  Random random(68);
  for (const Side side : {Side::relu, Side::one_sided}) {
    for (const DType out : kTypes) {
      for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
        const int64_t length = 256 * 132 + 8 * random.below(31) + 3, count = 64;
        SideCode code = side_code({2, side}, length, 256, count, 1, random);
        code.grid = grid_of(length, 256, 0);
        code.header = header;
        SCOPED_TRACE(describe(code, DType::f32) + " to " + name_of(out));
        std::vector<Channel> channels;
        for (int64_t c = 0; c < count; ++c) channels.push_back(channel_of(0.5f + std::abs(random.normal()), 0.3f * random.normal(), -0.7f));
        const Channel* own = side == Side::relu ? nullptr : channels.data();
        const Coded truth = encode(kScalar, code, own, as_type(blocks_of_all_kinds(length, random), DType::f32), DType::f32, random.bits());
        Placed target(length * size_of(out));
        cuda::side_decode(code, truth.codes.data(), own, truth.headers.data(), target.data(), out, nullptr);
        ASSERT_TRUE(target.intact());
        ASSERT_EQ(target.bytes(), decode(kScalar, code, own, truth, out));
      }
    }
  }
}

TEST(EmulatedCodec, MasksAndNarrowIntegers) {
  Random random(63);
  for (const int64_t length : kLengths) {
    for (const DType type : kTypes) {
      const Bytes x = as_type(mixed_values(length, random), type);
      Bytes truth(static_cast<size_t>(code_bytes(length, 1))), own = truth, flags(static_cast<size_t>(length));
      kScalar.mask({x.data(), type}, truth.data(), 0, length);
      Placed source(x, shift_of(type, random));
      cuda::mask(source.data(), type, length, own.data(), nullptr);
      ASSERT_EQ(own, truth) << length << name_of(type);
      cuda::unmask(own.data(), length, flags.data(), nullptr);
      for (int64_t i = 0; i < length; ++i) ASSERT_EQ(flags[static_cast<size_t>(i)], truth[static_cast<size_t>(i / 8)] >> (i % 8) & 1);
    }
    Placed flags(length, random.one_in(2) ? 3 : 0), back(length, random.one_in(2) ? 3 : 0);
    Floats numbers;
    for (int64_t i = 0; i < length; ++i) {
      flags.data()[i] = static_cast<uint8_t>(random.one_in(2) ? 0 : 1 + random.below(255));  // true is whatever is not 0
      numbers.push_back(flags.data()[i]);
    }
    Bytes truth(static_cast<size_t>(code_bytes(length, 1))), own = truth;
    kScalar.mask({numbers.data(), DType::f32}, truth.data(), 0, length);
    cuda::mask_flags(flags.data(), length, own.data(), nullptr);
    ASSERT_EQ(own, truth) << length;
    cuda::unmask(own.data(), length, back.data(), nullptr);
    ASSERT_TRUE(back.memory.intact());
    for (int64_t i = 0; i < length; ++i) ASSERT_EQ(back.data()[i], flags.data()[i] != 0) << i;
    for (const int bits : {1, 3, 8, 13, 32}) {
      std::vector<int64_t> x, back(static_cast<size_t>(length));
      for (int64_t i = 0; i < length; ++i) x.push_back(-5 + random.below(int64_t{1} << bits));
      Bytes codes(static_cast<size_t>(code_bytes(length, bits)));
      cuda::narrow(x.data(), length, -5, bits, codes.data(), nullptr);
      cuda::widen(codes.data(), length, -5, bits, back.data(), nullptr);
      ASSERT_EQ(back, x) << bits;
    }
  }
}

/// How many of two streams' codes differ; 1,000,000 where one does by more than a level.
int64_t apart(const Bytes& a, const Bytes& b, int bits, int64_t values) {
  int64_t count = 0;
  for (int64_t i = 0; i < values; ++i) {
    const int64_t one = get_code(a.data(), bits, i), other = get_code(b.data(), bits, i);
    if (std::abs(one - other) > 1) return 1'000'000;
    count += one != other ? 1 : 0;
  }
  return count;
}

// erf, exp and tanh are the CPU's here and differ from CUDA's in their last bits, as they do from the library's own: of slopes that close
// to a threshold one in thousands takes the level beside it. At 8 bits a last bit is 2^−16 of a level.
TEST(EmulatedCodec, SlopesAreTheCpus) {
  Random random(64);
  for (const SlopeOf of : {SlopeOf::gelu, SlopeOf::gelu_tanh, SlopeOf::silu, SlopeOf::mish}) {
    for (const int bits : {2, 3, 4, 8}) {
      for (const int64_t length : kLengths) {
        const DType in = random.pick(kTypes), out = random.pick(kTypes);
        Floats levels;
        for (int i = 0; i < 1 << bits; ++i) levels.push_back(-0.15f + 1.3f * static_cast<float>(i) / static_cast<float>((1 << bits) - 1));
        const Bytes x = as_type(mixed_values(length, random), in);
        const uint64_t seed = random.bits();
        Bytes truth(static_cast<size_t>(code_bytes(length, bits))), own = truth;
        slope_encode(of, x.data(), in, levels.data(), bits, seed, truth.data(), 0, length);
        Placed source(x, shift_of(in, random));
        cuda::slope_encode(of, source.data(), in, length, levels.data(), bits, &seed, own.data(), nullptr);
        ASSERT_LE(apart(own, truth, bits, length), 1 + length / 1000) << bits << " bits, " << length << " values, " << name_of(in);
        Bytes values(static_cast<size_t>(length * size_of(out)));
        table_decode(own.data(), bits, levels.data(), values.data(), out, 0, length);
        Placed target(length * size_of(out), shift_of(out, random));
        cuda::table_decode(own.data(), length, bits, levels.data(), target.data(), out, nullptr);
        ASSERT_EQ(target.bytes(), values);
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
