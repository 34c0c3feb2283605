#!/usr/bin/env python3
"""Peak memory against step time, one point a method: pictures, a Markdown table and one JSON of many.

  bench/picture.py --out build/bench build/bench/*.json

Reads what `satchel bench graph --json` and graph_torch.py --json wrote, or `satchel bench images --json` and image_torch.py
--json. Files of the same data, model, types and memory cap belong together. Writes results.json (all of them), results.md (a table a setting) and one SVG a setting. Standard library only.
"""
import argparse
import datetime
import json
import math
import pathlib
import sys
from html import escape

COLOURS = {"Satchel": "#00796b", "PyTorch": "#d95f02", "torch.compile": "#7b3fa0", "PyG": "#5f6b7a"}
ORDER = ("PyTorch", "torch.compile", "PyG", "Satchel")  # in tables
MIB = 2**20


# --- results ----------------------------------------------------------------------------------------------------------

class Point:
    """A method's result. `family` chooses the colour; `label` is its name in the picture."""

    def __init__(self, file, result):
        self.result, self.fits = result, ran(result)
        self.family, self.label = named(file, result)
        if self.fits:
            self.ms, self.peak = result[seconds_key(file)] * 1e3, result["peak_bytes"] / MIB

    def beats(self, other):
        """Is it no slower and no larger, and one of them better?"""
        return self.ms <= other.ms and self.peak <= other.peak and (self.ms < other.ms or self.peak < other.peak)


def ran(result):
    """Was it measured? Else it did not fit, or says why not."""
    return result.get("fits", True) and not result.get("error")


def is_image(file):
    return "image" in file


def seconds_key(file):
    return "step_seconds" if is_image(file) else "epoch_seconds"


def named(file, result):
    name = result["method"]
    if is_image(file):
        return named_image(file, name)
    if file.get("program") == "graph_torch.py":
        if name.startswith("compile-"):
            return "torch.compile", "compile " + name.removeprefix("compile-")
        names = {"fp32": "PyTorch fp32", "bf16": "PyTorch bf16", "checkpoint": "checkpointing", "offload": "save_on_cpu",
                 "pyg": "PyG sparse", "pyg-edges": "PyG edge_index"}
        return "PyG" if name.startswith("pyg") else "PyTorch", names.get(name, name)
    family = "PyTorch" if name == "torch" else "Satchel"
    label = {"torch": "libtorch", "satchel,bits=32": "satchel 32 bits"}.get(name, name)
    kinds = [amp] if (amp := result.get("amp", file.get("amp", "none"))) != "none" else []
    kinds += ["CUDA graph"] if result.get("cuda_graph", False) else []
    kinds += ["A·X not cached"] if file.get("cache") is False and family == "Satchel" else []
    kinds += [f"{file['cache_limit']} of A·X cached"] if file.get("cache_limit") and family == "Satchel" else []
    return family, f"{label} ({', '.join(kinds)})" if kinds else label


def named_image(file, name):
    if file.get("program") == "image_torch.py":
        if name.startswith("compile-"):
            return "torch.compile", "compile " + name.removeprefix("compile-")
        return "PyTorch", {"fp32": "PyTorch fp32", "checkpoint": "checkpointing"}.get(name, name)
    return ("PyTorch", "libtorch") if name == "fp32" else ("Satchel", name)


