"""``batch.micro_size=auto``: the largest micro-batch that fits on every rank, and a run that is none the different."""

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from checkout import TrainRun
from shardwise import batch_finder
from shardwise.batch_finder import Trial, available_memory, extrapolated, largest_that_fits
from shardwise.config import from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.probe import lacks_memory, skip_no_step
from shardwise.resolve import World, resolve_in
from shardwise.signals import Stop
from shardwise.strategies.precision import mesh_precision
from warm import Started, Warm

HUNGRY = """
import json, os, resource, signal, time
import torch
from torch import nn

class Hungry(nn.Module):
    '''A model that fails at more than `above` samples, on one rank.'''

    def __init__(self, above, how="raise", rank=1, log=None):
        super().__init__()
        self.above, self.how, self.rank, self.log = above, how, rank, log
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        rank = int(os.environ.get("RANK", "0"))
        if x.is_meta:  # its operations are counted, and no memory is used
            return self.layer(x.flatten(1))
        if self.log and self.training:
            with open(self.log, "a") as file:
                file.write(json.dumps([os.getpid(), rank, len(x)]) + "\\n")
        if len(x) > self.above and rank == self.rank and self.training:
            if self.how == "raise":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            if self.how == "allocate":
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
                torch.empty(2**30, dtype=torch.uint8)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "wrong":
                raise ValueError("a mistake in the model")
            if self.how == "sleep":
                time.sleep(60)
        if self.how == "evaluate" and len(x) > self.above and not self.training:
            raise MemoryError
        return self.layer(x.flatten(1))
"""
TINY = ["trainer.max_steps=3", "trainer.log_every_n_steps=1", "logger=none", "checkpoint.at_end=false"]
AUTO = "batch.micro_size=auto"


@dataclass
class Place:
    """Where commands are typed."""

    warm: Warm
    folder: Path

    def start(self, *argv: str) -> Started:
        words = [*TINY, *argv, f"output_root={self.folder / 'outputs'}"]
        files = {"out": self.folder / "out", "err": self.folder / "err"}
        return self.warm.start("shardwise.cli:train", [words], cwd=self.folder, **files)

    def run(self, *argv: str, status: int = 0) -> TrainRun:
        for name in ("out", "err"):
            (self.folder / name).unlink(missing_ok=True)
        process = self.start(*argv)
        code = process.wait(60)
        texts = ((self.folder / name).read_text() for name in ("out", "err"))
        run = TrainRun(code, *texts, self.folder / "outputs")
        assert code == status, run
        return run


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "hungry.py").write_text(HUNGRY)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        with Warm(mark=str(folder)) as started:
            yield started
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def place(warm: Warm, tmp_path: Path) -> Place:
    return Place(warm, tmp_path)


def hungry(above: int, how: str = "raise", *, rank: int = 0, log: Path | None = None) -> list[str]:
    given = {"above": above, "how": how, "rank": rank, **({} if log is None else {"log": log})}
    target = ["plugins=[hungry]", "model=custom", "model._target_=hungry.Hungry"]
    return [*target, *(f"+model.{key}={value}" for key, value in given.items())]


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def micro_size(run: Path) -> int:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["batch"]["micro_size"] == config["derived"]["batch_micro_size"]
    return config["batch"]["micro_size"]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_lack_of_memory_on_one_rank_decides_for_both(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "forwards"
    model = hungry(4, rank=1, log=log)
    found = place.run(*model, AUTO, "trainer.devices=2", "precision=64-true")
    lines = found.stdout.splitlines()
    assert [line.split(" (")[0] for line in lines[:4]] == [
        *("micro-batch 1 fits", "micro-batch 2 fits", "micro-batch 4 fits"),
        "micro-batch 8 does not fit: out of memory on rank 1",
    ]
    assert lines[4] == "batch: micro 4 x data-parallel 2 x accumulate 8 = global 64"
    assert found.stderr == ""
    folder = found.run_folder
    assert micro_size(folder) == 4
    assert AUTO in yaml.safe_load((folder / "overrides.yaml").read_text())
    assert not [path for path in found.output_root.rglob("*") if "probe" in path.name]

    # A probe is two steps of two micro-batches a rank, in processes of its own; the run is three of eight.
    forwards = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(rank, size) for _, rank, size in forwards if size < 8} == {(r, s) for r in (0, 1) for s in (1, 2, 4)}
    counts = {
        (pid, size): [p for p, _, s in forwards if (p, s) == (pid, size)] for pid, _, size in forwards if size < 8
    }
    assert sorted(len(pids) for pids in counts.values()) == [4] * 6 + [24] * 2
    assert len({pid for pid, _ in counts}) == 8

    typed = place.run(*model, "batch.micro_size=4", "trainer.devices=2", "precision=64-true")
    assert typed.run_folder != folder
    assert losses(typed.run_folder) == losses(folder)
    assert len(losses(folder)) == 3


