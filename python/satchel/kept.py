"""Ways to keep a saved tensor. Each has `nbytes` and `restore()`; the coded ones have `bits`, `recode()`, `bytes_at()`, `squared_ranges()` too.

What restore() gives back need not be the saved value: it gives the same gradient, exactly (mask, inside, shape, index, flags) or in the
mean (code, normed, slope, exp).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
from torch import Tensor

from ._ops import Layout, Numbers, layout, ops, parse_spec

__all__ = ["BLOCK", "Cast", "Code", "Exp", "Normed", "Mask", "Reread", "Shape", "Index", "Slope", "SlopeCode",
           "code_layout", "code_numbers", "dense", "inside", "packed_strides", "slope_of", "smooth_kind", "within"]  # fmt: skip


BLOCK = 256  # values of a code that share a header
Sizes = tuple[int, ...]

# Looked up once, as the functions that an OpOverload calls: these are called for every save.
_pack, _unpack = ops.pack_by_id.default.op, ops.unpack_by_id.default.op
_pack_mask, _unpack_mask = ops.pack_mask.default.op, ops.unpack_mask.default.op
_pack_exp, _unpack_log = ops.pack_exp_by_id.default.op, ops.unpack_log_by_id.default.op
_pack_slope, _unpack_table = ops.pack_slope.default.op, ops.unpack_table_by_id.default.op


@functools.lru_cache(maxsize=16)
def code_numbers(bits: int, header: str = "bf16") -> Numbers:
    """The spec of an unbiased code: blocks of 256 values; levels for normal values up to 4 bits, even ones above."""
    return parse_spec(f"bits={bits},header={header}" + ("" if bits <= 4 else ",levels=even"))


def dense(x: Tensor) -> bool:
    """Does x fill a stretch of memory, in whatever order of its dimensions?"""
    return _fills(x.shape, x.stride())


def _fills(shape: Sizes, strides: Sizes) -> bool:
    places = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides) if size > 1):
        if step != places:
            return False
        places *= size
    return True


@functools.lru_cache(maxsize=4096)
def packed_strides(shape: Sizes, strides: Sizes) -> Sizes:
    """The order in which values are coded and come back: a tensor's own strides where it fills memory, else the same order without gaps,
    as torch's clone() has it. So gradients get the strides that they have without packing, and views of them stay views."""
    if 0 in shape or _fills(shape, strides):
        return strides
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


@functools.lru_cache(maxsize=4096)
def code_layout(shape: torch.Size, strides: Sizes, dtype: torch.dtype, bits: int, header: str = "bf16") -> Layout:
    """One object for all codes of a layout: a model's layers repeat, and so do its steps."""
    sizes = tuple(shape)
    return Layout(sizes, strides, packed_strides(sizes, strides), dtype, code_numbers(bits, header))


@functools.lru_cache(maxsize=4096)
def _plain_layout(shape: torch.Size, strides: Sizes, dtype: torch.dtype) -> Layout:
    """Without a code: of masks, and of places in a table."""
    sizes = tuple(shape)
    return Layout(sizes, strides, packed_strides(sizes, strides), dtype)


def _in_memory_order(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Layout]:
    """x without gaps, and the layout in which it comes back, as this type."""
    like = _plain_layout(x.shape, x.stride(), dtype)
    return (x if like.strides == like.given else x.clone()), like


class Code:
    """An unbiased block code."""

    __slots__ = ("bytes", "like", "__weakref__")

    def __init__(self, x: Tensor, bits: int, seed: Tensor, header: str = "bf16", like: Layout | None = None) -> None:
        if like is None:
            like = code_layout(x.shape, x.stride(), x.dtype, bits, header)
        self.like, self.bytes = like, _pack(x, seed, like.id)

    @classmethod
    def of_bytes(cls, bytes_: Tensor, like: Layout) -> Code:
        """Of bytes that another op has made."""
        code = cls.__new__(cls)
        code.like, code.bytes = like, bytes_
        return code

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def restore(self) -> Tensor:
        return _unpack(self.bytes, self.like.id)

    @property
    def shape(self) -> Sizes:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def numbers(self) -> Numbers:
        return self.like.numbers

    @property
    def bits(self) -> int:
        return self.like.numbers[0]

    @property
    def header(self) -> str:
        return "f32" if self.numbers[5] else "bf16"

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def bytes_at(self, bits: int) -> int:
        """What the code would take in so many bits."""
        return layout(self.shape, self.dtype, 0, 1, code_numbers(bits, self.header))["total"]

    def recode(self, bits: int, seed: Tensor) -> None:
        """Rounds the decoded values again. Right in the mean as the first time; the two variances add."""
        self.__init__(self.restore(), bits, seed, self.header)  # type: ignore[misc]

    def squared_ranges(self, x: Tensor) -> Tensor:
        """(highest − lowest)² of each block, from the headers: a low and a step each."""
        at = layout(self.shape, self.dtype, 0, 1, self.numbers)
        kind = torch.float32 if self.header == "f32" else torch.bfloat16
        steps = self.bytes[at["headers"] : at["headers"] + 2 * kind.itemsize * at["blocks"]].view(kind)[1::2]
        return (steps.float() * ((1 << self.bits) - 1)).square()


