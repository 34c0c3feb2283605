"""Converted models on a GPU: the CPU's bytes, torch's gradients, and the fused passes beside the unfused ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import satchel
from satchel._ops import ops, parse_spec

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and satchel.cuda_compiled()), reason="needs a GPU and CUDA kernels")

EXACT = "satchel,bits=32"


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def net():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Dropout(0.0), nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 16, 1, stride=2), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 9, 64),
        nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip


def flat(model, x, context=None):
    with context or torch.enable_grad():
        loss = F.cross_entropy(model(x).float(), torch.arange(x.shape[0], device=x.device) % 10)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]), satchel.saved(loss).by_kind()


def image(count=64):
    return torch.randn(count, 3, 32, 32, device="cuda")


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_exact_saves_give_torchs_gradients(order):
    model, x = net().cuda().to(memory_format=order), image().contiguous(memory_format=order)
    expected, _ = flat(model, x)
    made, _ = flat(satchel.convert(model, EXACT), x)
    assert float((made - expected).norm() / expected.norm()) < 1e-4  # float32 sums in other orders


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("half", [False, True])
def test_gradients_are_right_in_the_mean(order, half):
    """channels_last takes the fused passes."""
    model, x = net().cuda().to(memory_format=order), image().contiguous(memory_format=order)

    def run(m):
        return flat(m, x, torch.autocast("cuda", torch.bfloat16) if half else None)[0]

    expected = run(satchel.convert(copy.deepcopy(model), EXACT))
    satchel.convert(model)
    draws = [run(model) for _ in range(64)]
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    # bf16 products differ by a few thousandths between ways to the same value; noise is far above that.
    assert float((sum(draws) / 64 - expected).norm() * 8 / one) < (1.5 if half else 1.3)


def test_bytes_are_the_cpus():
    """As many, whichever kernels wrote them."""
    model, x = net().to(memory_format=torch.channels_last), image(16).cpu()
    cpu = flat(satchel.convert(model), x)[1]
    for order in (torch.contiguous_format, torch.channels_last):
        assert flat(model.cuda().to(memory_format=order), x.cuda().contiguous(memory_format=order))[1] == cpu


def bits_of(spec):
    return 3 if spec.endswith("bits=3") else 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["satchel", "satchel,bits=3"])
@pytest.mark.parametrize("channels", [32, 48, 512])
def test_the_fused_pass_writes_packs_bytes(channels, spec, dtype):
    numbers, rows = list(parse_spec(spec)), 4096
    x = torch.randn(rows, channels).to(dtype)
    mean, rstd = torch.randn(channels) * 0.1, torch.rand(channels) + 0.5
    gamma, beta = torch.randn(channels), torch.randn(channels) * 0.3
    if not ops.norm_act_fits(rows, channels, numbers):
        pytest.skip("no fused kernel")
    z = torch.empty_like(x, device="cuda")
    seed = torch.tensor([77], device="cuda")
    made = ops.norm_act(x.cuda(), z, *(t.cuda() for t in (mean, rstd, gamma, beta)), seed, numbers)
    values = (x.float() - mean) * rstd
    expected = satchel.pack(values, spec, 77, gamma=gamma, beta=beta)
    table = slice(*(rows * channels // 256 * (32 * bits_of(spec) + 4) + n * 16 * channels for n in (0, 1)))  # t, γ, β, mean of off values
    same = made.cpu() == expected.bytes
    # Means are sums, whose order is the GPU's own: some thousand terms of order 1. All other bytes are the CPU's.
    means = [bytes_[table].view(torch.float32)[3::4] for bytes_ in (made.cpu(), expected.bytes)]
    assert torch.allclose(*means, rtol=1e-4, atol=1e-5)
    same[table].view(channels, 16)[:, 12:] = True
    assert bool(same.all())
    y = torch.addcmul(beta, values, gamma).relu().to(dtype)
    assert torch.allclose(z.cpu().float(), y.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    again = ops.norm_act_input(made, None, rows, channels, numbers, 0.0, 8, 24, torch.float32).cpu()
    on = ops.unpack_mask(ops.side_on(made, [rows, channels], numbers, channels, 1), [rows, channels], [channels, 1], torch.bool).cpu()
    rebuilt = torch.where(on, torch.addcmul(beta, satchel.unpack(expected), gamma), 0.0)[8:24]
    assert torch.allclose(again, rebuilt, rtol=1e-5, atol=1e-5)


def test_the_fused_backward_is_the_unfused_ones():
    numbers, rows, channels = list(parse_spec("satchel")), 8192, 64
    x, g = torch.randn(rows, channels, device="cuda"), torch.randn(rows, channels, device="cuda")
    gamma, beta, rstd = torch.randn(channels, device="cuda"), torch.randn(channels, device="cuda") * 0.3, torch.rand(channels, device="cuda") + 0.5
    packed = satchel.pack(x, "satchel", 3, gamma=gamma, beta=beta)
    on = ops.unpack_mask(ops.side_on(packed.bytes, [rows, channels], numbers, channels, 1), [rows, channels], [channels, 1], torch.float32)
    hat, gz = satchel.unpack(packed), g * on
    sums = (gz * hat).sum(0), gz.sum(0)
    expected = gamma * rstd * (gz - sums[1] / rows - hat * sums[0] / rows)
    dx = g.clone()
    made = ops.norm_act_back(dx, packed.bytes, rstd, numbers, True, True)
    for a, b in ((made[0], sums[0]), (made[1], sums[1]), (dx, expected)):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_parts_of_codes():
    for spec, shape in (("bits=2", (6, 40, 33)), ("satchel", (12, 7, 64))):
        numbers = list(parse_spec(spec))
        given = {} if spec == "bits=2" else {"gamma": torch.randn(64), "beta": torch.randn(64), "dim": 2}
        packed = satchel.pack(torch.randn(shape), spec, 5, **given)
        whole = satchel.unpack(packed).flatten()
        for first, last in ((0, 100), (777, 3000), (5000, packed.bytes.numel() and whole.numel())):
            part = ops.unpack_part(packed.bytes.cuda(), list(shape), torch.float32, numbers, packed.channels, packed.inner, first, last)
            assert torch.equal(part.cpu(), whole[first:last])


def test_another_stream():
    model, x = satchel.convert(net().cuda(), EXACT), image()
    expected, _ = flat(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made, _ = flat(model, x)
    stream.synchronize()
    assert float((made - expected).norm() / expected.norm()) < 1e-4


def test_a_deferred_norm_is_packed_on_its_own_stream():
    """Another branch, on another stream, has it packed: not before the norm's input is there."""
    first, norm, other = nn.Linear(256, 256).cuda(), nn.LayerNorm(256).cuda(), nn.Linear(256, 256).cuda()
    x = torch.randn(256, 256, device="cuda")
    expected = torch.autograd.grad(norm(first(x)).pow(3).sum(), first.weight)[0]
    satchel.convert(nn.Sequential(first, norm, other), "int8")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other(x)  # its kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # 0.1 s
    y = norm(first(x))
    with torch.cuda.stream(stream):
        other(x)
    made = torch.autograd.grad(y.pow(3).sum(), first.weight)[0]
    torch.cuda.synchronize()
    assert float((made - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(3, 2, 1, 1, False), (2, 2, 0, 1, False), (3, 2, 1, 1, True), ((3, 2), (2, 1), (1, 0), (2, 1), False)])
