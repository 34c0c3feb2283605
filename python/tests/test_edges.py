"""What goes wrong in practice: bad arguments, odd tensors, interrupted forwards, norms of few values."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _len_torch_function_stack

import satchel
from satchel import kept
from satchel._ops import ops, parse_spec

X = torch.randn(64, 64)
INF = float("inf")


def raises(rule, call, error=ValueError):
    """The message is `[op] rule, got value`."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value).splitlines()[0]
    assert text.startswith(rule), text
    assert ", got " in text, text


@pytest.mark.parametrize(
    "rule, call",
    [
        ("[pack] x must be a tensor", lambda: satchel.pack(None)),
        ("[pack] x must be a tensor", lambda: satchel.pack([1.0, 2.0])),
        ("[pack] tensor must be float32, float16 or bfloat16", lambda: satchel.pack(X.double())),
        ("[pack] tensor must be float32, float16 or bfloat16", lambda: satchel.pack(X.to(torch.complex64))),
        ("[pack] tensor must be strided", lambda: satchel.pack(X.to_sparse())),
        ("[pack] spec must be text", lambda: satchel.pack(X, 2)),
        ("[pack] seed must be an integer", lambda: satchel.pack(X, "bits=2", 1.5)),
        ("[pack] seed must be an integer", lambda: satchel.pack(X, "bits=2", None)),
        ("[pack] gamma and beta must come together", lambda: satchel.pack(X, "satchel", beta=torch.ones(64))),
        ("[pack] gamma must be a tensor", lambda: satchel.pack(X, "satchel", gamma=[1.0], beta=[1.0])),
        ("[pack] beta must hold 64 values", lambda: satchel.pack(X, "satchel", gamma=torch.ones(64), beta=torch.ones(3))),
        ("[pack] gamma must hold 64 values", lambda: satchel.pack(X, "satchel", gamma=torch.ones(64, 1), beta=torch.ones(64, 1))),
        ("[pack] dim must be a dimension of x", lambda: satchel.pack(X, "satchel", gamma=torch.ones(64), beta=torch.ones(64), dim=9)),
        ("[unpack] packed must be what pack() gives", lambda: satchel.unpack(b"abc")),
        ("[inspect] packed must be what pack() gives", lambda: satchel.inspect(None)),
        ("[packing] bits must be", lambda: satchel.packing(None)),
        ("[packing] bits must be", lambda: satchel.packing(2.5)),
        ("[packing] bits must be", lambda: satchel.packing((2.5, 4, 8))),
        ("[packing] bits must be", lambda: satchel.packing(True)),
        ("[packing] min_bytes must be", lambda: satchel.packing(min_bytes="a")),
        ("[packing] min_bytes must be", lambda: satchel.packing(min_bytes=-1)),
        ("[packing] include and exclude must be", lambda: satchel.packing(include=None)),
        ("[packing] include and exclude must be", lambda: satchel.packing(exclude=[1])),
        ("[packing] seed must be", lambda: satchel.packing(seed="a")),
        ("[packing] model must be", lambda: satchel.packing(model=3)),
        ("[attach] model must be", lambda: satchel.attach(None)),
        ("[attach] options must be", lambda: satchel.attach(nn.Linear(2, 2), bitz=2)),
        ("[detach] model must be", lambda: satchel.detach(None)),
        ("[compile] model must be", lambda: satchel.compile(None)),
        ("[compile] bits must be", lambda: satchel.compile(nn.Linear(2, 2), bits=9)),
        ("[compile] min_bytes must be", lambda: satchel.compile(nn.Linear(2, 2), min_bytes=None)),
        ("[compile] backend must be inductor", lambda: satchel.compile(nn.Linear(2, 2), backend="eager")),
        ("[compile] options must leave", lambda: satchel.compile(nn.Linear(2, 2), options={"joint_custom_post_pass": print})),
        ("[meter] by must be", lambda: satchel.Meter().table("layer")),
    ],
)
def test_bad_arguments(rule, call):
    raises(rule, call)


