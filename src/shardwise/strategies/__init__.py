"""Lightning strategies on a device mesh."""

from shardwise.strategies.mesh import MeshStrategy

__all__ = ["MeshStrategy"]
