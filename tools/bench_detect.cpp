#include "tools/bench_detect.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/train/detect_step.h"
#include "satchel/train/image_options.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/bench_images.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kDetectWarmUps = 3;                                 // steps before the timed ones; the last one's memory is watched
constexpr int64_t kFewImages = 2, kFewPixels = 64, kFewChannels = 8;  // of the check
constexpr double kDetectFlips = 0.1;                                  // as bench images': values near 0 fall on either side of a ReLU
constexpr int64_t kChannels = 3;

struct BenchDetectCommand {
  DetectTrainOptions options;
  std::string methods = "fp32,actnn,division,satchel", amp = "none", json;
  int64_t image = 640, classes = 91, objects = 8, batch = 16, steps = 20, threads = 0;
  bool contiguous = false;
};

/// Model, optimizer, a batch of noise and boxes anywhere in it.
class DetectEntry {
 public:
  DetectEntry(const BenchDetectCommand& c, const Method& method)
      : device_(device_of(c.options.device)), rates_{c.options.lr, c.options.momentum} {
    DetectTrainOptions options = c.options;
    options.method = method;
    if (allocates_bits(method)) shares_ = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{c.batch});
    DetectorShape shape = shape_of(options, 1, kChannels);
    shape.classes = c.classes;
    step_ = std::make_unique<DetectStep>(make_detector(options, shape, device_, shares_), options, device_);
    if (shares_) shares_->set_gradient_scale(step_->loss_scale());
    at::manual_seed(1);
    const auto order = options.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    images_ = at::empty({c.batch, kChannels, c.image, c.image}, at::TensorOptions().dtype(at::kFloat).device(device_), order).normal_();
    const int64_t first = first_class_of(options.model);
    for (int64_t i = 0; i < c.batch; ++i) {
      const auto side = static_cast<double>(c.image);
      const at::Tensor corner = at::rand({c.objects, 2}) * (side * 0.7), size = at::rand({c.objects, 2}) * (side * 0.25) + side * 0.05;
      targets_.boxes.push_back(at::cat({corner, corner + size}, 1).to(device_));
      targets_.labels.push_back(at::randint(first, c.classes, {c.objects}, at::TensorOptions().dtype(at::kLong)).to(device_));
      targets_.image_sizes.push_back({c.image, c.image});
    }
    indices_.resize(static_cast<size_t>(c.batch));
    std::iota(indices_.begin(), indices_.end(), 0);
  }

  /// Returns the loss, once the step is done.
  double step(int64_t round, StepCost* cost = nullptr) {
    if (shares_) shares_->set_samples(indices_);
    const at::Tensor loss = (*step_)(images_, targets_, rates_, derive_seed(1, static_cast<uint64_t>(round + 1), 0, 0), cost);
    if (shares_) shares_->step();
    return loss.item<double>();
  }
  DetectStep& of() { return *step_; }
  int64_t batch_bytes() const { return static_cast<int64_t>(images_.nbytes()); }

 private:
  at::Device device_;
  Rates rates_;
  std::shared_ptr<RunningBitAllocator> shares_;
  std::unique_ptr<DetectStep> step_;
  at::Tensor images_;
  BoxTargets targets_;
  std::vector<int64_t> indices_;
};

ImageBenchResult measured_detector(const BenchDetectCommand& c, const Method& method) {
  ImageBenchResult r;
  r.method = method.name;
  r.batch = c.batch;
  DetectEntry entry(c, method);
  r.parameter_bytes = entry.of().parameter_bytes();
  r.batch_bytes = entry.batch_bytes();
  for (int64_t round = 0; round < kDetectWarmUps + c.steps; ++round) {
    const auto start = std::chrono::steady_clock::now();
    r.loss = entry.step(round, round == kDetectWarmUps - 1 ? &r.cost : nullptr);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (round >= kDetectWarmUps) r.seconds.push_back(took.count());
    if (std::isfinite(r.loss)) continue;
    r.error = fmt::format("loss {} at step {}", std::isnan(r.loss) ? "nan" : "infinite", round + 1);
    break;
  }
  return r;
}

ImageBenchResult measure_detector(const BenchDetectCommand& c, const Method& method) {
  const at::Device device = device_of(c.options.device);
  const ConvolutionSettings settings(device, {c.options.tf32, true, wants_growing_segments(method)});
  ImageBenchResult r;
  try {
    r = measured_detector(c, method);
  } catch (const c10::Error& e) {
    if (!ran_out(e)) throw;
    r.method = method.name;
    r.batch = c.batch;
    r.fits = false;
  }
  release_workspaces(device);
  release_cached_memory(device);
  return r;
}

/// ‖own − fp32's‖ / ‖fp32's‖ of all gradients at 32 bits, on a few small images.
double detector_gradient_error(BenchDetectCommand c) {
  c.batch = kFewImages;
  c.image = kFewPixels;
  c.options.width = std::min<int64_t>(c.options.width, kFewChannels);
  c.options.amp = Amp::none;
  const ConvolutionSettings full(device_of(c.options.device), {});
  DetectEntry own(c, parse_method("bits=32")), base(c, parse_method("fp32"));
  own.step(0);
  base.step(0);
  const auto expected = base.of().model()->named_parameters();
  double difference = 0, norm = 0;
  for (const auto& item : own.of().model()->named_parameters()) {
    if (!item.value().grad().defined()) continue;
    const at::Tensor e = expected[item.key()].grad().to(at::kDouble), g = item.value().grad().to(at::kDouble);
    difference += (g - e).square().sum().item<double>();
    norm += e.square().sum().item<double>();
  }
  const double error = std::sqrt(difference / norm);
  if (!(error <= kDetectFlips)) fail("bench", fmt::format("gradients at 32 bits must be fp32's within {}", kDetectFlips), error);
  return error;
}

