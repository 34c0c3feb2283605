#include "tools/plan_image.h"

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <array>
#include <cmath>

#include "satchel/plan/published_images.h"
#include "tools/arguments.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr const char* kOp = "plan";
constexpr double kGiB = 1 << 30;

/// What lines are added up to.
struct Part {
  const char* name;
  std::array<const char*, 4> kinds;
};
constexpr std::array<Part, 7> kParts = {{{"inputs", {"input"}},
                                         {"norms", {"norm"}},
                                         {"shared", {"shared", "extra bit"}},
                                         {"activations", {"activation"}},
                                         {"masks", {"mask", "dropout"}},
                                         {"pools", {"indices", "offsets"}},
                                         {"other", {"statistics", "affine", "seed", "weight"}}}};
constexpr std::array<Part, 8> kPublishedParts = {{{"inputs", {"input"}},
                                                  {"norms", {"norm"}},
                                                  {"activations", {"activation"}},
                                                  {"masks", {"mask"}},
                                                  {"pools", {"indices"}},
                                                  {"means", {"means"}},
                                                  {"metadata", {"metadata"}},
                                                  {"images", {"images"}}}};

int64_t bytes_of(const Part& part, const std::vector<SavedTensor>& lines) {
  int64_t bytes = 0;
  for (const SavedTensor& s : lines) {
    for (const char* kind : part.kinds) bytes += kind != nullptr && s.kind == kind ? s.bytes : 0;
  }
  return bytes;
}

template <size_t count>
ordered_json parts_json(const std::array<Part, count>& parts, const std::vector<SavedTensor>& lines) {
  ordered_json json;
  for (const Part& part : parts) json[part.name] = bytes_of(part, lines);
  return json;
}

std::string gib(int64_t bytes, int digits = 2) { return fmt::format("{:.{}f}", static_cast<double>(bytes) / kGiB, digits); }
double ratio(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

bool is_half(const ImagePlanOptions& o) { return o.amp != "none"; }
BatchShape batch_of(const ImagePlanOptions& o) { return {o.batch, o.image, o.image, is_half(o)}; }
int64_t largest_of(const ImagePlanOptions& o, const Method& method, int64_t budget) {
  return largest_batch(o.shape, o.image, o.image, method, budget, is_half(o));
}
ImageMemory memory_in(const ImagePlanOptions& o, int64_t batch, const Method& method, int64_t budget) {
  return memory_of(o.shape, {batch, o.image, o.image, is_half(o)}, method, budget);
}

std::vector<Method> methods_of(const ImagePlanOptions& o) {
  return o.methods.empty() ? parse_methods("fp32,actnn,division,satchel") : o.methods;
}

bool is_published(const ImagePlanOptions& o) { return o.shape == published_image_model() && batch_of(o) == BatchShape{}; }

std::string model_text(const ImagePlanOptions& o) {
  const ImageShape& s = o.shape;
  const double dropout = dropout_of(s);
  return fmt::format("{}{}, width {}, {} classes{}; images of {} × {} × {}{}\n", s.name, s.small_stem ? " with a small stem" : "", s.width,
                     grouped(s.classes), dropout > 0 ? fmt::format(", dropout {}", dropout) : "", s.channels, o.image, o.image,
                     is_half(o) ? ", autocast to " + o.amp : "");
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " × ") + grouped(size);
  return text;
}

std::string layers_text(const Method& method, const std::vector<SavedTensor>& lines) {
  std::string text = fmt::format("\n{}\n  {:<40} {:<11} {:>26} {:>4} {:>16} {:>12}\n", method.name, "layer", "kind", "shape", "bits",
                                 "bytes", "float32 MiB");
  for (const SavedTensor& s : lines) {
    text += fmt::format("  {:<40} {:<11} {:>26} {:>4} {:>16} {:>12.2f}\n", s.name, s.kind, shape_text(s.shape), s.bits, grouped(s.bytes),
                        static_cast<double>(s.fp32_bytes) / (1 << 20));
  }
  return text;
}

std::string comparison_text(const ImagePlanOptions& o) {
  const int64_t fp32 = total_bytes(plan_image(o.shape, batch_of(o), parse_method("fp32")));
  std::string text = fmt::format("\n{:<28} {:>9} {:>8}", "GiB", "saved", "smaller");
  for (const Part& part : kParts) text += fmt::format(" {:>11}", part.name);
  text += fmt::format(" {:>9}\n", "step");
  for (const Method& method : methods_of(o)) {
    const std::vector<SavedTensor> lines = plan_image(o.shape, batch_of(o), method);
    text += fmt::format("{:<28} {:>9} {:>7.1f}x", method.name, gib(total_bytes(lines)), ratio(fp32, total_bytes(lines)));
    for (const Part& part : kParts) text += fmt::format(" {:>11}", gib(bytes_of(part, lines), 3));
    text += fmt::format(" {:>9}\n", gib(memory_of(o.shape, batch_of(o), method).peak));
  }
  return text + "\nsaved  kept from forward to backward: codes, headers, masks, statistics\n";
}

