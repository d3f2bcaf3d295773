"""``python train.py --help``: a page for a person, read off the YAML files and the dataclasses, without Hydra."""

import importlib.resources
import inspect
import json
import shutil
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from shardwise.config import Config, TrainerConfig

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
    "sweep": "grids for -m",
}

EXAMPLES = (
    ("python train.py", "the digits on one device"),
    ("python train.py strategy=fsdp trainer.devices=2", "the same, parameters sharded over two processes"),
    ("python train.py batch.global_size=256 lr_scaling=linear lr_scaling.base_batch_size=64", "four times the batch"),
    ("python train.py experiment=text_gpt precision=bf16-mixed", "a small GPT on text"),
    ("python train.py -m strategy=ddp,fsdp batch.global_size=32,64 trainer.devices=2", "four runs, one after another"),
    ("python train.py rerun=outputs/digits/<run id> seed=1", "a run again from its folder, with another seed"),
)

SHOWN = ("strategy", "batch", "precision", "schedule", "lr_scaling", "launch", "sweep")
"""Groups of the schema whose keys are listed one by one."""


def choices() -> dict[str, list[str]]:
    """Group -> names of its YAML files, from the package's configuration and experiments."""
    folders = [Path(str(importlib.resources.files("shardwise"))) / name for name in ("conf", "experiments")]
    return {g: sorted({p.stem for f in folders for p in (f / g).glob("*.yaml")}) for g in GROUPS}


def help_page() -> str:
    """The whole page, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [
        "Train a model: parallelism is an override, and the numbers do not change.",
        "",
        "usage: python train.py [group=choice] [key=value] ...        one run",
        "       python train.py -m key=value,value ...                one run for each combination",
        "",
        "examples",
    ]
    for command, text in EXAMPLES:
        lines += [f"  {command}", f"      {text}"]
    lines += ["", "groups: pick a choice with group=choice"]
    for group, names in choices().items():
        lines += _wrapped(f"  {group:<11}", f"{'|'.join(names)}  ({GROUPS[group]})" if names else GROUPS[group], width)
    lines += ["", "keys: set a value with key=value (default in brackets)"]
    for name in ("seed", "experiment_name", "output_root", "plugins"):
        lines += _key(Config, name, name, width)
    hints = get_type_hints(Config)
    for group in SHOWN:
        kind = hints[group]
        assert is_dataclass(kind)
        for field in fields(kind):
            lines += _key(kind, field.name, f"{group}.{field.name}", width)
    names = ", ".join(field.name for field in fields(TrainerConfig))
    lines += _wrapped("  trainer.*  ", f"Lightning's own names: {names}", width)
    lines += _wrapped(
        "  model.* data.* task.* optimizer.* callbacks.* logger.*  ", "arguments of the class in _target_", width
    )
    lines += [
        "",
        "--cfg job shows the composed configuration; HYDRA_FULL_ERROR=1 brings stack traces back.",
    ]
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * 13, break_on_hyphens=False)


def _key(kind: type, name: str, shown: str, width: int) -> list[str]:
    field = next(f for f in fields(kind) if f.name == name)
    default = field.default if not callable(getattr(field, "default_factory", None)) else field.default_factory()  # type: ignore[misc]
    allowed = field.metadata.get("choices")
    values = "|".join(allowed) + " " if allowed else ""
    text = f"{values}[{json.dumps(default)}]  {_docstring(kind, name)}"
    return textwrap.wrap(text, width, initial_indent=f"  {shown}  ", subsequent_indent=" " * 6, break_on_hyphens=False)


def _docstring(kind: type, name: str) -> str:
    """The text that stands under a field in the source of its dataclass."""
    lines = inspect.getsource(kind).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
    for i in range(start + 1, len(lines)):
        if lines[i].strip().startswith('"""'):
            text = " ".join(line.strip() for line in lines[i : i + 4])
            return text.split('"""')[1].strip()
    return ""
