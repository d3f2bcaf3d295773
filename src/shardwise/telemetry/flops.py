"""How much a model computes for one sample, and how much a device could compute: what MFU is the ratio of.

MFU as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): operations that the model needs, whatever is
computed again, over what the devices could do in the same time. A multiplication and an addition are two operations;
a backward pass needs two products for each one of the forward pass, so that a step is three forward passes.
"""

import copy
import logging
import random
import re
import time
from itertools import chain
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from shardwise.checkpoint.rank_state import random_state, set_random_state
from shardwise.strategies.micro_batches import batch_samples

log = logging.getLogger(__name__)

FORWARD_PASSES = 3
"""Of which a training step is worth: the backward pass is two."""
TERA = 1e12
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"16": 2250, "tf32": 1125, "32": 75, "64": 37}),
    ("GH200", {"16": 989.4, "tf32": 494.7, "32": 66.9, "64": 66.9}),
    ("H200", {"16": 989.4, "tf32": 494.7, "32": 66.9, "64": 66.9}),
    ("H100 NVL", {"16": 835, "tf32": 417, "32": 60, "64": 60}),
    ("H100 PCIe", {"16": 756, "tf32": 378, "32": 51.2, "64": 51.2}),
    ("H100", {"16": 989.4, "tf32": 494.7, "32": 66.9, "64": 66.9}),
    ("A100", {"16": 312, "tf32": 156, "32": 19.5, "64": 19.5}),
    ("A40", {"16": 149.7, "tf32": 74.8, "32": 37.4}),
    ("A30", {"16": 165, "tf32": 82, "32": 10.3, "64": 10.3}),
    ("L40S", {"16": 362, "tf32": 183, "32": 91.6}),
    ("L4", {"16": 121, "tf32": 60, "32": 30.3}),
    ("V100-SXM2", {"16": 125, "32": 15.7, "64": 7.8}),
    ("T4", {"16": 65, "32": 8.1}),
)
"""A word of a device's name -> 10^12 operations a second by format, dense, at the full clock: NVIDIA's data sheets of
these products (whose larger figures for half and TF32 are for sparse matrices)."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""What a module may draw from besides the generators that all share."""
MATMUL_SECONDS = 0.03
"""How long a device of another name is measured at most, but for one product."""


def meta_copy(module: LightningModule) -> LightningModule | None:
    """A copy of ``module`` without its numbers, on the meta device; None of one that is laid out over ranks already, or
    cannot be copied."""
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    try:
        memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in tensors}
        twin = copy.copy(module)
        own = vars(twin)
        for name, value in own.items():
            if isinstance(value, list | dict | set):
                own[name] = copy.copy(value)  # whatever is added in a step is added to the copy
            elif isinstance(value, GENERATORS):
                own[name] = copy.deepcopy(value)
        for kind in ("_parameters", "_buffers"):
            own[kind].update({name: memo[id(value)] for name, value in own[kind].items() if value is not None})
        own["_modules"].update({name: copy.deepcopy(child, memo) for name, child in module._modules.items()})
        own.update(_trainer=None, log=_ignore, log_dict=_ignore)
        return twin
    except Exception as error:  # somebody else's code, and only a figure
        log.debug("operations are not counted: %s: %s", type(error).__name__, error)
        return None


def flops_per_sample(twin: LightningModule, batch: Any) -> float | None:
    """Operations of a training step on ``batch``, for one sample of it; None if they cannot be counted.

    Args:
        twin: what ``meta_copy`` gave.
        batch: a batch of the training, on any device.
    """
    dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=dtype if leaf.is_floating_point() else leaf.dtype, device="meta")

    try:
        samples, shapes = batch_samples(batch), tree_map(like, batch)
        calls = [lambda: twin.training_step(shapes, 0)]
        if type(twin).forward is not LightningModule.forward:  # leaves the fewest traces
            calls.insert(0, lambda: twin(shapes[0]))
    except Exception as error:
        log.debug("operations are not counted: %s: %s", type(error).__name__, error)
        return None
    for call in calls:
        drawn = random_state()  # a run that goes on from a checkpoint counts in its first step, where another does not
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                call()
        except Exception as error:  # what depends on values cannot be done without them
            log.debug("operations are not counted: %s: %s", type(error).__name__, error)
        else:
            return FORWARD_PASSES * counter.get_total_flops() / samples or None
        finally:
            set_random_state(drawn)
    return None


def peak_flops(device: torch.device, precision: str) -> float:
    """Operations a second that ``device`` could do in the format of ``precision`` (one of Lightning's names)."""
    width = "16" if "16" in precision else "64" if "64" in precision else "32"
    if device.type == "cuda":
        if width == "32" and _uses_tf32():
            width = "tf32"
        device_name = torch.cuda.get_device_name(device)
        for part, peaks in PEAKS:
            if re.search(rf"\b{part}\b", device_name) and width in peaks:
                return peaks[width] * TERA
    dtypes = {"64": torch.float64, "32": torch.float32, "tf32": torch.float32}
    return measured_flops(device, dtypes.get(width, torch.bfloat16 if "bf16" in precision else torch.float16))


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of a few products of square matrices, which grow while there is time."""
    best, size, end = 0.0, 256, time.perf_counter() + MATMUL_SECONDS
    while True:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        for _ in range(3):
            start = time.perf_counter()
            matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took = time.perf_counter() - start
            best = max(best, 2 * size**3 / took)
            if time.perf_counter() + took > end:
                return best
        # One of twice the size takes eight times as long.
        if time.perf_counter() + 8 * took < end and size < 8192:
            size *= 2


def _uses_tf32() -> bool:
    matmul: Any = torch.backends.cuda.matmul
    # Once a user has set the newer one, torch raises an error where it is asked for the older one.
    newer = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32 if newer is None else newer == "tf32")


def _on_meta(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta")
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
