// How to call convolutions and pools, and what torch would do.
#include <map>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/resample.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {
namespace {

enum class Order : uint8_t { contiguous, channels_last };

/// Normal values of these shapes, the same every time and on every device. `order`: of maps and kernels.
std::function<Inputs()> leaves(at::Device device, const std::vector<std::vector<int64_t>>& shapes, Order order = Order::contiguous) {
  return [device, shapes, order] {
    at::manual_seed(17);
    Inputs inputs;
    for (const auto& shape : shapes) {
      at::Tensor t = at::randn(shape).to(device);
      if (order == Order::channels_last && t.dim() == 4) t = t.contiguous(at::MemoryFormat::ChannelsLast);
      if (order == Order::channels_last && t.dim() == 5) t = t.contiguous(at::MemoryFormat::ChannelsLast3d);
      inputs.push_back(t.requires_grad_());
    }
    return inputs;
  };
}

const std::vector<std::string> kKeep{"satchel,bits=32", "exact,bits=32,project=none", "fp32"};
const std::vector<std::string> kPacked{"satchel",       "actnn",    "actnn,adaptive=no", "actnn,level=1", "actnn,level=2",
                                       "actnn,level=4", "division", "bits=4,block=64",   "gact",          "exact"};
const std::vector<std::string> kSome{"actnn", "division"};  // 200 draws each: one case has all methods

struct ConvCase {
  std::string name;
  std::vector<int64_t> x, weight;
  ConvOptions options = {};
  Order order = Order::contiguous;
};

at::Tensor torch_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const ConvOptions& o) {
  const size_t dims = static_cast<size_t>(weight.dim()) - 2;
  const auto all = [&](const std::vector<int64_t>& list) { return list.size() == dims ? list : std::vector<int64_t>(dims, list[0]); };
  return at::convolution(x, weight, bias, all(o.stride), all(o.padding), all(o.dilation), o.transposed, all(o.output_padding), o.groups);
}

GradientCase conv_case(at::Device device, const ConvCase& k) {
  const int64_t out = k.options.transposed ? k.weight[1] * k.options.groups : k.weight[0];
  return {device,
          k.name,
          leaves(device, {k.x, k.weight, {out}}, k.order),
          [k](const Inputs& in, const SavePolicy& s) { return conv(in[0], in[1], in[2], k.options, s); },
          [k](const Inputs& in, const at::Tensor&) { return torch_conv(in[0], in[1], in[2], k.options); },
          kKeep,
          k.name == "conv2d" ? kPacked : kSome,
          {}};
}

ConvOptions transposed(std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> output_padding, int64_t groups = 1) {
  return {std::move(stride), std::move(padding), {1}, std::move(output_padding), true, groups};
}

/// A pool, whose methods differ in nothing but a name.
GradientCase pool_case(at::Device device, const std::string& name, std::vector<int64_t> x,
                       std::function<at::Tensor(const at::Tensor&, const SavePolicy&)> ours,
                       std::function<at::Tensor(const at::Tensor&)> torchs) {
  return {device,
          name,
          leaves(device, {std::move(x)}),
          [ours](const Inputs& in, const SavePolicy& s) { return ours(in[0], s); },
          [torchs](const Inputs& in, const at::Tensor&) { return torchs(in[0]); },
          {"satchel", "actnn", "fp32"},
          {"satchel"},
          {}};
}

