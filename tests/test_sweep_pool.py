"""The pool of a sweep: jobs side by side in fresh processes, failures told and tried again, a table that lives."""

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

import shardwise.cli
from checkout import ROOT
from shardwise.config import Config, from_plain
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.job import Job
from shardwise.quantities import shown_seconds
from shardwise.resolve import World
from shardwise.sweep.grid import Grid
from shardwise.sweep.planning import check_name, check_swept, modules_of
from shardwise.sweep.pool import _Pool
from shardwise.sweep.process import in_a_line
from shardwise.sweep.slots import Shares, automatic_slots, count_slots
from shardwise.sweep.source import Outcome, Planned
from shardwise.sweep.table import Display, show_end
from sweeps import EVERY_STEP, TINY, Field, losses, wait_until
from warm import Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm(mark=uuid.uuid4().hex) as warm:
        yield warm


@pytest.fixture
def field(warm: Warm, tmp_path: Path) -> Field:
    return Field(warm, tmp_path)


def intervals(field: Field) -> dict[int, tuple[float, float]]:
    """Seed -> when its first rank began and ended to train."""
    first = [line for line in field.seen if line["rank"] == 0]
    when = {(line["seed"], line["what"]): line["time"] for line in first}
    return {seed: (when[seed, "start"], when[seed, "end"]) for seed, what in when if what == "start"}


def test_two_slots_run_side_by_side_with_half_the_cores_each(field):
    words = ["seed=1,2,3", "sweep.slots=2", "+callbacks.watch.hold=[1,2]"]
    parent = field.start(*words, target="watching:train_on_eight_cores")
    wait_until(lambda: len(list(field.folder.glob("held_*"))) == 2 or parent.poll() is not None)
    (field.folder / "go").touch()
    assert parent.wait(60) == 0, field.out + field.errors
    times = intervals(field)
    assert max(times[1][0], times[2][0]) < min(times[1][1], times[2][1])
    assert times[3][0] > min(times[1][1], times[2][1])
    pids = {line["seed"]: line["pid"] for line in field.seen}
    assert len({*pids.values(), parent.pid}) == 4
    assert {line["parent"] for line in field.seen} != {parent.pid}, "they come from the template"
    assert {line["threads"] for line in field.seen} == {4}


def test_jobs_of_two_ranks_in_two_slots_come_from_one_template(field):
    """The agent of a job's ranks is a job process itself; a forkserver of its own would import everything again."""
    parent = field.start("seed=1,2", "trainer.devices=2", "sweep.slots=2", "+callbacks.watch.hold=[1,2]")
    wait_until(lambda: len(list(field.folder.glob("held_*"))) == 4 or parent.poll() is not None)
    (field.folder / "go").touch()
    assert parent.wait(90) == 0, field.out + field.errors
    begun = [line for line in field.seen if line["what"] == "start"]
    assert sorted((line["seed"], line["rank"]) for line in begun) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert {line["size"] for line in begun} == {2}
    assert len({line["pid"] for line in begun}) == 4
    assert len({line["parent"] for line in begun}) == 1
    times = intervals(field)
    assert max(times[1][0], times[2][0]) < min(times[1][1], times[2][1])
    for row in field.rows():
        for rank in (0, 1):
            assert (Path(row["run_folder"]) / "ranks" / f"rank_{rank}.log").exists()


def test_failures_are_told_at_once_and_again_at_the_end(field):
    words = ["seed=1,2,3,4", "sweep.on_failure=continue", "+callbacks.watch.fail={1:9,3:9}"]
    out, errors = field.run(*words, status=1)
    rows = field.rows()
    assert [row["status"] for row in rows] == ["failed", "completed", "failed", "completed"]
    for number in (1, 3):
        log = f"{rows[number - 1]['run_folder']}/ranks/rank_0.log"
        said = f"RuntimeError: planted for seed {number}"
        (line,) = [line for line in errors.splitlines() if line.startswith(f"job {number}/4 failed in ")]
        assert line.endswith(f"): {said}; its log: {log}")
        assert f"job {number} failed: {said}; its log: {log}" in out[out.index("4 jobs, ") :].splitlines()
        assert said in Path(log).read_text()
    assert len(errors.splitlines()) == 3
    assert errors.splitlines()[-1].startswith("error: 2 of 4 jobs did not complete; see ")
    assert out.splitlines().count("sweep.metric=test/accuracy names the best job") == 1
    # A job's own output goes to its log only.
    assert "run folder:" not in out
    assert "run folder:" in (Path(rows[1]["run_folder"]) / "ranks" / "rank_0.log").read_text()
    assert "job 2/4 completed in " in out
    assert "(1 of 4 done, 1 failed, about " in out


