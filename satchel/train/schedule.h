// Learning rates over a run: pure functions of the step, so that a run that goes on computes what it would have been.
#pragma once

#include <cstdint>
#include <vector>

namespace satchel {

enum class Decay : uint8_t { none, cosine, step, onecycle, poly };

/// Steps count from 0. As torch.optim.lr_scheduler's, stepped once a batch:
///   none      lr
///   cosine    CosineAnnealingLR: lr·(1 + cos(π·t))/2, t from 0 to 1 over the steps after the warm-up
///   step      MultiStepLR: lr·gamma^k after k milestones
///   poly      PolynomialLR of power 0.9: lr·(1 − t)^0.9, t as for cosine (segmentation)
///   onecycle  OneCycleLR with its defaults: from lr/25 up to lr in the first 0.3 of all steps, down to lr/250000 at the last one, by half
///             cosines; momentum goes from 0.95 down to 0.85 and back. Takes no warm-up
struct Schedule {
  Decay decay = Decay::cosine;
  double lr = 0.1;                    // the highest
  double momentum = 0.9;              // onecycle has its own
  int64_t steps = 1;                  // of the whole run
  int64_t warmup = 0;                 // steps in which it rises from lr/warmup to lr
  std::vector<int64_t> milestones{};  // step: rising
  double gamma = 0.1;                 // step
};

struct Rates {
  double lr = 0, momentum = 0;
};

/// Throws `[train] rule, got value`.
void validate(const Schedule& schedule);

/// What step `step` moves with; after the last step the last step's rates.
Rates rates_at(const Schedule& schedule, int64_t step);

}  // namespace satchel
