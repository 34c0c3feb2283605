#include "tests/autograd/fuzz_program.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>

#include "tests/autograd/fuzz_steps.h"

namespace satchel::test {
namespace {

template <class List>
std::string list_text(const List& list) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < list.size(); ++i) out << (i > 0 ? ", " : "") << list[i];
  out << ']';
  return out.str();
}

std::vector<int64_t> random_sizes(FuzzDice& dice) {
  const int64_t rows = dice.of({0, 1, 1, 2, 3, 4, 5, 7, 9});
  const int64_t channels = dice.of({1, 2, 3, 4, 4, 6, 8, 8, 13});
  const auto side = [&] { return dice.of({1, 2, 3, 4, 5, 6, 7}); };
  switch (dice.below(6)) {
    case 0: return {rows, channels};
    case 1: return {rows, side(), channels};
    case 2: return {rows, channels, side()};
    case 3: return {rows, channels, std::min<int64_t>(side(), 4), std::min<int64_t>(side(), 3), std::min<int64_t>(side(), 3)};
    default: return {rows, channels, side(), side()};
  }
}

/// How a tensor may lie in memory.
std::pair<std::string, std::function<at::Tensor(at::Tensor)>> random_layout(FuzzDice& dice, size_t dims) {
  switch (dice.below(5)) {
    case 0:
      if (dims == 4) return {"channels_last", [](const at::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }};
      if (dims == 5) return {"channels_last", [](const at::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast3d); }};
      return {"transposed", [](const at::Tensor& x) { return x.transpose(0, 1).contiguous().transpose(0, 1); }};
    case 1: return {"every second", [](const at::Tensor& x) { return at::stack({x, x}, -1).select(-1, 0); }};
    default: return {"contiguous", [](at::Tensor x) { return x; }};
  }
}

/// One run that draws its steps as it goes: what torch refuses is drawn anew.
class Author {
 public:
  explicit Author(uint64_t seed) : dice_(seed) { write(seed); }
  FuzzProgram program;

 private:
  void write(uint64_t seed) {
    program.method =
        dice_.of<std::string>({"satchel,bits=32", "satchel,bits=32", "satchel,bits=32", "exact,bits=32,project=none", "bits=32"});
    program.input = random_sizes(dice_);
    const auto [name, layout] = random_layout(dice_, program.input.size());
    program.layout = layout;
    program.input_needs_gradient = !dice_.chance(0.15);
    program.input_text = "v0 = " + name + " " + list_text(program.input) + (program.input_needs_gradient ? "" : ", no gradient");
    run_forward(program, seed, run_);
    const int64_t count = 1 + dice_.below(9);
    for (int tries = 0; tries < 60 && static_cast<int64_t>(program.steps.size()) < count; ++tries) try_step();
    choose_outputs();
    for (size_t i = 0; i < weights_; ++i) program.frozen.push_back(dice_.chance(0.08));
  }

  void try_step() {
    std::optional<FuzzStep> step = random_step(dice_, run_.values);
    if (!step) return;
    FuzzRun before = run_;  // handles: a step that throws half-way leaves nothing new behind
    std::vector<at::Tensor> own;
    for (const auto& shape : step->weights) own.push_back(shape.empty() ? at::Tensor() : at::randn(shape, at::kDouble).requires_grad_());
    run_.step = program.steps.size();
    run_.masks.resize(run_.step + 1);
    try {
      const at::Tensor out = step->run(run_, own.data());
      if (out.defined() && (out.numel() > 20000 || out.dim() > 5 || (out.numel() > 0 && !out.isfinite().all().item<bool>()))) {
        run_ = before;
        return;
      }
      if (out.defined()) {
        step->text = "v" + std::to_string(run_.values.size()) + " = " + step->text;
        run_.values.push_back(out);
      }
    } catch (const std::exception&) {
      run_ = before;
      return;
    }
    weights_ += step->weights.size();
    program.steps.push_back(std::move(*step));
  }

  void choose_outputs() {
    const size_t count = run_.values.size();
    program.outputs = {count - 1};
    while (dice_.chance(0.3)) program.outputs.push_back(static_cast<size_t>(dice_.below(static_cast<int64_t>(count))));
    while (count > 1 && dice_.chance(0.4)) program.asked.push_back(static_cast<size_t>(dice_.below(static_cast<int64_t>(count))));
    program.twice = dice_.chance(0.15);
  }

  FuzzDice dice_;
  FuzzRun run_;
  size_t weights_ = 0;
};

}  // namespace

std::string FuzzProgram::text() const {
  std::string all = "method " + method + "\n" + input_text + "\n";
  size_t weight = 0;
  for (const FuzzStep& step : steps) {
    all += step.text;
    for (size_t i = 0; i < step.weights.size(); ++i, ++weight) {
      if (step.weights[i].empty()) continue;
      all += "   w" + std::to_string(weight) + list_text(step.weights[i]) + (frozen.empty() || !frozen[weight] ? "" : " frozen");
    }
    all += '\n';
  }
  all += "loss of values " + list_text(outputs) + (asked.empty() ? "" : ", grad() asked for values " + list_text(asked));
  return all + (twice ? ", backward twice" : "") + "\n";
}

FuzzProgram random_program(uint64_t seed) {
  at::manual_seed(seed);
  return std::move(Author(seed).program);
}

void run_forward(const FuzzProgram& program, uint64_t data_seed, FuzzRun& run) {
  at::Generator generator = at::detail::createCPUGenerator(data_seed);
  const auto draw = [&](const std::vector<int64_t>& shape) {
    return at::randn(shape, generator, at::TensorOptions(at::kFloat)).to(run.type);
  };
  // A leaf and, where it lies otherwise in memory, a leaf all the same.
  run.values = {program.layout(draw(program.input)).detach().requires_grad_(program.input_needs_gradient)};
  run.weights.clear();
  run.masks.resize(program.steps.size());
  for (const FuzzStep& step : program.steps) {
    for (const auto& shape : step.weights) {
      const bool frozen = run.weights.size() < program.frozen.size() && program.frozen[run.weights.size()];
      run.weights.push_back(shape.empty() ? at::Tensor() : draw(shape).requires_grad_(!frozen));
    }
  }
  size_t weight = 0;
  for (run.step = 0; run.step < program.steps.size(); ++run.step) {
    const FuzzStep& step = program.steps[run.step];
    const at::Tensor out = step.run(run, run.weights.data() + weight);
    weight += step.weights.size();
    if (out.defined()) run.values.push_back(out);
  }
}

}  // namespace satchel::test
