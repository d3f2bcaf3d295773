"""What belongs to a rank: the state of its generators, and metrics that it is adding up."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.tensors import read_below


def random_state() -> dict[str, Tensor]:
    """The state of every generator that training draws from, as tensors."""
    numpy: Any = np.random.get_state()
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([numpy[2], numpy[3], numpy[4], *numpy[1].tolist()], dtype=torch.float64),
        "python": torch.tensor([version, gauss is not None, gauss or 0.0, *words], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Put back what ``random_state`` gave."""
    torch.set_rng_state(states["torch"])
    position, has_gauss, cached, *words = states["numpy"].tolist()
    key = np.array(words, dtype=np.float64).astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    version, has, gauss, *rest = states["python"].tolist()
    random.setstate((int(version), tuple(map(int, rest)), gauss if has else None))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_random(seed: int) -> None:
    """Seed what a LightningModule may draw from in training: torch (every device), numpy and ``random``."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def batch_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Running statistics of batches, which every rank has of its own share unless something shares them out."""
    return {
        f"{path}.{name}": buffer
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for name, buffer in layer.named_buffers(recurse=False)
    }


def load_batch_statistics(module: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Put back what ``batch_statistics`` gave."""
    for name, buffer in batch_statistics(module).items():
        if name in states:
            buffer.copy_(states[name])


def _metrics(trainer: Trainer) -> Iterator[tuple[str, Metric]]:
    """Metrics that are being added up: the module's own, and what Lightning keeps of logged values in an epoch."""
    module: Any = trainer.lightning_module
    logged: Any = trainer.fit_loop.epoch_loop._results
    # Between two epochs Lightning still holds what it has logged at the end of the one, and resets it in the next.
    over = {id(entry.value) for entry in logged.values() if not entry.is_tensor} if between_epochs(trainer) else set()
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric._update_count and id(metric) not in over:
            yield f"module/{name}", metric
    for name, entry in logged.items():
        if entry.is_tensor and entry.meta.on_epoch and entry._update_count and not between_epochs(trainer):
            yield f"logged/{name}", entry


def between_epochs(trainer: Trainer) -> bool:
    progress = trainer.fit_loop.epoch_progress.current
    return progress.completed == progress.ready


def metric_states(trainer: Trainer) -> dict[str, Tensor]:
    """What this rank has added up so far in metrics, as tensors by path."""
    states = {}
    for path, metric in _metrics(trainer):
        states[f"{path}/$updates"] = torch.tensor(metric._update_count)
        for name in metric._defaults:
            value = getattr(metric, name)
            if isinstance(value, Tensor):
                states[f"{path}/{name}"] = value.detach()
            elif isinstance(value, list):
                states |= {f"{path}/{name}/{i}": item.detach() for i, item in enumerate(value)}
    return states


def load_metric_states(trainer: Trainer, states: Mapping[str, Tensor]) -> None:
    """Put back what ``metric_states`` gave; a value that the module has yet to log waits until it does."""
    module, waiting = trainer.lightning_module, {}
    for path in [key.removesuffix("/$updates") for key in states if key.endswith("/$updates")]:
        own = {key[len(path) + 1 :]: value for key, value in states.items() if key.startswith(f"{path}/")}
        kind, _, name = path.partition("/")
        if kind == "logged":
            waiting[name] = own
        else:
            _load_metric(module.get_submodule(name), own)
    if not waiting:
        return
    results: Any = trainer.fit_loop.epoch_loop._results
    update = results.update_metrics

    def load_and_update(key: str, *args: Any) -> None:
        if key in waiting:
            _load_metric(results[key], waiting.pop(key))
        update(key, *args)

    results.update_metrics = load_and_update


def _load_metric(metric: Any, states: Mapping[str, Tensor]) -> None:
    metric._update_count = int(states["$updates"])
    metric._computed = None
    for name in metric._defaults:
        if name in states:
            setattr(metric, name, states[name].to(metric.device))
        elif isinstance(getattr(metric, name), list):
            count = sum(key.startswith(f"{name}/") for key in states)
            setattr(metric, name, [states[f"{name}/{i}"].to(metric.device) for i in range(count)])


def rank_state(kind: str, rank: int, stored: StoredTensors) -> dict[str, Tensor]:
    """What a checkpoint holds of one rank: its ``random`` or ``metrics`` states."""
    prefix = f"{kind}/{rank}/"
    return {key.removeprefix(prefix): tensor for key, tensor in read_below(prefix, stored).items()}
