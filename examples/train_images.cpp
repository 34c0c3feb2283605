// Trains a ResNet-18 on images of one's own, twice: with torch's saves and with packed ones. One line chooses what is kept.
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <cstdio>

#include "satchel/autograd/loss.h"
#include "satchel/autograd/report.h"
#include "satchel/models/image_model.h"
#include "satchel/plan/image_plan.h"

namespace {

/// 128 images of four classes: a class is a pattern of 3 × 16 × 16 values, an image its class's pattern under noise.
struct Images {
  at::Tensor labels = at::arange(128).remainder(4);
  at::Tensor values = at::randn({4, 3, 16, 16}).index_select(0, labels) + 0.5 * at::randn({128, 3, 16, 16});
};

struct Result {
  int64_t saved = 0;  // bytes kept from forward to backward by one batch
  double right = 0;   // share of the training images, in evaluation mode
};

Result train(const Images& images, const char* method) {
  torch::manual_seed(1);  // equal weights for every method
  const satchel::SavePolicy saving{satchel::parse_method(method)};
  const satchel::ImageModelOptions options{.name = "resnet18", .classes = 4, .small_stem = true, .width = 8, .saving = saving};
  satchel::ImageModel net = satchel::make_image_model(options);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));

  Result result;
  for (int64_t step = 0; step < 24; ++step) {
    const int64_t first = step % 4 * 32;
    const at::Tensor logits = net->forward(images.values.narrow(0, first, 32));
    // torch's own saves are not in the report: for fp32 the plan tells them, from sizes alone.
    if (step == 0) {
      const bool plain = saving.method.torch_baseline;
      result.saved = total_bytes(plain ? plan_image(shape_of(options), {32, 16, 16}, saving.method) : satchel::saved_tensors(logits));
    }
    const at::Tensor loss = satchel::cross_entropy_(logits, images.labels.narrow(0, first, 32));
    optimizer.zero_grad(), loss.backward(), optimizer.step();
  }
  net->eval();
  const at::NoGradGuard no_grad;
  result.right = net->forward(images.values).argmax(1).eq(images.labels).to(at::kFloat).mean().item<double>();
  return result;
}

}  // namespace

int main() {
  at::set_num_threads(1);  // maps this small are not worth waiting for a second one
  torch::manual_seed(0);
  const Images images;
  const Result fp32 = train(images, "fp32"), packed = train(images, "satchel");  // or actnn, division, "satchel,bits=3,residual=1" …
  std::printf("kept for backward: fp32 %ld bytes, satchel %ld bytes\n", static_cast<long>(fp32.saved), static_cast<long>(packed.saved));
  std::printf("right: fp32 %.1f %%, satchel %.1f %%\n", 100 * fp32.right, 100 * packed.right);
  return packed.right > 0.8 && 10 * packed.saved < fp32.saved ? 0 : 1;
}
