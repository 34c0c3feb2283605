#!/usr/bin/env python3
"""Writes the tables of docs/results.md, docs/memory.md and docs/python.md from the JSON of bench/run_all.sh.

  bench/tables.py build/results/COMMIT [docs/results.md docs/memory.md docs/python.md]

A table stands between <!-- table: NAME --> and <!-- end -->. Where the folder has the JSON of a table, the table is replaced, with a line
below it that names command, machine, date and commit; else it stays as it is, and the program says which. A table is of one run: where a
part of it was not measured, none of it is replaced. Standard library only.
"""
import json
import math
import pathlib
import re
import statistics
import sys

MIB, GIB = 2**20, 2**30


class Missing(Exception):
    """The folder has no such measurement."""


class Run:
    """A folder of run_all.sh: run.json says what was run, where and when; NAME.json is what a benchmark wrote."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.about = json.loads((self.folder / "run.json").read_text())

    def json(self, name):
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise Missing(name)
        return json.loads(path.read_text())

    def has(self, name):
        return (self.folder / f"{name}.json").is_file()

    def source(self, *names):
        """The line below a table: command, machine, date, commit."""
        commands = {n: self.about["commands"][n] for n in names if n in self.about["commands"]}
        on_gpu = [n.startswith(("gpu/", "python/")) or "--device cuda" in c for n, c in commands.items()]
        machines = ([self.about["cpu"]] if not all(on_gpu) else []) + ([self.about["gpu"]] if any(on_gpu) else [])
        shown = [f"`{c}`" for c in commands.values()]
        if len(shown) > 2:
            shown = [shown[0] + " and so on"]
        return " · ".join([*shown, *machines, self.about["date"], self.about["commit"]])


# --- words for numbers ------------------------------------------------------------------------------------------------

def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in rows])


def signed(value, digits=2):
    return f"{value:+.{digits}f}".replace("-", "−")


def bytes_text(count):
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:,.2f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"


def ran(result):
    return result.get("fits", True) and not result.get("error")


def by_method(file):
    return {r["method"]: r for r in file["results"] if ran(r)}


def paired(runs, method, base="fp32"):
    """Mean and deviation of a method's test figure, and its mean difference to the base by seed with its standard error."""
    tests = {m: {r["seed"]: r["test"] for r in runs if r["method"] == m} for m in (method, base)}
    own = list(tests[method].values())
    differences = [own_test - tests[base][seed] for seed, own_test in tests[method].items() if seed in tests[base]]
    deviation = statistics.stdev(own) if len(own) > 1 else 0.0
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return statistics.mean(own), deviation, statistics.mean(differences), error


def methods_of(runs):
    return list(dict.fromkeys(r["method"] for r in runs))


def saved_of(runs, method):
    return next(r["saved_bytes"] for r in runs if r["method"] == method)


def accuracy_rows(runs):
    for method in methods_of(runs):
        mean, deviation, difference, error = paired(runs, method)
        saved = saved_of(runs, method)
        less = "" if method == "fp32" else f"{saved_of(runs, 'fp32') / saved:.1f}×"
        yield [f"`{method}`", f"{mean:.2f} ± {deviation:.2f}", "" if method == "fp32" else f"{signed(difference)} ± {error:.2f}",
               bytes_text(saved), less]


# --- graphs -----------------------------------------------------------------------------------------------------------

def graph_accuracy(run):
    return table(["method", "test % ± deviation", "− fp32 ± standard error", "saved", "less"],
                 accuracy_rows(run.json("train_arxiv")["runs"])), run.source("train_arxiv")


SMALL = {"cora": "Cora, accuracy", "amazon-computers": "Amazon Computers, accuracy", "coauthor-cs": "Coauthor CS, accuracy",
         "tolokers": "tolokers, ROC AUC"}


