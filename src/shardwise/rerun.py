"""``rerun=`` and ``resume=``: a run again, on from its newest checkpoint, or a new one from a checkpoint.

What was typed then comes first, what is typed now follows. A folder or a checkpoint may come from a stranger: neither
says which packages may be named, nor where Hydra looks for files. Nothing here writes.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shardwise.config import Config, from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.groups import WORDS
from shardwise.job import Job, check_idle, config_dir
from shardwise.provenance import MASK
from shardwise.resolve import World, find_dims, find_world

LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
"""What, typed again, makes a completed run longer."""
MICRO_SIZE = ("batch", "micro_size")
HELD = ("strategy", "precision", "batch", "task", "model", "data", "optimizer", "callbacks")
"""Groups that decide on how much memory a micro-batch takes."""
SHOWN = 3
"""Run folders, or damaged checkpoints, that one line names."""


class NothingToResumeError(ConfigError):
    """A run folder without a whole checkpoint, which ``resume=last`` passes over."""


@dataclass(frozen=True)
class Repeated:
    """What was typed then, followed by what is typed now, and where the run goes on."""

    word: str
    """As it was typed: ``resume=outputs/digits/...``."""
    typed: list[str]
    """What else is typed now."""
    stored: list[str]
    """What was typed then, without what only a user may say."""
    config: dict[str, Any]
    """The resolved configuration of then."""
    record: Mapping[str, Any] | None = None
    """What is known of code, versions and hardware of then; None if that cannot be read."""
    folder: Path | None = None
    """The run folder in which it continues; None for a new run."""
    checkpoint: str | None = None
    """The checkpoint that it starts from; None for the first step."""
    notes: list[str] = field(default_factory=list)
    """Lines for the start-up table."""
    completed: int | None = None
    """Optimizer steps of a run that is completed and is to be resumed."""

    @classmethod
    def from_argv(
        cls, argv: Sequence[str], *, experiment_folder: Callable[[list[str]], Path] | None = None
    ) -> "Repeated | None":
        """The run that ``rerun=`` or ``resume=`` names, or None where neither is typed.

        Args:
            argv: the command line.
            experiment_folder: from the rest of the command line to the folder that holds the experiment's runs, for
                ``resume=last``.

        Raises:
            ConfigError: what is named is no run and no checkpoint, cannot be read, holds nothing to resume, or runs.
        """
        named = [argument for argument in argv if "=" in argument and key_of(argument) in WORDS]
        if not named:
            return None
        if named[0][0] in "+~ ":
            raise ConfigError(f"{named[0]}: type {named[0].lstrip('+~ ')}")
        if len(named) > 1:
            raise ConfigError(f"{' '.join(named)}: one run can be repeated at a time")
        verb, _, text = named[0].partition("=")
        text = text.strip("'\"")
        if "-m" in argv or "--multirun" in argv:
            repeats = "repeats" if verb == "rerun" else "continues"
            raise ConfigError(f"{named[0]} {repeats} one run: leave -m out, or type the sweep without {verb}=")
        if not text:
            accepted = "a run folder" if verb == "rerun" else "a run folder, a checkpoint, or last"
            raise ConfigError(f"{named[0]}: {accepted} is needed, such as {verb}=outputs/<experiment>/<run id>")
        typed = [argument for argument in argv if argument != named[0]]
        if verb == "resume" and "init_from" in map(key_of, typed):
            raise ConfigError(f"init_from= beside {named[0]}: a checkpoint brings the weights, leave one of them out")
        if named[0] == "resume=last":
            assert experiment_folder is not None
            return _newest(named[0], experiment_folder(typed), typed)
        folder = _run_folder(named[0], text) if verb == "rerun" or "://" not in text else None
        if folder is None:  # a checkpoint, or nothing
            return _from_checkpoint(named[0], text, typed)
        repeated = _of_folder(named[0], folder, typed)
        if (action := (repeated.record or {}).get("action", "train")) != "train":
            raise ConfigError(f"{named[0]} is of {action}, which trains nothing: name the run that it used")
        return repeated if verb == "rerun" else _continued(repeated, folder)

    @property
    def argv(self) -> list[str]:
        """The command line that says all of it, each key once where the last word on it is all that counts."""
        once = ["hydra.mode=RUN"] if any(line.startswith("sweep=") for line in self.stored) else []
        return [*effective(self.stored, [*once, *self.typed])]  # one job of a sweep, not all of them again

    def done(self, config: Config | None = None) -> str | None:
        """Why there is nothing to resume, in a line, or None; with the composed ``config`` what it says counts too."""
        if self.completed is None:
            return None
        asked = 0 if config is None else config.trainer.max_steps
        if any(key_of(line) in LENGTHS for line in self.typed) and not 0 < asked <= self.completed:
            return None
        steps = f"{self.completed:,} step{'' if self.completed == 1 else 's'}"
        return (
            f"{self.folder} is completed after {steps}: there is nothing to resume; to train on, type "
            f"resume={self.folder} trainer.max_steps=<more than {self.completed}>"
        )

    def keep(self, config: Config) -> tuple[Config, list[str]]:
        """``config`` with the values of then where only the defaults have changed since, and a line for each.

        Raises:
            ConfigError: the run would go on saving elsewhere than it did, as only a user can say where that is.
        """
        from shardwise.hydra_setup import compose_plain

        then = {key: value for key, value in self.config.items() if key not in ("derived", "plugins")}
        now, asked, notes = _flat(compose_plain(self.stored)), to_plain(config), []
        flat_asked, whose, typed = _flat(asked), _whose(self), tuple(f"{key_of(line)}." for line in self.typed)
        for key, value in _flat(then).items():
            name = ".".join(key)
            if key not in now:
                notes.append(f"{name}={value!r} of {whose} is no key any more and is left out")
            elif MASK in str(value) or f"{name}.".startswith(typed):
                continue
            elif name == "checkpoint.folder" and value == os.path.abspath(str(now[key])):
                continue  # it is made absolute when a run begins
            elif key == MICRO_SIZE and flat_asked[key] == "auto":
                continue  # found then: see below
            elif now[key] != value and key in flat_asked and flat_asked[key] == now[key]:
                why = never_taken(name, str(value), roaming=self.checkpoint is None or self.folder is not None)
                if why is not None:
                    text = f"{name}={value!r} of {whose} is {why}, which is never taken from there"
                    if self.folder is not None and key[0] == "checkpoint":  # or it would save where nobody looks
                        raise ConfigError(f"{self.word}: {text}: type {name}=... again")
                    notes.append(f"{text}: type {name}=... again for it")
                    continue
                _put(asked, key, value)
                notes.append(f"{name}={value!r} is kept from {whose} (the default is {now[key]!r} now)")
        found = _flat(then).get(MICRO_SIZE)
        if isinstance(found, int) and flat_asked[MICRO_SIZE] == "auto" and not "batch.micro_size.".startswith(typed):
            if takes_the_same_memory(asked, self.config, world=find_world(from_plain(asked))):
                _put(asked, MICRO_SIZE, found)
                notes.append(f"batch.micro_size={found!r} is what {whose} found to fit, and is kept")
            else:  # it is found again, which is no change of what was typed
                then["batch"] = {**then["batch"], "micro_size": "auto"}
        changed = [
            f"{'.'.join(key)} {value!r} -> {flat_now[key]!r}"
            for flat_now in (_flat(asked),)
            for key, value in _flat(then).items()
            if key in flat_now and flat_now[key] != value and MASK not in str(value) and key != ("output_root",)
        ]
        if changed:
            more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
            notes.append(f"changed since {whose}: {', '.join(changed[:8])}{more}")
        if self.checkpoint is None and (parent := (self.record or {}).get("parent")):
            notes.append(
                f"{whose} began from {parent}, this one begins at its first step: resume={parent} goes from there"
            )
        return from_plain(asked), notes

    def differences(self) -> list[str]:
        """What differs between then and now in code, versions and hardware, a line each."""
        from shardwise.provenance import collect, differences

        if self.record is None:
            return [f"the record of {_whose(self)} cannot be read: what differs in code and versions is unknown"]
        now = collect(command=[], seed=0, ranks=[])
        if set(self.record) == {"versions"}:  # of a checkpoint, which knows no more
            then = {name: str(version).partition("+")[0] for name, version in self.record["versions"].items()}
            known = {name: version for name, version in now["versions"].items() if name in then}
            lines = differences({"versions": then}, {"versions": known})
        else:
            lines = differences(self.record, now)
        same = "versions are" if set(self.record) == {"versions"} else "code, versions and hardware are"
        return [f"differs from {_whose(self)}: {line}" for line in lines] or [f"{same} those of {_whose(self)}"]

    def applied(self, job: Job) -> Job:
        """The job with what it continues or starts from."""
        notes = [*self.notes, *job.notes]
        if self.checkpoint is None:
            return replace(job, notes=notes)
        if self.folder is None:
            return replace(job, notes=notes, checkpoint=self.checkpoint, parent=self.checkpoint)
        parent = (self.record or {}).get("parent")
        return replace(
            job,
            notes=notes,
            checkpoint=self.checkpoint,
            parent=parent if isinstance(parent, str) else None,
            resumed=True,
            run_id=self.folder.name,
            run_folder=str(self.folder),
        )


def takes_the_same_memory(asked: Mapping[str, Any], then: Mapping[str, Any], *, world: World) -> bool:
    """Whether a run of ``asked`` in ``world`` is laid out as the one of ``then`` was, and holds the same in memory.

    Args:
        asked: a plain configuration.
        then: the ``config.yaml`` of a run folder; what a checkpoint holds does not tell, and is taken to differ.
        world: where the run of ``asked`` is to happen.

    Raises:
        ConfigError: ``asked`` has no layout in ``world``.
    """
    derived = then.get("derived")
    if not isinstance(derived, dict):
        return False
    held = [
        {key: value for key, value in _flat(dict(plain)).items() if key[0] in HELD and key != MICRO_SIZE}
        for plain in (asked, then)
    ]
    places = {"devices": world.devices, "num_nodes": world.num_nodes, "accelerator": world.accelerator}
    laid_out = {**find_dims(from_plain(asked), world).shape, **places}
    return held[0] == held[1] and all(derived.get(key) == value for key, value in laid_out.items())


def effective(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Overrides of then followed by those of now, without the former that the latter replace.

    Two that are merged (mappings), or of which one removes a key, both stay.
    """
    lines: list[str] = []
    for line in [*stored, *typed]:
        replaced = [other for other in lines if _replaces(line, other)]
        for other in replaced:
            lines.remove(other)
            added = re.match(r"\+*", other)
            if added is not None and not line.startswith("+"):
                line = added[0] + line  # what adds a key has to go on adding it
        lines.append(line)
    return lines