constexpr const char* kStepText =
    "step   the most that a training step's tensors take at once on a GPU: weights, gradients and momentum, the batch, saves, the maps\n"
    "       between layers or their gradients, decoded values; not cuDNN's workspaces\n";
constexpr const char* kFitText =
    "lost   free in pieces between tensors that torch's caching allocator can not use; step and lost are within the budget\n"
    "An estimate for CUDA, steps gone through tensor by tensor: `satchel bench batch` finds the largest batch by trying.\n";

std::string published_text(const ImagePlanOptions& o) {
  std::string text = fmt::format("\n{:<10} {:>9} {:>7} {:>7}", "GiB", "published", "model", "");
  for (const Part& part : kPublishedParts) text += fmt::format(" {:>11}", part.name);
  text += fmt::format(" {:>8}  {}\n", "Satchel", "as method");
  for (const PublishedImageRow& row : published_images()) {
    const int64_t bytes = total_bytes(row.parts);
    const double off = static_cast<double>(bytes) / kGiB / row.published_gib - 1;
    text += fmt::format("{:<10} {:>9.2f} {:>7} {:>+6.1f}%", row.name, row.published_gib, gib(bytes), 100 * off);
    for (const Part& part : kPublishedParts) text += fmt::format(" {:>11}", gib(bytes_of(part, row.parts), 3));
    text += fmt::format(" {:>8}  {}\n", gib(total_bytes(plan_image(o.shape, batch_of(o), parse_method(row.method)))), row.method);
  }
  return text +
         "\npublished  in the DIVISION paper's table\n"
         "model      what the papers' programs keep: codes of each convolution's input and of norm inputs, their metadata, a bit a ReLU, "
         "int8\n"
         "           indices, the batch. FP32: unique inputs, norm inputs, results of ReLUs that no convolution reads, int64 indices\n"
         "Satchel    what this library keeps for the same method: a map that two convolutions read once, offsets of 4 bits, statistics\n";
}

std::string fit_text(const ImagePlanOptions& o, int64_t budget) {
  const int64_t fp32 = largest_of(o, parse_method("fp32"), budget);
  constexpr const char* kRow = "{:<28} {:>13} {:>8} {:>10} {:>9} {:>11} {:>10} {:>10} {:>10}\n";
  std::string text = "\n" + fmt::format(fmt::runtime(kRow), "in " + grouped(budget) + " bytes", "largest batch", "of fp32", "saved GiB",
                                        "on host", "weights GiB", "batch GiB", "step GiB", "lost GiB");
  bool capped = false;
  for (const Method& method : methods_of(o)) {
    const int64_t batch = largest_of(o, method, budget);
    if (batch == 0) {
      text += fmt::format(fmt::runtime(kRow), method.name, "none fits", "-", "-", "-", "-", "-", "-", "-");
      continue;
    }
    const ImageMemory m = memory_in(o, batch, method, budget);
    capped |= batch == kMostBatch;
    text += fmt::format(fmt::runtime(kRow), method.name, grouped(batch) + (batch == kMostBatch ? "+" : ""),
                        fp32 == 0 ? "-" : fmt::format("{:.1f}x", ratio(batch, fp32)), gib(m.saved), gib(m.offloaded), gib(m.parameters),
                        gib(m.images), gib(m.peak), gib(m.reserved - m.peak));
  }
  return text + (capped ? "\n+      a plan ends at " + grouped(kMostBatch) + " images: more would fit\n" : "") + "\n" + kStepText +
         kFitText;
}

ordered_json memory_json(const ImageMemory& m) {
  return {{"saved_bytes", m.saved},  {"host_bytes", m.offloaded}, {"parameter_bytes", m.parameters},
          {"image_bytes", m.images}, {"step_bytes", m.peak},      {"reserved_bytes", m.reserved}};
}

