// demo: one generated tensor, every preset, one table.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include "satchel/core/median.h"
#include "satchel/core/noise.h"
#include "satchel/tensor/pack.h"
#include "satchel/train/options.h"
#include "tools/quality.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

constexpr int64_t kRows = 16384, kColumns = 256;         // a hidden layer of a graph
constexpr int64_t kImages = 64, kMaps = 64, kSide = 32;  // as many values, as feature maps
constexpr int kRepeats = 7;
static_assert(kRows * kColumns == kImages * kMaps * kSide * kSide);

/// Standard normal, a pure function of the element.
float normal(uint64_t element) {
  const Words w = noise_group(20, Stream::seeds, element);
  const double u = (w.w[0] + 0.5) * 0x1p-32, v = (w.w[1] + 0.5) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
}

/// Normalised activations: standard normal; as feature maps, with a slow wave whose phase and height belong to the map.
std::vector<float> make_activations(bool maps) {
  std::vector<float> x(static_cast<size_t>(kRows * kColumns));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = normal(i);
    if (!maps) continue;
    const uint64_t map = i / (kSide * kSide);
    const double column = static_cast<double>(i % kSide), row = static_cast<double>(i / kSide % kSide);
    const double wave = std::sin((row + column) * 2.0 * std::numbers::pi / kSide + normal(x.size() + 2 * map));
    x[i] = static_cast<float>(0.6 * x[i] + 0.8 * (wave + 0.4 * normal(x.size() + 2 * map + 1)));
  }
  return x;
}

template <class Work>
double median_seconds(const std::string& device, const Work& work) {
  std::vector<double> seconds;
  for (int i = 0; i <= kRepeats; ++i) {
    wait_for(device);
    const auto start = std::chrono::steady_clock::now();
    work();
    wait_for(device);
    if (i > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return median(std::move(seconds));
}

void print_row(const Preset& preset, const at::Tensor& x, const std::string& device) {
  const Packed packed = pack(x, preset.spec, 1);
  const Quality q = quality_of(x, packed, unpack(packed));
  const bool one_sided = preset.spec.side == Side::one_sided || preset.spec.side == Side::relu;
  const double gigabytes = static_cast<double>(x.numel()) * 4e-9;
  const double encode = median_seconds(device, [&] { pack(x, preset.spec, 1); });
  const double decode = median_seconds(device, [&] { unpack(packed); });
  const int64_t bytes = saved_bytes(packed);
  fmt::print("{:<10} {:<44} {:>10} {:>6.1f}x {:>6.3f}{} {:>8.2f} {:>8.2f}\n", preset.name, describe(preset.spec), grouped(bytes),
             static_cast<double>(x.numel()) * 4 / static_cast<double>(bytes), one_sided ? q.on_relative : q.relative, one_sided ? '*' : ' ',
             gigabytes / encode, gigabytes / decode);
}

std::string block_text(int64_t block) {
  if (block == kMap) return "map";
  if (block == kRow) return "row";
  return block < 0 ? fmt::format("{}rows", -block) : std::to_string(block);
}

}  // namespace

std::string grouped(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string describe(const CodecSpec& spec) {
  std::string text = fmt::format("bits={}", spec.bits);
  if (const auto* p = std::get_if<RandomProjection>(&spec.transform)) {
    text =
        fmt::format("project={}{}{},", p->ratio, p->rows > 0 ? fmt::format(",rows={}", p->rows) : "", p->hadamard ? ",hadamard=yes" : "") +
        text;
  }
  if (const auto* p = std::get_if<LowPass>(&spec.transform)) text = fmt::format("lowpass={},", p->size) + text;
  if (spec.bits == kKeep) return text;
  text += fmt::format(",block={}{},levels={}", block_text(spec.block), spec.per_sample ? ",sample=yes" : "",
                      kLevelNames[static_cast<size_t>(spec.levels)]);
  if (spec.rounding == Rounding::nearest) text += ",round=nearest";
  if (spec.header == HeaderType::f32) text += ",header=f32";
  constexpr const char* kSides[] = {"", ",side=one", ",side=relu", ",side=both"};
  return text + kSides[static_cast<int>(spec.side)];
}

void run_demo(const std::string& device) {
  std::vector<float> rows = make_activations(false), maps = make_activations(true);
  const auto keep = [](void*) {};
  const at::Tensor matrix = to_device(tensor_over(rows.data(), {kRows, kColumns}, {kColumns, 1}, at::kFloat, keep), device, "demo");
  const at::Tensor images = to_device(
      tensor_over(maps.data(), {kImages, kMaps, kSide, kSide}, {kMaps * kSide * kSide, kSide * kSide, kSide, 1}, at::kFloat, keep), device,
      "demo");
  fmt::print(
      "Normalised activations, float32, {} × {} = {} bytes, packed and unpacked on {}\n\n", kRows, kColumns, grouped(kRows * kColumns * 4),
      names_cuda(device) ? gpu_name() : fmt::format("{} CPU thread{}", at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s"));
  fmt::print("{:<10} {:<44} {:>10} {:>7} {:>6}  {:>8} {:>8}\n", "", "", "", "times", "", "encode", "decode");
  fmt::print("{:<10} {:<44} {:>10} {:>7} {:>6}  {:>8} {:>8}\n", "preset", "spec", "bytes", "smaller", "error", "GB/s", "GB/s");
  for (const Preset& preset : presets())
    print_row(preset, std::holds_alternative<LowPass>(preset.spec.transform) ? images : matrix, device);
  fmt::print(
      "\nerror: ‖unpacked − x‖ / ‖x‖. It is noise without bias, so it averages out of gradients.\n"
      "       exact and blockwise keep 1 number of 8, so most of their error is the projection's.\n"
      "     * of the values that pass the ReLU; for the others the code keeps only that they do not.\n"
      "division: {} × {} maps of {} × {}, as many values. GB/s: of float32 values, median of {} runs.\n",
      kImages, kMaps, kSide, kSide, kRepeats);
}

}  // namespace satchel::tool