def _replaces(line: str, other: str) -> bool:
    if line.startswith(("-", "~")) or other.startswith(("-", "~")) or "=" not in line or "=" not in other:
        return False
    mapping = any(text.partition("=")[2].lstrip(" '\"").startswith("{") for text in (line, other))
    return key_of(line) == key_of(other) and not mapping


# ---- from a run folder ---------------------------------------------------------------------------------------------


def _run_folder(word: str, text: str) -> Path | None:
    """The run folder, absolute; None where ``resume=`` names something else."""
    verb, folder = word.partition("=")[0], Path(text).expanduser()
    try:
        names = set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        names = set()
    except OSError as error:
        raise ConfigError(f"{verb}={folder} cannot be read ({error.strerror})") from error
    missing = sorted({"overrides.yaml", "config.yaml"} - names)
    if not missing:
        return Path(os.path.abspath(folder))
    if verb == "resume" and not names & {"overrides.yaml", "config.yaml", "ranks"}:
        return None
    lost = f" ({' and '.join(missing)} missing)" if len(missing) == 1 or "ranks" in names else ""
    raise ConfigError(
        f"{verb}={folder} is no run folder: one holds overrides.yaml and config.yaml, such as "
        f"outputs/<experiment>/<run id>{lost}"
    )


def _is_run_folder(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "overrides.yaml").is_file() and (folder / "config.yaml").is_file()
    return False


