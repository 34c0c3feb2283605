"""Converted models stay torch models: copies, files, hooks, autocast, checkpointing, threads, and torch's errors."""

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import satchel
from satchel import layers as module

EXACT = "satchel,bits=32"


def small(p=0.0):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(p), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4),
    )  # fmt: skip


def batch():
    return torch.randn(8, 3, 12, 12)


def flat(model, x):
    loss = model(x).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])])


def kinds(out):
    return [(line.layer, line.kind) for line in satchel.saved(out).lines]


def test_one_code_for_norm_relu_dropout_and_next_layer():
    model = satchel.convert(small(0.5))
    lines = kinds(model(batch()).sum())
    assert ("1", "shared") in lines and ("4", "input") not in lines and ("4", "shared") not in lines
    assert lines.count(("1", "statistics")) == 1 and ("1", "seed") in lines
    assert ("5", "shared") in lines and ("8", "input") in lines  # a pool and a view stand between: a code of its own
    assert ("9", "norm") in lines and ("10", "derivative") in lines and ("11", "input") in lines


def test_a_norm_is_read_by_the_next_layer():
    model = satchel.convert(nn.Sequential(nn.Linear(64, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4)))
    lines = kinds(model(torch.randn(16, 64)).sum())
    assert ("1", "norm") in lines and ("2", "input") not in lines and ("1", "affine") in lines


def test_revert_and_names():
    model = small()
    names, keys = [type(m) for m in model.modules()], list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    assert satchel.convert(model) is model and isinstance(model[0], module.Conv2d) and isinstance(model[0], nn.Conv2d)
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters
    assert "method='satchel'" in repr(model)
    assert satchel.convert(model, EXACT)[0].satchel_method == EXACT
    assert satchel.revert(model) is model and [type(m) for m in model.modules()] == names and "satchel" not in repr(model)
    assert [type(m) for m in satchel.convert(satchel.convert(model), "fp32").modules()] == names


def test_copies_and_files():
    model = satchel.convert(small(), EXACT)
    x = batch()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other[1], module.BatchNorm2d) and torch.equal(flat(other, x), flat(copy.deepcopy(model), x))
    plain = small()
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(flat(plain, x), flat(copy.deepcopy(model), x), rtol=1e-4, atol=1e-6)
    hidden = model[:3](x)  # carries its save; a stored copy does not
    file = io.BytesIO()
    torch.save(hidden.detach(), file)
    assert not hasattr(hidden.detach(), "_satchel") and hasattr(hidden, "_satchel")


def test_exclude_and_subclasses():
    class Mine(nn.ReLU):
        pass

    model = satchel.convert(nn.Sequential(nn.Linear(4, 4), Mine(), nn.Linear(4, 4)), exclude=["2"])
    assert [type(m) for m in model] == [module.Linear, Mine, nn.Linear]


@pytest.mark.parametrize("call, text", [
    (lambda: satchel.convert(3), r"\[convert\] model must be a torch.nn.Module, got int"),
    (lambda: satchel.convert(small(), 2), r"\[convert\] method must be text, got 2"),
    (lambda: satchel.convert(small(), "actnn"), r"\[convert\] method must give all samples the same bits .*, got actnn"),
    (lambda: satchel.convert(small(), "exact"), r"\[convert\] method must have no projection and no low-pass, got exact"),
    (lambda: satchel.convert(small(), "satchel,bits=9"), r"bits must be 1 to 8 or 32, got 'satchel,bits=9'"),
    (lambda: satchel.convert(small(), exclude="1"), r"\[convert\] exclude must be a list of patterns, got '1'"),
    (lambda: satchel.revert(3), r"\[revert\] model must be a torch.nn.Module, got int"),
    (lambda: satchel.saved(3), r"\[saved\] output must be a tensor, got int"),
])  # fmt: skip
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_model_without_layers_is_told():
    with pytest.warns(RuntimeWarning, match=r"\[convert\] model must have layers of torch.nn that Satchel knows, got none"):
        satchel.convert(nn.Sequential(nn.Tanh()))


def test_saved_counts_a_result_that_waits():
    model = satchel.convert(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last))
    assert ("1", "norm") in kinds(model(torch.randn(16, 3, 16, 16).contiguous(memory_format=torch.channels_last)))


@pytest.mark.parametrize("method", ["int8", "actnn,adaptive=no", "satchel,bits=3", "gact", "satchel,side=none"])
def test_other_methods(method):
    torch.manual_seed(1)
    model, x = small(), batch()
    expected = flat(model, x)
    made = flat(satchel.convert(model, method), x)
    least = {"int8": 0.999, "gact": 0.9, "satchel,bits=3": 0.8}.get(method, 0.5)
    assert F.cosine_similarity(made, expected, 0) > least
    if method in ("int8", "actnn,adaptive=no"):  # each function keeps its own
        assert ("4", "input") in kinds(model(x).sum())


