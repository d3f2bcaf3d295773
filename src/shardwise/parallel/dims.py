"""All degrees of parallelism in one small object; nobody else does arithmetic on ranks.

The axes from the outermost to the innermost are dp_replicate, dp_shard and tp: ranks that are neighbours in the
innermost axis have neighbouring numbers, and so share a node.
"""

import math
from dataclasses import dataclass

from shardwise.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "tp")
"""Mesh axes, outermost first."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees along each mesh axis, all positive; their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @classmethod
    def fill(cls, *, world_size: int, **degrees: int) -> "ParallelDims":
        """Degrees (1 if not given) with at most one ``-1``, which becomes the ranks that the others leave.

        Raises:
            ConfigError: more than one ``-1``, a degree below 1, or a product that is not ``world_size``.
        """
        degrees = {axis: degrees.pop(axis, 1) for axis in AXES} | degrees
        open_axes = [axis for axis, degree in degrees.items() if degree == -1]
        if len(open_axes) > 1:
            raise ConfigError(
                f"{' and '.join(f'strategy.{axis}=-1' for axis in open_axes)}: only one degree can be -1; "
                f"give a number to one of them"
            )
        for axis, degree in degrees.items():
            if degree < 1 and degree != -1:
                raise ConfigError(
                    f"strategy.{axis}={degree}: a degree is a positive number, or -1 for the remaining ranks"
                )
        given = math.prod(degree for degree in degrees.values() if degree != -1)
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree not in (-1, 1)) or "1"
        if open_axes:
            if world_size % given:
                raise ConfigError(
                    f"{shown} does not divide the {world_size} ranks; type a degree out of {_divisors(world_size)}"
                )
            degrees[open_axes[0]] = world_size // given
        elif given != world_size:
            raise ConfigError(
                f"{shown} makes {given} ranks, but there are {world_size}; "
                f"type trainer.devices={given}, or -1 for one of the degrees"
            )
        return cls(**degrees)

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.shape.values())

    @property
    def dp_size(self) -> int:
        """The data-parallel size: how many ranks see different samples. Every rule about sizes reads it here."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, rank: int) -> int:
        """Which of the ``dp_size`` shares of a global batch the global ``rank`` works on."""
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        """Which of the ``tp`` parts of the model the global ``rank`` holds."""
        return rank % self.tp

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP's machinery gathers parameters and reduces gradients: for shards, and for replicas of parts."""
        return self.dp_shard > 1 or (self.dp_replicate > 1 and self.tp > 1)

    def check_precision(self, name: str) -> None:
        """Refuse a precision that this mesh does not have yet.

        Raises:
            ConfigError: 16-mixed where layers are split.
        """
        if self.tp > 1 and name == "16-mixed":
            raise ConfigError(
                "precision=16-mixed scales the loss, and the ranks that split a layer would not agree on an overflow: "
                "type precision=bf16-mixed"
            )

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> degree, outermost first, every axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        named = [f"{axis} {degree}" for axis, degree in self.shape.items() if degree > 1]
        return " x ".join(named) or "one device"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
