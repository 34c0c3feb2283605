#!/usr/bin/env python3
"""What PyTorch and PyG themselves offer, on the same graph and with the same model as `satchel bench graph`.

  satchel data --data synthetic:arxiv --out arxiv/
  bench/graph_torch.py --data arxiv/ --hidden 128 --json torch.json

GraphSAGE by full-batch steps: forward, cross entropy over the training nodes, backward, Adam. A layer is
mean_neighbours(x) Wl + b + x Wr, then BatchNorm, ReLU and dropout (not after the last).

  fp32         eager; the mean is a sparse CSR product whose transpose is kept ready
  bf16         the same under autocast; features and matrix in bfloat16
  compile-B    torch.compile with activation_memory_budget B, one of 1, 0.5, 0.25, 0.1: below 1 it recomputes
  checkpoint   every layer recomputed in backward (torch.utils.checkpoint)
  offload      what autograd saves goes to pinned host memory (torch.autograd.graph.save_on_cpu)
  pyg          torch_geometric's SAGEConv with a sparse adjacency, its memory-efficient way
  pyg-edges    … with a plain edge_index: messages edge by edge

The JSON has the fields of `satchel bench graph --json`:
  epoch_seconds  median step
  saved_bytes    asked for after forward - before, less the logits
  loss_bytes     the logits and what the loss added
  peak_bytes     the most allocated during a step - what stood before it
  fits           false where memory ran out or the method failed; `error` says why
"""
import argparse
import contextlib
import datetime
import json
import pathlib
import platform
import statistics
import sys
import time
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_common import Meter, at_least, attempt

warnings.filterwarnings("ignore", message="Sparse CSR tensor support")  # it is in beta
torch.sparse.check_sparse_tensor_invariants.disable()  # as it is anyway, but without a warning

WARM_UPS = 3  # steps before those that are timed; the last one's memory is watched
BUDGETS = ("1", "0.5", "0.25", "0.1")


# --- the graph --------------------------------------------------------------------------------------------------------

class Graph:
    """The folder of `satchel data`: a GraphSAINT one with edges in both directions and no self loops."""

    def __init__(self, folder, device):
        folder = pathlib.Path(folder)
        with np.load(folder / "adj_full.npz") as adjacency:
            start, column = adjacency["indptr"], adjacency["indices"]
            if np.any(adjacency["data"] != 1):
                sys.exit("graph_torch: edges must have no weights (satchel data --unweighted leaves them out)")
        features = np.load(folder / "feats.npy")
        classes = json.loads((folder / "class_map.json").read_text())
        self.nodes, self.edges = len(start) - 1, len(column)
        labels = np.full(self.nodes, -100)
        for node, label in classes.items():
            if isinstance(label, list):
                sys.exit("graph_torch: labels must be one class a node, got lists (a multi-label data set)")
            labels[int(node)] = label
        train = np.array(json.loads((folder / "role.json").read_text())["tr"])
        self.classes = int(labels.max()) + 1

        index = np.int32 if self.edges < 2**31 else np.int64  # cuSPARSE's own
        self.start = torch.from_numpy(start.astype(index)).to(device)
        self.column = torch.from_numpy(column.astype(index)).to(device)
        self.x = torch.from_numpy(features.astype(np.float32)).to(device)
        self.train = torch.from_numpy(train).to(device)
        self.train_labels = torch.from_numpy(labels[train]).to(device)
        degree = np.maximum(np.diff(start), 1).astype(np.float32)
        # A = D^-1 S with a symmetric S, so that its transpose S D^-1 has the same start and column.
        self.value = torch.from_numpy(np.repeat(1 / degree, np.diff(start))).to(device)
        self.transposed_value = torch.from_numpy((1 / degree)[column]).to(device)

    def matrix(self, value):
        return torch.sparse_csr_tensor(self.start, self.column, value, (self.nodes, self.nodes))

    def edge_index(self):
        target = torch.repeat_interleave(torch.arange(self.nodes, device=self.start.device), self.start.diff().long())
        return torch.stack([self.column.long(), target])


