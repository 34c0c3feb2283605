// BatchNorm [+ residual sum] [→ ReLU] with the low-pass code in fused passes: the bytes of pack() and on_bits(), gradients within fp32
// rounding.
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1: what one fp32 operation may be off by, relatively

enum class After { nothing, relu, add };

at::Tensor channels_last(const at::Tensor& x) { return x.movedim(1, -1).contiguous().movedim(-1, 1); }

/// The sizes of residual networks; lines, windows and groups that are cut short; channels that fill no slab; one sample.
const std::vector<std::vector<int64_t>> kMaps = {{2, 64, 56, 56},   {3, 64, 7, 7},    {2, 512, 7, 7},  {1, 2048, 7, 7},  {2, 256, 14, 14},
                                                 {1, 1024, 14, 14}, {2, 128, 28, 28}, {2, 40, 28, 28}, {1, 512, 28, 28}, {1, 64, 112, 112},
                                                 {2, 256, 56, 56},  {4, 32, 3, 5},    {3, 24, 7, 7},   {2, 48, 14, 14},  {5, 8, 9, 16},
                                                 {2, 16, 32, 32},   {1, 8, 24, 24},   {2, 72, 33, 64}, {1, 32, 8, 1}};

/// A layer on the device and what the unfused functions make of it with the fused one's mean and deviation.
struct Layer {
  CodecSpec spec = parse_spec("division");
  After after;
  at::Tensor x, seed = seed_tensor(41, at::kCUDA);
  NormInput in;  // but for x, which stands apart
  RunningMoments running;
  NormResult result;

  Layer(at::IntArrayRef sizes, at::ScalarType type, After what, bool over, const char* text = "division")
      : spec(parse_spec(text)), after(what) {
    const int64_t channels = sizes[1];
    x = channels_last(normal(sizes, 42) * 1.5 + 0.3).to(type).cuda();
    in.gamma = normal({channels}, 43).cuda();
    in.gamma[channels / 2] = 0;
    in.beta = (normal({channels}, 44) * 0.5).cuda();
    running.mean = normal({channels}, 45).cuda();
    running.var = (normal({channels}, 46).abs() + 0.5).cuda();
    in.relu = what != After::nothing;
    if (what == After::add) in.skip = channels_last(normal(sizes, 47)).to(type).cuda();
    EXPECT_TRUE(fuses_norm_low_pass(x, spec));
    const at::Tensor own = x.clone();
    encode(own, over);
    EXPECT_EQ(result.z.strides(), x.strides());
    EXPECT_TRUE(over || same(own, x)) << "x was written";
  }

  void encode(const at::Tensor& from, bool over) {
    in.x = in.image = from;
    in.into = over ? from : at::Tensor();
    result = norm_low_pass_encode(in, running, {spec, seed});
  }

  at::Tensor rows(const at::Tensor& t) const { return rows_of_image(t); }
  const at::Tensor& mean() const { return result.save.moments.mean; }
  const at::Tensor& rstd() const { return result.save.moments.rstd; }

  void expect_same_saves() const {
    EXPECT_TRUE(same(result.save.code.bytes, pack(x, spec, seed).bytes));
    EXPECT_TRUE(same(result.save.code.bytes.cpu(), pack(x.cpu(), spec, 41).bytes));
    EXPECT_EQ(result.save.code.strides, pack(x, spec, seed).strides);
    const at::Tensor scale = in.gamma * rstd(), offset = (mean() * scale).neg_().add_(in.beta);
    const at::Tensor wide = rows(x).to(at::kFloat);
    at::Tensor y = apply_chain(wide, scale, offset, {}, {}, {0, 1});
    if (after == After::add) y = y + rows(in.skip).to(at::kFloat);
    if (in.relu) {
      EXPECT_TRUE(same(result.save.on, on_bits(y, {}, {})));
      y = y.relu();
    }
    EXPECT_TRUE(same(rows(result.z), y.to(x.scalar_type())));
  }

