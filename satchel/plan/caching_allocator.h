// torch's caching allocator of CUDA memory in sizes alone: what the tensors of a program make it take from the device, and whether they
// fit under a cap. Free memory between tensors, in pieces too small to use, is a third of what a large batch takes. No torch.
//
// As c10/cuda/CUDACachingAllocator.cpp does it by default:
//   size      rounded up to 512 bytes
//   pools     small: up to 1 MiB, from segments of 2 MiB; large: more, from segments of 20 MiB for less than 10 MiB, else of the size
//   itself
//             rounded up to 2 MiB
//   take      the smallest free block of the pool that is large enough, of equal ones the one at the lowest address; else a new segment.
//             The rest of a block is a free block of its own: from 512 bytes on (small), above 1 MiB (large)
//   give      free neighbours in a segment become one block; segments stay with the allocator
//   cap       where a new segment would exceed it, all segments without a tensor go back to the device; else it is out of memory
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <tuple>

namespace satchel {

class CachingAllocator {
 public:
  class Memory;
  using Tensor = std::shared_ptr<const Memory>;  // the block is free when the last of them goes; before the allocator does
  struct OutOfMemory : std::exception {
    const char* what() const noexcept override { return "out of memory"; }
  };

  /// At most `cap` bytes of segments. `grows`: torch's expandable_segments, which leave no holes: segments are as large as their tensors.
  explicit CachingAllocator(int64_t cap, bool grows = false) : cap_(cap), grows_(grows) {}
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// Throws OutOfMemory.
  Tensor take(int64_t bytes);
  /// Segments without a tensor go back to the device.
  void empty_cache();

  int64_t allocated() const { return allocated_; }  // blocks with a tensor
  int64_t reserved() const { return reserved_; }    // segments
  int64_t peak_allocated() const { return peak_allocated_; }
  int64_t peak_reserved() const { return peak_reserved_; }
  void reset_peaks();

 private:
  struct Block {
    int64_t size = 0, address = 0;
    bool large = false, free = true;
    Block *before = nullptr, *after = nullptr;  // in the same segment
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const { return std::tie(a->size, a->address) < std::tie(b->size, b->address); }
  };
  using Pool = std::set<Block*, BySize>;  // free blocks

  Block* best_fit(int64_t size, bool large);
  Block* new_segment(int64_t size, bool large);
  void split(Block* block, int64_t size);
  void give(Block* block);
  static void join(Block* block, Block* after);

  const int64_t cap_;
  const bool grows_;
  std::array<Pool, 2> free_;  // small, large
  int64_t next_address_ = 0;
  int64_t allocated_ = 0, reserved_ = 0, peak_allocated_ = 0, peak_reserved_ = 0;
};

class CachingAllocator::Memory {
 public:
  Memory(CachingAllocator& from, Block* block) : from_(from), block_(block) {}
  ~Memory() { from_.give(block_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

 private:
  CachingAllocator& from_;
  Block* block_;
};

}  // namespace satchel
