// Losses of detectors over maps that a convolution has just made: they keep the maps' gradients in the maps' own memory and nothing else.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// What the anchors of a batch shall say. Anchors lie as the maps of all levels do, one level after the other: rows, columns, boxes of a
/// place.
struct AnchorTargets {
  static constexpr int64_t background = -1, ignored = -2;
  at::Tensor labels;   // int64, images × anchors: a class, background or ignored
  at::Tensor boxes;    // float32, images × anchors × 4, coded; read where an anchor has a class
  at::Tensor weights;  // float32, one an image: what its sum counts in the loss
};

struct FocalOptions {
  double alpha = 0.25, gamma = 2;  // 0 ≤ alpha ≤ 1, gamma ≥ 0
};

/// Σ over images of weight × Σ over anchors and classes of the focal loss: −α·(1 − p)^γ·log p of an anchor's class, and
/// −(1 − α)·p^γ·log(1 − p) of all others, p being a logit's sigmoid. Ignored anchors count nothing. Maps are images × (boxes · classes) ×
/// height × width, one a level; where a gradient is recorded their memory holds it afterwards.
at::Tensor focal_loss_(const std::vector<at::Tensor>& logits, int64_t classes, const AnchorTargets& targets,
                       const FocalOptions& options = {}, const SavePolicy& saving = {});

/// Σ over images of weight × Σ over anchors with a class of |d|, d being the difference of a map's number and its target; with `beta` above
/// 0 smooth L1: d²/(2·beta) where |d| is below it, else |d| − beta/2. Maps are images × (boxes · 4) × height × width, as above.
at::Tensor box_loss_(const std::vector<at::Tensor>& maps, const AnchorTargets& targets, double beta = 0, const SavePolicy& saving = {});

}  // namespace satchel
