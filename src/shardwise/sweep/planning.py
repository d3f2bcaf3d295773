"""From composed configurations to the jobs of a sweep: checked, and known by what decides their numbers."""

import ast
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.config import PLUGGED_IN, Config, to_plain
from shardwise.errors import ConfigError
from shardwise.job import Job, check_writable, make_job
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved, resolve
from shardwise.sweep.checking import Checker
from shardwise.sweep.source import Common, Planned

FIXED = ("launch", "sweep", "hydra", "output_root", "plugins")
"""Keys that mean the whole sweep."""

NO_NUMBERS = ("sweep", "output_root", "experiment_name", "plugins", "launch", "logger", "checkpoint")
"""Keys that do not decide what comes out of a job."""
PRELOADED = ("shardwise", "torch", "torchvision", "torchmetrics", "timm", "pytorch_lightning")
"""Packages whose modules jobs find imported where the configuration names them."""

IMPORT_LATER = {"wandb": ("wandb.apis.public", "wandb.docker", "wandb.sdk.launch", "wandb.sdk.lib.gitlib")}
"""What packages import by themselves with the first run: a second of each job."""

NO_NUMBERS_EITHER = ("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.default_root_dir")


def check_swept(keys: Iterable[str]) -> None:
    """Whether every key may differ from job to job.

    Args:
        keys: as they are typed, such as ``optimizer.lr`` or ``+callbacks.x``.

    Raises:
        ConfigError: one of them means the whole sweep.
    """
    for key in keys:
        plain = key.lstrip("+~")
        first = plain.partition(".")[0].partition("/")[0].partition("@")[0]
        if first in FIXED:
            raise ConfigError(
                f"{plain} cannot be swept, as it means the sweep and not a job: give {plain} one value "
                f"(not to be swept: {', '.join(FIXED)})"
            )


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def deciding(config: dict[str, Any]) -> dict[str, Any]:
    """Of a plain configuration, what decides the numbers of a job, flat; secrets masked, as it is kept in files."""
    kept = {key: value for key, value in config.items() if key not in NO_NUMBERS}
    return {key: value for key, value in flat(without_secrets(kept)).items() if key not in NO_NUMBERS_EITHER}


