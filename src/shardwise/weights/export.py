"""``python -m shardwise export``: a checkpoint's weights as safetensors, for the plain model or in Llama's layout."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.find import find_checkpoint
from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.manifest import printable
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.tensors import read_tensors
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces
from shardwise.provenance import without_secrets
from shardwise.weights.destination import Destination
from shardwise.weights.llama import EMBEDDING, HEAD, llama_config, to_llama
from shardwise.weights.safetensors_file import Kinds, in_order, size_of

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
READ_BYTES = 2**26
"""Tensors that are read at a time."""


@dataclass
class Exported:
    """What was written."""

    files: list[Path]
    tensors: int
    bytes: int
    step: int
    run_id: str
    notes: list[str]
    """What there is to know about the checkpoint that was taken."""


def export(
    source: str,
    target: str,
    *,
    layout: str = "plain",
    dtype: str | None = None,
    context: int | None = None,
    force: bool = False,
) -> Exported:
    """Write the weights of a checkpoint, with about four times the memory of its largest tensor.

    ``plain``: names and shapes are those of the plain model's ``state_dict``, persistent buffers included, so
    ``model.load_state_dict(safetensors.torch.load_file(path))`` works. What the model ties is there under each of its
    names, because ``load_state_dict`` asks for them all; ``safetensors.torch.load_model``, which asks for one only,
    takes the file of a model that ties something with ``strict=False``.

    ``llama``: names are those of Hugging Face's Llama, and ``config.json`` lies beside the weights.

    Args:
        source: what ``find_checkpoint`` takes. Every file's checksum is compared first.
        target: a ``.safetensors`` file, or a folder, which gets ``model.safetensors``; or files of 5 GB and an index
            where that would be larger.
        layout: ``plain`` or ``llama``.
        dtype: of all floating-point tensors; None leaves each as it was stored.
        context: the longest input, for ``llama``, where the checkpoint's configuration does not say.
        force: replace what is there.

    Raises:
        ConfigError: no such checkpoint, a model that the layout has no place for, a number that ``dtype`` does not
            hold, or a target that exists, cannot be written, or lies in a run's folder.
    """
    place = Destination(target)
    place.check(force=force)
    found = find_checkpoint(source)
    state, stored = read_state(found.url), StoredTensors(found.url)
    config = state.get("config") or {}
    model = config.get("model") or {}
    whole = {key.removeprefix("model/"): kind for key, kind in stored.items() if key.startswith("model/")}
    if not whole:
        raise ConfigError(f"{printable(found.url)} holds no model")
    wanted = None if dtype is None else DTYPES[dtype]
    tensors = {n: (shape, wanted if wanted and kind.is_floating_point else kind) for n, (shape, kind) in whole.items()}
    beside = None
    if layout == "llama":
        shapes = {name: shape for name, (shape, _) in tensors.items()}
        kind = str(tensors.get(EMBEDDING, ((), torch.float32))[1]).removeprefix("torch.")
        told = (config.get("data") or {}).get("context")  # what model.context=auto takes
        beside = llama_config(model, shapes, dtype=kind, context=context or (told if isinstance(told, int) else None))
        names = {str(to_llama(name)): name for name in tensors}
    else:
        names = {name: name for name in tensors}
        for first, *others in _ties(state, tensors):
            names |= dict.fromkeys(others, first)
    kinds = {name: tensors[ours] for name, ours in names.items()}
    keys = {name: f"model/{ours}" for name, ours in names.items()}
    metadata = {
        "format": "pt",
        "shardwise_version": version("shardwise"),
        "step": str(state["step"]),
        "run_id": str(state.get("run_id", "")),
        "model": json.dumps(without_secrets(model)),
    }

    def values(part: Kinds) -> Iterator[Tensor]:
        return _values(found.url, part, keys)

    try:
        files = place.write(kinds, values, metadata=metadata, config=beside, force=force)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{printable(target)} cannot be written ({why}): type another --to") from error
    total = sum(size_of(*kind) for kind in kinds.values())
    return Exported(files, len(names), total, state["step"], metadata["run_id"], found.notes())


def _ties(state: Mapping[str, Any], names: Mapping[str, Any]) -> list[list[str]]:
    """The names of what the model ties, of which the first is stored."""
    recorded = state["trainer"].get("tied")
    if isinstance(recorded, list):
        return [group for group in recorded if isinstance(group, list) and group and group[0] in names]
    # gpt has both ends of the vocabulary or ties them
    is_gpt = EMBEDDING in names and "blocks.0.attn.q.weight" in names
    return [[EMBEDDING, HEAD]] if is_gpt and HEAD not in names else []


def _values(url: str, tensors: Kinds, keys: Mapping[str, str]) -> Iterator[Tensor]:
    """The tensors in the order of a file; ``READ_BYTES`` of them, or one, in memory at a time.

    Args:
        url: of the checkpoint.
        tensors: name in the file -> (shape, dtype) in the file.
        keys: name in the file -> key in the checkpoint.
    """
    stored, batch, waiting = StoredTensors(url), list[str](), 0
    for name in in_order(tensors):
        size = size_of(*stored[keys[name]])
        if batch and waiting + size > READ_BYTES:
            yield from _read(url, batch, tensors, keys, stored)
            batch, waiting = [], 0
        batch.append(name)
        waiting += size
    yield from _read(url, batch, tensors, keys, stored)


def _read(
    url: str, names: list[str], tensors: Kinds, keys: Mapping[str, str], stored: StoredTensors
) -> Iterator[Tensor]:
    read = {key: torch.empty(stored[key][0], dtype=stored[key][1]) for key in {keys[name] for name in names}}
    pieces = {key: Pieces(t.shape, {(0,) * t.dim(): t} if t.numel() else {}, t.dtype) for key, t in read.items()}
    try:
        read_tensors(pieces, stored)
    except OSError as error:
        raise ConfigError(f"{printable(url)} cannot be read ({error.strerror or error})") from error
    for name in names:
        yield _converted(name, read[keys[name]], tensors[name][1])


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if tensor.is_floating_point() and not torch.equal(converted.isfinite(), tensor.isfinite()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise ConfigError(
            f"{name} has a value of {largest:.3g}, and {str(dtype).removeprefix('torch.')} ends at "
            f"{torch.finfo(dtype).max:.3g}: type --dtype bfloat16 or float32"
        )
    return converted


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwise export",
        description="Write the weights of a checkpoint as safetensors.",
        epilog="Load them with: model.load_state_dict(safetensors.torch.load_file('model.safetensors')), or into a run "
        "with init_from=model.safetensors",
    )
    parser.add_argument(
        "source", metavar="CHECKPOINT", help="a checkpoint's folder, .../checkpoints/last, a run folder"
    )
    parser.add_argument("--to", required=True, metavar="PATH", help="a .safetensors file, or a folder")
    parser.add_argument(
        "--layout",
        choices=("plain", "llama"),
        default="plain",
        help="names of the plain model, or of Llama",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: as they were trained)")
    parser.add_argument("--context", type=int, help="for llama: the longest input, if the checkpoint does not say")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    arguments = parser.parse_args(argv)
    try:
        done = export(
            arguments.source,
            arguments.to,
            layout=arguments.layout,
            dtype=arguments.dtype,
            context=arguments.context,
            force=arguments.force,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    where = ", ".join(str(path) for path in done.files[:3]) + (", ..." if len(done.files) > 3 else "")
    of = f" of {done.run_id}" if done.run_id else ""
    print(f"{where}: {done.tensors} tensors, {_amount(done.bytes)}, from step {done.step}{of}")
    return 0


def _amount(count: int) -> str:
    power = min(int(math.log(max(count, 1), 1000)), 4)
    return f"{count / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
