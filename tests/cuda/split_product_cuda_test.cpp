// Products of float32 matrices on tensor cores: within fp32's rounding of float64 for all sizes and addresses, the same bits every time.
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "satchel/tensor/split_product.h"
#include "split_common.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// A matrix inside a line of values: rows stand `more` values further apart than they are long, from value `first` on.
struct Layout {
  int64_t more, first;

  at::Tensor of(const at::Tensor& line, int64_t rows, int64_t columns) const {
    return line.as_strided({rows, columns}, {columns + more, 1}, first);
  }
};

bool none_is_finite(const at::Tensor& t) { return !at::isfinite(t).any().item<bool>(); }

at::Tensor gradient_of(const at::Tensor& g, const at::Tensor& x) {
  const at::Tensor sums = at::full({g.size(1), x.size(1)}, 7.0, x.options());
  split_gradient_(sums, g.t(), x, /*add=*/false);
  return sums;
}

TEST_F(SplitProduct, RowsAreRightWithinRounding) {
  const Tensors lines{normal({5000 * 310}, 1).cuda(), normal({5000 * 310}, 2).cuda()};
  const Tensors weights{normal({300 * 256}, 3).cuda(), normal({300 * 256}, 4).cuda()};
  const at::Tensor biases = normal({256}, 5).cuda();
  const Layout inputs[] = {{0, 0}, {8, 4}, {5, 0}, {0, 1}}, results[] = {{0, 0}, {6, 2}, {5, 1}};  // 16-byte accesses serve, or not
  std::minstd_rand pick(6);
  for (const int64_t rows : {2048, 2049, 5000}) {
    for (const std::vector<int64_t>& depths : std::vector<std::vector<int64_t>>{{48}, {64}, {37, 50}, {256, 256}, {40, 40}, {300}}) {
      for (const int64_t columns : {48, 64, 80, 83, 128, 130, 256}) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(depths[0]) + "… to " + std::to_string(columns));
        Tensors x, w;
        for (size_t i = 0; i < depths.size(); ++i) {
          x.push_back(inputs[pick() % 4].of(lines[i], rows, depths[i]));
          const bool by_column = pick() % 2 == 0;
          w.push_back(by_column ? Layout{0, 0}.of(weights[i], columns, depths[i]).t() : Layout{0, 0}.of(weights[i], depths[i], columns));
        }
        const at::Tensor bias = pick() % 2 == 0 ? biases.narrow(0, 0, columns) : at::Tensor();
        const Layout result = results[pick() % 3];
        if (!mine()) continue;
        const at::Tensor line = at::full({rows * (columns + result.more) + 8}, 7.0, at::kCUDA);
        at::Tensor to = result.of(line, rows, columns);
        const RowProduct product(w, bias, rows);
        ASSERT_TRUE(product.is_split());
        product.write(to, x);
        EXPECT_LE(Exact(x, w, bias).over(to, share_of(w)), 1);
        if (repeats()) {
          EXPECT_TRUE(same(product(x), to.contiguous())) << "in memory of its own";
        }
        to.fill_(7);
        EXPECT_TRUE((line == 7).all().item<bool>()) << "what stands around the result";
      }
    }
  }
}

TEST_F(SplitProduct, RowsDoNotDependOnTheOthers) {
  for (const int64_t columns : {80, 130}) {
    const Tensors w{normal({100, columns}, 11).cuda(), normal({columns, 60}, 12).cuda().t()};
    const at::Tensor x = normal({5000, 100}, 13).cuda(), y = normal({5000, 60}, 14).cuda();
    const RowProduct product(w, normal({columns}, 15).cuda(), 5000);
    const at::Tensor whole = product({x, y});
    for (const int64_t step : {128, 999, 2048, 4999}) {
      const at::Tensor parts = at::full({5000, columns}, 7.0, at::kCUDA);
      for (int64_t first = 0; first < 5000; first += step) {
        const int64_t some = std::min<int64_t>(step, 5000 - first);
        at::Tensor to = parts.narrow(0, first, some);
        product.write(to, {x.narrow(0, first, some), y.narrow(0, first, some)});
      }
      EXPECT_TRUE(same(parts, whole)) << columns << " columns, " << step << " rows at a time";
    }
  }
}

