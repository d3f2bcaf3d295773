"""How one module is split over the tensor-parallel ranks: the styles that a plan names.

Parameters are DTensors, so that clipping, optimizers, FSDP and checkpoints see one kind of tensor. The computation runs
on their local tensors: while a module runs, its parameters are shadowed by what this rank holds, so that any forward
code works, and the few collectives stand where the style puts them. Sending every operation through DTensor costs more
than the communication on small models.

The gradient of a parameter that is replicated, but sees only this rank's part of the activations (a norm on a part of
the sequence, anything whole inside a region), is a summand. It is declared whole nevertheless, and
``sum_partial_gradients`` makes it so once a step, for all of them in one all-reduce.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import ConfigError
from shardwise.parallel.collectives import enter, leave
from shardwise.parallel.cross_entropy import VocabularyShard, shard_bounds


class Noise:
    """Lets what is drawn between ``fork`` and ``join`` differ between tensor-parallel ranks, and repeat.

    The seed is drawn from the common generator, so that activation checkpointing, which restores that one, finds it
    again; the common generator itself moves alike on every rank.
    """

    def __init__(self, *, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._states: list[tuple[Tensor, Tensor | None, torch.device]] = []

    def fork(self, device: torch.device) -> None:
        """From here on draw what the other ranks do not; on the CPU and on ``device``."""
        seed = int(torch.randint(2**31, (1,))) * self._ranks + self._rank
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._states.append((torch.get_rng_state(), cuda, device))
        torch.manual_seed(seed)

    def join(self) -> None:
        """Draw again what all ranks draw; nothing if that is so."""
        if self._states:
            cpu, cuda, device = self._states.pop()
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)

    def inside(self, module: nn.Module) -> None:
        """Fork when ``module`` starts in training, and join when it ends, if nothing has done so before."""

        def fork(module: nn.Module, args: tuple) -> None:
            if module.training:
                self.fork(args[0].device)

        module.register_forward_pre_hook(fork)
        module.register_forward_hook(lambda module, args, out: self.join(), always_call=True)


def is_noisy(module: nn.Module) -> bool:
    """Whether something in ``module`` drops: torch's layers, and others by the name of what holds their rate."""
    return any(
        inner.p > 0
        if isinstance(inner, nn.modules.dropout._DropoutNd)
        else any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(inner).items())
        for inner in module.modules()
    )


@dataclass(frozen=True)
class Region:
    """Where a module stands."""

    mesh: DeviceMesh
    """The tensor-parallel axis."""
    sequence: bool
    """Whether sequences are split outside of regions."""
    inside: bool
    """Whether the module lies in a container whose input has entered a region for all of it."""
    noise: Noise | None
    """Of that container (or of the module, if it is one), which draws for itself; None if nothing is drawn there."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel ranks."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The tensor-parallel degree."""
        return self.mesh.size()

    def enter(self, x: Tensor) -> Tensor:
        """Into the region, unless a container has done it."""
        return x if self.inside else enter(x, self.group, sequence=self.sequence)

    def leave(self, x: Tensor) -> Tensor:
        """Out of the region: the sum over the ranks, on which all draw alike again."""
        if self.noise is not None:
            self.noise.join()
        return leave(x, self.group, sequence=self.sequence)


def placements(style: str, module: nn.Module) -> dict[str, Placement]:
    """Own parameter of ``module`` -> how ``style`` places it on the tensor-parallel axis."""
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    found: dict[str, Placement] = dict.fromkeys(own, Replicate())
    if style in ("colwise", "vocab_embedding", "vocab_output"):
        return dict.fromkeys(own, Shard(0))
    if style == "rowwise":
        return found | {"weight": Shard(1)}
    if style == "packed_attention":
        # Each of the three projections is split. Their bias is small, and whole; each rank uses its part of it.
        return found | {"in_proj_weight": _StridedShard(0, split_factor=3)}
    return found


def colwise(module: nn.Module, at: Region) -> None:
    """Split the output features of a linear layer: weight (out/n, in), bias (out/n); the output stays split."""
    _split(module, at, "colwise", before=lambda x: at.enter(_whole_input(module, x)))


