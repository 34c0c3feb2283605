// Batches made ahead by background threads: in order, each in pieces, in as many slots as batches may wait. Private.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace satchel {

constexpr int kMaxLoaderThreads = 256;

class BatchThreads {
 public:
  struct Work {
    /// Makes a slot ready for a batch; no thread looks at the slot then.
    std::function<void(int64_t batch, size_t slot)> prepare;
    /// Makes one piece of it.
    std::function<void(int64_t batch, int64_t piece, size_t slot)> make;
  };

  /// `pieces` a batch. 0 threads: one a core, at most 16. What `work` reads must outlive this.
  BatchThreads(int threads, int64_t slots, int64_t pieces, Work work);
  ~BatchThreads();
  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

  /// Begins an epoch of so many batches, whatever is left of the one before. `between` is called while no thread is at work.
  void start(int64_t batches, const std::function<void()>& between);
  /// Hands the slot of the next batch to `take`; false after the last one (and before start). Throws what a thread threw while it made
  /// this batch, of its first piece that failed, and then again until start().
  bool next(const std::function<void(size_t slot)>& take);

 private:
  /// Batch b of an epoch is made in slot b % slots.
  struct Slot {
    int64_t left = 0;            // pieces not yet made
    int64_t failed = INT64_MAX;  // the first piece that threw
    std::exception_ptr error;
  };

  void start_threads(int wanted);
  void run();
  void prepare(int64_t batch);
  size_t index_of(int64_t batch) const { return static_cast<size_t>(batch) % slots_.size(); }
  bool may_take() const { return taken_ < end_ && taken_ / pieces_ < given_ + static_cast<int64_t>(slots_.size()); }

  int64_t pieces_;
  Work work_;
  std::mutex mutex_;
  std::condition_variable wake_, ready_;  // there is a piece to take; a batch is whole, or no thread is at work
  std::vector<Slot> slots_;
  int64_t batches_ = 0;
  int64_t taken_ = 0, end_ = 0;  // pieces of this epoch
  int64_t given_ = 0;            // batches handed out
  int64_t active_ = 0;           // threads at work
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace satchel
