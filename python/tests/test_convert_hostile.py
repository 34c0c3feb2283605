"""Converted models in places where a tensor subclass, a changed class or a code may go wrong: results, gradients and buffers are torch's."""

import copy
import gc
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import satchel
from satchel.layers import Layer
from satchel.layer_waiting import Waiting

EXACT, CODED = "satchel,bits=32", "satchel"  # batch norms of the second wait for their ReLUs
LAST = torch.channels_last
DRAWS = 24


def image(count=8, channels=8, seed=1):
    return torch.randn(count, channels, 10, 10, generator=torch.Generator().manual_seed(seed)).contiguous(memory_format=LAST)


def net(inplace=False):
    layers = [nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers).to(memory_format=LAST)


def call(model, x):
    return model(x)


def gradients(model, x, run=call):
    """Results, and x's and all parameters' gradients in a line."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    out = run(model, x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    made = [x.grad, *(p.grad for p in model.parameters())]
    return out.detach(), torch.cat([g.double().flatten() for g in made if g is not None])


def assert_mean(draw, expected):
    """√N times the error of the mean of N draws over that of one: 1 ± a few per cent where the mean is right (test_convert.py)."""
    draws = [draw() for _ in range(DRAWS)]
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    assert one > 1e-3 * expected.norm(), "nothing was rounded"
    assert float((sum(draws) / DRAWS - expected).norm() * DRAWS**0.5 / one) < 1.3


def assert_same(model, x, method, run=call, other=None):
    """The converted model is the model. other: the converted one, where it is not a plain copy."""
    ours = satchel.convert(copy.deepcopy(model), method) if other is None else other
    out, expected = gradients(model, x, run)
    again, made = gradients(ours, x, run)
    torch.testing.assert_close(again, out, rtol=1e-4, atol=1e-4)
    for (name, a), (_, b) in zip(ours.named_buffers(), model.named_buffers()):
        torch.testing.assert_close(a + 0, b, rtol=1e-4, atol=1e-5, msg=name)
    assert made.shape == expected.shape
    if method == EXACT:
        assert float((made - expected).norm()) < 2e-5 * float(expected.norm())  # as in test_convert.py
    else:
        state = copy.deepcopy(ours.state_dict())

        def draw():
            ours.load_state_dict(state)
            return gradients(ours, x, run)[1]

        assert_mean(draw, expected)


class Residual(nn.Module):
    """A norm, a sum, a ReLU, and what `after` does between and behind them."""

    def __init__(self, after=None):
        super().__init__()
        self.c, self.b, self.r, self.after = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), after
        self.to(memory_format=LAST)

    def forward(self, x):
        return self.after(self, self.b(self.c(x)), x)


class Identity(torch.autograd.Function):
    """Gives back what it got, unread."""

    @staticmethod
    def forward(ctx, y):
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Ramp(torch.autograd.Function):
    """Reads sizes alone."""

    @staticmethod
    def forward(ctx, y):
        return torch.ones(y.shape)

    @staticmethod
    def backward(ctx, g):
        return torch.linspace(-1, 2, g.numel()).view(g.shape)


class Doubled(nn.Module):
    def forward(self, w):
        return w * 2


def with_hooks(set_hooks):
    """The call with hooks that are taken off afterwards."""

    def run(model, x):
        handles = set_hooks(model)
        try:
            return model(x)
        finally:
            for handle in handles:
                handle.remove()

    return run


def hooked_late(model, x):
    """A hook on a norm's output after its ReLU; nobody holds that output any more."""
    y = model[1](model[0](x))
    z = model[2](y)
    y.register_hook(lambda g: g * 2 + 0.1)
    del y
    return model[4](model[3](z))


def frozen(how):
    model = net()
    model[1].running_mean.normal_()
    if "eval" in how:
        model[1].eval()
    if "fixed" in how:
        model[1].requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    model[3].weight = model[0].weight
    return model


def at_two_places():
    linear, norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
    return nn.Sequential(linear, norm, nn.ReLU(), linear, norm, nn.ReLU(), linear)


def in_three_dimensions():
    layers = [nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 1)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last_3d)


def parametrized(layer, make):
    """A model whose layer's weight a module computes, before convert(): the layer stays torch's."""
    model = net()
    make(model[layer])
    return model


def rows():
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))


def sum_changes_skip(m, y, x):
    k = x * 2
    s = y + k
    k.mul_(3)
    return m.r(s) + k


