"""What should be equal on several ranks is, a check finds what is not, and noise is shared where it has to be."""

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from pool import RankPool
from shardwise.strategies import mesh as strategy
from training import LAYOUTS, Recorder, build_module, largest_gap, make_trainer, shares, train, world_size

# ---- the check -----------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def flip_a_bit(tensor: Tensor) -> None:
    """The last bit of the last number."""
    local(tensor).view(torch.int64).view(-1)[-1] ^= 1


def checked_steps(kind: str, layout: str, every: int) -> list[int]:
    """The steps after which replicas were compared and found equal, out of four."""
    steps = []
    check = strategy.check_replicas

    def recorded(*args: Any, step: int, **options: Any) -> None:
        check(*args, step=step, **options)
        steps.append(step)

    strategy.check_replicas = recorded
    try:
        options = {"check_replicas_every_n_steps": every}
        trainer = make_trainer(layout, strategy=options, accumulate=2, max_steps=4, gradient_clip_val=0.5)
        trainer.fit(build_module(kind), shares(kind, 4, tp=LAYOUTS[layout].tp))
    finally:
        strategy.check_replicas = check
    return steps


@pytest.mark.parametrize(
    "layout",
    ["ddp2", "fsdp2", "hsdp4", "tp2", "ddp+tp4", "fsdp+tp4", pytest.param("hybrid8", marks=pytest.mark.proofs)],
)
def test_every_layout_passes_its_check(pool: RankPool, layout: str) -> None:
    ranks = pool.run(checked_steps, "gpt-tied", layout, 2, world_size=world_size(layout))
    assert ranks == [[2, 4]] * len(ranks)


def found_by_the_check(kind: str, layout: str, rank: int, names: list[str], key: str | None) -> str:
    """What training says after one `rank` has changed tensors of those `names` by a bit, after its second step.

    They are parameters, or with `key` what the optimizer keeps for them.
    """
    check, calls = strategy.check_replicas, []

    def changed(root: nn.Module, optimizers: Any, **options: Any) -> None:
        calls.append(options["step"])
        if dist.get_rank() == rank and len(calls) == 1:
            parameters = dict(root.named_parameters())
            for name in names:
                parameter = parameters[name]
                flip_a_bit(parameter if key is None else optimizers[0].state[parameter][key])
        check(root, optimizers, **options)

    strategy.check_replicas = changed
    options = {"check_replicas_every_n_steps": 2}
    trainer = make_trainer(layout, strategy=options, max_steps=6, precision="64-true")
    try:
        trainer.fit(build_module(kind), shares(kind, 6, tp=LAYOUTS[layout].tp))
    except RuntimeError as error:
        return str(error)
    finally:
        strategy.check_replicas = check
    return f"nothing in {len(calls)} checks"


NORM, HEAD = "model.blocks.1.norm2.weight", "model.head.weight"


@pytest.mark.parametrize(
    ("kind", "layout", "rank", "names", "key", "said"),
    [
        ("gpt", "tp2", 1, [NORM], None, f"{NORM} should be equal on rank 0 and rank 1, "),
        ("gpt", "tp4", 2, [NORM], None, f"{NORM} should be equal on ranks 0, 1, 3 and rank 2, "),
        ("vit", "tp2", 0, ["model.blocks.0.attn.out.bias"], None, "model.blocks.0.attn.out.bias should be equal on "),
        ("gpt", "ddp2", 1, [HEAD], "exp_avg", f"exp_avg of {HEAD} should be equal on rank 0 and rank 1, "),
        ("gpt", "hsdp4", 3, [HEAD], None, f"{HEAD} should be equal on rank 1 and rank 3, "),
        ("gpt", "fsdp+tp4", 2, [HEAD, NORM], None, f"{NORM} should be equal on rank 2 and rank 3, "),
        pytest.param(
            *("gpt", "hybrid8", 6, [HEAD, NORM], None, f"{NORM} should be equal on ranks 2, 3, 7 and rank 6, "),
            marks=pytest.mark.proofs,
        ),
    ],
)
def test_a_changed_bit_is_found_and_named_on_every_rank(
    pool: RankPool, kind: str, layout: str, rank: int, names: list[str], key: str | None, said: str
) -> None:
    ranks = pool.run(found_by_the_check, kind, layout, rank, names, key, world_size=world_size(layout))
    assert ranks == [ranks[0]] * len(ranks)
    assert ranks[0].startswith(said)
    assert "after step 2:" in ranks[0]
    assert "\n" not in ranks[0]


def test_what_only_one_rank_holds_may_be_anything(pool: RankPool) -> None:
    """A part that no other rank has is compared with nothing."""
    ranks = pool.run(found_by_the_check, "gpt", "tp2", 1, [HEAD], None, world_size=2)
    assert ranks == ["nothing in 3 checks"] * 2


# ---- noise ---------------------------------------------------------------------------------------------------------


