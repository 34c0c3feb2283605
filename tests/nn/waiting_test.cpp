// A norm that waits for its reader: who shares what with it, and that nothing is overlooked.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/smooth.h"
#include "satchel/core/error.h"
#include "satchel/train/memory.h"
#include "tests/autograd/gradient.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

int64_t kept(const at::Tensor& out) { return total_bytes(saved_tensors(out)); }

NormWeights weights_of(int64_t channels) { return {leaf({channels}), leaf({channels}), {}, {}}; }

at::Tensor conv3(const at::Tensor& x, const at::Tensor& w, const SavePolicy& s) {
  return conv(x, w, {}, {{1}, {1}, {1}, {0}, false, 1}, s);
}

/// Norm, ReLU and convolution as functions of their own keep the same bytes and give the same gradients, bit for bit, as the fused call.
TEST(Deferred, NormThenReluIsTheFusedCall) {
  for (const char* method : {"satchel", "satchel,bits=3", "satchel,side=none", "satchel,residual=1"}) {
    const SavePolicy s = saving_of(method);
    std::vector<std::vector<at::Tensor>> runs;
    std::vector<int64_t> bytes;
    for (const bool fused : {false, true}) {
      at::manual_seed(3);
      const NormWeights w = weights_of(16);
      const at::Tensor x = leaf({4, 16, 6, 6}), kernel = leaf({8, 16, 3, 3});
      const at::Tensor z = fused ? norm_act(x, w, {}, s) : relu(batch_norm(x, w, {}, s), s);
      const at::Tensor out = conv3(z, kernel, s);
      bytes.push_back(kept(out));
      runs.push_back(gradients_of(out, at::ones_like(out), {x, w.gamma, w.beta, kernel}));
    }
    EXPECT_EQ(bytes[0], bytes[1]) << method;
    for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << method << ", gradient " << i;
  }
}

/// Kinds of the lines that out's graph keeps.
std::vector<std::string> kinds_of(const at::Tensor& out) {
  std::vector<std::string> kinds;
  for (const SavedTensor& line : saved_tensors(out)) kinds.push_back(line.kind);
  return kinds;
}

TEST(Deferred, OtherReadersMakeTheNormPackForItself) {
  at::manual_seed(3);
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(16);
  const at::Tensor x = leaf({4, 16, 6, 6}), kernel = leaf({8, 16, 3, 3});
  using Kinds = std::vector<std::string>;
  EXPECT_EQ(kinds_of(batch_norm(x, w, {}, s)), (Kinds{"norm", "statistics"}));
  EXPECT_EQ(kinds_of(relu(batch_norm(x, w, {}, s) + x, s)), (Kinds{"norm", "statistics", "shared"}));
  // A convolution shares the norm's own values, and γ and β to rebuild its input with.
  EXPECT_EQ(kinds_of(conv3(batch_norm(x, w, {}, s), kernel, s)), (Kinds{"shared", "affine", "statistics"}));
  const SavePolicy few = saving_of("satchel,residual=1");  // too few for the convolution's weights
  EXPECT_EQ(kinds_of(conv3(batch_norm(x, w, {}, few), kernel, few)), (Kinds{"norm", "statistics", "input"}));
  EXPECT_EQ(kinds_of(conv3(relu(batch_norm(x, w, {}, s), s), kernel, s)), (Kinds{"shared", "statistics"}));
  EXPECT_EQ(kinds_of(conv3(dropout(relu(batch_norm(x, w, {}, s), s), 0.2, true, s), kernel, s)), (Kinds{"shared", "statistics", "seed"}));
}

