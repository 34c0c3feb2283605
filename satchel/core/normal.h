// The normal distribution, and the clipped one that models a block's normalised values (docs/theory.md 2).
#pragma once

namespace satchel {

/// Density and distribution function of the standard normal, and the inverse of the latter for 0 < p < 1.
double phi(double x);
double Phi(double x);
double inverse_Phi(double p);

struct Normal {
  double mu, sigma;
};

/// The normal on [0, top] of which 1/block lies outside at either end, and is moved there: the block's own minimum and maximum.
/// block > 2.
Normal clipped_normal(double top, double block);

}  // namespace satchel
