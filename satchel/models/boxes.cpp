#include "satchel/models/boxes.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/meshgrid.h>
#include <ATen/ops/min.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "satchel/core/error.h"

namespace satchel {
namespace {

const double kMostGrowth = std::log(1000.0 / 16);

struct Centres {
  at::Tensor width, height, x, y;
};

Centres centres_of(const at::Tensor& boxes) {
  const at::Tensor width = boxes.select(1, 2) - boxes.select(1, 0), height = boxes.select(1, 3) - boxes.select(1, 1);
  return {width, height, boxes.select(1, 0) + 0.5 * width, boxes.select(1, 1) + 0.5 * height};
}

void check_boxes(const at::Tensor& boxes, const char* op) {
  if (!boxes.defined() || boxes.dim() != 2 || boxes.size(1) != 4)
    fail(op, "boxes must be rows of 4", boxes.defined() ? boxes.sizes() : at::IntArrayRef());
}

float overlap_of(const float* a, const float* b) {
  const float width = std::min(a[2], b[2]) - std::max(a[0], b[0]), height = std::min(a[3], b[3]) - std::max(a[1], b[1]);
  if (width <= 0 || height <= 0) return 0;
  const float both = width * height, all = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both;
  return both / all;
}

}  // namespace

at::Tensor base_anchors(const std::vector<double>& sizes, const std::vector<double>& shapes) {
  std::vector<float> corners;
  for (const double shape : shapes) {
    const float high = std::sqrt(static_cast<float>(shape)), wide = 1 / high;
    for (const double size : sizes) {
      const float w = wide * static_cast<float>(size) / 2, h = high * static_cast<float>(size) / 2;
      for (const float corner : {-w, -h, w, h}) corners.push_back(std::nearbyint(corner));
    }
  }
  return at::tensor(corners).view({-1, 4});
}

at::Tensor grid_anchors(const at::Tensor& base, int64_t height, int64_t width, std::array<int64_t, 2> stride) {
  const at::Tensor y = at::arange(height, base.options()) * stride[0], x = at::arange(width, base.options()) * stride[1];
  const std::vector<at::Tensor> grid = at::meshgrid({y, x}, "ij");
  const at::Tensor across = grid[1].reshape(-1), down = grid[0].reshape(-1);
  return (at::stack({across, down, across, down}, 1).view({-1, 1, 4}) + base.view({1, -1, 4})).reshape({-1, 4});
}

at::Tensor encode_boxes(const at::Tensor& boxes, const at::Tensor& anchors, const CodeWeights& w) {
  const Centres b = centres_of(boxes), a = centres_of(anchors);
  return at::stack(
      {w[0] * (b.x - a.x) / a.width, w[1] * (b.y - a.y) / a.height, w[2] * (b.width / a.width).log(), w[3] * (b.height / a.height).log()},
      1);
}

at::Tensor decode_boxes(const at::Tensor& codes, const at::Tensor& anchors, const CodeWeights& w) {
  const Centres a = centres_of(anchors);
  const at::Tensor x = codes.select(1, 0) / w[0] * a.width + a.x, y = codes.select(1, 1) / w[1] * a.height + a.y;
  const at::Tensor width = (codes.select(1, 2) / w[2]).clamp_max(kMostGrowth).exp() * a.width * 0.5;
  const at::Tensor height = (codes.select(1, 3) / w[3]).clamp_max(kMostGrowth).exp() * a.height * 0.5;
  return at::stack({x - width, y - height, x + width, y + height}, 1);
}

at::Tensor clip_boxes(const at::Tensor& boxes, int64_t height, int64_t width) {
  const auto within = [&](int64_t column, int64_t most) { return boxes.select(1, column).clamp(0, most); };
  return at::stack({within(0, width), within(1, height), within(2, width), within(3, height)}, 1);
}

at::Tensor overlaps(const at::Tensor& a, const at::Tensor& b) {
  check_boxes(a, "overlaps");
  check_boxes(b, "overlaps");
  const auto area = [](const at::Tensor& x) { return (x.select(1, 2) - x.select(1, 0)) * (x.select(1, 3) - x.select(1, 1)); };
  const at::Tensor low = at::maximum(a.slice(1, 0, 2).unsqueeze(1), b.slice(1, 0, 2).unsqueeze(0));
  const at::Tensor high = at::minimum(a.slice(1, 2, 4).unsqueeze(1), b.slice(1, 2, 4).unsqueeze(0));
  const at::Tensor side = (high - low).clamp_min(0), both = side.select(2, 0) * side.select(2, 1);
  return both / (area(a).unsqueeze(1) + area(b).unsqueeze(0) - both);
}

at::Tensor match_anchors(const at::Tensor& overlap, double high, double low, bool reaches_all) {
  if (overlap.size(0) == 0) return at::full({overlap.size(1)}, -1, overlap.options().dtype(at::kLong));
  const auto [most, best] = at::max(overlap, 0);
  const at::Tensor none = at::full({}, -1, best.options()), undecided = at::full({}, -2, best.options());
  const at::Tensor match = at::where(most < low, none, at::where(most < high, undecided, best));
  if (!reaches_all) return match;
  const at::Tensor reached = overlap.eq(std::get<0>(at::max(overlap, 1, /*keepdim=*/true))).any(0);
  return at::where(reached, best, match);
}

at::Tensor suppress(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& groups, double most) {
  check_boxes(boxes, "suppress");
  const at::Tensor b = boxes.to(at::kCPU, at::kFloat).contiguous(), s = scores.to(at::kCPU, at::kFloat).contiguous(),
                   g = groups.to(at::kCPU, at::kLong).contiguous();
  const float *corners = b.const_data_ptr<float>(), *score = s.const_data_ptr<float>();
  const int64_t* group = g.const_data_ptr<int64_t>();
  std::vector<int64_t> order(static_cast<size_t>(b.size(0)));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return score[i] > score[j]; });
  std::vector<int64_t> stay;
  for (const int64_t i : order) {
    const auto hides = [&](int64_t j) { return group[i] == group[j] && overlap_of(corners + 4 * i, corners + 4 * j) > most; };
    if (std::ranges::none_of(stay, hides)) stay.push_back(i);
  }
  return at::tensor(stay, at::TensorOptions().dtype(at::kLong)).to(boxes.device());
}

}  // namespace satchel
