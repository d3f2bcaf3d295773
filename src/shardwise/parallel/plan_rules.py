"""What a plan has to fulfil, and where to start one: everything that can be told before a model has been changed."""

import re
from collections.abc import Mapping
from itertools import pairwise

from torch import nn
from torch.distributed.tensor import Replicate

from shardwise.errors import ConfigError
from shardwise.parallel.patterns import listed, match, patterns_of
from shardwise.parallel.state import tied_names
from shardwise.parallel.styles import CONTAINERS, placements

KINDS: dict[str, type[nn.Module]] = {
    "colwise": nn.Linear,
    "rowwise": nn.Linear,
    "vocab_embedding": nn.Embedding,
    "vocab_output": nn.Linear,
    "packed_attention": nn.MultiheadAttention,
}
"""Style -> the only kind of module that it can split."""


def check_styles(styles: Mapping[str, str], model: nn.Module, *, degree: int, sequence: bool) -> None:
    """Whether ``styles`` (module name below ``model`` -> style) can split ``model`` over ``degree`` ranks.

    Raises:
        ConfigError: names the layer, what is wrong with it, and what to type.
    """
    _check_kinds(styles, model)
    _check_pairs(styles, model)
    _check_containers(styles)
    _check_sizes(styles, model, degree=degree, sequence=sequence)
    _check_ties(styles, model)


def container_of(name: str, styles: Mapping[str, str]) -> str | None:
    """The module around ``name`` whose input enters the region for it."""
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((ancestor for ancestor in above if styles.get(ancestor) in CONTAINERS), None)


def _check_kinds(styles: Mapping[str, str], model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"{name or 'the model'} is of type {type(module).__name__}, which keeps a list of its weights that no "
                f"plan reaches: type strategy=ddp or fsdp"
            )
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
            _check_between(children, styles, model)


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


def _check_between(children: list[str], styles: Mapping[str, str], model: nn.Module) -> None:
    """What stands in a Sequential between a pair works on split features: elementwise, and without parameters."""
    split = False
    for name in children:
        module, style = model.get_submodule(name), styles.get(name)
        mixes = isinstance(module, (nn.GLU, nn.Softmax, nn.LogSoftmax)) or any(True for _ in module.parameters())
        if split and style is None and mixes:
            raise ConfigError(
                f"strategy.plan: {name} ({type(module).__name__}) stands between a colwise and a rowwise layer, where "
                f"only what is elementwise and without parameters works on a part of the features: split another pair"
            )
        split = style == "colwise" or (split and style != "rowwise")


def _check_containers(styles: Mapping[str, str]) -> None:
    """A region is entered once and left once."""
    opened = {name for name, style in styles.items() if style == "packed_attention"}
    exits: dict[str, list[str]] = {name: [] for name, style in styles.items() if style in CONTAINERS}
    for name, style in styles.items():
        container = container_of(name, styles)
        if container is not None and style in CONTAINERS:
            raise ConfigError(f"strategy.plan: {name} ({style}) lies in {container}, a region already: leave one out")
        if container is not None and style == "rowwise":
            exits[container].append(name)
        if container is not None and style == "colwise":
            opened.add(container)
    for container in exits:
        if container not in opened:
            raise ConfigError(
                f"strategy.plan: {container} is a region without a colwise layer, whose output its rowwise one takes: "
                f"add it, or leave the region out"
            )
    for container, rows in exits.items():
        if len(rows) != 1:
            shown = f"{len(rows)} rowwise layers ({listed(rows)})" if rows else "no rowwise layer"
            raise ConfigError(
                f"strategy.plan: {container} is a {styles[container]} with {shown}, and exactly one has to end it: "
                f"{'give each pair a region of its own' if rows else 'add one'}, or leave the region out"
            )


