"""Where exported weights go: one safetensors file, or a folder of them. Nothing is replaced unless that is typed."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.manifest import MANIFEST, printable
from shardwise.errors import ConfigError
from shardwise.weights.safetensors_file import INDEX, PICKLED, SUFFIX, Kinds, replacing, size_of, write_file

SHARD_BYTES = 5 * 10**9
"""A file in a folder is not larger, as Hugging Face has it; a tensor that is larger has a file for itself."""
CONFIG = "config.json"

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Destination:
    """Where an export goes: one file, or a folder.

    Args:
        text: as it was typed: a ``.safetensors`` file, or a folder.

    Raises:
        ConfigError: neither.
    """

    def __init__(self, text: str) -> None:
        if not text or "\0" in text or "://" in text:
            raise ConfigError(f"--to {printable(text)}: a local path is needed, such as --to model{SUFFIX}")
        path = Path(text)
        if path.suffix in PICKLED or (path.exists() and not path.is_dir() and path.suffix != SUFFIX):
            raise ConfigError(f"--to {printable(text)}: only {SUFFIX} files are written: type --to {path.stem}{SUFFIX}")
        self.text = printable(text)
        self.one_file = path.suffix == SUFFIX and not path.is_dir()
        self.folder = path.parent if self.one_file else path
        self.path = path if self.one_file else path / f"model{SUFFIX}"

    def check(self, *, force: bool) -> None:
        """Whether it may be written to; changes nothing.

        Raises:
            ConfigError: something is there (without ``force``), it is closed, or lies in a run's folder.
        """
        inside = self.folder.absolute()
        for folder in (inside.resolve(), *inside.resolve().parents):
            if (folder / MANIFEST).is_file() or (
                (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()
            ):
                raise ConfigError(
                    f"--to {self.text} lies in {printable(folder)}, which nothing but its run writes into: type another"
                )
        there = [path.name for path in self._present() if path.name != CONFIG]
        if there and not force:
            where = self.text if self.one_file else f"{self.text}/{there[0]}"
            raise ConfigError(f"{where} exists: type --force to replace it, or another --to")
        nearest = inside
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"--to {self.text} cannot be written: {printable(nearest)} is not writable")

    def _present(self) -> list[Path]:
        """The files of an earlier export."""
        if self.one_file:
            return [self.path] if self.path.exists() else []
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return [self.folder / name for name in sorted(names) if _SHARD.fullmatch(name) or name == INDEX]

    def write(
        self,
        tensors: Kinds,
        values: Callable[[Kinds], Iterator[Tensor]],
        *,
        metadata: Mapping[str, str],
        config: Mapping[str, Any] | None,
        force: bool,
    ) -> list[Path]:
        """Write the weights, and beside them the configuration, if there is one; returns the files.

        Args:
            tensors: name -> (shape, dtype).
            values: gives the tensors for some of these, in the order that ``in_order`` gives.
            metadata: texts for the header.
            config: for ``config.json``.
            force: replace another ``config.json``.

        Raises:
            ConfigError: a ``config.json`` that says something else is there.
            OSError: it cannot be written.
        """
        beside = self.folder / CONFIG
        text = None if config is None else json.dumps(config, indent=2) + "\n"
        if text is not None and not force and beside.exists() and beside.read_text(errors="replace") != text:
            raise ConfigError(f"{printable(beside)} exists and says something else: type --force to replace it")
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._present()
        shards = [list(tensors)] if self.one_file else _shards(tensors)
        files = []
        for number, names in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
            path = self.folder / name if len(shards) > 1 else self.path
            part = {name: tensors[name] for name in names}
            write_file(path, part, values(part), metadata=metadata)
            files.append(path)
        if len(shards) > 1:
            total = sum(size_of(*kind) for kind in tensors.values())
            places = {name: path.name for names, path in zip(shards, files, strict=True) for name in names}
            index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(places.items()))}
            files.append(_write_text(self.folder / INDEX, json.dumps(index, indent=2) + "\n"))
        if text is not None:
            files.append(_write_text(beside, text))
        for path in before:
            if path not in files:
                path.unlink()
        return files


def _shards(tensors: Kinds) -> list[list[str]]:
    """The names of each file's tensors, none of them larger than ``SHARD_BYTES`` unless for one tensor."""
    shards: list[list[str]] = [[]]
    room = float(SHARD_BYTES)
    for name, kind in tensors.items():
        size = size_of(*kind)
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_text(path: Path, text: str) -> Path:
    with replacing(path) as stream:
        stream.write(text.encode())
    return path
