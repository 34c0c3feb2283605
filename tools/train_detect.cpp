#include "tools/train_detect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "satchel/plan/detector_shape.h"
#include "satchel/train/detect_step.h"
#include "satchel/train/image_options.h"
#include "satchel/train/options.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"
#include "tools/train_segment.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

/// Options of image classifiers that say nothing of a detector.
void refuse_classifiers(const CLI::App& train, const std::string& model) {
  for (const char* name : {"--small-stem", "--large-stem", "--skip-broken", "--label-smoothing", "--dropout", "--stochastic-depth"}) {
    if (train.count(name) > 0) throw UsageError(fmt::format("[train] {} is not for this model, got {}", name, model));
  }
  if (train.count("--freeze") > 0)
    throw UsageError(fmt::format("[train] --freeze is not for detectors (--trainable says how many stages learn), got {}", model));
  if (train.count("--image") > 0 && train.count("--sides") > 0)
    throw UsageError("[train] one of --image and --sides must be given, got both");
}

DetectTrainOptions detect_options(const TrainCommand& c, const ImageTrainCommand& images, const CLI::App& train, const Method& method,
                                  uint64_t seed) {
  const DetectTrainOptions own;
  DetectTrainOptions o;
  static_cast<ImageTrainOptions&>(o) = images.options;
  const auto keep = [&](const char* name, auto& to, const auto& value) {  // what detectors have by default, unless it was given
    if (train.count(name) == 0) to = value;
  };
  keep("--epochs", o.epochs, own.epochs);
  keep("--batch", o.batch, own.batch);
  keep("--lr", o.lr, own.lr);
  keep("--weight-decay", o.weight_decay, own.weight_decay);
  keep("--width", o.width, own.width);
  o.method = method;
  o.seed = seed;
  o.amp = from_name<Amp>(images.amp, "train");
  o.schedule = from_name<Decay>(images.schedule, "train");
  o.milestones = images.milestones;
  o.augment = !images.no_augment;
  o.nesterov = false;
  o.channels_last = !images.contiguous;
  o.sides = c.detect.sides;
  if (o.image > 0) o.sides = {o.image};
  o.image = 0;
  o.longest = c.detect.longest;
  o.frozen_norm = c.detect.frozen_norm;
  o.trainable = c.detect.trainable;
  o.max_norm = c.detect.max_norm;
  return o;
}

void print_about_scenes(const SceneSets& data) {
  fmt::print("{}: {} scenes to train on, {} to test on, {} {} of objects\n", data.train.name, grouped(data.train.count),
             grouped(data.test.count), grouped(data.train.classes), data.train.classes == 1 ? "class" : "classes");
  std::fflush(stdout);
}

void print_detectors(const std::vector<RunResult>& runs, const SceneSets& data, const DetectTrainOptions& o) {
  const int64_t epochs = runs.back().epochs;
  const auto seeds = std::ranges::count(runs, runs.front().method, &RunResult::method);
  fmt::print("\n{} on {}, batch {}, {} {}, {} {}, schedule {}{}{}{}\n\n", o.model, data.train.name, o.batch, epochs,
             epochs == 1 ? "epoch" : "epochs", seeds, seeds == 1 ? "seed" : "seeds", name_of(o.schedule), o.tf32 ? ", TF32" : "",
             is_half(o.amp) ? ", autocast to " + name_of(o.amp) : "", o.frozen_norm ? ", frozen norms" : "");
  print_runs(runs, "mAP", "step");
  if (data.test.count == 0) return void(fmt::print("test: there are no scenes to test on\n"));
  fmt::print("test: after the last epoch; mAP: COCO's average precision over overlaps .50 to .95\n\n");
  std::vector<std::vector<std::string>> rows{{"method", "AP50", "AP75", "small", "medium", "large"}};
  for (const RunResult& r : runs) {
    std::vector<std::string> row = {seeds == 1 ? r.method : fmt::format("{}, seed {}", r.method, r.seed)};
    for (const char* name : {"ap50", "ap75", "ap_small", "ap_medium", "ap_large"}) {
      const auto found = std::ranges::find(r.more_scores, name, &std::pair<std::string, double>::first);
      const bool there = found != r.more_scores.end() && !std::isnan(found->second);
      row.push_back(there ? fmt::format("{:.2f}", found->second) : "-");
    }
    rows.push_back(row);
  }
  print_table(rows);
}

ordered_json detect_run_json(const RunResult& r, const SceneSets& data, const DetectTrainOptions& o) {
  ordered_json j = common_json(r, o, {{"loaders", o.loaders}});
  const bool tests = data.test.count > 0;
  ordered_json scores = ordered_json::object();
  for (const auto& [name, value] : r.more_scores) scores[name] = std::isnan(value) ? ordered_json(nullptr) : ordered_json(value);
  j.update({{"best_test", tests ? ordered_json(r.best_test) : ordered_json(nullptr)},
            {"best_epoch", tests ? ordered_json(r.best_epoch) : ordered_json(nullptr)},
            {"scores", scores},
            {"step_seconds", r.step_seconds},
            {"images_per_second", r.images_per_second},
            {"skipped_steps", r.skipped_steps},
            {"images", data.train.count},
            {"test_images", data.test.count},
            {"classes", data.train.classes},
            {"metric", "mAP"}});
  return j;
}

}  // namespace

