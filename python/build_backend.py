"""What pip calls to build the wheel: scikit-build-core, with torch, and with nvcc from PyPI where a GPU is present and no CUDA toolkit fits."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable, build_sdist, build_wheel, get_requires_for_build_sdist, prepare_metadata_for_build_editable, prepare_metadata_for_build_wheel,
)  # fmt: skip

# Without the two for metadata pip would compile while it says "Preparing metadata".
__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist", "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip

_OLDEST = 8.0  # compute capability, as cmake/SatchelArchitectures.cmake has it
_MAJOR = 13  # of the CUDA that requirements-nvcc.txt pins
_ROOT = pathlib.Path(__file__).parents[1]


def _printed(*command: str) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _has_gpu() -> bool:
    listed = _printed("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return any(float(found) >= _OLDEST for found in re.findall(r"\d+\.\d+", listed))


def _has_nvcc() -> bool:
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), os.path.join(toolkit, "bin", "nvcc")]
    return any(f"release {_MAJOR}." in _printed(nvcc, "--version") for nvcc in candidates if nvcc)


def _wants_nvcc(settings: dict[str, Any] | None) -> bool:
    """Is it a build with CUDA kernels that finds no nvcc?"""
    cuda = str((settings or {}).get("cmake.define.SATCHEL_CUDA", "AUTO")).upper()
    return cuda != "OFF" and (cuda == "ON" or _has_gpu()) and not _has_nvcc()


def _listed(name: str) -> list[str]:
    lines = (_ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _requirements(settings: dict[str, Any] | None) -> list[str]:
    """The torch that pip will install too; beside the pinned nvcc the one that it fits. The module serves torch 2.10 and later whichever it was
    built with (torch's stable ABI)."""
    if not _wants_nvcc(settings):
        return ["torch>=2.10"]
    return [line for line in _listed("requirements.txt") if line.startswith("torch")] + _listed("requirements-nvcc.txt")


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_requirements(config_settings)]
