"""What varies among runs, found out from their configurations, and how each run is called for it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.report.runs import Run, Runs

NO_MATTER = (
    *("seed", "experiment_name", "output_root", "plugins", "sweep", "launch", "logger", "checkpoint"),
    *("profile", "hydra", "rerun", "resume"),
)
NO_MATTER_KEYS = (
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.enable_autolog_hparams"),
    *("trainer.enable_checkpointing", "trainer.log_every_n_steps", "trainer.default_root_dir", "trainer.profiler"),
    *("monitor.straggler_factor", "monitor.straggler_steps"),
)
"""Keys, and everything below them, that change no result."""
OF_A_LINE = ("batch", "optimizer.lr")
"""Keys that a plot has on an axis; the others make a line each."""
GOES_WITH_BATCH = ("trainer", "schedule", "optimizer", "batch")
"""Where a value that follows from the batch size (steps, warm-up) is no difference of its own."""
CHOICES = ("_target_", "kind", "rule", "name")
"""Last words of the keys that say which choice of its group a run has."""
MISSING = "-"
"""Of a run whose other settings leave no room for a key, such as the momentum of an optimizer that has none."""
PART = re.compile(r", (?=[\w.]+=)")
"""Between the parts of a description, whose values may have commas of their own."""
MAX_PARTS = 10
"""Keys that a label names."""


def label_runs(runs: Runs) -> None:
    """Fill in what varies among the runs, and every run's ``varying``, ``series`` and ``label``."""
    everything = list(runs)
    typed = [_typed(run) for run in everything]
    columns = dict(sorted(_columns(everything, typed).items(), key=lambda item: _rank(item[0])))
    runs.varying = list(columns)
    shared = set.intersection(*(set(run.overrides) for run in everything)) if everything else set()
    runs.shared = [line for line in (everything[0].overrides if everything else []) if line in shared]
    names = short_names(columns)
    lines = _line_columns(everything, columns)
    looks = {key: _apart(values) for key, values in columns.items()}
    seeds = len({str(run.seed) for run in everything}) > 1
    states: dict[tuple[str, ...], int] = {}
    called: dict[str, tuple[str, ...]] = {}
    for at, run in enumerate(everything):
        run.varying = {key: values[at] for key, values in columns.items()}
        run.series = describe({names[key]: looks[key][at] for key in lines}) or "all runs"
        state = tuple(repr(run.varying[key]) for key in lines)
        number = states.setdefault(state, len(states) + 1)
        if called.setdefault(run.series, state) != state:  # too close, or too many, to be told apart in few words
            run.series += f" (setting {number})"
        named = (key for key in columns if key in lines or _below(key, OF_A_LINE))
        parts = {names[key]: looks[key][at] for key in named}
        run.label = describe({**parts, **({"seed": run.seed} if seeds else {})}) or run.name


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Dotted key -> a name that a plot has room for, none of them twice."""
    keys = list(keys)
    special = {"batch.global_size": "batch", "lr_scaling.rule": "rule"}

    def short(key: str) -> str:
        parts = key.split(".")
        return special.get(key) or (parts[-2] if parts[-1] in CHOICES and len(parts) > 1 else parts[-1])

    shorts = [short(key) for key in keys]
    counts = Counter(shorts)
    return {key: name if counts[name] == 1 else key for key, name in zip(keys, shorts, strict=True)}


def describe(parts: dict[str, Any]) -> str:
    """``rule=linear, warmup_steps=50``."""
    parts = {name: value for name, value in parts.items() if value != MISSING}
    said = [f"{name}={show(value)}" for name, value in list(parts.items())[:MAX_PARTS]]
    return ", ".join(said) + (f" and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else "")


def telling(descriptions: Sequence[str], *, width: int) -> list[str]:
    """What is particular to each of several descriptions, no two the same and none much longer than ``width``.

    Parts that all of them have are left out; where what is left is too long, it is cut and numbered.
    """
    parts = [PART.split(text) for text in descriptions]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    own = [", ".join(part for part in split if part not in shared) for split in parts]
    short = [_cut(text or whole, width) for text, whole in zip(own, descriptions, strict=True)]
    counts = Counter(short)
    return [text if counts[text] == 1 else f"{at + 1}: {text[: width - 4]}" for at, text in enumerate(short)]


def _cut(text: str, width: int) -> str:
    """A description with its longest parts shortened in their middle."""
    parts = PART.split(text)
    room = width
    while room > 20 and len(", ".join(parts)) > width:
        room = room * 3 // 4
        parts = [part if len(part) <= room else f"{part[: room // 2 - 1]}…{part[-(room // 2) :]}" for part in parts]
    text = ", ".join(parts)
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-(width // 2) :]}"


def _shared_beginning(texts: Sequence[str]) -> int:
    """Letters with which all texts begin."""
    shortest, longest = min(texts), max(texts)  # what the first and the last in order share, all share
    return next((at for at, letter in enumerate(shortest) if longest[at : at + 1] != letter), len(shortest))


def _apart(values: Sequence[Any]) -> list[Any]:
    """Values that would look the same where they are shown, without the beginning and the end that they share."""
    texts = list(dict.fromkeys(value for value in values if isinstance(value, str) and value != MISSING))
    if len({show(text) for text in texts}) == len(texts):
        return list(values)
    first = _shared_beginning(texts)
    last = _shared_beginning([text[first:][::-1] for text in texts])
    first, last = max(0, first - 6), max(0, last - 6)
    short = {text: f"{'…' * (first > 0)}{text[first : len(text) - last]}{'…' * (last > 0)}" for text in texts}
    return [short.get(value, value) if isinstance(value, str) else value for value in values]


def show(value: Any) -> str:
    """A value of a configuration as short as it can be said."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}…{text[-19:]}"


