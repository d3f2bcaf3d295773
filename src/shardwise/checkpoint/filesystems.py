"""What a store of checkpoints asks of a file system, and how a folder is made, replaced and removed on each kind.

At every moment of all of these, a crash leaves what was whole before, or what is whole now, under a name that says so:

=====================  ==============================================================================================
``step_1``             a checkpoint, once it has a manifest
``step_1.spare``       a second checkpoint of the same step, while one is replaced; counts where ``step_1`` is not whole
``step_1.partial``     local only: being written; becomes ``step_1`` by being renamed
``step_1.removed``     local only: being removed
=====================  ==============================================================================================

Local file systems rename folders at once, but none replaces a full one: the old one is first renamed to ``.spare``.
Object stores rename nothing: files lie under the final name, and are a checkpoint once the manifest is there. Where
``step_1`` is one already, the new one is written to ``.spare``, made whole there, and copied after the old one is gone.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from shardwise.checkpoint.manifest import MANIFEST, printable, split_name
from shardwise.errors import ConfigError

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""The package that brings a protocol; ``pip install <package>``."""


def open_folder(url: str | os.PathLike[str]) -> "LocalFolder | ObjectFolder":
    """The folder that a path or a URL names; it need not exist.

    Raises:
        ConfigError: an empty text, an unknown protocol, or one whose package is missing.
    """
    url = os.fspath(url)
    protocol = url.partition("://")[0] if "://" in url else "file"
    if not url.strip() or "\0" in url:
        raise ConfigError(f"{printable(url)!r} is no folder: type a path, or a URL such as s3://bucket/folder")
    if "::" in url:
        raise ConfigError(
            f"{printable(url)}: chained protocols are not supported: type one, such as s3://bucket/folder"
        )
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        why = f"pip install {PACKAGES[protocol]}" if protocol in PACKAGES else " ".join(str(error).split())
        raise ConfigError(f"{printable(url)}: {protocol}:// needs a package that is not installed: {why}") from error
    except ValueError as error:
        if protocol in known_implementations:
            raise ConfigError(f"{printable(url)}: {printable(error)}") from error
        known = "a path, s3://, gs://, abfs:// or memory://"
        raise ConfigError(f"{printable(url)}: no protocol is called {printable(protocol)}: type {known}") from error
    if isinstance(system, LocalFileSystem):
        return LocalFolder(path)
    return ObjectFolder(system, path, url.rstrip("/"))


def reason(error: BaseException) -> str:
    """What an error of a file system says, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(" ".join(str(text).split()))[:300]


class LocalFolder:
    """A folder on a local (or mounted) file system, and the folders in it."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.url = self.path

    def child(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    def is_file(self, *parts: str) -> bool:
        return os.path.isfile(self.child(*parts))

    def folders(self) -> list[str]:
        """Names of the folders in it; none if it does not exist."""
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []

    def read(self, *parts: str, limit: int) -> bytes:
        """The first ``limit`` bytes and one more, if there are, of a regular file."""
        self._check(parts[0] if len(parts) > 1 else "", parts[-1])
        with open(self.child(*parts), "rb") as stream:
            return stream.read(limit + 1)

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int | OSError]:
        """Bytes of each file of the folder ``name``, or why it cannot be said."""
        found: dict[str, int | OSError] = {}
        for file in files:
            try:
                found[file] = self._check(name, file)
            except OSError as error:
                found[file] = error
        return found

    def _check(self, name: str, file: str) -> int:
        folder, path = os.path.realpath(self.child(name)), os.path.realpath(self.child(name, file))
        status = os.stat(path)
        if os.path.commonpath([folder, path]) != folder:
            raise OSError(errno.EINVAL, f"a link that leads out of the folder, to {path}")
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return status.st_size

    def open(self, name: str, file: str) -> BinaryIO:
        return open(self.child(name, file), "rb", buffering=0)

    def begin(self, name: str) -> str:
        """An empty folder to write ``name`` to."""
        place = self.child(name + ".partial")
        os.makedirs(self.path, exist_ok=True)
        self._delete(place)
        os.mkdir(place)
        return place

    def place_of(self, name: str) -> str:
        """The name of the folder that ``begin`` gave."""
        return name + ".partial"

    def commit(self, name: str, manifest: bytes, files: Iterable[str]) -> None:
        """Make what was written to the place of ``name`` the checkpoint ``name``."""
        place, final, spare = (self.child(name + suffix) for suffix in (".partial", "", ".spare"))
        folders = {place}
        for file in files:
            _sync(os.path.join(place, file))
            folders.add(os.path.dirname(os.path.join(place, file)))
        _write(os.path.join(place, MANIFEST), manifest)
        for folder in folders:
            _sync_folder(folder)
        if os.path.lexists(final):
            self.discard(name + ".spare")
            os.rename(final, spare)
        os.rename(place, final)
        _sync_folder(self.path)
        self.discard(name + ".spare")

    def discard(self, name: str) -> None:
        """Remove a folder, renamed before, so that what a crash leaves of it is never taken for a checkpoint."""
        path = self.child(name)
        parts = split_name(name)
        assert parts is not None, name
        if not os.path.lexists(path):
            return
        if parts[1] in ("", ".spare"):
            removed = self.child(name.removesuffix(".spare") + ".removed")
            self._delete(removed)
            os.rename(path, removed)
            _sync_folder(self.path)
            path = removed
        self._delete(path)

    def _delete(self, path: str) -> None:
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
        elif os.path.lexists(path):
            shutil.rmtree(path)

    def probe(self) -> None:
        """Whether it can be written to; makes it."""
        os.makedirs(self.path, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=self.path))

    def put(self, file: str, data: bytes) -> None:
        """Replace a small file of this folder at once."""
        temporary = self.child(f".{file}.tmp")
        _write(temporary, data)
        os.replace(temporary, self.child(file))
        _sync_folder(self.path)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: str) -> None:
    if os.name == "nt":
        return  # it opens no folders, and writes their entries at once
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounted file systems sync files only
            raise


