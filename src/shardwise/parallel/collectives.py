"""The collectives of tensor parallelism: what each does forward, and what its transpose does backward.

Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053, section 3) call the first pair f and g; Korthikanti et al. 2022
(arXiv 2205.05198, section 4.2.1) replace it by a pair that moves the same bytes and splits the activations between the
tensor-parallel regions along the sequence.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as functional

from shardwise.errors import ConfigError

SEQUENCE_DIM = 1
"""The dim of tokens in activations (B, T, D)."""

# torch 2.14 renamed them.
gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def enter(x: Tensor, group: dist.ProcessGroup, *, sequence: bool) -> Tensor:
    """Into a tensor-parallel region.

    Without ``sequence`` (f): forward the identity, backward an all-reduce of the gradient. With it: forward an
    all-gather of (B, T/n, D) to (B, T, D), backward a reduce-scatter.
    """
    return _Gather.apply(x, group) if sequence else _Enter.apply(x, group)


def leave(x: Tensor, group: dist.ProcessGroup, *, sequence: bool) -> Tensor:
    """Out of a tensor-parallel region, in which ``x`` is this rank's summand.

    Without ``sequence`` (g): forward an all-reduce, backward the identity. With it: forward a reduce-scatter of
    (B, T, D) to (B, T/n, D), backward an all-gather.

    Raises:
        ConfigError: T does not divide by the ranks of ``group``.
    """
    return _Scatter.apply(x, group) if sequence else _Leave.apply(x, group)


def what_bypasses(out: Tensor) -> tuple[bool, int]:
    """What of ``out`` has not come through ``leave``: whether any has entered, and how many parameters it uses."""
    entered, parameters = False, 0
    seen: set[Any] = set()
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.name()
        if kind in ("_LeaveBackward", "_ScatterBackward"):
            continue
        if kind in ("_EnterBackward", "_GatherBackward"):
            entered = True
            continue
        parameters += kind.endswith("AccumulateGrad")
        nodes.extend(following for following, _ in node.next_functions)
    return entered, parameters


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x.contiguous(), "sum", group)
    # Not in place: selective checkpointing, or the user, may have kept the summand.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, T/n, ...) to (B, T, ...), with one copy: ranks are the outer part of the sequence."""
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x.contiguous(), SEQUENCE_DIM, group)
    ranks = group.size()
    parts = x.new_empty((ranks, *x.shape))
    gather_parts(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, T, ...) to (B, T/n, ...), with one copy."""
    ranks, tokens = group.size(), x.size(SEQUENCE_DIM)
    if tokens % ranks:
        raise ConfigError(
            f"a sequence of {tokens} tokens does not divide over strategy.tp={ranks}: type "
            f"strategy.sequence_parallel=false"
        )
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x.contiguous(), "sum", SEQUENCE_DIM, group)
    parts = x.unflatten(SEQUENCE_DIM, (ranks, -1)).movedim(SEQUENCE_DIM, 0).contiguous()
    part = x.new_empty(parts.shape[1:])
    scatter_sums(part, parts.flatten(0, 1), group=group)
    return part
