"""One rank from its first breath to its last: its output, the job, and a record of what went wrong.

A worker never composes and never reads ``sys.argv``. It dies with whoever started it.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, TextIO

from shardwise.errors import ConfigError, DivergedError
from shardwise.job import Job
from shardwise.provenance import without_secrets
from shardwise.rank_log import rank_log
from shardwise.signals import AGAIN_SECONDS, Stop, die_with_parent, owned_signals

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
            from shardwise.telemetry.watchdog import Ending

            return run_job(job, stop, Ending(log=_print_to_log, fail=partial(_hung, job, console)))
        except (SystemExit, KeyboardInterrupt):  # ended from outside: no cause of anything
            raise
        except BaseException as error:
            stop.deferring = False  # nothing is left to be saved
            if lost_peer(error) or (rank and isinstance(error, DivergedError)):  # all ranks say the same
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


def _hung(job: Job, console: TextIO, rank: int, text: str) -> None:
    """The record of a rank that hangs, which another one may have to leave; no main thread is there to raise."""
    from shardwise.telemetry.watchdog import HangError

    first = _record_failure(Path(job.run_folder), rank, HangError(text.splitlines()[-1]), text=text)
    if first and job.world["launch"] == "torchrun":
        print(text, file=console, flush=True)


def _print_to_log(text: str) -> None:
    print(text, file=_log_only(), flush=True)


def _record_failure(folder: Path, rank: int, error: BaseException, *, text: str | None = None) -> bool:
    """What went wrong on this rank and when, for whoever started it; whether it is the first of all ranks.

    ``text`` takes the place of the traceback of an error that was not raised.

    The earliest record is the cause.
    """
    record = {
        "rank": rank,
        "time": time.time(),
        "config_error": isinstance(error, ConfigError),
        "diverged_at": error.step if isinstance(error, DivergedError) else None,
        "lost_peer": lost_peer(error),
        "message": without_secrets(str(error)),
        "traceback": without_secrets(text or "".join(traceback.format_exception(error))),
    }
    here = int(os.environ.get("RANK", "0"))  # which may tell of another one
    with contextlib.suppress(OSError):
        print(str(record["traceback"]).rstrip(), file=sys.stderr if here else _log_only(), flush=True)
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
    if isinstance(error, (ConfigError, DivergedError)) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
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
