#!/usr/bin/env python3
"""Do unmodified architectures of torchvision, timm and transformers train with what they save packed, and is the gradient right in the mean?

  bench/architectures.py [--small] [--device cuda] [--dtype bf16] [--only NAME,…] [--ways packing,attach,compile] [--jobs N] [--out FILE] [--table]

Every model is built from its class with random weights; nothing is downloaded. Each trains two steps, dropout on, in three ways: inside
satchel.packing(), with satchel.attach() and by satchel.compile(). Printed for each: bytes saved for backward before and after, and `mean`,
the error of the mean gradient of 64 draws by (one draw's error/√64), dropout off: 1 where the gradient is unbiased; a model passes between
.8 and 1.3. One JSON line a model and way goes to FILE (build/architectures.jsonl); a second run skips what stands there and passed.
--jobs: so many models side by side, a process each. --table prints the file as a table and runs nothing.

float32, the default, is computed in full: TF32 is off. In bf16 the compiled way has no `mean`: torch.compile rounds other values to bf16 than eager mode
and than satchel.compile() do, and networks of random weights with batch norms make of that as much difference as of the codes.

--small: narrow, shallow forms of the models and small inputs, for a CPU. --inductor no: the compiled way runs satchel.compile()'s passes and torch's
partitioner, and both halves of the graph op by op: it checks the same codes, without the minute that Inductor takes a model on a CPU.
"""
import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import satchel
from satchel.graph_layers import LayerPass

DRAWS = 64
LEAST, MOST = 0.8, 1.3
MODELS = {}