def test_max_pools_are_torchs(window, dtype):
    k, s, p, d, ceil = window
    x = torch.randn(4, 16, 17, 19, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    g = torch.randn_like(F.max_pool2d(x, k, s, p, d, ceil))
    made, kept = [], []
    for convert in (False, True):
        for order in (torch.channels_last, torch.contiguous_format):
            pool = nn.MaxPool2d(k, s, p, d, ceil_mode=ceil)
            y = x.detach().contiguous(memory_format=order).requires_grad_()
            out = (satchel.convert(pool) if convert else pool)(y)
            if convert:
                kept.append(satchel.saved(out).bytes)
            made.append((out, *torch.autograd.grad(out, y, g)))
    for out, dx in made[1:]:
        assert torch.equal(out, made[0][0])
        torch.testing.assert_close(dx, made[0][1], rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2 if dtype is torch.bfloat16 else 1e-5)
    assert kept[0] == kept[1]


def test_a_captured_step_draws_anew():
    torch.manual_seed(0)
    model = net().cuda().to(memory_format=torch.channels_last)
    x, y = image().contiguous(memory_format=torch.channels_last), torch.arange(64, device="cuda") % 10

    def step():
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()

    def flat_gradient():
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    satchel.convert(model, EXACT)
    step()
    expected = flat_gradient().clone()
    satchel.convert(model)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    draws = []
    for _ in range(64):
        graph.replay()
        draws.append(flat_gradient().clone())
    assert not torch.equal(draws[0], draws[1])
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    assert float((sum(draws) / 64 - expected).norm() * 8 / one) < 1.3
