#include "tools/train_runs.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "satchel/train/options.h"
#include "tools/interrupt.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

/// As it was called, argument by argument.
ordered_json command_line() {
  ordered_json all = ordered_json::array();
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string argument; std::getline(file, argument, '\0');) all.push_back(argument);
  return all;
}

std::string answer(const RunsCommand& c, const RunOptions& o, const char* unit) {
  const std::string left = std::string(o.checkpoint.empty() ? "" : "checkpoint, ") + "table" + (c.json.empty() ? "" : " and JSON");
  return fmt::format("stopping after this {}, then {} will be written{} (Ctrl-C kills at once)", unit, left,
                     o.checkpoint.empty() ? "; there is no --checkpoint to go on from" : "");
}

ordered_json curve_json(const std::vector<CurvePoint>& curve) {
  ordered_json list = ordered_json::array();
  for (const CurvePoint& p : curve) {
    ordered_json point{{"epoch", p.epoch}, {"loss", number(p.loss)}};
    for (const auto& [name, value] : {std::pair{"train", p.train}, {"valid", p.valid}, {"test", p.test}}) {
      if (!std::isnan(value)) point[name] = value;
    }
    list.push_back(std::move(point));
  }
  return list;
}

void report_all(const RunsCommand& c, const std::vector<RunResult>& runs, const RunsParts& parts, bool interrupted) {
  if (!c.json.empty()) {
    ordered_json list = ordered_json::array();
    for (const RunResult& r : runs) list.push_back(parts.json(r));
    const ordered_json all{{"version", SATCHEL_VERSION}, {"command", command_line()}, {"runs", list}, {"interrupted", interrupted}};
    write_json(c.json, all, "train");
  }
  if (c.json == "-" || runs.empty()) return;
  try {
    parts.print(runs);
  } catch (const std::system_error&) {
    fail("output", "stdout must take what is printed", "an error");
  }
}

}  // namespace

void check_runs(const RunsCommand& c, const RunOptions& o, size_t methods, const std::function<void()>& validate) {
  const int64_t runs = static_cast<int64_t>(methods) * c.seeds;
  if (!o.checkpoint.empty() && runs > 1)
    throw UsageError(fmt::format("[train] --checkpoint takes a single run, of one method and one seed, got {} runs", runs));
  if (o.seed > UINT64_MAX - static_cast<uint64_t>(c.seeds - 1))
    throw UsageError(fmt::format("[train] --seed + --seeds must be at most 2^64, got {} + {}", o.seed, c.seeds));
  if (o.checkpoint.empty() && o.resume) throw UsageError("[train] --resume needs --checkpoint, got none");
  check_apart("train", "--json", c.json, "--checkpoint", o.checkpoint);
  check_not_data("train", "--json", c.json, c.data);
  check_not_data("train", "--checkpoint", o.checkpoint, c.data);
  try {
    validate();
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  if (!o.checkpoint.empty()) check_output(o.checkpoint, "train");
  check_new_checkpoint(o.checkpoint, o.resume, c.overwrite);
  if (!c.json.empty() && c.json != "-") check_output(c.json, "train");
  use_device(o.device, "train");
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
}

void run_all(const RunsCommand& c, const RunOptions& o, const std::vector<Method>& methods, const RunsParts& parts) {
  const StopSignals signals(answer(c, o, parts.unit), !o.checkpoint.empty() || (!c.json.empty() && c.json != "-"));
  std::vector<RunResult> runs;
  try {
    for (int64_t s = 0; s < c.seeds && stop_asked == 0; ++s) {
      for (size_t i = 0; i < methods.size() && stop_asked == 0; ++i)
        runs.push_back(parts.run(methods[i], o.seed + static_cast<uint64_t>(s)));
    }
  } catch (const CheckpointNotWritten& e) {
    runs.push_back(e.result);
    report_all(c, runs, parts, stop_asked != 0);
    throw;
  } catch (...) {
    if (!runs.empty()) report_all(c, runs, parts, false);
    throw;
  }
  const int signal = stop_asked;
  report_all(c, runs, parts, signal != 0);
  if (signal != 0) throw Interrupted(signal);
}

RunResult run_shown(const RunOptions& o, bool silent, int64_t batch, const std::function<RunResult(const ProgressReport& report)>& train) {
  const std::string title = fmt::format("{} seed {}", o.method.name, o.seed);
  ProgressView view(title, silent ? ProgressView::Style::silent : ProgressView::best_style(), batch);
  if (!silent && o.resume) {
    const bool there = ::access(o.checkpoint.c_str(), F_OK) == 0;
    fmt::print("{}{}\n", there ? "goes on from " : "starts anew, there is no checkpoint yet: ", o.checkpoint);
    std::fflush(stdout);
  }
  std::string said;
  const RunResult r = train([&](const Progress& p) {
    try {
      view.show(p);
      if (p.checkpoint_error != said && !p.checkpoint_error.empty()) {
        view.end();
        fmt::print(stderr, "satchel: {} (the run goes on, and tries again when the next checkpoint is due)\n", p.checkpoint_error);
      }
    } catch (const std::system_error&) {  // nobody reads it any more: no reason to end the run
    }
    said = p.checkpoint_error;
    return stop_asked == 0;
  });
  if (silent) return r;
  view.end();
  try {
    if (!r.eager_because.empty()) fmt::print("{}: steps run one by one, not from a CUDA graph: {}\n", title, r.eager_because);
    if (r.epochs < o.epochs)
      fmt::print("{}: stopped after epoch {}{}: {}\n", title, r.epochs, r.steps > 0 ? fmt::format(", step {}", r.steps) : "",
                 r.interrupted ? "interrupted" : fmt::format("no better validation metric in {} evaluations", r.since_best));
  } catch (const std::system_error&) {
  }
  return r;
}

ordered_json common_json(const RunResult& r, const RunOptions& o, const ordered_json& more) {
  ordered_json options = ordered_json::parse(r.options), data = ordered_json::parse(r.data);
  options["device"] = r.device;
  options["epochs"] = o.epochs;
  options["checkpoint"] = o.checkpoint;
  options["checkpoint_every"] = o.checkpoint_every;
  options["resume"] = o.resume;
  options.update(more);
  return {{"method", r.method},
          {"seed", r.seed},
          {"device", r.device},
          {"test", number(r.test)},
          {"saved_bytes", r.saved_bytes},
          {"loss_bytes", r.loss_bytes},
          {"peak_bytes", r.peak_bytes},
          {"parameter_bytes", r.parameter_bytes},
          {"loss", number(r.loss)},
          {"epochs", r.epochs},
          {"steps", r.steps},
          {"interrupted", r.interrupted},
          {"model", options["model"]},
          {"tf32", o.tf32},
          {"amp", options["amp"]},
          {"data", data["name"]},
          {"data_digest", data["digest"]},
          {"machine", machine_json(r.device)},
          {"options", options},
          {"curve", curve_json(r.curve)},
          {"tensors", tensors_json(r.tensors)}};
}

}  // namespace satchel::tool
