#include <charconv>
#include <cmath>
#include <set>

#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"
#include "satchel/data/synthetic.h"

namespace satchel {
namespace {

constexpr const char* kKeys = "nodes, edges, features, classes, seed, scale, task or homophily";
constexpr int64_t kMost = int64_t{1} << 40;

template <class Number>
Number number_of(std::string_view key, std::string_view text, Number low, Number high) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !(value >= low && value <= high)) {
    const std::string rule = std::is_floating_point_v<Number> ? "must be a number" : "must be a whole number";
    const auto show = [](Number n) { return std::to_string(static_cast<int64_t>(n)); };
    const bool limits = static_cast<double>(high) < 0x1p62;
    refuse("synthetic: " + std::string(key), rule + (limits ? " from " + show(low) + " to " + show(high) : ""), printable(text));
  }
  return value;
}

Task task_of(std::string_view text) {
  if (text == "single") return Task::single_label;
  if (text == "multi") return Task::multi_label;
  if (text == "binary") return Task::binary;
  refuse("synthetic: task", "must be single, multi or binary", printable(text));
}

struct Parsed {
  SyntheticOptions options;
  double scale = 1;

  void set(std::string_view key, std::string_view value) {
    if (key == "nodes") {
      options.nodes = number_of<int64_t>(key, value, 1, kMost);
    } else if (key == "edges") {
      options.edges = number_of<int64_t>(key, value, 0, kMost);
    } else if (key == "features") {
      options.features = number_of<int64_t>(key, value, 1, kMost);
    } else if (key == "classes") {
      options.classes = number_of<int64_t>(key, value, 1, kMost);
    } else if (key == "seed") {
      options.seed = number_of<uint64_t>(key, value, 0, UINT64_MAX);
    } else if (key == "scale") {
      scale = number_of<double>(key, value, 0, 1000);
    } else if (key == "task") {
      options.task = task_of(value);
    } else if (key == "homophily") {
      options.homophily = number_of<double>(key, value, 0, 1);
    } else {
      refuse("synthetic: option", std::string("must be ") + kKeys, printable(key));
    }
  }
};

}  // namespace

SyntheticOptions parse_synthetic(std::string_view text) {
  Parsed parsed;
  std::set<std::string_view> seen;
  const bool arxiv = text == "arxiv" || text.starts_with("arxiv,");
  std::string_view rest = arxiv ? text.substr(std::min<size_t>(text.size(), 6)) : text;
  while (!rest.empty()) {
    const std::string_view option = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), option.size() + 1));
    const size_t equals = option.find('=');
    if (equals == std::string_view::npos) refuse("synthetic: option", "must be arxiv first, or name=value", printable(option));
    if (!seen.insert(option.substr(0, equals)).second) refuse("synthetic: option", "must stand once", printable(option));
    parsed.set(option.substr(0, equals), option.substr(equals + 1));
  }
  if (!arxiv) {
    for (const char* needed : {"nodes", "edges", "features", "classes"}) {
      if (!seen.contains(needed))
        refuse("synthetic:", "must be arxiv, or give nodes, edges, features and classes", "no " + std::string(needed));
    }
  }
  SyntheticOptions& options = parsed.options;
  if (options.task == Task::binary && !seen.contains("classes")) options.classes = 2;
  options.nodes = static_cast<int64_t>(std::floor(static_cast<double>(options.nodes) * parsed.scale + 0.5));
  options.edges = static_cast<int64_t>(std::floor(static_cast<double>(options.edges) * parsed.scale + 0.5));
  return options;
}

}  // namespace satchel
