#!/usr/bin/env python3
"""Writes the list of files in docs/architecture.md from the present tree, between <!-- files --> and <!-- end -->.

  scripts/list_files.py [--check]      --check changes nothing and exits with 1 where the list is old

A row is one folder: its number of files and lines, and its stems (norm.h and norm.cpp are one). Standard library only.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ["core", "kernels", "kernels/cpu", "kernels/cuda", "tensor", "autograd", "plan", "nn", "graph", "models", "data", "train", "stable"]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}


def row(folder):
    files = sorted(f for f in folder.iterdir() if f.suffix in SOURCES)
    lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
    stems = ", ".join(f"`{stem}`" for stem in sorted({f.stem for f in files}))
    return f"| `{folder.relative_to(ROOT)}` | {len(files)} | {lines:,} | {stems} |"


def main():
    folders = [ROOT / "satchel" / name for name in FOLDERS] + [ROOT / "tools"]
    table = "\n".join(["| folder | files | lines | stems |", "|---|---|---|---|"] + [row(f) for f in folders if f.is_dir()])
    old = PAGE.read_text(encoding="utf-8")
    new = re.sub(r"(<!-- files -->\n).*?(\n<!-- end -->)", lambda m: m[1] + table + m[2], old, flags=re.S)
    if "<!-- files -->" not in old:
        sys.exit("docs/architecture.md:1: there is no <!-- files -->")
    if new != old and "--check" in sys.argv[1:]:
        sys.exit("docs/architecture.md: the list of files is old; run scripts/list_files.py")
    if new != old:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
