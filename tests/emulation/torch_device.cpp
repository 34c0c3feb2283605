// torch's "cuda" device where there is no GPU: its memory is the CPU's, torch's own functions run as the CPU's, and Satchel's kernels run
// emulated. So the library's whole way on CUDA runs in CI: what fits, how kernels are called, what is kept, gradients. libtorch_cuda is not
// loaded: this registers in its place. Libsatchel is the one without CUDA; the kernels and what follows here stand before its own in the
// program's symbols. One device; what is queued in a stream is done at once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "satchel/tensor/device.h"
#include "satchel/train/memory_parts.h"

namespace satchel {

cuda::StreamHandle current_stream(at::Device, const char*) { return nullptr; }

namespace {

const at::Device kDevice(at::kCUDA, 0);

// ---- memory ----

/// Memory as the device's allocator gives it, at a multiple of 512 bytes: full of NaN, and with a guard behind what was asked for.
class DeviceMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, kDevice};
    const size_t whole = rounded(bytes + kGuard);
    auto* data = static_cast<unsigned char*>(std::aligned_alloc(kAlign, whole + kAlign));
    std::memset(data, kFresh, kAlign + whole);
    std::memcpy(data, &bytes, sizeof(bytes));
    count(1, bytes);
    return {data + kAlign, data, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }

  static CudaMemory now() { return {allocated_, peak_, requested_}; }
  static void reset_peak() { peak_ = allocated_.load(); }
  static void count(int64_t sign, size_t bytes) {
    requested_ += sign * static_cast<int64_t>(bytes);
    const int64_t now = allocated_ += sign * static_cast<int64_t>(rounded(bytes));
    peak_ = std::max(peak_.load(), now);
  }

 private:
  static constexpr size_t kAlign = 512, kGuard = 256;
  static constexpr int kFresh = 0xff;
  static inline std::atomic<int64_t> allocated_ = 0, requested_ = 0, peak_ = 0;

  static size_t rounded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  static void release(void* context) {
    if (context == nullptr) return;
    const auto* data = static_cast<unsigned char*>(context);
    size_t bytes = 0;
    std::memcpy(&bytes, data, sizeof(bytes));
    for (size_t i = 0; i < kGuard; ++i) {
      if (data[kAlign + bytes + i] == kFresh) continue;
      std::fprintf(stderr, "emulation: byte %zu was written of a tensor of %zu bytes\n", bytes + i, bytes);
      std::abort();
    }
    count(-1, bytes);
    std::free(context);
  }
};

constexpr int64_t kAllMemory = int64_t{16} << 30;
double memory_fraction = 1;

/// The same memory under another device's name. `owner` keeps it; what the device did not give itself counts as its own from now on.
c10::Storage renamed(const c10::Storage& owner, at::Device device) {
  struct Kept {
    c10::Storage owner;
    size_t counted;
    ~Kept() { DeviceMemory::count(-1, counted); }
  };
  auto* kept = new Kept{owner, device.is_cuda() ? owner.nbytes() : 0};
  DeviceMemory::count(1, kept->counted);
  return {c10::Storage::use_byte_size_t(), owner.nbytes(),
          c10::DataPtr(
              owner.mutable_data(), kept, [](void* p) { delete static_cast<Kept*>(p); }, device),
          c10::GetAllocator(device.type()), /*resizable=*/true};
}

at::Tensor tensor_on(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  const at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// ---- torch's functions ----

/// The tensors of one call, there and back: the CPU's names of the device's tensors.
class Renaming {
 public:
  at::Tensor on_cpu(const at::Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    for (const Pair& p : pairs_) {
      if (p.device.is_same(x)) return p.cpu;
    }
    for (const Pair& p : pairs_) {
      if (p.device.storage().is_alias_of(x.storage())) return keep(x, p.cpu.storage());
    }
    return keep(x, renamed(x.storage(), at::kCPU));
  }

  at::Tensor on_device(const at::Tensor& made) const {
    if (!made.defined() || !made.is_cpu()) return made;
    for (const Pair& p : pairs_) {
      if (p.cpu.is_same(made)) {
        follow(p);
        return p.device;
      }
    }
    for (const Pair& p : pairs_) {
      if (p.cpu.storage().is_alias_of(made.storage())) return tensor_on(made, p.device.storage(), c10::DispatchKey::CUDA);
    }
    return tensor_on(made, renamed(made.storage(), kDevice), c10::DispatchKey::CUDA);
  }

  /// Out arguments that the CPU has resized.
  void follow_all() const {
    for (const Pair& p : pairs_) follow(p);
  }

 private:
  struct Pair {
    at::Tensor device, cpu;
  };
  std::vector<Pair> pairs_;

  at::Tensor keep(const at::Tensor& x, c10::Storage storage) {
    pairs_.push_back({x, tensor_on(x, std::move(storage), c10::DispatchKey::CPU)});
    return pairs_.back().cpu;
  }
  static void follow(const Pair& p) {
    if (p.device.storage().data() != p.cpu.storage().data()) {  // it has been given more memory
      c10::Storage more = renamed(p.cpu.storage(), kDevice);
      p.device.storage().set_nbytes(more.nbytes());
      p.device.storage().set_data_ptr_noswap(more.set_data_ptr({}));
    }
    if (p.device.sizes() == p.cpu.sizes() && p.device.strides() == p.cpu.strides()) return;
    p.device.unsafeGetTensorImpl()->set_sizes_and_strides(p.cpu.sizes(), p.cpu.strides(), p.cpu.storage_offset());
  }
};

template <class Each>
c10::IValue mapped(const c10::IValue& v, const Each& each) {
  if (v.isTensor()) return each(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& t : v.toTensorVector()) all.push_back(each(t));
    return all;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) {
      all.push_back(t && t->defined() ? std::optional<at::Tensor>(each(*t)) : t);
    }
    return all;
  }
  if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> all;
    for (const c10::IValue& t : v.toListRef()) all.push_back(t.isNone() ? std::optional<at::Tensor>() : each(t.toTensor()));
    return all;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return at::Device(at::kCPU);
  if (v.isGenerator()) return at::detail::getDefaultCPUGenerator();
  return v;
}

