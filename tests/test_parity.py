"""The promise: every layout trains the same model on the same batches to the same numbers as one device (float64)."""

from typing import Any

import pytest
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor

from pool import RankPool
from shardwise.telemetry.step_metrics import StepMetrics
from training import (
    GLOBAL_SIZE,
    LAYOUTS,
    VOCABULARY,
    Record,
    build_module,
    largest_gap,
    make_trainer,
    on_layout,
    parameter_gap,
    relative_gap,
    shares,
    train,
)

GRADIENT_GAP = 1e-10
"""Relative to a gradient or to a millionth of the norm of all gradients: per parameter, and per element too."""
LOSS_GAP = 1e-11
"""Relative, over 20 steps."""
PARAMETER_GAP = 1e-9
"""After 20 steps of AdamW with clipping, absolute."""


CACHE: dict[str, Record] = {}


def one_device(kind: str, options: dict[str, Any]) -> Record:
    """What one device does with the options of the Trainer, and none of the strategy's."""
    options = {name: value for name, value in options.items() if name != "strategy"}
    key = f"{kind} {options}"
    if key not in CACHE:
        CACHE[key] = on_layout(None, train, "one", kind, "one", 1, 20, options)[0]
    return CACHE[key]


def check_parity(pool: RankPool, kind: str, layout: str, accumulate: int, **options: Any) -> dict[str, float]:
    """Train under `layout` and compare everything with one device; returns the gaps."""
    expected = one_device(kind, options)
    records = on_layout(pool, train, layout, kind, layout, accumulate, 20, options)
    ours = records[0]
    assert ours.start.keys() == ours.end.keys() == expected.start.keys()
    assert all(torch.equal(ours.start[name], value) for name, value in expected.start.items()), "initial weights"
    gaps = {
        "gradients": parameter_gap(ours.gradients, expected.gradients, floor=1e-6),
        "their elements": largest_gap(ours.gradients, expected.gradients, floor=1e-6),
        "losses": relative_gap(ours.losses, expected.losses),
        "parameters": max(float((ours.end[n] - t).abs().max()) for n, t in expected.end.items()),
    }
    if expected.norms:
        gaps["norms"] = relative_gap(ours.norms, expected.norms)
        assert gaps["norms"] < GRADIENT_GAP, gaps
    assert gaps["gradients"] <= GRADIENT_GAP, gaps
    assert gaps["their elements"] <= GRADIENT_GAP, gaps
    assert gaps["losses"] <= LOSS_GAP, gaps
    assert gaps["parameters"] <= PARAMETER_GAP, gaps
    for other in records[1:]:
        assert other.losses == ours.losses, "the loss that ranks log"
        assert other.norms == ours.norms, "the norm that ranks log"
        assert other.kinds["digest"] == ours.kinds["digest"], "the parameters of replicas"
    return gaps


@pytest.mark.parametrize(
    ("kind", "layout", "accumulate"),
    [
        ("convnet", "ddp2", 2),
        ("convnet", "fsdp2", 1),
        ("convnet", "hsdp4", 2),
        ("gpt", "one", 4),
        ("gpt", "ddp2", 4),
        ("gpt-tied", "fsdp2", 2),
        ("gpt", "hsdp4", 2),
        ("plain", "fsdp2", 2),
        ("masked", "one", 2),  # in some of its steps the first micro-batch counts nothing
        ("masked", "ddp2", 1),
        ("masked", "fsdp2", 2),
        ("mlp", "fsdp4", 1),  # 9 features on 4 ranks: uneven shards
        ("vit", "ddp4", 1),
    ],
)
def test_numbers_equal_one_devices(pool: RankPool, kind: str, layout: str, accumulate: int) -> None:
    check_parity(pool, kind, layout, accumulate)


WHOLE_SEQUENCES = {"sequence_parallel": False}