void add_convs(at::Device device, std::vector<GradientCase>& cases) {
  const ConvCase convs[] = {
      {"conv1d", {3, 4, 11}, {5, 4, 3}, {{2}, {1}, {1}}},
      {"conv2d", {3, 4, 7, 6}, {5, 4, 3, 3}, {{1}, {1}, {1}}},
      {"conv2d, channels_last", {3, 4, 7, 6}, {5, 4, 3, 3}, {{1}, {1}, {1}}, Order::channels_last},
      {"conv2d, 1×1", {3, 6, 5, 4}, {4, 6, 1, 1}},
      {"conv2d, of 1×1 maps", {9, 6, 1, 1}, {4, 6, 1, 1}},
      {"conv2d, stride and dilation", {3, 4, 9, 8}, {6, 4, 3, 2}, {{2, 1}, {2, 1}, {2, 1}}},
      {"conv2d, groups", {3, 6, 6, 5}, {4, 3, 3, 3}, {{1}, {1}, {1}, {0}, false, 2}},
      {"conv2d, depthwise", {3, 6, 6, 5}, {6, 1, 3, 3}, {{1}, {1}, {1}, {0}, false, 6}},
      {"conv2d, windows that leave a rest", {3, 4, 8, 9}, {6, 4, 2, 3}, {{3, 4}, {0}, {2, 1}}},
      {"conv3d", {2, 3, 5, 4, 6}, {4, 3, 2, 3, 3}, {{1, 2, 1}, {0, 1, 1}, {1}}},
      {"conv3d, channels_last", {2, 3, 5, 4, 6}, {4, 3, 2, 3, 3}, {{1, 2, 1}, {0, 1, 1}, {1}}, Order::channels_last},
      {"transposed conv1d", {3, 4, 7}, {4, 3, 3}, transposed({2}, {1}, {1})},
      {"transposed conv2d", {3, 4, 5, 4}, {4, 3, 3, 3}, transposed({2, 1}, {1}, {1, 0})},
      {"transposed conv2d, channels_last", {3, 4, 5, 4}, {4, 3, 3, 3}, transposed({2, 1}, {1}, {1, 0}), Order::channels_last},
      {"transposed conv2d, groups", {3, 4, 5, 4}, {4, 2, 3, 2}, transposed({2}, {0}, {0}, 2)},
      {"transposed conv2d, dilated", {3, 4, 5, 4}, {4, 2, 3, 2}, {{1, 2}, {1}, {3, 1}, {2, 1}, true}},
      {"transposed conv2d, dilated groups", {3, 4, 5, 4}, {4, 2, 3, 2}, {{2}, {1, 0}, {2, 1}, {1, 0}, true, 2}},
      {"transposed conv3d", {2, 3, 3, 4, 3}, {3, 2, 2, 2, 2}, transposed({2}, {0}, {0})},
  };
  for (const ConvCase& k : convs) cases.push_back(conv_case(device, k));
}

/// What a pool hides of a ReLU's output its readers rebuild from one save.
GradientCase pooled_case(at::Device device) {
  return {device,
          "relu, max_pool, two convs",
          leaves(device, {{3, 4, 8, 6}, {5, 4, 3, 3}, {2, 4, 1, 1}}),
          [](const Inputs& in, const SavePolicy& s) {
            const at::Tensor pooled = max_pool(relu(in[0], s), {{2}}, s);
            const at::Tensor a = conv(pooled, in[1], {}, {{1}, {1}}, s), b = conv(pooled, in[2], {}, {}, s);
            return at::cat({a, b}, 1);
          },
          [](const Inputs& in, const at::Tensor&) {
            const at::Tensor pooled = at::max_pool2d(at::relu(in[0]), {2, 2});
            return at::cat({torch_conv(pooled, in[1], {}, {{1}, {1}}), torch_conv(pooled, in[2], {}, {})}, 1);
          },
          kKeep,
          {"satchel", "actnn", "division", "satchel,bits=3", "satchel,side=none"},
          {}};
}

