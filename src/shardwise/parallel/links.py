"""How long a message takes between ranks: small round trips over the default process group, of all ranks at once."""

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from shardwise.parallel.collectives import gather_parts

MESSAGE_BYTES = 2**18
"""Long enough to tell a link that carries little, short enough for a slow one: 26 ms at 10 MB/s."""
ROUND_TRIPS = 5
"""Of each pair, after one for warming up; what counts is the median."""
PAIRED_RANKS = 16
"""Up to so many ranks every pair is measured; beyond, each rank with those at a few distances."""


def measure_links(device: torch.device, *, hosts: Sequence[str] = ()) -> np.ndarray:
    """(ranks, ranks) float64, symmetric: seconds of a message of 256 KiB between two ranks; NaN where not measured.

    A collective over the default process group, with its limit: every rank calls it at the same point. Pairs measure
    one after the other, each rank with one partner at a time: with n ranks n - 1 rounds, or ten and more beyond 16.
    On GPUs over NCCL, which no GPU has run so far.

    Args:
        device: this rank's, on which its group sends.
        hosts: host name of every rank, in order; partners on other hosts are looked for, if there are any.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((size,), torch.nan, dtype=torch.float64)
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    for partners in rounds(size, hosts=hosts):
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        if (partner := partners.get(rank)) is not None:
            mine[partner] = _message_seconds(message, partner, first=rank < partner)
    everyone = torch.empty(size * size, dtype=torch.float64, device=device)
    gather_parts(everyone, mine.to(device))
    seconds = everyone.view(size, size).cpu().numpy()
    return np.fmax(seconds, seconds.T)


def rounds(size: int, *, hosts: Sequence[str] = ()) -> list[dict[int, int]]:
    """Partners in each round, rank -> rank: all pairs of up to 16 ranks, each once (the circle method), or pairs at
    distances that are powers of two up to the ranks of a host, and the next one."""
    if size <= PAIRED_RANKS:
        even, pairs = size + size % 2, []
        for turn in range(even - 1):
            circle = [0, *((turn + place) % (even - 1) + 1 for place in range(even - 1))]
            pairs.append([(circle[place], circle[even - 1 - place]) for place in range(even // 2)])
        return [_both_ways(pair for pair in turn if max(pair) < size) for turn in pairs]
    distance, found = 1, []
    on_host = max((list(hosts).count(host) for host in set(hosts)), default=1)
    while distance < size and distance <= 2 * on_host:
        for offset in (0, distance):
            # Blocks of 2 x distance, whose first half meets the second; then the same, shifted.
            starts = range(offset, size, 2 * distance)
            pairs_now = [(start + k, start + k + distance) for start in starts for k in range(distance)]
            found.append(_both_ways(pair for pair in pairs_now if pair[1] < size))
        distance *= 2
    return found


def _both_ways(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    return {one: other for a, b in pairs for one, other in ((a, b), (b, a))}


def _message_seconds(message: torch.Tensor, partner: int, *, first: bool) -> float:
    """Half a round trip, median of some."""
    taken = []
    for _ in range(ROUND_TRIPS + 1):
        start = time.perf_counter()
        for sends in (first, not first):
            work = (dist.isend if sends else dist.irecv)(message, partner)
            assert work is not None
            work.wait()
        if message.device.type == "cuda":
            torch.cuda.synchronize(message.device)
        taken.append((time.perf_counter() - start) / 2)
    return float(np.median(taken[1:]))
