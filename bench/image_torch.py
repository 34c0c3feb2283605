#!/usr/bin/env python3
"""What PyTorch itself offers, with the same model and batch as `satchel bench images`.

  bench/image_torch.py --model resnet50 --batch 256 --tf32 --json torch.json

torchvision's model in channels_last on generated images: forward, cross entropy, backward, SGD with Nesterov momentum.

  fp32         eager (with --amp: under autocast)
  checkpoint   every block recomputed in backward (torch.utils.checkpoint)
  compile-B    torch.compile with activation_memory_budget B, one of 1, 0.5, 0.25, 0.1: below 1 it recomputes

cuDNN tries its algorithms, as in `satchel bench images`. The JSON has that command's fields:
  step_seconds  median step
  saved_bytes   asked for after forward - before, less the logits
  loss_bytes    the logits and what the loss added
  peak_bytes    the most allocated during a step - what stood before it
  total_bytes   weights, gradients, momentum, images, and that peak
  fits          false where memory ran out or the method failed; `error` says why
"""
import argparse
import contextlib
import datetime
import functools
import json
import pathlib
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_common import Meter, at_least, attempt

WARM_UPS = 3  # steps before those that are timed; the last one's memory is watched
BUDGETS = ("1", "0.5", "0.25", "0.1")
TYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECK_BATCH, CHECK_IMAGE = 8, 64


# --- the models -------------------------------------------------------------------------------------------------------

def make_model(args, **more):
    import torchvision
    model = getattr(torchvision.models, args.model)(num_classes=args.classes, **more)
    if args.small_stem:
        if not args.model.startswith("resnet"):
            raise ValueError("--small-stem is for ResNets")
        model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = torch.nn.Identity()
    return model


