"""A run that is killed, again and again, and what has to be there of it in the end.

A :class:`Trial` follows from its seed alone: what is trained, how it is saved, and which process dies when. The moments
hang on what the run does (a save begins, a step is logged), not on a clock, so that a busy machine meets the same ones.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkout import ROOT
from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.manifest import step_of
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.tensors import read_tensors
from shardwise.metrics_file import RANK_KINDS
from shardwise.parallel.pieces import Pieces
from warm import MARK, Started, Warm

STEPS = 24
GONE_SECONDS = 30.0
"""After the end of a run, or of the process that was killed: the time for everything that came of it to be gone."""
RUN_SECONDS = 400.0
"""Limit for a run; a busy machine takes its time."""
CLOCKED = re.compile(r"time|per_second|seconds|mfu", re.IGNORECASE)
"""Metrics that no two runs have in common."""

COMMON = [
    "experiment_name=torture", "precision=64-true", "logger=none", "trainer.log_every_n_steps=1",
    f"trainer.max_steps={STEPS}", "schedule.warmup_steps=3", "batch.global_size=8", "checkpoint.every_minutes=null",
]  # fmt: skip
IMAGES = [
    "model=mlp",
    "model.width=8",
    "model.dropout=0.2",
    "data=imagefolder",
    "data.path=images",
    "data.image_size=8",
]
TEXT = ["task=language_model", "model=gpt", "model.n_layer=2", "model.n_head=2", "model.width=16", "data=text"]
TEXT += ["data.path=words.txt", "data.context=16", "trainer.val_check_interval=10"]
LAYOUTS = {
    "one": [],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
    "fsdp+tp": ["strategy=fsdp+tp", "trainer.devices=4"],
}
RANKS = {"one": 1, "fsdp": 2, "fsdp+tp": 4}
WORKLOADS = {
    "images": [*IMAGES, "data.num_workers=0"],
    "loader": [*IMAGES, "data.num_workers=1"],
    "accumulate": [*IMAGES, "data.num_workers=0", "batch.micro_size=2"],
    "text": [*TEXT, "model.dropout=0.2"],
    "calm": TEXT,  # without a random number, for runs that go on under another layout
}
KINDS = [
    *(("one", "loader"), ("one", "images"), ("one", "text"), ("one", "loader"), ("fsdp", "accumulate")),
    *(("fsdp", "loader"), ("fsdp", "text"), ("fsdp+tp", "text"), ("fsdp+tp", "text")),
    *(("calm", "calm"), ("calm", "calm")),
]  # fmt: skip
"""(layout, workload) by seed; under ``calm`` the run goes on under another layout each time."""


@dataclass
class Kill:
    """Which process dies when: ``at`` counts saves or steps from the start of the attempt, ``after`` is in seconds."""

    when: str
    at: int
    after: float
    whom: str
    rank: int


@dataclass
class Trial:
    """One run and those that go on with it."""

    seed: int
    layouts: list[str]
    workload: str
    every_n_steps: int
    background: bool
    keep_last: int
    restarts: int
    cold: bool
    """Started as `python train.py`, not from a warm process."""
    kills: list[Kill] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int, *, kind: tuple[str, str] | None = None, **fixed: Any) -> "Trial":
        """The trial of a seed; ``kind`` and ``fixed`` replace what the seed says."""
        draw = random.Random(seed)
        layout, workload = kind or KINDS[seed % len(KINDS)]
        number = draw.choice([1, 1, 2, 3])
        names = list(LAYOUTS)
        layouts = [layout] * (number + 1) if layout != "calm" else [draw.choice(names) for _ in range(number + 1)]
        if layout == "calm" and len(set(layouts)) == 1:
            layouts[0] = draw.choice([name for name in names if name != layouts[1]])
        trial = cls(
            seed=seed,
            layouts=layouts,
            workload=workload,
            every_n_steps=draw.randint(2, 5),
            background=draw.random() < 0.6,
            keep_last=draw.randint(1, 3),
            restarts=3 if layout in ("fsdp", "fsdp+tp") and draw.random() < 0.25 else 0,
            cold=draw.random() < 0.08,
            kills=[_draw_kill(draw, RANKS[name]) for name in layouts[:-1]],
        )
        for name, value in fixed.items():
            setattr(trial, name, value)
        return trial

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def _draw_kill(draw: random.Random, ranks: int) -> Kill:
    when = draw.choices(["save", "step", "start", "end"], [0.45, 0.3, 0.13, 0.12])[0]
    after = {
        "save": draw.choice([0.0, draw.uniform(0, 0.03), draw.uniform(0, 0.15)]),
        "step": draw.uniform(0, 0.15),
        "start": draw.uniform(0, 4.0 + ranks),
        "end": draw.uniform(0, 1.0),
    }[when]
    whom = draw.choice(["parent", "group", "rank", "rank", "worker" if ranks == 1 else "rank"])
    at = draw.randint(1, 4) if when == "save" else draw.randint(1, STEPS - 6)
    return Kill(when, at, round(after, 4), whom, draw.randrange(ranks))


# ---- one trial -----------------------------------------------------------------------------------------------------


class Field:
    """A folder with data, references and one process that forks others: where trials take place."""

    def __init__(self, folder: Path, warm: Warm, mark: str) -> None:
        self.folder = folder
        self.warm = warm
        self.mark = mark
        self._references: dict[tuple[str, str], Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        _make_data(folder)

    def reference(self, layout: str, workload: str) -> Path:
        """The run folder of the run that nobody has killed."""
        if (layout, workload) not in self._references:
            root = self.folder / "references" / f"{layout}-{workload}"
            argv = [
                *COMMON,
                *WORKLOADS[workload],
                *LAYOUTS[layout],
                "checkpoint.every_n_steps=7",
                "checkpoint.keep_last=1",
            ]
            process = self.start([*argv, f"output_root={root}"], cold=False)
            assert process.wait(RUN_SECONDS) == 0, self.output()
            (self._references[layout, workload],) = (root / "torture").iterdir()
        return self._references[layout, workload]

    def start(self, argv: list[str], *, cold: bool) -> "Started | subprocess.Popen":
        out, err = self.folder / "out", self.folder / "err"
        if not cold:
            return self.warm.start("shardwise.cli:train", [argv], cwd=self.folder, out=out, err=err)
        command = [sys.executable, str(ROOT / "train.py"), *argv]
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
            )

    def output(self) -> str:
        return (
            f"--- stdout\n{(self.folder / 'out').read_text()[-3000:]}\n--- stderr\n{(self.folder / 'err').read_text()}"
        )

    def alive(self) -> dict[int, str]:
        """Process id -> command line of everything that came from here, the process that forks left out."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")[:200]
            except OSError:
                continue
        found.pop(self.warm.pid, None)
        return found

    def all_gone(self) -> None:
        end = time.monotonic() + GONE_SECONDS
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes outlive the run: {left}"


