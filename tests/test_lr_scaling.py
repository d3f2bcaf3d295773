"""Learning-rate rules: the numbers of their papers, what each changes beside the rate, and what it refuses."""

import math
from inspect import signature

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.lr_scaling import RULES, scale
from shardwise.optim import Muon

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0005}


def scaled(rule, optimizer=SGD, *, base=64, size=256, corrections=True):
    """(rate, argument -> its value) after the rule."""
    one = scale(rule, optimizer=optimizer, base_batch_size=base, global_size=size, corrections=corrections)
    assert {name: change.before for name, change in one.changes.items() if name in optimizer} == {
        name: optimizer[name] for name in one.changes if name in optimizer
    }
    return one.lr, {name: change.after for name, change in one.changes.items()}


@pytest.mark.parametrize(
    ("rule", "base_batch_size", "global_size", "expected"),
    [
        ("none", None, 4096, 0.1),
        ("none", 64, 4096, 0.1),
        ("linear", 256, 8192, 3.2),  # Goyal et al.: 0.1 at 256 becomes 3.2 at 8192
        ("linear", 256, 64, 0.025),
        ("sqrt", 64, 256, 0.2),
        ("sqrt", 256, 64, 0.05),
        ("adam_sde", 64, 256, 0.2),
        ("adam_sde", 256, 64, 0.05),
        ("legw", 64, 256, 0.2),
        ("legw", 256, 64, 0.05),
    ],
)
def test_the_rules_give_the_rates_of_their_papers(rule, base_batch_size, global_size, expected):
    lr, _ = scaled(rule, {**ADAMW, "lr": 0.1}, base=base_batch_size, size=global_size)
    assert lr == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_everything_stays_what_it_is_at_its_own_batch(rule):
    assert scaled(rule, {**ADAMW, "lr": 3e-4}, base=96, size=96) == (3e-4, {})


def test_sqrt_multiplies_the_weight_decay_as_its_source_does():
    """Krizhevsky 2014, section 5: from 0.01 and 0.0005 at 128 to sqrt(8) times both at 1,024; momentum stays."""
    lr, changes = scaled("sqrt", SGD, base=128, size=1024)
    assert lr == pytest.approx(math.sqrt(8) * 0.01, rel=1e-15)
    assert changes == {"weight_decay": pytest.approx(math.sqrt(8) * 0.0005, rel=1e-15)}
    assert scaled("sqrt", ADAMW)[1] == {"weight_decay": 0.02}
    assert scaled("sqrt", {**ADAMW, "_target_": "mine.MyAdamW"}, size=16)[1] == {"weight_decay": 0.005}


@pytest.mark.parametrize("target", ["torch.optim.SGD", "torch.optim.AdamW"])
def test_that_takes_as_much_weight_away_per_sample_as_before(target):
    """Without a gradient, k steps of the base batch are one step of k times the batch."""

    def left(optimizer, steps):
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        made = getattr(torch.optim, target.rpartition(".")[2])([weight], **optimizer)
        for _ in range(steps):
            weight.grad = torch.zeros_like(weight)
            made.step()
        return weight.item()

    typed = {"lr": 1e-3, "weight_decay": 0.01}
    lr, changes = scaled("sqrt", {"_target_": target, **typed}, size=64 * 16)
    now = {"lr": lr, **changes}
    assert left(now, 10) == pytest.approx(left(typed, 160), rel=1e-6)
    assert abs(left({**now, "weight_decay": 0.01}, 10) - left(typed, 160)) > 1e-3


@pytest.mark.parametrize(
    "optimizer",
    [
        {**SGD, "weight_decay": 0.0},
        {**SGD, "weight_decay": 0},
        {"_target_": "torch.optim.SGD", "lr": 0.1},
        {**ADAMW, "_target_": "torch.optim.Adam"},  # divides its weight decay by the size of the gradients
        {**ADAMW, "_target_": "timm.optim.Lamb"},
    ],
)
def test_a_weight_decay_that_needs_no_correction_has_none(optimizer):
    assert scaled("sqrt", optimizer)[1] == {}


