// Norm → activation → dropout in fused passes: the bytes and bits of the unfused path, gradients within fp32 rounding.
#include <cmath>
#include <limits>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1: what one fp32 operation may be off by, relatively

/// Memory on the device whose first value stands `shift` values past an aligned address.
at::Tensor shifted(const at::Tensor& t, int64_t shift) {
  const at::Tensor line = at::empty({t.numel() + shift}, t.options().device(at::kCUDA));
  return line.narrow(0, shift, t.numel()).view(t.sizes()).copy_(t);
}

at::Tensor scratch_of(int64_t bytes) { return at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCUDA)); }

float* floats(const at::Tensor& t) { return t.mutable_data_ptr<float>(); }

/// Everything a layer has, on the device, and what the unfused path makes of it.
struct Layer {
  CodecSpec spec;
  ChainOptions options;
  Chain chain;
  at::Tensor seed = seed_tensor(71, at::kCUDA), h, gamma, beta, mean, rstd, x, z;
  Packed packed;
  SideCode code;

  Layer(const at::Tensor& input, const char* text, ChainOptions chain_options, bool plain)
      : spec(parse_spec(text)), options(chain_options) {
    const int64_t channels = input.size(1);
    h = input.cuda();
    gamma = (plain ? normal({channels}, 72).abs() * 0.2 + 0.5 : normal({channels}, 72)).cuda();
    beta = (normal({channels}, 73) * (plain ? 0.1 : 1.0)).cuda();
    if (!plain) gamma[channels / 2] = 0, gamma[0] = -0.75f;
    mean = (normal({channels}, 74) * 0.2).cuda();
    rstd = (normal({channels}, 75).abs() + 0.5).cuda();
    x = at::sub(h, mean).mul_(rstd);
    packed = pack_side(x, spec, seed, gamma, beta);
    z = apply_chain(x, gamma, beta, {}, seed, options);
    code = check_packed(packed, "test").side;
    const auto drop = static_cast<uint32_t>(std::llround(options.dropout * 65536));
    chain.slope = static_cast<float>(options.slope), chain.drop = drop, chain.scale = static_cast<float>(65536.0 / (65536 - drop));
  }

  /// The code with its off plane in these bytes.
  SideCode code_in(const at::Tensor& bytes) const {
    const CodecLayout plan = check_packed(packed, "test");
    return side_code_of(plan, parts_of(plan, bytes));
  }

  const uint64_t* seed_pointer() const { return reinterpret_cast<const uint64_t*>(seed.const_data_ptr<int64_t>()); }
  /// What backward reads.
  cuda::NormActCode kept(const SideCode& side) const {
    return {side, chain, packed.bytes.mutable_data_ptr<uint8_t>(), chain.drop > 0 ? seed_pointer() : nullptr};
  }
  cuda::NormParameters parameters() const { return {floats(mean), floats(rstd), floats(gamma), floats(beta)}; }

  /// Bytes and z of the fused pass; both start as something else, so that what is not written shows.
  std::pair<at::Tensor, at::Tensor> encode(const at::Tensor& from, const at::Tensor& to) const {
    const Place place(from.device(), "test");
    const at::Tensor out = at::full_like(packed.bytes, 0xcd), scratch = scratch_of(cuda::norm_act_scratch_bytes());
    cuda::norm_encode({code_in(out), chain, out.mutable_data_ptr<uint8_t>(), seed_pointer()},
                      {floats(from), DType::f32, parameters(), floats(to)}, scratch.mutable_data_ptr(), place.stream());
    return {out, to};
  }

  std::pair<at::Tensor, at::Tensor> sums(const at::Tensor& g) const {
    const Place place(g.device(), "test");
    const at::Tensor sum = at::full_like(gamma, 7), along = at::full_like(gamma, 7);
    const at::Tensor scratch = scratch_of(cuda::norm_act_scratch_bytes());
    cuda::norm_sums(kept(code), {floats(g), DType::f32, floats(sum), floats(along), scratch.mutable_data_ptr()}, place.stream());
    return {sum, along};
  }

