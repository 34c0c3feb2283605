// norm_act and norm_add, emulated on the CPU: the bytes of the scalar kernel's codes of x̂ and z, and gradients of plain loops over what the
// codes stand for.
#include "tests/emulation/norm_common.h"

namespace satchel::test {
namespace {

/// Samples of 3 bits among those of 2.
struct ExtraBits {
  std::vector<int32_t> slots;
  int64_t sample = 0;
  int32_t wide = 0;  // samples of 3 bits
  SideTable table;

  ExtraBits() = default;
  ExtraBits(int64_t samples, int64_t sample_values, const SideTable& of_three, Random& random) : sample(sample_values), table(of_three) {
    for (int64_t s = 0; s < samples; ++s) slots.push_back(random.one_in(2) ? wide++ : -1);
  }
  bool any() const { return !slots.empty(); }
  bool is_wide(int64_t value) const { return any() && slots[static_cast<size_t>(value / sample)] >= 0; }
  int64_t plane_bytes() const { return wide * sample / 8; }
  ExtraBitView view(uint8_t* plane) const { return any() ? ExtraBitView{table, slots.data(), plane, sample} : ExtraBitView{}; }
};

/// Codes of 2 bits, where some samples have 3: bit 2 goes to the plane.
void put_wide(const ExtraBits& extra, const Coded& three, Bytes& codes, Bytes& plane, int64_t values) {
  plane.assign(static_cast<size_t>(extra.plane_bytes()), 0);
  if (!extra.any()) return;
  Bytes two(codes.size());
  for (int64_t i = 0; i < values; ++i) {
    const uint32_t code = extra.is_wide(i) ? get_code(three.codes.data(), 3, i) : get_code(codes.data(), 2, i);
    put_code(two.data(), 2, i, code & 3);
    if (extra.is_wide(i))
      put_code(plane.data(), 1, extra.slots[static_cast<size_t>(i / extra.sample)] * extra.sample + i % extra.sample, code >> 2);
  }
  codes = two;
}

/// Rows and channels of whole samples of whole blocks of 256.
struct Shape {
  int64_t rows, channels, samples = 0;
};
Shape whole_samples(Random& random) {
  const int64_t counts[] = {1, 3, 8, 16, 64, 128, 256};
  while (true) {
    const int64_t samples = 1 + random.below(6), blocks = 1 + random.below(4), channels = random.pick(counts);
    if (blocks * 256 % channels == 0) return {samples * blocks * 256 / channels, channels, samples};
  }
}

Chain chain_of(int64_t values, int64_t channels, bool plain, Random& random) {
  Chain c;
  c.values = values, c.channels = channels;
  if (plain) return c;
  c.slope = random.one_in(2) ? 0.1f : 0.0f;
  if (!random.one_in(3)) c.drop = 1 + static_cast<uint32_t>(random.below(40000)), c.scale = 65536.0f / static_cast<float>(65536 - c.drop);
  return c;
}

/// chain() and chain_back() of the scalar kernel.
Floats chained(const Chain& c, const Norm& norm, const Floats& hat, const uint8_t* on, uint64_t seed) {
  Floats z(hat.size());
  kScalar.chain(c, hat.data(), norm.gamma.data(), norm.beta.data(), on, seed, z.data(), 0, c.values);
  return z;
}
Floats chained_back(const Chain& c, const Bytes& g, DType type, const Bytes& on, uint64_t seed) {
  Floats out = floats_of(g, type);
  kScalar.chain_back(c, out.data(), on.data(), seed, out.data(), 0, c.values);
  return out;
}

constexpr int64_t kChannels[] = {1, 3, 7, 8, 16, 40, 64, 100, 130, 250, 128, 256, 512, 528, 1024};

TEST(EmulatedEpilogue, NormActKeepsTheScalarKernelsBytes) {
  Random random(71);
  for (int trial = 0; trial < 72; ++trial) {
    const bool tame = trial % 2 == 0, plain = trial % 4 < 2;
    const int bits = trial % 8 == 7 ? 3 : 2;
    const DType type = kTypes[trial % 3];
    Shape shape = {0, random.pick(kChannels)};
    const bool extra_bits = bits == 2 && random.one_in(4);
    if (extra_bits)
      shape = whole_samples(random);
    else
      shape.rows = rows_of(shape.channels, random);
    Norm norm(shape.rows, shape.channels, type, tame, random);
    if (random.one_in(4)) norm.poison(random);
    const int64_t n = norm.values();
    if (n < 256) continue;
    const Levels levels = random.one_in(4) ? Levels::even : Levels::optimal;
    const bool odd = random.one_in(3), sampled = bits == 2 && random.one_in(2);
    SideCode code = {grid_of(n, 256),
                     odd && random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                     odd && random.one_in(2) ? Rounding::nearest : Rounding::stochastic,
                     side_table(bits, Side::one_sided, levels, 256),
                     shape.channels,
                     1};
    ASSERT_TRUE(cuda::norm_act_fits(code));
    const Layout at = layout_of(code.grid, bits, code.header, 0, shape.channels, sampled);
    const OffPlane plane = {nullptr, code.grid.blocks(), off_slot_bytes(code.grid)};
    const SideTable three_table = side_table(3, Side::one_sided, levels, 256);
    const ExtraBits extra = extra_bits ? ExtraBits(shape.samples, n / shape.samples, three_table, random) : ExtraBits();
    const Chain chain = chain_of(n, shape.channels, plain, random);
    const uint64_t seed = random.bits();
    SCOPED_TRACE(describe(code, type) + (tame ? ", tame" : "") + (plain ? ", plain" : "") + (sampled ? ", off plane" : "") +
                 (extra_bits ? ", extra bits" : ""));

    // The truth.
    std::vector<Channel> channels;
    for (size_t c = 0; c < norm.gamma.size(); ++c) {
      const float gamma = norm.gamma[c], beta = norm.beta[c];
      channels.push_back({gamma == 0.0f ? 0.0f : -beta / gamma, gamma, beta, 0.0f});
    }
    const Bytes hat = norm.hat_bytes();
    Bytes true_plane(static_cast<size_t>(sampled ? off_plane_bytes(code.grid) : 0));
    SideCode of_truth = code, of_three = code;
    of_three.table = three_table;
    if (sampled) {
      of_truth.plane = plane;
      of_truth.plane.bytes = true_plane.data();
      const OffKey key = off_key(seed);
      const uint32_t words[] = {key.a, key.b, 0, 0};
      std::memcpy(true_plane.data(), words, sizeof words);
    }
    Coded truth = encode(kScalar, of_truth, channels.data(), hat, DType::f32, seed);
    const Coded three = extra_bits ? encode(kScalar, of_three, channels.data(), hat, DType::f32, seed) : Coded();
    const Coded two = truth;
    Bytes true_extra;
    put_wide(extra, three, truth.codes, true_extra, n);
    const Floats z = chained(chain, norm, norm.hat, nullptr, seed);

    // Forward.
    Placed bytes(at.total), extra_plane(extra.plane_bytes()), scratch(cuda::norm_act_scratch_bytes());
    Placed x(norm.x, shift_of(type, random)), other(n * size_of(type), shift_of(type, random));
    Placed& to = random.one_in(4) ? x : other;
    SideCode own = code;
    if (sampled) {
      own.plane = plane;
      own.plane.bytes = bytes.data() + at.plane;
    }
    cuda::NormActCode c = {own, chain, bytes.data(), &seed, extra.view(extra_plane.data())};
    cuda::norm_encode(c, {x.data(), type, norm.parameters(), to.data()}, scratch.data(), nullptr);
    ASSERT_TRUE(bytes.intact() && extra_plane.intact() && scratch.intact() && x.intact() && other.intact());
    const Bytes made = bytes.bytes();
    Bytes expected(made.size());
    std::copy(truth.codes.begin(), truth.codes.end(), expected.begin());
    std::copy(truth.headers.begin(), truth.headers.end(), expected.begin() + at.headers);
    std::copy(true_plane.begin(), true_plane.end(), expected.begin() + at.plane);
    const auto part = [](const Bytes& from, int64_t begin, int64_t end) { return Bytes(from.begin() + begin, from.begin() + end); };
    ASSERT_EQ(part(made, 0, at.channels), part(expected, 0, at.channels)) << "codes, headers and gaps";
    ASSERT_EQ(part(made, at.plane, at.total), part(expected, at.plane, at.total)) << "off plane";
    ASSERT_EQ(extra_plane.bytes(), true_extra);
    ASSERT_TRUE(same(to.bytes(), stored(z, type), type)) << "z";

    // Channels. Off means: a thread adds up a value a step, eight warps or fewer share the steps; then eight warps' sums, and double.
    std::vector<Channel> own_channels(channels.size());
    std::memcpy(own_channels.data(), made.data() + at.channels, channels.size() * sizeof(Channel));
    std::vector<double> sums(2 * channels.size()), sizes(channels.size());
    kScalar.off_sums(code, {hat.data(), DType::f32}, channels.data(), sums.data(), 0, n);
    for (int64_t i = 0; i < n; ++i) sizes[static_cast<size_t>(i % shape.channels)] += std::abs(norm.hat[static_cast<size_t>(i)]);
    for (size_t k = 0; k < channels.size(); ++k) {
      const Channel &a = own_channels[k], &b = channels[k];
      const auto equal = [](float p, float q) { return p == q || (p != p && q != q); };
      ASSERT_TRUE(equal(a.threshold, b.threshold) && equal(a.gamma, b.gamma) && equal(a.beta, b.beta)) << "channel " << k;
      const double count = sums[2 * k + 1], mean = bits == 3 || count == 0 ? 0 : sums[2 * k] / count;
      const double depth = static_cast<double>(ceil_div(n, 256) + 12);
      ASSERT_TRUE(is_near(a.off_mean, mean, count == 0 || bits == 3 ? 0 : depth * kUnit * sizes[k] / count))
          << k << ": " << a.off_mean << ", not " << mean;
    }

    // Backward, from what the codes stand for.
    const auto decoded = [&](const SideCode& from) {
      Floats v = floats_of(decode(kScalar, from, own_channels.data(), two, DType::f32), DType::f32);
      if (!extra_bits) return v;
      const Floats w = floats_of(decode(kScalar, of_three, own_channels.data(), three, DType::f32), DType::f32);
      for (int64_t i = 0; i < n; ++i) {
        if (extra.is_wide(i)) v[static_cast<size_t>(i)] = w[static_cast<size_t>(i)];
      }
      return v;
    };
    const Floats means = decoded(code), samples = decoded(of_truth);
    Bytes on(static_cast<size_t>(code_bytes(n, 1)));
    for (int64_t i = 0; i < n; ++i) {
      const bool passes = extra.is_wide(i) ? get_code(three.codes.data(), 3, i) >= 2
                                           : get_code(two.codes.data(), bits, i) >= static_cast<uint32_t>(code.table.off);
      put_code(on.data(), 1, i, passes ? 1 : 0);
    }
    if (chain.drop == 0) c.seed = nullptr;
    const Bytes g = gradient(n, type, random);
    const Floats gz = chained_back(chain, g, type, on, seed);
    Placed given(g, shift_of(type, random)), sum(shape.channels * 4), along(shape.channels * 4);
    cuda::norm_sums(c, {given.data(), type, sum.floats(), along.floats(), scratch.data()}, nullptr);
    ASSERT_EQ(given.bytes(), g);
    ASSERT_NO_FATAL_FAILURE(expect_sums(gz, means, shape.channels, sum, along));
    const Sums batch(shape.rows, shape.channels, random);
    const bool uses = !random.one_in(4);
    const int64_t rows = random.one_in(3) ? 2 * shape.rows + 1 : 0;
    cuda::norm_back(c,
                    {given.data(), type, nullptr, norm.rstd.data(), uses ? batch.g.data() : nullptr, uses ? batch.gx.data() : nullptr,
                     nullptr, given.data(), nullptr, rows},
                    nullptr);
    ASSERT_TRUE(given.intact() && bytes.intact());
    ASSERT_EQ(bytes.bytes(), made);
    ASSERT_NO_FATAL_FAILURE(
        expect_gradient(given.bytes(), type, gz, samples, norm, uses ? &batch : nullptr, rows == 0 ? shape.rows : rows));

    // The next layer's input, by parts.
    const Bytes input = stored(chained(chain, norm, means, on.data(), seed), type);
    for (int k = 0; k < 2; ++k) {
      const int64_t first = k == 0 ? 0 : random.below(shape.rows),
                    last = k == 0 ? shape.rows : first + 1 + random.below(shape.rows - first);
      Placed out((last - first) * shape.channels * size_of(type), shift_of(type, random));
      cuda::norm_act_input(c, first, last, out.data(), type, nullptr);
      ASSERT_TRUE(out.intact());
      ASSERT_TRUE(same(out.bytes(), slice(input, type, first * shape.channels, last * shape.channels), type))
          << "rows " << first << " to " << last;
    }
  }
}

/// Codes, zeros up to the headers, headers.
Bytes laid_out(const Coded& c, const Layout& at) {
  Bytes all(static_cast<size_t>(at.total));
  std::copy(c.codes.begin(), c.codes.end(), all.begin());
  std::copy(c.headers.begin(), c.headers.end(), all.begin() + at.headers);
  return all;
}

TEST(EmulatedEpilogue, NormAddKeepsTheScalarKernelsBytes) {
  Random random(72);
  const int64_t counts[] = {1, 3, 8, 40, 64, 100, 130, 250, 128, 256, 396, 512};
  for (int trial = 0; trial < 600; ++trial) {
    const bool tame = trial % 2 == 0, alone = trial % 5 == 4, usual = trial % 4 < 2;  // usual: the leanest kernels
    const DType type = kTypes[trial % 3];
    Shape shape = {0, random.pick(counts)};
    const bool extra_bits = !alone && !usual && random.one_in(3);
    if (extra_bits)
      shape = whole_samples(random);
    else
      shape.rows = random.one_in(8) ? 1 + random.below(3) : rows_of(shape.channels, random);
    Norm norm(shape.rows, shape.channels, type, tame, random);
    if (random.one_in(4)) norm.poison(random);
    const int64_t n = norm.values();
    const auto header = [&] { return !usual && random.one_in(2) ? HeaderType::f32 : HeaderType::bf16; };
    const auto rounding = [&] { return !usual && random.one_in(3) ? Rounding::nearest : Rounding::stochastic; };
    const int bits = alone || usual ? 2 : 1 + static_cast<int>(random.below(4)),
              sum_bits = usual || extra_bits ? 2 : 2 + static_cast<int>(random.below(2));
    const Levels levels = !alone && !usual && random.one_in(2) ? Levels::even : Levels::optimal;
    const BlockCode code = {grid_of(n, 256), header(), rounding(), levels_of(bits, levels, 256)};
    const SideCode sum = {grid_of(n, 256), header(), rounding(), side_table(sum_bits, Side::relu, Levels::optimal, 256)};
    const SideTable three_table = side_table(3, Side::relu, Levels::optimal, 256);
    const ExtraBits extra = extra_bits ? ExtraBits(shape.samples, n / shape.samples, three_table, random) : ExtraBits();
    const uint64_t norm_seed = random.bits(), sum_seed = random.bits();
    SCOPED_TRACE(describe(code, type) + "; " + describe(sum, type) + "; " + std::to_string(shape.channels) + " channels" +
                 (tame ? ", tame" : "") + (alone ? ", alone" : "") + (extra_bits ? ", extra bits" : ""));

    // The truth.
    Bytes skip = gradient(n, type, random);
    for (int64_t i = 0; trial % 7 < 2 && i < n / 2; ++i) put(skip, type, i, load(skip.data(), type, i) + 9);  // blocks that all pass
    if (random.one_in(6)) put(skip, type, random.below(n), random.one_in(2) ? NAN : -INFINITY);
    Floats z;
    for (int64_t i = 0; i < n; ++i) {
      const float y = alone ? norm.affine(i) : norm.affine(i) + load(skip.data(), type, i);
      z.push_back(alone ? y + 0.0f : y != y ? y : y > 0.0f ? y : 0.0f);
    }
    const Bytes true_z = stored(z, type);
    const Coded truth = encode(kScalar, code, norm.hat_bytes(), DType::f32, norm_seed);
    Coded true_sum = encode(kScalar, sum, nullptr, true_z, type, sum_seed);
    SideCode of_three = sum;
    of_three.table = three_table;
    Bytes true_extra;
    put_wide(extra, extra_bits ? encode(kScalar, of_three, nullptr, true_z, type, sum_seed) : Coded(), true_sum.codes, true_extra, n);

    // Forward, whole or in two parts.
    const Layout at = layout_of(code.grid, bits, code.header), sum_at = layout_of(sum.grid, sum_bits, sum.header);
    Placed bytes(at.total), sum_bytes(alone ? 0 : sum_at.total), extra_plane(extra.plane_bytes());
    cuda::NormAddCode c = {code,
                           sum,
                           shape.channels,
                           {bytes.data() + at.codes, bytes.data() + at.headers},
                           {alone ? nullptr : sum_bytes.data() + sum_at.codes, alone ? nullptr : sum_bytes.data() + sum_at.headers},
                           extra.view(extra_plane.data()),
                           &norm_seed,
                           &sum_seed,
                           alone};
    ASSERT_TRUE(cuda::norm_add_fits(c));
    int64_t step = 1;  // rows that are whole blocks
    while (step * shape.channels % 256 != 0) ++step;
    Placed x(norm.x), beside(skip), other(n * size_of(type));
    Placed* to = &other;
    if (shape.rows > step && random.one_in(2)) {
      if (!alone && random.one_in(2)) to = &beside;
      for (int64_t first = 0, rows; first < shape.rows; first += rows) {
        const int64_t left = shape.rows - first;
        rows = left <= step ? left : step * (1 + random.below(left / step));
        if (left - rows < step && random.one_in(2)) rows = left;  // a broken block behind whole ones, or alone
        Placed some(slice(norm.x, type, first * shape.channels, (first + rows) * shape.channels));
        cuda::norm_encode(c, {some.data(), type, norm.parameters(), to->data(), alone ? nullptr : beside.data(), first, rows}, nullptr);
      }
    } else {
      if (random.one_in(3)) to = alone || random.one_in(2) ? &x : &beside;
      cuda::norm_encode(c, {x.data(), type, norm.parameters(), to->data(), alone ? nullptr : beside.data()}, nullptr);
    }
    ASSERT_TRUE(bytes.intact() && sum_bytes.intact() && extra_plane.intact() && x.intact() && beside.intact() && other.intact());
    ASSERT_TRUE(same(to->bytes(), true_z, type)) << "z";
    ASSERT_EQ(bytes.bytes(), laid_out(truth, at)) << "x̂";
    if (!alone) {
      ASSERT_EQ(sum_bytes.bytes(), laid_out(true_sum, sum_at)) << "z's code";
      ASSERT_EQ(extra_plane.bytes(), true_extra);
    }

    // Backward.
    const Bytes g = gradient(n, type, random);
    const Floats hat = floats_of(decode(kScalar, code, truth, DType::f32), DType::f32);
    Floats gz = floats_of(g, type);
    for (int64_t i = 0; i < n; ++i) {
      const bool high =
          extra.is_wide(i) &&
          get_code(true_extra.data(), 1, extra.slots[static_cast<size_t>(i / extra.sample)] * extra.sample + i % extra.sample) != 0;
      const bool passes = alone || get_code(true_sum.codes.data(), sum_bits, i) != 0 || high;
      gz[static_cast<size_t>(i)] *= passes ? 1.0f : 0.0f;
    }
    Placed given(g), sum_g(shape.channels * 4), along(shape.channels * 4), scratch(cuda::norm_scratch_bytes());
    cuda::norm_sums(c, {given.data(), type, sum_g.floats(), along.floats(), scratch.data()}, nullptr);
    ASSERT_TRUE(scratch.intact());
    ASSERT_NO_FATAL_FAILURE(expect_sums(gz, hat, shape.channels, sum_g, along));
    const Sums batch(shape.rows, shape.channels, random);
    const bool uses = !random.one_in(4);
    const int64_t rows = random.one_in(3) ? 2 * shape.rows + 1 : 0, kind = random.below(4);
    Placed dskip(n * size_of(type)), dx(n * size_of(type));
    Placed *of_skip = kind == 0 ? nullptr : kind == 1 ? &given : &dskip, *of_x = kind == 3 ? nullptr : kind == 2 ? &given : &dx;
    cuda::norm_back(
        c,
        {given.data(), type, norm.gamma.data(), norm.rstd.data(), uses ? batch.g.data() : nullptr, uses ? batch.gx.data() : nullptr,
         of_skip == nullptr ? nullptr : of_skip->data(), of_x == nullptr ? nullptr : of_x->data(), nullptr, rows},
        nullptr);
    ASSERT_TRUE(given.intact() && dskip.intact() && dx.intact());
    if (of_skip != nullptr) {
      ASSERT_TRUE(same(of_skip->bytes(), stored(gz, type), type)) << "skip's gradient";
    }
    if (of_x != nullptr) {
      ASSERT_NO_FATAL_FAILURE(expect_gradient(of_x->bytes(), type, gz, hat, norm, uses ? &batch : nullptr, rows == 0 ? shape.rows : rows));
    }
  }
}

}  // namespace
}  // namespace satchel::test
