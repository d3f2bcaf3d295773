"""Fixtures for all tests: an isolated environment, a pool of live ranks, and `train.py` run as a user types it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkout import ROOT, TrainRun
from pool import RankPool
from pool_rank import reset_torch
from warm import Warm

LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "WANDB_", "PMI_", "OMPI_", "PL_", "HYDRA_")
LAUNCHER_NAMES = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path) -> Iterator[None]:
    """No test sees a tracker's key, a launcher's variables or the checkout as its working directory, nor leaves any.

    A run that a test starts without naming an output folder writes below `tmp_path`.
    """
    environment, folder = dict(os.environ), os.getcwd()
    handlers, level = list(logging.root.handlers), logging.root.level
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            del os.environ[name]
    private = tmp_path / ".private"
    os.environ.update(
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DIR=str(tmp_path),
        WANDB_CACHE_DIR=str(private),
        WANDB_CONFIG_DIR=str(private),
        WANDB_DATA_DIR=str(private),
        # torch looks up the names of the addresses it connects to: 5 s each where the resolver does not answer
        RES_OPTIONS="timeout:1 attempts:1",
        NETRC=str(private / "netrc"),  # where W&B would find the key of the person who runs the tests
    )
    os.chdir(tmp_path)
    try:
        yield
    finally:
        # A handler that a test has brought in holds on to a stream that is closed with it.
        logging.root.handlers[:], logging.root.level = handlers, level
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if "torch" in sys.modules:
            reset_torch()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Live ranks: `pool.run(function, *arguments, world_size=2)` returns what each rank returned."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """What starts commands without their imports, which are nine tenths of a short run; see `warm.py`."""
    with contextlib.chdir("/"), Warm(mark=uuid.uuid4().hex) as forking:
        yield forking


@pytest.fixture
def train_py(tmp_path: Path, warm: Warm) -> Callable[..., TrainRun]:
    """Run `python train.py ...` of the checkout from another folder, as `train_py("strategy=fsdp", ok=True)`.

    Its process is forked with everything imported, and is otherwise what the interpreter would start.

    `ok=True` expects exit status 0, `ok=False` another, `ok=None` either. `env` changes the environment; a value of
    None removes the variable. `timeout` is in seconds; a run that takes longer is ended with its process group.
    """

    def run(
        *overrides: str, ok: bool | None = True, env: dict[str, str | None] | None = None, timeout: float = 120.0
    ) -> TrainRun:
        root = tmp_path / "outputs"
        command = [str(ROOT / "train.py"), *overrides]
        if not any(override.startswith("output_root=") for override in overrides):
            command.append(f"output_root={root}")
        environment = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        # files, not pipes: a worker that outlives train.py would keep a pipe open and the test waiting
        out, err = tmp_path / "train.out", tmp_path / "train.err"
        process = warm.command(command, cwd=tmp_path, out=out, err=err, env=environment)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            tail = TrainRun(-9, out.read_text(), err.read_text(), root)
            pytest.fail(f"{' '.join(command)} took longer than {timeout:g} s\n{tail}")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finished = TrainRun(status, out.read_text(), err.read_text(), root)
        if ok is not None:
            assert (finished.returncode == 0) == ok, f"{' '.join(command)}\n{finished}"
        return finished

    return run
