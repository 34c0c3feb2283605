// The words for what a run is made of, as commands and checkpoints spell them.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/layer.h"
#include "satchel/data/graph_data.h"
#include "satchel/train/train.h"

namespace satchel {

template <class Enum>
struct Names;
template <>
struct Names<Norm> {
  static constexpr const char* what = "norm";
  static constexpr std::array all{std::pair{"batch", Norm::batch}, std::pair{"layer", Norm::layer}, std::pair{"none", Norm::none}};
};
template <>
struct Names<Activation> {
  static constexpr const char* what = "activation";
  static constexpr std::array all{std::pair{"relu", Activation::relu}, std::pair{"leaky_relu", Activation::leaky_relu},
                                  std::pair{"elu", Activation::elu}, std::pair{"none", Activation::none}};
};
template <>
struct Names<Amp> {
  static constexpr const char* what = "amp";
  static constexpr std::array all{std::pair{"auto", Amp::automatic}, std::pair{"none", Amp::none}, std::pair{"bf16", Amp::bf16},
                                  std::pair{"fp16", Amp::fp16}};
};
template <>
struct Names<Optimizer> {
  static constexpr const char* what = "optimizer";
  static constexpr std::array all{std::pair{"adam", Optimizer::adam}, std::pair{"adamw", Optimizer::adamw},
                                  std::pair{"sgd", Optimizer::sgd}};
};
template <>
struct Names<LastLayer> {
  static constexpr const char* what = "last_layer";
  static constexpr std::array all{std::pair{"all", LastLayer::all}, std::pair{"training", LastLayer::training}};
};
template <>
struct Names<Task> {
  static constexpr const char* what = "task";
  static constexpr std::array all{std::pair{"single_label", Task::single_label}, std::pair{"multi_label", Task::multi_label},
                                  std::pair{"binary", Task::binary}};
};

template <class Enum>
std::string name_of(Enum value) {
  for (const auto& [name, known] : Names<Enum>::all) {
    if (known == value) return name;
  }
  std::string rule = Names<Enum>::what;
  rule += " must be a known one";
  fail("train", rule, static_cast<int>(value));
}

/// Throws `[op] what must be a, b or c, got text`.
template <class Enum>
Enum from_name(std::string_view text, const char* op) {
  std::string rule = Names<Enum>::what;
  rule += " must be";
  for (const auto& [name, value] : Names<Enum>::all) {
    if (text == name) return value;
    rule += &value == &Names<Enum>::all.front().second ? " " : ", ";
    rule += name;
  }
  std::string given = "'";
  given += text;
  given += "'";
  fail(op, rule, given);
}

}  // namespace satchel
