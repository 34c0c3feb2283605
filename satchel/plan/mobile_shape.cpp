#include "satchel/plan/mobile_shape.h"

#include <algorithm>
#include <array>
#include <span>

#include "satchel/plan/layer_list.h"

namespace satchel {
namespace {

constexpr int64_t kStem = 32, kHead = 1280, kUnit = 8;

/// Blocks of one kind: the first has the stride, the others 1.
struct Stage {
  int64_t widening, channels, count, stride, window;
};
constexpr std::array<Stage, 7> kMobileNetV2 = {
    {{1, 16, 1, 1, 3}, {6, 24, 2, 2, 3}, {6, 32, 3, 2, 3}, {6, 64, 4, 2, 3}, {6, 96, 3, 1, 3}, {6, 160, 3, 2, 3}, {6, 320, 1, 1, 3}}};
constexpr std::array<Stage, 7> kEfficientNetB0 = {
    {{1, 16, 1, 1, 3}, {6, 24, 2, 2, 3}, {6, 40, 2, 2, 5}, {6, 80, 3, 2, 3}, {6, 112, 3, 1, 5}, {6, 192, 4, 2, 5}, {6, 320, 1, 1, 3}}};

/// The multiple of 8 next to n, at least 8, and not less than nine tenths of n.
int64_t rounded(double n) {
  const int64_t near = std::max(kUnit, static_cast<int64_t>(n + kUnit / 2.0) / kUnit * kUnit);
  return static_cast<double>(near) < 0.9 * n ? near + kUnit : near;
}

}  // namespace

bool is_mobile(std::string_view name) { return name == "mobilenet_v2" || name == "efficientnet_b0"; }

MobileShape mobile_shape(const ImageShape& shape) {
  const bool efficient = shape.name == "efficientnet_b0";
  const double times = static_cast<double>(width_of(shape)) / kStem;
  const std::span<const Stage> stages = efficient ? kEfficientNetB0 : kMobileNetV2;
  int64_t count = 0, at = 0;
  for (const Stage& stage : stages) count += stage.count;
  MobileShape made{efficient, rounded(kStem * times), 0, shape.small_stem ? 1 : 2, {}, ""};
  int64_t in = made.stem;
  for (size_t s = 0; s < stages.size(); ++s) {
    const int64_t out = rounded(static_cast<double>(stages[s].channels) * times);
    for (int64_t b = 0; b < stages[s].count; ++b, ++at, in = out) {
      const std::string name = efficient ? std::to_string(s + 1) + "." + std::to_string(b) + ".block." : std::to_string(at + 1) + ".conv.";
      made.blocks.push_back({"features." + name, in, in * stages[s].widening, out, stages[s].window, b == 0 ? stages[s].stride : 1,
                             efficient ? std::max<int64_t>(1, in / 4) : 0,
                             stochastic_depth_of(shape) * static_cast<double>(at) / static_cast<double>(count)});
    }
  }
  made.head = efficient ? 4 * in : rounded(kHead * std::max(1.0, times));
  made.head_at = "features." + std::to_string(efficient ? stages.size() + 1 : made.blocks.size() + 1) + ".";
  return made;
}

namespace {

/// conv → norm → activation, which torchvision numbers 0, 1 and 2.
int add_step(LayerList& list, const std::string& at, int x, const LayerList::Conv& conv, bool silu) {
  const int h = list.norm(at + "1", list.conv(at + "0", x, conv), /*relu=*/false);
  return silu ? list.smooth(at + "2", h, Smooth::silu) : list.relu6(at + "2", h);
}

int add_gate(LayerList& list, const std::string& at, int x, int64_t squeezed) {
  const int64_t channels = list.map(x).channels;
  int s = list.conv(at + "fc1", list.squeeze(at + "avgpool", x), {squeezed, 1, 1, true});
  s = list.conv(at + "fc2", list.smooth(at + "activation", s, Smooth::silu), {channels, 1, 1, true});
  return list.gate(at + "scale", x, list.smooth(at + "scale_activation", s, Smooth::sigmoid));
}

int add_block(LayerList& list, const MobileBlock& b, int x, bool silu) {
  int at = 0, h = x;
  const auto next = [&] { return b.at + std::to_string(at++); };
  if (b.widens()) h = add_step(list, next() + ".", h, {b.wide, 1}, silu);
  h = add_step(list, next() + ".", h, {b.wide, b.window, b.stride, false, b.wide}, silu);
  if (b.squeezed > 0) h = add_gate(list, next() + ".", h, b.squeezed);
  const std::string conv = silu ? next() + "." : b.at;  // MobileNetV2 has the last convolution and its norm in no list of their own
  const std::string conv_name = silu ? conv + "0" : next(), norm_name = silu ? conv + "1" : next();
  h = list.norm(norm_name, list.conv(conv_name, h, {b.out, 1}), /*relu=*/false);
  if (!b.adds()) return h;
  return list.sum(b.at + "sum", list.drop_samples(b.at + "stochastic_depth", h, b.drop), x);
}

}  // namespace

void add_mobile(LayerList& list) {
  const MobileShape shape = mobile_shape(list.shape());
  int x = add_step(list, "features.0.", 0, {shape.stem, 3, shape.stride}, shape.silu);
  for (const MobileBlock& block : shape.blocks) x = add_block(list, block, x, shape.silu);
  x = add_step(list, shape.head_at, x, {shape.head, 1}, shape.silu);
  list.linear("classifier.1", list.dropout("dropout", list.average("avgpool", x, 1)), list.shape().classes);
}

}  // namespace satchel
