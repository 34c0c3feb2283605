#include "tools/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "satchel/core/graph_layer.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr const char* kNorms[] = {"none", "batch", "layer"};
constexpr const char* kActivations[] = {"none", "relu", "leaky_relu", "elu"};

/// 16,479.82.
std::string mib(double value) {
  const std::string text = fmt::format("{:.2f}", value);
  const size_t point = text.find('.');
  return grouped(std::stoll(text.substr(0, point))) + text.substr(point);
}
std::string mib(int64_t bytes) { return mib(static_cast<double>(bytes) / (1 << 20)); }

/// With the digits it was printed with: two, or none.
std::string published_mib(double value) { return value == std::floor(value) ? grouped(std::llround(value)) : mib(value); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " × ") + grouped(size);
  return text;
}

/// No bytes at all are no times smaller.
std::optional<double> times_smaller(int64_t fp32_bytes, int64_t bytes) {
  if (bytes == 0) return std::nullopt;
  return static_cast<double>(fp32_bytes) / static_cast<double>(bytes);
}

std::string times_text(int64_t fp32_bytes, int64_t bytes) {
  const std::optional<double> times = times_smaller(fp32_bytes, bytes);
  return times ? fmt::format("{:.1f}x", *times) : "-";
}

ordered_json times_json(int64_t fp32_bytes, int64_t bytes) {
  const std::optional<double> times = times_smaller(fp32_bytes, bytes);
  return times ? ordered_json(*times) : ordered_json(nullptr);
}

int64_t with_loss(const MethodPlan& plan) { return total_bytes(plan.saved) + total_bytes(plan.loss); }

std::string model_text(const GraphShape& s, int64_t nodes, int64_t training_nodes, bool sparse) {
  const std::string norm = s.norm == Norm::none ? "no norm" : fmt::format("{} norm", kNorms[static_cast<int>(s.norm)]);
  const std::string act = s.activation == Activation::none ? "no activation" : kActivations[static_cast<int>(s.activation)];
  return fmt::format("{} of {} layer{}, {} hidden, {}, {}, dropout {}\n{} nodes ({} to train on), {}{} features, {} classes\n",
                     graph_layer(s.conv, "plan").title, s.layers, s.layers == 1 ? "" : "s", grouped(s.hidden), norm, act, s.dropout,
                     grouped(nodes), grouped(training_nodes), grouped(s.features), sparse ? " sparse" : "", grouped(s.classes));
}

/// The table of one method; its first column is as wide as the names are.
class MethodTable {
 public:
  MethodTable(const MethodPlan& plan, const MethodPlan& fp32) : plan_(plan), fp32_(fp32) {
    for (const SavedTensor& s : plan.saved) width_ = std::max(width_, s.name.size());
  }

  std::string text() const {
    std::string text = fmt::format("\n{}\n  {:<{}} {:<11} {:>20} {:>4} {:>16} {:>12} {:>12}\n", plan_.method, "layer", width_, "kind",
                                   "shape", "bits", "bytes", "MiB", "float32 MiB");
    for (const SavedTensor& s : plan_.saved) text += line(s);
    text += total("saved", total_bytes(plan_.saved), total_bytes(fp32_.saved));
    for (const SavedTensor& s : plan_.loss) text += line(s);
    return text + total("saved, and the loss's tensors", with_loss(plan_), with_loss(fp32_));
  }

 private:
  std::string line(const SavedTensor& s) const {
    return fmt::format("  {:<{}} {:<11} {:>20} {:>4} {:>16} {:>12} {:>12}\n", s.name, width_, s.kind, shape_text(s.shape), s.bits,
                       grouped(s.bytes), mib(s.bytes), mib(s.fp32_bytes));
  }

  std::string total(const char* what, int64_t bytes, int64_t fp32_bytes) const {
    return fmt::format("  {:<{}} {:>16} {:>12} {:>12}   {:>7} smaller than fp32's {} MiB\n", what, width_ + 38, grouped(bytes), mib(bytes),
                       "", times_text(fp32_bytes, bytes), mib(fp32_bytes));
  }

  const MethodPlan &plan_, &fp32_;
  size_t width_ = 10;
};

std::string comparison_text(const ModelPlan& plan) {
  std::string text = fmt::format("\n{:<36} {:>12} {:>9} {:>14} {:>9}\n", "method", "saved MiB", "smaller", "with loss MiB", "smaller");
  for (const MethodPlan& p : plan.methods) {
    text += fmt::format("{:<36} {:>12} {:>9} {:>14} {:>9}\n", p.method, mib(total_bytes(p.saved)),
                        times_text(total_bytes(plan.fp32.saved), total_bytes(p.saved)), mib(with_loss(p)),
                        times_text(with_loss(plan.fp32), with_loss(p)));
  }
  return text;
}

ordered_json model_json(const GraphShape& s, int64_t nodes, int64_t training_nodes, bool sparse) {
  return {{"conv", s.conv},
          {"layers", s.layers},
          {"features", s.features},
          {"hidden", s.hidden},
          {"classes", s.classes},
          {"norm", kNorms[static_cast<int>(s.norm)]},
          {"activation", kActivations[static_cast<int>(s.activation)]},
          {"dropout", s.dropout},
          {"nodes", nodes},
          {"training_nodes", training_nodes},
          {"sparse_features", sparse}};
}

