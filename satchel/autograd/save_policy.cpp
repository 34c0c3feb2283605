#include "satchel/autograd/save_policy.h"

#include <cmath>

#include "satchel/core/error.h"

namespace satchel {

const Method& default_method() {
  static const Method method = parse_method("satchel");
  return method;
}

void check_dropout(double p, const char* op) {
  if (!(p >= 0) || std::round(p * 65536) >= 65536) fail(op, "dropout must be at least 0 and less than 1", p);
}

double dropout_scale(double p) { return 65536 / (65536 - std::round(p * 65536)); }

}  // namespace satchel
