"""Bits by a budget inside torch.compile. Plan decides, in one place: Plan.fit().

Torch's partitioner says what a compiled graph keeps; Split asks it, and then gives every code its bits. The first training step knows nothing
of the gradients. It runs the same two graphs op by op, in even bits that fit, and its backward measures how much the noise of each code adds
to the variance of the gradients (Measured). Then the model is compiled, once, with bits where they take most of that variance off for their
bytes. What is measured belongs to codes by name, so a graph that torch makes later, for another batch size, is planned from it as well.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import inductor_prims
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ._noise import square
from ._ops import KnownByUuid, Numbers, layout, ops, package_id
from ._policy import Bits
from .budget import MOST, allocate, size_text, variance
from .graph_choice import activation_inputs
from .kept import BLOCK, code_numbers
from .norm_ops import ACT, ALONE, _as_image, _as_rows, method_of, specs

__all__ = ["Mark", "Plan", "Split"]

aten, prims = torch.ops.aten, torch.ops.prims
_NEVER = 1 << 60  # bytes of a code in bits that it cannot have
_ONE_SIDED = 2.5  # variance of a norm's one-sided code beside a block code's of as many bits: the values that its ReLU turns off are drawn
_SHIFT = 0.25  # of a block's range: noise that is large beside rounding in 16 bits, and far from their largest number
_VIEWS = {
    aten.view.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default, aten.as_strided.default,
    aten._unsafe_view.default, aten.reshape.default, aten.split.Tensor, aten.split_with_sizes.default,
}  # fmt: skip
_AS_IT_IS = {  # noise goes through these unchanged in sum
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.detach.default, aten.alias.default, aten.neg.default,
    aten._to_copy.default, aten.add.Tensor, aten.sub.Tensor, aten.sum.dim_IntList, aten.sum.default, prims.convert_element_type.default,
}  # fmt: skip


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

    items: list[Item]
    fixed: int  # bytes that no bits change
    measured: Callable[[], dict[str, float]] | None = None  # what its newest backward showed

    def __deepcopy__(self, memo: Any) -> Graph:
        return self  # torch copies the modules that know it

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(item.mark.label for item in self.items)

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
    graphs: list[Graph]


class Plan:
    """Of one satchel.compile(): bits of every code of every graph, from what the first training step showed.

    limit: bytes that a call keeps; or mean: bits a coded value.
    """

    def __init__(self, limit: int | None, mean: float | None, given: Bits) -> None:
        self.limit, self.mean, self.given = limit, mean, given
        self.watching = True
        self.sensitivity: dict[str, float] = {}  # by a code's label
        self.shares: dict[tuple[str, ...], float] = {}  # of the budget, by graph: where torch cuts a model in parts these have it together
        self.planned: dict[str, int] = {}
        self.graphs: dict[tuple[str, ...], Graph] = {}  # the newest of each kind
        self.calls: list[list[Graph]] = [[]]  # the graphs that ran in each watched call
        self.inside = False  # a watched call?
        self.cut = False  # does the model go on behind the graph that is made now?
        self.other: _Candidate | None = None  # a plan that waits to be compared
        self.norm_bits = min(max(2, given.local), 3) if given.local <= MOST and limit is not None else 0  # of norms as one op; 0: there are none

    def key(self) -> Any:
        """What decides: a part of the key of torch's caches."""
        return self.limit, self.mean, self.watching, self.norm_bits, sorted(self.planned.items()), sorted(self.shares.items())

    def bits_by_field(self) -> dict[str, int]:
        return {item.mark.label: item.bits for graph in self.graphs.values() for item in graph.items}

    # ---- bits of one graph -------------------------------------------------------------------------------------------------------

    def fit(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Graph:
        """Gives every code of a graph its bits. outputs: how many of forward's results are its caller's."""
        saved = list(_saved(forward, outputs))
        items, labels = dict[str, Item](), dict[str, int]()
        for n in saved:
            item = _item(n)
            if item is not None and item.node not in items:
                items[item.node] = item
                count = labels[item.mark.label] = labels.get(item.mark.label, 0) + 1
                if count > 1:  # alike in all that the label says
                    item.mark = dataclasses.replace(item.mark, label=f"{item.mark.label} #{count}")
        codes = {name for item in items.values() for name in item.codes}
        graph = Graph(list(items.values()), sum(_bytes(n.meta["val"]) for n in saved if n.name not in codes))
        self.choose(graph)
        for item in graph.items:
            _set_bits(item, forward, backward)
        for module in (forward, backward):
            module.recompile()
            module.meta["satchel"] = graph
        self.graphs[graph.key] = graph
        if self.inside:
            self.calls[-1].append(graph)
        sizes = [n.meta["val"].numel() * n.meta["val"].element_size() for n in saved if _has_sizes(n.meta["val"])]
        room = self.room(graph)
        if room is not None and graph.kept <= room and not all(isinstance(size, int) for size in sizes):
            bool(sum(sizes) <= room)  # a guard: for a batch that would keep more, torch makes a graph anew
        return graph

    def room(self, graph: Graph) -> int | None:
        """Bytes that the graph may keep."""
        return None if self.limit is None else int(self.limit * self.shares.get(graph.key, 1.0))

    def choose(self, graph: Graph) -> None:
        if self.watching or not any(item.mark.label in self.sensitivity for item in graph.items):
            self.choose_evenly(graph)
        else:
            self.share_out([graph], self.room(graph))
        if not self.watching and self.limit is not None and graph.kept > self.limit:
            warnings.warn(self.complaint(graph.needed), RuntimeWarning, stacklevel=2)

    def choose_evenly(self, graph: Graph) -> None:
        """The given bits, and as many less for everything as the budget asks for; the least where more graphs follow."""
        room = _NEVER if self.limit is None else self.limit
        if self.inside:
            room -= sum(other.kept for other in self.calls[-1])
        for less in range(MOST if self.cut and self.limit is not None else 0, MOST + 1):
            for item in graph.items:
                item.bits = max(item.mark.least, item.mark.given - less)
            if graph.kept <= room:
                return

    def share_out(self, graphs: list[Graph], room: int | None) -> None:
        """By what was measured, among all codes of these graphs."""
        items = [item for graph in graphs for item in graph.items]
        if room is not None:
            sizes, room = [item.sizes for item in items], room - sum(graph.fixed for graph in graphs)
        else:
            sizes = [[b * item.values if item.sizes[b] < _NEVER else _NEVER for b in range(MOST + 1)] for item in items]
            room = int((self.mean or 0) * sum(item.values for item in items))
        seen = [self.sensitivity.get(item.mark.label, 0.0) for item in items]
        for item, bits in zip(items, allocate(seen, sizes, [item.mark.least for item in items], room)):
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
            self.cut = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
            with functorch_config.patch(enable_autograd_cache=False):
                return compile_fx(module, inputs, inner_compile=inner, config_patches=options)

        return backend

    def begin(self) -> None:
        """Of a call that is watched. Earlier ones are forgotten where they have not been measured: their backward may never come."""
        self.calls, self.inside = [*self.calls[-7:], []], True

    def ran(self, graph: Graph) -> None:
        """Of a graph whose forward runs in this call."""
        if graph not in self.calls[-1]:
            self.calls[-1].append(graph)

    def check(self) -> None:
        """At the end of a watched call: raises where the least bits of its graphs are too many."""
        self.inside, needed = False, sum(graph.needed for graph in self.calls[-1])
        if self.limit is None or needed <= self.limit:
            return
        if self.other is None:
            raise ValueError(self.complaint(needed))
        self.take(self.other)

    def learn(self) -> bool:
        """Is the plan made? It is after the first backward whose gradients are finite."""
        if self.watching and torch._C._current_graph_task_id() == -1:  # not inside a backward, where a part of the model may run again
            for graphs in reversed(self.calls):
                found = [graph.measured() for graph in graphs if graph.measured is not None]
                for graph in graphs:
                    graph.measured = None
                seen = {label: c for one in found for label, c in one.items()}
                if found and all(math.isfinite(c) for c in seen.values()):
                    self.make(graphs, seen)
                    break
        return not self.watching

    def make(self, graphs: list[Graph], seen: dict[str, float]) -> None:
        """The plan of these graphs. Where norms, as one op with their ReLUs, have all the bits that they can have and there is room to take them
        apart, the step is watched once more without that, and the plan that promises less variance is taken."""
        self.sensitivity = seen
        self.share_out(graphs, self.limit)
        items = [item for graph in graphs for item in graph.items]
        found = _Candidate(sum(seen.get(item.mark.label, 0.0) * variance(item.bits) for item in items), self.norm_bits, seen, graphs)
        norms, self.calls = [item for item in items if item.is_norm], [[]]
        if self.limit is not None and norms and all(item.bits == 3 for item in norms):
            apart = sum(graph.needed for graph in graphs) + sum(2.5 * item.values / 8 for item in norms)  # 2 more codes and a mask for one code
            if apart < self.limit:
                self.other, self.norm_bits, self.graphs = found, 0, {}
                return
        self.take(found if self.other is None or found.variance < self.other.variance else self.other)

    def take(self, found: _Candidate) -> None:
        graphs = found.graphs
        total = sum(graph.kept for graph in graphs)
        self.sensitivity, self.norm_bits = found.sensitivity, found.norm_bits
        self.shares = {graph.key: graph.kept / total if len(graphs) > 1 else 1.0 for graph in graphs}
        self.planned = {item.mark.label: item.bits for graph in graphs for item in graph.items}
        self.graphs = {graph.key: graph for graph in graphs}
        self.watching = self.cut = False


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
        while isinstance(n, fx.Node) and n.op == "call_function" and (n.target in _VIEWS or n.target is operator.getitem and _of(n).target in _VIEWS):
            n = n.args[0]
        if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor) and n not in seen and (n.op == "call_function" or n in made):
            seen.add(n)
            yield n


