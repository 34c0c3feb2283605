// What layers that share one save need beside the codec (python/satchel/convert.py): which method keeps what, parts of codes, the gates of
// activation and dropout, and on CUDA the fused passes of a norm and its activation (kernels/cuda/epilogue.h).
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "satchel/core/keep.h"
#include "satchel/kernels/chunks.h"
#include "satchel/kernels/epilogue_codes.h"
#include "satchel/stable/arguments.h"

namespace satchel::stable {
namespace {

void append(Numbers& to, const CodecSpec& spec) {
  const SpecNumbers n = numbers_of(spec);
  to.insert(to.end(), {n.bits, n.block, n.per_sample, n.levels, n.rounding, n.header, n.side, n.transform, n.p0, n.p1, n.p2});
}

/// Is it torch's own, and do layers read what the one before them keeps? Throws where Python's layers do not know what the method asks for.
Numbers method_flags(const std::string& text) {
  constexpr const char* op = "convert";
  const Method method = parse_method(text);
  validate(method, op);
  if (allocates_bits(method)) fail(op, "method must give all samples the same bits (adaptive=no, no mean_bits, no budget)", text);
  for (const CodecSpec* spec : {&method.input, &method.norm}) {
    if (!std::holds_alternative<Identity>(spec->transform)) fail(op, "method must have no projection and no low-pass", text);
  }
  return {is_baseline(method), reads_producer(method)};
}

/// For every Keep: kind, of, numbers, and the eleven of its spec. `site`: role, norm, activation, adds_skip, drops, next_reads, image,
/// width, count, as core/keep.h has them.
Numbers keeps(const std::string& text, const Numbers& s) {
  constexpr const char* op = "keeps";
  if (s.size() != 9) fail(op, "a site has 9 numbers", s.size());
  if (s[0] < 0 || s[0] > static_cast<int64_t>(Role::derivative)) fail(op, "role must be 0 to 4", s[0]);
  if (s[1] < 0 || s[1] > static_cast<int64_t>(Norm::layer)) fail(op, "norm must be 0 to 2", s[1]);
  if (s[2] < 0 || s[2] > static_cast<int64_t>(Activation::elu)) fail(op, "activation must be 0 to 3", s[2]);
  Site site{static_cast<Role>(s[0]), static_cast<Norm>(s[1]), static_cast<Activation>(s[2])};
  site.adds_skip = s[3] != 0;
  site.drops = s[4] != 0;
  site.next_reads = s[5] != 0;
  site.image = s[6] != 0;
  site.width = s[7];
  site.count = s[8];
  Numbers all;
  for (const Keep& keep : keeps_of(parse_method(text), site)) {
    all.insert(all.end(), {static_cast<int64_t>(keep.kind), static_cast<int64_t>(keep.of), keep.numbers});
    append(all, keep.spec);
  }
  return all;
}

/// Has a code of this spec as many bits as the method gives what layers with weights read?
bool serves(const std::string& text, const Numbers& spec, bool after_relu) {
  return serves_weights(parse_method(text), spec_of_list(spec, "serves_weights"), after_relu);
}

CodecLayout coded_layout(const Numbers& shape, DType type, const Numbers& spec, int64_t channels, int64_t inner, const char* op) {
  const CodecLayout layout = plan_of(shape, type, spec_of_list(spec, op), channels, inner, op);
  if (layout.projected || (layout.coding != Coding::block && layout.coding != Coding::side))
    fail(op, "spec must be a block or a side code");
  return layout;
}

/// Values [first, last), in the order of the codes.
Tensor unpack_part(const Tensor& given, const Numbers& shape, ScalarType dtype, const Numbers& spec, int64_t channels, int64_t inner,
                   int64_t first, int64_t last) {
  constexpr const char* op = "unpack_part";
  const DType type = dtype_of(dtype, op);
  const CodecLayout layout = coded_layout(shape, type, spec, channels, inner, op);
  check_bytes(given, layout.at.total, op);
  if (first < 0 || first > last || last > layout.values) fail(op, "values must lie within 0 to " + std::to_string(layout.values), last);
  const Place place(given, op);
  const Tensor bytes = aligned(given);
  const auto [begin, end] = decode_stretch(layout, first, last, place.cuda());
  Tensor line = new_line(given, end - begin, dtype);
  if (first < last) decode_part(layout, bytes, line.data_ptr(), type, begin, end, place);
  return torch::stable::narrow(line, 0, first - begin, last - first);
}

/// One bit a value of a side code: did it pass the ReLU?
Tensor side_on(const Tensor& given, const Numbers& shape, const Numbers& spec, int64_t channels, int64_t inner) {
  constexpr const char* op = "side_on";
  const CodecLayout layout = coded_layout(shape, DType::f32, spec, channels, inner, op);
  if (layout.coding != Coding::side) fail(op, "spec must be a side code");
  check_bytes(given, layout.at.total, op);
  const Place place(given, op);
  const Tensor bytes = aligned(given), bits = new_bytes(given, ceil_div(layout.values, 8));
  if (layout.values == 0) return bits;
  const uint8_t* codes = static_cast<const uint8_t*>(bytes.const_data_ptr()) + layout.at.codes;
  auto* to = static_cast<uint8_t*>(bits.data_ptr());
  if (place.cuda()) {
    cuda::side_on(layout.side, codes, to, place.stream());
  } else {
    for_chunks(layout.values, kLongestChunk,
               [&](int64_t first, int64_t last) { best_cpu_kernel().side_on(layout.side, codes, to, first, last); });
  }
  return bits;
}

/// x, whose memory has no gap, times what activation and dropout make of it: (on ? 1 : slope), and 0 or 1/(1 − dropout), redrawn from the
/// seed. `on` is a bit a value from x's first on; without it all are on. `origin`: the number of x's first value in the whole tensor.
Tensor gate(const Tensor& x, const std::optional<Tensor>& on, const std::optional<Tensor>& seed, double dropout, double slope,
            int64_t origin) {
  constexpr const char* op = "gate";
  const DType type = dtype_of(x.scalar_type(), op);
  const Chain chain = make_chain(x.numel(), 1, dropout, slope, origin, op);
  if (chain.drop > 0 && !seed) fail(op, "dropout needs a seed", dropout);
  if (seed) check_seed(*seed, x, op);
  if (on) check_bytes(*on, ceil_div(x.numel(), 8), op);
  const Numbers shape = sizes_of(x), strides = strides_of(x);
  check_strides(shape, strides, op);
  const Place place(x, op);
  if (x.numel() == 0) return torch::stable::clone(x);
  const auto* bits = on ? static_cast<const uint8_t*>(on->const_data_ptr()) : nullptr;
  const auto* number = seed ? static_cast<const uint64_t*>(seed->const_data_ptr()) : nullptr;
  if (place.cuda()) {
    const Tensor out = empty_strided(x, shape, strides, x.scalar_type());
    cuda::chain_back(chain, x.const_data_ptr(), type, bits, number, out.data_ptr(), place.stream());
    return out;
  }
  const Tensor from = type == DType::f32 ? x : torch::stable::to(x, ScalarType::Float);
  const Tensor out = empty_strided(x, shape, strides, ScalarType::Float);
  const auto* values = static_cast<const float*>(from.const_data_ptr());
  auto* made = static_cast<float*>(out.data_ptr());
  for_chunks(chain.values, kChunk, [&](int64_t first, int64_t last) {
    best_cpu_kernel().chain_back(chain, values, bits, number != nullptr ? *number : 0, made, first, last);
  });
  return type == DType::f32 ? out : torch::stable::to(out, x.scalar_type());
}

// The fused passes of a norm and its ReLU, of rows × channels on CUDA.

/// The code of x̂, where the kernels serve it.
std::optional<CodecLayout> act_layout(int64_t rows, int64_t channels, const Numbers& spec, const char* op) {
  return cuda::compiled() ? norm_act_layout(rows, channels, spec_of_list(spec, op), op) : std::nullopt;
}
/// … or throws.
CodecLayout served_layout(int64_t rows, int64_t channels, const Numbers& spec, const char* op) {
  const auto layout = act_layout(rows, channels, spec, "norm_act");
  if (!layout) fail(op, "norm_act_fits must be true of sizes and spec", channels);
  return *layout;
}

bool norm_act_fits(int64_t rows, int64_t channels, const Numbers& spec) { return act_layout(rows, channels, spec, "norm_act").has_value(); }

void check_rows(const Tensor& x, const char* op) {
  dtype_of(x.scalar_type(), op);
  if (!x.is_cuda() || x.dim() != 2 || !x.is_contiguous()) fail(op, "tensor must be contiguous rows x channels on CUDA", x.dim());
}

cuda::NormActCode act_code(const CodecLayout& layout, const Tensor& bytes, const uint64_t* seed, double dropout, const char* op) {
  return norm_act_code(layout, bytes.data_ptr(), make_chain(layout.values, layout.channels, dropout, 0, 0, op), seed);
}

/// The code of (x − mean)·rstd, and relu(γ·x̂ + β) to `out`, which has x's sizes and type and may be x.
Tensor norm_act(const Tensor& x, Tensor out, const Tensor& mean, const Tensor& rstd, const Tensor& gamma, const Tensor& beta,
                const Tensor& seed, const Numbers& spec) {
  constexpr const char* op = "norm_act";
  check_rows(x, op);
  check_rows(out, op);
  check_seed(seed, x, op);
  if (out.scalar_type() != x.scalar_type() || out.numel() != x.numel() || out.size(1) != x.size(1)) fail(op, "out must be as x is");
  const CodecLayout layout = served_layout(x.size(0), x.size(1), spec, op);
  const Place place(x, op);
  const Tensor bytes = new_bytes(x, layout.at.total), scratch = new_bytes(x, cuda::norm_act_scratch_bytes());
  const cuda::NormParameters with{channel_numbers(mean, x, "mean", op), channel_numbers(rstd, x, "rstd", op),
                                  channel_numbers(gamma, x, "gamma", op), channel_numbers(beta, x, "beta", op)};
  const cuda::NormPass pass{x.const_data_ptr(), dtype_of(x.scalar_type(), op), with, out.data_ptr()};
  const auto* number = static_cast<const uint64_t*>(seed.const_data_ptr());
  cuda::norm_encode(act_code(layout, bytes, number, 0, op), pass, scratch.data_ptr(), place.stream());
  return bytes;
}

/// g, the gradient of relu(γ·x̂ + β), becomes that of x; gives the gradients of γ and β. `training`: the statistics were the batch's.
std::tuple<Tensor, Tensor> norm_act_back(Tensor g, const Tensor& bytes, const Tensor& rstd, const Numbers& spec, bool training,
                                         bool needs_x) {
  constexpr const char* op = "norm_act_back";
  check_rows(g, op);
  const CodecLayout layout = served_layout(g.size(0), g.size(1), spec, op);
  check_bytes(bytes, layout.at.total, op);
  const Place place(g, op);
  const DType type = dtype_of(g.scalar_type(), op);
  const Tensor gamma = new_line(g, g.size(1), ScalarType::Float);
  const Tensor beta = new_line(g, g.size(1), ScalarType::Float);
  const Tensor scratch = new_bytes(g, cuda::norm_act_scratch_bytes());
  const cuda::NormActCode code = act_code(layout, bytes, nullptr, 0, op);
  auto *sum_g = static_cast<float*>(beta.data_ptr()), *sum_gx = static_cast<float*>(gamma.data_ptr());
  cuda::norm_sums(code, {g.const_data_ptr(), type, sum_g, sum_gx, scratch.data_ptr()}, place.stream());
  if (needs_x) {
    cuda::NormBack back{g.const_data_ptr(), type, nullptr, channel_numbers(rstd, g, "rstd", op), sum_g, sum_gx, nullptr, g.data_ptr()};
    if (!training) back.sum_g = back.sum_gx = nullptr;
    cuda::norm_back(code, back, place.stream());
  }
  return {gamma, beta};
}

/// Rows [first, last) of relu(γ·x̂ + β), dropped as the seed says.
Tensor norm_act_input(const Tensor& bytes, const std::optional<Tensor>& seed, int64_t rows, int64_t channels, const Numbers& spec,
                      double dropout, int64_t first, int64_t last, ScalarType dtype) {
  constexpr const char* op = "norm_act_input";
  const CodecLayout layout = served_layout(rows, channels, spec, op);
  if (first < 0 || first % kGroup != 0 || first > last || last > rows)
    fail(op, "rows must lie within the code, from a multiple of 8 on", first);
  if (dropout > 0 && !seed) fail(op, "dropout needs a seed", dropout);
  check_bytes(bytes, layout.at.total, op);
  const Place place(bytes, op);
  const Tensor z = empty_strided(bytes, {last - first, channels}, {channels, 1}, dtype);
  const auto* number = seed ? static_cast<const uint64_t*>(seed->const_data_ptr()) : nullptr;
  if (first < last)
    cuda::norm_act_input(act_code(layout, bytes, number, dropout, op), first, last, z.data_ptr(), dtype_of(dtype, op), place.stream());
  return z;
}

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY_FRAGMENT(satchel_stable, m) {
  m.def("method_flags(str method) -> int[]");
  m.def("keeps(str method, int[] site) -> int[]");
  m.def("serves(str method, int[] spec, bool after_relu) -> bool");
  m.def(
      "unpack_part(Tensor bytes, int[] shape, ScalarType dtype, int[] spec, int channels, int inner, int first, int last) "
      "-> Tensor");
  m.def("side_on(Tensor bytes, int[] shape, int[] spec, int channels, int inner) -> Tensor");
  m.def("gate(Tensor x, Tensor? on, Tensor? seed, float dropout, float slope, int origin=0) -> Tensor");
  m.def("norm_act_fits(int rows, int channels, int[] spec) -> bool");
  m.def(
      "norm_act(Tensor x, Tensor(a!) out, Tensor mean, Tensor rstd, Tensor gamma, Tensor beta, Tensor seed, int[] spec) "
      "-> Tensor");
  m.def("norm_act_back(Tensor(a!) g, Tensor bytes, Tensor rstd, int[] spec, bool training, bool needs_x) -> (Tensor, Tensor)");
  m.def(
      "norm_act_input(Tensor bytes, Tensor? seed, int rows, int channels, int[] spec, float dropout, int first, int last, "
      "ScalarType dtype) -> Tensor");
}

#define SATCHEL_IMPLEMENT_LAYERS(m)                                \
  m.impl("unpack_part", TORCH_BOX(&satchel::stable::unpack_part)); \
  m.impl("side_on", TORCH_BOX(&satchel::stable::side_on));         \
  m.impl("gate", TORCH_BOX(&satchel::stable::gate));

STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CPU, m){SATCHEL_IMPLEMENT_LAYERS(m)} STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m) {
  SATCHEL_IMPLEMENT_LAYERS(m)
  m.impl("norm_act", TORCH_BOX(&satchel::stable::norm_act));
  m.impl("norm_act_back", TORCH_BOX(&satchel::stable::norm_act_back));
  m.impl("norm_act_input", TORCH_BOX(&satchel::stable::norm_act_input));
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) {
  m.impl("method_flags", TORCH_BOX(&satchel::stable::method_flags));
  m.impl("keeps", TORCH_BOX(&satchel::stable::keeps));
  m.impl("serves", TORCH_BOX(&satchel::stable::serves));
  m.impl("norm_act_fits", TORCH_BOX(&satchel::stable::norm_act_fits));
}
