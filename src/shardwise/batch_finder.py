"""``batch.micro_size=auto``: the largest micro-batch that fits into memory, found before the run is launched.

Ranks of their own try every size, so that one that ends for a lack of memory costs nothing, and a size that does not
fit on one rank is none for any. The global batch stays what it is: micro-batch x data-parallel size x accumulation.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.hydra_setup import read_yaml
from shardwise.job import HOLDER, LOCK, Job
from shardwise.launch import RanksFailedError, how_it_ended, launch
from shardwise.quantities import shown_bytes
from shardwise.rerun import takes_the_same_memory
from shardwise.resolve import Resolved
from shardwise.signals import GRACE_SECONDS, Stop, owned_signals
from shardwise.worker import first_failure


@dataclass(frozen=True)
class Trial:
    """What came of trying one micro-batch."""

    micro_size: int
    peak: int | None = None
    """Bytes on the fullest rank; None where it does not fit."""
    why: str = ""
    """Why it does not fit."""

    def __str__(self) -> str:
        if self.peak is None:
            return f"micro-batch {self.micro_size} does not fit: {self.why}"
        return f"micro-batch {self.micro_size} fits ({shown_bytes(self.peak)} on the fullest rank)"


def with_micro_size(job: Job, stop: Stop | None = None) -> Job:
    """The job with a number for ``batch.micro_size=auto``; any other job as it is. Prints what it finds.

    Args:
        job: about to be launched; its run folder exists.
        stop: what signals ask for, where the caller owns them. Any request ends the search at once.

    Raises:
        ConfigError: not even the smallest micro-batch fits, or a rank found a mistake of the user's.
        RanksFailedError: a rank failed for another reason than memory; what it left stays in the run folder.
        SystemExit: a signal has ended the search.
    """
    if job.config["batch"]["micro_size"] != "auto" or job.action != "train":
        return job
    try:
        if stop is not None:
            return _search(job, stop)
        with owned_signals(grace=3 * GRACE_SECONDS) as stop:
            return _search(job, stop)
    except RanksFailedError:
        raise
    except BaseException:
        _leave_nothing(job)
        raise


def _search(job: Job, stop: Stop) -> Job:
    resolved = job.resolved()
    if (before := _found_before(job, resolved)) is not None:
        return _with_number(job, before)
    share = resolved.batch.global_size // resolved.dims.dp_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    fits: list[Trial] = []

    def attempt(size: int) -> Trial:
        if stop.requested is not None:
            raise SystemExit(128 + stop.signal)
        trial = _beyond_memory(size, fits, resolved) or _try(job, size, stop)
        if trial.peak is not None:
            fits.append(trial)
        print(trial, flush=True)
        return trial

    best, beyond = largest_that_fits(sizes, attempt=attempt)
    if best is None:
        assert beyond is not None
        raise ConfigError(
            f"batch.micro_size=auto: not even one sample a rank fits, {beyond.why}: type {_smaller(resolved)}"
        )
    print(
        f"batch: micro {best.micro_size} x data-parallel {resolved.dims.dp_size} x accumulate "
        f"{share // best.micro_size} = global {resolved.batch.global_size}",
        flush=True,
    )
    limit = "which is all of a rank's share" if beyond is None else f"{beyond.micro_size} does not: {beyond.why}"
    return _with_number(replace(job, notes=[*job.notes, f"batch.micro_size=auto: {best}, {limit}"]), best.micro_size)


def _with_number(job: Job, micro_size: int) -> Job:
    return replace(job, config={**job.config, "batch": {**job.config["batch"], "micro_size": micro_size}})


def _found_before(job: Job, resolved: Resolved) -> int | None:
    """What a job of a sweep has found before it was interrupted; None where it has not, or it would not hold now."""
    if not (job.resumed and job.in_sweep):  # by itself, resume= decides on that
        return None
    with contextlib.suppress(ConfigError, AttributeError):  # damaged
        then = read_yaml(Path(job.run_folder) / "config.yaml")
        found = then.get("batch", {}).get("micro_size")
        if isinstance(found, int) and takes_the_same_memory(job.config, then, world=resolved.world):
            return found
    return None


def largest_that_fits(sizes: Sequence[int], *, attempt: Callable[[int], Trial]) -> tuple[Trial | None, Trial | None]:
    """The largest of ``sizes`` (ascending) that fits, and the smallest that does not; None where there is none.

    A size is about doubled as long as it fits; then what lies between is halved. Memory is taken to grow with the size.
    """
    best: Trial | None = None
    beyond: Trial | None = None
    low, high = -1, len(sizes)  # places of the largest that fits and of the smallest that does not
    while high - low > 1:
        if beyond is not None:
            place = (low + high) // 2
        else:
            most = 2 * sizes[low] if low >= 0 else sizes[0]
            place = max((i for i in range(low + 1, high) if sizes[i] <= most), default=low + 1)
        trial = attempt(sizes[place])
        if trial.peak is None:
            high, beyond = place, trial
        else:
            low, best = place, trial
    return best, beyond


def _try(job: Job, size: int, stop: Stop) -> Trial:
    """Launch the ranks for a few steps; whatever else than a lack of memory goes wrong is raised as it is."""
    from shardwise.probe import OUT_OF_MEMORY, probe_job

    folder = Path(job.run_folder) / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        trial = Trial(size, peak=launch(probe_job(job, size, folder=folder), stop)["peak"])
    except RanksFailedError as error:
        record = first_failure(folder)
        if record is not None and (folder / OUT_OF_MEMORY.format(rank=record["rank"])).exists():
            trial = Trial(size, why=f"out of memory on rank {record['rank']}")
        elif error.cause.endswith(how_it_ended(-signal.SIGKILL)):
            trial = Trial(size, why=error.cause)
        else:
            raise  # the folder stays, as the message names a log there
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return trial


def _beyond_memory(size: int, fits: Sequence[Trial], resolved: Resolved) -> Trial | None:
    """Refuse to try what would bring the machine down: a CPU's memory is promised to more than there is."""
    if resolved.world.accelerator != "cpu" or len(fits) < 2:
        return None
    expected = extrapolated(size, fits) * resolved.world.devices
    available = available_memory()
    if expected <= available:
        return None
    why = f"about {shown_bytes(expected)} would be needed, by the sizes that fit, and {shown_bytes(available)} are free"
    return Trial(size, why=why)


