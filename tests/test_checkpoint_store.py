"""Checkpoints in a store: published whole or not at all, damage named, the newest whole one found."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash

from shardwise.checkpoint import filesystems
from shardwise.checkpoint.find import find_checkpoint, locate, newest_whole
from shardwise.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    NEWER,
    SEAL,
    dump_manifest,
    parse_manifest,
    printable,
    step_name,
    step_of,
)
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.retention import best_first, retained
from shardwise.checkpoint.store import Store, checkpoints_of, checksum
from shardwise.errors import ConfigError

FILES = {".metadata": b"index " * 20, "__0_0.distcp": bytes(range(256)) * 16, "state.json": b'{"step": 1}'}
MORE = {"run_id": "r1", "strategy": "ddp", "world_size": 1, "mesh": {"tp": 1}, "metrics": {"val/loss": 0.5}}


def save(store: Store, step: int, *, files: dict[str, bytes] = FILES, **more: Any) -> str:
    """Write and publish a small checkpoint, as a run does."""
    name = step_name(step)
    place = store.begin(name)
    system, path = fsspec.core.url_to_fs(place)
    for file, data in files.items():
        with system.open(f"{path}/{file}", "wb") as stream:
            stream.write(data)
    sums = {file: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)} for file, data in files.items()}
    store.publish(name, {**MORE, "step": step, "files": sums, **more})
    return name


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield Store(tmp_path / "checkpoints")
        return
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield Store("memory://run/checkpoints")
    system.store.clear()
    system.pseudo_dirs[:] = [""]


# ---- what a run does -----------------------------------------------------------------------------------------------


def test_published_checkpoints_are_listed_whole_and_last_follows(store: Store) -> None:
    assert store.names() == []
    assert store.last() is None
    assert store.newest_whole() == (None, {})
    for step in (9, 100, 20):
        save(store, step)
    assert store.names() == ["step_00000009", "step_00000020", "step_00000100"]
    assert store.last() == "step_00000020"
    assert store.newest_whole() == ("step_00000100", {})
    assert store.problems("step_00000020") == []
    manifest = store.manifest("step_00000020")
    assert (manifest["step"], manifest["format_version"], manifest["run_id"]) == (20, FORMAT_VERSION, "r1")
    assert store.leftovers() == []


def test_what_is_not_published_is_no_checkpoint(store: Store) -> None:
    save(store, 1)
    place = store.begin("step_00000002")
    with fsspec.open(f"{place}/__0_0.distcp", "wb") as stream:
        stream.write(b"half")
    name, skipped = store.newest_whole()
    assert name == store.last() == "step_00000001"
    assert store.names() == ["step_00000001"]
    (problems,) = skipped.values()
    assert problems == ["manifest.json: this checkpoint was never finished"] or "missing" in problems[0]
    assert store.leftovers() == list(skipped)
    store.remove(store.leftovers()[0])
    assert store.newest_whole() == ("step_00000001", {})


def test_begin_removes_only_what_was_left_of_its_own_place(store: Store) -> None:
    save(store, 1)
    for step in (2, 3):
        with fsspec.open(f"{store.begin(step_name(step))}/old", "wb") as stream:
            stream.write(b"left")
    before = store.leftovers()
    save(store, 3)
    assert store.leftovers() == before[:1]
    assert store.problems("step_00000003") == []
    system, path = fsspec.core.url_to_fs(store.url_of("step_00000003"))
    assert not system.exists(f"{path}/old")


def test_publishing_again_replaces_it(store: Store) -> None:
    for data in (b"old", b"newer", b"newest"):
        save(store, 5, files={"__0_0.distcp": data, "state.json": b"{}"})
        assert store.names() == ["step_00000005"]
        assert store.newest_whole() == ("step_00000005", {})
        assert store.manifest("step_00000005")["files"]["__0_0.distcp"]["bytes"] == len(data)
        assert store.leftovers() == []


def test_a_file_that_is_short_or_not_there_keeps_it_from_being_published(store: Store) -> None:
    save(store, 1)
    place = store.begin("step_00000002")
    with fsspec.open(f"{place}/a", "wb") as stream:
        stream.write(b"12")
    sums = {"a": {"bytes": 4, "xxh3_128": "0" * 32}, "b": {"bytes": 1, "xxh3_128": "0" * 32}}
    with pytest.raises(OSError, match=r"is not published: a: 2 bytes, 4 expected; b: missing"):
        store.publish("step_00000002", {**MORE, "files": sums})
    assert (store.last(), store.names()) == ("step_00000001", ["step_00000001"])


def test_removing(store: Store) -> None:
    save(store, 1)
    save(store, 2)
    store.set_best("step_00000001")
    assert store.best() == "step_00000001"
    store.remove("step_00000001")
    store.remove("step_00000001")
    assert store.names() == ["step_00000002"]
    assert store.best() is None
    assert store.leftovers() == []
    store.remove("step_00000002")
    assert store.last() is None
    with pytest.raises(ValueError, match="no checkpoint's name"):
        store.remove("..")


def test_check_writable_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.check_writable()
    assert store.names() == store.leftovers() == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/checkpoints cannot be written to \(Not a directory\)"):
        Store(tmp_path / "file" / "checkpoints").check_writable()


def test_the_checksum_is_that_of_stream_path_and_url(tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20 + 17)
    (tmp_path / "x").write_bytes(data)
    expected = xxhash.xxh3_128_hexdigest(data)
    assert checksum(tmp_path / "x") == checksum((tmp_path / "x").as_uri()) == expected
    with (tmp_path / "x").open("rb") as stream:
        assert checksum(stream) == expected


# ---- damage --------------------------------------------------------------------------------------------------------


def damaged(data: bytes, kind: str) -> bytes | None:
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
    return {"truncated": data[:-3], "emptied": b"", "bit-flipped": flipped, "removed": None}[kind]


@pytest.mark.parametrize("kind", ["truncated", "emptied", "bit-flipped", "removed"])
@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_damage_is_named_and_the_older_one_used(store: Store, file: str, kind: str) -> None:
    save(store, 1)
    save(store, 2)
    system, path = fsspec.core.url_to_fs(store.url_of("step_00000002"))
    data = damaged(system.cat_file(f"{path}/{file}"), kind)
    system.rm_file(f"{path}/{file}")
    if data is not None:
        system.pipe_file(f"{path}/{file}", data)
    before = {name: system.cat_file(name) for name in system.find(path)}
    (problem,) = store.problems("step_00000002")
    assert problem.startswith(f"{file}: ")
    expected = {"removed": "missing", "emptied": "0 bytes", "truncated": "bytes, ", "bit-flipped": "checksum differs"}
    if file != MANIFEST or kind in ("removed", "emptied"):
        assert expected[kind] in problem
    assert store.newest_whole() == ("step_00000001", {"step_00000002": [problem]})
    by_size = store.problems("step_00000002", contents=False)
    assert by_size == ([] if kind == "bit-flipped" and file != MANIFEST else [problem])
    assert {name: system.cat_file(name) for name in system.find(path)} == before  # reading deletes nothing


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    data, intact = (tmp_path / save(store, 1) / MANIFEST).read_bytes(), store.manifest("step_00000001")
    for place in range(len(data)):
        for bit in (1, 2, 4, 8, 16, 32, 64, 128):
            found, fault = parse_manifest(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            # A digit may lie beyond what a number holds, and then it says the same.
            assert (found is None and fault) or found == intact
            assert NEWER not in str(fault)  # it is not taken for another format either


def sealed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A manifest as a stranger could write it: anything, under a checksum that is right."""
    sums = {name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)} for name, data in FILES.items()}
    plain = json.loads(dump_manifest({**MORE, "step": 1, "files": sums}))
    del plain[SEAL]
    change(plain)
    seal = xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())
    return json.dumps({**plain, SEAL: seal}).encode()


