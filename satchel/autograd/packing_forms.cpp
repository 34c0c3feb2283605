#include "satchel/autograd/packing_forms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/slope.h"

namespace satchel {
namespace {

/// Memory without a gap as one line, and the tensor of it again.
struct Line {
  at::Tensor values;
  std::vector<int64_t> shape, strides;

  explicit Line(const at::Tensor& x) {
    const at::Tensor in_order = ordered(x, CodecSpec{});
    shape = in_order.sizes().vec();
    strides = strides_of(in_order);
    values = in_order.as_strided({in_order.numel()}, {1}, in_order.storage_offset());
  }
};

at::Tensor shaped(const at::Tensor& line, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  return line.as_strided(shape, strides);
}

CodecSpec code_spec(int bits, HeaderType header = HeaderType::bf16) {
  CodecSpec spec;
  spec.bits = bits;
  spec.block = kCodeBlock;
  spec.header = header;
  spec.levels = bits <= 4 ? Levels::optimal : Levels::even;
  return spec;
}

class Code : public KeptForm {
 public:
  Code(const at::Tensor& x, int bits, const at::Tensor& seed, HeaderType header = HeaderType::bf16)
      : packed_(pack(x, code_spec(bits, header), seed)) {}
  at::Tensor restore() const override { return unpack(packed_); }
  at::Tensor bytes() const override { return packed_.bytes; }

 private:
  Packed packed_;
};

/// A norm's statistics as they broadcast to its input: one a row, a channel, or a group of channels.
at::Tensor beside(const at::Tensor& statistic, at::IntArrayRef shape) {
  const at::Tensor t = statistic.to(at::kFloat);
  const auto broadcasts = [&] {
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (t.size(d) != 1 && t.size(d) != shape[static_cast<size_t>(d)]) return false;
    }
    return true;
  };
  if (t.dim() == static_cast<int64_t>(shape.size()) && broadcasts()) return t;
  std::vector<int64_t> wide(shape.size(), 1);
  wide[1] = shape[1];
  if (t.dim() == 1) return t.view(wide);
  wide[0] = shape[0];
  return t.repeat_interleave(shape[1] / t.size(1), 1).view(wide);
}

class Normed : public KeptForm {
 public:
  Normed(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& scale, int bits, const at::Tensor& seed)
      : mean_(mean), scale_(scale), dtype_(x.scalar_type()), code_(normed(x), bits, seed) {}

  at::Tensor restore() const override {
    at::Tensor y = code_.restore();
    y.div_(beside(scale_, y.sizes()));
    if (mean_.defined()) y.add_(beside(mean_, y.sizes()));
    return y.to(dtype_);
  }
  at::Tensor bytes() const override { return code_.bytes(); }

 private:
  at::Tensor normed(const at::Tensor& x) const {
    const at::Tensor wide = x.to(at::kFloat);
    return (mean_.defined() ? wide.sub(beside(mean_, x.sizes())) : wide).mul(beside(scale_, x.sizes()));
  }
  at::Tensor mean_, scale_;
  at::ScalarType dtype_;
  Code code_;
};

class Mask : public KeptForm {
 public:
  /// Comes back in `dtype`, as `on` and `off`.
  Mask(const at::Tensor& x, at::ScalarType dtype, double on = 1, double off = 0) : Mask(Line(x), dtype, on, off) {}

  at::Tensor restore() const override {
    const at::Tensor flags = shaped(unpack_mask(mask_), shape_, strides_);
    if (on_ == 1 && off_ == 0) return flags.to(dtype_);
    return at::empty_like(flags, flags.options().dtype(dtype_)).fill_(off_).masked_fill_(flags, on_);
  }
  at::Tensor bytes() const override { return mask_.bits; }

 private:
  Mask(Line line, at::ScalarType dtype, double on, double off)
      : mask_(pack_mask(line.values)),
        shape_(std::move(line.shape)),
        strides_(std::move(line.strides)),
        dtype_(dtype),
        on_(on),
        off_(off) {}

  PackedMask mask_;
  std::vector<int64_t> shape_, strides_;
  at::ScalarType dtype_;
  double on_, off_;
};

class Shape : public KeptForm {
 public:
  explicit Shape(const at::Tensor& x)
      : shape_(x.sizes().vec()), strides_(x.strides().vec()), options_(x.options()), rows_(x.is_contiguous()) {}

  at::Tensor restore() const override {
    // One number seen at every place takes no memory; other strides than a row's are read too, so they are given.
    return rows_ ? at::zeros({}, options_).expand(shape_) : at::empty_strided(shape_, strides_, options_);
  }

 private:
  std::vector<int64_t> shape_, strides_;
  at::TensorOptions options_;
  bool rows_;
};

class Index : public KeptForm {
 public:
  Index(const at::Tensor& x, int64_t most) : Index(Line(x), most) {}
  at::Tensor restore() const override { return shaped(widen(narrowed_), shape_, strides_); }
  at::Tensor bytes() const override { return narrowed_.bytes; }

