"""Norms and activations inside torch.compile: a pass over the graph that Dynamo records, before gradients are.

A batch norm of the batch's own statistics, with the sum and the ReLU behind it, becomes one op (norm_ops.py), and so does a GELU or a SiLU
(activation_ops.py). The ops write the codes that their gradients and the next layer's weights read. Without this pass norm, ReLU and
convolution would each keep a code of their own, and normalised values and slopes would be written for the sake of the code alone.
graph_pass.py then has the next layer read these codes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import activation_ops
from ._ops import KnownByUuid, ops, package_id
from ._policy import Bits
from ._seeds import mixed, rank
from .graph_budget import Plan
from .graph_choice import Choice, activation_inputs, place_of
from .norm_ops import ACT, ADD, ALONE, method_of, specs

__all__ = ["LayerPass"]

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_SUMS = {operator.add, torch.add, "add"}
_SUMS_OVER = {operator.iadd, "add_"}  # which change their first argument
_SEEDS = 1 << 62
_GELUS, _SILUS = {F.gelu, torch._C._nn.gelu}, {F.silu, torch._C._nn.silu}
_LAYERS = {F.linear, torch._C._nn.linear, torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}  # whose weights read x
_VIEWS = {"view", "reshape", "flatten", "contiguous", torch.flatten, torch.reshape}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class LayerPass(KnownByUuid, CustomGraphPass):
    """bits, choice: as PackPass has them. min_bytes: what is smaller is left to that pass. plan: of a budget. It says whether norms are made one
    with what follows them, in 2 or 3 bits; of activations, which have fewer choices yet, the other pass makes two codes with bits of their own."""

    def __init__(self, bits: Bits, min_bytes: int, choice: Choice = Choice(), plan: Plan | None = None) -> None:
        self.bits, self.min_bytes, self.choice, self.plan = bits, min_bytes, choice, plan

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._decides() == other._decides()  # as PackPass

    def __hash__(self) -> int:
        return hash(self._decides())

    def _decides(self) -> tuple[Any, ...]:
        return self.bits, self.min_bytes, self.choice, None if self.plan is None else id(self.plan)

    def uuid(self) -> bytes:
        return package_id("layers", self.bits, self.min_bytes, self.choice, None if self.plan is None else self.plan.key())

    def __call__(self, graph: fx.Graph) -> None:
        if self.plan is not None:
            self.plan.now.place, self.plan.now.whole = place_of(graph, self.choice)
        self.mark(graph)
        made = [op for n in list(graph.nodes) if (op := self.norm(graph, n) or self.activation(graph, n)) is not None]
        _add_seeds(graph, made)
        if made:
            graph.lint()

    def mark(self, graph: fx.Graph) -> None:
        """What PackPass goes by and the graph's code does not say: which inputs are activations, which nodes are chosen. torch's cache of graphs takes
        its key from the module's attributes, so this becomes one."""
        if graph.owning_module is not None:
            made = set(activation_inputs(graph))
            inputs = "".join("01"[n in made] for n in graph.nodes if n.op == "placeholder")
            chosen = "".join(self.choice.key(n) for n in graph.nodes) if self.choice else ""
            graph.owning_module._satchel_mark = f"{inputs}/{chosen}"

    def is_small(self, val: Tensor) -> bool:
        return val.numel() * val.element_size() < max(1, self.min_bytes)

    def activation(self, graph: fx.Graph, n: fx.Node) -> fx.Node | None:
        """The op that stands for this GELU or SiLU."""
        kind = _kind(n) if self.plan is None else None
        x = n.args[0] if kind is not None and n.args else None
        if not isinstance(x, fx.Node) or not _wants_gradient(n) or self.is_small(val := _value(x)) or not self.choice.wants(n):
            return None
        found = activation_ops.specs(self.bits.flow, self.bits.local, val.numel(), val.dtype, val.is_cuda, _feeds_layer(n))
        if found is None:
            return None
        with graph.inserting_before(n):
            op = graph.call_function(ops.activation.default, (x, None, kind, *map(list, found)))
            z = graph.call_function(operator.getitem, (op, 0))
        _name(n, op, z)
        z.meta["example_value"] = n.meta["example_value"]
        n.replace_all_uses_with(z)
        graph.erase_node(n)
        return op

    def norm(self, graph: fx.Graph, n: fx.Node) -> fx.Node | None:
        """The op that stands for this norm and what follows it, where it is one that the op serves."""
        given = _arguments(n)
        local = self.bits.local if self.plan is None else self.plan.norm_bits
        if given is None or local not in (2, 3):  # codes that hold a ReLU's mask; with others PackPass codes norm and mask by themselves
            return None
        x, gamma, beta = (given[name] for name in ("input", "weight", "bias"))
        val = _value(x)
        if self.is_small(val) or not self.choice.wants(n):
            return None
        rows = val.numel() // val.shape[1]
        for form, place, end, skip in _followers(n):
            if form == ADD and given["running_mean"] is not None and len(given["running_mean"].users) > 1:
                continue  # the norm is called again: its statistics must move in order
            if not self.choice.wants(end) or not self.choice.wants(place):
                continue
            found = specs(method_of(local), form, rows, val.shape[1], val.dtype, val.is_cuda, val.dim() > 2)
            if found is not None:
                break
        else:
            return None
        with graph.inserting_before(place):
            op = graph.call_function(ops.norm.default, (x, skip, gamma, beta, None, given["eps"], form, *map(list, found)))
            z = _as_was(graph, graph.call_function(operator.getitem, (op, 0)), _value(end))
            if given["running_mean"] is not None:
                _update(graph, op, given, rows)
        _name(n, op, z)
        z.meta["example_value"] = end.meta["example_value"]
        end.replace_all_uses_with(z)
        while end is not n:  # the sum and the ReLU have no other readers
            before = n if n in end.all_input_nodes else next(a for a in end.all_input_nodes if n in a.all_input_nodes)
            graph.erase_node(end)
            end = before
        graph.erase_node(n)
        return op


