"""torch's layers with saves that they share: subclasses with the same parameters, arguments and results. convert() makes them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NoReturn

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import layer_activations as activations
from . import layer_functions as functions
from . import layer_norms as norms
from . import layer_waiting as waiting
from .shared import flush_deferred

__all__ = ["CLASSES", "TORCH", "Layer"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # make_fx


def _is_plain(t: Tensor | None) -> bool:
    if t is None:
        return True
    plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _FLOATS and t.device.type in _DEVICES and t.layout is torch.strided
    return plain and not t.is_nested and not t.is_inference() and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _is_ours(*tensors: Tensor | None) -> bool:
    """Tensors that the ops take, outside of torch's compilers, of torch.func and of forward-mode differentiation."""
    traces = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._get_dispatch_mode(_PROXY) is not None
    transforms = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not traces and not transforms and all(_is_plain(t) for t in tensors)


def _types_fit(x: Tensor, w: Tensor) -> bool:
    """torch's own function tells what is wrong with two types."""
    return x.dtype is w.dtype or torch.is_autocast_enabled(x.device.type)


def _refused(by: str) -> RuntimeError:
    return RuntimeError(f"[convert] {by} takes torch's own layers, got a converted one; call satchel.revert(model) first")


class Layer:
    """What all converted layers have: a method, a name in reports, and the class that revert() gives back."""

    satchel_method: str
    satchel_name: str
    satchel_base: type  # torch's

    def __prepare_scriptable__(self) -> NoReturn:
        raise _refused("torch.jit.script")

    def _records(self, x: Any, *weights: Tensor | None) -> bool:
        """Is there something to keep? Where not, torch's own forward runs: it keeps nothing either, or this is no case of ours."""
        _take(x)
        if not torch.is_grad_enabled() or not isinstance(x, Tensor) or torch.jit.is_tracing() or x.numel() == 0:
            return False
        return any(t is not None and t.requires_grad for t in (x, *weights)) and _is_ours(x, *weights)

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return f"{text}, method={self.satchel_method!r}" if text else f"method={self.satchel_method!r}"


def _take(x: Any) -> None:
    """What every layer does first with what it is given."""
    waiting.settle(x)
    if isinstance(x, torch.fx.Proxy):
        raise _refused("torch.fx")


def _unpacked(layer: Any, base: Any, x: Tensor) -> Tensor:
    """torch's own forward."""
    flush_deferred()
    return base.forward(layer, x)


# ---- norms ---------------------------------------------------------------------------------------------------------------------------