@pytest.mark.parametrize(
    ("kind", "layout", "accumulate", "strategy"),
    [
        ("gpt", "tp2", 2, {"check_replicas_every_n_steps": 5}),
        ("gpt", "tp2", 2, WHOLE_SEQUENCES),
        ("gpt-tied", "tp4", 2, {}),
        ("gpt-tied-loss", "tp4", 2, WHOLE_SEQUENCES),
        ("gpt-gqa", "tp2", 2, {"activation_checkpointing": "selective"}),
        ("gpt-loss", "ddp+tp4", 2, {}),
        ("gpt-tied", "ddp+tp4", 2, {**WHOLE_SEQUENCES, "activation_checkpointing": "full"}),
        ("gpt-gqa", "fsdp+tp4", 2, {"activation_checkpointing": "full"}),
        ("gpt-tied", "fsdp+tp4", 2, {**WHOLE_SEQUENCES, "activation_checkpointing": "selective"}),
        ("gpt-tied", "hybrid8", 2, {"check_replicas_every_n_steps": 5}),
        ("vit", "tp2", 2, {"activation_checkpointing": "selective"}),
        ("vit", "fsdp+tp4", 2, {"activation_checkpointing": "full"}),
        ("vit_b_16", "tp2", 2, {}),
        ("vit_b_16", "fsdp+tp4", 1, {}),
        ("convnet", "tp2", 2, {}),
        ("mlp-even", "tp4", 2, {}),
        ("net", "tp4", 2, {}),
        ("net", "fsdp+tp4", 2, {"activation_checkpointing": "selective"}),
        ("plan", "tp2", 1, {}),
        ("plan", "tp4", 2, {"activation_checkpointing": "full"}),
        ("plan", "ddp+tp4", 2, {"check_replicas_every_n_steps": 5}),
        ("plan", "hybrid8", 2, {}),
        ("plan", "fsdp+tp4", 2, {"activation_checkpointing": "selective"}),
        ("masked", "tp2", 2, {}),  # the divisor is known after the backward passes only
        ("masked", "ddp+tp4", 2, {}),
    ],
)
def test_numbers_of_split_layers_equal_one_devices(
    pool: RankPool, kind: str, layout: str, accumulate: int, strategy: dict[str, Any]
) -> None:
    check_parity(pool, kind, layout, accumulate, strategy=strategy)


def test_these_trainings_have_what_they_are_to_show() -> None:
    for kind in ("convnet", "gpt", "plain", "plan", "net", "vit", "vit_b_16", "mlp-even"):
        assert max(one_device(kind, {}).norms) > 0.5, f"{kind}: nothing is clipped"
        assert all(t.any() for t in one_device(kind, {}).gradients.values()), f"{kind}: a gradient is zero"
    assert VOCABULARY % 2, "the vocabulary is even"
    plain, loss = (one_device(kind, {}).losses for kind in ("gpt", "gpt-loss"))
    assert relative_gap(plain, loss) > 0.01, "label smoothing, z-loss and soft cap do nothing"


@pytest.mark.parametrize(("kind", "layout"), [("plain", "fsdp2"), ("plain", "tp2"), ("plan", "fsdp+tp4")])
def test_clipping_by_value(pool: RankPool, kind: str, layout: str) -> None:
    check_parity(pool, kind, layout, 2, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Kept(DummyLogger):
    """Keeps the lines it gets."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.append(dict(metrics))


def logged(layout: str) -> tuple[list[dict[str, Any]], bool]:
    """The lines of this rank's logger, and whether the norm is a plain tensor."""
    logger, metrics = Kept(), StepMetrics(total_steps=4, global_size=GLOBAL_SIZE)
    options: dict[str, Any] = {"precision": "64-true", "gradient_clip_val": 0.5, "max_steps": 4, "log_every_n_steps": 1}
    trainer = make_trainer(layout, callbacks=[metrics], accumulate=2, logger=logger, **options)
    trainer.fit(build_module("gpt"), shares("gpt", 4, tp=LAYOUTS[layout].tp))
    return logger.lines, type(trainer.precision_plugin.grad_norm) is Tensor


@pytest.mark.parametrize("layout", ["tp2", "fsdp+tp4"])
def test_every_rank_logs_the_same_plain_numbers(pool: RankPool, layout: str) -> None:
    ranks = on_layout(pool, logged, layout, layout)
    assert all(plain for _, plain in ranks)
    expected = one_device("gpt", {})
    for lines, _ in ranks:
        for key, numbers in (("train/loss", expected.losses[:4]), ("grad_norm", expected.norms[:4])):
            mine = [line[key] for line in lines]
            assert {type(number) for number in mine} == {float}
            assert mine == [line[key] for line in ranks[0][0]]
            assert relative_gap(mine, numbers) < LOSS_GAP
