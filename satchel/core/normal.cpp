#include "satchel/core/normal.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace satchel {

double phi(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi); }
double Phi(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }

/// Φ(x) ≤ ½·exp(−x²/2) below 0, so the start lies left of the root of the concave ln Φ(x) − ln p, from where Newton rises to it without
/// overshooting.
double inverse_Phi(double p) {
  if (p > 0.5) return -inverse_Phi(1 - p);
  double x = -std::sqrt(std::max(0.0, -2 * std::log(2 * p)));
  for (int i = 0; i < 100; ++i) {
    const double mass = Phi(x), step = mass / phi(x) * std::log(p / mass);
    x += step;
    if (std::abs(step) < 1e-15 * (1 + std::abs(x))) break;
  }
  return x;
}

Normal clipped_normal(double top, double block) { return {top / 2, -top / 2 / inverse_Phi(1 / block)}; }

}  // namespace satchel
