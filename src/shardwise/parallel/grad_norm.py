"""Norms and clipping of gradients that live on several meshes at once.

Local norms are summed over the axes that shard a gradient, and over no other: replicas count once. The same arithmetic
serves plain tensors, so that one device and every layout clip alike.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[Tensor]) -> dict[tuple, list[Tensor]]:
    """This rank's parts of the gradients, by the process groups over which they are sharded."""
    by_groups: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            by_groups.setdefault((), []).append(gradient)
            continue
        if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        mesh = gradient.device_mesh
        # A strided shard is no subclass of Shard: whatever is not replicated holds a part only.
        groups = tuple(
            mesh.get_group(axis) for axis, p in enumerate(gradient.placements) if not isinstance(p, Replicate)
        )
        by_groups.setdefault(groups, []).append(gradient.to_local())
    return by_groups


def total_norm(by_groups: dict[tuple, list[Tensor]]) -> Tensor:
    """The 2-norm over all gradients as one vector: a 0-dim tensor in float32 or wider, the same on every rank."""
    squares = []
    for groups, gradients in by_groups.items():
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        filled = [gradient for gradient in gradients if gradient.numel()]
        if filled:
            square = torch.stack(torch._foreach_norm(filled, 2, dtype=dtype)).square().sum()
        else:
            square = torch.zeros((), dtype=dtype, device=gradients[0].device)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def own_squares(by_groups: dict[tuple, list[Tensor]], *, ranks: int) -> Tensor:
    """Squares of 2-norms, of this rank's own parts: (2,) float64; no collective.

    The first is that of all parts that it holds. The second is its summand of the square over all gradients as one
    vector: what ``ranks`` ranks have here adds up to it. Each part stands on all ranks over which it is not sharded.
    """
    squares = [torch.zeros(2, dtype=torch.float64)]
    for groups, gradients in by_groups.items():
        square = total_norm({(): gradients}).double().square()
        share = torch.Size(group.size() for group in groups).numel() / ranks
        squares.append(torch.stack([square, square * share]))
    return torch.stack([pair.to(squares[-1].device) for pair in squares]).sum(0)


def clip_by_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``; returns the norm before.

    The factor is ``max_norm / (norm + 1e-6)`` where that is below 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    by_groups = local_gradients(parameters)
    norm = total_norm(by_groups)
    _scale_(by_groups, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def scale_gradients_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by ``factor``, a 0-dim tensor."""
    _scale_(local_gradients(parameters), factor)


def _scale_(by_groups: dict[tuple, list[Tensor]], factor: Tensor) -> None:
    for gradients in by_groups.values():
        # Formats differ only where the model mixes them; a product takes the format of the gradient.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def clip_by_value_(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of every gradient in place to [-limit, limit]."""
    for gradients in local_gradients(parameters).values():
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)
