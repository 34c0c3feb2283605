// Losses of detectors against their formulas, value by value in float64.
#include "satchel/autograd/box_loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <vector>

#include "satchel/autograd/report.h"
#include "tests/torch_support.h"

namespace satchel {
namespace {

constexpr int64_t kImages = 2, kBoxes = 2, kClasses = 3;

/// Two levels of 2×3 and 1×2 places.
std::vector<at::Tensor> maps_of(int64_t values) {
  std::vector<at::Tensor> maps;
  for (const auto& [height, width] : {std::pair{2, 3}, {1, 2}})
    maps.push_back((at::randn({kImages, kBoxes * values, height, width}) * 2).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_());
  return maps;
}

constexpr int64_t kAnchors = kBoxes * (2 * 3 + 1 * 2);

AnchorTargets targets() {
  AnchorTargets t;
  t.labels = at::randint(-2, kClasses, {kImages, kAnchors}, at::kLong);
  t.labels[0][0] = 1;
  t.labels[1][3] = AnchorTargets::ignored;
  t.labels[1][4] = AnchorTargets::background;
  t.boxes = at::randn({kImages, kAnchors, 4});
  t.weights = at::tensor({0.25F, 0.5F});
  return t;
}

/// The number of a map for value v of anchor a of an image: levels, rows, columns, boxes of a place.
double number(const std::vector<at::Tensor>& maps, int64_t image, int64_t anchor, int64_t v, int64_t values) {
  for (const at::Tensor& map : maps) {
    const int64_t width = map.size(3), count = map.size(2) * width * kBoxes;
    if (anchor >= count) {
      anchor -= count;
      continue;
    }
    const int64_t place = anchor / kBoxes;
    return map[image][anchor % kBoxes * values + v][place / width][place % width].item<double>();
  }
  return 0;
}

double focal(double x, bool right) {
  const double p = 1 / (1 + std::exp(-x));
  return right ? -0.25 * (1 - p) * (1 - p) * std::log(p) : -0.75 * p * p * std::log(1 - p);
}

double expected_focal(const std::vector<at::Tensor>& maps, const AnchorTargets& t) {
  double sum = 0;
  for (int64_t n = 0; n < kImages; ++n) {
    for (int64_t a = 0; a < kAnchors; ++a) {
      const auto label = t.labels[n][a].item<int64_t>();
      for (int64_t c = 0; label != AnchorTargets::ignored && c < kClasses; ++c)
        sum += t.weights[n].item<double>() * focal(number(maps, n, a, c, kClasses), c == label);
    }
  }
  return sum;
}

double expected_boxes(const std::vector<at::Tensor>& maps, const AnchorTargets& t, double beta) {
  double sum = 0;
  for (int64_t n = 0; n < kImages; ++n) {
    for (int64_t a = 0; a < kAnchors; ++a) {
      for (int64_t v = 0; t.labels[n][a].item<int64_t>() >= 0 && v < 4; ++v) {
        const double d = std::abs(number(maps, n, a, v, 4) - t.boxes[n][a][v].item<double>());
        sum += t.weights[n].item<double>() * (d < beta ? d * d / (2 * beta) : d - beta / 2);
      }
    }
  }
  return sum;
}

/// Computed maps, since a loss may write over them.
std::vector<at::Tensor> computed(const std::vector<at::Tensor>& maps) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& map : maps) made.push_back(map * 1);
  return made;
}

