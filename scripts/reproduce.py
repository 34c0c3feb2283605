#!/usr/bin/env python3
"""Writes docs/reproduce.md: the tables and figures of four papers, the command for each, the published figure and ours.

  scripts/reproduce.py [--check]      --check changes nothing and exits with 1 where the page is old

Our figures are read from the tables of docs/results.md, memory.md, theory.md, analyse.md, segmentation.md and detection.md: where such a table
changes, the page is old. A table or row that is not there any more is an error. Standard library only.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reproduce.md"


class Missing(Exception):
    """A figure that the page is made of is not where it was."""


def cells(line):
    return [c.strip() for c in line.strip().strip("|").split("|")]


class Tables:
    """The tables of a page: between <!-- table: NAME --> (or measured:) and <!-- end -->, or the first one after a heading."""

    def __init__(self, name):
        self.name = name
        self.text = (ROOT / "docs" / name).read_text(encoding="utf-8")

    def rows(self, table):
        marked = re.search(rf"<!-- (?:table|measured): {re.escape(table)} -->(.*?)<!-- end -->", self.text, re.S)
        headed = re.search(rf"^#+ {re.escape(table)}$(.*?)(?=^#|\Z)", self.text, re.S | re.M)
        found = marked or headed
        lines = [cells(line) for line in (found[1].splitlines() if found else []) if line.startswith("|")]
        if len(lines) < 3:
            raise Missing(f"docs/{self.name} has no table {table}")
        return [lines[0], *lines[2:]]

    def cell(self, table, row, column):
        """Of the row whose first cells are `row`, under the head `column` (or of that number)."""
        head, *rows = self.rows(table)
        wanted = [row] if isinstance(row, str) else list(row)
        for line in rows:
            if [plain(c) for c in line[:len(wanted)]] == wanted:
                at = column if isinstance(column, int) else head.index(column) if column in head else None
                if at is None:
                    raise Missing(f"docs/{self.name}, table {table}: no column {column}")
                return line[at]
        raise Missing(f"docs/{self.name}, table {table}: no row {wanted}")


def plain(text):
    return text.replace("`", "").replace("*", "")


RESULTS, MEMORY, THEORY, ANALYSE, SEGMENTATION, DETECTION = (
    Tables(n) for n in ("results.md", "memory.md", "theory.md", "analyse.md", "segmentation.md", "detection.md"))


def planned(model):
    """FP32, DIVISION, ActNN and satchel of the plan's table."""
    rows = MEMORY.rows("plan-division")[1:]
    for i, row in enumerate(rows):
        if row[0] == model:
            values = {r[1].strip("`"): r[4] for r in rows[i:i + 4]}
            return f"planned {values['FP32']}, {values['DIVISION']}, {values['ActNN']} GiB; `satchel` {values['satchel']}"
    raise Missing(f"docs/memory.md, table plan-division: no row {model}")


def accuracy(method):
    return RESULTS.cell("graph-accuracy", method, 1)


def saved(method):
    return RESULTS.cell("graph-accuracy", method, "saved")


def gpu(row, column):
    return RESULTS.cell("graph-step-gpu", row, column)


def step(row, column):
    return RESULTS.cell("images-step", row, column)


def images(data, method, column):
    return RESULTS.cell("images-accuracy", (data, method), column)


def model_mib(column):
    head, *rows = THEORY.rows("11. The byte model of the published tables")
    return next(r for r in rows if r[0] == "model")[head.index(column)]


ARXIV = "OGB's ogbn-arxiv with its official features (`raw/` of the download)"
SAINT = "GraphSAINT's folder of that name (`adj_full.npz`, `feats.npy`, `class_map.json`, `role.json`)"
IMAGENET = "ImageNet as folders: `train/CLASS/*.JPEG`, `val/CLASS/*.JPEG`"
NONE = "nothing"
NOT_HERE = "no such layer here"