class Task(nn.Module):
    """A network and what makes one number of its output."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, *args, **kwargs):
        return self.loss(self.net, *args, **kwargs)


def model(name, family, draws=True, parts=()):
    """Registers a maker: small → (task, batch). draws: whether its gradient is a function of the batch, so that draws compare. parts: paths of modules
    that torch.compile would leave to eager mode, and that are compiled by themselves."""

    def add(make):
        MODELS[name] = (make, family, draws, parts)
        return make

    return add


# ---- images --------------------------------------------------------------------------------------------------------------------------

def entropy(net, x, y):
    return F.cross_entropy(net(x).float(), y)


def images(net, small, side=64, batch=8):
    """A task of telling ten kinds of images apart."""
    side, batch = (side, batch) if small else (224, 32)
    return Task(net, entropy), (torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,)))


def torchvision_net(name, small, narrow=None):
    """A model of torchvision by its name, or in its narrow form."""
    import torchvision

    return narrow(torchvision.models) if small and narrow is not None else getattr(torchvision.models, name)(weights=None, num_classes=10)


def plain(name, full=None, **sizes):
    """An image model that is as small as it needs to be."""

    @model(name, "torchvision")
    def make(small):
        return images(torchvision_net(name if small or full is None else full, small), small, **sizes)


plain("resnet18", "resnet50")
plain("mobilenet_v2")
plain("mobilenet_v3_small", "mobilenet_v3_large")
plain("efficientnet_b0", "efficientnet_v2_s")
plain("regnet_y_400mf", "regnet_y_8gf")
plain("shufflenet_v2_x0_5", "shufflenet_v2_x1_0")
plain("squeezenet1_1")


@model("vgg11_bn", "torchvision")
def _(small):
    net = torchvision_net("vgg16_bn", small, lambda m: m.VGG(m.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"], True), 10))
    if small:  # 25,088 × 4,096 weights are no activations
        net.avgpool, net.classifier = nn.AdaptiveAvgPool2d(2), nn.Sequential(nn.Linear(256, 128), nn.ReLU(True), nn.Dropout(), nn.Linear(128, 10))
    return images(net, small)


@model("densenet", "torchvision")
def _(small):
    return images(torchvision_net("densenet121", small, lambda m: m.DenseNet(12, (3, 3, 3), 16, num_classes=10)), small)


@model("convnext", "torchvision")
def _(small):
    def narrow(m):
        block = m.convnext.CNBlockConfig
        return m.ConvNeXt([block(32, 64, 2), block(64, 96, 2), block(96, None, 2)], stochastic_depth_prob=0.1, num_classes=10)

    return images(torchvision_net("convnext_tiny", small, narrow), small)


@model("swin", "torchvision")
def _(small):
    return images(torchvision_net("swin_t", small, lambda m: m.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10)), small)


@model("vit", "torchvision")
def _(small):
    return images(torchvision_net("vit_b_16", small, lambda m: m.VisionTransformer(64, 8, 3, 4, 128, 256, num_classes=10)), small)


@model("googlenet", "torchvision")
def _(small):
    import torchvision

    return images(torchvision.models.googlenet(weights=None, num_classes=10, aux_logits=False, init_weights=False), small)


# ---- pixels and boxes ----------------------------------------------------------------------------------------------------------------

@model("fcn", "torchvision dense")
def _(small):
    import torchvision

    kind = torchvision.models.segmentation
    if small:
        body = torchvision.models._utils.IntermediateLayerGetter(torchvision.models.resnet18(weights=None), {"layer4": "out"})
        net = kind.FCN(body, kind.fcn.FCNHead(512, 5))
    else:
        net = kind.fcn_resnet50(weights=None, weights_backbone=None, num_classes=5)
    side, batch = (64, 4) if small else (224, 16)
    return Task(net, lambda net, x, y: F.cross_entropy(net(x)["out"].float(), y)), (torch.randn(batch, 3, side, side), torch.randint(0, 5, (batch, side, side)))


def boxes(make, small, masks=False):
    """A detector and images with two boxes each."""
    import torchvision

    side, batch = (96, 2) if small else (320, 8)
    body = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18" if small else "resnet50", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d)
    net = make(torchvision.models.detection, body, {"num_classes": 5, "min_size": side, "max_size": side})
    targets = []
    for _ in range(batch):
        target = {"boxes": torch.tensor([[8.0, 8, 40, 48], [30, 20, side - 8, side - 16]]), "labels": torch.tensor([1, 2])}
        targets.append(target | ({"masks": torch.randint(0, 2, (2, side, side), dtype=torch.uint8)} if masks else {}))
    return Task(net, lambda net, x, y: sum(net(list(x), y).values())), (torch.rand(batch, 3, side, side), targets)


# Detectors sample their boxes at random: a gradient is no function of the batch alone.
@model("faster_rcnn", "torchvision dense", draws=False)
def _(small):
    return boxes(lambda d, body, sizes: d.FasterRCNN(body, **sizes), small)


@model("retinanet", "torchvision dense")
def _(small):
    return boxes(lambda d, body, sizes: d.RetinaNet(body, anchor_generator=_anchors(), **sizes), small)


# Its mask head is called in a function that torch.compile gives up, and is of torch.nn's classes alone, whose own functions it does not look into.
@model("mask_rcnn", "torchvision dense", draws=False, parts=("net.roi_heads.mask_head", "net.roi_heads.mask_predictor"))
def _(small):
    return boxes(lambda d, body, sizes: d.MaskRCNN(body, **sizes), small, masks=True)


def _anchors():
    """Five maps of the backbone, three sizes each."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(tuple((s, int(s * 1.26), int(s * 1.59)) for s in (16, 32, 64, 128, 256)), ((0.5, 1.0, 2.0),) * 5)


# ---- timm ----------------------------------------------------------------------------------------------------------------------------

def timm_model(name, full, small_form, **options):
    @model(name, "timm")
    def make(small):
        import timm

        net = small_form(timm.models) if small else timm.create_model(full, num_classes=10, **options)
        return images(net, small)


timm_model("mixer", "mixer_b16_224", lambda m: m.mlp_mixer.MlpMixer(num_classes=10, img_size=64, patch_size=8, num_blocks=2, embed_dim=128))
timm_model("deit", "deit_small_distilled_patch16_224", lambda m: m.deit.VisionTransformerDistilled(
    img_size=64, patch_size=8, embed_dim=128, depth=2, num_heads=4, num_classes=10))
timm_model("beit", "beit_base_patch16_224", lambda m: m.beit.Beit(
    img_size=64, patch_size=8, embed_dim=128, depth=2, num_heads=4, num_classes=10, init_values=0.1))
timm_model("resnext", "resnext50_32x4d", lambda m: m.resnet.ResNet(m.resnet.Bottleneck, (1, 1, 1, 1), num_classes=10, cardinality=8, base_width=4))
timm_model("edgenext", "edgenext_small", lambda m: m.edgenext.EdgeNeXt(num_classes=10, dims=(16, 32, 48, 64), depths=(1, 1, 2, 1)))
timm_model("poolformer", "poolformer_s24", lambda m: m.metaformer.MetaFormer(
    num_classes=10, depths=(1, 1, 1, 1), dims=(32, 48, 64, 96), token_mixers=m.metaformer.Pooling, norm_layers=m.metaformer.GroupNorm1))
