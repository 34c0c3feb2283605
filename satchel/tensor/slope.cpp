#include "satchel/tensor/slope.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numbers>
#include <tuple>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "satchel/kernels/slope.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/rows.h"

namespace satchel {
namespace {

double slope_at(SlopeOf kind, double x) {
  switch (kind) {
    case SlopeOf::gelu: return 0.5 * (1 + std::erf(x * std::sqrt(0.5))) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    case SlopeOf::gelu_tanh: {
      const double k = std::sqrt(2 / std::numbers::pi), c = 0.044715, t = std::tanh(k * (x + c * x * x * x));
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * c * x * x);
    }
    case SlopeOf::silu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
    case SlopeOf::mish: {
      const double s = 1 / (1 + std::exp(-x)), t = std::tanh(std::log1p(std::exp(x)));
      return t + x * s * (1 - t * t);
    }
  }
  return 0;
}

/// Where `better(a, b)` prefers the slope at a: the best of a fine scan of [−6, 6], where all four have their least and their most.
template <class Better>
double best_place(SlopeOf kind, const Better& better) {
  constexpr int steps = 120'000;
  double place = -6, slope = slope_at(kind, place);
  for (int i = 1; i <= steps; ++i) {
    const double x = -6 + 12.0 * i / steps, d = slope_at(kind, x);
    if (better(d, slope)) place = x, slope = d;
  }
  return place;
}

/// The x within [from, to], where the slope rises, with this slope.
double place_of(SlopeOf kind, double slope, double from, double to) {
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (from + to);
    (slope_at(kind, middle) < slope ? from : to) = middle;
  }
  return 0.5 * (from + to);
}

/// `count` numbers from a to b.
void add_line(double a, double b, int count, std::vector<double>& to) {
  for (int i = 0; i < count; ++i) to.push_back(count == 1 ? a : a + (b - a) * i / (count - 1));
}

/// Numbers from the least slope to the most, evenly spaced below 0, between 0 and 1, and above 1; 0 and 1, which most values have, are
/// levels.
std::vector<double> wanted_slopes(double low, double high, int bits) {
  if (bits == 1) return {low, high};
  const int count = 1 << bits, outside = std::max(1, static_cast<int>(std::lround((count - 1) * -low / (high - low))));
  std::vector<double> slopes;
  add_line(low, 0, outside + 1, slopes);
  slopes.pop_back();
  add_line(0, 1, count - 2 * outside, slopes);
  std::vector<double> above;
  add_line(1, high, outside + 1, above);
  slopes.insert(slopes.end(), above.begin() + 1, above.end());
  return slopes;
}

float as_type(double x, at::ScalarType type) {
  const auto f = static_cast<float>(x);
  return type == at::kHalf ? static_cast<float>(c10::Half(f)) : type == at::kBFloat16 ? static_cast<float>(c10::BFloat16(f)) : f;
}

struct DeviceLevels {
  at::Tensor levels, values;
};

at::Tensor tensor_of(const std::vector<float>& numbers, at::Device device) {
  const at::Tensor host = at::empty({static_cast<int64_t>(numbers.size())}, at::TensorOptions().dtype(at::kFloat));
  std::copy(numbers.begin(), numbers.end(), host.mutable_data_ptr<float>());
  return host.to(device);
}

/// Made once for all threads, and never freed: a GPU's memory may be gone when the program ends.
DeviceLevels levels_on(SlopeOf kind, int bits, at::ScalarType type, at::Device device) {
  using Key = std::tuple<SlopeOf, int, at::ScalarType, at::DeviceType, at::DeviceIndex>;
  static std::mutex mutex;
  static auto& made = *new std::map<Key, DeviceLevels>;
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key{kind, bits, type, device.type(), device.index()};
  auto found = made.find(key);
  if (found == made.end()) {
    const SlopeLevels numbers = slope_levels(kind, bits, type);
    found = made.emplace(key, DeviceLevels{tensor_of(numbers.levels, device), tensor_of(numbers.values, device)}).first;
  }
  return found->second;
}

}  // namespace

SlopeLevels slope_levels(SlopeOf kind, int bits, at::ScalarType type) {
  const double from = best_place(kind, std::less<>()), to = best_place(kind, std::greater<>());
  SlopeLevels numbers;
  for (const double slope : wanted_slopes(slope_at(kind, from), slope_at(kind, to), bits)) {
    const float value = as_type(place_of(kind, slope, from, to), type);
    numbers.values.push_back(value);
    numbers.levels.push_back(static_cast<float>(slope_at(kind, value)));
  }
  // A value that its type rounds beyond the turning point has a slope a little inside.
  std::ranges::sort(numbers.levels);
  return numbers;
}

PackedSlope pack_slope(const at::Tensor& x, SlopeOf kind, int bits, const at::Tensor& seed) {
  constexpr const char* op = "pack_slope";
  check_float(x, op);
  check_seed(seed, x.device(), op);
  if (bits < 1 || bits > 8) fail(op, "bits must be 1 to 8", bits);
  const Place place(x.device(), op);
  const at::Tensor in_order = ordered(x.detach(), CodecSpec{});
  const DeviceLevels made = levels_on(kind, bits, x.scalar_type(), x.device());
  PackedSlope packed{{}, made.values, in_order.sizes().vec(), strides_of(in_order), x.scalar_type()};
  packed.bytes = at::empty({code_bytes(x.numel(), bits)}, x.options().dtype(at::kByte).memory_format(c10::nullopt));
  if (x.numel() == 0) return packed;
  const at::Tensor line = aligned(flat(in_order));
  const void* data = line.const_data_ptr();
  const DType type = dtype_of(x.scalar_type());
  const auto* levels = made.levels.const_data_ptr<float>();
  auto* codes = packed.bytes.mutable_data_ptr<uint8_t>();
  if (place.cuda()) {
    cuda::slope_encode(kind, data, type, x.numel(), levels, bits, seed_pointer(seed), codes, place.stream());
  } else {
    const uint64_t number = seed_value(seed);
    for_chunks(x.numel(), kChunk,
               [&](int64_t first, int64_t last) { slope_encode(kind, data, type, levels, bits, number, codes, first, last); });
  }
  return packed;
}

at::Tensor unpack_slope(const PackedSlope& packed) {
  constexpr const char* op = "unpack_slope";
  check_tensor(packed.bytes, op);
  const Place place(packed.bytes.device(), op);
  const at::Tensor out = at::empty_strided(packed.shape, packed.strides, packed.bytes.options().dtype(packed.dtype));
  if (out.numel() == 0) return out;
  int bits = 1;
  while (int64_t{1} << bits < packed.values.numel()) ++bits;
  const auto* codes = packed.bytes.const_data_ptr<uint8_t>();
  const auto* values = packed.values.const_data_ptr<float>();
  void* data = out.mutable_data_ptr();
  const DType type = dtype_of(packed.dtype);
  if (place.cuda()) {
    cuda::table_decode(codes, out.numel(), bits, values, data, type, place.stream());
  } else {
    for_chunks(out.numel(), kChunk, [&](int64_t first, int64_t last) { table_decode(codes, bits, values, data, type, first, last); });
  }
  return out;
}

}  // namespace satchel
