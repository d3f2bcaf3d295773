"""Which checkpoints are kept; names and numbers only."""

import math
from collections.abc import Mapping

from shardwise.checkpoint.manifest import step_of


def retained(
    metrics: Mapping[str, float | None],
    *,
    keep_last: int | None,
    keep_every_n_steps: int | None = None,
    keep_best: int = 0,
    mode: str = "min",
) -> set[str]:
    """The names to keep; all others may be removed.

    Args:
        metrics: name -> value of the metric that says which is best; None where it was not measured.
        keep_last: newest checkpoints to keep; None keeps all.
        keep_every_n_steps: those of every n-th step are kept besides; None for none.
        keep_best: those with the best values are kept besides.
        mode: whether a small value is good ("min") or a large one ("max").
    """
    names = sorted(metrics, key=step_of)
    kept = set(names if keep_last is None else names[max(len(names) - keep_last, 0) :])
    if keep_every_n_steps:
        kept |= {name for name in names if step_of(name) % keep_every_n_steps == 0}
    return kept | set(best_first(metrics, mode=mode)[:keep_best])


def best_first(metrics: Mapping[str, float | None], *, mode: str = "min") -> list[str]:
    """The names whose metric is a number, the best first; of equal ones, the newer first.

    NaN is no number to compare with: such a checkpoint is never best, and nor is one that was not measured.
    """
    assert mode in ("min", "max"), mode
    sign = 1 if mode == "min" else -1
    measured = [(sign * value, -step_of(name), name) for name, value in metrics.items() if _is_number(value)]  # type: ignore[operator]
    return [name for _, _, name in sorted(measured)]


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
