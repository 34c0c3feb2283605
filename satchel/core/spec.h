// CodecSpec: how one tensor is packed. A value: copied, compared, stored inside what it made.
// All published methods are presets of the same three steps: transform → block-quantise → keep.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "satchel/core/kinds.h"

namespace satchel {

/// Of Levels, in their order.
inline constexpr std::string_view kLevelNames[] = {"even", "optimal", "quantile"};
inline constexpr std::string_view kLevelChoices = "even, optimal or quantile";

struct Identity {
  bool operator==(const Identity&) const = default;
};

/// Z = H·P with P in {±1/√R}, R = columns/ratio rounded up; signs are redrawn from counters, never stored (theory.md 4).
struct RandomProjection {
  int ratio = 8;
  int64_t rows = 0;       // rows that share one matrix; 0: all of them, as in EXACT
  bool hadamard = false;  // random signs × Walsh–Hadamard × random columns instead of independent signs
  bool operator==(const RandomProjection&) const = default;
};

/// What is kept of the two frequencies; `low` and `high` alone are the ablation of the DIVISION paper.
enum class Part : uint8_t { both, low, high };

/// Averages over windows of size^k kept in bf16, the rest quantised (theory.md 6).
struct LowPass {
  int size = 8;
  Part part = Part::both;
  bool operator==(const LowPass&) const = default;
};

using Transform = std::variant<Identity, RandomProjection, LowPass>;

constexpr int64_t kRow = -1;                   // one row (last dimension, after projection); −k: k rows
constexpr int64_t kMap = -(int64_t{1} << 62);  // one feature map: all dimensions after the first two
constexpr int kKeep = 32;                      // bits = 32 keeps the transformed tensor as it is

struct CodecSpec {
  int bits = 2;             // 1..8, or kKeep
  int64_t block = 256;      // values sharing one header, or kRow, −k, kMap
  bool per_sample = false;  // blocks start anew with every sample (first dimension)
  Levels levels = Levels::optimal;
  Rounding rounding = Rounding::stochastic;
  HeaderType header = HeaderType::bf16;
  Side side = Side::none;
  Off off = Off::sampled;
  Transform transform = Identity{};
  bool operator==(const CodecSpec&) const = default;
};

/// Does the code have an off plane?
constexpr bool has_off_plane(const CodecSpec& spec) { return spec.side == Side::one_sided && spec.bits == 2 && spec.off == Off::sampled; }

struct Preset {
  std::string_view name;
  std::string_view summary;  // one line for help texts
  CodecSpec spec;
};

/// exact, blockwise, actnn, division, gact, satchel: in this order.
std::span<const Preset> presets();

/// "blockwise,bits=2,block=1024,project=8": a preset (or none: the defaults), then options. Throws on anything unknown.
/// Options: bits=1..8|32 · block=N|row|Nrows|map · sample=yes|no · levels=even|optimal|quantile · round=stochastic|nearest ·
/// header=bf16|f32 · side=none|one|relu|both · off=mean|sampled · project=RATIO|none · hadamard=yes|no · rows=N|all · lowpass=SIZE|none ·
/// part=both|low|high
CodecSpec parse_spec(std::string_view text);
/// The keys of its options.
std::vector<std::string_view> spec_option_names();

/// The shortest text that parse_spec turns back into this very spec: a preset's name and what differs from it.
std::string to_string(const CodecSpec& spec);

/// Throws `[op] rule, got value` unless every field is in its range and the fields fit each other.
void validate(const CodecSpec& spec, const char* op);

}  // namespace satchel
