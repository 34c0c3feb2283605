"""Batch norms of converted models that wait for what follows them.

A norm's result is not computed at once. A ReLU that comes next, with or without a sum in between, claims it: norm, sum and ReLU are then one
op with one code (norm_ops.py), and the norm's own result is never written. Who else reads the result by a function of torch's Python has it
computed first: `Waiting` is a tensor whose every such function comes by here. Until then its memory cannot be read: what gets past Python
(a C++ extension, torch.jit, torch.func) raises.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import norm_ops
from ._ops import ops
from .layer_common import backward, keep, kept, rows_of, shares
from .norm_ops import ACT, ADD, ALONE, Specs
from .shared import Code, Save, flush_deferred, fresh_seeds, link, raw_stream

__all__ = ["Waiting", "batch_norm", "catch_up", "may_claim", "relu", "settle"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_LOOKS = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "is_cuda", "layout",
                                                     "_version", "is_sparse", "is_quantized", "is_meta", "is_nested")} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size,
}  # fmt: skip  # what does not read values
_SUMS, _SUMS_OVER = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}, {Tensor.add_, Tensor.__iadd__}
_HOOKS = {Tensor.register_hook, Tensor.retain_grad}
_RELUS, _RELUS_OVER = {F.relu, torch.relu, Tensor.relu}, {F.relu_, torch.relu_, Tensor.relu_}


_norm_moving = ops.norm_moving.default

Running = tuple[Tensor, Tensor]  # mean and variance


class Waiting(Tensor):
    """The result of a batch norm, or of a batch norm and a sum, that nobody has read yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if len(args) == 2 and not kwargs and (func in _SUMS or func in _SUMS_OVER):
            made = _sum(args, over=func in _SUMS_OVER)
            if made is not None:
                return made
        if len(args) == 1 and (func in _RELUS or func in _RELUS_OVER) and may_claim():
            inplace = (kwargs or {}).get("inplace", func in _RELUS_OVER)
            if set(kwargs or ()) <= {"inplace"} and isinstance(inplace, bool):
                return relu(args[0], inplace)
        if func in _HOOKS and args[0]._satchel_norm.taken:
            raise RuntimeError("[convert] a hook must be set on a norm's result before its sum or ReLU runs, got one after it")
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if type(value) is Waiting:
                settle(value)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class BatchNormCall:
    """A batch norm without its tensors."""

    method: str
    name: str
    eps: float
    momentum: float
    specs: dict[int, Specs]  # by form


class Norm:
    """What a waiting result is made of."""

    def __init__(self, call: BatchNormCall, x: Tensor, w: Tensor, b: Tensor, running: Running | None, skip: Tensor | None = None) -> None:
        self.call, self.running, self.skip = call, running, skip
        self.x: Tensor | None = x
        self.w, self.b = w, b
        # FSDP frees parameters as soon as a module's forward is over: their values are needed later.
        self.affine = (w.detach().clone(), b.detach().clone()) if _distributed() else (w, b)
        self.stream = raw_stream(x.device)
        self.taken = False  # by a sum or a ReLU: its gradient goes past this result
        self.first: Norm | None = None  # of a sum: the norm alone
        self.values: Tensor | None = None  # … and its result, where that is a tensor of its own
        self.versions = [t._version for t in (x, w, b)] + ([skip._version] if skip is not None else [])
        self.moved = [False]  # running statistics are up to date; one list for a norm and its sums
        self.at = 0  # of a sum: the version of `values` that it adds
        self.save: Save | None = None  # of a settled result
        self.rstd: Tensor | None = None
        self.claimed = None  # saved() asks; a claim has a node of its own

    def run(self, form: int) -> tuple[Tensor, ...]:
        """z, codes, sum, rstd; running statistics move once. Called where no gradients are recorded."""
        tensors = (self.x, self.w, self.b) + ((self.skip,) if form == ADD else ())
        if any(t is None for t in tensors):
            raise RuntimeError("[convert] a batch norm's result must be read while it lives, got one that was let go")
        if any(t._version != v for t, v in zip(tensors, self.versions)):  # type: ignore[union-attr]
            raise RuntimeError("[convert] x, γ, β and a skip must not be changed in place before a norm's result is read, got a change")
        if self.stream != raw_stream(self.x.device):  # type: ignore[union-attr]
            return self.run_elsewhere(form)
        call, x = self.call, self.x
        running = (None, None) if self.moved[0] or self.running is None else self.running
        self.moved[0] = True
        seeds = fresh_seeds(x.device)  # type: ignore[union-attr]
        skip = self.skip if form == ADD else None
        return _norm_moving(x, skip, *self.affine, *running, call.momentum, seeds, call.eps, form, *call.specs[form])

    def run_elsewhere(self, form: int) -> tuple[Tensor, ...]:
        """On the stream where torch would have computed it; the reader's waits."""
        assert self.x is not None
        own = torch.cuda.ExternalStream(self.stream, self.x.device)
        reader = torch.cuda.current_stream(self.x.device)
        with torch.cuda.stream(own):
            made = self.run(form)
        reader.wait_stream(own)
        for t in made:
            t.record_stream(reader)
        return made

    def move(self) -> None:
        """Running statistics, where nobody has read the result."""
        if self.moved[0] or self.x is None or self.running is None:
            return
        self.moved[0] = True
        with torch.inference_mode(False), torch.no_grad():
            x = self.x.float()
            rows = x.numel() // x.shape[1]
            var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
            self.running[0].lerp_(mean, self.call.momentum)
            self.running[1].lerp_(var * (rows / (rows - 1)), self.call.momentum)

    def let_go(self, _: Any = None) -> None:
        """The result is gone. torch would have moved the running statistics where nobody read it, too."""
        self.move()
        if self.first is not None and self.values is None:  # a sum in place: the norm alone has no tensor of its own
            self.first.x = None
        self.x = self.skip = self.values = None

    def settle(self) -> Tensor:
        """The norm's own result; its gradient reads a code of its own."""
        with torch.inference_mode(False), torch.no_grad():
            z, code, _, self.rstd = self.run(ALONE)
        self.save = Save(Code(self.call.specs[ALONE][0], z.shape, z.stride()), code, kind="norm", layer=self.call.name)
        return z

    def release(self) -> None:
        if not _keeps_graph():
            self.save = None

    def shared(self, method: str) -> Save | None:
        """For a layer with weights that reads the settled result: γ·x̂ + β, x̂ from the norm's own code."""
        if method != self.call.method or self.save is None or any(t._version != v for t, v in zip((self.w, self.b), self.versions[1:])):
            return None
        if self.save.gamma is None:
            self.save = dataclasses.replace(self.save, gamma=self.w.detach().clone(), beta=self.b.detach().clone())
        return self.save


