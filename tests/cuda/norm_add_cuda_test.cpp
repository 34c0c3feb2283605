// BatchNorm + residual sum + ReLU in fused passes: the bytes of pack() of the same values, gradients within fp32 rounding.
#include <cmath>
#include <limits>
#include <string>

#include "cuda_fixture.h"
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

enum class Into { own, x, skip };

/// Everything a block's end has, on the device, and what the unfused functions make of it with the same mean and deviation.
struct Layer {
  CodecSpec norm, sum;
  at::Tensor x, skip, gamma, beta, seed_norm = seed_tensor(91, at::kCUDA), seed_sum = seed_tensor(92, at::kCUDA);
  ColumnMoments moments;
  at::Tensor hat, z;
  Packed packed_norm, packed_sum;

  Layer(const at::Tensor& input, const at::Tensor& other, const char* norm_text, const char* sum_text)
      : norm(parse_spec(norm_text)), sum(parse_spec(sum_text)), x(input.cuda()), skip(other.cuda()) {
    const int64_t channels = input.size(1);
    gamma = normal({channels}, 93).cuda();
    gamma[channels / 2] = 0;
    beta = (normal({channels}, 94) * 0.5).cuda();
    moments = {(normal({channels}, 95) * 0.2).cuda(), (normal({channels}, 96).abs() + 0.5).cuda()};
    hat = at::sub(x.to(at::kFloat), moments.mean).mul_(moments.rstd);
    const at::Tensor y = apply_chain(hat, gamma, beta, {}, {}, {0, 1}).add_(skip.to(at::kFloat));
    z = apply_chain(y, {}, {}, {}, {}, {0, 0}).to(x.scalar_type());
    packed_norm = pack(hat, norm, seed_norm);
    packed_sum = pack(z, sum, seed_sum);
  }

  /// What the unfused functions keep, for backward.
  NormSave save() const {
    NormSave s;
    s.pass = FusedNorm::add;
    s.code = packed_norm;
    s.moments = moments;
    s.sum = packed_sum;
    return s;
  }

  /// Runs the fused pass into guarded buffers and compares everything.
  void expect_same(Into into) const {
    const Place place(x.device(), "test");
    const CodecLayout a = check_packed(packed_norm, "test"), b = check_packed(packed_sum, "test");
    const int64_t size = x.numel() * x.element_size();
    const at::Tensor norm_bytes = filled(packed_norm.bytes.numel()), sum_bytes = filled(packed_sum.bytes.numel()), out = filled(size);
    const at::Tensor& over = into == Into::skip ? skip : x;
    if (into != Into::own) out.narrow(0, 0, size).copy_(over.view({-1}).view(at::kByte));
    auto* n = norm_bytes.mutable_data_ptr<uint8_t>();
    auto* s = sum_bytes.mutable_data_ptr<uint8_t>();
    cuda::NormAddCode code{a.block, b.side, x.size(1), {n, n + a.at.headers}, {s, s + b.at.headers}};
    ASSERT_TRUE(cuda::norm_add_fits(code));
    const auto pointer = [](const at::Tensor& seed) { return reinterpret_cast<const uint64_t*>(seed.const_data_ptr<int64_t>()); };
    code.norm_seed = pointer(seed_norm);
    code.sum_seed = pointer(seed_sum);
    const cuda::NormParameters with{floats(moments.mean), floats(moments.rstd), floats(gamma), floats(beta)};
    cuda::norm_encode(code,
                      {into == Into::x ? out.data_ptr() : x.data_ptr(), b.type, with, out.data_ptr(),
                       into == Into::skip ? out.data_ptr() : skip.data_ptr()},
                      place.stream());
    EXPECT_TRUE(same(unguarded(norm_bytes), packed_norm.bytes))
        << (unguarded(norm_bytes) != packed_norm.bytes).sum().item<int64_t>() << " bytes of the norm differ";
    EXPECT_TRUE(same(unguarded(sum_bytes), packed_sum.bytes))
        << (unguarded(sum_bytes) != packed_sum.bytes).sum().item<int64_t>() << " bytes of the sum differ";
    EXPECT_TRUE(same(unguarded(out).view(x.scalar_type()).view(x.sizes()), z));
  }
};

Layer layer_of(int64_t rows, int64_t channels, at::ScalarType type, const char* norm, const char* sum) {
  return {(normal({rows, channels}, 97) * 1.5 + 0.3).to(type), normal({rows, channels}, 98).to(type), norm, sum};
}