timm_model("nfnet", "nfnet_l0", lambda m: m.create_model("nf_resnet26", num_classes=10) if hasattr(m, "create_model") else None)


# ---- transformers --------------------------------------------------------------------------------------------------------------------

TOKENS, ENDS = {"vocab_size": 128}, {"bos_token_id": 0, "eos_token_id": 1}


def words(name, config, net, small_sizes, loss="labels", **full_sizes):
    """A language model from its config. loss: "labels" where it makes its own, "classes" for a label a text."""

    @model(name, "transformers")
    def make(small):
        import transformers

        sizes = small_sizes if small else full_sizes
        made = getattr(transformers, net)(getattr(transformers, config)(**TOKENS, **sizes))
        batch, length = (8, 64) if small else (16, 512)
        tokens = torch.randint(3, TOKENS["vocab_size"], (batch, length))
        labels = torch.randint(0, 2, (batch,)) if loss == "classes" else tokens.clone()
        return Task(made, lambda net, x, y: net(input_ids=x, labels=y).loss), (tokens, labels)


BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
words("bert", "BertConfig", "BertForMaskedLM", BERT)
words("roberta", "RobertaConfig", "RobertaForSequenceClassification", BERT, "classes", max_position_embeddings=600)
words("electra", "ElectraConfig", "ElectraForMaskedLM", BERT | {"embedding_size": 64})
words("distilbert", "DistilBertConfig", "DistilBertForMaskedLM", {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256})
words("gpt2", "GPT2Config", "GPT2LMHeadModel", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}, **ENDS)
words("llama", "LlamaConfig", "LlamaForCausalLM", BERT | {"num_key_value_heads": 2}, hidden_size=1024, num_hidden_layers=12,
      num_attention_heads=16, intermediate_size=2816, num_key_value_heads=8)
words("opt", "OPTConfig", "OPTForCausalLM", {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 128})
words("t5", "T5Config", "T5ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4,
                                                       "decoder_start_token_id": 0}, decoder_start_token_id=0)


@model("hf_vit", "transformers")
def _(small):
    import transformers

    config = transformers.ViTConfig(**BERT, image_size=64, patch_size=8, num_labels=10) if small else transformers.ViTConfig(num_labels=10)
    task, batch = images(transformers.ViTForImageClassification(config), small)
    return Task(task.net, lambda net, x, y: F.cross_entropy(net(x).logits.float(), y)), batch


# ---- a model's three ways ------------------------------------------------------------------------------------------------------------

def moved(x, device):
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {k: moved(v, device) for k, v in x.items()}
    return type(x)(moved(v, device) for v in x) if isinstance(x, (list, tuple)) else x


def without_dropout(task):
    """Every module's share of what it drops becomes 0, so that a gradient is a function of the batch. Did any drop?"""
    changed = False
    for module in task.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in name or (name == "p" and ("Drop" in type(module).__name__ or "Depth" in type(module).__name__))):
                setattr(module, name, 0.0)
                changed = True
    return changed