def test_nothing_is_kept_without_gradients():
    model = satchel.convert(small())
    with torch.no_grad():
        out = model(batch())
    assert out.grad_fn is None and not hasattr(model[:3](batch().requires_grad_(False)).detach(), "_satchel")
    model.requires_grad_(False)
    assert model(batch()).grad_fn is None
    with torch.inference_mode():
        model(batch())


def test_eval_mode_with_a_frozen_norm_keeps_no_code_of_it():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    satchel.convert(model, EXACT)
    assert torch.allclose(flat(model, batch() * 0 + 1), flat(plain, batch() * 0 + 1), rtol=1e-4, atol=1e-6)
    lines = kinds(satchel.convert(model)(batch()).sum())
    assert [k for layer, k in lines if layer == "1"] == [] and ("2", "input") in lines


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("frozen", ["0", "1.weight", "1", "4", "8.weight", "9"])
def test_frozen_parameters(frozen, train):
    model, x = small().train(train), batch()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    expected = flat(model, x)
    assert torch.allclose(flat(satchel.convert(model, EXACT), x), expected, rtol=1e-3, atol=1e-6)
    if frozen == "4":
        assert ("0", "input") in kinds(satchel.convert(model)(x).sum())


@pytest.mark.parametrize("method", [EXACT, "satchel"])
def test_autocast(method):
    model, x = small(), batch()

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
            loss = out.square().mean()  # outside of autocast's list: bf16 in, float32 sum
        return out, torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])

    out, expected = run(model)
    satchel.convert(model, method)
    ours, made = run(model)
    assert ours.dtype is out.dtype and made.dtype is torch.float32 and torch.equal(ours, out)
    # bf16 has 8 bits; at 2 bits the noise of so small a net is large
    assert F.cosine_similarity(made, expected, 0) > (0.999 if method == EXACT else 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(model(x).float().sum(), list(model.parameters()))  # backward inside autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype):
    model, x = small().to(dtype), batch().to(dtype)
    expected = flat(model, x).float()
    made = flat(satchel.convert(model, EXACT), x)
    assert made.dtype is dtype and F.cosine_similarity(made.float(), expected, 0) > 0.99  # 8 bits, rounded in other places


@pytest.mark.parametrize("how", ["bf16", "f16", "autocast"])
def test_other_layers_of_16_bits(how):
    layers = [nn.ConvTranspose2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ELU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 1), nn.RMSNorm(8),
              nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 16), nn.RMSNorm(16), nn.ELU(), nn.Unflatten(1, (4, 4)), nn.MaxPool1d(2),
              nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(1)]  # fmt: skip
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "autocast": torch.float32}[how]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(16, 4, 8, 8).to(dtype)

    def run(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = m(x)
        loss = (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
        grads = torch.autograd.grad(loss, list(m.parameters()))
        assert all(g.dtype is dtype for g in grads)
        return out, torch.cat([g.float().flatten() for g in grads])

    out, expected = run(model)
    ours, made = run(satchel.convert(model, EXACT))
    assert ours.dtype is out.dtype and torch.equal(ours, out)
    assert F.cosine_similarity(made, expected, 0) > 0.999
    satchel.convert(model)
    assert F.cosine_similarity(sum(run(model)[1] for _ in range(24)), expected, 0) > 0.97  # 2 bits, of so few values


def test_second_backward():
    model, x = satchel.convert(small()), batch()
    for layers in (slice(None), slice(0, 2), slice(0, 3)):
        loss = model[layers](x).square().mean()
        parameters = list(model[layers].parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        with pytest.raises(RuntimeError, match="a second (time|backward)"):
            torch.autograd.grad(loss, parameters)


def test_gradients_of_gradients_raise():
    model = satchel.convert(small())
    with pytest.raises(RuntimeError, match=r"\[convert\] a gradient of a gradient needs exact saves, got create_graph=True"):
        torch.autograd.grad(model(batch()).square().mean(), list(model.parameters()), create_graph=True)


# ---- changes in place ----------------------------------------------------------------------------------------------------------------


def test_inplace_layers_change_their_input():
    model = satchel.convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)))
    y = model[1](model[0](torch.randn(16, 8)))
    z = model[2](y)
    assert z is y and float(y.detach().min()) == 0
    with pytest.raises(RuntimeError, match="leaf"):
        model[2](torch.randn(4, 8, requires_grad=True))