void add_max_pools(at::Device device, std::vector<GradientCase>& cases) {
  const auto add = [&](const std::string& name, std::vector<int64_t> x, const PoolOptions& o,
                       std::function<at::Tensor(const at::Tensor&)> torchs) {
    cases.push_back(pool_case(
        device, name, std::move(x), [o](const at::Tensor& t, const SavePolicy& s) { return max_pool(t, o, s); }, std::move(torchs)));
  };
  PoolOptions line{{3}, {2}, {1}}, overlap{{3, 2}, {2, 1}, {1, 0}}, apart{{2}, {2}, {0}, {2}}, cube{{2, 3, 2}, {2}, {0, 1, 0}};
  overlap.ceil_mode = true;
  add("max_pool1d", {3, 5, 11}, line, [](const at::Tensor& x) { return at::max_pool1d(x, {3}, {2}, {1}); });
  add("max_pool2d", {3, 5, 8, 7}, {{2}}, [](const at::Tensor& x) { return at::max_pool2d(x, {2, 2}); });
  add("max_pool2d, overlapping", {3, 5, 8, 7}, overlap, [](const at::Tensor& x) {
    return at::max_pool2d(x, {3, 2}, {2, 1}, {1, 0}, {1, 1}, true);
  });
  add("max_pool2d, dilated", {3, 5, 8, 7}, apart, [](const at::Tensor& x) { return at::max_pool2d(x, {2, 2}, {2, 2}, {0, 0}, {2, 2}); });
  add("max_pool3d", {2, 3, 6, 5, 4}, cube, [](const at::Tensor& x) { return at::max_pool3d(x, {2, 3, 2}, {2, 2, 2}, {0, 1, 0}); });
}

void add_average_pools(at::Device device, std::vector<GradientCase>& cases) {
  const auto add = [&](const std::string& name, std::vector<int64_t> x,
                       std::function<at::Tensor(const at::Tensor&, const SavePolicy&)> ours,
                       std::function<at::Tensor(const at::Tensor&)> torchs) {
    cases.push_back(pool_case(device, name, std::move(x), std::move(ours), std::move(torchs)));
  };
  PoolOptions overlap{{3, 2}, {2, 1}, {1, 0}}, divided{{2}};
  overlap.count_include_pad = false;
  divided.divisor = 3;
  add(
      "avg_pool1d", {3, 5, 11},
      [](const at::Tensor& x, const SavePolicy& s) {
        return avg_pool(x, {{3}, {2}, {1}}, s);
      },
      [](const at::Tensor& x) { return at::avg_pool1d(x, {3}, {2}, {1}); });
  add(
      "avg_pool2d", {3, 5, 8, 7}, [overlap](const at::Tensor& x, const SavePolicy& s) { return avg_pool(x, overlap, s); },
      [](const at::Tensor& x) {
        return at::avg_pool2d(x, {3, 2}, {2, 1}, {1, 0}, false, false);
      });
  add(
      "avg_pool2d, divisor", {3, 5, 8, 7}, [divided](const at::Tensor& x, const SavePolicy& s) { return avg_pool(x, divided, s); },
      [](const at::Tensor& x) {
        return at::avg_pool2d(x, {2, 2}, {2, 2}, {0, 0}, false, true, 3);
      });
  add(
      "avg_pool3d", {2, 3, 6, 5, 4}, [](const at::Tensor& x, const SavePolicy& s) { return avg_pool(x, {{2}}, s); },
      [](const at::Tensor& x) {
        return at::avg_pool3d(x, {2, 2, 2});
      });
  add(
      "adaptive_avg_pool1d", {3, 5, 11}, [](const at::Tensor& x, const SavePolicy& s) { return adaptive_avg_pool(x, {4}, s); },
      [](const at::Tensor& x) { return at::adaptive_avg_pool1d(x, {4}); });
  add(
      "adaptive_avg_pool2d to 1", {3, 5, 8, 7}, [](const at::Tensor& x, const SavePolicy& s) { return adaptive_avg_pool(x, {1}, s); },
      [](const at::Tensor& x) {
        return at::adaptive_avg_pool2d(x, {1, 1});
      });
  add(
      "adaptive_avg_pool2d", {3, 5, 8, 7},
      [](const at::Tensor& x, const SavePolicy& s) {
        return adaptive_avg_pool(x, {3, std::nullopt}, s);
      },
      [](const at::Tensor& x) {
        return at::adaptive_avg_pool2d(x, {3, 7});
      });
  add(
      "adaptive_avg_pool3d", {2, 3, 6, 5, 4},
      [](const at::Tensor& x, const SavePolicy& s) {
        return adaptive_avg_pool(x, {2, 3, 4}, s);
      },
      [](const at::Tensor& x) {
        return at::adaptive_avg_pool3d(x, {2, 3, 4});
      });
}

