#include "satchel/train/memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/train/memory_parts.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

at::Tensor of_bytes(int64_t bytes) { return at::empty({bytes}, at::kByte); }

TEST(Memory, CountsAllocationsReleasesAndThePeak) {
  MemoryMeter meter(at::kCPU);
  EXPECT_EQ(meter.allocated(), 0);
  EXPECT_EQ(meter.peak(), 0);
  at::Tensor a = of_bytes(1000), b = of_bytes(300);
  EXPECT_EQ(meter.allocated(), 1300);
  EXPECT_EQ(meter.requested(), 1300) << "the CPU's allocator gives what is asked for";
  a.reset();
  EXPECT_EQ(meter.allocated(), 300);
  EXPECT_EQ(meter.peak(), 1300);
  meter.reset_peak();
  EXPECT_EQ(meter.peak(), 300);
  a = of_bytes(500);
  const at::Tensor view = a.slice(0, 0, 10);  // no memory of its own
  a.reset();
  EXPECT_EQ(meter.allocated(), 800);
  EXPECT_EQ(meter.peak(), 800);
}

TEST(Memory, BackwardIsSeen) {
  MemoryMeter meter(at::kCPU);
  const at::Tensor x = at::ones({64, 32}), w = at::ones({32, 16}).set_requires_grad(true);
  const int64_t before = meter.allocated();
  EXPECT_EQ(before, 4 * (64 * 32 + 32 * 16));
  at::Tensor y = at::matmul(x, w);
  EXPECT_EQ(meter.allocated() - before, 4 * 64 * 16);
  at::Tensor loss = y.mul(y).sum();
  y.reset();
  loss.backward();
  loss.reset();
  // Only w's gradient is left, as large as w.
  EXPECT_EQ(meter.allocated() - before, 4 * 32 * 16);
  // y, y·y and 2·y·grad at least stood together.
  EXPECT_GE(meter.peak() - before, 2 * 4 * 64 * 16);
}

TEST(Memory, EarlierTensorsCountAsNegativeWhereWatched) {
  // c: so large, though never written, that no block which an earlier test's meter saw can have started at its address.
  at::Tensor a = of_bytes(5000), b = of_bytes(700), c = of_bytes(int64_t{1} << 30);
  std::vector<char> outside(100);
  at::Tensor blob = at::from_blob(outside.data(), {100}, at::kByte);
  MemoryMeter meter(at::kCPU);
  meter.watch(a);
  meter.watch(a.slice(0, 10, 20));  // the same memory
  meter.watch(b);
  meter.watch(blob);
  meter.watch({});
  EXPECT_EQ(meter.allocated(), 0);
  EXPECT_EQ(meter.peak(), 0);
  a.reset();
  EXPECT_EQ(meter.allocated(), -5000);
  c.reset();  // not watched: torch does not know its size
  blob.reset();
  EXPECT_EQ(meter.allocated(), -5000);
  at::Tensor d = of_bytes(200);
  EXPECT_EQ(meter.allocated(), -4800);
  meter.watch(d);  // counts anyway
  d.reset();
  b.reset();
  EXPECT_EQ(meter.allocated(), -5700);
  EXPECT_EQ(meter.peak(), 0);
  meter.reset_peak();
  EXPECT_EQ(meter.peak(), -5700);
}

TEST(Memory, TensorsOfAnEarlierMeterCountAsNegative) {
  at::Tensor a;
  {
    const MemoryMeter first(at::kCPU);
    a = of_bytes(4321);
  }
  const MemoryMeter second(at::kCPU);
  a.reset();
  EXPECT_EQ(second.allocated(), -4321);
}

TEST(Memory, StaleSizesDoNotCount) {
  // A block seen by a meter and given back unseen leaves its size behind; the next tensor at that address is far larger or smaller.
  constexpr int64_t kLarge = 100000, kSmall = 64;
  for (int run = 0; run < 50; ++run) {
    at::Tensor a;
    {
      const MemoryMeter first(at::kCPU);
      a = of_bytes(kLarge);
    }
    a.reset();
    std::vector<at::Tensor> later;
    for (int i = 0; i < 20; ++i) later.push_back(of_bytes(kSmall));
    const MemoryMeter second(at::kCPU);
    later.clear();
    // 20 tensors of 64 bytes: no more than that can have been given back.
    EXPECT_GE(second.allocated(), -20 * kSmall);
    EXPECT_LE(second.allocated(), 0);
  }
}

TEST(Memory, OneMeterAtATime) {
  auto meter = std::make_unique<MemoryMeter>(at::kCPU);
  EXPECT_EQ(error_of([] { const MemoryMeter second(at::kCPU); }), "[memory] a thread must have one meter at a time, got a second");
  at::Tensor a = of_bytes(10);
  EXPECT_EQ(meter->allocated(), 10);  // the refused one changed nothing
  meter.reset();
  const MemoryMeter next(at::kCPU);
  EXPECT_EQ(next.allocated(), 0);
  EXPECT_EQ(error_of([] { const MemoryMeter other(at::kMeta); }), "[memory] device must be cpu or cuda, got meta");
}

