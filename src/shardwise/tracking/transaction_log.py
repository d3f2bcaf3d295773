"""The files in which W&B's client keeps a run, read to know what has been logged.

A ``.wandb`` file is 7 bytes of its own and then LevelDB's log format: blocks of 32 KiB with fragments of messages, each
behind a header of checksum (CRC-32 of kind and data), length and kind. A killed machine can leave a torn message at the
end. ``wandb sync`` gives up such a file unfinished, and with it every later file of the same run.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 32768
START = 7  # bytes of the file's own header
HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
OWN = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
"""Names that the client adds to a row."""


@dataclass(frozen=True)
class Row:
    """One row of a run's history."""

    step: int | None
    """Our own step, if it has one."""
    names: frozenset[str]
    """Names of the metrics in it."""
    index: int
    """W&B's number of the row: in the run if it was online, else in the file."""
    runtime: float
    """Seconds since the run began."""


@dataclass
class TransactionLog:
    """What one file holds."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    has_run: bool = False
    """Whether it says which run it belongs to, without which it cannot be uploaded."""
    has_end: bool = False
    """Whether the run was finished, however it ended; a killed one was not."""
    size: int = 0
    whole: int = 0
    """Bytes up to the end of the last whole message."""

    @property
    def offline(self) -> bool:
        return self.path.parent.name.startswith("offline-")

    @property
    def uploaded(self) -> bool:
        """Whether ``wandb sync`` has brought all of it to the service."""
        return self.path.with_name(self.path.name + ".synced").exists()

    @property
    def waits(self) -> bool:
        """Whether there is something in it for ``wandb sync``."""
        return self.offline and self.has_run and not self.uploaded


def earlier_logs(folder: Path, run_id: str, *, label: str = "") -> list[TransactionLog]:
    """The files of a run in its ``wandb`` folder, oldest first.

    Args:
        label: of the rank, such as ``rank-3``, where all ranks write to one run, each in a folder of its own that ends
            with it; the others may be writing in theirs.

    Raises:
        OSError: one cannot be read.
    """
    paths = [path for path in folder.glob(f"*run-*/run-{run_id}.wandb") if _label(path.parent.name, run_id) == label]
    return [read_log(path) for path in sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-"))]


def _label(folder: str, run_id: str) -> str:
    tail = folder.rpartition(f"-{run_id}")[2].removeprefix("-")
    return tail if tail.startswith("rank-") else ""  # the client adds a number to a name that exists


def read_log(path: Path) -> TransactionLog:
    """Everything up to the first damage, which as a rule is a torn end.

    Raises:
        OSError: the file cannot be read.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = TransactionLog(path)
    names: dict[frozenset[str], frozenset[str]] = {}  # one object for all rows alike
    with path.open("rb") as file:
        found.size = os.fstat(file.fileno()).st_size
        for message, end in _messages(file):
            record = Record()
            try:
                record.ParseFromString(message)
            except DecodeError:
                break
            found.whole = end
            kind = record.WhichOneof("record_type")
            found.has_run |= kind == "run"
            found.has_end |= kind == "exit"
            if kind == "history":
                # A histogram is several items, of one name.
                row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                given = frozenset(row) - OWN - {"step"}
                found.rows.append(
                    Row(
                        step=_int(row.get("step")),
                        names=names.setdefault(given, given),
                        index=_int(row.get("_step")) or 0,
                        runtime=float(row.get("_runtime", 0.0)),
                    )
                )
    return found


def mend(log: TransactionLog) -> bool:
    """Take the torn end off a file that nobody writes any more, so that it can be uploaded; it is kept beside it.

    A file that does not even say which run it belongs to, since its process was killed at once, is put aside whole.
    Returns whether there was something to do.

    Raises:
        OSError: the folder cannot be written.
    """
    aside = log.path.with_name(log.path.name + ".torn")
    if not log.has_run:
        log.path.replace(aside)
        return True
    if log.whole == log.size:
        return False
    with log.path.open("r+b") as file:
        file.seek(log.whole)
        aside.write_bytes(file.read())
        file.truncate(log.whole)
        os.fsync(file.fileno())
    return True


def _messages(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Each whole message and where it ends, up to the first damage."""
    offset = START
    file.seek(offset)
    message = b""
    inside = False
    while True:
        room = BLOCK - offset % BLOCK
        if room < HEADER.size:
            file.seek(room, os.SEEK_CUR)
            offset += room
            continue
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return
        checksum, length, kind = HEADER.unpack(header)
        data = file.read(length)
        damaged = len(data) < length or zlib.crc32(data, zlib.crc32(header[-1:])) != checksum
        if damaged or kind not in ((MIDDLE, LAST) if inside else (FULL, FIRST)):
            return
        offset += HEADER.size + length
        message = message + data if inside else data
        inside = kind in (FIRST, MIDDLE)
        if not inside:
            yield message, offset


def _int(text: Any) -> int | None:
    try:
        return int(json.loads(text))
    except (TypeError, ValueError):
        return None
