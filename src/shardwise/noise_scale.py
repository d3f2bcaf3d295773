"""The critical batch size, measured while a run trains, from gradients that it computes anyway."""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.grad_norm import local_gradients, own_squares
from shardwise.parallel.gradient_noise import NoiseScale, estimate
from shardwise.parallel.own_gradients import OwnGradients
from shardwise.resolve import Resolved
from shardwise.strategies import MeshStrategy
from shardwise.strategies.micro_batches import batch_samples

log = logging.getLogger(__name__)


class GradientNoiseScale(Callback):
    """Logs an estimate of the critical batch size (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

    Below it, doubling the batch nearly halves the steps to a given loss; above it, it saves few. The large batch of the
    estimate is the global batch. The small one is each micro-batch, on each data-parallel rank: its gradient is seen on
    its way, before it is added to others. Under FSDP it is all of a rank's micro-batches, whose sum is seen before it
    is reduced. So there has to be more than one rank, or micro-batch. Nothing that is trained changes by a bit.

    Logged on measured steps, in samples (of a language model: windows): ``noise_scale/critical_batch_size``, the ratio
    tr(Sigma) / |G|^2, left out while one of the two is not positive; ``noise_scale/gradient_norm_sq``, |G|^2 of the
    true gradient; ``noise_scale/gradient_variance``, tr(Sigma) for one sample; and ``noise_scale/measurements``, their
    number so far. The norm and the variance are moving averages.

    What is assumed: samples are drawn independently, and where losses are weighted by what is counted (targets that are
    not ignored), what counts is too; shares are weighted by their counts. Where all windows count the same, nothing is
    assumed of the tokens in one. Steps whose gradients are not finite are left out.

    Args:
        every_n_steps: measure on every n-th optimizer step, with one small collective and one wait for the device.
        decay: of the moving averages, per measurement: 0.99 remembers about the last 100 of them. In a run with fewer,
            all count alike, and the large gradients of its start most.

    Raises:
        ConfigError: one of these is out of range; when training starts: nothing smaller than the global batch has a
            gradient of its own, or none that could be seen.
    """

    def __init__(self, *, every_n_steps: int = 20, decay: float = 0.99) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"noise_scale.every_n_steps={every_n_steps} has to be at least 1")
        if not 0 <= decay < 1:
            raise ConfigError(f"noise_scale.decay={decay} has to be at least 0 and below 1, such as 0.99")
        self.every_n_steps = every_n_steps
        self.scale = NoiseScale(decay=decay)
        self._own = OwnGradients()
        self._samples = 0
        self._found: Tensor | None = None

    @classmethod
    def check_resolved(cls, resolved: Resolved) -> None:
        """The same before anything is launched, with what the configuration can be changed to.

        Raises:
            ConfigError: nothing could be measured so.
        """
        batch, dims = resolved.batch, resolved.dims
        _check(dims, accumulate=batch.accumulate, defers=resolved.config.strategy.defer_gradient_sync)
        if dims.dp_size > 1:
            return
        auto = resolved.config.batch.micro_size == "auto"
        if batch.global_size == 1:
            why = "batch.global_size=1"
        elif auto:
            why = "one device whose batch.micro_size=auto may be the whole batch"
        else:
            why = "one device with batch.accumulate=1"
        if auto or batch.accumulate == 1:
            raise ConfigError(
                f"callbacks=noise_scale compares gradients of two batch sizes, and {why} has only one: type "
                f"{_ways_to_two_sizes(resolved)}"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, MeshStrategy):
            raise ConfigError(
                f"GradientNoiseScale needs Trainer(strategy=MeshStrategy(...)), not {type(strategy).__name__}"
            )
        _check(strategy.dims, accumulate=strategy.accumulate, defers=strategy.defers_gradient_sync)
        if strategy.dp_size == 1 and strategy.accumulate == 1:
            raise ConfigError(
                "callbacks=noise_scale compares gradients of two batch sizes, and one device without accumulation has "
                "only one: give MeshStrategy(accumulate=2), or train on 2 devices"
            )
        strategy.own_gradients = self._own

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._own.wanted = (trainer.global_step + 1) % self.every_n_steps == 0
        if self._own.wanted:
            self._samples = batch_samples(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._own.wanted:
            return
        self._own.wanted = False
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        squares, weights = strategy.shares_of_gradient()
        whole = own_squares(local_gradients(pl_module.parameters()), ranks=strategy.dp_size)[1]
        samples = torch.full_like(whole, self._samples)
        counting = weights > 0  # a share in which nothing counts has no gradient
        square = torch.where(counting, weights * squares, 0.0).sum()
        self._found = torch.stack([square, counting.double().sum(), whole, samples])
        if strategy.dp_group is not None:
            dist.all_reduce(self._found, group=strategy.dp_group)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._found is None:
            return
        square, shares, whole, samples = self._found.tolist()
        self._found = None
        if shares < 2 or not math.isfinite(square + whole):
            return
        self.scale.add(*estimate(square, whole, small_batch=samples / shares, big_batch=samples))
        metrics = {
            "noise_scale/gradient_norm_sq": self.scale.norm_sq,
            "noise_scale/gradient_variance": self.scale.variance,
            "noise_scale/measurements": float(self.scale.measurements),
        }
        critical, name = self.scale.critical_batch_size, "noise_scale/critical_batch_size"
        if critical is None:
            trainer.callback_metrics.pop(name, None)  # what was true once is no longer
        else:
            metrics[name] = critical
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.scale.measurements and trainer.is_global_zero:
            log.warning(
                "no noise scale: no step was measured in %d: type callbacks.noise_scale.every_n_steps=1",
                trainer.global_step,
            )

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.load_state_dict(state_dict)


def _check(dims: ParallelDims, *, accumulate: int, defers: bool) -> None:
    """Refuse a layout under which no rank's own gradient can be seen."""
    if dims.tp > 1:
        raise ConfigError(
            f"callbacks=noise_scale does not measure split layers (strategy.tp={dims.tp}): measure under "
            f"strategy=ddp or fsdp, what it finds holds for every strategy"
        )
    if dims.uses_fsdp and accumulate > 1 and not defers:
        raise ConfigError(
            f"callbacks=noise_scale sees no rank's own gradient with strategy.defer_gradient_sync=false and "
            f"batch.accumulate={accumulate}: type strategy.defer_gradient_sync=true"
        )


def _ways_to_two_sizes(resolved: Resolved) -> str:
    """What to type for a second batch size on one data-parallel rank: only what the other sizes allow."""
    config, world, size = resolved.config, resolved.world, resolved.batch.global_size
    micro = config.batch.micro_size
    instead = "" if micro is None else f" in place of batch.micro_size={micro}"
    if size == 1:
        return f"batch.global_size=2 batch.accumulate=2{instead}"
    least = next(number for number in range(2, size + 1) if size % number == 0)
    free = -1 in (config.strategy.dp_replicate, config.strategy.dp_shard) and micro in (None, "auto")
    if least == 2 and free and world.accelerator == "cpu" and world.launch != "torchrun":
        return f"batch.accumulate={least}{instead}, or trainer.devices=2"
    return f"batch.accumulate={least}{instead}"
