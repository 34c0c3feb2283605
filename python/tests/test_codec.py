"""pack, unpack, inspect: the C++ library's bytes, and ops that torch can trace."""

import os
import pathlib

import pytest
import torch

import satchel
from satchel._ops import Layout, layout, ops, parse_spec

SPECS = ["bits=2", "bits=1", "bits=3", "bits=8", "bits=4,levels=even", "exact", "blockwise", "blockwise,rows=8,hadamard=yes", "actnn",
         "division", "gact", "satchel", "bits=32", "side=relu", "side=both,bits=3", "satchel,off=mean", "bits=2,block=map",
         "bits=2,block=row,header=f32", "lowpass=8,part=low", "lowpass=8,part=high", "bits=2,round=nearest", "exact,bits=32"]
LIBRARY = pathlib.Path(os.environ.get("SATCHEL_CPP_LIBRARY", "build/libsatchel.so"))


def tensor(layout, dtype=torch.float32):
    x = torch.randn(4, 6, 10, 16).to(dtype)
    return {"contiguous": x, "channels_last": x.to(memory_format=torch.channels_last), "gaps": x[:, :, ::2]}[layout]


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the C++ library is not built")
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_cpp_library(spec):
    """Both libraries in one process: nothing is registered twice."""
    torch.ops.load_library(str(LIBRARY.resolve()))
    n = parse_spec(spec)
    numbers = [*n[:2], bool(n[2]), *n[3:10], bool(n[10])]
    seed = torch.tensor([1234567])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in ("contiguous", "channels_last", "gaps"):
            x = tensor(layout, dtype)
            expected = torch.ops.satchel.pack(x, seed, *numbers)
            strides = torch.ops.satchel.packed_strides(x, *numbers)
            packed = satchel.pack(x, spec, seed)
            assert torch.equal(packed.bytes, expected), (dtype, layout)
            assert packed.strides == tuple(strides)
            again = torch.ops.satchel.unpack(expected, seed if n[7] == 1 else None, x.shape, strides, dtype, *numbers, packed.channels, 1)
            assert torch.equal(satchel.unpack(packed).nan_to_num(), again.nan_to_num()), (dtype, layout)


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the C++ library is not built")
@pytest.mark.parametrize("spec", ["satchel", "satchel,bits=3", "side=both,bits=3"])
def test_channels_are_those_of_the_cpp_library(spec):
    torch.ops.load_library(str(LIBRARY.resolve()))
    n = parse_spec(spec)
    numbers = [*n[:2], bool(n[2]), *n[3:10], bool(n[10])]
    gamma, beta, seed = torch.randn(6), torch.randn(6), torch.tensor([5])
    gamma[2] = 0
    for layout in ("contiguous", "channels_last", "gaps"):
        x = tensor(layout)
        packed = satchel.pack(x, spec, seed, gamma=gamma, beta=beta)
        assert torch.equal(packed.bytes, torch.ops.satchel.pack_side(x, seed, gamma, beta, 1, *numbers))


@pytest.mark.parametrize("spec", SPECS)
def test_round_trip(spec):
    for layout in ("contiguous", "channels_last", "gaps"):
        x = tensor(layout)
        x = x.relu() if "relu" in spec else x
        packed = satchel.pack(x, spec, 3)
        y = satchel.unpack(packed)
        assert y.shape == x.shape and y.dtype == x.dtype
        if spec == "bits=32":
            assert torch.equal(x, y)
        if "project" not in spec and packed.seed is None and "part" not in spec and "satchel" not in spec:
            # one step of the coarsest code, 1 bit over the whole range, is the range
            assert (x - y).abs().max() <= 1.02 * (x.max() - x.min())
        about = satchel.inspect(packed)
        assert about["bytes"] == packed.nbytes and satchel.pack(x, about["spec"], 3).bytes.equal(packed.bytes)
        if packed.seed is None:
            assert sum(about["parts"].values()) == packed.bytes.numel()


def test_empty_and_single():
    for shape in ((0,), (3, 0, 2), (), (1,)):
        x = torch.randn(shape)
        assert satchel.unpack(satchel.pack(x, "bits=2")).shape == x.shape