def _of(n: fx.Node) -> fx.Node:
    """A node's first argument, where it is known to be a node."""
    value = n.args[0]
    assert isinstance(value, fx.Node)
    return value


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)  # 0: decided by the data


def _has_sizes(val: Tensor) -> bool:
    return all(isinstance(size, int) or size.node.hint is not None for size in val.shape)


def _bytes(val: Tensor) -> int:
    return math.prod(_hint(size) for size in val.shape) * val.element_size()


def _item(n: fx.Node) -> Item | None:
    """Of a node of forward that writes a code, or is a code of a norm."""
    if n.target is ops.pack.default and "satchel" in n.meta:
        val = _of(n).meta["val"]
        values = math.prod(_hint(size) for size in val.shape)
        numbers = [[code_numbers(max(1, b))] for b in range(MOST + 1)]
        sizes = [0] + [layout((values,), val.dtype, 0, 1, numbers[b][0])["total"] for b in range(1, MOST + 1)]
        return Item(n.name, n.meta["satchel"], sizes, values, {n.name: 0}, numbers)
    if n.target is not operator.getitem or _of(n).target is not ops.norm_forward.default or n.args[1] not in (1, 2):
        return None
    norm = _of(n)
    form: Any = norm.args[6]
    x = _of(norm).meta["val"]
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
    with _of(n).meta["val"].fake_mode:
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


