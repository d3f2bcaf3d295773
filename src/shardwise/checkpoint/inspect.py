"""``python -m shardwise inspect <checkpoint or run folder>``: what is in a checkpoint, and whether it is whole.

A checkpoint may come from a stranger: nothing of it is run, and nothing that it names can drive the terminal.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shardwise.checkpoint.filesystems import reason
from shardwise.checkpoint.find import locate
from shardwise.checkpoint.manifest import printable
from shardwise.checkpoint.reader import read_plain
from shardwise.checkpoint.store import Store
from shardwise.errors import ConfigError

LARGEST = 10
"""Tensors that are listed unless all are asked for."""
MAX_WIDTH = 100
"""Characters of a name that are printed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{printable(message)} (python -m shardwise inspect --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is in a checkpoint; returns 0 if it is whole, 1 if it is damaged, 2 for a mistake of the user's."""
    parser = _Parser(
        prog="python -m shardwise inspect", description="What is in a checkpoint, and whether it is whole."
    )
    parser.add_argument("checkpoint", help="folder or URL of a checkpoint, or of a run (its newest whole checkpoint)")
    parser.add_argument("--quick", action="store_true", help="look at the sizes of files, do not read their contents")
    parser.add_argument("--tensors", action="store_true", help=f"list all tensors instead of the {LARGEST} largest")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    try:
        arguments = parser.parse_args(argv)
        report = inspect_checkpoint(arguments.checkpoint, contents=not arguments.quick)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(as_lines(report, all_tensors=arguments.tensors)))
    return 0 if report["whole"] else 1


def inspect_checkpoint(text: str, *, contents: bool = True) -> dict[str, Any]:
    """What is in the checkpoint that ``text`` names, as plain values; what cannot be read is None.

    Args:
        text: as for ``find_checkpoint``; a damaged checkpoint is looked at too, where it is the one that is named or
            there is no whole one.
        contents: whether the files are read and their checksums compared.

    Raises:
        ConfigError: there is no checkpoint.
    """
    store, name = locate(text)
    skipped: dict[str, list[str]] = {}
    if name is None:
        name, skipped = store.newest_whole(contents=contents)
        problems = [] if name is not None else next(iter(skipped.values()), [])
        if name is None:
            name = next(iter(skipped), None)
            if name is None:
                raise ConfigError(f"{printable(text)} has no checkpoint yet: {printable(store.url)} holds none")
            del skipped[name]
    else:
        problems = store.problems(name, contents=contents)
    url = store.url_of(name)
    manifest, state = _manifest(store, name), _state(store, name)
    config = state.get("config")
    precision = config.get("precision") if isinstance(config, dict) else None
    tensors, unreadable = _tensors(url)
    if unreadable is not None:
        problems = [*problems, unreadable]
    keys = ("step", "time", "run_id", "strategy", "mesh", "world_size", "metrics", "versions")
    report = {
        "checkpoint": url,
        "whole": not problems,
        "contents_verified": contents,
        "problems": problems,
        "skipped": skipped,
        "pointers": [file for file, target in (("last", store.last()), ("best", store.best())) if target == name],
        **{key: manifest.get(key) for key in keys},
        "samples_seen": state.get("samples_seen"),
        "experiment": state.get("experiment"),
        "precision": precision.get("kind") if isinstance(precision, dict) else None,
        "files": len(manifest.get("files", {})) or None,
        "bytes": sum(entry["bytes"] for entry in manifest.get("files", {}).values()) or None,
        "model": _totals(tensors, "model/"),
        "optimizer": _totals(tensors, "optimizer/"),
        "random_state_ranks": len({key.split("/")[1] for key in tensors if key.startswith("random/")}),
        "tensors": tensors,
    }
    return _strict(report)


def _manifest(store: Store, name: str) -> dict[str, Any]:
    try:
        return store.manifest(name)
    except ConfigError:
        return {}  # the problems say why


def _state(store: Store, name: str) -> dict[str, Any]:
    try:
        return read_plain(store.url_of(name))
    except ConfigError:
        return {}  # the problems say why


