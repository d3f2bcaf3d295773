"""The gradient noise scale: the estimator, what is measured under each layout, and what a run says of it."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from pool import RankPool
from shardwise.build import check_callbacks
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.noise_scale import GradientNoiseScale
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.gradient_noise import NoiseScale, about, estimate, verdict
from shardwise.parallel.initialise import materialise
from shardwise.resolve import World, resolve_in
from shardwise.strategies.precision import mesh_precision
from shardwise.tracking import JsonlLogger
from training import (
    GLOBAL_SIZE,
    LAYOUTS,
    PLANS,
    Recorder,
    build_module,
    digits,
    global_batch,
    make_trainer,
    on_layout,
    shares,
)
from warm import Warm

# ---- the estimator ---------------------------------------------------------------------------------------------------

DRAWS = 20_000
DEVIATIONS = torch.linspace(0.1, 3.0, 40, dtype=torch.float64)  # sqrt of the diagonal of Sigma
TRUE = torch.linspace(-0.4, 0.5, 40, dtype=torch.float64)


def estimates(sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Estimates of |G|^2 and tr(Sigma) from many global batches, each in shares of these sizes."""
    generator = torch.Generator().manual_seed(1)
    n_R = torch.tensor(sizes, dtype=torch.float64)
    noise_NRD = torch.randn(DRAWS, len(sizes), len(TRUE), generator=generator, dtype=torch.float64)
    own_NRD = TRUE + noise_NRD * DEVIATIONS / n_R[:, None].sqrt()
    weights_R = n_R / n_R.sum()
    whole_N = (own_NRD * weights_R[:, None]).sum(1).square().sum(-1)
    small_N = (own_NRD.square().sum(-1) * weights_R).sum(1)
    total = float(n_R.sum())
    pairs = [
        estimate(float(small), float(whole), small_batch=total / len(sizes), big_batch=total)
        for small, whole in zip(small_N, whole_N, strict=True)
    ]
    return torch.tensor(pairs, dtype=torch.float64).unbind(1)


def test_the_estimator_is_unbiased_and_as_exact_as_theory_says() -> None:
    share, number = 8, 4
    norms, variances = estimates([share] * number)
    covariance, batch = DEVIATIONS.square(), share * number
    # For Gaussian noise the mean of the shares and their spread about it are independent: the spread is a sum of
    # chi-squares with R - 1 degrees of freedom, and |G|^2 is |mean|^2 less tr(Sigma) / B of that spread.
    of_variance = 2 * covariance.square().sum() / (number - 1)
    of_norm = 4 * (TRUE.square() * covariance).sum() / batch + (2 * covariance.square().sum() + of_variance) / batch**2
    for found, truth, spread in (
        (norms, TRUE.square().sum(), of_norm),
        (variances, covariance.sum(), of_variance),
    ):
        assert abs(found.mean() - truth) < 4 * (spread / DRAWS).sqrt()
        assert found.var() == pytest.approx(float(spread), rel=0.05)


def test_the_estimator_is_unbiased_where_shares_differ() -> None:
    norms, variances = estimates([1, 3, 12])
    for found, truth in ((norms, TRUE.square().sum()), (variances, DEVIATIONS.square().sum())):
        assert abs(found.mean() - truth) < 4 * found.std() / math.sqrt(DRAWS)


def test_averages_start_without_a_bias_and_are_divided_last() -> None:
    scale = NoiseScale(decay=0.9)
    scale.add(2.0, 6.0)
    assert (scale.norm_sq, scale.variance, scale.critical_batch_size) == pytest.approx((2.0, 6.0, 3.0))
    scale.add(1.0, 9.0)
    assert scale.critical_batch_size == pytest.approx((0.9 * 6 + 9) / (0.9 * 2 + 1))
    scale.add(-9.0, 9.0)
    assert scale.critical_batch_size is None, "|G|^2 is not positive"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"norm_sq": 2.0, "variance": 4240.0},
            "batch 512 is below the critical batch size of about 2,100: larger batches still save steps",
        ),
        (
            {"norm_sq": 2.0, "variance": 94.9},
            "batch 512 is above the critical batch size of about 47: larger batches save few steps",
        ),
        ({"norm_sq": -0.0123, "variance": 9.0}, "not estimable: |G|^2 came out as -0.012"),
        ({"norm_sq": 1.0, "variance": -2.0}, "not estimable: tr(Sigma) came out as -2"),
    ],
)
def test_what_is_said_at_the_end(values: dict[str, float], line: str) -> None:
    said = verdict(512, **values, measurements=5, more="")
    assert line in said
    assert "5 measurements" in said


