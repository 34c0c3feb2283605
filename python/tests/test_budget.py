"""Bits by a budget: what is kept fits it, bits go where they save variance, and sensitivities are what many draws measure."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import satchel
from satchel._watch import SPREAD
from satchel.budget import MOST, allocate, parse_size


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 4, 16).transpose(1, 2) for y in self.qkv(self.norm(x)).split(64, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def transformer():
    after = [nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 16)]
    model = nn.Sequential(nn.Linear(32, 64), Attention(), *after)
    x, y = torch.randn(8, 32, 32), torch.randint(0, 16, (8 * 32,))
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), y)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=2), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10)
    )  # fmt: skip
    x, y = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
    return model, lambda: F.cross_entropy(model(x), y)


MODELS = {"transformer": transformer, "convolutions": convolutions}


def gradient(model, f, context=None):
    if context is None:
        loss = f()
    else:
        with context:
            loss = f()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def error(model, f, context, draws=8):
    """Mean squared error of the gradient, once the bits have been chosen."""
    exact = gradient(model, f)
    for _ in range(2):
        gradient(model, f, context)
    return float(sum((gradient(model, f, context) - exact).square().sum() for _ in range(draws)) / draws)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("given", ["2/4/8", "8/8/8"])
def test_what_is_kept_fits_in_every_step(make, given):
    model, f = make()
    with satchel.packing("8/8/8", min_bytes=1024, meter=True) as p:
        f()
    most, bytes_ = p.meter.after, []
    with pytest.raises(ValueError, match=r"\[packing\] budget must be at least [0-9.]+ KiB for this model, got 1 bytes"):
        with satchel.packing(min_bytes=1024, budget=1) as p:
            f()
    least = p.budget.needed(p.budget.last or p.budget._watched)
    for budget in (least, (least + most) // 2, most, 4 * most):
        p = satchel.packing(given, min_bytes=1024, budget=budget, model=model)
        for step in range(3):
            gradient(model, f, p)
            assert p.meter.after <= budget, (step, budget)
            assert p.meter.after == sum(line.after for line in p.meter.lines)
        bytes_.append(p.meter.after)
    assert bytes_[0] < bytes_[1] < bytes_[2] == bytes_[3]
    assert bytes_[1] > 0.95 * ((least + most) // 2), "room is used"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_less_error_than_the_same_bytes_shared_evenly(make):
    model, f = make()
    even = satchel.packing("2/4/8", min_bytes=1024, meter=True, model=model)
    off = error(model, f, even)
    shared = satchel.packing("2/4/8", min_bytes=1024, budget=even.meter.after, model=model)
    assert error(model, f, shared) < 0.5 * off
    assert shared.meter.after <= even.meter.after
    assert len(set(shared.bits_by_field().values())) > 2


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_sensitivities_are_what_draws_measure(make):
    """Of every field: the variance that it adds alone, predicted from one backward, beside 24 draws."""
    model, f = make()
    exact = gradient(model, f)
    p = satchel.packing("3/3/8", min_bytes=1024, budget=1 << 30, model=model)
    gradient(model, f, p)
    tally = p.budget._watched
    found = tally.watch.read()
    ratios = {}
    for item in tally.coded:
        module, node, field, _ = item.key
        bits = item.form() and item.form().bits or item.planned
        predicted = sum(found[key] for key in item.readers) * SPREAD[bits] / ((1 << bits) - 1) ** 2
        keys = {key[:3] for key in item.readers}

        class Alone(satchel.packing):
            def wants(self, *key):
                return key in keys

        contexts = [Alone("3/3/8", include=["x"], min_bytes=1024, seed=seed, model=model) for seed in range(24)]
        squares = [(gradient(model, f, context) - exact).square().sum() for context in contexts]
        ratios[f"{module}: {node}.{field}"] = predicted / float(sum(squares) / 24)
    local = [r for name, r in ratios.items() if "Addmm" in name or "Convolution" in name]
    assert len(local) >= 4 and all(0.5 < r < 2 for r in local), ratios
    activations = [r for name, r in ratios.items() if "Gelu" in name or "Silu" in name]
    assert activations and all(0.4 < r < 2.5 for r in activations), ratios
    assert all(1 / 8 < r < 8 for r in ratios.values()), ratios


def test_the_first_layer_of_a_frozen_part_counts_for_nothing():
    """Noise that reaches no parameter has no sensitivity."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    x = torch.randn(128, 64, requires_grad=True)  # a leaf: noise of the first GELU flows to it
    f = lambda: model(x).square().sum()
    p = satchel.packing(budget=1 << 30, model=model)
    with p:
        loss = f()
    loss.backward()
    found = p.budget._watched.watch.read()
    assert found["1", "GeluBackward0", "self", 1] > 0
    y = x.detach()
    with satchel.packing(budget=1 << 30, model=model) as p:
        loss = model(y).square().sum()
    loss.backward()
    assert ("1", "GeluBackward0", "self", 1) not in p.budget._watched.watch.read()


