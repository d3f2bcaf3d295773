"""The command line as a user meets it: one line for a mistake, quickly, status 2, and nothing left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from checkout import ROOT, TrainRun
from shardwise.__main__ import COMMANDS
from shardwise.cli import train

QUICK_SECONDS = 1.5
"""What --help and mistakes in what the framework owns may take."""

MANY = """
import contextlib, io, json, sys
from shardwise.cli import train

for argv in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train(argv)
    print(json.dumps([argv, status, out.getvalue(), err.getvalue(), "torch" in sys.modules]))
"""
"""Many command lines in one process that has not imported torch."""

OWNED = [
    ["trainer.devicse=2"],
    ["+trainer.devicse=2"],
    ["++trainer.devicse=2"],
    ["strateg=fsdp"],
    ["strategy=fdsp"],
    ["strategy=pp"],
    ["strategy=tp", "trainer.devices=1"],
    ["strategy=tp", "trainer.num_nodes=2"],
    ["strategy=fsdp+tp", "trainer.devices=2"],
    ["trainer.devices=two"],
    ["trainer.strategy=ddp"],
    ["batch.global_size=33", "trainer.devices=2"],
    ["batch.global_size=0"],
    ["batch=64"],
    ["model=null"],
    ["seed=abc"],
    ["seed=${nowhere}"],
    ["lr_scaling=linear"],
    ["strategy=hsdp", "trainer.devices=4"],
    ["strategy=fsdp", "strategy.dp_replicate=3", "trainer.devices=4"],
    ["trainer.accelerator=gpu", "trainer.devices=4096"],
    ["trainer.num_nodes=2"],
    ["launch=torchrun"],
    ["precision=16-mixed", "trainer.accelerator=cpu"],
    ["trainer.max_steps=0"],
    ["schedule.warmup_steps=100", "trainer.max_steps=50"],
    ["model._target_=os.system"],
    ["callbacks.mine._target_=os.system"],
    ["data=imagefolder"],
    ["data=custom"],
    ["experiment_name=.."],
    ["output_root=/proc/none"],
    ["output_root=a_file"],
    ["output_root=a_file/below"],
    ["-m", "output_root=a_file", "seed=1,2"],
    ["-m", "seed=1,x"],
    ["seed=1", "-m", "batch.global_size=64,33", "trainer.devices=2"],
    ["-m", "experiment=glob(none*)"],
    ["-m", "seed=1,2", "hydra/launcher=basic"],
    ["hydra.no_such_setting=1"],
    ["--no-such-flag"],
    ["--cfg", "nothing"],
    ["--run", "--multirun"],
    ["--resolve"],
    ["--experimental-rerun", "some.pickle"],
    ["--config-dir", "/no/such/folder"],
    ["rerun=/no/such/run"],
    ["rerun=a", "rerun=b"],
    ["resume=/no/such/run"],
    ["resume=a_file"],
    ["resume="],
    ["resume=last"],
    ["resume=last", "experiment=none"],
    ["resume=a", "rerun=b"],
    ["resume=last", "init_from=model.safetensors"],
    ["resume=last", "-m", "seed=1,2"],
    ["+resume=last"],
    ["resum=last"],
    ["checkpoint.keep_best=1"],
    ["checkpoint.monitor=val/loss"],
    ["checkpoint.keep_last=0"],
    ["launch.time_limit=90"],
    ["fsdp"],
    ["=1"],
    ["a=b=c"],
    ["größe=1"],
    ["'seed=1"],
]
"""Mistakes that can be told without torch."""


def python(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests here."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        input=stdin,
        env={**os.environ, **(env or {})},
    )


def is_one_error_line(text: str) -> bool:
    return text.startswith("error: ") and text.endswith("\n") and text.count("\n") == 1 and "Traceback" not in text


def left_behind(folder: Path) -> list[str]:
    """Everything in a folder that a test did not put there itself."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.name not in ("a_file", ".private"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that takes no folder is needed")
def test_mistakes_in_what_the_framework_owns_are_one_line_without_torch_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    run = python("-c", MANY, stdin=json.dumps(OWNED))
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert [argv for argv, *_ in answers] == OWNED
    assert left_behind(tmp_path) == []
    for argv, status, out, err, torch_imported in answers:
        assert (status, out, torch_imported) == (2, "", False), f"{argv}: {err}"
        assert is_one_error_line(err), f"{argv}: {err}"
        assert "http" not in err
        assert len(err) < 400, f"{argv}: {err}"


def test_help_and_a_mistake_come_quickly(tmp_path: Path) -> None:
    for arguments, status in ((["--help"], 0), (["-h", "strategy=fsdp"], 0), (["strategy=fsdpp"], 2)):
        seconds = []
        for _ in range(3):  # the limit is for a machine that does nothing else
            start = time.perf_counter()
            run = python(str(ROOT / "train.py"), *arguments)
            seconds.append(time.perf_counter() - start)
            if seconds[-1] < QUICK_SECONDS:
                break
        assert run.returncode == status
        assert min(seconds) < QUICK_SECONDS, f"{arguments}: {seconds}"
    assert is_one_error_line(run.stderr)
    assert left_behind(tmp_path) == []


