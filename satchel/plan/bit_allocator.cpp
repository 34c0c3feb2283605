#include "satchel/plan/bit_allocator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/plan/bit_allocator_parts.h"

namespace satchel {
RunningBitAllocator::RunningBitAllocator(const BitAllocatorOptions& options) : options_(options) {
  if (options.samples < 0) fail("bit_allocator", "samples must not be negative", options.samples);
  if (options.every < 1) fail("bit_allocator", "every must be 1 step or more", options.every);
}

RunningBitAllocator::~RunningBitAllocator() = default;

size_t RunningBitAllocator::layer_of(const std::string& name, double mean_bits, int64_t values) {
  auto layer = std::ranges::find(layers_, name, &Layer::name);
  if (layer == layers_.end()) {
    layer = layers_.emplace(layers_.end());
    layer->name = name;
    layer->base = 0;
  }
  if (layer->base != mean_bits) {
    layer->base = layer->mean = mean_bits;
    if (layer->map) slots_.reset();  // chosen by another mean: more samples, perhaps, than a plane has room for
  }
  layer->values += values;
  return static_cast<size_t>(layer - layers_.begin());
}

BitAllocation RunningBitAllocator::input(const std::string& name, int64_t samples, int64_t values, double mean_bits, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t layer = layer_of(name, mean_bits, values);
  last_ = static_cast<int64_t>(layer);
  BitAllocation share{layers_[layer].mean, {}, last_};
  const bool known = weights_.defined() && last_ < weights_.size(0) && samples == weights_.size(1) && weights_.device() == device;
  if (known) share.weights = weights_.select(0, last_);
  return share;
}

BitAllocation RunningBitAllocator::image(const std::string& name, int64_t samples, int64_t values, double mean_bits, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t layer = layer_of(name, mean_bits, values);
  layers_[layer].map = true;
  BitAllocation share{layers_[layer].mean, {}, static_cast<int64_t>(layer)};
  share.count = samples_of_three(share.mean_bits, samples);
  if (share.count > 0 && share.count < samples) share.slots = slots_of(layer, samples, share.count, device);
  return share;
}

/// A copy: the save's own, so that its bytes are where a report says.
at::Tensor RunningBitAllocator::slots_of(size_t layer, int64_t samples, int64_t count, at::Device device) const {
  const auto row = static_cast<int64_t>(layer);
  if (slots_.defined() && row < slots_.size(0) && slots_.size(1) == samples && slots_.device() == device) {
    return slots_.select(0, row).clone();
  }
  const at::Tensor all = at::arange(samples, at::TensorOptions().dtype(at::kInt).device(device));  // nothing is known: the first ones
  return all.masked_fill_(all.ge(count), -1);
}

double RunningBitAllocator::norm(int64_t values, double mean_bits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_ < 0 || layers_[static_cast<size_t>(last_)].base != mean_bits) return mean_bits;
  Layer& before = layers_[static_cast<size_t>(last_)];
  before.values += values;
  return before.mean;
}

/// Of maps in steps that collect alone: the norms of all gradients are a pass over them.
bool RunningBitAllocator::wants_gradient(int64_t layer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool map = layer >= 0 && layer < static_cast<int64_t>(layers_.size()) && layers_[static_cast<size_t>(layer)].map;
  return collects_ || (!map && !indices_.empty());
}

void RunningBitAllocator::set_gradient_scale(at::Tensor scale) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (scale.defined() && scale.numel() != 1) fail("bit_allocator", "a gradient scale must be one number", scale.sizes());
  scale_ = std::move(scale);
}

void RunningBitAllocator::saw_gradient(int64_t at, const at::Tensor& squares, const at::Tensor& ranges, double factor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (at < 0 || at >= static_cast<int64_t>(layers_.size())) return;
  Layer& layer = layers_[static_cast<size_t>(at)];
  const bool again = layer.squares.defined() && layer.squares.sizes() == squares.sizes();  // a second reader of the same save
  const at::Tensor own = scale_.defined() ? squares.div(scale_).div_(scale_) : squares;
  layer.squares = again ? layer.squares.add(own) : own;
  if (!collects_) return;
  const bool by_sample = static_cast<int64_t>(indices_.size()) == squares.numel();
  layer.sensitivity = ranges.mul(by_sample ? layer.squares : layer.squares.mean()).mul_(factor);
}

