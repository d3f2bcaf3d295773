"""Where every rank of a job is while no step ends: what each one says, and whom that gives away."""

import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.parallel.flight_recorder import Collective, last_collective

OURS = Path(__file__).resolve().parents[1]
PACKAGES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
)
"""Where code lies that is neither the user's nor ours."""
INNERMOST = 2
"""Frames that are shown whosever they are: where the rank is."""
MOST = 8
"""Frames of a stack that are shown on the console; the rank's own log has all of them."""

OWN_THREADS = ("watchdog", "watchdog's end", "signals", "die-with-parent")
"""Threads of ours that are where they always are."""

Frame = tuple[str, int, str, str]
"""File, line number, function, text of the line."""


@dataclass(frozen=True)
class Place:
    """Where one rank is."""

    rank: int
    host: str
    step: int
    """Optimizer steps that it has done."""
    phase: str
    """One of shardwise.step_clock.PHASES."""
    quiet: float
    """Seconds since it has last ended a step, a batch of an evaluation, or a checkpoint."""
    waits: bool
    """Whether it is in a collective, so that another rank may be what it waits for."""
    collective: str
    """``all_reduce 13 of all ranks``: the one that it is in, or its last; empty if that is not known."""
    frames: tuple[Frame, ...] = field(default=())
    """Its main thread, innermost last, without what stands between the user's code and the innermost frames."""

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> "Place":
        return cls(**{**values, "frames": tuple((f, int(n), name, text) for f, n, name, text in values["frames"])})


def this_place(*, rank: int, host: str, step: int, phase: str, quiet: float, waiting: Any = None) -> Place:
    """Where this process's main thread is now; from any thread.

    Args:
        waiting: what the main thread is known to wait in, if that is known: None says that it is not.
    """
    frames, last = main_stack(), last_collective()
    return Place(
        rank=rank,
        host=host,
        step=step,
        phase=phase,
        quiet=quiet,
        waits=waiting is not None or waits_in_collective(frames, last),
        collective="" if last is None else str(last),
        frames=tuple(shortened(frames)),
    )


def main_stack() -> list[Frame]:
    """The Python stack of the main thread, innermost last."""
    ident = threading.main_thread().ident
    return _frames(sys._current_frames().get(ident or 0))


def all_stacks() -> str:
    """The Python stacks of all threads of this process, the main thread's first."""
    main, parts = threading.main_thread().ident, []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if names.get(ident) not in OWN_THREADS:
            parts.append(f"thread {names.get(ident, ident)}:\n{shown(_frames(frame))}")
    return "\n".join(parts)


def _frames(frame: Any) -> list[Frame]:
    found = traceback.StackSummary.extract(traceback.walk_stack(frame)) if frame is not None else []
    return [(one.filename, one.lineno or 0, one.name, one.line or "") for one in reversed(found)]


def waits_in_collective(frames: Sequence[Frame], last: Collective | None) -> bool:
    """Whether a main thread that is there waits for other ranks.

    Its innermost frame is the user's own where it sleeps or computes in his code, even if a collective is under way in
    the background; it is torch's or ours where it waits in one, or where autograd's engine does.
    """
    if not frames:
        return False
    file = frames[-1][0].replace("\\", "/")
    if "/torch/distributed/" in file:
        return True
    ours = "/torch/" in file or file.startswith(f"{OURS}/")
    return ours and last is not None and not last.ended


def is_users(file: str) -> bool:
    """Whether code is the user's own: neither installed, nor the framework's, nor what starts them."""
    return not file.startswith((*PACKAGES, f"{OURS}/", "<")) and "/site-packages/" not in file


def shortened(frames: Sequence[Frame]) -> list[Frame]:
    """The user's frames and the innermost ones; what they have lost in between is one frame without a file."""
    # Around a wait stands the clock that times it.
    frames = [one for one in frames if not one[0].endswith("timed_collectives.py")]
    # The first frame of the user's is the script that was started, which says nothing.
    users = [index for index, one in enumerate(frames) if is_users(one[0]) and one[2] != "<module>"]
    innermost = range(max(0, len(frames) - INNERMOST), len(frames))
    kept = sorted({*users, *innermost})[-MOST:]
    short: list[Frame] = []
    for before, index in zip([-1, *kept], kept, strict=False):
        if index > before + 1:
            short.append(("", index - before - 1, "", ""))
        short.append(frames[index])
    return short


