#include "satchel/autograd/step.h"

namespace satchel {

StepContext& step_context() {
  thread_local StepContext context;
  return context;
}

}  // namespace satchel
