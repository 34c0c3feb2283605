"""What norm → activation → dropout → next layer keeps: one code, from which each reader rebuilds what it needs.

A tensor that a converted layer made carries a Link to the save that stands for it, as an attribute; views, copies and what was changed in
place do not. What is kept, and in which code, is the C++ library's answer (`ops.keeps`, core/keep.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import struct
import threading
import weakref
from collections import OrderedDict
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from ._ops import Numbers, layout, ops, parse_spec
from ._seeds import mixed, rank
from .codec import channel_table

__all__ = [
    "Code", "Keep", "Link", "ONE_SIDED", "Save", "affine_like", "claim", "defer", "dense_strides", "drawn_seed", "find_save", "flush_deferred",
    "fresh_seed", "fresh_seeds", "in_order", "keeps", "link", "link_of", "pack", "raw_stream",
]  # fmt: skip

_KINDS = ("input", "aggregate", "norm", "activation", "shared", "derivative", "mask", "affine", "statistics", "dropout", "seed")
_ROLES = {"weight_input": 0, "epilogue": 3, "derivative": 4}
_NORMS = {"none": 0, "batch": 1, "layer": 2}
_ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 2, "elu": 3}
_SIDE, _RELU_SIDE = 6, 2  # the number of a spec that tells the side code; its value for a ReLU's
ONE_SIDED = (1, 4)  # its values for off values as their mean, or sampled
_EXACT = 32  # bits
_BLOCKS = parse_spec("bits=2")
_PART = {"cpu": 2 << 20, "cuda": 128 << 20}  # decoded values at a time


class Keep(NamedTuple):
    """One thing that a method keeps: of which tensor (0 input, 1 normalised, 2 output), and how it is coded."""

    of: int
    numbers: Numbers


@functools.lru_cache(maxsize=4096)
def keeps(
    method: str,
    role: str,
    norm: str = "none",
    activation: str = "none",
    next_reads: bool = True,
    image: bool = False,
    width: int = 1,
    count: int = 0,
    adds_skip: bool = False,
) -> dict[str, Keep]:
    """What the method keeps at such a place, by kind. `width`: channels; `count`: values a statistic, 0 where x's gradient reads none."""
    site = [_ROLES[role], _NORMS[norm], _ACTIVATIONS[activation], adds_skip, False, next_reads, image, width, count]
    flat = ops.keeps(method, [int(n) for n in site])
    return {_KINDS[flat[i]]: Keep(flat[i + 1], tuple(flat[i + 3 : i + 14])) for i in range(0, len(flat), 14)}


# ---- seeds ---------------------------------------------------------------------------------------------------------------------------


_HEAD = struct.Struct("4q")
_POOL = 64  # seeds that are made at once: a launch for each would cost more than what reads it
_places: dict[tuple[int, ...], int] = {}  # where torch's generator stands now, and how many pools were made there
_replayed: dict[tuple[int, ...], int] = {}  # the same of all places that checkpointing has set it back to since the newest forward
_pools: dict[tuple[Any, ...], tuple[Any, Iterator[Tensor]]] = {}  # by device, stream and length: (place, the seeds that are left)
_newest: list[Any] = [(), 0]  # the newest forward's place, and how many seeds were taken there
_lock = threading.Lock()


def _seeds(device: torch.device, length: int) -> Tensor:
    """Numbers of their own for one code, made of the place where torch's CPU generator stands, which stays there: numbers drawn for anything
    else are as they would be without codes. In a captured graph they are drawn on the GPU, anew in every replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(-(1 << 62), 1 << 62, (length,), dtype=torch.int64, device=device)
    state = torch.default_generator.get_state()
    place = _HEAD.unpack(ctypes.string_at(state.data_ptr(), 32))  # its seed, how far it is, and a number of its state; numpy() needs NumPy
    replays = torch._C._current_graph_task_id() != -1  # a forward within a backward: the end of one part and the start of the next are one place
    key = (device, raw_stream(device), length)
    with _lock:
        if not replays:
            _newest[:] = [place, _newest[1] + 1 if _newest[0] == place else 1]
            _replayed.clear()
        # What is computed again belongs to the newest forward: its noise is new in every step, too.
        of = (place, *((_newest[0], _newest[1]) if replays else ()))
        known, left = _pools.get(key, (None, iter(())))
        made = next(left, None) if known == of else None
        if made is None:
            extra = (1, *_newest[0], _newest[1]) if replays else (0,)
            first = mixed(rank(), *extra, _next_pool(place, replays), *place)
            numbers = torch.arange(first, first + _POOL * length, dtype=torch.int64, device=device)
            left = iter(numbers.view(_POOL, length).unbind())
            _pools[key] = (of, left)
            made = next(left)
    return made


def _next_pool(place: tuple[int, ...], replays: bool) -> int:
    counts = _replayed if replays else _places
    count = counts.get(place, 0)
    if count == 0 and not replays:
        _places.clear()
    counts[place] = count + 1
    return count


def fresh_seed(device: torch.device) -> Tensor:
    """A seed of its own for one code."""
    return _seeds(device, 1)


def fresh_seeds(device: torch.device) -> Tensor:
    """Two of them."""
    return _seeds(device, 2)


def drawn_seed(device: torch.device) -> Tensor:
    """A seed of dropout, one draw of torch's CPU generator. Checkpointing sets that back: what is computed again is dropped alike."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _seeds(device, 1)
    return torch.full((1,), mixed(rank(), int(torch.empty((), dtype=torch.int64, device="cpu").random_())), dtype=torch.int64, device=device)