TEST(Deferred, AnOutputThatIsReadTwiceHasBothGradients) {
  const SavePolicy s = saving_of("satchel,bits=32");
  for (const bool relu_first : {false, true}) {
    std::vector<std::vector<at::Tensor>> runs;
    for (const bool ours : {false, true}) {
      at::manual_seed(5);
      const NormWeights w = weights_of(8);
      const at::Tensor x = leaf({3, 8, 5, 5}), g = at::randn({3, 8, 5, 5});
      const at::Tensor y = ours ? batch_norm(x, w, {}, s) : at::batch_norm(x, w.gamma, w.beta, {}, {}, true, 0.1, 1e-5, false);
      at::Tensor other = relu_first ? at::Tensor() : y * y;
      const at::Tensor z = ours ? relu(y, s) : at::relu(y);
      if (relu_first) other = y * y;
      runs.push_back(gradients_of(z + other, g, {x, w.gamma, w.beta}));
    }
    // float32 sums of 75 terms of order 1, rounded to 2^−24 each, in another order.
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(runs[0][i], runs[1][i], 1e-4, 1e-4)) << relu_first << i;
  }
}

/// GELU claims a norm by row: what is kept, under which names, and the gradients are those of two functions that know nothing of each
/// other, bit for bit. A view between them keeps them apart.
TEST(Deferred, GeluAndTheNormItClaimsAreTheTwoFunctions) {
  for (const char* method : {"satchel", "satchel,norm_bits=1", "satchel,bits=32"}) {
    for (const bool centred : {true, false}) {
      std::vector<std::vector<at::Tensor>> runs;
      std::vector<std::vector<SavedTensor>> lines;
      for (const bool apart : {false, true}) {
        at::manual_seed(3);
        SavePolicy s = saving_of(method), other = s;
        s.name = "norm", other.name = "act";
        const at::Tensor x = leaf({6, 5, 64}), gamma = leaf({64}), beta = leaf({64});
        const at::Tensor y = centred ? layer_norm(x, {64}, {gamma, beta, {}, {}}, {}, s) : rms_norm(x, {64}, gamma, 1e-6, s);
        const at::Tensor z = gelu(apart ? y.view({6, 5, 64}) : y, "none", other);
        lines.push_back(packed_tensors(z));
        std::vector<at::Tensor> inputs{x, gamma};
        if (centred) inputs.push_back(beta);
        runs.push_back(gradients_of(z, at::randn({6, 5, 64}), inputs));
      }
      EXPECT_EQ(lines[0], lines[1]) << method;
      for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << method << ", gradient " << i;
    }
  }
}

/// … of which y is read once more, has a hook, or both.
TEST(Deferred, AnOutputOfANormThatGeluClaimsHasAllItsGradients) {
  const SavePolicy s = saving_of("satchel,bits=32");
  for (const int how : {0, 1, 2, 3}) {
    const bool again = how % 2 == 1, hook = how >= 2;
    std::vector<std::vector<at::Tensor>> runs;
    for (const bool ours : {false, true}) {
      at::manual_seed(5);
      const at::Tensor x = leaf({12, 32}), gamma = leaf({32}), beta = leaf({32}), g = at::randn({12, 32});
      const at::Tensor y = ours ? layer_norm(x, {gamma, beta, {}, {}}, {}, s) : at::layer_norm(x, {32}, gamma, beta);
      if (hook) y.retain_grad();
      at::Tensor out = ours ? gelu(y, "tanh", s) : at::gelu(y, "tanh");
      if (again) out = out + y * y;
      runs.push_back(gradients_of(out, g, {x, gamma, beta}));
    }
    // float32 sums of 32 terms of order 1, rounded to 2^−24 each, in another order.
    for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::allclose(runs[0][i], runs[1][i], 1e-4, 1e-4)) << how << ", gradient " << i;
  }
}

