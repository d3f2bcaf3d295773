"""Shards of token ids on disk: a header of 64 bytes, then the ids, little-endian, nothing else.

    offset  bytes  content
         0      8  magic, b"SHRDTOKS"
         8      4  version, uint32, 1
        12      4  bytes per id, uint32, 2 or 4
        16      8  number of ids, uint64
        24      8  vocabulary size, uint64: every id is below
        32     32  SHA-256 of the ids' bytes

The files of a data set are `train_00000.tokens`, `train_00001.tokens`, ... and `val_00000.tokens`, ... in one folder.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError

MAGIC = b"SHRDTOKS"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")
SUFFIX = ".tokens"
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SPOT = 4096  # ids looked at at the start, in the middle and at the end


@dataclass(frozen=True)
class ShardHeader:
    """What the first 64 bytes say."""

    itemsize: int
    """Bytes per id, 2 or 4."""
    count: int
    """Number of ids."""
    vocab_size: int
    """Every id is below this."""
    checksum: bytes
    """SHA-256 of the ids' bytes."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrower of the two types that holds ids below `vocab_size`."""
    return _DTYPES[2 if vocab_size <= 2**16 else 4]


def write_shard(path: Path, ids: NDArray[Any], *, vocab_size: int) -> None:
    """Write `ids`, (n,), each in [0, vocab_size), as a shard."""
    assert len(ids) == 0 or int(ids.max()) < vocab_size
    data = np.ascontiguousarray(ids, dtype=token_dtype(vocab_size))
    checksum = hashlib.sha256(data.data).digest()
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, data.itemsize, len(data), vocab_size, checksum))
        file.write(data.data)


def read_header(path: Path) -> ShardHeader:
    """The header of the shard at `path`; a `ConfigError` where it, or the size of the file, is not as it should be."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            raw = file.read(HEADER.size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check data.path") from error
    if len(raw) < HEADER.size:
        raise _corrupt(path, f"a header of {HEADER.size} bytes", f"{len(raw)} bytes")
    magic, version, itemsize, count, vocab_size, checksum = HEADER.unpack(raw)
    if magic != MAGIC:
        raise _corrupt(path, f"the magic {MAGIC!r}", repr(magic))
    if version != VERSION:
        raise _corrupt(path, f"version {VERSION}", str(version))
    if itemsize not in _DTYPES:
        raise _corrupt(path, "2 or 4 bytes per id", str(itemsize))
    expected = HEADER.size + itemsize * count
    if size != expected:
        raise _corrupt(path, f"{expected} bytes for {count} ids", f"{size} bytes")
    return ShardHeader(itemsize, count, vocab_size, checksum)


def find_shards(folder: Path, *, split: str) -> list[Path]:
    """The shards of `split` (train or val) in `folder`, in order."""
    return sorted(folder.glob(f"{split}_*{SUFFIX}"))


class TokenShard:
    """A memory-mapped shard, mapped anew in every process that it is sent to.

    Args:
        path: the file. Its header, and the ids at the start, in the middle and at the end, are checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self._ids: NDArray[Any] | None = None
        middle, count = self.header.count // 2, self.header.count
        for start in (0, middle, max(0, count - _SPOT)):
            self._check_ids(self.ids[start : start + _SPOT], start=start)

    def __len__(self) -> int:
        return self.header.count

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ids": None}  # a pickled memmap would carry all its ids

    @property
    def ids(self) -> NDArray[Any]:
        """(count,) of uint16 or uint32."""
        if self._ids is None:
            dtype = _DTYPES[self.header.itemsize]
            self._ids = (
                np.memmap(self.path, dtype=dtype, mode="r", offset=HEADER.size, shape=(self.header.count,))
                if self.header.count
                else np.empty(0, dtype)  # an empty range cannot be mapped
            )
        return self._ids

    def verify(self) -> None:
        """Read all of the shard and compare its checksum; a `ConfigError` where it differs."""
        digest = hashlib.sha256()
        for ids in self._chunks():
            digest.update(ids.tobytes())
        if digest.digest() != self.header.checksum:
            raise _corrupt(self.path, f"SHA-256 {self.header.checksum.hex()[:16]}...", f"{digest.hexdigest()[:16]}...")

    def _chunks(self, size: int = 2**22) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), size):
            yield self.ids[start : start + size]

    def _check_ids(self, ids: NDArray[Any], *, start: int) -> None:
        if len(ids) and int(ids.max()) >= self.header.vocab_size:
            place = int(np.argmax(ids))
            raise _corrupt(
                self.path, f"ids below the vocabulary size {self.header.vocab_size}", f"{ids[place]} at {start + place}"
            )


def _corrupt(path: Path, expected: str, found: str) -> ConfigError:
    return ConfigError(f"the token shard {path} is corrupt: expected {expected}, found {found}; make or copy it again")