/// As torch's own functions, which keep sizes only: nothing to be wrong on average.
void add_upsamples(at::Device device, std::vector<GradientCase>& cases) {
  const auto add = [&](const std::string& name, std::vector<int64_t> x, const UpsampleOptions& o,
                       std::function<at::Tensor(const at::Tensor&)> torchs) {
    GradientCase c = pool_case(
        device, name, std::move(x), [o](const at::Tensor& t, const SavePolicy& s) { return upsample(t, o, s); }, std::move(torchs));
    c.noisy_methods.clear();
    cases.push_back(std::move(c));
  };
  const UpsampleOptions nearest{{}, {2}, Resample::nearest}, linear{{}, {2}, Resample::linear};
  const UpsampleOptions corners{{9, 8}, {}, Resample::linear, true}, cubic{{9, 8}, {}, Resample::cubic}, area{{2, 3}, {}, Resample::area};
  using Scale = std::optional<at::ArrayRef<double>>;
  const at::OptionalIntArrayRef none;
  static const std::vector<double> twice{2, 2, 2};
  const auto by = [](size_t dims) { return Scale(at::ArrayRef<double>(twice.data(), dims)); };
  add("upsample nearest of 3", {3, 5, 7}, nearest, [=](const at::Tensor& x) { return at::upsample_nearest1d(x, none, by(1)); });
  add("upsample nearest of 4", {3, 5, 4, 3}, nearest, [=](const at::Tensor& x) { return at::upsample_nearest2d(x, none, by(2)); });
  add("upsample nearest of 5", {2, 3, 3, 4, 2}, nearest, [=](const at::Tensor& x) { return at::upsample_nearest3d(x, none, by(3)); });
  add("upsample linear of 3", {3, 5, 7}, linear, [=](const at::Tensor& x) { return at::upsample_linear1d(x, none, false, by(1)); });
  add("upsample linear of 4", {3, 5, 4, 3}, linear, [=](const at::Tensor& x) { return at::upsample_bilinear2d(x, none, false, by(2)); });
  add("upsample linear of 5", {2, 3, 3, 4, 2}, linear,
      [=](const at::Tensor& x) { return at::upsample_trilinear3d(x, none, false, by(3)); });
  add("upsample to corners", {3, 5, 4, 3}, corners, [](const at::Tensor& x) { return at::upsample_bilinear2d(x, {9, 8}, true); });
  add("upsample cubic", {3, 5, 4, 3}, cubic, [](const at::Tensor& x) { return at::upsample_bicubic2d(x, {9, 8}, false); });
  add("upsample area", {3, 5, 4, 7}, area, [](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {2, 3}); });
}

void add_pads(at::Device device, std::vector<GradientCase>& cases) {
  for (const auto& [mode, word] : std::map<PadMode, std::string>{{PadMode::zeros, "constant"},
                                                                 {PadMode::reflect, "reflect"},
                                                                 {PadMode::replicate, "replicate"},
                                                                 {PadMode::circular, "circular"}}) {
    const std::vector<std::vector<int64_t>> shapes{{3, 5, 11}, {3, 5, 8, 7}, {2, 3, 6, 5, 4}};
    for (const auto& x : shapes) {
      std::vector<int64_t> padding{2, 1, 1, 0, 1, 2};
      padding.resize(2 * (x.size() - 2));
      cases.push_back(pool_case(
          device, "pad " + word + " of " + std::to_string(x.size()), x,
          [padding, mode = mode](const at::Tensor& t, const SavePolicy& s) { return pad(t, padding, mode, s); },
          [padding, word = word](const at::Tensor& t) { return at::pad(t, padding, word); }));
      if (mode == PadMode::zeros || mode == PadMode::circular) cases.back().noisy_methods.clear();  // torch's own functions
    }
  }
}

}  // namespace

std::vector<GradientCase> conv_cases(at::Device device) {
  std::vector<GradientCase> cases;
  add_convs(device, cases);
  cases.push_back(pooled_case(device));
  add_max_pools(device, cases);
  add_average_pools(device, cases);
  add_upsamples(device, cases);
  add_pads(device, cases);
  return cases;
}

}  // namespace satchel::test
