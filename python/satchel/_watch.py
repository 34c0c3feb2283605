"""How much each coded field adds to the variance of the parameters' gradients, seen in one ordinary backward.

A code of range r in B steps has the variance F·r²/B² a value, and the headers hold the ranges. Times ‖g‖² of the same rows, seen by a hook on
the node, this is the noise that the field puts into a gradient; summed over rows it is the field's own. Where that gradient is a parameter's
the noise ends there. Where it flows on, each node passes it as it passes the gradient: by the ratio of the squared norms behind and before it.
Weights pass noise, which has no direction, by the mean of their squares.

Everything is a number on the device until read() fetches all of them at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
from torch import Tensor

from . import kept as forms
from ._policy import Row

__all__ = ["SPREAD", "Watch"]

# Variance of a value's code in (range / (2^bits − 1))²: for normal values in blocks of 256, with the levels of kept.code_numbers().
SPREAD = {1: 0.215, 2: 0.145, 3: 0.134, 4: 0.131, 5: 0.166, 6: 0.166, 7: 0.166, 8: 0.166}
_PARAMETER = -1  # in place of a node's number
_NOBODY = -2

Key = tuple[str, str, str, int]


def _square(t: Tensor, *dims: int) -> Tensor:
    return torch.linalg.vector_norm(t, dim=dims or None, dtype=torch.float32).square()


def _shares(ranges: Tensor, values: int, rows: int) -> Tensor:
    """Σ r² over the values of each of `rows` equal stretches of memory, from r² of its blocks."""
    sums = torch.cat([ranges.new_zeros(1, dtype=torch.float64), ranges.double().cumsum(0) * forms.BLOCK])
    ends = torch.arange(rows + 1, device=ranges.device) * (values // rows)
    block = (ends // forms.BLOCK).clamp_(max=len(ranges) - 1)
    return (sums[block] + (ends - block * forms.BLOCK) * ranges.double()[block]).diff().float()


def _in_row_order(t: Tensor) -> bool:
    """Do the first dimension's rows follow each other in memory?"""
    return t.dim() > 0 and t.stride(0) * t.shape[0] == t.numel() and all(s <= t.stride(0) for s in t.stride())