def _whole_input(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a linear layer that takes all features."""
    assert isinstance(module, nn.Linear)
    if x.size(-1) != module.in_features:
        raise ConfigError(
            f"strategy.plan: a layer of {module.in_features} input features gets {x.size(-1)}: what is before it is "
            f"split, so it has to be rowwise, or what is before it must not be colwise"
        )
    return x


def rowwise(module: nn.Module, at: Region) -> None:
    """Split the input features of a linear layer: weight (out, in/n), input (.., in/n); the outputs are added up.

    The bias is added once, after the sum.
    """
    assert isinstance(module, nn.Linear)
    biased = module.bias is not None
    part = module.in_features // at.size

    def before(x: Tensor) -> Tensor:
        if x.size(-1) != part:
            raise ConfigError(
                f"strategy.plan: a rowwise layer gets {x.size(-1)} features and not its part of {module.in_features}, "
                f"{part}: the layer before it has to be colwise"
            )
        return x

    def after(out: Tensor, x: Tensor) -> Tensor:
        out = at.leave(out)
        return out + _local(module, "bias") if biased else out

    _split(module, at, "rowwise", before=before, after=after, hidden=("bias",) if biased else ())
    if biased and at.sequence:
        _mark_partial(module, "bias")


def vocab_embedding(module: nn.Module, at: Region) -> None:
    """Split the rows of an embedding: each rank looks up the tokens it holds, and what the ranks found is added up."""
    assert isinstance(module, nn.Embedding)
    start, stop = shard_bounds(module.num_embeddings, rank=at.rank, ranks=at.size)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < stop else None
    foreign: list[Tensor] = []

    def before(tokens: Tensor) -> Tensor:
        foreign.append((tokens < start) | (tokens >= stop))
        return (tokens - start).masked_fill(foreign[-1], 0)

    def after(out: Tensor, tokens: Tensor) -> Tensor:
        return at.leave(out.masked_fill(foreign.pop().unsqueeze(-1), 0))

    _split(module, at, "vocab_embedding", before=before, after=after)


def vocab_output(module: nn.Module, at: Region) -> None:
    """Split the vocabulary of the output layer: logits (.., V) of which this rank has (.., V/n), as a DTensor.

    A layer with an attribute ``shard`` gets its :class:`VocabularyShard` there, to compute losses itself.
    """
    assert isinstance(module, nn.Linear)
    start, _ = shard_bounds(module.out_features, rank=at.rank, ranks=at.size)
    shard = VocabularyShard(at.group, start, module.out_features)
    if hasattr(module, "shard"):
        module.shard = shard  # type: ignore[assignment]

    def after(out: Tensor, x: Tensor) -> Tensor:
        if out.dim() != x.dim():
            return out  # losses, not logits
        shape = (*out.shape[:-1], shard.vocab)
        last = out.dim() - 1
        return DTensor.from_local(
            out, at.mesh, [Shard(last)], run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )

    _split(module, at, "vocab_output", before=at.enter, after=after)


def sequence(module: nn.Module, at: Region) -> None:
    """A norm or dropout between regions, on this rank's part of the sequence where sequences are split."""
    replicate(module, at)
    if at.sequence:
        local(module, at)


def replicate(module: nn.Module, at: Region) -> None:
    """The same parameters on every rank."""
    linear = isinstance(module, nn.Linear)
    _split(module, at, "replicate", before=(lambda x: _whole_input(module, x)) if linear else None)
    if at.sequence or at.inside:
        _mark_partial(module, *placements("replicate", module))


def region(module: nn.Module, at: Region) -> None:
    """A container whose first input enters the region once, for all column-split layers in it.

    It holds one row-split layer, which leaves the region again.
    """
    _split(module, at, "region", before=at.enter)
    _mark_partial(module, *placements("region", module))
    if at.noise is not None:
        at.noise.inside(module)


def local(module: nn.Module, at: Region) -> None:
    """A module on split features, between a column-split and a row-split layer, such as dropout; without parameters."""
    if at.noise is None and is_noisy(module):
        Noise(rank=at.rank, ranks=at.size).inside(module)


def packed_attention(module: nn.Module, at: Region) -> None:
    """``torch.nn.MultiheadAttention``, which packs its three projections into one matrix: this rank's heads of each.

    ``in_proj_weight`` (3 D, D) is split inside each of its three parts; self-attention without masks only.
    """
    assert isinstance(module, nn.MultiheadAttention)
    heads = module.num_heads // at.size

    def forward(query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True, **options: Any) -> Any:
        given = [name for name, option in options.items() if option is not None and option is not False]
        if need_weights or given or key is not query or value is not query:
            raise NotImplementedError(
                "packed_attention: only attention(x, x, x, need_weights=False) without masks is split over heads"
            )
        x = at.enter(query)
        x = x if module.batch_first else x.transpose(0, 1)
        bias = module.in_proj_bias
        if bias is not None:
            bias = bias.unflatten(0, (3, at.size, -1))[:, at.rank].flatten()
        packed = nn.functional.linear(x, module.in_proj_weight, bias)
        q, k, v = packed.unflatten(-1, (3, heads, module.head_dim)).permute(2, 0, 3, 1, 4)
        rate = module.dropout if module.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        out = module.out_proj(mixed.transpose(1, 2).flatten(-2))
        return (out if module.batch_first else out.transpose(0, 1)), None

    if module.in_proj_bias is not None:
        _mark_partial(module, "in_proj_bias")
    _split(module, at, "packed_attention")
    if at.noise is not None:
        at.noise.inside(module)
    module.forward = forward  # type: ignore[method-assign,assignment]


STYLES: dict[str, Callable[[nn.Module, Region], None]] = {
    "colwise": colwise,
    "rowwise": rowwise,
    "vocab_embedding": vocab_embedding,
    "vocab_output": vocab_output,
    "sequence": sequence,
    "replicate": replicate,
    "region": region,
    "local": local,
    "packed_attention": packed_attention,
}
"""Name in a plan -> what it does to a module."""

CONTAINERS = ("region", "packed_attention")
"""Styles that enter the region for everything inside a module."""


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


def _mark_partial(module: nn.Module, *names: str) -> None:
    module._partial_gradients = names  # type: ignore[assignment]


# ---- parameters and their local tensors ----------------------------------------------------------------------------


class _Local(torch.autograd.Function):
    """``DTensor.to_local``, whose general backward pass takes more than twice the time (54 us more a parameter)."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor(grad, ctx.spec, requires_grad=False)


class Leaves:
    """The local tensors of DTensors as leaves of the tape: gradients gather there, and are handed over once a step.

    A parameter that no FSDP gathers is the same memory in every pass, so the way from it to its local tensor and back
    need not be taken by each micro-batch.
    """

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def attach(self, root: nn.Module) -> None:
        """Let the split modules of ``root`` compute on these leaves."""
        for module in root.modules():
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


def _local(module: nn.Module, name: str) -> Tensor:
    """What this rank holds of a parameter, on the tape."""
    parameter = module._parameters[name]
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()
    leaves: Leaves | None = module.__dict__.get("_leaves")
    return _Local.apply(parameter) if leaves is None else leaves.of(parameter)


def _split(
    module: nn.Module,
    at: Region,
    style: str,
    *,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Any, Tensor], Any] | None = None,
    hidden: tuple[str, ...] = (),
) -> None:
    """Make a module's own parameters DTensors, and let its forward pass see their local tensors.

    Args:
        module: its parameters are replaced in place.
        at: where it stands.
        style: says how each parameter is placed.
        before: changes the first input.
        after: changes the output, given the (changed) first input, while the local tensors are still to be seen.
        hidden: parameters that the forward pass is not to see.
    """
    placed = placements(style, module)
    for name, placement in placed.items():
        parameter = module.get_parameter(name)
        split = nn.Parameter(_placed(parameter.detach(), at, placement), requires_grad=parameter.requires_grad)
        module.register_parameter(name, split)
    seen = [name for name in placed if name not in hidden]

    def enter_module(module: nn.Module, args: tuple) -> tuple:
        shown = module.__dict__
        for name in seen:
            shown[name] = _local(module, name)
        for name in hidden:
            shown[name] = None
        return args if before is None else (before(args[0]), *args[1:])

    def leave_module(module: nn.Module, args: tuple, out: Any) -> Any:
        try:
            return out if after is None or out is None else after(out, args[0])
        finally:
            for name in placed:
                module.__dict__.pop(name, None)

    if placed or before is not None:
        module.register_forward_pre_hook(enter_module)
        module.register_forward_hook(leave_module, always_call=True)


def _placed(tensor: Tensor, at: Region, placement: Placement) -> DTensor:
    """The DTensor whose local part is this rank's of ``tensor``; no collective."""
    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return distribute_tensor(tensor, at.mesh, [placement], src_data_rank=None)
    part = tensor.unflatten(0, (factor, at.size, -1))[:, at.rank].flatten(0, 1).contiguous()
    return DTensor.from_local(
        part, at.mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)
