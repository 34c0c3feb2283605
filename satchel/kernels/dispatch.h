// From a number known at run time to one known to the compiler.
#pragma once

#include <type_traits>

#include "satchel/core/number.h"

namespace satchel {

/// Calls f with `bits` (1..8) as an integral constant. On a GPU too.
template <class F>
constexpr void with_bits(int bits, F&& f) {
  switch (bits) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    default: return f(std::integral_constant<int, 8>());
  }
}

/// Calls f with `type` as an integral constant.
template <class F>
void with_type(DType type, F&& f) {
  switch (type) {
    case DType::f32: return f(std::integral_constant<DType, DType::f32>());
    case DType::f16: return f(std::integral_constant<DType, DType::f16>());
    default: return f(std::integral_constant<DType, DType::bf16>());
  }
}

}  // namespace satchel
