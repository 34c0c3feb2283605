// BatchNorm of maps, residual sum and ReLU in fused passes, in equal bits and in bits per sample: the bytes of pack(), pack_per_sample()
// and on_bits() of the same values, gradients within fp32 rounding.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/saved.h"
#include "satchel/core/error.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1: what one fp32 operation may be off by, relatively

enum class Kind { norm, relu, sum };

/// rows × channels as the N×C×H×W map that they are, and back.
at::Tensor map_of(const at::Tensor& rows, at::IntArrayRef sizes) {
  return rows.view({sizes[0], sizes[2], sizes[3], sizes[1]}).permute({0, 3, 1, 2});
}

/// Everything a norm has, on the device, and what the unfused functions make of it with the same mean and deviation.
struct Layer {
  std::vector<int64_t> sizes;
  CodecSpec spec;
  double mean_bits;  // 0: the spec's own for all
  Kind kind;
  at::Tensor x, skip, gamma, beta, seed = seed_tensor(91, at::kCUDA);
  ColumnMoments moments;
  at::Tensor hat, on, z;
  Packed code;

  Layer(std::vector<int64_t> shape, at::ScalarType type, const char* text, double mean, Kind what)
      : sizes(std::move(shape)), spec(parse_spec(text)), mean_bits(mean), kind(what) {
    const int64_t channels = sizes[1], rows = sizes[0] * sizes[2] * sizes[3];
    // Samples of ranges that differ, so that their bits do.
    const at::Tensor scale = at::exp(normal({sizes[0]}, 97)).repeat_interleave(rows / sizes[0]).unsqueeze(1);
    x = (normal({rows, channels}, 98) * scale + 0.3).to(type).cuda();
    if (kind == Kind::sum) skip = normal({rows, channels}, 99).to(type).cuda();
    gamma = normal({channels}, 93).cuda();
    gamma[channels / 2] = 0;
    beta = (normal({channels}, 94) * 0.5).cuda();
    moments = {(normal({channels}, 95) * 0.2).cuda(), (normal({channels}, 96).abs() + 0.5).cuda()};
    make();
  }

  /// From x on.
  void make() {
    hat = at::sub(x.to(at::kFloat), moments.mean).mul_(moments.rstd);
    at::Tensor y = apply_chain(hat, gamma, beta, {}, {}, {0, 1});
    if (kind == Kind::sum) y.add_(skip.to(at::kFloat));
    if (kind != Kind::norm) on = on_bits(y, {}, {});
    z = apply_chain(y, {}, {}, {}, {}, {0, kind == Kind::norm ? 1.0 : 0.0}).to(x.scalar_type());
    code = {};
    if (mean_bits > 0) {
      code = pack_per_sample(map_of(hat, sizes), spec, seed, mean_bits);
    } else {
      code = pack(map_of(hat, sizes), spec, seed);
    }
  }

  at::Tensor map() const { return map_of(x, sizes); }
  at::Tensor bytes() const { return code.bytes; }
  /// What backward reads, in float64.
  at::Tensor decoded() const {
    const at::Tensor back = unpack(code);
    return back.permute({0, 2, 3, 1}).reshape(x.sizes()).to(at::kDouble);
  }

  /// What the unfused functions keep, for backward.
  NormSave save() const {
    NormSave s;
    s.pass = FusedNorm::image;
    s.code = code;
    s.moments = moments;
    s.on = on;
    return s;
  }

  NormResult fused(const at::Tensor& from, const at::Tensor& other, const at::Tensor& into) const {
    return norm_image_encode({from, moments, gamma, beta, other, into, map_of(from, sizes), kind != Kind::norm}, {spec, seed}, mean_bits);
  }

