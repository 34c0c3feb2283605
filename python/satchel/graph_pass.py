"""Packing inside torch.compile: a pass over the joint graph of forward and backward.

Every node of that graph that depends on a tangent is linear in the tangents. So a value that such a node reads from forward is a coefficient,
and where the node is a product (policy.json, "compiled") an unbiased code of the coefficient gives an unbiased gradient, whatever op made it:
GELU's slope is such a coefficient, computed in forward. The pass puts decode(encode(value)) on these edges: graph_readers.py finds them,
graph_draws.py says how many bits and draws a value has, and graph_rewrite.py writes the nodes, by graph_nodes.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ._ops import package_id
from ._policy import Bits, checked_size
from .graph_budget import Graph, Plan
from .graph_choice import Choice
from .graph_readers import Exact
from .graph_rewrite import Packing, Rewrite

__all__ = ["Exact", "PackPass", "Packing"]


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
        if model is not None and (not callable(model) or isinstance(model, type)):
            raise ValueError(f"[compile] model must be a module or a function, got {model!r}")
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
        rewrite = Rewrite(self, graph)
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
