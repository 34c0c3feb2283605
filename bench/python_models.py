#!/usr/bin/env python3
"""Training steps of whole models through the Python package, beside PyTorch's own ways to save memory. Needs a GPU.

  bench/python_models.py gpt|resnet50|vit_b_16|convnext_tiny|sage [--ways eager,packing,…] [--bf16|--tf32] [--batch N] [--draws N] [--json FILE] [--profile FILE] [--lock FILE]

Ways: eager · packing (satchel.packing) · checkpoint (each block, non-reentrant) · save_on_cpu · compile · budget:0.5 (torch.compile with an
activation memory budget) · convert (satchel.convert: layers that share one save) · satchel (satchel.compile). Bits after a colon:
packing:2/4/8, satchel:2/4/8. +graph (compile+graph, satchel+graph, convert+graph): launched as CUDA graphs, by torch.compile's mode reduce-overhead or a
capture of the whole step. Printed: median step in ms; GiB kept between forward and backward; peak in GiB, most allocated in a step minus
allocated before it; the gradient's relative distance to eager's; with --draws the error of the mean of N draws beside what one draw's
error/√N says (1 means unbiased); how long the CPU took to launch a step, which bounds the step from below. --profile writes each
way's slowest kernels of a step, and what of it takes the CPU longest, to a file. --lock: several of these programs may compile side by side; who measures holds the file's lock.
"""
import argparse
import contextlib
import fcntl
import json
import statistics
import time

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import satchel


class Block(nn.Module):
    def __init__(self, d=768, heads=12):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).split(d, 2))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """GPT-2's shape: 12 blocks of 768, 12 heads; 65 characters."""

    def __init__(self, blocks=12, d=768, tokens=512, words=65):
        super().__init__()
        self.e, self.p, self.n, self.out = nn.Embedding(words, d), nn.Embedding(tokens, d), nn.LayerNorm(d), nn.Linear(d, words)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        self.checkpointed = False

    def forward(self, i, y):
        x = self.e(i) + self.p.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.out(self.n(x)).flatten(0, 1).float(), y.flatten())


class Sage(nn.Module):
    """PyG's GraphSAGE, 3 × 128, batch norm, ReLU, dropout ½; a random graph with ogbn-arxiv's numbers of nodes, edges, features and classes."""

    def __init__(self, nodes=169_343, edges=1_166_243, features=128, classes=40, width=128):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        sizes = [features, width, width, classes]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))
        ends = torch.randint(nodes, (2, edges))
        self.register_buffer("edges", torch.cat([ends, ends.flip(0)], 1))
        self.checkpointed = False

    def forward(self, x, y):
        for conv, norm in zip(self.convs, self.norms):
            x = F.dropout(F.relu(norm(conv(x, self.edges))), 0.5, self.training)
        return F.cross_entropy(self.convs[-1](x, self.edges).float(), y)


class Classifier(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.checkpointed = net, False

    def forward(self, x, y):
        return F.cross_entropy(self.net(x).float(), y)


def blocks_of(net):
    """What is checkpointed one by one: residual blocks, encoder layers."""
    for module in net.modules():
        if type(module).__name__ in ("Bottleneck", "EncoderBlock", "CNBlock"):
            yield module


def make(name, batch):
    if name == "gpt":
        i = torch.randint(0, 65, (batch or 32, 512), device="cuda")
        return GPT().cuda(), (i, torch.randint_like(i, 65))
    if name == "sage":
        net = Sage().cuda()
        nodes = int(net.edges.max()) + 1
        return net, (torch.randn(nodes, 128, device="cuda"), torch.randint(0, 40, (nodes,), device="cuda"))
    import torchvision

    net = getattr(torchvision.models, name)()
    x = torch.randn(batch or (256 if name.startswith("res") else 128), 3, 224, 224, device="cuda")
    if name.startswith(("res", "conv")):
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return Classifier(net).cuda(), (x, torch.randint(0, 1000, (len(x),), device="cuda"))


@contextlib.contextmanager
def checkpointed(model):
    model.checkpointed = True
    blocks = [] if isinstance(model, GPT) else list(blocks_of(model))
    for block in blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    try:
        yield
    finally:
        model.checkpointed = False
        for block in blocks:
            del block.forward


def way_of(name, model, stack):
    """(function of a step's loss, context around forward) of a way's name."""
    kind, _, option = name.removesuffix("+graph").partition(":")
    mode = "reduce-overhead" if name.endswith("+graph") else None
    if kind == "eager":
        return model, contextlib.nullcontext()
    if kind == "packing":
        return model, satchel.packing(option or "2/4/8")
    if kind == "checkpoint":
        stack.enter_context(checkpointed(model))
        return model, contextlib.nullcontext()
    if kind == "save_on_cpu":
        return model, torch.autograd.graph.save_on_cpu(pin_memory=True)
    if kind == "compile":
        return torch.compile(model, mode=mode), contextlib.nullcontext()
    if kind == "budget":
        stack.enter_context(torch._functorch.config.patch(activation_memory_budget=float(option)))
        return torch.compile(model), contextlib.nullcontext()
    if kind == "convert":
        stack.callback(satchel.revert, satchel.convert(model, option or "satchel"))
        return model, contextlib.nullcontext()
    if kind == "satchel":
        return satchel.compile(model, option or "2/4/8", mode=mode), contextlib.nullcontext()
    raise SystemExit(f"[bench] no way '{name}'")


def write_profile(path, name, step):
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    for some, key, rows in ((activities[:1], "self_cuda_time_total", 40), (activities, "self_cpu_time_total", 25)):
        with torch.profiler.profile(activities=some) as profiled:
            step()
            torch.cuda.synchronize()
        with open(path, "a", encoding="utf-8") as file:
            print(name, profiled.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=110), sep="\n", file=file)


