// Bits per sample on CUDA: the CPU's bytes, nothing waits for the device, and bytes that wait on the host come back as they were.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <string>

#include "cuda_fixture.h"
#include "satchel/autograd/host_offload.h"
#include "satchel/autograd/saved.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/tensor/per_sample.h"
#include "tests/keep_support.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

const CodecSpec kActnn = parse_spec("actnn");

/// Every wait for the device that torch makes throws while this lives.
class NoWaiting {
 public:
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

/// Samples of different scales; some of zeros, some alike.
at::Tensor scaled(at::IntArrayRef shape, uint64_t seed, at::ScalarType type) {
  std::vector<int64_t> one(shape.size(), 1);
  one[0] = shape[0];
  const at::Tensor scale = normal(one, seed + 1).exp();
  if (shape[0] > 4) {
    scale.narrow(0, 1, 1).zero_();
    scale.narrow(0, 2, 2).fill_(1);
  }
  return (normal(shape, seed) * scale).to(type);
}

void expect_same(const at::Tensor& x, const CodecSpec& spec, double mean, const at::Tensor& weights = {}) {
  const at::Tensor on_device = weights.defined() ? weights.cuda() : weights;
  at::Tensor cpu_squares, cuda_squares;
  const Packed cpu = pack_per_sample(x, spec, seed_tensor(9, at::kCPU), mean, weights, &cpu_squares);
  const Packed cuda = pack_per_sample(x.cuda(), spec, seed_tensor(9, at::kCUDA), mean, on_device, &cuda_squares);
  EXPECT_TRUE(same(cuda_squares.cpu(), cpu_squares));
  EXPECT_TRUE(same(bits_of(cuda).cpu(), bits_of(cpu)));
  EXPECT_TRUE(same(cuda.bytes.cpu(), cpu.bytes)) << (cuda.bytes.cpu() != cpu.bytes).sum().item<int64_t>() << " bytes differ";
  EXPECT_EQ(cuda.strides, cpu.strides);
  const at::Tensor y = unpack_per_sample(cpu);
  EXPECT_TRUE(same(unpack_per_sample(cuda).cpu(), y));
  const int64_t n = x.size(0), first = n / 3, last = n - n / 4;
  EXPECT_TRUE(same(unpack_per_sample(cuda, first, last).cpu(), y.narrow(0, first, last - first)));
}

TEST_F(Cuda, MixedBytesAreTheCpus) {
  for (const at::ScalarType type : kTypes) {
    for (const int64_t values : {1, 3, 7, 8, 12, 64, 100, 255, 256, 257, 264, 1000, 2048, 30000}) {
      for (const int64_t n : {1, 2, 5, 33, 256}) {
        for (const double mean : {1.0, 2.0, 2.7, 8.0}) {
          if (!mine()) continue;
          SCOPED_TRACE(std::to_string(n) + " x " + std::to_string(values) + " mean " + std::to_string(mean) + " " + c10::toString(type));
          expect_same(scaled({n, values}, static_cast<uint64_t>(values + n), type), kActnn, mean);
        }
      }
    }
  }
}

TEST_F(Cuda, MixedBytesForEveryOption) {
  const at::Tensor x = scaled({37, 6, 10, 10}, 1, at::kFloat);
  for (const char* text :
       {"actnn", "actnn,block=64", "actnn,block=1024", "actnn,block=96,header=f32", "actnn,round=nearest", "actnn,block=512"}) {
    SCOPED_TRACE(text);
    expect_same(x, parse_spec(text), 2.4);
    expect_same(x.contiguous(at::MemoryFormat::ChannelsLast), parse_spec(text), 2.4, normal({37}, 2).exp());
  }
  // More samples than the allocation has threads, all alike, and senseless weights.
  expect_same(normal({1, 40}, 3).expand({3000, 40}).contiguous(), kActnn, 2.5);
  expect_same(scaled({3000, 40}, 4, at::kFloat), kActnn, 3.1, normal({3000}, 5));
  at::Tensor bad = normal({16, 600}, 6);
  bad[3][300] = NAN;
  bad[7][0] = INFINITY;
  expect_same(bad, kActnn, 2);
  expect_same(normal({16, 600}, 7) * 1e37, kActnn, 2);
  expect_same(normal({16, 600}, 8) * 1e-40, kActnn, 2);
  // Rows that do not start at a multiple of 16 bytes.
  expect_same(normal({9, 301}, 9).narrow(1, 1, 300), kActnn, 2);
}

TEST_F(Cuda, MixedBitsWaitForNothing) {
  const at::Tensor x = scaled({64, 16, 20, 20}, 1, at::kFloat).cuda(), g = normal({64, 8}, 2).cuda();
  const auto entries = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{1000, 4});
  SavePolicy saving;
  saving.method = parse_method("actnn");
  saving.allocator = entries;
  saving.name = "a";
  std::vector<int64_t> numbers(64);
  for (int64_t i = 0; i < 64; ++i) numbers[static_cast<size_t>(i)] = 3 * i;
  // The last turn alone is watched: pinned memory and workspaces stand by then.
  for (int turn = 0; turn < 12; ++turn) {
    std::optional<NoWaiting> watch;
    if (turn > 5) watch.emplace();
    entries->set_samples(numbers);
    const Saved save(x, saving), norm(x, saving, test::norm_keep(saving.method, x.size(1)));
    save.samples(3, 40);
    norm.restore();
    save.gradient_seen(g);
    entries->step();
    EXPECT_LE(entries->mean_bits(), 2);
  }
}

