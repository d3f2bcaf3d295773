"""Damaged checkpoints and a full disk, from the command line: named, an older one is used, and nothing is deleted."""

import contextlib
import json
import resource
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise import cli
from shardwise.checkpoint.store import Store
from shardwise.job import Job
from trials import Field, difference, lines
from warm import Warm

NAMES = ["step_00000002", "step_00000004", "step_00000006"]
TYPED = ["experiment_name=damage", "precision=64-true", "logger=none", "trainer.log_every_n_steps=1", "model=mlp"]
TYPED += ["model.dropout=0.2", "batch.global_size=8", "checkpoint.every_minutes=null", "checkpoint.every_n_steps=2"]
TYPED += [
    "data=imagefolder",
    "data.path=images",
    "data.image_size=8",
    "data.num_workers=0",
    "checkpoint.keep_last=3",
    "schedule=constant",
]
TWO = ["strategy=fsdp", "trainer.devices=2"]


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    mark = uuid.uuid4().hex
    with Warm(mark=mark) as warm:
        yield Field(tmp_path_factory.mktemp("field"), warm, mark)


def run(field: Field, *argv: str, status: int = 0, target: str = "shardwise.cli:train", **more: Any) -> tuple[str, str]:
    """(stdout, stderr) of a command, which ends with this status."""
    arguments: list[Any] = [list(argv), *([more] if more else [])]
    process = field.warm.start(target, arguments, cwd=field.folder, out=field.folder / "out", err=field.folder / "err")
    assert process.wait(120) == status, field.output()
    field.all_gone()
    return (field.folder / "out").read_text(), (field.folder / "err").read_text()


def only_run(root: Path) -> Path:
    (folder,) = (root / "damage").iterdir()
    return folder


@pytest.fixture(scope="module")
def saved(field: Field) -> Path:
    """The folder of a run of six steps on two ranks, with a checkpoint of every other one."""
    run(field, *TYPED, *TWO, "trainer.max_steps=6", f"output_root={field.folder}/saved")
    return only_run(field.folder / "saved")


@pytest.fixture(scope="module")
def longer(field: Field, saved: Path) -> Path:
    """The same run with two steps more, which nothing has befallen."""
    folder = copied(saved, field.folder / "longer")
    run(field, f"resume={folder}", "trainer.max_steps=8")
    return folder


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would be launched."""
    jobs: list[Job] = []

    def launch(job: Job) -> dict[str, Any]:
        jobs.append(job)
        return {"status": "completed", "steps": 8, "metrics": {}}

    monkeypatch.setattr("shardwise.launch.launch", launch)
    return jobs


def copied(folder: Path, root: Path) -> Path:
    return Path(shutil.copytree(folder, root / "damage" / folder.name))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    path.unlink()


KINDS: list[Callable[[Path], None]] = [truncate, empty, flip, remove]
MORE = pytest.mark.torture
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "manifest.json"]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(truncate, marks=MORE), pytest.param(empty, marks=MORE), flip, remove])
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(
    field: Field, saved: Path, launched: list[Job], kind: Callable[[Path], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(field.folder)
    assert sorted(path.name for path in (saved / "checkpoints" / NAMES[2]).iterdir()) == sorted(FILES)
    for file in FILES:
        folder = copied(saved, tmp_path / file.strip("."))
        kind(folder / "checkpoints" / NAMES[2] / file)
        before = everything(folder / "checkpoints")
        typed = ["experiment_name=damage", f"output_root={folder.parents[1]}", "trainer.max_steps=8"]
        assert cli.train(["resume=last", *typed]) == 0, capsys.readouterr().err
        job = launched.pop()
        assert job.checkpoint == str(folder / "checkpoints" / NAMES[1]), file
        (note,) = [note for note in job.notes if "not whole" in note]
        assert note.startswith(f"newer, but not whole, and left out: {NAMES[2]} ({file}: "), note
        assert "\n" not in note
        capsys.readouterr()
        assert everything(folder / "checkpoints") == before, f"{file}: something was written, or deleted"
        if file != FILES[KINDS.index(kind)]:  # composing takes its time
            continue
        # Named itself, it is refused, and the one to type instead is named.
        named = folder / "checkpoints" / NAMES[2]
        assert cli.train([f"resume={named}"]) == 2
        out, errors = capsys.readouterr()
        assert out == ""
        assert errors.count("\n") == 1, errors
        assert errors.startswith(f"error: {named} is damaged or incomplete: {file}: "), errors
        assert NAMES[1] in errors, errors
        assert launched == []
        assert everything(folder / "checkpoints") == before, f"{file}: something was written, or deleted"


@pytest.mark.slow
@pytest.mark.parametrize(("files", "name"), [(["__1_0.distcp"], NAMES[1]), ([*FILES, "older"], NAMES[0])])
def test_a_run_with_a_damaged_checkpoint_goes_on_from_an_older_one(
    field: Field, saved: Path, longer: Path, tmp_path: Path, files: list[str], name: str
):
    folder = copied(saved, tmp_path)
    if "older" in files:
        remove(folder / "checkpoints" / NAMES[2] / "manifest.json")
        truncate(folder / "checkpoints" / NAMES[1] / "state.json")
    else:
        flip(folder / "checkpoints" / NAMES[2] / files[0])
    out, _ = run(field, "resume=last", "experiment_name=damage", f"output_root={tmp_path}", "trainer.max_steps=8")
    assert f"resumed from step {int(name[-8:])} of {folder}" in out
    assert f"{NAMES[2]} (" in out
    assert lines(folder / "metrics.jsonl") == lines(longer / "metrics.jsonl")
    last = "step_00000008"
    # Beside that, a run that is made longer counts the epoch in whose midst it had ended.
    assert set(difference(f"{folder}/checkpoints/{last}", f"{longer}/checkpoints/{last}")) <= {"state.json"}
    store = Store(folder / "checkpoints")
    assert store.last() == last
    assert [name for name in store.names() if store.problems(name)] == []


# ---- a full disk ---------------------------------------------------------------------------------------------------


def train_within(argv: list[str], limits: dict[str, int]) -> int:
    """The command line, in a process (and its ranks) that may write no file above so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["bytes"], resource.RLIM_INFINITY))
    return cli.train(argv)


