#!/usr/bin/env python3
"""Turns CUDA sources into C++ that g++ compiles against tests/emulation/cuda_runtime.h.

  translate.py OUT FILE…     writes FILE's C++ to OUT/FILE, .cu as .cu.cpp

Three things are rewritten, everything else is C++ already:
  kernel<T><<<grid, threads, bytes, stream>>>(a, b)   →  ::emulation::Launch(grid, threads, bytes, stream) << [&] { kernel<T>(a, b); }
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h))       →  ::emulation::cvt_f32_f16(x, h), a function of cuda_runtime.h
  extern __shared__ T name[];                         →  T* name = the launch's bytes
"""
import pathlib
import re
import sys

LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def closing(text, start):
    """The place of the bracket that closes the one at `start`."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == '"':
            i = LITERAL.match(text, i).end()
            continue
        if text.startswith("//", i):
            i = text.index("\n", i)
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    raise ValueError(f"no bracket closes {text[start:start + 60]!r}")


def kernel_start(text, end):
    """Where the name of the kernel begins that ends at `end`, template arguments and all."""
    i = end
    if text[i - 1] == ">":
        depth = 0
        while True:
            i -= 1
            depth += {">": 1, "<": -1}.get(text[i], 0)
            if depth == 0:
                break
    return i - len(re.search(r"[\w:]*$", text[:i])[0])


def launches(text):
    while (at := text.find("<<<")) >= 0:
        start, middle = kernel_start(text, at), text.index(">>>", at)
        end = closing(text, middle + 3)
        text = f"{text[:start]}::emulation::Launch({text[at + 3:middle]}) << [&] {{ {text[start:at]}{text[middle + 3:end + 1]}; }}{text[end + 1:]}"
    return text


def operands(part):
    """The expressions of one part of an asm statement."""
    found, i = [], 0
    while (match := re.compile(r'\s*,?\s*"[^"]*"\s*\(').match(part, i)) is not None:
        end = closing(part, match.end() - 1)
        found.append(part[match.end():end])
        i = end + 1
    return found


def instruction(template):
    """A name for what the template does: its instructions, without registers and numbers."""
    steps = [step.split() for step in re.sub(r"//.*|[{}]", " ", template).split(";")]
    words = [next((w for w in step if not w.startswith("@")), "") for step in steps if step and step[0] != ".reg"]
    return "_".join(w.replace(".", "_") for w in words if w)


def assembly(text):
    pattern = re.compile(r"\basm\s*(?:volatile\s*)?\(")
    while (match := pattern.search(text)) is not None:
        end = closing(text, match.end() - 1)
        inside, parts, i = text[match.end():end], [""], 0
        while i < len(inside):
            literal = LITERAL.match(inside, i)
            step = literal[0] if literal else inside[i]
            depth = parts[-1].count("(") - parts[-1].count(")")
            if step == ":" and depth == 0:
                parts.append("")
            else:
                parts[-1] += step
            i += len(step)
        name = instruction("".join(literal[1:-1] for literal in LITERAL.findall(parts[0])))
        arguments = [a for part in parts[1:3] for a in operands(part)]
        call = f"::emulation::{name}({', '.join(arguments)})" if name else "static_cast<void>(0)"
        text = text[:match.start()] + call + text[end + 1:]
    return text


def translated(text):
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?([\w:]+) (\w+)\[\];", r"\1* \2 = static_cast<\1*>(::emulation::dynamic_shared());", text)
    return assembly(launches(text))


def main():
    out = pathlib.Path(sys.argv[1])
    root = pathlib.Path(__file__).resolve().parents[2]
    for path in map(pathlib.Path, sys.argv[2:]):
        to = out / path.resolve().relative_to(root)
        to = to.with_suffix(".cu.cpp") if path.suffix == ".cu" else to
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(f'#line 1 "{path.resolve()}"\n' + translated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
