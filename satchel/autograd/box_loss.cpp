#include "satchel/autograd/box_loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr const char* kFocal = "focal_loss_";
constexpr const char* kBox = "box_loss_";
constexpr int64_t kStretch = 1 << 20, kStretchCuda = 1 << 24;  // values that a loss works on at a time

/// A map as images × anchors × values of an anchor: its own memory, where it lies in channels_last order.
at::Tensor anchor_rows(const at::Tensor& map, int64_t values) { return map.permute({0, 2, 3, 1}).reshape({map.size(0), -1, values}); }

/// Holds the maps' gradients, each image's without its weight: in 16 bits the weighted ones would vanish.
class MapsLossNode : public SavingNode {
 public:
  explicit MapsLossNode(const std::string& layer) : SavingNode("box loss", layer) {}
  std::vector<at::Tensor> gradients;  // maps
  std::vector<uint32_t> versions;     // of their memory
  at::Tensor weights;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    for (const at::Tensor& g : gradients) kept.push_back(saved_line(layer(), "loss", g));
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    variable_list made;
    const at::Tensor factor = weights.mul(g.to(at::kFloat)).view({-1, 1, 1, 1});
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i]._version() != versions[i])
        fail(op(), "maps must not change, nor serve a second loss, between a loss and its backward");
      made.push_back(is_last_use() ? std::exchange(gradients[i], {}).mul_(factor)
                                   : gradients[i].mul(factor).to(gradients[i].scalar_type()));
    }
    return made;
  }
  void release() override { gradients.clear(); }
};

void check_targets(const std::vector<at::Tensor>& maps, int64_t values, const AnchorTargets& t, const char* op) {
  if (maps.empty()) fail(op, "there must be at least one map", 0);
  int64_t anchors = 0;
  for (const at::Tensor& map : maps) {
    if (map.dim() != 4 || !map.is_floating_point()) fail(op, "maps must have four dimensions of floats", map.toString());
    if (map.size(0) != maps[0].size(0)) fail(op, "maps must be of " + std::to_string(maps[0].size(0)) + " images", map.size(0));
    if (map.size(1) % values != 0) fail(op, "channels must be a multiple of " + std::to_string(values), map.size(1));
    anchors += map.size(1) / values * map.size(2) * map.size(3);
  }
  const std::vector<int64_t> sizes = {maps[0].size(0), anchors};
  if (!t.labels.defined() || t.labels.sizes() != at::IntArrayRef(sizes) || t.labels.scalar_type() != at::kLong)
    fail(op, "labels must be int64 of images × " + std::to_string(anchors), t.labels.defined() ? t.labels.sizes() : at::IntArrayRef());
  if (!t.weights.defined() || t.weights.numel() != sizes[0])
    fail(op, "weights must be one an image", t.weights.defined() ? t.weights.numel() : 0);
}

/// What a loss makes of some images' rows, float32: their sums, one an image, and the gradient in place of the rows.
using RowsLoss = std::function<at::Tensor(at::Tensor& rows, int64_t first_image, int64_t first_anchor)>;

at::Tensor maps_loss(const std::vector<at::Tensor>& maps, int64_t values, const at::Tensor& weights, const SavePolicy& saving,
                     const RowsLoss& loss) {
  const at::TensorList list(maps);
  const bool recorded = needs_grad(list);
  at::Tensor total;
  std::vector<at::Tensor> gradients;
  {
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    total = at::zeros({}, weights.options().dtype(at::kFloat));
    int64_t anchor = 0;
    for (const at::Tensor& map : maps) {
      gradients.push_back(in_channels_last(map.detach()));
      const at::Tensor rows = anchor_rows(gradients.back(), values);
      const int64_t most = rows.is_cuda() ? kStretchCuda : kStretch, one = std::max<int64_t>(rows.size(1) * values, 1);
      const int64_t images = std::clamp<int64_t>(most / one, 1, std::max<int64_t>(rows.size(0), 1));
      for (int64_t first = 0; first < rows.size(0); first += images) {
        const int64_t count = std::min(images, rows.size(0) - first);
        const at::Tensor part = rows.narrow(0, first, count);
        at::Tensor numbers = part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
        total += loss(numbers, first, anchor).mul(weights.narrow(0, first, count)).sum();
        if (recorded) part.copy_(numbers);
      }
      anchor += rows.size(1);
    }
  }
  if (!recorded) return total;
  const at::AutoGradMode grad(true);
  const auto node = make_node<MapsLossNode>(saving.name, list);
  for (size_t i = 0; i < maps.size(); ++i) {
    if (gradients[i].is_alias_of(maps[i])) torch::autograd::impl::bump_version(maps[i]);
    node->versions.push_back(gradients[i]._version());
  }
  node->gradients = std::move(gradients);
  node->weights = weights;
  return attach(total, node);
}

/// All levels' rows as float32, by torch's functions.
at::Tensor joined_rows(const std::vector<at::Tensor>& maps, int64_t values) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& map : maps) rows.push_back(anchor_rows(map, values).to(at::kFloat));
  return at::cat(rows, 1);
}

