"""Which optimizers are right on sharded parameters, and how each of them steps there.

=============  =====================================================================================================
on elements    the same to a part as to the whole: on local tensors, without communication (local_step.py)
by norms       elementwise but for the norms of whole parameters, whose squares are added up (local_step.py)
by the whole   what it computes takes the whole parameter, or a whole matrix (whole_step.py)
itself         knows what to do with sharded parameters
=============  =====================================================================================================

Any other class of torch's or timm's is refused: a norm or a mean over a part is not one over the whole, and nothing
would say so. Classes from elsewhere step on DTensors, which is right if they use torch's operations only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.parallel.local_step import ELEMENTWISE, step_by_whole_norms, step_on_local_tensors
from shardwise.parallel.whole_step import step_on_whole_parameters, step_on_whole_updates

STOCK = ("torch", "timm")
"""Packages whose optimizers are known to be right by being in the table, or are refused."""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


WAYS: dict[str, Callable[[Optimizer, Callable[[], Any]], None] | None] = {
    **{_name(kind): step_on_local_tensors for kind in ELEMENTWISE},
    "timm.optim.lamb.Lamb": step_by_whole_norms,
    "timm.optim.lars.Lars": step_by_whole_norms,
    _name(torch.optim.Adafactor): step_on_whole_parameters,
    _name(torch.optim.Muon): step_on_whole_updates,
    "shardwise.optim.muon.Muon": None,
}
"""Class -> how it steps on sharded parameters; None: it knows. No subclass is taken for its parent."""


def check_sharded(kind: type, values: dict[str, Any] | None = None) -> str | None:
    """Whether optimizers of this class are right on sharded parameters.

    Args:
        kind: the class.
        values: its arguments, or the values of one of its groups.

    Returns:
        What to tell a person where that is not known; None where they are.

    Raises:
        ConfigError: they are not.
    """
    name = kind.__name__
    instead = "type strategy=ddp, or optimizer=adamw"
    values = values or {}
    if values.get("caution") and WAYS.get(_name(kind)) is step_by_whole_norms:
        raise ConfigError(
            f"optimizer.caution=true takes means over whole parameters, of which {name} would see parts: type "
            f"optimizer.caution=false, or strategy=ddp"
        )
    if _name(kind) in WAYS:
        return None
    if kind.__module__.partition(".")[0] in STOCK:
        raise ConfigError(f"optimizer {name} is not known to be right on sharded parameters: {instead}")
    return f"{name}: not known to be right on sharded parameters; strategy=ddp is"


def way_of(optimizer: Optimizer) -> Callable[[Optimizer, Callable[[], Any]], None] | None:
    """How ``optimizer`` is to step on its sharded parameters; None if it has none, or needs no help."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    return WAYS.get(_name(type(optimizer))) if sharded else None


@contextmanager
def stepping_right(optimizer: Optimizer) -> Iterator[None]:
    """Let ``optimizer.step()``, without a closure, be right on sharded parameters inside."""
    way = way_of(optimizer)
    if way is None:
        yield
        return
    own: Any = optimizer.__dict__.get("step")  # schedules put one there, to count
    step = optimizer.step
    optimizer.step = lambda closure=None: way(optimizer, step)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
