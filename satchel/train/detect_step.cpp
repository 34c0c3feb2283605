#include "satchel/train/detect_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/noise.h"
#include "satchel/train/image_step.h"

namespace satchel {
namespace {

constexpr uint32_t kDetectorWeights = 1, kSceneData = 2;  // ranks of seeds, as train_images' are
constexpr int64_t kMostFound = 100;                       // boxes of an image that are scored, COCO's number

std::vector<at::Tensor> trained(const torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : model.parameters()) {
    if (p.requires_grad()) parameters.push_back(p);
  }
  return parameters;
}

SceneLoaderOptions common_options(const std::vector<float>& mean, const std::vector<float>& deviation, const DetectTrainOptions& o) {
  SceneLoaderOptions l;
  l.batch = o.batch;
  l.view = o.sides.empty() ? SceneView::whole : SceneView::resized;
  l.longest = o.longest;
  l.multiple = kPadMultiple;
  l.masks = false;
  l.mean = mean;
  l.deviation = deviation;
  l.threads = static_cast<int>(o.loaders);
  return l;
}

}  // namespace

BoxFeed::BoxFeed(const SceneData& data, const SceneLoaderOptions& options, at::Device device, bool channels_last, int64_t first_class)
    : loader_(data, options),
      device_(device),
      order_(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous),
      first_class_(first_class) {}

at::Tensor BoxFeed::on_device(const void* values, at::IntArrayRef sizes, at::ScalarType type) const {
  at::Tensor host = at::empty(sizes, at::TensorOptions().dtype(type).pinned_memory(device_.is_cuda()));
  if (host.nbytes() > 0) std::memcpy(host.mutable_data_ptr(), values, host.nbytes());
  return host.to(device_, /*non_blocking=*/true);
}

void BoxFeed::start(int64_t epoch, int64_t batch) {
  loader_.start(epoch);
  SceneBatch passed;
  for (int64_t i = 0; i < batch; ++i) loader_.next(passed);
}

bool BoxFeed::next(BoxTensors& batch) {
  SceneBatch& host = batch.host;
  if (!loader_.next(host)) return false;
  batch.images = on_device(host.images.data(), {host.count, host.channels, host.height, host.width}, at::kFloat).contiguous(order_);
  std::vector<float> corners;
  std::vector<int64_t> labels, counts;
  for (const std::vector<ObjectBox>& objects : host.objects) {
    const size_t before = labels.size();
    for (const ObjectBox& o : objects) {
      if (o.crowd) continue;
      corners.insert(corners.end(), {o.left, o.top, o.right, o.bottom});
      labels.push_back(o.label + first_class_);
    }
    counts.push_back(static_cast<int64_t>(labels.size() - before));
  }
  const auto total = static_cast<int64_t>(labels.size());
  batch.targets.boxes = on_device(corners.data(), {total, 4}, at::kFloat).split_with_sizes(counts);
  batch.targets.labels = on_device(labels.data(), {total}, at::kLong).split_with_sizes(counts);
  batch.targets.image_sizes.clear();
  for (const SceneBatch::Size& s : host.sizes) batch.targets.image_sizes.push_back({s.height, s.width});
  batch.indices = host.indices;
  return true;
}

SceneLoaderOptions detect_training_options(const SceneSets& data, const DetectTrainOptions& o) {
  SceneLoaderOptions l = common_options(data.mean, data.deviation, o);
  if (!o.sides.empty()) l.sides = o.sides;
  l.shuffle = l.drop_last = true;
  l.flip = o.augment;
  l.seed = derive_seed(o.seed, 0, kSceneData, 0);
  return l;
}

SceneLoaderOptions detect_testing_options(const std::vector<float>& mean, const std::vector<float>& deviation,
                                          const DetectTrainOptions& o) {
  SceneLoaderOptions l = common_options(mean, deviation, o);
  if (!o.sides.empty()) l.sides = {o.sides.back()};
  return l;
}

int64_t first_class_of(const std::string& model) { return has_regions(model) ? 1 : 0; }

DetectorShape shape_of(const DetectTrainOptions& o, int64_t classes, int64_t channels) {
  const int64_t width = o.width != 0 ? o.width : DetectorShape().width;
  return {o.model, classes + first_class_of(o.model), channels, width, o.frozen_norm, static_cast<int>(o.trainable)};
}

