"""The README's commands, as they stand there, run; only the trainings are made shorter."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkout import ROOT
from warm import Warm

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORTER = [
    "trainer.max_epochs=null",
    "trainer.max_steps=2",
    "schedule.warmup_steps=0",
    "logger=none",
    "trainer.limit_test_batches=1",
]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Every command line of the bash blocks, without its comment."""
    lines = [line.split("  #")[0].split("   #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def words(line: str) -> list[str]:
    """A command's arguments, with this checkout's Python, torchrun and train.py."""
    bin_folder = Path(sys.executable).parent
    names = {"python": sys.executable, "torchrun": str(bin_folder / "torchrun"), "train.py": str(ROOT / "train.py")}
    return [names.get(word, word) for word in shlex.split(line)]


@pytest.fixture
def run(warm: Warm) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command in a folder, as ``run(line, folder, *more words)``; Python's without waiting for its imports."""

    def run_line(line: str, folder: Path, *more: str) -> subprocess.CompletedProcess:
        command = [*words(line), *more]
        if command[0] == sys.executable:
            return warm.run(*command[1:], cwd=folder, timeout=300)
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    return run_line


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all commands are typed, with the README's own package in it."""
    place = tmp_path_factory.mktemp("readme")
    example = blocks("python")[0]
    (place / "spirals.py").write_text(example, encoding="utf-8")
    return place


def test_the_two_commands_come_first_and_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [line.split()[1] for line in commands()[:2]] == ["train", "test"]
    for target in ("train", "test"):
        assert f"\n{target}:" in makefile


def is_about_sweeps(line: str) -> bool:
    return "sweep" in line


def is_about_checkpoints(line: str) -> bool:
    words = ("checkpoint.", "resume=", "init_from=", "-m shardwise ")
    return any(word in line for word in words) and not is_about_sweeps(line)


@pytest.mark.slow
def test_every_command_runs(run: Callable[..., subprocess.CompletedProcess], folder: Path) -> None:
    ran = 0
    for line in commands():
        example = "spirals" in line
        if line.startswith(("make ", "source ")) or "rerun=" in line or is_about_sweeps(line):
            continue
        if is_about_checkpoints(line) and not example:
            continue
        whole = "--help" in line or example
        result = run(line, folder, *([] if whole else SHORTER))
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        ran += 1
    assert ran >= 5
    learned = next(iter((folder / "outputs" / "custom").glob("*/result.json")))
    assert json.loads(learned.read_text())["metrics"]["val/accuracy"] > 0.95, "the README's own example learns"
    again = next(line for line in commands() if "rerun=" in line)
    runs = sorted((folder / "outputs" / "digits").iterdir(), key=lambda path: path.stat().st_mtime)
    result = run(re.sub(r"outputs/digits/<run id>", str(runs[0]), again), folder)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_commands_about_checkpoints(run: Callable[..., subprocess.CompletedProcess], tmp_path: Path) -> None:
    """In their order: a run that is killed, taken up again under another layout, and then used in every way."""
    lines = [line for line in commands() if is_about_checkpoints(line) and "spirals" not in line]
    killed, goes_on, *rest = lines
    assert "checkpoint.every_n_steps" in killed
    assert "resume=last" in goes_on
    small = ["model=mlp", "model.width=16", "logger=none", "checkpoint.every_n_steps=5", "trainer.max_steps=4000"]
    process = subprocess.Popen([*words(killed), *small], cwd=tmp_path, stdout=subprocess.DEVNULL)
    outputs = tmp_path / "outputs" / "digits"
    until = time.monotonic() + 120
    while not list(outputs.glob("*/checkpoints/step_*5/manifest.json")):
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    (digits,) = outputs.iterdir()
    result = run(goes_on, tmp_path, "trainer.max_steps=4001", "trainer.max_time=00:00:00:05")
    assert result.returncode == 0, result.stderr
    assert "resumed from step" in result.stdout
    assert list(outputs.iterdir()) == [digits]
    text = run("python train.py experiment=text_gpt", tmp_path, *SHORTER)
    assert text.returncode == 0, text.stderr
    (gpt,) = (tmp_path / "outputs" / "text_gpt").iterdir()
    for line in rest:
        line = line.replace("outputs/digits/<run id>", str(digits)).replace("outputs/text_gpt/<run id>", str(gpt))
        more = ["--tokens", "5"] if "generate" in line else []
        if "checkpoints/last" in line:
            more = ["trainer.max_epochs=null", "trainer.max_steps=100000"]  # the killed run had a time limit too
        if "init_from" in line:
            more = ["model=mlp", "model.width=16", *SHORTER]
        result = run(line, tmp_path, *more)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "predictions.npz").is_file()
    assert len(rest) >= 7


@pytest.mark.slow
def test_the_commands_about_sweeps(run: Callable[..., subprocess.CompletedProcess], tmp_path: Path) -> None:
    """In their order: a grid from its file, typed twice, one of the user's own, a search, and the report."""
    lines = [line for line in commands() if is_about_sweeps(line)]
    grid, own, search, report = lines
    few = ["batch.global_size=64,256", "lr_scaling=none,linear", "schedule.warmup_epochs=0", "seed=0", "sweep.slots=2"]
    short = ["model.width=8", "trainer.max_epochs=2"]
    for jobs in (4, 0):
        result = run(grid, tmp_path, *few, *short)
        assert result.returncode == 0, f"{grid}\n{result.stdout}\n{result.stderr}"
        assert len(re.findall(r"^job \d/4 started", result.stdout, flags=re.MULTILINE)) == jobs
    for line, more in (
        (own, SHORTER),
        (search, ["sweep.trials=2", "sweep.slots=2", "trainer.max_epochs=2", "logger=none"]),
    ):
        result = run(line, tmp_path, *more, "model=mlp", "model.width=8")
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    result = run(report, tmp_path)
    assert result.returncode == 0, result.stderr
    page = tmp_path / "outputs" / "sweeps" / "batch_scaling_digits" / "report" / "report.html"
    assert "rule=linear" in page.read_text(encoding="utf-8")


def test_the_figures_are_those_that_were_measured() -> None:
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    rows = [line for line in README.split("## Figures")[1].split("## Limits")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 6
    for row in (row for row in rows if "from the command" not in row and "| processes" not in row):
        assert row in measured, row


def test_it_stands_on_two_screens() -> None:
    assert len(README.splitlines()) <= 150
