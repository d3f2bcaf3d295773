"""Saved under any layout, loaded under any other: parameters and the optimizer's moments, bit for bit."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from shardwise.checkpoint.model_state import plain_names
from shardwise.checkpoint.optimizer_state import optimizer_names
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.errors import ConfigError
from training import LAYOUTS, PLANS, build_module, make_trainer, on_layout, shares, whole

STEPS = 3
MATRIX = ("one", "ddp2", "fsdp2", "hsdp4", "tp2", "fsdp+tp4", "hybrid8")


def contents(trainer: Any, module: Any) -> dict[str, Tensor]:
    """Everything that is to come back, whole: parameters, buffers, and each tensor of the optimizer's state."""
    optimizer = getattr(trainer.optimizers[0], "_optimizer", trainer.optimizers[0])
    found = {name: whole(tensor) for name, tensor in plain_names(module).items()}
    for parameter, name in optimizer_names(plain_names(module), optimizer).items():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found if trainer.global_rank == 0 else {}


def trainer_for(kind: str, layout: str, *callbacks: pl.Callback, steps: int = STEPS) -> pl.Trainer:
    return make_trainer(
        layout, callbacks=callbacks, precision="64-true", max_steps=steps, strategy={"plan": PLANS.get(kind)}
    )


def save(kind: str, layout: str, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(11)
    module, saving = build_module(kind), SaveCheckpoints(f"{folder}/{layout}", every_minutes=None)
    trainer = trainer_for(kind, layout, saving)
    trainer.fit(module, shares(kind, STEPS, tp=LAYOUTS[layout].tp))
    saving.wait()
    return contents(trainer, module)


class Look(pl.Callback):
    """What is there when training starts; then training stops."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = contents(trainer, pl_module)
        trainer.should_stop = True


def load(kind: str, layout: str, folder: str, sources: tuple[str, ...]) -> list[dict[str, Tensor]]:
    found = []
    for source in sources:
        torch.manual_seed(99)
        look = Look()
        trainer = trainer_for(kind, layout, look, steps=STEPS + 1)
        loader = shares(kind, STEPS + 1, tp=LAYOUTS[layout].tp)
        trainer.fit(build_module(kind), loader, ckpt_path=f"{folder}/{source}/step_{STEPS:08d}")
        found.append(look.found)
    return found


def check_matrix(pool: Any, tmp_path: Any, kind: str, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    saved = {name: on_layout(pool, save, name, kind, name, str(tmp_path))[0] for name in sources}
    for target in targets:
        loaded = on_layout(pool, load, target, kind, target, str(tmp_path), sources)[0]
        for source, found in zip(sources, loaded, strict=True):
            expected = saved[source]
            assert found.keys() == expected.keys(), f"{source} -> {target}"
            differs = [name for name, value in expected.items() if not torch.equal(value, found[name])]
            assert not differs, f"{source} -> {target}: {differs[:5]}"
            moments = sum(bool(value.abs().sum()) for name, value in expected.items() if name.endswith("exp_avg"))
            assert moments > len(expected) // 8, "there is something to be lost"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_from_every_layout(pool, tmp_path):
    """A GPT with tied embeddings, a vocabulary of 19 and the norms whole: even, uneven and replicated parts.

    Saved under each, and loaded where parameters are whole, in parts of either kind, and in those of all three axes.
    """
    check_matrix(pool, tmp_path, "gpt-tied", MATRIX, ("one", "fsdp2", "tp2", "hybrid8"))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_packed_matrices_between_layouts(pool, tmp_path):
    """torchvision's attention packs queries, keys and values in one matrix: a rank holds three blocks of rows."""
    check_matrix(pool, tmp_path, "vit_b_16", ("one", "tp2", "fsdp+tp4"), ("one", "fsdp2", "tp2", "fsdp+tp4"))


@pytest.mark.proofs
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("kind", ["gpt-tied", "gpt-gqa", "vit", "vit_b_16", "mlp-even", "plain", "plan", "net"])
def test_all_pairs_of_layouts_of_every_model(pool, tmp_path, kind):
    layouts = MATRIX if kind != "plain" else tuple(name for name in MATRIX if LAYOUTS[name].tp == 1)
    check_matrix(pool, tmp_path, kind, layouts, layouts)


def test_a_checkpoint_of_another_model_says_what_differs(tmp_path):
    save("gpt-tied", "one", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load("gpt", "one", str(tmp_path), ("one",))
    assert "\n" not in str(error.value)
    assert "it lacks" in str(error.value)
    with pytest.raises(ConfigError, match=r"of another model: it lacks .*; it has besides "):
        load("vit", "one", str(tmp_path), ("one",))
