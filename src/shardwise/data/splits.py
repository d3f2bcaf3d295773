"""What the shipped data modules have in common: fixed splits, and loaders over them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from shardwise.errors import ConfigError

SPLIT_SEED = 20240229
"""Seeds every split into training, validation and test sets: independent of a run's `seed`, so that no run trains on
the test set of another. Never change it."""


def check_fraction(value: float, *, name: str, zero: bool = True) -> None:
    """Raise a `ConfigError` unless `value` is in [0, 1), or in (0, 1) without `zero`."""
    if not (0 <= value < 1 if zero else 0 < value < 1):
        raise ConfigError(f"{name}={value} is no fraction: use a value {'from' if zero else 'above'} 0, below 1")


def check_at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value} is too small: it has to be at least 1")


def stratified_split(labels: ArrayLike, *, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the larger and of the smaller part, each in order; of every class, `fraction` is in the smaller."""
    labels = np.asarray(labels)
    draw = np.random.RandomState(SPLIT_SEED)  # its stream is frozen over numpy's versions
    smaller = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        smaller[members[: round(fraction * len(members))]] = True
    return np.flatnonzero(~smaller), np.flatnonzero(smaller)


def as_batch(samples: Any) -> Any:
    """Collate for `TensorSamples`: a tuple is a batch already, a list is single samples."""
    return samples if isinstance(samples, tuple) else torch.utils.data.default_collate(samples)


class TensorSamples(Dataset):
    """Samples held in tensors with the same first dimension, taken a whole batch at a time."""

    deterministic = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[int(index)] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor(indices)
        return tuple(tensor[rows] for tensor in self.tensors)


class SplitDataModule(LightningDataModule):
    """A data module whose `setup` fills `train_set`, `val_set` and `test_set` with map-style datasets.

    The batch size of its loaders is nominal: the framework replaces it together with the sampler.

    Args:
        num_workers: processes that load samples, per rank; 0 loads in the training process.
        collate: turns what the datasets return into a batch; None for torch's own.
    """

    batch_size = 64

    def __init__(self, *, num_workers: int = 0, collate: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} is negative: use 0 to load in the training process")
        self.num_workers = num_workers
        self.collate = collate
        self.train_set: Dataset | None = None
        self.val_set: Dataset | None = None
        self.test_set: Dataset | None = None

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(self.test_set)

    def _loader(self, dataset: Dataset | None, *, shuffle: bool = False) -> DataLoader:
        assert dataset is not None, "setup() has not been called"
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