ENTRY = {"bytes": 3, "xxh3_128": "0" * 32}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.update(format_version=2), "has format 2, this shardwise reads up to 1"),
        (lambda m: m.update(format_version=True), "its format_version is no whole number above 0"),
        (lambda m: m.update(format_version=0), "its format_version is no whole number above 0"),
        (lambda m: m.update(step=-1), "its step is not a whole number from 0"),
        (lambda m: m.update(step="1"), "its step is not a whole number from 0"),
        (lambda m: m.pop("step"), "has no step"),
        (lambda m: m.update(time="now"), "its time is not a number"),
        (lambda m: m.update(run_id=3), "its run_id is not a text"),
        (lambda m: m.update(metrics={"a": "b"}), "its metrics is not a mapping of names to numbers"),
        (lambda m: m.update(metrics=[1]), "its metrics is not a mapping of names to numbers"),
        (lambda m: m.update(mesh={"tp": 1.5}), "its mesh is not a mapping of axes to sizes"),
        (lambda m: m.update(files={}), "lists no files"),
        (lambda m: m.update(files=["a"]), "lists no files"),
        (lambda m: m["files"].update(a={"bytes": 3}), "gives no checksum for 'a'"),
        (lambda m: m["files"].update(a={"bytes": -3, "xxh3_128": "0" * 32}), "gives no size for 'a'"),
        (lambda m: m["files"].update(a={"bytes": 3, "xxh3_128": "x"}), "gives no checksum for 'a'"),
        *(
            ((lambda m, name=name: m["files"].update({name: ENTRY})), "which is no file of this folder")
            for name in ("/etc/passwd", "../state.json", "a/../../b", "", ".", "a//b", "..\\b", "C:x", "a\0b", MANIFEST)
        ),
    ],
)
def test_a_manifest_is_trusted_with_nothing(tmp_path: Path, change: Callable, problem: str) -> None:
    store = Store(tmp_path)
    (tmp_path / save(store, 1) / MANIFEST).write_bytes(sealed(change))
    (found,) = store.problems("step_00000001")
    assert found.startswith("manifest.json: ")
    assert problem in found
    assert store.newest_whole()[0] is None
    with pytest.raises(ConfigError, match=r"is no whole checkpoint: manifest\.json: "):
        store.manifest("step_00000001")


