"""One job of a sweep in a fresh process, from the warm template that has imported everything."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.batch_finder import with_micro_size
from shardwise.errors import ConfigError, DivergedError
from shardwise.job import Job
from shardwise.launch import RanksFailedError, how_it_ended, launch, share_template
from shardwise.provenance import without_secrets
from shardwise.signals import GRACE_SECONDS, die_with_parent, owned_signals
from shardwise.worker import first_failure

FAILED_FIRST = re.compile(r"rank \d+ failed first; its log: ")
"""What the launcher adds to a traceback."""
LONGEST = 300
"""Characters of a failure that are shown; all of them are in its log."""
NO_METRICS = ("step", "time", "nonfinite")
"""What a line of a metrics file holds besides."""


class JobProcess:
    """A job that runs: what its process has said, and the new lines of its metrics file.

    Args:
        job: its run folder exists.
        share: variables for every process of the job, as :class:`shardwise.sweep.slots.Shares` hands them out.
    """

    def __init__(self, job: Job, share: dict[str, str]) -> None:
        self.job = job
        self.answer: dict[str, Any] | None = None
        """What the process has said at its end; empty where it ended without a word."""
        self._deadline = float("inf")
        self._read, self._lines = 0, Path(job.run_folder) / "metrics.jsonl"
        context = multiprocessing.get_context("forkserver")
        self._reader, writer = context.Pipe(duplex=False)
        text = replace(job, environment=share).dumps()
        self._process = context.Process(target=_job_process, args=(text, writer), name=f"job {job.run_id}")
        self._process.start()
        writer.close()

    @property
    def waits_for(self) -> list[Any]:
        """What to wait for: the process has something to say, or has ended."""
        return [self._process.sentinel, *([self._reader] if self.answer is None else [])]

    def send(self, one: signal.Signals) -> None:
        """A signal, if the process is there to get it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, one)

    def ended(self) -> bool:
        """Take in what has arrived; whether all is over. A process that hangs after its last word is killed."""
        over = self._process.exitcode is not None  # before the look at the pipe: what it said last is in there
        if self.answer is None and self._reader.poll():
            try:
                self.answer = self._reader.recv()
            except (EOFError, OSError):
                self.answer = {}
            self._deadline = time.monotonic() + 2 * GRACE_SECONDS
        elif self.answer is None and over:  # a child that it has left behind keeps the pipe open
            self.answer = {}
        if self._process.exitcode is None and time.monotonic() > self._deadline:
            self._process.kill()  # it hangs in somebody's exit handler
            self._process.join()
        return self.answer is not None and self._process.exitcode is not None

    def end_at_once(self, *, deadline: float) -> None:
        """Wait until the process has obeyed SIGQUIT, and kill it where it does not."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._reader.close()
        self._process.close()

    def told_to_end(self) -> bool:
        """Whether it ended by a signal before it had anything to save."""
        return not self.answer and (self._process.exitcode or 0) > 128

    def failure(self) -> tuple[str, bool]:
        """(why it failed, and where its log is, in one line; whether the configuration is to blame)."""
        answer = self.answer or {}
        message = answer.get("message") or f"the process of the job {how_it_ended(self._process.exitcode)}"
        return with_log(self.job, without_secrets(in_a_line(message))), bool(answer.get("config_error"))

    def diverged(self) -> str:
        """In one line, which loss or gradient was not finite; empty where the job did not end by that."""
        answer = self.answer or {}
        return without_secrets(answer["message"].splitlines()[0]) if answer.get("diverged") else ""

    def new_lines(self) -> list[tuple[int, dict[str, float]]]:
        """What has come to the metrics file since the last call, as (step, metrics); all of it where it was cut."""
        found: list[tuple[int, dict[str, float]]] = []
        with contextlib.suppress(OSError), self._lines.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._read:
                self._read = 0
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._read += len(text)
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    line = json.loads(text)
                    values = {name: value for name, value in line.items() if name not in NO_METRICS}
                    numbers = {n: float("nan") if value is None else float(value) for n, value in values.items()}
                    found.append((int(line["step"]), numbers))
        return found


def in_a_line(text: str) -> str:
    """What a traceback, or another text, comes down to: ``ValueError: boom``."""
    lines = text.strip().splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        # Frames are indented; what follows them is the exception, whose own text may have several lines.
        rest = lines[starts[-1] + 1 :]
        first = next((place for place, line in enumerate(rest) if line and not line[0].isspace()), 0)
        lines = [line for line in rest[first:] if not FAILED_FIRST.match(line)]
    shown = " ".join(" ".join(lines).split())
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def with_log(job: Job, message: str) -> str:
    """A message that also names the log of the rank that failed first."""
    record = first_failure(job.run_folder)
    log = f"{job.run_folder}/ranks/rank_{record['rank'] if record else 0}.log"
    return message if log in message else f"{message}; its log: {log}"


def _job_process(text: str, writer: Any) -> None:
    """A fresh process for one job, which is its only rank or the agent of its ranks."""
    import torch.multiprocessing

    die_with_parent()
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGQUIT)  # type: ignore[attr-defined]
    job = Job.loads(text)
    os.environ.update(job.environment)
    try:
        _silence(Path(job.run_folder) / "ranks" / "rank_0.log")
        share_template()
        if job.world["launch"] != "local":
            writer.send({"result": launch(with_micro_size(job))})
            return
        # The parent gets a terminal's signals too, and hands its first on.
        deaf = (signal.SIGINT, signal.SIGHUP)
        with owned_signals(deaf=deaf, grace=3 * GRACE_SECONDS) as stop:
            writer.send({"result": launch(with_micro_size(job, stop), stop)})
    except (ConfigError, RanksFailedError, DivergedError) as error:
        kinds = {"config_error": isinstance(error, ConfigError), "diverged": isinstance(error, DivergedError)}
        writer.send({"message": str(error), **kinds})
    except Exception:
        text = traceback.format_exc().rstrip()
        if first_failure(job.run_folder) is None:  # a rank writes its own
            print(text, file=sys.stderr, flush=True)
        writer.send({"message": text})


def _silence(log: Path) -> None:
    """What is printed goes to the log of the first rank: the console belongs to the sweep."""
    with log.open("a", encoding="utf-8") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
