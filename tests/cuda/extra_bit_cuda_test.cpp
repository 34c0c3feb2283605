// Samples of 3 bits among those of 2 on CUDA: the CPU's bytes and values, gradients of the same decoded values, and a training step.
#include <c10/cuda/CUDAFunctions.h>

#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/shared.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/extra_bit.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1

/// 6 samples of `pixels` rows, three of them in 3 bits.
struct Map {
  int64_t pixels, channels;
  at::Tensor h, gamma, beta, slots, seed = seed_tensor(71, at::kCUDA);
  ColumnMoments moments;
  CodecSpec spec = parse_spec("satchel");
  ChainOptions chain{0, 0};

  Map(int64_t p, int64_t c) : pixels(p), channels(c) {
    h = (normal({6 * p, c}, 1) * 1.5 + 0.2).cuda();
    gamma = normal({c}, 2).cuda();
    beta = (normal({c}, 3) * 0.5).cuda();
    gamma[c / 2] = 0;
    moments = {(normal({c}, 4) * 0.2).cuda(), (normal({c}, 5).abs() + 0.5).cuda()};
    slots = at::tensor({2, -1, 0, -1, 1, -1}, at::TensorOptions(at::kInt)).cuda();
  }
  at::Tensor values() const { return at::sub(h, moments.mean).mul_(moments.rstd); }
  ExtraBit plane() const { return extra_bit_plane(slots, 3, pixels * channels); }
};

ExtraBit on_cpu(const ExtraBit& extra) { return {extra.slots.cpu(), extra.plane.cpu()}; }

TEST_F(Cuda, ThirdBitsAreTheCpus) {
  for (const auto& [pixels, channels] : {std::pair<int64_t, int64_t>{64, 8}, {256, 7}, {196, 256}, {49, 512}}) {
    SCOPED_TRACE(channels);
    const Map m(pixels, channels);
    const ExtraBit extra = m.plane(), expected = extra_bit_plane(m.slots.cpu(), 3, pixels * channels);
    ASSERT_TRUE(fuses_norm_act(m.h, m.spec));
    const NormResult r = norm_act_encode({m.h, m.moments, m.gamma, m.beta}, {m.spec, m.seed}, m.chain, extra);
    const Packed cpu = pack_extra_bit(m.values().cpu(), m.spec, seed_tensor(71, at::kCPU), m.gamma.cpu(), m.beta.cpu(), expected);
    const Layout at = check_packed(cpu, "test").at;  // the off means between are sums, in another order
    EXPECT_TRUE(same(r.save.code.bytes.slice(0, 0, at.channels).cpu(), cpu.bytes.slice(0, 0, at.channels))) << "codes and headers";
    EXPECT_TRUE(same(r.save.code.bytes.slice(0, at.plane).cpu(), cpu.bytes.slice(0, at.plane))) << "off plane";
    EXPECT_TRUE(same(extra.plane.cpu(), expected.plane));
    EXPECT_TRUE(same(r.z, apply_chain(m.values(), m.gamma, m.beta, {}, {}, m.chain)));

    // What backward reads, against the CPU's decoding of the very same bytes: off means are sums, in another order.
    const Packed host = moved(r.save.code, at::kCPU);
    const at::Tensor x = extra_bit_rows(host, on_cpu(extra), 0, 6 * pixels, at::kFloat), on = extra_bit_on(host, on_cpu(extra));
    const at::Tensor input = apply_chain(x, m.gamma.cpu(), m.beta.cpu(), on, {}, m.chain);
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 6 * pixels}, {8, 3 * pixels}}) {
      EXPECT_TRUE(
          same(norm_act_input(r.save.code, {}, m.chain, first, last, at::kFloat, extra).cpu(), input.narrow(0, first, last - first)));
    }
    const at::Tensor g = normal(m.h.sizes(), 6).cuda();
    const at::Tensor gz = chain_gradient(g.cpu(), on, {}, m.chain).to(at::kDouble), gx = gz * x;
    const NormActSums sums = norm_sums(g, r.save);
    // A thread meets a channel's values one a step, at most 8 steps here, then 8 warps, then one rounding.
    const double rounding = (8 + 8 + 1) * kUnit;
    EXPECT_TRUE(((sums.beta.cpu() - gz.sum(0)).abs() <= gz.abs().sum(0) * rounding).all().item<bool>());
    EXPECT_TRUE(((sums.gamma.cpu() - gx.sum(0)).abs() <= gx.abs().sum(0) * rounding).all().item<bool>());
    const at::Tensor dx = g.clone(), scale = (m.gamma * m.moments.rstd).cpu().to(at::kDouble);
    const double rows = static_cast<double>(6 * pixels);
    norm_back_(dx, dx, r.save, {}, sums);
    const at::Tensor want = (gz - gz.sum(0) / rows - x * gx.sum(0) / rows) * scale;
    // The sums', and 7 operations more.
    const at::Tensor bound = (gz.abs() + (gz.abs().sum(0) + x.abs() * gx.abs().sum(0)) / rows) * scale.abs() * (rounding + 7 * kUnit);
    EXPECT_TRUE(((dx.cpu() - want).abs() <= bound).all().item<bool>());
  }
}

