"""One rank's share of a global batch, cut into micro-batches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import ConfigError


def batch_samples(batch: Any) -> int:
    """Samples in a batch: the first dim of its first tensor (or the length of its first list of strings).

    Raises:
        ConfigError: nothing in the batch has a first dim.
    """
    leaves, _ = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.size(0)
    raise ConfigError(f"a batch of type {type(batch).__name__} holds no tensor with a first dim for its samples")


def split_batch(batch: Any, count: int) -> list[Any]:
    """``count`` micro-batches of a batch, along the first dim of its tensors, in order.

    Tensors whose first dim is not the number of samples, and values that are no tensors, go into every micro-batch.

    Raises:
        ConfigError: fewer samples than micro-batches.
    """
    if count == 1:
        return [batch]
    samples = batch_samples(batch)
    if samples < count:
        raise ConfigError(
            f"a batch of {samples} samples cannot be cut into {count} micro-batches: batch.accumulate={samples}"
        )
    leaves, spec = tree_flatten(batch)
    cut = [
        torch.tensor_split(leaf, count) if isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) == samples else None
        for leaf in leaves
    ]
    return [
        tree_unflatten([whole if parts is None else parts[i] for whole, parts in zip(leaves, cut, strict=True)], spec)
        for i in range(count)
    ]
