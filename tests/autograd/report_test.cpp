// The report of what backward would read, torch's own saves among it, against the allocator.
#include "satchel/autograd/report.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/loss.h"
#include "satchel/train/memory.h"
#include "tests/autograd/gradient.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).requires_grad_(); }
/// Whatever a forward pass leaves allocated beside its result is in the report, and nothing else is.
void expect_counted(const std::function<at::Tensor()>& forward, const std::string& what) {
  forward();  // tables and the like are made once
  const MemoryMeter meter(at::kCPU);
  const at::Tensor out = forward();
  const int64_t kept = meter.allocated() - static_cast<int64_t>(out.nbytes());
  EXPECT_EQ(total_bytes(saved_tensors(out)), kept) << what;
  EXPECT_GT(kept, 0) << what;
  out.sum().backward();
  EXPECT_TRUE(saved_tensors(out).empty()) << what << ": backward lets go of all";
}

TEST(Report, CountsTorchsOwnSaves) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({64, 32}), w = leaf({16, 32}), b = leaf({16}), v = leaf({8, 16}), map = leaf({4, 3, 8, 8}),
                   kernel = leaf({5, 3, 3, 3}), labels = at::randint(8, {64});
  const SavePolicy plain = saving_of("fp32");
  const auto net = [&](const SavePolicy& s) { return satchel::linear(relu(satchel::linear(x, w, b, s), s), v, {}, s); };
  expect_counted([&] { return net(plain); }, "linear, relu, linear");
  expect_counted([&] { return net(saving_of("satchel")); }, "the same packed");
  expect_counted([&] { return at::cross_entropy_loss(net(plain), labels); }, "cross-entropy");
  expect_counted([&] { return at::relu(at::conv2d(map, kernel, {}, 1, 1)).mean(); }, "convolution");
  expect_counted([&] { return at::gelu(at::layer_norm(at::linear(x, w, b), {16}, b, b)); }, "layer_norm, gelu");
  expect_counted([&] { return at::max_pool2d(at::conv2d(map, kernel), {2}); }, "max-pool");
  EXPECT_EQ(packed_tensors(net(plain)).size(), 0u);
}

TEST(Report, NamesTorchsNodesAndCountsMemoryOnce) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({64, 32}), w = leaf({16, 32});
  const at::Tensor h = at::linear(x, w), out = h * h;  // saves h twice; x and w stand anyway
  const auto lines = saved_tensors(out);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].kind, "torch");
  EXPECT_EQ(lines[0].name, "MulBackward0");
  EXPECT_EQ(lines[0].shape, (std::vector<int64_t>{64, 16}));
  EXPECT_EQ(lines[0].bytes, 64 * 16 * 4);
}

TEST(Report, OfAPackedNetIsBelowTorchsOwn) {
  at::manual_seed(1);
  const at::Tensor x = leaf({512, 64}), w = leaf({64, 64}), labels = at::randint(64, {512});
  const auto bytes = [&](const std::string& method) {
    const SavePolicy s = saving_of(method);
    const at::Tensor logits = satchel::linear(relu(satchel::linear(x, w, {}, s), s), w, {}, s);
    return total_bytes(saved_tensors(cross_entropy_(logits, labels)));
  };
  EXPECT_LT(bytes("satchel"), bytes("fp32"));
}

}  // namespace
}  // namespace satchel::test