std::string trace(int64_t rows, int64_t channels, at::ScalarType type, const std::string& norm, const std::string& sum) {
  return std::to_string(rows) + " x " + std::to_string(channels) + " " + c10::toString(type) + " " + norm + " + " + sum;
}

const std::pair<const char*, const char*> kSpecs[] = {{"bits=1", "side=relu"},
                                                      {"bits=2", "side=relu"},
                                                      {"bits=2,levels=even", "side=relu,bits=3"},
                                                      {"bits=3", "side=relu,bits=3"},
                                                      {"bits=3,levels=even", "side=relu,levels=even"},
                                                      {"bits=4", "side=relu"},
                                                      {"bits=4,levels=even", "side=relu,bits=3,levels=even"}};

/// Calls f(layer) with whole blocks only, broken ones, broken groups of 8, and channels that do not divide 256.
template <class F>
void for_layers(const F& f) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& [norm, sum] : kSpecs) {
      for (const int64_t channels : {1, 7, 40, 64, 100, 256, 384, 512}) {
        for (const int64_t rows : {2, 33, 128, 1001}) {
          if (rows * channels < 256) continue;  // one shorter block
          if (!mine()) continue;
          SCOPED_TRACE(trace(rows, channels, type, norm, sum));
          const Layer layer = layer_of(rows, channels, type, norm, sum);
          ASSERT_TRUE(fuses_norm_add(layer.x, layer.norm, layer.sum));
          f(layer);
        }
      }
    }
  }
}

TEST_F(Cuda, NormAddKeepsTheBytesOfTheUnfusedPath) {
  for_layers([](const Layer& layer) {
    for (const Into into : {Into::own, Into::x, Into::skip}) layer.expect_same(into);
  });
}

TEST_F(Cuda, NormAddOfOtherHeadersRoundingAndManyRows) {
  for (const char* text : {"header=f32", "round=nearest", "header=f32,round=nearest"}) {
    for (const int64_t channels : {100, 128, 2048}) {
      const std::string norm = std::string("bits=2,") + text, sum = std::string("side=relu,bits=3,") + text;
      const int64_t rows = channels == 2048 ? 2001 : 40001;
      SCOPED_TRACE(trace(rows, channels, at::kFloat, norm, sum));
      layer_of(rows, channels, at::kFloat, norm.c_str(), sum.c_str()).expect_same(Into::own);
    }
  }
}

/// The functions that autograd calls, with packed tensors that unpack() reads.
TEST_F(Cuda, NormAddGivesPackedTensors) {
  for (const at::ScalarType type : kTypes) {
    const Layer layer = layer_of(1001, 64, type, "bits=2", "side=relu,bits=3");
    const at::Tensor into = layer.x.clone();
    for (const at::Tensor& to : {at::Tensor(), into}) {
      const NormResult got = norm_add_encode({to.defined() ? to : layer.x, layer.moments, layer.gamma, layer.beta, layer.skip, to},
                                             {layer.norm, layer.seed_norm}, {layer.sum, layer.seed_sum});
      EXPECT_TRUE(same(got.save.code.bytes, layer.packed_norm.bytes) && same(got.save.sum.bytes, layer.packed_sum.bytes) &&
                  same(got.z, layer.z));
      EXPECT_TRUE(same(unpack(got.save.code), unpack(layer.packed_norm)) && same(unpack(got.save.sum), unpack(layer.packed_sum)));
      EXPECT_EQ(unpack(got.save.code).scalar_type(), at::kFloat);
      EXPECT_EQ(unpack(got.save.sum).scalar_type(), type);
      EXPECT_EQ(to.defined(), got.z.data_ptr() == into.data_ptr());
    }
  }
}

