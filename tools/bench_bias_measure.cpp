#include "tools/bench_bias_measure.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "satchel/core/error.h"
#include "tools/bench_bias_functions.h"
#include "tools/bench_bias_nets.h"

namespace satchel::tool {
namespace {

constexpr int kTrainingSteps = 30;
constexpr double kRate = 0.05, kMomentum = 0.9, kMostStep = 1.0;  // kMostStep: longest gradient, as clipping has it
/// Other masks would be off by about 1. One value of many that float32's rounding puts on the other side of its ReLU was 3e-4.
constexpr double kUnrounded = 2e-3;

/// x/spread, where a spread of 0 makes anything but 0 certain.
double over(double x, double spread) {
  if (spread > 0) return x / spread;
  return x == 0 ? 0 : std::copysign(std::numeric_limits<double>::infinity(), x);
}

double norm_of(const at::Tensor& x) { return x.norm().item<double>(); }

}  // namespace

bool TensorBias::is_biased() const { return !(std::abs(t) <= kMostBias && z <= kMostBias); }

TensorBias bias_of(const at::Tensor& given, const at::Tensor& gradients, double rounding) {
  const at::Tensor errors = given.to(at::kCPU, at::kDouble), truth = gradients.to(at::kCPU, at::kDouble);
  const auto count = static_cast<double>(errors.size(0));
  TensorBias b;
  b.values = errors.size(1);
  b.passes = errors.size(0);
  const at::Tensor sizes = truth.norm(2, at::IntArrayRef{1}, true);
  b.gradient = sizes.mean().item<double>();
  const at::Tensor along = (errors * truth / sizes.clamp_min(1e-300)).sum(at::IntArrayRef{1});
  const double mean = along.mean().item<double>(), free = rounding * b.gradient;
  b.t = over(std::copysign(std::max(0.0, std::abs(mean) - free), mean), std::sqrt(along.var().item<double>() / count));

  const at::Tensor products = errors.matmul(errors.t());  // ⟨e_j, e_k⟩
  const double squares = products.trace().item<double>();
  products.fill_diagonal_(0);
  const double pairs = count * (count - 1), of_pairs = products.sum().item<double>() / pairs;
  // Of independent errors with mean 0 two different pairs' products are uncorrelated, and each pair is there twice.
  const double spread = std::sqrt(2 * products.square().sum().item<double>()) / pairs;
  b.z = over(of_pairs <= free * free ? std::min(of_pairs, 0.0) : of_pairs - free * free, spread);
  b.noise = over(std::sqrt(squares / count), b.gradient);
  b.bias = over(std::sqrt(std::max(of_pairs, 0.0)), b.gradient);
  const at::Tensor got = errors + truth, dots = (got * truth).sum(at::IntArrayRef{1}, true);
  b.variance = over(errors.var(at::IntArrayRef{0}).sum().item<double>(), b.gradient * b.gradient);
  b.cosine = (dots / (got.norm(2, at::IntArrayRef{1}, true) * sizes).clamp_min(1e-300)).mean().item<double>();
  return b;
}

struct BiasProbe::State {
  const BiasNet& net;
  NetLoss loss;
  at::Device device;
  NetData data;
  NetWeights weights;
  std::vector<at::Tensor> truth;  // where masks are the same in every pass
  std::vector<double> unrounded;

  State(const BiasNet& n, NetLoss l, at::Device d) : net(n), loss(l), device(d), data(data_of(n, d)), weights(7, d) {}

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> list;
    for (const auto& [name, tensor] : weights.all()) list.push_back(tensor);
    return list;
  }

  std::vector<at::Tensor> gradients(NetFunctions& f) {
    const at::Tensor out = net.forward(f, weights, data);
    const at::Tensor value = loss == NetLoss::cross_entropy ? at::cross_entropy_loss(out, data.labels) : at::mse_loss(out, data.targets);
    return torch::autograd::grad({value}, parameters());
  }

  std::vector<at::Tensor> torchs(uint64_t pass) {
    if (!net.mask_moves && !truth.empty()) return truth;
    const auto f = torch_functions(pass, device);
    std::vector<at::Tensor> g = gradients(*f);
    if (!net.mask_moves) truth = g;
    return g;
  }

  std::vector<at::Tensor> satchels(const Method& method, uint64_t pass) {
    const auto f = satchel_functions(method, pass, device);
    return gradients(*f);
  }

  void train() {
    std::vector<at::Tensor> speed;
    for (int step = 0; step < kTrainingSteps; ++step) {
      const auto f = torch_functions(static_cast<uint64_t>(step), device);
      const std::vector<at::Tensor> g = gradients(*f);
      double square = 0;
      for (const at::Tensor& t : g) square += t.square().sum().item<double>();
      const double scale = std::min(1.0, kMostStep / std::sqrt(square));
      const std::vector<at::Tensor> all = parameters();
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < all.size(); ++i) {
        if (step == 0) speed.push_back(at::zeros_like(all[i]));
        speed[i].mul_(kMomentum).add_(g[i], scale);
        all[i].detach().sub_(speed[i], kRate);
      }
    }
  }
};

BiasProbe::BiasProbe(const BiasNet& net, NetLoss loss, at::Device device) : state_(std::make_unique<State>(net, loss, device)) {
  state_->train();
}
BiasProbe::~BiasProbe() = default;
BiasProbe::BiasProbe(BiasProbe&&) noexcept = default;

const std::vector<double>& BiasProbe::check_unrounded() {
  State& s = *state_;
  if (!s.unrounded.empty()) return s.unrounded;
  constexpr uint64_t kPass = 1;
  const std::vector<at::Tensor> want = s.torchs(kPass), got = s.satchels(parse_method("satchel,bits=32"), kPass);
  for (size_t i = 0; i < want.size(); ++i) {
    s.unrounded.push_back(over(norm_of(got[i] - want[i]), norm_of(want[i])));
    if (!(s.unrounded[i] <= kUnrounded)) {
      fail("bench", "at 32 bits the gradient of " + s.weights.all()[i].first + " of '" + s.net.name + "' must be torch's within 2e-3",
           s.unrounded[i]);
    }
  }
  return s.unrounded;
}

std::vector<TensorBias> BiasProbe::measure(const Method& method, int64_t passes, uint64_t first_pass) {
  State& s = *state_;
  const std::vector<double> unrounded = check_unrounded();
  const auto& all = s.weights.all();
  std::vector<at::Tensor> errors, truths;
  for (const auto& [name, tensor] : all) {
    const auto options = at::TensorOptions(s.device).dtype(at::kFloat);
    errors.push_back(at::empty({passes, tensor.numel()}, options));
    truths.push_back(at::empty({s.net.mask_moves ? passes : 1, tensor.numel()}, options));
  }
  for (int64_t j = 0; j < passes; ++j) {
    const uint64_t pass = first_pass + static_cast<uint64_t>(j);
    const std::vector<at::Tensor> want = s.torchs(pass), got = s.satchels(method, pass);
    for (size_t i = 0; i < all.size(); ++i) {
      errors[i][j].copy_((got[i] - want[i]).reshape({-1}));
      if (s.net.mask_moves || j == 0) truths[i][j].copy_(want[i].reshape({-1}));
    }
  }
  std::vector<TensorBias> found;
  for (size_t i = 0; i < all.size(); ++i) {
    found.push_back(bias_of(errors[i], truths[i], std::max(2 * unrounded[i], 0x1p-20)));
    found.back().name = all[i].first;
  }
  return found;
}

}  // namespace satchel::tool