def test_a_metric_that_is_not_there_ends_a_grid_with_its_table(field):
    out, errors = field.run("seed=1,2", "sweep.metric=test/lss", "sweep.mode=min", status=2)
    assert errors.splitlines() == [
        "error: sweep.metric=test/lss: no job has such a metric; did you mean 'test/loss'?",
    ]
    table = out[out.index("2 jobs, ") :].splitlines()
    assert [line.split()[:3] for line in table[2:4]] == [["1", "seed=1", "completed"], ["2", "seed=2", "skipped"]]


def test_a_failed_job_is_tried_again_from_its_checkpoint(field):
    words = ["seed=1,2,3", "sweep.on_failure=retry", *EVERY_STEP, "+callbacks.watch.fail={1:1,2:9}"]
    out, errors = field.run(*words, status=1)
    rows = field.rows()
    assert [row["status"] for row in rows] == ["completed", "failed", "completed"]
    assert [row["attempts"] for row in rows] == [2, 2, 1]
    begun = [(line["seed"], line["step"]) for line in field.seen if line["what"] == "start"]
    assert begun == [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0)]
    assert [step for step, _ in losses(rows[0])] == [1, 2, 3, 4, 5]
    assert "job 1/3 is tried again from its newest checkpoint: seed=1" in out
    assert [line[:16] for line in errors.splitlines() if "(retry 1 of 1): RuntimeError" in line] == [
        *("job 1/3 failed i", "job 2/3 failed i")
    ]
    assert "1 of 3 jobs did not complete" in errors.splitlines()[-1]


def test_without_a_checkpoint_it_is_tried_again_from_the_start(field):
    words = ["seed=1,2", "sweep.on_failure=retry", "sweep.retries=2", "+callbacks.watch.fail={1:2}"]
    field.run(*words)
    (row, _) = field.rows()
    assert (row["status"], row["attempts"]) == ("completed", 3)
    folders = [path.parent for path in (field.folder / "outputs").rglob("config.yaml")]
    assert len(folders) == 4, "no attempt has overwritten another"


def test_the_time_limit_is_the_whole_sweeps(field):
    """A scheduler ends the sweep, not each of its jobs: one that starts late has no more time than the rest."""
    field_words = ["seed=1,2,3", "launch.time_limit=00:01:00:00"]
    assert field.start(*field_words, target="watching:train_an_hour_ago").wait(60) == 75, field.out + field.errors
    assert [row["status"] for row in field.rows()] == ["preempted", "skipped", "skipped"]
    assert field.rows()[0]["steps"] == 1


def test_a_job_that_dies_gives_its_slot_back_though_a_child_of_its_own_lives(field):
    words = ["plugins=[watching]", "+callbacks.orphan._target_=watching.LeavesAChild"]
    words += [f"+callbacks.orphan.folder={field.folder}"]
    _, errors = field.run("seed=1,2", "sweep.on_failure=continue", *words, status=1, watch=False)
    assert errors.count("was ended by SIGKILL") == 2
    (field.folder / "go").touch()


def pool_of(*jobs: Any) -> _Pool:
    pool = _Pool.__new__(_Pool)
    pool.running = list(jobs)
    return pool


def test_every_running_job_is_asked_also_while_one_is_taken_in() -> None:
    asked: list[int] = []
    pool = pool_of()

    def job(number: int) -> Any:
        def send(_: Any) -> None:
            asked.append(number)
            if number == 1:
                pool.running.pop(0)

        return SimpleNamespace(process=SimpleNamespace(send=send))

    pool.running = [job(number) for number in (1, 2, 3)]
    pool._ask(pool.running)
    assert asked == [1, 2, 3]


def test_what_goes_wrong_with_one_job_does_not_cost_the_others_their_checkpoint(monkeypatch) -> None:
    pool = pool_of("a", "b", "c")

    def take_in() -> None:
        pool.running.pop()
        raise ConfigError("there is no such metric")

    monkeypatch.setattr(pool, "_wait", take_in, raising=False)
    pool._drain()
    assert pool.running == []

    def broken() -> None:
        raise OSError("nothing works any more")

    pool.running = ["a"]
    monkeypatch.setattr(pool, "_wait", broken, raising=False)
    pool._drain()
    assert pool.running == ["a"], "who does not come to an end is left to be ended"


