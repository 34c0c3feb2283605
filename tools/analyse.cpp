#include "tools/analyse.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <variant>

#include "satchel/autograd/seeds.h"
#include "satchel/core/distribution.h"
#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "satchel/core/layout.h"
#include "satchel/core/levels.h"
#include "satchel/core/text_items.h"
#include "satchel/plan/image_shape.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/project.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kGroup = 64;  // rows that are taken together, so that blocks of up to so many are of neighbours
constexpr int64_t kProjectionSeed = 1;
constexpr int kMostOptimal = 4;  // bits

constexpr const char* kGraphBlocks = "row,8rows,64rows";
constexpr const char* kImageBlocks = "64,256,1024";

/// Whole groups of rows, or samples, evenly spread over all of them, so many values at most. In the order in memory, as rows of one group
/// each; float32 on the CPU.
at::Tensor sampled(const at::Tensor& x, int64_t most) {
  const bool maps = x.dim() > 2;
  const at::Tensor in_order = maps && is_channels_last(x) ? x.movedim(1, -1) : x;
  const at::Tensor rows = in_order.reshape({in_order.size(0), -1});
  const int64_t each = maps ? 1 : std::min(kGroup, rows.size(0));
  const int64_t groups = rows.size(0) / each;
  const int64_t taken = std::clamp<int64_t>(most / std::max<int64_t>(each * rows.size(1), 1), 1, std::max<int64_t>(groups, 1));
  std::vector<at::Tensor> some;
  for (int64_t i = 0; i < taken; ++i) some.push_back(rows.narrow(0, i * groups / taken * each, each));
  return at::cat(some).to(at::kCPU, at::kFloat).contiguous();
}

/// "row", "64rows" or a number of values, for rows of so many columns.
int64_t block_values(const std::string& text, int64_t columns) {
  const int64_t block = parse_spec("bits=2,block=" + text).block;
  if (block == kMap) fail("analyse", "blocks must be row, Nrows or a number of values", text);
  return block > 0 ? block : -block * columns;
}

std::vector<std::string> block_names(const AnalyseCommand& c, bool graph) {
  std::vector<std::string> names;
  const std::string all = c.blocks.empty() ? (graph ? kGraphBlocks : kImageBlocks) : c.blocks;
  for (const std::string_view part : split(all, ',')) {
    try {
      block_values(std::string(part), 1);
    } catch (const Error&) {
      throw UsageError(fmt::format("[analyse] --blocks must be row, Nrows or numbers of values, got '{}'", part));
    }
    if (!graph && (part.ends_with("row") || part.ends_with("rows")))
      throw UsageError(fmt::format("[analyse] blocks of rows are for graphs; images have blocks of values, got '{}'", part));
    names.emplace_back(part);
  }
  return names;
}

std::vector<int> bits_of(const std::string& text) {
  std::vector<int> bits;
  for (const std::string_view part : split(text, ',')) {
    if (part.size() != 1 || part[0] < '1' || part[0] > '8')
      throw UsageError(fmt::format("[analyse] --bits must be numbers from 1 to 8, got '{}'", part));
    bits.push_back(part[0] - '0');
  }
  return bits;
}

/// 0: none.
int ratio_of(const std::string& text) {
  if (text == "none") return 0;
  try {
    return std::get<RandomProjection>(parse_spec("project=" + text).transform).ratio;
  } catch (const Error&) {
    throw UsageError(fmt::format("[analyse] --project must be none or a ratio, as 8, got '{}'", text));
  }
}

BlockStudy::Bits study_bits(const NormalisedBlocks& values, int bits) {
  BlockStudy::Bits b;
  b.bits = bits;
  const auto block = static_cast<double>(values.block);
  const std::vector<double> even = even_levels(1 << bits);
  b.uniform = uniform_variance(even);
  b.normal = expected_variance(even, block);
  b.measured = rounding_variance(values.values, even);
  b.has_optimal = bits > 1 && bits <= kMostOptimal && values.block >= 3;
  if (!b.has_optimal) return b;
  const std::vector<double> best = optimal_levels(1 << bits, block);
  b.optimal_normal = expected_variance(best, block);
  b.optimal_measured = rounding_variance(values.values, best);
  return b;
}

