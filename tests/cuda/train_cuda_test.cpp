// Whole training steps on the GPU: none waits for it, replayed steps are eager ones bit for bit, TF32 and caps do what they say.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/memory.h"
#include "satchel/train/memory_parts.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "satchel/train/step.h"
#include "satchel/train/train.h"

namespace satchel {
namespace {

constexpr const char* kData = "synthetic:nodes=3000,edges=20000,features=24,classes=5";

TrainOptions options_for(const std::string& method, const std::string& conv = "sage", Amp amp = Amp::none) {
  TrainOptions o;
  o.shape.conv = conv;
  o.shape.hidden = 32;
  o.method = parse_method(method);
  o.device = "cuda";
  o.cuda_graph = false;
  o.amp = amp;
  o.seed = 9;
  return o;
}

/// A model in training, as train_graph() puts it together.
class Training {
 public:
  Training(const GraphData& data, TrainOptions options) : options_(std::move(options)) {
    options_.shape = shape_for(data, options_.shape);
    task_ = make_task(data, options_);
    if (wants_training_rows(options_)) give_training_rows(task_);
    if (cached_rows(task_, options_) > 0) task_.input = with_aggregated(std::move(task_.input), task_.a, cached_rows(task_, options_));
    at::manual_seed(options_.seed);
    model_ = GraphModel(model_options(options_));
    model_->to(at::Device(at::kCUDA, 0));
    const double scale = gradient_scale(task_, options_);
    optimizer_ = std::make_unique<ParameterStep>(options_, model_->parameters(), scale);
    step_ = std::make_unique<TrainStep>(
        StepParts{[this] { return training_logits(model_, task_); },
                  [this, scale](const at::Tensor& logits) { return loss_of(task_, logits, options_.method.torch_baseline, scale); }},
        *optimizer_, at::Device(at::kCUDA, 0), options_.cuda_graph);
  }

  at::Tensor step(int64_t i) { return (*step_)(derive_seed(options_.seed, static_cast<uint64_t>(i), 0, 0)); }
  TensorMap weights() const { return weights_of(*model_); }
  TensorMap optimizer() const { return optimizer_->state(); }

 private:
  TrainOptions options_;
  GraphTask task_;
  GraphModel model_ = nullptr;
  std::unique_ptr<ParameterStep> optimizer_;
  std::unique_ptr<TrainStep> step_;
};

void expect_equal(const TensorMap& a, const TensorMap& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(at::equal(tensor.cpu(), b.at(name).cpu())) << name;
}

/// Throws on every wait for the GPU that torch makes, in all threads.
class SyncIsAnError {
 public:
  SyncIsAnError() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~SyncIsAnError() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  SyncIsAnError(const SyncIsAnError&) = delete;
  SyncIsAnError& operator=(const SyncIsAnError&) = delete;
};

TEST_F(Cuda, NoStepWaitsForTheGpu) {
  const GraphData data = load_graph(kData);
  for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) {
    for (const std::string& conv : graph_layer_names()) {
      for (const char* method : {"satchel", "exact", "blockwise", "fp32"}) {
        if (!mine()) continue;
        SCOPED_TRACE(method + (" " + conv) + " " + name_of(amp));
        Training run(data, options_for(method, conv, amp));
        run.step(0);  // libraries start up
        at::Tensor loss;
        {
          const SyncIsAnError strict;
          for (int64_t i = 1; i < 4; ++i) EXPECT_NO_THROW(loss = run.step(i));
          ASSERT_TRUE(loss.defined());
          EXPECT_THROW(loss.item<float>(), c10::Error);  // what is looked for would be found
        }
        EXPECT_TRUE(std::isfinite(loss.item<float>()));
      }
    }
  }
}

/// The same seeds, so the same codes but where another order of sums moves a value over a level's edge: about one in 2^20, as sums differ
/// by a few units in the last place. The loss, a mean over nodes, follows by far less than one in 10^4.
TEST_F(Cuda, LossesAreTheCpus) {
  const GraphData data = load_graph(kData);
  for (const std::string& conv : graph_layer_names()) {
    for (const char* method : {"satchel", "exact", "blockwise"}) {
      SCOPED_TRACE(method + (" " + conv));
      TrainOptions options = options_for(method, conv);
      options.epochs = 4;
      const RunResult cuda = train_graph(data, options);
      options.device = "cpu";
      const RunResult cpu = train_graph(data, options);
      EXPECT_NEAR(cuda.loss, cpu.loss, 1e-4 * cpu.loss);
    }
  }
}

TEST_F(Cuda, ReplayedStepsAreEagerStepsBitForBit) {
  const GraphData data = load_graph(kData);
  for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) {
    for (const std::string& conv : graph_layer_names()) {
      for (const char* method : {"satchel", "exact", "blockwise", "projection", "bits=4,block=128", "fp32"}) {
        SCOPED_TRACE(method + (" " + conv) + " " + name_of(amp));
        TrainOptions options = options_for(method, conv, amp);
        Training eager(data, options);
        options.cuda_graph = true;
        Training replayed(data, options);
        float before = 0;
        for (int64_t i = 0; i < 10; ++i) {
          const float expected = eager.step(i).item<float>(), got = replayed.step(i).item<float>();
          EXPECT_EQ(got, expected) << "step " << i;
          EXPECT_NE(got, before) << "step " << i << " did nothing";
          before = got;
        }
        expect_equal(replayed.weights(), eager.weights());
        expect_equal(replayed.optimizer(), eager.optimizer());
      }
    }
  }
}

