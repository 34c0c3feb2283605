#include "satchel/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>

#include "satchel/core/error.h"

namespace satchel {
namespace {

// torch.optim.lr_scheduler.OneCycleLR's defaults.
constexpr double kRise = 0.3, kFirst = 1.0 / 25, kLast = kFirst / 1e4, kMostMomentum = 0.95, kLeastMomentum = 0.85;

constexpr double kPolyPower = 0.9;  // of torchvision's references for segmentation

/// From a (share 0) to b (share 1) by half a cosine.
double between(double a, double b, double fraction) { return b + (a - b) / 2 * (1 + std::cos(std::numbers::pi * fraction)); }

Rates onecycle(const Schedule& s, double step) {
  const double top = kRise * static_cast<double>(s.steps) - 1, end = static_cast<double>(s.steps) - 1;
  if (step <= top) {
    const double fraction = top > 0 ? step / top : 1;
    return {between(s.lr * kFirst, s.lr, fraction), between(kMostMomentum, kLeastMomentum, fraction)};
  }
  const double fraction = (step - top) / (end - top);
  return {between(s.lr, s.lr * kLast, fraction), between(kLeastMomentum, kMostMomentum, fraction)};
}

}  // namespace

void validate(const Schedule& s) {
  const auto positive = [](const char* what, double value) {
    if (!(value > 0) || !std::isfinite(value)) fail("train", std::string(what) + " must be finite and above 0", value);
  };
  positive("lr", s.lr);
  positive("gamma", s.gamma);
  if (!(s.momentum >= 0 && s.momentum < 1)) fail("train", "momentum must be at least 0 and below 1", s.momentum);
  if (s.steps < 1) fail("train", "a schedule must have steps", s.steps);
  if (s.warmup < 0 || s.warmup > s.steps) fail("train", "warm-up must be 0 to " + std::to_string(s.steps) + " steps", s.warmup);
  if (s.decay == Decay::onecycle && s.warmup > 0) fail("train", "onecycle has a rise of its own: warm-up must be 0", s.warmup);
  if (std::adjacent_find(s.milestones.begin(), s.milestones.end(), std::greater_equal<>()) != s.milestones.end())
    fail("train", "milestones must rise", "others");
  if (!s.milestones.empty() && s.milestones.front() < 1) fail("train", "milestones must be after the first step", s.milestones.front());
}

Rates rates_at(const Schedule& s, int64_t step) {
  const int64_t now = std::clamp<int64_t>(step, 0, s.steps - 1);
  if (now < s.warmup) return {s.lr * static_cast<double>(now + 1) / static_cast<double>(s.warmup), s.momentum};
  const double done = static_cast<double>(now - s.warmup) / static_cast<double>(s.steps - s.warmup);
  switch (s.decay) {
    case Decay::none: break;
    case Decay::cosine: return {between(s.lr, 0, done), s.momentum};
    case Decay::poly: return {s.lr * std::pow(1 - done, kPolyPower), s.momentum};
    case Decay::step: {
      const auto passed = std::upper_bound(s.milestones.begin(), s.milestones.end(), now) - s.milestones.begin();
      return {s.lr * std::pow(s.gamma, static_cast<double>(passed)), s.momentum};
    }
    case Decay::onecycle: return onecycle(s, static_cast<double>(now));
  }
  return {s.lr, s.momentum};
}

}  // namespace satchel