def run_trial(place: Field, trial: Trial) -> list[dict[str, Any]]:
    """Kill, resume, and compare; returns a row for each attempt.

    Raises:
        AssertionError: something is lost, doubled, different or left over.
    """
    root = place.folder / f"trial_{trial.seed}"
    shutil.rmtree(root, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    plan: list[Kill | None] = [*trial.kills, None]
    argv, first_step, run = _first_command(trial, root), 0, None
    for number, (layout, kill) in enumerate(zip(trial.layouts, plan, strict=True)):
        began, cold = time.monotonic(), trial.cold and number == 0
        before = set(_runs(root))
        process = place.start(argv, cold=cold)
        row = {"layout": layout, "argv": argv[-1], "from": first_step, "every": trial.every_n_steps, "killed": None}
        rows.append(row)
        if kill is not None:
            row["killed"] = _kill_in_time(process, kill, root, before, run, row)
        try:
            row["status"] = process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"it hangs after {row}\n{place.output()}") from None
        place.all_gone()
        row["seconds"] = round(time.monotonic() - began, 1)
        said = f"{row}\n{place.output()}"
        made = [path for path in _runs(root) if path not in before]
        if run is None or made:
            assert len(made) <= 1, said
            run = made[0] if made else None
        if kill is None or row["killed"] is None:
            assert row["status"] == 0, said
        if row["status"] == 0 and not row["killed"]:
            break
        first_step, argv = _after_kill(place, trial, run, root, trial.layouts[number + 1], rows)
    assert run is not None
    _check_whole(place, trial, run, rows)
    shutil.rmtree(root)
    return rows


def _first_command(trial: Trial, root: Path) -> list[str]:
    return [
        *(*COMMON, *WORKLOADS[trial.workload], *LAYOUTS[trial.layouts[0]]),
        f"checkpoint.every_n_steps={trial.every_n_steps}",
        f"checkpoint.background={str(trial.background).lower()}",
        f"checkpoint.keep_last={trial.keep_last}",
        *([f"launch.max_restarts={trial.restarts}"] if trial.restarts else []),
        f"output_root={root}",
    ]


def _runs(root: Path) -> list[Path]:
    return sorted((root / "torture").iterdir()) if (root / "torture").exists() else []


