"""The tensors of a checkpoint, by torch.distributed.checkpoint: every rank writes and reads its own pieces.

Its files hold nothing but tensors.
"""

import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from shardwise.checkpoint.files import Files, FileSums
from shardwise.checkpoint.index import DamagedError, StoredTensors, portable
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces, pieces_of


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
    files = Files(url)
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


def _verified(files: "Files") -> FileSums | Exception:
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
        return portable(error)
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


def read_tensors(
    pieces: Mapping[str, Pieces], source: str | StoredTensors, *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill this rank's pieces from a checkpoint of any layout; a collective over ``group``, if there is one.

    One stored tensor, or a stored part of one, is in memory at a time, beside what is filled.

    Args:
        pieces: key -> what to fill.
        source: the checkpoint's URL, or what is known of it already.
        group: whose ranks read together; None reads alone.

    Raises:
        OSError: a file cannot be read.
        DamagedError: a file is damaged.
    """
    reader = _Reader(StoredTensors(source) if isinstance(source, str) else source)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            load(
                dict(pieces), storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        raise _cause(error) from error


def read_below(prefix: str, stored: StoredTensors) -> dict[str, Tensor]:
    """Every tensor whose key begins with ``prefix``, whole, on the CPU; not a collective."""
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in stored.items() if key.startswith(prefix)}
    read_tensors({key: pieces_of(tensor) for key, tensor in tensors.items()}, stored)
    return tensors


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
    def __init__(self, stored: StoredTensors) -> None:
        super().__init__(stored.files.path)
        self.fs = stored.files  # type: ignore[assignment]
        self._index = stored.metadata

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
