// The names of layer kinds, for plans and for layers.
#pragma once

#include <cstdint>

namespace satchel {

enum class Norm : uint8_t { none, batch, layer };
enum class Activation : uint8_t { none, relu, leaky_relu, elu };
/// Activations of which the derivative is kept (docs/theory.md 8). gelu_tanh is torch's approximate="tanh".
enum class Smooth : uint8_t { none, gelu, gelu_tanh, silu, sigmoid, tanh };
/// What features and activations are kept in between layers; weights, statistics and losses are float32 either way. automatic: what the
/// data and the other options of a run decide (amp_for() of train/graph_task.h).
enum class Amp : uint8_t { none, bf16, fp16, automatic };

}  // namespace satchel
