"""packing() and attach(): what is packed, what must stay exact, and that models stay what they are."""

import collections
import contextlib
import copy
import gc
import io
import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import satchel
from satchel import _ops, _step
from satchel import kept as forms
from satchel._ops import ops


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def kept(meter):
    return {f"{line.node}.{line.field}": line.kept for line in meter.lines}


def test_originals_are_freed():
    x = torch.randn(64, 64, requires_grad=True)
    with satchel.packing():
        h = torch.exp(x * 1.0)
        storage = StorageWeakRef(h.untyped_storage())
        y = h + 1
        del h
        assert storage.expired()
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_memory_is_the_meters():
    model, x = net(), torch.randn(512, 64)
    with satchel.packing(meter=True, model=model) as p:
        loss = model(x).sum()
    assert p.meter.before > 7 * p.meter.after
    lines = json.loads(p.meter.to_json())
    assert lines["before"] == p.meter.before and len(lines["lines"]) == len(p.meter.lines)
    assert set(p.meter.by_module()) >= {"0", "1", "2", "3", "4"} and "in all" in str(p.meter)
    # What torch keeps: input, GELU's and LayerNorm's inputs, LayerNorm's and ReLU's outputs, and its statistics.
    assert p.meter.before == 512 * (64 + 4 * 128 + 2) * 4
    loss.backward()


def test_in_place_change_between_op_and_registration_raises():
    x = torch.randn(64, 64, requires_grad=True)
    with satchel.packing(meter=True) as p:
        with torch._C.DisableTorchFunction():  # as inside a composite function
            h = (x * 2).exp()
            y = h * 1.0
            h.add_(1)
        y = y + 1
    assert kept(p.meter)["ExpBackward0.result"] == "exact: changed in place"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_change_after_registration_is_harmless():
    x = torch.randn(64, 64, requires_grad=True)
    with satchel.packing("8/8/8"):
        h = (x * 2).exp()
        y = h.sum() + 0
        h.add_(1)
    y.backward()
    expected = 2 * (2 * x).exp()
    assert (x.grad - expected).abs().max() <= 2 * expected.max() / 255


def test_in_place_functions():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 8))
    x = torch.randn(64, 64)
    expected = gradients(model(x).square().sum(), model)
    with satchel.packing("8/8/8", meter=True) as p:
        loss = model(x).square().sum()
    assert kept(p.meter)["ReluBackward0.result"] == "mask"
    assert (gradients(loss, model) - expected).norm() < 0.02 * expected.norm()


def test_parameters_their_views_and_casts_stay_exact():
    model, x = nn.Linear(128, 128), torch.randn(64, 128)
    scale = nn.Parameter(torch.randn(64, 128))
    with satchel.packing(meter=True) as p, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        z = (x @ model.weight.t()[:, :64]) + (y * scale)[:, :64]
    packed = [line for line in p.meter.lines if not line.kept.startswith("exact")]
    assert {(line.node, line.field) for line in packed} == {("AddmmBackward0", "mat1"), ("MmBackward0", "self"), ("MulBackward0", "self")}
    assert all(line.kept == "2 bits" for line in packed), "their noise stays in a parameter's gradient"
    z.float().sum().backward()


def test_casts_of_parameters_are_made_again():
    """Autocast's bf16 weights: nothing is kept of them, their gradients are exact, and a weight that was changed is not taken for the old one."""
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64, requires_grad=True)

    def loss(context):
        with context, torch.autocast("cpu", torch.bfloat16):
            return layer(x).float().sum()

    def gradient(context):
        return torch.autograd.grad(loss(context), [x])[0]

    p = satchel.packing(32, min_bytes=1024, meter=True)
    assert torch.equal(gradient(p), gradient(contextlib.nullcontext()))
    again = [line for line in p.meter.lines if line.kept == "cast again" and line.field == "mat2"]
    assert len(again) == 2 and all(line.after == 0 and line.before == 64 * 64 * 2 for line in again), p.meter.table()

    late = loss(satchel.packing(32, min_bytes=1024))
    with torch.no_grad():
        layer[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"\[packing\] a parameter must stay as it is until backward"):
        late.backward()


