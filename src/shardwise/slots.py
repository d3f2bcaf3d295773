"""What a user plugs in: which code a configuration may name, and whether its arguments fit, before anything starts.

A configuration may come from a stranger's run folder, and ``_target_`` names code to call. So the package has to be on
a list, and the target has to be of the kind that its slot takes, or one of the listed factories.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwise.config import nearest
from shardwise.errors import ConfigError

ALLOWED_PACKAGES = ("shardwise", "torch", "torchvision", "torchmetrics", "timm", "pytorch_lightning", "lightning")

KINDS = {
    "model": ("torch.nn", "Module"),
    "data": ("pytorch_lightning", "LightningDataModule"),
    "task": ("pytorch_lightning", "LightningModule"),
    "optimizer": ("torch.optim", "Optimizer"),
    "callbacks": ("pytorch_lightning", "Callback"),
    "logger": ("pytorch_lightning.loggers", "Logger"),
}
"""Slot -> the class whose subclasses it takes."""

FACTORIES = {
    "model": {
        "torchvision.models": "torchvision's model builders",
        "shardwise.models.resnet": "residual networks of this project",
        "timm.create_model": "timm's models",
    }
}
"""Slot -> modules (or dotted names) whose public functions may be named as well."""

CUSTOM = ("model", "data", "task")
"""Slots with a choice ``custom`` that holds no argument, for a target of the user's own."""

REFUSED = {
    "GradientAccumulationScheduler": "batch.accumulate decides, and every count means optimizer steps",
    "BatchSizeFinder": "batch.global_size decides, and batch.micro_size how much of it a rank takes at a time",
    "LearningRateFinder": "optimizer.lr decides; try several with -m optimizer.lr=1e-3,3e-3,1e-2",
}
"""Callbacks of Lightning's that would change what has an owner here: name -> the owner."""

NEVER_EMPTY = ("data", "task", "optimizer", "callbacks")
"""Slots that hold a target in every run; of callbacks, each."""

AUTO = "auto"
"""Value of a model's argument that is taken from the data module's attribute of the same name."""


def check_names(nodes: Mapping[str, Mapping[str, Any]], *, plugins: Iterable[str] = ()) -> None:
    """Whether every ``_target_`` is in a package that may be named; imports nothing.

    Args:
        nodes: dotted place (``model``, ``callbacks.early``) -> the mapping there.
        plugins: packages beside :data:`ALLOWED_PACKAGES` that may be named.

    Raises:
        ConfigError: the first that may not, or that is no dotted name.
    """
    for where, node in nodes.items():
        if not isinstance(node, Mapping):
            raise ConfigError(f"{where}={node}: a mapping with a _target_ is needed, such as {where}._target_=...")
        if node.get("_target_") or where.partition(".")[0] in NEVER_EMPTY:
            _check_name(where, node.get("_target_"), plugins)


def _check_name(where: str, dotted: Any, plugins: Iterable[str]) -> None:
    if not isinstance(dotted, str) or not all(part.isidentifier() for part in dotted.split(".")):
        raise ConfigError(
            f"{where}._target_={'null' if dotted is None else dotted}: a dotted name is needed, such as "
            f"{where}._target_=mypackage.MyClass"
        )
    allowed, package = (*ALLOWED_PACKAGES, *plugins), dotted.partition(".")[0]
    if package not in allowed:
        raise ConfigError(
            f"{where}._target_={dotted}: package {package!r} is not allowed here{nearest(package, allowed)}; "
            f"if it is yours, type plugins=[{package}]"
        )


def find_target(
    slot: str, node: Mapping[str, Any], *, plugins: Iterable[str] = (), where: str = ""
) -> Callable[..., Any]:
    """The class or factory that a slot's ``_target_`` names.

    Args:
        slot: one of :data:`KINDS`.
        node: the slot's mapping, with ``_target_`` and arguments.
        plugins: packages beside :data:`ALLOWED_PACKAGES` that may be named.
        where: how messages name the slot (``callbacks.early``); the slot by default.

    Raises:
        ConfigError: nothing is named, the package is not allowed, the name does not exist, or it is of another kind.
    """
    where = where or slot
    dotted = node.get("_target_")
    _check_name(where, dotted, plugins)
    assert isinstance(dotted, str)
    package = dotted.partition(".")[0]
    target = _import(dotted, where)
    module, name = KINDS[slot]
    kind = getattr(importlib.import_module(module), name)
    if inspect.isclass(target):
        if issubclass(target, kind):
            for base in target.__mro__:
                if base.__name__ in REFUSED and base.__module__.startswith("pytorch_lightning."):
                    raise ConfigError(f"{where}._target_={dotted} is not for here: {REFUSED[base.__name__]}")
            return target
        if package == "lightning" or any(base.__module__.startswith("lightning.") for base in target.__mro__):
            raise ConfigError(
                f"{where}._target_={dotted} builds on lightning.pytorch: import it from pytorch_lightning"
            )
    elif callable(target) and _is_factory(slot, dotted, target):
        return target
    raise ConfigError(f"{where}._target_={dotted} is no {module}.{name}: {where} takes subclasses of it")


