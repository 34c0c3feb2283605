#include "tools/bench_images.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/core/noise.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/plan_image.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kWarmUps = 3;                       // steps before the timed ones; the last one's memory is watched
constexpr int64_t kCheckBatch = 8, kCheckImage = 32;  // of the check
// Values within rounding of 0 fall on either side of a ReLU, and each changes the gradients of all layers before it: fp32 in NCHW order
// is off fp32 in channels_last by up to 3e-2 (resnet50, densenet121), and a gradient that lacks a term by about 1.
constexpr double kFlips = 0.1;
constexpr int64_t kMostSegments = 254;  // classes that a byte tells from ignored pixels
constexpr double kRate = 1e-3;          // small: random labels shall not drive the weights far

/// Model, optimizer and a batch of noise, on their device while it lives.
class Entry {
 public:
  Entry(const ImageBenchSetting& s, const Method& method, int64_t batch)
      : device_(device_of(s.options.device)), rates_{s.options.lr, s.options.momentum} {
    ImageTrainOptions options = s.options;
    options.method = method;
    if (allocates_bits(method)) shares_ = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{batch});
    const ImageShape shape = shape_of(options, s.classes, s.channels, s.image, s.image);
    options.method = with_mean(shape, {batch, s.image, s.image}, method);
    step_ = std::make_unique<ImageStep>(make_model(options, shape, device_, shares_), options, device_);
    if (shares_) shares_->set_gradient_scale(step_->loss_scale());
    at::manual_seed(1);
    const auto order = options.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    images_ = at::empty({batch, s.channels, s.image, s.image}, at::TensorOptions().dtype(at::kFloat).device(device_), order).normal_();
    const bool segments = is_segmentation_model(s.options.model);
    const std::vector<int64_t> labels = segments ? std::vector{batch, s.image, s.image} : std::vector{batch};
    labels_ = at::randint(s.classes, labels, at::TensorOptions().dtype(segments ? at::kByte : at::kLong).device(device_));
    indices_.resize(static_cast<size_t>(batch));
    std::iota(indices_.begin(), indices_.end(), 0);
  }

  /// Returns the loss, once the step is done.
  double step(int64_t round, StepCost* cost = nullptr) {
    if (shares_) shares_->set_samples(indices_);
    const at::Tensor loss = (*step_)(images_, labels_, rates_, derive_seed(1, static_cast<uint64_t>(round + 1), 0, 0), cost);
    if (shares_) shares_->step();
    return loss.item<double>();
  }

  ImageStep& of() { return *step_; }
  int64_t batch_bytes() const { return static_cast<int64_t>(images_.nbytes() + labels_.nbytes()); }

 private:
  at::Device device_;
  Rates rates_;
  std::shared_ptr<RunningBitAllocator> shares_;
  std::unique_ptr<ImageStep> step_;
  at::Tensor images_, labels_;
  std::vector<int64_t> indices_;
};

ImageBenchResult measured(const ImageBenchSetting& setting, const Method& method, int64_t batch, int64_t steps) {
  ImageBenchResult r;
  r.method = method.name;
  r.batch = batch;
  Entry entry(setting, method, batch);
  r.parameter_bytes = entry.of().parameter_bytes();
  r.batch_bytes = entry.batch_bytes();
  for (int64_t round = 0; round < kWarmUps + steps; ++round) {
    const auto start = std::chrono::steady_clock::now();
    r.loss = entry.step(round, round == kWarmUps - 1 ? &r.cost : nullptr);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (round >= kWarmUps) r.seconds.push_back(took.count());
    if (std::isfinite(r.loss)) continue;
    r.error = fmt::format("loss {} at step {}", std::isnan(r.loss) ? "nan" : "infinite", round + 1);
    break;
  }
  return r;
}

