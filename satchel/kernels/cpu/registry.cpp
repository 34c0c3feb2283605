// The list of implementations, best first, and the choice among them.
#include <array>
#include <cstdlib>
#include <string>

#include "satchel/core/error.h"
#include "satchel/kernels/cpu/cpu.h"

namespace satchel {

std::span<const CpuKernels* const> cpu_kernels() {
#ifdef __x86_64__
  static constexpr std::array<const CpuKernels*, 3> kAll = {&kAvx512, &kAvx2, &kScalar};
#else
  static constexpr std::array<const CpuKernels*, 1> kAll = {&kScalar};
#endif
  return kAll;
}

const CpuKernels& cpu_kernel(std::string_view name) {
  std::string names;
  for (const CpuKernels* k : cpu_kernels()) {
    if (name == k->name && k->supported()) return *k;
    names += (names.empty() ? "" : ", ") + std::string(k->name) + (k->supported() ? "" : " (not on this CPU)");
  }
  fail("kernel", "name must be one of " + names, "'" + std::string(name) + "'");
}

const CpuKernels& best_cpu_kernel() {
  static const CpuKernels& chosen = []() -> const CpuKernels& {
    if (const char* name = std::getenv("SATCHEL_KERNEL"); name != nullptr && *name != '\0') return cpu_kernel(name);
    for (const CpuKernels* k : cpu_kernels()) {
      if (k->supported()) return *k;
    }
    return kScalar;
  }();
  return chosen;
}

}  // namespace satchel
