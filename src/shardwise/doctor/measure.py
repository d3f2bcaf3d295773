"""A short measurement with real processes: all-reduce, matrix product and copy, for people and for a planner."""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardwise.doctor.findings import Findings
from shardwise.doctor.machine import cpu_quota

LIMIT_SECONDS = 60.0
"""How long the processes have, their imports included."""
UNEVEN = 0.9
"""A GPU below this share of the fastest one is named."""


def measurement(found: Findings) -> None:
    """Start two processes, or one for each of several GPUs, and tell what they measure."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size = max(2, gpus)
    backend = "nccl" if gpus >= 2 and dist.is_nccl_available() else "gloo"
    parts = run_processes(size, backend)
    if problem := next((f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if "error" in part), None):
        fix = "see the rows on host name, interfaces and ports" + ("; NCCL_DEBUG=INFO tells more" if gpus else "")
        found.problem("all-reduce", f"{size} processes on {backend} failed: {problem}", fix)
        return
    sizes = [int(count) for count, _ in parts[0]["points"]]
    points = [(count, max(part["points"][i][1] for part in parts)) for i, count in enumerate(sizes)]
    latency, bandwidth, error = fit(points)
    bus = bandwidth * 2 * (size - 1) / size
    computing = [part for part in parts if "matmul" in part]
    slowest = {name: min(part["matmul"][name] for part in computing) for name in computing[0]["matmul"]}
    found.facts["measured"] = {
        "device": computing[0]["device"],
        "processes": size,
        "backend": backend,
        "threads": computing[0]["threads"],
        "all_reduce": {
            "latency": latency,
            "bandwidth": bandwidth,
            "bus_bandwidth": bus,
            "error": error,
            "points": [list(point) for point in points],
        },
        "matmul": slowest,
        "copy": min(part["copy"] for part in computing),
        "host_to_device": min((part["host_to_device"] for part in computing if "host_to_device" in part), default=None),
    }
    text = f"{size} processes on {backend}: {1e6 * latency:,.0f} us + bytes / {bandwidth / 1e9:.3g} GB/s"
    found.ok("all-reduce", f"{text} ({shown_size(sizes[0])} to {shown_size(sizes[-1])}, within {100 * error:.0f} %)")
    rates = ", ".join(f"{name} {shown_rate(rate)}" for name, rate in slowest.items())
    where = "GPU" if computing[0]["device"] == "cuda" else f"CPU, {counted(computing[0]['threads'], 'thread')}"
    each = [part["matmul"]["bfloat16"] for part in computing]
    slow = [f"GPU {rank} {shown_rate(rate)}" for rank, rate in enumerate(each) if rate < UNEVEN * max(each)]
    if slow:
        fix = "look at its temperature, power limit and other users (nvidia-smi): all ranks wait for the slowest"
        found.note("matmul", f"{where}: {rates}; slower than the fastest in bfloat16: {', '.join(slow)}", fix)
    else:
        found.ok("matmul", f"{where}: {rates}")
    copies = f"{found.facts['measured']['copy'] / 1e9:.3g} GB/s read and written"
    to_device = found.facts["measured"]["host_to_device"]
    found.ok("memory copy", copies + (f", {to_device / 1e9:.3g} GB/s from host to GPU" if to_device else ""))


def run_processes(size: int, backend: str, *, limit: float = LIMIT_SECONDS) -> list[dict[str, Any]]:
    """What each process has measured, or an ``error``; none of them is left behind."""
    from shardwise.doctor.kernels import run_rank

    context = multiprocessing.get_context("spawn")
    threads = usable_threads()
    processes, readers = [], []
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(size):
                reader, writer = context.Pipe(duplex=False)
                arguments = (rank, size, backend, threads, store, writer)
                process = context.Process(target=run_rank, args=arguments, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            return _collected(readers, deadline, limit)
        finally:
            for process in processes:
                process.join(max(0.0, min(2.0, deadline - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join()
            for reader in readers:
                reader.close()


def _collected(readers: Sequence[Any], deadline: float, limit: float) -> list[dict[str, Any]]:
    """What comes over the pipes until the deadline; an error of one is the end for all, as they wait for it."""
    parts: dict[int, dict[str, Any]] = {}
    waiting = dict(enumerate(readers))
    while waiting and not any("error" in part for part in parts.values()):
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            try:
                parts[rank] = waiting.pop(rank).recv()
            except (EOFError, OSError):
                parts[rank] = {"error": "ended without a word (out of memory?)"}
    late = {"error": f"gave nothing within {limit:g} s"}
    if any("error" in part for part in parts.values()):
        late = {}
    return [parts.get(rank, late) for rank in range(len(readers))]


def usable_threads() -> int:
    """Threads that can run at the same time: by affinity, the cgroup's quota, and OMP_NUM_THREADS."""
    threads = len(os.sched_getaffinity(0))
    if (quota := cpu_quota()) is not None:
        threads = min(threads, max(1, int(quota)))
    with contextlib.suppress(ValueError):
        threads = min(threads, max(1, int(os.environ.get("OMP_NUM_THREADS", threads))))
    return threads


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Latency (s) and bandwidth (bytes/s) of ``seconds = latency + bytes / bandwidth``, and its largest relative error.

    Least squares of the relative errors, as the times span orders of magnitude; both are positive.

    Args:
        points: (bytes, seconds), of at least two sizes.
    """
    # Minimise sum((a x + b y - 1)^2) with x = 1 / seconds and y = bytes / seconds: a is the latency, b 1 / bandwidth.
    rows = [(1 / seconds, count / seconds) for count, seconds in points]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    a, b = ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant) if determinant else (0.0, 0.0)
    if a <= 0:  # the smallest took less than the line says
        a = min(seconds for _, seconds in points)
    if b <= 0:
        largest, seconds = max(points)
        b = seconds / largest
    error = max(abs(a + b * count - seconds) / seconds for count, seconds in points)
    return a, 1 / b, error


def shown_rate(rate: float) -> str:
    """``95 GFLOP/s``, ``790 TFLOP/s``."""
    return f"{rate / 1e9:.3g} GFLOP/s" if rate < 1e12 else f"{rate / 1e12:.3g} TFLOP/s"


def counted(number: int, noun: str) -> str:
    """``1 thread``, ``8 threads``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown_size(count: int) -> str:
    """``1 KiB``, ``8 MiB``."""
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
