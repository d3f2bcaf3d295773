"""What Hydra finds by itself: where the experiments are, and the launcher that runs the jobs of a sweep.

Imported by every Hydra application of the environment, so nothing heavy is imported here, and the search path changes
only for an application whose configuration is shardwise's.
"""

import contextlib
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
from omegaconf import DictConfig

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

    def sweep(self, arguments: list[str]) -> Any:
        from shardwise.job import check_writable

        assert self.config is not None
        check_writable(str(self.config.output_root))
        folder = Path(self.config.hydra.sweep.dir).absolute()
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            return super().sweep(arguments)
        finally:
            (folder / MULTIRUN).unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):  # it holds something
                    path.rmdir()


def _register() -> None:
    store, module = ConfigStore.instance(), "hydra_plugins.shardwise_plugin"
    launcher: dict[str, Any] = {"_target_": f"{module}.ShardwiseLauncher"}
    store.store(group="hydra/launcher", name="shardwise", node=launcher, provider="shardwise")
    sweeper: dict[str, Any] = {"_target_": f"{module}.ShardwiseSweeper", "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="shardwise", node=sweeper, provider="shardwise")


_register()
