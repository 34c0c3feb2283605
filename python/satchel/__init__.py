"""Satchel packs what training saves for backward into one or two bits a value, and unpacks it on the way back."""

import importlib
from typing import TYPE_CHECKING, Any

from . import activation_ops, norm_ops  # what these ops do on a CPU and in tracing
from ._ops import ops
from .codec import Packed, inspect, pack, presets, unpack
from .convert import Saved, convert, revert, saved
from .doctor import Diagnosis, doctor
from .meter import Meter
from .packing import attach, detach, packing
from .report import report

if TYPE_CHECKING:
    from .graph_compile import compile
    from .graph_pass import PackPass

__version__ = "0.1.0"
__all__ = [
    "Diagnosis", "Meter", "PackPass", "Packed", "Saved", "attach", "compile", "convert", "detach", "doctor", "inspect", "pack",
    "packing", "presets", "report", "revert", "saved", "unpack", "__version__", "cuda_compiled",
]  # fmt: skip

_LAZY = {"PackPass": ".graph_pass", "compile": ".graph_compile"}


def __getattr__(name: str) -> Any:
    """torch.compile's own modules take longer to import than torch: they come with the first use of `compile` or `PackPass`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def cuda_compiled() -> bool:
    """Were the CUDA kernels built? Without them tensors on a GPU raise "[op] built without CUDA"."""
    return ops.cuda_compiled()
