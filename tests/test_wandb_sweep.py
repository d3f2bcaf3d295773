"""W&B sweeps: their agent starts train.py, the parameters reach every rank, and the agent's run gets the metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkout import ROOT, TrainRun
from test_tracking import client, service, tracker  # noqa: F401

SWEEP, RUN = "sweep1", "agents1"
EXAMPLE = ROOT / "experiments" / "wandb" / "lr_and_batch.yaml"
LR, BATCH = 0.0123, 32
WATCH = """
import json, os
from pathlib import Path
from pytorch_lightning import Callback

class Watch(Callback):
    def on_train_start(self, trainer, module):
        said = [trainer.global_rank, trainer.world_size, trainer.optimizers[0].param_groups[0]["lr"]]
        with (Path(os.environ["WATCHED"]) / "ranks").open("a") as file:
            file.write(json.dumps(said) + "\\n")
"""
TINY = [
    *("model=mlp", "model.width=8", "trainer.max_steps=3", "trainer.log_every_n_steps=1", "trainer.max_epochs=null"),
    *("schedule=constant", "schedule.warmup_steps=0", "plugins=[watching]", "+callbacks.watch._target_=watching.Watch"),
    *("logger.project=another", "+logger.settings={x_disable_stats: true}"),
]


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Path:
    """A folder in which every rank says its learning rate."""
    (tmp_path / "watching.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WATCHED", str(tmp_path))
    return tmp_path


def said(folder: Path) -> list[list[Any]]:
    return sorted(json.loads(line) for line in (folder / "ranks").read_text().splitlines())


def run_folders(run: TrainRun) -> list[Path]:
    """The client leaves a config.yaml of its own."""
    return [path.parent for path in run.output_root.rglob("result.json")]


def check_run(run: TrainRun, service: Any) -> None:  # noqa: F811
    """One run on the service, which is the agent's; and its points."""
    (folder,) = run_folders(run)
    result = json.loads((folder / "result.json").read_text())
    assert {bucket["name"] for bucket in service.buckets} == {RUN}
    assert {bucket["sweep"] for bucket in service.buckets if bucket["sweep"]} == {SWEEP}
    named = {bucket["displayName"] for bucket in service.buckets if bucket["displayName"]}
    assert named == {folder.name}
    points = [service.history[index] for index in sorted(service.history)]
    assert [point["step"] for point in points if "train/loss" in point] == [1, 2, 3]
    assert points[-1]["test/accuracy"] == result["metrics"]["test/accuracy"]
    assert service.config["optimizer"]["value"]["lr"] == LR
    assert service.exit_code == 0
    assert "Ignoring" not in str(run)
    derived = yaml.safe_load((folder / "config.yaml").read_text())["derived"]
    assert (derived["base_lr"], derived["batch_global_size"]) == (LR, BATCH)


def test_both_ranks_get_the_agents_values_and_one_run_their_metrics(
    watched,
    train_py,
    service,  # noqa: F811
    monkeypatch,
):
    """Started as wandb's agent starts it: its own code makes the arguments, and the variables are its."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    values = {"optimizer.lr": {"value": LR}, "batch.global_size": {"value": BATCH}}
    typed = create_sweep_command_args({"args": values})["args_no_hyphens"]
    params = watched / "params.yaml"
    params.write_text(yaml.safe_dump({"wandb_version": 1, **values}))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    env = {"WANDB_SWEEP_ID": SWEEP, "WANDB_RUN_ID": RUN, "WANDB_SWEEP_PARAM_PATH": str(params)}
    env |= {"WANDB_PROJECT": "shardwise", "WANDB_ENTITY": "someone", "WANDB_DIR": str(watched)}
    run = train_py(*typed, "trainer.devices=2", *TINY, env=env)
    assert said(watched) == [[0, 2, LR], [1, 2, LR]]
    check_run(run, service)
    assert {bucket["project"] for bucket in service.buckets} == {"shardwise"}


def test_what_an_agent_began_goes_on_in_its_run(tmp_path, service, monkeypatch):  # noqa: F811
    """Resumed by hand, where nobody says which run it was."""
    for name, value in {"SWEEP_ID": SWEEP, "RUN_ID": RUN, "PROJECT": "theirs", "ENTITY": "someone"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    first = tracker(tmp_path, run_id="ours", project="mine")
    first.log_metrics({"train/loss": 1.0}, step=1)
    first.finish(75)
    for name in ("SWEEP_ID", "RUN_ID", "PROJECT", "ENTITY"):
        monkeypatch.delenv(f"WANDB_{name}")
    import wandb

    wandb.teardown()
    second = tracker(tmp_path, run_id="ours", project="mine", resume=True)
    second.log_metrics({"train/loss": 0.5}, step=2)
    second.finish(0)
    other = tracker(tmp_path, save_dir=tmp_path / "other", run_id="other", project="mine")
    other.log_metrics({"train/loss": 0.5}, step=2)
    other.finish(0)
    asked = [(bucket["project"], bucket["name"]) for bucket in service.buckets]
    runs = list(dict.fromkeys(one for one in asked if one[0] != "shardwise"))  # which is the service's own word
    assert len({name for _, name in asked}) == 2
    assert runs == [("theirs", RUN), ("mine", "other")]


@pytest.mark.proofs
def test_the_example_under_the_agent_itself(watched, service, monkeypatch):  # noqa: F811
    """`wandb agent` takes the example's command from the service, runs it, and ends."""
    root = watched / "outputs"
    example = yaml.safe_load(EXAMPLE.read_text())
    example["command"] += [*TINY, f"output_root={root}"]
    sweep = {"id": "c3c=", "name": SWEEP, "config": yaml.safe_dump(example), "runs": {"edges": []}}
    beats = []

    def heartbeat(variables: dict[str, Any]) -> dict[str, Any]:
        beats.append(json.loads(variables["runState"]))
        values = {"optimizer.lr": {"value": LR}, "batch.global_size": {"value": BATCH}}
        begin = {"type": "run", "run_id": RUN, "program": example["program"], "args": values}
        commands = [begin] if len(beats) == 1 else [] if RUN in beats[-1] else [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": "YQ=="}, "commands": json.dumps(commands)}}

    viewer = {"id": "dQ==", "entity": "someone", "username": "someone", "flags": "{}", "teams": {"edges": []}}
    service.operations |= {
        "SweepWithRuns": lambda variables: {"project": {"sweep": sweep}},
        "CreateAgent": lambda variables: {"createAgent": {"agent": {"id": "YQ=="}}},
        "Heartbeat": heartbeat,
        "Viewer": lambda variables: {"viewer": viewer},
    }
    monkeypatch.delenv("WANDB_MODE", raising=False)
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_DIR", str(watched))
    monkeypatch.setenv("TMPDIR", str(watched))
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    (watched / "train.py").symlink_to(ROOT / "train.py")
    agent = [str(bin_folder / "wandb"), "agent", f"someone/shardwise/{SWEEP}"]
    done = subprocess.run(agent, cwd=watched, capture_output=True, text=True, timeout=150, check=False)
    run = TrainRun(done.returncode, done.stdout, done.stderr, root)
    assert done.returncode == 0, run
    assert said(watched) == [[0, 2, LR], [1, 2, LR]]
    check_run(run, service)
    (folder,) = run_folders(run)
    assert yaml.safe_load((folder / "overrides.yaml").read_text())[:2] == [
        f"optimizer.lr={LR}",
        "batch.global_size=32",
    ]
