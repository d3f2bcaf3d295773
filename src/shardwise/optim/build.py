"""Build the optimizer and its schedule from plain numbers."""

import inspect
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise import schedules
from shardwise.errors import ConfigError
from shardwise.optim.groups import Trained, check_decay, trained_parameters
from shardwise.optim.muon import HIDDEN, Muon
from shardwise.parallel.local_step import own_clipping
from shardwise.parallel.sharded_step import check_sharded


def build_optimizer(
    source: nn.Module | Iterable[tuple[str, Parameter]],
    *,
    target: type,
    lr: float,
    decay: str = "matrices",
    **arguments: Any,
) -> Optimizer:
    """An optimizer over every parameter that requires a gradient.

    Where it knows weight decay, what is decayed and what is not (groups.py) stand in a group each, in this order and
    whatever ``weight_decay`` is, so that a run can go on with another; not with another ``decay``. Muon has
    its hidden matrices in a group before them.

    The parameters may be plain tensors, DTensors, or both, on any meshes. Only DTensors: `foreach` is turned on where
    the class has it and nobody typed it or `fused`, because torch's own default then updates them one by one (AdamW on
    40 parameters: 7.0 ms, with foreach 1.6 ms). Both kinds: torch cannot update them together, so `foreach` is off.

    Args:
        source: the module, as it is laid out; or its named parameters, of which names and shapes alone are known. A
            parameter that comes twice (tied weights) counts once.
        target: a subclass of torch.optim.Optimizer.
        lr: the effective learning rate, at the peak of the schedule.
        decay: ``matrices`` leaves out norms, biases and embeddings; ``all`` nothing.
        **arguments: for the class; lists, as YAML gives for betas, become tuples.

    Raises:
        ConfigError: nothing to train, not an optimizer, an argument that it does not take, a number given as text, or
            an optimizer that is not right on sharded parameters.
    """
    if not (isinstance(target, type) and issubclass(target, Optimizer)):
        raise ConfigError(f"optimizer._target_={target!r} is no optimizer: name a subclass of torch.optim.Optimizer")
    name = f"{target.__module__}.{target.__qualname__}"
    check_decay(decay)
    trained = trained_parameters(source)
    parameters = [each.parameter for each in trained]
    if not parameters:
        raise ConfigError("the model has no parameter with requires_grad=True: there is nothing to train, unfreeze one")
    arguments = {key: _plain_argument(key, value) for key, value in {"lr": lr, **arguments}.items()}
    known = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in arguments:
        if key not in known and not takes_any:
            near = get_close_matches(key, list(known)[1:], n=1)
            hint = f"did you mean optimizer.{near[0]}?" if near else f"it takes {', '.join(list(known)[1:])}"
            raise ConfigError(f"optimizer.{key} is not an argument of {name}: {hint}")
    _check_clipping(target, {**{key: p.default for key, p in known.items()}, **arguments})
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        check_sharded(target, arguments)
    if "foreach" in known:
        arguments |= _foreach_for(parameters, arguments)
    groups = _groups(trained, target, decays="weight_decay" in known, everything=decay == "all")
    for key, value in arguments.items():
        if key in known:
            _check_value(key, value, default=known[key].default)
    try:
        return target(_copied(groups), **arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if (guilty := _guilty(target, groups, arguments)) is not None:
            raise ConfigError(
                f"optimizer.{guilty}={_shown(arguments[guilty])}: {name} refuses it ({reason})"
            ) from error
        raise ConfigError(f"{name} refuses its arguments ({reason}): correct optimizer.*") from error


def _check_value(key: str, value: Any, *, default: Any) -> None:
    """Refuse what an optimizer's own check does not name, or not in these words."""
    if isinstance(default, tuple) and all(map(_numeric, default)):
        shown = f"optimizer.{key}={_shown(value)}"
        if not (isinstance(value, tuple) and len(value) == len(default) and all(map(_numeric, value))):
            number = {2: "two", 3: "three"}.get(len(default), str(len(default)))
            raise ConfigError(f"{shown}: {number} numbers are needed, such as optimizer.{key}={_shown(default)}")
        if key == "betas" and not all(0 <= beta < 1 for beta in value):
            raise ConfigError(f"{shown}: each has to be at least 0 and below 1, such as {_shown(default)}")
    if key == "weight_decay" and _numeric(default) and not (_numeric(value) and 0 <= value < math.inf):
        raise ConfigError(f"optimizer.weight_decay={_shown(value)}: a number of at least 0 is needed, such as 0.01")


def _guilty(target: type, groups: list[Any], arguments: Mapping[str, Any]) -> str | None:
    """The one argument without which the optimizer can be made; None if there is no such, or several."""
    found = []
    for key in arguments:
        try:
            target(_copied(groups), **{other: value for other, value in arguments.items() if other != key})
        except (TypeError, ValueError, LookupError, RuntimeError):
            continue
        found.append(key)
    return found[0] if len(found) == 1 else None


def _copied(groups: list[Any]) -> list[Any]:
    """The groups again, as an optimizer fills in what it is given."""
    return [dict(group) if isinstance(group, dict) else group for group in groups]


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, tuple) else str(value)


