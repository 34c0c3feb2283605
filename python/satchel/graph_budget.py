"""Bits by a budget inside torch.compile. Plan decides, in one place: Plan.fit().

Torch's partitioner says what a compiled graph keeps; Split asks it, and then gives every code its bits. The first training step knows nothing
of the gradients. It runs the same two graphs op by op, in even bits that fit, and its backward measures how much the noise of each code adds
to the variance of the gradients (graph_measure.py). Then the model is compiled, once, with bits where they take most of that variance off for their
bytes. What is measured belongs to codes by name, so a graph that torch makes later, for another batch size, is planned from it as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import threading
import warnings
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ._ops import KnownByUuid, Numbers, layout, ops, package_id
from ._policy import Bits
from .budget import MOST, allocate, size_text, variance
from .graph_choice import activation_inputs
from .graph_measure import Forward, Measured
from .graph_nodes import arg
from .kept import code_numbers
from .norm_ops import ACT, method_of, specs

__all__ = ["Mark", "Plan", "Split"]

aten = torch.ops.aten
_NEVER = 1 << 60  # bytes of a code in bits that it cannot have


@dataclasses.dataclass(frozen=True)
class Mark:
    """What PackPass says of a code, as `meta["satchel"]` of the node that writes it."""

    label: str  # module, and the ops that make and read the value
    least: int
    given: int


@dataclasses.dataclass
class Item:
    """What has one number of bits: a code, or the codes of one norm."""

    node: str  # of forward, that writes it
    mark: Mark
    sizes: list[int]  # bytes by bits, 0 to MOST
    values: int
    codes: dict[str, int]  # nodes of the codes themselves, as backward names them, and the bytes that they have
    specs: list[list[Numbers]]  # by bits
    is_norm: bool = False
    bits: int = 0


@dataclasses.dataclass(eq=False)
class Graph:
    """One compiled graph: what it keeps between forward and backward."""

    place: str  # where in the model's code it begins: the graphs that torch makes of one place differ by shapes alone
    items: list[Item]
    fixed: int  # bytes that no bits change
    measured: Callable[[], dict[str, float]] | None = None  # what its newest backward showed

    def __deepcopy__(self, memo: Any) -> Graph:
        return self  # torch copies the modules that know it

    @property
    def needed(self) -> int:
        return self.fixed + sum(item.sizes[item.mark.least] for item in self.items)

    @property
    def kept(self) -> int:
        return self.fixed + sum(item.sizes[item.bits] for item in self.items)


@dataclasses.dataclass
class _Candidate:
    """A plan: what it promises, and what it is made of."""

    variance: float
    norm_bits: int
    sensitivity: dict[str, float]
    call: Call


Call = dict[Graph, int]  # the graphs of one call of the model, and how often each has run in it


class _Now(threading.local):
    """What a thread is at."""

    call: Call | None = None  # that is watched
    place = ""  # of the graph that is made
    whole = True  # is that graph all of the model, and not a part that torch has cut off?


class Plan:
    """Of one satchel.compile(): bits of every code of every graph, from what the first training step showed.

    limit: bytes that a call keeps; or mean: bits a coded value.
    """

    def __init__(self, limit: int | None, mean: float | None, given: Bits) -> None:
        self.limit, self.mean, self.given = limit, mean, given
        self.watching = True
        self.sensitivity: dict[str, float] = {}  # by a code's label
        self.shares: dict[str, float] = {}  # of the budget for one run of a graph, by its place: where torch cuts a model in parts these have it together
        self.planned: dict[str, int] = {}
        self.graphs: dict[str, Graph] = {}  # the newest of each place
        self.owners: dict[str, str] = {}  # the place that first had a label: equal ones of other places are told apart
        self.calls: list[Call] = []  # that were watched
        self.now = _Now()
        self.other: _Candidate | None = None  # a plan that waits to be compared
        self._lock = threading.Lock()  # of what is learnt
        self.norm_bits = min(max(2, given.local), 3) if given.local <= MOST and limit is not None else 0  # of norms as one op; 0: there are none

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # torch copies its options, and with them the passes that know it

    def key(self) -> Any:
        """What decides: a part of the key of torch's caches."""
        return self.limit, self.mean, self.watching, self.norm_bits, sorted(self.planned.items()), sorted(self.shares.items())

    def bits_by_field(self) -> dict[str, int]:
        return {item.mark.label: item.bits for graph in self.graphs.values() for item in graph.items}

    # ---- bits of one graph -------------------------------------------------------------------------------------------------------

    def fit(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Graph:
        """Gives every code of a graph its bits. outputs: how many of forward's results are its caller's."""
        saved, place = list(_saved(forward, outputs)), self.now.place
        items, counts = dict[str, Item](), dict[str, int]()
        for n in saved:
            item = _item(n)
            if item is not None and item.node not in items:
                items[item.node] = item
                item.mark = dataclasses.replace(item.mark, label=self.label(item.mark.label, counts, place))
        codes = {name for item in items.values() for name in item.codes}
        graph = Graph(place, list(items.values()), sum(_bytes(n.meta["val"]) for n in saved if n.name not in codes))
        self.choose(graph)
        for item in graph.items:
            _set_bits(item, forward, backward)
        for module in (forward, backward):
            module.recompile()
            module.meta["satchel"] = graph
        self.graphs[place] = graph
        if self.now.call is not None:
            self.now.call.setdefault(graph, 0)
        sizes = [n.meta["val"].numel() * n.meta["val"].element_size() for n in saved if _has_sizes(n.meta["val"])]
        room = self.room(graph)
        if room is not None and graph.kept <= room and not all(isinstance(size, int) for size in sizes):
            bool(sum(sizes) <= room)  # a guard: for a batch that would keep more, torch makes a graph anew
        return graph

    def label(self, label: str, counts: dict[str, int], place: str) -> str:
        """One that no other code has: neither of this graph nor of the graph of another place."""
        count = counts[label] = counts.get(label, 0) + 1
        label = label if count == 1 else f"{label} #{count}"
        return label if self.owners.setdefault(label, place) == place else f"{label} ({place})"

    def room(self, graph: Graph) -> int | None:
        """Bytes that the graph may keep."""
        return None if self.limit is None else int(self.limit * self.shares.get(graph.place, 1.0))

    def choose(self, graph: Graph) -> None:
        if self.watching or not any(item.mark.label in self.sensitivity for item in graph.items):
            self.choose_evenly(graph)
        else:
            self.share_out({graph: 1}, self.room(graph))
        room = self.room(graph)
        if not self.watching and room is not None and graph.kept > room:
            needed = graph.needed * (self.limit or 0) // max(1, room)  # of all graphs, as they share it
            warnings.warn(self.complaint(needed), RuntimeWarning, stacklevel=2)

    def choose_evenly(self, graph: Graph) -> None:
        """The given bits, and as many less for everything as the budget asks for; the least where torch has cut the model in parts."""
        room = _NEVER if self.limit is None else self.limit
        if self.now.call is not None:
            room -= sum(other.kept for other in self.now.call)
        for less in range(0 if self.now.whole or self.limit is None else MOST, MOST + 1):
            for item in graph.items:
                item.bits = max(item.mark.least, item.mark.given - less)
            if graph.kept <= room:
                return

    def share_out(self, call: Call, room: int | None) -> None:
        """By what was measured, among all codes of a call's graphs."""
        items = [(item, runs) for graph, runs in call.items() for item in graph.items]
        if room is not None:
            sizes = [[runs * size for size in item.sizes] for item, runs in items]
            room -= sum(runs * graph.fixed for graph, runs in call.items())
        else:
            sizes = [[runs * b * item.values if item.sizes[b] < _NEVER else _NEVER for b in range(MOST + 1)] for item, runs in items]
            room = int((self.mean or 0) * sum(runs * item.values for item, runs in items))
        seen = [runs * self.sensitivity.get(item.mark.label, 0.0) for item, runs in items]
        for (item, _), bits in zip(items, allocate(seen, sizes, [item.mark.least for item, _ in items], room)):
            item.bits = bits

    def complaint(self, needed: int) -> str:
        return f"[compile] budget must be at least {size_text(needed)} for this model, got {size_text(self.limit or 0)}"

    # ---- the first training step -------------------------------------------------------------------------------------------------

    def backend(self, options: dict[str, Any]) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        """torch.compile's for the first step: the same passes make the same graphs, which run op by op. Graphs without gradients are Inductor's."""

        def inner(module: fx.GraphModule, inputs: Sequence[Any], *, is_inference: bool = False, is_backward: bool = False, **rest: Any) -> Any:
            graph = module.meta.get("satchel")
            if is_inference or graph is None:
                return compile_fx_inner(module, inputs, is_inference=is_inference, is_backward=is_backward, **rest)
            run = Measured(module, graph).run_boxed if is_backward else Forward(module, graph, self).run_boxed

            def boxed(args: list[Any]) -> Any:
                return run(args)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with functorch_config.patch(enable_autograd_cache=False):
                return compile_fx(module, inputs, inner_compile=inner, config_patches=options)

        return backend

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a call that is watched. Earlier ones are forgotten where they have not been measured: their backward may never come."""
        call = self.now.call = Call()
        with self._lock:
            self.calls = [*self.calls[-7:], call]
        try:
            yield
        finally:
            self.now.call = None
        self.check(call)

    def ran(self, graph: Graph) -> None:
        """Of a graph whose forward runs in this call."""
        if self.now.call is not None:
            self.now.call[graph] = self.now.call.get(graph, 0) + 1

    def check(self, call: Call) -> None:
        """At the end of a watched call: raises where the least bits of its graphs are too many."""
        needed = sum(runs * graph.needed for graph, runs in call.items())
        if self.limit is None or needed <= self.limit:
            return
        if self.other is None:
            raise ValueError(self.complaint(needed))
        with self._lock:
            self.take(self.other)

    def learn(self) -> bool:
        """Is the plan made? It is after the first backward whose gradients are finite."""
        if not self.watching or torch._C._current_graph_task_id() != -1:  # inside a backward, where a part of the model may run again
            return not self.watching
        with self._lock:
            for call in reversed(self.calls) if self.watching else ():
                found = [graph.measured() for graph in call if graph.measured is not None]
                for graph in call:
                    graph.measured = None
                seen = {label: c for one in found for label, c in one.items()}
                if found and all(math.isfinite(c) for c in seen.values()):
                    self.make({graph: max(1, runs) for graph, runs in call.items()}, seen)
                    break
        return not self.watching

    def make(self, call: Call, seen: dict[str, float]) -> None:
        """The plan of a call's graphs. Where norms, as one op with their ReLUs, have all the bits that they can have and there is room to take them
        apart, the step is watched once more without that, and the plan that promises less variance is taken."""
        self.sensitivity, self.calls = seen, []
        self.share_out(call, self.limit)
        items = [(item, runs) for graph, runs in call.items() for item in graph.items]
        promised = sum(runs * seen.get(item.mark.label, 0.0) * variance(item.bits) for item, runs in items)
        found = _Candidate(promised, self.norm_bits, seen, call)
        norms = [(item, runs) for item, runs in items if item.is_norm]
        if self.limit is not None and norms and all(item.bits == 3 for item, _ in norms):
            apart: float = sum(runs * graph.needed for graph, runs in call.items())
            apart += sum(runs * 2.5 * item.values / 8 for item, runs in norms)  # 2 more codes and a mask for one code
            if apart < self.limit:
                self.other, self.norm_bits, self.graphs = found, 0, {}
                return
        self.take(found if self.other is None or found.variance < self.other.variance else self.other)

    def take(self, found: _Candidate) -> None:
        total = sum(runs * graph.kept for graph, runs in found.call.items())
        self.sensitivity, self.norm_bits = found.sensitivity, found.norm_bits
        whole = list(found.call.values()) == [1]
        self.shares = {graph.place: 1.0 if whole else graph.kept / max(1, total) for graph in found.call}
        self.planned = {item.mark.label: item.bits for graph in found.call for item in graph.items}
        self.graphs = {graph.place: graph for graph in found.call}
        self.calls, self.other, self.watching = [], None, False


class Split(KnownByUuid, CustomPartitionerFn):
    """torch's partitioner, and bits for the codes that it keeps. told: called with the graph."""

    def __init__(self, plan: Plan, told: Callable[[Graph], None]) -> None:
        self.plan, self.told = plan, told

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        self.told(self.plan.fit(forward, backward, options["num_fwd_outputs"]))
        return forward, backward

    def uuid(self) -> bytes:
        return package_id("split", self.plan.key())


# ---- what a graph keeps ----------------------------------------------------------------------------------------------------------------

def _saved(forward: fx.GraphModule, outputs: int) -> Iterator[fx.Node]:
    """What forward keeps for backward and nobody else holds. Of a view, what it is one of."""
    made, seen = set(activation_inputs(forward.graph)), set[fx.Node]()
    result = next(n for n in forward.graph.nodes if n.op == "output").args[0]
    for n in list(result)[outputs:]:
        while isinstance(n, fx.Node) and n.op == "call_function" and (_is_view(n) or n.target is operator.getitem and _is_view(arg(n, 0))):
            n = n.args[0]
        if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor) and n not in seen and (n.op == "call_function" or n in made):
            seen.add(n)
            yield n