  void expect_moments() const {
    const at::Tensor wide = rows(x).to(at::kDouble), middle = wide.mean(0);
    const double n = static_cast<double>(wide.size(0));
    const at::Tensor var = (wide - middle).square().mean(0), deviation = (var + 1e-5).rsqrt();
    // Means of 8 values, one rounding each way and merged once a line: a thread has 1,024 lines at most here, whose roundings are relative
    // to the spread around the running mean; the mean itself is rounded once.
    EXPECT_TRUE(((mean() - middle).abs() <= (1024 + 8) * kUnit * var.sqrt() + 4 * kUnit * middle.abs()).all().item<bool>());
    EXPECT_TRUE(((rstd() - deviation).abs() <= deviation * ((2 * 1024 + 16) * kUnit)).all().item<bool>());
    const at::Tensor old_mean = normal({x.size(1)}, 45).cuda(), old_var = (normal({x.size(1)}, 46).abs() + 0.5).cuda();
    const at::Tensor new_mean = old_mean * 0.9 + middle * 0.1, new_var = old_var * 0.9 + var * (n / (n - 1) * 0.1);
    EXPECT_LE((running.mean - new_mean).abs().max().item<double>(), 2048 * kUnit * (1 + new_mean.abs().max().item<double>()));
    EXPECT_LE((running.var - new_var).abs().max().item<double>(), 4096 * kUnit * new_var.max().item<double>());
  }

  /// Sums and gradients against double, from the values that the codes stand for.
  void expect_gradients() const {
    const at::ScalarType type = x.scalar_type();
    const at::Tensor g = channels_last(normal(x.sizes(), 48)).to(type).cuda();
    const double n = static_cast<double>(x.numel() / x.size(1));
    // What is off is 0, whatever its sign was.
    const at::Tensor passed = in.relu ? chain_gradient(rows(g).to(at::kFloat), result.save.on, {}, {0, 0}) + 0.0 : rows(g);
    const at::Tensor gz = passed.to(at::kDouble);
    Packed wide = result.save.code;  // decoded to fp32, as backward reads it: unpack() of a bf16 tensor rounds to bf16
    wide.dtype = at::kFloat;
    const at::Tensor values = rows(unpack(wide)).to(at::kDouble), hat = (values - mean()) * rstd(), gx = gz * hat;
    const at::Tensor sum = gz.sum(0), along = gx.sum(0), size = gz.abs().sum(0);
    // A value less the mean is one fma of a level (1 to 1.75) with 4 steps and an offset (window − mean) + (low − 4 steps), of which each
    // is below the map's spread: 5 σ of x (its range is below 10 σ, rounded up, and it holds 0). 3 roundings of 4 + 5/3·4 + 5 of these.
    const at::Tensor spread = (values - values.mean(0)).square().mean(0).sqrt() * 5, far = (spread * 16 + mean().abs() * 2) * rstd();
    // A thread adds 32 values a window at most; 4,096 of a channel here; then 16 threads and the parts in double, rounded twice.
    const double rounding = (4096 + 4) * kUnit;
    const NormActSums sums = norm_sums(g, result.save);
    EXPECT_TRUE(((sums.beta - sum).abs() <= size * rounding).all().item<bool>());
    const at::Tensor along_bound = gx.abs().sum(0) * rounding + size * far * (3 * kUnit);
    EXPECT_TRUE(((sums.gamma - along).abs() <= along_bound).all().item<bool>()) << ((sums.gamma - along).abs() / along_bound).max();
    const NormActSums again = norm_sums(g, result.save);
    EXPECT_TRUE(same(again.beta, sums.beta) && same(again.gamma, sums.gamma));

    const at::Tensor factor = (in.gamma * rstd()).to(at::kDouble);
    const at::Tensor expected = (gz - sums.beta.to(at::kDouble) / n - hat * sums.gamma.to(at::kDouble) / n) * factor;
    // Factors: 4 roundings of what they multiply; the value: 3 of `far`; two fma; 16 bits round the result to 8 bits, or to 2^-25 of 1.
    const at::Tensor inner = (gz.abs() + sums.beta.abs() / n) * (6 * kUnit) + (hat.abs() * 8 + far * 3) * kUnit * sums.gamma.abs() / n;
    const at::Tensor bound =
        inner * factor.abs() + expected.abs() * (type == at::kFloat ? 0 : 0x1p-8) + (type == at::kHalf ? 0x1p-25 : 1e-30);
    const auto check = [&](const at::Tensor& dx) {
      const at::Tensor off = (rows(dx).to(at::kDouble) - expected).abs();
      EXPECT_TRUE((off <= bound).all().item<bool>()) << (off / bound).max();
    };
    const at::Tensor over = g.clone(), masked = g.clone(), dx = at::empty_like(g), alone = g.clone();
    norm_back_(over, over, result.save, in.gamma, sums);
    check(over);
    norm_back_(masked, dx, result.save, in.gamma, sums);
    check(dx);
    EXPECT_TRUE(same(rows(masked), gz.to(type)));
    norm_back_(alone, {}, result.save, in.gamma, sums);
    EXPECT_TRUE(same(alone, masked));
  }
};

