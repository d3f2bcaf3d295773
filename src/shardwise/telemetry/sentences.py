"""What a run's time went to, which rank was the slowest, and how much memory it took: a line each, for its end."""

from collections.abc import Mapping
from typing import Any

from shardwise.quantities import shown_bytes, shown_seconds

LEAST = 0.005
"""Share of the time below which a phase is not named."""
EVEN = 1.05
"""A slowest rank up to so many times the median is slower by nothing in particular."""
OTHERS = "the median of the others"


def sentences(telemetry: Mapping[str, Any] | None) -> list[str]:
    """Lines on the ``telemetry`` of ``result.json``; none where nothing was measured.

    Args:
        telemetry: ``time`` (phase -> seconds, mean over the ranks), ``wall`` (seconds), ``slowest_rank`` (rank, host,
            ratio to the median of the others, kind, phase) or None, ``peak_memory`` (bytes, rank).
    """
    telemetry = telemetry or {}
    lines = [
        _time(telemetry.get("time") or {}, telemetry.get("wall")),
        _slowest(telemetry.get("slowest_rank")),
        _memory(telemetry.get("peak_memory"), several=telemetry.get("slowest_rank") is not None),
    ]
    return [line for line in lines if line]


def _time(time: Mapping[str, float], wall: float | None) -> str | None:
    whole = wall or sum(time.values())
    named = {phase: seconds for phase, seconds in time.items() if whole > 0 and seconds >= LEAST * whole}
    if not named:
        return None
    parts = sorted(named, key=lambda phase: -named[phase])
    shown = {"communication": "communication and waiting for other ranks"}
    split = ", ".join(f"{shown.get(phase, phase)} {_percent(named[phase] / whole)}" for phase in parts)
    return f"time in training: {shown_seconds(whole)}: {split}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _slowest(slowest: Mapping[str, Any] | None) -> str | None:
    if not slowest:
        return None
    host = f" on {slowest['host']}" if slowest.get("host") else ""
    if slowest["ratio"] <= EVEN:
        return f"slowest rank: none stands out (rank {slowest['rank']}{host}: {slowest['ratio']:.2f} x {OTHERS})"
    return f"slowest rank: {slowest['rank']}{host}, {slowest['ratio']:.2f} x {OTHERS}, by {_what(slowest)}"


def _what(slowest: Mapping[str, Any]) -> str:
    """``data``, or ``compute (mostly forward)``."""
    kind, phase = slowest["kind"], slowest["phase"]
    return kind if kind == phase else f"{kind} (mostly {phase})"


def _memory(peak: Mapping[str, Any] | None, *, several: bool) -> str | None:
    if not peak or not peak.get("bytes"):
        return None
    rank = f" (rank {peak['rank']})" if several else ""
    return f"peak memory: {shown_bytes(peak['bytes'])}{rank}"