def exact():
    yield ("Test accuracy, SAGE on ogbn-arxiv, 2 bits, 8:1", "71.16 ± .21; FP32 71.95 ± .16",
           "satchel train --data ogbn-arxiv/ --method fp32,exact --epochs 500 --clip 0.5 --seeds 10 --device cuda",
           f"{accuracy('exact')}; fp32 {accuracy('fp32')} (FastRP features, 300 epochs: compare the two with each other)", ARXIV)
    yield ("… GCN on ogbn-arxiv", "in the paper", "satchel train --data ogbn-arxiv/ --model gcn --method fp32,exact --epochs 500 --clip 0.5 --seeds 10 --device cuda", "–", ARXIV)
    for name, hidden, dropout, epochs in (("flickr", 256, .3, 400), ("reddit2", 256, .5, 400), ("yelp", 512, .1, 500)):
        yield (f"… GCN and SAGE on {name.capitalize()}", "in the paper",
               f"satchel train --data {name}/ --model sage --layers 2 --hidden {hidden} --dropout {dropout} --epochs {epochs} --method fp32,exact --seeds 10 --device cuda",
               "–", SAINT)
    yield ("… GCNII and GAT", "in the paper", "–", NOT_HERE, "–")
    yield ("Activation memory, SAGE on ogbn-arxiv", "786.22 → 30.47 MiB", "satchel plan --table arxiv",
           f"model {model_mib('FP32')} → {model_mib('EXACT')} MiB; Satchel's own layout {MEMORY.cell('plan-arxiv', 'EXACT', 'Satchel')} MiB; measured {saved('exact')}", NONE)
    yield ("Activation memory, SAGE 3 × 256 on ogbn-products", "16,480 → 445 MiB", "satchel plan --table products", "model: equal in whole MiB (test `Published.ProductsInWholeMiB`)", NONE)
    yield ("ogbn-products in full batch: 48 → 12 GB", "12 GB", "satchel bench graph --device cuda --data products --hidden 256 --memory-cap 12GB --methods fp32,exact,satchel --tf32",
           f"`satchel`: peak {RESULTS.cell('graph-products', 'satchel, TF32', 'peak')}, in a graph of that size", NONE)
    yield ("Time of an epoch against FP32", "10 to 25 % more", "satchel bench graph --device cuda --data synthetic:arxiv --methods fp32,exact",
           f"{gpu('exact, CUDA graph', 'hidden 128, full fp32')} (ms, of libtorch's, · MiB)", NONE)
    yield ("Sensitivity to the ratio D/R", "in the paper", 'satchel train --data ogbn-arxiv/ --method "fp32;exact,project=2;exact,project=4;exact,project=8" --epochs 500 --device cuda', "–", ARXIV)


