#include "tools/train_report.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/kernels/cpu/cpu.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "satchel/train/replacement.h"
#include "tools/progress.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

struct Spread {
  double mean = 0, deviation = 0;
  size_t count = 0;
  double error() const { return deviation / std::sqrt(static_cast<double>(count)); }
};

Spread spread_of(const std::vector<double>& values) {
  Spread s;
  s.count = values.size();
  if (values.empty()) return s;
  for (const double v : values) s.mean += v / static_cast<double>(s.count);
  for (const double v : values) s.deviation += (v - s.mean) * (v - s.mean);
  s.deviation = s.count > 1 ? std::sqrt(s.deviation / static_cast<double>(s.count - 1)) : 0;
  return s;
}

std::string spread_text(const Spread& s, double plus_minus, const char* format_of_mean) {
  if (std::isnan(s.mean)) return "-";  // nothing to test on
  const std::string mean = fmt::format(fmt::runtime(format_of_mean), s.mean);
  return s.count > 1 ? mean + fmt::format(" ± {:.2f}", plus_minus) : mean;
}

/// The runs of one method.
struct Group {
  std::string method;
  std::vector<const RunResult*> runs;

  template <class Field>
  double mean(Field field) const {
    double sum = 0;
    for (const RunResult* r : runs) sum += static_cast<double>(r->*field);
    return sum / static_cast<double>(runs.size());
  }
};

std::vector<Group> grouped_runs(const std::vector<RunResult>& runs) {
  std::vector<Group> groups;
  for (const RunResult& r : runs) {
    auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.method == r.method; });
    if (found == groups.end()) found = groups.insert(groups.end(), Group{r.method, {}});
    found->runs.push_back(&r);
  }
  return groups;
}

size_t seeds_of(const std::vector<Group>& groups) {
  size_t seeds = 0;
  for (const Group& g : groups) seeds = std::max(seeds, g.runs.size());
  return seeds;
}

std::vector<double> paired_differences(const Group& own, const Group& base) {
  std::vector<double> differences;
  for (const RunResult* a : own.runs) {
    for (const RunResult* b : base.runs) {
      if (a->seed == b->seed) differences.push_back(a->test - b->test);
    }
  }
  return differences;
}

template <class Field>
std::string bytes_beside(const Group& own, const Group* base, Field field) {
  const double bytes = own.mean(field);
  const std::string text = bytes_text(std::llround(bytes));
  return base == nullptr || base == &own ? text : text + " " + less_text(base->mean(field), bytes);
}

std::vector<std::string> row_of(const Group& own, const Group* base) {
  std::vector<double> tests;
  for (const RunResult* r : own.runs) tests.push_back(r->test);
  const Spread test = spread_of(tests);
  std::vector<std::string> row{own.method, spread_text(test, test.deviation, "{:.2f}")};
  if (base != nullptr) {
    const Spread difference = spread_of(base == &own ? std::vector<double>{} : paired_differences(own, *base));
    row.push_back(difference.count == 0 ? "" : spread_text(difference, difference.error(), "{:+.2f}"));
  }
  row.push_back(bytes_beside(own, base, &RunResult::saved_bytes));
  row.push_back(bytes_beside(own, base, &RunResult::loss_bytes));
  row.push_back(bytes_beside(own, base, &RunResult::peak_bytes));
  const double seconds = own.mean(&RunResult::step_seconds);
  row.push_back(fmt::format("{:.2f} ms", seconds * 1e3));
  if (base != nullptr && base != &own && seconds > 0)
    row.back() += fmt::format(" ({:.2f}x)", seconds / base->mean(&RunResult::step_seconds));
  return row;
}

/// Characters of UTF-8 text.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

/// ", fp16", or ", fp16 (satchel)" where not all of them have it.
std::string types_text(const std::vector<RunResult>& runs) {
  std::string text;
  for (const Amp amp : {Amp::bf16, Amp::fp16}) {
    std::string names;
    bool all = true;
    for (const Group& g : grouped_runs(runs)) {
      const bool own = g.runs.front()->amp == amp;
      all = all && own;
      if (own) names += (names.empty() ? "" : ", ") + g.method;
    }
    if (!names.empty()) text += ", " + name_of(amp) + (all ? "" : " (" + names + ")");
  }
  return text;
}

}  // namespace

const char* metric_name(Task task) {
  switch (task) {
    case Task::single_label: return "accuracy";
    case Task::multi_label: return "micro-F1";
    case Task::binary: return "ROC AUC";
  }
  return "";
}

std::string less_text(double fp32, double own) {
  if (own <= 0 || fp32 <= 0) return "";
  return own <= fp32 ? fmt::format("({:.1f}x less)", fp32 / own) : fmt::format("({:.1f}x more)", own / fp32);
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - width_of(row[i]), ' ');
      line += (i == 0 ? row[i] + space : "  " + space + row[i]);
    }
    fmt::print("{}\n", line.substr(0, line.find_last_not_of(' ') + 1));
  }
}

