"""A user's own model, split by a plan of theirs: in YAML, as a method, or pasted from the error that asks for one."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise import cli

PACKAGE = '''
"""What a user brings: rows of numbers, and networks that know nothing of ranks."""

import torch
from pytorch_lightning import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rows(number, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


class Rows(LightningDataModule):
    num_classes = 4

    def setup(self, stage):
        self.train, self.val = rows(96, 0), rows(32, 1)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=1, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=1)


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8))
        self.bias = nn.Parameter(torch.zeros(8))
        self.hidden = nn.Linear(8, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.hidden(x + self.bias + self.layers(x)).tanh())


class PlannedNet(Net):
    def tensor_parallel_plan(self):
        return {"layers.0": "colwise", "layers.2": "rowwise", "hidden": "colwise", "head": "rowwise"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.out(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Blocks(nn.Module):
    """Its first two linear layers are no pair."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.squeeze(1))


class Numbered(nn.Sequential):
    """Its layers have no names but numbers."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Filters(nn.Sequential):
    """Nothing in it is a linear layer."""

    def __init__(self):
        super().__init__(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 8), nn.Flatten())
'''

EXPERIMENT = """
# @package _global_
defaults:
  - override /data: rows
  - override /model: net
batch:
  global_size: 16
  accumulate: 2
trainer:
  max_epochs: null
  max_steps: 8
  log_every_n_steps: 1
  gradient_clip_val: 0.5
optimizer:
  lr: 0.01
schedule:
  warmup_steps: 0
plugins: [mynet]
"""

IN_YAML = """
# @package _global_
defaults:
  - rows
strategy:
  plan: {"layers.0": colwise, "layers.2": rowwise, hidden: colwise, head: rowwise}
"""

AS_A_METHOD = """
# @package _global_
defaults:
  - rows
  - override /model: planned
"""

CONFIGURATION = {
    "experiment/rows.yaml": EXPERIMENT,
    "experiment/in_yaml.yaml": IN_YAML,
    "experiment/as_a_method.yaml": AS_A_METHOD,
    "data/rows.yaml": "_target_: mynet.Rows\n",
    "model/net.yaml": "_target_: mynet.Net\n",
    "model/planned.yaml": "_target_: mynet.PlannedNet\n",
}
PRECISIONS = {"32-true": 1e-5, "64-true": 1e-10}
"""Precision -> how far numbers may be from one device's, relative."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "mynet.py").write_text(PACKAGE)
    for name, text in CONFIGURATION.items():
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / name).write_text(text)
    return folder


@pytest.fixture
def train(project: Path, train_py: Any) -> Any:
    """`train.py` as this user types it."""

    def run(*typed: str) -> Any:
        return train_py(
            f"--config-dir={project / 'conf'}", *typed, "logger=none", env={"PYTHONPATH": str(project)}, timeout=150
        )

    return run


@pytest.fixture
def refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """The one line that is said of what cannot be, before anything has started."""
    monkeypatch.syspath_prepend(project)

    def run(*typed: str) -> str:
        root = tmp_path / "refused"
        assert cli.train([f"--config-dir={project / 'conf'}", "experiment=rows", *typed, f"output_root={root}"]) == 2
        said = capsys.readouterr()
        assert not root.exists()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        return said.err

    return run


def columns(folder: Path) -> dict[str, list[float]]:
    """The numbers of a run that have to be equal, by name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in ("train/loss", "grad_norm", "val/loss")}


@pytest.mark.slow
def test_a_plan_in_yaml_or_as_a_method_gives_one_devices_numbers(train: Any) -> None:
    both = f"precision={','.join(PRECISIONS)}"
    train("-m", both, "experiment=in_yaml", "trainer.devices=1", "trainer.accelerator=cpu")
    train("-m", both, "experiment=in_yaml,as_a_method", "strategy=tp", "trainer.devices=2")
    last = train("-m", both, "experiment=in_yaml,as_a_method", "strategy=fsdp+tp", "trainer.devices=4")
    runs = {}
    for folder in last.run_folders:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        way = "method" if config["model"]["_target_"] == "mynet.PlannedNet" else "yaml"
        assert (way == "yaml") == bool(config["strategy"]["plan"])
        runs[config["strategy"]["name"], way, config["precision"]["kind"]] = columns(folder)
    assert len(runs) == 10
    for (_, _, precision), numbers in runs.items():
        expected = runs["ddp", "yaml", precision]
        assert len(expected["train/loss"]) == len(expected["grad_norm"]) == 8
        assert expected["val/loss"]
        assert {type(norm) for norm in numbers["grad_norm"]} == {float}
        for name, values in expected.items():
            assert numbers[name] == pytest.approx(values, rel=PRECISIONS[precision], abs=0.0)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("Net", "layers.*, hidden, head"),
        ("Blocks", "blocks.*.attn.q, blocks.*.attn.k, blocks.*.attn.v, blocks.*.attn.out, blocks.*.mlp.*, head"),
        ("Numbered", "0, 2"),
    ],
)
@pytest.mark.slow
def test_without_a_plan_the_error_shows_one_that_works(train: Any, refused: Any, model: str, layers: str) -> None:
    typed = [f"model._target_=mynet.{model}", "strategy=tp", "trainer.devices=2"]
    line = refused(*typed)
    assert line.startswith(f"error: {model} has no tensor-parallel plan; its linear layers are {layers}: start from ")
    assert "or give it a method tensor_parallel_plan()" in line
    # Quoted for a shell, as it is to be pasted into one.
    (pasted,) = (word for word in shlex.split(line) if word.startswith("strategy.plan="))
    assert "colwise" in pasted
    assert "rowwise" in pasted
    run = train("experiment=rows", *typed, pasted, "trainer.max_steps=2")
    assert run.result["status"] == "completed"
    config = yaml.safe_load((run.run_folder / "config.yaml").read_text())
    assert set(config["strategy"]["plan"].values()) == {"colwise", "rowwise"}


def test_a_model_without_linear_layers_is_told_what_splits_it(refused: Any) -> None:
    line = refused("model._target_=mynet.Filters", "strategy=tp", "trainer.devices=2")
    assert line.startswith("error: Filters has no tensor-parallel plan, and no linear layers that one could split: ")
    assert "strategy=ddp or fsdp" in line