TEST(Memory, OtherThreadsAreApart) {
  const MemoryMeter meter(at::kCPU);
  int64_t there = 0;
  at::Tensor a;
  std::thread([&] {
    const MemoryMeter own(at::kCPU);
    a = of_bytes(77);
    there = own.allocated();
  }).join();
  EXPECT_EQ(there, 77);
  EXPECT_EQ(meter.allocated(), 0);
}

TEST(Memory, FreeMemoryIsBetweenNothingAndAllThereIs) {
  const int64_t free = free_memory(at::kCPU), all = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  EXPECT_GT(free, 0);
  EXPECT_LE(free, all);
  EXPECT_EQ(error_of([] { free_memory(at::kMeta); }), "[memory] device must be cpu or cuda, got meta");
}

TEST(Memory, CapsAreForCuda) {
  EXPECT_EQ(error_of([] { const MemoryCap cap(at::kCPU, 1 << 20); }), "[memory] a cap needs device cuda, got cpu");
  release_cached_memory(at::kCPU);  // nothing to do
}

TEST(Memory, TellsWhatRanOutOfMemory) {
  const auto ran_out = [](const auto& run) {
    try {
      run();
    } catch (const c10::Error& e) {
      return out_of_memory(e) ? 1 : 0;
    }
    return -1;
  };
  EXPECT_EQ(ran_out([] { of_bytes(int64_t{1} << 60); }), 1);  // more than any address space
  EXPECT_EQ(ran_out([] { of_bytes(4).view({5}); }), 0);
}

/// A made-up /proc and /sys, gone at the end.
class FakeHost {
 public:
  FakeHost() : root_(testing::TempDir() + "memoryXXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) throw std::runtime_error("no folder");
    file("/proc/meminfo", "MemTotal:       99 kB\nMemFree:        7 kB\nMemAvailable:  1000 kB\n");
  }
  ~FakeHost() {
    for (auto it = made_.rbegin(); it != made_.rend(); ++it) ::remove(it->c_str());
    ::rmdir(root_.c_str());
  }
  FakeHost(const FakeHost&) = delete;
  FakeHost& operator=(const FakeHost&) = delete;

  void file(const std::string& path, const std::string& text) {
    for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
      const std::string folder = root_ + path.substr(0, slash);
      if (::mkdir(folder.c_str(), 0700) == 0) made_.push_back(folder);
    }
    std::ofstream(root_ + path) << text;
    made_.push_back(root_ + path);
  }
  int64_t free() const { return host_free_memory(root_); }

 private:
  std::string root_;
  std::vector<std::string> made_;
};

TEST(Memory, ControlGroupsOfVersion2) {
  FakeHost host;
  EXPECT_EQ(host.free(), 1024000);  // no groups at all
  host.file("/proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(host.free(), 1024000);  // groups without limits
  host.file("/sys/fs/cgroup/a/b/memory.max", "max\n");
  host.file("/sys/fs/cgroup/a/b/memory.current", "100\n");
  EXPECT_EQ(host.free(), 1024000);
  host.file("/sys/fs/cgroup/a/memory.max", "5000\n");  // the parent has one
  host.file("/sys/fs/cgroup/a/memory.current", "2000\n");
  EXPECT_EQ(host.free(), 3000);
  host.file("/sys/fs/cgroup/a/memory.stat", "anon 5\nactive_file 1\ninactive_file 500\n");  // can be given back
  EXPECT_EQ(host.free(), 3500);
  host.file("/sys/fs/cgroup/memory.max", "2100\n");  // a container sees its own group at the root
  host.file("/sys/fs/cgroup/memory.current", "100\n");
  EXPECT_EQ(host.free(), 2000);
  host.file("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(host.free(), 2000);
  host.file("/sys/fs/cgroup/memory.current", "9999\n");  // above its limit
  EXPECT_EQ(host.free(), 0);
}

TEST(Memory, ControlGroupsOfVersion1) {
  FakeHost host;
  host.file("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job\nnonsense\n");
  host.file("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8000\n");
  host.file("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3000\n");
  EXPECT_EQ(host.free(), 5000);
  host.file("/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 1000\n");
  EXPECT_EQ(host.free(), 6000);
  host.file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // as the kernel says "none"
  host.file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n");
  EXPECT_EQ(host.free(), 6000);
}

TEST(Memory, MeminfoWithoutAnAnswerIsRefused) {
  FakeHost host;
  host.file("/proc/meminfo", "MemTotal: 99 kB\n");
  EXPECT_NE(error_of([&] { host.free(); }).find("/proc/meminfo must say what is available, got nothing"), std::string::npos);
}

}  // namespace
}  // namespace satchel
