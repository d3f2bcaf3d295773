"""The repeated blocks of a model, and what is done to them one by one: recomputation and compilation."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

CHECKPOINTING = ("none", "selective", "full")
"""Keep all activations of a block; keep the results of matrix products and attention; keep its input only."""

_OPS = torch.ops.aten
KEPT = (
    *(_OPS.mm.default, _OPS.addmm.default, _OPS.bmm.default),
    *(_OPS._scaled_dot_product_flash_attention.default, _OPS._scaled_dot_product_efficient_attention.default),
    *(_OPS._scaled_dot_product_flash_attention_for_cpu.default, _OPS._scaled_dot_product_cudnn_attention.default),
)
"""What selective checkpointing does not compute twice: the products cost most of the time, and all else is cheap."""


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """The blocks of ``root``, which follow one another and make up most of it.

    A submodule may name its own with a method ``sharding_blocks()``. Otherwise they are the repeated layers: members of
    a ModuleList or Sequential of which the same class appears there at least twice and which have submodules of their
    own. Blocks inside a block are left out.
    """
    named = [module for module in root.modules() if hasattr(module, "sharding_blocks")]
    blocks: dict[nn.Module, None] = {}  # in order, each once: a model may run the same block twice
    if named:
        return list(dict.fromkeys(block for module in named for block in module.sharding_blocks()))  # type: ignore[operator]
    taken: set[nn.Module] = set()
    for container in root.modules():
        if container in taken or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in container)
        for child in container:
            if kinds[type(child)] > 1 and any(child.children()) and any(True for _ in child.parameters()):
                blocks[child] = None
                taken.update(child.modules())
    return list(blocks)


def recompute_in_backward(blocks: Iterable[nn.Module], *, kept: str) -> None:
    """Drop the activations of each block after its forward pass, and compute them again in the backward pass.

    The block's ``forward`` is replaced, not wrapped in a module: names of parameters stay as they are.

    Args:
        blocks: changed in place.
        kept: ``full`` drops everything but the inputs; ``selective`` keeps what is dear to compute.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kept == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        # Bound to the block, so that a copy of the block computes with its own weights.
        block.forward = MethodType(_checkpointed(type(block).forward, options), block)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        return checkpoint(forward, block, *args, **options, **kwargs)

    return checkpointed


def _policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each block, in place; names of parameters stay as they are.

    Never a part of a block: Inductor on an attention layer alone has given wrong gradients under sequence parallelism.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward)


def overlap_in_compiled_blocks(group: dist.ProcessGroup) -> None:
    """Let the compiler cut products next to a gather or a scatter over ``group`` into parts that hide one another.

    PyTorch's asynchronous tensor parallelism; for GPUs that reach one another's memory (NVLink).
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
