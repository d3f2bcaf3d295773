"""The config groups: what each is about, and the names of its choices. Without Hydra, so that ``--help`` is quick."""

import importlib.resources
from pathlib import Path

GROUPS = {
    "experiment": "a whole recipe: model, data, sizes",
    "strategy": "how ranks share the work",
    "nodes": "machines x processes on each",
    "launch": "who starts the processes",
    "precision": "number formats",
    "model": "what is trained",
    "data": "what it is trained on",
    "task": "what its output means",
    "optimizer": "how it is trained",
    "schedule": "the learning rate over time",
    "lr_scaling": "the learning rate over the batch size",
    "batch": "sizes in samples",
    "trainer": "Lightning's Trainer",
    "callbacks": "Lightning callbacks",
    "logger": "where metrics go beside metrics.jsonl",
    "profile": "a few steps under PyTorch's profiler",
    "sweep": "grids and searches for -m",
}
"""Config group -> what it is about, in the order in which ``--help`` lists them."""

WORDS = {
    "rerun": "<run folder>: what was typed then and what is typed now, as a new run",
    "resume": "<run folder>|last: the same, on from the newest whole checkpoint, in the same folder (last: the newest "
    "run of the experiment); <checkpoint>: a new run from there",
}
"""What can be typed beside groups and keys, before Hydra sees any of it -> its value."""


def group_choices() -> dict[str, list[str]]:
    """Group -> names of its YAML files, from the package's configuration and experiments."""
    folders = [Path(str(importlib.resources.files("shardwise"))) / name for name in ("conf", "experiments")]
    return {group: sorted({p.stem for f in folders for p in (f / group).glob("*.yaml")}) for group in GROUPS}
