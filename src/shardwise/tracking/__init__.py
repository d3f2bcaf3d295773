"""Loggers of ours: the metrics file of every run, and Weights & Biases.

They follow Lightning's Logger interface. Global rank 0 writes what is of all ranks, each rank what is its own.
TensorBoard and CSV are Lightning's own loggers.
"""

from shardwise.tracking.jsonl import JsonlLogger, MetricsFileError, RankJsonlLogger
from shardwise.tracking.wandb_tracker import WandbTracker

__all__ = ["JsonlLogger", "MetricsFileError", "RankJsonlLogger", "WandbTracker"]
