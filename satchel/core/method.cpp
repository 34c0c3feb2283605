#include "satchel/core/method.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/levels.h"
#include "satchel/core/spec_limits.h"

namespace satchel {
namespace {

Method fp32() {
  Method m;
  m.name = "fp32";
  m.torch_baseline = true;
  m.input.bits = m.norm.bits = kKeep;
  m.shared = false;
  return m;
}

/// As the papers do it: x and A·x, norm inputs and both masks, each by itself, the data's features among them.
Method published(std::string name, int64_t block, Levels levels) {
  Method m;
  m.name = std::move(name);
  m.input = parse_spec(m.name);
  m.norm.block = block;
  m.norm.levels = levels;
  m.longest_block = 1024;
  m.shared = false;
  m.keeps_aggregate = m.packs_data = m.keeps_dropout = true;
  return m;
}

Method projection() {
  Method m;
  m.name = "projection";
  m.input = parse_spec("project=8,rows=64,bits=32");
  m.norm.bits = kKeep;
  m.shared = false;
  return m;
}

/// As the papers on images do it: inputs of layers, norm inputs and masks, each by itself.
Method by_layer(std::string name, std::string_view spec, bool adaptive) {
  Method m;
  m.name = std::move(name);
  m.input = m.norm = parse_spec(spec);
  m.shared = false;
  m.keeps_dropout = true;
  m.adaptive = adaptive;
  return m;
}

Method shared() {
  Method m;
  m.name = "satchel";
  m.norm = parse_spec("satchel");
  return m;
}

bool has_side(const Method& method) { return method.norm.side != Side::none; }

/// Sign and value of what passes gradients on both sides. Five bits and more have no such code: a mask stands beside them.
void code_both_sides(CodecSpec& spec) {
  if (spec.bits > 4) return;
  spec.side = Side::both;
  spec.bits = std::min(spec.bits + 1, 4);
  if (!std::holds_alternative<Identity>(spec.transform)) spec.transform = Identity{};
  if (spec.block == kMap) spec.block = CodecSpec{}.block;
}

constexpr int64_t kFewestSampled = 4096;  // below, one draw of the off plane is noisier than the bias it takes away

/// The next code of less variance: one_sided 2 → one_sided 3 → both 4 → 5 … 8 with a mask; both and none likewise.
void widen(CodecSpec& spec) {
  if (spec.side == Side::one_sided && spec.bits == 3) spec.side = Side::both;
  ++spec.bits;
  if (spec.bits > 4) spec.side = Side::none;
}

/// Bits that a norm of so many values takes where the gradient of x reads its code.
/// `by_row`: statistics of rows or groups, whose codes have the same variance everywhere: no one-sided ones of 3 bits.
void widen_for(CodecSpec& spec, const Method& method, int64_t count, bool by_row) {
  const bool told = method.mean > 0 || method.budget > 0;  // how many bits there are in all
  if (!method.shared || method.norm_bias == 0 || count == 0 || told) return;
  if (has_off_plane(spec) && count < kFewestSampled) widen(spec);
  if (by_row && spec.side == Side::one_sided && spec.bits == 3) widen(spec);
  while (spec.bits < 8 && norm_bias(spec, count) > method.norm_bias) widen(spec);
}

}  // namespace

std::span<const MethodPreset> method_presets() {
  static const std::vector<MethodPreset> kPresets = {
      {"fp32", "torch's own functions and saves", fp32()},
      {"exact", "EXACT: x and A·x projected 8:1 in 2 bits, norm inputs in 2 bits, blocks of a row, two masks",
       published("exact", kRow, Levels::even)},
      {"blockwise", "the block-wise paper: the same in blocks of 64 rows with optimal levels",
       published("blockwise", -64, Levels::optimal)},
      {"projection", "inputs projected 8:1, a fresh matrix every 64 rows, in full precision", projection()},
      {"actnn", "ActNN: inputs of layers and norms in 2 bits by 256 values, allocated by sample and layer (images, or adaptive=no)",
       by_layer("actnn", "actnn", true)},
      {"division", "DIVISION: low frequencies in bf16, the rest in 2 bits by feature map (images)",
       by_layer("division", "division", false)},
      {"int8", "inputs of layers and norms in 8 bits by 256 values: next to exact, 4 times less than float32",
       by_layer("int8", "bits=8,block=256,levels=even", false)},
      {"satchel", "one shared save a layer, one-sided code, 2 bits in all", shared()},
  };
  return kPresets;
}

double norm_bias(const CodecSpec& spec, int64_t count) {
  if (spec.bits == kKeep) return 0;
  // Layers ask at every forward, and a variance costs a search over levels.
  thread_local std::map<std::tuple<int, Side, Levels, int64_t>, double> known;
  CodecSpec code = spec;
  code.transform = Identity{};
  code.block = spec.block > 0 ? spec.block : CodecSpec{}.block;  // a map's size is not known here
  const std::tuple key(code.bits, code.side, code.levels, code.block);
  auto found = known.find(key);
  if (found == known.end()) {
    if (known.size() >= 1024) known.clear();
    found = known.emplace(key, code_variance(code)).first;
  }
  return found->second / static_cast<double>(count);
}

CodecSpec norm_spec(const Method& method, int64_t width, int64_t count) {
  if (width < 1) fail("method", "a norm's rows must have 1 value or more", width);
  CodecSpec spec = method.norm;
  spec.side = Side::none;
  if (method.residual > 0) spec.bits = method.residual;
  if (spec.block < 0 && spec.block != kMap) {
    const int64_t rows = -spec.block;
    spec.block = rows > kMostBlock / width ? kMostBlock : rows * width;
    if (method.longest_block > 0) spec.block = std::min(spec.block, method.longest_block);
  }
  if (method.residual == 0) widen_for(spec, method, count, false);
  return spec;
}

CodecSpec shared_spec(const Method& method, Norm norm, Activation activation, int64_t width, int64_t count) {
  CodecSpec spec = norm_spec(method, width, 0);
  spec.bits = method.norm.bits;
  if (norm == Norm::none) count = 0;
  const bool side = method.shared && has_side(method);
  if (spec.bits == kKeep) return spec;
  if (activation == Activation::relu && side) {
    spec.side = norm == Norm::none ? Side::relu : method.norm.side;
    if (spec.side == Side::relu) spec.bits = std::min(spec.bits, 3);
  }
  if (activation == Activation::leaky_relu && side) code_both_sides(spec);
  if (activation == Activation::elu && (side || !method.shared)) code_both_sides(spec);
  if (count == 0 && spec.side == Side::one_sided) spec.off = Off::mean;
  widen_for(spec, method, count, norm == Norm::layer);
  return spec;
}

bool allocates_bits(const Method& method) { return !method.torch_baseline && (method.adaptive || method.mean > 0 || method.budget > 0); }

int64_t samples_of_three(double mean, int64_t samples) {
  // A mean that is a whole number of samples may stand a rounding below it.
  const double count = std::floor((mean - 2) * static_cast<double>(samples) * (1 + 0x1p-40));
  return count > 0 ? std::min(static_cast<int64_t>(count), samples) : 0;
}

void validate(const Method& method, const char* op) {
  validate(method.input, op);
  validate(method.norm, op);
  const bool projected = std::holds_alternative<RandomProjection>(method.input.transform);
  if (method.input.side != Side::none) fail(op, "inputs of layers take no side code", to_string(method.input));
  if (std::holds_alternative<RandomProjection>(method.norm.transform)) fail(op, "norms take no projection", to_string(method.norm));
  if (method.shared && !std::holds_alternative<Identity>(method.norm.transform)) {
    fail(op, "shared saves take no transform", to_string(method.norm));
  }
  if (method.norm.side == Side::relu) fail(op, "side must be none, one or both; relu comes by itself without a norm", "relu");
  if (method.longest_block < 0 || method.longest_block > kMostBlock) {
    fail(op, "longest_block must be 1 to 2^40, or 0 for any", method.longest_block);
  }
  if (method.torch_baseline) return;
  if (method.derivative < 0 || method.derivative > 8) {
    fail(op, "a derivative must have 1 to 8 bits, or 0 for those that go with the norm's", method.derivative);
  }
  if (!(method.norm_bias >= 0 && method.norm_bias <= 1)) fail(op, "norm_bias must be 0 to 1", method.norm_bias);
  if (method.mean != 0 && !(method.mean >= 2 && method.mean <= 3)) fail(op, "mean must be 2 to 3", method.mean);
  if (method.budget < 0) fail(op, "budget must be 1 byte or more, or 0 for none", method.budget);
  if (method.mean > 0 && method.budget > 0)
    fail(op, "mean and budget exclude each other", "a budget of " + std::to_string(method.budget) + " beside a mean");
  if ((method.mean > 0 || method.budget > 0) && !(method.shared && method.norm.side == Side::one_sided && method.norm.bits == 2)) {
    fail(op, "mean and budget need shared saves in one-sided codes of 2 bits", to_string(method.norm));
  }
  if (method.swap && !method.adaptive) fail(op, "swapping needs bits per sample (adaptive=yes)", method.name);
  if (!method.shared && has_side(method)) fail(op, "side codes need shared saves", to_string(method.norm));
  if (method.shared && projected) fail(op, "shared saves take no projection", to_string(method.input));
  if (method.shared && method.keeps_aggregate) fail(op, "shared saves keep no aggregate", method.name);
}

void validate_for_graph(const Method& method, const char* op) {
  validate(method, op);
  for (const CodecSpec* spec : {&method.input, &method.norm}) {
    if (std::holds_alternative<LowPass>(spec->transform)) fail(op, "a low-pass does not fit a graph layer", "'" + method.name + "'");
  }
  if (method.swap) fail(op, "swapping is for image models", "'" + method.name + "'");
  if (method.mean > 0 || method.budget > 0) fail(op, "mean and budget are for image models", "'" + method.name + "'");
}

}  // namespace satchel
