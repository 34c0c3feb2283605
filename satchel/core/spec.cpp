#include "satchel/core/spec.h"

#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <vector>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // values or rows of a block: no memory holds more
constexpr int kMostScale = 1 << 20;          // projection ratio, low-pass window

constexpr CodecSpec make(int bits, int64_t block, Levels levels, Transform transform = Identity{}) {
  CodecSpec spec;
  spec.bits = bits;
  spec.block = block;
  spec.levels = levels;
  spec.transform = transform;
  return spec;
}

constexpr CodecSpec actnn() {
  CodecSpec spec = make(2, 256, Levels::even);
  spec.per_sample = true;
  return spec;
}

constexpr CodecSpec one_sided() {
  CodecSpec spec = make(2, 256, Levels::optimal);
  spec.side = Side::one_sided;
  return spec;
}

constexpr Preset kPresets[] = {
    {"exact", "random projection 8:1, 2 bits, one block a row", make(2, kRow, Levels::even, RandomProjection{})},
    {"blockwise", "random projection 8:1, 2 bits, blocks of 64 rows, optimal levels", make(2, -64, Levels::optimal, RandomProjection{})},
    {"actnn", "2 bits, blocks of 256 values of one sample", actnn()},
    {"division", "averages over 8x8 in bf16, the rest in 2 bits, one block a map", make(2, kMap, Levels::even, LowPass{})},
    {"gact", "4 bits, blocks of 256 values", make(4, 256, Levels::even)},
    {"satchel", "one-sided code, 2 bits in all, blocks of 256 values", one_sided()},
};

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == text.npos ? std::string_view{} : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::optional<int64_t> number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// An integer from least to most.
std::optional<int64_t> number_within(std::string_view text, int64_t least, int64_t most) {
  const std::optional<int64_t> value = number(text);
  return value && *value >= least && *value <= most ? value : std::nullopt;
}

std::optional<int64_t> parse_block(std::string_view text) {
  if (text == "row") return kRow;
  if (text == "map") return kMap;
  if (!text.ends_with("rows")) return number_within(text, 1, kMost);
  const std::optional<int64_t> rows = number_within(text.substr(0, text.size() - 4), 1, kMost);
  return rows ? std::optional(-*rows) : std::nullopt;
}

std::string print_block(int64_t block) {
  if (block == kRow) return "row";
  if (block == kMap) return "map";
  return block < 0 ? std::to_string(-block) + "rows" : std::to_string(block);
}

/// Options whose values have names: the name's position is the value.
using Names = std::array<std::string_view, 4>;
constexpr Names kLevelNames = {"even", "optimal"};
constexpr Names kRoundingNames = {"stochastic", "nearest"};
constexpr Names kHeaderNames = {"bf16", "f32"};
constexpr Names kSideNames = {"none", "one", "relu", "both"};
constexpr Names kYesNames = {"no", "yes"};
constexpr Names kPartNames = {"both", "low", "high"};

template <class T>
bool choose(T& field, const Names& names, std::string_view text) {
  for (size_t i = 0; i < names.size() && !text.empty(); ++i) {
    if (text != names[i]) continue;
    field = static_cast<T>(i);
    return true;
  }
  return false;
}

template <auto field, const Names& names>
bool set_named(CodecSpec& spec, std::string_view text) {
  return choose(spec.*field, names, text);
}

template <auto field, const Names& names>
std::string get_named(const CodecSpec& spec) {
  return std::string(names[static_cast<size_t>(spec.*field)]);
}

bool set_bits(CodecSpec& spec, std::string_view text) {
  const std::optional<int64_t> bits = number_within(text, 1, kKeep);
  if (!bits || (*bits > 8 && *bits != kKeep)) return false;
  spec.bits = static_cast<int>(*bits);
  return true;
}

bool set_block(CodecSpec& spec, std::string_view text) {
  const std::optional<int64_t> block = parse_block(text);
  spec.block = block.value_or(spec.block);
  return block.has_value();
}

/// The transform of one kind if the spec has it, else that kind's defaults.
template <class Kind>
Kind transform_or_default(const CodecSpec& spec) {
  const Kind* kind = std::get_if<Kind>(&spec.transform);
  return kind != nullptr ? *kind : Kind{};
}

/// `none` takes away this kind of transform only; a number replaces whatever stands there.
template <class Kind, int Kind::*field>
bool set_transform(CodecSpec& spec, std::string_view text) {
  if (text == "none") {
    if (std::holds_alternative<Kind>(spec.transform)) spec.transform = Identity{};
    return true;
  }
  const std::optional<int64_t> value = number_within(text, 1, kMostScale);
  if (!value) return false;
  Kind kind = transform_or_default<Kind>(spec);
  kind.*field = static_cast<int>(*value);
  spec.transform = kind;
  return true;
}

