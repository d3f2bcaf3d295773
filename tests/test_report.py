"""The report: numbers that are known in advance come out, what is broken is named, and the page needs nothing else."""

import csv
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shardwise.errors import ConfigError
from shardwise.report import analyse, load_runs
from shardwise.report.command import main
from shardwise.report.labels import telling
from shardwise.report.page import table
from shardwise.report.plots import make_plots
from shardwise.report.scaling import Target, derive_target, first_crossing, perfect_steps, regions
from shardwise.report.summary import by_setting, sentences


def write_run(
    folder: Path,
    *,
    curve: dict[int, float] | None = None,
    final: float | None = 0.9,
    status: str | None = "completed",
    batch: int = 64,
    lr: float = 0.01,
    seed: int = 0,
    rule: str = "none",
    noise: float | None = None,
    **settings: Any,
) -> Path:
    """A run folder: val/loss by step, test/accuracy at the end."""
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "batch": {"global_size": batch},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": lr, "betas": [0.9, 0.99]},
        "lr_scaling": {"rule": rule},
        "model": {"_target_": "shardwise.models.mlp.MLP", "width": 8, **settings},
        "derived": {"batch_global_size": batch, "effective_lr": lr * (batch / 64 if rule == "linear" else 1)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    typed = [f"batch.global_size={batch}", f"optimizer.lr={lr}", f"lr_scaling={rule}", f"seed={seed}", "model=mlp"]
    (folder / "overrides.yaml").write_text(yaml.safe_dump(typed))
    (folder / "provenance.json").write_text(json.dumps({"command": ["python", "train.py", "-m", "a=<b>"]}))
    lines = [{"step": step, "time": 1000.0 + step / 10, "val/loss": loss} for step, loss in (curve or {}).items()]
    lines += [{"step": step, "time": 2000.0, "noise_scale/critical_batch_size": noise} for step in range(5) if noise]
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        steps = max(curve) if curve else 10
        metrics = {"test/accuracy": final}
        (folder / "result.json").write_text(
            json.dumps({"status": status, "steps": steps, "seconds": 2.0, "metrics": metrics})
        )
    return folder


def falling(steps: float, *, last: int = 4096) -> dict[int, float]:
    """A loss that falls in a straight line from 2 and crosses 1 at ``steps``, logged at powers of two."""
    return {0: 2.0, **{2**k: 2.0 - 2**k / steps for k in range(int(math.log2(last)) + 1)}}


def report(folder: Path, *arguments: str) -> str:
    assert main([str(folder), *arguments]) == 0
    to = Path(arguments[arguments.index("--to") + 1]) if "--to" in arguments else folder / "report"
    return (to / "report.html").read_text()


class Page(HTMLParser):
    """What a browser would load, and what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def __str__(self) -> str:
        return " ".join(" ".join(self.text).split())


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_a_crossing_lies_on_the_line_between_the_points_around_it() -> None:
    steps, target = np.array([10.0, 20.0, 30.0, 40.0]), Target("val/loss", 1.0, below=True)
    assert first_crossing(steps, np.array([3.0, 1.5, 0.5, 2.0]), target) == pytest.approx(25.0)
    assert first_crossing(steps, np.array([3.0, math.nan, 0.0, 2.0]), target) == pytest.approx(10 + 20 * 2 / 3)
    assert first_crossing(steps, np.array([0.5, 1.5, 0.5, 2.0]), target) == 10
    assert first_crossing(steps, np.array([3.0, 2.0, 1.5, 1.1]), target) is None
    above = Target("val/accuracy", 0.5, below=False)
    assert first_crossing(steps, np.array([0.1, 0.3, 0.7, 0.2]), above) == pytest.approx(25.0)


def test_the_regions_lie_where_the_rule_says() -> None:
    batches = [16, 32, 64, 128, 256, 512, 1024]
    assert perfect_steps(batches, [800.0])[:3] == [800, 400, 200]
    found = regions(batches, [800, 400, 230, 160, 120, 112, 110])
    assert found is not None
    assert (found.perfect_to, found.plateau_from) == (64, 256)
    line = regions(batches, perfect_steps(batches, [800.0]))
    assert line is not None
    assert (line.perfect_to, line.plateau_from) == (1024, None)
    # Only every second doubling was tried, each pair saves 36 %: 20 % a doubling is no plateau.
    sparse = regions([16, 64, 256], [800, 512, 327])
    assert sparse is not None
    assert (sparse.perfect_to, sparse.plateau_from) == (16, None)
    assert regions([16, 32], [800, 400]) is None


def test_a_derived_target_is_what_four_of_five_reach() -> None:
    losses = derive_target("val/loss", [1.0, 2.0, 3.0, 4.0, 9.0, math.nan], below=True)
    assert losses is not None
    assert losses.value == 4.0
    accuracies = derive_target("val/accuracy", [0.98765, 0.9, 0.95, 0.93217, 0.1], below=False)
    assert accuracies is not None
    assert accuracies.value == 0.9
    rounded = derive_target("val/loss", [1.23456], below=True)
    assert rounded is not None
    assert rounded.value == 1.24, "towards what is easier to reach"
    assert derive_target("val/loss", [math.nan], below=True) is None


def test_steps_to_target_take_the_best_rate_at_each_batch_and_the_median_of_its_seeds(tmp_path: Path) -> None:
    at = {(16, 0.01): (800, 820, 840), (16, 0.1): (900, 700, 910), (64, 0.01): (500,) * 3, (64, 0.1): (210, 205, 215)}
    for (batch, lr), all_steps in at.items():
        for seed, steps in enumerate(all_steps):
            name = f"run-{batch}-{lr}-{seed}"
            write_run(tmp_path / name, curve=falling(steps), batch=batch, lr=lr, seed=seed)
    write_run(tmp_path / "run-256", curve=falling(9000), batch=256)
    found = analyse(load_runs(tmp_path), target="val/loss<=1.0")
    (reaching,) = found.reaching.values()
    assert [(cell.batch, cell.base_lr) for cell in reaching.cells] == [(16, 0.01), (64, 0.1)]
    first, second = reaching.cells
    assert first.steps is not None
    assert (first.steps.middle, first.steps.low, first.steps.high) == pytest.approx((820, 800, 840))
    assert second.samples is not None
    assert second.samples.middle == pytest.approx(210 * 64)
    assert second.seconds is not None
    assert second.seconds.middle == pytest.approx(21.0)
    assert [cell.batch for cell in reaching.missed] == [256]
    assert any("reached by 12 of 13 completed runs" in line for line in sentences(found))


def test_a_rate_at_which_most_seeds_never_arrive_is_not_the_best(tmp_path: Path) -> None:
    for seed, steps in enumerate((100, 9000, 9000)):
        write_run(tmp_path / f"wild-{seed}", curve=falling(steps), lr=1.0, seed=seed)
        write_run(tmp_path / f"calm-{seed}", curve=falling(500), lr=0.01, seed=seed)
    found = analyse(load_runs(tmp_path), target="val/loss<=1.0")
    assert found.reaching["all runs"].cells[0].base_lr == 0.01


def test_means_bands_and_the_best_rate(tmp_path: Path) -> None:
    for lr, finals in {0.01: (0.80, 0.84, 0.88), 0.1: (0.90, None, 0.92), 1.0: (None, None, 0.99)}.items():
        for seed, final in enumerate(finals):
            write_run(tmp_path / f"run-{lr}-{seed}", lr=lr, seed=seed, final=final)
    found = analyse(load_runs(tmp_path))
    (best,) = found.best["all runs"]
    assert best.base_lr == 0.1, "two of three diverge at 1.0: the one that does not is luck"
    assert best.final is not None
    assert (best.final.middle, best.final.low, best.final.high, best.final.count) == pytest.approx(
        (0.91, 0.90, 0.92, 2)
    )
    assert len(found.diverged) == 3
    assert any("3 runs diverged, not shown (3 completed by test/accuracy" in line for line in sentences(found))


def test_how_far_a_rule_holds_is_said_for_each(tmp_path: Path) -> None:
    finals = {"none": (0.95, 0.945, 0.90, 0.946), "linear": (0.93, 0.95, 0.941, 0.80)}
    for rule, values in finals.items():
        for batch, final in zip((64, 128, 256, 512), values, strict=True):
            write_run(tmp_path / f"{rule}-{batch}", rule=rule, batch=batch, final=final)
    found = analyse(load_runs(tmp_path))
    assert found.holds_to("rule=none") == 128, "what falls and comes back has not held"
    assert found.holds_to("rule=linear") == 256
    said = next(line for line in sentences(found) if "holds" in line)
    assert "up to batch 256 for rule=linear; up to batch 128 for rule=none." in said
    head, first, _ = by_setting(found)
    assert dict(zip(head, first, strict=True))["then"] in ("0.9 at 256", "0.8 at 512")


def test_a_batch_that_diverges_ends_what_holds(tmp_path: Path) -> None:
    for batch, final in {64: 0.9, 128: None, 256: 0.9}.items():
        write_run(tmp_path / str(batch), batch=batch, final=final)
    found = analyse(load_runs(tmp_path))
    assert found.holds_to("all runs") == 64
    assert any("at batch 128 every run diverged" in line for line in sentences(found))


# ---- what varies ---------------------------------------------------------------------------------------------------


def test_runs_are_called_for_what_varies(tmp_path: Path) -> None:
    for at, (rule, batch, seed) in enumerate([("none", 64, 0), ("linear", 128, 1), ("linear", 64, 0)]):
        write_run(tmp_path / str(at), rule=rule, batch=batch, seed=seed)
    runs = load_runs(tmp_path)
    assert runs.varying == ["batch.global_size", "lr_scaling.rule"], "the choice, by the key that says it"
    assert runs[1].label == "batch=128, rule=linear, seed=1"
    assert [run.series for run in runs] == ["rule=none", "rule=linear", "rule=linear"]
    assert "model=mlp" in runs.shared


def test_a_default_is_what_it_resolves_to_typed_or_not(tmp_path: Path) -> None:
    optimizers: dict[str, dict[str, Any]] = {
        "AdamW": {"betas": [0.9, 0.99], "lr": 0.01},
        "SGD": {"momentum": 0.9, "lr": 0.01},
    }
    for at, (typed, name) in enumerate([("", "AdamW"), ("optimizer=adamw", "AdamW"), ("optimizer=sgd", "SGD")]):
        folder = write_run(tmp_path / str(at), seed=at)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["optimizer"] = {"_target_": f"torch.optim.{name}", **optimizers[name]}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "overrides.yaml").write_text(yaml.safe_dump([typed] if typed else []))
    runs = load_runs(tmp_path)
    assert [run.series for run in runs] == ["optimizer=AdamW", "optimizer=AdamW", "optimizer=SGD"]
    assert "They differ in optimizer (AdamW, SGD); seed (3 values)." in sentences(analyse(runs))
    assert len(analyse(runs).cells) == 2, "the seeds of a default pool"


def test_what_goes_with_the_batch_makes_no_line_of_its_own(tmp_path: Path) -> None:
    for batch in (64, 128):
        for seed in (0, 1):
            folder = write_run(tmp_path / f"{batch}-{seed}", batch=batch, seed=seed)
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["trainer"] = {"max_steps": 6400 // batch}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
    runs = load_runs(tmp_path)
    assert {run.series for run in runs} == {"all runs"}
    assert "trainer.max_steps" in runs.varying


def test_however_much_varies_the_page_stays_small_and_settings_apart(tmp_path: Path) -> None:
    for at in range(3):
        write_run(tmp_path / str(at), **{f"key{number}": number + at for number in range(400)})
    runs = load_runs(tmp_path)
    for at, decay in enumerate((0.100001, 0.100002, 0.100001)):
        write_run(tmp_path / "close" / str(at), decay=decay, seed=at)
    close = [run.series for run in load_runs(tmp_path / "close")]
    assert close == ["decay=0.1", "decay=0.1 (setting 2)", "decay=0.1"]
    assert len(runs.varying) == 400
    assert len({run.series for run in runs}) == 3
    assert all(len(run.label) < 300 for run in runs)
    assert report(tmp_path, "--to", str(tmp_path / "page")).count("<th") < 60


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_sweep_names_runs_that_lie_elsewhere_and_may_have_moved(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "digits" / "run-0")
    elsewhere = write_run(tmp_path / "far" / "run-1", status=None)
    rows = [
        {"run_folder": "/gone/outputs/digits/run-0", "status": "completed"},
        {"run_folder": str(elsewhere), "status": "failed"},
        {"run_folder": "/gone/outputs/digits/run-2", "status": "completed"},
        {"run_folder": "/gone/outputs/digits/run-3", "status": "skipped"},
        {"run_folder": "", "status": "skipped", "number": 5, "overrides": ["seed=5"]},
    ]
    sweep = tmp_path / "outputs" / "sweeps" / "one"
    sweep.mkdir(parents=True)
    (sweep / "jobs.json").write_text(json.dumps(rows))
    for content in (rows, {"format": 1, "jobs": rows}, {"jobs": {str(at): row for at, row in enumerate(rows)}}):
        (sweep / "jobs.json").write_text(json.dumps(content))
        runs = load_runs(sweep)
        assert [(run.name, run.status) for run in runs] == [("run-0", "completed"), ("run-1", "failed")]
        assert [reason.partition(",")[0] for _, reason in runs.skipped] == [
            "a job that never started (seed=5)",
            "its folder is not there",
            "a job that never started",
        ]
    assert len(load_runs(tmp_path)) == 2, "named twice is read once"


def test_what_is_broken_or_foreign_is_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good")
    for name in ("torn", "tags", "bomb", "cycle", "huge", "eval", "nothing"):
        write_run(tmp_path / name)
    (tmp_path / "torn" / "config.yaml").write_text("a: [1,")
    (tmp_path / "tags" / "config.yaml").write_text("a: !!python/object/apply:os.system ['touch /tmp/never']\n")
    levels = "".join(f"l{at}: &l{at} [{', '.join([f'*l{at - 1}'] * 9)}]\n" for at in range(1, 9))
    (tmp_path / "bomb" / "config.yaml").write_text(f"l0: &l0 [x]\n{levels}derived: {{batch_global_size: 1}}\n")
    (tmp_path / "cycle" / "config.yaml").write_text("a: &a [*a]\nderived: {batch_global_size: 1}\n")
    with (tmp_path / "huge" / "metrics.jsonl").open("wb") as file:
        file.truncate(2**30)
    (tmp_path / "eval" / "provenance.json").write_text('{"action": "eval"}')
    (tmp_path / "nothing" / "config.yaml").write_text("{}")
    (tmp_path / "foreign" / ".hydra").mkdir(parents=True)
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").write_text("")
    page = report(tmp_path)
    said = capsys.readouterr().out
    expected = {
        "torn": "no plain YAML",
        "tags": "no plain YAML",
        "bomb": "more than 20,000 values",
        "cycle": "or itself",
        "huge": "more than 256 MiB",
        "eval": "trains nothing",
        "nothing": "not a run of shardwise",
        "foreign": "another Hydra program",
        "early": "no config.yaml",
    }
    assert "1 run: 1 completed. 9 others skipped" in said
    for name, reason in expected.items():
        assert re.search(rf"skipped \S*/{name}: .*{reason}", said), (name, said)
        assert f"/{name}</code>" in page


def test_damaged_lines_of_metrics_cost_no_more_than_themselves(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", curve={1: 2.0, 2: 1.0})
    odd = ['{"step": "x"}', "[]", "{", '{"step": 3, "val/loss": "low"}', '{"step": 3, "val/loss": true}']
    odd += ['{"step": Infinity}', '{"step": 3, "time": 1' + "0" * 400 + "}", "[" * 100_000, '{"step":' * 100_000]
    odd += [
        '{"step": 4, "time": 1001, "val/loss": null, "nonfinite": ["val/loss"]}',
        '{"step": 5, "val/loss": 1' + "0" * 400 + "}",
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(odd) + "\n" + '{"step": 6, "time": 1001, "val/loss": 0.5}\n{"step": 7, "val/lo')
    curve = load_runs(tmp_path)[0].metrics["val/loss"]
    assert curve.steps.tolist() == [1, 2, 4, 5, 6]
    assert np.isnan(curve.values).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (bytes(range(128, 256)) * 4, "no line that can be read, though it claims 10 steps"),
        (b"[1,2]", "no line that can be read"),
        (b'{"step": 1, "val/loss": 1.0}\n' * 3 + b"[1,2]\n" * 6, "6 of 9 lines of its metrics.jsonl cannot be read"),
    ],
)
def test_a_run_whose_metrics_are_damaged_is_named_and_counted(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", final=0.5)
    (write_run(tmp_path / "bad", final=0.9) / "metrics.jsonl").write_bytes(content)
    page = report(tmp_path)
    said = capsys.readouterr().out
    assert "2 runs: 1 completed, 1 damaged." in said
    assert re.search(rf"damaged \S*/bad: .*{re.escape(why)}", said)
    assert "The highest test/accuracy is 0.5" in said
    assert why in page


@pytest.mark.parametrize("recorded", ["by its rank", "by its sweep"])
def test_a_run_that_failed_says_why_and_where_its_log_is(recorded: str, tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    folder = write_run(tmp_path / "bad", status="failed")
    why = "Traceback (most recent call last):\n  boom()\nValueError: <b>too</b> much\n"
    (folder / "ranks").mkdir()
    if recorded == "by its rank":
        for rank, time in ((0, 2.0), (3, 1.0)):
            record = {"rank": rank, "time": time, "lost_peer": False, "config_error": False, "message": "too much"}
            text = json.dumps({**record, "traceback": why if rank else "later"})
            (folder / "ranks" / f"failure_{rank}.json").write_text(text)
            (folder / "ranks" / f"rank_{rank}.log").write_text("")
        log = folder / "ranks" / "rank_3.log"
    else:
        log = folder / "ranks" / "rank_0.log"
        log.write_text("")
        rows = [{"run_folder": str(folder), "status": "failed", "message": f"{why.strip()}; its log: {log}"}]
        (tmp_path / "jobs.json").write_text(json.dumps(rows))
    run = load_runs(tmp_path)[0]
    assert (run.reason, run.log) == ("ValueError: <b>too</b> much", str(log))
    page = report(tmp_path)
    assert "ValueError: &lt;b&gt;too&lt;/b&gt; much" in page
    assert f"log: <code>{log}</code>" in page


def test_runs_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["run-1", "run-2", "run-10", "run-11b", "run-100"]
    for seed, name in enumerate(reversed(names)):
        write_run(tmp_path / name, seed=seed)
    assert [run.name for run in load_runs(tmp_path)] == names
    text = report(tmp_path)
    assert re.findall(r'<tr[^>]*><td data-v="([^"]*)"', text) == names


def test_a_report_needs_neither_torch_nor_lightning() -> None:
    code = "import sys, shardwise.report.page; print({'torch', 'pytorch_lightning'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "set()\n", "they take seconds to import, and most of the memory"


def test_runs_that_have_not_ended_well_are_marked_and_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", final=0.5)
    write_run(tmp_path / "b", final=0.9, status="failed", seed=1)
    write_run(tmp_path / "c", status=None, curve={1: 2.0, 2: 1.0}, seed=2)
    runs = load_runs(tmp_path)
    assert [run.status for run in runs] == ["completed", "failed", "unfinished"]
    found = analyse(runs)
    assert found.best_run is runs[0]
    page = report(tmp_path)
    assert 'class="failed"' in page
    assert 'class="unfinished"' in page
    for name in ("a",):
        (tmp_path / name / "result.json").unlink()
    (tmp_path / "b" / "result.json").unlink()
    assert "No run has completed" in str(Page(report(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty: no run in it; name a folder"),
        (["runs/a/config.yaml"], "is a file; a folder of runs is needed"),
        (["runs", "--metric", "test/acuracy"], "no run has it; did you mean 'test/accuracy'? (there are "),
        (["runs", "--metric", "strange"], "type --mode max or --mode min"),
        (["runs", "--target", "val/loss"], "--target val/loss: a metric and a value are needed"),
        (["runs", "--target", "val/los<=1"], "no run has logged it; did you mean 'val/loss'?"),
        (["runs", "--mode", "most"], "invalid choice: 'most'"),
        (["runs", "--to", "runs/a/config.yaml"], "choose another with --to"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    folder = write_run(tmp_path / "runs" / "a", curve={1: 2.0, 2: 1.0})
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["strange"] = 1.0
    (folder / "result.json").write_text(json.dumps(result))
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_is_complete_in_itself_and_says_what_each_plot_shows(tmp_path: Path) -> None:
    for batch, steps in {16: 800, 32: 400, 64: 230, 128: 160, 256: 155}.items():
        for lr in (0.01, 0.1):
            for rule in ("none", "linear"):
                name = f"{batch}-{lr}-{rule}"
                write_run(tmp_path / name, batch=batch, lr=lr, rule=rule, curve=falling(steps * (1 + lr)), noise=100.0)
    text = report(tmp_path, "--target", "val/loss<=1")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "srcset", "href", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:image/png;base64,"), (tag, name)
    assert not re.search(r"url\(|@import|https?://", text)
    figures = text.split("<figure")[1:]
    assert len(figures) >= 7
    for figure in figures:
        assert re.search(r"<h3 title=[^>]*>\S", figure)
        assert re.search(r"<figcaption>[^<]{60,}", figure)
        assert "prefers-color-scheme: dark" in figure
    pngs = sorted(path.name for path in (tmp_path / "report" / "plots").iterdir())
    expected = ["loss_over_samples", "loss_over_steps", "metric_against_batch", "metric_against_lr_1"]
    expected += ["metric_against_lr_2", "samples_to_target", "steps_to_target", "time_to_target"]
    assert pngs == [f"{name}.png" for name in expected]
    said = str(page)
    assert "critical batch size at about 100 samples (median; range 100 to 100, 20 runs" in said
    caption, rules = re.findall(r"<figcaption>([^<]*)<details><summary>How it is measured</summary>([^<]*)<", text)[0]
    assert caption.count(". ") < 4, "a few sentences in plain sight"
    assert "twice the batch, half the steps" in caption
    assert "1.2 times the steps of the dotted line" in rules
    assert "straight line between the logged points" in rules


def test_axes_have_names_with_units(tmp_path: Path) -> None:
    for batch, steps in {16: 800, 32: 400, 64: 230}.items():
        for lr in (0.01, 0.1):
            write_run(tmp_path / f"{batch}-{lr}", batch=batch, lr=lr, curve=falling(steps))
    from shardwise.report.figure import LIGHT, drawing

    plots, lacking = make_plots(analyse(load_runs(tmp_path), target="val/loss<=1"))
    assert lacking == []
    labels = {}
    with drawing(LIGHT):
        for plot in plots:
            axes = plot.draw(LIGHT).axes[0]
            labels[plot.name] = (axes.get_xlabel(), axes.get_ylabel())
    batch = "global batch size (samples)"
    assert labels["loss_over_steps"] == ("optimizer steps", "val/loss")
    assert labels["loss_over_samples"] == ("training samples seen", "val/loss")
    assert labels["metric_against_batch"] == (batch, "test/accuracy")
    assert labels["steps_to_target"] == (batch, "optimizer steps to the target")
    assert labels["time_to_target"] == (batch, "seconds to the target")
    assert labels["metric_against_lr"] == ("learning rate at its peak", "test/accuracy")


@pytest.mark.parametrize("best", [0.99, 1.0])
def test_one_collapsed_setting_leaves_the_others_apart(best: float, tmp_path: Path) -> None:
    finals = {16: best, 32: 0.98, 64: 0.95, 128: 0.9, 256: 0.05}
    for batch, final in finals.items():
        for lr in (0.01, 0.1):
            name = f"{batch}-{lr}"
            folder = write_run(tmp_path / name, batch=batch, lr=lr, final=final)
            lines = [{"step": step, "time": step, "val/accuracy": final * step / 4} for step in (1, 2, 3, 4)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from shardwise.report.figure import LIGHT, drawing

    plots = {plot.name: plot for plot in make_plots(analyse(load_runs(tmp_path)))[0]}
    assert {"metric_against_batch", "metric_against_lr", "metric_over_steps"} <= set(plots)
    for name in ("metric_against_batch", "metric_against_lr", "metric_over_steps"):
        assert "logarithmic in the error, 1 - " in plots[name].caption
        assert ("A value of 1, no error, lies at the top" in plots[name].caption) == (best == 1.0)
        with drawing(LIGHT):
            figure = plots[name].draw(LIGHT)
            axes = figure.axes[0]
            figure.draw_without_rendering()
        heights = [axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1] for y in finals.values()]
        assert 0 < heights[-1] < heights[0] < 1, "nothing is cut off"
        gaps = -np.diff(heights)
        assert gaps.min() > 0.1, (name, heights)
        back = [axes.transData.inverted().transform(axes.transData.transform((1, y)))[1] for y in finals.values()]
        assert back == pytest.approx(list(finals.values()))
        ticks = [tick.get_text() for tick in axes.get_yticklabels()]
        assert {"0.5", "0.9", "0.98"} <= set(ticks)
        assert ("1" in ticks) == (best == 1.0)
        assert axes.get_ylabel().endswith("accuracy (log scale of the error)")


def test_runs_that_diverge_flatten_no_others_and_are_counted(tmp_path: Path) -> None:
    for at in range(8):
        wild = {2: 1e13, 3: math.nan}.get(at)
        curve = {step: 2.0 / step if wild is None or step < 3 else wild for step in range(1, 6)}
        folder = write_run(tmp_path / str(at), curve=curve, batch=64 * 2 ** (at // 2), lr=0.01 * (1 + at % 2))
        result = json.loads((folder / "result.json").read_text())
        result["metrics"] = {"val/loss": None if wild and math.isnan(wild) else curve[5]}
        (folder / "result.json").write_text(json.dumps(result))
    from shardwise.report.figure import LIGHT, drawing

    found = analyse(load_runs(tmp_path))
    (said,) = (line for line in sentences(found) if "diverged, not shown" in line)
    assert said.startswith(
        "2 runs diverged, not shown (2 by val/loss; 2 completed by val/loss, left out of means): 2, 3"
    )
    plots = {plot.name: plot for plot in make_plots(found)[0]}
    for name in ("loss_over_steps", "metric_against_batch", "metric_against_lr"):
        assert "2 runs diverged, not shown." in plots[name].caption
        with drawing(LIGHT):
            assert plots[name].draw(LIGHT).axes[0].get_ylim()[1] < 10


def test_a_tick_is_a_number_that_fits() -> None:
    from shardwise.report.figure import count

    shown = [count(value) for value in (0, 1e-5, 0.01, 250, 2500, 20_000, 3e6, 2e9, 1e13, 1e15, 2.5e30)]
    assert shown == ["0", "1e-5", "0.01", "250", "2,500", "20k", "3M", "2G", "1e13", "1e15", "2.5e30"]


def test_a_legend_names_what_differs() -> None:
    long = "a very long name that all of them have in common, with a comma"
    series = [f"data={long}, depth={depth}, width=8" for depth in range(8)]
    assert telling(series, width=40) == [f"depth={depth}" for depth in range(8)]
    middles = [f"folder={'x' * 50}{at}{'y' * 50}" for at in range(8)]
    assert len(set(telling(middles, width=40))) == 8
    assert max(map(len, telling(middles, width=40))) <= 40


def test_long_values_are_called_for_what_tells_them_apart(tmp_path: Path) -> None:
    for at in range(2):
        write_run(tmp_path / str(at), note=f"{'x' * 50}{'AB'[at]}{'y' * 50}")
    assert [run.series for run in load_runs(tmp_path)] == ["note=…xxxxxxAyyyyyy…", "note=…xxxxxxByyyyyy…"]


def test_noise_scales_of_few_measurements_are_not_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    lines = [{"step": at, "noise_scale/critical_batch_size": 10.0 * 2**at} for at in range(5)]
    for count, expected in ((4, None), (5, "about 40 samples (median; range 10 to 160, 1 run with at least 5 meas")):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:count]))
        said = [line for line in sentences(analyse(load_runs(tmp_path))) if "critical batch size" in line]
        assert len(said) == (expected is not None)
        assert expected is None or expected in said[0]


def test_the_table_begins_with_what_came_out(tmp_path: Path) -> None:
    for at in range(3):
        write_run(tmp_path / str(at), **{f"key{number}": number + at for number in range(20)})
    heads, rows = table(analyse(load_runs(tmp_path)))
    assert heads[:3] == ["run", "status", "test/accuracy"]
    assert sum(head.startswith("key") for head in heads) == 8
    assert [shown for shown, _ in rows[0]["cells"][:3]] == ["0", "completed", "0.9"]


def test_accuracies_close_together_stand_on_an_even_axis(tmp_path: Path) -> None:
    for batch, final in {16: 0.97, 32: 0.95, 64: 0.93}.items():
        write_run(tmp_path / str(batch), batch=batch, final=final)
    (plot,) = (plot for plot in make_plots(analyse(load_runs(tmp_path)))[0] if plot.name == "metric_against_batch")
    assert "logarithmic" not in plot.caption


def test_settings_in_a_list_keep_their_parts_together(tmp_path: Path) -> None:
    for rule, finals in {"none": (0.9, 0.5), "linear": (0.9, 0.895)}.items():
        for width, batch, final in ((w, b, f) for w in (8, 16) for b, f in zip((64, 128), finals, strict=True)):
            write_run(
                tmp_path / f"{rule}-{width}-{batch}", rule=rule, batch=batch, final=final, note=width, depth=width
            )
    said = next(line for line in sentences(analyse(load_runs(tmp_path))) if "holds" in line)
    first, second = ("rule=linear with note=8 and depth=8", "rule=linear with note=16 and depth=16")
    assert first in said.replace("depth=8 and note=8", "note=8 and depth=8"), said
    assert second in said.replace("depth=16 and note=16", "note=16 and depth=16"), said


def test_nothing_of_a_strangers_run_runs_or_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    for at, name in enumerate(("a", "b")):
        folder = write_run(
            tmp_path / f"<b>{name}", note=f'{evil}"{at}$\\frac{{$ \x1b[2J', curve={1: 2.0, 2: 1.0}, batch=64 * (at + 1)
        )
        result = json.loads((folder / "result.json").read_text())
        result["metrics"][evil] = 1.0
        result["status"] = evil
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "overrides.yaml").write_text(yaml.safe_dump([f"model.note=={evil}", "=cmd|' /C calc'!A0"]))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "time": 1, f"val/{evil}": 1.0, "val/loss": 1}) + "\n")
    text = report(tmp_path)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(
        attributes["src"].startswith("data:") for tag, attributes in page.tags if tag == "img" and attributes["src"]
    )
    assert "script-src 'sha256-" in text
    assert "\x1b" not in text + capsys.readouterr().out + (tmp_path / "report" / "runs.csv").read_text()
    rows = list(csv.reader((tmp_path / "report" / "runs.csv").read_text().splitlines()))
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row)


def test_the_table_has_every_run_with_its_numbers_and_its_command(tmp_path: Path) -> None:
    write_run(tmp_path / "a run", batch=64, final=0.9, curve=falling(500))
    write_run(tmp_path / "b", batch=128, final=None, seed=3)
    text = str(Page(report(tmp_path, "--target", "val/loss<=1")))
    assert "NaN" in text
    rows = list(csv.DictReader((tmp_path / "report" / "runs.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["a run", "b"]
    first, second = rows
    wanted = {"status": "completed", "batch_global_size": "64", "base_lr": "0.01", "effective_lr": "0.01", "seed": "0"}
    wanted |= {"batch.global_size": "64", "test/accuracy": "0.9", "samples_to_target": "32000.0"}
    assert {key: first[key] for key in wanted} == wanted
    assert float(first["steps_to_target"]) == pytest.approx(500)
    assert first["command"] == "python train.py rerun='a run'", "relative to where it was typed"
    assert second["test/accuracy"] == "NaN"
    assert second["steps_to_target"] == ""


@pytest.mark.parametrize("runs", [1, 500])
def test_one_run_and_five_hundred_are_both_readable(runs: int, tmp_path: Path) -> None:
    for at in range(runs):
        batch, lr, rule, note = 2 ** (4 + at % 5), 0.01 * (1 + at % 3), ("none", "linear")[at % 2], at % 25
        curve = {1: 2.0, 5: 1.5, 10: 1.0 + at / 1000}
        write_run(tmp_path / f"run-{at:03d}", batch=batch, lr=lr, rule=rule, note=note, curve=curve)
    found = analyse(load_runs(tmp_path))
    plots, lacking = make_plots(found)
    assert {plot.name for plot in plots} >= {"loss_over_steps", "loss_over_samples"}
    from shardwise.report.figure import LIGHT, MAX_SHADES, drawing

    with drawing(LIGHT):
        for plot in plots:
            figure = plot.draw(LIGHT)
            assert sum(len(legend.get_texts()) for legend in figure.legends) <= MAX_SHADES + 2
    assert len(sentences(found)) < 12
    if runs == 1:
        assert any("at least two batch sizes" in line for line in lacking)
    else:
        assert any("200 of the 500 runs are drawn" in plot.caption for plot in plots)


@pytest.mark.slow
def test_a_real_sweep_becomes_a_report(train_py, tmp_path: Path) -> None:
    small = ["model=mlp", "model.width=8", "trainer.max_epochs=3", "logger=none", "trainer.log_every_n_steps=5"]
    run = train_py("-m", *small, "batch.global_size=64,256", "optimizer.lr=1e-2,3e-2")
    command = [sys.executable, "-m", "shardwise", "report"]
    (sweep,) = (run.output_root / "sweeps").iterdir()
    reported = subprocess.run([*command, str(sweep)], capture_output=True, text=True, timeout=120, check=False)
    assert reported.returncode == 0, reported.stderr
    said = reported.stdout
    assert "4 runs: 4 completed." in said
    assert "They differ in batch (64, 256); lr (0.01, 0.03)." in said
    rows = list(csv.DictReader((sweep / "report" / "runs.csv").read_text().splitlines()))
    best = max(float(row["test/accuracy"]) for row in rows)
    assert f"The highest test/accuracy is {best:.4g}:" in said
    page = str(Page((sweep / "report" / "report.html").read_text()))
    assert "Final test/accuracy against the batch size" in page
    assert "Final test/accuracy against the learning rate" in page
    again = rows[0]["command"].split()
    assert again[:2] == ["python", "train.py"]
    repeated = train_py(*again[2:])
    metrics = repeated.result["metrics"]
    assert metrics["test/accuracy"] == pytest.approx(float(rows[0]["test/accuracy"]))


def test_an_api_for_notebooks_says_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "a", curve=falling(100), batch=64)
    runs = load_runs(tmp_path)
    run = runs[0]
    assert run.metrics["val/loss"].values[:2].tolist() == pytest.approx([2.0, 1.99])
    assert run.metrics["val/loss"].samples[1] == 64
    assert run.config["batch"]["global_size"] == run.batch == 64
    assert run.result["metrics"]["test/accuracy"] == run.final("test/accuracy") == 0.9
    assert run.final("nothing") is None
    with pytest.raises(ConfigError, match="no run has it"):
        analyse(runs, metric="nothing")