def test_bad_bytes():
    plain, kept, projected = (satchel.pack(X, spec) for spec in ("bits=2", "bits=32", "exact"))

    def changed(packed, **fields):
        return lambda: satchel.unpack(dataclasses.replace(packed, **fields))

    raises("[unpack] bytes must be", changed(plain, bytes=plain.bytes[:-1]), RuntimeError)
    raises("[unpack] bytes must be a tensor of uint8", changed(plain, bytes=None))
    raises("[unpack] bytes must be a tensor of uint8", changed(plain, bytes=plain.bytes.float()))
    raises("[unpack] seed must be there for projections alone", changed(plain, seed=torch.zeros(1, dtype=torch.int64)))
    raises("[unpack] seed must be there for projections alone", changed(projected, seed=None))
    raises("[unpack] bytes must be 16384", changed(kept, bytes=kept.bytes[:3]))
    raises("[unpack] strides must fill memory", changed(kept, strides=(0, 0)))
    raises("[unpack] strides must fill memory", changed(kept, strides=(1,)))
    table = torch.zeros((), dtype=torch.uint8)
    seed, numbers = torch.zeros(1, dtype=torch.int64), list(parse_spec("satchel"))
    raises("[pack] channels must be rows of 16 bytes", lambda: ops.pack(X, seed, table, 1, numbers), RuntimeError)
    assert plain != kept and plain == plain, "packed tensors compare by identity"


@pytest.mark.parametrize("spec", ["bits=2", "satchel", "division", "gact", "actnn", "side=both,bits=3"])
def test_garbage_decodes_to_something(spec):
    packed = satchel.pack(X, spec)
    for _ in range(8):
        noise = torch.randint(0, 256, packed.bytes.shape, dtype=torch.uint8)
        assert satchel.unpack(dataclasses.replace(packed, bytes=noise)).shape == X.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low, high", [(0.1, 0.9), (-0.3, 0.3), (-INF, 0.5), (0.5, INF), (-INF, -0.5), (-INF, INF), (1.0, 1.001), (0.7, 0.9)])
def test_hardtanh_is_exact_for_any_range(low, high, dtype):
    x = (2 * torch.randn(64, 64)).to(dtype).requires_grad_()
    expected = torch.autograd.grad(F.hardtanh(x * 1, low, high).sum(), x)[0]
    with satchel.packing(min_bytes=0):
        y = F.hardtanh(x * 1, low, high)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low, high", [(-0.3, 0.3), (None, 0.5), (0.5, None), (-INF, 0.5), (0.5, INF), (-INF, INF), (1.0, 1.0), (1.0, 1.001)])
def test_clamp_is_exact_for_any_range(low, high, dtype):
    x = (2 * torch.randn(64, 64)).to(dtype).requires_grad_()
    expected = torch.autograd.grad((x * 1).clamp(low, high).sum(), x)[0]
    with satchel.packing(min_bytes=0):
        y = (x * 1).clamp(low, high)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


