"""The policy table, policy.json: what each autograd node saves and how it may be kept. Data only; kept.py does it."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import pathlib
from typing import Any

__all__ = ["Row", "Bits", "checked_size", "eager_rows", "compiled_rows", "least_bits"]

_FILE = pathlib.Path(__file__).with_name("policy.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """How one saved field may be kept."""

    node: str
    field: str
    keep: str  # code, normed, mask, inside, slope, exp, shape, index, flags
    role: str = ""  # local, flow, attention
    edge: int = -1  # the input whose gradient reads the field; the role is local where that is a parameter
    weight: bool = False  # coded only where it is computed and needs a gradient
    of: str = ""  # index: the field that it points into
    last: int = 2  # index: counts through so many of its last dimensions; 0: through the node's dim
    size: str = ""  # index: the node's attribute with the number of places, or with sizes of which dim is taken
    mean: str = ""  # normed: the field with the means; without one they are 0
    scale: str = ""  # normed: the field with 1/σ
    noise: str = ""  # how a code's noise comes out of backward: rows, taps, columns, each, norm, sum, attention, loss (_noise.py)
    condition: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Bits:
    """Bits of what only a parameter's gradient reads, of what the gradient flows through, and of attention's operands."""

    local: int = 2
    flow: int = 4
    attention: int = 8

    @classmethod
    def of(cls, bits: str | int | tuple[int, ...] | Bits, op: str = "packing") -> Bits:
        """From "2/4/8", (2, 4, 8) or one number for all three."""
        if isinstance(bits, Bits):
            return bits
        try:
            given = bits.split("/") if isinstance(bits, str) else bits if isinstance(bits, (tuple, list)) else [bits]
            parts = [int(b) if isinstance(b, str) else operator.index(b) for b in given if not isinstance(b, bool)]
        except (TypeError, ValueError):
            parts = []
        parts = parts * 3 if len(parts) == 1 else parts
        if len(parts) != 3 or not all(1 <= b <= 8 or b == 32 for b in parts):
            raise ValueError(f"[{op}] bits must be local/flow/attention, each 1 to 8, or 32 for exact, got {bits!r}")
        return cls(*parts)

    def for_role(self, role: str) -> int:
        return getattr(self, role)


def checked_size(min_bytes: Any, op: str) -> int:
    """min_bytes, where it is a number of bytes."""
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise ValueError(f"[{op}] min_bytes must be a number of bytes, 0 or more, got {min_bytes!r}")
    return min_bytes


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def eager_rows() -> dict[str, dict[str, Row]]:
    """Rows by node, then by field."""
    rows: dict[str, dict[str, Row]] = {}
    for entry in _table()["fields"]:
        row = Row(**{k: v for k, v in entry.items() if k != "if"}, condition=tuple(entry.get("if", {}).items()))
        rows.setdefault(row.node, {})[row.field] = row
    return rows


def least_bits(name: str, given: int) -> int:
    """Fewer bits than these a budget never gives to a role or a way to keep; where the caller gave fewer they are the caller's."""
    return min(given, _table()["least"][name])


def compiled_rows() -> dict[str, Any]:
    """The section of torch.compile's pass."""
    return _table()["compiled"]
