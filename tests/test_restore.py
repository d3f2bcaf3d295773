"""What comes back out of a checkpoint when something was changed meanwhile, and what is refused instead."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging

from shardwise.checkpoint.index import portable
from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.checkpoint.store import Store
from shardwise.errors import ConfigError
from training import build_module, make_trainer, shares

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


class Observe(pl.Callback):
    """The rate with which each step is made."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def fit(
    folder: Path,
    *,
    start: int | None = None,
    steps: int = 6,
    kind: str = "mlp",
    configure: Any = None,
    callbacks: Any = (),
    **options: Any,
) -> tuple[pl.Trainer, list[float]]:
    observe, module = Observe(), build_module(kind)
    if configure is not None:
        module.configure_optimizers = lambda: configure(module)
    saving = SaveCheckpoints(str(folder), every_n_steps=1, every_minutes=None, keep_last=None)
    trainer = make_trainer("one", callbacks=[observe, saving, *callbacks], max_steps=steps, **options)
    checkpoint = None if start is None else f"{folder}/step_{start:08d}"
    trainer.fit(module, shares(kind, steps), ckpt_path=checkpoint)
    saving.wait()
    return trainer, observe.rates


def with_schedule(rate: float, make: Any) -> Any:
    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}

    return configure


SCHEDULES = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12),
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one after the other": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_typed_anew_goes_on_where_the_schedule_is(tmp_path, name):
    """Twice the base rate: twice the rate of every step from there on, whatever the schedule."""
    _, rates = fit(tmp_path, configure=with_schedule(0.01, SCHEDULES[name]))
    _, same = fit(tmp_path, start=3, configure=with_schedule(0.01, SCHEDULES[name]))
    assert same == rates[3:]
    _, twice = fit(tmp_path, start=3, configure=with_schedule(0.02, SCHEDULES[name]))
    assert twice == pytest.approx([2 * rate for rate in rates[3:]])


def test_counts_and_master_weights_keep_their_format(tmp_path):
    """In bf16-true the optimizer's count of steps is float32; rounded to bfloat16 it would stand still at 256."""
    trainer, _ = fit(tmp_path, precision="bf16-true")
    before = next(iter(trainer.optimizers[0].state.values()))
    trainer, _ = fit(tmp_path, start=6, steps=8, precision="bf16-true")
    after = next(iter(trainer.optimizers[0].state.values()))
    assert {key: value.dtype for key, value in after.items()} == {key: value.dtype for key, value in before.items()}
    assert after["step"].dtype == torch.float32
    assert float(after["step"]) == 8


def test_in_another_precision_the_moments_follow_the_parameters(tmp_path):
    fit(tmp_path, precision="32-true")
    trainer, _ = fit(tmp_path, start=6, steps=8, precision="64-true")
    state = next(iter(trainer.optimizers[0].state.values()))
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.float64, torch.float32)


class Validated(pl.Callback):
    """A metric that is there at steps 2 and 5, and stays in callback_metrics as Lightning leaves it."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in (2, 5):
            trainer.callback_metrics["val/loss"] = torch.tensor(0.1 if trainer.global_step == 2 else 0.5)


def test_a_checkpoint_is_not_best_for_what_was_measured_before_it(tmp_path):
    saving = SaveCheckpoints(
        str(tmp_path), every_n_steps=1, every_minutes=None, keep_last=1, keep_best=1, monitor="val/loss"
    )
    trainer = make_trainer("one", callbacks=[Validated(), saving], max_steps=6)
    trainer.fit(build_module("mlp"), shares("mlp", 6))
    saving.wait()
    store = Store(str(tmp_path))
    assert store.best() == "step_00000002"
    assert store.names() == ["step_00000002", "step_00000006"]


def test_a_flipped_bit_is_found_before_anything_is_loaded(tmp_path):
    fit(tmp_path, steps=2)
    path = tmp_path / "step_00000002" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: checksum differs"):
        fit(tmp_path, start=2, steps=3)


def test_a_pointer_is_a_checkpoint(tmp_path):
    fit(tmp_path, steps=2)
    trainer = make_trainer("one", max_steps=4)
    trainer.fit(build_module("mlp"), shares("mlp", 4), ckpt_path=f"{tmp_path}/last")
    assert trainer.global_step == 4


def test_another_training_does_not_begin_among_the_checkpoints_of_one(tmp_path):
    fit(tmp_path, steps=2)
    with pytest.raises(ConfigError, match=r"holds step_00000002 of another training"):
        fit(tmp_path, steps=2)
    assert Store(str(tmp_path)).names() == ["step_00000001", "step_00000002"]


def test_weight_averaging_of_lightning_is_refused_at_the_start(tmp_path):
    """It hides its average in the state_dict of Lightning's own checkpoints."""
    with pytest.raises(ConfigError, match=r"into the checkpoint's state_dict"):
        fit(tmp_path, kind="plain", callbacks=[WeightAveraging()])
    assert Store(str(tmp_path)).names() == []


class Leaves(pl.Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"][next(iter(checkpoint["state_dict"]))]


def test_a_part_that_a_hook_leaves_out_is_left_out(tmp_path):
    fit(tmp_path, steps=2, callbacks=[Leaves()])
    with pytest.raises(ConfigError, match="of another model: it lacks"):
        fit(tmp_path, start=2, steps=3)


def test_names_that_meet_are_kept_apart():
    tensors: dict[str, torch.Tensor] = {}
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, (1, 2): {3.5, float("inf")}}
    back = from_plain(to_plain(value, tensors, at="extra"), tensors.__getitem__)
    assert (int(back["a/b"]), int(back["a"]["b"])) == (1, 2)
    assert back[1, 2] == {3.5, float("inf")}


def test_an_error_that_cannot_travel_is_told_all_the_same():
    class OfAStore(Exception):
        def __init__(self, response: Any, operation: str) -> None:
            super().__init__(f"AccessDenied in {operation}")
            self.lock = response

    error = portable(OfAStore(object(), "PutObject"))
    assert (type(error), str(error)) == (RuntimeError, "OfAStore: AccessDenied in PutObject")
    assert portable(OSError(28, "No space left on device")).errno == 28
