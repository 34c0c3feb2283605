#!/usr/bin/env python3
"""Compares BoxScorer's numbers with pycocotools': coco_check.py TRUTH.json FOUND.json SCORES.json

Exit code 0 where all agree to 1e-9, 1 where one does not, 77 where pycocotools is not installed.
"""
import contextlib
import io
import json
import sys

try:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
except ImportError:
    print("coco_check: pycocotools is not installed: pip install pycocotools")
    sys.exit(77)

NAMES = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "recall1", "recall10", "recall100", "recall_small", "recall_medium",
         "recall_large"]


def main():
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(sys.argv[1])
        scores = COCOeval(truth, truth.loadRes(sys.argv[2]), "bbox")
        scores.evaluate()
        scores.accumulate()
        scores.summarize()
    with open(sys.argv[3], encoding="utf-8") as file:
        own = json.load(file)
    wrong = [f"{name}: {own[name]}, pycocotools {theirs}" for name, theirs in zip(NAMES, scores.stats)
             if abs((-1 if own[name] is None else own[name]) - theirs) > 1e-9]
    print("\n".join(wrong) or "coco_check: all 12 numbers agree")
    sys.exit(1 if wrong else 0)


main()
