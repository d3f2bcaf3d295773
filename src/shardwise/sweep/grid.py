"""The jobs of a grid: all of them are known before the first one starts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwise.config import from_plain
from shardwise.job import Job
from shardwise.sweep.objective import best_of_grid, objectives_of, values_of
from shardwise.sweep.planning import common_of, labelled
from shardwise.sweep.source import Common, Outcome, Planned, counted


class Grid:
    """Hands out the jobs of a grid in their order.

    Args:
        planned: at least one. Of those whose whole configuration is the same, one is run.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        seen: Counter[str] = Counter()
        self._planned: list[Planned] = []
        for one in labelled(_different(planned)):
            seen[one.key] += 1  # such as of jobs that differ in what they log
            again = seen[one.key] > 1
            self._planned.append(replace(one, key=f"{one.key}#{seen[one.key]}") if again else one)
        self._equal = len(planned) - len(self._planned)
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
        if self._equal:
            how = "is the same as another and is" if self._equal == 1 else "are the same as others and are"
            print(f"note: {counted(self._equal, 'job')} {how} left out", flush=True)
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
        """The best job by ``sweep.metric``; how to have it named, where there is none."""
        done = [sorted(one.metrics) for one in outcomes if one.status == "completed"]
        names = [name for names in done for name in names if name.startswith(("test/", "val/"))]
        if not self._objectives and len(done) > 1 and names:
            return [f"sweep.metric={names[0]} names the best job"]
        return best_of_grid(self._objectives, outcomes)


def _different(planned: Sequence[Planned]) -> list[Planned]:
    """Without those that repeat another's whole configuration, as ``optimizer.lr=1e-3,0.001`` does; numbered anew."""
    different: list[Planned] = []
    for one in planned:
        if not any(one.key == other.key and one.job.config == other.job.config for other in different):
            different.append(replace(one, number=len(different) + 1))
    return different
