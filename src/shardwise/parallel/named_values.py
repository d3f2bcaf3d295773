"""Named numbers of every rank, brought together in one collective however many there are.

Each rank sends one vector: how many numbers, a hash of their names, and the numbers. Where ranks name different ones,
the names themselves travel once, in a collective of their own; from then on the hashes are known. So no rank's number
is ever taken for another one's, and no rank waits for a number that others do not have.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.collectives import gather_parts

HEADER = 2
"""Numbers in front of the others: their count and the hash of their names, 48 bits, which a float64 holds exactly."""
CAPACITY = 64
"""Numbers that the first vector has room for; ranks that have more make it longer together."""


@dataclass(frozen=True)
class Gathered:
    """A row a rank, a column a name."""

    names: tuple[str, ...]
    """Every name of any rank, in the order of the first rank that has it."""
    values: np.ndarray
    """(ranks, names) float64; NaN where a rank has none."""
    held: np.ndarray
    """(ranks, names) bool: whether a rank has a number of this name."""

    def column(self, name: str) -> np.ndarray:
        """One number of every rank (ranks,); NaN throughout if nobody has it."""
        if name not in self.names:
            return np.full(len(self.values), np.nan)
        return self.values[:, self.names.index(name)]


class NamedGather:
    """Gathers named numbers over ``group`` (None: this rank alone); every rank calls it equally often.

    Args:
        group: the ranks.
        device: where their collectives work.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.collectives = 0
        """How many there have been: one a call, but for names that are new or more than there was room for."""
        self._group = group
        self._device = device
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._capacity = CAPACITY
        self._hashed: tuple[tuple[str, ...], float] = ((), 0.0)
        # What every rank knows alike: whether names have to travel is decided by it.
        self._known: dict[float, tuple[str, ...]] = {}
        self._merged: dict[tuple[float, ...], tuple[tuple[str, ...], np.ndarray]] = {}

    def __call__(self, names: Sequence[str], values: Tensor) -> Gathered:
        """Bring the numbers of all ranks to all ranks; a collective.

        Args:
            names: of this rank's numbers, each once; other ranks may have others.
            values: 1-dim, float64, one for each name, on the device.
        """
        mine = tuple(names)
        assert values.shape == (len(mine),), (values.shape, len(mine))
        if self._group is None:
            row = values.cpu().numpy().reshape(1, -1)
            return Gathered(mine, row, np.ones_like(row, dtype=bool))
        if mine != self._hashed[0]:
            self._hashed = (mine, _hash(mine))
        rows = self._exchange(values)
        counts, hashes = rows[:, 0].astype(np.int64), rows[:, 1]
        while counts.max() > self._capacity:
            self._capacity = 1 << int(counts.max() - 1).bit_length()
            rows = self._exchange(values)
        distinct = np.unique(hashes)
        if len(distinct) == 1:
            self._known[float(distinct[0])] = mine
            rows = rows[:, HEADER : HEADER + len(mine)]
            return Gathered(mine, rows, np.ones_like(rows, dtype=bool))
        if not set(distinct.tolist()) <= set(self._known):
            self._learn_names(mine)
        return self._merge(rows, hashes)

    def _exchange(self, values: Tensor) -> np.ndarray:
        names, hashed = self._hashed
        head = torch.tensor([len(names), hashed], dtype=torch.float64).to(self._device, non_blocking=True)
        sent = torch.zeros(HEADER + self._capacity, dtype=torch.float64, device=self._device)
        fitting = min(len(names), self._capacity)
        sent[:HEADER], sent[HEADER : HEADER + fitting] = head, values[:fitting]
        received = torch.empty(self._ranks, sent.numel(), dtype=torch.float64, device=self._device)
        gather_parts(received.view(-1), sent, group=self._group)
        self.collectives += 1
        return received.cpu().numpy()

    def _learn_names(self, mine: tuple[str, ...]) -> None:
        everyone: list[tuple[str, ...]] = [()] * self._ranks
        dist.all_gather_object(everyone, mine, group=self._group)
        self.collectives += 1
        self._known.update({_hash(names): names for names in everyone})

    def _merge(self, rows: np.ndarray, hashes: np.ndarray) -> Gathered:
        key = tuple(hashes.tolist())
        if key not in self._merged:
            union = tuple(dict.fromkeys(name for one in key for name in self._known[one]))
            place = {name: number for number, name in enumerate(union)}
            source = np.full((len(key), len(union)), -1)
            for rank, one in enumerate(key):
                names = self._known[one]
                source[rank, [place[name] for name in names]] = np.arange(len(names))
            self._merged = {key: (union, source)}  # as a rule the same ranks have the same names again
        union, source = self._merged[key]
        held = source >= 0
        found = np.take_along_axis(rows[:, HEADER:], np.maximum(source, 0), axis=1)
        return Gathered(union, np.where(held, found, np.nan), held)


def _hash(names: tuple[str, ...]) -> float:
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "big"))
