"""A sweep that is run again under its name: what is done stays done, what is partial goes on, the rest is run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.sweep.code import code_state
from shardwise.sweep.going_on import same_command
from shardwise.sweep.ledger import Ledger
from shardwise.sweep.source import Common, Outcome, Planned
from sweeps import EVERY_STEP, Field, losses, stamps, wait_until
from warm import Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm(mark=uuid.uuid4().hex) as warm:
        yield warm


@pytest.fixture
def field(warm: Warm, tmp_path: Path) -> Field:
    return Field(warm, tmp_path)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_killed_in_the_third_of_four_jobs_it_runs_two(field):
    calm = ["seed=1,2,3,4", "sweep.name=calm", *EVERY_STEP, "+callbacks.watch.hold=[]"]
    field.run(*calm)
    (field.folder / "jobs").unlink()

    words = ["seed=1,2,3,4", "sweep.name=mine", *EVERY_STEP, "+callbacks.watch.hold=[3]"]
    parent = field.start(*words)
    wait_until(lambda: (field.folder / "held_3_0").exists() or parent.poll() is not None)
    assert [row["status"] for row in field.rows("mine")] == ["completed", "completed", "running"]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    third = [line["pid"] for line in field.seen if line["seed"] == 3]
    wait_until(lambda: all(map(gone, third)), seconds=10)
    before = field.rows("mine")
    done = [stamps(row) for row in before[:2]]
    (field.folder / "go").touch()
    (field.folder / "jobs").unlink()

    out, _ = field.run(*words)
    # Jobs 3 and 4 have trained, and the third from where it was.
    assert [(line["seed"], line["step"]) for line in field.seen if line["what"] == "start"] == [(3, 2), (4, 0)]
    rows = field.rows("mine")
    assert [row["status"] for row in rows] == ["completed"] * 4
    assert [row["attempts"] for row in rows] == [1, 1, 2, 1]
    assert [row["run_folder"] for row in rows[:3]] == [row["run_folder"] for row in before]
    assert [stamps(row) for row in rows[:2]] == done
    assert rows[:2] == before[:2]
    assert "job 1/4 was done before: seed=1" in out
    assert "job 3/4 goes on: seed=3" in out
    table = out[out.index("4 jobs, ") :]
    assert [line.split()[1] for line in table.splitlines()[2:6]] == [f"seed={seed}" for seed in (1, 2, 3, 4)]
    assert table.count("done before") == 2
    # Nothing has come of it: the same bits as without the kill.
    for row, other in zip(rows, field.rows("calm"), strict=True):
        assert len(losses(row)) == 5
        assert losses(row) == losses(other)
        for name in ("test/loss", "test/accuracy"):
            assert row["metrics"][name] == other["metrics"][name]

    # And once more, with a job more: only that one runs.
    (field.folder / "jobs").unlink()
    field.run("seed=1,2,3,4,5", *words[1:])
    assert {line["seed"] for line in field.seen} == {5}
    assert len(field.rows("mine")) == 5


def test_asked_to_end_it_saves_all_that_runs_and_goes_on_the_next_time(field):
    words = ["seed=1,2,3", "sweep.name=mine", "sweep.slots=2", "+callbacks.watch.hold=[1,2]"]
    parent = field.start(*words)
    wait_until(lambda: len(list(field.folder.glob("held_*"))) == 2 or parent.poll() is not None)
    os.kill(parent.pid, signal.SIGTERM)
    wait_until(lambda: "SIGTERM" in field.errors)
    (field.folder / "go").touch()
    assert parent.wait(60) == 75
    rows = field.rows("mine")
    assert [(row["status"], row["message"]) for row in rows] == [("preempted", "")] * 2 + [("skipped", "interrupted")]
    assert [row["steps"] for row in rows] == [3, 3, None]
    assert "(0 of 3 done, 2 preempted)" in field.out
    said, command = field.out.splitlines()[-2:]
    assert said == "2 preempted, 1 not started; go on with:"
    assert command.endswith(" sweep.name=mine")
    (field.folder / "jobs").unlink()
    field.run(*words)
    begun = sorted((line["seed"], line["step"]) for line in field.seen if line["what"] == "start")
    assert begun == [(1, 3), (2, 3), (3, 0)]
    assert [row["status"] for row in field.rows("mine")] == ["completed"] * 3


def test_asked_twice_it_names_its_folder_and_goes_on_the_next_time(field):
    words = ["seed=1,2", "sweep.name=mine", *EVERY_STEP, "+callbacks.watch.hold=[1]"]
    parent = field.start(*words)
    wait_until(lambda: (field.folder / "held_1_0").exists() or parent.poll() is not None)
    os.kill(parent.pid, signal.SIGQUIT)
    parent.wait(60)
    assert [(row["status"], row["message"]) for row in field.rows("mine")] == [
        *(("preempted", "interrupted"), ("skipped", "interrupted"))
    ]
    said = field.out.splitlines()[-3:]
    assert said[0] == f"ended at once; the jobs are listed in {field.folder}/outputs/sweeps/mine/jobs.json"
    assert said[1] == "1 preempted, 1 not started; go on with:"
    (field.folder / "go").touch()
    (field.folder / "jobs").unlink()
    field.run(*words)
    assert [(line["seed"], line["step"]) for line in field.seen if line["what"] == "start"] == [(1, 2), (2, 0)]


def test_the_command_by_which_a_sweep_goes_on() -> None:
    folder = Path("/x/outputs/sweeps/20300101-000000-0")
    typed = ["-m", "seed=1,2", "sweep.name=old", "--config-dir", "my conf", "logger.api_key=hush", "a='x y'"]
    for start in (["train.py"], ["-m", "shardwise", "train"]):
        job = Job({}, {}, "run", "/run", command=["python", *start, *typed])
        command = same_command(job, folder=folder)
        assert command.count("--config-dir") == 1
        assert "hush" not in command
        words = shlex.split(command)
        assert words[words.index("my conf") + 1 :][:2] == ["-m", "seed=1,2"]
        assert words[-2:] == ["a='x y'", "sweep.name=20300101-000000-0"]
        assert "sweep.name=old" not in words
    assert "sweep.name" not in same_command(job, folder=Path("/elsewhere/of_hydra"))


def test_a_failed_job_is_run_anew_and_nothing_is_overwritten(field):
    words = ["seed=1,2", "sweep.name=mine", "sweep.on_failure=continue", *EVERY_STEP, "+callbacks.watch.fail={1:1}"]
    field.run(*words, status=1)
    before = field.rows("mine")
    assert [row["status"] for row in before] == ["failed", "completed"]
    kept = stamps(before[0])
    field.run(*words)
    after = field.rows("mine")
    assert [row["status"] for row in after] == ["completed"] * 2
    assert after[0]["run_folder"] != before[0]["run_folder"]
    assert stamps(before[0]) == kept
    assert [(line["seed"], line["step"]) for line in field.seen if line["what"] == "start"] == [(1, 0), (2, 0), (1, 0)]


def test_another_configuration_asks_for_another_name(field):
    words = ["seed=1,2", "sweep.name=mine"]
    field.run(*words)
    before = {path: path.read_bytes() for path in (field.folder / "outputs").rglob("*.json")}
    _, errors = field.run(*words, "optimizer.lr=0.5", status=2)
    assert errors.splitlines() == [
        "error: sweep.name=mine was run with another configuration: optimizer.lr was 0.001 and is 0.5: type a new "
        "sweep.name (only what is swept may change), or the values of then, or remove "
        f"{field.folder}/outputs/sweeps/mine"
    ]
    assert {path: path.read_bytes() for path in (field.folder / "outputs").rglob("*.json")} == before
    # What a job is told and by whom does not matter, and neither does a grid that has shrunk, or another key of it.
    (field.folder / "jobs").unlink()
    field.run("seed=2", "sweep.name=mine", "checkpoint.keep_last=1", "launch.start_timeout=99", "sweep.slots=2")
    assert field.seen == []
    field.run("seed=2", "optimizer.lr=0.001,0.1", "sweep.name=mine")
    assert {line["seed"] for line in field.seen} == {2}
    assert len(field.rows("mine")) == 3


def test_results_of_other_code_are_taken_only_on_request(field, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=field.folder, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    code = field.folder / "code.py"
    code.write_text("a = 1\n")
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")
    words = ["seed=1,2", "sweep.name=mine"]
    field.run(*words)
    assert {row["code"]["commit"] for row in field.rows("mine")} == {first}
    code.write_text("a = 2\n")
    (field.folder / "jobs").unlink()
    _, errors = field.run("seed=1,2,3", *words[1:], status=2)
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"error: sweep.name=mine: 2 of 2 jobs were run by other code (commit {first[:9]}, ")
    assert f"now commit {first[:9]} with uncommitted changes " in errors
    git("commit", "-qam", "second")
    _, errors = field.run(*words, status=2)
    assert f"now commit {git('rev-parse', 'HEAD')[:9]}, " in errors
    assert "sweep.allow_code_change=true" in errors
    assert field.seen == []
    out, _ = field.run("seed=1,2,3", *words[1:], "sweep.allow_code_change=true")
    assert out.startswith("note: 2 of 2 jobs were run by other code")
    assert {line["seed"] for line in field.seen} == {3}
    rows = field.rows("mine")
    assert [row["code"]["commit"] for row in rows] == [first, first, git("rev-parse", "HEAD")]
    shared = json.loads((field.folder / "outputs/sweeps/mine/sweep.json").read_text())
    assert [one["jobs"] for one in shared["accepted"]] == [[row["key"] for row in rows[:2]]]


def test_a_network_that_is_in_no_repository_is_code_too(tmp_path, monkeypatch):
    """Results of a network of the user's that has been rewritten since are not those of now."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynet.py").write_text("a = 1\n")
    (tmp_path / "mynets" / "inner").mkdir(parents=True)
    (tmp_path / "mynets" / "__init__.py").touch()
    inner = tmp_path / "mynets" / "inner" / "net.py"
    inner.write_text("a = 1\n")
    assert "plugins" not in code_state()
    assert code_state(["no_such_module"])["plugins"] == {"no_such_module": None}
    both = ["mynet", "mynets.inner"]
    first = code_state(both)
    assert code_state(both) == first
    assert "mynet" not in sys.modules
    inner.write_text("a = 2\n")
    second = code_state(both)
    assert [name for name in both if second["plugins"][name] != first["plugins"][name]] == ["mynets.inner"]

    # Written while the sweep runs: a job is what it was when it began.
    (tmp_path / "sweep").mkdir()
    ledger = Ledger(tmp_path / "sweep", plugins=["mynet"])
    jobs = [Planned(Job({}, {}, "run", "/run"), key=key, number=1, label="") for key in ("x", "y")]
    ledger.start(jobs[0], run_folder="/run", attempts=1)
    (tmp_path / "mynet.py").write_text("a = 3\n")
    ledger.end(Outcome(jobs[0], jobs[0].job, "completed", "", {"metrics": {}}))
    ledger.start(jobs[1], run_folder="/run", attempts=1)
    assert ledger.rows["x"]["code"] == ledger.code != ledger.rows["y"]["code"]
    with pytest.raises(
        ConfigError, match=r"1 of 2 jobs were run by other code \(.*, mynet \w{7}; now .*, mynet \w{7}\)"
    ):
        Ledger(tmp_path / "sweep", plugins=["mynet"]).check(Common({}, frozenset()), keys=[], allow_code_change=False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"number": 1, ', "Expecting property name"),
        ('{"jobs": []}', "a list is expected"),
        ('[{"number": 1, "key": "x", "run_folder": "y", "message": "", "metrics": {}}]', "row 1 has no right status"),
        ('[{"number": 1, "key": "x", "run_folder": "y", "status": "fine", "message": "", "metrics": {}}]', "status"),
    ],
)
def test_a_damaged_ledger_is_left_as_it_is(field, text, why):
    path = field.folder / "outputs/sweeps/mine/jobs.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    _, errors = field.run("seed=1,2", "sweep.name=mine", status=2)
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"error: {path} is damaged (")
    assert why in errors
    assert path.read_text() == text
    assert field.seen == []


def test_two_parents_of_one_name_refuse_each_other(field):
    words = ["seed=1,2", "sweep.name=mine"]
    parent = field.start(*words, "+callbacks.watch.hold=[1]")
    wait_until(lambda: (field.folder / "held_1_0").exists() or parent.poll() is not None)
    other = Field(field.warm, field.folder / "other")
    other.folder.mkdir()
    _, errors = other.run(*words, f"output_root={field.folder}/outputs", status=2)
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"error: sweep.name=mine: process {parent.pid} on ")
    (field.folder / "go").touch()
    assert parent.wait(60) == 0
    assert other.seen == []
