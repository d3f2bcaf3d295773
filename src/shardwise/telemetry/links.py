"""What measured links say of the rank that all others wait for in communication."""

from collections.abc import Sequence

import numpy as np

from shardwise.quantities import shown_ms

LEAST_SECONDS = 0.001
"""By which a rank's messages have to be slower than the others' before it is named; less is the system's noise."""
LEAST_FACTOR = 2.0


def slow_links(seconds: np.ndarray, *, hosts: Sequence[str], factor: float) -> dict[int, tuple[float, float]]:
    """Rank -> seconds of its message over its best link, and the median rank's, for ranks all of whose links are slow.

    Links between hosts are also compared apart, as a bad card slows only those. Nobody is named where more than half
    of the ranks would be, nor of two ranks, which share their only link.

    Args:
        seconds: (ranks, ranks) of a message, NaN where not measured.
        hosts: of every rank, in order.
        factor: times the median from which on a rank is named.
    """
    size, found = len(seconds), {}
    names = np.array(list(hosts) if len(hosts) == size else [""] * size)
    for links in (np.ones_like(seconds, dtype=bool), names[:, None] != names[None, :]):
        kept = np.where(links & ~np.isnan(seconds), seconds, np.inf)
        best = kept.min(axis=1)
        known = np.isfinite(best)
        if known.sum() < 3:
            continue
        typical = float(np.sort(best[known])[(known.sum() - 1) // 2])
        limit = max(max(factor, LEAST_FACTOR) * typical, typical + LEAST_SECONDS)
        found.update({int(rank): (float(best[rank]), typical) for rank in np.flatnonzero(known & (best > limit))})
    return found if len(found) <= size // 2 else {}


def links_line(seconds: np.ndarray, *, hosts: Sequence[str], share: float, factor: float) -> str:
    """What to say of links that were measured because communication takes ``share`` of a step."""
    slow = slow_links(seconds, hosts=hosts, factor=factor)
    taking = f"communication takes {100 * share:.0f} % of a step"
    if slow:
        rank = max(slow, key=lambda rank: slow[rank][0] / slow[rank][1])
        mine, typical = slow[rank]
        others = sorted(set(slow) - {rank})
        more = f"; so do those of rank {', '.join(map(str, others))}" if others else ""
        host = f" ({hosts[rank]})" if rank < len(hosts) else ""
        return (
            f"rank {rank}{host} is slow in communication: its messages of 256 KiB take {shown_ms(mine)}, the median "
            f"rank's {shown_ms(typical)}{more}; {taking}"
        )
    tries = "larger batches a rank (batch.micro_size, batch.accumulate) or fewer ranks make it less"
    known = seconds[~np.isnan(seconds)]
    message = f"a message of 256 KiB takes {shown_ms(float(np.median(known)))}" if len(known) else ""
    if len(seconds) == 2:
        return f"{taking}: of two ranks, which share their link ({message}), none stands out: {tries}"
    return f"{taking} on every rank, and no rank's links stand out ({message}): {tries}"
