"""What a sweep is after: the metrics by which its jobs are compared, and the best of them at the end."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.config import SweepConfig, nearest
from shardwise.errors import ConfigError
from shardwise.job import Job, start_command
from shardwise.provenance import without_secrets
from shardwise.sweep.source import Outcome, counted

SMALL, LARGE = ("loss", "perplexity", "error", "bits_per_byte", "seconds"), ("accuracy", "top5", "per_second")
"""Ends of metrics' names of which everybody knows whether a small or a large value is good."""
USUAL = [f"{stage}/{name}" for stage in ("val", "test", "train") for name in ("loss", "accuracy", "perplexity")]
"""Metrics that somebody may mean who has typed another one."""
SHOWN = 12
"""Points of a Pareto front that are printed."""


@dataclass(frozen=True)
class Objective:
    """A metric and the direction in which it gets better."""

    metric: str
    mode: str
    """min or max."""

    def better(self, value: float) -> float:
        """A number that is smaller for a better value."""
        return value if self.mode == "min" else -value


def objectives_of(settings: SweepConfig) -> list[Objective]:
    """The metrics that ``sweep.metric`` names, each with its direction; none where it names none.

    Raises:
        ConfigError: a direction is missing that the name does not tell, or their number is another one.
    """
    names = [settings.metric] if isinstance(settings.metric, str) else list(settings.metric or ())
    if len(set(names)) < len(names):
        raise ConfigError(f"sweep.metric={_shown(names)}: the same metric twice")
    if settings.mode is not None and not names:
        raise ConfigError(f"sweep.mode={_shown(settings.mode)}: of which metric? type sweep.metric=val/loss too")
    if settings.mode is None:
        return [Objective(name, _known_mode(name)) for name in names]
    modes = [settings.mode] if isinstance(settings.mode, str) else list(settings.mode)
    if len(modes) != len(names):
        raise ConfigError(
            f"sweep.mode={_shown(settings.mode)}: {len(modes)} for {len(names)} metrics ({', '.join(names)}); one each "
            f"is needed"
        )
    return [Objective(name, mode) for name, mode in zip(names, modes, strict=True)]


def check_settings(settings: SweepConfig, *, searched: Sequence[str]) -> list[Objective]:
    """Whether the fields of a sweep go together; returns what it is after.

    Args:
        settings: the ``sweep`` section.
        searched: the keys that have several values.

    Raises:
        ConfigError: names the field, and what to type instead.
    """
    objectives = objectives_of(settings)
    if settings.search == "grid":
        for name, default in (("trials", None), ("prune", "none"), ("storage", None)):
            if (value := getattr(settings, name)) != default:
                shown = without_secrets(str(value))
                raise ConfigError(f"sweep.{name}={shown}: a grid has none; a search does (sweep.search=tpe)")
        return objectives
    if settings.storage is not None and "://" not in settings.storage:
        raise ConfigError(
            f"sweep.storage={settings.storage}: a URL is needed: type sweep.storage=sqlite:///{settings.storage}"
        )
    if not searched:
        raise ConfigError(
            f"sweep.search={settings.search}: nothing to search: give a key several values, such as "
            f"'optimizer.lr=tag(log,interval(1e-4,1e-1))' or batch.global_size=32,64"
        )
    if settings.trials is None:
        raise ConfigError(f"sweep.search={settings.search}: how many jobs? type sweep.trials=20")
    if not objectives:
        raise ConfigError(f"sweep.search={settings.search}: what is it after? type sweep.metric=val/loss")
    if settings.prune != "none":
        if len(objectives) > 1:
            raise ConfigError(
                f"sweep.prune={settings.prune}: jobs are ended early by one metric, and sweep.metric has "
                f"{len(objectives)}: type sweep.prune=none"
            )
        if objectives[0].metric.startswith("test/"):
            raise ConfigError(
                f"sweep.prune={settings.prune}: {objectives[0].metric} comes only at the end of a job: take a metric "
                f"of the validation, such as sweep.metric=val/loss"
            )
    return objectives


