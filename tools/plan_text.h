// Plans as tables for people and as JSON for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "satchel/plan/graph_plan.h"

namespace satchel::tool {

/// What one method keeps of a model.
struct MethodPlan {
  std::string method;
  std::vector<SavedTensor> saved, loss;
};

/// Plans of one model. `fp32` is what the others are compared with.
struct ModelPlan {
  GraphShape shape;
  int64_t nodes = 0, training_nodes = 0;
  bool sparse = false;
  MethodPlan fp32;
  std::vector<MethodPlan> methods;
};
ModelPlan plan_model(const GraphShape& shape, int64_t nodes, int64_t training_nodes, bool sparse, const std::vector<Method>& methods);

/// A table a method; with several a comparison last.
std::string plan_text(const ModelPlan& plan);
nlohmann::ordered_json plan_json(const ModelPlan& plan);

/// A published table, docs/theory.md 11's byte model and its parts, and Satchel's own layout; then the own layout of `methods`.
std::string published_text(const std::string& table, const std::vector<Method>& methods);
nlohmann::ordered_json published_json(const std::string& table, const std::vector<Method>& methods);

}  // namespace satchel::tool