def graph_small(run):
    rows, names = [], []
    for data, label in SMALL.items():
        for model in ("gcn", "sage"):
            name = f"train_{data}_{model}"
            names.append(name)
            runs = run.json(name)["runs"]
            base, (own, _, difference, error) = paired(runs, "fp32")[0], paired(runs, "satchel")
            saved = [saved_of(runs, m) for m in ("fp32", "satchel")]
            rows.append([label, model.upper(), f"{base:.2f}", f"{own:.2f}", f"{signed(difference)} ± {error:.2f}",
                         bytes_text(saved[0]), bytes_text(saved[1]), f"{saved[0] / saved[1]:.1f}×"])
    head = ["data, metric", "model", "fp32", "satchel", "difference ± standard error", "saved: fp32", "satchel", "less"]
    return table(head, rows), run.source(*names)


def graph_step_cpu(run):
    results = by_method(run.json("graph_cpu"))
    base = results["torch"]["epoch_seconds"]
    rows = [[f"`{m}`" if m != "torch" else "torch", f"{r['epoch_seconds'] * 1e3:.1f} ms", f"{r['epoch_seconds'] / base:.2f}",
             bytes_text(r["saved_bytes"]), bytes_text(r["peak_bytes"])] for m, r in results.items()]
    return table(["method", "step", "of torch's time", "saved", "peak"], rows), run.source("graph_cpu")


SETTINGS = [(128, "on"), (128, "off"), (256, "on"), (256, "off")]
TORCH_ROWS = {"fp32": "PyTorch fp32 (Python)", "bf16": "PyTorch bf16 autocast", "checkpoint": "per-layer checkpointing",
              "offload": "save_on_cpu", "compile-1": "torch.compile, memory budget 1", "compile-0.5": "… 0.5", "compile-0.25": "… 0.25",
              "compile-0.1": "… 0.1", "pyg": "PyG SAGEConv, sparse adjacency", "pyg-edges": "PyG SAGEConv, edge_index"}
# Suffix of the file, method, and the row's name; run_cuda.sh writes the files.
OWN_ROWS = [("", "torch", "libtorch"), *(("torch", m, name) for m, name in TORCH_ROWS.items()),
            ("", "fp32", "Satchel `fp32`: torch's functions and saves"), ("_graph", "exact", "`exact`, CUDA graph"),
            ("_graph", "blockwise", "`blockwise`, CUDA graph"), ("", "satchel", "`satchel`, eager"),
            ("_graph", "satchel", "**`satchel`, CUDA graph**"), ("_training_graph", "satchel", "… the last layer of training nodes alone"),
            ("_some_cache_graph", "satchel", "… a part of A·X cached"),
            ("_no_cache_graph", "satchel", "… A·X not cached"), ("_none_graph", "satchel", "… float32 between layers"),
            ("_bf16_graph", "satchel", "… bf16 between layers"), ("", "satchel,bits=32", "`satchel,bits=32`: nothing packed")]


def graph_point(run, setting, suffix, method):
    name = f"gpu/{'torch' if suffix == 'torch' else 'satchel'}_h{setting[0]}_tf32_{setting[1]}" + ("" if suffix == "torch" else suffix)
    return by_method(run.json(name)).get(method) if run.has(name) else None


def graph_step_gpu(run):
    bases = {s: graph_point(run, s, "", "torch") for s in SETTINGS}
    for (hidden, tf32), base in bases.items():
        if not base:
            raise Missing(f"gpu/satchel_h{hidden}_tf32_{tf32}")
    rows = []
    for suffix, method, name in OWN_ROWS:
        cells = []
        for setting in SETTINGS:
            point, base = graph_point(run, setting, suffix, method), bases[setting]
            own = suffix != "torch" and method != "torch" and base
            of = (lambda key: f" ({point[key] / base[key]:.2f})" if own else "")
            cells.append(f"{point['epoch_seconds'] * 1e3:.2f}{of('epoch_seconds')} · {point['peak_bytes'] / MIB:,.0f}{of('peak_bytes')}"
                         if point else "")
        if any(cells):
            rows.append([name, *cells])
    head = ["step ms · peak MiB (of libtorch's)", *(f"hidden {h}, {'TF32' if t == 'on' else 'full fp32'}" for h, t in SETTINGS)]
    return table(head, rows), run.source("gpu/run_cuda")