def _after_kill(
    place: Field, trial: Trial, run: Path | None, root: Path, layout: str, rows: list[dict[str, Any]]
) -> tuple[int, list[str]]:
    """What is left after a kill, looked at; returns the step from which the run goes on, and the command for it."""
    if run is None:  # killed before it had a folder
        return 0, _first_command(trial, root)
    said = f"{trial}\n{rows}\n{place.output()}"
    store, logged = Store(run / "checkpoints"), _logged(run)
    damaged = {name: problems for name in store.names() if (problems := store.problems(name))}
    assert not damaged, f"published, and not whole: {damaged}\n{said}"
    newest, _ = store.newest_whole()
    names = store.names()
    rows[-1].update(logged=logged, published=newest, left=store.leftovers())
    started_from = max(row["from"] for row in rows)
    if newest is None:
        assert store.last() is None, said
        done = 0
    else:
        assert store.last() in [None, *names][-2:], said  # between the rename and the pointer it names the one before
        done = step_of(newest)
    # Whatever was due before the last logged step is published, but for the one that was being written then.
    due = (logged - 1) // trial.every_n_steps * trial.every_n_steps
    least = due - trial.every_n_steps if trial.background else due
    assert done >= max(min(least, STEPS), started_from), f"step {done} is published, {logged} is logged\n{said}"
    changed = [] if layout == trial.layouts[0] and len(set(trial.layouts)) == 1 else _as_layout(layout)
    if not (run / "config.yaml").exists() or not (run / "overrides.yaml").exists():
        return 0, _first_command(trial, root)
    if newest is not None:
        return done, [*changed, f"resume={run}"]
    process = place.start([f"resume={run}"], cold=False)
    assert process.wait(RUN_SECONDS) == 2, place.output()
    errors = (place.folder / "err").read_text()
    assert errors.startswith(f"error: resume={run}: there is no "), errors
    assert errors.endswith(f"type rerun={run} to train from the start\n"), errors
    assert errors.count("\n") == 1, errors
    return 0, [*changed, f"rerun={run}"]


def _as_layout(layout: str) -> list[str]:
    return LAYOUTS[layout] or ["strategy=ddp", "trainer.devices=1"]


def _logged(run: Path) -> int:
    """The last step in the metrics file."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


# ---- the moment ----------------------------------------------------------------------------------------------------


def _kill_in_time(
    process: "Started | subprocess.Popen",
    kill: Kill,
    root: Path,
    before: set[Path],
    run: Path | None,
    row: dict[str, Any],
) -> str | None:
    """Wait for the moment, and kill; says what died, or None if the run was over before."""
    began, asked, folder = time.monotonic(), 0.0, run
    left = max(STEPS - row["from"], 1)
    step = STEPS if kill.when == "end" else row["from"] + 1 + (kill.at - 1) % left
    at_start, seen = _state_of(run), _partial(run)
    saves, wanted = 0, 1 + (kill.at - 1) % max(left // row["every"], 1)
    while kill.when != "start":
        now = time.monotonic()
        if now - asked > 0.1:  # asking costs more than looking
            asked = now
            made = [path for path in _runs(root) if path not in before]
            folder = made[0] if made else run
            if process.poll() is not None or now - began > RUN_SECONDS:
                return None
        if folder is not None and kill.when == "save":
            new = _partial(folder)
            saves, seen = saves + len(new - seen), new
            if saves >= wanted:
                break
        # A resumed run has cut its file back, or gone on: what was logged before does not count.
        elif folder is not None and _state_of(folder) != at_start and _logged(folder) >= step:
            break
        time.sleep(0.001)
    time.sleep(kill.after)
    victim, name = _victim(process.pid, kill)
    if process.poll() is not None:
        return None
    try:
        if kill.whom == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return None
    what = {"save": f"save {wanted}", "start": "start", "step": f"step {step}", "end": f"step {step}"}[kill.when]
    return f"{what} + {1000 * kill.after:.0f} ms: {name}"


def _state_of(run: Path | None) -> tuple[int, int] | None:
    path = None if run is None else run / "metrics.jsonl"
    if path is None or not path.exists():
        return None
    return path.stat().st_size, path.stat().st_mtime_ns


def _partial(run: Path | None) -> set[tuple[str, int]]:
    """The folders in which checkpoints are being written; of one name, each new one counts."""
    if run is None:
        return set()
    try:
        with os.scandir(run / "checkpoints") as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.endswith(".partial")}
    except OSError:
        return set()


def _victim(parent: int, kill: Kill) -> tuple[int, str]:
    """The process to kill: the parent where the one that is meant is not there (yet)."""
    if kill.whom in ("parent", "group"):
        return parent, kill.whom
    ranks = [pid for server in _children(parent) for pid in _children(server)] or [parent]
    rank = ranks[kill.rank % len(ranks)]
    workers = _children(rank) if kill.whom == "worker" else []
    if workers:
        return workers[0], f"loader of rank {kill.rank}"
    return rank, f"rank {kill.rank % len(ranks)}" if rank != parent else "parent"


def _children(pid: int) -> list[int]:
    """Live children, the helper of multiprocessing that looks after resources left out; oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = (place / "stat").read_text().rpartition(")")[2].split()
            if (
                int(status[1]) == pid
                and status[0] != "Z"
                and b"resource_tracker" not in (place / "cmdline").read_bytes()
            ):
                found.append(int(place.name))
        except OSError:
            continue
    return sorted(found)