TEST_F(Cuda, NormAddShowsWhatIsNotANumber) {
  at::Tensor x = normal({999, 128}, 78), skip = normal({999, 128}, 79);
  x[5][6] = std::numeric_limits<float>::quiet_NaN();
  skip[700][1] = std::numeric_limits<float>::infinity();
  skip[998][127] = std::numeric_limits<float>::quiet_NaN();  // in the last, broken block
  const Layer layer(x, skip, "bits=2", "side=relu");
  layer.expect_same(Into::own);
  EXPECT_EQ((~at::isfinite(layer.z)).sum().item<int64_t>(), 3);
  // Row 5 is in the block of rows 4 and 5; rows 700 and 701 are one block, row 998 is half of one.
  EXPECT_EQ(at::isnan(unpack(layer.packed_norm)).sum().item<int64_t>(), 256);
  EXPECT_EQ(at::isnan(unpack(layer.packed_sum)).sum().item<int64_t>(), 256 + 256 + 128);
  // Every channel meets the norm's poisoned block: Σ gz·x̂ and with it the gradient of x are NaN, Σ gz and skip's gradient are not.
  const at::Tensor g = at::ones_like(layer.x), dx = at::zeros_like(g);
  const NormActSums sums = norm_sums(g, layer.save());
  EXPECT_TRUE(at::isfinite(sums.beta).all().item<bool>());
  EXPECT_TRUE(at::isnan(sums.gamma).all().item<bool>());
  norm_back_(g, dx, layer.save(), layer.gamma, sums);
  EXPECT_TRUE(at::isnan(dx).all().item<bool>());
  EXPECT_TRUE(at::isfinite(g).all().item<bool>());
}

TEST_F(Cuda, NormAddNamesSkipsThatDoNotFit) {
  const Layer layer = layer_of(128, 64, at::kHalf, "bits=2", "side=relu");
  const auto with = [&](const at::Tensor& skip) {
    return [&layer, skip] {
      norm_add_encode({layer.x, layer.moments, layer.gamma, layer.beta, skip}, {layer.norm, layer.seed_norm}, {layer.sum, layer.seed_sum});
    };
  };
  reference::expect_error(with(layer.skip.to(at::kFloat)), "[norm_add] x and skip must be of one type, got Float");
  reference::expect_error(with(layer.skip.narrow(0, 0, 64)), "[norm_add] x and skip must have the same sizes, got [64, 64]");
}

/// An infinite gradient, as a loss scaler provokes it, reaches both outputs.
TEST_F(Cuda, NormAddLetsInfiniteGradientsThrough) {
  const Layer layer = layer_of(128, 64, at::kHalf, "bits=2", "side=relu");
  const at::Tensor g = at::full_like(layer.x, std::numeric_limits<double>::infinity()), dx = at::zeros_like(g);
  norm_back_(g, dx, layer.save(), layer.gamma, norm_sums(g, layer.save()));
  EXPECT_FALSE(at::isfinite(g).any().item<bool>());
  EXPECT_FALSE(at::isfinite(dx).any().item<bool>());
}

/// What rounding to a type may take of `exact`.
at::Tensor half_ulp(const at::Tensor& exact, at::ScalarType type) {
  if (type == at::kFloat) return exact.abs() * 0;
  return exact.abs() * (type == at::kHalf ? 0x1.01p-11 : 0x1.01p-8) + (type == at::kHalf ? 0x1p-25 : 0.0);
}

/// Sums and gradients of layers whose threads walk at most `steps` steps.
void expect_gradients(const Layer& layer, double steps) {
  const double rows = static_cast<double>(layer.x.size(0));
  const at::ScalarType type = layer.x.scalar_type();
  const at::Tensor g = normal(layer.x.sizes(), 80).to(type).cuda();
  const at::Tensor masked = chain_gradient(g, on_bits(layer.packed_sum), {}, {0, 0}), gz = masked.to(at::kDouble);
  const at::Tensor x = unpack(layer.packed_norm).to(at::kDouble), gx = gz * x;
  const at::Tensor sum = gz.sum(0), along = gx.sum(0), size = gz.abs().sum(0), size_x = gx.abs().sum(0);
  const NormActSums sums = norm_sums(g, layer.save());
  // fp32 additions: one a step, then 8 warps, then one rounding of the double sum; a product is fused with its addition.
  const double rounding = (steps + 8 + 1) * kUnit;
  EXPECT_TRUE(((sums.beta - sum).abs() <= size * rounding).all().item<bool>());
  EXPECT_TRUE(((sums.gamma - along).abs() <= size_x * rounding).all().item<bool>());
  const NormActSums again = norm_sums(g, layer.save());
  EXPECT_TRUE(same(again.beta, sums.beta) && same(again.gamma, sums.gamma));

  const at::Tensor scale = layer.gamma.to(at::kDouble) * layer.moments.rstd;
  for (const bool training : {true, false}) {
    const at::Tensor both = g.clone(), dx = at::full_like(g, 7), alone = g.clone(), only = g.clone();
    const auto back = [&](const at::Tensor& from, const at::Tensor& to) {
      norm_back_(from, to, layer.save(), layer.gamma, training ? sums : NormActSums());
    };
    back(both, dx);
    EXPECT_TRUE(same(both, masked)) << "skip's gradient";
    back(alone, {});
    EXPECT_TRUE(same(alone, masked)) << "skip's gradient alone";
    back(only, only);
    EXPECT_TRUE(same(only, dx)) << "x's gradient alone";
    const at::Tensor expected = (training ? gz - sum / rows - x * along / rows : gz) * scale;
    // The sums', 2 for their shares, 1 each for fma, subtraction and the two products with the scale, and second-order terms: 1 more.
    // Without them: two products.
    const at::Tensor inner = training ? (gz.abs() + (size + x.abs() * size_x) / rows) * (rounding + 7 * kUnit) : gz.abs() * (2.01 * kUnit);
    const at::Tensor bound = inner * scale.abs() * 1.01 + half_ulp(expected, type);
    EXPECT_TRUE(((dx - expected).abs() <= bound).all().item<bool>()) << ((dx - expected).abs() / bound).max().item<double>();
  }
}

