// Norms by row and smooth activations on CUDA: bytes are those of pack() of the same values, statistics and functions are torch's within
// rounding, and gradients are the formula's of what the codes say.
#include <string>

#include "cuda_fixture.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/seeds.h"
#include "satchel/autograd/smooth.h"
#include "satchel/tensor/row_norm.h"

namespace satchel {
namespace {

using reference::normal;

constexpr Smooth kSmooths[] = {Smooth::gelu, Smooth::gelu_tanh, Smooth::silu, Smooth::sigmoid, Smooth::tanh};
constexpr const char* kNormSpecs[] = {"bits=1", "bits=2", "bits=2,levels=even", "bits=3", "bits=2,round=nearest"};

constexpr int kSlopeBits[] = {3, 4};

CodecSpec slope_spec(const CodecSpec& norm, int bits = 3) {
  CodecSpec spec = parse_spec("levels=even");
  spec.bits = bits;
  spec.header = norm.header;
  spec.rounding = norm.rounding;
  return spec;
}

/// Rows whose blocks end inside them, at their end and beyond, down to one short block.
std::vector<std::vector<int64_t>> shapes() {
  return {{3, 8}, {37, 64}, {300, 128}, {41, 640}, {129, 768}, {700, 3072}, {9, 4096}, {5, 8192}};
}

RowNormInput input_of(const std::vector<int64_t>& sizes, at::ScalarType type, bool centred) {
  return {(normal(sizes, 1) * 2 + 1).cuda().to(type), (normal({sizes[1]}, 2) * 0.5 + 1).cuda(), (normal({sizes[1]}, 3) * 0.3).cuda(), 1e-5,
          centred};
}

at::Tensor hat_of(const RowNormInput& in) {
  const at::Tensor rstd = in.rstd.view({-1, 1});
  return in.centred ? at::sub(in.x, in.mean.view({-1, 1})).mul_(rstd) : at::mul(in.x, rstd);
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return (x - y).norm().item<double>() / (y.norm().item<double>() + 1e-12);
}

double unit_of(at::ScalarType type) { return type == at::kFloat ? 0x1p-23 : type == at::kHalf ? 0x1p-11 : 0x1p-8; }

TEST_F(Cuda, RowNormIsTorchs) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& sizes : shapes()) {
      for (const bool centred : {true, false}) {
        SCOPED_TRACE(c10::str(at::IntArrayRef(sizes), " ", type, centred ? " layer" : " rms"));
        RowNormInput in = input_of(sizes, type, centred);
        const at::Tensor y = row_norm(in), x = in.x.to(at::kDouble);
        const at::Tensor mean = centred ? x.mean(1, true) : at::zeros({sizes[0], 1}, x.options());
        const at::Tensor rstd = ((x - mean).square().mean(1, true) + in.eps).rsqrt();
        const at::Tensor exact = (x - mean) * rstd * in.gamma + in.beta;
        EXPECT_LE((in.mean.view({-1, 1}) - mean).abs().max().item<double>(), 1e-5);
        EXPECT_LE(distance(in.rstd.view({-1, 1}), rstd), 1e-6);
        EXPECT_LE(distance(y, exact), unit_of(type) + 2e-6);  // one rounding to the type, and the statistics' own
      }
    }
  }
}

TEST_F(Cuda, RowNormCodesAreThoseOfPack) {
  const at::Tensor seed = seed_tensor(77, at::kCUDA), other = seed_tensor(78, at::kCUDA);
  for (const at::ScalarType type : kTypes) {
    for (const auto& sizes : shapes()) {
      for (const char* text : kNormSpecs) {
        for (const bool centred : {true, false}) {
          if (!mine()) continue;
          SCOPED_TRACE(c10::str(at::IntArrayRef(sizes), " ", type, " ", text, centred ? " layer" : " rms"));
          const CodecSpec spec = parse_spec(text);
          RowNormInput in = input_of(sizes, type, centred);
          for (const int bits : kSlopeBits) {
            ASSERT_EQ(fuses_row_norm(in.x, spec, slope_spec(spec, bits)), in.x.numel() >= 256);  // less than a block makes a shorter one
          }
          if (in.x.numel() < 256) continue;
          const at::Tensor y = row_norm(in);
          const Packed hat = pack(hat_of(in), spec, seed);
          EXPECT_TRUE(at::equal(row_norm_encode(in, {spec, seed}).bytes, hat.bytes));
          for (const Smooth act : kSmooths) {
            const SmoothValues apart = smooth_values(y, act);
            for (const int bits : kSlopeBits) {
              SCOPED_TRACE(c10::str("activation ", static_cast<int>(act), ", slopes of ", bits, " bits"));
              const CodecSpec slope = slope_spec(spec, bits);
              const SmoothResult made = row_norm_encode(in, {spec, seed}, act, {slope, other});
              EXPECT_TRUE(at::equal(made.norm.bytes, hat.bytes));
              EXPECT_TRUE(at::equal(made.slope.bytes, pack(apart.slope, slope, other).bytes));
              EXPECT_TRUE(at::equal(made.z, apart.z));
            }
          }
        }
      }
    }
  }
}

