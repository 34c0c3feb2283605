#!/usr/bin/env python3
"""Writes the rows of python/satchel/policy.json as a C++ header, which satchel/autograd/packing_fields.cpp compiles.

  scripts/policy_rows.py POLICY HEADER

The header declares the nodes, so that a torch without one of them still compiles, and has one macro, SATCHEL_POLICY_ROWS, a line a row.
TYPE, SAVED, SIZE, DIM and IF are the includer's. Standard library only.
"""
import json
import pathlib
import re
import sys

KEYS = {"node", "field", "keep", "role", "edge", "weight", "of", "last", "size", "mean", "scale", "if"}
PYTHON = {"noise"}  # keys that only Python reads
KEEPS = {"code", "normed", "mask", "inside", "slope", "exp", "shape", "index", "flags"}
ROLES = {"none", "local", "flow", "attention"}


def name(text, what):
    if not re.fullmatch(r"[A-Za-z_]\w*", text):
        raise ValueError(f"[policy] {what} must be a name, got {text!r}")
    return text


def row(entry):
    if unknown := entry.keys() - KEYS - PYTHON:
        raise ValueError(f"[policy] a row may have {', '.join(sorted(KEYS))}, got {', '.join(sorted(unknown))}")
    node, field, keep, role = name(entry["node"], "node"), name(entry["field"], "field"), entry["keep"], entry.get("role", "none")
    if keep not in KEEPS or role not in ROLES:
        raise ValueError(f"[policy] keep and role must be known, got {keep!r} and {role!r}")
    others = [f"SAVED({node}, {name(entry[key], key)})" if key in entry else "nullptr" for key in ("of", "mean", "scale")]
    last = int(entry.get("last", 2))
    size = f"SIZE({node}, {name(entry['size'], 'size')})" if "size" in entry else "nullptr"
    index = f"{last}, {size}, {'nullptr' if last else f'DIM({node})'}"
    tests = [f"number(n.{name(key, 'if')}) == {float(value)!r}" for key, value in entry.get("if", {}).items()]
    condition = f"IF({node}, {' && '.join(tests)})" if tests else "nullptr"
    weight = "true" if entry.get("weight") else "false"
    numbers = f"{int(entry.get('edge', -1))}, {weight}"
    return (f'  {{"{node}", "{field}", FieldForm::{keep}, FieldRole::{role}, {numbers}, TYPE({node}), SAVED({node}, {field}), '
            f"{', '.join(others)}, {index}, {condition}}},")


def main():
    policy, header = map(pathlib.Path, sys.argv[1:])
    entries = json.loads(policy.read_text(encoding="utf-8"))["fields"]
    nodes = dict.fromkeys(name(entry["node"], "node") for entry in entries)
    lines = ["// Written by scripts/policy_rows.py from python/satchel/policy.json.", "#pragma once", "", "namespace torch::autograd::generated {"]
    lines += [f"struct {node};" for node in nodes]
    lines += ["}  // namespace torch::autograd::generated", "", "#define SATCHEL_POLICY_ROWS \\"]
    lines += [row(entry) + " \\" for entry in entries]
    text = "\n".join(lines) + "\n\n"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
