#include "satchel/autograd/host_offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "satchel/autograd/step.h"
#include "satchel/core/error.h"

// Streams: `home` made the bytes and reads them again, `side` copies. Memory belongs to home's part of the allocator, and home waits for
// side before it is given back, so that no block is held until the host sees an event, however far the host is ahead.

namespace satchel {
namespace {

c10::Stream current_stream_of(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

/// What `to` does from now on comes after what `from` has to do.
void order(const c10::Stream& from, const c10::Stream& to) {
  c10::Event event(from.device_type());
  event.record(from);
  event.block(to);
}

}  // namespace

struct HostOffload::State {
  std::mutex mutex;
  at::Tensor device;  // the bytes there; undefined while they wait on the host
  at::Tensor host;    // pinned; undefined where they never leave
  int64_t size = 0;
  std::optional<c10::Stream> home, side;
  std::optional<c10::Event> copied;  // side's last copy, where home has not waited for it yet
  bool inward = false;               // … which was back to the device
  std::weak_ptr<State> before;       // what was saved before, and is needed after

  ~State() {
    try {
      wait();
    } catch (...) {  // a device that is gone has nothing left to wait for
    }
  }

  /// What home does from now on comes after side's copy.
  void wait() {
    if (copied) copied->block(*home);
    copied.reset();
  }

  void leave() {
    order(*home, *side);
    const c10::StreamGuard guard(*side);
    host = at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    host.copy_(device, /*non_blocking=*/true);
    copied.emplace(side->device_type());
    copied->record(*side);
  }

  /// The copy is done, as far as home can tell: home's memory may be used again.
  void left() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!host.defined() || !device.defined()) return;
    wait();
    device.reset();
  }

  void fetch() {
    const std::lock_guard<std::mutex> lock(mutex);
    fetch_locked();
  }

  void fetch_locked() {
    if (device.defined()) return;
    {
      const c10::StreamGuard guard(*home);
      device = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(home->device()));
    }
    order(*home, *side);  // home may still use this memory for something else
    const c10::StreamGuard guard(*side);
    device.copy_(host, /*non_blocking=*/true);
    copied.emplace(side->device_type());
    copied->record(*side);
    inward = true;
  }

  at::Tensor arrived() {
    const std::lock_guard<std::mutex> lock(mutex);
    fetch_locked();
    if (inward) wait();  // a copy outward reads these bytes too
    const c10::Stream current = current_stream_of(device.device());
    if (current != *home) {
      order(*home, current);
      device.record_stream(current);
    }
    return device;
  }
};

namespace {

/// Of a thread's forward passes: the newest save, those on their way out, and the stream they take.
struct Outgoing {
  std::weak_ptr<void> newest;
  std::deque<std::weak_ptr<void>> leaving;
  std::optional<c10::Stream> side;
};

}  // namespace

HostOffload::HostOffload(at::Tensor bytes) : state_(std::make_shared<State>()) {
  if (!bytes.defined() || bytes.scalar_type() != at::kByte || bytes.dim() != 1 || !bytes.is_contiguous()) {
    fail("host_offload", "bytes must be one line of uint8", bytes.defined() ? c10::toString(bytes.scalar_type()) : "nothing");
  }
  state_->size = bytes.numel();
  state_->device = std::move(bytes);
  if (!state_->device.is_cuda() || state_->size < kLeastBytes) return;
  const at::Device device = state_->device.device();
  Outgoing& outgoing = step_context().part<Outgoing>();
  if (!outgoing.side || outgoing.side->device() != device) {
    outgoing.side = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  }
  state_->home = current_stream_of(device);
  state_->side = outgoing.side;
  state_->before = std::static_pointer_cast<State>(outgoing.newest.lock());
  state_->leave();
  outgoing.newest = state_;
  outgoing.leaving.push_back(state_);
  while (outgoing.leaving.size() > kInFlight) {
    if (const auto oldest = std::static_pointer_cast<State>(outgoing.leaving.front().lock())) oldest->left();
    outgoing.leaving.pop_front();
  }
}

at::Tensor HostOffload::bytes() const {
  if (!state_->host.defined()) return state_->device;
  at::Tensor bytes = state_->arrived();
  std::shared_ptr<State> next = state_->before.lock();
  for (int i = 0; i < kInFlight && next != nullptr; ++i) {
    next->fetch();
    next = next->before.lock();
  }
  return bytes;
}

void HostOffload::fetch() const {
  if (state_->host.defined()) state_->fetch();
}

int64_t HostOffload::size() const { return state_->size; }

int64_t HostOffload::on_device() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->device.defined() ? state_->size : 0;
}

}  // namespace satchel