template <class Kind, int Kind::*field>
std::string get_transform(const CodecSpec& spec) {
  const Kind* kind = std::get_if<Kind>(&spec.transform);
  return kind != nullptr ? std::to_string(kind->*field) : "none";
}

RandomProjection& projection_of(CodecSpec& spec, std::string_view key, std::string_view text) {
  if (auto* p = std::get_if<RandomProjection>(&spec.transform)) return *p;
  fail("spec", std::string(key) + " needs a projection (project=RATIO)", text);
}

bool set_hadamard(CodecSpec& spec, std::string_view text) {
  return choose(projection_of(spec, "hadamard", text).hadamard, kYesNames, text);
}

std::string get_hadamard(const CodecSpec& spec) {
  return std::string(kYesNames[transform_or_default<RandomProjection>(spec).hadamard ? 1 : 0]);
}

bool set_rows(CodecSpec& spec, std::string_view text) {
  RandomProjection& p = projection_of(spec, "rows", text);
  const std::optional<int64_t> rows = text == "all" ? 0 : number_within(text, 1, kMost);
  p.rows = rows.value_or(p.rows);
  return rows.has_value();
}

std::string get_rows(const CodecSpec& spec) {
  const int64_t rows = transform_or_default<RandomProjection>(spec).rows;
  return rows == 0 ? "all" : std::to_string(rows);
}

bool set_part(CodecSpec& spec, std::string_view text) {
  auto* p = std::get_if<LowPass>(&spec.transform);
  if (p == nullptr) fail("spec", "part needs a low-pass (lowpass=SIZE)", text);
  return choose(p->part, kPartNames, text);
}

std::string get_part(const CodecSpec& spec) {
  return std::string(kPartNames[static_cast<size_t>(transform_or_default<LowPass>(spec).part)]);
}

/// How one option is written. Options are set in the order of the table, whatever the order in the text.
struct Option {
  std::string_view key;
  std::string_view values;
  bool (*set)(CodecSpec&, std::string_view);  // false: not one of the values
  std::string (*get)(const CodecSpec&);
};

constexpr Option kOptions[] = {
    {"bits", "1 to 8 or 32", set_bits, [](const CodecSpec& spec) { return std::to_string(spec.bits); }},
    {"block", "1 to 2^40, row, Nrows or map", set_block, [](const CodecSpec& spec) { return print_block(spec.block); }},
    {"sample", "yes or no", set_named<&CodecSpec::per_sample, kYesNames>, get_named<&CodecSpec::per_sample, kYesNames>},
    {"levels", "even or optimal", set_named<&CodecSpec::levels, kLevelNames>, get_named<&CodecSpec::levels, kLevelNames>},
    {"round", "stochastic or nearest", set_named<&CodecSpec::rounding, kRoundingNames>, get_named<&CodecSpec::rounding, kRoundingNames>},
    {"header", "bf16 or f32", set_named<&CodecSpec::header, kHeaderNames>, get_named<&CodecSpec::header, kHeaderNames>},
    {"side", "none, one, relu or both", set_named<&CodecSpec::side, kSideNames>, get_named<&CodecSpec::side, kSideNames>},
    {"project", "1 to 2^20 or none", set_transform<RandomProjection, &RandomProjection::ratio>,
     get_transform<RandomProjection, &RandomProjection::ratio>},
    {"lowpass", "1 to 2^20 or none", set_transform<LowPass, &LowPass::size>, get_transform<LowPass, &LowPass::size>},
    {"hadamard", "yes or no", set_hadamard, get_hadamard},
    {"rows", "1 to 2^40 or all", set_rows, get_rows},
    {"part", "both, low or high", set_part, get_part},
};
constexpr size_t kOptionCount = std::size(kOptions);

std::string preset_names() {
  std::string text;
  for (const Preset& preset : kPresets) text += (text.empty() ? "" : ", ") + std::string(preset.name);
  return text;
}

const CodecSpec& preset_of(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return preset.spec;
  }
  fail("spec", "preset must be one of " + preset_names(), name.empty() ? "nothing" : name);
}

size_t option_of(std::string_view key) {
  std::string known;
  for (size_t i = 0; i < kOptionCount; ++i) {
    if (kOptions[i].key == key) return i;
    known += (i == 0 ? "" : ", ") + std::string(kOptions[i].key);
  }
  fail("spec", "option must be one of " + known, key.empty() ? "nothing" : key);
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> items;
  for (size_t comma = text.find(','); comma != text.npos; comma = text.find(',')) {
    items.push_back(trim(text.substr(0, comma)));
    text.remove_prefix(comma + 1);
  }
  items.push_back(trim(text));
  return items;
}

