"""What a run leaves behind explains it, holds no secret, and is enough to repeat it."""

import csv
import io
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from checkout import ROOT
from shardwise.config import from_plain
from shardwise.hydra_setup import compose
from shardwise.job import make_job, with_folder
from shardwise.resolve import World
from shardwise.summary import next_commands, not_finite

SMALL = ["model=mlp", "model.width=8", "trainer.max_steps=4", "schedule.warmup_steps=0", "trainer.log_every_n_steps=1"]
KEY = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
PASSWORD = "correct-horse"
TALKING = """
import torch
from pytorch_lightning import Callback
from shardwise.module import Classification

class Talking(Classification):
    def training_step(self, batch, batch_idx):
        self.log("mine", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

class StopOnOne(Callback):
    # Only rank 1 wants to stop, after its third step.
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(
            trainer.global_rank == 1 and trainer.global_step == 3, all=False
        )

class Last(Callback):
    def on_train_end(self, trainer, module):
        print(f"rank {trainer.global_rank} ended at step {trainer.global_step}", flush=True)
"""


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def read(folder: Path, name: str):
    text = (folder / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def test_what_a_learning_rate_rule_changes_is_shown_and_kept(train_py):
    """In the start-up table, in config.yaml, and in the optimizer that really ran."""
    typed = [one for one in SMALL if "warmup" not in one]
    scaling = ["lr_scaling=adam_sde", "lr_scaling.base_batch_size=64", "batch.global_size=128"]
    run = train_py(*typed, *scaling, "optimizer.weight_decay=0.1", "schedule.warmup_samples=200", "logger=none")
    table = dict(re.findall(r"^(learning rate|rule changes|schedule) +(.*?) *$", run.stdout, re.MULTILINE))
    assert table["learning rate"] == "base 0.001, rule adam_sde from base batch 64: effective 0.00141421"
    assert table["rule changes"] == "betas 0.9, 0.999 -> 0.8, 0.998; eps 1e-08 -> 7.07107e-09"
    assert table["schedule"] == "cosine after 2 steps of warm-up, 4 optimizer steps"
    config = read(run.run_folder, "config.yaml")
    assert config["optimizer"]["betas"] == [0.9, 0.999]
    derived = config["derived"]
    assert derived["effective_lr"] == pytest.approx(0.001 * 2**0.5)
    assert derived["effective_betas"] == [0.8, 0.998]
    assert derived["effective_eps"] == pytest.approx(1e-8 / 2**0.5)
    assert derived["warmup_steps"] == 2
    assert "effective_weight_decay" not in derived
    rates = [line["lr"] for line in run.metrics if "train/loss" in line]
    assert rates[:2] == pytest.approx([derived["effective_lr"] / 2, derived["effective_lr"]])

    def betas(step: int) -> set:
        (made,) = read(run.run_folder / f"checkpoints/step_{step:08d}", "state.json")["trainer"]["optimizers"]
        return {tuple(group["betas"]["$tuple"]) for group in made["groups"]}

    assert betas(4) == {(0.8, 0.998)}
    train_py(f"resume={run.run_folder}", "batch.global_size=64", "trainer.max_steps=6")
    assert betas(6) == {(0.9, 0.999)}, "what the rule says is of the batch of now"
    derived = read(run.run_folder, "config.yaml")["derived"]
    assert (derived["effective_lr"], derived["warmup_steps"]) == (0.001, 2), "the warm-up lay behind"
    assert "effective_betas" not in derived


def test_a_loss_that_is_not_finite_is_said_loudly(train_py):
    on = ["monitor.nonfinite=ignore", "lr_scaling.base_batch_size=16", "logger=none"]
    run = train_py(*SMALL, "optimizer=muon", "optimizer.lr=1e30", *on)
    first = next(line["step"] for line in run.metrics if line.get("train/loss", 0.0) is None)
    (line,) = [line for line in run.stdout.splitlines() if "NOT FINITE" in line]
    assert line.startswith("WARNING: NOT FINITE: ")
    assert "test/loss is nan, train/loss is nan" in line
    assert line.endswith(
        f"; the logged train/loss was not finite first at step {first}: try a smaller optimizer.lr (it is 1e+30), or "
        f"trainer.gradient_clip_val=1.0"
    )
    table = re.findall(r"^(optimizer|note) +(.*?) *$", run.stdout, re.MULTILINE)
    whole = int(re.search(r"^parameters +(\d+),", run.stdout, re.MULTILINE)[1])
    hidden = 64 * 8 + 8 * 8  # two layers; the head and the biases are not
    assert table == [
        ("optimizer", f"Muon on {hidden:,} parameters, AdamW on {whole - hidden:,}"),
        (
            "note",
            "lr_scaling.base_batch_size=16 has no effect with lr_scaling=none (rules: linear, sqrt, adam_sde, legw)",
        ),
    ]


def test_a_loss_is_not_blamed_for_a_metric_of_the_users(tmp_path):
    job = made_job(tmp_path)
    assert not_finite(job, {"test/loss": 1.0}) is None
    Path(job.run_folder).mkdir(parents=True)
    (Path(job.run_folder) / "metrics.jsonl").write_text('{"step": 3, "train/loss": 0.5}\n')
    line = not_finite(job, {"test/loss": 1.0, "mine": math.inf})
    assert line == "WARNING: NOT FINITE: mine is inf; every logged train/loss was finite"
    line = not_finite(made_job(tmp_path, "trainer.gradient_clip_val=0.5"), {"test/loss": math.nan})
    assert line.endswith("try a smaller optimizer.lr (it is 0.001)"), "gradients are clipped"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "-m batch.global_size=32,128 lr_scaling=linear lr_scaling.base_batch_size=64"),
        (["batch.global_size=256"], "-m batch.global_size=128,512 lr_scaling=linear lr_scaling.base_batch_size=256"),
        (["batch.global_size=3"], "-m batch.global_size=6,12 lr_scaling=linear lr_scaling.base_batch_size=3"),
        (
            ["lr_scaling=sqrt", "batch.global_size=256", "lr_scaling.base_batch_size=128"],
            "lr_scaling=sqrt lr_scaling.base_batch_size=128 -m batch.global_size=128,512",
        ),
        (["lr_scaling=none"], "lr_scaling=none -m batch.global_size=32,128"),
        (
            ["lr_scaling.base_batch_size=16"],
            "-m batch.global_size=32,128 lr_scaling=linear lr_scaling.base_batch_size=16",
        ),
    ],
)
def test_the_sweep_that_is_proposed_keeps_the_rule(tmp_path, typed, words):
    (line,) = [line for line in next_commands(made_job(tmp_path, *typed)) if " -m batch" in line]
    assert line.endswith(f"train.py {words}")


