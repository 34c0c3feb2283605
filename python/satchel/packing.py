"""Packing of unmodified models in eager mode: the options, the context, and the hooks of attach(). _step.py does the work."""

from __future__ import annotations

import fnmatch
import itertools
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from ._policy import Bits, checked_size, eager_rows
from ._step import Step, has_memory
from .budget import BITS, Budget, chosen_bits, parse_size
from .meter import Meter

__all__ = ["packing", "attach", "detach"]

_OPTIONS = ("preset", "budget", "refresh", "min_bytes", "include", "exclude", "seed", "meter")  # packing()'s that attach() takes too
_steps = itertools.count(1)  # of all contexts without a seed: one made anew for every step must not repeat its noise


class packing:
    """Packs what the functions called inside save for backward. Enter it around forward, as often as you like.

    bits: "local/flow/attention": of what only a parameter's gradient reads (inputs of linear and convolution layers, batch norms), of what
      the gradient flows through (activations' slopes, layer norms, products), and of attention's operands. 32 keeps a group exact.
    preset: a name in place of bits: "satchel" (2/4/8), "gact" (4 bits in the mean, by sensitivity), "int8", "lossless"; bits takes it too.
    budget: bytes ("4GiB", "512 MiB", a number) that a step keeps at most; bits then go where they save most variance of the gradient.
    refresh: steps between two looks at the gradients, for the budget's bits.
    min_bytes: smaller tensors stay exact.
    include, exclude: patterns (fnmatch) of module paths, nodes ("GeluBackward0") or fields ("MulBackward0.other"); paths need attach() or `model`.
    seed: of the rounding; torch.initial_seed() if None. torch's own generators are not touched. With a seed the steps of this object are
      numbered from 1 on, so use one object for a whole run.
    meter: fill `.meter` with what each step saved. It costs time.
    model: names the modules in the meter and for include and exclude.

    >>> with satchel.packing():
    ...     loss = model(x).square().mean()
    >>> loss.backward()
    """

    def __init__(
        self,
        bits: str | int | tuple[int, ...] | Bits = BITS,
        *,
        preset: str | None = None,
        budget: str | int | None = None,
        refresh: int = 100,
        min_bytes: int = 4096,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        seed: int | None = None,
        meter: bool = False,
        model: nn.Module | None = None,
        _checked: bool = False,
    ) -> None:
        for patterns in (include, exclude):
            if not isinstance(patterns, (list, tuple, set, frozenset)) or not all(isinstance(p, str) for p in patterns):
                raise ValueError(f"[packing] include and exclude must be lists of patterns, got {patterns!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"[packing] seed must be an integer or None, got {seed!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"[packing] model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(meter, bool):
            raise ValueError(f"[packing] meter must be True or False, got {meter!r}")
        if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
            raise ValueError(f"[packing] refresh must be a number of steps, 1 or more, got {refresh!r}")
        self.bits, mean = chosen_bits(bits, preset)
        limit = None if budget is None else parse_size(budget)
        mean = mean if limit is None else None
        self.budget: Budget | None = None if limit is None and mean is None else Budget(limit, mean, self.bits, refresh)
        self.min_bytes, self.include, self.exclude, self.seed = checked_size(min_bytes, "packing"), tuple(include), tuple(exclude), seed
        self.filtered = bool(self.include or self.exclude)
        self.meter: Meter | None = Meter() if meter or self.budget is not None else None
        self._numbers = _steps if seed is None else itertools.count(1)  # every step of every thread draws its own
        self._local = threading.local()
        self._wanted: dict[tuple[str, str, str], bool] = {}
        self._model = model
        self.attached = False  # by attach(), and no call beside the model's forward was seen
        if not _checked:
            _check_patterns((*self.include, *self.exclude), model, "packing")

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: getattr(self, name) for name in ("min_bytes", "include", "exclude", "seed")} | {"meter": self.meter is not None}
        if self.budget is not None:  # what a copy learns is its own
            options["refresh"] = self.budget.refresh
            options |= {"preset": "gact"} if self.budget.limit is None else {"budget": self.budget.limit}
        return _packing_from, (BITS if "preset" in options else self.bits, options)

    def bits_by_field(self) -> dict[str, int]:
        """Bits of each coded field in the newest step, under a budget or "gact"."""
        return self.budget.bits_by_field() if self.budget is not None else {}

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
    def step(self) -> Step | None:
        """This thread's state inside the context."""
        return getattr(self._local, "step", None)

    def __enter__(self) -> packing:
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            if self.meter is not None:
                self.meter.clear()
            self._local.step = step = Step(self, next(self._numbers))
            self._local.hooks = _name_modules(self._model, self) if self._model is not None else []
            step.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # exception type, exception, traceback
        if getattr(self._local, "depth", 0) == 0:
            raise RuntimeError("[packing] a context must be left in the thread that entered it, got one that this thread has not entered")
        self._local.depth -= 1
        if self._local.depth == 0:
            step, self._local.step = self._local.step, None
            step.__exit__(*error)
            for handle in self._local.hooks:
                handle.remove()
            if self.budget is not None and step.tally is not None and error[0] is None:
                self.budget.finish(step.tally)

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


def _packing_from(bits: Bits | str, options: dict[str, Any]) -> packing:
    return packing(bits, _checked=True, **options)


def _check_patterns(patterns: tuple[str, ...], model: nn.Module | None, op: str) -> None:
    """Throws where a pattern can only be one of paths and there are none; warns where it matches nothing."""
    if not patterns:
        return
    names = [name for node, fields in eager_rows().items() for name in (node, *(f"{node}.{field}" for field in fields))]
    names += [] if model is None else [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if "Backward" in pattern or any(fnmatch.fnmatchcase(name, pattern) for name in names):  # nodes without a row stay exact anyway
            continue
        if model is None:
            raise ValueError(f"[{op}] include and exclude of module paths must come with model=, or by attach(), got {pattern!r}")
        warnings.warn(f"[{op}] include and exclude must match a module's path, a node or a field, got {pattern!r}", RuntimeWarning, stacklevel=3)


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
                if type(t) is Tensor and t.is_leaf and has_memory(t):
                    reference = StorageWeakRef(t.untyped_storage())  # the caller or the model holds it
                    step.inputs[reference.cdata] = reference
        if self.owner.step is not None:
            self.owner.step.paths.append(self.path)
        elif self.owner.attached and module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not in backward
            self.owner.attached = False  # said once
            warnings.warn(
                f"[attach] packs in forward of the attached model, got a call of its part {self.path!r} outside it; attach that part instead",
                RuntimeWarning, stacklevel=3)  # fmt: skip


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
            try:
                self.owner.__exit__(None, None, None)
            finally:
                self.owner.entered_by(None)


def _name_modules(model: nn.Module, owner: packing) -> list[Any]:
    """Hooks that tell the context which module runs."""
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        handles.append(module.register_forward_pre_hook(_Before(owner, path, False), with_kwargs=True))
        handles.append(module.register_forward_hook(_After(owner, path, False), always_call=True))
    return handles


def attach(model: nn.Module, bits: str | int | tuple[int, ...] | Bits = BITS, **options: Any) -> packing:
    """Packs in every forward of `model` from now on; the options are packing()'s. Returns the packing, whose `.meter` may be read.

    The model's own code, its parameters and its state_dict stay as they are. The hooks are copied and stored with the model;
    detach() takes them off.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"[attach] model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"[attach] model must not be scripted, which takes no hooks, got {type(model).__name__}; use packing() around it")
    if any(_hooks_of(module) for module in model.modules()):
        raise ValueError("[attach] model must not be attached yet, got one that is; call detach() first")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"[attach] options must be {', '.join(_OPTIONS)}, got {name!r}")
    owner = packing(bits, _checked=True, **options)
    owner.attached = True
    _check_patterns((*owner.include, *owner.exclude), model, "attach")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # packed, but without its name
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