  void expect_same(bool over_x, bool over_skip) const {
    const at::Tensor from = over_x ? x.clone() : x, other = over_skip ? skip.clone() : skip;
    const NormResult result = fused(from, other, over_x ? from : over_skip ? other : at::Tensor());
    const at::Tensor got = result.save.code.bytes;
    EXPECT_TRUE(same(got, bytes())) << (got != bytes()).sum().item<int64_t>() << " bytes differ";
    EXPECT_EQ(result.save.on.defined(), on.defined());
    if (on.defined()) {
      EXPECT_TRUE(same(result.save.on, on));
    }
    EXPECT_TRUE(same(result.z, z));
    EXPECT_EQ(result.save.code.strides, code.strides);
  }
};

/// Calls f(layer) with all bits, types and kinds, channels that divide 256 and that do not, and samples of one block and of many.
template <class F>
void for_layers(const F& f) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 1, 16, 16}, {2, 64, 2, 2},    {5, 7, 16, 16},
                                                    {3, 40, 8, 4},  {2, 100, 16, 16}, {4, 512, 7, 7}};
  for (const at::ScalarType type : kTypes) {
    for (const std::vector<int64_t>& shape : shapes) {
      for (const Kind kind : {Kind::norm, Kind::relu, Kind::sum}) {
        for (int bits = 0; bits <= 8; ++bits) {
          if (!mine()) continue;
          const std::string text = "actnn,bits=" + std::to_string(bits == 0 ? 2 : bits);
          SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::to_string(shape[1]) + " channels, " + text);
          const Layer layer(shape, type, text.c_str(), bits == 0 ? 2.6 : 0, kind);
          ASSERT_TRUE(fuses_norm_image(layer.map(), layer.spec, bits == 0));
          f(layer);
        }
      }
    }
  }
}

TEST_F(Cuda, NormImageKeepsTheBytesOfTheUnfusedPath) {
  for_layers([](const Layer& layer) {
    layer.expect_same(false, false);
    layer.expect_same(true, false);
    if (layer.kind == Kind::sum) layer.expect_same(false, true);
  });
}

TEST_F(Cuda, NormImageOfOtherHeadersRoundingAndLargeMaps) {
  for (const char* text : {"actnn,header=f32", "actnn,round=nearest", "actnn,header=f32,round=nearest"}) {
    for (const double mean : {0.0, 1.0, 2.0, 3.7, 8.0}) {
      SCOPED_TRACE(std::string(text) + " " + std::to_string(mean));
      Layer({33, 256, 14, 14}, at::kFloat, text, mean, Kind::sum).expect_same(true, false);
      Layer({9, 128, 28, 28}, at::kBFloat16, text, mean, Kind::relu).expect_same(false, false);
    }
  }
}

TEST_F(Cuda, NormImageShowsWhatIsNotANumber) {
  for (const double mean : {0.0, 2.5}) {
    Layer layer({3, 64, 8, 8}, at::kFloat, "actnn", mean, Kind::relu);
    layer.gamma.fill_(1);  // so that the infinity is on: what is off and infinite is 0 behind torch's ReLU and NaN behind ours
    layer.x[0][5] = std::numeric_limits<float>::quiet_NaN();
    layer.x[191][1] = std::numeric_limits<float>::infinity();
    layer.make();
    const NormResult result = layer.fused(layer.x, {}, {});
    EXPECT_TRUE(same(result.save.code.bytes, layer.bytes()));
    EXPECT_TRUE(at::isnan(result.z[0][5]).item<bool>());
    EXPECT_FALSE(at::isfinite(result.z[191][1]).item<bool>());
    EXPECT_EQ((~at::isfinite(result.z)).sum().item<int64_t>(), 2);
    // Every channel meets a poisoned block: Σ g·x̂ and with it the gradient of x are NaN, Σ g is not.
    const at::Tensor g = at::ones_like(layer.x);
    const NormActSums sums = norm_sums(g, result.save);
    EXPECT_TRUE(at::isfinite(sums.beta).all().item<bool>());
    EXPECT_TRUE(at::isnan(sums.gamma).all().item<bool>());
    norm_back_(g, g, result.save, layer.gamma, sums);
    EXPECT_TRUE(at::isnan(g).all().item<bool>());
  }
}

