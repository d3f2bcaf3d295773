"""Losses and gradients that are not finite: seen in the step that brings them, before the optimizer makes use of them.

All ranks have to decide alike, and no step has a collective for it. A rank whose own loss is not finite leaves word in
the store where the processes have met, and makes all gradients that it hands on not a number. Whoever finds that in
what it gets from the reduction asks the store: the word was there before the gradient came. Ranks that split layers
between them share their loss.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from shardwise.errors import ConfigError, DivergedError
from shardwise.parallel.grad_norm import local_gradients, total_norm
from shardwise.strategies.culprit import find, told
from shardwise.strategies.step import Step

log = logging.getLogger(__name__)

POLICIES = ("stop", "skip", "ignore")
SKIPPED_IN_A_ROW = 10
"""Skipped steps after which a run ends all the same: a bad batch is one step, a scaler finds its scale in a few, and
nothing moves any more that could bring the others back."""
TOLD = 10
"""Skipped steps that are told of one by one, which takes another pass each."""
TOLD_LATER = 100
"""Of those that come after, one in so many."""


class NonFinite:
    """What is done about losses and gradients that are not finite.

    Args:
        strategy: the MeshStrategy whose steps are looked at.
        policy: ``stop`` ends the training with a DivergedError before the step is made; ``skip`` leaves the step out,
            so that parameters and the optimizer's state stay as they are, and goes on; ``ignore`` never looks.

    With ``stop``, losses are looked at in every step (on a GPU, where each look waits for the device, in the steps that
    are logged), and gradients where they are clipped by their norm; elsewhere a gradient that is not finite shows in
    the next step's loss. With ``skip`` both are looked at in every step, which costs a norm of all gradients where
    they are not clipped by it. With a loss scaler (16-mixed) gradients are the scaler's affair, which skips itself.

    Raises:
        ConfigError: another policy.
    """

    def __init__(self, policy: str, strategy: Any) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"nonfinite={policy!r}: one of {', '.join(POLICIES)} is needed")
        self.policy = policy
        self.skipped_steps = 0
        """Steps that this process has left out."""
        self._strategy = strategy
        self._step: Step | None = None
        self._in_a_row = 0
        self._looking = False
        self._own: dict[int, float] = {}
        self._bad_loss = False
        self._norm: Tensor | None = None
        self._random: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._words: list[str] = []
        """What this rank has left in the store."""

    # ---- one step, in the order of the calls -------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """A step begins: its random state is kept, to run it again should it go wrong."""
        if self.policy == "ignore":
            return
        on_gpu = self._strategy.root_device.type == "cuda"
        self._looking = self.policy == "skip" or not on_gpu or _is_logged(self._strategy)
        self._step, self._own, self._bad_loss, self._norm = step, {}, False, None
        if self._looking:
            self._random = _random(self._strategy.root_device)

    def see_loss(self, index: int, loss: Tensor) -> None:
        """Look at this rank's loss of micro-batch ``index``, before its backward pass."""
        if not self._looking:
            return
        value = float(loss.detach())
        if math.isfinite(value):
            return
        if not self._own and self._strategy.dp_group is not None:
            self._words.append(_word(self._strategy))
            _store().set(self._words[-1], "1")
            self._handles = [leaf.register_hook(_not_a_number) for leaf in _leaves(self._strategy)]
        self._own[index] = value

    def after_backward(self) -> None:
        """All gradients of the step have arrived: whether any rank's loss was not finite.

        Raises:
            DivergedError: it was, and the policy is to stop; on every rank.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self._looking:
            return
        self._bad_loss = bool(self._own)
        if self._strategy.dp_group is not None and not self._bad_loss:
            self._bad_loss = _suspicious(self._strategy) and _store().check([_word(self._strategy)])
            if not self._bad_loss:
                self._forget_words()  # a reduction has gone by since: all ranks have asked
        if self._bad_loss and self.policy == "stop":
            self._end()
        if self._bad_loss and _scaler(self._strategy) is not None:  # it finds no finite gradient, and skips
            self._leave_out()

    def see_norm(self, norm: Tensor) -> None:
        """Take in the norm of all gradients, the same number on all ranks, before the optimizer makes use of them.

        Raises:
            DivergedError: it is not finite, and the policy is to stop; on every rank.
        """
        self._norm = norm
        wanted = self.policy == "stop" and self._looking and _scaler(self._strategy) is None
        if wanted and not math.isfinite(float(norm)):
            self._end(norm=float(norm))

    def skips(self) -> bool:
        """Whether this step is left out, with which its gradients go; all ranks agree.

        Raises:
            DivergedError: it is, and so were those before it.
        """
        if self.policy != "skip" or _scaler(self._strategy) is not None:
            return False
        norm = self._norm
        if norm is None and not self._bad_loss:
            norm = total_norm(local_gradients(_module(self._strategy).parameters()))
        if not self._bad_loss and norm is not None and math.isfinite(float(norm)):
            self._in_a_row = 0
            return False
        self._leave_out(norm=None if self._bad_loss or norm is None else float(norm))
        for parameter in _module(self._strategy).parameters():
            parameter.grad = None
        return True

    # ---- what follows ----------------------------------------------------------------------------------------------

    def _leave_out(self, *, norm: float | None = None) -> None:
        self.skipped_steps += 1
        self._in_a_row += 1
        last = self._in_a_row == SKIPPED_IN_A_ROW
        if not last and self.skipped_steps > TOLD and self.skipped_steps % TOLD_LATER:
            return
        line = self._find(norm=norm)
        if last:
            self._log_last(norm)
            raise DivergedError(
                f"{line}; {SKIPPED_IN_A_ROW} steps in a row were skipped, and nothing moves any more that could change "
                f"that\n{_ways(self._strategy, skip=False)}",
                step=_number(self._strategy),
            )
        if self._strategy.is_global_zero:
            log.warning("%s; the step is skipped (%d so far)", line, self.skipped_steps)

    def _end(self, *, norm: float | None = None) -> None:
        line = self._find(norm=norm)
        self._log_last(norm)
        raise DivergedError(f"{line}\n{_ways(self._strategy, skip=True)}", step=_number(self._strategy))

    def _find(self, *, norm: float | None) -> str:
        """What all ranks have found, as one line; collectives."""
        strategy = self._strategy
        assert self._step is not None
        now = _random(strategy.root_device)
        _set_random(self._random, strategy.root_device)
        with _unseen(strategy):
            mine = find(strategy, self._step, losses=self._own, gradients=norm is not None)
        _set_random(now, strategy.root_device)
        reports: list[Any] = [mine]
        if strategy.mesh is not None:
            reports = [None] * dist.get_world_size()
            dist.all_gather_object(reports, mine)
            self._forget_words()
        return told(reports, step=_number(strategy), hosts=strategy.hosts, norm=norm)

    def _log_last(self, norm: float | None) -> None:
        """The step with which training ends has a line among the metrics; a collective."""
        assert self._step is not None
        metrics = {"train/loss": float(self._step.global_loss())}
        if norm is not None:
            metrics["grad_norm"] = norm
        if self._strategy.is_global_zero:
            for logger in _module(self._strategy).trainer.loggers:
                with contextlib.suppress(Exception):  # there is something to tell already
                    logger.log_metrics(metrics, step=_number(self._strategy))

    def _forget_words(self) -> None:
        for word in self._words:
            with contextlib.suppress(RuntimeError):
                _store().delete_key(word)
        self._words = []


def _module(strategy: Any) -> LightningModule:
    assert strategy.lightning_module is not None
    return strategy.lightning_module


def _number(strategy: Any) -> int:
    return _module(strategy).trainer.global_step + 1  # Lightning counts the step when it is done


def _is_logged(strategy: Any) -> bool:
    every: int = _module(strategy).trainer.log_every_n_steps  # type: ignore[attr-defined]
    step = _number(strategy)
    return step == 1 or (every > 0 and step % every == 0)


def _scaler(strategy: Any) -> Any:
    return getattr(strategy.precision_plugin, "scaler", None)


def _store() -> Any:
    """Where the processes have met."""
    return dist.distributed_c10d._get_default_store()


def _word(strategy: Any) -> str:
    return f"shardwise/nonfinite/{_number(strategy)}"


def _leaves(strategy: Any) -> Iterator[Tensor]:
    """What this rank's gradients of the step gather at, before they travel."""
    if not isinstance(strategy.model, FSDPModule):
        yield from (parameter for parameter in _module(strategy).parameters() if parameter.requires_grad)
        return
    for part in _module(strategy).modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    leaf = getattr(held, "_unsharded_param", None)
                    if leaf is not None and leaf.requires_grad:
                        yield leaf


