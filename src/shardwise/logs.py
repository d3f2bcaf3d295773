"""``python -m shardwise logs <run folder>``: the lines of all ranks, merged by time, a column saying whose they are.

Each file is in order by itself, so that they are merged as they are read, whatever their size. A line without a time
belongs to the line before it, and so does an indented one soon after it, such as a frame of a traceback.
"""

import argparse
import contextlib
import heapq
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, TextIO

from shardwise.errors import ConfigError
from shardwise.job import HOLDER, LOCK, check_idle

STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) ?")
NAME = re.compile(r"rank_(\d+)\.log")
LONGEST = 2**20
"""Bytes of a line that are read at once; what is left of it follows as a line of its own."""
TOGETHER_MS = 50
"""Milliseconds within which an indented line goes with the one before it."""
POLL_SECONDS = 0.2
QUIET_SECONDS = 1.0
"""How long nothing may come of a run that has ended until nothing more is waited for."""
COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
"""Of the ranks, by turns: ANSI foreground colours."""
KILLED_SECONDS = 10.0
"""How long nothing may come until it is asked whether anybody still works on the run."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (python -m shardwise logs --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the logs of a run; returns 0, 2 for a mistake of the user's, or 130 after Ctrl-C."""
    parser = _Parser(
        prog="python -m shardwise logs",
        description="What the ranks of a run have printed, merged by time. Colours and dates apart are for terminals.",
    )
    parser.add_argument("folder", help="run folder: outputs/<experiment>/<run id>")
    parser.add_argument("--ranks", metavar="LIST", help="these ranks only, such as 0,3 or 0-7 (default: all)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as lines come, until the run has ended")
    try:
        arguments = parser.parse_args(argv)
        show_logs(Path(arguments.folder).expanduser(), ranks=arguments.ranks, follow=arguments.follow)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of | head; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def show_logs(folder: Path, *, ranks: str | None = None, follow: bool = False, out: TextIO | None = None) -> None:
    """Print the lines of all logs of a run in the order of their times.

    Args:
        folder: the run's.
        ranks: which ones, as typed; all if not given.
        follow: whether to go on with what comes until the run has ended.
        out: where to print; standard output if not given.

    Raises:
        ConfigError: it is no run folder, it has no log, or a rank that is asked for has none.
    """
    out = out or sys.stdout
    chosen = None if ranks is None else parse_ranks(ranks)
    check_run_folder(folder)
    logs = find_logs(folder)
    if not logs and not follow:
        raise ConfigError(f"{folder}/ranks holds no log yet: add --follow to wait for one")
    if chosen is not None and not follow and (missing := sorted(set(chosen) - set(logs))):
        raise ConfigError(f"--ranks {ranks}: there is no log of rank {missing[0]}, but of {shown_ranks(list(logs))}")
    wanted = {rank: path for rank, path in logs.items() if chosen is None or rank in chosen}
    _allow_open_files(len(wanted))
    printer = _Printer(out, width=len(str(max([*logs, *(chosen or [0])]))))
    tails = {rank: _Tail(rank, path) for rank, path in wanted.items()}
    try:
        for line in heapq.merge(*(tail.lines(to_end=not follow) for tail in tails.values())):
            printer.show(line)
        out.flush()
        if follow:
            _follow(folder, tails, chosen, printer)
    finally:
        for tail in tails.values():
            tail.file.close()


