#include "tools/bench_product.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "satchel/tensor/split_product.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/time_of.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kFeatures = 128, kClasses = 40;  // arxiv's

struct BenchProductCommand {
  int64_t rows = 169343;
  std::string data = "relu", json;
  int repeat = 15;
};

enum class Role : uint8_t { forward, input_gradient, weight_gradient };

/// Rows of these depths, one matrix or two, times weights; of a weight's gradient: gᵀ·x, whose depth are the rows.
struct Shape {
  const char* name;
  Role role;
  std::vector<int64_t> depths;  // a weight's gradient: columns of g
  int64_t columns;
};

std::vector<Shape> shapes_of(int64_t hidden) {
  return {{"forward 1", Role::forward, {kFeatures, kFeatures}, hidden},
          {"forward 2", Role::forward, {hidden, hidden}, hidden},
          {"forward 3", Role::forward, {hidden}, 2 * kClasses},  // both weights side by side: aggregated after the product
          {"input gradient 3", Role::input_gradient, {kClasses, kClasses}, hidden},
          {"input gradient 2", Role::input_gradient, {hidden, hidden}, hidden},
          {"weight gradient 1", Role::weight_gradient, {hidden}, kFeatures},
          {"weight gradient 2", Role::weight_gradient, {hidden}, hidden}};
}

/// Numbers as the layers of a model have them, the same in every run.
class Numbers {
 public:
  explicit Numbers(std::string kind)
      : kind_(std::move(kind)), device_(at::kCUDA, 0), generator_(at::globalContext().defaultGenerator(device_).clone()) {
    generator_.set_current_seed(7);
  }

  at::Tensor activations(int64_t rows, int64_t columns) {
    const at::Tensor x = normal(rows, columns);
    return kind_ == "relu" ? x.clamp_min_(0).mul_(kept(rows, columns)).mul_(2) : shaped(x);
  }
  at::Tensor gradients(int64_t rows, int64_t columns) {
    const at::Tensor g = normal(rows, columns);
    return (kind_ == "relu" ? g.mul_(normal(rows, columns) > 0).mul_(kept(rows, columns)) : shaped(g)).mul_(1e-5);
  }
  at::Tensor weights(int64_t out, int64_t in) {
    const at::Tensor w = normal(out, in);
    if (kind_ == "lognormal") w.mul_(1.5).exp_();
    return (kind_ == "positive" ? w.abs_() : w).div_(16);
  }

 private:
  at::TensorOptions options() const { return at::TensorOptions(device_).dtype(at::kFloat); }
  at::Tensor normal(int64_t rows, int64_t columns) { return at::randn({rows, columns}, generator_, options()); }
  at::Tensor kept(int64_t rows, int64_t columns) { return at::rand({rows, columns}, generator_, options()) < 0.5; }

  at::Tensor shaped(at::Tensor x) {
    if (kind_ == "lognormal") return normal(x.size(0), x.size(1)).sign_().mul_(x.mul_(3).exp_());
    if (kind_ == "rows") return x.mul_(normal(x.size(0), 1).mul_(3).exp_());
    return kind_ == "positive" ? x.abs_() : x;
  }

  std::string kind_;
  at::Device device_;
  at::Generator generator_;
};

/// Σ rows[i]·factors[i] + bias; of a weight's gradient: gᵀ·x.
struct Operands {
  std::vector<at::Tensor> rows, factors;
  at::Tensor bias;  // undefined: none
  int64_t depth = 0;

  int64_t columns() const { return factors[0].size(1); }
};

Operands operands_of(const Shape& s, int64_t rows, Numbers& numbers) {
  Operands o;
  if (s.role == Role::weight_gradient) {
    o.rows = {numbers.gradients(rows, s.depths[0]).t()};
    o.factors = {numbers.activations(rows, s.columns)};
    o.depth = rows;
    return o;
  }
  for (const int64_t depth : s.depths) {
    const bool forward = s.role == Role::forward;
    o.rows.push_back(forward ? numbers.activations(rows, depth) : numbers.gradients(rows, depth));
    o.factors.push_back(forward ? numbers.weights(s.columns, depth).t() : numbers.weights(depth, s.columns));
    o.depth += depth;
  }
  if (s.role == Role::forward) o.bias = numbers.weights(1, s.columns).view(-1);
  return o;
}

void write_torchs(at::Tensor& to, const Operands& o) {
  o.bias.defined() ? at::addmm_out(to, o.bias, o.rows[0], o.factors[0]) : at::mm_out(to, o.rows[0], o.factors[0]);
  if (o.rows.size() == 2) to.addmm_(o.rows[1], o.factors[1]);
}

