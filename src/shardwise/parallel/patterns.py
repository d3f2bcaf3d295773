"""Names of modules, and the patterns that mean several of them.

``*`` stands for one part of a dotted name, and ``{a,b}`` for either: ``blocks.*.attn.{q,k,v}``.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.styles import STYLES

MOST_NAMES = 12
"""Names that an error lists."""


def match(table: Mapping[Any, Any], model: nn.Module, *, prefix: str) -> dict[str, str]:
    """Module name -> style, every pattern checked; it may begin as names in a checkpoint do, with ``prefix``."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str] = {}
    source: dict[str, str] = {}
    for pattern, style in table.items():
        if not isinstance(style, str):
            raise ConfigError(
                f"strategy.plan: '{pattern}' has {style!r} and not the name of a style; there are {', '.join(STYLES)}"
            )
        if style not in STYLES:
            near = difflib.get_close_matches(str(style), STYLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STYLES)}"
            raise ConfigError(f"strategy.plan: '{pattern}' has the style {style!r}: no such style; {hint}")
        for one in _alternatives(str(pattern)):
            means = expression(one)
            found = [name for name in names if means.fullmatch(name)]
            found = found or [name for name in names if means.fullmatch(prefix + name)]
            if not found:
                near = difflib.get_close_matches(one, [*patterns_of(names), *names], n=1)
                hint = f"the nearest is {near[0]!r}" if near else f"its modules are {listed(patterns_of(names))}"
                raise ConfigError(f"strategy.plan: {one!r} matches no module of {type(model).__name__}; {hint}")
            for name in found:
                if name in source:
                    raise ConfigError(
                        f"strategy.plan: {source[name]!r} ({styles[name]}) and '{pattern}' ({style}) both match "
                        f"{name}: leave one of them out"
                    )
                styles[name], source[name] = style, str(pattern)
    return styles


def expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern)))


def _alternatives(pattern: str) -> list[str]:
    """A pattern with ``{a,b}`` as one pattern for each choice."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [whole for choice in found[1].split(",") for whole in _alternatives(before + choice.strip() + after)]


def patterns_of(names: list[str]) -> list[str]:
    """Names with ``*`` in the place of numbers, each once, in order."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