/// Sums and both gradients of layers whose threads walk at most `steps` steps.
void expect_gradients(const Layer& layer, double steps) {
  const double rows = static_cast<double>(layer.x.size(0));
  const at::ScalarType type = layer.x.scalar_type();
  const at::Tensor g = normal(layer.x.sizes(), 79).to(type).cuda();
  const at::Tensor passed = layer.on.defined() ? chain_gradient(g.to(at::kFloat), layer.on, {}, {0, 0}) : g.to(at::kFloat);
  const at::Tensor gy = passed.to(at::kDouble), x = layer.decoded(), gx = gy * x;
  const at::Tensor sum = gy.sum(0), along = gx.sum(0), size = gy.abs().sum(0), size_x = gx.abs().sum(0);
  const NormActSums sums = norm_sums(g, layer.save());
  // Additions: one a step, then 8 warps, then one rounding of the double sum; the product with x̂, itself rounded once, is fused.
  const double rounding = (steps + 8 + 1) * kUnit;
  EXPECT_TRUE(((sums.beta - sum).abs() <= size * rounding).all().item<bool>());
  EXPECT_TRUE(((sums.gamma - along).abs() <= size_x * (rounding + kUnit)).all().item<bool>());
  const NormActSums again = norm_sums(g, layer.save());
  EXPECT_TRUE(same(again.beta, sums.beta) && same(again.gamma, sums.gamma));

  const at::Tensor factor = layer.gamma.to(at::kDouble) * layer.moments.rstd;
  const at::Tensor expected = (gy - sum / rows - x * along / rows) * factor;
  // The sums' errors, 2 for their shares, 1 each for fma, subtraction and the two products with the factor, 1 for x̂, second order: 1 more.
  // Halves round the result: bf16 to 8 bits, f16 to 11.
  const at::Tensor inner = (gy.abs() + (size + x.abs() * size_x) / rows) * (rounding + 8 * kUnit);
  const double coarse = type == at::kFloat ? 0 : type == at::kHalf ? 0x1p-11 : 0x1p-8;
  const at::Tensor bound = inner * factor.abs() + expected.abs() * coarse + (type == at::kHalf ? 0x1p-24 : 1e-30);
  const auto back = [&](const at::Tensor& own, const at::Tensor& dx) { norm_back_(own, dx, layer.save(), layer.gamma, sums); };
  const at::Tensor both = g.clone(), dx = at::empty_like(g), over = g.clone(), alone = g.clone();
  at::Tensor squares;
  norm_back_(both, dx, layer.save(), layer.gamma, sums, &squares);
  // Of dx before it is rounded to its type: twice that, and one fma a value, five additions, and torch's own sum of the blocks.
  const at::Tensor by_sample = dx.to(at::kDouble).square().view({layer.sizes[0], -1}).sum(1);
  EXPECT_TRUE(((squares - by_sample).abs() <= by_sample * (2 * coarse + 64 * kUnit) + 1e-12).all().item<bool>());
  back(over, over);
  back(alone, {});
  EXPECT_TRUE(((dx - expected).abs() <= bound).all().item<bool>()) << ((dx - expected).abs() / bound).max();
  EXPECT_TRUE(same(over, dx));
  EXPECT_TRUE(same(both, passed.to(type)) && same(alone, passed.to(type)));
}

TEST_F(Cuda, NormImageGradients) {
  for_layers([](const Layer& layer) { expect_gradients(layer, 1); });
}

TEST_F(Cuda, NormImageGradientsOfLargeMaps) {
  for (const double mean : {0.0, 2.0}) {
    // 33·256·28·28 values in 395 thread blocks or more (a multiple of 1) of 8 warps, 256 values a warp and step: 8.2 steps.
    expect_gradients(Layer({33, 256, 28, 28}, at::kFloat, "actnn", mean, Kind::sum), 9);
    expect_gradients(Layer({9, 100, 64, 64}, at::kBFloat16, "actnn", mean, Kind::relu), 6);  // 375 blocks: 4.8 steps
  }
}

