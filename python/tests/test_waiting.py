"""Batch norms of converted models that wait for the ReLU behind them: torch's values and running statistics whoever reads their result,
gradients right in the mean, and one code where a ReLU does."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import satchel
from satchel.layer_waiting import Waiting

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and satchel.cuda_compiled() else [])
CHANNELS = 16


def image(device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, CHANNELS, 16, 16, generator=g).to(device).contiguous(memory_format=torch.channels_last).requires_grad_()


class Net(nn.Module):
    """A norm, and `after`, which gets the norm's result, a second norm's, and a ReLU."""

    def __init__(self, after, inplace=False):
        super().__init__()
        self.a, self.b, self.relu, self.after = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace), after
        with torch.no_grad():
            for i, norm in enumerate((self.a, self.b)):
                g = torch.Generator().manual_seed(9 + i)
                norm.weight.copy_(torch.rand(CHANNELS, generator=g) + 0.5)
                norm.bias.copy_(torch.randn(CHANNELS, generator=g) * 0.3)

    def forward(self, x):
        return self.after(self, self.a(x * 1.5), x)


def add_in_place(net, y, x):
    y += x * 0.5
    return net.relu(y)


def add_both(net, y, x):
    skip = net.b(x * 2)
    y += skip
    return net.relu(y)


AFTER = {
    "relu": (lambda net, y, x: net.relu(y), 1),
    "F.relu": (lambda net, y, x: F.relu(y), 1),
    "torch.relu": (lambda net, y, x: torch.relu(y), 1),
    "method": (lambda net, y, x: y.relu(), 1),
    "sum": (lambda net, y, x: net.relu(y + x), 1),
    "sum, swapped": (lambda net, y, x: F.relu(x + y), 1),
    "torch.add": (lambda net, y, x: net.relu(torch.add(x, y)), 1),
    "sum in place": (add_in_place, 1),
    "both": (add_both, 1),
    "itself": (lambda net, y, x: y, 0),
    "product": (lambda net, y, x: y * 2 + x, 0),
    "sum alone": (lambda net, y, x: y + x, 0),
    "sum of other sizes": (lambda net, y, x: net.relu(y + x[:1]), 0),
    "sum of a number": (lambda net, y, x: net.relu(y + 1), 0),
    "sum with factor": (lambda net, y, x: net.relu(torch.add(y, x, alpha=2)), 0),
    "relu and itself": (lambda net, y, x: net.relu(y) * 2 + y, 1),
    "sum and itself": (lambda net, y, x: net.relu(y + x) + y, 1),
    "sum, relu and sum": (lambda net, y, x: (lambda s: net.relu(s) + s)(y + x), 1),
    "twice": (lambda net, y, x: net.relu(net.b(net.relu(y))), 2),
    "sum in place, read twice": (lambda net, y, x: net.relu(y.add_(x)) + y, 1),
    "sum in place alone": (lambda net, y, x: (y.add_(x), y)[1] * 2, 0),
    "F.relu_": (lambda net, y, x: (F.relu_(y), y)[1] * 2, 1),
    "sum, then itself changed": (lambda net, y, x: (lambda s: (y.mul_(2), s)[1] * 2)(y + x), 0),
    "sum, then ReLU over it": (lambda net, y, x: (lambda s: (F.relu_(y), s)[1] * 2)(y + x), 0),
    "sum, then a second sum over it": (lambda net, y, x: (lambda s: (y.add_(x * 3), s)[1] * 2)(y + x), 0),
    "sum, and itself first": (lambda net, y, x: (lambda s, a: s * 2 + a)(y + x, y * 2), 0),
    "slice": (lambda net, y, x: y[:, :4] * 3, 0),
    "cat": (lambda net, y, x: torch.cat([y, x], 1), 0),
    "in place": (lambda net, y, x: y.mul_(2), 0),
    "silu": (lambda net, y, x: F.silu(y), 0),
    "leaky": (lambda net, y, x: F.leaky_relu(y, 0.1), 0),
}


def copied(after, device, inplace=False):
    plain = Net(after, inplace).to(device)
    return plain, satchel.convert(copy.deepcopy(plain))


def result(net, x):
    out = net(x)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    used = [p for norm in (net.a, net.b) for p in norm.parameters()]
    return out, torch.autograd.grad((out * weight).sum(), [x, *used], allow_unused=True)


def fused_count(out):
    """Nodes of norm and ReLU in one."""
    seen, stack = set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(n for n, _ in node.next_functions)
    return sum("NormReLU" in type(n).__name__ for n in seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", AFTER)
def test_values_statistics_and_gradients(name, inplace, device):
    after, fuses = AFTER[name]
    if inplace and name in ("relu and itself", "sum, relu and sum", "sum in place, read twice"):
        pytest.skip("torch itself reads what was changed in place")
    plain, ours = copied(after, device, inplace)
    x = image(device)
    expected, truth = result(plain, x)
    out = ours(x)
    assert type(out + 0) is torch.Tensor
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert fused_count(out) == fuses
    for (key, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)
    draws = [result(ours, x)[1] for _ in range(40)]
    assert all([g is None for g in got] == [t is None for t in truth] for got in draws)
    noise = whole = 0.0
    for k, t in enumerate(truth):
        if t is None:
            continue
        size, one = float(t.norm()), (sum(float((got[k] - t).square().sum()) for got in draws) / 40) ** 0.5
        off = float((sum(got[k] for got in draws) / 40 - t).norm())
        # A mean of few numbers strays further from its expectation: 4 deviations of a root of n squares.
        assert off * 40**0.5 < (1.2 + 4 / (2 * t.numel()) ** 0.5) * one + 1e-3 * size * 40**0.5
        noise, whole = noise + one**2, whole + size**2
    assert noise < 0.5 * whole


@pytest.mark.parametrize("name", ["relu", "sum in place", "both", "itself", "sum alone"])
def test_bf16(name):
    after, fuses = AFTER[name]
    plain, ours = copied(after, "cpu", True)
    x = image().detach().bfloat16().requires_grad_()
    out, expected = ours(x), plain(x)
    assert out.dtype is torch.bfloat16 and fused_count(out) == fuses
    torch.testing.assert_close(out + 0, expected, rtol=2e-2, atol=2e-2)


def test_looking_does_not_compute():
    net = satchel.convert(Net(AFTER["itself"][0]))
    y = net(image())
    assert type(y) is Waiting
    assert y.shape == (16, CHANNELS, 16, 16) and y.numel() == 16 * CHANNELS * 256 and y.size(0) == 16 and y.dim() == 4
    assert y.grad_fn is not None and not y.is_leaf and isinstance(y, torch.Tensor) and y.device.type == "cpu" and y.is_floating_point()
    assert type(y) is Waiting
    assert bool(torch.isfinite(y).all()) and type(y) is torch.Tensor


@pytest.mark.parametrize("read", [repr, copy.copy, lambda y: y.detach().numpy(), lambda y: y.tolist(), lambda y: float(y.sum()), lambda y: y.stride(),
                                  lambda y: y.data_ptr(), lambda y: y.untyped_storage(), lambda y: torch.stack([y, y]), lambda y: y.clone(),
                                  lambda y: torch.ops.aten.add.Tensor(y, 1), lambda y: y.register_hook(lambda g: g), lambda y: y.retain_grad(),
                                  lambda y: y.data, lambda y: torch._foreach_add([y], 1.0), lambda y: y.requires_grad,
                                  lambda y: y.dtype, lambda y: y.is_complex()])  # fmt: skip
def test_reading_computes(read):
    net = satchel.convert(Net(AFTER["itself"][0]))
    y = net(image())
    read(y)
    assert type(y) is torch.Tensor and bool(torch.isfinite(y).all())


def test_a_function_of_ones_own_sees_values():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    plain, ours = copied(lambda net, y, x: Double.apply(y), "cpu")
    x = image()
    torch.testing.assert_close(ours(x) + 0, plain(x), rtol=1e-4, atol=1e-4)


def test_memory_cannot_be_read_past_python():
    net = satchel.convert(Net(AFTER["itself"][0]))

    @torch.jit.script
    def squared(t: torch.Tensor):
        return t * t

    for read in (squared, torch.vmap(lambda t: t * 2), lambda y: torch._C._nn.gelu(y)):
        y = net(image())
        try:
            out = read(y)
        except RuntimeError as error:
            assert "[convert] a batch norm's result must be read by torch's functions" in str(error)
        else:
            assert bool(torch.isfinite(out).all()), "what asked torch's Python has values"
    y = net(image())
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=r"\[convert\] a batch norm's result must be read"):
        torch.isnan(y)


def test_forward_hooks_see_values():
    plain, ours = copied(AFTER["relu"][0], "cpu")
    seen = {}
    for key, net in (("plain", plain), ("ours", ours)):
        net.a.register_forward_hook(lambda m, i, o, key=key: seen.__setitem__(key, o.detach().clone()))
        net(image())
    torch.testing.assert_close(seen["ours"], seen["plain"], rtol=1e-4, atol=1e-4)


def test_a_result_that_nobody_reads_moves_the_statistics():
    plain, ours = copied(lambda net, y, x: x * 1.0, "cpu")
    x = image()
    for net in (plain, ours):
        net(x)
    gc.collect()
    torch.testing.assert_close(ours.a.running_mean, plain.a.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.a.running_var, plain.a.running_var, rtol=1e-4, atol=1e-5)


def test_the_input_goes_with_the_claim():
    net, x = satchel.convert(Net(AFTER["relu"][0], True)), image()
    inner = []
    net.a.register_forward_pre_hook(lambda m, args: inner.append(weakref.ref(args[0])))
    out = net(x)
    gc.collect()
    assert inner[0]() is None, "the norm's input is kept by nobody"
    out.sum().backward()


@pytest.mark.parametrize("name", ["sum in place", "both", "sum", "sum alone", "itself"])
def test_no_input_outlives_its_norm(name):
    net, x = satchel.convert(Net(AFTER[name][0], True)), image()
    inner = []
    for norm in (net.a, net.b):
        norm.register_forward_pre_hook(lambda m, args: inner.append(weakref.ref(args[0])))
    out = net(x) + 0
    gc.collect()
    assert inner and all(ref() is None for ref in inner)
    out.sum().backward()


def test_what_changes_in_place_is_told():
    def changes(net, y, x):
        net.given.mul_(2)
        return net.relu(y)

    net = satchel.convert(Net(changes))
    net.a.register_forward_pre_hook(lambda m, args: setattr(net, "given", args[0]))
    with pytest.raises(RuntimeError, match=r"\[convert\] x, γ and β must not be changed in place"):
        net(image())

    def changes_before_the_sum(net, y, x):
        net.given.mul_(2)
        return net.relu(y + x)

    net.after = changes_before_the_sum
    with pytest.raises(RuntimeError, match=r"\[convert\] x, γ and β must not be changed in place"):
        net(image())

    def skip_changes(net, y, x):
        k = x * 2
        alias = k.view_as(k)
        s = y + k
        alias.mul_(3)  # nobody can tell that k changes
        return s * 2

    with pytest.raises(RuntimeError, match=r"\[convert\] a skip must not be changed through a view before a sum with it is read"):
        satchel.convert(Net(skip_changes))(image())


@pytest.mark.parametrize("change", [lambda z: z.mul_(2), lambda z: z[:, :4].mul_(2)])
def test_a_claimed_result_may_be_changed(change):
    """torch's own ReLU reads its result in backward; a code does not change."""

    def after(net, y, x):
        z = net.relu(y + x)
        z = z if isinstance(net.relu, satchel.layers.Layer) else z.clone()
        change(z)
        return z

    plain, ours = copied(after, "cpu")
    x = image()
    expected, truth = result(plain, x)
    out, _ = result(ours, x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    draws = [result(ours, x)[1][0] for _ in range(40)]
    one = (sum(float((g - truth[0]).square().sum()) for g in draws) / 40) ** 0.5
    assert float((sum(draws) / 40 - truth[0]).norm()) * 40**0.5 < 1.3 * one


def test_backward_twice():
    for name in ("relu", "itself", "sum", "both"):
        net, x = satchel.convert(Net(AFTER[name][0])), image()
        loss = net(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(loss, x)


def test_checkpointing_and_no_grad():
    plain, ours = copied(AFTER["relu"][0], "cpu")
    x = image()
    torch.testing.assert_close(checkpoint(ours, x, use_reentrant=False), plain(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert type(ours(x)) is torch.Tensor
    ours.eval()
    assert type(ours(x)) is torch.Tensor
    with torch.autograd.graph.save_on_cpu():
        ours.train()(x).sum().backward()


def test_contiguous_images_stay_contiguous():
    net = satchel.convert(Net(AFTER["relu"][0]))
    out = net(image().detach().contiguous().requires_grad_())
    assert out.is_contiguous()


def test_the_next_layer_reads_the_code():
    """Bytes of norm, sum and convolution are those of the kinds alone: no input is coded again."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.b1, self.c2, self.b2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.relu, self.c3 = nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1)

        def forward(self, x):
            out = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
            out += x
            return self.c3(self.relu(out))

    kept = {}
    for order in (torch.contiguous_format, torch.channels_last):
        net = satchel.convert(Block().to(memory_format=order))
        kept[order] = satchel.saved(net(image().detach().contiguous(memory_format=order).requires_grad_()).sum()).by_kind()
    assert kept[torch.channels_last] == kept[torch.contiguous_format], "as many bytes, whichever way"
    assert set(kept[torch.channels_last]) == {"input", "shared", "norm", "statistics"}


@pytest.mark.parametrize("kind", ["1d", "rows"])
def test_other_shapes(kind):
    norm = nn.BatchNorm1d(CHANNELS)
    x = torch.randn(512, CHANNELS) if kind == "rows" else torch.randn(64, 40, CHANNELS).transpose(1, 2)
    x.requires_grad_()
    plain = nn.Sequential(norm, nn.ReLU())
    ours = satchel.convert(copy.deepcopy(plain))
    out = ours(x)
    assert fused_count(out) == 1
    torch.testing.assert_close(out, plain(x), rtol=1e-4, atol=1e-4)
    out.sum().backward()


def test_a_first_read_in_inference_mode_keeps_the_graph():
    net = satchel.convert(Net(AFTER["itself"][0]))
    for after in ("itself", "sum alone"):
        net.after = AFTER[after][0]
        y = net(image())
        with torch.inference_mode():
            float(y.sum())
        assert not y.is_inference()
        y.square().sum().backward()


def test_a_claim_inside_checkpointing():
    plain, ours = copied(lambda net, y, x: y + checkpoint(lambda t: F.relu(t).sin(), y, use_reentrant=False), "cpu")
    x = image()
    out = ours(x)
    torch.testing.assert_close(out + 0, plain(x), rtol=1e-4, atol=1e-4)
    out.sum().backward()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_move_in_the_order_of_calls(momentum):
    results = []
    for ours in (False, True):
        norm = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        norm = satchel.convert(norm) if ours else norm
        a, b = norm(image()), norm(image(seed=1) * 3 + 5)
        (b.sum() + a.sum()).backward()  # read in the other order
        c = norm(image(seed=2))
        norm.eval()
        out = norm(image(seed=3)).detach() + 0  # c waits still
        results.append((norm.running_mean.clone(), out))
        del c
    for ours, theirs in zip(results[1], results[0]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_steps_that_are_computed_again_draw_anew():
    """torch's generator may stand still for a whole epoch."""
    torch.manual_seed(0)
    net, x = satchel.convert(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))), image()

    def gradient():
        return torch.autograd.grad(checkpoint(net, x, use_reentrant=False).square().sum(), net[3].weight)[0]

    first, second, third = gradient(), gradient(), gradient()
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_convolutions_with_lists():
    conv = nn.Conv2d(16, 16, 3)
    conv.padding, conv.stride = [1, 1], [1, 1]
    assert satchel.convert(conv)(image()).shape == (16, 16, 16, 16)


def test_results_are_stored_and_loaded(tmp_path):
    net, x = satchel.convert(nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, 4, 1))), image()
    y = net[0](x)
    z = net[1](net[0](x))
    net[2](z)
    for t in (y, z):
        torch.save(t.detach(), tmp_path / "t.pt")
        torch.save(t, tmp_path / "g.pt")
        for name in ("t.pt", "g.pt"):
            again = torch.load(tmp_path / name)
            torch.testing.assert_close(again.detach(), t.detach())
            net[2](again.detach().requires_grad_()).sum().backward()
