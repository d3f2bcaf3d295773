"""Writing checkpoints beside the training: a copy of the state, a thread, and one at a time.

Training stops for the copy. The thread writes, verifies and publishes; the ranks meet in a process group of its own.
What goes wrong there is raised in the training, at the next step or at its end.
"""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from fsspec.core import url_to_fs
from torch import Tensor

from shardwise.checkpoint.index import portable
from shardwise.checkpoint.reader import STATE
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.tensors import FileSums, write_tensors
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces


class SavingError(ConfigError):
    """A checkpoint cannot be written; one line."""


class Writer:
    """Writes one checkpoint at a time.

    Args:
        store: where to; only the first rank publishes.
        group: gloo, for this alone; None with one process.
        background: write in a thread; else ``save`` returns when all is done.
        published: called in the thread on the first rank, with the name, when a checkpoint is there.
    """

    def __init__(
        self,
        store: Store,
        *,
        group: dist.ProcessGroup | None,
        background: bool = True,
        published: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.store = store
        self._group = group
        self._background = background
        self._published = published
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, name: str, pieces: Mapping[str, Pieces], state: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint; waits for the one before. A collective, in the thread.

        Args:
            name: of the checkpoint; the same on every rank.
            pieces: key -> what this rank holds; may change as soon as this returns.
            state: what goes into ``state.json``; that of the first rank counts.
            manifest: what its manifest is to say besides the files; likewise.

        Raises:
            Exception: whatever went wrong with this one or the one before.
        """
        self.wait()
        if not self._background:
            self._write(name, pieces, state, manifest)
        else:
            self._thread = threading.Thread(
                target=self._write_and_keep_error,
                args=(name, self._copied(pieces), json.dumps(state), dict(manifest)),
                name=f"save {name}",
                daemon=True,  # an exit that cannot wait for it does not
            )
            self._thread.start()

    def check(self) -> None:
        """Raise what has gone wrong in the thread, if anything has."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written; whether that is so. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        self.check()
        return True

    def _copied(self, pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """The same pieces in memory of the writer's own, which is kept for the next time (pinned, for a GPU's)."""
        copies, device = {}, None
        for key, whole in pieces.items():
            parts = {}
            for offset, part in whole.parts.items():
                buffer = self._buffers.get((key, offset))
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                    self._buffers[key, offset] = buffer
                buffer.copy_(part, non_blocking=True)
                device = part.device if part.is_cuda else device
                parts[offset] = buffer
            copies[key] = Pieces(whole.shape, parts, whole.dtype)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _write_and_keep_error(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as error:
            self._error = error

    def _write(self, name: str, pieces: Mapping[str, Pieces], state: Any, manifest: Mapping[str, Any]) -> None:
        try:
            self._write_together(name, pieces, state, manifest)
        except OSError as error:
            raise SavingError(
                f"{name} cannot be written to {self.store.url} ({error.strerror or error}): free some space there, or "
                f"type checkpoint.folder=<another place>; what was saved before is untouched"
            ) from error

    def _write_together(self, name: str, pieces: Mapping[str, Pieces], state: Any, manifest: Mapping[str, Any]) -> None:
        first = self._group is None or dist.get_rank() == 0
        place = self._agreed(lambda: self.store.begin(name) if first else None)
        sums = write_tensors(pieces, place, group=self._group)
        if first:
            text = state if isinstance(state, str) else json.dumps(state)
            self._agreed(lambda: self._publish(name, place, text, sums, manifest))
        else:
            self._agreed(lambda: None)
        if first:
            self._published(name)

    def _publish(self, name: str, place: str, state: str, sums: FileSums, manifest: Mapping[str, Any]) -> None:
        system, path = url_to_fs(place)
        data = state.encode()
        with system.open(f"{path}/{STATE}", "wb") as file:
            file.write(data)
        files = {**sums, STATE: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}}
        self.store.publish(name, {**manifest, "files": files})

    def _agreed(self, act: Callable[[], Any]) -> Any:
        """What the first rank's ``act`` returns, on every rank; an error of any rank is raised on all."""
        result, error = None, None
        try:
            result = act()
        except Exception as raised:
            if self._group is None:
                raise
            error = portable(raised)
        if self._group is None:
            return result
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (result, error), group=self._group)
        for _, theirs in everyone:
            if theirs is not None:
                raise theirs
        return everyone[0][0]
