"""What packing does to the gradient of each parameter: which layer it hurts, beside what the mini-batch itself does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn

from .layers import Layer
from .packing import _hooks_of, packing

__all__ = ["Diagnosis", "Finding", "doctor"]


@dataclasses.dataclass
class Finding:
    """One parameter. Errors are relative to the norm of its exact gradient."""

    parameter: str
    values: int
    norm: float  # of the exact gradient
    error: float  # of one draw: the root of its mean square
    bias: float  # of the mean of all draws, times √draws, by `error`: about 1 where there is none
    cosine: float  # between one draw and the exact gradient, in the mean
    batch: float  # of the gradient of half of the batch; NaN where the batch has no halves


@dataclasses.dataclass
class Diagnosis:
    """Findings, the largest error beside the batch's own first."""

    draws: int
    findings: list[Finding]

    def table(self) -> str:
        width = max([len(f.parameter) for f in self.findings] + [len("parameter")])
        head = f"{'parameter':{width}}  {'values':>10}  {'error':>7}  {'bias':>5}  {'cosine':>7}  {'batch':>7}  {'error/batch':>11}"
        rows = [
            f"{f.parameter:{width}}  {f.values:10}  {f.error:7.4f}  {f.bias:5.2f}  {f.cosine:7.4f}  {f.batch:7.4f}  {_ratio(f):11.3f}" for f in self.findings
        ]
        foot = f"{self.draws} draws. error: of one draw, by the exact gradient's norm; bias: 1 where the mean is right; batch: the same error of half a batch."
        return "\n".join([head, *rows, foot])

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        # NaN and infinity are no JSON numbers.
        rows = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in dataclasses.asdict(f).items()} for f in self.findings]
        return json.dumps({"draws": self.draws, "findings": rows})

    def to_pandas(self) -> Any:
        """A DataFrame of the findings; pandas must be installed."""
        import pandas

        return pandas.DataFrame([dataclasses.asdict(f) for f in self.findings])


def _ratio(f: Finding) -> float:
    return f.error / f.batch if f.batch else math.nan


@contextlib.contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers (running statistics), modes, gradients and torch's generators are afterwards what they were; dropout draws the same in every
    call."""
    values = [(b, b.detach().clone()) for b in model.buffers()]
    modules = [(module, dict(module._buffers), module.training) for module in model.modules()]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for module, buffers, training in modules:
                module._buffers.clear()
                module._buffers.update(buffers)  # a forward may have made others
                module.training = training
            with torch.no_grad():
                for b, before in values:
                    b.copy_(before)
            for name, p in model.named_parameters():
                p.grad = gradients[name]


def _real(g: Tensor) -> Tensor:
    """A gradient in real numbers, all of them."""
    g = g.to_dense() if g.layout is not torch.strided else g
    return (torch.view_as_real(g) if g.is_complex() else g).float()


def _halves(inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Both halves of a batch whose tensors have one number of rows; none where they have not."""
    rows = {x.shape[0] if x.dim() else 0 for x in inputs if isinstance(x, Tensor)}
    count = rows.pop() if len(rows) == 1 else 0
    if count < 4:
        return []
    half = count // 2
    return [tuple(x[part] if isinstance(x, Tensor) else x for x in inputs) for part in (slice(0, half), slice(half, 2 * half))]


