#include "satchel/plan/image_step.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include "satchel/core/layout.h"
#include "satchel/core/per_sample.h"
#include "satchel/core/stretch.h"
#include "satchel/plan/kept_line.h"

namespace satchel {
namespace {

constexpr int64_t kWorkspace = int64_t{32} << 20;  // of cuBLAS on a GPU of compute capability 9
constexpr int64_t kParts = 4;
constexpr size_t kInFlight = 2;                // saves on their way to or from host memory at once (autograd/host_offload.h)
constexpr int64_t kLeastOffloaded = 64 << 10;  // bytes; smaller ones stay on the device (autograd/host_offload.h)

/// Lines of fp32 that are maps which torch holds, not memory of their own.
bool is_image(const SavedTensor& line) { return line.kind == "input" || line.kind == "norm" || line.kind == "activation"; }

/// Samples that a convolution decodes at a time, as InputSave::samples_at_a_time().
int64_t samples_at_a_time(const ImageMap& map, int64_t images, int64_t most) {
  const int64_t some = std::clamp<int64_t>(most / std::max<int64_t>(map.values(), 1), 1, images);
  const int64_t even = ceil_div(images, ceil_div(images, some)), step = 8 / std::gcd<int64_t, int64_t>(map.height * map.width, 8);
  return std::min(images, ceil_div(even, step) * step);
}

}  // namespace

bool is_offloaded(const Method& method, const SavedTensor& line) {
  const std::vector<Keep> input = keeps_of(method, {Role::weight_input});
  return !input.empty() && input.front().offload && (line.kind == "input" || line.kind == "norm") && line.bits <= kMostSampleBits &&
         line.bytes >= kLeastOffloaded;
}

ImageSteps::How::How(const Method& method) : baseline(is_baseline(method)), shares(reads_producer(method)) {
  if (baseline) return;
  Site norm;
  norm.norm = Norm::batch;
  norm.activation = Activation::relu;
  norm.image = true;
  const std::vector<Keep> input = keeps_of(method, {Role::weight_input}), after = keeps_of(method, norm);
  projects = std::holds_alternative<RandomProjection>(input.front().spec.transform);
  samples_have_bits = has_per_sample_bits(input.front());
  const Keep* own = find(after, Kind::norm);
  fuses_norms = shares ? find(after, Kind::shared)->spec.side != Side::none : own->spec.bits != kKeep;
  norm.activation = Activation::none;
  norm.next_reads = false;
  const std::vector<Keep> alone = keeps_of(method, norm);
  const Keep* alone_norm = find(alone, Kind::norm);
  fuses_alone = shares && fuses_norms && alone_norm != nullptr && alone_norm->spec.bits == 2 && alone_norm->spec.levels != Levels::even;
  sums_by_parts = shares && fuses_norms && find(after, Kind::shared)->mean_bits == 0;
  norm_samples_have_bits = !shares && has_per_sample_bits(*own);
}

ImageSteps::ImageSteps(const ImageLayers& model, const BatchShape& batch, const Method& method, CachingAllocator& allocator,
                       Tensor& workspace)
    : model_(model),
      batch_(batch),
      method_(method),
      allocator_(allocator),
      workspace_(workspace),
      width_(batch.half ? 2 : 4),
      saves_(saves_by_layer(model, batch, method)),
      how_(method),
      last_(model.maps.size(), 0),
      maps_(model.maps.size()),
      kept_(model.layers.size()),
      gradients_(model.maps.size()) {
  for (size_t i = 0; i < model.layers.size(); ++i) {
    for (const int read : model.layers[i].inputs) last_[static_cast<size_t>(read)] = i;
    if (i > 0 && is_sum_by_parts(i)) last_[static_cast<size_t>(model.layers[i - 1].inputs[0])] = i;
    last_[static_cast<size_t>(model.layers[i].held)] = i;
  }
  for (int copy = 0; copy < 2; ++copy) {  // weights, momentum
    for (const ImageLayer& layer : model.layers) {
      if (layer.parameters > 0 && (copy == 0 || !is_constant(layer.output))) standing_.push_back(take(4 * layer.parameters));
    }
  }
  map(0) = take(4 * values(0));
}

void ImageSteps::run() {
  weight_gradients_.clear();
  for (size_t i = 0; i < model_.layers.size(); ++i) {
    how_.baseline ? forward_plain(i) : forward(i);
    for (size_t m = 1; m + 1 < maps_.size(); ++m) {
      if (last_[m] == i) maps_[m].reset();
    }
  }
  loss();
  for (size_t i = model_.layers.size(); i-- > 0;) {
    fetch(i);
    backward(i);
    kept_[i].clear();
    std::erase_if(offloaded_, [i](const HostOffload& s) { return s.layer == i; });
  }
}

/// Saves of a layer that are no maps.
void ImageSteps::keep(size_t i) {
  for (const SavedTensor& line : saves_[i]) {
    if (how_.baseline && is_image(line)) continue;
    Tensor memory = take(line.bytes);
    if (!is_offloaded(method_, line)) {
      kept_[i].push_back(std::move(memory));
      continue;
    }
    offloaded_.push_back({i, line.bytes, std::move(memory)});
    if (offloaded_.size() > kInFlight) offloaded_[offloaded_.size() - kInFlight - 1].here.reset();
  }
}

void ImageSteps::forward(size_t i) {
  using enum LayerKind;
  const ImageLayer& layer = model_.layers[i];
  const int in = layer.inputs[0], out = layer.output;
  switch (layer.kind) {
    case norm: return forward_norm(i);
    case conv:
    case linear: {
      const Tensor cast = in == 0 && batch_.half ? take_map(0) : nullptr;
      Tensor ranges = std::exchange(passed_ranges_, nullptr);
      if (ranges == nullptr && how_.samples_have_bits && !saves_[i].empty()) ranges = take(range_bytes(in));
      keep(i);
      ranges.reset();
      map(out) = is_sum_by_parts(i + 1) ? nullptr : take_map(out);
      return;
    }
    case relu:
      keep(i);
      map(out) = take_map(out);
      return;
    case sum:  // in place, where nobody else reads the branch
      map(out) = last_[static_cast<size_t>(in)] == i ? std::exchange(map(in), nullptr) : take_map(out);
      return;
    default: map(out) = take_map(out); keep(i);
  }
}

/// Is layer i a norm with a sum whose input never stands whole?
bool ImageSteps::is_sum_by_parts(size_t i) const {
  if (i >= model_.layers.size()) return false;
  const ImageLayer& layer = model_.layers[i];
  return layer.kind == LayerKind::norm && layer.inputs.size() > 1 && !is_constant(layer.output) && adds_by_parts(i) &&
         bytes(layer.output) >= kConvByPartsFrom;
}
/// … may it, or its input's gradient, go in parts?
bool ImageSteps::adds_by_parts(size_t i) const { return how_.sums_by_parts && model_.layers[i - 1].output == model_.layers[i].inputs[0]; }

void ImageSteps::forward_norm(size_t i) {
  const ImageLayer& layer = model_.layers[i];
  const int in = layer.inputs[0], out = layer.output;
  if (is_sum_by_parts(i)) {
    const Tensor part = take(ceil_div(bytes(in), kParts));
    keep(i);
    map(out) = std::exchange(map(layer.inputs[1]), nullptr);
    return;
  }
  if (is_constant(out)) {  // by running statistics
    map(out) = take_map(out);
    return;
  }
  if (how_.shares && !layer.relu && !how_.fuses_alone) {
    map(out) = take_map(out);
    const Tensor normalised = take_map(out);
    keep(i);
    return;
  }
  // Which codes the fused passes serve; others make the normalised values first and a map of their own.
  const Tensor normalised = how_.fuses_norms ? nullptr : take(4 * values(in));
  Tensor ranges = how_.norm_samples_have_bits ? take(range_bytes(in)) : nullptr;
  keep(i);
  map(out) = how_.fuses_norms && last_[static_cast<size_t>(in)] == i ? std::exchange(map(in), nullptr) : take_map(out);
  if (how_.norm_samples_have_bits) passed_ranges_ = take(range_bytes(out));
}

/// torch's functions: each map that backward reads is held.
void ImageSteps::forward_plain(size_t i) {
  using enum LayerKind;
  const ImageLayer& layer = model_.layers[i];
  const int in = layer.inputs[0], out = layer.output;
  const auto hold = [&](int held) {
    if (!is_constant(out)) kept_[i].push_back(map(held));
  };
  const ImageMap &read = model_.maps[static_cast<size_t>(in)], &made = model_.maps[static_cast<size_t>(out)];
  const bool averages =
      layer.kind == average_pool && !(layer.window == 1 && made.channels == read.channels);  // to more than one value a map
  const bool reads_input = layer.kind == relu6 || (layer.kind == smooth && layer.smooth != Smooth::sigmoid);
  Tensor cast = in == 0 && batch_.half ? take_map(0) : nullptr;  // autocast's copy of the images
  if (in == 0) {
    if (cast != nullptr && !is_constant(out)) kept_[i].push_back(cast);
  } else if (layer.kind == conv || layer.kind == linear || layer.kind == norm || layer.kind == max_pool || layer.kind == gate || averages ||
             reads_input) {
    hold(in);
  }
  if (layer.kind == gate) hold(layer.inputs[1]);
  map(out) = layer.kind == sum && last_[static_cast<size_t>(in)] == i ? std::exchange(map(in), nullptr) : take_map(out);
  if (layer.kind == smooth && !reads_input) hold(out);
  keep(i);
  if (layer.kind == norm && layer.relu) map(out) = take_map(out);
  if (layer.relu) hold(out);
}

/// Of segmentation, from logits at the images' own size. torch holds their logarithms, of each head, until backward; Satchel makes a few
/// images' at a time (autograd/pixel_loss.cpp).
void ImageSteps::pixel_loss() {
  const int last = static_cast<int>(maps_.size()) - 1;
  const int64_t heads = model_.maps.back().channels * model_.maps[0].height * model_.maps[0].width / model_.large_logits;
  const int64_t some = std::clamp<int64_t>(kLargeLogits / model_.large_logits, 1, batch_.images);
  const auto large = [&](int64_t images) { return take(4 * images * model_.large_logits); };
  Tensor small = take(4 * values(last));
  if (!how_.baseline) {
    const Tensor upsampled = large(some), logarithms = large(some);
    map(last).reset();
    gradients_.back() = {std::move(small)};
    return;
  }
  std::vector<Tensor> logarithms;
  for (int64_t head = 0; head < heads; ++head) {
    const Tensor upsampled = large(batch_.images);
    logarithms.push_back(large(batch_.images));
  }
  map(last).reset();
  const Tensor of_loss = large(batch_.images), of_logits = large(batch_.images);
  gradients_.back() = {std::move(small)};
}

/// torch's cross entropy in float32.
void ImageSteps::loss() {
  const int last = static_cast<int>(maps_.size()) - 1;
  if (workspace_ == nullptr) workspace_ = take(kWorkspace);
  if (model_.large_logits > 0) return pixel_loss();
  Tensor logits = batch_.half ? take(4 * values(last)) : map(last);
  map(last).reset();
  const Tensor probabilities = take(4 * values(last)), g = take(4 * values(last));
  gradients_.back() = {take(4 * values(last))};
}

void ImageSteps::fetch(size_t i) {
  const auto end = std::ranges::find(offloaded_, i, &HostOffload::layer);
  if (end == offloaded_.end()) return;
  const auto ahead = std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(kInFlight), end - offloaded_.begin());
  for (auto s = end - ahead; s != offloaded_.end(); ++s) {
    if (s->here == nullptr) s->here = take(s->bytes);
  }
}

