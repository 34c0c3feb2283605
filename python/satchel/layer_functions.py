"""Layers with weights and pools of converted models."""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import kept as forms
from ._ops import ops
from .layer_common import SECOND_ORDER, backward, keep, kept, no_autocast, own, shares
from .shared import Save, dense_strides, find_save, flush_deferred, fresh_seed, in_order, keeps, link, link_of, pack

__all__ = ["ConvCall", "Window", "adaptive_avg_pool", "avg_pool", "conv", "linear", "max_pool"]

_aten = torch.ops.aten


# ---- layers with weights -------------------------------------------------------------------------------------------------------------


def _layer_type(x: Tensor) -> torch.dtype:
    """The type in which autocast has a layer with weights compute."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _input_save(x: Tensor, dtype: torch.dtype, method: str, name: str) -> Save:
    """What stands for x already, or a code of x for every layer that reads it."""
    found = find_save(x, method) if shares(method) else None
    if found is not None:
        return found
    key = None if x.grad_fn is None else (x._version, dtype, method)
    known = getattr(x, "_satchel_input", None)
    if key is not None and known is not None and known[0] == key and isinstance(known[1], Save):
        return known[1]
    with torch.no_grad():
        bytes_, code = pack(x.detach().to(dtype), keeps(method, "weight_input")["input"].numbers, fresh_seed(x.device))
    save = Save(code, bytes_, kind="input", layer=name)
    if key is not None:  # not of a batch: its noise would come again in the next step
        setattr(x, "_satchel_input", (key, save))
    return save


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, name: str, dtype: torch.dtype, save: Save | None) -> Tensor:
        keep(ctx, name, save, w if ctx.needs_input_grad[0] else None)
        ctx.types = x.dtype, w.dtype, None if b is None else b.dtype
        with no_autocast(x.device.type):
            return F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        save, w = kept(ctx)
        needs = ctx.needs_input_grad
        dx = dw = db = None
        if needs[1]:
            for first, last, x in save.parts(g.dtype):
                product = g[first:last].reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
                dw = product if dw is None else dw.float().add_(product)
            dw = w.new_zeros(w.shape, dtype=ctx.types[1]) if dw is None else dw.to(ctx.types[1])  # of an empty batch
        if needs[0]:
            dx = (g @ w.to(g.dtype)).to(ctx.types[0])
        if needs[2]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.types[2])
        return dx, dw, db, None, None, None


def linear(x: Tensor, w: Tensor, b: Tensor | None, method: str, name: str) -> Tensor:
    dtype = _layer_type(x)
    save = _input_save(x, dtype, method, name) if w.requires_grad else None
    flush_deferred()
    return _Linear.apply(x, w, b, name, dtype, save)


@dataclasses.dataclass(frozen=True)
class ConvCall:
    """A convolution without its tensors; one number a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()  # of a transposed one

    @property
    def numbers(self) -> tuple[Any, ...]:
        """As torch's convolution takes them."""
        zeros = (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding or zeros, self.groups

    def skips(self, w: Tensor) -> bool:
        """Does a kernel of 1×1 step over places? On the CPU torch gets its gradient wrong in channels_last order (oneDNN issue 6035)."""
        return w.shape[2:].numel() == 1 and not any(self.padding) and any(s != 1 for s in self.stride)


class _Conv(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, name: str, dtype: torch.dtype, save: Save | None, call: ConvCall
    ) -> Tensor:
        keep(ctx, name, save, w)
        ctx.types = x.dtype, w.dtype, None if b is None else b.dtype
        ctx.call, ctx.shape = call, x.shape
        with no_autocast(x.device.type):
            return torch.convolution(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), *call.numbers)

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        save, w = kept(ctx)
        needs, call = ctx.needs_input_grad, ctx.call
        dx = dw = db = None
        if needs[1]:
            dw = _weight_gradient(call, g, save, w).to(ctx.types[1])
        if needs[0]:
            dx = _input_gradient(call, g, w.to(g.dtype), ctx.shape).to(ctx.types[0])
        if needs[2]:
            db = g.sum([d for d in range(g.dim()) if d != 1]).to(ctx.types[2])
        return dx, dw, db, None, None, None, None


