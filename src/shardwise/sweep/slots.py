"""How many jobs run side by side, and each one's share of the machine."""

import os
from collections import Counter

from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.resolve import World, count_gpus


def automatic_slots(world: World) -> int:
    """Jobs that fill this machine, each with ``world.devices`` GPUs, or at least one core for each of its processes."""
    there = len(visible_gpus()) if world.accelerator == "gpu" else len(os.sched_getaffinity(0))
    return max(1, there // world.devices)


def count_slots(config: Config, world: World, *, total: int | None) -> int:
    """``sweep.slots`` as a number; never more than there are jobs, so that each has as many cores as it can.

    Args:
        config: any job's.
        world: of the job with the most devices.
        total: jobs in all, None where nobody knows.
    """
    asked = config.sweep.slots
    slots = automatic_slots(world) if asked == "auto" else int(asked)
    return slots if total is None else max(1, min(slots, total))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(count_gpus())]
    return [name.strip() for name in named.split(",") if name.strip()]


class Shares:
    """Hands each job that starts its share of the machine, and takes it back.

    With one slot a job has the whole machine, and nothing is said. GPUs are handed out, the least used first, so that
    more slots than there are GPUs for share them; cores are not bound, but each process is told how many threads to
    use, unless ``OMP_NUM_THREADS`` says so already.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._used: Counter[str] = Counter()

    def take(self, world: World) -> dict[str, str]:
        """Variables for every process of a job.

        Raises:
            ConfigError: there are fewer GPUs than it needs.
        """
        share: dict[str, str] = {}
        if self.slots == 1:
            return share
        if world.accelerator == "gpu":
            gpus = visible_gpus()
            if len(gpus) < world.devices:
                raise ConfigError(
                    f"a job of {world.devices} GPUs does not fit on {len(gpus)}: type trainer.devices=..."
                )
            chosen = sorted(sorted(gpus, key=lambda gpu: self._used[gpu])[: world.devices], key=gpus.index)
            self._used.update(chosen)
            share["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        if not os.environ.get("OMP_NUM_THREADS"):
            cores = len(os.sched_getaffinity(0)) // (self.slots * world.devices)
            share["OMP_NUM_THREADS"] = str(max(1, cores))
        return share

    def give_back(self, share: dict[str, str]) -> None:
        """A job has ended."""
        self._used.subtract(filter(None, share.get("CUDA_VISIBLE_DEVICES", "").split(",")))
