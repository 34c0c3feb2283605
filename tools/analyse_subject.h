// What `satchel analyse` looks at: a model with its weights and its data. Graphs and images behind one interface.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/autograd/save_watch.h"
#include "satchel/core/method.h"
#include "satchel/train/checkpoint.h"

namespace satchel::tool {

/// Where the model comes from: a checkpoint, or a fresh one of these sizes, trained for so many epochs in full precision (0: not at all).
struct SubjectOptions {
  std::string data, checkpoint, device = "cpu";
  std::string model = "sage", norm = "batch", activation = "relu";
  int64_t layers = 3, hidden = 128, width = 64, batch = 128;
  std::optional<double> dropout, lr;
  int64_t epochs = 0, split = 0, loaders = 2;
  uint64_t seed = 0;
  bool unweighted = false;  // edges without their weights
  bool quiet = false;       // no line while it trains
};

class Subject {
 public:
  virtual ~Subject() = default;

  virtual bool is_graph() const = 0;
  virtual std::string model() const = 0;  // "sage, 3 layers × 128"
  virtual std::string data() const = 0;   // its name
  virtual int64_t epochs() const = 0;     // that the weights were trained for

  /// One training forward pass in full precision, in which every layer shows what it would pack, dropout as in training. Graphs: as EXACT
  /// keeps it (inputs of layers, A·x, inputs of norms); images: as ActNN does (inputs of layers and norms).
  virtual void forward(const SaveReport& report) = 0;

  /// Names of the weights, in the order of gradients().
  virtual std::vector<std::string> weights() const = 0;
  /// Gradients of all weights in a training pass with the method, without dropout, whose masks would differ from method to method. `seed`:
  /// of the rounding. `part`: images: which batch; graphs: −1 for all training nodes, else which random half of them.
  virtual std::vector<at::Tensor> gradients(const Method& method, uint64_t seed, int64_t part) = 0;
  /// The part that methods are measured on.
  virtual int64_t reference() const = 0;
  virtual const char* parts_name() const = 0;
};

/// Throws `[analyse] rule, got value` or UsageError.
std::unique_ptr<Subject> make_subject(const SubjectOptions& options);
std::unique_ptr<Subject> graph_subject(const SubjectOptions& options);
std::unique_ptr<Subject> image_subject(const SubjectOptions& options);

/// What `train` writes to the checkpoint that it is given, of which no file is left.
Checkpoint trained_checkpoint(const std::string& format, const std::function<void(const std::string& path)>& train);

/// Gradients of the parameters of `model` from `loss`; zeros where a parameter has no say in it.
std::vector<at::Tensor> parameter_gradients(const torch::nn::Module& model, const at::Tensor& loss);
std::vector<std::string> parameter_names(const torch::nn::Module& model);

}  // namespace satchel::tool
