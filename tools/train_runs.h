// The runs of one `satchel train`, of graphs or of images: what can be refused first, the runs, and what they leave even where the last of
// them fails.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "satchel/train/run.h"

namespace satchel::tool {

/// A signal ended a command, and all that was to be written is written: exit code 128 + signal, as a shell reports it.
struct Interrupted : std::exception {
  explicit Interrupted(int by) : signal(by) {}
  const char* what() const noexcept override { return "interrupted"; }
  int signal;
};

/// What `satchel train` asks for, whatever the model.
struct RunsCommand {
  std::string data, methods = "satchel", json;
  int64_t seeds = 1, threads = 0;         // threads 0: torch's own number
  bool quiet = false, overwrite = false;  // overwrite: the checkpoint
  bool is_silent() const { return quiet || json == "-"; }
};

/// Throws UsageError for what can be refused before the data are read; `validate` throws Error for options that cannot be.
void check_runs(const RunsCommand& command, const RunOptions& options, size_t methods, const std::function<void()>& validate);

/// How all runs of a call are made and told of.
struct RunsParts {
  const char* unit;  // what a run stops after: "epoch", "step"
  std::function<RunResult(const Method& method, uint64_t seed)> run;
  std::function<void(const std::vector<RunResult>& runs)> print;
  std::function<nlohmann::ordered_json(const RunResult& run)> json;
};

/// All methods of a seed, then of the next: pairs stay together. Then JSON and table, also of those that ended before one that throws, and
/// of one whose last checkpoint could not be written. Throws Interrupted where a signal came on the way.
void run_all(const RunsCommand& command, const RunOptions& options, const std::vector<Method>& methods, const RunsParts& parts);

/// Runs `train` with a report that shows its progress, unless `silent`, and stops it where a signal came. Says whether it resumes, why a
/// checkpoint could not be written, and how it ended where that was not after all its epochs. `batch`: as ProgressView's.
RunResult run_shown(const RunOptions& options, bool silent, int64_t batch,
                    const std::function<RunResult(const ProgressReport& report)>& train);

/// What every run's JSON has: method, seed, metric, bytes …, the options in full, the data's digest, the curve by epoch. `more`: options
/// that do not define the results.
nlohmann::ordered_json common_json(const RunResult& run, const RunOptions& options, const nlohmann::ordered_json& more);

}  // namespace satchel::tool