class NormLowPassCuda : public Cuda {};

/// It shows where GPUs differ in their shared memory.
TEST_F(NormLowPassCuda, WhatIsFusedIsAskedOfTheTensorsDevice) {
  const c10::DeviceIndex count = c10::cuda::device_count();
  if (count < 2) GTEST_SKIP() << "one GPU only";
  for (c10::DeviceIndex own = 0; own < count; ++own) {
    for (const auto& sizes : kMaps) {
      const at::Tensor x = channels_last(at::zeros(sizes)).to(at::Device(at::kCUDA, own));
      const auto fused_from = [&](c10::DeviceIndex current) {
        const c10::cuda::CUDAGuard guard(current);
        return fuses_norm_low_pass(x, parse_spec("division"));
      };
      const bool want = fused_from(own);
      for (c10::DeviceIndex current = 0; current < count; ++current) {
        EXPECT_EQ(fused_from(current), want) << x.sizes() << " on GPU " << int{own} << " while GPU " << int{current} << " is current";
      }
    }
  }
}

TEST_F(NormLowPassCuda, SavesAndGradientsOfEveryMap) {
  for (const auto& sizes : kMaps) {
    for (const at::ScalarType type : kTypes) {
      for (const After after : {After::nothing, After::relu, After::add}) {
        if (!mine()) continue;
        SCOPED_TRACE(c10::str(at::IntArrayRef(sizes)) + " " + c10::toString(type) + " " + std::to_string(static_cast<int>(after)));
        const Layer layer(sizes, type, after, /*over=*/after == After::relu);
        layer.expect_same_saves();
        layer.expect_moments();
        layer.expect_gradients();
      }
    }
  }
}

TEST_F(NormLowPassCuda, OtherHeadersAndRounding) {
  for (const char* text : {"division,header=f32", "division,round=nearest", "division,sample=yes"}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 64, 56, 56}, {2, 64, 14, 14}}) {
      SCOPED_TRACE(text);
      const Layer layer(sizes, at::kFloat, After::relu, false, text);
      layer.expect_same_saves();
      layer.expect_gradients();
    }
  }
}

