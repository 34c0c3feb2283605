"""The noise that one coded field puts into the gradients its node gives on: a rule for each `noise` of policy.json.

A rule is made in forward, from the code, and called in backward with the gradient. It gives pairs of an input's number and the noise in
that input's gradient, Σ of variances, for a code whose every value has the variance r² of its block's range r.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from . import kept as forms
from ._policy import Row

__all__ = ["PARAMETER", "NOBODY", "Rule", "outputs_of", "rule_of", "square", "taps_of"]

PARAMETER, NOBODY = -1, -2  # in place of the number of the node that an input comes from
# (gradient of the output, squared norms of the inputs' gradients, these gradients) → (input, noise)
Rule = Callable[[Tensor, "list[Tensor | None]", "tuple[Tensor | None, ...]"], Iterable["tuple[int, Tensor]"]]


def square(t: Tensor, *dims: int) -> Tensor:
    """‖t‖², over all or over some dimensions."""
    return torch.linalg.vector_norm(t, dim=dims or None, dtype=torch.float32).square()


@dataclasses.dataclass
class Coded:
    """What the rules read."""

    node: Any
    row: Row
    form: Any
    t: Tensor
    inputs: list[int]
    squares: dict[str, Tensor]  # of attention's operands, in the mean; complete in backward

    def __post_init__(self) -> None:
        self.values = self.t.numel()
        self.ranges = self.form.squared_ranges(self.t)
        self.mean = self.ranges.mean()  # a last, shorter block counts as a whole one

    def by_stretch(self, count: int) -> Tensor:
        """Σ r² over the values of each of `count` equal stretches of memory."""
        sums = torch.cat([self.ranges.new_zeros(1, dtype=torch.float64), self.ranges.double().cumsum(0) * forms.BLOCK])
        ends = torch.arange(count + 1, device=self.ranges.device) * (self.values // count)
        block = (ends // forms.BLOCK).clamp_(max=len(self.ranges) - 1)
        return (sums[block] + (ends - block * forms.BLOCK) * self.ranges.double()[block]).diff().float()


def taps_of(node: Any, t: Tensor) -> Callable[[Tensor], float]:
    """Of a convolution's input: how often each of its values meets a value of the output's gradient, on the average over both."""
    weight = node._raw_saved_weight.data
    taps = 1 if weight is None else math.prod(weight.shape[2:])
    groups, transposed, pixels = int(node._saved_groups), bool(node._saved_transposed), math.prod(t.shape[2:])
    return lambda g: taps / groups / (math.prod(g.shape[2:]) if transposed else pixels)


def outputs_of(node: Any, weight: Tensor) -> int:
    """Columns of a matrix, or output channels of a convolution's weight."""
    if not hasattr(node, "_saved_transposed"):
        return weight.shape[-1]
    return weight.shape[1] * int(node._saved_groups) if node._saved_transposed else weight.shape[0]


def _rows(c: Coded) -> Rule:
    """xᵀ·g: Σ over rows of the row's noise · ‖g's row‖²."""
    rows = c.values // c.t.shape[-1]
    noise = c.by_stretch(rows) if c.t.is_contiguous() else (c.mean * c.t.shape[-1]).expand(rows)
    return lambda g, passed, grads: [(c.row.edge, torch.dot(noise, square(g.reshape(rows, -1), 1)))]


