"""A search's trials: where they come from, what is learnt from them, and that none is lost."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkout import ROOT
from shardwise.config import SweepConfig, from_plain
from shardwise.errors import ConfigError
from shardwise.hydra_setup import parse_space
from shardwise.job import Job
from shardwise.search_space import Choice, Interval, corners
from shardwise.sweep.objective import best_of_grid, check_settings, objectives_of, values_of
from shardwise.sweep.source import Outcome, Planned

LR = "optimizer.lr"
SPACE = {LR: Interval(1e-4, 1.0, log=True), "model.width": Choice(("8", "16"))}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("a=1,2", Choice(("1", "2"))),
        ("a=choice(8,16,8)", Choice(("8", "16"))),
        ("+a='x y',z", Choice(("'x y'", "z"))),
        ("a=null,true", Choice(("null", "True"))),
        ("a=shuffle(3,1)", Choice(("3", "1"))),
        ("a=range(1,8,step=2)", Interval(1, 7, whole=True, step=2)),
        ("a=range(8,1,step=-2)", Interval(2, 8, whole=True, step=2)),
        ("a=range(0.1,0.5,step=0.1)", Interval(0.1, 0.4, step=0.1)),
        ("a=range(3,4)", Choice(("3",))),
        ("a=interval(1,10)", Interval(1.0, 10.0)),
        ("a=int(interval(1,10))", Interval(1, 10, whole=True)),
        ("a=tag(log,interval(1e-4,1e-1))", Interval(1e-4, 1e-1, log=True)),
        ("a=tag(log,int(interval(1,64)))", Interval(1, 64, whole=True, log=True)),
    ],
)
def test_hydras_grammar(typed, found):
    fixed, space = parse_space({}, ["b=3", typed], loader=None)
    assert fixed == ["b=3"]
    assert list(space.values()) == [found]


def test_what_is_typed_counts_more_than_the_file():
    params = {"a": "1,2", "b": "interval(0,1)", "c": 5}
    assert parse_space(params, ["b=3", "a=choice(7,8)"], loader=None) == (["c=5", "b=3"], {"a": Choice(("7", "8"))})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("a=interval(3,1)", r"a=interval\(3.0,1.0\): the smaller number comes first"),
        ("a=tag(log,interval(0,1))", r"a logarithmic interval starts above 0"),
        ("a=tag(logg,interval(1,2))", r"a: the only tag here is log"),
        ("a=tag(log,choice(1,2))", r"a: the only tag here is log"),
        ("a=range(5,1)", r"a: there is no value in a=range\(5,1\)"),
        ("a=interval(x,y)", r"a=interval\(x,y\): .*str is incompatible"),
    ],
)
def test_a_space_that_makes_no_sense(typed, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_space({}, [typed], loader=None)
    assert "\n" not in str(error.value)


def test_texts_are_the_very_numbers():
    assert Interval(0.1, 0.4, step=0.1).text(0.1 + 0.1 + 0.1) == "0.3"
    assert float(Interval(0.0, 1.0).text(1 / 3)) == 1 / 3
    assert Interval(1, 9, whole=True).text(4.0) == "4"
    assert corners(SPACE) == [
        {LR: "0.0001", "model.width": "8"},
        {LR: "1.0", "model.width": "8"},
        {LR: "0.0001", "model.width": "16"},
    ]


def settings(**fields: Any) -> SweepConfig:
    return from_plain({"sweep": {"search": "tpe", "trials": 8, "metric": "val/loss", **fields}}).sweep


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": "grid"}, "sweep.trials=8: a grid has none"),
        ({"search": "grid", "trials": None, "prune": "median"}, "sweep.prune=median: a grid has none"),
        ({"search": "grid", "trials": None, "storage": "sqlite://a:b@c"}, r"sweep.storage=sqlite://\*.*: a grid has"),
        ({"trials": None}, "sweep.search=tpe: how many jobs"),
        ({"metric": None}, "sweep.search=tpe: what is it after"),
        ({"metric": ["val/loss", "val/loss"]}, "the same metric twice"),
        ({"metric": "val/lss"}, "sweep.metric=val/lss; did you mean 'val/loss'. If not: is a small or a large value"),
        ({"storage": "foo.db"}, "sweep.storage=foo.db: a URL is needed: type sweep.storage=sqlite:///foo.db"),
        ({"metric": "val/f1"}, "sweep.metric=val/f1: is a small or a large value good"),
        ({"metric": ["val/loss", "val/accuracy"], "mode": "min"}, "sweep.mode=min: 1 for 2 metrics"),
        ({"metric": ["val/loss", "val/accuracy"], "prune": "median"}, "sweep.prune=median: .* sweep.metric has 2"),
        ({"metric": "test/loss", "prune": "halving"}, "test/loss comes only at the end of a job"),
        ({"mode": "maximal"}, r"sweep.mode=maximal: no such choice; did you mean 'max'"),
        ({"search": "tpee"}, "sweep.search=tpee: no such choice; did you mean 'tpe'"),
        ({"metric": 3}, "sweep.metric=3: a text, or a list"),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_settings(settings(**fields), searched=["a"])
    assert "\n" not in str(error.value)


def test_a_search_of_nothing():
    with pytest.raises(ConfigError, match=r"nothing to search: give a key several values"):
        check_settings(settings(), searched=[])


def test_a_metric_says_which_way_is_better():
    modes = [o.mode for o in objectives_of(settings(metric=["val/loss", "test/accuracy", "perplexity"]))]
    assert modes == ["min", "max", "min"]
    assert objectives_of(settings(metric="x", mode="max"))[0].mode == "max"


# ---- with a study ------------------------------------------------------------------------------------------------


class Sweep:
    """Stands in for the pool: runs the jobs of a search in this process, by a formula."""

    def __init__(
        self, folder: Path, *, space: Mapping[str, Any] = SPACE, wrong: str = "nothing", **fields: Any
    ) -> None:
        from shardwise.sweep.search import Search

        folder.mkdir(exist_ok=True)
        one = settings(**fields)

        def plan(overrides: Sequence[str], number: int) -> Planned:
            if wrong in overrides:
                raise ConfigError(f"{wrong} is wrong")
            config = {"plugins": [], "sweep": {}}
            job = Job(config, {}, f"run-{number}", f"/runs/{number}", list(overrides), ["python", "train.py"])
            return Planned(job, key=" ".join(overrides), number=number, label="")

        self.search = Search(
            space,
            objectives=objectives_of(one),
            settings=one,
            seed=3,
            folder=folder,
            fixed=["seed=1"],
            plan=plan,
            sample=plan(["seed=1"], 1),
        )
        self.search.common()
        self.outcomes: list[Outcome] = []
        self.labels: list[str] = []

    def next(self) -> Planned:
        planned = self.search.next()
        assert planned is not None
        self.labels.append(planned.label)
        self.search.started(planned, planned.job)
        return planned

    def end(self, planned: Planned, status: str = "completed", **metrics: Any) -> None:
        outcome = Outcome(planned, planned.job, status, "it broke", {"metrics": metrics})
        self.outcomes.append(outcome)
        self.search.ended(planned, outcome)

    def run(self, value: Callable[[dict[str, str]], float], *, limit: int = 1000) -> "Sweep":
        for _ in range(limit):
            if self.search.finished:
                break
            planned = self.next()
            self.end(planned, **{"val/loss": value(point(planned))})
        return self

    def closing(self) -> str:
        return "\n".join(self.search.closing(self.outcomes))


def point(planned: Planned) -> dict[str, str]:
    return dict(text.split("=", 1) for text in planned.label.split(" "))


def valley(values: dict[str, str]) -> float:
    return abs(math.log10(float(values[LR])) + 2) + (values["model.width"] == "8")


def test_a_search_finds_the_valley_and_says_how_to_repeat_it(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=30).run(valley)
    assert len(sweep.outcomes) == 30
    assert all(outcome.job.overrides[0] == "seed=1" for outcome in sweep.outcomes)
    best = min(sweep.outcomes, key=lambda outcome: outcome.metrics["val/loss"])
    assert best.metrics["val/loss"] < 0.2
    later = [outcome.metrics["val/loss"] for outcome in sweep.outcomes]
    assert sum(later[15:]) < 0.7 * sum(later[:15])  # it has learnt
    number, label = best.planned.number, best.planned.label
    lines = sweep.closing().splitlines()
    assert lines[0] == "30 trials: 30 completed"
    assert lines[1].startswith(f"best trial by val/loss (min): trial {number}: val/loss 0.")
    assert lines[1].endswith(f", with {label}")
    assert lines[2].endswith(f"train.py rerun=/runs/{number}")


@pytest.mark.parametrize("search", ["tpe", "random", "nsga2"])
def test_a_search_that_is_continued_goes_on_as_it_would_have(tmp_path, search):
    whole = Sweep(tmp_path / "whole", search=search, trials=18).run(valley)
    Sweep(tmp_path / "parts", search=search, trials=18).run(valley, limit=7)
    rest = Sweep(tmp_path / "parts", search=search, trials=18).run(valley)
    assert rest.labels == whole.labels[7:]
    assert Sweep(tmp_path / "parts", search=search, trials=18).search.finished
    assert len(Sweep(tmp_path / "parts", search=search, trials=20).run(valley).labels) == 2
    assert "20 trials: 20 completed" in Sweep(tmp_path / "parts", search=search, trials=20).closing()


@pytest.mark.slow
def test_gaussian_processes(tmp_path):
    sweep = Sweep(tmp_path / "s", search="gp", trials=12).run(valley)  # it learns from the eleventh on
    assert "12 trials: 12 completed" in sweep.closing()


def test_a_free_slot_gets_a_trial_that_knows_the_others(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=3)
    first, second = sweep.next(), sweep.next()
    sweep.end(second, **{"val/loss": 2.0})
    assert not sweep.search.finished
    third = sweep.next()  # the first still runs
    assert sweep.search.finished
    sweep.end(first, **{"val/loss": 1.0})
    sweep.end(third, **{"val/loss": 3.0})
    assert len(set(sweep.labels)) == 3
    assert "trial 1: val/loss 1" in sweep.closing()


def test_trials_that_were_running_are_handed_out_again(tmp_path):
    """The parent is killed in the middle of two of them, and of a line of the journal."""
    killed = Sweep(tmp_path / "s", trials=4)
    killed.end(killed.next(), **{"val/loss": 1.0})
    killed.next()
    killed.next()
    with (tmp_path / "s" / "study.journal").open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"8f3')
    again = Sweep(tmp_path / "s", trials=4)
    assert (again.search.total, again.search.ended_before) == (4, 1)
    again.run(valley)
    assert again.labels[:2] == killed.labels[1:]
    assert [outcome.planned.number for outcome in again.outcomes] == [2, 3, 4]
    assert "4 trials: 4 completed" in again.closing()


def test_a_trial_that_was_about_to_fail_for_good_counts_once(tmp_path):
    """The parent is killed after it has noted that a trial is final, and before the study knows that it failed."""
    killed = Sweep(tmp_path / "s", trials=3)
    killed.next()
    killed.search._trials[1].set_user_attr("final", True)
    again = Sweep(tmp_path / "s", trials=3)
    assert (again.search.total, again.search.ended_before) == (3, 0)
    assert len(again.run(valley).labels) == 3


def test_a_job_that_was_asked_to_end_stays_open(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=1)
    sweep.end(sweep.next(), "preempted")
    assert "1 trial: 0 completed, 1 not at their end" in sweep.closing()
    assert Sweep(tmp_path / "s", trials=1).run(valley).labels == sweep.labels


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_value_that_is_no_number_fails_the_trial(tmp_path, capsys, value):
    sweep = Sweep(tmp_path / "s", trials=2)
    sweep.end(sweep.next(), **{"val/loss": value})
    said = f"trial 1 counts as failed: val/loss is {'nan' if value is None else value}"
    assert capsys.readouterr().err == said + "\n"
    sweep.run(valley)
    assert said in sweep.closing()
    assert "2 trials: 1 completed, 1 failed" in sweep.closing()
    assert Sweep(tmp_path / "s", trials=2).search.finished  # it would be the same again


def test_a_job_that_failed_is_made_up_for_when_the_search_is_started_again(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=2)
    sweep.end(sweep.next(), "failed")
    sweep.run(valley)
    assert len(sweep.labels) == 2
    again = Sweep(tmp_path / "s", trials=2).run(valley)
    assert len(again.labels) == 1
    assert "3 trials: 2 completed, 1 failed" in again.closing()


def test_a_metric_that_is_not_there_ends_the_search_and_loses_nothing(tmp_path):
    metrics = {"val/loss": 0.5, "val/accuracy": 0.9}
    sweep = Sweep(tmp_path / "s", trials=2, metric="val/acuracy", mode="min")
    planned = sweep.next()
    with pytest.raises(ConfigError, match=r"sweep.metric=val/acuracy: .* did you mean 'val/accuracy'"):
        sweep.end(planned, **metrics)
    assert "best trial: none has a value" in sweep.closing()
    # Put right, in the other direction too, the same job is asked for, and the ledger knows how it ended.
    again = Sweep(tmp_path / "s", trials=2, metric="val/accuracy")
    repeated = again.next()
    assert repeated.key == planned.key
    again.end(repeated, **metrics)
    assert "best trial by val/accuracy (max): trial 1: val/accuracy 0.9" in again.closing()


def test_pruning_by_the_median(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=6, prune="median")
    for height in range(4):
        planned = sweep.next()
        lines = [(step, {"val/loss": height / 10 + 1 / step, "lr": 0.1}) for step in (1, 2, 3)]
        assert not sweep.search.progress(planned, lines)
        sweep.end(planned, **{"val/loss": height / 10})
    bad, good = sweep.next(), sweep.next()
    assert not sweep.search.progress(bad, [(1, {"lr": 0.1})])
    assert sweep.search.progress(bad, [(1, {"val/loss": 9.0})])
    assert not sweep.search.progress(good, [(1, {"val/loss": 0.9})])
    assert not sweep.search.progress(good, [(1, {"val/loss": 0.9}), (2, {"val/loss": 0.4})])  # on from a checkpoint
    sweep.end(bad, "pruned", **{"val/loss": 9.0})
    sweep.end(good, **{"val/loss": 0.01})
    assert "6 trials: 5 completed, 1 pruned" in sweep.closing()
    assert "trial 1: val/loss 0" in sweep.closing()
    assert Sweep(tmp_path / "s", trials=6, prune="median").search.finished


def test_pruning_by_successive_halving(tmp_path):
    """Nothing is ended before the length of a job is known; from then on the worse ones at the first look."""
    sweep = Sweep(tmp_path / "s", trials=6, prune="halving")

    def reports(planned: Planned, height: float) -> bool:
        return any(
            sweep.search.progress(planned, [(step, {"val/loss": height + 1 / step})]) for step in (100, 400, 1600)
        )

    for height in (0.5, 0.9):
        planned = sweep.next()
        assert not reports(planned, height)
        sweep.end(planned, **{"val/loss": height})
    said = []
    for height in (0.3, 0.8, 0.1, 0.2):
        planned = sweep.next()
        said.append(reports(planned, height))
        sweep.end(planned, "pruned" if said[-1] else "completed", **{"val/loss": height})
    assert said == [False, True, False, True], "the best so far goes on"
    assert "6 trials: 4 completed, 2 pruned" in sweep.closing()
    assert "trial 5: val/loss 0.1" in sweep.closing()
    assert Sweep(tmp_path / "s", trials=6, prune="halving").search.finished


def test_a_job_whose_loss_is_nan_on_the_way_is_pruned(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=7, prune="median")
    for _ in range(5):
        planned = sweep.next()
        sweep.search.progress(planned, [(1, {"val/loss": 1.0})])
        sweep.end(planned, **{"val/loss": 1.0})
    assert sweep.search.progress(sweep.next(), [(1, {"val/loss": math.nan})])


def test_pruning_by_what_nobody_says_on_the_way_is_told(tmp_path):
    sweep = Sweep(tmp_path / "s", trials=1, prune="median").run(valley)
    assert "sweep.prune=median: no job has said val/loss before its end" in sweep.closing()


def test_several_objectives_end_in_a_front(tmp_path):
    sweep = Sweep(
        tmp_path / "s", search="nsga2", trials=4, metric=["val/loss", "seconds_per_step"], mode=["min", "min"]
    )
    for loss, seconds in ((0.1, 9.0), (0.5, 5.0), (0.6, 6.0), (0.9, 1.0)):
        sweep.end(sweep.next(), **{"val/loss": loss, "seconds_per_step": seconds})
    lines = sweep.closing().splitlines()
    assert lines[1].startswith("Pareto front by val/loss (min), seconds_per_step (min): 3 trials")
    assert [line.split(":")[0].strip() for line in lines[2::2]] == ["trial 1", "trial 2", "trial 4"]
    assert lines[-1].endswith("rerun=/runs/4")


def test_a_point_that_makes_no_configuration_is_told_and_passed_over(tmp_path, capsys):
    space = {"a": Choice(("1", "2", "3"))}
    sweep = Sweep(tmp_path / "s", space=space, search="random", trials=12, wrong="a=2")
    sweep.run(lambda values: float(values["a"]))
    assert {outcome.planned.label for outcome in sweep.outcomes} == {"a=1", "a=3"}
    told = capsys.readouterr().err.splitlines()
    assert len(told) + len(sweep.outcomes) == 12
    assert told[0].endswith("counts as failed: a=2: a=2 is wrong")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"space": {LR: Interval(1e-3, 1.0, log=True), "model.width": Choice(("8", "16"))}},
         "the space of optimizer.lr was 0.0001 to 1, logarithmic when this search began and is 0.001 to 1"),
        ({"space": {LR: SPACE[LR]}}, "the space of model.width was 8,16 when .* and is not searched now"),
        ({"metric": "val/accuracy"}, "sweep.m[a-z]* was .* take another sweep.name than s"),
        ({"mode": "max"}, "sweep.mode was min when this search began and is max now"),
    ],
)  # fmt: skip
def test_a_search_that_changed_asks_for_another_name(tmp_path, changed, message):
    Sweep(tmp_path / "s").run(valley, limit=1)
    before = (tmp_path / "s" / "study.journal").read_bytes()
    with pytest.raises(ConfigError, match=message) as error:
        Sweep(tmp_path / "s", **changed)
    assert "\n" not in str(error.value)
    assert (tmp_path / "s" / "study.journal").read_bytes() == before


def test_a_damaged_journal_is_one_line_and_stays(tmp_path):
    Sweep(tmp_path / "s").run(valley, limit=2)
    journal = tmp_path / "s" / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], b'{"op_co\n', *lines[3:]]))
    before = journal.read_bytes()
    with pytest.raises(ConfigError, match=r"study.journal: the study cannot be read .* another sweep.name") as error:
        Sweep(tmp_path / "s")
    assert "\n" not in str(error.value)
    assert journal.read_bytes() == before


def test_storage_by_a_url(tmp_path):
    url = f"sqlite:///{tmp_path}/trials.db"
    Sweep(tmp_path / "s", trials=4, storage=url).run(valley, limit=2)
    assert not (tmp_path / "s" / "study.journal").exists()
    assert len(Sweep(tmp_path / "s", trials=4, storage=url).run(valley).labels) == 2
    assert Sweep(tmp_path / "other", trials=1, storage=url).run(valley).labels  # another search in the same storage
    with pytest.raises(ConfigError, match=r"sweep.storage=mysql://.*: the study cannot be read or written") as error:
        Sweep(tmp_path / "s", storage="mysql://user:hush@127.0.0.1/x")
    assert "hush" not in str(error.value)


# ---- grids ---------------------------------------------------------------------------------------------------------


def grid_outcome(number: int, status: str = "completed", **metrics: float) -> Any:
    job = SimpleNamespace(config={"plugins": []}, command=["python", "train.py"], run_folder=f"/runs/{number}")
    planned = SimpleNamespace(number=number, label=f"a={number}")
    return SimpleNamespace(planned=planned, job=job, status=status, metrics=metrics)


def test_a_grid_names_its_best_job():
    outcomes = [
        *(grid_outcome(1, acc=0.5, seconds=1.0), grid_outcome(2, acc=0.7, seconds=3.0)),
        *(grid_outcome(3, "failed", acc=0.9), grid_outcome(4, acc=math.nan, seconds=0.0)),
    ]
    one = objectives_of(settings(metric="acc", mode="max"))
    lines = best_of_grid(one, outcomes)
    assert lines[0] == "best job by acc (max): job 2: acc 0.7, with a=2"
    assert lines[1].endswith("train.py rerun=/runs/2")
    front = best_of_grid(objectives_of(settings(metric=["acc", "seconds"], mode=["max", "min"])), outcomes)
    assert [line.split(":")[0].strip() for line in front[1::2]] == ["job 2", "job 1"]
    assert best_of_grid([], outcomes) == []
    with pytest.raises(ConfigError, match=r"sweep.metric=acc: no job has such a metric"):
        values_of({"loss": 1.0}, one)


def test_the_metric_of_a_grid():
    from shardwise.sweep.grid import Grid

    def planned(number: int, metric: str) -> Planned:
        config = {"plugins": [], "sweep": {"metric": metric, "mode": "max"}}
        job = Job(config, {}, f"run-{number}", f"/runs/{number}", [f"a={number}"], ["python", "train.py"])
        return Planned(job, key=str(number), number=number, label="")

    for metric in ("acc", "ac"):
        grid = Grid([planned(1, metric), planned(2, metric)])
        one, two = grid.next(), grid.next()
        outcomes = [Outcome(p, p.job, "completed", "", {"metrics": {"acc": p.number / 10}}) for p in (one, two)]
        if metric == "acc":
            grid.ended(one, outcomes[0])
            assert grid.closing(outcomes)[0] == "best job by acc (max): job 2: acc 0.2, with a=2"
        else:
            with pytest.raises(ConfigError, match=r"sweep.metric=ac: no job has such a metric; did you mean 'acc'"):
                grid.ended(one, outcomes[0])
            assert grid.closing(outcomes) == ["best job: none has a value of ac (max)"]


# ---- as it is typed ------------------------------------------------------------------------------------------------

TINY = ["model=mlp", "model.width=8", "trainer.max_steps=3", "schedule.warmup_steps=0", "logger=none"]
RATES = f"{LR}=tag(log,interval(1e-3,1e-1))"


def test_a_search_from_the_command_line(train_py):
    """Two starts under one name: the second adds a trial, and the best of all is named."""
    search = ["-m", *TINY, "sweep.search=tpe", "sweep.metric=test/accuracy", "sweep.name=rates", "sweep.slots=2"]
    run = train_py(*search, "sweep.trials=2", RATES, "batch.global_size=choice(16,32)")
    assert len(run.run_folders) == 2
    before = {path: path.stat().st_mtime_ns for folder in run.run_folders for path in folder.glob("*.json")}
    again = train_py(*search, "sweep.trials=3", RATES, "batch.global_size=choice(16,32)")
    assert len(again.run_folders) == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    results = {folder: json.loads((folder / "result.json").read_text()) for folder in again.run_folders}
    best = max(results, key=lambda folder: results[folder]["metrics"]["test/accuracy"])
    printed = next(line for line in again.stdout.splitlines() if "rerun=" in line and "best" not in line)
    assert results[Path(printed.rpartition("rerun=")[2])]["metrics"] == results[best]["metrics"]
    assert "3 trials: 3 completed" in again.stdout
    assert "job 3/3 started: " in again.stdout
    assert "(3 of 3 done)" in again.stdout


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([RATES], "optimizer.lr=tag(log,interval(1e-3,1e-1)): an interval has no end of values for a grid"),
        (["sweep.search=tpe", RATES], "sweep.search=tpe: how many jobs? type sweep.trials=20"),
        (
            ["sweep.search=tpe", "sweep.trials=3", "sweep.metric=val/loss", "batch.global_size=choice(32,33)"],
            "batch.global_size=33 does not divide over 2 data-parallel ranks",
        ),
        (
            ["sweep.search=tpe", "sweep.trials=3", "sweep.metric=val/loss", "batch.global_size=interval(32,64)"],
            "batch.global_size=32.0: a whole number is needed; whole numbers are batch.global_size=int(interval(",
        ),
        (
            ["sweep.search=tpe", "sweep.trials=3", "sweep.metric=val/loss", "sweep.name=choice(a,b)"],
            "sweep.name cannot be swept",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(train_py, typed, message):
    run = train_py("-m", *TINY, "trainer.devices=2", *typed, ok=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {message}")
    assert len(run.stderr.splitlines()) == 1
    assert not run.output_root.exists()


def test_no_sweep_in_the_run_of_an_agent(train_py):
    env = {"WANDB_SWEEP_ID": "abc", "WANDB_RUN_ID": "def"}
    run = train_py("-m", *TINY, "seed=1,2", ok=False, env=env)
    assert run.returncode == 2
    assert run.stderr.startswith("error: -m under an agent of a W&B sweep")


STOPS = """
import os, time
from pathlib import Path
from pytorch_lightning import Callback

