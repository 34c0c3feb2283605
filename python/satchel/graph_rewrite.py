"""The pass's work on one joint graph: codes where readers have them, written in forward and decoded in front of each reader.

What encode gives out is marked as saved and decode as recomputed; torch's partitioner then keeps the codes and nothing else. Where graph_layers.py
has put an op for a norm or an activation, its own codes are read.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import fx
from torch._inductor import inductor_prims

from ._ops import ops
from ._policy import least_bits
from ._seeds import mixed, rank
from .graph_budget import Mark
from .graph_draws import Draws, ways_out
from .graph_nodes import AGAIN, CAST, SAVE, VIEWS, arg, bytes_of, has_sizes, memory_order, short_name, through, values_of
from .graph_readers import OFFSETS
from .kept import code_numbers
from .norm_ops import ACT, ADD

if TYPE_CHECKING:
    from .graph_pass import PackPass

__all__ = ["Packing", "Rewrite"]

aten = torch.ops.aten
_FORWARD: dict[Any, Any] = {ops.norm.default: ops.norm_forward.default, ops.activation.default: ops.activation_forward.default}
# What of their results backward may read.
_CODES: dict[Any, tuple[int, ...]] = {ops.norm_forward.default: (1, 2, 4), ops.activation_forward.default: (1, 2)}

_Decode = Callable[[fx.Node], fx.Node]  # the decoded value for a reader, in front of it


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


class Rewrite(Draws):
    """One graph on its way through the pass."""

    def __init__(self, options: PackPass, graph: fx.Graph) -> None:
        super().__init__(options, graph)
        self.codes: dict[tuple[str, int], _Decode] = {}
        self.least: dict[tuple[str, int], int] = {}  # bits that a budget leaves a code
        self.report: dict[str, Packing] = {}  # by the node that writes the code
        self.seeds: dict[torch.device, tuple[fx.Node, list[fx.Node]]] = {}  # the vector, and what was taken of it
        self.scales: dict[fx.Node, fx.Node] = {}  # 1/σ by the node that makes the mean
        self.places: dict[fx.Node, int] = {}  # of the nodes in the graph
        self.known: set[fx.Node] = set()  # results of norms and activations that are reported

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
                    x = self.node(target, args, dict(step.kwargs), AGAIN)
            n.update_arg(place, x)
        for n in nodes:
            for place in self.shape_only.get(n.target, ()) if n in self.tangent else ():
                self.forget(n, place)
            if n.target == OFFSETS:
                self.narrow_offsets(n)
        for n in reversed(self.undone):  # where codes are read in their place
            if not n.users:
                self.graph.erase_node(n)
        self.number_seeds()
        self.make_again()
        self.graph.lint()

    # ---- before values are coded -------------------------------------------------------------------------------------------------

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
                    x = arg(x, k)
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

    def find_scales(self, nodes: list[fx.Node]) -> None:
        """Norms that forward makes as (x − mean)·(1/σ). Backward may read x − mean; it is coded times 1/σ, since channels whose σ differ may
        share a block."""
        for n in nodes:
            if n.op != "call_function" or n.target != aten.mul.Tensor or n in self.tangent or len(n.all_input_nodes) != 2:
                continue
            left, right = arg(n, 0), arg(n, 1)
            for a, scale in ((left, right), (right, left)):
                mean = self.statistic(a)
                if mean is not None and through(scale, VIEWS).target == aten.rsqrt.default:
                    self.scales.setdefault(mean, scale)

    # ---- codes that graph_layers.py's ops write ----------------------------------------------------------------------------------

    def keep_codes(self, nodes: list[fx.Node]) -> None:
        """What the ops of graph_layers.py write for backward."""
        for n in nodes:
            n.target = _FORWARD.get(n.target, n.target)  # gradients are recorded: the op that does it costs time
            if n.target is ops.norm_forward.default:
                spec: Any = n.args[7]
                n.meta["satchel"] = Mark(self.label(n, n), least_bits("normed", spec[0]), spec[0])
            for user in n.users if n.target in _CODES else ():
                if user.target is operator.getitem and user.args[1] in _CODES[n.target]:
                    user.meta["recompute"] = SAVE

    def made_with(self, s: fx.Node, bits: int, draw: int, before: fx.Node, place: int) -> fx.Node | None:
        """The result of such an op from the op's own code of it, where that has as many bits as the reader wants. It is the first draw, and a norm's
        own gradient reads it too."""
        op = s.args[0] if s.target is operator.getitem and s.args[1] == 0 else None
        if not isinstance(op, fx.Node) or op.target not in _CODES or draw > 0:
            return None
        form: Any = op.args[6] if op.target is ops.norm_forward.default else None
        number = {ACT: 1, ADD: 2, None: 2}.get(form)  # of the code among the op's results
        spec: Any = None if number is None else op.args[-1] if number == 2 else op.args[7]
        if not spec or spec[0] < bits or (form == ACT and any(self.ancestors(n, ways_out(before, place)) for n in self.gradients_of(op))):
            return None
        val = s.meta["val"]
        self.mode = val.fake_mode
        code = next((user for user in op.users if user.target is operator.getitem and user.args[1] == number), None)
        if code is None:
            with self.graph.inserting_before(s):
                code = self.node(operator.getitem, (op, number), None, SAVE)
        if s not in self.known:
            self.known.add(s)
            self.tell(s, op, before, spec[0], code)
        with self.graph.inserting_before(before):
            if form is not None:
                return self.node(ops.norm_output.default, (code, list(val.shape), val.dtype, form, spec), None, AGAIN)
            return self.in_shape(self.unpacked(code, val.numel(), val.dtype, spec), list(val.shape), memory_order(val))

    def gradients_of(self, norm: fx.Node) -> list[fx.Node]:
        """The nodes of backward that read a norm's code of its normalised values."""
        return [n for code in norm.users if code.target is operator.getitem for n in code.users if n.target is ops.norm_backward.default]

    # ---- codes of the pass's own -------------------------------------------------------------------------------------------------

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
                coded = coded if narrow is None else self.node(CAST, (coded, narrow))
                decode, data = self.encode(coded, bits, seed, val.dtype)
            if seed is not None:
                data.meta["satchel"] = Mark(self.label(s, before), self.least[key], bits)
            self.codes[key] = decode if scale is None else lambda n: self.line(AGAIN, decode(n), (aten.div.Tensor, scale), (CAST, val.dtype))
            self.tell(s, s, before, bits, data)
        with self.graph.inserting_before(before):
            return self.codes[key](before)

    def encode(self, s: fx.Node, bits: int, seed: fx.Node | None, dtype: torch.dtype) -> tuple[_Decode, fx.Node]:
        """By Satchel's kernels, for any number of values; coded in the order of memory, decoded to a type. Without a seed: booleans."""
        val, order, sizes = s.meta["val"], memory_order(s.meta["val"]), self.sizes(s)
        values = self.product(sizes)
        flat = self.line(None, s, (aten.permute.default, order), (aten.reshape.default, [-1]))
        if seed is None:
            data = self.node(ops.pack_mask.default, (flat,), None, SAVE)
        else:
            data = self.node(ops.pack.default, (flat, seed, None, 1, list(code_numbers(bits))), None, SAVE)

        def decode(_: fx.Node) -> fx.Node:
            if val.dtype is torch.bool:
                x = self.node(ops.unpack_mask.default, (data, [values], [1], torch.bool), None, AGAIN)
            else:
                x = self.unpacked(data, values, val.dtype, list(code_numbers(bits)))
                x = x if val.dtype == dtype else self.node(CAST, (x, dtype), None, AGAIN)
            return self.in_shape(x, sizes, order)

        return decode, data

    def unpacked(self, data: fx.Node, values: int | fx.Node, dtype: torch.dtype, spec: list[int]) -> fx.Node:
        return self.node(ops.unpack.default, (data, [values], [1], dtype, spec), None, AGAIN)

    def in_shape(self, line: fx.Node, sizes: list[int | fx.Node], order: list[int]) -> fx.Node:
        """Values in the order of memory as a tensor of these sizes."""
        back = [order.index(i) for i in range(len(order))]
        return self.line(AGAIN, line, (aten.reshape.default, [sizes[i] for i in order]), (aten.permute.default, back))

    def narrow_reader(self, n: fx.Node) -> torch.dtype | None:
        """The type of 16 bits to which a product is rounded and nothing else is done with it; its float32 coefficient may be rounded so too,
        which halves what is written for the code."""
        if n.target != aten.mul.Tensor or not n.users:
            return None
        types = {user.meta["val"].dtype if user.target == CAST else None for user in n.users}
        found = types.pop()
        return found if not types and found in (torch.float16, torch.bfloat16) else None

    def seed(self, device: torch.device) -> fx.Node:
        """The seed of the next code: a view of a vector that is drawn once a step and device."""
        vector, drawn = self.seeds[device]
        drawn.append(self.node(aten.slice.Tensor, (vector, 0, 0, 1)))
        return drawn[-1]

    def add_seeds(self, device: torch.device) -> None:
        """The vector, in front of everything that forward computes."""
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            vector = self.node(inductor_prims.seeds, (1, device), None, SAVE)
            if rank() > 0:  # ranks that are seeded alike draw apart
                vector = self.node(aten.add.Tensor, (vector, mixed(rank())), None, SAVE)
        self.seeds[device] = (vector, [])

    def number_seeds(self) -> None:
        for device, (vector, drawn) in self.seeds.items():
            made = vector if vector.target is inductor_prims.seeds else arg(vector, 0)
            made.args = (len(drawn), device)
            with self.mode:
                made.meta["val"] = inductor_prims.seeds(*made.args)
                vector.meta["val"] = torch.empty_like(made.meta["val"])
            for i, n in enumerate(drawn):
                n.args = (vector, 0, i, i + 1)
                with self.mode:
                    n.meta["val"] = aten.slice.Tensor(vector.meta["val"], *n.args[1:])

    # ---- what needs no code ------------------------------------------------------------------------------------------------------

    def make_again(self) -> None:
        """What backward reads and is quickly made of parameters, buffers and the batch, which are in memory anyway: casts, causal masks, positions.
        What is made of those that forward writes is kept: torch's partitioner would make it again of the new values."""
        nodes, lasting = list(self.graph.nodes), dict[fx.Node, bool]()
        written = {n.args[0] for n in nodes if n.target == aten.copy_.default}
        results = [desc for n in nodes if n.op == "output" for desc in n.meta.get("desc", ())]
        names = [repr(desc.mutated_input) for desc in results if hasattr(desc, "mutated_input")]
        for n in nodes:
            lasting[n] = n not in written and repr(n.meta.get("desc")) not in names and self.is_input(n) and all(lasting[i] for i in n.all_input_nodes)
        stack = [i for n in nodes if n in self.tangent or n.meta.get("recompute") is AGAIN for i in n.all_input_nodes if self.is_input(i)]
        while stack:
            n = stack.pop()
            if n.op == "call_function" and "recompute" not in n.meta:
                n.meta["recompute"] = AGAIN if lasting[n] else SAVE
                stack.extend(n.all_input_nodes if lasting[n] else ())

    def narrow_offsets(self, n: fx.Node) -> None:
        """A max pool's offsets within its window, which torch keeps in a byte each: in as many bits as the window needs."""
        offsets, window = arg(n, 0), n.args[1]
        if not isinstance(window, (list, tuple)) or not all(isinstance(size, int) for size in window) or not has_sizes(offsets):
            return
        val, bits = offsets.meta["val"], (math.prod(window) - 1).bit_length()
        readers = self.readers(n)
        small = bytes_of(val) < max(1, self.options.min_bytes) or bits == 0 or bits * values_of(val) >= 8 * bytes_of(val)
        if small or not readers or not self.options.choice.wants(*readers, n):
            return
        self.mode, order = val.fake_mode, memory_order(val)
        with self.graph.inserting_before(offsets.next):
            sizes = self.sizes(offsets)
            line = self.line(None, offsets, (aten.permute.default, order), (aten.reshape.default, [-1]))
            planes = [self.line(None, line, (aten.bitwise_and.Scalar, 1 << bit), (aten.ne.Scalar, 0)) for bit in range(bits)]
            decode, data = self.encode(self.node(aten.cat.default, (planes,)), 1, None, torch.bool)
        self.tell(offsets, offsets, n, bits, data)
        with self.graph.inserting_before(n):
            rows = self.line(AGAIN, decode(n), (aten.reshape.default, [bits, -1]))
            parts = [self.line(AGAIN, rows, (aten.select.int, 0, bit), (CAST, val.dtype), (aten.mul.Scalar, 1 << bit)) for bit in range(bits)]
            whole = parts[0]
            for part in parts[1:]:
                whole = self.node(aten.add.Tensor, (whole, part), None, AGAIN)
            whole = self.in_shape(whole, sizes, order)
        n.args = (whole, *n.args[1:])
        n.meta["recompute"] = AGAIN

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
        if not isinstance(value, fx.Node) or value in self.tangent or self.is_input(value) or not has_sizes(value):
            return
        val = value.meta["val"]
        self.mode = val.fake_mode
        with self.graph.inserting_before(value.next):
            shape = self.sizes(value)
            strides = [self.symbol(stride, aten.sym_stride.int, value, i) for i, stride in enumerate(val.stride())]
        with self.graph.inserting_before(n):
            kwargs = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            empty = self.node(aten.empty_strided.default, (shape, strides), kwargs, AGAIN)
        n.update_arg(place, empty)

    # ---- the report --------------------------------------------------------------------------------------------------------------

    def label(self, made: fx.Node, read: fx.Node) -> str:
        """Names a code for a budget: the module that reads it, and the ops that make and read the value."""
        choice = self.options.choice
        path = choice.path(read) or choice.path(made) or ""
        return f"{path + ': ' if path else ''}{short_name(made)} > {short_name(read)}"

    def tell(self, s: fx.Node, maker: fx.Node, reader: fx.Node, bits: int, code: fx.Node) -> None:
        val, dtype = s.meta["val"], str(s.meta["val"].dtype).removeprefix("torch.")
        after = bytes_of(code.meta["val"])
        self.report[code.name] = Packing(s.name, str(maker.target), str(reader.target), tuple(val.shape), dtype, bits, bytes_of(val), after)
