// What torch's users rely on: saves stay on the stream that made them, autocast's types are torch's, and a loss is read without waiting for
// what comes after it.
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <string>
#include <vector>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/resample.h"
#include "satchel/train/async_scalar.h"
#include "satchel/train/expandable_segments.h"
#include "tests/autograd/gradient.h"
#include "tests/cuda/cuda_fixture.h"

namespace satchel::test {
namespace {

using Kinds = std::vector<std::string>;

Kinds kinds_of(const at::Tensor& out) {
  Kinds kinds;
  for (const SavedTensor& line : saved_tensors(out)) kinds.push_back(line.kind);
  return kinds;
}

SavePolicy saving_of(const char* method) { return {parse_method(method), "layer"}; }

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).cuda().requires_grad_(); }

/// `run` on a stream of its own that waits for what stands, as torch asks of its users; this one waits for it in turn.
at::Tensor on_other_stream(const std::function<at::Tensor()>& run) {
  const c10::cuda::CUDAStream here = c10::cuda::getCurrentCUDAStream(), there = c10::cuda::getStreamFromPool();
  here.synchronize();
  at::Tensor out;
  {
    const c10::cuda::CUDAStreamGuard guard(there);
    out = run();
  }
  there.synchronize();
  return out;
}

TEST_F(Cuda, InputsArePackedOnceAStream) {
  at::manual_seed(1);
  const SavePolicy s = saving_of("actnn");
  const at::Tensor x = leaf({4, 8, 16, 16}), a = leaf({8, 8, 3, 3}), b = leaf({8, 8, 3, 3});
  const auto conv3 = [&](const at::Tensor& w) { return conv(x, w, {}, {{1}, {1}}, s); };
  const at::Tensor first = conv3(a), second = conv3(b);
  const size_t lines = kinds_of(first).size();
  EXPECT_GE(lines, 1U);
  EXPECT_EQ(kinds_of(first + second).size(), lines) << "one save for both";
  const at::Tensor extra = on_other_stream([&] { return conv3(b); });
  EXPECT_EQ(kinds_of(extra).size(), lines) << "its own";
  // The same values, coded twice: both give the weight's gradient.
  const auto got = gradients_of(first + extra, at::ones_like(first), {a, b});
  EXPECT_TRUE(got[0].isfinite().all().item<bool>() && got[1].isfinite().all().item<bool>());
}

TEST_F(Cuda, SavesAreSharedWithinAStream) {
  at::manual_seed(1);
  const SavePolicy s = saving_of("satchel");
  const NormWeights w{leaf({8}), leaf({8}), {}, {}};
  const at::Tensor x = leaf({4, 8, 16, 16}), kernel = leaf({8, 8, 3, 3});
  const auto conv3 = [&](const at::Tensor& z) { return conv(z, kernel, {}, {{1}, {1}}, s); };
  const auto chain = [&] {
    return conv3(relu(batch_norm(x, w, {}, s), s));
  };  // the norm's output goes, and nobody can ask for its gradient
  EXPECT_EQ(kinds_of(chain()), (Kinds{"shared", "statistics"}));
  const at::Tensor z = relu(batch_norm(x, w, {}, s), s);
  EXPECT_EQ(kinds_of(on_other_stream([&] { return conv3(z); })), (Kinds{"shared", "statistics", "input"}));
  const at::Tensor pooled = max_pool(z, {{2}}, s);
  EXPECT_EQ(kinds_of(on_other_stream([&] { return conv3(pooled); })), (Kinds{"shared", "statistics", "offsets", "input"}));
  // A ReLU elsewhere does not take over what the norm works on: the norm packs, on its own stream.
  const at::Tensor y = batch_norm(x, w, {}, s);
  const at::Tensor elsewhere = on_other_stream([&] { return relu(y, s); });
  EXPECT_EQ(kinds_of(elsewhere), (Kinds{"norm", "statistics", "shared"}));
  EXPECT_TRUE(gradients_of(elsewhere, at::ones_like(elsewhere), {x})[0].isfinite().all().item<bool>());
}

