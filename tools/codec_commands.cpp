// info, presets, pack, unpack, inspect.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "satchel/data/npy.h"
#include "satchel/kernels/cpu/cpu.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/tensor/file.h"
#include "satchel/tensor/pack.h"
#include "tools/quality.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

std::string shape_text(at::IntArrayRef shape) {
  if (shape.empty()) return "a single number";
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " × ") + grouped(size);
  return text;
}

/// The array as a tensor that owns its bytes.
at::Tensor load_tensor(const std::string& path, const char* op, const std::string& device) {
  auto array = std::make_shared<NpyArray>(read_npy(path));
  if (array->kind() != 'f' || array->item_bytes() > 4) {
    fail(op, path + ": values must be float32 or float16, as x.astype(numpy.float32) makes them", "'" + array->descr + "'");
  }
  at::Tensor x = tensor_over(array->data.data(), array->shape, array->strides(), array->item_bytes() == 4 ? at::kFloat : at::kHalf,
                             [array](void*) mutable { array.reset(); });
  return to_device(x.contiguous(), device, op);  // equal arrays give equal bytes, in whichever order they are stored
}

/// read_packed(), whose errors tell what is wrong but not always where.
Packed read_named(const std::string& path) {
  try {
    return read_packed(path);
  } catch (const Error& e) {
    const std::string what = e.what();
    throw Error(what.find(path) == std::string::npos ? what + ", in " + path : what);
  }
}

ordered_json info_json() {
  ordered_json kernels = ordered_json::array();
  for (const CpuKernels* k : cpu_kernels()) {
    kernels.push_back({{"name", k->name}, {"supported", k->supported()}, {"chosen", k == &best_cpu_kernel()}});
  }
  const std::string gpu = gpu_name();
  return {{"version", SATCHEL_VERSION},
          {"kernels", kernels},
          {"cuda_compiled", cuda::compiled()},
          {"gpu", gpu.empty() ? ordered_json(nullptr) : ordered_json(gpu)},
          {"torch", TORCH_VERSION},
          {"threads", at::get_num_threads()}};
}

void print_histogram(const std::vector<int64_t>& codes) {
  const int64_t most = std::max<int64_t>(1, *std::max_element(codes.begin(), codes.end()));
  int64_t all = 0;
  for (const int64_t n : codes) all += n;
  if (all == 0) return;
  fmt::print("codes\n");
  const size_t rows = std::min<size_t>(codes.size(), 32), per_row = codes.size() / rows;
  for (size_t row = 0; row < rows; ++row) {
    int64_t n = 0;
    for (size_t i = 0; i < per_row; ++i) n += codes[row * per_row + i];
    const std::string name = per_row == 1 ? std::to_string(row) : fmt::format("{}–{}", row * per_row, (row + 1) * per_row - 1);
    std::string bar;
    for (int64_t i = 0; i < std::min<int64_t>(40, n * 40 / (most * static_cast<int64_t>(per_row))); ++i) bar += "█";
    fmt::print("  {:>7}  {:6.2f} %  {}\n", name, 100.0 * static_cast<double>(n) / static_cast<double>(all), bar);
  }
}

void print_quality(const Quality& q, const CodecSpec& spec) {
  if (q.compared > 0) {
    fmt::print("error    {:.4f} of the values' root mean square (‖unpacked − x‖ / ‖x‖)\n", q.relative);
    if (spec.side == Side::one_sided || spec.side == Side::relu) {
      fmt::print("         {:.4f} for the values above 0, which pass the ReLU; the others only need their side\n", q.on_relative);
    }
    fmt::print("bias     {:+.6f} of the same, ± {:.6f} by chance\n", q.bias, q.bias_spread);
  }
  if (q.bad_values > 0 || q.bad_blocks > 0) {
    fmt::print("NaN, inf {} of the values; {} of {} blocks hold one and unpack to NaN\n", grouped(q.bad_values), grouped(q.bad_blocks),
               grouped(q.blocks));
  }
}

/// Codes for values that a ReLU follows keep little or nothing of a negative one.
void warn_of_negatives(const at::Tensor& x, const CodecSpec& spec, FILE* lines) {
  if (spec.side != Side::one_sided && spec.side != Side::relu) return;
  const auto negative = x.lt(0).sum().item<int64_t>();
  if (negative == 0) return;
  fmt::print(lines,
             "note: {} of {} values are negative, and this code keeps little of them: it is made for values that a ReLU follows. "
             "--spec bits=2 keeps values of every sign\n",
             grouped(negative), grouped(x.numel()));
}

double times_smaller(const at::Tensor& x, int64_t bytes) {
  return bytes == 0 ? 1.0 : static_cast<double>(x.numel() * x.element_size()) / static_cast<double>(bytes);
}

}  // namespace

