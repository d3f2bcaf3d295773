"""Initial weights: the same bits under every layout, whatever each rank's own generator would have drawn."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pool import RankPool
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT
from shardwise.models.mlp import MLP
from shardwise.parallel.blocks import repeated_blocks
from shardwise.parallel.fsdp import self_contained
from shardwise.parallel.initialise import materialise
from shardwise.seeds import stable_seed
from training import build_module, make_trainer, on_layout, shares, train, whole

CPU = torch.device("cpu")


def start_of(kind: str, layout: str, precision: str) -> dict[str, Tensor]:
    """Parameters at the start of a training whose ranks have seeds of their own."""
    return train(kind, layout, 1, 1, {"precision": precision}, None, True).start


@pytest.mark.parametrize("kind", ["gpt-tied", "convnet", "plain"])
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "fsdp4", "hsdp4"])
def test_per_rank_seeds_do_not_matter(pool: RankPool, kind: str, layout: str) -> None:
    expected = on_layout(pool, start_of, "one", kind, "one", "32-true")[0]
    ours = on_layout(pool, start_of, layout, kind, layout, "32-true")[0]
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_lower_formats_are_rounded_from_the_same_draw() -> None:
    single, half = (start_of("gpt", "one", precision) for precision in ("32-true", "bf16-true"))
    for name, value in single.items():
        assert half[name].dtype == torch.bfloat16
        assert torch.equal(half[name], value.bfloat16()), name


def uneven() -> dict[str, tuple[bool, int]]:
    """Whether each parameter of a model with 3 classes is whole again, and the elements that this rank holds."""
    mesh = init_device_mesh("cpu", (4,))
    with torch.device("meta"):
        model = MLP(3, in_features=5, width=5, depth=1)
    fully_shard(model, mesh=mesh)
    materialise(model, seed=1, device=CPU)
    with torch.device("meta"):
        alone = MLP(3, in_features=5, width=5, depth=1)
    materialise(alone, seed=1, device=CPU)
    found = {}
    for (name, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert isinstance(ours, DTensor)
        found[name] = (torch.equal(whole(ours), theirs), ours.to_local().numel())
    return found


def test_uneven_and_empty_shards(pool: RankPool) -> None:
    ranks = pool.run(uneven, world_size=4)
    assert all(equal for rank in ranks for equal, _ in rank.values())
    assert [rank["head.bias"][1] for rank in ranks] == [1, 1, 1, 0]
    assert [rank["hidden.0.weight"][1] for rank in ranks] == [10, 10, 5, 0]


def kept(layout: str) -> list[bool]:
    """Whether a trained, or loaded, model keeps its values when a trainer takes it, and when another one does."""
    module: Any = build_module("gpt")
    materialise(module, seed=77, device=CPU)  # as if they came out of a file
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    make_trainer(layout, max_steps=-1, max_epochs=0).fit(module, shares("gpt", 1))
    same = [all(torch.equal(whole(p), before[name]) for name, p in module.named_parameters())]
    make_trainer(layout, max_steps=3).fit(module, shares("gpt", 3))
    trained = {name: whole(p) for name, p in module.named_parameters()}
    same.append(not torch.equal(trained["model.head.weight"], before["model.head.weight"]))
    make_trainer(layout).validate(module, shares("gpt", 1), verbose=False)
    same.append(all(torch.equal(whole(p), trained[name]) for name, p in module.named_parameters()))
    return same


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_values_that_exist_are_kept(pool: RankPool, layout: str) -> None:
    assert on_layout(pool, kept, layout, layout)[0] == [True, True, True]


def other_layout() -> str:
    module = build_module("mlp")
    make_trainer("fsdp2", max_steps=1).fit(module, shares("mlp", 1))
    try:
        make_trainer("ddp2", max_steps=1).fit(module, shares("mlp", 1))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_sharded_module_cannot_change_its_layout(pool: RankPool) -> None:
    for text in pool.run(other_layout):
        assert "dp_shard 2 in 32-true" in text
        assert "dp_replicate 2" in text
        assert "\n" not in text


def test_tied_weights_are_one_parameter_after_a_start_on_the_meta_device() -> None:
    module: Any = build_module("gpt-tied")
    materialise(module, seed=0, device=CPU)
    assert module.model.head.weight is module.model.tok_emb.weight


def test_two_models_side_by_side_do_not_start_as_twins() -> None:
    with torch.device("meta"):
        pair = nn.ModuleDict({"left": MLP(3, in_features=4), "right": MLP(3, in_features=4)})
        single = nn.ModuleDict({"left": MLP(3, in_features=4)})
        bare = MLP(3, in_features=4)
    for module in (pair, single, bare):
        materialise(module, seed=0, device=CPU)
    left, right = pair["left"], pair["right"]
    assert isinstance(left, MLP)
    assert isinstance(right, MLP)
    assert not torch.equal(left.head.weight, right.head.weight)
    for name, parameter in bare.named_parameters():
        assert torch.equal(parameter, single.get_parameter(f"left.{name}")), "a single one starts alike anywhere"


def test_nothing_says_how_it_starts() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"^0\.weight is on the meta device .*init_parameter"):
        materialise(module, seed=0, device=CPU)


def test_seeds_are_the_same_in_every_process() -> None:
    assert stable_seed(0, "model.head.weight") == 2492024628288487542
    assert len({stable_seed(0, "noise", rank) for rank in range(100)}) == 100


class Shared(nn.Module):
    """One block used twice, and two blocks that share a weight with what is outside of them."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.twice = nn.ModuleList([block, block])
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)
        if tie:
            self.head.weight = self.others[0][0].weight  # type: ignore[index]


def test_blocks_are_found_once_and_never_split_a_shared_parameter() -> None:
    model = Shared(tie=False)
    assert repeated_blocks(model) == [model.twice[0], *model.others]
    model = Shared(tie=True)
    assert repeated_blocks(model) == [model.twice[0], *model.others]
    assert self_contained(repeated_blocks(model), model) == [model.twice[0], model.others[1]]
    gpt = GPT(11, context=4, n_layer=3, width=8, n_head=2, tie_embeddings=True)
    assert repeated_blocks(gpt) == list(gpt.blocks)
