"""What one thread's packing() does.

After every torch function the autograd nodes it has made are walked, and what they saved is replaced by a packed form where policy.json has a
row for (node, field). A node is known by its sequence number, so each is looked at once.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _len_torch_function_stack

from . import kept as forms
from ._policy import Row, eager_rows, least_bits
from ._seeds import mixed, rank

if TYPE_CHECKING:
    from .packing import packing

__all__ = ["Step", "has_memory"]

_Made = tuple[Any, str, bool]  # a kept form, words for the meter, and whether another save has counted its bytes
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_NEVER = 1 << 63  # sequence numbers from here on are those of AccumulateGrad
_VIEWS = frozenset(
    ["TBackward0", "ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0",
     "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SliceBackward0", "SelectBackward0",
     "SplitBackward0", "ChunkBackward0", "AliasBackward0"]
)  # fmt: skip
_HIDDEN = ("CopySlices", "Foreach", "CppFunction", "CompiledFunctionBackward")  # nodes that do not show what they save
_SEEDS = 128  # made at a time
_MANY = 4096  # values a statistic: a norm's noise, of which it reads the mean, takes local bits from here on


def _newest_node() -> int:
    """The sequence number that this thread has reached."""
    with torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    return -1 if node is None else node._sequence_nr()  # inference mode makes no nodes


def _is_parameter(t: Tensor) -> bool:
    """A parameter or a leaf that needs a gradient, or a view or cast of one."""
    if t.is_leaf:
        return t.requires_grad or isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter)
    return _ends_in_parameter(t.grad_fn)


@functools.lru_cache(maxsize=4096)
def _way(kind: type) -> str:
    """What a node of this kind is on the way to a parameter."""
    name = kind.__name__  # torch makes the text anew each time
    return "cast" if name == "ToCopyBackward0" else "view" if name in _VIEWS else "parameter" if name == "AccumulateGrad" else ""


def _ends_in_parameter(node: Any) -> bool:
    """Does an edge lead to AccumulateGrad through views and casts only?"""
    while (way := _way(type(node))) and way != "parameter":  # type: ignore[arg-type]  # a type is hashable
        node = node.next_functions[0][0]
    return way == "parameter"


def _parameter_below(t: Tensor) -> Tensor | None:
    """The parameter of which t is a cast, or a view of a cast; None where t is a view of the parameter itself."""
    node, casts = t.grad_fn, 0
    while (way := _way(type(node))) and way != "parameter":  # type: ignore[arg-type]
        if way == "cast":
            casts += 1
        elif casts:  # views after the cast alone: they are t's strides
            return None
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    if casts != 1 or way != "parameter":
        return None
    parameter: Tensor = getattr(node, "variable")
    plain = type(parameter) in _PLAIN and parameter.is_contiguous() and parameter.device == t.device
    return parameter if plain and t.untyped_storage().nbytes() == parameter.numel() * t.element_size() else None


def has_memory(t: Tensor) -> bool:
    """Sparse and MKL-DNN's tensors and those of torch.func have no storage, and strided nested ones no strides."""
    return t.layout is torch.strided and not t.is_nested and not _is_wrapped(t)


def _why_exact(t: Tensor) -> str:
    """Why no tensor like this is coded, whatever saves it; nothing where it may be."""
    if type(t) is Tensor and (t.is_cuda or t.is_cpu) and has_memory(t) and 0 not in t.stride():
        return ""  # as nearly all are
    if type(t) not in _PLAIN or not has_memory(t):
        return "exact: no plain tensor"
    if not (t.is_cuda or t.is_cpu or t.is_meta):
        return "exact: no kernels for this device"
    if 0 in t.stride() and any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride())):
        return "exact: expanded"  # its storage may be smaller than a code
    return ""


def _restore(kept: Any) -> Tensor:
    if torch.is_grad_enabled():
        raise RuntimeError("[packing] a gradient of a gradient needs exact saves, got create_graph=True; leave packing() for it")
    return kept.restore()


_calling = threading.local()  # level: of the innermost context whose function call is under way


