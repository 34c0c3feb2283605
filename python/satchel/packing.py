"""Packing of unmodified models in eager mode.

After every torch function the autograd nodes it has made are walked, and what they saved is replaced by a packed form where policy.json has a
row for (node, field). A node is known by its sequence number, so each is looked at once.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Callable, Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from . import kept as forms
from ._policy import Bits, Row, checked_size, eager_rows
from .meter import Meter

__all__ = ["packing", "attach", "detach"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")
_OPTIONS = ("min_bytes", "include", "exclude", "seed", "meter")  # packing()'s that attach() takes too
_NEVER = 1 << 63  # sequence numbers from here on are those of AccumulateGrad
_VIEWS = frozenset(
    ["TBackward0", "ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ExpandBackward0",
     "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SliceBackward0", "SelectBackward0",
     "SplitBackward0", "ChunkBackward0", "AliasBackward0"]
)  # fmt: skip
_HIDDEN = ("CopySlices", "Foreach", "CppFunction", "CompiledFunctionBackward")  # nodes that do not show what they save
_SEEDS = 128  # made at a time
_MANY = 4096  # values a statistic: a norm's noise, of which it reads the mean, takes local bits from here on


def _mixed(*numbers: int) -> int:
    """A number of 62 bits that differs wherever one of the given does (splitmix64)."""
    state = 0
    for n in numbers:
        state = (state + n + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state >> 2


def _rank() -> int:
    """Ranks draw apart, or their errors would not average out."""
    return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0


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
        raise RuntimeError("[packing] a gradient of a gradient needs exact saves; leave packing() for create_graph=True")
    return kept.restore()


class _Step(TorchFunctionMode):
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

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
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
        if t.nbytes < self.owner.min_bytes:
            return self.report(raw, name, field, "exact: small")
        if self.owner.filtered and not self.owner.wants(self.paths[-1], name, field):
            return self.report(raw, name, field, "exact: excluded")
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
        if _is_parameter(t):
            return self.keep_cast(raw, name, field, t)
        if (row.weight and not t.requires_grad) or (self.inputs and t.untyped_storage()._cdata in self.inputs):
            return None
        made = self.make(node, name, row, t.detach())
        if made is None:
            return self.report(raw, name, field, "exact: this case")
        form, text, bytes_ = made
        if self.owner.meter is not None:
            self.owner.meter.add(self.paths[-1], name, field, t, text, bytes_)
        raw.register_hooks(lambda _: form, _restore)
        return None

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
        return isinstance(t, Tensor) and (_is_parameter(t) or t.untyped_storage()._cdata in self.inputs)

    def report(self, raw: Any, name: str, field: str, why: str) -> None:
        meter = self.owner.meter
        if meter is None or raw.unpack_hook is not None:
            return
        t = raw.data
        if isinstance(t, Tensor) and t.layout is torch.strided:
            meter.add(self.paths[-1], name, field, t, why, None)

    def seed(self, device: torch.device) -> Tensor:
        part, place = divmod(self.saves, _SEEDS)
        if place == 0:
            self.seeds.clear()
        self.saves += 1
        if device not in self.seeds:
            first = _mixed(self.owner.base_seed(), _rank(), self.number, part)
            self.seeds[device] = torch.arange(first, first + _SEEDS, dtype=torch.int64, device=device).split(1)
        return self.seeds[device][place]

    def code(self, t: Tensor, bits: int, local: bool) -> tuple[forms.Code, int]:
        """A code of t and the bytes it adds. Readers whose noise stays in a parameter's gradient share one."""
        if not local:
            code = forms.Code(t, bits, self.seed(t.device))
            return code, code.nbytes
        reference = StorageWeakRef(t.untyped_storage())  # while it is held no other storage has this address
        key = (reference.cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version, bits)
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
            inside = forms.inside(t, None if name == "HardsigmoidBackward0" else (float(node._saved_min_val), float(node._saved_max_val)))
            return None if inside is None else (inside, "mask", inside.nbytes)
        local = row.role == "local" or (row.edge >= 0 and _ends_in_parameter(node.next_functions[row.edge][0]))
        bits = self.owner.bits.for_role("local" if local else row.role)
        if row.keep == "normed":
            return self.make_normed(node, row, t)
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
        return code, f"{bits} bits", added

    def make_normed(self, node: Any, row: Row, t: Tensor) -> tuple[Any, str, int] | None:
        scale = getattr(node, "_saved_" + row.scale)
        bits = self.owner.bits
        if scale.numel() == 0:  # running statistics: only the weight's gradient reads the input
            if bits.local == 32:
                return None
            code, added = self.code(t, bits.local, True)
            return code, f"{bits.local} bits", added
        wanted = bits.local if row.role == "local" and t.numel() // scale.numel() >= _MANY else bits.flow
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
        whole = getattr(node, "_raw_saved_" + row.of)
        if whole.unpack_hook is not None or t.dtype is not torch.int64:
            return None
        height, width = whole.data.shape[-2:]
        form = forms.Index(t, max(0, height * width - 1))
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


