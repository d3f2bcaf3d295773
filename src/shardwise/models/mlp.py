"""A multilayer perceptron on flattened images or plain feature vectors."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.sizes import require_choice, require_positive, require_rate

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """`depth` hidden layers of `width` features: inputs (B, ...) are flattened -> logits (B, num_classes).

    The size of the input is `in_features`, or else in_channels * image_size**2. `activation` is relu, gelu, silu or
    tanh. Raises ConfigError for sizes below 1, an unknown activation, a dropout outside [0, 1), or when the input's
    size is not given.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int | None = None,
        image_size: int | None = None,
        in_features: int | None = None,
        width: int = 256,
        depth: int = 2,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if in_features is None:
            if in_channels is None or image_size is None:
                raise ConfigError(
                    f"model.in_features=null with model.in_channels={in_channels} and model.image_size={image_size}: "
                    "give in_features, or both of the others"
                )
            require_positive(in_channels=in_channels, image_size=image_size)
            in_features = in_channels * image_size**2
        require_positive(num_classes=num_classes, in_features=in_features, width=width, depth=depth)
        require_choice("activation", activation, choices=tuple(ACTIVATIONS))
        require_rate(dropout=dropout)
        self.hidden = nn.ModuleList(nn.Linear(in_features if i == 0 else width, width) for i in range(depth))
        self.head = nn.Linear(width, num_classes)
        self.activation = ACTIVATIONS[activation]()
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(depth))
        # PyTorch has no gain for GELU and SiLU; both pass about half of a centred input, as ReLU does.
        self.gain = nn.init.calculate_gain("tanh" if activation == "tanh" else "relu")

    def forward(self, inputs: Tensor) -> Tensor:
        features = inputs.flatten(1)
        for layer, dropout in zip(self.hidden, self.dropouts, strict=True):
            features = dropout(self.activation(layer(features)))
        return self.head(features)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """He et al. 2015 (arXiv 1502.01852): std = gain / sqrt(fan_in); a small head: the first loss is about ln K."""
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
        elif name == "head.weight":
            nn.init.normal_(tensor, std=0.01, generator=generator)
        else:
            nn.init.normal_(tensor, std=self.gain / tensor.shape[1] ** 0.5, generator=generator)

    def init_buffers(self) -> None:
        """There are none."""

    def sharding_blocks(self) -> Iterable[nn.Module]:
        """None: the layers are too small to be worth a gather each."""
        return ()

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Every two layers are a pair, whose features in between are split; the head is the second of the last pair."""
        plan = {}
        depth = len(self.hidden)
        for first in range(0, depth, 2):
            plan[f"hidden.{first}"] = "colwise"
            plan[f"dropouts.{first}"] = "local"
            plan["head" if first + 1 == depth else f"hidden.{first + 1}"] = "rowwise"
        return plan
