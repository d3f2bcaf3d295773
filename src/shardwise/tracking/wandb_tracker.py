"""A training on Weights & Biases: one run of all ranks, a run of each, or one run that all of them write to."""

import argparse
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pytorch_lightning.loggers.logger import DummyExperiment, Logger

from shardwise.config import nearest
from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets
from shardwise.telemetry.table import RankTable
from shardwise.tracking.place import place
from shardwise.tracking.wandb_parts import UNITS, WAYS, node_row, own_row, table_row, without_own
from shardwise.tracking.wandb_run import WandbRun, plain_id

MODES = ("auto", "online", "offline", "disabled")
MODES_OF_WANDB = ("online", "offline", "disabled", "shared", "run", "dryrun")
"""What WANDB_MODE may be."""


class WandbTracker(Logger):
    """A run on Weights & Biases that can never stop or hang the training.

    - The config is one plain dictionary, without secrets. wandb's own capture of the command line, of git and of the
      console is off, because it would carry secrets.
    - Metrics are plotted over a step of our own, "step", the optimizer step.
    - A service that is absent at the start means an offline run; one that goes away later means that the rest waits in
      the run folder; a client that breaks, or has no room on the disk, means that tracking ends there. Each is said in
      one line, with the command that uploads what is there, and training goes on. Ranks other than 0 say it in their
      logs; where they have runs of their own, rank 0's command is for all of them.
    - Whoever owns the run calls finish(exit_code) at its end, on every rank. Lightning's finalize does not, because it
      comes after every fit and test.
    - A run that is resumed keeps its id, and each of its points arrives once: what W&B has is not logged again, and
      what it lost when the run was killed is logged from <save_dir>/metrics.jsonl and <save_dir>/ranks/rank_<k>.jsonl,
      which have the same calls line by line and have to be cut back to the checkpoint before this tracker is used.
      Points that were logged past it, through `experiment`, are not watched.
    - Offline, each start of a process has a folder, all of one id: the command that uploads them, oldest first, makes
      one run of them, and none where ids differ; so no group of runs is needed to hold a resumed run together.
    - Under an agent of a W&B sweep (WANDB_SWEEP_ID and WANDB_RUN_ID) the metrics go to the agent's run, in the sweep's
      project, and run_id is no more than its name; the run folder remembers which run it was.

    What ranks have measured themselves (``log_rank``, ``log_ranks``) comes in one of three ways:

    - ``gathered``: one run, of rank 0; nothing of wandb is on other ranks. For each quantity that several ranks have
      measured, <quantity>/histogram, and with up to 64 ranks each one's <quantity>/rank_<k>, in a row of its own: one
      that waited for another call would be lost when the process is killed.
    - ``grouped``: a run for each rank, <run_id>-rank-<k>, or with run_per=node for each node, <run_id>-node-<n>, in the
      group <run_id> if none is given. Each has its own values by their plain names (a node the mean of its ranks,
      <quantity>/max and <quantity>/max_rank); rank 0's run has besides what is of all ranks, the mean over them as
      <quantity>/mean, and the config. Offline too.
    - ``shared``: one run into which every rank writes (W&B's shared mode), its values as rank_<k>/<quantity>, because
      a row carries no label. It needs the service; where there is none at the start, ranks have runs as if grouped.
      Points that had arrived come twice from an upload afterwards. Rank 0 ends the run after the others.

    Args:
        project, entity, group, name, tags: as in wandb.init. name is run_id by default; without an entity, the user's.
        mode: online, offline, disabled, or auto: WANDB_MODE if it is set, else online if the user is logged in at the
            configured host, else offline. Nothing ever asks on the terminal.
        ranks: gathered, grouped or shared.
        run_per: rank or node: what has a run of its own where ranks=grouped.
        save_dir: the run folder; everything of wandb goes to <save_dir>/wandb.
        run_id: the id on the service, a new one by default.
        resume: whether the run has been here before, in the same save_dir.
        config: the resolved configuration, with the derived values in it.
        init_timeout: seconds that the service has to accept the run.
        finish_timeout: seconds that the last uploads may take at the end, and that rank 0 waits for others to end.
        settings: further fields of wandb.Settings.
    """

    def __init__(
        self,
        *,
        project: str = "shardwise",
        mode: str = "auto",
        ranks: str = "gathered",
        run_per: str = "rank",
        entity: str | None = None,
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        save_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
        init_timeout: float = 15.0,
        finish_timeout: float = 30.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.check_arguments(mode=mode, ranks=ranks, run_per=run_per)
        self._init: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "name": name,
            "tags": tuple(tags),
        }
        self._mode = mode
        self._way = ranks
        self._unit = run_per
        self._save_dir = None if save_dir is None else Path(save_dir).absolute()
        self._id = None if run_id is None else plain_id(run_id)
        self._resume = resume
        self._config = plain_config(config or {})
        self._settings = {
            "console": "off",
            "silent": True,  # its header and footer; warnings about uploads still come through
            "init_timeout": init_timeout,
            "finish_timeout": finish_timeout,
            "finish_timeout_raises": True,
            # Seconds. A killed process loses what came after the last flush; and what has been uploaded has to be in
            # the file, to be known when the run is resumed.
            "x_transaction_log_flush_interval": 0.05,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,
            **(settings or {}),
        }
        self._own: WandbRun | None = None

    @classmethod
    def check_arguments(cls, *, mode: str = "auto", ranks: str = "gathered", run_per: str = "rank", **_: Any) -> None:
        """Whether a run can be tracked in this way. Does not import wandb.

        Raises:
            ConfigError: a word that does not exist, or two that exclude each other.
        """
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode} is not a mode of W&B: choose one of {', '.join(MODES)}")
        for key, value, allowed in (("ranks", ranks, WAYS), ("run_per", run_per, UNITS)):
            if value not in allowed:
                known = "|".join(allowed)
                raise ConfigError(f"logger.{key}={value}: no such choice{nearest(str(value), allowed)} ({known})")
        asked = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
        if mode == "auto" and asked and asked not in MODES_OF_WANDB:
            known = ", ".join(MODES_OF_WANDB[:3])
            raise ConfigError(f"WANDB_MODE={asked} is not a mode of W&B: export one of {known}, or unset it")
        if ranks == "shared" and asked in ("offline", "dryrun"):
            source = f"WANDB_MODE={asked}" if mode == "auto" else f"logger.mode={mode}"
            raise ConfigError(
                f"logger.ranks=shared needs the service and {source} is without: type logger.ranks=grouped"
            )
        if run_per == "node" and ranks != "grouped":
            raise ConfigError(
                f"logger.run_per=node is for logger.ranks=grouped, not for {ranks}: type that, or leave it out"
            )

    @property
    def wants_every_table(self) -> bool:
        """Whether ``log_ranks`` is to be called on every rank: each node's run has figures of all its ranks."""
        return self._unit == "node"

    @property
    def name(self) -> str | None:
        return self._init["project"]

    @property
    def version(self) -> str | None:
        return self._own.part.run_id if self._own is not None and self._own.part.run_id else self._id

    @property
    def save_dir(self) -> str | None:
        return None if self._save_dir is None else str(self._save_dir)

    @property
    def experiment(self) -> Any:
        """The wandb.Run of this rank, started at the first use; on ranks that have none, or when tracking has ended, an
        object that ignores every call."""
        own = self._started()
        return DummyExperiment() if own is None else own.run

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One row of what is of all ranks, from rank 0. A call without a step counts for the last one that came."""
        if place().rank == 0 and (own := self._started()) is not None:
            has_own = bool(own.part.label) and not own.part.shared
            own.log(without_own(metrics) if has_own else metrics, step)

    def log_rank(self, values: Mapping[str, float], step: int) -> None:
        """One row of what this rank has measured, where ranks bring it to W&B themselves."""
        if self._way == "gathered" or self._unit == "node" or not values:
            return
        own = self._started()
        if own is not None:
            own.log(own_row(own.part, values), step)

    def log_ranks(self, table: RankTable) -> None:
        """One row of what all ranks have measured, where rank 0 brings it to W&B, or that of a node, on each of it."""
        if self._way == "gathered" and place().rank == 0:
            row: dict[str, Any] = table_row(table)
        elif self._unit == "node" and place().local_rank == 0:
            row = node_row(table, place())
        else:
            return
        if row and (own := self._started()) is not None:
            own.log(row, table.step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the config of rank 0's run: a mapping, a DictConfig or a Namespace; it arrives plain and without
        secrets."""
        if place().rank == 0 and (own := self._started()) is not None:
            own.update_config(plain_config(params))

    def finish(self, exit_code: int = 0) -> None:
        """End this rank's run: 0 is a success, anything else a failure. Takes at most about finish_timeout seconds, and
        for rank 0 of a shared run twice that."""
        own, others = self._own, _Others(self._id) if self._way == "shared" else None
        if own is not None and own.run is not None and not own.ended:
            if others is not None and own.place.rank == 0 and exit_code != 1:  # after a failure, peers may be gone
                others.wait(own.place.world_size, seconds=float(self._settings["finish_timeout"]))
            own.finish(exit_code)
        if others is not None:
            others.tell()

    def finalize(self, status: str) -> None:
        """Nothing: see finish."""

    def _started(self) -> WandbRun | None:
        """This process's run, started if need be; None where it has none, or not any more."""
        if self._own is None:
            here = place()
            if here.rank and (self._way == "gathered" or (self._unit == "node" and here.local_rank)):
                return None
            self._own = WandbRun(
                init=self._init,
                mode=self._mode,
                save_dir=self._save_dir,
                run_id=self._id,
                resume=self._resume,
                config={} if here.rank else self._config,
                settings=self._settings,
                way=self._way,
                unit=self._unit,
                place=here,
            )
            self._own.start()
        return None if self._own.ended else self._own


class _Others:
    """Word of the ranks that have ended their part of a run, through the store where they have met."""

    def __init__(self, run_id: str | None) -> None:
        here = dist.is_available() and dist.is_initialized()
        self._store: Any = dist.distributed_c10d._get_default_store() if here else None
        self._key = f"shardwise/wandb/{run_id}"

    def tell(self) -> None:
        try:
            if self._store is not None:
                self._store.set(f"{self._key}/{dist.get_rank()}", "ended")
        except Exception:  # it went with the rank that held it, and nobody listens
            return

    def wait(self, world_size: int, *, seconds: float) -> None:
        keys = [f"{self._key}/{rank}" for rank in range(1, world_size)]
        try:
            if self._store is not None and keys:
                self._store.wait(keys, timedelta(seconds=seconds))
        except Exception:  # ended first, the run takes what comes from others all the same
            return


def plain_config(params: Any) -> dict[str, Any]:
    """A configuration of any kind as nested dicts and lists of plain values, resolved and without secrets."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(params):
        params = OmegaConf.to_container(params, resolve=True)
    elif isinstance(params, argparse.Namespace):
        params = vars(params)
    return without_secrets(_plain(params))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
