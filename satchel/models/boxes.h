// Boxes of detectors: anchors, coding, overlap, matching, suppression. Corners are left, top, right, bottom in pixels, float32 rows of 4,
// on any device. The numbers and the order of anchors are torchvision's.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace satchel {

struct Detections {
  at::Tensor boxes, scores, labels;  // float32 count × 4, float32 and int64; best first
};

/// The objects of a batch's images, on its device.
struct BoxTargets {
  std::vector<at::Tensor> boxes, labels;            // of an image: float32 count × 4, and int64
  std::vector<std::array<int64_t, 2>> image_sizes;  // height and width without padding
};

/// Boxes around a place, by shapes (height / width) and, of each, by sizes (root of the area), rounded to whole pixels.
at::Tensor base_anchors(const std::vector<double>& sizes, const std::vector<double>& shapes);
/// Those around the places of a map of height × width, `stride` pixels apart: by rows, columns, boxes of a place.
at::Tensor grid_anchors(const at::Tensor& base, int64_t height, int64_t width, std::array<int64_t, 2> stride);

/// Weights of the four coded numbers: 1 each, or 10, 10, 5, 5 for the boxes of Faster R-CNN.
using CodeWeights = std::array<double, 4>;
constexpr CodeWeights kPlainCode = {1, 1, 1, 1}, kRegionCode = {10, 10, 5, 5};
/// Centre and size of boxes by those of anchors; rows of both are pairs.
at::Tensor encode_boxes(const at::Tensor& boxes, const at::Tensor& anchors, const CodeWeights& weights = kPlainCode);
/// … and back; growth is bounded to 1000/16 times.
at::Tensor decode_boxes(const at::Tensor& codes, const at::Tensor& anchors, const CodeWeights& weights = kPlainCode);
at::Tensor clip_boxes(const at::Tensor& boxes, int64_t height, int64_t width);

/// Area of the intersection by that of the union, rows of a × rows of b.
at::Tensor overlaps(const at::Tensor& a, const at::Tensor& b);

/// Which of the objects (rows of `overlap`) each anchor (columns) belongs to: −1 none, below `low`; −2 undecided, below `high`.
/// `reaches_all`: an object's best anchors belong to what they overlap most, however little that is. Without objects all are −1.
at::Tensor match_anchors(const at::Tensor& overlap, double high, double low, bool reaches_all);

/// Rows that stay, best first, when those that overlap a better one of their group by more than `most` go. Computed on the CPU.
at::Tensor suppress(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& groups, double most);

}  // namespace satchel