TEST_F(Cuda, ThirdBitsOfASumAreTheCpus) {
  const CodecSpec norm = parse_spec("bits=2"), sum = parse_spec("satchel,side=relu");
  for (const at::ScalarType type : kTypes) {
    for (const auto& [pixels, channels] : {std::pair<int64_t, int64_t>{64, 8}, {196, 256}}) {
      const Map m(pixels, channels);
      const ExtraBit extra = m.plane(), expected = extra_bit_plane(m.slots.cpu(), 3, pixels * channels);
      const at::Tensor x = m.h.to(type), skip = normal(m.h.sizes(), 7).cuda().to(type), other = seed_tensor(72, at::kCUDA);
      ASSERT_TRUE(fuses_norm_add(x, norm, sum));
      const NormResult r = norm_add_encode({x, m.moments, m.gamma, m.beta, skip}, {norm, m.seed}, {sum, other}, extra);
      const Packed cpu = pack_extra_bit(r.z.cpu(), sum, seed_tensor(72, at::kCPU), {}, {}, expected);
      EXPECT_TRUE(same(r.save.sum.bytes.cpu(), cpu.bytes));
      EXPECT_TRUE(same(extra.plane.cpu(), expected.plane));
      const at::Tensor decoded = extra_bit_rows(cpu, expected, 0, 6 * pixels, type);
      EXPECT_TRUE(same(extra_bit_rows(r.save.sum, extra, 0, 6 * pixels, type).cpu(), decoded));
      EXPECT_TRUE(same(extra_bit_rows(r.save.sum, extra, 3, 2 * pixels, type).cpu(), decoded.narrow(0, 3, 2 * pixels - 3)));
      // The gradient passes where the sum is on.
      const at::Tensor g = at::ones_like(x), dx = at::empty_like(g);
      norm_back_(g, dx, r.save, m.gamma, norm_sums(g, r.save));
      EXPECT_TRUE(same(g.to(at::kBool).cpu(), unpack_mask({extra_bit_on(cpu, expected), {6 * pixels, channels}})));
    }
  }
}

TEST_F(Cuda, ThirdBitsOfASumThatIsDroppedAreTheCpus) {
  const Map m(64, 8);
  const ExtraBit extra = m.plane();
  const at::Tensor skip = normal(m.h.sizes(), 7).cuda(), other = seed_tensor(72, at::kCUDA);
  const NormResult r = norm_add_encode({m.h, m.moments, m.gamma, m.beta, skip}, {parse_spec("bits=2"), m.seed},
                                       {parse_spec("satchel,side=relu"), other}, extra);
  const auto input = [](const Packed& code, const ExtraBit& plane) {
    SharedSave save;
    save.code = code;
    save.seed = seed_tensor(73, code.bytes.device());
    save.chain = {0.3, 0};
    save.bits.extra = plane;
    return SharedRows(save).input(8, 3 * 64, at::kFloat).cpu();
  };
  EXPECT_TRUE(same(input(r.save.sum, extra), input(moved(r.save.sum, at::kCPU), on_cpu(extra))));
}

/// Anything in this thread that waits for the device is an error while it lives.
struct NoWaiting {
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

/// Norm, ReLU and a 1×1 convolution over some steps: bits taken by the norm's map at each.
std::vector<int64_t> run(at::Device device, bool watches) {
  const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{64, 4});
  const SavePolicy saving{parse_method("satchel,mean=2.5"), "map", shares};
  std::vector<int64_t> numbers(16), bytes;
  std::iota(numbers.begin(), numbers.end(), 7);
  const at::Tensor x = normal({16, 32, 8, 8}, 1).to(device).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const at::Tensor w = normal({8, 32, 1, 1}, 2).to(device).requires_grad_(), scale = at::arange(1, 17, w.options()).view({16, 1, 1, 1});
  const NormWeights norm{at::ones({32}, w.options()).requires_grad_(), at::zeros({32}, w.options()).requires_grad_(), {}, {}};
  for (int turn = 0; turn < 12; ++turn) {
    std::optional<NoWaiting> watch;
    if (watches && turn > 5) watch.emplace();  // pinned memory and workspaces stand by then
    at::manual_seed(3);
    shares->set_samples(numbers);
    const at::Tensor y = conv(norm_act(x, norm, {}, saving), w, {}, {}, saving);
    bytes.push_back(total_bytes(saved_tensors(y)));
    y.mul(scale).sum().backward();  // later samples count more
    shares->step();
  }
  return bytes;
}

TEST_F(Cuda, SharedMapsWaitForNothingAndAreTheCpus) {
  const std::vector<int64_t> device = run(at::kCUDA, true), host = run(at::kCPU, false);
  EXPECT_EQ(device, host);
  // One map takes all of the mean: half of its 16 samples, 256 bytes of third bits each, and their 64 bytes of places.
  EXPECT_GE(device.back(), 16 * 2048 / 4 + 8 * 256 + 64);
}

}  // namespace
}  // namespace satchel
