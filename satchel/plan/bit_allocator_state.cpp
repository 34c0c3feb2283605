// What a checkpoint holds of a RunningBitAllocator: layers by name, what is on its way to a new allocation, and the samples' running means.
//
//   names          the layers' names, a line each            layers      layers × 4: base, mean, values, is a map
//   counters       steps since the last allocation, collects   averages    layers × samples of the data set
//   pieces, sensitivities   seen, not worked on yet           means       worked out, not obeyed yet
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <sstream>

#include "satchel/core/error.h"
#include "satchel/plan/bit_allocator_parts.h"

namespace satchel {
namespace {

using TensorMap = std::map<std::string, at::Tensor>;

template <class T>
at::Tensor line_of(const std::vector<T>& values, at::ScalarType type) {
  const at::Tensor line = at::empty({static_cast<int64_t>(values.size())}, type);
  std::ranges::copy(values, line.mutable_data_ptr<T>());
  return line;
}

template <class T>
std::vector<T> numbers_of(const at::Tensor& t) {
  const at::Tensor line = t.contiguous();
  const T* const from = line.const_data_ptr<T>();
  return {from, from + line.numel()};
}

/// The tensor of that name, of this type and so many dimensions; undefined where there is none.
at::Tensor find(const TensorMap& state, const std::string& name, at::ScalarType type, int64_t dims) {
  const auto found = state.find(name);
  if (found == state.end()) return {};
  if (found->second.scalar_type() != type || found->second.dim() != dims) {
    fail("resume", "shares." + name + " must be as a checkpoint has it", found->second.toString());
  }
  return found->second.to(at::kCPU);
}

at::Tensor needed(const TensorMap& state, const std::string& name, at::ScalarType type, int64_t dims) {
  const at::Tensor t = find(state, name, type, dims);
  if (!t.defined()) fail("resume", "checkpoint must hold shares." + name, "none");
  return t;
}

void require(bool right, const char* rule, int64_t got) {
  if (!right) fail("resume", rule, got);
}

}  // namespace

TensorMap RunningBitAllocator::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TensorMap all;
  std::vector<uint8_t> names;
  std::vector<double> numbers;
  for (const Layer& l : layers_) {
    names.insert(names.end(), l.name.begin(), l.name.end());
    names.push_back('\n');
    numbers.insert(numbers.end(), {l.base, l.mean, static_cast<double>(l.last_values), l.map ? 1.0 : 0.0});
  }
  all["names"] = line_of(names, at::kByte);
  all["layers"] = line_of(numbers, at::kDouble).view({-1, 4});
  all["counters"] = line_of(std::vector<int64_t>{steps_, collects_ ? 1 : 0}, at::kLong);
  if (averages_.defined()) all["averages"] = averages_.to(at::kCPU);
  if (means_.valid()) all["means"] = line_of(means_.get(), at::kDouble);
  if (arriving_ != nullptr) {
    if (arriving_->copied) arriving_->copied->synchronize();
    std::vector<int64_t> pieces;
    for (const Arriving::Piece& p : arriving_->pieces) {
      pieces.insert(pieces.end(), {static_cast<int64_t>(p.layer), p.values, p.first, p.count});
    }
    all["pieces"] = line_of(pieces, at::kLong).view({-1, 4});
    all["sensitivities"] = arriving_->host.clone();
  }
  return all;
}

std::vector<RunningBitAllocator::Layer> RunningBitAllocator::layers_from(const TensorMap& state) {
  const std::vector<uint8_t> bytes = numbers_of<uint8_t>(needed(state, "names", at::kByte, 1));
  const at::Tensor rows = needed(state, "layers", at::kDouble, 2);
  const auto count = static_cast<int64_t>(std::ranges::count(bytes, '\n'));
  require(rows.size(0) == count && rows.size(1) == 4, "shares.layers must be a row a name", rows.size(0));
  std::vector<Layer> layers(static_cast<size_t>(count));
  std::istringstream names(std::string(bytes.begin(), bytes.end()));
  const std::vector<double> numbers = numbers_of<double>(rows);
  for (size_t l = 0; l < layers.size(); ++l) {
    const double base = numbers[4 * l], mean = numbers[4 * l + 1], values = numbers[4 * l + 2];
    const bool right = base >= 1 && base <= 8 && mean >= 1 && mean <= 8 && values >= 0 && values < 0x1p60;
    require(right, "shares.layers must have 1 to 8 bits and 0 values or more", static_cast<int64_t>(l));
    Layer& layer = layers[l];
    std::getline(names, layer.name);
    layer.base = base;
    layer.mean = mean;
    layer.last_values = static_cast<int64_t>(values);
    layer.map = numbers[4 * l + 3] != 0;
  }
  return layers;
}

std::unique_ptr<RunningBitAllocator::Arriving> RunningBitAllocator::arriving_from(const TensorMap& state, int64_t layers) {
  const at::Tensor pieces = find(state, "pieces", at::kLong, 2), line = find(state, "sensitivities", at::kDouble, 1);
  require(pieces.defined() == line.defined() && (!pieces.defined() || pieces.size(1) == 4), "shares.pieces must be rows of 4", layers);
  if (!pieces.defined()) return nullptr;
  auto arriving = std::make_unique<Arriving>();
  arriving->host = line.contiguous();
  const std::vector<int64_t> rows = numbers_of<int64_t>(pieces);
  for (size_t p = 0; p < rows.size(); p += 4) {
    const int64_t layer = rows[p], values = rows[p + 1], first = rows[p + 2], count = rows[p + 3];
    const bool within = first >= 0 && count >= 0 && first <= line.numel() && count <= line.numel() - first;
    require(within && layer >= 0 && layer < layers && values >= 0, "shares.pieces must lie within shares.sensitivities", layer);
    arriving->pieces.push_back({static_cast<size_t>(layer), values, first, count});
  }
  return arriving;
}

void RunningBitAllocator::restore(const TensorMap& state, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Layer> layers = layers_from(state);
  const auto count = static_cast<int64_t>(layers.size());
  std::unique_ptr<Arriving> arriving = arriving_from(state, count);
  const std::vector<int64_t> counters = numbers_of<int64_t>(needed(state, "counters", at::kLong, 1));
  const at::Tensor averages = find(state, "averages", at::kBFloat16, 2), means = find(state, "means", at::kDouble, 1);
  require(counters.size() == 2 && counters[0] >= 0, "shares.counters must be two numbers", static_cast<int64_t>(counters.size()));
  require(!averages.defined() || averages.size(0) <= count, "shares.averages must be a row a layer", count);
  require(!means.defined() || means.numel() <= count, "shares.means must be a number a layer", count);
  require(!means.defined() || means.ge(1).logical_and(means.le(8)).all().item<bool>(), "shares.means must be 1 to 8 bits", count);
  layers_ = std::move(layers);
  slots_.reset();  // chosen by the means of before
  arriving_ = std::move(arriving);
  steps_ = counters[0];
  collects_ = counters[1] != 0;
  averages_ = averages.defined() ? averages.to(device) : averages;
  if (averages.defined()) options_.samples = std::max(options_.samples, averages.size(1));
  means_ = {};
  if (means.defined()) {
    std::promise<std::vector<double>> ready;
    ready.set_value(numbers_of<double>(means));
    means_ = ready.get_future().share();
  }
}

}  // namespace satchel