/// The derivative of `loss` by a few numbers, by differences of float64; float32's rounding is below 1e-5 of them.
template <class Loss>
void expect_gradients(const std::vector<at::Tensor>& maps, const Loss& loss) {
  for (const at::Tensor& map : maps) {
    for (const int64_t i : {int64_t{0}, map.numel() / 2, map.numel() - 1}) {
      const at::Tensor flat = map.detach().permute({0, 2, 3, 1}).reshape(-1);
      const auto shifted = [&](float by) {
        const at::NoGradGuard guard;
        map.detach().permute({0, 2, 3, 1}).view(-1)[i] += by;
        const double value = loss();
        map.detach().permute({0, 2, 3, 1}).view(-1)[i] -= by;
        return value;
      };
      constexpr float kStep = 1.0F / 512;  // a power of two: the shift is exact where values are below 2^12
      const double slope = (shifted(kStep) - shifted(-kStep)) / (2 * kStep);
      EXPECT_NEAR(map.grad().permute({0, 2, 3, 1}).reshape(-1)[i].item<double>(), slope, 1e-3);
    }
  }
}

TEST(BoxLoss, FocalLossAndItsGradientAreTheFormulas) {
  at::manual_seed(1);
  const AnchorTargets t = targets();
  for (const char* method : {"fp32", "satchel"}) {
    const std::vector<at::Tensor> maps = maps_of(kClasses);
    const at::Tensor loss = focal_loss_(computed(maps), kClasses, t, {}, test::saving_of(method));
    EXPECT_NEAR(loss.item<double>(), expected_focal(maps, t), 1e-5) << method;
    (loss * 3).backward();
    for (const at::Tensor& map : maps) map.mutable_grad() = map.grad() / 3;
    expect_gradients(maps, [&] { return expected_focal(maps, t); });
  }
}

TEST(BoxLoss, BoxLossAndItsGradientAreTheFormulas) {
  at::manual_seed(2);
  const AnchorTargets t = targets();
  for (const char* method : {"fp32", "satchel"}) {
    for (const double beta : {0.0, 1.0 / 9, 1.0}) {
      const std::vector<at::Tensor> maps = maps_of(4);
      const at::Tensor loss = box_loss_(computed(maps), t, beta, test::saving_of(method));
      EXPECT_NEAR(loss.item<double>(), expected_boxes(maps, t, beta), 1e-4) << method;
      loss.backward();
      expect_gradients(maps, [&] { return expected_boxes(maps, t, beta); });
    }
  }
}

/// Large logits of both signs: no infinity, no NaN.
TEST(BoxLoss, FocalLossStandsLargeLogits) {
  const at::Tensor map = at::tensor({200.0F, -200.0F, 90.0F, -90.0F}).view({1, 4, 1, 1}).requires_grad_();
  AnchorTargets t{at::tensor({1}, at::kLong).view({1, 1}), at::zeros({1, 1, 4}), at::ones({1})};
  const at::Tensor loss = focal_loss_({map * 1}, 4, t, {}, test::saving_of("satchel"));
  loss.backward();
  EXPECT_TRUE(std::isfinite(loss.item<double>()));
  EXPECT_TRUE(map.grad().isfinite().all().item<bool>());
  EXPECT_NEAR(loss.item<double>(), 0.75 * 200 + 0.25 * 200 + 0.75 * 90, 1e-3);
}

/// The gradients stand in the maps' own memory; a second backward that keeps the graph gives the same.
TEST(BoxLoss, KeepsTheMapsGradientsOnce) {
  at::manual_seed(3);
  const AnchorTargets t = targets();
  const std::vector<at::Tensor> maps = maps_of(kClasses), made = computed(maps);
  const void* memory = made[0].data_ptr();
  const at::Tensor loss = focal_loss_(made, kClasses, t, {}, test::saving_of("satchel"));
  const std::vector<SavedTensor> lines = packed_tensors(loss);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(total_bytes(lines), static_cast<int64_t>(maps[0].nbytes() + maps[1].nbytes()));
  const auto twice = torch::autograd::grad({loss}, {made[0]}, {}, /*retain_graph=*/true);
  const auto once = torch::autograd::grad({loss}, {made[0]});
  EXPECT_TRUE(at::equal(twice[0], once[0]));
  EXPECT_EQ(once[0].data_ptr(), memory);
}

}  // namespace
}  // namespace satchel
