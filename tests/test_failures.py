"""What a user sees when a rank fails, and that nothing outlives its job: real `train.py`, signals from outside."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from checkout import ROOT

TORCHRUN = Path(sys.executable).with_name("torchrun")
TINY = ["model=mlp", "model.width=8", "schedule.warmup_steps=0", "plugins=[faulty]"]
FAULT = "+callbacks.fault._target_=faulty.Fault"
GONE_SECONDS = 10.0

FAULTY = '''
import os, signal, time
from pathlib import Path

import torch
from pytorch_lightning import Callback

from shardwise.errors import ConfigError


class Fault(Callback):
    """`what` is <kind>@<rank>: before its third step that rank raises, is killed, leaves, sleeps or computes."""

    def __init__(self, what):
        self.kind, _, rank = what.partition("@")
        self.rank = int(rank or 0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step < 2:
            return
        here = Path(os.environ["FAULT_FOLDER"])
        (here / f"ready_{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.global_rank != self.rank or self.kind == "none":
            return
        (here / "failed_at").write_text(str(time.time()))
        if self.kind == "raise":
            raise RuntimeError(f"planted on rank {self.rank}")
        if self.kind == "config":
            raise ConfigError("model.width=8 is planted: type model.width=9")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "leave":
            os._exit(3)
        if self.kind == "pause" and trainer.global_step == 2:
            time.sleep(2)
        if self.kind == "sleep":
            time.sleep(600)
        if self.kind == "compute":
            a = torch.ones(2000, 2000)
            while True:
                a = a @ a / 2000
'''


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's package with the callback above; returns a mark that every process of this test carries."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path))
    monkeypatch.setenv("FAULT_MARK", mark)
    return mark


def alive(mark: str) -> list[str]:
    """Command lines of all processes whose environment carries the mark, this one excepted; zombies count as gone."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            if f"FAULT_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(f"{folder.name} {(folder / 'cmdline').read_text().replace(chr(0), ' ')}")
        except OSError:
            continue
    return found


def wait_until(condition, *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def start(tmp_path: Path, *command: str | Path) -> subprocess.Popen:
    """A command in a session of its own, its output in files."""
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        return subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=err, cwd=tmp_path, start_new_session=True
        )


def result_of(root: Path) -> dict:
    (path,) = root.rglob("result.json")
    return json.loads(path.read_text())


TRAIN = [sys.executable, ROOT / "train.py"]
KINDS = {
    "one": [*TRAIN, *TINY, "+callbacks.fault.what=sleep@0"],
    "loader": [*TRAIN, *TINY, "+callbacks.fault.what=sleep@0", "data=synthetic", "+data.num_workers=1"],
    "two": [*TRAIN, *TINY, "+callbacks.fault.what=sleep@1", "trainer.devices=2"],
    "computing": [*TRAIN, *TINY, "+callbacks.fault.what=compute@1", "trainer.devices=2", "strategy=fsdp"],
    "torchrun": [TORCHRUN, "--nproc-per-node=2", *TRAIN[1:], *TINY, "+callbacks.fault.what=sleep@1"],
    "sweep": [*TRAIN, "-m", *TINY, "+callbacks.fault.what=sleep@0", "seed=1,2"],
}
"""Jobs that are in the middle of training and would stay there: one rank sleeps or computes, the other waits for it."""

AT_ONCE = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGQUIT, signal.SIGHUP: signal.SIGQUIT}
"""What ends a job that a first signal has asked to save, which one that is stuck in a step cannot do."""

