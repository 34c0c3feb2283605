#!/usr/bin/env python3
"""Variance of the gradient with even bits and with the same bytes as a budget, on two small models after 20 steps of training.

By packing() and by compile(). What compile() makes runs op by op, for Inductor's own compilation takes a minute a graph on a CPU.
"""
import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import satchel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).split(x.shape[-1], -1)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(blocks=3):
    model = nn.Sequential(nn.Embedding(64, 64), *[Block(64, 4) for _ in range(blocks)], nn.LayerNorm(64), nn.Linear(64, 64))
    text = torch.randint(0, 64, (16, 65))
    return model, (text,), lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def convolutions():
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    last = [nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    model = nn.Sequential(*block(3, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), *last)
    x, y = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    return model, (x, y), lambda model: F.cross_entropy(model(x), y)


@contextlib.contextmanager
def op_by_op():
    """torch.compile with all of its passes, the partitioner and the options, but each op of the two graphs run by itself."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def inner(module, inputs, **options):
        def run(args):
            result = module.forward(*args)
            args.clear()
            return result

        run._boxed_call = True
        return run

    def compiler(self, module, inputs):
        with config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=inner, config_patches=self.config)

    torch._dynamo.reset()
    with mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", compiler), mock.patch("satchel.graph_budget.compile_fx_inner", inner):
        yield


def kept_bytes(loss, model, batch):
    """What all compiled functions below a loss keep, but for parameters, buffers and the batch."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    storages, seen, stack = {}, set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [below for below, _ in node.next_functions]
        for t in node.saved_tensors if "CompiledFunction" in type(node).__name__ else ():
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(size for place, size in storages.items() if place not in own)


def gradient(model, f, context=None, called=None):
    if context is None:
        loss = f(model if called is None else called)
    else:
        with context:
            loss = f(model if called is None else called)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def error(model, f, context=None, called=None, draws=8):
    """‖ĝ − g‖²/‖g‖² in the mean, once the bits have been chosen. By a context, or of a compiled model."""
    exact = gradient(model, f)
    for _ in range(2):
        gradient(model, f, context, called)
    return float(sum((gradient(model, f, context, called) - exact).square().sum() for _ in range(draws)) / draws / exact.square().sum())


def compiled_error(model, batch, f, *bits, **options):
    """… and the bytes that are kept."""
    called = satchel.compile(model, *bits, min_bytes=1024, **options)
    off = error(model, f, called=called)
    return off, kept_bytes(f(called), model, batch)


def trained(make):
    model, batch, f = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        f(model).backward()
        optimizer.step()
    return model, batch, f


if __name__ == "__main__":
    torch.manual_seed(0)
    print("| model | bits | packing: KiB | even bits | budget | ratio | compile: KiB | even bits | budget | ratio |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, make in (("GPT", gpt), ("convolutions", convolutions)):
        model, batch, f = trained(make)
        for bits in ("2/2/8", "2/4/8", "3/4/8", "4/4/8"):
            even = satchel.packing(bits, meter=True, model=model, min_bytes=1024)
            off = error(model, f, even)
            shared = satchel.packing(bits, budget=even.meter.after, model=model, min_bytes=1024)
            less = error(model, f, shared)
            assert shared.meter.after <= even.meter.after
            line = f"| {name} | {bits} | {even.meter.after / 1024:.0f} | {off:.3f} | {less:.3f} | {off / less:.1f} |"
            with op_by_op():
                off, room = compiled_error(model, batch, f, bits)
                less, kept = compiled_error(model, batch, f, bits, budget=room)
            assert kept <= room
            print(line, f"{room / 1024:.0f} | {off:.3f} | {less:.3f} | {off / less:.1f} |", flush=True)
        gact = satchel.packing("gact", model=model, min_bytes=1024)
        less = error(model, f, gact)
        with op_by_op():
            off, kept = compiled_error(model, batch, f, "gact")
        print(f"| {name} | `gact` | {gact.meter.after / 1024:.0f} | | {less:.3f} | | {kept / 1024:.0f} | | {off:.3f} | |", flush=True)
