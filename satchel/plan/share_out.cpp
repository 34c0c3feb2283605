#include "satchel/plan/share_out.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "satchel/core/allocate.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr size_t kPortions = 8;  // a layer's samples, sorted, are shared out to in so many portions: its mean is a multiple of an eighth

struct Portion {
  size_t layer;
  double sensitivity;
  int64_t samples;
};

/// A layer's samples in order of their sensitivities, in up to kPortions portions.
void add_portions(size_t layer, std::vector<double> c, std::vector<Portion>& portions) {
  for (double& v : c) v = std::isfinite(v) && v > 0 ? v : 0;
  std::ranges::sort(c);
  const size_t count = std::min(kPortions, c.size());
  for (size_t p = 0; p < count; ++p) {
    const auto from = c.begin() + static_cast<std::ptrdiff_t>(p * c.size() / count);
    const auto to = c.begin() + static_cast<std::ptrdiff_t>((p + 1) * c.size() / count);
    portions.push_back({layer, std::accumulate(from, to, 0.0), to - from});
  }
}

}  // namespace

std::vector<double> share_out_layers(const std::vector<LayerNeed>& layers) {
  std::vector<double> means;
  std::vector<Portion> portions;
  for (size_t l = 0; l < layers.size(); ++l) {
    means.push_back(layers[l].base);
    if (layers[l].values > 0) add_portions(l, layers[l].sensitivity, portions);
  }
  if (portions.empty()) return means;
  std::vector<double> sensitivity;
  std::vector<int64_t> weight;
  double budget = 0;
  for (const Portion& p : portions) {
    sensitivity.push_back(p.sensitivity);
    weight.push_back(p.samples * layers[p.layer].values);
    budget += static_cast<double>(weight.back()) * layers[p.layer].base;
  }
  const Allocation bits = allocate_bits(sensitivity, weight, static_cast<int64_t>(std::floor(budget)));
  std::vector<int64_t> spent(layers.size()), samples(layers.size());
  for (size_t p = 0; p < portions.size(); ++p) {
    spent[portions[p].layer] += bits.bits[p] * portions[p].samples;
    samples[portions[p].layer] += portions[p].samples;
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    if (samples[l] > 0) means[l] = static_cast<double>(spent[l]) / static_cast<double>(samples[l]);
  }
  return means;
}

struct ShareOut::Layer {
  std::string name;
  double base = 2, mean = 2;
  int64_t values = 0;       // a sample, so far in this step
  int64_t last_values = 0;  // … in the step before
  at::Tensor squares;       // of this step's gradient, float32[n]
  at::Tensor sensitivity;   // C_n of this step, float64[n]
};

/// Sensitivities on their way to the host.
struct ShareOut::Arriving {
  at::Tensor host;
  std::optional<c10::Event> copied;  // none: they are here
  struct Piece {
    size_t layer;
    int64_t values, first, count;
  };
  std::vector<Piece> pieces;
};

ShareOut::ShareOut(const ShareOutOptions& options) : options_(options) {
  if (options.samples < 0) fail("share_out", "samples must not be negative", options.samples);
  if (options.every < 1) fail("share_out", "every must be 1 step or more", options.every);
}

ShareOut::~ShareOut() = default;

BitShare ShareOut::input(const std::string& name, int64_t samples, int64_t values, double mean_bits, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto layer = std::ranges::find(layers_, name, &Layer::name);
  if (layer == layers_.end()) {
    layer = layers_.emplace(layers_.end());
    layer->name = name;
    layer->base = 0;
  }
  if (layer->base != mean_bits) layer->base = layer->mean = mean_bits;
  layer->values += values;
  last_ = layer - layers_.begin();
  BitShare share{layer->mean, {}, last_};
  const bool known = weights_.defined() && last_ < weights_.size(0) && samples == weights_.size(1) && weights_.device() == device;
  if (known) share.weights = weights_.select(0, last_);
  return share;
}

double ShareOut::norm(int64_t values, double mean_bits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_ < 0 || layers_[static_cast<size_t>(last_)].base != mean_bits) return mean_bits;
  Layer& before = layers_[static_cast<size_t>(last_)];
  before.values += values;
  return before.mean;
}

bool ShareOut::wants_gradient(int64_t) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return collects_ || !indices_.empty();
}

void ShareOut::saw_gradient(int64_t at, const at::Tensor& squares, const at::Tensor& ranges, double factor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (at < 0 || at >= static_cast<int64_t>(layers_.size())) return;
  Layer& layer = layers_[static_cast<size_t>(at)];
  const bool again = layer.squares.defined() && layer.squares.sizes() == squares.sizes();  // a second reader of the same save
  layer.squares = again ? layer.squares.add(squares) : squares;
  if (!collects_) return;
  const bool by_sample = static_cast<int64_t>(indices_.size()) == squares.numel();
  layer.sensitivity = ranges.mul(by_sample ? layer.squares : layer.squares.mean()).mul_(factor);
}

void ShareOut::set_samples(std::span<const int64_t> indices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t i : indices) {
    if (i < 0) fail("share_out", "a sample's number must not be negative", i);
  }
  indices_.assign(indices.begin(), indices.end());
  at_.reset();
  weights_.reset();
  if (!indices_.empty()) {
    options_.samples = std::max(options_.samples, *std::ranges::max_element(indices_) + 1);
    look_up_samples();
  }
}

