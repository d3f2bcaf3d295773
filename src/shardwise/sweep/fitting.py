"""A table in the width of a terminal: texts that can be shortened are, and numbers and states are not."""

import re
from collections.abc import Sequence

from rich.cells import cell_len

GROUPS_OF_KEY = re.compile(r"(?<!\S)[+~]*(?:[\w/@-]+\.)+(?=[\w/@-]+=)")
"""``optimizer.`` of ``optimizer.lr=0.1``."""
GAP = 2
"""Characters between two columns."""

Rows = list[list[str]]


def width_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Characters of the longest line."""
    return sum(_widths(headings, rows)) + GAP * (len(headings) - 1)


def fitted(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int = 12
) -> tuple[list[str], Rows]:
    """A table with its second column, the overrides, as short as it takes, though not below ``least``; no other is
    cut."""
    heads, cells = list(headings), [list(row) for row in rows]
    if cells and width_of(heads, cells) > width:
        for row in cells:
            row[1] = _short_keys(row[1])
        room = max(least, _widths(heads, cells)[1] + min(0, width - width_of(heads, cells)))
        for row in [heads, *cells]:
            row[1] = _cut(row[1], room)
    return heads, cells


def cut_last(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], Rows]:
    """A table with its last column cut to what is left."""
    heads, cells = list(headings), [list(row) for row in rows]
    room = max(0, _widths(heads, cells)[-1] + min(0, width - width_of(heads, cells)))
    for row in [heads, *cells]:
        row[-1] = _cut(row[-1], room)
    return heads, cells


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]


def _short_keys(label: str) -> str:
    """``lr=0.1 width=8`` of ``optimizer.lr=0.1 model.width=8``, unless two keys would be the same."""
    short = GROUPS_OF_KEY.sub("", label)
    keys = re.findall(r"(?<!\S)([^\s=]+)=", short)
    return short if len(set(keys)) == len(keys) else label


def _cut(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    return f"{text[: room - 1]}…" if room > 1 else ""
