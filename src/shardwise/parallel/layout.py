"""From a model to its layout on a mesh: the steps in their order, and what each of them changes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError
from shardwise.parallel.blocks import (
    CHECKPOINTING,
    compile_blocks,
    overlap_in_compiled_blocks,
    recompute_in_backward,
    repeated_blocks,
)
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.fsdp import shard_dim, shard_module, uneven
from shardwise.parallel.mesh import data_mesh
from shardwise.parallel.plan import Plan, apply_plan, read_plan
from shardwise.parallel.styles import placements


@dataclass(frozen=True)
class Layout:
    """How a model is laid out, besides the degrees of the mesh."""

    plan: dict[str, Any] = field(default_factory=dict)
    """Module-name pattern -> style; empty for the model's own plan."""
    sequence_parallel: bool | None = None
    """Split sequences between the split layers; None: where the plan allows."""
    activation_checkpointing: str = "none"
    """``none``, ``selective`` or ``full``."""
    compile: bool = False
    """Compile each block."""
    async_tensor_parallel: bool = False
    """Hide the communication of split layers behind their products (GPUs, compiled)."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass (FSDP)."""

    def __post_init__(self) -> None:
        if self.activation_checkpointing not in CHECKPOINTING:
            kinds = ", ".join(CHECKPOINTING)
            raise ConfigError(f"activation_checkpointing={self.activation_checkpointing!r}: one of {kinds} is needed")

    @property
    def works_on_blocks(self) -> str:
        """What needs repeated blocks, as it is typed; empty if nothing does."""
        if self.activation_checkpointing != "none":
            return f"strategy.activation_checkpointing={self.activation_checkpointing}"
        return "strategy.compile=true" if self.compile else ""


def check_layout(root: nn.Module, layout: Layout, dims: ParallelDims) -> Plan | None:
    """Whether ``root`` (on any device, the meta device too) can be laid out so; nothing is changed.

    Returns:
        The plan, if there are split layers.

    Raises:
        ConfigError: names the layer, its size, the degree, and what to type.
    """
    if layout.works_on_blocks and not repeated_blocks(root):
        model = getattr(root, "model", root)
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks, on which {layout.works_on_blocks} works: leave it out, or "
            f"name them with a method sharding_blocks()"
        )
    if dims.tp == 1:
        return None
    plan = read_plan(root, layout.plan, degree=dims.tp, sequence_parallel=layout.sequence_parallel)
    if layout.compile:
        compiled = {module for block in repeated_blocks(root) for module in block.modules()}
        noisy = [name for name in plan.noisy if plan.model.get_submodule(name) in compiled]
        if noisy:  # the compiler would cut the block there, and compile attention alone
            raise ConfigError(
                f"strategy.compile=true, but each rank draws a dropout of its own in {noisy[0]}, which cannot be "
                f"compiled: type strategy.compile=false, or a dropout of 0"
            )
    if dims.dp_shard > 1:
        for path, module in root.named_modules():
            for name, placement in placements(plan.styles.get(path, "replicate"), module).items():
                shape = tuple(module.get_parameter(name).shape)
                if shard_dim(shape, placement, tp=dims.tp, ranks=dims.dp_shard) is None:
                    where = f"{path}.{name}".lstrip(".")
                    raise uneven(where, shape, placement, tp=dims.tp, ranks=dims.dp_shard)
    return plan


def lay_out(
    root: nn.Module, layout: Layout, *, mesh: DeviceMesh | None, dims: ParallelDims, compute_dtype: torch.dtype | None
) -> Plan | None:
    """Change ``root`` in place: split its layers, then recomputation, then compilation, then shards.

    Args:
        root: on the meta device, or with values that are the same on every rank.
        layout: what is wanted.
        mesh: all ranks; None with one.
        dims: degrees of the mesh.
        compute_dtype: of FSDP's mixed precision; None for none.

    Returns:
        The plan by which layers are split, if they are.
    """
    blocks = repeated_blocks(root)
    plan = check_layout(root, layout, dims)
    if plan is not None:
        assert mesh is not None
        # First: everything after it is to see parameters as they will be, and collectives as part of the block.
        apply_plan(root, plan, mesh=mesh["tp"])
        if layout.async_tensor_parallel:
            overlap_in_compiled_blocks(mesh.get_group("tp"))
    if layout.activation_checkpointing != "none":
        # Before the compiler, which then sees what is computed twice, and inside of FSDP, whose gathering is done once
        # for the recomputation and the backward pass.
        recompute_in_backward(blocks, kept=layout.activation_checkpointing)
    if layout.compile:
        # Before FSDP, whose hooks around a block stay outside of the graph.
        compile_blocks(blocks)
    if dims.uses_fsdp:
        assert mesh is not None
        data = data_mesh(mesh)
        assert data is not None
        shard_module(
            root,
            mesh=data,
            blocks=blocks,
            compute_dtype=compute_dtype,
            reshard_after_forward=layout.reshard_after_forward,
        )
    return plan
