#include "tools/train_commands.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "satchel/core/graph_layer.h"
#include "satchel/data/image_data.h"
#include "satchel/data/npy.h"
#include "satchel/data/scenes.h"
#include "satchel/plan/detector_shape.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_options.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr const char* kDataHelp =
    "\nData: a folder (GraphSAINT, OGB raw), an npz file (gnn-benchmark, heterophilous), or generated:\n"
    "  synthetic:arxiv[,scale=0.1]   synthetic:nodes=10000,edges=50000,features=64,classes=8   needs no file\n";
constexpr const char* kGraphGroup = "Graph models";
constexpr double kCheckpointMinutes = 10;
constexpr const char* kTrainNotes =
    "\nEvery run of a seed starts from the same weights and the same split, whatever the method. Several methods or seeds end\n"
    "in one table. A checkpoint takes a single run; it is a safetensors file that --resume and `satchel predict` read. It replaces\n"
    "no file unless --overwrite says so, and no output may lie in the folder of --data.\n"
    "Ctrl-C, SIGTERM and SIGHUP end the run after the step (graphs: the epoch) at work: checkpoint, table and JSON are written, exit code\n"
    "130, 143 or 129; a second Ctrl-C kills. A run killed otherwise has lost at most --checkpoint-every minutes: call it again with\n"
    "--resume, which may be there from the first call on. A checkpoint that cannot be written (a full disk) ends no run.\n"
    "Memory is measured in the first three steps. On CUDA the steps of graph models are then captured as a CUDA graph and\n"
    "replayed, with the same results bit for bit: what a step allocates stays reserved for the graph, and evaluations allocate\n"
    "beside it. Where steps cannot be captured, or less than twice a step's memory is free, they run one by one, and a line says\n"
    "why; --cuda-graph makes that an error, --no-cuda-graph captures none. A resumed run may change this, but not --tf32,\n"
    "--amp, --cache, --no-cache or --last-layer; --amp auto then is the checkpoint's type. Equal seeds give equal results for equal\n"
    "options: what is cached changes how sums round, and so does --last-layer.\n"
    "--threads: torch takes a thread a core. On a machine that other programs keep busy a step waits for the thread that got the\n"
    "least of the CPU: give it as many threads as there are idle cores. Results depend on the number of threads.\n"
    "--amp auto, graphs: fp16 with --tf32 for methods that pack (less than 32 bits), where a norm follows every hidden layer and\n"
    "features are dense, the largest 2^-8 to 2^8 in size, and the layer averages neighbours; else none. TF32 rounds factors\n"
    "to as many bits as fp16 has. Images: none.\n"
    "\nExamples:\n  satchel train --data synthetic:arxiv,scale=0.1 --method fp32,satchel --epochs 50\n"
    "  satchel train --data cora.npz --model gcn --layers 2 --norm none --method fp32,exact,satchel --seeds 16 --json cora.json\n"
    "  satchel train --data arxiv/ --checkpoint run.safetensors --resume --checkpoint-every 5 --device cuda:1 --tf32\n"
    "  satchel train --data cifar-10-batches-bin/ --model resnet18 --method fp32,actnn,division,satchel --device cuda --amp bf16";

TrainOptions options_of(const TrainCommand& c, const Method& method, uint64_t seed) {
  TrainOptions o = c.options;
  o.shape.conv = c.model;
  o.shape.norm = from_name<Norm>(c.norm, "train");
  o.shape.activation = from_name<Activation>(c.activation, "train");
  o.optimizer = from_name<Optimizer>(c.optimizer, "train");
  o.amp = from_name<Amp>(c.amp, "train");
  o.cache_aggregate = !c.no_cache;
  o.last_layer = from_name<LastLayer>(c.last_layer, "train");
  o.checkpoint_every = checkpoint_minutes(c);
  if (!c.cache.empty()) o.cache_bytes = parse_bytes(c.cache, "train");
  o.method = method;
  o.seed = seed;
  return o;
}

