"""The log of a rank: everything that it prints, a time in front of every line.

A line is ``2026-12-01T01:02:03.456 text``: when it began, in the local time of the rank's machine. The lines of a text
that is printed at once share their time. What a library writes to the file descriptor by itself has no time: it belongs
to the line before it; of the rank that keeps its console it is there only. ``logs.py`` reads these files.
"""

import contextlib
import errno
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from shardwise.job import unwritable

COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_78=>]")
"""What a terminal reads as a command; a log is read by people."""

ENDS = re.compile(r"(\r*\n|\r)")
"""What ends a line, or brings a terminal back to the beginning of it."""

BAR_SECONDS = 5.0
"""A line that is overwritten again and again, such as a progress bar, is written down once in so many seconds."""

LONGEST = 65_536
"""Characters of a line without an end that are held back."""


def stamp(when: float) -> str:
    """``2026-12-01T01:02:03.456``: Unix seconds in local time, to the millisecond."""
    milliseconds = int(when * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03d}"


class LineWriter:
    """One rank's log file: takes text from several streams, and writes whole lines, each at once.

    A line that does not fit any more (a full disk) is lost.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(path, error) from error
        self._lock: Any = threading.RLock()  # a signal's handler may print while its thread does
        self._pid = os.getpid()
        self._begun: Channel | None = None  # whose line is in the file without its end
        self._torn = False

    def fileno(self) -> int:
        return self._fd

    def put(self, channel: "Channel", line: str, *, since: str, end: str) -> None:
        """Write a line, or what is there of it; called with the lock held.

        Args:
            channel: where it comes from.
            line: without a time or an end.
            since: its time.
            end: a newline, or nothing where more of it may follow.
        """
        goes_on = self._begun is channel and not self._torn
        before = "\n" if (self._begun is not None or self._torn) and not goes_on else ""
        text = COLOURS.sub("", line)
        self._begun = None if end else channel
        self._write(f"{before}{text}{end}" if goes_on else f"{before}{since} {text}{end}")

    def _write(self, text: str) -> None:
        left = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            self._torn = False
        except OSError:  # the console still hears of it, and the metrics file stops
            self._torn = True

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be held while writing; a fresh one in a forked process, whose parent's other threads may have held it."""
        if os.getpid() != self._pid:
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


class Channel:
    """What one stream adds to a log: its line that has no end yet is held back until it ends or is flushed."""

    def __init__(self, log: LineWriter) -> None:
        self._log = log
        self._held = ""
        self._since = ""
        self._overwritten = False  # whether a carriage return stands before what is held
        self._last_bar = 0.0
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        with self._log.lock():
            if os.getpid() != self._pid:  # a forked process: what is held is its parent's to write
                self._held, self._pid = "", os.getpid()
            now = time.time()
            shown = stamp(now)
            for part in ENDS.split(text):
                if part == "\r":
                    self._overwrite(now)
                elif part.endswith("\n"):
                    self._put(shown, "\n")
                elif part:
                    self._hold(part, shown)
        return len(text)

    def _hold(self, part: str, shown: str) -> None:
        if self._held.endswith("\r"):
            self._held = ""
        if not self._held:
            self._since = shown
        self._held += part
        if len(self._held) > LONGEST:
            self._put(shown, "")

    def _overwrite(self, now: float) -> None:
        """The line is done with, though a newline after all would keep it."""
        held = self._held.rstrip("\r")
        if COLOURS.sub("", held).strip() and now - self._last_bar >= BAR_SECONDS:
            self._last_bar = now
            self._put(self._since, "\n")
        elif held:
            self._held = f"{held}\r"
        self._overwritten = True

    def _put(self, shown: str, end: str) -> None:
        held, self._held = self._held.rstrip("\r"), ""
        if held or (end and not self._overwritten):
            self._log.put(self, held, since=self._since if held else shown, end=end)
        if end:
            self._overwritten = False

    def flush(self) -> None:
        """Write down what is held, unless it is likely to be overwritten."""
        with self._log.lock():
            if os.getpid() == self._pid and not self._overwritten:
                self._put("", "")

    def close_line(self) -> None:
        """Write down all that is held: nothing follows."""
        with self._log.lock():
            if self._held:
                self._put("", "\n")


class Tee:
    """A stream that writes to a rank's log, and to itself where it has a console.

    Whether it is a terminal is the stream's affair.
    """

    def __init__(self, stream: TextIO, log: Channel, *, console: bool) -> None:
        self._stream = stream
        self._log = log
        self._console = console

    def write(self, text: str) -> int:
        self._log.write(text)
        if self._console:
            with _hung_up():
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._log.flush()
        with _hung_up() if self._console else contextlib.suppress(OSError):
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
    There alone comes what is not printed by Python, such as NCCL's warnings.

    What is yielded is the error stream of the console, for the rank that has to say why all of them end.
    """
    log = LineWriter(folder / "ranks" / f"rank_{rank}.log")
    out, err = sys.stdout, sys.stderr
    channels = Channel(log), Channel(log)
    tees: Any = [Tee(one, channel, console=console) for one, channel in zip((out, err), channels, strict=True)]
    if not console:
        # The descriptors too, so that libraries and child processes follow.
        out.flush()
        err.flush()
        with os.fdopen(os.dup(2), "w", encoding="utf-8") as before:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            _replace((out, err), tees)
            try:
                yield before
            finally:  # the process is about to end, and what it says until then still gets its time
                for channel in channels:
                    channel.close_line()
        return
    _replace((out, err), tees)
    try:
        yield err
    finally:
        _replace(tees, (out, err))
        for channel in channels:
            channel.close_line()
        log.close()


def _replace(old: Any, new: Any) -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` be others, for the handlers too, which hold on to the ones they know."""
    sys.stdout, sys.stderr = new
    streams = dict(zip(map(id, old), new, strict=True))
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                handler.stream = streams[id(handler.stream)]