TEST_F(Cuda, SharesOutAsTheCpuDoes) {
  std::vector<std::vector<double>> means;
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kCUDA)}) {
    const auto entries = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{0, 3});
    SavePolicy saving;
    saving.method = parse_method("actnn");
    saving.allocator = entries;
    for (int step = 0; step < 4; ++step) {
      for (uint64_t l = 0; l < 5; ++l) {
        saving.name = std::to_string(l);
        const Saved save(scaled({32, 256 * (1 + static_cast<int64_t>(l))}, l, at::kFloat).to(device), saving);
        save.gradient_seen((normal({32, 7}, 10 + l) * std::exp2(l)).to(device));
      }
      entries->step();
    }
    means.emplace_back();
    for (const LayerBits& l : entries->layers()) means.back().push_back(l.mean_bits);
  }
  EXPECT_EQ(means[0], means[1]);
}

TEST_F(Cuda, SwappedBytesComeBack) {
  constexpr int kSaves = 12;
  const int64_t size = 8 << 20;
  std::vector<at::Tensor> expected;
  for (int i = 0; i < kSaves; ++i) expected.push_back(at::randint(256, {size}, at::kByte));
  for (int round = 0; round < 3; ++round) {
    std::vector<HostOffload> saves;
    for (const at::Tensor& e : expected) {
      saves.emplace_back(e.cuda().add(1));
      // What the current stream does with freed memory must not reach what is still being copied.
      for (int k = 0; k < 3; ++k) at::full({size}, 255, at::TensorOptions(at::kByte).device(at::kCUDA));
    }
    int64_t on_device = 0;
    for (const HostOffload& s : saves) on_device += s.on_device();
    EXPECT_EQ(on_device, HostOffload::kInFlight * size);
    for (int i = kSaves; i-- > 0;) {
      const at::Tensor back = saves[static_cast<size_t>(i)].bytes().sub(1);
      if (i > HostOffload::kInFlight) {  // those before it are on their way
        EXPECT_GT(saves[static_cast<size_t>(i - HostOffload::kInFlight)].on_device(), 0);
      }
      saves.pop_back();
      for (int k = 0; k < 3; ++k) at::full({size}, 254, at::TensorOptions(at::kByte).device(at::kCUDA));
      EXPECT_TRUE(back.cpu().equal(expected[static_cast<size_t>(i)])) << i;
    }
  }
  // Saves that nobody reads go without harm, fetched or not.
  std::vector<HostOffload> unread;
  for (int i = 0; i < 6; ++i) unread.emplace_back(at::full({size}, i, at::TensorOptions(at::kByte).device(at::kCUDA)));
  unread[1].fetch();
  unread.clear();
  const at::Tensor after = at::full({size}, 7, at::TensorOptions(at::kByte).device(at::kCUDA));
  EXPECT_TRUE(after.eq(7).all().item<bool>());
  // From another stream than the one that saved them.
  const HostOffload other(expected[0].cuda());
  for (int i = 0; i < 3; ++i) unread.emplace_back(expected[1].cuda());
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  EXPECT_TRUE(other.bytes().cpu().equal(expected[0]));
}

TEST_F(Cuda, SwappingFreesTheDevice) {
  using c10::cuda::CUDACachingAllocator::getDeviceStats;
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // torch's allocator answers only once CUDA has been started
  const int64_t size = 32 << 20, saves = 16;
  const auto peak_of = [&](bool swap) {
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const int64_t before = getDeviceStats(0).allocated_bytes[0].current;
    std::vector<HostOffload> offloaded;
    std::vector<at::Tensor> kept;
    for (int64_t i = 0; i < saves; ++i) {
      at::Tensor bytes = at::full({size}, i, at::TensorOptions(at::kByte).device(at::kCUDA));
      if (swap) {
        offloaded.emplace_back(std::move(bytes));
      } else {
        kept.push_back(std::move(bytes));
      }
    }
    while (!offloaded.empty()) {
      EXPECT_EQ(offloaded.back().bytes()[0].item<int64_t>(), static_cast<int64_t>(offloaded.size()) - 1);
      offloaded.pop_back();
    }
    return getDeviceStats(0).allocated_bytes[0].peak - before;
  };
  EXPECT_GE(peak_of(false), saves * size);
  // Those in flight, the one being made or read, and the allocator's rounding of each.
  EXPECT_LE(peak_of(true), (HostOffload::kInFlight + 2) * size);
}

TEST_F(Cuda, SavedsSwap) {
  SavePolicy saving;
  saving.method = parse_method("actnn");
  saving.name = "a";
  std::vector<at::Tensor> x, expected;
  std::vector<Saved> saves;
  for (uint64_t i = 0; i < 6; ++i) x.push_back(scaled({32, 64, 16, 16}, i, at::kFloat).cuda().contiguous(at::MemoryFormat::ChannelsLast));
  for (const bool swap : {false, true}) {
    at::manual_seed(5);
    saving.method.swap = swap;
    saves.clear();
    for (const at::Tensor& t : x) saves.emplace_back(t, saving);
    for (size_t i = x.size(); i-- > 0;) {
      const at::Tensor y = saves[i].restore();
      EXPECT_EQ(y.strides(), x[i].strides());
      if (swap) {
        EXPECT_TRUE(same(y, expected[x.size() - 1 - i]));
        EXPECT_TRUE(same(saves[i].samples(5, 9), y.narrow(0, 5, 4)));
      } else {
        expected.push_back(y);
      }
      saves[i].release();
    }
  }
}

}  // namespace
}  // namespace satchel
