"""A file of metrics: a line of JSON per logging call, whole whatever befalls the process that writes it."""

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import ConfigError
from shardwise.metrics_file import RESERVED, read_lines

log = logging.getLogger(__package__)

BLOCK = 65536


class MetricsFileError(ConfigError, OSError):
    """The metrics file cannot be written: a full disk, a read-only folder, no folder. One line, as of ConfigError."""


class MetricLines:
    """Lines of {"step": optimizer steps done, "time": Unix seconds, "<metric>": number, ...}.

    JSON has no NaN and no infinity: such a value is null, and the metric's name stands in the list under "nonfinite".
    Each line is flushed when the call returns. The torn line that a killed machine can leave at the end goes before
    the next one is written.

    Args:
        path: the file, in a folder that exists. New lines come after old ones.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.last: dict[str, float] = {}
        """The last value of every metric that was logged, as a plain number."""
        self._last_step = 0

    def append(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line. A call without a step counts for the last one that came.

        Raises:
            ConfigError: a metric that is not one number, or has a name of the line's own.
            MetricsFileError: the line cannot be written; nothing of it stays in the file.
        """
        self._last_step = self._last_step if step is None else int(step)
        line: dict[str, Any] = {"step": self._last_step, "time": round(time.time(), 3)}
        nonfinite = []
        for name, value in metrics.items():
            if name in RESERVED:
                raise ConfigError(
                    f"metric {name!r} has a name that {self.path.name} uses itself: log it as 'my/{name}'"
                )
            self.last[name] = number = _number(name, value)
            if math.isfinite(number):
                line[name] = number
            else:
                line[name] = None
                nonfinite.append(name)
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def size(self) -> int:
        """Bytes of the whole lines in the file, on the disk when this returns; 0 without a file.

        Raises:
            MetricsFileError: the file cannot be written.
        """
        if not self.path.exists():
            return 0
        with self._writing(), self.path.open("r+b", buffering=0) as file:
            size = _drop_torn_line(file)
            os.fsync(file.fileno())
            return size

    def cut(self, size: int) -> None:
        """Go back to the first ``size`` bytes, a value that ``size()`` gave; ``last`` is what these lines say.

        A file that is shorter already stays as it is, with a warning.

        Raises:
            MetricsFileError: the file cannot be written.
        """
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < size:
            log.warning("%s has %d bytes, not the %d of the checkpoint: lines are missing", self.path, found, size)
        if found:
            with self._writing(), self.path.open("r+b", buffering=0) as file:
                file.truncate(min(found, size))
                _drop_torn_line(file)
                os.fsync(file.fileno())
        self.last, self._last_step = {}, 0
        for step, metrics, _ in read_lines(self.path):
            self.last.update(metrics)
            self._last_step = step

    def cut_after(self, step: int) -> None:
        """Go back to before the first line of a later step than ``step``.

        Raises:
            MetricsFileError: the file cannot be written.
        """
        if not self.path.exists():
            return
        kept = 0
        with self.path.open("rb") as file:
            for text in file:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged line is as it was
                    if int(json.loads(text)["step"]) > step:
                        break
                kept += len(text)
        self.cut(kept)

    def _append(self, data: bytes) -> None:
        # Opened for each line: no buffer to lose when the process is killed, and no handle to a file that was cut back.
        with self._writing(), self.path.open("a+b", buffering=0) as file:
            before = _drop_torn_line(file)
            try:
                written = file.write(data)
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            fix = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
            raised = MetricsFileError(
                f"cannot write metrics to {self.path} ({reason}): {fix} or choose another folder with output_root=..."
            )
            raised.errno = error.errno
            raise raised from error


def _drop_torn_line(file: BinaryIO | Any) -> int:
    """Cut off what follows the last line's end. Returns the size of the file then; its position is the end."""
    end = file.seek(0, os.SEEK_END)
    size = end
    while size:
        start = max(0, size - BLOCK) if size < end else size - 1  # as a rule the last byte tells
        file.seek(start)
        newline = file.read(size - start).rfind(b"\n")
        if newline >= 0:
            size = start + newline + 1
            break
        size = start
    if size < end:
        file.truncate(size)
    file.seek(size)
    return size


def _number(name: str, value: Any) -> float:
    """An int stays one; everything else with a single value becomes a float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metric {name!r} is a {type(value).__name__}, not one number: log a scalar") from error