  void back(const at::Tensor& g, const at::Tensor& sum, const at::Tensor& along) const {
    const Place place(g.device(), "test");
    const bool batch = sum.defined();
    const float *sum_g = batch ? floats(sum) : nullptr, *sum_gx = batch ? floats(along) : nullptr;
    cuda::norm_back(kept(code_in(packed.bytes)), {floats(g), DType::f32, nullptr, floats(rstd), sum_g, sum_gx, nullptr, floats(g)},
                    place.stream());
  }

  void input(int64_t first, int64_t last, const at::Tensor& to) const {
    const Place place(to.device(), "test");
    cuda::norm_act_input(kept(code), first, last, floats(to), DType::f32, place.stream());
  }
};

std::string trace(int64_t rows, int64_t channels, const char* text) {
  return std::to_string(rows) + " x " + std::to_string(channels) + " " + text;
}

/// Calls f(layer) for shapes with every kind of tail, usual and unusual channels, with and without dropout.
template <class F>
void for_layers(const F& f) {
  for (const int64_t channels : {1, 7, 8, 40, 100, 128, 256, 512}) {
    for (const int64_t rows : {1, 2, 33, 1001}) {
      for (const bool plain : {false, true}) {
        for (const ChainOptions options : {ChainOptions{0.5, 0}, ChainOptions{0, 0.1}}) {
          if (!mine()) continue;
          // What passes a slope reads off values, which codes of 2 bits sample: they serve a ReLU alone.
          const char* text = options.slope > 0 ? "satchel,bits=3" : rows == 33 ? "satchel,off=mean" : "satchel";
          SCOPED_TRACE(trace(rows, channels, plain ? "plain" : "any") + " " + text);
          const Layer layer(normal({rows, channels}, 76) * 1.5 + 0.2, text, options, plain);
          ASSERT_EQ(cuda::norm_act_fits(layer.code), rows * channels >= 256);  // fewer values are one shorter block
          if (rows * channels >= 256) f(layer);
        }
      }
    }
  }
}

TEST_F(Cuda, NormActKeepsTheBytesOfTheUnfusedPath) {
  for_layers([](const Layer& layer) {
    const auto [bytes, z] = layer.encode(layer.h, at::full_like(layer.h, 7));
    EXPECT_TRUE(same(bytes, layer.packed.bytes)) << (bytes != layer.packed.bytes).sum().item<int64_t>() << " bytes differ";
    EXPECT_TRUE(same(z, layer.z));
    const at::Tensor over = layer.h.clone();
    EXPECT_TRUE(same(layer.encode(over, over).first, layer.packed.bytes)) << "in place";
    EXPECT_TRUE(same(over, layer.z)) << "in place";
  });
}

TEST_F(Cuda, NormActOfOtherHeadersRoundingAndAddresses) {
  for (const char* text :
       {"satchel,header=f32", "satchel,round=nearest", "satchel,levels=even", "satchel,bits=3", "satchel,bits=3,header=f32"}) {
    for (const int64_t channels : {100, 128}) {
      SCOPED_TRACE(trace(20001, channels, text));
      const Layer layer(normal({20001, channels}, 77), text, {0.25, 0}, true);
      for (const int64_t shift : {0, 1}) {
        const auto [bytes, z] = layer.encode(shifted(layer.h, shift), shifted(layer.z, shift).fill_(7));
        EXPECT_TRUE(same(bytes, layer.packed.bytes));
        EXPECT_TRUE(same(z, layer.z));
      }
    }
  }
}

