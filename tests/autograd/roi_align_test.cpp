// Parts of maps under boxes, against the definition point by point; the gradient is the transpose of the function.
#include "satchel/autograd/roi_align.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "satchel/autograd/report.h"

namespace satchel {
namespace {

/// The map at a point: a bilinear mix, 0 where it is more than a place outside.
double value_at(const at::Tensor& map, double y, double x) {
  const int64_t height = map.size(0), width = map.size(1);
  if (y < -1 || y > static_cast<double>(height) || x < -1 || x > static_cast<double>(width)) return 0;
  y = std::clamp(y, 0.0, static_cast<double>(height - 1));
  x = std::clamp(x, 0.0, static_cast<double>(width - 1));
  const auto top = static_cast<int64_t>(y), left = static_cast<int64_t>(x);
  const int64_t bottom = std::min(top + 1, height - 1), right = std::min(left + 1, width - 1);
  const double down = y - static_cast<double>(top), across = x - static_cast<double>(left);
  const auto at = [&](int64_t i, int64_t j) { return map[i][j].item<double>(); };
  return (1 - down) * ((1 - across) * at(top, left) + across * at(top, right)) +
         down * ((1 - across) * at(bottom, left) + across * at(bottom, right));
}

TEST(RoiAlign, IsTheMeanOfPointsAndItsGradientTheTranspose) {
  at::manual_seed(1);
  const at::Tensor map = at::randn({2, 3, 6, 8}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  at::Tensor corner = at::rand({5, 2}) * 40 - 8;
  at::Tensor boxes = at::cat({corner, corner + at::rand({5, 2}) * 30}, 1);
  boxes[0] = at::tensor({-60.F, -60.F, -50.F, -50.F});  // outside
  boxes[1] = at::tensor({3.F, 3.F, 3.2F, 3.1F});        // smaller than a place
  const at::Tensor image = at::tensor({0, 1, 1, 0, 1}, at::kLong);
  RoiAlignOptions o;
  o.scale = 0.25;
  o.size = 3;
  const at::Tensor out = roi_align(map, boxes, image, o);
  ASSERT_EQ(out.sizes(), (std::vector<int64_t>{5, 3, 3, 3}));
  for (int64_t r = 0; r < 5; ++r) {
    const auto side = [&](int64_t i) { return boxes[r][i].item<double>() * o.scale; };
    const double height = std::max(side(3) - side(1), 1.0) / 3, width = std::max(side(2) - side(0), 1.0) / 3;
    for (int64_t c = 0; c < 3; ++c) {
      for (int64_t i = 0; i < 9; ++i) {
        double sum = 0;
        for (int p = 0; p < 4; ++p) {
          const double y = side(1) + height * (static_cast<double>(i / 3) + (p / 2 + 0.5) / 2);
          const double x = side(0) + width * (static_cast<double>(i % 3) + (p % 2 + 0.5) / 2);
          sum += value_at(map[image[r].item<int64_t>()][c].detach(), y, x) / 4;
        }
        EXPECT_NEAR(out[r][c][i / 3][i % 3].item<double>(), sum, 1e-4) << r << ' ' << c << ' ' << i;
      }
    }
  }
  // Linear: Σ g·f(x) = Σ x·fᵀ(g).
  const at::Tensor g = at::randn_like(out);
  out.backward(g);
  EXPECT_NEAR((g * out).sum().item<double>(), (map * map.grad()).sum().item<double>(), 1e-3);
  // … for one map at a time, so that no place of the transpose is another's.
  const at::Tensor other = at::randn_like(map);
  EXPECT_NEAR((g * roi_align(other, boxes, image, o)).sum().item<double>(), (other * map.grad()).sum().item<double>(), 1e-3);
}

TEST(RoiAlign, KeepsTheBoxesAlone) {
  const at::Tensor map = at::randn({1, 4, 5, 5}).requires_grad_();
  const at::Tensor boxes = at::tensor({0.F, 0.F, 4.F, 4.F}).view({1, 4}), image = at::zeros({1}, at::kLong);
  const std::vector<SavedTensor> lines = saved_tensors(roi_align(map, boxes, image, {}));
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].bytes, 4 * 4 + 8);
  EXPECT_EQ(roi_align(map, at::zeros({0, 4}), at::zeros({0}, at::kLong), {}).size(0), 0);
}

}  // namespace
}  // namespace satchel
