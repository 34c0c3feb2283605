// Detection on the GPU: losses and regions are the CPU's, every method and type trains, and keeps what the plan says.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/box_loss.h"
#include "satchel/autograd/roi_align.h"
#include "satchel/models/boxes.h"
#include "satchel/plan/detector_shape.h"
#include "satchel/train/detect_train.h"

namespace satchel {
namespace {

class DetectCuda : public Cuda {};

/// float32 sums of a few thousand values: 2^-24·√5000 = 4e-6 of the largest.
void expect_close(const at::Tensor& gpu, const at::Tensor& cpu, const char* what) {
  EXPECT_LE((gpu.cpu() - cpu).abs().max().item<double>(), 2e-5 * (cpu.abs().max().item<double>() + 1e-3)) << what;
}

TEST_F(DetectCuda, LossesAndRegionsAreTheCpus) {
  at::manual_seed(5);
  constexpr int64_t kClasses = 5, kBoxes = 3;
  const at::Tensor logits = at::randn({2, kBoxes * kClasses, 6, 7}), codes = at::randn({2, kBoxes * 4, 6, 7});
  AnchorTargets t{at::randint(-2, kClasses, {2, 6 * 7 * kBoxes}, at::kLong), at::randn({2, 6 * 7 * kBoxes, 4}), at::rand({2})};
  const AnchorTargets on_gpu{t.labels.cuda(), t.boxes.cuda(), t.weights.cuda()};
  const SavePolicy saving{parse_method("satchel"), "loss", {}};
  const auto both = [&](const at::Tensor& values, const AnchorTargets& targets, bool focal) {
    const at::Tensor leaf = values.detach().clone().requires_grad_(), map = leaf * 1;
    const at::Tensor loss = focal ? focal_loss_({map}, kClasses, targets, {}, saving) : box_loss_({map}, targets, 1.0 / 9, saving);
    return std::pair(loss.detach(), torch::autograd::grad({loss}, {leaf})[0]);
  };
  for (const bool focal : {true, false}) {
    const at::Tensor& values = focal ? logits : codes;
    const auto cpu = both(values, t, focal), gpu = both(values.cuda(), on_gpu, focal);
    expect_close(gpu.first, cpu.first, "loss");
    expect_close(gpu.second, cpu.second, "gradient");
  }
  const at::Tensor corner = at::rand({40, 2}) * 50, boxes = at::cat({corner, corner + at::rand({40, 2}) * 60}, 1);
  const at::Tensor image = at::randint(2, {40}, at::kLong), map = at::randn({2, 8, 12, 14});
  const auto regions = [&](const at::Tensor& from, const at::Tensor& where, const at::Tensor& whose) {
    const at::Tensor leaf = from.detach().clone().requires_grad_();
    RoiAlignOptions o;
    o.scale = 0.125;
    const at::Tensor out = roi_align(leaf, where, whose, o);
    return std::pair(out.detach(), torch::autograd::grad({out.square().sum()}, {leaf})[0]);
  };
  const auto cpu = regions(map, boxes, image), gpu = regions(map.cuda(), boxes.cuda(), image.cuda());
  expect_close(gpu.first, cpu.first, "regions");
  expect_close(gpu.second, cpu.second, "their gradient");
  const at::Tensor scores = at::rand({40});
  EXPECT_TRUE(at::equal(suppress(boxes.cuda(), scores.cuda(), image.cuda(), 0.3).cpu(), suppress(boxes, scores, image, 0.3)));
}

TEST_F(DetectCuda, EveryMethodAndTypeTrainsAndKeepsWhatThePlanSays) {
  const SceneSets scenes = load_scenes("synthetic-shapes:count=16,size=64,shapes=3,classes=3,test=4", SceneTask::detection);
  for (const char* model : {"retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"}) {
    for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
      for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) {
        for (const bool frozen : {false, true}) {
          DetectTrainOptions o;
          o.model = model;
          o.method = parse_method(method);
          o.amp = amp;
          o.width = 16;
          o.batch = 8;
          o.epochs = 2;
          o.lr = 1e-3;
          o.frozen_norm = frozen;
          o.trainable = frozen ? 3 : 5;
          o.device = "cuda";
          const RunResult r = train_detector(scenes, o);
          const std::string where =
              std::string(model) + ' ' + method + " amp " + std::to_string(static_cast<int>(amp)) + (frozen ? " frozen" : "");
          EXPECT_TRUE(std::isfinite(r.loss)) << where;
          EXPECT_EQ(r.more_scores.size(), 12U) << where;
          if (o.method.torch_baseline || has_regions(model) || std::string(method) == "actnn") continue;  // actnn's bits move
          const DetectorShape shape{model, 3, 3, 16, frozen, static_cast<int>(o.trainable)};
          const bool half = amp == Amp::bf16 || amp == Amp::fp16;
          int64_t kept = 0;
          for (const SavedTensor& line : r.tensors) kept += line.kind == "loss" ? 0 : line.bytes;
          EXPECT_EQ(kept, total_bytes(plan_detector(shape, {8, 64, 64, half}, o.method))) << where;
        }
      }
    }
  }
}

}  // namespace
}  // namespace satchel
