"""One rank from its first breath to its last: its output, the job, and a record of what went wrong.

A worker never composes and never reads ``sys.argv``. It dies with whoever started it.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import ConfigError
from shardwise.job import Job, unwritable
from shardwise.provenance import without_secrets
from shardwise.signals import die_with_parent, end_on_signals

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a terminal reads as a command; a log is read by people."""

PEER_SECONDS = 2.0
"""How long a rank that has lost another one waits to be ended: the cause is the other's to tell."""


def work(text: str) -> dict[str, Any]:
    """Entry point of a started rank: the job as JSON, and its result as plain values."""
    die_with_parent()
    return obey(Job.loads(text))


def obey(job: Job) -> dict[str, Any]:
    """Run a job in this process, which is one of its ranks, and leave a record if it fails.

    Under torchrun nobody else tells the user what went wrong: the first rank to fail does, and SystemExit is raised.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(job.run_folder)
    with rank_log(folder, rank) as console, end_on_signals():
        try:
            from shardwise.run import run_job

            return run_job(job)
        except (SystemExit, KeyboardInterrupt):  # ended from outside: no cause of anything
            raise
        except BaseException as error:
            if lost_peer(error):
                time.sleep(PEER_SECONDS)  # whoever supervises the ranks ends this one first
            first = _record_failure(folder, rank, error)
            if job.world["launch"] != "torchrun":
                raise
            if first:
                print(_telling(error), file=console, flush=True)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


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
        return self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[TextIO]:
    """Everything that a rank prints goes to ``ranks/rank_<k>.log``; rank 0 also keeps its console.

    What is yielded is the error stream of the console, for the rank that has to say why all of them end.
    """
    with _opened(folder / "ranks" / f"rank_{rank}.log") as log:
        if rank:
            # The descriptors, so that libraries and child processes follow.
            sys.stdout.flush()
            sys.stderr.flush()
            with os.fdopen(os.dup(2), "w", encoding="utf-8") as console:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                yield console
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


def first_failure(run_folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The earliest record of a failure in a run's folder; one that only tells of a lost peer comes last."""
    records = []
    for path in Path(run_folder).glob("ranks/failure_*.json"):
        with contextlib.suppress(OSError, ValueError):
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return min(records, key=lambda record: (record["lost_peer"], record["time"]), default=None)
