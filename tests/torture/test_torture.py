"""Runs are killed at random moments, and resumed, until they are done: then nothing is lost, doubled or different.

`make torture` has a hundred and ten trials. `TORTURE_SEED=17 make torture` repeats one of them, `TORTURE_SEED=17-29`
several; each prints what it is, which process died when, and what was there then.
"""

import datetime
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from test_kill import every_operation
from trials import Field, Trial, run_trial
from warm import Warm

RESULTS = Path(__file__).with_name("RESULTS.md")
TRIALS = 110
HEAD = """# Killed and resumed

Written by `make torture` when all of its trials have passed. A trial is a run of 24 steps with a checkpoint every two
to five of them that is sent SIGKILL at one to three moments (its parent, its process group, one rank, or a process of
a loader), and resumed each time. Then every line of its metrics file is there once, and with its last checkpoint
(parameters, moments, random states, counters) equal bit for bit to that of a run that nobody has killed; where it went
on under other layouts, within 1e-9.
"""


def seeds() -> list[int]:
    first, _, last = os.environ.get("TORTURE_SEED", f"0-{TRIALS - 1}").partition("-")
    return list(range(int(first), int(last or first) + 1))


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    mark = uuid.uuid4().hex
    with Warm(mark=mark) as warm:
        yield Field(tmp_path_factory.mktemp("field"), warm, mark)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """The attempts of all trials, written down when none has failed and all were there."""
    rows: list[dict[str, Any]] = []
    failed, began = request.session.testsfailed, time.time()
    yield rows
    trials = {row["seed"] for row in rows}
    if request.session.testsfailed > failed or len(trials) < TRIALS:
        return
    lines = ["| layouts | trials | kills | in a save | in a step | at the start | at the end | damaged |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        killed = [row["when"] for row in own if row["killed"]]
        counts = [killed.count(when) for when in ("save", "step", "start", "end")]
        lines.append(
            f"| {kind} | {len({row['seed'] for row in own})} | {len(killed)} | {' | '.join(map(str, counts))} | 0 |"
        )
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    minutes = (time.time() - began) / 60
    stamp = f"{datetime.date.today()}; {machine}; {minutes:.0f} minutes"
    RESULTS.write_text("\n".join([HEAD, stamp, "", *lines, ""]), encoding="utf-8")


@pytest.mark.parametrize("seed", seeds())
def test_a_killed_run_ends_as_if_nothing_had_been(field: Field, table: list[dict[str, Any]], seed: int):
    trial = Trial.of(seed)
    print(trial)
    attempts = run_trial(field, trial)
    kind = trial.layouts[0] if len(set(trial.layouts)) == 1 else "others each time"
    for attempt, kill in zip(attempts, [*trial.kills, None], strict=False):
        print(attempt)
        table.append({**attempt, "seed": seed, "kind": kind, "when": kill.when if kill else None})


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_every_operation_of_a_save(field: Field, tmp_path: Path, size: int):
    deaths = every_operation(field, tmp_path, size=size, every=1)
    assert deaths > 60
    print(f"{deaths} deaths of one rank of {size}")
