// The list of epilogue kernels: each fused one beside the unfused one, which SATCHEL_EPILOGUE forces, with the same seeds. The lines of
// what is kept are the same; results and gradients agree within rounding, but for values that a rounding puts on the other side of a step
// of their code or of a ReLU.
#include <cstdlib>
#include <set>
#include <string>

#include "cuda_fixture.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/smooth.h"

namespace satchel {
namespace {

using reference::normal;

/// While it lives, that kernel and the unfused one alone serve.
class Forced {
 public:
  explicit Forced(const char* name) { setenv("SATCHEL_EPILOGUE", name, 1); }
  ~Forced() { unsetenv("SATCHEL_EPILOGUE"); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
};

struct Case {
  const char* method;
  std::vector<int64_t> sizes;
  bool skip = false;
  Activation activation = Activation::relu;
  double dropout = 0;
  const char* kernel = "";  // that should serve
  bool only_added = false;
  Norm norm = Norm::batch;
  Smooth smooth = Smooth::none;  // a function of its own after a layer_norm
};

struct Outcome {
  at::Tensor out, skip;
  std::string kernel;
  std::vector<SavedTensor> lines;
  std::vector<at::Tensor> gradients;
};

Outcome run(const Case& c, at::ScalarType type) {
  const int64_t channels = c.sizes[1];
  const bool image = c.sizes.size() == 4;
  const auto in_order = [&](const at::Tensor& t) { return image ? t.contiguous(at::MemoryFormat::ChannelsLast) : t; };
  const auto leaf = [](const at::Tensor& t) { return t.detach().requires_grad_(); };
  const at::Tensor x = leaf(in_order((normal(c.sizes, 11) * 2 + 1).cuda().to(type)));
  const at::Tensor skip = leaf(in_order(normal(c.sizes, 12).cuda().to(type)));
  const at::Tensor gamma = leaf(normal({channels}, 13).cuda().abs() + 0.5), beta = leaf(normal({channels}, 14).cuda() * 0.3);
  NormActOptions options;
  options.activation = c.activation;
  options.dropout = c.dropout;
  options.only_added = c.only_added;
  options.norm = c.norm;
  const SavePolicy saving{parse_method(c.method), "layer"};
  const SeedRun seeds(5);
  Outcome r;
  if (c.smooth != Smooth::none) {
    const at::Tensor y = layer_norm(x, {gamma, beta, {}, {}}, {}, saving);
    r.out = c.smooth == Smooth::silu ? silu(y, saving) : gelu(y, c.smooth == Smooth::gelu_tanh ? "tanh" : "none", saving);
  } else
    r.out = c.skip ? norm_add_act(x, {gamma, beta, {}, {}}, skip, options, saving) : norm_act(x, {gamma, beta, {}, {}}, options, saving);
  r.kernel = epilogue_kernel_of(r.out);
  r.lines = saved_tensors(r.out);
  r.out.backward(in_order(normal(c.sizes, 15).cuda().to(type)));
  r.gradients = {x.grad(), gamma.grad(), beta.grad()};
  if (c.skip) r.gradients.push_back(skip.grad());
  return r;
}

/// Of the norm of the difference, relative: fused and unfused kernels round at different places, and a code's draw may turn.
double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return (x - y).norm().item<double>() / (y.norm().item<double>() + 1e-12);
}

TEST_F(Cuda, EveryEpilogueKernelIsTheUnfusedOne) {
  const std::vector<int64_t> rows = {3001, 128}, image = {4, 64, 14, 14};
  const std::vector<Case> cases = {
      {"satchel", rows, false, Activation::relu, 0.5, "norm_act"},
      {"satchel", rows, false, Activation::leaky_relu, 0, "unfused"},  // its code has both sides
      {"satchel", image, false, Activation::relu, 0, "norm_act"},
      {"satchel", image, true, Activation::relu, 0, "norm_add"},
      {"satchel", rows, true, Activation::relu, 0, "norm_add"},
      {"exact", rows, false, Activation::relu, 0.5, "norm_block"},
      {"blockwise", rows, false, Activation::relu, 0, "norm_block"},
      {"division", image, false, Activation::relu, 0, "norm_low_pass"},
      {"division", image, true, Activation::relu, 0, "norm_low_pass"},
      {"actnn", image, false, Activation::relu, 0, "norm_image"},
      {"actnn", image, true, Activation::relu, 0, "norm_image"},
      {"actnn", image, false, Activation::none, 0, "norm_image"},
      {"actnn,adaptive=no", image, true, Activation::relu, 0, "norm_image"},
      {"satchel", rows, false, Activation::elu, 0, "unfused"},
      {"satchel", {16, 64, 14, 14}, false, Activation::none, 0, "norm_alone", true},  // of fewer values a norm keeps more bits
      {"satchel", rows, false, Activation::none, 0, "norm_alone", true},
      {"satchel", {3001, 768}, false, Activation::none, 0, "row_norm", true, Norm::layer},
      {"satchel", {501, 3072}, false, Activation::none, 0, "row_norm", false, Norm::layer, Smooth::gelu},
      {"satchel", {3001, 768}, false, Activation::none, 0, "row_norm", false, Norm::layer, Smooth::gelu_tanh},
      {"satchel,norm_bits=1", rows, false, Activation::none, 0, "row_norm", false, Norm::layer, Smooth::silu},
      {"satchel,derivative_bits=4", {3001, 768}, false, Activation::none, 0, "row_norm", false, Norm::layer, Smooth::gelu},
      {"actnn,adaptive=no", {3001, 768}, false, Activation::none, 0, "row_norm", true, Norm::layer},
      {"satchel", {3001, 768}, false, Activation::relu, 0, "unfused", false, Norm::layer},  // its code has both sides
  };
  std::set<std::string> seen;
  for (const at::ScalarType type : kTypes) {
    for (const Case& c : cases) {
      SCOPED_TRACE(std::string(c.method) + " " + c.kernel + " " + c10::str(at::IntArrayRef(c.sizes)) + (c.skip ? " skip " : " ") +
                   c10::toString(type));
      const Outcome fused = run(c, type);
      const Forced unfused("unfused");
      const Outcome apart = run(c, type);
      EXPECT_EQ(fused.kernel, c.kernel);
      EXPECT_EQ(apart.kernel, "unfused");
      seen.insert(fused.kernel);
      EXPECT_EQ(fused.lines, apart.lines);
      const double unit = type == at::kFloat ? 0x1p-23 : type == at::kHalf ? 0x1p-10 : 0x1p-7;
      EXPECT_LE(distance(fused.out, apart.out), 64 * unit);
      // One value in a thousand whose draw turns moves a gradient by less than a thirtieth of what its code's noise does.
      for (size_t i = 0; i < fused.gradients.size(); ++i)
        EXPECT_LE(distance(fused.gradients[i], apart.gradients[i]), 0.02 + 64 * unit) << i;
    }
  }
  for (const EpilogueKernel& kernel : epilogue_kernels()) EXPECT_TRUE(seen.contains(kernel.name)) << kernel.name << " was never seen";
}

TEST_F(Cuda, AForcedEpilogueKernelServesAlone) {
  const Case c{"satchel", {3001, 128}, false, Activation::relu, 0, "norm_act"};
  {
    const Forced other("norm_image");
    EXPECT_EQ(run(c, at::kFloat).kernel, "unfused");
  }
  const Forced own("norm_act");
  EXPECT_EQ(run(c, at::kFloat).kernel, "norm_act");
}

}  // namespace
}  // namespace satchel
