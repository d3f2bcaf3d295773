"""The files of a text: a file, a folder, or the Python standard library's own sources."""

import sysconfig
from pathlib import Path

from shardwise.errors import ConfigError

STANDARD_LIBRARY_BYTES = 2_000_000
"""As much of the standard library as is read."""


def find_documents(path: str | Path, *, suffix: str, name: str = "data.path") -> list[Path]:
    """`path` itself, or the files below it that end in `suffix`, sorted; a `ConfigError` if there is none."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"{name}={path} does not exist: set it to a text file or to a folder of them")
    found = sorted((file for file in root.rglob(f"*{suffix}") if file.is_file()), key=lambda file: file.as_posix())
    if not found:
        raise ConfigError(f"{name}={path} has no files that end in {suffix!r}: set the suffix that its texts have")
    return found


def standard_library() -> list[Path]:
    """The first 2 MB of the top-level modules of the running Python's standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen, total = [], 0
    for file in sorted(root.glob("*.py")):
        total += file.stat().st_size
        if total > STANDARD_LIBRARY_BYTES:
            break
        chosen.append(file)
    if not chosen:
        raise ConfigError(f"{root} has no sources of the standard library: set data.path to a text of your own")
    return chosen


def read_document(path: Path) -> bytes:
    """The bytes of `path`; a `ConfigError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
