#!/usr/bin/env python3
"""Peak memory against step time, one point a method: pictures, a Markdown table and one JSON of many.

  bench/picture.py --out build/bench build/bench/*.json

Reads what `satchel bench graph --json` and graph_torch.py --json wrote, `satchel bench images --json` and image_torch.py --json, or
python_models.py --json. Files of the same data, model, types and memory cap belong together. Writes results.json (all of them), results.md (a table a setting) and one SVG a setting. Standard library only.
"""
import argparse
import datetime
import json
import math
import pathlib
import sys
from html import escape

from points import MIB, drawn, front, read

COLOURS = {"Satchel": "#00796b", "PyTorch": "#d95f02", "torch.compile": "#7b3fa0", "PyG": "#5f6b7a"}


# --- the table --------------------------------------------------------------------------------------------------------

def table(setting):
    base = setting.base()
    rows = [f"| method | {setting.STEP} ms | of PyTorch FP32 | saved MiB | loss MiB | peak MiB | of PyTorch's peak |",
            "|---|---:|---:|---:|---:|---:|---:|"]
    for p in setting.points:
        name = f"**{p.label}**" if p.family == "Satchel" else p.label
        if not p.fits:
            rows.append(f"| {name} | {p.result.get('error') or 'does not fit'} | – | – | – | – | – |".replace("\n", " "))
            continue
        of_time = f"{p.ms / base.ms:.2f}" if base else "–"
        of_peak = f"{p.peak / base.peak:.2f}" if base and base.peak else "–"
        saved, loss = p.result["saved_bytes"] / MIB, p.result["loss_bytes"] / MIB
        rows.append(f"| {name} | {p.ms:.2f} | {of_time} | {saved:,.1f} | {loss:,.1f} | {p.peak:,.1f} | {of_peak} |")
    return rows


def markdown(settings, date):
    lines = ["# Training: step time and memory", "",
             "Saved: asked for after forward − before, less the logits. Loss: the logits and what the loss added. "
             "Peak: the most allocated during a step − what stood before it; a cached A·X counts. Medians of the steps.", "",
             "libtorch is PyTorch fp32 from C++; fp32 is Satchel's layers with torch's saves; satchel 32 bits is Satchel's algebra with "
             "nothing packed; compile B is torch.compile with an activation-memory budget of B.", ""]
    for s in settings:
        lines += [f"## {s.title()}", "", f"{date}, torch {s.machine.get('torch', '?')}", "", f"![peak against time]({s.name()}.svg)", ""]
        lines += table(s) + [""] + [f"- {line}" for line in s.captions()] + [""]
    return "\n".join(lines)


# --- the picture ------------------------------------------------------------------------------------------------------

class Axis:
    """Numbers to pixels, from `first` to `last`; logarithmic where the numbers are far apart."""

    def __init__(self, values, first, last):
        low, high = min(values), max(values)
        self.log = low > 0 and high / low > 5
        if self.log:
            room = (high / low) ** 0.09
            self.low, self.high = low / room, high * room
        else:
            self.low, self.high = 0.0, (high or 1.0) * 1.12
        self.first, self.last = first, last

    def at(self, value):
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self):
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [m * 10.0**d for d in decades for m in (1, 2, 3, 5, 7)]
        else:
            step = 10.0 ** math.floor(math.log10(self.high / 4))
            step *= next(m for m in (1, 2, 5, 10) if self.high / (step * m) <= 7)
            ticks = [i * step for i in range(int(self.high / step) + 1)]
        return [t for t in ticks if self.low <= t <= self.high]


class Box:
    def __init__(self, x, y, width, height):
        self.x, self.y, self.width, self.height = x, y, width, height

    def overlap(self, other):
        w = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        h = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, w) * max(0.0, h)

    def outside(self, frame):
        inner = self.overlap(frame)
        return self.width * self.height - inner


FONT = 12
LETTER, BOLD = 6.6, 7.4  # mean widths of letters of a sans-serif of that size, on the wide side


def place_labels(points, frame):
    """A box for each (x, y, width), near its point, where it covers the least; points with few neighbours choose first."""
    marks = [Box(x - 7, y - 7, 14, 14) for x, y, _ in points]
    boxes = {}
    crowded = lambda i: sum(math.dist(points[i][:2], q[:2]) < 60 for q in points)
    for i in sorted(range(len(points)), key=crowded):
        x, y, width = points[i]
        height = FONT + 3
        best = None
        for radius in (11, 22, 34, 48, 64, 82, 102):
            for turn in range(24):
                angle = 2 * math.pi * turn / 24
                cx, cy = x + math.cos(angle) * radius, y - math.sin(angle) * radius
                # The box stands off the point in the direction of the angle: its near edge is at the radius.
                left = cx if math.cos(angle) > 0.3 else cx - width if math.cos(angle) < -0.3 else cx - width / 2
                top = cy - height / 2 - math.sin(angle) * height / 2
                box = Box(left, top, width, height)
                covered = sum(box.overlap(m) for m in marks) + 3 * sum(box.overlap(b) for b in boxes.values())
                cost = covered + 5 * box.outside(frame) + radius * 0.8 + (0 if math.cos(angle) > 0.3 else 3)
                if best is None or cost < best[0]:
                    best = (cost, box)
        boxes[i] = best[1]
    return [boxes[i] for i in range(len(points))]


def text(x, y, words, **attributes):
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(words)}</text>'


def number(value):
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def wrapped(line, width):
    out = [""]
    for word in line.split(" "):
        if len(out[-1]) + len(word) + 1 > width and out[-1]:
            out.append("   ")
        out[-1] += (" " if out[-1].strip() else "") + word
    return out