_UNREAD = "[convert] a batch norm's result must be read by torch's functions, got code that reads its memory"


def _nothing(like: Tensor) -> Tensor:
    """A tensor of like's sizes whose memory nobody can read."""
    made = torch.empty_strided(like.shape, (0,) * like.dim(), dtype=like.dtype, device=like.device)
    torch._C._set_storage_data_ptr_access_error_msg(made.untyped_storage()._cdata, _UNREAD)
    return made


class _Wait(Function):
    """The norm's own node. It gets a gradient where its result was read by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, norm: Norm) -> Tensor:
        ctx.deferred = norm
        keep(ctx, norm.call.name, None, w)
        return _nothing(x)

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        norm: Norm = ctx.deferred
        _, w = kept(ctx)
        if norm.save is None:
            raise RuntimeError("[convert] a second backward needs retain_graph=True in the first, got a graph that was freed")
        needs, nothing = ctx.needs_input_grad, norm.save.bytes.new_empty(0)
        found = norm.call.specs[ALONE]
        dx, _, dw, db = ops.norm_backward(g, norm.save.bytes, nothing, norm.rstd, w, ALONE, *found, needs[0], False)
        norm.release()
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


class _Sum(Function):
    """… of a sum that was read by itself."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, skip: Tensor, over: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        if not over:
            return _nothing(skip)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return g, g, None


class _NormReLU(Function):
    """Norm, sum and ReLU. Gradients go past the waiting result. y: what a ReLU in place changes; else None."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, x: Tensor, w: Tensor, b: Tensor, skip: Tensor | None, norm: Norm, made: list[Save]
    ) -> Tensor:
        ctx.form = form = ACT if skip is None else ADD
        z, code, summed, rstd = norm.run(form)
        ctx.specs, name = norm.call.specs[form], norm.call.name
        if form == ACT:
            save = Save(Code(ctx.specs[0], x.shape, z.stride(), x.shape[1], 1), code, 1, slope=0.0, layer=name)
            keep(ctx, name, save, rstd, w, kinds=("statistics",))
        else:
            save = Save(Code(ctx.specs[1], x.shape, z.stride()), summed, slope=0.0, layer=name)
            keep(ctx, name, save, rstd, w, code, kinds=("statistics", "", "norm"))
        made.append(save)
        if y is None:
            return z
        _put(y, z)
        ctx.mark_dirty(y)
        return y

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        save, rstd, w, *rest = kept(ctx)
        needs = ctx.needs_input_grad
        code, summed = (save.bytes, save.bytes.new_empty(0)) if ctx.form == ACT else (rest[0], save.bytes)
        dx, dskip, dw, db = ops.norm_backward(g, code, summed, rstd, w, ctx.form, *ctx.specs, needs[1], needs[4])
        wanted = (None, dx, dw, db, dskip, None, None)
        return tuple(t if n else None for t, n in zip(wanted, needs))


def _put(y: Tensor, values: Tensor) -> None:
    """A waiting tensor becomes a plain one with these values."""
    y.__class__ = Tensor
    y._satchel_end.detach()  # type: ignore[attr-defined]
    del y._satchel_norm, y._satchel_end  # type: ignore[attr-defined]
    y.data = values


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_newest: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Norm]] = weakref.WeakKeyDictionary()


def catch_up(module: torch.nn.Module) -> None:
    """Moves the module's running statistics for a result that still waits: they move in the order of the calls."""
    reference = _newest.get(module)
    norm = None if reference is None else reference()
    if norm is not None:
        norm.move()


