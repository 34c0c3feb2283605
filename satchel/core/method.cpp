#include "satchel/core/method.h"

#include <algorithm>
#include <array>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr int64_t kMostValues = int64_t{1} << 40;  // of a block, as validate(CodecSpec) has it

Method fp32() {
  Method m;
  m.name = "fp32";
  m.plain = true;
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
Method by_layer(std::string name, bool adaptive) {
  Method m;
  m.name = std::move(name);
  m.input = m.norm = parse_spec(m.name);
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

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == text.npos ? std::string_view{} : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

using Items = std::vector<std::string_view>;

Items split(std::string_view text, char separator) {
  Items items;
  for (size_t at = text.find(separator); at != text.npos; at = text.find(separator)) {
    items.push_back(trim(text.substr(0, at)));
    text.remove_prefix(at + 1);
  }
  items.push_back(trim(text));
  return items;
}

bool is_option(std::string_view item) { return item.find('=') != item.npos; }
std::string_view key_of(std::string_view item) { return item.substr(0, item.find('=')); }
std::string_view value_of(std::string_view item) { return item.substr(item.find('=') + 1); }

/// The option of this key; empty where it is not given.
std::string_view given(const Items& options, std::string_view key) {
  const auto found = std::ranges::find_if(options, [key](std::string_view o) { return key_of(o) == key; });
  return found == options.end() ? std::string_view{} : *found;
}

[[noreturn]] void refuse(const std::string& rule, std::string_view text) { fail("method", rule, "'" + std::string(text) + "'"); }

/// Runs `make`; what a spec's grammar refuses becomes `[method] rule, got 'text'`.
template <class Make>
auto in_words_of(std::string_view text, const Make& make) {
  try {
    return make();
  } catch (const Error& e) {
    const std::string what = e.what();
    const size_t rule = what.find("] ") + 2;
    refuse(what.substr(rule, what.find(", got ") - rule), text);
  }
}

/// `base` with these options in place of its own.
CodecSpec changed(const CodecSpec& base, const Items& options) {
  const bool unprojected = given(options, "project") == "project=none";
  const std::string base_text = to_string(base);
  std::string text;
  for (const std::string_view item : split(base_text, ',')) {
    const std::string_view key = key_of(item);
    if (is_option(item) && (!given(options, key).empty() || (unprojected && (key == "rows" || key == "hadamard")))) continue;
    text += (text.empty() ? "" : ",") + std::string(item);
  }
  for (const std::string_view option : options) text += (text.empty() ? "" : ",") + std::string(option);
  return parse_spec(text);
}

/// The options but for those of these keys.
template <size_t count>
Items without(const Items& options, const std::array<std::string_view, count>& keys) {
  Items rest;
  std::ranges::copy_if(options, std::back_inserter(rest),
                       [&](std::string_view o) { return std::ranges::find(keys, key_of(o)) == keys.end(); });
  return rest;
}

/// What differs from a preset. A projection ends the sharing, and sharing alone has side codes; 32 bits have none either.
Method changed(const MethodPreset& preset, const Items& options) {
  Method m = preset.method;
  if (options.empty()) return m;
  const bool side_given = !given(options, "side").empty();
  m.input = changed(m.input, without(options, std::array<std::string_view, 1>{"side"}));
  m.shared = m.shared && std::holds_alternative<Identity>(m.input.transform);
  if (!side_given && (m.input.bits == kKeep || !m.shared)) m.norm.side = Side::none;
  const bool filtered = std::holds_alternative<LowPass>(m.norm.transform);  // division: norms as inputs
  m.norm = filtered ? changed(m.norm, options)
                    : changed(m.norm, without(options, std::array<std::string_view, 5>{"project", "rows", "hadamard", "lowpass", "part"}));
  return m;
}

int digit_of(std::string_view option, int least, int most, std::string_view text) {
  const std::string_view value = value_of(option);
  const int digit = value.size() == 1 ? value[0] - '0' : -1;
  if (digit < least || digit > most) {
    refuse(std::string(key_of(option)) + " must be " + std::to_string(least) + " to " + std::to_string(most), text);
  }
  return digit;
}

constexpr std::array<std::string_view, 3> kMethodKeys = {"level", "adaptive", "residual"};

/// ActNN's levels, as data: bits of inputs and norms, shared out or not, swapped or not.
void set_level(Method& m, int level) {
  if (level == 0) {
    m = fp32();
    return;
  }
  m.adaptive = level >= 3;
  m.swap = level >= 4;
  if (level <= 2) m.input.bits = m.norm.bits = 4;
  if (level == 1) m.norm.bits = kKeep;
}

/// A preset with the options that are a method's own.
Method with_own_options(const MethodPreset& preset, const Items& options, std::string_view text) {
  Method m = preset.method;
  for (const std::string_view key : kMethodKeys) {
    if (std::ranges::count(options, key, key_of) > 1) refuse(std::string(key) + " is given twice", text);
  }
  if (const auto level = given(options, "level"); !level.empty()) {
    if (preset.name != "actnn") refuse("level is an option of actnn", text);
    set_level(m, digit_of(level, 0, 5, text));
  }
  if (const auto adaptive = given(options, "adaptive"); !adaptive.empty()) {
    if (preset.name != "actnn" || m.plain) refuse("adaptive is an option of actnn", text);
    if (value_of(adaptive) != "yes" && value_of(adaptive) != "no") refuse("adaptive must be yes or no", text);
    m.adaptive = value_of(adaptive) == "yes";
  }
  if (const auto residual = given(options, "residual"); !residual.empty()) {
    if (!m.shared) refuse("residual is an option of shared methods", text);
    m.residual = digit_of(residual, 1, 8, text);
  }
  return m;
}

/// A spec alone: shared saves of it, where it can be shared.
Method alone(const CodecSpec& spec) {
  Method m;
  m.input = m.norm = spec;
  m.input.side = Side::none;
  m.norm.transform = Identity{};
  m.shared = std::holds_alternative<Identity>(spec.transform);
  return m;
}

std::string names_of_all() {
  std::string text;
  for (const MethodPreset& preset : method_presets()) text += std::string(preset.name) + ", ";
  for (const Preset& preset : presets()) {
    if (text.find(std::string(preset.name) + ", ") == text.npos) text += std::string(preset.name) + ", ";
  }
  return text + "or options (key=value)";
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

}  // namespace

std::span<const MethodPreset> method_presets() {
  static const std::array<MethodPreset, 7> kPresets = {{
      {"fp32", "torch's own functions and saves", fp32()},
      {"exact", "x and A·x projected 8:1 in 2 bits, norm inputs in 2 bits, blocks of a row, two masks",
       published("exact", kRow, Levels::even)},
      {"blockwise", "the same in blocks of 64 rows with optimal levels", published("blockwise", -64, Levels::optimal)},
      {"projection", "inputs projected 8:1, a fresh matrix every 64 rows, in full precision", projection()},
      {"actnn", "inputs of layers and norms in 2 bits by 256 values, shared out by sample and layer", by_layer("actnn", true)},
      {"division", "low frequencies in bf16, the rest in 2 bits by feature map (images)", by_layer("division", false)},
      {"satchel", "one shared save a layer, one-sided code, 2 bits in all", shared()},
  }};
  return kPresets;
}

Method parse_method(std::string_view given_text) {
  const std::string_view text = trim(given_text);
  const Items items = split(text, ',');
  const auto& known = method_presets();
  const auto preset = std::ranges::find(known, items[0], &MethodPreset::name);
  const auto codec = std::ranges::find(presets(), items[0], &Preset::name);
  if (preset == known.end() && codec == presets().end() && !is_option(items[0])) refuse("a method must be one of " + names_of_all(), text);
  const Items options(items.begin() + (is_option(items[0]) ? 0 : 1), items.end());
  for (const std::string_view option : options) {
    if (!is_option(option)) refuse("after a method's name come options (key=value)", text);
  }
  if (preset != known.end() && preset->method.plain && !options.empty()) refuse("fp32 takes no options", text);
  Method m = in_words_of(text, [&] {
    if (preset == known.end()) {
      const Method made = alone(parse_spec(text));
      validate(made, "method");
      return made;
    }
    MethodPreset base = *preset;
    base.method = with_own_options(base, options, text);
    const Items codec_options = without(options, kMethodKeys);
    if (base.method.plain && !codec_options.empty()) refuse("level=0 takes no other options", text);
    Method made = changed(base, codec_options);
    validate(made, "method");
    return made;
  });
  m.name = text;
  return m;
}

std::vector<Method> parse_methods(std::string_view text) {
  std::vector<Method> methods;
  for (const std::string_view part : split(text, ';')) {
    std::vector<std::string> texts;
    for (const std::string_view item : split(part, ',')) {
      if (texts.empty() || !is_option(item)) {
        texts.emplace_back(item);
      } else {
        texts.back() += "," + std::string(item);
      }
    }
    for (const std::string& one : texts) methods.push_back(parse_method(one));
  }
  return methods;
}

CodecSpec norm_spec(const Method& method, int64_t width) {
  if (width < 1) fail("method", "a norm's rows must have 1 value or more", width);
  CodecSpec spec = method.norm;
  spec.side = Side::none;
  if (method.residual > 0) spec.bits = method.residual;
  if (spec.block >= 0 || spec.block == kMap) return spec;
  const int64_t rows = -spec.block;
  spec.block = rows > kMostValues / width ? kMostValues : rows * width;
  if (method.longest_block > 0) spec.block = std::min(spec.block, method.longest_block);
  return spec;
}

CodecSpec shared_spec(const Method& method, Norm norm, Activation activation, int64_t width) {
  CodecSpec spec = norm_spec(method, width);
  spec.bits = method.norm.bits;
  const bool side = method.shared && has_side(method);
  if (spec.bits == kKeep || activation == Activation::none) return spec;
  if (activation == Activation::relu && side) {
    spec.side = norm == Norm::none ? Side::relu : method.norm.side;
    if (spec.side == Side::relu) spec.bits = std::min(spec.bits, 3);
  }
  if (activation == Activation::leaky_relu && side) code_both_sides(spec);
  if (activation == Activation::elu && (side || !method.shared)) code_both_sides(spec);
  return spec;
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
  if (method.longest_block < 0 || method.longest_block > kMostValues) {
    fail(op, "longest_block must be 1 to 2^40, or 0 for any", method.longest_block);
  }
  if (method.plain) return;
  if (method.swap && !method.adaptive) fail(op, "swapping needs bits that are shared out (adaptive=yes)", method.name);
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
}

}  // namespace satchel