TEST_F(SplitProduct, GradientsAreRightWithinRounding) {
  const at::Tensor gs = normal({20000 * 261}, 21).cuda(), xs = normal({20000 * 261}, 22).cuda();
  const Layout layouts[] = {{0, 0}, {4, 4}, {5, 0}, {0, 1}};
  std::minstd_rand pick(23);
  for (const int64_t rows : {2048, 2050, 20000}) {
    for (const int64_t g_columns : {48, 128, 130, 256}) {
      for (const int64_t x_columns : {48, 100, 128, 256}) {
        SCOPED_TRACE(std::to_string(g_columns) + " x " + std::to_string(rows) + " to " + std::to_string(x_columns));
        const at::Tensor g = layouts[pick() % 4].of(gs, rows, g_columns), x = layouts[pick() % 4].of(xs, rows, x_columns);
        if (!mine()) continue;
        const double share = gradient_share(rows, g_columns, x_columns);
        ASSERT_TRUE(splits_gradient(g.t(), x));
        const at::Tensor sums = gradient_of(g, x);
        EXPECT_LE(Exact({g.t()}, {x}).over(sums, share), 1);
        if (repeats()) {
          EXPECT_TRUE(same(gradient_of(g, x), sums)) << "a second time";
        }
        const at::Tensor before = normal({g_columns, x_columns}, 24).cuda(), added = before.clone();
        split_gradient_(added, g.t(), x, /*add=*/true);
        EXPECT_TRUE(same(added, before + sums)) << "one more rounding";
      }
    }
  }
}

/// A grid has at most 65,535 rows. Matrices that wide and as tall as the tensor functions want would not fit: the kernels are called.
TEST_F(SplitProduct, GradientsMayHaveMoreTilesThanAGridHasRows) {
  constexpr int64_t kRows = 3, kColumns = int64_t{65536} * 128 + 5;
  const at::Tensor g = normal({kRows, kColumns}, 25).cuda(), x = normal({kRows, 1}, 26).cuda(),
                   sums = at::full({kColumns, 1}, 7.0, at::kCUDA);
  const cuda::TallPair pair{kRows, g.const_data_ptr<float>(), x.const_data_ptr<float>(), kColumns, 1, kColumns, 1};
  const at::Tensor scratch = at::empty({cuda::split_gradient_scratch_bytes(pair)}, at::TensorOptions(at::kCUDA).dtype(at::kByte));
  cuda::split_gradient(pair, /*add=*/false, sums.mutable_data_ptr<float>(), scratch.mutable_data_ptr(),
                       c10::cuda::getCurrentCUDAStream().stream());
  EXPECT_LE(Exact({g.t()}, {x}).over(sums, gradient_share(kRows, kColumns, 1)), 1);
}

/// 2^e for e from −most to most, over and over.
at::Tensor powers(int64_t count, int64_t most) {
  return at::exp2((at::arange(count, at::kDouble) * 7).remainder(2 * most + 1) - most).to(at::kFloat).cuda();
}

TEST_F(SplitProduct, EveryRowAndColumnHasItsOwnScale) {
  const at::Tensor x = normal({3000, 100}, 31).cuda(), w = normal({100, 128}, 32).cuda();
  // 2^±115 in all: products and their scales stay within float32's range.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{90, 25}, {25, 90}}) {
    const Tensors xs{x * powers(3000, rows).unsqueeze(1)}, ws{w * powers(128, columns)};
    EXPECT_LE(Exact(xs, ws).over(RowProduct(ws, {}, 3000)(xs), share_of(ws)), 1) << rows;
    const at::Tensor g = x * powers(100, rows), other = normal({3000, 128}, 33).cuda() * powers(128, columns);
    EXPECT_LE(Exact({g.t()}, {other}).over(gradient_of(g, other), gradient_share(3000, 100, 128)), 1) << rows;
  }
}

TEST_F(SplitProduct, FactorsDoNotShareTheirScale) {
  const Tensors x{normal({3000, 64}, 81).cuda(), normal({3000, 64}, 82).cuda()};
  const Tensors w{normal({64, 128}, 83).cuda(), normal({64, 128}, 84).cuda() * 1e-8};
  const Tensors alone{at::zeros_like(x[0]), x[1]};  // as a node without neighbours has it
  EXPECT_LE(Exact(alone, w).over(RowProduct(w, {}, 3000)(alone), share_of(w)), 1);
}

