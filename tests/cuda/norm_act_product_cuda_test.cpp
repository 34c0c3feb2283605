// Weight gradients straight from the codes: within rounding the products of the rows that norm_act_input() decodes, and those rows to the
// bit where the product only picks them.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;
using Gradients = std::vector<at::Tensor>;

at::Tensor gaussian(int64_t rows, int64_t columns, uint64_t seed, at::ScalarType type = at::kFloat) {
  at::manual_seed(seed);
  return at::randn({rows, columns}, at::kCUDA).to(type);
}

struct Mode {
  at::ScalarType type;
  bool tf32;
};
const Mode kModes[] = {{at::kFloat, false}, {at::kFloat, true}, {at::kBFloat16, false}, {at::kHalf, false}};

/// A packed layer input; half of its γ are negative, one is 0.
struct Layer {
  ChainOptions options;
  at::Tensor seed = seed_tensor(61, at::kCUDA);
  Packed code;

  Layer(const at::Tensor& h, ChainOptions chain) : options(chain) {
    const int64_t channels = h.size(1);
    const at::Tensor gamma = normal({channels}, 62).cuda(), beta = normal({channels}, 63).cuda();
    gamma[channels / 2] = 0;
    const ColumnMoments moments{(normal({channels}, 64) * 0.2).cuda(), (normal({channels}, 65).abs() + 0.5).cuda()};
    code = norm_act_encode({h.cuda(), moments, gamma, beta}, {parse_spec("satchel"), seed}, options).save.code;
  }
  Layer(int64_t rows, int64_t channels, double dropout) : Layer(gaussian(rows, channels, 66) * 1.5 + 0.2, {dropout, 0}) {}

  int64_t rows() const { return code.shape[0]; }
  at::Tensor kept_seed() const { return options.dropout > 0 ? seed : at::Tensor(); }
  at::Tensor input(at::ScalarType type) const { return norm_act_input(code, kept_seed(), options, 0, rows(), type); }
  Gradients product(const Gradients& gs) const { return norm_act_product(code, kept_seed(), options, gs); }
};

struct Shape {
  int64_t columns, channels;
};
const Shape kShapes[] = {{128, 128}, {40, 128}, {256, 256}, {40, 256}, {47, 256}, {100, 128}, {100, 104}, {1, 128}, {72, 176}, {33, 512}};
constexpr int64_t kRowCounts[] = {1, 7, 32, 33, 1000}, kManyRows = 40001;  // many: every thread block goes round its buffers

std::string words(int64_t rows, const Shape& shape) {
  return std::to_string(rows) + " rows, " + std::to_string(shape.columns) + " x " + std::to_string(shape.channels);
}

template <class F>
void for_layers(const F& f) {
  for (const int64_t rows : kRowCounts) {  // outermost, so that processes that share the cases have as many large ones each
    for (const Shape& shape : kShapes) {
      if (rows * shape.channels < 256) continue;  // less than a block: the fused passes do not fit
      for (const double dropout : {0.0, 0.5}) {
        if (!mine()) continue;
        SCOPED_TRACE(words(rows, shape));
        f(Layer(rows, shape.channels, dropout), shape.columns);
      }
    }
  }
}

std::string words(Mode mode) {
  return mode.type == at::kFloat ? (mode.tf32 ? "tf32" : "float32") : mode.type == at::kHalf ? "f16" : "bf16";
}

/// What a factor counts as where products are lined up to be added. Tensor cores go by the factors' exponents, and a subnormal number of
/// f16 has that of 2^−14 there, however small it is: seen on an H200 as −0.00607·−2^−24 + 1.165·−2^−24, which is off by 2^−39. Zeros count
/// as nothing.
at::Tensor size_in_sums(const at::Tensor& x, Mode mode) {
  return mode.type == at::kHalf ? x.abs().clamp_min(0x1p-14).masked_fill_(x == 0, 0) : x.abs();
}

