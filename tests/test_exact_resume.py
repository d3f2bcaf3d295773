"""A run that is resumed is the run that was never interrupted, bit for bit: from every kind of place and layout."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.data.sharded import ShardedDataModule
from shardwise.data.synthetic import SyntheticTokens
from shardwise.errors import ConfigError
from shardwise.optim import build_optimizer, build_scheduler
from shardwise.tracking import JsonlLogger
from training import CONTEXT, LAYOUTS, VOCABULARY, build_module, dp_place, make_trainer, on_layout, whole

SAMPLES, GLOBAL_SIZE = 50, 8  # 6.25 steps an epoch: epochs of 7 and of 6 steps
STEPS = 20


class Augmented(Dataset):
    """Points with noise on them, drawn from the global generator as a transform does."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        self.labels = (self.points[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.points[index] + 0.1 * torch.randn(6, dtype=torch.float64), self.labels[index], index


class Data(pl.LightningDataModule):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Augmented(SAMPLES), num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Augmented(9))


class Counter(nn.Module):
    """State that is no tensor."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Module(pl.LightningModule):
    """A user's module with all that can get lost: dropout, a metric and means over the epoch, a plateau schedule, an
    exponential average of the weights, and a random number of its own."""

    def __init__(self, plateau: bool, wide: bool = False) -> None:
        super().__init__()
        # Wide: several buckets of DistributedDataParallel. Their order decides in which order ranks are added up.
        middle = [nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Tanh()] if wide else []
        width = 600 if wide else 8
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), *middle, nn.Dropout(0.3), nn.Linear(width, 2))
        self.counter = Counter()
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.plateau = plateau
        self.average = torch.zeros((), dtype=torch.float64)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        x = x.to(self.net[0].weight.dtype)
        logits = self.net(x + 0.01 * torch.randn_like(x))
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.average = 0.9 * self.average + 0.1 * self.net[-1].bias.detach().sum()
        self.seen.append(index.tolist())
        self.counter.seen += 1
        self.log("mine/accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mine/loss", loss, on_step=True, on_epoch=True)
        self.log("mine/average", self.average)
        self.log("mine/counter", float(self.counter.seen))
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average = checkpoint["average"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val/loss", F.cross_entropy(self.net(x.to(self.net[0].weight.dtype)), y))

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.named_parameters(), target=torch.optim.AdamW, lr=1e-2)
        if self.plateau:
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}
        schedule = build_scheduler(optimizer, kind="cosine", total_steps=STEPS, warmup_steps=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(pl.Callback):
    """Losses, rates and norms of every step, and the parameters at the end."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple] = {}
        self.end: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = trainer.precision_plugin.grad_norm
        self.steps[trainer.global_step] = (
            float(trainer.strategy.global_loss()), self.rate, float(norm), trainer.current_epoch, batch_idx,
        )  # fmt: skip

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = {name: whole(p) for name, p in pl_module.named_parameters()}


def train(layout: str, folder: str, start: int | None, options: dict[str, Any]) -> tuple:
    """(steps, parameters, samples of each micro-batch, lines logged, lines that the whole run has logged from there on)
    of a run that starts from step ``start`` of ``folder``."""
    options = dict(options)
    torch.manual_seed(1)
    workers, plateau, accumulate = (
        options.pop("workers", 0),
        options.pop("plateau", False),
        options.pop("accumulate", 1),
    )
    global_size = options.pop("global_size", GLOBAL_SIZE)
    checkpoint = f"{folder}/{options.pop('of', layout)}/step_{start or 0:08d}"
    save = start is None
    rank, size = dp_place(LAYOUTS[layout].tp)
    data = ShardedDataModule(
        Data(workers), seed=3, global_size=global_size, eval_batch_size=4, dp_rank=rank, dp_size=size
    )
    wide = options.pop("wide", False)
    record, module = Record(), Module(plateau, wide)
    lines = Path(f"{folder}/{'whole' if save else f'from_{start}'}.jsonl")
    logger = JsonlLogger(lines)
    saving = SaveCheckpoints(
        f"{folder}/{layout}", every_n_steps=1 if save else None, every_minutes=None, keep_last=None, at_end=False,
        facts=lambda: {"metrics_bytes": logger.size()},
    )  # fmt: skip
    trainer = make_trainer(
        layout,
        callbacks=[record, saving, *options.pop("callbacks", list)()],
        accumulate=accumulate,
        logger=[logger],
        log_every_n_steps=1,
        precision="32-true" if wide else "64-true",
        gradient_clip_val=0.5,
        **{"max_steps": STEPS, **options},
    )
    trainer.fit(module, datamodule=data, ckpt_path=None if save else checkpoint)
    saving.wait()
    before = 0 if save else read_state(checkpoint)["metrics_bytes"]
    return record.steps, record.end, module.seen, _lines(lines), _lines(Path(f"{folder}/whole.jsonl"), before)