def test_a_source_prunes_a_job_by_what_it_reports(field):
    words = [*TINY, *field.watch()]
    words += ["+callbacks.watch.hold=[1]", "trainer.max_steps=8", "sweep.slots=2"]
    arguments = [[], str(field.folder), words]
    files = {"out": field.folder / "out", "err": field.folder / "err"}
    process = field.warm.start("watching:run_pruning", arguments, cwd=field.folder, **files)
    seen = field.folder / "seen"
    wait_until(lambda: (seen.exists() and '["ended", 2' in seen.read_text()) or process.poll() is not None)
    (field.folder / "go").touch()
    assert process.wait(60) == 0, field.out + field.errors
    told = [json.loads(line) for line in seen.read_text().splitlines()]
    assert ["ended", 1, "pruned"] in told
    assert ["ended", 2, "completed"] in told
    steps = [step for what, number, lines in told if what == "progress" and number == 2 for step, _ in lines]
    assert steps == sorted(steps), "every line once"
    assert set(steps) == set(range(1, 9))
    (row, _) = json.loads((field.folder / "sweep/jobs.json").read_text())
    assert (row["status"], row["steps"]) == ("pruned", 3)
    assert "the end: pruned completed" in field.out


def test_a_terminal_sees_a_table_that_lives(tmp_path):
    root, slave = pty.openpty()
    words = ["-m", *TINY, "seed=1,2", "trainer.max_steps=300", f"output_root={tmp_path / 'outputs'}"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words], stdout=slave, stderr=slave, env=environment, cwd=tmp_path
    )
    os.close(slave)
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(root, 65536):
                chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(120) == 0
    reader.join()
    os.close(root)
    text = b"".join(chunks).decode()
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"1 +seed=1 +running", plain)
    assert re.search(r"1 of 2 done, about .* left", plain)
    assert re.search(r"2 +seed=2 +running +[\d,]+/300 +[\d.]+ s +train/loss [\d.]+", plain)
    # In the end there is the table of the results, and what was said on the way.
    assert plain.count("2 jobs, ") == 1
    assert "job 2/2 completed in " in plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch=auto,local"], "launch cannot be swept"),
        (["launch.max_restarts=0,1"], "launch.max_restarts cannot be swept"),
        (["sweep.slots=1,2"], "sweep.slots cannot be swept"),
        (["output_root=a,b"], "output_root cannot be swept"),
        (["hydra.sweeper.params={output_root: 'a,b'}"], "output_root cannot be swept"),
        (["seed=1,2", "sweep.name=a/b"], "sweep.name=a/b: the name of a folder is needed"),
        (["seed=1,2", "hydra.sweeper.max_batch_size=1"], "hydra.sweeper.max_batch_size=1: all jobs are one batch"),
        (["seed=1,2", "sweep.slots=0"], "sweep.slots=0: at least 1 is needed, or auto"),
        (["seed=range(3,3)"], "seed=range(3,3): there is no value in it"),
        (["optimizer.lr=choice()"], "optimizer.lr=choice(): choice(): empty choice is not legal"),
        (["seed=1,2", "sweep.on_failure=ignore"], "sweep.on_failure=ignore: no such choice"),
    ],
)
def test_what_means_the_sweep_is_checked_before_anything_starts(field, words, message):
    out, errors = field.run(*words, status=2, watch=False)
    assert errors.startswith(f"error: {message}")
    assert len(errors.splitlines()) == 1
    assert out == ""
    assert not list(field.folder.rglob("jobs.json"))


def test_what_can_be_swept() -> None:
    check_swept(["optimizer.lr", "+callbacks.x", "model", "trainer.devices"])
    for key in ("plugins", "hydra/launcher", "+launch.kind", "sweep"):
        with pytest.raises(ConfigError, match="cannot be swept"):
            check_swept([key])
    check_name(None)
    with pytest.raises(ConfigError, match="name of a folder"):
        check_name("..")


