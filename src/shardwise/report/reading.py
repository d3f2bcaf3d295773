"""A run folder, read: plain data only, and no more than fits. It may come from a stranger."""

import json
import math
import shlex
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shardwise.checkpoint.manifest import printable
from shardwise.metrics_file import RANK_KINDS, read_lines
from shardwise.report.ending import reason_of
from shardwise.report.runs import DAMAGED, STATUSES, Curve, Run, number

MAX_BYTES = {"config.yaml": 2**20, "overrides.yaml": 2**20, "result.json": 2**24, "provenance.json": 2**26}
MAX_METRICS_BYTES = 2**28
MAX_VALUES = 20_000
"""Values in one configuration: an alias in YAML can say a gigabyte in a line."""
MANY_BROKEN = 5
"""Lines of metrics that can be broken without a word; together with BROKEN_SHARE."""
BROKEN_SHARE = 0.1
MAX_METRICS = 500
"""Names of metrics of one run."""


def read_run(folder: Path, *, status: str | None = None, message: str = "") -> Run:
    """One run folder.

    Args:
        folder: the run's.
        status: how it ended by the list of its sweep, for a run that could not write so itself.
        message: what that list says of its failure.

    Raises:
        ValueError: it is no run of a training, or what it holds cannot be understood.
        OSError: a file cannot be read.
    """
    config = plain_yaml(folder / "config.yaml")
    if not isinstance(config, dict) or not isinstance(config.get("derived"), dict):
        raise ValueError("its config.yaml has no 'derived': not a run of shardwise, or one that ended before it began")
    batch = number(config["derived"].get("batch_global_size"))
    if batch is None or not 1 <= batch < 2**53:
        raise ValueError("its config.yaml says no derived.batch_global_size: no training of shardwise")
    provenance = plain_json(folder / "provenance.json")
    if (action := provenance.get("action", "train")) != "train":
        raise ValueError(f"a run of {str(action)[:40]}, which trains nothing")
    result = plain_json(folder / "result.json")
    overrides = plain_yaml(folder / "overrides.yaml", missing=[])
    command = provenance.get("command")
    known = result.get("status")
    if isinstance(result.get("metrics"), dict):
        result["metrics"] = dict(list(result["metrics"].items())[:MAX_METRICS])
    metrics, held, broken = read_curves(folder / "metrics.jsonl", batch=int(batch))
    ended = known if known in STATUSES else (status if not result and status in STATUSES[1:] else "unfinished")
    reason, log = reason_of(folder, result=result, listed=message) if ended in ("failed", "unfinished") else ("", "")
    if damage := _damage(folder, held, broken, claimed=number(result.get("steps"))):
        ended, reason = DAMAGED, damage
    return Run(
        folder=folder,
        config=config,
        overrides=[line[:1000] for line in overrides[:1000] if isinstance(line, str)]
        if isinstance(overrides, list)
        else [],
        result=result,
        status=ended,
        metrics=metrics,
        reason=reason,
        log=log,
        typed_command=shlex.join(map(str, command))[:2000] if isinstance(command, list) else "",
        settings=dict(_flat({key: value for key, value in config.items() if key != "derived"})),
    )


class _Lines:
    """One metric while it is read, in 24 bytes a value."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("d"), array("d"), array("d")


def _damage(folder: Path, held: int, broken: int, *, claimed: float | None) -> str:
    """What is wrong with the metrics as a whole; a few bad lines cost no more than themselves."""
    if not held and claimed and (folder / "metrics.jsonl").exists():
        return f"its metrics.jsonl holds no line that can be read, though it claims {claimed:,.0f} steps"
    if broken >= MANY_BROKEN and broken > BROKEN_SHARE * held:
        return f"{broken:,} of {held + broken:,} lines of its metrics.jsonl cannot be read"
    return ""


def read_curves(path: Path, *, batch: int) -> tuple[dict[str, Curve], int, int]:
    """The curves of what came out, not of how the ranks ran; how many lines were read, and how many could not be."""
    _check_size(path, MAX_METRICS_BYTES)
    lines: dict[str, _Lines] = {}
    begun: float | None = None
    held_lines = 0
    for step, metrics, when in read_lines(path):
        if not (0 <= step < 2**53 and math.isfinite(when)):
            continue
        held_lines += 1
        begun = when if begun is None else begun
        for name, value in metrics.items():
            kind = type(value)
            if (kind is not float and kind is not int) or name.startswith(RANK_KINDS):
                continue
            held = lines.get(name)
            if held is None:
                if len(lines) >= MAX_METRICS or len(name) > 200:
                    continue
                held = lines[name] = _Lines()
            held.steps.append(step)
            held.times.append(when)
            held.values.append(value if kind is float or abs(value) < 2**1000 else math.nan)
    seen = lines.get("samples")
    if seen is not None:
        known, counted = np.asarray(seen.steps), np.asarray(seen.values)
        order = np.argsort(known, kind="stable")
        known, counted = known[order], counted[order]
    curves = {}
    for name, held in lines.items():
        steps, values = np.asarray(held.steps), np.asarray(held.values)
        values = np.where(np.isfinite(values), values, np.nan)
        samples = steps * float(batch) if seen is None else np.interp(steps, known, counted)
        curves[printable(name)] = Curve(steps, samples, np.asarray(held.times) - (begun or 0.0), values)
    return curves, held_lines, _whole_lines(path) - held_lines


def _whole_lines(path: Path) -> int:
    """Lines with an end: one without was being written when the run was killed."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(partial(file.read, 2**20), b""))


def _flat(plain: dict[str, Any], *, budget: int = MAX_VALUES) -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value), lists as JSON; an alias that comes again counts again."""
    left = [budget]

    def counted(value: Any, depth: int) -> Any:
        left[0] -= 1
        if left[0] < 0 or depth > 30:
            raise ValueError(f"its config.yaml holds more than {budget:,} values, or itself")
        if isinstance(value, (list, tuple)):
            return [counted(inner, depth + 1) for inner in value]
        if isinstance(value, dict):
            return {str(key): counted(inner, depth + 1) for key, inner in value.items()}
        return value if value is None or isinstance(value, (bool, int, float)) else str(value)

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(inner, f"{prefix}.{key}" if prefix else key)
        else:
            yield prefix, json.dumps(value) if isinstance(value, (list, dict)) else value

    yield from walk(counted(plain, 0), "")


def plain_yaml(path: Path, missing: Any = None) -> Any:
    """Plain YAML: a tag that would build an object is an error."""
    _check_size(path, MAX_BYTES[path.name])
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if missing is None:
            raise
        return missing
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(f"its {path.name} is no plain YAML ({first_line(error)})") from error


def plain_json(path: Path) -> dict[str, Any]:
    """A file of JSON that is a mapping; empty if there is none."""
    _check_size(path, MAX_BYTES[path.name])
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"its {path.name} is no JSON ({first_line(error)})") from error
    if not isinstance(plain, dict):
        raise ValueError(f"its {path.name} holds a {type(plain).__name__}, a mapping is expected")
    return plain


def _check_size(path: Path, limit: int) -> None:
    if path.exists():
        if not path.is_file():
            raise ValueError(f"its {path.name} is no file")
        if path.stat().st_size > limit:
            raise ValueError(f"its {path.name} has more than {limit >> 20} MiB")


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