/// The parts of a published row, by what they are.
struct Part {
  const char* name;
  std::array<const char*, 2> kinds;
};
constexpr std::array<Part, 7> kParts = {{{"features", {"input", "aggregate"}},
                                         {"norms", {"norm", ""}},
                                         {"activations", {"activation", ""}},
                                         {"masks", {"mask", "dropout"}},
                                         {"metadata", {"metadata", ""}},
                                         {"labels", {"labels", ""}},
                                         {"projections", {"projection", ""}}}};

int64_t bytes_of(const Part& part, const std::vector<SavedTensor>& lines) {
  int64_t bytes = 0;
  for (const SavedTensor& s : lines) bytes += s.kind == part.kinds[0] || s.kind == part.kinds[1] ? s.bytes : 0;
  return bytes;
}

int64_t own_bytes(const PublishedModel& model, const Method& method) { return total_bytes(plan_graph(model.shape, model.nodes, method)); }

}  // namespace

ModelPlan plan_model(const GraphShape& shape, int64_t nodes, int64_t training_nodes, bool sparse, const std::vector<Method>& methods) {
  const auto plan_of_method = [&](const Method& m) {
    return MethodPlan{m.name, plan_graph(shape, nodes, m, sparse), plan_loss(shape, nodes, training_nodes, m)};
  };
  ModelPlan plan{shape, nodes, training_nodes, sparse, plan_of_method(parse_method("fp32")), {}};
  for (const Method& m : methods) plan.methods.push_back(plan_of_method(m));
  return plan;
}

std::string plan_text(const ModelPlan& plan) {
  std::string text = model_text(plan.shape, plan.nodes, plan.training_nodes, plan.sparse);
  for (const MethodPlan& p : plan.methods) text += MethodTable(p, plan.fp32).text();
  return plan.methods.size() > 1 ? text + comparison_text(plan) : text;
}

ordered_json plan_json(const ModelPlan& plan) {
  ordered_json methods = ordered_json::array();
  for (const MethodPlan& p : plan.methods) {
    methods.push_back({{"method", p.method},
                       {"saved_bytes", total_bytes(p.saved)},
                       {"loss_bytes", total_bytes(p.loss)},
                       {"times_smaller", times_json(total_bytes(plan.fp32.saved), total_bytes(p.saved))},
                       {"times_smaller_with_loss", times_json(with_loss(plan.fp32), with_loss(p))},
                       {"tensors", tensors_json(p.saved)},
                       {"loss", tensors_json(p.loss)}});
  }
  return {{"model", model_json(plan.shape, plan.nodes, plan.training_nodes, plan.sparse)},
          {"fp32_saved_bytes", total_bytes(plan.fp32.saved)},
          {"fp32_loss_bytes", total_bytes(plan.fp32.loss)},
          {"methods", methods}};
}

std::string published_text(const std::string& table, const std::vector<Method>& methods) {
  const PublishedModel model = published_model(table);
  std::string text = fmt::format("ogbn-{}: {}", table, model_text(model.shape, model.nodes, model.training_nodes, false));
  text += fmt::format("\n{:<8} {:>10} {:>10}", "MiB", "published", "model");
  for (const Part& part : kParts) text += fmt::format(" {:>11}", part.name);
  text += fmt::format(" {:>10}  {}\n", "Satchel", "as method");
  for (const PublishedRow& row : published_table(table)) {
    text += fmt::format("{:<8} {:>10} {:>10}", row.name, published_mib(row.published_mib), mib(total_bytes(row.parts)));
    for (const Part& part : kParts) text += fmt::format(" {:>11}", mib(bytes_of(part, row.parts)));
    text += fmt::format(" {:>10}  {}\n", mib(own_bytes(model, parse_method(row.method))), row.method);
  }
  for (const Method& m : methods) {
    text += fmt::format("{:<114} {:>10}  {}\n", "", mib(own_bytes(model, m)), m.name);
  }
  return text +
         "\nmodel    what the papers' programs keep (docs/theory.md, section 11), part by part; the loss's tensors are in none of the "
         "columns\n"
         "Satchel  what this library keeps for the same method: headers padded, statistics and seeds in, no labels, no projections\n";
}

ordered_json published_json(const std::string& table, const std::vector<Method>& methods) {
  const PublishedModel model = published_model(table);
  ordered_json rows = ordered_json::array(), own = ordered_json::array();
  for (const PublishedRow& row : published_table(table)) {
    ordered_json parts;
    for (const Part& part : kParts) parts[part.name] = bytes_of(part, row.parts);
    rows.push_back({{"name", row.name},
                    {"published_mib", row.published_mib},
                    {"model_bytes", total_bytes(row.parts)},
                    {"parts", parts},
                    {"tensors", tensors_json(row.parts)},
                    {"method", row.method},
                    {"own_bytes", own_bytes(model, parse_method(row.method))}});
  }
  for (const Method& m : methods) own.push_back({{"method", m.name}, {"own_bytes", own_bytes(model, m)}});
  return {{"table", table}, {"model", model_json(model.shape, model.nodes, model.training_nodes, false)}, {"rows", rows}, {"methods", own}};
}

}  // namespace satchel::tool