def _weight_gradient(call: ConvCall, g: Tensor, save: Save, w: Tensor) -> Tensor:
    """The sum over parts of the batch, whose inputs are decoded one after the other."""
    skips = g.device.type == "cpu" and call.skips(w)
    form = dataclasses.replace(call, stride=(1,) * len(call.stride), output_padding=()) if skips else call
    like = torch.empty((), dtype=g.dtype, device=g.device).expand(w.shape)  # torch reads its sizes
    total = None
    for first, last, x in save.parts(g.dtype):
        part = g[first:last]
        if skips:  # every stride-th place of the larger one is read, or, transposed, written
            small = x if call.transposed else part
            steps = (slice(None), slice(None), *(slice(0, s * n, s) for s, n in zip(call.stride, small.shape[2:])))
            x, part = (x, part[steps]) if call.transposed else (x[steps], part)
            x, part = x.contiguous(), part.contiguous()
        made = _aten.convolution_backward(part, x, like, None, *form.numbers, (False, True, False))[1]
        total = made if total is None else total.float().add_(made)
    return like.new_zeros(w.shape) if total is None else total  # of an empty batch


def _input_gradient(call: ConvCall, g: Tensor, w: Tensor, shape: torch.Size) -> Tensor:
    """Reads the weight alone."""
    if g.is_contiguous() and w.is_contiguous():
        like = torch.empty((), dtype=g.dtype, device=g.device).expand(shape)  # torch reads its sizes
        return _aten.convolution_backward(g, like, w, None, *call.numbers, (True, False, False))[0]
    # Of an input torch would read the order of memory too: the convolution of g the other way keeps g's.
    if call.transposed:
        dx = torch.convolution(g, w, None, *dataclasses.replace(call, transposed=False, output_padding=()).numbers)
        # An output padding longer than the stride lets it read beyond x.
        within = [slice(0, n) for n in shape]
        return dx[tuple(within)]
    sizes = zip(g.shape[2:], call.stride, call.padding, call.dilation, w.shape[2:])
    least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in sizes]
    more = [n - m for n, m in zip(shape[2:], least)]
    return torch.convolution(g, w, None, call.stride, call.padding, call.dilation, True, more, call.groups)


def conv(x: Tensor, w: Tensor, b: Tensor | None, method: str, name: str, call: ConvCall) -> Tensor:
    dtype = _layer_type(x)
    save = _input_save(x, dtype, method, name) if w.requires_grad else None
    flush_deferred()
    if save is None or save.code.exact or _default_hooks(False) is not None or (x.device.type == "cpu" and call.skips(w)):
        return _Conv.apply(x, w, b, name, dtype, save, call)
    return _hooked_conv(x, w, b, dtype, save, call)


_CONVS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _hooked_conv(x: Tensor, w: Tensor, b: Tensor | None, dtype: torch.dtype, save: Save, call: ConvCall) -> Tensor:
    """torch's own convolution and its own node, which keeps the code in its input's place: a third of the CPU time of a Function."""
    if call.transposed:
        y = _TRANSPOSED[w.dim() - 2](x, w, b, call.stride, call.padding, call.output_padding, call.groups, call.dilation)
    else:
        y = _CONVS[w.dim() - 2](x, w, b, call.stride, call.padding, call.dilation, call.groups)
    node: Any = y.grad_fn
    node._raw_saved_input.register_hooks(lambda _: save, lambda kept_: _decoded(kept_, dtype))
    node.metadata["satchel"] = weakref.ref(save)
    return y


def _decoded(save: Save, dtype: torch.dtype) -> Tensor:
    if torch.is_grad_enabled():
        raise RuntimeError(SECOND_ORDER)
    with no_autocast(save.bytes.device.type):
        return save.whole(dtype)


