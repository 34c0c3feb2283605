#include "satchel/autograd/gate.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

constexpr const char* kGateOp = "gate";

class GateNode : public ScalingNode {
 public:
  explicit GateNode(const std::string& layer) : ScalingNode(kGateOp, layer) {}
  std::optional<SavedVariable> scale;  // changing it in place before backward is an error, as in torch
  bool stands_anyway = false;          // a leaf: somebody else's, as parameters are

  /// Keeps x and `given` for backward, and for who reads `out`, untouched from here on.
  void keep(InputSave x, const at::Tensor& given, const Method& method, const at::Tensor& out) {
    scale.emplace(given, /*is_output=*/false);
    stands_anyway = given.is_leaf();
    scaled_ = std::make_shared<const ScaledInput>(ScaledInput{std::move(x), given.detach(), method});
    version_ = out._version();
  }

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    if (scaled_ == nullptr) return kept;
    scaled_->x.report(layer(), "input", kept);
    if (!stands_anyway) kept.push_back(saved_line(layer(), "gate", scale->unpack()));
    return kept;
  }

 protected:
  variable_list back(at::Tensor given) override {
    const NoAutocast guard;
    const at::Tensor g = in_channels_last(given), factors = scale->unpack().detach();
    variable_list gradients(2);
    if (needs(1)) gradients[1] = scale_gradient(g, factors);
    if (needs(0)) gradients[0] = at::mul(g, factors);
    return gradients;
  }
  void release() override {
    scaled_.reset();
    scale.reset();
  }

 private:
  /// Some samples at a time; sums in float32.
  at::Tensor scale_gradient(const at::Tensor& g, const at::Tensor& factors) const {
    std::vector<int64_t> spatial(static_cast<size_t>(g.dim()) - 2);
    std::iota(spatial.begin(), spatial.end(), 2);
    at::Tensor sums = at::empty_like(factors);
    scaled_->x.fetch();
    scaled_->x.for_samples(g.scalar_type(), [&](int64_t first, int64_t last, const at::Tensor& part) {
      const at::Tensor products = at::mul(g.narrow(0, first, last - first), part);
      sums.narrow(0, first, last - first).copy_(at::sum(products, spatial, /*keepdim=*/true, at::kFloat));
    });
    return sums;
  }
};

void check_gate(const at::Tensor& x, const at::Tensor& scale) {
  check_float(x, kGateOp);
  if (!is_image(x)) fail(kGateOp, "x must be a map N×C×spatial", x.sizes());
  std::vector<int64_t> wanted(static_cast<size_t>(x.dim()), 1);
  wanted[0] = x.size(0);
  wanted[1] = x.size(1);
  if (!scale.defined() || scale.sizes() != at::IntArrayRef(wanted)) {
    fail(kGateOp, "scale must have one number a channel of each sample, " + c10::str(at::IntArrayRef(wanted)),
         scale.defined() ? c10::str(scale.sizes()) : "nothing");
  }
  if (scale.scalar_type() != x.scalar_type()) fail(kGateOp, "scale must have x's type", scale.toString());
}

}  // namespace

at::Tensor gate(const at::Tensor& x, const at::Tensor& scale, const SavePolicy& saving) {
  check_gate(x, scale);
  if (is_baseline(saving.method) || !needs_grad(x, scale) || x.numel() == 0) return at::mul(x, scale);
  const NoAutocast no_autocast;
  const auto node = make_node<GateNode>(saving.name, x, scale);
  // No layer with weights: samples that have bits of their own get them by their ranges alone.
  InputSave kept;
  if (needs_grad(scale)) kept = InputSave(x, {saving.method, saving.name, {}}, {Reads::samples});
  const at::Tensor out = attach(in_channels_last(at::mul(x.detach(), scale.detach())), node);
  node->keep(std::move(kept), scale, saving.method, out);
  return out;
}

}  // namespace satchel
