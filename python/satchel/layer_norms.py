"""Norms of converted models.

A norm defers its packing. A ReLU that comes next claims it: both then keep one code of the normalised values, from which the next linear
layer or convolution also rebuilds its input (layer_activations.py). Nobody calls this unless there are gradients to record.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import Function

from .layer_common import ONE_SIDED, backward, keep, kept, shares
from .shared import Keep, Save, affine_like, defer, flush_deferred, fresh_seed, in_order, keeps, link, pack

__all__ = ["Deferred", "NormCall", "norm", "norm_back"]

_aten = torch.ops.aten
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclasses.dataclass(frozen=True)
class NormCall:
    """A norm without its tensors. kind: batch (a statistic a channel), layer (a row of the last `dims` dimensions) or group."""

    kind: str
    method: str
    name: str
    eps: float
    training: bool = True  # statistics of the batch; else the running ones
    dims: int = 1
    groups: int = 1
    centred: bool = True  # of layer: else RMSNorm, whose mean is taken for 0

    @property
    def dim(self) -> int:
        """Where γ and β stand, as Save has it."""
        return -self.dims if self.kind == "layer" else 1

    def width(self, x: Tensor) -> int:
        return x.shape[-self.dims :].numel() if self.kind == "layer" else x.shape[1]

    def span(self, x: Tensor) -> int:
        """Values that share a statistic."""
        if self.kind == "batch":
            return x.numel() // x.shape[1]
        return self.width(x) if self.kind == "layer" else x[0].numel() // self.groups

    def keeps(self, x: Tensor, activation: str = "none", scales: bool = False) -> dict[str, Keep]:
        """scales: γ needs a gradient. It reads values that a ReLU stops too, where another function reads the norm's output: their code must
        be right in the mean then, as it must be for x's gradient."""
        reads = scales or (x.requires_grad and (self.kind != "batch" or self.training))
        image = self.kind == "group" or (self.kind == "batch" and x.dim() > 2)
        by = "batch" if self.kind == "batch" else "layer"
        return keeps(self.method, "epilogue", by, activation, activation != "none", image, self.width(x), self.span(x) if reads else 0)

    def beside(self, t: Tensor, x: Tensor) -> Tensor:
        """A statistic as it broadcasts to x."""
        if self.kind == "group":
            return t.repeat_interleave(x.shape[1] // self.groups, 1).view(*x.shape[:2], *(1,) * (x.dim() - 2))
        return t if self.kind == "layer" else affine_like(t, x.shape, 1)

    def normalised(self, x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
        if mean is None:
            return torch.mul(x.detach().float(), rstd)
        return torch.sub(x.detach(), self.beside(mean, x)).float().mul_(self.beside(rstd, x))

    def coded(self, x: Tensor, mean: Tensor | None, rstd: Tensor) -> Save:
        """A code of x̂ that the norm alone keeps."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            bytes_, code = pack(self.normalised(x, mean, rstd), self.keeps(x)["norm"].numbers, fresh_seed(x.device))
        return Save(code, bytes_, self.dim, kind="norm", layer=self.name)

    def reads(self, x: Tensor, w: Tensor | None) -> bool:
        """Does backward read x̂?"""
        return (x.requires_grad and (self.kind != "batch" or self.training)) or (w is not None and w.requires_grad)


def _forward_norm(
    call: NormCall, x: Tensor, w: Tensor | None, b: Tensor | None, running: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd), statistics in float32; no mean of a norm that is not centred."""
    if not call.centred:
        squares = x.float().square().mean(tuple(range(-call.dims, 0)), keepdim=True)
        return torch.rms_norm(x, x.shape[-call.dims :], w, call.eps), None, squares.add_(call.eps).rsqrt_()
    if call.kind == "batch":
        y, mean, rstd = torch.native_batch_norm(x, w, b, *running, call.eps)  # type: ignore[call-arg, arg-type]  # running has four
        if not call.training:
            return y, running[0].float().clone(), (running[1].float() + call.eps).rsqrt_()
        values, axes = x, tuple(d for d in range(x.dim()) if d != 1)
    elif call.kind == "layer":
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-call.dims :], w, b, call.eps)
        values, axes = x, tuple(range(-call.dims, 0))
    else:
        y, mean, rstd = torch.native_group_norm(x, w, b, *x.shape[:2], x.shape[2:].numel(), call.groups, call.eps)  # type: ignore[call-arg]  # two of x.shape
        values, axes = x.reshape(x.shape[0], call.groups, -1), (2,)
    if mean.dtype is not torch.float32:  # statistics of 16 bits are too coarse to normalise with
        var, mean = torch.var_mean(values.float(), axes, correction=0, keepdim=call.kind == "layer")
        rstd = var.add_(call.eps).rsqrt_()
    return y, mean, rstd


