"""How much each coded field adds to the variance of the parameters' gradients, seen in one ordinary backward.

A code of range r in B steps has the variance F·r²/B² a value, and the headers hold the ranges. Times ‖g‖² of the same rows, seen by a hook
on the node, this is the noise that the field puts into a gradient (_noise.py). Where that gradient is a parameter's the noise ends there.
Where it flows on, each node passes it as it passes the gradient: by the ratio of the squared norms behind and before it. Weights pass
noise, which has no direction, by the mean of their squares.

Everything is a number on the device until read() fetches all of them at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
from torch import Tensor

from ._noise import NOBODY, PARAMETER, Coded, Rule, outputs_of, rule_of, square, taps_of
from ._policy import Row

__all__ = ["SPREAD", "Key", "Watch"]

# Variance of a value's code in (range / (2^bits − 1))²: for normal values in blocks of 256, with the levels of kept.code_numbers().
SPREAD = {1: 0.215, 2: 0.145, 3: 0.134, 4: 0.131, 5: 0.166, 6: 0.166, 7: 0.166, 8: 0.166}

Key = tuple[str, str, str, int]  # module, node, field, and the how manyth of these in its step


class Watch:
    """One step's graph, and what its backward shows of it."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[int]] = {}  # node → the nodes that its inputs come from
        self.numbers: dict[tuple, Tensor] = {}
        self.readers: dict[int, list[Callable[..., None]]] = {}
        self.fields: dict[Key, int] = {}  # → node
        self.squares: dict[int, dict[str, Tensor]] = {}
        self.seen = False

    def node(self, node: Any, ends_in_parameter: Callable[[Any], bool]) -> None:
        number = node._sequence_nr()
        self.inputs[number] = [
            NOBODY if below is None else PARAMETER if ends_in_parameter(below) else below._sequence_nr() for below, _ in node.next_functions
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
            passed.append(None if g is None or below == NOBODY or g.layout is not torch.strided else square(g))
        total = sum((square(g) for g in given[1:]), square(given[0]))
        self.numbers["out", number] = total
        for j, one in enumerate(passed):
            if one is not None:
                # A vector's gradient (a bias's) is a sum of rows: their noise adds up as it is.
                alone = self.inputs[number][j] == PARAMETER and grads_in[j].dim() <= 1
                self.numbers["in", number, j] = total if alone else one
        for reader in self.readers.get(number, ()):
            reader(given[0], passed, grads_in)

    def _when_seen(self, number: int, reader: Callable[..., None]) -> None:
        self.readers.setdefault(number, []).append(reader)

    def operand(self, node: Any, row: Row, t: Tensor) -> None:
        """How noise of the output's gradient goes on by an operand, coded or not.

        x of a weight's gradient xᵀ·g: noise of g's rows comes out as Σ ‖x_n‖²·‖g_n‖², where the gradient itself adds up or cancels.
        A weight w: noise goes through it by ‖w‖² / outputs.
        """
        number, edge = node._sequence_nr(), row.edge
        if not t.is_floating_point() or t.numel() == 0:
            return
        if row.noise == "attention":
            self.squares.setdefault(number, {})[row.field] = square(t) / t.numel()
        elif row.noise == "columns":
            gain = square(t) / outputs_of(node, t)

            def through(g: Tensor, passed: list, grads: tuple) -> None:
                if passed[edge] is not None and self.inputs[number][edge] != PARAMETER:
                    self.numbers["in", number, edge] = gain * self.numbers["out", number]

            self._when_seen(number, through)
        elif row.noise in ("rows", "taps") and self.inputs[number][edge] == PARAMETER:
            taps = taps_of(node, t) if row.noise == "taps" else None
            energy = square(t, -1).flatten() if taps is None else square(t, *range(1, t.dim()))

            def into(g: Tensor, passed: list, grads: tuple) -> None:
                noise = torch.dot(energy, square(g.reshape(energy.numel(), -1), 1))
                self.numbers["in", number, edge] = noise if taps is None else noise * taps(g)

            self._when_seen(number, into)

    def field(self, key: Key, node: Any, row: Row, form: Any, t: Tensor) -> None:
        """A coded field."""
        if t.numel() == 0:
            return
        number = node._sequence_nr()
        self.fields[key] = number
        rule: Rule = rule_of(Coded(node, row, form, t, self.inputs[number], self.squares.setdefault(number, {})))

        def seen(g: Tensor, passed: list, grads: tuple) -> None:
            for edge, noise in rule(g, passed, grads):
                self.numbers["noise", key, edge] = noise

        self._when_seen(number, seen)

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
        for key, at in self.fields.items():
            noises = [(values.get(("noise", key, j)), below) for j, below in enumerate(self.inputs[at])]
            found[key] = sum(noise * reach.get(below, 1.0) for noise, below in noises if noise is not None and below != NOBODY)
        return found

    def _reach(self, values: dict[tuple, float]) -> dict[int, float]:
        """Of each node: what a unit of noise in the gradient that it gets becomes in the gradients of all parameters behind it."""
        reach = {PARAMETER: 1.0}
        for number in sorted(self.inputs):  # a node's inputs were made before it
            total = values.get(("out", number), 0.0)
            sums = 0.0
            for j, below in enumerate(self.inputs[number]):
                passed = values.get(("in", number, j))
                if passed is not None and total > 0:
                    sums += passed / total * reach.get(below, 1.0)
            reach[number] = sums
        return reach
