"""A batch norm with what follows it as one op, and the pass that puts it into compiled models."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache

import satchel
from satchel._ops import ops
from satchel._policy import Bits
from satchel.graph_layers import LayerPass
from satchel.norm_ops import ACT, ADD, ALONE, specs

FORMS = {"act": ACT, "add": ADD, "alone": ALONE}


def given(form, shape=(16, 32, 16, 16), dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * 3 + 1).to(dtype)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    skip = torch.randn(shape, generator=g).to(dtype) if form == ADD else None
    gamma, beta = torch.rand(shape[1], generator=g) + 0.5, torch.randn(shape[1], generator=g) * 0.3
    gamma[0], gamma[1] = -0.7, 0.0
    return x, skip, gamma, beta


def op(form, x, skip, gamma, beta, seeds, method="satchel"):
    found = specs(method, form, x.numel() // x.shape[1], x.shape[1], x.dtype, x.is_cuda, x.dim() > 2)
    assert found is not None
    return ops.norm(x, skip, gamma, beta, seeds, 1e-5, form, *map(list, found)), found


def plain(form, x, skip, gamma, beta):
    y = F.batch_norm(x.float(), None, None, gamma, beta, True)
    y = y if skip is None else y + skip.float()
    return y if form == ALONE else y.relu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 32, 16, 16), (4096, 24), (64, 16, 100)])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_forward_is_torchs(form, shape, dtype):
    x, skip, gamma, beta = given(form, shape, dtype)
    (z, _, _, mean, rstd, var), _ = op(form, x, skip, gamma, beta, torch.tensor([1, 2]))
    expected = plain(form, x, skip, gamma, beta)
    assert z.dtype is dtype and z.shape == x.shape
    torch.testing.assert_close(z.float(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2 if dtype is torch.bfloat16 else 1e-4)
    axes = [d for d in range(x.dim()) if d != 1]
    torch.testing.assert_close(var, x.float().var(axes, correction=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean, x.float().mean(axes), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rstd, (var + 1e-5).rsqrt())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_gradients_are_right_in_the_mean(form):
    x, skip, gamma, beta = given(form)
    leaves = [t.requires_grad_() for t in (x, skip, gamma, beta) if t is not None]
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad((plain(form, x, skip, gamma, beta) * weight).sum(), leaves)
    draws, sums, one = 64, [torch.zeros_like(t) for t in leaves], [0.0] * len(leaves)
    for i in range(draws):
        (z, *_), _ = op(form, x, skip, gamma, beta, torch.tensor([2 * i, 2 * i + 1]))
        for k, g in enumerate(torch.autograd.grad((z * weight).sum(), leaves)):
            sums[k] += g / draws
            one[k] += float((g - expected[k]).square().sum()) / draws
    for total, truth, error in zip(sums, expected, one):
        if error**0.5 < 1e-4 * float(truth.norm()):  # exact: β's, the skip's
            torch.testing.assert_close(total, truth, rtol=1e-3, atol=1e-3)
        else:
            assert float((total - truth).norm()) * draws**0.5 / error**0.5 < 1.3
            assert error**0.5 < float(truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_layer_reads_what_convert_would_keep(dtype):
    """The bytes are those of the codec, and norm_output() is z but for the code's noise."""
    x, _, gamma, beta = given(ACT, dtype=dtype)
    (z, code, summed, mean, rstd, _), found = op(ACT, x, None, gamma, beta, torch.tensor([7, 8]))
    hat = (x.float() - mean.view(-1, 1, 1)) * rstd.view(-1, 1, 1)
    packed = satchel.pack(hat, ops.spec_text(list(found[0])), 7, gamma=gamma, beta=beta)
    assert summed.numel() == 0 and torch.equal(code, packed.bytes)
    again = ops.norm_output(code, list(x.shape), dtype, ACT, list(found[0]))
    assert again.stride() == z.stride() and bool((again[z == 0] == 0).all())
    mean_of = sum(
        ops.norm_output(op(ACT, x, None, gamma, beta, torch.tensor([s, 0]))[0][1], list(x.shape), torch.float32, ACT, list(found[0])) / 64
        for s in range(64)
    )
    assert float((mean_of - z.float()).norm() / z.float().norm()) < 0.08