/// z's ranges are those that are taken of z: the next layer's bytes are the same with them.
TEST_F(Cuda, NormImagePassesRangesOn) {
  for (const at::ScalarType type : kTypes) {
    const Layer layer({5, 40, 8, 4}, type, "actnn", 2.4, Kind::sum);
    NormInput in{layer.x, layer.moments, layer.gamma, layer.beta, layer.skip, {}, layer.map()};
    in.takes_ranges = true;
    const NormResult result = norm_image_encode(in, {layer.spec, layer.seed}, 2.4);
    const at::Tensor z = map_of(result.z, layer.sizes);
    at::Tensor measured, passed;
    const Packed apart = pack_per_sample(z, layer.spec, layer.seed, 3.1, {}, &measured);
    const Packed fused = pack_per_sample(z, layer.spec, layer.seed, 3.1, {}, &passed, result.z_ranges);
    EXPECT_TRUE(same(apart.bytes, fused.bytes) && same(measured, passed));
    EXPECT_THROW(pack_per_sample(z, layer.spec, layer.seed, 3.1, {}, nullptr, result.z_ranges.narrow(0, 1, 3)), Error);
  }
}

TEST_F(Cuda, RangesAreOfTheNextReaderOfAnUntouchedTensor) {
  const at::Tensor x = normal({4, 64, 8, 8}, 7).cuda().contiguous(at::MemoryFormat::ChannelsLast), other = x.clone();
  const at::Tensor nobodys = at::full({4 * 16, 2}, std::numeric_limits<float>::quiet_NaN(), x.options());  // whoever reads them is NaN
  const SavePolicy saving{parse_method("actnn"), "layer", {}};
  const auto reads = [&](const at::Tensor& t) { return at::isnan(Saved(t, saving).restore()).all().item<bool>(); };
  pass_on_ranges(x, nobodys);
  EXPECT_TRUE(reads(x.detach()));
  EXPECT_FALSE(reads(x)) << "they are forgotten";
  pass_on_ranges(x, nobodys);
  EXPECT_FALSE(reads(other));
  EXPECT_FALSE(reads(x)) << "they are forgotten";
  pass_on_ranges(x, nobodys);
  {
    const c10::cuda::CUDAStreamGuard elsewhere(c10::cuda::getStreamFromPool());
    EXPECT_FALSE(reads(x)) << "another stream must not read what this one gives back";
  }
  pass_on_ranges(x, nobodys);
  x.add_(1);
  EXPECT_FALSE(reads(x)) << "x has changed";
}

TEST_F(Cuda, NormImageFitsOrSaysSo) {
  const auto map = [](at::IntArrayRef sizes) { return normal(sizes, 81).cuda().contiguous(at::MemoryFormat::ChannelsLast); };
  const auto fuses = [](const at::Tensor& x, const char* text, bool per_sample) {
    return fuses_norm_image(x, parse_spec(text), per_sample);
  };
  const at::Tensor x = map({4, 64, 8, 8});
  for (const bool per_sample : {false, true}) {
    EXPECT_TRUE(fuses(x, "actnn", per_sample));
    EXPECT_TRUE(fuses(x.to(at::kHalf), "actnn,bits=4", per_sample));
    EXPECT_TRUE(fuses(map({2, 2048, 7, 7}), "actnn", per_sample));
    EXPECT_FALSE(fuses(x.cpu(), "actnn", per_sample));
    EXPECT_FALSE(fuses(x.contiguous(), "actnn", per_sample)) << "another order of memory";
    EXPECT_FALSE(fuses(map({4, 64, 3, 3}), "actnn", per_sample)) << "576 values a sample";
    EXPECT_FALSE(fuses(map({4, 401, 16, 16}), "actnn", per_sample)) << "a prime number of channels above 396";
    EXPECT_FALSE(fuses(x, "actnn,block=128", per_sample));
    EXPECT_FALSE(fuses(x, "bits=32", per_sample));
    EXPECT_FALSE(fuses(x, "side=one", per_sample));
    EXPECT_FALSE(fuses(x, "division", per_sample));
    EXPECT_FALSE(fuses(x, "actnn,levels=optimal", per_sample));
    EXPECT_FALSE(fuses(x.narrow(0, 0, 0), "actnn", per_sample));
  }
}

