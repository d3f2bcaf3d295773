"""A tensor-parallel plan: a table of module-name pattern -> style, and what it does to a model.

In a pattern ``*`` stands for one part of a dotted name, and ``{a,b}`` for either: ``blocks.*.attn.{q,k,v}: colwise``.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
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
        raise _no_plan(model, prefix=prefix, degree=degree)
    own = _match(table, model, prefix=prefix)
    splits = [style for style in own.values() if style in KINDS]
    if not splits:
        raise ConfigError(f"strategy.plan splits no layer of {name}: at least one colwise and rowwise pair is needed")
    allowed = {"vocab_embedding", "sequence"} <= set(own.values())
    if sequence_parallel and not allowed:
        raise ConfigError(
            f"strategy.sequence_parallel=true, but the plan of {name} has no vocab_embedding (where they are split) "
            f"with sequence layers (that work on the parts): type strategy.sequence_parallel=null"
        )
    sequence = allowed if sequence_parallel is None else sequence_parallel
    _check_kinds(own, model)
    _check_pairs(own, model)
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


def _match(table: Mapping[Any, Any], model: nn.Module, *, prefix: str) -> dict[str, str]:
    """Module name -> style, every pattern checked; it may begin as names in a checkpoint do, with ``prefix``."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str] = {}
    source: dict[str, str] = {}
    for pattern, style in table.items():
        if not isinstance(style, str) or style not in STYLES:
            near = difflib.get_close_matches(str(style), STYLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STYLES)}"
            raise ConfigError(f"strategy.plan: '{pattern}' has the style {style!r}: no such style; {hint}")
        for one in _alternatives(str(pattern)):
            expression = _expression(one)
            found = [name for name in names if expression.fullmatch(name)]
            found = found or [name for name in names if expression.fullmatch(prefix + name)]
            if not found:
                near = difflib.get_close_matches(one, [*patterns_of(names), *names], n=1)
                hint = f"the nearest is {near[0]!r}" if near else f"its modules are {_listed(patterns_of(names))}"
                raise ConfigError(f"strategy.plan: {one!r} matches no module of {type(model).__name__}; {hint}")
            for name in found:
                if name in source:
                    raise ConfigError(
                        f"strategy.plan: {source[name]!r} ({styles[name]}) and '{pattern}' ({style}) both match "
                        f"{name}: leave one of them out"
                    )
                styles[name], source[name] = style, str(pattern)
    return styles


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern)))


