// The runs of one `satchel train` beside each other: a table and JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "satchel/train/train.h"

namespace satchel::tool {

/// What all runs of a call have in common.
struct RunsAbout {
  std::string data;
  Task task = Task::single_label;
  GraphShape shape;
  bool tf32 = false;
};

/// Method by method: test metric ± standard deviation over seeds, difference to fp32 ± standard error over the seeds that both
/// have, and bytes and time beside fp32's.
void print_comparison(const std::vector<RunResult>& runs, const RunsAbout& about);

/// The table alone: what was scored heads the second column, what was timed the last one.
void print_runs(const std::vector<RunResult>& runs, const std::string& metric, const std::string& timed);

/// accuracy, micro-F1 or ROC AUC.
const char* metric_name(Task task);

/// [{"name", "kind", "shape", "bits", "bytes", "fp32_bytes"}].
nlohmann::ordered_json tensors_json(const std::vector<SavedTensor>& tensors);

/// Threads, kernel, GPU and torch of this machine.
nlohmann::ordered_json machine_json(const std::string& device);

/// Through a temporary file, which is renamed; - prints it, and so does a file that cannot be written, before it throws.
void write_json(const std::string& path, const nlohmann::ordered_json& json, const char* op);

/// A table of text with two spaces between columns, the first on the left, the others on the right.
void print_table(const std::vector<std::vector<std::string>>& rows);

/// "(59.8x less)", or "(1.2x more)".
std::string less_text(double fp32, double own);

/// The part of a help text that lists the methods and their options.
std::string method_help();

}  // namespace satchel::tool
