"""Processor, memory, shared memory and open files: what this machine, or the container, lets a process have."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from shardwise.batch_finder import available_memory
from shardwise.doctor.findings import Findings
from shardwise.quantities import shown_bytes

LEAST_MEMORY = 2 * 2**30
LEAST_SHM, GOOD_SHM = 256 * 2**20, 2**30
"""Bytes of /dev/shm: PyTorch's loader workers and NCCL meet there; a container has 64 MiB if nobody says otherwise."""
LEAST_FILES, GOOD_FILES = 512, 4096
BUSY = 0.5
"""Other programs' share of the cores from which figures are in doubt."""


def cpu(found: Findings, *, root: Path = Path("/")) -> None:
    """Model and cores: of the machine, of this process's affinity, and of the cgroup's quota."""
    model = _cpu_model(root)
    there = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    quota = cpu_quota(root)
    usable = allowed if quota is None else min(float(allowed), quota)
    load = os.getloadavg()[0]
    found.facts["cpu"] = {"model": model, "cores": there, "allowed": allowed, "quota": quota, "usable": usable}
    found.facts["cpu"]["load"] = load
    text = f"{model}, {there} cores" if allowed == there else f"{model}, {allowed} of {there} cores (affinity)"
    if quota is not None and quota < allowed:
        fix = f"start the container with more CPUs, or share {quota:.3g} among the processes with OMP_NUM_THREADS"
        found.note("cpu", f"{text}, but the cgroup grants the time of {quota:.3g}: threads beyond are throttled", fix)
    else:
        found.ok("cpu", text)
    if load > BUSY * usable:
        text = f"{load:.1f} processes wanted the {usable:g} cores in the last minute: figures come out too low"
        found.note("load", text, "end them, or measure again when they have ended")


def _cpu_model(root: Path) -> str:
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroups that this process is in, the innermost first, of version 2 or of a version 1 controller."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount = root / "sys/fs/cgroup"
            elif controller in controllers.split(","):
                mount = root / "sys/fs/cgroup" / controller
            else:
                continue
            inner = Path(path.lstrip("/"))
            yield from (mount / inner, *(mount / parent for parent in inner.parents))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the cgroups grant; None without a limit."""
    quotas = []
    for group in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = (group / "cpu.max").read_text().split()
            quotas.append(int(most) / int(period))  # "max" is no number
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            quotas += [int(most) / int(period)] if int(most) > 0 else []
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the cgroups grant; None without a limit."""
    limits = []
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < 2**60), default=None)  # version 1 says "none" as a huge number


def memory(found: Findings, *, root: Path = Path("/")) -> None:
    """Memory of the machine, the cgroup's limit, and what is free of both."""
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    total, free, limit = int(lines["MemTotal"].split()[0]) * 1024, available_memory(root), memory_limit(root)
    found.facts["memory"] = {"total": total, "limit": limit, "available": free}
    text = f"{shown_bytes(total)}, {shown_bytes(free)} of it free"
    if limit is not None and limit < total:
        text = f"{shown_bytes(limit)} of {shown_bytes(total)} (cgroup), {shown_bytes(free)} of it free"
    if free < LEAST_MEMORY:
        fix = "end what else takes memory, or give the container more: each process takes about 0.5 GiB to begin with"
        found.problem("memory", text, fix)
    else:
        found.ok("memory", text)


def shared_memory(found: Findings, *, path: str = "/dev/shm") -> None:
    """Size of /dev/shm, where loader workers hand their batches over and NCCL and gloo meet."""
    stat = os.statvfs(path)
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    found.facts["shared_memory"] = {"bytes": size, "free": free}
    text = f"{path}: {shown_bytes(free)} free of {shown_bytes(size)}"
    if size < LEAST_SHM:
        fix = "start the container with --shm-size=8g or --ipc=host (docker), or mount a larger tmpfs on /dev/shm"
        found.problem("shared memory", f"{text}: loader workers die of a bus error", fix)
    elif free < LEAST_SHM:
        found.problem("shared memory", f"{text}: loader workers die of a bus error", f"remove old files from {path}")
    elif free < GOOD_SHM:
        found.note("shared memory", f"{text}: little for loader workers with large batches", "docker run --shm-size=8g")
    else:
        found.ok("shared memory", text)


def open_files(found: Findings) -> None:
    """Limits of this shell: open files, and locked memory where there is InfiniBand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    unlimited = soft == resource.RLIM_INFINITY
    found.facts["open_files"] = {"soft": None if unlimited else soft, "hard": None if most == "unlimited" else hard}
    text = "no limit" if unlimited else f"{soft} may be open (ulimit -n)"
    if unlimited or soft >= GOOD_FILES:
        found.ok("open files", text)
    else:
        larger = most == "unlimited" or hard >= GOOD_FILES
        fix = f"ulimit -n {GOOD_FILES if larger else hard}" if hard != soft else "ask for a higher limit (limits.conf)"
        tell = found.problem if soft < LEAST_FILES else found.note
        tell("open files", f"{text}: loader workers and many ranks need more", fix)
    if Path("/dev/infiniband").exists():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if locked != resource.RLIM_INFINITY:
            text = f"{shown_bytes(locked)} (ulimit -l): InfiniBand cannot register its buffers"
            found.problem("locked memory", text, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
