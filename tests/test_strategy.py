"""MeshStrategy in Lightning's Trainer: what a step communicates, evaluation, noise, limits, checkpoints, refusals."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pool import RankPool
from shardwise.errors import ConfigError
from shardwise.optim import build_scheduler
from shardwise.strategies import MeshStrategy
from shardwise.telemetry.step_metrics import StepMetrics
from training import (
    GLOBAL_SIZE,
    LAYOUTS,
    Recorder,
    build_module,
    make_trainer,
    on_layout,
    relative_gap,
    shares,
    train,
    whole,
)

# ---- decisions -----------------------------------------------------------------------------------------------------


def decided() -> tuple[bool, ...]:
    trainer = make_trainer("tp2", max_steps=1)
    trainer.fit(build_module("gpt"), shares("gpt", 1, tp=2))
    ask, first = trainer.strategy.reduce_boolean_decision, dist.get_rank() == 0
    return ask(True), ask(first), ask(first, all=False), ask(False, all=False)


def test_a_decision_is_that_of_all_ranks_also_where_they_split_layers(pool: RankPool) -> None:
    """Lightning's ModelCheckpoint asks whether all find a step better, and would never replace its first ones."""
    assert pool.run(decided, world_size=2) == [(True, False, True, False)] * 2


# ---- communication -------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


