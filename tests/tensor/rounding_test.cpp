// What analyses call the variance of rounding is what the codec's errors have.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "satchel/core/distribution.h"
#include "satchel/core/levels.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Mean squared error of the codec on x, blocks of `block` values, in steps² of each block.
double codec_variance(const at::Tensor& x, int64_t block, int bits, const std::string& levels) {
  const CodecSpec spec = parse_spec("header=f32,bits=" + std::to_string(bits) + ",block=" + std::to_string(block) + ",levels=" + levels);
  const at::Tensor blocks = x.view({-1, block}), back = unpack(pack(x, spec, at::full({1}, 5, at::kLong))).view({-1, block});
  const at::Tensor step = (blocks.amax(1, true) - blocks.amin(1, true)) / ((1 << bits) - 1);
  return ((back - blocks) / step).square().mean().item<double>();
}

TEST(Rounding, CodecErrorsAreTheVarianceOfAnalyses) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU).clone();
  generator.set_current_seed(3);
  const at::Tensor normal = at::randn({1 << 20}, generator);
  for (const at::Tensor& x : {normal, at::relu(normal), at::rand({1 << 20}, generator)}) {
    const std::span<const float> all(x.const_data_ptr<float>(), static_cast<size_t>(x.numel()));
    for (const int64_t block : {64, 256, 1024}) {  // in shorter ones a ReLU may leave nothing
      const NormalisedBlocks y = normalise_blocks(all, x.numel(), block);
      ASSERT_EQ(y.constant, 0);
      for (const int bits : {2, 4}) {
        // A squared error e² is at most s², s the longest segment between levels: 1.3 (2 bits) and 4.2 (4 bits, 1,024 values). So the
        // mean of n = 2^20 of them has a relative deviation of at most √(s²/(v·n)): with the variances v here, .04 (2 bits of a ReLU)
        // and .1 (4 bits), .65 %. 2 % is three of them.
        const std::vector<double> even = even_levels(1 << bits), best = optimal_levels(1 << bits, static_cast<double>(block));
        EXPECT_NEAR(codec_variance(x, block, bits, "even") / rounding_variance(y.values, even), 1, .02) << block << ' ' << bits;
        EXPECT_NEAR(codec_variance(x, block, bits, "optimal") / rounding_variance(y.values, best), 1, .02) << block << ' ' << bits;
      }
    }
  }
}

}  // namespace
}  // namespace satchel