CodecSpec spec_from(const std::string& text) {
  try {
    const CodecSpec spec = parse_spec(text);
    validate(spec, "spec");
    return spec;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

void run_info(bool json) {
  const ordered_json info = info_json();
  if (json) {
    fmt::print("{}\n", info.dump(2));
    return;
  }
  fmt::print("satchel  {}\n", SATCHEL_VERSION);
  for (const auto& k : info["kernels"]) {
    const char* note = k["chosen"].get<bool>() ? "chosen" : k["supported"].get<bool>() ? "supported" : "not on this CPU";
    fmt::print("{:<8} {:<8} {}\n", k == info["kernels"].front() ? "kernels" : "", k["name"].get<std::string>(), note);
  }
  const std::string gpu = gpu_name();
  fmt::print("CUDA     {}, {}\n", cuda::compiled() ? "compiled in" : "not compiled in", gpu.empty() ? "no GPU" : gpu);
  fmt::print("torch    {}\nthreads  {}\n", TORCH_VERSION, at::get_num_threads());
}

void run_presets(bool json) {
  ordered_json list = ordered_json::array();
  for (const Preset& p : presets()) {
    list.push_back({{"name", p.name}, {"summary", p.summary}, {"spec", describe(p.spec)}});
    if (!json) fmt::print("{:<10} {:<44} {}\n", p.name, describe(p.spec), p.summary);
  }
  if (json) fmt::print("{}\n", list.dump(2));
}

void run_pack(const CodecOptions& o) {
  const CodecSpec spec = spec_from(o.spec);
  check_apart("pack", "--output", o.output, "FILE", o.input);
  OutputFile file(o.output, "pack");
  const at::Tensor x = load_tensor(o.input, "pack", o.device);
  const Packed packed = pack(x, spec, o.seed);
  write_packed(packed, file.path());
  file.finish();
  const int64_t bytes = saved_bytes(packed);
  fmt::print(file.lines(), "{}: {}, {} bytes packed into {} with {}, {:.1f} times smaller\n", o.output, shape_text(x.sizes()),
             grouped(x.numel() * x.element_size()), grouped(bytes), to_string(spec), times_smaller(x, bytes));
  warn_of_negatives(x, spec, file.lines());
}

void run_unpack(const CodecOptions& o) {
  check_apart("unpack", "--output", o.output, "FILE", o.input);
  OutputFile file(o.output, "unpack");
  at::Tensor x = unpack(read_named(o.input));
  const bool bf16 = x.scalar_type() == at::kBFloat16;
  if (bf16) x = x.to(at::kFloat);
  x = x.contiguous();
  write_npy(file.path(), x.scalar_type() == at::kHalf ? "<f2" : "<f4", std::vector<int64_t>(x.sizes().vec()), x.const_data_ptr());
  file.finish();
  fmt::print(file.lines(), "{}: {}, {}{}\n", o.output, shape_text(x.sizes()), x.scalar_type() == at::kHalf ? "float16" : "float32",
             bf16 ? " (.npy has no bfloat16)" : "");
}

void run_inspect(const CodecOptions& o) {
  const CodecSpec spec = spec_from(o.spec);
  const at::Tensor x = load_tensor(o.input, "inspect", o.device);
  const Packed packed = pack(x, spec, o.seed);
  const Quality q = quality_of(x, packed, unpack(packed));
  const int64_t bytes = saved_bytes(packed), before = x.numel() * x.element_size();
  const double bits = x.numel() == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(x.numel());
  if (o.json) {
    const ordered_json out = {{"file", o.input},
                              {"shape", x.sizes().vec()},
                              {"spec", to_string(spec)},
                              {"seed", o.seed},
                              {"values", x.numel()},
                              {"bytes", bytes},
                              {"bytes_before", before},
                              {"bits_per_value", bits},
                              {"times_smaller", times_smaller(x, bytes)},
                              {"relative_error", q.relative},
                              {"relative_error_on", q.on_relative},
                              {"bias", q.bias},
                              {"bias_spread", q.bias_spread},
                              {"non_finite_values", q.bad_values},
                              {"non_finite_blocks", q.bad_blocks},
                              {"blocks", q.blocks},
                              {"codes", q.codes}};
    fmt::print("{}\n", out.dump(2, ' ', false, ordered_json::error_handler_t::replace));  // file names may be no UTF-8
    return;
  }
  fmt::print("file     {}: {}, {}\n", o.input, shape_text(x.sizes()), x.scalar_type() == at::kHalf ? "float16" : "float32");
  fmt::print("spec     {}\n", describe(spec));
  fmt::print("bytes    {} of {}: {:.2f} bits a value, {:.1f} times smaller\n", grouped(bytes), grouped(before), bits,
             times_smaller(x, bytes));
  print_quality(q, spec);
  if (!q.codes.empty()) print_histogram(q.codes);
}

}  // namespace satchel::tool
