"""What one thread's packing() does.

After every torch function the autograd nodes it has made are walked, and what they saved is replaced by a packed form where policy.json has a
row for (node, field). A node is known by its sequence number, so each is looked at once.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _len_torch_function_stack

from . import kept as forms
from ._policy import Row, eager_rows, least_bits
from ._seeds import mixed, rank

if TYPE_CHECKING:
    from .meter import Line
    from .packing import packing

__all__ = ["Step"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")
_NEVER = 1 << 63  # sequence numbers from here on are those of AccumulateGrad
_VIEWS = frozenset(
    ["TBackward0", "ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ExpandBackward0",
     "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SliceBackward0", "SelectBackward0",
     "SplitBackward0", "ChunkBackward0", "AliasBackward0"]
)  # fmt: skip
_HIDDEN = ("CopySlices", "Foreach", "CppFunction", "CompiledFunctionBackward")  # nodes that do not show what they save
_SEEDS = 128  # made at a time
_MANY = 4096  # values a statistic: a norm's noise, of which it reads the mean, takes local bits from here on


def _newest_node() -> int:
    """The sequence number that this thread has reached."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return -1 if node is None else node._sequence_nr()  # inference mode makes no nodes


def _is_parameter(t: Tensor) -> bool:
    """A parameter or a leaf that needs a gradient, or a view or cast of one."""
    if t.is_leaf:
        return t.requires_grad or isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter)
    return _ends_in_parameter(t.grad_fn)


def _ends_in_parameter(node: Any) -> bool:
    """Does an edge lead to AccumulateGrad through views and casts only?"""
    while node is not None and type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and type(node).__name__ == "AccumulateGrad"


def _parameter_below(t: Tensor) -> Tensor | None:
    """The parameter of which t is a cast, or a view of a cast; None where t is a view of the parameter itself."""
    node, casts = t.grad_fn, 0
    while node is not None and type(node).__name__ in _VIEWS:
        casts += type(node).__name__ == "ToCopyBackward0"
        # Views after the cast alone: they are t's strides.
        if casts and type(node).__name__ != "ToCopyBackward0":
            return None
        node = node.next_functions[0][0]
    if node is None or casts != 1 or type(node).__name__ != "AccumulateGrad":
        return None
    parameter: Tensor = getattr(node, "variable")
    plain = type(parameter) in (Tensor, nn.Parameter) and parameter.is_contiguous() and parameter.device == t.device
    return parameter if plain and t.untyped_storage().nbytes() == parameter.numel() * t.element_size() else None