def test_seeds():
    x = torch.randn(1000)
    assert satchel.pack(x, "bits=2", 7).bytes.equal(satchel.pack(x, "bits=2", 7).bytes)
    assert not satchel.pack(x, "bits=2", 7).bytes.equal(satchel.pack(x, "bits=2", 8).bytes)
    assert satchel.pack(x, "bits=2", -1).bytes.equal(satchel.pack(x, "bits=2", (1 << 64) - 1).bytes)


def test_non_finite_blocks_decode_to_nan():
    x = torch.randn(512)
    x[3] = float("inf")
    y = satchel.unpack(satchel.pack(x, "bits=2"))
    assert y[:256].isnan().all() and y[256:].isfinite().all()


@pytest.mark.parametrize("shape", [(7,), (300,), (3, 5, 4)])
def test_masks_and_integers(shape):
    x = torch.randn(shape)
    for value in (x, x.bfloat16(), x > 0):
        back = ops.unpack_mask(ops.pack_mask(value), x.shape, x.stride(), torch.float32)
        assert torch.equal(back, (x > 0).float())
    n = torch.randint(-5, 900, shape)
    assert torch.equal(ops.widen(ops.narrow(n, -5, 899), n.shape, n.stride(), -5, 10), n)


@pytest.mark.parametrize("values", [1, 7, 8, 9, 300, 5000])
def test_flags(values):
    """As bits, from any address; whatever is not 0 is true."""
    whole = torch.randint(0, 3, (values + 3,), dtype=torch.uint8)
    for flags in (whole[:values], whole[3:], whole[:1].expand(values).clone()):
        bits = ops.pack_mask(flags.view(torch.bool))
        assert torch.equal(bits, ops.pack_mask((flags != 0).float()))
        assert torch.equal(ops.unpack_mask(bits, [values], [1], torch.bool), flags != 0)


def test_ops_that_know_a_layout_by_a_number():
    x, seed, spec = torch.randn(6, 10, 64)[:, :, :40].transpose(0, 1), torch.tensor([3]), parse_spec("bits=2")
    like = Layout(tuple(x.shape), x.stride(), x.clone().stride(), x.dtype, spec)
    packed = ops.pack_by_id(x, seed, like.id)
    assert torch.equal(packed, ops.pack(x.clone(), seed, None, 1, list(spec))) and packed.nbytes == like.nbytes
    assert torch.equal(ops.unpack_by_id(packed, like.id), ops.unpack(packed, like.shape, like.strides, x.dtype, list(spec)))
    table, codes = torch.randn(16), torch.randint(0, 256, (1200,), dtype=torch.uint8)
    assert torch.equal(ops.unpack_table_by_id(codes, table, like.id), ops.unpack_table(codes, table, like.shape, like.strides, x.dtype))

    def raises(rule, call):
        with pytest.raises(RuntimeError, match=rule):
            call()

    shape = Layout((4,), (1,), (1,), torch.float32)  # without a code
    raises(r"\[pack_by_id\] layout must be a number that layout_id\(\) gave, got -1", lambda: ops.pack_by_id(x, seed, -1))
    assert all(torch.equal(packed, ops.pack_by_id(other, seed, like.id)) for other in (x.clone(), x.contiguous()))  # other strides: copied
    raises(r"\[pack_by_id\] tensor must have the layout's type, got Double", lambda: ops.pack_by_id(x.double(), seed, like.id))
    raises(r"\[pack_by_id\] tensor must have the layout's shape; another one's values, got 720", lambda: ops.pack_by_id(x[:3], seed, like.id))
    raises(r"\[pack_by_id\] seed must be int64, got Float", lambda: ops.pack_by_id(x, seed.float(), like.id))
    raises(r"\[pack_by_id\] layout must have a spec", lambda: ops.pack_by_id(torch.ones(4), seed, shape.id))
    raises(r"\[unpack_by_id\] layout must have a spec", lambda: ops.unpack_by_id(packed, shape.id))
    raises(r"\[unpack_by_id\] bytes must be .* for this shape and spec, got", lambda: ops.unpack_by_id(packed[:-1], like.id))
    raises(r"\[unpack_table_by_id\] bytes must be 1 for this shape and spec, got 1200", lambda: ops.unpack_table_by_id(codes, table[:4], shape.id))
    raises(r"\[layout_id\] strides must fill memory without gap", lambda: Layout((4, 4), (8, 1), (8, 1), torch.float32))
    raises(r"\[layout_id\] strides must be as many as sizes, got 2", lambda: Layout((4,), (8, 1), (1,), torch.float32))
    for text in ("satchel", "division", "bits=2,block=row", "bits=32", "exact", "actnn"):
        raises(r"\[layout_id\] spec must be of plain blocks, which do not ask for a shape, got ", lambda: Layout((4,), (1,), (1,), torch.float32, parse_spec(text)))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_powers(bits):
    """A code of exp(x) in one op, and log() of it: the codes of both ops one after the other, but for exp's last bits."""
    from satchel.kept import Code, Exp

    x, seed = torch.log_softmax(3 * torch.randn(32, 700), -1), torch.tensor([9])
    x[0, 0] = -float("inf")
    for t in (x, x.mT, x[:, ::2], x[:, :512]):
        form, code = Exp(t, bits, seed), Code(t.exp(), bits, seed, "f32")
        back, expected = form.restore(), code.restore()
        assert form.nbytes == code.nbytes and form.bits == bits and back.stride() == expected.stride()
        near = ((back.exp() - expected).abs() < 1e-6).float().mean()
        assert near > 0.999, near
        form.recode(1, torch.tensor([1]))  # a budget takes bits off
        assert form.bits == 1 and form.nbytes == form.bytes_at(1) and form.restore().exp().max() < 1.01
    with pytest.raises(RuntimeError, match=r"\[pack_exp_by_id\] tensor must be float32, got BFloat16"):
        Exp(x.bfloat16(), bits, seed)


