"""Bits of each saved field by a budget: of bytes for all that a step keeps, or of mean bits for what is coded.

The first step knows nothing. It takes the given bits, and one bit less of everything as often as the sum of what is kept passes the budget:
what is coded already is coded again. From the second step on bits go where they save most variance of the gradient a byte.
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import re
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Sequence

from ._policy import Bits
from ._watch import SPREAD, Key, Watch

if TYPE_CHECKING:
    from .meter import Line, Meter

__all__ = ["BITS", "Budget", "PRESETS", "Tally", "allocate", "chosen_bits", "nearest", "parse_size", "preset_of", "variance"]

BITS = "2/4/8"
MOST = 8  # bits that a budget gives at most
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclasses.dataclass(frozen=True)
class Preset:
    about: str
    bits: str
    mean: float | None = None


PRESETS = {
    "satchel": Preset("2 bits for what a parameter's gradient alone reads, 4 where the gradient flows through, 8 for attention", "2/4/8"),
    "gact": Preset("4 bits in the mean, shared out by sensitivity, as in the GACT paper", "4/4/8", 4.0),
    "int8": Preset("8 bits for all: nearly exact", "8/8/8"),
    "lossless": Preset("no rounding: masks, indices and shapes alone", "32/32/32"),
}


def nearest(name: str) -> str | None:
    """The preset whose name is this or nearly this."""
    return next(iter(difflib.get_close_matches(name.lower(), PRESETS, 1)), None)


def preset_of(name: Any, op: str = "packing") -> Preset:
    """The preset of a name; the nearest one is named where there is none."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    near = nearest(str(name))
    raise ValueError(f"[{op}] preset must be one of {', '.join(PRESETS)}, got {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def chosen_bits(bits: Any, preset: str | None, op: str = "packing") -> tuple[Bits, float | None]:
    """What the caller's bits, or a preset's name in place of them, ask for: bits, and the mean that a preset shares out."""
    if preset is None and isinstance(bits, str) and nearest(bits):
        bits, preset = BITS, bits
    if preset is not None and bits != BITS:
        raise ValueError(f"[{op}] bits and preset must not both be given, got {bits!r} and {preset!r}")
    chosen = None if preset is None else preset_of(preset, op)
    return (Bits.of(bits, op), None) if chosen is None else (Bits.of(chosen.bits, op), chosen.mean)


def parse_size(size: Any, op: str = "packing") -> int:
    """Bytes of "4GiB", "512 MiB", "1.5e9" or a number."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < 2**63:
        raise ValueError(f'[{op}] budget must be bytes, as a number or a text like "4GiB" or "512 MiB", got {size!r}')
    return int(float(match[1]) * unit)


def size_text(size: int) -> str:
    """Bytes in the unit that gives a number below 1024."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} bytes" if units[0] == "bytes" else f"{value:.4g} {units[0]}"


def variance(bits: int) -> float:
    """Of a value's code, in squared ranges of its block."""
    return SPREAD[bits] / ((1 << bits) - 1) ** 2


def allocate(sensitivity: Sequence[float], sizes: Sequence[Sequence[int]], least: Sequence[int], room: int) -> list[int]:
    """Bits of each item, from its least to MOST, of sum of sizes[i][bits] at most `room`: always the bit that saves most variance a byte.

    Item i in b bits adds sensitivity[i]·variance(b) to the gradient's. Room for the least bits is not asked for.
    """

    bits = list(least)
    room -= sum(size[b] for size, b in zip(sizes, bits))
    smallest = min((c for c in sensitivity if c > 0), default=1.0)
    steps: list[tuple[float, int, int]] = []

    def worth(i: int, b: int) -> float:
        """Variance that bit b + 1 takes off. Unseen items share what others leave."""
        return max(sensitivity[i], 1e-6 * smallest) * (variance(b) - variance(b + 1))

    def cost(i: int, b: int) -> int:
        return sizes[i][b + 1] - sizes[i][b]

    def push(i: int) -> None:
        if bits[i] < MOST:
            heapq.heappush(steps, (-worth(i, bits[i]) / max(1, cost(i, bits[i])), i, bits[i]))

    def exchange(i: int) -> list[int]:
        """Items that may give a bit each for one of i's, because the room that is left makes it the better deal; none where it is not."""
        lost, freed, given = 0.0, room, list[int]()
        while freed < cost(i, bits[i]):
            last = {j: bits[j] - 1 - given.count(j) for j in range(len(bits)) if j != i}
            found = [(worth(j, b) / max(1, cost(j, b)), j) for j, b in last.items() if b >= least[j]]
            if not found:
                return []
            j = min(found)[1]
            lost, freed = lost + worth(j, last[j]), freed + cost(j, last[j])
            given.append(j)
            if lost >= worth(i, bits[i]):
                return []
        return given

    for i in range(len(bits)):
        push(i)
    while steps:
        _, i, b = heapq.heappop(steps)
        if b != bits[i]:
            continue
        more = cost(i, b)
        given = exchange(i) if room < more <= 2 * room else []
        if more > room and not given:  # one that does not fit makes way for smaller ones
            continue
        for j in given:
            bits[j] -= 1
            room += cost(j, bits[j])
        room -= more
        bits[i] += 1
        for j in {i, *given}:
            push(j)
    return bits


@dataclasses.dataclass
class Coded:
    """One coded field of a step."""

    key: Key
    least: int
    planned: int
    form: weakref.ref
    line: Line
    sizes: list[int]  # bytes by bits, 0 to MOST
    values: int
    readers: list[Key]


class Tally:
    """What one step keeps, and how many bits were taken off on the way."""

    def __init__(self, budget: Budget, meter: Meter, watch: Watch | None) -> None:
        self.budget, self.meter, self.watch = budget, meter, watch
        self.coded: list[Coded] = []
        self.counts: dict[tuple[str, str, str], int] = {}
        self.taken = 0  # bits off
        self.fixed: int | None = None  # bytes that no bits change, once forward is over
        self._place: tuple[Key, int, int] | None = None  # key, least and planned bits of the field at work
        self._by_form: dict[int, Coded] = {}

    def bits(self, place: tuple[str, str, str], least: int, given: int) -> int:
        """Bits of the field of this module, node and name that is coded now."""
        number = self.counts[place] = self.counts.get(place, 0) + 1
        key = (*place, number)
        planned = self.budget.plan.get(key, given)
        self._place = key, least, planned
        return max(least, planned - self.taken)

    def add(self, form: Any, line: Line) -> Key | None:
        """The field coded after bits() was asked; its key. None where the form has no bits."""
        if self._place is None or not hasattr(form, "recode"):
            return None
        key, least, planned = self._place
        self._place = None
        first = self._by_form.get(id(form))
        if first is not None and first.form() is form:  # a second reader of one code
            first.readers.append(key)
            first.least = max(first.least, least)
            return key
        sizes = [0] + [form.bytes_at(b) for b in range(1, MOST + 1)]
        item = Coded(key, least, planned, weakref.ref(form), line, sizes, _values(line), [key])
        self.coded.append(item)
        self._by_form[id(form)] = item
        return key

    def fit(self, seed: Any) -> None:
        """Takes one bit off everything, what is coded already too, until what is kept fits the budget."""
        limit = self.budget.limit
        if limit is None or self.meter.after <= limit:
            return
        while self.meter.after > limit and self.taken < MOST - 1:
            self.taken += 1
            for item in self.coded:
                form, bits = item.form(), max(item.least, item.planned - self.taken)
                if form is not None and form.bits > bits:
                    old = form.bits
                    form.recode(bits, seed(form))
                    self.meter.change(item.line, form.nbytes, item.line.kept.replace(f"{old} bits", f"{bits} bits"))

    def close(self) -> None:
        """At the end of forward: the meter is another step's afterwards."""
        self.fixed = self.meter.after - sum(item.line.after for item in self.coded)


def _values(line: Line) -> int:
    values = 1
    for size in line.shape:
        values *= size
    return values


class Budget:
    """Of one packing(): the plan of bits, and when it is made anew."""

    def __init__(self, limit: int | None, mean: float | None, bits: Bits, refresh: int) -> None:
        self.limit, self.mean, self.given, self.refresh = limit, mean, bits, refresh
        self.plan: dict[Key, int] = {}
        self.sensitivity: dict[Key, float] = {}
        self.steps = 0  # since the newest plan
        self.last: Tally | None = None
        self._watched: Tally | None = None
        self._met = False  # was the budget kept once?

    def start(self, meter: Meter) -> Tally:
        """Of a step that begins. What the watched step's backward showed is read here, between steps."""
        watched = self._watched
        if watched is not None and watched.watch is not None and watched.watch.seen:
            found = watched.watch.read()
            self._watched = watched.watch = None
            if found:
                self._learn(found)
                self._make_plan(watched)
                self.steps = 0
        elif watched is not None:
            self._watched = None  # no backward came: the next step is watched instead
        self.steps += 1
        watch = Watch() if not self.sensitivity or self.steps >= self.refresh else None
        tally = Tally(self, meter, watch)
        if watch is not None:
            self._watched = tally
        return tally

    def _learn(self, found: dict[Key, float]) -> None:
        """A running mean of shares: a loss's scale changes nothing."""
        total = sum(found.values()) or 1.0
        for key, c in found.items():
            old = self.sensitivity.get(key)
            self.sensitivity[key] = c / total if old is None else (old + c / total) / 2

    def _make_plan(self, tally: Tally) -> None:
        items = tally.coded
        if not items or tally.fixed is None:
            return
        seen = [sum(self.sensitivity.get(reader, 0.0) for reader in item.readers) for item in items]
        if self.limit is not None:
            sizes, room = [item.sizes for item in items], self.limit - tally.fixed
        else:
            sizes = [[b * item.values for b in range(MOST + 1)] for item in items]
            room = int((self.mean or 0) * sum(item.values for item in items))
        for item, bits in zip(items, allocate(seen, sizes, [item.least for item in items], room)):
            for reader in item.readers:
                self.plan[reader] = bits

    def finish(self, tally: Tally) -> None:
        """At the end of a step's forward: raises where the first step that saves something cannot keep the budget, and warns later."""
        if not tally.meter.lines:
            return
        tally.close()
        self.last = tally
        if self.limit is None:
            return
        if tally.meter.after <= self.limit:
            self._met = True
            return
        text = f"[packing] budget must be at least {size_text(self.needed(tally))} for this model, got {size_text(self.limit)}"
        if not self._met:
            raise ValueError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)

    def needed(self, tally: Tally) -> int:
        """Bytes of a step in which everything has its least bits."""
        return (tally.fixed or 0) + sum(item.sizes[item.least] for item in tally.coded)

    def bits_by_field(self) -> dict[str, int]:
        """Bits of each coded field in the newest step."""
        found = {}
        for item in self.last.coded if self.last else ():
            form = item.form()
            bits = form.bits if form is not None else max(item.least, item.planned - self.last.taken)  # type: ignore[union-attr]
            for module, node, field, number in item.readers:
                found[f"{module + ': ' if module else ''}{node}.{field}{f' #{number}' if number > 1 else ''}"] = bits
        return found
