#include "satchel/core/keep.h"

#include <algorithm>

namespace satchel {
namespace {

/// Gradients pass through a derivative, so it takes a bit more than a norm of few bits: 3 beside 2, which add a hundredth of the gradient's
/// square, where 2 bits of a layer's input add a quarter or more (docs/theory.md 8).
int derivative_bits(const Method& method) {
  if (method.derivative > 0) return method.derivative;
  return method.norm.bits == kKeep ? kKeep : std::max(method.norm.bits, std::clamp(method.norm.bits + 1, 3, 4));
}

/// Plain blocks in the order of memory.
CodecSpec derivative_spec(const Method& method) {
  CodecSpec spec;
  spec.bits = derivative_bits(method);
  spec.levels = Levels::even;  // derivatives spread over all of their range: levels for normal values have 1.4 times the variance
  spec.rounding = method.norm.rounding;
  spec.header = method.norm.header;
  return spec;
}

class Epilogue {
 public:
  Epilogue(const Method& method, const Site& site) : method_(method), site_(site) {}

  std::vector<Keep> make() {
    const bool relus = site_.activation == Activation::relu;
    if (!method_.shared || is_empty()) {
      by_function();
    } else if (site_.activation == Activation::elu || (site_.adds_skip && relus)) {
      add_norm();
      add_output(Kind::shared);
    } else if (!site_.next_reads && !relus) {
      by_function();
    } else if (site_.adds_skip) {
      add_norm();
    } else {
      add_shared();
    }
    add_dropout();
    return std::move(keeps_);
  }

 private:
  bool normed() const { return site_.norm != Norm::none; }
  bool is_empty() const { return !normed() && site_.activation == Activation::none; }

  /// Norm and activation each for itself.
  void by_function() {
    add_norm();
    if (site_.activation == Activation::elu) add_output(Kind::activation);
    if (site_.activation == Activation::relu || site_.activation == Activation::leaky_relu) add(Kind::mask);
  }

  /// What the norm's own gradient reads.
  void add_norm() {
    if (!normed()) return;
    const CodecSpec spec = norm_spec(method_, site_.width, site_.count);
    // A low-pass and full precision are of x itself, and so are the rows of EXACT and block-wise, the methods that keep A·x.
    const bool normalises = method_.shared || (site_.image ? codes_normalised(spec) : codes_normalised_rows(method_));
    Keep keep{Kind::norm, spec, normalises ? Of::normalised : Of::input};
    keep.per_sample_bits = method_.adaptive && site_.image && !method_.shared;
    keep.offload = method_.swap && keep.per_sample_bits;
    keeps_.push_back(keep);
    add_statistics(normalises ? 1 : 2);
  }

  /// One code for norm, activation and the next layer.
  void add_shared() {
    const CodecSpec spec = shared_spec(method_, site_.norm, site_.activation, site_.width, site_.count);
    add_code({Kind::shared, spec, normed() ? Of::normalised : site_.activation == Activation::relu ? Of::output : Of::input});
    if (spec.side == Side::none && normed()) add(Kind::affine);
    if (normed()) add_statistics(1);
  }

  /// The result of a ReLU or an ELU, which tells which values are on.
  void add_output(Kind kind) {
    CodecSpec spec = shared_spec(method_, Norm::none, site_.activation, site_.width, 0);
    if (site_.activation == Activation::elu) {  // in straight blocks: an image's rows are no samples, and nothing is filtered
      if (site_.image) spec.per_sample = false;
      if (std::holds_alternative<LowPass>(spec.transform)) {
        spec.transform = Identity{};
        spec.block = CodecSpec{}.block;
      }
    }
    add_code({kind, spec, Of::output});
  }

  /// … with a mask beside it where the code itself does not tell.
  void add_code(Keep keep) {
    const bool sides = keep.spec.side == Side::one_sided || keep.spec.side == Side::relu;
    if (site_.image && keep.spec.bits == 2 && sides) keep.mean_bits = method_.mean;
    keeps_.push_back(keep);
    if (keep.spec.side == Side::none && site_.activation != Activation::none) add(Kind::mask);
  }

  void add_statistics(int numbers) {
    add(Kind::statistics);
    keeps_.back().numbers = numbers;
  }

  void add_dropout() {
    const bool masks = method_.keeps_dropout && find(keeps_, Kind::shared) == nullptr;  // a shared code is rebuilt with its seed
    if (site_.drops) add(masks ? Kind::dropout : Kind::seed);
  }

  void add(Kind kind) { keeps_.push_back({kind}); }

  const Method& method_;
  const Site& site_;
  std::vector<Keep> keeps_;
};

std::vector<Keep> input_keeps(const Method& method, Kind kind) {
  Keep keep{kind, method.input};
  keep.per_sample_bits = method.adaptive;
  keep.offload = method.swap;
  std::vector<Keep> keeps = {keep};
  if (std::holds_alternative<RandomProjection>(method.input.transform)) keeps.push_back({Kind::seed});
  return keeps;
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"input", "aggregate", "norm",       "activation", "shared", "derivative",
                                    "mask",  "affine",    "statistics", "dropout",    "seed"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<Keep> keeps_of(const Method& method, const Site& site) {
  if (method.torch_baseline) return {};
  switch (site.role) {
    case Role::weight_input: return input_keeps(method, Kind::input);
    case Role::data: return method.packs_data ? input_keeps(method, Kind::input) : std::vector<Keep>();
    case Role::aggregate: return method.keeps_aggregate ? input_keeps(method, Kind::aggregate) : std::vector<Keep>();
    case Role::derivative: return {{Kind::derivative, derivative_spec(method), Of::output}};
    case Role::epilogue: return Epilogue(method, site).make();
  }
  return {};
}

const Keep* find(const std::vector<Keep>& keeps, Kind kind) {
  const auto found = std::ranges::find(keeps, kind, &Keep::kind);
  return found == keeps.end() ? nullptr : &*found;
}

bool is_baseline(const Method& method) { return method.torch_baseline; }

bool packs_rows(const Method& method) { return !method.torch_baseline && method.input.bits < kKeep && method.norm.bits < kKeep; }

bool reads_producer(const Method& method) { return method.shared && !method.torch_baseline; }

int64_t budget_of(const Method& method) { return method.budget; }

Method with_mean_bits(Method method, double mean) {
  method.mean = mean;
  method.budget = 0;
  return method;
}

bool wants_growing_segments(const Method& method) { return !method.torch_baseline; }

bool serves_weights(const Method& method, const CodecSpec& spec, bool after_relu) {
  const bool relu = spec.side == Side::relu || after_relu;
  const Activation activation = relu ? Activation::relu : spec.side == Side::both ? Activation::leaky_relu : Activation::none;
  const Norm norm = spec.side == Side::relu ? Norm::none : Norm::batch;
  return spec.bits >= shared_spec(method, norm, activation, 1, 0).bits;
}

}  // namespace satchel