class Masks:
    """What dropout keeps in one training: on the residual stream, and on attention weights."""

    def __init__(self, module: nn.Module) -> None:
        self.residual: list[str] = []
        self.attention: list[str] = []
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_hook(lambda layer, args, out: self.residual.append(digest(out == 0)))
        self._attention = F.scaled_dot_product_attention

    def __enter__(self) -> "Masks":
        F.scaled_dot_product_attention = self._probed
        return self

    def __exit__(self, *error: object) -> None:
        F.scaled_dot_product_attention = self._attention

    def _probed(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention; first, with the same noise, over one-hot values: which weights are left shows in the outputs."""
        state = torch.get_rng_state()
        one_hot = torch.eye(k.size(-2), dtype=v.dtype).expand(*v.shape[:-1], -1)
        weights = self._attention(torch.zeros_like(q), torch.zeros_like(k), one_hot, **options)
        self.attention.append(digest(weights == 0))
        torch.set_rng_state(state)
        return self._attention(q, k, v, **options)


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


STEPS = 5


def noisy(layout: str, sequence_parallel: bool) -> dict[str, Any]:
    """Five steps of a GPT with dropout 0.2, replicas compared after each."""
    module, recorder = build_module("gpt-dropout"), Recorder()
    options = {"sequence_parallel": sequence_parallel, "check_replicas_every_n_steps": 1}
    trainer = make_trainer(
        layout, callbacks=[recorder], strategy=options, max_steps=STEPS, gradient_clip_val=0.5, precision="64-true"
    )
    with Masks(module) as masks:
        trainer.fit(module, shares("gpt", STEPS, tp=LAYOUTS[layout].tp))
    return {
        "losses": recorder.record.losses,
        "parameters": digest(*(local(p) for p in module.parameters())),
        "residual": masks.residual,
        "attention": masks.attention,
    }


CACHE: dict[tuple[str, bool], list[dict[str, Any]]] = {}


def noisy_ranks(pool: RankPool, layout: str, sequence_parallel: bool) -> list[dict[str, Any]]:
    key = (layout, sequence_parallel)
    if key not in CACHE:
        CACHE[key] = pool.run(noisy, layout, sequence_parallel, world_size=world_size(layout))
    return CACHE[key]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
def test_training_with_dropout_keeps_replicas_equal_and_repeats(pool: RankPool, sequence_parallel: bool) -> None:
    ranks = noisy_ranks(pool, "tp2", sequence_parallel)
    assert [len(rank["losses"]) for rank in ranks] == [STEPS] * 2
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert pool.run(noisy, "tp2", sequence_parallel, world_size=2) == ranks, "bit for bit"


def test_masks_of_the_residual_stream_are_shared_where_it_is(pool: RankPool) -> None:
    # the embeddings, and both halves of two blocks
    one, other = (rank["residual"] for rank in noisy_ranks(pool, "tp2", False))
    assert one == other
    assert len(set(one)) == len(one) == STEPS * 5, "each is a mask of its own"


def test_masks_of_different_tokens_differ(pool: RankPool) -> None:
    one, other = (rank["residual"] for rank in noisy_ranks(pool, "tp2", True))
    assert len({*one, *other}) == len(one) + len(other) == 2 * STEPS * 5


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
def test_masks_of_different_heads_differ(pool: RankPool, sequence_parallel: bool) -> None:
    one, other = (rank["attention"] for rank in noisy_ranks(pool, "tp2", sequence_parallel))
    assert len({*one, *other}) == len(one) + len(other) == 2 * STEPS * 2


def test_masks_of_different_samples_differ(pool: RankPool) -> None:
    ranks = noisy_ranks(pool, "ddp+tp4", False)
    assert ranks[0]["residual"] == ranks[1]["residual"]
    assert ranks[2]["residual"] == ranks[3]["residual"]
    assert not set(ranks[0]["residual"]) & set(ranks[2]["residual"])
    assert len({mask for rank in ranks for mask in rank["attention"]}) == 4 * STEPS * 2


def gradients(layout: str, kept: str, sequence_parallel: bool) -> dict[str, Tensor]:
    options = {"strategy": {"activation_checkpointing": kept, "sequence_parallel": sequence_parallel}}
    return train("gpt-dropout", layout, 2, 1, options).gradients


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [("tp2", True), ("tp2", False), pytest.param("fsdp+tp4", True, marks=pytest.mark.proofs)],
)
def test_recomputation_draws_the_same_noise(pool: RankPool, layout: str, sequence_parallel: bool) -> None:
    """Two micro-batches, so that what is left over from one backward pass would show in the next forward pass."""

    def run(kept: str) -> Any:
        return pool.run(gradients, layout, kept, sequence_parallel, world_size=world_size(layout))[0]

    kept = run("none")
    for other in ("full", "selective"):
        assert largest_gap(run(other), kept, floor=1e-6) < 1e-10, other
