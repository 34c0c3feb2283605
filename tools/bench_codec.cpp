// bench codec: builds what is run, prints the table, writes the JSON.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numbers>

#include "satchel/core/error.h"
#include "satchel/core/levels.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/train/options.h"
#include "tools/bench.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kMostValues = int64_t{1} << 34;
constexpr int64_t kMostEntries = int64_t{1} << 28;  // of a projection matrix, as pack() has it

/// Threshold, γ and β of a trained norm: γ around 1, β around 0.
std::vector<Channel> make_channels(int64_t count, uint64_t seed) {
  std::vector<Channel> channels;
  for (int64_t c = 0; c < count; ++c) {
    const Words w = noise_group(seed, Stream::seeds, static_cast<uint64_t>(c));
    const float gamma = 0.5f + static_cast<float>(w.w[0]) * 0x1p-32f, beta = 0.2f * (static_cast<float>(w.w[1]) * 0x1p-32f - 0.5f);
    channels.push_back({-beta / gamma, gamma, beta, 0.0f});
  }
  return channels;
}

BlockCode block_code(int64_t values, int64_t block, int bits, Levels levels) {
  const Grid grid{values, std::clamp<int64_t>(values, 1, block), values};
  return {grid, HeaderType::bf16, Rounding::stochastic, level_table(bits, levels, grid.block)};
}

Setup make_setup(const BenchOptions& o, const Values& matrix, const Values& images) {
  const Levels levels = parse_spec("levels=" + o.levels).levels;
  Setup s;
  s.op = o.op;
  s.matrix = &matrix;
  s.images = &images;
  s.has_side = o.bits == 2 || o.bits == 3;
  if (!s.has_side && o.op.starts_with("side"))
    throw UsageError("[bench] the one-sided code has 2 or 3 bits, got " + std::to_string(o.bits));
  s.block = block_code(matrix.count(), o.block, o.bits, levels);
  if (s.has_side)
    s.side = {s.block.grid,
              HeaderType::bf16,
              Rounding::stochastic,
              side_table(o.bits, Side::one_sided, levels, s.block.grid.block),
              o.columns,
              1};
  s.channels = make_channels(o.columns, 3);
  const int width = static_cast<int>(ceil_div(o.columns, kRatio));
  s.projection = {o.rows, static_cast<int>(o.columns), width, o.rows, false};
  s.projected = block_code(o.rows * width, o.block, o.bits, levels);
  s.maps = {images.count() / (kMapSide * kMapSide), 1, kMapSide, kMapSide, 8};
  s.rest = block_code(images.count(), kMapSide * kMapSide, o.bits, Levels::even);
  return s;
}

/// Rows of the table as they come, results for the JSON.
class Table {
 public:
  explicit Table(bool silent) : silent_(silent) {}

  void title(const BenchOptions& o, const std::string& device) const {
    if (silent_) return;
    fmt::print("{} × {} {}, {} bits, block {}, {} levels; low-pass: {} × 64 × 56 × 56, block a map, even levels\n{}\n\n", o.rows, o.columns,
               o.dtype, o.bits, o.block, o.levels, o.images, device);
    fmt::print("{:<8} {:<15} {:>4} {:>6} {:>5} {:>10} {:>8} {:>6} {:>8}\n", "kernel", "op", "bits", "block", "dtype", "ms", "GB/s", "share",
               "rmse");
  }

  void add(const Result& r) {
    results_.push_back(r);
    if (silent_) return;
    const double gigabytes = static_cast<double>(r.values * size_of(r.dtype)) * 1e-9;
    fmt::print("{:<8} {:<15} {:>4} {:>6} {:>5} {:>10.4f} {:>8.1f} {:>6.2f} {:>8.4f}\n", r.kernel, r.op, r.bits, r.block, name_of(r.dtype),
               r.seconds * 1e3, gigabytes / r.seconds, r.share(), r.rmse);
    std::fflush(stdout);
  }

  void close(const std::string& device) const {
    if (silent_) return;
    for (const Result& r : results_) {
      if (r.device != device) continue;
      fmt::print("{:<8} {:<15} {:>4} {:>6} {:>5} {:>10.4f} {:>8.1f} {:>6.2f}   of float32, beside {}\n\n", "copy", "", "", "", "f32",
                 r.copy_seconds * 1e3, static_cast<double>(r.values) * 4e-9 / r.copy_seconds, 1.0, r.op);
      return;
    }
  }

