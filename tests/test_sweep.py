"""Sweeps: the parent composes and never trains, each job has fresh processes, and what fails is told."""

import json
from pathlib import Path

import pytest
import yaml

TINY = ["model=mlp", "model.width=8", "trainer.max_steps=3", "schedule.warmup_steps=0"]
EVERY_STEP = "trainer.log_every_n_steps=1"
WATCH = """
import json, os
from pathlib import Path
from pytorch_lightning import Callback

class Watch(Callback):
    def on_fit_start(self, trainer, module):
        with (Path(os.environ["WATCHED"]) / "processes").open("a") as file:
            file.write(json.dumps([trainer.global_rank, trainer.world_size, os.getpid(), os.getppid()]) + "\\n")
"""


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def ledger(root: Path) -> list[dict]:
    (path,) = root.rglob("jobs.json")
    return json.loads(path.read_text())


def test_four_right_runs(train_py, tmp_path, monkeypatch):
    """The sweep of the promise: two strategies, two batches, two processes each."""
    (tmp_path / "watching.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WATCHED", str(tmp_path))
    run = train_py(
        *("-m", "strategy=ddp,fsdp", "batch.global_size=32,64", "trainer.devices=2", "precision=64-true"),
        *(*TINY, EVERY_STEP, "plugins=[watching]", "+callbacks.watch._target_=watching.Watch"),
    )
    folders = run.run_folders
    assert len(folders) == 4
    assert len({folder.parent for folder in folders}) == 1
    assert {path.name for path in run.output_root.iterdir()} == {"digits", "sweeps"}

    # Two fresh processes a job, every one a rank of a world of two; none is anybody else's.
    processes = [json.loads(line) for line in (tmp_path / "processes").read_text().splitlines()]
    assert sorted(rank for rank, _, _, _ in processes) == [0] * 4 + [1] * 4
    assert {size for _, size, _, _ in processes} == {2}
    pids = [pid for _, _, pid, _ in processes]
    assert len(set(pids)) == 8
    assert not set(pids) & {parent for _, _, _, parent in processes}

    # Each job is what its name says, and the strategies agree.
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [(c["strategy"]["name"], c["batch"]["global_size"]) for c in configs] == [
        *(("ddp", 32), ("ddp", 64)),
        *(("fsdp", 32), ("fsdp", 64)),
    ]
    assert [c["derived"]["dp_size"] for c in configs] == [2] * 4
    curves = [losses(folder) for folder in folders]
    assert [len(curve) for curve in curves] == [3] * 4
    assert curves[0] == pytest.approx(curves[2], abs=1e-10)
    assert curves[1] == pytest.approx(curves[3], abs=1e-10)
    assert curves[0] != pytest.approx(curves[1], abs=1e-5)

    # One W&B run a job, all of them closed as successes.
    from test_failures import exit_codes

    ids = {path.name.rpartition("-run-")[2].partition("-")[2] for path in run.output_root.rglob("offline-run-*")}
    assert len(ids) == 4
    assert [code for folder in folders for code in exit_codes(folder)] == [0] * 4

    rows = ledger(run.output_root)
    assert [row["run_folder"] for row in rows] == [str(folder) for folder in folders]
    assert {row["status"] for row in rows} == {"completed"}
    assert "job 3/4 started: strategy=fsdp batch.global_size=32" in run.stdout
    assert "next:" not in run.stdout
    table = run.stdout[run.stdout.index("4 jobs, ") :].splitlines()
    assert table[6:] == ["sweep.metric=test/accuracy names the best job"]
    assert [line.split()[1] for line in table[2:6]] == ["strategy=ddp"] * 2 + ["strategy=fsdp"] * 2


def test_another_number_of_processes_in_the_same_sweep(train_py, tmp_path, monkeypatch):
    """Row 2: the second job of a process would have reported two ranks and trained on one."""
    (tmp_path / "watching.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WATCHED", str(tmp_path))
    watch = ["plugins=[watching]", "+callbacks.watch._target_=watching.Watch"]
    run = train_py("-m", "trainer.devices=2,1", *TINY, EVERY_STEP, *watch, "logger=none", "precision=64-true")
    processes = [json.loads(line) for line in (tmp_path / "processes").read_text().splitlines()]
    assert sorted(processes[:2])[0][:2] == [0, 2]
    assert [p[:2] for p in processes[2:]] == [[0, 1]]
    assert len({pid for _, _, pid, _ in processes}) == 3
    two, one = run.run_folders
    assert losses(two) == pytest.approx(losses(one), abs=1e-10)


def test_after_a_failure_the_rest_is_left_out(train_py):
    """Nobody logs what the callback monitors, which only training shows."""
    stop = "+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping"
    run = train_py(
        *(
            "-m",
            "seed=1,2,3",
            *TINY,
            "logger=csv",
            stop,
        ),
        *("callbacks.stop.monitor=no/such", "callbacks.stop.check_on_train_epoch_end=true"),
        ok=False,
    )
    assert run.returncode == 1
    rows = ledger(run.output_root)
    assert [row["status"] for row in rows] == ["failed", "skipped", "skipped"]
    assert len(run.run_folders) == 1
    assert not Path(rows[1]["run_folder"]).exists()
    assert "no/such" in run.stderr
    assert f"{rows[0]['run_folder']}/ranks/rank_0.log" in run.stdout
    assert "3 of 3 jobs did not complete (1 failed, 2 not started); see" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.global_size=32,64,63"], "batch.global_size=63 does not divide over 2 data-parallel ranks"),
        (["strategy=ddp,fsdp,fsdq"], "strategy=fsdq: no such choice; did you mean 'fsdp'?"),
        (["optimizer.lr=0.1,fast"], "optimizer.lr='fast': a number of at least 0 is needed"),
        (["trainer.max_epoch=1,2"], "trainer.max_epoch: no such key; did you mean 'max_epochs'?"),
        (["model.width=8,16", "+model.wide=1"], "model.wide: MLP has no such argument; did you mean 'width'?"),
    ],
)
def test_a_mistake_in_the_last_job_is_told_before_the_first(train_py, overrides, message):
    run = train_py("-m", *TINY, "trainer.devices=2", *overrides, ok=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {message}")
    assert len(run.stderr.splitlines()) == 1
    assert "job 1/" not in run.stdout
    assert not run.output_root.exists()


def test_a_sweep_from_its_file(train_py):
    """`sweep=<file>` is a sweep by itself, and one of its jobs can be repeated alone."""
    short = ["trainer.max_epochs=null", *TINY, "logger=none", EVERY_STEP]
    run = train_py("sweep=batch_size_digits", *short)
    rows = ledger(run.output_root)
    assert len(rows) == 6
    rates = [yaml.safe_load((folder / "config.yaml").read_text())["derived"] for folder in run.run_folders]
    assert [rate["batch_global_size"] for rate in rates] == [32, 32, 64, 64, 256, 256]
    assert [rate["effective_lr"] / rate["base_lr"] for rate in rates] == [1, 0.5, 1, 1, 1, 4]
    again = train_py(f"rerun={rows[5]['run_folder']}")
    assert len(again.run_folders) == 7
    assert losses(again.run_folder) == losses(Path(rows[5]["run_folder"]))
    last = train_py("resume=last", "sweep=batch_size_digits", *short)
    assert f"{again.run_folder} is completed after 3 steps" in last.stdout
    assert len(last.run_folders) == 7, "to look for the newest run is to run none"
