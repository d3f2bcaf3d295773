"""What ranks print: a time in front of every line of a log, all logs merged, and what is told at a run's end."""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkout import TrainRun
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.job import Job, held, make_job, running, with_folder
from shardwise.logs import main, show_logs
from shardwise.parallel.dims import ParallelDims
from shardwise.rank_log import Channel, LineWriter, stamp
from shardwise.resolve import World
from shardwise.summary import look_commands, rank_map, show_end
from shardwise.telemetry.sentences import sentences

STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (.*)")


def texts(log: Path) -> list[str]:
    """The lines of a log without their times, which all of them have."""
    found = [STAMPED.fullmatch(line) for line in log.read_text().split("\n")[:-1]]
    assert all(found), log.read_text()
    return [match[1] for match in found if match]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


# ---- writing -------------------------------------------------------------------------------------------------------


def test_a_line_in_pieces_has_one_time_and_lines_of_one_text_share_theirs(log: Path) -> None:
    channel = Channel(LineWriter(log))
    for piece in ("loss", " 1.5", "\n", "first\n\nthird\n", "left"):
        channel.write(piece)
    assert texts(log) == ["loss 1.5", "first", "", "third"]
    times = [line[:23] for line in log.read_text().splitlines()]
    assert len(set(times[1:])) == 1
    assert abs(time.mktime(time.strptime(times[0][:19], "%Y-%m-%dT%H:%M:%S")) - time.time()) < 60
    channel.close_line()
    assert texts(log)[-1] == "left"


