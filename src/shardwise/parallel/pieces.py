"""What a rank holds of a tensor, and where that lies in the whole: the common language of all layouts.

A plain tensor is one piece that is the whole, a shard is one piece at its offset, and a part of a matrix that packs
several (queries, keys and values in one) is several. Whoever reads or writes pieces need not know of meshes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Offset = tuple[int, ...]


@dataclass
class Pieces:
    """What this rank holds of one tensor.

    The three methods with double underscores are how torch.distributed.checkpoint asks a value for its pieces.
    """

    shape: torch.Size
    """Of the whole."""
    parts: dict[Offset, Tensor]
    """Offset in the whole -> a tensor that shares its memory with what this rank holds; empty ones are left out."""
    dtype: torch.dtype

    def size(self) -> torch.Size:
        """Shape of the whole."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.size()),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def pieces_of(tensor: Tensor) -> Pieces:
    """The pieces of a tensor of any placement; no memory is copied, and nothing is communicated."""
    if not isinstance(tensor, DTensor):
        return Pieces(tensor.shape, {(0,) * tensor.dim(): tensor.detach()}, tensor.dtype)
    # Training waits for this: detach and to_local of a DTensor take ten times as long.
    mesh, placements, local = tensor.device_mesh, list(tensor.placements), tensor._local_tensor.detach()
    packed = getattr(placements[-1], "split_factor", None)  # of a matrix that packs several, on the innermost axis
    if packed is not None:
        placements[-1] = Replicate()
    offset = _offset_here(tensor.shape, mesh, tuple(placements))
    if not local.numel():
        return Pieces(tensor.shape, {}, tensor.dtype)
    if packed is None:
        return Pieces(tensor.shape, {offset: local}, tensor.dtype)
    axis = mesh.ndim - 1
    rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
    rows = tensor.size(0) // packed // ranks
    return Pieces(
        tensor.shape,
        {
            (part * rows * ranks + rank * rows, *offset[1:]): local[part * rows : (part + 1) * rows]
            for part in range(packed)
        },
        tensor.dtype,
    )


@lru_cache(maxsize=2**16)  # a model's are computed once, not at every checkpoint
def _offset_here(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Offset:
    """Where this rank's part begins."""
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])
