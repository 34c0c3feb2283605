"""Layers with weights and pools of converted models."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import kept as forms
from ._ops import ops
from .layer_common import SECOND_ORDER, backward, keep, kept, no_autocast, shares
from .shared import Save, dense_strides, find_save, flush_deferred, fresh_seed, in_order, keeps, link, link_of, pack

__all__ = ["ConvCall", "adaptive_avg_pool2d", "avg_pool2d", "conv", "linear", "max_pool2d"]

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
        zeros = (0,) * len(call.stride)
        with no_autocast(x.device.type):
            bias = None if b is None else b.to(dtype)
            return torch.convolution(x.to(dtype), w.to(dtype), bias, call.stride, call.padding, call.dilation, False, zeros, call.groups)

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
    zeros, ones = (0,) * len(call.stride), (1,) * len(call.stride)
    like = torch.empty((), dtype=g.dtype, device=g.device).expand(w.shape)  # torch reads its sizes
    total = None
    for first, last, x in save.parts(g.dtype):
        part = g[first:last]
        if skips:
            steps = (slice(None), slice(None), *(slice(0, s * n, s) for s, n in zip(call.stride, g.shape[2:])))
            x, part = x[steps].contiguous(), part.contiguous()
        how = (ones if skips else call.stride, call.padding, call.dilation, False, zeros, call.groups)
        made = _aten.convolution_backward(part, x, like, None, *how, (False, True, False))[1]
        total = made if total is None else total.float().add_(made)
    return like.new_zeros(w.shape) if total is None else total  # of an empty batch


def _input_gradient(call: ConvCall, g: Tensor, w: Tensor, shape: torch.Size) -> Tensor:
    """Reads the weight alone."""
    zeros = (0,) * len(call.stride)
    if g.is_contiguous() and w.is_contiguous():
        like = torch.empty((), dtype=g.dtype, device=g.device).expand(shape)  # torch reads its sizes
        args = (call.stride, call.padding, call.dilation, False, zeros, call.groups, (True, False, False))
        return _aten.convolution_backward(g, like, w, None, *args)[0]
    # Of an input torch would read the order of memory too: the convolution of g the other way keeps g's.
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
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _hooked_conv(x: Tensor, w: Tensor, b: Tensor | None, dtype: torch.dtype, save: Save, call: ConvCall) -> Tensor:
    """torch's own convolution and its own node, which keeps the code in its input's place: a third of the CPU time of a Function."""
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


def _window_starts(n: int, stride: int, padding: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device).mul_(stride).sub_(padding)


class _MaxPool2d(Function):
    """Keeps where in its window each maximum stood."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, k: tuple, s: tuple, p: tuple, d: tuple, ceil: bool) -> Tensor:
        window = [*k, *s, *p, *d, int(ceil)]
        ctx.fused = x.is_cuda and x.is_contiguous(memory_format=torch.channels_last) and max(window) <= 256 and ops.max_pool_fits(x.shape, window)
        if ctx.fused:
            y, bytes_ = ops.max_pool(x, window)
            ctx.shape, ctx.window = x.shape, window
            keep(ctx, name, None, bytes_, kinds=("offsets",))
            return y
        y, index = _aten.max_pool2d_with_indices(x, k, s, p, d, ceil)
        rows = _window_starts(y.shape[-2], s[0], p[0], x.device).unsqueeze(1)
        columns = _window_starts(y.shape[-1], s[1], p[1], x.device)
        down = torch.div(index, x.shape[-1], rounding_mode="floor")
        across = index.sub_(down * x.shape[-1]).sub_(columns).div_(d[1], rounding_mode="floor")
        form = forms.Index(down.sub_(rows).div_(d[0], rounding_mode="floor").mul_(k[1]).add_(across), k[0] * k[1] - 1)
        ctx.form, ctx.window = (form.shape, form.strides, form.bits), (k, s, p, d, ceil)
        ctx.shape, ctx.strides = x.shape, dense_strides(x)
        keep(ctx, name, None, form.bytes, kinds=("offsets",))
        return y

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        _, bytes_ = kept(ctx)
        if ctx.fused:
            return ops.max_pool_backward(g, bytes_, ctx.shape, ctx.window), *(None,) * 6
        k, s, p, d, ceil = ctx.window
        shape, strides, bits = ctx.form
        offset = ops.widen(bytes_, shape, strides, 0, bits)
        down = torch.div(offset, k[1], rounding_mode="floor")
        across = offset.sub_(down * k[1]).mul_(d[1]).add_(_window_starts(shape[-1], s[1], p[1], g.device))
        rows = _window_starts(shape[-2], s[0], p[0], g.device).unsqueeze(1)
        index = down.mul_(d[0]).add_(rows).mul_(ctx.shape[-1]).add_(across)
        # Of the input torch reads sizes and order: the gradient's own memory has both.
        dx = torch.empty_strided(ctx.shape, ctx.strides, dtype=g.dtype, device=g.device)
        _aten.max_pool2d_with_indices_backward.grad_input(in_order(g, strides), dx, k, s, p, d, ceil, index, grad_input=dx)
        return dx, *(None,) * 6


def max_pool2d(x: Tensor, method: str, name: str, k: tuple, s: tuple, p: tuple, d: tuple, ceil: bool) -> Tensor:
    """A layer with weights that reads the pool of a ReLU's output packs it as one: zero, or a level of what is positive."""
    found = link_of(x)
    flush_deferred()
    y = _MaxPool2d.apply(x, name, k, s, p, d, ceil)
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


class _AvgPool(Function):
    """Keeps sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple | None, size: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.kinds, ctx.save = "", (), None
        ctx.window, ctx.shape = window, forms.Shape(x)
        return F.adaptive_avg_pool2d(x, size) if window is None else F.avg_pool2d(x, *window)

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        like = ctx.shape.restore().to(g.dtype)
        if ctx.window is None:
            return _aten._adaptive_avg_pool2d_backward(g.contiguous() if like.is_contiguous() else g, like), None, None
        k, s, p, ceil, counts, divisor = ctx.window
        pair = [(n, n) if isinstance(n, int) else tuple(n) for n in (k, s, p)]
        return _aten.avg_pool2d_backward(g, like, *pair, ceil, counts, divisor), None, None


def avg_pool2d(x: Tensor, *window: Any) -> Tensor:
    """F.avg_pool2d's arguments."""
    flush_deferred()
    return _AvgPool.apply(x, window, None)


def adaptive_avg_pool2d(x: Tensor, size: Any) -> Tensor:
    flush_deferred()
    return _AvgPool.apply(x, None, size)
