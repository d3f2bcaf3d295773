"""What Hydra finds by itself: where the experiments are, and the launcher that runs the jobs of a sweep.

Imported by every Hydra application of the environment, so nothing heavy is imported here, and the search path changes
only for an application whose configuration is shardwise's.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

MULTIRUN = "multirun.yaml"
"""Hydra's record of a sweep: what was typed as it was typed, secrets too. What ran stands in ``jobs.json``."""


class ShardwiseSearchPath(SearchPathPlugin):
    """Appends the experiments; with ``hydra.searchpath``, ``experiment=glob(*)`` would launch no job at all."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(element.path == "pkg://shardwise.conf" for element in search_path.get_path()):
            search_path.append(provider="shardwise", path="pkg://shardwise.experiments")


class ShardwiseLauncher(Launcher):
    """Composes every job first, so that a mistake in the last is told before the first one starts; then runs them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from shardwise.cli import run_sweep
        from shardwise.hydra_setup import sweep_jobs

        folder = Path(self.config.hydra.sweep.dir).absolute()
        (folder / MULTIRUN).unlink(missing_ok=True)
        results = run_sweep(sweep_jobs(self.context, self.config, job_overrides), folder)
        returns = []
        for result in results:
            job_return = JobReturn(status=JobStatus.COMPLETED)
            job_return.return_value = result
            returns.append(job_return)
        return returns


class ShardwiseSweeper(BasicSweeper):
    """Hydra's own sweeper, which leaves nothing behind where a job's configuration is wrong."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: the launcher composes every job before it starts one, and to do so twice takes twice as long."""

    def sweep(self, arguments: list[str]) -> Any:
        from shardwise.errors import ConfigError
        from shardwise.hydra_setup import check_countable, sweep_settings, swept_keys
        from shardwise.job import check_writable
        from shardwise.sweep.objective import check_settings
        from shardwise.sweep.planning import check_name, check_swept

        assert self.config is not None
        assert self.hydra_context is not None
        _check_no_agent()
        if self.max_batch_size is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size}: all jobs are one batch here, and "
                f"sweep.slots is how many run side by side"
            )
        loader = self.hydra_context.config_loader
        searched = swept_keys(self.params, arguments, loader=loader)
        check_swept(searched)
        check_writable(str(self.config.output_root))
        settings = sweep_settings(self.config)
        check_settings(settings, searched=searched)
        name = settings.name
        check_name(name)
        if name is not None:
            with open_dict(self.config.hydra):
                self.config.hydra.sweep.dir = f"{self.config.output_root}/sweeps/{name}"
        folder = Path(self.config.hydra.sweep.dir).absolute()
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            if settings.search != "grid":
                return self._search(arguments, folder)
            check_countable(self.params, arguments, loader=loader)
            return super().sweep(arguments)
        finally:
            (folder / MULTIRUN).unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):  # it holds something
                    path.rmdir()

    def _search(self, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
        """Jobs that a study of Optuna's asks for, one by one, instead of those of a grid."""
        from shardwise.cli import sweep_planner
        from shardwise.hydra_setup import compose_job, parse_space, sweep_settings
        from shardwise.sweep.run_search import run_search

        assert self.config is not None
        assert self.hydra_context is not None
        context, config = self.hydra_context, self.config
        fixed, space = parse_space(self.params, arguments, loader=context.config_loader)
        outcomes = run_search(
            space,
            fixed=fixed,
            settings=sweep_settings(config),
            folder=folder,
            compose=lambda overrides: compose_job(context, config, overrides),
            planner_for=sweep_planner,
        )
        return [outcome.result or {} for outcome in outcomes]


def _check_no_agent() -> None:
    """Whether no agent of a W&B sweep started this: it makes one run, and jobs of a sweep would overwrite each other's.

    Raises:
        ConfigError: one did.
    """
    from shardwise.errors import ConfigError

    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        raise ConfigError(
            "-m under an agent of a W&B sweep: the agent makes one run, and these are several jobs: leave -m out, or "
            "start the command without the agent (unset WANDB_SWEEP_ID)"
        )


def _register() -> None:
    store, module = ConfigStore.instance(), "hydra_plugins.shardwise_plugin"
    launcher: dict[str, Any] = {"_target_": f"{module}.ShardwiseLauncher"}
    store.store(group="hydra/launcher", name="shardwise", node=launcher, provider="shardwise")
    sweeper: dict[str, Any] = {"_target_": f"{module}.ShardwiseSweeper", "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="shardwise", node=sweeper, provider="shardwise")


_register()