def graph_products(run):
    rows = []
    for name in ("gpu/satchel_products", "gpu/satchel_products_no_cache", "gpu/torch_products"):
        for r in run.json(name)["results"] if run.has(name) else []:
            label = {"gpu/torch_products": "PyTorch: ", "gpu/satchel_products_no_cache": "A·X not cached: "}.get(name, "") + r["method"]
            rows.append([label, f"{r['epoch_seconds'] * 1e3:.1f} ms", bytes_text(r["peak_bytes"])] if ran(r) else [label, "does not fit", ""])
    if not rows:
        raise Missing("gpu/satchel_products")
    return table(["method", "step", "peak"], rows), run.source("gpu/run_cuda")


def graph_spmm(run):
    results = run.json("gpu/spmm")["results"]
    widths = sorted({r["columns"] for r in results})
    rows = []
    for graph in dict.fromkeys(r["graph"] for r in results):
        for kind in dict.fromkeys(r["type"] for r in results):
            for key, product in (("forward", "A·x"), ("transpose", "Aᵀ·x")):
                found = {r["columns"]: r[key] for r in results if r["graph"] == graph and r["type"] == kind}
                cells = [f"{found[w]['seconds'] * 1e3:.3f} ({found[w]['ratio']:.2f})" if w in found else "" for w in widths]
                rows.append([f"{graph}, {kind}, {product}", *cells])
    return table(["columns", *map(str, widths)], rows), run.source("gpu/run_cuda")


def graph_product(run):
    rows = []
    for r in run.json("gpu/product")["results"]:
        own = [f"{r['seconds'] * 1e3:.3f} ms", f"{r['ratio']:.2f}", f"{r['error']:.1e}"] if r["split"] else ["torch's own", "", ""]
        rows.append([r["hidden"], r["product"], *own, f"{r['torch_seconds'] * 1e3:.3f} ms", f"{r['torch_error']:.1e}"])
    return table(["hidden", "product", "Satchel", "of cuBLAS's time", "error", "cuBLAS", "its error"], rows), run.source("gpu/run_cuda")


# --- images -----------------------------------------------------------------------------------------------------------

IMAGE_ROWS = [("torch", "fp32", "PyTorch (Python)"), ("torch", "checkpoint", "checkpointing, each block"),
              *(("torch", f"compile-{b}", f"torch.compile, memory budget {b}" if b == "1" else f"… {b}") for b in ("1", "0.5", "0.25", "0.1"))]


def images_step(run):
    sides = []
    for types in ("tf32", "bf16"):
        name = f"gpu/satchel_images_{types}"
        sides.append({"satchel": by_method(run.json(name)),
                      "torch": by_method(run.json(f"gpu/torch_images_{types}")) if run.has(f"gpu/torch_images_{types}") else {}})
    own = [("satchel", m, "`fp32`: libtorch" if m == "fp32" else f"**`{m}`**" if m == "satchel" else f"`{m}`") for m in sides[0]["satchel"]]
    rows = []
    for program, method, name in own[:1] + IMAGE_ROWS + own[1:]:
        row = [name]
        for side in sides:
            r, base = side[program].get(method), side["satchel"]["fp32"]
            row += [f"{r['step_seconds'] * 1e3:.1f} ms ({r['step_seconds'] / base['step_seconds']:.2f})", f"{r['saved_bytes'] / GIB:.2f}",
                    f"{r['peak_bytes'] / GIB:.2f}"] if r else ["", "", ""]
        if any(row[1:]):
            rows.append(row)
    head = ["", "TF32: step (of fp32's)", "saved GiB", "peak GiB", "bf16: step (of fp32's)", "saved GiB", "peak GiB"]
    return table(head, rows), run.source("gpu/run_cuda")


