#include "satchel/data/batch_threads.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "satchel/core/error.h"

namespace satchel {

BatchThreads::BatchThreads(int threads, int64_t slots, int64_t pieces, Work work)
    : pieces_(pieces), work_(std::move(work)), slots_(static_cast<size_t>(slots)) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  start_threads(threads > 0 ? threads : std::clamp(cores, 1, 16));
}

BatchThreads::~BatchThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BatchThreads::start_threads(int wanted) {
  try {
    for (int i = 0; i < wanted; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    if (threads_.empty()) fail("loader", "a thread must start", wanted);  // fewer will do
  }
}

/// A thread: takes pieces in order while their batch has a slot.
void BatchThreads::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || may_take(); });
    if (stop_) return;
    const int64_t batch = taken_ / pieces_, piece = taken_ % pieces_;
    ++taken_;
    ++active_;
    lock.unlock();
    std::exception_ptr error;
    try {
      work_.make(batch, piece, index_of(batch));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --active_;
    Slot& slot = slots_[index_of(batch)];
    if (error && piece < slot.failed) {
      slot.failed = piece;
      slot.error = error;
    }
    if (--slot.left == 0 || active_ == 0) ready_.notify_all();
  }
}

void BatchThreads::prepare(int64_t batch) {
  work_.prepare(batch, index_of(batch));
  slots_[index_of(batch)] = {pieces_, INT64_MAX, nullptr};
}

void BatchThreads::start(int64_t batches, const std::function<void()>& between) {
  std::unique_lock lock(mutex_);
  end_ = 0;
  ready_.wait(lock, [this] { return active_ == 0; });
  between();
  batches_ = batches;
  for (int64_t b = 0; b < std::min(batches, static_cast<int64_t>(slots_.size())); ++b) prepare(b);
  taken_ = given_ = 0;
  end_ = batches * pieces_;
  lock.unlock();
  wake_.notify_all();
}

bool BatchThreads::next(const std::function<void(size_t slot)>& take) {
  std::unique_lock lock(mutex_);
  if (end_ == 0 || given_ == batches_) return false;
  Slot& slot = slots_[index_of(given_)];
  ready_.wait(lock, [&] { return slot.left == 0; });
  if (slot.error) std::rethrow_exception(slot.error);
  lock.unlock();
  take(index_of(given_));
  const int64_t later = given_ + static_cast<int64_t>(slots_.size());
  try {
    if (later < batches_) prepare(later);
  } catch (...) {  // no memory: this batch is lost, and next() says so again
    slot.error = std::current_exception();
    throw;
  }
  lock.lock();
  ++given_;
  lock.unlock();
  wake_.notify_all();
  return true;
}

}  // namespace satchel
