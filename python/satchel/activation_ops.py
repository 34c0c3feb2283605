"""A smooth activation as one op: its result, and codes of its slope and of the result, which backward and the next layer's weights read.
CUDA's kernels are in satchel/stable/activations.cpp; here are the CPU's way, sizes without data, and the gradients.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._ops import Numbers, layout, ops, parse_spec
from .kept import SLOPES, code_numbers
from .shared import dense_strides, in_order

__all__ = ["GELU", "GELU_TANH", "SILU", "specs"]

GELU, GELU_TANH, SILU = 1, 2, 3  # as core/layer.h numbers them


@functools.lru_cache(maxsize=4096)
def specs(flow: int, local: int, values: int, dtype: torch.dtype, cuda: bool, codes_output: bool) -> tuple[Numbers, Numbers] | None:
    """The codes of slope and result, the second empty where it is not coded; None where the op does not serve."""
    if flow not in (3, 4) or local != 2 or values % 8:
        return None
    found = parse_spec(f"bits={flow},levels=even"), code_numbers(local) if codes_output else ()
    return found if not cuda or ops.activation_fits(values, dtype, *found) else None


_VALUES: dict[int, Callable[[Tensor], Tensor]] = {GELU: F.gelu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), SILU: F.silu}
_SLOPES = {GELU: SLOPES["gelu"], GELU_TANH: SLOPES["gelu_tanh"], SILU: SLOPES["silu"]}


def _line(x: Tensor) -> Tensor:
    """The values of a tensor without gaps as they lie in memory."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _activation_cpu(x, seeds, kind, slope, output):
    if kind not in _VALUES:
        raise RuntimeError(f"[activation] kind must be 1 to 3, got {kind}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError(f"[activation] tensor must be float32, float16 or bfloat16, got {x.dtype}")
    if seeds.dtype is not torch.int64 or seeds.shape != (2,):
        raise RuntimeError(f"[activation] seeds must be two numbers of int64 on the tensor's device, got {seeds.dtype} of {tuple(seeds.shape)}")
    x = x if dense_strides(x) == x.stride() else x.clone()  # without gaps, in the order that torch gives results
    strides = x.stride()
    z, by = (_line(in_order(t, strides)) for t in (_VALUES[kind](x), _SLOPES[kind](x.float())))
    slopes = ops.pack(by, seeds[:1].clone(), None, 1, slope)
    coded = ops.pack(z, seeds[1:].clone(), None, 1, output) if output else slopes.new_empty(0)
    return z.as_strided(x.shape, strides, z.storage_offset()), slopes, coded


def _activation_backward_cpu(g, slopes, strides, spec):
    by = ops.unpack(slopes, [g.numel()], [1], torch.float32, spec).as_strided(g.shape, strides)
    return in_order((g.float() * by).to(g.dtype), tuple(strides))


_library = torch.library.Library("satchel_stable", "IMPL", "CPU")
_library.impl("activation", _activation_cpu)
_library.impl("activation_forward", _activation_cpu)
_library.impl("activation_backward", _activation_backward_cpu)


def _packed(x: Tensor, dtype: torch.dtype, spec: list[int]) -> Tensor:
    return x.new_empty(layout((x.numel(),), dtype, 0, 1, tuple(spec))["total"] if spec else 0, dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::activation_forward")
@torch.library.register_fake("satchel_stable::activation")
def _(x, seeds, kind, slope, output):
    z = torch.empty_like(x)
    return z, _packed(x, torch.float32, slope), _packed(x, x.dtype, output)


@torch.library.register_fake("satchel_stable::activation_backward")
def _(g, slopes, strides, spec):
    return torch.empty_strided(g.shape, strides, dtype=g.dtype, device=g.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, slopes, coded = output
    ctx.mark_non_differentiable(slopes, coded)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(slopes)
    ctx.strides, ctx.spec = list(z.stride()), inputs[3]


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if g is None:
        return (None,) * 5
    return ops.activation_backward(g, ctx.saved_tensors[0], ctx.strides, ctx.spec), *(None,) * 4


torch.library.register_autograd("satchel_stable::activation", _backward, setup_context=_keep)
