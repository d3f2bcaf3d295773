"""Precisions: which formats are really in use, losses in float32 or wider, and loss scaling that cancels out."""

import re
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pool import RankPool
from shardwise.errors import ConfigError
from shardwise.strategies.precision import mesh_precision
from shardwise.summary import formats_line
from training import Record, Recorder, build_module, largest_gap, make_trainer, on_layout, relative_gap, shares, train

PRECISIONS = {"32-true": "float32", "bf16-mixed": "float32", "bf16-true": "bfloat16", "64-true": "float64"}
"""Precision -> format of parameters, gradients, reductions and optimizer state."""


class ReducedFormats(TorchDispatchMode):
    """Formats of what is reduced over ranks, where it is larger than a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and ("allreduce" in str(func) or "reduce_scatter" in str(func)):
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.seen |= {str(t.dtype).removeprefix("torch.") for t in tensors if t.numel() > 1}
        return func(*args, **(kwargs or {}))


class Observer(pl.Callback):
    """What the start-up table says of the formats, and what collectives carry."""

    def __init__(self) -> None:
        self.line = ""
        self.mode = ReducedFormats()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.line = formats_line(pl_module, trainer.optimizers[0], trainer.strategy.reduction_dtype)


def formats(layout: str, precision: str) -> tuple[str, set[str]]:
    observer = Observer()
    trainer = make_trainer(layout, callbacks=[observer], precision=precision, max_steps=1, accumulate=2)
    trainer.fit(build_module("gpt"), shares("gpt", 1))
    return observer.line, observer.mode.seen


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2", "hsdp4"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_formats_are_what_the_start_up_table_says(pool: RankPool, layout: str, precision: str) -> None:
    kept = PRECISIONS[precision]
    for line, reduced in on_layout(pool, formats, layout, layout, precision):
        said = dict(re.findall(r"(parameters|gradients|reductions|optimizer state) ([\w, ]+)", line))
        assert said.pop("reductions", None) == (None if layout == "one" else kept)
        assert said == {"parameters": kept, "gradients": kept, "optimizer state": kept}
        assert reduced == (set() if layout == "one" else {kept})


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
@pytest.mark.parametrize(("precision", "gap"), [("32-true", 1e-6), ("bf16-mixed", 1e-3), ("bf16-true", 1e-3)])
def test_losses_are_wide(pool: RankPool, layout: str, precision: str, gap: float) -> None:
    # From the same weights: float64 draws its own.
    expected = on_layout(pool, train, "one", "gpt", "one", 1, 3, {"precision": "32-true"})[0]
    options = {"precision": precision}
    ours = on_layout(pool, train, layout, "gpt", layout, 2, 3, options)[0]
    assert relative_gap(ours.losses[:1], expected.losses[:1]) < gap
    if precision != "32-true":
        assert relative_gap(ours.losses, expected.losses) > 1e-8, "nothing was computed in bfloat16"


class Widths(pl.LightningModule):
    """Remembers the format of what its training_step sees and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.seen: dict[str, str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.layer(batch[0])
        loss = (out - batch[1]).square().mean()
        self.seen = {"output": str(out.dtype), "weight": str(self.layer.weight.dtype)}
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ClosureLoss(pl.Callback):
    dtype = ""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.dtype = str(loss.dtype)


def widths(layout: str, precision: str) -> tuple[dict[str, str], str]:
    seen, module = ClosureLoss(), Widths()
    make_trainer(layout, callbacks=[seen], precision=precision, max_steps=1).fit(module, shares("plain", 1))
    return module.seen, seen.dtype


@pytest.mark.parametrize(
    ("layout", "precision", "output", "weight"),
    [
        ("ddp2", "bf16-mixed", "torch.bfloat16", "torch.float32"),
        ("fsdp2", "bf16-mixed", "torch.bfloat16", "torch.bfloat16"),
        ("fsdp2", "bf16-true", "torch.bfloat16", "torch.bfloat16"),
    ],
)
def test_computation_is_in_the_lower_format(
    pool: RankPool, layout: str, precision: str, output: str, weight: str
) -> None:
    for seen, loss in pool.run(widths, layout, precision):
        assert seen == {"output": output, "weight": weight}
        assert loss == "torch.float32", "whatever the module returned, weights and sums are wide"


class BrokenOnce(pl.Callback):
    """Makes a gradient infinite on the last rank alone, in the third step, before ranks exchange anything."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if batch_idx == 2 and last:
            batch[0].fill_(1e30)


def scaled(layout: str, broken: bool) -> tuple[Record, list[float], bool]:
    """A float16 training with a scaled loss: its record, the scale after each step, and whether step 3 was skipped."""
    recorder, scales, weights = Recorder(), [], []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())
            weights.append([p.detach().clone() for p in pl_module.parameters()])

    callbacks = [recorder, Watch(), *([BrokenOnce()] if broken else [])]
    ignored = {"nonfinite": "ignore"}  # the loss is not finite either
    trainer = make_trainer(
        layout, callbacks=callbacks, max_steps=4, accumulate=2, gradient_clip_val=0.5, strategy=ignored
    )
    trainer.strategy.precision_plugin = mesh_precision("16-mixed", device_type="cpu", autocast="fsdp" not in layout)
    torch.manual_seed(11)
    trainer.fit(build_module("plain"), shares("plain", 4))
    skipped = all(
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in zip(weights[1], weights[2], strict=True)
    )
    return recorder.record, scales, skipped


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_loss_scaling_cancels_out(pool: RankPool, layout: str) -> None:
    expected = train("plain", "one", 1, 4, {"precision": "32-true"})
    for record, scales, skipped in on_layout(pool, scaled, layout, layout, False):
        assert scales == [65536.0] * 4
        assert not skipped
        assert relative_gap(record.losses, expected.losses) < 1e-2
        assert relative_gap(record.norms, expected.norms) < 1e-2
        assert largest_gap(record.gradients, expected.gradients, floor=0.1) < 2e-2


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2"])
def test_a_step_with_an_overflow_on_one_rank_is_skipped_by_all(pool: RankPool, layout: str) -> None:
    for _, scales, skipped in on_layout(pool, scaled, layout, layout, True):
        assert scales == [65536.0, 65536.0, 32768.0, 32768.0]
        assert skipped


def test_scaler_and_clipping_survive_the_next_call_of_the_trainer() -> None:
    trainer = make_trainer("one", max_steps=1, gradient_clip_val=1.0)
    module = build_module("mlp")
    trainer.fit(module, shares("mlp", 1))
    plugin = trainer.precision_plugin
    trainer.validate(module, shares("mlp", 1), verbose=False)
    assert trainer.precision_plugin is plugin
    assert isinstance(float(plugin.grad_norm), float)


def test_unknown_precisions_are_refused() -> None:
    for name in ("16-true", "transformer-engine"):
        with pytest.raises(ConfigError, match=f"precision='{name}' is not supported: 32-true"):
            mesh_precision(name, device_type="cpu", autocast=True)