def sum_changes_part_of_skip(m, y, x):
    k = x * 2
    s = y + k
    k[:2].mul_(3)
    return m.r(s) + k


def sums_of_one_skip(m, y, x):
    k = x * 2
    s, t = y + k, m.b(m.c(x * 3)) + k
    k.add_(1)
    return m.r(s) + m.r(t) + k


def input_is_skip(m, y, x):
    c = m.c(x)
    y = m.b(c)
    s = y + c
    return y * 2 + m.r(s)


def two_sums_of_one_norm(m, y, x):
    c = m.c(x)
    y = m.b(c)
    s = y + c
    t = y + c
    return m.r(s) + m.r(t) * 2


def hooks_on_a_sum(m, y, x):
    s = y + x
    z = m.r(s)
    s.register_hook(lambda g: g * 2)
    y.register_hook(lambda g: g * 3)
    return z


def outputs_in_a_dict(m, y, x):
    found = {"a": y, "b": [m.b(m.c(x * 2))]}
    return found["a"] + found["b"][0]


RUNS = {
    "plain": (net, image, call),
    "in place": (lambda: net(True), image, call),
    "batch of one": (net, lambda: image(1), call),
    "channels_last_3d": (in_three_dimensions, lambda: torch.randn(8, 4, 7, 7, 7).contiguous(memory_format=torch.channels_last_3d), call),
    "norm in eval mode": (lambda: frozen("eval"), image, call),
    "norm in eval mode, fixed": (lambda: frozen("eval, fixed"), image, call),
    "norm fixed": (lambda: frozen("fixed"), image, call),
    "tied weights": (tied, rows, call),
    "modules at two places": (at_two_places, rows, call),
    "twice": (lambda: Residual(lambda m, y, x: m.r(y) + m.r(m.b(m.c(x * 2)))), image, call),
    "slices": (net, image, lambda m, x: m[2:](m[:2](x))),
    "weight_norm": (lambda: parametrized(0, parametrizations.weight_norm), image, call),
    "hooks replace outputs": (net, image, with_hooks(lambda m: [m[1].register_forward_hook(lambda _, i, o: o * 2),
                                                                m[2].register_forward_hook(lambda _, i, o: o + 1)])),
    "hook drops an output": (net, image, with_hooks(lambda m: [m[4].register_forward_hook(lambda _, i, o: i[0] * 1.5)])),
    "pre-hook replaces an input": (net, image, with_hooks(lambda m: [m[2].register_forward_pre_hook(lambda _, i: (i[0] * 2,))])),
    "backward hooks": (net, image, with_hooks(lambda m: [l.register_full_backward_hook(lambda _, i, o: (i[0] * 2,)) for l in (*m[1:], m)])),
    "backward pre-hooks": (net, image, with_hooks(lambda m: [l.register_full_backward_pre_hook(lambda _, o: (o[0] * 2,)) for l in m])),
    "identity": (net, image, lambda m, x: Identity.apply(m(x))),
    "identity before ReLU": (net, image, lambda m, x: F.relu(Identity.apply(m(x)))),
    "sizes alone": (net, image, lambda m, x: Ramp.apply(m(x))),
    "late hook": (net, image, hooked_late),
    "late hooks on a sum": (lambda: Residual(hooks_on_a_sum), image, call),
    "skip changes": (lambda: Residual(sum_changes_skip), image, call),
    "a part of a skip changes": (lambda: Residual(sum_changes_part_of_skip), image, call),
    "sums of one skip": (lambda: Residual(sums_of_one_skip), image, call),
    "a norm's input is the skip": (lambda: Residual(input_is_skip), image, call),
    "two sums of one norm": (lambda: Residual(two_sums_of_one_norm), image, call),
    "dict": (lambda: Residual(outputs_in_a_dict), image, call),
    "functional_call": (net, image, lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,))),
}  # fmt: skip


@pytest.mark.parametrize("method", [EXACT, CODED])
@pytest.mark.parametrize("name", RUNS)
def test_results_gradients_and_buffers_are_torchs(name, method):
    make, x, run = RUNS[name]
    assert_same(make(), x(), method, run)


# ---- types, sizes and modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_that_codes_do_not_know_are_torchs(dtype):
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)] if dtype.is_complex else [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(64, 8, dtype=dtype)
    ours = satchel.convert(copy.deepcopy(model))
    for m in (model, ours):
        m(x).abs().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), model.parameters()))
    assert satchel.saved(ours(x).abs().sum()).bytes == 0


