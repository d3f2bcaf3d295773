"""The order of samples: one endless stream, the same under every layout.

Epoch e is a permutation of the N samples, drawn from (seed, e) alone, and the stream is the epochs one after the other.
Global batch k is samples [kB, (k+1)B) of the stream, whatever the data-parallel size, the micro-batch or the
accumulation, and may cross an epoch's border. Epoch e covers the global batches that begin in it, kB in [eN, (e+1)N),
so the epochs of a run differ by at most one step in length and E epochs take ceil(EN/B) steps.

N is the number of samples, B the global batch size, k a step (counted from the start of the run), e an epoch.
"""

import itertools
from collections.abc import Callable, Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from shardwise.errors import ConfigError
from shardwise.seeds import stable_seed


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The order of the samples in `epoch`: (N,) int64, a function of its arguments only."""
    generator = torch.Generator().manual_seed(stable_seed("epoch", seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def first_step(epoch: int, *, num_samples: int, global_size: int) -> int:
    """The first global batch of `epoch`, ceil(eN/B), which is also the number of steps that `epoch` epochs take."""
    return -(-epoch * num_samples // global_size)


def local_size(*, global_size: int, dp_size: int) -> int:
    """Samples per data-parallel rank and step, B / dp_size; a `ConfigError` where that is no integer."""
    if global_size < 1 or global_size % dp_size:
        near = sorted({max(1, global_size // dp_size) * dp_size, (global_size // dp_size + 1) * dp_size})
        raise ConfigError(
            f"batch.global_size={global_size} does not divide by the data-parallel size {dp_size}:"
            f" use {' or '.join(map(str, near))}"
        )
    return global_size // dp_size


class SampleKey(int):
    """The index of a sample, carrying the epoch in which it is drawn: any map-style dataset can be indexed with it."""

    epoch: int

    def __new__(cls, index: int, epoch: int = 0) -> "SampleKey":
        key = super().__new__(cls, index)
        key.epoch = epoch
        return key

    def __reduce__(self) -> tuple[type, tuple[int, int]]:  # pickled on the way to loader workers
        return SampleKey, (int(self), self.epoch)


class StreamBatchSampler(Sampler[list[SampleKey]]):
    """This rank's share of every global batch of one epoch: samples [r B/dp, (r+1) B/dp) of each.

    It has no length, because epochs differ by a step; `steps_in_epoch` says it for one epoch. Position is set by
    `set_epoch` (which Lightning calls) or by `seek`, and read when iteration begins: an iterator that is already
    running is not moved.

    Args:
        num_samples: N, at least 1.
        global_size: B, a multiple of `dp_size`.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size.
        seed: decides the permutations.
        shuffle: False keeps every epoch in the dataset's own order.
        samples_seen: where to start, a multiple of B; or a function that tells how many samples were used up to now.
            With it, `set_epoch` goes by what was really used and not by a trainer's count of epochs, which runs ahead
            when training stops, or is resumed, in the middle of one.
        epoch_steps: cut the same stream into epochs of this many steps instead (a limit on batches per epoch).
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        samples_seen: int | Callable[[], int] = 0,
        epoch_steps: int | None = None,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(f"the training dataset has {num_samples} samples: at least 1 is needed")
        self.num_samples = num_samples
        self.global_size = global_size
        self.local_size = local_size(global_size=global_size, dp_size=dp_size)
        self.dp_rank = dp_rank
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_steps = epoch_steps
        self._orders: dict[int, Tensor] = {}
        self._epoch = 0
        self._start = 0
        self._offset = 0  # of the stream's epoch over the caller's
        self._position = samples_seen if callable(samples_seen) else None
        self.seek(samples_seen() if callable(samples_seen) else samples_seen)

    @property
    def sampler(self) -> "StreamBatchSampler":
        """Itself: Lightning looks for `set_epoch` on `loader.batch_sampler.sampler`."""
        return self

    def first_step(self, epoch: int) -> int:
        if self.epoch_steps is not None:
            return epoch * self.epoch_steps
        return first_step(epoch, num_samples=self.num_samples, global_size=self.global_size)

    def steps_in_epoch(self, epoch: int) -> int:
        """Global batches in `epoch`; 0 is possible where a global batch is larger than the dataset."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay where `seek` went if that is in it."""
        here = epoch + self._offset == self._epoch
        start = self._start if here else self.first_step(epoch + self._offset)
        if self._position is not None and start * self.global_size != (samples_seen := self._position()):
            self.seek(samples_seen)
            self._offset = self._epoch - epoch
        else:
            self._epoch, self._start = epoch + self._offset, start

    def seek(self, samples_seen: int) -> None:
        """Go to the place in the stream where `samples_seen` samples, a multiple of B, lie behind."""
        self._start = step_after(samples_seen, global_size=self.global_size)
        self._epoch = self._epoch_of(self._start)
        # A trainer that has just done the last step counts one epoch on, even if that epoch is empty (B > N).
        if self._start > 0:
            self._epoch = min(self._epoch, self._epoch_of(self._start - 1) + 1)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return map(self._share, range(self._start, self.first_step(self._epoch + 1)))

    def _epoch_of(self, step: int) -> int:
        if self.epoch_steps is not None:
            return step // self.epoch_steps
        return step * self.global_size // self.num_samples

    def _share(self, step: int) -> list[SampleKey]:
        position = step * self.global_size + self.dp_rank * self.local_size
        end = position + self.local_size
        keys: list[SampleKey] = []
        while position < end:
            epoch, offset = divmod(position, self.num_samples)
            count = min(end - position, self.num_samples - offset)
            keys += [SampleKey(index, epoch) for index in self._order(epoch)[offset : offset + count].tolist()]
            position += count
        return keys

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            while len(self._orders) > 1:  # a batch looks at two epochs at most, bar datasets smaller than a batch
                self._orders.pop(min(self._orders))
            self._orders[epoch] = (
                epoch_permutation(self.num_samples, seed=self.seed, epoch=epoch)
                if self.shuffle
                else torch.arange(self.num_samples)
            )
        return self._orders[epoch]


