// CodecSpec: how one tensor is packed. A value: copied, compared, stored inside what it made.
// All published methods are presets of the same three steps: transform → block-quantise → keep.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace satchel {

/// Where a block's codes sit. A family of levels is a name here and a row of functions in core/levels.cpp.
enum class Levels : uint8_t { even, optimal, quantile };
inline constexpr std::string_view kLevelNames[] = {"even", "optimal", "quantile"};
inline constexpr std::string_view kLevelChoices = "even, optimal or quantile";
enum class Rounding : uint8_t { stochastic, nearest };
enum class HeaderType : uint8_t { bf16, f32 };

/// Which values get levels (theory.md 10). `none` is the plain block code.
///   one_sided  the side of the threshold that passes gradients gets levels, the other one or two codes (2 or 3 bits)
///   relu       one_sided at threshold 0 for values that are zero or positive: code 0 is exactly 0 (2 or 3 bits)
///   both       side bit + levels on the value's own side, unbiased everywhere (2 to 4 bits)
enum class Side : uint8_t { none, one_sided, relu, both };

/// What a one-sided code of 2 bits, whose off side has a single code, knows of the values that the ReLU turns off. Read by no other code.
///   mean     they all decode to their channel's mean: a norm before the ReLU gets a biased gradient
///   sampled  one block of 8 has one bit more a value (core/off_plane.h): right on average, 1/8 bit a value
enum class Off : uint8_t { mean, sampled };

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
