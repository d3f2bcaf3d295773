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

from conftest import ROOT

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
    "loader": [*TRAIN, *TINY, "+callbacks.fault.what=sleep@0", "data.num_workers=1"],
    "two": [*TRAIN, *TINY, "+callbacks.fault.what=sleep@1", "trainer.devices=2"],
    "computing": [*TRAIN, *TINY, "+callbacks.fault.what=compute@1", "trainer.devices=2", "strategy=fsdp"],
    "torchrun": [TORCHRUN, "--nproc-per-node=2", *TRAIN[1:], *TINY, "+callbacks.fault.what=sleep@1"],
    "sweep": [*TRAIN, "-m", *TINY, "+callbacks.fault.what=sleep@0", "seed=1,2"],
}
"""Jobs that are in the middle of training and would stay there: one rank sleeps or computes, the other waits for it."""

CASES = [
    # kind, signal, to the whole group as Ctrl-C does it, exit status
    ("one", signal.SIGINT, True, 130),
    ("two", signal.SIGINT, False, 130),
    ("computing", signal.SIGTERM, False, 143),
    ("two", signal.SIGKILL, False, -9),
    ("torchrun", signal.SIGKILL, False, -9),
    ("torchrun", signal.SIGINT, True, 1),  # torchrun's own status
    ("sweep", signal.SIGINT, True, 130),
    ("sweep", signal.SIGKILL, False, -9),
]
REST = [
    (kind, signum, group, -9 if signum == 9 else 1 if kind == "torchrun" else 128 + signum)
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
def test_no_process_outlives_a_signal_to_the_parent(tmp_path, faulty, kind, signum, group, status):
    ranks = 2 if kind in ("two", "computing", "torchrun") else 1
    root = tmp_path / "outputs"
    process = start(tmp_path, *KINDS[kind], FAULT, "logger=none", f"output_root={root}")
    try:
        began = [tmp_path / f"ready_{rank}" for rank in range(ranks)]
        wait_until(lambda: all(path.exists() for path in began) or process.poll() is not None, seconds=90)
        assert process.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.3)  # into the collective, or the sleep
        sent = time.monotonic()
        (os.killpg if group else os.kill)(process.pid, signum)
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
        assert "Traceback" not in errors
        assert result_of(root)["status"] == "failed"
    if signum == signal.SIGINT and kind != "torchrun":
        assert errors.splitlines()[-1] == "interrupted"
        assert errors.count("interrupted") == 1
    if kind == "sweep" and signum != signal.SIGKILL:
        (ledger,) = root.rglob("jobs.json")
        rows = json.loads(ledger.read_text())
        assert [(row["status"], row["message"]) for row in rows] == [("failed", "interrupted"), ("skipped", "interrupted")]
