"""The fused norm ops on a GPU beside their CPU way, and through torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import satchel
from satchel._ops import ops
from satchel.norm_ops import ACT, ADD, ALONE, specs

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and satchel.cuda_compiled()), reason="needs a GPU and CUDA kernels")

FORMS = {"act": ACT, "add": ADD, "alone": ALONE}


def given(form, shape, dtype):
    g = torch.Generator().manual_seed(2)
    x, skip = ((torch.randn(shape, generator=g) * 2 + 0.5).to(dtype) for _ in range(2))
    gamma, beta = torch.rand(shape[1], generator=g) + 0.5, torch.randn(shape[1], generator=g) * 0.3
    gamma[0] = -0.7
    return x, skip if form == ADD else None, gamma, beta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 32, 12, 12), (8, 256, 14, 14), (4096, 64), (32, 512, 7, 7)])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_codes_values_and_gradients_are_the_cpus(form, shape, dtype):
    """Statistics are sums in another order, so a value near a threshold may get its neighbour's code, seldom."""
    x, skip, gamma, beta = given(form, shape, dtype)
    cpu_specs = specs("satchel", form, x.numel() // shape[1], shape[1], dtype, False, len(shape) > 2)
    gpu_specs = specs("satchel", form, x.numel() // shape[1], shape[1], dtype, True, len(shape) > 2)
    assert cpu_specs == gpu_specs, "the kernels serve this shape"
    numbers = list(map(list, cpu_specs))
    made = {}
    g = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    for device in ("cpu", "cuda"):
        a, s, ga, be = (None if t is None else t.to(device) for t in (x, skip, gamma, beta))
        z, code, summed, mean, rstd, var = ops.norm(a, s, ga, be, torch.tensor([11, 12], device=device), 1e-5, form, *numbers)
        back = ops.norm_backward(g.to(device), code, summed, rstd, ga, form, *numbers, True, True)
        made[device] = [t.cpu() for t in (z, code, summed, mean, rstd, var, *back)]
        if form != ALONE:
            kept = summed if form == ADD else code
            made[device].append(ops.norm_output(kept, list(shape), dtype, form, numbers[1 if form == ADD else 0]).cpu())
    names = ("z", "code", "sum", "mean", "rstd", "var", "dx", "dskip", "dgamma", "dbeta", "output")
    loose = 1e-2 if dtype is not torch.float32 else 1e-4
    for name, ours, theirs in zip(names, made["cuda"], made["cpu"]):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        if ours.numel() == 0:
            continue
        if ours.dtype is torch.uint8:
            assert float((ours != theirs).float().mean()) < 0.02, name
        elif name in ("dx", "output", "dgamma"):  # read codes: a code that is its neighbour's shows
            assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.05, name
        else:
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=loose, atol=loose * float(theirs.float().abs().max()), msg=name)


def test_any_order_of_memory():
    """What is not rows of channels is copied, a gradient too."""
    x, skip, gamma, beta = (None if t is None else t.cuda() for t in given(ADD, (16, 32, 12, 12), torch.float32))
    numbers = list(map(list, specs("satchel", ADD, 16 * 144, 32, torch.float32, True, True)))
    seeds = torch.tensor([1, 2], device="cuda")
    last = x.contiguous(memory_format=torch.channels_last)
    z, code, summed, _, rstd, _ = ops.norm(x, skip, gamma, beta, seeds, 1e-5, ADD, *numbers)
    other = ops.norm(last, skip, gamma, beta, seeds, 1e-5, ADD, *numbers)
    assert torch.equal(code, other[1]) and torch.equal(z, other[0]) and z.stride() == other[0].stride()
    g = torch.randn(16, 32, 1, 1, device="cuda").expand(x.shape)
    a = ops.norm_backward(g, code, summed, rstd, gamma, ADD, *numbers, True, True)
    b = ops.norm_backward(g.contiguous(memory_format=torch.channels_last), code, summed, rstd, gamma, ADD, *numbers, True, True)
    assert all(torch.equal(u, v) for u, v in zip(a, b))


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.c1, self.b1 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(width, 10)

    def forward(self, x, y):
        x = self.stem(x)
        out = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        out += x
        return F.cross_entropy(self.out(self.relu(out).mean((2, 3))).float(), y)


@pytest.mark.parametrize("half", [False, True])
def test_compiled_gradients_are_right_in_the_mean(half):
    torch.manual_seed(0)
    model = Block().cuda().to(memory_format=torch.channels_last)
    x, y = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last), torch.randint(0, 10, (32,), device="cuda")

    def run(f):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = f(x, y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).float()

    expected = run(model)
    f = satchel.compile(model)
    draws = [run(f) for _ in range(64)]
    assert sum("satchel_stable.norm" in line.made_by for line in f.satchel_pass.report) >= 2
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    assert float((sum(draws) / 64 - expected).norm() * 8 / one) < (1.5 if half else 1.3)


@pytest.mark.parametrize("mode", ["reduce-overhead"])
def test_cuda_graphs_draw_anew(mode):
    torch.manual_seed(0)
    model = Block().cuda().to(memory_format=torch.channels_last)
    x, y = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last), torch.randint(0, 10, (32,), device="cuda")

    def run(f):
        torch.compiler.cudagraph_mark_step_begin()
        return torch.cat([g.flatten() for g in torch.autograd.grad(f(x, y), list(model.parameters()))]).clone()

    expected = run(model)
    f = satchel.compile(model, mode=mode)
    draws = [run(f) for _ in range(40)][8:]  # the first steps are recorded
    assert not torch.equal(draws[0], draws[1])
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    assert float((sum(draws) / 32 - expected).norm() * 32**0.5 / one) < 1.4