void check_split(const GraphData& data, int64_t split) {
  const auto splits = static_cast<int64_t>(data.splits.size());
  if (split > 0 && split >= splits)
    throw UsageError(splits == 0 ? fmt::format("[train] --split must be 0: {} has no splits of its own, got {}", data.name, split)
                                 : fmt::format("[train] --split must be 0 to {}, got {}", splits - 1, split));
}

void print_about(const GraphData& data) {
  fmt::print("{}: {} nodes, {} edges as stored{}, {} features{}, {} {}\n", data.name, grouped(data.nodes),
             grouped(static_cast<int64_t>(data.target.size())), data.weight.empty() ? "" : " with weights", grouped(data.features.columns),
             data.features.sparse() ? " (sparse)" : "", grouped(data.classes),
             data.task == Task::multi_label ? "labels"
             : data.task == Task::binary    ? "output"
                                            : "classes");
  std::fflush(stdout);
}

ordered_json run_json(const RunResult& r, const TrainOptions& o, Task task) {
  ordered_json j = common_json(r, o, {{"cuda_graph", o.cuda_graph ? ordered_json(*o.cuda_graph) : ordered_json("auto")}});
  j.update({{"valid", r.valid},
            {"train", r.train},
            {"epoch_seconds", r.step_seconds},
            {"cached_bytes", r.cached_bytes},
            {"last_layer_bytes", r.last_layer_bytes},
            {"best_epoch", r.best_epoch},
            {"layers", o.shape.layers},
            {"hidden", o.shape.hidden},
            {"cuda_graph", r.cuda_graph},
            {"metric", metric_name(task)}});
  return j;
}

