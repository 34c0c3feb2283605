// `satchel train` and `satchel predict`.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <exception>
#include <string>

#include "satchel/train/train.h"
#include "tools/arguments.h"
#include "tools/train_images.h"

namespace satchel::tool {

/// Ctrl-C ended a command, and all that was to be written is written: exit code 130.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

struct TrainCommand {
  std::string data;
  std::string model = "sage", norm = "batch", activation = "relu", optimizer = "adam", methods = "satchel", amp = "auto";
  TrainOptions options;
  int64_t seeds = 1;
  int64_t threads = 0;  // 0: torch's own number
  std::string cache;    // as bench graph's
  bool no_cache = false, quiet = false;
  bool overwrite = false;  // the checkpoint
  bool unweighted = false;
  std::string json;
  ImageTrainCommand images;  // of image models: what they have of their own
};

struct PredictCommand {
  std::string checkpoint, data, output, scores, device = "cpu";
  int64_t loaders = 2;  // of images
  bool unweighted = false;
};

void add_train_commands(CLI::App& app);

void run_train(const TrainCommand& command);
void run_predict(const PredictCommand& command);

}  // namespace satchel::tool
