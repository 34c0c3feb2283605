// Unbiasedness and variance of every spec of a grid, through pack() and unpack().
#include "chance.h"

#include <ATen/Parallel.h>

#include "reference.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::normal;

constexpr int kSeeds = 200;

double half_ulp(const at::Tensor& x) {
  const double unit = x.scalar_type() == at::kFloat ? 0x1p-24 : x.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-8;
  // Levels reach a little beyond the values; 2^−16 steps of the noise are below half an ulp of 16-bit types and 2^−16 of a gap.
  return 1.2 * unit * x.abs().max().item<double>() + 0x1p-17 * (x.max() - x.min()).item<double>();
}

/// One thread: thousands of small products wait for each other longer than they compute.
class Chance : public testing::Test {
 protected:
  Chance() { at::set_num_threads(1); }
  ~Chance() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(Chance, TheTestItselfSeesBiasAndWrongVariance) {
  const at::Tensor x = normal({4096}, 1), all = at::ones_like(x, at::kBool);
  const CodecSpec spec = parse_spec("bits=2");
  const auto draw = [&](uint64_t seed) { return unpack(pack(x, spec, seed)); };
  const auto biased = chance::pooled(x + 0.01, all, kSeeds, half_ulp(x), draw);
  EXPECT_GT(std::abs(biased.z), chance::kLimit);
  const auto repeated = chance::pooled(x, all, kSeeds, half_ulp(x), [&](uint64_t seed) { return draw(seed / 50000); });
  EXPECT_GT(repeated.chi2, chance::kLimit);
}

TEST_F(Chance, BlockCodesAreUnbiased) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = normal({8, 512}, 1, type) * 2 + 0.5;
    for (const char* text :
         {"bits=1,levels=even", "bits=2,levels=even", "bits=2", "bits=3", "bits=4", "bits=4,levels=quantile", "bits=5,block=64", "bits=8",
          "bits=2,block=8", "bits=2,block=1024,header=f32", "bits=2,block=row", "actnn", "gact"}) {
      const CodecSpec spec = parse_spec(text);
      if (type == at::kBFloat16 && spec.bits > 4) continue;  // half an ulp of bf16 hides what 8 bits add
      SCOPED_TRACE(std::string(text) + " " + c10::toString(type));
      const auto r =
          chance::pooled(x, at::ones_like(x, at::kBool), kSeeds, half_ulp(x), [&](uint64_t seed) { return unpack(pack(x, spec, seed)); });
      chance::expect_unbiased(r, x.numel());
    }
  }
}

TEST_F(Chance, OffsetsCostNoBias) {
  const at::Tensor x = normal({4096}, 2) + 1000;
  for (const char* text : {"bits=2", "bits=2,header=f32", "bits=4,levels=even"}) {
    const CodecSpec spec = parse_spec(text);
    const auto r =
        chance::pooled(x, at::ones_like(x, at::kBool), kSeeds, half_ulp(x), [&](uint64_t seed) { return unpack(pack(x, spec, seed)); });
    chance::expect_unbiased(r, x.numel());
  }
}

