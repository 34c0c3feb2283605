// Written by scripts/torchvision_states.py from torchvision 0.26.0.
#pragma once

#include <cstdint>

namespace satchel::testing_models {

struct TorchvisionState {
  const char* name;
  int64_t tensors, parameters;
  uint64_t digest;  // FNV-1a of the lines "NAME SIZE SIZE …", sorted
};

constexpr TorchvisionState kTorchvisionStates[] = {
    {"resnet18", 122, 11689512, 0x6a4f0031602ff394},
    {"resnet34", 218, 21797672, 0x41f3a885211b4f7a},
    {"resnet50", 320, 25557032, 0x04c6b0e891da0118},
    {"resnet101", 626, 44549160, 0xf58b73f504db1a9b},
    {"resnet152", 932, 60192808, 0x02ccdff375483bb8},
    {"wide_resnet50_2", 320, 68883240, 0xce9cddb65e5f5c68},
    {"vgg16", 32, 138357544, 0x23bd6d2c2b3cc50a},
    {"vgg16_bn", 97, 138365992, 0x9cffe0b29866876a},
    {"densenet121", 727, 7978856, 0xb795c7aff3f3cae6},
    {"densenet161", 967, 28681000, 0xcb4b6fc4928dcd33},
    {"mobilenet_v2", 314, 3504872, 0x6a668a4ff19832db},
    {"efficientnet_b0", 360, 5288548, 0x3dbed76c90c20f5f},
    {"fcn_resnet50", 334, 35322218, 0xebeeb919746f35f2},
    {"fcn_resnet101", 640, 54314346, 0x65088b47a3d22b55},
    {"deeplabv3_resnet50", 370, 42004074, 0xf8570c749d63431e},
    {"deeplabv3_resnet101", 676, 60996202, 0xc697e27aa9cfd66b},
    {"retinanet_resnet50_fpn", 354, 34068119, 0xe4ff4811d52f86ad},
    {"fasterrcnn_resnet50_fpn", 348, 41808406, 0xb7b13cec5180d2b2},
    {"retinanet_resnet50_fpn, frozen", 301, 34014999, 0x3b3f691c044db341},
    {"fasterrcnn_resnet50_fpn, frozen", 295, 41755286, 0xd83bd05243edaa2e},
};

}  // namespace satchel::testing_models
