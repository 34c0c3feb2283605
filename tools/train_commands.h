// `satchel train` and `satchel predict`.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "satchel/train/names.h"
#include "satchel/train/train.h"
#include "tools/train_images.h"

namespace satchel::tool {

/// Ctrl-C ended a command, and all that was to be written is written: exit code 130.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

struct TrainCommand {
  std::string data;
  std::string model = "sage", norm = "batch", activation = "relu", optimizer = "adam", methods = "satchel", amp = "none";
  TrainOptions options;
  int64_t seeds = 1;
  int64_t threads = 0;  // 0: torch's own number
  std::string cache;    // as bench graph's
  bool no_cache = false, quiet = false;
  std::string json;
  ImageTrainCommand images;  // of image models: what they have of their own
};

struct PredictCommand {
  std::string checkpoint, data, output, scores, device = "cpu";
};

void add_train_commands(CLI::App& app);

void run_train(const TrainCommand& command);
void run_predict(const PredictCommand& command);

/// A number as strtod() reads it all; CLI11 itself takes '' for 0.
CLI::Validator real_number();
/// Throws UsageError where two names are of one file, which may not be there yet.
void check_apart(const char* op, const char* name, const std::string& path, const char* other_name, const std::string& other);

/// '' is what a script's unset variable gives: not "no file".
CLI::Validator file_name();
/// What parse_bytes() reads.
CLI::Validator byte_size();

/// A whole number from least to most, in decimal digits.
CLI::Validator whole_number(uint64_t least, uint64_t most = INT64_MAX);

/// The words for a kind of thing: sage, gcn.
template <class Enum>
CLI::IsMember members() {
  std::vector<std::string> names;
  for (const auto& [name, value] : Names<Enum>::all) names.emplace_back(name);
  return CLI::IsMember(names);
}

/// parse_methods() and a check of each, with UsageError for what they refuse; every method once.
std::vector<Method> methods_from(const std::string& text, void (*check)(const Method&, const char*) = validate_for_graph);

}  // namespace satchel::tool