TEST_F(Chance, LowPassIsUnbiased) {
  const at::Tensor x = normal({2, 4, 20, 20}, 3) + normal({2, 4, 1, 1}, 4) * 4;
  for (const char* text : {"division", "division,lowpass=4,bits=1,levels=even", "division,lowpass=64", "division,block=100"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    // The sum mean + rest rounds once more.
    const auto r =
        chance::pooled(x, at::ones_like(x, at::kBool), kSeeds, 2 * half_ulp(x), [&](uint64_t seed) { return unpack(pack(x, spec, seed)); });
    chance::expect_unbiased(r, x.numel());
  }
}

TEST_F(Chance, SideCodesAreUnbiasedWhereTheyPromise) {
  const at::Tensor x = normal({8, 16, 40}, 5), gamma = normal({16}, 6), beta = normal({16}, 7) * 0.5;
  const at::Tensor on = (gamma.view({1, 16, 1}) * x + beta.view({1, 16, 1})) > 0;
  for (const char* text : {"side=one", "bits=3,side=one", "bits=3,side=both", "bits=4,side=both,levels=even"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    // Both sides of 3-bit one-sided codes round stochastically; a single off code is the mean.
    const at::Tensor only = spec.side == Side::one_sided ? on : at::ones_like(on);
    const auto r = chance::pooled(x, only, kSeeds, half_ulp(x),
                                  [&](uint64_t seed) { return unpack(pack_side(x, spec, seed_tensor(seed, at::kCPU), gamma, beta)); });
    chance::expect_unbiased(r, x.numel() / 2);
  }
  const at::Tensor relu = x.clamp_min(0);
  for (const char* text : {"side=relu", "bits=3,side=relu"}) {
    const CodecSpec spec = parse_spec(text);
    const auto r = chance::pooled(relu, relu > 0, kSeeds, half_ulp(x), [&](uint64_t seed) { return unpack(pack(relu, spec, seed)); });
    chance::expect_unbiased(r, x.numel() / 2);
  }
}

/// q·(ĥ − h) for every row. Independent signs: variance (‖q‖²‖h‖² + (q·h)² − 2Σq²h²)/R, so z is known for a fresh matrix a row.
TEST_F(Chance, ProjectionIsUnbiasedWithTheKnownVariance) {
  const int64_t rows = 64, columns = 40, width = 5;
  const at::Tensor h = normal({rows, columns}, 8).to(at::kDouble), q = normal({rows, columns}, 9).to(at::kDouble);
  const CodecSpec spec = parse_spec("exact,bits=32,rows=1");
  const at::Tensor variance =
      (q.square().sum(1) * h.square().sum(1) + (q * h).sum(1).square() - 2 * (q.square() * h.square()).sum(1)) / width;
  double z = 0, energy = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const at::Tensor error = unpack(pack(h.to(at::kFloat), spec, seed)).to(at::kDouble) - h;
    z += ((q * error).sum(1) / variance.sqrt()).sum().item<double>();
    energy += (error.square().sum(1) / h.square().sum(1)).mean().item<double>() / kSeeds;
  }
  EXPECT_LT(std::abs(z / std::sqrt(static_cast<double>(rows * kSeeds))), chance::kLimit);
  // E‖ĥ − h‖²/‖h‖² = (D − 1)/R = 7.8. One row's ratio has a standard deviation below its mean, so 12,800 of them stay within
  // 4.9/√12,800 = 4.3 % of it.
  EXPECT_NEAR(energy, (columns - 1.0) / width, 0.043 * (columns - 1.0) / width);
}

/// Columns of the Walsh–Hadamard matrix without repetition: (N − R)/(N − 1) of the independent error, N = 2^k ≥ D.
TEST_F(Chance, HadamardFormHasLessError) {
  for (const auto& [columns, padded] : {std::pair(int64_t{64}, 64.0), std::pair(int64_t{40}, 64.0)}) {
    const double width = static_cast<double>(ceil_div(columns, 4)), rows = 64;
    const at::Tensor h = normal({64, columns}, 10);
    const CodecSpec spec = parse_spec("exact,bits=32,rows=1,project=4,hadamard=yes");
    double energy = 0;
    std::vector<double> drift;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const at::Tensor error = unpack(pack(h, spec, seed)) - h;
      energy += (error.square().sum(1) / h.square().sum(1)).mean().item<double>() / kSeeds;
      drift.push_back((error * h).sum().item<double>());
    }
    const double expected = (static_cast<double>(columns) - 1) * (padded - width) / ((padded - 1) * width);
    // As above: within 4.9/√(rows·seeds) of the mean.
    EXPECT_NEAR(energy, expected, 4.9 / std::sqrt(rows * kSeeds) * expected);
    EXPECT_LT(std::abs(chance::t_of(drift)), chance::kLimit);
  }
}

TEST_F(Chance, ProjectedCodesAreUnbiased) {
  const at::Tensor h = normal({96, 48}, 11) + 0.3, q = normal({96, 48}, 12), g = normal({96, 6}, 13), w = normal({48, 6}, 14);
  const double exact = (h.t().mm(g) * w).sum().item<double>();
  for (const char* text : {"exact", "blockwise,block=16rows,rows=7", "exact,hadamard=yes,rows=16", "exact,bits=1,rows=64,project=3"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    std::vector<double> values, products;
    for (uint64_t seed = 0; seed < 400; ++seed) {
      const Packed packed = pack(h, spec, seed);
      values.push_back(((unpack(packed) - h) * q).sum().item<double>());
      products.push_back((transposed_product(packed, g) * w).sum().item<double>() - exact);
    }
    // 400 draws: Student's t is normal to within the threshold's rounding (4.9 against 4.97 at 10^−6).
    EXPECT_LT(std::abs(chance::t_of(values)), 4.97);
    EXPECT_LT(std::abs(chance::t_of(products)), 4.97);
  }
}

}  // namespace
}  // namespace satchel
