"""A tensor-parallel plan: a table of module-name pattern -> style, and what it does to a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError
from shardwise.parallel.noise import Noise, is_noisy
from shardwise.parallel.patterns import match
from shardwise.parallel.plan_rules import KINDS, check_styles, container_of, no_plan
from shardwise.parallel.state import tie, tied_names
from shardwise.parallel.styles import CONTAINERS, STYLES, Region


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
        raise no_plan(model, prefix=prefix, degree=degree)
    own = match(table, model, prefix=prefix)
    splits = [style for style in own.values() if style in KINDS]
    if not splits:
        raise ConfigError(f"strategy.plan splits no layer of {name}: at least one colwise and rowwise pair is needed")
    unnamed = _without_a_style(own, model)
    allowed = {"vocab_embedding", "sequence", "vocab_output"} <= set(own.values())
    if sequence_parallel and not allowed:
        raise ConfigError(
            f"strategy.sequence_parallel=true, but the plan of {name} has not all of vocab_embedding (after which "
            f"sequences are split), sequence (what works on the parts) and vocab_output (before which they are whole "
            f"again): type strategy.sequence_parallel=null"
        )
    if sequence_parallel and unnamed:
        raise ConfigError(
            f"strategy.sequence_parallel=true, and {unnamed[0]} of {name} has parameters but no style: name it "
            f"sequence (works on a part) or replicate (sees whole sequences), or type strategy.sequence_parallel=null"
        )
    sequence = (allowed and not unnamed) if sequence_parallel is None else sequence_parallel
    check_styles(own, model, degree=degree, sequence=sequence)
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
        container = name if style in CONTAINERS else container_of(name, plan.styles)
        at = Region(name, mesh, plan.sequence, inside=container not in (None, name), noise=noises.get(container or ""))
        STYLES[style](module, at)
    tie(root, tied)


def _without_a_style(styles: Mapping[str, str], model: nn.Module) -> list[str]:
    """Modules outside of regions with parameters of their own of which the plan says nothing."""
    return [
        name or "the top"
        for name, module in model.named_modules()
        if name not in styles and any(True for _ in module.parameters(recurse=False)) and not container_of(name, styles)
    ]


def _planned(root: nn.Module) -> tuple[str, nn.Module]:
    """The module that a plan is of, and what stands before its names below ``root``."""
    for name, module in root.named_modules():
        if hasattr(module, "tensor_parallel_plan"):
            return f"{name}." if name else "", module
    model = getattr(root, "model", None)
    return ("model.", model) if isinstance(model, nn.Module) else ("", root)
