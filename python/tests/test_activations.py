"""A smooth activation as one op, and the pass that puts it into compiled models."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import satchel
from satchel._ops import ops
from satchel._policy import Bits
from satchel.activation_ops import GELU, GELU_TANH, SILU, specs
from satchel.graph_layers import LayerPass

KINDS = {GELU: F.gelu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), SILU: F.silu}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and satchel.cuda_compiled() else [])


def op(x, kind, first=1, output=True):
    found = specs(4, 2, x.numel(), x.dtype, x.is_cuda, output)
    return ops.activation(x, torch.tensor([first, first + 1], device=x.device), kind, *map(list, found)), found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_codes(kind, dtype, device):
    x = (torch.randn(64, 520, generator=torch.Generator().manual_seed(1)) * 2).to(dtype).to(device)
    (z, slopes, coded), found = op(x, kind)
    expected = KINDS[kind](x)
    torch.testing.assert_close(z, expected, rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=1e-2 if dtype is not torch.float32 else 1e-5)
    packed = satchel.pack(z.flatten(), ops.spec_text(list(found[1])), 2)
    assert torch.equal(coded, packed.bytes), "the code is of the result as it stands in memory"
    y = x.double().requires_grad_()
    (true,) = torch.autograd.grad(KINDS[kind](y).sum(), y)
    again = ops.unpack(slopes, [x.numel()], [1], torch.float32, list(found[0])).view(x.shape)
    apart = (again - true).abs()
    assert float(apart.max()) < 0.1 and float((again - true).mean().abs()) < 2e-3  # a step of 4 bits is at most 1.3/15
    alone = op(x, kind, output=False)[0]
    assert torch.equal(alone[0], z) and torch.equal(alone[1], slopes) and alone[2].numel() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right_in_the_mean(kind, device):
    x = (torch.randn(16, 256, generator=torch.Generator().manual_seed(1)) * 1.5).to(device).requires_grad_()
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(2)).to(device)
    (truth,) = torch.autograd.grad((KINDS[kind](x) * weight).sum(), x)
    mean, one = torch.zeros_like(truth), 0.0
    for i in range(64):
        (g,) = torch.autograd.grad((op(x, kind, 2 * i)[0][0] * weight).sum(), x)
        mean += g / 64
        one += float((g - truth).square().sum()) / 64
    assert float((mean - truth).norm()) * 8 / one**0.5 < 1.3 and one**0.5 < 0.1 * float(truth.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_any_order_of_memory(device):
    x = torch.randn(8, 16, 12, 10, device=device)
    last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    (z, *_), _ = op(last, GELU)
    assert z.stride() == last.stride()
    g = torch.randn(8, 16, 1, 10, device=device).expand(x.shape)  # another order, and gaps
    (dx,) = torch.autograd.grad(z, last, g)
    y = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(F.gelu(y), y, g)
    assert float((dx - truth).norm() / truth.norm()) < 0.1
    (gaps, *_), _ = op(x[:, :, ::2], GELU)
    torch.testing.assert_close(gaps, F.gelu(x[:, :, ::2]))


# ---- the pass ------------------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, act=F.gelu, width=256):
        super().__init__()
        self.n, self.up, self.down, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width), act

    def forward(self, x):
        return (x + self.down(self.act(self.up(self.n(x))))).square().mean()


def compiled(model, bits="2/4/8", layers=True):
    """Both passes, run op by op; what the ops are, the pass's report, and what forward keeps."""
    pack, seen = satchel.PackPass(bits, min_bytes=1024), {}

    def partition(module, inputs, **kwargs):
        pack(module.graph)
        module.recompile()
        forward, backward = min_cut_rematerialization_partition(module, inputs, **kwargs)
        outputs = next(n for n in forward.graph.nodes if n.op == "output").args[0][1:]
        seen["saved"] = [n.meta["val"] for n in outputs if isinstance(n, torch.fx.Node) and n.op == "call_function"]
        return forward, backward

    def run(module, inputs):
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        if layers:
            LayerPass(Bits.of(bits), 1024)(module.graph)
            module.recompile()
        seen["ops"] = [(n.args[2], bool(n.args[4])) for n in module.graph.nodes if n.target is ops.activation.default]
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table())(module, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), seen


