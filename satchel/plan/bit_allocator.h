// Bits by layer and by sample from what the steps before have shown (docs/theory.md 5), for methods with bits per sample: actnn
// between the inputs of layers, 1 to 8 bits, those with mean_bits= between the images that layers share, 2 or 3. One for a training run:
// give it to the layers as SavePolicy::allocator, name the batch's samples where the loader knows them, and end every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "satchel/autograd/bit_allocator.h"

namespace satchel {

struct BitAllocatorOptions {
  int64_t samples = 0;  // of the data set, where the loader gives indices; more than that are made room for
  int every = 10;       // steps from one allocation by layer to the next, at least 3; the first follows from the first step
};

/// What a layer has now.
struct LayerBits {
  std::string name;
  int64_t values = 0;    // a sample: its input's, and those of the norms after it, in the last step
  double mean_bits = 2;  // over its samples
};

/// Mean bits a layer, under Σ values·mean ≤ Σ values·base, over inputs and over images apart. `sensitivity` C_n of its samples; layers
/// without any keep their base.
struct LayerNeed {
  int64_t values = 0;
  double base = 2;
  std::vector<double> sensitivity;
  bool map = false;  // 2 or 3 bits, and `sensitivity` is what the third bit gains
};
std::vector<double> allocate_layers(const std::vector<LayerNeed>& layers);

/// A step's sensitivities are copied to the host while the next step runs, worked on by a thread of their own while the one after runs,
/// and then obeyed: always at the same step, so that a run can be repeated, and never with an idle device. Layers go by their names; those
/// of one name share their bits. Calls may come from any thread.
class RunningBitAllocator : public BitAllocator {
 public:
  explicit RunningBitAllocator(const BitAllocatorOptions& options = {});
  ~RunningBitAllocator() override;

  /// The samples of the batch about to run, by their numbers in the data set; empty: unknown, all count alike.
  void set_samples(std::span<const int64_t> indices);

  /// What the gradients that are told are multiplied with, one number on their device, read when they are: a loss scale. None: 1.
  void set_gradient_scale(at::Tensor scale);

  /// After backward: takes note of its gradients, and allocates anew where it is time.
  void step();

  std::vector<LayerBits> layers() const;
  /// Over all layers of the last step, weighted by values: never above the specs' own bits.
  double mean_bits() const;

  /// Between two steps: all that the next ones read, by names, for a checkpoint.
  std::map<std::string, at::Tensor> state() const;
  /// … of state(), into one that has seen no step; averages go to `device`. Throws `[resume] …` on what state() does not write.
  void restore(const std::map<std::string, at::Tensor>& state, at::Device device);

  BitAllocation input(const std::string& layer, int64_t samples, int64_t values, double mean_bits, at::Device device) override;
  double norm(int64_t values, double mean_bits) override;
  BitAllocation image(const std::string& layer, int64_t samples, int64_t values, double mean_bits, at::Device device) override;
  bool wants_gradient(int64_t layer) const override;
  void saw_gradient(int64_t layer, const at::Tensor& squares, const at::Tensor& ranges, double factor) override;

 private:
  struct Layer;
  struct Arriving;

  static std::vector<Layer> layers_from(const std::map<std::string, at::Tensor>& state);
  static std::unique_ptr<Arriving> arriving_from(const std::map<std::string, at::Tensor>& state, int64_t layers);
  size_t layer_of(const std::string& name, double mean_bits, int64_t values);
  at::Tensor slots_of(size_t layer, int64_t samples, int64_t count, at::Device device) const;
  void choose_samples();
  void send_sensitivities();
  void work_on_sensitivities();
  void obey();
  void move_averages();
  void look_up_samples();

  mutable std::mutex mutex_;
  BitAllocatorOptions options_;
  std::vector<Layer> layers_;
  int64_t last_ = -1;  // the layer before a norm
  int64_t steps_ = 0;  // since the last allocation by layer
  bool collects_ = true;
  std::unique_ptr<Arriving> arriving_;
  std::shared_future<std::vector<double>> means_;  // of all layers there were, being worked out

  std::vector<int64_t> indices_;  // of this batch's samples
  at::Tensor at_;                 // … on the device
  at::Tensor averages_;           // layers × samples of the data set, bf16: s_n, of maps C_n, 0 where never seen
  at::Tensor weights_;            // layers × samples of this batch
  at::Tensor slots_;              // … int32: places of a map's samples of 3 bits
  at::Tensor scale_;              // of the gradients
};

}  // namespace satchel