def test_frozen_weights_stay_exact():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128))
    model[1].requires_grad_(False)
    x = torch.randn(64, 64)
    expected = torch.autograd.grad(model(x).sin().sum(), model[0].weight)[0]
    with satchel.packing("32/2/8", meter=True) as p:
        loss = model(x).sin().sum()
    assert "AddmmBackward0.mat2" not in kept(p.meter)
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], expected)


def test_none_fields_and_hooked_fields_are_skipped():
    x = torch.randn(64, 64, requires_grad=True)
    seen = []
    with satchel.packing(meter=True) as p:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
            y = torch.exp(x * 2)  # MulBackward0.self is None: nobody needs it
        y = torch.exp(y * 0.1)
    assert len(seen) >= 1
    assert [line.kept for line in p.meter.lines if line.node == "ExpBackward0"] == ["4 bits"]
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside(reentrant):
    model, x = net(), torch.randn(256, 64, requires_grad=True)
    expected = gradients(model(x).square().sum(), model)

    def forward():
        h = checkpoint(model[:3], x, use_reentrant=reentrant)
        return model[3:](h).square().sum()

    with satchel.packing("8/8/8"):
        loss = forward()
    loss.backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_hidden_and_unknown_nodes_stay_exact_and_are_reported():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 3)
            return x * 3

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x = torch.randn(64, 64, requires_grad=True)

    def forward():
        y = Triple.apply(x * 1)
        z = torch.zeros(64, 64)
        z[:32] = y[:32]
        z[:16].exp_()  # CopySlices
        a, b = torch._foreach_mul([y, z], [z, y])
        return (torch.sin(y) + z + a + b).sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with satchel.packing(meter=True, exclude=["MulBackward0"]) as p:
        loss = forward()
    assert p.meter.hidden["CopySlices"] >= 2 and "CopySlices" in str(p.meter)
    lines = kept(p.meter)
    assert lines["TripleBackward.tensors[0]"] == "exact: unknown op"
    assert lines["SinBackward0.self"] == "exact: no row"
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_reenter_nest_and_no_grad():
    model, x = net(), torch.randn(64, 64)
    p = satchel.packing(seed=1)
    losses = []
    for _ in range(3):
        with p:
            with p, torch.no_grad():
                model(x)
            losses.append(model(x).square().sum())
    assert p.step is None
    draws = [gradients(loss, model) for loss in losses]
    assert not torch.equal(draws[0], draws[1])  # every entry draws anew
    again = satchel.packing(seed=1)
    with again:
        loss = model(x).square().sum()
    assert torch.equal(gradients(loss, model), draws[0])
    with torch.inference_mode(), p:
        model(x)


def test_every_save_has_a_seed_of_its_own():
    with satchel.packing(seed=1) as p:
        seeds = [int(p.step.seed(torch.device("cpu"))) for _ in range(1000)]
    with p:
        seeds += [int(p.step.seed(torch.device("cpu"))) for _ in range(1000)]
    assert len(set(seeds)) == 2000


def test_a_context_made_for_each_step_draws_anew():
    model, x = net(), torch.randn(64, 64)
    draws = []
    for _ in range(2):
        with satchel.packing():
            loss = model(x).square().sum()
        draws.append(gradients(loss, model))
    assert not torch.equal(*draws)
    with satchel.packing() as one, satchel.packing() as other:  # two models in one step
        assert int(one.step.seed(torch.device("cpu"))) != int(other.step.seed(torch.device("cpu")))


