// Steps of random programs that are torch's own, and those that make no value.
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>

#include "satchel/autograd/report.h"
#include "tests/autograd/fuzz_steps.h"

namespace satchel::test {

/// torch's own functions between ours: sums of equal shapes, products, views, copies in another order. What is a view or a copy by how its
/// input lies is a copy here: our values and torch's lie differently, and a later change in place would tell them apart.
Step torch_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const at::Tensor& v = values[x];
  using Function = std::function<at::Tensor(const FuzzRun&)>;
  const auto made = [&](const std::string& text, Function f) { return FuzzStep{text, {}, [f](FuzzRun& r, W) { return f(r); }}; };
  const auto other = static_cast<size_t>(dice.below(static_cast<int64_t>(values.size())));
  const bool same = values[other].sizes() == v.sizes();
  switch (dice.below(11)) {
    case 0:
    case 1:
      if (!same) return {};
      return made(name(x) + " + " + name(other), [=](const FuzzRun& r) { return at(r, x) + at(r, other); });
    case 2:
      if (!same) return {};
      return made(name(x) + " * " + name(other), [=](const FuzzRun& r) { return at(r, x) * at(r, other); });
    case 3: return made(name(x) + " * 0.5", [=](const FuzzRun& r) { return at(r, x) * 0.5; });
    case 4:
      if (v.dim() < 3) return {};
      return made(name(x) + ".flatten(1)", [=](const FuzzRun& r) { return at(r, x).flatten(1).clone(); });
    case 5: {
      if (v.dim() < 2 || v.size(0) < 2) return {};
      const int64_t dim = dice.below(2);
      if (v.size(dim) < 2) return {};
      return made(name(x) + ".narrow(" + std::to_string(dim) + ", 1, …)",
                  [=](const FuzzRun& r) { return at(r, x).narrow(dim, 1, at(r, x).size(dim) - 1); });
    }
    case 6: return made(name(x) + ".clone()", [=](const FuzzRun& r) { return at(r, x).clone(); });
    case 7:
      if (v.dim() < 2) return {};
      return made(name(x) + ".transpose(0, 1)", [=](const FuzzRun& r) { return at(r, x).transpose(0, 1); });
    case 8: return made(name(x) + ".view_as(itself)", [=](const FuzzRun& r) { return at(r, x).view_as(at(r, x)); });
    case 9:
      if (!same || v.dim() < 2) return {};
      return made("cat(" + name(x) + ", " + name(other) + ")", [=](const FuzzRun& r) { return at::cat({at(r, x), at(r, other)}, 1); });
    default: return made(name(x) + ".contiguous()", [=](const FuzzRun& r) { return at(r, x).clone(at::MemoryFormat::Contiguous); });
  }
}

/// Changes in place, hooks and questions: they make no value.
Step side_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const auto made = [&](const std::string& text, const std::function<void(FuzzRun&)>& f) {
    return FuzzStep{text, {}, [f](FuzzRun& r, W) {
                      f(r);
                      return at::Tensor();
                    }};
  };
  const auto other = static_cast<size_t>(dice.below(static_cast<int64_t>(values.size())));
  switch (dice.below(7)) {
    case 0:
      if (x == 0) return {};
      return made(name(x) + ".add_(0.5)", [=](FuzzRun& r) { r.values[x].add_(0.5); });
    case 1:
      if (x == 0) return {};
      return made(name(x) + ".mul_(-1.5)", [=](FuzzRun& r) { r.values[x].mul_(-1.5); });
    case 2:
      if (x == 0 || x == other || values[other].sizes() != values[x].sizes()) return {};
      return made(name(x) + " += " + name(other), [=](FuzzRun& r) { r.values[x].add_(r.values[other]); });
    case 3:
      if (!values[x].requires_grad()) return {};
      return made(name(x) + ".retain_grad()", [=](FuzzRun& r) {
        r.values[x].retain_grad();
        r.retained.push_back(r.values[x]);
      });
    case 4:
      if (!values[x].requires_grad()) return {};
      return made("hook that hears " + name(x), [=](FuzzRun& r) {
        const auto heard = std::make_shared<at::Tensor>();
        r.heard.push_back(heard);
        r.values[x].register_hook([heard](at::Tensor g) { *heard = g.clone(); });
      });
    case 5:
      if (!values[x].requires_grad()) return {};
      return made("hook that halves the gradient of " + name(x),
                  [=](FuzzRun& r) { r.values[x].register_hook([](at::Tensor g) { return g * 0.5; }); });
    default:
      return made("report of " + name(x), [=](FuzzRun& r) {
        if (r.ours) saved_tensors(r.values[x]);
      });
  }
}

}  // namespace satchel::test
