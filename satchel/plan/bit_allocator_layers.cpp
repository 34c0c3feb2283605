#include <algorithm>
#include <cmath>
#include <numeric>

#include "satchel/core/allocate.h"
#include "satchel/plan/bit_allocator.h"

namespace satchel {
namespace {

constexpr size_t kPortions = 8;  // a layer's samples, sorted, get bits in so many portions: its mean is a multiple of an eighth

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

/// Means of the inputs or of the images.
void allocate(const std::vector<LayerNeed>& layers, bool images, int least, int most, std::vector<double>& means) {
  std::vector<Portion> portions;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].values > 0 && layers[l].map == images) add_portions(l, layers[l].sensitivity, portions);
  }
  if (portions.empty()) return;
  std::vector<double> sensitivity;
  std::vector<int64_t> weight;
  double budget = 0;
  for (const Portion& p : portions) {
    sensitivity.push_back(p.sensitivity);
    weight.push_back(p.samples * layers[p.layer].values);
    budget += static_cast<double>(weight.back()) * layers[p.layer].base;
  }
  // Of images only what the third bit gains decides: with two choices the rest is the same sum for all.
  const Allocation bits = allocate_bits(sensitivity, weight, static_cast<int64_t>(std::floor(budget)), least, most);
  std::vector<int64_t> spent(layers.size()), samples(layers.size());
  for (size_t p = 0; p < portions.size(); ++p) {
    spent[portions[p].layer] += bits.bits[p] * portions[p].samples;
    samples[portions[p].layer] += portions[p].samples;
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    if (samples[l] > 0) means[l] = static_cast<double>(spent[l]) / static_cast<double>(samples[l]);
  }
}

}  // namespace

std::vector<double> allocate_layers(const std::vector<LayerNeed>& layers) {
  std::vector<double> means;
  for (const LayerNeed& layer : layers) means.push_back(layer.base);
  allocate(layers, /*images=*/false, 1, 8, means);
  allocate(layers, /*images=*/true, 2, 3, means);
  return means;
}

}  // namespace satchel
