"""Any torch.nn model with Satchel's layers: norm, ReLU, dropout and the next layer keep one code of about 2 bits a value.

convert() changes the classes of torch's own layers in place, so parameters, buffers, hooks and names stay. A layer of a user's own class, and
functions that a model calls itself (F.relu, torch.cat), stay torch's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import layer_functions as functions
from . import layer_norms as norms
from ._ops import ops
from .shared import flush_deferred

__all__ = ["Saved", "SavedLine", "convert", "revert", "saved"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")


def _is_plain(t: Tensor | None) -> bool:
    if t is None:
        return True
    plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _FLOATS and t.device.type in _DEVICES and t.layout is torch.strided
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(t)


class _Layer:
    """What all converted layers have: a method, a name in reports, and the class that revert() gives back."""

    satchel_method: str
    satchel_name: str

    def _records(self, x: Any, *weights: Tensor | None) -> bool:
        """Is there something to keep? Where not, torch's own forward runs: it keeps nothing either, or this is no case of ours."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(x, Tensor):
            return False
        if x.numel() == 0 or not (x.requires_grad or any(w is not None and w.requires_grad for w in weights)):
            return False
        return all(_is_plain(t) for t in (x, *weights))

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return f"{text}, method={self.satchel_method!r}" if text else f"method={self.satchel_method!r}"


def _unpacked(layer: Any, base: type, x: Tensor) -> Tensor:
    """torch's own forward."""
    flush_deferred()
    return base.forward(layer, x)


# ---- norms ---------------------------------------------------------------------------------------------------------------------------


