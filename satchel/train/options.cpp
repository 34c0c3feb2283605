#include "satchel/train/options.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <charconv>
#include <cmath>

#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "satchel/train/ranges.h"

namespace satchel {
namespace {

constexpr int64_t kMostLayers = 1000, kMostWidth = int64_t{1} << 20;  // a checkpoint is a file: what it asks for has a limit
constexpr double kMostDropout = 0.9999;                               // dropout draws in steps of 1/65536, and some values must stay

}  // namespace

void validate_run(const RunOptions& o) {
  check_at_least("epochs", o.epochs, 1);
  check_finite_above("lr", o.lr, 0);
  check_finite_at_least("weight decay", o.weight_decay, 0);
  if (!(o.momentum >= 0 && o.momentum < 1)) fail("train", "momentum must be at least 0 and below 1", o.momentum);
  check_at_least("epochs between evaluations", o.eval_every, 1);
  check_finite_at_least("minutes between checkpoints", o.checkpoint_every, 0);
  if (o.tf32 && !names_cuda(o.device)) fail("train", "tf32 needs device cuda", o.device);
  if (!o.checkpoint.empty()) {
    if (parse_method(o.method.name) != o.method)
      fail("train", "with a checkpoint, which holds the method's text, a method must be as parse_method() reads it", o.method.name);
    return;
  }
  if (o.resume || o.checkpoint_every > 0) fail("train", "resume and checkpoint_every need a checkpoint", "none");
}

void validate(const TrainOptions& o) {
  graph_layer(o.shape.conv, "train");
  check_between("layers", o.shape.layers, 1, kMostLayers);
  check_between("hidden", o.shape.hidden, 1, kMostWidth);
  if (!(o.shape.dropout >= 0 && o.shape.dropout < 1)) fail("train", "dropout must be at least 0 and below 1", o.shape.dropout);
  if (o.shape.dropout > kMostDropout) fail("train", "dropout must leave something: 0.9999 at most", o.shape.dropout);
  if (!std::isfinite(o.shape.slope)) fail("train", "slope must be finite", o.shape.slope);
  if (!(o.shape.alpha >= 0) || !std::isfinite(o.shape.alpha)) fail("train", "alpha must be finite and at least 0", o.shape.alpha);
  validate_for_graph(o.method, "train");
  validate_run(o);
  check_finite_at_least("clip", o.clip, 0);
  check_at_least("patience", o.patience, 0);
  check_at_least("split", o.split, 0);
  if (o.cuda_graph.value_or(false) && !names_cuda(o.device)) fail("train", "cuda_graph needs device cuda", o.device);
}

at::Device device_of(const std::string& name, const char* op) {
  if (name == "cpu") return at::kCPU;
  int index = 0;
  if (name != "cuda") {
    const std::string_view number = names_cuda(name) ? std::string_view(name).substr(5) : std::string_view();
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (number.empty() || error != std::errc() || end != number.data() + number.size() || index < 0)
      fail(op, "device must be cpu, cuda or cuda:N", "'" + name + "'");
  }
  if (!at::hasCUDA()) fail(op, "device cuda needs a GPU that torch can use", "none");
  const int count = at::detail::getCUDAHooks().deviceCount();
  if (index >= count)
    fail(op, "device must be cuda:0" + (count > 1 ? " to cuda:" + std::to_string(count - 1) : std::string(", the only GPU")), name);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

Tf32Guard::Tf32Guard(const TrainOptions& options) : cuda_(names_cuda(options.device)) {
  if (!cuda_) return;
  at::Context& torch = at::globalContext();
  before_ = torch.allowTF32CuBLAS();
  half_before_ = torch.allowFP16ReductionCuBLAS();
  torch.setAllowTF32CuBLAS(options.tf32);
  torch.setAllowFP16ReductionCuBLAS(/*allow_reduced_precision=*/false);
}

Tf32Guard::~Tf32Guard() {
  if (!cuda_) return;
  at::globalContext().setAllowTF32CuBLAS(before_);
  at::globalContext().setAllowFP16ReductionCuBLAS(half_before_ == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK,
                                                  half_before_ != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
}

}  // namespace satchel
