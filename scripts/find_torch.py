#!/usr/bin/env python3
"""Prints `folder;version;CUDA version` of this Python's torch, or of the folder given, without importing it.

A torch outside the versions that Satchel's sources are written for ends in one line on stderr and exit code 1.
"""
import importlib.util
import pathlib
import re
import runpy
import sys

OLDEST, TESTED, NEWEST = (2, 10), (2, 11), (2, 12)


def dotted(version):
    return ".".join(map(str, version))


def fail(what):
    sys.exit(f"satchel: {what}; Satchel builds with torch {dotted(OLDEST)} to {dotted(NEWEST)} and is tested with {dotted(TESTED)}; "
             f'for that one run: {sys.executable} -m pip install "torch=={dotted(TESTED)}.*"')


def find_folder():
    if len(sys.argv) > 1:
        return pathlib.Path(sys.argv[1])
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(f"{sys.executable} has no torch")
    return pathlib.Path(spec.submodule_search_locations[0])


def read_version(folder):
    """(version, CUDA version or '') of a wheel's folder (version.py) or an unzipped libtorch (build-version)."""
    if (folder / "version.py").is_file():
        values = runpy.run_path(str(folder / "version.py"))
        return values["__version__"], values.get("cuda") or ""
    if (folder / "build-version").is_file():
        version = (folder / "build-version").read_text().strip()
        cuda = re.search(r"\+cu(\d+)(\d)$", version)
        return version, ".".join(cuda.groups()) if cuda else ""
    fail(f"{folder} holds no torch")


folder = find_folder()
version, cuda = read_version(folder)
minor = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
if minor < OLDEST:
    fail(f"torch {version} in {folder} is too old")
if minor > NEWEST:
    fail(f"torch {version} in {folder} is too new")
if not (folder / "include/ATen/ATen.h").is_file():
    fail(f"torch {version} in {folder} has no C++ headers")
print(f"{folder.as_posix()};{version.partition('+')[0]};{cuda}")
