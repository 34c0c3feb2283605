// Some virtual machines list AMX among the CPU's features and hide its palette. oneDNN, which multiplies torch's bf16 matrices, then
// configures no tiles and dies of an illegal instruction. scripts/setup.sh takes care of tests.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>

namespace satchel::tool {

/// Does the CPU list AMX without the tiles of palette 1?
inline bool amx_lacks_tiles() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool listed = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 24 & 1) != 0;  // AMX-TILE
  return listed && (__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) == 0 || b >> 16 == 0);      // tiles that the palette names
#else
  return false;
#endif
}

/// Keeps oneDNN off such an AMX, unless the user has chosen. Before torch's first product.
inline void avoid_broken_amx() {
  const bool chosen = std::getenv("ONEDNN_MAX_CPU_ISA") != nullptr || std::getenv("DNNL_MAX_CPU_ISA") != nullptr;
  if (!chosen && amx_lacks_tiles()) setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", /*overwrite=*/0);
}

}  // namespace satchel::tool
