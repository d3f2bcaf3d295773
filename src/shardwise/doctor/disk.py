"""Whether runs can be written, how much fits, and how long a write takes until it is safe."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from shardwise.doctor.findings import Findings
from shardwise.errors import ConfigError
from shardwise.job import check_writable
from shardwise.quantities import shown_bytes

LEAST_FREE, GOOD_FREE = 2**30, 10 * 2**30
WRITTEN = 64 * 2**20
SLOW_WRITE = 50e6
"""Bytes/s below which checkpoints are felt."""
SLOW_FSYNC = 0.05
"""Seconds of a small write with fsync above which every line that is made safe is felt."""
FSYNCS = 5


def disk(root: str, *, measure: bool) -> Callable[[Findings], None]:
    """A look at where run folders go: space, permission, and with ``measure`` the speed of a write."""

    def look(found: Findings) -> None:
        place = Path(root).expanduser().absolute()
        while not place.is_dir() and place != place.parent:
            place = place.parent
        facts = found.facts.setdefault("disk", {"path": str(place)})
        try:
            check_writable(root)
        except ConfigError as error:
            found.problem("disk", str(error).rpartition("; type ")[0], "type output_root=<another folder>")
            return
        usage, nodes = shutil.disk_usage(place), os.statvfs(place)
        facts |= {"bytes": usage.total, "free": usage.free}
        text = f"{place}: {shown_bytes(usage.free)} free of {shown_bytes(usage.total)}"
        if usage.free < LEAST_FREE:
            fix = f"make room on the disk of {place}, or type output_root=<a folder elsewhere>"
            found.problem("disk", f"{text}: a checkpoint may not fit", fix)
        elif nodes.f_files and nodes.f_favail < 1000:
            fix = "remove many small files, or type output_root=<a folder elsewhere>"
            found.problem("disk", f"{text}, but only {nodes.f_favail} more files", fix)
        elif usage.free < GOOD_FREE:
            found.note("disk", f"{text}: few checkpoints of a large model", "checkpoint.keep_last=1, or more room")
        else:
            found.ok("disk", text)
        if measure and usage.free > 4 * WRITTEN:
            _speed(found, place, facts)

    return look


def _speed(found: Findings, place: Path, facts: dict[str, object]) -> None:
    """Bytes/s of one large write, and seconds of a small one, each until fsync returns."""
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            start = time.perf_counter()
            for _ in range(WRITTEN // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write = WRITTEN / (time.perf_counter() - start)
            small = []
            for _ in range(FSYNCS):
                start = time.perf_counter()
                file.write(b"line\n")
                file.flush()
                os.fsync(file.fileno())
                small.append(time.perf_counter() - start)
    except OSError as error:
        found.problem("disk speed", f"a write failed ({error.strerror})", "type output_root=<another folder>")
        return
    fsync = median(small)
    facts |= {"write": write, "fsync": fsync}
    text = f"{write / 1e6:,.0f} MB/s written until it is safe, {fsync * 1e3:.1f} ms for a line with fsync"
    if write < SLOW_WRITE or fsync > SLOW_FSYNC:
        fix = "type output_root=<a folder on a faster disk>, or save less often (checkpoint.every_minutes)"
        found.note("disk speed", f"{text}: slow", fix)
    else:
        found.ok("disk speed", text)
