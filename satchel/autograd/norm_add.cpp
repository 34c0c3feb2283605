#include "satchel/autograd/norm_add.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_low_pass.h"
#include "satchel/autograd/norm_map.h"
#include "satchel/autograd/norm_node.h"
#include "satchel/autograd/norm_share.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/tensor/norm_add.h"
#include "satchel/tensor/norm_block.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Keeps the normalised values for the norm alone and, as its SharedSave, the sum's ReLU form.
class NormAddNode : public SharingNode {
 public:
  explicit NormAddNode(const std::string& layer) : SharingNode("norm_add", layer) {}
  NormAxes axes;
  bool training = true, fused = false;
  std::vector<int64_t> sizes;  // of x
  Packed norm;
  at::Tensor rstd;
  std::optional<SavedVariable> weight;  // γ: changing it in place before backward is an error, as in torch

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(norm, layer(), "norm", kept);
    const auto bytes = static_cast<int64_t>(rstd.nbytes());
    kept.push_back({layer(), "statistics", {rstd.numel()}, 32, bytes, bytes});
    report(*shared_, layer(), kept);
    return kept;
  }

 protected:
  /// In the order of the inputs: x, γ, β, skip.
  variable_list back(at::Tensor g) override {
    const at::Tensor gradient = gradient_rows(std::move(g), axes, shared_->channels());
    const at::Tensor gamma = weight ? weight->unpack().detach() : at::Tensor();
    return fused ? fused_back(gradient, gamma) : rows_back(gradient, gamma);
  }

  void release() override {
    shared_.reset();
    norm = {};
    rstd.reset();
    weight.reset();
  }

 private:
  variable_list result(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& skip) const {
    const auto map = [&](const at::Tensor& rows) { return rows.defined() ? in_sizes(rows, sizes, axes) : rows; };
    return {map(x), gamma, beta, map(skip)};
  }

  variable_list fused_back(const at::Tensor& own_gradient, const at::Tensor& gamma) const {
    const at::Tensor g = for_kernels(own_gradient);
    const NormAddCodes codes{norm, shared_->code, shared_->share.third};
    const NormActSums sums = norm_add_sums(g, codes);
    at::Tensor dx;
    if (needs(0)) dx = needs(3) ? at::empty_like(g) : g;
    if (needs(0) || needs(3)) norm_add_back_(g, dx, codes, gamma, rstd, sums, training);
    return result(dx, sums.gamma, sums.beta, needs(3) ? g : at::Tensor());
  }

  variable_list rows_back(const at::Tensor& g, const at::Tensor& gamma) const {
    const SharedRows sum(*shared_);
    sum.for_stretches([&](int64_t first, int64_t last) { sum.gradient_(g.narrow(0, first, last - first), first); });
    const at::Tensor dx = needs(3) && needs(0) ? g.clone() : g;
    SharedSave save;
    save.code = norm;
    const SharedRows rows(save);
    const auto values = [&](int64_t first, int64_t last, at::ScalarType type) { return rows.values(first, last, type); };
    const NormGradients sums = norm_back_(dx, {axes, training, gamma, rstd, values}, needs(0),
                                          [&](const auto& run) { for_stretches_of(g.size(0), g.size(1), g.is_cuda(), run); });
    return result(needs(0) ? dx : at::Tensor(), sums.gamma, sums.beta, needs(3) ? g : at::Tensor());
  }
};

/// The two codes and the output of rows.
struct Parts {
  Packed norm, sum;
  at::Tensor mask, z;  // mask: undefined where the sum's code tells
  bool fused = false;
};

Parts fused_parts(const NormCall& call, const at::Tensor& rows, const at::Tensor& skip, const CodecSpec& norm, const CodecSpec& sum,
                  const ThirdPlane& third, const at::Tensor& spare) {
  const at::Tensor x = for_kernels(rows), into = spare.defined() ? rows_of_map(spare) : spare;
  const bool same_memory = into.defined() && into.const_data_ptr() == x.const_data_ptr();  // not where for_kernels() made a copy
  const ColumnMoments moments{call.known.mean.squeeze(0), call.known.rstd.squeeze(0)};
  const at::Tensor other = fresh_seed(call.x.device());
  NormAddResult result = norm_add_encode(x, moments, call.weights.gamma.detach(), call.weights.beta.detach(), for_kernels(skip), norm, sum,
                                         call.seed, other, same_memory ? into : at::Tensor(), third);
  return {std::move(result.norm), std::move(result.sum), {}, std::move(result.z), true};
}

