"""Which rows of a resumed run W&B has already, so that every row gets there once."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shardwise.tracking.transaction_log import Row, TransactionLog

UPLOAD_SECONDS = 60.0
"""Rows older than this, when a run was killed, had reached the service; the client sends every 15 s."""


class Repeats:
    """Rows that are there, each good for one line of ``metrics.jsonl`` with the same step and the same metrics.

    Not the values: a step that is repeated at another layout differs in its last digits, and stays the same point. Not
    the number of the row: a run that was preempted or finished has rows that its continuation does not repeat.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._left: dict[int | None, Counter[frozenset[str]]] = {}
        for row in rows:
            self._left.setdefault(row.step, Counter())[row.names] += 1

    def take(self, step: int, metrics: Mapping[str, object], *, of_more: bool = False) -> bool:
        """Whether W&B has this row; one that was asked for is used up.

        Args:
            step: the row's.
            metrics: in it.
            of_more: whether a row with more than these will do: a step that is repeated as the first of a process has
                neither times nor rates.
        """
        left = self._left.get(step)
        if left is None:
            return False
        names = frozenset(metrics)
        if of_more and names and names not in left:
            names = next((more for more in left if names < more), names)
        if names not in left:
            return False
        left[names] -= 1
        if not left[names]:
            del left[names]
        if not left:
            del self._left[step]
        return True


def rows_there(logs: Sequence[TransactionLog], *, starting_step: int | None) -> list[Row]:
    """Rows that the service has, or gets when the offline files that are there are uploaded.

    ``starting_step`` is what the service says on resuming, the number of its last row plus one; None if it is away. It
    then counts as having what an ended run sent, and what a killed one had logged UPLOAD_SECONDS before: a point that
    comes twice is better than one that is lost. What an online run could not send lies in its folder.
    """
    there: list[Row] = []
    for log in logs:
        if log.offline:
            there += [] if log.uploaded and starting_step == 0 else log.rows
        elif starting_step is not None:
            there += [row for row in log.rows if row.index < starting_step]
        elif log.has_end:
            there += log.rows
        elif log.rows:
            there += [row for row in log.rows if row.runtime < log.rows[-1].runtime - UPLOAD_SECONDS]
    return there
