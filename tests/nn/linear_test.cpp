// What a linear layer tells of its gradients where bits are shared out (theory.md 5).
#include "satchel/autograd/linear.h"

#include <gtest/gtest.h>

#include <vector>

#include "satchel/autograd/bit_allocator.h"
#include "satchel/autograd/conv.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {
namespace {

/// Writes down what one layer tells.
class Listener : public BitAllocator {
 public:
  at::Tensor told;  // factor · squares: a sample's sensitivity over ‖R_n‖²

  BitAllocation input(const std::string&, int64_t, int64_t, double mean_bits, at::Device) override { return share(mean_bits, 0); }
  BitAllocation image(const std::string&, int64_t, int64_t, double mean_bits, at::Device) override { return share(mean_bits, -1); }
  double norm(int64_t, double mean_bits) override { return mean_bits; }
  bool wants_gradient(int64_t) const override { return true; }
  void saw_gradient(int64_t, const at::Tensor& squares, const at::Tensor&, double factor) override { told = squares.mul(factor); }

 private:
  static BitAllocation share(double mean_bits, int64_t layer) {
    BitAllocation s;
    s.mean_bits = mean_bits;
    s.layer = layer;
    return s;
  }
};

/// A linear layer of N×T×F is a convolution of one tap over T pixels of F channels: the same products, the same sensitivities.
TEST(LinearSensitivity, CountsPositionsAsAConvolutionOfOneTapDoes) {
  at::manual_seed(3);
  const auto by_linear = std::make_shared<Listener>(), by_conv = std::make_shared<Listener>();
  const std::vector<std::vector<int64_t>> shapes{{4, 5, 48}, {4, 48, 5}, {3, 64}};
  for (const auto& shape : shapes) {
    const int64_t features = shape.back();
    const at::Tensor x = at::randn(shape).requires_grad_(), w = at::randn({6, features}).requires_grad_();
    const at::Tensor map = (shape.size() == 2 ? x.detach().unsqueeze(2) : x.detach().transpose(1, 2)).contiguous().requires_grad_();
    const at::Tensor out = satchel::linear(x, w, {}, {parse_method("actnn"), "layer", by_linear}), g = at::randn(out.sizes());
    const at::Tensor same = conv(map, w.detach().unsqueeze(2).requires_grad_(), {}, {}, {parse_method("actnn"), "layer", by_conv});
    out.backward(g);
    same.backward(shape.size() == 2 ? g.unsqueeze(2) : g.transpose(1, 2));
    ASSERT_TRUE(by_linear->told.defined() && by_conv->told.defined());
    // float32 sums of the same squares in another order: 2^−24 of each, far below 10^−5.
    EXPECT_TRUE(at::allclose(by_linear->told, by_conv->told, 1e-5, 0)) << by_linear->told << by_conv->told;
  }
}

}  // namespace
}  // namespace satchel::test
