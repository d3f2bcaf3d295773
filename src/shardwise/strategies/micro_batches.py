"""One rank's share of a global batch, cut into micro-batches."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import ConfigError


def batch_samples(batch: Any) -> int:
    """Samples in a batch: the first dim of its first tensor.

    Raises:
        ConfigError: nothing in the batch has a first dim.
    """
    for leaf in _flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.size(0)
    raise ConfigError(
        f"a batch of type {type(batch).__name__} holds no tensor with a first dim for its samples: collate to a tuple, "
        f"list or dict of tensors, or define count_targets(batch) on the LightningModule"
    )


def split_batch(batch: Any, count: int) -> list[Any]:
    """``count`` micro-batches of a batch, along the first dim of its tensors, in order.

    Lists and tuples with a text or a number a sample are cut too. Tensors whose first dim is not the number of samples,
    and all other values, go into every micro-batch.

    Raises:
        ConfigError: fewer samples than micro-batches, or a batch of a type that cannot be cut.
    """
    if count == 1:
        return [batch]
    samples = batch_samples(batch)
    if samples < count:
        raise ConfigError(
            f"a batch of {samples} samples cannot be cut into {count} micro-batches: batch.accumulate={samples}"
        )
    # As torch.tensor_split: the first ones are one longer.
    sizes = [samples // count + (i < samples % count) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    leaves, spec = _flatten(batch, samples=samples)
    cut = [[leaf] * count if not _is_per_sample(leaf, samples) else _cut(leaf, sizes, ends) for leaf in leaves]
    return [tree_unflatten([parts[i] for parts in cut], spec) for i in range(count)]


def _flatten(batch: Any, *, samples: int | None = None) -> tuple[list[Any], Any]:
    # Batches of Hugging Face tokenizers are mappings that are no dict.
    batch = dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch
    return tree_flatten(batch, is_leaf=lambda node: isinstance(node, list | tuple) and _is_per_sample(node, samples))


def _is_per_sample(leaf: Any, samples: int | None) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.size(0) == samples
    plain = isinstance(leaf, list | tuple) and len(leaf) == samples
    return plain and all(isinstance(value, str | bytes | int | float) for value in leaf)


def _cut(leaf: Any, sizes: list[int], ends: list[int]) -> list[Any]:
    if isinstance(leaf, Tensor):
        return list(torch.split(leaf, sizes))
    return [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def check_same_batch(batch: Any, group: dist.ProcessGroup) -> None:
    """Whether all ranks of ``group``, which split each layer between them, have the same batch; a collective.

    Raises:
        RuntimeError: on every rank. Training would go on, to numbers that mean nothing.
    """
    tensors = [leaf.detach().cpu().contiguous() for leaf in _flatten(batch)[0] if isinstance(leaf, Tensor)]
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    mine = ([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors], bits.hexdigest())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if any(other != mine for other in everyone):
        raise RuntimeError(
            "the ranks that split each layer between them got different batches: let the loader shard by dp_rank and "
            "dp_size of the strategy (Lightning's own sampler does), and draw nothing from a rank's own generator"
        )