def _import(dotted: str, where: str) -> Any:
    parts = dotted.split(".")
    module = None
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only a missing part of the dotted name means a misspelling; what the module imports is its own fault.
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise ConfigError(f"{where}._target_={dotted}: importing {name} failed: {error}") from error
        except ImportError as error:
            raise ConfigError(f"{where}._target_={dotted}: importing {name} failed: {error}") from error
        break
    if module is None:
        raise ConfigError(f"{where}._target_={dotted}: there is no module {parts[0]!r} to import")
    found: Any = module
    for part in parts[cut:]:
        if not hasattr(found, part):
            owner = getattr(found, "__name__", dotted)
            raise ConfigError(f"{where}._target_={dotted}: {owner} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _is_factory(slot: str, dotted: str, target: Any) -> bool:
    listed = FACTORIES.get(slot, {})
    if dotted in listed:
        return True
    if dotted.rpartition(".")[0] not in listed or not inspect.isfunction(target):
        return False
    if dotted.startswith("torchvision."):
        return dotted.rpartition(".")[2] in importlib.import_module("torchvision.models").list_models()
    return not target.__name__.startswith("_")


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """A slot's arguments, without ``_target_``."""
    return {key: value for key, value in node.items() if key != "_target_"}


def check_arguments(
    target: Callable[..., Any], given: Mapping[str, Any], *, where: str, supplied: Iterable[str] = ()
) -> None:
    """Whether ``target(**given)`` can be called, once the framework has added what is ``supplied``.

    Raises:
        ConfigError: an argument that the signature does not have (with the nearest), one that is missing, a value that
            is a configuration of its own, or what the target's own ``check_arguments`` objects to.
    """
    name = getattr(target, "__name__", str(target))
    supplied = tuple(supplied)
    for key, value in given.items():
        if value == "???":
            raise ConfigError(f"{where}.{key} is missing: give it a value, such as {where}.{key}=...")
        if _names_code(value):
            raise ConfigError(f"{where}.{key}: a _target_ inside an argument is not built; give {name} plain values")
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    free = [key for key in named if key not in supplied]
    for key in given:
        if key in supplied and key in named:
            raise ConfigError(f"{where}.{key} is given by the framework: leave it out")
        if key not in named and not takes_any:
            raise ConfigError(
                f"{where}.{key}: {name} has no such argument{nearest(key, free)} (it has: {', '.join(free) or 'none'})"
                + ("" if _is_ours(target) or where not in CUSTOM else f"; {where}=custom starts without any")
            )
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in given and key not in supplied:
            raise ConfigError(f"{where}.{key} is missing: {name} needs it, such as {where}.{key}=...")
    check = getattr(target, "check_arguments", None)
    if check is not None:
        check(**given)


def _is_ours(target: Callable[..., Any]) -> bool:
    return getattr(target, "__module__", "").partition(".")[0] in ALLOWED_PACKAGES


def _names_code(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_names_code(inner) for inner in value.values())
    return isinstance(value, (list, tuple)) and any(_names_code(inner) for inner in value)


def accepts(target: Callable[..., Any], name: str) -> bool:
    """Whether ``target`` has an argument called ``name``."""
    return name in inspect.signature(target).parameters


def build(target: Callable[..., Any], given: Mapping[str, Any], *, where: str, **supplied: Any) -> Any:
    """``target(**given, **supplied)``, where what goes wrong inside over a value is told in one line.

    Raises:
        ConfigError: the target raised TypeError or ValueError.
    """
    try:
        return target(**given, **supplied)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(target, "__name__", str(target))
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ConfigError(f"{where}: {name}({shown}) failed: {error}") from error
