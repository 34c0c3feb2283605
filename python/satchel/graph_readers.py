"""What backward reads of forward in a joint graph: which values these are, what each is made of, and which of them may be coded.

A reader is a node that depends on a tangent. An edge is (reader, place of the argument, value).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import _policy
from ._ops import ops
from .graph_choice import activation_inputs
from .graph_nodes import CAST, VIEWS, Builder, arg, bytes_of, has_sizes, hint, is_quick, memory_order, through, values_of, whole_of
from .kept import BLOCK

if TYPE_CHECKING:
    from .graph_pass import PackPass

__all__ = ["OFFSETS", "Edge", "Exact", "Readers"]

aten, prims = torch.ops.aten, torch.ops.prims
Edge = tuple[fx.Node, int, fx.Node]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_AFFINE: dict[Any, tuple[int, ...]] = {  # in which arguments, where the others are exact
    aten.add.Tensor: (0, 1), aten.sub.Tensor: (0, 1), aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,), aten.neg.default: (0,),
    aten.add.Scalar: (0,), aten.sub.Scalar: (0,), aten.mul.Scalar: (0,), aten.div.Scalar: (0,),
}  # fmt: skip
_PURE = {*VIEWS, *_AFFINE, aten.le.Scalar, aten.gt.Scalar, aten.relu.default, aten.rsqrt.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_FEW = 16  # a product's coefficient that is so many times smaller than it is a statistic: kept as it is
_OWN = {ops.norm_backward.default, ops.activation_backward.default}  # which read the codes of graph_layers.py's ops
OFFSETS = getattr(inductor_prims, "_low_memory_max_pool_offsets_to_indices", None)
_HELD = "in memory anyway"


def _target(name: str) -> Any:
    """An op of aten, or of prims where that is said; None where this torch has none of that name."""
    space = prims if name.startswith("prims.") else aten
    packet, _, overload = name.removeprefix("prims.").partition(".")
    return getattr(getattr(space, packet, None), overload or "default", None)


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


class Readers(Builder):
    """Of one graph on its way through the pass."""

    def __init__(self, options: PackPass, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.options = options
        table = _policy.compiled_rows()
        self.linear = {op: row for row in table["linear"] if (op := _target(row["op"])) is not None}
        self.shape_only = {op: row["where"] for row in table["shape"] if (op := _target(row["op"])) is not None}
        self.activations = set(activation_inputs(graph))
        self.tangent: set[fx.Node] = set()  # what depends on a tangent
        self.names: dict[fx.Node, str] = {}
        self.inputs: dict[fx.Node, bool] = {}
        self.kept: dict[fx.Node, bool] = {}  # what is exact in memory anyway, as far as that is known
        self.stops: set[fx.Node] = set()  # sources that are casts
        self.splits: set[fx.Node] = set()  # whose parts are coded in one
        self.undone: list[fx.Node] = []  # x̂ by 1/σ, which backward reads for x, and views of it
        self.exact: dict[fx.Node, Exact] = {}

    # ---- which edges -------------------------------------------------------------------------------------------------------------

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
        if self.is_input(value) or place in self.shape_only.get(n.target, ()) or n.target in _OWN or whole_of(value).target == OFFSETS:
            return _HELD
        if row is None or n.args[place] is not value or (row["where"] is not None and place not in row["where"]):
            return f"{n.target} is not known to be linear in it"
        if val.dtype not in _FLOATS and val.dtype is not torch.bool:
            return f"its type is {str(val.dtype).removeprefix('torch.')}"
        if not has_sizes(source := self.source(value)[0]) or not has_sizes(value):
            return "its size is decided by the data"
        least = min(values_of(val), values_of(source.meta["val"]))  # an expanded value is coded once
        if n.target == aten.mul.Tensor and least * _FEW <= values_of(n.meta["val"]):
            return "a statistic"
        if least * val.element_size() < max(1, self.options.min_bytes):
            return "smaller than min_bytes"
        if self.options.choice and not self.options.choice.wants(n, source):
            return "not chosen"
        return _HELD if self.is_kept(value) else None

    def find_kept(self, nodes: list[fx.Node]) -> None:
        """What backward gets exactly from somewhere is in memory: no reader needs a code of it, nor of what is quickly made of it."""
        found = [(n, value, why) for n in nodes for place, value in self.crossing(n) if (why := self.refusal(n, place, value)) not in (None, _HELD)]
        self.kept = {whole_of(value): True for _, value, _ in found}
        for n in nodes:  # in order, so that none asks far back
            self.is_kept(n)
        for n, value, why in found:
            self.leave(n, value, why)

    def is_kept(self, n: fx.Node) -> bool:
        if n not in self.kept:
            made = n.op == "call_function" and is_quick(n.target) and len(n.all_input_nodes) > 0
            self.kept[n] = self.is_input(n) or made and all(self.is_kept(i) for i in n.all_input_nodes)
        return self.kept[n]

    def leave(self, n: fx.Node, value: fx.Node, why: str | None) -> None:
        """A line of the report for what stays exact."""
        whole = whole_of(value)
        if whole in self.exact or not has_sizes(whole) or bytes_of(val := whole.meta["val"]) < self.options.min_bytes:
            return
        dtype = str(val.dtype).removeprefix("torch.")
        self.exact[whole] = Exact(whole.name, str(whole.target), str(n.target), tuple(val.shape), dtype, bytes_of(val), why or "")

    def is_input(self, n: fx.Node) -> bool:
        """A parameter, the batch, or something that is quickly made of these alone, as a causal mask: the partitioner makes it anew."""
        if n not in self.inputs:
            made = n.op == "call_function" and is_quick(n.target) and all(self.is_input(i) for i in n.all_input_nodes)
            self.inputs[n] = n.op in ("placeholder", "get_attr") and n not in self.activations or made
        return self.inputs[n]

    def is_exact(self, a: Any) -> bool:
        return self.is_input(a) if isinstance(a, fx.Node) else isinstance(a, (int, float))

    # ---- what a value is made of -------------------------------------------------------------------------------------------------

    def source(self, n: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, int]]]:
        """The value of which n is a view, a cast or an affine map with exact coefficients, and the way back: one code serves a norm and the
        linear layer behind it, and all heads that share a key."""
        chain = []
        while n not in self.stops and (k := self.below(n)) is not None:
            chain.append((n, k))
            n = arg(n, k)
        return n, chain

    def part(self, n: fx.Node) -> fx.Node:
        """The source, or the part of one that was split: parts have no value in common, so that one draw serves them all."""
        source, chain = self.source(n)
        return next((m for m, _ in chain if m.target is operator.getitem), source)

    def origin(self, n: fx.Node) -> fx.Node:
        """The source, were there no stops: what kind of value it is."""
        while (k := self.below(n)) is not None:
            n = arg(n, k)
        return n

    def find_stops(self, edges: list[Edge]) -> None:
        """Where all that is read of a float32 value went through one cast to 16 bits, the cast's result is coded: forward writes it anyway, and
        the float32 value need not be written for the code alone."""
        casts: dict[str, dict[str, fx.Node | None]] = {}
        for _, _, value in edges:
            source, chain = self.source(value)
            narrow = [n for n, _ in chain if n.target == CAST and n.meta["val"].element_size() == 2 and arg(n, 0).meta["val"].dtype is torch.float32]
            cast = narrow[0] if narrow else None
            casts.setdefault(self.name(source), {})["" if cast is None else self.name(cast)] = cast
        self.stops = {cast for readers in casts.values() if len(readers) == 1 for cast in readers.values() if cast is not None}

    def find_splits(self, edges: list[Edge]) -> None:
        """Tensors of which all parts are read, as q, k and v of one product: coded whole, since parts have gaps and would be copied."""
        read = {self.source(value)[0] for _, _, value in edges}
        for split in {arg(n, 0) for n in read if n.target is operator.getitem and arg(n, 0).target in _SPLITS}:
            whole = len(split.users) == len(split.meta["val"]) and all(user in read for user in split.users)
            if whole and not self.is_input(arg(split, 0)):
                self.splits.add(split)

    def below(self, n: fx.Node) -> int | None:
        if n.op != "call_function":
            return None
        if n in self.undone or n in self.splits or (n.target is operator.getitem and n.args[0] in self.splits):
            return 0
        k: int | None = 0 if n.target in VIEWS or (n.target == aten.pow.Tensor_Scalar and n.args[1] == 1) else None
        if n.target in _AFFINE and not n.kwargs:
            k = next((i for i in _AFFINE[n.target] if all(self.is_exact(a) for j, a in enumerate(n.args) if j != i)), None)
        if k is None and n.target in (aten.sub.Tensor, aten.mul.Tensor) and not n.kwargs:
            k = self.normed_row(n)
        if k is None or not isinstance(value := n.args[k], fx.Node) or self.is_input(value):
            return None
        inner, outer = value.meta["val"], n.meta["val"]
        if not has_sizes(value) or not has_sizes(n) or inner.dtype not in (*_FLOATS, torch.bool):
            return None
        return k if n.target == aten.expand.default or statically_known_true(inner.numel() == outer.numel()) else None

    def name(self, n: Any) -> str:
        """Equal for equal values: x − mean appears several times."""
        if not isinstance(n, fx.Node):
            return repr(n)
        if n not in self.names:
            pure = n.op == "call_function" and n.target in _PURE
            parts = (str(n.target), [self.name(a) for a in n.args], sorted((k, self.name(v)) for k, v in n.kwargs.items()))
            self.names[n] = hashlib.sha256(repr(parts).encode()).hexdigest() if pure else n.name
        return self.names[n]

    # ---- norms -------------------------------------------------------------------------------------------------------------------

    def normed_row(self, n: fx.Node) -> int | None:
        """0 where n is x − mean, 0 or 1 where it is that times 1/σ, of whole blocks that lie within one row: a code of x has the same noise,
        measured by the row's σ, and x is in memory anyway. Mean and 1/σ are kept: two numbers a row."""
        if n.target == aten.sub.Tensor:
            if self.statistic(n) is None:
                return None
            x, mean = (arg(n, i).meta["val"] for i in (0, 1))
            row = next((d for d in range(x.dim()) if mean.dim() == x.dim() and all(s == 1 for s in mean.shape[d:])), x.dim())
            inner = math.prod(hint(size) for size in x.shape[row:])
            known = all(isinstance(size, int) for size in x.shape[row:])
            return 0 if known and inner > 1 and inner % BLOCK == 0 and memory_order(x) == list(range(x.dim())) else None
        for k in (0, 1):
            a, scale = n.args[k], n.args[1 - k]
            if isinstance(a, fx.Node) and isinstance(scale, fx.Node) and a.target == aten.sub.Tensor and self.normed_row(a) is not None:
                return k if through(scale, VIEWS).target == aten.rsqrt.default else None
        return None

    def values_per_statistic(self, n: fx.Node) -> int:
        """N where n is made, by views and exact coefficients, of x − mean, that or x times 1/σ, of N values; 0 elsewhere."""
        found = 0
        while True:
            parts = [a for a in n.args if isinstance(a, fx.Node)] if n.op == "call_function" and n.target == aten.mul.Tensor else [n]
            for part in parts:
                if self.statistic(part) is not None:
                    found = max(found, values_of(part.meta["val"]) // max(1, values_of(arg(part, 1).meta["val"])))
            if (root := self.rms(n)) is not None:
                found = max(found, values_of(root[0].meta["val"]) // max(1, values_of(root[1].meta["val"])))
            if found or (k := self.below(n)) is None:
                return found
            n = arg(n, k)

    def statistic(self, n: fx.Node) -> fx.Node | None:
        """The node that makes the mean where n is x − mean."""
        if n.op != "call_function" or n.target != aten.sub.Tensor or not isinstance(n.args[1], fx.Node):
            return None
        made = through(n.args[1], VIEWS)
        if made.target is operator.getitem:
            made = arg(made, 0)
        return made if made.target in (aten.var_mean.correction, aten.mean.dim) else None

    def rms(self, n: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(x, 1/σ) where n is x by the root of the mean of its squares."""
        if n.op != "call_function" or n.target != aten.mul.Tensor or len(n.all_input_nodes) != 2:
            return None
        for x, scale in (n.args, n.args[::-1]):
            assert isinstance(x, fx.Node) and isinstance(scale, fx.Node)
            made = through(scale, VIEWS)
            mean = through(arg(made, 0), {*VIEWS, aten.add.Tensor, aten.add.Scalar}) if made.target == aten.rsqrt.default else made
            square = through(arg(mean, 0), VIEWS) if mean.target == aten.mean.dim else mean
            if square.target not in (aten.pow.Tensor_Scalar, aten.mul.Tensor) or square.args[1] not in (2, square.args[0]):
                continue
            if mean.target == aten.mean.dim and self.name(whole_of(arg(square, 0))) == self.name(whole_of(x)):
                return x, scale
        return None
