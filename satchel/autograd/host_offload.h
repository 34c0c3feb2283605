// Packed bytes that wait in pinned host memory between forward and backward (ActNN L4): out on a side stream while forward goes on, back
// ahead of need. On the CPU they stay where they are. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace satchel {

/// A value: copies share one line of bytes. Memory on the device is that of kInFlight saves each way, whatever lead the host has: it
/// is given back in the order of the stream that made it.
class HostOffload {
 public:
  static constexpr int kInFlight = 2;               // saves on their way at once
  static constexpr int64_t kLeastBytes = 64 << 10;  // smaller ones stay: a copy costs more than they free

  HostOffload() = default;

  /// Takes bytes (one line of uint8 that the current stream wrote and nobody else changes) and starts their way out.
  explicit HostOffload(at::Tensor bytes);

  bool defined() const { return state_ != nullptr; }

  /// The bytes on their device, ordered into the current stream; those saved before them start their way back.
  at::Tensor bytes() const;
  /// Starts their way back.
  void fetch() const;

  /// Bytes in all.
  int64_t size() const;
  /// … of which on the device now.
  int64_t on_device() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace satchel