def test_what_an_allocator_refuses_does_not_fit_and_the_gap_is_halved(place: Place) -> None:
    """One process, which would train in the one that launches: 12 fits of the divisors of 72, 18 does not."""
    run = place.run(*hungry(13, "allocate"), AUTO, "batch.global_size=72")
    sizes = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("micro-batch ")]
    assert sizes == ["1", "2", "4", "8", "12", "24", "18"]
    assert "micro-batch 18 does not fit: out of memory on rank 0\n" in run.stdout
    assert "batch: micro 12 x data-parallel 1 x accumulate 6 = global 72\n" in run.stdout
    assert "fits (" in run.stdout[run.stdout.index("note") :]
    assert micro_size(run.run_folder) == 12


def test_a_rank_that_the_kernel_kills_does_not_fit(place: Place) -> None:
    run = place.run(*hungry(2, "kill", rank=1), AUTO, "trainer.devices=2", "batch.global_size=8")
    assert "micro-batch 4 does not fit: rank 1 was ended by SIGKILL (out of memory?)\n" in run.stdout
    assert micro_size(run.run_folder) == 2


def test_any_other_error_is_told_as_it_is(place: Place) -> None:
    run = place.run(*hungry(1, "wrong", rank=1), AUTO, "trainer.devices=2", "batch.global_size=8", status=1)
    assert run.stderr.startswith("Traceback")
    assert "ValueError: a mistake in the model" in run.stderr
    (log,) = [word for word in run.stderr.split() if word.endswith("rank_1.log")]
    assert "a mistake in the model" in Path(log).read_text()
    assert "does not fit" not in run.stdout


def test_nothing_fits(place: Place) -> None:
    run = place.run(*hungry(0), AUTO, status=2)
    assert run.stderr == (
        "error: batch.micro_size=auto: not even one sample a rank fits, out of memory on rank 0: type strategy=fsdp "
        "trainer.devices=2, strategy.activation_checkpointing=full, precision=bf16-mixed, or a smaller model\n"
    )
    assert not list(run.output_root.rglob("ranks"))  # no folder of a run that was none


def test_a_larger_evaluation_batch_is_tried_too(place: Place) -> None:
    """On the digits, a validation of about 143 samples and a test of 359, both in equal batches."""
    model = [*hungry(32, "evaluate"), AUTO, "batch.global_size=2", "data.val_fraction=0.1"]
    run = place.run(*model, "batch.eval_size=32")
    assert micro_size(run.run_folder) == 2
    for more in ("batch.eval_size=64", "batch.eval_size=33"):  # too large in both; in the test only
        run = place.run(*model, more, status=2)
        assert "one sample a rank fits, out of memory on rank 0: type a smaller batch.eval_size, " in run.stderr


