"""Runs in memory: their configurations, curves and ends, as numbers."""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

STATUSES = ("completed", "failed", "preempted", "pruned")
DAMAGED = "damaged"
"""The status of a run whose metrics cannot be read, whatever it says of itself: it is not compared."""


def number(value: Any) -> float | None:
    """A value that was read, as a number; None if it is none."""
    try:
        return None if isinstance(value, (bool, str)) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


class Curve(NamedTuple):
    """One metric of one run, a value per logging call; arrays of one length."""

    steps: np.ndarray
    """Optimizer steps done."""
    samples: np.ndarray
    """Training samples seen by then."""
    seconds: np.ndarray
    """Wall-clock time since the first line of the run; a pause before a resumption counts."""
    values: np.ndarray
    """Not a number where the run logged one that is not finite."""


def rerun_command(run_folder: Path, config: Mapping[str, Any]) -> str:
    """What to type to repeat a run; packages of the user's are not taken from a folder, so they stand in it."""
    folder, here = Path(os.path.abspath(run_folder)), Path.cwd()
    shown = folder.relative_to(here) if here in folder.parents else folder
    own = config.get("plugins")
    names = [name for name in own if isinstance(name, str) and name.isidentifier()] if isinstance(own, list) else []
    return f"python train.py rerun={shlex.quote(str(shown))}" + (f" plugins=[{','.join(names)}]" if names else "")


@dataclass
class Run:
    """One run folder. ``label``, ``series`` and ``varying`` say how it differs from those it was loaded with."""

    folder: Path
    config: dict[str, Any]
    """config.yaml, with what was derived from it under ``derived``."""
    overrides: list[str]
    """What was typed."""
    result: dict[str, Any]
    """result.json; empty if the run has not written it."""
    status: str
    """completed, failed, preempted, pruned, damaged, or unfinished: running, or killed before it could say."""
    metrics: dict[str, Curve]
    """Metric -> its values over the training."""
    typed_command: str = ""
    """The command line that started it, of a sweep too."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> plain value of the configuration, without ``derived``."""
    reason: str = ""
    """Why it failed, or what is damaged, in a line."""
    log: str = ""
    """The path of the log of the rank that failed first; empty without one."""
    label: str = ""
    series: str = ""
    varying: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return int(self.config["derived"]["batch_global_size"])

    @property
    def base_lr(self) -> float | None:
        """The learning rate that was typed; None if the optimizer has none."""
        return number(self.settings.get("optimizer.lr"))

    @property
    def lr(self) -> float | None:
        """The learning rate at the peak of the schedule, after the rule that scales it."""
        found = number(self.config["derived"].get("effective_lr"))
        return self.base_lr if found is None else found

    @property
    def rule(self) -> str:
        return str(self.settings.get("lr_scaling.rule", "none"))

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def command(self) -> str:
        """What to type to run it again."""
        return rerun_command(self.folder, self.config)

    def final(self, metric: str) -> float | None:
        """The last value of a metric, by result.json or else by the curve; None if there is none."""
        finals = self.result.get("metrics")
        if isinstance(finals, dict) and metric in finals:
            value = finals[metric]
            return math.nan if value is None else number(value)
        curve = self.metrics.get(metric)
        return float(curve.values[-1]) if curve is not None and len(curve.values) else None

    @property
    def steps(self) -> int:
        """Optimizer steps that it made, as far as is known."""
        done = number(self.result.get("steps"))
        if done is not None and math.isfinite(done):
            return int(done)
        return int(max((curve.steps[-1] for curve in self.metrics.values() if len(curve.steps)), default=0))

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the run, by result.json or else by the curves."""
        taken = number(self.result.get("seconds"))
        if taken is not None:
            return taken
        return max((float(curve.seconds[-1]) for curve in self.metrics.values() if len(curve.seconds)), default=None)


class Runs(Sequence[Run]):
    """Runs that were loaded together, the oldest first, and what was left out."""

    def __init__(self, runs: Sequence[Run], *, skipped: Sequence[tuple[str, str]] = (), folder: Path | None = None):
        self._runs = list(runs)
        self.skipped = list(skipped)
        """(path, reason) of what looked like a run and could not be read as one."""
        self.folder = folder
        self.varying: list[str] = []
        """What differs among the runs, in the order of their labels."""
        self.shared: list[str] = []
        """What was typed for every one of them."""

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> list[Run]: ...
    def __getitem__(self, at: int | slice) -> Run | list[Run]:
        return self._runs[at]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def completed(self) -> list[Run]:
        return [run for run in self if run.status == "completed"]

    @property
    def damaged(self) -> list[Run]:
        return [run for run in self if run.status == DAMAGED]

    def metric_names(self) -> list[str]:
        """Every metric of any run, in its curves or at its end."""
        names = {name for run in self for name in run.metrics}
        for run in self:
            finals = run.result.get("metrics")
            names.update(str(name) for name in finals) if isinstance(finals, dict) else None
        return sorted(names)