class _BatchNorm(Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        base = self.satchel_base
        for t in (self.running_mean, self.running_var):
            waiting.settle(t)  # statistics move in the order of the calls
        training = self.training or self.running_mean is None
        momentum = self.momentum
        if not self._records(x, self.weight, self.bias) or not all(_is_plain(t) for t in (self.running_mean, self.running_var)):
            return _unpacked(self, base, x)
        if training and x.dim() > 1 and x.numel() // x.shape[1] < 2:
            return _unpacked(self, base, x)
        self._check_input_dim(x)
        if any(t is not None and t.shape != (x.shape[1],) for t in (self.weight, self.bias, self.running_mean, self.running_var)):
            return _unpacked(self, base, x)  # which says so; native_batch_norm would write beyond the statistics
        updates = self.training and self.track_running_stats
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        call = norms.NormCall("batch", self.satchel_method, self.satchel_name, self.eps, training)
        running = (self.running_mean, self.running_var) if updates or not training else (None, None)
        wide = all(t is not None and t.dtype is torch.float32 for t in (self.weight, self.bias, *(running if updates else ())))
        if training and wide:
            moving: Any = running if updates else None
            made = waiting.batch_norm(x, self.weight, self.bias, moving, (self.satchel_method, self.satchel_name, self.eps, momentum or 0.0))
            if made is not None:
                return made
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


class LayerNorm(Layer, nn.LayerNorm):
    """nn.LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        shape = self.normalized_shape
        if not self._records(x, self.weight, self.bias) or tuple(x.shape[-len(shape) :]) != tuple(shape):
            return _unpacked(self, nn.LayerNorm, x)
        call = norms.NormCall("layer", self.satchel_method, self.satchel_name, self.eps, dims=len(shape))
        return norms.norm(_precise(x).contiguous(), self.weight, self.bias, call)


class RMSNorm(Layer, nn.RMSNorm):
    """nn.RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        shape = self.normalized_shape
        if not self._records(x, self.weight) or tuple(x.shape[-len(shape) :]) != tuple(shape):
            return _unpacked(self, nn.RMSNorm, x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        call = norms.NormCall("layer", self.satchel_method, self.satchel_name, eps, dims=len(shape), centred=False)
        return norms.norm(x.contiguous(), self.weight, None, call)


class GroupNorm(Layer, nn.GroupNorm):
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


class ReLU(Layer, nn.ReLU):
    """nn.ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is waiting.Waiting and waiting.may_claim():
            return waiting.relu(x, self.inplace)
        if not self._records(x) or not _may_change(x, self.inplace):
            return _unpacked(self, nn.ReLU, x)
        return activations.activation(x, self.satchel_method, self.satchel_name, 0.0, self.inplace)


class ReLU6(Layer, nn.ReLU6):
    """nn.ReLU6."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._records(x) or not _may_change(x, self.inplace):
            return _unpacked(self, nn.ReLU6, x)
        return activations.relu6(x, self.satchel_name, self.inplace)


class LeakyReLU(Layer, nn.LeakyReLU):
    """nn.LeakyReLU."""

    def forward(self, x: Tensor) -> Tensor:
        slope = float(self.negative_slope)
        if not self._records(x) or not _may_change(x, self.inplace) or not math.isfinite(slope) or slope <= 0:
            return _unpacked(self, nn.LeakyReLU, x)
        return activations.activation(x, self.satchel_method, self.satchel_name, slope, self.inplace)


class ELU(Layer, nn.ELU):
    """nn.ELU."""

    def forward(self, x: Tensor) -> Tensor:
        alpha = float(self.alpha)
        if not self._records(x) or not _may_change(x, self.inplace) or not math.isfinite(alpha) or alpha < 0:
            return _unpacked(self, nn.ELU, x)
        return activations.elu(x, self.satchel_method, self.satchel_name, alpha, self.inplace)


class GELU(Layer, nn.GELU):
    """nn.GELU."""

    def forward(self, x: Tensor) -> Tensor:
        kind = "gelu_tanh" if self.approximate == "tanh" else "gelu"
        made = activations.smooth(x, self.satchel_method, self.satchel_name, kind) if self._records(x) else None
        return _unpacked(self, nn.GELU, x) if made is None else made


class SiLU(Layer, nn.SiLU):
    """nn.SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        packs = self._records(x) and _may_change(x, self.inplace)
        made = activations.smooth(x, self.satchel_method, self.satchel_name, "silu", self.inplace) if packs else None
        return _unpacked(self, nn.SiLU, x) if made is None else made


class Dropout(Layer, nn.Dropout):
    """nn.Dropout; its mask is redrawn from a seed."""

    def forward(self, x: Tensor) -> Tensor:
        _take(x)
        drops = self.training and 0 < self.p < 1 and round(self.p * 65536) < 65536 and isinstance(x, Tensor) and x.numel() > 0
        # Without gradients too: what checkpointing runs without them, and again with them, is dropped alike.
        if not drops or not _is_ours(x) or (torch.is_grad_enabled() and not _may_change(x, self.inplace)):
            return nn.Dropout.forward(self, x)  # x itself where nothing is dropped: what x shares stays found
        return activations.dropout(x, self.satchel_method, self.satchel_name, self.p, self.inplace)


# ---- layers with weights -------------------------------------------------------------------------------------------------------------


class Linear(Layer, nn.Linear):
    """nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        fits = self._records(x, self.weight, self.bias) and x.dim() > 1 and x.shape[-1] == self.weight.shape[-1]
        if not fits or not _types_fit(x, self.weight):
            return _unpacked(self, nn.Linear, x)
        return functions.linear(x, self.weight, self.bias, self.satchel_method, self.satchel_name)


class _Conv(Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        base, dims = self.satchel_base, len(self.kernel_size)
        fits = self._records(x, self.weight, self.bias) and x.dim() == dims + 2 and x.shape[1] == self.in_channels
        fits = fits and _types_fit(x, self.weight)
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation)
        found = _conv_call(*(tuple(s) if isinstance(s, list) else s for s in sizes), self.groups, self.padding_mode) if fits else None
        if found is None:
            return _unpacked(self, base, x)
        call, least = found
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if any(n < m for n, m in zip(x.shape[2:], least)):
            return _unpacked(self, base, x)
        return functions.conv(x, self.weight, self.bias, self.satchel_method, self.satchel_name, call)


class _ConvTranspose(Layer):
    def forward(self: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        base, dims = self.satchel_base, len(self.kernel_size)
        fits = self._records(x, self.weight, self.bias) and x.dim() == dims + 2 and x.shape[1] == self.in_channels
        fits = fits and _types_fit(x, self.weight) and self.padding_mode == "zeros"
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation)
        found = _conv_call(*(tuple(s) if isinstance(s, list) else s for s in sizes), self.groups, "zeros") if fits else None
        if found is None:
            flush_deferred()
            return base.forward(self, x, output_size)
        # torch's own choice among the sizes that the stride leaves.
        more = self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        call = dataclasses.replace(found[0], transposed=True, output_padding=tuple(more))
        return functions.conv(x, self.weight, self.bias, self.satchel_method, self.satchel_name, call)


@functools.lru_cache(maxsize=1024)
def _conv_call(kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int, mode: str) -> tuple[functions.ConvCall, list[int]] | None:
    """The call, and the least sizes that it takes; None for what torch does itself."""
    zeros, reach = (0,) * len(kernel), [d * (k - 1) for d, k in zip(dilation, kernel)]
    padding = zeros if padding == "valid" else padding
    if padding == "same":
        if any(r % 2 for r in reach):
            return None
        padding = tuple(r // 2 for r in reach)
    # Where results stand of padding alone torch's oneDNN crashes at some maps: its own function is no better, but it is torch's.
    if any(p > r for p, r in zip(padding, reach)):
        return None
    padding = padding if mode == "zeros" else zeros
    call = functions.ConvCall(tuple(stride), tuple(padding), tuple(dilation), groups)
    return call, [r - 2 * p + 1 for p, r in zip(padding, reach)]


class Conv1d(_Conv, nn.Conv1d):
    """nn.Conv1d."""


class Conv2d(_Conv, nn.Conv2d):
    """nn.Conv2d."""


class Conv3d(_Conv, nn.Conv3d):
    """nn.Conv3d."""


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d."""


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d."""


# ---- pools ---------------------------------------------------------------------------------------------------------------------------


def _spread(n: Any, dims: int) -> tuple[int, ...]:
    """One number a spatial dimension."""
    return (n,) * dims if isinstance(n, int) else (tuple(n) * dims)[:dims]


class _MaxPool(Layer):
    """Keeps where in its window each maximum stood."""

    dims: int

    def forward(self: Any, x: Tensor) -> Any:
        dims = self.dims
        if not self._records(x) or x.dim() != dims + 2 or self.return_indices:
            return _unpacked(self, self.satchel_base, x)
        stride = self.kernel_size if self.stride is None else self.stride
        window = tuple(_spread(n, dims) for n in (self.kernel_size, stride, self.padding, self.dilation))
        return functions.max_pool(x, self.satchel_method, self.satchel_name, window, self.ceil_mode)


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    """nn.MaxPool1d."""

    dims = 1


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    """nn.MaxPool2d."""

    dims = 2


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    """nn.MaxPool3d."""

    dims = 3


class _AvgPool(Layer):
    """Keeps sizes."""

    dims: int

    def forward(self: Any, x: Tensor) -> Tensor:
        if not self._records(x) or x.dim() != self.dims + 2:
            return _unpacked(self, self.satchel_base, x)
        stride = self.kernel_size if self.stride is None else self.stride
        window = (_spread(n, self.dims) for n in (self.kernel_size, stride, self.padding))
        return functions.avg_pool(x, *window, self.ceil_mode, self.count_include_pad, getattr(self, "divisor_override", None))


class AvgPool1d(_AvgPool, nn.AvgPool1d):
    """nn.AvgPool1d."""

    dims = 1


class AvgPool2d(_AvgPool, nn.AvgPool2d):
    """nn.AvgPool2d."""

    dims = 2


class AvgPool3d(_AvgPool, nn.AvgPool3d):
    """nn.AvgPool3d."""

    dims = 3


class _AdaptiveAvgPool(Layer):
    """Keeps sizes. torch itself does so where one number a channel is left."""

    dims: int

    def forward(self: Any, x: Tensor) -> Tensor:
        if not self._records(x) or x.dim() != self.dims + 2 or all(n == 1 for n in _spread(self.output_size, self.dims)):
            return _unpacked(self, self.satchel_base, x)
        return functions.adaptive_avg_pool(x, self.output_size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool, nn.AdaptiveAvgPool1d):
    """nn.AdaptiveAvgPool1d."""

    dims = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d."""

    dims = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool, nn.AdaptiveAvgPool3d):
    """nn.AdaptiveAvgPool3d."""

    dims = 3


CLASSES: dict[type, type] = {
    base: ours
    for ours in (BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm, RMSNorm, GroupNorm, ReLU, ReLU6, LeakyReLU, ELU, GELU, SiLU, Dropout,
                 Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, MaxPool1d, MaxPool2d, MaxPool3d,
                 AvgPool1d, AvgPool2d, AvgPool3d, AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d)
    for base in ours.__mro__
    if base.__module__.startswith("torch.nn.modules.") and base.__name__ == ours.__name__
}  # fmt: skip
TORCH = {ours: base for base, ours in CLASSES.items()}
for _ours, _base in TORCH.items():
    _ours.satchel_base = _base  # type: ignore[attr-defined]
