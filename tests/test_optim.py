from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.errors import ConfigError
from shardwise.optim import build_optimizer, build_scheduler

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
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in (model[0].bias, model[1].weight, model[1].bias)]
    assert group["lr"] == 0.5


def test_lists_from_yaml_become_tuples():
    optimizer = build_optimizer(nn.Linear(1, 1).named_parameters(), target=torch.optim.AdamW, lr=1e-3, betas=[0.8, 0.9])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("choice", ["sgd", "adam", "adamw"])
def test_every_choice_in_conf_builds_and_lowers_a_loss(choice):
    arguments: dict = {}
    for name in {"adamw": ["adam", "adamw"]}.get(choice, [choice]):
        arguments |= yaml.safe_load((CONF / "optimizer" / f"{name}.yaml").read_text())
    arguments.pop("defaults", None)
    target = getattr(torch.optim, arguments.pop("_target_").removeprefix("torch.optim."))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(model.named_parameters(), target=target, **arguments)
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
        ({"lr": -1.0}, "AdamW refuses its arguments.*[Ii]nvalid learning rate"),
        ({"betas": [0.9]}, "AdamW refuses its arguments"),
        ({"weight_decy": 0.1}, "optimizer.weight_decy is not an argument .* did you mean optimizer.weight_decay"),
        ({"zzz": 1}, "optimizer.zzz is not an argument of .*AdamW: it takes lr, betas"),
        ({"target": nn.Linear}, "is no optimizer"),
    ],
)
def test_mistakes_are_one_line(arguments, text):
    with pytest.raises(ConfigError, match=text) as error:
        build_optimizer(nn.Linear(1, 1).named_parameters(), **({"target": torch.optim.AdamW, "lr": 1e-3} | arguments))
    assert "\n" not in str(error.value)


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