/// Gradients of one map are added in the memory of the first, unless others hold that.
void ImageSteps::pass_on(int to, Gradient g) {
  if (is_constant(to)) return;
  Gradient& standing = gradients_[static_cast<size_t>(to)];
  if (standing.memory == nullptr) {
    standing = std::move(g);
  } else if (!standing.is_own()) {
    standing = {take_map(to)};
  }
}

void ImageSteps::backward(size_t i) {
  using enum LayerKind;
  const ImageLayer& layer = model_.layers[i];
  const int in = layer.inputs[0], out = layer.output;
  if (is_constant(out)) return;
  Gradient g = std::exchange(gradients_[static_cast<size_t>(out)], {});
  switch (layer.kind) {
    case norm: return backward_norm(i, std::move(g));
    case sum: pass_on(in, {g.memory}); return pass_on(layer.inputs[1], {g.memory});
    case relu6:
    case smooth:
    case drop_samples:
      if (how_.baseline || !g.is_own()) g = {take_map(in)};
      return pass_on(in, std::move(g));
    case gate: {
      Tensor dx = take_map(in);
      {
        const Tensor decoded = how_.baseline ? nullptr : take(width_ * std::min(kSampleStretch, values(in)));
        pass_on(layer.inputs[1], {take_map(layer.inputs[1])});
      }
      g = {};
      return pass_on(in, {std::move(dx)});
    }
    case concat:
      for (const int part : layer.inputs) pass_on(part, {g.memory, true});
      return;
    case conv:
    case linear: {
      if (Tensor dx = std::exchange(parts_gradient_, nullptr)) return pass_on(in, {std::move(dx)});
      const Tensor in_order = g.view ? take_map(out) : nullptr;
      if (how_.baseline) {
        Tensor dx = is_constant(in) ? nullptr : take_map(in);
        backward_weight(layer, batch_.images);
        g = {};
        return pass_on(in, {std::move(dx)});
      }
      backward_weight(layer, batch_.images);
      const bool adds = layer.meets && layer.window == 1 && gradients_[static_cast<size_t>(in)].memory != nullptr;
      Tensor dx = is_constant(in) || adds ? nullptr : take_map(in);
      g = {};
      return adds ? void() : pass_on(in, {std::move(dx)});
    }
    case relu:
      if (how_.shares) {
        const Tensor on = take(values(out) / 8);
        return pass_on(in, std::move(g));
      }
      break;
    default: break;
  }
  // torch averages the gradient of maps in NCHW order: copies both ways.
  const bool copies = !how_.baseline && layer.kind == average_pool && !model_.maps[static_cast<size_t>(out)].row;
  const Tensor planes = copies ? take_map(out) : nullptr, averaged = copies ? take_map(in) : nullptr;
  Tensor dx = take_map(in);
  g = {};
  pass_on(in, {std::move(dx)});
}