/// The last layer of training nodes alone: no wait, replays are eager steps bit for bit, and losses are those of all nodes but for the
/// order of sums, four steps apart.
TEST_F(Cuda, TheLastLayerGivesTrainingNodesAlone) {
  const GraphData data = load_graph(kData);
  for (const char* conv : {"sage", "gcn"}) {
    for (const auto& [method, amp] : {std::pair{"satchel,bits=32", Amp::none}, std::pair{"satchel", Amp::fp16}}) {
      SCOPED_TRACE(std::string(conv) + " " + method);
      TrainOptions options = options_for(method, conv, amp);
      options.last_layer = LastLayer::all;
      Training all(data, options);
      options.last_layer = LastLayer::training;
      Training eager(data, options);
      options.cuda_graph = true;
      Training replayed(data, options);
      eager.step(0), replayed.step(0), all.step(0);
      for (int64_t i = 1; i < 8; ++i) {
        at::Tensor loss;
        {
          const SyncIsAnError strict;
          EXPECT_NO_THROW(loss = eager.step(i));
        }
        const float own = loss.item<float>(), of_all = all.step(i).item<float>();
        EXPECT_EQ(replayed.step(i).item<float>(), own) << "step " << i;
        if (amp == Amp::none && i < 4) {
          EXPECT_NEAR(own, of_all, 1e-4 * of_all) << "step " << i;
        }
      }
      expect_equal(replayed.weights(), eager.weights());
    }
  }
}

/// Steps that are not read in between, and an evaluation's memory traffic beside the graph's pool.
TEST_F(Cuda, ReplaysNeedNoHostInBetween) {
  const GraphData data = load_graph(kData);
  TrainOptions options = options_for("satchel");
  Training eager(data, options);
  options.cuda_graph = true;
  Training replayed(data, options);
  for (int64_t i = 0; i < 30; ++i) {
    eager.step(i);
    replayed.step(i);
    const at::Tensor other = at::full({1 << 20}, static_cast<double>(i), at::TensorOptions().device(at::kCUDA));
    (void)other.mul(2);
  }
  EXPECT_EQ(replayed.step(30).item<float>(), eager.step(30).item<float>());
  expect_equal(replayed.weights(), eager.weights());
}

