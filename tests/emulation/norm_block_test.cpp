// norm_block and norm_image, emulated on the CPU: the bytes of the scalar kernel's codes and masks, and gradients of plain loops over what
// the codes stand for.
#include "satchel/kernels/cpu/per_sample.h"
#include "tests/emulation/norm_common.h"

namespace satchel::test {
namespace {

/// Bits of what is true, eight a byte.
template <class F>
Bytes bits_of(int64_t n, const F& f) {
  Bytes bits(static_cast<size_t>(code_bytes(n, 1)));
  for (int64_t i = 0; i < n; ++i) put_code(bits.data(), 1, i, f(static_cast<size_t>(i)) ? 1 : 0);
  return bits;
}

Bytes laid_out(const Coded& c, const Layout& at) {
  Bytes all(static_cast<size_t>(at.total));
  std::copy(c.codes.begin(), c.codes.end(), all.begin());
  std::copy(c.headers.begin(), c.headers.end(), all.begin() + at.headers);
  return all;
}

TEST(EmulatedEpilogue, NormBlockKeepsTheScalarKernelsBytes) {
  Random random(73);
  const int64_t counts[] = {1, 3, 8, 40, 64, 100, 130, 250, 128, 256, 396, 512}, blocks[] = {128, 256, 512, 1024};
  for (int trial = 0; trial < 360; ++trial) {
    const bool tame = trial % 2 == 0;
    const DType type = kTypes[trial % 3];
    const int64_t channels = random.pick(counts), rows = random.one_in(8) ? 1 + random.below(3) : rows_of(channels, random);
    Norm norm(rows, channels, type, tame, random);
    if (random.one_in(4)) norm.poison(random);
    const int64_t n = norm.values(), block = blocks[trial % 4];
    const BlockCode code = {grid_of(n, block), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                            random.one_in(3) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(2, random.one_in(3) ? Levels::even : Levels::optimal, block)};
    ASSERT_TRUE(cuda::norm_block_fits(code, channels));
    Chain chain;
    chain.values = n, chain.channels = channels;
    if (!random.one_in(3))
      chain.drop = 1 + static_cast<uint32_t>(random.below(40000)), chain.scale = 65536.0f / static_cast<float>(65536 - chain.drop);
    const uint64_t seed = random.bits(), drop_seed = random.bits();
    SCOPED_TRACE(describe(code, type) + ", " + std::to_string(channels) + " channels" + (chain.drop > 0 ? ", dropout" : ""));

    // The truth.
    const Coded truth = encode(kScalar, code, norm.x, type, seed);
    Floats z(static_cast<size_t>(n)), ones(static_cast<size_t>(n), 1.0f);
    kScalar.chain(chain, norm.hat.data(), norm.gamma.data(), norm.beta.data(), nullptr, drop_seed, z.data(), 0, n);
    kScalar.chain_back(chain, ones.data(), nullptr, drop_seed, ones.data(), 0, n);
    const Bytes kept = bits_of(n, [&](size_t i) { return ones[i] != 0.0f; });
    const Bytes on = bits_of(n, [&](size_t i) { return norm.affine(static_cast<int64_t>(i)) > 0.0f; });

    // Forward.
    const Layout at = layout_of(code.grid, 2, code.header);
    const bool keeps = chain.drop > 0 && random.one_in(2);
    Placed bytes(at.total), own_on(static_cast<int64_t>(on.size())), own_kept(static_cast<int64_t>(on.size()));
    Placed x(norm.x), other(n * size_of(type));
    Placed& to = random.one_in(3) ? x : other;
    cuda::NormBlockCode c = {code,
                             chain,
                             {bytes.data(), bytes.data() + at.headers},
                             own_on.data(),
                             keeps ? own_kept.data() : nullptr,
                             &drop_seed,
                             norm.mean.data(),
                             norm.rstd.data(),
                             &seed};
    cuda::norm_encode(c, {x.data(), type, norm.parameters(), to.data()}, nullptr);
    ASSERT_TRUE(bytes.intact() && own_on.intact() && own_kept.intact() && x.intact() && other.intact());
    ASSERT_EQ(bytes.bytes(), laid_out(truth, at));
    ASSERT_EQ(own_on.bytes(), on);
    if (keeps) {
      ASSERT_EQ(own_kept.bytes(), kept);
    }
    ASSERT_TRUE(same(to.bytes(), stored(z, type), type)) << "z";

    // Backward. (decoded − mean)·rstd in float32, as the kernel has it: the code's numbers are float32.
    const Bytes g = gradient(n, type, random);
    Floats hat = floats_of(decode(kScalar, code, truth, DType::f32), DType::f32), gz = floats_of(g, type);
    for (int64_t i = 0; i < n; ++i) {
      const size_t k = static_cast<size_t>(i), ch = static_cast<size_t>(i % channels);
      hat[k] = (hat[k] - norm.mean[ch]) * norm.rstd[ch];
      gz[k] *= get_code(on.data(), 1, i) != 0 ? ones[k] : 0.0f;
    }
    if (keeps || chain.drop == 0) c.drop_seed = nullptr;
    Placed given(g), sum(channels * 4), along(channels * 4), scratch(cuda::norm_scratch_bytes());
    cuda::norm_sums(c, {given.data(), type, sum.floats(), along.floats(), scratch.data()}, nullptr);
    ASSERT_TRUE(scratch.intact());
    ASSERT_NO_FATAL_FAILURE(expect_sums(gz, hat, channels, sum, along));
    const Sums batch(rows, channels, random);
    cuda::norm_back(c, {given.data(), type, norm.gamma.data(), norm.rstd.data(), batch.g.data(), batch.gx.data(), nullptr, given.data()},
                    nullptr);
    ASSERT_TRUE(given.intact());
    ASSERT_NO_FATAL_FAILURE(expect_gradient(given.bytes(), type, gz, hat, norm, &batch, rows));
  }
}

std::vector<F32Header> ranges_in(Placed& memory, int64_t count) {
  std::vector<F32Header> all(static_cast<size_t>(count));
  std::memcpy(all.data(), memory.data(), all.size() * sizeof(F32Header));
  return all;
}
/// A poisoned block's is NaN, of whatever sign.
void expect_ranges(Placed& memory, const std::vector<F32Header>& truth) {
  ASSERT_TRUE(memory.intact());
  const std::vector<F32Header> own = ranges_in(memory, static_cast<int64_t>(truth.size()));
  for (size_t b = 0; b < truth.size(); ++b) {
    ASSERT_EQ(own[b].low, truth[b].low) << b;
    ASSERT_TRUE(own[b].step == truth[b].step || (own[b].step != own[b].step && truth[b].step != truth[b].step)) << b;
  }
}

TEST(EmulatedEpilogue, NormImageKeepsTheScalarKernelsBytes) {
  Random random(74);
  const int64_t counts[] = {1, 3, 8, 40, 64, 100, 130, 250, 128, 256, 384, 512};
  for (int trial = 0; trial < 360; ++trial) {
    const bool tame = trial % 2 == 0, own_bits = trial % 4 >= 2;
    const DType type = kTypes[trial % 3];
    const int64_t channels = random.pick(counts), samples = 1 + random.below(5);
    int64_t values = channels;
    while (values % 256 != 0) values += channels;
    values *= 1 + random.below(4);
    Norm norm(samples * values / channels, channels, type, tame, random);
    if (random.one_in(4)) norm.poison(random);
    const int64_t n = norm.values(), blocks = n / 256;
    const HeaderType header = random.one_in(2) ? HeaderType::f32 : HeaderType::bf16;
    const Rounding rounding = random.one_in(3) ? Rounding::nearest : Rounding::stochastic;
    const int bits = own_bits ? 0 : 1 + static_cast<int>(random.below(8)),
              end = static_cast<int>(random.below(3));  // norm, ReLU, skip and ReLU
    const uint64_t seed = random.bits();
    SCOPED_TRACE(std::to_string(samples) + " samples of " + std::to_string(values) + ", " + std::to_string(channels) + " channels, " +
                 std::to_string(bits) + " bits, end " + std::to_string(end) + ", " + name_of(type) + (tame ? ", tame" : ""));

    // The truth.
    const Bytes hat_bytes = norm.hat_bytes(), skip = gradient(n, type, random);
    Floats z;
    for (int64_t i = 0; i < n; ++i) {
      const float y = end == 2 ? norm.affine(i) + load(skip.data(), type, i) : norm.affine(i);
      z.push_back(chain_output(y, end == 0 || y > 0.0f ? 1.0f : 0.0f));
    }
    const Bytes true_z = stored(z, type),
                on = bits_of(n, [&](size_t i) {
                  const float y = end == 2 ? norm.affine(static_cast<int64_t>(i)) + load(skip.data(), type, static_cast<int64_t>(i))
                                           : norm.affine(static_cast<int64_t>(i));
                  return y > 0.0f;
                });
    PerSampleCode each = {samples, values, 256, 0, header, rounding};
    std::vector<uint32_t> entries;
    for (int64_t s = 0; s < samples; ++s) {
      const uint32_t own = 1 + static_cast<uint32_t>(random.below(8));
      entries.push_back(make_entry(static_cast<uint32_t>(each.budget), own));
      each.budget += own;
    }
    std::vector<F32Header> ranges(static_cast<size_t>(blocks)), z_ranges = ranges;
    std::vector<double> squares(static_cast<size_t>(samples));
    per_sample_measure(each, {hat_bytes.data(), DType::f32}, ranges.data(), squares.data(), 0, samples);
    per_sample_measure(each, {true_z.data(), type}, z_ranges.data(), squares.data(), 0, samples);
    const BlockCode code = {grid_of(n, 256), header, rounding, levels_of(own_bits ? 2 : bits, Levels::even, 256)};
    Coded truth;
    Floats hat;
    if (own_bits) {
      Bytes all(static_cast<size_t>(each.total())), decoded(static_cast<size_t>(4 * n));
      std::memcpy(all.data() + each.entries_at(), entries.data(), entries.size() * 4);
      per_sample_encode(each, {hat_bytes.data(), DType::f32}, seed, ranges.data(), all.data(), 0, samples);
      per_sample_decode(each, all.data(), decoded.data(), DType::f32, 0, 0, samples);
      truth = {Bytes(all.begin(), all.begin() + each.headers_at()),
               Bytes(all.begin() + each.headers_at(), all.begin() + each.entries_at())};
      hat = floats_of(decoded, DType::f32);
    } else {
      truth = encode(kScalar, code, hat_bytes, DType::f32, seed);
      hat = floats_of(decode(kScalar, code, truth, DType::f32), DType::f32);
    }

    // Forward.
    Placed codes(static_cast<int64_t>(truth.codes.size())), headers(static_cast<int64_t>(truth.headers.size())),
        own_on(end == 0 ? 0 : n / 8);
    Placed measured(blocks * 8), own_z_ranges(blocks * 8), x(norm.x), beside(skip), other(n * size_of(type));
    const cuda::NormImageCode c = {samples,
                                   values,
                                   channels,
                                   256,
                                   bits,
                                   header,
                                   rounding,
                                   {codes.data(), headers.data()},
                                   own_bits ? entries.data() : nullptr,
                                   end == 0 ? nullptr : own_on.data(),
                                   &seed};
    ASSERT_TRUE(cuda::norm_image_fits(c));
    Placed& to = random.one_in(3) ? x : end == 2 && random.one_in(2) ? beside : other;
    const cuda::NormPass pass = {x.data(), type, norm.parameters(), to.data(), end == 2 ? beside.data() : nullptr};
    const bool measures = own_bits || random.one_in(3), tells = random.one_in(2);
    if (measures) {
      cuda::norm_image_measure(c, pass, reinterpret_cast<F32Header*>(measured.data()), nullptr);
      ASSERT_NO_FATAL_FAILURE(expect_ranges(measured, ranges));
    }
    cuda::norm_encode(c, pass, measures ? reinterpret_cast<F32Header*>(measured.data()) : nullptr,
                      tells ? reinterpret_cast<F32Header*>(own_z_ranges.data()) : nullptr, nullptr);
    ASSERT_TRUE(codes.intact() && headers.intact() && own_on.intact() && x.intact() && beside.intact() && other.intact());
    ASSERT_TRUE(same(to.bytes(), true_z, type)) << "z";
    ASSERT_EQ(headers.bytes(), truth.headers);
    ASSERT_EQ(codes.bytes(), truth.codes);
    if (end != 0) {
      ASSERT_EQ(own_on.bytes(), on);
    }
    if (tells) {
      ASSERT_NO_FATAL_FAILURE(expect_ranges(own_z_ranges, z_ranges)) << "z's extremes";
    }

    // Backward.
    const Bytes g = gradient(n, type, random);
    Floats gz = floats_of(g, type);
    for (int64_t i = 0; i < n; ++i) gz[static_cast<size_t>(i)] *= end == 0 || get_code(on.data(), 1, i) != 0 ? 1.0f : 0.0f;
    Placed given(g), sum(channels * 4), along(channels * 4), scratch(cuda::norm_scratch_bytes()), dskip(n * size_of(type)),
        dx(n * size_of(type)), own_squares(blocks * 4);
    cuda::norm_sums(c, {given.data(), type, sum.floats(), along.floats(), scratch.data()}, nullptr);
    ASSERT_TRUE(scratch.intact());
    ASSERT_NO_FATAL_FAILURE(expect_sums(gz, hat, channels, sum, along));
    const Sums batch(norm.rows, channels, random);
    const int64_t kind = random.below(4);
    const bool wants_squares = random.one_in(2);
    Placed *of_skip = kind == 0 ? nullptr : kind == 1 ? &given : &dskip, *of_x = kind == 3 ? nullptr : kind == 2 ? &given : &dx;
    cuda::norm_back(c,
                    {given.data(), type, norm.gamma.data(), norm.rstd.data(), batch.g.data(), batch.gx.data(),
                     of_skip == nullptr ? nullptr : of_skip->data(), of_x == nullptr ? nullptr : of_x->data(),
                     wants_squares ? own_squares.floats() : nullptr},
                    nullptr);
    ASSERT_TRUE(given.intact() && dskip.intact() && dx.intact() && own_squares.intact());
    if (of_skip != nullptr) {
      ASSERT_TRUE(same(of_skip->bytes(), stored(gz, type), type)) << "skip's gradient";
    }
    if (of_x != nullptr) {
      ASSERT_NO_FATAL_FAILURE(expect_gradient(of_x->bytes(), type, gz, hat, norm, &batch, norm.rows));
    }
    if (!wants_squares) continue;
    for (int64_t b = 0; b < blocks;
         ++b) {  // each gradient is off by 8 kUnit of its parts' sizes, its square by 17, and 13 additions follow
      double truth_of = 0, size = 0;
      for (int64_t i = b * 256; i < (b + 1) * 256; ++i) {
        const size_t k = static_cast<size_t>(i), ch = static_cast<size_t>(i % channels);
        const double scale = static_cast<double>(norm.gamma[ch]) * static_cast<double>(norm.rstd[ch]),
                     rows = static_cast<double>(norm.rows);
        const double offset = batch.g[ch] / rows, off_along = hat[k] * (batch.gx[ch] / rows);
        const double v = scale * (gz[k] - offset - off_along), most = scale * (std::abs(gz[k]) + std::abs(offset) + std::abs(off_along));
        truth_of += v * v, size += most * most;
      }
      ASSERT_TRUE(is_near(own_squares.floats()[b], truth_of, 30 * kUnit * size))
          << "block " << b << ": " << own_squares.floats()[b] << ", not " << truth_of;
    }
  }
}

}  // namespace
}  // namespace satchel::test