/// How far a product may be from the exact one, in units of |g|ᵀ·|z|, both as size_in_sums() has them.
double allowed(int64_t rows, Mode mode) {
  // 8 shares of the rows at least, in steps of 32 rows; up to 4 teams, 17 shares a warp, 8 warps.
  const double terms = static_cast<double>(32 * ceil_div(ceil_div(rows, 32), 8)) + 4 + 17 + 8;
  if (mode.type == at::kFloat && !mode.tf32) return terms * 0x1p-24 * 1.01;  // an FMA and an addition each round once; 1.01: (1 + u)^n
  // Tensor cores cut off: of the 9 numbers that 8 rows add, or the 17 of 16 rows, each loses less than 2^−23 of the largest. tf32 rounds
  // both factors by 2^−11.
  return terms * 0x1p-22 + (mode.type == at::kFloat ? 0x1p-10 + 0x1p-22 : 0.0);
}

/// The element that is furthest off, by its bound, and what it is the sum of.
std::string worst_of(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bound, const at::Tensor& g, const at::Tensor& z) {
  const at::Tensor error = (got - want).abs(), shares = (error / bound).nan_to_num(1e300, 1e300).masked_fill(error <= bound, 0);
  const int64_t channels = want.size(1), i = shares.argmax().item<int64_t>();
  const int64_t column = i / channels, channel = i % channels;
  const auto at = [&](const at::Tensor& x) { return x[column][channel].item<double>(); };
  std::ostringstream text;
  text << std::setprecision(12) << "column " << column << ", channel " << channel << ": got " << at(got) << ", want " << at(want)
       << ", off by " << std::abs(at(got) - at(want)) << ", bound " << at(bound) << "; g times z:";
  constexpr int64_t kShown = 33;
  for (int64_t r = 0; r < std::min(g.size(0), kShown); ++r)
    text << " " << g[r][column].item<double>() << "*" << z[r][channel].item<double>();
  if (g.size(0) > kShown) text << " and " << g.size(0) - kShown << " more";
  return text.str();
}

void expect_product(const Layer& layer, const Gradients& gs, Mode mode) {
  const Tf32 flag(mode.tf32);
  ASSERT_TRUE(fuses_norm_act_product(layer.code, gs));
  const at::Tensor z = layer.input(mode.type).to(at::kDouble);
  const Gradients got = layer.product(gs), again = repeats() ? layer.product(gs) : got;
  ASSERT_EQ(got.size(), gs.size());
  for (size_t i = 0; i < gs.size(); ++i) {
    const at::Tensor g = gs[i].to(at::kDouble), want = g.t().mm(z);
    const at::Tensor bound = size_in_sums(g, mode).t().mm(size_in_sums(z, mode)) * allowed(layer.rows(), mode);
    ASSERT_EQ(got[i].sizes(), want.sizes());
    EXPECT_EQ(got[i].scalar_type(), at::kFloat);
    EXPECT_TRUE(((got[i] - want).abs() <= bound).all().item<bool>())
        << words(mode) << ", gradient " << i << " of " << gs.size() << ", " << worst_of(got[i], want, bound, g, z);
    EXPECT_TRUE(same(got[i], again[i])) << "a second time";
  }
}

TEST_F(Cuda, NormActProductIsThatOfTheDecodedRows) {
  for_layers([](const Layer& layer, int64_t columns) {
    for (const Mode mode : kModes) {
      const at::Tensor a = gaussian(layer.rows(), columns, 67, mode.type), b = gaussian(layer.rows(), columns, 68, mode.type);
      expect_product(layer, {a}, mode);
      expect_product(layer, {a, b}, mode);
    }
  });
}

/// racecheck takes a minute for each, so a few shapes have them, and the others are left to memcheck.
void expect_many_rows(const Shape& shape, Mode mode) {
  SCOPED_TRACE(words(kManyRows, shape));
  const Layer layer(kManyRows, shape.channels, 0.5);
  const at::Tensor a = gaussian(kManyRows, shape.columns, 67, mode.type), b = gaussian(kManyRows, shape.columns, 68, mode.type);
  expect_product(layer, {a, b}, mode);
}

