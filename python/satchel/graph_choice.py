"""What of a compiled graph is up for packing: inputs that an earlier part of the model has made, and what include and exclude leave."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import pathlib
import re
import warnings
from typing import Any, Iterable

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["FRAME", "Choice", "activation_inputs", "place_of"]

FRAME = "satchel_part_"  # how the functions are named through which compile() calls a model that has a budget


def activation_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Inputs that need a gradient and that nobody else holds: what another part of the model has made. No leaf, as parameters are, and no view of one.

    The values that a joint graph's nodes name are detached; only the fake tensors that Dynamo made of the real inputs know whether these are
    leaves. They share memory with the graph's. An input of which none is found, as a subclass's parts, counts as held.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    made: dict[int, bool] = {}  # by storage
    vals = {n: n.meta.get("val", n.meta.get("example_value")) for n in inputs}
    mode = next((val.fake_mode for val in vals.values() if isinstance(val, FakeTensor)), None)
    converter = getattr(getattr(mode, "fake_tensor_converter", None), "meta_converter", None)
    for known in list(getattr(converter, "tensor_memo", {}).values()):
        if isinstance(known, FakeTensor) and known.requires_grad:
            storage = known.untyped_storage()._cdata
            made[storage] = made.get(storage, True) and not known.is_leaf
    return [n for n, val in vals.items() if type(val) is FakeTensor and made.get(val.untyped_storage()._cdata, False)]


@functools.lru_cache(maxsize=1)
def _op_names() -> frozenset[str]:
    """Of torch's ops: "aten.mm" and "mm"."""
    found = {name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    return frozenset(found | {name.partition(".")[2] for name in found})


@dataclasses.dataclass(frozen=True)
class Choice:
    """include and exclude: patterns (fnmatch) of module paths and of ops. A graph's nodes name modules by their id."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    paths: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, include: Iterable[str], exclude: Iterable[str], model: Any, op: str) -> Choice:
        for patterns in (include, exclude):
            if not isinstance(patterns, (list, tuple, set, frozenset)) or not all(isinstance(p, str) for p in patterns):
                raise ValueError(f"[{op}] include and exclude must be lists of patterns, got {patterns!r}")
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        for pattern in (*include, *exclude):
            if any(fnmatch.fnmatchcase(name, pattern) for name in (*modules, *_op_names())):
                continue
            if not modules:
                raise ValueError(f"[{op}] include and exclude of module paths must come with a module, got {pattern!r}")
            warnings.warn(f"[{op}] include and exclude must match a module's path or an op, got {pattern!r}", RuntimeWarning, stacklevel=4)
        return cls(tuple(sorted(include)), tuple(sorted(exclude)), {str(id(module)): path for path, module in modules.items()})

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def wants(self, *nodes: fx.Node) -> bool:
        """Is a value wanted that these read and make? The first that knows its module says where it belongs."""
        path = next((found for n in nodes if (found := self.path(n)) is not None), "")
        names = {path, *(name for n in nodes for name in _names(n))}
        return (not self.include or _match(self.include, names)) and not _match(self.exclude, names)

    def key(self, n: fx.Node) -> str:
        """What the patterns say of a node's module."""
        path = {self.path(n) or ""}
        return "01"[_match(self.include, path)] + "01"[_match(self.exclude, path)]

    def path(self, n: fx.Node) -> str | None:
        """Of the module that ran the node, or for a node of backward the function that it is the gradient of."""
        stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack")
        if not stack:
            return None
        key, (text, *_) = list(stack.items())[-1]
        return self.paths.get(str(key).partition("@")[0], text)


def place_of(graph: fx.Graph, choice: Choice) -> tuple[str, bool]:
    """Where in the model's code a graph of Dynamo's begins, and whether it is all of the model: it then begins in compile()'s own function."""
    for n in graph.nodes:
        lines = re.findall(r'File "([^"]*)", line (\d+), in (\S+)', n.meta.get("stack_trace") or "")
        if lines:
            whole = lines[0][2].startswith(FRAME)
            path = next((path for key in n.meta.get("nn_module_stack") or () if (path := choice.paths.get(str(key).partition("@")[0]))), "")
            begins = [f"{name} at {pathlib.PurePath(file).name}:{line}" for file, line, name in lines[whole:][:1]]
            return ", ".join([*([path] if path else []), *begins]), whole
    return "", True


def _match(patterns: tuple[str, ...], names: set[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _names(n: fx.Node) -> Iterable[str]:
    """Of the op and of the one that it is a part of; of a function, its ops'."""
    for op in (n.target, n.meta.get("original_aten")):
        if isinstance(op, torch._ops.OpOverload):
            space, _, name = op._schema.name.partition("::")
            yield from (name, f"{space}.{name}")
        elif op is not None and n.op in ("call_function", "call_method"):
            name = op if isinstance(op, str) else getattr(op, "__name__", "")
            for name in (name, f"{name}_backward", f"native_{name}", f"native_{name}_backward"):
                yield from (name, f"aten.{name}")
