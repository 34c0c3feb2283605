#include "tools/bench_bias.h"

#include <ATen/Context.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/text_items.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/bench_bias_measure.h"
#include "tools/bench_bias_nets.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

struct BenchBiasCommand {
  std::string nets = "all", loss = "all", method = "satchel", device = "cpu", json;
  int64_t seeds = 200, again = 800;
};

constexpr std::pair<NetLoss, const char*> kLosses[] = {{NetLoss::cross_entropy, "cross-entropy"}, {NetLoss::squares, "squares"}};

std::string names_of_nets() {
  std::string text;
  for (const BiasNet& net : bias_nets()) text += (text.empty() ? "" : ", ") + net.name;
  return text;
}

std::vector<BiasNet> nets_of(const std::string& text) {
  const auto named = bias_nets(), pairs = pair_nets();
  if (text == "all") return {named.begin(), named.end()};
  if (text == "pairs") return {pairs.begin(), pairs.end()};
  std::vector<BiasNet> all(named.begin(), named.end()), chosen;
  all.insert(all.end(), pairs.begin(), pairs.end());
  for (const std::string_view name : split(text, ',')) {
    const auto net = std::ranges::find(all, name, &BiasNet::name);
    if (net == all.end()) {
      throw UsageError(fmt::format("[bench] --nets must be all, pairs, some of the pairs, or some of {}, got '{}'", names_of_nets(), name));
    }
    chosen.push_back(*net);
  }
  return chosen;
}

/// A tensor's first measurement and, where that was above the limit, the second.
struct Finding {
  TensorBias first, second;
  const TensorBias& counts() const { return second.passes > 0 ? second : first; }
  bool is_biased() const { return first.is_biased() && counts().is_biased(); }
  double size() const { return std::max(std::abs(counts().t), counts().z); }
};

struct NetFindings {
  std::string net, loss;
  int64_t rows;
  std::vector<Finding> tensors;
  std::vector<double> unrounded;

  int64_t biased() const { return std::ranges::count_if(tensors, &Finding::is_biased); }
  bool repeated() const {
    return std::ranges::any_of(tensors, [](const Finding& f) { return f.second.passes > 0; });
  }
  const Finding& worst() const {
    return *std::ranges::max_element(tensors, {}, [](const Finding& f) { return std::pair(f.is_biased(), f.size()); });
  }
};

NetFindings findings_of(const BiasNet& net, NetLoss loss, const std::string& loss_name, const Method& method, const BenchBiasCommand& c) {
  BiasProbe probe(net, loss, at::Device(c.device));
  NetFindings found{net.name, loss_name, net.rows, {}, probe.check_unrounded()};
  for (TensorBias& b : probe.measure(method, c.seeds, 1)) found.tensors.push_back({std::move(b), {}});
  const bool above = std::ranges::any_of(found.tensors, [](const Finding& f) { return f.first.is_biased(); });
  if (!above || c.again == 0) return found;
  const std::vector<TensorBias> again = probe.measure(method, c.again, static_cast<uint64_t>(c.seeds) + 1);
  for (size_t i = 0; i < again.size(); ++i) {
    if (found.tensors[i].first.is_biased()) found.tensors[i].second = again[i];
  }
  return found;
}

constexpr const char* kRow = "{:<31} {:<13} {:>7} {:<18} {:>7} {:>7} {:>9} {:>9}  {}\n";

void print_row(const NetFindings& n) {
  const TensorBias& b = n.worst().counts();
  const std::string verdict = n.biased() > 0 ? fmt::format("{} of {} biased", n.biased(), n.tensors.size())
                              : n.repeated() ? "ok, repeated"
                                             : "ok";
  fmt::print(kRow, n.net, n.loss, grouped(n.rows), b.name, fmt::format("{:+.1f}", b.t), fmt::format("{:+.1f}", b.z),
             fmt::format("{:.2f} %", 100 * b.bias), fmt::format("{:.2f} %", 100 * b.noise), verdict);
  std::fflush(stdout);
}

ordered_json json_of(const TensorBias& b) {
  return {{"seeds", b.passes}, {"t", b.t}, {"z", b.z}, {"bias", b.bias}, {"noise", b.noise}, {"gradient", b.gradient}};
}

ordered_json json_of(const NetFindings& n) {
  ordered_json tensors = ordered_json::array();
  for (size_t i = 0; i < n.tensors.size(); ++i) {
    const Finding& f = n.tensors[i];
    ordered_json line{{"name", f.first.name}, {"values", f.first.values}, {"biased", f.is_biased()}, {"error_32_bits", n.unrounded[i]}};
    line["first"] = json_of(f.first);
    if (f.second.passes > 0) line["again"] = json_of(f.second);
    tensors.push_back(std::move(line));
  }
  return {{"net", n.net}, {"loss", n.loss}, {"rows", n.rows}, {"biased", n.biased()}, {"tensors", std::move(tensors)}};
}

