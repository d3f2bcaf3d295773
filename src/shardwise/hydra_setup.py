"""Hydra: the schema it composes against, how it is entered, and plain values out of it.

With ``explain.py`` and the plugin the only file that knows Hydra.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwise.config import PLUGGED_IN, Config, from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.explain import check_flags, check_overrides, explain, explain_yaml
from shardwise.groups import group_choices

CONFIG_PATH = "pkg://shardwise.conf"


def register() -> None:
    """Put the typed schema into Hydra's store, as ``shardwise_schema``; plug-in slots stay open for any key."""
    schema = OmegaConf.structured(Config)
    for free in (*(schema[slot] for slot in (*PLUGGED_IN, "extra")), schema.strategy.plan):
        OmegaConf.set_struct(free, False)
    ConfigStore.instance().store(name="shardwise_schema", node=schema)


def config_from(composed: DictConfig) -> Config:
    """The composed configuration, resolved, in plain containers and checked key by key.

    Raises:
        ConfigError: a value is missing or an interpolation leads nowhere, a key is unknown, a type or choice is wrong.
    """
    try:
        own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        plain = OmegaConf.to_container(own, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, group_choices())) from error
    assert isinstance(plain, dict)
    return from_plain({str(key): value for key, value in plain.items()})


def run_hydra(run: Callable[[Config, list[str], dict[str, Any]], None], argv: Sequence[str]) -> None:
    """Enter Hydra with ``argv``, and hand ``run`` the configuration, what was typed, and each group's choice.

    With ``-m`` the launcher takes over and ``run`` is not called; nor is it with ``--cfg`` and ``--info``.

    Raises:
        ConfigError: what Hydra or the schema objects to, in one line.
        Exception: whatever ``run`` raises.
    """
    flags, overrides = check_flags(argv)
    check_overrides(overrides, group_choices())
    register()
    failed: list[BaseException] = []
    argv_before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")

    def restore() -> None:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error

    def task(composed: DictConfig) -> None:
        restore()  # what runs from here on has the user's word
        # Hydra would print a line of its own about an exception and end the process: it is handed on behind its back.
        try:
            settings = HydraConfig.get()
            if settings.mode == RunMode.MULTIRUN:
                choice = settings.runtime.choices["hydra/launcher"]
                raise ConfigError(f"hydra/launcher={choice} would train inside the process of the sweep: leave it out")
            run(config_from(composed), list(settings.overrides.task), dict(settings.runtime.choices))
        except BaseException as error:
            failed.append(error)

    sys.argv = [argv_before[0], *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    try:
        hydra.main(config_path=CONFIG_PATH, config_name="config", version_base="1.3")(task)()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(explain_yaml(error)) from error
    except Exception as error:
        if not is_hydra_error(error):
            raise
        raise ConfigError(explain(error, group_choices())) from error
    finally:
        sys.argv = argv_before
        restore()
    if failed:
        raise failed[0]


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that ``overrides`` make, as from the command line; also from inside a Hydra application.

    Raises:
        ConfigError: what Hydra or the schema objects to, in one line.
    """
    check_overrides(overrides, group_choices())
    register()
    try:
        if GlobalHydra.instance().is_initialized():
            return config_from(hydra.compose("config", overrides=list(overrides)))
        with hydra.initialize_config_module(CONFIG_PATH.removeprefix("pkg://"), version_base="1.3"):
            return config_from(hydra.compose("config", overrides=list(overrides)))
    except Exception as error:
        if not is_hydra_error(error):
            raise
        raise ConfigError(explain(error, group_choices())) from error


def compose_plain(overrides: Sequence[str]) -> dict[str, Any]:
    """:func:`compose` in plain containers."""
    return to_plain(compose(overrides))


def sweep_jobs(context: Any, config: DictConfig, overrides: Sequence[Sequence[str]]) -> list[tuple]:
    """(configuration, what was typed, each group's choice) for each job of a sweep, composed one after the other."""
    jobs = []
    for typed in overrides:
        composed = context.config_loader.load_sweep_config(config, list(typed))
        # `${hydra:...}` reads the job's own settings, as it would if it ran alone.
        HydraConfig.instance().set_config(composed)
        choices = dict(composed.hydra.runtime.choices)
        jobs.append((config_from(composed), list(composed.hydra.overrides.task), choices))
    return jobs


def is_hydra_error(error: BaseException) -> bool:
    """Whether an exception is about the configuration rather than about the code."""
    return isinstance(error, (HydraException, OmegaConfBaseException))


def read_yaml(path: Path) -> Any:
    """A YAML file as plain containers (no tags, no interpolation).

    Raises:
        ConfigError: it cannot be read, or is no YAML.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def write_yaml(path: Path, plain: Mapping[str, Any] | Sequence[Any]) -> None:
    """Plain containers as YAML, under a temporary name first: a killed run is to be resumed from these files."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(plain)), encoding="utf-8")  # type: ignore[call-overload]
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
