"""A run that is asked to end saves first, on all ranks at one step; one that crashes starts itself again."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from checkout import ROOT
from shardwise.checkpoint.filesystems import LocalFolder
from shardwise.checkpoint.manifest import SEAL, _seal, step_name
from shardwise.checkpoint.store import Store, checksum
from shardwise.config import from_plain
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.launch import _restarted
from shardwise.resolve import find_world
from test_failures import alive, start, wait_until
from warm import Started, Warm

TRAIN = [sys.executable, ROOT / "train.py"]
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node=2", ROOT / "train.py"]
TINY = ["model=mlp", "model.width=8", "schedule.warmup_steps=0", "logger=none", "plugins=[paced]"]
TINY += ["trainer.log_every_n_steps=1", "checkpoint.every_minutes=null"]
PACE = "+callbacks.pace._target_=paced.Pace"
BREAK = "+callbacks.break._target_=paced.Break"
TWO = ["trainer.devices=2", "strategy=fsdp"]
REQUEUE = 75
FIRST = 3
"""Steps that are done when the signal is sent."""

PACED = '''
import os, signal, time
from pathlib import Path

from pytorch_lightning import Callback

from shardwise.errors import ConfigError

HERE = Path(os.environ["PACE_FOLDER"])


class Pace(Callback):
    """Steps that take their time, so that a signal can be sent within a certain one."""

    def __init__(self, seconds=0.4):
        self.seconds = seconds

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        (HERE / f"pid_{trainer.global_rank}").write_text(str(os.getpid()))
        with (HERE / f"steps_{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step + 1} {time.time()}\\n")
        if trainer.global_step >= 2:
            time.sleep(self.seconds)


class Break(Callback):
    """`kind` befalls a rank before a step: the first `times` times that it comes there."""

    def __init__(self, kind, rank=0, step=7, times=1):
        self.kind, self.rank, self.step, self.times = kind, rank, step, times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step + 1 != self.step or trainer.global_rank != self.rank:
            return
        with (HERE / "broken").open("a") as file:
            file.write("x")
        if len((HERE / "broken").read_text()) > self.times:
            return
        if self.kind == "damage":
            for path in HERE.rglob("step_00000006/*.distcp"):
                os.truncate(path, 10)
        if self.kind in ("kill", "damage"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "config":
            raise ConfigError("model.width=8 is planted: type model.width=9")
        raise RuntimeError(f"planted in step {self.step}")
'''


class Mark(str):
    """What every process of these tests carries in its environment, that from which they are forked too."""

    warm: Warm | None = None


@pytest.fixture(scope="module")
def marked() -> Iterator[Mark]:
    mark = Mark(uuid.uuid4().hex)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir("/"):
        patch.setenv("FAULT_MARK", mark)
        mark.warm = Warm(mark=mark)
    with mark.warm:
        yield mark


@pytest.fixture
def paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: Mark) -> Mark:
    """A user's package with the callbacks above; returns the mark that every process of this test carries."""
    (tmp_path / "paced.py").write_text(PACED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PACE_FOLDER", str(tmp_path))
    monkeypatch.setenv("FAULT_MARK", marked)
    return marked


def begin(mark: Mark, tmp_path: Path, *words: str | Path) -> Started:
    """`train.py` with these words in a session of its own, its output in files."""
    assert mark.warm is not None
    return mark.warm.command([ROOT / "train.py", *words], cwd=tmp_path, out=tmp_path / "out", err=tmp_path / "err")


def left(mark: str) -> list[str]:
    """What is alive of all that a test has started."""
    keeper = mark.warm.pid if isinstance(mark, Mark) and mark.warm is not None else None
    return [line for line in alive(mark) if int(line.split()[0]) != keeper]


def steps_of(tmp_path: Path, rank: int) -> list[tuple[int, float]]:
    """(step, when it began) of a rank, in order."""
    path = tmp_path / f"steps_{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(when)) for step, when in map(str.split, lines)]


def in_step(tmp_path: Path, process: subprocess.Popen | Started, *, ranks: int, step: int = FIRST) -> None:
    """Wait until every rank is within a step."""
    reached = wait_until(
        lambda: all(len(steps_of(tmp_path, rank)) >= step for rank in range(ranks)) or process.poll() is not None,
        seconds=90,
    )
    assert reached, f"step {step} was not reached"
    assert process.poll() is None, (tmp_path / "err").read_text()


def end(tmp_path: Path, process: subprocess.Popen | Started, mark: str, *, seconds: float = 90) -> str:
    """Wait for the end of a command, and of all that came from it; returns its error stream."""
    try:
        process.wait(seconds)
        assert wait_until(lambda: not left(mark), seconds=10), left(mark)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, SIGKILL)
        for line in left(mark):
            os.kill(int(line.split()[0]), SIGKILL)
    return (tmp_path / "err").read_text()