NORMS = {
    "channels with means far apart": (lambda: nn.BatchNorm1d(64), lambda: torch.randn(512, 64) + 50 * torch.randn(64)),
    "few values a channel": (lambda: nn.BatchNorm1d(64), lambda: torch.randn(16, 64)),
    "rows of other sizes in one block": (lambda: nn.LayerNorm(64), lambda: torch.randn(128, 64) * torch.tensor([0.01, 100.0]).repeat(64)[:, None]),
    "groups of other sizes": (lambda: nn.GroupNorm(4, 16), lambda: torch.randn(8, 16, 4, 4) * torch.logspace(-2, 2, 16).view(1, 16, 1, 1)),
    "groups without maps": (lambda: nn.GroupNorm(4, 64), lambda: torch.randn(64, 64) * torch.logspace(-2, 2, 64)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_uneven_values(name):
    """The noise is a share of each statistic's own σ: the gradient along the exact one is right, row by row and channel by channel."""
    norm, x = NORMS[name][0](), NORMS[name][1]().requires_grad_()
    weights = torch.randn(x.shape)

    def gradient(y):
        return torch.autograd.grad((y * weights).sum(), x)[0]

    expected, draws = gradient(norm(x)), []
    for seed in range(100):
        with satchel.packing("2/4/8", min_bytes=0, seed=seed):
            y = norm(x * 1)
        draws.append(gradient(y))
    mean = torch.stack(draws).mean(0)
    along = (mean * expected).flatten(1).sum(1) / expected.square().flatten(1).sum(1)
    assert (along - 1).abs().mean() < 0.01, along
    assert (torch.stack(draws) - expected).norm() < 0.2 * 10 * expected.norm()


def test_a_batch_norm_of_many_values_takes_local_bits():
    with satchel.packing("2/4/8", min_bytes=0, meter=True) as p:
        for size in (4096, 2048):
            nn.BatchNorm1d(8)(torch.randn(size, 8, requires_grad=True) * 1)
    assert [line.kept for line in p.meter.lines if line.field == "input"] == ["2 bits", "4 bits"]


def test_a_batch_norm_with_running_statistics():
    norm = nn.BatchNorm1d(64).eval()
    x = torch.randn(512, 64, requires_grad=True)
    with satchel.packing(min_bytes=0, meter=True) as p:
        norm(x * 1).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(norm(x).sum(), x)[0])
    assert [line.kept for line in p.meter.lines if line.field == "input"] == ["2 bits"]


def test_expanded_tensors_and_buffers_stay_exact():
    x, y = torch.randn(1, 1, requires_grad=True), torch.randn(512, 512, requires_grad=True)
    with satchel.packing(min_bytes=0, meter=True) as p:
        (x * 1).expand(512, 512) * (y * 1)
    assert p.meter.after < 150_000, p.meter.by_op()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("factor", torch.randn(64, 64))

        def forward(self, x):
            return self.linear(x) * self.factor

    model = Scaled()
    p = satchel.attach(model, meter=True)
    model(X).sum().backward()
    assert not [line for line in p.meter.lines if line.node == "MulBackward0"], "the model holds it anyway"


@pytest.mark.parametrize("meter", [False, True])
def test_function_transforms(meter):
    w = torch.randn(64, 64)

    def loss(a):
        return (a @ w).relu().square().sum()

    with satchel.packing(min_bytes=0, meter=meter):
        got = torch.func.grad(loss)(X)
    assert torch.equal(got, torch.func.grad(loss)(X))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    by_row = torch.func.vmap(torch.func.grad(lambda a: model(a[None]).square().sum()))
    expected = by_row(X)
    satchel.attach(model, min_bytes=0, meter=meter)
    assert torch.equal(by_row(X), expected)


def a_sparse_sum(h, layout):
    there = torch.rand(256, 256, generator=torch.Generator().manual_seed(5)) < 0.1
    a = there.float().to_sparse(layout=layout)
    return torch.sparse.mm(a, torch.relu(h)).sum()


def sparse_values_with_a_gradient(h):
    a = torch.sparse_coo_tensor(torch.arange(512).view(2, 256), h[:, 0], (256, 512)).coalesce()
    return torch.sparse.mm(a * a, torch.ones(512, 64)).sum() + torch.sparse.softmax(a, 1).to_dense().sum()


def a_nested_list(h):
    parts = torch.nested.as_nested_tensor([h[:100], h[100:]], layout=torch.strided)
    return nn.functional.linear(torch.relu(parts) * 2, torch.ones(64, 64)).to_padded_tensor(0.0).sum()


UNUSUAL = {
    "coo": lambda h: a_sparse_sum(h, torch.sparse_coo),
    "csr": lambda h: a_sparse_sum(h, torch.sparse_csr),
    "sparse values": sparse_values_with_a_gradient,
    "nested": a_nested_list,
    "mkldnn": lambda h: torch.relu(h.to_mkldnn()).to_dense().sum(),
}


@pytest.mark.parametrize("meter", [False, True])
@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_tensors_without_storage_or_strides(name, meter):
    """Sparse, nested and MKL-DNN's: they stay exact, and so do the gradients."""
    x = torch.randn(256, 64, requires_grad=True)
    expected = torch.autograd.grad(UNUSUAL[name](x * 1), x)[0]
    with satchel.packing(min_bytes=0, meter=meter, exclude=["Mul*"]):
        loss = UNUSUAL[name](x * 1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


ACTIVATIONS = [nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.device("meta")], ids=str)
@pytest.mark.parametrize("way", ["packing", "convert"])
def test_torchs_defaults_do_not_matter(way, default):
    """torch.set_default_dtype and set_default_device: what is kept is what it is without, bit for bit, and so is what a cache holds afterwards."""

    def step(default):
        torch.manual_seed(3)
        parts = [m for a in ACTIVATIONS for m in (nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False), a())]
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), *parts)  # dropout moves the generator, whose place is convert()'s seed
        model = satchel.convert(model) if way == "convert" else model
        kept._two_values.cache_clear(), kept._slope_tables.cache_clear()
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        elif default is not None:
            torch.set_default_device(default)
        try:
            with satchel.packing("2/4/8" if way == "packing" else 32, min_bytes=0, seed=1):
                loss = model(X).square().mean()
            return torch.autograd.grad(loss, list(model.parameters()))
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)

    for got, expected in zip(step(default), step(None)):
        assert torch.equal(got, expected)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.linear, self.error = nn.Linear(64, 64), nn.Linear(64, 64), None

    def forward(self, x):
        y = self.inner(x)
        if self.error is not None:
            raise self.error
        return F.gelu(self.linear(y))