/// The options that turn `base` into `spec`.
std::string difference(const CodecSpec& base, const CodecSpec& spec) {
  std::string text;
  for (const Option& option : kOptions) {
    const std::string value = option.get(spec);
    if (value == option.get(base)) continue;
    // Setting one transform drops the other.
    const bool transform = option.key == "project" || option.key == "lowpass";
    if (transform && value == "none" && !std::holds_alternative<Identity>(spec.transform)) continue;
    text += (text.empty() ? "" : ",") + std::string(option.key) + "=" + value;
  }
  return text;
}

void validate_transform(const CodecSpec& spec, const char* op) {
  if (const auto* p = std::get_if<RandomProjection>(&spec.transform)) {
    if (p->ratio < 1 || p->ratio > kMostScale) fail(op, "projection ratio must be 1 to 2^20", p->ratio);
    if (p->rows < 0 || p->rows > kMost) fail(op, "rows a projection matrix must be 1 to 2^40, or 0 for all", p->rows);
  }
  if (const auto* p = std::get_if<LowPass>(&spec.transform)) {
    if (p->size < 1 || p->size > kMostScale) fail(op, "low-pass window must be 1 to 2^20", p->size);
    if (p->part > Part::high) fail(op, "part must be both, low or high", int(p->part));
    if (p->part != Part::both && spec.bits == kKeep) fail(op, "part=low and part=high take 1 to 8 bits", spec.bits);
  }
}

void validate_side(const CodecSpec& spec, const char* op) {
  if (spec.side == Side::none) return;
  if (!std::holds_alternative<Identity>(spec.transform)) {
    const bool low_pass = std::holds_alternative<LowPass>(spec.transform);
    fail(op, "a side code takes no transform", low_pass ? "a low-pass" : "a projection");
  }
  if (spec.side == Side::both && (spec.bits < 2 || spec.bits > 4)) fail(op, "side=both takes 2 to 4 bits", spec.bits);
  if (spec.side != Side::both && spec.bits != 2 && spec.bits != 3) {
    fail(op, spec.side == Side::relu ? "side=relu takes 2 or 3 bits" : "side=one takes 2 or 3 bits", spec.bits);
  }
}

}  // namespace

std::span<const Preset> presets() { return kPresets; }

CodecSpec parse_spec(std::string_view text) {
  CodecSpec spec;
  std::array<std::optional<std::string_view>, kOptionCount> given;
  const std::vector<std::string_view> items = split(text);
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t equals = items[i].find('=');
    if (equals == std::string_view::npos && i == 0) {
      spec = preset_of(items[i]);
      continue;
    }
    if (equals == std::string_view::npos) {
      fail("spec", "after the first item come options (key=value)", items[i].empty() ? "nothing" : items[i]);
    }
    const size_t option = option_of(items[i].substr(0, equals));
    if (given[option]) fail("spec", "an option may be given once", items[i]);
    given[option] = items[i].substr(equals + 1);
  }
  const auto &project = given[option_of("project")], &lowpass = given[option_of("lowpass")];
  if (project && lowpass && *project != "none" && *lowpass != "none") {
    fail("spec", "project and lowpass exclude each other", text);
  }
  for (size_t i = 0; i < kOptionCount; ++i) {
    if (!given[i] || kOptions[i].set(spec, *given[i])) continue;
    const std::string rule = std::string(kOptions[i].key) + " must be " + std::string(kOptions[i].values);
    fail("spec", rule, given[i]->empty() ? "nothing" : *given[i]);
  }
  validate(spec, "spec");
  return spec;
}

std::string to_string(const CodecSpec& spec) {
  validate(spec, "spec");
  std::string shortest;
  for (const Preset& preset : kPresets) {
    const std::string options = difference(preset.spec, spec);
    const std::string text = std::string(preset.name) + (options.empty() ? "" : "," + options);
    if (shortest.empty() || text.size() < shortest.size()) shortest = text;
  }
  const std::string bare = difference(CodecSpec{}, spec);
  if (bare.empty()) return "bits=" + std::to_string(spec.bits);
  return bare.size() < shortest.size() ? bare : shortest;
}

void validate(const CodecSpec& spec, const char* op) {
  if ((spec.bits < 1 || spec.bits > 8) && spec.bits != kKeep) fail(op, "bits must be 1 to 8 or 32", spec.bits);
  if (spec.block == 0 || spec.block > kMost || (spec.block < -kMost && spec.block != kMap)) {
    fail(op, "block must be 1 to 2^40, row, Nrows or map", spec.block);
  }
  if (spec.levels > Levels::optimal) fail(op, "levels must be even or optimal", int(spec.levels));
  if (spec.rounding > Rounding::nearest) fail(op, "rounding must be stochastic or nearest", int(spec.rounding));
  if (spec.header > HeaderType::f32) fail(op, "header must be bf16 or f32", int(spec.header));
  if (spec.side > Side::both) fail(op, "side must be none, one, relu or both", int(spec.side));
  validate_transform(spec, op);
  validate_side(spec, op);
}

}  // namespace satchel