/// Autocast to bfloat16 on CUDA while it lives.
struct Autocasting {
  Autocasting() {
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
  }
  Autocasting(const Autocasting&) = delete;
  Autocasting& operator=(const Autocasting&) = delete;
  ~Autocasting() { at::autocast::set_autocast_enabled(at::kCUDA, false); }
};

TEST_F(Cuda, AutocastGivesTorchsTypes) {
  at::manual_seed(2);
  const at::Tensor x = at::randn({3, 8, 6, 8}).cuda().to(at::kBFloat16).requires_grad_(), gamma = leaf({8}), beta = leaf({8});
  const Autocasting on;
  for (const char* method : {"satchel", "satchel,bits=32", "actnn", "fp32"}) {
    const SavePolicy s = saving_of(method);
    struct Pair {
      at::Tensor ours, torchs;
    };
    const Pair pairs[] = {
        {layer_norm(x, {8}, {gamma, beta, {}, {}}, {}, s), at::layer_norm(x, {8}, gamma, beta)},
        {group_norm(x, 2, {gamma, beta, {}, {}}, {}, s), at::group_norm(x, 2, gamma, beta)},
        {batch_norm(x, {gamma, beta, {}, {}}, {}, s), at::batch_norm(x, gamma, beta, {}, {}, true, 0.1, 1e-5, true)},
        {upsample(x, {{12, 16}, {}}, s), at::upsample_nearest2d(x, {12, 16})},
        {upsample(x, {{3, 4}, {}, Resample::area}, s), at::adaptive_avg_pool2d(x, {3, 4})},
    };
    for (size_t i = 0; i < std::size(pairs); ++i) {
      const auto& [ours, torchs] = pairs[i];
      EXPECT_EQ(ours.scalar_type(), torchs.scalar_type()) << method << i;
      // bfloat16 is off by 2^−9 of a value on either side, and a value before the last rounding by as much; float32 by far less.
      const at::Tensor want = torchs.to(at::kFloat);
      EXPECT_LE((ours.to(at::kFloat) - want).abs().max().item<double>(), 0x1p-7 * want.abs().max().item<double>()) << method << i;
      EXPECT_EQ(gradients_of(ours, at::ones_like(ours), {x})[0].scalar_type(), at::kBFloat16) << method << i;
    }
  }
}

TEST_F(Cuda, LateNumberWaitsForItselfAlone) {
  at::Tensor slow = at::ones({4096, 4096}, at::kCUDA);
  slow = slow.mm(slow) * 1e-4;
  const AsyncScalar number(slow.narrow(0, 0, 1).narrow(1, 0, 1).sum());
  for (int i = 0; i < 200; ++i) slow = slow.mm(slow) * 1e-4;  // 27 TFLOP: more than a tenth of a second
  EXPECT_NEAR(number.read(), 0.4096, 1e-6);
  EXPECT_FALSE(c10::cuda::getCurrentCUDAStream().query()) << "the device is still at work";
  c10::cuda::device_synchronize();
}

TEST_F(Cuda, GrowingSegmentsServeAndGo) {
  const c10::Device device(c10::kCUDA, 0);
  const at::Tensor before = at::ones({1 << 20}, device);
  {
    const ExpandableSegments segments(device);
    const auto expandable = [] {
      for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
        if (segment.is_expandable) return true;
      }
      return false;
    };
    const at::Tensor large = at::ones({int64_t{64} << 20}, device);
    EXPECT_TRUE(expandable());
    EXPECT_EQ((before.sum() + large.narrow(0, 0, 10).sum()).item<double>(), (1 << 20) + 10);
  }
  EXPECT_EQ(at::ones({int64_t{64} << 20}, device).narrow(0, 0, 10).sum().item<double>(), 10);
}

}  // namespace
}  // namespace satchel::test
