"""Loggers of ours: the metrics file of every run, and Weights & Biases.

They follow Lightning's Logger interface. Only global rank 0 writes. TensorBoard and CSV are Lightning's own loggers.
"""

from shardwise.tracking.jsonl import JsonlLogger, MetricsFileError
from shardwise.tracking.wandb_tracker import WandbTracker

__all__ = ["JsonlLogger", "MetricsFileError", "WandbTracker"]
