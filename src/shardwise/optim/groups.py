"""Which parameters are decayed, and which are hidden matrices: from the module that owns them, their names and shapes.

Decaying what is not a matrix of a layer pulls norms and biases to zero for nothing. That norms, biases and embeddings
are left out is the habit of GPT-2's and BERT's training code, and of timm.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from shardwise.errors import ConfigError

DECAYS = ("matrices", "all")
"""Values of ``optimizer.decay``: all but norms, biases and embeddings; or everything."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORM_NAME = re.compile(r"Norm(\dd)?$")
_EXEMPT_NAME = re.compile(r"^bias$|embed|(emb|token)$")


@dataclass(frozen=True)
class Trained:
    """A parameter that requires a gradient."""

    parameter: Parameter
    exempt: bool
    """Whether it is a norm's, a bias, or an embedding."""
    hidden: bool
    """Whether it is a matrix between the embedding and the output layer."""


def trained_parameters(source: nn.Module | Iterable[tuple[str, Parameter]]) -> list[Trained]:
    """Every parameter that requires a gradient, once, in the order of ``named_parameters()``.

    Exempt is what has at most one dim; belongs to an embedding or a norm; is called bias, ...embed..., ...emb or
    ...token; or is named by a method ``no_weight_decay()`` of a module above it (timm's convention). A parameter with
    several names is exempt if it is by one of them: an embedding stays one though it is the head's weight too.

    Args:
        source: a module; or its named parameters, of which then names and shapes alone are known.
    """
    if not isinstance(source, nn.Module):
        owned: Iterable[tuple[str, Parameter, nn.Module | None]] = [(name, p, None) for name, p in source]
        named_exempt, output = set(), None
    else:
        owned, named_exempt = list(_owned(source)), set(_named_exempt(source))
        output = next((m for m in reversed(list(source.modules())) if isinstance(m, nn.Linear)), None)
    trained: dict[Parameter, None] = {}
    exempt: set[Parameter] = set()
    outside: set[Parameter] = set()
    for name, parameter, owner in owned:
        if not parameter.requires_grad:
            continue
        trained[parameter] = None
        if name in named_exempt or _is_exempt(name, parameter, owner):
            exempt.add(parameter)
        if owner is not None and owner is output:
            outside.add(parameter)
    return [
        Trained(p, exempt=p in exempt, hidden=p.ndim == 2 and p not in exempt and p not in outside) for p in trained
    ]


def _is_exempt(name: str, parameter: Parameter, owner: nn.Module | None) -> bool:
    if parameter.ndim <= 1 or _EXEMPT_NAME.search(name.rpartition(".")[2]):
        return True
    if owner is None:
        return False
    # FSDP makes a subclass of a module's class; the name of the class that was written is further up.
    return isinstance(owner, _NORMS + _EMBEDDINGS) or any(
        _NORM_NAME.search(kind.__name__) for kind in type(owner).__mro__
    )


def _owned(root: nn.Module) -> Iterator[tuple[str, Parameter, nn.Module]]:
    for path, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), parameter, module


def _named_exempt(root: nn.Module) -> Iterator[str]:
    for path, module in root.named_modules():
        named = getattr(module, "no_weight_decay", None)
        if callable(named):
            yield from (f"{path}.{name}" if path else name for name in named())


def check_decay(decay: object) -> None:
    """Whether ``optimizer.decay`` is one of :data:`DECAYS`.

    Raises:
        ConfigError: it is not.
    """
    if decay not in DECAYS:
        raise ConfigError(
            f"optimizer.decay={decay}: matrices (all but norms, biases and embeddings) or all is needed; how much is "
            f"optimizer.weight_decay"
        )


def count_hidden(module: nn.Module) -> tuple[int, int]:
    """Elements of the hidden layers' matrices, and of all other parameters that are trained."""
    trained = trained_parameters(module)
    hidden = sum(t.parameter.numel() for t in trained if t.hidden)
    return hidden, sum(t.parameter.numel() for t in trained) - hidden


def count_decayed(module: nn.Module, *, decay: str) -> tuple[int, int]:
    """Elements of the parameters that are decayed, and of all that are trained."""
    trained = trained_parameters(module)
    sizes = [(t.parameter.numel(), decay == "all" or not t.exempt) for t in trained]
    return sum(size for size, decayed in sizes if decayed), sum(size for size, _ in sizes)
