#include "satchel/autograd/weight_casts.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "satchel/autograd/step.h"

namespace satchel {
namespace {

struct CastsInUse {
  const WeightCasts* casts = nullptr;
};

const WeightCasts*& in_use() { return step_context().part<CastsInUse>().casts; }

}  // namespace

WeightCasts::Use::Use(const WeightCasts& casts) : before_(std::exchange(in_use(), &casts)) {}
WeightCasts::Use::~Use() { in_use() = before_; }

void WeightCasts::reserve(const std::vector<at::Tensor>& weights, at::ScalarType type) {
  bool fits = weights.size() == weights_.size();
  for (size_t i = 0; fits && i < weights.size(); ++i)
    fits = weights_[i].is_same(weights[i]) && casts_[i].scalar_type() == type && casts_[i].device() == weights[i].device() &&
           casts_[i].sizes() == weights[i].sizes();
  if (fits) return;
  const at::NoGradGuard guard;
  std::vector<at::Tensor> casts;
  for (const at::Tensor& w : weights) casts.push_back(at::empty_like(w, w.options().dtype(type)));
  weights_ = weights;
  casts_ = std::move(casts);
}

void WeightCasts::update(const std::vector<at::Tensor>& weights, at::ScalarType type) {
  reserve(weights, type);
  const at::NoGradGuard guard;
  if (!weights.empty()) at::_foreach_copy_(casts_, weights);
}

int64_t WeightCasts::bytes() const {
  int64_t sum = 0;
  for (const at::Tensor& c : casts_) sum += static_cast<int64_t>(c.nbytes());
  return sum;
}

at::Tensor WeightCasts::of(const at::Tensor& weight, at::ScalarType type) const {
  for (size_t i = 0; i < weights_.size(); ++i)
    if (weights_[i].is_same(weight) && casts_[i].scalar_type() == type) return casts_[i];
  return {};
}

at::Tensor cast_weight(const at::Tensor& weight, at::ScalarType type) {
  const WeightCasts* casts = in_use();
  const at::Tensor found = casts != nullptr ? casts->of(weight, type) : at::Tensor();
  return found.defined() ? found : weight.detach().to(type);
}

SavedWeight::SavedWeight(const at::Tensor& weight, at::ScalarType type) : weight_(weight, /*is_output=*/false) {
  const bool hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
  if (const WeightCasts* casts = in_use(); casts != nullptr && !hooked) cast_ = casts->of(weight, type);
}

at::Tensor SavedWeight::unpack(at::ScalarType type) const {
  const at::Tensor weight = weight_.unpack();  // throws where it has changed, cast or not
  return cast_.defined() && cast_.scalar_type() == type ? cast_ : weight.detach().to(type);
}

void SavedWeight::reset_data() {
  weight_.reset_data();
  cast_.reset();
}

}  // namespace satchel
