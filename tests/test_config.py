"""The schema: a wrong key, value, type or choice is told at composition, in one line, with what to type instead."""

import dataclasses
import inspect
import typing

import pytest

from shardwise.config import OWNED_ELSEWHERE, Config, TrainerConfig, from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose

GROUPS_OF_THE_SCHEMA = [name for name, kind in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(kind)]


def refusal(*overrides: str) -> str:
    """What the composition of these overrides is refused with."""
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def misspelt(name: str) -> str:
    """`name` without its last letter but one: `num_nodes` becomes `num_nods`."""
    return name[:-2] + name[-1]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_misspelt_key_of_any_group_names_the_nearest(sign: str) -> None:
    for group in GROUPS_OF_THE_SCHEMA:
        kind = typing.get_type_hints(Config)[group]
        name = max((field.name for field in dataclasses.fields(kind)), key=len)
        key = f"{group}.{misspelt(name)}"
        assert refusal(f"{sign}{key}=1") == f"{key}: no such key; did you mean {name!r}?"
    assert refusal(f"{sign}sed=1") == "sed: no such key; did you mean 'seed'?"
    assert refusal(f"{sign}trainr.devices=2") == "trainr: no such key; did you mean 'trainer'?"
    assert refusal(f"{sign}trainer.devices.count=2").startswith("trainer.devices")


@pytest.mark.parametrize("group", ["strategy", "model", "data", "optimizer", "experiment", "logger"])
def test_a_misspelt_group_or_choice_names_the_nearest(group: str) -> None:
    assert refusal(f"{misspelt(group)}=x") == f"{misspelt(group)}: no such key; did you mean {group!r}?"
    assert refusal(f"{group}=none_such").startswith(f"{group}=none_such: no such choice")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "strategy=fsdpp",
            "strategy=fsdpp: no such choice; did you mean 'fsdp'? (strategy=ddp|ddp+tp|fsdp|fsdp+tp|hsdp|hybrid|tp)",
        ),
        (
            "strategy.plan=[fc1]",
            "strategy.plan: a mapping of module-name pattern -> style is needed, such as strategy.",
        ),
        ("trainer.devices=two", "trainer.devices=two: a whole number or auto is needed"),
        ("trainer.devices=1.5", "trainer.devices=1.5: a whole number or auto is needed"),
        ("trainer.devices=[0,1]", "trainer.devices=[0, 1]: a whole number or auto is needed"),
        ("trainer.devices=true", "trainer.devices=True: a whole number or auto is needed"),
        ("trainer.devices=0", "trainer.devices=0: at least 1 is needed, or auto"),
        ("trainer.deterministic=loudly", "trainer.deterministic=loudly: true, false or warn is needed"),
        ("trainer.limit_val_batches=few", "trainer.limit_val_batches=few: a number is needed"),
        ("trainer.accelerator=tpu", "trainer.accelerator=tpu: no such choice; did you mean 'gpu'?"),
        ("strategy.dp_replicate=x", "strategy.dp_replicate=x: a whole number or nodes is needed"),
        ("strategy.find_unused_parameters=perhaps", "strategy.find_unused_parameters=perhaps: true or false is needed"),
        ("batch.global_size=0", "batch.global_size=0: at least 1 is needed"),
        ("batch.global_size=null", "batch.global_size: "),
        ("batch.micro_size=-2", "batch.micro_size=-2: at least 1 is needed, or auto"),
        ("batch.micro_size=big", "batch.micro_size=big: a whole number or auto is needed"),
        ("schedule.min_ratio=1.5", "schedule.min_ratio=1.5: a number from 0 to 1 is needed"),
        ("seed=abc", "seed=abc: a whole number is needed"),
        ("seed=1.5", "seed=1.5: a whole number is needed"),
        ("seed=", "seed=: a whole number is needed"),
        ("plugins=torch", "plugins: a list, such as plugins=[mypackage], is needed"),
        ("precision.kind=bf16-mixt", "precision.kind=bf16-mixt: no such choice; did you mean 'bf16-mixed'?"),
        ("batch=64", "batch=64: batch takes the name of one of its files (batch=default)"),
        ("precision=16", "precision=16: precision takes the name of one of its files"),
        ("model=null", "model=null: model takes the name of one of its files; did you mean 'none'?"),
        ("model=[mlp,1]", "model=[mlp,1]: model takes the name of one of its files"),
        ("model=", "model=: no such choice (model=convnet|"),
        ("nodes.count=2", "nodes is a group without keys of its own: type nodes=16x8|1x2|"),
        ("+trainer.max_steps=5", "+trainer.max_steps: the key exists already: leave the + out"),
        ("~trainer.max_steps", "~trainer.max_steps: "),
        ("hydra.verbos=true", "hydra.verbos: Hydra has no such setting"),
        ("seed=${nowhere}", "seed: it refers to nowhere, and there is no such key"),
        ("seed=${oc.env:NO_SUCH_VARIABLE}", "seed: \"Environment variable 'NO_SUCH_VARIABLE' not found\""),
        ("data=text,digits", "data=text,digits: several values are a sweep (-m data=text,digits), and data takes one"),
        ("fsdp", "fsdp: not of the form key=value; did you mean strategy=fsdp?"),
        ("=", "=: not of the form key=value"),
        ("a b", "a b: not of the form key=value"),
        ("data.path=a=b", "data.path=a=b: the value has characters that need quotation marks, two kinds of them: "),
        ("experiment_name=ünï", "experiment_name=ünï: the value has characters that need quotation marks"),
        ("größe.x=1", "größe.x=1: 'größe.x' is no key"),
        ('experiment_name="a', 'experiment_name="a: a quotation mark is open'),
    ],
)
def test_a_wrong_value_says_what_is_needed(override: str, said: str) -> None:
    assert refusal(override).startswith(said)