CASES = [
    # kind, signal, to the whole group as Ctrl-C does it, exit status
    ("one", signal.SIGINT, True, 130),
    ("two", signal.SIGINT, False, 130),
    ("computing", signal.SIGTERM, False, 131),
    ("two", signal.SIGKILL, False, -9),
    ("torchrun", signal.SIGKILL, False, -9),
    ("sweep", signal.SIGINT, True, 130),
]
REST = [
    (kind, signum, group, -9 if signum == 9 else 1 if kind == "torchrun" else 128 + AT_ONCE[signum])
    for kind in KINDS
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
    for group in (False, True)
    if not (signum == signal.SIGKILL and group)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "signum", "group", "status"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.proofs) for case in REST if case not in CASES)],
)
def test_no_process_outlives_the_signals_to_the_parent(tmp_path, monkeypatch, faulty, kind, signum, group, status):
    ranks = 2 if kind in ("two", "computing", "torchrun") else 1
    root = tmp_path / "outputs"
    # torchrun hands a first signal on, which asks its ranks to save, and kills them after this time.
    patient = kind == "torchrun" and signum in (signal.SIGTERM, signal.SIGHUP)
    if patient:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    process = start(tmp_path, *KINDS[kind], FAULT, "logger=none", f"output_root={root}")
    try:
        began = [tmp_path / f"ready_{rank}" for rank in range(ranks)]
        wait_until(lambda: all(path.exists() for path in began) or process.poll() is not None, seconds=90)
        assert process.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.3)  # into the collective, or the sleep
        send = os.killpg if group else os.kill
        if signum in AT_ONCE and not patient:
            send(process.pid, signum)
            time.sleep(0.5)
            assert process.poll() is None, (tmp_path / "err").read_text()
        sent = time.monotonic()
        send(process.pid, signum if patient else AT_ONCE.get(signum, signum))
        process.wait(30)
        assert wait_until(lambda: not alive(faulty), seconds=GONE_SECONDS - (time.monotonic() - sent)), alive(faulty)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for line in alive(faulty):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    errors = (tmp_path / "err").read_text()
    assert process.returncode == status, errors
    if signum != signal.SIGKILL and kind != "torchrun":
        # What reaches the whole group also ends the helper of multiprocessing that a loader starts, which says so.
        assert "Traceback" not in errors or (kind == "loader" and group)
        assert result_of(root)["status"] == "failed"
    if signum == signal.SIGINT and kind != "torchrun":
        assert errors.splitlines()[-1] == "interrupted"
        assert errors.count("interrupted") == 1
    if kind == "sweep" and signum != signal.SIGKILL:
        (ledger,) = root.rglob("jobs.json")
        rows = json.loads(ledger.read_text())
        assert [(row["status"], row["message"]) for row in rows] == [
            ("preempted", "interrupted"),
            ("skipped", "interrupted"),
        ]


@pytest.mark.slow
def test_what_nohup_ignores_does_not_end_a_run(tmp_path, faulty):
    """PyTorch's agent would install its own handler for SIGHUP."""
    root, what = tmp_path / "outputs", "+callbacks.fault.what=pause@1"
    command = ["nohup", *TRAIN, *TINY, FAULT, what, "trainer.devices=2", "trainer.max_steps=4", "logger=none"]
    process = start(tmp_path, *command, f"output_root={root}")
    try:
        wait_until(lambda: (tmp_path / "ready_1").exists() or process.poll() is not None, seconds=90)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(60) == 0, (tmp_path / "err").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert result_of(root)["status"] == "completed"


def finished(tmp_path: Path, *command: str | Path) -> tuple[int, str, str, float]:
    """(exit status, stdout, stderr, seconds from the planted failure to the end) of a command that ends by itself."""
    process = start(tmp_path, *command, f"output_root={tmp_path / 'outputs'}")
    try:
        process.wait(90)
        ended = time.time()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    since = ended - float((tmp_path / "failed_at").read_text())
    return process.returncode, (tmp_path / "out").read_text(), (tmp_path / "err").read_text(), since


def exit_codes(root: Path) -> list[int]:
    """The exit code of every offline W&B run below a folder, in the order of the run folders."""
    from test_tracking import records

    found = []
    for folder in sorted(root.rglob("offline-run-*")):
        found += [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]
    return found


