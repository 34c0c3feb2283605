#include "satchel/tensor/file_format.h"

#include <zlib.h>

#include <algorithm>
#include <array>

#include "satchel/core/error.h"
#include "satchel/kernels/codec_layout.h"

namespace satchel {
namespace {

constexpr const char* kOp = "read_packed";
constexpr std::array<uint8_t, 8> kMagic = {'S', 'A', 'T', 'C', 'H', 'E', 'L', 'P'};
constexpr int64_t kFixed = 18;  // numbers before the sizes

template <class T>
void put(std::vector<uint8_t>& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i)));
}

uint64_t get(std::span<const uint8_t> in, size_t at, size_t count) {
  uint64_t value = 0;
  for (size_t i = 0; i < count; ++i) value |= static_cast<uint64_t>(in[at + i]) << (8 * i);
  return value;
}

/// Reads the header's numbers one after the other; their count was checked.
class Numbers {
 public:
  explicit Numbers(std::span<const uint8_t> in) : in_(in) {}
  int64_t next() {
    const auto value = static_cast<int64_t>(get(in_, at_, 8));
    at_ += 8;
    return value;
  }
  bool next_flag(const char* name) {
    const int64_t value = next();
    if (value != 0 && value != 1) fail(kOp, std::string(name) + " must be 0 or 1", value);
    return value == 1;
  }

 private:
  std::span<const uint8_t> in_;
  size_t at_ = kFileStart;
};

SpecNumbers read_numbers(Numbers& in) {
  SpecNumbers n{};
  n.bits = in.next();
  n.block = in.next();
  n.per_sample = in.next_flag("per_sample");
  for (int64_t* field : {&n.levels, &n.rounding, &n.header, &n.side, &n.transform, &n.p0, &n.p1}) *field = in.next();
  n.p2 = in.next_flag("hadamard");
  return n;
}

void check_whole(const FileHeader& h) {
  const CodecLayout layout = plan_of(h.shape, h.dtype, h.spec, h.channels, h.inner, kOp);
  check_strides(h.shape, h.strides, kOp);
  if (h.payload != layout.at.total) {
    fail(kOp, "payload must be " + std::to_string(layout.at.total) + " bytes for this shape and spec", h.payload);
  }
  if (layout.projected && !h.has_seed) fail(kOp, "a projected tensor must have a seed", "none");
}

}  // namespace

std::vector<uint8_t> checksum(std::span<const uint8_t> bytes) {
  std::vector<uint8_t> out;
  put(out, static_cast<uint32_t>(crc32_z(crc32_z(0, nullptr, 0), bytes.data(), bytes.size())));
  return out;
}

std::vector<uint8_t> format_header(const FileHeader& h) {
  std::vector<uint8_t> out(kMagic.begin(), kMagic.end());
  const SpecNumbers n = numbers_of(h.spec);
  std::vector<int64_t> numbers = {n.bits,       n.block,
                                  n.per_sample, n.levels,
                                  n.rounding,   n.header,
                                  n.side,       n.transform,
                                  n.p0,         n.p1,
                                  n.p2,         static_cast<int64_t>(h.dtype),
                                  h.channels,   h.inner,
                                  h.has_seed,   static_cast<int64_t>(h.seed),
                                  h.payload,    static_cast<int64_t>(h.shape.size())};
  numbers.insert(numbers.end(), h.shape.begin(), h.shape.end());
  numbers.insert(numbers.end(), h.strides.begin(), h.strides.end());
  put(out, kFileVersion);
  put(out, static_cast<uint32_t>(numbers.size() * 8));
  for (const int64_t number : numbers) put(out, number);
  const std::vector<uint8_t> sum = checksum(out);
  out.insert(out.end(), sum.begin(), sum.end());
  return out;
}

size_t header_length(std::span<const uint8_t> start) {
  const size_t known = std::min(start.size(), kMagic.size());
  if (!std::equal(start.begin(), start.begin() + static_cast<ptrdiff_t>(known), kMagic.begin())) {
    fail(kOp, "not a packed tensor: the file does not start with SATCHELP");
  }
  if (start.size() < kFileStart) fail(kOp, "file is truncated in its first 16 bytes", start.size());
  const uint64_t version = get(start, 8, 4);
  if (version == 0 || version > kFileVersion) {
    fail(kOp, "file version must be 1 to " + std::to_string(kFileVersion), version);
  }
  const auto length = static_cast<int64_t>(get(start, 12, 4));
  if (length < kFixed * 8 || length > (kFixed + 2 * kMaxRank) * 8 || length % 16 != 0) {
    fail(kOp, "header length is none that a file has", length);
  }
  return kFileStart + static_cast<size_t>(length) + 4;
}

FileHeader parse_header(std::span<const uint8_t> bytes) {
  const size_t whole = header_length(bytes.first(std::min(bytes.size(), kFileStart)));
  if (bytes.size() < whole) {
    fail(kOp, "file is truncated in its header of " + std::to_string(whole) + " bytes", bytes.size());
  }
  const std::vector<uint8_t> sum = checksum(bytes.first(whole - 4));
  if (!std::equal(sum.begin(), sum.end(), bytes.begin() + static_cast<ptrdiff_t>(whole) - 4)) {
    fail(kOp, "header checksum does not match: the file was altered");
  }
  Numbers in(bytes);
  FileHeader h;
  const SpecNumbers numbers = read_numbers(in);
  if (get(bytes, 8, 4) < 2 && numbers.side == kSampledSide) fail(kOp, "side must be 0 to 3 in a file of version 1", numbers.side);
  h.spec = spec_of(numbers, kOp);
  const int64_t dtype = in.next();
  if (dtype < 0 || dtype > 2) fail(kOp, "dtype must be 0 to 2", dtype);
  h.dtype = static_cast<DType>(dtype);
  h.channels = in.next();
  h.inner = in.next();
  h.has_seed = in.next_flag("has seed");
  h.seed = static_cast<uint64_t>(in.next());
  h.payload = in.next();
  const int64_t rank = in.next();
  if (rank < 0 || static_cast<size_t>(kFixed + 2 * std::min(rank, kMaxRank + 1)) * 8 + kFileStart + 4 != whole) {
    fail(kOp, "rank must fit the header's length", rank);
  }
  for (int64_t d = 0; d < rank; ++d) h.shape.push_back(in.next());
  for (int64_t d = 0; d < rank; ++d) h.strides.push_back(in.next());
  check_whole(h);
  return h;
}

}  // namespace satchel