def raw_stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


# ---- codes ---------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Code:
    """All that is known of a packed tensor beside its bytes."""

    numbers: Numbers
    shape: torch.Size
    strides: tuple[int, ...]
    channels: int = 0
    inner: int = 1

    @property
    def exact(self) -> bool:
        return self.numbers[0] == _EXACT

    @property
    def side(self) -> int:
        return 0 if self.exact else self.numbers[_SIDE]


def affine_like(t: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """One number a channel of dimension `dim` as it broadcasts to `shape`; dim < 0: t has the last dimensions' own shape."""
    if dim < 0:
        return t.view(shape[dim:])
    return t.view(-1, *(1,) * (len(shape) - dim - 1))


def pack(
    x: Tensor, numbers: Numbers, seed: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, dim: int = 1
) -> tuple[Tensor, Code]:
    """Bytes of a code of x, or x itself at 32 bits. γ and β, float32 and one a channel, set the thresholds of a side code."""
    strides = x.stride() if x.is_contiguous() else tuple(ops.packed_strides(x, numbers))
    if numbers[0] == _EXACT:
        return x, Code(numbers, x.shape, x.stride())
    table, inner = None, 1
    if numbers[_SIDE] in (*ONE_SIDED, 3):
        assert gamma is not None and beta is not None
        table = channel_table(gamma, beta)
        inner = 1 if dim < 0 or x.shape[dim] == 1 else strides[dim]
    return ops.pack(x, seed, table, inner, numbers), Code(numbers, x.shape, strides, 0 if table is None else table.shape[0], inner)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """x's strides, or contiguous ones where its memory has gaps."""
    return x.stride() if x.is_contiguous() else tuple(ops.packed_strides(x, _BLOCKS))


def in_order(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides: itself or a copy."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Save:
    """A code and the chain from it to the next layer's input: kept · act(γ·values + β) · scale."""

    code: Code
    bytes: Any  # a tensor; None where the mask tells all
    dim: int = 1  # of the channels; negative: the first of the last dimensions, which γ and β have
    mask: Tensor | None = None  # a bit a value, where an activation's code does not tell
    gamma: Tensor | None = None  # copies of the forward pass; a side code has them in its table
    beta: Tensor | None = None
    seed: Tensor | None = None  # of the dropout
    dropout: float = 0.0
    slope: float = 1.0  # of the activation's off side: 1 for none
    alpha: float | None = None  # of an ELU, whose result the values are
    kind: str = "shared"  # in reports; else norm or input: of one function alone
    layer: str = ""  # whose it is

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the tensors."""
        return self.kind, "mask", "affine", "affine", "seed"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """For save_for_backward()."""
        return self.bytes, self.mask, self.gamma, self.beta, self.seed

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> Save:
        bytes_, mask, gamma, beta, seed = tensors
        return Save(self.code, bytes_, self.dim, mask, gamma, beta, seed, self.dropout, self.slope, self.alpha, self.kind, self.layer)

    def without_tensors(self) -> Save:
        """What a node may hold beside saved tensors, which torch frees after backward."""
        return self.with_tensors((None,) * 5)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # a stored activation is without it; torch.load() takes this type

    @functools.cached_property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        """γ and β of the forward pass, float32, one a channel."""
        if self.gamma is not None and self.beta is not None:
            return self.gamma, self.beta
        if self.code.channels == 0 or self.alpha is not None:
            return None
        start = layout(tuple(self.code.shape), torch.float32, self.code.channels, self.code.inner, self.code.numbers)["channel_table"]
        table = self.bytes[start : start + 16 * self.code.channels].clone().view(torch.float32).view(-1, 4)
        return table[:, 1].contiguous(), table[:, 2].contiguous()

    @functools.cached_property
    def on(self) -> Tensor | None:
        """A bit a value that passed the activation; None where all did."""
        if self.mask is not None or self.code.side == 0:
            return self.mask
        return ops.side_on(self.bytes, self.code.shape, self.code.numbers, self.code.channels, self.code.inner)

    @functools.cached_property
    def fused(self) -> bool:
        """Do the CUDA kernels of a norm and its ReLU read it?"""
        code = self.code
        rows = code.shape.numel() // max(code.channels, 1)
        plain = self.bytes.is_cuda and code.side in ONE_SIDED and code.inner == 1 and self.slope == 0
        return plain and ops.norm_act_fits(rows, code.channels, code.numbers)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded values, all of them."""
        code = self.code
        if code.exact:
            return self.bytes.to(dtype)
        return ops.unpack(self.bytes, code.shape, code.strides, dtype, code.numbers, code.channels, code.inner)

    def gated(self, g: Tensor) -> Tensor:
        """What of g, a gradient of the output, passes activation and dropout."""
        on = self.on
        if on is None and self.seed is None:
            return g
        return ops.gate(in_order(g, self.code.strides), on, self.seed, self.dropout, self.slope)

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """(first, last, x): the next layer's input, some of its first dimension at a time."""
        count, each = self.code.shape[0], self.code.shape[1:].numel()
        # Bits of masks and noise are found from multiples of 8 on, fused kernels start at multiples of 8 rows. Only a first dimension that
        # is outermost in memory can be cut.
        unit = 8 // math.gcd(each // self.code.channels if self.fused else each, 8)
        some = max(_PART[self.bytes.device.type] // max(each, 1), 1)
        some = count if self.code.strides[0] != each or self.code.exact else -(-some // unit) * unit
        for first in range(0, count, max(some, 1)):
            last = min(first + some, count)
            yield first, last, self._part(first, last, each, dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of it."""
        return self._part(0, self.code.shape[0], self.code.shape[1:].numel(), dtype)

    def _part(self, first: int, last: int, each: int, dtype: torch.dtype) -> Tensor:
        code, shape = self.code, (last - first, *self.code.shape[1:])
        if self.fused:
            rows, span = code.shape.numel() // code.channels, each // code.channels
            place = (first * span, last * span)
            line = ops.norm_act_input(self.bytes, self.seed, rows, code.channels, code.numbers, self.dropout, *place, dtype)
            return line.flatten().as_strided(shape, code.strides)
        gates = self.seed is not None or (self.slope != 1 and (self.affine is not None or code.side != _RELU_SIDE))
        decoded = torch.float32 if gates or self.affine is not None else dtype
        if code.exact:
            x = self.bytes[first:last].to(decoded)
        else:
            line = ops.unpack_part(self.bytes, code.shape, decoded, code.numbers, code.channels, code.inner, first * each, last * each)
            x = line.as_strided(shape, code.strides, line.storage_offset())
        if self.affine is not None:
            gamma, beta = (affine_like(t, code.shape, self.dim) for t in self.affine)
            x = torch.addcmul(beta, x, gamma)
        if gates:
            on = self.on
            bits = None if on is None else on[first * each // 8 : -(-last * each // 8)]
            x = ops.gate(in_order(x, code.strides), bits, self.seed, self.dropout, self.slope, first * each)
        return x.to(dtype)


# ---- who finds a save ----------------------------------------------------------------------------------------------------------------


class Link:
    """What stands for a tensor that a layer made. `find(method)` gives the save that a layer with weights may read, or None."""

    __slots__ = ("version", "stream", "find", "maker", "is_relu", "__weakref__")

    def __init__(self, x: Tensor, find: Callable[[str], Save | None], maker: Any = None, is_relu: bool = False) -> None:
        self.version, self.stream, self.find, self.maker, self.is_relu = x._version, raw_stream(x.device), find, maker, is_relu

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def link(x: Tensor, find: Callable[[str], Save | None], maker: Any = None, is_relu: bool = False) -> Tensor:
    """Makes x, untouched from here on, findable."""
    setattr(x, "_satchel", Link(x, find, maker, is_relu))
    return x


def link_of(x: Tensor) -> Link | None:
    """x's, where x is as its maker left it and the same stream reads it."""
    found = getattr(x, "_satchel", None)
    if not isinstance(found, Link) or x.is_inference() or found.version != x._version or found.stream != raw_stream(x.device):
        return None
    return found


def find_save(x: Tensor, method: str) -> Save | None:
    """The save that x can be rebuilt from, where it has as many bits as the method gives to what layers with weights read."""
    found = link_of(x)
    save = None if found is None else found.find(method)
    if save is None or save.code.exact:
        return save
    return save if _serves(method, save.code.numbers, save.slope == 0) else None


@functools.lru_cache(maxsize=1024)
def _serves(method: str, numbers: Numbers, after_relu: bool) -> bool:
    return ops.serves(method, numbers, after_relu)


# ---- norms that defer their packing --------------------------------------------------------------------------------------------------

_local = threading.local()


def flush_deferred() -> None:
    """Packs this thread's deferred norm: every converted layer calls it first, unless it claims that norm."""
    reference: weakref.ref[Any] | None = getattr(_local, "deferred", None)
    if reference is None:
        return
    _local.deferred = None
    norm = reference()
    if norm is not None:
        norm.pack_now()


def defer(norm: Any) -> None:
    _local.deferred = weakref.ref(norm)


def claim(norm: Any) -> bool:
    """Takes this thread's deferred norm, where it is this one."""
    reference = getattr(_local, "deferred", None)
    if reference is None or reference() is not norm:
        return False
    _local.deferred = None
    return True
