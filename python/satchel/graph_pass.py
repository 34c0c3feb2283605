"""Packing inside torch.compile: a pass over the joint graph of forward and backward.

Every node of that graph that depends on a tangent is linear in the tangents. So a value that such a node reads from forward is a coefficient,
and where the node is a product (policy.json, "compiled") an unbiased code of the coefficient gives an unbiased gradient, whatever op made it:
GELU's slope is such a coefficient, computed in forward. The pass puts decode(encode(value)) on these edges. What encode gives out is marked as
saved and decode as recomputed; torch's partitioner then keeps the codes and nothing else.

Satchel's ops encode and decode, one kernel each. Where graph_layers.py has put an op for a norm or an activation, its own codes are read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import operator
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from . import _policy
from ._ops import ops, package_id
from ._policy import Bits, checked_size, least_bits
from ._seeds import mixed, rank
from .budget import chosen_bits, parse_size
from .graph_budget import Graph, Mark, Plan, Split
from .graph_choice import Choice, activation_inputs
from .graph_layers import LayerPass
from .kept import BLOCK, code_numbers
from .norm_ops import ACT, ADD

__all__ = ["PackPass", "compile"]

aten, prims = torch.ops.aten, torch.ops.prims
_SAVE, _AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CAST = prims.convert_element_type.default

_VIEWS = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten._unsafe_view.default, _CAST,
}  # fmt: skip
_SUMS = _VIEWS | {aten.sum.dim_IntList, aten.sum.default, aten.add.Tensor}  # a parameter's gradient on its way out
_FREE = _VIEWS | {
    aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor, aten.gt.Scalar,
    aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor, aten.where.self, aten.logical_and.default, aten.logical_not.default, aten.logical_or.default,
    aten.bitwise_and.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.full.default,
    aten.scalar_tensor.default, aten.arange.start_step, aten.scatter.value, prims.iota.default,
}  # fmt: skip
_AFFINE: dict[Any, tuple[int, ...]] = {  # in which arguments, where the others are exact
    aten.add.Tensor: (0, 1), aten.sub.Tensor: (0, 1), aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,), aten.neg.default: (0,),
    aten.add.Scalar: (0,), aten.sub.Scalar: (0,), aten.mul.Scalar: (0,), aten.div.Scalar: (0,),
}  # fmt: skip
_PURE = {*_VIEWS, *_AFFINE, aten.le.Scalar, aten.gt.Scalar, aten.relu.default, aten.rsqrt.default}
_REDUCTIONS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_FEW = 16  # a product's coefficient that is so many times smaller than it is a statistic: kept as it is
_FORWARD: dict[Any, Any] = {ops.norm.default: ops.norm_forward.default, ops.activation.default: ops.activation_forward.default}
# What of their results backward may read.
_CODES: dict[Any, tuple[int, ...]] = {ops.norm_forward.default: (1, 2, 4), ops.activation_forward.default: (1, 2)}
_OWN = {ops.norm_backward.default, ops.activation_backward.default}  # which read these codes
_OFFSETS = getattr(inductor_prims, "_low_memory_max_pool_offsets_to_indices", None)
_MANY = 4096  # values a statistic: a norm's noise, of which it reads the mean, takes local bits from here on
_SOME = 256  # values: a sum of so many may meet the code again that it was made of; that errs by the code's variance / values


_HELD = "in memory anyway"

_Decode = Callable[[fx.Node], fx.Node]  # the decoded value for a reader, in front of it


def _target(name: str) -> Any:
    """An op of aten, or of prims where that is said; None where this torch has none of that name."""
    space = prims if name.startswith("prims.") else aten
    packet, _, overload = name.removeprefix("prims.").partition(".")
    return getattr(getattr(space, packet, None), overload or "default", None)


@dataclasses.dataclass(frozen=True)
class Packing:
    """One line of a pass's report: what was coded."""

    value: str
    made_by: str
    read_by: str
    shape: tuple[Any, ...]
    dtype: str
    bits: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Exact:
    """One line of what a pass leaves as it is, and why."""

    value: str
    made_by: str
    read_by: str
    shape: tuple[Any, ...]
    dtype: str
    bytes: int
    why: str


class PackPass(CustomGraphPass):
    """Give it to torch.compile as options={"joint_custom_post_pass": PackPass()}, or call satchel.compile().

    bits, min_bytes: as packing()'s. include, exclude: patterns (fnmatch) of module paths ("blocks.0.*"), for which `model` is needed, or ops ("mm",
    "aten.mm"). `.report` lists what the newest graph packs, and `.exact` what its backward reads as it is, from min_bytes on, and why: torch keeps
    that, or what it is quickly made of. Both are empty where the graph came from torch's cache, which knows the pass by its uuid. Sizes may be
    symbols (dynamic shapes); bytes are then those of the shapes that the graph was made from. Values whose size the data decide (nonzero) stay exact.
    """

    def __init__(
        self,
        bits: str | int | tuple[int, ...] | Bits = "2/4/8",
        *,
        min_bytes: int = 16384,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        model: Any = None,
    ) -> None:
        self.bits, self.min_bytes = Bits.of(bits, "compile"), checked_size(min_bytes, "compile")
        self.choice = Choice.of(include, exclude, model, "compile")
        self.report: list[Packing] = []
        self.exact: list[Exact] = []
        self._codes: list[str] = []  # the nodes of the report's codes
        self.marked = False  # does LayerPass mark the graphs?
        self.plan: Plan | None = None  # of a budget

    def uuid(self) -> bytes | None:
        """None, which leaves torch's caches out, where paths are chosen by and nothing tells equal graphs of different modules apart."""
        planned = None if self.plan is None else self.plan.key()
        return package_id("pack", self.bits, self.min_bytes, self.choice, planned) if self.marked or not self.choice else None

    def __eq__(self, other: object) -> bool:
        """Equal passes make equal graphs, so that blocks of one class share one: torch asks."""
        return type(other) is type(self) and self._decides() == other._decides()

    def __hash__(self) -> int:
        return hash(self._decides())

    def _decides(self) -> tuple[Any, ...]:
        return self.bits, self.min_bytes, self.choice, self.marked, None if self.plan is None else id(self.plan)

    def __call__(self, graph: fx.Graph) -> None:
        rewrite = _Rewrite(self, graph)
        rewrite.run()
        self.report, self.exact = list(rewrite.report.values()), list(rewrite.exact.values())
        self._codes = list(rewrite.report)

    def bits_by_field(self) -> dict[str, int]:
        """Bits of each code under a budget or "gact", by module and by the ops that make and read the value."""
        return self.plan.bits_by_field() if self.plan is not None else {}

    def _tell(self, graph: Graph) -> None:
        """The report's lines have the bits that a budget gave."""
        for item in graph.items:
            for name, size in item.codes.items():
                if name in self._codes:
                    i = self._codes.index(name)
                    self.report[i] = dataclasses.replace(self.report[i], bits=item.bits, after=size)


