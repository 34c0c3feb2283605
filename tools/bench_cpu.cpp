// One core: the kernels themselves, chunk by chunk as pack() goes, in buffers that are allocated and touched beforehand.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstring>

#include "satchel/core/median.h"
#include "satchel/kernels/chunks.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/project.h"
#include "tools/bench.h"

namespace satchel::tool {
namespace {

constexpr int64_t kCaches = int64_t{32} << 20;  // bytes above which unpack() writes past the caches, and so does what is timed here

class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

template <class Work>
double seconds_of(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Times ops of one kernel and turns them into results.
struct Bench {
  const CpuKernels& k;
  const Setup& s;
  const Report& report;

  /// Medians of `work` and of memcpy of the float32 values, taken in turn after one run of each that does not count.
  template <class Work>
  void time(const char* op, const Values& x, int bits, int64_t block, double rmse, const Work& work) const {
    if (!s.wants(op)) return;
    Aligned<float> copy(x.f32.size(), 1.0f);
    std::vector<double> own, copies;
    for (int i = 0; i <= s.repeat; ++i) {
      const double c = seconds_of([&] { std::memcpy(copy.data(), x.f32.data(), x.f32.size() * 4); });
      const double w = seconds_of(work);
      if (i == 0) continue;
      copies.push_back(c);
      own.push_back(w);
    }
    report({"cpu", k.name, op, bits, block, x.type, x.count(), median(own), median(copies), rmse});
  }
};

void encode_blocks(const CpuKernels& k, const BlockCode& code, Source x, uint64_t seed, void* headers, uint8_t* codes) {
  encode_in_chunks(
      code.grid, [&](int64_t first, int64_t last) { k.measure(code, x, headers, first, last); },
      [&](int64_t first, int64_t last) { k.encode(code, x, seed, headers, codes, first, last); });
}

/// Codes and headers of one tensor; touched by their construction.
struct Bytes {
  std::vector<uint8_t> codes, headers;
  Bytes(const Grid& grid, int bits, HeaderType header)
      : codes(static_cast<size_t>(code_bytes(grid.values, bits)) + 64),
        headers(static_cast<size_t>(grid.blocks() * header_bytes(header)) + 64) {}
};

void bench_block(const Bench& b) {
  if (!b.s.wants("encode") && !b.s.wants("decode")) return;
  const BlockCode& code = b.s.block;
  const Values& x = *b.s.matrix;
  Bytes to(code.grid, code.levels.bits, code.header);
  Aligned<uint8_t> room(static_cast<size_t>(x.bytes()));
  uint8_t* back = room.data();
  const auto encode = [&] { encode_blocks(b.k, code, x.source(), b.s.seed, to.headers.data(), to.codes.data()); };
  const auto decode = [&] {
    for_chunks(x.count(), kChunk, [&](int64_t first, int64_t last) {
      b.k.decode(code, to.codes.data(), to.headers.data(), {back, x.type, 0, x.bytes() > kCaches}, first, last);
    });
  };
  encode();
  decode();
  const double rmse =
      check_code(code, {std::string(b.k.name) + " block code", x.source(), {back, x.type}, b.s.seed, to.codes.data(), to.headers.data()});
  b.time("encode", x, code.levels.bits, code.grid.block, rmse, encode);
  b.time("decode", x, code.levels.bits, code.grid.block, rmse, decode);
}

void bench_side(const Bench& b) {
  if (!b.s.has_side || (!b.s.wants("side_encode") && !b.s.wants("side_decode"))) return;
  const SideCode& code = b.s.side;
  const Values& x = *b.s.matrix;
  std::vector<Channel> channels = b.s.channels;
  Bytes to(code.grid, code.table.bits, code.header);
  Aligned<uint8_t> back(static_cast<size_t>(x.bytes()));
  std::vector<double> sums(channels.size() * 2);
  const auto encode = [&] {
    std::fill(sums.begin(), sums.end(), 0.0);
    encode_in_chunks(
        code.grid, [&](int64_t first, int64_t last) { b.k.side_measure(code, x.source(), to.headers.data(), first, last); },
        [&](int64_t first, int64_t last) {
          b.k.side_encode(code, x.source(), channels.data(), b.s.seed, to.headers.data(), to.codes.data(), first, last);
          if (code.table.off == 1) b.k.off_sums(code, x.source(), channels.data(), sums.data(), first, last);
        });
    if (code.table.off == 1) set_off_means(channels, sums);
  };
  const auto decode = [&] {
    for_chunks(x.count(), kChunk, [&](int64_t first, int64_t last) {
      b.k.side_decode(code, to.codes.data(), channels.data(), to.headers.data(), {back.data(), x.type, 0, x.bytes() > kCaches}, first,
                      last);
    });
  };
  encode();
  decode();
  const double rmse = check_code(code, {std::string(b.k.name) + " side code",
                                        x.source(),
                                        {back.data(), x.type},
                                        b.s.seed,
                                        to.codes.data(),
                                        to.headers.data(),
                                        channels.data()});
  b.time("side_encode", x, code.table.bits, code.grid.block, rmse, encode);
  b.time("side_decode", x, code.table.bits, code.grid.block, rmse, decode);
}

void bench_projection(const Bench& b) {
  if (!b.s.wants("project_encode")) return;
  const Projection& p = b.s.projection;
  const BlockCode& code = b.s.projected;
  const Values& x = *b.s.matrix;
  const at::ScalarType type = x.type == DType::f32 ? at::kFloat : x.type == DType::f16 ? at::kHalf : at::kBFloat16;
  const at::Tensor h = at::from_blob(const_cast<void*>(x.data()), {p.rows, p.columns}, at::TensorOptions().dtype(type));
  const at::Tensor seed = seed_tensor(b.s.seed, at::kCPU);
  Bytes to(code.grid, code.levels.bits, code.header);
  at::Tensor z;
  const auto encode = [&] {
    z = apply_projection(h, RandomProjection{kRatio, 0, false}, seed);
    encode_blocks(b.k, code, {z.const_data_ptr(), DType::f32}, b.s.seed, to.headers.data(), to.codes.data());
  };
  encode();
  std::vector<float> back(static_cast<size_t>(code.grid.values));
  b.k.decode(code, to.codes.data(), to.headers.data(), {back.data(), DType::f32}, 0, code.grid.values);
  const std::string who = std::string(b.k.name) + " projection";
  const float* values = z.const_data_ptr<float>();
  check_projection(who, p, x.source(), b.s.seed, values);
  const double error =
      check_code(code, {who, {values, DType::f32}, {back.data(), DType::f32}, b.s.seed, to.codes.data(), to.headers.data()});
  const double rmse = error / root_mean_square({values, values + code.grid.values});
  b.time("project_encode", x, code.levels.bits, code.grid.block, rmse, encode);
}

void bench_low_pass(const Bench& b) {
  if (!b.s.wants("lowpass_encode") && !b.s.wants("lowpass_decode")) return;
  const LowPassShape& maps = b.s.maps;
  const BlockCode& code = b.s.rest;
  const Values& x = *b.s.images;
  Bytes to(code.grid, code.levels.bits, code.header);
  std::vector<uint16_t> means(static_cast<size_t>(maps.maps * maps.windows()));
  std::vector<uint8_t> back(static_cast<size_t>(x.bytes()));
  std::vector<float> rest(static_cast<size_t>(maps.map_values()));
  const int64_t size = maps.map_values();
  const auto encode = [&] {
    for (int64_t m = 0; m < maps.maps; ++m) {
      b.k.low_pass_split(maps, x.source(), means.data(), rest.data(), m, m + 1);
      const Source from{rest.data(), DType::f32, m * size};
      b.k.measure(code, from, to.headers.data(), m, m + 1);
      b.k.encode(code, from, b.s.seed, to.headers.data(), to.codes.data(), m * size, (m + 1) * size);
    }
  };
  const auto decode = [&] {
    for (int64_t m = 0; m < maps.maps; ++m) {
      b.k.decode(code, to.codes.data(), to.headers.data(), {rest.data(), DType::f32, m * size}, m * size, (m + 1) * size);
      b.k.low_pass_join(maps, means.data(), rest.data(), {back.data(), x.type}, m, m + 1);
    }
  };
  encode();
  decode();
  const double rmse = check_low_pass(
      maps, code, {std::string(b.k.name) + " low-pass", x.source(), {back.data(), x.type}, b.s.seed, to.codes.data(), to.headers.data()},
      means.data());
  b.time("lowpass_encode", x, code.levels.bits, code.grid.block, rmse, encode);
  b.time("lowpass_decode", x, code.levels.bits, code.grid.block, rmse, decode);
}

}  // namespace

void bench_cpu(const CpuKernels& kernels, const Setup& setup, const Report& report) {
  const OneThread one;
  const Bench bench{kernels, setup, report};
  bench_block(bench);
  bench_projection(bench);
  bench_low_pass(bench);
  bench_side(bench);
}

}  // namespace satchel::tool
