"""The compiled ops, loaded once, with what torch needs to trace them without data."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import pathlib
import weakref
from typing import Any

import torch

__all__ = ["KnownByUuid", "ops", "package_id", "parse_spec", "layout", "Layout", "Numbers"]

Numbers = tuple[int, ...]  # the eleven numbers of a spec

_BESIDE = pathlib.Path(__file__).parent / "_satchel.so"


def _path() -> str:
    return os.environ.get("SATCHEL_LIBRARY") or str(_BESIDE)


def package_id(*options: object) -> bytes:
    """Tells graphs that another version of the package, another build of the ops or other options made: torch's caches ask."""
    files = [path.read_bytes() for path in sorted(_BESIDE.parent.iterdir()) if path.suffix in (".py", ".json")]
    library = pathlib.Path(_path()).stat()
    return hashlib.sha256(b"\0".join([*files, repr((library.st_size, library.st_mtime_ns, options)).encode()])).digest()


class KnownByUuid:
    """Of a pass that torch's caches pickle for their keys: its uuid says all that decides. Addresses in it would differ from run to run."""

    def uuid(self) -> bytes | None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.uuid(),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _load() -> None:
    path = _path()
    if not pathlib.Path(path).is_file():
        raise ImportError(f"[satchel] the compiled ops must be at {path}; run pip install . in the clone")
    torch.ops.load_library(path)


_load()
ops = torch.ops.satchel_stable


@functools.lru_cache(maxsize=1024)
def parse_spec(text: str) -> Numbers:
    """The numbers of a spec's text: a preset's name and options, as the C++ library and the tool read it."""
    return tuple(ops.parse_spec(text))


@functools.lru_cache(maxsize=4096)
def layout(shape: tuple[int, ...], dtype: torch.dtype, channels: int, inner: int, numbers: Numbers) -> dict[str, int]:
    """Where the parts of a packed tensor stand, by the function that the C++ library allocates by."""
    names = ("coding", "values", "block", "blocks", "channels", "matrices", "headers", "means", "channel_table", "plane", "total")
    return dict(zip(names, ops.layout(list(shape), dtype, channels, inner, list(numbers))))


class Layout:
    """How a tensor lies in memory and how it is coded, handed to the ops once; they know it by its `id` while this lives.

    given: the strides of what is packed. strides: gapless ones, of the order in which values are coded and come back.
    numbers: the spec of its code; none where the bytes are a mask or places in a table. An id is this process's own: no graph may store one.
    covers: equal for tensors that, from one address on, have the same values in the same order of code.
    """

    __slots__ = ("id", "shape", "given", "strides", "dtype", "numbers", "covers", "__weakref__")

    def __init__(self, shape: tuple[int, ...], given: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, numbers: Numbers = ()) -> None:
        self.shape, self.given, self.strides, self.dtype, self.numbers = shape, given, strides, dtype, numbers
        self.covers = (dtype, math.prod(shape)) if given == strides else (dtype, shape, given)
        self.id: int = ops.layout_id(shape, given, strides, dtype, numbers)
        _layouts[self.id] = self

    def __del__(self) -> None:
        if hasattr(self, "id"):
            _forget(self.id)

    @property
    def nbytes(self) -> int:
        """Of the code."""
        return layout(self.shape, self.dtype, 0, 1, self.numbers)["total"]


_layouts: weakref.WeakValueDictionary[int, Layout] = weakref.WeakValueDictionary()
_forget = ops.forget_layout.default.op


def _ceil(a: int, b: int) -> int:
    return (a + b - 1) // b


def _packed_size(shape: torch.Size, dtype: torch.dtype, channels: int, inner: int, spec: list[int]) -> int:
    """Bytes of a packed tensor; in symbols where sizes are symbols and blocks are plain."""
    if all(isinstance(size, int) for size in shape):
        return layout(tuple(shape), dtype, channels, inner, tuple(spec))["total"]
    bits, block, per_sample, header, side, transform = spec[0], spec[1], spec[2], spec[5], spec[6], spec[7]
    if block <= 0 or per_sample or side or transform:
        raise NotImplementedError("[pack] sizes may be symbols for plain blocks only")
    values = math.prod(shape)  # Size.numel() would make a number of a symbol
    codes = values // 8 * bits + _ceil(values % 8 * bits, 8)
    return _ceil(codes, 16) * 16 + _ceil(values, block) * (8 if header else 4)


@torch.library.register_fake("satchel_stable::pack")
def _(x, seed, channels, inner, spec):
    count = 0 if channels is None else channels.shape[0]
    return x.new_empty(_packed_size(x.shape, x.dtype, count, inner, spec), dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::unpack")
def _(bytes, shape, strides, dtype, spec, channels=0, inner=1):
    return torch.empty_strided(shape, strides, dtype=dtype, device=bytes.device)


@torch.library.register_fake("satchel_stable::pack_mask")
def _(x):
    return x.new_empty(_ceil(x.numel(), 8), dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::unpack_mask")
def _(bits, shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device=bits.device)


@torch.library.register_fake("satchel_stable::narrow")
def _(x, least, most):
    bits = (most - least).bit_length()
    return x.new_empty(x.numel() // 8 * bits + _ceil(x.numel() % 8 * bits, 8), dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::widen")
def _(bytes, shape, strides, least, bits):
    return torch.empty_strided(shape, strides, dtype=torch.int64, device=bytes.device)


@torch.library.register_fake("satchel_stable::pack_slope")
def _(x, seed, levels, kind):
    bits = (levels.numel() - 1).bit_length()
    return x.new_empty(x.numel() // 8 * bits + _ceil(x.numel() % 8 * bits, 8), dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::unpack_table")
def _(bytes, table, shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device=bytes.device)


@torch.library.register_fake("satchel_stable::pack_by_id")
@torch.library.register_fake("satchel_stable::pack_exp_by_id")
def _(x, seed, layout):
    return x.new_empty(_layouts[layout].nbytes, dtype=torch.uint8)


@torch.library.register_fake("satchel_stable::unpack_by_id")
@torch.library.register_fake("satchel_stable::unpack_log_by_id")
def _(bytes, layout):
    found = _layouts[layout]
    return torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device=bytes.device)


@torch.library.register_fake("satchel_stable::unpack_table_by_id")
def _(bytes, table, layout):
    found = _layouts[layout]
    return torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device=bytes.device)


@torch.library.register_fake("satchel_stable::draw_projection")
def _(seed, rows, columns, first, last, spec):
    return seed.new_empty((last - first, columns, _ceil(columns, spec[8])), dtype=torch.float32)
