"""Nodes of a joint graph: what they are made of, what their values look like, and new ones."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["AGAIN", "CAST", "SAVE", "VIEWS", "Builder", "arg", "bytes_of", "has_sizes", "hint", "is_quick", "memory_order",
           "short_name", "through", "values_of", "whole_of"]  # fmt: skip

aten, prims = torch.ops.aten, torch.ops.prims
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
CAST = prims.convert_element_type.default

VIEWS = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten._unsafe_view.default, CAST,
}  # fmt: skip
_FREE = VIEWS | {
    aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor, aten.gt.Scalar,
    aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor, aten.where.self, aten.logical_and.default, aten.logical_not.default, aten.logical_or.default,
    aten.bitwise_and.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.full.default,
    aten.scalar_tensor.default, aten.arange.start_step, aten.scatter.value, prims.iota.default,
}  # fmt: skip


class Builder:
    """Writes nodes into a graph, each with the value that it would have in tracing."""

    mode: Any  # of the fake tensors

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def node(self, target: Any, args: tuple, kwargs: dict | None = None, policy: CheckpointPolicy | None = None) -> fx.Node:
        n = self.graph.call_function(target, args, kwargs or {})
        if policy is not None:
            n.meta["recompute"] = policy
        vals, options = fx.node.map_arg((args, kwargs or {}), lambda a: a.meta["val"])
        with self.mode:
            n.meta["val"] = target(*vals, **options)
        return n

    def line(self, policy: CheckpointPolicy | None, x: fx.Node, *steps: tuple) -> fx.Node:
        for target, *rest in steps:
            x = self.node(target, (x, *rest), None, policy)
        return x

    def sizes(self, n: fx.Node) -> list[int | fx.Node]:
        """Numbers, or where a size is a symbol the node that reads it."""
        return [self.symbol(size, aten.sym_size.int, n, i) for i, size in enumerate(n.meta["val"].shape)]

    def symbol(self, size: Any, target: Any, n: fx.Node, i: int) -> int | fx.Node:
        if isinstance(size, int):
            return size
        read = self.graph.call_function(target, (n, i))
        read.meta["val"] = size
        return read

    def product(self, sizes: list[int | fx.Node]) -> int | fx.Node:
        result: int | fx.Node = math.prod(size for size in sizes if isinstance(size, int))
        for size in sizes:
            if isinstance(size, fx.Node):
                result = size if result == 1 else self.node(operator.mul, (result, size))
        return result


def short_name(n: fx.Node) -> str:
    """An op's name; an input's is "input"."""
    target = arg(n, 0).target if n.target is operator.getitem else n.target
    return "input" if n.op == "placeholder" else str(target).removeprefix("aten.").removeprefix("satchel_stable.").partition(".")[0]


def arg(n: fx.Node, k: int) -> fx.Node:
    """Argument k, where it is known to be a node."""
    value = n.args[k]
    assert isinstance(value, fx.Node)
    return value


def whole_of(n: fx.Node) -> fx.Node:
    """What n shows all values of, in another shape or order, or several times."""
    while n.op == "call_function" and n.target in VIEWS and isinstance(n.args[0], fx.Node) and has_sizes(n) and has_sizes(n.args[0]):
        inner, outer = n.args[0].meta["val"], n.meta["val"]
        if inner.dtype != outer.dtype or not (n.target == aten.expand.default or statically_known_true(inner.numel() == outer.numel())):
            break
        n = n.args[0]
    return n


def is_quick(target: Any) -> bool:
    """A view, or what is computed value by value, the same each time."""
    tags = getattr(target, "tags", ())
    return target in _FREE or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def through(n: fx.Node, targets: set[Any]) -> fx.Node:
    """What n is made of by these ops alone, first argument by first argument."""
    while n.op == "call_function" and n.target in targets:
        n = arg(n, 0)
    return n


def memory_order(val: Tensor) -> list[int]:
    """The dimensions as they lie in memory, outermost first."""
    return sorted(range(val.dim()), key=lambda d: (-hint(val.stride(d)), -hint(val.size(d))))


def hint(size: Any) -> int:
    """A size, or what a symbol stands for in the shapes that the graph was made from."""
    return size if isinstance(size, int) else int(size.node.hint)


def values_of(val: Tensor) -> int:
    return math.prod(hint(size) for size in val.shape)


def bytes_of(val: Tensor) -> int:
    return values_of(val) * val.element_size()


def has_sizes(n: fx.Node) -> bool:
    """Are all sizes of its value numbers, or symbols that stand for one?"""
    val = n.meta["val"]
    return isinstance(val, Tensor) and all(isinstance(n, int) or n.node.hint is not None for n in (*val.shape, *val.stride()))
