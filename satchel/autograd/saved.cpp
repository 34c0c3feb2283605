#include "satchel/autograd/saved.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "satchel/autograd/bit_allocator.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/save_watch.h"
#include "satchel/autograd/step.h"
#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/per_sample.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

/// Input pixels a sample: all dimensions after samples and channels.
int64_t pixels_of(const at::Tensor& x) { return c10::multiply_integers(x.sizes().slice(std::min<size_t>(x.sizes().size(), 2))); }

/// Numbers about one tensor, which are written, read and given back on its key's stream.
struct PassedOn {
  WeakTensor tensor;
  MemoryKey key;
  at::Tensor numbers;

  /// x is that tensor, or shares its memory and version as a detached one does.
  bool is_of(const at::Tensor& x) const { return !tensor.expired() && !x.is_inference() && MemoryKey(x) == key; }
};

struct Passed {
  std::optional<PassedOn> ranges, squares;
};
Passed& passed() { return step_context().part<Passed>(); }

/// What was passed on about x, if anything was; forgotten in any case.
at::Tensor take(std::optional<PassedOn>& found, const at::Tensor& x) {
  const std::optional<PassedOn> one = std::exchange(found, std::nullopt);
  return one && one->is_of(x) ? one->numbers : at::Tensor();
}

/// Squared norm of each sample, float32[n], in one pass.
at::Tensor squares_of(const at::Tensor& g) {
  if (g.dim() < 2) return g.to(at::kFloat).square();
  std::vector<int64_t> rest(static_cast<size_t>(g.dim()) - 1);
  std::iota(rest.begin(), rest.end(), 1);
  return at::linalg_vector_norm(g, 2, rest, /*keepdim=*/false, at::kFloat).square_();
}

}  // namespace

MemoryKey::MemoryKey(const at::Tensor& x)
    : data(x.const_data_ptr()),
      sizes(x.sizes().vec()),
      strides(x.strides().vec()),
      type(x.scalar_type()),
      version(x._version()),
      stream(current_stream(x)) {}

void pass_on_ranges(const at::Tensor& x, at::Tensor ranges) {
  if (!x.is_inference()) passed().ranges = {WeakTensor(x.getIntrusivePtr()), MemoryKey(x), std::move(ranges)};
}
void pass_on_squares(const at::Tensor& g, at::Tensor squares) {
  if (!g.is_inference()) passed().squares = {WeakTensor(g.getIntrusivePtr()), MemoryKey(g), std::move(squares)};
}

void AllocatorNote::tell(const at::Tensor& g, double weights_per_value) const {
  if (allocator == nullptr || !g.defined() || g.dim() == 0 || g.size(0) != ranges.numel()) return;
  const at::Tensor known = take(passed().squares, g), squares = known.defined() ? known : squares_of(g.detach());
  allocator->saw_gradient(layer, at::mul(squares, weights_per_value), ranges, factor);
}

void AllocatorNote::report(const std::string& name, std::vector<SavedTensor>& lines) const {
  if (ranges.defined()) lines.push_back(saved_line(name, "statistics", ranges));
}

Saved::Saved(const at::Tensor& x, const SavePolicy& saving, const Keep& keep, const at::Tensor& given) : cuda_(x.is_cuda()) {
  show_save(saving.name, keep.kind, x);
  const CodecSpec& spec = keep.spec;
  const at::Tensor seed = given.defined() ? given : fresh_seed(x.device());
  const at::Tensor known = keep.per_sample_bits ? take(passed().ranges, x) : at::Tensor();
  if (!keep.per_sample_bits || x.dim() == 0 || x.numel() == 0 || spec.bits == kKeep) {
    packed_ = pack(x.detach(), spec, seed);
    return;
  }
  const int64_t samples = x.size(0), values = x.numel() / samples;
  BitAllocation given_bits{static_cast<double>(spec.bits), {}, -1};
  if (keep.kind == Kind::norm) {
    given_bits.mean_bits = norm_bits(spec, values, saving);
  } else if (saving.allocator != nullptr) {
    given_bits = saving.allocator->input(saving.name, samples, values, given_bits.mean_bits, x.device());
  }
  const bool tells = given_bits.layer >= 0 && saving.allocator->wants_gradient(given_bits.layer);
  packed_ = pack_per_sample(x.detach(), spec, seed, given_bits.mean_bits, given_bits.weights, tells ? &note_.ranges : nullptr,
                            spec.block == kRangeBlock ? known : at::Tensor());
  if (tells) {
    note_.allocator = saving.allocator;
    note_.layer = given_bits.layer;
    note_.factor = static_cast<double>(std::min(spec.block, values)) / (4.0 * static_cast<double>(pixels_of(x)));
  }
  if (keep.offload) offloaded_ = HostOffload(std::exchange(packed_.bytes, {}));
}

Saved Saved::of(Packed packed, const Keep& keep) {
  if (keep.per_sample_bits) passed().ranges.reset();
  Saved save;
  save.cuda_ = packed.bytes.is_cuda();
  save.packed_ = std::move(packed);
  if (keep.offload && keep.per_sample_bits) save.offloaded_ = HostOffload(std::exchange(save.packed_.bytes, {}));
  return save;
}

Saved Saved::reference(const at::Tensor& x) {
  Saved save;
  save.cuda_ = x.is_cuda();
  save.reference_ = std::make_shared<torch::autograd::SavedVariable>(x.detach(), /*is_output=*/false);
  return save;
}

double Saved::norm_bits(const CodecSpec& spec, int64_t values, const SavePolicy& saving) {
  return saving.allocator == nullptr ? spec.bits : saving.allocator->norm(values, spec.bits);
}

std::vector<int64_t> Saved::shape() const { return is_reference() ? reference_->unpack().sizes().vec() : packed_.shape; }

Packed Saved::packed() const {
  Packed packed = packed_;
  if (offloaded_.defined()) packed.bytes = offloaded_.bytes();
  return packed;
}

at::Tensor Saved::restore() const { return is_reference() ? reference_->unpack() : unpack(packed()); }

at::Tensor Saved::samples(int64_t first, int64_t last) const {
  return is_reference() ? reference_->unpack().narrow(0, first, last - first) : unpack_samples(packed(), first, last);
}

std::vector<at::Tensor> Saved::transposed_products(const std::vector<at::Tensor>& gs) const {
  std::vector<at::Tensor> products;
  if (is_packed() && !has_bits_per_sample()) {
    for (const at::Tensor& g : gs) products.push_back(transposed_product(packed_, g));
    return products;
  }
  const at::Tensor x = is_reference() ? restore() : restore().to(gs.front().scalar_type());
  const at::Tensor rows = x.reshape({-1, x.size(-1)}).t();
  for (const at::Tensor& g : gs) products.push_back(product(rows, g.reshape({-1, g.size(-1)})));
  return products;
}

void Saved::fetch() const {
  if (offloaded_.defined()) offloaded_.fetch();
}

void Saved::report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const {
  if (!is_packed()) return;
  satchel::report(packed_, name, kind, lines);
  if (offloaded_.defined()) lines.back().bytes = offloaded_.size();  // bits per sample have no seed's line after it
  note_.report(name, lines);
}

void report(const Packed& packed, const std::string& name, const char* kind, std::vector<SavedTensor>& lines) {
  const int64_t values = c10::multiply_integers(packed.shape), bytes = packed.bytes.defined() ? packed.bytes.numel() : 0;
  lines.push_back({name, kind, packed.shape, packed.spec.bits, bytes, 4 * values});
  if (packed.seed.defined()) lines.push_back(saved_line(name, "seed", packed.seed));
}

}  // namespace satchel
