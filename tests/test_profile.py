"""profile=step: a window of steps, what is written of it, what a person reads there, and what is refused."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from checkout import TrainRun
from pool import RankPool
from shardwise.build import check_callbacks
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.report.timeline import lanes, render, sentences, write_timeline
from shardwise.resolve import World, resolve_in
from shardwise.telemetry.profile import ProfileSteps, check_window
from shardwise.telemetry.trace import Span, add_phases, innermost, kind_of, read_trace, time_in
from training import LAYOUTS, Recorder, build_module, make_trainer, on_layout, shares

STEPS = 7


def fit(layout: str, *callbacks: pl.Callback, steps: int = STEPS, **options: Any) -> Any:
    trainer = make_trainer(layout, callbacks=callbacks, max_steps=steps, precision="32-true", **options)
    trainer.fit(build_module("gpt"), shares("gpt", steps, tp=LAYOUTS[layout].tp))
    return trainer


# ---- a profile of real steps -----------------------------------------------------------------------------------------


def with_and_without(layout: str, folder: Path) -> tuple[Any, Any, bool]:
    found: list[tuple[list[float], list[Tensor]]] = []
    for profiled in (False, True):
        last = LAYOUTS[layout].world_size - 1
        more = [ProfileSteps(folder, start=3, steps=2, ranks=sorted({0, last}), draw=write_timeline)]
        recorder = Recorder()
        trainer = fit(layout, recorder, *(more if profiled else []))
        found.append((recorder.record.losses, list(recorder.record.end.values())))
    return found[0], found[1], "switch" in vars(trainer.strategy.clock)


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp+tp4"])
def test_a_window_is_seen_and_nothing_of_the_training_changes(pool: RankPool, layout: str, tmp_path: Path) -> None:
    ranks = on_layout(pool, with_and_without, layout, layout, tmp_path)
    for without, profiled, marking in ranks:
        assert without[0] == profiled[0]
        assert all(torch.equal(a, b) for a, b in zip(without[1], profiled[1], strict=True))
        assert not marking, "the clock is as it was"
    wanted = sorted({0, len(ranks) - 1})
    files = {f"rank_{rank}{end}" for rank in wanted for end in (".html", ".trace.json.gz")}
    assert {path.name for path in tmp_path.glob("rank_*")} == files, "the ranks that are named, and no other"
    for rank in wanted:
        trace = read_trace(tmp_path / f"rank_{rank}.trace.json.gz")
        assert [step.name for step in trace.steps] == ["step 4", "step 5"]
        for step in trace.steps:
            spent = time_in(trace.phases, step)
            assert {"data", "forward", "backward", "optimizer"} <= set(spent)
            assert sum(spent.values()) == pytest.approx(step.length, rel=0.02), "each moment in one phase"
            assert "matrix products" in time_in(trace.kinds, step)
            if len(ranks) > 1:
                assert time_in(trace.collectives, step)
                waited = time_in(trace.waits, step)
                assert sum(waited.values()) == pytest.approx(spent["communication"], rel=1e-3, abs=1e-2)
        if len(ranks) == 1:
            assert not trace.collectives
            assert not trace.waits
        assert {"aten::mm", "aten::mul"} <= {one.name for one in trace.operators}
        page = (tmp_path / f"rank_{rank}.html").read_text()
        assert f"Rank {rank} of {len(ranks)}: where step " in page
        assert page.count("data:image/png;base64,") == 2
        assert not re.search(r'(src|href)(set)?="(?!data:)', page), "nothing from elsewhere"


def test_a_run_says_where_the_picture_is(train_py: Callable[..., TrainRun]) -> None:
    run = train_py("profile=step", "profile.start=1", "trainer.max_steps=5", "trainer.profiler=simple", "logger=none")
    [line] = [line for line in run.stdout.splitlines() if line.startswith("profile of")]
    page = run.run_folder / "profile" / "rank_0.html"
    assert line.startswith(f"profile of steps 2 to 4 on rank 0: {page} ")
    assert page.exists()
    trace = read_trace(page.with_name("rank_0.trace.json.gz"))
    assert [step.name for step in trace.steps] == ["step 2", "step 3", "step 4"]
    assert "run_training_batch" in run.stdout + run.stderr, "Lightning's profiler reports as ever"
    assert not re.search("USDT|Profiler.cpp|DeviceProperties|Warning", run.stderr), run.stderr


class Stop(pl.Callback):
    """Ends the training after a step, or fails in it."""

    def __init__(self, step: int, error: str = "") -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.step and self.error:
            raise RuntimeError(self.error)
        trainer.should_stop = trainer.global_step + 1 == self.step


@pytest.mark.parametrize(
    ("start", "stop", "line"),
    [
        (2, 4, "profile of steps 3 to 4 (3 were asked for) on rank 0: "),
        (2, 2, "nothing was profiled, as the window begins after 2 steps and this process made 2: type a smaller"),
        (5, 7, "nothing was profiled, as its window (profile.start=5 profile.steps=3) is longer than the 7 steps"),
    ],
)
def test_a_training_that_is_too_short_says_so(
    start: int, stop: int, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit("one", Stop(stop), ProfileSteps(tmp_path / "profile", start=start, steps=3))
    out, err = capfd.readouterr()
    assert line in out
    # The profiler's library reads its level once a process, here with the first test; a fresh one is looked at above.
    assert not [line for line in err.splitlines() if "profiler" in line and not line.startswith("USDT:")]
    traces = list(tmp_path.glob("profile/*.trace.json.gz"))
    assert [len(read_trace(trace).steps) for trace in traces] == ([2] if "asked for" in line else [])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_steps_are_those_of_this_process(tmp_path: Path) -> None:
    trainer = fit("one", steps=4)
    trainer.save_checkpoint(tmp_path / "at_4.ckpt")
    profiled = make_trainer(
        "one", callbacks=[ProfileSteps(tmp_path, start=1, steps=2)], max_steps=8, precision="32-true"
    )
    profiled.fit(build_module("gpt"), shares("gpt", 8), ckpt_path=tmp_path / "at_4.ckpt")
    assert [step.name for step in read_trace(tmp_path / "rank_0.trace.json.gz").steps] == ["step 6", "step 7"]


def test_after_a_failure_in_the_window_the_next_training_can_be_profiled(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit("one", Stop(4, "on purpose"), ProfileSteps(tmp_path, start=2, steps=3))
    assert not list(tmp_path.glob("rank_*"))
    fit("one", ProfileSteps(tmp_path, start=1, steps=1))
    assert len(read_trace(tmp_path / "rank_0.trace.json.gz").steps) == 1


def test_what_cannot_be_written_or_drawn_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")

    def fails(*args: Any, **options: Any) -> None:
        raise ValueError("no ink")

    for folder, message in (("file", "no profile of rank 0: "), ("there", "rank_0.trace.json.gz: ValueError: no ink")):
        caplog.clear()
        trainer = fit("one", ProfileSteps(tmp_path / folder, start=1, steps=1, draw=fails))
        assert trainer.global_step == STEPS
        assert message in caplog.text
        assert len(caplog.records) == 1
    assert read_trace(tmp_path / "there" / "rank_0.trace.json.gz").steps
    assert "KINETO_LOG_LEVEL" not in os.environ


# ---- reading a trace, and the page about it --------------------------------------------------------------------------


def event(name: str, start: float, length: float, category: str, thread: Any = 1, **details: Any) -> dict[str, Any]:
    """Milliseconds, as the profiler writes them."""
    plain = {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, "args": details}
    return {**plain, "ts": 7e9 + start * 1000, "dur": length * 1000}


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 9, "ts": 0}, *events]}, file)
    return path


GPU_STEP = [
    event("step 11", 0, 10, "user_annotation"),
    event("step 12", 10, 12, "user_annotation"),
    event("step 12", 10, 12, "gpu_user_annotation", 7),
    event("from here: forward", 0.5, 0.01, "user_annotation"),
    event("from here: backward", 4, 0.01, "user_annotation", 2),
    event("from here: communication allreduce of gradients", 7, 0.01, "user_annotation", 2),
    event("from here: backward", 9, 0.01, "user_annotation", 2),
    event("from here: forward", 10.5, 0.01, "user_annotation"),
    event("aten::linear", 1, 2, "cpu_op"),
    event("aten::addmm", 1.5, 1, "cpu_op"),
    event("aten::empty", 2, 0.25, "cpu_op"),
    event("aten::mul", 5, 1, "cpu_op", 2),
    event("nccl:all_reduce", 6, 0.1, "user_annotation", 2),
    event("nccl:all_reduce", 6.5, 2.5, "gpu_user_annotation", 20),
    event("ncclDevKernel_AllReduce", 6.5, 2.5, "kernel", 20, device=0, stream=20),
    event("sgemm<128>", 2, 3, "kernel", 7, device=0, stream=7),
    event("Memcpy HtoD", 1, 0.5, "gpu_memcpy", 7, device=0, stream=7),
]


def test_phases_become_a_row_of_the_trace(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json.gz", GPU_STEP)
    add_phases(path, last_step=12)
    plain = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    row = [(e["name"], e["ts"] - 7e9, e["dur"], e.get("args")) for e in plain if e.get("cat") == "phases"]
    assert row == [
        ("forward", 0, 4000, None),  # the first mark comes a moment after the first step has begun
        ("backward", 4000, 3000, None),
        ("communication", 7000, 2000, {"collective": "allreduce of gradients"}),
        ("backward", 9000, 1500, None),
        ("forward", 10500, 11500, None),
    ]
    assert not any(e["name"].startswith("from here") for e in plain)
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_gpu_did_is_read_from_its_streams(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json.gz", GPU_STEP)
    add_phases(path, last_step=12)
    trace = read_trace(path)
    step = trace.steps[0]
    assert time_in(trace.phases, step) == pytest.approx({"backward": 4, "forward": 4, "communication": 2})
    assert time_in(trace.waits, step) == pytest.approx({"allreduce of gradients": 2})
    assert trace.collectives == [Span("all_reduce", 6.5, 9.0)], "on the GPU, not where the host hands it over"
    assert time_in(trace.kinds, step) == pytest.approx({"matrix products": 2, "elementwise and others": 1})
    assert list(trace.streams) == ["GPU 0 stream 20", "GPU 0 stream 7"]
    assert next((k.name, k.calls, k.milliseconds) for k in trace.kernels) == ("sgemm<128>", 1, pytest.approx(3.0))
    own = {one.name: one.milliseconds for one in trace.operators}
    assert own == pytest.approx({"aten::linear": 1, "aten::addmm": 0.75, "aten::empty": 0.25, "aten::mul": 1})
    assert [(label.split("  ")[0], group) for label, _, group in lanes(trace, step)] == [
        ("forward", "phases"),
        ("backward", "phases"),
        ("communication", "phases"),
        ("allreduce of gradients", "waiting for"),
        ("matrix products", "operators"),
        ("elementwise and others", "operators"),
        ("all_reduce", "collectives"),
        ("GPU 0 stream 7", "GPU"),
        ("GPU 0 stream 20", "GPU"),
    ]
    said = " ".join(sentences(trace, step))
    assert "It waited 2.0 ms (20%) for other ranks, most of all for allreduce of gradients (2.0 ms)." in said
    assert "The GPU computed or copied for 35% of it." in said
    page = render(trace, "<t>.json.gz", rank=3, world=8)
    assert "Rank 3 of 8: where step 11 spent" in page
    assert "sgemm&lt;128&gt;" in page
    assert "<t>" not in page


def test_nested_spans_become_pieces_of_the_innermost() -> None:
    spans = [Span("a", 0, 10), Span("b", 2, 5), Span("c", 3, 4), Span("b", 5, 6), Span("d", 12, 13)]
    assert [(one.name, one.start, one.end) for one in innermost(spans)] == [
        *(("a", 0, 2), ("b", 2, 3), ("c", 3, 4), ("b", 4, 5), ("b", 5, 6), ("a", 6, 10), ("d", 12, 13)),
    ]


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        (["aten::linear", "aten::addmm", "aten::empty"], "matrix products"),
        (["autograd::engine::evaluate_function: AddmmBackward0"], "hooks of autograd"),
        (["AddmmBackward0", "aten::t"], "matrix products"),
        (["aten::scaled_dot_product_attention", "aten::mm"], "matrix products"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["aten::layer_norm", "aten::native_layer_norm"], "normalisation"),
        (["aten::normal_"], "elementwise and others"),
        (["Optimizer.step#AdamW.step", "aten::_foreach_add_"], "optimizer"),
        (["fsdp::all_gather_copy_in"], "communication"),
        (["_GatherBackward"], "communication"),
        (["aten::gather"], "embedding and indexing"),
        (["_CrossEntropy"], "softmax and loss"),
        (["aten::mul"], "elementwise and others"),
    ],
)
def test_operators_are_of_a_kind(stack: list[str], kind: str) -> None:
    assert kind_of(stack) == kind


def test_a_file_without_steps_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no profiled step"):
        read_trace(written(tmp_path / "t.json.gz", [event("aten::mm", 0, 1, "cpu_op")]))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        (["profile.ranks=[4]"], 4, "there is no rank 4: the run has 4 ranks, from 0 to 3: type profile.ranks=[0]"),
        (["profile.ranks=[-1]"], 2, "there is no rank -1: the run has 2 ranks"),
        (["profile.ranks=[0,1]"], 1, "there is no rank 1: the run has 1 rank, which is 0"),
        (["profile.ranks=[]"], 4, "profile.ranks=[0,1,2,...]"),
        (["trainer.max_steps=12"], 1, "need 13 optimizer steps, and training makes 12: type profile.start=9 profile.s"),
        (["trainer.max_steps=3"], 1, "makes 3: type profile.start=1 profile.steps=2"),
        (["trainer.fast_dev_run=true"], 1, "trainer.fast_dev_run=1 makes 1 optimizer step, and the first is never"),
        (["trainer.profiler=pytorch"], 1, "PyTorch has one profiler at a time"),
        (["trainer.barebones=true", "trainer.num_sanity_val_steps=0"], 1, "so profile=step: drop one"),
    ],
)
def test_mistakes_are_told_before_anything_starts(overrides: list[str], devices: int, message: str) -> None:
    config = compose(["profile=step", "logger=none", *overrides])
    with pytest.raises(ConfigError) as caught:
        check_callbacks(resolve_in(config, World(1, devices, "cpu", "local", "told by the test")))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_right_is_not_refused() -> None:
    world = World(1, 4, "cpu", "local", "told by the test")
    for overrides in (["profile=step", "profile.ranks=[0,3]", "trainer.max_steps=13"], ["profile.ranks=[9]"]):
        config = compose([*overrides, "logger=none"])
        check_callbacks(resolve_in(config, world))
        check_window(config, 13)


@pytest.mark.parametrize("override", ["profile=all", "profile.start=0", "profile.steps=0", "profile.ranks=[a]"])
def test_wrong_values_are_refused(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["profile=step", override] if not override.startswith("profile=") else [override])
    assert override.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
