"""Tensors packed and unpacked: the same specs, presets and bytes as the C++ library."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ._ops import Numbers, layout, ops, parse_spec

__all__ = ["Packed", "pack", "unpack", "inspect", "presets"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CODINGS = ("keep", "block", "side", "low-pass")
_PROJECTION = 1  # transform in a spec's numbers
_THRESHOLDS = (1, 3, 4)  # sides that have them
_STRETCH = 1 << 24  # values of projection matrices at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A tensor in one or two bits a value, with all that unpack() needs.

    `bytes` is what the C++ library's `Packed::bytes` holds, to the byte, on the device of the tensor it was made from.
    `seed` is there only where unpack() redraws a projection.
    """

    bytes: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    spec: str
    seed: Tensor | None = None
    channels: int = 0
    inner: int = 1

    @property
    def nbytes(self) -> int:
        """Every byte it keeps alive."""
        return self.bytes.nbytes + (0 if self.seed is None else self.seed.nbytes)


def presets() -> dict[str, str]:
    """The presets' names and what they are, in the C++ library's order."""
    return dict(line.split("\t") for line in ops.presets().splitlines())


def _check(x: Any, op: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"[{op}] x must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise ValueError(f"[{op}] tensor must have one shape, got a nested one")
    if x.dtype not in _FLOATS:
        raise ValueError(f"[{op}] tensor must be float32, float16 or bfloat16, got {x.dtype}")
    if x.layout is not torch.strided:
        raise ValueError(f"[{op}] tensor must be strided, got {x.layout}")


def _numbers_of(spec: Any, op: str) -> Numbers:
    if not isinstance(spec, str):
        raise ValueError(f"[{op}] spec must be text, got {spec!r}")
    try:
        return parse_spec(spec)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)


def _check_packed(packed: Any, op: str) -> Numbers:
    """Throws unless every field is of its type and the fields fit each other; the ops check sizes."""
    if not isinstance(packed, Packed):
        raise ValueError(f"[{op}] packed must be what pack() gives, got {type(packed).__name__}")
    numbers = _numbers_of(packed.spec, op)
    for name in ("shape", "strides"):
        if not _are_sizes(getattr(packed, name)):
            raise ValueError(f"[{op}] {name} must be integers, got {getattr(packed, name)!r}")
    if not _are_sizes((packed.channels, packed.inner)):
        raise ValueError(f"[{op}] channels and inner must be integers, got {packed.channels!r} and {packed.inner!r}")
    if packed.dtype not in _FLOATS:
        raise ValueError(f"[{op}] dtype must be float32, float16 or bfloat16, got {packed.dtype}")
    if isinstance(packed.bytes, Tensor) and packed.bytes.layout is not torch.strided:
        raise ValueError(f"[{op}] bytes must be strided, got {packed.bytes.layout}")
    if not isinstance(packed.bytes, Tensor) or packed.bytes.dtype is not torch.uint8:
        raise ValueError(f"[{op}] bytes must be a tensor of uint8, got {getattr(packed.bytes, 'dtype', packed.bytes)}")
    projected = numbers[7] == _PROJECTION and math.prod(packed.shape) != 0
    if (packed.seed is not None) != projected:
        raise ValueError(f"[{op}] seed must be there for projections alone, got {packed.seed} for {packed.spec}")
    if projected:
        _check_seed(packed.seed, packed.bytes.device, op)
    return numbers


def _check_strides(packed: Packed) -> None:
    """Throws unless the strides put every value on its own place of a gapless stretch, as the ops ask of codes."""
    places = 1
    for step, size in sorted((step, size) for size, step in zip(packed.shape, packed.strides) if size > 1):
        if step != places:
            break
        places *= size
    if len(packed.shape) != len(packed.strides) or places != max(1, math.prod(packed.shape)) and 0 not in packed.shape:
        raise ValueError(f"[unpack] strides must fill memory without gap or overlap, got {packed.strides}")


def _check_seed(seed: Any, device: torch.device, op: str) -> None:
    if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1 or seed.device != device:
        got = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}" if isinstance(seed, Tensor) else repr(seed)
        raise ValueError(f"[{op}] seed must be an int64[1] tensor on {device}, got {got}")


def _seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        _check_seed(seed, device, "pack")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"[pack] seed must be an integer or an int64[1] tensor, got {seed!r}")
    number = seed & ((1 << 64) - 1)
    return torch.full((1,), number - (1 << 64) if number >> 63 else number, dtype=torch.int64, device=device)


