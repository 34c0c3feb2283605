"""A batch norm with what follows it as one op: statistics, norm, (sum with a skip), ReLU, and the codes that backward and the next layer
read. CUDA's kernels are in satchel/stable/norms.cpp; here are the CPU's way, sizes without data, and the gradients.

  form   z                      code                    sum
  ACT    relu(γ·x̂ + β)          x̂ in a one-sided code   –
  ADD    relu(γ·x̂ + β + skip)   x̂ in blocks             z in its ReLU form
  ALONE  γ·x̂ + β                x̂ in blocks             –
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._ops import Numbers, layout, ops
from .codec import channel_table
from .shared import ONE_SIDED, keeps

__all__ = ["ACT", "ADD", "ALONE", "Specs", "method_of", "specs"]

ACT, ADD, ALONE = 0, 1, 2

Specs = tuple[Numbers, Numbers]  # of the norm's code and of the sum's; the second is empty but for ADD


def method_of(bits: int) -> str:
    return "satchel" if bits == 2 else f"satchel,bits={bits}"


@functools.lru_cache(maxsize=4096)
def specs(method: str, form: int, rows: int, channels: int, dtype: torch.dtype, cuda: bool, image: bool) -> Specs | None:
    """The codes that the method keeps of such a norm, as the C++ layers have them; None where the op does not serve."""
    activation = "none" if form == ALONE else "relu"
    keep = keeps(method, "epilogue", "batch", activation, form != ALONE, image, channels, rows, form == ADD)
    norm, sum_ = keep.get("shared" if form == ACT else "norm"), keep.get("shared") if form == ADD else None
    if norm is None or norm.of != 1 or (form == ADD) != (sum_ is not None and sum_.of == 2) or (form == ALONE and "shared" in keep):
        return None
    found = norm.numbers, sum_.numbers if sum_ is not None else ()
    plain = all(numbers[0] <= 8 for numbers in found if numbers) and norm.numbers[7] == 0
    if not plain or (form == ACT) != (norm.numbers[6] in ONE_SIDED):
        return None
    return found if not cuda or ops.norm_fits(rows, channels, dtype, form, *found) else None


def _as_rows(x: Tensor) -> Tensor:
    """x as rows of channels, contiguous."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous()


def _as_image(rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows of channels in a shape whose second dimension they are, innermost in memory."""
    return rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _fail(op: str, rule: str, got: Any) -> NoReturn:
    raise RuntimeError(f"[{op}] {rule}, got {got}")


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _check_channels(op: str, x: Tensor, form: int, **numbers: Tensor | None) -> None:
    """What CUDA's way asks of its arguments too."""
    if x.dtype not in _FLOATS:
        _fail(op, "tensor must be float32, float16 or bfloat16", x.dtype)
    if x.dim() < 2 or x.numel() == 0:
        _fail(op, "tensor must have a dimension of channels, and values", tuple(x.shape))
    if form not in (ACT, ADD, ALONE):
        _fail(op, "form must be 0 to 2", form)
    for name, t in numbers.items():
        if t is not None and (t.dtype is not torch.float32 or t.shape != (x.shape[1],) or t.device != x.device):
            _fail(op, f"{name} must hold {x.shape[1]} float32 numbers on the tensor's device", f"{t.dtype} of {tuple(t.shape)} on {t.device}")


def _check_norm(op: str, x: Tensor, skip: Tensor | None, gamma: Tensor, beta: Tensor, seeds: Tensor, form: int) -> None:
    _check_channels(op, x, form, gamma=gamma, beta=beta)
    if (skip is not None) != (form == ADD):
        _fail(op, "a skip must come with form add alone", form)
    if skip is not None and (skip.shape != x.shape or skip.dtype is not x.dtype or skip.device != x.device):
        _fail(op, "skip must have x's sizes, type and device", f"{skip.dtype} of {tuple(skip.shape)} on {skip.device}")
    if seeds.dtype is not torch.int64 or seeds.shape != (2,):
        _fail(op, "seeds must be two numbers of int64 on the tensor's device", f"{seeds.dtype} of {tuple(seeds.shape)}")


def _norm_cpu(x, skip, gamma, beta, seeds, eps, form, norm, sum):
    _check_norm("norm", x, skip, gamma, beta, seeds, form)
    rows = _as_rows(x).float()
    near = rows.mean(0)  # torch.var_mean takes ten times as long on the CPU
    hat = rows - near
    apart = hat.mean(0)  # without it, equal values would deviate from their rounded mean
    var = hat.square().mean(0).sub_(apart.square()).clamp_min_(0)
    mean = near.add_(apart)
    rstd = (var + eps).rsqrt_()
    hat = torch.sub(rows, mean, out=hat).mul_(rstd)  # of the mean that is returned
    code = ops.pack(hat, seeds[:1].clone(), channel_table(gamma, beta) if form == ACT else None, 1, norm)
    y = torch.addcmul(beta, hat, gamma)
    if form == ADD:
        y = y.add_(_as_rows(skip))
    z = (y if form == ALONE else y.relu_()).to(x.dtype)
    summed = ops.pack(z, seeds[1:].clone(), None, 1, sum) if form == ADD else code.new_empty(0)
    return _as_image(z, x.shape), code, summed, mean, rstd, var


def _norm_moving_cpu(x, skip, gamma, beta, running_mean, running_var, momentum, seeds, eps, form, norm, sum):
    _check_channels("norm_moving", x, form, running_mean=running_mean, running_var=running_var)
    if (running_mean is None) != (running_var is None):
        _fail("norm_moving", "running mean and variance must come together", "one of them")
    z, code, summed, mean, rstd, var = _norm_cpu(x, skip, gamma, beta, seeds, eps, form, norm, sum)
    if running_mean is not None:
        rows = x.numel() // x.shape[1]
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * (rows / (rows - 1)), momentum)
    return z, code, summed, rstd


