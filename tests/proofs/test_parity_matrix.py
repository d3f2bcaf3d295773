"""Parity: the largest differences from one device over 20 steps of AdamW in float64.

Per element of a parameter's gradient after one step, relative; loss and norm of every step, relative; parameters after
the last step, absolute.
"""

from collections.abc import Callable

import pytest

from pool import RankPool
from test_parity import check_parity

KINDS = {
    "convnet": "convnet on digits",
    "gpt": "GPT, ignored targets",
    "gpt-tied": "GPT, tied embeddings",
    "vit": "ViT",
    "mlp": "MLP, uneven shards",
    "plain": "a user's module, mean loss",
    "masked": "a user's module, (sum, count)",
}
LAYOUTS = ("one", "ddp2", "ddp4", "fsdp2", "fsdp4", "hsdp4")


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout(pool: RankPool, kind: str, results: Callable[..., None]) -> None:
    for layout in LAYOUTS:
        for accumulate in (1, 2, 4) if kind == "gpt" else (1, 2):
            if layout == "one" and accumulate == 1:
                continue
            gaps = check_parity(pool, kind, layout, accumulate)
            results(f"{KINDS[kind]}: {layout}, accumulate {accumulate}", **gaps)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp4", "hsdp4"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": None},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"strategy": {"defer_gradient_sync": False}},
        {"strategy": {"reshard_after_forward": False}},
    ],
    ids=["unclipped", "by value", "not deferred", "not resharded"],
)
def test_every_option(
    pool: RankPool, layout: str, options: dict, results: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    gaps = check_parity(pool, "gpt-tied", layout, 2, **options)
    results(f"GPT, tied embeddings: {layout}, accumulate 2, {request.node.callspec.id.rpartition('-')[0]}", **gaps)
