// The truth: one value at a time, straight from core/code.h and core/side.h. Every other kernel is compared with this one.
#include <algorithm>
#include <cstring>

#include "satchel/kernels/cpu/cpu.h"

namespace satchel {
namespace {

struct Extremes {
  float least = 0, most = 0;
  bool finite = true;
};

Extremes extremes(Source x, int64_t begin, int64_t end) {
  Extremes e;
  for (int64_t i = begin; i < end; ++i) {
    const float v = flush(load(x.data, x.type, i - x.origin));
    e.finite = e.finite && is_finite(v);
    e.least = i == begin ? v : std::min(e.least, v);
    e.most = i == begin ? v : std::max(e.most, v);
  }
  return e;
}

/// Noise for every value of [first, last), drawn a group at a time.
class Noise {
 public:
  Noise(uint64_t seed, Rounding rounding, Stream stream = Stream::rounding)
      : seed_(seed), nearest_(rounding == Rounding::nearest), stream_(stream) {}

  uint32_t operator()(int64_t i) {
    if (nearest_) return kNearestNoise;
    if (const int64_t group = i / kGroup; group != group_) {
      group_ = group;
      words_ = noise_group(seed_, stream_, static_cast<uint64_t>(group));
    }
    return noise_of(words_, static_cast<int>(i % kGroup));
  }

 private:
  uint64_t seed_;
  bool nearest_;
  Stream stream_;
  int64_t group_ = -1;
  Words words_{};
};

/// Clears the bytes that hold the codes of [first, last), so that put_code can add to them.
void clear_codes(uint8_t* codes, int bits, int64_t first, int64_t last) {
  const int64_t begin = code_bytes(first, bits);
  std::memset(codes + begin, 0, static_cast<size_t>(code_bytes(last, bits) - begin));
}

void measure(const BlockCode& code, Source x, void* headers, int64_t first, int64_t last) {
  const int top = (1 << code.levels.bits) - 1;
  for (int64_t b = first; b < last; ++b) {
    const Extremes e = extremes(x, code.grid.begin(b), code.grid.end(b));
    store_header(headers, code.header, b, make_header(e.least, e.most, e.finite, top, code.header));
  }
}

void encode(const BlockCode& code, Source x, uint64_t seed, const void* headers, uint8_t* codes, int64_t first, int64_t last) {
  clear_codes(codes, code.levels.bits, first, last);
  Noise noise(seed, code.rounding);
  for (int64_t i = first; i < last;) {
    const int64_t b = code.grid.block_of(i), end = std::min(code.grid.end(b), last);
    const Header h = load_header(headers, code.header, b);
    const Ruler ruler = make_ruler(h);
    for (; i < end; ++i) {
      if (is_poisoned(h)) continue;  // codes stay 0
      const float y16 = position(load(x.data, x.type, i - x.origin), ruler);
      put_code(codes, code.levels.bits, i, code_of(y16, code.levels, noise(i)));
    }
  }
}

void decode(const BlockCode& code, const uint8_t* codes, const void* headers, Target x, int64_t first, int64_t last) {
  for (int64_t i = first; i < last;) {
    const int64_t b = code.grid.block_of(i), end = std::min(code.grid.end(b), last);
    const Header h = load_header(headers, code.header, b);
    for (; i < end; ++i) {
      store(x.data, x.type, i - x.origin, value_of(get_code(codes, code.levels.bits, i), h, code.levels));
    }
  }
}

const Channel& channel_of(const SideCode& code, const Channel* channels, int64_t i) {
  static constexpr Channel kRelu = {0.0f, 1.0f, 0.0f, 0.0f};
  return channels == nullptr ? kRelu : channels[i / code.inner % code.channels];
}

void side_measure(const SideCode& code, Source x, void* headers, int64_t first, int64_t last) {
  for (int64_t b = first; b < last; ++b) {
    const Extremes e = extremes(x, code.grid.begin(b), code.grid.end(b));
    store_range(headers, code.header, b, make_range(e.least, e.most, e.finite, code.header));
  }
}

/// Draws of a code's off plane: how many blocks a block stands for, 0 where it is not drawn or there is no plane.
class OffDraws {
 public:
  explicit OffDraws(const SideCode& code) : code_(code), key_(code.plane.bytes == nullptr ? OffKey{} : stored_key(code)) {}
  uint32_t weight(int64_t block) const { return code_.plane.bytes == nullptr ? 0 : off_weight(code_, key_, block); }

