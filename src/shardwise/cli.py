"""The command line: ``python train.py ...``, which is ``python -m shardwise train ...``.

It composes, checks and resolves in one process, and hands a plain job to the ranks. torch is imported only once nothing
that the framework owns is wrong any more.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import PLUGGED_IN, Config
from shardwise.errors import ConfigError, DivergedError
from shardwise.resolve import Resolved, is_launched_rank, resolve

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.rerun import Repeated
    from shardwise.sweep.planning import Planner

STARTED = time.time()
"""When the command was typed, give or take the start of Python."""

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
        return status_of(lambda: _compose(argv))
    from shardwise.signals import die_with_parent

    die_with_parent()
    if os.environ["RANK"] != "0":
        from shardwise.launch import hear_from_rank_zero

        return status_of(hear_from_rank_zero, rank_zero=False)
    return status_of(lambda: _compose_for_ranks(argv))


def status_of(action: Any, *, rank_zero: bool = True) -> int:
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
        from shardwise.sweep.pool import SweepFailedError

        if isinstance(error, (RanksFailedError, SweepFailedError, DivergedError)):
            text = str(error)
            print(text if text.startswith("Traceback") else f"error: {text}", file=sys.stderr)
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def _compose(argv: list[str]) -> int:
    """Compose and run, or say that there is nothing to resume; returns the exit status."""
    from shardwise.hydra_setup import run_hydra

    repeated, status = _repeated(argv), 0
    if repeated is not None and (done := repeated.done()):
        print(done)
        return 0

    def run(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        from shardwise.job import in_run_folder

        nonlocal status
        if job := _prepare(config, overrides, choices, repeated):
            with in_run_folder(job) as job:
                status = _run(job)

    run_hydra(run, argv if repeated is None else repeated.argv)
    return status


def _compose_for_ranks(argv: list[str]) -> int:
    """As rank 0 of ranks that exist already: compose, tell the others, and take part; returns the exit status."""
    from shardwise.hydra_setup import run_hydra
    from shardwise.launch import tell_ranks

    told, status = False, 0

    def run(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        from shardwise.job import in_run_folder

        nonlocal told, status
        if job := _prepare(config, overrides, choices, repeated):
            with in_run_folder(job) as job:
                told = True
                tell_ranks(job)
                status = _run(job)

    try:
        for argument in argv:
            if argument in ("-m", "--multirun") or argument.startswith("rerun="):
                raise ConfigError(f"{argument} under torchrun would run once a rank: type it with python train.py")
        repeated = _repeated(argv)
        if repeated is not None and (done := repeated.done()):
            print(done)
        else:
            run_hydra(run, argv if repeated is None else repeated.argv)
    except Exception:
        if not told:
            tell_ranks(None, USER_ERROR)
        raise
    if not told:  # --cfg and --info run nothing, and a completed run is not resumed
        tell_ranks(None)
    return status


def _repeated(argv: list[str]) -> "Repeated | None":
    """The run that ``rerun=`` or ``resume=`` names."""
    from shardwise.rerun import Repeated

    return Repeated.from_argv(argv, experiment_folder=_experiment_folder)


def _experiment_folder(argv: list[str]) -> Path:
    """The folder that holds the runs of the experiment that ``argv`` is about."""
    from shardwise.explain import check_flags
    from shardwise.hydra_setup import run_hydra
    from shardwise.job import config_dir

    folders: list[Path] = []
    own = config_dir(argv)
    flags = [] if own is None else ["--config-dir", own]  # --cfg and --info are for what is found

    def find(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        folders.append(Path(config.output_root).absolute() / experiment_of(config, choices))

    run_hydra(find, [*flags, *check_flags(argv)[1], "hydra.mode=RUN"])  # sweep= would run all of its jobs
    return folders[0]


def _run(job: "Job") -> int:
    """Run a job; what a failure leaves to do is added to the exception."""
    from shardwise.batch_finder import with_micro_size
    from shardwise.launch import launch
    from shardwise.signals import PREEMPTED

    job = with_micro_size(job)
    try:
        result = launch(job)
    except ConfigError:
        raise
    except SystemExit:
        from shardwise.summary import resume_command

        if command := resume_command(job):
            print(f"next:\n  {command}", file=sys.stderr)
        raise
    except Exception as error:
        from shardwise.summary import resume_command

        if command := resume_command(job):
            error.add_note(f"next:\n  {command}")
        raise
    return PREEMPTED if result.get("status") == "preempted" else 0


def _prepare(
    config: Config, overrides: list[str], choices: dict[str, Any], repeated: "Repeated | None"
) -> "Job | None":
    """Everything that can be wrong is found here, before anything is made; None where there is nothing to resume."""
    from shardwise.job import check_writable, make_job

    notes: list[str] = []
    if repeated is not None:
        config, notes = repeated.keep(config)
        if done := repeated.done(config):
            print(done)
            return None
    experiment = experiment_of(config, choices)
    resolved = resolve(config)
    if repeated is None or repeated.folder is None:
        check_writable(config.output_root)
    check_plugged_in(resolved)
    check_places(config, weights=repeated is None or repeated.checkpoint is None)
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
    job = replace(job, started=STARTED)
    return job if repeated is None else repeated.applied(job)


def check_places(config: Config, *, weights: bool = True) -> None:
    """Whether checkpoints can be written where they are to go, and the weights to start from can be read."""
    if config.checkpoint.folder is not None:
        from shardwise.checkpoint.store import Store

        if "://" not in config.checkpoint.folder:  # wherever the next command is typed
            config.checkpoint.folder = os.path.abspath(os.path.expanduser(config.checkpoint.folder))
        Store(config.checkpoint.folder).check_writable()
    if weights and config.init_from is not None:
        from shardwise.weights.loading import check_weights

        check_weights(config.init_from)


def experiment_of(config: Config, choices: dict[str, Any]) -> str:
    """The folder that holds the runs of one experiment, below the root of all output."""
    chosen = next(filter(None, (choices.get(group) for group in ("experiment", "sweep", "data"))), "default")
    name = config.experiment_name or chosen
    if str(name).strip() in ("", ".", ".."):
        raise ConfigError(f"experiment_name={name}: the name of a folder is needed, such as experiment_name=first_try")
    return str(name).replace("/", "_")


def check_plugged_in(resolved: Resolved, *, trains: bool = True) -> None:
    """Whether what the user plugs in exists and takes its arguments; imports it, and torch with it.

    Args:
        resolved: the configuration.
        trains: whether the callbacks are for training, and have to go with its batch and layout.
    """
    from shardwise.slots import check_names

    config = resolved.config
    nodes = {slot: getattr(config, slot) for slot in PLUGGED_IN if slot != "callbacks"}
    nodes |= {f"callbacks.{name}": node for name, node in config.callbacks.items()}
    check_names(nodes, plugins=config.plugins)
    if resolved.world.launch == "local" or config.batch.micro_size == "auto":
        from shardwise.launch import warm_up

        warm_up()
    from shardwise.build import check_callbacks, check_slots

    check_slots(config, resolved.dims)
    if trains:
        check_callbacks(resolved)


def run_sweep(composed: list[tuple[Config, list[str], dict[str, Any]]], folder: Path) -> list[dict[str, Any]]:
    """Check every job of a grid, then run them all; returns their results.

    Raises:
        ConfigError: there is no job, or one of them is wrong; nothing has run then.
        SweepFailedError: a job failed.
        SystemExit: a signal has ended the sweep, with status 75 where its job has saved its state.
    """
    if not composed:
        raise ConfigError("the sweep has no job: give some key two values, such as -m batch.global_size=32,64")
    planner = sweep_planner([config for config, _, _ in composed])
    from shardwise.sweep.grid import Grid
    from shardwise.sweep.pool import run_jobs

    with contextlib.closing(planner):
        planned = [planner.plan(*one, number=number + 1) for number, one in enumerate(composed)]
    largest = max(planned, key=lambda one: one.job.world["devices"])
    return [outcome.result or {} for outcome in run_jobs(Grid(planned), folder=folder, sample=largest)]


def sweep_planner(configs: Sequence[Config]) -> "Planner":
    """What turns composed configurations into the jobs of a sweep; lets the process that they come from warm up.

    Its ``close()`` ends the process that checks them.

    Args:
        configs: of all jobs of a grid, or of one of a search.

    Raises:
        ConfigError: the sweep as a whole cannot be.
    """
    if is_launched_rank():
        raise ConfigError("a sweep under torchrun would run once a rank: type it with python train.py")
    for config in configs:
        resolve(config)  # before torch is imported, which takes its time
    from shardwise.launch import warm_up
    from shardwise.sweep.checking import Checker
    from shardwise.sweep.planning import Planner, check_name, modules_of

    check_name(configs[0].sweep.name)
    warm_up(modules_of(configs))
    return Planner(
        command=["python", *sys.orig_argv[1:]],
        check=Checker(check_plugged_in),
        check_places=check_places,
        experiment=experiment_of,
        started=STARTED,
    )
