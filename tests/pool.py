"""A pool of live ranks: one import of torch, many multi-process checks.

    def total(x):                                   # a function at the top level of a test module
        value = torch.tensor(float(x + dist.get_rank()))
        dist.all_reduce(value)
        return value.item()

    def test_total(pool):
        assert pool.run(total, 10, world_size=2) == [21.0, 21.0]

The ranks (`pool_rank.py`) are forked once from a warm forkserver and answer calls until the tests end. Each call sees
what a fresh process under `torchrun` would see: the launcher's variables, a new gloo group over a new store, seeded
generators, the default dtype and modes; and the caller's environment and working directory. Only the imported modules,
with what they keep, outlast a call.
"""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool_rank import PRELOAD, Call, serve

START_TIMEOUT = 180.0
"""Seconds for the forkserver's imports and a rank's first sign of life; a busy machine needs a fraction of it."""
GRACE = 2.0
"""Seconds that the other ranks get to answer once one has failed. After that they are stuck in a collective."""


@dataclass
class Rank:
    """The parent's side of one live rank."""

    process: Any
    connection: multiprocessing.connection.Connection
    stack_file: Path


class RankError(AssertionError):
    """Something went wrong on a rank. The message names the rank that failed first and holds its traceback.

    `errors` maps every rank that failed by itself to its text, in the order in which they failed.
    """

    def __init__(self, errors: dict[int, str], *, world_size: int) -> None:
        self.errors = errors
        parts = [f"rank {rank} of {world_size}: {text}" for rank, text in errors.items()]
        super().__init__("\n".join(parts))


class RankPool:
    """Live ranks, started when first needed and started again after a hang or a crash."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: list[Rank] = []
        self._counter = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int = 2,
        init: bool = True,
        timeout: float = 60.0,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call `function(*arguments)` on every rank and return the results in rank order.

        `function` is defined at the top level of an importable module (or is a `functools.partial` of such a one).
        With `init=False` the process group is left to the function; `init_process_group("gloo")` and Lightning find
        the variables of `torchrun` and its store (MASTER_PORT, which is 0 otherwise). One group per call: a second
        `init_process_group` after a `destroy_process_group` would meet the first one's keys in the store.
        `env` adds variables to the caller's environment. `timeout` in seconds holds for the call and its collectives.

        Raises RankError if a rank raised, died, or did not answer in time.
        """
        payload = pickle.dumps((function, arguments))
        self._ensure(world_size)
        store = None if init else _serve_store()
        store_file = Path(self._folder.name) / f"store_{next(self._counter)}"
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        try:
            for rank in range(world_size):
                launcher = launcher_variables(rank, world_size, port=store.port if store else 0)
                environment = {**os.environ, **launcher, **(env or {})}
                call = Call(payload, environment, os.getcwd(), list(sys.path), store_file if init else None, timeout)
                with contextlib.suppress(OSError):  # it died while idle; collecting says so
                    self._ranks[rank].connection.send_bytes(pickle.dumps(call))
            missing = self._collect(set(range(world_size)), answers, errors, deadline=time.monotonic() + timeout)
            if missing and not errors:
                text = f"no answer within {timeout:g} s"
                errors.update({rank: f"{text}\n{self._stack(rank)}" for rank in sorted(missing)})
            reusable = not missing and all(self._acknowledged(rank) for rank in range(world_size))
        except BaseException:  # Ctrl-C, say: nobody knows what the ranks are doing
            self._kill()
            raise
        finally:
            store_file.unlink(missing_ok=True)
        if not reusable:
            self._kill()
        if errors:
            raise RankError(errors, world_size=world_size)
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all ranks."""
        self._kill()
        self._folder.cleanup()

    def _ensure(self, world_size: int) -> None:
        if any(rank.process.exitcode is not None for rank in self._ranks):
            self._kill()
        if len(self._ranks) >= world_size:
            return
        self._context.set_forkserver_preload(list(PRELOAD))
        fresh = []
        for number in range(len(self._ranks), world_size):
            ours, theirs = self._context.Pipe()
            stack_file = Path(self._folder.name) / f"rank_{number}.stack"
            # not daemonic: a data loader inside a rank starts processes of its own
            process = self._context.Process(target=serve, args=(theirs, stack_file), name=f"rank-{number}")
            process.start()
            theirs.close()
            fresh.append(Rank(process, ours, stack_file))
        self._ranks += fresh
        for rank in fresh:
            if not rank.connection.poll(START_TIMEOUT):
                self._kill()
                raise RuntimeError(f"a rank of the pool did not start within {START_TIMEOUT:g} s")
            try:
                rank.connection.recv_bytes()
            except EOFError:
                self._kill()
                raise RuntimeError("a rank of the pool died while it started; its output says why") from None

    def _collect(
        self, waiting: set[int], answers: dict[int, Any], errors: dict[int, str], *, deadline: float
    ) -> set[int]:
        """Fill `answers` and `errors` as they come, and return the ranks that neither answered nor died."""
        failures: list[tuple[float, int, str]] = []
        while waiting and (left := deadline - time.monotonic()) > 0:
            by_connection = {self._ranks[rank].connection: rank for rank in waiting}
            for connection in multiprocessing.connection.wait(list(by_connection), timeout=left):
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = by_connection[connection]
                waiting.discard(rank)
                try:
                    failed_at, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._ranks[rank].process.join(5)
                    failed_at, value = 0.0, f"died with exit code {self._ranks[rank].process.exitcode}"
                if failed_at is None:
                    answers[rank] = value
                else:
                    failures.append((failed_at, rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
                    self._release(rank)  # its peers may be waiting for it in a collective: they fail now
        for rank in answers:
            self._release(rank)
        # Peers of a failed rank fail a moment later in a collective, and may be heard first. A death is always a cause.
        errors.update({rank: text for _, rank, text in sorted(failures)})
        return waiting

    def _release(self, rank: int) -> None:
        with contextlib.suppress(OSError):  # it died; acknowledging says so
            self._ranks[rank].connection.send_bytes(b"leave the group")

    def _acknowledged(self, rank: int) -> bool:
        """Whether a rank has left its group and is as good as new."""
        connection = self._ranks[rank].connection
        with contextlib.suppress(EOFError, OSError):
            return connection.poll(GRACE) and connection.recv_bytes() == b"clean"
        return False

    def _stack(self, rank: int) -> str:
        """Where a rank that does not answer is stuck, as faulthandler tells it."""
        process, stack_file = self._ranks[rank].process, self._ranks[rank].stack_file
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            end = time.monotonic() + 3
            while not (text := stack_file.read_text()) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.2)  # it may still be writing
            return stack_file.read_text() or text
        return ""

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join(10)
            rank.connection.close()
        self._ranks = []


def _serve_store() -> Any:
    """The store of `torchrun`'s agent, on a port that the kernel chose: no race for a free one."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launcher_variables(rank: int, world_size: int, *, port: int) -> dict[str, str]:
    """The variables that `torchrun` sets for one of `world_size` ranks on one node, with its store at `port`."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that resolves to nothing must not matter
    return {name: str(value) for name, value in variables.items()}