class _OfCode:
    """A form that holds a Code."""

    __slots__ = ()
    code: Code

    @property
    def nbytes(self) -> int:
        return self.code.nbytes

    @property
    def bits(self) -> int:
        return self.code.bits

    @property
    def device(self) -> torch.device:
        return self.code.device

    def bytes_at(self, bits: int) -> int:
        return self.code.bytes_at(bits)

    def recode(self, bits: int, seed: Tensor) -> None:
        self.code.recode(bits, seed)

    def squared_ranges(self, x: Tensor) -> Tensor:
        return self.code.squared_ranges(x)


class Reread(_OfCode):
    """Another tensor that covers the same memory as a code's: the same values, in a shape and strides of its own."""

    __slots__ = ("code", "shape", "strides")

    def __init__(self, code: Code, x: Tensor) -> None:
        self.code, self.shape, self.strides = code, x.shape, x.stride()

    def restore(self) -> Tensor:
        code = self.code
        return _unpack(code.bytes, code_layout(self.shape, self.strides, code.dtype, code.bits, code.header).id)


class Cast:
    """Nothing: a parameter in another type, of some strides, is made of the parameter again."""

    __slots__ = ("parameter", "version", "dtype", "shape", "strides", "offset")
    nbytes = 0

    def __init__(self, x: Tensor, parameter: Tensor) -> None:
        self.parameter, self.version, self.dtype = parameter, parameter._version, x.dtype
        self.shape, self.strides, self.offset = x.shape, x.stride(), x.storage_offset()

    def restore(self) -> Tensor:
        if self.parameter._version != self.version:
            raise RuntimeError("[packing] a parameter must stay as it is until backward, got one changed in place after autocast read it")
        return self.parameter.to(self.dtype).as_strided(self.shape, self.strides, self.offset)