TEST_F(Cuda, RunsWithAGraphGiveTheSameResults) {
  const std::string file = testing::TempDir() + "satchel_graph_" + std::to_string(::getpid()) + ".safetensors";
  GraphData data = load_graph(kData);
  for (const Task task : {Task::single_label, Task::multi_label}) {
    if (task == Task::multi_label) data = load_graph(std::string(kData) + ",task=multi");
    for (const char* method : {"satchel", "fp32"}) {
      SCOPED_TRACE(method);
      TrainOptions options = options_for(method);
      options.epochs = 12;
      options.eval_every = 3;
      options.clip = 0.5;
      options.checkpoint = file;
      const RunResult eager = train_graph(data, options);
      const Checkpoint expected = read_checkpoint(file);
      options.cuda_graph = true;
      const RunResult replayed = train_graph(data, options);
      expect_equal(read_checkpoint(file).model, expected.model);
      EXPECT_EQ(replayed.loss, eager.loss);
      EXPECT_EQ(replayed.test, eager.test);
      EXPECT_EQ(replayed.saved_bytes, eager.saved_bytes);
      // In two parts, the second one eager again.
      options.epochs = 6;
      train_graph(data, options);
      options.epochs = 12;
      options.resume = true;
      options.cuda_graph = false;
      train_graph(data, options);
      expect_equal(read_checkpoint(file).model, expected.model);
    }
  }
  std::remove(file.c_str());
}

/// Seeds stand in one line, those that are not kept among them: fewer than eight a line of the plan, which is what the CPU's test allows
/// too.
void expect_planned_bytes(const GraphData& data, const std::vector<std::string>& methods, int64_t hidden) {
  for (const std::string& method : methods) {
    TrainOptions options = options_for(method);
    options.shape.hidden = hidden;
    options.epochs = 4;
    const RunResult r = train_graph(data, options);
    GraphShape shape = shape_for(data, options.shape);
    const std::vector<SavedTensor> plan = plan_graph(shape, data.nodes, options.method);
    EXPECT_EQ(r.tensors, plan) << method;
    int64_t seeds = 0;
    for (const SavedTensor& line : plan) seeds += line.kind == "seed" ? 1 : 0;
    EXPECT_GE(r.saved_bytes, total_bytes(plan) - 8 * seeds) << method;
    EXPECT_LE(r.saved_bytes, total_bytes(plan) + 64 * static_cast<int64_t>(plan.size())) << method;
  }
}

TEST_F(Cuda, MeasuresWhatThePlanPredicts) { expect_planned_bytes(load_graph(kData), {"exact", "blockwise", "satchel"}, 32); }

/// ogbn-arxiv's sizes. A block of a tensor above 1 MiB may exceed it by as much, which no layer keeps: the logits' 25.84 MiB take 26.
TEST_F(Cuda, MeasuresWhatThePlanPredictsOfLargeTensors) {
  const GraphData data = load_graph("synthetic:nodes=169343,edges=200000,features=128,classes=40");
  expect_planned_bytes(data, {"exact", "blockwise,block=4rows", "blockwise", "satchel"}, 128);
}

TEST_F(Cuda, TheMeterTellsWhatTensorsAskedFor) {
  constexpr int64_t kMiB = 1 << 20;
  const auto bytes = [](int64_t n) { return at::empty({n}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA)); };
  const at::Tensor there = bytes(5 * kMiB + 3);  // before the meter: no part of it
  const MemoryMeter meter(at::kCUDA);
  std::vector<at::Tensor> tensors;
  int64_t asked = 0, rounded = 0;
  for (const int64_t n : {int64_t{1}, int64_t{1000}, kMiB + 1, 3 * kMiB / 2, 9 * kMiB + 5, 27'094'880L}) {
    tensors.push_back(bytes(n));
    asked += n;
    rounded += (n + 511) / 512 * 512;
    EXPECT_EQ(meter.requested(), asked);
    EXPECT_GE(meter.allocated(), rounded);
  }
  tensors.clear();
  EXPECT_EQ(meter.requested(), 0);
  EXPECT_EQ(meter.allocated(), 0);
  // A tensor that is gone counts no more, though another stream may still use its block: up to what that exceeds it by.
  const c10::Stream other = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(there.device());
  bytes(32 * kMiB).record_stream(other);
  EXPECT_LE(meter.requested(), 0);
  EXPECT_GE(meter.requested(), -kMiB);
}