def _taps(c: Coded) -> Rule:
    """The same for each sample of a convolution."""
    rows, times = c.t.shape[0], taps_of(c.node, c.t)
    whole = c.t.stride(0) * rows == c.values and forms.dense(c.t)  # samples follow each other in memory
    noise = c.by_stretch(rows) if whole else (c.mean * (c.values // rows)).expand(rows)
    return lambda g, passed, grads: [(c.row.edge, torch.dot(noise, square(g.reshape(rows, -1), 1)) * times(g))]


def _columns(c: Coded) -> Rule:
    """g·wᵀ of a weight that is computed."""
    each = c.mean * (c.values // outputs_of(c.node, c.t))
    return lambda g, passed, grads: [(c.row.edge, each * square(g))]


def _each(c: Coded) -> Rule:
    """g·x, value by value: Σ over blocks of r²·‖g's block‖², or the means' product where g lies otherwise in memory."""
    shape, strides, edge = c.t.shape, c.t.stride(), max(c.row.edge, 0)
    factor = 4.0 if c.row.node == "PowBackward0" else 1.0
    whole = c.values % forms.BLOCK == 0 and forms.dense(c.t)

    def rule(g: Tensor, passed: list, grads: tuple) -> list[tuple[int, Tensor]]:
        if whole and g.shape == shape and g.stride() == strides:
            return [(edge, factor * torch.dot(c.ranges, square(g.as_strided((c.values // forms.BLOCK, forms.BLOCK), (forms.BLOCK, 1)), 1)))]
        return [(edge, factor * c.mean * square(g))]

    return rule


def _norm(c: Coded) -> Rule:
    """dx reads mean(g·x̂)·x̂, where both factors have noise; the weight's gradient reads g·x̂."""
    statistic, mean = getattr(c.node, "_saved_" + c.row.scale).detach(), c.mean
    count = statistic.numel()
    if count and isinstance(c.form, forms.Code):  # a code of x itself: its noise in units of σ
        mean = torch.dot(c.by_stretch(count), statistic.float().flatten().square()) / c.values
    weight, per = getattr(c.node, "_saved_weight", None), max(1, c.values // max(1, count))
    channels = (weight.detach().float() * statistic).square() if c.row.role == "local" and count and weight is not None else None
    others = [d for d in range(c.t.dim()) if d != 1]

    def rule(g: Tensor, passed: list, grads: tuple) -> list[tuple[int, Tensor]]:
        noise = []
        if passed[0] is not None and channels is not None and grads[1] is not None:  # by channel the weight's gradient is N·mean(g·x̂)
            noise.append((0, mean * torch.dot(channels, grads[1].float().square() + square(g, *others)) / per))
        elif passed[0] is not None and count:
            noise.append((0, 2 * mean * passed[0] / per))
        if PARAMETER in c.inputs:
            noise.append((c.inputs.index(PARAMETER), mean * square(g)))
        return noise

    return rule


def _sum(c: Coded) -> Rule:
    """log-softmax: dx = g − p·Σg."""
    dim = int(getattr(c.node, "_saved_dim", -1))
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    each = c.mean * c.t.shape[dim]
    return lambda g, passed, grads: [(0, each * square(g.sum(dim)))]


def _loss(c: Coded) -> Rule:
    """A loss's gradient, value by value, of its values themselves, their mean or their sum."""
    factor = 4.0 if c.row.node == "MseLossBackward0" else 1.0
    each = c.mean * factor * (1.0, 1.0 / c.values, float(c.values))[int(c.node._saved_reduction)]
    return lambda g, passed, grads: [(0, each * square(g))]


def _attention(c: Coded) -> Rule:
    """Values and output: dq = dS·k and dk = dSᵀ·q, with dS = P·(g·vᵀ − Σ g·out).

    How small Σ P² is shows in how much smaller the outputs are than the values.
    """
    if c.row.field not in ("value", "output"):
        return _share(c)
    scale = getattr(c.node, "_saved_scale", None)
    factor = 1.0 if scale is None else float(scale) ** 2 * c.t.shape[-1]

    def rule(g: Tensor, passed: list, grads: tuple) -> list[tuple[int, Tensor]]:
        if not all(name in c.squares for name in ("query", "key", "value", "output")):
            return []
        noise = factor * c.mean * square(g) * c.squares["output"] / c.squares["value"].clamp_min(1e-30)
        return [(0, noise * c.squares["key"]), (1, noise * c.squares["query"])]

    return rule


def _share(c: Coded) -> Rule:
    """Gradients that grow with the field: its share of noise is theirs."""
    share = c.mean * c.values / square(c.t).clamp_min(1e-30)
    edges = [c.row.edge] if c.row.edge >= 0 else [j for j, below in enumerate(c.inputs) if below != NOBODY]
    return lambda g, passed, grads: [(j, share * passed[j]) for j in edges if j < len(passed) and passed[j] is not None]


_RULES = {
    "rows": _rows, "taps": _taps, "columns": _columns, "each": _each, "norm": _norm, "sum": _sum, "loss": _loss, "attention": _attention
}  # fmt: skip


def rule_of(coded: Coded) -> Rule:
    """The field's rule. It holds sums of the code's ranges, and neither the tensor nor the node."""
    rule = _RULES.get(coded.row.noise, _share)(coded)
    coded.t = coded.form = coded.node = None  # type: ignore[assignment]
    return rule
