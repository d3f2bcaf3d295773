"""State of any shape as JSON and tensors, and back; nothing that takes code to load.

What JSON has stays as it is. A tensor becomes {"$tensor": key}, and is kept apart under that key; tuples, numbers that
JSON does not have and mappings with other keys than texts become {"$<kind>": ...}.
"""

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError


def to_plain(value: Any, tensors: dict[str, Tensor], *, at: str) -> Any:
    """``value`` as JSON; its tensors go into ``tensors``, under keys that begin with ``at``.

    Raises:
        ConfigError: a value that is neither plain nor a tensor; names where it is.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, DTensor):
        raise ConfigError(f"{_dotted(at)} is a part of a tensor (DTensor), which no hook gets back: keep full_tensor()")
    if isinstance(value, Tensor):
        while at in tensors:  # of {"a/b": ..., "a": {"b": ...}}
            at += "'"
        tensors[at] = value
        return {"$tensor": at}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": to_plain(torch.from_numpy(np.ascontiguousarray(value)), tensors, at=at)}
    if isinstance(value, np.generic):
        return to_plain(value.item(), tensors, at=at)
    if isinstance(value, Enum):
        return to_plain(value.value, tensors, at=at)
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return {"$text": [type(value).__name__, str(value).removeprefix("torch.")]}
    if isinstance(value, tuple | set | frozenset | deque):
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        return {f"${kind}": [to_plain(item, tensors, at=f"{at}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_plain(item, tensors, at=f"{at}/{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict, defaultdict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_plain(item, tensors, at=f"{at}/{key}") for key, item in value.items()}
        pairs = enumerate(value.items())
        return {
            "$pairs": [
                [to_plain(key, tensors, at=f"{at}/{i}.key"), to_plain(item, tensors, at=f"{at}/{i}")]
                for i, (key, item) in pairs
            ]
        }
    raise ConfigError(
        f"{_dotted(at)} is a {type(value).__name__}, which no checkpoint takes: plain values, lists, dicts "
        f"and tensors only (state_dict and on_save_checkpoint decide)"
    )


def _dotted(at: str) -> str:
    return at.replace("/", ".")


def from_plain(plain: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What ``to_plain`` was given, with ``tensor`` to look up its tensors.

    Raises:
        ConfigError: it is nothing that ``to_plain`` makes.
    """
    if isinstance(plain, list):
        return [from_plain(item, tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1 and next(iter(plain)).startswith("$"):
        ((kind, inner),) = plain.items()
        makers: dict[str, Callable[[Any], Any]] = {
            "$float": float,
            "$tensor": tensor,
            "$array": lambda inner: from_plain(inner, tensor).numpy(),
            "$text": _from_text,
            "$pairs": lambda pairs: {from_plain(k, tensor): from_plain(v, tensor) for k, v in pairs},
            **{f"${made.__name__}": partial(_made, made, tensor) for made in (tuple, set, frozenset, deque)},
        }
        if kind in makers:
            return makers[kind](inner)
    return {key: from_plain(item, tensor) for key, item in plain.items()}


def _made(kind: Callable[[Any], Any], tensor: Callable[[str], Tensor], items: Any) -> Any:
    return kind(from_plain(items, tensor))


def _from_text(inner: list[str]) -> Any:
    kind, text = inner
    if kind == "dtype":
        found = getattr(torch, text, None)
        if isinstance(found, torch.dtype):
            return found
    if kind == "device":
        return torch.device(text)
    if kind.endswith("Path"):
        return text
    raise ConfigError(f"a checkpoint holds {kind} {text!r}, which is unknown")