def _groups(trained: list[Trained], target: type, *, decays: bool, everything: bool) -> list[Any]:
    if not decays:  # such as LBFGS, which takes one group only
        return [each.parameter for each in trained]
    hidden = [each.parameter for each in trained if each.hidden] if issubclass(target, Muon) else []
    held = {id(parameter) for parameter in hidden}
    others = [each for each in trained if id(each.parameter) not in held]
    decayed = [each.parameter for each in others if everything or not each.exempt]
    exempt = [each.parameter for each in others if not everything and each.exempt]
    groups: list[dict[str, Any]] = [{"params": hidden}, {"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    if issubclass(target, Muon):
        groups = [{**group, HIDDEN: index == 0} for index, group in enumerate(groups)]
    return [group for group in groups if group["params"]]


def _check_clipping(target: type, values: Mapping[str, Any]) -> None:
    """Refuse what clips by itself: a second time, with other norms than those that are logged."""
    limit = values.get("max_grad_norm")
    if limit is not None and target.__module__.startswith("timm."):
        raise ConfigError(own_clipping(target.__name__, limit))


def build_scheduler(
    optimizer: Optimizer,
    *,
    kind: str,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    decay_fraction: float = 0.2,
) -> LambdaLR:
    """The schedule of schedules.multiplier on the rates of the optimizer. To be stepped once per optimizer step.

    Raises:
        ConfigError: numbers that make no schedule.
    """
    numbers: dict[str, Any] = {
        "total_steps": total_steps,
        "warmup_steps": warmup_steps,
        "min_ratio": min_ratio,
        "decay_fraction": decay_fraction,
    }
    schedules.check(kind, **numbers)
    return LambdaLR(optimizer, lambda step: schedules.multiplier(kind, step, **numbers))


def _foreach_for(parameters: list[Parameter], arguments: dict[str, Any]) -> dict[str, bool]:
    """What to add to the arguments so that the kinds of parameters at hand can be updated, and fast."""
    sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    typed = [key for key in ("foreach", "fused") if arguments.get(key)]
    if 0 < sharded < len(parameters):
        if typed:
            raise ConfigError(
                f"optimizer.{typed[0]}=true cannot update {sharded} sharded and {len(parameters) - sharded} unsharded "
                f"parameters together: leave it out"
            )
        return {"foreach": False}
    if sharded and not typed and "foreach" not in arguments:
        return {"foreach": True}
    return {}


def _plain_argument(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain_argument(key, item) for item in value)
    if isinstance(value, str) and _is_number(value):
        # YAML 1.1 reads 1e-3, without a dot, as text; so does whoever puts quotes around a number.
        raise ConfigError(
            f"optimizer.{key}={value!r} is text, not a number: write it without quotes and with a dot, as "
            f"{float(value)!r}"
        )
    if key == "lr" and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
        raise ConfigError(f"optimizer.lr={value!r} is no learning rate: write a finite number, such as 1.0e-3")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