def _lines(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """What was logged, from a byte of the file on, without the times."""
    lines = [json.loads(line) for line in path.read_bytes()[start:].splitlines()] if path.exists() else []
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def early() -> list[pl.Callback]:
    return [EarlyStopping("val/loss", patience=2, min_delta=1.0)]


PLACES = (1, 6, 7, 8, 13, 14, 19)  # in an epoch's midst, at its end (7, 13, 19), and one step after
CASES = {
    "plain": ("one", {}, PLACES),
    "plateau": ("one", {"plateau": True}, (3, 7, 13)),
    "validation in the midst": ("one", {"val_check_interval": 3, "check_val_every_n_epoch": None}, (3, 5, 6, 7, 9)),
    "limited epochs": ("one", {"limit_train_batches": 5}, (4, 5, 6, 10)),
    "early stopping": ("one", {"callbacks": early, "max_steps": 60}, (6, 7, 13)),
    "accumulate": ("one", {"accumulate": 4}, (2, 7)),
    "workers": ("one", {"workers": 2}, (5, 13)),
    "ddp": ("ddp2", {"accumulate": 2}, (3, 7)),
    "fsdp": ("fsdp2", {"accumulate": 2}, (3, 7)),
    "hsdp": ("hsdp4", {}, (7, 9)),
    "ddp of four": ("ddp4", {"wide": True}, (3,)),
    "batch statistics": ("fsdp2", {"wide": True}, (3,)),
}


def both(layout: str, folder: str, places: tuple[int, ...], options: dict[str, Any]) -> list[tuple]:
    """The whole run, and one from each of the places."""
    return [train(layout, folder, start, options) for start in (None, *places)]


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(pool, tmp_path, name):
    layout, options, places = CASES[name]
    ranks = on_layout(pool, both, layout, layout, str(tmp_path), places, options)
    (steps, end, *_), *resumed = ranks[0]
    last = max(steps)
    assert last == (STEPS if name != "early stopping" else 19), "the run is as long as it is meant to be"
    for start, (steps_again, end_again, _, logged_again, logged) in zip(places, resumed, strict=True):
        assert steps_again == {step: value for step, value in steps.items() if step > start}, f"from step {start}"
        assert all(torch.equal(value, end_again[key]) for key, value in end.items()), f"from step {start}"
        assert logged_again == logged, f"from step {start}"
        assert logged or start == last
    for (_, _, seen, *_), *others in ranks:
        micro = len(seen) // last
        for start, (_, _, seen_again, *_) in zip(places, others, strict=True):
            assert seen_again == seen[start * micro :], f"from step {start}"


# ---- split layers, and another number of ranks -----------------------------------------------------------------------


def train_gpt(layout: str, folder: str, start: int | None) -> tuple[list[float], dict[str, Tensor]]:
    """A GPT with dropout inside and outside of its split regions, on tokens; (losses, parameters at the end)."""
    torch.manual_seed(1)
    rank, size = dp_place(LAYOUTS[layout].tp)
    tokens = SyntheticTokens(num_samples=40, num_val_samples=4, context=CONTEXT, vocab_size=VOCABULARY)
    tokens.setup()
    data = ShardedDataModule(tokens, seed=3, global_size=8, eval_batch_size=4, dp_rank=rank, dp_size=size)
    record = Record()
    saving = SaveCheckpoints(
        f"{folder}/{layout}", every_n_steps=2 if start is None else None, every_minutes=None, keep_last=None
    )
    trainer = make_trainer(
        layout, callbacks=[record, saving], accumulate=2, precision="64-true", gradient_clip_val=0.5, max_steps=9
    )
    trainer.fit(
        build_module("gpt-dropout"),
        datamodule=data,
        ckpt_path=None if start is None else f"{folder}/{layout}/step_{start:08d}",
    )
    saving.wait()
    return [loss for loss, *_ in record.steps.values()], record.end


def whole_and_resumed(layout: str, folder: str) -> list[tuple]:
    return [train_gpt(layout, folder, start) for start in (None, 4)]


@pytest.mark.parametrize("layout", ["tp2", "fsdp+tp4"])
def test_noise_of_split_layers_goes_on(pool, tmp_path, layout):
    (losses, end), (losses_again, end_again) = on_layout(pool, whole_and_resumed, layout, layout, str(tmp_path))[0]
    assert losses_again == losses[4:]
    assert all(torch.equal(value, end_again[name]) for name, value in end.items())


@pytest.mark.parametrize(("then", "now"), [("one", "ddp2"), ("ddp2", "one"), ("fsdp2", "ddp4")])
def test_at_another_data_parallel_size_no_sample_is_repeated_or_missed(pool, tmp_path, then, now):
    whole_run = on_layout(pool, train, then, then, str(tmp_path), None, {})
    resumed = on_layout(pool, train, now, now, str(tmp_path), 9, {"of": then})
    for step in range(10, STEPS + 1):
        expected = [index for _, _, seen, *_ in whole_run for index in seen[step - 1]]
        assert [index for _, _, seen, *_ in resumed for index in seen[step - 10]] == expected, step


def test_at_another_global_batch_the_position_is_the_same_sample(pool, tmp_path):
    """Step 6 of batches of 8 is step 3 of batches of 16; a position that no batch border has is refused."""
    train("one", str(tmp_path), None, {})
    _, _, seen, *_ = train("one", str(tmp_path), 6, {"global_size": 16, "max_steps": 8})
    (tmp_path / "again").mkdir()
    (_, _, whole_run, *_) = train("one", str(tmp_path / "again"), None, {"max_steps": 10})
    assert list(chain(*seen)) == list(chain(*whole_run[6:10]))
    with pytest.raises(ConfigError, match=r"40 samples, which is not a multiple of batch.global_size=16"):
        train("one", str(tmp_path), 5, {"global_size": 16})
