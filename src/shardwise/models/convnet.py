"""A small convolutional network for small images, in the spirit of PyTorch's MNIST example."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.sizes import require_positive, require_rate


class ConvNet(nn.Module):
    """Two 3x3 convolutions, one 2x2 pooling, one hidden layer: images (B, in_channels, S, S) -> logits (B,
    num_classes).

    The convolutions have `width` and `2 * width` channels and keep the image's size; the hidden layer has `4 * width`
    features. Its weights grow with the image's area, so this is for sizes up to about 64. There is no batch
    normalisation: the output for a sample depends on that sample alone, whatever the micro-batch.

    Raises ConfigError for sizes below 1, an image smaller than 2x2, or a dropout outside [0, 1).
    """

    def __init__(
        self, num_classes: int, *, in_channels: int, image_size: int, width: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels, image_size=image_size, width=width)
        if image_size < 2:
            raise ConfigError(f"model.image_size={image_size}: must be at least 2, for the 2x2 pooling; use model=mlp")
        require_rate(dropout=dropout)
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.hidden = nn.Linear(2 * width * (image_size // 2) ** 2, 4 * width)
        self.head = nn.Linear(4 * width, num_classes)
        self.dropout = nn.Dropout(dropout)
        self.hidden_dropout = nn.Dropout(dropout)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = F.relu(self.conv1(images_BCHW))
        features = F.max_pool2d(F.relu(self.conv2(features)), 2)
        features = F.relu(self.hidden(self.dropout(features.flatten(1))))
        return self.head(self.hidden_dropout(features))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """He et al. 2015 (arXiv 1502.01852, eq. 10) before a ReLU; a small head: the first loss is about ln K."""
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
        elif name == "head.weight":
            nn.init.normal_(tensor, std=0.01, generator=generator)
        else:
            nn.init.kaiming_normal_(tensor, nonlinearity="relu", generator=generator)

    def init_buffers(self) -> None:
        """There are none."""

    def sharding_blocks(self) -> Iterable[nn.Module]:
        """None: nothing repeats."""
        return ()

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The hidden layer, which holds most of the weights, and the head are a pair; the convolutions stay whole."""
        return {"hidden": "colwise", "hidden_dropout": "local", "head": "rowwise"}