# ---- pools ---------------------------------------------------------------------------------------------------------------------------
# One spatial dimension runs as two, the first of them 1 long.

Window = tuple[tuple[int, ...], ...]  # kernel, stride, padding and dilation, one number a spatial dimension


def _lifted(window: Window) -> Window:
    return tuple((int(i != 2), *numbers) for i, numbers in enumerate(window)) if len(window[0]) == 1 else window


def _up(t: Tensor, dims: int) -> Tensor:
    return t.unsqueeze(2) if dims == 1 else t


def _down(t: Tensor, dims: int) -> Tensor:
    """… and back, as a tensor of its own: no view to autograd."""
    return _aten._unsafe_view(t, (*t.shape[:2], t.shape[3])) if dims == 1 else t


def _starts(window: Window, d: int, sizes: Any, device: torch.device) -> Tensor:
    """Where windows start in spatial dimension d, as it broadcasts to N×C×spatial."""
    _, s, p, _ = window
    return torch.arange(sizes[d + 2], device=device).mul_(s[d]).sub_(p[d]).view(-1, *(1,) * (len(sizes) - d - 3))


def _offsets(index: Tensor, window: Window, shape: torch.Size) -> Tensor:
    """torch's indices into a map's values as offsets in windows, row by row. Writes over them."""
    k, _, _, dilation = window
    sizes, parts = index.shape, []
    for d in reversed(range(len(k))):
        rest = torch.div(index, shape[d + 2], rounding_mode="floor") if d else index
        place = index.sub_(rest, alpha=shape[d + 2]) if d else index
        place.sub_(_starts(window, d, sizes, index.device))
        parts.append(place if dilation[d] == 1 else place.div_(dilation[d], rounding_mode="floor"))
        index = rest
    offsets, step = parts[0], 1
    for d, part in zip(reversed(range(len(k))), parts[1:]):
        step *= k[d]
        offsets.add_(part, alpha=step)
    return offsets


def _indices(offsets: Tensor, window: Window, shape: torch.Size) -> Tensor:
    """And back."""
    k, _, _, dilation = window
    sizes, parts = offsets.shape, []
    for d in reversed(range(len(k))):
        rest = torch.div(offsets, k[d], rounding_mode="floor") if d else offsets
        place = offsets.sub_(rest, alpha=k[d]) if d else offsets
        parts.append((place if dilation[d] == 1 else place.mul_(dilation[d])).add_(_starts(window, d, sizes, offsets.device)))
        offsets = rest
    index, step = parts[0], 1
    for d, part in zip(reversed(range(len(k))), parts[1:]):
        step *= shape[d + 2]
        index.add_(part, alpha=step)
    return index


