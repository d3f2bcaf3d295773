"""The command line: ``python train.py ...``, which is ``python -m shardwise train ...``.

It composes, checks and resolves in one process, and hands a plain job to the ranks. torch is imported only once nothing
that the framework owns is wrong any more.
"""

import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import PLUGGED_IN, Config
from shardwise.errors import ConfigError
from shardwise.resolve import Resolved, is_launched_rank, resolve

USER_ERROR = 2
"""Exit status for a mistake of the user's."""


def train(argv: Sequence[str] | None = None) -> int:
    """Compose what ``argv`` says (the command line by default), and run it; returns the exit status.

    A launched rank other than the first composes nothing: it waits for the job and obeys.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(flag in argv for flag in ("--help", "-h")):
        from shardwise.help import help_page

        print(help_page())
        return 0
    if not is_launched_rank():
        return _status_of(lambda: _compose(argv))
    from shardwise.signals import die_with_parent

    die_with_parent()
    if os.environ["RANK"] != "0":
        from shardwise.launch import hear_from_rank_zero

        return _status_of(hear_from_rank_zero, rank_zero=False)
    return _status_of(lambda: _compose_for_ranks(argv))


def _status_of(action: Any, *, rank_zero: bool = True) -> int:
    """Run ``action``; what goes wrong is printed as it deserves, and becomes an exit status."""
    full = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    try:
        return action() or 0
    except ConfigError as error:
        if rank_zero:
            print(traceback.format_exc() if full else f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        if error.code == 130 and rank_zero:
            print("interrupted", file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        from shardwise.launch import RanksFailedError
        from shardwise.sweep import SweepFailedError

        if isinstance(error, (RanksFailedError, SweepFailedError)):
            text = str(error)
            print(text if text.startswith("Traceback") else f"error: {text}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def _compose(argv: list[str]) -> None:
    from shardwise.hydra_setup import run_hydra

    repeated = _Repeated.from_argv(argv)
    typed = argv if repeated is None else repeated.argv

    def run(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        from shardwise.launch import launch

        launch(_prepare(config, overrides, choices, repeated))

    run_hydra(run, typed)


def _compose_for_ranks(argv: list[str]) -> None:
    """As rank 0 of ranks that exist already: compose, tell the others, and take part."""
    from shardwise.hydra_setup import run_hydra
    from shardwise.launch import launch, tell_ranks

    told = False

    def run(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        nonlocal told
        job = _prepare(config, overrides, choices, None)
        told = True
        tell_ranks(job)
        launch(job)

    try:
        for argument in argv:
            if argument in ("-m", "--multirun") or argument.startswith("rerun="):
                raise ConfigError(f"{argument} under torchrun would run once a rank: type it with python train.py")
        run_hydra(run, argv)
    except Exception:
        if not told:
            tell_ranks(None, USER_ERROR)
        raise
    if not told:  # --cfg and --info run nothing
        tell_ranks(None)


def _prepare(config: Config, overrides: list[str], choices: dict[str, Any], repeated: "_Repeated | None") -> Any:
    """Everything that can be wrong is found here; then the run folder is made."""
    from shardwise.job import check_writable, make_job, with_folder

    notes: list[str] = []
    if repeated is not None:
        config, notes = repeated.keep(config)
    experiment = _experiment(config, choices)
    resolved = resolve(config)
    check_writable(config.output_root)
    check_plugged_in(resolved)
    if repeated is not None:
        notes += repeated.differences()
    job = make_job(
        config,
        resolved.world,
        experiment=experiment,
        overrides=overrides,
        command=["python", *sys.orig_argv[1:]],
        notes=notes,
    )
    return with_folder(job)


def _experiment(config: Config, choices: dict[str, Any]) -> str:
    name = config.experiment_name or choices.get("experiment") or choices.get("data") or "default"
    if str(name).strip() in ("", ".", ".."):
        raise ConfigError(f"experiment_name={name}: the name of a folder is needed, such as experiment_name=first_try")
    return str(name).replace("/", "_")


def check_plugged_in(resolved: Resolved) -> None:
    """Whether what the user plugs in exists and takes its arguments; imports it, and torch with it."""
    from shardwise.slots import check_names

    config = resolved.config
    nodes = {slot: getattr(config, slot) for slot in PLUGGED_IN if slot != "callbacks"}
    nodes |= {f"callbacks.{name}": node for name, node in config.callbacks.items()}
    check_names(nodes, plugins=config.plugins)
    if resolved.world.launch == "local":
        from shardwise.launch import warm_up

        warm_up()
    from shardwise.build import check_slots

    check_slots(config, resolved.dims)


def run_sweep(composed: list[tuple[Config, list[str], dict[str, Any]]], folder: Path) -> list[dict[str, Any]]:
    """Check every job of a sweep, then run them all; returns their results.

    Raises:
        ConfigError: there is no job, or one of them is wrong; nothing has run then.
        SweepFailedError: a job failed.
    """
    from shardwise.job import check_writable, make_job

    if not composed:
        raise ConfigError("the sweep has no job: give some key two values, such as -m batch.global_size=32,64")
    if is_launched_rank():
        raise ConfigError("a sweep under torchrun would run once a rank: type it with python train.py")
    resolved = [resolve(config) for config, _, _ in composed]
    from shardwise.launch import warm_up
    from shardwise.sweep import run_jobs

    warm_up()
    for one in resolved:
        check_writable(one.config.output_root)
        check_plugged_in(one)
    jobs = [
        make_job(
            config,
            one.world,
            experiment=_experiment(config, choices),
            overrides=overrides,
            command=["python", *sys.orig_argv[1:]],
            run_id=f"{folder.name}-{number}",
            in_sweep=True,
        )
        for number, ((config, overrides, choices), one) in enumerate(zip(composed, resolved, strict=True))
    ]
    outcomes = run_jobs(jobs, folder=folder, on_failure=composed[0][0].sweep.on_failure)
    return [outcome.result or {} for outcome in outcomes]


class _Repeated:
    """A run that is repeated from its folder: what was typed then, followed by what is typed now."""

    def __init__(self, folder: Path, stored: list[str], rest: list[str]) -> None:
        self.folder = folder
        self.stored = stored
        self.argv = [*stored, *rest]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "_Repeated | None":
        """The run that ``rerun=<folder>`` names, or None.

        Raises:
            ConfigError: the folder is no run's.
        """
        from shardwise.hydra_setup import read_yaml
        from shardwise.provenance import MASK

        named = [argument for argument in argv if argument.startswith("rerun=")]
        if not named:
            return None
        if len(named) > 1:
            raise ConfigError(f"{' '.join(named)}: one run can be repeated at a time")
        if "-m" in argv or "--multirun" in argv:
            raise ConfigError(f"{named[0]} repeats one run: leave -m out, or type the sweep without rerun=")
        folder = Path(named[0].partition("=")[2].strip("'\"")).expanduser()
        path = folder / "overrides.yaml"
        if not path.is_file() or not (folder / "config.yaml").is_file():
            raise ConfigError(
                f"rerun={folder} is no run folder: one holds overrides.yaml and config.yaml, such as "
                f"outputs/<experiment>/<run id>"
            )
        from shardwise.job import config_dir

        then = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
            then = config_dir([str(word) for word in record["command"]])
        if then is not None and config_dir(argv) is None:
            typed = f"--config-dir {then}"
            raise ConfigError(f"{named[0]} was typed with {typed}, which is never taken from a folder: add {typed}")
        stored = read_yaml(path)
        if not isinstance(stored, list) or not all(isinstance(line, str) for line in stored):
            raise ConfigError(f"{path} is damaged: a list of overrides is expected")
        rest = [argument for argument in argv if not argument.startswith("rerun=")]
        keys = {_key(line) for line in rest}
        # Which packages may be named, and where to look for files, is the user's word, not a folder's.
        stored = [
            line
            for line in map(str.strip, stored)
            if not line.startswith("-") and re.split("[./@]", _key(line))[0] not in ("plugins", "hydra")
        ]
        for line in stored:
            if MASK in line and _key(line) not in keys:
                raise ConfigError(f"{_key(line)} is a secret that {path} does not hold: type {_key(line)}=... again")
        stored = [line for line in stored if MASK not in line]
        if any(line.startswith("sweep=") for line in stored):
            rest.insert(0, "hydra.mode=RUN")  # one job of the sweep, not all of them again
        return cls(folder, stored, rest)

    def keep(self, config: Config) -> tuple[Config, list[str]]:
        """``config`` with the folder's values where only the defaults have changed since, and a line for each."""
        from shardwise.config import from_plain, to_plain
        from shardwise.hydra_setup import compose_plain, read_yaml
        from shardwise.provenance import MASK

        then = read_yaml(self.folder / "config.yaml")
        if not isinstance(then, dict):
            raise ConfigError(f"{self.folder / 'config.yaml'} is damaged: a mapping is expected")
        then.pop("derived", None)
        then.pop("plugins", None)
        now, asked, notes = _flat(compose_plain(self.stored)), to_plain(config), []
        flat_asked = _flat(asked)
        for key, value in _flat(then).items():
            if key not in now:
                notes.append(f"{'.'.join(key)}={value!r} of the repeated run is no key any more and is left out")
            elif MASK in str(value):
                continue
            elif now[key] != value and key in flat_asked and flat_asked[key] == now[key]:
                _put(asked, key, value)
                notes.append(
                    f"{'.'.join(key)}={value!r} is kept from the repeated run (the default is {now[key]!r} now)"
                )
        return from_plain(asked), notes

    def differences(self) -> list[str]:
        """What differs between then and now in code, versions and hardware, a line each."""
        from shardwise.provenance import collect, differences

        try:
            then = json.loads((self.folder / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return [f"{self.folder / 'provenance.json'} cannot be read ({error}): what differs is unknown"]
        now = collect(command=[], seed=0, ranks=[])
        return [f"differs from the repeated run: {line}" for line in differences(then, now)] or [
            "code, versions and hardware are those of the repeated run"
        ]


def _key(override: str) -> str:
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
