"""`resume=` of whole runs of train.py: how long they are, what they log, and a signal where only the test is left."""

import json
import uuid
from pathlib import Path
from signal import SIGTERM

import pytest

from shardwise.checkpoint.manifest import step_name
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.store import Store
from shardwise.signals import PREEMPTED
from test_failures import start, wait_until
from test_preemption import TRAIN, end, only_run, result_of

SMALL = ["model=mlp", "model.width=8", "schedule.warmup_steps=0", "logger=none", "checkpoint.every_minutes=null"]
SMALL += ["trainer.log_every_n_steps=1", "plugins=[ending]"]
STOP = ["+callbacks.stop._target_=ending.StopAfter"]

ENDING = '''
import os, time
from pathlib import Path

from pytorch_lightning import Callback

HERE = Path(os.environ["ENDING_FOLDER"])


class StopAfter(Callback):
    """A rank is asked to end in a step, once."""

    def __init__(self, step, rank=0):
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == self.rank and not (HERE / "asked").exists():
            (HERE / "asked").touch()
            os.kill(os.getpid(), 15)


class LongTest(Callback):
    """The first test takes minutes."""

    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if not (HERE / "testing").exists():
            (HERE / "testing").touch()
            time.sleep(200)
'''


@pytest.fixture(autouse=True)
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's package with the callbacks above."""
    (tmp_path / "ending.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ENDING_FOLDER", str(tmp_path))


def lines_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "samples" in line]


@pytest.mark.slow
def test_another_batch_trains_on_what_is_left_of_the_epochs(train_py):
    """1,438 samples twice: 22 steps of 32 of them, and the rest in steps of 64."""
    words = ["batch.global_size=32", "trainer.max_epochs=2", "schedule.warmup_samples=320"]
    first = train_py(*SMALL, *words, *STOP, "callbacks.stop.step=22", ok=None)
    assert first.returncode == PREEMPTED, first
    folder = first.run_folder
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "provenance.json").read_bytes()
    other = train_py(f"resume={folder}", "plugins=[ending]", "data.val_fraction=0.1", ok=False)
    assert other.returncode == 2
    assert "error: the training set had 1438 samples and has 1295 now" in other.stderr
    assert other.stderr.count("\n") == 1
    assert ((folder / "metrics.jsonl").read_bytes(), (folder / "provenance.json").read_bytes()) == before

    train_py(f"resume={folder}", "plugins=[ending]", "batch.global_size=64")
    total = 22 + -(-(2 * 1438 - 22 * 32) // 64)
    assert result_of(folder)["status"] == "completed"
    assert result_of(folder)["steps"] == total
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    seen = [32 * step for step in range(1, 23)] + [22 * 32 + 64 * step for step in range(1, total - 21)]
    assert [line["samples"] for line in lines] == seen
    assert lines[-1]["lr"] < 0.1 * lines[0]["lr"], "the schedule comes to its end"
    assert read_state(f"{folder}/checkpoints/{step_name(total)}")["warmup"] == ["320", 10], "what goes on from here"
    slow = [line["step"] for line in lines if "samples_per_second" not in line]
    assert slow == [1, 23], "the first step of each process is no measure of its speed"


@pytest.mark.slow
def test_a_signal_in_the_last_step_or_the_test_leaves_the_test_to_resume(tmp_path, train_py, monkeypatch):
    options = [*SMALL, "trainer.max_epochs=1", "trainer.limit_train_batches=3", *STOP, "callbacks.stop.step=3"]
    first = train_py(*options, "+callbacks.long._target_=ending.LongTest", ok=None, timeout=60)
    folder = first.run_folder
    assert first.returncode == PREEMPTED, first
    assert not (tmp_path / "testing").exists()
    assert result_of(folder)["status"] == "preempted"
    assert result_of(folder)["steps"] == 3
    assert Store(folder / "checkpoints").newest_whole() == (step_name(3), {})
    told = {name for name in result_of(folder)["metrics"] if name.startswith(("train/", "val/"))}

    resume = (f"resume={folder}", "plugins=[ending]")
    monkeypatch.setenv("FAULT_MARK", mark := uuid.uuid4().hex)
    process = start(tmp_path, *TRAIN, *resume)
    assert wait_until(lambda: (tmp_path / "testing").exists() or process.poll() is not None, seconds=90)
    process.send_signal(SIGTERM)
    errors = end(tmp_path, process, mark, seconds=20)
    assert process.returncode == 128 + SIGTERM, errors
    assert "saves a checkpoint" not in errors
    assert result_of(folder)["status"] == "preempted"

    train_py(*resume)
    assert result_of(folder)["status"] == "completed"
    assert result_of(folder)["steps"] == 3
    names = set(result_of(folder)["metrics"])
    assert {"train/loss", "val/loss", "val/accuracy"} <= told
    assert names >= told, "nothing was trained, and the result still says how training ended"
    assert any(name.startswith("test/") for name in names)
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3]


@pytest.mark.slow
def test_all_ranks_leave_the_test_out_when_one_was_asked_to_end(train_py):
    options = [*SMALL, "trainer.max_steps=3", *STOP, "callbacks.stop.step=3", "callbacks.stop.rank=1"]
    run = train_py(*options, "trainer.devices=2", "strategy=fsdp", ok=None, timeout=90)
    assert run.returncode == PREEMPTED, run
    folder = only_run(run.output_root)
    assert result_of(folder)["status"] == "preempted"
    assert not any(name.startswith("test/") for name in result_of(folder)["metrics"])