@pytest.mark.parametrize("method", [EXACT, CODED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype, method):
    model, x = net().to(dtype), image().to(dtype)
    out, expected = gradients(model, x)
    ours = satchel.convert(copy.deepcopy(model), method)
    again, made = gradients(ours, x)
    torch.testing.assert_close(again, out, rtol=2e-2, atol=2e-2)
    if method == CODED:
        made = sum(gradients(ours, x)[1] for _ in range(DRAWS)) / DRAWS
    assert F.cosine_similarity(made, expected, 0) > 0.98 and 0.9 < float(made.norm() / expected.norm()) < 1.1


def test_autocast_of_waiting_norms():
    model, x = Residual(lambda m, y, x: m.r(y + m.c(x))), image()

    def run(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float()

    out, expected = gradients(model, x, run)
    ours = satchel.convert(copy.deepcopy(model))
    torch.testing.assert_close(gradients(ours, x, run)[0], out, rtol=2e-2, atol=2e-2)
    made = sum(gradients(ours, x, run)[1] for _ in range(DRAWS)) / DRAWS
    assert F.cosine_similarity(made, expected, 0) > 0.97


def test_meta_tensors():
    with torch.device("meta"):
        model = satchel.convert(net())
        model(torch.randn(4, 8, 10, 10, requires_grad=True)).sum().backward()
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("method", [EXACT, CODED])
@pytest.mark.parametrize("shape", [(0, 8, 6, 6), (1, 8)])
def test_too_few_values_end_as_in_torch(shape, method):
    model, x = nn.Sequential(nn.BatchNorm2d(8) if len(shape) == 4 else nn.BatchNorm1d(8), nn.ReLU()), torch.randn(shape, requires_grad=True)
    ends = []
    for m in (model, satchel.convert(copy.deepcopy(model), method)):
        try:
            ends.append(m(x).shape)
        except ValueError as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_nothing_to_wait_for(context):
    model = net()
    ours = satchel.convert(copy.deepcopy(model))
    with context():
        y = ours(image())
        assert type(y) is torch.Tensor
        torch.testing.assert_close(y, model(image()))
    for a, b in zip(ours.buffers(), model.buffers()):
        torch.testing.assert_close(a, b)


def test_values_that_are_not_finite_stay_visible():
    for method in (EXACT, CODED):
        model, x = satchel.convert(net(), method), image()
        x[0, 0, 0, 0] = float("nan")
        model(x).sum().backward()
        assert model[0].weight.grad.isnan().any()


def test_anomaly_mode_and_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            assert_same(net(), image(), CODED)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- gradients of norms' outputs -----------------------------------------------------------------------------------------------------


def of_hidden(model, ask):
    """The gradient of the norm's output, which a ReLU has claimed, as `ask` gets it."""
    y = model[1](model[0](image()))
    out = model[4](model[3](model[2](y)))
    return ask(y, (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum())


def retained(y, loss):
    y.retain_grad()
    loss.backward()
    return y.grad


def heard(y, loss):
    seen = []
    y.register_hook(lambda g: seen.append(g.clone()))
    loss.backward()
    assert len(seen) == 1
    return seen[0]


def by_backward(y, loss):
    loss.backward(inputs=[y])
    return y.grad


ASKS = {
    "grad": lambda y, loss: torch.autograd.grad(loss, y)[0],
    "grad, two readers": lambda y, loss: torch.autograd.grad(loss + (y * 0.3).sum(), y)[0],
    "edge": lambda y, loss: torch.autograd.grad(loss, torch.autograd.graph.get_gradient_edge(y))[0],
    "retain_grad": retained,
    "hook": heard,
    "backward(inputs)": by_backward,
}


@pytest.mark.parametrize("method", [EXACT, CODED])
@pytest.mark.parametrize("name", ASKS)
def test_the_gradient_of_a_claimed_norms_output(name, method):
    model = net()
    expected = of_hidden(model, ASKS[name]).double().flatten()
    ours = satchel.convert(copy.deepcopy(model), method)
    draw = lambda: of_hidden(ours, ASKS[name]).double().flatten()  # noqa: E731
    if method == EXACT:
        assert float((draw() - expected).norm()) < 2e-5 * float(expected.norm())
    else:
        assert_mean(draw, expected)


def test_backward_starts_at_a_result_that_nobody_read():
    model, g = net(), torch.linspace(-1, 1, 8 * 8 * 36).view(8, 8, 6, 6)

    def draw(m):
        m.zero_grad()
        y = m(image())
        torch.autograd.backward(y, g)
        return torch.cat([p.grad.double().flatten() for p in m.parameters()])

    expected = draw(model)
    satchel.convert(model)
    assert type(model(image())) is Waiting
    assert_mean(lambda: draw(model), expected)


def test_a_result_may_be_read_after_backward():
    model = satchel.convert(net())
    y = model[1](model[0](image()))
    model[3](model[2](y)).sum().backward()
    assert bool(torch.isfinite(y).all())
    with pytest.raises(RuntimeError, match="backward"):
        y.sum().backward()


def test_batched_gradients():
    """is_grads_batched runs backward under vmap."""
    torch.manual_seed(0)
    model, x, g = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(512, 8), torch.randn(2, 512, 4)

    def draw():
        made = torch.autograd.grad(model(x), list(model.parameters()), g, is_grads_batched=True)
        return torch.cat([t.double().flatten() for t in made])

    expected = draw()
    satchel.convert(model, EXACT)
    assert float((draw() - expected).norm()) < 2e-5 * float(expected.norm())
    satchel.convert(model)
    assert float((sum(draw() for _ in range(DRAWS)) / DRAWS - expected).norm()) < 0.2 * float(expected.norm())


# ---- running statistics --------------------------------------------------------------------------------------------------------------


def stored(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)[4].running_mean


def averaged(model):
    """An average of weights that copies buffers."""
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    ema.update_parameters(model)
    return ema.module[4].running_mean


def by_foreach(model):
    kept = [torch.zeros(8), torch.zeros(8)]
    torch._foreach_lerp_(kept, [model[4].running_mean, model[4].running_var], 0.5)
    return kept[0]


READS = {
    "attribute": lambda m: m[4].running_mean,
    "state_dict": lambda m: m.state_dict()["4.running_mean"],
    "state_dict, keep_vars": lambda m: m.state_dict(keep_vars=True)["4.running_mean"],
    "buffers": lambda m: list(m.buffers())[3],
    "deepcopy": lambda m: copy.deepcopy(m)[4].running_mean,
    "torch.save": stored,
    "double": lambda m: m.double()[4].running_mean,
    "EMA": averaged,
    "foreach": by_foreach,
    "copy_": lambda m: torch.zeros(8).copy_(m[4].running_mean),
    "numpy": lambda m: torch.from_numpy(m[4].running_mean.numpy()),
    "eval": lambda m: m.eval()(image(seed=3)).mean((0, 2, 3)),
    "revert": lambda m: satchel.revert(m)[4].running_mean,
    "SyncBatchNorm": lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m)[4].running_mean,
}


@pytest.mark.parametrize("name", READS)
def test_statistics_are_right_while_a_result_waits(name):
    model = net()
    ours = satchel.convert(copy.deepcopy(model))
    held = [model(image()), ours(image())]
    assert type(held[1]) is Waiting
    torch.testing.assert_close(READS[name](ours) + 0, READS[name](model) + 0, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(held[1], held[0], rtol=1e-4, atol=1e-4)
    assert type(ours[4].running_mean) is torch.Tensor


def test_statistics_that_others_hold():
    """DDP, and averages of weights, hold the tensors themselves."""
    model = net()
    ours = satchel.convert(copy.deepcopy(model))
    buffers = [list(m.buffers()) for m in (model, ours)]
    held = [model(image()), ours(image())]
    for a, b in zip(*buffers):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    del held


def test_statistics_are_set_while_a_result_waits():
    ours = satchel.convert(net())
    state = copy.deepcopy(ours.state_dict())
    y = ours(image())
    ours[4].reset_running_stats()
    assert float(ours[4].running_mean.abs().sum()) == 0
    y = ours(image())
    with torch.no_grad():
        ours[4].running_mean.copy_(state["4.running_mean"])
    assert bool(torch.isfinite(y).all())
    assert torch.equal(ours[4].running_mean, state["4.running_mean"]), "they do not move again"


def test_norms_that_share_statistics():
    results = []
    for convert in (False, True):
        first = nn.BatchNorm2d(8)
        second = copy.copy(first)  # the same buffers
        if convert:
            satchel.convert(nn.Sequential(first, second))
        y, z = first(image(seed=1)), second(image(seed=2) * 3)
        results.append(first.running_mean.clone())
        del y, z
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_an_input_that_changes_before_its_norm_is_read_is_told():
    norm, x = satchel.convert(nn.BatchNorm2d(8)), image()
    y = norm(x)
    x.mul_(5)
    with pytest.warns(RuntimeWarning, match=r"\[convert\] x, γ and β must not be changed .* statistics of '' lack a batch"):
        del y
    assert float(norm.running_mean.abs().sum()) == 0


# ---- copies, changed classes ---------------------------------------------------------------------------------------------------------


def test_copies_in_mid_step_train():
    model = satchel.convert(net())
    y = model(image())
    for other in (copy.deepcopy(model), copy.copy(model)):
        other(image()).sum().backward()
    y.sum().backward()
    del model
    gc.collect()


def test_the_model_may_go_before_backward():
    model = satchel.convert(net())
    weight, y = model[0].weight, model(image())
    del model
    gc.collect()
    y.square().sum().backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("method", [EXACT, CODED])
@pytest.mark.parametrize("layer, make", [
    (0, parametrizations.weight_norm), (3, lambda m: parametrizations.spectral_norm(m.eval())), (0, torch.nn.utils.weight_norm),
    (1, lambda m: parametrize.register_parametrization(m, "weight", Doubled())), (0, lambda m: prune.identity(m, "weight")),
])  # fmt: skip
def test_parametrizations_of_converted_layers(layer, make, method):
    model = net()
    ours = satchel.convert(copy.deepcopy(model), method)
    for m in (model, ours):
        torch.manual_seed(5)
        make(m[layer])
    assert_same(model, image(), method, other=ours)
    satchel.revert(ours)
    assert not any(isinstance(m, Layer) for m in ours.modules())
    torch.testing.assert_close(ours(image()), model(image()))


def test_a_parametrized_layers_copy_stays_converted():
    model = satchel.convert(net())
    parametrizations.weight_norm(model[0])
    other = copy.deepcopy(model)
    satchel.revert(other)
    assert isinstance(model[0], Layer) and not isinstance(other[0], Layer)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is satchel.layers.Conv2d


def test_replicas():
    """As DataParallel makes them: parameters are computed tensors, buffers copies, and each runs in a thread."""

    def replica(model):
        made = {id(m): m._replicate_for_data_parallel() for m in model.modules()}
        for m in model.modules():
            r = made[id(m)]
            for name, child in m._modules.items():
                r._modules[name] = made[id(child)]
            for name, p in m._parameters.items():
                if p is None:
                    r._parameters[name] = None
                else:
                    setattr(r, name, p * 1.0)
            for name, b in m._buffers.items():
                r._buffers[name] = b.clone()
        return made[id(model)]

    def draw(model):
        model.zero_grad()
        outs, replicas = {}, [replica(model) for _ in range(2)]
        threads = [threading.Thread(target=lambda i=i: outs.__setitem__(i, replicas[i](image(seed=i)))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        weights = torch.linspace(-1, 1, outs[0].numel()).view(outs[0].shape)
        sum((out * weights).sum() for out in outs.values()).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    model = net()
    expected = draw(model)
    satchel.convert(model, EXACT)
    assert float((draw(model) - expected).norm()) < 2e-5 * float(expected.norm())
    satchel.convert(model)
    assert_mean(lambda: draw(model), expected)


def test_threads_that_share_a_model():
    model, failed = satchel.convert(net()), []

    def train(seed):
        try:
            for _ in range(30):
                y = model(image(seed=seed))
                assert type(y + 0) is torch.Tensor
                assert torch.autograd.grad(y.square().sum(), model[0].weight)[0].isfinite().all()
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert all(type(b) is torch.Tensor and b.isfinite().all() for b in model.buffers())


def test_a_second_convert():
    model = satchel.convert(net(), EXACT)
    satchel.convert(model, "satchel,bits=3", exclude=["3", "4"])
    assert [isinstance(m, Layer) for m in model] == [True, True, True, False, False]
    assert {m.satchel_method for m in model[:3]} == {"satchel,bits=3"}
    assert not hasattr(model[3], "satchel_method")
    satchel.convert(model)
    assert all(isinstance(m, Layer) and m.satchel_method == "satchel" for m in model)
    satchel.convert(model[3], "int8")  # a part has a method of its own
    assert model[0].satchel_method == "satchel" and model[3].satchel_method == "int8"
    model(image()).sum().backward()
    out = model(image())
    satchel.revert(model)  # between forward and backward
    out.sum().backward()


# ---- torch.func ----------------------------------------------------------------------------------------------------------------------


def by_grad(model):
    x = image().contiguous()

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).pow(3).sum()

    return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})["0.weight"]


def by_grad_of_a_part(model):
    """The other parameters are plain tensors that need gradients."""
    x = image().contiguous().requires_grad_()

    def loss(weight):
        return torch.func.functional_call(model, {"5.weight": weight}, (x,)).pow(3).sum()

    return torch.func.grad(loss)(model[5].weight.detach())


def by_vmap(model):
    return torch.vmap(model)(torch.stack([image().contiguous(), image(seed=2).contiguous()]))


def by_vmap_of_parameters(model):
    x, many = image().contiguous(), {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in model.named_parameters()}
    return torch.vmap(lambda parameters: torch.func.functional_call(model, parameters, (x,)))(many)


def by_jvp(model):
    return torch.func.jvp(model, (image().contiguous(),), (torch.ones_like(image().contiguous()),))[1]


def by_hessian(model):
    x = image().contiguous()
    return torch.func.hessian(lambda t: model(x * t).pow(2).sum())(torch.tensor(1.5))


@pytest.mark.parametrize("run", [by_grad, by_grad_of_a_part, by_vmap, by_vmap_of_parameters, by_jvp, by_hessian])
def test_torch_func_is_torchs(run):
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.BatchNorm2d(8, track_running_stats=False), nn.Dropout(0.0), nn.Conv2d(8, 4, 1),
              nn.ELU(), nn.ConvTranspose2d(4, 4, 2), nn.MaxPool2d(2), nn.GELU(), nn.LayerNorm(4), nn.RMSNorm(4), nn.AdaptiveAvgPool2d(2)]  # fmt: skip
    model = nn.Sequential(*layers)
    expected = run(model)
    torch.testing.assert_close(run(satchel.convert(model)), expected, rtol=1e-4, atol=1e-4)


# ---- torch's tracers and compilers ---------------------------------------------------------------------------------------------------


def test_torch_fx_and_script_say_what_to_do():
    model = satchel.convert(net())
    with pytest.raises(RuntimeError, match=r"\[convert\] torch.fx takes torch's own layers, got a converted one; call satchel.revert\(model\) first"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(RuntimeError, match=r"\[convert\] torch.jit.script takes torch's own layers, .*; call satchel.revert\(model\) first"):
        torch.jit.script(model)
    for layer in (nn.Dropout(), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 1), nn.MaxPool2d(2), nn.ELU(), nn.RMSNorm(4)):
        with pytest.raises(RuntimeError, match=r"\[convert\] torch.fx takes torch's own layers"):
            torch.fx.symbolic_trace(satchel.convert(nn.Sequential(layer)))
    satchel.revert(model)
    torch.fx.symbolic_trace(model)
    torch.jit.script(model)


def test_traces_and_exports_are_of_torchs_layers():
    model = net().eval()
    ours = satchel.convert(copy.deepcopy(model))
    expected = model(image())
    torch.testing.assert_close(torch.jit.trace(ours, image())(image()), expected)
    for strict in (False, True):
        program = torch.export.export(ours, (image(),), strict=strict)
        assert not any("satchel" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(image()), expected)


def test_make_fx_is_of_torchs_layers():
    from torch.fx.experimental.proxy_tensor import make_fx

    ours = satchel.convert(net())
    graph = make_fx(ours)(image()).graph
    assert not any("satchel" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("train", [True, False])
def test_compiled_models_are_torchs(train):
    model = net().train(train)
    ours = satchel.convert(copy.deepcopy(model))
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        out, expected = gradients(model, image())
        again, made = gradients(ours, image(), lambda m, x: compiled(x))
        torch.testing.assert_close(again, out, rtol=1e-4, atol=1e-4)
        assert float((made - expected).norm()) < 2e-5 * float(expected.norm())
    for a, b in zip(ours.buffers(), model.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiled_function_of_a_waiting_result():
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: (t * 2 + 1).sin(), backend="aot_eager")
    model = satchel.convert(net())
    for _ in range(3):
        y = model(image())
        assert type(y) is Waiting
        out = compiled(y)
        torch.testing.assert_close(out, (y * 2 + 1).sin())
        out.sum().backward()


def test_a_model_is_compiled_while_a_result_waits():
    model = net()
    ours = satchel.convert(copy.deepcopy(model))
    held = [model(image()), ours(image())]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager")(image(seed=2)), model(image(seed=2)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held[1], held[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(ours.buffers(), model.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_packing_around_leaves_claims_alone():
    model = Residual(lambda m, y, x: m.r(y + x))
    satchel.convert(model)
    with satchel.packing():
        out = model(image().requires_grad_())
    assert "NormReLU" in type(out.grad_fn).__name__
