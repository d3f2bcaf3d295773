"""What a rank holds: parameters, gradients and optimizer state as the degrees say, and never the whole model."""

import ctypes
import gc
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from pool import RankPool
from shardwise.models.gpt import GPT
from shardwise.module import LanguageModel
from training import LAYOUTS, make_trainer, tuned, world_size

# ---- what is kept --------------------------------------------------------------------------------------------------

VOCABULARY, CONTEXT, WIDTH, HIDDEN, LAYERS = 512, 16, 64, 192, 3
FLOAT = 4
"""Bytes of a number."""


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind this rank's parts; what several tensors share counts once."""
    storages = {}
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = part.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Held(pl.Callback):
    """Bytes of parameters, gradients and optimizer state when the second step is about to be made."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.parameters())
        states = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
        self.bytes = {
            "parameters": held(p.detach() for p in parameters),
            "gradients": held(p.grad for p in parameters if p.grad is not None),
            "optimizer state": held(value for value in states if value.dim()),  # without the number of the step
        }


def batches() -> DataLoader:
    tokens = torch.randint(VOCABULARY, (8, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return DataLoader([(tokens[:, :-1], tokens[:, 1:])] * 2, batch_size=None)


def bytes_held(layout: str, device: str, tied: bool) -> dict[str, int]:
    with torch.device(device):
        model = GPT(
            VOCABULARY, context=CONTEXT, n_layer=LAYERS, n_head=4, width=WIDTH, hidden=HIDDEN, tie_embeddings=tied
        )
    seen = Held()
    trainer = make_trainer(layout, callbacks=[seen], max_steps=2, gradient_clip_val=1.0)
    trainer.fit(tuned(LanguageModel(model)), batches())
    return seen.bytes


def share(layout: str, *, tied: bool) -> float:
    """Parameters that a rank holds: tensor parallelism splits matrices only, FSDP everything."""
    dims = LAYOUTS[layout]
    matrices = (1 if tied else 2) * VOCABULARY * WIDTH + LAYERS * (4 * WIDTH**2 + 3 * WIDTH * HIDDEN)
    norms = (2 * LAYERS + 1) * WIDTH
    return (matrices / dims.tp + norms) / dims.dp_shard


@pytest.mark.parametrize(
    ("layout", "device", "tied"),
    [
        ("ddp2", "meta", False),
        ("fsdp2", "meta", False),
        ("hsdp4", "meta", False),
        ("tp2", "meta", False),
        ("tp2", "meta", True),
        ("tp2", "cpu", False),  # whole at the start; the rest of it must not stay behind the parts
        ("ddp+tp4", "meta", False),
        ("fsdp+tp4", "meta", False),
        ("fsdp+tp4", "cpu", True),
        ("hybrid8", "meta", False),
    ],
)
def test_a_rank_holds_its_share_and_no_more(pool: RankPool, layout: str, device: str, tied: bool) -> None:
    expected = FLOAT * share(layout, tied=tied)
    for rank, found in enumerate(pool.run(bytes_held, layout, device, tied, world_size=world_size(layout))):
        for what, times in {"parameters": 1, "gradients": 1, "optimizer state": 2}.items():  # AdamW: two moments
            assert math.isclose(found[what], times * expected, rel_tol=0.02), (rank, what, found, expected)


# ---- what is held at the start -------------------------------------------------------------------------------------

BIG = {"n_layer": 8, "n_head": 8, "width": 512, "hidden": 1408}
WHOLE = FLOAT * BIG["n_layer"] * (4 * BIG["width"] ** 2 + 3 * BIG["width"] * BIG["hidden"])
"""Bytes of the blocks: 100 MB; the rest is next to nothing."""


class Peak(pl.Callback):
    """The most memory that the process had resident until its part of the model stood, beyond what it started with."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed must not serve this one unseen
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")
        self.growth = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert not any(p.is_meta for p in pl_module.parameters()), "measured too early"
        self.growth = status("VmHWM") - self.before


def status(key: str) -> int:
    """A figure of this process, in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return 1024 * int(match[1])


def growth_at_the_start(layout: str, device: str) -> int:
    """Of the construction of the model and of all that Trainer does before it trains."""
    bytes_held(layout, "meta", False)  # what is imported on the way is not to count
    peak = Peak()
    with torch.device(device):
        model = GPT(19, context=CONTEXT, **BIG)
    trainer = make_trainer(layout, callbacks=[peak], max_steps=1, limit_train_batches=0)
    trainer.fit(tuned(LanguageModel(model)), batches())
    return peak.growth


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the kernel's account of memory")
def test_no_rank_ever_holds_the_whole_model(pool: RankPool) -> None:
    layout = "fsdp+tp4"
    assert WHOLE > 100e6
    for growth in pool.run(growth_at_the_start, layout, "meta", world_size=4):
        assert WHOLE / 4 < growth < WHOLE / 2, f"{growth / 1e6:.0f} MB of {WHOLE / 1e6:.0f}"
    # What the same measure says of a model that each rank constructs whole:
    for growth in pool.run(growth_at_the_start, layout, "cpu", world_size=4):
        assert growth > WHOLE, f"{growth / 1e6:.0f} MB of {WHOLE / 1e6:.0f}"
