// CodecSpec as text, both ways.
#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/spec.h"
#include "satchel/core/spec_limits.h"
#include "satchel/core/suggest.h"
#include "satchel/core/text_items.h"

namespace satchel {
namespace {

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
  if (!text.ends_with("rows")) return number_within(text, 1, kMostBlock);
  const std::optional<int64_t> rows = number_within(text.substr(0, text.size() - 4), 1, kMostBlock);
  return rows ? std::optional(-*rows) : std::nullopt;
}

std::string print_block(int64_t block) {
  if (block == kRow) return "row";
  if (block == kMap) return "map";
  return block < 0 ? std::to_string(-block) + "rows" : std::to_string(block);
}

/// Options whose values have names: the name's position is the value.
constexpr std::string_view kRoundingNames[] = {"stochastic", "nearest"};
constexpr std::string_view kHeaderNames[] = {"bf16", "f32"};
constexpr std::string_view kSideNames[] = {"none", "one", "relu", "both"};
constexpr std::string_view kOffNames[] = {"mean", "sampled"};
constexpr std::string_view kYesNames[] = {"no", "yes"};
constexpr std::string_view kPartNames[] = {"both", "low", "high"};

template <class T>
bool choose(T& field, std::span<const std::string_view> names, std::string_view text) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (text != names[i]) continue;
    field = static_cast<T>(i);
    return true;
  }
  return false;
}

template <auto field, const auto& names>
bool set_named(CodecSpec& spec, std::string_view text) {
  return choose(spec.*field, names, text);
}

template <auto field, const auto& names>
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
  const std::optional<int64_t> rows = text == "all" ? 0 : number_within(text, 1, kMostBlock);
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
    {"levels", kLevelChoices, set_named<&CodecSpec::levels, kLevelNames>, get_named<&CodecSpec::levels, kLevelNames>},
    {"round", "stochastic or nearest", set_named<&CodecSpec::rounding, kRoundingNames>, get_named<&CodecSpec::rounding, kRoundingNames>},
    {"header", "bf16 or f32", set_named<&CodecSpec::header, kHeaderNames>, get_named<&CodecSpec::header, kHeaderNames>},
    {"side", "none, one, relu or both", set_named<&CodecSpec::side, kSideNames>, get_named<&CodecSpec::side, kSideNames>},
    {"off", "mean or sampled", set_named<&CodecSpec::off, kOffNames>, get_named<&CodecSpec::off, kOffNames>},
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
  for (const Preset& preset : presets()) text += (text.empty() ? "" : ", ") + std::string(preset.name);
  return text;
}

const CodecSpec& preset_of(std::string_view name) {
  for (const Preset& preset : presets()) {
    if (preset.name == name) return preset.spec;
  }
  std::vector<std::string_view> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  fail("spec", "preset must be one of " + preset_names() + did_you_mean(name, names), name.empty() ? "nothing" : name);
}

size_t option_of(std::string_view key) {
  std::string known;
  for (size_t i = 0; i < kOptionCount; ++i) {
    if (kOptions[i].key == key) return i;
    known += (i == 0 ? "" : ", ") + std::string(kOptions[i].key);
  }
  fail("spec", "option must be one of " + known + did_you_mean(key, spec_option_names()), key.empty() ? "nothing" : key);
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

}  // namespace

std::vector<std::string_view> spec_option_names() {
  std::vector<std::string_view> names;
  for (const Option& option : kOptions) names.push_back(option.key);
  return names;
}

CodecSpec parse_spec(std::string_view text) {
  CodecSpec spec;
  std::array<std::optional<std::string_view>, kOptionCount> given;
  const std::vector<std::string_view> items = split(text, ',');
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
  for (const Preset& preset : presets()) {
    const std::string options = difference(preset.spec, spec);
    const std::string text = std::string(preset.name) + (options.empty() ? "" : "," + options);
    if (shortest.empty() || text.size() < shortest.size()) shortest = text;
  }
  const std::string bare = difference(CodecSpec{}, spec);
  if (bare.empty()) return "bits=" + std::to_string(spec.bits);
  return bare.size() < shortest.size() ? bare : shortest;
}

}  // namespace satchel