def _is_view(n: fx.Node) -> bool:
    """Has its result, or each of its results, the memory of its first argument?"""
    if n.target in (aten._unsafe_view.default, aten.reshape.default):
        return True
    returns = n.target._schema.returns if isinstance(n.target, torch._ops.OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)  # 0: decided by the data


def _has_sizes(val: Tensor) -> bool:
    return all(isinstance(size, int) or size.node.hint is not None for size in val.shape)


def _bytes(val: Tensor) -> int:
    return math.prod(_hint(size) for size in val.shape) * val.element_size()


def _item(n: fx.Node) -> Item | None:
    """Of a node of forward that writes a code, or is a code of a norm."""
    if n.target is ops.pack.default and "satchel" in n.meta:
        val = arg(n, 0).meta["val"]
        values = math.prod(_hint(size) for size in val.shape)
        numbers = [[code_numbers(max(1, b))] for b in range(MOST + 1)]
        sizes = [0] + [layout((values,), val.dtype, 0, 1, numbers[b][0])["total"] for b in range(1, MOST + 1)]
        return Item(n.name, n.meta["satchel"], sizes, values, {n.name: 0}, numbers)
    if n.target is not operator.getitem or arg(n, 0).target is not ops.norm_forward.default or n.args[1] not in (1, 2):
        return None
    norm = arg(n, 0)
    form: Any = norm.args[6]
    x = arg(norm, 0).meta["val"]
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    found = [specs(method_of(b), form, rows, channels, x.dtype, x.is_cuda, x.dim() > 2) if b in (2, 3) else None for b in range(MOST + 1)]

    def size(pair: tuple[Numbers, Numbers] | None) -> int:
        if pair is None:
            return _NEVER
        whole = layout((rows, channels), torch.float32, channels if form == ACT else 0, 1, pair[0])["total"]
        return whole + (layout((rows, channels), x.dtype, 0, 1, pair[1])["total"] if pair[1] else 0)

    codes = {user.name: 0 for user in norm.users if user.target is operator.getitem and user.args[1] in (1, 2)}
    mark, sizes = norm.meta["satchel"], [0, *map(size, found[1:])]
    if sizes[mark.least] == _NEVER:
        mark = dataclasses.replace(mark, least=mark.given)
    return Item(norm.name, mark, sizes, rows * channels, codes, [list(pair or ()) for pair in found], True)


