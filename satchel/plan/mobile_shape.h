// MobileNetV2 and EfficientNet-B0 from sizes alone: a stem, blocks that widen, filter each channel by itself and narrow again, a head. The
// channels and the chances to be left out are torchvision's. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/plan/image_shape.h"

namespace satchel {

struct MobileBlock {
  std::string at;  // prefix of its parameters: "features.1.conv.", "features.2.0.block."
  int64_t in, wide, out, window, stride;
  int64_t squeezed;  // channels that the gate of the wide map is made from; 0: no gate
  double drop;       // the chance that a sample's branch is left out, where the block adds its input
  bool widens() const { return wide != in; }
  bool adds() const { return stride == 1 && in == out; }
};

struct MobileShape {
  bool silu;                   // else ReLU6
  int64_t stem, head, stride;  // channels of the first and the last convolution; stride of the first
  std::vector<MobileBlock> blocks;
  std::string head_at;  // "features.18."
};

/// mobilenet_v2, efficientnet_b0.
bool is_mobile(std::string_view name);
MobileShape mobile_shape(const ImageShape& shape);

class LayerList;
void add_mobile(LayerList& list);

}  // namespace satchel
