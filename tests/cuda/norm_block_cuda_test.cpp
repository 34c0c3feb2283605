// BatchNorm → ReLU → dropout in fused passes with a block code: the bytes of pack() and pack_mask(), gradients within fp32 rounding.
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/report.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1: what one fp32 operation may be off by, relatively
constexpr int64_t kGuard = 64;     // bytes behind every output that must stay as they are
constexpr uint8_t kFill = 0xcd;

float* floats(const at::Tensor& t) { return t.mutable_data_ptr<float>(); }

at::Tensor filled(int64_t bytes) { return at::full({bytes + kGuard}, kFill, at::TensorOptions(at::kByte).device(at::kCUDA)); }

/// The bytes before the guard; fails where the guard was written.
at::Tensor unguarded(const at::Tensor& t) {
  const int64_t bytes = t.numel() - kGuard;
  EXPECT_TRUE((t.narrow(0, bytes, kGuard) == kFill).all().item<bool>()) << "written past the end";
  return t.narrow(0, 0, bytes);
}

/// Everything a layer has, on the device, and what the unfused functions make of it with the same mean and deviation.
struct Layer {
  CodecSpec spec;
  double p;
  at::Tensor h, gamma, beta, mean, rstd, code_seed = seed_tensor(91, at::kCUDA), drop_seed = seed_tensor(92, at::kCUDA);
  at::Tensor x, on, kept, z;
  Packed packed;

  Layer(const at::Tensor& input, const char* text, double dropout) : spec(parse_spec(text)), p(dropout) {
    const int64_t channels = input.size(1);
    h = input.cuda();
    gamma = normal({channels}, 93).cuda();
    gamma[channels / 2] = 0;
    beta = (normal({channels}, 94) * 0.5).cuda();
    mean = (normal({channels}, 95) * 0.2).cuda();
    rstd = (normal({channels}, 96).abs() + 0.5).cuda();
    packed = pack(h, spec, code_seed);
    x = at::sub(h.to(at::kFloat), mean).mul_(rstd);
    const at::Tensor y = apply_chain(x, gamma, beta, {}, {}, {0, 1});
    on = pack_mask(y).bits;
    kept = pack_mask(apply_chain(at::ones_like(x), {}, {}, {}, drop_seed, {p, 1})).bits;
    z = apply_chain(apply_chain(y, {}, {}, {}, {}, {0, 0}), {}, {}, {}, drop_seed, {p, 1}).to(h.scalar_type());
  }

  ColumnMoments moments() const { return {mean, rstd}; }

  /// The saves of the unfused functions, for backward.
  NormSave save(bool keeps_mask) const {
    NormSave s;
    s.pass = FusedNorm::block;
    s.code = packed;
    s.moments = moments();
    s.on = on;
    s.chain.dropout = p;
    if (p > 0) (keeps_mask ? s.kept : s.seed) = keeps_mask ? kept : drop_seed;
    return s;
  }

  /// Runs the fused pass into guarded buffers and compares everything; `over`: z is written over h.
  void expect_same(bool over, bool keeps_mask) const {
    const Place place(h.device(), "test");
    const CodecLayout plan = check_packed(packed, "test");
    const int64_t bytes = packed.bytes.numel(), bits = on.numel(), size = h.numel() * h.element_size();
    const at::Tensor code = filled(bytes), on_bits = filled(bits), kept_bits = filled(bits), out = filled(size);
    const at::Tensor input = over ? out : h;
    if (over) out.narrow(0, 0, size).copy_(h.view({-1}).view(at::kByte));
    auto* base = code.mutable_data_ptr<uint8_t>();
    const auto pointer = [](const at::Tensor& seed) { return reinterpret_cast<const uint64_t*>(seed.const_data_ptr<int64_t>()); };
    Chain chain;
    chain.channels = h.size(1);
    chain.drop = static_cast<uint32_t>(std::llround(p * 65536));
    chain.scale = static_cast<float>(65536.0 / (65536 - chain.drop));
    const cuda::NormBlockCode saves{plan.block,
                                    chain,
                                    {base, base + plan.at.headers},
                                    on_bits.mutable_data_ptr<uint8_t>(),
                                    keeps_mask ? kept_bits.mutable_data_ptr<uint8_t>() : nullptr,
                                    chain.drop > 0 ? pointer(drop_seed) : nullptr,
                                    nullptr,
                                    nullptr,
                                    pointer(code_seed)};
    const cuda::NormParameters with{floats(mean), floats(rstd), floats(gamma), floats(beta)};
    cuda::norm_encode(saves, {input.data_ptr(), plan.type, with, out.data_ptr()}, place.stream());
    EXPECT_TRUE(same(unguarded(code), packed.bytes)) << (unguarded(code) != packed.bytes).sum().item<int64_t>() << " bytes differ";
    EXPECT_TRUE(same(unguarded(on_bits), on));
    EXPECT_TRUE(keeps_mask ? same(unguarded(kept_bits), kept) : (kept_bits == kFill).all().item<bool>());
    EXPECT_TRUE(same(unguarded(out).view(h.scalar_type()).view(h.sizes()), z));
  }
};

