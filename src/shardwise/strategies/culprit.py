"""Which layer is the first whose numbers are not finite: a step is run again, and every layer looked at on the way."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shardwise.parallel.fsdp import reshard
from shardwise.strategies.step import Step

NOWHERE = 2**60
"""Place in the order of what was looked at, of a rank that has found nothing."""


@dataclass(frozen=True)
class Report:
    """What one rank has found out about a step."""

    losses: dict[int, float]
    """Micro-batch -> its loss on this rank, of those that are not finite."""
    micro_batches: int
    place: str
    """What came first, as a person reads it; empty if nothing was found."""
    order: int
    """How early that is; it counts alike on all ranks."""


def find(strategy: Any, step: Step, *, losses: Mapping[int, float], gradients: bool) -> Report:
    """Run the step's micro-batches again, on all ranks, until this rank's first number that is not finite is known.

    Args:
        strategy: the MeshStrategy, with the random state of the step's start, and with gradients that nobody misses.
        step: its batches are still there.
        losses: this rank's, by micro-batch, of those that are not finite.
        gradients: whether it was a gradient, so that the backward pass has to be run too.
    """
    module = strategy.lightning_module
    assert module is not None
    prefix = "model." if isinstance(getattr(module, "model", None), nn.Module) else ""
    seen = _Seen()
    _look_at_parameters(module, seen, prefix)
    for index, batch in enumerate(step.batches):
        seen.look(f"the batch{_which(index, len(step.batches))} holds values that are not finite", tree_leaves(batch))
        grad = contextlib.nullcontext() if gradients else torch.no_grad()
        with _watched(module, seen, prefix, backward=gradients), grad, _eager(strategy):
            with strategy.precision_plugin.train_step_context():
                output = _training_step(strategy, batch, step.args)
            loss = _loss_of(output)
            seen.look("the loss itself (every layer's output was finite)", [loss])
            if gradients:
                strategy.precision_plugin.backward(loss, module, None)
    if gradients:
        if strategy._leaves is not None:
            strategy._leaves.hand_over()
        _look_at_gradients(module, seen, prefix)
    else:
        reshard(module)
    return Report(dict(losses), len(step.batches), seen.place, seen.order)


def told(reports: Sequence[Report], *, step: int, hosts: Sequence[str], norm: float | None) -> str:
    """One line: what is not finite at ``step``, on which rank, and where that began.

    Args:
        reports: of all ranks.
        hosts: of the ranks; empty with one process.
        norm: of the gradients, where these are what is not finite.
    """
    bad = [rank for rank, report in enumerate(reports) if report.losses]
    if norm is not None or not bad:
        bad = [rank for rank, report in enumerate(reports) if report.order < NOWHERE] or [0]
    first = min(bad, key=lambda rank: (reports[rank].order, rank))
    report = reports[first]
    index, value = next(iter(report.losses.items()), (0, math.nan))
    what = f"loss is {value}" if norm is None else f"the norm of the gradients is {norm} (losses are finite)"
    where = ""
    if len(reports) > 1:
        where = f" on rank {first}" + (f" ({hosts[first]})" if hosts else "")
        if len(bad) > 1 and norm is None:
            where += f" and {len(bad) - 1} other{'s' if len(bad) > 2 else ''}"
    micro = _which(index, report.micro_batches) if norm is None else ""
    found = f"first in {report.place}" if report.place else "not found again when the step was run a second time"
    return f"{what} at step {step}{where}{micro}: {found}"


class _Seen:
    """The first of the things looked at that is not finite; what waits for the device does so at once."""

    def __init__(self) -> None:
        self.place = ""
        self.order = NOWHERE
        self._count = 0

    def look(self, place: str, values: Any) -> None:
        """Look at tensors, unless something was found before."""
        if not self.next():
            return
        if not _finite(values):
            self.found(place)

    def next(self) -> bool:
        """Count one more thing that is looked at; whether that is still of interest."""
        self._count += 1
        return not self.place

    def found(self, place: str) -> None:
        if not self.place:
            self.place, self.order = place, self._count


def _look_at_parameters(module: nn.Module, seen: _Seen, prefix: str) -> None:
    for name, parameter in module.named_parameters():
        seen.look(f"{name.removeprefix(prefix)}, a parameter (it was not finite before this step)", [parameter])


def _look_at_gradients(module: nn.Module, seen: _Seen, prefix: str) -> None:
    """Of a layer whose input asks for no gradient, only those of its parameters tell; the last layer comes first."""
    for name, parameter in reversed(list(module.named_parameters())):
        seen.look(f"the gradient of {name.removeprefix(prefix)}", [parameter.grad])


@contextlib.contextmanager
def _watched(module: nn.Module, seen: _Seen, prefix: str, *, backward: bool) -> Iterator[None]:
    """Every layer tells, after its forward pass, whether its numbers are finite; inner layers before outer ones."""
    handles = []
    for name, layer in module.named_modules():
        short = name.removeprefix(prefix)
        if name and short != prefix.rstrip("."):  # what is left to the outermost ones is the loss
            handles.append(layer.register_forward_hook(partial(_after, short, seen, backward), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after(name: str, seen: _Seen, backward: bool, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if seen.next() and not _finite(tree_leaves(output)):
        whole = _finite(tree_leaves((args, kwargs)))
        seen.found(f"{name} (output of the layer; {'its input was finite' if whole else 'its input was not either'})")
    if not backward:
        return
    # Of what comes in as a gradient of the output, and what goes out as one of the input.
    fine = [True]

    def comes(gradient: Tensor) -> None:
        fine[0] = fine[0] and _finite([gradient])

    def goes(gradient: Tensor) -> None:
        if seen.next() and fine[0] and not _finite([gradient]):
            seen.found(f"{name} (gradient of the layer's input; that of its output was finite)")

    for tensors, hook in ((tree_leaves(output), comes), (tree_leaves((args, kwargs)), goes)):
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)


def _finite(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            part = value.detach()
            part = part.to_local() if isinstance(part, DTensor) else part
            if not bool(part.isfinite().all()):
                return False
    return True


def _training_step(strategy: Any, batch: Any, args: tuple) -> Any:
    if isinstance(strategy.model, DistributedDataParallel):  # it would begin to wait for gradients
        module: Any = strategy.lightning_module
        return module.training_step(batch, *args)
    return strategy._run("training_step", batch, *args)


def _loss_of(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, Mapping) else output


def _eager(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    """Compiled blocks run as they are written, so that their layers can be looked at."""
    stance: Callable[..., Any] = torch.compiler.set_stance
    return stance("force_eager") if strategy._layout.compile else contextlib.nullcontext()


def _which(index: int, number: int) -> str:
    return f" (micro-batch {index + 1} of {number})" if number > 1 else ""