def _set_bits(item: Item, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Writes the bits into the ops that encode and decode, and the codes' sizes into the graphs."""
    numbers = [list(spec) for spec in item.specs[item.bits]]
    n = next(n for n in forward.graph.nodes if n.name == item.node)
    place = 4 if n.target is ops.pack.default else 7
    n.args = (*n.args[:place], *numbers, *n.args[place + len(numbers) :])
    vals = fx.node.map_arg(n.args, lambda a: a.meta["val"])
    with arg(n, 0).meta["val"].fake_mode:
        n.meta["val"] = n.target(*vals)
    sizes = {n.name: n.meta["val"]}
    for user in list(n.users) if place == 7 else ():
        user.meta["val"] = sizes[user.name] = n.meta["val"][user.args[1]]
    item.codes = {name: _bytes(sizes[name]) for name in item.codes}
    for code in [m for m in backward.graph.nodes if m.op == "placeholder" and m.name in item.codes]:
        code.meta["val"] = sizes[code.name]
        for reader in list(code.users):
            if reader.target is ops.norm_backward.default:
                reader.args = (*reader.args[:6], *numbers, *reader.args[8:])
            elif reader.target in (ops.unpack.default, ops.norm_output.default):
                of_sum = reader.target is ops.norm_output.default and reader.args[3] != ACT
                reader.args = (*reader.args[:4], numbers[1 if of_sum else 0], *reader.args[5:])