TEST_F(Cuda, NormActShowsWhatIsNotANumber) {
  at::Tensor h = normal({999, 128}, 78);
  h[5][6] = std::numeric_limits<float>::quiet_NaN();
  h[700][1] = std::numeric_limits<float>::infinity();
  h[998][127] = std::numeric_limits<float>::quiet_NaN();  // in the last, broken block
  const Layer layer(h, "satchel", {0.5, 0}, true);
  const auto [bytes, z] = layer.encode(layer.h, at::full_like(layer.h, 7));
  EXPECT_TRUE(same(bytes, layer.packed.bytes));
  EXPECT_TRUE(same(z, layer.z));
  const at::Tensor again = at::full_like(layer.z, 7), decoded = unpack(layer.packed);
  layer.input(0, 999, again);
  EXPECT_TRUE(same(at::isnan(again), at::isnan(decoded)));
  // Rows 4 and 5, 700 and 701, and row 998 are the poisoned blocks; the off means of three channels are not finite either.
  EXPECT_GE(at::isnan(decoded).sum().item<int64_t>(), 5 * 128);
  const auto [sum, along] = layer.sums(at::ones_like(layer.h));
  EXPECT_TRUE(at::isfinite(sum).all().item<bool>());
  EXPECT_TRUE(at::isnan(along).all().item<bool>());
}

TEST_F(Cuda, NormActRebuildsTheNextInput) {
  for_layers([](const Layer& layer) {
    const int64_t rows = layer.h.size(0);
    const at::Tensor expected =
        apply_chain(unpack(layer.packed), layer.gamma, layer.beta, on_bits(layer.packed), layer.seed, layer.options);
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, rows}, {rows / 3, rows}, {rows / 2, rows / 2 + 1}, {0, 0}}) {
      for (const int64_t shift : {0, 1}) {
        const at::Tensor part = expected.narrow(0, first, last - first), got = shifted(part, shift).fill_(7);
        layer.input(first, last, got);
        EXPECT_TRUE(same(got, part)) << first << " to " << last;
      }
    }
  });
}

/// Sums and gradients of layers whose threads walk at most `steps` blocks.
void expect_gradients(const Layer& layer, double steps, int64_t shift) {
  const double rows = static_cast<double>(layer.h.size(0));
  const at::Tensor g = shifted(normal(layer.h.sizes(), 79), shift);
  const at::Tensor gz = chain_gradient(g, on_bits(layer.packed), layer.seed, layer.options).to(at::kDouble);
  const at::Tensor x = unpack(layer.packed).to(at::kDouble), gx = gz * x;
  const at::Tensor sum = gz.sum(0), along = gx.sum(0), size = gz.abs().sum(0), size_x = gx.abs().sum(0);
  const auto [got_sum, got_along] = layer.sums(g);
  // fp32 additions: one a step, then 8 warps, then one rounding of the double sum; a product is fused with its addition.
  const double rounding = (steps + 8 + 1) * kUnit;
  EXPECT_TRUE(((got_sum - sum).abs() <= size * rounding).all().item<bool>());
  EXPECT_TRUE(((got_along - along).abs() <= size_x * rounding).all().item<bool>());
  const auto twice = layer.sums(g);
  EXPECT_TRUE(same(twice.first, got_sum) && same(twice.second, got_along));

  const at::Tensor scale = layer.gamma.to(at::kDouble) * layer.rstd, dx = g.clone(), evaluated = g.clone();
  layer.back(dx, got_sum, got_along);
  const at::Tensor expected = (gz - sum / rows - x * along / rows) * scale;
  // The sums', 2 for their shares, 1 each for fma, subtraction and the two products with the scale, and second-order terms: 1 more.
  const at::Tensor bound = (gz.abs() + (size + x.abs() * size_x) / rows) * scale.abs() * (rounding + 7 * kUnit);
  EXPECT_TRUE(((dx - expected).abs() <= bound).all().item<bool>()) << ((dx - expected).abs() / bound).max().item<double>();
  layer.back(evaluated, {}, {});
  // Two products.
  EXPECT_TRUE(((evaluated - gz * scale).abs() <= (gz * scale).abs() * 2.01 * kUnit).all().item<bool>());
}

TEST_F(Cuda, NormActGradients) {
  for_layers([](const Layer& layer) { expect_gradients(layer, 1, 0); });
}

TEST_F(Cuda, NormActGradientsOfManyRows) {
  for (const int64_t channels : {100, 128, 256}) {
    const int64_t rows = 40001;
    // 525 or 528 thread blocks of 8 warps, 256 values a warp and step.
    const double steps = std::ceil(static_cast<double>(rows * channels) / (525 * 8 * 256));
    SCOPED_TRACE(trace(rows, channels, ""));
    for (const int64_t shift : {0, 1}) expect_gradients(Layer(normal({rows, channels}, 80), "satchel", {0.5, 0}, true), steps, shift);
  }
}

