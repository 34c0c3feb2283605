#include "satchel/autograd/adaptive.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "satchel/autograd/bit_shares.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/step.h"
#include "satchel/autograd/swap.h"
#include "satchel/core/error.h"
#include "satchel/tensor/mixed.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Input pixels a sample: all dimensions after samples and channels.
int64_t pixels_of(const at::Tensor& x) {
  return std::accumulate(x.sizes().begin() + std::min<int64_t>(x.dim(), 2), x.sizes().end(), int64_t{1}, std::multiplies<>());
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Numbers about one tensor. While the tensor lives its memory is its own, and its version tells of changes. They are written, read and
/// given back on one stream.
struct PassedOn {
  WeakTensor tensor;
  const void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  uint32_t version;
  std::optional<c10::Stream> stream;
  at::Tensor numbers;

  PassedOn(const at::Tensor& x, at::Tensor found)
      : tensor(x.getIntrusivePtr()),
        data(x.const_data_ptr()),
        sizes(x.sizes().vec()),
        strides(x.strides().vec()),
        type(x.scalar_type()),
        version(x._version()),
        stream(current_stream(x)),
        numbers(std::move(found)) {}

  /// x is that tensor, or shares its memory and version as a detached one does.
  bool is_of(const at::Tensor& x) const {
    return !tensor.expired() && x.const_data_ptr() == data && !x.is_inference() && x._version() == version && x.scalar_type() == type &&
           x.sizes() == at::IntArrayRef(sizes) && x.strides() == at::IntArrayRef(strides) && current_stream(x) == stream;
  }
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

void pass_on_ranges(const at::Tensor& x, at::Tensor ranges) {
  if (!x.is_inference()) passed().ranges.emplace(x, std::move(ranges));  // those have no versions
}
void pass_on_squares(const at::Tensor& g, at::Tensor squares) {
  if (!g.is_inference()) passed().squares.emplace(g, std::move(squares));
}

struct AdaptiveSave::Kept {
  MixedPacked mixed;  // its bytes stand in `swapped` where that is defined
  Packed whole;       // where nothing can be shared out: no values, no samples, or 32 bits
  Swapped swapped;

  std::shared_ptr<BitShares> shares;
  int64_t layer = -1;
  at::Tensor ranges;  // ‖R_n‖², where the gradient will be told
  double factor = 1;

  bool is_mixed() const { return mixed.spec.bits <= kMostMixed && !whole.bytes.defined(); }
  const std::vector<int64_t>& shape() const { return is_mixed() ? mixed.shape : whole.shape; }

  MixedPacked packed() const {
    MixedPacked p = mixed;
    if (swapped.defined()) p.bytes = swapped.bytes();
    return p;
  }
};

AdaptiveSave::AdaptiveSave(const at::Tensor& x, const Saving& saving, const Keep& keep, const at::Tensor& given) {
  const auto kept = std::make_shared<Kept>();
  const at::Tensor known = take(passed().ranges, x);
  const CodecSpec& spec = keep.spec;
  const at::Tensor seed = given.defined() ? given : fresh_seed(x.device());
  kept_ = kept;
  if (x.dim() == 0 || x.numel() == 0 || spec.bits == kKeep) {
    kept->whole = pack(x.detach(), spec, seed);
    return;
  }
  const int64_t samples = x.size(0), values = x.numel() / samples;
  BitShare share{static_cast<double>(spec.bits), {}, -1};
  if (keep.kind == Kind::norm) {
    share.mean_bits = norm_bits(spec, values, saving);
  } else if (saving.shares != nullptr) {
    share = saving.shares->input(saving.name, samples, values, share.mean_bits, x.device());
  }
  const bool tells = share.layer >= 0 && saving.shares->wants_gradient(share.layer);
  kept->mixed = pack_mixed(x.detach(), spec, seed, share.mean_bits, share.weights, tells ? &kept->ranges : nullptr,
                           spec.block == kRangeBlock ? known : at::Tensor());
  if (tells) {
    kept->shares = saving.shares;
    kept->layer = share.layer;
    kept->factor = static_cast<double>(std::min(spec.block, values)) / (4.0 * static_cast<double>(pixels_of(x)));
  }
  if (keep.offload) kept->swapped = Swapped(std::exchange(kept->mixed.bytes, {}));
}

AdaptiveSave AdaptiveSave::of_norm(MixedPacked packed, const Keep& keep) {
  passed().ranges.reset();
  const auto kept = std::make_shared<Kept>();
  kept->mixed = std::move(packed);
  if (keep.offload) kept->swapped = Swapped(std::exchange(kept->mixed.bytes, {}));
  AdaptiveSave save;
  save.kept_ = kept;
  return save;
}

double AdaptiveSave::norm_bits(const CodecSpec& spec, int64_t values, const Saving& saving) {
  return saving.shares == nullptr ? spec.bits : saving.shares->norm(values, spec.bits);
}

MixedPacked AdaptiveSave::packed() const { return kept_->packed(); }

at::Tensor AdaptiveSave::samples(int64_t first, int64_t last) const {
  return kept_->is_mixed() ? unpack_mixed(kept_->packed(), first, last) : unpack_samples(kept_->whole, first, last);
}

at::Tensor AdaptiveSave::restore() const { return kept_->is_mixed() ? unpack_mixed(kept_->packed()) : unpack(kept_->whole); }

void AdaptiveSave::fetch() const {
  if (kept_->swapped.defined()) kept_->swapped.fetch();
}

void AdaptiveSave::gradient_seen(const at::Tensor& g, double reach) const {
  if (kept_->shares == nullptr || !g.defined() || g.dim() == 0 || g.size(0) != kept_->ranges.numel()) return;
  const at::Tensor known = take(passed().squares, g), squares = known.defined() ? known : squares_of(g.detach());
  kept_->shares->saw_gradient(kept_->layer, at::mul(squares, reach), kept_->ranges, kept_->factor);
}

std::vector<int64_t> AdaptiveSave::shape() const { return kept_->shape(); }

void AdaptiveSave::report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const {
  const std::vector<int64_t>& shape = kept_->shape();
  const int64_t values = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  const at::Tensor& bytes = kept_->is_mixed() ? kept_->mixed.bytes : kept_->whole.bytes;
  const int bits = kept_->is_mixed() ? kept_->mixed.spec.bits : kept_->whole.spec.bits;
  lines.push_back({name, kind, shape, bits, kept_->swapped.defined() ? kept_->swapped.size() : bytes.numel(), 4 * values});
  if (kept_->ranges.defined()) {
    const auto kept = static_cast<int64_t>(kept_->ranges.nbytes());
    lines.push_back({name, "statistics", {kept_->ranges.numel()}, 64, kept, kept});
  }
}

}  // namespace satchel
