"""On a GPU: the CPU's bytes, torch's current stream, and whole models."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import satchel
from satchel._ops import ops
from satchel.kept import Code, Exp, Mask, SlopeCode

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and satchel.cuda_compiled()), reason="needs a GPU and CUDA kernels")

SPECS = ["bits=2", "bits=1", "bits=3", "bits=8", "bits=4,levels=even", "actnn", "division", "gact", "satchel", "bits=32", "side=relu",
         "side=both,bits=3", "bits=2,block=map", "bits=2,block=row,header=f32", "lowpass=8,part=low", "lowpass=8,part=high"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec, dtype):
    x = torch.randn(4, 6, 10, 16).to(dtype)
    for y in (x, x.to(memory_format=torch.channels_last), x[:, :, ::2], x.flatten()[1:]):
        cpu, gpu = satchel.pack(y, spec, 77), satchel.pack(y.cuda(), spec, 77)
        assert torch.equal(cpu.bytes, gpu.bytes.cpu()), y.stride()
        assert torch.equal(satchel.unpack(cpu).nan_to_num(), satchel.unpack(gpu).cpu().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_gaps_have_the_cpus_bytes(dtype):
    """Parts of each row of a wider tensor, read where they lie; those that no kernel reads so are copied."""
    whole = torch.randn(4, 5, 3, 8, 64).to(dtype)
    rows = whole.view(20, 1536)
    gpu = whole.cuda()
    for part in (lambda w, r: w[:, :, 1], lambda w, r: w[:, :, 2].transpose(1, 2), lambda w, r: r[:, 512:1024], lambda w, r: r[:, 8:24],
                 lambda w, r: r[3:7, 16:], lambda w, r: r[:, :8], lambda w, r: w[:, :, :, 3], lambda w, r: r[:, 1:9], lambda w, r: r[:, 8:20]):
        a, b = part(whole, rows), part(gpu, gpu.view(20, 1536))
        for bits in range(1, 9):
            cpu, cuda = Code(a, bits, torch.tensor([5])), Code(b, bits, torch.tensor([5], device="cuda"))
            assert torch.equal(cpu.bytes, cuda.bytes.cpu()), (a.shape, a.stride(), bits)
            assert torch.equal(cpu.restore(), cuda.restore().cpu()) and cpu.restore().stride() == cuda.restore().stride()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_packed_attention_copies_nothing(backend):
    """q, k and v are parts of one tensor: they are packed where they lie, and come back in an order in which no gradient is copied."""
    x = torch.randn(2, 64, 3 * 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def copies(context):
        found = []
        for _ in range(2):
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile, context, torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                q, k, v = (y.view(2, 64, 4, -1).transpose(1, 2) for y in (x * 1).split(256, 2))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 64, 256)
                torch.autograd.grad(y.float().square().sum(), x)
            found = [event.name for event in profile.events() if event.name in ("aten::copy_", "aten::clone")]
        return len(found)

    assert copies(satchel.packing(min_bytes=0)) <= copies(contextlib.nullcontext())


@pytest.mark.parametrize("spec", ["exact", "blockwise"])
def test_projections_are_near_the_cpus(spec):
    x = torch.randn(256, 128)
    matrices = [ops.draw_projection(torch.tensor([5], device=d), 256, 128, 0, 1, list(satchel._ops.parse_spec(spec))) for d in ("cpu", "cuda")]
    assert torch.equal(matrices[0], matrices[1].cpu())
    assert satchel.unpack(satchel.pack(x.cuda(), spec, 5)).shape == x.shape


def test_masks_and_integers():
    x = torch.randn(1003)
    for value in (x, x.bfloat16(), x > 0, (x > 0)[3:], (x > 0)[:5]):
        assert torch.equal(ops.pack_mask(value), ops.pack_mask(value.cuda()).cpu())
    assert torch.equal(ops.pack_mask((x > 0).cuda()[3:]).cpu(), ops.pack_mask((x > 0)[3:]))
    bits = ops.pack_mask(x.cuda())
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(ops.unpack_mask(bits, [1003], [1], dtype).cpu(), (x > 0).to(dtype))
        assert torch.equal(Mask(x.cuda(), dtype).restore().cpu(), (x > 0).to(dtype))
    inside = Mask(x.cuda(), torch.bfloat16, 0.5, -float("inf")).restore().cpu()
    assert torch.equal(inside, torch.where(x > 0, 0.5, -float("inf")).bfloat16())
    n = torch.randint(0, 12544, (1003,))
    codes = ops.narrow(n.cuda(), 0, 12543)
    assert torch.equal(codes.cpu(), ops.narrow(n, 0, 12543)) and torch.equal(ops.widen(codes, [1003], [1], 0, 14).cpu(), n)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "mish"])
def test_slopes_are_near_the_cpus(kind, dtype, bits):
    """erf, exp and tanh differ in their last bits, so a code may be its neighbour, seldom."""
    x = (torch.randn(64, 1003) * 2).to(dtype)
    cpu, gpu = (SlopeCode(x.to(d), kind, bits, torch.tensor([9], device=d)).restore().cpu() for d in ("cpu", "cuda"))
    assert (cpu != gpu).float().mean() < 1e-3


@pytest.mark.parametrize("bits", range(1, 9))
def test_powers_are_near_the_cpus(bits):
    for shape in ((64, 1003), (32, 65), (3, 5), (256, 4096)):
        x = torch.log_softmax(3 * torch.randn(shape), -1)
        x[0, 0] = -float("inf")
        cpu, gpu = (Exp(x.to(d), bits, torch.tensor([9], device=d)).restore().exp().cpu() for d in ("cpu", "cuda"))
        assert ((cpu - gpu).abs() > 1e-6).float().mean() < 1e-3


def test_another_stream():
    stream = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda")
    expected = satchel.pack(x, "bits=2", 3).bytes
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = x * 1.0
        packed = satchel.pack(y, "bits=2", 3)
    stream.synchronize()
    assert torch.equal(packed.bytes, expected)


@pytest.mark.parametrize("way", ["packing", "compile", "dynamic"])
def test_a_model(way):
    model = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.GELU(),
                          nn.Flatten(), nn.Dropout(0.0), nn.Linear(32 * 13 * 13, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    model = model.cuda().to(memory_format=torch.channels_last)
    x, y = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last), torch.randint(0, 10, (64,), device="cuda")

    def gradients(f, context=None):
        with context or torch.enable_grad(), torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(f(x), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    torch._dynamo.reset()
    expected = gradients(model)
    f = model if way == "packing" else satchel.compile(model, min_bytes=4096, dynamic=way == "dynamic")
    draws = [gradients(f, satchel.packing(seed=s) if way == "packing" else None) for s in range(64)]
    one = torch.stack([(g - expected).square().sum() for g in draws]).mean().sqrt()
    # bf16 products differ by a few thousandths between eager and compiled code; noise is far above that.
    assert float((sum(draws) / 64 - expected).norm() * 8 / one) < 1.5


def test_a_budget_does_not_wait_inside_a_step():
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)).cuda()
    x = torch.randn(1024, 256, device="cuda")
    p = satchel.packing(budget="1 MiB", refresh=1, model=model)
    for _ in range(3):  # tables and kernels are made
        with p:
            loss = model(x).square().mean()
        loss.backward()
    with p:
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert p.meter.after <= 1 << 20 and p.budget._watched.watch.seen and len(set(p.bits_by_field().values())) > 1
