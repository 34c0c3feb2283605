#include "satchel/autograd/pixel_loss.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_bilinear2d_backward.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/core/stretch.h"

namespace satchel {
namespace {

constexpr const char* kOp = "pixel_loss";

/// Holds the gradient of the small logits.
class PixelLossNode : public SavingNode {
 public:
  explicit PixelLossNode(const std::string& layer) : SavingNode("loss", layer) {}
  at::Tensor gradient;
  at::ScalarType type = at::kFloat;  // of the logits

  std::vector<SavedTensor> lines() const override { return {saved_line(layer(), "loss", gradient)}; }

 protected:
  variable_list back(at::Tensor g) override { return {gradient.mul(g).to(type)}; }
  void release() override { gradient.reset(); }
};

std::string sizes_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::ostringstream text;
  text << c10::toString(t.scalar_type()) << ' ' << t.sizes();
  return text.str();
}

void check(const at::Tensor& logits, const at::Tensor& labels, const PixelLossOptions& o) {
  if (o.classes < 1 || o.classes > o.ignored) fail(kOp, "classes must be 1 to " + std::to_string(o.ignored), o.classes);
  if (!logits.defined() || logits.dim() != 4 || !logits.is_floating_point() || logits.size(1) == 0 || logits.size(1) % o.classes != 0)
    fail(kOp, "logits must be floats, batch × heads·" + std::to_string(o.classes) + " × height × width", sizes_of(logits));
  if (!labels.defined() || labels.scalar_type() != at::kByte || labels.dim() != 3 || labels.size(0) != logits.size(0))
    fail(kOp, "labels must be uint8, " + std::to_string(logits.size(0)) + " × height × width", sizes_of(labels));
  if (labels.device() != logits.device()) fail(kOp, "labels must be on the logits' device", labels.device());
  if (o.weights.defined() && (o.weights.dim() != 1 || o.weights.size(0) != o.classes || o.weights.scalar_type() != at::kFloat ||
                              o.weights.device() != logits.device()))
    fail(kOp, "weights must be " + std::to_string(o.classes) + " float32 numbers on the logits' device", sizes_of(o.weights));
  if (!labels.is_cpu() || labels.numel() == 0) return;
  const at::Tensor wrong = labels.ge(o.classes).logical_and_(labels.ne(o.ignored));
  if (wrong.any().item<bool>())
    fail(kOp, "labels must be 0 to " + std::to_string(o.classes - 1) + ", or " + std::to_string(o.ignored),
         labels.masked_select(wrong)[0].item<int64_t>());
}

at::Tensor torch_loss(const at::Tensor& logits, const at::Tensor& labels, const PixelLossOptions& o) {
  const at::Tensor wanted = labels.to(at::kLong);
  at::Tensor loss;
  for (int64_t head = 0; head * o.classes < logits.size(1); ++head) {
    const at::Tensor small = logits.narrow(1, head * o.classes, o.classes).to(at::kFloat);
    const at::Tensor large = at::upsample_bilinear2d(small, labels.sizes().slice(1), /*align_corners=*/false);
    const at::Tensor own = at::cross_entropy_loss(large, wanted, o.weights, at::Reduction::Mean, o.ignored);
    loss = head == 0 ? own : loss + o.aux * own;
  }
  return loss;
}

/// The labels of some images as every head reads them.
struct Targets {
  Targets(const at::Tensor& labels, const PixelLossOptions& o) {
    const at::Tensor counted = labels.ne(o.ignored);
    classes = labels.to(at::kLong).mul_(counted).unsqueeze_(1);
    weights = o.weights.defined() ? o.weights.take(classes).mul_(counted.unsqueeze(1)) : counted.to(at::kFloat).unsqueeze_(1);
  }
  at::Tensor classes, weights;  // n × 1 × height × width: 0 where a pixel does not count
};

/// Of one head's logits of some images, float32 and contiguous: the sum of weighted cross entropies. `gradient`, where it is defined,
/// becomes that sum's.
at::Tensor sum_of(const at::Tensor& small, const Targets& targets, const at::Tensor& gradient) {
  const at::IntArrayRef size = targets.classes.sizes().slice(2);
  at::Tensor large = at::_log_softmax(at::upsample_bilinear2d(small, size, /*align_corners=*/false), 1, /*half_to_float=*/false);
  const at::Tensor sum = large.gather(1, targets.classes).mul_(targets.weights).sum().neg_();
  if (!gradient.defined()) return sum;
  large.exp_().mul_(targets.weights).scatter_add_(1, targets.classes, targets.weights.neg());
  gradient.copy_(at::upsample_bilinear2d_backward(large, size, small.sizes(), /*align_corners=*/false));
  return sum;
}

}  // namespace

at::Tensor pixel_loss(const at::Tensor& logits, const at::Tensor& labels, const PixelLossOptions& o, const std::string& name) {
  check(logits, labels, o);
  const NoAutocast guard;
  if (o.torch_own) return torch_loss(logits, labels, o);
  const bool recorded = needs_grad(logits);
  at::Tensor gradient, loss;
  {
    const at::NoGradGuard no_grad;
    const at::TensorOptions floats = logits.options().dtype(at::kFloat).memory_format(std::nullopt);
    if (recorded) gradient = at::empty(logits.sizes(), floats);
    at::Tensor total = at::zeros({}, floats);
    loss = at::zeros({}, floats);
    const int64_t images = logits.size(0), values = std::max<int64_t>(o.classes * labels.size(1) * labels.size(2), 1);
    const int64_t some = std::max<int64_t>(kLargeLogits / values, 1);
    for (int64_t first = 0; first < images; first += some) {
      const int64_t count = std::min(some, images - first);
      const Targets targets(labels.narrow(0, first, count), o);
      total += targets.weights.sum();
      for (int64_t head = 0; head * o.classes < logits.size(1); ++head) {
        const auto part = [&](const at::Tensor& of) { return of.narrow(0, first, count).narrow(1, head * o.classes, o.classes); };
        const at::Tensor own = recorded ? part(gradient) : at::Tensor();
        const at::Tensor sum = sum_of(part(logits.detach()).to(at::kFloat).contiguous(), targets, own);
        if (recorded && head > 0) own.mul_(o.aux);
        loss.add_(sum, head == 0 ? 1 : o.aux);
      }
    }
    total.clamp_min_(1e-30);  // where nothing counts all sums are 0
    loss.div_(total);
    if (recorded) gradient.div_(total);
  }
  if (!recorded) return loss;
  const auto node = make_node<PixelLossNode>(name, logits);
  node->gradient = std::move(gradient);
  node->type = logits.scalar_type();
  return attach(std::move(loss), node);
}

}  // namespace satchel