def _name(n: fx.Node, *nodes: fx.Node) -> None:
    """Nodes that stand for n belong to its module."""
    for made in nodes:
        made.meta.update({key: n.meta[key] for key in ("nn_module_stack", "stack_trace") if key in n.meta})


def _as_was(graph: fx.Graph, z: fx.Node, val: Tensor) -> fx.Node:
    """z in the order of memory that the model's own result had: later views rely on it."""
    last = val.movedim(1, -1).is_contiguous()
    return z if last else graph.call_method("contiguous", (z,))


def _value(n: Any) -> Tensor:
    return n.meta["example_value"]


def _wants_gradient(n: fx.Node) -> bool:
    """Is n's result one that the ops make: of a fixed shape, and on the way of a gradient?"""
    val = n.meta.get("example_value")
    if not isinstance(val, Tensor) or val.dtype not in _FLOATS or val.device.type not in ("cpu", "cuda"):
        return False
    return val.requires_grad and all(isinstance(size, int) for size in (*val.shape, *val.stride()))


def _kind(n: fx.Node) -> int | None:
    """Of a GELU or SiLU that changes nothing in place."""
    if n.op != "call_function" or len(n.args) != 1:
        return None
    if n.target in _GELUS and set(n.kwargs) <= {"approximate"}:
        return {"none": activation_ops.GELU, "tanh": activation_ops.GELU_TANH}.get(str(n.kwargs.get("approximate", "none")))
    return activation_ops.SILU if n.target in _SILUS and not n.kwargs.get("inplace", False) else None


def _feeds_layer(n: fx.Node) -> bool:
    """Do a layer's weights read n, itself or a view of it?"""
    return any(user.target in _LAYERS and user.args[0] is n or user.target in _VIEWS and _feeds_layer(user) for user in n.users)