def images_batch(run):
    results = run.json("gpu/batch")["results"]
    base = next((r["batch"] for r in results if r["method"] == "fp32"), None)
    rows = [[f"`{r['method']}`", r["batch"], f"{r['batch'] / base:.1f}×" if base else "", r["planned_batch"],
             f"{r['images_per_second']:,.0f}"] for r in results if ran(r)]
    return table(["method", "largest batch", "of fp32's", "planned", "images/s"], rows), run.source("gpu/run_cuda")


def images_accuracy(run):
    rows, names = [], []
    for name, label in (("train_cifar10", "CIFAR-10 part"), ("train_fashion", "Fashion-MNIST")):
        names.append(name)
        rows += [[label, *row] for row in accuracy_rows(run.json(name)["runs"])]
    return table(["data", "method", "test % ± deviation", "− fp32 ± standard error", "saved", "less"], rows), run.source(*names)


# --- codec, bias, plans -----------------------------------------------------------------------------------------------

def codec(run):
    cpu, gpu = ({r["op"]: r for r in run.json(name)["results"]} for name in ("codec_cpu", "gpu/codec"))
    rows = []
    for op, own in cpu.items():
        pairs = [cell for r in (own, gpu[op]) for cell in (f"{r['seconds'] * 1e3:.3g} ms", f"{r['share']:.2f}")]
        rows.append([op, *pairs, f"{own['rmse']:.4f}"])
    return table(["operation", "CPU", "of a copy's speed", "GPU", "of a copy's speed", "rmse"], rows), run.source("codec_cpu", "gpu/run_cuda")


def worst(tensors):
    """The tensor nearest to a limit; of its passes the last that was made."""
    last = lambda t: t.get("again") or t["first"]
    return max(((t["name"], last(t)) for t in tensors), key=lambda nt: max(abs(nt[1]["t"]), nt[1]["z"]))


def bias(run):
    file = run.json("bias")
    rows = []
    for r in file["results"]:
        name, m = worst(r["tensors"])
        rows.append([r["net"], r["loss"], f"{r['rows']:,}", name, signed(m["t"], 1), signed(m["z"], 1), f"{m['bias'] * 100:.2f} %",
                     f"{m['noise'] * 100:.2f} %"])
    return table(["net", "loss", "rows", "worst tensor", "t", "z", "bias √T/‖g‖", "noise of one pass"], rows), run.source("bias")


def bias_pairs(run):
    """Of every norm × activation the tensor nearest to a limit, over both layouts, with and without dropout, and both losses."""
    cells = {}
    for r in run.json("bias_pairs")["results"]:
        norm, activation = re.fullmatch(r"([a-z]+)_(\w+?)_(?:rows|images)(?:_dropout)?", r["net"]).groups()
        cells.setdefault(activation, {}).setdefault(norm, []).extend(r["tensors"])
    norms = list(next(iter(cells.values())))
    rows = []
    for activation, by_norm in cells.items():
        measured = [worst(by_norm[norm])[1] for norm in norms]
        rows.append([activation, *(f"{signed(m['t'], 1)}, {signed(m['z'], 1)}" for m in measured)])
    return table(["activation", *(f"{norm}: t, z" for norm in norms)], rows), run.source("bias_pairs")


def plan_table(name):
    def made(run):
        file = run.json(f"plan_{name}")
        parts = ["features", "norms", "activations", "masks", "metadata", "labels", "projections"]
        mib = lambda count: f"{count / MIB:,.2f}"
        digits = 0 if all(r["published_mib"] == int(r["published_mib"]) for r in file["rows"]) else 2  # as the paper prints them
        rows = [[r["name"], f"{r['published_mib']:,.{digits}f}", mib(r["model_bytes"]), *(mib(r["parts"][p]) for p in parts), mib(r["own_bytes"])]
                for r in file["rows"]]
        rows += [[f"`{m['method']}`", *[""] * (len(parts) + 2), mib(m["own_bytes"])] for m in file.get("methods", [])]
        return table(["", "published", "model", *parts, "Satchel"], rows), run.source(f"plan_{name}")
    return made