def test_a_changed_output_is_packed_anew():
    """As in torchvision: a block's sum is written over the norm's output, or over a ReLU's that a layer has read."""

    def run(model, x, out):
        h = model[2](model[1](model[0](x)))
        a = model[4](h)
        if out:
            h = h + 1
        else:
            h += 1
        return (model[4](h) * a).sum()

    plain, x = small(), batch()
    ours = satchel.convert(copy.deepcopy(plain), EXACT.replace("32", "3"))
    parameters = [plain[0].weight, plain[4].weight]
    expected = torch.autograd.grad(run(plain, x, True), parameters)
    made = torch.autograd.grad(run(ours, x, False), [ours[0].weight, ours[4].weight])
    for a, b in zip(made, expected):
        assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.9


def test_a_norms_input_must_stay():
    model = satchel.convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    h = model[0](torch.randn(16, 8))
    y = model[1](h)
    h.add_(1)
    with pytest.raises(RuntimeError, match=r"\[convert\] x must not be changed in place while a norm reads it, got a change"):
        y.square().sum().backward()


def test_weights_must_stay():
    for i in (0, 4, 8, 9):
        model = satchel.convert(small())
        loss = model(batch()).square().mean()
        with torch.no_grad():
            model[i].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- other readers -------------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A norm's output that a ReLU and another function read."""

    def __init__(self, held):
        super().__init__()
        self.first, self.norm, self.relu, self.last, self.held = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), held

    def forward(self, x):
        y = self.norm(self.first(x))
        if self.held == "hook":
            y.register_hook(lambda g: g * 2)
        if self.held == "retain":
            y.retain_grad()
        a = self.relu(y)
        b = self.last(y) if self.held == "layer" else y.sum(1, keepdim=True)
        if self.held in ("late", "hook", "retain", "layer"):
            self.y = y
        del y
        return self.last(a) + b


@pytest.mark.parametrize("held", ["no", "late", "hook", "retain", "layer"])
def test_a_norms_output_with_two_readers(held):
    model, x = Twice(held), torch.randn(64, 12)
    expected = flat(model, x)
    seen = model.y.grad.clone() if held == "retain" else None
    satchel.convert(model, EXACT)
    assert torch.allclose(flat(model, x), expected, rtol=1e-4, atol=1e-6)
    if held == "retain":
        assert torch.allclose(model.y.grad, seen, rtol=1e-4, atol=1e-6)
    if held == "late":
        loss = model(x).square().mean()
        assert torch.autograd.grad(loss, model.y)[0].abs().sum() > 0


@pytest.mark.parametrize("place", ["eval", "data"])
def test_two_readers_of_a_norm_whose_input_needs_no_statistics(place):
    """γ's gradient reads values that the ReLU stops: a code that gives back their mean alone leaves half of it out."""
    norm, relu, x = nn.BatchNorm1d(64), nn.ReLU(), torch.randn(512, 64)
    norm.bias.data.normal_()
    norm.train(place == "data")
    x.requires_grad_(place == "eval")
    weights = torch.randn(512, 64) + 1

    def gradient():
        y = norm(x)
        loss = (torch.tanh(y) * weights).sum() + relu(y).sum()
        del y
        return torch.autograd.grad(loss, norm.weight)[0]

    expected = gradient()
    satchel.convert(nn.Sequential(norm, relu))
    draws = torch.stack([gradient() for _ in range(100)])
    error = (draws.mean(0) - expected).norm()
    noise = draws.var(0).div(len(draws)).sum().sqrt()
    assert noise < 0.02 * expected.norm()
    assert error < 2 * noise  # χ² of 64 values would have to pass 256, 17 standard deviations above its mean


def test_the_inputs_of_norms_are_let_go():
    model = satchel.convert(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)))
    h = model[0](torch.randn(256, 8))
    storages = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
    y = model[1](h)
    node = y.grad_fn
    assert node.deferred.x is not None
    z = model[2](y)
    del h, y
    assert node.deferred.x is None and storages.expired()
    assert torch.isfinite(model[3](z)).all()


# ---- beside torch's own tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_redraws_dropout(reentrant):
    torch.manual_seed(2)
    model = satchel.convert(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8)), EXACT)
    x = torch.randn(64, 32, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.autograd.grad(model(x).square().mean(), x)[0]
    torch.manual_seed(3)
    x.grad = None
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    assert torch.allclose(x.grad, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_have_seeds_of_their_own(reentrant, monkeypatch):
    seeds = []

    def seed(device):
        seeds.append(int(satchel.shared.fresh_seed(device)))
        return torch.tensor([seeds[-1]])

    monkeypatch.setattr(satchel.layer_functions, "fresh_seed", seed)
    parts = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 32)) for _ in range(4)]
    model = satchel.convert(nn.Sequential(nn.Linear(32, 32), *parts))
    for _ in range(2):
        y = model[0](torch.randn(16, 32))
        for part in model[1:]:
            y = checkpoint(part, y, use_reentrant=reentrant)
        y.sum().backward()
    assert len(seeds) >= 2 * (1 + 2 * len(parts) - 1)
    assert len(set(seeds)) == len(seeds)