Detector make_detector(const DetectTrainOptions& options, const DetectorShape& s, at::Device device,
                       const std::shared_ptr<BitAllocator>& allocator) {
  const SeededTorch weights(derive_seed(options.seed, 0, kDetectorWeights, 0));  // on the CPU: equal on every device and for every method
  DetectorOptions o{s.name, s.classes, s.channels, s.width, s.frozen_norm, s.trainable, {}};
  o.saving.method = options.method;
  o.saving.allocator = allocator;
  Detector model = make_detector(o);
  model->to(device);
  const at::NoGradGuard guard;
  const at::MemoryFormat order = options.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() == 4) p.set_data(p.contiguous(order));
  }
  model->train();
  return model;
}

DetectStep::DetectStep(Detector model, const DetectTrainOptions& options, at::Device device)
    : model_(std::move(model)),
      device_(device),
      amp_(options.amp),
      optimizer_(options, trained(*model_)),
      step_({[this] {
               const AutocastGuard autocast(device_.type(), amp_);
               outputs_ = model_->forward(images_, targets_);
               return outputs_.maps.front();
             },
             [this](const at::Tensor&) { return model_->loss(std::exchange(outputs_, {}), images_, targets_); },
             [this] {
               int64_t bytes = -static_cast<int64_t>(outputs_.maps.front().nbytes());
               for (const at::Tensor& map : outputs_.maps) bytes += static_cast<int64_t>(map.nbytes());
               return bytes;
             }},
            optimizer_, device_) {
  optimizer_.set_clip(options.max_norm);
}

at::Tensor DetectStep::operator()(const at::Tensor& images, const BoxTargets& targets, const Rates& rates, uint64_t seed, StepCost* cost) {
  images_ = images;
  targets_ = targets;
  optimizer_.set_rates(rates);
  at::Tensor loss = step_(seed, cost);
  images_.reset();
  targets_ = {};
  return loss;
}

std::vector<std::vector<FoundBox>> found_in(Detector& model, const BoxTensors& batch, at::Device device, Amp amp, int64_t first_class) {
  const at::NoGradGuard guard;
  const bool training = model->is_training();
  model->eval();
  std::vector<Detections> found;
  {
    const AutocastGuard autocast(device.type(), amp);
    found = model->detect(batch.images, batch.targets.image_sizes, kMostFound);
  }
  model->train(training);
  std::vector<std::vector<FoundBox>> all;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto host = [](const at::Tensor& t, at::ScalarType type) { return t.to(at::kCPU, type).contiguous(); };
    const at::Tensor boxes = host(found[i].boxes, at::kFloat), scores = host(found[i].scores, at::kFloat),
                     labels = host(found[i].labels, at::kLong);
    const SceneBatch::Size& s = batch.host.sizes[i];
    const float wide = static_cast<float>(s.own_width) / static_cast<float>(s.width),
                high = static_cast<float>(s.own_height) / static_cast<float>(s.height);
    const float* corner = boxes.const_data_ptr<float>();
    std::vector<FoundBox>& own = all.emplace_back();
    for (int64_t k = 0; k < scores.numel(); ++k, corner += 4) {
      own.push_back({corner[0] * wide, corner[1] * high, corner[2] * wide, corner[3] * high,
                     static_cast<int32_t>(labels.const_data_ptr<int64_t>()[k] - first_class), scores.const_data_ptr<float>()[k]});
    }
  }
  return all;
}

std::vector<ObjectBox> own_objects(const SceneData& data, const SceneBatch& batch, size_t i) {
  if (!data.objects.empty()) return data.objects[static_cast<size_t>(batch.indices[i])];
  std::vector<ObjectBox> objects = batch.objects[i];
  const SceneBatch::Size& s = batch.sizes[i];
  const float wide = static_cast<float>(s.own_width) / static_cast<float>(s.width),
              high = static_cast<float>(s.own_height) / static_cast<float>(s.height);
  for (ObjectBox& o : objects) {
    o.left *= wide;
    o.right *= wide;
    o.top *= high;
    o.bottom *= high;
  }
  return objects;
}

}  // namespace satchel
