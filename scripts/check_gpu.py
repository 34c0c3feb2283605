#!/usr/bin/env python3
"""What only a GPU can show, in parts that each have a limit: tests, compute-sanitizer, then the measurements behind the figures. `make check-gpu` builds first.

  check_gpu.py [--only NAME,…] [--seconds N] [--jobs N] [--out FOLDER] [--list]

Tests run beside each other, `jobs` at a time; measurements run alone, one after the other, and start when the tests have ended. A part that its limit
or the limit of all parts (--seconds) ends is a TIMEOUT, and parts for which no time is left are "not run". NAME is a part, or tests, sanitize or
measure. In FOLDER (build/check-gpu): a log a part, results as JSON, and summary.json, which a second run with --only adds to. Exit code 1 unless all that was run passed.
"""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAMILIES = "codec low_pass norm_act norm_block norm_image product row_norm split autograd train".split()
SHARDS = {"autograd": 5, "train": 5, "norm_image": 4}  # of families that take longer than the others
PYTHON_TESTS = "test_cuda test_convert_cuda test_norms_cuda test_waiting test_activations test_compile".split()
TORCH_WAYS = "eager,compile,budget:0.5,budget:0.25,budget:0.1,checkpoint,save_on_cpu"
IMAGES = "fp32;actnn;division;satchel"


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    group: str  # tests, sanitize, measure
    command: tuple[str, ...]
    limit: int  # seconds


def parts(out: pathlib.Path) -> list[Part]:
    """In the order in which they start."""
    python, tool = sys.executable, "build/bin/satchel"

    def measure(name: str, limit: int, *command: str) -> Part:
        return Part(name, "measure", (*command, "--json", str(out / f"{name}.json")), limit)

    def graph(hidden: str, *more: str) -> tuple[str, ...]:
        return (tool, "bench", "graph", "--device", "cuda", "--data", "synthetic:arxiv", "--methods", "satchel", "--hidden", hidden, "--cuda-graph", *more)

    def images(*types: str) -> tuple[str, ...]:
        return (tool, "bench", "images", "--device", "cuda", "--model", "resnet50", "--batch", "256", "--steps", "20", "--methods", IMAGES, *types)

    models = (python, "bench/python_models.py")

    def shards(family: str) -> list[Part]:
        program, count = f"build/test_cuda_{family}", SHARDS.get(family, 1)
        if count == 1:
            return [Part(f"cuda_{family}", "tests", (program,), 300)]
        return [Part(f"cuda_{family}_{i}", "tests", ("env", f"GTEST_TOTAL_SHARDS={count}", f"GTEST_SHARD_INDEX={i}", program), 300) for i in range(count)]

    made = [part for family in sorted(FAMILIES, key=lambda name: -SHARDS.get(name, 1)) for part in shards(family)]
    made += [Part(name, "tests", (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"python/tests/{name}.py"), 300) for name in PYTHON_TESTS]
    for check in ("racecheck", "memcheck", "synccheck"):
        made.append(Part(check, "sanitize", ("scripts/sanitize_cuda.sh", "--jobs", str(max(4, (os.cpu_count() or 1) - 2)), "--tools", check, "--logs", str(out / check)), 420))
    made += [
        measure("codec", 60, tool, "bench", "codec", "--device", "cuda"),
        measure("chain", 40, tool, "bench", "chain", "--device", "cuda", "--rows", "16384", "--channels", "3072", "--dtype", "bf16"),
        measure("gpt", 200, *models, "gpt", "--ways", f"{TORCH_WAYS},packing,satchel"),
        measure("resnet50", 240, *models, "resnet50", "--ways", f"{TORCH_WAYS},packing,satchel,convert,convert+graph"),
        measure("images_bf16", 90, *images("--amp", "bf16")),
        measure("images_tf32", 120, *images("--tf32")),
        measure("graph_128_tf32", 40, *graph("128", "--tf32")),
        measure("graph_128", 40, *graph("128")),
        measure("graph_256_tf32", 40, *graph("256", "--tf32")),
        measure("graph_256", 40, *graph("256")),
        *(measure(f"graph_{hidden}{name}_training", 40, *graph(hidden, *more, "--last-layer", "training"))
          for hidden in ("128", "256") for name, more in (("_tf32", ["--tf32"]), ("", []))),
        measure("vit_b_16", 150, *models, "vit_b_16", "--ways", "eager,compile,budget:0.5,packing,satchel"),
        measure("convnext_tiny", 150, *models, "convnext_tiny", "--ways", "eager,compile,budget:0.5,packing,satchel"),
        measure("batch", 120, tool, "bench", "batch", "--model", "resnet50", "--device", "cuda", "--tf32", "--memory-cap", "16GB", "--no-tries",
                "--multiple", "16", "--steps", "1"),
        Part("architectures", "measure", (python, "bench/architectures.py", "--device", "cuda", "--jobs", str(min(16, os.cpu_count() or 1)), "--out", str(out / "architectures.jsonl")), 900),
    ]  # fmt: skip
    return made