def _columns(runs: Sequence[Run], typed: Sequence[dict[str, str]]) -> dict[str, list[Any]]:
    """Key -> its value in every run as it was resolved, for the keys that tell the runs apart.

    The choice of a group, its ``_target_`` or the like, stands for everything that follows from it. What was typed
    counts only where all runs say it, such as ``model=gpt_10m``: elsewhere a default may be the same.
    """
    known = dict.fromkeys(key for run in runs for key in run.settings)
    differing: dict[str, list[Any]] = {}
    for key in known:
        if _matters_not(key) or (any(run.settings.get(key) == "{}" for run in runs) and _has_below(key, known)):
            continue
        absent = "none" if key.endswith("._target_") else MISSING
        values = [run.settings.get(key, absent) for run in runs]
        if len({repr(value) for value in values}) > 1:
            differing[key] = _class_names(values) if key.endswith("_target_") else values
    choices = {key: values for key, values in differing.items() if key.rpartition(".")[2] in CHOICES}
    for word in dict.fromkeys(key for line in typed for key in line):
        said = [line[word] for line in typed if word in line]
        chosen = any(key.rpartition(".")[0] == word for key in choices)
        if len(said) == len(runs) and len(set(said)) > 1 and word not in known and not chosen:
            choices[word] = said
    explained: set[str] = set()
    useful = []
    for choice, states in choices.items():
        group = choice.rpartition(".")[0] if choice in differing else choice
        below = [
            key
            for key, values in differing.items()
            if key != choice
            and key not in OF_A_LINE
            and (group == "experiment" or key.startswith(f"{group}."))
            and _follows(values, states)
        ]
        explained.update(below)
        useful += [choice] if choice in differing or below else []
    kept = {choice: choices[choice] for choice in useful if choice not in explained}
    return {**kept, **{key: values for key, values in differing.items() if key not in explained}}


def _has_below(key: str, known: Iterable[str]) -> bool:
    return any(other.startswith(f"{key}.") for other in known)


def _line_columns(runs: Sequence[Run], columns: dict[str, list[Any]]) -> list[str]:
    """The keys that make a line of a plot: what varies but the batch, the rate, and what goes with the batch."""
    batches = [run.batch for run in runs]
    lines = []
    for key, values in columns.items():
        if _below(key, OF_A_LINE):
            continue
        if _below(key, GOES_WITH_BATCH) and len(set(batches)) > 1 and _follows(values, batches):
            continue
        lines.append(key)
    return lines


def _follows(values: Sequence[Any], states: Sequence[Any]) -> bool:
    """Whether each state has one value."""
    if len(states) != len(values):
        return False
    first: dict[Any, str] = {}
    return all(first.setdefault(state, repr(value)) == repr(value) for state, value in zip(states, values, strict=True))


def _rank(key: str) -> int:
    """The batch and the rate come first wherever keys are listed."""
    first = ("batch.global_size", "batch", "optimizer.lr")
    return first.index(key) if key in first else len(first)


def _typed(run: Run) -> dict[str, str]:
    pairs = (line.lstrip("+~ ").partition("=") for line in run.overrides if "=" in line)
    return {key.partition("@")[0].strip(): value.strip() for key, _, value in pairs}


def _matters_not(key: str) -> bool:
    return key in NO_MATTER_KEYS or _below(key, NO_MATTER)


def _below(key: str, parents: Iterable[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _class_names(values: Sequence[Any]) -> list[Any]:
    """Classes without their modules, unless two of them are called the same."""
    full = ["none" if value is None else value for value in values]
    last = [value.rpartition(".")[2] if isinstance(value, str) else value for value in full]
    return last if len(set(map(repr, last))) == len(set(map(repr, full))) else full