def plan_division(run):
    titles = {"resnet50": "ResNet-50", "wide_resnet50_2": "Wide ResNet-50-2"}
    gib = lambda count: f"{count / GIB:.2f}"

    def model(row):
        """The byte model's figure, and by how much it misses the published one where that shows."""
        if row["published_gib"] is None:
            return gib(row["model_bytes"])
        miss = f"{(row['model_bytes'] / GIB / row['published_gib'] - 1) * 100:+.1f} %".replace("-", "−")
        return gib(row["model_bytes"]) + ("" if miss[1:] == "0.0 %" else f" ({miss})")

    rows = []
    for column in run.json("plan_division")["columns"]:
        first = len(rows)
        rows += [["", r["name"], "did not fit" if r["published_gib"] is None else f"{r['published_gib']:.2f}", model(r), gib(r["own_bytes"])]
                 for r in column["rows"]]
        rows += [["", f"`{m['method']}`", "", "", gib(m["own_bytes"])] for m in column.get("methods", [])]
        rows[first][0] = f"{titles[column['model']]}, batch {column['batch']}"
    return table(["", "", "published", "model", "Satchel"], rows), run.source("plan_division")


# --- Python -----------------------------------------------------------------------------------------------------------

PYTHON_ROWS = {"eager": "PyTorch, eager", "packing": "`satchel.packing()`", "convert": "`satchel.convert()`", "convert+graph": "… captured in a CUDA graph",
               "compile": "torch.compile", "compile+graph": "… launched as CUDA graphs", "budget:0.5": "… memory budget 0.5", "budget:0.25": "… 0.25", "budget:0.1": "… 0.1",
               "satchel": "`satchel.compile()`", "satchel+graph": "… launched as CUDA graphs", "checkpoint": "checkpointing each block", "save_on_cpu": "save_on_cpu"}


def python_models(run):
    names = {"gpt": "GPT-2's shape, 32 × 512 tokens", "resnet50": "ResNet-50, batch 256"}
    sides = [by_method(run.json(f"python/{name}")) for name in names]
    rows = []
    for method, label in PYTHON_ROWS.items():
        found = [side.get(method) for side in sides]
        cells = [[f"{r['step_seconds'] * 1e3:.1f} ms", f"{r['saved_bytes'] / GIB:.2f} GiB", f"{r['peak_bytes'] / GIB:.2f} GiB"] if r else [""] * 3 for r in found]
        if any(found):
            rows.append([label, *cells[0], *cells[1]])
    head = ["", *(cell for name in names.values() for cell in (f"{name}: step", "saved", "peak"))]
    return table(head, rows), run.source(*(f"python/{name}" for name in names))


# --- the summary ------------------------------------------------------------------------------------------------------