def _batch_back(call: NormCall, g: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor | None, wants: tuple[bool, ...]) -> list[Tensor | None]:
    scale = rstd if gamma is None else gamma.float() * rstd
    if call.training:
        zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
        return list(_aten.native_batch_norm_backward(g, in_order(x.to(g.dtype), g.stride()), scale, None, None, zero, one, True, 0.0, wants))
    axes = [d for d in range(g.dim()) if d != 1]
    dx = torch.mul(g, affine_like(scale, g.shape, 1)) if wants[0] else None
    along = torch.mul(g, x).sum(axes, dtype=torch.float32) if wants[1] else None
    return [dx, along, g.sum(axes, dtype=torch.float32) if wants[2] else None]


def _rms_back(
    call: NormCall, g: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor | None, wants: tuple[bool, ...], coded: bool
) -> list[Tensor | None]:
    axes, rows = tuple(range(-call.dims, 0)), (-1, *x.shape[-call.dims :])
    sums = [(g * x).view(rows).sum(0) if wants[1] else None, None]
    if not wants[0]:
        return [None, *sums]
    own = g if gamma is None else g * gamma.view(x.shape[-call.dims :])
    along = (own * x).mean(axes, keepdim=True)
    if coded:  # as in norm_back()
        own = own * _shortened(call, x, call.span(x), rstd, axes).add_(1)
    return [torch.addcmul(own, x, along, value=-1).mul_(rstd), *sums]


def _shortened(call: NormCall, values: Tensor, span: int, rstd: Tensor, axes: tuple[int, ...]) -> Tensor:
    """What x̂·mean(g·x̂) has too much of g: the codes' variance over the number of values (docs/theory.md 8). The mean of exact x̂² is
    1 − eps·rstd²; what the codes' is above that is their variance."""
    variance = values.square().mean(axes, keepdim=call.kind == "layer").sub_(1).add_(rstd.square(), alpha=call.eps)
    return variance.div_(span)


def norm_back(
    call: NormCall, g: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor | None, wants: tuple[bool, ...], coded: bool
) -> list[Tensor | None]:
    """Gradients of the norm's input, γ and β for g, that of its output, where x holds x̂: torch's own functions, told that its mean is 0
    and its deviation 1. coded: x̂ comes from codes of about one variance."""
    if call.kind == "batch":
        return _batch_back(call, g, x, rstd, gamma, wants)
    g, x, gamma = g.float().contiguous(), x.float().contiguous(), None if gamma is None else gamma.float()
    if not call.centred:
        return _rms_back(call, g, x, rstd, gamma, wants, coded)
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    if call.kind == "layer":
        shape = x.shape[-call.dims :]
        like = torch.ones(shape, dtype=torch.float32, device=g.device) if gamma is None else gamma.view(shape)
        made = list(_aten.native_layer_norm_backward(g, x, shape, zero, one, like, like, wants))
        values, axes = x, tuple(range(-call.dims, 0))
    else:
        made = list(_aten.native_group_norm_backward(g, x, zero, one, gamma, *x.shape[:2], x.shape[2:].numel(), call.groups, wants))
        values, axes = x.view(x.shape[0], call.groups, -1), (2,)
    if not wants[0]:
        return made
    if coded:
        own = g if gamma is None else g * affine_like(gamma, g.shape, call.dim)
        made[0] = torch.addcmul(made[0], own, call.beside(_shortened(call, values, call.span(x), rstd, axes), x))
    made[0] = made[0].mul_(call.beside(rstd, x))
    return made


def _values_of(save: Save) -> tuple[Tensor, bool]:
    """x̂, and whether codes of about one variance stand for it."""
    return save.values(), not save.code.exact and save.code.side not in ONE_SIDED


