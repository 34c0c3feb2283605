// A norm of channels for the tests of its fused passes: input, statistics, x̂, and gradients by plain loops.
#pragma once

#include "satchel/kernels/cuda/epilogue.h"
#include "tests/emulation/common.h"

namespace satchel::test {

/// A norm's input as it stands in memory, and its x̂ in float32.
struct Norm {
  int64_t rows, channels;
  DType type;
  Floats mean, rstd, gamma, beta;
  Bytes x;
  Floats hat;

  /// `tame`: channels and values as layers have them; else any, flat, falling and of no number among them.
  Norm(int64_t rows, int64_t channels, DType type, bool tame, Random& random) : rows(rows), channels(channels), type(type) {
    const bool centred = random.one_in(4);
    for (int64_t c = 0; c < channels; ++c) {
      mean.push_back(centred ? 0.0f : random.normal() * 0.2f);
      rstd.push_back(0.5f + std::abs(random.normal()));
      gamma.push_back(0.5f + std::abs(random.normal()) * 0.2f);
      beta.push_back(random.one_in(5) ? 0.0f : random.normal() * 0.1f);
    }
    if (!tame) {
      const std::vector<Channel> any = channels_of(channels, random);
      for (size_t c = 0; c < any.size(); ++c) gamma[c] = any[c].gamma, beta[c] = any[c].beta;
    }
    const int64_t n = values();
    Floats v = tame ? Floats() : mixed_values(n, random);
    if (tame) {
      for (int64_t i = 0; i < n; ++i) {
        const size_t c = static_cast<size_t>(i % channels);
        v.push_back(mean[c] + random.normal() / rstd[c]);
      }
    }
    if (!tame) {  // the norm's own zero, subnormals
      for (int k = 0; k < 8; ++k) v[at(random)] = k % 2 == 0 ? mean[0] : 1e-39f;
    }
    x = as_type(v, type);
    normalise();
  }

  int64_t values() const { return rows * channels; }
  size_t at(Random& random) const { return static_cast<size_t>(random.below(values())); }

  /// NaN and infinity at a few places, or in the last block alone, which may be broken.
  void poison(Random& random) {
    if (random.one_in(2))
      put(x, type, values() - 1, NAN);
    else
      for (const float v : {NAN, INFINITY, -INFINITY}) put(x, type, random.below(values()), v);
    normalise();
  }

  void normalise() {
    hat.clear();
    for (int64_t i = 0; i < values(); ++i) {
      const size_t c = static_cast<size_t>(i % channels);
      hat.push_back((load(x.data(), type, i) - mean[c]) * rstd[c]);
    }
  }

  cuda::NormParameters parameters() const { return {mean.data(), rstd.data(), gamma.data(), beta.data()}; }
  float affine(int64_t i) const {
    const size_t c = static_cast<size_t>(i % channels);
    return std::fma(gamma[c], hat[static_cast<size_t>(i)], beta[c]);
  }
  Bytes hat_bytes() const { return as_type(hat, DType::f32); }
};

/// Rows of a tensor of about so many values: every kind of tail.
inline int64_t rows_of(int64_t channels, Random& random) {
  const int64_t about[] = {256, 300, 512, 2040, 2048, 5000, 17000};
  return ceil_div(random.pick(about), channels) + random.below(4);
}

inline Bytes gradient(int64_t n, DType type, Random& random) {
  Floats g;
  for (int64_t i = 0; i < n; ++i) g.push_back(random.normal());
  return as_type(g, type);
}

/// Sums over rows of gz and gz·x̂ a channel. A thread adds up a value of each of its steps, of which eight warps share ⌈values/256⌉, then
/// eight warps' sums; what follows is in double, and rounded once. Each addition is off by kUnit of all that is summed, at most.
inline void expect_sums(const Floats& gz, const Floats& hat, int64_t channels, Placed& beta, Placed& gamma) {
  const int64_t n = static_cast<int64_t>(gz.size());
  const double depth = static_cast<double>(ceil_div(n, 2048) + 12);
  std::vector<double> sum(static_cast<size_t>(channels)), along = sum, size = sum, along_size = sum;
  for (size_t i = 0; i < gz.size(); ++i) {
    const size_t c = i % static_cast<size_t>(channels);
    const double g = gz[i], p = g * static_cast<double>(hat[i]);
    sum[c] += g, size[c] += std::abs(g), along[c] += p, along_size[c] += std::abs(p);
  }
  ASSERT_TRUE(beta.intact() && gamma.intact());
  for (size_t c = 0; c < sum.size(); ++c) {
    ASSERT_TRUE(is_near(beta.floats()[c], sum[c], depth * kUnit * size[c]))
        << "channel " << c << ": " << beta.floats()[c] << ", not " << sum[c];
    ASSERT_TRUE(is_near(gamma.floats()[c], along[c], depth * kUnit * along_size[c]))
        << "channel " << c << ": " << gamma.floats()[c] << ", not " << along[c];
  }
}

/// Made-up sums of a batch.
struct Sums {
  Floats g, gx;
  Sums(int64_t rows, int64_t channels, Random& random) {
    for (int64_t c = 0; c < channels; ++c) {
      g.push_back(random.normal() * static_cast<float>(rows) * 0.3f);
      gx.push_back(random.normal() * static_cast<float>(rows) * 0.3f);
    }
  }
};

/// γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N), or γ·rstd·gz. Eight float32 operations at most lie between a number read and one written (1/N, two
/// products with it, γ·rstd, an fma, a difference, a product), each off by kUnit of the sizes that meet.
inline void expect_gradient(const Bytes& own, DType type, const Floats& gz, const Floats& hat, const Norm& norm, const Sums* sums,
                            int64_t rows) {
  for (size_t i = 0; i < gz.size(); ++i) {
    const size_t c = i % static_cast<size_t>(norm.channels);
    const double scale = static_cast<double>(norm.gamma[c]) * static_cast<double>(norm.rstd[c]), g = gz[i], x = hat[i],
                 n = static_cast<double>(rows);
    const double offset = sums == nullptr ? 0 : sums->g[c] / n, along = sums == nullptr ? 0 : x * (sums->gx[c] / n);
    const double truth = scale * (g - offset - along), size = std::abs(scale) * (std::abs(g) + std::abs(offset) + std::abs(along));
    const float found = load(own.data(), type, static_cast<int64_t>(i));
    ASSERT_TRUE(is_near(found, truth, 8 * kUnit * size, type))
        << "value " << i << " of " << gz.size() << ": " << found << ", not " << truth;
  }
}

}  // namespace satchel::test