def key_of(resolved: Resolved) -> str:
    """A hash of everything that decides the numbers of a job: its configuration, the ranks and their mesh."""
    world = resolved.world
    decides = {
        "config": deciding(to_plain(resolved.config)),
        "world": [world.num_nodes, world.devices, world.accelerator, resolved.dims.shape],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


def common_of(planned: Sequence[Planned], *, without: Iterable[str] = ()) -> Common:
    """What jobs share.

    Args:
        planned: all jobs of a grid, or any one of a search.
        without: keys that a search tries values of (``optimizer.lr``, or a whole group such as ``model``).
    """
    configs = [deciding(one.job.config) for one in planned]
    keys = {key for config in configs for key in config}
    missing = object()
    searched = tuple(f"{key.lstrip('+~')}." for key in without)
    shared = {
        key: configs[0][key]
        for key in sorted(keys)
        if not f"{key}.".startswith(searched)
        and all(config.get(key, missing) == configs[0].get(key, missing) for config in configs)
    }
    return Common(shared, frozenset((keys - set(shared)) | {key.rstrip(".") for key in searched}))


def labelled(planned: Sequence[Planned]) -> list[Planned]:
    """The jobs of a grid with what tells them apart; a job that is alone with what was not typed as it has it now."""
    if len(planned) > 1:
        shared = set.intersection(*(set(one.job.overrides) for one in planned))
    else:
        typed = {_bare(word) for word in planned[0].job.command}
        shared = {override for override in planned[0].job.overrides if _bare(override) in typed}
    return [replace(one, label=label_of([o for o in one.job.overrides if o not in shared])) for one in planned]


def _bare(override: str) -> str:
    return re.sub(r"[\s'\"]", "", override)  # Hydra writes lists and texts in its own way


def label_of(overrides: Sequence[str]) -> str:
    """Overrides in a line, without secrets."""
    return " ".join(without_secrets(list(overrides)))


def modules_of(configs: Iterable[Config]) -> list[str]:
    """The modules that jobs will import for what is plugged in, for the process that they are forked from.

    Only of packages that are known to bear it: what a user's module does when it is imported is for its own process.
    Found without importing torch.
    """
    targets = {target for config in configs for target in _targets([getattr(config, slot) for slot in PLUGGED_IN])}
    known = sorted(target for target in targets if target.partition(".")[0] in PRELOADED)
    late = [module for target in known if target.startswith("shardwise.") for module in _imported_late(target)]
    late += [inner for module in late for inner in IMPORT_LATER.get(module, ())]
    return list(dict.fromkeys([*(target.rpartition(".")[0] for target in known), *late]))


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from _targets(inner)


def _imported_late(target: str) -> list[str]:
    """What the functions of the module that defines ``target`` import once they are called, and those of the modules
    beside it that it imports; read off their sources."""
    module, _, name = target.rpartition(".")
    tree = _source_of(module)
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _imported_late(f"{node.module}.{name}")  # a package that only names it
    beside, seen = [module], set()
    names: set[str] = set()
    while beside:
        one = beside.pop()
        if one in seen or (tree := _source_of(one)) is None:
            continue
        seen.add(one)
        package = module.rpartition(".")[0] + "."
        froms = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
        beside += [other for other in froms if other.startswith(package)]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = [node for function in functions for node in ast.walk(function)]
        names |= {alias.name for node in inside if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in inside if isinstance(node, ast.ImportFrom) and node.module}
    return sorted(names)


def _source_of(module: str) -> ast.Module | None:
    """The parsed source of a module of this package; None if there is none."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])  # find_spec() would import the packages above it
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8")) if source.is_file() else None


class Planner:
    """Turns composed configurations into jobs; what is the same in many of them is checked once.

    Args:
        command: what was typed.
        check: whether what is plugged in exists and takes its arguments.
        check_places: whether the places that a configuration names can be written, or read; raises ConfigError.
        experiment: from a configuration and the groups' choices to the name of the folder that holds the runs.
        started: when the command was typed, in Unix seconds; ``launch.time_limit`` is the whole sweep's.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        check: Checker,
        check_places: Callable[[Config], None],
        experiment: Callable[[Config, dict[str, Any]], str],
        started: float,
    ) -> None:
        self._command, self._started = list(command), started
        self._check, self._check_places, self._experiment = check, check_places, experiment
        self._checked: set[str] = set()
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        self._stamp = f"{stamp}-{int(now % 1 * 1e6):06d}"

    def plan(self, config: Config, overrides: Sequence[str], choices: dict[str, Any], *, number: int) -> Planned:
        """A job, ready to be started; makes nothing.

        Raises:
            ConfigError: something in it is wrong.
        """
        resolved = resolve(config)
        if self._once("output_root", config.output_root):
            check_writable(config.output_root)
        if self._once("slots", _slots(resolved)):
            self._check(resolved)
        if self._once("places", [config.checkpoint.folder, config.init_from]) or config.checkpoint.folder is not None:
            self._check_places(config)
        job: Job = make_job(
            config,
            resolved.world,
            experiment=self._experiment(config, choices),
            overrides=overrides,
            command=self._command,
            run_id=f"{self._stamp}-{number}",
            in_sweep=True,
        )
        job = replace(job, started=self._started)
        return Planned(job, key=key_of(resolved), number=number, label=label_of(overrides))

    def close(self) -> None:
        """Nothing is to be planned any more."""
        self._check.close()

    def _once(self, *what: Any) -> bool:
        text = json.dumps(what, sort_keys=True, default=str)
        new = text not in self._checked
        self._checked.add(text)
        return new


def _slots(resolved: Resolved) -> dict[str, Any]:
    """What the check of what is plugged in depends on; any learning rate that is a number is as good as another."""
    config = resolved.config
    slots = {slot: getattr(config, slot) for slot in PLUGGED_IN}
    slots["optimizer"] = {key: value for key, value in config.optimizer.items() if key != "lr"}
    strategy = to_plain(config)["strategy"]
    others = [config.lr_scaling.rule, config.plugins, resolved.world.launch]
    return {"slots": slots, "strategy": strategy, "dims": resolved.dims.shape, "others": others}


def check_name(name: str | None) -> None:
    """Whether ``sweep.name`` can be the name of a folder.

    Raises:
        ConfigError: it cannot.
    """
    if name is not None and (name.strip() in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        raise ConfigError(f"sweep.name={name}: the name of a folder is needed, such as sweep.name=batch_scaling")
