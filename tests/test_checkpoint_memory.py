"""What a rank needs while a checkpoint is loaded or saved: its own share, and one parameter at a time beside it."""

import ctypes
import gc
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from pool import RankPool
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.models.gpt import GPT
from shardwise.module import LanguageModel
from test_memory import BIG, CONTEXT, HIDDEN, LAYERS, VOCABULARY, WIDTH, batches, held, status
from training import make_trainer, on_layout, tuned

SMALL = {"n_layer": LAYERS, "n_head": 4, "width": WIDTH, "hidden": HIDDEN}
LARGEST = 4 * VOCABULARY * WIDTH
"""Bytes of the largest parameter of the small model: an embedding, a seventh of the whole."""


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors had at a time: of every storage that an operation of this thread returns."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # to see what it does with its parts
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class Resident:
    """The most memory that this process has had resident since, beyond what it had when this was made."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve this one unseen
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")

    def growth(self) -> int:
        return status("VmHWM") - self.before


class Saving(SaveCheckpoints):
    """Saves at the end, waits for it, and says what was held then and how much memory the saving took."""

    share = growth = 0

    def save(self, trainer: Any) -> None:
        self.share = state_bytes(trainer)
        resident = Resident()
        super().save(trainer)
        self.wait()
        self.growth = resident.growth()


class AtStart(pl.Callback):
    """What there is when all is loaded, before the first batch."""

    share = peak = growth = 0

    def __init__(self, bytes_: PeakBytes | None) -> None:
        self.bytes = bytes_
        self.resident = Resident()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.share = state_bytes(trainer)
        self.growth = self.resident.growth()
        self.peak = self.bytes.peak if self.bytes else 0
        assert trainer.global_step == 1, "nothing was loaded"


def state_bytes(trainer: Any) -> int:
    """Bytes of parameters and optimizer state that this rank holds."""
    optimizer = getattr(trainer.optimizers[0], "_optimizer", trainer.optimizers[0])
    parameters = [p.detach() for p in trainer.lightning_module.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert len(states) == 2 * len(parameters)
    return held(parameters + states)


def module(sizes: dict[str, int], vocabulary: int) -> pl.LightningModule:
    with torch.device("meta"):
        model = GPT(vocabulary, context=CONTEXT, **sizes)  # type: ignore[arg-type]
    return tuned(LanguageModel(model))


def few_batches(vocabulary: int) -> DataLoader:
    return DataLoader([(x % vocabulary, y % vocabulary) for x, y in batches()], batch_size=None)


def save(layout: str, folder: str, sizes: dict[str, int], vocabulary: int) -> tuple[int, int]:
    """(bytes of this rank's share, growth of resident memory by saving them)."""
    saving = Saving(folder)
    make_trainer(layout, callbacks=[saving], max_steps=1).fit(module(sizes, vocabulary), few_batches(vocabulary))
    return saving.share, saving.growth


def load(layout: str, folder: str, sizes: dict[str, int], vocabulary: int, counted: bool) -> tuple[int, int, int]:
    """(bytes of this rank's share, peak of tensors, growth of resident memory) from nothing to a loaded state."""
    counting = PeakBytes() if counted else None
    seen = AtStart(counting)
    trainer = make_trainer(layout, callbacks=[seen], max_steps=2, limit_train_batches=1)
    fit = partial(trainer.fit, ckpt_path=f"{folder}/step_00000001")
    if counting is None:
        fit(module(sizes, vocabulary), few_batches(vocabulary))
    else:
        with counting:
            fit(module(sizes, vocabulary), few_batches(vocabulary))
    return seen.share, seen.peak, seen.growth


def test_the_measure_sees_what_is_read_and_what_is_freed(tmp_path: Path) -> None:
    torch.save(torch.zeros(250_000), tmp_path / "file")
    with PeakBytes() as seen:
        for _ in range(3):
            loaded = torch.load(tmp_path / "file")
            assert seen.now == loaded.nbytes
            del loaded
        held_twice = [torch.load(tmp_path / "file").add(1.0) for _ in range(2)]
    assert (seen.peak, seen.now) == (3_000_000, sum(t.nbytes for t in held_twice))


@pytest.mark.parametrize(
    ("saved", "layout"),
    [("one", "fsdp+tp4"), ("fsdp+tp4", "one"), ("fsdp4", "tp2"), ("tp2", "fsdp4"), ("fsdp2", "fsdp+tp4")],
)
def test_a_load_at_another_layout_needs_a_share_and_one_parameter(
    pool: RankPool, tmp_path: Path, saved: str, layout: str
) -> None:
    on_layout(pool, save, saved, saved, str(tmp_path), SMALL, VOCABULARY)
    for share, peak, _ in on_layout(pool, load, layout, layout, str(tmp_path), SMALL, VOCABULARY, True):
        assert share < peak <= 1.05 * share + LARGEST, (share, peak, LARGEST)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the kernel's account of memory")
def test_resident_memory_of_a_large_model_agrees(pool: RankPool, tmp_path: Path) -> None:
    whole = 3 * 4 * BIG["n_layer"] * (4 * BIG["width"] ** 2 + 3 * BIG["width"] * BIG["hidden"])
    largest = 4 * BIG["width"] * BIG["hidden"]
    assert whole > 300e6
    for folder, sizes in (("small", SMALL), ("big", BIG)):  # the first for what is imported on the way
        saved = pool.run(save, "fsdp2", str(tmp_path / folder), sizes, 20, world_size=2)
    for share, growth in saved:
        assert math.isclose(share, whole / 2, rel_tol=0.01)
        assert 0.8 * share < growth < 1.2 * share + largest, f"saving {share / 1e6:.0f} MB took {growth / 1e6:.0f}"
    for folder, sizes in (("small", SMALL), ("big", BIG)):
        loaded = pool.run(load, "fsdp+tp4", str(tmp_path / folder), sizes, 20, False, world_size=4)
    for share, _, growth in loaded:
        assert math.isclose(share, whole / 4, rel_tol=0.01)
        assert 0.8 * share < growth < 1.2 * share + largest, f"loading {share / 1e6:.0f} MB took {growth / 1e6:.0f}"
