"""The index of a checkpoint's tensors, which torch.distributed.checkpoint pickles, read without running anybody's code.

The unpickler knows a dozen classes that hold plain values, and no others: a checkpoint may come from a stranger.
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.checkpoint.files import Files
from shardwise.errors import ConfigError

INDEX = ".metadata"
"""Where torch.distributed.checkpoint keeps what is where."""


class DamagedError(ConfigError):
    """What was written, or is to be read, is not what it should be."""


def portable(error: BaseException) -> Exception:
    """An error that can travel to the other ranks: those of object stores cannot all be pickled."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, DamagedError):
        return DamagedError(text)
    if isinstance(error, ConfigError):
        return ConfigError(text)
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or text)
    return RuntimeError(f"{type(error).__name__}: {text}")


class StoredTensors(Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
    """Key -> (shape, format) of every tensor in a checkpoint; read once, for all that is loaded from it.

    Args:
        url: of the checkpoint.

    Raises:
        OSError: there is no index.
        DamagedError: it cannot be read, or names classes that have no place in it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files = Files(url)
        self.metadata = _read_index(self.files)
        self._tensors = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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


def _read_index(files: Files) -> Metadata:
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
