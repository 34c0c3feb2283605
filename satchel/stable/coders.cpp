#include "satchel/stable/coders.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "satchel/kernels/chunks.h"
#include "satchel/kernels/slope.h"

namespace satchel::stable {
namespace {

const uint64_t* seed_pointer(const Tensor& seed) { return static_cast<const uint64_t*>(seed.const_data_ptr()); }

void zero(const Tensor& bytes, int64_t from, int64_t to) {
  if (from >= to) return;
  if (!bytes.is_cuda()) {
    std::memset(static_cast<uint8_t*>(bytes.data_ptr()) + from, 0, static_cast<size_t>(to - from));
    return;
  }
  Tensor part = torch::stable::narrow(const_cast<Tensor&>(bytes), 0, from, to - from);
  torch::stable::zero_(part);
}

}  // namespace

void zero_gaps(const CodecLayout& layout, const Tensor& bytes) {
  for (const auto& [first, last] : gaps_of(layout)) zero(bytes, first, last);
}

void encode(const CodecLayout& layout, const void* x, const Tensor& seed, const Tensor& bytes, const Place& place, RowsWithGaps rows) {
  std::vector<Tensor> held;
  const auto scratch = [&](int64_t count) {
    return held.emplace_back(torch::stable::new_empty(bytes, {count}, torch::headeronly::ScalarType::Byte)).data_ptr();
  };
  const Device device{place.cuda(), place.stream(), scratch};
  satchel::encode(layout, {x, layout.type}, seed_pointer(seed), parts_to_write(layout, bytes.data_ptr(), device), device, rows);
}

void decode(const CodecLayout& layout, const Tensor& bytes, void* x, const Place& place) {
  constexpr int64_t kCaches = int64_t{32} << 20;  // what is larger is written past the caches: nothing of it would still be there
  const Target target{x, layout.type, 0, layout.values * size_of(layout.type) > kCaches};
  satchel::decode(layout, parts_of(layout, bytes.data_ptr()), target, 0, layout.values, {place.cuda(), place.stream()});
}

void decode_part(const CodecLayout& layout, const Tensor& bytes, void* x, DType type, int64_t first, int64_t last, const Place& place) {
  if (first >= last) return;
  satchel::decode(layout, parts_of(layout, bytes.data_ptr()), {x, type, first}, first, last, {place.cuda(), place.stream()});
}

void encode_exp(const CodecLayout& layout, const float* x, const Tensor& seed, const Tensor& bytes, const Place& place) {
  const BlockCode& code = layout.block;
  const Parts to = parts_of(layout, bytes.data_ptr());
  if (place.cuda()) return cuda::encode_exp(code, x, seed_pointer(seed), to.codes, to.headers, place.stream());
  encode_made(code, DType::f32, chunk_of(quantum_of(code.grid)), *seed_pointer(seed), to, [&](void* buffer, int64_t first, int64_t last) {
    std::transform(x + first, x + last, static_cast<float*>(buffer), [](float v) { return std::exp(v); });
  });
}

void decode_log(const CodecLayout& layout, const Tensor& bytes, float* x, const Place& place) {
  const Parts from = parts_of(layout, bytes.data_ptr());
  if (place.cuda()) return cuda::decode_log(layout.block, from.codes, from.headers, x, place.stream());
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(layout.values, kChunk, [&](int64_t first, int64_t last) {
    kernels.decode(layout.block, from.codes, from.headers, {x, DType::f32}, first, last);
    std::transform(x + first, x + last, x + first, [](float v) { return std::log(v); });
  });
}

void decode_table(const Tensor& codes, const Tensor& table, int bits, int64_t values, void* x, DType type, const Place& place) {
  if (values == 0) return;
  const auto* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  const auto* numbers = static_cast<const float*>(table.const_data_ptr());
  if (place.cuda()) return cuda::table_decode(from, values, bits, numbers, x, type, place.stream());
  for_chunks(values, kChunk, [&](int64_t first, int64_t last) { table_decode(from, bits, numbers, x, type, first, last); });
}

}  // namespace satchel::stable
