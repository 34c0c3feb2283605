"""A page about what was saved: memory over a step, bytes by module and by op, and what stayed exact. One file, nothing from elsewhere.

It looks like the page of `satchel report` (tools/report_page.cpp); colours and style are the same.
"""

from __future__ import annotations

import html
import os
import pathlib
from typing import Any, Iterable, Mapping

from ._page import STYLE, bars, number_of_bytes, steps_chart, table
from .meter import Line, Meter

__all__ = ["report"]

_MOST_BARS, _MOST_LINES = 14, 500
_WHY = {
    "exact: no row": "the policy has no row for it",
    "exact: small": "smaller than min_bytes",
    "exact: excluded": "left out by include or exclude",
    "exact: this case": "no packed form for this case, or 32 bits were asked for",
    "exact: unknown op": "a list of tensors, or a custom function",
    "exact: hooked by others": "other hooks hold it, as checkpointing does",
    "exact: changed in place": "changed in place since it was saved",
    "exact: no plain tensor": "a tensor's subclass, or not strided",
    "exact: no kernels for this device": "no kernels for this device",
    "exact: expanded": "one number seen at many places: it takes little memory",
}


def _named(meters: Any) -> list[tuple[str, Meter]]:
    """(name, meter) of what report() takes."""
    if isinstance(meters, Mapping):
        pairs = [(str(name), m) for name, m in meters.items()]
    elif isinstance(meters, (list, tuple)):
        pairs = [(f"step {i + 1}" if len(meters) > 1 else "", m) for i, m in enumerate(meters)]
    else:
        pairs = [("", meters)]
    found = [(name, m if isinstance(m, Meter) else getattr(m, "meter", None)) for name, m in pairs]
    for (_, given), (_, meter) in zip(pairs, found):
        if not isinstance(meter, Meter):
            raise ValueError(f"[report] meters must be a meter or a packing with one, a list or a dict of them, got {type(given).__name__}")
    empty = [name for name, m in found if not m.lines]  # type: ignore[union-attr]
    if not found or empty:
        which = f"{empty[0]!r} without lines" if empty and empty[0] else "none with lines"
        raise ValueError(f"[report] a meter must have seen a step, got {which}; use packing(meter=True)")
    return [(name, m) for name, m in found if m is not None]


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.1f} times" if after else "–"


def _groups(groups: dict[str, tuple[int, int, int]]) -> list[tuple[str, list[int]]]:
    """The largest groups, and the rest as one."""
    shown = [(name, [g[1], g[2]]) for name, g in groups.items() if g[1] or g[2]]
    rest = shown[_MOST_BARS:]
    if len(rest) > 1:
        shown = shown[:_MOST_BARS] + [(f"{len(rest)} others", [sum(v[i] for _, v in rest) for i in (0, 1)])]
    return shown


def _exact_table(lines: Iterable[Line]) -> str:
    """What stayed exact, by reason and op, largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if line.kept.startswith("exact"):
            entry = found.setdefault((line.kept, f"{line.node}.{line.field}"), [0, 0])
            entry[0] += 1
            entry[1] += line.after
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    cells = [["op and field", "why", "fields", "kept"]]
    for (why, name), (count, size) in rows:
        cells.append([name, _WHY.get(why, why.removeprefix("exact: ")), str(count), number_of_bytes(size)])
    return table(cells)


def _section(name: str, meter: Meter) -> str:
    exact = sum(line.after for line in meter.lines if line.kept.startswith("exact"))
    ratio = f", <b>{meter.before / meter.after:.1f} times less</b>" if meter.after else ""
    parts = [f"<h2>{html.escape(name)}</h2>" if name else ""]
    parts.append(
        f"<p>Kept for backward: {number_of_bytes(meter.before)} by torch alone, <b>{number_of_bytes(meter.after)}</b> packed{ratio}. "
        f"{len(meter.lines)} fields; {number_of_bytes(exact)} of what is kept stayed exact.</p>\n"
    )
    over = meter.timeline()
    series = [("torch", 0, [b for b, _ in over]), ("packed", 1, [a for _, a in over])]
    middle = len(over) / 2  # where backward begins
    charts = [steps_chart("memory over a step", series, middle)]
    charts += [bars("by module", _groups(meter.by_module())), bars("by op", _groups(meter.by_field()))]
    parts.append('<div class="charts">\n' + "".join(f"<div>{chart}</div>\n" for chart in charts if chart) + "</div>\n")
    parts.append("<h3>What stayed exact, and why</h3>\n")
    if any(line.kept.startswith("exact") for line in meter.lines):
        parts.append(_exact_table(meter.lines))
    else:
        parts.append("<p>Nothing.</p>\n")
    if meter.hidden:
        names = ", ".join(f"{html.escape(n)} ({count})" for n, count in meter.hidden.items())
        parts.append(f'<p class="note">Nodes that do not show what they save, and are exact: {names}. Their bytes are not counted.</p>\n')
    rows = [["module", "op and field", "shape", "type", "kept as", "before", "after"]]
    for line in meter.lines[:_MOST_LINES]:
        size = "×".join(map(str, line.shape)) or "one number"
        op = f"{line.node}.{line.field}"
        rows.append([line.module or "–", op, size, line.dtype, line.kept, number_of_bytes(line.before), number_of_bytes(line.after)])
    parts.append(f"<details><summary>All {len(meter.lines)} fields, in the order they were saved</summary>\n{table(rows)}")
    if len(meter.lines) > _MOST_LINES:
        parts.append(f'<p class="note">The first {_MOST_LINES}.</p>\n')
    return "<section>\n" + "".join(parts) + "</details>\n</section>\n"


def report(meters: Any, path: str | os.PathLike[str], title: str = "What was saved for backward") -> pathlib.Path:
    """Writes one HTML page about a meter, or about several under their names; returns its path.

    meters: a meter, a packing whose `.meter` is filled, a list of them, or a dict from names to them.

    >>> satchel.report(packing, "page.html")
    """
    from . import __version__

    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path) or not str(path):
        raise ValueError(f"[report] path must be a file's name, got {path!r}")
    if not isinstance(title, str):
        raise ValueError(f"[report] title must be text, got {title!r}")
    named = _named(meters)
    about = "A storage that several fields share is counted once; parameters, and the batch under attach(), are left out."
    body = [f"<h1>{html.escape(title)}</h1>\n", f'<p class="note">Written by <code>satchel.report</code> {__version__}. {about}</p>\n']
    if len(named) > 1:
        rows = [["", "before", "after", "less"]]
        rows += [[name, number_of_bytes(m.before), number_of_bytes(m.after), _ratio(m.before, m.after)] for name, m in named]
        chart = bars("kept for backward", [(name, [m.before, m.after]) for name, m in named])
        body.append(f'<div class="charts"><div>{chart}</div></div>\n')
        body.append(table(rows))
    body += [_section(name, m) for name, m in named]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )
    target = pathlib.Path(path)
    try:
        target.write_bytes(page.encode("utf-8", "xmlcharrefreplace"))  # names may hold halves of characters
    except UnicodeError:
        raise ValueError(f"[report] path must be a file's name, got {path!r}") from None
    except OSError as error:
        raise type(error)(error.errno, f"[report] path must be a file that can be written: {error.strerror}, got {str(target)!r}") from None
    return target
