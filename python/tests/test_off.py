"""What Satchel costs where it is not used, and that nothing is left of it: no hook and no mode before a context, after one, or after detach()."""

import contextlib
import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import satchel


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))


def installed():
    """Everything by which a library could run code in somebody's forward or backward."""
    found = {
        "function modes": _len_torch_function_stack(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False) or 0,
    }
    for name, table in vars(modules).items():
        if name.startswith("_global_") and name.endswith("hooks") and isinstance(table, dict):
            found[name] = len(table)
    return {name: count for name, count in found.items() if count}


def hooks_of(loss):
    """Saved fields below a loss that somebody has hooked."""
    found, stack = [], [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        stack.extend(below for below, _ in node.next_functions)
        for name in dir(node):
            raw = getattr(node, name) if name.startswith("_raw_saved_") else None
            found += [name] if getattr(raw, "unpack_hook", None) is not None else []
    return found


CHECK = """
import torch, torch.nn as nn
from torch.nn.modules import module
before = (nn.Module.__call__, nn.Module.__setattr__, nn.Linear.forward, torch.Tensor.backward, torch.autograd.backward, torch.nn.functional.linear,
          torch.compile, dict(vars(module)), torch.get_rng_state().tolist())
import satchel
after = (nn.Module.__call__, nn.Module.__setattr__, nn.Linear.forward, torch.Tensor.backward, torch.autograd.backward, torch.nn.functional.linear,
         torch.compile, dict(vars(module)), torch.get_rng_state().tolist())
assert before == after
"""


def test_import_changes_nothing():
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_nothing_is_installed_outside_a_context():
    model, x = net(), torch.randn(64, 64)
    assert not installed() and not hooks_of(model(x).sum())
    with satchel.packing(model=model):
        assert installed() == {"function modes": 1} and hooks_of(model(x).sum())
    assert not installed() and not hooks_of(model(x).sum())
    satchel.attach(model)
    assert not installed() and hooks_of(model(x).sum())
    assert not installed()
    satchel.detach(model)
    assert not hooks_of(model(x).sum()) and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with contextlib.suppress(ValueError), satchel.packing():
        raise ValueError
    assert not installed()


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive():
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter, *(kind for kind in vars(satchel.kept).values() if isinstance(kind, type)))
    return sum(1 for o in gc.get_objects() if type(o) in kinds)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("way", ["packing", "one packing", "attach"])
def test_a_thousand_steps_leave_nothing(way):
    model, x, y = net(), torch.randn(64, 64), torch.randint(0, 10, (64,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    packing = satchel.attach(model, meter=True) if way == "attach" else satchel.packing(meter=way == "packing", min_bytes=0)
    counts = {}
    with packing if way == "one packing" else contextlib.nullcontext():
        for step in range(1101):
            with packing if way == "packing" else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
            if step in (500, 1100):  # by 500 the allocators have settled: before, memory in parts grows by up to 4 MiB once
                counts[step] = alive(), resident()
    assert counts[1100][0] <= counts[500][0], counts
    assert counts[1100][1] <= counts[500][1] + (2 << 20), counts  # one saved tensor of 32 KiB a step would be 19 MiB


def test_a_scaler_sees_an_overflow():
    """A value that is not finite is not finite after its code either, so the scaler leaves the step out and halves its scale."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(64, 64)
    satchel.attach(model, min_bytes=0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**60)
    weight, scales = model[0].weight.detach().clone(), []
    for _ in range(48):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), torch.zeros(64, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if scales[-1] < (2.0**60 if len(scales) == 1 else scales[-2]):
            assert torch.equal(model[0].weight, weight), "a step was made with a gradient that is not finite"
        else:
            break
    assert scales[-1] < 2.0**30 and not torch.equal(model[0].weight, weight) and bool(model[0].weight.isfinite().all())


def test_import_leaves_torchs_compiler_alone():
    """torch._dynamo and what it needs take longer to import than torch: they come with the first use of compile()."""
    program = "import sys, torch, satchel; print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"], done.stdout
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        satchel.nothing
    assert {"compile", "PackPass"} <= set(dir(satchel))
