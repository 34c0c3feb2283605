// Bits per sample on the CPU: each function takes a range of samples, so that callers share the work out over threads as they like.
// `ranges` are a block's exact extremes each, in the order of the headers.
#pragma once

#include <cstdint>
#include <span>

#include "satchel/core/per_sample.h"
#include "satchel/kernels/cpu/cpu.h"

namespace satchel {

/// Extremes of every block and ‖R_n‖² of samples [first, last); x is the whole tensor.
void per_sample_measure(const PerSampleCode&, Source x, F32Header* ranges, double* squares, int64_t first, int64_t last);

/// Bits that minimise Σ C_n/(2^b_n − 1)² with Σ b_n = budget: the budget − n largest of all gains, ties by fewer bits, then by index.
/// C_n = weight_n·squares_n; no weights: all 1.
void per_sample_allocate(const PerSampleCode&, std::span<const double> squares, const float* weights, uint32_t* entries);

/// Codes and headers of samples [first, last) into `bytes`, whose entries stand already; what no code fills becomes 0.
void per_sample_encode(const PerSampleCode&, Source x, uint64_t seed, const F32Header* ranges, uint8_t* bytes, int64_t first, int64_t last);

/// Samples [first, last); x starts with sample `origin`.
void per_sample_decode(const PerSampleCode&, const uint8_t* bytes, void* x, DType type, int64_t origin, int64_t first, int64_t last);

}  // namespace satchel
