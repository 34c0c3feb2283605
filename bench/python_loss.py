#!/usr/bin/env python3
"""Does a GPT learn as well through Satchel as without? Trains GPT-2's shape on characters of a text, several ways with equal seeds and data.

  bench/python_loss.py --text FILE [--ways compile,satchel] [--seeds 5] [--steps 1000] [--batch 8] [--last 50] [--json FILE]

FILE is plain text, or .xz of it (tinyshakespeare, say). Ways are those of bench/python_models.py; the first is what the others are compared
with. A run's loss is the mean of its last steps. Printed of each way: the mean difference to the first over seeds, its standard error, and
mean − 1.65 standard errors, which the project wants at most 0.01. Needs a GPU.
"""
import argparse
import contextlib
import json
import lzma
import math
import pathlib
import statistics
import time

import torch
from python_models import GPT, way_of

TOKENS = 512


def characters(path):
    data = pathlib.Path(path).read_bytes()
    text = (lzma.decompress(data) if path.endswith(".xz") else data).decode()
    words = sorted(set(text))
    places = {c: i for i, c in enumerate(words)}
    return torch.tensor([places[c] for c in text], dtype=torch.int64).cuda(), len(words)


def start(model, seed):
    """GPT-2's own start."""
    torch.manual_seed(seed)
    for m in model.modules():
        if isinstance(m, torch.nn.LayerNorm):
            m.reset_parameters()
        if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)):
            torch.nn.init.normal_(m.weight, std=0.02)
        if isinstance(m, torch.nn.Linear):
            torch.nn.init.zeros_(m.bias)


def run(f, context, model, text, seed, options):
    """The loss of every step."""
    start(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    places = torch.Generator().manual_seed(seed)
    window = torch.arange(TOKENS + 1, device="cuda")
    losses = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 100)
        starts = torch.randint(len(text) - TOKENS, (options.batch, 1), generator=places).cuda()
        batch = text[starts + window]
        optimizer.zero_grad(set_to_none=True)
        with context, torch.autocast("cuda", torch.bfloat16):
            loss = f(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--ways", default="compile,satchel")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--last", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    text, words = characters(options.text)
    print(f"{len(text)} characters of {words}, {options.steps} steps of {options.batch} x {TOKENS}, {torch.cuda.get_device_name()}", flush=True)
    ways, rows = options.ways.split(","), []
    for way in ways:
        torch._dynamo.reset()
        model = GPT(options.blocks, options.width, TOKENS, words).cuda()
        with contextlib.ExitStack() as stack:
            f, context = way_of(way, model, stack)  # compiled once for all seeds
            for seed in range(options.seeds):
                began = time.time()
                losses = run(f, context, model, text, seed, options)
                curve = losses[:: max(1, options.steps // 100)]
                rows.append({"way": way, "seed": seed, "loss": statistics.mean(losses[-options.last :]), "curve": curve})
                print(f"{way} seed {seed}: {rows[-1]['loss']:.4f} ({time.time() - began:.0f} s)", flush=True)
                if options.json:
                    pathlib.Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    loss = {(row["way"], row["seed"]): row["loss"] for row in rows}
    for way in ways[1:]:
        apart = [loss[way, s] - loss[ways[0], s] for s in range(options.seeds)]
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else float("nan")
        mean = statistics.mean(apart)
        print(f"{way} − {ways[0]}: {mean:+.4f} ± {error:.4f}; mean − 1.65 errors {mean - 1.65 * error:+.4f}")


if __name__ == "__main__":
    main()
