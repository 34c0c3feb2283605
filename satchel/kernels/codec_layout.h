// What pack() and unpack() derive from shape, dtype and spec: which values are coded, how they are blocked, and where
// the bytes stand. Private to the library; no torch, so that the file parser needs none either.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "satchel/core/spec.h"
#include "satchel/kernels/codec.h"

namespace satchel {

enum class Coding : uint8_t { keep, block, side, low_pass };

struct CodecLayout {
  Coding coding = Coding::keep;
  bool projected = false;   // the coded values are Z = H·P, fp32
  DType type = DType::f32;  // of the coded values
  Part part = Part::both;   // coding low_pass: what is kept
  int64_t values = 0;       // coded
  int64_t row = 1;          // coded values a row
  Projection projection;
  BlockCode block;    // codings block and low_pass
  SideCode side;      // coding side; its off plane is not bound to bytes yet
  LowPassShape maps;  // coding low_pass
  int64_t channels = 0;
  bool off_plane = false;  // coding side: off values are sampled
  Layout at;
};

/// Throws `[op] rule, got value` where shape and spec do not fit. The spec is valid already.
/// `channels` 0 with a side code that needs a threshold means one channel with threshold 0.
CodecLayout plan_of(std::span<const int64_t> shape, DType type, const CodecSpec& spec, int64_t channels, int64_t inner, const char* op);

/// The blocks of the coded values.
const Grid& grid_of(const CodecLayout& plan);

/// Number of values of a shape; throws on negative sizes and on more than 2^56 values.
int64_t count_of(std::span<const int64_t> shape, const char* op);

std::vector<int64_t> contiguous_strides(std::span<const int64_t> shape);

/// Throws unless the strides put every value of the shape on its own place of a gapless stretch of memory.
void check_strides(std::span<const int64_t> shape, std::span<const int64_t> strides, const char* op);

/// Does memory hold the values in the order of the shape? Dimensions of size 1 have no say.
bool is_in_shape_order(std::span<const int64_t> shape, std::span<const int64_t> strides);
/// Maps (3 to 5 dimensions) whose channels are neighbours in memory: samples × space × channels, without gaps.
bool is_channels_last(std::span<const int64_t> shape, std::span<const int64_t> strides);
/// May values that lie without gaps, and not in the order of the shape, be coded as they lie? Do blocks and spans come out alike?
bool any_order_serves(std::span<const int64_t> shape, std::span<const int64_t> strides, const CodecSpec& spec);

/// The spec as plain numbers, for files and for registered ops.
///   side 0 none · 1 one_sided, off=mean · 2 relu · 3 both · 4 one_sided, off=sampled
///   transform 0 identity · 1 projection (p0 ratio, p1 rows, p2 hadamard) · 2 low-pass (p0 size, p1 part)
struct SpecNumbers {
  int64_t bits, block;
  bool per_sample;
  int64_t levels, rounding, header, side, transform, p0, p1;
  bool p2;
};
constexpr int64_t kSampledSide = 4;
SpecNumbers numbers_of(const CodecSpec& spec);
/// Throws `[op] rule, got value` on numbers that no spec has.
CodecSpec spec_of(const SpecNumbers& numbers, const char* op);

}  // namespace satchel
