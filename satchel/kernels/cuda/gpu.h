// How many thread blocks a GPU holds at once, and which tiles it has the shared memory for. Arithmetic alone, no CUDA: launches and
// tests/kernels/gpu_test.cpp share it.
//
// Where every value is written by itself, a launch has as many thread blocks as the GPU holds, and they walk over all values. Where thread
// blocks sum up, their number decides the order of the sums: sums of channels have the same number on every GPU, and products of matrices
// the GPU's own, as one thread block too many would cost them as much time as all others together.
#pragma once

#include <cstdint>

namespace satchel::cuda {

/// What a GPU has: multiprocessors; threads, thread blocks, registers and bytes of shared memory at once on each of them; and bytes of
/// shared memory that a thread block may ask for.
struct Gpu {
  int processors, threads, blocks, registers, shared, shared_block;
};

/// GPUs of one generation each, as CUDA's own tables have them (CUDA C++ Programming Guide, "Compute Capabilities").
struct NamedGpu {
  const char* name;
  Gpu gpu;
};
constexpr NamedGpu kGpus[] = {
    {"a100", {108, 2048, 32, 65536, 164 << 10, 163 << 10}},   {"rtx3090", {82, 1536, 16, 65536, 100 << 10, 99 << 10}},
    {"rtx4090", {128, 1536, 24, 65536, 100 << 10, 99 << 10}}, {"h200", {132, 2048, 32, 65536, 228 << 10, 227 << 10}},
    {"b200", {148, 2048, 32, 65536, 228 << 10, 227 << 10}},   {"rtx5090", {170, 1536, 24, 65536, 100 << 10, 99 << 10}},
};

/// What a thread block asks for. `each`: how many of them a multiprocessor should hold, as __launch_bounds__ promise it, so that a thread
/// has a multiprocessor's registers / (threads · each).
struct BlockNeeds {
  int threads, each;
  int64_t shared = 0;  // bytes
};

constexpr int kRegisters = 1 << 16;       // of a multiprocessor, of every GPU that the kernels are compiled for
constexpr int64_t kSumProcessors = 132;   // thread blocks that sum up channels are an H200's, on every GPU
constexpr int kReservedShared = 1 << 10;  // bytes that CUDA takes for itself, a thread block

constexpr int64_t less_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t more_of(int64_t a, int64_t b) { return a < b ? b : a; }

/// Thread blocks that a multiprocessor holds at once, `each` at most; 0: it has not the shared memory.
constexpr int64_t resident_each(const Gpu& gpu, const BlockNeeds& needs) {
  if (needs.shared > gpu.shared_block) return 0;
  const int64_t registers = kRegisters / (needs.threads * needs.each) / 8 * 8;  // of a thread: given out by eights
  const int64_t by_shared = gpu.shared / (needs.shared + kReservedShared);
  return less_of(less_of(needs.each, less_of(gpu.blocks, gpu.threads / needs.threads)),
                 less_of(by_shared, gpu.registers / (registers * needs.threads)));
}
constexpr int64_t resident(const Gpu& gpu, const BlockNeeds& needs) { return gpu.processors * resident_each(gpu, needs); }

/// Thread blocks for `wanted` of them in multiples of `unit`: as many as the GPU holds at once, one unit at least.
constexpr int64_t blocks_in_units(int64_t wanted, int64_t unit, int64_t at_once) {
  return less_of((wanted + unit - 1) / unit * unit, more_of(at_once / unit, 1) * unit);
}

/// Thread blocks that share each of `tiles`: as many as the GPU holds at once, one at least and `most` at most.
constexpr int64_t parts_of_tiles(int64_t tiles, int64_t most, int64_t at_once) { return more_of(1, less_of(at_once / tiles, most)); }

// What kernels ask for, whose grids follow from it.
constexpr BlockNeeds kFewWalk = {256, 3}, kManyWalk = {256, 4};          // epilogue.cuh: threads of up to 80 registers, of up to 64
constexpr BlockNeeds kSideEncode = {128, 6};                             // side_encode.cu, epilogue_forward_act.cu
constexpr BlockNeeds kDecodeFours = {256, 8}, kDecodeEights = {256, 4};  // side_decode.cu: values a thread
constexpr BlockNeeds kSlabMeasure = {128, 6}, kSlabBack = {128, 4};      // low_pass_slab.cuh
constexpr BlockNeeds kProjectBack = {256, 2, 16 << 10};                  // project_product.cu
constexpr BlockNeeds kScale = {256, 8};                                  // loss.cu
constexpr BlockNeeds kColumnSums = {256, 4, 8 << 10};                    // column_sums.cu

}  // namespace satchel::cuda