def batch_norm(
    module: torch.nn.Module, x: Tensor, w: Tensor, b: Tensor, running: Running | None, how: tuple[str, str, float, float]
) -> Tensor | None:
    """The module's result, which waits; None where the ops do not serve, or hooks of saved tensors have to see what is kept at once.
    how: method, name, eps and momentum."""
    if not shares(how[0]) or rows_of(x) is None or not may_claim():
        return None
    rows, image = x.numel() // x.shape[1], x.dim() > 2
    found = {form: norm_ops.specs(how[0], form, rows, x.shape[1], x.dtype, x.is_cuda, image) for form in (ACT, ADD, ALONE)}
    if any(s is None for s in found.values()):
        return None
    flush_deferred()
    norm = Norm(BatchNormCall(*how, found), x, w, b, running)  # type: ignore[arg-type]
    _newest[module] = weakref.ref(norm)
    return _waiting(_Wait.apply(x, w, b, norm), norm)


def _waiting(y: Tensor, norm: Norm) -> Tensor:
    y._satchel_norm = norm  # type: ignore[attr-defined]
    y._satchel_end = weakref.finalize(y, norm.let_go)  # type: ignore[attr-defined]
    y._satchel_end.atexit = False  # type: ignore[attr-defined]
    y.__class__ = Waiting
    return y


def settle(y: Tensor) -> None:
    """Computes what waits. A tensor that does not wait stays as it is."""
    if type(y) is not Waiting:
        return
    norm: Norm = y._satchel_norm  # type: ignore[attr-defined]
    if norm.first is None:
        _put(y, norm.settle())
        norm.let_go()
        link(y, norm.shared)
        return
    # A sum that no ReLU has claimed: as torch has it.
    if norm.skip is None:
        raise RuntimeError("[convert] a sum's result must be read while it lives, got one that was let go")
    if norm.skip._version != norm.versions[3]:
        raise RuntimeError("[convert] a skip must not be changed in place before a sum with it is read, got a change")
    if norm.values is not None and norm.values._version == norm.at:  # as the sum found it
        settle(norm.values)
        values = norm.values
    else:
        norm.first.x = norm.x
        values = norm.first.settle()
        norm.first.x = None
    with torch.inference_mode(False), torch.no_grad():
        _put(y, torch.add(values.detach(), norm.skip.detach()))
    norm.let_go()


def may_claim() -> bool:
    """Where saved tensors are hooked (checkpointing) or transformed (torch.func), everything goes torch's way."""
    return torch.is_grad_enabled() and _default_hooks(False) is None and torch._C._functorch.peek_interpreter_stack() is None


def _sum(args: tuple[Any, ...], over: bool) -> Tensor | None:
    """The sum of a waiting norm and another tensor, which waits too. Where both wait, the second does no more."""
    y, skip = args if type(args[0]) is Waiting else args[::-1]
    norm: Norm = y._satchel_norm
    if (over and y is not args[0]) or not isinstance(skip, Tensor) or norm.first is not None or skip is y or not may_claim():
        return None
    settle(skip)
    if type(skip) is not Tensor or skip.shape != y.shape or skip.dtype is not y.dtype or skip.device != y.device or skip.is_inference():
        return None
    assert norm.x is not None
    both = Norm(norm.call, norm.x, norm.w, norm.b, norm.running, skip)
    both.first, both.values, both.moved = norm, None if over else y, norm.moved
    both.at, norm.taken = y._version, True
    with torch._C.DisableTorchFunctionSubclass():
        s = _Sum.apply(y, skip, over)
    if over:
        s._satchel_end.detach()
    return _waiting(s, both)


def relu(y: Tensor, inplace: bool) -> Tensor:
    """The ReLU of a waiting result."""
    norm: Norm = y._satchel_norm  # type: ignore[attr-defined]
    made: list[Save] = []
    flush_deferred()
    x, skip, norm.taken = norm.x, norm.skip, True
    with torch._C.DisableTorchFunctionSubclass():
        z = _NormReLU.apply(y if inplace else None, x, norm.w, norm.b, skip, norm, made)
    if inplace:
        norm.let_go()
    save = made[0]
    return link(z, lambda _: save, is_relu=True)
