"""How one module is split over the tensor-parallel ranks: the styles that a plan names.

Parameters become DTensors, so that clipping, optimizers, FSDP and checkpoints see one kind of tensor; the computation
runs on their local tensors (local_tensors.py), and the few collectives stand where the style puts them.

====================  ===============================================================================================
``colwise``           splits output features, so whole heads; its input is the whole one
``rowwise``           takes features that are split, and adds up what comes out
``region``            a container: its input enters once, for all colwise layers in it
``packed_attention``  ``nn.MultiheadAttention``, which packs queries, keys and values in one matrix
``local``             dropout on features that are split: every rank draws its own
``vocab_embedding``   splits the vocabulary of an embedding, of any size
``vocab_output``      splits the vocabulary of the logits, which are never gathered
``sequence``          norms and dropout on a part of the sequence each
``replicate``         whole on every rank
====================  ===============================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import ConfigError
from shardwise.parallel.collectives import enter, leave, what_bypasses
from shardwise.parallel.cross_entropy import VocabularyShard, shard_bounds
from shardwise.parallel.local_tensors import hide, local_tensor, mark_partial, show, split_parameters
from shardwise.parallel.noise import Noise, is_noisy


@dataclass(frozen=True)
class Region:
    """Where a module stands."""

    name: str
    """Of the module."""
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
    _split(module, at, "colwise", before=lambda x: at.enter(_whole_input(module, at, x)))


def _whole_input(module: nn.Module, at: Region, x: Tensor) -> Tensor:
    """The input of a linear layer that takes all features."""
    assert isinstance(module, nn.Linear)
    if x.size(-1) != module.in_features:
        raise ConfigError(
            f"strategy.plan: {at.name} takes {module.in_features} features and gets {x.size(-1)}: the layer before it "
            f"is colwise, so it has to be rowwise, or that one must not be colwise"
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
                f"strategy.plan: {at.name} is rowwise, so it takes {part} of {module.in_features} features, and gets "
                f"{x.size(-1)}: the layer before it has to be colwise"
            )
        return x

    def after(module: nn.Module, out: Tensor, x: Tensor) -> Tensor:
        out = at.leave(out)
        return out + local_tensor(module, "bias") if biased else out

    _split(module, at, "rowwise", before=before, after=after, hidden=("bias",) if biased else ())
    if biased and at.sequence:
        mark_partial(module, "bias")


def vocab_embedding(module: nn.Module, at: Region) -> None:
    """Split the rows of an embedding: each rank looks up the tokens it holds, and what the ranks found is added up."""
    assert isinstance(module, nn.Embedding)
    start, stop = shard_bounds(module.num_embeddings, rank=at.rank, ranks=at.size)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < stop else None
    foreign: dict[str, Tensor] = {}

    def before(tokens: Tensor) -> Tensor:
        foreign["last"] = (tokens < start) | (tokens >= stop)
        return (tokens - start).masked_fill(foreign["last"], 0)

    def after(module: nn.Module, out: Tensor, tokens: Tensor) -> Tensor:
        return at.leave(out.masked_fill(foreign.pop("last").unsqueeze(-1), 0))

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

    def after(module: nn.Module, out: Tensor, x: Tensor) -> Tensor:
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
        mark_partial(module, *placements("sequence", module))
        local(module, at)


def replicate(module: nn.Module, at: Region) -> None:
    """The same parameters on every rank, and outside of regions the same computation on whole activations."""
    linear = isinstance(module, nn.Linear)
    _split(module, at, "replicate", before=(lambda x: _whole_input(module, at, x)) if linear else None)
    if isinstance(module, nn.MultiheadAttention):
        # It computes with its output layer's parameters itself.
        module.register_forward_pre_hook(lambda module, args: show(module.out_proj, ("weight", "bias")))
        module.register_forward_hook(lambda module, args, out: hide(module.out_proj), always_call=True)
    if at.inside:
        mark_partial(module, *placements("replicate", module))


def region(module: nn.Module, at: Region) -> None:
    """A container whose first input enters the region once, for all column-split layers in it.

    It holds one row-split layer, which leaves the region again: no other input may need a gradient, no part of the
    first may go past that layer, and no parameter may follow it.

    Raises:
        ConfigError: in the first pass in which one of that shows.
    """
    _split(module, at, "region", before=at.enter)
    mark_partial(module, *placements("region", module))
    _check_region(module, at)
    if at.noise is not None:
        at.noise.inside(module)


def _check_region(module: nn.Module, at: Region) -> None:
    """Watch what goes into a region, and once what comes out of it."""
    name = at.name
    checked: list[bool] = []

    def look_at_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, Tensor) and value.requires_grad for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"strategy.plan: {name} is a region, which enters its first input only, and another one needs a "
                f"gradient too: leave the region out, and each colwise layer enters by itself"
            )

    def look_at_output(module: nn.Module, args: tuple, out: Any) -> None:
        if checked or torch.compiler.is_compiling() or not isinstance(out, Tensor) or out.grad_fn is None:
            return
        checked.append(True)
        biases: list[Any] = [m._parameters.get("bias") for m in module.modules() if isinstance(m, nn.Linear)]
        biases = [bias for bias in biases if bias is not None and isinstance(bias.placements[-1], Replicate)]
        bypasses, parameters = what_bypasses(out)
        if bypasses:
            raise ConfigError(
                f"strategy.plan: a part of the input of {name}, a region, goes past its rowwise layer, and would be "
                f"counted {at.size} times: make a module inside of it the region, or leave the region out"
            )
        if parameters > len(biases) and not at.sequence:
            raise ConfigError(
                f"strategy.plan: parameters follow the rowwise layer of {name}, a region, and would be counted "
                f"{at.size} times: make a module inside of it the region, or leave the region out"
            )

    module.register_forward_pre_hook(look_at_inputs, with_kwargs=True)
    module.register_forward_hook(look_at_output)


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
            raise ConfigError(
                "strategy.plan: packed_attention splits attention(x, x, x, need_weights=False) without masks only: "
                "leave this layer out of the plan"
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
        mark_partial(module, "in_proj_bias")
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


def _split(module: nn.Module, at: Region, style: str, **changes: Any) -> None:
    split_parameters(module, placements(style, module), mesh=at.mesh, **changes)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)
