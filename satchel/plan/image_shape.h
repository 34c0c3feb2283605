// Image classifiers as lists of layers: what each reads and makes, from sizes alone. No torch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/core/layer.h"

namespace satchel {

/// The sizes of an image model; models/image_model.h says what they mean.
struct ImageShape {
  std::string name = "resnet18";
  int64_t classes = 10, channels = 3;
  bool small_stem = false;
  int64_t width = 0;
  std::optional<double> dropout = {};
  std::optional<double> stochastic_depth = {};
  std::string freeze = {};
  bool aux = false;  // segmentation
  bool operator==(const ImageShape&) const = default;
};

/// resnet18, resnet34, resnet50, resnet101, resnet152, wide_resnet50_2, vgg16, vgg16_bn, densenet121, densenet161,
/// mobilenet_v2, efficientnet_b0, preresnet56, preresnet164.
std::span<const std::string_view> image_model_names();
bool is_image_model(std::string_view name);

/// fcn_resnet50, fcn_resnet101, deeplabv3_resnet50, deeplabv3_resnet101: a class a pixel, from a ResNet whose last two stages are dilated.
std::span<const std::string_view> segmentation_model_names();
bool is_segmentation_model(std::string_view name);
/// The ResNet of such a model; another model's own name.
std::string_view backbone_of(std::string_view name);

/// Throws `[op] rule, got value` unless name and sizes fit.
void validate(const ImageShape& shape, const char* op);
/// Of the classifier: what was given, or the model's own.
double dropout_of(const ImageShape& shape);
/// Of the first stage: what was given, or the model's own.
int64_t width_of(const ImageShape& shape);
/// Of the last block, what was given or the model's own; blocks before it have less in equal steps. 0 where the model has none.
double stochastic_depth_of(const ImageShape& shape);

/// The stage that a layer belongs to, by its name: "layer2" of "layer2.0.conv1", "features.3" of "features.3.1.block.0.0".
std::string stage_of(const std::string& layer);
/// Those that `freeze` may name, in their order: it freezes the first ones up to and with that one.
std::vector<std::string> freezable_stages(const ImageShape& shape);

/// Which stem images of this size get where none is asked for: up to 64 pixels high and wide the small one, as a stem of stride 4 would
/// leave little of them.
bool wants_small_stem(int64_t height, int64_t width);

/// The least height and width that leaves every pool a value.
int64_t least_side(const ImageShape& shape);
/// Throws `[op] rule, got value` unless the model takes such images.
void check_side(const ImageShape& shape, int64_t height, int64_t width, const char* op);

/// Blocks a stage (ResNet, DenseNet), or convolutions a stage (VGG).
std::span<const int64_t> stages_of(std::string_view name);

constexpr int64_t kExpansion = 4;     // of a ResNet's bottleneck, and of a dense layer's
constexpr int64_t kVggHidden = 4096;  // of VGG's classifier
constexpr int64_t kVggPooled = 7;     // side of what it reads
constexpr double kVggDropout = 0.5;
constexpr double kMobileDropout = 0.2;                      // of MobileNetV2 and EfficientNet-B0
constexpr double kEfficientDepth = 0.2;                     // EfficientNet-B0's stochastic depth
constexpr double kFcnDropout = 0.1, kDeepLabDropout = 0.5;  // in front of a head's last convolution; of DeepLab's joined maps
constexpr int64_t kDeepLabWidth = 4;                        // of DeepLab's head: times the first stage's
bool is_resnet(std::string_view name);
/// ResNets from 50 layers on, of CIFAR's the one of 164, narrow a block's 3×3 convolution by two of 1×1.
bool has_bottleneck(std::string_view name);
/// CIFAR's ResNets with norm and ReLU in front of convolutions.
bool is_preresnet(std::string_view name);
/// Of that 3×3 convolution: how many times as many channels as a ResNet of the same depth.
int64_t widening_of(std::string_view name);

/// What flows from layer to layer, of one image: a map, or after the last pool a row of features.
struct ImageMap {
  int64_t channels = 0, height = 1, width = 1;
  bool row = false;
  bool constant = false;  // no gradient goes there: the images, and what frozen layers make of them
  int64_t values() const { return channels * height * width; }
};

/// One call, as the models room makes it.
///   conv, linear  have a weight
///   norm          BatchNorm, with what follows it in the same call: + skip, ReLU
///   relu          without a norm, with the dropout that follows it in the same call
///   dropout       alone
///   relu6         without a norm
///   smooth        SiLU or sigmoid
///   gate          a map times one number a channel of a sample
///   drop_samples  stochastic depth: a sample is left out, or multiplied
///   sum           of two maps
///   max_pool, average_pool, concat
///   upsample      bilinear
enum class LayerKind : uint8_t {
  conv,
  linear,
  norm,
  relu,
  dropout,
  max_pool,
  average_pool,
  concat,
  relu6,
  smooth,
  gate,
  drop_samples,
  sum,
  upsample
};

struct ImageLayer {
  LayerKind kind = LayerKind::conv;
  std::string name;         // prefix of its parameters
  std::vector<int> inputs;  // maps it reads: one, or a norm's and its skip, or all that are joined
  int output = 0;
  bool relu = false;     // norm: with a ReLU
  bool dropout = false;  // relu: with a dropout
  int64_t window = 1;    // convolution, pool: side of its window
  int64_t parameters = 0;
  bool meets = false;            // convolution: adds its gradient of the input to that of the skip, where layers are not torch's own
  int held = 0;                  // the map that a caller holds until this layer has run, beside those that are read later; 0: none
  int64_t groups = 1;            // convolution
  Smooth smooth = Smooth::none;  // smooth: which
  bool frozen_norm = false;      // norm: with statistics and weights that are constants
};

struct ImageLayers {
  std::vector<ImageMap>
      maps;  // 0: the images, last: the logits (segmentation, in training: at an eighth of the images' size, of all heads)
  std::vector<ImageLayer> layers;
  int64_t large_logits = 0;  // segmentation: values of one head's logits of an image at its own size, which the loss reads
};

/// The layers of a model for images of this size. Throws `[plan] rule, got value` as check_side() does.
ImageLayers layers_of(const ImageShape& shape, int64_t height, int64_t width);

}  // namespace satchel
