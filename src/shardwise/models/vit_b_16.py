"""torchvision's ViT-B/16 with a tensor-parallel plan beside it; names and weights are torchvision's."""

from torchvision.models import VisionTransformer

from shardwise.errors import ConfigError
from shardwise.models.sizes import require_divides, require_positive, require_rate


class ViTB16(VisionTransformer):
    """RGB images (B, 3, image_size, image_size) -> logits (B, num_classes); Dosovitskiy et al. 2021 (arXiv 2010.11929).

    The sizes are those of ``torchvision.models.vit_b_16``, whose weights load into it. ``dropout`` acts on embeddings,
    on what each half of a block adds and inside of its MLP, ``attention_dropout`` on attention weights. Raises
    ConfigError for an image_size that 16 does not divide, and for rates outside [0, 1).
    """

    def __init__(
        self,
        num_classes: int,
        *,
        image_size: int = 224,
        num_layers: int = 12,
        num_heads: int = 12,
        hidden_dim: int = 768,
        mlp_dim: int = 3072,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        require_positive(num_classes=num_classes, image_size=image_size, num_layers=num_layers, mlp_dim=mlp_dim)
        require_positive(num_heads=num_heads, hidden_dim=hidden_dim)
        if image_size % 16:
            raise ConfigError(f"model.image_size={image_size}: a multiple of 16, the size of a patch, is needed")
        require_divides("num_heads", num_heads, size_name="hidden_dim", size=hidden_dim)
        require_rate(dropout=dropout, attention_dropout=attention_dropout)
        super().__init__(
            image_size=image_size,
            patch_size=16,
            num_layers=num_layers,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            mlp_dim=mlp_dim,
            dropout=dropout,
            attention_dropout=attention_dropout,
            num_classes=num_classes,
        )

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Heads, in the matrix that packs their three projections, and hidden features are split; sequences are not."""
        return {
            "encoder.layers.*.self_attention": "packed_attention",
            "encoder.layers.*.self_attention.out_proj": "rowwise",
            "encoder.layers.*.mlp": "region",
            "encoder.layers.*.mlp.0": "colwise",
            "encoder.layers.*.mlp.3": "rowwise",
        }