def _tensors(url: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Key -> shape, dtype and bytes; and what is wrong, if they cannot be read."""
    from shardwise.checkpoint.index import StoredTensors

    try:
        return {
            key: {
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "elements": math.prod(shape),
                "bytes": math.prod(shape) * dtype.itemsize,
            }
            for key, (shape, dtype) in sorted(StoredTensors(url).items())
        }, None
    except FileNotFoundError:
        return {}, "the index of tensors is missing"
    except Exception as error:  # whatever a damaged index makes of it
        return {}, f"the tensors cannot be listed ({reason(error)})"


def _totals(tensors: Mapping[str, Any], prefix: str) -> dict[str, int]:
    found = [entry for key, entry in tensors.items() if key.startswith(prefix)]
    counts = {key: sum(entry[key] for entry in found) for key in ("elements", "bytes")}
    return {"tensors": len(found), **counts}


def _strict(value: Any) -> Any:
    """The same without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- for a person --------------------------------------------------------------------------------------------------


def as_lines(report: Mapping[str, Any], *, all_tensors: bool = False) -> list[str]:
    """The report as text, with nothing in it that a terminal obeys."""
    rows = {
        "checkpoint": report["checkpoint"],
        "state": _wholeness(report),
        "step": report["step"],
        "samples seen": report["samples_seen"],
        "written": _date(report["time"]),
        "run": report["run_id"],
        "experiment": report["experiment"],
        "strategy": report["strategy"],
        "mesh": _mesh(report),
        "precision": report["precision"],
        "metrics": _pairs(report["metrics"]),
        "pointed to by": ", ".join(report["pointers"]) or "none of last, best",
        "size": None if report["bytes"] is None else f"{human_size(report['bytes'])} in {report['files']} files",
        "model": _counted(report["model"]),
        "optimizer": _counted(report["optimizer"]),
        "random states": f"of {report['random_state_ranks']} ranks" if report["random_state_ranks"] else None,
        "versions": _pairs(report["versions"]),
    }
    lines = []
    for label, value in rows.items():
        if value is not None and value != "":
            lines.append(f"{label:<14} {_shown(value)}")
        if label == "state":
            lines += [f"{'':<14} {_shown(problem)}" for problem in report["problems"]]
    for name, problems in report["skipped"].items():
        lines.append(f"{_shown(name)} is damaged or incomplete: {_shown('; '.join(problems[:3]))}")
    chosen = {key: entry for key, entry in report["tensors"].items() if all_tensors or key.startswith("model/")}
    if not all_tensors:
        largest = sorted(chosen, key=lambda key: -chosen[key]["bytes"])[:LARGEST]
        chosen = {key: chosen[key] for key in largest}
    if chosen:
        lines += ["", *_table(chosen)]
        hidden = len(report["tensors"]) - len(chosen)
        lines += [f"... and {hidden} more tensors (--tensors lists all)"] if hidden else []
    return lines


def _wholeness(report: Mapping[str, Any]) -> str:
    if not report["whole"]:
        return "DAMAGED or incomplete:"
    return "whole, contents verified" if report["contents_verified"] else "complete by sizes; contents not verified"


def _shown(value: object) -> str:
    text = printable(value)
    return text if len(text) <= 500 else text[:497] + "..."


def _date(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _mesh(report: Mapping[str, Any]) -> str | None:
    if not isinstance(report["mesh"], dict):
        return None
    axes = " ".join(f"{axis}={degree}" for axis, degree in report["mesh"].items())
    return f"{axes} ({report['world_size']} processes)"


def _pairs(mapping: Any) -> str | None:
    if not isinstance(mapping, dict):
        return None
    return ", ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in mapping.items()
    )


def _counted(totals: Mapping[str, int]) -> str | None:
    if not totals["tensors"]:
        return None
    return f"{totals['tensors']} tensors, {totals['elements']:,} elements, {human_size(totals['bytes'])}"


def _table(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [("tensor", "shape", "format", "size")]
    for key, entry in tensors.items():
        name = printable(key)
        shape = "x".join(map(str, entry["shape"])) or "scalar"
        rows.append(
            (
                name if len(name) <= MAX_WIDTH else name[: MAX_WIDTH - 3] + "...",
                shape,
                entry["dtype"],
                human_size(entry["bytes"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, dtype, size in rows
    ]


def human_size(count: int) -> str:
    """Bytes as a person reads them: ``812 B``, ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size:,.1f} TiB"
