"""``python -m shardwise doctor``: look at everything, tell what to fix, and measure.

The object that ``--json`` prints (units are bytes, seconds, bytes/s and FLOP/s; what could not be found out is null or
left out):

- ``rows``: {name, state: ok|note|problem, text, fix} of everything that is told; ``problems``: how many of them are
- ``host``, ``time``, ``shardwise``, ``python``, ``versions`` {package: version}, ``git``
- ``cpu`` {model, cores, allowed, quota, usable, load}, ``memory`` {total, limit, available},
  ``shared_memory`` {bytes, free}, ``open_files`` {soft, hard}
- ``gpus`` [{index, name, memory, used, driver, celsius}] by the driver, ``torch`` {version, cuda, gpus, capabilities,
  backends}, ``links`` {"0-1": "NV18"} by the driver
- ``network`` {host, addresses}, ``interfaces`` {name: Mbit/s}, ``disk`` {path, bytes, free, write, fsync},
  ``wandb`` {mode, logged_in, reachable}
- ``measured``, null with ``--quick``: {device, processes, backend, threads, all_reduce {latency, bandwidth,
  bus_bandwidth, error, points [[bytes, seconds]]}, matmul {format: FLOP/s of one device}, copy, host_to_device}.
  An all-reduce of n bytes takes latency + n / bandwidth; bus_bandwidth = bandwidth * 2 (p - 1) / p is what a link
  carries (Patarasuk and Yuan, 2009), whatever the number p of processes.
"""

import argparse
import io
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.manifest import printable
from shardwise.doctor import gpus, machine, network, settings, versions
from shardwise.doctor.disk import disk
from shardwise.doctor.findings import PROBE_SECONDS, Findings, Probe, Row, look
from shardwise.doctor.measure import LIMIT_SECONDS, measurement
from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets

COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
IMPORT_SECONDS = 60.0
"""How long a probe that imports PyTorch or Lightning may take."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (python -m shardwise doctor --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine; returns 0, 1 if something is to be fixed, or 2 for a mistake on the command line."""
    parser = _Parser(
        prog="python -m shardwise doctor",
        description="What this machine has for training, how fast it is, and what to fix. Exit status 1: a problem.",
    )
    parser.add_argument("--quick", action="store_true", help="look only: leave the measurement out")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--to", metavar="FILE", help="write that object to a file as well")
    parser.add_argument("--output-root", metavar="FOLDER", default="outputs", help="where runs go (default: outputs)")
    try:
        arguments = parser.parse_args(argv)
        if arguments.to is not None:
            _check_file(Path(arguments.to).expanduser())
        found = examine(output_root=arguments.output_root, quick=arguments.quick, shown=not arguments.json)
        plain = as_plain(found)
        text = json.dumps(plain, indent=2, allow_nan=False)
        if arguments.to is not None:
            _write(Path(arguments.to).expanduser(), text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(text)
    else:
        print(verdict(found))
    return int(plain["problems"] > 0)


def examine(*, output_root: str = "outputs", quick: bool = False, shown: bool = False) -> Findings:
    """Look at everything, and measure unless ``quick``; with ``shown`` each part is printed as it is known.

    Args:
        output_root: the folder that runs go to.
        quick: whether the measurement is left out.
        shown: whether rows are printed.
    """
    first: dict[str, Probe] = {
        "cpu": machine.cpu,
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "open files": machine.open_files,
        "disk": disk(output_root, measure=not quick),
        "host name": network.host_name,
        "interfaces": network.interfaces,
        "ports": network.ports,
        "packages": versions.packages,
        "environment": settings.environment,
        "git": settings.git,
    }
    later: dict[str, Probe] = {"PyTorch": gpus.devices, "links": gpus.links, "W&B": settings.tracker}
    steps = [(first, PROBE_SECONDS), (later, IMPORT_SECONDS)]
    if not quick:
        steps.append(({"measurement": measurement}, LIMIT_SECONDS + IMPORT_SECONDS))
    every = Findings()
    for probes, seconds in steps:
        if shown and "measurement" in probes and sys.stderr.isatty():
            print("measuring ...", file=sys.stderr)
        found = look(probes, seconds=seconds)
        if shown:
            show(found.rows)
        every.rows += found.rows
        every.facts |= found.facts
    return every


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table, what to fix below each; a file has no edge."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(width=7)
    table.add_column(width=13, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        text = Text(_safe(row.text))
        if row.fix:
            text.append(f"\nfix: {_safe(row.fix)}", style="bold" if row.state == "problem" else "")
        table.add_row(Text(row.state, style=COLOURS[row.state]), Text(row.name, style="bold"), text)
    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    plain = io.StringIO()
    Console(file=plain, highlight=False, width=10_000).print(table)
    for line in plain.getvalue().splitlines():
        print(line.rstrip())


def _safe(text: str) -> str:
    """Words of the environment and of other programs, without secrets or what a terminal would obey."""
    return printable(without_secrets(text))


def verdict(found: Findings) -> str:
    """One line: whether something is to be fixed."""
    problems = [row.name for row in found.rows if row.state == "problem"]
    if not problems:
        return "nothing has to be fixed"
    return f"to fix: {', '.join(dict.fromkeys(problems))}"


def as_plain(found: Findings) -> dict[str, Any]:
    """Everything as the JSON object that the head of this file documents."""
    rows = [
        {"name": row.name, "state": row.state, "text": _safe(row.text), "fix": _safe(row.fix)} for row in found.rows
    ]
    return {
        "shardwise": metadata.version("shardwise"),
        "host": socket.gethostname(),
        "time": time.time(),
        "problems": sum(row.state == "problem" for row in found.rows),
        "rows": rows,
        "measured": None,
        **found.facts,
    }


def _check_file(path: Path) -> None:
    """Whether the result can be written, before anything is measured."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--to {path}: a file in a folder that exists and can be written to is needed")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to {path}: {error.strerror}; name a file elsewhere") from error