def test_an_interrupted_forward_is_left_by_the_next():
    """torch calls no forward hook after KeyboardInterrupt."""
    model = Failing()
    p = satchel.attach(model, min_bytes=0, meter=True)
    model.error = KeyboardInterrupt()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(X)
    model.error = None
    with torch.device("cpu"):  # a mode above the abandoned one stays
        model(X).sum().backward()
        assert _len_torch_function_stack() == 1
    assert _len_torch_function_stack() == 0 and p.step is None
    assert {line.module for line in p.meter.lines} == {"", "linear"}


def test_a_module_whose_error_is_caught_gives_its_name_back():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.linear = Failing(), nn.Linear(64, 64)

        def forward(self, x):
            try:
                self.bad(x)
            except ValueError:
                pass
            y = self.linear(x)
            return y * y

    model = Outer()
    model.bad.error = ValueError()
    p = satchel.attach(model, min_bytes=0, meter=True)
    model(X)
    assert {line.module for line in p.meter.lines if line.node == "MulBackward0"} == {""}
    assert {line.module for line in p.meter.lines} <= {"", "bad", "bad.inner"}


def test_a_root_that_calls_itself_is_not_abandoned():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, again=True):
            y = F.gelu(self.linear(x))
            return self(y, False) * y if again else y

    model = Twice()
    p = satchel.attach(model, min_bytes=0, meter=True)
    model(X).sum().backward()
    assert sum(line.node == "GeluBackward0" for line in p.meter.lines) == 2 and p.step is None


def test_threads_draw_apart():
    p, numbers = satchel.packing(min_bytes=0), []

    def run():
        for _ in range(200):
            with p:
                numbers.append(p.step.number)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == len(numbers) == 800


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_types_stay_exact(dtype):
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    with satchel.packing(min_bytes=0):
        y = ((x * x) @ x).abs().sum()
    got = torch.autograd.grad(y, x)[0]
    assert torch.equal(got, torch.autograd.grad(((x * x) @ x).abs().sum(), x)[0])


