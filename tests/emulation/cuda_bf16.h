// What the kernels use of CUDA's header of this name.
#pragma once

#include "tests/emulation/cuda_runtime.h"

struct __nv_bfloat162 {
  uint32_t pair;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  __nv_bfloat162 h;
  ::emulation::cvt_rn_bf16x2_f32(h.pair, high, low);
  return h;
}
inline float __low2float(__nv_bfloat162 h) { return ::emulation::float_of_bf16(h.pair & 0xffffu); }
inline float __high2float(__nv_bfloat162 h) { return ::emulation::float_of_bf16(h.pair >> 16); }