# --- the mean over neighbours -----------------------------------------------------------------------------------------

class SparseProduct(torch.autograd.Function):
    """A x; backward is A^T g with a transpose that is there already, and x is not kept."""

    @staticmethod
    def forward(context, x, matrix, transpose):
        context.transpose = transpose
        return matrix @ x

    @staticmethod
    def backward(context, g):
        return context.transpose @ g.contiguous(), None, None


def eager_mean(graph, dtype=torch.float32):
    matrix, transpose = graph.matrix(graph.value.to(dtype)), graph.matrix(graph.transposed_value.to(dtype))
    return lambda x: SparseProduct.apply(x, matrix, transpose) if x.requires_grad else matrix @ x


@torch.library.custom_op("satchel_bench::spmm", mutates_args=())
def spmm(start: torch.Tensor, column: torch.Tensor, value: torch.Tensor, transposed_value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    nodes = start.numel() - 1
    return torch.sparse_csr_tensor(start, column, value, (nodes, nodes)) @ x.contiguous()


@spmm.register_fake
def _(start, column, value, transposed_value, x):
    return x.new_empty(x.shape)


def spmm_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])


def spmm_backward(context, g):
    start, column, value, transposed_value = context.saved_tensors
    return None, None, None, None, spmm(start, column, transposed_value, value, g)


spmm.register_autograd(spmm_backward, setup_context=spmm_setup)


def compiled_mean(graph):
    """The same product as one opaque operation: torch.compile does not look into sparse tensors."""
    return lambda x: spmm(graph.start, graph.column, graph.value, graph.transposed_value, x)


# --- the model --------------------------------------------------------------------------------------------------------

class SageLayer(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin_l = torch.nn.Linear(inputs, outputs)
        self.lin_r = torch.nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, mean):
        return self.lin_l(mean(x)) + self.lin_r(x)


class Sage(torch.nn.Module):
    """`mean` is what a layer gets beside x: a function, or the edges in a form that `make_layer`'s layers take."""

    def __init__(self, graph, args, mean, make_layer=SageLayer):
        super().__init__()
        sizes = [graph.x.shape[1]] + [args.hidden] * (args.layers - 1) + [graph.classes]
        self.convs = torch.nn.ModuleList(make_layer(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(size) for size in sizes[1:-1])
        self.mean, self.dropout = mean, args.dropout

    def layer(self, i, x):
        x = self.convs[i](x, self.mean)
        if i == len(self.norms):
            return x
        return F.dropout(F.relu(self.norms[i](x)), self.dropout, self.training)

    def forward(self, x):
        for i in range(len(self.convs)):
            x = self.layer(i, x)
        return x


class CheckpointedSage(Sage):
    def forward(self, x):
        for i in range(len(self.convs)):
            x = checkpoint(self.layer, i, x, use_reentrant=False)
        return x


# --- the methods ------------------------------------------------------------------------------------------------------

class Run:
    """A model with its input, and what stands around its forward pass and its loss."""

    def __init__(self, model, x, around=contextlib.nullcontext, call=None):
        self.model, self.x, self.around = model, x, around
        self.call = model if call is None else call

    def forward(self):
        with self.around():
            return self.call(self.x)

    def loss(self, graph, logits):
        with self.around():
            return F.cross_entropy(logits.index_select(0, graph.train), graph.train_labels)


def fp32(graph, args):
    return Run(Sage(graph, args, eager_mean(graph)), graph.x)


def bf16(graph, args):
    around = lambda: torch.autocast(args.device, dtype=torch.bfloat16)
    return Run(Sage(graph, args, eager_mean(graph, torch.bfloat16)), graph.x.bfloat16(), around)


def checkpointed(graph, args):
    return Run(CheckpointedSage(graph, args, eager_mean(graph)), graph.x)


def offloaded(graph, args):
    around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=args.device == "cuda")
    return Run(Sage(graph, args, eager_mean(graph)), graph.x, around)


