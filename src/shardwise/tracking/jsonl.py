"""The metrics files of every run, whatever other logger is chosen: of all ranks together, and of each one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shardwise.metrics_file import RANK_KINDS, read_lines
from shardwise.tracking.lines import MetricLines, MetricsFileError

__all__ = ["JsonlLogger", "MetricsFileError", "RankJsonlLogger"]


class _FileLogger(Logger):
    """A logger that has a file and no name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._lines = MetricLines(path)

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    log_dir = save_dir

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml has them."""


class JsonlLogger(_FileLogger):
    """One line of JSON per logging call, by rank 0 (``tracking.lines`` has the format).

    The step is what the caller passes; a step can have several lines, one per call. A run that is resumed cuts the file
    back to what it was at its checkpoint, before it logs: the steps since then come again.

    Args:
        path: the file, in a folder that exists. New lines come after old ones.
    """

    @property
    def last(self) -> dict[str, float]:
        """The last value of every metric that was logged, as a plain number; those of single ranks stay in the file."""
        return {name: value for name, value in self._lines.last.items() if not name.startswith(RANK_KINDS)}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line. A call without a step counts for the last one that came.

        Raises:
            ConfigError: a metric that is not one number, or has a name of the line's own.
            MetricsFileError: the line cannot be written; nothing of it stays in the file.
        """
        self._lines.append(metrics, step)

    def size(self) -> int:
        """Bytes of the whole lines in the file, on the disk when this returns; 0 without a file, and on other ranks.

        Raises:
            MetricsFileError: the file cannot be written.
        """
        # On another rank, what looks torn may be a line that rank 0 is writing.
        return 0 if getattr(rank_zero_only, "rank", 0) != 0 else self._lines.size()

    @rank_zero_only
    def cut(self, size: int) -> None:
        """Go back to the first ``size`` bytes, a value that ``size()`` gave; ``last`` is what these lines say.

        A file that is shorter already stays as it is, with a warning.

        Raises:
            MetricsFileError: the file cannot be written.
        """
        self._lines.cut(size)


class RankJsonlLogger(_FileLogger):
    """What one rank has measured itself, a line for each logging step, in ``rank_<k>.jsonl``.

    Args:
        folder: where the files of all ranks lie; made if need be.
        rank: of this process.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int) -> None:
        super().__init__(Path(folder) / f"rank_{rank}.jsonl")
        self._rank = rank

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Nothing: these are of all ranks."""

    def log_rank(self, values: Mapping[str, float], step: int) -> None:
        """Append a line.

        Raises:
            MetricsFileError: it cannot be written; nothing of it stays in the file.
        """
        if not self._lines.last:
            self.path.parent.mkdir(exist_ok=True)
        self._lines.append(values, step)

    def go_on_after(self, metrics: Path, size: int, *, ranks: int) -> None:
        """Leave of this rank's file the steps that the first ``size`` bytes of ``metrics`` have; rank 0 also of those
        that an earlier, larger world of more than ``ranks`` ranks has left.

        Raises:
            MetricsFileError: a file cannot be written.
        """
        # A line of other metrics can be of a step whose own lines are to come again.
        step = max((step for step, line, _ in read_lines(metrics, size=size) if "train/loss" in line), default=0)
        self._lines.cut_after(step)
        if self._rank == 0:
            for path in self.path.parent.glob("rank_*.jsonl"):
                number = path.stem.removeprefix("rank_")
                if number.isdecimal() and int(number) >= ranks:
                    MetricLines(path).cut_after(step)
