#include "satchel/kernels/cuda/launch.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "satchel/core/error.h"

namespace satchel::cuda {
namespace {

constexpr int64_t kUsualShared = 48 << 10;  // bytes a thread block has without asking
constexpr int kMostDevices = 64;
constexpr Gpu kSmallest = {1, 1024, 16, kRegisters, 64 << 10, kUsualShared};

Gpu gpu_of(int device) {
  Gpu gpu = kSmallest;
  const auto ask = [&](int& to, cudaDeviceAttr attribute) { return cudaDeviceGetAttribute(&to, attribute, device) == cudaSuccess; };
  const bool known =
      ask(gpu.processors, cudaDevAttrMultiProcessorCount) && ask(gpu.threads, cudaDevAttrMaxThreadsPerMultiProcessor) &&
      ask(gpu.blocks, cudaDevAttrMaxBlocksPerMultiprocessor) && ask(gpu.registers, cudaDevAttrMaxRegistersPerMultiprocessor) &&
      ask(gpu.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor) && ask(gpu.shared_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return known ? gpu : kSmallest;
}

/// The GPU that SATCHEL_GPU names, with no more shared memory than there is.
Gpu as_named(const Gpu& own) {
  const char* name = std::getenv("SATCHEL_GPU");
  if (name == nullptr || *name == '\0') return own;
  for (const NamedGpu& other : kGpus) {
    if (std::string_view(other.name) != name) continue;
    Gpu gpu = other.gpu;
    gpu.shared_block = static_cast<int>(less_of(gpu.shared_block, own.shared_block));
    return gpu;
  }
  fail("cuda", "SATCHEL_GPU must be a name of kernels/cuda/gpu.h", name);
}

}  // namespace

void fail(const char* op, const char* rule) { satchel::fail(op, rule); }
void fail(const char* op, const char* rule, int64_t value) { satchel::fail(op, rule, value); }
void fail(const char* op, const char* rule, const char* value) { satchel::fail(op, rule, value); }

void check_launch(const char* op) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    fail(op, "the CUDA kernel must launch", cudaGetErrorString(error));
  }
}

void allow_shared(const void* kernel, int64_t bytes, const char* op) {
  const cudaError_t set = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (set == cudaSuccess) return;
  cudaGetLastError();  // told here
  fail(op, "a thread block must get its shared memory", cudaGetErrorString(set));
}

const Gpu& this_gpu() {
  static std::array<Gpu, kMostDevices> gpus;
  static std::array<std::once_flag, kMostDevices> asked;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) {
    cudaGetLastError();  // no device: nothing will be launched
    return kSmallest;
  }
  std::call_once(asked[device], [&] { gpus[device] = as_named(gpu_of(device)); });
  return gpus[device];
}

}  // namespace satchel::cuda