def compiled(budget):
    def make(graph, args):
        import torch._functorch.config
        torch._functorch.config.activation_memory_budget = float(budget)
        model = Sage(graph, args, compiled_mean(graph))
        return Run(model, graph.x, call=torch.compile(model, dynamic=False))
    return make


def pyg(edges):
    def make(graph, args):
        from torch_geometric.nn import SAGEConv
        return Run(Sage(graph, args, edges(graph), SAGEConv), graph.x)
    return make


METHODS = {
    "fp32": fp32,
    "bf16": bf16,
    "checkpoint": checkpointed,
    "offload": offloaded,
    "pyg": pyg(lambda graph: graph.matrix(torch.ones_like(graph.value))),
    "pyg-edges": pyg(Graph.edge_index),
} | {f"compile-{budget}": compiled(budget) for budget in BUDGETS}
GROUPS = {"all": list(METHODS), "eager": [n for n in METHODS if not n.startswith("compile")],
          "compile": [n for n in METHODS if n.startswith("compile")]}


# --- measuring --------------------------------------------------------------------------------------------------------

def step(run, graph, optimizer, meter, cost=None):
    """One training step; its memory into `cost` where that is given. Gradients of the step before make room for the new ones."""
    stood = meter.allocated()
    optimizer.zero_grad(set_to_none=True)
    before = meter.requested()
    meter.reset_peak()
    logits = run.forward()
    saved = meter.requested() - before - logits.nbytes
    loss = run.loss(graph, logits)
    del logits
    loss_bytes = meter.requested() - before - saved
    loss.backward()
    optimizer.step()
    if cost is not None and meter.cuda:
        cost.update(saved_bytes=saved, loss_bytes=loss_bytes, peak_bytes=meter.peak() - stood)
    return loss.detach()


def measure(name, graph, args):
    meter = Meter(args.device)
    torch.manual_seed(1)
    run = METHODS[name](graph, args)
    run.model.to(args.device).train()
    optimizer = torch.optim.Adam(run.model.parameters(), lr=0.01, fused=meter.cuda)
    cost, seconds, started = dict.fromkeys(("saved_bytes", "loss_bytes", "peak_bytes"), 0), [], time.perf_counter()
    for i in range(WARM_UPS):
        step(run, graph, optimizer, meter, cost if i == WARM_UPS - 1 else None)
    meter.wait()
    ready = time.perf_counter() - started
    for _ in range(args.steps):
        meter.wait()
        start = time.perf_counter()
        loss = step(run, graph, optimizer, meter)
        meter.wait()
        seconds.append(time.perf_counter() - start)
    if not torch.isfinite(loss):
        raise RuntimeError("the loss is not finite")
    return {"method": name, "epoch_seconds": statistics.median(seconds), **cost, "cached_bytes": 0, "steps": len(seconds),
            "fits": True, "loss": loss.item(), "warm_up_seconds": ready}


def gradients(name, graph, args):
    """All gradients of one step in a line, without dropout and from the same weights."""
    plain = argparse.Namespace(**{**vars(args), "dropout": 0.0})
    run = METHODS[name](graph, plain)
    run.model.to(args.device).train()
    for k, parameter in enumerate(run.model.parameters()):
        generator = torch.Generator().manual_seed(k)
        values = torch.randn(parameter.shape, generator=generator) * 0.1 + (1 if parameter.dim() == 1 else 0)
        parameter.data.copy_(values)
    run.loss(graph, run.forward()).backward()
    return torch.cat([p.grad.float().flatten() for p in run.model.parameters()])


