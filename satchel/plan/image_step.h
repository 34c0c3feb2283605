// The memory of an image model's training steps on a GPU, tensor by tensor, in the order in which the models, autograd and train rooms
// take and give it back. Private to this room. No torch.
//
// e bytes a value: 4, or 2 under autocast. At a moment of a step there stand
//   all the time   weights, momentum, the batch (4 bytes a value each), 32 MiB of cuBLAS once it has run
//   forward        the saves so far, and each map from the layer that makes it to its last reader (a block's input: to the block's end).
//                  A fused norm works in the memory of what it reads. A shared norm without a ReLU holds input, output and, when the next
//                  layer makes it pack, its normalised values: three maps
//   backward       the saves of the layers still to come, the weights' gradients so far, and the maps' gradients: what a layer reads, what
//   it
//                  makes, and what waits for other readers of the same map. A sum makes a second one; other fused norms work in place.
//                  A convolution makes its input's gradient and then decodes that input, at most 64 Mi values in equal stretches of samples
// Not counted: cuDNN's workspaces, and what bits that move between layers (actnn, mean_bits=) change after the third step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "satchel/plan/caching_allocator.h"
#include "satchel/plan/image_plan.h"

namespace satchel {

/// plan_image()'s lines, layer by layer.
std::vector<std::vector<SavedTensor>> saves_by_layer(const ImageLayers& model, const BatchShape& batch, const Method& method);

/// Does this line of the method wait in host memory?
bool is_offloaded(const Method& method, const SavedTensor& line);

class ImageSteps {
 public:
  using Tensor = CachingAllocator::Tensor;

  /// Takes weights, momentum and the batch. `workspace`: cuBLAS's, which the process keeps from its first product on.
  ImageSteps(const ImageLayers& model, const BatchShape& batch, const Method& method, CachingAllocator& allocator, Tensor& workspace);

  /// Forward, loss and backward. Weights' gradients stand until the next step begins.
  void run();

 private:
  /// What the memory of a step depends on, of what the method keeps.
  struct How {
    explicit How(const Method& method);
    bool baseline, shares;           // torch's own functions; layers that rebuild their input from what the one before keeps
    bool projects = false;           // inputs of layers: decoded as a whole
    bool samples_have_bits = false;  // inputs of layers
    bool fuses_norms = false;        // by code; others make the normalised values first and a map of their own
    bool fuses_alone = false;        // norms of which a sum alone reads the result, where layers share
    bool sums_by_parts = false;      // of residual blocks, where they are large
    bool norm_samples_have_bits = false;
  };

  /// Of a map. `view`: a part of a larger one, which it keeps.
  struct Gradient {
    Tensor memory;
    bool view = false;
    bool is_own() const { return !view && memory.use_count() == 1; }
  };

  void forward(size_t i);
  void forward_norm(size_t i);
  bool is_sum_by_parts(size_t i) const;
  bool adds_by_parts(size_t i) const;
  void forward_plain(size_t i);
  void keep(size_t i);
  void loss();
  void pixel_loss();
  void backward(size_t i);
  void backward_norm(size_t i, Gradient g);
  /// … decoded in stretches of at most so many samples.
  void backward_weight(const ImageLayer& layer, int64_t images);
  void fetch(size_t i);
  void pass_on(int map, Gradient g);

  Tensor take(int64_t bytes) { return allocator_.take(bytes); }
  Tensor take_map(int map) { return take(bytes(map)); }
  int64_t values(int map) const { return batch_.images * model_.maps[static_cast<size_t>(map)].values(); }
  int64_t bytes(int map) const { return width_ * values(map); }
  /// A range a block of 256 values, two floats.
  int64_t range_bytes(int map) const { return values(map) / 32; }
  Tensor& map(int i) { return maps_[static_cast<size_t>(i)]; }

  const ImageLayers& model_;
  const BatchShape batch_;
  const Method& method_;
  CachingAllocator& allocator_;
  Tensor& workspace_;
  const int64_t width_;  // e
  const std::vector<std::vector<SavedTensor>> saves_;
  const How how_;
  std::vector<size_t> last_;  // of each map: the layer that reads or holds it last

  /// A save that waits in host memory, or stands on the device on its way.
  struct HostOffload {
    size_t layer;
    int64_t bytes;
    Tensor here;
  };
  std::vector<Tensor> standing_, weight_gradients_, maps_;
  std::vector<std::vector<Tensor>> kept_;  // by layer
  std::vector<HostOffload> offloaded_;     // in the order of the forward pass
  std::vector<Gradient> gradients_;        // by map
  Tensor passed_ranges_;                   // of a norm's output, for the convolution that packs it
  Tensor parts_gradient_;                  // of a convolution's input, made while its output's came in parts
};

}  // namespace satchel
