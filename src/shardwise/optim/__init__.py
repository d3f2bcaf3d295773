"""Optimizers and their schedules: built from plain numbers, and right however the parameters are laid out."""

from shardwise.optim.build import build_optimizer, build_scheduler
from shardwise.optim.muon import Muon

__all__ = ["Muon", "build_optimizer", "build_scheduler"]
