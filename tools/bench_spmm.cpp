#include "tools/bench_spmm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "satchel/data/graph_data.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/options.h"
#include "tools/quality.h"
#include "tools/time_of.h"
#include "tools/tool.h"
#include "tools/torch_model.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

struct BenchSpmmCommand {
  std::vector<std::string> graphs = {"synthetic:arxiv", "power"};
  std::vector<int64_t> widths = {16, 32, 40, 64, 100, 128, 256, 512};
  std::string device = "cuda", json;
  int repeat = 15;
};

/// As many nodes and edges as arxiv's, one end of every edge drawn as nodes·u⁴: the first node has some hundredth of all edges.
Csr power_law() {
  constexpr int64_t kNodes = 169343, kEdges = 1166243;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{7});
  const auto drawn = [&](double power) {
    return (at::rand({kEdges}, generator, at::kDouble).pow(power) * static_cast<double>(kNodes)).to(at::kLong).clamp_max(kNodes - 1);
  };
  const at::Tensor place = at::randperm(kNodes, generator, at::kLong);
  return without_self_loops(made_symmetric(csr_from_coo(drawn(1), place.index_select(0, drawn(4)), kNodes, kNodes)));
}

Adjacency adjacency_named(const std::string& name) {
  if (name == "power") return mean_adjacency(power_law());
  TrainOptions options;
  options.amp = Amp::none;
  return make_task(load_graph(name), options).a;
}

/// Throws unless A·x is torch's within rounding: a sum of n float32 terms is off by at most n·2⁻²⁴ of the terms' sizes together. In
/// 16 bits, where torch rounds partial sums too, it must be float32's own result rounded once: within 2⁻⁸ (float16: 2⁻¹¹, and below its
/// normal numbers 2⁻²⁵).
void check(const Csr& matrix, const at::Tensor& x, const at::Tensor& torchs, int64_t longest) {
  const bool single = x.scalar_type() == at::kFloat;
  const at::Tensor own = multiply(matrix, x).to(at::kDouble), wide = x.to(at::kFloat);
  const at::Tensor other = (single ? at::matmul(torchs, x) : multiply(matrix, wide)).to(at::kDouble);
  const at::Tensor sizes = (single ? multiply(matrix, x.abs()).to(at::kDouble) : other.abs());
  const double share = single ? static_cast<double>(longest) * 0x1p-24 : x.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-8;
  const double over = ((own - other).abs() / (sizes * share + (x.scalar_type() == at::kHalf ? 0x1p-25 : 1e-30))).max().item<double>();
  if (!(over <= 1)) fail("bench", "A·x must be right within rounding", fmt::format("{:.2f} times as much", over));
}

void bench_graph_of(const std::string& name, const BenchSpmmCommand& c, at::Device device, ordered_json& results, bool silent) {
  const Adjacency here = adjacency_named(name), a = to_device(here, device);
  const int64_t longest = here.matrix.start.diff().max().item<int64_t>();
  if (!silent) {
    fmt::print("{}: {} nodes, {} entries, the longest row {}; {}\n\n", name, grouped(here.nodes()), grouped(here.matrix.entries()),
               grouped(longest), device.is_cuda() ? gpu_name() : "CPU");
  }
  std::vector<std::vector<std::string>> rows{{"type", "columns", "A·x", "torch", "of torch", "Aᵀ·x", "torch", "of torch", "gathered"}};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    if (type != at::kFloat && !device.is_cuda()) continue;  // torch's CPU product is float32's
    const char* type_name = type == at::kFloat ? "f32" : type == at::kHalf ? "f16" : "bf16";
    const at::Tensor forth = torch_csr(here.matrix, device, type), back = torch_csr(here.transpose, device, type);
    for (const int64_t width : c.widths) {
      const at::Tensor x = at::randn({here.nodes(), width}).to(device, type);
      ordered_json line{{"graph", name}, {"type", type_name}, {"columns", width}};
      std::vector<std::string> row{type_name, std::to_string(width)};
      double own = 0;
      for (const auto& [matrix, torchs, key] : {std::tuple{&a.matrix, &forth, "forward"}, std::tuple{&a.transpose, &back, "transpose"}}) {
        check(*matrix, x, *torchs, longest);
        own = time_of([&] { multiply(*matrix, x); }, device, c.repeat);
        const double theirs = time_of([&] { at::matmul(*torchs, x); }, device, c.repeat);
        for (std::string text :
             {fmt::format("{:.3f} ms", own * 1e3), fmt::format("{:.3f} ms", theirs * 1e3), fmt::format("{:.2f}x", own / theirs)})
          row.push_back(std::move(text));
        line[key] = {{"seconds", own}, {"torch_seconds", theirs}, {"ratio", own / theirs}};
      }
      const double bytes = static_cast<double>(here.matrix.entries() * width) * static_cast<double>(x.element_size());
      row.push_back(fmt::format("{:.2f} TB/s", bytes / own * 1e-12));
      rows.push_back(std::move(row));
      results.push_back(std::move(line));
    }
  }
  if (!silent) {
    print_table(rows);
    fmt::print("\n");
  }
}

void run_bench_spmm(const BenchSpmmCommand& c) {
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  const at::Device device = use_device(c.device, "bench");
  ordered_json results = ordered_json::array();
  for (const std::string& graph : c.graphs) bench_graph_of(graph, c, device, results, c.json == "-");
  if (!c.json.empty()) write_json(c.json, {{"device", c.device}, {"machine", machine_json(c.device)}, {"results", results}}, "bench");
}

}  // namespace

void add_bench_spmm(CLI::App& bench) {
  const auto c = std::make_shared<BenchSpmmCommand>();
  CLI::App* spmm = bench.add_subcommand("spmm", "A·x beside torch's product of a sparse CSR matrix (cuSPARSE, MKL)");
  spmm->add_option("--data", c->graphs, "Graphs, as for train; `power` is one of arxiv's size whose degrees follow a power law")
      ->capture_default_str();
  spmm->add_option("--widths", c->widths, "Columns of x, 1 to 4096 each")
      ->transform(whole_number(1, 4096))
      ->delimiter(',')
      ->capture_default_str();
  spmm->add_option("--device", c->device, "Where to multiply")->check(device_name())->capture_default_str();
  spmm->add_option("--repeat", c->repeat, "Timed runs of which the median counts")->check(CLI::Range(1, 100000))->capture_default_str();
  spmm->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
  spmm->footer(
      "\nA averages a node's neighbours (rows scaled), Aᵀ is what backward multiplies with (columns scaled). Checked first: results\n"
      "are torch's within the rounding of a sum. Sums are in one fixed order: equal bits in every run.\n"
      "\nExamples:\n  satchel bench spmm\n  satchel bench spmm --data power --widths 40,128 --json spmm.json");
  spmm->callback([c] { run_bench_spmm(*c); });
}

}  // namespace satchel::tool
