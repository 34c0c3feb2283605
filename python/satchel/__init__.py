"""Satchel packs what training saves for backward into one or two bits a value, and unpacks it on the way back."""

from ._ops import ops
from .codec import Packed, inspect, pack, presets, unpack
from .doctor import Diagnosis, doctor
from .graph_pass import PackPass, compile
from .meter import Meter
from .packing import attach, detach, packing
from .report import report

__version__ = "0.1.0"
__all__ = ["Diagnosis", "Meter", "PackPass", "Packed", "attach", "compile", "detach", "doctor", "inspect", "pack", "packing", "presets", "report", "unpack", "cuda_compiled", "__version__"]


def cuda_compiled() -> bool:
    """Were the CUDA kernels built? Without them tensors on a GPU raise "[op] built without CUDA"."""
    return ops.cuda_compiled()