class _MaxPool(Function):
    """Keeps where in its window each maximum stood."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, name: str, window: Window, ceil: bool) -> Tensor:
        ctx.dims = dims = given.dim() - 2
        x, window = _up(given, dims), _lifted(window)
        flat = [n for numbers in window for n in numbers] + [int(ceil)]
        last = dims == 2 and x.is_cuda and x.is_contiguous(memory_format=torch.channels_last)
        ctx.fused = last and max(flat) <= 256 and ops.max_pool_fits(x.shape, flat)
        ctx.shape, ctx.window = x.shape, window
        if ctx.fused:
            ctx.window = flat
            y, bytes_ = ops.max_pool(x, flat)
            keep(ctx, name, None, bytes_, kinds=("offsets",))
            return y
        pool = _aten.max_pool3d_with_indices if dims == 3 else _aten.max_pool2d_with_indices
        y, index = pool(x, *window, ceil)
        form = forms.Index(_offsets(index, window, x.shape), math.prod(window[0]) - 1)
        ctx.form, ctx.ceil = (form.shape, form.strides, form.bits), ceil
        ctx.strides = dense_strides(x)
        keep(ctx, name, None, form.bytes, kinds=("offsets",))
        return _down(y, dims)

    @backward
    def backward(ctx: Any, given: Tensor) -> Any:
        _, bytes_ = kept(ctx)
        if ctx.fused:
            return ops.max_pool_backward(given, bytes_, ctx.shape, ctx.window), None, None, None
        shape, strides, bits = ctx.form
        g = in_order(_up(given, ctx.dims), strides)
        index = _indices(ops.widen(bytes_, shape, strides, 0, bits), ctx.window, ctx.shape)
        if ctx.dims == 3:
            like = torch.empty((), dtype=g.dtype, device=g.device).expand(ctx.shape)  # torch reads its sizes
            dx = _aten.max_pool3d_with_indices_backward(g.contiguous(), like, *ctx.window, ctx.ceil, index.contiguous())
            return in_order(dx, ctx.strides), None, None, None
        # Of the input torch reads sizes and order: the gradient's own memory has both.
        dx = torch.empty_strided(ctx.shape, ctx.strides, dtype=g.dtype, device=g.device)
        _aten.max_pool2d_with_indices_backward.grad_input(g, dx, *ctx.window, ctx.ceil, index, grad_input=dx)
        return _down(dx, ctx.dims), None, None, None


def max_pool(x: Tensor, method: str, name: str, window: Window, ceil: bool) -> Tensor:
    """A layer with weights that reads the pool of a ReLU's output packs it as one: zero, or a level of what is positive."""
    found = link_of(x)
    flush_deferred()
    y = _MaxPool.apply(x, name, window, ceil)
    if found is None or not found.is_relu or not shares(method):
        return y
    numbers = keeps(method, "epilogue", "none", "relu", False, True, x.shape[1])["shared"].numbers
    output = y.detach()
    saves: list[Save] = []

    def on_demand(_: str) -> Save:
        if not saves:
            with torch.no_grad():
                bytes_, code = pack(output, numbers, fresh_seed(output.device))
            saves.append(Save(code, bytes_, layer=name))
        return saves[0]

    return link(y, on_demand, is_relu=True)


_AVERAGES: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


class _AvgPool(Function):
    """Keeps sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple | None, size: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.kinds, ctx.save = "", (), None
        ctx.dims = dims = x.dim() - 2
        ctx.window, ctx.shape = window, forms.Shape(_up(x, dims))
        if window is None:
            return own(_ADAPTIVE[dims](x, size))
        return own(_AVERAGES[dims](x, *(window if dims > 1 else window[:5])))  # torch's of one dimension takes no divisor

    @backward
    def backward(ctx: Any, given: Tensor) -> Any:
        like, dims = ctx.shape.restore().to(given.dtype), ctx.dims
        g = _up(given, dims)
        k, s, p, *rest = ctx.window or ((), (), ())
        if dims == 3:  # in one order of memory
            g, like = g.contiguous(), torch.empty((), dtype=g.dtype, device=g.device).expand(like.shape)
            dx = _aten._adaptive_avg_pool3d_backward(g, like) if ctx.window is None else _aten.avg_pool3d_backward(g, like, k, s, p, *rest)
            return in_order(dx, ctx.shape.strides), None, None
        if ctx.window is None:
            return _down(_aten._adaptive_avg_pool2d_backward(g.contiguous() if like.is_contiguous() else g, like), dims), None, None
        if dims == 1:
            k, s, p = (1, *k), (1, *s), (0, *p)
        return _down(_aten.avg_pool2d_backward(g, like, k, s, p, *rest), dims), None, None


def avg_pool(x: Tensor, *window: Any) -> Tensor:
    """F.avg_pool2d's arguments, one number a spatial dimension."""
    flush_deferred()
    return _AvgPool.apply(x, window, None)


def adaptive_avg_pool(x: Tensor, size: Any) -> Tensor:
    flush_deferred()
    return _AvgPool.apply(x, None, size)
