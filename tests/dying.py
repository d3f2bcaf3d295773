"""A rank that saves checkpoints and is killed at a certain operation on the file system: started by `warm.py`."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint import filesystems
from shardwise.checkpoint.files import SummingStream
from shardwise.checkpoint.manifest import step_name
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.writer import Writer
from shardwise.parallel.pieces import Pieces

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}
WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
ROWS = 4
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 6.0}
"""By step; the best of those that a retention of the last two would drop is the second."""


def save_and_die(
    _: list[str], folder: str, first: int, last: int, die_at: int, rank: int = 0, size: int = 1, dies: int = 0
) -> int:
    """Save steps ``first`` to ``last``; rank ``dies`` is killed before its ``die_at``-th operation, 0 for never.

    Each rank writes to ``<folder>.done_<rank>`` what it has finished, and at the end how many operations there were.
    """
    torch.set_num_threads(1)
    group = None
    if size > 1:
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        method = f"file://{folder}.store_{first}_{die_at}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        group = dist.group.WORLD
    saving = SaveCheckpoints(folder, keep_last=2, keep_best=1, monitor="loss")
    saving._writer = writer = Writer(Store(folder), group=group, background=True, published=saving._tidy_up)
    if rank == 0:
        saving._finish(step_name(first - 1))
        saving._remove_leftovers()
    done = Path(f"{folder}.done_{rank}")
    count = _count_operations(folder, die_at if rank == dies else 0)
    for step in range(first, last + 1):
        facts = {"step": step, "run_id": "r", "strategy": "fsdp", "world_size": size, "mesh": {}, "versions": {}}
        writer.save(
            step_name(step), state_of(step, rank, size), {"step": step}, {**facts, "metrics": {"loss": LOSSES[step]}}
        )
        writer.wait()
        with done.open("a") as file:
            file.write(f"{step}\n")
    with done.open("a") as file:
        file.write(f"operations {count()}\n")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def state_of(step: int, rank: int, size: int) -> dict[str, Pieces]:
    """A tensor that is split between the ranks, one that all have, and one of each rank's own."""
    split = torch.full((ROWS // size, 3), float(step))
    return {
        "model/split": Pieces(torch.Size((ROWS, 3)), {(rank * ROWS // size, 0): split}, split.dtype),
        "model/all": Pieces(torch.Size((2,)), {(0,): torch.full((2,), float(step))}, torch.float32),
        f"random/{rank}/torch": Pieces(torch.Size((1,)), {(0,): torch.tensor([float(step)])}, torch.float32),
    }


def _count_operations(folder: str, die_at: int) -> Callable[[], int]:
    """Count what changes files below a folder, half-written files included; die before one of these changes."""
    count = 0

    def operation(halfway: Callable[[], Any] = lambda: None) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            halfway()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str) and path.startswith(f"{folder}/") and flags & WRITE:
                operation()
        elif event in CHANGES:
            path = os.fspath(arguments[0])
            inside = path.startswith(folder) if isinstance(path, str) else False
            if inside or arguments[-1] not in (-1, None):  # the second: relative to an open folder, as rmtree does
                operation()

    def half(stream: Any, data: Any) -> Callable[[], None]:
        def write() -> None:
            view = memoryview(bytes(data))
            stream.write(view[: len(view) // 2])
            stream.flush()

        return write

    def pass_on(self: Any) -> None:
        operation(half(self._stream, self._collected))
        passed_on(self)

    def write_file(path: str, data: bytes) -> None:
        operation(lambda: Path(path).write_bytes(data[: len(data) // 2]))
        whole_write(path, data)

    def sync(descriptor: int) -> None:
        operation()
        fsync(descriptor)

    passed_on, whole_write, fsync = SummingStream._pass_on, filesystems._write, os.fsync
    SummingStream._pass_on, filesystems._write, os.fsync = pass_on, write_file, sync  # type: ignore[method-assign]
    sys.addaudithook(hook)
    return lambda: count