class Deferred:
    """What a norm's node knows: what it was called with, until it has a code of its own or an activation has claimed it."""

    def __init__(self, call: NormCall, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor | None, rstd: Tensor) -> None:
        self.call, self.mean, self.rstd = call, mean, rstd
        self.x: Tensor | None = x
        self.w, self.b = w, b
        self.versions = tuple(None if t is None else t._version for t in (x, w, b))
        self.reads = call.reads(x, w)
        self.stream = torch.cuda.current_stream(x.device) if x.is_cuda else None  # whoever has it packed may be on another
        self.save: Save | None = None  # of its own code
        self.claimed: Save | None = None
        self.output: Callable[[], Tensor | None] = lambda: None
        self.lost = False

    def unchanged(self, first: int = 0) -> bool:
        return all(t is None or t._version == v for t, v in tuple(zip((self.x, self.w, self.b), self.versions))[first:])

    def pack_now(self) -> None:
        x, self.x = self.x, None
        if x is None or not self.reads:
            return
        self.lost = x._version != self.versions[0]
        if self.lost:  # backward says so, if it comes
            return
        with torch.cuda.stream(self.stream):  # None: as it is
            self.save = self.call.coded(x, self.mean, self.rstd)

    def affine(self, width: int) -> tuple[Tensor, Tensor]:
        """Copies of γ and β, float32, in a line."""
        gamma = torch.ones(width, dtype=torch.float32, device=self.rstd.device) if self.w is None else self.w.detach().float().flatten()
        beta = torch.zeros(width, dtype=torch.float32, device=self.rstd.device) if self.b is None else self.b.detach().float().flatten()
        return gamma.clone(), beta.clone()

    def shared(self, method: str) -> Save | None:
        """For a layer with weights that reads the norm's output: γ·x̂ + β, x̂ from the norm's own code."""
        if method != self.call.method:
            return None
        self.pack_now()
        if self.save is None or not self.unchanged(1):
            return None
        if self.save.gamma is None and (self.w is not None or self.b is not None):
            width = next(t.numel() for t in (self.w, self.b) if t is not None)
            gamma, beta = self.affine(width)
            self.save = dataclasses.replace(self.save, gamma=gamma, beta=beta)
        return self.save

    def values(self) -> tuple[Tensor, bool]:
        """As _values_of()."""
        if self.x is not None:
            self.lost = self.x._version != self.versions[0]
        if self.lost:
            raise RuntimeError("[convert] x must not be changed in place while a norm reads it, got a change")
        if self.x is not None:
            return self.call.normalised(self.x, self.mean, self.rstd), False
        save = self.save or self.claimed
        if save is None:
            raise RuntimeError("[convert] a second backward needs retain_graph=True in the first, got a graph that was freed")
        return _values_of(save)

    def release(self) -> None:
        if not _keeps_graph():
            self.x = self.save = self.claimed = None

    def output_goes(self, _: Any) -> None:
        if self.claimed is not None:  # no new reader can come
            self.x = None


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, call: NormCall, running: tuple[Any, ...], saves: bool, made: list[Any]
    ) -> Tensor:
        y, mean, rstd = _forward_norm(call, x, w, b, running)
        save = call.coded(x, mean, rstd) if saves and call.reads(x, w) else None
        made.extend([mean, rstd, save])
        ctx.types = tuple(None if t is None else t.dtype for t in (x, w, b))
        keep(ctx, call.name, save, w)
        return y

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        norm, needs = ctx.deferred, ctx.needs_input_grad
        save, w = kept(ctx)
        if not norm.reads:
            x, coded = torch.zeros((), dtype=torch.float32, device=g.device).expand(g.shape), False
        else:
            x, coded = norm.values() if save is None else _values_of(save)
        made = norm_back(norm.call, in_order(g, x.stride()) if norm.reads else g, x, norm.rstd, w, needs[:3], coded)
        norm.release()
        return *(m.to(t) if n and m is not None else None for m, n, t in zip(made, needs, ctx.types)), *(None,) * 4


def norm(x: Tensor, w: Tensor | None, b: Tensor | None, call: NormCall, running: tuple[Any, ...] = ()) -> Tensor:
    """A norm that defers its packing. `running`: running mean and variance, training and momentum of a batch norm.

    Where hooks of saved tensors are set (checkpointing, save_on_cpu) it packs at once, and saves by save_for_backward(): they have to see
    all that is kept, or it stays in memory that they were to free.
    """
    flush_deferred()
    hooked = _default_hooks(False) is not None
    found: list[Any] = []
    y = _Norm.apply(x, w, b, call, running, hooked, found)
    *statistics, save = found
    y.grad_fn.deferred = made = Deferred(call, x, w, b, *statistics)
    if hooked:
        made.x = None
        if save is None or not shares(call.method):
            return y
        for_next = copy.copy(made)  # of y, not of the node
        for_next.save = save
        return link(y, for_next.shared)
    if not shares(call.method):
        made.pack_now()
        return y
    made.output = weakref.ref(y, made.output_goes)
    defer(made)
    return link(y, made.shared, made)
