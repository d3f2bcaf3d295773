"""DTensor parameters, and the local tensors on which the forward pass of a split module runs.

While a module runs, its parameters are shadowed by what this rank holds, so that any forward code works. Sending every
operation through DTensor costs more than the communication on small models.

The gradient of a parameter that is replicated, but sees only this rank's part of the activations (a norm on a part of
the sequence, anything whole inside a region), is a summand. It is declared whole nevertheless, and
``sum_partial_gradients`` makes it so once a step, for all of them in one all-reduce.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from shardwise.errors import ConfigError


def split_parameters(
    module: nn.Module,
    placements: Mapping[str, Placement],
    *,
    mesh: DeviceMesh,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[nn.Module, Any, Tensor], Any] | None = None,
    hidden: tuple[str, ...] = (),
) -> None:
    """Make a module's own parameters DTensors, and let its forward pass see their local tensors.

    Args:
        module: its parameters are replaced in place.
        placements: own parameter -> how it is placed on ``mesh``.
        mesh: the tensor-parallel axis.
        before: changes the first input.
        after: changes the output, given the module and its (changed) first input, while local tensors are to be seen.
        hidden: parameters that the forward pass is not to see.
    """
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        split = nn.Parameter(_placed(parameter.detach(), mesh, placement), requires_grad=parameter.requires_grad)
        module._parameters[name] = split
    seen = [name for name in placements if name not in hidden]

    def enter_module(module: nn.Module, args: tuple) -> tuple:
        # It may be called from inside itself, as training_step calls the root.
        module.__dict__["_depth"] = module.__dict__.get("_depth", 0) + 1
        show(module, seen)
        for name in hidden:
            module.__dict__[name] = None
        if before is None:
            return args
        if not args:
            raise ConfigError(
                f"strategy.plan: {type(module).__name__} needs its input as its first positional argument"
            )
        return before(args[0]), *args[1:]

    def leave_module(module: nn.Module, args: tuple, out: Any) -> Any:
        try:
            return out if after is None or out is None else after(module, out, args[0])
        finally:
            module.__dict__["_depth"] -= 1
            if not module.__dict__["_depth"]:
                hide(module)

    if placements or before is not None:
        module.register_forward_pre_hook(enter_module)
        module.register_forward_hook(leave_module, always_call=True)


def packed_part(tensor: Tensor, *, parts: int, rank: int, ranks: int) -> Tensor:
    """The rows of ``rank`` out of each of the ``parts`` that are packed along the first dim of ``tensor``."""
    return tensor.unflatten(0, (parts, ranks, -1))[:, rank].flatten(0, 1).contiguous()


def _placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """The DTensor whose local part is this rank's of ``tensor``; no collective."""
    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    part = packed_part(tensor, parts=factor, rank=mesh.get_local_rank(), ranks=mesh.size())
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def show(module: nn.Module, names: Iterable[str]) -> None:
    """Let ``module`` see the local tensors of these of its parameters, until ``hide``."""
    for name in names:
        if module._parameters.get(name) is not None:
            module.__dict__[name] = local_tensor(module, name)


def hide(module: nn.Module) -> None:
    """Let ``module`` see its parameters again."""
    for name in module._parameters:
        module.__dict__.pop(name, None)


class _Local(torch.autograd.Function):
    """``DTensor.to_local``, whose general backward pass takes more than twice the time (54 us more a parameter)."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor(grad, ctx.spec, requires_grad=False)


class Leaves:
    """The local tensors of DTensors as leaves of the tape: gradients gather there, and are handed over once a step.

    A parameter that no FSDP gathers is the same memory in every pass, so the way from it to its local tensor and back
    need not be taken by each micro-batch. Hooks on the parameter itself do not see these gradients.
    """

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def attach(self, root: nn.Module) -> None:
        """Let the split modules of ``root`` compute on these leaves."""
        for module in root.modules():
            if module._parameters:
                module.__dict__["_leaves"] = self

    def of(self, parameter: Any) -> Tensor:
        """The leaf that shares its memory with the local tensor of ``parameter``."""
        source, leaf = self._known.get(parameter, (None, None))
        if source is not parameter._local_tensor or leaf is None or leaf.requires_grad != parameter.requires_grad:
            if leaf is not None:
                _hand_over(leaf, parameter)
            source = parameter._local_tensor
            leaf = source.detach().requires_grad_(parameter.requires_grad)
            self._known[parameter] = (source, leaf)
        return leaf

    def hand_over(self) -> None:
        """Make the gradients that have gathered those of the parameters."""
        for parameter, (_, leaf) in self._known.items():
            _hand_over(leaf, parameter)


def _hand_over(leaf: Tensor, parameter: Any) -> None:
    if leaf.grad is not None:
        gradient = DTensor(leaf.grad, parameter._spec, requires_grad=False)
        # What is there already comes from a use of the parameter outside of its module.
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        leaf.grad = None


def local_tensor(module: nn.Module, name: str) -> Tensor:
    """What this rank holds of a parameter, on the tape."""
    parameter = module._parameters[name]
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()
    leaves: Leaves | None = module.__dict__.get("_leaves")
    return _Local.apply(parameter) if leaves is None else leaves.of(parameter)


# ---- gradients that are summands -----------------------------------------------------------------------------------


def partial_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of ``root`` whose gradients are this rank's summand until ``sum_partial_gradients``."""
    for module in root.modules():
        for name in getattr(module, "_partial_gradients", ()):
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter.requires_grad:
                yield parameter


def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up in place, over ``group``, the gradients of ``partial_parameters``; one all-reduce for each format."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(
            parts, [f.view_as(part) for f, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
        )


def mark_partial(module: nn.Module, *names: str) -> None:
    """Say of which parameters of ``module`` the gradients are summands."""
    module._partial_gradients = names  # type: ignore[assignment]
