// Max-pool with packed offsets: torch's values and gradients, and the bytes of narrow() of the same offsets.
#include <limits>
#include <string>
#include <tuple>

#include "cuda_fixture.h"
#include "satchel/tensor/pool.h"

namespace satchel {
namespace {

using reference::same;

const MaxPoolWindow kWindows[] = {
    {{3, 3}, {2, 2}, {1, 1}},                // ResNet's
    {{2, 2}, {2, 2}},                        // VGG's
    {{2, 2}, {2, 2}, {0, 0}, {1, 1}, true},  // hangs over
    {{1, 1}, {1, 1}},                        // no bits at all
    {{1, 1}, {2, 2}},                        // leaves values out
    {{3, 2}, {1, 3}, {1, 0}, {1, 1}, true},  // six places in 3 bits, rows and columns differ
    {{3, 3}, {1, 1}, {1, 1}},                // every value in nine windows
    {{3, 3}, {2, 2}, {1, 1}, {2, 2}, true},  // dilated
    {{2, 3}, {2, 1}, {1, 1}, {3, 2}},        // dilated by different numbers
    {{16, 16}, {4, 4}, {8, 8}},              // 256 places: 8 bits
    {{5, 5}, {5, 5}, {2, 2}, {1, 1}, true},  // 25 places in 5 bits
    {{1, 5}, {1, 2}, {0, 2}},                // one dimension only
};

std::string trace(const at::Tensor& x, const MaxPoolWindow& w) {
  std::string text = std::string(c10::toString(x.scalar_type())) + " kernel " + std::to_string(w.kernel[0]) + "x" +
                     std::to_string(w.kernel[1]) + " stride " + std::to_string(w.stride[0]) + " maps";
  for (const int64_t size : x.sizes()) text += " " + std::to_string(size);
  return text;
}

/// Many equal values, so that ties are common; multiples of ½, so that every type holds them and their sums.
at::Tensor maps(at::IntArrayRef sizes, at::ScalarType type) { return (at::randint(-6, 7, sizes, at::kFloat) * 0.5).to(type).cuda(); }

std::tuple<at::Tensor, at::Tensor> torch_pool(const at::Tensor& x, const MaxPoolWindow& w) {
  return at::max_pool2d_with_indices(x.contiguous(), w.kernel, w.stride, w.padding, w.dilation, w.ceil_mode);
}

/// torch's index of the maximum as its place in the window, in the order of channels_last memory.
at::Tensor offsets_of(const at::Tensor& indices, int64_t width, const MaxPoolWindow& w) {
  const auto along = [&](int64_t d, const at::Tensor& at) {
    const size_t s = static_cast<size_t>(d - 2);
    const at::Tensor first = at::arange(indices.size(d), indices.options()) * w.stride[s] - w.padding[s];
    return at::floor_divide(at - (d == 2 ? first.view({-1, 1}) : first), w.dilation[s]);
  };
  const at::Tensor rows = along(2, at::floor_divide(indices, width)), columns = along(3, at::remainder(indices, width));
  return (rows * w.kernel[1] + columns).permute({0, 2, 3, 1}).contiguous();
}

void expect_torch(const at::Tensor& x, const MaxPoolWindow& w) {
  SCOPED_TRACE(trace(x, w));
  const auto [want, indices] = torch_pool(x, w);
  ASSERT_TRUE(fuses_max_pool(x, w));
  const MaxPoolResult got = max_pool_encode(x, w);
  EXPECT_TRUE(got.y.is_contiguous(at::MemoryFormat::ChannelsLast));
  ASSERT_EQ(got.y.sizes(), want.sizes());
  EXPECT_TRUE(same(got.y.contiguous(), want));
  EXPECT_TRUE(same(got.offsets, narrow(offsets_of(indices, x.size(3), w), 0, w.places() - 1).bytes));

  const at::Tensor g = maps(want.sizes(), x.scalar_type());
  const at::Tensor dx = max_pool_back(g, got.offsets, x.sizes(), w);
  EXPECT_TRUE(dx.is_contiguous(at::MemoryFormat::ChannelsLast));
  // A value is in 16 windows at most: sums are multiples of ½ up to 48, which every type holds.
  const at::Tensor expected = at::max_pool2d_with_indices_backward(g.to(at::kFloat), x.to(at::kFloat), w.kernel, w.stride, w.padding,
                                                                   w.dilation, w.ceil_mode, indices);
  EXPECT_TRUE(same(dx.to(at::kFloat).contiguous(), expected));
  EXPECT_TRUE(same(max_pool_back(g, got.offsets, x.sizes(), w), dx)) << "a second time";
}

TEST_F(Cuda, MaxPoolIsTorchs) {
  for (const at::ScalarType type : kTypes) {
    for (const MaxPoolWindow& window : kWindows) {
      for (const int64_t channels : {1, 5, 8, 64}) {
        for (const auto& [height, width] : {std::pair<int64_t, int64_t>{7, 7}, {8, 6}, {33, 20}, {56, 56}}) {
          if (!mine()) continue;
          at::manual_seed(41);  // the same maps, whichever cases came before
          const at::Tensor x = maps({2, channels, height, width}, type);
          expect_torch(x.contiguous(at::MemoryFormat::ChannelsLast), window);
        }
      }
    }
  }
}

TEST_F(Cuda, MaxPoolTakesAnyStridesAndAddresses) {
  at::manual_seed(42);
  const at::Tensor x = maps({3, 16, 20, 12}, at::kFloat);
  expect_torch(x, kWindows[0]);
  expect_torch(x.transpose(2, 3), kWindows[0]);
  expect_torch(x.slice(3, 1), kWindows[0]);
  const at::Tensor line = at::empty({x.numel() + 1}, x.options());  // channels_last from an odd address on
  const at::Tensor odd = line.narrow(0, 1, x.numel()).view({3, 20, 12, 16}).permute({0, 3, 1, 2});
  odd.copy_(x);
  expect_torch(odd, kWindows[0]);
}

TEST_F(Cuda, MaxPoolOfWhatIsNotFinite) {
  at::manual_seed(43);
  for (const MaxPoolWindow& window : {kWindows[0], kWindows[1], kWindows[6]}) {
    at::Tensor x = maps({2, 24, 15, 13}, at::kFloat);
    const at::Tensor chance = at::rand_like(x);
    x.masked_fill_(chance < 0.1, std::numeric_limits<double>::quiet_NaN());
    x.masked_fill_(chance > 0.9, std::numeric_limits<double>::infinity());
    x.masked_fill_((chance > 0.5).logical_and(chance < 0.9), -std::numeric_limits<double>::infinity());
    const auto [want, indices] = torch_pool(x, window);
    const MaxPoolResult got = max_pool_encode(x, window);
    EXPECT_TRUE(same(at::nan_to_num(got.y).contiguous(), at::nan_to_num(want)));
    EXPECT_TRUE(same(at::isnan(got.y).contiguous(), at::isnan(want)));
    EXPECT_TRUE(same(got.offsets, narrow(offsets_of(indices, x.size(3), window), 0, window.places() - 1).bytes));
  }
}

TEST_F(Cuda, MaxPoolFitsOrSaysSo) {
  const at::Tensor x = maps({2, 8, 20, 20}, at::kFloat);
  EXPECT_TRUE(fuses_max_pool(x, kWindows[0]));
  EXPECT_FALSE(fuses_max_pool(x, {{17, 16}, {1, 1}})) << "272 places";
  EXPECT_FALSE(fuses_max_pool(x, {{21, 1}, {1, 1}})) << "no window";
  EXPECT_FALSE(fuses_max_pool(x.cpu(), kWindows[0]));
  EXPECT_FALSE(fuses_max_pool(x[0], kWindows[0]));
  EXPECT_FALSE(fuses_max_pool(x.to(at::kDouble), kWindows[0]));
  EXPECT_FALSE(fuses_max_pool(x.narrow(0, 0, 0), kWindows[0]));
  const MaxPoolResult got = max_pool_encode(x, kWindows[0]);
  reference::expect_error([&] { max_pool_back(x, got.offsets, x.sizes(), kWindows[0]); },
                          "[max_pool] the gradient must have the output's sizes");
  EXPECT_EQ(got.offsets.numel(), 2 * 8 * 10 * 10 * 4 / 8);
}

}  // namespace
}  // namespace satchel