def test_a_sum_is_read_from_its_own_code():
    x, skip, gamma, beta = given(ADD)
    (z, _, summed, *_), found = op(ADD, x, skip, gamma, beta, torch.tensor([7, 8]))
    again = ops.norm_output(summed, list(x.shape), torch.float32, ADD, list(found[1]))
    packed = satchel.pack(z, ops.spec_text(list(found[1])), 8)
    assert torch.equal(summed, packed.bytes) and torch.equal(again, satchel.unpack(packed))


# ---- the pass ------------------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A stem, and a block whose skip has a norm of its own, as torchvision writes them."""

    def __init__(self, inplace=True, swapped=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace))
        self.c1, self.b1 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.c2, self.b2 = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.down = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32))
        self.relu, self.out = nn.ReLU(inplace), nn.Linear(32, 10)
        self.inplace, self.swapped = inplace, swapped

    def forward(self, x, y):
        x = self.stem(x)
        out = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        skip = self.down(x)
        if self.inplace:
            out += skip
        else:
            out = skip + out if self.swapped else out + skip
        return F.cross_entropy(self.out(self.relu(out).mean((2, 3))), y)


def batch(n=16):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 16, 16, generator=g), torch.randint(0, 10, (n,), generator=g)


class Seen:
    """Graphs as they are after the passes."""

    def __init__(self):
        self.forms, self.saved = [], None


def compiled(model, bits=2, min_bytes=1024, both=True, flow=4):
    """Both passes, run op by op: Inductor's own compilation takes a minute on a CPU."""
    given = f"{bits}/{flow}/8"
    seen, pack, norm = Seen(), satchel.PackPass(given, min_bytes=min_bytes), LayerPass(Bits.of(given, "test"), min_bytes)

    def partition(module, inputs, **kwargs):
        pack(module.graph)
        module.recompile()
        forward, backward = min_cut_rematerialization_partition(module, inputs, **kwargs)
        made = {n.name for n in forward.graph.nodes if n.op == "call_function"}
        outputs = next(n for n in forward.graph.nodes if n.op == "output").args[0][1:]
        seen.saved = [n.meta["val"] for n in outputs if isinstance(n, torch.fx.Node) and n.name in made]
        return forward, backward

    def run(module, inputs):
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        if both:
            norm(module.graph)
            module.recompile()
        seen.forms = [n.args[6] for n in module.graph.nodes if n.target is ops.norm.default]
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table())(module, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), seen


def gradients(f, model, args):
    return torch.cat([g.flatten() for g in torch.autograd.grad(f(*args), list(model.parameters()))])


@pytest.mark.parametrize("inplace,swapped", [(True, False), (False, False), (False, True)])
def test_norms_sums_and_relus_become_one_op(inplace, swapped):
    torch.manual_seed(0)
    model, args = Residual(inplace, swapped), batch()
    expected, truth = model(*args).item(), gradients(model, model, args)
    f, seen = compiled(model)
    assert f(*args).item() == pytest.approx(expected, rel=1e-5)
    assert sorted(seen.forms) == [ACT, ACT, ADD, ALONE]
    large = [v for v in seen.saved if v.dtype is not torch.uint8 and v.numel() >= 4096]
    assert not large, [(v.shape, v.dtype) for v in large]
    draws, mean, one = 40, torch.zeros_like(truth), 0.0
    for _ in range(draws):
        g = gradients(f, model, args) - truth
        mean += g / draws
        one += float(g.square().sum()) / draws
    assert 0.7 < float(mean.norm()) * draws**0.5 / one**0.5 < 1.3
    assert one**0.5 < 0.6 * float(truth.norm())


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 32])
def test_any_number_of_bits(bits):
    """One code of norm and ReLU has 2 or 3 bits. With others, and in exact groups, PackPass alone does it."""
    torch.manual_seed(0)
    model, args = Residual(), batch()
    truth = gradients(model, model, args)
    f, seen = compiled(model, bits)
    draws = torch.stack([gradients(f, model, args) - truth for _ in range(24)])
    assert sorted(seen.forms) == ([ACT, ACT, ADD, ALONE] if bits == 3 else [])
    # Without a bias √24 times the mean's error is one draw's; the ratio of these two spreads by less than 0.1.
    one, mean = draws.square().sum(1).mean().sqrt(), draws.mean(0).norm() * 24**0.5
    assert 0.6 < mean / one < 1.4 if bits < 32 else one < 1e-4 * truth.norm()
    assert one < (1.5 if bits == 1 else 0.4) * truth.norm()
    if bits < 32:
        large = [v for v in seen.saved if v.dtype is not torch.uint8 and v.numel() >= 4096]
        assert not large, [(v.shape, v.dtype) for v in large]


