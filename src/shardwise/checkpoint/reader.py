"""Opening a checkpoint: where it is, and what its ``state.json`` says."""

import json
from typing import Any

from fsspec.core import url_to_fs

from shardwise.checkpoint.find import find_checkpoint
from shardwise.checkpoint.manifest import FORMAT_VERSION, printable
from shardwise.checkpoint.writer import STATE
from shardwise.errors import ConfigError


def open_checkpoint(text: str) -> tuple[str, dict[str, Any]]:
    """The URL of the checkpoint that ``text`` names, whose files are there in their sizes, and its ``state.json``.

    Raises:
        ConfigError: there is none, or it is damaged, or of a newer format.
    """
    url = find_checkpoint(text, contents=False).url
    return url, read_state(url)


def read_state(url: str) -> dict[str, Any]:
    """The plain part of a checkpoint.

    Raises:
        ConfigError: it cannot be read, is damaged, or is of a newer format.
    """
    path = f"{printable(url)}/{STATE}"
    system, folder = url_to_fs(url)
    try:
        state = json.loads(system.cat_file(f"{folder}/{STATE}"))
    except FileNotFoundError:
        raise ConfigError(f"{printable(url)} is no checkpoint: {STATE} is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    kinds = {"format_version": int, "step": int, "mesh": dict, "trainer": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(state, dict) or not isinstance(state.get(key), kind)]
    if wrong:
        raise ConfigError(f"{path} is damaged: {', '.join(wrong)} is missing or of another kind")
    if state["format_version"] > FORMAT_VERSION:
        raise ConfigError(
            f"{printable(url)} is of format {state['format_version']}, this shardwise reads up to {FORMAT_VERSION}: "
            f"install a newer one"
        )
    return state
