"""Loggers of ours: the metrics file of every run, and Weights & Biases.

They follow Lightning's Logger interface. Only global rank 0 writes, but for files of each rank. TensorBoard and CSV are Lightning's own loggers.
"""

from shardwise.tracking.jsonl import JsonlLogger, MetricsFileError, RankJsonlLogger
from shardwise.tracking.wandb_tracker import WandbTracker

__all__ = ["JsonlLogger", "MetricsFileError", "RankJsonlLogger", "WandbTracker"]
