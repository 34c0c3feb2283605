#!/usr/bin/env python3
"""Microseconds of CPU time that satchel.packing() adds to a torch function, least of many runs: small tensors, so that Python's part is all."""
import time

import torch
from torch.overrides import TorchFunctionMode

import satchel


class Empty(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


x = torch.randn(8, 8, requires_grad=True)
weights = [torch.randn(8, 8, requires_grad=True) for _ in range(100)]


def forward():
    h = x
    for w in weights:
        h = torch.relu(torch.mm(h, w)) + 1  # two saves that are packed, one function that saves nothing
    return h


def per_function(context=None, runs=100):
    best = float("inf")
    for _ in range(runs):
        start = time.thread_time()
        if context is None:
            forward()
        else:
            with context:
                forward()
        best = min(best, time.thread_time() - start)
    return best / 300 * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain = per_function()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    print(f"plain                                     {plain:6.1f} us a function")
    print(f"saved_tensors_hooks that do nothing       {per_function(hooks) - plain:+6.1f}")
    print(f"a TorchFunctionMode that does nothing     {per_function(Empty()) - plain:+6.1f}")
    print(f"packing, nothing large enough             {per_function(satchel.packing()) - plain:+6.1f}")
    print(f"packing, two of three functions packed    {per_function(satchel.packing(min_bytes=1)) - plain:+6.1f}")
