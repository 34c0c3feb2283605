// `satchel bench images`: a whole training step of an image model, method by method; and one such measurement for `bench batch`.
#pragma once

#include <c10/util/Exception.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "satchel/train/image_train.h"
#include "satchel/train/step.h"

namespace satchel::tool {

/// What is measured: a model on generated images.
struct ImageBenchSetting {
  ImageTrainOptions options;  // model, width, dropout, stem, device, tf32, amp, channels_last
  int64_t image = 224, channels = 3, classes = 1000;
  bool tries = true;  // as ConvolutionOptions has it
};

struct ImageBenchResult {
  std::string method;
  int64_t batch = 0;
  bool fits = true;   // else memory ran out
  std::string error;  // why else it did not run: a loss that is not finite
  StepCost cost;
  int64_t parameter_bytes = 0, batch_bytes = 0;
  double loss = 0;              // of the last step
  std::vector<double> seconds;  // of a step

  /// Else nothing of the above was measured.
  bool ran() const { return fits && error.empty(); }
  double median() const;
  /// Weights, gradients, momentum, images, and the most that a step takes beside them.
  int64_t total_bytes() const { return 3 * parameter_bytes + batch_bytes + cost.peak_bytes; }
};

/// Three steps to warm up, the last of them watched, then `steps` timed ones, alone on the device; its memory is given back.
ImageBenchResult measure(const ImageBenchSetting& setting, const Method& method, int64_t batch, int64_t steps);

/// Did memory run out? cuDNN has words of its own for it.
bool ran_out(const c10::Error& e);
/// A table, beside fp32's where that is among them; and JSON.
void print_results(const std::vector<ImageBenchResult>& results);
nlohmann::ordered_json results_json(const std::vector<ImageBenchResult>& results);

/// What both benchmarks are told.
struct BenchImagesCommand {
  ImageBenchSetting setting;
  std::string methods = "fp32,actnn,division,satchel", amp = "none";
  bool small_stem = false, large_stem = false, contiguous = false, no_tries = false, no_aux = false;
  std::optional<int64_t> classes;
  int64_t batch = 256, steps = 30;
  int64_t threads = 0;
  std::string memory_cap;  // bytes, as parse_bytes() reads them; empty: none
  std::string json;
};

/// --model, --methods, --image, --amp, --tf32 … of both.
void add_image_bench_options(CLI::App& bench, BenchImagesCommand& command);
/// The setting with everything that was given; throws UsageError for what cannot be.
ImageBenchSetting checked_setting(const BenchImagesCommand& command);
/// Model, sizes, device, types: what results of one call have in common.
nlohmann::ordered_json setting_json(const ImageBenchSetting& setting, int64_t cap);

void add_bench_images(CLI::App& bench);
void run_bench_images(const BenchImagesCommand& command);

}  // namespace satchel::tool
