// Max-pool, chains and moments of columns, emulated on the CPU: plain loops, the scalar kernel's bits, sums in double.
#include "satchel/kernels/cuda/pool.h"

#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

using cuda::PoolSide;

/// Windows as torch counts them; `over`: the last may hang over the edge, but not start behind it.
PoolSide side_of(int size, int kernel, int stride, int padding, int dilation, bool over) {
  const int room = size + 2 * padding - dilation * (kernel - 1) - 1;
  int out = (room + (over ? stride - 1 : 0)) / stride + 1;
  if (over && (out - 1) * stride >= size + padding) --out;
  return {size, out, kernel, stride, padding, dilation};
}

struct Window {
  int kernel[2], stride[2], padding[2], dilation[2];
  bool over;
};
constexpr Window kWindows[] = {
    {{3, 3}, {2, 2}, {1, 1}, {1, 1}, false},  {{2, 2}, {2, 2}, {0, 0}, {1, 1}, false}, {{2, 2}, {2, 2}, {0, 0}, {1, 1}, true},
    {{1, 1}, {1, 1}, {0, 0}, {1, 1}, false},  {{1, 1}, {2, 2}, {0, 0}, {1, 1}, false}, {{3, 2}, {1, 3}, {1, 0}, {1, 1}, true},
    {{3, 3}, {1, 1}, {1, 1}, {1, 1}, false},  {{3, 3}, {2, 2}, {1, 1}, {2, 2}, true},  {{2, 3}, {2, 1}, {1, 1}, {3, 2}, false},
    {{8, 16}, {4, 4}, {4, 8}, {1, 1}, false}, {{5, 5}, {5, 5}, {2, 2}, {1, 1}, true},  {{1, 5}, {1, 2}, {0, 2}, {1, 1}, false},
};

TEST(EmulatedPool, MaximaOffsetsAndGradients) {
  Random random(91);
  for (const Window& w : kWindows) {
    for (const int64_t channels : {1, 5, 8, 24, 64}) {
      for (const DType type : kTypes) {
        const int height = 4 + static_cast<int>(random.below(20)) + w.kernel[0],
                  width = 4 + static_cast<int>(random.below(20)) + w.kernel[1];
        cuda::MaxPool p = {1 + random.below(3), channels, side_of(height, w.kernel[0], w.stride[0], w.padding[0], w.dilation[0], w.over),
                           side_of(width, w.kernel[1], w.stride[1], w.padding[1], w.dilation[1], w.over), 0};
        while (1 << p.bits < w.kernel[0] * w.kernel[1]) ++p.bits;
        SCOPED_TRACE(std::to_string(p.samples) + " x " + std::to_string(height) + " x " + std::to_string(width) + " x " +
                     std::to_string(channels) + " " + name_of(type) + ", window " + std::to_string(&w - kWindows));
        ASSERT_TRUE(cuda::max_pool_fits(p));
        const int64_t n = p.samples * height * width * channels, outs = p.samples * p.height.out * p.width.out * channels;
        Floats v, gradients;
        for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<float>(random.below(13) - 6) * 0.5f);  // ties
        for (int64_t i = 0; i < outs; ++i) gradients.push_back(static_cast<float>(random.below(13) - 6) * 0.5f);
        if (random.one_in(3)) {
          for (int64_t i = 0; i < n; ++i) {
            if (random.one_in(5)) v[static_cast<size_t>(i)] = random.one_in(2) ? NAN : random.one_in(2) ? INFINITY : -INFINITY;
          }
        }
        // The truth: the first of equal values, the last NaN.
        Floats y, dx(static_cast<size_t>(n));
        Bytes offsets(static_cast<size_t>(code_bytes(outs, p.bits)));
        for (int64_t o = 0; o < outs; ++o) {
          const int64_t pixel = o / channels, row = pixel / p.width.out % p.height.out, sample = pixel / p.width.out / p.height.out;
          float best = -INFINITY;
          int64_t at = -1, from = -1;
          for (int a = 0; a < w.kernel[0]; ++a) {
            for (int b = 0; b < w.kernel[1]; ++b) {
              const int64_t r = row * w.stride[0] - w.padding[0] + a * w.dilation[0],
                            c = pixel % p.width.out * w.stride[1] - w.padding[1] + b * w.dilation[1];
              if (r < 0 || r >= height || c < 0 || c >= width) continue;
              const int64_t i = ((sample * height + r) * width + c) * channels + o % channels;
              const float x = v[static_cast<size_t>(i)];
              if (at < 0 || x > best || x != x) best = x, at = a * w.kernel[1] + b, from = i;
            }
          }
          y.push_back(best);
          if (p.bits > 0) put_code(offsets.data(), p.bits, o, static_cast<uint32_t>(std::max<int64_t>(at, 0)));
          if (from >= 0)
            dx[static_cast<size_t>(from)] += gradients[static_cast<size_t>(o)];  // halves, and few: every type holds their sums
        }
        Placed x(stored(v, type), shift_of(type, random)), own(outs * size_of(type), shift_of(type, random)),
            places(static_cast<int64_t>(offsets.size()));
        cuda::max_pool(p, x.data(), type, own.data(), places.data(), nullptr);
        ASSERT_TRUE(x.intact() && own.intact() && places.intact());
        ASSERT_TRUE(same(own.bytes(), stored(y, type), type));
        ASSERT_EQ(places.bytes(), offsets);
        Placed g(stored(gradients, type), shift_of(type, random)), to(n * size_of(type), shift_of(type, random));
        cuda::max_pool_back(p, g.data(), type, places.data(), to.data(), nullptr);
        ASSERT_TRUE(g.intact() && to.intact());
        ASSERT_EQ(floats_of(to.bytes(), type), dx);
      }
    }
  }
}

