import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from timm.optim import AdamP, Lamb
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.build import check_slots
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.optim import Muon, build_optimizer, build_scheduler
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.sharded_step import check_sharded
from shardwise.slots import find_target

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture
def mesh():
    """A 2 x 2 mesh of which this process is rank 0, without peers: enough for what moves no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def sharded(mesh, *placements, shape=(4, 4)):
    torch.manual_seed(3)
    return nn.Parameter(distribute_tensor(torch.randn(shape), mesh, list(placements), src_data_rank=None))


def test_only_parameters_that_require_a_gradient_and_each_once():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    named = [*model.named_parameters(), ("tied", model[1].weight)]
    optimizer = build_optimizer(named, target=torch.optim.SGD, lr=0.5)
    decayed, exempt = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(model[1].weight)]
    assert [id(p) for p in exempt["params"]] == [id(model[0].bias), id(model[1].bias)]
    assert decayed["lr"] == exempt["lr"] == 0.5


class Net(nn.Module):
    """A piece of everything."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(3, 4))
        self.positions = nn.Parameter(torch.zeros(3, 4))
        self.conv = nn.Conv1d(4, 4, 2)
        self.up = nn.Linear(4, 6)
        self.norm = nn.LayerNorm((2, 6))
        self.down = nn.Linear(6, 4)
        self.head = nn.Linear(4, 5, bias=False)

    def no_weight_decay(self):
        return {"positions"}


def names_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


