"""A job: one resolved run in plain values, as it is handed from who composes it to the ranks that obey."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.config import Config, from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.resolve import Resolved, World, resolve_in

LOCK, HOLDER = ".lock", ".holder"
"""In a folder of a run or a sweep: what whoever works there holds, and who that is."""


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to know; plain, so that it can travel as JSON."""

    config: dict[str, Any]
    world: dict[str, Any]
    run_id: str
    run_folder: str
    """Absolute."""
    overrides: list[str] = field(default_factory=list)
    """What was typed."""
    command: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines for the start-up table, such as what differs from the run that is repeated."""
    in_sweep: bool = False
    """Whether it is one of several jobs of ``-m``."""
    action: str = "train"
    """train, eval, predict or generate."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of an action other than training."""
    checkpoint: str | None = None
    """The checkpoint folder to restore from."""
    resumed: bool = False
    """Whether it continues in its own run folder, which exists."""
    parent: str | None = None
    """The checkpoint that a new run starts from."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for each of its processes, such as its share of the machine beside other jobs."""
    started: float = field(default_factory=time.time)
    """When the command was typed, in Unix seconds."""

    def resolved(self) -> Resolved:
        """The typed configuration with everything derived from it."""
        return resolve_in(from_plain(self.config), World(**self.world))

    def dumps(self) -> str:
        """The job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Job":
        """A job from :meth:`dumps`."""
        return cls(**json.loads(text))


def make_job(
    config: Config,
    world: World,
    *,
    experiment: str,
    overrides: Sequence[str],
    command: Sequence[str],
    notes: Sequence[str] = (),
    run_id: str | None = None,
    in_sweep: bool = False,
) -> Job:
    """A job whose run folder will be ``output_root/<experiment>/<run id>``; makes nothing."""
    run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = Path(config.output_root).absolute() / experiment / run_id
    return Job(
        config=to_plain(config),
        world=asdict(world),
        run_id=run_id,
        run_folder=str(folder),
        overrides=list(overrides),
        command=list(command),
        notes=list(notes),
        in_sweep=in_sweep,
    )


def with_folder(job: Job) -> Job:
    """The job with its run folder made; under another run id if somebody has been there in the same second.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    folder, run_id = Path(job.run_folder), job.run_id
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                run_id = f"{job.run_id}-{secrets.token_hex(2)}"
                folder = folder.with_name(run_id)
        (folder / "ranks").mkdir()
    except OSError as error:
        raise unwritable(folder, error) from error
    return replace(job, run_id=run_id, run_folder=str(folder))


@contextlib.contextmanager
def in_run_folder(job: Job) -> Iterator[Job]:
    """The job with its run folder made, unless it continues in its own, and held against others while the block lasts.

    The composing process holds it, not the ranks, which end with that one; the operating system lets go of it where it
    is killed.

    Raises:
        ConfigError: the folder cannot be made or written to, or another process trains there.
    """
    if not job.resumed:
        job = with_folder(job)
    with held(Path(job.run_folder), taken=running):
        yield job


@contextlib.contextmanager
def held(folder: Path, *, taken: Callable[[Path], ConfigError]) -> Iterator[None]:
    """Hold a folder that exists against other processes while the block lasts; it says who does.

    Raises:
        ConfigError: ``taken(folder)``, where another process holds it; or it cannot be written to.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
        (folder / HOLDER).unlink(missing_ok=True)  # of one that was killed, or a stranger's link to elsewhere
        with (folder / HOLDER).open("x", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout as error:
        raise taken(folder) from error
    except OSError as error:
        lock.release()
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / HOLDER).unlink()
        lock.release()


def holder_of(folder: Path) -> str:
    """Who holds a folder, as far as that is known."""
    with contextlib.suppress(OSError):
        text = (folder / HOLDER).read_text(encoding="utf-8", errors="replace")[:200].strip()
        return "".join(filter(str.isprintable, text)) or "another process"
    return "another process"


def check_idle(folder: Path, *, word: str | None = None) -> None:
    """Whether nobody trains in a run folder; writes nothing.

    Raises:
        ConfigError: somebody does, and who; ``word`` is what was typed.
    """
    from filelock import FileLock, Timeout

    if not (folder / LOCK).exists():
        return
    try:
        with FileLock(folder / LOCK, timeout=0):
            pass
    except Timeout as error:
        raise running(folder, word=word) from error
    except OSError as error:
        raise unwritable(folder / LOCK, error) from error


def running(folder: Path, *, word: str | None = None) -> ConfigError:
    """The error for a run folder in which somebody trains: who does."""
    who = holder_of(folder)
    return ConfigError(f"{word or folder}: {who} trains in {folder}: wait until it has ended, or end it first")


def check_writable(root: str) -> None:
    """Whether a run folder could be made under ``root``; leaves nothing behind.

    Raises:
        ConfigError: the nearest folder that exists takes no new one.
    """
    path = Path(root).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise ConfigError(f"output_root={root}: {path} is no folder; type output_root=<another folder>")
    try:  # permissions do not tell all: a superuser has every one, and some file systems take no folder
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=path))
    except OSError as error:
        raise ConfigError(
            f"output_root={root}: {path} cannot be written to ({error.strerror}); type output_root=<another folder>"
        ) from error


def config_dir(command: Sequence[str]) -> str | None:
    """The folder of a user's own configuration files that a command names with ``--config-dir``."""
    for place, word in enumerate(command):
        if word in ("--config-dir", "-cd"):
            return command[place + 1] if place + 1 < len(command) else None
        if word.startswith("--config-dir="):
            return word.partition("=")[2]
    return None


def start_command(job: Job) -> str:
    """What was typed to start this run, up to its overrides, so that it works where the run was started."""
    found = shutil.which("python")
    if found is not None and os.path.dirname(found) == os.path.dirname(sys.executable):
        python = "python"  # the environment is activated
    else:
        inside = sys.executable.startswith(os.getcwd() + os.sep)
        python = shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)
    script = len(job.command) > 1 and job.command[1].endswith(".py")
    start = f"{python} {shlex.quote(job.command[1])}" if script else f"{python} -m shardwise train"
    own = config_dir(job.command)
    return start if own is None else f"{start} --config-dir {shlex.quote(own)}"


def unwritable(path: str | os.PathLike[str], error: OSError) -> ConfigError:
    """The error for a run folder that cannot be written: what, why, and what to type."""
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}; free some space, or type output_root=<another folder>"
    )


def write_json(path: Path, plain: Any) -> None:
    """JSON under a temporary name first, so that nobody reads half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(plain, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