def only_run(root: Path) -> Path:
    (config,) = root.rglob("config.yaml")
    return config.parent


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def check_preempted(tmp_path: Path, folder: Path, *, ranks: int, sent: float) -> None:
    """All ranks have ended after the step in which the signal came, or the one after, and what they saved is whole."""
    result = result_of(folder)
    assert result["status"] == "preempted"
    then = max(step for step, began in steps_of(tmp_path, 0) if began <= sent)
    assert result["steps"] in (then, then + 1)
    assert {steps_of(tmp_path, rank)[-1][0] for rank in range(ranks)} == {result["steps"]}
    store = Store(folder / "checkpoints")
    assert store.newest_whole() == (step_name(result["steps"]), {})
    assert store.last() == step_name(result["steps"])
    assert store.manifest(store.last())["world_size"] == ranks


CASES = [
    # arguments, ranks, signal, to whom
    ([], 1, SIGTERM, "parent"),
    ([], 1, SIGINT, "group"),
    (["data=synthetic", "+data.num_workers=1"], 1, SIGTERM, "group"),
    (TWO, 2, SIGTERM, "group"),
    (TWO, 2, SIGINT, "group"),
    (TWO, 2, SIGUSR2, "worker"),
    (TWO, 2, SIGUSR1, "parent"),
]
MORE = [
    ([], 1, SIGUSR1, "parent"),
    ([], 1, SIGUSR2, "group"),
    ([], 1, SIGHUP, "group"),
    (["data=synthetic", "+data.num_workers=1"], 1, SIGUSR1, "group"),
    (["data=synthetic", "+data.num_workers=1"], 1, SIGINT, "group"),
    ([*TWO, "data=synthetic", "+data.num_workers=1"], 2, SIGTERM, "group"),
    (["launch.max_restarts=1"], 1, SIGTERM, "group"),
    *((TWO, 2, signum, whom) for signum in (SIGTERM, SIGUSR1, SIGUSR2) for whom in ("parent", "group", "worker")),
    *((TWO, 2, signum, whom) for signum in (SIGINT, SIGHUP) for whom in ("parent", "group")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ranks", "signum", "whom"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.proofs) for case in MORE if case not in CASES)],
)
def test_a_signal_saves_and_asks_to_be_started_again(tmp_path, paced, arguments, ranks, signum, whom):
    root = tmp_path / "outputs"
    process = begin(paced, tmp_path, *TINY, PACE, *arguments, f"output_root={root}")
    in_step(tmp_path, process, ranks=ranks)
    sent = time.time()
    if whom == "group":
        os.killpg(process.pid, signum)
    else:
        os.kill(process.pid if whom == "parent" else int((tmp_path / "pid_1").read_text()), signum)
    errors = end(tmp_path, process, paced)
    assert process.returncode == REQUEUE, errors
    assert "Traceback" not in errors
    check_preempted(tmp_path, only_run(root), ranks=ranks, sent=sent)


@pytest.mark.slow
def test_a_scheduler_that_repeats_itself_ends_nothing_early(tmp_path, paced):
    root = tmp_path / "outputs"
    process = begin(paced, tmp_path, *TINY, PACE, *TWO, f"output_root={root}")
    in_step(tmp_path, process, ranks=2)
    sent = time.time()
    for _ in range(8):
        if process.poll() is None:
            os.killpg(process.pid, SIGTERM)
        time.sleep(0.1)
    errors = end(tmp_path, process, paced)
    assert process.returncode == REQUEUE, errors
    check_preempted(tmp_path, only_run(root), ranks=2, sent=sent)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], TWO])
