// Methods as text: a preset's name and its options.
#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/core/suggest.h"
#include "satchel/core/text_items.h"

namespace satchel {
namespace {

using Items = std::vector<std::string_view>;

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

constexpr std::array<std::string_view, 9> kMethodKeys = {"level", "adaptive", "norm_bits", "residual",       "mean_bits",
                                                         "mean",  "budget",   "norm_bias", "derivative_bits"};

/// An option by its name or by the name that it had before.
std::string_view given_as(const Items& options, std::string_view key, std::string_view before, std::string_view text) {
  const std::string_view now = given(options, key), old = given(options, before);
  if (!now.empty() && !old.empty()) refuse(std::string(before) + " is the former name of " + std::string(key) + ": give one", text);
  return now.empty() ? old : now;
}

double norm_bias_of(std::string_view option, std::string_view text) {
  const auto [bias, rest] = leading_number(value_of(option));
  if (!(bias >= 0 && bias <= 1) || !rest.empty()) refuse("norm_bias must be 0 to 1", text);
  return bias;
}

double mean_of(std::string_view option, std::string_view text) {
  const auto [mean, rest] = leading_number(value_of(option));
  if (!(mean >= 2 && mean <= 3) || !rest.empty()) refuse(std::string(key_of(option)) + " must be 2 to 3", text);
  return mean;
}

int64_t budget_of(std::string_view option, std::string_view text) {
  const std::optional<int64_t> bytes = byte_count(value_of(option), int64_t{1} << 55);
  if (!bytes) refuse("budget must be 1 to 2^55 bytes, as in 1.2GiB, 900MB or 1000", text);
  return *bytes;
}

/// ActNN's levels, as data: bits of inputs and norms, per sample or not, in host memory or not.
void set_level(Method& m, int level) {
  if (level == 0) {
    m = std::ranges::find(method_presets(), "fp32", &MethodPreset::name)->method;
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
    if (preset.name != "actnn" || m.torch_baseline) refuse("adaptive is an option of actnn", text);
    if (value_of(adaptive) != "yes" && value_of(adaptive) != "no") refuse("adaptive must be yes or no", text);
    m.adaptive = value_of(adaptive) == "yes";
  }
  if (const auto bits = given_as(options, "norm_bits", "residual", text); !bits.empty()) {
    if (!m.shared) refuse(std::string(key_of(bits)) + " is an option of shared methods", text);
    m.residual = digit_of(bits, 1, 8, text);
  }
  if (const auto bits = given(options, "derivative_bits"); !bits.empty()) {
    if (m.torch_baseline) refuse("derivative_bits is an option of methods that pack", text);  // actnn,level=0
    m.derivative = digit_of(bits, 1, 8, text);
  }
  if (const auto bias = given(options, "norm_bias"); !bias.empty()) {
    if (!m.shared) refuse("norm_bias is an option of shared methods", text);
    m.norm_bias = norm_bias_of(bias, text);
  } else if (given(options, "off") == "off=mean") {
    m.norm_bias = 0;
  }
  const auto mean = given_as(options, "mean_bits", "mean", text), budget = given(options, "budget");
  for (const std::string_view option : {mean, budget}) {
    if (!option.empty() && !m.shared) refuse(std::string(key_of(option)) + " is an option of satchel", text);
  }
  if (!mean.empty()) m.mean = mean_of(mean, text);
  if (!budget.empty()) m.budget = budget_of(budget, text);
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

/// "one of A, B, or options (key=value)", with the nearest of them.
std::string names_of_all(std::string_view given_name) {
  Items names;
  for (const MethodPreset& preset : method_presets()) names.push_back(preset.name);
  for (const Preset& preset : presets()) {
    if (std::ranges::find(names, preset.name) == names.end()) names.push_back(preset.name);
  }
  std::string text;
  for (const std::string_view name : names) text += std::string(name) + ", ";
  return text + "or options (key=value)" + did_you_mean(given_name, names);
}

/// Refuses an option that neither methods nor specs have.
void check_key(std::string_view option, std::string_view text) {
  Items keys = spec_option_names();
  keys.insert(keys.end(), kMethodKeys.begin(), kMethodKeys.end());
  if (std::ranges::find(keys, key_of(option)) != keys.end()) return;
  std::string known;
  for (const std::string_view key : keys) known += (known.empty() ? "" : ", ") + std::string(key);
  refuse("option must be one of " + known + did_you_mean(key_of(option), keys), text);
}

}  // namespace

Method parse_method(std::string_view given_text) {
  const std::string_view text = trim(given_text);
  const Items items = split(text, ',');
  const auto& known = method_presets();
  const auto preset = std::ranges::find(known, items[0], &MethodPreset::name);
  const auto codec = std::ranges::find(presets(), items[0], &Preset::name);
  if (preset == known.end() && codec == presets().end() && !is_option(items[0]))
    refuse("a method must be one of " + names_of_all(items[0]), text);
  const Items options(items.begin() + (is_option(items[0]) ? 0 : 1), items.end());
  for (const std::string_view option : options) {
    if (!is_option(option)) refuse("after a method's name come options (key=value)", text);
    check_key(option, text);
  }
  if (preset != known.end() && preset->method.torch_baseline && !options.empty()) refuse("fp32 takes no options", text);
  Method m = in_words_of(text, [&] {
    if (preset == known.end()) {
      const Method made = alone(parse_spec(text));
      validate(made, "method");
      return made;
    }
    MethodPreset base = *preset;
    base.method = with_own_options(base, options, text);
    const Items codec_options = without(options, kMethodKeys);
    if (base.method.torch_baseline && !codec_options.empty()) refuse("level=0 takes no other options", text);
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

}  // namespace satchel