class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 15:
            for name in ("first", "second"):
                mark = Path(os.environ["PYTHONPATH"]) / name
                if not mark.exists():
                    mark.touch()
                    time.sleep(60 if name == "second" else 0)
                    break
"""


@pytest.mark.slow
def test_a_search_whose_parent_was_killed_goes_on_with_the_same_trials(train_py, tmp_path):
    """The second of two trials is running when the parent is killed: it goes on, and the first is not run again."""
    (tmp_path / "stops.py").write_text(STOPS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    search = [
        *("-m", *TINY, "trainer.max_steps=20", "checkpoint.every_n_steps=10", "checkpoint.background=false", RATES),
        *("sweep.search=random", "sweep.metric=test/accuracy", "sweep.name=killed", "sweep.trials=2", "sweep.slots=1"),
        *("plugins=[stops]", "+callbacks.stops._target_=stops.Stops", f"output_root={tmp_path / 'outputs'}"),
    ]
    ledger = tmp_path / "outputs" / "sweeps" / "killed" / "jobs.json"
    with (tmp_path / "killed.log").open("w") as log:
        killed = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *search], env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 100
            while not (tmp_path / "second").exists():
                assert killed.poll() is None, (tmp_path / "killed.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "killed.log").read_text()
                time.sleep(0.1)
        finally:
            killed.kill()
            killed.wait()
    before = json.loads(ledger.read_text())
    assert [row["status"] for row in before] == ["completed", "running"]
    again = train_py(*search, env={"PYTHONPATH": str(tmp_path)})
    after = json.loads(ledger.read_text())
    assert [row["run_folder"] for row in after] == [row["run_folder"] for row in before]
    assert after[0] == before[0]
    assert "resumed from step 10" in (Path(after[1]["run_folder"]) / "ranks" / "rank_0.log").read_text()
    assert "2 trials: 2 completed" in again.stdout
