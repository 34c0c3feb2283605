// The low-pass of channels_last planes too large for shared memory, in two reads: means and extremes, then codes and what comes after.
// The two halves of low_pass_last_encode() and of the fused norms. Private to this folder.
#pragma once

#include "satchel/kernels/cuda/epilogue.h"

namespace satchel::cuda {

/// Rows of pixels in multiples of 4, maps in multiples of 8; fits_last() is true.
bool low_pass_streams(const LowPassShape&);
/// `moments`: the same read takes the channels' too.
int64_t low_pass_stream_scratch_bytes(const LowPassShape&, int64_t channels, bool moments);

/// Means and headers and, where not null, the moments of every channel.
void low_pass_stream_measure(const LowPassParts&, const void* x, DType, const Moments*, void* scratch, StreamHandle);

/// What comes with the codes: z null: nothing.
struct StreamNorm {
  const void* skip;
  NormParameters with;
  uint8_t* mask;
  void* z;
};
void low_pass_stream_encode(const LowPassParts&, const void* x, DType, const StreamNorm&, const uint64_t* seed, StreamHandle);

}  // namespace satchel::cuda