class Setting:
    """What points of one picture have in common."""

    STEP = "epoch"  # what a step is called

    KEYS = ("nodes", "entries", "model", "layers", "hidden", "norm", "activation", "dropout", "device", "tf32", "cap")
    USUAL = {"model": "sage", "layers": 3, "norm": "batch", "activation": "relu", "dropout": 0.5, "device": "cuda"}

    def __init__(self, file):
        self.about = {key: file.get(key, self.USUAL.get(key)) for key in self.KEYS}
        self.machine = file.get("machine", {})
        self.points = []

    def add(self, file):
        self.machine = {**file.get("machine", {}), **self.machine}
        for point in (Point(file, r) for r in file["results"]):
            if any(p.label == point.label for p in self.points):  # every program measures PyTorch once: the first counts
                if point.family == "Satchel":
                    print(f"picture: {point.label} of {self.title()} stands there already, left out", file=sys.stderr)
                continue
            self.points.append(point)
        self.points.sort(key=lambda p: ORDER.index(p.family))  # stable

    @property
    def fitting(self):
        return [p for p in self.points if p.fits]

    def base(self):
        """What ratios are to: PyTorch fp32 of the Python script, else the C++ one."""
        by_label = {p.label: p for p in self.fitting}
        return by_label.get("PyTorch fp32") or by_label.get("libtorch")

    def name(self):
        a = self.about
        name = self.stem() + "".join(f"_{key}_{a[key]}" for key, usual in self.USUAL.items() if a[key] != usual)
        name += f"_cap{a['cap'] / 1e9:g}GB" if a["cap"] else ""
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)

    def title(self):
        machine = self.machine.get("gpu") or f"{self.machine.get('threads', '')} CPU threads".strip()
        cap = f", memory capped at {self.about['cap'] / 1e9:g} GB" if self.about["cap"] else ""
        return f"{machine}, {self.shape()}{cap}"

    def tf32(self):
        return "on" if self.about["tf32"] else "off"

    def stem(self):
        """What a picture's file name starts with."""
        a = self.about
        return (f"n{a['nodes']}_" if a["nodes"] else "") + f"h{a['hidden']}_tf32_{self.tf32()}"

    def shape(self):
        """Model, data and types in words."""
        a = self.about
        data = f", {a['nodes']:,} nodes, {a['entries']:,} edges" if a["nodes"] else ""
        return f"{a['model']} {a['layers']} × {a['hidden']}{data}, TF32 {self.tf32()}"

    def captions(self):
        """Who beats whom in both time and peak."""
        own = [p for p in self.fitting if p.family == "Satchel"]
        others = [p for p in self.fitting if p.family != "Satchel"]
        beaten = [p.label for p in others if any(o.beats(p) for o in own)]
        lines = ["A Satchel point is both faster and smaller than: " + (", ".join(beaten) or "none") + "."]
        for p in others:
            worse = [o.label for o in own if p.beats(o)]
            if worse:
                lines.append(f"{p.label} is both faster and smaller than Satchel's: {', '.join(worse)}.")
        missing = [p.label for p in self.points if not p.fits]
        if missing:
            lines.append("Failed or did not fit: " + ", ".join(missing) + ".")
        return lines


class ImageSetting(Setting):
    KEYS = ("model", "width", "image", "classes", "batch", "device", "tf32", "amp", "channels_last", "cap")
    USUAL = {"width": 64, "classes": 1000, "device": "cuda", "channels_last": True}
    STEP = "step"

    def __init__(self, file):
        super().__init__({"batch": file["results"][0].get("batch"), **file})

    def stem(self):
        a = self.about
        types = a["amp"] if a["amp"] not in (None, "none") else "tf32" if a["tf32"] else "fp32"
        return f"{a['model']}_b{a['batch']}_{types}" + (f"_image{a['image']}" if a["image"] != 224 else "")

    def shape(self):
        a = self.about
        types = f"autocast to {a['amp']}" if a["amp"] not in (None, "none") else f"TF32 {self.tf32()}"
        return f"{a['model']}, {a['batch']} images of {a['image']} × {a['image']}, {types}"


def setting_of(file):
    return ImageSetting(file) if is_image(file) else Setting(file)


def front(points):
    """The points that none beats, from fast to slow."""
    best = [p for p in points if not any(o.beats(p) for o in points)]
    return sorted(best, key=lambda p: (p.ms, p.peak))


def check(file):
    """Numbers where numbers are read: a table and a picture can be made of it."""
    for key in ("hidden", "layers", "nodes", "entries", "cap"):
        if file.get(key) is not None and not isinstance(file[key], (int, float)):
            raise ValueError(f"{key} must be a number")
    if not isinstance(file["results"], list) or not file["results"]:
        raise ValueError("results must be a list of some")
    for result in file["results"]:
        if not isinstance(result["method"], str):
            raise ValueError("method must be text")
        seconds = seconds_key(file)
        for key in (seconds, "peak_bytes", "saved_bytes", "loss_bytes") if ran(result) else ():
            if not (math.isfinite(result[key]) and result[key] >= (1e-9 if key == seconds else 0)):
                raise ValueError(f"{key} must be a finite number above 0")


def read(paths):
    files, settings = [], {}
    for path in paths:
        try:
            file = json.loads(pathlib.Path(path).read_text())
            if not isinstance(file, dict) or "results" not in file or not ("hidden" in file or is_image(file)) or "multiple" in file:
                continue  # of another benchmark
            check(file)
            setting = setting_of(file)
            settings.setdefault(tuple(v or None for v in setting.about.values()), setting).add(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            sys.exit(f"picture: {path} must be JSON of a training benchmark, got {type(error).__name__}: {error}")
        files.append({"file": pathlib.Path(path).name, **file})
    return files, list(settings.values())


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
             "Saved: allocated after forward − before, less the logits. Loss: the logits and what the loss added. "
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
    points, width, height = setting.fitting, 960, 560
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
