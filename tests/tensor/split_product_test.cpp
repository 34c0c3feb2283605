// Products of rows and weights where no tensor cores serve: torch's own, and the rules that both ways share.
#include "satchel/tensor/split_product.h"

#include <ATen/Context.h>

#include <vector>

#include "reference.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;
using reference::same;

TEST(SplitProduct, IsTorchsOwnOnTheCpu) {
  const at::Tensor x = normal({3000, 100}, 1), y = normal({3000, 60}, 2), bias = normal({80}, 3);
  const at::Tensor w = normal({100, 80}, 4), v = normal({80, 60}, 5).t();
  EXPECT_FALSE(splits_product(w, 100, 3000));
  EXPECT_FALSE(splits_gradient(x.t(), x));
  const RowProduct one({w}, {}, 3000), two({w, v}, bias, 3000);
  EXPECT_FALSE(one.is_split());
  EXPECT_TRUE(same(one({x}), x.mm(w)));
  EXPECT_TRUE(same(two({x, y}), at::addmm(bias, x, w).addmm_(y, v)));
  const at::Tensor around = at::full({3000, 90}, 7.0);
  at::Tensor to = around.narrow(1, 5, 80);
  two.write(to, {x, y});
  EXPECT_TRUE(same(to.contiguous(), two({x, y})));
  to.fill_(7);
  EXPECT_TRUE((around == 7).all().item<bool>()) << "what stands around the result";
  EXPECT_FALSE(two.writes_in_place());
  const RowProduct square({normal({100, 100}, 12)}, {}, 3000);
  at::Tensor over = x.clone();
  expect_error([&] { square.write(over, {over}); }, "[split_product] rows must not be written over but where writes_in_place()");
  EXPECT_TRUE(same(over, x));
}

TEST(SplitProduct, TakesOtherTypes) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor x = normal({64, 20}, 6).to(type), w = normal({20, 12}, 7).to(type), bias = normal({12}, 8).to(type);
    EXPECT_TRUE(at::equal(RowProduct({w}, bias, 64)({x}), at::addmm(bias, x, w))) << type;
  }
}

TEST(SplitProduct, SaysWhatDoesNotFit) {
  const at::Tensor x = normal({50, 20}, 9), w = normal({20, 12}, 10), wide = normal({20, 13}, 11), bias = normal({12}, 12);
  expect_error([&] { RowProduct({}, {}, 50); }, "[split_product] there must be one or two factors, got 0");
  expect_error([&] { RowProduct({w, w, w}, {}, 50); }, "[split_product] there must be one or two factors, got 3");
  expect_error([&] { RowProduct({w, wide}, {}, 50); }, "[split_product] factors must be matrices");
  expect_error([&] { RowProduct({w, w.to(at::kDouble)}, {}, 50); }, "[split_product] factors must be matrices");
  expect_error([&] { RowProduct({w}, bias.narrow(0, 0, 11), 50); }, "[split_product] bias must have");
  const RowProduct product({w}, bias, 50);
  expect_error([&] { product({x, x}); }, "[split_product] there must be as many matrices of rows as factors, got 2");
  expect_error([&] { product({x.narrow(1, 0, 19)}); }, "[split_product] rows must have their factor's type");
  expect_error([&] { product({x.to(at::kDouble)}); }, "[split_product] rows must have their factor's type");
  at::Tensor narrow = at::empty({50, 11}), few = at::empty({49, 12});
  expect_error([&] { product.write(narrow, {x}); }, "[split_product] the result must have");
  expect_error([&] { product.write(few, {x}); }, "[split_product] rows and result must be as many");
  expect_error([&] { split_gradient_(at::zeros({20, 20}), x.t(), x, false); }, "[split_product] splits_gradient must be true");
}

TEST(SplitProduct, ReadsTorchsPrecisionHoweverItWasSet) {
  at::Context& torch = at::globalContext();
  const auto before = torch.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  torch.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::TF32);
  EXPECT_TRUE(allows_tf32());
  torch.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::IEEE);
  EXPECT_FALSE(allows_tf32());
  torch.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, before);
}

}  // namespace
}  // namespace satchel
