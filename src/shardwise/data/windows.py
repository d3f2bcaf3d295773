"""Windows of tokens: what a language model is trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.token_shards import TokenShard


class TokenWindows(Dataset):
    """Consecutive windows of `context` tokens, with the same window shifted by one as targets.

    Window i is tokens [iT, (i+1)T) of all parts one after the other, its targets [iT+1, (i+1)T+1); there are
    floor((n-1)/T). Batches are `(tokens_BT int64, targets_BT int64)`, taken whole (collate with `as_batch`).

    Args:
        parts: ids (n_i,) of any unsigned type, in memory or as mapped shards.
        context: T.
    """

    deterministic = True

    def __init__(self, parts: Sequence[NDArray[Any] | TokenShard], *, context: int) -> None:
        self.parts = list(parts)
        self.context = context
        self.borders = np.cumsum([0] + [len(part) for part in self.parts])

    def __len__(self) -> int:
        return max(0, int(self.borders[-1]) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self._ids(int(index)))
        return window[:-1], window[1:]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if len(self.parts) == 1 and isinstance(part := self.parts[0], np.ndarray):  # in memory: all at once
            starts = np.array(indices) * self.context
            ids = part[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        else:
            ids = np.stack([self._ids(int(index)) for index in indices])
        windows = torch.from_numpy(ids)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _ids(self, index: int) -> NDArray[np.int64]:
        """The T + 1 ids of window `index`, which may lie in several parts."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = np.empty(self.context + 1, dtype=np.int64)
        start, filled = index * self.context, 0
        k = int(np.searchsorted(self.borders, start, side="right")) - 1
        while filled < len(ids):
            part = self.parts[k]
            offset = start + filled - int(self.borders[k])
            count = min(len(ids) - filled, len(part) - offset)
            values = part.ids if isinstance(part, TokenShard) else part
            ids[filled : filled + count] = values[offset : offset + count]
            filled, k = filled + count, k + 1
        return ids