def shown(frames: Sequence[Frame]) -> str:
    """Frames as Python's tracebacks have them."""
    lines = []
    for file, number, name, text in frames:
        if file:
            lines.append(f'  File "{file}", line {number}, in {name}' + (f"\n    {text}" if text else ""))
        else:
            lines.append(f"  ... {number} frame{'s' if number > 1 else ''} of PyTorch, Lightning or shardwise")
    return "\n".join(lines)


# ---- whom they give away ---------------------------------------------------------------------------------------------


def culprits(places: Mapping[int, Place], *, size: int) -> list[int]:
    """Ranks for which the others wait; none where that cannot be told.

    They are those that say nothing at all; else those that are in no collective while others are; else, where all are
    in one, those that are in another one than most.
    """
    silent = [rank for rank in range(size) if rank not in places]
    if silent:
        return silent
    busy = [rank for rank, place in places.items() if not place.waits]
    if busy:
        return busy if len(busy) < size else []
    by_collective: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_collective.setdefault(place.collective, []).append(rank)
    sizes = sorted(map(len, by_collective.values()))
    if len(sizes) < 2 or sizes[-1] == sizes[-2]:
        return []
    return [rank for ranks in by_collective.values() if len(ranks) < sizes[-1] for rank in ranks]


def report(places: Mapping[int, Place], *, size: int, hosts: Sequence[str], why: str, left: Mapping[int, str]) -> str:
    """Where every rank is, those that the others wait for first, equal stacks together; the last line says it all.

    Args:
        places: rank -> what it has said.
        size: number of ranks.
        hosts: host name of every rank, as far as known.
        why: what has gone wrong, such as ``no step has ended for 96 s``.
        left: rank -> what it has ended already, for those that have no more to say.
    """
    blamed = culprits(places, size=size)
    lines = [f"{why}: where every rank is"]
    silent = [rank for rank in blamed if rank not in places]
    for rank in silent:
        where = f" has ended {left[rank]} already" if rank in left else " does not answer (stopped, stuck, or dead)"
        lines.append(f"{_rank(rank, hosts)}{where}")
    groups: dict[Any, list[Place]] = {}
    for rank in sorted(places, key=lambda rank: (rank not in blamed, rank)):
        place = places[rank]
        groups.setdefault((rank in blamed, place.phase, place.waits, place.collective, place.frames), []).append(place)
    for group in sorted(groups.values(), key=lambda group: (group[0].rank not in blamed, len(group), group[0].rank)):
        lines += [f"{_ranks([place.rank for place in group], hosts)}{_state(group[0])}:", shown(group[0].frames)]
    return "\n".join([*lines, f"{why}: {_verdict(places, blamed, size=size, hosts=hosts, left=left)}"])


def _state(place: Place) -> str:
    collective = ""
    if place.collective:
        collective = f", in {place.collective}" if place.waits else f", last collective {place.collective}"
    elif place.waits:
        collective = ", in a collective"
    return f", in {place.phase} after step {place.step:,}{collective}"


def _verdict(
    places: Mapping[int, Place], blamed: Sequence[int], *, size: int, hosts: Sequence[str], left: Mapping[int, str]
) -> str:
    if not blamed:
        if any(not place.waits for place in places.values()):
            return "no rank waits for another one, all are at work (launch.collective_timeout=... gives them more time)"
        return "all ranks wait for one another, and none is alone in what it does"
    names, waiting = _ranks(blamed, hosts), size - len(blamed)
    others = f"the other {waiting} wait" if waiting != 1 else f"rank {next(r for r in places if r not in blamed)} waits"
    several = len(blamed) > 1
    if gone := [rank for rank in blamed if rank not in places]:
        if all(rank in left for rank in gone):
            return f"{names} {'have' if several else 'has'} ended {left[gone[0]]} already, and {others}"
        return f"{names} {'do' if several else 'does'} not answer (stopped, stuck, or dead), and {others}"
    first = places[blamed[0]]
    users = [frame for frame in first.frames if frame[0]]
    at = f" at {users[-1][2]}, {Path(users[-1][0]).name}:{users[-1][1]}" if users else ""
    if first.waits:
        return f"{names} {'are' if several else 'is'} in {first.collective}{at}, and {others} in another collective"
    for_whom = "them" if several else "it"
    return (
        f"{names} {'hang' if several else 'hangs'} in {first.phase}{at}, and {others} for {for_whom} "
        f"(where a step may take that long: launch.collective_timeout=...)"
    )


def _rank(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank}" + (f" ({hosts[rank]})" if rank < len(hosts) and hosts[rank] else "")


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    if len(ranks) == 1:
        return _rank(ranks[0], hosts)
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(
        f"{first}" if first == last else f"{first}, {last}" if last == first + 1 else f"{first} to {last}"
        for first, last in spans
    )
