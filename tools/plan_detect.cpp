#include "tools/plan_detect.h"

#include <fmt/format.h>

#include <CLI/App.hpp>

#include "tools/arguments.h"
#include "tools/plan_image.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

std::vector<Method> detect_methods(const DetectPlanOptions& o) {
  return o.methods.empty() ? parse_methods("fp32,actnn,division,satchel") : o.methods;
}

/// Of the maps, and of Faster R-CNN's boxes after them.
struct DetectPlan {
  std::vector<SavedTensor> maps, regions;
  int64_t bytes() const { return total_bytes(maps) + total_bytes(regions); }
};

DetectPlan plan_of(const DetectPlanOptions& o, const Method& method) {
  DetectPlan plan{plan_detector(o.shape, o.batch, method), {}};
  if (has_regions(o.shape.name)) plan.regions = plan_regions(o.shape, o.boxes * o.batch.images, method, o.batch.half);
  return plan;
}

std::string mib(int64_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / (1 << 20)); }

std::string lines_text(const std::vector<SavedTensor>& lines) {
  std::string text;
  for (const SavedTensor& s : lines) {
    std::string shape;
    for (const int64_t size : s.shape) shape += (shape.empty() ? "" : " × ") + grouped(size);
    text += fmt::format("  {:<44} {:<11} {:>26} {:>4} {:>16} {:>12}\n", s.name, s.kind, shape, s.bits, grouped(s.bytes), mib(s.fp32_bytes));
  }
  return text;
}

}  // namespace

std::vector<CLI::Option*> add_detect_plan_options(CLI::App& plan, DetectPlanOptions& o) {
  return {plan.add_flag("--frozen-norm", o.shape.frozen_norm, "Norms of the ResNet are constants"),
          plan.add_option("--trainable", o.shape.trainable, "Stages of the ResNet that are trained, from the last one back")
              ->transform(whole_number(0, 5))
              ->capture_default_str(),
          add_count(plan, "--boxes", o.boxes, "fasterrcnn_resnet50_fpn: boxes of an image in its second half")->capture_default_str()};
}

std::string detect_plan_text(const DetectPlanOptions& o) {
  const DetectorShape& s = o.shape;
  std::string text = fmt::format(
      "{}, width {}, {} classes{}; batch {} of {} × {} × {}{}\n", s.name, s.width, grouped(s.classes),
      s.frozen_norm || s.trainable < 5 ? fmt::format(", {}{} stages trained", s.frozen_norm ? "frozen norms, " : "", s.trainable) : "",
      o.batch.images, s.channels, o.batch.height, o.batch.width, o.batch.half ? ", autocast to 16 bits" : "");
  const std::vector<Method> methods = detect_methods(o);
  if (methods.size() == 1) {
    const DetectPlan plan = plan_of(o, methods[0]);
    text += fmt::format("\n{}\n  {:<44} {:<11} {:>26} {:>4} {:>16} {:>12}\n", methods[0].name, "layer", "kind", "shape", "bits", "bytes",
                        "float32 MiB") +
            lines_text(plan.maps) + lines_text(plan.regions);
  }
  const bool regions = has_regions(s.name);
  const int64_t fp32 = plan_of(o, parse_method("fp32")).bytes();
  text += fmt::format("\n{:<28} {:>12} {:>8}{}\n", "MiB", "saved", "smaller", regions ? fmt::format(" {:>12}", "of it boxes") : "");
  for (const Method& m : methods) {
    const DetectPlan plan = plan_of(o, m);
    text +=
        fmt::format("{:<28} {:>12} {:>7.1f}x{}\n", m.name, mib(plan.bytes()), static_cast<double>(fp32) / static_cast<double>(plan.bytes()),
                    regions ? fmt::format(" {:>12}", mib(total_bytes(plan.regions))) : "");
  }
  text += "\nsaved  kept from forward to backward, without the losses: codes, headers, masks, statistics\n";
  if (regions)
    text += fmt::format("boxes  {} an image (--boxes): proposals that are trained on, at most {}; fewer where an image has fewer\n",
                        o.boxes, kRegions);
  return text;
}

ordered_json detect_plan_json(const DetectPlanOptions& o) {
  const DetectorShape& s = o.shape;
  ordered_json json = {{"model",
                        {{"name", s.name},
                         {"classes", s.classes},
                         {"channels", s.channels},
                         {"width", s.width},
                         {"frozen_norm", s.frozen_norm},
                         {"trainable", s.trainable},
                         {"height", o.batch.height},
                         {"image_width", o.batch.width}}},
                       {"batch", o.batch.images}};
  const int64_t fp32 = plan_of(o, parse_method("fp32")).bytes();
  json["fp32_saved_bytes"] = fp32;
  if (has_regions(s.name)) json["boxes"] = o.boxes;
  for (const Method& m : detect_methods(o)) {
    const DetectPlan plan = plan_of(o, m);
    ordered_json line = {{"method", m.name},
                         {"saved_bytes", plan.bytes()},
                         {"times_smaller", static_cast<double>(fp32) / static_cast<double>(plan.bytes())},
                         {"tensors", tensors_json(plan.maps)}};
    if (has_regions(s.name)) line["box_tensors"] = tensors_json(plan.regions);
    json["methods"].push_back(line);
  }
  return json;
}

}  // namespace satchel::tool
