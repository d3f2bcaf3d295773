"""Saving and loading under any layout: Lightning's single files, and the framework's folders."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytorch_lightning.trainer.states import TrainerFn
from torch.optim import Optimizer

from shardwise.checkpoint.capture import continue_epoch, lightning_checkpoint
from shardwise.checkpoint.find import POINTERS
from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.model_state import load_model
from shardwise.checkpoint.optimizer_state import follow_schedule, group_values, load_optimizer
from shardwise.checkpoint.rank_state import (
    load_batch_statistics,
    load_metric_states,
    rank_state,
    seed_random,
    set_random_state,
)
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.errors import ConfigError
from shardwise.parallel.state import (
    load_sharded_optimizer_state,
    load_whole_model_state,
    named_optimizer_state,
    whole_model_state,
)
from shardwise.seeds import stable_seed
from shardwise.strategies.process import MeshProcess

log = logging.getLogger(__name__)


@dataclass
class _Folder:
    """A checkpoint folder that is being loaded."""

    state: dict[str, Any]
    """What its ``state.json`` says."""
    stored: StoredTensors
    metrics: dict[str, Any] = field(default_factory=dict)
    """What was logged last, by name."""


class MeshCheckpoints(MeshProcess):
    """The part of a strategy that saves and loads.

    ``Trainer.save_checkpoint`` writes Lightning's single file, for which rank 0 gathers everything. A folder (written
    by ``SaveCheckpoints``) is read by all ranks at once, each its own parts; ``ckpt_path`` takes either.
    """

    constructed: list[list[dict[str, Any]]]
    """The values of each optimizer's groups when it was made."""
    verify_checkpoints = True
    """Whether every byte of a checkpoint folder is compared with its checksum before it is loaded."""
    _folder: _Folder | None = None
    _rate_factors: list[list[float]]
    seed: int

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: only then do parameters have memory, and none is drawn any more."""
        return True

    def remember_groups(self) -> None:
        """Note what the optimizers were made with, before anything has changed it."""
        self.constructed = [group_values(optimizer) for optimizer in self.optimizers]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Without running code out of the file, unless ``weights_only=False`` is typed; of a folder never."""
        path = str(checkpoint_path)
        self._folder = None
        if "://" not in path and not os.path.isdir(path) and os.path.basename(path) not in POINTERS:
            return super().load_checkpoint(checkpoint_path, weights_only=True if weights_only is None else weights_only)
        url, state = self._opened(path)
        self._folder = _Folder(state, StoredTensors(url))
        checkpoint = lightning_checkpoint(state["trainer"], self._folder.stored)
        self._folder.metrics = checkpoint.pop("callback_metrics", {})
        if not self._fitting:
            checkpoint.pop("loops", None)  # those of training; Lightning would look for the loop that is to run
        return checkpoint

    @property
    def _fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def _opened(self, path: str) -> tuple[str, dict[str, Any]]:
        """Where a folder is and what it says; the first rank compares every checksum, unless somebody has."""
        opened, fault = None, None
        try:
            opened = open_checkpoint(path, contents=self.verify_checkpoints and self.is_global_zero)
        except ConfigError as error:
            fault = str(error)
        fault = self.broadcast(fault) or fault
        if opened is None or fault is not None:
            raise ConfigError(fault)
        return opened

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model; where parameters are sharded, on rank 0's CPU, empty elsewhere, and a collective."""
        assert self.lightning_module is not None
        return whole_model_state(self.lightning_module) if self.holds_parts else self.lightning_module.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._folder is not None:
            load_model(self.lightning_module, self._folder.stored, strict=strict)
            for name, extra in checkpoint.get("extra_states", {}).items():
                self.lightning_module.get_submodule(name).set_extra_state(extra)
            if not self._fitting:
                self._folder = None  # a training that follows has nothing to put back
        elif self.holds_parts:
            load_whole_model_state(self.lightning_module, checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return named_optimizer_state(self.lightning_module, optimizer, sharded=self.holds_parts)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        self._rate_factors = [[] for _ in self.optimizers]
        for index, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            if self._folder is not None:
                self._rate_factors[index] = load_optimizer(
                    self.lightning_module,
                    optimizer,
                    index,
                    stored=self._folder.stored,
                    saved=state,
                    now=self.constructed[index],
                )
            elif self.holds_parts:
                load_sharded_optimizer_state(self.lightning_module, optimizer, state)
        if self._folder is None and not self.holds_parts:
            super().load_optimizer_state_dict(checkpoint)

    def continue_training(self) -> None:
        """What is left to be put back when training starts: called after every hook that may draw a random number."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for config in trainer.lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            follow_schedule(config.scheduler, self._rate_factors[self.optimizers.index(optimizer)], optimizer=optimizer)
        continue_epoch(trainer)
        connector: Any = trainer._logger_connector
        connector._callback_metrics.update(folder.metrics)
        if folder.state["mesh"] == self.dims.shape:
            set_random_state(rank_state("random", self.global_rank, folder.stored))
            load_metric_states(trainer, rank_state("metrics", self.global_rank, folder.stored))
            load_batch_statistics(self.lightning_module, rank_state("buffers", self.global_rank, folder.stored))
        else:
            if self.is_global_zero and any(key.startswith("metrics/") for key in folder.stored):
                log.warning("metrics of the epoch begin anew: the ranks that have added them up are other ones now")
            # Each share of the data has its noise; which share that is has changed.
            seed_random(stable_seed(self.seed, "noise", self.dp_rank, trainer.global_step))
