"""Whether the files of a checkpoint are what its manifest says."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import xxhash
from fsspec.core import url_to_fs

from shardwise.checkpoint.filesystems import LocalFolder, ObjectFolder, reason
from shardwise.checkpoint.manifest import MANIFEST, MAX_BYTES, parse_manifest, printable, split_name

BLOCK = 2**20
"""Bytes that are read and hashed at a time: faster than 128 KiB, which waits for the system, and than 8 MiB, which
leaves a processor's cache."""
READERS = 8
"""Files that are read at a time; on two cores two threads verify twice as fast as one."""


def checksum(source: BinaryIO | str | os.PathLike[str]) -> str:
    """XXH3 (128 bits, hexadecimal) of what is left in a binary stream, or of the file at a path or URL."""
    if isinstance(source, str | os.PathLike):
        system, path = url_to_fs(os.fspath(source))
        with system.open(path, "rb") as stream:
            return checksum(stream)
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK))
    readinto = getattr(source, "readinto", None)
    if readinto is None:
        while data := source.read(BLOCK):
            digest.update(data)
    else:
        while count := readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def read_manifest(folder: LocalFolder | ObjectFolder, name: str) -> tuple[dict[str, Any] | None, str | None]:
    """``(manifest, None)`` of the checkpoint ``name`` in ``folder``, or ``(None, what is wrong)``."""
    parts = split_name(name)
    if parts is not None and parts[1] in (".partial", ".removed"):
        what = "was never finished" if parts[1] == ".partial" else "was being removed"
        return None, f"{MANIFEST}: this checkpoint {what}"
    try:
        plain, fault = parse_manifest(folder.read(name, MANIFEST, limit=MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None, f"{MANIFEST}: missing: this checkpoint was never finished"
    except Exception as error:  # object stores have errors of their own
        return None, f"{MANIFEST}: cannot be read ({reason(error)})"
    return plain, None if fault is None else f"{MANIFEST}: {fault}"


def file_problems(
    folder: LocalFolder | ObjectFolder, name: str, files: Mapping[str, Any], *, contents: bool
) -> list[str]:
    """What is wrong with the files of ``name``, which ``files`` gives with sizes and checksums; empty if nothing is."""
    try:
        sizes = folder.sizes(name, files)
    except Exception as error:
        return [f"{printable(name)}: cannot be read ({reason(error)})"]

    def problem(file: str) -> str | None:
        size, expected = sizes[file], files[file]["bytes"]
        if isinstance(size, FileNotFoundError | NotADirectoryError):
            return "missing"
        if isinstance(size, OSError):
            return f"cannot be used: {reason(size)}"
        if size != expected:
            return f"{size} bytes, {expected} expected"
        if not contents:
            return None
        try:
            with folder.open(name, file) as stream:
                if checksum(stream) == files[file]["xxh3_128"]:
                    return None
                return "checksum differs: it does not hold what was written"
        except FileNotFoundError:
            return "missing"
        except Exception as error:
            return f"cannot be read ({reason(error)})"

    with ThreadPoolExecutor(READERS) as readers:
        found = zip(sorted(files), readers.map(problem, sorted(files)), strict=True)
        return [f"{printable(file)}: {text}" for file, text in found if text is not None]