/// Other norms, other methods and changed values are not claimed: each function keeps its own.
TEST(Deferred, GeluClaimsNormsByRowAlone) {
  at::manual_seed(7);
  const SavePolicy s = saving_of("satchel"), other = saving_of("satchel,norm_bits=1");
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({16, 8});
  using Kinds = std::vector<std::string>;
  const Kinds apart{"norm", "statistics", "derivative"};
  EXPECT_EQ(kinds_of(gelu(batch_norm(x, w, {}, s), "none", s)), apart);
  EXPECT_EQ(kinds_of(gelu(group_norm(x, 2, w, {}, s), "none", s)), apart);
  EXPECT_EQ(kinds_of(gelu(layer_norm(x, w, {}, s), "none", other)), apart);
  at::Tensor y = layer_norm(x, w, {}, s);
  y.mul_(2);
  const at::Tensor z = gelu(y, "none", s);
  EXPECT_EQ(kinds_of(z), apart);
  EXPECT_TRUE(at::allclose(z, at::gelu(y)));
}

/// A ReLU took over, and y is read once more: two codes of the same values, whose errors have nothing to do with each other.
TEST(Deferred, ANormThatPacksAfterAllDrawsItsOwnNoise) {
  at::manual_seed(7);
  const SavePolicy s = saving_of("satchel,side=none");
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({3, 8, 5, 5}), y = batch_norm(x, w, {}, s), z = relu(y, s);
  saved_tensors(y);  // packs
  const at::Tensor on = (y > 0).to(at::kFloat);
  // Σ on·x̂ of each channel, from one code and from the other.
  const at::Tensor taken = gradients_of(z, on, {w.gamma}, /*retain=*/true)[0], own = gradients_of(y, on, {w.gamma})[0];
  EXPECT_FALSE(at::equal(taken, own));
  const at::Tensor exact = (y - w.beta.view({1, 8, 1, 1})) / w.gamma.view({1, 8, 1, 1}), want = (exact * on).sum(at::IntArrayRef{0, 2, 3});
  // A code of four levels over a range of at most 6 is off by less than 2 each; 75 of them, as independent errors add up, five times over.
  for (const at::Tensor& got : {taken, own}) EXPECT_LE((got - want).abs().max().item<double>(), 5 * 2 * std::sqrt(75.0));
}

/// y is held by its name alone when the next norm comes to wait. Nobody would settle the first one after that: it lets go of its input.
TEST(Deferred, ATakenNormIsLeftWithItsCodesAlone) {
  at::manual_seed(7);
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(8);
  const MemoryMeter meter(at::kCPU);
  at::Tensor h = leaf({4, 8, 16, 16}) * 1;
  const at::Tensor y = batch_norm(h, w, {}, s), z = relu(y, s);
  const auto map = static_cast<int64_t>(h.nbytes());
  h.reset();
  const int64_t before = meter.allocated();
  const at::Tensor next = batch_norm(z, w, {}, s);  // its input is z, its output one more map
  // More by `next`, less by h; codes of 2 bits, their headers and statistics are less than an eighth of what they stand for.
  EXPECT_LE(meter.allocated() - before, map - map + map / 8);
  gradients_of(y + next, at::ones_like(y), {w.gamma});
}

TEST(Deferred, ChangesInPlaceAreNotOverlooked) {
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({3, 8, 5, 5});
  at::Tensor y = batch_norm(x, w, {}, s);
  y.mul_(2);  // other values: ReLU may not rebuild them from the norm
  EXPECT_EQ(kinds_of(relu(y, s)), (std::vector<std::string>{"norm", "statistics", "shared"}));
  const at::Tensor h = x * 1;
  const at::Tensor out = batch_norm(h, w, {}, s);
  h.detach().add_(1);
  EXPECT_EQ(kinds_of(out), std::vector<std::string>{"statistics"}) << "the values are lost";
  EXPECT_THROW(out.sum().backward(), Error);
}