def test_jobs_that_share_their_choices_are_composed_as_each_would_be_alone(monkeypatch) -> None:
    """Hydra composes the files of equal choices once for all of them; nothing may go from one job to the next."""
    jobs = []
    monkeypatch.setattr(shardwise.cli, "run_sweep", lambda composed, folder: jobs.extend(composed) or [])
    fixed = [
        "+callbacks.x._target_=a.B",
        "~optimizer.weight_decay",
        "experiment=text_gpt",
        "+extra={a: {b: ${seed}}}",
    ]
    swept = ["seed=1,2", "lr_scaling=none,linear", "+extra.c=3,x", "model.width=8,16"]
    assert shardwise.cli.train([*fixed, "-m", *swept, "lr_scaling.base_batch_size=8"]) == 0
    assert len(jobs) == 16
    assert len({tuple(overrides) for _, overrides, _ in jobs}) == 16
    for config, overrides, choices in jobs:
        assert config == compose(overrides)
        assert config.extra["a"] == {"b": config.seed}
        assert choices["lr_scaling"] == config.lr_scaling.rule


def test_slots_and_shares(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-x,7")
    one, two, gpu = (World(1, devices, kind, "local", "") for devices, kind in ((1, "cpu"), (2, "cpu"), (2, "gpu")))
    assert [automatic_slots(world) for world in (one, two, gpu)] == [8, 4, 2]
    assert automatic_slots(World(1, 16, "cpu", "local", "")) == 1
    auto = from_plain({"sweep": {"slots": "auto"}})
    assert count_slots(Config(), one, total=None) == 1
    assert [count_slots(auto, one, total=total) for total in (None, 3, 100)] == [8, 3, 8]

    assert Shares(1).take(gpu) == {}, "a job that has the machine to itself is left alone"
    assert Shares(2).take(two) == {"OMP_NUM_THREADS": "2"}
    assert Shares(64).take(one) == {"OMP_NUM_THREADS": "1"}
    shares = Shares(3)
    first, second, third = (shares.take(gpu)["CUDA_VISIBLE_DEVICES"] for _ in range(3))
    assert (first, second) == ("4,5", "GPU-x,7")
    assert third == "4,5", "more slots than GPUs share them"
    shares.give_back({"CUDA_VISIBLE_DEVICES": "GPU-x,7"})
    assert shares.take(gpu)["CUDA_VISIBLE_DEVICES"] == "GPU-x,7"
    with pytest.raises(ConfigError, match="a job of 8 GPUs does not fit on 4"):
        shares.take(World(1, 8, "gpu", "local", ""))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Shares(2).take(one) == {}


def test_the_template_imports_what_the_jobs_name() -> None:
    config = from_plain(
        {
            "data": {"_target_": "shardwise.data.digits.Digits"},
            "optimizer": {"_target_": "torch.optim.AdamW"},
            "logger": {"_target_": "shardwise.tracking.WandbTracker"},
            "callbacks": {"mine": {"_target_": "somebody.elses.Callback"}},
        }
    )
    modules = modules_of([config])
    assert {"shardwise.data.digits", "torch.optim", "wandb"} <= set(modules)
    assert not any(module.startswith("somebody") for module in modules)


def outcome(number: int, label: str, status: str = "completed", **metrics: float) -> Outcome:
    job = Job({"sweep": {"metric": "val/loss"}}, {}, f"run-{number}", f"/runs/{'long' * 10}/{number}")
    planned = Planned(job, key=label, number=number, label=label)
    return Outcome(planned, job, status, "", {"steps": 20_000, "metrics": metrics}, seconds=125.0)


LABELS = [f"optimizer.lr=0.00{n} model.width={n} batch.global_size={n * 1000}" for n in (1, 2)]
FINE, DIVERGED = {"val/loss": 0.51, "test/loss": 0.52}, {"val/loss": 0.61, "test/loss": math.nan}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_cuts_overrides_only(capsys, width):
    outcomes = [outcome(1, LABELS[0], "preempted", **FINE), outcome(2, LABELS[1], **DIVERGED)]
    show_end(outcomes, folder=Path("/s"), closing=[], width=width)
    title, heading, *rows = capsys.readouterr().out.splitlines()
    assert title == "2 jobs, /s"
    assert all(len(row.rstrip()) <= width for row in (heading, *rows))
    assert heading.split()[2:] == ["status", "val/loss", "test/loss"]
    assert re.match(r"1 +(optimizer\.)?lr=0\.001", rows[0])
    assert rows[0].split()[-3:] == ["preempted", "0.51", "0.52"]
    assert rows[1].split()[-4:] == ["completed,", "nan", "0.61", "nan"]

    display = Display(total=3, slots=1)
    for one in outcomes:
        display.ended(one)
    running = outcome(3, LABELS[0] + "3").planned
    display.started(running, running.job)
    display.progress(running, [(12_345, {"train/loss": 0.5, "val/loss": 0.25, "val/accuracy": 0.75})])
    display._console = Console(width=width, file=io.StringIO())
    display._console.print(display._table())
    lines = [line.rstrip() for line in display._console.file.getvalue().splitlines()]
    assert all(len(line) <= width for line in lines)
    assert re.search(r"preempted +20,000  2 min 5 s", lines[1])
    assert re.search(r"^3 .* running  +12,345  0\.\d s", lines[3])


def test_all_fits_a_file(capsys):
    show_end([outcome(1, LABELS[0], **FINE)], folder=Path("/s"), closing=["best"])
    title, heading, row, last = capsys.readouterr().out.splitlines()
    assert (title, last) == ("1 job, /s", "best")
    assert "run folder" in heading
    assert LABELS[0] in row
    assert row.rstrip().endswith("long/1")


def test_what_is_told_of_a_job(capsys):
    display = Display(total=4, slots=1)
    display.ended(outcome(1, "a=1", **{"test/loss": math.nan, "test/accuracy": 0.1, "val/loss": 1.0}))
    display.ended(outcome(2, "a=2", **{"test/loss": 0.3, "val/loss": math.nan}))
    display.ended(outcome(3, "a=3", "pruned", **{"val/loss": 3.5, "train/loss": 2.0}))
    lines = capsys.readouterr().out.splitlines()
    assert ": test/accuracy 0.1  test/loss nan: diverged (1 of 4 done, about " in lines[0]
    assert ": test/loss 0.3  val/loss nan: diverged (" in lines[1]
    assert "job 3/4 pruned in 2 min 5 s: val/loss 3.5 (3 of 4 done, " in lines[2]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank 1 was ended by SIGKILL", "rank 1 was ended by SIGKILL"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\n    f(x)\n    ^^^^\nKeyError: 1\n\nDuring that:'
            '\n\nTraceback (most recent call last):\n  File "b.py", line 2\n    g()\n    ^^^\n'
            "ValueError: boom\n    and more\nrank 0 failed first; its log: /x",
            "ValueError: boom and more",
        ),
    ],
)
def test_a_failure_in_a_line(text, line):
    assert in_a_line(text) == line


