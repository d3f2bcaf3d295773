"""From the command line to a search: whether it can begin, and its run.

Its fields are checked, and the ends of its space are composed as jobs, before the first one starts.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.config import Config, SweepConfig
from shardwise.errors import ConfigError
from shardwise.search_space import Interval, Space, corners, overrides_of
from shardwise.sweep.objective import check_settings
from shardwise.sweep.planning import Planner, label_of
from shardwise.sweep.pool import SweepFailedError, run_jobs
from shardwise.sweep.search import Search
from shardwise.sweep.source import Outcome, Planned

CORNERS = 40
"""Points of a space that are composed before the first job starts, at most; every other before its own."""

Compose = Callable[[Sequence[str]], tuple[Config, list[str], dict[str, Any]]]
"""From overrides to a job's configuration, what was typed, and each group's choice; raises ConfigError."""


def run_search(
    space: Space,
    *,
    fixed: Sequence[str],
    settings: SweepConfig,
    folder: Path,
    compose: Compose,
    planner_for: Callable[[Sequence[Config]], Planner],
) -> list[Outcome]:
    """Check a search, and run its jobs.

    Args:
        space: what is searched.
        fixed: what was typed that is the same in all trials.
        settings: the ``sweep`` section.
        folder: the sweep's.
        compose: see there.
        planner_for: what checks jobs, from the configuration of one of them.

    Raises:
        ConfigError: the fields of ``sweep`` do not go together, or an end of a dimension, with the first values of the
            others, makes no job: nothing has run then. Or a job has no such metric.
        SweepFailedError, SystemExit: as of a grid.
    """
    objectives = check_settings(settings, searched=list(space))
    if settings.prune != "none" and any(key.lstrip("+") == "batch.global_size" for key in space):
        print(
            f"note: sweep.prune={settings.prune} compares jobs at the same step, by which one with a larger "
            f"batch.global_size has seen more samples",
            flush=True,
        )
    samples = corners(space)[:CORNERS]
    try:
        first = compose([*fixed, *overrides_of(samples[0])])
        planner = planner_for([first[0]])
    except ConfigError as error:
        raise ConfigError(f"{error}{_hint(space, samples[0], samples[0], str(error))}") from error

    def plan(overrides: Sequence[str], number: int) -> Planned:
        return planner.plan(*compose(overrides), number=number)

    with contextlib.closing(planner):
        for point in samples:
            try:
                plan([*fixed, *overrides_of(point)], 1)
            except ConfigError as error:
                raise ConfigError(f"{error}{_hint(space, samples[0], point, str(error))}") from error
        sample = planner.plan(*first, number=1)
        search = Search(
            space,
            objectives=objectives,
            settings=settings,
            seed=first[0].seed,
            folder=folder,
            fixed=fixed,
            plan=plan,
            sample=sample,
        )
        outcomes = run_jobs(search, folder=folder, sample=sample)
    if not search.found:
        names = ", ".join(objective.metric for objective in objectives)
        raise SweepFailedError(f"no trial has a value of {names}; see {folder / 'jobs.json'}")
    return outcomes


def _hint(space: Space, first: Mapping[str, str], point: Mapping[str, str], error: str) -> str:
    """What may be wrong with a point: Hydra's intervals are of numbers with a fraction, unless int() says otherwise."""
    for key, dimension in space.items():
        blamed = isinstance(dimension, Interval) and not dimension.whole and key.rpartition(".")[2] in error
        if isinstance(dimension, Interval) and blamed and dimension.low % 1 == dimension.high % 1 == 0:
            return f"; whole numbers are {key}=int(interval({dimension.low:g},{dimension.high:g}))"
    return f" (with {label_of(overrides_of(point))})" if point != first else ""