class Run:
    """One model on one device."""

    def __init__(self, name, options):
        make, self.family, self.comparable, self.parts = MODELS[name]
        torch.manual_seed(0)
        task, batch = make(options.small)
        self.options, self.name = options, name
        self.task, self.batch = task.to(options.device).train(), moved(batch, options.device)
        self.parameters = [p for p in task.parameters() if p.requires_grad]
        self.least = 1024 if options.small else 4096

    def forward(self, f, context=None):
        cast = torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.dtype == "bf16")
        with context or contextlib.nullcontext(), cast:
            return f(*self.batch).float()

    def gradient(self, f, context=None):
        made = torch.autograd.grad(self.forward(f, context), self.parameters, allow_unused=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(made, self.parameters)]).float()

    def train(self, f, context=None):
        """Losses of two steps; the weights are put back."""
        before = {k: v.clone() for k, v in self.task.state_dict().items()}
        optimizer, losses = torch.optim.SGD(self.parameters, 1e-3), []
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.forward(f, context)
            loss.backward()
            if not all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters):
                raise RuntimeError("a gradient is not finite")
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        self.task.load_state_dict(before)
        if not all(math.isfinite(loss) for loss in losses):
            raise RuntimeError(f"losses must be finite, got {losses}")
        return losses

    def mean_of_draws(self, draw, expected):
        """(one draw's error by the gradient's norm, error of the mean by what one draw's would leave)."""
        mean, one = torch.zeros_like(expected), 0.0
        for i in range(DRAWS):
            off = draw(i) - expected
            mean += off / DRAWS
            one += float(off.square().sum()) / DRAWS
        if one == 0:
            raise RuntimeError("nothing was rounded")
        return {"error": round(one**0.5 / float(expected.norm()), 4), "mean": round(float(mean.norm()) * DRAWS**0.5 / one**0.5, 3)}

    def packing(self):
        self.train(self.task, satchel.packing(min_bytes=self.least))
        without_dropout(self.task)
        meter = satchel.packing(min_bytes=self.least, meter=True)
        self.forward(self.task, meter)
        result = {"before": meter.meter.before, "after": meter.meter.after}
        if self.comparable:
            expected = self.gradient(self.task)
            result |= self.mean_of_draws(lambda i: self.gradient(self.task, satchel.packing(min_bytes=self.least, seed=i)), expected)
        return result

    def attach(self):
        packing = satchel.attach(self.task, min_bytes=self.least, meter=True)
        try:
            self.train(self.task)
            return {"before": packing.meter.before, "after": packing.meter.after}
        finally:
            satchel.detach(self.task)

    def compile(self):
        f = self.compiled(satchel.PackPass(min_bytes=self.least))
        self.train(f)
        if without_dropout(self.task):
            torch._dynamo.reset()
        after = saved_bytes(self.forward(f), self.task, self.batch)
        exact = self.compiled(None)
        result = {"before": saved_bytes(self.forward(exact), self.task, self.batch), "after": after}
        if self.comparable and self.options.dtype == "fp32":
            result |= self.mean_of_draws(lambda i: self.gradient(f), self.gradient(exact))
        return result

    def compiled(self, pack):
        """The task, compiled; its parts from now on too."""
        def one(module):
            if self.options.inductor:
                return torch.compile(module) if pack is None else satchel.compile(module, min_bytes=pack.min_bytes)
            return torch.compile(module, backend=op_by_op(pack))

        for path in self.parts:
            owner, _, name = path.rpartition(".")
            module = self.task.get_submodule(path)
            setattr(self.task.get_submodule(owner), name, one(getattr(module, "_orig_mod", module)))
        return one(self.task)


def op_by_op(pack):
    """A backend of torch.compile: satchel.compile()'s two passes, torch's partitioner, and both halves run op by op."""
    import torch._inductor.lowering  # a decomposition of max pools reads it
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def partition(module, inputs, **kwargs):
        if pack is not None:
            pack(module.graph)
            module.recompile()
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    def run(module, inputs):
        return make_boxed_func(module.forward)

    whole = aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=run, partition_fn=partition, decompositions=select_decomp_table())

    def backend(module, inputs):
        if pack is not None:
            LayerPass(pack.bits, pack.min_bytes, pack.choice)(module.graph)
            module.recompile()
        return whole(module, inputs)

    return backend


