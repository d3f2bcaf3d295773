"""Muon for a whole model: the matrices of hidden layers by Muon, everything else by AdamW, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.parallel.sharded_step import stepping_right

HIDDEN = "hidden"
"""Key of a group: whether it holds matrices of hidden layers."""


class Muon(Optimizer):
    """``torch.optim.Muon`` for the groups with ``hidden=True``, ``torch.optim.AdamW`` for the others.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of a matrix. It is
    made for hidden layers; embeddings, the output layer, norms and biases want another optimizer. With
    ``match_rms_adamw`` an update has the size of one of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), so
    that both take the same learning rate and weight decay. Parameters may be sharded in any way.

    Args:
        params: groups, each with ``hidden``; ``build_optimizer`` makes them.
        lr: of both.
        weight_decay: decoupled, of both.
        momentum: of Muon; likewise the next four.
        nesterov: look ahead along the momentum.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: of an iteration.
        ns_eps: least norm of a matrix that is normalised.
        adjust_lr_fn: ``match_rms_adamw``, ``original`` or ``spectral_unclamped``: the rate by a matrix's shape.
        betas: of AdamW; likewise the next two.
        eps: added to the root of the second moment.
        foreach: update several parameters at once.

    Raises:
        ConfigError: a group that does not say what it holds.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool | None = None,
    ) -> None:
        groups = list(params)
        if not all(isinstance(group, dict) and HIDDEN in group for group in groups):
            raise ConfigError(
                "Muon takes groups that say whether they are hidden matrices: let build_optimizer make it"
            )
        # Their constructors check the numbers and know the keys of their groups; neither holds a parameter of its own.
        self._muon = torch.optim.Muon(
            [torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=ns_eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach
        )
        groups = [{**(self._muon if group[HIDDEN] else self._adamw).defaults, **group} for group in groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` does, which is called first."""
        result: Tensor | None = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for inner, hidden in ((self._muon, True), (self._adamw, False)):
            # Both work on this optimizer's groups and state, which loading a checkpoint replaces.
            inner.param_groups = [group for group in self.param_groups if group[HIDDEN] is hidden]
            inner.state = self.state
            if inner.param_groups:
                with stepping_right(inner):
                    inner.step()
        return result