def test_a_few_measurements_are_no_estimate() -> None:
    for number, shown in ((1, "1 measurement"), (4, "4 measurements")):
        line = verdict(64, norm_sq=1.0, variance=60.0, measurements=number, more="callbacks.x.every_n_steps=2")
        assert line == f"only {shown} of the gradient noise: no estimate (callbacks.x.every_n_steps=2)"


def test_sizes_have_two_digits() -> None:
    assert [about(size) for size in (0.3, 7.44, 99.6, 2087.0, 1_234_567.0)] == ["1", "7", "100", "2,100", "1,200,000"]


# ---- what is measured ------------------------------------------------------------------------------------------------


def fit(
    kind: str,
    layout: str,
    *,
    callbacks: list[pl.Callback],
    steps: int,
    accumulate: int = 1,
    strategy: dict[str, Any] | None = None,
    precision: Any = "32-true",
    **options: Any,
) -> pl.Trainer:
    torch.manual_seed(11)
    scaled = precision == "16-mixed"  # Lightning does not allow it on CPUs
    trainer = make_trainer(
        layout,
        callbacks=callbacks,
        accumulate=accumulate,
        strategy={"plan": PLANS.get(kind), **(strategy or {})},
        gradient_clip_val=0.5,
        max_steps=steps,
        precision="32-true" if scaled else precision,
        **options,
    )
    if scaled:
        trainer.strategy.precision_plugin = mesh_precision(precision, device_type="cpu", autocast="fsdp" not in layout)
    trainer.fit(build_module(kind), shares(kind, steps, tp=LAYOUTS[layout].tp))
    return trainer


def first_step(kind: str, layout: str, accumulate: int, precision: str) -> tuple[dict[str, Tensor], float, float]:
    """(parameters, |G|^2, tr(Sigma)) of the first step."""
    recorder, noise = Recorder(), GradientNoiseScale(every_n_steps=1, decay=0.0)
    trainer = fit(kind, layout, callbacks=[recorder, noise], steps=1, accumulate=accumulate, precision=precision)
    logged = trainer.callback_metrics
    assert float(logged["noise_scale/gradient_norm_sq"]) == noise.scale.norm_sq
    return recorder.record.start, noise.scale.norm_sq, noise.scale.variance


