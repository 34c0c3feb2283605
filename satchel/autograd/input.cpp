#include "satchel/autograd/input.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/step.h"
#include "satchel/core/stretch.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/project.h"
#include "satchel/tensor/split_product.h"

namespace satchel {

/// An input that a layer has packed, for all layers that read it.
struct OwnInput {
  Saved save;
  std::string name;  // of the layer that made it
  mutable std::weak_ptr<const char> reporter;
};

namespace {

/// An input that stands packed. The weak reference keeps the tensor's address from being given out again, not its memory.
struct LiveInput {
  WeakTensor tensor;
  const void* address;  // of that tensor
  MemoryKey memory;
  at::ScalarType type;  // packed in
  CodecSpec spec;
  bool per_sample_bits;
  std::shared_ptr<const StepClock> clock;  // of the run that packed it
  uint64_t era;                            // … and its step
  std::weak_ptr<const OwnInput> own = {};

  bool operator==(const LiveInput& o) const {
    return address == o.address && memory == o.memory && type == o.type && spec == o.spec && per_sample_bits == o.per_sample_bits &&
           clock == o.clock && era == o.era;
  }
};

LiveInput key_of(const at::Tensor& x, at::ScalarType type, const Keep& keep) {
  return {WeakTensor(x.getIntrusivePtr()),
          x.unsafeGetTensorImpl(),
          MemoryKey(x),
          type,
          keep.spec,
          keep.per_sample_bits,
          step_clock(),
          step_clock()->era()};
}

struct LiveInputs {
  std::vector<LiveInput> all;
};

/// The packed bytes of x: those of an earlier layer that read the same x in this thread, stream and step, or new ones. A code is handed on
/// until the next backward begins: from then on the same noise would come again, however long somebody holds the graph.
std::shared_ptr<const OwnInput> own_input(const at::Tensor& x, const at::Tensor& values, const SavePolicy& saving) {
  std::vector<LiveInput>& live = step_context().part<LiveInputs>().all;
  const Keep keep = keeps_of(saving.method, {Role::weight_input}).front();
  std::erase_if(live,
                [](const LiveInput& input) { return input.own.expired() || input.tensor.expired() || input.era != input.clock->era(); });
  const auto make = [&] { return std::make_shared<const OwnInput>(OwnInput{Saved(values, saving, keep), saving.name, {}}); };
  if (x.is_inference()) return make();
  const LiveInput wanted = key_of(x, values.scalar_type(), keep);
  const auto found = std::find(live.begin(), live.end(), wanted);
  if (found != live.end()) {
    if (auto own = found->own.lock()) return own;
  }
  const auto own = make();
  LiveInput key = key_of(x, values.scalar_type(), keep);  // its seed may have been the first of a run
  key.own = own;
  live.push_back(std::move(key));
  return own;
}

/// The shared save of x, where the layer can read it that way.
std::shared_ptr<const SharedSave> shared_input(const at::Tensor& x, Reads reads, const Method& method) {
  auto found = readable_save_of(x);
  if (found == nullptr && reads == Reads::samples && made_on_current_stream(x)) {
    auto* late = dynamic_cast<OnDemandNode*>(x.grad_fn().get());
    if (late != nullptr && late->on_demand() && serves_weights(method, *late->on_demand(), /*after_relu=*/true))
      found = late->packed_on_demand(x);
  }
  if (found == nullptr || !serves_weights(method, found->code.spec, found->chain.slope == 0)) return nullptr;
  const bool same_rows = found->sizes.empty() && found->channels() == x.size(-1) && found->rows() * x.size(-1) == x.numel();
  const bool fits = reads == Reads::rows ? same_rows : at::IntArrayRef(found->sizes) == x.sizes();
  return fits ? found : nullptr;
}

/// What a gate of the same method keeps of x, the map that it made; null where x is none, or another stream made it.
std::shared_ptr<const ScaledInput> scaled_input(const at::Tensor& x, Reads reads, const Method& method) {
  if (reads != Reads::samples || !made_on_current_stream(x)) return nullptr;
  const auto* gate = dynamic_cast<const ScalingNode*>(x.grad_fn().get());
  auto found = gate != nullptr ? gate->scaled(x) : nullptr;
  return found != nullptr && found->method == method ? found : nullptr;
}

/// Samples [first, last) of a shared save of maps.
at::Tensor shared_samples(const SharedRows& rows, at::IntArrayRef sizes, int64_t first, int64_t last, at::ScalarType type) {
  int64_t each = 1;
  for (const int64_t size : sizes.slice(2)) each *= size;
  std::vector<int64_t> some = sizes.vec();
  some[0] = last - first;
  return in_channels_last(image_of_rows(rows.input(first * each, last * each, type), some));
}

int64_t values_of(at::IntArrayRef sizes, size_t from) {
  return std::accumulate(sizes.begin() + static_cast<int64_t>(std::min(from, sizes.size())), sizes.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

InputSave::InputSave(const at::Tensor& x, const SavePolicy& saving, const InputOptions& options) {
  if (reads_producer(saving.method)) shared_ = shared_input(x, options.reads, saving.method);
  weights_per_value_ = options.weights_per_value;
  if (shared_ != nullptr) return;
  if (reads_producer(saving.method)) scaled_ = scaled_input(x, options.reads, saving.method);
  if (scaled_ != nullptr) return;
  own_ = own_input(x, (options.as.defined() ? options.as : x).detach(), saving);
  // Saved divides by the pixels of N×C×spatial, all that follows the second dimension; rows' positions stand before the last.
  if (options.reads == Reads::rows && x.dim() > 2) {
    weights_per_value_ *= static_cast<double>(x.size(-1)) / static_cast<double>(std::max<int64_t>(x.size(1), 1));
  }
  ticket_ = std::make_shared<const char>();
}

InputSave InputSave::reference(const at::Tensor& x) {
  InputSave save;
  save.reference_ = Saved::reference(x);
  return save;
}

std::vector<at::Tensor> InputSave::transposed_products(const std::vector<at::Tensor>& gs) const {
  if (shared_ != nullptr) return satchel::transposed_products(*shared_, gs);
  return saved().transposed_products(gs);
}

const Saved& InputSave::saved() const { return own_ != nullptr ? own_->save : reference_; }

int64_t InputSave::columns() const { return shared_ != nullptr ? shared_->channels() : reference_.restore().size(-1); }

std::vector<at::Tensor> InputSave::products_from_codes(const std::vector<at::Tensor>& gs) const {
  if (shared_ == nullptr || gs.empty() || shared_->bits.extra.defined() || !fuses_norm_act_product(shared_->code, gs)) return {};
  const int64_t columns = gs.front().size(1);
  if (columns > 128) return {};  // from 256 on decoded stretches are multiplied faster (docs/decisions.md)
  const auto of = [&](const std::vector<at::Tensor>& some) { return norm_act_product(shared_->code, shared_->seed, shared_->chain, some); };
  // In full fp32 the codes are decoded for each of two wide gradients: little beside the FMAs, and partial sums take half of the memory.
  const bool apart = gs.size() == 2 && columns > 96 && gs.front().scalar_type() == at::kFloat && !allows_tf32();
  return apart ? std::vector{of({gs[0]})[0], of({gs[1]})[0]} : of(gs);
}

void InputSave::for_rows(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const {
  if (shared_ != nullptr) {
    const SharedRows rows(*shared_);
    rows.for_stretches([&](int64_t first, int64_t last) { run(first, last, rows.input(first, last, type)); });
    return;
  }
  const at::Tensor x = reference_.restore();
  if (x.is_cuda() && x.scalar_type() == type) return run(0, x.size(0), x);  // nothing to decode: one product
  for_stretches_of(x.size(0), x.size(1), x.is_cuda(),
                   [&](int64_t first, int64_t last) { run(first, last, x.narrow(0, first, last - first).to(type)); });
}

std::vector<int64_t> InputSave::sizes() const {
  if (scaled_ != nullptr) return scaled_->x.sizes();
  return shared_ != nullptr ? shared_->sizes : saved().shape();
}

at::Tensor InputSave::samples(int64_t first, int64_t last, at::ScalarType type) const {
  if (shared_ != nullptr) return shared_samples(SharedRows(*shared_), shared_->sizes, first, last, type);
  if (scaled_ != nullptr) return at::mul(scaled_->x.samples(first, last, type), scaled_->scale.narrow(0, first, last - first).to(type));
  const at::Tensor x = saved().samples(first, last);
  return x.dim() < 3 ? x.to(type) : in_channels_last(x.to(type));
}

bool InputSave::is_cuda() const {
  if (scaled_ != nullptr) return scaled_->x.is_cuda();
  return shared_ != nullptr ? shared_->code.bytes.is_cuda() : saved().is_cuda();
}

int64_t InputSave::sample_step() const { return 8 / std::gcd<int64_t, int64_t>(values_of(sizes(), 2), 8); }

int64_t InputSave::samples_at_a_time() const {
  if (scaled_ != nullptr) return scaled_->x.samples_at_a_time();
  const std::vector<int64_t> all = sizes();
  const bool whole = own_ != nullptr && std::holds_alternative<RandomProjection>(own_->save.spec().transform);
  if (whole || all[0] == 0) return std::max<int64_t>(all[0], 1);  // a projection is undone as a whole
  const int64_t values = is_cuda() ? kSampleStretch : 2 << 20;
  const int64_t some = std::clamp<int64_t>(values / std::max<int64_t>(values_of(all, 1), 1), 1, all[0]);
  const int64_t even = (all[0] + (all[0] + some - 1) / some - 1) / ((all[0] + some - 1) / some);  // as many each time
  const int64_t step = sample_step();
  return (even + step - 1) / step * step;
}

void InputSave::for_samples(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const {
  for_samples(type, 0, sizes()[0], run);
}

void InputSave::for_samples(at::ScalarType type, int64_t begin, int64_t end,
                            const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const {
  const int64_t some = samples_at_a_time(), parts = ceil_div(end - begin, some);
  const bool backwards = is_cuda() && (end - begin) % sample_step() == 0;
  const auto rows = shared_ != nullptr ? std::make_unique<SharedRows>(*shared_) : nullptr;  // once for all
  for (int64_t k = 0; k < parts; ++k) {  // a short one comes last, whose memory is there already
    const int64_t first = backwards ? std::max(end - (k + 1) * some, begin) : begin + k * some;
    const int64_t last = backwards ? end - k * some : std::min(first + some, end);
    run(first, last, rows != nullptr ? shared_samples(*rows, shared_->sizes, first, last, type) : samples(first, last, type));
  }
}

void InputSave::fetch() const {
  if (scaled_ != nullptr) scaled_->x.fetch();
  if (own_ != nullptr) own_->save.fetch();
}

void InputSave::gradient_seen(const at::Tensor& g) const {
  if (shared_ != nullptr) shared_->bits.note.tell(g, weights_per_value_);
  if (own_ != nullptr) own_->save.gradient_seen(g, weights_per_value_);
}

void InputSave::report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const {
  if (own_ == nullptr) return;
  if (own_->reporter.expired()) own_->reporter = ticket_;
  if (own_->reporter.lock() != ticket_) return;
  own_->save.report(own_->save.has_bits_per_sample() ? own_->name : name, kind, lines);
}

void InputSave::release() { *this = {}; }

void OnDemandNode::pack_on_demand(const CodecSpec& spec, const at::Tensor& out) {
  on_demand_ = spec;
  on_demand_version_ = out._version();
}

bool OnDemandNode::is_on_demand(const at::Tensor& x) const { return on_demand_ && x._version() == on_demand_version_; }

std::shared_ptr<const SharedSave> OnDemandNode::packed_on_demand(const at::Tensor& x) {
  if (!is_on_demand(x) || x.numel() == 0) return nullptr;
  SharedSave save;
  save.code = pack(rows_of_image(x.detach()), *on_demand_, fresh_seed(x.device()));
  save.sizes = x.sizes().vec();
  save.chain = {0, 1};
  share(std::move(save), x);
  return shared();
}

std::optional<c10::Stream> current_stream(const at::Tensor& x) {
  if (!x.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
}

bool made_on_current_stream(const at::Tensor& x) {
  const auto& maker = x.grad_fn();
  return !x.is_cuda() || maker == nullptr || maker->stream() == current_stream(x);
}

std::shared_ptr<const SharedSave> readable_save_of(const at::Tensor& x) {
  auto* maker = made_on_current_stream(x) ? dynamic_cast<SharingNode*>(x.grad_fn().get()) : nullptr;
  return maker != nullptr && x._version() == maker->output_version() ? maker->shared() : nullptr;
}

at::Tensor sizes_only(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty({1}, options).expand(sizes); }

at::ScalarType layer_type(const at::Tensor& x) {
  const auto device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device) || x.scalar_type() == at::kDouble) return x.scalar_type();
  return at::autocast::get_autocast_dtype(device);
}

at::ScalarType precise_type(const at::Tensor& x) {
  const bool half = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  return half && x.is_cuda() && at::autocast::is_autocast_enabled(at::kCUDA) ? at::kFloat : x.scalar_type();
}

void add_product_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b) {
  if (splits_gradient(a, b)) {
    split_gradient_(sums, a, b, /*add=*/true);
  } else if (a.scalar_type() == at::kFloat) {
    sums.addmm_(a, b);
  } else {
    sums.add_(product(a, b));
  }
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (splits_gradient(a, b)) {
    const at::Tensor sums = at::empty({a.size(0), b.size(1)}, a.options());
    split_gradient_(sums, a, b, /*add=*/false);
    return sums;
  }
  if (a.scalar_type() == at::kFloat) return at::mm(a, b);
  return a.is_cuda() ? at::mm(a, b, at::kFloat) : at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

}  // namespace satchel