def test_attention_keeps_its_bits_and_what_is_exact_counts():
    model, f = transformer()
    with pytest.raises(ValueError) as failure, satchel.packing(budget=1, min_bytes=1024, model=model) as p:
        f()
    least = p.budget.needed(p.budget.last)
    assert str(least // 1024) in str(failure.value)
    p = satchel.packing(budget=least, min_bytes=1024, model=model)
    gradient(model, f, p)
    bits = p.bits_by_field()
    assert {b for name, b in bits.items() if name.endswith((".query", ".key"))} == {8}
    behind = "1.out: AddmmBackward0.mat1"  # reads attention's code
    assert {b for name, b in bits.items() if name.endswith(".output") or name == behind} == {2}
    assert {b for name, b in bits.items() if "Addmm" in name and name != behind} == {1}
    assert {b for name, b in bits.items() if "LayerNorm" in name or "Gelu" in name} == {2}
    exact = sum(line.after for line in p.meter.lines if line.kept.startswith("exact"))
    assert exact > 0 and least == p.meter.after
    with pytest.raises(ValueError, match="budget must be at least"), satchel.packing(budget=least - 1, min_bytes=1024, model=model):
        f()
    p = satchel.packing("32/4/8", budget=1 << 30, min_bytes=1024, model=model)
    gradient(model, f, p)
    assert not any("Addmm" in name for name in p.bits_by_field()), "exact by option stays exact"


def test_a_larger_batch_still_fits_and_a_too_large_one_warns():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    p = satchel.packing(budget=256 * 1024, model=model)
    for rows in (512, 512, 768):
        with p:
            loss = model(torch.randn(rows, 64)).square().sum()
        loss.backward()
        assert p.meter.after <= 256 * 1024
    assert p.budget.last.taken > 0, "bits of the plan were too many for this batch"
    with pytest.warns(RuntimeWarning, match=r"\[packing\] budget must be at least .* got 256 KiB"), p:
        loss = model(torch.randn(16384, 64)).square().sum()
    loss.backward()


def test_what_stays_exact_last_of_all_takes_bits_off_too():
    """A large exact field is the last one saved."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256)), torch.randn(512, 64)
    p = satchel.packing("8/8/8", budget=512 * 256 * 4 + 100_000)
    with p:
        loss = torch.sin(model(x)).sum()
    assert p.meter.lines[-1].node == "SinBackward0" and p.meter.lines[-1].after == 512 * 256 * 4
    assert p.meter.after <= 512 * 256 * 4 + 100_000 and p.budget.last.taken > 4
    loss.backward()


def test_gradients_are_right_in_the_mean_in_the_first_step_too():
    """Codes that were coded again on the way are unbiased."""
    model, f = convolutions()
    exact = gradient(model, f)
    with pytest.raises(ValueError), satchel.packing(budget=1, min_bytes=1024) as p:
        f()
    budget = int(1.3 * p.budget.needed(p.budget.last))
    draws = []
    for seed in range(100):
        p = satchel.packing("8/8/8", budget=budget, min_bytes=1024, seed=seed)
        draws.append(gradient(model, f, p))
        assert p.budget.last.taken >= 3
    one = torch.stack([(g - exact).square().sum() for g in draws]).mean().sqrt()
    assert 0.75 < float((sum(draws) / 100 - exact).norm() * 10 / one) < 1.3


def test_refresh_and_no_wait_inside_a_step(monkeypatch):
    model, f = convolutions()
    reads = []
    read = satchel._watch.Watch.read
    monkeypatch.setattr(satchel._watch.Watch, "read", lambda self: reads.append(p.step) or read(self))
    p = satchel.packing(budget="1 GiB", refresh=3, min_bytes=1024)
    for step in range(11):
        gradient(model, f, p)
    assert reads == [None] * 4, "read between steps: after the first, then after every third"
    with p, torch.no_grad():  # an evaluation is no step to learn from
        f()
    with p:
        f()  # no backward
    plan = dict(p.budget.plan)
    gradient(model, f, p)
    assert p.budget.plan == plan


def test_a_step_reads_no_number_from_the_device():
    """What a GPU would be waited for: aten's _local_scalar_dense and functions whose size the data decide."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        found: list = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
                self.found.append(func)
            return func(*args, **(kwargs or {}))

    for make in MODELS.values():
        model, f = make()
        p = satchel.packing(budget="1 GiB", refresh=1, min_bytes=1024, model=model)
        for _ in range(2):  # tables of slopes are made at their first use
            gradient(model, f, p)
        with p, Reads() as reads:
            torch.autograd.grad(f(), list(model.parameters()))
        assert p.budget._watched.watch.seen and not reads.found, reads.found
        with Reads() as reads:
            torch.ones(1).item()
        assert len(reads.found) == 1, "the detector itself"
        reads.found.clear()


def test_gradients_that_are_not_finite_teach_nothing():
    model, f = convolutions()
    p = satchel.packing(budget="1 GiB", min_bytes=1024)
    with p:
        loss = f() * float("inf")
    torch.autograd.grad(loss, list(model.parameters()))
    gradient(model, f, p)
    assert not p.budget.plan
    gradient(model, f, p)
    assert p.budget.plan


def test_readers_of_one_code_have_one_number_of_bits():
    first, layers = nn.Linear(128, 128, bias=False), nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(3)])
    model = nn.ModuleList([first, layers])
    x = torch.randn(64, 128)
    f = lambda: sum(layer(h).square().sum() * 10**i for h in [first(x)] for i, layer in enumerate(layers))
    p = satchel.packing(budget=20_000, model=model)
    for _ in range(3):
        gradient(model, f, p)
    bits = p.bits_by_field()
    assert len({bits[f"1.{i}: MmBackward0.self"] for i in range(3)}) == 1
    assert sum(line.after > 0 for line in p.meter.lines if line.node == "MmBackward0") == 2