class Watch:
    """One step's graph, and what its backward shows of it."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[int]] = {}  # node → the nodes that its inputs come from
        self.numbers: dict[tuple, Tensor] = {}
        self.readers: dict[int, list[Callable[..., None]]] = {}
        self.fields: dict[Key, int] = {}  # → node
        self.squares: dict[tuple[int, str], Tensor] = {}  # of attention's operands, in the mean
        self.seen = False

    def node(self, node: Any, ends_in_parameter: Callable[[Any], bool]) -> None:
        number = node._sequence_nr()
        self.inputs[number] = [
            _NOBODY if below is None else _PARAMETER if ends_in_parameter(below) else below._sequence_nr() for below, _ in node.next_functions
        ]
        node.register_hook(functools.partial(self._backward, number))

    @torch.no_grad()
    def _backward(self, number: int, grads_in: tuple, grads_out: tuple) -> None:
        self.seen = True
        given = [g for g in grads_out if g is not None and g.is_floating_point() and g.layout is torch.strided]
        if not given:
            return
        passed: list[Tensor | None] = []
        for below, g in zip(self.inputs[number], grads_in):
            passed.append(None if g is None or below == _NOBODY or g.layout is not torch.strided else _square(g))
        total = sum((_square(g) for g in given[1:]), _square(given[0]))
        self.numbers["out", number] = total
        for j, square in enumerate(passed):
            if square is not None:
                # A vector's gradient (a bias's) is a sum of rows: their noise adds up as it is.
                alone = self.inputs[number][j] == _PARAMETER and grads_in[j].dim() <= 1
                self.numbers.setdefault(("in", number, j), total if alone else square)
        for reader in self.readers.get(number, ()):
            reader(given[0], passed, grads_in)

    def _when_seen(self, node: Any, reader: Callable[..., None]) -> None:
        self.readers.setdefault(node._sequence_nr(), []).append(reader)

    def operand(self, node: Any, row: Row, t: Tensor) -> None:
        """x of a weight's gradient xᵀ·g, coded or not: noise of g's rows g_n comes out as Σ ‖x_n‖²·‖g_n‖², where the gradient itself adds up.
        Of a weight w: noise goes through it by ‖w‖² / outputs."""
        number, edge = node._sequence_nr(), row.edge
        if not t.is_floating_point():
            return None
        if row.noise == "attention":
            self.squares[number, row.field] = _square(t) / max(1, t.numel())
            return None
        if row.noise == "columns":
            gain = _square(t) / _outputs(node, t)

            def through(g: Tensor, passed: list, grads: tuple) -> None:
                if ("in", number, edge) in self.numbers:
                    self.numbers["in", number, edge] = gain * self.numbers["out", number]

            return self._when_seen(node, through)
        if row.noise not in ("rows", "taps") or self.inputs[number][edge] != _PARAMETER:
            return None
        energy = _square(t, *range(1, t.dim())) if row.noise == "taps" else _square(t, -1).flatten()
        scale = _taps(node, t) if row.noise == "taps" else None

        def seen(g: Tensor, passed: list, grads: tuple) -> None:
            rows = _square(g.reshape(energy.numel(), -1), 1)
            self.numbers["in", number, edge] = torch.dot(energy.flatten(), rows) * (1.0 if scale is None else scale(g))

        return self._when_seen(node, seen)

    def field(self, key: Key, node: Any, row: Row, form: Any, t: Tensor) -> None:
        """A coded field. Its noise is measured where every block's variance is the square of its range."""
        number = node._sequence_nr()
        if t.numel() == 0:
            return
        ranges, values = form.squared_ranges(t), t.numel()
        mean = ranges.mean()  # a last, shorter block counts as a whole one
        self.fields[key] = number
        kind = row.noise
        edges = [row.edge] if row.edge >= 0 else [j for j, below in enumerate(self.inputs[number]) if below != _NOBODY]

        def note(noise: Tensor, edge: int) -> None:
            self.numbers["noise", key, edge] = noise

        if kind in ("rows", "taps"):
            rows = t.shape[0] if kind == "taps" else values // t.shape[-1]
            by_row = _shares(ranges, values, rows) if _in_row_order(t) and (kind == "taps" or t.is_contiguous()) else (mean * (values // rows)).expand(rows)
            scale = _taps(node, t) if kind == "taps" else None

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                noise = torch.dot(by_row, _square(g.reshape(rows, -1), 1))
                note(noise if scale is None else noise * scale(g), row.edge)

        elif kind == "columns":
            each = mean * (values // t.shape[0] if row.node.startswith("Conv") else t.shape[-2])

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                note(each * _square(g), row.edge)

        elif kind == "each":
            shape, strides, factor = t.shape, t.stride(), 4.0 if row.node == "PowBackward0" else 1.0

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                if g.shape == shape and g.stride() == strides and values % forms.BLOCK == 0 and forms.dense(g):
                    noise = torch.dot(ranges, _square(g.as_strided((values // forms.BLOCK, forms.BLOCK), (forms.BLOCK, 1)), 1))
                else:
                    noise = mean * _square(g)
                for edge in edges[:1]:
                    note(noise * factor, edge)

        elif kind == "norm":
            statistic = getattr(node, "_saved_" + row.scale).detach()
            if isinstance(form, forms.Code) and statistic.numel():  # a code of x itself: its noise in units of σ
                mean = torch.dot(_shares(ranges, values, statistic.numel()), statistic.float().flatten().square()) / values
            per = max(1, values // max(1, statistic.numel()))
            weight = getattr(node, "_saved_weight", None)
            by_channel = None
            if row.role == "local" and statistic.numel() and weight is not None:
                by_channel = (weight.detach().float() * statistic).square(), [d for d in range(t.dim()) if d != 1]

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                if passed[0] is not None and by_channel is not None and grads[1] is not None:
                    both = grads[1].float().square() + _square(g, *by_channel[1])  # dx reads mean(g·x̂)·x̂, both factors with noise
                    note(mean * torch.dot(by_channel[0], both) / per, 0)
                elif passed[0] is not None and statistic.numel():
                    note(2 * mean * passed[0] / per, 0)  # the same where g is not all along x̂
                if _PARAMETER in self.inputs[number]:
                    note(mean * _square(g), self.inputs[number].index(_PARAMETER))

        elif kind == "sum":  # log-softmax: dx = g − p·Σg
            dim = int(getattr(node, "_saved_dim", -1))
            dim = dim - (1 << 64) if dim >= 1 << 63 else dim
            each = mean * t.shape[dim]

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                note(each * _square(g.sum(dim)), 0)

        elif kind == "loss":
            mode, factor = int(node._saved_reduction), 4.0 if row.node == "MseLossBackward0" else 1.0  # none, mean, sum
            each = mean * factor * (1.0, 1.0 / values, float(values))[mode]

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                note(each * _square(g), 0)

        elif kind == "attention" and row.field in ("value", "output"):
            scale = getattr(node, "_saved_scale", None)
            scale = 1.0 if scale is None else float(scale) ** 2 * t.shape[-1]

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                # Rows of P sum up to 1; Σ P² shows in how much smaller the outputs are than the values. dq = dS·k, dk = dSᵀ·q.
                found = [self.squares.get((number, name)) for name in ("query", "key", "value", "output")]
                if all(one is not None for one in found):
                    query, key_, value, output = found
                    noise = mean * _square(g) * (scale * output / value.clamp_min(1e-30))  # type: ignore[union-attr]
                    note(noise * key_, 0)
                    note(noise * query, 1)

        else:  # gradients that grow with the field: its share of noise is theirs
            share = mean * values / _square(t).clamp_min(1e-30)

            def seen(g: Tensor, passed: list, grads: tuple) -> None:
                for edge in edges:
                    if edge < len(passed) and passed[edge] is not None:
                        note(share * passed[edge], edge)

        self._when_seen(node, seen)

    def read(self) -> dict[Key, float] | None:
        """Sensitivities; None where no gradient was seen or one is not finite. The one moment that waits for the device."""
        if not self.numbers:
            return None
        by_device: dict[torch.device, list[tuple]] = {}
        for name, number in self.numbers.items():
            by_device.setdefault(number.device, []).append(name)
        values: dict[tuple, float] = {}
        for names in by_device.values():
            values.update(zip(names, torch.stack([self.numbers[n].reshape(()) for n in names]).tolist()))
        if not all(math.isfinite(v) for v in values.values()):
            return None
        reach = self._reach(values)
        found: dict[Key, float] = {}
        for key, number in self.fields.items():
            noises = [(values.get(("noise", key, j)), below) for j, below in enumerate(self.inputs[number])]
            found[key] = sum(noise * reach.get(below, 1.0) for noise, below in noises if noise is not None and below != _NOBODY)
        return found

    def _reach(self, values: dict[tuple, float]) -> dict[int, float]:
        """Of each node: what a unit of noise in the gradient that it gets becomes in the gradients of all parameters behind it."""
        reach = {_PARAMETER: 1.0}
        for number in sorted(self.inputs):  # a node's inputs were made before it
            total = values.get(("out", number), 0.0)
            sums = 0.0
            for j, below in enumerate(self.inputs[number]):
                passed = values.get(("in", number, j))
                if passed is not None and total > 0:
                    sums += passed / total * reach.get(below, 1.0)
            reach[number] = sums
        return reach


def _outputs(node: Any, weight: Tensor) -> int:
    """Values of the output gradient that share a weight's columns."""
    if not hasattr(node, "_saved_transposed"):
        return weight.shape[-1]
    return weight.shape[1] * int(node._saved_groups) if node._saved_transposed else weight.shape[0]


def _taps(node: Any, t: Tensor) -> Callable[[Tensor], float]:
    """Σ over a convolution's taps: each input value meets this share of the output gradient's squares."""
    weight = node._raw_saved_weight.data
    taps = 1 if weight is None else math.prod(weight.shape[2:])
    groups, transposed, inputs = int(node._saved_groups), bool(node._saved_transposed), math.prod(t.shape[2:])
    return lambda g: taps / groups / (math.prod(g.shape[2:]) if transposed else inputs)
