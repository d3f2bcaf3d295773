"""Every optimizer that is offered steps under every layout as on one device (float64)."""

from functools import cache, partial
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pool import RankPool
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.errors import ConfigError
from shardwise.optim import Muon
from test_checkpoint_layouts import contents, trainer_for
from test_parity import GRADIENT_GAP, LOSS_GAP, PARAMETER_GAP
from training import LAYOUTS, Record, Shares, build_module, on_layout, parameter_gap, relative_gap, train, tuned

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"target": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"target": torch.optim.Adam, "lr": 1e-2, "weight_decay": 0.01},
    "adamw": {"target": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1},
    "lamb": {"target": timm.optim.Lamb, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None},
    "lamb-all": {
        "target": timm.optim.Lamb, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, "decay": "all",
        "trust_clip": True,
    },
    "lars": {"target": timm.optim.Lars, "lr": 10.0, "momentum": 0.9, "weight_decay": 1e-3, "trust_coeff": 1e-2},
    "lars-all": {
        "target": timm.optim.Lars, "lr": 10.0, "weight_decay": 1e-3, "trust_coeff": 1e-2, "decay": "all",
    },
    "adafactor": {"target": torch.optim.Adafactor, "lr": 1e-2, "weight_decay": 0.1},
    # Keys have biases whose gradients are zero but for rounding, which torch's own eps of 2e-16 would magnify.
    "adafactor-eps": {"target": torch.optim.Adafactor, "lr": 1e-2, "weight_decay": 0.1, "eps": (1e-8, 1e-3)},
    "muon": {"target": Muon, "lr": 1e-2},
}  # fmt: skip


@cache
def one_device(kind: str, name: str) -> Record:
    return on_layout(None, train, "one", kind, "one", 1, 20, None, None, False, OPTIMIZERS[name])[0]


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [
        ("sgd", "gpt-tied", "hsdp4"),
        ("adam", "vit", "fsdp+tp4"),
        ("adamw", "gpt", "fsdp+tp4"),
        *[
            (name, kind, layout)
            for name in ("lamb", "lars", "adafactor", "muon")
            for kind, layout in [
                ("gpt-tied", "fsdp2"),
                ("gpt", "fsdp+tp4"),
                ("mlp", "fsdp4"),  # uneven shards, and ranks that hold nothing
            ]
        ],
        *[
            pytest.param(name, "gpt", layout, marks=pytest.mark.proofs)
            for name in ("lamb", "lars", "adafactor", "muon")
            for layout in ("tp2", "hsdp4", "ddp+tp4")
        ],
        *[(name, "vit_b_16", "fsdp+tp4") for name in ("lamb", "lars", "adafactor-eps", "muon")],  # packed matrices
        ("lamb-all", "net", "fsdp+tp4"),
        ("lars-all", "plan", "fsdp+tp4"),
        ("adafactor", "convnet", "fsdp2"),
        pytest.param("muon", "plan", "hybrid8", marks=pytest.mark.proofs),
        ("muon", "gpt", "ddp2"),
    ],
)
def test_steps_as_on_one_device(pool: RankPool, name: str, kind: str, layout: str) -> None:
    expected = one_device(kind, name)
    records = on_layout(pool, train, layout, kind, layout, 1, 20, None, None, False, OPTIMIZERS[name])
    ours = records[0]
    assert parameter_gap(ours.gradients, expected.gradients, floor=1e-6) <= GRADIENT_GAP
    gaps = {n: float((ours.end[n] - t).abs().max()) for n, t in expected.end.items()}
    moved = {n: float((ours.end[n] - t).abs().max()) for n, t in ours.start.items()}
    assert all(moved[n] > 1e-5 for n, gradient in ours.gradients.items() if gradient.norm() > 1e-10), moved
    assert max(gaps.values()) <= PARAMETER_GAP, gaps
    assert relative_gap(ours.losses, expected.losses) <= LOSS_GAP
    assert len({record.kinds["digest"] for record in records}) == 1, "the parameters of replicas"


def fit(name: str, layout: str, steps: int, *, save: str | None = None, load: str | None = None) -> dict[str, Tensor]:
    """Train a GPT, from the start or from a checkpoint after 3 steps; everything that is there afterwards."""
    torch.manual_seed(11)
    module = tuned(build_module("gpt-tied"), **OPTIMIZERS[name])
    saving = [] if save is None else [SaveCheckpoints(save, every_minutes=None)]
    trainer = trainer_for("gpt-tied", layout, *saving, steps=steps)
    data = Shares("gpt-tied", 6, LAYOUTS[layout].tp)
    if load is not None:
        data.batches = data.batches[3:] + data.batches[:3]
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=load)
    for each in saving:
        each.wait()
    return contents(trainer, module)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(
    "name", ["lamb", "muon", *(pytest.param(name, marks=pytest.mark.proofs) for name in ("lars", "adafactor"))]
)
def test_goes_on_from_a_checkpoint(pool: RankPool, tmp_path: Any, name: str) -> None:
    expected = on_layout(None, fit, "one", name, "one", 6)[0]
    for layout, others in (("fsdp+tp4", ("fsdp+tp4", "one", "fsdp2")), ("one", ("fsdp+tp4",))):
        folder = f"{tmp_path}/{layout}"
        saved = on_layout(pool, partial(fit, save=folder), layout, name, layout, 3)[0]
        whole = on_layout(pool, fit, layout, name, layout, 6)[0]
        assert saved.keys() == whole.keys() == expected.keys()
        for other in others:
            load = partial(fit, load=f"{folder}/step_00000003")
            found = on_layout(pool, load, other, name, other, 6)[0]
            assert found.keys() == expected.keys()
            gaps = {key: float((found[key] - value).abs().max()) for key, value in expected.items()}
            assert max(gaps.values()) <= PARAMETER_GAP, f"{layout} -> {other}: {gaps}"
            if other == layout:
                differs = [key for key, value in whole.items() if not torch.equal(value, found[key])]
                assert not differs, differs


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_does_not_go_on_with_other_groups(tmp_path: Any) -> None:
    fit("lamb", "one", 3, save=str(tmp_path))
    with pytest.raises(ConfigError, match=r"of 2 groups .* here are 1: leave optimizer.decay as it was, or"):
        fit("lamb-all", "one", 6, load=f"{tmp_path}/step_00000003")


def fit_file(name: str, layout: str, steps: int, file: str, *, load: bool = False) -> dict[str, Tensor]:
    """As `fit`, with Lightning's single file."""
    torch.manual_seed(11)
    module = tuned(build_module("gpt-tied"), **OPTIMIZERS[name])
    trainer = trainer_for("gpt-tied", layout, steps=steps)
    data = Shares("gpt-tied", 6, LAYOUTS[layout].tp)
    if load:
        data.batches = data.batches[3:] + data.batches[:3]
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=file if load else None)
    if not load:
        trainer.save_checkpoint(file)
    return contents(trainer, module)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(
    "name", ["adafactor", *(pytest.param(name, marks=pytest.mark.proofs) for name in ("lamb", "muon"))]
)
def test_goes_on_from_a_single_file(pool: RankPool, tmp_path: Any, name: str) -> None:
    expected = on_layout(None, fit, "one", name, "one", 6)[0]
    file = str(tmp_path / "last.ckpt")
    on_layout(pool, fit_file, "fsdp2", name, "fsdp2", 3, file)
    found = on_layout(pool, partial(fit_file, load=True), "fsdp2", name, "fsdp2", 6, file)[0]
    gaps = {key: float((found[key] - value).abs().max()) for key, value in expected.items()}
    assert max(gaps.values()) <= PARAMETER_GAP, gaps