def test_the_time_is_when_a_line_began(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000.1234
    monkeypatch.setattr("shardwise.rank_log.time.time", lambda: now)
    channel = Channel(LineWriter(log))
    channel.write("begun")
    now += 60
    channel.write(" and ended\nnext\n")
    assert [line[:23] for line in log.read_text().splitlines()] == [stamp(1_000_000_000.123), stamp(now)]


def test_what_is_flushed_is_in_the_file_and_another_stream_does_not_go_on_in_its_line(log: Path) -> None:
    writer = LineWriter(log)
    out, err = Channel(writer), Channel(writer)
    out.write("connecting...")
    out.flush()
    assert STAMPED.fullmatch(log.read_text())
    out.write(" done\nagain...")
    out.flush()
    err.write("warning\n")
    out.write(" done\n")
    assert texts(log) == ["connecting... done", "again...", "warning", " done"]


def test_a_progress_bar_is_a_line_now_and_then_and_its_last_state(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000.0
    monkeypatch.setattr("shardwise.rank_log.time.time", lambda: now)
    channel = Channel(LineWriter(log))
    for percent in range(101):  # as tqdm does
        channel.write(f"\r\x1b[32m{percent}%\x1b[0m")
        channel.flush()
        now += 0.1
    channel.write("\n")
    channel.write("windows\r\nafter\n")
    shown = texts(log)
    assert shown[-3:] == ["100%", "windows", "after"]
    assert shown[0] == "0%"
    assert 2 <= len(shown[:-3]) <= 3  # of 10 seconds, one in 5


def test_colours_are_left_out_even_in_pieces(log: Path) -> None:
    channel = Channel(LineWriter(log))
    channel.write("\x1b[1;3")
    channel.write("1mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n")
    assert texts(log) == ["red link"]


def test_a_forked_process_writes_its_own_lines_only(log: Path) -> None:
    """A loader's worker: what its parent has begun is not written twice, and a lock that is held then stops nobody."""
    writer = LineWriter(log)
    channel = Channel(writer)
    channel.write("half ")
    with writer.lock():
        if (pid := os.fork()) == 0:
            thread = threading.Thread(target=channel.write, args=("worker\n",), daemon=True)
            thread.start()
            thread.join(5)
            os._exit(int(thread.is_alive()))
    assert os.waitpid(pid, 0)[1] == 0
    channel.write("whole\n")
    assert texts(log) == ["worker", "half whole"]


PRINTING = """
import logging, os, signal, sys
from pathlib import Path
from shardwise.rank_log import rank_log

with rank_log(Path(sys.argv[1]), int(sys.argv[2]), console=sys.argv[2] == "0"):
    logging.getLogger("mine").addHandler(logging.StreamHandler(sys.stderr))
    print("printed")
    logging.getLogger("mine").warning("logged")
    sys.stdout.writelines(["one\\n", "two\\n"])
    os.write(2, b"by a library\\n")
    os.system("echo by a child")
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_lost_when_a_rank_is_killed(tmp_path: Path, rank: int) -> None:
    (tmp_path / "ranks").mkdir()
    command = [sys.executable, "-c", PRINTING, str(tmp_path), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    log = tmp_path / "ranks" / f"rank_{rank}.log"
    if rank:  # the descriptors are the log's
        assert done.stdout + done.stderr == ""
        lines = log.read_text().splitlines()
        assert [line for line in lines if not STAMPED.match(line)] == ["by a library", "by a child"]
        stamped = [match[1] for line in lines if (match := STAMPED.fullmatch(line))]
    else:
        assert done.stderr == "logged\nby a library\n"
        assert "printed\n" not in done.stderr
        stamped = texts(log)
    assert stamped == ["printed", "logged", "one", "two", "last words"]


def test_the_console_has_no_times(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    code = PRINTING.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass")
    command = [sys.executable, "-c", code, str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.splitlines()) == ["by a child", "last words", "one", "printed", "two"]


# ---- reading -------------------------------------------------------------------------------------------------------


def run_of(folder: Path, *logs: str) -> Path:
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    for rank, text in enumerate(logs):
        (folder / "ranks" / f"rank_{rank}.log").write_text(textwrap.dedent(text))
    return folder


def shown(folder: Path, **options: object) -> list[tuple[str, str, str]]:
    """(clock, rank, text) of every line."""
    out = io.StringIO()
    show_logs(folder, out=out, **options)  # type: ignore[arg-type]
    found = [re.fullmatch(r"(.{23})  rank +(\d+)  (.*)", line) for line in out.getvalue().splitlines()]
    assert all(found), out.getvalue()
    return [(match[1][11:].strip(), match[2], match[3]) for match in found if match]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_of(
        tmp_path / "run",
        """\
        2026-12-01T00:00:01.000 a
        2026-12-01T00:00:03.000 Traceback (most recent call last):
        2026-12-01T00:00:03.001   File "x"
        2026-12-01T00:00:03.002 ValueError: planted
        """,
        """\
        before any time
        2026-12-01T00:00:02.000 b
        from a library
        2026-12-01T00:00:03.000 c
        2026-12-01T00:00:02.500 a clock that was put back
        2026-12-01T00:00:09.000 d
        """,
    )
    log = folder / "ranks" / "rank_1.log"
    log.write_text(log.read_text().rstrip("\n"))  # of a rank that was killed
    return folder


def test_lines_are_merged_by_time_and_those_without_stay_where_they_are(run: Path) -> None:
    assert shown(run) == [
        ("", "1", "before any time"),
        ("00:00:01.000", "0", "a"),
        ("00:00:02.000", "1", "b"),
        ("", "1", "from a library"),
        ("00:00:03.000", "0", "Traceback (most recent call last):"),
        ("00:00:03.001", "0", '  File "x"'),
        ("00:00:03.000", "1", "c"),
        ("00:00:02.500", "1", "a clock that was put back"),
        ("00:00:03.002", "0", "ValueError: planted"),
        ("00:00:09.000", "1", "d"),
    ]


def test_ranks_are_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {rank for _, rank, _ in shown(run, ranks="1")} == {"1"}
    assert {rank for _, rank, _ in shown(run, ranks="0-1")} == {"0", "1"}
    for typed, why in (
        ("5", "there is no log of rank 5, but of ranks 0-1"),
        ("x", "--ranks 0,3"),
        ("3-1", "--ranks 3-1"),
    ):
        assert main([str(run), "--ranks", typed]) == 2
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1


def test_a_terminal_gets_colours_and_obeys_nothing_of_a_log(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "2026-12-01T00:00:01.000 evil \x1b]0;title\x07\n2026-12-02T00:00:01.000 next day\n")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    show_logs(run, out=out)
    assert "\x1b]0" not in out.getvalue()
    plain = re.sub(r"\x1b\[\d+m", "", out.getvalue()).splitlines()
    assert plain == [
        "2026-12-01",
        "00:00:01.000  rank 0  evil \\x1b]0;title\\x07",
        "2026-12-02",
        "00:00:01.000  rank 0  next day",
    ]


def test_a_wrong_folder_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweeps" / "mine"
    sweep.mkdir(parents=True)
    one = run_of(tmp_path / "digits" / "one", "")
    for name in ("config.yaml", "result.json"):
        (one / name).write_text("{}")
    (sweep / "jobs.json").write_text(f'[{{"run_folder": "{one}", "status": "failed"}}]')
    (tmp_path / "file").write_text("")
    empty = tmp_path / "empty"
    (empty / "ranks").mkdir(parents=True)
    for folder, why in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "file", "is a file"),
        (empty, "holds no log yet"),
        (tmp_path / "sweeps", "is a folder of runs"),
        (
            sweep,
            f"is a sweep's folder: name one of its runs, such as the first that failed: python -m shardwise logs {one}",
        ),
        (tmp_path / "digits", f"such as the newest: python -m shardwise logs {one}"),
    ):
        assert main([str(folder)]) == 2
        error = capsys.readouterr().err
        assert why in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_a_pipe_that_closes_is_no_error(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *["2026-12-01T00:00:01.000 text\n" * 20_000] * 2)
    command = f"set -o pipefail; {sys.executable} -m shardwise logs {run} | head -2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


def test_follow_goes_on_until_there_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, halves of lines and ranks that come later."""
    monkeypatch.setattr("shardwise.logs.QUIET_SECONDS", 0.3)
    monkeypatch.setattr("shardwise.logs.POLL_SECONDS", 0.02)
    run, out = run_of(tmp_path / "run", "2026-12-01T00:00:01.000 a\n"), io.StringIO()
    follower = threading.Thread(target=show_logs, args=(run,), kwargs={"follow": True, "out": out}, daemon=True)
    follower.start()

    def wait_for(text: str) -> None:
        end = time.monotonic() + 10
        while text not in out.getvalue():
            assert time.monotonic() < end, out.getvalue()
            time.sleep(0.01)

    wait_for("  a\n")
    with (run / "ranks" / "rank_0.log").open("a") as log:
        log.write("2026-12-01T00:00:02.000 b\n2026-12-01T00:00:03.000 ha")
        log.flush()
        wait_for("  b\n")
        (run / "ranks" / "rank_1.log").write_text("2026-12-01T00:00:03.000 other\n")
        wait_for("rank 1  other\n")
        assert "ha" not in out.getvalue()
        log.write("lf\n")
    wait_for("  half\n")
    assert follower.is_alive()
    (run / "result.json").write_text("{}")
    follower.join(10)
    assert not follower.is_alive()
    assert out.getvalue().count("\n") == 4


def test_follow_takes_no_result_of_an_earlier_attempt_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("QUIET_SECONDS", 0.1), ("POLL_SECONDS", 0.02)):
        monkeypatch.setattr(f"shardwise.logs.{name}", seconds)
    run = run_of(tmp_path / "run", "2026-12-01T00:00:01.000 a\n")
    (run / "result.json").write_text("{}")
    with held(run, taken=running):  # resumed, and not yet so far that the old result is gone
        options = {"follow": True, "out": io.StringIO()}
        follower = threading.Thread(target=show_logs, args=(run,), kwargs=options, daemon=True)
        follower.start()
        follower.join(0.6)
        assert follower.is_alive()
    follower.join(10)
    assert not follower.is_alive()


def test_follow_ends_when_a_killed_run_is_held_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    for name, seconds in (("QUIET_SECONDS", 0.1), ("POLL_SECONDS", 0.02), ("KILLED_SECONDS", 0.3)):
        monkeypatch.setattr(f"shardwise.logs.{name}", seconds)
    run = run_of(tmp_path / "run", "2026-12-01T00:00:01.000 a\n")
    lock = FileLock(run / ".lock")
    lock.acquire()
    options = {"follow": True, "out": io.StringIO()}
    follower = threading.Thread(target=show_logs, args=(run,), kwargs=options, daemon=True)
    follower.start()
    follower.join(1)
    assert follower.is_alive()
    lock.release()
    follower.join(10)
    assert not follower.is_alive()


# ---- the start and the end of a run --------------------------------------------------------------------------------

TELEMETRY = {
    "time": {"data": 1.0, "forward": 30.0, "backward": 60.0, "communication": 8.7, "logging": 0.3},
    "wall": 100.0,
    "slowest_rank": {"rank": 3, "host": "node7", "ratio": 1.8, "kind": "compute", "phase": "forward"},
    "peak_memory": {"bytes": 3 * 2**30, "rank": 2},
}


def test_the_end_says_what_the_time_went_to_and_who_was_slow() -> None:
    assert sentences(TELEMETRY) == [
        "time in training: 1 min 40 s: backward 60 %, forward 30 %, communication and waiting for other ranks 8.7 %, "
        "data 1.0 %",
        "slowest rank: 3 on node7, 1.80 x the median of the others, by compute (mostly forward)",
        "peak memory: 3.0 GiB (rank 2)",
    ]
    one = {"time": {"forward": 2.0}, "wall": 4.0, "slowest_rank": None, "peak_memory": {"bytes": 2**29, "rank": 0}}
    assert sentences(one) == ["time in training: 4.0 s: forward 50 %", "peak memory: 512 MiB"]
    even = {"slowest_rank": {"rank": 1, "host": "a", "ratio": 1.01, "kind": "data", "phase": "data"}}
    assert sentences(even) == ["slowest rank: none stands out (rank 1 on a: 1.01 x the median of the others)"]
    assert sentences(None) == sentences({}) == []


def made_job(tmp_path: Path, *overrides: str, devices: int) -> Job:
    config = replace(compose(list(overrides)), output_root=str(tmp_path))
    world = World(1, devices, "cpu", "local", "test")
    return with_folder(make_job(config, world, experiment="mine", overrides=[], command=["python", "train.py"]))


@pytest.mark.parametrize("devices", [1, 4])
def test_the_end_names_what_shows_a_run(tmp_path: Path, devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    job = made_job(tmp_path, devices=devices)
    result = {"status": "completed", "run_id": "x", "steps": 3, "metrics": {}, "telemetry": TELEMETRY}
    show_end(job, result)
    out = capsys.readouterr().out
    assert "slowest rank: 3 on node7" in out
    assert f"python -m shardwise show {job.run_folder}\n" in out
    assert (f"python -m shardwise logs {job.run_folder}\n" in out) == (devices > 1)
    show_end(replace(job, in_sweep=True), result)
    assert "slowest" not in (out := capsys.readouterr().out)
    assert "shardwise" not in out


def test_a_python_in_a_folder_with_a_space_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my venv/bin/python")
    job = made_job(tmp_path, devices=1)
    assert look_commands(job) == [f"'/my venv/bin/python' -m shardwise show {shlex.quote(job.run_folder)}"]


def test_the_start_says_which_rank_is_what_and_where() -> None:
    assert rank_map(ParallelDims(dp_shard=2, tp=2), ["a"] * 4) == (
        "0: dp 0 tp 0, 1: dp 0 tp 1, 2: dp 1 tp 0, 3: dp 1 tp 1 on a"
    )
    assert rank_map(ParallelDims(dp_replicate=2), ["a", "b"]) == "dp = rank, 0 to 1; a: rank 0, b: rank 1"
    hosts = [f"node{rank // 8}" for rank in range(1024)]
    large = rank_map(ParallelDims(dp_shard=128, tp=8), hosts)
    assert large.startswith("dp = rank // 8, tp = rank % 8; node0: ranks 0-7, node1: ranks 8-15, ")
    assert large.endswith(", and 120 more hosts")


@pytest.mark.slow
def test_logs_of_a_run_of_two_ranks(train_py: Callable[..., TrainRun], tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(
        textwrap.dedent(
            """
            from pytorch_lightning import Callback

            class Talking(Callback):
                def on_train_end(self, trainer, module):
                    print(f"rank {trainer.global_rank} has trained")
            """
        )
    )
    run = train_py(
        *("model=mlp", "model.width=8", "trainer.max_steps=2", "trainer.devices=2", "logger=none"),
        *("plugins=[talking]", "+callbacks.talking._target_=talking.Talking"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert re.search(r"^ranks +dp = rank, 0 to 1 on \S", run.stdout, flags=re.MULTILINE)
    assert not re.search(r"\d\dT\d\d:\d\d:\d\d\.\d{3}", run.stdout + run.stderr)
    lines = shown(run.run_folder)
    assert all(clock for clock, _, _ in lines)
    clocks = [clock for clock, _, text in lines if not text.startswith(" ")]  # the others stay with those
    assert clocks == sorted(clocks)
    said = [(rank, text) for _, rank, text in lines]
    assert said.count(("0", "rank 0 has trained")) == said.count(("1", "rank 1 has trained")) == 1
    with contextlib.suppress(ConfigError):
        show_logs(run.output_root)
        pytest.fail("a folder of runs is no run")
