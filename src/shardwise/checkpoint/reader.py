"""Opening a checkpoint: where it is, and what its ``state.json`` says.

A checkpoint may come from a stranger: what is read is bounded, and checked before anything believes it.
"""

import json
from typing import Any

from shardwise.checkpoint.filesystems import open_folder, reason
from shardwise.checkpoint.find import find_checkpoint
from shardwise.checkpoint.manifest import FORMAT_VERSION, MAX_BYTES, printable
from shardwise.errors import ConfigError

STATE = "state.json"
"""What a checkpoint holds besides tensors, in plain values."""


def open_checkpoint(text: str, *, contents: bool = False) -> tuple[str, dict[str, Any]]:
    """The URL of the checkpoint that ``text`` names, whose files are there in their sizes, and its ``state.json``.

    Raises:
        ConfigError: there is none, or it is damaged, or of a newer format.
    """
    url = find_checkpoint(text, contents=contents).url
    return url, read_state(url)


def read_state(url: str, *, configured: bool = False) -> dict[str, Any]:
    """The plain part of a checkpoint.

    Args:
        url: of the checkpoint.
        configured: whether the run's configuration has to be in it.

    Raises:
        ConfigError: it cannot be read, is damaged, or is of a newer format.
    """
    state, path = read_plain(url), f"{printable(url)}/{STATE}"
    if configured and not isinstance(state.get("config"), dict):
        raise ConfigError(f"{path} is damaged: the configuration of the run is expected under config")
    kinds = {"format_version": int, "step": int, "mesh": dict, "trainer": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise ConfigError(f"{path} is damaged: {', '.join(wrong)} is missing or of another kind")
    if state["format_version"] > FORMAT_VERSION:
        raise ConfigError(
            f"{printable(url)} is of format {state['format_version']}, this shardwise reads up to {FORMAT_VERSION}: "
            f"install a newer one"
        )
    return state


def read_plain(url: str) -> dict[str, Any]:
    """What ``state.json`` holds, whatever that is.

    Raises:
        ConfigError: it cannot be read, is too large, or is no mapping.
    """
    path = f"{printable(url)}/{STATE}"
    try:
        raw = open_folder(url).read(STATE, limit=MAX_BYTES)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path} is damaged: it has more than {MAX_BYTES} bytes, which no state has")
        state = json.loads(raw)
    except ConfigError:
        raise
    except FileNotFoundError:
        gone = f"{STATE} is not there (any more: a run that goes on removes older ones); name another, or its run"
        raise ConfigError(f"{printable(url)} is no whole checkpoint: {gone}") from None
    except RecursionError as error:
        raise ConfigError(f"{path} is damaged: it is nested too deep") from error
    except Exception as error:  # object stores have errors of their own
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} is damaged: a mapping is expected")
    return state