std::string trace(int64_t rows, int64_t channels, const std::string& text) {
  return std::to_string(rows) + " x " + std::to_string(channels) + " " + text;
}

/// Calls f(layer) for every block size, with whole blocks only, broken ones, broken groups of 8, and channels that do not divide 256.
template <class F>
void for_layers(const F& f) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const char* text : {"block=128,levels=even", "block=256", "block=512,levels=even", "block=1024"}) {
      for (const int64_t channels : {1, 7, 40, 100, 128, 256, 384}) {
        for (const int64_t rows : {2, 33, 128, 1001}) {
          for (const double p : {0.0, 0.5}) {
            if (!mine()) continue;
            SCOPED_TRACE(trace(rows, channels, std::string(text) + (type == at::kFloat ? " float" : " bf16")));
            const at::Tensor h = normal({rows, channels}, 97) * 1.5 + 0.3;
            const CodecSpec spec = parse_spec(text);
            const int64_t block = std::min(rows * channels, spec.block);  // fewer values are one shorter block
            const bool fits = block == 128 || block == 256 || block == 512 || block == 1024;
            ASSERT_EQ(fuses_norm_block(h.to(type).cuda(), spec), fits);
            if (fits) f(Layer(h.to(type), text, p));
          }
        }
      }
    }
  }
}

TEST_F(Cuda, NormBlockKeepsTheBytesOfTheUnfusedPath) {
  for_layers([](const Layer& layer) {
    layer.expect_same(/*over=*/false, /*keeps_mask=*/true);
    layer.expect_same(/*over=*/true, /*keeps_mask=*/false);
  });
}

TEST_F(Cuda, NormBlockOfOtherHeadersRoundingAndManyRows) {
  for (const char* text : {"block=128,header=f32", "block=256,round=nearest", "block=1024,header=f32,round=nearest", "block=512"}) {
    for (const int64_t channels : {100, 128, 256}) {
      SCOPED_TRACE(trace(40001, channels, text));
      Layer(normal({40001, channels}, 98), text, 0.25).expect_same(false, true);
    }
  }
}

/// A chance so small that it rounds to 0 still keeps a mask, as dropout() does.
TEST_F(Cuda, NormBlockOfHardlyAnyDropout) { Layer(normal({100, 40}, 99), "block=256", 1e-7).expect_same(false, true); }

TEST_F(Cuda, NormBlockShowsWhatIsNotANumber) {
  for (const char* text : {"block=128", "block=1024"}) {
    SCOPED_TRACE(text);
    at::Tensor h = normal({999, 128}, 78);
    h[5][6] = std::numeric_limits<float>::quiet_NaN();
    h[700][1] = std::numeric_limits<float>::infinity();
    h[998][127] = std::numeric_limits<float>::quiet_NaN();  // in the last block, which is broken at 1024
    Layer layer(h, text, 0.5);
    layer.gamma.fill_(1);  // so that the infinity is on: what is off and infinite is 0 behind torch's ReLU and NaN behind ours
    const NormResult result =
        norm_block_encode({layer.h, layer.moments(), layer.gamma, layer.beta}, {layer.spec, layer.code_seed}, {0.5, layer.drop_seed, true});
    EXPECT_TRUE(same(result.save.code.bytes, layer.packed.bytes));
    for (const auto& [row, column] : {std::pair(5, 6), std::pair(998, 127)}) EXPECT_TRUE(at::isnan(result.z[row][column]).item<bool>());
    EXPECT_FALSE(at::isfinite(result.z[700][1]).item<bool>());
    EXPECT_EQ((~at::isfinite(result.z)).sum().item<int64_t>(), 3);
    // Every channel meets a poisoned block: Σ gz·x̂ and with it the gradient of x are NaN, Σ gz is not.
    const at::Tensor g = at::ones_like(layer.h);
    const NormActSums sums = norm_sums(g, result.save);
    EXPECT_TRUE(at::isfinite(sums.beta).all().item<bool>());
    EXPECT_TRUE(at::isnan(sums.gamma).all().item<bool>());
    norm_back_(g, g, result.save, layer.gamma, sums);
    EXPECT_TRUE(at::isnan(g).all().item<bool>());
  }
}

