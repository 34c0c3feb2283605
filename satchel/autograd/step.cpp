#include "satchel/autograd/step.h"

#include <utility>

namespace satchel {
namespace {

std::shared_ptr<StepContext>& current_context() {
  thread_local std::shared_ptr<StepContext> context = std::make_shared<StepContext>();
  return context;
}

}  // namespace

StepContext& step_context() { return *current_context(); }

StepScope::StepScope(std::shared_ptr<StepContext> context) : outer_(std::exchange(current_context(), std::move(context))) {}

StepScope::~StepScope() { current_context() = std::move(outer_); }

}  // namespace satchel
