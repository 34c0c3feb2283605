// Built where CUDA was found; captured_cuda_off.cpp stands in elsewhere.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <exception>
#include <map>
#include <string>

#include "satchel/core/error.h"
#include "satchel/train/captured.h"
#include "satchel/train/memory.h"

namespace satchel {
namespace {

/// `later` goes on only after all that `earlier` has been given so far.
void wait_for(const c10::cuda::CUDAStream& later, const c10::cuda::CUDAStream& earlier) {
  at::cuda::CUDAEvent event;
  event.record(earlier);
  event.block(later);
}

/// One stream a thread and device for all captures: cuBLAS keeps a workspace, tens of MiB, for every stream it has seen.
const c10::cuda::CUDAStream& stream_of(c10::Device device) {
  thread_local std::map<c10::DeviceIndex, c10::cuda::CUDAStream> streams;
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  const auto found = streams.find(index);
  if (found != streams.end()) return found->second;
  return streams.emplace(index, c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)).first->second;
}

}  // namespace

struct CapturedWork::Parts {
  explicit Parts(c10::Device device) : stream(stream_of(device)) {}

  c10::cuda::CUDAStream stream;  // a graph cannot be captured on the default one
  at::cuda::CUDAGraph graph;
  bool captured = false;

  /// After a capture that failed: lets streams and allocators go on without it.
  void abandon(const c10::MempoolId_t& pool) noexcept {
    try {
      graph.capture_end();
    } catch (const std::exception&) {  // it says that the capture failed, which is known
    }
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(stream.device_index(), pool);
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool);
    } catch (const std::exception&) {  // it had ended
    }
  }
};

CapturedWork::CapturedWork(c10::Device device) {
  if (!device.is_cuda()) fail("train", "cuda_graph needs device cuda", device);
  parts_ = std::make_unique<Parts>(device);
}

CapturedWork::~CapturedWork() = default;

bool CapturedWork::captured() const { return parts_->captured; }

void CapturedWork::warm_up(const std::function<void()>& work) {
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(parts_->stream.device_index());
  wait_for(parts_->stream, current);
  {
    const c10::cuda::CUDAStreamGuard guard(parts_->stream);
    work();
  }
  wait_for(current, parts_->stream);
}

void CapturedWork::capture(const std::function<void()>& work) {
  if (parts_->captured) fail("train", "a CUDA graph must be captured once", "a second time");
  const c10::cuda::CUDAStreamGuard guard(parts_->stream);  // first: its device is the one to wait for, whichever was current
  // What the steps before left in the cache would stand beside the graph's own pool.
  c10::cuda::device_synchronize();
  release_cached_memory(parts_->stream.device());
  const c10::MempoolId_t pool = at::cuda::graph_pool_handle();
  parts_->graph.capture_begin(pool);
  try {
    work();
    parts_->graph.capture_end();
  } catch (const c10::Error& e) {
    const std::string what = e.what_without_backtrace();
    parts_->abandon(pool);
    if (out_of_memory(e)) throw;
    fail("train", "cuda_graph needs steps that never wait for the GPU", what.substr(0, what.find('\n')));
  } catch (...) {
    parts_->abandon(pool);
    throw;
  }
  parts_->captured = true;
}

void CapturedWork::replay() {
  if (!parts_->captured) fail("train", "a CUDA graph must be captured before it is replayed", "none");
  parts_->graph.replay();
}

}  // namespace satchel