TEST_F(Cuda, NormActProductOfManyRows) {
  for (const Shape& shape : kShapes) {
    for (const Mode mode : kModes) expect_many_rows(shape, mode);
  }
}

TEST_F(Cuda, NormActProductGoesRoundItsBuffers) {
  for (const Shape& shape : {Shape{128, 128}, Shape{47, 104}}) {
    for (const Mode mode : kModes) {
      if (mine()) expect_many_rows(shape, mode);
    }
  }
}

/// A single 1 in every column picks a row of z: zeros add nothing, so what comes out is z itself, whatever the order of the sums.
TEST_F(Cuda, NormActProductPicksRowsToTheBit) {
  for_layers([](const Layer& layer, int64_t columns) {
    const int64_t n = layer.rows();
    for (const Mode mode : kModes) {
      const Tf32 flag(mode.tf32);
      Gradients gs, want;
      for (const int64_t stride : {7919, 104729}) {  // primes: rows all over, the first and the last among them
        at::Tensor every = at::arange(columns, at::kCUDA), rows = (every * stride).remainder(n);
        rows[columns - 1] = n - 1;
        const at::Tensor g = at::zeros({n, columns}, at::kCUDA).index_put_({rows, every}, at::ones({1}, at::kCUDA));
        gs.push_back(g.to(mode.type));
        want.push_back(layer.input(mode.type).to(at::kFloat).index_select(0, rows));
      }
      const Gradients got = layer.product(gs);
      for (size_t i = 0; i < gs.size(); ++i) {
        if (mode.tf32)  // rounded to 11 bits
          EXPECT_TRUE(((got[i] - want[i]).abs() <= want[i].abs() * 0x1p-11).all().item<bool>());
        else if (mode.type == at::kHalf)  // what is too small for it may be −0, which a sum with zeros gives back as 0
          EXPECT_TRUE(same(got[i], want[i] + 0));
        else
          EXPECT_TRUE(same(got[i], want[i]));
      }
    }
  });
}

TEST_F(Cuda, NormActProductTakesRowsAsTheyStand) {
  const Layer layer(1001, 128, 0.5);
  for (const Mode mode : kModes) {
    const Tf32 flag(mode.tf32);
    for (const int64_t columns : {40, 47, 100, 128}) {
      const at::Tensor wide = gaussian(1001, 301, 69, mode.type), even = gaussian(1001, 320, 70, mode.type);
      // Addresses and strides that are no multiples of 16 bytes, that are, that are of 4, one of each, and one row for all.
      for (const Gradients& gs : {Gradients{wide.narrow(1, 3, columns), wide.narrow(1, 5 + columns, columns)},
                                  Gradients{even.narrow(1, 16, columns), even.narrow(1, 32 + 128, columns)},
                                  Gradients{even.narrow(1, 2, columns), even.narrow(1, 150, columns)},
                                  Gradients{even.narrow(1, 0, columns), wide.narrow(1, 1, columns)},
                                  Gradients{even.narrow(0, 7, 1).narrow(1, 0, columns).expand({1001, columns})}}) {
        if (!mine()) continue;
        expect_product(layer, gs, mode);
        Gradients copies;
        for (const at::Tensor& g : gs) copies.push_back(g.contiguous());
        const Gradients got = layer.product(gs), want = layer.product(copies);
        for (size_t i = 0; i < gs.size(); ++i) EXPECT_TRUE(same(got[i], want[i]));
      }
    }
  }
}