def recomputed(module):
    """The module computes its forward pass again in backward instead of keeping what is inside."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def eager(args):
    model = make_model(args)
    return model, model


def checkpointed(args):
    if args.model.startswith("densenet"):
        model = make_model(args, memory_efficient=True)  # torchvision's own way: its dense layers recompute their inputs
        return model, model
    model = make_model(args)
    if "resnet" in args.model:
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            for block in stage:
                recomputed(block)
    elif args.model in ("mobilenet_v2", "efficientnet_b0"):
        for block in model.features:
            recomputed(block)
    else:  # VGG: a block ends with a pool
        blocks, block = [], []
        for layer in model.features:
            block.append(layer)
            if isinstance(layer, torch.nn.MaxPool2d):
                blocks.append(torch.nn.Sequential(*block))
                block = []
        for part in blocks:
            recomputed(part)
        model.features = torch.nn.Sequential(*blocks, *block)
    return model, model


def compiled(budget):
    def make(args):
        import torch._functorch.config
        torch._functorch.config.activation_memory_budget = float(budget)
        model = make_model(args)
        return model, torch.compile(model, dynamic=False)
    return make


METHODS = {"fp32": eager, "checkpoint": checkpointed} | {f"compile-{budget}": compiled(budget) for budget in BUDGETS}
GROUPS = {"all": list(METHODS), "eager": ["fp32", "checkpoint"], "compile": [n for n in METHODS if n.startswith("compile")]}


# --- a step -----------------------------------------------------------------------------------------------------------

class Run:
    """A model with a batch. `call` is what computes it: the model, or what torch.compile made of it."""

    def __init__(self, name, args, batch, image):
        torch.manual_seed(1)
        self.model, self.call = METHODS[name](args)
        self.model.to(args.device, memory_format=torch.channels_last).train()
        self.images = torch.empty(batch, 3, image, image, device=args.device).to(memory_format=torch.channels_last).normal_()
        self.labels = torch.randint(args.classes, (batch,), device=args.device)
        self.type, self.device = TYPES[args.amp], args.device
        self.scaler = torch.amp.GradScaler(args.device, enabled=args.amp == "fp16")
        # Small: random labels shall not drive the weights far.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    def forward(self):
        with torch.autocast(self.device, dtype=self.type) if self.type else contextlib.nullcontext():
            return self.call(self.images)

    def loss(self, logits):
        return F.cross_entropy(logits.float(), self.labels)

    def standing(self):
        """Bytes of weights, gradients, momentum and the batch."""
        return 3 * sum(p.nbytes for p in self.model.parameters()) + self.images.nbytes + self.labels.nbytes


def step(run, meter, cost=None):
    """One training step; its memory into `cost` where that is given. Gradients of the step before make room for the new ones."""
    stood = meter.allocated()
    run.optimizer.zero_grad(set_to_none=True)
    before = meter.requested()
    meter.reset_peak()
    logits = run.forward()
    saved = meter.requested() - before - logits.nbytes
    loss = run.loss(logits)
    del logits
    loss_bytes = meter.requested() - before - saved
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if cost is not None and meter.cuda:
        cost.update(saved_bytes=saved, loss_bytes=loss_bytes, peak_bytes=meter.peak() - stood)
    return loss.detach()


def measure(name, args):
    meter = Meter(args.device)
    run = Run(name, args, args.batch, args.image)
    cost, seconds, started = dict.fromkeys(("saved_bytes", "loss_bytes", "peak_bytes"), 0), [], time.perf_counter()
    for i in range(WARM_UPS):
        step(run, meter, cost if i == WARM_UPS - 1 else None)
    meter.wait()
    ready = time.perf_counter() - started
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = step(run, meter).item()  # waits for the step
        seconds.append(time.perf_counter() - start)
    if loss != loss or abs(loss) == float("inf"):
        raise RuntimeError("the loss is not finite")
    median = statistics.median(seconds)
    return {"method": name, "batch": args.batch, "fits": True, "step_seconds": median, "images_per_second": args.batch / median, **cost,
            "total_bytes": run.standing() + cost["peak_bytes"], "loss": loss, "steps": len(seconds), "warm_up_seconds": ready}


def gradients(name, args):
    """All gradients of one step in a line, of a few small images in float32."""
    plain = argparse.Namespace(**{**vars(args), "amp": "none"})
    run = Run(name, plain, CHECK_BATCH, CHECK_IMAGE)
    if args.model.startswith("vgg"):
        run.model.eval()  # its dropout would differ; it has no statistics, or running ones
    run.loss(run.forward()).backward()
    return torch.cat([p.grad.float().flatten() for p in run.model.parameters()])


def checked(name, expected, args):
    """The method's result; one whose gradients are not eager PyTorch's does not count."""
    error = None
    if expected is not None and name == "checkpoint":  # compiling a second time would take minutes
        own, why = attempt(lambda: gradients(name, args))
        error = None if why else ((own - expected).norm() / expected.norm()).item()
        most = 2e-2 if args.tf32 else 1e-3  # the same sums in another order
        if why is None and not error <= most:
            return {"method": name, "batch": args.batch, "fits": False, "error": f"gradients are off by {error:.1e} (limit {most:.0e})"}
    result, why = attempt(lambda: measure(name, args))
    if why:
        return {"method": name, "batch": args.batch, "fits": False, "error": why}
    return result if error is None else {**result, "gradient_error": error}


# --- the program ------------------------------------------------------------------------------------------------------

def line(r, base):
    if not r["fits"]:
        return f"{r['method']:<14} {r['error']}"
    ratio = f"{r['step_seconds'] / base:6.2f}x" if base else " " * 7
    mib = "".join(f"{r[key] / 2**20:12.2f}" for key in ("saved_bytes", "peak_bytes"))
    return f"{r['method']:<14}{r['step_seconds'] * 1e3:9.2f} ms{ratio}{r['images_per_second']:10.1f}{mib} MiB"


def write(args, results):
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    machine = {"torch": torch.__version__, "python": platform.python_version()} | ({"gpu": gpu} if gpu else {})
    out = {"program": "image_torch.py", "model": args.model, "width": 64, "image": args.image, "classes": args.classes,
           "device": args.device, "tf32": args.tf32, "amp": args.amp, "channels_last": True,
           "cap": args.memory_cap and round(args.memory_cap * 1e9), "date": datetime.date.today().isoformat(), "machine": machine,
           "results": results}
    pathlib.Path(args.json).write_text(json.dumps(out, indent=2) + "\n")


def methods(text):
    names = [n for part in text.split(",") for n in GROUPS.get(part, [part])]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"methods are {', '.join(METHODS)}, eager, compile and all, got '{name}'")
    return list(dict.fromkeys(names))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "vgg16", "vgg16_bn", "densenet121",
              "densenet161", "mobilenet_v2", "efficientnet_b0")
    parser.add_argument("--model", choices=models, default="resnet50")
    parser.add_argument("--batch", type=at_least(1), default=256)
    parser.add_argument("--image", type=at_least(1), default=224, help="height and width of the images")
    parser.add_argument("--classes", type=at_least(2), default=1000)
    parser.add_argument("--small-stem", action="store_true", help="ResNets: first convolution 3x3 of stride 1, no pool")
    parser.add_argument("--steps", type=at_least(1), default=30, help="timed steps of which the median counts")
    parser.add_argument("--tf32", action="store_true", help="float32 convolutions and products on tensor cores")
    parser.add_argument("--amp", choices=list(TYPES), default="none", help="autocast to this type")
    parser.add_argument("--only", type=methods, default=methods("all"), metavar="NAMES", help="methods, or eager, compile, all")
    parser.add_argument("--memory-cap", type=at_least(0.01, float), metavar="GB", help="GPU memory that torch may take, in 10^9 bytes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the results there too, after every method")
    return parser.parse_args()


def main():
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("image_torch: no CUDA device (--device cpu runs what there is of it)")
    if args.device == "cpu" and (args.tf32 or args.memory_cap):
        sys.exit("image_torch: --tf32 and --memory-cap need --device cuda")
    if args.json and not pathlib.Path(args.json).resolve().parent.is_dir():
        sys.exit(f"image_torch: --json must lie in a folder that is there, got {args.json}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cudnn.benchmark = True
    if args.memory_cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_cap * 1e9 / total))
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{args.model}, batch {args.batch} of {args.image} x {args.image}; TF32 {'on' if args.tf32 else 'off'}, amp {args.amp}; "
          f"torch {torch.__version__} on {gpu or platform.processor() or 'the CPU'}")
    print(f"{'method':<14}{'step':>12}{'ratio':>7}{'images/s':>10}{'saved':>12}{'peak':>12}", flush=True)
    expected, _ = attempt(lambda: gradients("fp32", args)) if "checkpoint" in args.only else (None, None)
    results, base = [], None
    for name in args.only:
        results.append(checked(name, expected, args))
        if name == "fp32" and results[-1]["fits"]:
            base = results[-1]["step_seconds"]
        for r in results:
            r["ratio"] = r["step_seconds"] / base if base and r["fits"] else None
        print(line(results[-1], base), flush=True)
        if args.json:
            write(args, results)


if __name__ == "__main__":
    main()