def test_torchs_generator_is_not_touched():
    model, x = net(), torch.randn(64, 64)
    state = torch.get_rng_state()
    with satchel.packing():
        model(x).sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_retain_graph_and_gradients_of_gradients():
    x = torch.randn(64, 64, requires_grad=True)
    with satchel.packing():
        loss = (x * 2).exp().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x, retain_graph=True)[0])
    with pytest.raises(RuntimeError, match=r"\[packing\] a gradient of a gradient needs exact saves"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_readers_whose_noise_is_local_share_a_code():
    x, layers = torch.randn(64, 128), nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(3)])
    first = nn.Linear(128, 128, bias=False)
    with satchel.packing(meter=True) as p:
        h = first(x)
        loss = sum(layer(h).square().sum() for layer in layers)
    lines = [line for line in p.meter.lines if line.node == "MmBackward0" and line.field == "self"]
    assert len(lines) == 4 and sum(line.after > 0 for line in lines) == 2
    loss.backward()


def test_options():
    model, x = net(), torch.randn(64, 64)

    def run(**options):
        with satchel.packing(meter=True, model=model, **options) as p:
            model(x)
        return kept(p.meter)

    assert run()["GeluBackward0.self"] == "slope, 4 bits"
    assert run(bits=(2, 3, 8))["GeluBackward0.self"] == "slope, 3 bits"
    assert run(bits="2/32/8")["GeluBackward0.self"] == "exact: this case"
    assert run(exclude=["GeluBackward0"])["GeluBackward0.self"] == "exact: excluded"
    assert run(exclude=["1"])["GeluBackward0.self"] == "exact: excluded"
    assert run(include=["ReluBackward0.result"])["NativeLayerNormBackward0.input"] == "exact: excluded"
    assert run(min_bytes=1 << 20)["GeluBackward0.self"] == "exact: small"
    for bits in ("2/4", "9", "a", (0, 1, 2)):
        with pytest.raises(ValueError, match=r"\[packing\] bits must be local/flow/attention"):
            satchel.packing(bits)
    with pytest.raises(ValueError, match=r"\[packing\] include and exclude must be lists"):
        satchel.packing(exclude="GeluBackward0")


def test_slopes_without_an_inverse_stay_exact():
    x = torch.randn(64, 64, requires_grad=True)
    with satchel.packing(meter=True) as p:
        F.elu(x * 2, alpha=0.5)
        F.celu(x * 2, alpha=-0.5)
        torch.pow(x * 2, 4)
        F.softplus(x * 2, beta=3, threshold=2)  # 0.88 at the threshold, and 1 beyond
        F.binary_cross_entropy_with_logits(x * 2, torch.sigmoid(x))  # the target's gradient is linear in x itself
    for node in ("EluBackward0", "CeluBackward0", "PowBackward0", "SoftplusBackward0", "BinaryCrossEntropyWithLogitsBackward0"):
        assert kept(p.meter)[node + ".self"] == "exact: this case", node


@pytest.mark.parametrize("options", [dict(min_bytes=1 << 20), dict(exclude=["*"])])
def test_parameters_do_not_count_where_they_are_small_or_excluded(options):
    scale, x = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
    with satchel.packing(meter=True, **options) as p:
        y = (x + 2) * scale
        y @ scale.t()
    assert [f"{line.node}.{line.field}" for line in p.meter.lines] == ["MulBackward0.self", "MmBackward0.self"], p.meter.table()
    assert p.meter.before == p.meter.after == 2 * x.nbytes


def test_excluded_casts_of_parameters_count():
    model, x = nn.Linear(128, 128, bias=False), torch.randn(64, 128, requires_grad=True)
    with satchel.packing(meter=True, exclude=["*"]) as p, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert kept(p.meter)["MmBackward0.mat2"] == "exact: excluded"