def test_the_help_page_needs_neither_hydra_nor_torch_and_fits_the_terminal() -> None:
    code = (
        "import sys; from shardwise.cli import train; train(['--help']); print({'hydra', 'torch'} & set(sys.modules))"
    )
    run = python("-c", code, env={"COLUMNS": "100"})
    page, _, last = run.stdout.rstrip().rpartition("\n")
    assert last == "set()"
    assert max(map(len, page.splitlines())) <= 120
    for text in (
        "usage: python train.py",
        "ddp, ddp+tp, fsdp, fsdp+tp, hsdp, hybrid, tp",
        "batch.global_size  [64]",
        "checkpoint.every_n_steps  [null]  Optimizer steps between two checkpoints.",
        "resume  <run folder>|last: ",
        "--cfg job",
        "HYDRA_FULL_ERROR",
    ):
        assert text in page


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model._target_=shardwise.models.mlp.MPL"],
            "model._target_=shardwise.models.mlp.MPL: ",
        ),
        (["model.widht=3"], "model.widht: ConvNet has no such argument; did you mean 'width'?"),
        (["data=imagefolder", "data.path=/no/such/folder"], "data.path=/no/such/folder"),
        (
            ["data=tokens", "data.path={tmp}/shards", "task=language_model", "model=gpt"],
            "{tmp}/shards/train_000.tokens",
        ),
        (["optimizer.betas=0.9"], "optimizer.betas=0.9: two numbers are needed"),
    ],
)
def test_mistakes_in_what_is_plugged_in_are_one_line_too(
    overrides: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "train_000.tokens").write_bytes(b"no shard at all")
    status = train([override.format(tmp=tmp_path) for override in [*overrides, "output_root={tmp}/outputs"]])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert is_one_error_line(err), err
    assert said.format(tmp=tmp_path) in err
    assert not (tmp_path / "outputs").exists()


def test_what_only_lightning_objects_to_is_one_line_as_well() -> None:
    tiny = ["model=mlp", "model.width=8", "logger=none", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
    commands = [
        ["callbacks.keep._target_=pytorch_lightning.callbacks.ModelCheckpoint"],
        ["callbacks=early_stopping", "trainer.limit_val_batches=0"],
    ]
    run = python("-c", MANY, stdin=json.dumps([[*tiny, *command] for command in commands]))
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    for (_, status, _, err, _), said in zip(answers, ("ModelCheckpoint", "watches val/loss"), strict=True):
        assert status == 2
        assert is_one_error_line(err), err
        assert said in err


def test_stack_traces_come_back_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert train(["trainer.devicse=2"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "shardwise.errors.ConfigError: trainer.devicse: no such key; did you mean 'devices'?" in err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert train([f"output_root={closed}"]) == 2
    assert "cannot be written to (Permission denied)" in capsys.readouterr().err


def test_what_would_run_can_be_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for argv in (["--cfg", "job"], ["strategy=fsdp", "--cfg", "job", "--resolve"]):
        assert train(argv) == 0
        shown = yaml.safe_load(capfd.readouterr().out)
        assert shown["strategy"]["name"] == ("fsdp" if "strategy=fsdp" in argv else "ddp")
        assert set(shown) >= {"trainer", "batch", "model", "data", "optimizer", "logger", "extra"}
    assert train(["--info", "searchpath"]) == 0
    assert "pkg://shardwise.experiments" in capfd.readouterr().out
    assert left_behind(tmp_path) == []


def test_the_module_is_a_command_as_well() -> None:
    bare, wrong, asked = (python("-m", "shardwise", *arguments) for arguments in ([], ["trian"], ["--help"]))
    assert (bare.returncode, wrong.returncode, asked.returncode) == (2, 2, 0)
    assert wrong.stderr == f"error: trian: no such command; did you mean 'train'? (commands: {', '.join(COMMANDS)})\n"
    for run in (bare, asked):
        assert "usage: python -m shardwise <command>" in run.stdout + run.stderr
        assert "tokenize" in run.stdout + run.stderr
    for arguments in (["seed=x"], ["--help"]):
        ours, theirs = python("-m", "shardwise", "train", *arguments), python(str(ROOT / "train.py"), *arguments)
        assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrainRun:
    """A trial run by `python -m shardwise`, from a folder that is not the checkout, with a mapping for a group."""
    here = tmp_path_factory.mktemp("elsewhere")
    overrides = ["trainer.fast_dev_run=true", "batch={global_size: 32}", "model=mlp", "logger=none", "output_root=out"]
    command = [sys.executable, "-m", "shardwise", "train", *overrides, "experiment_name='a b'"]
    run = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    return TrainRun(run.returncode, run.stdout, run.stderr, here / "out")


def test_a_trial_run_makes_one_step(trial: TrainRun) -> None:
    assert trial.returncode == 0, trial
    assert (trial.result["status"], trial.result["steps"]) == ("completed", 1)
    assert "global 32" in trial.stdout


def test_paths_are_relative_to_where_the_command_is_typed(trial: TrainRun) -> None:
    here = trial.output_root.parent
    assert trial.run_folder.parent == here / "out" / "a b"
    assert {path.name for path in here.iterdir()} == {"out"}


def test_what_was_typed_is_kept(trial: TrainRun) -> None:
    typed = yaml.safe_load((trial.run_folder / "overrides.yaml").read_text())
    assert "batch={global_size: 32}" in typed
    assert "experiment_name='a b'" in typed
    command = json.loads((trial.run_folder / "provenance.json").read_text())["command"]
    assert command[:4] == ["python", "-m", "shardwise", "train"]
