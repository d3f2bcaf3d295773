"""Losses and gradients that are not finite: which step, rank and layer, and what becomes of the run."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import SumMetric

from pool import RankPool
from shardwise.errors import ConfigError, DivergedError
from shardwise.strategies import MeshStrategy
from shardwise.strategies.precision import mesh_precision
from training import LAYOUTS, PLANS, Recorder, Regression, build_module, make_trainer, on_layout, shares

STEPS = 5


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Break(pl.Callback):
    """Multiplies what a layer puts out (or the gradient of it) by ``factor``, on one rank, in some steps."""

    def __init__(
        self, layer: str, *, rank: int, steps: tuple[int, ...] = (3,), factor: float = math.nan, backward: bool = False,
        micro: int | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.rank, self.steps, self.factor = layer, rank, steps, factor
        self.backward, self.micro = backward, micro
        self._passes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._passes = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(layer: Any, args: Any, out: Tensor) -> Tensor | None:
            accumulate = trainer.strategy.accumulate
            micro, self._passes = self._passes % accumulate, self._passes + 1
            here = trainer.global_rank == self.rank and trainer.global_step + 1 in self.steps
            if not here or self.micro not in (None, micro):
                return None
            return Scaled.apply(out, self.factor) if self.backward else out * self.factor

        pl_module.get_submodule(self.layer).register_forward_hook(hook)


class Lines(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step or 0, dict(metrics)))


def run(
    kind: str,
    layout: str,
    breaks: dict[str, Any] | None,
    policy: str = "stop",
    accumulate: int = 1,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What came of a training: its numbers, or the error; and what was said and logged."""
    torch.manual_seed(11)
    recorder, lines, said = Recorder(), Lines(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardwise.strategies.nonfinite")
    log.addHandler(handler)
    callbacks = [recorder, *([] if breaks is None else [Break(**breaks)])]
    given = {"max_steps": STEPS, "log_every_n_steps": 1, **(options or {})}
    scaled = given.pop("precision", "64-true") == "16-mixed"
    trainer = make_trainer(
        layout,
        callbacks=callbacks,
        accumulate=accumulate,
        strategy={"plan": PLANS.get(kind), "nonfinite": policy},
        precision="32-true" if scaled else "64-true",
        logger=lines,
        **given,
    )
    if scaled:  # Lightning does not allow it on CPUs
        trainer.strategy.precision_plugin = mesh_precision("16-mixed", device_type="cpu", autocast="fsdp" not in layout)
    error, module = "", build_module(kind)
    try:
        trainer.fit(module, shares(kind, given["max_steps"], tp=LAYOUTS[layout].tp))
    except DivergedError as diverged:
        error, step = str(diverged), diverged.step
    if error:
        assert step == trainer.global_step + 1
        for parameter in module.parameters():
            assert getattr(parameter, "_local_tensor", parameter).isfinite().all(), "no step was made with it"
    log.removeHandler(handler)
    record = recorder.record
    return {
        "error": error.splitlines(),
        "said": said,
        "losses": record.losses,
        "end": dict(record.end),
        "skipped": trainer.strategy.skipped_steps,
        "steps": trainer.global_step,
        "lines": lines.lines,
    }


MLP_UP = "model.blocks.1.mlp.up"


@pytest.mark.parametrize(
    ("kind", "layout", "layer", "rank"),
    [
        ("plain", "one", "blocks.1.0", 0),
        ("plain", "ddp2", "blocks.1.0", 1),
        ("gpt", "fsdp2", MLP_UP, 1),
        ("gpt", "tp2", MLP_UP, 1),
        ("gpt", "ddp+tp4", MLP_UP, 3),
        ("gpt", "fsdp+tp4", MLP_UP, 2),
        ("gpt", "hsdp4", MLP_UP, 3),
    ],
)
def test_a_nan_in_one_layer_on_one_rank_is_named(pool: RankPool, kind: str, layout: str, layer: str, rank: int) -> None:
    found = on_layout(pool, run, layout, kind, layout, {"layer": layer, "rank": rank})
    (said,) = {one["error"][0] for one in found}
    assert said.startswith("loss is nan at step 3"), "every rank says the same"
    if layout != "one":
        assert f" on rank {rank} (" in said
    assert said.endswith(f": first in {layer.removeprefix('model.')} (output of the layer; its input was finite)")
    (fix,) = {one["error"][1] for one in found}
    assert fix == (
        "try a smaller optimizer.lr (it is 0.01 in this step), or trainer.gradient_clip_val=1.0, or "
        "monitor.nonfinite=skip, which leaves such steps out"
    )
    assert {one["steps"] for one in found} == {2}
    step, values = found[0]["lines"][-1]
    assert step == 3
    assert math.isnan(values["train/loss"]), "the last line of the metrics tells it"


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_an_infinite_loss_is_found(pool: RankPool, layout: str) -> None:
    """Also where nothing but the loss is infinite, and its gradient is not."""
    rank = LAYOUTS[layout].world_size - 1
    breaks = {"layer": "head", "rank": rank, "factor": 1e200}
    found = on_layout(pool, run, layout, "plain", layout, breaks)
    (said,) = {one["error"][0] for one in found}
    assert said.startswith("loss is inf at step 3")
    assert said.endswith(": first in the loss itself (every layer's output was finite)")


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_the_micro_batch_is_named(pool: RankPool, layout: str) -> None:
    rank = LAYOUTS[layout].world_size - 1
    breaks = {"layer": "blocks.1.0", "rank": rank, "micro": 1}
    found = on_layout(pool, run, layout, "plain", layout, breaks, "stop", 4)
    (said,) = {one["error"][0] for one in found}
    assert " (micro-batch 2 of 4): first in blocks.1.0 (output" in said


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2", "tp2", "fsdp+tp4"])
def test_a_gradient_that_is_not_finite_under_a_finite_loss(pool: RankPool, layout: str) -> None:
    rank, kind = LAYOUTS[layout].world_size - 1, "gpt" if "tp" in layout else "plain"
    layer = "model.blocks.1.mlp" if kind == "gpt" else "blocks.1"
    breaks = {"layer": layer, "rank": rank, "backward": True}
    clipped = {"gradient_clip_val": 0.5}
    found = on_layout(pool, run, layout, kind, layout, breaks, "stop", 1, clipped)
    (said,) = {one["error"][0] for one in found}
    assert said.startswith("the norm of the gradients is nan (losses are finite) at step 3")
    named = layer.removeprefix("model.")
    assert f"first in {named}" in said, said
    assert {one["steps"] for one in found} == {2}
    # Without a norm the step is made, and the next one finds what it has done.
    found = on_layout(pool, run_unchecked, layout, kind, layout, breaks)
    (said,) = set(found)
    assert said.startswith("loss is nan at step 4")
    assert "a parameter (it was not finite before this step)" in said


def run_unchecked(kind: str, layout: str, breaks: dict[str, Any]) -> str:
    torch.manual_seed(11)
    strategy = {"plan": PLANS.get(kind)}
    trainer = make_trainer(layout, callbacks=[Break(**breaks)], strategy=strategy, max_steps=STEPS)
    with pytest.raises(DivergedError) as raised:
        trainer.fit(build_module(kind), shares(kind, STEPS, tp=LAYOUTS[layout].tp))
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("backward", [False, True])
def test_a_skipped_step_is_one_that_was_not_made(pool: RankPool, clip: float | None, backward: bool) -> None:
    """Under every layout, to the numbers of one device; parameters and the optimizer's state stay as they were."""
    options = {"gradient_clip_val": clip}
    breaks = {"layer": "model.blocks.1", "backward": backward}
    (expected,) = on_layout(pool, run, "one", "gpt", "one", {**breaks, "rank": 0}, "skip", 1, options)
    plain = run("gpt", "one", None, "stop", 1, options)
    assert expected["losses"][:2] == plain["losses"][:2]
    assert expected["losses"][3] != plain["losses"][3]
    assert math.isnan(expected["losses"][2]) != backward
    for layout in ("ddp2", "fsdp2", "tp2", "fsdp+tp4"):
        rank = LAYOUTS[layout].world_size - 1
        found = on_layout(pool, run, layout, "gpt", layout, {**breaks, "rank": rank}, "skip", 2, options)
        for one in found:
            assert (one["skipped"], one["steps"], one["error"]) == (1, STEPS, [])
            assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9, nan_ok=True)
        for name, tensor in expected["end"].items():
            torch.testing.assert_close(found[0]["end"][name], tensor, rtol=1e-7, atol=1e-9)
        assert [line.partition(": first")[0].endswith("other") for line in found[0]["said"]] in ([False], [True])
        assert found[0]["said"][0].endswith("; the step is skipped (1 so far)")
        assert not any(one["said"] for one in found[1:]), "rank 0 speaks for all"


