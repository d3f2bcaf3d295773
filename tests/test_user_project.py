"""A project of a user's own: module, data, configuration. Nothing in it knows of ranks, and its numbers hold."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from shardwise import cli
from warm import Warm

PACKAGE = '''
"""What a user brings: a LightningModule, a data module, and nothing about ranks."""

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def sentences(number, seed, features):
    """Inputs (N, 4, F), and targets (N, 4) of which each sample leaves out some (-100)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 4, features, generator=generator, dtype=torch.float64)
    targets = (inputs.sum(-1) > 0).long()
    lengths = torch.arange(number) % 4 + 1
    return TensorDataset(inputs, targets.masked_fill(torch.arange(4) >= lengths[:, None], -100))


class Sentences(LightningDataModule):
    def __init__(self, features=6, number=64):
        super().__init__()
        self.features, self.number = features, number

    def setup(self, stage):
        self.train, self.val = sentences(self.number, 0, self.features), sentences(16, 1, self.features)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=1, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=1)


class Words(LightningModule):
    """Returns the mean loss over its samples."""

    def __init__(self, features, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))

    def losses(self, batch):
        inputs, targets = batch
        logits = self.net(inputs.to(self.net[0].weight.dtype))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def training_step(self, batch, batch_idx):
        return self.losses(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/mine", self.losses(batch).mean(), sync_dist=True, batch_size=len(batch[0]))


class CountedWords(Words):
    """Returns the sum and what it is a sum over, which differs from sample to sample."""

    def training_step(self, batch, batch_idx):
        return self.losses(batch).sum(), (batch[1] != -100).sum()


class AnnouncedWords(CountedWords):
    def count_targets(self, batch):
        return (batch[1] != -100).sum()


class OwnOptimizer(Words):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Manual(Words):
    def __init__(self, features):
        super().__init__(features)
        self.automatic_optimization = False


class Normed(Words):
    def __init__(self, features):
        super().__init__(features)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4 * features, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def losses(self, batch):
        inputs, targets = batch
        logits = self.net(inputs.to(self.net[1].weight.dtype)).view(-1, 2)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


class Around(Words):
    """Takes the model that `model=` chooses."""

    def __init__(self, model):
        super().__init__(1)
        self.net = model


class Net(nn.Sequential):
    def __init__(self, features, width=8):
        super().__init__(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))