def test_checkpointing_frees_norms():
    """What a norm keeps goes the way of all saved tensors: of a checkpointed part nothing stays but its input and output."""
    layers = (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    model, x = satchel.convert(nn.Sequential(*layers)), torch.randn(256, 64, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    nodes, norms = [y.grad_fn], []
    while nodes:
        node = nodes.pop()
        nodes += [below for below, _ in node.next_functions if below is not None]
        norms += [node.deferred] if hasattr(node, "deferred") else []
    assert len(norms) == 2
    for norm in norms:
        assert norm.x is None and norm.save is None and norm.claimed is None
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_checkpointed_norms_have_torchs_gradients():
    model, x = small(), batch()
    expected = flat(model, x)
    satchel.convert(model, EXACT)
    loss = checkpoint(model, x, use_reentrant=False).square().mean()
    made = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(made, expected, rtol=1e-4, atol=1e-6)


def test_saves_on_the_cpu_hook():
    model, x = small(), batch()
    torchs = flat(model, x)
    satchel.convert(model, EXACT)

    def made(hooks):
        with hooks:
            loss = model(x).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    moved = made(torch.autograd.graph.save_on_cpu())
    assert torch.equal(moved, made(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)))
    assert torch.allclose(moved, torchs, rtol=1e-4, atol=1e-6)


def test_packing_packs_the_rest():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    model = satchel.convert(Functional())
    packing = satchel.packing(meter=True)
    with packing:
        loss = model(torch.randn(256, 64)).square().mean()
    assert any(line.node == "TanhBackward0" and line.kept == "slope, 4 bits" for line in packing.meter.lines)
    assert kinds(loss) == [("a", "input"), ("b", "input")]
    loss.backward()
    assert model.a.weight.grad.isfinite().all()


def test_a_first_linear_layers_weight_may_change():
    """As in torch: where its input needs no gradient nobody reads it. Two networks in turn, one of which steps between forward and backward."""
    layer, x = nn.Linear(6, 4), torch.randn(5, 6)

    def gradient():
        loss = layer(x).sum()
        with torch.no_grad():
            layer.weight.add_(0.1)
        return torch.autograd.grad(loss, layer.weight)[0]

    expected = gradient()
    satchel.convert(layer, EXACT)
    assert torch.allclose(gradient(), expected, atol=1e-5)


@pytest.mark.parametrize("layer, shape", [(nn.Linear(6, 4), (5, 6)), (nn.Conv2d(6, 4, 1), (2, 6, 5, 5))])
def test_types_that_torch_refuses(layer, shape):
    layer = satchel.convert(layer.to(torch.bfloat16))
    with pytest.raises(RuntimeError):
        layer(torch.randn(shape))


def test_forward_mode_is_torchs():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.0)), torch.randn(5, 8)

    def tangent():
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    expected = tangent()
    satchel.convert(model)
    assert torch.equal(tangent(), expected)


def test_torch_compile_sees_torchs_layers():
    model = small().eval()
    x = batch()
    expected = model(x)
    satchel.convert(model)
    assert torch.allclose(torch.compile(model, backend="eager")(x), expected, atol=1e-5)


def test_seeds():
    model, x = satchel.convert(small(0.5)), batch()

    def run():
        torch.manual_seed(7)
        return flat(copy.deepcopy(model), x)

    assert torch.equal(run(), run())
    assert not torch.equal(flat(copy.deepcopy(model), x), flat(copy.deepcopy(model), x))


def test_threads():
    model, x = satchel.convert(small().eval(), EXACT), batch()
    expected, made = flat(model, x), {}

    def run(i):
        made[i] = [flat(model, x) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and all(torch.allclose(g, expected, rtol=1e-4, atol=1e-6) for gs in made.values() for g in gs)


def test_training_goes_as_well():
    """A tiny net learns the sign of a sum, with codes as without."""

    def train(method):
        torch.manual_seed(0)
        hidden = [layer for width in (16, 64) for layer in (nn.Linear(width, 64), nn.BatchNorm1d(64), nn.ReLU())]
        model = satchel.convert(nn.Sequential(*hidden, nn.Linear(64, 2)), method)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(60):
            x = torch.randn(256, 16)
            loss = F.cross_entropy(model(x), (x[:, :4].sum(1) > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    assert train("satchel") < 0.3 and train("fp32") < 0.3