 private:
  const SideCode& code_;
  OffKey key_;
};

void side_encode(const SideCode& code, Source x, const Channel* channels, uint64_t seed, const void* headers, uint8_t* codes, int64_t first,
                 int64_t last) {
  clear_codes(codes, code.table.bits, first, last);
  Noise noise(seed, code.rounding);
  const OffDraws draws(code);
  for (int64_t i = first; i < last;) {
    const int64_t b = code.grid.block_of(i), end = std::min(code.grid.end(b), last);
    const Range range = load_range(headers, code.header, b);
    const bool drawn = draws.weight(b) > 0;
    for (; i < end; ++i) {
      const float v = load(x.data, x.type, i - x.origin);
      const Channel& channel = channel_of(code, channels, i);
      if (is_poisoned(range)) {
        put_code(codes, code.table.bits, i, poisoned_code_of(v, channel, code.table));
        continue;
      }
      put_code(codes, code.table.bits, i, side_code_of(v, channel, range, code.table, noise(i)));
      if (drawn && off_bit_of(v, channel, range, noise(i))) code.plane.bytes[off_byte(code, b, i)] |= static_cast<uint8_t>(1u << (i % 8));
    }
  }
}

void side_decode(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, Target x, int64_t first,
                 int64_t last) {
  const OffDraws draws(code);
  for (int64_t i = first; i < last;) {
    const int64_t b = code.grid.block_of(i), end = std::min(code.grid.end(b), last);
    const Range range = load_range(headers, code.header, b);
    const uint32_t weight = is_poisoned(range) ? 0 : draws.weight(b);
    for (; i < end; ++i) {
      const uint32_t c = get_code(codes, code.table.bits, i);
      const Channel& channel = channel_of(code, channels, i);
      const bool drawn = weight > 0 && c == 0;
      const bool bit = drawn && (code.plane.bytes[off_byte(code, b, i)] >> (i % 8) & 1) != 0;
      store(x.data, x.type, i - x.origin, drawn ? off_value_of(bit, weight, channel, range) : side_value_of(c, channel, range, code.table));
    }
  }
}

void mask(Source x, uint8_t* mask, int64_t first, int64_t last) {
  clear_codes(mask, 1, first, last);
  for (int64_t i = first; i < last; ++i) put_code(mask, 1, i, flush(load(x.data, x.type, i - x.origin)) > 0.0f ? 1u : 0u);
}

/// Column j of a stretch of entries [from, to).
float stretch_sum(const Sparse& a, const float* x, int64_t width, int64_t from, int64_t to, int64_t j) {
  float sum = 0.0f;
  for (int64_t e = from; e < to; ++e) {
    const int64_t c = a.column[e];
    const float w = (a.value == nullptr ? 1.0f : a.value[e]) * (a.column_scale == nullptr ? 1.0f : a.column_scale[c]);
    sum = fmaf(w, x[c * width + j], sum);
  }
  return sum;
}

void multiply(const Sparse& a, const float* x, int64_t width, float* y, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t begin = a.start[i], end = a.start[i + 1];
    for (int64_t j = 0; j < width; ++j) {
      float sum = stretch_sum(a, x, width, begin, std::min(begin + kStretch, end), j);
      for (int64_t from = begin + kStretch; from < end; from += kStretch) {
        sum += stretch_sum(a, x, width, from, std::min(from + kStretch, end), j);
      }
      y[i * width + j] = a.row_scale == nullptr ? sum : a.row_scale[i] * sum;
    }
  }
}

/// Which values a chain keeps.
class Kept {
 public:
  Kept(const Chain& c, uint64_t seed) : chain_(c), noise_(seed, Rounding::stochastic, Stream::dropout) {}
  bool operator()(int64_t i) { return chain_.drop == 0 || noise_(chain_.origin + i) >= chain_.drop; }

 private:
  const Chain& chain_;
  Noise noise_;
};

void chain(const Chain& c, const float* x, const float* gamma, const float* beta, const uint8_t* on, uint64_t seed, float* z, int64_t first,
           int64_t last) {
  Kept kept(c, seed);
  for (int64_t i = first; i < last; ++i) {
    const float y = chain_input(x[i], gamma, beta, (c.origin + i) % c.channels);
    z[i] = chain_output(y, chain_factor(c, on == nullptr ? y > 0.0f : get_code(on, 1, i) != 0, kept(i)));
  }
}

void chain_back(const Chain& c, const float* g, const uint8_t* on, uint64_t seed, float* out, int64_t first, int64_t last) {
  Kept kept(c, seed);
  for (int64_t i = first; i < last; ++i) out[i] = g[i] * chain_factor(c, on == nullptr || get_code(on, 1, i) != 0, kept(i));
}

void chain_on(const Chain& c, const float* x, const float* gamma, const float* beta, uint8_t* on, int64_t first, int64_t last) {
  clear_codes(on, 1, first, last);
  for (int64_t i = first; i < last; ++i) {
    put_code(on, 1, i, chain_input(x[i], gamma, beta, (c.origin + i) % c.channels) > 0.0f ? 1u : 0u);
  }
}

void side_on(const SideCode& code, const uint8_t* codes, uint8_t* on, int64_t first, int64_t last) {
  clear_codes(on, 1, first, last);
  for (int64_t i = first; i < last; ++i) {
    put_code(on, 1, i, get_code(codes, code.table.bits, i) >= static_cast<uint32_t>(code.table.off) ? 1u : 0u);
  }
}

bool supported() { return true; }

}  // namespace

const CpuKernels kScalar = {"scalar", supported,      measure,       encode,   decode, side_measure, side_encode, side_decode, mask,
                            off_sums, low_pass_split, low_pass_join, multiply, chain,  chain_back,   chain_on,    side_on};

void off_sums(const SideCode& code, Source x, const Channel* channels, double* sums, int64_t first, int64_t last) {
  for (int64_t begin = first, end; begin < last; begin = end) {
    const int64_t run = begin / code.inner;
    end = std::min((run + 1) * code.inner, last);
    const int64_t whole = begin + (end - begin) / kSumLanes * kSumLanes;
    const Channel& channel = channel_of(code, channels, begin);
    double* sum = sums + 2 * (run % code.channels);
    double parts[kSumLanes] = {};
    for (int64_t i = begin; i < end; ++i) {
      const float v = flush(load(x.data, x.type, i - x.origin));
      if (is_on(v, channel)) continue;
      (i < whole ? parts[(i - begin) % kSumLanes] : sum[0]) += v;
      sum[1] += 1.0;
    }
    if (whole == begin) continue;
    for (const double part : parts) sum[0] += part;
  }
}

}  // namespace satchel
