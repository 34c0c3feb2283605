#!/usr/bin/env python3
"""Variance of the gradient with even bits and with the same bytes as a budget, on two small models after 20 steps of training."""
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


def gpt():
    model = nn.Sequential(nn.Embedding(64, 64), *[Block(64, 4) for _ in range(3)], nn.LayerNorm(64), nn.Linear(64, 64))
    text = torch.randint(0, 64, (16, 65))
    return model, lambda: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def convolutions():
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    last = [nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    model = nn.Sequential(*block(3, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), *last)
    x, y = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    return model, lambda: F.cross_entropy(model(x), y)


def gradient(model, f, context=None):
    if context is None:
        loss = f()
    else:
        with context:
            loss = f()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def error(model, f, context, draws=8):
    """‖ĝ − g‖²/‖g‖² in the mean, once the bits have been chosen."""
    exact = gradient(model, f)
    for _ in range(2):
        gradient(model, f, context)
    return float(sum((gradient(model, f, context) - exact).square().sum() for _ in range(draws)) / draws / exact.square().sum())


if __name__ == "__main__":
    torch.manual_seed(0)
    print("| model | bits | KiB | even bits | budget | ratio |\n|---|---|---|---|---|---|")
    for name, make in (("GPT", gpt), ("convolutions", convolutions)):
        model, f = make()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            f().backward()
            optimizer.step()
        for bits in ("2/2/8", "2/4/8", "3/4/8", "4/4/8"):
            even = satchel.packing(bits, meter=True, model=model, min_bytes=1024)
            off = error(model, f, even)
            shared = satchel.packing(bits, budget=even.meter.after, model=model, min_bytes=1024)
            less = error(model, f, shared)
            assert shared.meter.after <= even.meter.after
            print(f"| {name} | {bits} | {even.meter.after / 1024:.0f} | {off:.3f} | {less:.3f} | {off / less:.1f} |", flush=True)
        gact = satchel.packing("gact", model=model, min_bytes=1024)
        less = error(model, f, gact)
        print(f"| {name} | `gact` | {gact.meter.after / 1024:.0f} | | {less:.3f} | |", flush=True)
