#include "satchel/autograd/smooth.h"

#include <optional>
#include <string>
#include <utility>

#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/row_norm.h"

namespace satchel {
namespace {

class DerivativeNode : public SavingNode {
 public:
  explicit DerivativeNode(const std::string& layer) : SavingNode("smooth", layer) {}
  Packed derivative;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(derivative, layer(), "derivative", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override { return {slope_gradient(g, derivative)}; }
  void release() override { derivative = {}; }
};

/// The activation of x, and what its derivative is kept as.
SmoothResult recorded(const at::Tensor& x, Smooth act, const CodeChoice& how) {
  if (fuses_smooth(x, how.spec)) return smooth_encode(x, act, how);
  const SmoothValues made = smooth_values(x, act);
  SmoothResult result{made.z, pack(made.slope, how.spec, how.seed)};
  result.slope.dtype = x.scalar_type();
  return result;
}

at::Tensor smooth(const at::Tensor& x, Smooth act, const SavePolicy& saving, const char* op) {
  if (is_baseline(saving.method) || !needs_grad(x)) return smooth_function(x, act);
  check_float(x, op);
  std::optional<EpilogueCall> claimed;
  const auto is_by_row = [&](const EpilogueCall& norm) {
    return !norm.axes.by_channel() && norm.axes.groups == 0 && norm.saving.method == saving.method;
  };
  if (reads_producer(saving.method)) claimed = claim_norm(x, is_by_row);
  if (claimed) {
    claimed->smooth = act;
    claimed->normed = x;
    claimed->smooth_name = saving.name;
    claimed->next_reads = false;
    return epilogue(std::move(*claimed));
  }
  const NoAutocast no_autocast;
  const auto node = make_node<DerivativeNode>(saving.name, x);
  const CodecSpec spec = keeps_of(saving.method, {Role::derivative}).front().spec;
  SmoothResult made = recorded(x.detach(), act, {spec, fresh_seed(x.device())});
  node->derivative = std::move(made.slope);
  return attach(made.z, node);
}

}  // namespace

at::Tensor gelu(const at::Tensor& x, std::string_view approximate, const SavePolicy& saving) {
  if (approximate != "none" && approximate != "tanh") fail("gelu", "approximate must be none or tanh", approximate);
  return smooth(x, approximate == "tanh" ? Smooth::gelu_tanh : Smooth::gelu, saving, "gelu");
}

at::Tensor silu(const at::Tensor& x, const SavePolicy& saving) { return smooth(x, Smooth::silu, saving, "silu"); }
at::Tensor sigmoid(const at::Tensor& x, const SavePolicy& saving) { return smooth(x, Smooth::sigmoid, saving, "sigmoid"); }
at::Tensor tanh(const at::Tensor& x, const SavePolicy& saving) { return smooth(x, Smooth::tanh, saving, "tanh"); }

}  // namespace satchel