void add_run_options(CLI::App& train, TrainCommand& c) {
  TrainOptions& o = c.options;
  const ImageTrainOptions& images = c.images.options;
  const auto both = [](const auto& graphs, const auto& others) { return fmt::format("{} (images {})", graphs, others); };
  train.add_option("--epochs", o.epochs, "Epochs; of graphs one step each")
      ->transform(whole_number(1))
      ->default_str(both(o.epochs, images.epochs));
  train.add_option("--optim", c.optimizer, "Optimizer")->check(members<Optimizer>())->capture_default_str()->group(kGraphGroup);
  train.add_option("--lr", o.lr, "Learning rate")->transform(real_number())->default_str(both(o.lr, images.lr));
  train.add_option("--weight-decay", o.weight_decay, "Weight decay")
      ->transform(real_number())
      ->default_str(both(o.weight_decay, images.weight_decay));
  train.add_option("--momentum", o.momentum, "Momentum, of sgd and of image models")->transform(real_number())->capture_default_str();
  train.add_option("--clip", o.clip, "Largest norm of all gradients together; 0: none")
      ->transform(real_number())
      ->capture_default_str()
      ->group(kGraphGroup);
  train.add_option("--seed", o.seed, "Seed of weights, dropout, rounding and a drawn split")
      ->transform(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  train.add_option("--seeds", c.seeds, "So many seeds, from --seed on")->transform(whole_number(1, 100000))->capture_default_str();
  train.add_option("--split", o.split, "Which of the data's splits")->transform(whole_number(0))->capture_default_str()->group(kGraphGroup);
  train.add_option("--device", o.device, "Where to train")->check(device_name())->capture_default_str();
  train.add_option("--eval-every", o.eval_every, "Epochs between evaluations")->transform(whole_number(1))->capture_default_str();
  train.add_option("--patience", o.patience, "Stop after so many evaluations without a better validation metric; 0: never")
      ->transform(whole_number(0))
      ->capture_default_str()
      ->group(kGraphGroup);
  train.add_option("--json", c.json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
  train.add_option("--checkpoint", o.checkpoint, "File that holds the run when it ends or is stopped")->transform(file_name());
  train.add_option("--checkpoint-every", c.checkpoint_every, "Also write it every so many minutes, within an epoch too; 0: never")
      ->transform(real_number())
      ->default_str(fmt::format("{}", kCheckpointMinutes));
  train.add_flag("--resume", o.resume,
                 "Go on from the checkpoint, bit for bit, or start anew where there is none; --epochs may be more where no learning rate "
                 "depends on it");
  train.add_flag("--overwrite", c.overwrite, "Replace the file that --checkpoint names, where there is one")->excludes("--resume");
  train.add_option("--threads", c.threads, kThreadsHelp)->transform(whole_number(1, 4096));
  train.add_option("--last-layer", c.last_layer, kLastLayerHelp)->check(members<LastLayer>())->capture_default_str()->group(kGraphGroup);
  train.add_flag("--no-cache", c.no_cache, "Compute A·X of the first layer in every step instead of once")->group(kGraphGroup);
  train.add_option("--cache", c.cache, "Keep at most so much of A·X, as 40MB or 0.5GiB; the rest is computed in every step (default: all)")
      ->transform(byte_size())
      ->excludes("--no-cache")
      ->group(kGraphGroup);
  train.add_flag("--tf32", o.tf32, "Products of float32 matrices in TF32 (cuda)");
  train.add_option("--amp", c.amp, "Features and activations in this type, see below; weights, statistics and losses stay float32")
      ->check(members<Amp>())
      ->capture_default_str();
  add_choice(train, "--cuda-graph,!--no-cuda-graph", o.cuda_graph,
             "Replay steps after the third from a CUDA graph: the same results, less time (default: with cuda, where they can be)")
      ->group(kGraphGroup);
  train.add_flag("--quiet", c.quiet, "No progress");
}

std::vector<std::string> model_names() {
  std::vector<std::string> names = graph_layer_names();
  for (const std::string_view name : image_model_names()) names.emplace_back(name);
  for (const std::string_view name : segmentation_model_names()) names.emplace_back(name);
  for (const std::string_view name : detector_names()) names.emplace_back(name);
  return names;
}

void add_train(CLI::App& app) {
  const auto command = std::make_shared<TrainCommand>();
  CLI::App* train = app.add_subcommand("train", "Train a graph or image model with what it saves for backward packed");
  GraphShape& shape = command->options.shape;
  train
      ->add_option("--data", command->data,
                   "Graph, images or scenes: a folder, an npz file, synthetic:…, synthetic-images:… or synthetic-shapes:…")
      ->required();
  train->add_option("--model", command->model, "Graph layer, image model or detector")
      ->check(CLI::IsMember(model_names()))
      ->capture_default_str();
  train->add_option("--layers", shape.layers, "Graph layers")->transform(whole_number(1, 1000))->capture_default_str()->group(kGraphGroup);
  train->add_option("--hidden", shape.hidden, "Width between layers")
      ->transform(whole_number(1, 1 << 20))
      ->capture_default_str()
      ->group(kGraphGroup);
  train->add_option("--norm", command->norm, "Norm between layers")->check(members<Norm>())->capture_default_str()->group(kGraphGroup);
  train->add_option("--activation", command->activation, "Activation between layers")
      ->check(members<Activation>())
      ->capture_default_str()
      ->group(kGraphGroup);
  train->add_option("--dropout", shape.dropout, "Dropout between layers; image models: before the classifier")
      ->transform(real_number())
      ->default_str(
          fmt::format("{} (images: vgg {}, mobilenet_v2 and efficientnet_b0 {}, else 0)", shape.dropout, kVggDropout, kMobileDropout));
  train->add_flag("--self-loops", command->options.self_loops, "sage: a node averages itself too (other layers count it in any case)")
      ->group(kGraphGroup);
  train->add_flag("--unweighted", command->unweighted, "Take edges without their weights (default: weights that the data have are used)")
      ->group(kGraphGroup);
  train->add_option("--method", command->methods, "What is kept for backward, see below")->capture_default_str();
  add_run_options(*train, *command);
  add_image_options(*train, command->images);
  add_segment_options(*train, command->segments);
  add_detect_options(*train, command->detect);
  train->footer(std::string(kDataHelp) + image_train_help() + segment_train_help() + detect_train_help() + method_help() + kTrainNotes);
  train->callback([command, train] {
    const bool segments = is_segmentation_model(command->model), detects = is_detector(command->model);
    const bool images = segments || detects || is_image_model(command->model);
    refuse_given(*train, images ? kGraphGroup : kImageGroup, command->model);
    if (!segments) refuse_given(*train, kSegmentGroup, command->model);
    if (!detects) refuse_given(*train, kDetectGroup, command->model);
    if (segments) return run_train_segment(segment_command(*command, *train));
    if (detects) return run_train_detect(*command, *train);
    if (images) return run_train_images(image_command(*command, *train));
    run_train(*command);
  });
}

void add_predict(CLI::App& app) {
  const auto command = std::make_shared<PredictCommand>();
  CLI::App* predict =
      app.add_subcommand("predict", "Classes of a graph's nodes, of images or of their pixels, from a checkpoint of `satchel train`");
  predict->add_option("--checkpoint", command->checkpoint, "The checkpoint, of a graph or an image model")->required();
  predict->add_option("--data", command->data, "Graph, images or scenes, as for train; labels may be missing")->required();
  predict
      ->add_option(
          "-o,--output,--out", command->output,
          "Classes, a .npy file of int64: one a node or image (multi-label: nodes × labels); - writes it to stdout. Segmentation: a "
          "folder, made where it is missing, for masks. Detectors: COCO results, JSON")
      ->required();
  predict->add_option("--scores", command->scores, "Probabilities too, a .npy file of float32, nodes or images × outputs")
      ->transform(file_name());
  predict->add_option("--device", command->device, "Where to compute")->check(device_name())->capture_default_str();
  predict->add_flag("--unweighted", command->unweighted, "Graphs: take edges without their weights, as in training");
  predict->add_option("--loaders", command->loaders, "Threads that decode images")->transform(whole_number(1, 256))->capture_default_str();
  predict->footer(
      "\nGraphs: the weights of the best validation metric; the classes of all nodes. A graph needs no labels: class_map.json and\n"
      "role.json (GraphSAINT), labels (npz) may be missing, and the test metric is then left out.\n"
      "Images: the weights of the last epoch; the classes of the test images in their order, or, of a folder that holds .jpg, .jpeg\n"
      "and .png files themselves, of those files by name. Pixels are scaled as they were in training.\n"
      "Segmentation: a PNG file a test scene (or file of a folder), of palette indices that are the classes; names are the images'.\n"
      "Detectors: the boxes of the test scenes (or files of a folder), at most 100 each, as COCO results: image_id, category_id, bbox\n"
      "(left, top, width, height) and score; ids are the data's own, or places from 0 on.\n"
      "\nExamples:\n  satchel predict --checkpoint run.safetensors --data arxiv/ -o classes.npy\n"
      "  satchel predict --checkpoint resnet.safetensors --data photos/ -o classes.npy --scores scores.npy\n"
      "  satchel predict --checkpoint fcn.safetensors --data photos/ --out masks/\n"
      "  satchel predict --checkpoint run.safetensors --data arxiv/ -o - | python3 -c 'import io, sys, numpy;\n"
      "    print(numpy.bincount(numpy.load(io.BytesIO(sys.stdin.buffer.read()))))'");
  predict->callback([command] { run_predict(*command); });
}

}  // namespace

void add_train_commands(CLI::App& app) {
  add_train(app);
  add_predict(app);
}

namespace {

/// Images given to what trains or reads graphs, which would only say that there is no such folder.
void refuse_images(const std::string& data) {
  if (!holds_images(data) && !holds_scenes(data) && !data.starts_with("synthetic-images")) return;
  throw UsageError(fmt::format("[train] data must be a graph here (train images with --model resnet18 …), got {}", data));
}

Prediction graph_prediction(const PredictCommand& c) {
  if (holds_images(c.data) || c.data.starts_with("synthetic-images"))
    throw UsageError(fmt::format("[predict] data must be a graph, as the checkpoint {} was trained on, got {}", c.checkpoint, c.data));
  return predict_graph(load_graph(c.data, c.unweighted ? EdgeWeights::ignore : EdgeWeights::use), c.checkpoint, c.device);
}

Prediction image_prediction(const PredictCommand& c) {
  refuse_graph("predict", c.data, c.checkpoint);
  const ImagesToPredict images = images_to_predict(c.data);
  return predict_images(images.data, images.labelled, c.checkpoint, c.device, c.loaders);
}

}  // namespace

double checkpoint_minutes(const TrainCommand& c) {
  if (c.options.checkpoint.empty() && c.checkpoint_every.value_or(0) > 0)
    throw UsageError("[train] --checkpoint-every needs --checkpoint, got none");
  return c.options.checkpoint.empty() ? 0 : c.checkpoint_every.value_or(kCheckpointMinutes);
}

void run_train(const TrainCommand& c) {
  const std::vector<Method> methods = methods_from(c.methods);
  const auto options = [&](const Method& method, uint64_t seed) { return options_of(c, method, seed); };
  check_runs(c, c.options, methods.size(), [&] {
    for (const Method& m : methods) validate(options(m, c.options.seed));
  });
  refuse_images(c.data);
  const GraphData data = load_graph(c.data, c.unweighted ? EdgeWeights::ignore : EdgeWeights::use);
  check_split(data, c.options.split);
  if (!c.is_silent()) print_about(data);
  const TrainOptions common = options(methods.front(), c.options.seed);
  run_all(c, common, methods,
          {"epoch",
           [&](const Method& m, uint64_t seed) {
             const TrainOptions o = options(m, seed);
             return run_shown(o, c.is_silent(), 0, [&](const ProgressReport& report) { return train_graph(data, o, report); });
           },
           [&](const std::vector<RunResult>& runs) {
             print_comparison(runs, {data.name, data.task, common.shape, common.tf32});
           },
           [&](const RunResult& r) { return run_json(r, common, data.task); }});
}

void run_predict(const PredictCommand& c) {
  if (checkpoint_format(c.checkpoint) == kSegmentFormat) return predict_segment(c);
  if (c.output == "-" && c.scores == "-") throw UsageError("[predict] one of --output and --scores may be -, got both");
  if (c.output != "-" && c.scores != "-") check_apart("predict", "--scores", c.scores, "--output", c.output);
  for (const auto& [name, path] : {std::pair{"--output", c.output}, {"--scores", c.scores}}) {
    if (path != "-") check_apart("predict", name, path, "--checkpoint", c.checkpoint);
    check_not_data("predict", name, path, c.data);
  }
  const std::string format = checkpoint_format(c.checkpoint);
  if (format == kDetectFormat) return run_predict_boxes(c);
  OutputFile file(c.output, "predict");
  std::optional<OutputFile> scores;
  if (!c.scores.empty()) scores.emplace(c.scores, "predict");
  use_device(c.device, "predict");
  const bool images = format == kImageFormat;
  const Prediction p = images ? image_prediction(c) : graph_prediction(c);
  const std::vector<int64_t> both{p.count, p.outputs}, one{p.count};
  write_npy(file.path(), "<i8", p.multi_label ? both : one, p.classes.data());
  if (scores) write_npy(scores->path(), "<f4", both, p.scores.data());
  file.finish();
  if (scores) scores->finish();
  fmt::print(scores && scores->lines() == stderr ? stderr : file.lines(), "{}: {} {}, {}\n", c.output, grouped(p.count),
             images ? "images" : "nodes", std::isnan(p.test) ? std::string("no labels to test on") : fmt::format("test {:.2f} %", p.test));
}

}  // namespace satchel::tool