void RunningBitAllocator::set_samples(std::span<const int64_t> indices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t i : indices) {
    if (i < 0) fail("bit_allocator", "a sample's number must not be negative", i);
  }
  indices_.assign(indices.begin(), indices.end());
  at_.reset();
  weights_.reset();
  slots_.reset();
  if (!indices_.empty()) {
    options_.samples = std::max(options_.samples, *std::ranges::max_element(indices_) + 1);
    look_up_samples();
  }
}

/// s_n of this batch: running means, and for samples never seen the mean of the others.
void RunningBitAllocator::look_up_samples() {
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
  choose_samples();
}

/// The samples of this batch that count most in each map get its 3 bits; all on the device.
void RunningBitAllocator::choose_samples() {
  const int64_t rows = weights_.size(0), samples = weights_.size(1);
  const auto known = std::span(layers_).first(static_cast<size_t>(std::min<int64_t>(rows, static_cast<int64_t>(layers_.size()))));
  if (std::ranges::none_of(known, &Layer::map)) return;
  const at::Tensor counts = at::zeros({rows, 1}, at::TensorOptions().dtype(at::kLong).pinned_memory(weights_.is_cuda()));
  for (size_t l = 0; l < known.size(); ++l) {
    if (known[l].map) counts.mutable_data_ptr<int64_t>()[l] = samples_of_three(known[l].mean, samples);
  }
  const at::Tensor rank = at::argsort(at::argsort(weights_, /*stable=*/true, 1, /*descending=*/true), /*stable=*/true, 1);
  const at::Tensor chosen = rank.lt(counts.to(weights_.device(), /*non_blocking=*/true));
  slots_ = at::where(chosen, chosen.cumsum(1).sub_(1), -1).to(at::kInt);
}

/// Running means with factor ½ of the samples whose gradients were seen.
void RunningBitAllocator::move_averages() {
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
  for (int64_t l = 0; l < rows; ++l) {
    const Layer& layer = layers_[static_cast<size_t>(l)];
    const bool tells = fits(layer) && (!layer.map || layer.sensitivity.defined());
    squares.push_back(!tells ? old.select(0, l) : layer.map ? layer.sensitivity.to(at::kFloat) : layer.squares);
  }
  const at::Tensor now = at::stack(squares);
  const at::Tensor next = at::where(old.gt(0), old.add(now).mul_(0.5), now);
  averages_.index_copy_(1, at_, at::where(next.isfinite(), next, old).to(at::kBFloat16));
}

void RunningBitAllocator::send_sensitivities() {
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

void RunningBitAllocator::work_on_sensitivities() {
  const std::unique_ptr<Arriving> arrived = std::move(arriving_);
  if (arrived->copied) arrived->copied->synchronize();  // of the step before: a step's work is still queued
  const double* const c = arrived->host.const_data_ptr<double>();
  if (!std::all_of(c, c + arrived->host.numel(), [](double v) { return std::isfinite(v); })) {
    collects_ = true;  // an overflow: the next step tells more
    return;
  }
  std::vector<LayerNeed> needs(layers_.size());
  for (size_t l = 0; l < layers_.size(); ++l) {
    needs[l].base = layers_[l].base;
    needs[l].map = layers_[l].map;
  }
  for (const Arriving::Piece& p : arrived->pieces) {
    needs[p.layer].values = p.values;
    needs[p.layer].sensitivity.assign(c + p.first, c + p.first + p.count);
  }
  means_ = std::async(std::launch::async, [needs = std::move(needs)] { return allocate_layers(needs); }).share();
}

void RunningBitAllocator::obey() {
  const std::vector<double> means = means_.get();
  means_ = {};
  for (size_t l = 0; l < means.size(); ++l) layers_[l].mean = means[l];
  steps_ = 0;
}

void RunningBitAllocator::step() {
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
  slots_.reset();
}

std::vector<LayerBits> RunningBitAllocator::layers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LayerBits> shares;
  for (const Layer& l : layers_) shares.push_back({l.name, l.last_values, l.mean});
  return shares;
}

double RunningBitAllocator::mean_bits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  double bits = 0, values = 0;
  for (const Layer& l : layers_) {
    bits += l.mean * static_cast<double>(l.last_values);
    values += static_cast<double>(l.last_values);
  }
  return values > 0 ? bits / values : 0;
}

}  // namespace satchel
