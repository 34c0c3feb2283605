"""Batch norms of converted models that wait for what follows them.

A norm's result is not computed at once. A ReLU that comes next, with or without a sum in between, claims it: norm, sum and ReLU are then one
op with one code (norm_ops.py), and the norm's own result is never written. Who else reads the result by a function of torch's Python has it
computed first: `Waiting` is a tensor whose every such function comes by here. Until then its memory cannot be read: what gets past Python
(a C++ extension, torch.jit) raises.

What a result depends on must be as it was when the norm was called. Running statistics, which the op moves, and a skip are `Guarded` until
then: a function of torch's Python that gets one of them has the statistics moved, or the sum computed, first.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, but it imports torch._dynamo in the first call
from torch.autograd import Function

from . import norm_ops
from ._ops import ops
from .layer_common import backward, keep, kept, own, rows_of, shares
from .norm_ops import ACT, ADD, ALONE, Specs
from .shared import Code, Save, flush_deferred, fresh_seeds, link, raw_stream

__all__ = ["Guarded", "Waiting", "batch_norm", "may_claim", "relu", "settle"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# What does not read values; packing() looks at nodes. Who asks for the type, or whether there is a gradient, may go on in C++ (collectives,
# hooks of modules): the result is computed for them.
_LOOKS = {getattr(Tensor, name).__get__ for name in ("shape", "device", "grad_fn", "is_leaf", "ndim", "is_cuda", "layout", "_version",
                                                     "is_sparse", "is_quantized", "is_meta", "is_nested")} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.is_floating_point, Tensor.element_size,
    getattr(Tensor, "_backward_hooks").__set__,  # torch calls it when a view is changed in place
}  # fmt: skip
_SUMS, _SUMS_OVER = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}, {Tensor.add_, Tensor.__iadd__}
_RELUS, _RELUS_OVER = {F.relu, torch.relu, Tensor.relu}, {F.relu_, torch.relu_, Tensor.relu_}


_norm_moving = ops.norm_moving.default

Running = tuple[Tensor, Tensor]  # mean and variance


def _settled(func: Any, args: Any, kwargs: Any) -> Any:
    """func of what its arguments stand for."""
    if func in _LOOKS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    for value in torch.utils._pytree.tree_leaves((args, kwargs)):
        settle(value)
    return func(*args, **(kwargs or {}))


class Waiting(Tensor):
    """The result of a batch norm, or of a batch norm and a sum, that nobody has read yet."""

    @classmethod
    @_disable_dynamo  # what is compiled starts behind it
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and not kwargs and (func in _SUMS or func in _SUMS_OVER):
            made = _sum(args, over=func in _SUMS_OVER)
            if made is not None:
                return made
        if len(args) == 1 and (func in _RELUS or func in _RELUS_OVER) and may_claim():
            inplace = (kwargs or {}).get("inplace", func in _RELUS_OVER)
            if set(kwargs or ()) <= {"inplace"} and isinstance(inplace, bool):
                return relu(args[0], inplace)
        return _settled(func, args, kwargs)


class Guarded(Tensor):
    """A running statistic that a waiting norm has not moved yet, or a skip that a waiting sum has not read."""

    @classmethod
    @_disable_dynamo  # what is compiled starts behind it
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _settled(func, args, kwargs)


_NORMS = "_satchel_norms"  # in a guarded tensor's attributes: references to those to be told. Threads may share a model, and so a statistic.


def _guard(t: Tensor, norm: Norm) -> bool:
    """Has the norm told before somebody touches t. False where t is of a class of its own: it cannot be."""
    if type(t) is not Tensor and type(t) is not Guarded:
        return False
    t.__dict__.setdefault(_NORMS, []).append(weakref.ref(norm))
    t.__class__ = Guarded
    return True


def _unguard(t: Tensor, norm: Norm) -> None:
    if type(t) is not Guarded:
        return
    left = [reference for reference in t.__dict__.get(_NORMS, ()) if reference() not in (None, norm)]
    if left:
        t.__dict__[_NORMS] = left
    else:
        _release(t)


def _release(t: Tensor) -> list[Any]:
    """t is a plain tensor again; the norms that guarded it."""
    t.__class__ = Tensor
    norms = [reference() for reference in t.__dict__.pop(_NORMS, ())]
    return [norm for norm in norms if norm is not None]


@dataclasses.dataclass(frozen=True)
class BatchNormCall:
    """A batch norm without its tensors."""

    method: str
    name: str
    eps: float
    momentum: float
    specs: dict[int, Specs]  # by form


_CHANGED = "x, γ and β must not be changed in place before a norm's result is read"


class Norm:
    """What a waiting result is made of."""

    def __init__(self, call: BatchNormCall, x: Tensor, w: Tensor, b: Tensor, running: Running | None) -> None:
        self.call, self.running = call, running
        self.x: Tensor | None = x
        self.w, self.b = w, b
        # FSDP frees parameters as soon as a module's forward is over: their values are needed later. model.to() gives them other memory.
        self.affine = (w.detach().clone(), b.detach().clone()) if _distributed() else (w.detach(), b.detach())
        self.stream = raw_stream(x.device)
        self.output: weakref.ref[Tensor] | None = None  # the result
        self.settled = self.is_claimed = self.freed = False  # read by itself; by a ReLU; backward is over
        self.versions = [t._version for t in (x, w, b)]
        self.moved = [running is None]  # running statistics are up to date; one list for a norm and its sums
        self.save: Save | None = None  # of a settled result
        self.rstd: Tensor | None = None
        self.claimed = None  # saved() asks; a claim has a node of its own
        # Of a sum.
        self.skip: Tensor | None = None
        self.first: Norm | None = None  # the norm alone
        self.over = False  # was the sum written over its result, which has no tensor of its own then?
        self.values: Tensor | None = None  # else that result …
        self.at = 0  # … in the version that is added

    def plus(self, skip: Tensor, y: Tensor, over: bool) -> Norm:
        """A sum's: of this one's result y and the skip."""
        both = copy.copy(self)
        both.first, both.skip, both.over, both.values = self, skip, over, None if over else y
        both.versions, both.at, both.stream = [*self.versions, skip._version], y._version, raw_stream(skip.device)
        both.is_claimed = both.freed = False
        return both

    def run(self, form: int) -> tuple[Tensor, ...]:
        """z, codes, sum, rstd; running statistics move once. Called where no gradients are recorded."""
        tensors = (self.x, self.w, self.b) + ((self.skip,) if form == ADD else ())
        if any(t is None for t in tensors):
            raise RuntimeError("[convert] a batch norm's result must be read while it lives, got one that was let go")
        if any(t._version != v for t, v in zip(tensors[:3], self.versions)):  # type: ignore[union-attr]
            raise RuntimeError(f"[convert] {_CHANGED}, got a change")
        if form == ADD:
            self.check_skip()
        if self.stream != raw_stream(self.x.device):  # type: ignore[union-attr]
            return self.elsewhere(lambda: self.run(form))
        call, x = self.call, self.x
        running = (None, None) if self.moved[0] or self.running is None else self.running
        self.moves()
        seeds = fresh_seeds(x.device)  # type: ignore[union-attr]
        skip = self.skip if form == ADD else None
        if skip is not None:
            _unguard(skip, self)
        with torch._C.DisableTorchFunctionSubclass():  # x may be another sum's skip
            return _norm_moving(x, skip, *self.affine, *running, call.momentum, seeds, call.eps, form, *call.specs[form])

    def check_skip(self) -> None:
        if self.skip is None:
            raise RuntimeError("[convert] a sum's result must be read while it lives, got one that was let go")
        if self.skip._version != self.versions[3]:
            raise RuntimeError("[convert] a skip must not be changed through a view before a sum with it is read, got a change")

    def elsewhere(self, run: Any) -> Any:
        """On the stream where torch would have computed it; the reader's waits."""
        assert self.x is not None
        own = torch.cuda.ExternalStream(self.stream, self.x.device)
        reader = torch.cuda.current_stream(self.x.device)
        with torch.cuda.stream(own):
            made = run()
        reader.wait_stream(own)
        for t in made:
            t.record_stream(reader)
        return made

    def moves(self) -> None:
        """The running statistics are about to move."""
        if not self.moved[0] and self.running is not None:
            self.moved[0] = True
            for t in self.running:
                _unguard(t, self.first or self)

    def move(self) -> None:
        """Moves the running statistics, where nobody has read the result."""
        if self.moved[0] or self.x is None or self.running is None:
            return
        self.moves()
        if self.x._version != self.versions[0]:
            text = f"[convert] {_CHANGED}, got a change; running statistics of {self.call.name!r} lack a batch"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        elif self.stream != raw_stream(self.x.device):
            self.elsewhere(self.lerp)
        else:
            self.lerp()

    def lerp(self) -> tuple[()]:
        assert self.x is not None and self.running is not None
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            x = self.x.float()
            rows = x.numel() // x.shape[1]
            var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
            self.running[0].lerp_(mean, self.call.momentum)
            self.running[1].lerp_(var * (rows / (rows - 1)), self.call.momentum)
        return ()

    def let_go(self, _: Any = None) -> None:
        """The result is gone. torch would have moved the running statistics where nobody read it, too."""
        self.move()
        if self.skip is not None:
            _unguard(self.skip, self)
        read = self.settled or self.is_claimed
        if self.first is not None and self.over and read:
            self.first.x = None
        if self.first is not None or read:  # else a gradient may come that needs x: a function may have looked at sizes alone
            self.x = None
        self.skip = self.values = None

    def claim(self, inplace: bool) -> None:
        """A ReLU has the result: gradients go past it."""
        self.is_claimed = True
        if self.first is not None:
            self.first.is_claimed = True
            if not self.first.lives():
                self.first.x = None
        if inplace:
            self.let_go()

    def lives(self) -> bool:
        """Does anybody hold the result?"""
        return self.output is not None and self.output() is not None

    def is_heard(self, inplace: bool) -> bool:
        """May somebody else have read the result, or ask for its gradient? Then that goes by the result's own node."""
        own = not inplace and (self.settled or self.lives())
        return own or (self.first is not None and not self.over and (self.first.settled or self.first.lives()))

    def touched(self, t: Tensor) -> None:
        """Somebody is about to read or to change a tensor that this guards."""
        result = None if self.output is None else self.output()
        if t is not self.skip:
            self.move()
        elif result is not None:
            settle(result)

    def settle(self) -> Tensor:
        """The norm's own result; its gradient reads a code of its own."""
        with torch.inference_mode(False), torch.no_grad():
            z, code, _, self.rstd = self.run(ALONE)
        self.settled = True
        self.save = Save(Code(self.call.specs[ALONE][0], z.shape, z.stride()), code, kind="norm", layer=self.call.name)
        return z

    def release(self) -> None:
        if not _keeps_graph():
            self.save, self.freed = None, True

    def shared(self, method: str) -> Save | None:
        """For a layer with weights that reads the settled result: γ·x̂ + β, x̂ from the norm's own code."""
        if method != self.call.method or self.save is None or any(t._version != v for t, v in zip((self.w, self.b), self.versions[1:])):
            return None
        if self.save.gamma is None:
            gamma, beta = self.affine
            self.save = dataclasses.replace(self.save, gamma=gamma.clone(), beta=beta.clone())
        return self.save