Parts parts_of(const NormCall& call, const at::Tensor& rows, const at::Tensor& skip, const CodecSpec& norm, const CodecSpec& sum,
               const ThirdPlane& third) {
  Parts parts;
  const at::Tensor values = normalised(rows, call.known, call.axes);
  parts.norm = pack(values, norm, call.seed);
  const at::Tensor other = fresh_seed(call.x.device());
  if (call.weights.gamma.defined()) values.mul_(call.weights.gamma.detach());
  if (call.weights.beta.defined()) values.add_(call.weights.beta.detach());
  parts.z = values.add_(skip).relu_().to(call.x.scalar_type());
  parts.sum = third.defined() ? pack_third(parts.z, sum, other, {}, {}, third) : pack(parts.z, sum, other);
  if (sum.side == Side::none) parts.mask = on_bits(parts.z, {}, {});
  return parts;
}

at::Tensor shared_norm_add(NormCall call, const at::Tensor& skip, const at::Tensor& spare) {
  const NoAutocast no_autocast;
  const Method& method = call.saving.method;
  const CodecSpec norm = norm_spec(method, call.width, call.count());
  CodecSpec sum = shared_spec(method, Norm::none, Activation::relu, call.width, 0);
  const at::Tensor rows = rows_of(call), other = rows_of_map(skip.detach());
  const bool affine = call.weights.gamma.defined() && call.weights.beta.defined();
  const bool fuses = affine && fuses_norm_add(rows, norm, sum);
  call.known = statistics_of(rows, call.weights, call.axes, call.options);
  call.seed = fresh_seed(call.x.device());
  MapShare share = share_of_map(call.x.sizes(), call.x.device(), call.saving, sum, fuses || rows.is_cpu());
  Parts parts = fuses ? fused_parts(call, rows, other, norm, sum, share.third, spare) : parts_of(call, rows, other, norm, sum, share.third);
  if (share.shares != nullptr) watch(share, parts.sum, call.x.size(0), {});
  const auto node = make_node<NormAddNode>(call.saving.name, call.x, call.weights.gamma, call.weights.beta, skip);
  node->axes = call.axes;
  node->training = call.options.training;
  node->fused = parts.fused;
  node->sizes = call.x.sizes().vec();
  node->norm = std::move(parts.norm);
  node->rstd = call.known.rstd.squeeze(0);
  if (call.weights.gamma.defined()) node->weight.emplace(call.weights.gamma, /*is_output=*/false);
  SharedSave save;
  save.code = std::move(parts.sum);
  save.mask = parts.mask;
  save.share = std::move(share);
  save.chain = {0, 0};
  if (call.x.dim() > 2) save.sizes = node->sizes;
  const at::Tensor out = attach(in_sizes(parts.z, call.x.sizes(), call.axes), node);
  node->share(std::move(save), out);
  return out;
}

}  // namespace

at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const Saving& saving) {
  constexpr const char* op = "norm_add_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  if (options.norm != Norm::batch) fail(op, "the norm must be a BatchNorm", "another");
  if (options.activation != Activation::relu && options.activation != Activation::none) {
    fail(op, "the activation must be ReLU or none", "another");
  }
  if (options.dropout != 0) fail(op, "dropout must be 0", options.dropout);
  const bool fits = skip.defined() && skip.sizes() == x.sizes() && skip.device() == x.device();
  if (!fits) fail(op, "skip must have x's sizes and device", skip.defined() ? skip.toString() : "nothing");
  const bool recorded = records(x, weights.gamma, weights.beta, skip), relus = options.activation == Activation::relu;
  const bool same_type = skip.scalar_type() == x.scalar_type();
  if (fuses_norm_low_pass(x, weights, options, saving, skip)) {
    const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
    return norm_low_pass(x, weights, options, saving, spare, skip);
  }
  if (relus && same_type && serves_norm_map(x, weights, options.statistics, saving)) {
    const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
    return norm_map(x, weights, options.statistics, {/*activates=*/true, 0, skip}, saving, spare);
  }
  // In evaluation the norm may keep nothing at all: a norm of its own knows.
  const bool one_function = saving.method.shared && !saving.method.plain && recorded && relus && same_type && options.training();
  if (!one_function) {
    at::Tensor y = batch_norm(x, weights, options.statistics, saving);  // fresh, and kept by nobody
    const at::Tensor sum = same_type ? y.add_(skip) : at::add(y, skip);
    return relus ? relu(sum, saving) : sum;
  }
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  return shared_norm_add(norm_call(x, weights, Norm::batch, 0, options.statistics, saving), skip, spare);
}

}  // namespace satchel