def result_of(log: str) -> str:
    """The line of a log that says most: a test program's closing line, else its last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    closing = [line for line in lines if re.search(r"\[  (PASSED|FAILED)  \] \d+ test|\d+ (passed|failed)|parts, \d+ not clean", line)]
    return (closing or lines or [""])[-1][:120]


def run(part: Part, out: pathlib.Path, end: float, threads: int = 1) -> dict:
    """Runs a part until its limit or `end`, with that many threads on the CPU; its processes end with it."""
    left = end - time.monotonic()
    row = {"part": part.name, "group": part.group, "command": " ".join(part.command), "seconds": 0.0, "state": "not run", "result": ""}
    if left < 5:
        return row
    log, start = out / f"{part.name}.log", time.monotonic()
    environment = {**os.environ, "PYTHONPATH": "python", "SATCHEL_LIBRARY": str(ROOT / "build/python/_satchel.so"),
                   "SATCHEL_CPP_LIBRARY": str(ROOT / "build/libsatchel.so"), "OMP_NUM_THREADS": str(threads),
                   "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    with log.open("wb") as to:
        try:
            process = subprocess.Popen(part.command, cwd=ROOT, stdout=to, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        except OSError as error:
            return {**row, "state": "FAILED", "result": str(error)}
        try:
            code = process.wait(min(part.limit, left))
            row["state"] = "passed" if code == 0 else "skipped" if code == 77 else "FAILED"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            row["state"] = "TIMEOUT"
    row.update(seconds=round(time.monotonic() - start, 1), result=result_of(log.read_text(errors="replace")))
    return row


def show(row: dict) -> None:
    print(f"{row['part']:18} {row['group']:9} {row['state']:8} {row['seconds']:7.1f} s  {row['result']}", flush=True)


def chosen(every: list[Part], only: str | None) -> list[Part]:
    if only is None:
        return every
    patterns = [p for p in only.split(",") if p]
    for pattern in patterns:
        if not any(fnmatch.fnmatch(p.name, pattern) or p.group == pattern for p in every):
            raise SystemExit(f"[check_gpu] a part must be one of {', '.join(['tests', 'sanitize', 'measure', *(p.name for p in every)])}, got {pattern!r}")
    return [p for p in every if any(fnmatch.fnmatch(p.name, pattern) or p.group == pattern for pattern in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts or groups, by commas; patterns as cuda_*")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of all parts together")
    parser.add_argument("--jobs", type=int, default=4, help="tests at once")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/check-gpu")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    options = parser.parse_args()
    if not options.seconds > 0 or options.jobs < 1:
        raise SystemExit(f"[check_gpu] seconds and jobs must be positive, got {options.seconds:g} and {options.jobs}")
    out = options.out.resolve()
    wanted = chosen(parts(out), options.only)
    if options.list:
        for part in wanted:
            print(f"{part.name:18} {part.group:9} {part.limit:4} s  {' '.join(part.command)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    path = out / "summary.json"
    rows = {row["part"]: row for row in json.loads(path.read_text())["parts"]} if path.exists() else {}
    smi = shutil.which("nvidia-smi")
    gpu = subprocess.run([smi, "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip() if smi else ""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {"commit": git, "date": datetime.date.today().isoformat(), "gpu": gpu or "no GPU"}
    ran: list[dict] = []

    def finish(row: dict) -> None:  # at once: what has ended stands, however the run ends
        show(row)
        ran.append(row)
        rows[row["part"]] = row
        path.write_text(json.dumps({**about, "parts": list(rows.values())}, indent=2) + "\n")

    cores, end = os.cpu_count() or 1, time.monotonic() + options.seconds
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda part: run(part, out, end, max(1, cores // options.jobs)), [p for p in wanted if p.group == "tests"]):
            finish(row)
    for part in wanted:
        if part.group != "tests":
            finish(run(part, out, end, cores))
    bad = [row["part"] for row in ran if row["state"] in ("FAILED", "TIMEOUT")]
    counts = {state: sum(row["state"] == state for row in ran) for state in ("passed", "FAILED", "TIMEOUT", "skipped", "not run")}
    print(", ".join(f"{count} {state}" for state, count in counts.items() if count) + (f": {', '.join(bad)}" if bad else "") + f"; logs are in {options.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
