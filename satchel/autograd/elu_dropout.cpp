#include "satchel/autograd/elu_dropout.h"

#include <ATen/ops/elu.h>

#include <cmath>
#include <variant>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_node.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

class EluNode : public SharingNode {
 public:
  explicit EluNode(const std::string& layer) : SharingNode("elu", layer) {}
  NormAxes axes;
  double alpha = 1;
  bool shares = true;  // with the next layer; only names its line

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(*shared_, layer(), kept);
    if (!shares) kept.front().kind = "activation";
    if (shared_->seed.defined()) kept.push_back(saved_line(layer(), "seed", shared_->seed));
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    const auto sizes = g.sizes().vec();
    const at::Tensor gradient = gradient_rows(std::move(g), axes, shared_->channels());
    const SharedRows rows(*shared_);
    rows.for_stretches([&](int64_t first, int64_t last) {
      const at::Tensor part = gradient.narrow(0, first, last - first);
      rows.gradient_(part, first);
      part.mul_(rows.values(first, last).add_(alpha).masked_fill_(rows.on(first, last), 1));
    });
    return {in_sizes(gradient, sizes, axes)};
  }
  void release() override { shared_.reset(); }
};

/// Sign and value in straight blocks: a map's rows are no samples, and a side code filters nothing.
CodecSpec spec_of(const NormCall& call) {
  CodecSpec spec = shared_spec(call.saving.method, Norm::none, Activation::elu, call.width, 0);
  if (call.by_map()) spec.per_sample = false;
  if (!std::holds_alternative<LowPass>(spec.transform)) return spec;
  spec.transform = Identity{};
  spec.block = CodecSpec().block;
  return spec;
}

}  // namespace

at::Tensor elu_dropout(const at::Tensor& x, double alpha, double p, const Saving& saving) {
  if (!(alpha >= 0) || !std::isfinite(alpha)) fail("elu", "alpha must be finite and at least 0", alpha);
  if (x.dim() == 0 || (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf)) {
    fail("elu", "x must be float32, bfloat16 or float16 with at least one dimension", x.toString());
  }
  if (x.numel() == 0) return at::elu(x, alpha);
  const NoAutocast no_autocast;
  const auto node = make_node<EluNode>(saving.name, x);
  const NormCall call = plain_call(x, saving);
  const at::Tensor value = at::elu(rows_of(call), alpha);
  const CodecSpec spec = spec_of(call);
  const at::Tensor seed = fresh_seed(x.device());
  SharedSave save;
  save.code = pack(value, spec, seed);
  if (spec.side == Side::none) save.mask = on_bits(value, {}, {});
  save.chain = {p, 1};
  if (p > 0) save.seed = seed;
  if (call.by_map()) save.sizes = x.sizes().vec();
  const at::Tensor out = p > 0 ? apply_chain(value, {}, {}, {}, seed, save.chain) : value;
  node->axes = call.axes;
  node->alpha = alpha;
  node->shares = saving.method.shared;
  const at::Tensor result = attach(in_sizes(out, x.sizes(), call.axes), node);
  node->share(std::move(save), result);
  return result;
}

}  // namespace satchel