/// Running statistics and a frozen γ: the norm keeps nothing, and the ReLU that claims it still scales by γ.
TEST(Deferred, AClaimedNormInEvaluationScalesByItsFrozenWeight) {
  const SavePolicy s = saving_of("satchel,bits=32");
  const at::Tensor x = leaf({3, 8, 5, 5}), g = at::randn({3, 8, 5, 5}), gamma = at::randn({8});
  const NormWeights w{gamma, leaf({8}), at::randn({8}), at::rand({8}) + 0.5};
  NormOptions evaluation;
  evaluation.training = false;
  const auto got = gradients_of(relu(batch_norm(x, w, evaluation, s), s), g, {x, w.beta});
  const at::Tensor torchs = at::batch_norm(x, gamma, w.beta, w.running_mean, w.running_var, false, 0.1, 1e-5, false);
  const auto want = gradients_of(at::relu(torchs), g, {x, w.beta});
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-5)) << i;
}

/// Blocks of an ELU's code run over pixels: 3 bits and a header of 4 bytes every 256 values, whatever the channels.
TEST(Deferred, AnElusCodeOfAnImageHasBlocksOfItsOwn) {
  for (const char* method : {"actnn", "actnn,adaptive=no", "satchel"}) {
    const SavePolicy s = saving_of(method);
    const at::Tensor y = elu(leaf({4, 3, 16, 16}), 1, s);
    const int64_t values = y.numel(), bytes = saved_tensors(y).front().bytes;
    EXPECT_LE(bytes, values * 3 / 8 + values / 256 * 4 + 64) << method;
  }
}

TEST(Deferred, WhoListensToTheNormHearsIt) {
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({3, 8, 5, 5}), y = batch_norm(x, w, {}, s);
  y.retain_grad();
  relu(y, s).sum().backward();
  ASSERT_TRUE(y.grad().defined());
  // A ReLU passes 1 where it is on; y at exactly 0 does not happen here.
  EXPECT_TRUE(y.grad().equal((y > 0).to(at::kFloat)));
}

/// grad(), a hook or retain_grad() after the ReLU took over: the norm's output has the gradient that torch gives it.
TEST(Deferred, TheNormsOutputHasItsGradientOnceAReluTookOver) {
  for (const char* method : {"satchel", "satchel,bits=32", "satchel,side=none"}) {
    for (const double slope : {0.0, 0.1}) {
      at::manual_seed(4);
      const SavePolicy s = saving_of(method);
      const NormWeights w = weights_of(8);
      const at::Tensor x = leaf({3, 8, 5, 5}), g = at::randn({3, 8, 5, 5});
      const auto activated = [&](const at::Tensor& y) { return slope == 0 ? relu(y, s) : leaky_relu(y, slope, s); };
      const at::Tensor y = batch_norm(x, w, {}, s), z = activated(y);
      const at::Tensor want = at::where(y > 0, g, g * slope).detach();
      EXPECT_TRUE(at::equal(gradients_of(z, g, {y}, /*retain=*/true)[0], want)) << method;
      at::Tensor heard;
      y.register_hook([&](const at::Tensor& gradient) { heard = gradient.clone(); });
      const auto with_hook = gradients_of(z, g, {x, w.gamma, w.beta}, /*retain=*/true);
      EXPECT_TRUE(heard.defined() && at::equal(heard, want)) << method;
      y.retain_grad();
      z.backward(g);
      EXPECT_TRUE(y.grad().defined() && at::equal(y.grad(), want)) << method;
      if (std::string(method) != "satchel,bits=32") continue;
      const at::Tensor torchs = at::batch_norm(x, w.gamma, w.beta, {}, {}, true, 0.1, 1e-5, false);
      const auto exact = gradients_of(slope == 0 ? at::relu(torchs) : at::leaky_relu(torchs, slope), g, {x, w.gamma, w.beta});
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(with_hook[i], exact[i], 1e-4, 1e-4)) << i;  // as below
    }
  }
}

