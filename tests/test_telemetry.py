"""What each rank measures, brought together in one collective, and the lines that come of it."""

import json
import logging
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from pool import RankError, RankPool
from shardwise.errors import ConfigError
from shardwise.metrics_file import RANK_KINDS, read_lines
from shardwise.parallel.named_values import CAPACITY, NamedGather
from shardwise.step_clock import PHASES
from shardwise.telemetry.flops import flops_per_sample, measured_flops, meta_copy, peak_flops
from shardwise.telemetry.readings import Readings
from shardwise.telemetry.statistics import OWN_PHASES, TimeSplit, flat_statistics, own_values
from shardwise.telemetry.step_metrics import StepMetrics
from shardwise.telemetry.table import RankTable
from shardwise.tracking import JsonlLogger, RankJsonlLogger
from training import CONTEXT, GLOBAL_SIZE, LAYOUTS, PLANS, build_module, make_trainer, on_layout, shares

TIMES = {"time/step", *(f"time/{phase}" for phase in PHASES)}


class Kept(DummyLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.own: list[dict[str, float]] = []
        self.tables: list[RankTable] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.append({"step": step, **metrics})

    def log_rank(self, values: dict[str, float], step: int) -> None:
        self.own.append({"step": step, **values})

    def log_ranks(self, table: RankTable) -> None:
        self.tables.append(table)


class Tables(pl.Callback):
    def __init__(self) -> None:
        self.tables: list[RankTable] = []

    def on_rank_table(self, trainer: Any, table: RankTable) -> None:
        self.tables.append(table)


class Counted(TorchDispatchMode):
    """Names of the collectives that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Measured(StepMetrics):
    """Counts the collectives of its own work in each step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.collectives: dict[int, list[str]] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        with Counted() as counted:
            super().on_train_batch_end(trainer, *args)
        self.collectives[trainer.global_step] = counted.names


def said() -> list[str]:
    """Warnings of this process from here on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise.strategies.logged")
    logger.handlers = [handler]
    return texts


def fit(kind: str, layout: str, *, steps: int = 6, every: int = 2, **options: Any) -> tuple[Measured, Kept, Tables]:
    torch.manual_seed(11)
    metrics, kept, tables = Measured(total_steps=steps, global_size=GLOBAL_SIZE), Kept(), Tables()
    options = {"precision": "64-true", "log_every_n_steps": every, "max_steps": steps, **options}
    strategy = {"plan": PLANS.get(kind), **options.pop("strategy", {})}
    trainer = make_trainer(layout, callbacks=[metrics, tables], logger=kept, strategy=strategy, **options)
    trainer.fit(build_module(kind), shares(kind, steps, tp=LAYOUTS[layout].tp))
    return metrics, kept, tables


# ---- one collective ------------------------------------------------------------------------------------------------


def gathering() -> dict[str, Any]:
    rank, gather = dist.get_rank(), NamedGather(dist.group.WORLD, torch.device("cpu"))

    def of(names: list[str]) -> tuple[tuple[str, ...], list[list[float]], int]:
        before = gather.collectives
        found = gather(names, torch.arange(len(names), dtype=torch.float64) + 10 * rank)
        assert np.array_equal(np.isnan(found.values), ~found.held)
        return found.names, np.nan_to_num(found.values, nan=-1).tolist(), gather.collectives - before

    many = [f"n{i}" for i in range(CAPACITY + 1)]
    return {
        "same": of(["a", "b"]),
        "other": of(["b", "a"] if rank else ["a", "c"]),
        "other again": of(["b", "a"] if rank else ["a", "c"]),
        "same again": of(["a", "b"]),
        "many": of(many)[2],
        "many again": of(many[::-1])[2],
        "one has more": of([f"m{i}" for i in range(3 * CAPACITY)] if rank else ["a"])[2],
        "none": of([] if rank else ["a"]),
    }


def test_numbers_go_by_their_names_and_take_one_collective(pool: RankPool) -> None:
    for found in pool.run(gathering, world_size=2):
        assert found["same"] == (("a", "b"), [[0, 1], [10, 11]], 1)
        other = (("a", "c", "b"), [[0, 1, -1], [11, -1, 10]])
        assert found["other"] == (*other, 2), "names that are new travel once"
        assert found["other again"] == (*other, 1)
        assert found["same again"] == found["same"]
        assert (found["many"], found["many again"]) == (2, 1), "once for the longer vector"
        assert found["one has more"] == 3
        assert found["none"] == (("a",), [[0], [-1]], 2)


def collectives(layout: str) -> tuple[dict[int, list[str]], int]:
    metrics, kept, _ = fit("plan", layout, steps=7, every=3)
    assert [line["step"] for line in kept.lines] == [1, 3, 6, 7]
    return metrics.collectives, len(kept.lines[1])


@pytest.mark.parametrize("layout", ["ddp2", "tp2", "fsdp+tp4"])
def test_a_logging_step_has_one_collective_and_other_steps_none(pool: RankPool, layout: str) -> None:
    for found, names in on_layout(pool, collectives, layout, layout):
        assert {step: len(calls) for step, calls in found.items()} == {1: 1, 2: 0, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}
        assert names > 50


# ---- what a rank measures ------------------------------------------------------------------------------------------


def tables_of(layout: str) -> dict[str, Any]:
    metrics, kept, tables = fit("gpt", layout)
    return {
        "tables": [(t.step, t.steps, t.names, t.values.tolist(), t.hosts) for t in tables.tables],
        "lines": kept.lines, "own": kept.own, "logger's": [t.step for t in kept.tables], "summary": metrics.summary(),
    }  # fmt: skip


def test_every_rank_gets_the_same_table_and_each_logger_its_part(pool: RankPool) -> None:
    ranks = on_layout(pool, tables_of, "fsdp2", "fsdp2")
    first = ranks[0]
    assert repr(first["tables"]) == repr(ranks[1]["tables"])
    assert [(step, steps) for step, steps, *_ in first["tables"]] == [(1, 0), (2, 1), (4, 2), (6, 2)]
    assert (first["logger's"], ranks[1]["logger's"]) == ([1, 2, 4, 6], [])
    for number, (step, steps, names, values, hosts) in enumerate(first["tables"]):
        table = RankTable(step=step, steps=steps, names=names, values=np.array(values), hosts=hosts)
        assert len(hosts) == 2
        assert set(names) >= TIMES | {"memory/resident", "memory/peak", "rank/loss", "rank/grad_norm", "node/cpu"}
        assert all(name.startswith(RANK_KINDS) for name in names)
        assert math.isnan(table.column("node/cpu")[1]), "one rank of a node measures it"
        assert (table.column("memory/peak") > 1e7).all()
        line = first["lines"][number]
        assert line["rank/loss"] == pytest.approx(table.column("rank/loss").mean())
        assert line["rank/loss/max_rank"] == table.column("rank/loss").argmax()
        # Each holds half of the gradients.
        assert line["grad_norm"] == pytest.approx(math.hypot(*table.column("rank/grad_norm")), rel=1e-12)
        for rank in (0, 1):
            own = ranks[rank]["own"][number]
            assert own.pop("step") == step
            assert own == own_values(table, rank)
        if steps:
            split = sum(table.column(f"time/{phase}") for phase in PHASES)
            assert table.column("time/step") == pytest.approx(split, rel=1e-9)
            assert (table.column("time/forward") > 0).all()
            waited = sum(table.column(f"time/{phase}") for phase in set(PHASES) - set(OWN_PHASES))
            assert table.column("time/own") == pytest.approx(split - waited, rel=1e-9)
        else:
            assert np.isnan(table.column("time/step")).all(), "much is done for the first time in the first step"
            assert "time/step" not in line
    assert [set(line) for line in first["lines"][2:]] == [set(first["lines"][1])] * 2, "the same names in every line"
    summary = first["summary"]
    assert set(summary["time"]) == set(PHASES)
    assert summary["wall"] == pytest.approx(sum(summary["time"].values()))
    assert summary["slowest_rank"]["ratio"] >= 1.0
    assert summary["peak_memory"]["bytes"] == max(
        max(np.array(v)[:, n.index("memory/peak")]) for _, _, n, v, _ in first["tables"]
    )


def test_statistics_say_which_rank_and_leave_out_what_nobody_has() -> None:
    nan = math.nan
    values = np.array([[1.0, nan, nan, nan], [4.0, 7.0, nan, 3.0], [1.0, 9.0, nan, nan]])
    table = RankTable(step=1, steps=1, names=("a", "b", "c", "d"), values=values)
    assert flat_statistics(table) == {
        "a": 2.0, "a/min": 1.0, "a/max": 4.0, "a/max_rank": 1, "b": 8.0, "b/min": 7.0, "b/max": 9.0, "b/max_rank": 2,
        "d": 3.0,
    }  # fmt: skip
    one = RankTable(step=1, steps=1, names=("a", "b"), values=np.array([[1.0, nan]]))
    assert flat_statistics(one) == {"a": 1.0}


def test_the_slowest_rank_is_named_with_what_it_spends_more_on() -> None:
    split = TimeSplit(ranks=3)
    seconds = dict.fromkeys(PHASES, 1.0)
    rows = [
        seconds,
        {**seconds, "communication": 50.0},
        {**seconds, "backward": 2.0, "data": 3.0, "communication": 0.0},
    ]
    for _ in range(2):
        split.add(np.array([[row[phase] for phase in PHASES] for row in rows]))
    slowest = {"rank": 2, "host": "z", "ratio": 8 / 5, "kind": "data", "phase": "data"}
    assert split.slowest(("x", "y", "z")) == slowest
    two = TimeSplit(ranks=2)
    more = {"forward": 4.0, "backward": 4.0, "data": 5.0}
    two.add(np.array([[1.0] * len(PHASES), [more.get(phase, 1.0) for phase in PHASES]]))
    slowest = {"rank": 1, "host": "y", "ratio": 15 / 5, "kind": "compute", "phase": "forward"}
    assert two.slowest(("x", "y")) == slowest, "of two ranks, a slow one does not hide in the median"
    assert split.mean()["communication"] == 2 * 51 / 3
    assert TimeSplit(ranks=1).slowest(("x",)) is None


def test_a_reading_is_cheap_and_has_the_same_names_on_every_rank() -> None:
    device = torch.device("cpu")
    reads, other = Readings(device, reads_node=True), Readings(device, reads_node=False)
    took = []
    for _ in range(50):
        start = time.perf_counter()
        values = reads.read()
        took.append(time.perf_counter() - start)
    assert list(values) == list(other.read())
    assert values["memory/peak"] >= values["memory/resident"] * 0.5 > 1e6
    assert sorted(took)[25] < 0.3e-3


# ---- what a module logs itself -------------------------------------------------------------------------------------


class Logs(pl.LightningModule):
    """Logs its rank in four ways, and things that only some ranks log."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        self.wanted = wanted
        self.mine = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = float(self.global_rank)
        if "reduced" in self.wanted:
            for name in ("mean", "sum", "min", "max"):
                self.log(f"train/{name}", rank, on_step=True, on_epoch=False, reduce_fx=name)
        if "some" in self.wanted:
            if self.global_rank % 2 == 0:
                self.log("train/even", rank, on_step=True)
            else:
                self.log("train/odd", rank, on_step=True)
            self.log("train/all", rank, on_step=True)
        if "epoch" in self.wanted:
            self.log("train/each", rank, on_step=True, on_epoch=True)
            self.log("train/largest", rank, on_epoch=True, on_step=False, reduce_fx="max")
        return F.mse_loss(self.blocks(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = float(self.global_rank)
        self.log("val/rank", rank)
        self.log("val/sum", rank, reduce_fx="sum")
        if "some" in self.wanted and self.global_rank != 1:
            self.log("val/some", rank)
        if "metric" in self.wanted:
            self.mine.update(rank)
            if self.global_rank == 0:
                self.log("val/metric", self.mine)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logs(layout: str, wanted: tuple[str, ...], with_metrics: bool = True) -> dict[str, Any]:
    texts, kept = said(), Kept()
    callbacks = [StepMetrics(total_steps=4, global_size=GLOBAL_SIZE)] if with_metrics else []
    trainer = make_trainer(
        layout, callbacks=callbacks, logger=kept, max_steps=4, log_every_n_steps=2, num_sanity_val_steps=0,
        limit_val_batches=2, strategy={"plan": PLANS["plain"]},
    )  # fmt: skip
    tp = LAYOUTS[layout].tp
    trainer.fit(Logs(wanted), shares("plain", 4, tp=tp), shares("plain", 4, tp=tp))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"found": found, "lines": kept.lines, "said": texts}


@pytest.mark.parametrize("with_metrics", [True, False])
@pytest.mark.parametrize("layout", ["ddp2", "ddp+tp4"])
def test_a_metric_is_reduced_as_it_says_over_the_data_parallel_ranks(
    pool: RankPool, layout: str, with_metrics: bool
) -> None:
    # Of ranks with the same samples the first counts: 0 and 1, or 0 and 2.
    far = LAYOUTS[layout].tp
    expected = {"train/mean": far / 2, "train/sum": far, "train/min": 0, "train/max": far}
    for rank in on_layout(pool, logs, layout, layout, ("reduced",), with_metrics):
        assert {name: rank["found"][name] for name in expected} == expected
        lines = [line for line in rank["lines"] if "train/sum" in line]
        assert [{name: line[name] for name in expected} for line in lines] == [expected] * 2
        assert rank["said"] == []


@pytest.mark.parametrize("with_metrics", [True, False])
def test_ranks_that_log_different_keys_are_told_and_nothing_is_mixed(pool: RankPool, with_metrics: bool) -> None:
    ranks = on_layout(pool, logs, "ddp4", "ddp4", ("some",), with_metrics)
    for number, rank in enumerate(ranks):
        found = rank["found"]
        assert found["train/all"] == 1.5
        assert found.get("train/even", 1.0) == 1.0, "the mean of 0 and 2"
        assert found.get("train/odd", 2.0) == 2.0, "the mean of 1 and 3"
        assert ("train/even" in found) == (number % 2 == 0)
        assert found["val/rank"] == 1.5
        assert found["val/sum"] == 12.0, "two batches on each of four ranks"
        if number != 1:
            assert found["val/some"] == pytest.approx(5 / 3)
    texts = ranks[0]["said"]
    assert sorted(texts) == [
        "train/even is logged by rank 0, 2 and not by 1, 3: its value is the mean over those that log it",
        "train/odd is logged by rank 1, 3 and not by 0, 2: its value is the mean over those that log it",
        "val/some is logged by rank 0, 2, 3 and not by 1: its value is the mean over those that log it",
    ], "once each, on rank 0"
    assert all(rank["said"] == [] for rank in ranks[1:])
    if with_metrics:
        assert [line["train/odd"] for line in ranks[0]["lines"] if "train/odd" in line] == [2.0] * 3


def test_a_metric_object_that_not_all_ranks_log_is_an_error_on_all(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        on_layout(pool, logs, "ddp2", "ddp2", ("metric",))
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        assert "ConfigError: the metric 'val/metric' is logged by rank 0 and not by 1" in text


def test_what_is_logged_over_an_epoch_of_training_is_of_all_ranks(pool: RankPool) -> None:
    for rank in on_layout(pool, logs, "ddp2", "ddp2", ("epoch",)):
        assert rank["found"]["train/each_epoch"] == 0.5
        assert rank["found"]["train/each_step"] == 0.5
        assert rank["found"]["train/largest"] == 1.0
        assert rank["said"] == []


# ---- gradients, tokens, operations ---------------------------------------------------------------------------------


def figures(layout: str, clip: float | None) -> list[dict[str, float]]:
    _, kept, _ = fit("gpt", layout, gradient_clip_val=clip)
    return kept.lines


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2", "tp4", "hsdp4", "fsdp+tp4", "ddp+tp4"])
def test_norm_tokens_and_operations_are_those_of_one_device(pool: RankPool, layout: str) -> None:
    expected = figures("one", 1e9)
    for line, other in zip(on_layout(pool, figures, layout, layout, None)[0], expected, strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9), "without clipping"
        assert line["train/loss"] == pytest.approx(other["train/loss"], rel=1e-9)
        assert line["samples"] == line["step"] * GLOBAL_SIZE
        assert line["tokens"] == line["step"] * GLOBAL_SIZE * CONTEXT
        if "samples_per_second" in line:
            assert line["tokens_per_second"] == pytest.approx(line["samples_per_second"] * CONTEXT)
            each = line["flops_per_second"] / line["samples_per_second"]
            assert each == pytest.approx(other["flops_per_second"] / other["samples_per_second"])
            assert line["mfu"] > 0


def test_operations_are_three_forward_passes() -> None:
    with torch.device("meta"):
        module = build_module("mlp")
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    twin = meta_copy(module)
    assert twin is not None
    batch = torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64)
    assert flops_per_sample(twin, batch) == 3 * 2 * weights
    gpt = build_module("gpt-loss")
    twin = meta_copy(gpt)
    assert twin is not None
    tokens = torch.zeros(3, CONTEXT, dtype=torch.int64)
    matrices = sum(p.numel() for n, p in gpt.named_parameters() if p.dim() == 2 and "emb" not in n)
    attention = 2 * 2 * 2 * CONTEXT**2 * 16  # layers, products, operations
    found = flops_per_sample(twin, (tokens, tokens))
    assert found == pytest.approx(3 * (2 * matrices * CONTEXT + attention))


class Asks(pl.LightningModule):
    """Its step hangs on values, draws numbers, and keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen: list[Any] = []
        self.own = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.torchs, self.numpys = self.own
        self.asks = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        loss = self.layer(batch[0]).sum() + torch.rand(()) + random.random() + np.random.rand()
        loss = loss + torch.rand((), generator=self.torchs) + self.numpys.random()
        self.log("x", loss)
        return loss if not self.asks or loss.item() > 0 else -loss


def drawn(module: Asks) -> list[str]:
    """The state of all that a step has drawn from."""
    torchs = torch.get_rng_state(), module.torchs.get_state()
    numpys = np.random.get_state()[1:3], module.numpys.bit_generator.state
    return [str(state.tolist()) for state in torchs] + [repr(state) for state in (*numpys, random.getstate())]


def test_counting_leaves_no_trace_and_may_fail() -> None:
    module, batch = Asks(), (torch.zeros(4, 6), torch.zeros(4, 3))
    before = drawn(module)
    twin = meta_copy(module)
    assert twin is not None
    assert flops_per_sample(twin, batch) == 3 * 2 * 18
    module.asks = True
    twin = meta_copy(module)
    assert twin is not None
    assert flops_per_sample(twin, batch) is None
    assert module.seen == []
    assert drawn(module) == before, "a resumed run counts in another step than one that goes through"
    assert not module.layer.weight.is_meta


def test_peaks_go_by_the_words_of_a_device_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989.4, "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L40S": 362, "NVIDIA L4": 121,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16-mixed") == peak * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(torch.device("cuda"), "32-true") == 19.5e12
    older = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # the older allow_tf32 must not be asked for any more
        assert peak_flops(torch.device("cuda"), "32-true") == 156e12
    finally:
        torch.backends.cuda.matmul.fp32_precision = older
    monkeypatch.setattr("shardwise.telemetry.flops.measured_flops", lambda device, dtype: dtype)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A4000")
    assert peak_flops(torch.device("cuda"), "16-mixed") == torch.float16


def test_a_device_of_no_known_name_is_measured_in_no_time() -> None:
    start = time.perf_counter()
    found = measured_flops(torch.device("cpu"), torch.float32)
    assert time.perf_counter() - start < 1.0
    assert 1e8 < found < 1e15


# ---- files, and going on -------------------------------------------------------------------------------------------


def test_a_rank_s_file_goes_on_where_the_run_s_does(tmp_path: Any) -> None:
    lines = JsonlLogger(tmp_path / "metrics.jsonl")
    size = 0
    for step in (2, 4, 6):
        lines.log_metrics({"train/loss": 1.0}, step)
        size = lines.size() if step == 4 else size
    lines.log_metrics({"val/loss": 1.0}, 6)
    for rank in (0, 1, 2):
        logger = RankJsonlLogger(tmp_path / "ranks", rank=rank)
        for step in (2, 4, 6):
            logger.log_rank({"time/step": 0.5 + rank, "rank/loss": math.inf}, step)
        logger.log_metrics({"train/loss": 1.0}, 6)
    kept = [2, 4]
    RankJsonlLogger(tmp_path / "ranks", rank=0).go_on_after(lines.path, size, ranks=2)
    assert [[step for step, *_ in read_lines(tmp_path / f"ranks/rank_{rank}.jsonl")] for rank in (0, 1, 2)] == [
        kept, [2, 4, 6], kept,
    ]  # fmt: skip
    (_, values, _), _ = read_lines(tmp_path / "ranks" / "rank_2.jsonl")
    assert values["time/step"] == 2.5
    RankJsonlLogger(tmp_path / "ranks", rank=1).go_on_after(lines.path, 0, ranks=2)
    assert list(read_lines(tmp_path / "ranks" / "rank_1.jsonl")) == []


TINY = (
    "task=language_model", "model=gpt", "model.n_layer=1", "model.width=16", "model.n_head=2", "data=synthetic_tokens",
    "data.context=8", "batch.global_size=8", "logger=none", "trainer.devices=2", "trainer.log_every_n_steps=2",
)  # fmt: skip


def test_a_run_of_two_ranks_leaves_what_each_measured_and_counts_on(train_py: Any) -> None:
    first = train_py(*TINY, "trainer.max_steps=10", "checkpoint.every_n_steps=3", "trainer.limit_val_batches=0")
    folder = first.run_folder
    lines = list(read_lines(folder / "metrics.jsonl"))
    steps = [step for step, line, _ in lines if "train/loss" in line]
    assert steps == [1, 2, 4, 6, 8, 10]
    assert [line["tokens"] for _, line, _ in lines if "tokens" in line] == [step * 8 * 8 for step in steps]
    for rank in (0, 1):
        own = list(read_lines(folder / "ranks" / f"rank_{rank}.jsonl"))
        assert [step for step, *_ in own] == steps
        assert not any("/max" in name for _, values, _ in own for name in values)
    result = json.loads((folder / "result.json").read_text())
    assert not any(name.startswith(RANK_KINDS) for name in result["metrics"])
    assert result["metrics"]["tokens"] == 640
    telemetry = result["telemetry"]
    assert set(telemetry["time"]) == set(PHASES)
    assert telemetry["peak_memory"]["rank"] in (0, 1)

    (folder / "checkpoints" / "step_00000010").rename(folder / "gone")
    train_py(f"resume={folder / 'checkpoints' / 'step_00000009'}")
    again = [(step, line) for step, line, _ in read_lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [step for step, _ in again] == steps
    assert [line["tokens"] for _, line in again] == [step * 64 for step in steps]
    for rank in (0, 1):
        assert [step for step, *_ in read_lines(folder / "ranks" / f"rank_{rank}.jsonl")] == steps


def test_what_a_logger_does_for_the_first_time_belongs_to_the_first_step() -> None:
    class Begins(Kept):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            time.sleep(0.4 if step == 1 else 0.0)

    metrics, kept = StepMetrics(total_steps=3, global_size=GLOBAL_SIZE), Begins()
    trainer = make_trainer("one", callbacks=[metrics], logger=kept, log_every_n_steps=1, max_steps=3)
    trainer.fit(build_module("plain"), shares("plain", 3))
    second = next(line for line in kept.lines if line["step"] == 2)
    assert second["time/logging"] < 0.3
    assert second["samples_per_second"] > GLOBAL_SIZE / 0.3
    assert metrics.summary()["time"]["logging"] > 0.4
    trainer.fit_loop.epoch_loop.max_steps += 2
    trainer.fit_loop.epoch_loop._batches_that_stepped = 0
    trainer.fit(build_module("plain"), shares("plain", 3))
    assert metrics.summary()["time"]["logging"] < 0.3, "a second training is one of its own"


def test_another_strategy_is_refused_when_training_is_set_up() -> None:
    metrics = StepMetrics(total_steps=2, global_size=GLOBAL_SIZE)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[metrics], **quiet)
    with pytest.raises(ConfigError, match=r"Trainer\(strategy=SingleDeviceStrategy\): .*strategy=MeshStrategy\(\)"):
        trainer.fit(build_module("plain"), shares("plain", 2))


def test_tokens_that_a_checkpoint_held_are_in_one_that_is_saved_before_the_first_batch() -> None:
    metrics = StepMetrics(total_steps=2, global_size=GLOBAL_SIZE)
    metrics.load_state_dict({"tokens": 50})
    assert metrics.state_dict() == {"tokens": 50}
