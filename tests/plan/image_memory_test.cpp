// What steps take of a GPU's memory, against what was measured on one (docs/results.md), and the model of torch's allocator by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/plan/image_step.h"

namespace satchel {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;
constexpr int64_t kWorkspace = 32 * kMiB;

TEST(CachingAllocator, SegmentsAndRoundings) {
  CachingAllocator a(1 << 30);
  const auto small = a.take(1);
  EXPECT_EQ(a.allocated(), 512);
  EXPECT_EQ(a.reserved(), 2 * kMiB);
  const auto more = a.take(kMiB);
  EXPECT_EQ(a.reserved(), 2 * kMiB) << "the rest of the small segment";
  const auto middle = a.take(kMiB + 1);
  EXPECT_EQ(a.allocated(), 512 + kMiB + kMiB + 512);
  EXPECT_EQ(a.reserved(), 22 * kMiB);
  const auto large = a.take(21 * kMiB);
  EXPECT_EQ(a.reserved(), 44 * kMiB) << "rounded up to 2 MiB";
  EXPECT_EQ(a.allocated(), 512 + kMiB + kMiB + 512 + 22 * kMiB) << "a rest of 1 MiB stays with its tensor";
}

TEST(CachingAllocator, TheSmallestBlockThatFitsIsSplitAndJoinedAgain) {
  CachingAllocator a(1 << 30);
  auto wide = a.take(100 * kMiB), narrow = a.take(40 * kMiB);
  wide.reset();
  narrow.reset();
  EXPECT_EQ(a.allocated(), 0);
  EXPECT_EQ(a.reserved(), 140 * kMiB) << "segments stay";
  auto first = a.take(30 * kMiB);  // in the 40
  auto second = a.take(60 * kMiB), third = a.take(39 * kMiB);
  EXPECT_EQ(a.reserved(), 140 * kMiB);
  second.reset();
  third.reset();
  const auto again = a.take(100 * kMiB);
  EXPECT_EQ(a.reserved(), 140 * kMiB) << "free neighbours have become one";
  EXPECT_EQ(a.peak_allocated(), 140 * kMiB);
  a.reset_peaks();
  EXPECT_EQ(a.peak_allocated(), 130 * kMiB);
}

TEST(CachingAllocator, ACapGivesBackWhatIsWhollyFree) {
  CachingAllocator a(100 * kMiB);
  auto one = a.take(60 * kMiB);
  const auto two = a.take(30 * kMiB);
  EXPECT_THROW(a.take(20 * kMiB), CachingAllocator::OutOfMemory);
  one.reset();
  auto part = a.take(20 * kMiB);
  EXPECT_THROW(a.take(50 * kMiB), CachingAllocator::OutOfMemory) << "40 free beside a tensor of 20 do not serve";
  part.reset();
  EXPECT_NO_THROW(a.take(70 * kMiB));
  EXPECT_EQ(a.reserved(), 100 * kMiB) << "30 stayed, 60 went for 70";
  CachingAllocator grows(100 * kMiB, /*grows=*/true);
  auto left = grows.take(60 * kMiB);
  const auto right = grows.take(30 * kMiB);
  left.reset();
  const auto there = grows.take(20 * kMiB);
  EXPECT_NO_THROW(grows.take(50 * kMiB));
}

ImageShape resnet50() {
  ImageShape shape;
  shape.name = "resnet50";
  shape.classes = 1000;
  return shape;
}

// `satchel bench images` counts a step's peak over weights, momentum, the batch, the gradients of the step before and what cuBLAS holds.
// Printed in 0.01 GiB, a third of a percent of the smallest; cuDNN's workspaces are in it and not in the plan: within one percent in all.
TEST(ImageMemory, PeaksAreThoseMeasured) {
  struct Point {
    const char* method;
    double tf32, bf16;  // GiB, ResNet-50 at batch 256 on an H200
  };
  const std::vector<Point> measured = {{"fp32", 20.44, 10.50},
                                       {"satchel,off=mean", 1.80, 1.21},
                                       {"satchel,off=mean,residual=1", 2.54, 1.30},
                                       {"satchel,off=mean,mean=2.25", 2.18, 1.33},
                                       {"actnn,adaptive=no", 2.33, 1.67},
                                       {"actnn", 2.33, 1.67},
                                       {"division", 2.36, 1.80}};
  for (const Point& point : measured) {
    for (const bool half : {false, true}) {
      const ImageMemory m = memory_of(resnet50(), {256, 224, 224, half}, parse_method(point.method));
      const double peak = static_cast<double>(m.peak - m.parameters - m.images - kWorkspace) / kGiB, seen = half ? point.bf16 : point.tf32;
      EXPECT_NEAR(peak / seen, 1, 0.01) << point.method << (half ? " bf16" : " TF32");
      EXPECT_GE(m.reserved, m.peak);
    }
  }
}

// fp32's saves, measured: the images stood before in float32; under autocast torch keeps a copy of them and of the weights.
TEST(ImageMemory, PlainSavesAreThoseMeasured) {
  const ImageMemory full = memory_of(resnet50(), {}, parse_method("fp32")),
                    half = memory_of(resnet50(), {256, 224, 224, true}, parse_method("fp32"));
  EXPECT_NEAR(static_cast<double>(full.saved - full.images) / kGiB, 20.34, 0.005);
  EXPECT_NEAR(static_cast<double>(half.saved) / kGiB, 10.50, 0.03);
}

/// The search of `satchel bench batch --memory-cap 16GB --multiple 16 --methods METHOD`: each try leaves cuBLAS's workspace, and the
/// segment that it lies in, to the next.
class Bench {
 public:
  Bench(const std::string& model, const std::string& method)
      : shape_(resnet50()), method_(parse_method(method)), allocator_(16000000000, wants_growing_segments(method_)) {
    shape_.name = model;
  }
  int64_t largest(int64_t guess) {
    constexpr int64_t kStep = 16, kEnd = (1 << 16) / kStep;
    int64_t at = guess / kStep, below = 0, above = kEnd + 1;
    while (above - below > 1) {
      (fits(at * kStep) ? below : above) = at;
      at = below == 0 ? above / 2 : above > kEnd ? std::min(kEnd, 2 * below) : (below + above) / 2;
    }
    return below * kStep;
  }