def test_attach_and_detach():
    model, x = net(), torch.randn(256, 64)
    expected = gradients(model(x).square().sum(), model)
    names = list(model.state_dict())
    p = satchel.attach(model, "8/8/8", meter=True)
    got = gradients(model(x).square().sum(), model)
    assert not torch.equal(got, expected) and (got - expected).norm() < 0.02 * expected.norm()
    lines = {(line.module, line.node, line.field) for line in p.meter.lines}
    assert ("1", "GeluBackward0", "self") in lines and ("3", "AddmmBackward0", "mat1") in lines
    assert ("0", "AddmmBackward0", "mat1") not in lines, "the caller holds the batch"
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match=r"\[attach\] model must not be attached yet, got one that is"):
        satchel.attach(model)
    assert satchel.detach(model) is model
    assert torch.equal(gradients(model(x).square().sum(), model), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    satchel.attach(model)


def test_attached_models_are_copied_and_stored():
    model, x = net(), torch.randn(256, 64)
    satchel.attach(model, "8/8/8", meter=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        owner = next(iter(other._forward_pre_hooks.values())).owner
        assert owner is not next(iter(model._forward_pre_hooks.values())).owner
        other(x).sum().backward()
        assert kept(owner.meter)["GeluBackward0.self"] == "slope, 8 bits"
        assert model[0].weight.grad is None
        satchel.detach(other)


def test_an_error_in_forward_leaves_the_context():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("here")

    model = nn.Sequential(nn.Linear(64, 64), Fails())
    p = satchel.attach(model)
    with pytest.raises(ValueError, match="here"):
        model(torch.randn(4, 64))
    assert p.step is None
    with pytest.raises(ValueError, match="here"):
        model(torch.randn(4, 64))


def test_grad_scaler_and_training():
    torch.manual_seed(3)
    x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
    losses = []
    for attached in (False, True):
        torch.manual_seed(4)
        model = net()
        if attached:
            satchel.attach(model, "8/8/8")  # its noise is below a hundredth
        optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
        for _ in range(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert abs(losses[1] - losses[0]) < 0.02 * losses[0], losses


def test_nothing_is_left_over_many_steps():
    model, x = net(), torch.randn(64, 64)

    def alive():
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, satchel.kept.Code))

    with satchel.packing() as p:  # one context around all steps
        for step in range(600):
            model(x).sum().backward()
            model.zero_grad()
            if step == 20:
                before = alive()
        assert alive() <= before
        assert len(p.step.shared) <= 512 and len(p.step.visited) < 1 << 16


def test_threads_have_contexts_of_their_own():
    import threading

    model, x = net(), torch.randn(256, 64)
    p = satchel.attach(model)
    failures = []

    def work():
        try:
            for _ in range(5):
                torch.autograd.grad(model(x).sum(), model[0].weight)
        except Exception as e:  # noqa: BLE001
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures and p.step is None


def test_a_line_that_shares_memory_has_no_ratio():
    """Two nodes of cross_entropy() save the logarithms; their bytes count once, with the first that is seen."""
    with satchel.packing(meter=True, min_bytes=0) as context:
        x = torch.randn(64, 64, requires_grad=True)
        loss = F.cross_entropy(x, torch.zeros(64, dtype=torch.int64))
    loss.backward()
    line = next(line for line in context.meter.table().splitlines() if line.startswith("LogSoftmax"))
    assert line.split()[-1] == "–" and "inf" not in line


def test_what_is_looked_up_once_is_right_for_each_save():
    """Saves of one shape differ in role, and between steps weights are computed or frozen, and types and strides change."""
    layer, weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
    x, gaps = torch.randn(64, 64), torch.randn(64, 128)[:, ::2]

    def gradient(p, x, weight_of, autocast):
        with p, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            h = layer(x).relu()
            loss = F.gelu(torch.mm(torch.mm(h, weight_of(weight)), h)).float().sum()
        found = torch.autograd.grad(loss, [layer.weight, weight], allow_unused=True)
        return torch.cat([g.flatten() for g in found if g is not None])

    itself, computed, frozen = (lambda w: w), (lambda w: w * 1), (lambda w: w.detach())
    steps = [
        (x, itself, False, ["4 bits", "2 bits"], 0),  # a product of two activations is flow, one with a parameter local
        (x, computed, False, ["4 bits", "4 bits"], 0),
        (x, frozen, False, ["4 bits"], 0),  # nobody needs the other
        (x, itself, True, ["4 bits", "2 bits"], 1),
        (x, computed, True, ["4 bits", "4 bits"], 0),
        (gaps, itself, False, ["4 bits", "2 bits"], 0),
        (x, itself, False, ["4 bits", "2 bits"], 0),
    ]
    p, metered = satchel.packing(seed=1, min_bytes=1024), satchel.packing(seed=1, min_bytes=1024, meter=True)
    for number, (*args, expected, casts) in enumerate(steps):
        got = gradient(p, *args)
        for cache in (_step._fields_of, _step._way, forms.code_layout, forms._plain_layout, forms.packed_strides, forms.code_numbers):
            cache.cache_clear()
        afresh = satchel.packing(seed=1, min_bytes=1024)
        for _ in range(number):  # its steps are numbered too
            with afresh:
                pass
        assert torch.equal(got, gradient(afresh, *args)) and torch.equal(got, gradient(metered, *args)), number
        lines = metered.meter.lines
        assert sorted(line.kept for line in lines if (line.node, line.field) == ("MmBackward0", "self")) == sorted(expected), number
        assert sum(line.kept == "cast again" for line in lines) == casts, number


def test_bytes_and_strides_are_those_of_a_clone():
    """clone() keeps the order of memory and leaves gaps out, and the op packs what has none as it lies."""
    x, seed = torch.randn(4, 6, 8), torch.zeros(1, dtype=torch.int64)
    layouts = [x, x.mT, x.permute(2, 0, 1), x[:, ::2], x[..., 1:], x[:0], x[:, :1], x[:1].permute(1, 0, 2), x[:, :1].mT, x[0, 0, 0],
               x.view(2, 2, 6, 8).transpose(1, 2), x.split(2, 2)[0].transpose(0, 1), x.flatten().unfold(0, 3, 1)]  # fmt: skip
    for t in layouts:
        numbers, clone = list(forms.code_numbers(8)), t.clone()
        code = forms.Code(t, 8, seed)
        assert torch.equal(code.bytes, ops.pack(clone, seed, None, 1, numbers)), (t.shape, t.stride())
        assert forms.packed_strides(tuple(t.shape), t.stride()) == code.restore().stride() == clone.stride(), (t.shape, t.stride())
        assert torch.equal(code.restore(), ops.unpack(code.bytes, t.shape, clone.stride(), t.dtype, numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_gaps_are_packed_where_they_lie(dtype):
    """Parts of each row of a wider tensor: the bytes of a copy, without one."""
    whole, seed = torch.randn(4, 5, 3, 8, 64).to(dtype), torch.tensor([5])
    rows = whole.view(20, 1536)
    parts = [whole[:, :, 1], whole[:, :, 2].transpose(1, 2), rows[:, 512:1024], rows[:, 8:24], rows[3:7, 16:], rows[:1, 8:], rows[:, :8], whole[:, :, :, 3]]
    for t in parts:
        for bits in (1, 2, 3, 4, 8):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                code = forms.Code(t, bits, seed)
            assert "aten::copy_" not in {event.name for event in profile.events()}, (t.shape, t.stride())
            assert torch.equal(code.bytes, forms.Code(t.clone(), bits, seed).bytes), (t.shape, t.stride(), bits)
    for t in (rows[:, 1:9], rows[:, 8:20], whole[:, :, 1, ::2], rows.flatten()[4:]):  # not at multiples of 8 values, or of 16 bytes
        assert torch.equal(forms.Code(t, 4, seed).bytes, forms.Code(t.clone(), 4, seed).bytes), (t.shape, t.stride())


class Passes(TorchDispatchMode):
    """Counts ops that read or write `large` values or more, but for views."""

    def __init__(self, large):
        super().__init__()
        self.large, self.found = large, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, tensors = func.overloadpacket.__name__, [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if not name.startswith("empty") and not func.is_view and any(t.numel() >= self.large for t in tensors):
            self.found[name] += 1
        return out


class Block(nn.Module):
    def __init__(self, d=256, heads=4):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).split(d, 2))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def added_passes(forward, leaves):
    """What packing adds to torch's own passes over large tensors, in forward and in backward."""
    found = []
    packing = satchel.packing(min_bytes=1024)
    for context in (packing, packing, contextlib.nullcontext()):  # twice: tables are made first
        passes = Passes(4096), Passes(4096)
        with context, passes[0]:
            loss = forward()
        with passes[1]:
            torch.autograd.grad(loss, leaves)
        found.append(passes)
    return tuple(dict(packed.found - plain.found) for packed, plain in zip(*found[1:]))


def test_packing_adds_no_pass_of_torchs_own():
    """Each field of a transformer is one op there and one back; the layer behind attention reads attention's code."""
    block, x = Block(), torch.randn(2, 16, 256)
    forth, back = added_passes(lambda: block(x).sum(), list(block.parameters()))
    assert forth == {"pack_by_id": 9, "pack_slope": 1} and back == {"unpack_by_id": 10, "unpack_table_by_id": 1}, (forth, back)


@pytest.mark.parametrize(
    "name, forth, back",
    [
        ("relu", {"pack_mask": 1}, {"unpack_table_by_id": 1}),
        ("relu6", {"hardtanh_backward": 1, "pack_mask": 1}, {"unpack_table_by_id": 1}),
        ("hardsigmoid", {"hardsigmoid_backward": 1, "pack_mask": 1}, {"unpack_table_by_id": 1}),
        ("silu", {"pack_slope": 1}, {"unpack_table_by_id": 1}),
        ("elu", {"elu_backward": 1, "pack_by_id": 1}, {"unpack_by_id": 1, "clamp_": 1, "log_": 1}),
        ("softplus", {"softplus_backward": 1, "pack_by_id": 1}, {"unpack_by_id": 1, "logit_": 1}),
        ("tanh", {"tanh_backward": 1, "pack_by_id": 1}, {"unpack_by_id": 1, "rsub": 1, "clamp_": 1, "sqrt_": 1}),
    ],
)
def test_passes_of_activations(name, forth, back):
    x = torch.randn(64, 64, requires_grad=True)
    assert added_passes(lambda: getattr(F, name)(x * 1).sum(), [x]) == (forth, back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_norms(dtype):
    x, norm = torch.randn(64, 64, dtype=dtype, requires_grad=True), nn.BatchNorm1d(64, dtype=dtype)
    assert added_passes(lambda: norm(x * 1).sum(), [x]) == ({"addcmul": 1, "pack_by_id": 1}, {"unpack_by_id": 1, "addcmul": 1})


def attention_node(out):
    while not type(out).__name__.startswith("ScaledDotProduct"):
        out = out.next_functions[0][0]
    return out


def test_attention_gets_the_strides_that_a_clone_has():
    """Else its gradients come in another order, and each is copied on its way to the layer before."""
    x = torch.randn(2, 16, 3 * 64, requires_grad=True)
    q, k, v = (y.view(2, 16, 4, -1).transpose(1, 2) for y in (x * 1).split(64, 2))
    with satchel.packing(min_bytes=0):
        out = F.scaled_dot_product_attention(q, k, v)
    node = attention_node(out.grad_fn)
    with torch.no_grad():
        for name, t in (("query", q), ("key", k), ("value", v)):
            assert getattr(node, "_saved_" + name).stride() == t.clone().stride() != t.contiguous().stride(), name


def test_a_layer_reads_the_code_of_the_result_before_it():
    """In attention's bits; its own gradient and attention's are right in the mean, again with retain_graph, and nothing stays behind."""
    block, x, weights = Block(64, 2), torch.randn(2, 16, 64), torch.randn(2, 16, 64)

    def loss(context):
        with context:
            return (block(x) * weights).sum()

    p = satchel.packing("2/4/8", min_bytes=1024, meter=True)
    first = loss(p)
    lines = {f"{line.node}.{line.field}": line for line in p.meter.lines if line.field == "output"}
    (output,) = lines.values()
    reader = p.meter.lines[p.meter.lines.index(output) + 1 :]
    reader = next(line for line in reader if line.field == "mat1")
    assert (output.kept, reader.kept, reader.after) == ("4 bits", "4 bits", 0) and output.after > 0
    (code,) = (o for o in gc.get_objects() if type(o) is forms.Reread)
    code = weakref.ref(code.code)
    parameters = [block.o.weight, block.qkv.weight]
    once, again = (torch.autograd.grad(first, parameters, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again)) and code() is not None
    del first
    assert code() is None

    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss(contextlib.nullcontext()), parameters)])
    draws = []
    for seed in range(100):
        found = torch.autograd.grad(loss(satchel.packing("2/4/8", min_bytes=1024, seed=seed)), parameters)
        draws.append(torch.cat([g.flatten() for g in found]) - exact)
    one, mean = torch.stack(draws).square().sum(1).mean().sqrt(), torch.stack(draws).mean(0).norm()
    assert 0.8 < float(10 * mean / one) < 1.3  # 1/√100 of one draw's error, as in test_unbiased.py


