"""One live rank of the pool: its main loop, and what makes each call look like a fresh process."""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "numpy",
    "pytorch_lightning",
)


@dataclass
class Call:
    """What one rank gets for one call."""

    payload: bytes
    """(function, arguments), pickled apart: it can be read only once `import_path` holds. The function travels as
    module and name, tensors by value."""
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    store_file: Path | None
    """Where the ranks meet, or None if the function makes the process group."""
    timeout: float


def reset_torch() -> None:
    """Put the process-wide state of torch, numpy and random back to where a fresh process has it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision("highest")


def serve(connection: multiprocessing.connection.Connection, stack_file: Path) -> None:
    """A rank's main loop: answer calls until the parent goes away."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stack = stack_file.open("w")
    for module in PRELOAD:  # at no cost if the forkserver has them; it is silent about what it failed to import
        __import__(module)
    gc.freeze()  # the collection before each call need not look at the imported modules
    environment = dict(os.environ)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            # Lightning puts its own idea of the handler in place; registering again alone would change nothing.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            connection.send_bytes(_answer(message))
            # The group stays until the parent has heard from every rank: one that finishes early would otherwise
            # close connections that its peers are still setting up or reading.
            connection.recv_bytes()
            connection.send_bytes(b"clean" if _leave_group() else b"")
            os.chdir("/")  # the caller's folder may be gone before the next call
            _set_environment(environment)


def _answer(message: bytes) -> bytes:
    """(None, result) or (time of failure, traceback), pickled. The clock is one for all processes of a machine."""
    try:
        return pickle.dumps((None, _perform(pickle.loads(message))))
    except BaseException as error:  # SystemExit and pytest's outcomes too: the test has to see them
        return pickle.dumps((time.monotonic(), "".join(traceback.format_exception(error)).rstrip()))


def _leave_group() -> bool:
    """Destroy the process group, and say whether the next one will get the names that a fresh process gives it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # An initialisation that failed half-way leaves this count, from which groups are named, ahead of its peers'.
    return dist.distributed_c10d._world.group_count == 0


def _perform(call: Call) -> Any:
    import torch.distributed as dist

    sys.path[:] = call.import_path
    os.chdir(call.folder)
    _set_environment(call.environment)
    _reset()
    function, arguments = pickle.loads(call.payload)
    if call.store_file:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # A file, as each TCPStore looks up the names of addresses, which costs seconds where the resolver is slow.
        method = f"file://{call.store_file}"
        timeout = timedelta(seconds=call.timeout)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timeout)
    return function(*arguments)


def _reset() -> None:
    import torch

    gc.collect()  # what the last call left holds process groups and threads
    reset_torch()
    torch.set_num_threads(1)
    if rank_zero := sys.modules.get("lightning_utilities.core.rank_zero"):
        # Lightning reads the rank when it is imported, which in a fresh process is after the launcher set it.
        rank_zero.rank_zero_only.rank = int(os.environ["RANK"])
    if "torch.distributed.tensor" in sys.modules:
        # Cached results hold the meshes of earlier calls, whose process groups are gone.
        from torch.distributed.tensor import _random
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _random._rng_tracker = None


def _set_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _die_with_parent() -> None:
    # A forkserver's children outlive a parent that is killed, and a rank stuck in a collective would not notice.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
