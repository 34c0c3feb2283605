// Second read of planes that are coded in two: codes and, for a norm, its output and mask. A warp has 32 channels and a piece of the map
// in pixel order; eight pixels a lane at a time are a group of codes. A piece's codes gather in shared memory and go out in whole words.
#include "satchel/kernels/cuda/low_pass_slab.cuh"

namespace satchel::cuda {
namespace slab {
namespace {

constexpr int kPieceMost = 64;  // groups

struct Encode {
  LowPassParts to;
  StreamNorm norm;
  const void* x;
  const uint64_t* seed;
  FastDivisor width, slabs, pieces;
  int channels, across, windows, groups, piece;  // groups: of a map; piece: groups of most pieces
  uint32_t units;                                // samples × pieces × slabs
  bool by_words;                                 // codes of a map are whole words
};

/// Four channels' rulers, as block_ruler() has them where its short form holds. inverse 0: a range of unusual size.
struct Rulers {
  float offset[4], inverse[4];

  __device__ inline Rulers(const LowPassParts& to, int64_t map, bool exists) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Header h = exists ? load_header(to.headers, to.code.header, map + k) : Header{0.0f, 0.0f};
      offset[k] = -h.low;
      inverse[k] = is_usual(h) ? 65536.0f * __frcp_rn(h.step) : 0.0f;
    }
  }
};

/// A lane's eight pixels in the maps of its channels.
struct Group {
  int64_t map;  // of the first channel
  int index;    // in the map
};

/// Means of pixels 0 … 3 and 4 … 7 of a group, of one channel; rows are multiples of 4 wide.
struct Means {
  int first, second;  // windows

  __device__ inline Means(const Encode& a, int group) {
    const int width = static_cast<int>(a.width.divisor), p = group * 8;
    const int row = static_cast<int>(a.width.divide(static_cast<uint32_t>(p))), column = p - row * width;
    const int next_row = column + 4 == width ? row + 1 : row, next = next_row == row ? column + 4 : 0;
    first = row / kWindow * a.across + column / kWindow;
    second = next_row / kWindow * a.across + next / kWindow;
  }
};

/// Codes of one channel of a group.
template <int bits, DType type>
__device__ inline uint64_t encode_group(const Encode& a, const Quad<type> (&q)[8], int k, const Group& group, const Means& at,
                                        const Rulers& rulers, UniformSeed seed) {
  const uint16_t* means = a.to.means + (group.map + k) * a.windows;
  const float mean = from_bf16(means[at.first]), next = at.second == at.first ? mean : from_bf16(means[at.second]);
  const Words noise = group_noise(seed, a.to.code.rounding, (group.map + k) * a.groups + group.index);
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = value_of_cell<type>(cell_of<type>(q[j], k));
  const auto less_mean = [&] {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] -= j < 4 ? mean : next;
  };
  if (rulers.inverse[k] != 0.0f) {  // is_usual(): subnormals need not be flushed
    less_mean();
    return encode8<bits, true>(v, {{}, {1.0f, rulers.offset[k], rulers.inverse[k]}, true}, a.to.code.levels, noise);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = flush_signed(v[j]);
  less_mean();
  const Header h = load_header(a.to.headers, a.to.code.header, group.map + k);
  return encode8<bits, true>(v, {h, make_ruler(h), false}, a.to.code.levels, noise);
}

/// A piece's codes from shared memory, 32 channels of `pitch` bytes, to their places.
template <int bits>
__device__ inline void put_piece(const Encode& a, const uint8_t* stage, int pitch, int64_t map, int channels, int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int c = 0; c < channels; ++c) {
    uint8_t* to = a.to.codes + ((map + c) * a.groups + first) * bits;
    const uint8_t* from = stage + c * pitch;
    if (a.by_words) {
      for (int i = lane; 4 * i < count * bits; i += 32) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      for (int i = lane; i < count * bits; i += 32) to[i] = from[i];
    }
  }
}