def _norm_backward_cpu(g, bytes, sum, rstd, gamma, form, norm, sum_spec, needs_x, needs_skip):
    _check_channels("norm_backward", g, form, rstd=rstd, gamma=gamma)
    gz = _as_rows(g)
    shape = list(gz.shape)
    hat = ops.unpack(bytes, shape, [shape[1], 1], torch.float32, norm, shape[1] if form == ACT else 0, 1)
    if form != ALONE:
        on = ops.side_on(bytes, shape, norm, shape[1], 1) if form == ACT else ops.side_on(sum, shape, sum_spec, 0, 1)
        gz = ops.gate(gz, on, None, 0.0, 0.0)
    wide = gz.float()
    dbeta, dgamma = wide.sum(0), (wide * hat).sum(0)
    nothing = g.new_empty(0)
    dx = nothing
    if needs_x:
        dx = (wide - (dbeta + hat * dgamma) / shape[0]).mul_(gamma * rstd).to(g.dtype)
        dx = _as_image(dx, g.shape)
    return dx, _as_image(gz.clone(), g.shape) if form == ADD and needs_skip else nothing, dgamma, dbeta


def _norm_output_cpu(bytes, shape, dtype, form, spec):
    if form not in (ACT, ADD):
        _fail("norm_output", "form must be act or add", form)
    if len(shape) < 2 or shape[1] <= 0 or dtype not in _FLOATS:
        _fail("norm_output", "shape must have a dimension of channels, and dtype be a float's", f"{shape}, {dtype}")
    channels = shape[1]
    matrix = [torch.Size(shape).numel() // channels, channels]
    if form == ADD:
        return _as_image(ops.unpack(bytes, matrix, [channels, 1], dtype, spec, 0, 1), torch.Size(shape))
    start = layout(tuple(matrix), torch.float32, channels, 1, tuple(spec))["channel_table"]
    table = bytes[start : start + 16 * channels].clone().view(torch.float32).view(-1, 4)
    hat = ops.unpack(bytes, matrix, [channels, 1], torch.float32, spec, channels, 1)
    z = ops.gate(torch.addcmul(table[:, 2], hat, table[:, 1]), ops.side_on(bytes, matrix, spec, channels, 1), None, 0.0, 0.0)
    return _as_image(z.to(dtype), torch.Size(shape))


_library = torch.library.Library("satchel_stable", "IMPL", "CPU")
_library.impl("norm", _norm_cpu)
_library.impl("norm_forward", _norm_cpu)
_library.impl("norm_moving", _norm_moving_cpu)
_library.impl("norm_backward", _norm_backward_cpu)
_library.impl("norm_output", _norm_output_cpu)


def _image_like(x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return _as_image(x.new_empty((shape[0], *shape[2:], shape[1]), dtype=dtype), shape)


@torch.library.register_fake("satchel_stable::norm_forward")
@torch.library.register_fake("satchel_stable::norm")
def _(x, skip, gamma, beta, seeds, eps, form, norm, sum):
    channels = x.shape[1]
    matrix = (x.numel() // channels, channels)
    code = layout(matrix, torch.float32, channels if form == ACT else 0, 1, tuple(norm))["total"]
    summed = layout(matrix, x.dtype, 0, 1, tuple(sum))["total"] if form == ADD else 0
    numbers = [x.new_empty(channels, dtype=torch.float32) for _ in range(3)]
    return _image_like(x, x.shape, x.dtype), *(x.new_empty(n, dtype=torch.uint8) for n in (code, summed)), *numbers


@torch.library.register_fake("satchel_stable::norm_backward")
def _(g, bytes, sum, rstd, gamma, form, norm, sum_spec, needs_x, needs_skip):
    made = [_image_like(g, g.shape, g.dtype) if wanted else g.new_empty(0) for wanted in (needs_x, form == ADD and needs_skip)]
    return *made, torch.empty_like(rstd), torch.empty_like(rstd)


@torch.library.register_fake("satchel_stable::norm_output")
def _(bytes, shape, dtype, form, spec):
    return _image_like(bytes, shape, dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gamma, _, _, _, form, norm, sum_ = inputs
    _, code, summed, mean, rstd, var = output
    ctx.mark_non_differentiable(code, summed, mean, rstd, var)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(code, summed, rstd, gamma)
    ctx.form, ctx.specs = form, (norm, sum_)


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if g is None:
        return (None,) * 9
    code, summed, rstd, gamma = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dskip, dgamma, dbeta = ops.norm_backward(g, code, summed, rstd, gamma, ctx.form, *ctx.specs, needs[0], needs[1])
    return dx if needs[0] else None, dskip if needs[1] else None, dgamma if needs[2] else None, dbeta if needs[3] else None, *(None,) * 5


torch.library.register_autograd("satchel_stable::norm", _backward, setup_context=_keep)
