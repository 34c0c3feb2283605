#include "satchel/data/numbers.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <limits>

#include "satchel/core/number.h"

namespace satchel {
namespace {

std::string text_of(std::span<const int64_t> shape) {
  std::string out = "(";
  for (const int64_t size : shape) out += (out.size() > 1 ? ", " : "") + (size == kAny ? std::string("any") : std::to_string(size));
  return out + ")";
}

/// Value i in row-major order of an array of one or two dimensions is stored here.
class Order {
 public:
  explicit Order(const NpyHeader& header)
      : rows_(header.shape.size() == 2 && header.fortran_order ? header.shape[0] : 0), columns_(rows_ > 0 ? header.shape[1] : 0) {}
  int64_t operator()(int64_t i) const { return columns_ > 0 ? i % columns_ * rows_ + i / columns_ : i; }

 private:
  int64_t rows_, columns_;
};

/// convert(Stored, i) for every value.
template <class Stored, class Value, class Convert>
std::vector<Value> converted(const NpyArray& array, const Convert& convert) {
  const Order order(array);
  std::vector<Value> out(static_cast<size_t>(array.values()));
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    Stored stored;
    std::memcpy(&stored, array.data.data() + order(i) * static_cast<int64_t>(sizeof stored), sizeof stored);
    out[static_cast<size_t>(i)] = convert(stored, i);
  }
  return out;
}

/// The values of a type that has a C++ twin. Halves come as their 16 bits.
template <class Value, class Convert>
std::vector<Value> dispatched(const NpyArray& array, const Convert& convert) {
  const std::string_view type = std::string_view(array.descr).substr(1);
  if (type == "f4") return converted<float, Value>(array, convert);
  if (type == "f8") return converted<double, Value>(array, convert);
  if (type == "i1") return converted<int8_t, Value>(array, convert);
  if (type == "i2") return converted<int16_t, Value>(array, convert);
  if (type == "i4") return converted<int32_t, Value>(array, convert);
  if (type == "i8") return converted<int64_t, Value>(array, convert);
  if (type == "u2") return converted<uint16_t, Value>(array, convert);
  if (type == "u4") return converted<uint32_t, Value>(array, convert);
  if (type == "u8") return converted<uint64_t, Value>(array, convert);
  return converted<uint8_t, Value>(array, convert);  // u1, b1
}

}  // namespace

void check_memory(uint64_t bytes, const std::string& field) {
  const int64_t pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0 && bytes / static_cast<uint64_t>(page) >= static_cast<uint64_t>(pages)) {
    refuse(field, "must fit into memory", std::to_string(bytes) + " bytes");
  }
}

void check_shape(const NpyHeader& header, std::initializer_list<int64_t> shape, const std::string& field) {
  bool same = header.shape.size() == shape.size();
  for (size_t d = 0; same && d < shape.size(); ++d) same = shape.begin()[d] == kAny || shape.begin()[d] == header.shape[d];
  if (!same) refuse(field, "must have shape " + text_of(std::span(shape.begin(), shape.size())), text_of(header.shape));
}

void check_range(std::span<const int64_t> values, int64_t low, int64_t high, const std::string& field) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= low && values[i] <= high) continue;
    refuse(field, "must be " + std::to_string(low) + " to " + std::to_string(high),
           std::to_string(values[i]) + " at position " + std::to_string(i));
  }
}

std::vector<int64_t> integers_of(const NpyArray& array, const std::string& field) {
  if (array.kind() == 'f') refuse(field, "must be whole numbers", array.descr);
  return dispatched<int64_t>(array, [&](auto stored, int64_t i) {
    if constexpr (std::is_same_v<decltype(stored), uint64_t>) {
      if (stored > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        refuse(field, "must fit into 63 bits", std::to_string(stored) + " at position " + std::to_string(i));
      }
    }
    if constexpr (std::is_floating_point_v<decltype(stored)>) {
      return int64_t{0};  // refused above
    } else {
      return static_cast<int64_t>(stored);
    }
  });
}

namespace {

/// std::to_string() writes 1e300 as 301 digits.
template <class Number>
std::string text_of(Number value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return text;
}

}  // namespace

std::vector<float> floats_of(const NpyArray& array, const std::string& field) {
  const bool half = array.descr == "<f2";
  const auto convert = [&](auto stored, int64_t i) {
    float value = 0;
    if constexpr (std::is_same_v<decltype(stored), double>) {  // beyond float's range a cast has no meaning
      const bool fits = stored >= -std::numeric_limits<float>::max() && stored <= std::numeric_limits<float>::max();
      value = fits ? static_cast<float>(stored) : float_of(kCanonicalNaN);
    } else if constexpr (std::is_same_v<decltype(stored), uint16_t>) {
      value = half ? from_f16(stored) : static_cast<float>(stored);
    } else {
      value = static_cast<float>(stored);
    }
    if (!is_finite(value)) {
      const int64_t columns = array.shape.size() == 2 ? array.shape[1] : 0;
      const std::string place =
          columns > 0 ? "row " + std::to_string(i / columns) + ", column " + std::to_string(i % columns) : "position " + std::to_string(i);
      refuse(field, "must be finite numbers of 32 bits", text_of(stored) + " at " + place);
    }
    return value;
  };
  return half ? converted<uint16_t, float>(array, convert) : dispatched<float>(array, convert);
}

}  // namespace satchel