def test_what_flows_back_into_the_norm_has_a_code_of_its_own():
    """z·z behind norm and ReLU: the norm's gradient multiplies g·z by its code, so z must not be read from that."""

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)

        def forward(self, x):
            z = self.norm(self.conv(x)).relu()
            return (self.out(z * z) + self.out(z)).square().mean()

    model, x = Squared(), batch()[0]
    first = list(model.conv.parameters()) + list(model.norm.parameters())
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(model(x), first)])
    f, seen = compiled(model, flow=2)
    draws = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(f(x), first)]) for _ in range(100)]) - truth
    assert seen.forms == [ACT]
    ratio = float(draws.mean(0).norm() * 10 / draws.square().sum(1).mean().sqrt())
    assert 0.7 < ratio < 1.3, ratio


def test_a_sums_code_is_read_once_on_a_path():
    """z·conv(z) behind norm, sum and ReLU: the convolution's gradient is zᵀ·(g·z), and of its two reads of z one alone is of the sum's code."""
    conv, norm, out = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)
    x, skip, weights = batch()[0], torch.randn(16, 16, 14, 14), torch.rand(16, 16, 14, 14)

    def loss(x, skip):
        z = (norm(conv(x)) + skip).relu()
        return (z * out(z) * weights).sum()

    def diagonal(f):
        return torch.autograd.grad(f(x, skip), out.weight)[0][:, :, 0, 0].diagonal()

    truth = diagonal(loss)
    f, seen = compiled(loss, flow=2)
    draws = torch.stack([diagonal(f) for _ in range(60)]) - truth
    assert seen.forms == [ADD]
    ratio = float(draws.mean(0).norm() * 60**0.5 / draws.square().sum(1).mean().sqrt())
    assert 0.5 < ratio < 1.7, ratio


def test_one_code_serves_norm_relu_and_the_next_layer():
    """Fewer bytes than by the joint graph's pass alone, which codes each reader's value."""
    torch.manual_seed(0)
    model, args = Residual(), batch()
    kept = {}
    for both in (False, True):
        f, seen = compiled(model, both=both)
        f(*args)
        kept[both] = sum(v.numel() * v.element_size() for v in seen.saved)
    assert kept[True] < 0.75 * kept[False]


def test_running_statistics_are_torchs():
    torch.manual_seed(0)
    model, args = Residual(), batch()
    other = Residual()
    other.load_state_dict(model.state_dict())
    f, _ = compiled(model)
    for _ in range(3):
        f(*args).backward()
        other(*args).backward()
    for (name, ours), (_, theirs) in zip(model.named_buffers(), other.named_buffers()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)
        assert not ours.requires_grad


def forms_of(model, *args):
    f, seen = compiled(model)
    f(*args)
    return seen.forms


class Lone(nn.Module):
    def __init__(self, after, norm=None):
        super().__init__()
        self.c, self.b, self.after = nn.Conv2d(3, 16, 3), norm or nn.BatchNorm2d(16), after

    def forward(self, x):
        return self.after(self.b(self.c(x))).sum()


def test_what_else_reads_a_norm():
    x = batch()[0]
    assert forms_of(Lone(F.silu), x) == [ALONE]
    assert forms_of(Lone(lambda y: F.relu(y) + y), x) == [ALONE]  # two readers
    assert forms_of(Lone(lambda y: F.relu(y + 1.0)), x) == [ALONE]  # no tensor
    assert forms_of(Lone(lambda y: F.relu(y + y)), x) == [ALONE]
    assert forms_of(Lone(lambda y: F.relu(torch.add(y, torch.ones(y.shape), alpha=2))), x) == [ALONE]
    assert forms_of(Lone(lambda y: F.relu(y + torch.ones(16, 1, 1))), x) == [ALONE]  # another shape
    assert forms_of(Lone(torch.relu), x) == [ACT]
    assert forms_of(Lone(lambda y: y.relu()), x) == [ACT]
    assert forms_of(Lone(lambda y: y.add(torch.ones(y.shape)).relu_()), x) == [ADD]
    changed = Lone(lambda y: torch.ones(y.shape).add_(y).relu())  # the skip is changed: only the norm is ours
    assert forms_of(changed, x) == [ALONE]