def made_job(tmp_path, *typed):
    world = World(num_nodes=1, devices=1, accelerator="cpu", launch="in-process", reason="")
    config = replace(compose(list(typed)), output_root=str(tmp_path))
    return make_job(config, world, experiment="x", overrides=typed, command=["python", "train.py"], run_id="same")


def test_a_folder_explains_its_run_without_a_secret_and_repeats(train_py, tmp_path, monkeypatch):
    """One run with secrets wherever a user may put them, and the same run again from its folder."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", PASSWORD)
    typed = [*SMALL, "data.val_fraction=0.1", "trainer.val_check_interval=2", "trainer.check_val_every_n_epoch=null"]
    secret = [f"+extra.hub_token={TOKEN}", f"+extra.mirror=https://me:{PASSWORD}@host/x", f"+extra.note={KEY}"]
    run = train_py(*typed, *secret)
    folder = run.run_folder

    config = read(folder, "config.yaml")
    assert config["trainer"]["max_steps"] == 4
    assert config["model"]["width"] == 8
    assert config["derived"]["batch_micro_size"] == 64
    assert config["derived"]["effective_lr"] == config["optimizer"]["lr"]
    assert config["derived"]["total_steps"] == 4
    assert "${" not in (folder / "config.yaml").read_text()
    assert "!!" not in (folder / "config.yaml").read_text()
    assert read(folder, "overrides.yaml")[: len(typed)] == typed

    provenance = read(folder, "provenance.json")
    assert provenance["command"][1].endswith("train.py")
    assert "trainer.max_steps=4" in provenance["command"]
    assert {"python", "torch", "pytorch-lightning"} <= set(provenance["versions"])
    assert provenance["seed"] == 0
    assert provenance["ranks"][0]["rank"] == 0
    assert "git" in provenance

    lines = run.metrics
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val/loss" in line] == [2, 4]
    assert all({"step", "time"} <= set(line) for line in lines)
    assert all({"lr", "samples"} <= set(line) for line in lines if "train/loss" in line)
    result = run.result
    assert (result["status"], result["run_id"], result["steps"]) == ("completed", folder.name, 4)
    assert {"train/loss", "val/loss", "val/accuracy", "test/accuracy", "test/loss", "lr"} <= set(result["metrics"])
    assert "step" not in result["metrics"]
    assert result["metrics"]["train/loss"] == pytest.approx(losses(folder)[-1])
    assert not list(folder.rglob("*.tmp"))

    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert {"rank_0.log", "config.yaml", "metrics.jsonl"} <= {path.name for path in kept}
    assert any(path.suffix == ".wandb" for path in kept)
    for path in kept:
        for one in (KEY, TOKEN, PASSWORD):
            assert one.encode() not in path.read_bytes(), path
    assert TOKEN not in run.stdout

    # What was hidden has to be typed again; then the numbers are the same to the last bit.
    refused = train_py(f"rerun={folder}", ok=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: extra.hub_token is a secret that ")
    again = train_py(f"rerun={folder}", *secret, "logger=none")
    assert again.run_folder != folder
    assert losses(again.run_folder) == losses(folder)
    assert "code, versions and hardware are those of the repeated run" in again.stdout
    assert read(again.run_folder, "provenance.json")["command"][2] == f"rerun={folder}"


def test_a_rerun_keeps_what_the_defaults_were_and_says_so(train_py, tmp_path):
    """Nobody typed betas, which have changed since; the versions have too; the seed is typed anew."""
    first = train_py(*SMALL, "logger=none").run_folder
    old = tmp_path / "old"
    shutil.copytree(first, old)
    config = read(old, "config.yaml")
    config["optimizer"]["weight_decay"] = 0.5
    config["batch"]["global_size"] = 32
    config["trainer"]["gone"] = 1
    (old / "config.yaml").write_text(yaml.safe_dump(config))
    provenance = read(old, "provenance.json")
    provenance["versions"]["torch"] = "2.0.0"
    (old / "provenance.json").write_text(json.dumps(provenance))

    run = train_py(f"rerun={old}", "seed=1", "batch.global_size=128")
    now = read(run.run_folder, "config.yaml")
    assert (now["seed"], now["optimizer"]["weight_decay"], now["batch"]["global_size"]) == (1, 0.5, 128)
    assert "optimizer.weight_decay=0.5 is kept from the repeated run" in run.stdout
    assert "batch.global_size=32 is kept" not in run.stdout
    assert "trainer.gone=1 of the repeated run is no key any more and is left out" in run.stdout
    assert "differs from the repeated run: torch: 2.0.0 -> " in run.stdout
    assert losses(run.run_folder) != losses(first)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is no run folder: one holds overrides.yaml and config.yaml"),
        ({"overrides.yaml": "a: 1", "config.yaml": "a: 1"}, "overrides.yaml is damaged: a list of overrides"),
        ({"overrides.yaml": "- [", "config.yaml": "a: 1"}, "overrides.yaml is damaged"),
        ({"overrides.yaml": "[]", "config.yaml": "- 1"}, "config.yaml is damaged: a mapping"),
        ({"overrides.yaml": "[]", "config.yaml": "a: ["}, "config.yaml is damaged"),
        ({"overrides.yaml": "[seed=x]", "config.yaml": "{}"}, "seed=x: a whole number is needed"),
        (
            {
                "overrides.yaml": "['plugins=[os]', '+callbacks.x._target_=os.system', '--config-dir=/']",
                "config.yaml": "{}",
            },
            "callbacks.x._target_=os.system: package 'os' is not allowed here",
        ),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(train_py, tmp_path, files, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    run = train_py(f"rerun={folder}", ok=False)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.output_root.exists()


def test_a_rerun_is_of_one_run(train_py, tmp_path):
    run = train_py(f"rerun={tmp_path}", "-m", "seed=1,2", ok=False)
    assert run.returncode == 2
    assert "repeats one run: leave -m out" in run.stderr


def test_two_runs_of_one_name_get_two_folders(tmp_path):
    world = World(num_nodes=1, devices=1, accelerator="cpu", launch="in-process", reason="")
    config = from_plain({"output_root": str(tmp_path)})
    job = make_job(config, world, experiment="x", overrides=[], command=[], run_id="same")
    first, second = with_folder(job), with_folder(job)
    assert first.run_id == "same"
    assert second.run_id.startswith("same-")
    for one in (first, second):
        assert (Path(one.run_folder) / "ranks").is_dir()
        assert Path(one.run_folder).name == one.run_id


def test_a_disk_that_is_full_is_one_line(tmp_path):
    """The file-size limit stands in for the disk: no file may grow beyond 3 kB, which the metrics reach."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    command = [sys.executable, "-B", ROOT / "train.py", *SMALL, "trainer.max_steps=200", "logger=none"]
    run = subprocess.run(
        [str(part) for part in command], cwd=tmp_path, capture_output=True, text=True, preexec_fn=limited, timeout=90
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: cannot write metrics to ")
    assert "output_root=" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    (metrics,) = (tmp_path / "outputs").rglob("metrics.jsonl")
    assert all(json.loads(line)["step"] for line in metrics.read_text().splitlines())
    assert read(metrics.parent, "result.json")["status"] == "failed"


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_an_output_folder_that_is_none_is_one_line(train_py, tmp_path, root):
    (tmp_path / "file").write_text("")
    run = train_py(*SMALL, f"output_root={tmp_path / root}", ok=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: output_root={tmp_path / root}: ")
    assert len(run.stderr.splitlines()) == 1


def test_a_bar_on_a_terminal_and_plain_lines_in_the_log(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, ROOT / "train.py", *SMALL, "trainer.max_steps=60", "logger=none"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        [str(part) for part in command], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen, end = b"", time.monotonic() + 90
    while time.monotonic() < end:
        if select.select([ours], [], [], 1)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    assert process.wait(10) == 0, seen.decode()
    os.close(ours)
    assert b"\x1b[" in seen
    assert "━".encode() in seen
    assert b"/60" in seen
    (log,) = tmp_path.rglob("rank_0.log")
    text = log.read_text()
    assert "\x1b" not in text
    assert "━" not in text
    assert "completed after 60 steps" in text


def test_the_time_left_is_told_from_the_steps_of_this_process(monkeypatch, capsys):
    """100 steps were done before; 10 in 20 s leave 90 of them, for 3 minutes."""
    from types import SimpleNamespace

    from shardwise.progress import ShowProgress
    from shardwise.telemetry.step_metrics import StepMetrics

    now = 1000.0
    monkeypatch.setattr("shardwise.progress.time.monotonic", lambda: now)
    metrics = StepMetrics(total_steps=200, global_size=8)
    progress = ShowProgress(metrics, total_steps=200, stream=io.StringIO())
    trainer = SimpleNamespace(global_step=100, is_global_zero=True)
    progress.on_train_start(trainer, None)
    now, trainer.global_step = 1020.0, 110
    progress.on_train_batch_end(trainer, None, None, None, 0)
    assert "step 110/200" in (out := capsys.readouterr().out)
    assert "ETA 3:00" in out


def test_without_a_terminal_there_are_plain_lines_only(train_py):
    run = train_py(*SMALL, "logger=none")
    assert "\x1b" not in run.stdout + run.stderr
    line = re.search(r"^step 4/4  loss 2\.\d+  lr \S+  [\d,]+ samples/s$", run.stdout, flags=re.MULTILINE)
    assert line is not None, run
    assert line[0] in (run.run_folder / "ranks" / "rank_0.log").read_text()
    assert run.stderr == ""


def test_other_loggers_get_the_same_metrics_in_the_run_folder(train_py, tmp_path, monkeypatch):
    """And what a module logs itself counts in optimizer steps done, as everything else does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "talking.py").write_text(TALKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = ["plugins=[talking]", "task._target_=talking.Talking"]
    run = train_py("-m", "logger=csv,tensorboard", *SMALL, *own)
    by_csv, by_board = run.run_folders
    lines = [json.loads(line) for line in (by_csv / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "time"}
    mine = [(line["step"], line["mine"]) for line in lines if "mine" in line]
    assert mine == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]

    (file,) = by_csv.rglob("metrics.csv")
    with file.open() as table:
        rows = list(csv.DictReader(table))
    assert names <= set(rows[0])
    assert sorted((int(row["step"]), float(row["mine"])) for row in rows if row["mine"]) == mine
    assert {row["step"] for row in rows if row["train/loss"]} == {"1", "2", "3", "4"}

    events = EventAccumulator(str(next(by_board.rglob("events.*")).parent)).Reload()
    assert names <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("mine")] == mine
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert {path.name for path in tmp_path.iterdir()} <= {
        *("outputs", "talking.py", "__pycache__"),
        "train.out",
        "train.err",
    }


def test_all_ranks_stop_at_the_same_step(train_py, tmp_path, monkeypatch):
    """Whether a callback of Lightning's says so, or one rank alone."""
    (tmp_path / "talking.py").write_text(TALKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    early = ["+callbacks.early._target_=pytorch_lightning.callbacks.EarlyStopping", "callbacks.early.monitor=val/loss"]
    early += ["callbacks.early.patience=1", "callbacks.early.min_delta=100"]
    run = train_py(
        *("-m", "+callbacks.stop._target_=talking.StopOnOne,pytorch_lightning.callbacks.Timer", *SMALL, *early),
        *("plugins=[talking]", "+callbacks.last._target_=talking.Last", "logger=none", "trainer.devices=2"),
        *("trainer.max_steps=40", "trainer.val_check_interval=4", "trainer.check_val_every_n_epoch=null"),
    )
    for folder, step in zip(run.run_folders, (3, 8), strict=True):
        for rank in range(2):
            assert f"rank {rank} ended at step {step}" in (folder / "ranks" / f"rank_{rank}.log").read_text()
        assert read(folder, "result.json")["steps"] == step


def test_what_a_job_of_a_sweep_proposes_is_no_sweep_of_that_name(tmp_path):
    """A repeated job keeps what was typed, the sweep's own keys too, which would meet the finished sweep again."""
    typed = next_commands(made_job(tmp_path, "model=mlp", "sweep.name=mine", "sweep.slots=2"))
    assert len(typed) > 1
    assert not any("sweep." in line for line in typed)
    filed = next_commands(made_job(tmp_path, "sweep=batch_size_digits", "batch.global_size=64"))
    assert [line.split("=")[0].split()[-1] for line in filed] == ["rerun"]