def _alternatives(pattern: str) -> list[str]:
    """A pattern with ``{a,b}`` as one pattern for each choice."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [whole for choice in found[1].split(",") for whole in _alternatives(before + choice.strip() + after)]


def _check_kinds(styles: Mapping[str, str], model: nn.Module) -> None:
    for name, style in styles.items():
        module = model.get_submodule(name)
        kind = KINDS.get(style)
        if kind is not None and not isinstance(module, kind):
            raise ConfigError(
                f"strategy.plan: {name} is of type {type(module).__name__}, and {style} is for {kind.__name__} only: "
                f"give it another style, or leave it out"
            )
        if style == "local" and any(True for _ in module.parameters()):
            raise ConfigError(
                f"strategy.plan: {name} ({type(module).__name__}) has parameters, and local is for what has none, such "
                f"as dropout on split features"
            )
        if isinstance(module, nn.Embedding) and style == "vocab_embedding":
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise ConfigError(
                        f"{name} has {option}={getattr(module, option)}, which vocab_embedding cannot do: leave the "
                        f"option out of the layer, or the layer out of the plan"
                    )
        if isinstance(module, nn.MultiheadAttention) and style == "packed_attention":
            if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
                raise ConfigError(
                    f"{name}: packed_attention splits plain self-attention only (no kdim, vdim, add_bias_kv)"
                )
            if styles.get(f"{name}.out_proj") != "rowwise":
                raise ConfigError(f"strategy.plan: {name} is packed_attention: add {name}.out_proj: rowwise")


def _check_pairs(styles: Mapping[str, str], model: nn.Module) -> None:
    """What a column-split layer leaves split, a row-split layer has to take; in a Sequential their order is known."""
    opens = [name for name, style in styles.items() if style in ("colwise", "packed_attention")]
    closes = [name for name, style in styles.items() if style == "rowwise"]
    for some, others, style in ((opens, closes, "rowwise"), (closes, opens, "colwise")):
        if some and not others:
            raise ConfigError(
                f"strategy.plan: {some[0]} is {styles[some[0]]}, and nothing is {style}: the layers of a pair are "
                f"colwise, whose output stays split, and rowwise, which takes it; add the other one, or leave it out"
            )
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            children = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
            split = [name for name in children if styles.get(name) in ("colwise", "rowwise")]
            outside = {styles[name] for name in (*opens, *closes) if name not in split}
            _check_turns(split, styles, outside=outside)


def _check_turns(split: list[str], styles: Mapping[str, str], *, outside: set[str]) -> None:
    """Layers of a Sequential, in order; ``outside`` are styles that its first and last layer may be a pair with."""
    for first, second in pairwise([None, *split, None]):
        before, after = styles.get(first or ""), styles.get(second or "")
        if (before == "colwise") == (after == "rowwise"):
            continue
        wants = "colwise" if after == "rowwise" else "rowwise"
        if (first is None or second is None) and wants in outside:
            continue
        neighbour = f"{first} before it is {before}" if first and second else f"no {wants} layer belongs to it"
        raise ConfigError(
            f"strategy.plan: {second or first} is {after or before}, and {neighbour}: in a Sequential colwise and "
            f"rowwise layers take turns"
        )


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
    legal = [d for d in range(2, min(sizes.values()) + 1) if all(size % d == 0 for size in sizes.values())]
    # Heads first: that the features of a projection do not divide follows from them.
    for what, size in sorted(sizes.items(), key=lambda item: "features" in item[0]):
        if size % degree:
            layer, _, label = what.rpartition(": ")
            fixes = [f"strategy.tp={'|'.join(map(str, legal))}"] if legal else ["strategy=ddp or fsdp"]
            if layer == "sequence":
                fixes.append("strategy.sequence_parallel=false")
            raise ConfigError(
                f"{layer} has {label} {size}, which strategy.tp={degree} does not divide: type {', '.join(fixes)}, or "
                f"another {label}"
            )


def _check_ties(styles: Mapping[str, str], model: nn.Module) -> None:
    dims = {"colwise": 0, "vocab_embedding": 0, "vocab_output": 0, "rowwise": 1}
    for names in tied_names(model):
        how = {name: dims.get(styles.get(name.rpartition(".")[0], "replicate")) for name in names}
        if len(set(how.values())) > 1:
            shown = ", ".join(f"{name} ({styles.get(name.rpartition('.')[0], 'replicate')})" for name in names)
            raise ConfigError(
                f"strategy.plan: {shown} are one tensor and have to be split alike: give them like styles"
            )


def _no_plan(model: nn.Module, *, prefix: str, degree: int) -> ConfigError:
    name = type(model).__name__
    linear = patterns_of([name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
    if not linear:
        return ConfigError(
            f"{name} has no tensor-parallel plan, and no linear layers that one could split: type strategy=ddp or fsdp"
        )
    start = _first_pair(model, degree=degree)
    if start is None:
        return ConfigError(
            f"{name} has no tensor-parallel plan; its linear layers are {_listed(linear)}: no two of them are a pair "
            f"that strategy.tp={degree} could split (a colwise layer whose output goes into a rowwise one): type "
            f"strategy=ddp or fsdp, or give it a method tensor_parallel_plan()"
        )
    # Hydra reads a key without letters as a number.
    typed = [key if re.search("[a-zA-Z]", key) else prefix + key for key in start]
    shown = ",".join(f"{key}:{style}" for key, style in zip(typed, ("colwise", "rowwise"), strict=True))
    return ConfigError(
        f"{name} has no tensor-parallel plan; its linear layers are {_listed(linear)}: start from "
        f"'strategy.plan={{{shown}}}' (the first layer of a pair colwise, the second rowwise), or give it a method "
        f"tensor_parallel_plan()"
    )


def _first_pair(model: nn.Module, *, degree: int) -> tuple[str, str] | None:
    """Patterns of two linear layers that follow one another and fit, preferably the first widening: an MLP's."""
    attention = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention))
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(attention)]
    pairs = [
        (first.out_features > first.in_features, one, two)
        for (one, first), (two, second) in pairwise(layers)
        if first.out_features == second.in_features and first.out_features % degree == 0
    ]
    if not pairs:
        return None
    widening, one, two = min(pairs, key=lambda pair: not pair[0])
    firsts, seconds = ({pair[place] for pair in pairs if pair[0] == widening} for place in (1, 2))
    names = [name for name, _ in model.named_modules()]
    for starts, ends in zip(_patterns(one), _patterns(two), strict=True):
        first, second = ({name for name in names if _expression(p).fullmatch(name)} for p in (starts, ends))
        if first <= firsts and second <= seconds and not first & second:
            return starts, ends
    raise AssertionError("a name matches itself only")


def _patterns(name: str) -> list[str]:
    """What may stand for ``name`` and its like in other blocks, the widest first; at last itself."""
    return [*patterns_of([name]), re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name, count=1), name]


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