def test_a_second_ctrl_c_ends_it_at_once(tmp_path, paced, arguments):
    root = tmp_path / "outputs"
    process = begin(paced, tmp_path, *TINY, PACE, "+callbacks.pace.seconds=60", *arguments, f"output_root={root}")
    in_step(tmp_path, process, ranks=2 if arguments else 1)
    os.killpg(process.pid, SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    os.killpg(process.pid, SIGINT)
    errors = end(tmp_path, process, paced, seconds=10)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Ctrl-C again ends it at once" in errors
    assert "Traceback" not in errors
    assert result_of(only_run(root))["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "group"), [(SIGTERM, False), (SIGTERM, True), (SIGINT, True)])
def test_under_torchrun_every_rank_saves(tmp_path, paced, signum, group):
    """torchrun hands SIGTERM and Ctrl-C on to its ranks; its own status is always 1."""
    root = tmp_path / "outputs"
    process = start(tmp_path, *TORCHRUN, *TINY, PACE, "strategy=fsdp", f"output_root={root}")
    in_step(tmp_path, process, ranks=2)
    sent = time.time()
    (os.killpg if group else os.kill)(process.pid, signum)
    end(tmp_path, process, paced)
    check_preempted(tmp_path, only_run(root), ranks=2, sent=sent)


@pytest.mark.slow
def test_torchrun_hears_which_ranks_have_saved(tmp_path, paced):
    """A signal to one rank ends all of them with the status that asks to be started again."""
    root = tmp_path / "outputs"
    process = start(tmp_path, *TORCHRUN, *TINY, PACE, "strategy=fsdp", f"output_root={root}")
    in_step(tmp_path, process, ranks=2)
    sent = time.time()
    os.kill(int((tmp_path / "pid_1").read_text()), SIGUSR1)
    errors = end(tmp_path, process, paced)
    assert f"exitcode  : {REQUEUE}" in errors
    check_preempted(tmp_path, only_run(root), ranks=2, sent=sent)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["trainer.devices=2"]])
def test_a_sweep_saves_its_job_and_leaves_out_the_rest(tmp_path, paced, arguments):
    root = tmp_path / "outputs"
    process = begin(paced, tmp_path, "-m", *TINY, PACE, "seed=1,2,3", *arguments, f"output_root={root}")
    in_step(tmp_path, process, ranks=2 if arguments else 1)
    os.killpg(process.pid, SIGINT)
    errors = end(tmp_path, process, paced)
    assert process.returncode == REQUEUE, errors
    (ledger,) = root.rglob("jobs.json")
    rows = json.loads(ledger.read_text())
    assert [row["status"] for row in rows] == ["preempted", "skipped", "skipped"]
    assert [row["message"] for row in rows[1:]] == ["interrupted", "interrupted"]
    folder = Path(rows[0]["run_folder"])
    assert Store(folder / "checkpoints").newest_whole() == (step_name(result_of(folder)["steps"]), {})


# ---- starting again -------------------------------------------------------------------------------------------------

RESTARTS = ["trainer.max_steps=11", "checkpoint.every_n_steps=3", "checkpoint.background=false"]


