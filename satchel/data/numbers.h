// Numbers out of untrusted arrays, and the rules they are held to. A field is `cora.npz: adj_indices`, for errors. Private.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/data/npy.h"

namespace satchel {

/// `[load] field rule, got value`.
[[noreturn]] inline void refuse(const std::string& field, const std::string& rule, const std::string& got) {
  fail("load", field + " " + rule, got);
}

/// Throws where so many bytes are more than the machine has: a bomb, or a data set for another machine.
void check_memory(uint64_t bytes, const std::string& field);

constexpr int64_t kAny = -1;
/// Throws unless the shape is as said; kAny stands for any size.
void check_shape(const NpyHeader& header, std::initializer_list<int64_t> shape, const std::string& field);
/// `field must be low to high, got 9999 at position 17`.
void check_range(std::span<const int64_t> values, int64_t low, int64_t high, const std::string& field);

/// Row-major, from integers and booleans.
std::vector<int64_t> integers_of(const NpyArray& array, const std::string& field);
/// Row-major and finite, from any numbers.
std::vector<float> floats_of(const NpyArray& array, const std::string& field);

}  // namespace satchel
