// Layers of an image model in the order of the forward pass, one call each. Private to this room. No torch.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "satchel/plan/image_shape.h"

namespace satchel {

/// Each call adds a layer and gives the number of the map that it makes.
class LayerList {
 public:
  struct Conv {
    int64_t channels, window, stride = 1;
    bool bias = false;
    int64_t groups = 1;
  };

  LayerList(const ImageShape& shape, int64_t height, int64_t width) : shape_(shape) {
    list_.maps.push_back({shape.channels, height, width});
  }

  const ImageShape& shape() const { return shape_; }
  ImageMap map(int i) const { return list_.maps[static_cast<size_t>(i)]; }
  ImageLayer& last() { return list_.layers.back(); }
  void set_large_logits(int64_t values) { list_.large_logits = values; }
  ImageLayers take() { return std::move(list_); }

  int add(LayerKind kind, const std::string& name, std::vector<int> inputs, const ImageMap& out, int64_t parameters = 0, int64_t window = 1,
          bool relu = false) {
    list_.maps.push_back(out);
    list_.layers.push_back({kind, name, std::move(inputs), static_cast<int>(list_.maps.size()) - 1, relu, false, window, parameters});
    return last().output;
  }

  /// Padded by half of its window.
  int conv(const std::string& name, int x, const Conv& c) {
    const ImageMap in = map(x);
    const int64_t border = c.window / 2 * 2 - c.window;
    const ImageMap out = {c.channels, (in.height + border) / c.stride + 1, (in.width + border) / c.stride + 1};
    const int64_t each = in.channels / c.groups * c.window * c.window + (c.bias ? 1 : 0);
    const int made = add(LayerKind::conv, name, {x}, out, c.channels * each, c.window);
    last().groups = c.groups;
    return made;
  }

  int norm(const std::string& name, int x, bool relu = true, std::vector<int> skip = {}) {
    skip.insert(skip.begin(), x);
    return add(LayerKind::norm, name, std::move(skip), map(x), 2 * map(x).channels, 1, relu);
  }

  int relu(const std::string& name, int x, bool dropped = false) {
    const int out = add(LayerKind::relu, name, {x}, map(x), 0, 1, true);
    last().dropout = dropped;
    return out;
  }

  int relu6(const std::string& name, int x) { return add(LayerKind::relu6, name, {x}, map(x)); }

  int smooth(const std::string& name, int x, Smooth act) {
    const int out = add(LayerKind::smooth, name, {x}, map(x));
    last().smooth = act;
    return out;
  }

  int gate(const std::string& name, int x, int scale) { return add(LayerKind::gate, name, {x, scale}, map(x)); }
  int sum(const std::string& name, int x, int skip) { return add(LayerKind::sum, name, {x, skip}, map(x)); }
  int drop_samples(const std::string& name, int x, double p) { return p > 0 ? add(LayerKind::drop_samples, name, {x}, map(x)) : x; }

  /// A window of 3 is padded by 1, one of 2 by nothing.
  int pool(LayerKind kind, const std::string& name, int x, int64_t window) {
    const ImageMap in = map(x);
    const int64_t border = window / 2 * 2 - window + (window == 2 ? -2 : 0);
    const auto side = [&](int64_t n) { return (n + border) / 2 + 1; };
    return add(kind, name, {x}, {in.channels, side(in.height), side(in.width)}, 0, window);
  }

  /// To a side of so many pixels, as a row.
  int average(const std::string& name, int x, int64_t side) {
    return add(LayerKind::average_pool, name, {x}, {map(x).channels * side * side, 1, 1, true});
  }
  /// To one pixel, as a map.
  int squeeze(const std::string& name, int x) { return add(LayerKind::average_pool, name, {x}, {map(x).channels, 1, 1}); }

  int linear(const std::string& name, int x, int64_t out) {
    return add(LayerKind::linear, name, {x}, {out, 1, 1, true}, out * (map(x).values() + 1));
  }

  int upsample(const std::string& name, int x, const ImageMap& like) {
    return add(LayerKind::upsample, name, {x}, {map(x).channels, like.height, like.width});
  }

  int dropout(const std::string& name, int x) { return dropout_of(shape_) > 0 ? add(LayerKind::dropout, name, {x}, map(x)) : x; }

 private:
  const ImageShape& shape_;
  ImageLayers list_;
};

}  // namespace satchel