def gradients(f, model, x):
    return torch.cat([g.flatten() for g in torch.autograd.grad(f(x), list(model.parameters()))])


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_becomes_one_op(kind):
    torch.manual_seed(0)
    model, x = Mlp(KINDS[kind]), torch.randn(64, 256)
    truth = gradients(model, model, x)
    f, seen = compiled(model)
    draws = [gradients(f, model, x) for _ in range(40)]
    assert seen["ops"] == [(kind, True)]
    assert not [v.shape for v in seen["saved"] if v.dtype is not torch.uint8 and v.numel() > 1024]
    one = sum(float((g - truth).square().sum()) for g in draws) / 40
    assert float((sum(draws) / 40 - truth).norm()) * 40**0.5 / one**0.5 < 1.3
    f, seen = compiled(model, layers=False)
    other = sum(float((gradients(f, model, x) - truth).square().sum()) for _ in range(40)) / 40
    assert seen["ops"] == [] and one < 1.1 * other, "no more noise than by the joint graph's pass alone"


def test_which_activations():
    x = torch.randn(64, 256)

    def ops_of(act, bits="2/4/8"):
        f, seen = compiled(Mlp(act), bits)
        f(x)
        return seen["ops"]

    assert ops_of(lambda y: F.silu(y) * y) == [(SILU, False)]  # a gate: no layer reads the result alone
    assert ops_of(lambda y: F.gelu(y).view(-1, 1024)) == [(GELU, True)]
    assert ops_of(lambda y: F.silu(y, inplace=True)) == []
    assert ops_of(F.mish) == []
    assert ops_of(F.gelu, "2/2/8") == [] and ops_of(F.gelu, "32/32/32") == []
    assert ops_of(F.gelu, "2/3/8") == [(GELU, True)]
    with torch.no_grad():
        assert ops_of(F.gelu) == []


class Attention(nn.Module):
    def __init__(self, width=128, uses_all=True):
        super().__init__()
        self.qkv, self.o, self.uses_all = nn.Linear(width, 3 * width), nn.Linear(width, width), uses_all

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, 4, -1).transpose(1, 2) for y in self.qkv(x).split(d, 2))
        if not self.uses_all:
            return self.o((q * k).transpose(1, 2).reshape(b, t, d)).square().mean()
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)).square().mean()


def test_parts_of_one_product_are_coded_in_one():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 64, 128)
    truth = gradients(model, model, x)
    pack = satchel.PackPass(min_bytes=1024)

    def backend(module, inputs):
        def partition(joint, values, **kwargs):
            pack(joint.graph)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, values, **kwargs)

        run = lambda m, i: make_boxed_func(m.forward)  # noqa: E731
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table())(module, inputs)

    torch._dynamo.reset()
    f = torch.compile(model, backend=backend)
    draws = [gradients(f, model, x) for _ in range(40)]
    assert [line.bits for line in pack.report if line.shape[-1] == 384] == [8], pack.report
    one = sum(float((g - truth).square().sum()) for g in draws) / 40
    assert float((sum(draws) / 40 - truth).norm()) * 40**0.5 / one**0.5 < 1.3
    part = Attention(uses_all=False)
    torch._dynamo.reset()
    torch.compile(part, backend=backend)(x).backward()
    assert not [line for line in pack.report if line.shape[-1] == 384], "v is not read: q and k are coded alone"


def test_inputs_with_gaps():
    """A half of a channels_last image: neither row-major nor without gaps."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x):
            a, b = self.c(x).chunk(2, 1)
            return (F.silu(a) * b).square().mean()

    torch.manual_seed(0)
    model, x = Gate().to(memory_format=torch.channels_last), torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    truth = gradients(model, model, x)
    f, seen = compiled(model)
    draws = [gradients(f, model, x) for _ in range(40)]
    assert seen["ops"] == [(SILU, False)]
    one = sum(float((g - truth).square().sum()) for g in draws) / 40
    assert float((sum(draws) / 40 - truth).norm()) * 40**0.5 / one**0.5 < 1.4


def test_a_part_of_the_input_is_left_alone():
    class Glu(nn.Module):
        def __init__(self):
            super().__init__()
            self.o = nn.Linear(64, 64)

        def forward(self, x):
            a, b = x.chunk(2, -1)
            return self.o(a * b).square().mean()

    model, x = Glu(), torch.randn(64, 128, requires_grad=True)
    f, _ = compiled(model)
    f(x).backward()
    assert x.grad is not None


def test_bad_arguments():
    x, found = torch.randn(8, 8), list(map(list, specs(4, 2, 64, torch.float32, False, True)))
    with pytest.raises(RuntimeError, match=r"\[activation\] kind must be 1 to 3, got 7"):
        ops.activation(x, torch.tensor([1, 2]), 7, *found)
    with pytest.raises(RuntimeError, match=r"\[activation\] seeds must be two numbers"):
        ops.activation(x, torch.tensor([1]), GELU, *found)
    with pytest.raises(RuntimeError, match=r"\[activation\] tensor must be float32"):
        ops.activation(x.double(), torch.tensor([1, 2]), GELU, *found)