def _of_folder(word: str, folder: Path, typed: list[str]) -> Repeated:
    """What a run's folder says of it."""
    from shardwise.hydra_setup import read_yaml

    record = None
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    then = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        then = config_dir([str(word) for word in record["command"]])  # type: ignore[index]
    if then is not None and config_dir(typed) is None:
        flag = f"--config-dir {then}"
        raise ConfigError(f"{word} was typed with {flag}, which is never taken from a folder: add {flag}")
    stored, config = read_yaml(folder / "overrides.yaml"), read_yaml(folder / "config.yaml")
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.yaml'} is damaged: a mapping is expected")
    return Repeated(
        word=word,
        typed=typed,
        stored=admitted(stored, typed, source=str(folder / "overrides.yaml")),
        config={str(key): value for key, value in config.items()},
        record=record if isinstance(record, dict) else None,
    )


def admitted(stored: Any, typed: Sequence[str], *, source: str, roaming: bool = True) -> list[str]:
    """The overrides of then that may be said again.

    Which packages may be named, where to look for files, what of this machine is told, and to whom, is the user's word,
    not a folder's.

    Args:
        stored: the overrides of then.
        typed: those of now.
        source: the file that holds the former.
        roaming: whether ``output_root`` may lead away from the folder in which the command is typed.

    Raises:
        ConfigError: one of the former has to be typed again.
    """
    from shardwise.checkpoint.manifest import printable

    if not isinstance(stored, list) or not all(isinstance(line, str) for line in stored):
        raise ConfigError(f"{source} is damaged: a list of overrides is expected")
    keys, admitted = [key_of(line) for line in typed], []
    for line in map(str.strip, stored):
        key, value = key_of(line), line.partition("=")[2]
        if line.startswith("-") or re.split("[./@]", key)[0] in ("plugins", "hydra", *WORDS):
            continue
        secret, why = MASK in line, never_taken(key, value if "=" in line else line, roaming=roaming)
        if not secret and why is None:
            admitted.append(line)
            continue
        known = any(f"{one}.".startswith(f"{key}.") for one in keys)
        silent = key.startswith("logger") and {"logger=none", "~logger"} & set(typed)
        if known or silent or (key == "output_root" and not secret):  # of that one, ``keep`` has a note
            continue
        name = printable(key)
        if secret:
            raise ConfigError(f"{name} is a secret that {source} does not hold: type {name}=... again")
        raise ConfigError(
            f"{name} is {why}, which is never taken from a folder or a checkpoint; in {source} it is "
            f"{printable(value)[:200]}: type {name}=... again"
        )
    return admitted


