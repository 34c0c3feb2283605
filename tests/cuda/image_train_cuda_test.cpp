// Image training on the GPU: every method, type and order of memory trains, and measures what it lists.
#include <cmath>
#include <string>

#include "cuda_fixture.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/train/image_train.h"
#include "satchel/train/loss_scale.h"

namespace satchel {
namespace {

const ImageSets& images() {
  static const ImageSets sets = [] {
    SyntheticImageOptions o;
    o.classes = 4;
    o.count = 512;
    o.test = 128;
    return make_synthetic_images(o);
  }();
  return sets;
}

ImageTrainOptions small(const std::string& method) {
  ImageTrainOptions o;
  o.method = parse_method(method);
  o.width = 16;
  o.epochs = 6;
  o.batch = 32;
  o.lr = 0.05;
  o.schedule = Decay::onecycle;
  o.augment = false;
  o.device = "cuda";
  o.seed = 3;
  return o;
}

class ImageTrainCuda : public Cuda {};

TEST_F(ImageTrainCuda, EveryMethodAndTypeLearns) {
  for (const char* method : {"fp32", "actnn", "actnn,level=4", "actnn,level=5", "division", "satchel", "satchel,mean=2.5"}) {
    for (const Autocast amp : {Autocast::none, Autocast::bf16, Autocast::fp16}) {
      ImageTrainOptions options = small(method);
      options.amp = amp;
      options.tf32 = true;
      const ImageRunResult r = train_images(images(), options);
      // By chance 25 % of 128 images are right, with a standard deviation of √(128·¼·¾) = 4.9 images: 45 % is 5 deviations above.
      EXPECT_GT(r.test, 45) << method << " amp " << static_cast<int>(amp);
      EXPECT_TRUE(std::isfinite(r.loss));
      EXPECT_GT(r.peak_bytes, 0);
    }
  }
}

TEST_F(ImageTrainCuda, SavesAreSmall) {
  ImageTrainOptions options = small("fp32");
  options.epochs = 1;
  const ImageRunResult fp32 = train_images(images(), options);
  for (const char* method : {"actnn", "division", "satchel", "satchel,mean=2.5"}) {
    options.method = parse_method(method);
    const ImageRunResult r = train_images(images(), options);
    EXPECT_LT(r.saved_bytes * 4, fp32.saved_bytes) << method;
    // Seeds stand in one line, those that are not kept among them: fewer than eight a line of the list.
    EXPECT_GE(r.saved_bytes, total_bytes(r.tensors)) << method;
    EXPECT_LE(r.saved_bytes, total_bytes(r.tensors) + 64 * static_cast<int64_t>(r.tensors.size())) << method;
  }
}

TEST_F(ImageTrainCuda, ContiguousImagesTrainToo) {
  for (const char* method : {"fp32", "satchel"}) {
    ImageTrainOptions options = small(method);
    options.channels_last = false;
    EXPECT_GT(train_images(images(), options).test, 45) << method;
  }
}

TEST_F(ImageTrainCuda, LossScaleWorksOnTheDevice) {
  LossScaler scaler({}, at::Device(at::kCUDA, 0));
  const at::Tensor g = at::full({3}, 131072.0, at::kCUDA);
  scaler.unscale_({g});
  scaler.update();
  EXPECT_EQ(g[0].item<float>(), 2);
  const at::Tensor bad = at::full({3}, INFINITY, at::kCUDA);
  scaler.unscale_({bad});
  scaler.update();
  EXPECT_EQ(scaler.scale(), 32768);
  EXPECT_EQ(scaler.skipped(), 1);
}

}  // namespace
}  // namespace satchel
