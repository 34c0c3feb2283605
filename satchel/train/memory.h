// How much memory tensors take, measured while a program runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>

namespace satchel {

/// Bytes of tensors on a device, relative to those there when the meter was made. One meter at a time in a thread, made and destroyed
/// there; a second is refused.
///
/// CUDA: all of the process, as the caching allocator counts: whole blocks, of 512 bytes or a multiple, up to 1 MiB larger than a large
/// tensor. requested() is without what the blocks exceed their tensors by.
/// CPU: torch reports what this thread allocates and releases, and what threads of torch do on its behalf (backward on the CPU runs
/// in the calling thread). Not seen: other threads of the program, memory that is no tensor's, and the release of a tensor that
/// was made while no meter was there: torch does not know its size (and logs a warning). So make the meter before the tensors, or
/// watch() them. A torch profiler cannot run in this thread beside a meter.
class MemoryMeter {
 public:
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Now, over construction; negative where more was released than allocated.
  int64_t allocated() const;
  /// The same in bytes that tensors asked for; on the CPU these are allocated(). What a plan predicts, where allocated() is what the device
  /// must have.
  int64_t requested() const;
  /// Highest of allocated() since construction or reset_peak().
  int64_t peak() const;
  void reset_peak();

  /// The release of this tensor, made before the meter, shall count (as negative). Without effect where it counts anyway.
  void watch(const at::Tensor& tensor);

 private:
  class Source;
  class CpuSource;
  class CudaSource;
  std::unique_ptr<Source> source_;
};

/// Bytes that new tensors could take. CPU: available memory, or what the control group leaves where that is less. CUDA: free on the
/// device, and cached by torch's allocator but not in use; less where a cap leaves less.
int64_t free_memory(c10::Device device);

/// Torch's allocator takes at most so many bytes of a CUDA device while this lives: tensors, and what it caches. One at a time.
class MemoryCap {
 public:
  MemoryCap(c10::Device device, int64_t bytes);
  ~MemoryCap();
  MemoryCap(const MemoryCap&) = delete;
  MemoryCap& operator=(const MemoryCap&) = delete;

 private:
  c10::Device device_;
  double before_;  // share of the device's memory
};

/// Gives back to a CUDA device what torch's allocator caches and nothing uses; without effect on the CPU.
void release_cached_memory(c10::Device device);

/// Gives cuBLAS's workspaces of all CUDA devices back to torch's allocator; the next product takes them anew. Not while a captured CUDA
/// graph lives, which may use them. Without effect on the CPU.
void release_workspaces(c10::Device device);

/// Is it torch's error for memory that could not be had?
bool out_of_memory(const c10::Error& error);

}  // namespace satchel
