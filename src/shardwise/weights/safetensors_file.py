"""safetensors: a file of named tensors that runs no code. Written a few tensors at a time, read in parts.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, the little-endian length of what follows;
JSON that gives each name its dtype, shape and place; the tensors' bytes. The library's own ``save_file`` wants all
tensors in memory at once, hence the writing here; reading is the library's.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
"""Beside several files: ``{"weight_map": {name: file}}``, as Hugging Face writes it."""
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes."""

Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> (shape, dtype)."""


def in_order(tensors: Kinds) -> list[str]:
    """The order in which a file holds tensors: wide elements first, so that each lies at a multiple of its size."""
    return sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))


def size_of(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def write_file(
    path: Path,
    tensors: Kinds,
    values: Iterator[Tensor],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Write a file as ``path``, which is there only once all of it is on the disk.

    Args:
        path: replaced if it exists.
        tensors: name -> (shape, dtype).
        values: the tensors in the order that ``in_order`` gives.
        metadata: texts for the header.

    Raises:
        ConfigError: a dtype that the format does not know.
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    names, end = in_order(tensors), 0
    for name in names:
        shape, dtype = tensors[name]
        if dtype not in CODES:
            raise ConfigError(f"{name} is {printable(dtype)}, which safetensors does not know: type --dtype float32")
        begin, end = end, end + size_of(shape, dtype)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with replacing(path) as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for name, value in zip(names, values, strict=True):
            assert (tuple(value.shape), value.dtype) == tensors[name], name
            if value.numel():
                stream.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A stream to a temporary file that becomes ``path`` once all is on the disk, and is removed if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class TensorFiles:
    """The tensors of one file, or of all files of a folder, by name; what is asked for is read, and nothing else.

    A folder with an index has the files that it lists, another all its ``.safetensors`` files.

    Raises:
        ConfigError: nothing there, no permission, a damaged file, or two that hold the same name.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.where = printable(os.fspath(source))
        self.path = Path(source)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.codes: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for path in self._files():
                handle = self._open(path)
                for name in list(handle.keys()):  # it is no mapping
                    if name in self._handles:
                        raise ConfigError(
                            f"{self.where}: two of its files hold {printable(name)}: type one of them, such as {path}"
                        )
                    part = handle.get_slice(name)
                    self.shapes[name], self.codes[name] = tuple(part.get_shape()), part.get_dtype()
                    self._handles[name] = handle
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self.path if self.path.is_dir() else self.path.parent

    def is_floating(self, name: str) -> bool:
        """Whether it holds floating-point numbers."""
        return self.codes[name].startswith(("F", "BF"))

    def read_into(self, part: Tensor, name: str, *, offset: tuple[int, ...]) -> None:
        """Fill ``part`` with what lies at ``offset`` of the tensor ``name``, converted to its dtype."""
        part.copy_(self.read(name, offset=offset, shape=tuple(part.shape)))

    def read(self, name: str, *, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A part of a tensor, as the file has it, on the CPU."""
        handle = self._handles[name]
        try:
            if not shape:
                return handle.get_tensor(name)
            return handle.get_slice(name)[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.where, error) from error

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        try:
            index = self.path / INDEX
            if not index.is_file():
                return sorted(self.path.glob(f"*{SUFFIX}"))
            listed = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except OSError as error:
            raise _unreadable(self.where, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: a weight_map of names to files is needed") from error
        for name in listed:
            if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(SUFFIX):
                raise ConfigError(f"{index} lists {printable(name)[:100]}, which is no {SUFFIX} file of this folder")
        return [self.path / name for name in listed]

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise _unreadable(str(path), error) from error


def _unreadable(where: str, error: Exception) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{printable(where)}: no such file")
    if isinstance(error, PermissionError):
        return ConfigError(f"{printable(where)} cannot be read: no permission")
    return ConfigError(
        f"{printable(where)} is no whole safetensors file: {printable(' '.join(str(error).split()))[:200]}"
    )