TEST_F(Cuda, NormActFitsOrSaysSo) {
  for (const char* text : {"side=both,bits=3", "side=both,bits=2", "satchel,block=128", "satchel,block=row"}) {
    EXPECT_FALSE(cuda::norm_act_fits(Layer(normal({64, 40}, 81), text, {}, true).code)) << text;
  }
  EXPECT_FALSE(cuda::norm_act_fits(Layer(normal({4, 1001}, 81), "satchel", {}, true).code));
}

TEST_F(Cuda, ColumnMoments) {
  for (const int64_t channels : {1, 7, 8, 40, 100, 128, 256, 1000}) {
    for (const int64_t rows : {1, 2, 9, 1001, 40001}) {
      for (const double offset : {0.0, 100.0}) {
        SCOPED_TRACE(trace(rows, channels, offset == 0 ? "" : "far from 0"));
        const at::Tensor h = shifted(normal({rows, channels}, 82) * 2 + offset, channels == 128 ? rows % 4 : 0);
        const at::Tensor scratch = scratch_of(cuda::column_moments_scratch_bytes(channels));
        const auto fresh = [&](double value) { return at::full({channels}, value, h.options()); };
        const at::Tensor mean = fresh(7), rstd = fresh(7), var = fresh(7), running_mean = fresh(1), running_var = fresh(2);
        const Place place(h.device(), "test");
        const auto run = [&] {
          cuda::column_moments(floats(h), DType::f32, rows, channels, {floats(mean), floats(rstd), floats(var), nullptr, nullptr},
                               scratch.data_ptr(), place.stream());
        };
        run();
        const at::Tensor first = at::stack({mean, rstd, var});
        const at::Tensor exact = h.to(at::kDouble), m = exact.mean(0), v = exact.var(0, /*unbiased=*/false);
        const double most = exact.abs().max().item<double>();
        // A batch's mean: 8 additions and a product. A thread merges up to 3 batches (32 rows a slot and more in one of 528 parts: tiles
        // of 64 rows and more), 6 units each, for values 2·most apart; the parts' and the result's rounding: 2.
        const double off = (9 + 6 * 3 + 2) * kUnit * most;
        EXPECT_LE((mean - m).abs().max().item<double>(), off);
        // Squares: 8 fused additions, 3·4 for merging, 4 for what follows; means that are `off` away from where they should be.
        const at::Tensor bound = v * (24 * kUnit) + v.sqrt() * (4 * off) + 4 * off * off;
        EXPECT_TRUE(((var - v).abs() <= bound).all().item<bool>()) << ((var - v).abs() / bound).max().item<double>();
        // rstd of a variance within the bound, which is small against var + eps, and its own rounding.
        const at::Tensor inverse = (v + 1e-5).rsqrt();
        EXPECT_TRUE(((rstd - inverse).abs() <= inverse * (bound / (v + 1e-5) + kUnit)).all().item<bool>());
        run();
        EXPECT_TRUE(same(at::stack({mean, rstd, var}), first)) << "a second time";
        if (rows < 2) continue;
        cuda::column_moments(floats(h), DType::f32, rows, channels,
                             {floats(mean), floats(rstd), nullptr, floats(running_mean), floats(running_var)}, scratch.data_ptr(),
                             place.stream());
        // A tenth of the new value's error, and the rounding of the blend.
        EXPECT_LE((running_mean - (m * 0.1 + 0.9)).abs().max().item<double>(), 0.1 * off + kUnit * (1 + most));
        const double unbiased = static_cast<double>(rows) / static_cast<double>(rows - 1);
        EXPECT_TRUE(((running_var - (v * (0.1 * unbiased) + 1.8)).abs() <= bound * (0.1 * unbiased) + (v + 2) * kUnit).all().item<bool>());
      }
    }
  }
}

}  // namespace
}  // namespace satchel
