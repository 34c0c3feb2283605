#include "satchel/train/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>

#include "satchel/core/error.h"
#include "satchel/train/memory_parts.h"

namespace satchel {

class MemoryMeter::Source {
 public:
  virtual ~Source() = default;
  virtual int64_t allocated() const = 0;
  virtual int64_t requested() const { return allocated(); }
  virtual int64_t peak() const = 0;
  virtual void reset_peak() = 0;
  virtual void watch(const at::Tensor&) {}
};

namespace {

thread_local bool metered = false;

}  // namespace

/// Adds up what torch reports; torch hands it on to threads that work for this one, so it has a lock.
class CpuCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* data, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard lock(mutex_);
    if (bytes > 0) known_.insert(data);
    if (bytes > 0 && data == watched_) return;
    if (bytes < 0 && known_.erase(data) == 0 && !could_be(data, -bytes)) return;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t now() const {
    const std::lock_guard lock(mutex_);
    return now_;
  }
  int64_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = now_;
  }

  /// Gives torch the size of memory that is there already.
  void watch(void* data, size_t bytes) {
    set_watched(data);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    set_watched(nullptr);
  }

 private:
  void set_watched(void* data) {
    const std::lock_guard lock(mutex_);
    watched_ = data;
  }

  /// For memory from before the meter torch gives the size of whatever a meter last saw at that address. Could it be this one's? The
  /// heap rounds up by less than two pages.
  static bool could_be(void* data, int64_t bytes) {
    constexpr int64_t kRounding = 8192;
    const auto usable = static_cast<int64_t>(::malloc_usable_size(data));
    return bytes <= usable && usable - bytes <= kRounding;
  }

  mutable std::mutex mutex_;
  std::unordered_set<void*> known_;  // live, and torch has their size
  void* watched_ = nullptr;          // is no new allocation
  int64_t now_ = 0, peak_ = 0;
};

class MemoryMeter::CpuSource final : public Source {
 public:
  int64_t allocated() const override { return counter_->now(); }
  int64_t peak() const override { return counter_->peak(); }
  void reset_peak() override { counter_->reset_peak(); }
  void watch(const at::Tensor& tensor) override {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return;
    const c10::DataPtr& data = tensor.storage().data_ptr();
    // Memory of any other allocator is never reported.
    if (data.get() == nullptr || data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter()) return;
    counter_->watch(data.get_context(), tensor.storage().nbytes());
  }

 private:
  std::shared_ptr<CpuCounter> counter_ = std::make_shared<CpuCounter>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counter_};
};

class MemoryMeter::CudaSource final : public Source {
 public:
  explicit CudaSource(c10::Device device) : device_(device), start_(cuda_memory(device)) { CudaSource::reset_peak(); }
  int64_t allocated() const override { return cuda_memory(device_).allocated - start_.allocated; }
  int64_t requested() const override { return cuda_memory(device_).requested - start_.requested; }
  int64_t peak() const override { return cuda_memory(device_).peak - start_.allocated; }
  void reset_peak() override { reset_cuda_peak(device_); }

 private:
  c10::Device device_;
  CudaMemory start_;
};

MemoryMeter::MemoryMeter(c10::Device device) {
  if (!device.is_cpu() && !device.is_cuda()) fail("memory", "device must be cpu or cuda", device);
  if (metered) fail("memory", "a thread must have one meter at a time", "a second");
  if (device.is_cuda()) {
    source_ = std::make_unique<CudaSource>(device);
  } else {
    if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) {
      fail("memory", "a thread must have no profiler where there is a meter", "one");
    }
    source_ = std::make_unique<CpuSource>();
  }
  metered = true;
}

MemoryMeter::~MemoryMeter() { metered = false; }

int64_t MemoryMeter::allocated() const { return source_->allocated(); }

int64_t MemoryMeter::requested() const { return source_->requested(); }

int64_t MemoryMeter::peak() const { return source_->peak(); }

void MemoryMeter::reset_peak() { source_->reset_peak(); }

void MemoryMeter::watch(const at::Tensor& tensor) { source_->watch(tensor); }

namespace {

constexpr int64_t kUnknown = -1;

/// The number in a file that holds one; "max" and absent files give kUnknown.
int64_t number_in(const std::string& path) {
  std::ifstream in(path);
  int64_t value = kUnknown;
  return in >> value ? value : kUnknown;
}

/// The number after a word at the start of a line.
int64_t number_after(const std::string& path, const std::string& word) {
  std::ifstream in(path);
  std::string line, first;
  int64_t value = 0;
  while (std::getline(in, line)) {
    std::istringstream text(line);
    if (text >> first >> value && first == word) return value;
  }
  return kUnknown;
}

/// What one control group leaves: its limit, less what it uses that cannot be given back at once.
int64_t left_in(const std::string& group, const char* limit_file, const char* usage_file, const char* cache_word) {
  const int64_t limit = number_in(group + limit_file), used = number_in(group + usage_file);
  if (limit < 0 || used < 0) return kUnknown;
  const int64_t cached = std::max<int64_t>(0, number_after(group + "/memory.stat", cache_word));
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cached));
}

/// The least that this process's control groups leave, from its own to the root; kUnknown where none has a limit.
int64_t left_by_groups(const std::string& root) {
  int64_t least = kUnknown;
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {  // 0::/path (version 2), 4:memory,…:/path (version 1)
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos) continue;
    std::string controllers(",");
    controllers.append(line, one + 1, two - one - 1).append(",");
    const bool second = controllers == ",,";
    if (!second && controllers.find(",memory,") == std::string::npos) continue;
    const std::string base = root + (second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    for (std::string path = line.substr(two + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const int64_t left = second ? left_in(base + path, "/memory.max", "/memory.current", "inactive_file")
                                  : left_in(base + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file");
      if (left >= 0) least = least < 0 ? left : std::min(least, left);
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

int64_t host_free_memory(const std::string& root) {
  const int64_t available = number_after(root + "/proc/meminfo", "MemAvailable:");
  if (available < 0) fail("memory", "/proc/meminfo must say what is available", "nothing");
  const int64_t bytes = available * 1024, left = left_by_groups(root);
  return left < 0 ? bytes : std::min(bytes, left);
}

int64_t free_memory(c10::Device device) {
  if (device.is_cuda()) return cuda_free_memory(device);
  if (!device.is_cpu()) fail("memory", "device must be cpu or cuda", device);
  return host_free_memory("");
}

MemoryCap::MemoryCap(c10::Device device, int64_t bytes) : device_(device) {
  if (!device.is_cuda()) fail("memory", "a cap needs device cuda", device);
  if (bytes < 1) fail("memory", "a cap must be at least 1 byte", bytes);
  before_ = cuda_fraction(device);
  set_cuda_fraction(device, std::min(1.0, static_cast<double>(bytes) / static_cast<double>(cuda_total_memory(device))));
}

MemoryCap::~MemoryCap() { set_cuda_fraction(device_, before_); }

void release_cached_memory(c10::Device device) {
  if (device.is_cuda()) cuda_empty_cache(device);
}

void release_workspaces(c10::Device device) {
  if (device.is_cuda()) cuda_release_workspaces(device);
}

bool out_of_memory(const c10::Error& error) {
  const std::string_view what = error.what_without_backtrace();
  return what.find("allocate memory") != what.npos || what.find("out of memory") != what.npos;
}

}  // namespace satchel
