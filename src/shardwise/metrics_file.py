"""Reading the metrics file of a run, which ``tracking.jsonl`` writes: needs neither torch nor Lightning."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

RESERVED = ("step", "time", "nonfinite")
"""Names in a line that are no metrics."""
FINDINGS = "findings.jsonl"
"""In a run's ``ranks``: what was said of ranks while it trained (telemetry.stragglers)."""

RANK_KINDS = ("time/", "memory/", "gpu/", "node/", "rank/")
"""How the names of what is measured of each rank begin: how a run ran, not what came out."""


def read_lines(
    path: str | os.PathLike[str], *, size: int | None = None
) -> Iterator[tuple[int, dict[str, float], float]]:
    """The lines of a metrics file as (step, metrics, Unix time), in order; what is damaged is left out.

    A value that JSON could not say is not a number here, infinities included. No file has no lines. With ``size`` only
    those that end in its first bytes.
    """
    if not Path(path).exists():
        return
    damage = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
    with Path(path).open("rb") as file:
        held = 0
        for text in file:
            held += len(text)
            if size is not None and held > size:
                return
            if not text.endswith(b"\n"):
                return
            with contextlib.suppress(*damage):
                line = json.loads(text)
                step, when = int(line["step"]), float(line.get("time", 0.0))
                metrics = {name: value for name, value in line.items() if name not in RESERVED}
                yield step, {name: math.nan if value is None else value for name, value in metrics.items()}, when
