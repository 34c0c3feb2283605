#!/usr/bin/env python3
"""Writes tests/models/torchvision_states.h: what torchvision's models hold, as one number a model.

  scripts/torchvision_states.py      needs torch and torchvision

A model's state dict is written as lines "NAME SIZE SIZE …", sorted by name; the number is their 64-bit FNV-1a. A test makes the same
number of our models. Run it again where a model is added.
"""
import pathlib

import torch
import torchvision
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import FrozenBatchNorm2d

HEADER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "models" / "torchvision_states.h"
IMAGES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "vgg16", "vgg16_bn", "densenet121", "densenet161",
          "mobilenet_v2", "efficientnet_b0")
SEGMENTS = ("fcn_resnet50", "fcn_resnet101", "deeplabv3_resnet50", "deeplabv3_resnet101")


def digest(state):
    number = 0xCBF29CE484222325
    for name in sorted(state):
        line = " ".join([name, *(str(size) for size in state[name].shape)]) + "\n"
        for byte in line.encode():
            number = ((number ^ byte) * 0x100000001B3) % 2**64
    return number


def models():
    for name in IMAGES:
        yield name, getattr(torchvision.models, name)()
    for name in SEGMENTS:
        yield name, getattr(torchvision.models.segmentation, name)(weights_backbone=None, aux_loss=True)
    for name in ("retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"):
        yield name, getattr(torchvision.models.detection, name)(weights_backbone=None)
    # As they are where pretrained weights are tuned.
    make = lambda **more: resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3, **more)
    yield "retinanet_resnet50_fpn, frozen", RetinaNet(make(returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256)), 91)
    yield "fasterrcnn_resnet50_fpn, frozen", FasterRCNN(make(), 91)


def main():
    rows = []
    with torch.device("meta"):
        for name, model in models():
            state = model.state_dict()
            parameters = sum(p.numel() for p in model.parameters())
            rows.append(f'    {{"{name}", {len(state)}, {parameters}, {digest(state):#018x}}},')
    HEADER.write_text(f"""// Written by scripts/torchvision_states.py from torchvision {torchvision.__version__.split('+')[0]}.
#pragma once

#include <cstdint>

namespace satchel::testing_models {{

struct TorchvisionState {{
  const char* name;
  int64_t tensors, parameters;
  uint64_t digest;  // FNV-1a of the lines "NAME SIZE SIZE …", sorted
}};

constexpr TorchvisionState kTorchvisionStates[] = {{
""" + "\n".join(rows) + """
};

}  // namespace satchel::testing_models
""", encoding="utf-8")


if __name__ == "__main__":
    main()