def never_taken(key: str, value: str, *, roaming: bool) -> str | None:
    """Why a value is the user's to type, whatever a folder or a checkpoint says; None if it is not.

    An interpolation may read this machine's environment; a logger and a store, told where, hand on a key, metrics and
    weights.

    Args:
        key: dotted, such as ``logger.settings.base_url``.
        value: as text, in Hydra's grammar or as it came out of it.
        roaming: whether ``output_root`` may lead away from the folder in which the command is typed.
    """
    plain = value.replace("\\", "")  # Hydra's grammar writes a colon, or a brace, with or without one
    slots = [re.split("[./]", part) for part in re.split("[@:]", key)]
    if re.search(r"\$\{[^$]*:", plain) or "${" in key:  # of another key it is harmless, and needs no colon
        return "an interpolation"
    if any(slot[0] == "logger" for slot in slots) and (
        any("settings" in slot for slot in slots)
        or "://" in plain
        or (key == "logger" and plain.lstrip(" '\"").startswith("{"))
    ):
        return "where a logger sends what it knows"
    if any(slot[0] == "checkpoint" for slot in slots) and "://" in plain:
        return "a place elsewhere for the weights"
    if key == "output_root" and not roaming:
        path = Path(plain.strip(" '\""))
        if path.is_absolute() or path.parts[:1] == ("~",) or ".." in path.parts:
            return "a place elsewhere for the run folder"
    return None


def _continued(repeated: Repeated, folder: Path) -> Repeated:
    """The same run on from its newest whole checkpoint, in its own folder."""
    from shardwise.checkpoint.find import newest_whole, stores_of
    from shardwise.checkpoint.manifest import step_of

    check_idle(folder, word=repeated.word)
    result: Any = None
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    repeated = replace(repeated, folder=folder)
    if isinstance(result, dict) and result.get("status") == "completed" and isinstance(result.get("steps"), int):
        repeated = replace(repeated, completed=result["steps"])
        if repeated.done():
            return repeated
    stores = stores_of(folder)
    try:
        found, skipped = newest_whole(stores, shown=str(folder))
    except ConfigError as error:
        raise ConfigError(f"{repeated.word}: {error}") from error
    broken = _listed([f"{other} ({problems[0]})" for other, problems in skipped.items()])
    if found is None:
        places = " or ".join(store.url for store in stores)
        held = f"no whole checkpoint in {places}: {broken}" if broken else f"no checkpoint in {places}"
        again = f"type rerun={folder} to train from the start"
        raise NothingToResumeError(f"{repeated.word}: there is {held}; {again}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{repeated.word}: {folder} cannot be written to, and a resumed run continues in it")
    notes = [f"resumed from step {step_of(found.name)} of {folder}"]
    if found.store is not stores[0]:
        notes.append(f"its checkpoint is {found.url}, as none in {stores[0].url} is whole and newer")
    if broken:
        notes.append(f"newer, but not whole, and left out: {broken}")
    return replace(repeated, checkpoint=found.url, notes=notes)