def by_hand(kind: str, parameters: dict[str, Tensor], number: int) -> tuple[float, float]:
    """The same of a plain model: the gradient of the mean loss of each of ``number`` shares of the first batch."""
    module = build_module(kind).double()
    if any(p.is_meta for p in module.parameters()):
        materialise(module, seed=0, device=torch.device("cpu"))
    for name, parameter in module.named_parameters():
        parameter.data.copy_(parameters[name])
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    count_targets = getattr(module, "count_targets", None)
    batch = global_batch(kind, 0)
    gradients, counts = [], []
    for index in range(number):
        part = slice(index * GLOBAL_SIZE // number, (index + 1) * GLOBAL_SIZE // number)
        share = tuple(t[part].double() if t.is_floating_point() else t[part] for t in batch)
        output = module.training_step(share, 0)
        loss, count = output if isinstance(output, tuple) else (output, len(share[0]))
        if count_targets is not None:
            assert int(count) == int(count_targets(share))
        if isinstance(output, tuple):
            loss = loss / max(float(count), 1.0)
        grads = torch.autograd.grad(loss, [p for _, p in module.named_parameters()])
        gradients.append(torch.cat([g.flatten() for g in grads]))
        counts.append(float(count))
    weights = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    small = sum(w * g.square().sum() for w, g in zip(weights, gradients, strict=True))
    whole = sum(w * g for w, g in zip(weights, gradients, strict=True)).square().sum()
    shares_that_count = int((weights > 0).sum())
    return estimate(float(small), float(whole), small_batch=GLOBAL_SIZE / shares_that_count, big_batch=GLOBAL_SIZE)


@pytest.mark.parametrize(
    ("kind", "layout", "accumulate"),
    [
        ("plain", "one", 2),
        ("gpt-tied", "one", 8),  # the first micro-batch has no target
        ("masked", "one", 4),  # what counts shows only afterwards
        ("gpt", "ddp2", 1),
        ("masked", "ddp2", 2),
        ("plain", "ddp4", 1),
        ("gpt-tied", "fsdp2", 2),
        ("masked", "fsdp4", 2),
        ("gpt", "hsdp4", 1),
        ("plain", "hsdp4", 2),
    ],
)
def test_each_shares_gradient_is_measured(pool: RankPool, kind: str, layout: str, accumulate: int) -> None:
    ranks = on_layout(pool, first_step, layout, kind, layout, accumulate, "64-true")
    parameters, norm_sq, variance = ranks[0]
    number = LAYOUTS[layout].dp_size * (1 if LAYOUTS[layout].uses_fsdp else accumulate)
    assert (norm_sq, variance) == pytest.approx(by_hand(kind, parameters, number), rel=1e-9)
    assert {rank[1:] for rank in ranks} == {(norm_sq, variance)}, "all ranks know it"


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2", "hsdp4"])
@pytest.mark.parametrize(("precision", "gap"), [("32-true", 1e-4), ("16-mixed", 0.2), ("bf16-true", 0.2)])
def test_formats_and_the_scale_of_a_loss_make_no_difference(
    pool: RankPool, layout: str, precision: str, gap: float
) -> None:
    exact, rounded = (
        on_layout(pool, first_step, layout, "plain", layout, 2, kind)[0][1:] for kind in ("64-true", precision)
    )
    assert rounded == pytest.approx(exact, rel=gap)


def test_what_is_not_finite_is_left_out() -> None:
    noise = GradientNoiseScale(every_n_steps=1)
    batches = [global_batch("plain", 0), tuple(t * math.inf for t in global_batch("plain", 1))]
    ignored = {"nonfinite": "ignore"}
    trainer = make_trainer("one", callbacks=[noise], accumulate=2, max_steps=2, strategy=ignored)
    trainer.fit(build_module("plain"), DataLoader(batches, batch_size=None))
    assert trainer.global_step == 2
    assert noise.scale.measurements == 1


# ---- what it costs and does not change -------------------------------------------------------------------------------


def with_and_without(layout: str, accumulate: int, precision: str) -> list[tuple[list[float], float, list[Tensor]]]:
    found = []
    three = {"ddp3": ParallelDims(dp_replicate=3)}
    with patch.dict(LAYOUTS, three):
        for callbacks in ([], [GradientNoiseScale(every_n_steps=2)]):
            recorder = Recorder()
            fit("gpt", layout, callbacks=[recorder, *callbacks], steps=5, accumulate=accumulate, precision=precision)
            found.append((recorder.record.losses, recorder.record.norms, list(recorder.record.end.values())))
        assert callbacks[0].scale.measurements == 2
    return found


@pytest.mark.parametrize(
    ("layout", "accumulate", "precision"),
    [
        ("one", 3, "32-true"),
        ("ddp2", 1, "32-true"),
        ("ddp2", 2, "bf16-true"),
        ("ddp3", 2, "32-true"),
        ("ddp3", 1, "64-true"),
        ("fsdp2", 2, "32-true"),
        ("fsdp2", 1, "bf16-mixed"),
        ("hsdp4", 2, "64-true"),
    ],
)
def test_no_bit_of_the_training_changes(pool: RankPool, layout: str, accumulate: int, precision: str) -> None:
    if layout == "ddp3":
        ranks = pool.run(with_and_without, layout, accumulate, precision, world_size=3)
    else:
        ranks = on_layout(pool, with_and_without, layout, layout, accumulate, precision)
    for without, measured in ranks:
        assert without[:2] == measured[:2]
        assert all(torch.equal(a, b) for a, b in zip(without[2], measured[2], strict=True))


@contextmanager
def counted(owner: Any, name: str, wanted: Any) -> Iterator[list[int]]:
    """Lengths of the first arguments for which `wanted` holds, of each call of a function inside."""
    calls: list[int] = []
    function = getattr(owner, name)

    def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if wanted(tensor):
            calls.append(tensor.numel())
        return function(tensor, *args, **options)

    with patch.object(owner, name, count):
        yield calls


def collectives(layout: str) -> tuple[int, int]:
    """Collectives of 4 numbers that measuring makes in seven steps, and norms that it takes."""
    with (
        counted(dist, "all_reduce", lambda tensor: tensor.dtype == torch.float64 and tensor.numel() == 4) as sums,
        counted(torch.linalg, "vector_norm", lambda tensor: True) as norms,
    ):
        fit("plain", layout, callbacks=[GradientNoiseScale(every_n_steps=3)], steps=7, precision="32-true")
    return len(sums), len(norms)


@pytest.mark.parametrize(("layout", "parts"), [("ddp2", 11), ("fsdp2", 3)])
def test_other_steps_pay_nothing(pool: RankPool, layout: str, parts: int) -> None:
    for sums, norms in on_layout(pool, collectives, layout, layout):
        assert sums == 2
        assert norms == 2 * parts, "each parameter; or two blocks, and what lies around them"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(layout: str, accumulate: int, strategy: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit("plain", layout, callbacks=[GradientNoiseScale()], steps=1, accumulate=accumulate, strategy=strategy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "accumulate", "strategy", "message"),
    [
        ("one", 1, {}, "has only one: give MeshStrategy(accumulate=2), or train on 2 devices"),
        ("tp2", 2, {}, "split layers (strategy.tp=2)"),
        ("fsdp+tp4", 1, {}, "split layers (strategy.tp=2)"),
        ("fsdp2", 2, {"defer_gradient_sync": False}, "type strategy.defer_gradient_sync=true"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(
    pool: RankPool, layout: str, accumulate: int, strategy: dict[str, Any], message: str
) -> None:
    for text in on_layout(pool, refused, layout, layout, accumulate, strategy):
        assert message in text
        assert "\n" not in text


@pytest.mark.parametrize("values", [{"every_n_steps": 0}, {"decay": 1.0}, {"decay": -0.1}])
def test_arguments_have_limits(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))}={next(iter(values.values()))}"):
        GradientNoiseScale(**values)


def test_another_strategy_is_refused() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[GradientNoiseScale()],
        enable_progress_bar=False, enable_model_summary=False, max_steps=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="MeshStrategy"):
        trainer.fit(build_module("plain"), shares("plain", 1))


# ---- in a run --------------------------------------------------------------------------------------------------------


def whole_and_resumed(layout: str, folder: str) -> list[tuple[dict[str, float], list[dict[str, Any]]]]:
    found = []
    for start in (None, 3):
        noise, lines = GradientNoiseScale(every_n_steps=2, decay=0.9), Path(f"{folder}/{layout}-{start}.jsonl")
        saving = SaveCheckpoints(
            f"{folder}/{layout}", every_n_steps=1 if start is None else None, every_minutes=None, keep_last=None,
            at_end=False,
        )  # fmt: skip
        torch.manual_seed(11)
        trainer = make_trainer(
            layout,
            callbacks=[noise, saving],
            accumulate=2,
            max_steps=8,
            log_every_n_steps=1,
            logger=[JsonlLogger(lines)],
        )
        trainer.fit(
            build_module("mlp"),
            datamodule=digits(),
            ckpt_path=None if start is None else f"{folder}/{layout}/step_{start:08d}",
        )
        saving.wait()
        dist.barrier() if dist.is_initialized() else None
        logged = [json.loads(line) for line in lines.read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if k != "time"} for line in logged if "noise_scale" in str(line)]
        found.append((noise.state_dict(), kept))
    return found


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_a_resumed_run_goes_on_with_its_averages(pool: RankPool, tmp_path: Path, layout: str) -> None:
    for (whole, lines), (resumed, lines_again) in on_layout(pool, whole_and_resumed, layout, layout, str(tmp_path)):
        assert whole == resumed
        assert whole["measurements"] == 4
        assert [line["step"] for line in lines] == [2, 4, 6, 8]
        assert lines_again == lines[1:]


