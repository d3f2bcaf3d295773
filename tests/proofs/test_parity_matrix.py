"""Parity: the largest differences from one device over 20 steps of AdamW in float64.

Gradients after one step, relative, per parameter and per element; loss and norm of every step, relative; parameters
after the last step, absolute. Clipping is on.
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
    "plan": "a user's module, plan in YAML",
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


SPLIT_KINDS = {
    "gpt": "GPT, ignored targets",
    "gpt-tied": "GPT, tied embeddings",
    "vit": "ViT",
    "plan": "a user's module, plan in YAML",
}
THOROUGH = ("tp2", "fsdp+tp4")
"""Layouts in which a GPT is tried with all of it, the others with half."""


def trials(kind: str, layout: str) -> list[tuple[bool | None, str]]:
    """Sequences split or not (None: there are none), and activation checkpointing."""
    if not kind.startswith("gpt"):
        return [(None, "none"), (None, "full" if layout in THOROUGH else "selective")]
    full: list[tuple[bool | None, str]] = [(True, "none"), (False, "full"), (False, "none"), (True, "selective")]
    return full if layout in THOROUGH else full[:2]


@pytest.mark.parametrize("layout", ["tp2", "tp4", "ddp+tp4", "fsdp+tp4", "hybrid8"])
@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_every_layout_of_split_layers(pool: RankPool, kind: str, layout: str, results: Callable[..., None]) -> None:
    for sequences, recomputed in trials(kind, layout):
        strategy = {"sequence_parallel": sequences, "activation_checkpointing": recomputed}
        gaps = check_parity(pool, kind, layout, 2, strategy=strategy)
        split = "" if sequences is None else ", sequences split" if sequences else ", sequences whole"
        again = "" if recomputed == "none" else f", {recomputed} recomputation"
        results(f"{SPLIT_KINDS[kind]}: {layout}, accumulate 2{split}{again}", **gaps)


MORE_KINDS = {
    "gpt-loss": "GPT, smoothed labels, z-loss, soft cap, chunks",
    "gpt-tied-loss": "GPT, tied embeddings, all of that",
    "gpt-gqa": "GPT, grouped-query attention",
    "vit_b_16": "torchvision's ViT",
    "mlp-even": "MLP",
    "convnet": "convnet on digits",
    "net": "a user's network, plan in YAML",
}


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_other_models_of_split_layers(pool: RankPool, kind: str, results: Callable[..., None]) -> None:
    last = "hybrid8" if kind in ("gpt-tied-loss", "mlp-even") else "ddp+tp4"
    for layout, accumulate in (("tp2", 1), ("fsdp+tp4", 2), (last, 2)):
        gaps = check_parity(pool, kind, layout, accumulate)
        results(f"{MORE_KINDS[kind]}: {layout}, accumulate {accumulate}", **gaps)


@pytest.mark.parametrize("layout", ["one", "ddp2", "hsdp4"])
def test_recomputation_without_split_layers(pool: RankPool, layout: str, results: Callable[..., None]) -> None:
    for kind, recomputed in (("gpt-tied", "full"), ("gpt", "selective"), ("plan", "full")):
        gaps = check_parity(pool, kind, layout, 2, strategy={"activation_checkpointing": recomputed})
        results(f"{KINDS[kind]}: {layout}, accumulate 2, {recomputed} recomputation", **gaps)


@pytest.mark.parametrize("layout", ["ddp+tp4", "fsdp+tp4"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": None},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"strategy": {"defer_gradient_sync": False}},
    ],
    ids=["unclipped", "by value", "not deferred"],
)
def test_every_option_of_split_layers(
    pool: RankPool, layout: str, options: dict, results: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    gaps = check_parity(pool, "gpt-tied", layout, 2, **options)
    results(f"GPT, tied embeddings: {layout}, accumulate 2, {request.node.callspec.id.rpartition('-')[0]}", **gaps)
