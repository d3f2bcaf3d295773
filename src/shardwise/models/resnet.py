"""torchvision's residual networks (He et al. 2015, arXiv 1512.03385) with a choice of normalisation and of input.

Only what torchvision's builders cannot be told in a line of YAML; any other model of theirs works by its own name, as
in `model._target_=torchvision.models.resnet34`. The weights are drawn by torchvision.
"""

from collections.abc import Callable

import torchvision
from torch import nn
from torchvision.models import ResNet

from shardwise.models.batch_norm import group_norm
from shardwise.models.sizes import require_choice, require_positive

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}


def resnet18(num_classes: int, *, in_channels: int = 3, norm: str = "batch", small_images: bool = False) -> ResNet:
    """ResNet-18: images (B, in_channels, H, W) -> logits (B, num_classes).

    `norm` is "batch" (the original; depends on the micro-batch) or "group" (does not). `small_images` replaces the
    stem, which shrinks an image by 4, with a 3x3 convolution that keeps its size, as He et al. did for CIFAR-10
    (section 4.2). Raises ConfigError for sizes below 1 or an unknown norm.
    """
    builder = torchvision.models.resnet18
    return _build(builder, num_classes=num_classes, in_channels=in_channels, norm=norm, small_images=small_images)


def resnet50(num_classes: int, *, in_channels: int = 3, norm: str = "batch", small_images: bool = False) -> ResNet:
    """ResNet-50; the arguments are those of `resnet18`."""
    builder = torchvision.models.resnet50
    return _build(builder, num_classes=num_classes, in_channels=in_channels, norm=norm, small_images=small_images)


def _build(
    builder: Callable[..., ResNet], *, num_classes: int, in_channels: int, norm: str, small_images: bool
) -> ResNet:
    require_positive(num_classes=num_classes, in_channels=in_channels)
    require_choice("norm", norm, choices=tuple(NORMS))
    model = builder(num_classes=num_classes, norm_layer=NORMS[norm])
    width = model.conv1.out_channels
    if small_images:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif in_channels != model.conv1.in_channels:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision draws the others
    return model