at::Tensor power(const at::Tensor& x, double gamma) { return gamma == 2 ? x.square() : x.pow(gamma); }

/// As torchvision writes it.
at::Tensor torch_focal(const at::Tensor& x, const AnchorTargets& t, const FocalOptions& o) {
  const at::Tensor on = t.labels.ge(0).unsqueeze(2);
  const at::Tensor wanted = at::zeros_like(x).scatter_(2, t.labels.clamp_min(0).unsqueeze(2), on.to(at::kFloat));
  const at::Tensor p = x.sigmoid(), ce = at::binary_cross_entropy_with_logits(x, wanted, {}, {}, at::Reduction::None);
  const at::Tensor right = p * wanted + (1 - p) * (1 - wanted), alpha = o.alpha * wanted + (1 - o.alpha) * (1 - wanted);
  const at::Tensor each = alpha * (ce * (1 - right).pow(o.gamma));
  return (each.sum(2) * t.labels.ne(AnchorTargets::ignored)).sum(1).mul(t.weights).sum();
}

}  // namespace

at::Tensor focal_loss_(const std::vector<at::Tensor>& logits, int64_t classes, const AnchorTargets& t, const FocalOptions& o,
                       const SavePolicy& saving) {
  if (classes < 1) fail(kFocal, "classes must be at least 1", classes);
  if (!(o.alpha >= 0 && o.alpha <= 1)) fail(kFocal, "alpha must be 0 to 1", o.alpha);
  if (!(o.gamma >= 0)) fail(kFocal, "gamma must be at least 0", o.gamma);
  check_targets(logits, classes, t, kFocal);
  if (is_baseline(saving.method)) return torch_focal(joined_rows(logits, classes), t, o);
  return maps_loss(logits, classes, t.weights, saving, [&](at::Tensor& x, int64_t image, int64_t anchor) {
    const at::Tensor label = t.labels.narrow(0, image, x.size(0)).narrow(1, anchor, x.size(1)).unsqueeze(2);
    const at::Tensor at = label.clamp_min(0), on = label.ge(0), counts = label.ne(AnchorTargets::ignored);
    const at::Tensor xt = x.gather(2, at);
    // All as wrong classes: (1 − α)·p^γ·s with s = log(1 + eˣ), whose derivative is (1 − α)·p^γ·(γ·(1 − p)·s + p).
    at::Tensor s = at::softplus(x);
    at::Tensor p = x.sigmoid_(), pg = power(p, o.gamma);
    at::Tensor each = pg.mul(s).sum(2, /*keepdim=*/true).mul_(1 - o.alpha);
    const at::Tensor pt = p.gather(2, at), st = s.gather(2, at), qt = 1 - pt, qg = power(qt, o.gamma), lt = st - xt;
    each += at::where(on, o.alpha * qg * lt - (1 - o.alpha) * power(pt, o.gamma) * st, 0);
    s.mul_(o.gamma).sub_(s.mul(p)).add_(p).mul_(pg).mul_(1 - o.alpha);
    // The right ones: α·(1 − p)^γ·log(1 + e⁻ˣ), whose derivative is −α·(1 − p)^γ·(γ·p·log(1 + e⁻ˣ) + 1 − p).
    const at::Tensor right = (-o.alpha) * qg * (o.gamma * pt * lt + qt);
    s.scatter_(2, at, at::where(on, right, s.gather(2, at)));
    x = s.mul_(counts);
    return each.mul_(counts).sum({1, 2});
  });
}

at::Tensor box_loss_(const std::vector<at::Tensor>& maps, const AnchorTargets& t, double beta, const SavePolicy& saving) {
  constexpr int64_t kCorners = 4;
  if (!(beta >= 0)) fail(kBox, "beta must be at least 0", beta);
  check_targets(maps, kCorners, t, kBox);
  const auto length = [&](const at::Tensor& d) {
    const at::Tensor size = d.abs();
    return beta == 0 ? size : at::where(size < beta, size.square() / (2 * beta), size - beta / 2);
  };
  const auto values_of = [&](const at::Tensor& d, const at::Tensor& on) { return at::where(on, length(d), 0); };
  if (is_baseline(saving.method))
    return values_of(joined_rows(maps, kCorners) - t.boxes, t.labels.ge(0).unsqueeze(2)).sum({1, 2}).mul(t.weights).sum();
  return maps_loss(maps, kCorners, t.weights, saving, [&](at::Tensor& x, int64_t image, int64_t anchor) {
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, image, x.size(0)).narrow(1, anchor, x.size(1)); };
    const at::Tensor d = x.sub_(part(t.boxes)), on = part(t.labels).ge(0).unsqueeze(2);
    at::Tensor sums = values_of(d, on).sum({1, 2});
    x = at::where(on, beta == 0 ? d.sign() : (d / beta).clamp_(-1, 1), 0);
    return sums;
  });
}

}  // namespace satchel
