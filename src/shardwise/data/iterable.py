"""Streams (`IterableDataset`) shared out by position: item i belongs to global batch i // B, and a rank takes a slice.

Every process reads the same items and keeps its own, so the order is that of the stream under every layout and number
of workers. Reading costs each process the whole stream; a dataset that can do better sets `shards_itself = True` and is
used as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data._utils.worker as worker_module
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from shardwise.data.order import local_size, step_after


def _every_item(dataset: Any) -> Iterator[Any]:
    """The items of `dataset` as a single process sees them.

    Many streams split themselves by `get_worker_info`, as PyTorch's documentation shows. Together with the split made
    here, most items would silently be lost, so the worker is hidden from them.
    """
    info = worker_module._worker_info
    items: Iterator[Any] | None = None
    while True:
        worker_module._worker_info = None
        try:
            if items is None:
                items = iter(dataset)
            item = next(items)
        except StopIteration:
            return
        finally:
            worker_module._worker_info = info
        yield item


class ShardedStream(IterableDataset):
    """This rank's share of every global batch of a stream, as lists of samples, ready to be collated.

    Worker w of W makes the batches k with k % W == w, which a DataLoader returns in order. An incomplete last global
    batch is dropped on all ranks alike. Needs a DataLoader with `batch_size=None`.

    Args:
        dataset: yields single samples, the same in every process; its `set_epoch`, if any, is called before each pass.
        global_size: B, a multiple of `dp_size`.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size.
        samples_seen: where to start, a multiple of B, counted from the first pass; what lies before is read and left.
        epoch_steps: end each pass after this many global batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_size: int,
        dp_rank: int,
        dp_size: int,
        samples_seen: int = 0,
        epoch_steps: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.global_size = global_size
        self.local_size = local_size(global_size=global_size, dp_size=dp_size)
        self.dp_rank = dp_rank
        self.epoch_steps = epoch_steps
        # A border between passes (which pass begins there, global batches before it), the number of global batches to
        # skip from there, and the last border that reading has found. In shared memory, so that persistent workers see
        # what the loader's process sets, and that process what they have found.
        self._state = torch.zeros(5, dtype=torch.int64).share_memory_()
        self.seek(samples_seen)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of pass `epoch`, whatever was used before."""
        self._state[:3] = torch.tensor([epoch, 0, 0])

    def seek(self, samples_seen: int) -> None:
        """Go to the place in the passes put together where `samples_seen` samples, a multiple of B, lie behind."""
        step = step_after(samples_seen, global_size=self.global_size)
        epoch, border, skip, found_epoch, found_border = self._state.tolist()
        if border + skip != step:
            epoch, border = (found_epoch, found_border) if found_border <= step else (0, 0)
            self._state[:3] = torch.tensor([epoch, border, step - border])

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return self._batches(*self._state[:3].tolist(), worker=worker, num_workers=num_workers)

    def _batches(self, epoch: int, border: int, skip: int, *, worker: int, num_workers: int) -> Iterator[list[Any]]:
        while True:
            num_batches = 0
            for samples in self._pass(epoch, border, skip, worker=worker, num_workers=num_workers):
                num_batches += 1
                if samples is not None:
                    yield samples
            self._state[3:] = torch.tensor([epoch + 1, border + num_batches])
            if num_batches == 0 or num_batches > skip:
                return
            # the whole pass lies before the start (how long a stream is shows only when it is read)
            epoch, border, skip = epoch + 1, border + num_batches, skip - num_batches

    def _pass(self, epoch: int, border: int, skip: int, *, worker: int, num_workers: int) -> Iterator[list[Any] | None]:
        """Pass `epoch`: this rank's samples of every complete global batch, or None where another worker makes them."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        start, stop = self.dp_rank * self.local_size, (self.dp_rank + 1) * self.local_size
        samples: list[Any] = []
        for i, item in enumerate(_every_item(self.dataset)):
            step, place = divmod(i, self.global_size)
            mine = step >= skip and (step - skip) % num_workers == worker
            if mine and start <= place < stop:
                samples.append(item)
            if place == self.global_size - 1:
                if last := step + 1 == self.epoch_steps:  # a border that shows before anybody asks for more
                    self._state[3:] = torch.tensor([epoch + 1, border + step + 1])
                yield samples if mine else None
                if last:
                    return
                samples = []


class _EpochRelay(Sampler):
    """The endless sampler of a stream's loader, which tells the stream that an epoch begins."""

    def __init__(self, sampler: Any, stream: ShardedStream) -> None:
        self.sampler = sampler
        self.stream = stream
        self.position: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if self.position is None:
            self.stream.set_epoch(epoch)
        else:
            self.stream.seek(self.position())


class StreamLoader(DataLoader):
    """A DataLoader over a `ShardedStream`, on whose sampler Lightning finds `set_epoch`."""

    dataset: ShardedStream

    @property
    def sampler(self) -> Any:
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # DataLoader's constructor assigns the sampler that streams get
        self._sampler = _EpochRelay(sampler, self.dataset)
