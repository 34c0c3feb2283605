#include "tools/train_images.h"

#include <dirent.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "satchel/train/image_options.h"
#include "satchel/train/options.h"
#include "satchel/train/pretrained.h"
#include "tools/arguments.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

bool is_there(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

/// Options that the data leave nothing to do for.
void check_data(const ImageSets& data, const ImageTrainOptions& o) {
  if (o.image > 0 && !data.train.in_files())
    throw UsageError(fmt::format("[train] --image is for folders of JPEG files: {} has images of {} × {}, got {}", data.train.name,
                                 data.train.height, data.train.width, o.image));
}

/// Leaves broken images out and names the first few.
void skip_broken(ImageSets& data) {
  constexpr size_t kShown = 5;
  if (!data.train.in_files()) throw UsageError(fmt::format("[train] --skip-broken is for folders of image files, got {}", data.train.name));
  const std::vector<std::string> why = drop_broken(data);
  if (why.empty()) return;
  fmt::print(stderr, "satchel: skipped {} broken {}:\n", grouped(static_cast<int64_t>(why.size())), why.size() == 1 ? "image" : "images");
  for (size_t i = 0; i < std::min(why.size(), kShown); ++i) fmt::print(stderr, "  {}\n", why[i]);
  if (why.size() > kShown) fmt::print(stderr, "  … and {} more\n", grouped(static_cast<int64_t>(why.size() - kShown)));
}

void print_about(const ImageSets& data) {
  const ImageData& t = data.train;
  const std::string size = t.height > 0 ? fmt::format("{} × {}", t.height, t.width) : "JPEG files";
  fmt::print("{}: {} images to train on, {} to test on, {} {} of {}, {} classes\n", t.name, grouped(t.count()), grouped(data.test.count()),
             t.channels, t.channels == 1 ? "channel" : "channels", size, grouped(t.classes));
  std::fflush(stdout);
}

void print_comparison(const std::vector<RunResult>& runs, const ImageSets& data, const ImageTrainOptions& o) {
  const int64_t epochs = runs.back().epochs;
  const auto seeds = std::count_if(runs.begin(), runs.end(), [&](const RunResult& r) { return r.method == runs.front().method; });
  fmt::print("\n{} on {}, batch {}, {} {}, {} {}, schedule {}{}{}\n\n", o.model, data.train.name, o.batch, epochs,
             epochs == 1 ? "epoch" : "epochs", seeds, seeds == 1 ? "seed" : "seeds", name_of(o.schedule), o.tf32 ? ", TF32" : "",
             is_half(o.amp) ? ", autocast to " + name_of(o.amp) : "");
  print_runs(runs, "accuracy", "step");
  fmt::print("test: {}\n", data.test.count() > 0 ? "after the last epoch" : "there are no images to test on");
}

ordered_json run_json(const RunResult& r, const ImageSets& data, const ImageTrainOptions& o) {
  ordered_json j = common_json(r, o, {{"loaders", o.loaders}});
  const bool tests = data.test.count() > 0;
  j.update({{"best_test", tests ? ordered_json(r.best_test) : ordered_json(nullptr)},
            {"best_epoch", tests ? ordered_json(r.best_epoch) : ordered_json(nullptr)},
            {"step_seconds", r.step_seconds},
            {"images_per_second", r.images_per_second},
            {"skipped_steps", r.skipped_steps},
            {"images", data.train.count()},
            {"test_images", data.test.count()},
            {"classes", data.train.classes},
            {"metric", "accuracy"}});
  for (const char* name : {"width", "batch", "lr", "weight_decay", "momentum", "schedule", "label_smoothing", "augment", "channels_last"})
    j[name] = j["options"][name];
  return j;
}

}  // namespace

ImageTrainOptions image_options(const ImageTrainCommand& c, const Method& method, uint64_t seed) {
  ImageTrainOptions o = c.options;
  o.method = method;
  o.seed = seed;
  o.amp = from_name<Amp>(c.amp, "train");
  o.schedule = from_name<Decay>(c.schedule, "train");
  o.milestones = c.milestones;
  if (c.small_stem || c.large_stem) o.small_stem = c.small_stem;
  o.augment = !c.no_augment;
  o.nesterov = !c.no_nesterov && o.momentum > 0;
  o.channels_last = !c.contiguous;
  return o;
}

