"""A tensor-parallel plan: a table of module-name pattern -> style, and what it does to a model.

In a pattern ``*`` stands for one part of a dotted name, and ``{a,b}`` for either: ``blocks.*.attn.{q,k,v}: colwise``.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError
from shardwise.parallel.state import tied_names
from shardwise.parallel.styles import CONTAINERS, STYLES, Noise, Region, is_noisy

KINDS: dict[str, type[nn.Module]] = {
    "colwise": nn.Linear,
    "rowwise": nn.Linear,
    "vocab_embedding": nn.Embedding,
    "vocab_output": nn.Linear,
    "packed_attention": nn.MultiheadAttention,
}
"""Style -> the only kind of module that it can split."""

MOST_NAMES = 12
"""Names that an error lists."""


@dataclass(frozen=True)
class Plan:
    """What each module of a LightningModule (or of any other root) becomes."""

    styles: Mapping[str, str]
    """Module name below the root -> style; what is not named is replicated."""
    model: nn.Module
    """The module that the plan is of."""
    sequence: bool
    """Whether sequences are split between the regions."""
    noisy: tuple[str, ...]
    """Modules in which each rank draws for itself."""


def read_plan(root: nn.Module, given: Mapping[str, str], *, degree: int, sequence_parallel: bool | None) -> Plan:
    """The plan of ``root`` for ``degree`` ranks, every line of it checked; nothing is changed.

    Args:
        root: a model or what holds one; may be on the meta device. The plan's patterns are names below the submodule
            that has a method ``tensor_parallel_plan``, else below ``root.model`` if there is one, else below ``root``.
        given: pattern -> style; empty to ask ``tensor_parallel_plan()``.
        degree: tensor-parallel ranks.
        sequence_parallel: split sequences between the regions; None to do so where the plan allows.

    Raises:
        ConfigError: no plan, a style that does not exist, a pattern that matches nothing, two that match one module, a
            layer that its style cannot split, or a size that ``degree`` does not divide.
    """
    prefix, model = _planned(root)
    name = type(model).__name__
    table = dict(given) or dict(getattr(model, "tensor_parallel_plan", dict)())
    if not table:
        raise _no_plan(model)
    own = _match(table, model)
    splits = [style for style in own.values() if style in KINDS]
    if not splits:
        raise ConfigError(f"strategy.plan splits no layer of {name}: at least one colwise and rowwise pair is needed")
    allowed = {"vocab_embedding", "sequence"} <= set(own.values())
    if sequence_parallel and not allowed:
        raise ConfigError(
            f"strategy.sequence_parallel=true, but the plan of {name} has no vocab_embedding, after which they are "
            f"split, and no sequence layers: leave it out, or add them"
        )
    sequence = allowed if sequence_parallel is None else sequence_parallel
    _check_kinds(own, model)
    _check_containers(own)
    _check_sizes(own, model, degree=degree, sequence=sequence)
    _check_ties(own, model)
    alone = (*CONTAINERS, "local", *(["sequence"] if sequence else []))
    noisy = tuple(name for name, style in own.items() if style in alone and is_noisy(model.get_submodule(name)))
    return Plan({prefix + name: style for name, style in own.items()}, model, sequence, noisy)


def apply_plan(root: nn.Module, plan: Plan, *, mesh: DeviceMesh) -> None:
    """Split ``root`` in place over the one-axis ``mesh``; every parameter becomes a DTensor. Tied parameters stay one.

    Its forward pass is to be started by calling it (or the module that holds the parameters), for the hooks to run.
    """
    tied = tied_names(root)
    noises: dict[str, Noise | None] = {}
    for name, module in list(root.named_modules()):
        style = plan.styles.get(name, "replicate")
        if style in CONTAINERS:
            noises[name] = Noise(rank=mesh.get_local_rank(), ranks=mesh.size()) if is_noisy(module) else None
        container = name if style in CONTAINERS else _container(name, plan.styles)
        at = Region(mesh, plan.sequence, inside=container not in (None, name), noise=noises.get(container or ""))
        STYLES[style](module, at)
    for first, *others in tied:
        path, _, leaf = first.rpartition(".")
        parameter = root.get_submodule(path)._parameters[leaf]
        for other in others:
            path, _, leaf = other.rpartition(".")
            root.get_submodule(path)._parameters[leaf] = parameter


def patterns_of(names: list[str]) -> list[str]:
    """Names with ``*`` in the place of numbers, each once, in order."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def _container(name: str, styles: Mapping[str, str]) -> str | None:
    """The module around ``name`` whose input enters the region for it."""
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((ancestor for ancestor in above if styles.get(ancestor) in CONTAINERS), None)


def _planned(root: nn.Module) -> tuple[str, nn.Module]:
    """The module that a plan is of, and what stands before its names below ``root``."""
    for name, module in root.named_modules():
        if hasattr(module, "tensor_parallel_plan"):
            return f"{name}." if name else "", module
    model = getattr(root, "model", None)
    return ("model.", model) if isinstance(model, nn.Module) else ("", root)


def _match(table: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Module name -> style, every pattern checked."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str] = {}
    source: dict[str, str] = {}
    for pattern, style in table.items():
        if style not in STYLES:
            near = difflib.get_close_matches(str(style), STYLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STYLES)}"
            raise ConfigError(f"strategy.plan: {pattern!r} has the style {style!r}: no such style; {hint}")
        expression = _expression(pattern)
        found = [name for name in names if expression.fullmatch(name)]
        if not found:
            near = difflib.get_close_matches(pattern, [*patterns_of(names), *names], n=1, cutoff=0.3)
            hint = f"the nearest is {near[0]!r}" if near else f"its modules are {_listed(patterns_of(names))}"
            raise ConfigError(f"strategy.plan: {pattern!r} matches no module of {type(model).__name__}; {hint}")
        for name in found:
            if name in source:
                raise ConfigError(
                    f"strategy.plan: {source[name]!r} ({styles[name]}) and {pattern!r} ({style}) both match {name}: "
                    f"leave one of them out"
                )
            styles[name], source[name] = style, pattern
    return styles


