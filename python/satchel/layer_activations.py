"""Activations and dropout of converted models. Nobody calls this unless there are gradients to record, dropout aside."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import kept as forms
from ._ops import Numbers, ops
from .layer_common import ONE_SIDED, backward, keep, kept, rows_of, shares
from .layer_norms import Deferred, norm_back
from .shared import (
    Code, Save, affine_like, claim, dense_strides, drawn_seed, find_save, flush_deferred, fresh_seed, in_order, keeps, link, link_of, pack,
)  # fmt: skip

__all__ = ["activation", "dropout", "elu", "relu6", "smooth"]


def _activated(x: Tensor, slope: float, inplace: bool) -> Tensor:
    if slope == 0:
        return x.relu_() if inplace else x.relu()
    return F.leaky_relu(x, slope, inplace)


def _save_of(layer: str, numbers: Numbers, values: Tensor, affine: tuple[Tensor, Tensor] | None, dim: int, slope: float) -> Save:
    """A code of `values`, normalised ones where γ and β are given; with a mask where the code does not tell which of them pass."""
    gamma, beta = affine or (None, None)
    bytes_, code = pack(values, numbers, fresh_seed(values.device), gamma, beta, dim)
    save = Save(code, bytes_, dim, slope=slope, layer=layer)
    if code.side != 0:
        return save
    y = values
    if gamma is not None and beta is not None:
        y = torch.addcmul(affine_like(beta, values.shape, dim), values, affine_like(gamma, values.shape, dim))
    return dataclasses.replace(save, mask=ops.pack_mask(y), gamma=gamma, beta=beta)


def _fused_norm_act(
    norm: Deferred, x: Tensor, y: Tensor, affine: tuple[Tensor, Tensor], numbers: Numbers, inplace: bool
) -> tuple[Tensor, Save] | None:
    """Result and save of a batch norm and its ReLU in one pass over x on CUDA; None where no kernel fits."""
    if not x.is_cuda or norm.call.kind != "batch" or numbers[6] not in ONE_SIDED:
        return None
    rows = rows_of(x)
    if rows is None or not ops.norm_act_fits(*rows.shape, numbers):
        return None
    over = inplace and y.stride() == x.stride() and y.dtype == x.dtype
    z = y if over else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    bytes_ = ops.norm_act(rows, rows_of(z), norm.mean, norm.rstd, *affine, fresh_seed(x.device), numbers)
    if over:
        torch.autograd.graph.increment_version(y)
    code = Code(numbers, x.shape, x.stride(), x.shape[1], 1)
    return (y.copy_(z) if inplace and not over else z), Save(code, bytes_, 1, slope=0.0, layer=norm.call.name)


def _hooks_of(y: Tensor) -> dict[int, Any]:
    """Where hooks on y's gradient will stand, if any come: register_hook() makes this only with the first."""
    if y._backward_hooks is None:
        node: Any = y.grad_fn
        y._backward_hooks = collections.OrderedDict()
        node._register_hook_dict(y)
    return y._backward_hooks