'''

EXPERIMENT = """
# @package _global_
defaults:
  - override /data: sentences
  - override /task: words
  - override /model: none
batch:
  global_size: 16
trainer:
  max_epochs: null
  max_steps: 6
  log_every_n_steps: 1
schedule:
  warmup_steps: 0
plugins: [mypkg]
"""

CONFIGURATION = {
    "experiment/words.yaml": EXPERIMENT,
    "data/sentences.yaml": "_target_: mypkg.Sentences\nfeatures: 6\n",
    "task/words.yaml": "_target_: mypkg.Words\nfeatures: auto\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "mypkg.py").write_text(PACKAGE)
    for name, text in CONFIGURATION.items():
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / name).write_text(text)
    return folder


@pytest.fixture
def train(warm: Warm) -> Callable[..., subprocess.CompletedProcess]:
    """`python -m shardwise train ...` from the user's project."""

    def run(project: Path, root: Path, *argv: str, status: int = 0) -> subprocess.CompletedProcess:
        command = ["-m", "shardwise", "train", *argv, "logger=none", f"output_root={root}"]
        done = warm.run(*command, cwd=project, env={**os.environ, "PYTHONPATH": str(project)}, timeout=100)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def last(folder: Path, name: str) -> float:
    return json.loads((folder / "result.json").read_text())["metrics"][name]


def jobs(root: Path) -> list[Path]:
    (ledger,) = root.rglob("jobs.json")
    return [Path(row["run_folder"]) for row in json.loads(ledger.read_text())]


def test_an_experiment_of_their_own_trains_alike_everywhere(train, project, tmp_path):
    """By names from the project's configuration folder; everything in a sweep, so that one command shows it."""
    own = ["--config-dir=conf", "experiment=words", "precision=64-true"]
    train(project, tmp_path / "a", "-m", *own, "strategy=ddp,fsdp", "trainer.devices=1,2")
    one, ddp, alone, fsdp = jobs(tmp_path / "a")
    assert one.parent.name == "words"
    assert len(losses(one)) == 6
    for other in (ddp, alone, fsdp):
        assert losses(other) == pytest.approx(losses(one), abs=1e-10)
        assert last(other, "val/mine") == pytest.approx(last(one, "val/mine"), abs=1e-10)
    assert len(set(losses(one))) == 6

    # The folder repeats its run, given again where to look and what may be named.
    refused = train(project, tmp_path / "a", f"rerun={fsdp}", status=2)
    assert refused.stderr.startswith("error: rerun=")
    assert "was typed with --config-dir conf, which is never taken from a folder" in refused.stderr
    train(project, tmp_path / "b", f"rerun={fsdp}", "--config-dir=conf")
    (again,) = [path.parent for path in (tmp_path / "b").rglob("result.json")]
    assert losses(again) == losses(fsdp)


def test_counts_that_differ_are_weighted_exactly(train, project, tmp_path):
    """(sum, count) over micro-batches and ranks that hold unequal counts is the mean over all targets."""
    typed = ["plugins=[mypkg]", "data=custom", "data._target_=mypkg.Sentences", "model=none", "precision=64-true"]
    typed += ["batch.global_size=16", "trainer.max_epochs=null", "trainer.max_steps=4", "schedule.warmup_steps=0"]
    typed += ["trainer.log_every_n_steps=1", "task=custom", "+task.features=6"]
    typed += ["task._target_=mypkg.CountedWords,mypkg.AnnouncedWords"]
    train(project, tmp_path / "one", "-m", *typed)
    train(project, tmp_path / "two", "-m", *typed, "strategy=ddp,fsdp", "trainer.devices=2", "batch.accumulate=2")
    one, announced = jobs(tmp_path / "one")
    assert len(losses(one)) == 4
    assert losses(announced) == pytest.approx(losses(one), abs=1e-12)
    for folder in jobs(tmp_path / "two"):
        assert losses(folder) == pytest.approx(losses(one), abs=1e-10)


def test_a_network_of_their_own_in_a_task_of_their_own(train, project, tmp_path):
    """By `model=custom`, its arguments filled in from the data."""
    typed = ["plugins=[mypkg]", "data=custom", "data._target_=mypkg.Sentences", "task=custom"]
    typed += ["task._target_=mypkg.Around", "model=custom", "model._target_=mypkg.Net", "+model.features=auto"]
    train(project, tmp_path, *typed, "+model.width=4", "trainer.fast_dev_run=true", "schedule.warmup_steps=0")
    (config,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["model"] == {"_target_": "mypkg.Net", "features": "auto", "width": 4}


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("Words", [], "task Words takes no model, so shardwise.models.convnet.ConvNet would do nothing: model=none"),
        ("Around", ["~task.features", "model=none"], "task Around needs a model: type model=<choice>, or model=custom"),
        ("Wrods", ["model=none"], "task._target_=mypkg.Wrods: mypkg has no 'Wrods'; did you mean 'Words'?"),
        ("Words", ["model=none", "task=classification"], "task.num_classes: Words has no such argument"),
        (
            "OwnOptimizer",
            ["model=none", "lr_scaling=linear", "lr_scaling.base_batch_size=8"],
            "lr_scaling=linear, but OwnOptimizer has a configure_optimizers of its own: remove that, or type",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(project, tmp_path, monkeypatch, capsys, task, more, message):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    typed = ["--config-dir=conf", "experiment=words", "task=words", f"task._target_=mypkg.{task}", "model=convnet"]
    assert cli.train([*typed, *more, f"output_root={tmp_path / 'outputs'}"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {message}")
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_manual_optimization_is_refused(train, project, tmp_path):
    """Seen once the module exists."""
    run = train(project, tmp_path, "--config-dir=conf", "experiment=words", "task._target_=mypkg.Manual", status=2)
    message = "error: Manual uses manual optimization, but backward, accumulation and clipping are the strategy's"
    assert run.stderr.startswith(message)
    assert len(run.stderr.splitlines()) == 1


def test_their_own_optimizer_and_batch_statistics(train, project, tmp_path):
    typed = ["--config-dir=conf", "experiment=words", "task._target_=mypkg.OwnOptimizer,mypkg.Normed"]
    run = train(project, tmp_path, "-m", *typed)
    own, normed = jobs(tmp_path)
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    assert {line["lr"] for line in lines if "lr" in line} == {0.5}
    note = "net.2: statistics over a micro-batch, so the curve depends on batch.micro_size and the number of ranks"
    assert note not in (own / "ranks" / "rank_0.log").read_text()
    assert note in (normed / "ranks" / "rank_0.log").read_text()
    assert run.stderr == ""
