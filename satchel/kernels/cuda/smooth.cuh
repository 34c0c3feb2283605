// Smooth activations and their derivatives, one value, for every kernel alike: what two kernels make of equal numbers is equal to the bit.
#pragma once

#include "satchel/core/layer.h"
#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {

struct ValueAndSlope {
  float value, slope;
};

/// One instruction each, within 2 ulp; what is subnormal is 0. 1/∞ is 0.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float near_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.44269504f;

__device__ inline float sigmoid_of(float x) { return near_reciprocal(1.0f + power_of_two(-kLog2E * x)); }

/// y·Φ(y), and Φ(y) + y·φ(y). With e = exp(−y²/2) and t = 1/(1 + .3·|y|), Φ(−|y|) is e times a polynomial in t, within 1.5e-7 of itself for
/// |y| ≤ 14 (least squares with weights until the largest error is least); further out e is 0 in float32. Value and slope are then within
/// 4e-7 of erf's.
__device__ inline ValueAndSlope gelu_of(float y) {
  const float t = near_reciprocal(fmaf(0.3f, fabsf(y), 1.0f)), e = power_of_two(y * y * (-0.5f * kLog2E));
  float p = fmaf(0.035675332f, t, -0.15720527f);
  p = fmaf(p, t, 0.20635702f);
  p = fmaf(p, t, -0.053686637f);
  p = fmaf(p, t, 0.12856308f);
  p = fmaf(p, t, 0.09991309f);
  p = fmaf(p, t, 0.12075401f);
  p = fmaf(p, t, 0.11962929f);
  const float tail = p * t * e, phi = y < 0.0f ? tail : 1.0f - tail;
  return {y * phi, fmaf(y * 0.39894228f, e, phi)};
}

/// ½·(1 + tanh(u)) is the sigmoid of 2u = y·(a + b·y²), a = 2·√(2/π), b = .044715·a.
__device__ inline ValueAndSlope gelu_tanh_of(float y) {
  constexpr float kA = 1.5957691f, kB = 0.071354814f;
  const float square = y * y, s = sigmoid_of(y * fmaf(kB, square, kA));
  return {y * s, fmaf(y * s * (1.0f - s), fmaf(3.0f * kB, square, kA), s)};
}

__device__ inline ValueAndSlope silu_of(float y) {
  const float s = sigmoid_of(y);
  return {y * s, s * fmaf(y, 1.0f - s, 1.0f)};
}

/// y and what becomes of it, eight at a time: the choice is the same for all threads.
__device__ inline void smooth8(Smooth which, const float (&y)[8], float (&value)[8], float (&slope)[8]) {
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const ValueAndSlope made = f(y[j]);
      value[j] = made.value;
      slope[j] = made.slope;
    }
  };
  switch (which) {
    case Smooth::gelu: return each([](float x) { return gelu_of(x); });
    case Smooth::gelu_tanh: return each([](float x) { return gelu_tanh_of(x); });
    case Smooth::silu: return each([](float x) { return silu_of(x); });
    case Smooth::sigmoid:
      return each([](float x) {
        const float s = sigmoid_of(x);
        return ValueAndSlope{s, s * (1.0f - s)};
      });
    case Smooth::tanh:
      return each([](float x) {
        const float t = tanhf(x);
        return ValueAndSlope{t, fmaf(-t, t, 1.0f)};
      });
    case Smooth::none: return each([](float x) { return ValueAndSlope{x, 1.0f}; });
  }
}

}  // namespace satchel::cuda