ordered_json published_json(const ImagePlanOptions& o) {
  ordered_json rows = ordered_json::array();
  for (const PublishedImageRow& row : published_images()) {
    rows.push_back({{"name", row.name},
                    {"published_gib", row.published_gib},
                    {"model_bytes", total_bytes(row.parts)},
                    {"parts", parts_json(kPublishedParts, row.parts)},
                    {"method", row.method},
                    {"own_bytes", total_bytes(plan_image(o.shape, batch_of(o), parse_method(row.method)))}});
  }
  return rows;
}

ordered_json method_json(const ImagePlanOptions& o, const Method& method, int64_t fp32) {
  const std::vector<SavedTensor> lines = plan_image(o.shape, batch_of(o), method);
  return {{"method", method.name},
          {"saved_bytes", total_bytes(lines)},
          {"times_smaller", ratio(fp32, total_bytes(lines))},
          {"parts", parts_json(kParts, lines)},
          {"memory", memory_json(memory_of(o.shape, batch_of(o), method))},
          {"tensors", tensors_json(lines)}};
}

ordered_json fit_json(const ImagePlanOptions& o, int64_t budget) {
  ordered_json methods = ordered_json::array();
  for (const Method& method : methods_of(o)) {
    const int64_t batch = largest_of(o, method, budget);
    ordered_json line = {{"method", method.name}, {"largest_batch", batch}, {"capped", batch == kMostBatch}};
    if (batch > 0) line["memory"] = memory_json(memory_in(o, batch, method, budget));
    methods.push_back(line);
  }
  return methods;
}

ordered_json model_json(const ImagePlanOptions& o) {
  const ImageShape& s = o.shape;
  return {{"name", s.name},   {"classes", s.classes}, {"channels", s.channels},         {"small_stem", s.small_stem},
          {"width", s.width}, {"image", o.image},     {"dropout", dropout_of(o.shape)}, {"amp", o.amp}};
}

}  // namespace

CLI::Option* add_count(CLI::App& app, const std::string& name, int64_t& to, const std::string& help) {
  return app.add_option(name, to, help)->transform(any_whole_number())->type_name("N");
}

std::vector<CLI::Option*> add_image_plan_options(CLI::App& plan, ImagePlanOptions& o) {
  CLI::Option* small =
      plan.add_flag("--small-stem", o.small_stem, "First convolution 3×3 of stride 1, no pool (default: for images up to 64 pixels)");
  return {add_count(plan, "--batch", o.batch, "Images a step")->capture_default_str(),
          add_count(plan, "--image", o.image, "Side of an image")->capture_default_str(),
          add_count(plan, "--channels", o.shape.channels, "Channels of an image")->capture_default_str(),
          add_count(plan, "--width", o.shape.width, "Channels of the first stage")->capture_default_str(),
          small,
          plan.add_flag("--large-stem", o.large_stem, "First convolution 7×7 of stride 2, then a pool")->excludes(small),
          plan.add_flag("--no-aux", o.no_aux, "Segmentation: without the auxiliary head"),
          plan.add_option("--amp", o.amp, "Autocast to this type")->check(CLI::IsMember({"none", "bf16", "fp16"}))->capture_default_str(),
          plan.add_option("--fit", o.fit, "The largest batch in so much GPU memory, instead of --batch")
              ->transform(
                  CLI::Validator([](std::string& text) { return text.empty() ? "must be a size as in 16GB, got ''" : std::string(); }, ""))
              ->type_name("16GB")};
}

std::string image_plan_text(const ImagePlanOptions& o) {
  const std::string text = model_text(o);
  if (!o.fit.empty()) return text + fit_text(o, parse_bytes(o.fit, kOp));
  const std::vector<Method> methods = methods_of(o);
  std::string layers;
  if (methods.size() == 1) layers = layers_text(methods[0], plan_image(o.shape, batch_of(o), methods[0]));
  return text + fmt::format("batch {}\n", grouped(o.batch)) + layers + comparison_text(o) + kStepText +
         (is_published(o) ? published_text(o) : "");
}

ordered_json image_plan_json(const ImagePlanOptions& o) {
  ordered_json json = {{"model", model_json(o)}};
  if (!o.fit.empty()) {
    const int64_t budget = parse_bytes(o.fit, kOp);
    json["budget_bytes"] = budget;
    json["methods"] = fit_json(o, budget);
    return json;
  }
  const int64_t fp32 = total_bytes(plan_image(o.shape, batch_of(o), parse_method("fp32")));
  json["batch"] = o.batch;
  json["fp32_saved_bytes"] = fp32;
  for (const Method& method : methods_of(o)) json["methods"].push_back(method_json(o, method, fp32));
  if (is_published(o)) json["published"] = published_json(o);
  return json;
}

}  // namespace satchel::tool