TEST(EmulatedChain, IsTheScalarKernels) {
  Random random(92);
  const int64_t lengths[] = {1, 7, 8, 9, 255, 256, 1000, 4097}, counts[] = {1, 3, 8, 64, 100};
  for (int trial = 0; trial < 200; ++trial) {
    Chain c;
    c.values = random.pick(lengths), c.channels = random.pick(counts), c.origin = random.one_in(3) ? 8 * random.below(50) : 0;
    c.slope = random.one_in(2) ? 0.1f : 0.0f;
    if (random.one_in(2)) c.drop = 1 + static_cast<uint32_t>(random.below(40000)), c.scale = 65536.0f / static_cast<float>(65536 - c.drop);
    const DType type = kTypes[trial % 3];
    const int64_t n = c.values, mask = code_bytes(n, 1);
    SCOPED_TRACE(std::to_string(n) + " values from " + std::to_string(c.origin) + " on, " + std::to_string(c.channels) + " channels, " +
                 name_of(type));
    Floats values = mixed_values(n, random), gamma, beta;
    if (random.one_in(3)) values[static_cast<size_t>(random.below(n))] = random.one_in(2) ? NAN : -INFINITY;
    for (int64_t k = 0; k < c.channels; ++k) gamma.push_back(random.normal()), beta.push_back(random.normal());
    const Bytes x = stored(values, type);
    values = floats_of(x, type);
    Bytes bits(static_cast<size_t>(mask));
    for (uint8_t& b : bits) b = static_cast<uint8_t>(random.bits());
    const bool affine = random.one_in(2), given = random.one_in(2), in_place = random.one_in(3);
    const float *scale = affine ? gamma.data() : nullptr, *shift = affine ? beta.data() : nullptr;
    const uint8_t* on = given ? bits.data() : nullptr;
    const uint64_t seed = random.bits(), *drawn = c.drop > 0 ? &seed : nullptr;
    Floats truth(values.size());
    Bytes true_on(static_cast<size_t>(mask));

    kScalar.chain(c, values.data(), scale, shift, on, seed, truth.data(), 0, n);
    Placed from(x, shift_of(type, random)), other(n * size_of(type), shift_of(type, random));
    Placed own_on(mask, random.below(2));
    kScalar.chain_on(c, values.data(), scale, shift, true_on.data(), 0, n);
    cuda::chain_on(c, from.data(), type, scale, shift, own_on.data(), nullptr);
    ASSERT_TRUE(own_on.intact());
    ASSERT_EQ(own_on.bytes(), true_on);
    cuda::chain(c, from.data(), type, scale, shift, on, drawn, in_place ? from.data() : other.data(), nullptr);
    ASSERT_TRUE(from.intact() && other.intact());
    ASSERT_TRUE(same((in_place ? from : other).bytes(), stored(truth, type), type));

    kScalar.chain_back(c, values.data(), on, seed, truth.data(), 0, n);
    Placed g(x, shift_of(type, random)), to(n * size_of(type), shift_of(type, random));
    cuda::chain_back(c, g.data(), type, on, drawn, in_place ? g.data() : to.data(), nullptr);
    ASSERT_TRUE(g.intact() && to.intact());
    ASSERT_TRUE(same((in_place ? g : to).bytes(), stored(truth, type), type));

    const SideForm form = random.pick(kForms);
    const SideCode code = side_code(form, n, 256, c.channels, 1, random);
    Bytes codes(static_cast<size_t>(code_bytes(n, form.bits)));
    for (uint8_t& b : codes) b = static_cast<uint8_t>(random.bits());
    Placed packed(codes, random.below(5));
    kScalar.side_on(code, codes.data(), true_on.data(), 0, n);
    Placed bytes(mask, random.below(2));
    cuda::side_on(code, packed.data(), bytes.data(), nullptr);
    ASSERT_TRUE(bytes.intact());
    ASSERT_EQ(bytes.bytes(), true_on);
  }
}

