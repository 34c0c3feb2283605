#!/usr/bin/env python3
"""Holds the order of the house; prints FILE:LINE for each breach and ends with 1.

  rooms          an include points to its own room or to one above it, as docs/architecture.md draws them
  flags          what a method keeps is read in satchel/core alone (keeps_of() of core/keep.h)
  thread_local   one in satchel/autograd (StepContext), none in satchel/plan and satchel/tensor, those of satchel/train by name

check_house.py --count prints how many files and lines norms, activations, codes and what is kept take.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["core", "kernels", "tensor", "autograd", "plan", "nn", "graph", "models", "data", "train"]
# Whose headers a room may include: its own, and those of the rooms above it that it needs.
MAY_READ = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "tensor": {"core", "kernels", "tensor"},
    "autograd": {"core", "kernels", "tensor", "autograd"},
    "plan": {"core", "kernels", "tensor", "autograd", "plan"},
    "nn": {"core", "tensor", "autograd", "plan", "nn"},
    "graph": {"core", "kernels", "tensor", "autograd", "graph"},
    "models": {"core", "tensor", "autograd", "plan", "nn", "graph", "models"},
    "data": {"core", "kernels", "tensor", "graph", "data"},
    "train": set(ROOMS),
    "stable": {"core", "kernels", "stable"},
}
FLAGS = ["torch_baseline", "shared", "adaptive", "keeps_aggregate", "packs_data", "keeps_dropout", "norm_bias", "residual", "mean", "budget",
         "swap", "longest_block"]
FLAG = re.compile(r"\b(?:\w*[mM]ethod_?|given|least)(?:\(\))?\.(" + "|".join(FLAGS) + r")\b")
TRAIN_THREAD_LOCALS = {"memory.cpp": "metered", "captured_cuda_on.cpp": "streams"}
COUNTED = re.compile(r"norm|chain|statistics|elu|act|side|mask|moments|channel|third|mixed|per_sample|epilogue|keep|saved|extra_bit")


def sources(room=""):
    for path in sorted((ROOT / "satchel" / room).rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            yield path


def breaches():
    for path in sources():
        inside = path.relative_to(ROOT / "satchel")
        room = inside.parts[0] if len(inside.parts) > 1 else None
        local = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            code = line.split("//")[0]
            included = re.match(r'#include "satchel/(\w+)/', line)
            if room and included and included[1] not in MAY_READ[room]:
                yield f"{where}: room {room} includes room {included[1]}"
            if room != "core" and (flag := FLAG.search(code)):
                yield f"{where}: reads {flag[0]}; ask core/keep.h"
            if "thread_local" in code:
                local += 1
                named = TRAIN_THREAD_LOCALS.get(path.name) if room == "train" else None
                allowed = room == "core" or (path.name == "step.cpp" and room == "autograd" and local == 1) or (named and named in code)
                if not allowed:
                    yield f"{where}: a thread_local; put it into StepContext (autograd/step.h)"


def main():
    if "--count" in sys.argv:
        files = [p for p in sources() if COUNTED.search(p.stem)]
        print(f"{len(files)} files, {sum(len(p.read_text().splitlines()) for p in files)} lines")
        return 0
    found = list(breaches())
    print("\n".join(found) if found else "the house is in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
