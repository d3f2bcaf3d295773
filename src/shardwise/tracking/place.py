"""Which process this is among all ranks."""

import os
from dataclasses import dataclass

import torch.distributed as dist
from pytorch_lightning.utilities.rank_zero import rank_zero_only


@dataclass(frozen=True)
class Place:
    """One of ``world_size`` ranks, of which ``local_size`` run on this node; nodes have equally many."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def node(self) -> int:
        return self.rank // self.local_size


def place() -> Place:
    """Where this process stands: by its process group, or what the launcher has told it before there is one.

    Ask as late as possible: Lightning takes the first process of every node for rank 0 until it has a Trainer.
    """
    rank, world_size = getattr(rank_zero_only, "rank", 0), int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif "RANK" in os.environ:
        rank = int(os.environ["RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % local_size))
    return Place(rank, world_size, local_rank, local_size)