std::vector<std::string> image_files_in(const std::string& folder) {
  std::vector<std::string> names;
  const auto close = [](DIR* open) { ::closedir(open); };
  const std::unique_ptr<DIR, decltype(close)> open(::opendir(folder.c_str()), close);
  if (!open) return names;
  while (const dirent* entry = ::readdir(open.get())) {
    std::string name = entry->d_name, low = name;
    std::ranges::transform(low, low.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (low.ends_with(".jpg") || low.ends_with(".jpeg") || low.ends_with(".png")) names.push_back(std::move(name));
  }
  std::ranges::sort(names);
  return names;
}

void add_image_options(CLI::App& train, ImageTrainCommand& c) {
  ImageTrainOptions& o = c.options;
  const auto own = [](CLI::Option* option) { return option->group(kImageGroup); };
  own(train.add_option("--batch", o.batch, "Images a step"))->transform(whole_number(1, 1 << 20))->capture_default_str();
  own(train.add_option("--width", o.width, "Channels of the first stage"))->transform(whole_number(1, 1 << 12))->default_str(kWidthDefault);
  own(train.add_option("--weights", o.weights,
                       "Start from these weights: torchvision's state dict as safetensors, or a checkpoint of this command. A classifier\n"
                       "of another number of classes is left out"))
      ->transform(file_name());
  own(train.add_option(
          "--freeze", o.freeze,
          "Freeze a stage and all before it, the stem too: they do not learn, their BatchNorm runs as in evaluation, nothing is\n"
          "kept for them. Names as in the weights: layer2, features.4, features.denseblock2"))
      ->type_name("STAGE");
  own(train.add_option("--stochastic-depth", o.stochastic_depth, "efficientnet_b0: the chance that a sample skips the last block"))
      ->transform(real_number())
      ->default_str(fmt::format("{}", kEfficientDepth));
  own(train.add_flag("--small-stem", c.small_stem, "First convolution 3×3 of stride 1, no pool (default: for images up to 64 pixels)"));
  own(train.add_flag("--large-stem", c.large_stem, "First convolution 7×7 of stride 2, then a pool (default: for larger images)"));
  own(train.add_option("--image", o.image, "JPEG and PNG files: bring images to this height and width (default: 224)"))
      ->transform(whole_number(1, 1 << 14));
  own(train.add_flag("--skip-broken", c.skip_broken,
                     "Image files: decode all of them first and leave broken ones out (default: the first one ends the run)"));
  own(train.add_option("--schedule", c.schedule, "How the learning rate goes"))->check(members<Decay>())->capture_default_str();
  own(train.add_option("--warmup", o.warmup, "Epochs in which it rises first"))->transform(real_number())->capture_default_str();
  own(train.add_option("--milestones", c.milestones, "schedule step: epochs after which it falls (default: each third)"))
      ->transform(real_number())
      ->delimiter(',');
  own(train.add_option("--gamma", o.gamma, "schedule step: what it falls by"))->transform(real_number())->capture_default_str();
  own(train.add_flag("--no-nesterov", c.no_nesterov, "Plain momentum"));
  own(train.add_option("--label-smoothing", o.label_smoothing, "Share of the target that is spread over all classes"))
      ->transform(real_number())
      ->capture_default_str();
  own(train.add_flag("--no-augment", c.no_augment, "Train on the images as they are: no crops, no flips"));
  own(train.add_flag("--contiguous", c.contiguous, "Images and weights in NCHW order (default: channels_last)"));
  own(train.add_option("--loaders", o.loaders, "Threads that prepare batches"))->transform(whole_number(1, 256))->capture_default_str();
}

const char* image_train_help() {
  return "\nImages: a folder (CIFAR-10 or CIFAR-100 in its binary version, IDX files such as Fashion-MNIST's, train/CLASS/*.jpg with\n"
         "  val/CLASS/*.jpg), or generated:\n"
         "  synthetic-images:classes=10,size=32,count=50000        needs no file\n"
         "Fine-tuning: --weights FILE --freeze STAGE; in Python save_file(torchvision.models.resnet50(weights=\"DEFAULT\").state_dict(), "
         "FILE)\n"
         "  of safetensors.torch writes such a file.\n"
         "Trained by SGD with Nesterov momentum; --amp fp16 with a loss scale. Options under \"Graph models\" are refused with an image\n"
         "model, those under \"Image models\" with graphs; of the others images have defaults of their own where \"images\" says so.\n";
}

void refuse_given(const CLI::App& train, const std::string& group, const std::string& model) {
  for (const CLI::Option* option : train.get_options()) {
    if (option->get_group() == group && option->count() > 0)
      throw UsageError(fmt::format("[train] {} is not for this model, got {}", option->get_name(), model));
  }
}

ImageTrainCommand image_command(const TrainCommand& c, const CLI::App& train) {
  ImageTrainCommand images = c.images;
  ImageTrainOptions& o = images.options;
  const auto keep = [&](const char* name, auto& to, const auto& own) {  // what images have by default, unless it was given
    if (train.count(name) == 0) to = own;
  };
  const RunOptions own = o;
  static_cast<RunsCommand&>(images) = c;
  static_cast<RunOptions&>(o) = c.options;
  o.checkpoint_every = checkpoint_minutes(c);
  keep("--epochs", o.epochs, own.epochs);
  keep("--lr", o.lr, own.lr);
  keep("--weight-decay", o.weight_decay, own.weight_decay);
  keep("--momentum", o.momentum, own.momentum);
  if (train.count("--dropout") > 0) o.dropout = c.options.shape.dropout;
  images.gamma_given = train.count("--gamma") > 0;
  images.amp = c.amp == "auto" ? "none" : c.amp;
  o.model = c.model;
  return images;
}

void refuse_graph(const char* op, const std::string& data, const std::string& model) {
  if (holds_images(data)) return;
  if (!data.starts_with("synthetic:") && !data.ends_with(".npz") && !is_there(data + "/adj_full.npz") && !is_there(data + "/raw")) return;
  throw UsageError(fmt::format(
      "[{}] data must be images for {} (a folder of CIFAR, IDX or JPEG files, or synthetic-images:…), got the graph {}", op, model, data));
}

ImagesToPredict images_to_predict(const std::string& where) {
  const std::vector<std::string> files = holds_images(where) ? std::vector<std::string>() : image_files_in(where);
  if (files.empty()) {
    ImageSets sets = load_images(where);
    return {sets.test.count() > 0 ? std::move(sets.test) : std::move(sets.train), true};
  }
  ImagesToPredict images;
  images.data.name = where;
  images.data.channels = 3;
  images.data.classes = 1;
  for (const std::string& name : files) images.data.paths.push_back(where + "/" + name);
  images.data.labels.assign(files.size(), 0);
  return images;
}

bool starts_from_weights(const ImageTrainOptions& o) { return !o.weights.empty() && !(o.resume && is_there(o.checkpoint)); }

void print_left_out(const std::string& file, const ClassifierFit& fit) {
  if (!fit.is_left_out()) return;
  fmt::print("{}: {} of {} classes is left out; that of the data's {} starts anew\n", file, fit.layer, grouped(fit.stored),
             grouped(fit.classes));
}

void run_train_images(const ImageTrainCommand& c) {
  const std::vector<Method> methods = methods_from(c.methods, validate);
  const auto options = [&](const Method& method, uint64_t seed) { return image_options(c, method, seed); };
  if (c.gamma_given && c.schedule != "step") throw UsageError("[train] --gamma needs --schedule step, got " + c.schedule);
  if (c.small_stem && c.large_stem) throw UsageError("[train] the stem must be one, got --small-stem and --large-stem");
  check_runs(c, c.options, methods.size(), [&] {
    for (const Method& m : methods) validate(options(m, c.options.seed));
  });
  refuse_graph("train", c.data, c.options.model);
  ImageSets data = load_images(c.data);
  check_data(data, c.options);
  if (c.skip_broken) skip_broken(data);
  if (!c.is_silent()) print_about(data);
  const ImageTrainOptions common = options(methods.front(), c.options.seed);
  if (!c.is_silent() && starts_from_weights(common)) {
    const ImageData& t = data.train;
    print_left_out(common.weights, classifier_fit(shape_of(common, t.classes, t.channels, t.height, t.width), common.weights));
  }
  run_all(c, common, methods,
          {"step",
           [&](const Method& m, uint64_t seed) {
             const ImageTrainOptions o = options(m, seed);
             return run_shown(o, c.is_silent(), o.batch, [&](const ProgressReport& report) { return train_images(data, o, report); });
           },
           [&](const std::vector<RunResult>& runs) { print_comparison(runs, data, common); },
           [&](const RunResult& r) { return run_json(r, data, common); }});
}

}  // namespace satchel::tool