EVERY = "callbacks.noise_scale.every_n_steps=1"


def test_a_run_says_at_its_end_how_its_batch_compares(train_py: Any) -> None:
    run = train_py("callbacks=noise_scale", "batch.accumulate=2", "trainer.max_steps=20", EVERY, "logger=none")
    (line,) = [line for line in run.stdout.splitlines() if "critical batch size" in line]
    assert line.startswith("batch 64 is ")
    (result,) = (json.loads(path.read_text()) for path in [run.run_folder / "result.json"])
    metrics = {name: value for name, value in result["metrics"].items() if name.startswith("noise_scale/")}
    ratio = metrics["noise_scale/gradient_variance"] / metrics["noise_scale/gradient_norm_sq"]
    assert metrics["noise_scale/critical_batch_size"] == pytest.approx(ratio)
    assert f"about {about(ratio)}:" in line
    assert line.endswith("(20 measurements)")
    assert metrics["noise_scale/measurements"] == 20

    typed = ["callbacks=noise_scale", "batch.accumulate=2", "logger=none"]
    few = train_py(*typed, "trainer.max_steps=40")
    line = "only 2 measurements of the gradient noise: no estimate (callbacks.noise_scale.every_n_steps=2)"
    assert line in few.stdout.splitlines()
    assert "critical batch size" not in few.stdout


