"""Hydra: the schema it composes against, how it is entered, and plain values out of it.

With ``explain.py`` and the plugin the only file that knows Hydra.
"""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwise.config import PLUGGED_IN, Config, SweepConfig, from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.explain import check_flags, check_overrides, explain, explain_yaml
from shardwise.groups import group_choices
from shardwise.search_space import Choice, Dimension, interval

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
    with _groups_composed_once():
        for typed in overrides:
            composed = context.config_loader.load_sweep_config(config, list(typed))
            # `${hydra:...}` reads the job's own settings, as it would if it ran alone.
            HydraConfig.instance().set_config(composed)
            choices = dict(composed.hydra.runtime.choices)
            jobs.append((config_from(composed), list(composed.hydra.overrides.task), choices))
    return jobs


@contextlib.contextmanager
def _groups_composed_once() -> Iterator[None]:
    """Within this block Hydra composes the files of the same choices once, as many jobs differ in values only.

    It applies values to what the files have made, so that they cannot change it; it has no setting for that, and two
    functions are wrapped.
    """
    make_list, merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[tuple[str, ...], DefaultsList] = {}
    merged: dict[int, DictConfig] = {}

    def create_defaults_list(repo: Any, config_name: Any, overrides_list: list[Override], **settings: Any) -> Any:
        values = [
            one for one in overrides_list if isinstance(one.value(), dict) or not repo.group_exists(one.key_or_group)
        ]
        words = tuple(one.input_line or "" for one in overrides_list if one not in values)
        if words not in lists:
            lists[words] = make_list(repo=repo, config_name=config_name, overrides_list=overrides_list, **settings)
        return replace(lists[words], config_overrides=values)

    def compose_from(self: Any, defaults: Any, repo: Any) -> DictConfig:
        if id(defaults) not in merged:  # a list that is kept above, so that its number is its own
            merged[id(defaults)] = merge(self, defaults=defaults, repo=repo)
        return copy.deepcopy(merged[id(defaults)])

    module: Any = config_loader_impl
    loader: Any = ConfigLoaderImpl
    module.create_defaults_list = create_defaults_list
    loader._compose_config_from_defaults_list = compose_from
    try:
        yield
    finally:
        module.create_defaults_list = make_list
        loader._compose_config_from_defaults_list = merge


def compose_job(context: Any, config: DictConfig, overrides: Sequence[str]) -> tuple:
    """One job of :func:`sweep_jobs`.

    Raises:
        ConfigError: what Hydra or the schema objects to, in one line.
    """
    try:
        return sweep_jobs(context, config, [overrides])[0]
    except Exception as error:
        if not is_hydra_error(error):
            raise
        raise ConfigError(explain(error, group_choices())) from error


def sweep_settings(composed: DictConfig) -> SweepConfig:
    """The checked ``sweep`` of a configuration whose other keys may still be missing."""
    return from_plain({"sweep": OmegaConf.to_container(composed.sweep, resolve=True)}).sweep


def parse_space(
    params: Mapping[str, Any], typed: Sequence[str], *, loader: Any
) -> tuple[list[str], dict[str, Dimension]]:
    """What is the same in every trial of a search, and its space; Hydra's extended grammar, as of its own sweepers.

    Args:
        params: ``hydra.sweeper.params``; what was typed for the same key counts.
        typed: overrides of ``-m``.
        loader: Hydra's, which knows the names behind ``glob(*)``.

    Raises:
        ConfigError: an override that cannot be read, or a range or an interval that makes no sense.
    """
    fixed: dict[str, str] = {}
    space: dict[str, Dimension] = {}
    parser = OverridesParser.create(config_loader=loader)
    for text in [*(f"{key}={value}" for key, value in params.items()), *typed]:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{text}: {' '.join(str(error).split())}") from None
        key = override.get_key_element()
        fixed.pop(key, None)
        space.pop(key, None)
        if override.is_sweep_override():
            space[key] = _dimension(key, override)
        else:
            fixed[key] = text
    return list(fixed.values()), space


def swept_keys(params: Mapping[str, Any], typed: Sequence[str], *, loader: Any) -> list[str]:
    """The keys that get several values, in ``hydra.sweeper.params`` or by what is typed."""
    parser = OverridesParser.create(config_loader=loader)
    keys = []
    for text in [*(f"{key}={value}" for key, value in params.items()), *typed]:
        with contextlib.suppress(HydraException):  # the sweeper says what it cannot read
            override = parser.parse_override(text)
            if override.is_sweep_override():
                keys.append(override.get_key_element())
    return keys


def check_countable(params: Mapping[str, Any], typed: Sequence[str], *, loader: Any) -> None:
    """Whether a grid can count its values.

    Raises:
        ConfigError: a key has an interval, or a range without a value.
    """
    parser = OverridesParser.create(config_loader=loader)
    for text in [*(f"{key}={value}" for key, value in params.items()), *typed]:
        with contextlib.suppress(HydraException):  # the sweeper says what it cannot read
            override, key = parser.parse_override(text), text.partition("=")[0]
            if override.is_range_sweep() and not list(override.sweep_iterator()):
                raise ConfigError(
                    f"{text}: there is no value in it, as its end is not one of them: {key}=range(1,4) is 1,2,3"
                )
            if override.is_interval_sweep():
                raise ConfigError(
                    f"{text}: an interval has no end of values for a grid: type some ({key}=1,2,3), or search it with "
                    f"sweep.search=tpe sweep.trials=20 sweep.metric=val/loss"
                )


def _dimension(key: str, override: Override) -> Dimension:
    value: Any = override.value()
    tags = set(getattr(value, "tags", ()))
    if tags - {"log"} or (tags and not override.is_interval_sweep()):
        raise ConfigError(f"{key}: the only tag here is log, of an interval, as in {key}=tag(log,interval(1e-4,1e-1))")
    if override.is_interval_sweep():
        return interval(key, value.start, value.end, log="log" in tags)
    if getattr(value, "shuffle", False):
        value.shuffle = False  # a search has no order, and a space that is continued has to be the same one
    if override.is_range_sweep():
        numbers = list(value.range())
        if len(numbers) > 1:  # its end is not one of its values
            return interval(key, min(numbers), max(numbers), log=False, step=abs(value.step))
    values = tuple(dict.fromkeys(override.sweep_string_iterator()))
    if not values:
        raise ConfigError(f"{key}: there is no value in {override.input_line}")
    return Choice(values)


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
