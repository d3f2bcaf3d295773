"""What a run's page says first, in plain sentences: how it ended, which rank is slow and by what."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.checkpoint.manifest import printable
from shardwise.quantities import shown_bytes, shown_ms, shown_seconds
from shardwise.report.runs import number
from shardwise.show.findings import Slow, mean_times, shares, slow_ranks, slowest
from shardwise.show.record import Record
from shardwise.telemetry.sentences import EVEN

WAITING = 0.25
"""Share of a step in communication above which it is spoken of."""
MAX_NAMED = 5
"""Slow ranks that are named."""
MAX_METRICS = 6


def found_slow(record: Record) -> list[Slow]:
    """The slow ranks, by the factor and the steps that the run's configuration gives stragglers."""
    if record.ranks is None:
        return []
    monitor = record.config.get("monitor")
    monitor = monitor if isinstance(monitor, dict) else {}
    factor, steps = number(monitor.get("straggler_factor")), number(monitor.get("straggler_steps"))
    return slow_ranks(
        record.ranks,
        factor=factor if factor is not None and factor >= 1 else 1.5,
        steps=int(steps) if steps is not None and 1 <= steps < 2**31 else 10,
    )


def ended(record: Record) -> str:
    """``completed after 200 steps in 35 s: test/accuracy 0.953``."""
    word = {"unfinished": "unfinished (killed, or it runs on another machine)"}.get(record.status, record.status)
    seconds = number(record.result.get("seconds"))
    took = f" in {shown_seconds(seconds)}" if seconds is not None and 0 <= seconds < 1e12 else ""
    steps = f"{record.steps:,} step{'' if record.steps == 1 else 's'}"
    return f"{word.capitalize()}{' at' if record.status in ('running', 'unfinished') else ' after'} {steps}{took}"


def finals(record: Record) -> list[tuple[str, str]]:
    """The metrics at the end, those of the test and validation first."""
    said = record.result.get("metrics")
    values: dict[str, Any] = dict(said) if isinstance(said, dict) else {}
    for name, curve in record.metrics.items():
        values.setdefault(name, float(curve.values[-1]) if len(curve.values) else None)
    wanted = [
        name for kind in ("test/", "val/", "train/") for name in sorted(map(str, values)) if name.startswith(kind)
    ]
    if any(name.startswith("test/") for name in wanted):
        wanted = [name for name in wanted if not name.startswith("val/")] + [n for n in wanted if n.startswith("val/")]
    rates = [name for name in ("tokens_per_second", "samples_per_second", "mfu") if name in values]
    shown = []
    for name in [*wanted[:MAX_METRICS], *rates]:
        value = number(values[name])
        text = (
            "not finite"
            if value is None or not math.isfinite(value)
            else share(value)
            if name == "mfu"
            else f"{value:,.4g}"
        )
        shown.append((printable(name)[:60], text))
    return shown


def about_ranks(record: Record, slow: Sequence[Slow]) -> str:
    """The sentence on the slowest rank; empty where nothing is known of it."""
    ranks = record.ranks
    if ranks is None:
        return _by_result(record)
    if not slow:
        if by_links := slow_link(record):
            return f"{by_links[0].upper()}{by_links[1:]}."
        most = slowest(ranks)
        if most is None:
            return ""
        if record.status == "failed":
            return ""  # why it failed is what matters
        far = f"{most.ratio:.2f} x" if math.isfinite(most.ratio) else "more than"
        why = (
            f"by {because(most)}"
            if most.ratio >= EVEN
            else f"{shown_ms(most.own)} a step against {shown_ms(most.median)}"
        )
        who = f"{named(record, most.rank)} takes longest over its own work"
        return f"No rank stands out: {who}, {far} the median of the others, {why}."
    first = slow[0]
    when = "" if first.steps is None else f" from step {first.steps[0]:,} to {first.steps[1]:,}"
    begins = (
        f"{named(record, first.rank)} is the slowest"
        if first.steps is None
        else f"{named(record, first.rank)} was slow{when}"
    )
    text = f"{begins}: {times(first.ratio)} the median of the others, by {because(first)}."
    return text[0].upper() + text[1:]