def _is_float32(n: Any, count: int) -> bool:
    val = n.meta.get("example_value") if isinstance(n, fx.Node) else None
    return isinstance(val, Tensor) and val.dtype is torch.float32 and val.shape == (count,)


def _arguments(n: fx.Node) -> dict[str, Any] | None:
    """Of a batch norm by the batch's statistics, with γ and β, whose gradients are wanted; None for all else."""
    if n.op != "call_function" or n.target is not F.batch_norm:
        return None
    given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_NAMES, n.args)), **n.kwargs}
    x = given["input"]
    if not isinstance(x, fx.Node) or not _wants_gradient(n) or given["training"] is not True or (inner := _value(x)).dim() < 2:
        return None
    channels = inner.shape[1]
    if not all(_is_float32(given[name], channels) for name in ("weight", "bias")):
        return None
    statistics = [given["running_mean"], given["running_var"]]
    known = all(s is None for s in statistics) or all(_is_float32(s, channels) for s in statistics)
    plain = isinstance(given["momentum"], float) and isinstance(given["eps"], float)
    return given if known and plain and inner.numel() > channels else None


def _followers(n: fx.Node) -> list[tuple[int, fx.Node, fx.Node, fx.Node | None]]:
    """(form, the node in whose place the op reads its arguments, the last node, skip), best first."""
    alone = (ALONE, n, n, None)
    reader = _only_reader(n)
    if reader is None:
        return [alone]
    if reader.target in _RELUS:
        return [(ACT, n, reader, None), alone]
    skip = _skip(reader, n)
    relu = None if skip is None else _only_reader(reader)
    return [(ADD, reader, relu, skip), alone] if relu is not None and relu.target in _RELUS else [alone]


def _only_reader(n: fx.Node) -> fx.Node | None:
    readers = list(n.users)
    return readers[0] if len(readers) == 1 and readers[0].op in ("call_function", "call_method") else None


def _skip(n: fx.Node, norm: fx.Node) -> fx.Node | None:
    """What n adds to the norm, where it is a plain sum of two values of one shape and type."""
    if (n.target not in _SUMS and n.target not in _SUMS_OVER) or n.kwargs or len(n.args) != 2:
        return None
    a, b = n.args
    if n.target in _SUMS_OVER and a is not norm:
        return None
    skip = b if a is norm else a
    if not isinstance(skip, fx.Node) or skip is norm:
        return None
    val, other = _value(norm), skip.meta.get("example_value")
    if not isinstance(other, Tensor) or other.layout is not torch.strided:
        return None
    return skip if (other.shape, other.dtype, other.device) == (val.shape, val.dtype, val.device) else None


def _update(graph: fx.Graph, op: fx.Node, given: dict[str, Any], rows: int) -> None:
    """Running statistics, by the unbiased variance, as torch has it."""
    for name, place, factor in (("running_mean", 3, 1.0), ("running_var", 5, rows / (rows - 1))):
        now = graph.call_method("detach", (graph.call_function(operator.getitem, (op, place)),))
        now = now if factor == 1.0 else graph.call_function(operator.mul, (now, factor))
        graph.call_method("lerp_", (given[name], now, given["momentum"]))


def _add_seeds(graph: fx.Graph, made: list[fx.Node]) -> None:
    """Two seeds an op: rows of one tensor that is drawn in every step."""
    by_device: dict[torch.device, list[fx.Node]] = {}
    for op in made:
        by_device.setdefault(_value(op.args[0]).device, []).append(op)
    for device, its in by_device.items():
        first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        with graph.inserting_before(first):
            drawn = graph.call_function(torch.randint, (-_SEEDS, _SEEDS, (len(its), 2)), {"dtype": torch.int64, "device": device})
            if rank() > 0:  # ranks that are seeded alike draw apart
                drawn = graph.call_function(operator.add, (drawn, mixed(rank())))
        for i, op in enumerate(its):
            with graph.inserting_before(op):
                seeds = graph.call_function(operator.getitem, (drawn, i))
            op.update_arg(4 if op.target is ops.norm.default else 1, seeds)