@pytest.mark.parametrize("target", [torch.optim.AdamW, torch.optim.Muon, Muon, torch.optim.SGD, torch.optim.Adafactor])
def test_a_weight_decay_that_nobody_typed_is_corrected_as_if_it_were(target):
    package = "shardwise.optim" if target is Muon else "torch.optim"
    default = signature(target).parameters["weight_decay"].default
    untyped = {"_target_": f"{package}.{target.__name__}", "lr": 0.1}
    assert scaled("sqrt", untyped) == scaled("sqrt", {**untyped, "weight_decay": default})


def test_a_decoupled_weight_decay_is_corrected_whatever_its_optimizer_is_called():
    decoupled = {**ADAMW, "_target_": "torch.optim.Adam", "decoupled_weight_decay": True}
    assert scaled("sqrt", decoupled)[1] == {"weight_decay": 0.02}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_corrections_can_be_left_out_and_only_sqrt_has_one_of_the_weight_decay(rule):
    assert "weight_decay" not in scaled(rule, ADAMW, corrections=False)[1]
    assert ("weight_decay" in scaled(rule, ADAMW)[1]) == (rule == "sqrt")


def test_torchs_momentum_needs_no_correction_when_the_rate_changes():
    """Goyal et al. 2017, section 3: equation 9 keeps the rate out of the buffer, equation 10 has it in there."""
    rates, gradients = [0.1, 0.1, 0.8, 0.8, 0.4, 0.4], [1.0, -2.0, 3.0, 0.5, 1.5, -1.0]
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=rates[0], momentum=0.9)
    u = v = outside = inside = 0.0
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        u = 0.9 * u + gradient
        outside -= rate * u
        v = 0.9 * v + rate * gradient
        inside -= v
    assert weight.item() == pytest.approx(outside, rel=1e-12)
    assert abs(outside - inside) > 0.1


@pytest.mark.parametrize(
    ("size", "betas", "eps"),
    [
        (128, [0.8, 0.998], 1e-8 / math.sqrt(2)),
        (256, [0.6, 0.996], 0.5e-8),
        (639, [1 - 639 / 640, 1 - 639 / 64000], 1e-8 / math.sqrt(639 / 64)),
        (16, [0.975, 0.99975], 2e-8),
        (1, [1 - 0.1 / 64, 1 - 0.001 / 64], 8e-8),
    ],
)
def test_adam_sde_changes_betas_and_eps(size, betas, eps):
    lr, changes = scaled("adam_sde", ADAMW, size=size)
    assert lr == pytest.approx(1e-3 * math.sqrt(size / 64), rel=1e-15)
    assert changes == {"betas": pytest.approx(betas, rel=1e-12), "eps": pytest.approx(eps, rel=1e-12)}
    defaults = {"_target_": "mine.MyAdam", "lr": 1e-3}
    assert scaled("adam_sde", defaults, size=size) == (lr, changes), "torch's defaults where nothing is typed"


