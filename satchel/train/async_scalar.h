// A number that the device computes, on its way to the host while more is queued. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace satchel {

class AsyncScalar {
 public:
  /// Starts the way of a tensor of one value that the current stream computes; waits for nothing.
  explicit AsyncScalar(const at::Tensor& number);

  /// Waits for the number alone, not for what was queued after it.
  double read() const;

 private:
  at::Tensor host_;
  std::optional<c10::Event> copied_;  // none: it is here
};

}  // namespace satchel
