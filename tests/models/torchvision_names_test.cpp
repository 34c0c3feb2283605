// State dicts are torchvision's: every name and shape, from what torchvision's own sources build (pytorch/vision, torchvision/models/
// resnet.py, vgg.py, densenet.py, mobilenetv2.py, efficientnet.py, segmentation/fcn.py and deeplabv3.py), written down here apart from our
// models. Beside them torchvision's own state dicts, each as one number (torchvision_states.h). The pre-activation ResNets have the names
// of ActNN's program (ucbrise/actnn, image_classification/preact_resnet.py).
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "satchel/models/detection.h"
#include "satchel/models/image_model.h"
#include "tests/models/torchvision_states.h"

namespace satchel {
namespace {

using Sizes = std::vector<int64_t>;
using State = std::map<std::string, Sizes>;

constexpr int64_t kClasses = 1000, kSegments = 21;

/// `in`: channels that one filter reads, 1 where each filters its own.
void add_conv(State& state, const std::string& name, int64_t in, int64_t out, int64_t kernel, bool bias = false) {
  state[name + ".weight"] = {out, in, kernel, kernel};
  if (bias) state[name + ".bias"] = {out};
}

void add_norm(State& state, const std::string& name, int64_t channels) {
  for (const char* part : {".weight", ".bias", ".running_mean", ".running_var"}) state[name + part] = {channels};
  state[name + ".num_batches_tracked"] = {};
}

void add_linear(State& state, const std::string& name, int64_t in, int64_t out) {
  state[name + ".weight"] = {out, in};
  state[name + ".bias"] = {out};
}

/// BasicBlock: two 3×3. Bottleneck: 1×1, 3×3, and 1×1 to four times the planes.
State resnet(const std::vector<int64_t>& blocks, bool bottleneck, int64_t widening = 1) {
  State state;
  add_conv(state, "conv1", 3, 64, 7);
  add_norm(state, "bn1", 64);
  int64_t in = 64, width = 64;
  for (size_t layer = 0; layer < blocks.size(); ++layer, width *= 2) {
    const int64_t planes = width * widening, out = bottleneck ? 4 * width : width;
    for (int64_t block = 0; block < blocks[layer]; ++block) {
      const std::string name = "layer" + std::to_string(layer + 1) + "." + std::to_string(block) + ".";
      add_conv(state, name + "conv1", in, planes, bottleneck ? 1 : 3);
      add_norm(state, name + "bn1", planes);
      add_conv(state, name + "conv2", planes, planes, 3);
      add_norm(state, name + "bn2", planes);
      if (bottleneck) add_conv(state, name + "conv3", planes, out, 1);
      if (bottleneck) add_norm(state, name + "bn3", out);
      if (block == 0 && (layer > 0 || in != out)) {  // a stride, or other channels
        add_conv(state, name + "downsample.0", in, out, 1);
        add_norm(state, name + "downsample.1", out);
      }
      in = out;
    }
  }
  add_linear(state, "fc", in, kClasses);
  return state;
}

/// Configuration D; 0 is a pool. ReLUs and pools take a number each.
State vgg16(bool norms) {
  State state;
  int64_t in = 3, at = 0;
  for (const int64_t out : {64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0}) {
    if (out == 0) {
      ++at;
      continue;
    }
    add_conv(state, "features." + std::to_string(at), in, out, 3, /*bias=*/true);
    if (norms) add_norm(state, "features." + std::to_string(at + 1), out);
    at += norms ? 3 : 2;
    in = out;
  }
  add_linear(state, "classifier.0", 512 * 7 * 7, 4096);
  add_linear(state, "classifier.3", 4096, 4096);
  add_linear(state, "classifier.6", 4096, kClasses);
  return state;
}

/// Bottlenecks of 4 times the growth, transitions to half the channels.
State densenet(const Sizes& blocks, int64_t first, int64_t growth) {
  State state;
  add_conv(state, "features.conv0", 3, first, 7);
  add_norm(state, "features.norm0", first);
  int64_t channels = first;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const std::string number = std::to_string(b + 1);
    for (int64_t l = 1; l <= blocks[b]; ++l, channels += growth) {
      const std::string name = "features.denseblock" + number + ".denselayer" + std::to_string(l) + ".";
      add_norm(state, name + "norm1", channels);
      add_conv(state, name + "conv1", channels, 4 * growth, 1);
      add_norm(state, name + "norm2", 4 * growth);
      add_conv(state, name + "conv2", 4 * growth, growth, 3);
    }
    if (b + 1 == blocks.size()) break;
    add_norm(state, "features.transition" + number + ".norm", channels);
    add_conv(state, "features.transition" + number + ".conv", channels, channels / 2, 1);
    channels /= 2;
  }
  add_norm(state, "features.norm5", channels);
  add_linear(state, "classifier", channels, kClasses);
  return state;
}

/// FCNHead: 3×3 to a quarter of the channels, then 1×1; ReLU and dropout take a number each.
void add_fcn_head(State& state, const std::string& name, int64_t in) {
  add_conv(state, name + ".0", in, in / 4, 3);
  add_norm(state, name + ".1", in / 4);
  add_conv(state, name + ".4", in / 4, kSegments, 1, /*bias=*/true);
}

/// DeepLabHead: ASPP of a 1×1, three 3×3 and a pooled 1×1 window, a projection of all five, 3×3, 1×1.
void add_deeplab_head(State& state, const std::string& name) {
  for (const int64_t branch : {0, 1, 2, 3}) {
    const std::string conv = name + ".0.convs." + std::to_string(branch);
    add_conv(state, conv + ".0", 2048, 256, branch == 0 ? 1 : 3);
    add_norm(state, conv + ".1", 256);
  }
  add_conv(state, name + ".0.convs.4.1", 2048, 256, 1);
  add_norm(state, name + ".0.convs.4.2", 256);
  add_conv(state, name + ".0.project.0", 5 * 256, 256, 1);
  add_norm(state, name + ".0.project.1", 256);
  add_conv(state, name + ".1", 256, 256, 3);
  add_norm(state, name + ".2", 256);
  add_conv(state, name + ".4", 256, kSegments, 1, /*bias=*/true);
}

State segmentation(const std::vector<int64_t>& blocks, bool deeplab) {
  State state;
  for (const auto& [name, sizes] : resnet(blocks, true)) {
    if (!name.starts_with("fc.")) state["backbone." + name] = sizes;
  }
  deeplab ? add_deeplab_head(state, "classifier") : add_fcn_head(state, "classifier", 2048);
  add_fcn_head(state, "aux_classifier", 1024);
  return state;
}

/// A convolution, its norm, and an activation, which has no tensors.
void add_conv_norm(State& state, const std::string& name, int64_t in, int64_t out, int64_t kernel) {
  add_conv(state, name + ".0", in, out, kernel);
  add_norm(state, name + ".1", out);
}

/// Six times as wide inside, but the first block; a 3×3 filter a channel.
State mobilenet_v2() {
  State state;
  add_conv_norm(state, "features.0", 3, 32, 3);
  int64_t in = 32, number = 1;
  for (const int64_t out : {16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320}) {
    const std::string name = "features." + std::to_string(number) + ".conv.";
    const int64_t wide = number == 1 ? in : 6 * in;
    int64_t at = 0;
    if (number > 1) add_conv_norm(state, name + std::to_string(at++), in, wide, 1);
    add_conv_norm(state, name + std::to_string(at++), 1, wide, 3);
    add_conv(state, name + std::to_string(at++), wide, out, 1);
    add_norm(state, name + std::to_string(at), out);
    in = out;
    ++number;
  }
  add_conv_norm(state, "features.18", 320, 1280, 1);
  add_linear(state, "classifier.1", 1280, kClasses);
  return state;
}

/// The same with a gate from a quarter of the block's own channels, and windows of 3 or 5.
State efficientnet_b0() {
  struct Stage {
    int64_t out, blocks, kernel;
  };
  State state;
  add_conv_norm(state, "features.0", 3, 32, 3);
  int64_t in = 32, number = 1;
  for (const Stage& stage : {Stage{16, 1, 3}, {24, 2, 3}, {40, 2, 5}, {80, 3, 3}, {112, 3, 5}, {192, 4, 5}, {320, 1, 3}}) {
    for (int64_t block = 0; block < stage.blocks; ++block, in = stage.out) {
      const std::string name = "features." + std::to_string(number) + "." + std::to_string(block) + ".block.";
      const int64_t wide = number == 1 ? in : 6 * in;
      int64_t at = 0;
      if (number > 1) add_conv_norm(state, name + std::to_string(at++), in, wide, 1);
      add_conv_norm(state, name + std::to_string(at++), 1, wide, stage.kernel);
      const std::string gate = name + std::to_string(at++);
      add_conv(state, gate + ".fc1", wide, in / 4, 1, /*bias=*/true);
      add_conv(state, gate + ".fc2", in / 4, wide, 1, /*bias=*/true);
      add_conv_norm(state, name + std::to_string(at), wide, stage.out, 1);
    }
    ++number;
  }
  add_conv_norm(state, "features.8", 320, 1280, 1);
  add_linear(state, "classifier.1", 1280, kClasses);
  return state;
}

/// Norms before convolutions, one more at the end.
State preresnet(int64_t blocks, bool bottleneck) {
  State state;
  add_conv(state, "conv1", 3, 16, 3);
  int64_t in = 16, planes = 16;
  for (int64_t layer = 1; layer <= 3; ++layer, planes *= 2) {
    const int64_t out = bottleneck ? 4 * planes : planes;
    for (int64_t block = 0; block < blocks; ++block) {
      const std::string name = "layer" + std::to_string(layer) + "." + std::to_string(block) + ".";
      add_norm(state, name + "bn1", in);
      add_conv(state, name + "conv1", in, planes, bottleneck ? 1 : 3);
      add_norm(state, name + "bn2", planes);
      add_conv(state, name + "conv2", planes, planes, 3);
      if (bottleneck) add_norm(state, name + "bn3", planes);
      if (bottleneck) add_conv(state, name + "conv3", planes, out, 1);
      if (in != out) add_conv(state, name + "downsample.0", in, out, 1);
      in = out;
    }
  }
  add_norm(state, "bn", in);
  add_linear(state, "fc", in, kClasses);
  return state;
}

State state_of(const torch::nn::Module& model) {
  State state;
  for (const auto& item : model.named_parameters()) state[item.key()] = item.value().sizes().vec();
  for (const auto& item : model.named_buffers()) state[item.key()] = item.value().sizes().vec();
  return state;
}

/// Each model is made once: drawing its weights takes most of the time.
const State& state_of(const std::string& name) {
  static std::map<std::string, State> states;
  const auto found = states.find(name);
  if (found != states.end()) return found->second;
  ImageModelOptions o;
  o.name = name;
  o.aux = is_segmentation_model(name);
  o.classes = o.aux ? kSegments : kClasses;
  return states[name] = state_of(*make_image_model(o));
}

State detector_state(const std::string& name, bool frozen) {
  DetectorOptions o;
  o.name = name;
  o.frozen_norm = frozen;
  return state_of(*make_detector(o));
}

int64_t parameters_of(const State& state) {
  int64_t count = 0;
  for (const auto& [name, sizes] : state) {
    if (name.ends_with("running_mean") || name.ends_with("running_var") || name.ends_with("num_batches_tracked")) continue;
    int64_t values = 1;
    for (const int64_t size : sizes) values *= size;
    count += values;
  }
  return count;
}

/// As scripts/torchvision_states.py makes it.
uint64_t digest_of(const State& state) {
  uint64_t number = 0xcbf29ce484222325;
  for (const auto& [name, sizes] : state) {
    std::string line = name;
    for (const int64_t size : sizes) line += ' ' + std::to_string(size);
    for (const char c : line + '\n') number = (number ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return number;
}

TEST(Torchvision, StatesAreThoseRecorded) {
  for (const testing_models::TorchvisionState& recorded : testing_models::kTorchvisionStates) {
    const std::string label = recorded.name, name = label.substr(0, label.find(','));
    const State got = is_detector(name) ? detector_state(name, name != label) : state_of(name);
    EXPECT_EQ(got.size(), static_cast<size_t>(recorded.tensors)) << label;
    EXPECT_EQ(digest_of(got), recorded.digest) << label;
  }
}

struct Published {
  const char* name;
  State state;
  int64_t parameters;  // num_params of torchvision's weights
};

TEST(Torchvision, EveryNameAndShape) {
  const Published models[] = {{"resnet18", resnet({2, 2, 2, 2}, false), 11689512},
                              {"resnet50", resnet({3, 4, 6, 3}, true), 25557032},
                              {"resnet101", resnet({3, 4, 23, 3}, true), 44549160},
                              {"wide_resnet50_2", resnet({3, 4, 6, 3}, true, 2), 68883240},
                              {"vgg16", vgg16(false), 138357544},
                              {"vgg16_bn", vgg16(true), 138365992},
                              {"densenet121", densenet({6, 12, 24, 16}, 64, 32), 7978856},
                              {"densenet161", densenet({6, 12, 36, 24}, 96, 48), 28681000},
                              {"mobilenet_v2", mobilenet_v2(), 3504872},
                              {"efficientnet_b0", efficientnet_b0(), 5288548},
                              // With 10 classes 855,578 and 1,703,258: the .85 M and 1.7 M of He et al.
                              {"preresnet56", preresnet(9, false), 919928},
                              {"preresnet164", preresnet(18, true), 1957688},

                              {"fcn_resnet50", segmentation({3, 4, 6, 3}, false), 35322218},
                              {"fcn_resnet101", segmentation({3, 4, 23, 3}, false), 54314346},
                              {"deeplabv3_resnet50", segmentation({3, 4, 6, 3}, true), 42004074},
                              {"deeplabv3_resnet101", segmentation({3, 4, 23, 3}, true), 60996202}};
  for (const Published& model : models) {
    ASSERT_EQ(parameters_of(model.state), model.parameters) << model.name << ": the list above is wrong";
    const State& got = state_of(model.name);
    for (const auto& [name, sizes] : model.state) {
      const auto found = got.find(name);
      ASSERT_TRUE(found != got.end()) << model.name << " lacks " << name;
      EXPECT_EQ(found->second, sizes) << model.name << ' ' << name;
    }
    for (const auto& [name, sizes] : got) EXPECT_TRUE(model.state.contains(name)) << model.name << " has " << name << " beside them";
  }
}

}  // namespace
}  // namespace satchel
