#include "tools/plan_commands.h"

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <limits>
#include <map>
#include <memory>

#include "satchel/core/graph_layer.h"
#include "tools/plan_detect.h"
#include "tools/plan_image.h"
#include "tools/plan_text.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

std::string footer() {
  return method_help() +
         "\n  bytes        kept from forward to backward: codes, headers, channels, masks, statistics, seeds\n"
         "  float32 MiB  the same values in float32 (masks: a byte a value, as torch keeps them)\n"
         "  smaller      fp32's bytes for the same model / these bytes\n"
         "\nExamples:\n"
         "  satchel plan --nodes 169343 --features 128 --classes 40\n"
         "  satchel plan --model gcn --nodes 2708 --features 1433 --hidden 64 --classes 7 --layers 2 --norm none --sparse\n"
         "  satchel plan --nodes 2449029 --features 100 --hidden 256 --classes 47 --method fp32,blockwise,block=16rows,satchel --json -\n"
         "  satchel plan --table arxiv\n"
         "  satchel plan --table division\n"
         "  satchel plan --model resnet50 --batch 256\n"
         "  satchel plan --model resnet50 --fit 16GB --method fp32,actnn,division,satchel,bits=3,norm_bits=1\n"
         "  satchel plan --model resnet50 --fit 16GiB --amp bf16\n"
         "  satchel plan --model resnet18 --image 32 --classes 10 --method satchel\n"
         "  satchel plan --model retinanet_resnet50_fpn --batch 16 --image 640 --frozen-norm --trainable 3";
}

constexpr int64_t kNotGiven = std::numeric_limits<int64_t>::min();

struct PlanOptions {
  PlanOptions() { shape.features = shape.classes = kNotGiven; }
  std::string model = "sage";
  GraphShape shape;
  ImagePlanOptions images;
  DetectPlanOptions detect;
  bool batch_given = false, image_given = false;
  bool dropout_given = false;
  int64_t nodes = kNotGiven, training_nodes = kNotGiven;
  bool sparse = false;
  std::vector<std::string> methods;
  std::string table;
  std::string json;
};

template <class T>
CLI::Option* add_choice(CLI::App& app, const std::string& name, T& to, const std::map<std::string, T>& values, const std::string& help) {
  std::string shown, names;
  for (const auto& [key, value] : values) {
    names += (names.empty() ? "" : "|") + key;
    if (value == to) shown = key;
  }
  const auto choose = [&to, values, names, name](const CLI::results_t& given) {
    const auto found = values.find(given.back());
    if (found == values.end()) throw UsageError(fmt::format("[plan] {} must be {}, got '{}'", name, names, given.back()));
    to = found->second;
    return true;
  };
  return app.add_option(name, choose, help)->type_name(names)->default_str(shown);
}

std::vector<Method> methods_of(const std::vector<std::string>& texts) {
  std::vector<Method> methods;
  for (const std::string& text : texts) {
    for (Method& m : parse_methods(text)) {
      const auto same = [&](const Method& other) { return other.name == m.name; };
      if (std::ranges::any_of(methods, same)) fail("method", "every method must be named once", m.name);
      methods.push_back(std::move(m));
    }
  }
  return methods;
}

std::string model_names() {
  std::string names;
  for (const std::string& name : graph_layer_names()) names += (names.empty() ? "" : "|") + name;
  for (const std::string_view name : image_model_names()) names += "|" + std::string(name);
  for (const std::string_view name : segmentation_model_names()) names += "|" + std::string(name);
  for (const std::string_view name : detector_names()) names += "|" + std::string(name);
  return names;
}

/// Of images: their classes, or their pixels'.
bool is_image(const std::string& model) { return is_image_model(model) || is_segmentation_model(model); }

/// What the options of every plan say about an image model.
ImagePlanOptions image_options(const PlanOptions& o, std::vector<Method> methods) {
  ImagePlanOptions images = o.images;
  images.shape.name = o.model;
  const bool segments = is_segmentation_model(o.model);
  images.shape.small_stem = images.small_stem || (!images.large_stem && !segments && wants_small_stem(images.image, images.image));
  images.shape.aux = segments && !images.no_aux;
  if (images.no_aux && !segments) fail("plan", "--no-aux is for models of segmentation", o.model);
  if (segments) images.shape.classes = kVocClasses;
  if (o.shape.classes != kNotGiven) images.shape.classes = o.shape.classes;
  if (o.dropout_given) images.shape.dropout = o.shape.dropout;
  images.methods = std::move(methods);
  return images;
}

/// … and about a detector, which has a batch and a size of its own by default.
DetectPlanOptions detect_options(const PlanOptions& o, std::vector<Method> methods) {
  DetectPlanOptions d = o.detect;
  d.shape.name = o.model;
  d.shape.channels = o.images.shape.channels;
  if (o.images.shape.width != 0) d.shape.width = o.images.shape.width;
  if (o.shape.classes != kNotGiven) d.shape.classes = o.shape.classes;
  if (o.batch_given) d.batch.images = o.images.batch;
  if (o.image_given) d.batch.height = d.batch.width = o.images.image;
  d.batch.half = o.images.amp != "none";
  d.methods = std::move(methods);
  return d;
}

struct Output {
  std::string text;
  nlohmann::ordered_json json;
};