def slow_link(record: Record) -> str:
    """What the run has found last on a rank whose communication is slow, which no times can tell; empty if nothing."""
    last = next((text for _, kind, text in reversed(record.said) if kind == "communication"), "")
    return last if " is slow in communication" in last else ""


def also_slow(record: Record, slow: Sequence[Slow]) -> str:
    """The other slow ranks, in one sentence."""
    others = slow[1:]
    if not others:
        return ""
    parts = []
    for one in others[:MAX_NAMED]:
        when = "" if one.steps is None else f" from step {one.steps[0]:,} to {one.steps[1]:,}"
        parts.append(f"{named(record, one.rank)} {times(one.ratio)} by {one.what}{when}")
    more = f", and {len(others) - MAX_NAMED:,} more" if len(others) > MAX_NAMED else ""
    return f"Also slow: {'; '.join(parts)}{more}."


def about_step(record: Record) -> list[str]:
    """Where the time of a step goes, and what the ranks wait for each other."""
    ranks = record.ranks
    if ranks is None:
        return []
    parts = shares(ranks)
    if not parts:
        return []
    whole = float(np.nansum([np.nanmean(values) for values in mean_times(ranks).values() if np.isfinite(values).any()]))
    largest = sorted(parts.items(), key=lambda pair: -pair[1])
    told = ", ".join(f"{phase} {share(part)}" for phase, part in largest if part >= 0.005)
    over = ", as a mean over all ranks" if len(ranks.numbers) > 1 else ""
    lines = [f"A step takes {shown_ms(whole)}{over}: {told}."]
    if len(ranks.numbers) > 1 and parts.get("communication", 0) >= WAITING:
        waits = mean_times(ranks)["communication"]
        least = int(np.nanargmin(waits))
        lines.append(
            f"Communication, which is also waiting for slower ranks, takes {share(parts['communication'])} of it: "
            f"least on {named(record, ranks.numbers[least])}, {shown_ms(float(waits[least]))}, at most "
            f"{shown_ms(float(np.nanmax(waits)))}."
        )
    return lines


def about_memory(record: Record) -> str:
    ranks = record.ranks
    found = None if ranks is None else ranks.largest.get("memory/peak", ranks.largest.get("memory/resident"))
    if ranks is None or found is None or not np.isfinite(found).any():
        return ""
    row = int(np.nanargmax(found))
    if len(ranks.numbers) == 1:
        return f"Peak memory {shown_bytes(float(found[row]))}."
    middle = float(np.nanmedian(found))
    most = f"{shown_bytes(float(found[row]))}, on {named(record, ranks.numbers[row])}"
    return f"Peak memory {most}; the median rank's is {shown_bytes(middle)}."


def named(record: Record, rank: int) -> str:
    """``rank 2 (node-b)``."""
    host = record.host(rank)
    return f"rank {rank} ({host})" if host else f"rank {rank}"


def because(slow: Slow) -> str:
    """``data: 31 ms a step against 1 ms``."""
    phase = slow.phase if slow.what == slow.phase else f"{slow.what} (mostly {slow.phase})"
    return f"{phase}: {shown_ms(slow.time)} a step against {shown_ms(slow.usual)}"


def times(ratio: float) -> str:
    return f"{ratio:.1f} x" if ratio < 1000 else "far more than"


def share(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.1f} %"


def _by_result(record: Record) -> str:
    """What the run says itself, where the files of its ranks are not there."""
    told = record.result.get("telemetry")
    told = told.get("slowest_rank") if isinstance(told, dict) else None
    if not isinstance(told, dict) or number(told.get("rank")) is None:
        return ""
    rank, ratio = number(told["rank"]), number(told.get("ratio"))
    host = f" ({printable(told['host'])[:64]})" if told.get("host") else ""
    by = f", by {printable(told['phase'])[:20]}" if told.get("phase") else ""
    far = f": {times(ratio)} the median" if ratio is not None and math.isfinite(ratio) else ""
    return f"Rank {rank:.0f}{host} is the slowest{far}{by}."
