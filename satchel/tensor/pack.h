// torch in, Packed out.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/tensor/packed.h"

namespace satchel {

/// Packs a float32, float16 or bfloat16 tensor of any shape and strides, on the CPU or on CUDA (current stream). Equal input,
/// spec and seed give equal bytes on every device and for any number of threads. Side codes take threshold 0.
Packed pack(const at::Tensor& x, const CodecSpec& spec, uint64_t seed);

/// The same with the seed in an int64[1] tensor on x's device, read when the kernels run: for captured CUDA graphs.
Packed pack(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed);

/// Side code of normalised values x whose ReLU is on where γ·x + β > 0; `gamma` and `beta` have one value a channel,
/// channels are dimension `dim` of x (fp32 copies are kept).
Packed pack_side(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta,
                 int64_t dim = 1);

/// The tensor again, with its dtype, shape and strides.
at::Tensor unpack(const Packed& packed);

/// Samples [first, last) of it (the first dimension), with the strides that the whole has. Where the coding order keeps samples
/// together, little more than these is decoded; projected rows and other orders are unpacked whole.
at::Tensor unpack_samples(const Packed& packed, int64_t first, int64_t last);

/// An int64[1] tensor on `device` that holds the seed, without a host synchronisation.
at::Tensor seed_tensor(uint64_t seed, at::Device device);

/// Turns an int64[1] seed into the next one of its run, on its device: the end of a captured step that draws anew when replayed.
void advance_seed(const at::Tensor& seed);

/// x > 0 as one bit a value, and back as bool. Takes floats, and bool tensors as they are.
struct PackedMask {
  at::Tensor bits;
  std::vector<int64_t> shape;
};
PackedMask pack_mask(const at::Tensor& x);
at::Tensor unpack_mask(const PackedMask& mask);

/// Integers (bool, uint8, int8 to int64) in the fewest bits that hold least to most, and back: lossless.
struct Narrowed {
  at::Tensor bytes;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kLong;
  int64_t least = 0;
  int bits = 0;
};
Narrowed narrow(const at::Tensor& x);
/// The same where least and most are known: no pass over the data, no host synchronisation. Values outside are undefined.
Narrowed narrow(const at::Tensor& x, int64_t least, int64_t most);
at::Tensor widen(const Narrowed& narrowed);

}  // namespace satchel