def test_a_signal_ends_the_search_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "forwards"
    process = place.start(*hungry(2, "sleep", log=log), AUTO)
    deadline = time.monotonic() + 30
    while not (log.exists() and "4]" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 10
    assert not [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    pids = {json.loads(line)[0] for line in log.read_text().splitlines()}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_again_the_number_is_kept_until_the_layout_changes(place: Place) -> None:
    first = place.run(*hungry(8), AUTO, "checkpoint.at_end=true").run_folder
    assert micro_size(first) == 8
    kept = "batch.micro_size=8 is what the {} run found to fit, and is kept"

    again = place.run("plugins=[hungry]", f"rerun={first}")
    assert "micro-batch" not in again.stdout
    assert kept.format("repeated") in again.stdout
    assert micro_size(again.run_folder) == 8
    assert losses(again.run_folder) == losses(first)
    assert AUTO in yaml.safe_load((again.run_folder / "overrides.yaml").read_text())

    resumed = place.run("plugins=[hungry]", f"resume={first}", "trainer.max_steps=4")
    assert "micro-batch" not in resumed.stdout
    assert kept.format("resumed") in resumed.stdout
    assert losses(first)[:3] == losses(again.run_folder)
    assert len(losses(first)) == 4

    # It is the checkpoint's, too, and so the size of an evaluation's batches.
    words = [["eval", str(first), "plugins=[hungry]", f"output_root={place.folder / 'outputs'}"]]
    files = {"out": place.folder / "out", "err": place.folder / "err"}
    process = place.warm.start("shardwise.__main__:main", words, cwd=place.folder, **files)
    assert process.wait(60) == 0, files["err"].read_text()
    evaluated = max((place.folder / "outputs").rglob("config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    assert yaml.safe_load(evaluated.read_text())["batch"]["eval_size"] == 8


def test_another_layout_or_model_is_tried_again(place: Place) -> None:
    first = place.run(*hungry(8), AUTO, "checkpoint.at_end=true").run_folder
    # Two ranks of half the share each, of which the first has the limit of the model.
    wider = place.run("plugins=[hungry]", f"resume={first}", "trainer.max_steps=5", "trainer.devices=2")
    assert "micro-batch 16 does not fit: out of memory on rank 0" in wider.stdout
    assert "batch: micro 8 x data-parallel 2 x accumulate 4 = global 64" in wider.stdout
    assert "8 -> 'auto'" not in wider.stdout
    assert micro_size(first) == 8
    other = place.run("plugins=[hungry]", f"rerun={first}", "model.above=20", "trainer.devices=1")
    assert micro_size(other.run_folder) == 16


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1, 7, 64, 96, 1000])
def test_the_largest_divisor_that_fits_is_found(share: int) -> None:
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    for limit in range(share + 2):
        tried: list[int] = []

        def attempt(size: int, limit: int = limit, tried: list[int] = tried) -> Trial:
            tried.append(size)
            return Trial(size, peak=1) if size <= limit else Trial(size)

        best, beyond = largest_that_fits(sizes, attempt=attempt)
        assert (best.micro_size if best else 0) == max((size for size in sizes if size <= limit), default=0)
        assert (beyond.micro_size if beyond else None) == next((size for size in sizes if size > limit), None)
        assert len(set(tried)) == len(tried)
        # Never far beyond what is known to fit.
        assert all(size <= max(2 * low, min(s for s in sizes if s > low)) for low, size in steps_up(tried, limit))


def steps_up(tried: list[int], limit: int) -> list[tuple[int, int]]:
    """(largest that was known to fit, size tried next)"""
    fits = [[size for size in tried[:at] if size <= limit] for at in range(len(tried))]
    return [(max(known), size) for known, size in zip(fits, tried, strict=True) if known]


def world(launch: str = "local", devices: int = 2) -> World:
    return World(1, devices, "cpu", launch, "")


def test_what_cannot_be_found_is_refused() -> None:
    config = from_plain({"batch": {"micro_size": "auto", "global_size": 64}, "strategy": {"dp_replicate": -1}})
    resolved = resolve_in(config, world())
    assert (resolved.batch.micro_size, resolved.batch.accumulate) == (1, 32)
    with pytest.raises(ConfigError, match=r"auto under torchrun, .* type a number, or find it with python train.py"):
        resolve_in(config, world("torchrun"))
    config.batch.accumulate = 4
    with pytest.raises(ConfigError, match=r"batch.accumulate=4 beside batch.micro_size=auto, .* batch.micro_size=8"):
        resolve_in(config, world())
    config.batch.global_size = 63
    with pytest.raises(ConfigError, match=r"does not divide over 2 data-parallel ranks"):
        resolve_in(config, world())


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. "), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_which_errors_mean_a_lack_of_memory(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) == lacks
    outer = RuntimeError("in the loader")
    outer.__cause__ = error
    assert lacks_memory(outer) == lacks


def test_float16_makes_its_first_step_too() -> None:
    """Without this the scale of the loss, 65,536 at first, is more than a gradient in float16 holds."""
    for settle, made in ((lambda plugin: None, False), (skip_no_step, True)):
        weight = torch.nn.Parameter(torch.ones(3))
        plugin, optimizer = mesh_precision("16-mixed", device_type="cpu", autocast=False), torch.optim.Adam([weight])
        settle(plugin)
        plugin.scale_loss((weight.half() * 2).sum().float()).backward()
        plugin.scaler.step(optimizer)
        assert bool(optimizer.state) is made
    skip_no_step(mesh_precision("32-true", device_type="cpu", autocast=False))


def test_a_cpu_is_not_asked_for_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 GiB a rank and 1 GiB a sample more: 8 samples on two ranks are more than the 17 GiB that are free."""
    config = {"batch": {"micro_size": "auto", "global_size": 64}, "strategy": {"dp_replicate": -1}}
    job = Job(config=config, world=vars(world()), run_id="one", run_folder=str(tmp_path))
    tried = []

    def attempt(job: Job, size: int, stop: Stop) -> Trial:
        tried.append(size)
        return Trial(size, peak=(1 + size) * 2**30)

    monkeypatch.setattr(batch_finder, "_try", attempt)
    monkeypatch.setattr(batch_finder, "available_memory", lambda: 17 * 2**30)
    found = batch_finder.with_micro_size(job, Stop())
    assert found.config["batch"]["micro_size"] == 4
    assert tried == [1, 2, 4]
    needed = "about 18.0 GiB would be needed, by the sizes that fit, and 17.0 GiB are free"
    assert f"micro-batch 8 does not fit: {needed}\n" in capsys.readouterr().out
    assert found.notes == [
        f"batch.micro_size=auto: micro-batch 4 fits (5.0 GiB on the fullest rank), 8 does not: {needed}"
    ]
    assert batch_finder.with_micro_size(found) is found  # a number stays


def test_a_job_of_a_sweep_that_goes_on_keeps_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = to_plain(from_plain({"batch": {"micro_size": "auto", "global_size": 64}, "strategy": {"dp_replicate": -1}}))
    job = Job(config=plain, world=vars(world()), run_id="one", run_folder=str(tmp_path), in_sweep=True, resumed=True)
    then = {**plain, "batch": {**plain["batch"], "micro_size": 8}, "derived": job.resolved().derived()}
    monkeypatch.setattr(batch_finder, "_try", lambda job, size, stop: Trial(size, peak=1 if size <= 16 else None))

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(then))
    assert batch_finder.with_micro_size(job, Stop()).config["batch"]["micro_size"] == 8
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**then, "model": {"width": 8}}))
    assert batch_finder.with_micro_size(job, Stop()).config["batch"]["micro_size"] == 16
    (tmp_path / "config.yaml").write_text("[")
    assert batch_finder.with_micro_size(job, Stop()).config["batch"]["micro_size"] == 16


def test_memory_is_extrapolated_on_a_line_that_does_not_fall() -> None:
    assert extrapolated(16, [Trial(1, 1), Trial(4, 40), Trial(8, 60)]) == 100
    assert extrapolated(16, [Trial(4, 60), Trial(8, 50)]) == 50


def test_available_memory_is_that_of_the_machine_within_every_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert available_memory(tmp_path) == 3000 * 1024

    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    group = tmp_path / "sys/fs/cgroup/jobs"
    (group / "mine").mkdir(parents=True)
    (group / "mine/memory.max").write_text("max\n")
    (group / "mine/memory.current").write_text("700\n")
    assert available_memory(tmp_path) == 3000 * 1024
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    assert available_memory(tmp_path) == 350

    (tmp_path / "proc/self/cgroup").write_text("5:devices:/\n4:memory,cpu:/hidden\n")  # the folder is not to be seen
    first = tmp_path / "sys/fs/cgroup/memory"
    first.mkdir()
    (first / "memory.limit_in_bytes").write_text("900\n")
    (first / "memory.usage_in_bytes").write_text("1000\n")
    (first / "memory.stat").write_text("total_inactive_file 20\n")
    assert available_memory(tmp_path) == 0