def test_errors_say_the_rule():
    with pytest.raises(ValueError, match=r"\[spec\] option must be one of"):
        satchel.pack(torch.ones(4), "bit=2")
    with pytest.raises(ValueError, match=r"\[pack\] tensor must be float32, float16 or bfloat16, got torch.float64"):
        satchel.pack(torch.ones(4).double())
    with pytest.raises(RuntimeError, match=r"\[unpack\] bytes must be 20 for this shape and spec, got 19"):
        ops.unpack(torch.zeros(19, dtype=torch.uint8), (4,), (1,), torch.float32, list(parse_spec("bits=2")))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "mish"])
def test_slopes(kind, dtype, bits):
    """Each level is the slope of its value, as torch's backward computes it; codes are a level beside the slope, right in the mean."""
    from satchel.kept import SlopeCode, _slope_tables

    function = {"gelu": torch.nn.functional.gelu, "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
                "silu": torch.nn.functional.silu, "mish": torch.nn.functional.mish}[kind]

    def slopes(x):
        x = x.double().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    levels, values = _slope_tables(kind, bits, dtype, torch.device("cpu"))
    assert torch.allclose(slopes(values), levels.double(), atol=1e-6) and (levels.diff() > 0).all()
    x = (torch.randn(3, 1001) * 3).to(dtype)
    x[0, :4] = torch.tensor([100.0, -100.0, float("inf"), -float("inf")])
    exact = slopes(x.clamp(-100, 100))
    near = torch.searchsorted(levels.double(), exact).clamp(1, len(levels) - 1)
    low, high = levels[near - 1].double(), levels[near].double()
    total = torch.zeros_like(exact)
    for seed in range(50):
        code = SlopeCode(x, kind, bits, torch.tensor([seed]))
        got = slopes(code.restore())
        assert ((got - low).abs() < 2e-6).logical_or((got - high).abs() < 2e-6).all()
        total += got / 50
    # Pooled: Σ(mean − exact)² has mean Σp(1 − p)·(high − low)²/50 over 3,000 values; 30 % is more than five of its deviations.
    inside = (exact >= low) & (exact <= high)
    variance = ((exact - low) * (high - exact))[inside].sum() / 50
    assert (total - exact)[inside].square().sum() < 1.3 * variance + 1e-6