def _beside(t: Tensor, shape: torch.Size) -> Tensor:
    """A norm's statistics as they broadcast to its input: one a row, a channel, or a group of channels."""
    t = t.float()
    if t.dim() == len(shape) and all(a in (1, b) for a, b in zip(t.shape, shape)):
        return t
    if t.dim() == 1:
        return t.view(1, -1, *(1,) * (len(shape) - 2))
    return t.repeat_interleave(shape[1] // t.shape[1], 1).view(*shape[:2], *(1,) * (len(shape) - 2))


class Normed(_OfCode):
    """A code of (x − mean)·scale, the values that a norm makes. What the means and scales of the parts of a block are does not matter."""

    __slots__ = ("code", "mean", "scale", "dtype", "__weakref__")

    def __init__(self, x: Tensor, mean: Tensor | None, scale: Tensor, bits: int, seed: Tensor) -> None:
        self.dtype, self.mean, self.scale = x.dtype, mean, scale  # the node holds both anyway
        factor = _beside(scale, x.shape)
        normed = torch.empty_like(x, dtype=torch.float32)
        if mean is None:
            torch.mul(x, factor, out=normed)
        else:  # x·scale − mean·scale in one pass: it errs by no more than x itself, as its type holds it
            torch.addcmul(_beside(mean, x.shape) * -factor, x, factor, out=normed)
        self.code = Code(normed, bits, seed)

    def restore(self) -> Tensor:
        y = self.code.restore()
        width = _beside(self.scale, y.shape).reciprocal()
        x = y if self.dtype is torch.float32 else torch.empty_like(y, dtype=self.dtype)
        return torch.mul(y, width, out=x) if self.mean is None else torch.addcmul(_beside(self.mean, y.shape), y, width, out=x)


@functools.lru_cache(maxsize=256)
def _two_values(off: float, on: float, device: torch.device) -> Tensor:
    return torch.tensor([off, on], dtype=torch.float32, device=device)


class _InOrder:
    """A form that comes back in a layout of its own."""

    __slots__ = ()
    like: Layout

    @property
    def shape(self) -> Sizes:
        return self.like.shape

    @property
    def strides(self) -> Sizes:
        return self.like.strides


class Mask(_InOrder):
    """One bit a value; comes back as `on` and `off`."""

    __slots__ = ("bits", "like", "on", "off")

    def __init__(self, x: Tensor, dtype: torch.dtype, on: float = 1.0, off: float = 0.0) -> None:
        self.on, self.off = on, off
        x, self.like = _in_memory_order(x, dtype)
        self.bits = _pack_mask(x)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def restore(self) -> Tensor:
        like = self.like
        if like.dtype is torch.bool:
            return _unpack_mask(self.bits, self.shape, self.strides, torch.bool)
        return _unpack_table(self.bits, _two_values(self.off, self.on, self.bits.device), like.id)


def _ones(x: Tensor) -> Tensor:
    """A gradient of 1 at every value, in no memory; float32, so that what torch makes of it is."""
    return torch.ones((), dtype=torch.float32, device=x.device).expand_as(x)


def inside(x: Tensor, ends: tuple[float, float] | None) -> Mask | None:
    """Where a hardtanh between these ends, or a hardsigmoid, has a slope. Backward itself says so: types and devices compare in ways of
    their own. None where no number of the type lies between the ends."""
    one = torch.ones((), dtype=x.dtype, device=x.device).expand_as(x)
    if ends is None:
        return Mask(torch.ops.aten.hardsigmoid_backward(one, x), x.dtype, 0.0, -math.inf)
    low, high = ends
    middle = max(low + 1, min(0.0, high - 1)) if math.isinf(low) or math.isinf(high) else (low + high) / 2
    low_, middle, high_ = torch.tensor([low, middle, high], dtype=torch.float32, device="cpu").to(x.dtype).double().tolist()
    if not max(low, low_) < middle < min(high, high_):
        return None
    return Mask(torch.ops.aten.hardtanh_backward(one, x, low, high), x.dtype, middle, -math.inf)


@functools.lru_cache(maxsize=1)
def _clamp_passes_at_ends() -> bool:
    """Has a clamp the slope 1 at its ends? In torch 2.11 it has, in 2.15 it has 0 there."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():  # no context packs what this saves
        x = torch.ones((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(max=1.0), x)[0])


def within(x: Tensor, least: float | None, most: float | None) -> Mask | None:
    """Where a clamp passes the gradient: between `least` and `most`, with or without the ends."""
    low, high = -math.inf if least is None else float(least), math.inf if most is None else float(most)
    middle = (low + high) / 2 if math.isfinite(low) and math.isfinite(high) else min(max(0.0, low + 1), high - 1)
    middle_ = float(torch.tensor(middle, dtype=torch.float32, device="cpu").to(x.dtype))
    if not low < middle_ < high:  # ends so near that no number of the type lies between them
        return None
    above, below = (torch.ge, torch.le) if _clamp_passes_at_ends() else (torch.gt, torch.lt)
    inside = torch.ones_like(x, dtype=torch.bool) if least is None else above(x, least)
    return Mask(inside if most is None else inside & below(x, most), x.dtype, middle, math.nan)  # which lies in no interval


@functools.lru_cache(maxsize=4096)
def _row_strides(shape: torch.Size) -> Sizes:
    return torch.empty(shape, device="meta").stride()


class Shape:
    """Nothing at all: backward reads sizes, strides and type only."""

    __slots__ = ("shape", "strides", "dtype", "device")
    nbytes = 0

    def __init__(self, x: Tensor) -> None:
        self.shape, self.strides, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device

    def restore(self) -> Tensor:
        # One number seen at every place takes no memory; other strides than a row's are read too, so they are given.
        if self.strides == _row_strides(self.shape):
            return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Index(_InOrder):
    """Integers from 0 to `most` in the fewest bits."""

    __slots__ = ("bytes", "like", "bits")

    def __init__(self, x: Tensor, most: int) -> None:
        self.bits = most.bit_length()
        x, self.like = _in_memory_order(x, x.dtype)
        self.bytes = ops.narrow.default(x, 0, most)

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def restore(self) -> Tensor:
        return ops.widen.default(self.bytes, self.shape, self.strides, 0, self.bits)


class Slope(_OfCode):
    """A code of a function of x, and on the way back an x' at which backward's formula gives the coded number.

    Headers are float32: a block's highest level then is its highest number. bf16's are rounded outwards, so that it would lie up to 2⁻⁷ of
    the range above; no x' has a slope beyond the most, and cutting off there is a bias where many values have that slope (ELU's 1).
    """

    __slots__ = ("code", "dtype", "back", "__weakref__")

    def __init__(self, number: Tensor, dtype: torch.dtype, bits: int, seed: Tensor, back: Callable[[Tensor], Tensor]) -> None:
        self.code, self.dtype, self.back = Code(number, bits, seed, "f32"), dtype, back

    def restore(self) -> Tensor:
        return self.back(self.code.restore()).to(self.dtype)


class Exp(_OfCode):
    """A code of exp(x), of float32, which comes back as x: on a GPU without a tensor of the powers, which can be a step's largest."""

    __slots__ = ("code", "__weakref__")

    def __init__(self, x: Tensor, bits: int, seed: Tensor) -> None:
        like = code_layout(x.shape, x.stride(), x.dtype, bits, "f32")
        self.code = Code.of_bytes(_pack_exp(x, seed, like.id), like)

    def restore(self) -> Tensor:
        return _unpack_log(self.code.bytes, self.code.like.id)