def broken(tmp_path: Path, mark: Mark, *arguments: str | Path) -> tuple[int, str, Path]:
    """(exit status, error stream, run folder) of a run that something befalls."""
    root = tmp_path / "broken_outputs"
    process = begin(mark, tmp_path, *TINY, *RESTARTS, BREAK, *arguments, f"output_root={root}")
    errors = end(tmp_path, process, mark, seconds=120)
    return process.returncode, errors, only_run(root)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "rank"), [([], 0), (TWO, 1)])
def test_a_run_that_is_killed_goes_on_by_itself(tmp_path, paced, train_py, arguments, rank):
    """Every step is logged once, and nothing differs from a run that nothing has befallen."""
    calm = train_py(*TINY, *RESTARTS, *arguments).run_folder
    fault = ["+callbacks.break.kind=kill", f"+callbacks.break.rank={rank}"]
    status, errors, folder = broken(tmp_path, paced, "launch.max_restarts=2", *fault, *arguments)
    assert status == 0, errors
    assert errors.splitlines() == [
        f"rank {rank} was ended by SIGKILL (out of memory?); restart 1 of 2: the run goes on from step 6"
    ]
    assert result_of(folder)["status"] == "completed"
    assert [step for step, _ in losses(folder)] == list(range(1, 12))
    assert losses(folder) == losses(calm)
    metrics = [
        {n: v for n, v in result_of(f)["metrics"].items() if not n.endswith(("_second", "mfu"))} for f in (folder, calm)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_crash_that_repeats_uses_up_the_restarts(tmp_path, paced):
    """It comes before the first checkpoint, so that each attempt begins anew."""
    fault = ["+callbacks.break.kind=raise", "+callbacks.break.step=2", "+callbacks.break.times=9"]
    status, errors, folder = broken(tmp_path, paced, "launch.max_restarts=2", *fault, "trainer.devices=2")
    assert status == 1
    assert len((tmp_path / "broken").read_text()) == 3
    lines = errors.splitlines()
    for number in (1, 2):
        assert lines[number - 1] == (
            f"rank 0 failed: RuntimeError: planted in step 2; restart {number} of 2: the run begins anew, as there is "
            f"no whole checkpoint"
        )
    assert errors.count("Traceback") == 1
    assert lines[-1].startswith("rank 0 failed first; its log: ")
    assert losses(folder) == losses(folder)[:1]  # of the first step, once
    kept = [folder / "ranks" / place / "failure_0.json" for place in ("attempt_0", "attempt_1", ".")]
    assert [json.loads(path.read_text())["rank"] for path in kept] == [0, 0, 0]


@pytest.mark.slow
def test_a_mistake_is_not_made_again(tmp_path, paced):
    fault = ["+callbacks.break.kind=config", "+callbacks.break.step=2", "+callbacks.break.rank=1"]
    status, errors, _ = broken(tmp_path, paced, "launch.max_restarts=2", *fault, "trainer.devices=2")
    assert status == 2
    assert errors.splitlines() == ["error: model.width=8 is planted: type model.width=9"]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_out_by_name(tmp_path, paced):
    fault = ["+callbacks.break.kind=damage"]
    status, errors, folder = broken(tmp_path, paced, "launch.max_restarts=1", *fault)
    assert status == 0, errors
    assert "step_00000006" in errors
    assert "restart 1 of 1: the run goes on from step 3" in errors
    assert [step for step, _ in losses(folder)] == list(range(1, 12))


@pytest.mark.slow
def test_a_crash_before_the_first_save_in_a_new_place_loses_nothing(tmp_path, paced):
    root, new = tmp_path / "broken_outputs", tmp_path / "new"
    process = begin(paced, tmp_path, *TINY, *RESTARTS, "trainer.max_steps=6", f"output_root={root}")
    end(tmp_path, process, paced, seconds=120)
    folder = only_run(root)
    words = [f"resume={folder}", f"checkpoint.folder={new}", "launch.max_restarts=1", "plugins=[paced]"]
    fault = [BREAK, "+callbacks.break.kind=kill", "+callbacks.break.step=8", "trainer.max_steps=11"]
    process = begin(paced, tmp_path, *words, *fault)
    errors = end(tmp_path, process, paced, seconds=120)
    assert process.returncode == 0, errors
    assert "restart 1 of 1: the run goes on from step 6" in errors
    assert [step for step, _ in losses(folder)] == list(range(1, 12))
    assert Store(new / folder.name).last() == step_name(11)


def save_small(store, step, **more):
    place = Path(store.begin(step_name(step)))
    (place / "state.json").write_text("{}")
    files = {"state.json": {"bytes": 2, "xxh3_128": checksum(place / "state.json")}}
    store.publish(step_name(step), {"files": files, **more})
    return store.url_of(step_name(step))


@pytest.fixture
def job(tmp_path):
    """A run that was resumed from elsewhere and saves in its own folder."""
    folder = tmp_path / "outputs" / "run"
    (folder / "ranks").mkdir(parents=True)
    origin = save_small(Store(tmp_path / "old" / "run"), 30)
    return Job(config={}, world={}, run_id="run", run_folder=str(folder), checkpoint=origin, resumed=True)


def test_a_restart_goes_on_from_where_the_run_began_until_it_has_saved(tmp_path, job, capsys):
    origin, own = job.checkpoint, Store(Path(job.run_folder) / "checkpoints")
    again = _restarted(job, "crash", origin=origin)
    assert (again.checkpoint, again.resumed) == (origin, True)
    assert capsys.readouterr().err == f"crash: the run goes on from step 30, which lies in {tmp_path / 'old' / 'run'}\n"
    save_small(own, 20)  # of long ago
    assert _restarted(again, "crash", origin=origin).checkpoint == origin
    newer = save_small(own, 40)
    assert _restarted(again, "crash", origin=origin).checkpoint == newer
    (Path(newer) / "state.json").unlink()
    assert _restarted(replace(job, checkpoint=newer), "crash", origin=origin).checkpoint == origin
    assert f"{newer} is left out: state.json: missing" in capsys.readouterr().err
    # A new run from another's checkpoint begins there anew; one from nothing at the first step.
    for parent in (origin, None):
        Path(job.run_folder, "checkpoints").rename(tmp_path / f"away of {parent is None}")
        again = _restarted(replace(job, parent=parent, resumed=False, checkpoint=parent), "crash", origin=parent)
        assert (again.checkpoint, again.parent, again.resumed) == (parent, parent, True)
        assert "crash: the run begins anew" in capsys.readouterr().err
        own._folder.begin("step_00000001")


def test_a_restart_that_cannot_read_begins_nothing_anew(job, monkeypatch, capsys):
    own = Store(Path(job.run_folder) / "checkpoints")
    save_small(own, 40)

    def away(*parts):
        raise TimeoutError(110, "timed out")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "open", away)
        with pytest.raises(ConfigError, match=r"^crash.*step_00000040/state\.json cannot be read \(timed out\)"):
            _restarted(job, "crash", origin=job.checkpoint)
    path = Path(own.url) / "step_00000040" / "manifest.json"
    plain = {**json.loads(path.read_text()), "format_version": 9}
    path.write_text(json.dumps({**plain, SEAL: _seal(plain)}))
    with pytest.raises(ConfigError, match=r"^crash.*step_00000040 .* has format 9, .*: install a newer shardwise"):
        _restarted(job, "crash", origin=job.checkpoint)
    assert capsys.readouterr().err == ""


def test_restarts_belong_to_one_launcher():
    config = from_plain({"optimizer": {"lr": 0.1}, "launch": {"max_restarts": 2}})
    world = find_world(config, environ={}, gpus=0)
    assert (world.launch, world.size) == ("local", 1)
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match=r"launch\.max_restarts=2 under torchrun, which restarts by itself"):
        find_world(config, environ=ranks, gpus=0)