def _expression(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\{[^}]*\})", pattern)
    texts = []
    for part in parts:
        if part == "*":
            texts.append("[^.]+")
        elif part.startswith("{") and part.endswith("}"):
            texts.append(f"(?:{'|'.join(re.escape(choice.strip()) for choice in part[1:-1].split(','))})")
        else:
            texts.append(re.escape(part))
    return re.compile("".join(texts))


def _check_kinds(styles: Mapping[str, str], model: nn.Module) -> None:
    for name, style in styles.items():
        module = model.get_submodule(name)
        kind = KINDS.get(style)
        if kind is not None and not isinstance(module, kind):
            raise ConfigError(
                f"strategy.plan: {name} is a {type(module).__name__}, and {style} splits a {kind.__name__} only: give "
                f"it another style, or leave it out"
            )
        if style == "local" and any(True for _ in module.parameters()):
            raise ConfigError(
                f"strategy.plan: {name} ({type(module).__name__}) has parameters, and local is for what has none, such "
                f"as dropout on split features"
            )
        if isinstance(module, nn.Embedding) and style == "vocab_embedding":
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise ConfigError(f"{name} has {option}={getattr(module, option)}, which vocab_embedding cannot do")
        if isinstance(module, nn.MultiheadAttention) and style == "packed_attention":
            if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
                raise ConfigError(
                    f"{name}: packed_attention splits plain self-attention only (no kdim, vdim, add_bias_kv)"
                )
            if styles.get(f"{name}.out_proj") != "rowwise":
                raise ConfigError(f"strategy.plan: {name} is packed_attention: add {name}.out_proj: rowwise")


def _check_containers(styles: Mapping[str, str]) -> None:
    """A region is entered once and left once."""
    exits: dict[str, list[str]] = {name: [] for name, style in styles.items() if style in CONTAINERS}
    for name, style in styles.items():
        container = _container(name, styles)
        if container is not None and style in CONTAINERS:
            raise ConfigError(f"strategy.plan: {name} ({style}) lies in {container}, a region already: leave one out")
        if container is not None and style == "rowwise":
            exits[container].append(name)
    for container, rows in exits.items():
        if len(rows) != 1:
            shown = f"{len(rows)} rowwise layers ({_listed(rows)})" if rows else "no rowwise layer"
            raise ConfigError(
                f"strategy.plan: {container} is a {styles[container]} with {shown}, and exactly one has to end it: "
                f"{'give each pair a region of its own' if rows else 'add one'}, or leave the region out"
            )


def split_sizes(styles: Mapping[str, str], model: nn.Module, *, sequence: bool) -> dict[str, int]:
    """What -> a size that has to divide by the tensor-parallel degree; the vocabulary is not among them."""
    sizes = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            if style == "colwise":
                sizes[f"{name}: out_features"] = module.out_features
            else:
                sizes[f"{name}: in_features"] = module.in_features
        elif isinstance(module, nn.MultiheadAttention) and style == "packed_attention":
            sizes[f"{name}: num_heads"] = module.num_heads
    own = getattr(model, "tensor_parallel_sizes", None)
    sizes.update({} if own is None else own())
    context = getattr(model, "context", None)
    if sequence and isinstance(context, int):
        sizes["sequence: context"] = context
    return sizes


def _check_sizes(styles: Mapping[str, str], model: nn.Module, *, degree: int, sequence: bool) -> None:
    sizes = split_sizes(styles, model, sequence=sequence)
    # Heads first: that the features of a projection do not divide follows from them.
    for what, size in sorted(sizes.items(), key=lambda item: "features" in item[0]):
        if size % degree:
            legal = [d for d in range(1, min(sizes.values()) + 1) if all(other % d == 0 for other in sizes.values())]
            degrees = "|".join(str(degree) for degree in legal if degree > 1)
            fix = f"strategy.tp={degrees}" if degrees else "another size, or strategy=ddp"
            if what.startswith("sequence"):
                fix += ", or strategy.sequence_parallel=false"
            layer, _, label = what.rpartition(": ")
            raise ConfigError(f"{layer} has {label} {size}, which strategy.tp={degree} does not divide: type {fix}")


def _check_ties(styles: Mapping[str, str], model: nn.Module) -> None:
    dims = {"colwise": 0, "vocab_embedding": 0, "vocab_output": 0, "rowwise": 1}
    for names in tied_names(model):
        how = {name: dims.get(styles.get(name.rpartition(".")[0], "replicate")) for name in names}
        if len(set(how.values())) > 1:
            shown = ", ".join(f"{name} ({styles.get(name.rpartition('.')[0], 'replicate')})" for name in names)
            raise ConfigError(
                f"strategy.plan: {shown} are one tensor and have to be split alike: give them like styles"
            )


def _no_plan(model: nn.Module) -> ConfigError:
    linear = patterns_of([name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
    if not linear:
        return ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan, and no linear layers that one could split: type "
            f"strategy=ddp or fsdp"
        )
    styles = ("colwise", "rowwise")
    start = ",".join(f"{pattern}:{style}" for pattern, style in zip(linear, styles, strict=False))
    return ConfigError(
        f"{type(model).__name__} has no tensor-parallel plan; its linear layers are {_listed(linear)}: start from "
        f"'strategy.plan={{{start}}}' (the first layer of a pair colwise, the second rowwise), or give it a method "
        f"tensor_parallel_plan()"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
