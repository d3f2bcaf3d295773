"""Hydra: the schema it composes against, what its errors mean, and plain values out of it.

The only file beside the plugin that knows Hydra and OmegaConf.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from shardwise.config import PLUGGED_IN, Config, from_plain, kinds_in_words, nearest, to_plain, unknown_key
from shardwise.errors import ConfigError

CONFIG_PATH = "pkg://shardwise.conf"

GROUPS = (
    "trainer",
    "nodes",
    "launch",
    "strategy",
    "precision",
    "batch",
    "optimizer",
    "schedule",
    "lr_scaling",
    "task",
    "model",
    "data",
    "callbacks",
    "logger",
    "experiment",
    "sweep",
)
"""Config groups in the order in which ``--help`` lists them."""


def register() -> None:
    """Put the typed schema into Hydra's store, as ``shardwise_schema``; plug-in slots stay open for any key."""
    schema = OmegaConf.structured(Config)
    for slot in (*PLUGGED_IN, "extra"):
        OmegaConf.set_struct(schema[slot], False)
    ConfigStore.instance().store(name="shardwise_schema", node=schema)


def config_from(composed: DictConfig) -> Config:
    """The composed configuration, resolved, in plain containers and checked key by key.

    Raises:
        ConfigError: a value is missing or an interpolation leads nowhere, a key is unknown, a type or choice is wrong.
    """
    try:
        own = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        plain = OmegaConf.to_container(own, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(plain, dict)
    return from_plain({str(key): value for key, value in plain.items()})


def run_hydra(run: Callable[[Config, list[str], dict[str, Any]], None], argv: Sequence[str]) -> None:
    """Enter Hydra with ``argv``, and hand ``run`` the configuration, what was typed, and each group's choice.

    With ``-m`` the launcher takes over and ``run`` is not called.

    Raises:
        ConfigError: what Hydra or the schema objects to, in one line.
        Exception: whatever ``run`` raises.
    """
    register()
    failed: list[BaseException] = []

    def task(composed: DictConfig) -> None:
        # Hydra would print a line of its own about an exception and end the process: it is handed on behind its back.
        try:
            settings = HydraConfig.get()
            run(config_from(composed), list(settings.overrides.task), dict(settings.runtime.choices))
        except BaseException as error:
            failed.append(error)

    argv_before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv_before[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    try:
        hydra.main(config_path=CONFIG_PATH, config_name="config", version_base="1.3")(task)()
    except Exception as error:
        if not is_hydra_error(error):
            raise
        raise ConfigError(explain(error)) from error
    finally:
        sys.argv = argv_before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if failed:
        raise failed[0]


def compose_plain(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration that ``overrides`` make today, in plain containers; from inside a Hydra application."""
    return to_plain(config_from(hydra.compose("config", overrides=list(overrides))))


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


def group_choices(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> names of its choices, from folders of YAML files."""
    found: dict[str, list[str]] = {}
    for group in GROUPS:
        names = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
        found[group] = sorted(names)
    return found


def explain(error: BaseException) -> str:
    """One line for what Hydra or OmegaConf objects to: the key or value, what is allowed, the nearest valid name."""
    chain = _chain(error)
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
    text = "\n".join(str(link) for link in chain)
    if match := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':\s((?:\s+\S+\n?)+)", text):
        choice, group = match[1].split("/")[-1], match[2]
        options = re.findall(r"^\t(\S+)$", match[0], flags=re.MULTILINE)
        return f"{group}={choice}: no such choice{nearest(choice, options)} ({group}={'|'.join(options)})"
    if match := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        return f"{match[1]}={match[2]}: there is no file {match[1]}/{match[2]}.yaml on the search path"
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return f"{match[1]}: no such group{nearest(match[1], GROUPS)} (groups: {', '.join(GROUPS)})"
    for link in reversed(chain):
        if isinstance(link, InterpolationKeyError):
            named = re.search(r"Interpolation key '([^']+)'", str(link))
            key = named[1] if named else str(link.full_key)
            return f"{str(link).splitlines()[0]}: there is no {key} in the configuration"
        full_key = getattr(link, "full_key", None)
        if isinstance(link, OmegaConfBaseException) and full_key:
            return _explain_key(str(full_key), str(link).splitlines()[0])
    if match := re.search(r"Error parsing override '(.*?)'", text, flags=re.DOTALL):
        return f"{match[1]}: not of the form key=value (values with special characters: 'key=\"a=b\"')"
    first = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = " ".join(line for line in first if not line.startswith(("full_key", "object_type", "reference_type")))
    return re.sub(r"\s+", " ", shown)


def _explain_key(full_key: str, message: str) -> str:
    """Which key under the schema is wrong, or which value."""
    kind: Any = Config
    parts = full_key.split(".")
    for depth, part in enumerate(parts):
        known = {f.name: f.type for f in fields(kind)}
        if part not in known:
            names = [*known, *GROUPS] if depth == 0 else list(known)
            return str(unknown_key(".".join(parts[: depth + 1]), dict.fromkeys(names)))
        kind = known[part]
        if not hasattr(kind, "__dataclass_fields__"):
            break
    refused = r"could not be converted to|is not a subclass of|is incompatible with type hint"
    found = re.match(rf"Value '(.*)' of type '.*' (?:{refused}) (.*)", message)
    if found:
        union = re.findall(r"\b(int|float|str|bool)\b", found[2])
        if union:
            return f"{full_key}={found[1]}: {kinds_in_words(union)} is needed"
        words = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
        return f"{full_key}={found[1]}: {words.get(found[2], found[2])} is needed"
    return f"{full_key}: {message}"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and what it came from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def is_hydra_error(error: BaseException) -> bool:
    """Whether an exception is about the configuration rather than about the code."""
    return isinstance(error, (HydraException, OmegaConfBaseException))


def read_yaml(path: Path) -> Any:
    """A YAML file as plain containers (no tags, no interpolation)."""
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def write_yaml(path: Path, plain: Mapping[str, Any] | Sequence[Any]) -> None:
    """Plain containers as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(plain)), encoding="utf-8")  # type: ignore[call-overload]
