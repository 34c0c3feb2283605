#include "satchel/autograd/roi_align.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr const char* kRoi = "roi_align";
constexpr int64_t kRoiStretch = 1 << 22, kRoiStretchCuda = 1 << 26;  // values that are gathered at a time

/// Which rows of the map (N·height·width × C) each cell reads, and how much of each: cells × reads. A cell is a row and column of a box.
struct Reads2d {
  at::Tensor rows, weights;
};

/// Along one side: places and weights of the two neighbours of each of size · samples points, boxes × points × 2.
Reads2d along(const at::Tensor& low, const at::Tensor& high, int64_t length, const RoiAlignOptions& o) {
  const at::Tensor start = low * o.scale, extent = (high * o.scale - start).clamp_min(1);
  const int64_t points = o.size * o.samples;
  const at::Tensor at = (at::arange(points, start.options()) + 0.5) / static_cast<double>(o.samples);
  const at::Tensor place = start.unsqueeze(1) + extent.unsqueeze(1) / static_cast<double>(o.size) * at;
  const at::Tensor inside = place.ge(-1).logical_and_(place.le(length));
  const at::Tensor clamped = place.clamp(0, static_cast<double>(length - 1)), first = clamped.floor();
  const at::Tensor part = clamped - first, second = (first + 1).clamp_max(static_cast<double>(length - 1));
  return {at::stack({first, second}, 2).to(at::kLong), at::stack({1 - part, part}, 2) * inside.unsqueeze(2)};
}

/// Of boxes [first, last).
Reads2d reads_of(const at::Tensor& boxes, const at::Tensor& image, at::IntArrayRef map, const RoiAlignOptions& o) {
  const int64_t height = map[2], width = map[3], count = boxes.size(0), s = o.samples;
  const Reads2d y = along(boxes.select(1, 1), boxes.select(1, 3), height, o), x = along(boxes.select(1, 0), boxes.select(1, 2), width, o);
  // boxes × (size, samples · 2) of rows and of columns; cells are pairs of the first, reads pairs of the second.
  const auto by_row = [&](const at::Tensor& t) { return t.view({count, o.size, 1, 2 * s, 1}); };
  const auto by_column = [&](const at::Tensor& t) { return t.view({count, 1, o.size, 1, 2 * s}); };
  const at::Tensor base = image.view({count, 1, 1, 1, 1}) * (height * width);
  const at::Tensor rows = base + by_row(y.rows) * width + by_column(x.rows);
  const at::Tensor weights = by_row(y.weights) * by_column(x.weights) / static_cast<double>(s * s);
  const int64_t reads = 4 * s * s;
  return {rows.reshape({-1, reads}), weights.reshape({-1, reads})};
}

/// Calls run(first, last) for stretches of boxes.
template <class Run>
void for_boxes(int64_t boxes, int64_t values, bool cuda, const Run& run) {
  const int64_t step = std::max<int64_t>(1, (cuda ? kRoiStretchCuda : kRoiStretch) / std::max<int64_t>(values, 1));
  for (int64_t first = 0; first < boxes; first += step) run(first, std::min(boxes, first + step));
}

class RoiAlignNode : public SavingNode {
 public:
  explicit RoiAlignNode(const std::string& layer) : SavingNode(kRoi, layer) {}
  at::Tensor boxes, image;
  RoiAlignOptions options;
  std::vector<int64_t> sizes;
  at::ScalarType type = at::kFloat;

  std::vector<SavedTensor> lines() const override {
    const auto bytes = static_cast<int64_t>(boxes.nbytes() + image.nbytes());
    return {{layer(), "boxes", boxes.sizes().vec(), 32, bytes, bytes}};
  }

 protected:
  variable_list back(at::Tensor g) override {
    const NoAutocast no_autocast;
    const int64_t channels = sizes[1], cells = options.size * options.size;
    const at::Tensor sum = at::zeros({sizes[0] * sizes[2] * sizes[3], channels}, g.options().dtype(at::kFloat));
    for_boxes(boxes.size(0), cells * channels, g.is_cuda(), [&](int64_t first, int64_t last) {
      const Reads2d reads = reads_of(boxes.slice(0, first, last), image.slice(0, first, last), sizes, options);
      const at::Tensor part = g.slice(0, first, last).permute({0, 2, 3, 1}).reshape({-1, channels}).to(at::kFloat);
      for (int64_t i = 0; i < reads.rows.size(1); ++i)
        sum.index_add_(0, reads.rows.select(1, i), part * reads.weights.select(1, i).unsqueeze(1));
    });
    return {image_of_rows(sum.to(type), sizes)};
  }
  void release() override {
    boxes.reset();
    image.reset();
  }
};

}  // namespace

at::Tensor roi_align(const at::Tensor& map, const at::Tensor& boxes, const at::Tensor& image, const RoiAlignOptions& o,
                     const std::string& name) {
  if (map.dim() != 4 || !map.is_floating_point()) fail(kRoi, "the map must have four dimensions of floats", map.toString());
  if (boxes.dim() != 2 || boxes.size(1) != 4 || boxes.scalar_type() != at::kFloat)
    fail(kRoi, "boxes must be float32 rows of 4", boxes.sizes());
  if (image.dim() != 1 || image.size(0) != boxes.size(0) || image.scalar_type() != at::kLong)
    fail(kRoi, "images must be " + std::to_string(boxes.size(0)) + " int64 numbers", image.sizes());
  if (!(o.scale > 0)) fail(kRoi, "scale must be above 0", o.scale);
  if (o.size < 1 || o.samples < 1) fail(kRoi, "size and samples must be at least 1", std::min(o.size, o.samples));
  const bool recorded = needs_grad(map);
  at::Tensor out;
  {
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    const at::Tensor rows = rows_of_image(map.detach());
    const int64_t channels = map.size(1), cells = o.size * o.size;
    out = at::empty({boxes.size(0), channels, o.size, o.size}, map.options().memory_format(at::MemoryFormat::Contiguous));
    for_boxes(boxes.size(0), cells * channels, map.is_cuda(), [&](int64_t first, int64_t last) {
      const Reads2d reads = reads_of(boxes.slice(0, first, last), image.slice(0, first, last), map.sizes(), o);
      at::Tensor sum = at::zeros({reads.rows.size(0), channels}, rows.options().dtype(at::kFloat));
      for (int64_t i = 0; i < reads.rows.size(1); ++i)
        sum.addcmul_(rows.index_select(0, reads.rows.select(1, i)).to(at::kFloat), reads.weights.select(1, i).unsqueeze(1));
      out.slice(0, first, last).copy_(sum.view({last - first, o.size, o.size, channels}).permute({0, 3, 1, 2}));
    });
  }
  if (!recorded) return out;
  const auto node = make_node<RoiAlignNode>(name, map);
  node->boxes = boxes;
  node->image = image;
  node->options = o;
  node->sizes = map.sizes().vec();
  node->type = map.scalar_type();
  return attach(out, node);
}

}  // namespace satchel