class CountSteps(pl.Callback):
    """The collectives of each training step, from its first forward pass to the end of the optimizer's step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode = Collectives()
        self.mode.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.steps.append(dict(self.mode.seen))


def collectives(kind: str, layout: str, strategy: dict[str, Any], clip: float | None) -> dict[str, int]:
    count = CountSteps()
    trainer = make_trainer(
        layout, callbacks=[count], accumulate=4, strategy=strategy, max_steps=3, gradient_clip_val=clip
    )
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # Lightning's, which the launcher replaces
    trainer.fit(build_module(kind), shares(kind, 3))
    return count.steps[-1]


BLOCKS, MICRO = 2, 4
GROUPS = BLOCKS + 1
GATHERS = MICRO * (2 * BLOCKS + 1)
"""A block is gathered for the forward and for the backward pass, the root once."""
EXPECTED: dict[tuple[str, bool], dict[str, int]] = {
    # gradients in one bucket, and the count of targets
    ("ddp2", True): {"allreduce": 1 + 1},
    # the count, and the norm of gradients that are in parts
    ("fsdp2", True): {"allreduce": 1 + 1, "allgather_base": GATHERS, "reduce_scatter_base": GROUPS},
    ("fsdp2", False): {"allreduce": 1 + 1, "allgather_base": GATHERS, "reduce_scatter_base": MICRO * GROUPS},
    ("hsdp4", True): {"allreduce": 1 + 1 + GROUPS, "allgather_base": GATHERS, "reduce_scatter_base": GROUPS},
    ("hsdp4", False): {"allreduce": 1 + 1 + GROUPS, "allgather_base": GATHERS, "reduce_scatter_base": MICRO * GROUPS},
}


@pytest.mark.parametrize(("layout", "deferred"), EXPECTED)
def test_collectives_of_a_step_with_four_micro_batches(pool: RankPool, layout: str, deferred: bool) -> None:
    found = on_layout(pool, collectives, layout, "gpt", layout, {"defer_gradient_sync": deferred}, 1.0)
    assert found == [EXPECTED[layout, deferred]] * len(found)


def test_a_count_that_comes_late_costs_one_collective_more(pool: RankPool) -> None:
    assert pool.run(collectives, "masked", "ddp2", {}, None) == [{"allreduce": 1 + 1 + 1}] * 2


# ---- evaluation ----------------------------------------------------------------------------------------------------


class KindsOfParameters(pl.Callback):
    """Which parameters are plain tensors during and after validation, and whether inference mode is on."""

    def __init__(self) -> None:
        self.plain: list[list[str]] = []
        self.inference: set[bool] = set()

    def on_validation_batch_start(self, *args: Any) -> None:
        self.inference.add(torch.is_inference_mode_enabled())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.plain.append([name for name, p in pl_module.named_parameters() if not isinstance(p, DTensor)])


def evaluate_between(layout: str, every: int | None, accumulate: int) -> tuple[list[float], Any]:
    """Losses of a training with dropout that is interrupted by a validation and a checkpoint after each step."""
    recorder, kinds = Recorder(), KindsOfParameters()
    # A logged figure is the monitor, so that checkpoints are saved while the root is still gathered.
    saver = ModelCheckpoint(dirpath=f"saved-{every}", monitor="val/loss", save_top_k=1)
    options: dict[str, Any] = {"limit_val_batches": 0} if every is None else {"val_check_interval": every}
    callbacks = [recorder, kinds, *([saver] if every else [])]
    trainer = make_trainer(
        layout, callbacks=callbacks, accumulate=accumulate, max_steps=4, enable_checkpointing=bool(every), **options
    )
    trainer.fit(build_module("gpt-dropout"), shares("gpt", 4), shares("gpt", 2))
    return recorder.record.losses, kinds


def evaluation(layout: str, accumulate: int) -> tuple[bool, list[list[str]], set[bool]]:
    alone, _ = evaluate_between(layout, None, accumulate)
    interrupted, kinds = evaluate_between(layout, 1, accumulate)
    return alone == interrupted, kinds.plain, kinds.inference


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_validation_between_steps_does_not_change_training(pool: RankPool, layout: str) -> None:
    for same, plain, inference in on_layout(pool, evaluation, layout, layout, 2):
        assert same
        assert inference == {False}
        if layout == "fsdp2":
            assert plain == [[]] * 4, "after a validation all parameters are in parts again"


# ---- noise ---------------------------------------------------------------------------------------------------------


class Masks(pl.LightningModule):
    """Remembers which of 64 ones its dropout kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.masks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = nn.functional.dropout(torch.ones(64))
        self.masks.append("".join("1" if value else "0" for value in kept.tolist()))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def masks(layout: str, seed: int) -> list[str]:
    torch.manual_seed(dist.get_rank() + os.getpid())  # what a rank has drawn before does not matter
    module = Masks()
    trainer = make_trainer(layout, strategy={"seed": seed}, accumulate=2, max_steps=2)
    trainer.fit(module, shares("plain", 2))
    return module.masks


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "hsdp4"])
def test_noise_differs_between_ranks_and_is_repeatable(pool: RankPool, layout: str) -> None:
    first, again = (on_layout(pool, masks, layout, layout, 1) for _ in range(2))
    assert first == again
    assert len({mask for rank in first for mask in rank}) == 4 * len(first), "a rank, a step, a micro-batch: a mask"
    others = {mask for rank in on_layout(pool, masks, layout, layout, 2) for mask in rank}
    assert not others & {mask for rank in first for mask in rank}


def digests(layout: str) -> list[str]:
    """Hashes of the parameters that this rank holds after three steps with dropout."""
    module = build_module("gpt-dropout")
    make_trainer(layout, max_steps=3, accumulate=2, gradient_clip_val=0.5).fit(module, shares("gpt", 3))
    held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for p in held]


@pytest.mark.parametrize(("layout", "peers"), [("ddp2", [(0, 1)]), ("hsdp4", [(0, 2), (1, 3)])])
def test_replicas_stay_equal_bit_for_bit(pool: RankPool, layout: str, peers: list[tuple[int, int]]) -> None:
    ranks = on_layout(pool, digests, layout, layout)
    for one, other in peers:
        assert ranks[one] == ranks[other]


# ---- limits of time ------------------------------------------------------------------------------------------------


class Limits(pl.Callback):
    """The limit of every process group, before and after the first step."""

    def __init__(self) -> None:
        self.seen: list[set[timedelta]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Any) -> None:
        mesh = trainer.strategy.mesh
        groups = [dist.group.WORLD, *mesh.get_all_groups()]
        self.seen.append({g._get_backend(torch.device("cpu")).options._timeout for g in groups})


