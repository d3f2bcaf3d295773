"""What a run leaves in its folder to explain itself; rank 0 writes it."""

import json
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.hydra_setup import write_yaml
from shardwise.job import Job, unwritable, write_json
from shardwise.provenance import collect, with_attempts, without_secrets
from shardwise.resolve import Resolved


class RunFolder:
    """The files that explain a run; rank 0 writes them."""

    def __init__(self, job: Job, resolved: Resolved) -> None:
        self.job = job
        self.resolved = resolved
        self.folder = Path(job.run_folder)
        self.started = time.time()
        self.record: dict[str, Any] = {}

    def describe(self, derived: dict[str, Any]) -> None:
        """``config.yaml`` with what the rules made of it."""
        write_yaml(self.folder / "config.yaml", without_secrets({**self.job.config, "derived": derived}))

    def start(self) -> None:
        """``config.yaml``, ``overrides.yaml`` and ``provenance.json``, before anything can go wrong."""
        self.describe(self.resolved.derived())
        write_yaml(self.folder / "overrides.yaml", without_secrets(list(self.job.overrides)))
        world, dims = self.resolved.world, self.resolved.dims
        ranks = [
            {
                "rank": rank,
                "node": rank // world.devices,
                "local_rank": rank % world.devices,
                "dp": dims.dp_rank(rank),
                "tp": dims.tp_rank(rank),
                **({"host": socket.gethostname()} if rank // world.devices == 0 else {}),
            }
            for rank in range(world.size)
        ]
        self.record = collect(command=self.job.command, seed=self.resolved.config.seed, ranks=ranks)
        if self.job.action != "train":
            self.record["action"] = self.job.action
        if self.job.parent is not None:
            self.record["parent"] = without_secrets(self.job.parent)
        if self.job.resumed:
            self.record = with_attempts(self.record, self._earlier())
            (self.folder / "result.json").unlink(missing_ok=True)  # or a killed run would pass for what it was before
        write_json(self.folder / "provenance.json", self.record)

    def _earlier(self) -> Any:
        """The record of this run before it was resumed; None if it cannot be read."""
        try:
            return json.loads((self.folder / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def finish(self, result: dict[str, Any], *, hosts: Sequence[str] = ()) -> None:
        """``result.json``; a value that is no number of JSON's is null. ``hosts`` are those of the ranks, in order."""
        metrics = {name: value if math.isfinite(value) else None for name, value in result["metrics"].items()}
        seconds = round(time.time() - self.started, 3)
        try:
            if len(set(hosts)) > 1:  # at the start, a rank knows its own only
                ranks = [{**rank, "host": host} for rank, host in zip(self.record["ranks"], hosts, strict=True)]
                write_json(
                    self.folder / "provenance.json", {**self.record, "ranks": ranks, "hosts": sorted(set(hosts))}
                )
            write_json(self.folder / "result.json", {**result, "metrics": metrics, "seconds": seconds})
        except OSError as error:
            if result["status"] == "completed":  # else something has gone wrong already, and is told
                raise unwritable(self.folder / "result.json", error) from error
