"""Random augmentation independent of the layout: drawn from (seed, epoch, sample), never from a worker's state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from shardwise.seeds import stable_seed


def is_deterministic(dataset: Any) -> bool:
    """Whether a sample depends on its index only: the dataset says so, or is made of datasets that do."""
    if isinstance(dataset, TensorDataset):
        return True
    if isinstance(dataset, Subset):
        return is_deterministic(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(is_deterministic(part) for part in dataset.datasets)
    return bool(getattr(dataset, "deterministic", False))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch (CPU), numpy and `random`, and put them back afterwards."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        # not torch.manual_seed, which also touches every accelerator
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class SeededDataset(Dataset):
    """A map-style dataset whose random draws are fixed by (seed, epoch, index).

    Around each sample the global generators of torch (CPU), numpy and `random` are seeded, and put back afterwards. The
    epoch comes from the `SampleKey`; a plain index counts as epoch 0, as in evaluation. Random numbers from elsewhere
    (an unseeded `numpy.random.default_rng()`, a `collate_fn`) are not covered. A deterministic dataset is passed
    through, whole batches (`__getitems__`) included.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.deterministic = is_deterministic(dataset)

    @property
    def __getitems__(self) -> Any:
        # torch's fetcher takes None as "index one by one", which the seeding needs
        return getattr(self.dataset, "__getitems__", None) if self.deterministic else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        if self.deterministic:
            return self.dataset[key]
        with seeded(stable_seed("sample", self.seed, getattr(key, "epoch", 0), int(key))):
            return self.dataset[key]