def _restore(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if torch.is_grad_enabled():
        raise RuntimeError("[packing] a gradient of a gradient needs exact saves, got create_graph=True; leave packing() for it")
    return kept.restore()


_calling = threading.local()  # level: of the innermost context whose function call is under way


class Step(TorchFunctionMode):
    """What one thread's outermost context knows. A mode: its function is called for every torch function."""

    def __init__(self, owner: packing, number: int) -> None:
        super().__init__()
        self.owner, self.number = owner, number
        self.start = _newest_node()
        self.visited: set[int] = set()
        self.paths: list[str] = [""]
        self.seeds: dict[torch.device, tuple[Tensor, ...]] = {}
        self.saves = 0
        self.shared: dict[tuple, tuple[StorageWeakRef, weakref.ref[forms.Code]]] = {}
        self.most_shared = 256
        self.inputs: dict[int, StorageWeakRef] = {}
        self.tally = owner.budget.start(owner.meter) if owner.budget is not None and owner.meter is not None else None
        self.watch = None if self.tally is None else self.tally.watch
        self.place = ("", "")  # node and field at work
        self.level = 0  # place on the stack of modes

    def __enter__(self) -> Step:
        self.level = _len_torch_function_stack() + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, Step):  # what was saved in here is none of theirs
                mode.visited.update(range(self.start + 1, _newest_node() + 1))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        above = getattr(_calling, "level", 0)
        _calling.level = max(above, self.level)
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            _calling.level = above
        if above > self.level:  # an inner context's call, which packs it
            return out
        if isinstance(out, Tensor):
            if out.grad_fn is not None:
                self.visit(out.grad_fn)
        elif isinstance(out, (tuple, list)):
            for t in out:
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    self.visit(t.grad_fn)
        return out

    def visit(self, root: Any) -> None:
        visited, start = self.visited, self.start
        stack = [root]
        while stack:
            node = stack.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number <= start or number >= _NEVER or number in visited:
                continue
            visited.add(number)
            if self.watch is not None:
                self.watch.node(node, _ends_in_parameter)
            self.look(node)
            stack.extend([below for below, _ in node.next_functions])
        if len(visited) > 1 << 16:
            self.start = max(visited)
            visited.clear()

    def look(self, node: Any) -> None:
        name = type(node).__name__
        meter = self.owner.meter
        fields, rows = _fields_of(type(node), name)  # type: ignore[arg-type]  # a type is hashable
        if meter is None:
            for field, row in rows:
                self.keep(node, name, field, row)
            return
        for field, maybe in fields:
            self.keep(node, name, field, maybe)
        if not fields and name.startswith(_HIDDEN):
            meter.hidden[name] = meter.hidden.get(name, 0) + 1

    def keep(self, node: Any, name: str, field: str, row: Row | None) -> None:
        raw = getattr(node, "_raw_saved_" + field)
        if isinstance(raw, (tuple, list)):  # lists and custom functions have no rows
            for i, one in enumerate(raw):
                self.report(one, name, f"{field}[{i}]", "exact: unknown op")
            return
        if raw.unpack_hook is not None:
            return self.report(raw, name, field, "exact: hooked by others")
        t = raw.data
        if t is None:
            return None
        if row is None:
            if self.owner.meter is not None and not self.in_memory_anyway(node, field):
                self.report(raw, name, field, "exact: no row")
            return None
        small = t.nbytes < self.owner.min_bytes
        if small or (self.owner.filtered and not self.owner.wants(self.paths[-1], name, field)):
            if self.owner.meter is not None and not self.in_memory_anyway(node, field):
                self.report(raw, name, field, "exact: small" if small else "exact: excluded")
            return None
        try:
            t = getattr(node, "_saved_" + field)
        except RuntimeError:  # changed in place since: torch itself says so in backward
            return self.report(raw, name, field, "exact: changed in place")
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return self.report(raw, name, field, "exact: no plain tensor")
        if t.device.type not in _DEVICES:
            return self.report(raw, name, field, "exact: no kernels for this device")
        if any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride())):  # its storage may be smaller than a code
            return self.report(raw, name, field, "exact: expanded")
        if self.watch is not None:
            self.watch.operand(node, row, t.detach())
        if _is_parameter(t):
            return self.keep_cast(raw, name, field, t)
        if (row.weight and not t.requires_grad) or (self.inputs and t.untyped_storage()._cdata in self.inputs):
            return None
        self.place = (name, field)
        made = self.make(node, name, row, t.detach())
        if made is None:
            return self.report(raw, name, field, "exact: this case")
        form, text, bytes_ = made
        if self.owner.meter is not None:
            line = self.owner.meter.add(self.paths[-1], name, field, t, text, bytes_)
            if self.tally is not None:
                self.count(node, row, form, line, t.detach())
        raw.register_hooks(lambda _: form, _restore)
        return None

    def count(self, node: Any, row: Row, form: Any, line: Line, t: Tensor) -> None:
        """Under a budget: the coded field in the step's tally, and in what its backward is asked."""
        assert self.tally is not None
        key = self.tally.add(form, line)
        if key is not None and self.watch is not None:
            self.watch.field(key, node, row, form, t)
        self.tally.fit(lambda f: self.seed(f.device))

    def bits(self, role: str, least: str = "") -> int:
        """Bits of the field at work: its role's, or the budget's. least: the entry of the table's least bits, where it is not the role's."""
        given = self.owner.bits.for_role(role)
        if self.tally is None or given == 32:
            return given
        return self.tally.bits((self.paths[-1], *self.place), least_bits(least or role, given), given)

    def keep_cast(self, raw: Any, name: str, field: str, t: Tensor) -> None:
        """Parameters are in memory anyway; autocast's casts of them are not, and are made anew."""
        parameter = _parameter_below(t)
        if parameter is None:
            return
        form = forms.Cast(t, parameter)
        if self.owner.meter is not None:
            self.owner.meter.add(self.paths[-1], name, field, t, "cast again", 0)
        raw.register_hooks(lambda _: form, _restore)

    def in_memory_anyway(self, node: Any, field: str) -> bool:
        try:
            t = getattr(node, "_saved_" + field)
        except RuntimeError:
            return False
        if not isinstance(t, Tensor):
            return False
        return (_is_parameter(t) and _parameter_below(t) is None) or t.untyped_storage()._cdata in self.inputs

    def report(self, raw: Any, name: str, field: str, why: str) -> None:
        meter = self.owner.meter
        if meter is None or raw.unpack_hook is not None:
            return
        t = raw.data
        if isinstance(t, Tensor) and t.layout is torch.strided:
            meter.add(self.paths[-1], name, field, t, why, None)
            if self.tally is not None:
                self.tally.fit(lambda f: self.seed(f.device))

    def seed(self, device: torch.device) -> Tensor:
        part, place = divmod(self.saves, _SEEDS)
        if place == 0:
            self.seeds.clear()
        self.saves += 1
        if device not in self.seeds:
            first = mixed(self.owner.base_seed(), rank(), self.number, part)
            self.seeds[device] = torch.arange(first, first + _SEEDS, dtype=torch.int64, device=device).split(1)
        return self.seeds[device][place]

    def code(self, t: Tensor, bits: int, local: bool) -> tuple[forms.Code, int]:
        """A code of t and the bytes it adds. Readers whose noise stays in a parameter's gradient share one."""
        if not local:
            code = forms.Code(t, bits, self.seed(t.device))
            return code, code.nbytes
        reference = StorageWeakRef(t.untyped_storage())  # while it is held no other storage has this address
        key = (reference.cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version, bits if self.tally is None else 0)
        found = self.shared.get(key)
        if found and (shared := found[1]()) is not None:
            return shared, 0
        if len(self.shared) >= self.most_shared:
            self.shared = {k: v for k, v in self.shared.items() if v[1]() is not None}
            self.most_shared = 2 * len(self.shared) + 256
        code = forms.Code(t, bits, self.seed(t.device))
        self.shared[key] = (reference, weakref.ref(code))
        return code, code.nbytes

    def make(self, node: Any, name: str, row: Row, t: Tensor) -> tuple[Any, str, int] | None:
        """(kept form, its name, bytes it adds); None where this case has to stay exact."""
        for attribute, value in row.condition:
            if float(getattr(node, "_saved_" + attribute)) != value:
                return None
        if row.keep == "shape":
            return forms.Shape(t), "shape", 0
        if row.keep == "flags":
            if t.dtype is not torch.bool:
                return None
            form = forms.Mask(t, torch.bool)
            return form, "flags", form.nbytes
        if row.keep == "index":
            return self.make_index(node, row, t)
        if t.dtype not in _FLOATS:
            return None
        if row.keep == "mask":
            form = forms.Mask(t, t.dtype)
            return form, "mask", form.nbytes
        if row.keep == "inside":
            if name == "ClampBackward1":
                inside = forms.within(t, node._saved_min, node._saved_max)
            else:
                ends = None if name == "HardsigmoidBackward0" else (float(node._saved_min_val), float(node._saved_max_val))
                inside = forms.inside(t, ends)
            return None if inside is None else (inside, "mask", inside.nbytes)
        local = row.role == "local" or (row.edge >= 0 and _ends_in_parameter(node.next_functions[row.edge][0]))
        if row.keep == "normed":
            return self.make_normed(node, row, t)
        bits = self.bits("local" if local else row.role)
        if bits == 32:
            return None
        if row.keep == "slope":
            kind = forms.smooth_kind(node, name)
            if kind is not None:
                smooth = forms.SlopeCode(t, kind, bits, self.seed(t.device))
                return smooth, f"slope, {bits} bits", smooth.nbytes
            pair = forms.slope_of(node, name, t.dtype)
            if pair is None:
                return None
            slope = forms.Slope(pair[0](t.float()), t.dtype, bits, self.seed(t.device), pair[1])
            return slope, f"slope, {bits} bits", slope.nbytes
        if row.keep == "exp":
            powers = forms.Slope(torch.exp(t.float()), t.dtype, bits, self.seed(t.device), torch.log)
            return powers, f"exp, {bits} bits", powers.nbytes
        code, added = self.code(t, bits, local)
        return code, f"{code.bits} bits", added

    def make_normed(self, node: Any, row: Row, t: Tensor) -> tuple[Any, str, int] | None:
        scale = getattr(node, "_saved_" + row.scale)
        if scale.numel() == 0:  # running statistics: only the weight's gradient reads the input
            wanted = self.bits("local")
            if wanted == 32:
                return None
            code, added = self.code(t, wanted, True)
            return code, f"{code.bits} bits", added
        wanted = self.bits("local" if row.role == "local" and t.numel() // scale.numel() >= _MANY else "flow", "normed")
        if wanted == 32:
            return None
        if t.is_contiguous() and scale.dim() > 1 and t.numel() // scale.numel() % forms.BLOCK == 0:
            # Every block lies within one statistic's values: a code of these has the same noise, measured by their σ, as a code of the normed.
            code = forms.Code(t, wanted, self.seed(t.device))
            return code, f"{wanted} bits", code.nbytes
        mean = getattr(node, "_saved_" + row.mean).detach() if row.mean else None
        form = forms.Normed(t, mean, scale.detach(), wanted, self.seed(t.device))
        return form, f"{wanted} bits", form.nbytes

    def make_index(self, node: Any, row: Row, t: Tensor) -> tuple[Any, str, int] | None:
        if t.dtype is not torch.int64:
            return None
        if row.size:
            sizes = getattr(node, "_saved_" + row.size)
        else:
            whole = getattr(node, "_raw_saved_" + row.of)
            if whole.unpack_hook is not None:
                return None
            sizes = whole.data.shape
        if isinstance(sizes, int):
            places = sizes
        elif row.of and row.last:
            places = math.prod(sizes[-row.last :])
        else:
            dim = int(node._saved_dim)
            places = sizes[dim - (1 << 64) if dim >= 1 << 63 else dim] if len(sizes) else 1
        form = forms.Index(t, max(0, places - 1))
        return form, f"index, {form.bits} bits", form.nbytes


@functools.lru_cache(maxsize=4096)
def _fields_of(kind: type, name: str) -> tuple[tuple[tuple[str, Row | None], ...], tuple[tuple[str, Row], ...]]:
    """(every field, the fields with a row) of a kind of node."""
    rows = eager_rows().get(name, {})
    fields = [(k[len("_raw_saved_") :]) for k in dir(kind) if k.startswith("_raw_saved_")]
    every = tuple((f, rows.get(f)) for f in fields)
    # Indices are made before the tensor whose shape they need is let go.
    coded = sorted(((f, r) for f, r in every if r is not None), key=lambda pair: pair[1].keep != "index")
    return tuple(sorted(every, key=lambda pair: pair[1] is None or pair[1].keep != "index")), tuple(coded)
