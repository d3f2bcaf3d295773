"""What a configuration may name as code: an allow-list, one kind a slot, listed factories, arguments that fit."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.build import check_slots
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.rerun import Repeated
from shardwise.slots import KINDS, arguments, build, check_arguments, check_names, find_target

RIGHT = {
    "model": "shardwise.models.mlp.MLP",
    "data": "shardwise.data.digits.Digits",
    "task": "shardwise.module.Classification",
    "optimizer": "torch.optim.AdamW",
    "callbacks": "pytorch_lightning.callbacks.EarlyStopping",
    "logger": "pytorch_lightning.loggers.CSVLogger",
}


def refusal(slot: str, target: object, *, plugins: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        find_target(slot, {"_target_": target}, plugins=plugins)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the user's on the path, which is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from torch import nn
        imported = True
        class Net(nn.Linear):
            def __init__(self, *, width: int, steepness: float = 1.0):
                super().__init__(width, width)
            @classmethod
            def check_arguments(cls, *, width, steepness=1.0):
                from shardwise.errors import ConfigError
                if steepness < 0:
                    raise ConfigError(f"model.steepness={steepness}: at least 0 is needed")
        def make_net():
            return Net(width=1)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine"
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("slot", KINDS)
def test_each_slot_takes_its_own_kind_and_no_other(slot: str) -> None:
    assert isinstance(find_target(slot, {"_target_": RIGHT[slot]}), type)
    module, name = KINDS[slot]
    for other, target in RIGHT.items():
        if other != slot and not (slot == "model" and other == "task"):  # a LightningModule is a Module
            assert refusal(slot, target) == (
                f"{slot}._target_={target} is no {module}.{name}: {slot} takes subclasses of it"
            )


@pytest.mark.parametrize("slot", KINDS)
def test_code_that_is_no_class_of_the_kind_is_not_called(slot: str, tmp_path: Path) -> None:
    for target in ("torch.utils.collect_env.run", "torch.load", "torch.hub.load", "torch.os.system", "torch.nn"):
        assert refusal(slot, target).endswith(f"{slot} takes subclasses of it")
    for target in ("os.system", "subprocess.run", "builtins.eval", "mine.Net"):
        said = refusal(slot, target)
        assert f"package {target.partition('.')[0]!r} is not allowed here" in said
        assert f"plugins=[{target.partition('.')[0]}]" in said


@pytest.mark.parametrize("target", [None, "", "noname", 3, "torch..nn", "torch.nn.Linear()", ".torch"])
def test_what_is_no_dotted_name_is_refused(target: object) -> None:
    assert refusal("model", target).startswith(f"model._target_={'null' if target is None else target}: ")


def test_a_misspelt_name_says_what_is_near() -> None:
    assert refusal("model", "shardwise.models.mlp.MPL").endswith(
        "shardwise.models.mlp has no 'MPL'; did you mean 'MLP'?"
    )
    assert refusal("optimizer", "torch.optim.AdamX").endswith("torch.optim has no 'AdamX'; did you mean 'Adam'?")
    assert refusal("model", "shardwize.models.mlp.MLP").endswith(
        "package 'shardwize' is not allowed here; did you mean 'shardwise'?; if it is yours, type plugins=[shardwize]"
    )


def test_listed_factories_build_models_and_others_do_not() -> None:
    for target in ("torchvision.models.vit_b_16", "shardwise.models.resnet.resnet18"):
        assert callable(find_target("model", {"_target_": target}))
    for target in ("torchvision.models.list_models", "torchvision.models.get_model", "torch.nn.init.zeros_"):
        assert refusal("model", target).endswith("model takes subclasses of it")
    assert refusal("task", "shardwise.models.resnet.resnet18").endswith("task takes subclasses of it")


@pytest.mark.parametrize("name", ["GradientAccumulationScheduler", "BatchSizeFinder", "LearningRateFinder"])
def test_callbacks_that_would_change_what_has_an_owner_are_refused(name: str) -> None:
    assert f"pytorch_lightning.callbacks.{name} is not for here: " in refusal(
        "callbacks", f"pytorch_lightning.callbacks.{name}"
    )


def test_a_package_of_the_users_has_to_be_named(package: str) -> None:
    assert "package 'mine' is not allowed here" in refusal("model", f"{package}.Net")
    assert package not in sys.modules, "what is not allowed is not imported either"
    assert issubclass(find_target("model", {"_target_": f"{package}.Net"}, plugins=[package]), nn.Module)  # type: ignore[arg-type]
    assert refusal("model", f"{package}.make_net", plugins=(package,)).endswith("model takes subclasses of it")
    config = compose([f"plugins=[{package}]", f"model._target_={package}.Net"])
    assert config.plugins == [package]


def test_names_are_checked_without_importing_anything(package: str) -> None:
    check_names({"model": {"_target_": f"{package}.Net"}, "logger": {"_target_": None}}, plugins=[package])
    assert package not in sys.modules
    with pytest.raises(ConfigError, match="package 'os' is not allowed here"):
        check_names({"callbacks.mine": {"_target_": "os.system"}})
    with pytest.raises(ConfigError, match=r"data\._target_=null: a dotted name is needed"):
        check_names({"data": {}})
    with pytest.raises(ConfigError, match=r"callbacks\.x=3: a mapping with a _target_ is needed"):
        check_names({"callbacks.x": 3})  # type: ignore[dict-item]


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refusal("model", "broken_package.Net", plugins=("broken_package",))
    assert said.endswith("importing broken_package failed: No module named 'no_such_dependency'")
    assert refusal("model", "absent_package.Net", plugins=("absent_package",)).endswith(
        "there is no module 'absent_package' to import"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"widht": 3}, "model.widht: Net has no such argument; did you mean 'width'? (it has: width, steepness)"),
        ({}, "model.width is missing: Net needs it, such as model.width=..."),
        ({"width": "???"}, "model.width is missing: give it a value, such as model.width=..."),
        ({"width": 3, "steepness": -1}, "model.steepness=-1: at least 0 is needed"),
        ({"width": {"_target_": "os.system"}}, "model.width: a _target_ inside an argument is not built"),
        (
            {"width": [1, {"deep": {"_target_": "os.system"}}]},
            "model.width: a _target_ inside an argument is not built",
        ),
    ],
)
def test_arguments_are_checked_against_the_signature(package: str, given: dict, said: str) -> None:
    target = find_target("model", {"_target_": f"{package}.Net"}, plugins=[package])
    with pytest.raises(ConfigError) as caught:
        check_arguments(target, given, where="model")
    assert str(caught.value).startswith(said)


def test_an_argument_of_the_frameworks_is_not_the_users() -> None:
    target = find_target("optimizer", {"_target_": "torch.optim.SGD"})
    with pytest.raises(ConfigError, match=r"optimizer\.params is given by the framework: leave it out"):
        check_arguments(target, {"params": [1]}, where="optimizer", supplied=("params",))


def test_what_goes_wrong_inside_is_one_line_with_the_values() -> None:
    target = find_target("model", {"_target_": "torch.nn.Linear"})
    with pytest.raises(ConfigError, match=r"^model: Linear\(in_features='x', out_features=1\) failed: "):
        build(target, {"in_features": "x", "out_features": 1}, where="model")
    assert isinstance(build(target, {"in_features": 2, "out_features": 1}, where="model"), torch.nn.Linear)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.widht=3"], "model.widht: ConvNet has no such argument; did you mean 'width'?"),
        (["model=mlp", "model.depth=0"], "model.depth=0"),
        (["data.val_fractoin=0.1"], "data.val_fractoin: Digits has no such argument; did you mean 'val_fraction'?"),
        (["data=imagefolder", "data.path=/no/such/folder"], "data.path=/no/such/folder"),
        (["optimizer.lrr=1"], "optimizer.lrr: AdamW has no such argument; did you mean 'lr'?"),
        (["optimizer.betas=[2,3]"], "optimizer.betas=[2, 3]: each has to be at least 0 and below 1"),
        (["callbacks=early_stopping", "callbacks.early_stopping.patient=3"], "callbacks.early_stopping.patient: "),
        (["logger=csv", "logger.nam=x"], "logger.nam: CSVLogger has no such argument; did you mean 'name'?"),
        (["task.label_smoothin=1"], "task.label_smoothin: Classification has no such argument; did you mean"),
        (["callbacks.x._target_=shardwise.models.mlp.MLP"], "callbacks.x._target_=shardwise.models.mlp.MLP is no "),
        (["model=none"], "task Classification needs a model: type model=<choice>"),
    ],
)
def test_a_whole_configuration_is_checked_before_anything_starts(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_slots(compose(overrides))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_every_choice_of_the_plugged_in_groups_passes_its_own_check() -> None:
    for overrides in (
        ["optimizer=sgd", "logger=tensorboard", "callbacks=early_stopping", "model=mlp"],
        ["optimizer=adam", "logger=csv", "model=vit"],
        ["data=text", "task=language_model", "model=gpt", "logger=none"],
    ):
        check_slots(compose(overrides))


def test_a_run_folder_names_no_package_that_may_be_imported(tmp_path: Path) -> None:
    folder = tmp_path / "from_a_stranger"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\nplugins: [evil]\n")
    lines = ["plugins=[evil]", "+plugins=[evil]", "++plugins=[evil]", " plugins = [evil]", "plugins.0=evil", "seed=1"]
    lines += ["hydra.searchpath=[file:///tmp/evil]", "hydra/launcher=basic", "--config-dir=/tmp/evil"]
    (folder / "overrides.yaml").write_text("".join(f"- '{line}'\n" for line in lines))
    repeated = Repeated.from_argv([f"rerun={folder}", "plugins=[mine]"])
    assert repeated is not None
    assert repeated.argv == ["seed=1", "plugins=[mine]"]
    config = compose(repeated.argv)
    assert repeated.keep(config)[0].plugins == ["mine"], "neither from what was typed then nor from config.yaml"


def test_the_arguments_are_what_is_beside_the_target() -> None:
    assert arguments({"_target_": "a.b", "x": 1}) == {"x": 1}
