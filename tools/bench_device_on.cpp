// The GPU: the launchers themselves on buffers that are allocated beforehand, timed by events. Copy and op take turns on one
// stream, so that both see the same clocks and the copy washes the op's data out of the second-level cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/kernels/cuda/cuda.h"
#include "tools/bench.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) fail("bench", std::string(what) + " must succeed", cudaGetErrorString(code));
}

/// Device memory.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "cudaMalloc");
  }
  Memory(const void* from, int64_t bytes) : Memory(bytes) {
    check(cudaMemcpy(data_, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "upload");
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  template <class T = uint8_t>
  std::vector<T> download() const {
    std::vector<T> host(static_cast<size_t>(bytes_) / sizeof(T));
    check(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() { check(cudaEventSynchronize(event_), "kernel"); }
  double since(const Event& start) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return ms * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

struct Bench {
  const Setup& s;
  const Report& report;
  cudaStream_t stream;
  const uint64_t* seed;  // on the device

  template <class Work>
  void time(const char* op, const Values& x, int bits, int64_t block, double rmse, const Work& work) const {
    if (!s.wants(op)) return;
    const Memory from(x.f32.data(), x.count() * 4), to(x.count() * 4);
    Event begin, copied, done;
    std::vector<double> own, copies;
    for (int i = -3; i < s.repeat; ++i) {
      begin.record(stream);
      check(cudaMemcpyAsync(to.as<void>(), from.as<void>(), static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToDevice, stream),
            "device copy");
      copied.record(stream);
      work();
      done.record(stream);
      done.wait();
      if (i < 0) continue;
      copies.push_back(copied.since(begin));
      own.push_back(done.since(copied));
    }
    report({"cuda", "cuda", op, bits, block, x.type, x.count(), median(own), median(copies), rmse});
  }
  void finish() const { check(cudaStreamSynchronize(stream), "kernel"); }
};

/// Codes and headers of one tensor on the device.
struct Bytes {
  Memory codes, headers;
  Bytes(const Grid& grid, int bits, HeaderType header)
      : codes(code_bytes(grid.values, bits)), headers(grid.blocks() * header_bytes(header)) {}
};

void bench_block(const Bench& b) {
  if (!b.s.wants("encode") && !b.s.wants("decode")) return;
  const BlockCode& code = b.s.block;
  const Values& x = *b.s.matrix;
  const Memory from(x.data(), x.bytes()), back(x.bytes());
  const Bytes to(code.grid, code.levels.bits, code.header);
  const auto encode = [&] { cuda::encode(code, from.as<void>(), x.type, b.seed, to.codes.as<uint8_t>(), to.headers.as<void>(), b.stream); };
  const auto decode = [&] { cuda::decode(code, to.codes.as<uint8_t>(), to.headers.as<void>(), back.as<void>(), x.type, b.stream); };
  encode();
  decode();
  b.finish();
  const auto codes = to.codes.download(), headers = to.headers.download(), values = back.download();
  const double rmse = check_code(code, {"cuda block code", x.source(), {values.data(), x.type}, b.s.seed, codes.data(), headers.data()});
  b.time("encode", x, code.levels.bits, code.grid.block, rmse, encode);
  b.time("decode", x, code.levels.bits, code.grid.block, rmse, decode);
}

void bench_side(const Bench& b) {
  if (!b.s.has_side || (!b.s.wants("side_encode") && !b.s.wants("side_decode"))) return;
  const SideCode& code = b.s.side;
  const Values& x = *b.s.matrix;
  const Memory from(x.data(), x.bytes()), back(x.bytes()), scratch(cuda::side_scratch_bytes(code));
  const Memory channels(b.s.channels.data(), static_cast<int64_t>(b.s.channels.size() * sizeof(Channel)));
  const Bytes to(code.grid, code.table.bits, code.header);
  const auto encode = [&] {
    cuda::side_encode(code, from.as<void>(), x.type, channels.as<Channel>(), b.seed, to.codes.as<uint8_t>(), to.headers.as<void>(),
                      scratch.as<void>(), b.stream);
  };
  const auto decode = [&] {
    cuda::side_decode(code, to.codes.as<uint8_t>(), channels.as<Channel>(), to.headers.as<void>(), back.as<void>(), x.type, b.stream);
  };
  encode();
  decode();
  b.finish();
  const auto codes = to.codes.download(), headers = to.headers.download(), values = back.download();
  const auto own = channels.download<Channel>();
  const double rmse =
      check_code(code, {"cuda side code", x.source(), {values.data(), x.type}, b.s.seed, codes.data(), headers.data(), own.data()});
  check_off_means("cuda side code", code, x.source(), own);
  b.time("side_encode", x, code.table.bits, code.grid.block, rmse, encode);
  b.time("side_decode", x, code.table.bits, code.grid.block, rmse, decode);
}

void bench_projection(const Bench& b) {
  if (!b.s.wants("project_encode")) return;
  const Projection& p = b.s.projection;
  const BlockCode& code = b.s.projected;
  const Values& x = *b.s.matrix;
  const Memory from(x.data(), x.bytes()), z(code.grid.values * 4), back(code.grid.values * 4);
  const Bytes to(code.grid, code.levels.bits, code.header);
  const auto encode = [&] {
    cuda::project_encode(p, code, from.as<void>(), x.type, b.seed, to.codes.as<uint8_t>(), to.headers.as<void>(), z.as<void>(), b.stream);
  };
  encode();
  cuda::project(p, from.as<void>(), x.type, b.seed, z.as<float>(), b.stream);  // for the check: the fused kernel keeps no Z
  cuda::decode(code, to.codes.as<uint8_t>(), to.headers.as<void>(), back.as<void>(), DType::f32, b.stream);
  b.finish();
  const auto values = z.download<float>(), decoded = back.download<float>();
  const auto codes = to.codes.download(), headers = to.headers.download();
  check_projection("cuda projection", p, x.source(), b.s.seed, values.data());
  const double error = check_code(
      code, {"cuda projection", {values.data(), DType::f32}, {decoded.data(), DType::f32}, b.s.seed, codes.data(), headers.data()});
  b.time("project_encode", x, code.levels.bits, code.grid.block, error / root_mean_square(values), encode);
}

void bench_low_pass(const Bench& b) {
  if (!b.s.wants("lowpass_encode") && !b.s.wants("lowpass_decode")) return;
  const LowPassShape& maps = b.s.maps;
  const BlockCode& code = b.s.rest;
  const Values& x = *b.s.images;
  const Memory from(x.data(), x.bytes()), back(x.bytes()), means(maps.maps * maps.windows() * 2),
      scratch(cuda::low_pass_scratch_bytes(maps, code, from.as<void>()));
  const Bytes to(code.grid, code.levels.bits, code.header);
  const auto encode = [&] {
    cuda::low_pass_encode(maps, code, from.as<void>(), x.type, b.seed, to.codes.as<uint8_t>(), to.headers.as<void>(), means.as<uint16_t>(),
                          scratch.as<void>(), b.stream);
  };
  const auto decode = [&] {
    cuda::low_pass_decode(maps, code, to.codes.as<uint8_t>(), to.headers.as<void>(), means.as<uint16_t>(), back.as<void>(), x.type,
                          b.stream);
  };
  encode();
  decode();
  b.finish();
  const auto codes = to.codes.download(), headers = to.headers.download(), values = back.download();
  const auto averages = means.download<uint16_t>();
  const double rmse = check_low_pass(
      maps, code, {"cuda low-pass", x.source(), {values.data(), x.type}, b.s.seed, codes.data(), headers.data()}, averages.data());
  b.time("lowpass_encode", x, code.levels.bits, code.grid.block, rmse, encode);
  b.time("lowpass_decode", x, code.levels.bits, code.grid.block, rmse, decode);
}

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

}  // namespace

std::string gpu_name() {
  cudaDeviceProp properties;
  int device = 0;
  if (!has_gpu() || cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "";
  return properties.name;
}

void bench_device(const Setup& setup, const Report& report) {
  if (!has_gpu()) fail("bench", "--device cuda needs a GPU", "none");
  const Memory seed(&setup.seed, sizeof setup.seed);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const Bench bench{setup, report, stream, seed.as<uint64_t>()};
  bench_block(bench);
  bench_projection(bench);
  bench_low_pass(bench);
  bench_side(bench);
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace satchel::tool