/// Sums and gradients of layers whose threads walk at most `steps` steps.
void expect_gradients(const Layer& layer, double steps, bool keeps_mask) {
  const double rows = static_cast<double>(layer.h.size(0));
  const at::ScalarType type = layer.h.scalar_type();
  const NormSave save = layer.save(keeps_mask);
  const at::Tensor g = normal(layer.h.sizes(), 79).to(type).cuda();
  const auto through = [](const at::Tensor& t, const at::Tensor& bits) { return chain_gradient(t, bits, {}, {0, 0}); };
  const double scale = layer.p > 0 ? static_cast<float>(dropout_scale(layer.p)) : 1;
  const at::Tensor passed = through(g.to(at::kFloat), layer.on), masked = layer.p > 0 ? through(passed, layer.kept) : passed;
  const at::Tensor gz = masked.to(at::kDouble) * scale;
  Packed wide = layer.packed;  // decoded to fp32, as backward reads it: unpack() of a bf16 tensor rounds to bf16
  wide.dtype = at::kFloat;
  const at::Tensor values = unpack(wide).to(at::kDouble);
  const at::Tensor x = (values - layer.mean) * layer.rstd, gx = gz * x;
  const at::Tensor sum = gz.sum(0), along = gx.sum(0), size = gz.abs().sum(0), size_x = gx.abs().sum(0);
  // x̂: 2 roundings, of which the difference's is relative to |h| + |mean|; what it is off by stands in `far`.
  const at::Tensor far = (values.abs() + layer.mean.abs()) * layer.rstd, size_far = (gz.abs() * far).sum(0);
  const NormActSums sums = norm_sums(g, save);
  // gz: 1 rounding. Additions: one a step, then 8 warps, then one rounding of the double sum; the product with x̂ is fused.
  const double rounding = (1 + steps + 8 + 1) * kUnit;
  EXPECT_TRUE(((sums.beta - sum).abs() <= size * rounding).all().item<bool>());
  const at::Tensor along_bound = size_x * (rounding + kUnit) + size_far * (2 * kUnit);
  EXPECT_TRUE(((sums.gamma - along).abs() <= along_bound).all().item<bool>()) << ((sums.gamma - along).abs() / along_bound).max();
  const NormActSums again = norm_sums(g, save);
  EXPECT_TRUE(same(again.beta, sums.beta) && same(again.gamma, sums.gamma));

  const at::Tensor factor = layer.gamma.to(at::kDouble) * layer.rstd, dx = g.clone();
  norm_back_(dx, dx, save, layer.gamma, sums);
  const at::Tensor expected = (gz - sum / rows - x * along / rows) * factor;
  // The sums' errors, 2 for their shares, 1 each for fma, subtraction and the two products with the factor, second order: 1 more; and
  // what x̂ itself is off by. bf16 rounds the result to 8 bits.
  const at::Tensor inner =
      (gz.abs() + (size + x.abs() * size_x) / rows) * (rounding + 8 * kUnit) + (x.abs() * size_far + far * size_x) / rows * (2 * kUnit);
  const at::Tensor bound = inner * factor.abs() + expected.abs() * (type == at::kFloat ? 0 : 0x1p-8) + 1e-30;
  EXPECT_TRUE(((dx - expected).abs() <= bound).all().item<bool>()) << ((dx - expected).abs() / bound).max();
}

TEST_F(Cuda, NormBlockGradients) {
  for_layers([](const Layer& layer) {
    expect_gradients(layer, 1, true);
    if (layer.p > 0) expect_gradients(layer, 1, false);
  });
}

TEST_F(Cuda, NormBlockGradientsOfManyRows) {
  for (const int64_t channels : {100, 128, 256}) {
    for (const char* text : {"block=128,levels=even", "block=1024"}) {
      const int64_t rows = 40001;
      // 375 thread blocks or more (a multiple of 25 up to 396) of 8 warps, 256 values a warp and step.
      const double steps = std::ceil(static_cast<double>(rows * channels) / (375 * 8 * 256));
      SCOPED_TRACE(trace(rows, channels, text));
      expect_gradients(Layer(normal({rows, channels}, 80), text, 0.5), steps, true);
    }
  }
}

TEST_F(Cuda, NormBlockFitsOrSaysSo) {
  const at::Tensor x = normal({4096, 128}, 81).cuda();
  for (const char* text : {"block=100", "block=64", "block=2048", "bits=4", "bits=32", "side=one", "block=256,project=8"}) {
    EXPECT_FALSE(fuses_norm_block(x, parse_spec(text))) << text;
  }
  EXPECT_TRUE(fuses_norm_block(x, parse_spec("block=row")));  // 128 values
  EXPECT_TRUE(fuses_norm_block(x.to(at::kHalf), parse_spec("block=256")));
  EXPECT_FALSE(fuses_norm_block(x.cpu(), parse_spec("block=256")));
  EXPECT_FALSE(fuses_norm_block(normal({64, 1001}, 82).cuda(), parse_spec("block=256")));
}

