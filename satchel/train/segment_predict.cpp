// Masks of scenes from a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstring>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/metrics.h"
#include "satchel/train/options.h"
#include "satchel/train/scene_feed.h"
#include "satchel/train/segment_task.h"

namespace satchel {
namespace {

/// Class by class of one image of a batch, without what it was padded with.
Mask mask_of(const at::Tensor& classes, const SceneBatch::Size& size) {
  const at::Tensor own = classes.narrow(0, 0, size.height).narrow(1, 0, size.width).contiguous();
  const auto* values = own.const_data_ptr<uint8_t>();
  return {size.height, size.width, std::vector<uint8_t>(values, values + own.numel())};
}

}  // namespace

SegmentPrediction predict_masks(const SceneData& data, const std::string& checkpoint,
                                const std::function<void(int64_t index, const Mask& mask)>& take, const std::string& device_name,
                                int64_t loaders) {
  if (data.count < 1) fail("predict", "data must have scenes", data.count);
  const Checkpoint c = read_checkpoint(checkpoint, kSegmentFormat);
  ImageShape shape;
  SegmentTrainOptions options = parse_segment_options(c.options, shape);
  const SegmentedData about = parse_segmented_data(c.data);
  options.method = parse_method("fp32");  // nothing is kept for backward
  options.schedule = Decay::none;         // nor does a learning rate move
  options.warmup = 0;
  options.milestones.clear();
  options.device = device_name;
  options.tf32 = options.tf32 && names_cuda(device_name);
  options.loaders = loaders;
  validate(options);
  validate(shape, "checkpoint");
  if (static_cast<int64_t>(about.class_names.size()) != shape.classes)
    fail("checkpoint", "class names must be " + std::to_string(shape.classes), about.class_names.size());
  if (data.classes > shape.classes)
    fail("predict", "masks must be of the " + std::to_string(shape.classes) + " classes of the checkpoint", data.classes);
  const at::Device device = device_of(device_name, "predict");
  const CurrentDevice current(device);
  const ConvolutionSettings settings(device, {options.tf32, true, false});
  const SceneSets sets{{}, data, about.mean, about.deviation};
  SceneFeed feed(sets.test, testing_options(sets, options), device, options.channels_last);
  ImageModel model = make_model(options, shape, device);
  set_weights(*model, c.model);
  model->eval();

  const at::NoGradGuard guard;
  const at::Tensor confusion = at::zeros({shape.classes, shape.classes}, at::TensorOptions().dtype(at::kLong).device(device));
  SegmentPrediction p;
  p.count = data.count;
  p.class_names = about.class_names;
  bool scored = false;
  ImageTensors batch;
  feed.start(0);
  while (feed.next(batch)) {
    const AutocastGuard autocast(device.type(), options.amp);
    const at::Tensor logits = model->forward(batch.images).to(at::kFloat);
    if (!logits.isfinite().all().item<bool>()) fail("predict", "logits must be finite", "nan or infinity");
    const at::Tensor classes = logits.argmax(1);
    if (batch.labels.defined()) {
      add_confusion(confusion, classes, batch.labels, Mask::ignored);
      scored = true;
    }
    const at::Tensor bytes = classes.to(at::kByte).to(at::kCPU);
    for (size_t i = 0; i < batch.indices.size(); ++i) take(batch.indices[i], mask_of(bytes[static_cast<int64_t>(i)], feed.host().sizes[i]));
  }
  if (scored) p.ious = class_ious(confusion);
  p.mean_iou = mean_iou(p.ious);
  return p;
}

}  // namespace satchel
