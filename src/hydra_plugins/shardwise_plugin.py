"""What Hydra finds by itself: where the experiments are, and the launcher that runs the jobs of a sweep.

Imported by every Hydra application of the environment, so nothing heavy is imported here, and the search path changes
only for an application whose configuration is shardwise's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


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
        results = run_sweep(sweep_jobs(self.context, self.config, job_overrides), folder)
        returns = []
        for result in results:
            job_return = JobReturn(status=JobStatus.COMPLETED)
            job_return.return_value = result
            returns.append(job_return)
        return returns


def _register() -> None:
    node: dict[str, Any] = {"_target_": "hydra_plugins.shardwise_plugin.ShardwiseLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="shardwise", node=node, provider="shardwise")


_register()
