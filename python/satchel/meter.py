"""What was saved for backward, by module and op, before and after packing."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Line", "Meter"]


@dataclasses.dataclass
class Line:
    """One saved field. `before` counts a storage once, where it is saved first; so does `after` for what stays exact."""

    module: str
    node: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    kept: str  # "2 bits", "mask", …; "exact: why"
    before: int
    after: int


def _ratio(before: int, after: int) -> str:
    """A line without bytes before shares memory that another line counts."""
    return "–" if before == 0 else f"{before / after:.1f}" if after else "inf"


class Meter:
    """Lines of one step; `packing(meter=True)` fills it. A step starts where the outermost context is entered."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._after = 0
        self.hidden: dict[str, int] = {}  # nodes that do not show what they save, and how many: exact
        self._seen: dict[int, tuple[StorageWeakRef, list[bool]]] = {}  # storage → counted before, counted after

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": {}}  # a copy of a weak reference would free it twice

    def clear(self) -> None:
        self.lines.clear()
        self._after = 0
        self.hidden.clear()
        self._seen.clear()

    def _first(self, t: Tensor, column: int) -> int:
        """Bytes of t's storage where this column has not counted it yet."""
        storage = t.untyped_storage()
        reference = StorageWeakRef(storage)  # while it is held no other storage has this address
        _, counted = self._seen.setdefault(reference.cdata, (reference, [False, False]))
        if counted[column]:
            return 0
        counted[column] = True
        return storage.nbytes()

    def add(self, module: str, node: str, field: str, t: Tensor, kept: str, after: int | None) -> Line:
        """after: bytes of the packed form, or None where the tensor itself is kept."""
        before = self._first(t, 0)
        dtype = str(t.dtype).removeprefix("torch.")
        line = Line(module, node, field, tuple(t.shape), dtype, kept, before, self._first(t, 1) if after is None else after)
        self.lines.append(line)
        self._after += line.after
        return line

    def change(self, line: Line, after: int, kept: str) -> None:
        """A line's packed form was packed again."""
        self._after += after - line.after
        line.after, line.kept = after, kept

    @property
    def before(self) -> int:
        """Bytes that torch alone would have kept, parameters left out."""
        return sum(line.before for line in self.lines)

    @property
    def after(self) -> int:
        """Bytes that are kept."""
        return self._after

    def by_op(self) -> dict[str, tuple[int, int, int]]:
        """(fields, bytes before, bytes after) of each op and field, largest first."""
        return self._grouped(lambda line: f"{line.node}.{line.field}: {line.kept}")

    def by_field(self) -> dict[str, tuple[int, int, int]]:
        """(fields, bytes before, bytes after) of each op and field, however it is kept, largest first."""
        return self._grouped(lambda line: f"{line.node}.{line.field}")

    def by_module(self) -> dict[str, tuple[int, int, int]]:
        """(fields, bytes before, bytes after) of each module, largest first."""
        return self._grouped(lambda line: line.module or "(no module)")

    def _grouped(self, key: Any) -> dict[str, tuple[int, int, int]]:
        groups: dict[str, list[int]] = {}
        for line in self.lines:
            group = groups.setdefault(key(line), [0, 0, 0])
            group[0] += 1
            group[1] += line.before
            group[2] += line.after
        return {name: (g[0], g[1], g[2]) for name, g in sorted(groups.items(), key=lambda item: -item[1][1])}

    def timeline(self) -> list[tuple[int, int]]:
        """(bytes before, bytes after) that are held over a step: after each save of forward, then after each release of backward.

        Backward runs the newest node first, and a storage is let go by the node that was the first to save it. So it is forward in reverse.
        """
        before = after = 0
        rise = [(0, 0)]
        for line in self.lines:
            before, after = before + line.before, after + line.after
            rise.append((before, after))
        return rise + rise[::-1]

    def table(self, by: str = "op") -> str:
        """A text table by "op" or by "module", and the sum."""
        if by not in ("op", "module"):
            raise ValueError(f"[meter] by must be op or module, got {by!r}")
        groups = self.by_module() if by == "module" else self.by_op()
        width = max([len(name) for name in groups] + [len("in all")])
        rows = [(name, *numbers) for name, numbers in groups.items()]
        rows.append(("in all", len(self.lines), self.before, self.after))
        head = f"{'saved by':{width}}  {'fields':>6}  {'before KiB':>11}  {'after KiB':>10}  {'ratio':>6}"
        lines = [f"{n:{width}}  {c:6}  {b / 1024:11.1f}  {a / 1024:10.1f}  {_ratio(b, a):>6}" for n, c, b, a in rows]
        lines += [f"{name}: {count} nodes, exact; they do not show what they save" for name, count in self.hidden.items()]
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Any:
        """The table by op for rich's print(), which asks for it."""
        from rich.table import Table

        table = Table(title="saved for backward")
        table.add_column("saved by", overflow="fold")
        for name in ("fields", "before KiB", "after KiB", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        rows = [*self.by_op().items(), ("in all", (len(self.lines), self.before, self.after))]
        for i, (name, (count, before, after)) in enumerate(rows):
            style = "bold" if i == len(rows) - 1 else "dim" if ": exact" in name else ""
            cells = (name, str(count), f"{before / 1024:,.1f}", f"{after / 1024:,.1f}", _ratio(before, after))
            table.add_row(*cells, style=style, end_section=i == len(rows) - 2)
        if self.hidden:
            notes = (f"{name}: {count} nodes, exact; they do not show what they save" for name, count in self.hidden.items())
            table.caption = ", ".join(notes)
        return table

    def to_pandas(self) -> Any:
        """A DataFrame of the lines; pandas must be installed."""
        import pandas

        return pandas.DataFrame([dataclasses.asdict(line) for line in self.lines])

    def to_json(self) -> str:
        """Sums and lines."""
        return json.dumps({"before": self.before, "after": self.after, "hidden": self.hidden, "lines": [dataclasses.asdict(line) for line in self.lines]})
