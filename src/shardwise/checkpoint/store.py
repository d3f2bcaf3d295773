"""Where the checkpoints of a run lie: what is there, what is whole, how one is published and removed.

``<root>/step_00000100/`` is a checkpoint once it holds a manifest; ``last`` and ``best`` beside it hold names. Reading
never changes anything. ``filesystems.py`` has the order in which things are written.
"""

import os
from collections.abc import Mapping
from typing import Any

import yaml

from shardwise.checkpoint.filesystems import LocalFolder, ObjectFolder, open_folder, reason
from shardwise.checkpoint.manifest import (
    MANIFEST,
    dump_manifest,
    printable,
    split_name,
    stays_inside,
    step_name,
    step_of,
)
from shardwise.checkpoint.verify import UnreadableError, checksum, file_problems, read_manifest
from shardwise.errors import ConfigError

__all__ = ["Store", "checkpoints_of", "checksum", "step_name", "step_of"]

STORAGE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hdfs", "memory", "file", "local")
"""Protocols that a run folder, which may be a stranger's, can send a reader to."""


class Store:
    """The checkpoints in one folder, on any file system.

    Args:
        url: the folder, as a path or a URL (``s3://...``, ``gs://...``, ``memory://...``); it need not exist yet.

    Raises:
        ConfigError: nothing can be made of the URL, here or, when it is read, by a method: no permission, no folder.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._folder = open_folder(url)

    @property
    def url(self) -> str:
        """The folder: an absolute path, or the URL."""
        return self._folder.url

    def url_of(self, name: str) -> str:
        """Where the checkpoint ``name`` lies."""
        return f"{self.url.rstrip('/')}/{name}"

    # ---- reading ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The published ones, which have a manifest, oldest step first; whether they are whole is ``problems``' to say.

        ``step_00000100.spare`` is one where a crash has left nothing else of the step.
        """
        found = {}
        for name, step, _ in self._candidates(("", ".spare")):
            if step not in found and self._folder.is_file(name, MANIFEST):
                found[step] = name
        return [found[step] for step in sorted(found)]

    def leftovers(self) -> list[str]:
        """What crashes have left, oldest step first: nobody needs it once nobody writes; ``remove`` takes its names."""
        published = self.names()
        remote = isinstance(self._folder, ObjectFolder)
        return [
            name
            for name, _, suffix in reversed(self._candidates())
            if name not in published and (suffix or (remote and not self._folder.is_file(name, MANIFEST)))
        ]

    def last(self) -> str | None:
        """The name of the checkpoint that was published last, None if it is not there (any more)."""
        return self._pointer("last")

    def best(self) -> str | None:
        """The name of the best checkpoint, None if none was called so or it is not there (any more)."""
        return self._pointer("best")

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of ``name``, its structure checked.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        plain, fault = read_manifest(self._folder, name)
        if plain is None:
            raise ConfigError(f"{printable(self.url_of(name))} is no whole checkpoint: {fault}")
        return plain

    def problems(self, name: str, *, contents: bool = True) -> list[str]:
        """What is wrong with the checkpoint ``name``, each file by its name; empty if it is whole.

        Args:
            contents: whether files are read and their checksums compared; presence and sizes are looked at anyway.

        Raises:
            ConfigError: something cannot be read now, which is another thing than damage.
        """
        if not _is_plain(name):
            return [f"{printable(name)}: no name of a checkpoint"]
        found: list[str] = []
        for _ in range(3):  # a writer may have replaced it while it was read
            plain, fault = read_manifest(self._folder, name)
            if plain is None:
                return [str(fault)]
            found = file_problems(self._folder, name, plain["files"], contents=contents)
            if not found or read_manifest(self._folder, name)[0] == plain:
                break
        return found

    def newest_whole(self, *, contents: bool = True) -> tuple[str | None, dict[str, list[str]]]:
        """The newest checkpoint that is whole, and ``{name: problems}`` of everything newer, the newest first.

        It stops at the first whole one. None if there is none.

        Raises:
            ConfigError: the store, or something newer than the first whole one, cannot be read now: to go back behind
                it would lose it.
        """
        for _ in range(3):  # a writer may have renamed the only one between the list and the look
            candidates = self._candidates()
            skipped = {}
            for name, _, _ in candidates:
                skipped[name] = self.problems(name, contents=contents)
                if not skipped[name]:
                    del skipped[name]
                    return name, skipped
            if candidates == self._candidates():
                break
        return None, skipped

    def _candidates(self, suffixes: tuple[str, ...] = ("", ".spare", ".partial", ".removed")) -> list[tuple]:
        """(name, step, suffix) of everything that looks like a checkpoint, in the order in which it would be used."""
        try:
            names = self._folder.folders()
        except NotADirectoryError:
            raise ConfigError(
                f"{printable(self.url)} is a file, and checkpoints lie in a folder: type another"
            ) from None
        except PermissionError as error:
            raise ConfigError(f"{printable(self.url)} cannot be read ({reason(error)}): {_ASK}") from error
        except Exception as error:
            if isinstance(self._folder, LocalFolder) and not isinstance(error, OSError):
                raise
            raise ConfigError(f"{printable(self.url)} cannot be read: {reason(error)}") from error
        found = [(name, *parts) for name in names if (parts := split_name(name)) is not None and parts[1] in suffixes]
        return sorted(found, key=lambda entry: (-entry[1], suffixes.index(entry[2])))

    def _pointer(self, file: str) -> str | None:
        try:
            name = self._folder.read(file, limit=1024).decode("utf-8").strip()
        except (OSError, ValueError):
            return None
        parts = split_name(name)
        if parts is None or parts[1]:
            return None
        for there in (name, name + ".spare"):
            if self._folder.is_file(there, MANIFEST):
                return there
        return None

    # ---- writing: one process at a time -----------------------------------------------------------------------------

    def begin(self, name: str) -> str:
        """The URL of an empty place to write the checkpoint ``name`` to; what a crash has left of it goes.

        A published checkpoint of that name stays until ``publish``.

        Raises:
            OSError: it cannot be made.
        """
        return self._folder.begin(_published_name(name))

    def publish(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Make what was written since ``begin`` the checkpoint ``name``, and ``last`` point to it.

        A crash at any moment leaves the checkpoint that was there before, or this one, whole and found by
        ``newest_whole``.

        Args:
            manifest: step, run_id, files and the rest; format_version and time are filled in.

        Raises:
            OSError: it cannot be written, or a file is not there in its full size. It is published if only ``last``
                could not be written.
        """
        folder, data = self._folder, dump_manifest({"step": step_of(_published_name(name)), **manifest})
        files = manifest["files"]
        place = folder.place_of(name)
        try:
            found = file_problems(folder, place, files, contents=False)
        except UnreadableError as error:
            found = [str(error)]
        if found:
            raise OSError(f"{self.url_of(place)} is not published: {'; '.join(found[:3])}")
        folder.commit(name, data, list(files))
        folder.put("last", f"{name}\n".encode())

    def set_last(self, name: str) -> None:
        """Make ``last`` point to a published checkpoint, which a crash right after ``publish`` may have prevented.

        Raises:
            OSError: it cannot be written.
        """
        assert self._folder.is_file(name, MANIFEST), name
        self._folder.put("last", f"{name.removesuffix('.spare')}\n".encode())

    def set_best(self, name: str) -> None:
        """Make ``best`` point to a published checkpoint.

        Raises:
            OSError: it cannot be written.
        """
        assert self._folder.is_file(name, MANIFEST), name
        self._folder.put("best", f"{name.removesuffix('.spare')}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or what is left of one; nothing happens if it is not there.

        From the first moment on, what a crash would leave counts as incomplete.

        Raises:
            OSError: something of it cannot be removed.
        """
        step_of(name)  # never anything else
        self._folder.discard(name)

    def check_writable(self) -> None:
        """Whether a checkpoint could be written here; makes the folder, and leaves nothing else behind.

        Raises:
            ConfigError: it could not, and why.
        """
        try:
            self._folder.probe()
        except Exception as error:
            raise ConfigError(f"{printable(self.url)} cannot be written to ({reason(error)}): {_ASK}") from error


_ASK = "ask its owner for permission, or type another"


def _is_plain(name: str) -> bool:
    return stays_inside(name) and "/" not in name


def _published_name(name: str) -> str:
    assert split_name(name) == (step_of(name), ""), name
    return name


def checkpoints_of(run_folder: str | os.PathLike[str]) -> Store:
    """The store of a run: where the ``checkpoint.folder`` of its config.yaml says, or its folder ``checkpoints``.

    Raises:
        ConfigError: config.yaml is damaged, or names a place that it may not send anybody to.
    """
    folder = open_folder(run_folder)
    named = _configured(folder)
    if named is None:
        return Store(f"{folder.url.rstrip('/')}/checkpoints")
    protocol = named.partition("://")[0] if "://" in named else "file"
    if protocol not in STORAGE:
        raise ConfigError(
            f"{printable(folder.url)}: its config.yaml has checkpoint.folder={printable(named)}, and a run folder may "
            f"name a path or {', '.join(f'{one}://' for one in STORAGE[:3])} and the like only: type the checkpoint"
        )
    return Store(f"{named.rstrip('/')}/{folder.url.rstrip('/').rpartition('/')[2]}")


def _configured(folder: LocalFolder | ObjectFolder) -> str | None:
    path = f"{printable(folder.url)}/config.yaml"
    try:
        plain: Any = yaml.safe_load(folder.read("config.yaml", limit=2**24))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {reason(error)}") from error
    except Exception as error:  # object stores have errors of their own; to look elsewhere could miss what is there
        raise ConfigError(f"{path} cannot be read ({reason(error)})") from error
    section = plain.get("checkpoint") if isinstance(plain, dict) else None
    named = section.get("folder") if isinstance(section, dict) else None
    if named is not None and (not isinstance(named, str) or not named.strip()):
        raise ConfigError(f"{path} is damaged: its checkpoint.folder is no text")
    return named
