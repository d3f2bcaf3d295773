"""The tensors of a checkpoint, by torch.distributed.checkpoint: every rank writes and reads its own pieces.

Its files hold nothing but tensors, and its index, which it pickles, is read by an unpickler that knows a dozen harmless
classes and no others: a checkpoint from a stranger cannot run code.
"""

import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    load,
    save,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from shardwise.checkpoint.verify import checksum
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces

INDEX = ".metadata"
"""Where torch.distributed.checkpoint keeps what is where."""

BLOCK = 2**20
"""Bytes that are collected before they are written: torch writes a tensor in forty pieces, most of a few bytes."""

FileSums = dict[str, dict[str, Any]]
"""File name -> {"bytes": size, "xxh3_128": checksum}."""


class DamagedError(ConfigError):
    """What was written, or is to be read, is not what it should be."""


def write_tensors(pieces: Mapping[str, Pieces], url: str, *, group: dist.ProcessGroup | None = None) -> FileSums:
    """Write what all ranks of ``group`` hold; a collective, if there is a process group. What several hold is written
    once.

    Each file is read again, and compared with what was meant to be written.

    Args:
        pieces: key -> this rank's pieces; keys may be on some ranks only.
        url: a folder for these files alone.
        group: gloo; None for one process.

    Returns:
        On the first rank: the files of all ranks.

    Raises:
        OSError: on every rank, the first error of any.
        DamagedError: a file does not hold what was written to it.
    """
    files = _Files(url)
    writer = FileSystemWriter(files.path, single_file_per_rank=True, sync_files=False)  # they are, while they are read
    writer.fs, writer.path = files, files.path  # type: ignore[assignment]
    checksums = torch.serialization.get_crc32_options()
    # The archive's own checksums take as long as the writing; the file's is there for all of it.
    torch.serialization.set_crc32_options(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
            save(
                dict(pieces), storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        raise _cause(error) from error
    finally:
        torch.serialization.set_crc32_options(checksums)
    return _gather(_verified(files), group)


def _verified(files: "_Files") -> FileSums | Exception:
    try:
        with ThreadPoolExecutor(1) as beside:  # the disk is at work meanwhile
            synced = [beside.submit(files.sync, name) for name in files.sums]
            for name, sums in files.sums.items():
                if (found := files.read_sums(name)) != sums:
                    raise DamagedError(
                        f"{files.path}/{name} holds {found}, but {sums} was written: the storage is at fault"
                    )
            for one in synced:
                one.result()
    except Exception as error:
        return error
    return files.sums


def _gather(mine: FileSums | Exception, group: dist.ProcessGroup | None) -> FileSums:
    """The files of all ranks, on every rank; an error of any rank is raised on all."""
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    for theirs in everyone:
        if isinstance(theirs, Exception):
            raise theirs
    return {name: sums for theirs in everyone for name, sums in theirs.items()}


def read_tensors(pieces: Mapping[str, Pieces], url: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's pieces from a checkpoint of any layout; a collective over ``group``, if there is one.

    One stored tensor, or a stored part of one, is in memory at a time, beside what is filled.

    Raises:
        OSError: a file cannot be read.
        DamagedError: a file is damaged.
    """
    reader = _Reader(url)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            load(
                dict(pieces), storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        raise _cause(error) from error


def stored_tensors(url: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Key -> (shape, format) of every tensor in a checkpoint.

    Raises:
        OSError: there is no index.
        DamagedError: it cannot be read, or names classes that have no place in it.
    """
    tensors = _read_index(_Files(url)).state_dict_metadata
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in tensors.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(url: str, key: str) -> Tensor:
    """One tensor of a checkpoint, whole, on the CPU; not a collective."""
    shape, dtype = stored_tensors(url)[key]
    tensor = torch.empty(shape, dtype=dtype)
    read_tensors({key: Pieces(tensor.shape, {(0,) * tensor.dim(): tensor}, dtype)}, url)
    return tensor


def _cause(error: CheckpointException) -> Exception:
    """The first error of a rank that says more than that another rank has failed."""
    found = [inner for inner, _ in error.failures.values()]
    cause: BaseException = next((e for e in found if isinstance(e, OSError)), found[0] if found else error)
    if isinstance(cause, OSError | ConfigError):
        return cause
    if isinstance(cause, RuntimeError | EOFError | pickle.UnpicklingError | KeyError | AssertionError):
        return DamagedError(f"the checkpoint is damaged: {' '.join(str(cause).split())[:300]}")
    return cause if isinstance(cause, Exception) else RuntimeError(str(error))


# ---- torch.distributed.checkpoint, over fsspec, with pieces ----------------------------------------------------------


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The base class would look for tensors on the meta device, and take pieces apart for that.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Reader(FileSystemReader):
    def __init__(self, url: str) -> None:
        files = _Files(url)
        super().__init__(files.path)
        self.fs = files  # type: ignore[assignment]
        self._index = _read_index(files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the base class does, but in the order of the files, and without the last tensor while the next is read."""
        wanted: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        for name, stored in wanted.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for (offset, length), items in sorted(stored.items(), key=itemgetter(0)):
                    _fill(items, _create_file_view(stream, offset, length), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(items: list[ReadItem], stream: Any, planner: LoadPlanner) -> None:
    """Copy what is wanted of one stored tensor."""
    tensor = torch.load(stream, map_location="cpu", weights_only=True)
    for item in items:
        part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if part.size() != target.size():
            raise DamagedError(f"{item.storage_index.fqn} is stored as {tuple(part.shape)}, not {tuple(target.shape)}")
        target.copy_(part)
        planner.commit_tensor(item, target)


class _Files(FileSystemBase):
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
            summing = _Summing(stream)
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


class _Summing(io.RawIOBase):
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


# ---- the index -----------------------------------------------------------------------------------------------------

HARMLESS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""What an index names: classes that hold plain values."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in HARMLESS or isinstance(kind, torch.dtype):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype | type) or name == "_get_layout":
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")


def _read_index(files: _Files) -> Metadata:
    with files.system.open(f"{files.path}/{INDEX}", "rb") as stream:
        try:
            index = _Unpickler(stream).load()
        except Exception as error:  # whatever a damaged file makes of it
            raise DamagedError(f"{files.path}/{INDEX} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise DamagedError(f"{files.path}/{INDEX} is no index of a checkpoint")
    for info in index.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise DamagedError(f"{files.path}/{INDEX} names {name!r}, which is no file of the checkpoint")
    return index
