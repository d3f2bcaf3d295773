"""Which rank is named as slow, by what, and when; decided from tables, and in live ranks that are slowed on purpose."""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pool import RankPool
from shardwise.metrics_file import FINDINGS
from shardwise.parallel.links import measure_links, rounds
from shardwise.step_clock import PHASES
from shardwise.telemetry.links import links_line, slow_links
from shardwise.telemetry.memory_growth import MemoryGrowth
from shardwise.telemetry.step_metrics import StepMetrics
from shardwise.telemetry.stragglers import SlowRanks, Stragglers, WaitingForAll
from shardwise.telemetry.table import RankTable
from training import LAYOUTS, make_trainer

# ---- from tables -----------------------------------------------------------------------------------------------------

HOSTS = ("host-a", "host-a", "host-b", "host-b")
EVEN = {"data": 0.001, "forward": 0.010, "backward": 0.020, "optimizer": 0.002, "other": 0.001}


def table(step: int = 10, *, steps: int = 10, ranks: int = 4, **own: dict[int, float]) -> RankTable:
    """An even step of 40 ms, but for what ``own`` says: phase -> rank -> seconds; all wait for the slowest."""
    seconds = {phase: np.full(ranks, EVEN.get(phase, 0.0)) for phase in PHASES}
    for phase, values in own.items():
        for rank, value in values.items():
            seconds[phase][rank] = value
    busy = np.sum([seconds[phase] for phase in EVEN], axis=0)
    seconds["communication"] = seconds["communication"] + busy.max() - busy
    columns = {f"time/{phase}": values for phase, values in seconds.items()}
    columns["time/step"] = np.sum(list(seconds.values()), axis=0)
    values = np.stack(list(columns.values()), axis=1)
    return RankTable(step=step, steps=steps, names=tuple(columns), values=values, hosts=HOSTS[:ranks])


def said(tables: list[RankTable], **options: Any) -> list[list[str]]:
    slow = SlowRanks(**{"factor": 1.5, "steps": 10, **options})
    return [slow.update(one) for one in tables]


def test_a_rank_is_named_with_its_host_and_with_what_is_slow() -> None:
    first, second = said([table(10, steps=9, data={2: 0.031}), table(20, data={2: 0.031})])
    assert first == []
    assert second == [
        "rank 2 (host-b) is slow: 1.9 x the median rank's own time for 19 steps, by data: it waits 31 ms a step "
        "for its batch, the median rank 1.0 ms (data.num_workers?)"
    ]
    (line,) = said([table(forward={1: 0.030}, backward={1: 0.041})] * 2)[1]
    assert "rank 1 (host-a) is slow: 2.2 x" in line
    assert "by compute: its backward takes 41 ms a step, the median rank's 20 ms" in line
    (line,) = said([table(other={3: 0.040})] * 2)[1]
    assert "by other: what is neither data nor the model takes 40 ms a step" in line


def test_of_two_ranks_the_slower_one_is_named() -> None:
    (line,) = said([table(ranks=2, data={0: 0.080})] * 2)[1]
    assert line.startswith("rank 0 (host-a) is slow: 3.3 x")


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param([table()] * 5, id="even"),
        pytest.param([table(data={1: 0.010})] * 5, id="below the factor"),
        pytest.param([table(data={1: 0.5}), table()] * 3, id="one logging step each time"),
        pytest.param([table(1, steps=0, data={1: 0.5})] * 5, id="first step of a process"),
        pytest.param([table(ranks=1, data={0: 0.5})] * 5, id="alone"),
        pytest.param([table(communication={1: 0.5})] * 5, id="waiting is not its own"),
        pytest.param([table(checkpoint={0: 0.5}, logging={0: 0.1})] * 5, id="what rank 0 does for all"),
    ],
)
def test_nobody_is_named(tables: list[RankTable]) -> None:
    assert not any(said(tables))


def test_a_large_factor_of_next_to_nothing_costs_nobody_anything() -> None:
    # 1 ms instead of 0.1 ms in steps that take 200 ms, most of them evaluation
    tiny = {phase: dict.fromkeys(range(4), 0.00002) for phase in EVEN}
    assert not any(said([table(evaluation=dict.fromkeys(range(4), 0.2), **{**tiny, "data": {1: 0.001}})] * 4))


def test_it_is_said_again_only_when_something_changes_or_is_over() -> None:
    data, compute, even = table(data={2: 0.1}), table(backward={2: 0.1}), table()
    lines = said([data] * 5 + [compute] * 4 + [even] * 4 + [data] * 3)
    told = [(index, line.split(" by ")[-1].split(":")[0]) for index, some in enumerate(lines) for line in some]
    assert told == [
        (1, "data"),
        (6, "compute"),
        (10, "rank 2 (host-b) is as fast as the others again"),
        (14, "data"),
    ]


