"""Text out of a language model, a token at a time: which token comes next, and what of the text can be shown already.

Shapes: B texts, T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ConfigError
from shardwise.seeds import stable_seed


def last_logits(logits_BTV: Tensor) -> Tensor:
    """The logits of the last position, whole, (B, V) float64 on the CPU; a collective where V is split over ranks."""
    if isinstance(logits_BTV, DTensor):
        batch, _, vocab = logits_BTV.shape
        last_BV: Tensor = DTensor.from_local(
            logits_BTV.to_local()[:, -1].contiguous(),
            logits_BTV.device_mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size((batch, vocab)),
            stride=(vocab, 1),
        ).full_tensor()
    else:
        last_BV = logits_BTV[:, -1]
    return last_BV.to("cpu", torch.float64)


def next_token(logits_V: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token, drawn from softmax(logits / temperature), or the likeliest at temperature 0.

    What is drawn is one uniform number, at which the distribution function is inverted in the order of the vocabulary:
    logits that differ in their last digits, as those of two layouts do, give the same token.

    Args:
        logits_V: (V,) float64.
        temperature: at least 0.
        top_k: draw among so many of the likeliest (Fan et al. 2018, arXiv 1805.04833); None for all.
        generator: on the CPU; it moves on by one number in any case.

    Raises:
        ConfigError: a logit is NaN, or infinite: the model has diverged.
    """
    uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
    if not bool(torch.isfinite(logits_V).all()):
        raise ConfigError("the model's logits are not finite: its training has diverged; type an earlier checkpoint")
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -math.inf)
    # The largest first: a small temperature would overflow.
    weights_V = ((logits_V - logits_V.max()) / temperature).exp()
    sums_V = weights_V.cumsum(dim=0)
    return int(torch.searchsorted(sums_V, uniform * sums_V[-1], right=True).clamp(max=len(sums_V) - 1))


class Texts:
    """Texts that begin alike and grow by a token in every step, each with random numbers of its own.

    Args:
        prompt: ids of the tokens that they begin with, at least one.
        num: B, how many.
        context: tokens that the model sees: the last ones of a text.
        temperature: at least 0; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest; None for all.
        seed: text i is drawn from (seed, i), however many there are.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        num: int = 1,
        context: int,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> None:
        self.ids = [list(prompt) for _ in range(num)]
        """Of every text, prompt included."""
        self.context = context
        self.temperature = temperature
        self.top_k = top_k
        self._generators = [torch.Generator().manual_seed(stable_seed("text", seed, i)) for i in range(num)]

    def window(self, device: torch.device) -> Tensor:
        """What the model sees next: (B, T) int64."""
        return torch.tensor([ids[-self.context :] for ids in self.ids], device=device)

    def choose(self, logits_BV: Tensor) -> list[int]:
        """The next token of each text, from logits (B, V) float64 on the CPU."""
        return [
            next_token(logits_V, temperature=self.temperature, top_k=self.top_k, generator=generator)
            for logits_V, generator in zip(logits_BV, self._generators, strict=True)
        ]

    def add(self, tokens: Sequence[int]) -> None:
        """Let each text grow by its token."""
        for ids, token in zip(self.ids, tokens, strict=True):
            ids.append(token)


def settled(text: str) -> str:
    """What of a text that still grows will stay: a character whose bytes are not all there yet is decoded as U+FFFD."""
    return text.rstrip("\ufffd")


def harmless(text: str) -> str:
    """``text`` as a terminal may show it: what would drive it is written out, such as ``\\x1b``."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