def doctor(model: nn.Module, *inputs: Any, loss: Callable[..., Tensor] | None = None, draws: int = 16, **options: Any) -> Diagnosis:
    """Compares each parameter's gradient under packing with the exact one, over several draws of the rounding.

    inputs: one batch. loss(*inputs) gives a number; without it the model's own output is that number. options: packing()'s (bits, budget,
    min_bytes, include, exclude); under a budget a step that chooses the bits comes before the draws. The model, its gradients and torch's
    generators are afterwards as they were.

    >>> print(satchel.doctor(model, images, labels, loss=lambda x, y: F.cross_entropy(model(x), y)))
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"[doctor] model must be a torch.nn.Module, got {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, Layer) or _hooks_of(module):
            how = "converted: revert()" if isinstance(module, Layer) else "attached: detach()"
            raise ValueError(f"[doctor] model must be torch's own, for exact gradients, got {path or 'one'!r} {how} comes first")
    if loss is not None and not callable(loss):
        raise ValueError(f"[doctor] loss must be a function, got {loss!r}")
    if isinstance(draws, bool) or not isinstance(draws, int) or not 2 <= draws < 1 << 31:
        raise ValueError(f"[doctor] draws must be 2 or more, and below 2³¹, got {draws!r}")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("[doctor] model must have parameters that need a gradient, got none")
    for name, p in named:
        if isinstance(p, nn.UninitializedParameter) or p.is_meta:
            raise ValueError(f"[doctor] parameters must have values, got {name!r} {'on meta' if p.is_meta else 'of a lazy layer'}")
    if options.get("seed") is not None:
        raise ValueError(f"[doctor] seed is doctor's own: every draw has another, got {options['seed']!r}")
    try:
        packs = packing(**{"model": model, **options, "seed": 0})
    except TypeError:
        raise ValueError(f"[doctor] options must be packing()'s, got {sorted(options)}") from None
    call = model if loss is None else loss
    device = named[0][1].device

    def gradients(batch: tuple[Any, ...], context: Any = None) -> list[Tensor]:
        with torch.inference_mode(False), _untouched(model, device):
            with torch.enable_grad(), contextlib.nullcontext() if context is None else context:
                value = call(*batch)
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"[doctor] loss must be one number, got {got}")
            if not value.is_floating_point() or not value.requires_grad:
                got = "one without a gradient" if value.is_floating_point() else str(value.dtype)
                raise ValueError(f"[doctor] loss must be a real number that depends on the parameters, got {got}")
            made = torch.autograd.grad(value.float(), [p for _, p in named], allow_unused=True)
        return [_real(torch.zeros_like(p) if g is None else g.detach()) for g, (_, p) in zip(made, named)]

    exact = gradients(inputs)
    for (name, _), g in zip(named, exact):
        if not bool(torch.isfinite(g).all()):
            raise ValueError(f"[doctor] loss must have finite gradients, got others for {name!r}")
    if not any(bool(g.any()) for g in exact):
        raise ValueError("[doctor] loss must depend on the model's parameters, got gradients of zero for all of them")
    if packs.budget is not None:
        gradients(inputs, packs)  # from the second step on each field has bits of its own
    try:
        halves = [gradients(half) for half in _halves(inputs)]
    except (RuntimeError, ValueError, IndexError):  # a loss of the whole batch alone, as of all nodes of a graph
        halves = []
    means = [torch.zeros_like(g) for g in exact]
    squares, products = ([torch.zeros((), dtype=torch.float32, device=g.device) for g in exact] for _ in range(2))
    for _ in range(draws):
        for i, g in enumerate(gradients(inputs, packs)):
            off = g - exact[i]
            means[i] += off / draws
            squares[i] += off.square().sum() / draws
            products[i] += (g * exact[i]).sum() / g.norm().clamp_min(1e-30) / draws
    findings = []
    for i, (name, p) in enumerate(named):
        norm = float(exact[i].norm())
        scale = 1 / norm if norm else 0.0
        error = float(squares[i].sqrt())
        # The halves' difference is twice a half's distance to their mean.
        batch = float((halves[0][i] - halves[1][i]).norm()) / 2 * scale if halves else math.nan
        bias = float(means[i].norm()) * draws**0.5 / error if error else 0.0
        findings.append(Finding(name, p.numel(), norm, error * scale, bias, float(products[i]) * scale, batch))
    findings.sort(key=lambda f: -_ratio(f) if f.batch and not math.isnan(f.batch) else -f.error)
    return Diagnosis(draws, findings)
