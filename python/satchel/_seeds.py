"""Numbers that seeds are made of."""

from __future__ import annotations

import torch

__all__ = ["mixed", "rank"]


def mixed(*numbers: int) -> int:
    """A number of 62 bits that differs wherever one of the given does (splitmix64)."""
    state = 0
    for n in numbers:
        state = (state + n + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state >> 2


def rank() -> int:
    """Ranks draw apart, or their errors would not average out."""
    return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