void ImageSteps::backward_norm(size_t i, Gradient g) {
  const ImageLayer& layer = model_.layers[i];
  const int in = layer.inputs[0];
  const bool adds = layer.inputs.size() > 1;
  if (how_.baseline && layer.relu) {
    Tensor passed = take_map(in);
    g = {std::move(passed)};
  }
  if (!how_.baseline && !g.is_own()) g = {take_map(in)};
  if (how_.shares && !layer.relu && !how_.fuses_alone) take(width_ * std::min(kRowStretch, values(in)));  // decoded
  if (!how_.baseline && !adds) return pass_on(in, std::move(g));
  const ImageLayer& before = model_.layers[i - 1];
  if (adds && adds_by_parts(i) && values(in) >= kPartsFrom) {
    const Tensor part = take(ceil_div(bytes(in), kParts));
    backward_weight(before, ceil_div(batch_.images, kParts));
    parts_gradient_ = take_map(before.inputs[0]);
    pass_on(in, {take(width_)});  // no memory to speak of
  } else {
    pass_on(in, {take_map(in)});
  }
  if (adds) pass_on(layer.inputs[1], std::exchange(g, {}));
}

/// A sum over stretches of `images` samples; under autocast each part is of 2 bytes and the sum of 4, but for a window of 1, whose parts
/// are of 4 too.
void ImageSteps::backward_weight(const ImageLayer& layer, int64_t images) {
  Tensor sum;
  if (how_.baseline) {
    sum = take(width_ * layer.parameters);
  } else {
    const ImageMap& in = model_.maps[static_cast<size_t>(layer.inputs[0])];
    const int64_t most = layer.kind == LayerKind::conv ? kSampleStretch : kRowStretch;
    const int64_t some = how_.projects ? batch_.images : std::min(images, samples_at_a_time(in, batch_.images, most));
    for (int64_t first = 0; first < batch_.images; first += some) {
      const Tensor decoded = take(width_ * some * in.values());
      Tensor part = take((layer.window == 1 ? 4 : width_) * layer.parameters);
      if (sum == nullptr) sum = std::move(part);
    }
  }
  const bool is_float = width_ == 4 || (layer.window == 1 && !how_.baseline);
  weight_gradients_.push_back(is_float ? std::move(sum) : take(4 * layer.parameters));
}

}  // namespace satchel