# ---- the first step's graphs -----------------------------------------------------------------------------------------------------------

class Forward(fx.Interpreter):
    """Runs a graph op by op."""

    def __init__(self, module: fx.GraphModule, graph: Graph, plan: Plan | None = None) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.kept, self.plan = graph, plan

    def run_boxed(self, args: list[Any]) -> Any:
        if self.plan is not None:
            self.plan.ran(self.kept)
        try:
            return self.boxed_run(args)
        finally:
            self.env = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (inductor_prims.random, inductor_prims.randint):  # by its seed, which backward may read too
            *rest, seed, mode = args if target is inductor_prims.random else (*args, "randint")
            generator = torch.Generator(seed.device).manual_seed(int(seed))
            dtype = torch.int64 if mode == "randint" else torch.float32
            return getattr(torch, mode)(*rest, generator=generator, device=seed.device, dtype=dtype)
        return super().call_function(target, args, kwargs)


class Measured(Forward):
    """Runs backward, and measures what noise in each code becomes in the gradients.

    Every node is linear in the gradients that it gets. Where one reads a coded value, it is run again with that value shifted by its block's
    range, up or down by chance: the squared difference is the noise that the code puts in there. How much of it comes out at the end is the
    product of what each later node makes of noise. To see that, the node is run again on its gradient with random signs.
    """

    def __init__(self, module: fx.GraphModule, graph: Graph) -> None:
        super().__init__(module, graph)
        self.labels = {code: item.mark.label for item in graph.items if item.mark.least < MOST for code in item.codes}
        self.tangent: set[fx.Node] = set()
        for n in self.graph.nodes:
            given = n.op == "placeholder" and n.name.startswith("tangents")
            if given or n.op == "call_function" and any(i in self.tangent for i in n.all_input_nodes):
                self.tangent.add(n)
        self.shifted: dict[fx.Node, dict[str, Any]] = {}  # values under noise of a code
        self.noise: dict[tuple[str, fx.Node, int], Tensor] = {}
        self.gains: dict[tuple[fx.Node, fx.Node, int], Tensor] = {}
        self.generators: dict[torch.device, torch.Generator] = {}

    def run_boxed(self, args: list[Any]) -> Any:
        self.noise, self.gains = {}, {}
        try:
            result = super().run_boxed(args)
        finally:
            self.shifted = {}
        self.kept.measured = self.read
        return result

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for gone in [m for m in self.shifted if m not in self.env]:
            del self.shifted[gone]
        if n.op == "call_function" and not (isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable):
            with torch.no_grad():
                self.look(n, result)
        return result

    def look(self, n: fx.Node, result: Any) -> None:
        codes = {code for i in n.all_input_nodes for code in self.shifted.get(i, ())}
        if n not in self.tangent:
            if n.target in (ops.unpack.default, ops.norm_output.default) and (code := _of(n).name) in self.labels:
                self.shifted[n] = {code: self.shift(result, n.target is ops.norm_output.default)}
            elif codes and not isinstance(result, (int, float, bool)):
                self.shifted[n] = {code: self.again(n, code) for code in codes}
            return
        for code in codes:
            for j, (was, now) in enumerate(zip(_results(result), _results(self.again(n, code)))):
                if was is not None:
                    self.noise[code, n, j] = square(now.float() - was.float()) / _SHIFT**2
        if n.target is ops.norm_backward.default and _of_place(n, 1).name in self.labels:
            self.norm(n, result)
        for i in n.all_input_nodes:
            if i in self.tangent and n.target is not operator.getitem and isinstance(self.env[i], Tensor):
                self.gain(n, i, result)

    def again(self, n: fx.Node, code: str) -> Any:
        """n's result under a code's noise."""
        values = {i: self.shifted[i][code] for i in n.all_input_nodes if code in self.shifted.get(i, ())}
        return self.with_values(n, values)

    def with_values(self, n: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda i: values[i] if i in values else self.env[i])
        return self.call_function(n.target, args, kwargs)

    def signs(self, like: Tensor) -> Tensor:
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(0)
        drawn = torch.empty(like.shape, dtype=torch.int8, device=like.device)
        return drawn.random_(0, 2, generator=self.generators[like.device]).mul_(2).sub_(1)

    def shift(self, x: Tensor, image: bool) -> Tensor:
        """x, each value by its block's range up or down. image: a norm's result behind its ReLU, of which zeros stay."""
        line = (_as_rows(x) if image else x).flatten()
        moved = line + (_SHIFT * _ranges(line) * self.signs(line)).to(x.dtype)
        return _as_image(torch.where(line > 0, moved, line).view(-1, x.shape[1]), x.shape) if image else moved

    def norm(self, n: fx.Node, result: Any) -> None:
        """A norm's own gradient: dx reads mean(g·x̂)·x̂, where both factors have noise; γ's gradient is Σ g·x̂."""
        g, code, sum_, rstd, gamma, form, spec, sum_spec = self.fetch_args_kwargs_from_env(n)[0][:8]
        g = _as_rows(g)
        shape = list(g.shape)
        hat = ops.unpack(code, shape, [shape[1], 1], torch.float32, spec, shape[1] if form == ACT else 0, 1)
        if form != ALONE:
            on = ops.side_on(code, shape, spec, shape[1], 1) if form == ACT else ops.side_on(sum_, shape, sum_spec, 0, 1)
            g = ops.gate(g, on, None, 0.0, 0.0)
        each, by_channel, name = _ranges(hat.flatten()).square().mean(), square(g, 0), _of_place(n, 1).name
        each = each * _ONE_SIDED if form == ACT else each
        self.noise[name, n, 2] = each * by_channel.sum()
        if result[0].numel():
            self.noise[name, n, 0] = each * torch.dot((gamma * rstd).square(), result[2].square() + by_channel) / shape[0]

    def gain(self, n: fx.Node, i: fx.Node, result: Any) -> None:
        """What n makes of noise in the gradient i."""
        g = self.env[i]
        if not g.is_floating_point() or n.target in _AS_IT_IS:
            return
        values = {j: torch.zeros_like(self.env[j]) for j in n.all_input_nodes if j in self.tangent and isinstance(self.env[j], Tensor)}
        values[i] = g * self.signs(g)
        total = square(g).clamp_min(torch.finfo(torch.float32).tiny)
        made = self.with_values(n, values) if isinstance(n.target, torch._ops.OpOverload) else result
        for j, one in enumerate(_results(made)):
            if one is not None and one.is_floating_point():
                self.gains[i, n, j] = square(one) / total

    def read(self) -> dict[str, float]:
        """Sensitivities by label; the one moment that waits for the device."""
        noise, reach = _numbers(self.noise), dict[fx.Node, float]()
        gains: dict[tuple[fx.Node, fx.Node], list[tuple[int, float]]] = {}
        for (i, n, j), gain in _numbers(self.gains).items():
            gains.setdefault((i, n), []).append((j, gain))

        def behind(n: fx.Node, j: int) -> float:
            """What a unit of noise in result j becomes."""
            taken = [user for user in n.users if user.target is operator.getitem and user.args[1] == j]
            return sum(reach.get(user, 0.0) for user in taken) if taken or _has_many(n) else reach.get(n, 0.0)

        for n in reversed(list(self.graph.nodes)):
            for user in n.users if n in self.tangent else ():
                if user.op == "output":
                    reach[n] = reach.get(n, 0.0) + 1.0
                elif user.target is operator.getitem:
                    continue
                elif user.target in _AS_IT_IS:
                    reach[n] = reach.get(n, 0.0) + behind(user, 0)
                else:
                    reach[n] = reach.get(n, 0.0) + sum(gain * behind(user, j) for j, gain in gains.get((n, user), ()))
        found = dict.fromkeys(self.labels.values(), 0.0)
        for (code, n, j), energy in noise.items():
            found[self.labels[code]] += energy * behind(n, j)
        return found


def _of_place(n: fx.Node, k: int) -> fx.Node:
    value = n.args[k]
    assert isinstance(value, fx.Node)
    return value


def _numbers(table: dict[Any, Tensor]) -> dict[Any, float]:
    """Fetched at once from each device."""
    found: dict[Any, float] = {}
    for device in {number.device for number in table.values()}:
        keys = [key for key, number in table.items() if number.device == device]
        found.update(zip(keys, torch.stack([table[key].reshape(()).double() for key in keys]).tolist()))
    return found


def _results(made: Any) -> Sequence[Any]:
    return made if isinstance(made, (tuple, list)) else (made,)


def _has_many(n: fx.Node) -> bool:
    return isinstance(n.meta.get("val"), (tuple, list))


def _ranges(line: Tensor) -> Tensor:
    """Of each value: highest − lowest of its block. Decoded values reach both ends."""
    line = line.float()
    whole = len(line) // BLOCK * BLOCK
    parts = [part for part in (line[:whole].view(-1, BLOCK), line[whole:].view(1, -1)) if part.numel()]
    return torch.cat([(part.amax(1, True) - part.amin(1, True)).expand(part.shape).flatten() for part in parts])
