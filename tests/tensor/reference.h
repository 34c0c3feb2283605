// The bytes that pack() must give, one value at a time from core alone: blocks by a loop, no plan, no chunks, no threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/layout.h"
#include "satchel/core/levels.h"
#include "satchel/tensor/pack.h"

namespace satchel::reference {

/// [begin, end) of every block.
inline std::vector<std::pair<int64_t, int64_t>> blocks(int64_t values, int64_t block, int64_t span) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (int64_t start = 0; start < values; start += span) {
    const int64_t stop = std::min(values, start + span);
    for (int64_t b = start; b < stop; b += block) out.emplace_back(b, std::min(stop, b + block));
  }
  return out;
}

struct Extremes {
  float least, most;
  bool finite = true;
};

inline Extremes extremes(const float* x, int64_t begin, int64_t end) {
  Extremes e{flush(x[begin]), flush(x[begin])};
  for (int64_t i = begin; i < end; ++i) {
    e.finite = e.finite && is_finite(x[i]);
    e.least = std::min(e.least, flush(x[i]));
    e.most = std::max(e.most, flush(x[i]));
  }
  return e;
}

inline uint32_t noise_at(const CodecSpec& spec, uint64_t seed, int64_t i) {
  if (spec.rounding == Rounding::nearest) return kNearestNoise;
  return noise(seed, Stream::rounding, static_cast<uint64_t>(i));
}

/// Codes and headers of the block code; `line` holds the values in coding order.
inline std::vector<uint8_t> block_bytes(const at::Tensor& line, int64_t block, int64_t span, const CodecSpec& spec, uint64_t seed) {
  const at::Tensor x = line.to(at::kFloat).contiguous();
  const auto* v = x.const_data_ptr<float>();
  const auto all = blocks(x.numel(), block, span);
  const int64_t headers = align_up(code_bytes(x.numel(), spec.bits));
  std::vector<uint8_t> out(static_cast<size_t>(headers) + all.size() * static_cast<size_t>(header_bytes(spec.header)));
  const LevelTable table = level_table(spec.bits, spec.levels, std::min(block, std::max<int64_t>(1, span)));
  for (size_t b = 0; b < all.size(); ++b) {
    const Extremes e = extremes(v, all[b].first, all[b].second);
    const Header h = make_header(e.least, e.most, e.finite, (1 << spec.bits) - 1, spec.header);
    store_header(out.data() + headers, spec.header, static_cast<int64_t>(b), h);
    if (is_poisoned(h)) continue;
    for (int64_t i = all[b].first; i < all[b].second; ++i) {
      const float y = position(v[i], make_ruler(h));
      put_code(out.data(), spec.bits, i, code_of(y, table, noise_at(spec, seed, i)));
    }
  }
  return out;
}

/// Codes and headers of a side code; `channel(i)` is value i's.
template <class ChannelOf>
std::vector<uint8_t> side_bytes(const at::Tensor& line, int64_t block, int64_t span, const CodecSpec& spec, uint64_t seed,
                                const ChannelOf& channel) {
  const at::Tensor x = line.to(at::kFloat).contiguous();
  const auto* v = x.const_data_ptr<float>();
  const auto all = blocks(x.numel(), block, span);
  const int64_t headers = align_up(code_bytes(x.numel(), spec.bits));
  std::vector<uint8_t> out(static_cast<size_t>(headers) + all.size() * static_cast<size_t>(header_bytes(spec.header)));
  const SideTable table = side_table(spec.bits, spec.side, spec.levels, std::min(block, std::max<int64_t>(1, span)));
  for (size_t b = 0; b < all.size(); ++b) {
    const Extremes e = extremes(v, all[b].first, all[b].second);
    const Range r = make_range(e.least, e.most, e.finite, spec.header);
    store_range(out.data() + headers, spec.header, static_cast<int64_t>(b), r);
    for (int64_t i = all[b].first; i < all[b].second; ++i) {
      const uint32_t code =
          is_poisoned(r) ? poisoned_code_of(v[i], channel(i), table) : side_code_of(v[i], channel(i), r, table, noise_at(spec, seed, i));
      put_code(out.data(), spec.bits, i, code);
    }
  }
  return out;
}

inline std::vector<uint8_t> bytes_of(const at::Tensor& t) {
  const at::Tensor c = t.cpu().contiguous();
  const auto* p = static_cast<const uint8_t*>(c.const_data_ptr());
  return {p, p + c.nbytes()};
}

/// The first `expected.size()` bytes are equal; says where not.
inline void expect_starts_with(const at::Tensor& bytes, const std::vector<uint8_t>& expected) {
  const std::vector<uint8_t> got = bytes_of(bytes);
  ASSERT_GE(got.size(), expected.size());
  const auto [a, b] = std::mismatch(expected.begin(), expected.end(), got.begin());
  ASSERT_EQ(a, expected.end()) << "byte " << a - expected.begin() << " of " << expected.size() << ": expected " << int(*a) << ", got "
                               << int(*b);
}

inline void expect_bytes(const at::Tensor& bytes, const std::vector<uint8_t>& expected) {
  ASSERT_EQ(bytes.numel(), static_cast<int64_t>(expected.size()));
  expect_starts_with(bytes, expected);
}

/// Equal bit for bit, shape and dtype included; NaN equals NaN.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device() && bytes_of(a) == bytes_of(b);
}

inline at::Tensor normal(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions().dtype(at::kFloat)).to(type);
}

inline void expect_error(const std::function<void()>& run, const std::string& part) {
  try {
    run();
    ADD_FAILURE() << "expected an error with: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

}  // namespace satchel::reference