SaveStudy study_save(const at::Tensor& x, const std::string& name, const char* kind, const AnalyseCommand& c,
                     const std::vector<std::string>& blocks) {
  SaveStudy s;
  s.name = name;
  s.kind = kind;
  s.shape = x.sizes().vec();
  for (const std::string& block : blocks) s.blocks.push_back(study_block(x, block, bits_of(c.bits)));
  return s;
}

ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

ordered_json json_of(const BlockStudy& b) {
  ordered_json bits = ordered_json::array();
  for (const BlockStudy::Bits& v : b.bits) {
    ordered_json line{{"bits", v.bits}, {"uniform", v.uniform}, {"normal", v.normal}, {"measured", v.measured}};
    if (v.has_optimal) {
      line.update({{"optimal_normal", v.optimal_normal},
                   {"optimal_measured", v.optimal_measured},
                   {"expected_gain", number(v.expected_gain())},
                   {"gain", number(v.gain())}});
    }
    bits.push_back(std::move(line));
  }
  return {{"block", b.name},
          {"values", b.block},
          {"blocks", b.blocks},
          {"constant_blocks", b.constant},
          {"nonfinite_blocks", b.nonfinite},
          {"js_uniform", b.js_uniform},
          {"js_normal", b.js_normal},
          {"variances", std::move(bits)},
          {"histogram", b.histogram}};
}

ordered_json json_of(const std::vector<SaveStudy>& saves) {
  ordered_json list = ordered_json::array();
  for (const SaveStudy& s : saves) {
    ordered_json blocks = ordered_json::array();
    for (const BlockStudy& b : s.blocks) blocks.push_back(json_of(b));
    list.push_back({{"name", s.name}, {"kind", s.kind}, {"projected", s.projected}, {"shape", s.shape}, {"blocks", std::move(blocks)}});
  }
  return list;
}

ordered_json json_of(const std::vector<WeightStudy>& weights) {
  ordered_json list = ordered_json::array();
  for (const WeightStudy& w : weights) {
    ordered_json methods = ordered_json::array();
    for (const WeightStudy::Method& m : w.methods) {
      methods.push_back({{"method", m.method},
                         {"bias", number(m.bias)},
                         {"t", number(m.t)},
                         {"z", number(m.z)},
                         {"variance", number(m.variance)},
                         {"cosine", number(m.cosine)}});
    }
    list.push_back({{"name", w.name},
                    {"values", w.values},
                    {"gradient", w.gradient},
                    {"negligible", w.negligible},
                    {"batch_variance", w.batch_variance},
                    {"methods", std::move(methods)}});
  }
  return list;
}

void print_saves(const std::vector<SaveStudy>& saves) {
  std::vector<std::vector<std::string>> rows{{"layer", "kept", "block", "values", "bits", "JS uniform", "JS normal", "var uniform",
                                              "normal", "measured", "optimal normal", "measured", "gain"}};
  int64_t nearer = 0, all = 0;
  for (const SaveStudy& s : saves) {
    for (const BlockStudy& b : s.blocks) {
      if (b.blocks == 0) continue;
      ++all;
      nearer += b.js_normal < b.js_uniform ? 1 : 0;
      for (const BlockStudy::Bits& v : b.bits) {
        const auto four = [](double x) { return fmt::format("{:.4f}", x); };
        rows.push_back({s.name, s.kind + (s.projected ? ", projected" : ""), b.name, grouped(b.block), fmt::format("{}", v.bits),
                        four(b.js_uniform), four(b.js_normal), four(v.uniform), four(v.normal), four(v.measured),
                        v.has_optimal ? four(v.optimal_normal) : "-", v.has_optimal ? four(v.optimal_measured) : "-",
                        v.has_optimal ? fmt::format("{:.1f} %", 100 * v.gain()) : "-"});
      }
    }
  }
  print_table(rows);
  fmt::print(
      "\nJS: Jensen-Shannon divergence, in nats, of the normalised values to the model; nearer to the clipped normal: {} of {}\n"
      "var: variance of stochastic rounding in steps^2, predicted by either model and measured on the values, with even and with optimal "
      "levels\n",
      nearer, all);
}

