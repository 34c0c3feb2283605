// Segmentation on the GPU: the loss is the CPU's, every method and type trains, and keeps what the plan says.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>

#include "cuda_fixture.h"
#include "satchel/autograd/pixel_loss.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/image_options.h"
#include "satchel/train/segment_train.h"

namespace satchel {
namespace {

class SegmentCuda : public Cuda {};

TEST_F(SegmentCuda, LossIsTheCpus) {
  at::manual_seed(5);
  PixelLossOptions o;
  o.classes = 7;
  const at::Tensor labels = at::randint(7, {3, 65, 40}, at::kByte);
  labels.narrow(1, 0, 9).fill_(255);
  const at::Tensor weights = at::rand({7}) + 0.1;
  for (const int64_t heads : {1, 2}) {
    const at::Tensor cpu = at::randn({3, heads * 7, 9, 5}).requires_grad_(), gpu = cpu.detach().cuda().requires_grad_();
    o.weights = weights;
    const at::Tensor expected = pixel_loss(cpu, labels, o);
    o.weights = weights.cuda();
    const at::Tensor got = pixel_loss(gpu, labels.cuda(), o);
    // float32 sums of 7,800 values: 2^-24·√7800 = 5e-6 of the largest.
    EXPECT_NEAR(got.item<double>(), expected.item<double>(), 2e-5 * expected.item<double>());
    const at::Tensor a = torch::autograd::grad({expected}, {cpu})[0], b = torch::autograd::grad({got}, {gpu})[0].cpu();
    EXPECT_LE((a - b).abs().max().item<double>(), 2e-5 * a.abs().max().item<double>());
  }
}

TEST_F(SegmentCuda, EveryMethodAndTypeTrainsAndKeepsWhatThePlanSays) {
  const SceneSets scenes = load_scenes("synthetic-shapes:count=16,size=64,shapes=4,classes=3,test=4", SceneTask::segmentation);
  for (const char* model : {"fcn_resnet50", "deeplabv3_resnet50"}) {
    for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
      for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) {
        SegmentTrainOptions o;
        o.model = model;
        o.method = parse_method(method);
        o.amp = amp;
        o.width = 16;
        o.epochs = 2;
        o.device = "cuda";
        const RunResult r = train_segmentation(scenes, o);
        const std::string where = std::string(model) + ' ' + method + " amp " + std::to_string(static_cast<int>(amp));
        EXPECT_TRUE(std::isfinite(r.loss)) << where;
        EXPECT_EQ(r.class_scores.size(), 4u) << where;
        if (o.method.torch_baseline) continue;
        const auto plan = planned_saves(o, shape_of(o, 4, 3, 64, 64), 64, 64);
        int64_t kept = 0;
        for (const SavedTensor& line : r.tensors) kept += line.kind == "loss" ? 0 : line.bytes;
        if (std::string(method) == "actnn") continue;  // its bits move after the first steps
        EXPECT_EQ(kept, total_bytes(plan)) << where;
      }
    }
  }
}

}  // namespace
}  // namespace satchel