def blockwise():
    sizes = ("2", "4", "8", "16", "32", "64")
    published = {"2": 27.89, "4": 26.60, "8": 25.95, "16": 25.72, "32": 25.60, "64": 25.56}
    for size in sizes:
        head = f"G/R {size}" if size == "2" else size
        yield (f"Memory, SAGE on ogbn-arxiv, G/R {size}", f"{published[size]:.2f} MiB", "satchel plan --table arxiv",
               f"model {model_mib(head)} MiB; Satchel's own layout {MEMORY.cell('plan-arxiv', 'G/R ' + size, 'Satchel')} MiB", NONE)
    yield ("Test accuracy, G/R 2 to 64", "70.9 to 71.3; FP32 71.95 ± .16",
           "satchel bench graph --axis block --values 2rows,4rows,8rows,16rows,32rows,64rows --methods fp32,exact,blockwise --data ogbn-arxiv/ --seeds 10 --epochs 500 --clip 0.5 --device cuda",
           f"{accuracy('blockwise')} at G/R 64; fp32 {accuracy('fp32')} (FastRP features)", ARXIV)
    yield ("Epochs a second: FP32, EXACT, G/R ≥ 8", "13.07, 10.03, 10.54",
           "satchel bench graph --axis block --methods fp32,exact,blockwise --data synthetic:arxiv --seeds 0 --device cuda",
           f"{gpu('blockwise, CUDA graph', 'hidden 128, full fp32')}; `exact` {gpu('exact, CUDA graph', 'hidden 128, full fp32')} (ms, of libtorch's, · MiB)", NONE)
    yield ("The same table on Flickr, SAGE 2 × 256", "in the paper",
           "satchel bench graph --axis block --methods fp32,exact,blockwise --data flickr/ --layers 2 --hidden 256 --dropout 0.3 --seeds 10 --epochs 400 --clip 0.5 --device cuda",
           f"bytes by the model: {ANALYSE.cell('block-bytes', 'Flickr, SAGE 2 × 256: model', 'FP32')} → {ANALYSE.cell('block-bytes', 'Flickr, SAGE 2 × 256: model', 'G/R 1')} (EXACT) → {ANALYSE.cell('block-bytes', 'Flickr, SAGE 2 × 256: model', '64')} MiB (G/R 64)", SAINT)
    for data, key in (("ogbn-arxiv", "arxiv, layer 2, x"), ("Flickr", "Flickr, layer 2, x")):
        uniform, normal = ANALYSE.cell("analyse", (key, "row"), "JS uniform"), ANALYSE.cell("analyse", (key, "row"), "JS clipped normal")
        folder = "ogbn-arxiv/" if data == "ogbn-arxiv" else "flickr/ --layers 2 --hidden 256 --dropout 0.3"
        yield (f"Jensen–Shannon divergence to uniform and clipped normal, {data}", "clipped normal nearer on every layer",
               f"satchel analyse --data {folder} --epochs 10", f"layer 2: {uniform} and {normal} nats, nearer on every layer (other features)",
               ARXIV if data == "ogbn-arxiv" else SAINT)
        yield (f"Less variance by optimal levels, {data}", "in the paper", f"satchel analyse --data {folder} --epochs 10",
               f"layer 2: {ANALYSE.cell('analyse', (key, 'row'), 'gain')} in rows, {ANALYSE.cell('analyse', (key, '64rows'), 'gain')} in 64 rows", "as above")
    yield ("Figure: normalised activations with both distributions", "picture", "satchel analyse --data ogbn-arxiv/ --epochs 10 --json a.json && satchel report a.json -o a.html", "picture", ARXIV)
    yield ("Fit of the 2-bit level by block size", "a(D)", "build/test_core --gtest_filter=Levels.PaperFit", "optimum computed; the fit is within .0018 of it (test)", NONE)