def grid(x_axis, y_axis, frame):
    bottom, right, out = frame.y + frame.height, frame.x + frame.width, []
    for value in x_axis.ticks():
        x = x_axis.at(value)
        out.append(f'<line x1="{x:.1f}" y1="{frame.y}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e7eb"/>')
        out.append(text(x, bottom + 18, number(value), text_anchor="middle"))
    for value in y_axis.ticks():
        y = y_axis.at(value)
        out.append(f'<line x1="{frame.x}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e7eb"/>')
        out.append(text(frame.x - 8, y + 4, number(value), text_anchor="end"))
    out.append(f'<rect x="{frame.x}" y="{frame.y}" width="{frame.width}" height="{frame.height}" fill="none" stroke="#9aa5b1"/>')
    scales = [" (log scale)" if axis.log else "" for axis in (x_axis, y_axis)]
    out.append(text(frame.x + frame.width / 2, bottom + 40, f"step time, ms{scales[0]}", text_anchor="middle"))
    middle = frame.y + frame.height / 2
    out.append(text(22, middle, f"peak memory of a step, MiB{scales[1]}", text_anchor="middle", transform=f"rotate(-90 22 {middle})"))
    return out


def front_line(points, x_axis, y_axis, frame):
    """What can be had at least: to the right of and above its steps something is both faster and smaller."""
    best = front(points)
    path = f"M{x_axis.at(best[0].ms):.1f},{frame.y}"
    for p in best:
        path += f" H{x_axis.at(p.ms):.1f} V{y_axis.at(p.peak):.1f}"
    path += f" H{frame.x + frame.width}"
    return f'<path d="{path}" fill="none" stroke="#9aa5b1" stroke-width="1.5" stroke-dasharray="5 4"/>'


def marks(points, x_axis, y_axis, frame):
    places = [(x_axis.at(p.ms), y_axis.at(p.peak), len(p.label) * (BOLD if p.family == "Satchel" else LETTER)) for p in points]
    out, labels = [], []
    for p, (x, y, _), box in zip(points, places, place_labels(places, frame)):
        colour = COLOURS[p.family]
        near = (min(max(x, box.x), box.x + box.width), min(max(y, box.y), box.y + box.height))
        if math.dist(near, (x, y)) > 16:
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{near[0]:.1f}" y2="{near[1]:.1f}" stroke="{colour}" stroke-opacity="0.5"/>')
        labels.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if p.family == "Satchel" else 5}" fill="{colour}">'
                      f"<title>{escape(p.label)}: {p.ms:.2f} ms, {p.peak:,.0f} MiB</title></circle>")
        weight = "bold" if p.family == "Satchel" else "normal"
        labels.append(text(box.x + box.width / 2, box.y + FONT - 1, p.label, fill=colour, text_anchor="middle", font_weight=weight))
    return out + labels


def legend(points, frame):
    out, x = [], frame.x
    for family, colour in COLOURS.items():
        if any(p.family == family for p in points):
            out += [f'<circle cx="{x + 5}" cy="62" r="5" fill="{colour}"/>', text(x + 15, 66, family)]
            x += 40 + len(family) * LETTER
    out += [f'<line x1="{x}" y1="62" x2="{x + 26}" y2="62" stroke="#9aa5b1" stroke-width="1.5" stroke-dasharray="5 4"/>',
            text(x + 32, 66, "Pareto front: no point is both faster and smaller")]
    return out


def svg(setting, date):
    points, width, height = drawn(setting.fitting), 960, 560
    frame = Box(84, 82, width - 84 - 28, height - 82 - 60)
    captions = [part for line in setting.captions() for part in wrapped(line, 138)]
    full = height + 18 * len(captions) + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{full}" viewBox="0 0 {width} {full}" '
           f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="{FONT}" fill="#323f4b">',
           f'<rect width="{width}" height="{full}" fill="#fcfcfd"/>',
           text(frame.x, 26, "Peak memory against step time", font_size=17, font_weight="bold"),
           text(frame.x, 45, f"{setting.title()}, {date}")]
    x_axis = Axis([p.ms for p in points], frame.x, frame.x + frame.width)
    y_axis = Axis([p.peak for p in points], frame.y + frame.height, frame.y)
    out += legend(points, frame) + grid(x_axis, y_axis, frame)
    out.append(front_line(points, x_axis, y_axis, frame))
    out += marks(points, x_axis, y_axis, frame)
    out += [text(frame.x, height + 8 + 18 * i, line, xml__space="preserve") for i, line in enumerate(captions)]
    return "\n".join(out).replace("xml--space", "xml:space") + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON of `satchel bench graph` and of graph_torch.py")
    parser.add_argument("--out", default=".", help="folder for results.json, results.md and the pictures")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the measurement, for the titles")
    args = parser.parse_args()
    files, settings = read([f for f in args.files if pathlib.Path(f).name != "results.json"])
    if not settings:
        sys.exit("picture: no file has results of a graph benchmark")
    out = pathlib.Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"picture: --out must be a folder, got {args.out}: {error.strerror}")
    (out / "results.json").write_text(json.dumps({"date": args.date, "runs": files}, indent=2) + "\n")
    (out / "results.md").write_text(markdown(settings, args.date) + "\n")
    for setting in settings:
        if any(p.peak > 0 for p in setting.fitting):
            (out / f"{setting.name()}.svg").write_text(svg(setting, args.date))
    print(f"{out}/results.md: {len(settings)} settings, {sum(len(s.points) for s in settings)} points")


if __name__ == "__main__":
    main()