def _check_channels(x: Tensor, gamma: Any, beta: Any, dim: Any) -> None:
    if not _are_sizes((dim,)) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"[pack] dim must be a dimension of x, which has {x.dim()}, got {dim}")
    for name, t in (("gamma", gamma), ("beta", beta)):
        if not isinstance(t, Tensor):
            raise ValueError(f"[pack] {name} must be a tensor, got {type(t).__name__}")
        if not t.is_floating_point() or t.layout is not torch.strided or t.device != x.device:
            raise ValueError(f"[pack] {name} must hold floating point numbers on {x.device}, got {t.dtype}, {t.layout}, on {t.device}")
        if t.dim() != 1 or t.shape[0] != x.shape[dim]:
            raise ValueError(f"[pack] {name} must hold {x.shape[dim]} values, one a channel, got {list(t.shape)}")


def channel_table(gamma: Tensor, beta: Tensor) -> Tensor:
    """t, γ, β and 0 of every channel, as bytes: what a side code's thresholds are made of."""
    zero = torch.zeros_like(gamma)
    return torch.stack([torch.where(gamma == 0, zero, -beta / gamma), gamma, beta, zero], 1).contiguous().view(torch.uint8)


def _table_of(gamma: Tensor | None, beta: Tensor | None, device: torch.device) -> Tensor:
    """Without γ one channel with threshold 0."""
    if gamma is None or beta is None:
        return torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float32, device=device).view(torch.uint8)
    return channel_table(gamma.detach().float(), beta.detach().float())


