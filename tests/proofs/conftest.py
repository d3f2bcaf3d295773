"""Proofs take longer than tests and leave their figures in RESULTS.md beside them."""

import datetime
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import pytorch_lightning
import torch

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "# Results of the proofs\n\nWritten by `make proofs`; a section is replaced when its proof has run to its end.\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.proofs)


def with_section(text: str, title: str, body: str) -> str:
    """`text` with the section `title` put in place of the one of that name, or at the end."""
    section = f"## {title}\n\n{body}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{text.rstrip()}\n\n{section}"
    rest = text[found.end() :]
    return text[: found.start()] + section + (f"\n{rest}" if rest else "")


def _shown(figure: float) -> str:
    """A gap has two digits, a loss has four."""
    return f"{figure:.2g}" if abs(figure) < 0.1 else f"{figure:.4g}"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """`results("row", gap=1e-12)` adds a row to the table of this proof, whose title is its module's first line."""
    rows: list[tuple[str, dict[str, float]]] = []
    failed = request.session.testsfailed

    def add(name: str, **figures: float) -> None:
        rows.append((name, figures))

    yield add
    if request.session.testsfailed > failed or not rows:
        return
    columns = list(dict.fromkeys(key for _, figures in rows for key in figures))
    table = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, figures in rows:
        cells = (_shown(figures[key]) if key in figures else "" for key in columns)
        table.append(f"| {name} | {' | '.join(cells)} |")
    versions = f"torch {torch.__version__}, pytorch-lightning {pytorch_lightning.__version__}"
    python = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    stamp = f"{datetime.date.today()}; {versions}, {python}"
    title = (request.module.__doc__ or request.module.__name__).splitlines()[0].rstrip(".")
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    RESULTS.write_text(with_section(text, title, "\n".join([stamp, "", *table])), encoding="utf-8")