_UNREAD = "[convert] a batch norm's result must be read by torch's functions, got C++ code that reads its memory; give it a copy (y.clone())"


def _nothing(like: Tensor) -> Tensor:
    """A tensor of like's sizes, in the order of the result, without memory."""
    strides = [1] * like.dim()
    step = like.shape[1]
    for d in (*range(like.dim() - 1, 1, -1), 0):
        strides[d], step = step, step * like.shape[d]
    made = torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)
    storage = made.untyped_storage()
    storage.resize_(0)
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _UNREAD)
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
        if norm.save is None and norm.freed:
            raise RuntimeError("[convert] a second backward needs retain_graph=True in the first, got a graph that was freed")
        if norm.save is None:  # nobody has read the result
            norm.settle()
        assert norm.save is not None
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
    """Norm, sum and ReLU. Gradients go past the waiting result y, unless it is heard."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, w: Tensor, b: Tensor, skip: Tensor | None, norm: Norm, inplace: bool, made: list[Save]
    ) -> Tensor:
        ctx.form = form = ACT if skip is None else ADD
        z, code, summed, rstd = norm.run(form)
        ctx.specs, name = norm.call.specs[form], norm.call.name
        ctx.norm, ctx.inplace = norm, inplace
        if form == ACT:
            save = Save(Code(ctx.specs[0], x.shape, z.stride(), x.shape[1], 1), code, 1, slope=0.0, layer=name)
            keep(ctx, name, save, rstd, w, kinds=("statistics",))
        else:
            save = Save(Code(ctx.specs[1], x.shape, z.stride()), summed, slope=0.0, layer=name)
            keep(ctx, name, save, rstd, w, code, kinds=("statistics", "", "norm"))
        made.append(save)
        if not inplace:
            return own(z)
        _put(y, z)
        ctx.mark_dirty(y)
        return y

    @backward
    def backward(ctx: Any, g: Tensor) -> Any:
        save, rstd, w, *rest = kept(ctx)
        needs = ctx.needs_input_grad
        if ctx.norm.is_heard(ctx.inplace):
            return save.gated(g), *(None,) * 7
        code, summed = (save.bytes, save.bytes.new_empty(0)) if ctx.form == ACT else (rest[0], save.bytes)
        dx, dskip, dw, db = ops.norm_backward(g, code, summed, rstd, w, ctx.form, *ctx.specs, needs[1], needs[4])
        wanted = (None, dx, dw, db, dskip, None, None, None)
        return tuple(t if n else None for t, n in zip(wanted, needs))


def _put(y: Tensor, values: Tensor) -> None:
    """A waiting tensor becomes a plain one with these values."""
    y.__class__ = Tensor
    y._satchel_end.detach()  # type: ignore[attr-defined]
    del y._satchel_norm, y._satchel_end  # type: ignore[attr-defined]
    y.data = values


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def batch_norm(x: Tensor, w: Tensor, b: Tensor, running: Running | None, how: tuple[str, str, float, float]) -> Tensor | None:
    """The norm's result, which waits; None where the ops do not serve, or hooks of saved tensors have to see what is kept at once.
    how: method, name, eps and momentum."""
    if not shares(how[0]) or rows_of(x) is None or not may_claim():
        return None
    rows, image = x.numel() // x.shape[1], x.dim() > 2
    found = {form: norm_ops.specs(how[0], form, rows, x.shape[1], x.dtype, x.is_cuda, image) for form in (ACT, ADD, ALONE)}
    if any(s is None for s in found.values()):
        return None
    flush_deferred()
    norm = Norm(BatchNormCall(*how, found), x, w, b, running)  # type: ignore[arg-type]
    if running is not None and not all(_guard(t, norm) for t in running):
        norm.move()
    return _waiting(_Wait.apply(x, w, b, norm), norm)


def _waiting(y: Tensor, norm: Norm) -> Tensor:
    y._satchel_norm = norm  # type: ignore[attr-defined]
    y._satchel_end = weakref.finalize(y, norm.let_go)  # type: ignore[attr-defined]
    y._satchel_end.atexit = False  # type: ignore[attr-defined]
    norm.output = weakref.ref(y)
    y.__class__ = Waiting
    return y


def settle(t: Any) -> None:
    """Computes what waits, and does what a guarded tensor waits for. Any other value stays as it is."""
    if type(t) is Guarded or type(t) is Waiting:
        _settle(t)


@_disable_dynamo
def _settle(t: Tensor) -> None:
    if type(t) is Guarded:
        for norm in _release(t):
            norm.touched(t)
    elif type(t) is Waiting:  # else torch.compile has read it already
        _compute(t)


def _compute(y: Tensor) -> None:
    norm: Norm = y._satchel_norm  # type: ignore[attr-defined]
    if norm.first is None:
        _put(y, norm.settle())
        norm.let_go()
        link(y, norm.shared)
        return
    # A sum that no ReLU has claimed: as torch has it.
    norm.check_skip()
    assert norm.skip is not None
    _unguard(norm.skip, norm)
    if norm.values is not None and norm.values._version == norm.at:  # as the sum found it
        settle(norm.values)
        values = norm.values
    else:
        norm.first.x = norm.x
        values = norm.first.settle()
        norm.first.x = None
    with torch.inference_mode(False), torch.no_grad():
        _put(y, torch.add(values.detach(), norm.skip.detach()))
    norm.settled = True
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
    if type(y) is not Waiting or type(skip) is not Tensor or norm.x is None:  # another sum of the two was computed
        return None
    with torch._C.DisableTorchFunctionSubclass():  # x may be another sum's skip
        if skip.shape != y.shape or skip.dtype is not y.dtype or skip.device != y.device or skip.is_inference():
            return None
    both = norm.plus(skip, y, over)
    with torch._C.DisableTorchFunctionSubclass():
        s = _Sum.apply(y, skip, over)
    if over:
        s._satchel_end.detach()
    _guard(skip, both)
    return _waiting(s, both)


def relu(y: Tensor, inplace: bool) -> Tensor:
    """The ReLU of a waiting result."""
    norm: Norm = y._satchel_norm  # type: ignore[attr-defined]
    made: list[Save] = []
    flush_deferred()
    with torch._C.DisableTorchFunctionSubclass():
        z = _NormReLU.apply(y, norm.x, norm.w, norm.b, norm.skip, norm, inplace, made)
    norm.claim(inplace)
    save = made[0]
    return link(z, lambda _: save, is_relu=True)
