"""The files of a checkpoint as torch.distributed.checkpoint wants them: on any file system, added up while written."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemBase

from shardwise.checkpoint.verify import checksum

BLOCK = 2**20
"""Bytes that are collected before they are written: torch writes a tensor in forty pieces, most of a few bytes."""

FileSums = dict[str, dict[str, Any]]
"""File name -> {"bytes": size, "xxh3_128": checksum}."""


class Files(FileSystemBase):
    """The files of one folder, on any file system that fsspec knows; adds up what is written to each."""

    def __init__(self, url: str) -> None:
        self.system, self.path = url_to_fs(url)
        self._is_local = isinstance(self.system, LocalFileSystem)
        self.sums: FileSums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with self._open(str(path), mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summing = SummingStream(stream)
            yield summing
            summing.close()
            self.sums[os.path.basename(str(path))] = summing.sums()

    def _open(self, path: str, mode: str) -> Any:
        # fsspec's wrapper around a local file costs time at each of the many small reads.
        return open(path, mode) if self._is_local else self.system.open(path, mode)

    def read_sums(self, name: str) -> dict[str, Any]:
        """Size and checksum of a file as it is now."""
        with self._open(f"{self.path}/{name}", "rb") as stream:
            digest = checksum(stream)
            return {"bytes": stream.tell(), "xxh3_128": digest}

    def sync(self, name: str) -> None:
        """Wait until a file is on the disk, where there is one."""
        if self._is_local:
            with open(f"{self.path}/{name}", "rb") as stream:
                os.fsync(stream.fileno())

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        self.system.makedirs(str(path), exist_ok=True)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        old, new = os.path.basename(str(path)), os.path.basename(str(new_path))
        self.system.mv(str(path), str(new_path))
        self.sums[new] = self.sums.pop(old)

    def exists(self, path: str | os.PathLike) -> bool:
        return self.system.exists(str(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        self.system.rm_file(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SummingStream(io.RawIOBase):
    """A stream that adds up the bytes that go through it. They are written in large blocks, the last by ``close``."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self._bytes = 0
        self._state = xxhash.xxh3_128()
        self._collected = bytearray()

    def write(self, data: Any) -> int:
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        self._bytes += size
        if size < BLOCK:
            self._collected += data
            if len(self._collected) >= BLOCK:
                self._pass_on()
        else:
            self._pass_on()
            self._state.update(data)
            self._stream.write(data)
        return size

    def _pass_on(self) -> None:
        self._state.update(self._collected)
        self._stream.write(self._collected)
        self._collected = bytearray()

    def sums(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "xxh3_128": self._state.hexdigest()}

    def tell(self) -> int:
        return self._bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Nothing: it is asked for after every tensor."""

    def close(self) -> None:
        if not self.closed:
            self._pass_on()
            self._stream.close()
            super().close()
