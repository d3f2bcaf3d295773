"""How ranks come to be: in this process, under PyTorch's agent, under torchrun; and that they agree on it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from pytorch_lightning import Trainer

from checkout import ROOT
from pool import RankError
from shardwise import cli
from shardwise.config import from_plain
from shardwise.errors import ConfigError
from shardwise.parallel.mesh import check_agreement
from shardwise.resolve import find_world
from shardwise.strategies import MeshStrategy

TORCHRUN = Path(sys.executable).with_name("torchrun")
TINY = ["model=mlp", "model.width=8", "trainer.max_steps=3", "schedule.warmup_steps=0", "logger=none"]
HELLO = ["plugins=[greeting]", "+callbacks.hello._target_=greeting.Hello"]
GREETING = """
import os
from pytorch_lightning import Callback

class Hello(Callback):
    def on_fit_start(self, trainer, module):
        print(f"hello from rank {trainer.global_rank} of {trainer.world_size}, process {os.getpid()}", flush=True)
"""


@pytest.fixture
def greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greeting.py").write_text(GREETING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def start(folder: Path, *command: str | Path) -> subprocess.Popen:
    return subprocess.Popen(
        [str(part) for part in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    try:
        out, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    return process.returncode, out, errors


def check_two_ranks(output: str, root: Path) -> None:
    """One run folder, a log for each of two ranks, and each message once on the console, from rank 0."""
    (folder,) = [path.parent for path in root.rglob("config.yaml")]
    logs = [(folder / "ranks" / f"rank_{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert log.count("hello from") == 1
        assert f"hello from rank {rank} of 2" in log
    assert output.count("hello from") == 1
    assert output.count("dp_replicate 2") == 1
    assert output.count("completed after 3 steps") == 1
    assert logs[0].count("completed after 3 steps") == 1
    assert "strategy" not in logs[1]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"], result["run_id"]) == ("completed", 3, folder.name)
    ranks = json.loads((folder / "provenance.json").read_text())["ranks"]
    assert [(row["rank"], row["node"], row["local_rank"], row["dp"]) for row in ranks] == [(0, 0, 0, 0), (1, 0, 1, 1)]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3  # steps 1 and 3, and the test


def test_two_launches_at_the_same_moment(tmp_path, greeting):
    """No conflict over a port; the same second gives different folders."""
    roots = [tmp_path / "a", tmp_path / "b"]
    train = [sys.executable, ROOT / "train.py", *TINY, *HELLO, "trainer.devices=2"]
    processes = [start(tmp_path, *train, f"output_root={root}") for root in roots]
    for (status, out, errors), root in zip([finish(process) for process in processes], roots, strict=True):
        assert status == 0, errors
        assert errors == ""  # no warning that nobody can do anything about
        assert "launch         local, 2 CPU processes (2 processes on this machine)" in out
        check_two_ranks(out, root)


def test_torchrun_makes_one_run_of_its_ranks(tmp_path, greeting):
    root = tmp_path / "outputs"
    command = [TORCHRUN, "--nproc-per-node=2", ROOT / "train.py", *TINY, *HELLO, f"output_root={root}"]
    status, out, errors = finish(start(tmp_path, *command))
    assert status == 0, errors
    assert "launch         torchrun, 2 CPU processes (torchrun has started the ranks)" in out
    check_two_ranks(out + errors, root)


def test_one_process_trains_in_the_process_that_was_started(tmp_path, greeting):
    process = start(tmp_path, sys.executable, ROOT / "train.py", *TINY, *HELLO, f"output_root={tmp_path / 'outputs'}")
    status, out, errors = finish(process)
    assert status == 0, errors
    assert f"hello from rank 0 of 1, process {process.pid}" in out
    assert "launch         in-process, 1 CPU process (one process is enough)" in out


# ---- ranks that exist already, as the pool's are --------------------------------------------------------------------


def train_on_this_rank(*argv: str) -> tuple[int, str]:
    """(exit status, what went to the error stream) of `train.py` on one rank that torchrun has started."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = cli.train(argv)
    return status, errors.getvalue()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "seed=1,2"], "-m under torchrun would run once a rank: type it with python train.py"),
        (["rerun=somewhere"], "rerun=somewhere under torchrun would run once a rank: type it with python train.py"),
        (["trainer.devices=3"], "trainer.devices=3, but torchrun started devices=2: leave trainer.devices out"),
        (["trainer.num_nodes=2"], "trainer.num_nodes=2, but torchrun started num_nodes=1"),
        (["launch=local"], "launch=local, but torchrun has started this process already"),
        (["trainer.maxsteps=3"], "trainer.maxsteps: no such key; did you mean 'max_steps'?"),
    ],
)
def test_a_mistake_under_torchrun_is_told_once_and_ends_all_ranks(pool, tmp_path, argv, message):
    (status, errors), (other, silence) = pool.run(train_on_this_rank, *argv, init=False)
    assert (status, other) == (2, 2)
    assert errors.startswith(f"error: {message}")
    assert len(errors.splitlines()) == 1
    assert silence == ""
    assert not list(tmp_path.iterdir())


def test_two_processes_of_one_rank_are_an_error_not_two_trainings(pool, tmp_path):
    """Two nodes that both say they are the first."""
    for status, errors in pool.run(train_on_this_rank, *TINY, f"output_root={tmp_path}", init=False, env={"RANK": "0"}):
        assert status == 2
        assert errors.startswith("error: two processes say that they are rank 0 of 2: give every node a --node-rank")
        assert len(errors.splitlines()) == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_rank_that_nobody_launched_is_an_error():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    config = from_plain({"optimizer": {"lr": 0.1}})
    with pytest.raises(ConfigError, match="RANK=0 and WORLD_SIZE=2 are set, but not by torchrun"):
        find_world(config, environ=by_hand, gpus=0)
    config.launch.kind = "local"
    assert find_world(config, environ=by_hand, gpus=0).size == 1


def disagree(name: str, ours: str, theirs: str) -> None:
    check_agreement({"seed": 1, name: theirs if dist.get_rank() == 1 else ours})


def test_ranks_that_hold_another_configuration_say_who(pool):
    with pytest.raises(RankError) as raised:
        pool.run(disagree, "configuration", "0xaa", "0xbb", world_size=3)
    assert set(raised.value.errors) == {0, 1, 2}
    for text in raised.value.errors.values():
        assert "the ranks disagree about configuration: '0xaa' on rank 0, 2; '0xbb' on rank 1" in text


def meet_with_a_seed_of_its_own() -> None:
    strategy = MeshStrategy(seed=7 + int(os.environ["RANK"]))
    Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, logger=False)
    strategy.setup_environment()


def test_ranks_with_different_seeds_do_not_start(pool):
    with pytest.raises(RankError, match="the ranks disagree about seed: 7 on rank 0; 8 on rank 1"):
        pool.run(meet_with_a_seed_of_its_own, init=False)
