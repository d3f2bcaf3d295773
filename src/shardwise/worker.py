"""One rank from its first breath to its last: output, signals, the job, and a record of what went wrong.

A worker never composes and never reads ``sys.argv``. It dies with whoever started it.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import ConfigError
from shardwise.job import Job

GRACE_SECONDS = 5.0
"""Between a signal and the end of a worker that is stuck outside Python."""


def work(text: str) -> dict[str, Any]:
    """Entry point of a started rank: the job as JSON, and its result as plain values."""
    die_with_parent()
    return obey(Job.loads(text))


def obey(job: Job) -> dict[str, Any]:
    """Run a job in this process, which is one of its ranks, and leave a record if it fails."""
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(job.run_folder)
    with rank_log(folder, rank), end_on_signals():
        try:
            from shardwise.run import run_job

            return run_job(job)
        except BaseException as error:
            _record_failure(folder, rank, error)
            raise


def die_with_parent() -> None:
    """End this process as soon as the one that asked for it is gone, whatever ended that one.

    Workers that come from a forkserver are no children of the process that waits for them, so nothing else ends them.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """SIGTERM, and Ctrl-C in a started rank, unwind the stack (so that trackers learn of it) and end a stuck process.

    A process that waits inside a collective runs no Python handler; the wake-up descriptor is written all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    fatal = [signal.SIGTERM] if multiprocessing.parent_process() is None else [signal.SIGTERM, signal.SIGINT]

    def unwind(signum: int, frame: Any) -> None:
        for one in fatal:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while True:
            signals = os.read(reader, 64)
            if not signals:
                return
            if any(one in signals for one in fatal):
                time.sleep(GRACE_SECONDS)
                os._exit(128 + signals[0])

    before = {one: signal.signal(one, unwind) for one in fatal}
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="end-on-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        for one, handler in before.items():
            signal.signal(one, handler)
        os.close(writer)


class _Tee:
    """A stream that also writes to a rank's log; whether it is a terminal is the stream's affair."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Everything that a rank prints goes to ``ranks/rank_<k>.log``; rank 0 also keeps its console."""
    path = folder / "ranks" / f"rank_{rank}.log"
    with path.open("a", encoding="utf-8", buffering=1) as log:
        if rank:
            # The descriptors, so that libraries and child processes follow.
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield
            return
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, log), _Tee(err, log)  # type: ignore[assignment]
        _reopen_handlers(err, sys.stderr)
        try:
            yield
        finally:
            _reopen_handlers(sys.stderr, err)
            sys.stdout, sys.stderr = out, err


def _reopen_handlers(old: Any, new: Any) -> None:
    # Handlers hold on to the stream that they were created with.
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


def _record_failure(folder: Path, rank: int, error: BaseException) -> None:
    """What went wrong on this rank and when, for whoever started it; the earliest of all ranks is the cause."""
    if isinstance(error, SystemExit):  # ended from outside: no cause of anything
        return
    record = {
        "rank": rank,
        "time": time.time(),
        "config_error": isinstance(error, ConfigError),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    print(record["traceback"], file=sys.stderr if rank else _log_only(), flush=True)
    with contextlib.suppress(OSError):
        (folder / "ranks" / f"failure_{rank}.json").write_text(json.dumps(record), encoding="utf-8")


def _log_only() -> TextIO:
    return getattr(sys.stderr, "_log", sys.stderr)


def first_failure(run_folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The earliest record of a failure in a run's folder."""
    records = []
    for path in Path(run_folder).glob("ranks/failure_*.json"):
        with contextlib.suppress(OSError, ValueError):
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return min(records, key=lambda record: record["time"], default=None)