def test_the_first_failing_rank_is_what_the_user_sees(tmp_path, faulty):
    """Rank 1 raises while rank 0 waits for it in a collective."""
    what = "+callbacks.fault.what=raise@1"
    status, out, errors, since = finished(tmp_path, *TRAIN, *TINY, FAULT, what, "trainer.devices=2")
    assert status == 1, errors
    assert since < GONE_SECONDS
    assert wait_until(lambda: not alive(faulty), seconds=5), alive(faulty)
    lines = errors.strip().splitlines()
    assert errors.count("Traceback") == 1
    assert any(line.endswith("RuntimeError: planted on rank 1") for line in lines[-3:])
    assert lines[-1].startswith("rank 1 failed first; its log: ")
    log = Path(lines[-1].rpartition("its log: ")[2])
    assert "planted on rank 1" in log.read_text()
    assert "planted" not in out
    assert result_of(tmp_path / "outputs")["status"] == "failed"
    assert exit_codes(tmp_path / "outputs") == [1]


def test_under_torchrun_the_failing_rank_tells_it_once(tmp_path, faulty):
    command = [TORCHRUN, "--nproc-per-node=2", ROOT / "train.py", *TINY, FAULT, "logger=none"]
    status, _, errors, _ = finished(tmp_path, *command, "+callbacks.fault.what=raise@1")
    assert status == 1
    assert errors.count("RuntimeError: planted on rank 1") == 1
    assert "Connection closed" not in errors
    assert wait_until(lambda: not alive(faulty), seconds=5), alive(faulty)
    assert result_of(tmp_path / "outputs")["status"] == "failed"


def test_a_mistake_that_only_a_worker_finds_is_one_line(tmp_path, faulty):
    what = "+callbacks.fault.what=config@1"
    status, _, errors, _ = finished(tmp_path, *TRAIN, *TINY, FAULT, what, "trainer.devices=2", "logger=none")
    assert status == 2
    assert errors.strip().splitlines()[-1] == "error: model.width=8 is planted: type model.width=9"
    assert "Traceback" not in errors


def test_every_kind_of_failure_is_told_at_once_and_again_at_the_end(tmp_path, faulty):
    """A sweep whose jobs fail in all ways but the last, which goes on to the end; W&B learns of each."""
    kinds = ["raise@0", "kill@1", "leave@1", "config@0", "none@0"]
    command = [*TRAIN, "-m", *TINY, FAULT, f"+callbacks.fault.what={','.join(kinds)}", "sweep.on_failure=continue"]
    command += ["trainer.devices=2", "trainer.max_steps=4"]
    status, out, errors, _ = finished(tmp_path, *command)
    assert status == 1
    assert wait_until(lambda: not alive(faulty), seconds=5), alive(faulty)
    (ledger,) = (tmp_path / "outputs").rglob("jobs.json")
    rows = json.loads(ledger.read_text())
    assert [row["status"] for row in rows] == ["failed"] * 4 + ["completed"]
    logs = [f"{row['run_folder']}/ranks/rank_{rank}.log" for row, rank in zip(rows, [0, 1, 1, 0], strict=False)]
    for row, log, cause in zip(
        rows,
        logs,
        [
            "RuntimeError: planted on rank 0",
            "rank 1 was ended by SIGKILL (out of memory?)",
            "rank 1 ended with status 3",
            "model.width=8 is planted: type model.width=9",
        ],
        strict=False,
    ):
        assert cause in row["message"]
        assert cause in errors
        assert log in row["message"]
        assert out.count(log) == 1  # in the list at the end
        assert json.loads((Path(row["run_folder"]) / "result.json").read_text())["status"] == "failed"
    assert errors.index("job 1/5 failed") < errors.index("job 2/5 failed")
    assert out.index("job 2/5") < out.index("job 5/5")
    assert f"4 of 5 jobs did not complete; see {ledger}" in errors.splitlines()[-1]
    assert [code for row in rows for code in exit_codes(Path(row["run_folder"]))] == [1, 1, 1, 1, 0]