@contextlib.contextmanager
def locked(path):
    if not path:
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def captured(step):
    """A replay of the step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(model, args, name, options, expected):
    bf16, steps, draws, profile = not options.tf32, options.steps, options.draws, options.profile
    with contextlib.ExitStack() as stack:
        f, context = way_of(name, model, stack)

        def forward():
            with context, torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                return f(*args)

        def step():
            model.zero_grad(set_to_none=True)
            loss = forward()
            loss.backward()
            return loss

        def gradient():
            torch.compiler.cudagraph_mark_step_begin()
            step()
            return torch.cat([p.grad.flatten() for p in model.parameters()]).float()

        start = time.time()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        first = time.time() - start
        stack.enter_context(locked(options.lock))
        model.zero_grad(set_to_none=True)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = forward()
        saved = torch.cuda.memory_allocated() - base
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        del loss
        if name == "convert+graph":
            step = captured(step)
        launches = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            launches.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
        for a, b in events:
            a.record()
            step()
            b.record()
        torch.cuda.synchronize()
        ms = statistics.median(a.elapsed_time(b) for a, b in events)
        if profile:
            write_profile(profile, name, step)
        got = gradient()
        row = {"method": name, "step_seconds": ms / 1e3, "saved_bytes": saved, "loss_bytes": 0, "peak_bytes": peak,
               "launch_seconds": statistics.median(launches) / 1e3, "first_seconds": first}  # fmt: skip
        if expected is not None:
            row["distance"] = round(float((got - expected).norm() / expected.norm()), 4)
            if draws and name.partition(":")[0] in ("packing", "convert", "satchel"):
                mean, one = torch.zeros_like(expected), 0.0
                for _ in range(draws):
                    g = gradient() - expected
                    mean += g / draws
                    one += float(g.square().sum()) / draws
                row["mean_of_draws"] = round(float(mean.norm()) * draws**0.5 / one**0.5, 3)
        return row, got


def line(row):
    if "error" in row:
        return f"way {row['method']} · {row['error']}"
    words = [f"way {row['method']}", f"{1e3 * row['step_seconds']:.2f} ms", f"saved {row['saved_bytes'] / 2**30:.3f} GiB",
             f"peak {row['peak_bytes'] / 2**30:.3f} GiB", f"launch {1e3 * row['launch_seconds']:.1f} ms", f"first {row['first_seconds']:.1f} s"]  # fmt: skip
    return " · ".join(words + [f"{name.replace('_', ' ')} {row[name]}" for name in ("distance", "mean_of_draws") if name in row])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt", "resnet50", "vit_b_16", "convnext_tiny", "sage"])
    parser.add_argument("--ways", default="eager,packing,checkpoint,save_on_cpu,compile,budget:0.5,budget:0.25,budget:0.1,convert,satchel")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bf16", action="store_true", default=True, help="autocast (the default)")
    kind.add_argument("--tf32", action="store_true")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--profile")
    parser.add_argument("--lock")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model, args = make(options.model, options.batch)
    kind = "tf32" if options.tf32 else "bf16"
    print(f"{options.model}, {kind}, batch {len(args[0])}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    rows, expected = [], None
    for name in options.ways.split(","):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            row, got = measure(model, args, name, options, expected)
            expected = got if name == "eager" else expected
        except Exception as e:  # one way that fails leaves the others
            row = {"method": name, "error": f"{type(e).__name__}: {e}"[:300]}
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            about = {"program": "python_models.py", "model": options.model, "type": kind, "batch": len(args[0]), "machine": machine}
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({**about, "results": rows}, file, indent=1)


if __name__ == "__main__":
    main()