 private:
  Index(Line line, int64_t most)
      : narrowed_(narrow(line.values, 0, most)), shape_(std::move(line.shape)), strides_(std::move(line.strides)) {}
  Narrowed narrowed_;
  std::vector<int64_t> shape_, strides_;
};

/// Slopes of GELU, SiLU and Mish, which have kernels of their own.
class SlopeCode : public KeptForm {
 public:
  SlopeCode(const at::Tensor& x, SlopeOf kind, int bits, const at::Tensor& seed) : packed_(pack_slope(x, kind, bits, seed)) {}
  at::Tensor restore() const override { return unpack_slope(packed_); }
  at::Tensor bytes() const override { return packed_.bytes; }

 private:
  PackedSlope packed_;
};

using Function = std::function<at::Tensor(const at::Tensor&)>;

/// A code of a function of x, and on the way back an x' at which backward's formula gives the coded number. Headers are float32: a block's
/// highest level then is its highest number. Of bf16's, which are rounded outwards, it would be up to 2^−7 of the range above; no x' has a
/// slope beyond the most, and cutting it off there is a bias that 4 bits show where many values have that slope (ELU's 1).
class Coded : public KeptForm {
 public:
  Coded(const at::Tensor& number, at::ScalarType dtype, int bits, const at::Tensor& seed, Function back)
      : code_(number, bits, seed, HeaderType::f32), dtype_(dtype), back_(std::move(back)) {}
  at::Tensor restore() const override { return back_(code_.restore()).to(dtype_); }
  at::Tensor bytes() const override { return code_.bytes(); }

 private:
  Code code_;
  at::ScalarType dtype_;
  Function back_;
};

class Cast : public KeptForm {
 public:
  Cast(const at::Tensor& x, const at::Tensor& parameter)
      : parameter_(parameter.detach()),  // which shares the version
        version_(parameter._version()),
        dtype_(x.scalar_type()),
        shape_(x.sizes().vec()),
        strides_(x.strides().vec()),
        offset_(x.storage_offset()) {}

  at::Tensor restore() const override {
    if (static_cast<int64_t>(parameter_._version()) != version_) {
      fail("packing", "a parameter must stay as it is until backward", "one changed in place after autocast read it");
    }
    return parameter_.to(dtype_).as_strided(shape_, strides_, offset_);
  }