TEST_F(SplitProduct, SmallValuesBesideLargeOnesLoseAPartOfTheLargest) {
  at::Tensor x = normal({3000, 64}, 85).cuda(), w = normal({64, 128}, 86).cuda();
  x.select(1, 5).mul_(1e8);
  w.select(0, 5).zero_();
  const Exact exact({x}, {w});
  // f16's end: 2^−39 of the largest of a group of 32, times the others' sizes, both ways.
  const at::Tensor xs = x.abs().to(at::kDouble).view({3000, 2, 32}), ws = w.abs().to(at::kDouble).view({2, 32, 128});
  const at::Tensor floor = 0x1p-39 * (xs.amax(2).mm(ws.sum(1)) + xs.sum(2).mm(ws.amax(1)));
  const at::Tensor error = (RowProduct({w}, {}, 3000)({x}).to(at::kDouble) - exact.value).abs();
  EXPECT_LE((error / (exact.sizes * share_of(Tensors{w}) + floor)).max().item<double>(), 1);
}

TEST_F(SplitProduct, ManyTilesOfColumns) {  // more than half of an H200's multiprocessors, and more than all
  const at::Tensor x = normal({2100, 64}, 87).cuda();
  for (const int64_t columns : {9000, 17000}) {
    const at::Tensor w = normal({columns, 64}, 88).cuda().t();
    EXPECT_LE(Exact({x}, {w}).over(RowProduct({w}, {}, 2100)({x}), share_of(Tensors{w})), 1) << columns;
  }
}

TEST_F(SplitProduct, ZerosGiveZeros) {
  at::Tensor x = normal({3000, 100}, 34).cuda(), w = normal({100, 128}, 35).cuda();
  x.narrow(0, 1000, 200).zero_();
  w.narrow(1, 50, 30).zero_();
  const at::Tensor got = RowProduct({w}, {}, 3000)({x});
  EXPECT_TRUE((got.narrow(0, 1000, 200) == 0).all().item<bool>());
  EXPECT_TRUE((got.narrow(1, 50, 30) == 0).all().item<bool>());
  EXPECT_TRUE((RowProduct({at::zeros_like(w)}, {}, 3000)({x}) == 0).all().item<bool>());
  EXPECT_TRUE((gradient_of(at::zeros_like(x), x) == 0).all().item<bool>());
}

TEST_F(SplitProduct, WhatIsNotANumberStaysInItsRow) {
  const at::Tensor x = normal({3000, 100}, 36).cuda(), w = normal({100, 128}, 37).cuda(), y = normal({3000, 128}, 38).cuda();
  const at::Tensor clean = RowProduct({w}, {}, 3000)({x}), clean_sums = gradient_of(x, y);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const int64_t row : {0, 1717, 2999}) {
      // The other rows and columns are those of clean numbers, bit for bit.
      const auto expect_only = [&](at::Tensor got, at::Tensor want, int64_t dim, int64_t at) {
        EXPECT_TRUE(none_is_finite(got.select(dim, at))) << bad << " in row " << row;
        got.select(dim, at).zero_();
        want = want.clone();
        want.select(dim, at).zero_();
        EXPECT_TRUE(same(got, want)) << bad << " in row " << row;
      };
      at::Tensor spoilt = x.clone(), weights = w.clone(), other = y.clone();
      spoilt[row][99] = bad;
      weights[row % 100][77] = bad;
      other[row][127] = bad;
      expect_only(RowProduct({w}, {}, 3000)({spoilt}), clean, 0, row);
      expect_only(RowProduct({weights}, {}, 3000)({x}), clean, 1, 77);
      expect_only(gradient_of(spoilt, y), clean_sums, 0, 99);
      expect_only(gradient_of(x, other), clean_sums, 1, 127);
    }
  }
}

TEST_F(SplitProduct, ResultsStandWhereRowsStood) {
  struct Case {
    int64_t rows, depth, columns, gap;
  };
  for (const Case& c : {Case{2048, 64, 64, 0}, {20001, 128, 128, 0}, {20001, 72, 72, 8}, {2500, 83, 83, 5}, {2500, 100, 64, 0}}) {
    if (!mine()) continue;
    const Layout gaps{c.gap, 0};
    const auto matrix = [&](uint64_t seed) { return gaps.of(normal({c.rows * (c.depth + c.gap)}, seed).cuda(), c.rows, c.depth); };
    const auto weight = [&](uint64_t seed) { return normal({c.depth, c.columns}, seed).cuda(); };
    const Tensors x{matrix(61), matrix(62)}, w{weight(63), weight(64)};
    const RowProduct two(w, normal({c.columns}, 65).cuda(), c.rows), one({w[0]}, {}, c.rows);
    ASSERT_TRUE(two.writes_in_place() && one.writes_in_place());
    const auto over = [&](const RowProduct& product, Tensors rows, size_t i) {
      rows[i] = at::empty_strided(rows[i].sizes(), rows[i].strides(), rows[i].options()).copy_(rows[i]);
      at::Tensor to = rows[i].narrow(1, 0, c.columns);
      product.write(to, rows);
      return to.contiguous();
    };
    const std::string what = std::to_string(c.rows) + " x " + std::to_string(c.depth) + " to " + std::to_string(c.columns);
    const at::Tensor of_two = two(x), of_one = one({x[0]});
    EXPECT_TRUE(same(over(two, x, 0), of_two)) << what;
    EXPECT_TRUE(same(over(two, x, 1), of_two)) << what;
    EXPECT_TRUE(same(over(one, {x[0]}, 0), of_one)) << what;
  }
  const at::Tensor wide = normal({3000, 136}, 66).cuda();
  const RowProduct product({normal({136, 136}, 67).cuda()}, {}, 3000);
  EXPECT_TRUE(product.is_split() && !product.writes_in_place());
  at::Tensor to = wide.clone();
  reference::expect_error([&] { product.write(to, {to}); }, "[split_product] rows must not be written over");
  EXPECT_TRUE(same(to, wide));
}

