#include "tools/bench_batch.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "satchel/plan/image_plan.h"
#include "satchel/train/image_options.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/progress.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

/// What was found for one method.
struct Found {
  std::string method;
  int64_t batch = 0, planned = 0, tries = 0;
  bool at_most = false;  // the largest that --most allows: more may fit
  ImageBenchResult at;   // measured at that batch
  std::string error;     // of a try that ended otherwise than for want of memory
};

class Search {
 public:
  Search(const BenchBatchCommand& c, ImageBenchSetting setting, int64_t bytes)
      : command_(c), setting_(std::move(setting)), bytes_(bytes), device_(device_of(setting_.options.device)) {
    if (device_.is_cuda()) cap_.emplace(device_, bytes_);
  }

  Found run(const Method& method) const {
    Found found;
    found.method = method.name;
    const ImageShape shape = shape_of(setting_.options, setting_.classes, setting_.channels, setting_.image, setting_.image);
    const bool half = is_half(setting_.options.amp);
    found.planned = std::min(command_.most, largest_batch(shape, setting_.image, setting_.image, method, bytes_, half));
    const auto fits = [&](int64_t batch) {
      if (!within_budget(shape, {batch, setting_.image, setting_.image}, method)) return false;  // the method's own (budget=)
      ++found.tries;
      const ImageBenchResult r = measure(setting_, method, batch, command_.images.steps);
      // On the CPU nothing refuses memory beyond the limit: what was measured is compared.
      const bool within = r.ran() && (device_.is_cuda() || r.total_bytes() <= bytes_);
      if (!r.error.empty()) found.error = r.error;
      if (within && batch > found.batch) {
        found.batch = batch;
        found.at = r;
      }
      return within;
    };
    largest_that_fits(found.planned, command_.multiple, command_.most, fits);
    found.at_most = found.batch > command_.most - command_.multiple;
    return found;
  }

 private:
  BenchBatchCommand command_;
  ImageBenchSetting setting_;
  int64_t bytes_;
  at::Device device_;
  std::optional<MemoryCap> cap_;
};

double speed_of(const Found& f) { return f.batch > 0 && f.at.median() > 0 ? static_cast<double>(f.batch) / f.at.median() : 0; }

const Found* base_of(const std::vector<Found>& all) {
  const auto found = std::find_if(all.begin(), all.end(), [](const Found& f) { return f.method == "fp32" && f.batch > 0; });
  return found == all.end() ? nullptr : &*found;
}

void print_found(const std::vector<Found>& all) {
  const Found* base = base_of(all);
  std::vector<std::vector<std::string>> rows{{"method", "batch", "of fp32", "planned", "images/s", "saved", "peak", "tries"}};
  for (const Found& f : all) {
    if (f.batch == 0) {
      rows.push_back({f.method, f.error.empty() ? "none fits" : f.error, "-", grouped(f.planned), "-", "-", "-", std::to_string(f.tries)});
      continue;
    }
    rows.push_back({f.method, grouped(f.batch) + (f.at_most ? "+" : ""),
                    base == nullptr ? "-" : fmt::format("{:.2f}x", static_cast<double>(f.batch) / static_cast<double>(base->batch)),
                    grouped(f.planned), fmt::format("{:.1f}", speed_of(f)), bytes_text(f.at.cost.saved_bytes),
                    bytes_text(f.at.cost.peak_bytes), std::to_string(f.tries)});
  }
  print_table(rows);
  if (std::ranges::any_of(all, &Found::at_most)) fmt::print("\n+  all that --most allows: more may fit\n");
  for (const Found& f : all) {
    if (f.batch > 0 && !f.error.empty()) fmt::print("\n{}: larger batches were tried and ended with {}\n", f.method, f.error);
  }
}

ordered_json found_json(const std::vector<Found>& all) {
  const Found* base = base_of(all);
  ordered_json list = ordered_json::array();
  for (const Found& f : all) {
    ordered_json j = {{"method", f.method}, {"batch", f.batch}, {"planned_batch", f.planned}, {"tries", f.tries}};
    j["capped"] = f.at_most;
    j["error"] = f.error.empty() ? ordered_json(nullptr) : ordered_json(f.error);
    const auto put = [&](const char* key, const ordered_json& value) { j[key] = f.batch > 0 ? value : ordered_json(nullptr); };
    put("ratio", base == nullptr ? ordered_json(nullptr) : ordered_json(static_cast<double>(f.batch) / static_cast<double>(base->batch)));
    put("step_seconds", f.at.median());
    put("images_per_second", speed_of(f));
    put("saved_bytes", f.at.cost.saved_bytes);
    put("peak_bytes", f.at.cost.peak_bytes);
    put("total_bytes", f.at.total_bytes());
    list.push_back(j);
  }
  return list;
}

}  // namespace