 private:
  at::Tensor parameter_;
  int64_t version_;
  at::ScalarType dtype_;
  std::vector<int64_t> shape_, strides_;
  int64_t offset_;
};

/// x as the type holds it.
double as_held(double x, at::ScalarType type) { return at::scalar_tensor(x, at::kDouble).to(type).item<double>(); }

/// A slope of the saved value, and a value with that slope.
struct SlopePair {
  Function slope, back;
};

SlopePair slope_pair(const CurveOf& curve, at::ScalarType dtype) {
  switch (curve.curve) {
    case Curve::hardswish: {  // x/3 + 1/2 between −3 and 3 takes the values 0 and 1 of both ends too
      const double eps = dtype == at::kHalf ? 0x1p-10 : dtype == at::kBFloat16 ? 0x1p-7 : 0x1p-23;
      const double end = 3 - 2 * eps;  // the last number of the type before 3
      return {[](const at::Tensor& x) { return x.div(3).add_(0.5).masked_fill_(x.lt(-3), 0).masked_fill_(x.gt(3), 1); },
              [end](const at::Tensor& d) { return d.sub(0.5).mul_(3).clamp_(-end, end); }};
    }
    case Curve::elu: {
      const double most = curve.a, scale = curve.b, inner = curve.c;
      return {[=](const at::Tensor& x) { return x.mul(inner).clamp_max_(0).exp_().mul_(most).masked_fill_(x.gt(0), scale); },
              [=](const at::Tensor& d) { return d.div(most).clamp_(0, 1).log_().div_(inner); }};
    }
    case Curve::softplus: {
      const double beta = curve.a;
      return {[=](const at::Tensor& x) { return x.mul(beta).sigmoid_(); },
              [=](const at::Tensor& d) { return d.clamp(0, 1).logit_().div_(beta); }};
    }
    case Curve::sigmoid:  // y·(1 − y) = d, by the smaller root: it has the finer floats
      return {[](const at::Tensor& y) { return y.mul(1 - y); },
              [](const at::Tensor& d) { return (1 - d.mul(-4).add_(1).clamp_min_(0).sqrt_()).mul_(0.5); }};
    case Curve::tanh:
      return {[](const at::Tensor& y) { return 1 - y.square(); }, [](const at::Tensor& d) { return (1 - d).clamp_(0, 1).sqrt_(); }};
    case Curve::square: return {[](const at::Tensor& x) { return x; }, [](const at::Tensor& d) { return d; }};
    case Curve::cube: return {[](const at::Tensor& x) { return x.square(); }, [](const at::Tensor& d) { return d.clamp_min(0).sqrt_(); }};
    case Curve::logits:  // linear in sigmoid(x), with and without weights
      return {[](const at::Tensor& x) { return x.sigmoid(); }, [](const at::Tensor& d) { return d.clamp(0, 1).logit_(); }};
    case Curve::cut_off: {
      const double end = curve.a, unit = curve.b;
      const at::Tensor target = curve.target;
      return {[=](const at::Tensor& x) { return x.sub(target.to(at::kFloat)).clamp_(-end, end).div_(unit); },
              [=](const at::Tensor& d) { return d.mul(unit).add_(target.to(at::kFloat)); }};
    }
    default: return {};
  }
}

/// Where a clamp passes the gradient: both ends are in. Outside it comes back as what lies in no interval.
KeptFormPtr keep_within(const at::Tensor& x, double low, double high) {
  const double wanted = std::isinf(low) || std::isinf(high) ? std::min(std::max(0.0, low + 1), high - 1) : (low + high) / 2;
  const double middle = as_held(wanted, x.scalar_type());
  if (!(low < middle && middle < high)) return nullptr;  // ends so near that no number of the type lies between them
  return std::make_shared<Mask>(x.ge(low).logical_and_(x.le(high)), x.scalar_type(), middle, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

int64_t KeptForm::nbytes() const {
  const at::Tensor held = bytes();
  return held.defined() ? static_cast<int64_t>(held.nbytes()) : 0;
}

KeptFormPtr keep_code(const at::Tensor& x, int bits, const at::Tensor& seed) { return std::make_shared<Code>(x, bits, seed); }

KeptFormPtr keep_normed(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& scale, int bits, const at::Tensor& seed) {
  return std::make_shared<Normed>(x, mean, scale, bits, seed);
}

KeptFormPtr keep_mask(const at::Tensor& x) { return std::make_shared<Mask>(x, x.scalar_type()); }

KeptFormPtr keep_inside(const at::Tensor& x, const CurveOf& curve) {
  // Backward itself says where: types and devices compare in ways of their own.
  constexpr double outside = -std::numeric_limits<double>::infinity();
  const at::Tensor one = at::ones({}, x.options()).expand_as(x);
  if (curve.curve == Curve::hardsigmoid) return std::make_shared<Mask>(at::hardsigmoid_backward(one, x).ne(0), x.scalar_type(), 0, outside);
  if (curve.curve == Curve::clamp) return keep_within(x, curve.a, curve.b);
  if (curve.curve != Curve::hardtanh) return nullptr;
  const double low = curve.a, high = curve.b;
  const double wanted = std::isinf(low) || std::isinf(high) ? std::max(low + 1, std::min(0.0, high - 1)) : (low + high) / 2;
  const double low_held = as_held(low, x.scalar_type()), high_held = as_held(high, x.scalar_type());
  const double middle = as_held(wanted, x.scalar_type());
  if (!(std::max(low, low_held) < middle && middle < std::min(high, high_held))) return nullptr;
  return std::make_shared<Mask>(at::hardtanh_backward(one, x, low, high).ne(0), x.scalar_type(), middle, outside);
}

KeptFormPtr keep_slope(const at::Tensor& x, const CurveOf& curve, int bits, const at::Tensor& seed) {
  switch (curve.curve) {
    case Curve::gelu: return std::make_shared<SlopeCode>(x, SlopeOf::gelu, bits, seed);
    case Curve::gelu_tanh: return std::make_shared<SlopeCode>(x, SlopeOf::gelu_tanh, bits, seed);
    case Curve::silu: return std::make_shared<SlopeCode>(x, SlopeOf::silu, bits, seed);
    case Curve::mish: return std::make_shared<SlopeCode>(x, SlopeOf::mish, bits, seed);
    default: break;
  }
  SlopePair pair = slope_pair(curve, x.scalar_type());
  if (!pair.slope) return nullptr;
  return std::make_shared<Coded>(pair.slope(x.to(at::kFloat)), x.scalar_type(), bits, seed, std::move(pair.back));
}

KeptFormPtr keep_exp(const at::Tensor& x, int bits, const at::Tensor& seed) {
  return std::make_shared<Coded>(x.to(at::kFloat).exp(), x.scalar_type(), bits, seed, [](const at::Tensor& p) { return p.log(); });
}

KeptFormPtr keep_shape(const at::Tensor& x) { return std::make_shared<Shape>(x); }
KeptFormPtr keep_index(const at::Tensor& x, int64_t most) { return std::make_shared<Index>(x, most); }
KeptFormPtr keep_cast(const at::Tensor& x, const at::Tensor& parameter) { return std::make_shared<Cast>(x, parameter); }

}  // namespace satchel