class packing:
    """Packs what the functions called inside save for backward. Enter it around forward, as often as you like.

    bits: "local/flow/attention": of what only a parameter's gradient reads (inputs of linear and convolution layers, batch norms), of what
      the gradient flows through (activations' slopes, layer norms, products), and of attention's operands. 32 keeps a group exact.
    min_bytes: smaller tensors stay exact.
    include, exclude: patterns (fnmatch) of module paths, nodes ("GeluBackward0") or fields ("MulBackward0.other"); paths need attach() or `model`.
    seed: of the rounding; torch.initial_seed() if None. torch's own generators are not touched.
    meter: fill `.meter` with what each step saved. It costs time.
    model: names the modules in the meter and for include and exclude.

    >>> with satchel.packing():
    ...     loss = model(x).square().mean()
    >>> loss.backward()
    """

    def __init__(
        self,
        bits: str | int | tuple[int, ...] | Bits = "2/4/8",
        *,
        min_bytes: int = 4096,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        seed: int | None = None,
        meter: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        for patterns in (include, exclude):
            if not isinstance(patterns, (list, tuple, set, frozenset)) or not all(isinstance(p, str) for p in patterns):
                raise ValueError(f"[packing] include and exclude must be lists of patterns, got {patterns!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"[packing] seed must be an integer or None, got {seed!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"[packing] model must be a torch.nn.Module, got {type(model).__name__}")
        self.bits = Bits.of(bits)
        self.min_bytes, self.include, self.exclude, self.seed = checked_size(min_bytes, "packing"), tuple(include), tuple(exclude), seed
        self.filtered = bool(self.include or self.exclude)
        self.meter: Meter | None = Meter() if meter else None
        self._numbers = itertools.count(1)  # of steps; every thread draws its own
        self._local = threading.local()
        self._wanted: dict[tuple[str, str, str], bool] = {}
        self._model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return _packing_from, (self.bits, self.min_bytes, self.include, self.exclude, self.seed, self.meter is not None)

    def base_seed(self) -> int:
        return torch.initial_seed() if self.seed is None else self.seed

    def wants(self, path: str, node: str, field: str) -> bool:
        key = (path, node, field)
        if key not in self._wanted:
            names = (path, node, f"{node}.{field}")

            def matches(patterns: tuple[str, ...]) -> bool:
                return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)

            self._wanted[key] = (not self.include or matches(self.include)) and not matches(self.exclude)
        return self._wanted[key]

    @property
    def step(self) -> _Step | None:
        """This thread's state inside the context."""
        return getattr(self._local, "step", None)

    def __enter__(self) -> packing:
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            if self.meter is not None:
                self.meter.clear()
            self._local.step = step = _Step(self, next(self._numbers))
            self._local.hooks = _name_modules(self._model, self) if self._model is not None else []
            step.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._local.depth -= 1
        if self._local.depth == 0:
            step, self._local.step = self._local.step, None
            step.__exit__(*error)
            for handle in self._local.hooks:
                handle.remove()

    def leave_abandoned(self) -> None:
        """Takes this thread's step off where the forward that entered it is no longer running: torch calls no hook after KeyboardInterrupt."""
        entered = getattr(self._local, "entered", None)
        frame: FrameType | None = sys._getframe(1)
        if entered is None:
            return
        while frame is not None and frame is not entered:
            frame = frame.f_back
        if frame is entered:
            return
        step, self._local.step, self._local.depth, self._local.entered = self.step, None, 0, None
        above = []
        while _len_torch_function_stack() > 0 and (mode := _pop_mode()) is not step:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def entered_by(self, frame: Any) -> None:
        """The frame that the outermost step belongs to; None when it leaves."""
        if self._local.depth == (0 if frame is None else 1):
            self._local.entered = frame


def _packing_from(bits: Bits, min_bytes: int, include: tuple, exclude: tuple, seed: int | None, meter: bool) -> packing:
    return packing(bits, min_bytes=min_bytes, include=include, exclude=exclude, seed=seed, meter=meter)


class _Before:
    """A forward pre-hook: enters the context at the root, names the module below it."""

    def __init__(self, owner: packing, path: str, root: bool) -> None:
        self.owner, self.path, self.root = owner, path, root

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.root:
            self.owner.leave_abandoned()
            self.owner.__enter__()
            self.owner.entered_by(sys._getframe(1))
            step = self.owner.step
            assert step is not None
            for t in (*pytree.tree_leaves((args, kwargs)), *module.buffers()):
                if type(t) is Tensor and t.is_leaf and t.layout is torch.strided:
                    reference = StorageWeakRef(t.untyped_storage())  # the caller or the model holds it
                    step.inputs[reference.cdata] = reference
        if self.owner.step is not None:
            self.owner.step.paths.append(self.path)


class _After:
    """A forward hook: leaves what _Before has entered."""

    def __init__(self, owner: packing, path: str, root: bool) -> None:
        self.owner, self.path, self.root = owner, path, root

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        step = self.owner.step
        if step is not None and self.path in step.paths[1:]:
            while step.paths.pop() != self.path:
                pass
        if self.root and step is not None:
            self.owner.__exit__(None, None, None)
            self.owner.entered_by(None)


def _name_modules(model: nn.Module, owner: packing) -> list[Any]:
    """Hooks that tell the context which module runs."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_Before(owner, path, False), with_kwargs=True))
        handles.append(module.register_forward_hook(_After(owner, path, False), always_call=True))
    return handles


def attach(model: nn.Module, bits: str | int | tuple[int, ...] | Bits = "2/4/8", **options: Any) -> packing:
    """Packs in every forward of `model` from now on; the options are packing()'s. Returns the packing, whose `.meter` may be read.

    The model's own code, its parameters and its state_dict stay as they are. The hooks are copied and stored with the model;
    detach() takes them off.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"[attach] model must be a torch.nn.Module, got {type(model).__name__}")
    if any(_hooks_of(module) for module in model.modules()):
        raise ValueError("[attach] model must not be attached yet, got one that is; call detach() first")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"[attach] options must be {', '.join(_OPTIONS)}, got {name!r}")
    owner = packing(bits, **options)
    for path, module in model.named_modules():
        root = module is model
        module.register_forward_pre_hook(_Before(owner, path, root), with_kwargs=True, prepend=root)
        module.register_forward_hook(_After(owner, path, root), always_call=True)
    return owner


def _hooks_of(module: nn.Module) -> list[tuple[dict, int]]:
    tables = (module._forward_pre_hooks, module._forward_hooks)
    return [(table, key) for table in tables for key, hook in table.items() if isinstance(hook, (_Before, _After))]


def detach(model: nn.Module) -> nn.Module:
    """The model as it was before attach()."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"[detach] model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        for table, key in _hooks_of(module):
            del table[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
    return model