void run_bench_bias(const BenchBiasCommand& c) {
  const std::vector<BiasNet> nets = nets_of(c.nets);
  const std::vector<Method> methods = methods_from(c.method);
  if (methods.size() != 1) throw UsageError(fmt::format("[bench] --method must be one method, got {}", methods.size()));
  if (c.seeds < 2) throw UsageError(fmt::format("[bench] --seeds must be 2 or more, got {}", c.seeds));
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  if (c.device == "cuda" && !at::hasCUDA()) fail("bench", "--device cuda needs a GPU that torch can use", "none");
  TrainOptions options;
  options.device = c.device;
  const Tf32Guard full_precision(options);
  const bool silent = c.json == "-";
  if (!silent) {
    fmt::print("{}, {} seeds, {} again for what is above {:.0f}\n\n", methods[0].name, c.seeds, c.again, kMostBias);
    fmt::print(kRow, "net", "loss", "rows", "worst tensor", "t", "z", "bias", "noise", "verdict");
    std::fflush(stdout);
  }
  ordered_json results = ordered_json::array();
  int64_t biased = 0, tensors = 0;
  for (const BiasNet& net : nets) {
    for (const auto& [loss, name] : kLosses) {
      if (c.loss != "all" && c.loss != name) continue;
      const NetFindings found = findings_of(net, loss, name, methods[0], c);
      biased += found.biased();
      tensors += static_cast<int64_t>(found.tensors.size());
      results.push_back(json_of(found));
      if (!silent) print_row(found);
    }
  }
  if (!c.json.empty()) {
    write_json(c.json,
               {{"method", methods[0].name},
                {"seeds", c.seeds},
                {"again", c.again},
                {"limit", kMostBias},
                {"biased", biased},
                {"machine", machine_json(c.device)},
                {"results", results}},
               "bench");
  }
  if (biased > 0) fail("bench", "weight gradients must be right on average", fmt::format("{} of {} that are not", biased, tensors));
}

}  // namespace

void add_bench_bias(CLI::App& bench) {
  const auto c = std::make_shared<BenchBiasCommand>();
  CLI::App* bias = bench.add_subcommand("bias", "Are weight gradients right on average? Many nets and seeds beside plain torch");
  bias->add_option("--nets", c->nets, "all, pairs, or names with commas between them")->capture_default_str();
  bias->add_option("--loss", c->loss, "One loss")->check(CLI::IsMember({"all", "cross-entropy", "squares"}))->capture_default_str();
  bias->add_option("--method", c->method, "What the layers keep, see `satchel train --help`")->capture_default_str();
  bias->add_option("--seeds", c->seeds, "Passes with rounding noise of their own")
      ->transform(whole_number(2, 100000))
      ->capture_default_str();
  bias->add_option("--again", c->again, "Fresh passes for a net with a tensor above the limit; 0: the first ones count")
      ->transform(whole_number(0, 100000))
      ->capture_default_str();
  bias->add_option("--device", c->device, "Where to run")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  bias->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
  std::string list;
  for (const BiasNet& net : bias_nets()) list += fmt::format("  {:<14} {}\n", net.name, net.text);
  bias->footer(
      "\nEvery net is trained for 30 steps with plain torch; half of its norms' channels have γ < 0, some are dead, some always on. Then\n"
      "its gradient g is computed once by torch, and with packed saves as often as --seeds says; e is the error of such a pass. Dropout's\n"
      "masks are the same on both sides. At 32 bits the gradients are checked to be torch's.\n"
      "  t      Student's t of <e, g>/|g|: bias along the gradient; -5 to 5\n"
      "  z      of T, the mean of <e_j, e_k> over pairs of passes, which is |bias|^2 on average: bias in any direction; at most 5\n"
      "  bias   sqrt(T)/|g|, 0 where T is negative; noise alone leaves some of it\n"
      "  noise  |e|/|g| of a single pass\n"
      "A tensor above is measured again with fresh seeds and counts as biased if it is above again; then the exit code is 1.\n"
      "\nNets:\n" +
      list +
      "\nPairs are a weight, a norm (batch, layer, group, rms), an activation (none, relu, leaky_relu, elu, gelu, gelu_tanh, silu, tanh,\n"
      "sigmoid), perhaps dropout, and a weight: layer_gelu_rows, batch_relu_images_dropout; 144 in all.\n"
      "\nExamples:\n  satchel bench bias --json bias.json\n  satchel bench bias --nets batch,sage --seeds 50 --method satchel,bits=3");
  bias->callback([c] { run_bench_bias(*c); });
}

}  // namespace satchel::tool
