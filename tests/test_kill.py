"""`kill -9` at any moment costs the steps since the last checkpoint and nothing else; `make torture` has more of it."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dying import LOSSES, save_and_die
from shardwise.checkpoint.manifest import step_name
from shardwise.checkpoint.store import Store
from trials import Field, Kill, Trial, run_trial, tensors
from warm import Warm

LAST = max(LOSSES)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    mark = uuid.uuid4().hex
    with Warm(mark=mark) as warm:
        yield Field(tmp_path_factory.mktemp("field"), warm, mark)


# ---- runs ----------------------------------------------------------------------------------------------------------

CALM = {"restarts": 0, "cold": False, "every_n_steps": 3, "keep_last": 2}
TRIALS = [
    # in the midst of a save, one device, a loader's process among those that have to go
    Trial.of(0, kind=("one", "loader"), kills=[Kill("save", 2, 0.004, "parent", 0)], layouts=["one"] * 2, **CALM),
    # one rank of two, in a step
    Trial.of(1, kind=("fsdp", "text"), kills=[Kill("step", 8, 0.02, "rank", 1)], layouts=["fsdp"] * 2, **CALM),
    # all of a run, in a save; and it goes on with one process instead of four
    Trial.of(2, kind=("calm", "calm"), kills=[Kill("save", 2, 0.0, "group", 0)], layouts=["fsdp+tp", "one"], **CALM),
]


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: "-".join(trial.layouts))
def test_a_killed_run_goes_on_as_if_nothing_had_been(field: Field, trial: Trial):
    """Lines of the metrics file, parameters, moments and random states are those of a run that nobody has killed."""
    rows = run_trial(field, trial)
    assert rows[0]["killed"], "it was over before it was killed"
    assert rows[0]["published"], "there was something to go on from"
    assert rows[-1]["from"] > 0


# ---- a save, at every moment of it ---------------------------------------------------------------------------------


def save(field: Field, folder: Path, first: int, *, die_at: int = 0, dies: int = 0, size: int = 1) -> list[int]:
    """Save up to the last step on ``size`` ranks, of which one is killed; returns how they ended."""
    processes = [
        field.warm.start(
            f"{save_and_die.__module__}:{save_and_die.__name__}",
            [[], str(folder), first, LAST, die_at, rank, size, dies],
            cwd=field.folder,
            out=field.folder / f"out_{rank}",
            err=field.folder / f"err_{rank}",
        )
        for rank in range(size)
    ]
    return [process.wait(60) for process in processes]


def finished(folder: Path, rank: int) -> tuple[int, int]:
    """(the last step that a rank has finished, how many operations it has made)"""
    path = Path(f"{folder}.done_{rank}")
    lines = path.read_text().split("\n") if path.exists() else []
    steps = [int(line) for line in lines if line.isdigit()]
    counts = [int(line.split()[1]) for line in lines if line.startswith("operations")]
    return max(steps, default=0), max(counts, default=0)


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def die_and_go_on(field: Field, root: Path, die_at: int, *, dies: int, size: int, expected: list[str]) -> None:
    folder = root / f"die_{dies}_{die_at}"
    statuses = save(field, folder, 1, die_at=die_at, dies=dies, size=size)
    where = f"rank {dies} of {size} was killed at operation {die_at}"
    assert statuses[dies] == -9, where
    done = max(finished(folder, rank)[0] for rank in range(size))
    store = Store(folder)
    newest, _ = store.newest_whole()
    names = store.names()
    assert all(store.problems(name) == [] for name in names), where
    assert newest in ({None, step_name(1)} if done == 0 else {step_name(done), step_name(done + 1)}), where
    assert len(names) >= min(done, 2), where
    if done >= 2:
        assert step_name(2) in names, f"{where}: the best one is kept"
    assert store.last() in [None, *names][-2:], where
    for name in names:
        step = int(name.removeprefix("step_"))
        assert all(bool((tensor == step).all()) for tensor in tensors(store.url_of(name)).values()), where
    first = 1 + (0 if newest is None else int(newest.removeprefix("step_")))
    again = save(field, folder, first, size=size)
    assert again == [0] * size, f"{where}\n{(field.folder / 'err_0').read_text()}"
    assert contents(folder) == expected, where
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "every"), [(1, 7), (2, 19)])
def test_killed_at_an_operation_of_a_save(field: Field, tmp_path: Path, size: int, every: int):
    """Every `every`-th of all operations, of each rank; `make torture` has all of them."""
    assert every_operation(field, tmp_path, size=size, every=every) > 2


def every_operation(field: Field, root: Path, *, size: int, every: int) -> int:
    """Returns how often somebody was killed."""
    calm = root / "calm"
    assert save(field, calm, 1, size=size) == [0] * size, (field.folder / "err_0").read_text()
    expected = contents(calm)
    assert Store(calm).names() == [step_name(2), step_name(3), step_name(4)]
    assert Store(calm).leftovers() == []
    deaths = 0
    for dies in range(size):
        count = finished(calm, dies)[1]
        assert count > 20 if dies == 0 else count > 4, "operations are counted"
        for die_at in range(1 + dies, count + 1, every):
            die_and_go_on(field, root, die_at, dies=dies, size=size, expected=expected)
            deaths += 1
    return deaths