TEST_F(Cuda, Tf32LastsAsLongAsItsGuard) {
  const at::Tensor a = reference::normal({256, 256}, 71).cuda(), b = reference::normal({256, 256}, 72).cuda();
  const auto error = [&] {
    const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
    return ((a.mm(b) - exact).norm() / exact.norm()).item<double>();
  };
  TrainOptions options = options_for("satchel");
  const double before = error();
  // float32: sums of 256 terms, each rounded to 2^−24. TF32 rounds both factors by up to 2^−11, in the mean about 2^−12.
  EXPECT_LT(before, 256 * 0x1p-24);
  {
    options.tf32 = true;
    const Tf32Guard guard(options);
    EXPECT_GT(error(), 0x1p-14);
    EXPECT_LT(error(), 0x1p-10);
    options.tf32 = false;
    const Tf32Guard inner(options);
    EXPECT_EQ(error(), before);
  }
  EXPECT_EQ(error(), before);
  options = options_for("satchel");
  options.epochs = 5;
  options.tf32 = true;
  const GraphData data = load_graph(kData);
  const double tf32 = train_graph(data, options).loss;
  EXPECT_EQ(error(), before);
  options.tf32 = false;
  EXPECT_NE(train_graph(data, options).loss, tf32);
}

/// A·X and what the loss keeps take half the bytes in float16; an eager run and a replayed one give the same weights.
TEST_F(Cuda, Tf32TakesFloat16WhereMethodsPack) {
  const GraphData data = load_graph(kData);
  TrainOptions options = options_for("satchel");
  options.epochs = 8;
  options.tf32 = true;
  options.amp = Amp::automatic;
  const RunResult half = train_graph(data, options);
  options.cuda_graph = true;
  const RunResult replayed = train_graph(data, options);
  options.amp = Amp::none;
  const RunResult single = train_graph(data, options);
  EXPECT_EQ(half.amp, Amp::fp16);
  EXPECT_EQ(single.amp, Amp::none);
  EXPECT_EQ(replayed.loss, half.loss);
  EXPECT_EQ(2 * half.cached_bytes, single.cached_bytes);
  EXPECT_LT(half.loss_bytes, single.loss_bytes);
  EXPECT_LT(half.peak_bytes, single.peak_bytes);
  options.method = parse_method("fp32");
  options.amp = Amp::automatic;
  EXPECT_EQ(train_graph(data, options).amp, Amp::none);
}

/// What is not finite ends a run, eager or replayed, with a word on what to do.
TEST_F(Cuda, BeyondFloat16TheRunEnds) {
  GraphData data = load_graph(kData);
  for (float& x : data.features.dense) x = 6e4f;
  for (const bool cuda_graph : {false, true}) {
    TrainOptions options = options_for("satchel", "sage", Amp::fp16);
    options.cuda_graph = cuda_graph;
    options.epochs = 8;
    try {
      train_graph(data, options);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("[train] loss and gradients must be finite"), std::string::npos) << e.what();
    }
  }
}

TEST_F(Cuda, ACapIsKept) {
  const at::Device device(at::kCUDA, 0);
  const auto taken = [&](int64_t bytes) {
    try {
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    } catch (const c10::Error& e) {
      EXPECT_TRUE(out_of_memory(e)) << e.what_without_backtrace();
      return false;
    }
    return true;
  };
  release_cached_memory(device);
  const int64_t size = int64_t{512} << 20;
  ASSERT_GT(free_memory(device), 4 * size);
  {
    const MemoryCap cap(device, cuda_memory(device).allocated + size);  // on top of what libraries keep
    EXPECT_LE(free_memory(device), size);
    EXPECT_FALSE(taken(2 * size));
    EXPECT_TRUE(taken(size / 8));
    // Two weights of 4096 × 4096 with gradients and two moments: 512 MiB, and activations.
    TrainOptions options = options_for("fp32");
    options.shape.hidden = 4096;
    try {
      train_graph(load_graph(kData), options);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("[train] graph, model and saves must fit into memory, got"), std::string::npos) << e.what();
    }
  }
  release_cached_memory(device);
  EXPECT_TRUE(taken(2 * size));
}