def test_a_sealed_manifest_that_is_right_is_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    data = sealed(lambda m: m.update(unknown_key=[1, {"a": None}], metrics={"x": float("nan")}))
    (tmp_path / save(store, 1) / MANIFEST).write_bytes(data)
    assert store.problems("step_00000001") == []


@pytest.mark.parametrize("text", [b"[]", b"{}", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"step": "\\ud800"}'])
def test_a_manifest_that_is_something_else(tmp_path: Path, text: bytes) -> None:
    store = Store(tmp_path)
    (tmp_path / save(store, 1) / MANIFEST).write_bytes(text)
    (found,) = store.problems("step_00000001")
    assert found.startswith("manifest.json: ")
    assert found.isprintable()


def test_names_from_a_file_cannot_drive_the_terminal(tmp_path: Path) -> None:
    store = Store(tmp_path)
    data = sealed(lambda m: m["files"].update({"\x1b]0;owned\x07\u202e": ENTRY}))
    (tmp_path / save(store, 1) / MANIFEST).write_bytes(data)
    (found,) = store.problems("step_00000001")
    assert found == "\\x1b]0;owned\\x07\\u202e: missing"
    assert printable("plain ünïcode 1/2") == "plain ünïcode 1/2"


def test_a_listed_file_is_a_regular_one_inside_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / save(store, 1)
    data, path = FILES["__0_0.distcp"], folder / "__0_0.distcp"
    path.unlink()
    (folder / "inside").write_bytes(data)
    path.symlink_to("inside")
    assert store.problems("step_00000001") == []
    path.unlink()
    (tmp_path / "outside").write_bytes(data)
    path.symlink_to(tmp_path / "outside")
    assert "leads out of the folder" in store.problems("step_00000001")[0]
    path.unlink()
    path.symlink_to("__0_0.distcp")
    assert store.problems("step_00000001")[0].startswith("__0_0.distcp: ")
    path.unlink()
    os.mkfifo(path)  # would wait for ever if it were opened
    assert store.problems("step_00000001") == ["__0_0.distcp: cannot be used: no regular file"]
    path.unlink()
    path.mkdir()
    assert store.problems("step_00000001") == ["__0_0.distcp: cannot be used: no regular file"]


def test_files_besides_the_listed_ones_and_foreign_folders_do_not_matter(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / save(store, 1) / "notes.txt").write_text("mine")
    for foreign in ("step_1", "step_00000009.bak", "epoch=3", ".hidden"):
        (tmp_path / foreign).mkdir()
    (tmp_path / "step_00000007").write_text("a file")
    assert store.newest_whole() == ("step_00000001", {})
    assert store.leftovers() == []


@pytest.mark.parametrize(
    "pointer", [b"", b"step_00000009\n", b"../step_00000001", b"\xff", b"x" * 5000, b"step_00000001.partial"]
)
def test_a_pointer_to_nothing_is_none(tmp_path: Path, pointer: bytes) -> None:
    store = Store(tmp_path)
    save(store, 1)
    (tmp_path / "last").write_bytes(pointer)
    assert store.last() is None


def test_reading_while_checkpoints_come_and_go(tmp_path: Path) -> None:
    """A reader never fails, and always finds a whole one."""
    store = Store(tmp_path)
    save(store, 1)
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_checkpoint_store import Store, save\n"
        "store = Store(sys.argv[1])\n"
        "for step in range(60):\n"
        "    save(store, step // 3 + 1)\n"
        "    for name in store.names()[:-1]: store.remove(name)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent)])
    looks = 0
    while writer.poll() is None:
        assert store.newest_whole()[0] is not None
        store.last()
        store.leftovers()
        looks += 1
    assert writer.returncode == 0
    assert looks > 10
    assert store.names() == ["step_00000020"]


# ---- crashes -------------------------------------------------------------------------------------------------------

CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open")
"""What changes a local file system, or makes a change last; `open` is the builtin."""


def count_calls(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> list[str]:
    """Let `act` happen instead of the `at`-th call that changes the file system; the list grows with the calls."""
    calls: list[str] = []

    def wrapped(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(calls) == at:
                if name == "fsync":
                    lose(args[0])
                act()
            calls.append(name)
            return original(*args, **kwargs)

        return call

    def lose(descriptor: int) -> None:
        """What was written, but not made to last, may be there in part."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            os.truncate(path, os.path.getsize(path) // 2)

    for name in CALLS[:-1]:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))
    monkeypatch.setattr(filesystems, "open", wrapped("open", open), raising=False)
    return calls


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a process in which `work` runs; 9 if it ended in the middle as by a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except OSError:
            os._exit(5)
        except BaseException:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(store: Store, situation: str) -> None:
    save(store, 1)
    save(store, 2)
    if situation == "again":
        save(store, 3, files={name: b"old " + data for name, data in FILES.items()})
    store.set_best("step_00000001")


def publish(store: Store) -> None:
    save(store, 3)


def remove(store: Store) -> None:
    store.remove("step_00000002")


def set_best(store: Store) -> None:
    store.set_best("step_00000002")


OPERATIONS = [("new", publish), ("again", publish), ("new", remove), ("again", remove), ("new", set_best)]


def check_after_crash(store: Store, situation: str, operation: Callable, *, finished: bool) -> None:
    """Whatever happened: the newest whole one is not older than it was, what is listed is whole, nothing dangles."""
    newest, skipped = store.newest_whole()
    assert newest is not None
    least = 3 if situation == "again" or (operation is publish and finished) else 2
    if operation is remove and situation == "new":
        least = 1
    assert step_of(newest) >= least, (newest, skipped)
    for name in store.names():
        if not (operation is remove and step_of(name) == 2):
            assert store.problems(name) == [], name
    assert store.names()[-1] == newest
    last, best = store.last(), store.best()
    assert best in ("step_00000001", "step_00000002") if operation is set_best else best == "step_00000001"
    if operation is remove and situation == "new":
        assert last in (None, "step_00000002")  # it was told to remove the last one
    else:
        assert last is not None
        assert store.problems(last) == []
        assert step_of(last) >= (3 if situation == "again" else 2)
    # A run that goes on is not hindered by what was left.
    save(store, 3)
    assert store.newest_whole() == ("step_00000003", {})
    assert store.last() == "step_00000003"
    for name in store.leftovers():
        store.remove(name)
    store.remove("step_00000002")
    assert store.names() == ["step_00000001", "step_00000003"]


@pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self/fd"), reason="needs fork and /proc")
@pytest.mark.parametrize("end", ["killed", "disk full"])
@pytest.mark.parametrize(("situation", "operation"), OPERATIONS)
def test_a_crash_at_any_moment_leaves_a_whole_one_locally(
    tmp_path: Path, situation: str, operation: Callable, end: str
) -> None:
    template = Store(tmp_path / "template")
    prepare(template, situation)

    def act() -> None:
        if end == "killed":
            os._exit(9)
        raise OSError(errno.ENOSPC, "No space left on device")

    for at in range(200):
        root = tmp_path / f"crash_{at}"
        shutil.copytree(tmp_path / "template", root)
        store = Store(root)

        def work(store: Store = store, at: int = at) -> None:
            with pytest.MonkeyPatch.context() as patch:
                count_calls(patch, at, act)
                operation(store)

        status = in_child(work)
        assert status in (0, 9 if end == "killed" else 5)
        check_after_crash(store, situation, operation, finished=status == 0)
        shutil.rmtree(root)
        if status == 0:
            break
    assert 3 <= at < 199  # every call has failed once


class CrashError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("situation", "operation"), OPERATIONS)
def test_a_crash_at_any_moment_leaves_a_whole_one_in_an_object_store(situation: str, operation: Callable) -> None:
    system = fsspec.filesystem("memory")
    writing = ("pipe_file", "rm_file", "cp_file", "rm", "_open")
    for at in range(200):
        system.store.clear()
        system.pseudo_dirs[:] = [""]
        store = Store("memory://run/checkpoints")
        prepare(store, situation)
        count, within = 0, False

        def wrapped(original: Callable, name: str, at: int = at) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count, within
                if (within and name != "rm_file") or (name == "_open" and "w" not in str(args[1:2])):
                    return original(*args, **kwargs)
                if count == at:
                    raise CrashError
                count += 1
                before, within = within, name != "rm"  # of `rm`, every file counts
                try:
                    return original(*args, **kwargs)
                finally:
                    within = before

            return call

        finished = False
        with pytest.MonkeyPatch.context() as patch:
            for name in writing:
                patch.setattr(system, name, wrapped(getattr(system, name), name))
            try:
                operation(store)
                finished = True
            except CrashError:
                pass
        check_after_crash(store, situation, operation, finished=finished)
        if finished:
            break
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    assert 1 <= at < 199


def test_a_full_disk_keeps_the_older_one(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs to be root)")
    try:
        store = Store(root)
        save(store, 1)
        with pytest.raises(OSError, match="No space left"):
            save(store, 2, files={"a": b"x" * 2**19, "state.json": b"{}"})
        assert store.newest_whole()[0] == store.last() == "step_00000001"
        assert "step_00000002.partial" in store.newest_whole()[1]
        # and if only the manifest does not fit any more
        store.remove("step_00000002.partial")
        place = Path(store.begin("step_00000003"))
        (place / "a").write_bytes(b"1")
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        (root / "filler").write_bytes(b"x" * free)
        sums = {"a": {"bytes": 1, "xxh3_128": xxhash.xxh3_128_hexdigest(b"1")}}
        with pytest.raises(OSError, match="No space left"):
            store.publish("step_00000003", {**MORE, "files": sums})
        assert store.newest_whole()[0] == store.last() == "step_00000001"
        (root / "filler").unlink()
        save(store, 3)
        assert store.newest_whole() == ("step_00000003", {})
    finally:
        subprocess.run(["umount", str(root)], check=True)


# ---- what is kept --------------------------------------------------------------------------------------------------


def keep(values: dict[int, float | None], **rules: Any) -> list[int]:
    return sorted(map(step_of, retained({step_name(step): value for step, value in values.items()}, **rules)))


def test_what_is_retained() -> None:
    values = {step: float(abs(step - 30)) for step in (100, 10, 20, 30, 40, 50)}
    assert keep(values, keep_last=2) == [50, 100]
    assert keep(values, keep_last=None) == [10, 20, 30, 40, 50, 100]
    assert keep(values, keep_last=1, keep_every_n_steps=20) == [20, 40, 100]
    assert keep(values, keep_last=1, keep_best=2) == [30, 40, 100]  # 20 and 40 are as good: the newer one stays
    assert keep(values, keep_last=1, keep_best=1, mode="max") == [100]
    assert keep(values, keep_last=1, keep_best=2, mode="max") == [50, 100]
    assert keep(values, keep_last=50, keep_best=50) == [10, 20, 30, 40, 50, 100]
    assert keep({}, keep_last=2) == []


def test_metrics_that_are_no_numbers_are_never_best() -> None:
    values = {10: float("nan"), 20: None, 30: 5.0, 40: float("inf"), 50: None}
    assert keep(values, keep_last=1, keep_best=1) == [30, 50]
    assert keep(values, keep_last=1, keep_best=5) == [30, 40, 50]
    assert best_first({step_name(step): value for step, value in values.items()}, mode="max")[0] == step_name(40)
    assert best_first({step_name(1): None}) == []


# ---- what a user types ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints 100 and 200."""
    folder = tmp_path / "outputs" / "digits" / "run-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("checkpoint:\n  folder: null\n")
    store = Store(folder / "checkpoints")
    save(store, 100)
    save(store, 200)
    store.set_best("step_00000100")
    return folder


def test_finding_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run / "checkpoints"
    for text, name in {
        str(run): "step_00000200",
        str(root): "step_00000200",
        f"{root}/": "step_00000200",
        str(root / "step_00000100"): "step_00000100",
        f"file://{root}/step_00000100": "step_00000100",
        str(root / "last"): "step_00000200",
        str(root / "best"): "step_00000100",
    }.items():
        found = find_checkpoint(text)
        assert (found.url, found.name, found.skipped) == (str(root / name), name, {}), text
    monkeypatch.chdir(root / "step_00000100")
    assert find_checkpoint(".").name == "step_00000100"
    shutil.copytree(root / "step_00000100", run / "my copy")
    assert find_checkpoint(str(run / "my copy")).url == str(run / "my copy")


def test_a_run_falls_back_and_says_so(run: Path) -> None:
    (run / "checkpoints" / "step_00000200" / "__0_0.distcp").write_bytes(b"short")
    found = find_checkpoint(str(run))
    assert found.name == "step_00000100"
    assert found.notes() == [
        "step_00000200 is damaged or incomplete: __0_0.distcp: 5 bytes, 4096 expected; step_00000100 is used"
    ]
    with pytest.raises(ConfigError) as error:
        find_checkpoint(str(run / "checkpoints" / "last"))
    assert "__0_0.distcp: 5 bytes, 4096 expected" in str(error.value)
    assert "the newest whole one here is " + str(run / "checkpoints" / "step_00000100") in str(error.value)


def test_where_the_checkpoints_of_a_run_are(run: Path, tmp_path: Path) -> None:
    assert checkpoints_of(run).url == str(run / "checkpoints")
    elsewhere = tmp_path / "elsewhere"
    (run / "config.yaml").write_text(f"checkpoint:\n  folder: {elsewhere}\n")
    assert checkpoints_of(run).url == str(elsewhere / "run-1")
    save(Store(elsewhere / "run-1"), 7)
    assert find_checkpoint(str(run)).name == "step_00000007"
    (run / "config.yaml").write_text("checkpoint:\n  folder: memory://bucket/x/\n")
    assert checkpoints_of(run).url == "memory://bucket/x/run-1"
    (run / "config.yaml").unlink()
    assert find_checkpoint(str(run)).name == "step_00000200"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("checkpoint:\n  folder: http://evil/x\n", "checkpoint.folder=http://evil/x, and a run folder may name"),
        ("checkpoint:\n  folder: 'simplecache::s3://x'\n", "checkpoint.folder=simplecache::s3://x"),
        ("checkpoint:\n  folder: [1]\n", "its checkpoint.folder is no text"),
        ("a: !!python/object/apply:os.system ['touch owned']\n", "config.yaml is damaged"),
        ("a: [\n", "config.yaml is damaged"),
    ],
)
def test_a_stranger_s_run_folder(run: Path, config: str, problem: str) -> None:
    (run / "config.yaml").write_text(config)
    with pytest.raises(ConfigError) as error:
        find_checkpoint(str(run))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("owned").exists()


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    root = run / "checkpoints"
    empty = tmp_path / "empty"
    empty.mkdir()
    (run / "checkpoints" / "step_00000300.partial").mkdir()
    fresh = tmp_path / "fresh"
    (fresh / "checkpoints").mkdir(parents=True)
    lost = tmp_path / "lost"
    shutil.copytree(run, lost)
    for path in lost.rglob("state.json"):
        path.unlink()
    newer = tmp_path / "newer"
    shutil.copytree(root, newer)
    (newer / "step_00000200" / MANIFEST).write_bytes(sealed(lambda m: m.update(format_version=2)))
    (tmp_path / "file").write_text("")
    (empty / "last").write_text("step_00000001\n")
    for text, expected in {
        "": "is no folder: type a path, or a URL",
        str(tmp_path / "nowhere"): "no such folder",
        str(tmp_path / "file"): "is a file",
        str(tmp_path / "file" / "x"): "no such folder",
        str(empty): "is no checkpoint and no run folder: a checkpoint holds manifest.json",
        str(empty / "last"): "names no checkpoint that is there",
        str(fresh): "has no checkpoint yet",
        str(root / "step_00000300.partial"): "this checkpoint was never finished; the newest whole one here is",
        str(lost): "has no whole checkpoint: step_00000200 is damaged or incomplete (state.json: missing)",
        str(newer / "step_00000200"): "has format 2, this shardwise reads up to 1: install a newer shardwise",
        str(newer): "install a newer shardwise, or type an older checkpoint, such as " + str(newer / "step_00000100"),
        "foo://x": "no protocol is called foo",
        "zip://a::file:///b": "chained protocols are not supported",
        "memory://nowhere/at/all": "no such folder",
    }.items():
        with pytest.raises(ConfigError) as error:
            find_checkpoint(text)
        assert expected in str(error.value), text
        assert "\n" not in str(error.value)
    assert locate(str(root / "step_00000300.partial"))[1] == "step_00000300.partial"
    with pytest.raises(ConfigError, match="is a file, and checkpoints lie in a folder"):
        Store(tmp_path / "file").names()


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        TimeoutError(errno.ETIMEDOUT, "timed out"),
        ConnectionError("refused"),
        OSError("Forbidden"),
        RuntimeError("an object store's own"),
    ],
)
@pytest.mark.parametrize("method", ["read", "open", "sizes"])
def test_what_cannot_be_read_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """Nobody goes back behind a checkpoint because its store is away for a moment."""
    save(store, 1)
    save(store, 2)
    whole = getattr(store._folder, method)

    def away(*parts: Any, **options: Any) -> Any:
        if parts[0] == "step_00000002":
            raise error
        return whole(*parts, **options)

    monkeypatch.setattr(store._folder, method, away)
    for look in (store.newest_whole, lambda: store.problems("step_00000002"), lambda: newest_whole([store], shown="x")):
        with pytest.raises(ConfigError, match=r"step_00000002.* cannot be read \(.*\): (ask|try)"):
            look()


