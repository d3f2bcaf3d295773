"""``python train.py --help``: a page for a person, read off the YAML files and the dataclasses, without Hydra."""

import importlib.resources
import inspect
import json
import shutil
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import yaml

from shardwise.config import Config, TrainerConfig
from shardwise.groups import GROUPS, WORDS, group_choices

EXAMPLES = (
    ("python train.py", "the digits on one device"),
    ("python train.py strategy=fsdp trainer.devices=2", "the same, parameters sharded over two processes"),
    ("python train.py strategy=fsdp+tp trainer.devices=4", "each layer split in two, and the halves sharded"),
    ("python train.py batch.global_size=256 lr_scaling=linear lr_scaling.base_batch_size=64", "four times the batch"),
    ("python train.py experiment=text_gpt precision=bf16-mixed", "a small GPT on text"),
    (
        "python train.py -m strategy=ddp,fsdp batch.global_size=32,64 trainer.devices=2",
        "four runs",
    ),
    ("python train.py -m sweep=batch_scaling_digits", "a sweep from its file; typed again, it goes on where it was"),
    ("python -m shardwise report outputs/sweeps/batch_scaling_digits", "its curves and tables on one page"),
    ("python -m shardwise show outputs/digits/<run id>", "one run as a page: its curves, and the times of every rank"),
    ("python train.py rerun=outputs/digits/<run id> seed=1", "a run again from its folder, with another seed"),
    ("python train.py checkpoint.every_n_steps=100", "saved often; Ctrl-C and SIGTERM save too, exit status 75"),
    ("python train.py resume=last", "on from the newest whole checkpoint of the newest run; also resume=<run folder>"),
    ("python -m shardwise doctor", "what this machine has for training, and what to fix"),
    ("python -m shardwise logs <run folder>", "what all ranks have printed, merged by time; --follow while it runs"),
    ("python -m shardwise inspect|eval|predict|generate|export <run folder>", "what can be done with a checkpoint"),
)

SHOWN = (
    *("strategy", "batch", "precision", "schedule", "lr_scaling"),
    *("checkpoint", "launch", "monitor", "profile", "sweep"),
)
"""Groups of the schema whose keys are listed one by one."""


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
    groups, defaults = group_choices(), default_values()
    for group, names in groups.items():
        lines += _wrapped(f"  {group:<11}", f"{GROUPS[group]}: {', '.join(names)}" if names else GROUPS[group], width)
    lines += ["", "keys: set a value with key=value (default in brackets)"]
    for word, text in WORDS.items():
        lines += textwrap.wrap(
            text, width, initial_indent=f"  {word}  ", subsequent_indent=" " * 6, break_on_hyphens=False
        )
    for name in ("seed", "experiment_name", "output_root", "plugins", "init_from"):
        lines += _key(Config, name, name, defaults.get(name), width)
    hints = get_type_hints(Config)
    for group in SHOWN:
        kind, values = hints[group], defaults.get(group, {})
        assert isinstance(kind, type)
        assert is_dataclass(kind)
        for field in fields(kind):
            if sorted(field.metadata.get("choices", ())) != groups.get(group):  # else the group's choice says it
                lines += _key(kind, field.name, f"{group}.{field.name}", values.get(field.name), width)
    arguments = ", ".join(field.name for field in fields(TrainerConfig))
    lines += _wrapped("  trainer.*  ", f"Lightning's own names: {arguments}", width)
    lines += _wrapped(
        "  model.* data.* task.* optimizer.* callbacks.* logger.*  ", "arguments of the class in _target_", width
    )
    lines += _wrapped(
        "  extra.*  ", "keys of your own, for interpolations: extra.width=64 'model.width=${extra.width}'", width
    )
    lines += [
        "",
        "--cfg job shows the composed configuration; HYDRA_FULL_ERROR=1 brings stack traces back.",
    ]
    return "\n".join(lines)


def default_values() -> dict[str, Any]:
    """What ``config.yaml`` and the choices that it makes say, below the dataclasses' own defaults."""
    folder = importlib.resources.files("shardwise") / "conf"
    plain = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    for entry in plain.pop("defaults"):
        for group, choice in entry.items() if isinstance(entry, dict) else ():
            if group in SHOWN and choice is not None:
                values[group] = yaml.safe_load((folder / group / f"{choice}.yaml").read_text(encoding="utf-8")) or {}
    for key, value in plain.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return values


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * 13, break_on_hyphens=False)


def _key(kind: type, name: str, shown: str, default: Any, width: int) -> list[str]:
    field = next(f for f in fields(kind) if f.name == name)
    if default is None:
        default = field.default if field.default_factory is MISSING else field.default_factory()
    values = "|".join(field.metadata.get("choices", ())) + " " if field.metadata.get("choices") else ""
    text = f"{values}[{json.dumps(default)}]  {_docstring(kind, name)}".replace("``", "")
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
