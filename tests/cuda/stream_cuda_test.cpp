// Streams, devices and captured graphs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_fixture.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/project.h"
#include "satchel/train/captured.h"
#include "satchel/train/memory.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// x is written late on a stream of its own: a kernel on any other stream would read zeros.
TEST_F(Cuda, TheCurrentStreamIsUsed) {
  const at::Tensor source = normal({512, 512}, 1), ready = source.cuda();
  for (const char* text : {"bits=2", "exact", "division", "side=one", "bits=32"}) {
    if (!mine()) continue;
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const at::Tensor expected = pack(ready, spec, 2).bytes.cpu();
    at::Tensor x = at::zeros_like(ready), slow = at::ones({2048, 2048}, ready.options());
    c10::cuda::device_synchronize();
    at::Tensor bytes, back;
    {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
      for (int i = 0; i < 20; ++i) slow = slow.mm(slow) * 1e-4;
      x.copy_(ready);
      const Packed packed = pack(x, spec, 2);
      back = unpack(packed);
      bytes = packed.bytes;
      c10::cuda::getCurrentCUDAStream().synchronize();
    }
    EXPECT_TRUE(same(bytes.cpu(), expected));
    EXPECT_TRUE(back.isfinite().all().item<bool>());
  }
}

TEST_F(Cuda, TheTensorsDeviceIsUsed) {
  if (c10::cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  const at::Tensor x = normal({100, 64}, 3);
  for (const char* text : {"bits=2", "exact", "division"}) {
    const Packed packed = pack(x.to(at::Device(at::kCUDA, 1)), parse_spec(text), 4);
    EXPECT_EQ(packed.bytes.device().index(), 1);
    EXPECT_EQ(c10::cuda::current_device(), 0);
    EXPECT_TRUE(same(packed.bytes.cpu(), pack(x.cuda(), parse_spec(text), 4).bytes.cpu()));
  }
}

/// The other device is the current one. About 0.1 s of work is under way where the capture will be.
TEST_F(Cuda, ACaptureWaitsForItsOwnDevice) {
  if (c10::cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  const at::Device device(at::kCUDA, 1);
  const at::Tensor slow = at::ones({4096, 4096}, device), x = at::zeros({8}, device);
  at::Tensor to = at::empty_like(slow);
  const auto step = [&] { x.add_(1); };
  CapturedWork work(device);
  work.warm_up(step);
  at::mm_out(to, slow, slow);  // with its workspace, so that nothing is released below, which would wait too
  release_cached_memory(device);
  for (int i = 0; i < 50; ++i) at::mm_out(to, slow, slow);
  at::cuda::CUDAEvent done;
  done.record(c10::cuda::getCurrentCUDAStream(device.index()));
  work.capture(step);
  EXPECT_TRUE(done.query());
  EXPECT_EQ(c10::cuda::current_device(), 0);
  work.replay();
  EXPECT_EQ(x[0].item<float>(), 2);
}

/// A captured pack() reads its seed from device memory: every replay draws anew, and draws what the CPU draws for that seed.
TEST_F(Cuda, ReplaysOfAGraphDrawFreshNoise) {
  const at::Tensor h = normal({256, 128}, 5), x = h.cuda(), g = normal({256, 8}, 6).cuda();
  for (const char* text : {"bits=2", "side=relu", "division", "exact", "blockwise,rows=64"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const bool projected = std::holds_alternative<RandomProjection>(spec.transform);
    const at::Tensor seed = seed_tensor(7, at::kCUDA);
    at::Tensor bytes, back, product;
    at::cuda::CUDAGraph graph;
    {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
      const auto step = [&] {
        const Packed packed = pack(x, spec, seed);
        bytes = packed.bytes;
        back = unpack(packed);
        product = transposed_product(packed, g);
        advance_seed(seed);
      };
      step();  // libraries initialise outside of the capture
      c10::cuda::getCurrentCUDAStream().synchronize();
      graph.capture_begin();
      step();
      graph.capture_end();
    }
    std::vector<at::Tensor> draws;
    const at::Tensor here = seed.cpu();  // the CPU's seeds follow the same rule
    for (int replay = 0; replay < 3; ++replay) {
      const auto before = static_cast<uint64_t>(seed.item<int64_t>());
      graph.replay();
      c10::cuda::device_synchronize();
      advance_seed(here);
      EXPECT_EQ(seed.item<int64_t>(), here.item<int64_t>());
      EXPECT_NE(static_cast<uint64_t>(seed.item<int64_t>()), before);
      draws.push_back(back.clone());
      const Packed again = pack(x, spec, before);
      EXPECT_TRUE(same(bytes.cpu(), again.bytes.cpu()));
      EXPECT_TRUE(same(back, unpack(again)));
      EXPECT_TRUE(at::allclose(product, transposed_product(again, g), 1e-4, 1e-3));
      if (!projected) {
        EXPECT_TRUE(same(bytes.cpu(), pack(h, spec, before).bytes));
      }
    }
    EXPECT_FALSE(same(draws[0], draws[1]));
    EXPECT_FALSE(same(draws[1], draws[2]));
  }
}

TEST_F(Cuda, OpsReachTheKernels) {
  const at::Tensor x = normal({64, 64}, 8).cuda(), seed = seed_tensor(9, at::kCUDA);
  const SpecNumbers n = numbers_of(CodecSpec{});
  std::vector<c10::IValue> stack{x,        seed,   n.bits,      n.block, n.per_sample, n.levels, n.rounding,
                                 n.header, n.side, n.transform, n.p0,    n.p1,         n.p2};
  c10::Dispatcher::singleton().findSchemaOrThrow("satchel::pack", "").callBoxed(&stack);
  EXPECT_TRUE(same(stack.at(0).toTensor().cpu(), pack(x.cpu(), CodecSpec{}, 9).bytes));
}

}  // namespace
}  // namespace satchel
