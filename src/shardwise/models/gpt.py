"""A decoder-only language model of the Llama kind: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023 (arXiv 2302.13971) put the parts together; Grattafiori et al. 2024 (arXiv 2407.21783, table 3) is
Llama 3.

Shapes: B batch, T tokens, D width, V vocabulary, N query heads, G key-value heads, K features of a head, M hidden
features of the MLP. A projection's number of heads is read from its output, so every layer works on any whole number of
them.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.sizes import require_divides, require_positive, require_rate
from shardwise.parallel.cross_entropy import VocabularyShard

INIT_STD = 0.02  # Radford et al. 2018 (GPT-1), section 4.1, kept by GPT-2


def swiglu_hidden(width: int, *, multiple_of: int) -> int:
    """Hidden features of a SwiGLU MLP that has as many weights as a plain one of 4 * width: 8/3 * width, rounded up.

    Source: Shazeer 2020 (arXiv 2002.05202), section 3, and the rounding of Llama, which used a multiple of 256.
    """
    return math.ceil(8 * width // 3 / multiple_of) * multiple_of


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): heads (B, N or G, T, K) -> the same, rotated by position.

    Position t turns pair i, the features i and i + K/2, by the angle t * theta ** (-2 * i / K). The pairs are those of
    GPT-NeoX and Hugging Face's Llama; Meta's own files pair neighbours, which is the same function up to an order of
    the rows of the q and k weights. The tables stay float32 under every lower precision: bfloat16 would round a cosine
    to three digits.
    """

    def __init__(self, head_width: int, *, context: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        dtype = _table_dtype(torch.get_default_dtype())
        self.register_buffer("cos_TK", torch.empty(context, head_width // 2, dtype=dtype), persistent=False)
        self.register_buffer("sin_TK", torch.empty(context, head_width // 2, dtype=dtype), persistent=False)
        self.cos_TK: Tensor
        self.sin_TK: Tensor
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute both tables in place, in float64 on the CPU: the same on every device, rounded once."""
        context, pairs = self.cos_TK.shape
        positions_T = torch.arange(context, dtype=torch.float64, device="cpu")
        frequencies_K = self.theta ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
        angles_TK = torch.outer(positions_T, frequencies_K)
        self.cos_TK.copy_(angles_TK.cos())
        self.sin_TK.copy_(angles_TK.sin())

    def _apply(self, fn, recurse=True):
        # model.to(bfloat16) or .double() would round the tables, or keep float32's rounding: make them anew.
        before = self.cos_TK.dtype
        super()._apply(fn, recurse)
        if self.cos_TK.dtype != before:
            dtype = _table_dtype(self.cos_TK.dtype)
            self.cos_TK, self.sin_TK = self.cos_TK.to(dtype), self.sin_TK.to(dtype)
            self.init_buffers()
        return self

    def forward(self, x_BNTK: Tensor) -> Tensor:
        tokens = x_BNTK.shape[-2]
        cos_TK, sin_TK = self.cos_TK[:tokens], self.sin_TK[:tokens]
        first, second = x_BNTK.chunk(2, dim=-1)
        rotated = torch.cat([first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK], dim=-1)
        return rotated.to(x_BNTK.dtype)


def _table_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Attention(nn.Module):
    """Causal attention in which N / G query heads share a key-value head (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, width: int, *, n_head: int, n_kv_head: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // n_head
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, n_kv_head * self.head_width, bias=False)
        self.v = nn.Linear(width, n_kv_head * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout = dropout
        self.grouped = n_kv_head < n_head

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        q_BNTK, k_BGTK, v_BGTK = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed_BNTK = F.scaled_dot_product_attention(
            rotary(q_BNTK),
            rotary(k_BGTK),
            v_BGTK,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.grouped,
        )
        return self.out(mixed_BNTK.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): D -> M -> D (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, width: int, *, n_head: int, n_kv_head: int, hidden: int, dropout: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=norm_eps)
        self.attn = Attention(width, n_head=n_head, n_kv_head=n_kv_head, dropout=dropout)
        self.norm2 = nn.RMSNorm(width, eps=norm_eps)
        self.mlp = SwiGLU(width, hidden=hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.norm1(x_BTD), rotary))
        return x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))


class Head(nn.Linear):
    """Features (B, T, D) -> logits (B, T, V), or, with `losses`, whatever that makes of the features and the weight.

    `soft_cap` c bounds the logits: c * tanh(logits / c) (Gemma 2, arXiv 2408.00118, section 2). `shard` says which rows
    of the weight are here; None: all of them.
    """

    shard: VocabularyShard | None = None

    def __init__(self, width: int, vocab_size: int, *, soft_cap: float | None) -> None:
        super().__init__(width, vocab_size, bias=False)
        self.soft_cap = soft_cap

    def forward(self, x_BTD: Tensor, losses: Callable[..., Tensor] | None = None) -> Tensor:
        if losses is not None:
            return losses(x_BTD, self.weight, shard=self.shard, soft_cap=self.soft_cap)
        logits_BTV = super().forward(x_BTD)
        return logits_BTV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_BTV / self.soft_cap)


class GPT(nn.Module):
    """Token ids (B, T), T at most `context` -> logits (B, T, vocab_size); position t sees positions 0..t.

    `n_head` must divide `width` into heads of an even size; `n_kv_head` (default n_head) must divide `n_head`. `hidden`
    is the MLP's size, by default 8/3 * width rounded up to a multiple of `multiple_of`. With `tie_embeddings` the
    head's weight is the embedding's: one Parameter. `soft_cap` bounds the logits. `dropout` acts on embeddings,
    attention weights and what each half of a block adds. Raises ConfigError for illegal sizes, and ValueError on an
    input longer than `context`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        context: int,
        n_layer: int = 4,
        n_head: int = 4,
        n_kv_head: int | None = None,
        width: int = 128,
        hidden: int | None = None,
        multiple_of: int = 64,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
        soft_cap: float | None = None,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        require_positive(vocab_size=vocab_size, context=context, n_layer=n_layer, width=width, multiple_of=multiple_of)
        require_positive(n_head=n_head, n_kv_head=n_kv_head)
        require_divides("n_head", n_head, size_name="width", size=width)
        require_divides("n_kv_head", n_kv_head, size_name="n_head", size=n_head)
        head_width = width // n_head
        if head_width % 2:
            legal = [n for n in range(1, width + 1) if width % (2 * n) == 0]
            advice = f"use one of {', '.join(map(str, legal))}" if legal else "use an even model.width"
            raise ConfigError(
                f"model.n_head={n_head} makes heads of width {width} / {n_head} = {head_width}, odd, but rotary "
                f"positions turn pairs: {advice}"
            )
        hidden = swiglu_hidden(width, multiple_of=multiple_of) if hidden is None else hidden
        require_positive(hidden=hidden)
        require_rate(dropout=dropout)
        if soft_cap is not None and not soft_cap > 0:
            raise ConfigError(f"model.soft_cap={soft_cap}: a positive number is needed, such as 30, or null for none")
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.context = context
        self.residual_std = INIT_STD / math.sqrt(2 * n_layer)
        self.tok_emb = nn.Embedding(vocab_size, width)
        self.rotary = Rotary(head_width, context=context, theta=rope_theta)
        self.blocks = nn.ModuleList(
            Block(width, n_head=n_head, n_kv_head=n_kv_head, hidden=hidden, dropout=dropout, norm_eps=norm_eps)
            for _ in range(n_layer)
        )
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.head = Head(width, vocab_size, soft_cap=soft_cap)
        self.dropout = nn.Dropout(dropout)
        if tie_embeddings:
            self.head.weight = self.tok_emb.weight

    def _apply(self, fn, recurse=True):
        # to_empty, and any move from the meta device, gives each module a Parameter of its own: tie them again.
        tied = self.head.weight is self.tok_emb.weight
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = self.tok_emb.weight
        return self

    def forward(self, tokens_BT: Tensor, losses: Callable[..., Tensor] | None = None) -> Tensor:
        """Logits, or with `losses` what it makes of the last features (B, T, D) and the head's weight (V, D).

        `losses(features, weight, shard=..., soft_cap=...)` need not form all logits at once.
        """
        if tokens_BT.shape[1] > self.context:
            raise ValueError(
                f"input of {tokens_BT.shape[1]} tokens: this model's context is {self.context}; "
                "shorten the input or set model.context"
            )
        x_BTD = self.dropout(self.tok_emb(tokens_BT))
        for block in self.blocks:
            # The module, not its tables: a wrapper that casts a block's floating-point inputs would round those.
            x_BTD = block(x_BTD, self.rotary)
        return self.head(self.norm(x_BTD), losses)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Normal of std 0.02; what ends a residual branch 1 / sqrt(2 * n_layer) of that; norms one.

        The scaling keeps the residual stream from growing with depth: Radford et al. 2019 (GPT-2), section 2.3.
        """
        if "norm" in name:
            nn.init.ones_(tensor)
        else:
            std = self.residual_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else INIT_STD
            nn.init.normal_(tensor, std=std, generator=generator)

    def init_buffers(self) -> None:
        """The tables of the rotary positions."""
        self.rotary.init_buffers()

    def sharding_blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks."""
        return self.blocks

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Heads and hidden features are split, the vocabulary at both ends, and sequences in between.

        Shoeybi et al. 2019 (arXiv 1909.08053, section 3) and Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2).
        """
        return {
            "tok_emb": "vocab_embedding",
            "dropout": "sequence",
            "blocks.*.{norm1,norm2,dropout}": "sequence",
            "blocks.*.{attn,mlp}": "region",
            "blocks.*.attn.{q,k,v}": "colwise",
            "blocks.*.attn.out": "rowwise",
            "blocks.*.mlp.{gate,up}": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "norm": "sequence",
            "head": "vocab_output",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """What is split by whole heads."""
        own = {} if self.n_kv_head == self.n_head else {"blocks.*.attn: n_kv_head": self.n_kv_head}
        return own | {"blocks.*.attn: n_head": self.n_head}
