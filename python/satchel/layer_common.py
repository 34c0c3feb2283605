"""What the functions of converted layers have in common."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import Tensor

from ._ops import ops
from .shared import ONE_SIDED, Save

__all__ = ["ONE_SIDED", "SECOND_ORDER", "backward", "keep", "kept", "no_autocast", "own", "rows_of", "shares"]


SECOND_ORDER = "[convert] a gradient of a gradient needs exact saves, got create_graph=True; satchel.revert() gives them"


def backward(run: Callable[..., Any]) -> Any:
    """Backward of a function: no gradients of gradients, and the types of forward whatever autocast says now."""

    @functools.wraps(run)
    def wrapped(ctx: Any, g: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_ORDER)
        if g is None:
            if (norm := getattr(ctx, "deferred", None)) is not None:
                norm.release()
            return (None,) * len(ctx.needs_input_grad)
        with no_autocast(g.device.type):
            return run(ctx, g)

    return staticmethod(wrapped)


class no_autocast:  # noqa: N801
    """torch.autocast(device, enabled=False), at a tenth of its time: it is entered for every layer, each way."""

    __slots__ = ("device", "before")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled(self.device)
        if self.before:
            torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: Any) -> None:
        if self.before:
            torch.set_autocast_enabled(self.device, True)


def keep(ctx: Any, name: str, save: Save | None, *others: Tensor | None, kinds: tuple[str, ...] = ()) -> None:
    """Saves tensors as torch does, so that it frees them after backward; the node has the rest. kinds: of the others, for reports."""
    ctx.set_materialize_grads(False)
    ctx.layer, ctx.save = name, None if save is None else save.without_tensors()
    ctx.save_for_backward(*others, *(() if save is None else save.tensors))
    ctx.kinds = (*kinds, *("",) * (len(others) - len(kinds)), *(() if save is None else save.kinds))


def kept(ctx: Any) -> tuple[Any, ...]:
    """(the save, the other tensors)."""
    tensors = ctx.saved_tensors
    if ctx.save is None:
        return None, *tensors
    count = len(ctx.save.tensors)
    return ctx.save.with_tensors(tensors[-count:]), *tensors[:-count]


@functools.lru_cache(maxsize=64)
def shares(method: str) -> bool:
    """Do layers read what the one before them keeps?"""
    return bool(ops.method_flags(method)[1])


def rows_of(x: Tensor) -> Tensor | None:
    """x as rows of channels, where these are innermost in memory; else None."""
    flat = x.movedim(1, -1) if x.dim() > 1 else x
    return flat.flatten(0, -2) if flat.is_contiguous() and x.dim() > 1 else None


def own(y: Tensor) -> Tensor:
    """A function's result that was made as a view: no view to autograd, which would not let it be changed in place."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
