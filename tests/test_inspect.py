"""`python -m shardwise inspect`: what a person and a machine are told of a checkpoint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.__main__ import main
from shardwise.checkpoint.inspect import human_size
from shardwise.checkpoint.manifest import step_name
from shardwise.checkpoint.store import Store, checksum
from shardwise.checkpoint.tensors import write_tensors
from shardwise.parallel.pieces import pieces_of

STATE = {
    "format_version": 1,
    "step": 100,
    "samples_seen": 6400,
    "experiment": "digits",
    "config": {"precision": {"kind": "bf16-mixed"}},
}
TENSORS = {
    "model/body.weight": torch.arange(12.0).reshape(3, 4),
    "model/body.bias": torch.zeros(3, dtype=torch.float64),
    "optimizer/0/body.weight/exp_avg": torch.ones(3, 4),
    "optimizer/0/body.weight/step": torch.tensor(7.0),
    "random/0/cpu": torch.zeros(5, dtype=torch.uint8),
    "random/1/cpu": torch.zeros(5, dtype=torch.uint8),
}


def save(store: Store, step: int, *, tensors: dict[str, torch.Tensor] = TENSORS, **more: object) -> Path:
    name = step_name(step)
    place = store.begin(name)
    files = write_tensors({key: pieces_of(tensor) for key, tensor in tensors.items()}, place)
    path = Path(place) / "state.json"
    path.write_text(json.dumps(STATE))
    files["state.json"] = {"bytes": path.stat().st_size, "xxh3_128": checksum(path)}
    manifest = {
        "step": step,
        "run_id": "20260101-000000-abcd",
        "strategy": "fsdp+tp",
        "mesh": {"dp_shard": 2, "tp": 2},
        "world_size": 4,
        "metrics": {"val/loss": 0.25, "val/accuracy": float("nan")},
        "versions": {"torch": "2.14.1", "shardwise": "0.1.0"},
        "files": files,
        **more,
    }
    store.publish(name, manifest)
    return Path(store.url_of(name))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir()
    (folder / "config.yaml").write_text("checkpoint: {folder: null}\n")
    store = Store(folder / "checkpoints")
    save(store, 100)
    save(store, 200)
    store.set_best("step_00000100")
    return folder


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_person_reads_what_is_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = inspect(capsys, run)
    assert (status, err) == (0, "")
    rows = {line[:14].strip(): line[15:] for line in out.splitlines() if line[14:15] == " "}
    assert rows["checkpoint"] == str(run / "checkpoints" / "step_00000200")
    assert rows["state"] == "whole, contents verified"
    assert rows["step"] == "200"
    assert rows["samples seen"] == "6400"
    assert rows["run"] == "20260101-000000-abcd"
    assert rows["strategy"] == "fsdp+tp"
    assert rows["mesh"] == "dp_shard=2 tp=2 (4 processes)"
    assert rows["precision"] == "bf16-mixed"
    assert rows["metrics"] == "val/loss=0.25, val/accuracy=nan"
    assert rows["pointed to by"] == "last"
    assert rows["model"] == "2 tensors, 15 elements, 72 B"
    assert rows["optimizer"] == "2 tensors, 13 elements, 52 B"
    assert rows["random states"] == "of 2 ranks"
    assert rows["versions"] == "torch=2.14.1, shardwise=0.1.0"
    assert "in 3 files" in rows["size"]
    table = out.split("\n\n")[1].splitlines()
    assert [line.split() for line in table[1:3]] == [
        ["model/body.weight", "3x4", "float32", "48", "B"],
        ["model/body.bias", "3", "float64", "24", "B"],
    ]
    assert table[3] == "... and 4 more tensors (--tensors lists all)"
    _, everything, _ = inspect(capsys, run, "--tensors")
    assert all(key in everything for key in TENSORS)
    assert "more tensors" not in everything
    _, best, _ = inspect(capsys, run / "checkpoints" / "best")
    assert "step_00000100" in best
    assert "pointed to by  best" in best


def test_a_machine_reads_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = inspect(capsys, run, "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads(out, parse_constant=refuse)
    folder = run / "checkpoints" / "step_00000200"
    assert (status, report["whole"], report["problems"], report["contents_verified"]) == (0, True, [], True)
    assert (report["step"], report["world_size"], report["mesh"]) == (200, 4, {"dp_shard": 2, "tp": 2})
    assert report["metrics"] == {"val/loss": 0.25, "val/accuracy": "nan"}
    assert report["bytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name != "manifest.json")
    assert report["tensors"]["model/body.bias"] == {"shape": [3], "dtype": "float64", "elements": 3, "bytes": 24}
    assert report["model"] == {"tensors": 2, "elements": 15, "bytes": 72}
    assert report["random_state_ranks"] == 2


@pytest.mark.parametrize("file", [".metadata", "state.json", "manifest.json", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["removed", "truncated", "flipped"])
def test_damage_is_told_with_what_can_still_be_read(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, kind: str
) -> None:
    path = run / "checkpoints" / "step_00000200" / file
    data = path.read_bytes()
    if kind == "removed":
        path.unlink()
    else:
        half = len(data) // 2
        path.write_bytes(data[:half] + (b"" if kind == "truncated" else bytes([data[half] ^ 1]) + data[half + 1 :]))
    status, out, err = inspect(capsys, path.parent)
    assert (status, err) == (1, "")
    assert "DAMAGED" in out
    assert f"{file}: " in out
    assert ("fsdp+tp" in out) == (file != "manifest.json")
    if file != "state.json":
        assert "bf16-mixed" in out
    if file != ".metadata":
        assert "model/body.weight" in out
    assert not json.loads(inspect(capsys, path.parent, "--json")[1])["whole"]
    # Of the run, the older one is shown, and what was passed over.
    status, out, err = inspect(capsys, run)
    assert (status, err) == (0, "")
    assert "step_00000100\n" in out
    assert "step_00000200 is damaged or incomplete: " in out


def test_quick_looks_at_sizes_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step_00000200" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    status, out, _ = inspect(capsys, path.parent, "--quick")
    assert status == 0
    assert "contents not verified" in out
    assert inspect(capsys, path.parent)[0] == 1
    path.write_bytes(data[:-1])
    status, out, _ = inspect(capsys, path.parent, "--quick")
    assert status == 1
    assert f"__0_0.distcp: {len(data) - 1} bytes, {len(data)} expected" in out


def test_a_run_without_a_whole_one_shows_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.rglob("state.json"):
        path.write_text("{}")
    status, out, _ = inspect(capsys, run)
    assert status == 1
    assert "state.json: 2 bytes" in out
    assert "step_00000100 is damaged or incomplete" in out
    shutil.rmtree(run / "checkpoints")
    status, out, err = inspect(capsys, run)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "has no checkpoint yet" in err


def test_bad_input_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in {
        (): "the following arguments are required: checkpoint",
        (run, "--all"): "unrecognized arguments: --all",
        (run, "\x1b[31m"): "unrecognized arguments: \\x1b[31m",
        (tmp_path / "no\x1bwhere",): "no\\x1bwhere: no such folder",
        (run / "config.yaml",): "is a file",
        (tmp_path,): "is no checkpoint and no run folder",
    }.items():
        status, out, err = inspect(capsys, *arguments)
        assert (status, out) == (2, ""), arguments
        assert err.startswith("error: ")
        assert expected in err
        assert err.count("\n") == 1


def test_a_stranger_s_checkpoint_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\u202e\r\n"
    store = Store(tmp_path / "checkpoints")
    tensors = {f"model/{evil}": torch.zeros(2), f"model/{'x' * 5000}": torch.zeros(1)}
    folder = save(
        store,
        1,
        tensors=tensors,
        run_id=evil,
        strategy=evil,
        mesh={evil: 1},
        metrics={evil: 1e308},
        versions={"a": evil},
        time=1e300,
    )
    for arguments in ((folder,), (folder, "--tensors"), (folder, "--json"), (store.url, "--quick")):
        status, out, err = inspect(capsys, *arguments)
        assert (status, err) == (0, "")
        assert all(character.isprintable() or character == "\n" for character in out)
        if "--json" not in arguments:
            assert "\\x1b]0;owned\\x07\\u202e\\r\\n" in out
            assert max(map(len, out.splitlines())) < 600


def test_a_state_without_end_or_bottom_is_left_out(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are those of every reader of it."""
    path = run / "checkpoints" / "step_00000200"
    monkeypatch.setattr("shardwise.checkpoint.reader.MAX_BYTES", 10)
    status, out, err = inspect(capsys, path)
    assert (status, err) == (0, "")
    assert "samples seen" not in out
    monkeypatch.undo()
    (path / "state.json").write_text("[" * 200_000)
    status, out, err = inspect(capsys, path)
    assert (status, err) == (1, "")
    assert "state.json: 200000 bytes" in out


def test_it_is_a_command(run: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "inspect", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole, contents verified" in done.stdout


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**52, "4,096.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert human_size(count) == text