# ---- slopes: forward gives f'(x) of the saved tensor, back an x' with that slope -----------------------------------------------------

def _gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Tensor) -> Tensor:
    k, c = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + c * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * c * x * x)


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return t + x * torch.sigmoid(x) * (1 - t * t)


_KINDS = {"gelu": (0, _gelu), "gelu_tanh": (1, _gelu_tanh), "silu": (2, _silu), "mish": (3, _mish)}  # numbers of core/slope.h
SLOPES = {name: curve for name, (_, curve) in _KINDS.items()}


@functools.lru_cache(maxsize=256)
def _slope_tables(kind: str, bits: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """2^bits levels of slopes, 0 and 1 among them, and a value with each slope. A level is the slope of its value as the type holds it."""
    curve = _KINDS[kind][1]
    line = functools.partial(torch.linspace, dtype=torch.float64, device="cpu")  # whatever torch's defaults are
    x = line(-6, 6, 1_200_001)
    d = curve(x)
    least, most = int(d.argmin()), int(d.argmax())
    x, d = x[least : most + 1], d[least : most + 1]  # here the slope rises
    low, high, count = float(d[0]), float(d[-1]), 1 << bits
    outside = max(1, round((count - 1) * -low / (high - low)))
    if bits == 1:
        levels = torch.tensor([low, high], dtype=torch.float64, device="cpu")
    else:
        below, above = (line(a, b, outside + 1) for a, b in ((low, 0.0), (1.0, high)))
        levels = torch.cat([below[:-1], line(0, 1, count - 2 * outside), above[1:]])
    at = torch.searchsorted(d, levels).clamp_(1, len(d) - 1)
    share = ((levels - d[at - 1]) / (d[at] - d[at - 1])).clamp_(0, 1)
    values = (x[at - 1] + share * (x[at] - x[at - 1])).to(dtype)
    return curve(values.double()).float().to(device), values.float().to(device)


class SlopeCode(_InOrder):
    """Slopes of GELU, SiLU or Mish, rounded without bias to levels; comes back as values with these slopes."""

    __slots__ = ("bytes", "like", "table", "kind", "bits", "__weakref__")

    def __init__(self, x: Tensor, kind: str, bits: int, seed: Tensor) -> None:
        self.kind = kind
        x, self.like = _in_memory_order(x, x.dtype)
        self._encode(x, bits, seed)

    def _encode(self, x: Tensor, bits: int, seed: Tensor) -> None:
        levels, self.table = _slope_tables(self.kind, bits, x.dtype, x.device)
        self.bits, self.bytes = bits, _pack_slope(x, seed, levels, _KINDS[self.kind][0])

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def bytes_at(self, bits: int) -> int:
        values = math.prod(self.shape)
        return values // 8 * bits + (values % 8 * bits + 7) // 8

    def recode(self, bits: int, seed: Tensor) -> None:
        self._encode(self.restore(), bits, seed)

    def squared_ranges(self, x: Tensor) -> Tensor:
        """The ranges of even codes with the same variance: levels are common to all blocks, and slopes that are levels have no noise."""
        levels = _slope_tables(self.kind, self.bits, self.like.dtype, x.device)[0]
        slopes = _KINDS[self.kind][1](x.float())
        above = torch.bucketize(slopes, levels).clamp_(1, len(levels) - 1)
        noise = (slopes - levels[above - 1]).mul_(levels[above] - slopes).clamp_(min=0)
        noise = noise.mul_(6 * ((1 << self.bits) - 1) ** 2)
        if not dense(noise) or x.numel() % BLOCK:
            return noise.mean().expand(-(-x.numel() // BLOCK))
        return noise.as_strided((x.numel() // BLOCK, BLOCK), (BLOCK, 1)).mean(1)

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def restore(self) -> Tensor:
        return _unpack_table(self.bytes, self.table, self.like.id)


def _same(x: Tensor) -> Tensor:
    return x


def _line(d: Tensor, slope: float, start: float) -> Tensor:
    """slope·d + start in one pass, or none."""
    return d if slope == 1 and start == 0 else torch.rsub(d, start, alpha=-slope)


def _root(d: Tensor) -> Tensor:
    return d.clamp_(min=0).sqrt_()


def smooth_kind(node: Any, name: str) -> str | None:
    """The activations whose slopes have kernels of their own."""
    if name == "GeluBackward0":
        return "gelu_tanh" if node._saved_approximate == "tanh" else "gelu"
    return {"SiluBackward0": "silu", "MishBackward0": "mish"}.get(name)


def slope_of(node: Any, name: str, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None:
    """(float32 slope of the saved value, a value with that slope) of other activations' nodes; None where there is no such value.

    Where torch has a function for the gradient it gives the slope, of a gradient of 1: one pass over the values, whatever their type.
    """
    aten = torch.ops.aten
    if name == "HardswishBackward0":  # x/3 + 1/2 between −3 and 3 takes the values 0 and 1 of both ends too
        end = 3 - 2 * torch.finfo(dtype).eps  # the last number of the type before 3
        return (lambda x: aten.hardswish_backward(_ones(x), x)), lambda d: _line(d, 3, -1.5).clamp_(-end, end)
    if name in ("EluBackward0", "CeluBackward0"):
        alpha, scale = float(node._saved_alpha), 1.0
        inside = 1 / alpha
        if name == "EluBackward0":
            scale, inside = float(node._saved_scale), float(node._saved_input_scale)
        most = alpha * scale * inside if name == "EluBackward0" else 1.0
        if most < scale or inside <= 0:  # no value has a slope between the two ends
            return None
        return (
            lambda x: aten.elu_backward(_ones(x), alpha, scale, inside, False, x),
            lambda d: _line(d.clamp_(0, most).log_(), 1 / inside, -math.log(most) / inside),
        )
    if name == "BinaryCrossEntropyWithLogitsBackward0":  # linear in sigmoid(x), with and without weights; the target's gradient is not
        if node.next_functions[1][0] is not None:
            return None
        return (lambda x: torch.sigmoid(x.float())), lambda d: d.logit_(0.0)  # of d within 0 and 1
    if name in ("SmoothL1LossBackward0", "HuberLossBackward0"):  # linear in the difference, cut off at β or δ
        end, target = float(node._saved_beta if name[0] == "S" else node._saved_delta), node._raw_saved_target
        if target.unpack_hook is not None or end <= 0 or target.data.shape != node._raw_saved_self.data.shape:
            return None
        target, unit = target.data.detach(), end if name[0] == "S" else 1.0
        return (lambda x: torch.sub(x.float(), target).clamp_(-end, end).div_(unit)), lambda d: d.mul_(unit).add_(target)
    if name == "PowBackward0":  # squares, and the cubes of GELU as transformers writes it; backward reads x and x²
        exponent = float(node._saved_exponent)
        return (_same, _same) if exponent == 2 else ((lambda x: x.float().square()), _root) if exponent == 3 else None
    if name == "SoftplusBackward0":
        beta, threshold = float(node._saved_beta), float(node._saved_threshold)
        if math.exp(-threshold) > torch.finfo(torch.float32).eps:  # beyond the threshold the slope is 1, and none lies between
            return None
        return (lambda x: aten.softplus_backward(_ones(x), x, beta, threshold)), lambda d: _line(d.logit_(0.0), 1 / beta, 0)
    if name == "SigmoidBackward0":  # y(1 − y) = d, by the smaller root: it has the finer floats
        return (lambda y: aten.sigmoid_backward(_ones(y), y)), lambda d: _line(_line(d, -4, 1).clamp_(min=0).sqrt_(), -0.5, 0.5)
    if name == "TanhBackward0":
        return (lambda y: aten.tanh_backward(_ones(y), y)), lambda d: _line(d, -1, 1).clamp_(0, 1).sqrt_()
    return None
