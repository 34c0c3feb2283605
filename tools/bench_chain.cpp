#include "tools/bench_chain.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/smooth.h"
#include "tools/arguments.h"
#include "tools/quality.h"
#include "tools/time_of.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr double kSlope = 0.01, kRmsEps = 1e-6;

struct BenchChainCommand {
  int64_t rows = 16384, channels = 3072;
  std::string norm = "layer", activation = "gelu", dtype = "bf16", device = "cpu", methods = "satchel", json;
  int repeat = 15;
};

/// torch's own where there is no policy.
at::Tensor activation_named(const std::string& name, const at::Tensor& y, const SavePolicy* saving) {
  const SavePolicy& own = saving != nullptr ? *saving : SavePolicy();
  if (name == "gelu") return saving == nullptr ? at::gelu(y) : gelu(y, "none", own);
  if (name == "gelu_tanh") return saving == nullptr ? at::gelu(y, "tanh") : gelu(y, "tanh", own);
  if (name == "silu") return saving == nullptr ? at::silu(y) : silu(y, own);
  if (name == "sigmoid") return saving == nullptr ? at::sigmoid(y) : sigmoid(y, own);
  if (name == "tanh") return saving == nullptr ? at::tanh(y) : tanh(y, own);
  if (name == "relu") return saving == nullptr ? at::relu(y) : relu(y, own);
  if (name == "leaky_relu") return saving == nullptr ? at::leaky_relu(y, kSlope) : leaky_relu(y, kSlope, own);
  if (name == "elu") return saving == nullptr ? at::elu(y) : elu(y, 1, own);
  return y;
}

/// x, its weights and the gradient of the result. x has a history, as the output of a layer has: what its readers keep of it counts.
struct ChainData {
  at::Tensor x, gamma, beta, g;

  ChainData(const BenchChainCommand& c, at::Device device, at::ScalarType type) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
    const auto normal = [&](std::vector<int64_t> sizes) { return at::randn(sizes, generator, at::kFloat).to(device); };
    x = at::mul(normal({c.rows, c.channels}).to(type).requires_grad_(), 1);
    g = normal({c.rows, c.channels}).to(type);
    gamma = normal({c.channels}).mul_(0.2).add_(1).requires_grad_();
    beta = normal({c.channels}).mul_(0.2).requires_grad_();
  }
  /// The same numbers in float32.
  ChainData exact() const {
    ChainData other = *this;
    other.x = at::mul(x.detach().to(at::kFloat).requires_grad_(), 1);
    other.g = g.to(at::kFloat);
    return other;
  }
  /// With weights of x's type, as torch's own functions want them.
  ChainData for_torch() const {
    ChainData other = *this;
    other.gamma = gamma.detach().to(x.scalar_type()).requires_grad_();
    other.beta = beta.detach().to(x.scalar_type()).requires_grad_();
    return other;
  }
};

/// Norm and activation of the data, by torch's own functions or with a method.
at::Tensor result_of(const BenchChainCommand& c, const ChainData& d, const SavePolicy* saving) {
  const std::vector<int64_t> shape{c.channels};
  at::Tensor y = d.x;
  if (saving == nullptr) {
    if (c.norm == "layer") y = at::layer_norm(y, shape, d.gamma, d.beta);
    if (c.norm == "rms") y = at::rms_norm(y, shape, d.gamma, kRmsEps);
  } else {
    if (c.norm == "layer") y = layer_norm(y, shape, {d.gamma, d.beta, {}, {}}, {}, *saving);
    if (c.norm == "rms") y = rms_norm(y, shape, d.gamma, kRmsEps, *saving);
  }
  return activation_named(c.activation, y, saving);
}

/// Of all parameters on the way, of which x's comes back.
at::Tensor gradient_of(const at::Tensor& z, const ChainData& d) {
  return torch::autograd::grad({z}, {d.x, d.gamma, d.beta}, {d.g}, std::nullopt, false, /*allow_unused=*/true)[0];
}

struct ChainRun {
  double seconds = 0, error = 0;  // of x's gradient, relative to torch's in float32
  int64_t bytes = 0;
};

/// The norm of a − b as a share of b's.
double share_of(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kFloat) - b).norm().item<double>() / (b.norm().item<double>() + 1e-30);
}

/// Checks, then times: the result is that of float32 within 4 roundings of the type, and the gradient of x is right on average: its
/// projection on float32's is 1 within 1 % and 6 standard errors.
ChainRun run_chain(const BenchChainCommand& c, const ChainData& d, const SavePolicy* saving, at::Device device, const at::Tensor& z,
                   const at::Tensor& dx) {
  const std::string name = saving == nullptr ? "torch" : saving->method.name;
  const at::Tensor own = result_of(c, d, saving);
  const double unit = d.x.scalar_type() == at::kFloat ? 0x1p-20 : d.x.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-8;
  if (const double off = share_of(own, z); !(off <= 4 * unit)) {
    fail("bench", name + "'s result must be torch's within rounding", fmt::format("{:.1e} of its norm", off));
  }
  ChainRun run;
  run.bytes = total_bytes(saved_tensors(own));
  const at::Tensor made = gradient_of(own, d).to(at::kFloat);
  run.error = share_of(made, dx);
  const double along = (made * dx).sum().item<double>() / dx.square().sum().item<double>();
  const double bound = 0.01 + 4 * unit + 6 * run.error / std::sqrt(static_cast<double>(dx.numel()));
  if (!(std::abs(along - 1) <= bound)) {
    fail("bench", name + fmt::format("'s gradient must be right on average, within {:.3f} of 1", bound), fmt::format("{:.4f}", along));
  }
  run.seconds = time_of([&] { gradient_of(result_of(c, d, saving), d); }, device, c.repeat);
  return run;
}