void print_gradients(const std::vector<WeightStudy>& weights, const Subject& subject) {
  std::vector<std::vector<std::string>> rows{{"weight", "method", "|g|", "bias", "variance", "of batch's", "cosine"}};
  for (const WeightStudy& w : weights) {
    for (const WeightStudy::Method& m : w.methods) {
      const bool none = w.negligible;
      rows.push_back({w.name, m.method, fmt::format("{:.3g}", w.gradient), none ? "-" : fmt::format("{:.2f} %", 100 * m.bias),
                      none ? "-" : fmt::format("{:.2e}", m.variance),
                      none || w.batch_variance == 0 ? "-" : fmt::format("{:.3f}", m.variance / w.batch_variance),
                      none ? "-" : fmt::format("{:.4f}", m.cosine)});
    }
  }
  print_table(rows);
  fmt::print(
      "\nbias and variance of a gradient with packed saves around the exact one, over its norm (squared); noise alone leaves some bias\n"
      "of batch's: that variance over the exact gradient's own, taken over {}: below 1 the batch is the louder noise\n"
      "-: a gradient of rounding errors alone, as that of a bias before a BatchNorm\n",
      subject.parts_name());
}

void check_use(const AnalyseCommand& c) {
  if (!c.checkpoint.empty() && c.epochs > 0)
    throw UsageError(fmt::format("[analyse] --epochs are of a fresh model, not of --checkpoint, got {}", c.epochs));
  check_not_data("analyse", "--json", c.json, c.data);
  if (!c.json.empty() && c.json != "-") {
    check_output(c.json, "analyse");
    check_apart("analyse", "--json", c.json, "--checkpoint", c.checkpoint);
  }
  bits_of(c.bits);
  ratio_of(c.project);
  block_names(c, /*graph=*/true);  // of images once it is known that they are
}

std::vector<std::string> all_model_names() {
  std::vector<std::string> names = graph_layer_names();
  for (const std::string_view name : image_model_names()) names.emplace_back(name);
  return names;
}

void run_analyse(const AnalyseCommand& c) {
  check_use(c);
  const at::Device device = use_device(c.device, "analyse");
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const bool silent = c.json == "-";
  if (c.methods_given) methods_from(c.methods, validate);  // refused before anything is read
  SubjectOptions options = c;
  options.quiet = silent;
  const std::unique_ptr<Subject> subject = make_subject(options);
  const bool graph = subject->is_graph();
  block_names(c, graph);
  const std::string names = c.methods_given || graph ? c.methods : "actnn,division,satchel";
  using Check = void (*)(const Method&, const char*);
  const Check check = graph ? Check{validate_for_graph} : Check{validate};
  const std::vector<Method> methods = c.gradients ? methods_from(names, check) : std::vector<Method>();
  TrainOptions plain;
  plain.device = c.device;
  const Tf32Guard full_precision(plain);
  if (!silent) {
    fmt::print("{} on {}, {}\n\n", subject->model(), subject->data(),
               subject->epochs() == 0 ? "not trained" : fmt::format("after {} epochs", subject->epochs()));
    std::fflush(stdout);
  }
  const std::vector<SaveStudy> saves = study_saves(*subject, c);
  if (!silent) print_saves(saves);
  std::vector<WeightStudy> weights;
  if (c.gradients) {
    weights = study_gradients(*subject, methods, c.draws, c.parts);
    if (!silent) {
      fmt::print("\n");
      print_gradients(weights, *subject);
    }
  }
  if (c.json.empty()) return;
  ordered_json all{
      {"kind", "analyse"},           {"version", SATCHEL_VERSION}, {"model", subject->model()},         {"data", subject->data()},
      {"epochs", subject->epochs()}, {"device", device.str()},     {"machine", machine_json(c.device)}, {"bins", kHistogramBins},
      {"saves", json_of(saves)}};
  if (c.gradients) {
    all["gradients"] = {{"draws", c.draws}, {"parts", c.parts}, {"parts_are", subject->parts_name()}, {"weights", json_of(weights)}};
  }
  write_json(c.json, all, "analyse");
}

}  // namespace

