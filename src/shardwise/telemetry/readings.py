"""What a rank reads off its process, its device and its node."""

import logging
import math
import resource
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

log = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""How often the device's sensors and the node's counters are read at most: some take a millisecond to answer."""
SENSORS = ("gpu/temperature", "gpu/power", "gpu/utilisation")
NODE = ("node/cpu", "node/memory", "node/disk_read", "node/disk_write", "node/network_in", "node/network_out")


class Readings:
    """Memory of this rank and its device, the device's sensors, and the load of the node.

    Args:
        device: that the rank computes on.
        reads_node: whether this rank reads the node's counters; one of each node does.
    """

    def __init__(self, device: torch.device, *, reads_node: bool) -> None:
        self._device = device
        self._process = psutil.Process()
        self._node = _Node() if reads_node else None
        self._sensors = _sensors(device)
        self._slow = dict.fromkeys((*SENSORS, *NODE) if device.type == "cuda" else NODE, math.nan)
        self._slow_at = -math.inf

    def read(self) -> dict[str, float]:
        """Quantity -> value, NaN for what this rank does not read; the same names on every rank and each time.

        Bytes, degrees Celsius, watts, percent, and bytes a second since the last reading.
        """
        values = self._memory()
        now = time.monotonic()
        if now - self._slow_at >= SLOW_SECONDS:
            self._slow_at = now
            self._slow |= {name: read() for name, read in self._sensors.items()}
            if self._node is not None:
                self._slow |= self._node.read()
        return values | self._slow

    def _memory(self) -> dict[str, float]:
        resident = float(self._process.memory_info().rss)
        if self._device.type != "cuda":
            # Linux counts kibibytes, and not to the last page.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
            return {"memory/resident": resident, "memory/peak": max(peak, resident)}
        stats = torch.cuda.memory_stats(self._device)
        return {
            "memory/resident": resident,
            "memory/peak": float(stats.get("allocated_bytes.all.peak", 0)),
            "memory/allocated": float(stats.get("allocated_bytes.all.current", 0)),
            "memory/reserved": float(stats.get("reserved_bytes.all.current", 0)),
        }


class _Node:
    """Load of the node since the last reading."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call has nothing to compare with
        self._counters = self._count()
        self._at = time.monotonic()

    def read(self) -> dict[str, float]:
        counters, now = self._count(), time.monotonic()
        seconds = max(now - self._at, 1e-3)
        rates = {name: (counters[name] - self._counters[name]) / seconds for name in counters}
        self._counters, self._at = counters, now
        return {"node/cpu": psutil.cpu_percent(), "node/memory": psutil.virtual_memory().percent, **rates}

    @staticmethod
    def _count() -> dict[str, float]:
        disk, cards = _quietly(psutil.disk_io_counters), _quietly(lambda: psutil.net_io_counters(pernic=True))
        network = [card for name, card in (cards or {}).items() if not name.startswith("lo")]  # not between own ranks
        return {
            "node/disk_read": math.nan if disk is None else float(disk.read_bytes),
            "node/disk_write": math.nan if disk is None else float(disk.write_bytes),
            "node/network_in": float(sum(card.bytes_recv for card in network)) if network else math.nan,
            "node/network_out": float(sum(card.bytes_sent for card in network)) if network else math.nan,
        }


def _quietly(count: Callable[[], Any]) -> Any:
    try:
        return count()
    except (OSError, RuntimeError, NotImplementedError):  # a container may hide them
        return None


def _sensors(device: torch.device) -> dict[str, Callable[[], float]]:
    """The sensors of ``device`` that answer; none without NVML, or on a CPU."""
    if device.type != "cuda":
        return {}
    reads: dict[str, Callable[[], float]] = {
        "gpu/temperature": lambda: float(torch.cuda.temperature(device)),
        "gpu/power": lambda: torch.cuda.power_draw(device) / 1000.0,  # milliwatts
        "gpu/utilisation": lambda: float(torch.cuda.utilization(device)),
    }
    answering = {}
    for name, read in reads.items():
        try:
            read()
        except Exception as error:  # NVML has many ways to say no
            log.debug("no %s: %s", name, error)
        else:
            answering[name] = read
    return answering
