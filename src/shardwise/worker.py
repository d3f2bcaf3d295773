"""One rank from its first breath to its last: its output, the job, and a record of what went wrong.

A worker never composes and never reads ``sys.argv``. It dies with whoever started it.
"""

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import Any, TextIO

from shardwise.errors import ConfigError
from shardwise.job import Job, unwritable
from shardwise.provenance import without_secrets
from shardwise.signals import AGAIN_SECONDS, Stop, die_with_parent, owned_signals

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a terminal reads as a command; a log is read by people."""

PEER_SECONDS = 2.0
"""How long a rank that has lost another one waits to be ended: the cause is the other's to tell."""


def work(text: str) -> dict[str, Any]:
    """Entry point of a started rank: the job as JSON, and its result as plain values."""
    import torch.multiprocessing

    die_with_parent()
    # Or a loader's workers would come from a forkserver of this rank's own, which ends only when they do.
    multiprocessing.set_start_method(None, force=True)
    # Should the forkserver be killed, the parent takes its workers for ended, and might start others beside them.
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGQUIT)  # type: ignore[attr-defined]
    # All signals wait until the rank owns them, and again when it is done; the agent's word to end does not.
    signal.signal(signal.SIGQUIT, lambda signum, frame: os._exit(128 + signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGQUIT])
    job = Job.loads(text)
    os.environ.update(job.environment)
    return obey(job)


def obey(job: Job) -> dict[str, Any]:
    """Run a job in this process, which is one of its ranks, and leave a record if it fails.

    Returns what ``result.json`` holds; its status is ``preempted`` where a signal has ended training.
    Under torchrun nobody else tells the user what went wrong: the first rank to fail does, and SystemExit is raised.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(job.run_folder)
    with rank_log(folder, rank, console=rank == 0 and not job.in_sweep) as console, _signals_of_rank(job, rank) as stop:
        try:
            from shardwise.run import run_job

            return run_job(job, stop)
        except (SystemExit, KeyboardInterrupt):  # ended from outside: no cause of anything
            raise
        except BaseException as error:
            stop.deferring = False  # nothing is left to be saved
            if lost_peer(error):
                time.sleep(PEER_SECONDS)  # whoever supervises the ranks ends this one first
            first = _record_failure(folder, rank, error)
            if job.world["launch"] != "torchrun":
                raise
            if first:
                print(_telling(error), file=console, flush=True)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


def _signals_of_rank(job: Job, rank: int) -> contextlib.AbstractContextManager[Stop]:
    """Who answers to which signal, on this rank: schedulers signal every process, a terminal its foreground group."""
    if multiprocessing.parent_process() is not None:
        # The process that has started this one gets them too, and hands its first on as SIGUSR1.
        return owned_signals(deaf=(Signals.SIGINT, Signals.SIGHUP))
    if job.world["launch"] != "torchrun":
        return owned_signals(console=True)
    failed = Path(job.run_folder) / "ranks" / "failed"

    def now(one: Signals, stop: Stop) -> bool:
        """By SIGTERM torchrun's agent ends the peers of a rank that failed, and all ranks after a second Ctrl-C."""
        return one == Signals.SIGTERM and (failed.exists() or stop.requested == "SIGINT")

    # The agent hands the first Ctrl-C on, which a terminal has sent already.
    return owned_signals(console=rank == 0, again=10 * AGAIN_SECONDS, now=now)


def lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone: gloo's and NCCL's words for it."""
    text = str(error)
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(words in text for words in gone)


class _Tee:
    """A stream that also writes to a rank's log; whether it is a terminal is the stream's affair."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk: the console still hears of it, and the metrics file stops
            self._log.write(COLOURS.sub("", text))
        with _hung_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        with _hung_up():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _hung_up() -> Iterator[None]:
    """A terminal that is gone takes no more; a run that SIGHUP asks to save goes on to its end."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


@contextlib.contextmanager
def rank_log(folder: Path, rank: int, *, console: bool) -> Iterator[TextIO]:
    """Everything that a rank prints goes to ``ranks/rank_<k>.log``; rank 0 keeps its ``console`` too, if it has one.

    What is yielded is the error stream of the console, for the rank that has to say why all of them end.
    """
    with _opened(folder / "ranks" / f"rank_{rank}.log") as log:
        if not console:
            # The descriptors, so that libraries and child processes follow.
            sys.stdout.flush()
            sys.stderr.flush()
            with os.fdopen(os.dup(2), "w", encoding="utf-8") as before:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                yield before
            return
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, log), _Tee(err, log)
        _reopen_handlers(err, sys.stderr)
        try:
            yield err
        finally:
            _reopen_handlers(sys.stderr, err)
            sys.stdout, sys.stderr = out, err


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A log, to which a line that does not fit any more is lost."""
    try:
        log = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):
            log.close()


def _reopen_handlers(old: Any, new: Any) -> None:
    # Handlers hold on to the stream that they were created with.
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


def _record_failure(folder: Path, rank: int, error: BaseException) -> bool:
    """What went wrong on this rank and when, for whoever started it; whether it is the first of all ranks.

    The earliest record is the cause.
    """
    record = {
        "rank": rank,
        "time": time.time(),
        "config_error": isinstance(error, ConfigError),
        "lost_peer": lost_peer(error),
        "message": without_secrets(str(error)),
        "traceback": without_secrets("".join(traceback.format_exception(error))),
    }
    with contextlib.suppress(OSError):
        print(record["traceback"], file=sys.stderr if rank else _log_only(), flush=True)
    with contextlib.suppress(OSError):
        (folder / "ranks" / f"failure_{rank}.json").write_text(json.dumps(record), encoding="utf-8")
    try:
        os.close(os.open(folder / "ranks" / "failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _telling(error: BaseException) -> str:
    if isinstance(error, ConfigError) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
        return f"error: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _log_only() -> TextIO:
    return getattr(sys.stderr, "_log", sys.stderr)


def set_failures_aside(run_folder: str | os.PathLike[str]) -> None:
    """Move the records of failures into ``ranks/attempt_<n>/``, so that none is taken for one of the next attempt's."""
    ranks = Path(run_folder) / "ranks"
    records = [*ranks.glob("failure_*.json"), *ranks.glob("failed")]
    with contextlib.suppress(OSError):
        ranks.mkdir(exist_ok=True)
        if records:
            aside = ranks / f"attempt_{len(list(ranks.glob('attempt_*')))}"
            aside.mkdir()
            for path in records:
                path.rename(aside / path.name)


def first_failure(run_folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The earliest record of a failure in a run's folder; one that only tells of a lost peer comes last."""
    records = []
    for path in Path(run_folder).glob("ranks/failure_*.json"):
        with contextlib.suppress(OSError, ValueError):
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return min(records, key=lambda record: (record["lost_peer"], record["time"]), default=None)