void add_detect_options(CLI::App& train, DetectCommand& c) {
  const auto own = [](CLI::Option* option) { return option->group(kDetectGroup); };
  own(train.add_option(
          "--sides", c.sides,
          "Bring images' shorter side to one of these, drawn for each: 480,512,544; tested at the last (default: as they are)"))
      ->transform(whole_number(1, 1 << 13))
      ->delimiter(',');
  own(train.add_option("--longest", c.longest, "With --sides: the most that the longer side becomes"))
      ->transform(whole_number(1, 1 << 13))
      ->capture_default_str();
  own(train.add_option("--max-norm", c.max_norm, "Largest norm of all gradients together; 0: any"))
      ->transform(real_number())
      ->capture_default_str();
  own(train.add_flag("--frozen-norm", c.frozen_norm, "Norms of the ResNet are constants and keep nothing (for pretrained weights)"));
  own(train.add_option("--trainable", c.trainable, "Stages of the ResNet that are trained, from the last one back; others keep nothing"))
      ->transform(whole_number(0, 5))
      ->capture_default_str();
}

const char* detect_train_help() {
  return "\nDetectors: scenes with boxes, drawn: synthetic-shapes:count=1000,size=128 (needs no file), or a folder in COCO's layout\n"
         "  (annotations/instances_train*.json) or Pascal VOC's (Annotations/*.xml). Trained by SGD with momentum; defaults: 12 epochs,\n"
         "  batch 8, lr 0.01, weight decay 0.0001. --image N is --sides N. Options of images apply but for the stem's, --skip-broken,\n"
         "  --label-smoothing and --dropout.\n";
}

void run_train_detect(const TrainCommand& c, const CLI::App& train) {
  refuse_classifiers(train, c.model);
  const ImageTrainCommand images = image_command(c, train);
  const std::vector<Method> methods = methods_from(images.methods, validate);
  const auto options = [&](const Method& method, uint64_t seed) { return detect_options(c, images, train, method, seed); };
  if (images.gamma_given && images.schedule != "step") throw UsageError("[train] --gamma needs --schedule step, got " + images.schedule);
  const DetectTrainOptions common = options(methods.front(), images.options.seed);
  check_runs(images, common, methods.size(), [&] {
    for (const Method& m : methods) validate(options(m, common.seed));
  });
  if (!holds_scenes(c.data) && (holds_images(c.data) || c.data.starts_with("synthetic:") || c.data.starts_with("synthetic-images")))
    throw UsageError(fmt::format("[train] data must be scenes with boxes for {} (a folder of COCO or VOC, or synthetic-shapes:…), got {}",
                                 c.model, c.data));
  const SceneSets data = load_scenes(c.data, SceneTask::detection);
  if (!images.is_silent()) print_about_scenes(data);
  if (!images.is_silent() && starts_from_weights(common))
    print_left_out(common.weights, classifier_fit(shape_of(common, data.train.classes), common.weights));
  run_all(images, common, methods,
          {"step",
           [&](const Method& m, uint64_t seed) {
             const DetectTrainOptions o = options(m, seed);
             return run_shown(o, images.is_silent(), o.batch,
                              [&](const ProgressReport& report) { return train_detector(data, o, report); });
           },
           [&](const std::vector<RunResult>& runs) { print_detectors(runs, data, common); },
           [&](const RunResult& r) { return detect_run_json(r, data, common); }});
}

void run_predict_boxes(const PredictCommand& c) {
  if (!c.scores.empty()) throw UsageError("[predict] --scores is for classes: a detector's results have them, got " + c.scores);
  const ScenesToPredict scenes = scenes_to_predict(c.data, SceneTask::detection);
  const SceneData& data = scenes.data;
  OutputFile file(c.output, "predict");
  use_device(c.device, "predict");
  const FoundBoxes found = predict_boxes(data, scenes.labelled, c.checkpoint, c.device, c.loaders);
  ordered_json results = ordered_json::array();
  for (size_t i = 0; i < found.scenes.size(); ++i) {
    for (const FoundBox& b : found.scenes[i]) {
      const auto label = static_cast<size_t>(b.label);
      ordered_json box = {{"image_id", data.ids.empty() ? static_cast<int64_t>(i) : data.ids[i]},
                          {"category_id", found.category_ids.empty() ? b.label : found.category_ids[label]},
                          {"bbox", {b.left, b.top, b.right - b.left, b.bottom - b.top}},
                          {"score", b.score}};
      if (data.ids.empty() && !data.paths.empty()) box["file_name"] = data.paths[i].substr(data.paths[i].rfind('/') + 1);
      results.push_back(std::move(box));
    }
  }
  std::ofstream out(file.path());
  out << results.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << '\n';
  if (!out.flush()) fail("predict", "boxes must be written", c.output);
  file.finish();
  fmt::print(file.lines(), "{}: {} boxes in {} scenes, {}\n", c.output, grouped(static_cast<int64_t>(results.size())), grouped(data.count),
             std::isnan(found.scores.ap) ? std::string("no objects to test on") : fmt::format("test mAP {:.2f} %", 100 * found.scores.ap));
}

}  // namespace satchel::tool
