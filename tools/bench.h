// The pieces of `bench codec`: what is run, on which data, how it is checked, and the two devices.
#pragma once

#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/kernels/cpu/cpu.h"

namespace satchel::tool {

constexpr int64_t kMapsPerImage = 64, kMapSide = 56;  // DIVISION's tensor: images × 64 × 56 × 56
constexpr int kRatio = 8;                             // of project_encode

struct Result {
  std::string device, kernel, op;
  int bits;
  int64_t block;
  DType dtype;
  int64_t values;
  double seconds, copy_seconds, rmse;

  double share() const { return copy_seconds / seconds; }
};

/// Memory that starts where a cache line does, as torch's own.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  explicit LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  bool operator==(const LineAllocator&) const = default;
};
template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

/// Standard normal values, as float32 and in the type that is benched.
struct Values {
  Aligned<float> f32;
  Aligned<uint16_t> half;  // empty for f32
  DType type = DType::f32;

  int64_t count() const { return static_cast<int64_t>(f32.size()); }
  int64_t bytes() const { return count() * size_of(type); }
  const void* data() const { return type == DType::f32 ? static_cast<const void*>(f32.data()) : half.data(); }
  Source source() const { return {data(), type}; }
};
Values make_values(int64_t count, DType type, uint64_t seed);

/// What a device is asked to run.
struct Setup {
  std::string op = "all";
  int repeat = 9;
  uint64_t seed = 1;
  BlockCode block;       // of the matrix
  SideCode side;         // of the matrix
  bool has_side = true;  // side codes exist for these bits
  Projection projection;
  BlockCode projected;  // of Z
  LowPassShape maps;
  BlockCode rest;  // of the maps less their means
  std::vector<Channel> channels;
  const Values* matrix = nullptr;
  const Values* images = nullptr;

  bool wants(std::string_view name) const { return op == "all" || op == name; }
};

using Report = std::function<void(const Result&)>;

/// One core, chunk by chunk as pack() goes; the copy is memcpy.
void bench_cpu(const CpuKernels& kernels, const Setup& setup, const Report& report);

/// The GPU, timed by events; the copy is a device copy. bench_device_off.cpp throws.
void bench_device(const Setup& setup, const Report& report);

/// What one kernel made of x, on the host.
struct Trial {
  std::string who;  // for errors: "avx2 encode"
  Source x, back;   // values, and values again; both in the same type
  uint64_t seed;
  const uint8_t* codes;
  const void* headers;
  const Channel* channels = nullptr;
};

/// Throws unless, on the first and last values, bytes and decoded values are the scalar kernel's, every error is within its
/// step, and the mean square error is the predicted one. Gives the root mean square error of all values (side codes: of
/// those that are on).
double check_code(const BlockCode& code, const Trial& trial);
double check_code(const SideCode& code, const Trial& trial);

/// Throws unless rows of z are h·P within the rounding of a float32 sum.
void check_projection(const std::string& who, const Projection& p, Source h, uint64_t seed, const float* z);

/// Throws unless the means are low_pass_split's and x̂ is low_pass_join's of what the codes hold. Gives the root mean square error.
double check_low_pass(const LowPassShape& maps, const BlockCode& code, Trial trial, const uint16_t* means);

/// Fills in the off means from sums and counts.
void set_off_means(std::vector<Channel>& channels, const std::vector<double>& sums);

/// Throws unless the off means are those of x within float32's rounding; nothing to check where the table has two off codes.
void check_off_means(const std::string& who, const SideCode& code, Source x, const std::vector<Channel>& channels);

double root_mean_square(const std::vector<float>& x);

}  // namespace satchel::tool
