// Low-pass codes, emulated on the CPU: the bytes of the scalar kernel from maps in either order, and the norm that is fused with them.
#include "satchel/kernels/cuda/low_pass_last.h"
#include "tests/emulation/norm_common.h"

namespace satchel::test {
namespace {

/// Maps one after the other, what the CPU makes of them, and where a packed tensor has it.
struct LowPass {
  LowPassShape shape;
  BlockCode code;
  DType type;
  uint64_t seed;
  Bytes x;
  Layout at;
  Bytes truth;  // codes, gap, headers, gap, means

  LowPass(const LowPassShape& maps, const BlockCode& how, DType type, Random& random)
      : shape(maps), code(how), type(type), seed(random.bits()) {
    const int64_t n = shape.maps * shape.map_values(), windows = shape.maps * shape.windows();
    Floats v = mixed_values(n, random);
    for (float& f : v) f += random.one_in(3) ? 0.0f : 1.0f;
    if (random.one_in(3)) v[static_cast<size_t>(random.below(n))] = random.one_in(2) ? NAN : INFINITY;
    if (random.one_in(4)) v[static_cast<size_t>(random.below(n))] = 1e-41f;
    x = stored(v, type);
    std::vector<uint16_t> means(static_cast<size_t>(windows));
    Floats rest(static_cast<size_t>(n));
    kScalar.low_pass_split(shape, {x.data(), type}, means.data(), rest.data(), 0, shape.maps);
    const Coded coded = encode(kScalar, code, as_type(rest, DType::f32), DType::f32, seed);
    at = layout_of(code.grid, code.levels.bits, code.header, windows);
    truth.assign(static_cast<size_t>(at.total), 0xa5);  // nobody writes the gaps here
    std::copy(coded.codes.begin(), coded.codes.end(), truth.begin());
    std::copy(coded.headers.begin(), coded.headers.end(), truth.begin() + at.headers);
    std::memcpy(truth.data() + at.means, means.data(), means.size() * 2);
  }
  const uint16_t* means() const { return reinterpret_cast<const uint16_t*>(truth.data() + at.means); }
  Bytes decoded(DType to) const {
    const int64_t n = code.grid.values;
    Bytes rest(static_cast<size_t>(4 * n)), y(static_cast<size_t>(n * size_of(to)));
    kScalar.decode(code, truth.data(), truth.data() + at.headers, {rest.data(), DType::f32}, 0, n);
    kScalar.low_pass_join(shape, means(), reinterpret_cast<const float*>(rest.data()), {y.data(), to}, 0, shape.maps);
    return y;
  }
};

uint16_t* means_in(Placed& bytes, const Layout& at) { return reinterpret_cast<uint16_t*>(bytes.data() + at.means); }

/// samples × channels × pixels to samples × pixels × channels.
Bytes last(const Bytes& x, DType type, int64_t channels, int64_t pixels) {
  Bytes y(x.size());
  const size_t size = static_cast<size_t>(size_of(type));
  for (size_t i = 0; i < x.size() / size; ++i) {
    const size_t c = static_cast<size_t>(channels), p = static_cast<size_t>(pixels), in = i % (c * p),
                 to = i / (c * p) * c * p + in % p * c + in / p;
    std::memcpy(y.data() + to * size, x.data() + i * size, size);
  }
  return y;
}

TEST(EmulatedLowPass, MapsAreTheScalarKernels) {
  Random random(101);
  const LowPassShape shapes[] = {{5, 1, 7, 7, 8}, {3, 1, 8, 8, 8},  {4, 1, 17, 24, 8}, {2, 1, 56, 56, 8}, {1, 1, 64, 128, 8},
                                 {3, 5, 9, 6, 8}, {7, 1, 1, 50, 8}, {2, 1, 20, 24, 4}, {3, 1, 16, 20, 3}};
  for (int trial = 0; trial < 120; ++trial) {
    const LowPassShape shape = shapes[trial % 9];
    const int64_t n = shape.maps * shape.map_values();
    const int bits = random.one_in(3) ? 1 + static_cast<int>(random.below(8)) : random.one_in(2) ? 2 : 4;
    const BlockCode code = {grid_of(n, random.one_in(4) ? 100 : shape.map_values()), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                            random.one_in(3) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(bits, random.one_in(4) ? Levels::optimal : Levels::even, 256)};
    const DType type = kTypes[trial / 9 % 3], out = random.pick(kTypes);
    SCOPED_TRACE(describe(code, type) + ", maps of " + std::to_string(shape.height) + " x " + std::to_string(shape.width));
    const LowPass p(shape, code, type, random);
    Placed from(p.x, shift_of(type, random)), bytes(p.at.total);
    Placed scratch(cuda::low_pass_scratch_bytes(shape, code, from.data()));
    cuda::low_pass_encode(shape, code, from.data(), type, &p.seed, bytes.data(), bytes.data() + p.at.headers, means_in(bytes, p.at),
                          scratch.data(), nullptr);
    ASSERT_TRUE(bytes.intact() && scratch.intact());
    ASSERT_EQ(bytes.bytes(), p.truth);
    Placed to(n * size_of(out), shift_of(out, random));
    cuda::low_pass_decode(shape, code, bytes.data(), bytes.data() + p.at.headers, means_in(bytes, p.at), to.data(), out, nullptr);
    ASSERT_TRUE(to.intact());
    ASSERT_TRUE(same(to.bytes(), p.decoded(out), out));

    // The low part alone.
    const Bytes true_means(p.truth.begin() + p.at.means, p.truth.end());
    Placed own(static_cast<int64_t>(true_means.size())), spread(n * size_of(out), shift_of(out, random));
    cuda::low_pass_means(shape, from.data(), type, reinterpret_cast<uint16_t*>(own.data()), nullptr);
    ASSERT_TRUE(own.intact());
    ASSERT_EQ(own.bytes(), true_means);
    const Floats nothing(static_cast<size_t>(n));
    Bytes low(static_cast<size_t>(n * size_of(out)));
    kScalar.low_pass_join(shape, p.means(), nothing.data(), {low.data(), out}, 0, shape.maps);
    cuda::low_pass_spread(shape, p.means(), spread.data(), out, nullptr);
    ASSERT_TRUE(spread.intact());
    ASSERT_TRUE(same(spread.bytes(), low, out));
  }
}

struct Planes {
  int64_t samples, channels, height, width;
};
constexpr Planes kPlanes[] = {{3, 64, 7, 7},   {2, 16, 14, 14}, {2, 8, 28, 28},   {1, 8, 56, 56},  {2, 24, 9, 16},
                              {1, 8, 17, 20},  {2, 40, 12, 6},  {2, 16, 3, 3},    {2, 32, 24, 24}, {1, 8, 64, 64},
                              {1, 40, 31, 31}, {3, 8, 4, 2},    {1, 16, 112, 112}};

TEST(EmulatedLowPass, ChannelsLastAreTheScalarKernels) {
  Random random(102);
  int encoded = 0, decoded = 0;
  for (int trial = 0; trial < 78; ++trial) {
    const Planes& s = kPlanes[trial % 13];
    const LowPassShape shape = {s.samples * s.channels, 1, s.height, s.width, 8};
    const int64_t pixels = shape.map_values(), n = shape.maps * pixels;
    const BlockCode code = {grid_of(n, pixels), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                            random.one_in(3) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(random.one_in(3) ? 4 : 2, Levels::even, 256)};
    const DType type = kTypes[trial / 13 % 3];
    SCOPED_TRACE(describe(code, type) + ", " + std::to_string(s.channels) + " maps of " + std::to_string(s.height) + " x " +
                 std::to_string(s.width));
    const LowPass p(shape, code, type, random);
    Placed from(last(p.x, type, s.channels, pixels)), bytes(p.at.total);
    if (cuda::low_pass_last_encodes(shape, code, s.channels, from.data(), type)) {
      ++encoded;
      Placed scratch(cuda::low_pass_last_scratch_bytes(shape, s.channels, type));
      cuda::low_pass_last_encode(shape, code, s.channels, from.data(), type, &p.seed, bytes.data(), bytes.data() + p.at.headers,
                                 means_in(bytes, p.at), scratch.data(), nullptr);
      ASSERT_TRUE(bytes.intact() && scratch.intact());
      ASSERT_EQ(bytes.bytes(), p.truth);
    }
    Placed truth(p.truth), to(n * size_of(type));
    if (!cuda::low_pass_last_decodes(shape, code, s.channels, to.data(), type)) continue;
    ++decoded;
    cuda::low_pass_last_decode(shape, code, s.channels, truth.data(), truth.data() + p.at.headers, means_in(truth, p.at), to.data(), type,
                               nullptr);
    ASSERT_TRUE(to.intact());
    ASSERT_TRUE(same(to.bytes(), last(p.decoded(type), type, s.channels, pixels), type));
  }
  EXPECT_GT(encoded, 60);
  EXPECT_GT(decoded, 60);
}

TEST(EmulatedLowPass, NormsKeepTheScalarKernelsBytes) {
  Random random(103);
  int fitting = 0;
  for (int trial = 0; trial < 78; ++trial) {
    const Planes& s = kPlanes[trial % 13];
    const LowPassShape shape = {s.samples * s.channels, 1, s.height, s.width, 8};
    const int64_t pixels = shape.map_values(), n = shape.maps * pixels, rows = s.samples * pixels;
    const BlockCode code = {grid_of(n, pixels), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                            random.one_in(3) ? Rounding::nearest : Rounding::stochastic, levels_of(2, Levels::even, 256)};
    const DType type = kTypes[trial / 13 % 3];
    const int end = trial / 39 == 0 ? 1 : static_cast<int>(random.below(3));  // norm, ReLU, skip and ReLU
    SCOPED_TRACE(describe(code, type) + ", " + std::to_string(s.channels) + " maps of " + std::to_string(s.height) + " x " +
                 std::to_string(s.width) + ", end " + std::to_string(end));
    const LowPass p(shape, code, type, random);
    Placed bytes(p.at.total), on(end == 0 ? 0 : n / 8);
    const cuda::LowPassParts parts = {shape, code, s.channels, bytes.data(), bytes.data() + p.at.headers, means_in(bytes, p.at)};
    if (!cuda::norm_low_pass_fits(parts, type)) continue;
    ++fitting;
    const Bytes x = last(p.x, type, s.channels, pixels);

    // Moments: of means off by 16 kUnit of the largest value, as column_moments() has them, and of lines merged one by one.
    Placed from(x), mean(4 * s.channels), rstd(4 * s.channels), var(4 * s.channels), scratch(cuda::norm_low_pass_scratch_bytes(parts));
    cuda::norm_low_pass_measure(parts, from.data(), type, {mean.floats(), rstd.floats(), var.floats(), nullptr, nullptr, 1e-3, 0.1},
                                scratch.data(), nullptr);
    ASSERT_TRUE(mean.intact() && rstd.intact() && var.intact() && scratch.intact() && bytes.intact());
    const double lines = 3.0 * static_cast<double>(s.samples * s.height * ceil_div(s.width, 8));
    for (int64_t c = 0; c < s.channels; ++c) {
      double sum = 0, squares = 0, most = 0, far = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const double v = load(x.data(), type, r * s.channels + c);
        sum += v, most = std::max(most, std::abs(v));
      }
      const double truth = sum / static_cast<double>(rows), e = (16 + lines) * kUnit * most;
      if (!std::isfinite(truth)) {
        ASSERT_FALSE(std::isfinite(mean.floats()[c])) << c;
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        const double d = load(x.data(), type, r * s.channels + c) - truth;
        squares += d * d, far = std::max(far, std::abs(d));
      }
      ASSERT_TRUE(is_near(mean.floats()[c], truth, e)) << c << ": " << mean.floats()[c] << ", not " << truth;
      const double variance = squares / static_cast<double>(rows);
      ASSERT_TRUE(is_near(var.floats()[c], variance, (40 + lines) * kUnit * variance + 4 * far * e + e * e))
          << c << ": " << var.floats()[c] << ", not " << variance;
    }

    // Forward, with statistics of any kind.
    Floats own_mean, own_rstd, gamma, beta, z;
    for (int64_t c = 0; c < s.channels; ++c) {
      own_mean.push_back(random.normal()), own_rstd.push_back(0.5f + std::abs(random.normal()));
      gamma.push_back(random.normal()), beta.push_back(random.normal());
    }
    const Bytes skip = gradient(n, type, random);
    Bytes true_on(static_cast<size_t>(end == 0 ? 0 : n / 8));
    for (int64_t i = 0; i < n; ++i) {
      const size_t c = static_cast<size_t>(i % s.channels);
      const float scale = gamma[c] * own_rstd[c], offset = -(own_mean[c] * scale) + beta[c];
      float y = std::fma(scale, load(x.data(), type, i), offset);
      if (end == 2) y = y + load(skip.data(), type, i);
      z.push_back(chain_output(y, end == 0 || y > 0.0f ? 1.0f : 0.0f));
      if (end != 0 && y > 0.0f) put_code(true_on.data(), 1, i, 1);
    }
    Placed beside(skip), other(n * size_of(type));
    Placed& to = end == 2 && random.one_in(2) ? beside : other;
    const cuda::NormLowPassCode norm = {parts, end == 0 ? nullptr : on.data(), own_mean.data(), own_rstd.data()};
    cuda::norm_encode(
        norm,
        {from.data(), type, {own_mean.data(), own_rstd.data(), gamma.data(), beta.data()}, to.data(), end == 2 ? beside.data() : nullptr},
        &p.seed, nullptr);
    ASSERT_TRUE(bytes.intact() && on.intact() && beside.intact() && other.intact());
    ASSERT_EQ(bytes.bytes(), p.truth);
    ASSERT_TRUE(same(to.bytes(), stored(z, type), type)) << "z";
    ASSERT_EQ(on.bytes(), true_on);

    // Backward. x − mean is (window's mean − mean) + (low − 4·step) + (1 + code/4)·4·step: six operations on sizes that these have.
    const Bytes g = gradient(n, type, random);
    std::vector<double> hat, size;
    Floats gz = floats_of(g, type);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t c = i % s.channels, pixel = i / s.channels % pixels, map = i / s.channels / pixels * s.channels + c;
      const Header h = load_header(p.truth.data() + p.at.headers, code.header, map);
      const double window = from_bf16(p.means()[map * shape.windows() + pixel / s.width / 8 * ceil_div(s.width, 8) + pixel % s.width / 8]),
                   m = own_mean[static_cast<size_t>(c)];
      hat.push_back(window - m + h.low + get_code(p.truth.data(), 2, map * pixels + pixel) * static_cast<double>(h.step));
      size.push_back(std::abs(window) + std::abs(m) + std::abs(h.low) + 8 * static_cast<double>(h.step));
      if (end != 0 && get_code(true_on.data(), 1, i) == 0) gz[static_cast<size_t>(i)] = 0.0f;
    }
    Placed given(g), sum(4 * s.channels), along(4 * s.channels), dskip(n * size_of(type)), dx(n * size_of(type));
    cuda::norm_sums(norm, {given.data(), type, sum.floats(), along.floats(), scratch.data()}, nullptr);
    ASSERT_TRUE(sum.intact() && along.intact() && scratch.intact());
    const double depth = 16 * static_cast<double>(s.samples * shape.windows()) + 8;  // a thread adds up 16 values a window, then double
    for (int64_t c = 0; c < s.channels; ++c) {
      double a = 0, b = 0, a_size = 0, b_size = 0, off = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const size_t k = static_cast<size_t>(r * s.channels + c);
        a += gz[k], b += gz[k] * hat[k], a_size += std::abs(gz[k]), b_size += std::abs(gz[k] * hat[k]), off += std::abs(gz[k]) * size[k];
      }
      const double by = own_rstd[static_cast<size_t>(c)];
      ASSERT_TRUE(is_near(sum.floats()[c], a, depth * kUnit * a_size)) << c;
      ASSERT_TRUE(is_near(along.floats()[c], by * b, by * kUnit * (depth * b_size + 6 * off)))
          << c << ": " << along.floats()[c] << ", not " << by * b;
    }
    const Sums batch(rows, s.channels, random);
    const int64_t kind = random.below(4);
    Placed *of_skip = kind == 0 ? nullptr : kind == 1 ? &given : &dskip, *of_x = kind == 3 ? nullptr : kind == 2 ? &given : &dx;
    cuda::norm_back(norm,
                    {given.data(), type, gamma.data(), own_rstd.data(), batch.g.data(), batch.gx.data(),
                     of_skip == nullptr ? nullptr : of_skip->data(), of_x == nullptr ? nullptr : of_x->data()},
                    nullptr);
    ASSERT_TRUE(given.intact() && dskip.intact() && dx.intact());
    if (of_skip != nullptr) {
      ASSERT_TRUE(same(of_skip->bytes(), stored(gz, type), type)) << "skip's gradient";
    }
    for (int64_t i = 0; of_x != nullptr && i < n; ++i) {
      const size_t k = static_cast<size_t>(i), c = static_cast<size_t>(i % s.channels);
      const double slope = static_cast<double>(gamma[c]) * own_rstd[c], each = static_cast<double>(rows);
      const double by = -slope * own_rstd[c] * (batch.gx[c] / each), offset = -slope * (batch.g[c] / each);
      const double truth = slope * gz[k] + by * hat[k] + offset;
      const double bound =
          14 * kUnit * (std::abs(slope * gz[k]) + std::abs(by) * size[k] + std::abs(offset));  // five more operations, and 1/N
      const float found = load(of_x->data(), type, i);
      ASSERT_TRUE(is_near(found, truth, bound, type)) << "value " << i << ": " << found << ", not " << truth;
    }
  }
  EXPECT_GT(fitting, 60);
}

}  // namespace
}  // namespace satchel::test