def values_of(metrics: Mapping[str, Any], objectives: Sequence[Objective]) -> list[float]:
    """The objectives' values in a finished job's metrics; NaN for one without a number.

    Raises:
        ConfigError: there is no such metric; names the nearest.
    """
    for objective in objectives:
        if objective.metric not in metrics:
            there = nearest(objective.metric, metrics) or (f" (there are {', '.join(metrics)})" if metrics else "")
            raise ConfigError(f"sweep.metric={objective.metric}: no job has such a metric{there}")
    values = [metrics[objective.metric] for objective in objectives]
    return [math.nan if value is None else float(value) for value in values]


def best_of_grid(objectives: Sequence[Objective], outcomes: Sequence[Outcome]) -> list[str]:
    """Lines about the best job of a grid, or about its Pareto front; empty without an objective."""
    if not objectives:
        return []
    found = []
    for outcome in outcomes:
        if outcome.status == "completed" and all(objective.metric in outcome.metrics for objective in objectives):
            values = values_of(outcome.metrics, objectives)
            if all(map(math.isfinite, values)):
                found.append((outcome, values))
    best = _front([[o.better(v) for o, v in zip(objectives, values, strict=True)] for _, values in found])
    rows = []
    for place in best:
        outcome, values = found[place]
        rows.append((f"job {outcome.planned.number}", values, outcome.planned.label, outcome.job))
    return best_lines(objectives, rows, what="job")


def best_lines(
    objectives: Sequence[Objective],
    rows: Sequence[tuple[str, Sequence[float], str, Job | None]],
    *,
    what: str,
) -> list[str]:
    """Lines about the best jobs: value, overrides, and the command that repeats it.

    Args:
        objectives: what they were compared by.
        rows: (name, a value per objective, what it was typed as, the job), the best first.
        what: ``job`` or ``trial``.
    """
    names = ", ".join(f"{objective.metric} ({objective.mode})" for objective in objectives)
    if not rows:
        return [f"best {what}: none has a value of {names}"]
    lines = []
    if len(objectives) > 1:
        lines.append(f"Pareto front by {names}: {counted(len(rows), what)} of which no other is better in everything")
        rows = sorted(rows, key=lambda row: objectives[0].better(row[1][0]))
    for name, values, label, job in rows[:SHOWN]:
        shown = ", ".join(f"{one.metric} {value:.6g}" for one, value in zip(objectives, values, strict=True))
        head = f"best {what} by {names}: {name}" if len(objectives) == 1 else f"  {name}"
        lines.append(f"{head}: {shown}, with {label}")
        if job is not None:
            lines.append(f"    {repeat_command(job)}")
    if len(rows) > SHOWN:
        lines.append(f"  and {len(rows) - SHOWN} more")
    return lines


def repeat_command(job: Job) -> str:
    """What runs a finished job again, by itself."""
    plugins = f" plugins=[{','.join(job.config['plugins'])}]" if job.config["plugins"] else ""
    return f"{start_command(job)} rerun={shlex.quote(job.run_folder)}{plugins}"


def _front(points: Sequence[Sequence[float]]) -> list[int]:
    """Places of the points that no other dominates (smaller is better); with one number each: of the first smallest."""
    if points and len(points[0]) == 1:
        return [min(range(len(points)), key=lambda place: points[place][0])]
    return [
        place
        for place, point in enumerate(points)
        if not any(all(b <= a for a, b in zip(point, o, strict=True)) and list(o) != list(point) for o in points)
    ]


def _known_mode(name: str) -> str:
    if name.endswith(SMALL):
        return "min"
    if name.endswith(LARGE):
        return "max"
    hint = nearest(name, USUAL)
    raise ConfigError(
        f"sweep.metric={name}{hint and f'{hint} If not'}: is a small or a large value good? type sweep.mode=min or "
        f"sweep.mode=max"
    )


def _shown(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else f"[{','.join(value)}]"