def test_attach_copies_and_options():
    model, f = transformer()
    p = satchel.attach(model, budget="1MiB", refresh=7, min_bytes=1024)
    other = copy.deepcopy(model)
    owner = next(iter(other._forward_pre_hooks.values())).owner
    assert owner is not p and owner.budget.limit == 1 << 20 and owner.budget.refresh == 7
    for _ in range(2):
        f().backward()
    assert p.bits_by_field() and p.meter.after <= 1 << 20
    assert "1: ScaledDotProductFlashAttentionForCpuBackward0.query" in p.bits_by_field()
    satchel.detach(model)
    p = satchel.attach(model, budget=100)
    with pytest.raises(ValueError, match="budget must be at least"):
        f()
    assert p.step is None
    satchel.detach(model)
    satchel.attach(model, "gact")
    assert next(iter(copy.deepcopy(model)._forward_pre_hooks.values())).owner.budget.mean == 4


def test_gact_has_four_bits_in_the_mean_and_less_error():
    model, f = convolutions()
    even = satchel.packing("4/4/8", min_bytes=1024, model=model, meter=True)
    gact = satchel.packing(preset="gact", min_bytes=1024, model=model)
    off, less = error(model, f, even), error(model, f, gact)
    bits, items = gact.bits_by_field(), gact.budget.last.coded
    assert len(bits) == len(items)
    mean = sum(b * item.values for b, item in zip(bits.values(), items)) / sum(item.values for item in items)
    assert 3.8 < mean <= 4 and len(set(bits.values())) > 2
    assert less < 0.7 * off, (less, off)