ordered_json detect_json(const BenchDetectCommand& c, double error, const std::vector<ImageBenchResult>& results) {
  return {{"model", c.options.model},
          {"width", c.options.width},
          {"image", c.image},
          {"classes", c.classes},
          {"objects", c.objects},
          {"frozen_norm", c.options.frozen_norm},
          {"trainable", c.options.trainable},
          {"device", c.options.device},
          {"tf32", c.options.tf32},
          {"amp", c.amp},
          {"channels_last", c.options.channels_last},
          {"machine", machine_json(c.options.device)},
          {"gradient_error", error},
          {"results", results_json(results)}};
}

void run_bench_detection(BenchDetectCommand c) {
  const std::vector<Method> methods = methods_from(c.methods, validate);
  c.options.amp = from_name<Amp>(c.amp, "bench");
  c.options.channels_last = !c.contiguous;
  try {
    for (const Method& m : methods) {
      c.options.method = m;
      validate(c.options);
    }
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  use_device(c.options.device, "bench");
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const bool silent = c.json == "-", cuda = names_cuda(c.options.device);
  const double error = detector_gradient_error(c);
  release_cached_memory(device_of(c.options.device));
  if (!silent) {
    fmt::print("{}{}, batch {} of {} × {}, {} classes{}{}; {}\n", c.options.model,
               c.options.frozen_norm ? fmt::format(" with frozen norms, {} stages trained", c.options.trainable) : "", c.batch, c.image,
               c.image, c.classes, c.options.tf32 ? ", TF32" : "", c.amp == "none" ? "" : ", autocast to " + c.amp,
               cuda ? gpu_name() : fmt::format("{} CPU threads", at::get_num_threads()));
    fmt::print("gradients at 32 bits are fp32's within {:.1e} (small images, float32)\n\n", error);
    std::fflush(stdout);
  }
  std::vector<ImageBenchResult> results;
  for (const Method& m : methods) {
    results.push_back(measure_detector(c, m));
    if (!c.json.empty() && !silent) write_json(c.json, detect_json(c, error, results), "bench");
  }
  if (silent) {
    write_json(c.json, detect_json(c, error, results), "bench");
  } else {
    print_results(results);
  }
  if (std::ranges::none_of(results, &ImageBenchResult::ran)) fail("bench", "a method must run to its end", "none that did");
}

}  // namespace

void add_bench_detection(CLI::App& bench) {
  const auto c = std::make_shared<BenchDetectCommand>();
  c->options.lr = 1e-3;  // small: random boxes shall not drive the weights far
  CLI::App* detection = bench.add_subcommand("detection", "A whole training step of a detector, method by method");
  std::vector<std::string> names;
  for (const std::string_view name : detector_names()) names.emplace_back(name);
  DetectTrainOptions& o = c->options;
  detection->add_option("--model", o.model, "The detector")->check(CLI::IsMember(names))->capture_default_str();
  detection->add_option("--methods", c->methods, "As train's --method")->capture_default_str();
  detection->add_option("--batch", c->batch, "Images a step")->transform(whole_number(1, 1 << 20))->capture_default_str();
  detection->add_option("--image", c->image, "Height and width of the images")->transform(whole_number(32, 1 << 13))->capture_default_str();
  detection->add_option("--classes", c->classes, "Classes, with the background where the model has one")
      ->transform(whole_number(2, 1 << 16))
      ->capture_default_str();
  detection->add_option("--objects", c->objects, "Objects an image")->transform(whole_number(1, 1000))->capture_default_str();
  detection->add_option("--width", o.width, "Channels of the first stage")->transform(whole_number(1, 1 << 10))->capture_default_str();
  detection->add_flag("--frozen-norm", o.frozen_norm, "Norms of the ResNet are constants");
  detection->add_option("--trainable", o.trainable, "Stages of the ResNet that are trained, from the last one back")
      ->transform(whole_number(0, 5))
      ->capture_default_str();
  detection->add_option("--steps", c->steps, "Timed steps of which the median counts")
      ->transform(whole_number(1, 1000000))
      ->capture_default_str();
  detection->add_option("--device", o.device, "Where to train")->check(device_name())->capture_default_str();
  detection->add_flag("--tf32", o.tf32, "Convolutions and products of float32 in TF32 (cuda)");
  detection->add_option("--amp", c->amp, "Autocast to this type")->check(CLI::IsMember({"none", "bf16", "fp16"}))->capture_default_str();
  detection->add_flag("--contiguous", c->contiguous, "Images and weights in NCHW order (default: channels_last)");
  detection->add_option("--threads", c->threads, kThreadsHelp)->transform(whole_number(1, 4096));
  detection->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table")
      ->transform(file_name());
  detection->footer(
      "\nAs `satchel bench images`: gradients at 32 bits are checked first; then steps on noise with boxes anywhere in it, one method\n"
      "after the other, each alone on the device. fp32 is torch's own functions and saves, the losses as torchvision writes them.\n"
      "saved: without the losses, whose bytes are in the JSON.\n"
      "\nExamples:\n  satchel bench detection --device cuda --tf32 --batch 16 --image 640 --json detection.json\n"
      "  satchel bench detection --frozen-norm --trainable 3 --width 8 --image 64 --batch 2 --steps 3");
  detection->callback([c] { run_bench_detection(*c); });
}

}  // namespace satchel::tool
