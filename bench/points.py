"""Results of training benchmarks as points of time and memory: reads the JSON, names what was measured and orders it by setting."""
import json
import math
import pathlib
import sys

ORDER = ("PyTorch", "torch.compile", "PyG", "Satchel")  # in tables
MIB = 2**20


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


def is_python(file):
    return file.get("program") == "python_models.py"


def seconds_key(file):
    return "step_seconds" if is_image(file) or is_python(file) else "epoch_seconds"


def named(file, result):
    name = result["method"]
    if is_image(file):
        return named_image(file, name)
    if is_python(file):
        return named_python(name)
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


def named_python(name):
    kind, _, option = name.removesuffix("+graph").partition(":")
    graph = ", CUDA graph" if name.endswith("+graph") else ""
    if kind in ("compile", "budget"):
        return "torch.compile", f"torch.compile, budget {option or 1}{graph}"
    if kind in ("packing", "convert", "satchel"):
        return "Satchel", {"satchel": "satchel.compile()"}.get(kind, f"satchel.{kind}()") + (f" {option}" if option else "") + graph
    return "PyTorch", {"eager": "PyTorch, eager", "checkpoint": "checkpointing"}.get(kind, kind)


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
        return by_label.get("PyTorch fp32") or by_label.get("libtorch") or by_label.get("PyTorch, eager")

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


class PythonSetting(Setting):
    KEYS = ("model", "batch", "type", "cap")
    USUAL = {}
    STEP = "step"

    def stem(self):
        return "python_{model}_b{batch}_{type}".format(**self.about)

    def shape(self):
        return "{model} in Python, batch {batch}, {type}".format(**self.about)


def setting_of(file):
    return PythonSetting(file) if is_python(file) else ImageSetting(file) if is_image(file) else Setting(file)


def drawn(points):
    """Without the eager point of what was measured as a CUDA graph too: it stands right beside it, a few launches slower."""
    def eager(label):
        return label.replace("CUDA graph, ", "").replace(", CUDA graph", "").replace(" (CUDA graph)", "")
    captured = {eager(p.label) for p in points if "CUDA graph" in p.label}
    return [p for p in points if p.label not in captured]


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
            if not isinstance(file, dict) or "results" not in file or not ("hidden" in file or is_image(file) or is_python(file)) or "multiple" in file:
                continue  # of another benchmark
            check(file)
            setting = setting_of(file)
            settings.setdefault(tuple(v or None for v in setting.about.values()), setting).add(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            sys.exit(f"picture: {path} must be JSON of a training benchmark, got {type(error).__name__}: {error}")
        files.append({"file": pathlib.Path(path).name, **file})
    return files, list(settings.values())
