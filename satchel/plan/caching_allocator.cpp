#include "satchel/plan/caching_allocator.h"

#include <algorithm>

#include "satchel/core/layout.h"

namespace satchel {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kRounding = 512;
constexpr int64_t kSmall = kMiB;  // the largest tensor of the small pool, and the largest rest that a block of the large pool keeps
constexpr int64_t kSmallSegment = 2 * kMiB, kMiddleSegment = 20 * kMiB, kSegmentRounding = 2 * kMiB;
constexpr int64_t kMiddle = 10 * kMiB;  // from here on a segment is as large as its tensor

int64_t rounded(int64_t bytes, int64_t to) { return ceil_div(std::max<int64_t>(bytes, 1), to) * to; }

int64_t segment_of(int64_t size) {
  if (size <= kSmall) return kSmallSegment;
  return size < kMiddle ? kMiddleSegment : rounded(size, kSegmentRounding);
}

}  // namespace

CachingAllocator::~CachingAllocator() {
  for (Pool& pool : free_) {
    for (Block* block : pool) delete block;
  }
}

CachingAllocator::Tensor CachingAllocator::take(int64_t bytes) {
  const int64_t size = rounded(bytes, kRounding);
  const bool large = size > kSmall;
  Block* block = best_fit(size, large);
  if (block == nullptr) block = new_segment(size, large);
  block->free = false;
  split(block, size);
  allocated_ += block->size;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  return std::make_shared<const Memory>(*this, block);
}

void CachingAllocator::empty_cache() {
  for (Pool& pool : free_) {
    std::erase_if(pool, [this](Block* block) {
      if (block->before != nullptr || block->after != nullptr) return false;
      reserved_ -= block->size;
      delete block;
      return true;
    });
  }
}

void CachingAllocator::reset_peaks() {
  peak_allocated_ = allocated_;
  peak_reserved_ = reserved_;
}

CachingAllocator::Block* CachingAllocator::best_fit(int64_t size, bool large) {
  Block wanted{size, 0};
  Pool& pool = free_[large];
  const auto found = pool.lower_bound(&wanted);
  if (found == pool.end()) return nullptr;
  Block* block = *found;
  pool.erase(found);
  return block;
}

CachingAllocator::Block* CachingAllocator::new_segment(int64_t size, bool large) {
  const int64_t bytes = grows_ ? size : segment_of(size);
  if (bytes > cap_ - reserved_) empty_cache();
  if (bytes > cap_ - reserved_) throw OutOfMemory();
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  const int64_t address = next_address_;
  next_address_ += bytes;
  return new Block{bytes, address, large};
}

void CachingAllocator::split(Block* block, int64_t size) {
  const int64_t rest = block->size - size;
  if (block->large ? rest <= kSmall : rest < kRounding) return;
  auto* second = new Block{rest, block->address + size, block->large, true, block, block->after};
  if (second->after != nullptr) second->after->before = second;
  block->after = second;
  block->size = size;
  free_[block->large].insert(second);
}

void CachingAllocator::give(Block* block) {
  allocated_ -= block->size;
  if (grows_) {
    reserved_ -= block->size;
    delete block;
    return;
  }
  block->free = true;
  if (Block* before = block->before; before != nullptr && before->free) {
    free_[before->large].erase(before);
    join(before, block);
    block = before;
  }
  if (block->after != nullptr && block->after->free) {
    free_[block->large].erase(block->after);
    join(block, block->after);
  }
  free_[block->large].insert(block);
}

void CachingAllocator::join(Block* block, Block* after) {
  block->size += after->size;
  block->after = after->after;
  if (block->after != nullptr) block->after->before = block;
  delete after;
}

}  // namespace satchel