def _matrices(numbers: Numbers, rows: int, columns: int, seed: Tensor):
    """(first row, last row, matrices) in groups; the rows of a group of several matrices fall to them evenly."""
    per_matrix = min(numbers[9] or rows, rows)
    width = -(-columns // numbers[8])
    full, count = rows // per_matrix, -(-rows // per_matrix)
    at_once = max(1, _STRETCH // (max(width, per_matrix) * columns))
    first = 0
    while first < count:
        last = min(first + at_once, full) if first < full else count
        yield first * per_matrix, min(last * per_matrix, rows), ops.draw_projection(seed, rows, columns, first, last, list(numbers))
        first = last


def _projected(x: Tensor, numbers: Numbers, seed: Tensor) -> Tensor:
    columns = x.shape[-1] if x.dim() else 1
    h, width = x.reshape(-1, columns), -(-columns // numbers[8])
    z = torch.empty(h.shape[0], width, dtype=torch.float32, device=x.device)
    for first, last, matrices in _matrices(numbers, h.shape[0], columns, seed):
        part = h[first:last].float().view(matrices.shape[0], -1, columns)
        torch.bmm(part, matrices, out=z[first:last].view(matrices.shape[0], -1, width))
    return z.view(*x.shape[:-1], width)


def _unprojected(z: Tensor, packed: Packed, numbers: Numbers) -> Tensor:
    columns, width = packed.shape[-1] if packed.shape else 1, z.shape[-1]
    rows = z.reshape(-1, width)
    out = torch.empty(rows.shape[0], columns, dtype=torch.float32, device=z.device)
    assert packed.seed is not None
    for first, last, matrices in _matrices(numbers, rows.shape[0], columns, packed.seed):
        part = rows[first:last].view(matrices.shape[0], -1, width)
        torch.bmm(part, matrices.transpose(1, 2), out=out[first:last].view(matrices.shape[0], -1, columns))
    if packed.dtype is not torch.float32:  # finite values stop at the type's largest, as the codec's own decoding does
        most = torch.finfo(packed.dtype).max
        out = torch.where(out.isfinite(), out.clamp(-most, most), out).to(packed.dtype)
    return out.view(packed.shape)


@torch.no_grad()
def pack(
    x: Tensor, spec: str = "bits=2", seed: int | Tensor = 0, *, gamma: Tensor | None = None, beta: Tensor | None = None, dim: int = 1
) -> Packed:
    """Packs a float32, float16 or bfloat16 tensor.

    spec: a preset's name and options, as the C++ library reads it: "bits=2", "division", "blockwise,block=1024,project=8".
    seed: a number, or an int64[1] tensor on x's device that is read when the kernels run. Equal input, spec and seed give equal bytes.
    gamma, beta: for side codes, a norm's weight and bias, one value a channel of dimension `dim`; without them the threshold is 0.

    >>> packed = satchel.pack(torch.randn(64, 1024), "bits=2")
    >>> satchel.unpack(packed).shape
    torch.Size([64, 1024])
    """
    _check(x, "pack")
    numbers, x = _numbers_of(spec, "pack"), x.detach()
    if (gamma is None) != (beta is None):
        raise ValueError(f"[pack] gamma and beta must come together, got {'beta' if gamma is None else 'gamma'} alone")
    if gamma is not None and beta is not None:
        _check_channels(x, gamma, beta, dim)
        if numbers[6] not in _THRESHOLDS or numbers[7] == _PROJECTION:
            raise ValueError(f"[pack] side must be one or both for gamma and beta, got {spec}")
    number = _seed_tensor(seed, x.device)
    if numbers[7] == _PROJECTION and x.numel() > 0:
        inside = pack(_projected(x, numbers, number), ops.spec_text([*numbers[:7], 0, 0, 0, 0]), number)
        shape = tuple(x.shape)
        return Packed(inside.bytes, shape, torch.empty(shape, device="meta").stride(), x.dtype, spec, number.view(1).clone())
    channels, inner, table = 0, 1, None
    strides = tuple(ops.packed_strides(x, list(numbers)))
    if numbers[6] in _THRESHOLDS:
        table = _table_of(gamma, beta, x.device)
        channels = table.shape[0]
        if gamma is not None:
            dim = dim % x.dim()
            inner = 1 if x.shape[dim] == 1 or x.numel() == 0 else strides[dim]
    at = layout(tuple(x.shape), x.dtype, channels, inner, numbers)
    if at["coding"] == 0:
        flat = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x).as_strided((x.numel(),), (1,))
        return Packed(flat.view(torch.uint8), tuple(x.shape), strides, x.dtype, spec)
    data = ops.pack(x, number, table, inner, list(numbers))
    return Packed(data, tuple(x.shape), strides, x.dtype, spec, None, channels, inner)


@torch.no_grad()
def unpack(packed: Packed) -> Tensor:
    """The tensor again, with its dtype, shape and strides."""
    numbers = _check_packed(packed, "unpack")
    if packed.seed is not None:
        width = -(-(packed.shape[-1] if packed.shape else 1) // numbers[8])
        shape = (*packed.shape[:-1], width)
        inside = Packed(
            packed.bytes, shape, torch.empty(shape, device="meta").stride(), torch.float32, ops.spec_text([*numbers[:7], 0, 0, 0, 0])
        )
        return _unprojected(unpack(inside), packed, numbers)
    at = layout(packed.shape, packed.dtype, packed.channels, packed.inner, numbers)
    if at["coding"] == 0:
        if packed.bytes.dim() != 1 or packed.bytes.numel() != math.prod(packed.shape) * packed.dtype.itemsize:
            raise ValueError(f"[unpack] bytes must be {math.prod(packed.shape) * packed.dtype.itemsize} in one line, got {list(packed.bytes.shape)}")
        _check_strides(packed)
        out = torch.empty_strided(packed.shape, packed.strides, dtype=packed.dtype, device=packed.bytes.device)
        out.as_strided((out.numel(),), (1,)).copy_(packed.bytes.view(packed.dtype))
        return out
    return ops.unpack(
        packed.bytes, packed.shape, packed.strides, packed.dtype, list(numbers), packed.channels, packed.inner
    )


def inspect(packed: Packed) -> dict[str, Any]:
    """What a packed tensor is made of: its spec, coding, blocks, and the bytes of each part."""
    numbers = _check_packed(packed, "inspect")
    at = layout(packed.shape, packed.dtype, packed.channels, packed.inner, numbers)
    values = math.prod(packed.shape)
    parts = {"codes": at["headers"], "headers": at["means"] - at["headers"]}
    if at["coding"] == 3:
        parts["means"] = at["total"] - at["means"]
    elif at["coding"] == 2:
        parts["channels"] = min(at["plane"], at["total"]) - at["channel_table"]
        parts["off_plane"] = at["total"] - at["plane"]
    return {
        "spec": ops.spec_text(list(numbers)),
        "shape": list(packed.shape),
        "dtype": str(packed.dtype).removeprefix("torch."),
        "device": str(packed.bytes.device),
        "coding": _CODINGS[at["coding"]],
        "projected": at["matrices"] > 0,
        "block": at["block"],
        "blocks": at["blocks"],
        "bytes": packed.nbytes,
        "bits_per_value": 8 * packed.nbytes / values if values else 0.0,
        "parts": {name: size for name, size in parts.items() if size},
    }
