// What lets the same function compile under g++ for the CPU and under nvcc for both sides.
#pragma once

// Always inlined: a copy compiled for AVX-512 must never be the one the linker keeps for everybody.
#ifdef __CUDACC__
#define SATCHEL_HD __host__ __device__ __forceinline__
#else
#define SATCHEL_HD [[gnu::always_inline]] inline
#endif