class EvalBatchSampler(BatchSampler):
    """Every sample exactly once over all ranks, in the same number of batches on each, none of them empty.

    Rank r takes a contiguous share of n_r in {floor(N/dp), ceil(N/dp)} samples, split as evenly as possible into
    m = min(ceil(n_max / batch_size), n_min) batches. Nothing is padded or repeated, and because every rank does m
    forward passes, sharded ones cannot hang. Where ranks differ by a sample, a batch may exceed `batch_size` by one.

    The arguments `sampler` and `drop_last` are what Lightning replaces when it tracks the indices of predictions.

    Args:
        sampler: N, or anything with that length.
        batch_size: samples per rank and batch.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size; more than N is a `ConfigError`.
        drop_last: has to be False.
    """

    def __init__(
        self, sampler: int | Sized, *, batch_size: int, dp_rank: int, dp_size: int, drop_last: bool = False
    ) -> None:
        num_samples = sampler if isinstance(sampler, int) else len(sampler)
        assert not drop_last, "an evaluation counts every sample"
        if num_samples < dp_size or num_samples < 1:
            raise ConfigError(
                f"{num_samples} samples cannot be evaluated on {dp_size} data-parallel ranks, each of which needs one:"
                f" use at most {max(num_samples, 1)} ranks or more samples"
            )
        if batch_size < 1:
            raise ConfigError(f"the batch size of an evaluation is {batch_size}: it has to be at least 1")
        super().__init__(range(num_samples), batch_size, drop_last)
        self._start = _even_border(num_samples, part=dp_rank, parts=dp_size)
        self._count = _even_border(num_samples, part=dp_rank + 1, parts=dp_size) - self._start
        most, least = -(-num_samples // dp_size), num_samples // dp_size
        self._num_batches = min(-(-most // batch_size), least)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        borders = [
            self._start + _even_border(self._count, part=i, parts=self._num_batches)
            for i in range(self._num_batches + 1)
        ]
        for start, stop in itertools.pairwise(borders):
            yield list(range(start, stop))


def step_after(samples_seen: int, *, global_size: int) -> int:
    """The global batch that follows `samples_seen` samples; a `ConfigError` where that is not at a batch's border."""
    if samples_seen < 0 or samples_seen % global_size:
        raise ConfigError(
            f"the position in the data is {samples_seen} samples, which is not a multiple of"
            f" batch.global_size={global_size}: use a global size that divides it"
        )
    return samples_seen // global_size


def _even_border(total: int, *, part: int, parts: int) -> int:
    """Where `part` begins if `total` things are split into `parts` that differ by at most one, larger ones first."""
    return part * (total // parts) + min(part, total % parts)