/// A NaN shows in its block and leaves the others alone; a block of equal values has no step.
TEST_F(Cuda, RowNormCodesOfUnusualRows) {
  const CodecSpec spec = parse_spec("bits=2");
  RowNormInput in = input_of({6, 512}, at::kFloat, true);
  in.x[1].fill_(3);
  in.x[2][100] = NAN;
  in.x[4] *= 1e30;
  const at::Tensor seed = seed_tensor(5, at::kCUDA);
  const at::Tensor y = row_norm(in);
  for (const int bits : kSlopeBits) {
    SCOPED_TRACE(bits);
    const CodecSpec slope = slope_spec(spec, bits);
    const SmoothResult made = row_norm_encode(in, {spec, seed}, Smooth::gelu, {slope, seed});
    EXPECT_TRUE(at::equal(made.norm.bytes, pack(hat_of(in), spec, seed).bytes));
    EXPECT_TRUE(at::equal(made.slope.bytes, pack(smooth_values(y, Smooth::gelu).slope, slope, seed).bytes));
    const at::Tensor nan = unpack(made.slope).isnan().sum(1).cpu();
    EXPECT_EQ(nan[2].item<int64_t>(), 512);
    EXPECT_EQ(nan[0].item<int64_t>() + nan[1].item<int64_t>() + nan[3].item<int64_t>(), 0);
  }
}

TEST_F(Cuda, SmoothCodesAreThoseOfPack) {
  const at::Tensor seed = seed_tensor(9, at::kCUDA);
  // Groups of 8 values that end in every byte of a word: 256, 264, 272 and 280 values.
  const std::vector<std::vector<int64_t>> shapes{{8}, {33, 24}, {1024, 1024}, {2, 16, 5, 5}, {256}, {264}, {272}, {280}};
  const auto check = [&](const at::Tensor& x, Smooth act, int bits) {
    const CodecSpec spec = slope_spec({}, bits);
    SCOPED_TRACE(c10::str(x.sizes(), " ", x.scalar_type(), " ", static_cast<int>(act), ", ", bits, " bits"));
    ASSERT_EQ(fuses_smooth(x, spec), x.numel() >= 256);
    if (x.numel() < 256) return;
    const SmoothResult made = smooth_encode(x, act, {spec, seed});
    const SmoothValues apart = smooth_values(x, act);
    EXPECT_TRUE(at::equal(made.slope.bytes, pack(apart.slope, spec, seed).bytes));
    EXPECT_TRUE(at::equal(made.z, apart.z));
    const at::Tensor g = at::empty_like(x).copy_(normal(x.sizes(), 5));
    EXPECT_LE(distance(slope_gradient(g, made.slope), at::mul(g.to(at::kFloat), unpack(made.slope))), 4 * unit_of(x.scalar_type()));
  };
  for (const at::ScalarType type : kTypes) {
    for (const std::vector<int64_t>& sizes : shapes) {
      const at::Tensor x = (normal(sizes, 4) * 2).cuda().to(type);
      for (const Smooth act : kSmooths) {
        for (const int bits : kSlopeBits) {
          check(x, act, bits);
          if (sizes.size() == 4) check(x.contiguous(at::MemoryFormat::ChannelsLast), act, bits);
        }
      }
    }
  }
}

