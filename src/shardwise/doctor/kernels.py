"""What one process of the measurement does: all-reduce with the others, then multiply and copy by itself."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 0.25
"""How long one thing is repeated, at most REPEATS times."""
REPEATS = 30
BYTES = {"cpu": (2**10, 2**14, 2**17, 2**20, 2**23), "cuda": (2**10, 2**15, 2**20, 2**24, 2**28)}
"""Sizes of the all-reduced tensors: the small ones show the latency, the large ones the bandwidth."""
COPIED = {"cpu": 2**26, "cuda": 2**30}
LARGEST = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the largest matrix that is multiplied."""
LONG_ENOUGH = {"cpu": 0.02, "cuda": 0.005}
"""Seconds of a product that is not made larger."""


def run_rank(rank: int, size: int, backend: str, threads: int, store: str, writer: Connection) -> None:
    """Measure, and send the result or what went wrong as a plain mapping.

    Args:
        rank: of this process; its GPU too.
        size: processes.
        backend: gloo, or nccl with a GPU for each process.
        threads: for what each process computes while the others do.
        store: file by which they meet, which does not exist.
        writer: where the mapping goes.
    """
    try:
        writer.send(_measure(rank, size, backend, threads, store))
    except Exception as error:
        writer.send({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
    writer.close()
    if backend == "nccl":
        os._exit(0)  # its threads may wait for a peer that is gone


def _measure(rank: int, size: int, backend: str, threads: int, store: str) -> dict[str, Any]:
    torch.set_num_threads(max(1, threads // size))
    torch.manual_seed(rank)
    gpu = torch.device("cuda", rank) if rank < torch.cuda.device_count() else None
    device = gpu if backend == "nccl" and gpu is not None else torch.device("cpu")
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    points = []
    for count in BYTES[device.type]:
        tensor = torch.ones(count // 4, device=device)
        points.append([count, median(seconds_of(partial(dist.all_reduce, tensor), device, together=True))])
    dist.destroy_process_group()
    result: dict[str, Any] = {"points": points}
    if gpu is None and rank:
        return result  # the others leave the cores to the first
    torch.set_num_threads(threads)
    computing = gpu or torch.device("cpu")
    result |= {"device": computing.type, "threads": threads}
    result["matmul"] = {name: flops(computing, dtype, tf32=name == "tf32") for name, dtype in formats(computing)}
    count = COPIED[computing.type] // 4
    source, target = torch.ones(count, device=computing), torch.empty(count, device=computing)
    result["copy"] = 2 * 4 * count / min(seconds_of(lambda: target.copy_(source), computing))
    if gpu is not None:
        host = torch.ones(2**26, pin_memory=True)
        there = torch.empty(2**26, device=gpu)
        result["host_to_device"] = 4 * 2**26 / min(seconds_of(lambda: there.copy_(host, non_blocking=True), gpu))
    return result


def formats(device: torch.device) -> list[tuple[str, torch.dtype]]:
    """Names and types of what is multiplied; tf32 is float32 with a shorter mantissa, on NVIDIA's tensor cores."""
    both = [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
    return both if device.type == "cpu" else [*both, ("tf32", torch.float32), ("float16", torch.float16)]


def flops(device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """FLOP/s of a product of square matrices (2 n^3 operations), as large as it takes to be long enough."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    n = 256
    while True:
        a = torch.randn(n, n, device=device).to(dtype)
        b = torch.randn(n, n, device=device).to(dtype)
        seconds = min(seconds_of(partial(torch.matmul, a, b), device, limit=0.05))  # others' work is not ours
        if seconds >= LONG_ENOUGH[device.type] or n >= LARGEST[device.type]:
            return 2 * n**3 / min(seconds, *seconds_of(partial(torch.matmul, a, b), device))
        n *= 2


def seconds_of(
    action: Callable[[], Any], device: torch.device, *, together: bool = False, limit: float = SECONDS
) -> list[float]:
    """Seconds of an action, each time that it is repeated, after it has warmed up.

    Args:
        action: what is timed.
        device: waited for after each.
        together: whether all ranks have to repeat it equally often: then the first decides how often.
        limit: seconds, at most REPEATS times.
    """

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    once = timed()
    repeats = torch.tensor(min(REPEATS, max(3, int(limit / max(once, 1e-9)))), device=device)
    if together:
        dist.broadcast(repeats, 0)
    return [timed() for _ in range(int(repeats))]