template <int bits, DType type, Then then>
__global__ void __launch_bounds__(kWarps * 32, then == Then::add       ? 4
                                               : then == Then::nothing ? 6
                                                                       : 5) encode_pieces(const __grid_constant__ Encode a) {
  constexpr int kPitch = kPieceMost * bits + 4;  // an odd number of words: quads of channels meet different banks
  alignas(16) __shared__ uint8_t stages[kWarps][kSlab * kPitch];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, quad = lane % 8;
  uint8_t* stage = stages[warp];
  const UniformSeed seed(a.seed);
  const uint32_t unit = blockIdx.x * kWarps + static_cast<uint32_t>(warp);
  if (unit >= a.units) return;  // whole warps; blocks have no barrier
  const uint32_t rest = a.slabs.divide(unit), sample = a.pieces.divide(rest);
  const int from = static_cast<int>(unit - rest * a.slabs.divisor) * kSlab, channel = from + 4 * quad;
  const int first = static_cast<int>(rest - sample * a.pieces.divisor) * a.piece, last = min(first + a.piece, a.groups);
  const bool exists = channel < a.channels;
  const int64_t map = static_cast<int64_t>(sample) * a.channels + channel, pixels = static_cast<int64_t>(a.groups) * 8;
  const Rulers rulers(a.to, map, exists);
  const Folded norm(a.norm.with, channel, exists && then != Then::nothing);
  for (int g = first + lane / 8; g - lane / 8 < last; g += 4) {  // whole warps: lanes exchange bits
    const bool active = exists && g < last;
    const int64_t row = static_cast<int64_t>(sample) * pixels + g * 8, at = row * a.channels + channel;
    Quad<type> q[8], skip[8];
    read_line<type>({a.x, at, a.channels}, active ? 8 : 0, q);
    if constexpr (then == Then::add) read_line<type>({a.norm.skip, at, a.channels}, active ? 8 : 0, skip);
    if constexpr (then != Then::nothing) {
      uint32_t on = 0;
      if (active) {
        const Pixels<type> z(a.norm.z, at, a.channels);
#pragma unroll
        for (int j = 0; j < 8; ++j) on |= write_norm<type, then>(norm, q[j], skip[j], z, j) << (4 * j);
      }
      if constexpr (then != Then::norm) {
        on = turn_bits(on);
        if (g < last) write_bits(a.norm.mask, (row + quad) * a.channels + from, a.channels, min(kSlab, a.channels - from), on);
      }
    }
    if (!active) continue;
    const Means windows(a, g);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      store_codes<bits>(stage + (4 * quad + k) * kPitch, g - first, encode_group<bits, type>(a, q, k, {map, g}, windows, rulers, seed), 8);
    }
  }
  __syncwarp();
  put_piece<bits>(a, stage, kPitch, map - 4 * quad, min(kSlab, a.channels - from), first, last - first);
}

}  // namespace
}  // namespace slab

void low_pass_stream_encode(const LowPassParts& to, const void* x, DType type, const StreamNorm& norm, const uint64_t* seed,
                            StreamHandle stream) {
  using namespace slab;
  const int64_t groups = to.maps.map_values() / 8, pieces = ceil_div(groups, kPieceMost), slabs = ceil_div(to.channels, kSlab);
  const int64_t piece = ceil_div(ceil_div(groups, pieces), 4) * 4, needed = ceil_div(groups, piece);
  const int64_t units = to.maps.maps / to.channels * needed * slabs;
  if (units >= int64_t{1} << 31) fail("low_pass", "there must be less than 2^31 pieces of maps", units);
  const Encode a = {to,
                    norm,
                    x,
                    seed,
                    FastDivisor(static_cast<uint32_t>(to.maps.width)),
                    FastDivisor(static_cast<uint32_t>(slabs)),
                    FastDivisor(static_cast<uint32_t>(needed)),
                    static_cast<int>(to.channels),
                    static_cast<int>(ceil_div(to.maps.width, kWindow)),
                    static_cast<int>(to.maps.windows()),
                    static_cast<int>(groups),
                    static_cast<int>(piece),
                    static_cast<uint32_t>(units),
                    groups * to.code.levels.bits % 4 == 0};
  const LaunchSize size = {grid_size(ceil_div(units, kWarps)), kWarps * 32};
  with_type(type, [&](auto t) {
    with_then(norm, [&](auto then) {
      if constexpr (then() == Then::nothing)
        with_usual_bits(to.code.levels.bits,
                        [&](auto bits) { launch_kernel("low_pass", stream, size, encode_pieces<bits(), t(), then()>, a); });
      else
        launch_kernel("low_pass", stream, size, encode_pieces<2, t(), then()>, a);
    });
  });
}

}  // namespace satchel::cuda
