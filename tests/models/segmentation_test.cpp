// Segmentation: torch's gradients at 32 bits, the plan to the byte, and a loss that keeps the small logits' gradient alone.
#include "satchel/models/segmentation.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <set>

#include "satchel/autograd/pixel_loss.h"
#include "tests/models/image_models.h"
#include "tests/one_thread.h"

namespace satchel {
namespace {

using namespace testing_models;
using test::error_of;

ImageModelOptions segmentation_of(const std::string& name, const std::string& method, bool aux = true, double dropout = 0) {
  ImageModelOptions o = options_of(name, method, /*small_stem=*/false, dropout);
  o.aux = aux;
  return o;
}

TEST(Segmentation, LayersAreThoseOfThePlan) {
  const test::OneThread one;  // small maps
  for (const char* name : {"fcn_resnet50", "deeplabv3_resnet50"}) {
    for (const bool aux : {false, true}) {
      const ImageModelOptions o = segmentation_of(name, "satchel", aux);
      ImageModel model = make_image_model(o);
      int64_t planned = 0, made = 0;
      std::set<std::string> layers, prefixes;
      const ImageLayers list = layers_of(shape_of(o), 33, 47);
      for (const ImageLayer& layer : list.layers) {
        planned += layer.parameters;
        if (layer.parameters > 0) layers.insert(layer.name);
        for (const int map : layer.inputs) EXPECT_LT(map, layer.output) << layer.name;
      }
      for (const auto& item : model->named_parameters()) {
        made += item.value().numel();
        prefixes.insert(item.key().substr(0, item.key().rfind('.')));
      }
      EXPECT_EQ(made, planned) << name;
      EXPECT_EQ(prefixes, layers) << name;
      const ImageMap& last = list.maps.back();
      const at::Tensor x = at::randn({2, 3, 33, 47});
      EXPECT_EQ(model->forward(x).sizes(), (std::vector<int64_t>{2, last.channels, last.height, last.width})) << name;
      model->eval();
      EXPECT_EQ(model->forward(x).sizes(), (std::vector<int64_t>{2, kClasses, 33, 47})) << name;
    }
  }
}

TEST(Segmentation, KeepsWhatThePlanSays) {
  const test::OneThread one;  // small maps
  for (const char* method : {"fp32", "satchel", "satchel,mean=2.5", "division", "actnn"}) {
    expect_plan(segmentation_of("fcn_resnet50", method, true, 0.25), 32);
    expect_plan(segmentation_of("deeplabv3_resnet50", method, true, 0.25), 32);
  }
  for (const char* method : {"fp32", "satchel", "actnn"}) {
    expect_plan(segmentation_of("fcn_resnet101", method), 16);
    expect_plan(segmentation_of("deeplabv3_resnet101", method), 16);
  }
  expect_plan(segmentation_of("fcn_resnet50", "satchel", false), 48);
  expect_plan(segmentation_of("deeplabv3_resnet50", "actnn", false), 48);
}

TEST(Segmentation, ThirtyTwoBitsGiveTorchsGradients) {
  const test::OneThread one;  // small maps
  for (const char* name : {"fcn_resnet50", "deeplabv3_resnet50"}) {
    ImageModel plain = make_image_model(segmentation_of(name, "fp32"));
    const at::Tensor x = images(48);
    const std::vector<at::Tensor> a = gradients(plain, x);
    for (const char* method : {"satchel,bits=32", "actnn,adaptive=no,bits=32"}) {
      ImageModel ours = same_weights(plain, segmentation_of(name, method));
      const std::vector<at::Tensor> b = gradients(ours, x);
      ASSERT_EQ(a.size(), b.size());
      // As ImageModel.ThirtyTwoBitsGiveTorchsGradients: values close to a ReLU's threshold flip. A layer that is wired wrongly moves
      // gradients by their own size.
      EXPECT_LE(relative_error(a, b), 0.1) << name << ' ' << method;
      EXPECT_LE((a[0] - b[0]).abs().max().item<double>(), 1e-3 * a[0].abs().max().item<double>()) << name << ' ' << method;
    }
  }
}

TEST(Segmentation, OnlyTheBackboneStartsAsAResNet) {
  at::manual_seed(1);
  const auto all = named(make_image_model(segmentation_of("fcn_resnet50", "fp32")));
  // He's by what it gives: 1×1 from 16·8 to 4·16·8 channels, 65,536 numbers, known to 2.8e-3; four times that.
  EXPECT_NEAR(all.at("backbone.layer4.0.conv3.weight").std().item<double>() / std::sqrt(2.0 / 512), 1, 1.1e-2);
  // torch's own: uniform within 1/√(inputs), 512·9 of them; 589,824 numbers, known to 6e-4 of the deviation.
  EXPECT_NEAR(all.at("classifier.0.weight").std().item<double>() * std::sqrt(3.0 * 512 * 9), 1, 5e-3);
}

at::Tensor masks_of(int64_t height, int64_t width, int64_t classes) {
  const at::Tensor masks = at::randint(classes, {kImages, height, width}, at::kByte);
  masks.index_put_({at::rand({kImages, height, width}) < 0.3}, at::full({}, 255, at::kByte));
  return masks;
}

TEST(PixelLoss, IsTorchsAndKeepsTheSmallGradient) {
  at::manual_seed(5);
  for (const bool weighted : {false, true}) {
    for (const int64_t heads : {1, 2}) {
      PixelLossOptions o;
      o.classes = kClasses;
      if (weighted) o.weights = at::rand({kClasses}) + 0.1;
      at::Tensor small = at::randn({kImages, heads * kClasses, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
      const at::Tensor labels = masks_of(37, 45, kClasses);
      PixelLossOptions torchs = o;
      torchs.torch_own = true;
      const at::Tensor expected = pixel_loss(small, labels, torchs);
      const at::Tensor gradient = torch::autograd::grad({expected}, {small})[0];
      const MemoryMeter meter(at::kCPU);
      const at::Tensor loss = pixel_loss(small, labels, o);
      EXPECT_EQ(meter.allocated(), static_cast<int64_t>(small.nbytes() + loss.nbytes()));
      ASSERT_EQ(saved_tensors(loss).size(), 1u);
      // float32 sums of 5,000 values: 2^-24·√5000 = 4e-6 of the largest.
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
      const at::Tensor got = torch::autograd::grad({3 * loss}, {small})[0];
      EXPECT_LE((got - 3 * gradient).abs().max().item<double>(), 2e-5 * gradient.abs().max().item<double>());
      EXPECT_NEAR(pixel_loss(small.detach(), labels, o).item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    }
  }
}

TEST(PixelLoss, Bf16LogitsGetTheirOwnType) {
  at::manual_seed(6);
  PixelLossOptions o;
  o.classes = kClasses;
  const at::Tensor small = at::randn({kImages, kClasses, 4, 4}).to(at::kBFloat16).requires_grad_();
  const at::Tensor labels = masks_of(16, 16, kClasses), wide = small.detach().to(at::kFloat).requires_grad_();
  const at::Tensor got = torch::autograd::grad({pixel_loss(small, labels, o)}, {small})[0];
  const at::Tensor expected = torch::autograd::grad({pixel_loss(wide, labels, o)}, {wide})[0];
  EXPECT_EQ(got.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(got, expected.to(at::kBFloat16)));
}

TEST(PixelLoss, WhereNothingCounts) {
  PixelLossOptions o;
  o.classes = kClasses;
  const at::Tensor small = at::randn({2, kClasses, 4, 4}).requires_grad_();
  const at::Tensor loss = pixel_loss(small, at::full({2, 8, 8}, 255, at::kByte), o);
  EXPECT_EQ(loss.item<double>(), 0);
  EXPECT_TRUE(torch::autograd::grad({loss}, {small})[0].eq(0).all().item<bool>());
}

TEST(PixelLoss, BadInput) {
  PixelLossOptions o;
  o.classes = 3;
  const at::Tensor small = at::zeros({2, 3, 4, 4}), labels = at::zeros({2, 8, 8}, at::kByte);
  const auto error = [&](const at::Tensor& a, const at::Tensor& b) { return error_of([&] { pixel_loss(a, b, o); }); };
  EXPECT_EQ(error(small, labels + 3), "[pixel_loss] labels must be 0 to 2, or 255, got 3");
  EXPECT_EQ(error(at::zeros({2, 4, 4, 4}), labels),
            "[pixel_loss] logits must be floats, batch × heads·3 × height × width, got Float [2, 4, 4, 4]");
  EXPECT_EQ(error(small, labels.to(at::kLong)), "[pixel_loss] labels must be uint8, 2 × height × width, got Long [2, 8, 8]");
  o.weights = at::ones({2});
  EXPECT_EQ(error(small, labels), "[pixel_loss] weights must be 3 float32 numbers on the logits' device, got Float [2]");
  ImageModelOptions resnet = options_of("resnet18", "satchel");
  resnet.aux = true;
  EXPECT_EQ(error_of([&] { make_image_model(resnet); }), "[image_model] an auxiliary head is for segmentation, got resnet18");
}

}  // namespace
}  // namespace satchel