class _NormAct(Function):
    """The activation of a norm's output y, and the norm's own gradient: x, γ and β get theirs from here unless somebody holds y."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, norm: Deferred, slope: float, inplace: bool, made: list[Save]
    ) -> Tensor:
        call = norm.call
        scales = w is not None and w.requires_grad
        numbers = call.keeps(x, "relu" if slope == 0 else "leaky_relu", scales)["shared"].numbers
        affine = norm.affine(call.width(x))
        fused = _fused_norm_act(norm, x, y, affine, numbers, inplace) if slope == 0 else None
        if fused is not None:
            z, save = fused
        else:
            save = _save_of(call.name, numbers, call.normalised(x, norm.mean, norm.rstd), affine, call.dim, slope)
            z = _activated(y, slope, inplace)
        made.append(save)
        ctx.call, ctx.output = call, (lambda: None) if inplace else norm.output
        ctx.hooks = {} if inplace else _hooks_of(y)
        ctx.like = tuple(None if t is None else (t.shape, t.dtype) for t in (x, w, b))
        keep(ctx, call.name, save, norm.rstd, kinds=("statistics",))
        if inplace:
            ctx.mark_dirty(y)
        return z

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        save, rstd = kept(ctx)
        call, needs = ctx.call, ctx.needs_input_grad
        if needs[0] and (ctx.output() is not None or ctx.hooks):  # whoever holds y may ask for its gradient: the norm's node gets it
            return save.gated(g), *(None,) * 7
        if save.fused and call.kind == "batch":
            dx = torch.empty_strided(save.code.shape, save.code.strides, dtype=g.dtype, device=g.device).copy_(g)
            made = [dx, *ops.norm_act_back(rows_of(dx), save.bytes, rstd, save.code.numbers, call.training, needs[1])]
        else:
            coded = not save.code.exact and save.code.side not in ONE_SIDED
            made = norm_back(call, save.gated(g), save.values(), rstd, save.affine[0], needs[1:4], coded)
        found = (m.view(like[0]).to(like[1]) if n and like is not None else None for m, n, like in zip(made, needs[1:], ctx.like))
        return None, *found, None, None, None, None


class _Act(Function):
    """An activation without a norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, method: str, name: str, slope: float, inplace: bool, made: list[Save]) -> Tensor:
        image = x.dim() > 3
        width = x.shape[1] if image else x.shape[-1] if x.dim() > 0 else 1
        keep_ = keeps(method, "epilogue", "none", "relu" if slope == 0 else "leaky_relu", False, image, width)
        if "shared" in keep_:
            z = _activated(x, slope, inplace)
            save = _save_of(name, keep_["shared"].numbers, z.detach(), None, 1, slope)
            made.append(save)
        else:
            mask = forms.Mask(x, x.dtype)
            save = Save(Code((), x.shape, mask.strides), None, mask=mask.bits, slope=slope, layer=name)
            z = _activated(x, slope, inplace)
        keep(ctx, name, save)
        if inplace:
            ctx.mark_dirty(x)
        return z

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        (save,) = kept(ctx)
        return save.gated(g), *(None,) * 5


class _ELU(Function):
    """Keeps its result, and which values are on. Its derivative is 1 there, and the result + α elsewhere: linear in the code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, method: str, name: str, alpha: float, inplace: bool, made: list[Save]) -> Tensor:
        z = F.elu(x, alpha, inplace)
        image = x.dim() > 3
        width = x.shape[1] if image else x.shape[-1] if x.dim() > 0 else 1
        # The first is the code: "shared", or "activation" where each function keeps its own.
        kind, keep_ = next(iter(keeps(method, "epilogue", "none", "elu", False, image, width).items()))
        threshold = (torch.ones(1, dtype=torch.float32, device=x.device), torch.zeros(1, dtype=torch.float32, device=x.device))  # one channel: on above 0
        kept_ = z.detach().clone() if keep_.numbers[0] > 8 else z.detach()  # z may be changed, as in torch
        bytes_, code = pack(in_order(kept_, dense_strides(z)), keep_.numbers, fresh_seed(x.device), *threshold, dim=-1)
        save = Save(code, bytes_, mask=None if code.side else forms.Mask(z, x.dtype).bits, alpha=alpha, kind=kind, layer=name)
        if kind == "shared":
            made.append(save)
        keep(ctx, name, save)
        if inplace:
            ctx.mark_dirty(x)
        return z

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        (save,) = kept(ctx)
        by = save.values().add(save.alpha)
        on = ops.unpack_mask(save.on, save.code.shape, save.code.strides, torch.bool)
        return by.masked_fill_(on, 1).mul_(g).to(g.dtype), *(None,) * 5


def elu(x: Tensor, method: str, name: str, alpha: float, inplace: bool) -> Tensor:
    flush_deferred()
    made: list[Save] = []
    z = _ELU.apply(x, method, name, alpha, inplace, made)
    if made and shares(method):
        link(z, lambda _: made[0])
    return z


class _ReLU6(Function):
    """Keeps a bit a value: whether it lies between 0 and 6."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, inplace: bool) -> Tensor:
        mask = forms.Mask(((x <= 0) | (x >= 6)).logical_not_(), x.dtype)  # NaN passes, as in torch
        keep(ctx, name, Save(Code((), x.shape, mask.strides), None, mask=mask.bits, slope=0.0, layer=name))
        if inplace:
            ctx.mark_dirty(x)
        return F.relu6(x, inplace)

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        (save,) = kept(ctx)
        return save.gated(g), None, None


