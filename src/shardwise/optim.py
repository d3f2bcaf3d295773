"""Build the optimizer and its schedule from plain numbers."""

import inspect
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise import schedules
from shardwise.errors import ConfigError


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]], *, target: type, lr: float, **arguments: Any
) -> Optimizer:
    """An optimizer over every parameter that requires a gradient.

    The parameters may be plain tensors, DTensors, or both, on any meshes. Only DTensors: `foreach` is turned on where
    the class has it and nobody typed it or `fused`, because torch's own default then updates them one by one (AdamW on
    40 parameters: 7.0 ms, with foreach 1.6 ms). Both kinds: torch cannot update them together, so `foreach` is off.

    Args:
        named_parameters: as from Module.named_parameters(). A parameter that comes twice (tied weights) counts once.
        target: a subclass of torch.optim.Optimizer.
        lr: the effective learning rate, at the peak of the schedule.
        **arguments: for the class; lists, as YAML gives for betas, become tuples.

    Raises:
        ConfigError: nothing to train, not an optimizer, an argument that it does not take, or a number given as text.
    """
    if not (isinstance(target, type) and issubclass(target, Optimizer)):
        raise ConfigError(f"optimizer._target_={target!r} is no optimizer: name a subclass of torch.optim.Optimizer")
    name = f"{target.__module__}.{target.__qualname__}"
    unique = {id(parameter): parameter for _, parameter in named_parameters if parameter.requires_grad}
    parameters = list(unique.values())
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
    if "foreach" in known:
        arguments |= _foreach_for(parameters, arguments)
    try:
        return target(parameters, **arguments)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} refuses its arguments ({reason}): correct optimizer.*") from error


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