/// s_n of this batch: running means, and for samples never seen the mean of the others.
void ShareOut::look_up_samples() {
  if (!averages_.defined()) return;
  if (averages_.size(1) < options_.samples) {
    const at::Tensor more = at::zeros({averages_.size(0), options_.samples - averages_.size(1)}, averages_.options());
    averages_ = at::cat({averages_, more}, 1);
  }
  const bool cuda = averages_.is_cuda();
  const auto count = static_cast<int64_t>(indices_.size());
  const at::Tensor host = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(cuda));
  std::ranges::copy(indices_, host.mutable_data_ptr<int64_t>());
  at_ = host.to(averages_.device(), /*non_blocking=*/true);
  const at::Tensor s = averages_.index_select(1, at_).to(at::kFloat);
  const at::Tensor seen = s.gt(0);
  const at::Tensor mean = s.sum(1, /*keepdim=*/true).div_(seen.sum(1, /*keepdim=*/true).clamp_min_(1));
  weights_ = at::where(seen, s, at::where(mean.gt(0), mean, 1)).contiguous();
}

/// Running means with factor ½ of the samples whose gradients were seen.
void ShareOut::move_averages() {
  const auto count = static_cast<int64_t>(indices_.size()), rows = static_cast<int64_t>(layers_.size());
  const auto fits = [&](const Layer& l) { return l.squares.defined() && l.squares.numel() == count; };
  const auto told = std::ranges::find_if(layers_, fits);
  if (count == 0 || told == layers_.end()) return;
  const bool moved = averages_.defined() && averages_.device() != told->squares.device();
  if (!averages_.defined() || moved || averages_.size(0) < rows) {
    const at::Tensor all = at::zeros({rows, options_.samples}, told->squares.options().dtype(at::kBFloat16));
    if (averages_.defined() && !moved) all.narrow(0, 0, averages_.size(0)).narrow(1, 0, averages_.size(1)).copy_(averages_);
    averages_ = all;
    look_up_samples();
  }
  const at::Tensor old = averages_.index_select(1, at_).to(at::kFloat);
  std::vector<at::Tensor> squares;
  for (int64_t l = 0; l < rows; ++l) squares.push_back(fits(layers_[l]) ? layers_[l].squares : old.select(0, l));
  const at::Tensor now = at::stack(squares);
  const at::Tensor next = at::where(old.gt(0), old.add(now).mul_(0.5), now);
  averages_.index_copy_(1, at_, at::where(next.isfinite(), next, old).to(at::kBFloat16));
}

void ShareOut::send_sensitivities() {
  auto sent = std::make_unique<Arriving>();
  std::vector<at::Tensor> all;
  int64_t first = 0;
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (!layers_[l].sensitivity.defined()) continue;
    const int64_t count = layers_[l].sensitivity.numel();
    if (!all.empty() && all.front().device() != layers_[l].sensitivity.device()) continue;
    all.push_back(layers_[l].sensitivity);
    sent->pieces.push_back({l, layers_[l].values, first, count});
    first += count;
  }
  if (all.empty()) return;
  const at::Tensor line = at::cat(all);
  if (line.is_cuda()) {
    sent->host = at::empty({first}, at::TensorOptions().dtype(at::kDouble).pinned_memory(true));
    sent->host.copy_(line, /*non_blocking=*/true);
    sent->copied.emplace(line.device().type());
    sent->copied->record(c10::impl::VirtualGuardImpl(line.device().type()).getStream(line.device()));
  } else {
    sent->host = line;
  }
  arriving_ = std::move(sent);
  collects_ = false;
}

void ShareOut::work_on_sensitivities() {
  const std::unique_ptr<Arriving> arrived = std::move(arriving_);
  if (arrived->copied) arrived->copied->synchronize();  // of the step before: a step's work is still queued
  const double* const c = arrived->host.const_data_ptr<double>();
  if (!std::all_of(c, c + arrived->host.numel(), [](double v) { return std::isfinite(v); })) {
    collects_ = true;  // an overflow: the next step tells more
    return;
  }
  std::vector<LayerNeed> needs(layers_.size());
  for (size_t l = 0; l < layers_.size(); ++l) needs[l].base = layers_[l].base;
  for (const Arriving::Piece& p : arrived->pieces) {
    needs[p.layer].values = p.values;
    needs[p.layer].sensitivity.assign(c + p.first, c + p.first + p.count);
  }
  means_ = std::async(std::launch::async, [needs = std::move(needs)] { return share_out_layers(needs); });
}

void ShareOut::obey() {
  const std::vector<double> means = means_.get();
  for (size_t l = 0; l < means.size(); ++l) layers_[l].mean = means[l];
  steps_ = 0;
}

void ShareOut::step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++steps_;
  move_averages();
  if (means_.valid()) {
    obey();
  } else if (arriving_ != nullptr) {
    work_on_sensitivities();
  } else if (collects_) {
    send_sensitivities();
  }
  collects_ = collects_ || (arriving_ == nullptr && !means_.valid() && steps_ >= options_.every - 3);
  for (Layer& layer : layers_) {
    layer.last_values = std::exchange(layer.values, 0);
    layer.squares.reset();
    layer.sensitivity.reset();
  }
  last_ = -1;
  indices_.clear();
  at_.reset();
  weights_.reset();
}

std::vector<LayerShare> ShareOut::layers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LayerShare> shares;
  for (const Layer& l : layers_) shares.push_back({l.name, l.last_values, l.mean});
  return shares;
}

double ShareOut::mean_bits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  double bits = 0, values = 0;
  for (const Layer& l : layers_) {
    bits += l.mean * static_cast<double>(l.last_values);
    values += static_cast<double>(l.last_values);
  }
  return values > 0 ? bits / values : 0;
}

}  // namespace satchel
