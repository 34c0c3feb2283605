// Looks at what functions pack, before they do: for analyses of activations.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "satchel/core/keep.h"

namespace satchel {

/// `name`: the layer's, as in reports. `x`: the values that are to be coded, before a projection, in their order in memory.
using SaveReport = std::function<void(const std::string& name, Kind kind, const at::Tensor& x)>;

/// While it lives, every tensor that a function of this thread packs by itself is shown to `report` first. One at a time a thread. Fused
/// passes of CUDA make codes without a tensor to show; with bits=32 there are none.
class SaveWatch {
 public:
  explicit SaveWatch(SaveReport report);
  ~SaveWatch();
  SaveWatch(const SaveWatch&) = delete;
  SaveWatch& operator=(const SaveWatch&) = delete;
};

/// Tells the thread's watch, if there is one.
void show_save(const std::string& name, Kind kind, const at::Tensor& x);

}  // namespace satchel