def test_what_is_left_to_torch():
    x = batch()[0]
    assert forms_of(Lone(F.relu).eval(), x) == []
    assert forms_of(Lone(F.relu, nn.BatchNorm2d(16, affine=False)), x) == []
    assert forms_of(Lone(F.relu, nn.BatchNorm2d(16, momentum=None)), x) == []
    assert forms_of(Lone(F.relu, nn.GroupNorm(4, 16)), x) == []
    assert forms_of(Lone(F.relu, nn.BatchNorm2d(16, track_running_stats=False)), x) == [ACT]
    with torch.no_grad():
        assert forms_of(Lone(F.relu), x) == []
    f, seen = compiled(Lone(F.relu), min_bytes=1 << 24)
    f(x)
    assert seen.forms == []


def test_seeds_differ_between_steps_and_layers():
    torch.manual_seed(0)
    model, args = Residual(), batch()
    f, _ = compiled(model)
    first, second = gradients(f, model, args), gradients(f, model, args)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    third = gradients(f, model, args)
    torch.manual_seed(3)
    assert torch.equal(third, gradients(f, model, args))


def test_through_inductor():
    torch.manual_seed(0)
    model, args = Residual(), batch()
    truth = gradients(model, model, args)
    torch._dynamo.reset()
    with fresh_cache():
        f = satchel.compile(model, min_bytes=1024)
        draws = [gradients(f, model, args) for _ in range(16)]
    assert any("satchel_stable.norm" in line.made_by for line in f.satchel_pass.report)
    one = sum(float((g - truth).square().sum()) for g in draws) / 16
    assert float((sum(draws) / 16 - truth).norm()) < 1.4 * (one / 16) ** 0.5


def test_another_pass_is_refused():
    with pytest.raises(ValueError, match=r"\[compile\] options must leave pre_grad_custom_pass to Satchel"):
        satchel.compile(nn.Linear(2, 2), options={"pre_grad_custom_pass": lambda graph: None})


def test_bad_arguments():
    x, _, gamma, beta = given(ACT)
    with pytest.raises(RuntimeError, match=r"a spec has 11 numbers"):
        ops.norm(x, None, gamma, beta, torch.tensor([1, 2]), 1e-5, ACT, [2], [])
    (_, code, summed, _, rstd, _), found = op(ACT, x, None, gamma, beta, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match=r"bytes must be"):
        ops.norm_backward(x, code[:-1].clone(), summed, rstd, gamma, ACT, *map(list, found), True, False)
    with pytest.raises(RuntimeError, match=r"bytes must be"):
        ops.norm_output(code[:-1].clone(), list(x.shape), torch.float32, ACT, list(found[0]))
    for bad, rule in (
        ((x.double(), None, gamma, beta), "tensor must be float32"), ((x, None, gamma[:1], beta), "gamma must hold 32 float32 numbers"),
        ((x, x, gamma, beta), "a skip must come with form add alone"), ((x[0, :, 0, 0], None, gamma, beta), "a dimension of channels"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"\[norm\] .*" + rule):
            ops.norm(*bad, torch.tensor([1, 2]), 1e-5, ACT, *map(list, found))
    with pytest.raises(RuntimeError, match=r"\[norm\] seeds must be two numbers"):
        ops.norm(x, None, gamma, beta, torch.tensor([1]), 1e-5, ACT, *map(list, found))
    with pytest.raises(RuntimeError, match=r"\[norm_output\] form must be act or add"):
        ops.norm_output(code, list(x.shape), torch.float32, ALONE, list(found[0]))


@pytest.mark.parametrize("after", [lambda y: y.view(16, -1), lambda y: y.as_strided((16, 4096), (4096, 1)), lambda y: y])
def test_the_order_of_memory_is_the_models_own(after):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x):
            return after(F.relu(self.b(self.c(x))))

    model, x = Viewed(), batch()[0]
    f, seen = compiled(model)
    expected = model(x)
    out = f(x)
    assert seen.forms == [ACT] and out.stride() == expected.stride()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_norm_that_is_called_twice_moves_in_order():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=0.9)

        def forward(self, x):
            t = self.c(x)
            a = self.b(t)
            return F.relu(a + F.relu(self.b(t * 3 + 5)))

    torch.manual_seed(0)
    model, x = Twice(), batch()[0]
    other = Twice()
    other.load_state_dict(model.state_dict())
    f, seen = compiled(model)
    f(x)
    other(x)
    assert sorted(seen.forms) == [ACT, ALONE]
    torch.testing.assert_close(model.b.running_mean, other.b.running_mean, rtol=1e-4, atol=1e-4)
