"""satchel.compile(): torch.compile with Satchel's passes, and under a budget a first step that is watched."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from typing import Any, Callable, Iterable

import torch
from torch._dynamo.eval_frame import remove_from_cache

from ._policy import Bits
from .budget import chosen_bits, parse_size
from .graph_budget import Plan, Split
from .graph_choice import FRAME
from .graph_layers import LayerPass
from .graph_pass import PackPass

__all__ = ["compile"]


def compile(  # noqa: A001
    model: Any,
    bits: str | int | tuple[int, ...] | Bits = "2/4/8",
    *,
    preset: str | None = None,
    budget: str | int | None = None,
    min_bytes: int = 16384,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **arguments: Any,
) -> Any:
    """torch.compile(model), with what crosses from forward to backward packed. The other arguments are torch.compile's.

    bits, min_bytes, include, exclude: as PackPass has them. preset: a name in place of bits, as packing() takes it.
    budget: bytes ("4GiB", "512 MiB", a number) that a call of the model keeps at most, codes and what stays exact; bits then go where they take most
      variance off the gradient. The first training step runs op by op and measures that; then the model is compiled. "gact" does so too.

    Returns what torch.compile returns; its PackPass, with the report of the newest graph, is `satchel_pass` of it. A model may be compiled in
    parts, block by block: what one part hands to the next is packed too, and a budget is the part's own.
    """
    _check(model, options, mode, arguments)
    given_bits, mean = chosen_bits(bits, preset, "compile")
    limit = None if budget is None else parse_size(budget, "compile")
    plan = Plan(limit, mean if limit is None else None, given_bits) if limit is not None or mean is not None else None
    for name in ("joint_custom_post_pass", "pre_grad_custom_pass", *(["custom_partitioner_fn"] if plan is not None else [])):
        if (options or {}).get(name) is not None:
            raise ValueError(f"[compile] options must leave {name} to Satchel, got another pass")
    pack = PackPass(given_bits, min_bytes=min_bytes, include=include, exclude=exclude, model=model)
    pack.marked, pack.plan = True, plan
    given = dict(torch._inductor.list_mode_options(mode)) if mode is not None else {}
    given.update(options or {})
    layers = LayerPass(pack.bits, pack.min_bytes, pack.choice, plan)
    given.update(joint_custom_post_pass=pack, pre_grad_custom_pass=layers)
    if plan is not None:
        given["custom_partitioner_fn"] = Split(plan, pack._tell)
    try:
        compiled = torch.compile(model, options=dict(given), **arguments)
    except RuntimeError as error:  # of a type that an option cannot have
        raise ValueError(f"[compile] options must be torch.compile's, got {options!r}: {str(error).splitlines()[0]}") from None
    if compiled is model:  # as disable=True gives it
        return _with_pass(compiled, pack)
    if plan is not None:
        compiled = _watched(compiled, model, plan, given, arguments)
    if isinstance(compiled, torch.nn.Module):  # a copy, and one from a file, is compiled anew: with modules, a plan and graphs of its own
        chosen = {"preset": preset, "budget": budget, "min_bytes": min_bytes, "include": include, "exclude": exclude, "options": options, "mode": mode}
        compiled.__dict__["__reduce_ex__"] = lambda protocol: (_compiled_again, (model, bits, {**chosen, **arguments}))
    return _with_pass(compiled, pack)


def _check(model: Any, options: Any, mode: Any, arguments: dict[str, Any]) -> None:
    """Of what torch.compile would refuse later, in words of its own, or take and leave unpacked."""
    if not callable(model) or isinstance(model, type):
        raise ValueError(f"[compile] model must be a module or a function, got {model!r}")
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise ValueError(f"[compile] model must not be scripted, which torch.compile leaves alone, got {type(model).__name__}")
    for name in ("refresh", "seed", "meter"):
        if name in arguments:
            raise ValueError(f"[compile] {name} must be left to packing() and attach(), got {arguments[name]!r}")
    known = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "mode", "options")]
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"[compile] options must be Satchel's, or torch.compile's {', '.join(known)}, got {name!r}")
        if name in ("fullgraph", "dynamic", "disable") and not (isinstance(value, bool) or name == "dynamic" and value is None):
            raise ValueError(f"[compile] {name} must be True or False{', or None' * (name == 'dynamic')}, got {value!r}")
    if not isinstance(backend := arguments.get("backend", "inductor"), str) or backend != "inductor":
        raise ValueError(f"[compile] backend must be inductor, got {backend!r}")
    modes = torch._inductor.list_mode_options()
    if mode is not None and (not isinstance(mode, str) or mode not in modes):
        raise ValueError(f"[compile] mode must be one of {', '.join(modes)}, got {mode!r}")
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"[compile] options must be a dict, got {options!r}")
    every = {*torch._inductor.list_options(), "guard_filter_fn"}
    for option in options or ():
        if not isinstance(option, str) or option.replace("-", "_") not in every:
            near = difflib.get_close_matches(str(option), every, 1)
            raise ValueError(f"[compile] options must be Inductor's, got {option!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _with_pass(compiled: Any, pack: PackPass) -> Any:
    compiled.__dict__["satchel_pass"] = pack  # a compiled module would hand an attribute on to the model
    return compiled


def _compiled_again(model: Any, bits: Any, options: dict[str, Any]) -> Any:
    return compile(model, bits, **options)


_frames = itertools.count()


def _own_frame(f: Any) -> Callable[..., Any]:
    """f behind a code object of its own. Dynamo keeps its graphs by code object, and few for each: blocks of one class would share them."""

    def frame(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    frame.__code__ = frame.__code__.replace(co_name=f"{FRAME}{next(_frames)}")
    return frame


def _watched(compiled: Any, model: Any, plan: Plan, given: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Calls that record gradients go to the plan's own backend until it has seen a backward; then, and without gradients, to Inductor's."""
    filters = {name: given[name] for name in given if name == "guard_filter_fn"}  # Dynamo's; the other options are Inductor's
    patches = {name.replace("-", "_"): value for name, value in given.items() if name not in filters}
    rest = {name: value for name, value in arguments.items() if name != "backend"}
    later = torch.compile(_own_frame(model), options=dict(given), **rest)
    watched: dict[int, tuple[Any, Any]] = {}  # what is compiled, and compiled, by the plan's bits of norms, which make other graphs

    @functools.wraps(model.forward if isinstance(model, torch.nn.Module) else model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return later(*args, **kwargs)
        if plan.learn():
            while watched:  # graphs that nobody runs again
                remove_from_cache(watched.popitem()[1][0])
        if not plan.watching or not torch.is_grad_enabled():
            return later(*args, **kwargs)
        norm_bits = plan.norm_bits
        if norm_bits not in watched:
            frame = _own_frame(model)
            watched[norm_bits] = frame, torch.compile(frame, backend=plan.backend(patches), options=filters or None, **rest)
        run = watched[norm_bits][1]
        with plan.watched():
            return run(*args, **kwargs)

    if not isinstance(model, torch.nn.Module):
        return call
    compiled.forward = call
    return compiled