int64_t largest_that_fits(int64_t guess, int64_t step, int64_t most, const std::function<bool(int64_t)>& fits) {
  const int64_t end = most / step;  // in steps from here on
  if (end < 1) return 0;
  int64_t at = std::clamp<int64_t>(guess / step, 1, end), below = 0, above = end + 1;
  while (above - below > 1) {
    (fits(at * step) ? below : above) = at;
    if (below == 0)
      at = above / 2;  // nothing has fitted yet
    else if (above > end)
      at = std::min(end, 2 * below);  // everything has
    else
      at = (below + above) / 2;
  }
  return below * step;
}

void run_bench_batch(const BenchBatchCommand& command) {
  BenchBatchCommand c = command;
  const std::vector<Method> methods = methods_from(c.images.methods, validate);
  const ImageBenchSetting setting = checked_setting(c.images);
  if (c.multiple > c.most) throw UsageError(fmt::format("[bench] --multiple must be at most --most, {}, got {}", c.most, c.multiple));
  const int64_t bytes = parse_bytes(c.images.memory_cap, "bench");
  if (c.images.threads > 0) at::set_num_threads(static_cast<int>(c.images.threads));
  const bool silent = c.images.json == "-";
  if (!silent) {
    fmt::print("{}, images of {} × {}{}{}, at most {} bytes; {}\n\n", setting.options.model, setting.image, setting.image,
               setting.options.tf32 ? ", TF32" : "", c.images.amp == "none" ? "" : ", autocast to " + c.images.amp, grouped(bytes),
               names_cuda(setting.options.device) ? gpu_name() : fmt::format("{} CPU threads", at::get_num_threads()));
    std::fflush(stdout);
  }
  const Search search(c, setting, bytes);
  ordered_json about = setting_json(setting, bytes);
  about["multiple"] = c.multiple;
  std::vector<Found> all;
  for (const Method& m : methods) {
    all.push_back(search.run(m));
    about["results"] = found_json(all);
    if (!c.images.json.empty() && !silent) write_json(c.images.json, about, "bench");
  }
  if (silent) {
    write_json(c.images.json, about, "bench");
  } else {
    print_found(all);
  }
  const auto failed = [](const Found& f) { return f.batch == 0 && !f.error.empty(); };
  if (std::ranges::all_of(all, failed)) fail("bench", "a method must run to its end", "none that did");
}

void add_bench_batch(CLI::App& bench) {
  const auto c = std::make_shared<BenchBatchCommand>();
  CLI::App* batch = bench.add_subcommand("batch", "The largest batch of an image model under a limit of memory, found by trying");
  add_image_bench_options(*batch, c->images);
  c->images.steps = 3;
  batch->add_option("--steps", c->images.steps, "Timed steps of each try")->transform(whole_number(1, 1000))->capture_default_str();
  batch->add_option("--memory-cap", c->images.memory_cap, "Most that training may take: 16GB, 15.5GiB, bytes")
      ->transform(byte_size())
      ->required();
  batch->add_option("--multiple", c->multiple, "Batches are multiples of this")->transform(whole_number(1, 1 << 16))->capture_default_str();
  batch->add_option("--most", c->most, "No batch is larger")->transform(whole_number(1, 1 << 20))->capture_default_str();
  batch->footer(
      "\nEach try builds the model anew and trains a few steps on generated images. On CUDA torch's allocator may take no more than\n"
      "the limit (weights, gradients, momentum, images, saves, workspaces and what the allocator loses between them). On the CPU the\n"
      "bytes of tensors that were measured are compared with it.\n"
      "  planned  what `satchel plan --fit` says, from sizes alone: an estimate that the search starts from\n"
      "  +        all that --most allows: more may fit\n"
      "\nExamples:\n  satchel bench batch --memory-cap 16GB --device cuda --tf32 --no-tries --json batch.json\n"
      "  satchel bench batch --memory-cap 64MB --model resnet18 --image 32 --classes 10 --width 8 --multiple 4");
  batch->callback([c] { run_bench_batch(*c); });
}

}  // namespace satchel::tool
