"""A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929): pre-norm, learned positions, a class token or the
mean.

Shapes: B batch, C channels, H, W image, T tokens (patches, and the class token if there is one), D width, N heads,
K features of a head, M hidden features of the MLP.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.sizes import require_choice, require_divides, require_positive, require_rate

INIT_STD = 0.02  # the code of DeiT (Touvron et al. 2021, arXiv 2012.12877), and timm since


class Attention(nn.Module):
    """Multi-head self-attention over all tokens. Queries, keys and values have projections of their own."""

    def __init__(self, width: int, *, head_width: int, dropout: float) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.head_width = head_width
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads is read from the projection: the layer works on any whole number of them.
        q_BNTK, k_BNTK, v_BNTK = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BNTK = F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK, dropout_p=dropout)
        return self.out(mixed_BNTK.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """D -> M -> D with GELU."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, *, head_width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, head_width=head_width, dropout=dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = FeedForward(width, hidden=hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.norm1(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))


class ViT(nn.Module):
    """Square images (B, in_channels, image_size, image_size) -> logits (B, num_classes).

    `patch_size` must divide `image_size`, and `n_head` must divide `width`. `pool` is "cls" (a learned class token) or
    "mean" (over the patches). The MLP has int(mlp_ratio * width) hidden features. `dropout` acts on attention weights
    and on what each half of a block adds. Raises ConfigError for illegal sizes, and ValueError on images of another
    size.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        image_size: int,
        in_channels: int,
        patch_size: int = 2,
        n_layer: int = 4,
        n_head: int = 4,
        width: int = 64,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        pool: str = "cls",
    ) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, image_size=image_size, in_channels=in_channels, patch_size=patch_size)
        require_positive(n_layer=n_layer, n_head=n_head, width=width)
        hidden = int(mlp_ratio * width)
        if hidden < 1:
            raise ConfigError(f"model.mlp_ratio={mlp_ratio}: must be at least 1 / width = 1 / {width}; 4 is usual")
        require_divides("patch_size", patch_size, size_name="image_size", size=image_size)
        require_divides("n_head", n_head, size_name="width", size=width)
        require_choice("pool", pool, choices=("cls", "mean"))
        require_rate(dropout=dropout)
        self.n_head = n_head
        self.image_shape = (in_channels, image_size, image_size)
        self.pool = pool
        patches = (image_size // patch_size) ** 2
        self.patch_emb = nn.Conv2d(in_channels, width, kernel_size=patch_size, stride=patch_size)
        self.cls = nn.Parameter(torch.zeros(width)) if pool == "cls" else None
        self.pos_emb = nn.Parameter(torch.zeros(patches + (pool == "cls"), width))
        self.blocks = nn.ModuleList(
            Block(width, head_width=width // n_head, hidden=hidden, dropout=dropout) for _ in range(n_layer)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if images_BCHW.shape[1:] != self.image_shape:
            raise ValueError(
                f"images of shape {tuple(images_BCHW.shape[1:])}: this model takes (C, H, W) = {self.image_shape}; "
                "set model.in_channels and model.image_size"
            )
        x_BTD = self.patch_emb(images_BCHW).flatten(2).transpose(1, 2)
        if self.cls is not None:
            x_BTD = torch.cat([self.cls.expand(len(x_BTD), 1, -1), x_BTD], dim=1)
        x_BTD = self.dropout(x_BTD + self.pos_emb)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD[:, 0] if self.cls is not None else x_BTD.mean(dim=1))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Truncated normal of std 0.02 (patches: 1 / sqrt(fan_in)); norms one; biases zero."""
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
        elif "norm" in name:
            nn.init.ones_(tensor)
        else:
            # A patch has few pixels, and 0.02 would leave the image far below the positions.
            std = tensor[0].numel() ** -0.5 if name == "patch_emb.weight" else INIT_STD
            nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)

    def init_buffers(self) -> None:
        """There are none."""

    def sharding_blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks."""
        return self.blocks

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Heads and hidden features are split; sequences are not: their length (14**2 + 1 = 197) divides by nothing."""
        return {
            "blocks.*.{attn,mlp}": "region",
            "blocks.*.attn.{q,k,v}": "colwise",
            "blocks.*.attn.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """What is split by whole heads."""
        return {"blocks.*.attn: n_head": self.n_head}
