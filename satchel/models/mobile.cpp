#include "satchel/models/mobile.h"

#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/gate.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/smooth.h"

namespace satchel {

template <class Layer>
Layer MobileImpl::add(const std::string& path, Layer module) {
  torch::nn::Module* at = this;
  size_t first = 0;
  for (size_t dot = path.find('.'); dot != std::string::npos; first = dot + 1, dot = path.find('.', first)) {
    const std::string name = path.substr(first, dot - first);
    const auto* found = at->named_children().find(name);
    at = found != nullptr ? found->get() : at->register_module(name, std::make_shared<torch::nn::Module>()).get();
  }
  return at->register_module(path.substr(first), std::move(module));
}

MobileImpl::Step MobileImpl::add_step(const std::string& conv, const std::string& norm, const std::string& act, const ConvSizes& s) {
  const auto options = torch::nn::Conv2dOptions(s.in, s.out, s.window).stride(s.stride).padding(s.window / 2).groups(s.groups).bias(false);
  Step step;
  step.conv = add(conv, nn::Conv2d(options, saving(conv)));
  step.norm = add(norm, nn::BatchNorm2d(torch::nn::BatchNormOptions(s.out), saving(norm)));
  step.act = act;
  return step;
}

MobileImpl::Gate MobileImpl::add_gate(const std::string& at, int64_t channels, int64_t squeezed) {
  Gate gate;
  gate.at = at;
  gate.fc1 = add(at + "fc1", nn::Conv2d(torch::nn::Conv2dOptions(channels, squeezed, 1), saving(at + "fc1")));
  gate.fc2 = add(at + "fc2", nn::Conv2d(torch::nn::Conv2dOptions(squeezed, channels, 1), saving(at + "fc2")));
  return gate;
}

MobileImpl::Block MobileImpl::add_block(const MobileBlock& b) {
  int number = 0;
  const auto next = [&] { return b.at + std::to_string(number++); };
  const auto add_wide = [&](const ConvSizes& sizes) {
    const std::string at = next() + ".";
    return add_step(at + "0", at + "1", at + "2", sizes);
  };
  Block block;
  block.shape = b;
  if (b.widens()) block.wide.push_back(add_wide({b.in, b.wide}));
  block.wide.push_back(add_wide({b.wide, b.wide, b.window, b.stride, b.wide}));
  if (b.squeezed > 0) block.gate = add_gate(next() + ".", b.wide, b.squeezed);
  // MobileNetV2 has the last convolution and its norm in no list of their own.
  const std::string at = next();
  block.narrow = silu_ ? add_step(at + ".0", at + ".1", "", {b.wide, b.out}) : add_step(at, next(), "", {b.wide, b.out});
  return block;
}

MobileImpl::MobileImpl(const ImageModelOptions& o) : ImageModelImpl(o), silu_(o.name == "efficientnet_b0") {
  const MobileShape shape = mobile_shape(shape_of(o));
  stem_ = add_step("features.0.0", "features.0.1", "features.0.2", {o.channels, shape.stem, 3, shape.stride});
  for (const MobileBlock& block : shape.blocks) blocks_.push_back(add_block(block));
  const std::string& at = shape.head_at;
  head_ = add_step(at + "0", at + "1", at + "2", {shape.blocks.back().out, shape.head});
  classifier_ = add("classifier.1", nn::Linear(torch::nn::LinearOptions(shape.head, o.classes), saving("classifier.1")));
}

at::Tensor MobileImpl::activate(const at::Tensor& x, const std::string& name) const {
  return silu_ ? silu(x, saving(name)) : relu6(x, saving(name));
}

at::Tensor MobileImpl::run(Step& step, at::Tensor x) const {
  at::Tensor h = step.conv->forward(x);
  x.reset();
  return activate(step.norm->forward_to_sum(std::move(h)), step.act);
}

at::Tensor MobileImpl::run(Gate& gate, const at::Tensor& x) const {
  const at::Tensor mean = adaptive_avg_pool(x, {1, 1}, saving(gate.at + "avgpool"));
  const at::Tensor s = gate.fc2->forward(silu(gate.fc1->forward(mean), saving(gate.at + "activation")));
  return satchel::gate(x, sigmoid(s, saving(gate.at + "scale_activation")), saving(gate.at + "scale"));
}

at::Tensor MobileImpl::run(Block& block, const at::Tensor& x) const {
  at::Tensor h = x;
  for (Step& step : block.wide) h = run(step, std::move(h));
  if (block.gate.fc1) h = run(block.gate, h);
  h = block.narrow.conv->forward(h);
  if (!block.shape.adds()) return block.narrow.norm->forward(std::move(h));  // the next convolution shares what this norm keeps
  h = block.narrow.norm->forward_to_sum(std::move(h));
  h = drop_samples(h, block.shape.drop, block.narrow.norm->is_training(), saving(block.shape.at + "stochastic_depth"));
  return h.add_(x);
}

at::Tensor MobileImpl::forward(const at::Tensor& images) {
  check_images(images);
  at::Tensor x = run(stem_, images);
  for (Block& block : blocks_) x = run(block, x);
  x = run(head_, std::move(x));
  return classifier_->forward(drop(average(x, 1)));
}

}  // namespace satchel
