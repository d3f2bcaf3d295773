"""The model of a run under the names of the plain model, in pieces; read into any layout, and compared with another."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.tensors import read_tensors
from shardwise.errors import ConfigError
from shardwise.parallel.fsdp import reshard
from shardwise.parallel.pieces import Pieces, pieces_of
from shardwise.parallel.state import tied_names

PREFIX = "model."
"""Of every name in a LightningModule that is a wrapper around one plain model."""


def plain_names(module: nn.Module) -> dict[str, Tensor]:
    """Name in the plain model -> parameter or persistent buffer; what is tied comes once, under its first name.

    The plain model of a task is its ``model``; a LightningModule that holds tensors elsewhere too is one itself.
    """
    reshard(module)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict(keep_vars=True).keys()  # without the way through each DTensor
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return tensors


def plain_ties(module: nn.Module, names: Mapping[str, Tensor] | None = None) -> list[list[str]]:
    """The names, in the plain model, of each parameter that has several; the first is the one it is stored under."""
    names, ties = plain_names(module) if names is None else names, tied_names(module)
    if all(first in names for first, *_ in ties):
        return ties
    return [[name.removeprefix(PREFIX) for name in several] for several in ties]


def model_pieces(names: Mapping[str, Tensor]) -> dict[str, Pieces]:
    """Key in a checkpoint -> what this rank holds, out of ``plain_names``."""
    return {f"model/{name}": pieces_of(tensor) for name, tensor in names.items()}


def load_model(module: nn.Module, stored: StoredTensors, *, strict: bool = True) -> None:
    """Read the model of a checkpoint into the parts that this rank holds.

    Raises:
        ConfigError: the checkpoint is of another model; says what is missing, what is new, and what has another shape.
    """
    check_stored_model(module, stored, strict=strict)
    pieces = model_pieces(plain_names(module))
    read_tensors({key: value for key, value in pieces.items() if key in stored}, stored)


def check_stored_model(module: nn.Module, stored: StoredTensors, *, strict: bool = True) -> None:
    """Whether a checkpoint holds this model, laid out or not, on any device; see ``check_same_model``."""
    wanted = {f"model/{name}": tuple(tensor.shape) for name, tensor in plain_names(module).items()}
    present = {key: shape for key, (shape, _) in stored.items() if key.startswith("model/")}
    check_same_model(wanted, present, where=stored.url, strict=strict)


def check_same_model(
    wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]], *, where: str, strict: bool = True
) -> None:
    """Compare names and shapes of a model with those that are to be loaded into it.

    Raises:
        ConfigError: in one line, what is missing there, what is new there, and what has another shape.
    """
    said = []
    if strict:
        said += [_listed("it lacks", [name for name in wanted if name not in present])]
        said += [_listed("it has besides", [name for name in present if name not in wanted])]
    other = [
        f"{n} ({_shape(present[n])}, here {_shape(wanted[n])})"
        for n in wanted
        if present.get(n, wanted[n]) != wanted[n]
    ]
    said += [_listed("of another shape are", other)]
    if any(said):
        raise ConfigError(f"{where} is of another model: {'; '.join(filter(None, said))}")


def _listed(head: str, names: list[str]) -> str:
    names = [name.removeprefix("model/") for name in names]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{head} {', '.join(names[:4])}{more}" if names else ""


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"