def limits(layout: str) -> list[set[timedelta]]:
    seen = Limits()
    strategy = {"start_timeout": 77.0, "collective_timeout": 33.0}
    make_trainer(layout, callbacks=[seen], strategy=strategy, max_steps=2).fit(build_module("mlp"), shares("mlp", 2))
    return seen.seen


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "hsdp4"])
def test_limits_for_the_start_and_for_training_reach_every_group(pool: RankPool, layout: str) -> None:
    start, training = {timedelta(seconds=77)}, {timedelta(seconds=33)}
    for seen in on_layout(pool, limits, layout, layout):
        assert seen == [start, training, training]


# ---- a step does not wait for the device ---------------------------------------------------------------------------


class Reads(pl.Callback):
    """How often a step turns a tensor into a number, which on a GPU waits for all that is queued."""

    NAMES = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy")

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._stock = {name: getattr(Tensor, name) for name in self.NAMES}

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps.append(Counter())
        self.patch()

    def on_train_batch_end(self, *args: Any) -> None:
        self.restore()

    def patch(self) -> None:
        for name, method in self._stock.items():
            setattr(Tensor, name, self._counted(name, method, self.steps[-1]))

    def restore(self) -> None:
        for name, method in self._stock.items():
            setattr(Tensor, name, method)

    def _counted(self, name: str, method: Any, seen: Counter[str]) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return method(tensor, *args, **kwargs)

        return read


def reads(layout: str, accumulate: int) -> list[dict[str, int]]:
    counter, metrics = Reads(), StepMetrics(total_steps=100, global_size=GLOBAL_SIZE)
    trainer = make_trainer(
        layout,
        callbacks=[counter, Order(metrics, counter)],
        accumulate=accumulate,
        strategy={"nonfinite": "ignore"},  # which never looks
        max_steps=3,
        gradient_clip_val=0.5,
        log_every_n_steps=100,
    )
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    module: Any = build_module("gpt")
    # Adam's own count of steps is a number on the host.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    trainer.fit(module, shares("gpt", 3))
    return [dict(step) for step in counter.steps]


class Order(pl.Callback):
    """The framework's own metrics, inside what is counted."""

    def __init__(self, metrics: StepMetrics, counter: Reads) -> None:
        self.metrics = metrics
        self.counter = counter

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.on_train_start(trainer, pl_module)

    def on_train_batch_end(self, *args: Any) -> None:
        self.counter.patch()
        self.metrics.on_train_batch_end(*args)
        self.counter.restore()