TEST_F(Cuda, NormAddGradients) {
  for_layers([](const Layer& layer) { expect_gradients(layer, 1); });
}

TEST_F(Cuda, NormAddGradientsByParts) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const char* bits : {"bits=1", "bits=2", "bits=3"}) {
      const Layer layer = layer_of(4100, 256, type, bits, "side=relu");
      const at::Tensor g = normal(layer.x.sizes(), 81).to(type).cuda(), whole = g.clone(), dx = at::empty_like(g), parts = g.clone();
      const NormActSums sums = norm_sums(g, layer.save());
      norm_back_(whole, dx, layer.save(), layer.gamma, sums);
      for (int64_t first = 0; first < g.size(0); first += 1000) {
        const at::Tensor part = at::full({std::min<int64_t>(1000, g.size(0) - first), 256}, 7, g.options());
        norm_back_rows_(parts, part, first, layer.save(), layer.gamma, sums);
        EXPECT_TRUE(same(part, dx.narrow(0, first, part.size(0)))) << bits << ", rows from " << first;
      }
      EXPECT_TRUE(same(parts, whole)) << bits << ": skip's gradient";
    }
  }
  const Layer layer = layer_of(4, 256, at::kFloat, "bits=2", "side=relu");
  const at::Tensor g = at::ones_like(layer.x), odd = at::ones({1, 256}, g.options());
  EXPECT_THROW(norm_back_rows_(g, odd, 1, layer.save(), layer.gamma, norm_sums(g, layer.save())), Error);
}

TEST_F(Cuda, NormAddGradientsOfManyRows) {
  for (const int64_t channels : {100, 128, 256}) {
    const int64_t rows = 40001;
    // 375 thread blocks or more (a multiple of 25 up to 396) of 8 warps, 256 values a warp and step.
    const double steps = std::ceil(static_cast<double>(rows * channels) / (375 * 8 * 256));
    SCOPED_TRACE(channels);
    expect_gradients(layer_of(rows, channels, at::kFloat, "bits=2", "side=relu,bits=3"), steps);
  }
}

TEST_F(Cuda, NormAddFitsOrSaysSo) {
  const at::Tensor x = normal({4096, 128}, 81).cuda();
  const CodecSpec norm = parse_spec("bits=2"), sum = parse_spec("side=relu");
  EXPECT_TRUE(fuses_norm_add(x, norm, sum));
  EXPECT_TRUE(fuses_norm_add(normal({512, 2048}, 81).cuda(), norm, sum));
  for (const char* text : {"block=128", "bits=5", "bits=32", "side=one", "side=relu", "block=256,project=8"}) {
    EXPECT_FALSE(fuses_norm_add(x, parse_spec(text), sum)) << text;
  }
  for (const char* text : {"bits=2", "side=one", "side=both", "side=relu,block=512"}) {
    EXPECT_FALSE(fuses_norm_add(x, norm, parse_spec(text))) << text;
  }
  EXPECT_FALSE(fuses_norm_add(x.cpu(), norm, sum));
  EXPECT_FALSE(fuses_norm_add(x.view({-1}), norm, sum));
  EXPECT_FALSE(fuses_norm_add(x.narrow(0, 0, 0), norm, sum));
  EXPECT_FALSE(fuses_norm_add(x.to(at::kDouble), norm, sum));
  EXPECT_FALSE(fuses_norm_add(normal({64, 1001}, 82).cuda(), norm, sum));
}

}  // namespace
}  // namespace satchel