# ---- the end -------------------------------------------------------------------------------------------------------


def _check_whole(place: Field, trial: Trial, run: Path, rows: list[dict[str, Any]]) -> None:
    """The run that is there in the end is the one that nobody has killed."""
    said = f"{trial}\n{rows}\n{place.output()}"
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"], result["run_id"]) == ("completed", STEPS, run.name), said
    store = Store(run / "checkpoints")
    assert store.leftovers() == [], f"{store.leftovers()} left over\n{said}"
    names = store.names()
    assert store.last() == names[-1] == f"step_{STEPS:08d}", said
    assert all(store.problems(name) == [] for name in names), said
    assert len(names) <= trial.keep_last, f"{names} kept\n{said}"
    other_layouts = len(set(trial.layouts[: len(rows)])) > 1
    expected = place.reference(trial.layouts[len(rows) - 1], trial.workload)
    mine, theirs = lines(run / "metrics.jsonl"), lines(expected / "metrics.jsonl")
    if not other_layouts:
        assert mine == theirs, f"{_first_difference(mine, theirs)}\n{said}"
        assert difference(store.url_of(names[-1]), f"{expected}/checkpoints/{names[-1]}") == [], said
        return
    assert [line.keys() for line in mine] == [line.keys() for line in theirs], said
    for one, other in zip(mine, theirs, strict=True):
        assert all(abs(one[name] - other[name]) <= 1e-9 for name in one), f"{one}\n{other}\n{said}"
    seen = [_samples_seen(url) for url in (store.url_of(names[-1]), f"{expected}/checkpoints/{names[-1]}")]
    assert seen[0] == seen[1] == 8 * STEPS, said


def _samples_seen(url: str) -> int:
    return read_state(url)["trainer"]["lightning"]["ShardedDataModule"]["samples_seen"]


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without what a clock has measured, and what hangs on how many ranks there are."""
    every = [json.loads(line) for line in path.read_text().splitlines()]
    left_out = {name for line in every for name in line if CLOCKED.search(name) or name.startswith(RANK_KINDS)}
    return [{name: value for name, value in line.items() if name not in left_out} for line in every]


def _first_difference(mine: list[Any], theirs: list[Any]) -> str:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return f"line {number}: {one}\nthe uninterrupted run has {other}"
    return f"{len(mine)} lines, and {len(theirs)} of the uninterrupted run"


def tensors(url: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    whole = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in StoredTensors(url).items()}
    read_tensors({key: Pieces(t.shape, {(0,) * t.dim(): t}, t.dtype) for key, t in whole.items()}, url)
    return whole


def difference(url: str, other: str) -> list[str]:
    """The keys of what two checkpoints do not have in common, bit for bit; how fast the one was is its own affair."""
    mine, theirs = (
        {key: tensor for key, tensor in tensors(one).items() if not _is_clocked(key)} for one in (url, other)
    )
    keys = [key for key in mine.keys() | theirs.keys() if key not in mine or key not in theirs]
    found = keys + [key for key in mine.keys() & theirs.keys() if not _same(mine[key], theirs[key])]
    if _untimed(read_state(url)["trainer"]) != _untimed(read_state(other)["trainer"]):
        found.append("state.json")
    return sorted(found)


def _untimed(state: dict[str, Any]) -> dict[str, Any]:
    metrics = state["lightning"]["callback_metrics"]
    state["lightning"]["callback_metrics"] = {
        name: value for name, value in metrics.items() if not CLOCKED.search(name)
    }
    return state


def _is_clocked(key: str) -> bool:
    kind, _, name = key.rpartition("callback_metrics/")
    return bool(kind) and CLOCKED.search(name) is not None


def _same(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def _make_data(folder: Path) -> None:
    """Sixty small images of two classes, and some thousand words."""
    from PIL import Image

    generator = torch.Generator().manual_seed(5)
    for index in range(60):
        image = torch.randint(0, 256, (12, 12, 3), generator=generator, dtype=torch.uint8)
        image[:, :, index % 2] //= 3
        path = folder / "images" / f"class_{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "ne") for b in ("ra", "so", "ni", "pu", "te", "")]
    order = torch.randint(0, len(words), (3000,), generator=generator).tolist()
    (folder / "words.txt").write_text(" ".join(words[index] for index in order))
