#!/usr/bin/env python3
"""Microseconds of CPU time that satchel.packing() adds, least of many runs: small tensors, so that Python's part is all.

Printed: a torch function's, by what the context does; then a GPT's of 12 blocks, in all and for each field that is packed. A field of backward
takes what its decoding takes; what forward adds to the GPT has the price of its other functions in it.
"""
import argparse
import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import satchel


class Empty(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """As in python_models.py, but narrow inside: norms have rows of whole blocks, and products take next to no time."""

    def __init__(self, d=256, inner=32, heads=4):
        super().__init__()
        self.inner, self.heads, self.n1, self.n2 = inner, heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * inner), nn.Linear(inner, d), nn.Linear(d, inner), nn.Linear(inner, d)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).split(self.inner, 2))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, self.inner))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, blocks=12, d=256, words=65):
        super().__init__()
        self.e, self.n, self.out = nn.Embedding(words, d), nn.LayerNorm(d), nn.Linear(d, words)
        self.blocks = nn.Sequential(*(Block(d) for _ in range(blocks)))

    def forward(self, i, y):
        return F.cross_entropy(self.out(self.n(self.blocks(self.e(i)))).flatten(0, 1).float(), y.flatten())


def least(forward, context, runs):
    """Least CPU seconds of forward and of backward."""
    best = [float("inf")] * 2
    for _ in range(runs):
        start = time.thread_time()
        with context:
            out = forward()
        middle = time.thread_time()
        out.sum().backward()
        end = time.thread_time()
        best = [min(best[0], middle - start), min(best[1], end - middle)]
        del out  # not in the next forward's time
    return best


def functions(runs):
    x = torch.randn(8, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(100)]

    def forward():
        h = x
        for w in weights:
            h = torch.relu(torch.mm(h, w)) + 1  # two saves that are packed, one function that saves nothing
        return h

    plain = least(forward, contextlib.nullcontext(), runs)
    print(f"plain                                     {plain[0] / 300 * 1e6:6.1f} us a function, {plain[1] / 300 * 1e6:6.1f} in backward")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for name, context in (
        ("saved_tensors_hooks that do nothing", hooks),
        ("a TorchFunctionMode that does nothing", Empty()),
        ("packing, nothing large enough", satchel.packing()),
        ("packing, two of three functions packed", satchel.packing(min_bytes=1)),
    ):
        forth, back = least(forward, context, runs)
        print(f"{name:40}  {(forth - plain[0]) / 300 * 1e6:+6.1f}{'':16}{(back - plain[1]) / 300 * 1e6:+6.1f}")


def gpt(bf16, runs):
    model, i = GPT(), torch.randint(0, 65, (1, 4))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(i, i)

    with satchel.packing(min_bytes=1, meter=True) as p:
        forward()
    fields = sum(not line.kept.startswith("exact") for line in p.meter.lines)
    print(f"GPT, {'bf16 autocast' if bf16 else 'float32'}, {fields} fields packed:")
    plain = least(forward, contextlib.nullcontext(), runs)
    print(f"  plain                                   {plain[0] * 1e3:6.2f} ms forward, {plain[1] * 1e3:6.2f} ms backward")
    for name, context in (("a TorchFunctionMode that does nothing", Empty()), ("packing", satchel.packing(min_bytes=1))):
        forth, back = (a - b for a, b in zip(least(forward, context, runs), plain))
        each = f"; a field {forth / fields * 1e6:5.1f} us and {back / fields * 1e6:5.1f} us" if name == "packing" else ""
        print(f"  {name:38}  {forth * 1e3:+6.2f} ms          {back * 1e3:+6.2f} ms{each}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    functions(options.runs)
    for bf16 in (False, True):
        gpt(bf16, options.runs)
