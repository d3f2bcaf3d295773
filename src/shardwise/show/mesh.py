"""The mesh with its ranks, as boxes in boxes: the ranks that share a layer stand in one row, replicas in blocks."""

import math
from dataclasses import dataclass

import matplotlib
import numpy as np

from shardwise.quantities import shown_ms
from shardwise.report.runs import number
from shardwise.show.findings import Slow, own_time
from shardwise.show.headline import named
from shardwise.show.heat import SCALE, scale_top
from shardwise.show.record import Record

AXES = ("dp_replicate", "dp_shard", "tp")
"""Outermost first; ranks that are neighbours in the innermost have neighbouring numbers."""
MAX_RANKS = 4096
HOSTS = 64
"""Ranks above which a box has room for its number only."""
STOPS = 9
"""Colours of the scale that the page names."""


@dataclass(frozen=True)
class Box:
    """One rank."""

    rank: int
    host: str
    time: str
    tip: str
    background: str
    colour: str
    slow: bool


@dataclass(frozen=True)
class Mesh:
    """Boxes by replica, then by shard, then by part of a layer."""

    words: str
    caption: str
    blocks: list[tuple[str, list[tuple[str, list[Box]]]]]
    """(replica, [(shard, boxes of its ranks)]); a name is empty where there is only one."""
    small: bool
    scale: str
    """A CSS gradient, and what its ends mean; empty where no time is known."""
    top: str


def make_mesh(record: Record, slow: list[Slow]) -> Mesh | None:
    """The mesh of a run; None where its ranks are not known."""
    degrees = [number(record.derived.get(axis)) for axis in AXES]
    size = record.world_size or (len(record.ranks.numbers) if record.ranks is not None else 0)
    if not 1 <= size <= MAX_RANKS:
        return None
    known = all(degree is not None and 1 <= degree <= MAX_RANKS for degree in degrees)
    replicas, shards, parts = [int(degree or 1) for degree in degrees] if known else (1, size, 1)
    if replicas * shards * parts != size:
        known, replicas, shards, parts = False, 1, size, 1
    boxes = _boxes(record, slow, size)
    blocks = []
    for replica in range(replicas):
        rows = []
        for shard in range(shards):
            first = (replica * shards + shard) * parts
            rows.append((f"shard {shard}" if shards > 1 and parts > 1 else "", boxes[first : first + parts]))
        if parts == 1:  # a box in a box of its own says nothing
            rows = [("", [box for _, row in rows for box in row])]
        blocks.append((f"replica {replica}" if replicas > 1 else "", rows))
    if parts == 1 and shards == 1:
        blocks = [("", [("", boxes)])]
    words = " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, (replicas, shards, parts), strict=True))
    top = _top(record)
    framed = "The ranks in one frame split each layer among them (tp)" if parts > 1 and shards * replicas > 1 else ""
    caption = f"{framed}; different frames see different samples." if framed else ""
    return Mesh(
        caption=caption,
        words=words if known else f"{size:,} ranks; the axes of the mesh are not known",
        blocks=blocks,
        small=size > HOSTS,
        scale=", ".join(_colour(at / (STOPS - 1))[0] for at in range(STOPS)) if top else "",
        top=shown_ms(top) if top else "",
    )


def _boxes(record: Record, slow: list[Slow], size: int) -> list[Box]:
    ranks, top = record.ranks, _top(record)
    own = dict(zip(ranks.numbers, ranks.means(own_time(ranks)), strict=True)) if ranks is not None else {}
    named_slow = {one.rank for one in slow}
    boxes = []
    for rank in range(size):
        time = float(own.get(rank, math.nan))
        background, colour = _colour(time / top) if top and math.isfinite(time) else ("", "")
        place = record.places.get(rank, {})
        where = ", ".join(
            f"{key} {int(value)}" for key in ("node", "dp", "tp") if (value := number(place.get(key))) is not None
        )
        text = shown_ms(time) if math.isfinite(time) else ""
        tip = f"{named(record, rank)}{f': {where}' if where else ''}{f'; own time {text} a step' if text else ''}"
        boxes.append(Box(rank, record.host(rank), text, tip, background, colour, rank in named_slow))
    return boxes


def _top(record: Record) -> float:
    """The mean own time at the bright end of the scale, in seconds; 0 where none is known."""
    if record.ranks is None:
        return 0.0
    own = record.ranks.means(own_time(record.ranks))
    return scale_top(own[:, None]) if np.isfinite(own).any() else 0.0


def _colour(share: float) -> tuple[str, str]:
    """The colour of the scale for a share (0 to 1) of its end, and that of a text that can be read on it."""
    red, green, blue, _ = matplotlib.colormaps[SCALE](min(1.0, max(0.0, share)))
    hexed = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
    return hexed, "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "#ffffff"