/// At 32 bits a method's gradients are fp32's, on a few small images in float32 and without dropout. Returns
/// ‖own − fp32's‖ / ‖fp32's‖ over all parameters together.
double check_gradients(ImageBenchSetting s) {
  s.image = kCheckImage;
  s.options.small_stem = true;
  s.options.width = std::min<int64_t>(shape_of(s.options, s.classes, s.channels, s.image, s.image).width, 16);
  s.options.dropout = 0;
  if (s.options.model == "efficientnet_b0") s.options.stochastic_depth = 0;
  s.options.amp = Autocast::none;
  const ConvolutionSettings full(device_of(s.options.device), {});
  Entry own(s, parse_method("bits=32"), kCheckBatch), base(s, parse_method("fp32"), kCheckBatch);
  own.step(0);
  base.step(0);
  const auto expected = base.of().model()->named_parameters();
  double difference = 0, norm = 0;
  for (const auto& item : own.of().model()->named_parameters()) {
    const at::Tensor e = expected[item.key()].grad().to(at::kDouble), g = item.value().grad().to(at::kDouble);
    difference += (g - e).square().sum().item<double>();
    norm += e.square().sum().item<double>();
  }
  const double error = std::sqrt(difference / norm);
  if (!(error <= kFlips)) fail("bench", fmt::format("gradients at 32 bits must be fp32's within {}", kFlips), error);
  return error;
}

const ImageBenchResult* base_of(const std::vector<ImageBenchResult>& results) {
  const auto found = std::find_if(results.begin(), results.end(), [](const ImageBenchResult& r) { return r.method == "fp32" && r.ran(); });
  return found == results.end() ? nullptr : &*found;
}

std::vector<std::string> row_of(const ImageBenchResult& r, const ImageBenchResult* base) {
  if (!r.ran()) return {r.method, r.fits ? r.error : "does not fit", "-", "-", "-", "-"};
  const auto beside = [&](int64_t own, int64_t of_base) {
    return bytes_text(own) + (base == nullptr || base == &r ? "" : " " + less_text(static_cast<double>(of_base), static_cast<double>(own)));
  };
  return {r.method,
          fmt::format("{:.2f} ms", r.median() * 1e3),
          base == nullptr ? "-" : fmt::format("{:.2f}x", r.median() / base->median()),
          fmt::format("{:.1f}", static_cast<double>(r.batch) / r.median()),
          beside(r.cost.saved_bytes, base == nullptr ? 0 : base->cost.saved_bytes),
          beside(r.cost.peak_bytes, base == nullptr ? 0 : base->cost.peak_bytes)};
}

ordered_json result_json(const ImageBenchResult& r, const ImageBenchResult* base) {
  ordered_json j = {{"method", r.method}, {"batch", r.batch}, {"fits", r.fits}};
  j["error"] = r.error.empty() ? ordered_json(nullptr) : ordered_json(r.error);
  const auto put = [&](const char* key, const ordered_json& value) { j[key] = r.ran() ? value : ordered_json(nullptr); };
  put("step_seconds", r.median());
  put("ratio", base == nullptr || !r.ran() ? ordered_json(nullptr) : ordered_json(r.median() / base->median()));
  put("images_per_second", r.ran() ? ordered_json(static_cast<double>(r.batch) / r.median()) : ordered_json(nullptr));
  put("saved_bytes", r.cost.saved_bytes);
  put("loss_bytes", r.cost.loss_bytes);
  put("peak_bytes", r.cost.peak_bytes);
  put("total_bytes", r.total_bytes());
  put("loss", r.loss);
  put("steps", r.seconds.size());
  return j;
}

/// After every method: what is there stays, whatever comes.
void write_results(const BenchImagesCommand& c, const ordered_json& about, const std::vector<ImageBenchResult>& results) {
  ordered_json all = about;
  all["results"] = results_json(results);
  write_json(c.json, all, "bench");
}

}  // namespace

bool ran_out(const c10::Error& e) {
  const std::string_view what = e.what_without_backtrace();
  return out_of_memory(e) || what.find("ALLOC_FAILED") != what.npos || what.find("unable to find an engine") != what.npos;
}

void print_results(const std::vector<ImageBenchResult>& results) {
  std::vector<std::vector<std::string>> rows{{"method", "step", "of fp32", "images/s", "saved", "peak"}};
  for (const ImageBenchResult& r : results) rows.push_back(row_of(r, base_of(results)));
  print_table(rows);
}

ordered_json results_json(const std::vector<ImageBenchResult>& results) {
  ordered_json all = ordered_json::array();
  for (const ImageBenchResult& r : results) all.push_back(result_json(r, base_of(results)));
  return all;
}