def summary(run):
    """Ten rows: what was measured, the baseline, with Satchel. All of one run, or none."""
    rows = []

    def row(what, make):
        rows.append([what, *make()])

    def trained(name, show):
        runs = run.json(name)["runs"]
        return show(runs, "fp32"), show(runs, "satchel")

    def test(runs, method):
        mean, _, difference, error = paired(runs, method)
        return f"{mean:.2f} %" + ("" if method == "fp32" else f" ({signed(difference)} ± {error:.2f})")

    def graph_gpu():
        base, own = (graph_point(run, (128, "on"), *p) for p in (("", "torch"), ("_graph", "satchel")))
        if not base or not own:
            raise Missing("gpu/satchel_h128_tf32_on")
        return [f"{r['epoch_seconds'] * 1e3:.2f} ms · {r['peak_bytes'] / MIB:,.0f} MiB" for r in (base, own)]

    def graph_cpu():
        results = by_method(run.json("graph_cpu"))
        return [f"{results[m]['epoch_seconds'] * 1e3:.1f} ms · {results[m]['peak_bytes'] / MIB:.1f} MiB" for m in ("torch", "satchel")]

    def products():
        results = {r["method"]: r for r in run.json("gpu/satchel_products")["results"]}
        return [f"{r['epoch_seconds'] * 1e3:.1f} ms · {bytes_text(r['peak_bytes'])}" if ran(r) else "does not fit"
                for r in (results["torch"], results["satchel"])]

    def images(show):
        results = by_method(run.json("gpu/satchel_images_tf32"))
        return show(results["fp32"]), show(results["satchel"])

    def batch():
        results = {r["method"]: r["batch"] for r in run.json("gpu/batch")["results"]}
        return results["fp32"], results["satchel"]

    def biased():
        file = run.json("bias")
        tensors = sum(len(r["tensors"]) for r in file["results"])
        return "", f"{file['biased']} of {tensors} tensors biased"

    row("graph, arxiv: test accuracy", lambda: trained("train_arxiv", test))
    row("graph, arxiv: saved for backward", lambda: trained("train_arxiv", lambda runs, m: bytes_text(saved_of(runs, m))))
    row("graph, arxiv shape, GPU, TF32: step · peak", graph_gpu)
    row("graph, a tenth of arxiv, CPU: step · peak", graph_cpu)
    row("graph, products shape within 12 GB: step · peak", products)
    row("ResNet-50, batch 256: saved for backward", lambda: images(lambda r: bytes_text(r["saved_bytes"])))
    row("ResNet-50, batch 256, TF32: step · peak", lambda: images(lambda r: f"{r['step_seconds'] * 1e3:.1f} ms · {bytes_text(r['peak_bytes'])}"))
    row("ResNet-50: largest batch in 16 GB", batch)
    row("Fashion-MNIST: test accuracy", lambda: trained("train_fashion", test))
    row("gradients right on average (`bench bias`)", biased)
    return table(["what", "torch", "`satchel`"], rows), f"one run of bench/run_all.sh · {run.about['cpu']} · {run.about['gpu']} · {run.about['date']} · {run.about['commit']}"


TABLES = {"summary": summary, "graph-accuracy": graph_accuracy, "graph-small": graph_small, "graph-step-cpu": graph_step_cpu,
          "graph-step-gpu": graph_step_gpu, "graph-products": graph_products, "graph-spmm": graph_spmm, "graph-product": graph_product,
          "images-step": images_step, "images-batch": images_batch, "images-accuracy": images_accuracy, "codec": codec, "bias": bias,
          "bias-pairs": bias_pairs, "plan-arxiv": plan_table("arxiv"), "plan-products": plan_table("products"),
          "plan-division": plan_division, "python-models": python_models}


def rewritten(text, run, say):
    """The page with every table that the run has; say(line) tells which it has not."""

    def replaced(match):
        name = match[1]
        if name not in TABLES:
            sys.exit(f"tables: there is no table '{name}', got {', '.join(TABLES)}")
        try:
            body, source = TABLES[name](run)
        except Missing as missing:
            say(f"{name}: not measured ({missing}.json), left as it is")
            return match[0]
        return f"<!-- table: {name} -->\n\n{body}\n\n{source}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", replaced, text, flags=re.S)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    run = Run(sys.argv[1])
    root = pathlib.Path(__file__).resolve().parent.parent
    for page in map(pathlib.Path, sys.argv[2:] or [root / f"docs/{name}.md" for name in ("results", "memory", "python")]):
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, run, lambda line: print(f"{page.name}: {line}", file=sys.stderr))
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page}: tables of {run.about['commit']}")


if __name__ == "__main__":
    main()
