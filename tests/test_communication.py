"""The collectives of one optimizer step, counted by PyTorch's CommDebugMode, equal the textbook's."""

from collections import Counter
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pool import RankPool
from shardwise.models.gpt import GPT
from shardwise.models.vit import ViT
from shardwise.module import Classification, LanguageModel
from shardwise.parallel.initialise import materialise
from training import CONTEXT, LAYOUTS, VOCABULARY, make_trainer, shares, tuned, world_size

Counts = dict[str, Counter[str]]
"""Pass (forward, backward, or after: gradients, clipping and the optimizer) -> collective -> how often."""

NAMES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allgather_": "objects",  # the first step compares the batches of ranks that split layers between them
}


class Counted(CommDebugMode):
    """Also tells apart what autograd's engine runs, and what comes between it and the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: Counts = {"forward": Counter(), "backward": Counter(), "after": Counter()}
        self.forward_is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = Counter(self.comm_counts)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        in_backward = torch._C._current_graph_task_id() != -1
        where = "backward" if in_backward else "after" if self.forward_is_over else "forward"
        for packet, count in (Counter(self.comm_counts) - before).items():
            self.passes[where][NAMES[str(packet).rpartition(".")[2]]] += count
        return out


class CountSteps(pl.Callback):
    """The collectives of each training step, from its first forward pass to the end of the optimizer's step."""

    def __init__(self) -> None:
        self.steps: list[Counts] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode = Counted()
        self.mode.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        self.mode.forward_is_over = True  # of the first micro-batch

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.steps.append(self.mode.passes)


def build(kind: str, n_layer: int) -> nn.Module:
    with torch.device("meta"):
        if kind == "vit":
            return ViT(10, image_size=8, in_channels=1, patch_size=4, n_layer=n_layer, n_head=4, width=16)
        return GPT(VOCABULARY, context=CONTEXT, n_layer=n_layer, n_head=4, width=16, multiple_of=8)


DEPTHS = (2, 3)
"""Layers of two models; the difference is a block's."""


def steps(kind: str, layout: str, accumulate: int, clip: float | None, options: dict[str, Any]) -> list[Counts]:
    """The collectives of the second step, for each depth."""
    counts = []
    for n_layer in DEPTHS:
        model = build(kind, n_layer)
        task = tuned(LanguageModel(model) if kind == "gpt" else Classification(model, num_classes=10))
        count = CountSteps()
        trainer = make_trainer(
            layout, callbacks=[count], accumulate=accumulate, strategy=options, max_steps=2, gradient_clip_val=clip
        )
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # Lightning's; the launcher replaces it
        trainer.fit(task, shares(kind, 2, tp=LAYOUTS[layout].tp))
        counts.append(count.steps[-1])
    return counts


CACHE: dict[str, list[Counts]] = {}


def found(
    pool: RankPool, kind: str, layout: str, accumulate: int = 1, clip: float | None = None, **options: Any
) -> Any:
    """`steps` on all ranks, which have to agree."""
    key = f"{kind} {layout} {accumulate} {clip} {options}"
    if key not in CACHE:
        ranks = pool.run(steps, kind, layout, accumulate, clip, options, world_size=world_size(layout))
        assert ranks == [ranks[0]] * len(ranks)
        CACHE[key] = ranks[0]
    return CACHE[key]


def counts(**collectives: int) -> Counter[str]:
    """`counts(all_reduce=2)`; Counter's equality takes what is missing for 0."""
    return Counter({name.replace("_", "-"): count for name, count in collectives.items()})


def a_block(counted: list[Counts]) -> Counts:
    fewer, more = counted
    return {where: Counter({k: more[where][k] - fewer[where][k] for k in more[where]}) for where in more}


# ---- a block -------------------------------------------------------------------------------------------------------

TWO_REDUCED = counts(all_reduce=2)
TWO_GATHERED = counts(all_gather=2, reduce_scatter=2)
NONE = counts()


def test_a_block_under_tensor_parallelism_costs_two_all_reduces_each_way(pool: RankPool) -> None:
    """Shoeybi et al. 2019 (arXiv 1909.08053), figure 3 and section 3."""
    block = a_block(found(pool, "gpt", "tp2", sequence_parallel=False))
    assert block == {"forward": TWO_REDUCED, "backward": TWO_REDUCED, "after": NONE}


def test_a_block_of_a_vision_transformer_costs_the_same(pool: RankPool) -> None:
    block = a_block(found(pool, "vit", "tp2"))
    assert block == {"forward": TWO_REDUCED, "backward": TWO_REDUCED, "after": NONE}


