"""Meshes, sharding and collectives on torch.distributed alone: no Lightning, no configuration."""