TEST_F(Cuda, NormActProductWritesNothingElse) {
  const Layer layer(1001, 104, 0.5);
  const CodecLayout plan = check_packed(layer.code, "test");
  const Place place(layer.code.bytes.device(), "test");
  const int64_t columns = 47, values = columns * 104, guard = 64;
  const at::Tensor g = gaussian(1001, columns, 71);
  for (const bool tf32 : {false, true}) {
    cuda::ProductGradients p;
    p.tf32 = tf32, p.count = 2, p.width = columns;
    std::vector<at::Tensor> lines;
    for (int i = 0; i < 2; ++i) {
      lines.push_back(at::full({values + 2 * guard}, 7, g.options()));
      p.g[i] = g.const_data_ptr(), p.stride[i] = columns, p.out[i] = lines[i].mutable_data_ptr<float>() + guard;
    }
    const int64_t bytes = cuda::norm_act_product_scratch_bytes(plan.side, p);
    const at::Tensor scratch = at::full({bytes + guard}, 7, layer.code.bytes.options());
    cuda::norm_act_product(plan.side, chain_of(layer.code.shape, layer.options), layer.code.bytes.const_data_ptr<uint8_t>(),
                           seed_pointer(layer.seed), p, scratch.mutable_data_ptr(), place.stream());
    EXPECT_TRUE((scratch.narrow(0, bytes, guard) == 7).all().item<bool>());
    const Tf32 flag(tf32);
    const at::Tensor want = layer.product({g, g})[0];
    for (const at::Tensor& line : lines) {
      EXPECT_TRUE(same(line.narrow(0, guard, values).view({columns, 104}), want));
      EXPECT_TRUE((line.narrow(0, 0, guard) == 7).all().item<bool>() && (line.narrow(0, values + guard, guard) == 7).all().item<bool>());
    }
  }
}

TEST_F(Cuda, NormActProductShowsWhatIsNotANumber) {
  at::Tensor h = gaussian(1000, 128, 72);
  h[999][5] = std::numeric_limits<float>::quiet_NaN();  // poisons its block of 256: rows 998 and 999
  const Layer layer(h, {0, 0});
  for (const Mode mode : kModes) {
    const Tf32 flag(mode.tf32);
    const at::Tensor g = gaussian(1000, 40, 73, mode.type);
    EXPECT_TRUE(at::isnan(layer.product({g})[0]).all().item<bool>());
    const at::Tensor holed = g.clone();
    holed[3][7] = std::numeric_limits<float>::infinity();
    const Layer clean(gaussian(1000, 128, 72), {0, 0});
    const at::Tensor lost = at::isfinite(clean.product({holed})[0]).logical_not();
    EXPECT_TRUE(lost[7].all().item<bool>());  // ∞·0 is NaN, ∞·z infinite
    EXPECT_EQ(lost.sum().item<int64_t>(), 128);
  }
}

TEST_F(Cuda, NormActProductSaysWhatDoesNotFit) {
  const Layer layer(300, 128, 0);
  const auto g = [](int64_t rows, int64_t columns) { return at::zeros({rows, columns}, at::kCUDA); };
  EXPECT_TRUE(fuses_norm_act_product(layer.code, {g(300, 256), g(300, 256)}));
  const std::vector<Gradients> wrong = {{},
                                        {at::Tensor()},
                                        {g(300, 257)},
                                        {g(300, 0)},
                                        {g(299, 40)},
                                        {g(300, 40), g(300, 41)},
                                        {g(300, 40), g(300, 40).to(at::kBFloat16)},
                                        {g(300, 40), g(300, 40), g(300, 40)},
                                        {g(300, 40).to(at::kDouble)},
                                        {g(300, 40).cpu()},
                                        {g(40, 300).t()},
                                        {g(300, 40).view({30, 10, 40})}};
  for (size_t i = 0; i < wrong.size(); ++i) {
    EXPECT_FALSE(fuses_norm_act_product(layer.code, wrong[i])) << i;
    EXPECT_ANY_THROW(layer.product(wrong[i])) << i;
  }
  // Tiles of 128 channels, two thirds full at least, eight channels at a time.
  for (const int64_t channels : {8, 32, 64, 80, 100, 136, 168, 520})
    EXPECT_FALSE(fuses_norm_act_product(Layer(300, channels, 0).code, {g(300, 40)})) << channels;
  for (const int64_t channels : {88, 96, 128, 176, 256, 264, 384, 512})
    EXPECT_TRUE(fuses_norm_act_product(Layer(300, channels, 0).code, {g(300, 40)})) << channels;
}

}  // namespace
}  // namespace satchel
