// The weights' gradient from norm_act's codes, emulated on the CPU: sums in double over what norm_act_input() gives.
#include "satchel/kernels/cuda/epilogue.h"
#include "tests/emulation/norm_common.h"

namespace satchel::test {
namespace {

TEST(EmulatedEpilogue, ProductFromTheCodes) {
  Random random(121);
  const int64_t counts[] = {96, 128, 256, 240}, widths[] = {1, 7, 40, 64, 100, 130, 256};
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t channels = random.pick(counts), rows = 3 + random.below(trial % 8 == 0 ? 300 : 90), n = rows * channels;
    const DType type = kTypes[trial % 3];
    Norm norm(rows, channels, type, trial % 2 == 0, random);
    if (random.one_in(6)) norm.poison(random);
    const SideCode code = {grid_of(n, 256),
                           random.one_in(3) ? HeaderType::f32 : HeaderType::bf16,
                           Rounding::stochastic,
                           side_table(2, Side::one_sided, Levels::optimal, 256),
                           channels,
                           1};
    Chain chain;
    chain.values = n, chain.channels = channels;
    if (random.one_in(2)) chain.drop = 20000, chain.scale = 65536.0f / (65536 - 20000);
    const uint64_t seed = random.bits();
    const Layout at = layout_of(code.grid, 2, code.header, 0, channels);
    Placed bytes(at.total), x(norm.x), scratch(cuda::norm_act_scratch_bytes()), z(n * size_of(type));
    const cuda::NormActCode kept = {code, chain, bytes.data(), &seed};
    cuda::norm_encode(kept, {x.data(), type, norm.parameters(), x.data()}, scratch.data(), nullptr);
    cuda::norm_act_input(kept, 0, rows, z.data(), type, nullptr);

    cuda::ProductGradients p;
    p.type = type, p.tf32 = type == DType::f32 && random.one_in(2), p.count = random.one_in(2) ? 1 : 2, p.width = random.pick(widths);
    SCOPED_TRACE(describe(code, type) + ", " + std::to_string(p.count) + " gradients of " + std::to_string(p.width) +
                 (p.tf32 ? ", tf32" : ""));
    const int64_t wider = p.width + (random.one_in(3) ? random.below(9) : 0);
    const Bytes g[2] = {gradient(rows * wider, type, random), gradient(rows * wider, type, random)};
    const int64_t shift = shift_of(type, random);
    Placed given[2] = {Placed(g[0], shift), Placed(g[1], shift)}, out[2] = {Placed(4 * p.width * channels), Placed(4 * p.width * channels)};
    for (size_t i = 0; i < 2; ++i) p.g[i] = given[i].data(), p.stride[i] = wider, p.out[i] = out[i].floats();
    ASSERT_TRUE(cuda::norm_act_product_fits(code, p));
    Placed partial(cuda::norm_act_product_scratch_bytes(code, p));
    cuda::norm_act_product(code, chain, bytes.data(), chain.drop > 0 ? &seed : nullptr, p, partial.data(), nullptr);
    ASSERT_TRUE(partial.intact() && out[0].intact() && out[1].intact());
    // At worst all rows one after the other, then parts; tf32 has two factors that are off by half an ulp, 2^−11.
    const double relative = static_cast<double>(rows + 40) * kUnit + (p.tf32 ? 2.1 * 0x1p-11 : 0);
    const Floats input = floats_of(z.bytes(), type);
    for (size_t i = 0; i < static_cast<size_t>(p.count); ++i) {
      for (int64_t w = 0; w < p.width; ++w) {
        for (int64_t c = 0; c < channels; ++c) {
          double sum = 0, size = 0;
          for (int64_t r = 0; r < rows; ++r) {
            const double term = static_cast<double>(load(g[i].data(), type, r * wider + w)) * input[static_cast<size_t>(r * channels + c)];
            sum += term, size += std::abs(term);
          }
          const float found = out[i].floats()[w * channels + c];
          ASSERT_TRUE(is_near(found, sum, relative * size)) << i << ": " << w << ", " << c << ": " << found << ", not " << sum;
        }
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