def test_enough_steps_are_waited_for() -> None:
    slow = table(steps=5, data={2: 0.1})
    assert [bool(lines) for lines in said([slow] * 5, steps=20)] == [False, False, False, True, False]
    # A long interval is one logging step all the same, in which one step may have been the long one.
    assert [bool(lines) for lines in said([table(steps=50, data={2: 0.1})] * 2)] == [False, True]


def test_the_links_are_measured_when_all_wait_and_nobody_stands_out() -> None:
    def wanted(tables: list[RankTable], *, suspected: bool = False) -> list[bool]:
        waiting = WaitingForAll(steps=10)
        tables = [replace(one, step=10 * number) for number, one in enumerate(tables, 1)]
        return [waiting.update(one, suspected=suspected) for one in tables]

    much, more = (table(communication=dict.fromkeys(range(4), value)) for value in (0.030, 0.060))
    assert wanted([much] * 4) == [False, True, False, False]
    often = wanted([much] * 4 + [more] * 20)
    assert [number for number, now in enumerate(often) if now] == [1, 11], "it has grown; not at once again"
    assert not any(wanted([much] * 4, suspected=True)), "they wait for one that is slow otherwise"
    assert not any(wanted([table()] * 4))
    assert not any(wanted([table(ranks=1, communication={0: 0.03})] * 4))


def test_every_pair_meets_once_and_more_ranks_meet_at_a_few_distances() -> None:
    for size in range(2, 17):
        met = [frozenset(pair) for one in rounds(size) for pair in one.items()]
        assert len(set(met)) == size * (size - 1) // 2
        assert len(met) == 2 * len(set(met))
    hosts = [f"host-{rank // 8}" for rank in range(1024)]
    found = rounds(1024, hosts=hosts)
    assert len(found) == 10
    for one in found:
        assert all(one[partner] == rank for rank, partner in one.items())
    for rank in range(1024):
        partners = {one[rank] for one in found if rank in one}
        assert {hosts[partner] != hosts[rank] for partner in partners} == {True, False}


def links(size: int, *, slow: tuple[int, ...] = (), between: float = 0.001) -> np.ndarray:
    seconds = np.full((size, size), 0.0002)
    for rank in slow:
        seconds[rank], seconds[:, rank] = between, between
    np.fill_diagonal(seconds, np.nan)
    return seconds


def test_a_rank_all_of_whose_links_are_slow_is_named() -> None:
    line = links_line(links(4, slow=(2,), between=0.021), hosts=HOSTS, share=0.48, factor=1.5)
    assert line == (
        "rank 2 (host-b) is slow in communication: its messages of 256 KiB take 21 ms, the median rank's 0.2 ms; "
        "communication takes 48 % of a step"
    )
    line = links_line(links(4), hosts=HOSTS, share=0.48, factor=1.5)
    assert line.startswith("communication takes 48 % of a step on every rank, and no rank's links stand out (a message")
    assert "of two ranks, which share their link" in links_line(links(2), hosts=HOSTS, share=0.5, factor=1.5)
    assert slow_links(links(4, slow=(1, 2, 3), between=0.02), hosts=(), factor=1.5) == {}


def test_a_host_whose_card_is_slow_is_found_though_its_ranks_reach_each_other() -> None:
    hosts = ("a", "a", "b", "b", "c", "c")
    seconds = links(6, slow=(4, 5), between=0.020)
    seconds[4, 5] = seconds[5, 4] = 0.0001
    assert set(slow_links(seconds, hosts=hosts, factor=1.5)) == {4, 5}


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_lines(growth: dict[int, list[float]], *, ranks: int = 4, kind: str = "resident", count: int = 16) -> list:
    """Lines by logging step; ``growth`` is rank -> MiB above 1 GiB, the last one repeated."""
    watch, found = MemoryGrowth(factor=1.5), []
    for index in range(count):
        values = [2**30 + 2**20 * (growth.get(r, [0])[min(index, len(growth.get(r, [0])) - 1)]) for r in range(ranks)]
        one = RankTable(
            step=10 * index, steps=10, names=(f"memory/{kind}",), values=np.array(values)[:, None], hosts=HOSTS[:ranks]
        )
        found += [(index, line) for line in watch.update(one)]
    return found