def _newest(word: str, experiment: Path, typed: list[str]) -> Repeated:
    """The newest run of an experiment that can be resumed, or is completed."""
    passed: list[str] = []
    try:
        candidates = [path for path in experiment.iterdir() if path.is_dir()] if experiment.is_dir() else []
        runs = sorted((path for path in candidates if (path / "ranks").is_dir() or _is_run_folder(path)), key=_started)
    except OSError as error:
        raise ConfigError(f"{word}: {experiment} cannot be read ({error.strerror})") from error
    for run in reversed(runs):
        if not _is_run_folder(run):
            check_idle(run, word=word)
            passed.append(f"{run.name} (it ended before it wrote its config.yaml)")
            continue
        try:
            found = _of_folder(f"resume={run}", run, typed)
            if (found.record or {}).get("action", "train") != "train":
                continue  # an evaluation, or the like
            found = _continued(found, run)
        except NothingToResumeError as error:
            passed.append(f"{run.name} ({str(error).partition(': ')[2].partition('; type ')[0]})")
            continue
        return replace(found, notes=[*found.notes, *([f"newer runs passed over: {_listed(passed)}"] if passed else [])])
    why = f" that can be resumed: {_listed(passed)}" if passed else ""
    raise ConfigError(
        f"{word}: {experiment} holds no run{why}; type resume=<run folder>, or the experiment or output_root= of the "
        f"run that is meant"
    )


def _started(folder: Path) -> tuple[float, str]:
    """When a run began, in Unix seconds, by its own record or its name; not when something in its folder changed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        first = record["attempts"][0] if record.get("attempts") else record
        return datetime.fromisoformat(first["start_time"]).timestamp(), folder.name
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(folder.name[:15], "%Y%m%d-%H%M%S")), folder.name
    return 0.0, folder.name


# ---- from a checkpoint ---------------------------------------------------------------------------------------------


def _from_checkpoint(word: str, text: str, typed: list[str]) -> Repeated:
    """A new run from a checkpoint, which says by itself what was typed then."""
    from shardwise.checkpoint.find import find_checkpoint
    from shardwise.checkpoint.manifest import printable, step_of
    from shardwise.checkpoint.reader import STATE, read_state

    found = find_checkpoint(text if "://" in text else os.path.expanduser(text))
    url, manifest = found.url, found.store.manifest(found.name)
    state = read_state(url, configured=True)
    run_id, versions = printable(manifest.get("run_id")), manifest.get("versions")
    return Repeated(
        word=word,
        typed=typed,
        stored=admitted(state.get("overrides"), typed, source=f"{printable(url)}/{STATE}", roaming=False),
        config=state["config"],
        record={"versions": versions} if isinstance(versions, dict) else None,
        checkpoint=url,
        notes=[f"starts from step {step_of(found.name)} of {url} (of the run {run_id})", *found.notes()],
    )


# ---- words and values ----------------------------------------------------------------------------------------------


def _whose(repeated: Repeated) -> str:
    if repeated.checkpoint is None:
        return "the repeated run"
    return "the run of the checkpoint" if repeated.folder is None else "the resumed run"


def _listed(items: Sequence[str]) -> str:
    more = len(items) - SHOWN
    return ", ".join([*items[:SHOWN], *([f"{more} more"] if more > 0 else [])])


def key_of(override: str) -> str:
    """The key that an override is about: ``a.b`` of ``+a.b=c``."""
    return override.lstrip("+~ ").partition("=")[0].strip()


def _flat(plain: dict[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, (*prefix, str(key))))
        else:
            flat[(*prefix, str(key))] = value
    return flat


def _put(plain: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    for part in key[:-1]:
        plain = plain[part]
    plain[key[-1]] = value