def measure_all(graph, args):
    results = []
    expected, _ = attempt(lambda: gradients("fp32", graph, args))
    for name in args.only:
        error = None
        if expected is not None and name not in GROUPS["compile"]:  # compiling it twice would take minutes
            own, why = attempt(lambda: gradients(name, graph, args))
            error = None if why else ((own - expected).norm() / expected.norm()).item()
        result, why = attempt(lambda: measure(name, graph, args))
        if why:
            result = {"method": name, "fits": False, "error": why}
        if error is not None:
            result["gradient_error"] = error
            most = 0.1 if name == "bf16" else 2e-2 if args.tf32 else 1e-3  # sums in another order; bf16: 8 bits a number
            if not error <= most:
                result = {"method": name, "fits": False, "error": f"gradients are off by {error:.1e} (limit {most:.0e})"}
        results.append(result)
        print(line(result, results[0]), flush=True)
    base = next((r["epoch_seconds"] for r in results if r["method"] == "fp32" and r["fits"]), None)
    for r in results:
        if base and r["fits"]:
            r["ratio"] = r["epoch_seconds"] / base
    return results


# --- the program ------------------------------------------------------------------------------------------------------

def line(r, first):
    if not r["fits"]:
        return f"{r['method']:<14} {r['error']}"
    ratio = f"{r['epoch_seconds'] / first['epoch_seconds']:6.2f}x" if first["fits"] else " " * 7
    mib = "".join(f"{r[key] / 2**20:12.2f}" for key in ("saved_bytes", "loss_bytes", "peak_bytes"))
    return f"{r['method']:<14}{r['epoch_seconds'] * 1e3:9.2f} ms{ratio}{mib} MiB"


def methods(text):
    names = [n for part in text.split(",") for n in GROUPS.get(part, [part])]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"methods are {', '.join(METHODS)}, eager, compile and all, got '{name}'")
    return list(dict.fromkeys(names))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that `satchel data` wrote")
    parser.add_argument("--hidden", type=at_least(1), default=128)
    parser.add_argument("--layers", type=at_least(1), default=3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--steps", type=at_least(1), default=40, help="timed steps of which the median counts")
    parser.add_argument("--tf32", action="store_true", help="float32 products on tensor cores, for all methods")
    parser.add_argument("--only", type=methods, default=methods("all"), metavar="NAMES", help="methods, or eager, compile, all")
    parser.add_argument("--memory-cap", type=at_least(0.01, float), metavar="GB", help="GPU memory that torch may take, in 10^9 bytes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    return parser.parse_args()


def main():
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("graph_torch: no CUDA device (--device cpu runs what there is of it)")
    if args.device == "cpu" and (args.tf32 or args.memory_cap):
        sys.exit("graph_torch: --tf32 and --memory-cap need --device cuda")
    if not 0 <= args.dropout < 1:
        sys.exit(f"graph_torch: --dropout must be at least 0 and below 1, got {args.dropout}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    if args.memory_cap and args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_cap * 1e9 / total))
    if args.json and not pathlib.Path(args.json).resolve().parent.is_dir():
        sys.exit(f"graph_torch: --json must lie in a folder that is there, got {args.json}")
    try:
        graph = Graph(args.data, args.device)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"graph_torch: --data must be a folder that `satchel data` wrote, got {args.data!r}: {error}")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{args.data}: {graph.nodes:,} nodes, {graph.edges:,} entries of A; sage {args.layers} layers x {args.hidden}; "
          f"TF32 {'on' if args.tf32 else 'off'}; torch {torch.__version__} on {gpu or platform.processor() or 'the CPU'}")
    print(f"{'method':<14}{'epoch':>12}{'ratio':>7}{'saved':>12}{'loss':>12}{'peak':>12}", flush=True)
    results = measure_all(graph, args)
    if not args.json:
        return
    machine = {"torch": torch.__version__, "python": platform.python_version()} | ({"gpu": gpu} if gpu else {})
    out = {"program": "graph_torch.py", "data": args.data, "nodes": graph.nodes, "entries": graph.edges,
           "features": graph.x.shape[1], "classes": graph.classes, "model": "sage", "layers": args.layers, "hidden": args.hidden,
           "norm": "batch", "activation": "relu", "dropout": args.dropout, "device": args.device, "tf32": args.tf32, "amp": "none", "cap": args.memory_cap and round(args.memory_cap * 1e9),
           "date": datetime.date.today().isoformat(), "machine": machine, "results": results}
    pathlib.Path(args.json).write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
