#include "tools/train_segment.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "satchel/data/png.h"
#include "satchel/train/image_options.h"
#include "satchel/train/replacement.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

SegmentTrainOptions segment_options(const SegmentTrainCommand& c, const Method& method, uint64_t seed) {
  SegmentTrainOptions o = c.options;
  static_cast<ImageTrainOptions&>(o) = image_options(c.images, method, seed);
  o.aux = !c.no_aux;
  return o;
}

void print_about(const SceneSets& data) {
  const SceneData& t = data.train;
  const std::string size = t.drawn.side > 0 ? fmt::format("{} × {}", t.drawn.side, t.drawn.side) : "JPEG and PNG files";
  fmt::print("{}: {} scenes to train on, {} to test on, {}, {} classes\n", t.name, grouped(t.count), grouped(data.test.count), size,
             t.classes);
  std::fflush(stdout);
}

/// IoU by class, a column a method, mean over seeds.
void print_classes(const std::vector<RunResult>& runs) {
  std::vector<std::string> methods;
  for (const RunResult& r : runs) {
    if (!r.class_scores.empty() && std::ranges::find(methods, r.method) == methods.end()) methods.push_back(r.method);
  }
  if (methods.empty()) return;
  std::vector<std::vector<std::string>> rows{{"IoU %"}};
  rows[0].insert(rows[0].end(), methods.begin(), methods.end());
  const auto& first = std::ranges::find_if(runs, [](const RunResult& r) { return !r.class_scores.empty(); })->class_scores;
  for (size_t c = 0; c < first.size(); ++c) {
    rows.push_back({first[c].first});
    for (const std::string& method : methods) {
      double sum = 0, count = 0;
      for (const RunResult& r : runs) {
        if (r.method != method || r.class_scores.empty()) continue;
        sum += r.class_scores[c].second;
        ++count;
      }
      rows.back().push_back(std::isnan(sum) ? "-" : fmt::format("{:.2f}", sum / count));
    }
  }
  fmt::print("\n");
  print_table(rows);
}

void print_segmentation(const std::vector<RunResult>& runs, const SceneSets& data, const SegmentTrainOptions& o) {
  const int64_t epochs = runs.back().epochs;
  const auto seeds = std::ranges::count_if(runs, [&](const RunResult& r) { return r.method == runs.front().method; });
  fmt::print("\n{}{} on {}, batch {}, {} {}, {} {}, schedule {}{}{}\n\n", o.model, o.aux ? "" : " without auxiliary head", data.train.name,
             o.batch, epochs, epochs == 1 ? "epoch" : "epochs", seeds, seeds == 1 ? "seed" : "seeds", name_of(o.schedule),
             o.tf32 ? ", TF32" : "", is_half(o.amp) ? ", autocast to " + name_of(o.amp) : "");
  print_runs(runs, "mIoU", "step");
  print_classes(runs);
  fmt::print("\ntest: {}\n", data.test.count > 0 ? "mean over classes of hits / (truth + predicted − hits), after the last epoch"
                                                 : "there are no scenes to test on");
}

ordered_json segmentation_json(const RunResult& r, const SceneSets& data, const SegmentTrainOptions& o) {
  ordered_json j = common_json(r, o, {{"loaders", o.loaders}});
  const bool tests = data.test.count > 0;
  ordered_json classes = ordered_json::object();
  for (const auto& [name, iou] : r.class_scores) classes[name] = std::isnan(iou) ? ordered_json(nullptr) : ordered_json(iou);
  j.update({{"best_test", tests ? ordered_json(r.best_test) : ordered_json(nullptr)},
            {"best_epoch", tests ? ordered_json(r.best_epoch) : ordered_json(nullptr)},
            {"class_iou", classes},
            {"step_seconds", r.step_seconds},
            {"images_per_second", r.images_per_second},
            {"skipped_steps", r.skipped_steps},
            {"images", data.train.count},
            {"test_images", data.test.count},
            {"classes", data.train.classes},
            {"metric", "mIoU"}});
  return j;
}

/// NAME.png of each image; scenes that are drawn have numbers.
std::vector<std::string> mask_names(const SceneData& data) {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (int64_t i = 0; i < data.count; ++i) {
    std::string name = fmt::format("{:06}", i);
    if (!data.paths.empty()) {
      const std::string& path = data.paths[static_cast<size_t>(i)];
      name = path.substr(path.rfind('/') + 1);
      name = name.substr(0, name.rfind('.'));
    }
    if (!seen.insert(name).second) fail("predict", "images must have different names, their masks lie in one folder", name);
    names.push_back(name + ".png");
  }
  return names;
}

void make_folder(const std::string& folder) {
  struct stat about {};
  if (::stat(folder.c_str(), &about) == 0) {
    if (!S_ISDIR(about.st_mode)) throw UsageError("[predict] --out must be a folder for masks, got the file " + folder);
    return;
  }
  if (::mkdir(folder.c_str(), 0777) != 0)
    throw UsageError(fmt::format("[predict] --out must be a folder that can be made ({}), got {}", std::strerror(errno), folder));
}

}  // namespace

void add_segment_options(CLI::App& train, SegmentTrainCommand& c) {
  const auto own = [](CLI::Option* option) { return option->group(kSegmentGroup); };
  own(train.add_flag("--no-aux", c.no_aux, "Without the auxiliary head on the third stage"));
  own(train.add_option("--aux-weight", c.options.aux_weight, "Weight of that head's loss"))
      ->transform(real_number())
      ->capture_default_str();
  own(train.add_option("--class-weights", c.options.class_weights, "Weights of the classes in the loss, one each (default: 1)"))
      ->transform(real_number())
      ->delimiter(',');
  own(train.add_option("--least-scale", c.options.least_scale, "Images are scaled by this at least …"))
      ->transform(real_number())
      ->capture_default_str();
  own(train.add_option("--most-scale", c.options.most_scale, "… and by this at most, before a crop is taken"))
      ->transform(real_number())
      ->capture_default_str();
}