/// Called by what waits for the device in torch.
void waits() {
  if (c10::cuda::warning_state().get_sync_debug_mode() == c10::cuda::SyncDebugMode::L_ERROR) {
    TORCH_CHECK(false, "called a synchronizing CUDA operation");
  }
}

/// Does the host need a number of the device's to go on: a value, a size, how many places of a mask are true?
bool asks_the_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> always{"aten::_local_scalar_dense", "aten::_unique2", "aten::bincount",           "aten::equal",
                                            "aten::masked_select",       "aten::nonzero",  "aten::unique_consecutive", "aten::unique_dim"};
  static const std::set<std::string> by_mask{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
  const std::string& name = op.operator_name().name;
  if (always.contains(name) || (name == "aten::repeat_interleave" && op.operator_name().overload_name == "Tensor")) return true;
  if (!by_mask.contains(name)) return false;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (!stack[i].isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& t : stack[i].toOptionalTensorVector()) {
      if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    }
  }
  return false;
}

/// Any function of torch that has no kernel of its own for the device: the CPU's, on the same memory.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (asks_the_device(op, *stack)) waits();
  Renaming names;
  const size_t arguments = op.schema().arguments().size(), first = stack->size() - arguments;
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor& t) { return names.on_cpu(t); });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  names.follow_all();
  const size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor& t) { return names.on_device(t); });
  }
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), c10::GetAllocator(at::kCUDA),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), type.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::GetAllocator(at::kCUDA),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), type.value_or(at::kFloat));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.device() != from.device() && !non_blocking) waits();
  Renaming names;
  names.on_cpu(self).copy_(names.on_cpu(from));
  return self;
}

at::Tensor& set_(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

/// Of CUDA alone: Σ dy, Σ dy·(x − mean) and the gradients of γ and β.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(const at::Tensor& dy, const at::Tensor& x,
                                                                                      const at::Tensor& mean, const at::Tensor& rstd,
                                                                                      const std::optional<at::Tensor>&, bool, bool, bool) {
  std::vector<int64_t> along(x.dim(), 1), others{0};
  along[1] = x.size(1);
  for (int64_t d = 2; d < x.dim(); ++d) others.push_back(d);
  const at::Tensor g = dy.to(at::kFloat), sum = g.sum(others), product = (g * (x.to(at::kFloat) - mean.view(along))).sum(others);
  return {sum, product, product * rstd, sum};
}

/// Of CUDA alone: a product in another type.
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(type);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  const size_t needed = (self.numel() + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    c10::DataPtr fresh = c10::GetAllocator(at::kCUDA)->allocate(needed);
    if (self.storage().nbytes() > 0) std::memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(fresh));
    self.storage().set_nbytes(needed);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_);
  library.impl("mm.dtype", mm_dtype);
  library.impl("record_stream", record_stream);
  for (const char* chooses_by_device : {"convolution", "convolution_backward"}) {
    library.impl(chooses_by_device, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  library.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
}

// ---- what satchel/train asks of the allocator ----

CudaMemory cuda_memory(c10::Device) { return DeviceMemory::now(); }
void reset_cuda_peak(c10::Device) { DeviceMemory::reset_peak(); }
int64_t cuda_free_memory(c10::Device) {
  return static_cast<int64_t>(memory_fraction * static_cast<double>(kAllMemory)) - DeviceMemory::now().allocated;
}
void cuda_empty_cache(c10::Device) {}
void cuda_release_workspaces(c10::Device) {}
double cuda_fraction(c10::Device) { return memory_fraction; }
void set_cuda_fraction(c10::Device, double fraction) { memory_fraction = fraction; }
int64_t cuda_total_memory(c10::Device) { return kAllMemory; }

// ---- the device ----

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  c10::Stream getStream(at::Device) const override { return current(); }
  c10::Stream getStreamFromGlobalPool(at::Device, bool) const override {
    static std::atomic<c10::StreamId> streams = 0;
    return c10::Stream(c10::Stream::UNSAFE, kDevice, ++streams);
  }
  c10::Stream getDefaultStream(at::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return std::exchange(current(), stream); }
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const at::DeviceIndex) const override {}

 private:
  static c10::Stream& current() {
    thread_local c10::Stream stream(c10::Stream::DEFAULT, kDevice);
    return stream;
  }
};
const c10::impl::DeviceGuardImplRegistrar guard_registrar(at::kCUDA, new Guard());

const bool allocator_is_set = [] {
  static DeviceMemory memory;
  c10::SetAllocator(at::kCUDA, &memory);
  return true;
}();

}  // namespace
}  // namespace satchel

namespace at {
namespace {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(kCUDA); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
}  // namespace at