def test_a_factor_and_a_layer_do_not_share_a_draw():
    """x·(x·W): W's gradient is a product of both reads of x, which must be draws apart."""
    x, layer, w = torch.randn(64, 64), nn.Linear(64, 64, bias=False), nn.Parameter(torch.randn(64, 64))
    with satchel.packing("4/4/8", meter=True) as p:
        h = torch.sigmoid(layer(x))
        h * torch.mm(h, w)
    lines = [line for line in p.meter.lines if (line.node, line.field) in (("MmBackward0", "self"), ("MulBackward0", "self"))]
    assert sum(line.after > 0 for line in lines) == len(lines) == 3, p.meter.table()


def test_layouts_are_forgotten():
    """The ops know a layout for as long as a code or a cache holds it."""
    x, seed = torch.randn(3, 77), torch.tensor([1])
    code = forms.Code(x, 3, seed)
    number = code.like.id
    for cache in (forms.code_layout, forms._plain_layout):
        cache.cache_clear()
    gc.collect()
    assert torch.equal(code.restore(), forms.Code(x, 3, seed).restore()) and number in _ops._layouts
    forms.code_layout.cache_clear()
    del code
    gc.collect()
    assert number not in _ops._layouts
    with pytest.raises(RuntimeError, match=r"\[unpack_by_id\] layout must be a number that layout_id\(\) gave, got"):
        ops.unpack_by_id(torch.zeros(8, dtype=torch.uint8), number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("f", [F.hardswish, F.elu, F.celu, F.selu, F.softplus, torch.sigmoid, torch.tanh, lambda x: F.softplus(x, 3, 17), lambda x: F.elu(x, 2)])
def test_slopes_are_float32_whatever_the_type(f, dtype):
    """Torch's own gradient of 1, not rounded to the type; and the value that is given back has the slope."""
    x = (3 * torch.randn(64, 64)).to(dtype).requires_grad_()
    y = f(x * 1)
    node = y.grad_fn
    name = type(node).__name__
    pair = forms.slope_of(node, name, dtype)
    saved = getattr(node, "_saved_result" if hasattr(node, "_saved_result") else "_saved_self").detach()
    number = pair[0](saved)

    def slope(v):
        """The slope in float64 at a saved value, which is the result of tanh and sigmoid."""
        v = v.double()
        if name in ("TanhBackward0", "SigmoidBackward0"):
            return 1 - v * v if name[0] == "T" else v * (1 - v)
        v.requires_grad_()
        return torch.autograd.grad(f(v).sum(), v)[0]

    assert number.dtype is torch.float32 and (number - slope(saved)).abs().max() < 2e-6
    back = pair[1](number.clone())
    assert (slope(back.clamp(-1e4, 1e4)) - number).abs().max() < 2e-6