  ordered_json json(const BenchOptions& o) const {
    ordered_json list = ordered_json::array();
    for (const Result& r : results_) {
      list.push_back({{"kernel", r.kernel},
                      {"op", r.op},
                      {"bits", r.bits},
                      {"block", r.block},
                      {"dtype", name_of(r.dtype)},
                      {"values", r.values},
                      {"seconds", r.seconds},
                      {"share", r.share()},
                      {"rmse", r.rmse},
                      {"device", r.device},
                      {"copy_seconds", r.copy_seconds},
                      {"levels", r.op.starts_with("lowpass") ? "even" : o.levels}});
    }
    return {{"copy_seconds", results_.empty() ? ordered_json(nullptr) : ordered_json(results_.front().copy_seconds)}, {"results", list}};
  }

 private:
  bool silent_;
  std::vector<Result> results_;
};

std::vector<const CpuKernels*> chosen_kernels(const std::string& name) {
  if (name == "best") return {&best_cpu_kernel()};
  std::vector<const CpuKernels*> chosen;
  for (const CpuKernels* k : cpu_kernels()) {
    if (name == "all" && k->supported()) chosen.push_back(k);
  }
  if (name == "all") return chosen;
  try {
    return {&cpu_kernel(name)};
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

void run_device(BenchOptions o, bool on_gpu, Table& table) {
  const DType type = o.dtype == "f32" ? DType::f32 : o.dtype == "f16" ? DType::f16 : DType::bf16;
  const bool low_pass = o.op == "all" || o.op.starts_with("lowpass");
  if (o.quick) o.rows = std::min<int64_t>(o.rows, 16384);
  if (o.images == 0) o.images = o.quick ? 8 : on_gpu ? 256 : 64;
  if (o.repeat == 0) o.repeat = on_gpu ? (o.quick ? 30 : 50) : (o.quick ? 3 : 9);
  const Values matrix = make_values(o.rows * o.columns, type, 11);
  const Values images = make_values(low_pass ? o.images * kMapsPerImage * kMapSide * kMapSide : 0, type, 12);
  Setup setup = make_setup(o, matrix, images);
  setup.repeat = o.repeat;
  table.title(o, on_gpu ? gpu_name() : "one CPU core");
  const Report report = [&](const Result& r) { table.add(r); };
  if (on_gpu) {
    bench_device(setup, report);
  } else {
    for (const CpuKernels* k : chosen_kernels(o.kernel)) bench_cpu(*k, setup, report);
  }
  table.close(on_gpu ? "cuda" : "cpu");
}

}  // namespace

Values make_values(int64_t count, DType type, uint64_t seed) {
  Values v;
  v.type = type;
  v.f32.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i += 4) {
    const Words w = noise_group(seed, Stream::seeds, static_cast<uint64_t>(i / 4));
    for (int64_t j = 0; j < 4 && i + j < count; ++j) {  // Box–Muller, two normals from two words
      const size_t pair = static_cast<size_t>(j & ~int64_t{1});
      const float radius = std::sqrt(-2.0f * std::log((static_cast<float>(w.w[pair] >> 8) + 0.5f) * 0x1p-24f));
      const float angle = static_cast<float>(w.w[pair + 1] >> 8) * (0x1p-24f * 2 * std::numbers::pi_v<float>);
      v.f32[static_cast<size_t>(i + j)] = radius * (j % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
  }
  if (type == DType::f32) return v;
  v.half.resize(v.f32.size());
  for (int64_t i = 0; i < count; ++i) store(v.half.data(), type, i, v.f32[static_cast<size_t>(i)]);
  return v;
}

void run_bench_codec(const BenchOptions& asked) {
  BenchOptions options = asked;
  const bool on_gpu = options.device != "cpu";
  if (options.bits > 4) options.levels = "even";  // no others exist
  chosen_kernels(options.kernel);
  if (options.rows * options.columns > kMostValues)
    throw UsageError("[bench] rows × columns must be at most 2^34, got " + std::to_string(options.rows * options.columns));
  const int64_t entries = options.columns * ceil_div(options.columns, kRatio);
  if ((options.op == "all" || options.op == "project_encode") && entries > kMostEntries)
    throw UsageError("[bench] a projection matrix may have at most 2^28 entries: take fewer columns or another --op, got " +
                     std::to_string(options.columns) + " columns");
  if (!options.json.empty() && options.json != "-") check_output(options.json, "bench");
  if (on_gpu && !cuda::compiled()) fail("bench", "--device cuda needs a build with CUDA", "a build without");
  if (on_gpu && gpu_name().empty()) fail("bench", "--device cuda needs a GPU", "none");
  if (on_gpu) use_device(options.device == "all" ? "cuda" : options.device, "bench");
  Table table(options.json == "-");
  if (!names_cuda(options.device)) run_device(options, false, table);
  if (on_gpu) run_device(options, true, table);
  if (!options.json.empty()) write_json(options.json, table.json(options), "bench");
}

}  // namespace satchel::tool