def planned_jobs(*overrides: str, config: Sequence[dict] | None = None) -> list[Planned]:
    command = ["python", "train.py", "-m", "seed=3", "a=1,1"]
    return [
        Planned(
            Job({"sweep": {}, **(config[n] if config else {})}, {}, "", "", ["seed=3", one], command),
            key=one,
            number=n + 1,
            label="",
        )
        for n, one in enumerate(overrides)
    ]


def test_equal_jobs_are_run_once(capsys):
    grid = Grid(planned_jobs("a=1", "a=2", "a=1", "a=4"))
    assert grid.total == 3
    assert [(one.number, one.label) for one in grid.rest()] == [(1, "a=1"), (2, "a=2"), (3, "a=4")]
    grid.common()
    assert capsys.readouterr().out == "note: 1 job is the same as another and is left out\n"
    assert [one.label for one in Grid(planned_jobs("a=1", "a=1")).rest()] == ["a=1"]
    # Those that differ in what decides no numbers are two.
    logged = planned_jobs("a=1", "a=1", config=[{"logger": {}}, {"logger": {"x": 1}}])
    assert [one.key for one in Grid(logged).rest()] == ["a=1", "a=1#2"]


def test_durations() -> None:
    assert [shown_seconds(seconds) for seconds in (4.12, 42.4, 99.5, 3599, 3660)] == [
        *("4.1 s", "42 s", "1 min 39 s", "59 min 59 s", "1 h 1 min"),
    ]


def test_the_jobs_of_a_sweep_find_their_micro_batch(train_py):
    """batch.micro_size=auto in a sweep: each job finds its own, in processes of its own, beside the others."""
    run = train_py(
        *("-m", "batch.global_size=8,12", "batch.micro_size=auto", "sweep.slots=2", "logger=none"),
        *("model=mlp", "model.width=8", "trainer.max_steps=2"),
    )
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in run.run_folders]
    assert [config["batch"]["micro_size"] for config in configs] == [8, 12]
    assert all("micro-batch" in (folder / "ranks" / "rank_0.log").read_text() for folder in run.run_folders)
    assert not any((folder / "probe").exists() for folder in run.run_folders)