/// A map with NaN or infinity decodes to NaN: the channel's sum with x̂ and its gradient are NaN, all others stay finite.
TEST_F(NormLowPassCuda, ShowsWhatIsNotANumber) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 32, 56, 56}, {2, 32, 14, 14}}) {
    Layer layer(sizes, at::kFloat, After::relu, false);
    layer.x[1][5][3][2] = std::numeric_limits<float>::quiet_NaN();
    layer.x[0][9][10][1] = std::numeric_limits<float>::infinity();
    layer.encode(layer.x, false);
    EXPECT_TRUE(same(layer.result.save.code.bytes, pack(layer.x, layer.spec, layer.seed).bytes));
    EXPECT_TRUE(at::isnan(layer.result.z[1][5][3][2]).item<bool>());
    const at::Tensor g = at::ones_like(layer.x);
    const NormActSums sums = norm_sums(g, layer.result.save);
    norm_back_(g, g, layer.result.save, layer.in.gamma, sums);
    const at::Tensor bad = at::isnan(sums.gamma).cpu();
    EXPECT_EQ(bad.sum().item<int64_t>(), 2);
    EXPECT_TRUE(bad[5].item<bool>() && bad[9].item<bool>());
    EXPECT_TRUE(at::isnan(g.select(1, 5)).all().item<bool>() && at::isnan(g.select(1, 9)).all().item<bool>());
    EXPECT_EQ(at::isnan(g).sum().item<int64_t>(), 2 * g.numel() / 32);
  }
}

TEST_F(NormLowPassCuda, FitsOrSaysSo) {
  const CodecSpec spec = parse_spec("division");
  const auto x = [](at::IntArrayRef sizes) { return channels_last(normal(sizes, 49)).cuda(); };
  EXPECT_TRUE(fuses_norm_low_pass(x({2, 64, 28, 28}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 28, 28}).contiguous(), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 28, 28}).cpu(), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 63, 28, 28}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 1, 1}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 2, 2}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 64}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 8, 4, 8, 8}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 50, 50}), spec));
  EXPECT_FALSE(fuses_norm_low_pass(x({0, 64, 28, 28}), spec));
  for (const char* text :
       {"division,bits=4", "division,part=low", "division,part=high", "division,lowpass=4", "division,block=100", "block=256"}) {
    EXPECT_FALSE(fuses_norm_low_pass(x({2, 64, 28, 28}), parse_spec(text))) << text;
  }
}

/// One layer of a model, as a function of leaves.
struct Leaves {
  at::Tensor x, skip;
  NormWeights weights;

  Leaves(at::IntArrayRef sizes, bool last) {
    const auto leaf = [](const at::Tensor& t) { return t.cuda().requires_grad_(); };
    const auto map = [&](const at::Tensor& t) { return last ? channels_last(t) : t; };
    x = leaf(map(normal(sizes, 51) * 2 + 1));
    skip = leaf(map(normal(sizes, 52)));
    const auto floats = x.options();
    weights = {leaf(normal({sizes[1]}, 53).abs() + 0.5), leaf(normal({sizes[1]}, 54) * 0.3), at::zeros({sizes[1]}, floats),
               at::ones({sizes[1]}, floats)};
  }
  at::Tensor run(After after, const SavePolicy& saving) const {
    NormActOptions options;
    if (after == After::add) return norm_add_act(x, weights, skip, options, saving);
    return after == After::relu ? norm_act(x, weights, options, saving) : batch_norm(x, weights, options.statistics, saving);
  }
};