def test_adam_sde_keeps_the_course_of_adam_where_noise_prevails():
    """On a noisy quadratic whose noise falls to a tenth, 4,000 weights see as many samples in batches of 1 and of 4.

    Mean and spread on the way: adam_sde stays within 0.02 of those of the base batch, sqrt alone, with the memory of
    the base batch, comes to 0.16, linear to 0.40.
    """
    typed = {"_target_": "torch.optim.Adam", "lr": 0.02, "betas": [0.99, 0.999], "eps": 1e-8}

    def course(rule, batch, *, seed):
        lr, changes = scaled(rule, typed, base=1, size=batch)
        betas, eps = changes.get("betas", typed["betas"]), changes.get("eps", typed["eps"])
        weights = torch.ones(4000, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([weights], lr=lr, betas=tuple(betas), eps=eps)
        generator = torch.Generator().manual_seed(seed)
        seen = []
        for samples in range(batch, 4001, batch):
            noise = (5.0 if samples <= 2000 else 0.5) / math.sqrt(batch)
            draw = torch.randn(4000, generator=generator, dtype=torch.float64)
            weights.grad = weights.detach() + noise * draw
            optimizer.step()
            if samples % 500 == 0:
                seen.append(torch.stack([weights.detach().mean(), weights.detach().std()]))
        return torch.stack(seen)

    base = course("none", 1, seed=0)
    far = {rule: (course(rule, 4, seed=1) - base).abs().sum(1).max().item() for rule in ("adam_sde", "sqrt", "linear")}
    assert far["adam_sde"] < 0.05
    assert far["sqrt"] > 3 * far["adam_sde"]
    assert far["linear"] > 8 * far["adam_sde"]


@pytest.mark.parametrize("betas", [[0.9, 0.999], [0.95, 0.9], [0.5, 0.999], [0.0, 0.999]])
def test_adam_sde_names_the_largest_batch_that_it_can_do(betas):
    smallest = min(betas)
    largest = max(64, round(64 / (1 - smallest)) - 1)
    assert scaled("adam_sde", {**ADAMW, "betas": betas}, size=largest)[0] > 0
    beta = f"beta{betas.index(smallest) + 1}={smallest:g}"
    for size in (largest + 1, 10 * largest):
        with pytest.raises(ConfigError) as error:
            scaled("adam_sde", {**ADAMW, "betas": betas}, size=size)
        message = str(error.value)
        assert message.startswith(f"batch.global_size={size}: lr_scaling=adam_sde from base batch 64 ")
        assert f"would make {beta} " in message
        assert f"type batch.global_size={largest} or less, or lr_scaling=sqrt" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rule": "linear", "base_batch_size": None}, r"lr_scaling=linear needs lr_scaling.base_batch_size.*=32"),
        ({"rule": "sqrt", "base_batch_size": None}, r"lr_scaling=sqrt needs lr_scaling.base_batch_size"),
        ({"rule": "adam_sde", "base_batch_size": None}, r"lr_scaling=adam_sde needs lr_scaling.base_batch_size"),
        ({"rule": "legw", "base_batch_size": None}, r"lr_scaling=legw needs lr_scaling.base_batch_size"),
        ({"rule": "linear", "base_batch_size": 0}, "lr_scaling.base_batch_size=0"),
        ({"rule": "cubic"}, "lr_scaling=cubic.*none, linear, sqrt, adam_sde, legw"),
        ({"global_size": 0}, "batch.global_size=0"),
        ({"lr": math.nan}, "optimizer.lr=nan"),
        ({"lr": -1.0}, "optimizer.lr=-1.0"),
        ({"rule": "adam_sde", "_target_": "torch.optim.SGD"}, "for Adam and AdamW, not for SGD: type lr_scaling=sqrt"),
        ({"rule": "adam_sde", "_target_": "torch.optim.NAdam"}, "not for NAdam: type lr_scaling=sqrt"),
        ({"rule": "adam_sde", "_target_": None}, "not for an optimizer without a name: type"),
        ({"rule": "adam_sde", "betas": 0.9}, "optimizer.betas=0.9: two numbers from 0 to below 1 are needed"),
        ({"rule": "adam_sde", "betas": [0.9, 1.0]}, r"optimizer.betas=\[0.9, 1.0\]: two numbers"),
        ({"rule": "adam_sde", "betas": [0.9, "x"]}, r"optimizer.betas=\[0.9, 'x'\]: two numbers"),
        ({"rule": "adam_sde", "eps": -1}, "optimizer.eps=-1: a number of at least 0 is needed"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_type(changes, text):
    numbers = {"base_batch_size": 64, "global_size": 32}
    numbers |= {key: value for key, value in changes.items() if key in numbers}
    optimizer = ADAMW | {key: value for key, value in changes.items() if key not in ("rule", *numbers)}
    with pytest.raises(ConfigError, match=text) as error:
        scale(changes.get("rule", "linear"), optimizer=optimizer, **numbers)
    assert "\n" not in str(error.value)
