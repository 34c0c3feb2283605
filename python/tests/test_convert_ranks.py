"""Converted models in two processes: collectives of results that wait, DDP and FSDP2."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import satchel
from satchel.layer_waiting import Waiting
from satchel.layers import Layer

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
RANKS, DRAWS, SHAPE = 2, 24, (512, 16)


def spawned(work, tmp_path, *args):
    """What each rank's work() returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(started, (port, tmp_path, work, args), nprocs=RANKS)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def started(rank, port, results, work, args):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        torch.save(work(rank, *args), results / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


# ---- collectives ---------------------------------------------------------------------------------------------------------------------


def in_place(f):
    return lambda y, rank: (f(y), y)[1]


def into(f, shape=SHAPE):
    def run(y, rank):
        out = torch.zeros(shape)
        f(out, y)
        return out

    return run


def listed(f):
    def run(y, rank):
        outs = [torch.zeros(SHAPE) for _ in range(RANKS)]
        f(outs, y)
        return torch.stack(outs)

    return run


def gathered(y, rank):
    outs = [torch.zeros(SHAPE) for _ in range(RANKS)] if rank == 0 else None
    dist.gather(y, outs)
    return torch.stack(outs) if rank == 0 else torch.zeros(1)


def sent(y, rank):
    out = torch.zeros(SHAPE)
    dist.send(y, 1) if rank == 0 else dist.recv(out, 0)
    return out


def received(y, rank):
    dist.send(torch.ones(SHAPE), 1) if rank == 0 else dist.recv(y, 0)
    return y


def exchanged(y, rank):
    out = torch.zeros(SHAPE)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, y, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]):
        work.wait()
    return out


def functional(y, rank):
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(y, "sum", dist.group.WORLD) + 0


def differentiable(y, rank):
    import torch.distributed.nn.functional as functions

    return torch.stack([functions.all_reduce(y), *functions.all_gather(y)])


COLLECTIVES = {
    "broadcast": in_place(lambda y: dist.broadcast(y, 0)),
    "all_reduce": in_place(dist.all_reduce),
    "all_gather": listed(lambda outs, y: dist.all_gather(outs, y)),
    "all_gather_into_tensor": into(dist.all_gather_into_tensor, (RANKS * SHAPE[0], SHAPE[1])),
    "gather": gathered,
    "scatter": into(lambda out, y: dist.scatter(out, [y, torch.ones(SHAPE)] if dist.get_rank() == 0 else None)),
    "reduce_scatter": into(lambda out, y: dist.reduce_scatter(out, [y, torch.ones(SHAPE)])),
    "reduce_scatter_tensor": into(dist.reduce_scatter_tensor, (SHAPE[0] // RANKS, SHAPE[1])),
    "all_to_all_single": into(dist.all_to_all_single),
    "send": sent,
    "recv": received,
    "batch_isend_irecv": exchanged,
    "functional": functional,
    "differentiable": differentiable,
}


def run_both(found, name, run, rank):
    """What torch's norm and the converted one come to."""
    for convert in (False, True):
        torch.manual_seed(rank)
        norm = nn.BatchNorm1d(SHAPE[1])
        y = (satchel.convert(norm) if convert else norm)(torch.randn(SHAPE, requires_grad=True) * 3)
        assert (type(y) is Waiting) == convert
        with torch.set_grad_enabled(name in ("functional", "differentiable")):
            found.setdefault(name, []).append(run(y, rank).detach().clone())


def both_ways(rank):
    """By name; an error's text where dist.reduce looks at nothing in Python. In torch 2.15 it does."""
    found = {}
    for name, run in COLLECTIVES.items():
        run_both(found, name, run, rank)
    try:
        run_both(found, "reduce", in_place(lambda y: dist.reduce(y, 0)), rank)
    except RuntimeError as error:
        found["reduce"] = str(error)
    return found


def test_collectives_of_waiting_results(tmp_path):
    for found in spawned(both_ways, tmp_path):
        if isinstance(found["reduce"], str):
            assert "[convert] a batch norm's result must be read by torch's functions" in found.pop("reduce")
        assert set(found) - {"reduce"} == set(COLLECTIVES)
        for name, (torchs, ours) in found.items():
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4, msg=name)


# ---- wrappers ------------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.c, self.d = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.head, self.last = nn.ReLU(inplace=True), nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.relu(self.b(self.a(x)))
        y = self.d(self.c(x))
        y += x
        return self.last(self.head(self.relu(y).mean((2, 3))))


def batch(rank):
    made = torch.Generator().manual_seed(rank)
    return torch.randn(32, 3, 12, 12, generator=made).contiguous(memory_format=torch.channels_last), torch.randint(0, 8, (32,), generator=made)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def flat(model, rank):
    model.zero_grad()
    x, y = batch(rank)
    F.cross_entropy(model(x), y).backward()
    return torch.cat([whole(p.grad).flatten() for p in model.parameters()])


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in (model.a, model.b, model.c, model.head):
        fully_shard(layer)
    return fully_shard(model)


def trained(rank, way):
    model = Net()
    wrap = nn.parallel.DistributedDataParallel if way == "ddp" else sharded
    torchs, ours = wrap(copy.deepcopy(model)), wrap(satchel.convert(copy.deepcopy(model)))
    expected = flat(torchs, rank)
    draws = torch.stack([flat(ours, rank) for _ in range(DRAWS)])
    buffers = []
    for convert in (False, True):
        other = copy.deepcopy(model)
        wrapped = wrap(satchel.convert(other) if convert else other)
        for step in range(3):
            wrapped(batch(RANKS * step + rank)[0])  # the result is dropped
        wrapped.eval()(batch(rank)[0])  # DDP sends rank 0's buffers first
        buffers.append([b.clone() for b in wrapped.buffers()])
    satchel.revert(other)
    assert not any(isinstance(m, Layer) for m in other.modules()) and torch.isfinite(wrapped(batch(rank)[0])).all()
    return {"expected": expected, "draws": draws, "buffers": buffers}


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_wrapped_models(way, tmp_path):
    """Ranks agree on the gradient, which is right in the mean, and have torch's running statistics."""
    first, second = spawned(trained, tmp_path, way)
    assert torch.allclose(first["draws"], second["draws"], atol=1e-6)
    expected, draws = first["expected"], first["draws"]
    one = (draws - expected).square().sum(1).mean().sqrt()
    assert one > 0.01 * expected.norm()
    assert float((draws.mean(0) - expected).norm() * DRAWS**0.5 / one) < 1.3
    for found in (first, second):
        for torchs, ours in zip(*found["buffers"]):
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