def relu6(x: Tensor, name: str, inplace: bool) -> Tensor:
    flush_deferred()
    return _ReLU6.apply(x, name, inplace)


def activation(x: Tensor, method: str, name: str, slope: float, inplace: bool) -> Tensor:
    """ReLU (slope 0) or LeakyReLU. Claims the deferred norm where x is its untouched output."""
    found = link_of(x)
    norm = found.maker if found is not None else None
    is_heard = x.retains_grad or bool(x._backward_hooks)
    made: list[Save] = []
    if isinstance(norm, Deferred) and norm.x is not None and not is_heard and norm.unchanged() and claim(norm):
        z = _NormAct.apply(x, norm.x, norm.w, norm.b, norm, slope, inplace, made)
        norm.claimed = made[0]
        if inplace:
            norm.x = None
    else:
        flush_deferred()
        z = _Act.apply(x, method, name, slope, inplace, made)
    if made and shares(method):
        save = made[0]
        link(z, lambda _: save, is_relu=slope == 0)
    return z


# ---- dropout and smooth activations --------------------------------------------------------------------------------------------------


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, p: float, inplace: bool, seed: Tensor) -> Tensor:
        dense = in_order(x, dense_strides(x))
        z = ops.gate(dense, None, seed, p, 1.0)
        ctx.p, ctx.strides = p, dense.stride()
        keep(ctx, name, None, seed, kinds=("seed",))
        if inplace:
            ctx.mark_dirty(x)
            return x.copy_(z)
        return z

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        _, seed = kept(ctx)
        return ops.gate(in_order(g, ctx.strides), None, seed, ctx.p, 1.0), *(None,) * 4


def dropout(x: Tensor, method: str, name: str, p: float, inplace: bool) -> Tensor:
    """Keeps its seed. What x shares is shared on, dropped."""
    flush_deferred()
    seed = drawn_seed(x.device)
    if not torch.is_grad_enabled() or not x.requires_grad:
        z = ops.gate(in_order(x, dense_strides(x)), None, seed, p, 1.0)
        return x.copy_(z) if inplace else z
    save = find_save(x, method) if shares(method) else None
    z = _Dropout.apply(x, name, p, inplace, seed)
    if save is not None and save.seed is None and save.code.strides == z.stride():
        dropped = dataclasses.replace(save, seed=seed, dropout=p)
        link(z, lambda _: dropped)
    return z


class _Smooth(Function):
    """GELU or SiLU, of which the derivative is kept, rounded without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, kind: str, bits: int, inplace: bool) -> Tensor:
        ctx.table = levels = forms._slope_tables(kind, bits, x.dtype, x.device)[0]
        ctx.shape, ctx.strides, ctx.dtype = x.shape, dense_strides(x), x.dtype
        keep(ctx, name, None, ops.pack_slope(x, fresh_seed(x.device), levels, forms._KINDS[kind][0]), kinds=("derivative",))
        if inplace:
            ctx.mark_dirty(x)
        if kind == "silu":
            return F.silu(x, inplace=inplace)
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        _, bytes_ = kept(ctx)
        return ops.unpack_table(bytes_, ctx.table, ctx.shape, ctx.strides, ctx.dtype).mul_(g), *(None,) * 4


def smooth(x: Tensor, method: str, name: str, kind: str, inplace: bool = False) -> Tensor | None:
    """None where the method keeps the derivative exactly: torch's own function does."""
    bits = keeps(method, "derivative")["derivative"].numbers[0]
    if bits > 8:
        return None
    flush_deferred()
    return _Smooth.apply(x, name, kind, bits, inplace)