def test_a_rank_whose_memory_grows_is_named_with_its_bytes_a_step() -> None:
    leak = [50.0 * index for index in range(16)]
    (first, line), *more = memory_lines({1: leak})
    assert line == (
        "memory of rank 1 (host-a) grows: resident bytes by 300 MiB in 60 steps, 5 MiB a step; the median rank's by 0 B"
    )
    assert first == 8
    assert [index for index, _ in more] == [14], "again when it has doubled"
    assert "allocated" in memory_lines({1: leak}, kind="allocated")[0][1]
    assert memory_lines(dict.fromkeys(range(4), leak))[0][1].startswith("memory grows on all ranks: resident bytes by")
    assert memory_lines({0: leak}, ranks=1)[0][1].startswith("memory grows: resident bytes by 300 MiB")


@pytest.mark.parametrize(
    "growth",
    [
        pytest.param([0, 0, 400], id="once"),
        pytest.param([100.0 * (index % 5) for index in range(16)], id="up and down"),
        pytest.param([10.0 * index for index in range(16)], id="little"),
        pytest.param([], id="none"),
    ],
)
def test_memory_that_does_not_keep_growing_is_not_named(growth: list[float]) -> None:
    assert memory_lines({1: growth} if growth else {}) == []


# ---- live ranks ------------------------------------------------------------------------------------------------------

WORK = 0.02
DELAY = 0.12
"""Seconds a step, against the noise of a busy machine."""
STEPS = 20


class Samples(Dataset):
    deterministic = True

    def __init__(self, slowed: bool) -> None:
        self.slowed = slowed

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        time.sleep(DELAY if self.slowed else 0.0)
        return torch.ones(2, 8), torch.ones(2, 1)


class Model(pl.LightningModule):
    def __init__(self, slowed: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.slowed = slowed

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(WORK + (DELAY if self.slowed else 0.0))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowCard(pl.Callback):
    """Whatever this rank sends or receives comes late."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.wait = wait = dist.Work.wait

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(DELAY / 4)
            return wait(*args, **kwargs)

        dist.Work.wait = late

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        dist.Work.wait = self.wait


def lines_of(what: str, layout: str, slowed: int) -> list[str]:
    mine = dist.get_rank() == slowed
    folder = tempfile.mkdtemp()
    stragglers = Stragglers(factor=1.5, steps=10, folder=folder)
    callbacks = [StepMetrics(total_steps=STEPS, global_size=2 * LAYOUTS[layout].dp_size), stragglers]
    if mine and what == "communication":
        callbacks.append(SlowCard())
    trainer = make_trainer(layout, callbacks=callbacks, max_steps=STEPS, log_every_n_steps=5)
    samples = DataLoader(Samples(mine and what == "data"), batch_size=None)
    trainer.fit(Model(mine and what == "compute"), samples)
    kept = Path(folder, FINDINGS)
    texts = [json.loads(line)["text"] for line in kept.read_text().splitlines()] if kept.exists() else []
    assert texts == (stragglers.lines if dist.get_rank() == 0 else [])
    return stragglers.lines


@pytest.mark.parametrize("layout", ["ddp4", "fsdp4"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("data", ("is slow", "by data: it waits")),
        ("compute", ("is slow", "by compute: its forward takes")),
        ("communication", ("is slow in communication: its messages",)),
    ],
)
def test_a_rank_that_is_slowed_is_named_within_twenty_steps(
    pool: RankPool, what: str, words: tuple[str, ...], layout: str
) -> None:
    told = pool.run(lines_of, what, layout, 2, world_size=4)
    assert told == [told[0]] * 4, "all ranks decide alike"
    (line,) = told[0]
    assert line.startswith("rank 2 (")
    assert all(word in line for word in words), line


def test_in_an_even_run_nobody_is_named(pool: RankPool) -> None:
    (told, *_) = pool.run(lines_of, "nothing", "ddp2", 9, world_size=2)
    assert not any("is slow" in line for line in told), told


def measured() -> Any:
    start = time.perf_counter()
    seconds = measure_links(torch.device("cpu"))
    return seconds.tolist(), time.perf_counter() - start


def test_links_are_measured_alike_on_all_ranks(pool: RankPool) -> None:
    results = pool.run(measured, world_size=3)
    seconds = np.array(results[0][0])
    assert all(np.array_equal(seconds, np.array(other), equal_nan=True) for other, _ in results)
    assert np.array_equal(seconds, seconds.T, equal_nan=True)
    off_diagonal = seconds[~np.eye(3, dtype=bool)]
    assert (off_diagonal > 0).all()
    assert (off_diagonal < 1).all()
    assert np.isnan(np.diag(seconds)).all()
