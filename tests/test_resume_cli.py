"""`resume=` and `rerun=` as they are typed: what is found, what the ranks are handed, one line for what is wrong."""

import errno
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise import cli
from shardwise.checkpoint import manifest
from shardwise.checkpoint.filesystems import LocalFolder
from shardwise.checkpoint.store import Store, checksum, step_name
from shardwise.config import from_plain
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose_plain, read_yaml, write_yaml
from shardwise.job import HOLDER, LOCK, Job, check_idle, in_run_folder, make_job
from shardwise.provenance import with_attempts
from shardwise.rerun import Repeated, effective
from shardwise.resolve import World, resolve
from shardwise.signals import PREEMPTED

TYPED = ["model=mlp", "logger=none", "trainer.max_steps=100", "optimizer.lr=0.25"]


def checkpoint(store: Store, step: int, *, config: dict[str, Any], overrides: list[str], version: int = 1) -> Path:
    """A checkpoint of no tensors, which is all that a command line looks at."""
    state = {"format_version": 1, "step": step, "config": config, "overrides": overrides, "experiment": "digits"}
    state |= {"mesh": {}, "trainer": {}}
    name = step_name(step)
    place = Path(store.begin(name))
    files = {}
    for file, text in {"state.json": json.dumps(state), ".metadata": "", "__0_0.distcp": "x" * 100}.items():
        (place / file).write_text(text)
        files[file] = {"bytes": len(text), "xxh3_128": checksum(place / file)}
    told = {"run_id": "then", "strategy": "ddp", "mesh": {}, "world_size": 1, "metrics": {}, "files": files}
    store.publish(name, {**told, "versions": {"torch": "2.0.0", "python": f"{platform.python_version()}+local"}})
    if version != 1:
        path = Path(store.url) / name / "manifest.json"
        plain = {**json.loads(path.read_text()), "format_version": version}
        path.write_text(json.dumps({**plain, manifest.SEAL: manifest._seal(plain)}))
    return Path(store.url) / name


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder as a run leaves it: `run_folder("id", steps=(10, 20), status="failed")`."""

    def make(
        name: str = "20260101-120000-aaaa",
        *more: str,
        steps: tuple[int, ...] = (10, 20),
        status: str | None = "preempted",
        started: str = "2026-01-01T12:00:00+00:00",
    ) -> Path:
        folder, overrides = tmp_path / "outputs" / "digits" / name, [*TYPED, *more]
        (folder / "ranks").mkdir(parents=True)
        config = compose_plain([line for line in overrides if not line.startswith(("hydra", "-"))])
        write_yaml(folder / "config.yaml", {**config, "derived": {"world_size": 1}})
        write_yaml(folder / "overrides.yaml", overrides)
        record = {"command": ["python", "train.py"], "start_time": started, "versions": {"torch": "2.0.0"}}
        (folder / "provenance.json").write_text(json.dumps(record))
        if status is not None:
            result = {"status": status, "run_id": name, "steps": 20, "metrics": {}}
            (folder / "result.json").write_text(json.dumps(result))
        for step in steps:
            checkpoint(Store(folder / "checkpoints"), step, config=config, overrides=overrides)
        return folder

    return make


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """The jobs that would be launched; while each runs, its folder has to be held."""
    jobs: list[Job] = []

    def launch(job: Job) -> dict[str, Any]:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* trains in "):
            check_idle(Path(job.run_folder))
        jobs.append(job)
        return {"status": "preempted" if job.config["seed"] == 75 else "completed", "steps": 100, "metrics": {}}

    monkeypatch.setattr("shardwise.launch.launch", launch)
    yield jobs
    for job in jobs:
        check_idle(Path(job.run_folder))


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder, and when it was changed, but for the folder in which a new run's would be made."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size, path.stat().st_ino)
        for path in folder.rglob("*")
        if ".private" not in path.parts and path != folder / "outputs"
    }


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that answers a command line which changes nothing."""
    before = listing(folder)
    status = cli.train(list(argv))
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), f"{argv}: {out}{err}"
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert listing(folder) == before, argv
    return err.removeprefix("error: ").rstrip()