class _Rewrite:
    """One graph on its way through the pass."""

    def __init__(self, options: PackPass, graph: fx.Graph) -> None:
        self.options, self.graph = options, graph
        table = _policy.compiled_rows()
        self.linear = {op: row for row in table["linear"] if (op := _target(row["op"])) is not None}
        self.shape_only = {op: row["where"] for row in table["shape"] if (op := _target(row["op"])) is not None}
        self.activations = set(activation_inputs(graph))
        self.tangent: set[fx.Node] = set()  # what depends on a tangent
        self.names: dict[fx.Node, str] = {}
        self.inputs: dict[fx.Node, bool] = {}
        self.stops: set[fx.Node] = set()  # sources that are casts
        self.codes: dict[tuple[str, int], _Decode] = {}
        self.least: dict[tuple[str, int], int] = {}  # bits that a budget leaves a code
        self.report: dict[str, Packing] = {}  # by the node that writes the code
        self.seeds: dict[torch.device, tuple[fx.Node, list[fx.Node]]] = {}  # the vector, and what was taken of it
        self.scales: dict[fx.Node, fx.Node] = {}  # 1/σ by the node that makes the mean
        self.places: dict[fx.Node, int] = {}  # of the nodes in the graph
        self.known: set[fx.Node] = set()  # results of norms and activations that are reported
        self.splits: set[fx.Node] = set()  # whose parts are coded in one
        self.exact: dict[fx.Node, Exact] = {}
        self.undone: list[fx.Node] = []  # x̂ by 1/σ, which backward reads for x, and views of it
        self.kept: dict[fx.Node, bool] = {}  # what is exact in memory anyway, as far as that is known

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        self.tangent = {n for n in nodes if n.op == "placeholder" and n.name.startswith("tangents")}
        if not self.tangent:
            return
        for n in nodes:
            if n.op == "call_function" and any(i in self.tangent for i in n.all_input_nodes):
                self.tangent.add(n)
        self.places = {n: i for i, n in enumerate(nodes)}
        for n in nodes:  # in order, so that none asks far back
            self.is_input(n), self.name(n)
        nodes = self.join_factors(nodes)
        nodes = self.read_normed(nodes)
        self.find_kept(nodes)
        self.keep_codes(nodes)
        self.find_scales(nodes)
        edges = [(n, place, value) for n in nodes for place, value in self.edges(n)]
        self.find_splits(edges)
        self.find_stops(edges)
        draws = self.draws(edges)
        most: dict[tuple[str, int], int] = {}  # one code a value and draw, with the most bits that a reader wants
        for (n, place, value), draw in zip(edges, draws):
            key = (self.name(self.source(value)[0]), draw)
            most[key] = max(most.get(key, 0), self.wanted(n, place, value))
            self.least[key] = max(self.least.get(key, 0), self.fewest(n, place, value))
        for (n, place, value), draw in zip(edges, draws):
            source, chain = self.source(value)
            bits = most[(self.name(source), draw)]
            if bits == 32:
                self.leave(n, value, "32 bits")
                continue
            x = self.made_with(source, bits, draw, n, place) or self.coded(source, bits, draw, n)
            with self.graph.inserting_before(n):
                for step, k in reversed(chain):
                    args = tuple(x if i == k else a for i, a in enumerate(step.args))
                    # Decoded values lie without gaps, so a view of the original may be none of them.
                    target = aten.reshape.default if step.target in (aten.view.default, aten._unsafe_view.default) else step.target
                    x = self.node(target, args, dict(step.kwargs), _AGAIN)
            n.update_arg(place, x)
        for n in nodes:
            for place in self.shape_only.get(n.target, ()) if n in self.tangent else ():
                self.forget(n, place)
            if n.target == _OFFSETS:
                self.narrow_offsets(n)
        for n in reversed(self.undone):  # where codes are read in their place
            if not n.users:
                self.graph.erase_node(n)
        self.number_seeds()
        self.make_again()
        self.graph.lint()

    def join_factors(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """(g·a)·b becomes g·(a·b) where a and b are forward's: one code and one noise, not two. SiLU's slope comes in two such factors."""
        for n in nodes:
            inner = next((i for i in n.all_input_nodes if i in self.tangent), None)
            if inner is None or len(inner.users) != 1 or any(m.target != aten.mul.Tensor or len(m.all_input_nodes) != 2 for m in (n, inner)):
                continue
            factors = [a for m in (inner, n) for a in m.all_input_nodes if a not in self.tangent]
            if len(factors) != 2 or any(len(list(self.edges(m))) != 1 for m in (n, inner)):
                continue
            a, b = factors
            if any(self.source(f)[0].meta["val"].dtype is torch.bool or f.meta["val"].shape != n.meta["val"].shape for f in factors):
                continue
            last = max(a, b, key=self.places.__getitem__)
            self.mode = n.meta["val"].fake_mode
            with self.graph.inserting_before(last.next):
                product = self.node(aten.mul.Tensor, (a, b))
            self.places[product] = self.places[last]
            n.args = (next(i for i in inner.all_input_nodes if i in self.tangent), product)
            self.graph.erase_node(inner)
        return list(self.graph.nodes)

    def read_normed(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Where backward reads the x of an RMS norm, it gets x̂·σ: one code of x̂ serves the norm and the layer behind it, and its noise is measured by
        each row's own σ."""
        normed = {self.name(found[0]): (n, found[1]) for n in nodes if n not in self.tangent and (found := self.rms(n)) is not None}
        for n in nodes if normed else ():
            for place, value in list(self.edges(n)):
                chain, x = [], value
                while self.name(x) not in normed and (k := self.below(x)) is not None:
                    chain.append((x, k))
                    x = _arg(x, k)
                if self.name(x) not in normed:
                    continue
                whole, scale = normed[self.name(x)]
                self.mode = whole.meta["val"].fake_mode
                with self.graph.inserting_before(n):
                    read = self.node(aten.div.Tensor, (whole, scale))
                    self.undone.append(read)
                    for step, k in reversed(chain):
                        read = self.node(step.target, tuple(read if i == k else a for i, a in enumerate(step.args)), dict(step.kwargs))
                        self.undone.append(read)
                n.update_arg(place, read)
        return list(self.graph.nodes)

    def rms(self, n: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(x, 1/σ) where n is x by the root of the mean of its squares."""
        if n.op != "call_function" or n.target != aten.mul.Tensor or len(n.all_input_nodes) != 2:
            return None
        for x, scale in (n.args, n.args[::-1]):
            assert isinstance(x, fx.Node) and isinstance(scale, fx.Node)
            made = _through(scale, _VIEWS)
            mean = _through(_arg(made, 0), {*_VIEWS, aten.add.Tensor, aten.add.Scalar}) if made.target == aten.rsqrt.default else made
            square = _through(_arg(mean, 0), _VIEWS) if mean.target == aten.mean.dim else mean
            if square.target not in (aten.pow.Tensor_Scalar, aten.mul.Tensor) or square.args[1] not in (2, square.args[0]):
                continue
            if mean.target == aten.mean.dim and self.name(_whole(_arg(square, 0))) == self.name(_whole(x)):
                return x, scale
        return None

    def make_again(self) -> None:
        """What backward reads and is quickly made of parameters, buffers and the batch, which are in memory anyway: casts, causal masks, positions.
        What is made of those that forward writes is kept: torch's partitioner would make it again of the new values."""
        nodes, lasting = list(self.graph.nodes), dict[fx.Node, bool]()
        written = {n.args[0] for n in nodes if n.target == aten.copy_.default}
        results = [desc for n in nodes if n.op == "output" for desc in n.meta.get("desc", ())]
        names = [repr(desc.mutated_input) for desc in results if hasattr(desc, "mutated_input")]
        for n in nodes:
            lasting[n] = n not in written and repr(n.meta.get("desc")) not in names and self.is_input(n) and all(lasting[i] for i in n.all_input_nodes)
        stack = [i for n in nodes if n in self.tangent or n.meta.get("recompute") is _AGAIN for i in n.all_input_nodes if self.is_input(i)]
        while stack:
            n = stack.pop()
            if n.op == "call_function" and "recompute" not in n.meta:
                n.meta["recompute"] = _AGAIN if lasting[n] else _SAVE
                stack.extend(n.all_input_nodes if lasting[n] else ())

    def keep_codes(self, nodes: list[fx.Node]) -> None:
        """What the ops of graph_layers.py write for backward."""
        for n in nodes:
            n.target = _FORWARD.get(n.target, n.target)  # gradients are recorded: the op that does it costs time
            if n.target is ops.norm_forward.default:
                spec: Any = n.args[7]
                n.meta["satchel"] = Mark(self.label(n, n), least_bits("normed", spec[0]), spec[0])
            for user in n.users if n.target in _CODES else ():
                if user.target is operator.getitem and user.args[1] in _CODES[n.target]:
                    user.meta["recompute"] = _SAVE

    def made_with(self, s: fx.Node, bits: int, draw: int, before: fx.Node, place: int) -> fx.Node | None:
        """The result of such an op from the op's own code of it, where that has as many bits as the reader wants. It is the first draw, and a norm's
        own gradient reads it too."""
        op = s.args[0] if s.target is operator.getitem and s.args[1] == 0 else None
        if not isinstance(op, fx.Node) or op.target not in _CODES or draw > 0:
            return None
        form: Any = op.args[6] if op.target is ops.norm_forward.default else None
        number = {ACT: 1, ADD: 2, None: 2}.get(form)  # of the code among the op's results
        spec: Any = None if number is None else op.args[-1] if number == 2 else op.args[7]
        if not spec or spec[0] < bits or (form == ACT and any(self.ancestors(n, _ways_out(before, place)) for n in self.gradients_of(op))):
            return None
        val = s.meta["val"]
        self.mode = val.fake_mode
        code = next((user for user in op.users if user.target is operator.getitem and user.args[1] == number), None)
        if code is None:
            with self.graph.inserting_before(s):
                code = self.node(operator.getitem, (op, number), None, _SAVE)
        if s not in self.known:
            self.known.add(s)
            self.tell(s, op, before, spec[0], code)
        with self.graph.inserting_before(before):
            if form is not None:
                return self.node(ops.norm_output.default, (code, list(val.shape), val.dtype, form, spec), None, _AGAIN)
            return self.in_shape(self.unpacked(code, val.numel(), val.dtype, spec), list(val.shape), _order(val))

    def gradients_of(self, norm: fx.Node) -> list[fx.Node]:
        """The nodes of backward that read a norm's code of its normalised values."""
        return [n for code in norm.users if code.target is operator.getitem for n in code.users if n.target is ops.norm_backward.default]

    def label(self, made: fx.Node, read: fx.Node) -> str:
        """Names a code for a budget: the module that reads it, and the ops that make and read the value."""
        choice = self.options.choice
        path = choice.path(read) or choice.path(made) or ""
        return f"{path + ': ' if path else ''}{_short(made)} > {_short(read)}"

    def tell(self, s: fx.Node, maker: fx.Node, reader: fx.Node, bits: int, code: fx.Node) -> None:
        val, dtype = s.meta["val"], str(s.meta["val"].dtype).removeprefix("torch.")
        after = _bytes(code.meta["val"])
        self.report[code.name] = Packing(s.name, str(maker.target), str(reader.target), tuple(val.shape), dtype, bits, _bytes(val), after)

    # ---- what may be coded -------------------------------------------------------------------------------------------------------

    def edges(self, n: fx.Node) -> Iterator[tuple[int, fx.Node]]:
        """(argument, value) of what a linear node reads from forward and is coded."""
        for place, value in self.crossing(n):
            if self.refusal(n, place, value) is None:
                yield place, value

    def crossing(self, n: fx.Node) -> Iterator[tuple[int, fx.Node]]:
        """(argument, tensor) of all that a node of backward reads from forward. Tensors in a list have its place."""
        for place, a in enumerate(n.args) if n.op == "call_function" and n in self.tangent else ():
            for value in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(value, fx.Node) and value not in self.tangent and isinstance(value.meta.get("val"), Tensor):
                    yield place, value

    def refusal(self, n: fx.Node, place: int, value: fx.Node) -> str | None:
        """Why n gets this value as it is; None where it gets a code."""
        val, row = value.meta["val"], self.linear.get(n.target)
        if self.is_input(value) or place in self.shape_only.get(n.target, ()) or n.target in _OWN or _whole(value).target == _OFFSETS:
            return _HELD
        if row is None or n.args[place] is not value or (row["where"] is not None and place not in row["where"]):
            return f"{n.target} is not known to be linear in it"
        if val.dtype not in _FLOATS and val.dtype is not torch.bool:
            return f"its type is {str(val.dtype).removeprefix('torch.')}"
        if not _has_sizes(source := self.source(value)[0]) or not _has_sizes(value):
            return "its size is decided by the data"
        least = min(_values(val), _values(source.meta["val"]))  # an expanded value is coded once
        if n.target == aten.mul.Tensor and least * _FEW <= _values(n.meta["val"]):
            return "a statistic"
        if least * val.element_size() < max(1, self.options.min_bytes):
            return "smaller than min_bytes"
        if self.options.choice and not self.options.choice.wants(n, source):
            return "not chosen"
        return _HELD if self.is_kept(value) else None

    def find_kept(self, nodes: list[fx.Node]) -> None:
        """What backward gets exactly from somewhere is in memory: no reader needs a code of it, nor of what is quickly made of it."""
        found = [(n, value, why) for n in nodes for place, value in self.crossing(n) if (why := self.refusal(n, place, value)) not in (None, _HELD)]
        self.kept = {_whole(value): True for _, value, _ in found}
        for n in nodes:  # in order, so that none asks far back
            self.is_kept(n)
        for n, value, why in found:
            self.leave(n, value, why)

    def is_kept(self, n: fx.Node) -> bool:
        if n not in self.kept:
            made = n.op == "call_function" and _is_quick(n.target) and len(n.all_input_nodes) > 0
            self.kept[n] = self.is_input(n) or made and all(self.is_kept(i) for i in n.all_input_nodes)
        return self.kept[n]

    def leave(self, n: fx.Node, value: fx.Node, why: str | None) -> None:
        """A line of the report for what stays exact."""
        whole = _whole(value)
        if whole in self.exact or not _has_sizes(whole) or _bytes(val := whole.meta["val"]) < self.options.min_bytes:
            return
        dtype = str(val.dtype).removeprefix("torch.")
        self.exact[whole] = Exact(whole.name, str(whole.target), str(n.target), tuple(val.shape), dtype, _bytes(val), why or "")

    def is_input(self, n: fx.Node) -> bool:
        """A parameter, the batch, or something that is quickly made of these alone, as a causal mask: the partitioner makes it anew."""
        if n not in self.inputs:
            made = n.op == "call_function" and _is_quick(n.target) and all(self.is_input(i) for i in n.all_input_nodes)
            self.inputs[n] = n.op in ("placeholder", "get_attr") and n not in self.activations or made
        return self.inputs[n]

    def is_exact(self, a: Any) -> bool:
        return self.is_input(a) if isinstance(a, fx.Node) else isinstance(a, (int, float))

    def source(self, n: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, int]]]:
        """The value of which n is a view, a cast or an affine map with exact coefficients, and the way back: one code serves a norm and the
        linear layer behind it, and all heads that share a key."""
        chain = []
        while n not in self.stops and (k := self.below(n)) is not None:
            chain.append((n, k))
            n = _arg(n, k)
        return n, chain

    def part(self, n: fx.Node) -> fx.Node:
        """The source, or the part of one that was split: parts have no value in common, so that one draw serves them all."""
        source, chain = self.source(n)
        return next((m for m, _ in chain if m.target is operator.getitem), source)

    def origin(self, n: fx.Node) -> fx.Node:
        """The source, were there no stops: what kind of value it is."""
        while (k := self.below(n)) is not None:
            n = _arg(n, k)
        return n

    def find_stops(self, edges: list[tuple[fx.Node, int, fx.Node]]) -> None:
        """Where all that is read of a float32 value went through one cast to 16 bits, the cast's result is coded: forward writes it anyway, and
        the float32 value need not be written for the code alone."""
        casts: dict[str, dict[str, fx.Node | None]] = {}
        for _, _, value in edges:
            source, chain = self.source(value)
            narrow = [n for n, _ in chain if n.target == _CAST and n.meta["val"].element_size() == 2 and _arg(n, 0).meta["val"].dtype is torch.float32]
            cast = narrow[0] if narrow else None
            casts.setdefault(self.name(source), {})["" if cast is None else self.name(cast)] = cast
        self.stops = {cast for readers in casts.values() if len(readers) == 1 for cast in readers.values() if cast is not None}

    def find_splits(self, edges: list[tuple[fx.Node, int, fx.Node]]) -> None:
        """Tensors of which all parts are read, as q, k and v of one product: coded whole, since parts have gaps and would be copied."""
        read = {self.source(value)[0] for _, _, value in edges}
        for split in {_arg(n, 0) for n in read if n.target is operator.getitem and _arg(n, 0).target in _SPLITS}:
            whole = len(split.users) == len(split.meta["val"]) and all(user in read for user in split.users)
            if whole and not self.is_input(_arg(split, 0)):
                self.splits.add(split)

    def below(self, n: fx.Node) -> int | None:
        if n.op != "call_function":
            return None
        if n in self.undone or n in self.splits or (n.target is operator.getitem and n.args[0] in self.splits):
            return 0
        k: int | None = 0 if n.target in _VIEWS or (n.target == aten.pow.Tensor_Scalar and n.args[1] == 1) else None
        if n.target in _AFFINE and not n.kwargs:
            k = next((i for i in _AFFINE[n.target] if all(self.is_exact(a) for j, a in enumerate(n.args) if j != i)), None)
        if k is None and n.target in (aten.sub.Tensor, aten.mul.Tensor) and not n.kwargs:
            k = self.normed_row(n)
        if k is None or not isinstance(value := n.args[k], fx.Node) or self.is_input(value):
            return None
        inner, outer = value.meta["val"], n.meta["val"]
        if not _has_sizes(value) or not _has_sizes(n) or inner.dtype not in (*_FLOATS, torch.bool):
            return None
        return k if n.target == aten.expand.default or statically_known_true(inner.numel() == outer.numel()) else None

    def normed_row(self, n: fx.Node) -> int | None:
        """0 where n is x − mean, 0 or 1 where it is that times 1/σ, of whole blocks that lie within one row: a code of x has the same noise,
        measured by the row's σ, and x is in memory anyway. Mean and 1/σ are kept: two numbers a row."""
        if n.target == aten.sub.Tensor:
            if self.statistic(n) is None:
                return None
            x, mean = (_arg(n, i).meta["val"] for i in (0, 1))
            row = next((d for d in range(x.dim()) if mean.dim() == x.dim() and all(s == 1 for s in mean.shape[d:])), x.dim())
            inner = math.prod(_hint(size) for size in x.shape[row:])
            known = all(isinstance(size, int) for size in x.shape[row:])
            return 0 if known and inner > 1 and inner % BLOCK == 0 and _order(x) == list(range(x.dim())) else None
        for k in (0, 1):
            a, scale = n.args[k], n.args[1 - k]
            if isinstance(a, fx.Node) and isinstance(scale, fx.Node) and a.target == aten.sub.Tensor and self.normed_row(a) is not None:
                return k if _through(scale, _VIEWS).target == aten.rsqrt.default else None
        return None

    def name(self, n: Any) -> str:
        """Equal for equal values: x − mean appears several times."""
        if not isinstance(n, fx.Node):
            return repr(n)
        if n not in self.names:
            pure = n.op == "call_function" and n.target in _PURE
            parts = (str(n.target), [self.name(a) for a in n.args], sorted((k, self.name(v)) for k, v in n.kwargs.items()))
            self.names[n] = hashlib.sha256(repr(parts).encode()).hexdigest() if pure else n.name
        return self.names[n]

    # ---- how many bits, how many draws -------------------------------------------------------------------------------------------

    def values_per_statistic(self, n: fx.Node) -> int:
        """N where n is made, by views and exact coefficients, of x − mean, that or x times 1/σ, of N values; 0 elsewhere."""
        found = 0
        while True:
            parts = [a for a in n.args if isinstance(a, fx.Node)] if n.op == "call_function" and n.target == aten.mul.Tensor else [n]
            for part in parts:
                if self.statistic(part) is not None:
                    found = max(found, _values(part.meta["val"]) // max(1, _values(_arg(part, 1).meta["val"])))
            if (root := self.rms(n)) is not None:
                found = max(found, _values(root[0].meta["val"]) // max(1, _values(root[1].meta["val"])))
            if found or (k := self.below(n)) is None:
                return found
            n = _arg(n, k)

    def statistic(self, n: fx.Node) -> fx.Node | None:
        """The node that makes the mean where n is x − mean."""
        if n.op != "call_function" or n.target != aten.sub.Tensor or not isinstance(n.args[1], fx.Node):
            return None
        made = _through(n.args[1], _VIEWS)
        if made.target is operator.getitem:
            made = _arg(made, 0)
        return made if made.target in (aten.var_mean.correction, aten.mean.dim) else None

    def find_scales(self, nodes: list[fx.Node]) -> None:
        """Norms that forward makes as (x − mean)·(1/σ). Backward may read x − mean; it is coded times 1/σ, since channels whose σ differ may
        share a block."""
        for n in nodes:
            if n.op != "call_function" or n.target != aten.mul.Tensor or n in self.tangent or len(n.all_input_nodes) != 2:
                continue
            left, right = _arg(n, 0), _arg(n, 1)
            for a, scale in ((left, right), (right, left)):
                mean = self.statistic(a)
                if mean is not None and _through(scale, _VIEWS).target == aten.rsqrt.default:
                    self.scales.setdefault(mean, scale)

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

    def draws(self, edges: list[tuple[fx.Node, int, fx.Node]]) -> list[int]:
        """The draw of each edge. Readers of one value of which one lies on the other's gradient path take different draws: the product of
        two reads of one draw has the code's variance in its mean. Exact masks and 8 bits need no second draw."""
        readers: dict[str, list[int]] = {}
        for i, (n, place, value) in enumerate(edges):
            if value.meta["val"].dtype is not torch.bool and self.fewest(n, place, value) < 8:
                readers.setdefault(self.name(self.part(value)), []).append(i)
        draws = [0] * len(edges)
        for group in readers.values():
            for position, i in enumerate(group):
                ways = {j: _ways_out(*edges[j][:2]) for j in group[:position]}
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
                sums = below.target in _REDUCTIONS and _has_sizes(i) and _has_sizes(below)
                through = summed * (_values(i.meta["val"]) // max(1, _values(below.meta["val"])) if sums else 1)
                if through < _SOME and through < least.get(i, _SOME):
                    least[i] = through
                    stack.append((i, through))
                    if i in of:
                        found.add(i)
        return found

    # ---- nodes -------------------------------------------------------------------------------------------------------------------

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

    def seed(self, device: torch.device) -> fx.Node:
        """The seed of the next code: a view of a vector that is drawn once a step and device."""
        vector, drawn = self.seeds[device]
        drawn.append(self.node(aten.slice.Tensor, (vector, 0, 0, 1)))
        return drawn[-1]

    def add_seeds(self, device: torch.device) -> None:
        """The vector, in front of everything that forward computes."""
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            vector = self.node(inductor_prims.seeds, (1, device), None, _SAVE)
            if rank() > 0:  # ranks that are seeded alike draw apart
                vector = self.node(aten.add.Tensor, (vector, mixed(rank())), None, _SAVE)
        self.seeds[device] = (vector, [])

    def number_seeds(self) -> None:
        for device, (vector, drawn) in self.seeds.items():
            made = vector if vector.target is inductor_prims.seeds else _arg(vector, 0)
            made.args = (len(drawn), device)
            with self.mode:
                made.meta["val"] = inductor_prims.seeds(*made.args)
                vector.meta["val"] = torch.empty_like(made.meta["val"])
            for i, n in enumerate(drawn):
                n.args = (vector, 0, i, i + 1)
                with self.mode:
                    n.meta["val"] = aten.slice.Tensor(vector.meta["val"], *n.args[1:])

    def coded(self, s: fx.Node, bits: int, draw: int, before: fx.Node) -> fx.Node:
        """The decoded value, in front of its reader."""
        val = s.meta["val"]
        self.mode = val.fake_mode
        key = (self.name(s), draw)
        if key not in self.codes:
            mean = self.statistic(s)
            scale = None if mean is None else self.scales.get(mean)
            if val.dtype is not torch.bool and val.device not in self.seeds:
                self.add_seeds(val.device)
            place = (s if scale is None else max(s, scale, key=self.places.__getitem__)).next
            if s.op == "placeholder":  # behind all of them, and behind what every code reads
                last = [vector for vector, _ in self.seeds.values()]
                while place.op == "placeholder" or last:
                    last = [vector for vector in last if vector is not place]
                    place = place.next
            with self.graph.inserting_before(place):
                seed = None if val.dtype is torch.bool else self.seed(val.device)
                coded = s if scale is None else self.node(aten.mul.Tensor, (s, scale))
                narrow = self.narrow_reader(before) if val.dtype is torch.float32 else None
                coded = coded if narrow is None else self.node(_CAST, (coded, narrow))
                decode, data = self.encode(coded, bits, seed, val.dtype)
            if seed is not None:
                data.meta["satchel"] = Mark(self.label(s, before), self.least[key], bits)
            self.codes[key] = decode if scale is None else lambda n: self.line(_AGAIN, decode(n), (aten.div.Tensor, scale), (_CAST, val.dtype))
            self.tell(s, s, before, bits, data)
        with self.graph.inserting_before(before):
            return self.codes[key](before)

    def narrow_reader(self, n: fx.Node) -> torch.dtype | None:
        """The type of 16 bits to which a product is rounded and nothing else is done with it; its float32 coefficient may be rounded so too,
        which halves what is written for the code."""
        if n.target != aten.mul.Tensor or not n.users:
            return None
        types = {user.meta["val"].dtype if user.target == _CAST else None for user in n.users}
        found = types.pop()
        return found if not types and found in (torch.float16, torch.bfloat16) else None

    def encode(self, s: fx.Node, bits: int, seed: fx.Node | None, dtype: torch.dtype) -> tuple[_Decode, fx.Node]:
        """By Satchel's kernels, for any number of values; coded in the order of memory, decoded to a type. Without a seed: booleans."""
        val, order, sizes = s.meta["val"], _order(s.meta["val"]), self.sizes(s)
        values = self.product(sizes)
        flat = self.line(None, s, (aten.permute.default, order), (aten.reshape.default, [-1]))
        if seed is None:
            data = self.node(ops.pack_mask.default, (flat,), None, _SAVE)
        else:
            data = self.node(ops.pack.default, (flat, seed, None, 1, list(code_numbers(bits))), None, _SAVE)

        def decode(_: fx.Node) -> fx.Node:
            if val.dtype is torch.bool:
                x = self.node(ops.unpack_mask.default, (data, [values], [1], torch.bool), None, _AGAIN)
            else:
                x = self.unpacked(data, values, val.dtype, list(code_numbers(bits)))
                x = x if val.dtype == dtype else self.node(_CAST, (x, dtype), None, _AGAIN)
            return self.in_shape(x, sizes, order)

        return decode, data

    def unpacked(self, data: fx.Node, values: int | fx.Node, dtype: torch.dtype, spec: list[int]) -> fx.Node:
        return self.node(ops.unpack.default, (data, [values], [1], dtype, spec), None, _AGAIN)

    def in_shape(self, line: fx.Node, sizes: list[int | fx.Node], order: list[int]) -> fx.Node:
        """Values in the order of memory as a tensor of these sizes."""
        back = [order.index(i) for i in range(len(order))]
        return self.line(_AGAIN, line, (aten.reshape.default, [sizes[i] for i in order]), (aten.permute.default, back))

    def narrow_offsets(self, n: fx.Node) -> None:
        """A max pool's offsets within its window, which torch keeps in a byte each: in as many bits as the window needs."""
        offsets, window = _arg(n, 0), n.args[1]
        if not isinstance(window, (list, tuple)) or not all(isinstance(size, int) for size in window) or not _has_sizes(offsets):
            return
        val, bits = offsets.meta["val"], (math.prod(window) - 1).bit_length()
        readers = self.readers(n)
        small = _bytes(val) < max(1, self.options.min_bytes) or bits == 0 or bits * _values(val) >= 8 * _bytes(val)
        if small or not readers or not self.options.choice.wants(*readers, n):
            return
        self.mode, order = val.fake_mode, _order(val)
        with self.graph.inserting_before(offsets.next):
            sizes = self.sizes(offsets)
            line = self.line(None, offsets, (aten.permute.default, order), (aten.reshape.default, [-1]))
            planes = [self.line(None, line, (aten.bitwise_and.Scalar, 1 << bit), (aten.ne.Scalar, 0)) for bit in range(bits)]
            decode, data = self.encode(self.node(aten.cat.default, (planes,)), 1, None, torch.bool)
        self.tell(offsets, offsets, n, bits, data)
        with self.graph.inserting_before(n):
            rows = self.line(_AGAIN, decode(n), (aten.reshape.default, [bits, -1]))
            parts = [self.line(_AGAIN, rows, (aten.select.int, 0, bit), (_CAST, val.dtype), (aten.mul.Scalar, 1 << bit)) for bit in range(bits)]
            whole = parts[0]
            for part in parts[1:]:
                whole = self.node(aten.add.Tensor, (whole, part), None, _AGAIN)
            whole = self.in_shape(whole, sizes, order)
        n.args = (whole, *n.args[1:])
        n.meta["recompute"] = _AGAIN

    def readers(self, n: fx.Node) -> list[fx.Node]:
        """Nodes of backward that read what n makes or is made of that; none where forward hands it out too."""
        found, seen, stack = [], {n}, [n]
        while stack:
            for user in stack.pop().users:
                if user.op == "output":
                    return []
                if user in self.tangent:
                    found.append(user)
                elif user not in seen:
                    seen.add(user)
                    stack.append(user)
        return found

    def forget(self, n: fx.Node, place: int) -> None:
        """Only sizes and strides of this argument are read."""
        value = n.args[place]
        if not isinstance(value, fx.Node) or value in self.tangent or self.is_input(value) or not _has_sizes(value):
            return
        val = value.meta["val"]
        self.mode = val.fake_mode
        with self.graph.inserting_before(value.next):
            shape = self.sizes(value)
            strides = [self.symbol(stride, aten.sym_stride.int, value, i) for i, stride in enumerate(val.stride())]
        with self.graph.inserting_before(n):
            kwargs = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            empty = self.node(aten.empty_strided.default, (shape, strides), kwargs, _AGAIN)
        n.update_arg(place, empty)


def _ways_out(n: fx.Node, place: int) -> set[fx.Node]:
    """The nodes in whose values n's reading of this argument is seen. Of a convolution's gradients the weight's alone reads the input, and the input's
    alone the weight."""
    if n.target != aten.convolution_backward.default:
        return {n}
    return {user for user in n.users if user.target is operator.getitem and user.args[1] == {1: 1, 2: 0}.get(place)}


def _short(n: fx.Node) -> str:
    """An op's name; an input's is "input"."""
    target = _arg(n, 0).target if n.target is operator.getitem else n.target
    return "input" if n.op == "placeholder" else str(target).removeprefix("aten.").removeprefix("satchel_stable.").partition(".")[0]


def _arg(n: fx.Node, k: int) -> fx.Node:
    """Argument k, where it is known to be a node."""
    value = n.args[k]
    assert isinstance(value, fx.Node)
    return value


def _whole(n: fx.Node) -> fx.Node:
    """What n shows all values of, in another shape or order, or several times."""
    while n.op == "call_function" and n.target in _VIEWS and isinstance(n.args[0], fx.Node) and _has_sizes(n) and _has_sizes(n.args[0]):
        inner, outer = n.args[0].meta["val"], n.meta["val"]
        if inner.dtype != outer.dtype or not (n.target == aten.expand.default or statically_known_true(inner.numel() == outer.numel())):
            break
        n = n.args[0]
    return n


def _is_quick(target: Any) -> bool:
    """A view, or what is computed value by value, the same each time."""
    tags = getattr(target, "tags", ())
    return target in _FREE or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def _through(n: fx.Node, targets: set[Any]) -> fx.Node:
    """What n is made of by these ops alone, first argument by first argument."""
    while n.op == "call_function" and n.target in targets:
        n = _arg(n, 0)
    return n


def _order(val: Tensor) -> list[int]:
    """The dimensions as they lie in memory, outermost first."""
    return sorted(range(val.dim()), key=lambda d: (-_hint(val.stride(d)), -_hint(val.size(d))))


def _hint(size: Any) -> int:
    """A size, or what a symbol stands for in the shapes that the graph was made from."""
    return size if isinstance(size, int) else int(size.node.hint)


def _values(val: Tensor) -> int:
    return math.prod(_hint(size) for size in val.shape)


def _bytes(val: Tensor) -> int:
    return _values(val) * val.element_size()


def _has_sizes(n: fx.Node) -> bool:
    """Are all sizes of its value numbers, or symbols that stand for one?"""
    val = n.meta["val"]
    return isinstance(val, Tensor) and all(isinstance(n, int) or n.node.hint is not None for n in (*val.shape, *val.stride()))


def compile(  # noqa: A001
    model: Any,
    bits: str | int | tuple[int, ...] | Bits = "2/4/8",
    *,
    preset: str | None = None,
    budget: str | int | None = None,
    min_bytes: int = 16384,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **arguments: Any,
) -> Any:
    """torch.compile(model), with what crosses from forward to backward packed. The other arguments are torch.compile's.

    bits, min_bytes, include, exclude: as PackPass has them. preset: a name in place of bits, as packing() takes it.
    budget: bytes ("4GiB", "512 MiB", a number) that a call of the model keeps at most, codes and what stays exact; bits then go where they take most
      variance off the gradient. The first training step runs op by op and measures that; then the model is compiled. "gact" does so too.

    Returns what torch.compile returns; its PackPass, with the report of the newest graph, is `satchel_pass` of it. A model may be compiled in
    parts, block by block: what one part hands to the next is packed too, and a budget is the part's own.
    """
    if not callable(model) or isinstance(model, type):
        raise ValueError(f"[compile] model must be a module or a function, got {model!r}")
    if arguments.get("backend", "inductor") != "inductor":
        raise ValueError(f"[compile] backend must be inductor, got {arguments['backend']!r}")
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"[compile] options must be a dict, got {options!r}")
    for name in ("refresh", "seed", "meter"):
        if name in arguments:
            raise ValueError(f"[compile] {name} must be left to packing() and attach(), got {arguments[name]!r}")
    given_bits, mean = chosen_bits(bits, preset, "compile")
    limit = None if budget is None else parse_size(budget, "compile")
    plan = Plan(limit, mean if limit is None else None, given_bits) if limit is not None or mean is not None else None
    for name in ("joint_custom_post_pass", "pre_grad_custom_pass", *(["custom_partitioner_fn"] if plan is not None else [])):
        if (options or {}).get(name) is not None:
            raise ValueError(f"[compile] options must leave {name} to Satchel, got another pass")
    pack = PackPass(given_bits, min_bytes=min_bytes, include=include, exclude=exclude, model=model)
    pack.marked, pack.plan = True, plan
    given = dict(torch._inductor.list_mode_options(mode)) if mode is not None else {}
    given.update(options or {})
    layers = LayerPass(pack.bits, pack.min_bytes, pack.choice, plan)
    given.update(joint_custom_post_pass=pack, pre_grad_custom_pass=layers)
    if plan is not None:
        given["custom_partitioner_fn"] = Split(plan, pack._tell)
    compiled = torch.compile(model, options=dict(given), **arguments)
    if plan is not None and compiled is not model:  # which is what disable=True gives
        compiled = _watched(compiled, model, plan, given, arguments)
    compiled.__dict__["satchel_pass"] = pack  # a compiled module would hand an attribute on to the model
    return compiled


_frames = itertools.count()


def _own_frame(f: Any) -> Callable[..., Any]:
    """f behind a code object of its own. Dynamo keeps its graphs by code object, and few for each: blocks of one class would share them."""

    def frame(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    frame.__code__ = frame.__code__.replace(co_name=f"satchel_part_{next(_frames)}")
    return frame


def _watched(compiled: Any, model: Any, plan: Plan, given: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Calls that record gradients go to the plan's own backend until it has seen a backward; then, and without gradients, to Inductor's."""
    filters = {name: given[name] for name in given if name == "guard_filter_fn"}  # Dynamo's; the other options are Inductor's
    patches = {name.replace("-", "_"): value for name, value in given.items() if name not in filters}
    rest = {name: value for name, value in arguments.items() if name != "backend"}
    later = torch.compile(_own_frame(model), options=dict(given), **rest)
    watched: dict[int, Any] = {}  # by the plan's bits of norms, which make other graphs

    @functools.wraps(model.forward if isinstance(model, torch.nn.Module) else model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or plan.learn():
            return later(*args, **kwargs)
        if plan.norm_bits not in watched:
            watched[plan.norm_bits] = torch.compile(_own_frame(model), backend=plan.backend(patches), options=filters or None, **rest)
        plan.begin()
        result = watched[plan.norm_bits](*args, **kwargs)
        plan.check()
        return result

    if not isinstance(model, torch.nn.Module):
        return call
    compiled.forward = call
    return compiled
