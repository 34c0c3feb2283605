// Classes of images from a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/checkpoint_json.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/image_train.h"
#include "satchel/train/options.h"

namespace satchel {
namespace {

constexpr int64_t kFolderSize = 224;  // what images in folders are brought to where nothing else was asked for

/// What of a run its predictions need.
struct TrainedImages {
  ImageTrainOptions options;
  ImageShape shape;
  int64_t height = 0, width = 0;  // of the images it was trained on; 0: files of all sizes
  std::vector<float> mean, deviation;
};

TrainedImages trained_from(const Checkpoint& c) {
  return in_checkpoint_words("data of a checkpoint", [&] {
    TrainedImages t;
    t.options = parse_options(c.options, t.shape);
    t.options.method = parse_method("fp32");  // nothing is kept for backward
    t.options.schedule = Decay::none;         // nor does a learning rate move
    t.options.warmup = 0;
    t.options.milestones.clear();
    const auto d = nlohmann::json::parse(c.data);
    t.height = d.at("height").get<int64_t>();
    t.width = d.at("image_width").get<int64_t>();
    t.mean = d.at("mean").get<std::vector<float>>();
    t.deviation = d.at("deviation").get<std::vector<float>>();
    return t;
  });
}

/// Images as they were tested in training: as they are, or from files brought to the size that the model knows.
ImageLoaderOptions loading(const ImageData& data, const TrainedImages& t, int64_t loaders) {
  ImageLoaderOptions l;
  l.batch = t.options.batch;
  l.mean = t.mean;
  l.deviation = t.deviation;
  l.threads = static_cast<int>(loaders);
  const bool from_files = t.height == 0;
  if (!data.in_files()) {
    const bool fits = from_files || (data.height == t.height && data.width == t.width);
    if (!fits)
      fail("predict", "images must be of " + std::to_string(t.height) + " × " + std::to_string(t.width) + ", as the checkpoint's",
           std::to_string(data.height) + " × " + std::to_string(data.width));
    return l;
  }
  if (!from_files && t.height != t.width)
    fail("predict", "images in files need a model of square ones", std::to_string(t.height) + " × " + std::to_string(t.width));
  l.crop = Crop::centre;
  l.size = from_files ? (t.options.image > 0 ? t.options.image : kFolderSize) : t.height;
  l.resize = from_files ? l.size * 8 / 7 : l.size;  // 256 of 224, as for ImageNet
  return l;
}

void append(const at::Tensor& logits, Prediction& p) {
  const at::Tensor scores = at::softmax(logits, 1).to(at::kCPU).contiguous(), classes = logits.argmax(1).to(at::kCPU).contiguous();
  p.scores.insert(p.scores.end(), scores.const_data_ptr<float>(), scores.const_data_ptr<float>() + scores.numel());
  p.classes.insert(p.classes.end(), classes.const_data_ptr<int64_t>(), classes.const_data_ptr<int64_t>() + classes.numel());
}

}  // namespace

Prediction predict_images(const ImageData& data, bool labelled, const std::string& checkpoint, const std::string& device_name,
                          int64_t loaders) {
  if (data.count() < 1) fail("predict", "data must have images", data.count());
  const Checkpoint c = read_checkpoint(checkpoint, kImageFormat);
  TrainedImages t = trained_from(c);
  t.options.device = device_name;
  t.options.tf32 = t.options.tf32 && names_cuda(device_name);
  t.options.loaders = loaders;
  validate(t.options);
  validate(t.shape, "checkpoint");
  if (data.channels != t.shape.channels)
    fail("predict", "images must have " + std::to_string(t.shape.channels) + " channels, as the checkpoint's", data.channels);
  const at::Device device = device_of(device_name, "predict");
  const CurrentDevice current(device);
  const ConvolutionSettings settings(device, {t.options.tf32, true, false});
  ImageFeed feed(data, loading(data, t, loaders), device, t.options.channels_last);
  check_side(t.shape, feed.loader().height(), feed.loader().width(), "predict");
  ImageModel model = make_model(t.options, t.shape, device);
  set_weights(*model, c.model);
  model->eval();

  const at::NoGradGuard guard;
  Prediction p;
  p.count = data.count();
  p.outputs = t.shape.classes;
  ImageTensors batch;
  feed.start(0);
  while (feed.next(batch)) {
    const AutocastGuard autocast(device.type(), t.options.amp);
    const at::Tensor logits = model->forward(batch.images).to(at::kFloat);
    if (!logits.isfinite().all().item<bool>()) fail("predict", "logits must be finite", "nan or infinity");
    append(logits, p);
  }
  if (labelled) {
    int64_t hits = 0;
    for (size_t i = 0; i < p.classes.size(); ++i) hits += p.classes[i] == data.labels[i] ? 1 : 0;
    p.test = 100.0 * static_cast<double>(hits) / static_cast<double>(p.count);
  }
  return p;
}

}  // namespace satchel
