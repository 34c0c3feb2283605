"""Any torch.nn model with Satchel's layers: norm, ReLU, dropout and the next layer keep one code of about 2 bits a value.

convert() changes the classes of torch's own layers in place, so parameters, buffers, hooks and names stay. A layer of a user's own class,
and functions that a model calls itself (F.relu, torch.cat), stay torch's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from typing import Any, Iterable

import torch
from torch import Tensor, nn

from ._ops import ops
from .layer_waiting import settle
from .layers import CLASSES, TORCH, Layer
from .shared import flush_deferred

__all__ = ["Saved", "SavedLine", "convert", "revert", "saved"]


# ---- conversion ----------------------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, method: str = "satchel", *, exclude: Iterable[str] = ()) -> nn.Module:
    """The model itself, its layers changed in place to those that share one save.

    method: as the C++ library reads it ("satchel", "satchel,bits=3", "satchel,bits=32" for exact saves, "int8"); "fp32" reverts.
    exclude: patterns (fnmatch) of module paths that are torch's afterwards, whatever an earlier convert() made of them.

    Called again, it gives every layer the new method. Parts may have methods of their own: convert(model), then convert(model.head, …).

    >>> model = satchel.convert(torchvision.models.resnet50())
    >>> loss = F.cross_entropy(model(x), y)
    >>> loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"[convert] model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"[convert] model must not be scripted, got {type(model).__name__}; convert works on its Python layers")
    if not isinstance(method, str):
        raise ValueError(f"[convert] method must be text, got {method!r}")
    if not isinstance(exclude, (list, tuple, set, frozenset)) or not all(isinstance(p, str) for p in exclude):
        raise ValueError(f"[convert] exclude must be a list of patterns, got {exclude!r}")
    try:
        is_torchs, _ = ops.method_flags(method)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    if is_torchs:
        return revert(model)
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(path, pattern) for path, _ in model.named_modules()):
            warnings.warn(f"[convert] exclude must match a module's path, got {pattern!r}", RuntimeWarning, stacklevel=2)
    chosen: list[tuple[str, nn.Module]] = []
    left: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        is_left = any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)
        (left if is_left else chosen).append((path, module))
    for path, module in chosen:
        if getattr(module, "cls_to_become", None) in CLASSES:  # it would become torch's at its first batch
            raise ValueError(f"[convert] layers must be initialised: run one batch first, got {type(module).__name__} at {path!r}")
    for path, module in chosen:
        ours = CLASSES.get(type(module))
        if ours is not None:
            module.__class__ = ours
        if isinstance(module, Layer):
            module.satchel_method, module.satchel_name = method, path
    for _, module in left:
        _revert(module)
    if not exclude and not any(isinstance(module, Layer) for _, module in chosen):
        warnings.warn("[convert] model must have layers of torch.nn that Satchel knows, got none", RuntimeWarning, stacklevel=2)
    return model


def revert(model: nn.Module) -> nn.Module:
    """The model as it was before convert()."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"[revert] model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        _revert(module)
    return model


def _revert(module: nn.Module) -> None:
    """The module alone, not those inside."""
    if isinstance(module, Layer):
        module.__class__ = _torchs(type(module))
        del module.satchel_method, module.satchel_name


def _torchs(ours: type) -> type:
    """torch's class for one of ours, or for one that torch has derived from ours: parametrizations and FSDP make such."""
    if ours in TORCH:
        return TORCH[ours]
    bases = tuple(_torchs(base) if issubclass(base, Layer) else base for base in ours.__bases__)
    return type(ours.__name__, bases, {name: value for name, value in ours.__dict__.items() if name not in ("__dict__", "__weakref__")})


# ---- what is kept --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SavedLine:
    """One tensor that a converted layer keeps for backward."""

    layer: str
    kind: str  # shared, norm, input, mask, affine, statistics, derivative, offsets, seed
    bytes: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """What converted layers keep, as saved() found it."""

    lines: tuple[SavedLine, ...]

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    def by_kind(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in self.lines:
            sums[line.kind] = sums.get(line.kind, 0) + line.bytes
        return sums

    def __str__(self) -> str:
        width = max([len(line.layer) for line in self.lines] + [len("in all")])
        rows = [f"{line.layer:{width}}  {line.kind:10}  {line.bytes:12}" for line in self.lines]
        return "\n".join([*rows, f"{'in all':{width}}  {'':10}  {self.bytes:12}"])


def saved(output: Tensor) -> Saved:
    """What the converted layers in the graph of `output` (a loss) keep until backward, each tensor once. Parameters, and what torch's own
    functions keep, are not counted."""
    if not isinstance(output, Tensor):
        raise ValueError(f"[saved] output must be a tensor, got {type(output).__name__}")
    flush_deferred()
    settle(output)
    lines: list[SavedLine] = []
    seen: set[int] = set()
    nodes, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        stack.extend(below for below, _ in node.next_functions)
        for layer, kind, t in _tensors_of(node):
            storage = t.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                lines.append(SavedLine(layer, kind, storage.nbytes()))
    return Saved(tuple(reversed(lines)))


def _tensors_of(node: Any) -> list[tuple[str, str, Tensor]]:
    """(layer, kind, tensor) of a converted layer's node."""
    if not hasattr(node, "kinds"):
        reference = node.metadata.get("satchel")  # of a convolution
        save = None if reference is None else reference()
        return [] if save is None else [(save.layer, kind, t) for kind, t in zip(save.kinds, save.tensors) if kind and t is not None]
    try:
        tensors = node.saved_tensors
    except RuntimeError:  # freed by backward
        return []
    own = len(tensors) - (0 if node.save is None else len(node.save.tensors))
    owners = [node.layer if i < own else node.save.layer for i in range(len(tensors))]
    found = list(zip(owners, node.kinds, tensors))
    norm = getattr(node, "deferred", None)
    if norm is not None and norm.save is not None:
        found += [(norm.save.layer, kind, t) for kind, t in zip(norm.save.kinds, norm.save.tensors)]
        if norm.claimed is None:
            found.append((node.layer, "statistics", norm.rstd))
    return [(layer, kind, t) for layer, kind, t in found if kind and t is not None]