/// The product in float64, and Σ|x||w| + |bias|, which roundings go by.
struct Exact {
  at::Tensor value, sizes;

  explicit Exact(const Operands& o) {
    for (size_t i = 0; i < o.rows.size(); ++i) {
      at::Tensor a = o.rows[i].to(at::kDouble), b = o.factors[i].to(at::kDouble);
      add(value, at::mm(a, b));
      add(sizes, at::mm(a.abs_(), b.abs_()));
    }
    if (!o.bias.defined()) return;
    value.add_(o.bias);
    sizes.add_(o.bias.abs());
  }

 private:
  static void add(at::Tensor& sum, const at::Tensor& x) { sum = sum.defined() ? sum.add_(x) : x; }
};

struct Errors {
  double frobenius, bias;  // both relative; the bias away from zero

  Errors(const at::Tensor& got, const Exact& exact) {
    const at::Tensor off = got.to(at::kDouble).sub_(exact.value);
    frobenius = off.norm().item<double>() / exact.value.norm().item<double>();
    bias = (exact.value.sign() * off).sum().item<double>() / exact.value.abs().sum().item<double>();
  }
};

/// Throws unless every value is right within |error| ≤ share·Σ|x||w|, and all together within 2⁻²⁰: over arxiv's rows the first allows so
/// many roundings that a row might be left out, which is 1/rows of the whole at least.
void check(const at::Tensor& got, const Exact& exact, int64_t depth, const char* name) {
  // Two pieces leave 2⁻²² of each factor and of their product; eight cut-off steps of tensor cores; a rounding a chunk of 32.
  const double share = 3 * 0x1p-22 + (static_cast<double>(depth) / 32 + 8) * 0x1p-23;
  const double over = ((got.to(at::kDouble) - exact.value).abs_() / (exact.sizes * share + 0x1p-126)).max().item<double>();
  if (!(over <= 1)) fail("bench", fmt::format("{} must be right within rounding", name), fmt::format("{:.2f} times as much", over));
  const double whole = Errors(got, exact).frobenius;
  if (!(whole <= 0x1p-20)) fail("bench", fmt::format("{} must be right within 2^-20 as a whole", name), fmt::format("{:.1e}", whole));
}

/// Times and errors of our product; none of them where torch's own serves.
struct Own {
  bool split = false;
  double seconds = 0, cut = 0;  // cut: the weights into pieces, once for all stretches of rows
  std::optional<Errors> errors;

  Own(const Shape& s, const Operands& o, const Exact& exact, int64_t rows, int repeat) {
    at::Tensor to = at::zeros({o.rows[0].size(0), o.columns()}, o.factors[0].options());
    if (s.role == Role::weight_gradient) {
      split = splits_gradient(o.rows[0], o.factors[0]);
      if (split) run(s, o, exact, to, repeat, [&] { split_gradient_(to, o.rows[0], o.factors[0], /*add=*/false); });
      return;
    }
    const RowProduct product(o.factors, o.bias, rows);
    split = product.is_split();
    if (!split) return;
    run(s, o, exact, to, repeat, [&] { product.write(to, o.rows); });
    cut = time_of([&] { RowProduct(o.factors, o.bias, rows); }, to.device(), repeat);
  }

 private:
  template <class F>
  void run(const Shape& s, const Operands& o, const Exact& exact, const at::Tensor& to, int repeat, const F& write) {
    write();
    check(to, exact, o.depth, s.name);
    errors.emplace(to, exact);
    seconds = time_of(write, to.device(), repeat);
  }
};

std::string milliseconds(double seconds) { return seconds == 0 ? "" : fmt::format("{:.3f} ms", seconds * 1e3); }

/// "169343 × (128 + 128) → 256"; of a weight's gradient "256 × 169343 → 128".
std::string sizes_text(const Shape& s, int64_t rows) {
  if (s.role == Role::weight_gradient) return fmt::format("{} × {} → {}", s.depths[0], rows, s.columns);
  if (s.depths.size() == 1) return fmt::format("{} × {} → {}", rows, s.depths[0], s.columns);
  return fmt::format("{} × ({} + {}) → {}", rows, s.depths[0], s.depths[1], s.columns);
}

