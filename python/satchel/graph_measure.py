"""The first training step of a model that is compiled under a budget: both graphs run op by op, and backward measures what noise in each code becomes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from ._noise import square
from ._ops import ops
from .budget import MOST
from .graph_nodes import arg
from .kept import BLOCK
from .norm_ops import ACT, ALONE, _as_image, _as_rows

if TYPE_CHECKING:
    from .graph_budget import Graph, Plan

__all__ = ["Forward", "Measured"]

aten, prims = torch.ops.aten, torch.ops.prims
_ONE_SIDED = 2.5  # variance of a norm's one-sided code beside a block code's of as many bits: the values that its ReLU turns off are drawn
_SHIFT = 0.25  # of a block's range: noise that is large beside rounding in 16 bits, and far from their largest number
_AS_IT_IS = {  # noise goes through these unchanged in sum
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.detach.default, aten.alias.default, aten.neg.default,
    aten._to_copy.default, aten.add.Tensor, aten.sub.Tensor, aten.sum.dim_IntList, aten.sum.default, prims.convert_element_type.default,
}  # fmt: skip


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
            if n.target in (ops.unpack.default, ops.norm_output.default) and (code := arg(n, 0).name) in self.labels:
                self.shifted[n] = {code: self.shift(result, n.target is ops.norm_output.default)}
            elif codes and not isinstance(result, (int, float, bool)):
                self.shifted[n] = {code: self.again(n, code) for code in codes}
            return
        for code in codes:
            for j, (was, now) in enumerate(zip(_results(result), _results(self.again(n, code)))):
                if was is not None:
                    self.noise[code, n, j] = square(now.float() - was.float()) / _SHIFT**2
        if n.target is ops.norm_backward.default and arg(n, 1).name in self.labels:
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
        each, by_channel, name = _ranges(hat.flatten()).square().mean(), square(g, 0), arg(n, 1).name
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