 private:
  bool fits(int64_t images) {
    bool fitted = true;
    try {
      const ImageLayers model = layers_of(shape_, 224, 224);
      ImageSteps steps(model, {images, 224, 224}, method_, allocator_, workspace_);
      for (int i = 0; i < 4; ++i) steps.run();
    } catch (const CachingAllocator::OutOfMemory&) {
      fitted = false;
    }
    allocator_.empty_cache();
    return fitted;
  }

  ImageShape shape_;
  Method method_;
  CachingAllocator allocator_;
  CachingAllocator::Tensor workspace_;
};

// What an H200 found in 16 GB, TF32, from the guesses of the plan of that time (docs/results.md).
TEST(ImageMemory, LargestBatchesAreThoseMeasured) {
  struct Point {
    const char *model, *method;
    int64_t guess, measured;
  };
  for (const Point& p : std::vector<Point>{{"resnet50", "fp32", 173, 176},
                                           {"resnet50", "satchel", 1907, 1864},
                                           {"resnet152", "fp32", 86, 80},
                                           {"resnet152", "satchel", 1342, 1296}}) {
    const int64_t found = Bench(p.model, p.method).largest(p.guess);
    EXPECT_NEAR(static_cast<double>(found) / static_cast<double>(p.measured), 1, 0.05) << p.model << ' ' << p.method << ' ' << found;
  }
}

TEST(ImageMemory, GrowsWithTheBatch) {
  const ImageShape shape = resnet50();
  for (const char* name : {"fp32", "actnn", "division", "satchel"}) {
    const Method method = parse_method(name);
    const ImageMemory one = memory_of(shape, {1, 64, 64}, method), many = memory_of(shape, {64, 64, 64}, method);
    EXPECT_EQ(one.parameters, 12 * 25557032) << name;
    EXPECT_EQ(one.saved, total_bytes(plan_image(shape, {1, 64, 64}, method)));
    EXPECT_EQ(one.images, 4 * 3 * 64 * 64) << name;
    EXPECT_EQ(one.offloaded, 0) << name;
    EXPECT_GT(one.peak, one.parameters + one.images + kWorkspace) << name;
    EXPECT_GT(many.peak, one.peak) << name;
    EXPECT_GE(many.reserved, many.peak) << name;
    EXPECT_GE(largest_batch(shape, 64, 64, method, many.reserved), 64) << name;
    EXPECT_EQ(largest_batch(shape, 64, 64, method, one.parameters), 0) << name;
    // Of what is found one more does not fit, and it does itself.
    const int64_t budget = 600 * kMiB, found = largest_batch(shape, 64, 64, method, budget);
    EXPECT_TRUE(memory_of(shape, {found, 64, 64}, method, budget).fits) << name;
    EXPECT_LE(memory_of(shape, {found, 64, 64}, method, budget).reserved, budget) << name;
    EXPECT_FALSE(memory_of(shape, {found + 1, 64, 64}, method, budget).fits) << name;
    EXPECT_GT(largest_batch(shape, 64, 64, method, budget, /*half=*/true), found) << name;
  }
}

// Where layer2.0 narrows layer1's 256 × 56 × 56, one gradient of that map stands, to which conv1 is about to add, and that of conv1's own
// 128 × 56 × 56, with the saves up to there, all weights' gradients but layer1's and the stem's, and an eighth of the samples decoded:
// as many as make at most 32 Mi values.
TEST(ImageMemory, OneOfTheWidestGradientsStandsInBackward) {
  const Method method = parse_method("satchel,off=mean");
  const int64_t wide = 4 * 256 * 56 * 56, inner = 4 * 128 * 56 * 56, images = 256;
  int64_t saves = 0, early = 0, large = 0;
  for (const SavedTensor& s : plan_image(resnet50(), {}, method)) {
    if (s.name == "layer2.0.bn1") break;
    saves += s.bytes;
    large += s.bytes > kMiB ? 1 : 0;
  }
  for (const ImageLayer& layer : layers_of(resnet50(), 224, 224).layers) {
    if (layer.name == "layer2.0.bn1") break;
    early += 4 * layer.parameters;  // the convolution whose gradient is being summed among them
  }
  const ImageMemory m = memory_of(resnet50(), {}, method);
  const int64_t standing = m.parameters - early + m.images + kWorkspace;
  const int64_t expected = standing + saves + images * (wide + inner) + 37 * wide;
  // Up to 1 MiB of its block stays with each large save.
  EXPECT_GE(m.peak, expected);
  EXPECT_LE(m.peak, expected + large * kMiB);
}

TEST(ImageMemory, SwappedSavesAreNotOnTheDevice) {
  const ImageShape shape = resnet50();
  const ImageMemory stays = memory_of(shape, {64, 224, 224}, parse_method("actnn"));
  const ImageMemory goes = memory_of(shape, {64, 224, 224}, parse_method("actnn,level=4"));
  EXPECT_EQ(goes.saved, stays.saved);
  // Codes of inputs and norms go but for what is below 64 KiB; masks, offsets and statistics stay: more than half of all goes.
  EXPECT_GT(goes.offloaded, goes.saved / 2);
  EXPECT_LT(goes.offloaded, goes.saved);
  EXPECT_LT(goes.peak, stays.peak);
  const auto largest = [&](const char* method) { return largest_batch(shape, 224, 224, parse_method(method), 16000000000); };
  EXPECT_GT(largest("actnn,level=4"), largest("actnn"));
}

}  // namespace
}  // namespace satchel
