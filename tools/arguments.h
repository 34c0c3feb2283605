// What the values on a command line are read and checked with, for all commands that train or measure.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "satchel/core/method.h"
#include "satchel/train/names.h"

namespace satchel::tool {

/// A number as strtod() reads it all; CLI11 itself takes '' for 0.
CLI::Validator real_number();

/// '' is what a script's unset variable gives: not "no file".
CLI::Validator file_name();
/// cpu, cuda or cuda:N; `more` is a word that stands for several of them.
CLI::Validator device_name(const std::string& more = "");
/// CPU threads: what --help says of them.
constexpr const char* kThreadsHelp =
    "CPU threads (default: torch's choice, one a core; fewer where other programs keep cores busy: a step waits for its slowest thread)";

/// The last layer of graph models: what --help says of it.
constexpr const char* kLastLayerHelp =
    "Whose outputs the last layer of a training step computes: all nodes', or those of training nodes alone, which is faster and stores "
    "their edges once more. Methods and layers that keep more than the layer's input compute all";

/// Of image models.
constexpr const char* kWidthDefault = "the model's own";

/// As byte_count() of core reads it. Throws `[op] rule, got 'text'` unless it is 1 to 2^62 bytes; less than 1 MiB needs a unit.
int64_t parse_bytes(const std::string& text, const char* op);
/// What parse_bytes() reads.
CLI::Validator byte_size();

/// A whole number from least to most, in decimal digits.
CLI::Validator whole_number(uint64_t least, uint64_t most = INT64_MAX);
/// Any whole number below 2^63, negative ones too, for whoever checks it further in words of its own.
CLI::Validator any_whole_number();

/// A flag and its opposite, "--x,!--no-x". Where neither is given nothing is chosen; CLI11's own flag of an optional would be false then.
inline CLI::Option* add_choice(CLI::App& app, const std::string& names, std::optional<bool>& choice, const std::string& help) {
  return app.add_flag_function(
      names, [&choice](int64_t times) { choice = times > 0; }, help);
}

/// The words for a kind of thing: batch, layer, none.
template <class Enum>
CLI::IsMember members() {
  std::vector<std::string> names;
  for (const auto& [name, value] : Names<Enum>::all) names.emplace_back(name);
  return CLI::IsMember(names);
}

/// parse_methods() and a check of each, with UsageError for what they refuse; every method once.
std::vector<Method> methods_from(const std::string& text, void (*check)(const Method&, const char*) = validate_for_graph);

}  // namespace satchel::tool