def _follow(folder: Path, tails: dict[int, "_Tail"], chosen: list[int] | None, printer: "_Printer") -> None:
    last = time.monotonic()
    while True:
        quiet = time.monotonic() - last
        # While somebody holds the folder, a result is that of an attempt before the one that begins, or ends.
        ended = (folder / "result.json").exists() and not (folder / HOLDER).exists()
        ended = ended or (quiet > KILLED_SECONDS and _is_abandoned(folder))
        for rank, path in find_logs(folder).items():
            if rank not in tails and (chosen is None or rank in chosen):
                tails[rank] = _Tail(rank, path)
        new = sorted(line for tail in tails.values() for line in tail.lines(to_end=False))
        for line in new:
            printer.show(line)
        if new:
            last = time.monotonic()
            printer.out.flush()
        elif ended and quiet > QUIET_SECONDS:
            rest = sorted(line for tail in tails.values() for line in tail.lines(to_end=True))
            for line in rest:
                printer.show(line)
            return
        time.sleep(POLL_SECONDS)


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody works in a run folder any more: a run that was killed has left no result."""
    try:
        check_idle(folder)
    except ConfigError:  # somebody trains there, or it cannot be known
        return False
    return (folder / LOCK).exists()


class Line(NamedTuple):
    """One line of a log. Lines are in the order of time, then rank, then place."""

    key: str
    """Time that it is sorted by: never before that of the line above it in its file."""
    rank: int
    place: int
    text: str
    stamp: str
    """Its own time; empty where it has none."""


class _Tail:
    """A log that is read as far as it goes, again and again."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.file: BinaryIO = path.open("rb")
        self._key = ""
        self._place = 0

    def lines(self, *, to_end: bool) -> Iterator[Line]:
        """What has come since the last call; a line without an end only where ``to_end`` says that none will come."""
        while raw := self.file.readline(LONGEST):
            if not raw.endswith(b"\n") and len(raw) < LONGEST and not to_end:
                self.file.seek(-len(raw), os.SEEK_CUR)
                return
            found, text = STAMP.match(raw), raw
            stamp = ""
            if found is not None:
                stamp, text = found[1].decode(), raw[found.end() :]
                if not (text[:1].isspace() and _soon_after(stamp, self._key)):
                    self._key = max(self._key, stamp)
            self._place += 1
            yield Line(self._key, self.rank, self._place, _readable(text), stamp)


def _soon_after(stamp: str, key: str) -> bool:
    """Whether two times are of one second and close to each other."""
    return stamp[:19] == key[:19] and int(stamp[20:]) - int(key[20:]) <= TOGETHER_MS


def _readable(text: bytes) -> str:
    """A line with nothing in it that a terminal obeys, but for tabs."""
    line = text.rstrip(b"\r\n").decode("utf-8", errors="replace")
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


class _Printer:
    """Puts time and rank before each line: in full in a pipe; on a terminal in colour, the date where it changes."""

    def __init__(self, out: TextIO, *, width: int) -> None:
        self.out = out
        self._width = width
        self._terminal = out.isatty()
        self._date = ""

    def show(self, line: Line) -> None:
        rank = f"rank {line.rank:>{self._width}}"
        if not self._terminal:
            self.out.write(f"{line.stamp or ' ' * 23}  {rank}  {line.text}\n")
            return
        date, _, clock = line.stamp.partition("T")
        if date and date != self._date:
            self._date = date
            self.out.write(f"\x1b[2m{date}\x1b[0m\n")
        colour = COLOURS[line.rank % len(COLOURS)]
        self.out.write(f"\x1b[2m{clock:<12}\x1b[0m  \x1b[{colour}m{rank}\x1b[0m  {line.text}\n")


def find_logs(folder: Path) -> dict[int, Path]:
    """Rank -> its log, in the order of the ranks."""
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder / "ranks"):
            if (match := NAME.fullmatch(entry.name)) and entry.is_file():
                found[int(match[1])] = Path(entry.path)
    return dict(sorted(found.items()))


def parse_ranks(text: str) -> list[int]:
    """``0,3,8-11`` as numbers.

    Raises:
        ConfigError: it is something else.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--ranks {text}: numbers of ranks are needed, such as --ranks 0,3 or --ranks 0-7")
        chosen += range(int(match[1]), int(match[2] or match[1]) + 1)
    return chosen


def shown_ranks(ranks: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def check_run_folder(folder: Path) -> None:
    """Whether a folder is a run's.

    Raises:
        ConfigError: it is not; where runs lie below it, with what to type for one of them.
    """
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{folder}: {wrong}; a run folder is needed, such as outputs/<experiment>/<run id>")
    if (folder / "ranks").is_dir():
        return
    from shardwise.report.find import find_runs

    found = find_runs(folder)
    if not found.folders:
        raise ConfigError(f"{folder} is no run folder (it has no ranks/): type outputs/<experiment>/<run id>")
    failed = [run for run in found.folders if found.statuses.get(run.resolve()) == "failed"]
    kind = "a sweep's folder" if (folder / "jobs.json").exists() else "a folder of runs"
    which = "the first that failed" if failed else "the newest"
    one = failed[0] if failed else max(found.folders, key=lambda run: run.stat().st_mtime)
    raise ConfigError(f"{folder} is {kind}: name one of its runs, such as {which}: python -m shardwise logs {one}")


def _allow_open_files(number: int) -> None:
    """One file a rank is open at the same time.

    Raises:
        ConfigError: the system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + 64
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(f"{number} logs, and {hard} files may be open (ulimit -n): name some of them with --ranks")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