def saved_bytes(loss, task, batch):
    """Bytes that the graph below a loss keeps, but for parameters, buffers and the batch; each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*task.parameters(), *task.buffers(), *torch.utils._pytree.tree_leaves(batch)) if isinstance(t, torch.Tensor)}
    storages, seen, stack = {}, set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(below for below, _ in node.next_functions)
        saved = [getattr(node, k) for k in dir(node) if k.startswith("_raw_saved_")]
        tensors = [raw.data for some in saved for raw in (some if isinstance(some, (tuple, list)) else [some])]
        for t in (*tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())):
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(size for place, size in storages.items() if place not in own)


# ---- the command ---------------------------------------------------------------------------------------------------------------------

def measure(name, options, ways):
    """A row for each way."""
    about = {"model": name, "family": MODELS[name][1], "device": options.device, "dtype": options.dtype, "small": options.small,
             "inductor": options.inductor, "torch": torch.__version__, "machine": machine(options.device)}
    for way in ways:
        start, row = time.time(), dict(about)
        try:
            row[way] = getattr(Run(name, options), way)()
            row[way]["seconds"] = round(time.time() - start, 1)
        except ModuleNotFoundError as e:
            row[way] = {"failed": f"{e.name} is not installed"}
        except Exception as e:  # one way that fails leaves the others
            row[way] = {"failed": f"{type(e).__name__}: {e}".split("\n")[0][:300]}
            if options.raise_errors:
                raise
        finally:
            torch._dynamo.reset()
        print(line(name, way, row[way]), flush=True)
        yield row


def measure_apart(name):
    """The same in a process of its own, on one core; it adds its rows to the file."""
    command = [sys.executable, *sys.argv, "--jobs", "1", "--only", name]  # the last of an option counts
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    made = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [text for text in made.stdout.splitlines() if text.startswith(f"{name} ")]
    print("\n".join(lines or [f"{name:20} ended with {made.returncode}: {made.stdout[-300:]}"]), flush=True)


def machine(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError):
        names = [text.partition(":")[2].strip() for text in open("/proc/cpuinfo", encoding="utf-8") if text.startswith("model name")]
        return f"{names[0]}, {len(names)} cores"
    return platform.machine()


def passed(result):
    """Did this way train, and is its gradient right in the mean?"""
    return "failed" not in result and LEAST <= result.get("mean", 1.0) <= MOST


def line(name, way, result):
    if "failed" in result:
        return f"{name:20} {way:8} FAILED  {result['failed']}"
    ratio = result["before"] / result["after"] if result["after"] else math.inf
    mean = f"mean {result['mean']:5.3f}  one draw {result['error']:6.4f}" if "mean" in result else "trains"
    return f"{name:20} {way:8} {result['before'] / 2**20:8.2f} MiB → {result['after'] / 2**20:7.2f}  {ratio:5.1f}×  {mean}{'' if passed(result) else '  NOT IN [.8, 1.3]'}"


def table(rows):
    """Markdown, one row a model."""
    def cells(row):
        for way in ("packing", "attach", "compile"):
            result = row.get(way, {"failed": "not run"})
            failed = "failed" in result
            yield result["failed"] if failed else f"{result['before'] / result['after'] if result['after'] else math.inf:.1f}"
            if way != "attach":
                yield "" if failed else f"{result['mean']:.2f}" if "mean" in result else "–"

    print("| model | packing: × less | mean | attach: × less | compile: × less | mean |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join([row["model"], *cells(row)]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--only", help="names, by commas")
    parser.add_argument("--ways", default="packing,attach,compile")
    parser.add_argument("--inductor", choices=["yes", "no"], help="yes on a GPU, no on a CPU, unless given")
    parser.add_argument("--jobs", type=int, default=1, help="models side by side")
    parser.add_argument("--out", default="build/architectures.jsonl")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--raise-errors", action="store_true", help="stop at the first failure, with its traceback")
    options = parser.parse_args()
    options.ways = options.ways.split(",")
    options.inductor = (options.inductor or ("yes" if options.device == "cuda" else "no")) == "yes"
    names = options.only.split(",") if options.only else list(MODELS)
    if unknown := [n for n in names if n not in MODELS]:
        raise SystemExit(f"[architectures] models must be {', '.join(MODELS)}, got {unknown[0]!r}")
    if options.list:
        return print("\n".join(f"{n:20} {MODELS[n][1]}" for n in names))

    out = pathlib.Path(options.out)
    key = ("device", "dtype", "small", "inductor")

    def read():
        rows = {}
        for text in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
            row = json.loads(text)
            if all(row[k] == getattr(options, k) for k in key):  # the newest line of a model and way counts
                rows.setdefault(row["model"], {}).update(row)
        return rows

    rows = read()
    if options.table:
        return table(rows.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    todo = {name: [way for way in options.ways if not passed(rows.get(name, {}).get(way, {"failed": "not run"}))] for name in names}
    if options.jobs > 1:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(measure_apart, [name for name in names if todo[name]]))
    else:
        for name in names:
            for row in measure(name, options, todo[name]):
                with out.open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
    rows = read()
    bad = [n for n in names if not all(passed(rows.get(n, {}).get(way, {"failed": "not run"})) for way in options.ways)]
    print(f"{len(names) - len(bad)} of {len(names)} models pass" + (f"; not: {', '.join(bad)}" if bad else ""))
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
