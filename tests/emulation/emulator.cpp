// Fibers, warps and thread blocks on one CPU thread.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/launch.h"
#include "satchel/kernels/cuda/product_tile.h"
#include "satchel/kernels/cuda/split_product.h"
#include "tests/emulation/common.h"
#include "tests/emulation/cuda_runtime.h"

// Saves the registers that a call keeps on the running stack, whose end goes to *from, and goes on where `to` was saved.
extern "C" void satchel_switch_stack(void** from, void* to);
asm(R"(
.text
.globl satchel_switch_stack
.type satchel_switch_stack, @function
satchel_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size satchel_switch_stack, .-satchel_switch_stack
)");

namespace emulation {

satchel::cuda::Gpu gpu = kFewProcessors;

namespace {

constexpr size_t kStack = 64 << 10;  // bytes a fiber
constexpr unsigned kMostThreads = 1024;

// Not on the heap: kernels keep addresses in shared memory in 32 bits, as distances to emulation::anchor.
constexpr int64_t kMostShared = 228 << 10;  // bytes
alignas(16) char shared[kMostShared];

/// Threads of a warp that wait for each other, by the mask they came with.
struct Meeting {
  uint32_t mask = 0, came = 0;
  uint64_t turn = 0;
  uint64_t values[2][32] = {};  // of this turn, while some still read those of the last
};

struct Warp {
  uint32_t gone = 0;
  std::vector<Meeting> meetings;
};

struct Thread {
  Place place;
  void* stack = nullptr;  // its end while the thread does not run
  unsigned warp = 0, lane = 0;
  bool done = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::unique_ptr<char[]> stacks;
  const std::function<void()>* kernel = nullptr;
  Thread* running = nullptr;
  void* scheduler = nullptr;
  unsigned waiting = 0, left = 0;  // at the block's barrier; threads that have not ended
  uint64_t turn = 0, progress = 0;
} block;

void yield() { satchel_switch_stack(&block.running->stack, block.scheduler); }

void open_barrier() {
  if (block.waiting < block.left || block.waiting == 0) return;
  block.waiting = 0;
  ++block.turn;
  ++block.progress;
}

void open(Warp& warp, Meeting& m) {
  if (((m.came | warp.gone) & m.mask) != m.mask || m.came == 0) return;
  m.came = 0;
  ++m.turn;
  ++block.progress;
}

[[noreturn]] void run_thread() {
  (*block.kernel)();
  Thread& self = *block.running;
  self.done = true;
  --block.left;
  ++block.progress;
  Warp& warp = block.warps[self.warp];
  warp.gone |= 1u << self.lane;
  for (Meeting& m : warp.meetings) open(warp, m);
  open_barrier();
  yield();
  std::abort();
}

void start(Thread& t, char* stack) {
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // as after a call: the stack's end is 8 beyond a multiple of 16
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  t.stack = top;
}

void run_block(const Launch& launch, dim3 at) {
  const unsigned count = launch.threads.x * launch.threads.y * launch.threads.z;
  block.warps.assign((count + 31) / 32, {});
  for (unsigned i = count; i < 32 * block.warps.size(); ++i) block.warps.back().gone |= 1u << (i % 32);
  block.waiting = 0;
  block.left = count;
  for (unsigned i = 0; i < count; ++i) {
    Thread& t = block.threads[i];
    t = {{{i % launch.threads.x, i / launch.threads.x % launch.threads.y, i / launch.threads.x / launch.threads.y},
          at,
          launch.threads,
          launch.blocks},
         nullptr,
         i / 32,
         i % 32,
         false};
    start(t, block.stacks.get() + i * kStack);
  }
  while (block.left > 0) {
    const uint64_t before = block.progress;
    for (unsigned i = 0; i < count; ++i) {
      if (block.threads[i].done) continue;
      block.running = &block.threads[i];
      satchel_switch_stack(&block.scheduler, block.running->stack);
    }
    if (block.progress == before) {
      std::fprintf(stderr, "emulation: %u threads of block %u wait for each other\n", block.left, at.x);
      std::abort();
    }
  }
}

}  // namespace

const Place& here() { return block.running->place; }
unsigned lane() { return block.running->lane; }
void* dynamic_shared() { return shared; }

void sync_block() {
  const uint64_t turn = block.turn;
  ++block.waiting;
  open_barrier();
  while (block.turn == turn) yield();
}

const uint64_t* gather(uint32_t mask, uint64_t value) {
  Thread& self = *block.running;
  Warp& warp = block.warps[self.warp];
  size_t at = 0;
  while (at < warp.meetings.size() && warp.meetings[at].mask != mask) ++at;
  if (at == warp.meetings.size()) {
    warp.meetings.reserve(64);  // pointers to values stay right
    warp.meetings.push_back({mask});
  }
  Meeting& m = warp.meetings[at];
  const uint64_t turn = m.turn;
  m.values[turn % 2][self.lane] = value;
  m.came |= 1u << self.lane;
  open(warp, m);
  while (m.turn == turn) yield();
  return m.values[turn % 2];
}

void Launch::operator<<(const std::function<void()>& kernel) const {
  if (block.stacks == nullptr) {
    block.stacks = std::make_unique<char[]>(kMostThreads * kStack);
    block.threads.resize(kMostThreads);
  }
  if (threads.x * threads.y * threads.z > kMostThreads || threads.x * threads.y * threads.z == 0 || blocks.x == 0) {
    satchel::fail("launch", "a block must have 1 to 1024 threads, and a grid a block", threads.x);
  }
  block.kernel = &kernel;
  if (bytes > kMostShared)
    satchel::fail("launch", "a block must have at most " + std::to_string(kMostShared >> 10) + " KiB of shared memory", bytes);
  std::memset(shared, 0xff, static_cast<size_t>(bytes));  // nothing that a kernel may rely on
  for (unsigned z = 0; z < blocks.z; ++z) {
    for (unsigned y = 0; y < blocks.y; ++y) {
      for (unsigned x = 0; x < blocks.x; ++x) run_block(*this, {x, y, z});
    }
  }
}

}  // namespace emulation

// What launch.cpp has, without CUDA.
namespace satchel::cuda {

void fail(const char* op, const char* rule) { satchel::fail(op, rule); }
void fail(const char* op, const char* rule, int64_t value) { satchel::fail(op, rule, value); }
void fail(const char* op, const char* rule, const char* value) { satchel::fail(op, rule, value); }
void check_launch(const char*) {}
void allow_shared(const void*, int64_t, const char*) {}
const Gpu& this_gpu() { return emulation::gpu; }

}  // namespace satchel::cuda