def actnn():
    yield ("Activation memory", "12 times less", "satchel train --data cifar-10-batches-bin/ --model resnet18 --method fp32,actnn --device cuda",
           f"{images('CIFAR-10 part', 'actnn', 'less')} (ResNet-18 on a part of CIFAR-10), {images('Fashion-MNIST', 'actnn', 'less')} (Fashion-MNIST)", "CIFAR-10, binary version")
    yield ("Test accuracy, CIFAR-10", "in the paper", "satchel train --data cifar-10-batches-bin/ --model resnet18 --method fp32,actnn --seeds 5 --device cuda",
           f"{images('CIFAR-10 part', 'actnn', '− fp32 ± standard error')} of fp32 (a part of CIFAR-10, 5 epochs)", "CIFAR-10, binary version")
    yield ("… CIFAR-10, pre-activation ResNet-56", "in the paper", "satchel train --data cifar-10-batches-bin/ --model preresnet56 --method fp32,actnn --epochs 200 --seeds 5 --device cuda", "–", "CIFAR-10, binary version")
    yield ("… ImageNet, the other networks", "in the paper", "satchel train --data imagenet/ --model NAME --method fp32,actnn, with resnet18, resnet152, wide_resnet50_2, densenet161, mobilenet_v2 or efficientnet_b0", "–", IMAGENET)
    yield ("Test accuracy, ImageNet, ResNet-50", "in the paper", "satchel train --data imagenet/ --model resnet50 --method fp32,actnn --epochs 90 --batch 256 --device cuda --amp bf16", "–", IMAGENET)
    yield ("Throughput, ResNet-50, batch 256", "34 % less", "satchel bench images --model resnet50 --batch 256 --device cuda --tf32 --methods fp32,actnn",
           f"{step('actnn', 1)} of libtorch's", NONE)
    yield ("Largest batch", "6.6 to 14 times", 'satchel bench batch --model resnet152 --device cuda --tf32 --memory-cap 16GB --methods "fp32;actnn;satchel"',
           f"`satchel`, ResNet-50: {batch_gain()}", NONE)
    yield ("Levels L0 to L5", "in the paper", 'satchel bench images --model resnet50 --batch 256 --device cuda --methods "actnn,level=0;actnn,level=1;actnn,level=2;actnn,level=3;actnn,level=4"', "–", NONE)
    yield ("Variance of the gradient by layer", "in the paper", "satchel analyse --data cifar-10-batches-bin/ --model resnet18 --epochs 1 --gradients --method actnn", "–", "CIFAR-10, binary version")
    yield ("Segmentation, FCN and DeepLabV3", "in the paper", "satchel train --data cityscapes/ --model deeplabv3_resnet50 --method fp32,actnn --weights resnet50.safetensors --device cuda",
           f"{SEGMENTATION.cell('Accuracy', 'actnn', 2)} mIoU of fp32 (FCN, drawn scenes); step {SEGMENTATION.cell('fcn-step', 'actnn', 2)} of fp32's, saved {SEGMENTATION.cell('fcn-step', 'actnn', 3)}",
           "Cityscapes or Pascal VOC, torchvision's weights as safetensors")
    yield ("Detection, Faster R-CNN and RetinaNet on COCO", "Faster R-CNN 37.4 mAP; FP32 37.4", "satchel train --data coco/ --model fasterrcnn_resnet50_fpn --weights resnet50.safetensors --frozen-norm --trainable 3 --sides 800 --method fp32,actnn --device cuda",
           f"RetinaNet: step {DETECTION.cell('retinanet-step', 'actnn', 2)} of fp32's, saved {DETECTION.cell('retinanet-step', 'actnn', 3)}",
           "COCO 2017, torchvision's weights as safetensors")


def batch_gain():
    """Of the row below ResNet-50's fp32."""
    _, *rows = RESULTS.rows("images-batch")
    for i, row in enumerate(rows):
        if row[0] == "ResNet-50" and i + 1 < len(rows):
            return f"{rows[i + 1][3]} ({rows[i + 1][2]} images)"
    raise Missing("docs/results.md, table images-batch: no row ResNet-50")