void print_runs(const std::vector<RunResult>& runs, const std::string& metric, const std::string& timed) {
  const std::vector<Group> groups = grouped_runs(runs);
  const auto fp32 = std::find_if(groups.begin(), groups.end(), [](const Group& g) { return g.method == "fp32"; });
  const Group* base = fp32 == groups.end() ? nullptr : &*fp32;
  std::vector<std::vector<std::string>> rows{{"method", fmt::format("test {} %", metric)}};
  if (base != nullptr) rows[0].push_back("- fp32");
  for (const std::string& title : {std::string("saved"), std::string("loss bytes"), std::string("peak"), timed}) rows[0].push_back(title);
  for (const Group& g : groups) rows.push_back(row_of(g, base));
  print_table(rows);
  fmt::print(
      "\nsaved: bytes kept from forward to backward; loss bytes: logits and what the loss keeps; peak: most that a step allocates beyond "
      "what stood\nbefore it (weights, gradients, optimizer state); {}: median step\n",
      timed);
  if (std::ranges::any_of(runs, [](const RunResult& r) { return r.peak_bytes < r.saved_bytes; }))
    fmt::print(
        "peak is below saved where gradients outweigh saves: the step before left its own, which are released before forward and leave "
        "room for the saves\n");
  for (const Group& g : groups) {
    const int64_t cached = std::llround(g.mean(&RunResult::cached_bytes));
    if (cached > 0)
      fmt::print("{}: peak includes {} of A·X, computed once for all steps (--no-cache does without)\n", g.method, bytes_text(cached));
    const int64_t edges = std::llround(g.mean(&RunResult::last_layer_bytes));
    if (edges > 0)
      fmt::print("{}: peak includes {} of edges, for a last layer of training nodes alone (--last-layer all does without)\n", g.method,
                 bytes_text(edges));
  }
  if (seeds_of(groups) > 1)
    fmt::print("±: standard deviation over seeds{}\n", base != nullptr ? "; of - fp32: standard error over pairs of a seed" : "");
}

void print_comparison(const std::vector<RunResult>& runs, const RunsAbout& about) {
  const size_t seeds = seeds_of(grouped_runs(runs));
  fmt::print("\n{} on {}, {} layers × {}, {} {}{}{}{}\n\n", about.shape.conv, about.data, about.shape.layers, about.shape.hidden, seeds,
             seeds == 1 ? "seed" : "seeds", about.tf32 ? ", TF32" : "", types_text(runs),
             std::ranges::any_of(runs, &RunResult::cuda_graph) ? ", CUDA graph" : "");
  print_runs(runs, metric_name(about.task), "epoch");
}

ordered_json tensors_json(const std::vector<SavedTensor>& tensors) {
  ordered_json list = ordered_json::array();
  for (const SavedTensor& t : tensors) {
    list.push_back(
        {{"name", t.name}, {"kind", t.kind}, {"shape", t.shape}, {"bits", t.bits}, {"bytes", t.bytes}, {"fp32_bytes", t.fp32_bytes}});
  }
  return list;
}

ordered_json machine_json(const std::string& device) {
  ordered_json machine = {{"threads", at::get_num_threads()}, {"kernel", best_cpu_kernel().name}, {"torch", TORCH_VERSION}};
  if (names_cuda(device)) machine["gpu"] = gpu_name();
  return machine;
}

void write_json(const std::string& path, const ordered_json& json, const char* op) {
  const std::string text = json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";  // names of files may be no UTF-8
  if (path == "-") {
    fmt::print("{}", text);
    return;
  }
  try {
    Replacement file(path, op);
    file.write(text.data(), text.size());
    file.finish();
  } catch (const Error&) {
    fmt::print("{}", text);
    fail(op, "--json must name a file that can be written (its text is on stdout)", path);
  }
}

std::string method_help() {
  std::string text = "\nMethods: NAME[,OPTION=VALUE…], or a spec's options alone (see `satchel presets --help`)\n";
  for (const MethodPreset& p : method_presets()) text += fmt::format("  {:<11} {}\n", p.name, p.summary);
  for (const Preset& p : presets()) {
    const bool known = std::ranges::any_of(method_presets(), [&](const MethodPreset& m) { return m.name == p.name; });
    if (!known) text += fmt::format("  {:<11} {}, in shared saves\n", p.name, p.summary);
  }
  return text +
         "  Beside a spec's options: norm_bits=1..8 (bits of norms that no other layer reads) and norm_bias=0..1 of methods that\n"
         "  share saves · derivative_bits=1..8 (of GELU, SiLU, tanh and sigmoid) · mean_bits=2..3 or budget=SIZE (satchel, images: 2 or 3\n"
         "  bits per sample) · level=0..5 as ActNN's paper counts, adaptive=yes|no (actnn)\n"
         "  Several: repeat --method, or separate them by commas; a part with = belongs to the method before it.\n";
}

}  // namespace satchel::tool