/// Who listens changes nothing: the norm rebuilds its values from the ReLU's save, as the ReLU would.
TEST(Deferred, AHookOnAnOutputThatIsGoneChangesNoGradient) {
  const SavePolicy s = saving_of("satchel");
  std::vector<std::vector<at::Tensor>> runs;
  for (const bool listens : {false, true}) {
    at::manual_seed(4);
    const NormWeights w = weights_of(8);
    const at::Tensor x = leaf({3, 8, 5, 5}), kernel = leaf({4, 8, 3, 3});
    int calls = 0;
    at::Tensor out;
    {
      const at::Tensor y = batch_norm(x, w, {}, s), z = relu(y, s);
      if (listens) y.register_hook([&](const at::Tensor&) { ++calls; });
      out = z * 1;
    }
    out = conv3(out, kernel, s);
    runs.push_back(gradients_of(out, at::ones_like(out), {x, w.gamma, w.beta, kernel}));
    EXPECT_EQ(calls, listens ? 1 : 0);
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
}

/// A ReLU took over, torch reads y as well, and y's name is gone: the norm packs, and its float32 input goes.
TEST(Deferred, ATakenNormThatTorchReadsKeepsNoFloats) {
  const SavePolicy s = saving_of("satchel");
  for (const bool read_by_torch : {false, true}) {
    at::manual_seed(7);
    const NormWeights w = weights_of(8);
    const at::Tensor kernel = leaf({4, 8, 3, 3});
    const MemoryMeter meter(at::kCPU);
    at::Tensor h = leaf({4, 8, 16, 16}) * 1, z, other;
    const auto map = static_cast<int64_t>(h.nbytes());
    {
      const at::Tensor y = batch_norm(h, w, {}, s);
      z = relu(y, s);
      if (read_by_torch) other = y.sum();
    }
    h.reset();
    const at::Tensor out = conv3(z, kernel, s);
    const int64_t now = meter.allocated() - static_cast<int64_t>(out.nbytes() + z.nbytes());
    // The leaf itself, and codes of 2 bits twice, with their headers and statistics: less than a quarter of what they stand for.
    EXPECT_LT(now, map + map / 4) << read_by_torch;
    EXPECT_EQ(total_bytes(saved_tensors(read_by_torch ? out.sum() + other : out)), now - map - (read_by_torch ? 4 : 0)) << read_by_torch;
    (read_by_torch ? out.sum() + other : out.sum()).backward();
  }
}

TEST(Deferred, ANormsWeightsOfTheForwardPassCount) {
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(8);
  const at::Tensor y = batch_norm(leaf({3, 8, 5, 5}), w, {}, s);
  {
    const at::NoGradGuard no_grad;
    w.beta.add_(100);
  }
  EXPECT_TRUE(relu(y, s).equal(at::relu(y)));
}

TEST(Deferred, ALayerNormOfTwoDimensionsIsNoRowOfALinearLayer) {
  at::manual_seed(6);
  const SavePolicy s = saving_of("satchel,bits=32");
  const at::Tensor x = leaf({4, 6, 5}), gamma = leaf({6, 5}), beta = leaf({6, 5}), weight = leaf({3, 5}), g = at::randn({4, 6, 3});
  const auto run = [&](bool ours) {
    const at::Tensor h = ours ? layer_norm(x, {6, 5}, {gamma, beta, {}, {}}, {}, s) : at::layer_norm(x, {6, 5}, gamma, beta);
    const at::Tensor out = ours ? satchel::linear(relu(h, s), weight, {}, s) : at::linear(at::relu(h), weight);
    return gradients_of(out, g, {x, weight});
  };
  const auto got = run(true), want = run(false);
  // float32 sums of 24 terms of order 1, rounded to 2^−24 each, in another order.
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-4)) << i;
}

TEST(Deferred, BackwardOfANormThatStillWaitsIsExact) {
  at::manual_seed(5);
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({3, 8, 5, 5}), g = at::randn({3, 8, 5, 5});
  const auto got = gradients_of(batch_norm(x, w, {}, saving_of("satchel")), g, {x, w.gamma, w.beta});
  const auto want = gradients_of(at::batch_norm(x, w.gamma, w.beta, {}, {}, true, 0.1, 1e-5, false), g, {x, w.gamma, w.beta});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-4)) << i;  // as above
}

}  // namespace
}  // namespace satchel::test