def test_inference_mode_and_devices_without_data():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64))
    satchel.attach(model, min_bytes=0)
    with torch.inference_mode():
        assert model(X).is_inference()
    model.to("meta")
    model(X.to("meta")).sum().backward()
    assert model[0].weight.grad.shape == (64, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())

    def gradients(context):
        model.zero_grad()
        with torch.autocast("cpu", dtype), context:
            loss = model(X).float().square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradients(satchel.packing(32))
    got = torch.stack([gradients(satchel.packing("4/8/8", min_bytes=0, seed=i)) for i in range(32)]).mean(0)
    assert not torch.equal(got, expected) and (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    "rule, call",
    [
        ("[pack] tensor must have one shape", lambda: satchel.pack(torch.nested.nested_tensor([X, X[:3]]))),
        ("[pack] tensor must be float32", lambda: satchel.pack(X > 0)),
        ("[spec] bits must be 1 to 8 or 32", lambda: satchel.pack(X, "bits=9")),
        ("[spec] preset must be one of", lambda: satchel.pack(X, "")),
        ("[pack] seed must be an int64[1] tensor on cpu", lambda: satchel.pack(X, "bits=2", torch.zeros(1, dtype=torch.int64, device="meta"))),
        ("[pack] seed must be an int64[1] tensor on cpu", lambda: satchel.pack(X, "exact", torch.zeros(2, dtype=torch.int64))),
        ("[pack] dim must be a dimension of x", lambda: satchel.pack(X, "satchel", gamma=torch.ones(64), beta=torch.ones(64), dim="a")),
        ("[pack] gamma must hold floating point", lambda: satchel.pack(X, "satchel", gamma=torch.ones(64, device="meta"), beta=torch.ones(64))),
        ("[pack] side must be one or both", lambda: satchel.pack(X, "exact", gamma=torch.ones(64), beta=torch.ones(64))),
        ("[unpack] shape must be integers", lambda: satchel.unpack(dataclasses.replace(satchel.pack(X), shape=(64.0, 64)))),
        ("[inspect] strides must be integers", lambda: satchel.inspect(dataclasses.replace(satchel.pack(X), strides=None))),
        ("[unpack] channels and inner must be integers", lambda: satchel.unpack(dataclasses.replace(satchel.pack(X), inner=None))),
        ("[unpack] dtype must be float32", lambda: satchel.unpack(dataclasses.replace(satchel.pack(X), dtype=None))),
        ("[unpack] bytes must be strided", lambda: satchel.unpack(dataclasses.replace(satchel.pack(X), bytes=torch.ones(9).to_sparse()))),
        ("[unpack] seed must be an int64[1] tensor", lambda: satchel.unpack(dataclasses.replace(satchel.pack(X, "exact"), seed=3))),
        ("[packing] preset must be one of", lambda: satchel.packing("SATCHEL")),
        ("[packing] meter must be True or False", lambda: satchel.packing(meter=satchel.Meter())),
        ("[packing] budget must be bytes", lambda: satchel.packing(budget="1e400")),
        ("[packing] budget must be bytes", lambda: satchel.packing(budget="4 bananas")),
        ("[packing] a context must be left in the thread", lambda: satchel.packing().__exit__(None, None, None)),
        ("[attach] model must not be scripted", lambda: satchel.attach(torch.jit.script(nn.Linear(2, 2)))),
        ("[convert] model must not be scripted", lambda: satchel.convert(torch.jit.script(nn.Linear(2, 2)))),
        ("[convert] layers must be initialised", lambda: satchel.convert(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)))),
        ("[doctor] model must be torch's own", lambda: satchel.doctor(satchel.convert(nn.Linear(2, 2)), X)),
        ("[doctor] loss must be a function", lambda: satchel.doctor(nn.Linear(2, 2), X, loss=3)),
        ("[doctor] loss must be a real number", lambda: satchel.doctor(nn.Linear(2, 2), X, loss=lambda x: x.sum())),
        ("[doctor] parameters must have values", lambda: satchel.doctor(nn.LazyLinear(2), X)),
        ("[doctor] parameters must have values", lambda: satchel.doctor(nn.Linear(2, 2, device="meta"), X)),
        ("[compile] model must be", lambda: satchel.compile(nn.Linear)),
        ("[compile] options must be a dict", lambda: satchel.compile(nn.Linear(2, 2), options="a")),
        ("[compile] budget must be bytes", lambda: satchel.compile(nn.Linear(2, 2), budget="4 bananas")),
        ("[compile] refresh must be left to packing()", lambda: satchel.compile(nn.Linear(2, 2), refresh=8)),
        ("[report] path must be a file's name", lambda: satchel.report(satchel.Meter(), None)),
        ("[report] title must be text", lambda: satchel.report(satchel.Meter(), "page.html", title=None)),
    ],
)
def test_more_bad_arguments(rule, call):
    raises(rule, call, (RuntimeError, ValueError))


def test_doctor_wants_a_model_that_is_not_attached():
    model = nn.Linear(64, 64)
    satchel.attach(model)
    raises("[doctor] model must be torch's own", lambda: satchel.doctor(model, X, loss=lambda x: model(x).sum()))
    satchel.detach(model)
    with torch.no_grad():
        assert satchel.doctor(model, X, loss=lambda x: model(x).sum(), draws=2).findings, "the caller's no_grad does not matter"


def test_a_page_that_cannot_be_written(tmp_path):
    with satchel.packing(min_bytes=0, meter=True) as p:
        nn.Linear(64, 64)(X)
    raises_at = {tmp_path: IsADirectoryError, tmp_path / "none" / "page.html": FileNotFoundError}
    for path, error in raises_at.items():
        with pytest.raises(error, match=r"\[report\] path must be a file that can be written: .*, got "):
            satchel.report(p, path)


