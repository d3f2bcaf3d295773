"""From an ordinary DataLoader to this rank's share of the stream of samples.

The front door of the order of samples: `shard_train_loader` and `shard_eval_loader` take the loader that a data module
built, without knowing of ranks, keep all that concerns how samples are made, and replace what decides which come when.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from shardwise.data.iterable import ShardedStream, StreamLoader
from shardwise.data.order import (
    EvalBatchSampler,
    SampleKey,
    StreamBatchSampler,
    epoch_permutation,
    first_step,
    local_size,
)
from shardwise.data.seeded import SeededDataset
from shardwise.errors import ConfigError
from shardwise.seeds import stable_seed

__all__ = [
    "EvalBatchSampler",
    "SampleKey",
    "SeededDataset",
    "ShardedStream",
    "StreamBatchSampler",
    "epoch_permutation",
    "first_step",
    "is_sharded",
    "shard_eval_loader",
    "shard_train_loader",
]


def is_sharded(loader: Any) -> bool:
    """Whether `loader` came out of `shard_train_loader` or `shard_eval_loader`."""
    return isinstance(loader, StreamLoader) or isinstance(
        getattr(loader, "batch_sampler", None), StreamBatchSampler | EvalBatchSampler
    )


def shard_train_loader(
    loader: DataLoader,
    *,
    seed: int,
    global_size: int,
    dp_rank: int,
    dp_size: int,
    samples_seen: int | Callable[[], int] = 0,
    epoch_steps: int | None = None,
) -> DataLoader:
    """This rank's share of the global batches of `loader`'s dataset.

    A map-style dataset is always shuffled, whether or not `loader` was built with `shuffle=True`; a stream keeps its
    own order. The loader's batch size plays no part. The result has no length: an epoch ends when it ends.

    Args:
        loader: a DataLoader with a default sampler over a dataset of single samples.
        seed: decides the order of samples and the random augmentation.
        global_size: B, samples per step over all data-parallel ranks.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size.
        samples_seen: the position in the stream, a multiple of B; or a function that tells it whenever an epoch begins,
            which is right also where a trainer's count of epochs is not.
        epoch_steps: end epochs after this many global batches (a limit below the dataset's own length).

    Raises:
        ConfigError: B does not divide, the loader brings an order of its own, or its dataset yields whole batches.
    """
    _check_plain(loader, name="train_dataloader")
    share = local_size(global_size=global_size, dp_size=dp_size)
    generator = _worker_seeds(seed, dp_rank)
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        _check_samples(loader, name="train_dataloader")
        sampler = StreamBatchSampler(
            len(dataset),
            global_size=global_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=seed,
            samples_seen=samples_seen,
            epoch_steps=epoch_steps,
        )
        seeded = SeededDataset(dataset, seed=seed)
        return DataLoader(seeded, batch_sampler=sampler, generator=generator, **how_samples_are_made(loader))
    start = samples_seen() if callable(samples_seen) else samples_seen
    if getattr(dataset, "shards_itself", False):
        if start:
            if not callable(seek := getattr(dataset, "seek", None)):
                raise ConfigError(
                    f"{type(dataset).__name__} shards itself and cannot be continued at sample {start}:"
                    " give it a method seek(samples_seen)"
                )
            seek(start)
        batch_size = None if loader.batch_size is None else share
        return DataLoader(
            dataset,
            batch_size=batch_size,
            drop_last=batch_size is not None,  # every step is a whole global batch
            generator=generator,
            **how_samples_are_made(loader),
        )
    _check_samples(loader, name="train_dataloader")
    stream = ShardedStream(
        dataset,
        global_size=global_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        samples_seen=start,
        epoch_steps=epoch_steps,
    )
    sharded = StreamLoader(stream, batch_size=None, generator=generator, **how_samples_are_made(loader))
    sharded.sampler.position = samples_seen if callable(samples_seen) else None
    return sharded


def shard_eval_loader(loader: DataLoader, *, batch_size: int, dp_rank: int, dp_size: int, seed: int = 0) -> DataLoader:
    """This rank's share of an evaluation: every sample exactly once over all ranks, as many batches on each.

    Args:
        loader: a DataLoader with a default sampler over a dataset of single samples.
        batch_size: samples per rank and batch.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size.
        seed: decides what is random in a sample (epoch 0 always).

    Raises:
        ConfigError: fewer samples than ranks, a sampler of the user's, or a stream on several ranks.
    """
    _check_plain(loader, name="an evaluation's dataloader")
    dataset: Any = loader.dataset
    generator = _worker_seeds(seed, dp_rank)
    if isinstance(dataset, IterableDataset):
        if dp_size > 1:
            raise ConfigError(
                f"{type(dataset).__name__} is a stream (IterableDataset), which cannot be evaluated exactly on"
                f" {dp_size} data-parallel ranks: give a map-style dataset, or evaluate on one rank"
            )
        size = None if loader.batch_size is None else batch_size
        return DataLoader(dataset, batch_size=size, generator=generator, **how_samples_are_made(loader))
    _check_samples(loader, name="an evaluation's dataloader")
    sampler = EvalBatchSampler(len(dataset), batch_size=batch_size, dp_rank=dp_rank, dp_size=dp_size)
    seeded = SeededDataset(dataset, seed=seed)
    return DataLoader(seeded, batch_sampler=sampler, generator=generator, **how_samples_are_made(loader))


def _worker_seeds(seed: int, dp_rank: int) -> torch.Generator:
    """Seeds the loader's workers; without it, DataLoader draws from the global generator, and so moves dropout."""
    return torch.Generator().manual_seed(stable_seed("loader", seed, dp_rank))


def how_samples_are_made(loader: DataLoader) -> dict[str, Any]:
    """The arguments of `loader` that do not decide which samples come when."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def _check_plain(loader: Any, *, name: str) -> None:
    """Refuse a loader that would lose an order of its own when it is rebuilt."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{name} is a {type(loader).__name__}: return a torch DataLoader")
    advice = "the order of samples belongs to the stream: give a DataLoader over a dataset, without it"
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(f"{name} is a {type(loader).__name__}, which iterates in its own way, but {advice}")
    if isinstance(loader.dataset, IterableDataset):
        return
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(f"{name} has the batch sampler {type(loader.batch_sampler).__name__}, but {advice}")
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler):
        raise ConfigError(f"{name} has the sampler {type(sampler).__name__}, but {advice}")
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != _length(loader.dataset)):
        raise ConfigError(f"{name} has a RandomSampler with replacement or num_samples, but {advice}")


def _check_samples(loader: DataLoader, *, name: str) -> None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            f"{name} has batch_size=None, so its dataset yields whole batches, which cannot be shared out by sample:"
            " give a dataset of single samples and any batch_size"
        )


def _length(dataset: Dataset) -> int:
    return len(dataset)  # type: ignore[arg-type]  # map-style datasets are sized