@pytest.mark.parametrize(("layout", "accumulate"), [("one", 1), ("one", 2), ("ddp2", 2), ("fsdp2", 2)])
def test_a_step_reads_no_number_off_the_device_unless_it_logs(pool: RankPool, layout: str, accumulate: int) -> None:
    for first, *others in on_layout(pool, reads, layout, layout, accumulate):
        assert sum(first.values()) > 0, "the first step logs its loss"
        assert others == [{}, {}]


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def scheduled(kind: str) -> Any:
    """A module with a schedule, whose state is a part of a checkpoint."""
    module: Any = build_module(kind)
    make_optimizer = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = make_optimizer()
        scheduler = build_scheduler(optimizer, kind="cosine", total_steps=12, warmup_steps=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    return module


def fit_to(step: int, layout: str, *, start: str | None, save: str | None) -> list[float]:
    """Losses up to `step`, from the beginning or from a checkpoint; every step has the same batch."""
    recorder = Recorder()
    trainer = make_trainer(layout, callbacks=[recorder], max_steps=step, precision="64-true", gradient_clip_val=0.5)
    trainer.fit(scheduled("gpt-tied"), shares("gpt", 1, tp=LAYOUTS[layout].tp), ckpt_path=start)
    assert trainer.global_step == step
    if save:
        trainer.save_checkpoint(save)
    return recorder.record.losses


@pytest.mark.parametrize("before", ["one", "ddp2", "fsdp2", "hsdp4", "tp2", "ddp+tp4", "fsdp+tp4"])
def test_a_checkpoint_continues_under_any_layout(pool: RankPool, tmp_path: Path, before: str) -> None:
    straight = fit_to(8, "one", start=None, save=None)
    path = str(tmp_path / "middle.ckpt")
    first = on_layout(pool, checkpoint_part, before, 4, before, None, path)[0]
    saved = torch.load(path, weights_only=True)
    assert set(saved["optimizer_states"][0]["state"]) == set(saved["state_dict"]) - {"model.head.weight"}
    tied = [saved["state_dict"][f"model.{name}.weight"] for name in ("tok_emb", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr(), "one tensor, saved once"
    for after in ("one", "ddp2", "fsdp4", "tp2", "fsdp+tp4"):
        second = on_layout(pool, checkpoint_part, after, 8, after, path, None)[0]
        assert relative_gap(first + second, straight) < 1e-12, (before, after)
    assert build_module("gpt-tied").load_state_dict(saved["state_dict"], assign=True)


def checkpoint_part(step: int, layout: str, start: str | None, save: str | None) -> list[float]:
    return fit_to(step, layout, start=start, save=save)


def life(layout: str) -> dict[str, Any]:
    """Fit with checkpoints, validate, test, predict, fit on, and what became of the parameters."""
    module: Any = build_module("mlp")
    module.predict_step = lambda batch, batch_idx: module(batch[0]).argmax(1)
    saver = ModelCheckpoint(dirpath="kept", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(layout, callbacks=[saver], max_steps=4, enable_checkpointing=True)
    data = shares("mlp", 4)
    trainer.fit(module, data, data)
    weights = {name: whole(p) for name, p in module.named_parameters()}
    result: dict[str, Any] = {"val": trainer.validate(module, data, verbose=False)[0]["val/loss"]}
    result["test"] = trainer.test(module, data, verbose=False)[0]["test/loss"]
    result["best"] = trainer.test(module, data, ckpt_path="kept/step=4.ckpt", verbose=False)[0]["test/loss"]
    result["old"] = trainer.test(module, data, ckpt_path="kept/step=2.ckpt", verbose=False)[0]["test/loss"]
    trainer.test(module, data, ckpt_path="kept/step=4.ckpt", verbose=False)
    result["predictions"] = len(trainer.predict(module, data))
    result["unchanged"] = all(torch.equal(whole(p), weights[name]) for name, p in module.named_parameters())
    result["files"] = sorted(path.name for path in Path("kept").iterdir())
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, data)
    result["steps"] = trainer.global_step
    result["trained on"] = not torch.equal(whole(module.model.head.weight), weights["model.head.weight"])
    return result


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_a_trainers_life(pool: RankPool, layout: str) -> None:
    for result in on_layout(pool, life, layout, layout):
        assert result["val"] == result["test"] == result["best"] != result["old"]
        assert result["predictions"] == 4
        assert result["unchanged"]
        assert result["files"] == ["step=2.ckpt", "step=4.ckpt"]
        assert result["steps"] == 6
        assert result["trained on"]


def save_early(layout: str) -> list[float]:
    """Losses when a checkpoint is written before the first step, and without."""

    class Early(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint("early.ckpt")

    gaps = []
    for callbacks in ([], [Early()]):
        recorder = Recorder()
        trainer = make_trainer(layout, callbacks=[recorder, *callbacks], max_steps=3)
        trainer.fit(build_module("mlp"), shares("mlp", 3))
        gaps.append(recorder.record.losses)
    return [a - b for a, b in zip(*gaps, strict=True)]


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_a_checkpoint_before_the_first_step_does_not_change_training(pool: RankPool, layout: str) -> None:
    assert on_layout(pool, save_early, layout, layout)[0] == [0.0] * 3


class Malicious:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("owned",))


def test_a_checkpoint_does_not_run_code(tmp_path: Path) -> None:
    make_trainer("one", max_steps=0)
    torch.save({"state_dict": {}, "payload": Malicious()}, tmp_path / "bad.ckpt")
    trainer = make_trainer("one", max_steps=1)
    with pytest.raises(Exception, match="weights_only"):
        trainer.fit(build_module("mlp"), shares("mlp", 1), ckpt_path=str(tmp_path / "bad.ckpt"))
    assert not Path("owned").exists()


# ---- without Hydra -------------------------------------------------------------------------------------------------

SPAWNED = """
import logging, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, TESTS)
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from shardwise.telemetry.step_metrics import StepMetrics
from shardwise.strategies import MeshStrategy
from training import Regression, Shares
from torch.utils.data import DataLoader

class Everything(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Shares("plain", 3), batch_size=None)

class Module(Regression):
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.training_step(batch, batch_idx), sync_dist=True)

def trainer(strategy, devices, **options):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=3, max_epochs=-1,
                      **{**quiet, **options})

if __name__ == "__main__":
    torch.set_num_threads(1)
    saver = ModelCheckpoint(dirpath="kept", filename="{step}")
    torch.manual_seed(0)
    module = Module()
    start = module.head.weight.detach().clone()
    one = Module()
    one.load_state_dict(module.state_dict())
    spawned = trainer(MeshStrategy(dp_shard=-1), 2, callbacks=[saver])
    spawned.fit(module, Everything())
    trainer(MeshStrategy(), 1, enable_checkpointing=False).fit(one, Everything())
    gap = max(float((a - b).abs().max().detach()) for a, b in zip(module.parameters(), one.parameters()))
    print("shape", tuple(module.head.weight.shape), "plain", type(module.head.weight.data).__name__)
    print("moved", float((module.head.weight - start).detach().abs().max()) > 1e-4, "gap", gap < 1e-6)
    kept = torch.load("kept/step=3.ckpt", weights_only=True)["state_dict"]
    print("saved", all(torch.equal(kept[n], p) for n, p in module.state_dict().items()))
    ours = trainer(MeshStrategy(dp_shard=-1), 2).test(module, DataLoader(Shares("plain", 2), batch_size=None),
                                                      verbose=False)
    theirs = trainer(MeshStrategy(), 1).test(one, DataLoader(Shares("plain", 2), batch_size=None), verbose=False)
    print("test", abs(ours[0]["test/loss"] - theirs[0]["test/loss"]) < 1e-6)
"""


def test_a_trainer_without_hydra_spawns_its_processes_and_gets_the_weights_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED.replace("TESTS", repr(str(Path(__file__).parent))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(?:shape|moved|saved|test) .*", done.stdout, re.MULTILINE) == [
        "shape (3, 6) plain Tensor",
        "moved True gap True",
        "saved True",
        "test True",
    ], done.stdout


# ---- refusals ------------------------------------------------------------------------------------------------------


class Manual(Masks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def refused(module: pl.LightningModule, strategy: MeshStrategy, **options: Any) -> str:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "max_steps": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, enable_progress_bar=False, **quiet, **options)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, shares("plain", 1))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_what_is_not_supported_is_refused_with_the_fix() -> None:
    assert "MeshStrategy(accumulate=2)" in refused(Masks(), MeshStrategy(), accumulate_grad_batches=2)
    assert "automatic_optimization=True" in refused(Manual(), MeshStrategy())
    assert "makes 3 ranks, but there are 1" in refused(Masks(), MeshStrategy(dp_replicate=1, dp_shard=3))
    assert "only one degree can be -1" in refused(Masks(), MeshStrategy(dp_replicate=-1, dp_shard=-1))
    assert "dp_shard=0: a degree is a positive number" in refused(Masks(), MeshStrategy(dp_shard=0))
    assert "does not divide the 1 ranks" in refused(Masks(), MeshStrategy(dp_shard=2))
    assert "precision='16-true' is not supported" in refused(Masks(), MeshStrategy(), precision="16-true")


def disagree() -> str:
    seed = dist.get_rank()
    try:
        make_trainer("ddp2", strategy={"seed": seed}, max_steps=1).fit(build_module("mlp"), shares("mlp", 1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_stop_and_say_about_what(pool: RankPool) -> None:
    for text in pool.run(disagree):
        assert text.startswith("the ranks disagree about seed: 0 on rank 0; 1 on rank 1")


class Idle(Masks):
    """A parameter that has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def unused(layout: str, find: bool) -> str:
    trainer = make_trainer(layout, strategy={"find_unused_parameters": find}, max_steps=3)
    try:
        trainer.fit(Idle(), shares("plain", 3))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return f"{trainer.global_step} steps"


def test_unused_parameters(pool: RankPool) -> None:
    assert pool.run(unused, "ddp2", True) == ["3 steps"] * 2
    assert pool.run(unused, "fsdp2", False) == ["3 steps"] * 2
    for text in pool.run(unused, "ddp2", False):
        assert "strategy.find_unused_parameters=true" in text


def test_training_is_repeatable_bit_for_bit() -> None:
    first, again = (train("gpt-dropout", "one", 2, 3, {"precision": "32-true"}).losses for _ in range(2))
    assert first == again


class _Logs(pl.LightningModule):
    """Logs each micro-batch's mean of its inputs, largest and number, in training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("mean", batch.mean(), on_step=True)
        self.log("largest", batch.max(), on_step=True, reduce_fx="max")
        self.log("number", torch.tensor(float(len(batch))), on_step=True, reduce_fx="sum")
        return self.head(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _LastLogged(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values = {name: float(value) for name, value in trainer.logged_metrics.items()}


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_what_a_module_logs_is_of_the_whole_step_and_not_of_its_last_micro_batch(accumulate: int) -> None:
    batch = torch.tensor([[1.0], [2.0], [9.0], [4.0], [5.0]])  # 5 samples: micro-batches of unequal sizes
    last = _LastLogged()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MeshStrategy(accumulate=accumulate),
        max_steps=1,
        log_every_n_steps=1,
        logger=False,
        callbacks=[last],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Logs(), torch.utils.data.DataLoader(batch, batch_size=None, sampler=[slice(0, 5)]))
    assert last.values == {"mean": pytest.approx(4.2), "largest": 9.0, "number": 5.0}


class _LogsByRank(_Logs):
    """Logs, without a word about ranks, what differs between them; rank 0 alone logs one thing more."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0:
            self.log("first", batch.mean(), on_step=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/mean", batch.mean(), batch_size=len(batch))
        self.log_dict({"val/same": batch.mean()}, batch_size=len(batch))


def _logged_by_ranks(accumulate: int, dp_shard: int) -> dict[str, float]:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    mine = torch.tensor([[1.0], [2.0], [9.0], [4.0]]) if rank == 0 else torch.tensor([[5.0], [6.0]])
    last = _LastLogged()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MeshStrategy(accumulate=accumulate, dp_shard=dp_shard),
        max_steps=1,
        log_every_n_steps=1,
        logger=False,
        callbacks=[last],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    loader = torch.utils.data.DataLoader(mine, batch_size=None, sampler=[slice(0, len(mine))])
    trainer.fit(_LogsByRank(), loader, loader)
    return {**last.values, **{k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}}


@pytest.mark.parametrize(("accumulate", "dp_shard"), [(1, 1), (2, -1)])
def test_what_a_module_logs_is_of_all_ranks_though_it_knows_of_none(
    pool: RankPool, accumulate: int, dp_shard: int
) -> None:
    first, second = pool.run(_logged_by_ranks, accumulate, dp_shard, world_size=2, init=False)
    expected = {"mean": pytest.approx(27 / 6), "largest": 9.0, "number": 6.0, "val/mean": pytest.approx(27 / 6)}
    expected["val/same"] = expected["val/mean"]
    assert second == expected
    assert first == {**expected, "first": pytest.approx(4.0)}
