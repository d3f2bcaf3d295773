"""The page of one run: which rank is slow and by what stands at its top, and whatever is missing is said."""

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock

from shardwise.show.command import main
from shardwise.show.findings import PHASES as PHASES_DRAWN
from shardwise.show.findings import own_time
from shardwise.show.ranks import MAX_COLUMNS, read_ranks

PHASES = {"data": 1e-3, "forward": 9e-3, "backward": 17e-3, "optimizer": 3e-3, "other": 1e-3, "logging": 2e-4}
"""Seconds a step of a rank like any other."""


def write_run(
    folder: Path,
    *,
    shape: tuple[int, int, int] = (1, 2, 2),
    steps: int = 200,
    every: int = 10,
    slow: dict[int, dict[str, float]] | None = None,
    window: tuple[int, int] = (0, 10**9),
    status: str | None = "completed",
    noise: float = 0.03,
    hosts: int = 1,
    telemetry: bool = True,
    note: str = "plain",
) -> Path:
    """A run folder as a training of ``shape`` (dp_replicate, dp_shard, tp) leaves it.

    Args:
        slow: rank -> phase -> seconds more a step, inside of the ``window`` of steps.
    """
    (folder / "ranks").mkdir(parents=True)
    replicas, shards, tp = shape
    world = replicas * shards * tp
    draw = np.random.default_rng(0)
    derived = {"world_size": world, "dp_replicate": replicas, "dp_shard": shards, "tp": tp, "batch_global_size": 64}
    config = {"seed": 0, "model": {"_target_": "shardwise.models.mlp.MLP", "note": note}, "derived": derived}
    config["monitor"] = {"straggler_factor": 1.5, "straggler_steps": 10}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "overrides.yaml").write_text(
        yaml.safe_dump(["strategy=fsdp+tp", "trainer.devices=4", f"model.note={note}"])
    )
    places = [
        {
            "rank": rank,
            "node": rank * hosts // world,
            "local_rank": rank % max(1, world // hosts),
            "dp": rank // tp,
            "tp": rank % tp,
            "host": f"node-{'abcdefghijklmnopqrstuvwxyz'[rank * hosts // world % 26]}",
        }
        for rank in range(world)
    ]
    provenance = {
        "command": ["python", "train.py", "strategy=fsdp+tp", f"model.note={note}"],
        "start_time": "2026-01-01T00:00:00+00:00",
        "git": {"commit": "0123abcd", "dirty": True, "diff": f"+ {note}", "untracked": []},
        "versions": {"python": "3.11.9", "torch": "2.14.1"},
        "hosts": sorted({place["host"] for place in places}),
        "ranks": places,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance))
    logged = np.arange(every, steps + 1, every)
    times = np.zeros((world, len(logged), len(PHASES)))
    for at, seconds in enumerate(PHASES.values()):
        times[:, :, at] = seconds * (1 + noise * np.abs(draw.normal(size=(world, len(logged)))))
    inside = (logged > window[0]) & (logged <= window[1])
    for rank, phases in (slow or {}).items():
        for phase, seconds in phases.items():
            times[rank, inside, list(PHASES).index(phase)] += seconds
    whole = times.sum(-1).max(0) + 2e-3
    for rank in range(world):
        lines = []
        for column, step in enumerate(logged):
            line = {"step": int(step), "time": 1e9 + step / 10, "time/step": float(whole[column])}
            line |= {f"time/{phase}": float(times[rank, column, at]) for at, phase in enumerate(PHASES)}
            line["time/communication"] = float(whole[column] - times[rank, column].sum())
            line |= {"memory/resident": 5e8 + 1e6 * rank + 1e4 * float(step), "memory/peak": 6e8 + 1e6 * rank}
            line |= {"rank/loss": 2 / (1 + step / 50) + 0.1 * float(draw.normal()), "rank/grad_norm": 1.0}
            lines.append(json.dumps(line) + "\n")
        if telemetry:
            (folder / "ranks" / f"rank_{rank}.jsonl").write_text("".join(lines))
        (folder / "ranks" / f"rank_{rank}.log").write_text("started\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in map(int, logged):
            line = {"step": step, "time": 1e9 + step / 10, "train/loss": 2 / (1 + step / 50), "lr": 0.1 * step / steps}
            line |= {"grad_norm": 1 + 5 / step, "samples": step * 64, "samples_per_second": 1500 + step % 7}
            line |= {"time/data": 1e-3, "time/data/max": 3e-3, "time/data/max_rank": 2}
            file.write(json.dumps(line) + "\n")
            if step % (5 * every) == 0:
                file.write(
                    json.dumps({"step": step, "time": 1e9, "val/loss": 2.1 / (1 + step / 50), "val/accuracy": 0.9})
                    + "\n"
                )
    if status is not None:
        metrics = {"train/loss": 0.4, "val/loss": 0.42, "test/accuracy": 0.9536, "test/loss": 0.2}
        result = {"status": status, "run_id": "r", "steps": steps, "seconds": 35.2, "metrics": metrics}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def show(folder: Path, *arguments: str) -> str:
    assert main([str(folder), *arguments]) == 0
    to = Path(arguments[arguments.index("--to") + 1]) if "--to" in arguments else folder
    return (to / "show.html").read_text()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page without its pictures, which take seconds."""
    monkeypatch.setattr("shardwise.show.page.in_both_themes", lambda draw: (b"", b""))


def headline(text: str) -> str:
    """What stands in large letters at the top."""
    return html.unescape(" ".join(re.findall(r'<p class="found[^"]*">([^<]*)</p>', text)))


# ---- which rank is slow --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({2: {"data": 0.030}}, r"Rank 2 \(node-b\) is the slowest: 1\.9 x .* by data: 31 ms a step against 1\.0 ms\."),
        (
            {1: {"backward": 0.040}},
            r"Rank 1 \(node-a\) is the slowest: 2\.\d x .* compute \(mostly backward\): 70 ms .* 30 ms\.",
        ),
        (
            {0: {"other": 0.020}},
            r"Rank 0 \(node-a\) is the slowest: 1\.6 x .* by other: 21 ms a step against 1\.0 ms\.",
        ),
        ({}, r"No rank stands out: .* 1\.0\d x the median of the others, 32 ms a step against 32 ms\."),
    ],
)
def test_the_page_begins_with_the_slow_rank_and_what_slows_it(
    slow: dict[int, dict[str, float]], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(write_run(tmp_path / "run", slow=slow, hosts=2))
    assert re.fullmatch(said, headline(text)), headline(text)
    assert headline(text) in capsys.readouterr().out, "and so does the console"
    assert re.findall(r'class="box slow" title="rank (\d+)', text) == [str(rank) for rank in slow]
    assert re.findall(r'<tr class="slow"><td data-v="(\d+)"', text) == [str(rank) for rank in slow]


@pytest.mark.usefixtures("undrawn")
def test_a_rank_whose_links_are_slow_is_named_as_the_run_found_it(tmp_path: Path) -> None:
    """Waiting is equal on all ranks, so their times cannot tell."""
    folder = write_run(tmp_path / "run")
    text = "rank 1 (<b>node) is slow in communication: its messages of 256 KiB take 21 ms, the median rank's 0.2 ms"
    said = [{"step": 10, "time": 1.0, "kind": "memory", "text": "rank 0 grows"}]
    said.append({"step": 20, "time": 2.0, "kind": "communication", "text": text})
    lines = [*map(json.dumps, said), "[]", '{"step": "x"}', '{"step": 30, "ki']
    (folder / "ranks" / "findings.jsonl").write_text("\n".join(lines))
    page = show(folder)
    assert headline(page) == text.replace("rank 1", "Rank 1") + "."
    assert "<b>node" not in page
    assert "step 10: rank 0 grows" in page
    assert 'class="box slow"' not in page


@pytest.mark.usefixtures("undrawn")
def test_of_two_ranks_one_is_compared_with_the_other(tmp_path: Path) -> None:
    text = show(write_run(tmp_path / "run", shape=(1, 2, 1), slow={1: {"forward": 0.03}}))
    assert headline(text).startswith(
        "Rank 1 (node-a) is the slowest: 1.9 x the median of the others, by compute (mostly forward)"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_rank_that_was_slow_for_a_while_is_named_with_the_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", slow={3: {"data": 0.05}}, window=(100, 150), steps=1000)
    assert headline(show(folder)).startswith("Rank 3 (node-a) was slow from step 101 to 150: 2.6 x")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["monitor"]["straggler_steps"] = 60
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert headline(show(folder)).startswith("No rank stands out")


@pytest.mark.usefixtures("undrawn")
def test_of_two_that_were_slow_for_a_while_the_slower_one_comes_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", slow={1: {"data": 0.03}, 3: {"data": 0.3}}, window=(100, 150), steps=1000)
    text = show(folder)
    assert headline(text).startswith("Rank 3 (node-a) was slow from step 101 to 150")
    assert "Also slow: rank 1 (node-a) 1.9 x by data from step 101 to 150." in html.unescape(text)


@pytest.mark.usefixtures("undrawn")
def test_a_rank_that_takes_long_over_next_to_nothing_is_not_slow(tmp_path: Path) -> None:
    """Twice the own time of the others, of a step that is communication almost only."""
    folder = write_run(tmp_path / "run")
    for rank in range(4):
        line = {"time/step": 0.1, "time/data": 0.001 * (1 + (rank == 2)), "time/communication": 0.099}
        lines = [json.dumps({"step": step, "time": 1.0, **line}) + "\n" for step in range(10, 100, 10)]
        (folder / "ranks" / f"rank_{rank}.jsonl").write_text("".join(lines))
    text = show(folder)
    assert headline(text).startswith("No rank stands out: rank 2")
    assert "Communication, which is also waiting for slower ranks, takes 99 % of it" in text


@pytest.mark.usefixtures("undrawn")
def test_the_first_logging_step_does_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "ranks" / "rank_1.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), "time/forward": 60.0}) + "\n" + "".join(others))
    assert headline(show(folder)).startswith("No rank stands out")


# ---- the matrices --------------------------------------------------------------------------------------------------


def write_rank(folder: Path, rank: int, values: dict[int, float | None], name: str = "time/data") -> None:
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "time": 1.0, name: value}) + "\n" for step, value in values.items()]
    (folder / "ranks" / f"rank_{rank}.jsonl").write_text("".join(lines))


def test_each_step_of_a_short_run_is_a_column(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, {10: 1.0, 20: 2.0, 30: 3.0})
    write_rank(tmp_path, 10, {10: 4.0, 30: None, 40: 6.0})
    ranks = read_ranks(tmp_path)
    assert ranks is not None
    assert ranks.numbers == [0, 10]
    assert ranks.edges.tolist() == [0, 10, 20, 30, 40]
    np.testing.assert_array_equal(ranks.matrix("time/data"), [[1, 2, 3, np.nan], [4, np.nan, np.nan, 6]])
    np.testing.assert_array_equal(own_time(ranks), ranks.matrix("time/data"))
    assert ranks.means(ranks.matrix("time/data")).tolist() == [2.5, 6.0], "without the first"
    assert ranks.largest["time/data"].tolist() == [3.0, 6.0]


def test_the_columns_of_a_long_run_are_means(tmp_path: Path) -> None:
    steps = 4 * MAX_COLUMNS
    write_rank(tmp_path, 0, {5 * step: float(step) for step in range(1, steps + 1)})
    ranks = read_ranks(tmp_path)
    assert ranks is not None
    assert ranks.matrix("time/data").shape == (1, MAX_COLUMNS)
    assert ranks.matrix("time/data")[0, :2].tolist() == [2.5, 6.5]
    assert ranks.edges[:3].tolist() == [0, 20, 40]
    assert ranks.edges[-1] == 5 * steps


def test_of_very_many_lines_an_even_choice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.show.ranks.MAX_LINES", 1000)
    for rank in range(2):
        write_rank(tmp_path, rank, {step: float(rank) for step in range(1, 5001)})
    ranks = read_ranks(tmp_path)
    assert ranks is not None
    assert 400 <= ranks.counts.sum() <= 500
    assert ranks.edges[-1] > 4900
    assert "line of each has been read" in ranks.notes[0]


# ---- what is missing, damaged or hostile ---------------------------------------------------------------------------


def test_a_run_without_measurements_of_its_ranks_says_so(tmp_path: Path) -> None:
    text = show(write_run(tmp_path / "run", telemetry=False))
    assert "No rank has measured its times" in text
    assert "train/loss" in text
    assert headline(text) == "", "the means of all ranks, in metrics.jsonl, are not those of rank 0"


@pytest.mark.usefixtures("undrawn")
def test_one_rank_is_found_in_the_metrics_of_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", shape=(1, 1, 1))
    path = folder / "ranks" / "rank_0.jsonl"
    (folder / "metrics.jsonl").write_text(path.read_text())
    path.unlink()
    assert re.search(r"A step takes 3\d ms: backward 5\d %", show(folder))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "provenance.json", "metrics.jsonl", "result.json"])
@pytest.mark.parametrize(
    "damage", [None, b"", b"\xff\xfe{[", b"[1, 2]\n", b"- &a [*a]\n", b'{"ranks": [{"rank": {}}]}\n']
)
def test_a_file_that_is_not_there_or_damaged_costs_no_more_than_itself(
    name: str, damage: bytes | None, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", slow={2: {"data": 0.03}})
    (folder / name).unlink() if damage is None else (folder / name).write_bytes(damage)
    text = show(folder)
    assert headline(text).startswith("Rank 2 ")
    if damage is None:
        assert f"There is no {name}" in text


def test_damaged_lines_and_missing_ranks_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", slow={2: {"data": 0.03}})
    with (folder / "ranks" / "rank_2.jsonl").open("a") as file:
        file.write(
            '{"step": 5\n[1]\n{"step": -4, "time/data": 1}\n{"step": "x", "time/data": "y"}\n'
            '{"step": 300, "time/data": 9'
        )
    (folder / "ranks" / "rank_3.jsonl").unlink()
    (folder / "ranks" / "rank_1.jsonl").write_bytes(b"\x00" * 100 + b"\n")
    text = show(folder)
    assert headline(text).startswith("Rank 2 ")
    assert "rank_2.jsonl: 4 damaged lines left out" in text, "and none for the torn one"
    assert "Nothing measured by ranks 1, 3 of 4" in text


@pytest.mark.usefixtures("undrawn")
def test_a_failed_run_says_why_and_one_that_is_going_on_that_it_is(tmp_path: Path) -> None:
    failed = write_run(tmp_path / "failed", status="failed")
    record = {"rank": 1, "time": 5.0, "message": "m", "traceback": "Traceback\nRuntimeError: no <b>luck</b>"}
    (failed / "ranks" / "failure_1.json").write_text(json.dumps(record))
    text = show(failed)
    assert "RuntimeError: no &lt;b&gt;luck" in text
    assert f"log: <code>{failed / 'ranks' / 'rank_1.log'}</code>" in text
    going = write_run(tmp_path / "going", status=None)
    assert "Unfinished (killed, or it runs on another machine) at 200 steps" in show(going)
    with FileLock(going / ".lock"):
        text = show(going)
    assert "Running at 200 steps" in text
    assert "There is no result.json" not in text


def test_nothing_of_a_strangers_run_runs_or_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J{{ 7 * 7 }}$\\frac{$'
    folder = write_run(tmp_path / "<i>run", note=evil, slow={2: {"data": 0.03}})
    provenance = json.loads((folder / "provenance.json").read_text())
    for place in provenance["ranks"]:
        place |= {"host": evil, "node": evil}
    provenance |= {"hosts": [evil], "versions": {evil: evil}, "parent": [evil], "git": {"commit": evil, "diff": evil}}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "result.json").write_text(
        json.dumps({"status": evil, "metrics": {f"test/{evil}": 1, f"val/{evil}": evil}})
    )
    for path in (folder / "metrics.jsonl", folder / "ranks" / "rank_2.jsonl"):
        with path.open("a") as file:
            file.write(json.dumps({"step": 210, "time": 1, f"gpu/{evil}": 1.0, f"val/{evil}": 2.0, evil: 1.0}) + "\n")
    (folder / "javascript:alert(1)<b>").write_text("x")
    text = show(folder)
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed(text)
    assert [tag for tag, _ in tags].count("script") == 1
    assert not {tag for tag, _ in tags} & {"link", "iframe", "object", "embed", "base", "form", "i"}
    for tag, attributes in tags:
        assert all(not name.startswith("on") for name in attributes)
        for name in ("src", "srcset"):
            assert (attributes.get(name) or "data:image/png;base64,").startswith("data:image/png;base64,"), tag
        assert (attributes.get("href") or "#").startswith(("#", "./"))
    assert "script-src 'sha256-" in text
    assert "{{ 7 * 7 }}" in text
    assert "\x1b" not in text + capsys.readouterr().out
    assert not re.search(r"url\(|@import|https?://", text)


@pytest.mark.usefixtures("undrawn")
def test_the_page_is_never_written_through_a_link_of_a_strangers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "precious").write_text("mine")
    (folder / "show.html").symlink_to(tmp_path / "precious")
    show(folder)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["runs/a/config.yaml"], "is a file; name the run folder that it is in"),
        (["empty"], "empty: no run in it"),
        (
            ["runs"],
            "runs holds 2 runs: show one of them, such as runs/b, or all of them with python -m shardwise report",
        ),
        (["sweep"], "sweep holds 2 runs: show one of them"),
        (["runs/a", "--to", "runs/a/config.yaml"], "choose another folder with --to"),
        ([], "the following arguments are required: run"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    runs = [write_run(tmp_path / "runs" / name, telemetry=False) for name in ("a", "b")]
    (tmp_path / "sweep").mkdir()
    rows = [{"number": at, "status": "completed", "run_folder": str(run)} for at, run in enumerate(runs)]
    (tmp_path / "sweep" / "jobs.json").write_text(json.dumps(rows))
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1


# ---- the whole -----------------------------------------------------------------------------------------------------


def test_the_page_has_everything_in_it_for_light_and_dark(tmp_path: Path) -> None:
    text = show(write_run(tmp_path / "run"), "--to", str(tmp_path / "elsewhere"))
    titles = re.findall(r'<h3 title="([^"]*)"', text)
    wanted = ["Own time of each rank", "loss", "accuracy", "lr", "data", "communication", "Time split, by rank"]
    assert [title for title in titles if title in wanted] == wanted
    assert {"resident memory", "Peak memory, by rank", "loss of each rank"} <= set(titles)
    assert "data/max" not in text, "what is of ranks is no curve of the run"
    assert text.count("<picture>") == text.count('media="(prefers-color-scheme: dark)"') == len(titles)
    for part in ("dp_replicate 1 x dp_shard 2 x tp 2", "trainer.devices=4", "0123abcd", "torch 2.14.1", "rerun="):
        assert part in text
    assert not re.search(r'href="\./', text), "the files of the run are not beside it"
    assert [tuple(shard) for shard in shards_of(text)] == [("0", "1"), ("2", "3")]


def shards_of(text: str) -> list[list[str]]:
    """The ranks in each frame of the mesh."""
    mesh = text[text.index('<h2 id="mesh">') : text.index('<h2 id="curves">')]
    return [re.findall(r'title="rank (\d+)', part) for part in mesh.split('class="boxes"')[1:]]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 1), (2, 2, 2), (2, 10, 8)])
def test_any_mesh_can_be_shown(shape: tuple[int, int, int], tmp_path: Path) -> None:
    text = show(write_run(tmp_path / "run", shape=shape, steps=40, hosts=shape[0]))
    found = [rank for shard in shards_of(text) for rank in shard]
    assert found == [str(rank) for rank in range(shape[0] * shape[1] * shape[2])]
    assert len(text) < 3e6


def test_a_page_needs_neither_torch_nor_lightning() -> None:
    modules = "sys, shardwise.show.command, shardwise.show.page"
    code = f"import {modules}; print({{'torch', 'pytorch_lightning'}} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "set()\n"


@pytest.mark.slow
def test_a_real_run_becomes_a_page(train_py, tmp_path: Path) -> None:
    small = ["model=mlp", "model.width=8", "trainer.max_steps=12", "trainer.log_every_n_steps=2", "logger=none"]
    run = train_py(*small, "strategy=fsdp", "trainer.devices=2", "trainer.accelerator=cpu")
    (folder,) = (path.parent for path in run.output_root.glob("*/*/result.json"))
    shown = subprocess.run(
        [sys.executable, "-m", "shardwise", "show", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Completed after 12 steps in ")
    text = (folder / "show.html").read_text()
    titles = re.findall(r'<h3 title="([^"]*)"', text)
    assert {"Own time of each rank", "Time split, by rank", "loss", "lr"} <= set(titles)
    assert "strategy=fsdp" in text
    ranks = read_ranks(folder, world_size=2)
    assert ranks is not None
    assert ranks.numbers == [0, 1]
    assert ranks.edges[-1] == 12
    whole = sum(ranks.means(ranks.matrix(f"time/{phase}")) for phase in PHASES_DRAWN if f"time/{phase}" in ranks.values)
    np.testing.assert_allclose(whole, ranks.means(ranks.matrix("time/step")), rtol=0.05)