class Step(TorchFunctionMode):
    """What one thread's outermost context knows. A mode: its function is called for every torch function."""

    def __init__(self, owner: packing, number: int) -> None:
        super().__init__()
        self.owner, self.number = owner, number
        self.meter, self.min_bytes, self.filtered = owner.meter, owner.min_bytes, owner.filtered
        self.given = {role: owner.bits.for_role(role) for role in ("local", "flow", "attention")}
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
        if is_compiling():
            return func(*args, **(kwargs or {}))
        level, above = self.level, getattr(_calling, "level", 0)
        _calling.level = above if above > level else level
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            _calling.level = above
        if above > level:  # an inner context's call, which packs it
            return out
        if isinstance(out, Tensor):
            if (node := out.grad_fn) is not None:
                self.visit(node)
        elif isinstance(out, (tuple, list)):
            for t in out:
                if isinstance(t, Tensor) and (node := t.grad_fn) is not None:
                    self.visit(node)
        return out

    def visit(self, root: Any) -> None:
        """Looks at the nodes from this one down to those that were there before."""
        visited, start = self.visited, self.start
        if root._sequence_nr() in visited:
            return
        stack = [root]
        while stack:
            node = stack.pop()
            number = node._sequence_nr()
            if number in visited or number <= start or number >= _NEVER:
                continue
            visited.add(number)
            below = node.next_functions
            self.look(node, below)
            for one, _ in below:
                if one is not None and one._sequence_nr() not in visited:  # most are: other functions made them
                    stack.append(one)
        if len(visited) > 1 << 16:
            self.start = max(visited)
            visited.clear()

    def look(self, node: Any, below: Any) -> None:
        """below: the node's next_functions, which torch makes anew each time it is asked."""
        fields = _fields_of(type(node))  # type: ignore[arg-type]
        if self.meter is None:
            for field in fields.coded:
                self.keep(node, below, field)
            return
        if self.watch is not None:
            self.watch.node(node, _ends_in_parameter)
        for field in fields.every:
            if field.row is None:
                self.report_unknown(node, field)
            else:
                self.keep(node, below, field)
        if fields.hidden:
            self.meter.hidden[fields.name] = self.meter.hidden.get(fields.name, 0) + 1

    def keep(self, node: Any, below: Any, field: _Field) -> None:
        """Replaces what the node saves by its packed form. This runs for every save: each line of it is seen in a step's time."""
        raw = field.raw(node)
        if raw.unpack_hook is not None:  # others hold it
            return
        try:
            t = field.saved(node)
        except RuntimeError:  # changed in place since: torch itself says so in backward
            self.report_exact(raw, node, field, not raw.data.is_sparse and raw.data.nbytes < self.min_bytes, "exact: changed in place")
            return
        if t is None:
            return
        small = not t.is_sparse and t.nbytes < self.min_bytes  # torch has no nbytes of a sparse tensor
        why = "exact: small" if small else _why_exact(t)
        if why or (self.filtered and not self.owner.wants(self.paths[-1], field.node, field.name)):
            self.report_exact(raw, node, field, small, why)
            return
        row = field.row
        if self.watch is not None:
            self.watch.operand(node, row, t.detach())
        if row.weight and not t.requires_grad:
            return
        if _is_parameter(t):
            self.keep_cast(raw, field, t)
            return
        if self.inputs and t.untyped_storage()._cdata in self.inputs:
            return
        made = self.make(node, below, field, t.detach())
        if made is None:
            self.report(raw, field.node, field.name, "exact: this case")
            return
        form = made[0]
        if self.meter is not None:
            self.count(node, field, made, t)
        raw.register_hooks(lambda _: form, _restore)

    def count(self, node: Any, field: _Field, made: _Made, t: Tensor) -> None:
        """The field in the meter, and under a budget in the step's tally and in what its backward is asked."""
        assert self.meter is not None
        form, words, shared = made
        text = words if words in ("mask", "flags", "shape") else f"{words}{form.bits} bits"
        line = self.meter.add(self.paths[-1], field.node, field.name, t, text, 0 if shared else form.nbytes)
        if self.tally is None:
            return
        key = self.tally.add(form.code if isinstance(form, forms.Reread) else form, line)
        if key is not None and self.watch is not None:
            self.watch.field(key, node, field.row, form, t.detach())
        self.tally.fit(lambda f: self.seed(f.device))

    def bits(self, field: _Field, role: str, least: str = "") -> int:
        """Bits of a field: its role's, or the budget's. least: the entry of the table's least bits, where it is not the role's."""
        given = self.given[role]
        if self.tally is None or given == 32:
            return given
        return self.tally.bits((self.paths[-1], field.node, field.name), least_bits(least or role, given), given)

    def keep_cast(self, raw: Any, field: _Field, t: Tensor) -> None:
        """Parameters are in memory anyway; autocast's casts of them are not, and are made anew."""
        parameter = _parameter_below(t)
        if parameter is None:
            return
        form = forms.Cast(t, parameter)
        if self.meter is not None:
            self.meter.add(self.paths[-1], field.node, field.name, t, "cast again", 0)
        raw.register_hooks(lambda _: form, _restore)

    def in_memory_anyway(self, node: Any, field: _Field) -> bool:
        try:
            t = field.saved(node)
        except RuntimeError:
            return False
        if not isinstance(t, Tensor) or not has_memory(t):
            return False
        return (_is_parameter(t) and _parameter_below(t) is None) or t.untyped_storage()._cdata in self.inputs

    def report_unknown(self, node: Any, field: _Field) -> None:
        """A field without a row. Lists and custom functions have none."""
        raw = field.raw(node)
        if isinstance(raw, (tuple, list)):
            for i, one in enumerate(raw):
                self.report(one, field.node, f"{field.name}[{i}]", "exact: unknown op")
        elif raw.unpack_hook is None and raw.data is not None and not self.in_memory_anyway(node, field):
            self.report(raw, field.node, field.name, "exact: no row")

    def report_exact(self, raw: Any, node: Any, field: _Field, small: bool, why: str) -> None:
        """A field with a row that stays as it is: because it is small or excluded, or else for the reason given."""
        if self.meter is None:
            return
        if small or (self.filtered and not self.owner.wants(self.paths[-1], field.node, field.name)):
            if self.in_memory_anyway(node, field):
                return
            why = "exact: small" if small else "exact: excluded"
        self.report(raw, field.node, field.name, why)

    def report(self, raw: Any, name: str, field: str, why: str) -> None:
        if self.meter is None or raw.unpack_hook is not None:
            return
        t = raw.data
        if isinstance(t, Tensor) and has_memory(t):
            self.meter.add(self.paths[-1], name, field, t, why, None)
            if self.tally is not None:
                self.tally.fit(lambda f: self.seed(f.device))

    def seed(self, device: torch.device) -> Tensor:
        place = self.saves % _SEEDS
        if place == 0:
            self.seeds.clear()
        seeds = self.seeds.get(device)
        if seeds is None:
            first = mixed(self.owner.base_seed(), rank(), self.number, self.saves // _SEEDS)
            seeds = self.seeds[device] = torch.arange(first, first + _SEEDS, dtype=torch.int64, device=device).unbind()
        self.saves += 1
        return seeds[place]

    def code(self, t: Tensor, bits: int, local: bool, result: bool = False) -> _Made:
        """A code of t. Readers whose noise stays in a parameter's gradient share one.

        They also read the code that a node has made of its own result, in more bits: their gradients are made before that node reads it, so
        that no product has one draw twice.
        """
        if not local and not result:
            return forms.Code(t, bits, self.seed(t.device)), "", False
        reference = StorageWeakRef(t.untyped_storage())  # while it is held no other storage has this address
        like = forms.code_layout(t.shape, t.stride(), t.dtype, bits)
        key = (reference.cdata, t.storage_offset(), t._version, like.covers)
        if local and (found := self.shared.get(key)) and (shared := found[1]()) is not None and (shared.bits >= bits or self.tally is not None):
            same = shared.like.shape == like.shape and shared.like.given == like.given
            return (shared if same else forms.Reread(shared, t)), "", True
        if len(self.shared) >= self.most_shared:
            self.shared = {k: v for k, v in self.shared.items() if v[1]() is not None}
            self.most_shared = 2 * len(self.shared) + 256
        code = forms.Code(t, bits, self.seed(t.device), "bf16", like)
        self.shared[key] = (reference, weakref.ref(code))
        return code, "", False

    # ---- one for each way to keep of policy.json; None where this case has to stay exact --------------------------------------------------

    def make(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        for attribute, value in field.row.condition:
            if float(getattr(node, "_saved_" + attribute)) != value:
                return None
        if field.floats and t.dtype not in _FLOATS:
            return None
        return field.make(self, node, below, field, t)

    def make_code(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        row = field.row
        local = row.role == "local" or (row.edge >= 0 and _ends_in_parameter(below[row.edge][0]))
        bits = self.bits(field, "local" if local else row.role)
        return None if bits == 32 else self.code(t, bits, local, field.result)

    def make_nothing(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        return None

    def make_shape(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        return forms.Shape(t), "shape", False

    def make_flags(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        return (forms.Mask(t, torch.bool), "flags", False) if t.dtype is torch.bool else None

    def make_mask(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        return forms.Mask(t, t.dtype), "mask", False

    def make_inside(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        if field.node == "ClampBackward1":
            inside = forms.within(t, node._saved_min, node._saved_max)
        else:
            ends = None if field.node == "HardsigmoidBackward0" else (float(node._saved_min_val), float(node._saved_max_val))
            inside = forms.inside(t, ends)
        return None if inside is None else (inside, "mask", False)

    def make_slope(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        bits = self.bits(field, field.row.role)
        if bits == 32:
            return None
        kind = forms.smooth_kind(node, field.node)
        if kind is not None:
            return forms.SlopeCode(t, kind, bits, self.seed(t.device)), "slope, ", False
        pair = forms.slope_of(node, field.node, t.dtype)
        if pair is None:
            return None
        return forms.Slope(pair[0](t), t.dtype, bits, self.seed(t.device), pair[1]), "slope, ", False

    def make_exp(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        bits = self.bits(field, field.row.role)
        if bits == 32:
            return None
        if t.is_cuda and t.dtype is torch.float32:  # torch's exp() is the faster one on the CPU
            return forms.Exp(t, bits, self.seed(t.device)), "exp, ", False
        return forms.Slope(torch.exp(t.float()), t.dtype, bits, self.seed(t.device), Tensor.log_), "exp, ", False

    def make_normed(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        row = field.row
        scale = field.scale(node)
        if scale.numel() == 0:  # running statistics: only the weight's gradient reads the input
            wanted = self.bits(field, "local")
            return None if wanted == 32 else self.code(t, wanted, True)
        values = t.numel() // scale.numel()
        wanted = self.bits(field, "local" if row.role == "local" and values >= _MANY else "flow", "normed")
        if wanted == 32:
            return None
        if t.is_contiguous() and scale.dim() > 1 and values % forms.BLOCK == 0:
            # Every block lies within one statistic's values: a code of these has the same noise, measured by their σ, as a code of the normed.
            return forms.Code(t, wanted, self.seed(t.device)), "", False
        mean = getattr(node, "_saved_" + row.mean).detach() if row.mean else None
        return forms.Normed(t, mean, scale.detach(), wanted, self.seed(t.device)), "", False

    def make_index(self, node: Any, below: Any, field: _Field, t: Tensor) -> _Made | None:
        if t.dtype is not torch.int64:
            return None
        row = field.row
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
        return forms.Index(t, max(0, places - 1)), "index, ", False


class _Field:
    """A field that a kind of node may save. What the table says of it, and ways to it that need no text put together."""

    __slots__ = ("node", "name", "row", "raw", "saved", "scale", "floats", "result", "make")
    row: Row  # None where the table has none

    def __init__(self, node: str, name: str, row: Row | None) -> None:
        self.node, self.name, self.row = node, name, row  # type: ignore[assignment]
        self.raw, self.saved = operator.attrgetter("_raw_saved_" + name), operator.attrgetter("_saved_" + name)
        self.scale = operator.attrgetter("_saved_" + row.scale if row is not None else "")
        self.floats = row is not None and row.keep not in ("shape", "flags", "index")
        self.result = name in ("result", "output")  # what the node itself has made
        self.make: Callable[..., _Made | None] = getattr(Step, "make_" + row.keep) if row is not None else Step.make_nothing


class _Fields(NamedTuple):
    """Of a kind of node."""

    name: str
    every: tuple[_Field, ...]
    coded: tuple[_Field, ...]  # those with a row
    hidden: bool  # does not show what it saves


@functools.lru_cache(maxsize=4096)
def _fields_of(kind: type) -> _Fields:
    name = kind.__name__
    rows = eager_rows().get(name, {})
    every = [_Field(name, k[len("_raw_saved_") :], rows.get(k[len("_raw_saved_") :])) for k in dir(kind) if k.startswith("_raw_saved_")]
    # Indices are made before the tensor whose shape they need is let go.
    every.sort(key=lambda field: field.row is None or field.row.keep != "index")
    return _Fields(name, tuple(every), tuple(f for f in every if f.row is not None), not every and name.startswith(_HIDDEN))