def test_the_quoting_that_an_error_suggests_works() -> None:
    for override in ("experiment_name=a=b", "experiment_name=ünï", "experiment_name=(x"):
        suggestion = refusal(override).rpartition(": ")[2]
        assert suggestion[0] == suggestion[-1] == "'", suggestion
        assert compose([suggestion[1:-1]]).experiment_name == override.partition("=")[2]


def test_a_group_can_be_overridden_with_a_mapping_and_is_checked_then() -> None:
    assert compose(["batch={global_size: 32, accumulate: 2}"]).batch.accumulate == 2
    assert refusal("batch={globalsize: 32}") == "batch.globalsize: no such key; did you mean 'global_size'?"


def test_a_missing_value_behind_an_interpolation_is_told_at_composition() -> None:
    said = refusal("+extra.folder=???", "data=tokens", "data.path=${extra.folder}")
    assert said == "extra.folder is missing, and data.path refers to it: give it a value, such as extra.folder=..."
    assert refusal("data=tokens") == "data.path is missing: give it a value, such as data.path=..."
    assert refusal("model.width=[1, ???]").startswith("model.width[1] is missing")
    assert compose(["+extra.folder=x", "data=tokens", "data.path=${extra.folder}"]).data["path"] == "x"


def test_free_keys_stand_under_extra_and_nowhere_else() -> None:
    assert compose(["extra.mine=1", "+extra.deep.er=[2]"]).extra == {"mine": 1, "deep": {"er": [2]}}
    assert "any key fits under extra" in refusal("+zzz.mine=1")
    for group in GROUPS_OF_THE_SCHEMA:
        assert refusal(f"+{group}.zzz=1").startswith(f"{group}.zzz: no such key ({group} has ")


@pytest.mark.parametrize("name", OWNED_ELSEWHERE)
def test_what_has_an_owner_elsewhere_says_so(name: str) -> None:
    for sign in ("", "+", "++"):
        assert refusal(f"{sign}trainer.{name}=1") == f"trainer.{name} is not set here: use {OWNED_ELSEWHERE[name]}"
    assert not any(field.name == name for field in dataclasses.fields(TrainerConfig))


def test_every_argument_of_the_installed_lightning_is_typed_or_owned_elsewhere() -> None:
    from pytorch_lightning import Trainer

    theirs = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    ours = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert theirs == ours | set(OWNED_ELSEWHERE)


def test_what_is_saved_can_be_read_again() -> None:
    config = compose(["strategy=hsdp", "trainer.limit_val_batches=0.5", "extra.x=1", "optimizer.betas=[0.8,0.9]"])
    assert from_plain(to_plain(config)) == config
    with pytest.raises(ConfigError, match=r"^batch=3: a mapping is needed here"):
        from_plain({"batch": 3})


def test_every_field_has_a_docstring_for_the_help_page() -> None:
    from shardwise.help import help_page

    page = help_page()
    assert "strategy.dp_replicate  [-1]" in page, "the defaults are those of the default composition"
    assert "schedule.warmup_steps  [0]" in page
    for group in GROUPS_OF_THE_SCHEMA:
        kind = typing.get_type_hints(Config)[group]
        source = inspect.getsource(kind)
        for field in dataclasses.fields(kind):
            after = source.partition(f"    {field.name}: ")[2].splitlines()
            assert after[1].strip().startswith('"""'), f"{group}.{field.name}"
            assert field.name in page or field.metadata["choices"], f"{group}.{field.name} is not on the help page"
