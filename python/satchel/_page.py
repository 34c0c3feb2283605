"""Style, tables and charts (inline SVG) of report()'s page."""

from __future__ import annotations

import html
import math
from typing import Sequence

__all__ = ["STYLE", "bars", "number_of_bytes", "steps_chart", "table"]

STYLE = """
:root { --back: #ffffff; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --card: #f6f8fa; --c0: #5f6b7a; --c1: #00796b; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --ink: #e6eaee; --soft: #9aa6b2; --line: #2c343d; --card: #1a2027; --c0: #9aa7b5; --c1: #4db6a5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 12px 14px 40px; }
h1 { font-size: 1.5rem; margin: .6rem 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; padding-top: .8rem; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0 .6rem; max-width: 75ch; overflow-wrap: anywhere; }
p.note { color: var(--soft); font-size: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; align-items: start;
  margin-top: 12px; }
.charts > div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 6px; min-width: 0; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text { fill: var(--soft); }
svg text.title { fill: var(--ink); font-size: 12.5px; font-weight: 600; }
svg text.small { font-size: 9.5px; }
svg text.middle { text-anchor: middle; }
svg text.end { text-anchor: end; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .dashed { stroke-dasharray: 5 4; }
svg .s { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .s.c0 { stroke: var(--c0); } svg .f.c0 { fill: var(--c0); }
svg .s.c1 { stroke: var(--c1); } svg .f.c1 { fill: var(--c1); }
svg .area { fill-opacity: .14; }
.wide { overflow-x: auto; margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
details > summary { cursor: pointer; color: var(--soft); margin: .4rem 0; }
@media (max-width: 480px) { body { font-size: 14px; } main { padding: 8px 10px 30px; } th, td { padding: 3px 7px; }
  td.text { white-space: normal; overflow-wrap: anywhere; min-width: 12ch; } }
"""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 230, 56, 14, 46, 40
_LONGEST = 50  # letters of a bar's name
_TEXT = ("why", "module", "op and field", "shape", "type", "kept as")  # columns of words


def number_of_bytes(size: float) -> str:
    """Bytes in three digits and their unit."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:  # "1020 KiB" would be four digits
        value, units = value / 1024, units[1:]
    return "0" if size == 0 else f"{value:.3g} {units[0]}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is wider than the page; the first row is its head."""
    words = [name in _TEXT for name in rows[0]]
    lines = []
    for i, row in enumerate(rows):
        cell = "td" if i else "th"
        cells = (f"<{cell}{' class=text' if word else ''}>{html.escape(text)}</{cell}>" for text, word in zip(row, words))
        lines.append("<tr>" + "".join(cells) + "</tr>\n")
    return '<div class="wide"><table>\n' + "".join(lines) + "</table></div>\n"


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _head(title: str, height: float) -> str:
    safe = html.escape(title)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{safe}"><text class="title" x="4" y="15">{safe}</text>\n'


def _legend(names: Sequence[str]) -> str:
    svg, across = "", 4.0
    for i, name in enumerate(names):
        svg += f'<rect class="f c{i}" x="{across:.1f}" y="24" width="9" height="9"/>' + _text(across + 13, 32, "tick", name)
        across += 28 + 6.4 * len(name)
    return svg


def bars(title: str, groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str] = ("torch", "packed")) -> str:
    """Bars of bytes, one group below the other."""
    if not groups:
        return ""
    thick, gap, room = 9, 16, 62  # room: for the number behind the longest bar
    most = max(max(values) for _, values in groups) or 1
    each, at = gap + 3 + thick * len(series), float(_TOP - 4)
    svg = _head(title, at + each * len(groups) + 8) + _legend(series)
    for name, values in groups:
        short = name if len(name) <= _LONGEST else "…" + name[-_LONGEST + 1 :]
        svg += f"<g><title>{html.escape(name)}</title>" + _text(4, at + 11, "tick", short)
        for i, value in enumerate(values):
            length, y = max(value / most * (_WIDTH - room - 4), 0.8 if value else 0), at + gap - 1 + thick * i
            what = f"<title>{html.escape(f'{name}, {series[i]}: {number_of_bytes(value)}')}</title>"
            svg += f'<rect class="f c{i}" x="4" y="{y:.1f}" width="{length:.1f}" height="{thick - 1.5}">{what}</rect>'
            text = number_of_bytes(value) if value or not any(values) else "shared, counted elsewhere"
            svg += _text(8 + length, y + thick - 2, "small", text)
        svg += "</g>\n"
        at += each
    return svg + "</svg>\n"


def _ticks(most: float) -> list[float]:
    """Round numbers of a unit of bytes from 0 to most."""
    unit = 1024.0 ** min(4, int(math.log(max(most, 1), 1000)))
    rough = most / unit / 4
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough) * unit
    return [i * step for i in range(int(most / step * 1.0001) + 1)]


def steps_chart(title: str, series: Sequence[tuple[str, int, Sequence[float]]], middle: float) -> str:
    """Bytes kept after each save (forward) and each release (backward, from `middle` on)."""
    count = max(len(values) for _, _, values in series)
    most = max(max(values, default=0) for _, _, values in series) or 1
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(i: float) -> float:
        return _LEFT + i / max(1, count - 1) * (right - _LEFT)

    def y(value: float) -> float:
        return floor - value / (most * 1.06) * (floor - _TOP)

    svg = _head(title, _HEIGHT) + _legend([name for name, _, _ in series])
    for tick in _ticks(most):
        svg += f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        svg += _text(_LEFT - 5, y(tick) + 3.5, "tick end", number_of_bytes(tick))
    stride = max(1, count // 600)  # more points than that are not seen
    for name, colour, values in series:
        places = sorted({*range(0, count, stride), count - 1, max(range(count), key=values.__getitem__)})
        line = "L".join(f"{x(i):.1f} {y(values[i]):.1f}" for i in places)
        what = f"<title>{html.escape(name)}: {number_of_bytes(max(values))} at most</title>"
        svg += f'<path class="f area c{colour}" d="M{_LEFT} {floor}L{line}L{right} {floor}Z"/>'
        svg += f'<path class="s c{colour}" d="M{line}">{what}</path>\n'
    half = x(middle - 0.5)
    svg += f'<line class="axis dashed" x1="{half:.1f}" x2="{half:.1f}" y1="{_TOP}" y2="{floor}"/>'
    svg += f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    svg += _text((_LEFT + half) / 2, floor + 14, "tick middle", "forward: saved")
    svg += _text((half + right) / 2, floor + 14, "tick middle", "backward: let go")
    return svg + _text((_LEFT + right) / 2, _HEIGHT - 8, "tick middle", "saved fields, in order") + "</svg>\n"
