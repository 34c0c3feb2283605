// Copies to shared memory in the background, and products of 16-bit numbers on tensor cores: every GPU that the kernels are compiled for
// has both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "satchel/core/number.h"

namespace satchel::cuda {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

/// `bytes` from global to shared memory in the background where CUDA can (4 and 16), zeros where they do not exist.
template <int bytes>
__device__ inline void copy_async(void* to, const void* from, bool exists) {
  if constexpr (bytes == 2) {
    *static_cast<uint16_t*>(to) = exists ? __ldg(static_cast<const uint16_t*>(from)) : uint16_t{0};
  } else {
    const unsigned at = shared_address(to);
    const int size = exists ? bytes : 0;
    if constexpr (bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
  }
}

/// The copies since the last call are a group.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// All groups but the last `but` are there, as far as this thread made them.
template <int but>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(but) : "memory");
}

/// Four times 8 × 8 numbers of 16 bits from shared memory, as factors of multiply_halves(): lane 8·j + i names line i of the j-th.
/// `turned`: columns become lines.
template <bool turned>
__device__ inline void load_halves(uint32_t (&w)[4], const uint16_t* line) {
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared_address(line))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared_address(line))
                 : "memory");
}

/// c += a·b: 16 × 16 numbers by 16 × 8, sums in float32.
template <DType type>
__device__ inline void multiply_halves(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (type == DType::f16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace satchel::cuda