EXEMPT = ["cls_token", "pos_embed", "positions", "emb.weight", "conv.bias", "up.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_norms_biases_and_embeddings_are_not_decayed(weight_decay):
    model = Net()
    arguments = {"target": torch.optim.AdamW, "lr": 1e-3, "weight_decay": weight_decay}
    optimizer = build_optimizer(model, **arguments)
    decayed, exempt = names_of(model, optimizer)
    assert decayed == ["conv.weight", "up.weight", "down.weight", "head.weight"]
    assert sorted(exempt) == sorted([*EXEMPT, "down.bias"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [weight_decay, 0.0]
    model.head.weight = model.emb.weight
    assert "emb.weight" in names_of(model, build_optimizer(model, **arguments))[1], "tied to the head"
    (everything,) = build_optimizer(Net(), decay="all", **arguments).param_groups
    assert everything["weight_decay"] == weight_decay
    assert len(everything["params"]) == 13


def test_what_no_weight_decay_names_counts_from_its_own_module():
    model = nn.ModuleDict({"inner": Net()})
    assert "inner.positions" in names_of(model, build_optimizer(model, target=torch.optim.SGD, lr=0.1))[1]


def test_an_optimizer_without_weight_decay_gets_one_group():
    (group,) = build_optimizer(Net(), target=torch.optim.LBFGS, lr=1.0).param_groups
    assert len(group["params"]) == 13


def test_muon_is_for_matrices_of_hidden_layers():
    model = Net()
    hidden, decayed, exempt = build_optimizer(model, target=Muon, lr=1e-3, weight_decay=0.1).param_groups
    assert [id(p) for p in hidden["params"]] == [id(model.up.weight), id(model.down.weight)]
    assert [id(p) for p in decayed["params"]] == [id(model.conv.weight), id(model.head.weight)]
    assert [group["weight_decay"] for group in (hidden, decayed, exempt)] == [0.1, 0.1, 0.0]
    both = build_optimizer(model, target=Muon, lr=1e-3, decay="all").param_groups
    assert [len(group["params"]) for group in both] == [2, 11], "what is decayed does not change what is hidden"


def test_muon_steps_as_torchs_two_optimizers_do_and_follows_a_schedule():
    torch.manual_seed(0)
    ours, theirs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)), None
    theirs = copy.deepcopy(ours)
    one = build_optimizer(ours, target=Muon, lr=1e-2, weight_decay=0.1)
    hidden = [theirs[0].weight, theirs[1].weight]
    rest = [{"params": [theirs[2].weight]}, {"params": [layer.bias for layer in theirs], "weight_decay": 0.0}]
    two = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    schedules = [build_scheduler(o, kind="linear", total_steps=4) for o in (one, *two)]
    for _ in range(3):
        for model, optimizers in ((ours, [one]), (theirs, two)):
            model.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
        one.load_state_dict(copy.deepcopy(one.state_dict()))  # replaces groups and state
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_muon_without_its_groups_says_who_makes_them():
    with pytest.raises(ConfigError, match="let build_optimizer make it"):
        Muon(nn.Linear(2, 2).parameters())


def test_lists_from_yaml_become_tuples():
    optimizer = build_optimizer(nn.Linear(1, 1).named_parameters(), target=torch.optim.AdamW, lr=1e-3, betas=[0.8, 0.9])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def composed(choice):
    own = yaml.safe_load((CONF / "optimizer" / f"{choice}.yaml").read_text())
    bases = [base for base in own.pop("defaults", []) if base != "_self_"]
    return {key: value for base in bases for key, value in composed(base).items()} | own


@pytest.mark.parametrize("choice", sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml")))
def test_every_choice_in_conf_builds_and_lowers_a_loss(choice):
    arguments = composed(choice)
    target = find_target("optimizer", {"_target_": arguments.pop("_target_")})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = build_optimizer(model, target=target, **arguments)
    x_BD = torch.randn(8, 3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x_BD) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_adamw_in_conf_differs_from_adam_in_two_lines():
    adamw = yaml.safe_load((CONF / "optimizer" / "adamw.yaml").read_text())
    assert set(adamw) == {"defaults", "_target_", "weight_decay"}


@pytest.mark.parametrize("target", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_dtensors_on_different_meshes_and_plain_ones_are_updated_as_plain_ones_are(mesh, target):
    def parameters(kind):
        one, two = sharded(mesh["dp"], Shard(0)), sharded(mesh, Shard(0), Shard(1))
        if kind == "plain":
            return [nn.Parameter(p.to_local().detach().clone()) for p in (one, two)]
        return [one, nn.Parameter(two.to_local().detach().clone()) if kind == "mixed" else two]

    results = {}
    for kind in ("plain", "sharded", "mixed"):
        params = parameters(kind)
        optimizer = build_optimizer([(str(k), p) for k, p in enumerate(params)], target=target, lr=0.1)
        for _ in range(3):
            for p in params:
                p.grad = p.detach() * 0.5
            optimizer.step()
        results[kind] = [p.to_local() if hasattr(p, "to_local") else p for p in params]
    for kind in ("sharded", "mixed"):
        torch.testing.assert_close(results[kind], results["plain"], rtol=0, atol=1e-6, check_device=False)


def test_sharded_parameters_are_updated_together_unless_typed_otherwise(mesh):
    named = [("w", sharded(mesh["dp"], Shard(0)))]
    assert build_optimizer(named, target=torch.optim.AdamW, lr=1e-3).defaults["foreach"] is True
    assert build_optimizer(named, target=torch.optim.AdamW, lr=1e-3, foreach=False).defaults["foreach"] is False
    assert build_optimizer(named, target=torch.optim.AdamW, lr=1e-3, fused=True).defaults["foreach"] is None
    mixed = [*named, ("b", nn.Parameter(torch.ones(2)))]
    with pytest.raises(ConfigError, match=r"optimizer.fused=true cannot update 1 sharded and 1 unsharded"):
        build_optimizer(mixed, target=torch.optim.AdamW, lr=1e-3, fused=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": "1e-3"}, r"optimizer.lr='1e-3' is text, not a number: .* 0.001"),
        ({"weight_decay": "1e-2"}, "optimizer.weight_decay='1e-2' is text"),
        ({"betas": [0.9, "0.99"]}, "optimizer.betas='0.99' is text"),
        ({"lr": True}, "optimizer.lr=True"),
        ({"lr": float("inf")}, "optimizer.lr=inf"),
        ({"lr": -1.0}, r"^optimizer.lr=-1.0: torch.*AdamW refuses it .*[Ii]nvalid learning rate"),
        ({"eps": -1}, r"^optimizer.eps=-1: torch.*AdamW refuses it \(Invalid epsilon"),
        ({"lr": -1.0, "eps": -1}, "AdamW refuses its arguments .* correct optimizer"),
        ({"betas": [0.9]}, r"^optimizer.betas=\[0.9\]: two numbers are needed, such as optimizer.betas=\[0.9, 0.999\]"),
        ({"betas": 0.9}, r"^optimizer.betas=0.9: two numbers are needed"),
        ({"betas": [2, 3]}, r"^optimizer.betas=\[2, 3\]: each has to be at least 0 and below 1"),
        ({"target": Muon, "ns_coefficients": [1.0]}, r"^optimizer.ns_coefficients=\[1.0\]: three numbers are needed"),
        ({"weight_decay": -1}, "^optimizer.weight_decay=-1: a number of at least 0 is needed"),
        ({"target": Muon, "weight_decay": -1}, "^optimizer.weight_decay=-1: a number of at least 0 is needed"),
        ({"weight_decy": 0.1}, "optimizer.weight_decy is not an argument .* did you mean optimizer.weight_decay"),
        ({"zzz": 1}, "optimizer.zzz is not an argument of .*AdamW: it takes lr, betas"),
        ({"target": nn.Linear}, "is no optimizer"),
        ({"decay": "matrix"}, "optimizer.decay=matrix: matrices .* or all is needed"),
        ({"decay": 0.1}, "optimizer.decay=0.1: .* how much is optimizer.weight_decay"),
        (
            {"target": Lamb},
            r"optimizer.max_grad_norm=1.0 .* type optimizer.max_grad_norm=null trainer.gradient_clip_val",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, text):
    with pytest.raises(ConfigError, match=text) as error:
        build_optimizer(nn.Linear(1, 1).named_parameters(), **({"target": torch.optim.AdamW, "lr": 1e-3} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (torch.optim.LBFGS, {}, "LBFGS is not known to be right on sharded .* strategy=ddp, or optimizer=adamw"),
        (torch.optim.SparseAdam, {}, "SparseAdam is not known to be right on sharded"),
        (AdamP, {}, "optimizer AdamP is not known to be right on sharded"),
        (Lamb, {"caution": True, "max_grad_norm": None}, "type optimizer.caution=false, or strategy=ddp"),
    ],
)
def test_what_is_wrong_on_sharded_parameters_is_refused(mesh, target, arguments, text):
    named = [("w", sharded(mesh["dp"], Shard(0)))]
    with pytest.raises(ConfigError, match=text) as error:
        build_optimizer(named, target=target, lr=0.1, **arguments)
    assert "\n" not in str(error.value)
    build_optimizer([("w", nn.Parameter(torch.ones(2, 2)))], target=target, lr=0.1, **arguments)


def test_what_is_refused_is_refused_before_anything_starts():
    for choice in ("adafactor", "lamb", "lars", "muon"):
        check_slots(compose([f"optimizer={choice}"]), ParallelDims(dp_shard=2))
    adamp = compose(["optimizer=adam", "optimizer._target_=timm.optim.AdamP"])
    check_slots(adamp, ParallelDims(dp_replicate=2))
    with pytest.raises(ConfigError, match="AdamP is not known to be right"):
        check_slots(adamp, ParallelDims(dp_shard=2))
    with pytest.raises(ConfigError, match=r"optimizer.decay=none"):
        check_slots(compose(["optimizer.decay=none"]))


class Own(torch.optim.AdamW):
    """Of a user's."""


def test_an_optimizer_from_elsewhere_is_taken_and_named():
    assert check_sharded(Own) == "Own: not known to be right on sharded parameters; strategy=ddp is"
    assert check_sharded(torch.optim.AdamW) is None


def test_nothing_to_train_is_an_error():
    model = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(model.named_parameters(), target=torch.optim.SGD, lr=0.1)


def test_the_scheduler_gives_each_optimizer_step_its_rate():
    optimizer = build_optimizer(nn.Linear(1, 1).named_parameters(), target=torch.optim.SGD, lr=2.0)
    scheduler = build_scheduler(optimizer, kind="linear", total_steps=6, warmup_steps=2, min_ratio=0.0)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 1.6, 1.2, 0.8, 0.4])
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=7"):
        build_scheduler(optimizer, kind="linear", total_steps=6, warmup_steps=7)