def test_a_block_under_sequence_parallelism_gathers_and_scatters_twice_each_way(pool: RankPool) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: the same bytes as the all-reduces."""
    block = a_block(found(pool, "gpt", "tp2", sequence_parallel=True))
    assert block == {"forward": TWO_GATHERED, "backward": TWO_GATHERED, "after": NONE}


def test_recomputing_a_block_repeats_its_forward_pass_but_for_the_last_collective(pool: RankPool) -> None:
    """Of the last reduce-scatter nothing is needed in the backward pass."""
    block = a_block(found(pool, "gpt", "tp2", activation_checkpointing="full"))
    again = counts(all_gather=2, reduce_scatter=1)
    assert block == {"forward": TWO_GATHERED, "backward": TWO_GATHERED + again, "after": NONE}


def documented_plan() -> list[Counts]:
    """PyTorch's stock styles as its tutorial on tensor parallelism has them, one layer at a time."""
    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    tokens, targets = torch.randint(VOCABULARY, (2, 4, CONTEXT), generator=torch.Generator().manual_seed(0))
    counted = []
    for n_layer in DEPTHS:
        model = build("gpt", n_layer)
        materialise(model, seed=0, device=torch.device("cpu"))
        parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
        with Counted() as mode:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        counted.append(mode.passes)
    return counted


def test_a_documented_plan_of_stock_styles_costs_seven_all_reduces_a_block_and_ours_four(pool: RankPool) -> None:
    """Each of q, k, v, gate and up sums its input's gradient by itself; here the region does, once."""
    stock = a_block(pool.run(documented_plan, world_size=2)[0])
    assert stock == {"forward": TWO_REDUCED, "backward": counts(all_reduce=5), "after": NONE}
    ours = a_block(found(pool, "gpt", "tp2", sequence_parallel=False))
    assert sum((ours["forward"] + ours["backward"]).values()) == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_block_under_fsdp_is_gathered_twice_a_micro_batch_and_reduced_once_a_step(
    pool: RankPool, accumulate: int
) -> None:
    block = a_block(found(pool, "gpt", "fsdp2", accumulate))
    assert block["forward"] + block["backward"] + block["after"] == counts(all_gather=2 * accumulate, reduce_scatter=1)


# ---- a step --------------------------------------------------------------------------------------------------------


def tensor_parallel(n_layer: int, *, sequence: bool) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward pass of a GPT: blocks, embedding, head, and two all-reduces of the loss.

    The loss of Megatron's has three: the largest logit, the target's, and the sum of exponentials. The last two travel
    together here.
    """
    loss = counts(all_reduce=2)
    if not sequence:
        return counts(all_reduce=2 * n_layer + 1) + loss, counts(all_reduce=2 * n_layer + 1)
    split = counts(all_gather=2 * n_layer + 1, reduce_scatter=2 * n_layer + 1)
    return split + loss, split


CLIP = {"tp2": 1, "fsdp2": 1, "ddp+tp4": 1, "fsdp+tp4": 1 + 2, "hybrid8": 1 + 2}
"""All-reduces of the norm: over one axis of the mesh for what it alone shards, over two for what both do."""


def of_a_step(layout: str, n_layer: int, *, accumulate: int, sequence: bool, clip: bool) -> Counter[str]:
    dims = LAYOUTS[layout]
    total = counts()
    if dims.tp > 1:
        forward, backward = tensor_parallel(n_layer, sequence=sequence)
        for _ in range(accumulate):
            total += forward + backward
        total += counts(all_reduce=int(sequence))  # gradients of all norms at once
    if dims.dp_size > 1:
        total += counts(all_reduce=1)  # how many targets count
    groups = n_layer + 1  # the blocks, and what lies outside of them
    if dims.dp_shard > 1:
        total += counts(all_gather=accumulate * (groups + n_layer), reduce_scatter=groups)
    if dims.dp_replicate > 1:
        total += counts(all_reduce=groups)
    return total + counts(all_reduce=CLIP[layout] if clip else 0)


@pytest.mark.parametrize(
    ("layout", "accumulate", "sequence", "clip"),
    [
        ("tp2", 1, False, False),
        ("tp2", 2, True, True),
        ("fsdp2", 2, False, True),
        ("ddp+tp4", 2, True, True),
        pytest.param("fsdp+tp4", 1, False, True, marks=pytest.mark.proofs),
        ("fsdp+tp4", 2, True, False),
        pytest.param("hybrid8", 2, True, True, marks=pytest.mark.proofs),
    ],
)
def test_a_whole_step(pool: RankPool, layout: str, accumulate: int, sequence: bool, clip: bool) -> None:
    options = {"sequence_parallel": sequence} if LAYOUTS[layout].tp > 1 else {}
    counted = found(pool, "gpt", layout, accumulate, 0.5 if clip else None, **options)
    for n_layer, passes in zip(DEPTHS, counted, strict=True):
        expected = of_a_step(layout, n_layer, accumulate=accumulate, sequence=sequence, clip=clip)
        assert passes["forward"] + passes["backward"] + passes["after"] == expected, n_layer


def test_where_the_ends_of_a_model_communicate(pool: RankPool) -> None:
    """The embedding scatters and the head gathers forward, the reverse backward; then come the norms' gradients."""
    for sequence in (True, False):
        for n_layer, passes in zip(DEPTHS, found(pool, "gpt", "tp2", sequence_parallel=sequence), strict=True):
            forward, backward = tensor_parallel(n_layer, sequence=sequence)
            assert passes == {"forward": forward, "backward": backward, "after": counts(all_reduce=int(sequence))}
