// Parts of maps under boxes, brought to one size. Linear in the maps: backward reads the boxes and the maps' sizes, nothing else is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace satchel {

struct RoiAlignOptions {
  double scale = 1;     // places of the map a pixel
  int64_t size = 7;     // rows and columns of what comes out
  int64_t samples = 2;  // points of each of them, in rows and columns, whose mean it is
};

/// As torchvision.ops.roi_align with aligned=False: of maps N×C×height×width, and boxes in pixels (float32 count × 4) of the images
/// `image` (int64[count]); count × C × size × size. Each point is a bilinear mix of the four places around it; points more than a place
/// outside the map give 0. `name` is that of the line in reports.
at::Tensor roi_align(const at::Tensor& map, const at::Tensor& boxes, const at::Tensor& image, const RoiAlignOptions& options,
                     const std::string& name = "roi_align");

}  // namespace satchel