TWO = "compares gradients of two batch sizes, and "
DEVICES = ", or trainer.devices=2"


@pytest.mark.parametrize(
    ("typed", "devices", "message"),
    [
        ([], 1, f"{TWO}one device with batch.accumulate=1 has only one: type batch.accumulate=2{DEVICES}"),
        (["batch.micro_size=64"], 1, "type batch.accumulate=2 in place of batch.micro_size=64"),
        (["batch.global_size=9"], 1, "type batch.accumulate=3"),
        (["strategy.dp_replicate=1"], 1, "type batch.accumulate=2"),
        (
            ["batch.micro_size=auto"],
            1,
            f"{TWO}one device whose batch.micro_size=auto may be the whole batch has only one: type batch.accumulate=2 "
            f"in place of batch.micro_size=auto{DEVICES}",
        ),
        (
            ["batch.global_size=1"],
            1,
            f"{TWO}batch.global_size=1 has only one: type batch.global_size=2 batch.accumulate=2",
        ),
        (["strategy=tp"], 2, "does not measure split layers (strategy.tp=2): "),
        (
            ["strategy=fsdp", "strategy.defer_gradient_sync=false", "batch.accumulate=2"],
            2,
            "type strategy.defer_gradient_sync=true",
        ),
        (["batch.micro_size=auto"], 2, None),
        (["batch.accumulate=2"], 1, None),
        (["strategy=fsdp"], 2, None),
    ],
)
def test_a_configuration_is_refused_with_what_can_be_typed_instead(
    typed: list[str], devices: int, message: str | None
) -> None:
    def check(*overrides: str, devices: int) -> None:
        config = compose(["callbacks=noise_scale", *overrides])
        check_callbacks(resolve_in(config, World(1, devices, "cpu", "local", "told by the test")))

    if message is None:
        check(*typed, devices=devices)
        return
    with pytest.raises(ConfigError) as caught:
        check(*typed, devices=devices)
    text = str(caught.value)
    assert message in text
    assert text.endswith(message) or "split layers" in message
    for advice in text.rpartition(": type ")[2].split(", or ") if ": type " in text else []:
        words, _, replaced = advice.partition(" in place of ")
        key = replaced.partition("=")[0] or "batch.micro_size=auto"
        if words == "trainer.devices=2":
            check(*typed, devices=2)
        else:
            check(*(one for one in typed if not one.startswith(key)), *words.split(), devices=devices)


def test_a_run_with_nothing_to_compare_is_one_line_and_leaves_nothing(train_py: Any) -> None:
    for typed in ([], ["batch.micro_size=auto"], ["strategy=tp", "trainer.devices=2"]):
        run = train_py("callbacks=noise_scale", "logger=none", *typed, ok=False)
        (line,) = run.stderr.splitlines()
        assert line.startswith("error: callbacks=noise_scale ")
        assert run.stdout == ""
        assert not run.output_root.exists()


def test_a_run_that_was_measured_is_evaluated_on_one_device(train_py: Any, warm: Warm) -> None:
    typed = ["callbacks=noise_scale", "batch.accumulate=2", "trainer.max_steps=1", "model=mlp", "logger=none"]
    run = train_py(*typed, "schedule.warmup_steps=0")
    command = ["-m", "shardwise", "eval", run.run_folder, f"output_root={run.output_root}"]
    evaluated = warm.run(*command, cwd=run.output_root, timeout=100)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "noise_scale" in (run.run_folder / "config.yaml").read_text()
