"""Training loops that somebody else wrote: two processes (DDP, FSDP2), accelerate, transformers' Trainer, Lightning. One line is added to each."""

import os
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import satchel

RANKS = 2
DRAWS = 24


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def batch(rank):
    made = torch.Generator().manual_seed(rank)
    return torch.randn(128, 64, generator=made), torch.randint(0, 10, (128,), generator=made)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def gradients(model, rank):
    model.zero_grad()
    x, y = batch(rank)
    F.cross_entropy(model(x), y).backward()
    return torch.cat([whole(p.grad).flatten() for p in model.parameters()])


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def work(rank, port, results, way):
    """One process: the exact gradient of both batches, draws of the packed one, and codes of this rank alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        model = net()
        expected = sum(gradients(model, r) for r in range(RANKS)) / RANKS
        alone = net()
        satchel.attach(alone, min_bytes=0, seed=7)
        own = gradients(alone, 0)  # the same batch and seed on both ranks
        model.zero_grad()
        if way == "ddp":
            packing = satchel.attach(model, min_bytes=0, meter=True)
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = sharded(model)
            packing = satchel.attach(wrapped, min_bytes=0, meter=True)
        draws = torch.stack([gradients(wrapped, rank) for _ in range(DRAWS)])
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        optimizer.step()
        kept = sorted({f"{line.node}.{line.field}: {line.kept}" for line in packing.meter.lines})
        torch.save({"expected": expected, "draws": draws, "own": own, "kept": kept}, results / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes(way, tmp_path):
    """Ranks agree on the gradient, draw apart, and are right in the mean."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, tmp_path, way), nprocs=RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    assert torch.allclose(first["draws"], second["draws"], atol=1e-6), "ranks must end with one gradient"
    assert not torch.equal(first["own"], second["own"]), "ranks must draw apart"
    expected, draws = first["expected"], first["draws"]
    one = (draws - expected).square().sum(1).mean().sqrt()
    assert one > 0.01 * expected.norm()
    assert 0.8 < float((draws.mean(0) - expected).norm() * DRAWS**0.5 / one) < 1.3
    assert {"GeluBackward0.self: slope, 4 bits", "ReluBackward0.result: mask"} <= set(first["kept"]), first["kept"]


def fit_alone(attached, steps=8):
    """A plain loop's last loss."""
    torch.manual_seed(0)
    model = net()
    if attached:
        satchel.attach(model, "8/8/8", min_bytes=0)
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), 1e-2), batch(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = net()
    packing = satchel.attach(model, "8/8/8", min_bytes=0, meter=True)
    accelerator = accelerate.Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(0)), batch_size=128)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    assert packing.meter.before > 3 * packing.meter.after
    assert abs(loss.item() - fit_alone(False)) < 0.02 * fit_alone(False)


def test_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    losses = {}
    for attached in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        packing = satchel.attach(model, "8/8/8", min_bytes=0, meter=True) if attached else None
        tokens = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=6, per_device_train_batch_size=8, report_to=[], save_strategy="no",
                                                   logging_strategy="no", use_cpu=True, disable_tqdm=True)  # fmt: skip
        losses[attached] = transformers.Trainer(model, arguments, train_dataset=rows).train().training_loss
    assert packing.meter.before > 2 * packing.meter.after
    assert abs(losses[True] - losses[False]) < 0.02 * losses[False], losses


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.last = net(), 0.0

        def training_step(self, pair, _):
            loss = F.cross_entropy(self.net(pair[0]), pair[1])
            self.last = loss.item()
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    torch.manual_seed(0)
    module = Module()
    packing = satchel.attach(module.net, "8/8/8", min_bytes=0, meter=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(0)), batch_size=128)
    trainer = lightning.Trainer(max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers of the loader
        trainer.fit(module, loader)
    assert packing.meter.before > 3 * packing.meter.after
    assert abs(module.last - fit_alone(False)) < 0.02 * fit_alone(False)
