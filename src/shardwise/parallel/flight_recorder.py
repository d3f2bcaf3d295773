"""What PyTorch's flight recorder knows of this process's collectives: which one came last, and whether it has ended.

It is on by default for gloo and NCCL (TORCH_FR_BUFFER_SIZE entries), in memory only. Reading it is safe from any thread
while the main thread waits in a collective; it is a private name of torch's, so what is not there is not told.
"""

import json
import time
from dataclasses import dataclass

from torch._C import _distributed_c10d as c10d


@dataclass(frozen=True)
class Collective:
    """One collective of this process."""

    name: str
    """Such as ``all_reduce``."""
    number: int
    """The how many-th of its group it is, from 1; ranks that are in step have the same."""
    group: str
    """Its process group, by the description that PyTorch gave it."""
    ended: bool
    seconds: float
    """Since it was called."""

    def __str__(self) -> str:
        return f"{self.name} {self.number:,} of {self.group}"


def last_collective() -> Collective | None:
    """The newest collective that has not ended, or else the last one; None if nothing was recorded."""
    for reader in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        read = getattr(c10d, reader, None)
        try:
            entries = [] if read is None else json.loads(read()).get("entries", [])
        except Exception:  # whatever another version of torch makes of it: nothing is known then
            entries = []
        if entries:
            waiting = [entry for entry in entries if not entry.get("retired", True)]
            return _collective((waiting or entries)[-1], ended=not waiting)
    return None


def _collective(entry: dict, *, ended: bool) -> Collective:
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    called = entry.get("time_created_ns", 0) / 1e9
    identity, description = [*entry.get("process_group", []), "", ""][:2]
    return Collective(
        name=str(entry.get("profiling_name", "collective")).partition(":")[2] or "collective",
        number=int(number or 0),
        group={"default_pg": "all ranks", "undefined": f"group {identity}"}.get(description, description),
        ended=ended,
        seconds=max(0.0, time.time() - called) if called else 0.0,
    )