def _split_sizes(styles: Mapping[str, str], model: nn.Module, *, sequence: bool) -> dict[str, int]:
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
    sizes = _split_sizes(styles, model, sequence=sequence)
    legal = [d for d in range(2, min(sizes.values(), default=1) + 1) if all(size % d == 0 for size in sizes.values())]
    for name, style in styles.items():
        vocab = getattr(
            model.get_submodule(name), "num_embeddings" if style == "vocab_embedding" else "out_features", 0
        )
        if style.startswith("vocab") and -(-vocab // degree) * (degree - 1) >= vocab:
            raise ConfigError(
                f"{name} has a vocabulary of {vocab}, of which strategy.tp={degree} leaves a rank nothing: type a "
                f"smaller strategy.tp"
            )
    # Heads first: that the features of a projection do not divide follows from them.
    for what, size in sorted(sizes.items(), key=lambda item: "features" in item[0]):
        if size % degree:
            layer, _, label = what.rpartition(": ")
            degrees = "|".join(map(str, legal))
            fixes = (
                [f"strategy.tp={degrees} (on as many devices, or a multiple)"] if legal else ["strategy=ddp or fsdp"]
            )
            if layer == "sequence":
                fixes.append("strategy.sequence_parallel=false")
            raise ConfigError(
                f"{layer} has {label} {size}, which strategy.tp={degree} does not divide: type {', '.join(fixes)}, or "
                f"another {label}"
            )


def _check_ties(styles: Mapping[str, str], model: nn.Module) -> None:
    """One tensor is placed in one way, and its gradient is whole or a summand wherever it is used."""
    for names in tied_names(model):
        ways = set()
        for name in names:
            path, _, leaf = name.rpartition(".")
            placed = placements(styles.get(path, "replicate"), model.get_submodule(path))[leaf]
            ways.add((placed, isinstance(placed, Replicate) and container_of(path, styles) is not None))
        if len(ways) > 1:
            shown = ", ".join(f"{name} ({styles.get(name.rpartition('.')[0], 'replicate')})" for name in names)
            raise ConfigError(
                f"strategy.plan: {shown} are one tensor and have to be split alike: give them like styles"
            )


def no_plan(model: nn.Module, *, prefix: str, degree: int) -> ConfigError:
    """The error for a model without a plan: its linear layers, and a plan to start from that works when it is typed."""
    name = type(model).__name__
    linear = patterns_of([name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
    if not linear:
        return ConfigError(
            f"{name} has no tensor-parallel plan, and no linear layers that one could split: type strategy=ddp or fsdp"
        )
    start = _start(model, degree=degree)
    if start is None:
        return ConfigError(
            f"{name} has no tensor-parallel plan; its linear layers are {listed(linear)}: no two of them are a pair "
            f"that strategy.tp={degree} could split (a colwise layer whose output goes into a rowwise one): type "
            f"strategy=ddp or fsdp, or give it a method tensor_parallel_plan()"
        )
    # Hydra reads a key without letters as a number.
    typed = {key if re.search("[a-zA-Z]", key) else prefix + key: style for key, style in start.items()}
    shown = ",".join(f"{key}:{style}" for key, style in typed.items())
    return ConfigError(
        f"{name} has no tensor-parallel plan; its linear layers are {listed(linear)}: start from "
        f"'strategy.plan={{{shown}}}' (the first layers of a pair colwise, the second rowwise), or give it a method "
        f"tensor_parallel_plan()"
    )


def _start(model: nn.Module, *, degree: int) -> dict[str, str] | None:
    """Pattern -> style for a pair of linear layers beside one another, and for all that are like it."""
    attention = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention))
    siblings: dict[str, dict[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(attention):
            parent, _, leaf = name.rpartition(".")
            siblings.setdefault(parent, {})[leaf] = module
    found: list[tuple[int, str, dict[str, str]]] = []
    for parent, layers in siblings.items():
        leaves = list(layers)
        for place, leaf in enumerate(leaves[1:], 1):
            second = layers[leaf]
            first = [one for one in leaves[:place] if layers[one].out_features == second.in_features]
            first = [one for one in first if layers[one].in_features == layers[first[-1]].in_features]
            if first:
                widens = layers[first[-1]].out_features > layers[first[-1]].in_features
                attends = len(first) == len(leaves) - 1 >= 2  # q, k and v, and what takes them
                styles = dict.fromkeys(first, "colwise") | {leaf: "rowwise"}
                found.append((0 if widens else 1 if attends else 2, parent, styles))
    for _, parent, styles in sorted(found, key=lambda candidate: candidate[0]):
        for where in dict.fromkeys([re.sub(r"(?<![^.])\d+(?![^.])", "*", parent), parent]):
            plan = {f"{where}.{leaf}" if where else leaf: style for leaf, style in styles.items()}
            try:
                own = match(plan, model, prefix="")
                if not _is_interrupted(own, parent, model):
                    check_styles(own, model, degree=degree, sequence=False)
                    return plan
            except ConfigError:
                continue
    return None


def _is_interrupted(styles: Mapping[str, str], parent: str, model: nn.Module) -> bool:
    """Whether something with parameters stands between the layers of ``parent`` that have a style."""
    inside = [name for name, m in model.named_modules() if name and any(True for _ in m.parameters(recurse=False))]
    own = [place for place, name in enumerate(inside) if name in styles and name.rpartition(".")[0] == parent]
    return any(name not in styles for name in inside[min(own) : max(own)])
