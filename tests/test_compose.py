"""Every choice of every group composes and resolves, or is refused for the reason that this table expects."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

import shardwise.cli
from checkout import ROOT
from shardwise.config import Config, PrecisionConfig
from shardwise.errors import ConfigError
from shardwise.groups import GROUPS, group_choices
from shardwise.help import EXAMPLES
from shardwise.hydra_setup import compose
from shardwise.resolve import World, resolve_in
from shardwise.slots import check_names

CHOICES = group_choices()
SIZES = {name: tuple(int(part) for part in name.split("x")) for name in CHOICES["nodes"]}
NEEDED = {"data=imagefolder": ["data.path=photos"], "data=tokens": ["data.path=shards"]}
NEEDED |= {f"lr_scaling={rule}": ["lr_scaling.base_batch_size=64"] for rule in ("linear", "sqrt", "adam_sde")}
NEEDED["lr_scaling=legw"] = ["lr_scaling.base_batch_size=64", "schedule.warmup_epochs=1"]
NEEDED |= {f"{slot}=custom": [f"{slot}._target_=shardwise.Anything"] for slot in ("data", "task")}
"""What a choice cannot do without."""
WITHOUT = {
    "data=imagefolder": "data.path is missing",
    "data=tokens": "data.path is missing",
    "data=custom": "data._target_=null",
    "task=custom": "task._target_=null",
    "lr_scaling=linear": "needs lr_scaling.base_batch_size",
    "lr_scaling=sqrt": "needs lr_scaling.base_batch_size",
    "lr_scaling=adam_sde": "needs lr_scaling.base_batch_size",
    "lr_scaling=legw": "needs lr_scaling.base_batch_size",
}
"""How a choice is refused where that is left out."""


def check(overrides: list[str], *, devices: int = 1) -> Config:
    """Compose and resolve as if `devices` processes were there."""
    config = compose(overrides)
    resolved = resolve_in(config, World(1, devices, "cpu", "local", "told by the test"))
    assert resolved.dims.world_size == devices
    check_names({slot: getattr(config, slot) for slot in ("model", "data", "task", "optimizer")})
    return config


def expected_refusal(strategy: str, precision: str, nodes: int, devices: int, *, accelerator: str) -> str | None:
    """What the message has to say, or None where everything is right; in the order of the rules."""
    if precision == "16-mixed" and accelerator == "cpu":
        return "precision=16-mixed needs a GPU"
    if strategy == "tp" and nodes > 1:
        return "strategy=tp splits layers inside one node"
    tp = {"tp": devices, "ddp+tp": 2, "fsdp+tp": 2, "hybrid": 2}.get(strategy, 1)
    if nodes > 1 and strategy in ("ddp+tp", "fsdp+tp"):
        tp = devices
    dp_size = nodes * devices // tp
    if strategy in ("hsdp", "hybrid") and nodes == 1:
        shown = [f"dp_shard {dp_size}"] * (dp_size > 1) + [f"tp {tp}"] * (tp > 1)
        return f"strategy={strategy} on {devices} ranks comes out as {' x '.join(shown)}: "
    if strategy == "hybrid" and devices == 2:
        return f"strategy=hybrid on {2 * nodes} ranks comes out as dp_replicate {nodes} x tp 2: "
    if "+tp" in strategy and dp_size == 1:
        return f"strategy={strategy} on 2 ranks comes out as tp 2: "
    if tp > 1 and precision == "16-mixed":
        return "precision=16-mixed scales the loss, and the ranks that split a layer would not agree on an overflow"
    if 64 % dp_size:
        return f"batch.global_size=64 does not divide over {dp_size} data-parallel ranks"
    return None


@pytest.mark.parametrize("strategy", CHOICES["strategy"])
def test_every_strategy_with_every_precision_on_every_size(strategy: str) -> None:
    wrong = []
    # Composing is what takes the time, and files of different groups do not meet in it: each precision with one size.
    composed = {
        size: compose([f"strategy={strategy}", f"precision={precision}", f"nodes={size}"])
        for precision, size in zip(itertools.cycle(CHOICES["precision"]), CHOICES["nodes"], strict=False)
    }
    assert {config.precision.kind for config in composed.values()} == set(CHOICES["precision"])
    for precision, size in itertools.product(CHOICES["precision"], CHOICES["nodes"]):
        nodes, devices = SIZES[size]
        overrides = [f"strategy={strategy}", f"precision={precision}", f"nodes={size}"]
        config = replace(composed[size], precision=PrecisionConfig(precision))
        assert config.strategy.name == strategy
        assert (config.trainer.num_nodes, config.trainer.devices) == (nodes, devices)
        for accelerator in ("cpu", "gpu"):
            expected = expected_refusal(strategy, precision, nodes, devices, accelerator=accelerator)
            try:
                resolve_in(config, World(nodes, devices, accelerator, "torchrun", "told by the test"))
                said = None
            except ConfigError as error:
                said = str(error)
            if (said is None) != (expected is None) or (expected and expected not in str(said)):
                wrong.append(f"{' '.join(overrides)} on {accelerator}: expected {expected!r}, got {said!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("strategy", "nodes", "precision")])
def test_every_choice_of_the_other_groups(group: str) -> None:
    for name in CHOICES[group]:
        choice = f"{group}={name}"
        check([choice, *NEEDED.get(choice, [])])
        if choice in WITHOUT:
            with pytest.raises(ConfigError, match=re.escape(WITHOUT[choice])):
                check([choice])


def test_the_tables_name_only_choices_that_exist() -> None:
    assert set(NEEDED) == set(WITHOUT)
    for choice in NEEDED:
        group, _, name = choice.partition("=")
        assert name in CHOICES[group]
    assert not set(GROUPS) - {"sweep"} - {group for group, names in CHOICES.items() if names}


def test_hsdp_works_on_one_node_with_a_typed_degree() -> None:
    check(["strategy=hsdp", "trainer.devices=4", "strategy.dp_replicate=2"], devices=4)


def test_the_values_of_an_experiment_win_over_the_defaults_and_typed_ones_over_both() -> None:
    experiments = {name: compose([f"experiment={name}"]) for name in CHOICES["experiment"]}
    assert experiments["text_gpt"].trainer.max_steps == 600
    order = (ROOT / "conf" / "config.yaml").read_text(encoding="utf-8")
    assert order.index("- _self_") < order.index("- experiment:"), "else what config.yaml sets would win"
    assert experiments["text_gpt"].schedule.warmup_steps == 50
    assert experiments["text_gpt"].optimizer["lr"] == 2e-3
    typed = compose(["experiment=text_gpt", "schedule.warmup_steps=7", "model=gpt_10m"])
    assert (typed.schedule.warmup_steps, typed.model["width"], typed.trainer.max_steps) == (7, 384, 600)
    earlier = compose(["schedule.warmup_steps=7", "experiment=text_gpt"])
    assert earlier.schedule.warmup_steps == 7, "the place on the command line does not matter"


def test_a_glob_over_experiments_makes_a_job_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Config, list[str], dict[str, Any]]] = []

    def record(composed: list[tuple[Config, list[str], dict[str, Any]]], folder: Path) -> list[dict[str, Any]]:
        jobs.extend(composed)
        return []

    monkeypatch.setattr(shardwise.cli, "run_sweep", record)
    assert shardwise.cli.train(["seed=1", "-m", "experiment=glob(*)"]) == 0
    assert [overrides for _, overrides, _ in jobs] == [["seed=1", f"experiment={e}"] for e in CHOICES["experiment"]]
    assert [choices["experiment"] for _, _, choices in jobs] == CHOICES["experiment"]
    assert {config.model["_target_"] for config, _, _ in jobs} >= {"shardwise.models.gpt.GPT"}


def test_a_sweep_without_a_job_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.cli.train(["-m", "experiment=glob(nothing_like_this*)"]) == 2
    assert capsys.readouterr().err.startswith("error: the sweep has no job")
    assert not list(Path.cwd().rglob("*.yaml"))


def test_composing_inside_an_application_of_hydra_leaves_it_as_it_was() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("shardwise.conf", version_base="1.3"):
        assert compose(["seed=3"]).seed == 3
        assert GlobalHydra.instance().is_initialized()
        assert hydra_compose("config", overrides=["seed=4"]).seed == 4
    assert not GlobalHydra.instance().is_initialized()


COMPOSED = [command for command, _ in EXAMPLES if command.startswith("python train.py") and "resume=" not in command]


@pytest.mark.parametrize("command", COMPOSED, ids=lambda command: command[7:60])
def test_the_examples_of_the_help_page_compose(command: str) -> None:
    overrides = command.split()[2:]
    if "rerun=" in command:
        overrides = [override for override in overrides if not override.startswith(("rerun=", "<", "id>"))]
    devices = int(next((o.partition("=")[2] for o in overrides if o.startswith("trainer.devices=")), 1))
    if "-m" not in overrides or overrides[-1].startswith("sweep="):
        check([override for override in overrides if override != "-m"], devices=devices)
        return
    pairs = [override.partition("=") for override in overrides if override != "-m"]
    jobs = list(itertools.product(*[[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]))
    assert len(jobs) == 4, "the page says four runs"
    for job in jobs:
        check(list(job), devices=devices)


FOREIGN = """
import hydra
from omegaconf import OmegaConf

@hydra.main(config_path="settings", config_name="config", version_base="1.3")
def main(config):
    print(OmegaConf.to_yaml(config))

main()
"""


def test_another_project_finds_the_groups_on_its_search_path(tmp_path: Path) -> None:
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text(
        "defaults:\n  - strategy: ddp\n  - optimizer: sgd\n  - _self_\n"
        "mine: 1\n"
        "hydra:\n  searchpath: [pkg://shardwise.conf]\n  run: {dir: .}\n  output_subdir: null\n"
    )
    (tmp_path / "app.py").write_text(FOREIGN)
    run = subprocess.run(
        [sys.executable, "app.py", "strategy=fsdp", "optimizer=adamw"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    for line in ("mine: 1", "name: fsdp", "dp_shard: -1", "_target_: torch.optim.AdamW"):
        assert line in run.stdout
    assert "dp_replicate" not in run.stdout