def test_presets_and_their_errors():
    assert satchel.packing("int8").bits == satchel.packing("8/8/8").bits == satchel.packing(preset="int8").bits
    assert satchel.packing(preset="satchel").bits == satchel.packing().bits and satchel.packing().budget is None
    assert satchel.packing("gact", budget="1GiB").budget.limit == 1 << 30
    model, f = convolutions()
    assert torch.equal(gradient(model, f, satchel.packing("lossless")), gradient(model, f))
    with pytest.raises(ValueError, match=r"preset must be one of satchel, gact, int8, lossless, got 'gatc'; did you mean 'gact'\?"):
        satchel.packing(preset="gatc")
    with pytest.raises(ValueError, match=r"\[packing\] bits and preset must not both be given"):
        satchel.packing("4/4/8", preset="gact")
    with pytest.raises(ValueError, match=r"did you mean 'lossless'\?"):
        satchel.packing("losless")
    with pytest.raises(ValueError, match=r"\[packing\] refresh must be a number of steps, 1 or more, got 0"):
        satchel.packing(budget=1, refresh=0)


def test_sizes():
    sizes = {"4GiB": 4 << 30, "512 MiB": 512 << 20, " 1.5 gib ": 3 << 29, "100": 100, 7: 7, "2kB": 2000, "1e6": 10**6, "8 b": 8}
    assert {text: parse_size(text) for text in sizes} == sizes
    for wrong in ("", "GiB", "-1", 0, -5, "4 GiX", 1.5, True, "0", None, "1e"):
        with pytest.raises(ValueError, match=r"\[packing\] budget must be bytes, as a number or a text like"):
            parse_size(wrong)


def test_allocation_is_near_the_best_there_is():
    """Against all allocations: items of one size exactly, of different sizes within 10 %."""
    generator = torch.Generator().manual_seed(5)
    for trial in range(20):
        equal = trial % 2 == 0
        c = (10 ** (4 * torch.rand(4, generator=generator))).tolist()
        weight = [8 if equal else int(w) for w in torch.randint(1, 20, (4,), generator=generator)]
        sizes = [[w * b for b in range(MOST + 1)] for w in weight]
        least = [1, 2, 1, 4]
        room = int(sum(weight) * 4.5)
        cost = lambda bits: sum(ci * SPREAD[b] / ((1 << b) - 1) ** 2 for ci, b in zip(c, bits))
        spent = lambda bits: sum(size[b] for size, b in zip(sizes, bits))
        best = min((cost(b) for b in itertools.product(*[range(low, MOST + 1) for low in least]) if spent(b) <= room))
        bits = allocate(c, sizes, least, room)
        assert spent(bits) <= room and all(b >= low for b, low in zip(bits, least))
        assert cost(bits) <= best * (1.0001 if equal else 1.6), (trial, bits)
    small, large = ([size * b for b in range(MOST + 1)] for size in (128, 8192))
    assert allocate([7.0, 0.6], [small, large], [1, 1], 2 * (128 + 8192)) == [2, 2], "the small one's later bits make way for the large one's second"
    assert allocate([1.0, 0.0], [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 2, [1, 1], 16) == [8, 8], "what counts for nothing shares what is left"


def test_a_watched_step_lets_the_originals_go():
    from torch.multiprocessing.reductions import StorageWeakRef

    x, model = torch.randn(256, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with satchel.packing(budget="1 MiB", model=model) as p:
        h = F.gelu(model(x))
        for function in (torch.exp, lambda t: t * t.sum(), lambda t: F.layer_norm(t, (64,)), lambda t: F.softmax(t, -1), lambda t: model[0](t)):
            h = function(h)
            gone = StorageWeakRef(h.untyped_storage())
            h = model[1](h)
            assert gone.expired(), function
        loss = h.sum()
    assert p.step is None and p.budget._watched is not None
    loss.backward()


def test_nothing_is_left_over_many_steps():
    import gc

    model, f = convolutions()
    p = satchel.packing(budget="1GiB", refresh=2, min_bytes=1024)

    def alive():
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, satchel.kept.Code))

    for step in range(41):  # every other step is watched, these two are alike
        gradient(model, f, p)
        if step == 20:
            before = alive()
    assert alive() <= before


def test_warnings_are_not_made_elsewhere():
    model, f = transformer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = satchel.packing(budget="1GiB", min_bytes=1024)
        for _ in range(3):
            gradient(model, f, p)