std::vector<std::string> bench_shape(const Shape& s, int64_t hidden, const BenchProductCommand& c, Numbers& numbers,
                                     ordered_json& results) {
  const Operands o = operands_of(s, c.rows, numbers);
  const Exact exact(o);
  const Own own(s, o, exact, c.rows, c.repeat);
  at::Tensor to = at::empty({o.rows[0].size(0), o.columns()}, o.factors[0].options());
  write_torchs(to, o);
  const Errors errors(to, exact);
  const double theirs = time_of([&] { write_torchs(to, o); }, to.device(), c.repeat);
  ordered_json line{{"hidden", hidden}, {"product", s.name}, {"depths", s.depths}, {"columns", s.columns}, {"split", own.split}};
  std::vector<std::string> row{std::to_string(hidden), s.name, sizes_text(s, c.rows)};
  const auto shown = [](const Errors& e) { return std::vector{fmt::format("{:.1e}", e.frobenius), fmt::format("{:+.0e}", e.bias)}; };
  std::vector<std::string> own_errors{"", ""};
  if (own.split) {
    line["seconds"] = own.seconds, line["ratio"] = own.seconds / theirs;
    if (own.cut > 0) line["cut_seconds"] = own.cut;
    line["error"] = own.errors->frobenius, line["bias"] = own.errors->bias;
    row.insert(row.end(), {milliseconds(own.seconds), milliseconds(own.cut)});
    own_errors = shown(*own.errors);
  } else {
    row.insert(row.end(), {"torch's own", ""});
  }
  line["torch_seconds"] = theirs, line["torch_error"] = errors.frobenius, line["torch_bias"] = errors.bias;
  row.insert(row.end(), {milliseconds(theirs), own.split ? fmt::format("{:.2f}x", own.seconds / theirs) : ""});
  for (const std::vector<std::string>& pair : {own_errors, shown(errors)}) row.insert(row.end(), pair.begin(), pair.end());
  results.push_back(std::move(line));
  return row;
}

void run_bench_product(const BenchProductCommand& c) {
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  if (!at::hasCUDA()) fail("bench", "products need a GPU that torch can use", "none");
  TrainOptions options;
  options.device = "cuda";
  const Tf32Guard full_precision(options);
  Numbers numbers(c.data);
  ordered_json results = ordered_json::array();
  std::vector<std::vector<std::string>> table{
      {"hidden", "product", "sizes", "ours", "cutting", "torch", "of torch", "error", "bias", "torch's error", "torch's bias"}};
  for (const int64_t hidden : {128, 256}) {
    for (const Shape& s : shapes_of(hidden)) table.push_back(bench_shape(s, hidden, c, numbers, results));
  }
  if (c.json != "-") {
    fmt::print("{} rows, {} data, TF32 off; {}\n\n", grouped(c.rows), c.data, gpu_name());
    print_table(table);
  }
  if (!c.json.empty())
    write_json(c.json, {{"rows", c.rows}, {"data", c.data}, {"machine", machine_json("cuda")}, {"results", results}}, "bench");
}

}  // namespace

void add_bench_product(CLI::App& bench) {
  const auto c = std::make_shared<BenchProductCommand>();
  CLI::App* product =
      bench.add_subcommand("product", "Float32 products of a training step on tensor cores beside cuBLAS, with their errors");
  product->add_option("--rows", c->rows, "Rows of activations and gradients")->transform(whole_number(1, 1 << 24))->capture_default_str();
  product->add_option("--data", c->data, "What the numbers are like")
      ->check(CLI::IsMember({"normal", "relu", "lognormal", "rows", "positive"}))
      ->capture_default_str();
  product->add_option("--repeat", c->repeat, "Timed runs of which the median counts")->check(CLI::Range(1, 100000))->capture_default_str();
  product->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
  product->footer(
      "\nNeeds a CUDA device. The products of GraphSAGE's three layers (128 features, 40 classes) at 128 and 256 hidden channels, TF32\n"
      "off on both sides. On Hopper each factor is cut into two f16 pieces; elsewhere, and below 2048 rows, torch's own serves.\n"
      "Checked first: |error| against float64 within (3·2^-22 + (depth/32 + 8)·2^-23)·Σ|x||w|, and 2^-20 of the whole.\n"
      "  cutting  the weights into pieces, once a layer\n"
      "  error    relative Frobenius error against float64\n"
      "  bias     Σ sign(exact)·error / Σ|exact|: below zero where sums are cut off toward zero\n"
      "  --data   normal; relu: those above 0, half of them dropped, the others doubled; lognormal: ± exp(3·normal), weights\n"
      "           exp(1.5·normal)/16; rows: normal, each row times exp(3·normal); positive: |normal|. Gradients are 1e-5 as large.\n"
      "\nExamples:\n  satchel bench product\n  satchel bench product --data positive --json product.json");
  product->callback([c] { run_bench_product(*c); });
}

}  // namespace satchel::tool