BlockStudy study_block(const at::Tensor& x, const std::string& block, const std::vector<int>& bits) {
  const bool maps = x.dim() > 2;
  const int64_t columns = maps ? x.numel() / std::max<int64_t>(x.size(0), 1) : x.size(-1);
  BlockStudy b;
  b.name = block;
  b.block = block_values(block, columns);
  const std::span<const float> values(x.const_data_ptr<float>(), static_cast<size_t>(x.numel()));
  const NormalisedBlocks normalised = normalise_blocks(values, maps ? columns : std::max<int64_t>(x.numel(), 1), b.block);
  b.blocks = normalised.blocks;
  b.constant = normalised.constant;
  b.nonfinite = normalised.nonfinite;
  if (b.blocks == 0) return b;
  b.histogram = histogram(normalised.values, kHistogramBins);
  b.js_uniform = jensen_shannon(b.histogram, uniform_shares(kHistogramBins));
  if (b.block >= 3) b.js_normal = jensen_shannon(b.histogram, clipped_normal_shares(kHistogramBins, static_cast<double>(b.block)));
  for (const int each : bits) b.bits.push_back(study_bits(normalised, each));
  return b;
}

std::vector<SaveStudy> study_saves(Subject& subject, const AnalyseCommand& c) {
  const std::vector<std::string> blocks = block_names(c, subject.is_graph());
  const int ratio = subject.is_graph() ? ratio_of(c.project) : 0;
  std::vector<SaveStudy> studies;
  subject.forward([&](const std::string& name, Kind kind, const at::Tensor& x) {
    if (x.numel() == 0 || x.dim() < 2) return;
    const at::Tensor some = sampled(x, c.values);
    const at::Tensor shaped = x.dim() > 2 ? some.unsqueeze(1) : some;  // a row is a sample: blocks start anew with it
    studies.push_back(study_save(shaped, name, name_of(kind), c, blocks));
    studies.back().shape = x.sizes().vec();
    const bool projects = ratio > 0 && x.dim() == 2 && (kind == Kind::input || kind == Kind::aggregate) && ceil_div(x.size(1), ratio) >= 3;
    if (!projects) return;
    const at::Tensor seed = at::full({1}, kProjectionSeed, at::kLong);
    const at::Tensor z = apply_projection(some, RandomProjection{ratio, 0, false}, seed).contiguous();
    studies.push_back(study_save(z, name, name_of(kind), c, blocks));
    studies.back().projected = true;
  });
  return studies;
}