# ---- a run folder --------------------------------------------------------------------------------------------------


def test_a_run_continues_in_its_folder_from_its_newest_checkpoint(
    run_folder: Callable[..., Path], launched: list[Job]
) -> None:
    folder = run_folder(steps=(10, 20))
    assert cli.train([f"resume={folder}", "trainer.max_steps=300", "seed=1"]) == 0
    (job,) = launched
    assert (job.run_folder, job.run_id, job.resumed, job.parent) == (str(folder), folder.name, True, None)
    assert job.checkpoint == str(folder / "checkpoints" / "step_00000020")
    assert job.config["trainer"]["max_steps"] == 300
    assert job.config["optimizer"]["lr"] == 0.25
    assert job.overrides == ["model=mlp", "logger=none", "optimizer.lr=0.25", "trainer.max_steps=300", "seed=1"]
    assert job.notes[0] == f"resumed from step 20 of {folder}"
    assert any(note.startswith("differs from the resumed run: torch: 2.0.0 -> ") for note in job.notes)
    assert sorted(folder.parent.iterdir()) == [folder]


def test_a_folder_is_found_by_a_relative_name_and_keeps_its_own(
    run_folder: Callable[..., Path], launched: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder()
    monkeypatch.chdir(folder)
    assert cli.train(["resume=."]) == 0
    monkeypatch.chdir(folder.parent)
    assert cli.train([f"resume={folder.name}/"]) == 0
    assert {(job.run_folder, job.run_id) for job in launched} == {(str(folder), folder.name)}


def test_what_nobody_typed_stays_as_it_was(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    folder = run_folder()
    config = read_yaml(folder / "config.yaml")
    config["batch"]["global_size"] = 32
    config["optimizer"]["weight_decay"] = 0.5
    write_yaml(folder / "config.yaml", config)
    default = compose_plain([])["batch"]["global_size"]
    for _ in range(2):  # also where the default is typed
        assert cli.train([f"resume={folder}"]) == 0
        assert launched[-1].config["batch"]["global_size"] == 32
        assert f"batch.global_size=32 is kept from the resumed run (the default is {default} now)" in launched[-1].notes
    assert cli.train([f"resume={folder}", f"batch.global_size={default}"]) == 0
    assert launched[-1].config["batch"]["global_size"] == default
    assert launched[-1].config["optimizer"]["weight_decay"] == 0.5


def test_a_run_may_be_resumed_again_and_again(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    """Whatever was typed at each time stays, once."""
    folder = run_folder()
    for typed in (["seed=1"], ["seed=2", "+extra.a=1"], ["extra.a=2"], []):
        assert cli.train([f"resume={folder}", *typed]) == 0
        write_yaml(folder / "overrides.yaml", launched[-1].overrides)
        write_yaml(folder / "config.yaml", launched[-1].config)
    assert launched[-1].overrides == [*TYPED, "seed=2", "+extra.a=2"]
    assert (launched[-1].config["seed"], launched[-1].config["extra"]) == (2, {"a": 2})


def test_overrides_of_one_key_become_one_where_that_changes_nothing() -> None:
    assert effective(["a=1", "b=1"], ["a=2"]) == ["b=1", "a=2"]
    assert effective(["+a=1"], ["a=2"]) == ["+a=2"]
    assert effective(["strategy=fsdp", "strategy.tp=2"], ["strategy=tp"]) == ["strategy.tp=2", "strategy=tp"]
    for kept in (["~a", "+a=1"], ["model=mlp", "model={width: 8}"], ["model={width: 8}", "model={depth: 2}"]):
        assert effective(kept[:1], kept[1:]) == kept


def test_a_damaged_checkpoint_is_passed_over_by_name(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    folder = run_folder(steps=(10, 20, 30))
    (folder / "checkpoints" / "step_00000030" / "__0_0.distcp").write_text("short")
    (folder / "checkpoints" / "step_00000020" / "state.json").unlink()
    assert cli.train([f"resume={folder}"]) == 0
    assert launched[0].checkpoint == str(folder / "checkpoints" / "step_00000010")
    (note,) = (note for note in launched[0].notes if note.startswith("newer, but not whole"))
    assert "step_00000030 (__0_0.distcp: 5 bytes, 100 expected)" in note
    assert "step_00000020 (state.json: missing)" in note


def test_checkpoints_elsewhere_are_found(run_folder: Callable[..., Path], launched: list[Job], tmp_path: Path) -> None:
    folder = run_folder("elsewhere", f"checkpoint.folder={tmp_path / 'safe'}", steps=())
    checkpoint(Store(tmp_path / "safe" / "elsewhere"), 40, config={}, overrides=[])
    assert cli.train([f"resume={folder}"]) == 0
    assert launched[0].checkpoint == str(tmp_path / "safe" / "elsewhere" / "step_00000040")


def test_a_completed_run_is_left_alone_unless_it_is_made_longer(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = run_folder(status="completed")
    before = listing(tmp_path)
    for more in ([], ["seed=3"], ["trainer.max_steps=20"], ["trainer.max_steps=7"]):
        assert cli.train([f"resume={folder}", *more]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out == (
            f"{folder} is completed after 20 steps: there is nothing to resume; to train on, type "
            f"resume={folder} trainer.max_steps=<more than 20>\n"
        )
    assert cli.train(["resume=last"]) == 0
    assert f"{folder} is completed after 20 steps" in capsys.readouterr().out
    assert launched == []
    assert listing(tmp_path) == before
    for more in (["trainer.max_steps=21"], ["trainer.max_epochs=9", "trainer.max_steps=-1"]):
        assert cli.train([f"resume={folder}", *more]) == 0
    assert [job.resumed for job in launched] == [True, True]


def test_what_only_a_user_may_say_comes_from_no_folder_and_no_checkpoint(
    run_folder: Callable[..., Path], launched: list[Job]
) -> None:
    hostile = ["plugins=[evil]", "+plugins=[evil]", "hydra.searchpath=[file:///evil]", "--config-dir=/evil", "resume=x"]
    folder = run_folder(steps=())
    config = {**read_yaml(folder / "config.yaml"), "plugins": ["evil"]}
    write_yaml(folder / "overrides.yaml", [*hostile, *TYPED])
    write_yaml(folder / "config.yaml", config)
    path = checkpoint(Store(folder / "checkpoints"), 20, config=config, overrides=[*hostile, *TYPED])
    for source in (folder, path):
        assert cli.train([f"resume={source}"]) == 0
        assert launched[-1].config["plugins"] == []
        assert launched[-1].overrides == TYPED
        assert cli.train([f"resume={source}", "plugins=[mine]"]) == 0
        assert launched[-1].config["plugins"] == ["mine"]


def test_a_secret_has_to_be_typed_again(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = run_folder(steps=())
    hidden = [*TYPED, "extra.api_key=***"]
    write_yaml(folder / "overrides.yaml", hidden)
    path = checkpoint(Store(folder / "checkpoints"), 20, config=read_yaml(folder / "config.yaml"), overrides=hidden)
    for source in (folder, path):
        said = refused(tmp_path, capsys, f"resume={source}")
        assert said.startswith("extra.api_key is a secret that ")
    for source in (folder, path):
        assert cli.train([f"resume={source}", "+extra.api_key=abc"]) == 0
        assert launched[-1].config["extra"] == {"api_key": "abc"}


SETTINGS = ["logger=wandb", "logger.mode=online", "+logger.settings={base_url: http://evil}"]


@pytest.mark.parametrize(
    ("hostile", "said", "again", "took"),
    [
        (
            SETTINGS,
            "logger.settings is where a logger sends",
            "+logger.settings={base_url: http://mine}",
            "http://mine",
        ),
        (["+logger.settings.base_url=x"], "logger.settings.base_url is where a", "logger.settings.base_url=y", "y"),
        (["logger={settings: {base_url: x}}"], "logger is where a logger sends", "logger=none", None),
        ([r"+logger.tracking_uri=http\://evil"], "logger.tracking_uri is where", "logger.tracking_uri=file", "file"),
        (["extra.a=${oc.env:HOME}"], "extra.a is an interpolation", "+extra.a=1", 1),
        (["+extra.a='${oc.env:HOME}'"], "extra.a is an interpolation", "+extra.a=1", 1),
        ([r"+extra.a=$\{oc.env\:HOME\}"], "extra.a is an interpolation", "+extra.a=1", 1),
        (["+extra.a=[1,{b: '${oc.env:HOME}'}]"], "extra.a is an interpolation", "+extra.a=1", 1),
        (
            ["checkpoint.folder=memory://evil"],
            "checkpoint.folder is a place",
            "checkpoint.folder=memory://my",
            "memory:",
        ),
        ([r"checkpoint.folder=memory\://evil"], "checkpoint.folder is a place", "checkpoint.folder=null", None),
        (["+checkpoint={folder: 's3://evil'}"], "checkpoint is a place", "checkpoint.folder=null", None),
    ],
)
def test_what_would_send_something_elsewhere_has_to_be_typed_again(
    run_folder: Callable[..., Path],
    launched: list[Job],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hostile: list[str],
    said: str,
    again: str,
    took: object,
) -> None:
    """A logger's host gets the API key, a store the weights, an interpolation reads the environment."""
    monkeypatch.setenv("HOME", "precious")
    folder = run_folder(steps=())
    config = read_yaml(folder / "config.yaml")
    write_yaml(folder / "overrides.yaml", [*TYPED, *hostile])
    path = checkpoint(Store(folder / "checkpoints"), 20, config=config, overrides=[*TYPED, *hostile])
    for word in (f"resume={folder}", f"rerun={folder}", f"resume={path}")[0 if hostile is SETTINGS else 2 :]:
        line = refused(tmp_path, capsys, word)
        assert said in line
        assert "=... again" in line
        assert cli.train([word, again]) == 0, capsys.readouterr().err
        assert not any(text in str(launched[-1].config) for text in ("evil", "precious", "${"))
        assert str(took) in str(launched[-1].config), launched[-1].overrides


def test_what_would_send_something_elsewhere_is_not_kept_from_a_stored_configuration(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = run_folder(steps=())
    config = read_yaml(folder / "config.yaml")
    config["optimizer"]["weight_decay"] = "${oc.env:HOME}"
    config["checkpoint"]["folder"] = "memory://evil"
    config["output_root"] = str(tmp_path / "theirs")
    path = checkpoint(Store(tmp_path / "copied"), 20, config=config, overrides=[*TYPED, f"output_root={tmp_path}/b"])
    assert cli.train([f"resume={path}"]) == 0
    (job,) = launched
    assert job.config["checkpoint"]["folder"] is None
    assert job.config["output_root"] == "outputs"
    assert isinstance(job.config["optimizer"]["weight_decay"], float)
    for words in ("is an interpolation", "a place elsewhere for the weights", "a place elsewhere for the run folder"):
        assert any(words in note for note in job.notes), words
    for words in ("output_root=../up", "output_root=~/up"):
        path = checkpoint(Store(tmp_path / "copied"), 30, config={}, overrides=[*TYPED, words])
        assert cli.train([f"resume={path}"]) == 0
        assert launched[-1].config["output_root"] == "outputs"
    # In place, it would save where nobody looks for it.
    write_yaml(folder / "config.yaml", {**config, "optimizer": read_yaml(folder / "config.yaml")["optimizer"]})
    checkpoint(Store(f"{folder}/checkpoints"), 20, config=config, overrides=TYPED)
    assert "checkpoint.folder=... again" in refused(tmp_path, capsys, f"resume={folder}")
    assert cli.train([f"resume={folder}", "checkpoint.folder=memory://mine"]) == 0
    assert launched[-1].config["output_root"] == str(tmp_path / "theirs"), "a run folder's own is kept"


def test_a_run_that_saved_nothing_in_a_new_place_goes_on_from_its_own(
    run_folder: Callable[..., Path], launched: list[Job], tmp_path: Path
) -> None:
    new = tmp_path / "new"
    folder = run_folder("moved", f"checkpoint.folder={new}", steps=(10, 20))
    assert cli.train([f"resume={folder}"]) == 0
    assert launched[-1].checkpoint == str(folder / "checkpoints" / "step_00000020")
    assert any(f"as none in {new / 'moved'} is whole and newer" in note for note in launched[-1].notes)
    for step, taken in ((15, folder / "checkpoints" / "step_00000020"), (30, new / "moved" / "step_00000030")):
        checkpoint(Store(new / "moved"), step, config={}, overrides=[])
        assert cli.train([f"resume={folder}"]) == 0
        assert launched[-1].checkpoint == str(taken)
    (new / "moved" / "step_00000030" / "state.json").unlink()
    assert cli.train([f"resume={folder}"]) == 0
    assert launched[-1].checkpoint == str(folder / "checkpoints" / "step_00000020")
    assert any("left out: step_00000030 (state.json: missing)" in note for note in launched[-1].notes)


def test_a_store_that_does_not_answer_is_no_damage(
    run_folder: Callable[..., Path],
    launched: list[Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run_folder("20260101-000000-aaaa", steps=(10,), started="2026-01-01T00:00:00+00:00")
    folder = run_folder("20260102-000000-bbbb", steps=(10, 20), started="2026-01-02T00:00:00+00:00")
    kept = LocalFolder.open

    def down(self: LocalFolder, name: str, file: str) -> Any:
        if name == "step_00000020":
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return kept(self, name, file)

    monkeypatch.setattr(LocalFolder, "open", down)
    for word in ("resume=last", f"resume={folder}", f"resume={folder / 'checkpoints'}"):
        said = refused(tmp_path, capsys, word)
        assert f"{folder / 'checkpoints' / 'step_00000020'}/" in said
        assert "cannot be read (Connection reset by peer): try again" in said
    assert launched == []


# ---- a checkpoint --------------------------------------------------------------------------------------------------


def test_a_checkpoint_starts_a_new_run_that_names_it(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    folder = run_folder(steps=(10, 20), status="completed")
    before = listing(folder)
    root = folder / "checkpoints"
    for text in (root / "step_00000010", root / "last"):
        assert cli.train([f"resume={text}", "optimizer.lr=0.5"]) == 0
    first, second = launched
    assert first.checkpoint == first.parent == str(root / "step_00000010")
    assert second.checkpoint == second.parent == str(root / "step_00000020")
    assert not first.resumed
    assert len({first.run_folder, second.run_folder, str(folder)}) == 3
    assert Path(first.run_folder).parent == folder.parent
    assert first.config["optimizer"]["lr"] == 0.5
    assert first.config["model"] == read_yaml(folder / "config.yaml")["model"]
    assert first.overrides == [*TYPED[:-1], "optimizer.lr=0.5"]
    assert first.notes[0] == f"starts from step 10 of {root / 'step_00000010'} (of the run then)"
    (note,) = (note for note in first.notes if note.startswith("differs from"))
    assert note.startswith("differs from the run of the checkpoint: torch: 2.0.0 -> ")
    child = run_folder("child", started="2026-01-03T00:00:00+00:00")
    record = json.loads((child / "provenance.json").read_text())
    (child / "provenance.json").write_text(json.dumps({**record, "parent": first.parent}))
    assert cli.train([f"resume={child}"]) == 0
    assert (launched[-1].resumed, launched[-1].parent) == (True, first.parent), "it goes on being a child"
    assert listing(folder) == before, "nothing but resume=<run folder> writes into a run's folder"


def test_a_checkpoint_of_an_object_store(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    folder, memory = run_folder(steps=(10,)), MemoryFileSystem()
    memory.put(str(folder / "checkpoints"), "/bucket/a-run", recursive=True)
    try:
        assert cli.train(["resume=memory://bucket/a-run/step_00000010"]) == 0
        assert launched[0].parent == launched[0].checkpoint == "memory://bucket/a-run/step_00000010"
        assert not launched[0].resumed
    finally:
        memory.rm("/bucket", recursive=True)


# ---- the newest run ------------------------------------------------------------------------------------------------


def test_last_is_the_newest_run_of_the_experiment_by_its_start(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    oldest = run_folder("20260103-000000-cccc", started="2026-01-01T00:00:00+00:00")  # its name is no date of its start
    newest = run_folder("20260102-000000-bbbb", started="2026-01-02T00:00:00+00:00")
    os.utime(newest, (1, 1))
    (oldest / "touched").write_text("")
    assert cli.train(["resume=last", "trainer.max_steps=500"]) == 0
    assert (launched[-1].run_folder, launched[-1].config["trainer"]["max_steps"]) == (str(newest), 500)
    assert launched[-1].config["optimizer"]["lr"] == 0.25

    # Without a record of its own, a run began when its name says.
    (newest / "provenance.json").write_text("{")
    assert cli.train(["resume=last"]) == 0
    assert launched[-1].run_folder == str(newest)

    # A run that was resumed is as old as its first attempt.
    old, new = (json.loads((oldest / "provenance.json").read_text()) for _ in range(2))
    (oldest / "provenance.json").write_text(
        json.dumps(with_attempts({**new, "start_time": "2026-02-02T00:00:00+00:00"}, old))
    )
    assert cli.train(["resume=last"]) == 0
    assert launched[-1].run_folder == str(newest)


def test_last_passes_over_what_has_nothing_and_says_so(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    whole = run_folder("20260101-000000-aaaa", started="2026-01-01T00:00:00+00:00")
    empty = run_folder("20260102-000000-bbbb", steps=(), status="failed", started="2026-01-02T00:00:00+00:00")
    torn = run_folder("20260103-000000-cccc", steps=(10,), started="2026-01-03T00:00:00+00:00")
    (torn / "checkpoints" / "step_00000010" / "manifest.json").write_text("{")
    early = whole.with_name("20260104-000000-dddd")
    (early / "ranks").mkdir(parents=True)
    (whole.with_name("notes")).mkdir()
    evaluated = run_folder("20260105-000000-eeee", steps=(), status="completed", started="2026-01-05T00:00:00+00:00")
    (evaluated / "provenance.json").write_text(
        json.dumps({"action": "eval", "start_time": "2026-01-05T00:00:00+00:00"})
    )
    assert cli.train(["resume=last"]) == 0
    assert launched[0].run_folder == str(whole)
    (note,) = (note for note in launched[0].notes if note.startswith("newer runs passed over: "))
    for folder, reason in ((early, "before it wrote"), (torn, "manifest.json: "), (empty, "there is no checkpoint in")):
        assert f"{folder.name} (" in note
        assert reason in note
    assert "notes" not in note
    assert evaluated.name not in note


def test_last_looks_where_a_new_run_would_go(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = run_folder()
    said = refused(tmp_path, capsys, "resume=last", "experiment_name=other")
    assert said.startswith(f"resume=last: {tmp_path / 'outputs' / 'other'} holds no run; type resume=<run folder>")
    moved = tmp_path / "elsewhere" / "mine"
    moved.parent.mkdir()
    folder.parent.rename(moved)
    assert cli.train(["resume=last", f"output_root={moved.parent}", "experiment_name=mine"]) == 0
    assert launched[0].run_folder == str(moved / folder.name)


# ---- what is wrong -------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_and_changes_nothing(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = run_folder("whole")
    none = run_folder("none", steps=())
    torn = run_folder("torn", steps=(10,))
    (torn / "checkpoints" / "step_00000010" / "__0_0.distcp").write_bytes(b"y" * 100)
    newer = run_folder("newer", steps=(10,))
    config = read_yaml(newer / "config.yaml")
    ahead = checkpoint(Store(newer / "checkpoints"), 20, config=config, overrides=TYPED, version=9)
    lost = run_folder("lost")
    (lost / "overrides.yaml").unlink()
    broken = run_folder("broken")
    (broken / "config.yaml").write_text("a: [")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("hello")
    foreign = checkpoint(Store(tmp_path / "foreign"), 1, config=[], overrides=TYPED)  # type: ignore[arg-type]
    evil = checkpoint(
        Store(tmp_path / "evil"), 1, config={}, overrides=["callbacks.x._target_=os.system", "plugins=[os]"]
    )
    nested = checkpoint(Store(tmp_path / "nested"), 1, config=config, overrides=[["a"]])  # type: ignore[list-item]

    cases: list[tuple[list[str], str]] = [
        (["resume="], "a run folder, a checkpoint, or last is needed"),
        ([f"resume={tmp_path / 'missing'}"], "missing"),
        ([f"resume={tmp_path / 'a_file'}"], "a_file"),
        ([f"resume={tmp_path / 'empty'}"], "empty"),
        (["resume=nosuch://a/b"], "nosuch"),
        ([f"resume={none}"], f"there is no checkpoint in {none / 'checkpoints'}; type rerun={none}"),
        ([f"resume={torn}"], "step_00000010 (__0_0.distcp: checksum differs"),
        ([f"resume={torn / 'checkpoints' / 'step_00000010'}"], "__0_0.distcp: checksum differs"),
        ([f"resume={newer}"], "has format 9, this shardwise reads up to 1"),
        ([f"resume={ahead}"], "has format 9, this shardwise reads up to 1"),
        ([f"resume={lost}"], "is no run folder: one holds overrides.yaml and config.yaml"),
        ([f"resume={broken}"], "config.yaml is damaged"),
        ([f"resume={foreign}"], "state.json is damaged: the configuration of the run"),
        ([f"resume={nested}"], "state.json is damaged: a list of overrides"),
        ([f"resume={evil}"], "callbacks.x._target_=os.system: package 'os' is not allowed here"),
        (["resume=last", "experiment_name=nothing"], f"{tmp_path / 'outputs' / 'nothing'} holds no run"),
        ([f"resume={whole}", f"resume={whole}"], "one run can be repeated at a time"),
        ([f"resume={whole}", f"rerun={whole}"], "one run can be repeated at a time"),
        ([f"resume={whole}", "-m", "seed=1,2"], "continues one run: leave -m out"),
        ([f"+resume={whole}"], f"type resume={whole}"),
        ([f"resume={whole}", "init_from=a.safetensors"], "a checkpoint brings the weights"),
        ([f"resume={whole}", "trainer.devicse=2"], "did you mean 'devices'"),
        ([f"resume={whole}", "batch.global_size=33", "batch.micro_size=2"], "batch.micro_size=2"),
        ([f"resume={whole}", "model.widht=3"], "model.widht"),
        ([f"resume={whole / 'checkpoints' / 'step_00000020'}", f"output_root={tmp_path / 'a_file'}"], "output_root="),
    ]
    for argv, words in cases:
        said = refused(tmp_path, capsys, *argv)
        assert words in said, argv
        assert len(said) < 600, said
    assert launched == []


def test_a_folder_without_permission_is_one_line(
    run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder()
    root = os.geteuid() == 0
    folder.chmod(0)
    try:
        if root:
            os.seteuid(65534)
        for text in (folder, folder / "checkpoints" / "step_00000020"):
            assert cli.train([f"resume={text}"]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert os.strerror(errno.EACCES) in err
            assert err.count("\n") == 1, err
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_a_run_that_is_running_is_not_resumed(
    run_folder: Callable[..., Path], launched: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whoever holds the folder is named; once it is killed, nothing holds it any more, not even a child it has left."""
    folder = run_folder()
    code = f"""
        import multiprocessing, os, sys, time
        from dataclasses import replace
        from pathlib import Path
        from shardwise.job import in_run_folder, make_job
        from shardwise.config import from_plain
        from shardwise.resolve import World

        world = World(1, 1, "cpu", "in-process", "")
        job = make_job(from_plain({{}}), world, experiment="x", overrides=[], command=[])
        with in_run_folder(replace(job, run_folder={str(folder)!r}, resumed=True)):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            print(child.pid, flush=True)
            time.sleep(60)
        """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        for argv in ([f"resume={folder}"], ["resume=last"]):
            said = refused(tmp_path, capsys, *argv)
            assert f": process {process.pid} on " in said
            assert f"trains in {folder}" in said
        process.kill()
        process.wait()
        os.kill(child, 0)
        assert cli.train([f"resume={folder}"]) == 0
    finally:
        process.kill()
        os.kill(child, 9)
        process.stdout.close()
    assert len(launched) == 1
    assert not (folder / HOLDER).exists()
    assert (folder / LOCK).exists()


def test_a_new_run_holds_its_folder_and_follows_no_link_there(tmp_path: Path) -> None:
    world = World(num_nodes=1, devices=1, accelerator="cpu", launch="in-process", reason="")
    job = make_job(from_plain({"output_root": str(tmp_path)}), world, experiment="x", overrides=[], command=[])
    with in_run_folder(job) as made:
        folder = Path(made.run_folder)
        assert (folder / "ranks").is_dir()
        again = Job(**{**asdict(made), "resumed": True})
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "), in_run_folder(again):
            pass
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (folder / HOLDER).symlink_to(mine)
    with in_run_folder(again):
        pass
    assert mine.read_text() == "precious"


# ---- exit statuses, records and rules ------------------------------------------------------------------------------


def test_a_preempted_run_asks_to_be_started_again(run_folder: Callable[..., Path], launched: list[Job]) -> None:
    folder = run_folder()
    assert cli.train([*TYPED, "seed=75"]) == PREEMPTED == 75
    assert cli.train([f"resume={folder}", "seed=75"]) == PREEMPTED
    assert [job.resumed for job in launched] == [False, True]


def test_a_failed_run_with_a_checkpoint_says_how_to_resume_it(
    run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.launch import RanksFailedError

    folder, without = run_folder("with"), run_folder("without")

    def fail(job: Job) -> dict[str, Any]:
        if job.run_id == "without":
            for name in ("step_00000010", "step_00000020"):
                Store(folder.with_name("without") / "checkpoints").remove(name)
        raise RanksFailedError("rank 1 was ended by SIGKILL", cause="rank 1 was ended by SIGKILL")

    monkeypatch.setattr("shardwise.launch.launch", fail)
    assert cli.train([f"resume={folder}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: rank 1 was ended by SIGKILL\nnext:\n  ")
    assert error.endswith(f" resume={folder}\n")
    assert cli.train([f"resume={without}"]) == 1
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL\n"


def test_the_record_of_a_run_keeps_its_attempts() -> None:
    def record(number: int, diff: str) -> dict[str, Any]:
        return {"command": [number], "git": {"commit": "c", "diff": diff, "diff_sha256": f"hash of {diff}"}}

    told = record(1, "a")
    for number, diff in ((2, "a"), (3, "b")):
        told = with_attempts(record(number, diff), json.loads(json.dumps(told)))
    assert told["command"] == [3]
    assert [one["command"] for one in told["attempts"]] == [[1], [2]]
    assert [one["git"].get("diff") for one in told["attempts"]] == [None, "a"]
    assert "attempts" not in told["attempts"][1]
    for damaged in (None, 5, "x"):
        assert with_attempts(record(1, "a"), damaged) == record(1, "a")
    assert with_attempts(record(1, "a"), {"attempts": 5, "git": 7})["attempts"] == [{"git": 7}]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"checkpoint": {"keep_best": 2}}, "checkpoint.keep_best=2, and no metric says which are best"),
        ({"checkpoint": {"monitor": "val/loss"}}, "type checkpoint.keep_best=1"),
        ({"launch": {"time_limit": "90"}}, "launch.time_limit=90: DD:HH:MM:SS is needed"),
    ],
)
def test_rules_of_checkpoints(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(from_plain({"optimizer": {"lr": 0.1}, **overrides}), gpus=0)
    assert said in str(caught.value)


def test_looking_for_the_words_takes_no_time() -> None:
    """Every command line passes there."""
    start = time.perf_counter()
    assert Repeated.from_argv(["seed=1", "extra.resume=x", "trainer.max_steps=5"]) is None
    assert time.perf_counter() - start < 0.1