class Counts(Regression):
    """Counts its steps in a metric; the loss of the third is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.update(1.0)
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.global_step == 2 else loss


def test_a_step_that_is_run_again_counts_once_in_metrics() -> None:
    trainer, module = make_trainer("one", max_steps=4, strategy={"nonfinite": "skip"}, logger=False), Counts()
    trainer.fit(module, shares("plain", 4))
    assert (trainer.strategy.skipped_steps, float(module.steps.compute())) == (1, 4.0)


def test_a_first_step_that_is_skipped_leaves_no_state_behind() -> None:
    """Whatever counts steps, in the optimizer too, does not count it: the second step is what a first one would be."""
    found = run("plain", "one", {"layer": "head", "rank": 0, "steps": (1, 2)}, "skip")
    assert (found["skipped"], found["steps"]) == (2, STEPS)

    class Same(pl.Callback):
        def __init__(self) -> None:
            self.states: list[int] = []

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.states.append(len(optimizer.state))

    watch = Same()
    trainer = make_trainer(
        "one",
        callbacks=[Break("head", rank=0, steps=(1,)), watch],
        strategy={"nonfinite": "skip"},
        max_steps=2,
    )
    trainer.fit(build_module("plain"), shares("plain", 2))
    assert watch.states == [0, 0], "no state before the second step"
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {1}


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_a_scaler_skips_by_itself_and_the_step_is_counted(pool: RankPool, layout: str) -> None:
    rank = LAYOUTS[layout].world_size - 1
    breaks = {"layer": "blocks.1.0", "rank": rank}
    found = on_layout(pool, run, layout, "plain", layout, breaks, "skip", 2, {"precision": "16-mixed"})
    for one in found:
        assert (one["skipped"], one["steps"]) == (1, STEPS)
        assert all(tensor.isfinite().all() for tensor in one["end"].values())
        assert math.isfinite(one["losses"][-1])


def test_ten_skipped_steps_in_a_row_end_the_run(pool: RankPool) -> None:
    breaks = {"layer": "blocks.1.0", "rank": 1, "steps": tuple(range(3, 40))}
    for one in pool.run(run, "plain", "ddp2", breaks, "skip", 1, {"max_steps": 30}):
        assert one["steps"] == 11
        assert "; 10 steps in a row were skipped, and nothing moves any more that could change that" in one["error"][0]
        assert "monitor.nonfinite=skip" not in one["error"][1]


def finite(layout: str, policy: str, clip: float | None) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """A training with dropout in which nothing is wrong."""
    torch.manual_seed(11)
    recorder = Recorder()
    options = {"strategy": {"nonfinite": policy}, "gradient_clip_val": clip, "accumulate": 2, "max_steps": 4}
    trainer = make_trainer(layout, callbacks=[recorder], **options)
    trainer.fit(build_module("gpt-dropout"), shares("gpt", 4, tp=LAYOUTS[layout].tp))
    return recorder.record.losses, recorder.record.end, [torch.get_rng_state()]


@pytest.mark.parametrize(("layout", "clip"), [("one", None), ("ddp2", 0.5), ("fsdp2", None), ("tp2", None)])
def test_looking_changes_no_bit(pool: RankPool, layout: str, clip: float | None) -> None:
    expected = on_layout(pool, finite, layout, layout, "ignore", clip)
    for policy in ("stop", "skip"):
        for (losses, end, state), (losses_0, end_0, state_0) in zip(
            on_layout(pool, finite, layout, layout, policy, clip), expected, strict=True
        ):
            assert losses == losses_0
            assert all(torch.equal(end[name], tensor) for name, tensor in end_0.items())
            assert torch.equal(state[0], state_0[0]), "the next random number is the same too"


def test_a_batch_that_is_not_finite_is_named() -> None:
    class Bad(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                batch[0][3] = math.inf

    trainer = make_trainer("one", callbacks=[Bad()], max_steps=3)
    with pytest.raises(DivergedError, match=r"at step 2: first in the batch holds") as raised:
        trainer.fit(build_module("plain"), shares("plain", 3))
    assert "values that are not finite" in str(raised.value)


def test_what_does_not_come_again_is_said_so(pool: RankPool) -> None:
    """Noise of the hardware, say."""
    found = pool.run(run_once, timeout=60.0)
    assert len(set(found)) == 1
    assert found[0].endswith(": not found again when the step was run a second time")
    assert found[0].startswith("loss is nan at step 3 on rank 1 (")


def run_once() -> str:
    class Once(Break):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def hook(layer: Any, args: Any, out: Tensor) -> Tensor | None:
                if dist.get_rank() == 1 and trainer.global_step == 2 and torch.is_grad_enabled():
                    return out * math.nan
                return None

            pl_module.blocks.register_forward_hook(hook)

    torch.manual_seed(11)
    trainer = make_trainer("ddp2", callbacks=[Once("blocks", rank=1)], max_steps=4)
    with pytest.raises(DivergedError) as raised:
        trainer.fit(build_module("plain"), shares("plain", 4))
    return str(raised.value).splitlines()[0]


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonfinite='halt': one of stop, skip, ignore is needed"):
        MeshStrategy(nonfinite="halt")


# ---- whole runs ------------------------------------------------------------------------------------------------------

SMALL = ["model=mlp", "model.width=8", "trainer.max_steps=8", "schedule.warmup_steps=0", "trainer.log_every_n_steps=1"]
BAD = ["optimizer=sgd", "optimizer.lr=1e30"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_diverges_ends_with_the_reason_first_and_no_restart(train_py: Any, devices: int) -> None:
    on = [f"trainer.devices={devices}", "launch.max_restarts=2", "checkpoint.every_n_steps=1"]
    ended = train_py(*SMALL, *BAD, *on, "logger=none", ok=False)
    assert ended.returncode == 1
    lines = ended.stderr.strip().splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    assert lines[place].startswith("error: loss is "), ended.stderr
    assert lines[place + 1].startswith("try a smaller optimizer.lr (it is ")
    assert "Traceback" not in ended.stderr
    assert "restart" not in ended.stderr
    assert lines[-2:] == ["next:", lines[-1]]
    assert f" resume={ended.run_folder}" in lines[-1]
    result = json.loads((ended.run_folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"] == lines[place].removeprefix("error: ")
    assert result["diverged_at"] == result["steps"] + 1
    last = [line for line in ended.metrics if "train/loss" in line][-1]
    assert (last["step"], last["train/loss"]) == (result["steps"] + 1, None)
    assert sorted(path.name for path in (ended.run_folder / "checkpoints").glob("step_*"))[-1] == (
        f"step_{result['steps']:08d}"
    )


def test_skipped_steps_are_counted_in_the_metrics(train_py: Any) -> None:
    run = train_py(*SMALL, *BAD, "monitor.nonfinite=skip", "logger=none")
    counts = [line["skipped_steps"] for line in run.metrics if "skipped_steps" in line]
    assert counts[0] == 0
    assert counts[-1] == run.stdout.count("the step is skipped") > 0
    assert json.loads((run.run_folder / "result.json").read_text())["metrics"]["skipped_steps"] == counts[-1]


def test_a_job_that_diverges_does_not_stop_a_sweep(train_py: Any, tmp_path: Path) -> None:
    words = ["-m", *SMALL, "optimizer=sgd", "optimizer.lr=1e30,1e-2", "logger=none", "sweep.name=rates"]
    words += ["trainer.devices=1", "sweep.on_failure=stop"]
    swept = train_py(*words)
    assert "diverged at step " in swept.stdout
    rows = json.loads(next(tmp_path.rglob("sweeps/rates/jobs.json")).read_text())
    assert [row["status"] for row in rows] == ["diverged", "completed"]
    assert rows[0]["message"].startswith("loss is ")
    assert rows[0]["attempts"] == 1
    again = train_py(*words, "sweep.allow_code_change=true")
    assert again.stdout.count("was done before") == 2, "it would only diverge again"
