"""Whether the files of a checkpoint are what its manifest says.

A file that cannot be read is not a damaged one: a store that does not answer now, or closes its door, holds what it
held before, and to go back behind it would lose work. So that is raised, and only damage is returned as a problem.
"""

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import xxhash
from fsspec.core import url_to_fs

from shardwise.checkpoint.filesystems import LocalFolder, ObjectFolder, reason
from shardwise.checkpoint.manifest import MANIFEST, MAX_BYTES, parse_manifest, printable, split_name
from shardwise.errors import ConfigError

BLOCK = 2**20
"""Bytes that are read and hashed at a time: faster than 128 KiB, which waits for the system, and than 8 MiB, which
leaves a processor's cache."""
READERS = 8
"""Files that are read at a time; on two cores two threads verify twice as fast as one."""


DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG, errno.EIO}
DAMAGE |= {getattr(errno, name) for name in ("EBADMSG", "EUCLEAN") if hasattr(errno, name)}
"""Errors that say something of the file: it is not there, is none, leads elsewhere, or the disk has lost it. EIO is
what a broken sector gives, and counts as damage as long as there is another checkpoint to use (``find.py``)."""


class UnreadableError(ConfigError):
    """Whether a checkpoint is whole cannot be told now; one line."""


def check_readable(error: Exception, *, of: str) -> None:
    """Raise unless ``error``, met while ``of`` was read, says that it is damaged.

    Raises:
        UnreadableError: no permission, no connection, a timeout, or whatever else may be over tomorrow.
    """
    # ValueError is what some object stores make of an empty file.
    if isinstance(error, ValueError) or (isinstance(error, OSError) and _code(error) in DAMAGE):
        return
    fix = "ask its owner for permission" if isinstance(error, PermissionError) else "try again once it can be"
    raise UnreadableError(f"{printable(of)} cannot be read ({reason(error)}): {fix}") from error


def _code(error: OSError) -> int | None:
    """The number of an error, also where an object store has given only its kind."""
    kinds = {FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR, IsADirectoryError: errno.EISDIR}
    return error.errno if error.errno is not None else kinds.get(type(error))


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
    """``(manifest, None)`` of the checkpoint ``name`` in ``folder``, or ``(None, what is wrong)``.

    Raises:
        UnreadableError: what is there cannot be read now.
    """
    parts = split_name(name)
    if parts is not None and parts[1] in (".partial", ".removed"):
        what = "was never finished" if parts[1] == ".partial" else "was being removed"
        return None, f"{MANIFEST}: this checkpoint {what}"
    try:
        plain, fault = parse_manifest(folder.read(name, MANIFEST, limit=MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None, f"{MANIFEST}: missing: this checkpoint was never finished"
    except Exception as error:  # object stores have errors of their own
        check_readable(error, of=f"{folder.url.rstrip('/')}/{name}/{MANIFEST}")
        return None, f"{MANIFEST}: cannot be read ({reason(error)})"
    return plain, None if fault is None else f"{MANIFEST}: {fault}"


def file_problems(
    folder: LocalFolder | ObjectFolder, name: str, files: Mapping[str, Any], *, contents: bool
) -> list[str]:
    """What is wrong with the files of ``name``, which ``files`` gives with sizes and checksums; empty if nothing is.

    Raises:
        UnreadableError: one of them cannot be read now.
    """
    place = f"{folder.url.rstrip('/')}/{name}"
    try:
        sizes = folder.sizes(name, files)
    except Exception as error:
        check_readable(error, of=place)
        return [f"{printable(name)}: cannot be read ({reason(error)})"]

    def problem(file: str) -> str | None:
        size, expected = sizes[file], files[file]["bytes"]
        if isinstance(size, FileNotFoundError | NotADirectoryError):
            return "missing"
        if isinstance(size, OSError):
            check_readable(size, of=f"{place}/{file}")
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
            check_readable(error, of=f"{place}/{file}")
            return f"cannot be read ({reason(error)})"

    with ThreadPoolExecutor(READERS) as readers:
        found = zip(sorted(files), readers.map(problem, sorted(files)), strict=True)
        return [f"{printable(file)}: {text}" for file, text in found if text is not None]
