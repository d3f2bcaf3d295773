"""The jobs of a grid: all of them are known before the first one starts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwise.config import from_plain
from shardwise.job import Job
from shardwise.sweep.objective import best_of_grid, objectives_of, values_of
from shardwise.sweep.planning import common_of, labelled
from shardwise.sweep.source import Common, Outcome, Planned


class Grid:
    """Hands out the jobs of a grid in their order.

    Args:
        planned: at least one. One that is there twice is run twice.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        seen: Counter[str] = Counter()
        self._planned: list[Planned] = []
        for one in labelled(planned):
            seen[one.key] += 1
            again = seen[one.key] > 1
            self._planned.append(replace(one, key=f"{one.key}#{seen[one.key]}") if again else one)
        self._given = 0
        self._objectives = objectives_of(from_plain({"sweep": self._planned[0].job.config["sweep"]}).sweep)

    @property
    def total(self) -> int:
        return len(self._planned)

    @property
    def ended_before(self) -> int:
        """None: what is completed is handed out too."""
        return 0

    @property
    def finished(self) -> bool:
        return self._given == len(self._planned)

    def common(self) -> Common:
        return common_of(self._planned)

    def next(self) -> Planned:
        self._given += 1
        return self._planned[self._given - 1]

    def started(self, planned: Planned, job: Job) -> None:
        """Nothing depends on it."""

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> bool:
        """No job of a grid is pruned."""
        return False

    def ended(self, planned: Planned, outcome: Outcome) -> None:
        """Check that there is the metric by which the jobs are to be compared.

        Raises:
            ConfigError: there is not.
        """
        if outcome.status == "completed":
            values_of(outcome.metrics, self._objectives)

    def rest(self) -> list[Planned]:
        return self._planned[self._given :]

    def closing(self, outcomes: Sequence[Outcome]) -> list[str]:
        """The best job by ``sweep.metric``."""
        return best_of_grid(self._objectives, outcomes)