def test_a_meter_is_copied():
    """Copies once freed torch's weak references again, and the process died."""
    with satchel.packing(min_bytes=0, meter=True) as p:
        nn.Linear(64, 64)(X)
    text = str(p.meter)
    for _ in range(8):
        assert str(copy.deepcopy(p.meter)) == str(pickle.loads(pickle.dumps(p.meter))) == text
    p.meter.clear()


@pytest.mark.parametrize("width", [3, 5, 4096])
def test_a_converted_batch_norm_of_other_channels(width):
    """torch's inner function does not check, and wrote beyond the running statistics."""
    norm = satchel.convert(nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match="should contain"):
        norm(torch.randn(3, width))


def test_a_scripted_part_is_packed_without_its_name():
    model = nn.Sequential(torch.jit.script(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 64))
    p = satchel.attach(model, min_bytes=0, meter=True)
    model(X).sum().backward()
    assert ("1", "slope, 4 bits") in [(line.module, line.kept) for line in p.meter.lines]
    satchel.detach(model)


@pytest.mark.parametrize("outer, inner", [("2/2/2", "32/32/32"), ("32/32/32", "2/2/2"), ("2/2/2", "8/8/8"), ("8/8/8", "2/2/2")])
def test_of_nested_contexts_the_innermost_packs(outer, inner):
    kept = {"2/2/2": "2 bits", "8/8/8": "8 bits", "32/32/32": "exact: this case"}
    first, second, third = (nn.Linear(64, 64) for _ in range(3))
    x = X.clone().requires_grad_()
    with satchel.packing(outer, min_bytes=0, meter=True) as p:
        y = first(x * 1)
        with satchel.packing(inner, min_bytes=0, meter=True) as q:
            y = second(y)
        y = third(y)
    y.sum().backward()

    def ways(meter):
        return [line.kept for line in meter.lines if line.node == "AddmmBackward0" and line.field == "mat1"]

    assert ways(p.meter) == [kept[outer]] * 2 and ways(q.meter) == [kept[inner]]
    assert (first.weight.grad is None) is (third.weight.grad is None) is False
    exact = torch.autograd.grad(third(second(first(x))).sum(), second.weight)[0]
    assert torch.equal(second.weight.grad, exact) == (inner == "32/32/32")


def test_a_part_that_is_called_by_itself_is_told():
    """As a LightningModule's training_step calls self.net: the module's own forward does not run, and nothing is packed."""
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(64, 64), nn.GELU())})
    p = satchel.attach(model, meter=True)
    with torch.no_grad():
        model["net"](X)
    with pytest.warns(RuntimeWarning, match=r"\[attach\] packs in forward of the attached model, got a call of its part 'net' outside it; attach that part"):
        model["net"](X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["net"](X)  # once is enough
    assert not p.meter.lines


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_call_parts_in_backward(reentrant):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU())

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    model = Blocks()
    satchel.attach(model, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()


def test_numpy_is_not_needed(tmp_path):
    """pip install satchel brings torch, and torch does not bring NumPy."""
    program = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch, satchel
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
x = torch.randn(128, 64)
with satchel.packing(meter=True) as p:
    model(x).sum().backward()
satchel.report(p, sys.argv[1])
satchel.doctor(model, x, loss=lambda x: model(x).square().mean())
satchel.convert(model)(x).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "page.html")], cwd=tmp_path, check=True)


def test_patterns_that_match_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    raises("[packing] include and exclude of module paths must come with model=", lambda: satchel.packing(exclude=["blocks.0.*"]))
    for call in (lambda: satchel.packing(model=model, exclude=["head"]), lambda: satchel.attach(model, include=["head"]), lambda: satchel.convert(model, exclude=["head"])):
        with pytest.warns(RuntimeWarning, match=r"\[(packing|attach|convert)\] .*exclude must match a module's path.*, got 'head'"):
            call()
    satchel.revert(satchel.detach(model))
    copied = copy.deepcopy(satchel.packing(model=model, exclude=["0"], seed=3))
    assert copied.exclude == ("0",) and copied.seed == 3


def test_doctor_knows_paths():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    found = satchel.doctor(model, X, loss=lambda x: model(x).sum(), draws=2, bits=2, min_bytes=0, exclude=["[012]"])
    assert all(f.error < 1e-6 for f in found.findings), str(found)
