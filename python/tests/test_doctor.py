"""doctor(): errors of known size are found where they are, and the model is left as it was."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import satchel


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))


def diagnose(model, rows=64, **options):
    x, y = torch.randn(rows, 64), torch.randint(0, 10, (rows,))
    return satchel.doctor(model, x, y, loss=lambda x, y: F.cross_entropy(model(x), y), min_bytes=1024, **options)


def test_the_layer_that_is_packed_is_found():
    found = {f.parameter: f for f in diagnose(net(), draws=32, include=["AddmmBackward0.mat1"]).findings}
    assert len(found) == 8
    # The inputs of linear layers are coded; their weights' gradients alone read them.
    for name, f in found.items():
        assert (f.error > 0) == (name in ("0.weight", "4.weight", "6.weight")), f
        assert 0 < f.batch and f.norm > 0
        if f.error:
            assert 0.7 < f.bias < 1.3 and 0.5 < f.cosine < 1
            assert math.isclose(f.cosine, 1 / math.sqrt(1 + f.error**2), rel_tol=0.05)  # errors are at right angles to the gradient


def test_more_bits_less_error():
    model = net()
    torch.manual_seed(1)
    coarse = diagnose(model, bits="2/2/8", draws=4)
    torch.manual_seed(1)
    fine = diagnose(model, bits="8/8/8", draws=4)
    assert sum(f.error for f in fine.findings) < 0.1 * sum(f.error for f in coarse.findings)
    torch.manual_seed(1)
    assert all(f.error == 0 and math.isclose(f.cosine, 1, rel_tol=1e-5) for f in diagnose(model, bits=32, draws=2).findings)


def test_the_model_and_torchs_generator_stay_as_they_are():
    model = net()
    F.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    generator = None

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    generator = torch.get_rng_state()
    satchel.doctor(model, x, y, loss=loss, draws=2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))


def test_text_json_and_a_batch_without_halves():
    found = diagnose(net(), rows=3, draws=2, bits="4/4/8")
    assert all(math.isnan(f.batch) for f in found.findings)
    assert "error/batch" in str(found) and "4.weight" in str(found)
    rows = json.loads(found.to_json())["findings"]
    assert len(rows) == 8 and rows[0]["batch"] is None


@pytest.mark.parametrize("rule, call", [
    ("model must be", lambda m: satchel.doctor(lambda x: x, torch.ones(2))),
    ("draws must be 2 or more", lambda m: satchel.doctor(m, torch.ones(4, 64), draws=1)),
    ("draws must be 2 or more", lambda m: satchel.doctor(m, torch.ones(4, 64), draws=1 << 80)),
    ("loss must be one number", lambda m: satchel.doctor(m, torch.ones(4, 64))),
    ("seed is doctor's own", lambda m: satchel.doctor(m, torch.ones(4, 64), seed=3)),
    ("must have parameters", lambda m: satchel.doctor(nn.ReLU(), torch.ones(4, 64))),
    ("options must be packing", lambda m: satchel.doctor(m, torch.ones(4, 64), bit=3)),
    ("loss must have finite gradients, got others for '0.weight'", lambda m: satchel.doctor(m, torch.ones(4, 64), loss=lambda x: m(x).sum() * float("nan"))),
    ("loss must depend on the model's parameters", lambda m: satchel.doctor(m, torch.ones(4, 64), loss=lambda x: m(x).sum() * 0)),
    ("loss must depend on the model's parameters", lambda m: satchel.doctor(m, torch.ones(4, 64), loss=lambda x, other=net(): other(x).sum())),
])
def test_bad_input(rule, call):
    with pytest.raises(ValueError, match=rf"\[doctor\].*{rule}"):
        call(net())


def test_what_a_forward_makes_of_the_model_is_undone():
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.cat([self.seen, self.seen])
            self.register_buffer("last", x)
            self.eval()
            return self.linear(x).square().mean()

    model = Careless()
    seen = model.seen
    satchel.doctor(model, torch.randn(64, 64), draws=2)
    assert model.seen is seen and list(dict(model.named_buffers())) == ["seen"] and model.training


def test_a_budgets_bits_are_those_of_training():
    """A first step has even bits; the draws come after it."""
    model = net()
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    even = satchel.doctor(model, x, y, loss=loss, bits="3/4/8", min_bytes=1024, draws=8)
    with satchel.packing("3/4/8", min_bytes=1024, meter=True) as packing:
        loss(x, y)
    chosen = satchel.doctor(model, x, y, loss=loss, budget=packing.meter.after, min_bytes=1024, draws=8)
    squares = [sum((f.error * f.norm) ** 2 for f in found.findings) for found in (even, chosen)]
    assert squares[1] < 0.8 * squares[0], squares


def test_modes_and_types_that_are_not_the_usual():
    model, x = net(), torch.randn(64, 64)
    with torch.inference_mode():
        assert len(satchel.doctor(model, torch.randn(8, 64), loss=lambda _: model(x).square().mean(), draws=2).findings) == 8
    complex_ = nn.Linear(64, 8, dtype=torch.complex64)
    z = torch.randn(8, 64, dtype=torch.complex64)
    found = satchel.doctor(complex_, z, loss=lambda z: complex_(z).abs().sum(), draws=2)
    exact = torch.autograd.grad(complex_(z).abs().sum(), complex_.weight)[0]
    assert math.isclose({f.parameter: f for f in found.findings}["weight"].norm, float(exact.norm()), rel_tol=1e-5), "both parts count"
    sparse = nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Flatten(), nn.Linear(64, 8))
    found = satchel.doctor(sparse, torch.randint(0, 20, (64, 4)), loss=lambda i: sparse(i).square().mean(), draws=2)
    assert {f.parameter for f in found.findings} == {"0.weight", "2.weight", "2.bias"}


def test_a_loss_of_the_whole_batch_alone():
    """As of all nodes of a graph, whose matrix the loss knows: there are no halves to compare with."""
    model, x = nn.Linear(64, 8), torch.randn(128, 64)
    a = (torch.rand(128, 128) < 0.1).float().to_sparse()
    found = satchel.doctor(model, x, loss=lambda x: torch.sparse.mm(a, model(x)).square().mean(), draws=4).findings
    assert all(math.isnan(f.batch) and 0 < f.norm for f in found)