void run_bench_chain(const BenchChainCommand& c) {
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  if (c.norm == "none" && c.activation == "none") throw UsageError("[bench] there must be a norm or an activation, got neither");
  const at::Device device = use_device(c.device, "bench");
  const at::ScalarType type = c.dtype == "f32" ? at::kFloat : c.dtype == "f16" ? at::kHalf : at::kBFloat16;
  const ChainData data(c, device, type), exact = data.exact();
  const at::Tensor z = result_of(c, exact, nullptr), dx = gradient_of(z, exact);
  const ChainRun torchs = run_chain(c, data.for_torch(), nullptr, device, z.detach(), dx);
  std::vector<std::vector<std::string>> table{{"", "time", "of torch", "saved bytes", "fewer", "error"}};
  ordered_json results = ordered_json::array();
  const auto add = [&](const std::string& name, const ChainRun& run) {
    const double ratio = run.seconds / torchs.seconds, fewer = static_cast<double>(torchs.bytes) / static_cast<double>(run.bytes);
    table.push_back({name, fmt::format("{:.3f} ms", run.seconds * 1e3), fmt::format("{:.2f}x", ratio), grouped(run.bytes),
                     fmt::format("{:.2f}x", fewer), fmt::format("{:.1e}", run.error)});
    results.push_back(
        {{"method", name}, {"seconds", run.seconds}, {"ratio", ratio}, {"bytes", run.bytes}, {"fewer", fewer}, {"error", run.error}});
  };
  add("torch", torchs);
  for (const Method& method : methods_from(c.methods, validate)) {
    const SavePolicy saving{method, "chain"};
    add(method.name, run_chain(c, data, &saving, device, z.detach(), dx));
  }
  if (c.json != "-") {
    fmt::print("{} norm, {} of {} × {} {}, forward and backward; {}\n\n", c.norm, c.activation, grouped(c.rows), grouped(c.channels),
               c.dtype, device.is_cuda() ? gpu_name() : "CPU");
    print_table(table);
  }
  if (c.json.empty()) return;
  write_json(c.json,
             {{"rows", c.rows},
              {"channels", c.channels},
              {"norm", c.norm},
              {"activation", c.activation},
              {"dtype", c.dtype},
              {"device", c.device},
              {"machine", machine_json(c.device)},
              {"results", results}},
             "bench");
}

}  // namespace

void add_bench_chain(CLI::App& bench) {
  const auto c = std::make_shared<BenchChainCommand>();
  CLI::App* chain = bench.add_subcommand("chain", "A norm and an activation, forward and backward, beside torch's own");
  chain->add_option("--rows", c->rows, "Rows of x")->transform(whole_number(1, 1 << 24))->capture_default_str();
  chain->add_option("--channels", c->channels, "Values a row")->transform(whole_number(1, 1 << 20))->capture_default_str();
  chain->add_option("--norm", c->norm, "Norm of the rows")->check(CLI::IsMember({"none", "layer", "rms"}))->capture_default_str();
  chain->add_option("--activation", c->activation, "What follows the norm")
      ->check(CLI::IsMember({"none", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "relu", "leaky_relu", "elu"}))
      ->capture_default_str();
  chain->add_option("--dtype", c->dtype, "Type of the values")->check(CLI::IsMember({"f32", "f16", "bf16"}))->capture_default_str();
  chain->add_option("--device", c->device, "Where to compute")->check(device_name())->capture_default_str();
  chain->add_option("--methods", c->methods, "What is kept, as for train: methods in turn")->capture_default_str();
  chain->add_option("--repeat", c->repeat, "Timed runs of which the median counts")->check(CLI::Range(1, 100000))->capture_default_str();
  chain->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
  chain->footer(
      "\nChecked first, against torch in float32: the result within rounding, the gradient of x right on average.\n"
      "  of torch     time beside torch's own functions with weights of the values' type\n"
      "  saved bytes  all that backward reads, x itself included where it is kept\n"
      "  fewer        torch's saved bytes over these\n"
      "  error        of x's gradient in one pass, relative: the codes' noise\n"
      "\nExamples:\n  satchel bench chain --rows 1024\n  satchel bench chain --device cuda --methods \"fp32;satchel;satchel,norm_bits=1\"\n"
      "  satchel bench chain --norm rms --activation silu --dtype f32 --json chain.json");
  chain->callback([c] { run_bench_chain(*c); });
}

}  // namespace satchel::tool