/// Sizes and methods that do not fit are wrong use.
Output make_output(const PlanOptions& o) {
  try {
    std::vector<Method> methods = methods_of(o.methods);
    if (is_detector(o.model)) {
      const DetectPlanOptions detect = detect_options(o, std::move(methods));
      return {detect_plan_text(detect), detect_plan_json(detect)};
    }
    if (is_image(o.model)) {
      const ImagePlanOptions images = image_options(o, std::move(methods));
      return {image_plan_text(images), image_plan_json(images)};
    }
    if (methods.empty()) methods = parse_methods("satchel");
    if (o.table == "division") return {division_table_text(methods), division_table_json(methods)};
    if (!o.table.empty()) return {published_text(o.table, methods), published_json(o.table, methods)};
    const std::pair<const char*, int64_t> needed[] = {
        {"--nodes", o.nodes}, {"--features", o.shape.features}, {"--classes", o.shape.classes}};
    std::string missing;
    for (const auto& [name, value] : needed) {
      if (value == kNotGiven) missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
    if (!missing.empty())
      fail("plan", missing + " must be given for a graph model (or --table, or --model with an image model)", "nothing");
    const ModelPlan plan = plan_model(o.shape, o.nodes, o.training_nodes == kNotGiven ? o.nodes : o.training_nodes, o.sparse, methods);
    return {plan_text(plan), plan_json(plan)};
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

void run_plan(const PlanOptions& o) {
  const bool to_file = !o.json.empty() && o.json != "-";
  const Output output = make_output(o);
  if (to_file) check_output(o.json, "plan");
  fmt::print("{}", o.json == "-" ? output.json.dump(2) + "\n" : output.text);
  if (to_file) write_json(o.json, output.json, "plan");
}

}  // namespace

void add_plan_command(CLI::App& app) {
  const auto o = std::make_shared<PlanOptions>();
  CLI::App* plan = app.add_subcommand("plan", "What a graph or an image model keeps for backward under a method, from sizes alone");
  GraphShape& s = o->shape;
  CLI::Option* model = plan->add_option("--model", o->model, "Kind of a graph model's layers, or an image model")
                           ->type_name(model_names())
                           ->capture_default_str();
  CLI::Option* classes = add_count(*plan, "--classes", s.classes, "Classes: width of the logits (image models: 1000; segmentation: 21)");
  CLI::Option* dropout = plan->add_option("--dropout", s.dropout, "After the activation (image models: before the classifier); 0: none")
                             ->check(CLI::Number)
                             ->capture_default_str();
  const std::vector<CLI::Option*> of_images = add_image_plan_options(*plan, o->images);
  const std::vector<CLI::Option*> of_detectors = add_detect_plan_options(*plan, o->detect);
  const std::vector<CLI::Option*> of_graphs = {
      add_count(*plan, "--nodes", o->nodes, "Nodes of the graph"),
      add_count(*plan, "--features", s.features, "Features of a node"),
      add_count(*plan, "--hidden", s.hidden, "Width of the hidden layers")->capture_default_str(),
      add_count(*plan, "--layers", s.layers, "Graph layers")->capture_default_str(),
      add_choice<Norm>(*plan, "--norm", s.norm, {{"none", Norm::none}, {"batch", Norm::batch}, {"layer", Norm::layer}},
                       "After each layer but the last"),
      add_choice<Activation>(
          *plan, "--activation", s.activation,
          {{"none", Activation::none}, {"relu", Activation::relu}, {"leaky_relu", Activation::leaky_relu}, {"elu", Activation::elu}},
          "After the norm"),
      add_count(*plan, "--train-nodes", o->training_nodes, "Nodes that the loss reads (default: all); fp32 keeps only their part"),
      plan->add_flag("--sparse", o->sparse, "The features are a sparse matrix, which is never packed")};
  plan->add_option("--method", o->methods,
                   "A method, or several; may be repeated (default: satchel; image models: fp32, actnn, division and satchel)")
      ->type_name("METHOD")
      ->allow_extra_args(false);
  plan->add_option(
          "--table", o->table,
          "Instead of sizes: a published table beside the byte model and the own layout: arxiv and products in MiB, division's of\n"
          "image models in GiB")
      ->check(CLI::IsMember({"arxiv", "products", "division"}));
  plan->add_option("--json", o->json, "Write the plan to this file too; - prints it instead of the tables")->type_name("FILE");
  for (CLI::Option* option : of_graphs) option->group("Graph models");
  for (CLI::Option* option : of_images) option->group("Image models");
  for (CLI::Option* option : of_detectors) option->group("Detectors");
  plan->footer(footer());
  plan->callback([=] {
    const bool detects = is_detector(o->model);
    if (!detects && !is_image(o->model) && !is_graph_layer(o->model)) {
      throw UsageError(fmt::format("[plan] --model must be {}, got '{}'", model_names(), o->model));
    }
    const bool image = is_image(o->model) || detects, table = !o->table.empty();
    const auto refuse = [](const std::vector<CLI::Option*>& options, const std::string& rule) {
      for (const CLI::Option* option : options) {
        if (option->count() > 0) throw UsageError("[plan] " + rule + ", got " + option->get_name());
      }
    };
    if (table) refuse(of_graphs, "--table has its own sizes");
    if (table) refuse({model, classes, dropout}, "--table has its own sizes");
    if (table) refuse(of_images, "--table has its own sizes");
    if (image) refuse(of_graphs, o->model + " is an image model and takes no option of graph models");
    if (!image) refuse(of_images, o->model + " is a graph model and takes no option of image models");
    if (!detects) refuse(of_detectors, o->model + " is no detector");
    if (detects) {
      for (const char* name : {"--small-stem", "--large-stem", "--fit", "--dropout"}) {
        if (plan->count(name) > 0) throw UsageError(fmt::format("[plan] {} is not for detectors, got {}", name, o->model));
      }
      o->batch_given = plan->count("--batch") > 0;
      o->image_given = plan->count("--image") > 0;
    }
    if (!image) o->shape.conv = o->model;
    o->dropout_given = dropout->count() > 0;
    run_plan(*o);
  });
}

}  // namespace satchel::tool