def test_a_disk_that_fails_is_damage_unless_it_took_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    save(store, 2)
    whole, broken = store._folder.open, {"step_00000002"}

    def failing(name: str, file: str) -> Any:
        if name in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(name, file)

    monkeypatch.setattr(store._folder, "open", failing)
    name, skipped = store.newest_whole()
    assert name == "step_00000001"
    assert "cannot be read (Input/output error)" in skipped["step_00000002"][0]
    broken.add("step_00000001")
    with pytest.raises(ConfigError, match=r"step_00000002 in x: .*Input/output error.*no other is whole"):
        newest_whole([store], shown="x")


def test_a_state_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    for text, said in (
        ("[" * 200_000, "nested too deep|cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is damaged: a mapping is expected"),
        ("{}", "is damaged: format_version, step, mesh, trainer is missing"),
        ('{"format_version": 9, "step": 1, "mesh": {}, "trainer": {}}', "is of format 9, this shardwise reads up to 1"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_state(str(tmp_path))
    with pytest.raises(ConfigError, match="the configuration of the run is expected"):
        read_state(str(tmp_path), configured=True)
    monkeypatch.setattr("shardwise.checkpoint.reader.MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="it has more than 10 bytes"):
        read_state(str(tmp_path))
    path.unlink()
    with pytest.raises(ConfigError, match=r"is no whole checkpoint: state\.json is not there"):
        read_state(str(tmp_path))
    path.symlink_to("/proc/self/environ")
    with pytest.raises(ConfigError, match="a link that leads out of the folder"):
        read_state(str(tmp_path))


def test_a_run_s_configuration_that_cannot_be_read_is_not_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*parts: Any, **options: Any) -> Any:
        raise TimeoutError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(filesystems.LocalFolder, "read", away)
    monkeypatch.setattr("os.path.isfile", lambda path: False)
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read \(timed out\)"):
        checkpoints_of(run)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        Store(url)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions of another kind")
def test_no_permission(run: Path) -> None:
    root = run / "checkpoints"
    if os.geteuid() == 0:  # whom nothing is refused: somebody else has to look
        for folder in (run, *run.parents):
            if folder.stat().st_mode & 0o005 != 0o005 and "pytest" in str(folder):
                folder.chmod(0o755)
            elif folder.stat().st_mode & 0o005 != 0o005:
                pytest.skip(f"{folder} is closed to others")

    def refused(look: Callable[[], object]) -> str:
        root_looks = os.geteuid() == 0
        try:
            if root_looks:
                os.seteuid(65534)
            with pytest.raises(ConfigError) as error:
                look()
        finally:
            if root_looks:
                os.seteuid(0)
        assert "\n" not in str(error.value)
        return str(error.value)

    (root / "step_00000200" / MANIFEST).chmod(0)
    text = refused(lambda: find_checkpoint(str(root / "last")))
    assert "step_00000200/manifest.json cannot be read (Permission denied): ask its owner for permission" in text
    assert refused(lambda: find_checkpoint(str(run))) == text, "an older one would lose what is there"
    root.chmod(0)
    try:
        for path in (root, root / "step_00000200"):
            assert "Permission denied" in refused(lambda path=path: find_checkpoint(str(path)))
        assert "cannot be read (Permission denied): ask its owner" in refused(Store(root).names)
        assert "cannot be written to (Permission denied)" in refused(Store(root).check_writable)
    finally:
        root.chmod(0o755)
