#include "satchel/plan/image_flow.h"

namespace satchel {
namespace {

/// What a layer's backward makes beside the gradient that it reads, in values. A norm works in that gradient's memory, but for a sum,
/// whose skip takes it as it is; a joined map's gradient is cut into its parts; torch's own functions make all anew.
int64_t made_in_backward(const ImageLayers& model, const ImageLayer& layer, bool plain) {
  using enum LayerKind;
  const int64_t read = layer.inputs[0] == 0 ? 0 : model.maps[static_cast<size_t>(layer.inputs[0])].values();
  switch (layer.kind) {
    case norm: return plain || layer.inputs.size() > 1 ? read : 0;
    case relu:
    case dropout: return plain ? read : 0;
    case concat: return 0;
    default: return read;
  }
}

}  // namespace

std::vector<int64_t> alive_values(const ImageLayers& model, bool shared) {
  std::vector<size_t> last(model.maps.size(), 0);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    for (const int map : model.layers[i].inputs) last[static_cast<size_t>(map)] = i;
  }
  std::vector<int64_t> during;
  std::vector<bool> ended(model.maps.size(), false);
  int64_t alive = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const ImageLayer& layer = model.layers[i];
    alive += model.maps[static_cast<size_t>(layer.output)].values();
    const bool lent = shared && layer.kind == LayerKind::norm && layer.relu;
    during.push_back(alive - (lent ? model.maps[static_cast<size_t>(layer.inputs[0])].values() : 0));
    for (const int map : layer.inputs) {
      const auto m = static_cast<size_t>(map);
      if (map == 0 || last[m] != i || ended[m]) continue;
      ended[m] = true;
      alive -= model.maps[m].values();
    }
  }
  return during;
}

std::vector<int64_t> gradient_values(const ImageLayers& model, bool plain) {
  std::vector<bool> stands(model.maps.size(), false);
  std::vector<int64_t> during(model.layers.size());
  int64_t standing = model.maps.back().values();
  for (size_t i = model.layers.size(); i-- > 0;) {
    const ImageLayer& layer = model.layers[i];
    during[i] = standing + made_in_backward(model, layer, plain);
    standing -= model.maps[static_cast<size_t>(layer.output)].values();
    for (const int map : layer.inputs) {
      const auto m = static_cast<size_t>(map);
      if (map == 0 || stands[m]) continue;  // added to what stands
      stands[m] = true;
      standing += model.maps[m].values();
    }
  }
  return during;
}

}  // namespace satchel
