// Work of fixed shapes on a GPU, recorded once as a CUDA graph and replayed. Private to this room.
// captured_cuda_on.cpp records, captured_cuda_off.cpp throws "[train] built without CUDA".
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace satchel {

/// What the work reads and writes keeps its place in memory from one replay to the next; what it allocates comes from a pool that is
/// the graph's own, and stays reserved while the graph lives.
class CapturedWork {
 public:
  explicit CapturedWork(c10::Device device);
  ~CapturedWork();
  CapturedWork(const CapturedWork&) = delete;
  CapturedWork& operator=(const CapturedWork&) = delete;

  /// Runs the work as it is on the stream of the later capture, so that libraries have their workspaces there. In the order of the
  /// current stream; the host does not wait.
  void warm_up(const std::function<void()>& work);
  /// Records the work without running it, once. Throws `[train] …` where it waits for the GPU; the process should end then, since
  /// torch cannot undo a broken capture altogether.
  void capture(const std::function<void()>& work);
  bool captured() const;
  /// Runs what was recorded on the current stream; the host does not wait.
  void replay();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace satchel