/// As functions: one node, the plan's lines, and the gradients of torch's own functions where 8 bits are kept.
TEST_F(Cuda, NormImageIsTorchsFunctions) {
  const auto leaf = [](const at::Tensor& t) { return t.cuda().requires_grad_(); };
  for (const char* method : {"actnn,bits=8", "actnn,bits=8,adaptive=no"}) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{8, 64, 8, 8}, {8, 60, 5, 5}}) {  // fused, and not
      SCOPED_TRACE(std::string(method) + " of " + std::to_string(sizes[1]) + " channels");
      const auto channels_last = [&](uint64_t seed) { return leaf(normal(sizes, seed).contiguous(at::MemoryFormat::ChannelsLast)); };
      const at::Tensor x = channels_last(1), skip = channels_last(2), g = channels_last(3).detach();
      const at::Tensor gamma = leaf(normal({sizes[1]}, 4).abs() + 0.5), beta = leaf(normal({sizes[1]}, 5));
      const SavePolicy saving{parse_method(method), "layer", {}};
      const at::Tensor ours = norm_add_act(x, {gamma, beta, {}, {}}, skip, {}, saving);
      std::vector<std::string> kinds;
      for (const SavedTensor& line : saved_tensors(ours)) kinds.push_back(line.kind);
      EXPECT_EQ(kinds, (std::vector<std::string>{"norm", "statistics", "mask"}));
      const at::Tensor y = at::batch_norm(x, gamma, beta, {}, {}, true, 0.1, 1e-5, false) + skip, torchs = at::relu(y);
      // Statistics of 200 values or more a channel in fp32, |x̂| < 6, γ and β below 6: 64 units of 50.
      EXPECT_LE((ours - torchs).abs().max().item<double>(), 64 * 50 * kUnit);
      ours.backward(g);
      const std::vector<at::Tensor> got = {x.grad().clone(), gamma.grad().clone(), beta.grad().clone(), skip.grad().clone()};
      for (const at::Tensor& t : {x, gamma, beta, skip}) t.mutable_grad().reset();
      torchs.backward(g);
      // A value this close to 0 may fall on either side of the ReLU: its gradient is not compared.
      const at::Tensor far = (y.detach().abs() > 1e-4).to(at::kFloat);
      EXPECT_TRUE(at::equal(got[3] * far, skip.grad() * far));  // but for the sign of zeros
      // Codes are off by a step of a range below 12 at most, 12/255 = .05; Σ g·x̂ over N values by .05·Σ|g| ≤ .05·N. The rest is rounding.
      const double n = static_cast<double>(x.numel() / sizes[1]), step = 0.05;
      EXPECT_LE((got[1] - gamma.grad()).abs().max().item<double>(), step * n);
      EXPECT_LE((got[2] - beta.grad()).abs().max().item<double>(), n * 1e-4 + (1 - far).sum().item<double>() * 6);
      // γ·rstd < 6 times what x̂·Σ(g·x̂)/N is off by: step·Σ|g·x̂|/N + |x̂|·step·Σ|g|/N, both means below 1, |x̂| < 6.
      EXPECT_LE(((got[0] - x.grad()) * far).abs().max().item<double>(), 6 * (step + 6 * step));
    }
  }
}

}  // namespace
}  // namespace satchel