def extrapolated(size: int, fits: Sequence[Trial]) -> int:
    """Bytes a rank is expected to need at ``size``, on a line through the last two that fit (at different sizes)."""
    (small, less), (large, more) = ((one.micro_size, one.peak or 0) for one in fits[-2:])
    return more + max(0, more - less) * (size - large) // (large - small)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of the machine that new processes can have: what is free or can be freed, within the limit of the cgroup.

    Args:
        root: holds ``proc`` and ``sys``.
    """
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                places = _upwards(root / "sys/fs/cgroup", path)
                free += [left for one in places if (left := _left(one, "memory.max", "memory.current")) is not None]
            elif "memory" in controllers.split(","):
                places = _upwards(root / "sys/fs/cgroup/memory", path)
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                free += [left for one in places if (left := _left(one, *names)) is not None]
    return max(0, min(free))


def _upwards(mount: Path, path: str) -> list[Path]:
    """A group and all that it is in; in a container only the last may be seen."""
    inner = Path(path.lstrip("/"))
    return [mount / inner, *(mount / parent for parent in inner.parents)]


def _left(group: Path, limit: str, usage: str) -> int | None:
    """Bytes of a cgroup that are left, its cache of files counted as free; None if it has no limit."""
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())  # "max" is no number
        cache = 0
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
    return most - used + cache


def _smaller(resolved: Resolved) -> str:
    """What to type for less memory."""
    config = resolved.config
    ways = ["a smaller batch.eval_size"] if (config.batch.eval_size or 1) > 1 else []
    if resolved.dims.dp_shard == 1:
        ways.append(f"strategy=fsdp trainer.devices={max(2, resolved.world.devices)}")
    if config.strategy.activation_checkpointing != "full":
        ways.append("strategy.activation_checkpointing=full")
    if config.precision.kind in ("32-true", "64-true"):
        ways.append("precision=bf16-mixed")
    return ", ".join([*ways, "or a smaller model"])


def _leave_nothing(job: Job) -> None:
    """Remove the folder of a run that will not be, unless it holds more than was made for it."""
    folder = Path(job.run_folder)
    if job.resumed or job.in_sweep:
        return
    with contextlib.suppress(OSError):
        if set(os.listdir(folder)) <= {"ranks", LOCK, HOLDER} and not os.listdir(folder / "ranks"):
            shutil.rmtree(folder)
