#include "satchel/autograd/resample.h"

#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/_upsample_nearest_exact3d.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/reflection_pad1d_backward.h>
#include <ATen/ops/reflection_pad2d_backward.h>
#include <ATen/ops/reflection_pad3d_backward.h>
#include <ATen/ops/replication_pad1d_backward.h>
#include <ATen/ops/replication_pad2d_backward.h>
#include <ATen/ops/replication_pad3d_backward.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/upsample_nearest3d.h>
#include <ATen/ops/upsample_trilinear3d.h>

#include <cmath>
#include <optional>
#include <string>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/pool.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

void check_map(const at::Tensor& x, const char* op) {
  check_tensor(x, op);
  if (x.dim() < 3 || x.dim() > 5) fail(op, "input must be N×C×spatial of 1 to 3 spatial dimensions", x.dim());
}

template <class Number>
std::vector<Number> spread(const std::vector<Number>& given, size_t dims, const char* name) {
  constexpr const char* op = "upsample";
  if (given.empty()) return {};
  if (given.size() != 1 && given.size() != dims)
    fail(op, std::string(name) + " must have 1 number or " + std::to_string(dims), given.size());
  for (const Number n : given) {
    if (!(n > 0) || !std::isfinite(static_cast<double>(n))) fail(op, std::string(name) + " must be more than 0", n);
  }
  return given.size() == dims ? given : std::vector<Number>(dims, given[0]);
}

class PadNode : public SavingNode {
 public:
  explicit PadNode(const std::string& layer) : SavingNode("pad", layer) {}
  std::vector<int64_t> sizes, padding;
  bool reflects = true;

  std::vector<SavedTensor> lines() const override { return {}; }

 protected:
  variable_list back(at::Tensor given) override {
    const NoAutocast guard;
    const at::Tensor g = given.contiguous(), x = sizes_only(sizes, g.options());
    switch (sizes.size()) {
      case 3: return {reflects ? at::reflection_pad1d_backward(g, x, padding) : at::replication_pad1d_backward(g, x, padding)};
      case 4: return {reflects ? at::reflection_pad2d_backward(g, x, padding) : at::replication_pad2d_backward(g, x, padding)};
      default: return {reflects ? at::reflection_pad3d_backward(g, x, padding) : at::replication_pad3d_backward(g, x, padding)};
    }
  }
  void release() override {}
};

}  // namespace

at::Tensor upsample(const at::Tensor& x, const UpsampleOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "upsample";
  check_map(x, op);
  const auto dims = static_cast<size_t>(x.dim()) - 2;
  const std::vector<int64_t> given = spread(options.size, dims, "size");
  const std::vector<double> factors = spread(options.scale, dims, "scale");
  if (given.empty() == factors.empty()) fail(op, "either size or scale must be given", given.empty() ? "none" : "both");
  if (options.mode == Resample::cubic && dims != 2) fail(op, "cubic takes two spatial dimensions", dims);
  if (options.mode == Resample::area) {
    std::vector<std::optional<int64_t>> sizes(given.begin(), given.end());
    for (size_t d = 0; given.empty() && d < dims; ++d) {
      sizes.emplace_back(static_cast<int64_t>(std::floor(static_cast<double>(x.size(static_cast<int64_t>(d) + 2)) * factors[d])));
    }
    return adaptive_avg_pool(x, sizes, saving);
  }
  const at::Tensor in = x.to(precise_type(x));
  const NoAutocast guard;
  const at::OptionalIntArrayRef size = given.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(given);
  const std::optional<at::ArrayRef<double>> scale = factors.empty() ? std::nullopt : std::optional<at::ArrayRef<double>>(factors);
  const bool corners = options.align_corners;
  if (options.mode == Resample::cubic) return at::upsample_bicubic2d(in, size, corners, scale);
  if (options.mode == Resample::linear) {
    if (dims == 1) return at::upsample_linear1d(in, size, corners, scale);
    return dims == 2 ? at::upsample_bilinear2d(in, size, corners, scale) : at::upsample_trilinear3d(in, size, corners, scale);
  }
  if (options.mode == Resample::nearest_exact) {
    if (dims == 1) return at::_upsample_nearest_exact1d(in, size, scale);
    return dims == 2 ? at::_upsample_nearest_exact2d(in, size, scale) : at::_upsample_nearest_exact3d(in, size, scale);
  }
  if (dims == 1) return at::upsample_nearest1d(in, size, scale);
  return dims == 2 ? at::upsample_nearest2d(in, size, scale) : at::upsample_nearest3d(in, size, scale);
}

at::Tensor pad(const at::Tensor& x, const std::vector<int64_t>& padding, PadMode mode, const SavePolicy& saving) {
  constexpr const char* op = "pad";
  static constexpr const char* kNames[] = {"constant", "reflect", "replicate", "circular"};
  check_map(x, op);
  const auto wanted = 2 * static_cast<size_t>(x.dim() - 2);
  if (padding.size() != wanted) fail(op, "padding must have " + std::to_string(wanted) + " numbers", padding.size());
  const char* name = kNames[static_cast<int>(mode)];
  const bool keeps_input = mode == PadMode::reflect || mode == PadMode::replicate;
  if (!keeps_input || is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return at::pad(x, padding, name);
  check_float(x, op);
  const auto node = make_node<PadNode>(saving.name, x);
  node->sizes = x.sizes().vec();
  node->padding = padding;
  node->reflects = mode == PadMode::reflect;
  return attach(at::pad(x.detach(), padding, name), node);
}

}  // namespace satchel