TEST_F(SplitProduct, LongSumsAreNotCutOff) {
  const at::Tensor g = normal({169343, 128}, 41).cuda().abs_(), x = normal({169343, 128}, 42).cuda().abs_();
  const Exact exact({g.t()}, {x});
  const at::Tensor sums = gradient_of(g, x);
  // Every term is above zero, so cutting off would add up. −8e-8 was measured.
  EXPECT_LT(std::abs(exact.bias(sums)), 0x1p-22);
  EXPECT_LT(exact.frobenius(sums), 0x1p-22);
  EXPECT_LE(exact.frobenius(sums), exact.frobenius(at::mm(g.t(), x)));
}

/// Torch's product, to the bit.
void expect_torchs_own(const Tensors& x, const Tensors& w, const at::Tensor& bias, const char* why) {
  const RowProduct product(w, bias, x[0].size(0));
  EXPECT_FALSE(product.is_split()) << why;
  at::Tensor own = at::empty({x[0].size(0), w[0].size(1)}, x[0].options());
  bias.defined() ? at::addmm_out(own, bias, x[0], w[0]) : at::mm_out(own, x[0], w[0]);
  if (x.size() == 2) own.addmm_(x[1], w[1]);
  EXPECT_TRUE(same(product(x), own)) << why;
}

TEST_F(Cuda, SplitProductsLeaveTheRestToTorch) {
  const Tf32 off(false);
  const at::Tensor x = normal({3000, 100}, 51).cuda(), w = normal({100, 80}, 52).cuda(), bias = normal({80}, 53).cuda();
  const auto half = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor few_rows = x.narrow(0, 0, 2047), narrow = w.narrow(1, 0, 47), shallow = w.narrow(0, 0, 47);
  {
    const Tf32 on(true);
    expect_torchs_own({x, x}, {w, w}, bias, "TF32");
    EXPECT_FALSE(splits_gradient(x.t(), x)) << "TF32";
  }
  expect_torchs_own({half(x), half(x)}, {half(w), half(w)}, half(bias), "bfloat16");
  expect_torchs_own({x.cpu(), x.cpu()}, {w.cpu(), w.cpu()}, bias.cpu(), "CPU");
  expect_torchs_own({few_rows}, {w}, {}, "few rows");
  expect_torchs_own({x}, {narrow}, bias.narrow(0, 0, 47), "few columns");
  expect_torchs_own({x.narrow(1, 0, 47)}, {shallow}, {}, "little depth");
  EXPECT_FALSE(splits_gradient(half(x).t(), half(x))) << "bfloat16";
  EXPECT_FALSE(splits_gradient(x.cpu().t(), x.cpu())) << "CPU";
  EXPECT_FALSE(splits_gradient(few_rows.t(), few_rows)) << "few rows";
  EXPECT_FALSE(splits_gradient(x.narrow(1, 0, 47).t(), x)) << "few columns";
  EXPECT_FALSE(splits_gradient(x.t().contiguous(), x)) << "no transpose";
  EXPECT_FALSE(splits_gradient(x.t(), x.t().contiguous().t())) << "rows that are no pieces";
  reference::expect_error([&] { gradient_of(few_rows, few_rows); }, "[split_product] splits_gradient must be true");
  reference::expect_error([&] { RowProduct({}, {}, 3000); }, "[split_product] there must be one or two factors");
  reference::expect_error([&] { RowProduct({w}, {}, 3000)({x.narrow(1, 0, 99)}); },
                          "[split_product] rows must have their factor's type and device and be as long");
}

}  // namespace
}  // namespace satchel
