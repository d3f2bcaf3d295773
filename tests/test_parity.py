"""The promise: every layout trains the same model on the same batches to the same numbers as one device (float64)."""

from typing import Any

import pytest
import torch

from pool import RankPool
from training import Record, largest_gap, on_layout, relative_gap, train

GRADIENT_GAP = 1e-10
"""Per element, relative to it or to a millionth of the norm of all gradients."""
LOSS_GAP = 1e-10
PARAMETER_GAP = 1e-9
"""After 20 steps of AdamW with clipping, relative to the largest parameter's scale."""


CACHE: dict[str, Record] = {}


def one_device(kind: str, options: dict[str, Any]) -> Record:
    key = f"{kind} {options}"
    if key not in CACHE:
        CACHE[key] = on_layout(None, train, "one", kind, "one", 1, 20, options)[0]
    return CACHE[key]


def check_parity(pool: RankPool, kind: str, layout: str, accumulate: int, **options: Any) -> dict[str, float]:
    """Train under `layout` and compare everything with one device; returns the gaps."""
    expected = one_device(kind, options)
    records = on_layout(pool, train, layout, kind, layout, accumulate, 20, options)
    ours = records[0]
    assert all(torch.equal(ours.start[name], value) for name, value in expected.start.items()), "initial weights"
    assert ours.start.keys() == expected.start.keys()
    gaps = {
        "gradients": largest_gap(ours.gradients, expected.gradients, floor=1e-6),
        "losses": relative_gap(ours.losses, expected.losses),
        "parameters": max(float((ours.end[n] - t).abs().max()) for n, t in expected.end.items()),
    }
    if expected.norms:
        gaps["norms"] = relative_gap(ours.norms, expected.norms)
        assert gaps["norms"] < GRADIENT_GAP
    assert gaps["gradients"] <= GRADIENT_GAP
    assert gaps["losses"] <= LOSS_GAP
    assert gaps["parameters"] <= PARAMETER_GAP
    for other in records[1:]:
        assert other.losses == ours.losses, "the loss that ranks log"
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


def test_clipping_is_at_work_in_these_trainings() -> None:
    for kind in ("convnet", "gpt", "plain"):
        assert max(one_device(kind, {}).norms) > 0.5


def test_clipping_by_value(pool: RankPool) -> None:
    check_parity(pool, "plain", "fsdp2", 2, gradient_clip_val=0.01, gradient_clip_algorithm="value")
