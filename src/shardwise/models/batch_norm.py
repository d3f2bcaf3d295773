"""Which layers make a sample's output depend on its micro-batch, and the normalisation that does not.

Batch statistics are taken over a micro-batch, so a model with them trains differently when the micro-batch changes,
which happens whenever the same global batch is spread over more devices. Group normalisation (Wu and He 2018, arXiv
1803.08494) takes its statistics within a sample.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

MAX_GROUPS = 32  # Wu and He 2018, section 4.1: 32 groups did best, and 64 channels and more are multiples of it


def batch_statistics_layers(module: nn.Module) -> list[str]:
    """Names of the modules whose output for a sample depends, in training, on the other samples of the micro-batch.

    These are the subclasses of PyTorch's batch normalisation (1-3 dimensions, synchronised, lazy). Instance
    normalisation is not one: its running statistics serve evaluation only. Calls of `torch.nn.functional.batch_norm`
    cannot be seen.
    """
    return [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]


def group_norm(channels: int) -> nn.GroupNorm:
    """Group normalisation with as many groups, 32 at most, as divide `channels`."""
    return nn.GroupNorm(max(g for g in range(1, MAX_GROUPS + 1) if channels % g == 0), channels)