TEST(EmulatedMoments, AreThoseInDouble) {
  Random random(93);
  struct Size {
    int64_t rows, channels;
  };
  std::vector<Size> sizes = {{34000, 100}};  // thread blocks take turns
  for (const int64_t channels : {1, 3, 4, 7, 16, 100, 128, 260}) {
    for (const int64_t rows : {1, 2, 9, 63, 64, 65, 1000, 3001}) sizes.push_back({rows, channels});
  }
  int trial = 0;
  for (const auto& [rows, channels] : sizes) {
    const DType type = kTypes[(trial++ + 2) % 3];
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels) + " " + name_of(type));
    const int64_t n = rows * channels;
    Floats v, offset, before_mean, before_var;
    for (int64_t c = 0; c < channels; ++c) {
      offset.push_back(random.normal() * (random.one_in(3) ? 30.0f : 1.0f));
      before_mean.push_back(random.normal()), before_var.push_back(1 + random.normal() * 0.2f);
    }
    for (int64_t i = 0; i < n; ++i) v.push_back(random.normal() + offset[static_cast<size_t>(i % channels)]);
    Bytes x = stored(v, type);
    const int64_t bad = random.one_in(4) ? random.below(n) : -1;
    if (bad >= 0) put(x, type, bad, random.one_in(2) ? NAN : INFINITY);
    Placed from(x, shift_of(type, random)), mean(4 * channels), rstd(4 * channels), var(4 * channels),
        scratch(cuda::column_moments_scratch_bytes(channels));
    Placed run_mean(as_type(before_mean, DType::f32)), run_var(as_type(before_var, DType::f32));
    const bool all = random.one_in(2);
    const double eps = 1e-3, momentum = 0.2;
    cuda::column_moments(from.data(), type, rows, channels,
                         {mean.floats(), rstd.floats(), all ? var.floats() : nullptr, all ? run_mean.floats() : nullptr,
                          all ? run_var.floats() : nullptr, eps, momentum},
                         scratch.data(), nullptr);
    ASSERT_TRUE(mean.intact() && rstd.intact() && var.intact() && scratch.intact() && run_mean.intact() && run_var.intact());
    for (int64_t c = 0; c < channels; ++c) {
      const size_t k = static_cast<size_t>(c);
      double sum = 0, squares = 0, most = 0, far = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const double value = load(x.data(), type, r * channels + c);
        sum += value, most = std::max(most, std::abs(value));
      }
      const double truth = sum / static_cast<double>(rows);
      if (!std::isfinite(truth)) {
        ASSERT_FALSE(std::isfinite(mean.floats()[c])) << c;
        ASSERT_NE(rstd.floats()[c], rstd.floats()[c]) << c;
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        const double d = load(x.data(), type, r * channels + c) - truth;
        squares += d * d, far = std::max(far, std::abs(d));
      }
      // A batch's mean is off by 9 kUnit of the largest value, one of up to two merges by 3 more, and its rounding by 1. Squares about a
      // mean that is off by e are too large by e² each, merges read means that are off by e twice; and 20 operations are rounded.
      const double e = 16 * kUnit * most, variance = squares / static_cast<double>(rows),
                   bound = 40 * kUnit * variance + 4 * far * e + e * e;
      ASSERT_TRUE(is_near(mean.floats()[c], truth, e)) << c << ": " << mean.floats()[c] << ", not " << truth;
      ASSERT_LE(rstd.floats()[c], (1 + 2 * kUnit) / std::sqrt(std::max(variance - bound, 0.0) + eps)) << c;
      ASSERT_GE(rstd.floats()[c], (1 - 2 * kUnit) / std::sqrt(variance + bound + eps)) << c;
      if (!all) continue;
      ASSERT_TRUE(is_near(var.floats()[c], variance, bound)) << c;
      ASSERT_TRUE(is_near(run_mean.floats()[c], (1 - momentum) * before_mean[k] + momentum * truth, e)) << c;
      if (rows == 1) continue;  // no unbiased variance: not a number, as torch has it
      const double more = static_cast<double>(rows) / static_cast<double>(rows - 1);
      ASSERT_TRUE(is_near(run_var.floats()[c], (1 - momentum) * before_var[k] + momentum * variance * more, bound * more)) << c;
    }
  }
}

}  // namespace
}  // namespace satchel::test