/// Ours is not torch's function: within a few float32 roundings of numbers up to 8 it is the same.
TEST_F(Cuda, SmoothValuesAreTorchs) {
  const at::Tensor y = at::linspace(-9, 9, 100003, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  for (const Smooth act : kSmooths) {
    SCOPED_TRACE(static_cast<int>(act));
    const SmoothValues made = smooth_values(y, act), exact = smooth_values(y.cpu().to(at::kDouble), act);
    const at::Tensor z = exact.z.cuda(), slope = exact.slope.cuda();
    EXPECT_LE(((made.z - z).abs() - z.abs() * 0x1p-21).max().item<double>(), 1e-6);
    EXPECT_LE((made.slope - slope).abs().max().item<double>(),
              8e-6);  // gelu_tanh: two roundings of σ ≈ 1, 2^-23, times y·(a + 3b·y²) ≤ 35 there
  }
}

TEST_F(Cuda, RowNormGradientsAreTheFormulas) {
  const at::Tensor seed = seed_tensor(6, at::kCUDA);
  for (const at::ScalarType type : kTypes) {
    for (const auto& sizes : shapes()) {
      for (const char* text : kNormSpecs) {
        for (const int bits : {0, 3, 4}) {  // of slopes
          for (const bool centred : {true, false}) {
            if (!mine()) continue;
            const bool smooth = bits > 0;
            SCOPED_TRACE(c10::str(at::IntArrayRef(sizes), " ", type, " ", text, " gelu ", bits, centred ? " layer" : " rms"));
            const CodecSpec spec = parse_spec(text);
            RowNormInput in = input_of(sizes, type, centred);
            row_norm(in);
            const SmoothResult made = row_norm_encode(in, {spec, seed}, Smooth::gelu, {slope_spec(spec, smooth ? bits : 3), seed});
            const at::Tensor g = normal(sizes, 7).cuda().to(type), hat = unpack(made.norm).to(at::kDouble);
            Packed slope = made.slope;
            slope.dtype = at::kFloat;  // as the kernel reads it: not rounded to x's type
            at::Tensor gz = g.to(at::kDouble);
            if (smooth) gz = gz * unpack(slope);
            const at::Tensor scaled = gz * in.gamma, rstd = in.rstd.view({-1, 1}).to(at::kDouble);
            const double width = static_cast<double>(sizes[1]);
            const at::Tensor own = (hat.square().mean(1, true) - 1 + in.eps * rstd.square()) / width + 1;
            at::Tensor dx = scaled * own - hat * (scaled * hat).mean(1, true);
            if (centred) dx = dx - scaled.mean(1, true);
            const at::Tensor out = g.clone();
            const NormActSums sums = row_norm_back_(out, in, made.norm, smooth ? &made.slope : nullptr, /*corrects=*/true, true);
            EXPECT_LE(distance(out, dx * rstd), 4 * unit_of(type) + 1e-6);
            EXPECT_LE(distance(sums.beta, gz.sum(0)), 1e-6);  // sums of up to 700 terms in float32, two levels
            EXPECT_LE(distance(sums.gamma, (gz * hat).sum(0)), 1e-6);
            const at::Tensor untouched = g.clone();
            const NormActSums alone = row_norm_back_(untouched, in, made.norm, smooth ? &made.slope : nullptr, true, false);
            EXPECT_TRUE(at::equal(untouched, g) && at::equal(alone.beta, sums.beta) && at::equal(alone.gamma, sums.gamma));
          }
        }
      }
    }
  }
}

/// Sizes that no kernel takes go the general way.
TEST_F(Cuda, RowNormLeavesOtherSizesAlone) {
  const CodecSpec spec = parse_spec("bits=2");
  const auto fits = [&](std::vector<int64_t> sizes, const CodecSpec& with) { return fuses_row_norm(at::zeros(sizes, at::kCUDA), with); };
  EXPECT_TRUE(fits({4, 64}, spec));
  EXPECT_FALSE(fits({4, 60}, spec));
  EXPECT_FALSE(fits({4, 16384}, spec));
  EXPECT_FALSE(fits({4, 64}, parse_spec("bits=5")));
  EXPECT_FALSE(fits({4, 64}, parse_spec("bits=2,header=f32")));
  EXPECT_FALSE(fits({4, 64}, parse_spec("bits=2,block=64")));
  EXPECT_FALSE(fits({4, 64}, parse_spec("satchel")));
  EXPECT_FALSE(fuses_smooth(at::zeros({63}, at::kCUDA), slope_spec({})));
  EXPECT_TRUE(fuses_smooth(at::zeros({256}, at::kCUDA), slope_spec({})));
  EXPECT_FALSE(fuses_smooth(at::zeros({256}, at::kCUDA), slope_spec({}, 2)));
  EXPECT_FALSE(fuses_smooth(at::zeros({256}, at::kCUDA), slope_spec({}, 5)));
  EXPECT_FALSE(fuses_smooth(at::zeros({256}, at::kCUDA), parse_spec("bits=3,levels=optimal")));
}

}  // namespace
}  // namespace satchel
