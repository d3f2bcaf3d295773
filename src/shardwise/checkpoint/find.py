"""The checkpoint that a text names: a checkpoint's folder, ``last`` or ``best``, a folder of them, or a run folder."""

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.checkpoint.filesystems import LocalFolder, ObjectFolder, open_folder, reason
from shardwise.checkpoint.manifest import MANIFEST, NEWER, printable, split_name, step_of
from shardwise.checkpoint.store import Store, checkpoints_of
from shardwise.errors import ConfigError

POINTERS = ("last", "best")
_HOLDS = f"a checkpoint holds {MANIFEST}, a run folder config.yaml and checkpoints/"


class Found(NamedTuple):
    """A whole checkpoint."""

    store: Store
    name: str
    skipped: dict[str, list[str]]
    """Newer ones that are not whole, and what is wrong with each; empty where one was named."""

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.store.url_of(self.name)

    def notes(self) -> list[str]:
        """A line for each that was skipped."""
        return [
            f"{name} is damaged or incomplete: {in_short(problems)}; {self.name} is used"
            for name, problems in self.skipped.items()
        ]


def find_checkpoint(text: str, *, contents: bool = True) -> Found:
    """The whole checkpoint that ``text`` names; of a run folder or a folder of checkpoints, the newest whole one.

    Args:
        contents: whether every file's checksum is compared; sizes are in any case.

    Raises:
        ConfigError: there is nothing, nothing of the kind, nothing whole, a newer format, or no permission.
    """
    store, name = locate(text)
    shown = printable(text)
    if name is not None:
        problems = store.problems(name, contents=contents)
        if not problems:
            return Found(store, name, {})
        if NEWER in problems[0]:
            raise ConfigError(f"{shown} {problems[0].partition(': ')[2]}: install a newer shardwise")
        whole = None
        with contextlib.suppress(ConfigError):  # what is wrong with the one that is named counts
            whole, _ = store.newest_whole(contents=contents)
        instead = (
            f"the newest whole one here is {printable(store.url_of(whole))}" if whole else "no other here is whole"
        )
        raise ConfigError(f"{shown} is damaged or incomplete: {in_short(problems)}; {instead}")
    found, skipped = newest_whole([store], shown=shown, contents=contents)
    if found is not None:
        return found
    if not skipped:
        raise ConfigError(f"{shown} has no checkpoint yet: {printable(store.url)} holds none")
    # One that was finished once says more than one that never was.
    newest = next((one for one in skipped if split_name(one) == (step_of(one), "")), next(iter(skipped)))
    more = f", and none of {len(skipped) - 1} others is whole" if len(skipped) > 1 else ""
    raise ConfigError(
        f"{shown} has no whole checkpoint: {newest} is damaged or incomplete ({in_short(skipped[newest])}){more}"
    )


def stores_of(run_folder: str | os.PathLike[str]) -> list[Store]:
    """Where checkpoints of a run may lie: where its config.yaml says, and, if that is elsewhere, in its own folder.

    A run that was resumed with another ``checkpoint.folder``, and ended before it saved there, has them in the latter.

    Raises:
        ConfigError: as for ``checkpoints_of``.
    """
    named, own = checkpoints_of(run_folder), Store(f"{open_folder(run_folder).url.rstrip('/')}/checkpoints")
    return [named] if named.url == own.url else [named, own]


def newest_whole(
    stores: Sequence[Store], *, shown: str, contents: bool = True
) -> tuple[Found | None, dict[str, list[str]]]:
    """The newest whole checkpoint of several stores, the first of which is preferred, and what is newer and not whole.

    Args:
        stores: where to look.
        shown: what they are called where something is wrong.
        contents: whether every file's checksum is compared; sizes are in any case.

    Returns:
        The checkpoint, None if there is none, and ``{name: problems}``, with the whole URL for a name outside of the
        first store.

    Raises:
        ConfigError: one that would be newer is of a newer format, or cannot be read; or there is none, and the disk has
            failed where there was one.
    """
    best: Found | None = None
    skipped: dict[str, list[str]] = {}
    for store in stores:
        if best is not None and max(map(step_of, store.names()), default=-1) <= step_of(best.name):
            continue
        name, newer = store.newest_whole(contents=contents)
        if name is not None and (best is None or step_of(name) > step_of(best.name)):
            best = Found(store, name, {})
        skipped |= {one if store is stores[0] else store.url_of(one): problems for one, problems in newer.items()}
    if best is not None:
        least = step_of(best.name)
        skipped = {one: problems for one, problems in skipped.items() if step_of(one.rpartition("/")[2]) >= least}
        best = best._replace(skipped=skipped)
    for one, problems in skipped.items():
        if NEWER in problems[0]:  # it is not damaged: going back behind it would lose it
            older = f", or type an older checkpoint, such as {printable(best.url)}" if best is not None else ""
            raise ConfigError(f"{one} in {shown} {problems[0].partition(': ')[2]}: install a newer shardwise{older}")
        failure = next((problem for problem in problems if f"({os.strerror(errno.EIO)})" in problem), None)
        if best is None and failure is not None:  # all of them: rather a mount that is gone than that many sectors
            raise ConfigError(
                f"{one} in {shown}: {failure}, and no other is whole: see that its disk works, or remove it"
            )
    return best, skipped


def locate(text: str) -> tuple[Store, str | None]:
    """Where ``text`` leads: a checkpoint, whole or not, or None for the newest whole one of the store.

    Raises:
        ConfigError: there is nothing, nothing of the kind, or no permission to look.
    """
    shown = printable(text)
    folder = open_folder(text)
    try:
        return _locate(folder, shown)
    except ConfigError:
        raise
    except Exception as error:  # object stores have errors of their own
        if isinstance(folder, LocalFolder) and not isinstance(error, OSError):
            raise
        fix = "ask its owner, or type another" if isinstance(error, PermissionError) else "type another"
        raise ConfigError(f"{shown} cannot be read ({reason(error)}): {fix}") from error


def _locate(folder: LocalFolder | ObjectFolder, shown: str) -> tuple[Store, str | None]:
    parent, _, name = folder.url.rstrip("/").rpartition("/")
    if isinstance(folder, LocalFolder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder.path)  # whether there is permission to look, which is_folder does not tell
    if not folder.is_folder():
        if name in POINTERS:
            store = Store(parent or "/")
            target = store.last() if name == "last" else store.best()
            if target is not None:
                return store, target
            there = ", ".join(store.names()[-3:]) or "none"
            raise ConfigError(
                f"{shown} names no checkpoint that is there; checkpoints in {printable(store.url)}: {there}"
            )
        if folder.is_file():
            raise ConfigError(f"{shown} is a file: type the folder of a checkpoint or of a run ({_HOLDS})")
        raise ConfigError(f"{shown}: no such folder; type the folder of a checkpoint or of a run ({_HOLDS})")
    inside = folder.folders()
    if split_name(name) is not None or folder.is_file(MANIFEST):
        return Store(parent or "/"), name
    if any(split_name(one) is not None for one in inside):
        return Store(folder.url), None
    if folder.is_file("config.yaml") or "checkpoints" in inside:
        return checkpoints_of(folder.url), None
    raise ConfigError(f"{shown} is no checkpoint and no run folder: {_HOLDS}")


def in_short(problems: list[str]) -> str:
    """The first few problems of a checkpoint in one line."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
