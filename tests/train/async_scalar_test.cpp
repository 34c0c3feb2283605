// A loss that is read a step late; on a GPU: tests/cuda/torch_rules_cuda_test.cpp.
#include "satchel/train/async_scalar.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "satchel/core/error.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/train/image_train.h"

namespace satchel {
namespace {

TEST(LateNumberTest, IsTheNumber) {
  EXPECT_EQ(AsyncScalar(at::full({}, 0.1f)).read(), static_cast<double>(0.1f));
  EXPECT_EQ(AsyncScalar(at::full({1}, 3.5).requires_grad_()).read(), 3.5);
  EXPECT_TRUE(std::isnan(AsyncScalar(at::full({}, std::numeric_limits<float>::quiet_NaN())).read()));
}

TEST(LateNumberTest, IsOne) {
  EXPECT_THROW(AsyncScalar(at::empty({2})), Error);
  EXPECT_THROW(AsyncScalar{at::Tensor()}, Error);
}

/// Six steps an epoch, of which the fifth throws the weights away: the sixth's loss is NaN, and no step comes after it to read it.
TEST(LateNumberTest, TheLastLossOfAnEpochIsReadToo) {
  SyntheticImageOptions data;
  data.classes = 4;
  data.size = 16;
  data.count = 192;
  data.test = 32;
  ImageTrainOptions o;
  o.width = 8;
  o.epochs = 2;
  o.batch = 32;
  o.lr = 0.05;
  o.schedule = Decay::step;
  o.milestones = {4.0 / 6};
  o.gamma = 1e30;
  std::string error;
  int64_t epochs = 0;
  try {
    train_images(make_synthetic_images(data), o, [&](const ImageProgress& p) {
      EXPECT_TRUE(std::isfinite(p.loss));
      epochs = p.epoch;
      return true;
    });
  } catch (const Error& e) {
    error = e.what();
  }
  EXPECT_NE(error.find("nan at epoch 1, step 6"), std::string::npos) << error;
  EXPECT_EQ(epochs, 0);
}

}  // namespace
}  // namespace satchel