@contextlib.contextmanager
def small_disk(place: Path, *, kilobytes: int) -> Iterator[bool]:
    """A tmpfs of this size at ``place``, where that is allowed; says whether it is."""
    import subprocess

    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def check_failed(field: Field, errors: str, store: Store, folder: Path, whole: list[str], reason: str) -> None:
    """One line that names the place and the reason, and the older checkpoints as they were."""
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: "), errors
    assert str(store.url) in errors, errors
    assert reason in errors, errors
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert store.names() == whole
    assert all(store.problems(name) == [] for name in whole)
    assert store.last() == whole[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "background"),
    [pytest.param([], "true", marks=MORE), pytest.param(TWO, "false", marks=MORE), (TWO, "true")],
)
def test_a_limit_in_the_midst_of_a_save(field: Field, tmp_path: Path, layout: list[str], background: str):
    """No file may grow to the size of a checkpoint's; then it may, and the run goes on where it was."""
    typed = [*TYPED, *layout, f"checkpoint.background={background}", "model.width=64"]
    run(field, *typed, "trainer.max_steps=4", f"output_root={tmp_path}")
    folder = only_run(tmp_path)
    store = Store(folder / "checkpoints")
    size = min(path.stat().st_size for path in (folder / "checkpoints" / NAMES[1]).glob("*.distcp"))
    limited = {"status": 2, "target": "test_damage:train_within", "bytes": size - 1000}
    _, errors = run(field, f"resume={folder}", "trainer.max_steps=8", **limited)
    check_failed(field, errors, store, folder, NAMES[:2], "File too large")
    out, _ = run(field, f"resume={folder}")
    assert f"resumed from step 4 of {folder}" in out
    assert json.loads((folder / "result.json").read_text())["status"] == "completed"
    assert [line["step"] for line in lines(folder / "metrics.jsonl") if "train/loss" in line] == list(range(1, 9))
    assert store.last() == "step_00000008"
    assert store.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param("false", marks=MORE), "true"])
def test_a_full_disk_in_the_midst_of_a_save(field: Field, tmp_path: Path, background: str):
    """The second checkpoint does not fit beside the first; then somebody makes space, and the run goes on."""
    disk = tmp_path / "disk"
    with small_disk(disk, kilobytes=600) as mounted:
        if not mounted:
            pytest.skip("no file system can be mounted here")
        typed = [*TYPED, "model.width=64", f"checkpoint.folder={disk}", f"checkpoint.background={background}"]
        # 64 * (192 + 64 + ...) parameters with two moments of 8 bytes: about 400 kB
        _, errors = run(field, *typed, "trainer.max_steps=8", f"output_root={tmp_path}", status=2)
        folder = only_run(tmp_path)
        store = Store(disk / folder.name)
        check_failed(field, errors, store, folder, NAMES[:1], "No space left on device")
        assert (disk / folder.name / f"{NAMES[1]}.partial").is_dir()
        shutil.copytree(disk / folder.name, tmp_path / "kept")
        with small_disk(tmp_path / "larger", kilobytes=8000):  # `mount -o remount`, but for what is there
            shutil.copytree(tmp_path / "kept", tmp_path / "larger" / folder.name)
            place = f"checkpoint.folder={tmp_path / 'larger'}"
            config = folder / "config.yaml"
            config.write_text(config.read_text().replace(str(disk), str(tmp_path / "larger")))
            out, _ = run(field, f"resume={folder}", place)
            assert f"resumed from step 2 of {folder}" in out
            larger = Store(tmp_path / "larger" / folder.name)
            assert larger.last() == "step_00000008"
            assert larger.leftovers() == []