double ImageBenchResult::median() const { return satchel::median(seconds); }

ImageBenchResult measure(const ImageBenchSetting& setting, const Method& method, int64_t batch, int64_t steps) {
  const at::Device device = device_of(setting.options.device);
  const ConvolutionSettings settings(device, {setting.options.tf32, setting.tries, wants_growing_segments(method)});
  ImageBenchResult r;
  try {
    r = measured(setting, method, batch, steps);
  } catch (const c10::Error& e) {
    if (!ran_out(e)) throw;
    r.method = method.name;
    r.batch = batch;
    r.fits = false;
  }
  release_workspaces(device);  // else they hold on to a segment, and what the next one finds depends on this one
  release_cached_memory(device);
  return r;
}

void add_image_bench_options(CLI::App& bench, BenchImagesCommand& c) {
  ImageTrainOptions& o = c.setting.options;
  std::vector<std::string> names;
  for (const std::string_view name : image_model_names()) names.emplace_back(name);
  for (const std::string_view name : segmentation_model_names()) names.emplace_back(name);
  o.model = "resnet50";
  o.lr = kRate;
  bench.add_option("--model", o.model, "The model")->check(CLI::IsMember(names))->capture_default_str();
  bench.add_option("--methods", c.methods, "As train's --method")->capture_default_str();
  bench.add_option("--image", c.setting.image, "Height and width of the images")
      ->transform(whole_number(1, 1 << 14))
      ->capture_default_str();
  bench.add_option("--classes", c.classes, "Classes")
      ->transform(whole_number(2, 1 << 20))
      ->default_str(fmt::format("{} (segmentation: {})", c.setting.classes, kVocClasses));
  bench.add_flag("--no-aux", c.no_aux, "Segmentation: without the auxiliary head");
  bench.add_option("--width", o.width, "Channels of the first stage")->transform(whole_number(1, 1 << 12))->default_str(kWidthDefault);
  bench.add_flag("--small-stem", c.small_stem, "First convolution 3×3 of stride 1, no pool (default: for images up to 64 pixels)");
  bench.add_flag("--large-stem", c.large_stem, "First convolution 7×7 of stride 2, then a pool")->excludes("--small-stem");
  bench.add_option("--lr", o.lr, "Learning rate of the steps")->transform(real_number())->capture_default_str();
  bench.add_option("--device", o.device, "Where to train")->check(device_name())->capture_default_str();
  bench.add_flag("--tf32", o.tf32, "Convolutions and products of float32 in TF32 (cuda)");
  bench.add_option("--amp", c.amp, "Autocast to this type")->check(CLI::IsMember({"none", "bf16", "fp16"}))->capture_default_str();
  bench.add_flag("--contiguous", c.contiguous, "Images and weights in NCHW order (default: channels_last)");
  bench.add_flag("--no-tries", c.no_tries, "cuDNN chooses its algorithms by rule instead of trying them (cuda)");
  bench.add_option("--threads", c.threads, kThreadsHelp)->transform(whole_number(1, 4096));
  bench.add_option("--json", c.json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
}

ImageBenchSetting checked_setting(const BenchImagesCommand& c) {
  ImageBenchSetting s = c.setting;
  s.options.amp = from_name<Autocast>(c.amp, "bench");
  s.options.channels_last = !c.contiguous;
  s.tries = !c.no_tries;
  s.options.aux = !c.no_aux;
  const bool segments = is_segmentation_model(s.options.model);
  s.classes = c.classes.value_or(segments ? kVocClasses : s.classes);
  if (segments && s.classes > kMostSegments)
    throw UsageError(fmt::format("[bench] --classes must be at most {} for segmentation, got {}", kMostSegments, s.classes));
  if (!segments && c.no_aux) throw UsageError("[bench] --no-aux is for models of segmentation, got " + s.options.model);
  if (c.small_stem || c.large_stem) s.options.small_stem = c.small_stem;
  if (c.no_tries && !names_cuda(s.options.device)) throw UsageError("[bench] --no-tries needs --device cuda, got " + s.options.device);
  try {
    validate(s.options);
    const ImageShape shape = shape_of(s.options, s.classes, s.channels, s.image, s.image);
    validate(shape, "bench");
    check_side(shape, s.image, s.image, "bench");
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  use_device(s.options.device, "bench");
  return s;
}

ordered_json setting_json(const ImageBenchSetting& s, int64_t cap) {
  return {{"model", s.options.model},
          {"width", shape_of(s.options, s.classes, s.channels, s.image, s.image).width},
          {"image", s.image},
          {"classes", s.classes},
          {"device", s.options.device},
          {"tf32", s.options.tf32},
          {"amp", name_of(s.options.amp)},
          {"channels_last", s.options.channels_last},
          {"cap", cap > 0 ? ordered_json(cap) : ordered_json(nullptr)},
          {"machine", machine_json(s.options.device)}};
}

void run_bench_images(const BenchImagesCommand& c) {
  const std::vector<Method> methods = methods_from(c.methods, validate);
  const ImageBenchSetting setting = checked_setting(c);
  const std::string& device = setting.options.device;
  const int64_t bytes = c.memory_cap.empty() ? 0 : parse_bytes(c.memory_cap, "bench");
  if (bytes > 0 && !names_cuda(device)) throw UsageError("[bench] --memory-cap needs --device cuda, got " + device);
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const bool silent = c.json == "-";
  const double error = check_gradients(setting);
  release_cached_memory(device_of(device));
  if (!silent) {
    fmt::print("{}, batch {} of {} × {}{}{}; {}\n", setting.options.model, c.batch, setting.image, setting.image,
               setting.options.tf32 ? ", TF32" : "", c.amp == "none" ? "" : ", autocast to " + c.amp,
               names_cuda(device) ? gpu_name() : fmt::format("{} CPU threads", at::get_num_threads()));
    fmt::print("gradients at 32 bits are fp32's within {:.1e} (small images, float32)\n\n", error);
    std::fflush(stdout);
  }
  std::optional<MemoryCap> cap;
  if (bytes > 0) cap.emplace(device_of(device), bytes);
  ordered_json about = setting_json(setting, bytes);
  about["gradient_error"] = error;
  std::vector<ImageBenchResult> results;
  for (const Method& m : methods) {
    results.push_back(measure(setting, m, c.batch, c.steps));
    if (!c.json.empty() && !silent) write_results(c, about, results);
  }
  if (silent) {
    write_results(c, about, results);
  } else {
    print_results(results);
  }
  if (std::ranges::none_of(results, &ImageBenchResult::ran)) fail("bench", "a method must run to its end", "none that did");
}

void add_bench_images(CLI::App& bench) {
  const auto c = std::make_shared<BenchImagesCommand>();
  CLI::App* images = bench.add_subcommand("images", "A whole training step of an image model, method by method");
  add_image_bench_options(*images, *c);
  images->add_option("--batch", c->batch, "Images a step")->transform(whole_number(1, 1 << 20))->capture_default_str();
  images->add_option("--steps", c->steps, "Timed steps of which the median counts")
      ->transform(whole_number(1, 1000000))
      ->capture_default_str();
  images->add_option("--memory-cap", c->memory_cap, "Most that torch's allocator may take: 16GB, 15.5GiB, bytes (cuda)")
      ->transform(byte_size());
  images->footer(
      "\nChecked first: at 32 bits the gradients of all weights equal fp32's within rounding, on a few small images in float32.\n"
      "Then steps of forward, loss, backward, SGD on generated images, one method after the other, each alone on the device. A method\n"
      "that runs out of memory does not fit, one whose loss is not finite says so, and the others go on; where none runs to its end the\n"
      "exit code is 1. fp32 is torch's own functions and saves; bench/image_torch.py\n"
      "measures PyTorch itself, checkpointing and torch.compile in the same way.\n"
      "\nExamples:\n  satchel bench images --device cuda --tf32 --batch 256 --json images.json\n"
      "  satchel bench images --model fcn_resnet50 --image 512 --batch 16 --device cuda --tf32\n"
      "  satchel bench images --model resnet18 --image 32 --classes 10 --batch 16 --width 16 --steps 5");
  images->callback([c] { run_bench_images(*c); });
}

}  // namespace satchel::tool
