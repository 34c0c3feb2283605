#include "satchel/autograd/shared.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "satchel/autograd/bit_allocator.h"
#include "satchel/autograd/input.h"
#include "satchel/core/levels.h"
#include "satchel/core/stretch.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/pack.h"

namespace satchel {

int64_t stretch_rows(int64_t rows, int64_t width, bool cuda) {
  width = std::max<int64_t>(width, 1);
  const int64_t values = cuda ? kRowStretch : 1 << 18;
  const int64_t most = std::max<int64_t>(kGroup, ceil_div(values / width, kGroup) * kGroup);
  return ceil_div(ceil_div(rows, std::max<int64_t>(ceil_div(rows, most), 1)), kGroup) * kGroup;
}

void for_stretches_of(int64_t rows, int64_t width, bool cuda, const std::function<void(int64_t first, int64_t last)>& run, int64_t unit) {
  // Maps on a GPU: long stretches, since each takes several launches.
  int64_t some =
      cuda && unit > 1 ? std::max<int64_t>((int64_t{64} << 20) / std::max<int64_t>(width, 1), 1) : stretch_rows(rows, width, cuda);
  if (unit > 1) some = std::max<int64_t>(some / unit, 1) * unit;
  for (int64_t first = 0; first < rows; first += some) run(first, std::min(first + some, rows));
}

namespace {

/// Variance in σ² that a value on the passing side loses when its code has 3 bits in place of 2, on a side 2.8 σ long (theory.md 10).
double extra_bit_gain(Side side) {
  static const double two = side_variance(side_levels(3)), six = side_variance(side_levels(6)), seven = side_variance(side_levels(7));
  return two - (side == Side::relu ? seven : six);
}

int64_t product_of(at::IntArrayRef sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

}  // namespace

ImageBits image_bits(at::IntArrayRef sizes, at::Device device, const SavePolicy& saving, double mean_bits, CodecSpec& spec, bool splits) {
  ImageBits bits;
  if (saving.allocator == nullptr || sizes.size() < 3 || product_of(sizes) == 0) return bits;
  const int64_t values = product_of(sizes.slice(1));
  const BitAllocation given = saving.allocator->image(saving.name, sizes[0], values, mean_bits, device);
  bits.note.allocator = saving.allocator;
  bits.note.layer = given.layer;
  if (given.count == sizes[0]) {
    spec.bits = 3;
  } else if (given.count > 0 && splits && takes_extra_bit(spec, values)) {
    bits.extra = extra_bit_plane(given.slots, given.count, values);
  }
  return bits;
}

void watch(ImageBits& bits, const Packed& code, int64_t samples, const at::Tensor& gamma) {
  AllocatorNote& note = bits.note;
  if (note.allocator == nullptr || !note.allocator->wants_gradient(note.layer)) {
    note.allocator.reset();
    return;
  }
  // Half of a block's values pass, on a side of half its range; of a ReLU's values on all of it. An error of x̂ is γ times as large in z.
  const double length = gamma.defined() ? 0.5 : 1.0;
  const int64_t pixels = code.shape[0] / samples;
  note.ranges = squared_ranges(code, samples);
  if (gamma.defined()) note.ranges.mul_(gamma.detach().square().mean());
  note.factor = static_cast<double>(code.spec.block) / 2 * extra_bit_gain(code.spec.side) * length * length / (2.8 * 2.8) /
                static_cast<double>(std::max<int64_t>(pixels, 1));
}

SharedRows::SharedRows(const SharedSave& save)
    : save_(save),
      place_(save.code.bytes.device(), "restore"),
      layout_(check_packed(save.code, "restore")),
      rows_(layout_, save.code.bytes, place_),
      fused_(fuses_norm_act(save.code)),
      is_output_(save.code.spec.side == Side::relu && save.chain.dropout == 0 && !save.gamma.defined()) {
  gamma_ = save.gamma;
  beta_ = save.beta;
  if (fused_ || save.code.spec.side == Side::none || layout_.channels != save.channels()) return;
  read_table();
}

void SharedRows::read_table() const {
  const at::Tensor table = channel_table(layout_, save_.code.bytes);
  gamma_ = table.select(1, 1).contiguous();
  beta_ = table.select(1, 2).contiguous();
}

const at::Tensor& SharedRows::gamma() const {
  if (fused_ && !gamma_.defined()) read_table();
  return gamma_;
}

void SharedRows::for_stretches(const std::function<void(int64_t first, int64_t last)>& run) const {
  for_stretches_of(save_.rows(), save_.channels(), place_.cuda(), run);
}

at::Tensor SharedRows::values(int64_t first, int64_t last, at::ScalarType type) const {
  return save_.bits.extra.defined() ? extra_bit_rows(save_.code, save_.bits.extra, first, last, type) : rows_.read(first, last, type);
}

at::Tensor SharedRows::bits(int64_t first, int64_t last) const {
  if (!on_.defined() && save_.bits.extra.defined()) on_ = extra_bit_on(save_.code, save_.bits.extra);
  if (!on_.defined()) on_ = save_.code.spec.side == Side::none ? save_.mask : on_bits(save_.code);
  if (!on_.defined()) return {};
  const int64_t begin = first * save_.channels() / 8;
  return on_.narrow(0, begin, ceil_div(last * save_.channels(), 8) - begin);
}

at::Tensor SharedRows::input(int64_t first, int64_t last, at::ScalarType type) const {
  // Bits are found, and dropout is redrawn, from multiples of 8 on; a sample of a map may start in between.
  if (const int64_t odd = first % kGroup; odd != 0) return input(first - odd, last, type).narrow(0, odd, last - first);
  if (fused_) return norm_act_input(save_.code, save_.seed, save_.chain, first, last, type, save_.bits.extra);
  if (is_output_) return values(first, last, type);
  // Extra bits on CUDA that no fused kernel reads are a ReLU's: its own values tell what is on.
  const at::Tensor on = place_.cuda() && save_.bits.extra.defined() ? at::Tensor() : bits(first, last);
  return apply_chain(values(first, last), gamma_, beta_, on, save_.seed, save_.chain, first * save_.channels()).to(type);
}

void SharedRows::gradient_(const at::Tensor& g, int64_t first) const {
  chain_gradient_(g, bits(first, first + g.size(0)), save_.seed, save_.chain, first * save_.channels());
}

at::Tensor SharedRows::on(int64_t first, int64_t last) const {
  const at::Tensor these = bits(first, last);
  if (!these.defined()) return at::ones({last - first, save_.channels()}, save_.code.bytes.options().dtype(at::kBool));
  return unpack_mask({these, {last - first, save_.channels()}});
}

std::vector<at::Tensor> transposed_products(const SharedSave& save, const std::vector<at::Tensor>& gs) {
  std::vector<at::Tensor> sums;
  for (const at::Tensor& g : gs) sums.push_back(at::zeros({save.channels(), g.size(-1)}, g.options().dtype(at::kFloat)));
  const SharedRows rows(save);
  rows.for_stretches([&](int64_t first, int64_t last) {
    const at::Tensor z = rows.input(first, last, gs.front().scalar_type()).t();
    for (size_t i = 0; i < gs.size(); ++i) {
      add_product_(sums[i], z, gs[i].reshape({-1, gs[i].size(-1)}).narrow(0, first, last - first));
    }
  });
  return sums;
}

void report(const SharedSave& save, const std::string& name, const char* kind, std::vector<SavedTensor>& lines) {
  report(save.code, name, kind, lines);
  if (const ExtraBit& extra = save.bits.extra; extra.defined()) {
    const int64_t rows = extra.plane.numel() * 8 / save.channels();
    lines.push_back({name, "extra bit", {rows, save.channels()}, 1, extra.bytes(), 0});
  }
  save.bits.note.report(name, lines);
  if (save.mask.defined()) lines.push_back({name, "mask", save.code.shape, 1, save.mask.numel(), save.rows() * save.channels()});
  if (save.gamma.defined()) {
    const int64_t bytes = 2 * static_cast<int64_t>(save.gamma.nbytes());
    lines.push_back({name, "affine", {2, save.gamma.numel()}, 32, bytes, bytes});
  }
}

}  // namespace satchel