/// One layer of the model, as a function of leaves.
struct Leaves {
  at::Tensor x, running_mean, running_var;
  NormWeights weights;

  Leaves(int64_t rows, int64_t channels) {
    const auto leaf = [](const at::Tensor& t) { return t.cuda().requires_grad_(); };
    x = leaf(normal({rows, channels}, 83) * 2 + 1);
    running_mean = at::zeros({channels}, x.options()), running_var = at::ones({channels}, x.options());
    weights = {leaf(normal({channels}, 84).abs() + 0.5), leaf(normal({channels}, 85) * 0.3), running_mean.detach(), running_var.detach()};
  }
};

TEST_F(Cuda, NormBlockIsTheThreeFunctions) {
  for (const char* method : {"exact", "blockwise", "exact,block=256"}) {
    for (const double p : {0.0, 0.5}) {
      SCOPED_TRACE(std::string(method) + (p > 0 ? " with dropout" : ""));
      NormActOptions options;
      options.dropout = p;
      const SavePolicy saving{parse_method(method), "layer"};
      Leaves a(3001, 128), b(3001, 128);
      at::manual_seed(5);
      const at::Tensor fused = norm_act(a.x, a.weights, options, saving);
      ASSERT_EQ(epilogue_kernel_of(fused), "norm_block");
      const int64_t next = fresh_seed(at::kCPU).item<int64_t>();
      at::manual_seed(5);
      const at::Tensor normed = batch_norm(b.x, b.weights, options.statistics, saving);
      const at::Tensor apart = dropout(relu(normed, saving), p, true, saving);
      EXPECT_EQ(next, fresh_seed(at::kCPU).item<int64_t>()) << "another number of seeds was drawn";
      EXPECT_EQ(saved_tensors(fused), saved_tensors(apart));
      // Statistics of both are within 64 units of what they should be (3001 rows in blocked sums), x̂ and z then within 80 of their size.
      const double most = apart.abs().max().item<double>() + 1;
      EXPECT_LE((fused - apart).abs().max().item<double>(), 160 * kUnit * most * 8);
      EXPECT_LE((a.running_var - b.running_var).abs().max().item<double>(), 128 * kUnit * b.running_var.max().item<double>());
      EXPECT_LE((a.running_mean - b.running_mean).abs().max().item<double>(), 128 * kUnit * 2);

      const at::Tensor g = normal({3001, 128}, 86).cuda();
      fused.backward(g);
      apart.backward(g);
      // A value this close to 0 may fall on either side of the ReLU: its gradient is not compared, and may be missing in a sum.
      const at::Tensor near = normed.detach().abs() < 1e-4, missing = at::where(near, g.abs() * 2, at::zeros_like(g)).sum(0);
      // Sums over 3001 rows in fp32, blocked or by thread: below 128 units of Σ|g|·scale and Σ|g·x̂|·scale, |x̂| < 8; twice, for both.
      const at::Tensor size = g.abs().sum(0) * (2 * 8 * 256 * kUnit) + missing * 8;
      EXPECT_TRUE(((a.weights.beta.grad() - b.weights.beta.grad()).abs() <= size).all().item<bool>());
      EXPECT_TRUE(((a.weights.gamma.grad() - b.weights.gamma.grad()).abs() <= size).all().item<bool>());
      // γ·rstd < 3; gz ≤ 2·|g|; the sums' part: their difference over N, times |x̂| < 8; the statistics' own: 128 units of 4 at most.
      const at::Tensor bound = (g.abs() * (2 * 512 * kUnit) + size * (9.0 / 3001) + 512 * kUnit) * 3;
      const at::Tensor off = ((a.x.grad() - b.x.grad()).abs() <= bound) | near;
      EXPECT_TRUE(off.all().item<bool>()) << (~off).sum().item<int64_t>() << " values differ";
    }
  }
}

TEST_F(Cuda, NormBlockOnlyWhereItServes) {
  Leaves leaves(300, 128);
  NormActOptions options;
  const auto fuses = [&](const char* method) {
    return epilogue_kernel_of(norm_act(leaves.x, leaves.weights, options, {parse_method(method), ""})) == "norm_block";
  };
  EXPECT_TRUE(fuses("exact"));
  EXPECT_FALSE(fuses("satchel"));
  EXPECT_FALSE(fuses("fp32"));
  EXPECT_FALSE(fuses("exact,bits=32"));
  options.activation = Activation::elu;
  EXPECT_FALSE(fuses("exact"));
  options.activation = Activation::relu;
  options.statistics.training = false;
  EXPECT_FALSE(fuses("exact"));
  options.statistics.training = true;
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(fuses("exact"));
}

}  // namespace
}  // namespace satchel
