"""How many bits a coded value has for each of its readers, and which of them may share one draw of its rounding."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ._policy import least_bits
from .graph_nodes import VIEWS, has_sizes, values_of
from .graph_readers import Edge, Readers

__all__ = ["Draws", "ways_out"]

aten = torch.ops.aten
_SUMS = VIEWS | {aten.sum.dim_IntList, aten.sum.default, aten.add.Tensor}  # a parameter's gradient on its way out
_REDUCTIONS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}
_MANY = 4096  # values a statistic: a norm's noise, of which it reads the mean, takes local bits from here on
_SOME = 256  # values: a sum of so many may meet the code again that it was made of; that errs by the code's variance / values


class Draws(Readers):
    """Of one graph: the policy of bits and draws."""

    def wanted(self, n: fx.Node, place: int, value: fx.Node) -> int:
        return 1 if value.meta["val"].dtype is torch.bool else self.options.bits.for_role(self.role(n, place, value))

    def fewest(self, n: fx.Node, place: int, value: fx.Node) -> int:
        """Bits that a budget leaves at least; without one they are as wanted."""
        bits = self.wanted(n, place, value)
        if self.options.plan is None or value.meta["val"].dtype is torch.bool:
            return bits
        return max(least_bits(name, bits) for name in (self.role(n, place, value), *(["normed"] if self.values_per_statistic(value) else [])))

    def role(self, n: fx.Node, place: int, value: fx.Node) -> str:
        row = self.linear[n.target]
        if "role" in row:
            return "flow" if place in row.get("flow", ()) else row["role"]
        if self.is_softmax(self.origin(value)):
            return "attention"
        return "local" if self.ends_outside(n) or self.values_per_statistic(value) >= _MANY else "flow"

    def is_softmax(self, n: fx.Node) -> bool:
        """Powers, or powers by something: probabilities. x by a power, as SiLU's, is none."""
        numerator = n.args[0] if n.target == aten.div.Tensor else n
        return isinstance(numerator, fx.Node) and self.origin(numerator).target == aten.exp.default

    def ends_outside(self, n: fx.Node) -> bool:
        """Is n's result summed up to outputs only, as a parameter's gradient is?"""
        seen, stack = set(), [n]
        while stack:
            for user in stack.pop().users:
                if user.op == "output" or user in seen:
                    continue
                if user.op != "call_function" or user.target not in _SUMS:
                    return False
                if user.target == aten.add.Tensor and len([a for a in user.args if isinstance(a, fx.Node)]) == 2:
                    return False
                seen.add(user)
                stack.append(user)
        return True

    def draws(self, edges: list[Edge]) -> list[int]:
        """The draw of each edge. Readers of one value of which one lies on the other's gradient path take different draws: the product of
        two reads of one draw has the code's variance in its mean. Exact masks and 8 bits need no second draw."""
        readers: dict[str, list[int]] = {}
        for i, (n, place, value) in enumerate(edges):
            if value.meta["val"].dtype is not torch.bool and self.fewest(n, place, value) < 8:
                readers.setdefault(self.name(self.part(value)), []).append(i)
        draws = [0] * len(edges)
        for group in readers.values():
            for position, i in enumerate(group):
                ways = {j: ways_out(*edges[j][:2]) for j in group[:position]}
                above = self.ancestors(edges[i][0], set().union(*ways.values()))
                taken = {draws[j] for j in group[:position] if ways[j] & above}
                # Two arguments of one node, as in x·x of two tangent-free values, cannot be: it would not be linear.
                draws[i] = next(d for d in range(len(group)) if d not in taken)
        return draws

    def ancestors(self, n: fx.Node, of: set[fx.Node]) -> set[fx.Node]:
        """Which of these lie above n on a gradient path? One on which many values are summed up, as in a norm's own gradient, is none: of the sum
        that n multiplies one value alone is of n's own draw."""
        found, least, stack = set(), dict[fx.Node, int](), [(n, 1)] if of else []
        while stack:
            below, summed = stack.pop()
            for i in below.all_input_nodes:
                if i not in self.tangent:
                    continue
                sums = below.target in _REDUCTIONS and has_sizes(i) and has_sizes(below)
                through = summed * (values_of(i.meta["val"]) // max(1, values_of(below.meta["val"])) if sums else 1)
                if through < _SOME and through < least.get(i, _SOME):
                    least[i] = through
                    stack.append((i, through))
                    if i in of:
                        found.add(i)
        return found


def ways_out(n: fx.Node, place: int) -> set[fx.Node]:
    """The nodes in whose values n's reading of this argument is seen. Of a convolution's gradients the weight's alone reads the input, and the input's
    alone the weight."""
    if n.target != aten.convolution_backward.default:
        return {n}
    return {user for user in n.users if user.target is operator.getitem and user.args[1] == {1: 1, 2: 0}.get(place)}