def division():
    yield ("Test accuracy, CIFAR-10, ResNet-18: FP32, DIVISION, ActNN", "94.89, 94.72, 94.84",
           "satchel train --data cifar-10-batches-bin/ --model resnet18 --method fp32,division,actnn,satchel --epochs 200 --seeds 5 --device cuda",
           f"{images('CIFAR-10 part', 'division', '− fp32 ± standard error')} of fp32 (a part of CIFAR-10, 5 epochs)", "CIFAR-10, binary version")
    yield ("… CIFAR-100, DenseNet-121", "79.75, 79.47, 78.95", "satchel train --data cifar-100-binary/ --model densenet121 --method fp32,division,actnn --epochs 200 --seeds 5 --device cuda", "–", "CIFAR-100, binary version")
    yield ("… CIFAR-100, pre-activation ResNet-164", "in the paper", "satchel train --data cifar-100-binary/ --model preresnet164 --method fp32,division,actnn --epochs 200 --seeds 5 --device cuda", "–", "CIFAR-100, binary version")
    yield ("… ImageNet, ResNet-50", "76.15, 75.86, 75.42", "satchel train --data imagenet/ --model resnet50 --method fp32,division,actnn --epochs 90 --batch 256 --device cuda --amp bf16", "–", IMAGENET)
    yield ("Memory, ResNet-50, batch 256: FP32, DIVISION, ActNN", "20.48, 1.97, 1.94 GB", "satchel plan --model resnet50 --batch 256",
           f"measured {step('fp32: libtorch', 2)}, {step('division', 2)}, {step('actnn', 2)} GiB; `satchel` {step('satchel', 2)}", NONE)
    yield ("… batch 64", "5.14, .49, .49 GB", "satchel plan --table division", planned("ResNet-50, batch 64"), NONE)
    yield ("… batch 512", "–, 3.94, 3.89 GB", "satchel plan --table division", planned("ResNet-50, batch 512"), NONE)
    yield ("… WRN-50-2, batch 256", "26.75, 2.52, 2.49 GB", "satchel plan --table division", planned("Wide ResNet-50-2, batch 256"), NONE)
    yield ("… checkpointing, BLPA, AC-GC", "3.59, 3.28, 5.88 GB", "bench/image_torch.py --only checkpoint", f"checkpointing: {step('checkpointing, each block', 2)} GiB; the others are no methods here", NONE)
    yield ("Images a second, ResNet-50: FP32, DIVISION, ActNN", "469, 381 (−18.8 %), 308 (−34.3 %)",
           "satchel bench images --model resnet50 --batch 256 --device cuda --tf32 --methods fp32,division,actnn",
           f"step {step('division', 1)}, actnn {step('actnn', 1)}, fp32 {step('fp32: libtorch', 1)}", NONE)
    yield ("Ablation: low frequencies alone, high ones alone", "in the paper", 'satchel train --data cifar-10-batches-bin/ --model resnet18 --method "division;division,part=low;division,part=high" --device cuda', "–", "CIFAR-10, binary version")


PAPERS = [
    ("EXACT", "Liu et al., *EXACT: Scalable graph neural networks training via extreme activation compression*, ICLR 2022.", exact),
    ("Block-wise", "Eliassen and Selvan, *Activation compression of graph neural networks using block-wise quantization with improved variance minimization*, ICASSP 2024.", blockwise),
    ("ActNN", "Chen et al., *ActNN: Reducing training memory footprint via 2-bit activation compressed training*, ICML 2021.", actnn),
    ("DIVISION", "Wang et al., *DIVISION: Memory efficient training via dual activation precision*, ICML 2023.", division),
]

HEAD = """# Reproduce the papers

What four papers show, the command that shows it here, the published figure and ours. `scripts/reproduce.py` writes this page from the tables
of [Results](results.md), [Memory](memory.md), [Theory](theory.md), [Analyses](analyse.md), [Segmentation](segmentation.md) and [Detection](detection.md), which say machine, date and commit; `make test`
fails where it is old. "In the paper": a figure that this repository does not record. "–": not measured here. Times are of other machines
than the papers'. *To bring* is what must be on your disk: nothing is downloaded.
"""


def page():
    parts = [HEAD]
    for name, about, entries in PAPERS:
        parts.append(f"## {name}\n\n{about}\n\n| what | published | ours | command | to bring |\n|---|---|---|---|---|")
        for what, published, command, ours, bring in entries():
            shown = command if command == "–" or command.startswith("`") else f"`{command}`"
            parts[-1] += f"\n| {what} | {published} | {ours} | {shown} | {bring} |"
        parts[-1] += "\n"
    return "\n".join(parts)


def main():
    try:
        new = page()
    except Missing as e:
        print(f"scripts/reproduce.py: {e}", file=sys.stderr)
        return 1
    old = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if "--check" in sys.argv[1:]:
        if new != old:
            print("docs/reproduce.md is old: run scripts/reproduce.py", file=sys.stderr)
            return 1
        return 0
    if new != old:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