class _BatchNorm(_Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        base = _TORCH[type(self)]
        training = self.training or self.running_mean is None
        momentum = self.momentum
        few = isinstance(x, Tensor) and x.dim() > 1 and training and x.numel() // max(x.shape[1], 1) < 2
        if few or not self._records(x, self.weight, self.bias) or not all(_is_plain(t) for t in (self.running_mean, self.running_var)):
            return _unpacked(self, base, x)
        self._check_input_dim(x)
        updates = self.training and self.track_running_stats
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        call = norms.NormCall("batch", self.satchel_method, self.satchel_name, self.eps, training)
        running = (self.running_mean, self.running_var) if updates or not training else (None, None)
        if x.dim() == 3 and not x.is_contiguous():
            x = x.contiguous()
        return norms.norm(x, self.weight, self.bias, call, (*running, training, momentum or 0.0))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """nn.BatchNorm1d."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """nn.BatchNorm2d."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """nn.BatchNorm3d."""


def _precise(x: Tensor) -> Tensor:
    """Autocast computes layer and group norms in float32 on CUDA."""
    return x.float() if x.is_cuda and x.dtype is not torch.float32 and torch.is_autocast_enabled("cuda") else x


class LayerNorm(_Layer, nn.LayerNorm):
    """nn.LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        shape = self.normalized_shape
        if not self._records(x, self.weight, self.bias) or tuple(x.shape[-len(shape) :]) != tuple(shape):
            return _unpacked(self, nn.LayerNorm, x)
        call = norms.NormCall("layer", self.satchel_method, self.satchel_name, self.eps, dims=len(shape))
        return norms.norm(_precise(x).contiguous(), self.weight, self.bias, call)


class GroupNorm(_Layer, nn.GroupNorm):
    """nn.GroupNorm."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x, self.weight, self.bias) or x.dim() < 2 or x.shape[1] != self.num_channels:
            return _unpacked(self, nn.GroupNorm, x)
        call = norms.NormCall("group", self.satchel_method, self.satchel_name, self.eps, groups=self.num_groups)
        x = _precise(x)
        in_place = x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)  # as torch has it
        return norms.norm(x if in_place else x.contiguous(), self.weight, self.bias, call)


# ---- activations and dropout ---------------------------------------------------------------------------------------------------------


def _may_change(x: Tensor, inplace: bool) -> bool:
    """torch's own function tells what is wrong with changing a leaf, or a view that others see, in place."""
    return not inplace or not (x.is_leaf or x._is_view())


class ReLU(_Layer, nn.ReLU):
    """nn.ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x) or not _may_change(x, self.inplace):
            return _unpacked(self, nn.ReLU, x)
        return norms.activation(x, self.satchel_method, self.satchel_name, 0.0, self.inplace)


class LeakyReLU(_Layer, nn.LeakyReLU):
    """nn.LeakyReLU."""

    def forward(self, x: Tensor) -> Tensor:
        slope = float(self.negative_slope)
        if not self._records(x) or not _may_change(x, self.inplace) or not math.isfinite(slope) or slope <= 0:
            return _unpacked(self, nn.LeakyReLU, x)
        return norms.activation(x, self.satchel_method, self.satchel_name, slope, self.inplace)


class GELU(_Layer, nn.GELU):
    """nn.GELU."""

    def forward(self, x: Tensor) -> Tensor:
        kind = "gelu_tanh" if self.approximate == "tanh" else "gelu"
        made = functions.smooth(x, self.satchel_method, self.satchel_name, kind) if self._records(x) else None
        return _unpacked(self, nn.GELU, x) if made is None else made


class SiLU(_Layer, nn.SiLU):
    """nn.SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        packs = self._records(x) and _may_change(x, self.inplace)
        made = functions.smooth(x, self.satchel_method, self.satchel_name, "silu", self.inplace) if packs else None
        return _unpacked(self, nn.SiLU, x) if made is None else made


class Dropout(_Layer, nn.Dropout):
    """nn.Dropout; its mask is redrawn from a seed."""

    def forward(self, x: Tensor) -> Tensor:
        drops = self.training and 0 < self.p < 1 and round(self.p * 65536) < 65536
        if not drops or not self._records(x) or not _may_change(x, self.inplace):
            return nn.Dropout.forward(self, x)  # x itself where nothing is dropped: what x shares stays found
        return functions.dropout(x, self.satchel_method, self.satchel_name, self.p, self.inplace)


# ---- layers with weights -------------------------------------------------------------------------------------------------------------


class Linear(_Layer, nn.Linear):
    """nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        fits = self._records(x, self.weight, self.bias) and x.dim() > 1 and x.shape[-1] == self.weight.shape[-1]
        if not fits:
            return _unpacked(self, nn.Linear, x)
        return functions.linear(x, self.weight, self.bias, self.satchel_method, self.satchel_name)


class _Conv(_Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        base, dims = _TORCH[type(self)], len(self.kernel_size)
        fits = self._records(x, self.weight, self.bias) and x.dim() == dims + 2 and x.shape[1] == self.in_channels
        padding = (0,) * dims if self.padding == "valid" else self.padding
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
        if padding == "same":
            padding = tuple(r // 2 for r in reach) if all(r % 2 == 0 for r in reach) else None
        # Where results stand of padding alone torch's oneDNN crashes at some maps: its own function is no better, but it is torch's.
        if not fits or padding is None or any(p > r for p, r in zip(padding, reach)):
            return _unpacked(self, base, x)
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * dims
        if any(n + 2 * p <= r for n, p, r in zip(x.shape[2:], padding, reach)):
            return _unpacked(self, base, x)
        call = functions.ConvCall(tuple(self.stride), tuple(padding), tuple(self.dilation), self.groups)
        return functions.conv(x, self.weight, self.bias, self.satchel_method, self.satchel_name, call)


class Conv1d(_Conv, nn.Conv1d):
    """nn.Conv1d."""


class Conv2d(_Conv, nn.Conv2d):
    """nn.Conv2d."""


class Conv3d(_Conv, nn.Conv3d):
    """nn.Conv3d."""


# ---- pools ---------------------------------------------------------------------------------------------------------------------------


def _pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else (tuple(n) * 2)[:2]


class MaxPool2d(_Layer, nn.MaxPool2d):
    """nn.MaxPool2d; keeps where in its window each maximum stood."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x) or x.dim() != 4 or self.return_indices:
            return _unpacked(self, nn.MaxPool2d, x)
        k = _pair(self.kernel_size)
        s = k if self.stride is None else _pair(self.stride)
        window = (k, s, _pair(self.padding), _pair(self.dilation), self.ceil_mode)
        return functions.max_pool2d(x, self.satchel_method, self.satchel_name, *window)


class AvgPool2d(_Layer, nn.AvgPool2d):
    """nn.AvgPool2d; keeps sizes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x) or x.dim() != 4:
            return _unpacked(self, nn.AvgPool2d, x)
        k, s = _pair(self.kernel_size), _pair(self.kernel_size if self.stride is None else self.stride)
        return functions.avg_pool2d(x, k, s, _pair(self.padding), self.ceil_mode, self.count_include_pad, self.divisor_override)


class AdaptiveAvgPool2d(_Layer, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d; keeps sizes. torch itself does so where the output is 1×1."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x) or x.dim() != 4 or self.output_size in (1, (1, 1), [1, 1]):
            return _unpacked(self, nn.AdaptiveAvgPool2d, x)
        return functions.adaptive_avg_pool2d(x, self.output_size)


_CLASSES: dict[type, type] = {
    base: ours
    for ours in (BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm, GroupNorm, ReLU, LeakyReLU, GELU, SiLU, Dropout, Linear, Conv1d, Conv2d,
                 Conv3d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d)
    for base in ours.__mro__
    if base.__module__.startswith("torch.nn.modules.") and base.__name__ == ours.__name__
}  # fmt: skip
_TORCH = {ours: base for base, ours in _CLASSES.items()}


# ---- conversion ----------------------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, method: str = "satchel", *, exclude: Iterable[str] = ()) -> nn.Module:
    """The model itself, its layers changed in place to those that share one save.

    method: as the C++ library reads it ("satchel", "satchel,bits=3", "satchel,bits=32" for exact saves, "int8"); "fp32" reverts.
    exclude: patterns (fnmatch) of module paths that stay torch's.

    >>> model = satchel.convert(torchvision.models.resnet50())
    >>> loss = F.cross_entropy(model(x), y)
    >>> loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"[convert] model must be a torch.nn.Module, got {type(model).__name__}")
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
    for path, module in model.named_modules():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
            continue
        ours = _CLASSES.get(type(module))
        if ours is not None:
            module.__class__ = ours
        if isinstance(module, _Layer):
            module.satchel_method, module.satchel_name = method, path
    return model


def revert(model: nn.Module) -> nn.Module:
    """The model as it was before convert()."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"[revert] model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        base = _TORCH.get(type(module))
        if base is not None:
            module.__class__ = base
            del module.satchel_method, module.satchel_name
    return model


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
    lines: list[SavedLine] = []
    seen: set[int] = set()
    nodes, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        stack.extend(below for below, _ in node.next_functions)
        for kind, t in _tensors_of(node):
            storage = t.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                lines.append(SavedLine(node.layer, kind, storage.nbytes()))
    return Saved(tuple(reversed(lines)))


def _tensors_of(node: Any) -> list[tuple[str, Tensor]]:
    if not hasattr(node, "kinds"):
        return []
    try:
        found = [(kind, t) for kind, t in zip(node.kinds, node.saved_tensors) if kind and t is not None]
    except RuntimeError:  # freed by backward
        return []
    norm = getattr(node, "deferred", None)
    if norm is None:
        return found
    if norm.save is not None:
        found += [(kind, t) for kind, t in zip(norm.save.kinds, norm.save.tensors) if t is not None]
    return found if norm.claimed is not None or norm.save is None else [*found, ("statistics", norm.rstd)]
