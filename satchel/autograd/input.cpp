#include "satchel/autograd/input.h"

#include <ATen/Context.h>
#include <ATen/ops/mm.h>

#include "satchel/tensor/norm_act_product.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/project.h"

namespace satchel {

InputSave::InputSave(const at::Tensor& x, const Method& method) {
  if (method.shared) shared_ = shared_save_of(x);
  if (shared_ == nullptr) packed_ = pack(x.detach(), method.input, fresh_seed(x.device()));
}

InputSave InputSave::reference(const at::Tensor& x) {
  InputSave save;
  save.reference_.emplace(x.detach(), /*is_output=*/false);
  return save;
}

std::vector<at::Tensor> InputSave::transposed_products(const std::vector<at::Tensor>& gs) const {
  if (shared_ != nullptr) return satchel::transposed_products(*shared_, gs);
  std::vector<at::Tensor> products;
  if (reference_) {
    const at::Tensor x = reference_->unpack();
    const at::Tensor rows = x.reshape({-1, x.size(-1)}).t();
    for (const at::Tensor& g : gs) products.push_back(product(rows, g.reshape({-1, g.size(-1)})));
  } else {
    for (const at::Tensor& g : gs) products.push_back(transposed_product(packed_, g.to(at::kFloat)));
  }
  return products;
}

int64_t InputSave::columns() const { return shared_ != nullptr ? shared_->channels() : reference_->unpack().size(-1); }

std::vector<at::Tensor> InputSave::products_from_codes(const std::vector<at::Tensor>& gs) const {
  if (shared_ == nullptr || gs.empty() || !fuses_norm_act_product(shared_->code, gs)) return {};
  // In full float32 arithmetic decides, and cuBLAS is as quick from 256 columns on (docs/results.md).
  const bool tensor_cores = gs.front().scalar_type() != at::kFloat || at::globalContext().allowTF32CuBLAS();
  if (!tensor_cores && gs.front().size(1) > 128) return {};
  return norm_act_product(shared_->code, shared_->seed, shared_->chain, gs);
}

void InputSave::for_rows(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const {
  if (shared_ != nullptr) {
    const SharedRows rows(*shared_);
    rows.for_stretches([&](int64_t first, int64_t last) { run(first, last, rows.input(first, last, type)); });
    return;
  }
  const at::Tensor x = reference_->unpack();
  if (x.is_cuda() && x.scalar_type() == type) return run(0, x.size(0), x);  // nothing to decode: one product
  for_stretches_of(x.size(0), x.size(1), x.is_cuda(),
                   [&](int64_t first, int64_t last) { run(first, last, x.narrow(0, first, last - first).to(type)); });
}

void InputSave::report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const {
  if (packed_.bytes.defined()) satchel::report(packed_, name, kind, lines);
}

void InputSave::release() { *this = {}; }

void add_product_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    sums.addmm_(a, b);
  } else {
    sums.add_(product(a, b));
  }
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kFloat) return at::mm(a, b);
  return a.is_cuda() ? at::mm(a, b, at::kFloat) : at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

void report(const Packed& packed, const std::string& name, const char* kind, std::vector<SavedTensor>& lines) {
  int64_t values = 1;
  for (const int64_t size : packed.shape) values *= size;
  lines.push_back({name, kind, packed.shape, packed.spec.bits, packed.bytes.numel(), 4 * values});
  if (packed.seed.defined()) lines.push_back(saved_line(name, "seed", packed.seed));
}

}  // namespace satchel