const char* segment_train_help() {
  return "\nSegmentation: fcn_… and deeplabv3_… give a class a pixel. A folder (Pascal VOC: JPEGImages, SegmentationClass,\n"
         "  ImageSets/Segmentation; Cityscapes: leftImg8bit, gtFine), or drawn:\n"
         "  synthetic-shapes:count=1000,size=128,shapes=6,classes=5       needs no file\n"
         "Options of image models hold too; --image is the side of the crops (default: 480, or the drawn scenes' own). Defaults are\n"
         "--batch 8 --lr 0.01 --weight-decay 1e-4 --schedule poly, without Nesterov momentum. Scored by the mean IoU.\n";
}

SegmentTrainCommand segment_command(const TrainCommand& c, const CLI::App& train) {
  SegmentTrainCommand command = c.segments;
  command.images = image_command(c, train);
  const SegmentTrainOptions own;
  ImageTrainOptions& o = command.images.options;
  const auto keep = [&](const char* name, auto& to, const auto& mine) {
    if (train.count(name) == 0) to = mine;
  };
  keep("--epochs", o.epochs, own.epochs);
  keep("--lr", o.lr, own.lr);
  keep("--weight-decay", o.weight_decay, own.weight_decay);
  keep("--batch", o.batch, own.batch);
  keep("--schedule", command.images.schedule, name_of(own.schedule));
  command.images.no_nesterov = true;
  return command;
}

void run_train_segment(const SegmentTrainCommand& c) {
  const ImageTrainCommand& images = c.images;
  const std::vector<Method> methods = methods_from(images.methods, validate);
  const auto options = [&](const Method& method, uint64_t seed) { return segment_options(c, method, seed); };
  if (images.gamma_given && images.schedule != "step") throw UsageError("[train] --gamma needs --schedule step, got " + images.schedule);
  if (images.small_stem && images.large_stem) throw UsageError("[train] the stem must be one, got --small-stem and --large-stem");
  if (images.skip_broken) throw UsageError("[train] --skip-broken is for images in folders by class, got " + images.options.model);
  check_runs(images, images.options, methods.size(), [&] {
    for (const Method& m : methods) validate(options(m, images.options.seed));
  });
  if (!holds_scenes(images.data)) refuse_graph("train", images.data, images.options.model);
  const SceneSets data = load_scenes(images.data, SceneTask::segmentation);
  if (!images.is_silent()) print_about(data);
  const SegmentTrainOptions common = options(methods.front(), images.options.seed);
  if (!images.is_silent() && starts_from_weights(common))
    print_left_out(common.weights, classifier_fit(shape_of(common, data.train.classes, 3, 0, 0), common.weights));
  run_all(images, common, methods,
          {"step",
           [&](const Method& m, uint64_t seed) {
             const SegmentTrainOptions o = options(m, seed);
             return run_shown(o, images.is_silent(), o.batch,
                              [&](const ProgressReport& report) { return train_segmentation(data, o, report); });
           },
           [&](const std::vector<RunResult>& runs) { print_segmentation(runs, data, common); },
           [&](const RunResult& r) { return segmentation_json(r, data, common); }});
}

ScenesToPredict scenes_to_predict(const std::string& where, SceneTask task) {
  const std::vector<std::string> files = holds_scenes(where) ? std::vector<std::string>() : image_files_in(where);
  ScenesToPredict scenes;
  if (files.empty()) {
    SceneSets sets = load_scenes(where, task);
    scenes.data = sets.test.count > 0 ? std::move(sets.test) : std::move(sets.train);
    scenes.labelled = true;
    return scenes;
  }
  scenes.data.name = where;
  scenes.data.count = static_cast<int64_t>(files.size());
  for (const std::string& name : files) scenes.data.paths.push_back(where + "/" + name);
  return scenes;
}

void predict_segment(const PredictCommand& c) {
  if (c.output == "-") throw UsageError("[predict] --out must be a folder for masks, got -");
  if (!c.scores.empty()) throw UsageError("[predict] --scores is not for segmentation, got " + c.scores);
  check_not_data("predict", "--out", c.output, c.data);
  use_device(c.device, "predict");
  const SceneData data = scenes_to_predict(c.data, SceneTask::segmentation).data;
  const std::vector<std::string> names = mask_names(data);
  make_folder(c.output);
  const auto write = [&](int64_t index, const Mask& mask) {
    const std::vector<uint8_t> bytes = encode_png_mask(mask);
    Replacement file(c.output + "/" + names[static_cast<size_t>(index)], "predict");
    file.write(bytes.data(), bytes.size());
    file.finish();
  };
  const SegmentPrediction p = predict_masks(data, c.checkpoint, write, c.device, c.loaders);
  fmt::print("{}: {} masks, {}\n", c.output, grouped(p.count),
             std::isnan(p.mean_iou) ? std::string("no masks to test on") : fmt::format("test mIoU {:.2f} %", p.mean_iou));
  for (size_t k = 0; k < p.ious.size(); ++k) {
    fmt::print("  {:<16} {}\n", p.class_names[k], std::isnan(p.ious[k]) ? "-" : fmt::format("{:.2f}", p.ious[k]));
  }
}

}  // namespace satchel::tool
