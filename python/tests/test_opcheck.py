"""torch.library.opcheck of every op that has a kernel for the CPU."""

import pytest
import torch

from satchel import activation_ops, norm_ops
from satchel._ops import Layout, ops, parse_spec

SCHEMA = ("test_schema",)  # ops that eager layers alone call
TRACED = (*SCHEMA, "test_faketensor")
SYMBOLS = (*TRACED, "test_aot_dispatch_dynamic")
GRADIENT = (*TRACED, "test_autograd_registration")

SEED, SEEDS, SPEC = torch.tensor([3]), torch.tensor([3, 4]), list(parse_spec("bits=2"))
_kept = []  # a layout's number is known while its object lives


def tensor_ops():
    """Names of the ops that take a tensor, and whether they run on the CPU."""
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("satchel_stable::")}
    with_tensors = {name for name in names if any("Tensor" in str(a.type) for a in getattr(ops, name).default._schema.arguments)}
    keys = ("CPU", "CompositeExplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: any(has("satchel_stable::" + name, key) for key in keys) for name in with_tensors}


def by_number():
    """For the ops that know a layout by its number: a tensor with gaps, and the number."""
    x = torch.randn(6, 10, 64)[:, :, :40].transpose(0, 1)
    like = Layout(tuple(x.shape), x.stride(), x.clone().stride(), x.dtype, tuple(SPEC))
    _kept.append(like)
    return x, like.id


def pack_by_id():
    x, number = by_number()
    return x, SEED, number


def unpack_by_id():
    x, number = by_number()
    return ops.pack_by_id(x, SEED, number), number


def unpack_log_by_id():
    x, number = by_number()
    return ops.pack_exp_by_id(x, SEED, number), number


def unpack_table_by_id():
    return torch.randint(0, 256, (1200,), dtype=torch.uint8), torch.randn(16), by_number()[1]


def matrix():
    return torch.randn(8, 300)


def slopes():
    return matrix(), SEED, torch.linspace(-0.2, 1.2, 16), 0


def norm(form=norm_ops.ADD, gradient=True):
    x = torch.randn(16, 32, 16, 16).to(memory_format=torch.channels_last)
    skip, gamma, beta = torch.randn(x.shape) if form == norm_ops.ADD else None, torch.rand(32), torch.rand(32)
    found = norm_ops.specs("satchel", form, x.numel() // 32, 32, x.dtype, False, True)
    return x.requires_grad_(gradient), skip, gamma.requires_grad_(gradient), beta, SEEDS, 1e-5, form, *map(list, found)


def norm_moving():
    x, skip, gamma, beta, seeds, *rest = norm(gradient=False)
    return x, skip, gamma, beta, torch.zeros(32), torch.ones(32), 0.1, seeds, *rest


def norm_backward():
    arguments = norm(gradient=False)
    z, code, summed, _, rstd, _ = ops.norm(*arguments)
    return torch.ones_like(z), code, summed, rstd, arguments[2], *arguments[6:], True, True


def norm_output():
    arguments = norm(gradient=False)
    z, _, summed, *_ = ops.norm(*arguments)
    return summed, list(z.shape), torch.float32, norm_ops.ADD, arguments[-1]


def side_on():
    x, *_, spec, _ = arguments = norm(norm_ops.ACT, gradient=False)
    return ops.norm(*arguments)[1], [x.numel() // 32, 32], spec, 32, 1


def activation(gradient=True):
    x = torch.randn(32, 64, requires_grad=gradient)
    return x, SEEDS, activation_ops.GELU, *map(list, activation_ops.specs(4, 2, x.numel(), x.dtype, False, True))


def activation_backward():
    x, *rest = activation(gradient=False)
    return x, ops.activation(x, *rest)[1], [64, 1], rest[-2]


OPS = {
    "pack": (lambda: (matrix(), SEED, None, 1, SPEC), SYMBOLS),
    "unpack": (lambda: (ops.pack(matrix(), SEED, None, 1, SPEC), [8, 300], [300, 1], torch.float32, SPEC), SYMBOLS),
    "pack_mask": (lambda: (matrix(),), SYMBOLS),
    "unpack_mask": (lambda: (ops.pack_mask(matrix()), [8, 300], [300, 1], torch.float32), SYMBOLS),
    "narrow": (lambda: (torch.randint(0, 100, (77,)), 0, 99), SYMBOLS),
    "widen": (lambda: (ops.narrow(torch.randint(0, 100, (77,)), 0, 99), [77], [1], 0, 7), SYMBOLS),
    "pack_slope": (slopes, SYMBOLS),
    "unpack_table": (lambda: (ops.pack_slope(*slopes()), torch.randn(16), [8, 300], [300, 1], torch.float32), SYMBOLS),
    "draw_projection": (lambda: (SEED, 64, 32, 0, 1, list(parse_spec("exact"))), TRACED),
    "pack_by_id": (pack_by_id, SYMBOLS),
    "pack_exp_by_id": (pack_by_id, SYMBOLS),
    "unpack_by_id": (unpack_by_id, SYMBOLS),
    "unpack_log_by_id": (unpack_log_by_id, SYMBOLS),
    "unpack_table_by_id": (unpack_table_by_id, SYMBOLS),
    "norm": (norm, GRADIENT),
    "norm_forward": (lambda: norm(gradient=False), TRACED),
    "norm_moving": (norm_moving, SCHEMA),
    "norm_backward": (norm_backward, TRACED),
    "norm_output": (norm_output, TRACED),
    "activation": (activation, GRADIENT),
    "activation_forward": (lambda: activation(gradient=False), TRACED),
    "activation_backward": (activation_backward, TRACED),
    "unpack_part": (lambda: (ops.pack(matrix(), SEED, None, 1, SPEC), [8, 300], torch.float32, SPEC, 0, 1, 512, 1024), SCHEMA),
    "side_on": (side_on, SCHEMA),
    "gate": (lambda: (matrix(), ops.pack_mask(matrix()), SEED, 0.5, 0.1), SCHEMA),
    "packed_strides": (lambda: (matrix(), SPEC), SCHEMA),
}


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    arguments, tests = OPS[name]
    torch.library.opcheck(getattr(ops, name).default, arguments(), test_utils=tests)


def test_every_op_is_here():
    found = tensor_ops()
    # Ops that CUDA alone has: the layers call them there, and have another way on the CPU.
    cuda = {"norm_act", "norm_act_back", "norm_act_input", "max_pool", "max_pool_backward"}
    assert {name for name, cpu in found.items() if not cpu} == cuda
    assert set(found) - cuda == set(OPS)
