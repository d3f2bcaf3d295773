"""``init_from=``: the weights of a model from elsewhere, read straight into the parts that each rank holds."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from shardwise.checkpoint.find import POINTERS, find_checkpoint
from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.manifest import MANIFEST, printable
from shardwise.checkpoint.model_state import PREFIX, check_same_model, load_model, plain_names, plain_ties
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT
from shardwise.parallel.pieces import pieces_of
from shardwise.weights.llama import EMBEDDING, HEAD, check_config, from_llama, is_llama
from shardwise.weights.safetensors_file import PICKLED, SUFFIX, TensorFiles

COMPARED = 2**22
"""Elements of tied tensors that are compared at a time."""


class InitFrom(Callback):
    """Fills the model, laid out as it is by then, before training starts.

    Args:
        source: as ``load_weights`` takes it.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        load_weights(pl_module, self.source)


def load_weights(module: nn.Module, source: str) -> None:
    """Fill the parameters and persistent buffers of a module that may be laid out over a mesh already.

    Every rank reads by itself, and only what it holds: beside the module there is one slice in memory at a time, of the
    file's dtype. No process group is needed. Nothing is filled unless names and shapes agree.

    Args:
        module: a LightningModule or a plain model, with memory (not on the meta device).
        source: a ``.safetensors`` file; a folder of them, with or without an index; or what names a checkpoint: its
            folder, a run folder, ``.../checkpoints/last``. Names are those of the plain model, or Llama's for ``gpt``.
            What several names share may be there under one of them or under all. Other dtypes are converted.

    Raises:
        ConfigError: there is nothing to read, or it is of another model; says what is missing, new or of another shape.
    """
    path = _tensor_files(source)
    if path is None:
        load_model(module, StoredTensors(find_checkpoint(source, contents=os.environ.get("RANK", "0") == "0").url))
        return
    wanted = plain_names(module)
    with TensorFiles(path) as files:
        names = _names(files, module, wanted)
        for first, *others in plain_ties(module):
            there = [name for name in (first, *others) if name in names]
            for other in there[1:]:
                _check_equal(files, there[0], other, names)
            if there:
                names[first] = names[there[0]]
            names = {name: theirs for name, theirs in names.items() if name not in others}
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        check_same_model(shapes, {name: files.shapes[theirs] for name, theirs in names.items()}, where=files.where)
        for name, tensor in wanted.items():
            if tensor.is_floating_point() != files.is_floating(names[name]):
                kind = files.codes[names[name]]
                raise ConfigError(
                    f"{files.where}: {names[name]} is {kind}, and here {tensor.dtype}: quantised weights cannot be read"
                )
        with torch.no_grad():
            for name, tensor in wanted.items():
                for offset, part in pieces_of(tensor).parts.items():
                    files.read_into(part, names[name], offset=offset)


def check_weights(source: str) -> list[str]:
    """The names of the tensors in what ``load_weights`` would read; cheap, reads headers only.

    Raises:
        ConfigError: there is nothing, no permission, or it is damaged.
    """
    path = _tensor_files(source)
    if path is not None:
        with TensorFiles(path) as files:
            return sorted(files.shapes)
    url = find_checkpoint(source, contents=False).url
    return sorted(key.removeprefix("model/") for key in StoredTensors(url) if key.startswith("model/"))


def _tensor_files(source: str) -> Path | None:
    """The file or folder of safetensors that ``source`` names; None if it can only be a checkpoint."""
    shown = printable(source)
    if "://" in source:
        if source.endswith(SUFFIX):
            raise ConfigError(f"{shown}: {SUFFIX} files are read from local folders only: copy it to one")
        return None
    path = Path(source)
    if path.suffix in PICKLED:
        raise ConfigError(f"{shown}: pickled weights can run code when they are read: convert them to {SUFFIX}")
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    try:
        if path.is_file() and path.name not in POINTERS:
            raise ConfigError(f"{shown} is no {SUFFIX} file, and no folder of a checkpoint or a run")
        if not path.is_dir() or (path / MANIFEST).exists() or (path / "checkpoints").is_dir():
            return None
        return path if any(name.endswith(SUFFIX) for name in os.listdir(path)) else None
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read ({error.strerror})") from error


def _names(files: TensorFiles, module: nn.Module, wanted: Iterable[str]) -> dict[str, str]:
    """Name in the plain model -> name in the files."""
    ours = set(wanted)
    if is_llama(files.shapes) and EMBEDDING in ours:
        names = from_llama(files.shapes)
        config = _config(files)
        gpt = next((m for m in module.modules() if isinstance(m, GPT)), None)
        if gpt is not None and config:
            check_config(config, gpt, where=str(files.folder / "config.json"))
        if HEAD in ours and HEAD not in names and config.get("tie_word_embeddings"):
            names[HEAD] = names[EMBEDDING]
        return names
    if files.shapes and all(name.startswith(PREFIX) for name in files.shapes) and not ours & set(files.shapes):
        return {name.removeprefix(PREFIX): name for name in files.shapes}  # of a LightningModule around the model
    return {name: name for name in files.shapes}


def _config(files: TensorFiles) -> dict[str, Any]:
    """What the configuration beside the files says; empty if there is none."""
    path = files.folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    return config if isinstance(config, dict) else {}


def _check_equal(files: TensorFiles, one: str, other: str, names: dict[str, str]) -> None:
    """Whether two tensors that are one in the model are equal."""
    first, second = names[one], names[other]
    shape = files.shapes[first]
    equal = shape == files.shapes[second]
    if equal and shape:
        rows = max(1, COMPARED // max(1, torch.Size(shape[1:]).numel()))
        for begin in range(0, shape[0], rows):
            offset, part = (begin, *(0 for _ in shape[1:])), (min(rows, shape[0] - begin), *shape[1:])
            a, b = (files.read(name, offset=offset, shape=part) for name in (first, second))
            equal = equal and torch.equal(a, b.to(a.dtype))
    if not equal:
        raise ConfigError(
            f"{files.where}: {first} and {second} differ, and the model ties {one} and {other}: untie "
            f"them (model.tie_embeddings=false for gpt), or name another file"
        )