void add_analyse(CLI::App& app) {
  const auto c = std::make_shared<AnalyseCommand>();
  CLI::App* analyse =
      app.add_subcommand("analyse", "How activations lie in their blocks, and what packing them does to each weight's gradient");
  analyse->add_option("--data", c->data, "Graph or images, as for train")->required();
  analyse->add_option("--checkpoint", c->checkpoint, "Weights of a run of `satchel train` (default: a fresh model, see --epochs)")
      ->transform(file_name());
  analyse->add_option("--blocks", c->blocks, "Block sizes: row, Nrows, or values, with commas between them")
      ->default_str(fmt::format("{}; images {}", kGraphBlocks, kImageBlocks));
  analyse->add_option("--bits", c->bits, "Bits, 1 to 8, with commas between them")->capture_default_str();
  analyse->add_option("--project", c->project, "Graphs: ratio of the random projection of inputs, or none")->capture_default_str();
  analyse->add_option("--values", c->values, "Most values that are looked at of each save, spread over all rows or samples")
      ->transform(whole_number(1000))
      ->capture_default_str();
  analyse->add_flag("--gradients", c->gradients, "Also bias, variance and cosine of every weight's gradient, see below");
  CLI::Option* method = analyse->add_option("--method", c->methods, "Methods of --gradients, see `satchel train --help`")
                            ->default_str(c->methods + "; images actnn,division,satchel");
  analyse->add_option("--draws", c->draws, "Passes with rounding noise of their own")
      ->transform(whole_number(2, 100000))
      ->capture_default_str();
  analyse->add_option("--parts", c->parts, "Batches, or halves of the training nodes, for the batch's own variance")
      ->transform(whole_number(2, 100000))
      ->capture_default_str();
  analyse->add_option("--device", c->device, "Where to compute")->check(device_name())->capture_default_str();
  analyse->add_option("--threads", c->threads, kThreadsHelp)->transform(whole_number(1, 4096));
  analyse
      ->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table; `satchel report` draws them")
      ->transform(file_name());
  constexpr const char* kFresh = "Fresh models";
  const auto fresh = [&](CLI::Option* option) { return option->group(kFresh); };
  fresh(analyse->add_option("--epochs", c->epochs, "Train for so many epochs first, in full precision"))
      ->transform(whole_number(0))
      ->capture_default_str();
  fresh(analyse->add_option("--model", c->model, "Graph layer, or image model"))
      ->check(CLI::IsMember(all_model_names()))
      ->capture_default_str();
  fresh(analyse->add_option("--layers", c->layers, "Graph layers"))->transform(whole_number(1, 1000))->capture_default_str();
  fresh(analyse->add_option("--hidden", c->hidden, "Width between graph layers"))
      ->transform(whole_number(1, 1 << 20))
      ->capture_default_str();
  fresh(analyse->add_option("--norm", c->norm, "Norm between graph layers"))->check(members<Norm>())->capture_default_str();
  fresh(analyse->add_option("--activation", c->activation, "Activation between graph layers"))
      ->check(members<Activation>())
      ->capture_default_str();
  fresh(analyse->add_option("--dropout", c->dropout, "As train's"))->transform(real_number());
  fresh(analyse->add_option("--lr", c->lr, "As train's"))->transform(real_number());
  fresh(analyse->add_option("--width", c->width, "Images: channels of the first stage"))
      ->transform(whole_number(1, 1 << 12))
      ->capture_default_str();
  fresh(analyse->add_option("--batch", c->batch, "Images a step"))->transform(whole_number(1, 1 << 20))->capture_default_str();
  fresh(analyse->add_option("--seed", c->seed, "Of weights, dropout and a drawn split"))
      ->transform(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  fresh(analyse->add_option("--split", c->split, "Which of the data's splits"))->transform(whole_number(0))->capture_default_str();
  analyse->add_flag("--unweighted", c->unweighted, "Graphs: take edges without their weights");
  analyse->add_option("--loaders", c->loaders, "Threads that prepare batches of images")
      ->transform(whole_number(1, 256))
      ->capture_default_str();
  analyse->footer(
      "\nActivations: one training pass in full precision in which every layer shows what it would pack, dropout as in training. Graphs: "
      "as\n"
      "EXACT keeps it, the inputs of layers, A·x and the inputs of norms; inputs also projected. Images: inputs of layers and norms. The\n"
      "values of a block are brought to 0 ... 1 by its own minimum and maximum; blocks without a range are left out. The models are the\n"
      "uniform distribution, and the normal with mean 1/2 that is clipped at both ends, 1/D of its values at each (D: values a block).\n"
      "Gradients: against torch's own in full precision, without dropout, in batch statistics: graphs over all training nodes, images "
      "over\n"
      "the first batch. The batch's own variance: over --parts batches; graphs: over random halves of the training nodes.\n"
      "\nExamples:\n  satchel analyse --data synthetic:arxiv,scale=0.1 --epochs 20 --gradients --json a.json\n"
      "  satchel analyse --data arxiv/ --checkpoint run.safetensors --blocks row,2rows,4rows,8rows,16rows,32rows,64rows --bits 1,2,3,4\n"
      "  satchel analyse --data cifar-10-batches-bin/ --model resnet18 --epochs 1 --gradients --method actnn,satchel\n"
      "  satchel report a.json -o a.html");
  analyse->callback([c, method] {
    c->methods_given = method->count() > 0;
    run_analyse(*c);
  });
}

}  // namespace satchel::tool