class ObjectFolder:
    """A prefix of an object store, and the prefixes in it. ``memory://`` is treated as one."""

    def __init__(self, system: Any, path: str, url: str) -> None:
        self.system = system
        self.path = path.rstrip("/")
        self.url = url

    def child(self, *parts: str) -> str:
        return "/".join((self.path, *(part for part in parts if part)))

    def is_folder(self) -> bool:
        self.system.invalidate_cache()
        return self.system.isdir(self.path)

    def is_file(self, *parts: str) -> bool:
        self.system.invalidate_cache()
        return self.system.isfile(self.child(*parts))

    def folders(self) -> list[str]:
        self.system.invalidate_cache()
        try:
            entries = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def read(self, *parts: str, limit: int) -> bytes:
        self.system.invalidate_cache()
        return self.system.cat_file(self.child(*parts), start=0, end=limit + 1)

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int | OSError]:
        prefix = self.child(name) + "/"
        self.system.invalidate_cache()
        try:
            found = self.system.find(self.child(name), detail=True)
        except FileNotFoundError:
            found = {}
        there = {path.removeprefix(prefix): int(info["size"]) for path, info in found.items()}
        return {file: there[file] if file in there else FileNotFoundError(errno.ENOENT, "missing") for file in files}

    def open(self, name: str, file: str) -> BinaryIO:
        return self.system.open(self.child(name, file), "rb", block_size=8 * 2**20)

    def begin(self, name: str) -> str:
        place = self.place_of(name)
        self.discard(place)
        return f"{self.url}/{place}"

    def place_of(self, name: str) -> str:
        return name + ".spare" if self.is_file(name, MANIFEST) else name

    def commit(self, name: str, manifest: bytes, files: Iterable[str]) -> None:
        place, spare = self.place_of(name), name + ".spare"
        self.system.pipe_file(self.child(place, MANIFEST), manifest)
        if place == spare:
            self.discard(name)
            for file in (*files, MANIFEST):
                self.system.cp_file(self.child(spare, file), self.child(name, file))
        self.discard(spare)

    def discard(self, name: str) -> None:
        """Remove a prefix, the manifest first, so that what a crash leaves of it is never taken for a checkpoint."""
        assert split_name(name) is not None, name
        if self.is_file(name, MANIFEST):
            self.system.rm_file(self.child(name, MANIFEST))
        if self.is_folder_at(name):
            self.system.rm(self.child(name), recursive=True)

    def is_folder_at(self, name: str) -> bool:
        self.system.invalidate_cache()
        return self.system.isdir(self.child(name))

    def probe(self) -> None:
        self.put(".writable", b"")
        self.system.rm_file(self.child(".writable"))

    def put(self, file: str, data: bytes) -> None:
        self.system.pipe_file(self.child(file), data)