def _not_a_number(gradient: Tensor) -> Tensor:
    return gradient * math.nan


def _suspicious(strategy: Any) -> bool:
    """Whether what this rank has got from the reduction may come from a rank whose loss was not finite.

    Such a rank makes all of its gradients not a number, so one element tells; where ranks may use different
    parameters, one of each. A rank that holds no element of any gradient cannot know.
    """
    found = []
    for parameter in _module(strategy).parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part.numel():
            found.append(part[(0,) * part.dim()])
            if not strategy._find_unused_parameters:
                break
    return not found or not all(map(math.isfinite, map(float, found)))


@contextlib.contextmanager
def _unseen(strategy: Any) -> Iterator[None]:
    """A step that is run again leaves nothing: no buffers, nothing in metrics, no logged values, no gradients (a
    scaler's are put back)."""
    module = _module(strategy)
    own, leaves = strategy.own_gradients, strategy._leaves
    wanted = own is not None and own.wanted
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    metrics = [(m, _states(m), m._update_count) for m in module.modules() if isinstance(m, Metric)]
    logs = vars(module).get("log")
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    if own is not None:
        own.wanted = False
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        if leaves is not None:
            leaves.hand_over()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for name, buffer in module.named_buffers():
            with torch.no_grad():
                buffer.copy_(buffers[name])
        for metric, states, updates in metrics:
            metric._update_count, metric._computed = updates, None
            for name, state in states.items():
                setattr(metric, name, state)
        if own is not None:
            own.wanted = wanted
        del module.log
        if logs is not None:
            module.log = logs  # type: ignore[method-assign]


def _states(metric: Metric) -> dict[str, Any]:
    """A copy of what a metric has added up."""
    held = {name: getattr(metric, name) for name in metric._defaults}
    return {n: v.detach().clone() if isinstance(v, Tensor) else list(v) for n, v in held.items()}


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _ways(strategy: Any, *, skip: bool) -> str:
    """What to try."""
    module: Any = strategy.lightning_module
    optimizers = module.trainer.optimizers
    rate = f" (it is {float(optimizers[0].param_groups[0]['lr']):g} in this step)" if optimizers else ""
    ways = [f"a smaller optimizer.lr{rate}"]
    if not module.trainer.gradient_clip_val or module.trainer.gradient_clip_val > 1:
        ways.append("trainer.gradient_clip_val=1.0")
    if str(strategy.precision_plugin.precision) in ("16-mixed", "bf16-true"):
        ways.append("precision=bf16-mixed")
    if skip:
        ways.append("monitor.nonfinite=skip, which leaves such steps out")
    return f"try {', or '.join(ways)}"