TEST_F(Cuda, GraphsAreCapturedWithoutBeingAskedFor) {
  const GraphData data = load_graph(kData);
  for (const char* method : {"satchel", "fp32"}) {
    TrainOptions options = options_for(method);
    options.epochs = 8;
    const RunResult eager = train_graph(data, options);
    options.cuda_graph = std::nullopt;
    options.device = "cuda:0";
    const RunResult replayed = train_graph(data, options);
    EXPECT_FALSE(eager.cuda_graph);
    EXPECT_TRUE(replayed.cuda_graph) << replayed.eager_because;
    EXPECT_EQ(replayed.eager_because, "");
    EXPECT_EQ(replayed.loss, eager.loss) << method;
    EXPECT_EQ(replayed.test, eager.test) << method;
  }
  try {
    device_of("cuda:127");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(", got cuda:127"), std::string::npos) << e.what();
  }
}

/// A weight that steps move, by a forward of the test's own.
struct SmallStep {
  explicit SmallStep(const std::function<at::Tensor(const at::Tensor&)>& forward, std::optional<bool> cuda_graph)
      : weight(at::ones({8}, at::TensorOptions().device(at::kCUDA)).requires_grad_()),
        optimizer(TrainOptions{}, {weight}),
        step({[this, forward] { return forward(weight); }, [](const at::Tensor& logits) { return logits.square().sum(); }}, optimizer,
             at::Device(at::kCUDA, 0), cuda_graph) {}
  at::Tensor weight;
  ParameterStep optimizer;
  TrainStep step;
};

/// In a process of its own, as below. What came before the capture that failed counts, and what comes after goes on.
TEST_F(Cuda, StepsThatWaitGoOnWithoutAGraph) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const auto forward = [](const at::Tensor& w) { return w * (1 + w.sum().item<float>()); };
    SmallStep eager(forward, false), either(forward, std::nullopt);
    bool same = true;
    for (uint64_t i = 0; i < 8; ++i) same = same && eager.step(i).item<float>() == either.step(i).item<float>();
    std::fprintf(stderr, "%s\n", either.step.eager_because().c_str());
    const bool named = either.step.eager_because().starts_with("[train] cuda_graph needs steps that never wait for the GPU, got ");
    std::_Exit(same && named && !either.step.replays() && eager.weight.equal(either.weight) ? 0 : 1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(Cuda, AGraphThatWouldLeaveTooLittleMemoryIsLeftOut) {
  const at::Device device(at::kCUDA, 0);
  release_cached_memory(device);
  const int64_t size = int64_t{512} << 20;
  const MemoryCap cap(device, cuda_memory(device).allocated + size);
  const auto forward = [&](const at::Tensor& w) {
    const at::Tensor large = at::empty({size / 8 * 5}, at::TensorOptions().dtype(at::kByte).device(device));
    return w * 2;
  };
  SmallStep small(forward, std::nullopt);
  for (uint64_t i = 0; i < 6; ++i) {
    StepCost cost;
    small.step(i, i == 1 ? &cost : nullptr);
  }
  EXPECT_FALSE(small.step.replays());
  EXPECT_TRUE(small.step.eager_because().starts_with("[train] a CUDA graph needs twice the ")) << small.step.eager_because();
}

/// In a process of its own: torch cannot undo a broken capture altogether.
TEST_F(Cuda, ACaptureThatWaitsIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const at::Device device(at::kCUDA, 0);
    CapturedWork work(device);
    const at::Tensor x = at::ones({8}, device);
    std::string said;
    try {
      work.capture([&] { x.add_(1).sum().item<float>(); });
    } catch (const Error& e) {
      said = e.what();
    }
    const bool named = said.starts_with("[train] cuda_graph needs steps that never wait for the GPU, got ");
    // What comes after goes on.
    const bool works = x.sum().item<float>() == 8 && !work.captured();
    std::fprintf(stderr, "%s\n", said.c_str());
    std::_Exit(named && works ? 0 : 1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace satchel