/// A map in channels_last order against the same in the shape's, which the functions of their own serve.
TEST_F(NormLowPassCuda, IsTheFunctionsOfTheirOwn) {
  const SavePolicy saving{parse_method("division"), "layer"};
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 64, 56, 56}, {4, 64, 14, 14}, {3, 128, 7, 7}}) {
    for (const After after : {After::nothing, After::relu, After::add}) {
      SCOPED_TRACE(c10::str(at::IntArrayRef(sizes)) + " " + std::to_string(static_cast<int>(after)));
      const Leaves a(sizes, true), b(sizes, false);
      at::manual_seed(5);
      const at::Tensor fused = a.run(after, saving);
      const int64_t next = fresh_seed(at::kCPU).item<int64_t>();
      at::manual_seed(5);
      const at::Tensor apart = b.run(after, saving);
      ASSERT_EQ(epilogue_kernel_of(fused), "norm_low_pass");
      ASSERT_EQ(epilogue_kernel_of(apart), "unfused");
      EXPECT_EQ(next, fresh_seed(at::kCPU).item<int64_t>()) << "another number of seeds was drawn";
      EXPECT_EQ(saved_tensors(fused), saved_tensors(apart));
      // Statistics of both within 2,064 units (expect_moments), twice; |x̂|, γ and skip are below 8.
      EXPECT_LE((fused - apart).abs().max().item<double>(), 4 * 2064 * kUnit * 64);

      const at::Tensor g = normal(sizes, 55).cuda();
      fused.backward(channels_last(g));
      apart.backward(g);
      // A value this close to 0 may fall on either side of the ReLU: its gradient is not compared, and may be missing in a sum.
      const at::Tensor near =
          after == After::nothing ? at::zeros_like(g, at::kBool) : (apart.detach() < 1e-2) & ((apart > 0) != (fused > 0));
      const at::Tensor missing = rows_of_image(at::where(near, g.abs(), at::zeros_like(g))).sum(0);
      // Sums in fp32: below 4,100 units of Σ|g| and of Σ|g·x̂|, |x̂| < 8, for each of the two; x̂ itself within 2,064 units of 8.
      const at::Tensor size = rows_of_image(g.abs()).sum(0) * (2 * 8 * (4100 + 2064) * kUnit) + missing * 8;
      EXPECT_TRUE(((a.weights.beta.grad() - b.weights.beta.grad()).abs() <= size).all().item<bool>());
      EXPECT_TRUE(((a.weights.gamma.grad() - b.weights.gamma.grad()).abs() <= size).all().item<bool>());
      // γ·rstd < 3, from the statistics within 2,064 units; the sums' part: their difference over N, times |x̂| < 8.
      const double n = static_cast<double>(g.numel() / sizes[1]);
      const at::Tensor bound = (rows_of_image(g.abs()) * (8 * 2064 * kUnit) + size * (9.0 / n) + 8 * 2064 * kUnit) * 3;
      const at::Tensor fits = (rows_of_image(a.x.grad() - b.x.grad()).abs() <= bound) | rows_of_image(near);
      EXPECT_TRUE(fits.all().item<bool>()) << (~fits).sum().item<int64_t>() << " values differ";
      if (after == After::add) {
        EXPECT_TRUE(same(at::where(near, at::zeros_like(g), a.skip.grad() + 0.0), at::where(near, at::zeros_like(g), b.skip.grad() + 0.0)));
      }
    }
  }
}

TEST_F(NormLowPassCuda, OnlyWhereItServes) {
  Leaves leaves({2, 64, 14, 14}, true);
  NormActOptions options;
  const auto fuses = [&](const char* method) {
    return epilogue_kernel_of(norm_act(leaves.x, leaves.weights, options, {parse_method(method), ""})) == "norm_low_pass";
  };
  const auto adds = [&](const at::Tensor& skip) {
    return epilogue_kernel_of(norm_add_act(leaves.x, leaves.weights, skip, options, {parse_method("division"), ""})) == "norm_low_pass";
  };
  EXPECT_TRUE(fuses("division"));
  EXPECT_FALSE(fuses("satchel") || fuses("actnn") || fuses("fp32") || fuses("exact"));
  options.activation = Activation::leaky_relu;
  EXPECT_FALSE(fuses("division"));
  options.activation = Activation::none;
  EXPECT_TRUE(fuses("division"));
  EXPECT_FALSE(adds(leaves.skip));
  options.activation = Activation::relu;
  EXPECT_TRUE(adds(leaves.skip));
  EXPECT_FALSE(adds(leaves.skip.to(at::kHalf)));
  options.statistics.training = false;
  EXPECT_FALSE(fuses("division"));
  options.statistics.training = true;
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(fuses("division"));
}

}  // namespace
}  // namespace satchel
