"""The real W&B client, offline and against a small stand-in for its service on loopback."""

import contextlib
import gzip
import http.server
import json
import logging
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning.loggers
import torch
import yaml
from omegaconf import OmegaConf
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shardwise.errors import ConfigError
from shardwise.tracking import JsonlLogger, WandbTracker
from shardwise.tracking.transaction_log import read_log

KEY = "0123456789abcdef0123456789abcdef01234567"
LEAN = {"x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False}


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in Path(path).read_text().splitlines()]


class TestJsonl:
    def test_a_line_per_call_with_plain_numbers(self, tmp_path):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        before = time.time()
        logger.log_metrics({"train/loss": torch.tensor(0.5, dtype=torch.float64), "lr": 1e-3, "epoch": 0}, step=10)
        logger.log_metrics({"val/accuracy": torch.tensor(1)}, step=10)
        logger.log_metrics({"later": 2})
        first, second, third = lines_of(logger.path)
        assert before - 1 <= first.pop("time") <= time.time() + 1
        assert first == {"step": 10, "train/loss": 0.5, "lr": 1e-3, "epoch": 0}
        assert (second["step"], second["val/accuracy"]) == (10, 1.0)
        assert (third["step"], third["later"]) == (10, 2)

    def test_what_json_cannot_say_is_null_and_named(self, tmp_path):
        logger = JsonlLogger(tmp_path / "m.jsonl")
        logger.log_metrics({"a": math.nan, "b": torch.tensor(math.inf), "c": 1.0}, step=0)
        (line,) = lines_of(logger.path)
        assert (line["a"], line["b"], line["c"], line["nonfinite"]) == (None, None, 1.0, ["a", "b"])

    def test_only_rank_0_writes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        JsonlLogger(tmp_path / "m.jsonl").log_metrics({"a": 1.0}, step=0)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(("name", "value"), [("time", 1.0), ("x", torch.ones(2)), ("x", "text")])
    def test_what_is_no_metric_is_one_line(self, tmp_path, name, value):
        with pytest.raises(ConfigError, match=f"metric '{name}'") as error:
            JsonlLogger(tmp_path / "m.jsonl").log_metrics({name: value}, step=0)
        assert "\n" not in str(error.value)

    def test_a_folder_that_is_gone_is_one_line(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot write metrics to .*m\.jsonl .*output_root") as error:
            JsonlLogger(tmp_path / "gone" / "m.jsonl").log_metrics({"a": 1.0}, step=0)
        assert isinstance(error.value, OSError)
        assert "\n" not in str(error.value)

    def test_a_full_disk_is_one_line(self, monkeypatch):
        logger = JsonlLogger("/dev/full")
        with pytest.raises(ConfigError, match=r"/dev/full \(No space left on device\): free space there"):
            logger.log_metrics({"a": 1.0}, step=0)

    def test_a_line_that_does_not_fit_leaves_nothing_of_itself(self, tmp_path):
        import resource

        logger = JsonlLogger(tmp_path / "m.jsonl")
        logger.log_metrics({"a": 1.0}, step=0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (logger.path.stat().st_size + 10, hard))
        try:
            with pytest.raises(ConfigError, match="cannot write metrics"):
                logger.log_metrics({"a": 2.0}, step=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [line["a"] for line in lines_of(logger.path)] == [1.0]

    def test_a_resumed_run_goes_on_where_its_checkpoint_was(self, tmp_path):
        logger = JsonlLogger(tmp_path / "m.jsonl")
        assert logger.size() == 0
        logger.log_metrics({"a": 1.0, "b": math.nan}, step=1)
        logger.log_metrics({"a": 2.0, "n": 3}, step=2)
        size = logger.size()
        assert size == logger.path.stat().st_size
        logger.log_metrics({"a": 3.0, "c": 1.0}, step=3)
        resumed = JsonlLogger(logger.path)
        resumed.cut(size)
        assert {name: value for name, value in resumed.last.items() if name != "b"} == {"a": 2.0, "n": 3}
        assert math.isnan(resumed.last["b"])
        resumed.log_metrics({"d": 4.0})
        assert [(line["step"], line.get("a")) for line in lines_of(logger.path)] == [(1, 1.0), (2, 2.0), (2, None)]
        resumed.cut(0)
        assert (logger.path.read_bytes(), resumed.last) == (b"", {})

    @pytest.mark.parametrize("torn", [b'{"step": 3, "a', b"\xff" * 200_000])
    @pytest.mark.parametrize("act", ["log", "size", "cut"])
    def test_a_torn_line_is_never_joined_with_the_next(self, tmp_path, torn, act):
        path = tmp_path / "m.jsonl"
        whole = b'{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n'
        path.write_bytes(whole + torn)
        logger = JsonlLogger(path)
        if act == "size":
            assert logger.size() == len(whole)
        elif act == "cut":
            logger.cut(len(whole + torn) + 1)
            assert logger.last == {"a": 2.0}
        logger.log_metrics({"a": 3.0}, step=3)
        assert [(line["step"], line["a"]) for line in lines_of(path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]

    def test_a_file_that_is_nothing_but_a_torn_line_starts_again(self, tmp_path):
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"step"')
        JsonlLogger(path).log_metrics({"a": 3.0}, step=3)
        assert [line["a"] for line in lines_of(path)] == [3.0]

    def test_a_file_shorter_than_the_checkpoint_says_stays_as_it_is(self, tmp_path, caplog):
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"step": 1, "a": 1.0}\nno json\n{"step": 2, "b": 2.0}\n')
        logger = JsonlLogger(path)
        logger.cut(1000)
        assert path.stat().st_size == 52
        assert logger.last == {"a": 1.0, "b": 2.0}
        (line,) = [record.message for record in caplog.records]
        assert line == f"{path} has 52 bytes, not the 1000 of the checkpoint: lines are missing"
        path.unlink()
        logger.cut(10)
        assert not path.exists()
        assert logger.last == {}


@pytest.fixture
def client(tmp_path, monkeypatch):
    """The wandb client of a user who never used it, in an empty current folder."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()
    monkeypatch.setattr(logging.getLogger("wandb"), "propagate", True)  # as in a fresh process
    yield wandb
    wandb.teardown()
    assert not list(here.iterdir())  # nothing of wandb's in the current folder


def tracker(tmp_path, **arguments):
    return WandbTracker(**({"save_dir": Path(tmp_path) / "run", "settings": LEAN} | arguments))


def records(folder):
    """The records of a transaction log: LevelDB's log format, 32 KiB blocks, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(folder).glob("*.wandb")
    data, offset, message, found = path.read_bytes(), 7, b"", []
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        message += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(message)
            found.append(record)
            message = b""
    return found


def children(name):
    """The process ids of this process's children with a name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = path.read_text().partition(" (")
            command, _, fields = rest.rpartition(") ")
            if command == name and int(fields.split()[1]) == os.getpid():
                found.append(int(pid))
    return found


def offline_run(tmp_path):
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    return folder


def history(found):
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def config_of(found):
    config = {}
    for record in found:
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        for item in updates:
            config[item.key or tuple(item.nested_key)] = json.loads(item.value_json)
    return config


def exit_codes(found):
    return [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]


class TestOffline:
    def test_a_run_has_a_nested_config_our_steps_and_its_exit_code(self, client, tmp_path, caplog, capfd):
        caplog.set_level(logging.INFO)
        logger = tracker(
            tmp_path,
            run_id="run/1",
            config={"batch": {"global_size": 64, "derived": {"micro_size": 8}}, "logger": {"api_key": KEY}},
        )
        logger.log_hyperparams(OmegaConf.create({"optimizer": {"lr": 0.1, "peak": "${.lr}", "betas": [0.9, 0.99]}}))
        logger.log_metrics({"train/loss": torch.tensor(0.5)}, step=10)
        logger.log_metrics({"val/loss": 0.25}, step=10)
        logger.log_metrics({"train/loss": 0.125}, step=5)  # a step that goes back is kept
        logger.finalize("success")
        logger.finish(0)
        logger.finish(1)  # the first one counts
        found = records(offline_run(tmp_path))
        config = config_of(found)
        assert config["batch"] == {"global_size": 64, "derived": {"micro_size": 8}}
        assert config["logger"] == {"api_key": "***"}
        assert config["optimizer"] == {"lr": 0.1, "peak": 0.1, "betas": [0.9, 0.99]}
        points = [{k: v for k, v in point.items() if not k.startswith("_")} for point in history(found)]
        assert points == [
            {"train/loss": 0.5, "step": 10},
            {"val/loss": 0.25, "step": 10},
            {"train/loss": 0.125, "step": 5},
        ]
        metrics = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
        assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in metrics)
        assert exit_codes(found) == [0]
        assert logger.version == "run-1"
        (line,) = [record.message for record in caplog.records if record.name == "shardwise.tracking"]
        assert line == f"W&B: offline (not logged in); upload later with: wandb sync {offline_run(tmp_path)}"
        assert capfd.readouterr().err.replace(line, "").strip() == ""

    def test_a_finished_run_leaves_no_process(self, client, tmp_path):
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        assert children("wandb-core")
        logger.finish(0)
        assert not children("wandb-core")

    def test_a_failing_run_says_so_and_the_next_one_is_another(self, client, tmp_path):
        ids = []
        for code in (1, 0):
            logger = tracker(tmp_path, save_dir=tmp_path / str(code))
            logger.log_metrics({"x": 1.0}, step=0)
            ids.append(logger.experiment.id)
            logger.finish(code)
            (folder,) = (tmp_path / str(code) / "wandb").glob("offline-run-*")
            assert exit_codes(records(folder)) == [code]
        assert ids[0] != ids[1]

    def test_a_run_left_open_is_not_handed_to_the_next(self, client, tmp_path):
        first, second = (tracker(tmp_path, save_dir=tmp_path / name) for name in "ab")
        assert first.experiment.id != second.experiment.id
        second.finish(0)

    def test_neither_the_command_line_nor_the_remote_is_captured(self, client, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.argv", ["train.py", "logger.api_key=hushhush"])
        logger = tracker(tmp_path, settings={})
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if b"hushhush" in path.read_bytes()]

    def test_other_ranks_start_nothing(self, client, tmp_path, monkeypatch):
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        logger = tracker(tmp_path)
        logger.experiment.log({"x": 1})
        logger.log_metrics({"x": 1.0}, step=0)
        logger.log_hyperparams({"a": 1})
        logger.finish(0)
        assert not (tmp_path / "run").exists()

    @pytest.mark.slow
    def test_a_service_process_that_dies_ends_tracking_and_not_training(self, client, tmp_path):
        # In a process of its own, to see that its end is clean too.
        program = f"""
            import os, signal, sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_tracking import children, tracker
            logger = tracker(os.path.abspath("../"))
            logger.log_metrics({{"x": 1.0}}, step=0)
            (pid,) = children("wandb-core")
            time.sleep(0.5)  # it writes to the disk every 0.05 s
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
            for step in range(5):
                logger.log_metrics({{"x": 1.0}}, step=step)
            logger.log_hyperparams({{"a": 1}})
            logger.finish(0)
            print("trained")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        line = (
            f"W&B takes no more metrics (Connection lost): this run goes on without it; "
            f"upload what came before with: wandb sync {offline_run(tmp_path)}\n"
        )
        assert done.stderr == line
        assert [point["x"] for point in history(records(offline_run(tmp_path)))] == [1.0]

    @pytest.mark.parametrize("mode", ["disabled", "offline"])
    def test_a_mode_of_the_environment_counts_under_auto(self, client, tmp_path, monkeypatch, mode):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        assert bool(list((tmp_path / "run").glob("wandb/offline-run-*"))) == (mode == "offline")

    def test_the_shared_mode_of_the_environment_is_an_online_one(self, client, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("WANDB_MODE", "shared")
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        assert "nobody is logged in" in caplog.text
        assert [point["x"] for point in history(records(offline_run(tmp_path)))] == [1.0]

    def test_an_unknown_mode_is_one_line(self):
        with pytest.raises(ConfigError, match=r"logger.mode=onlin .*auto, online, offline, disabled"):
            WandbTracker(mode="onlin")

    def test_an_unknown_mode_of_the_environment_is_one_line(self, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "onlin")
        with pytest.raises(ConfigError, match=r"WANDB_MODE=onlin .*online, offline, disabled"):
            WandbTracker()
        WandbTracker(mode="offline")


class TestAbsentService:
    def test_online_without_a_login_is_offline_and_asks_nobody(self, client, tmp_path, caplog):
        logger = tracker(tmp_path, mode="online")
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        (line,) = [record.message for record in caplog.records]
        assert line.startswith("W&B: logger.mode=online, but nobody is logged in at https://")
        assert line.endswith(f"this run continues offline; upload later with: wandb sync {offline_run(tmp_path)}")

    def test_a_closed_port_is_one_line_and_an_offline_run(self, client, tmp_path, monkeypatch, caplog, capfd):
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        start = time.monotonic()
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(1)
        assert time.monotonic() - start < 10
        (line,) = [record.message for record in caplog.records]
        assert line == (
            "W&B at http://127.0.0.1:9 is not reachable (Connection refused): this run continues offline; "
            f"upload later with: wandb sync {offline_run(tmp_path)}"
        )
        assert exit_codes(records(offline_run(tmp_path))) == [1]
        assert capfd.readouterr().err.replace(line, "").strip() == ""

    def test_a_service_that_never_answers_is_given_init_timeout(self, client, tmp_path, monkeypatch, caplog, capfd):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            monkeypatch.setenv("WANDB_API_KEY", KEY)
            start = time.monotonic()
            logger = tracker(tmp_path, init_timeout=2)
            logger.log_metrics({"x": 1.0}, step=0)
            logger.finish(0)
            assert time.monotonic() - start < 10
        (line,) = [record.message for record in caplog.records]
        assert re.match(
            r"W&B at http://127.0.0.1:\d+ did not accept the run \(Timed out .*\): this run continues offline; ", line
        )
        assert [path.name[:7] for path in (tmp_path / "run/wandb").iterdir() if "run-2" in path.name] == ["offline"]
        assert capfd.readouterr().err.replace(line, "").strip() == ""


class Line(LightningModule):
    """A line through no points, which logs and can fail."""

    def __init__(self, *, fails_at: int | None = None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise RuntimeError("on purpose")
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
class TestUnderLightning:
    def fit(self, tmp_path, loggers, **arguments):
        trainer = Trainer(
            logger=loggers,
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            log_every_n_steps=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path / "root",
        )
        trainer.fit(Line(**arguments))

    def test_both_loggers_get_the_same_steps(self, client, tmp_path):
        lines, wandb_run = JsonlLogger(tmp_path / "metrics.jsonl"), tracker(tmp_path)
        self.fit(tmp_path, [lines, wandb_run])
        wandb_run.finish(0)
        points = history(records(offline_run(tmp_path)))
        assert [(line["step"], line["train/loss"]) for line in lines_of(lines.path)] == [
            (point["step"], point["train/loss"]) for point in points
        ]
        assert [point["step"] for point in points] == [1, 3]
        assert not (tmp_path / "root").exists()

    def test_the_end_of_a_run_belongs_to_its_owner(self, client, tmp_path):
        wandb_run = tracker(tmp_path)
        with pytest.raises(RuntimeError, match="on purpose"):
            self.fit(tmp_path, wandb_run, fails_at=2)
        wandb_run.finish(1)
        assert exit_codes(records(offline_run(tmp_path))) == [1]

    @pytest.mark.parametrize(("choice", "file"), [("csv", "metrics.csv"), ("tensorboard", "events.out.*")])
    def test_the_other_choices_write_into_the_run_folder(self, tmp_path, choice, file):
        conf = Path(__file__).parents[1] / "conf" / "logger" / f"{choice}.yaml"
        arguments = yaml.safe_load(conf.read_text())
        logger = getattr(pytorch_lightning.loggers, arguments.pop("_target_").rpartition(".")[2])
        self.fit(tmp_path, logger(save_dir=tmp_path / "run", **arguments))
        assert len(list((tmp_path / "run" / choice).glob(file))) == 1
        assert [path.name for path in (tmp_path / "run").iterdir()] == [choice]


class StandIn(http.server.ThreadingHTTPServer):
    """Takes runs as the service does: the operation UpsertBucket, and the stream of files with offsets."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.history: dict[int, dict] = {}
        self.summary: dict = {}
        self.states: list[str | int] = []
        self.exit_code: int | None = None
        self.config: dict = {}
        self.buckets: list[dict] = []
        self.operations: dict[str, Callable[[dict], dict]] = {}
        self.stream_works = True
        self.lines: dict[tuple[str, str | None], dict[int, dict]] = {}  # of each run and, if it is shared, each client
        self.ends: list[tuple[str, int]] = []  # run, exit code
        self.rows_at_ends: list[int] = []  # that all had brought when each of them came
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Requests(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = json.loads(body or b"{}")
        if self.path.endswith("/file_stream"):
            if not self.server.stream_works:
                return self.answer({}, status=503)
            lines = request.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            for index, line in enumerate(lines["content"]):
                self.server.history[lines["offset"] + index] = json.loads(line)
            run, client = self.path.split("/")[4], self.headers.get("X-Wandb-Async-Client-Id")
            told = self.server.lines.setdefault((run, client), {})
            told.update({lines["offset"] + n: json.loads(line) for n, line in enumerate(lines["content"])})
            for line in request.get("files", {}).get("wandb-summary.json", {"content": []})["content"]:
                self.server.summary = json.loads(line)
            if request.get("complete"):
                self.server.exit_code = request.get("exitcode")
                self.server.states.append(request.get("exitcode"))
                self.server.ends.append((run, request.get("exitcode")))
                self.server.rows_at_ends.append(sum(map(len, self.server.lines.values())))
            return self.answer({})
        if "mutation UpsertBucket" in request.get("query", ""):
            self.server.buckets.append(request["variables"])
            if config := request["variables"].get("config"):
                self.server.config = json.loads(config)
            name = request["variables"].get("name")
            project = {"name": "shardwise", "entity": {"name": "someone"}}
            count, inserted = len(self.server.history), not self.server.states
            bucket = {"id": "aWQ=", "name": name, "displayName": name, "project": project, "historyLineCount": count}
            self.server.states.append("running")
            return self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}})
        if "query RunResumeStatus" in request.get("query", ""):
            model = {"name": "shardwise", "entity": {"name": "someone"}, "bucket": None}
            if self.server.states:
                model["bucket"] = self.resumable(request["variables"]["name"])
            return self.answer({"data": {"model": model}})
        for operation, answer in self.server.operations.items():
            if re.search(rf"(query|mutation) {operation}\b", request.get("query", "")):
                return self.answer({"data": answer(request.get("variables") or {})})
        return self.answer({"data": None, "errors": [{"message": "not here"}]})

    def resumable(self, name):
        rows = self.server.history
        return {
            "name": name,
            "displayName": name,
            "summaryMetrics": json.dumps(self.server.summary),
            "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(rows[max(rows)])] if rows else []),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "config": json.dumps(self.server.config),
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }

    def answer(self, content, *, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def service(client, monkeypatch):
    with StandIn() as stand_in:
        thread = threading.Thread(target=stand_in.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", stand_in.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield stand_in
        client.teardown()
        stand_in.shutdown()
        thread.join()


class TestOnline:
    def test_history_config_and_exit_code_arrive(self, service, tmp_path, caplog, capfd):
        caplog.set_level(logging.INFO, logger="shardwise.tracking")
        logger = tracker(tmp_path, run_id="abc", config={"batch": {"global_size": 64}})
        for step in range(3):
            logger.log_metrics({"train/loss": 1.0 / (step + 1)}, step=step)
        logger.finish(1)
        points = [service.history[index] for index in sorted(service.history)]
        assert [(point["step"], point["train/loss"]) for point in points] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
        assert service.exit_code == 1
        assert service.config["batch"]["value"] == {"global_size": 64}
        (line,) = [record.message for record in caplog.records if record.name == "shardwise.tracking"]
        assert line == f"W&B: {service.url}/someone/shardwise/runs/abc"
        assert capfd.readouterr().err.replace(line, "").strip() == ""

    def test_a_login_in_netrc_is_one(self, service, tmp_path, monkeypatch):
        monkeypatch.delenv("WANDB_API_KEY")
        host = service.url.removeprefix("http://")
        Path(os.environ["NETRC"]).write_text(f"machine {host}\n  login user\n  password {KEY}\n")
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        assert service.exit_code == 0

    def test_a_service_that_goes_away_does_not_hold_the_end(self, service, tmp_path, caplog, capfd):
        logger = tracker(tmp_path, finish_timeout=2.0)
        logger.log_metrics({"x": 1.0}, step=0)
        service.stream_works = False
        start = time.monotonic()
        for step in range(100):
            logger.log_metrics({"x": 1.0}, step=step)
        assert time.monotonic() - start < 1
        logger.finish(0)
        assert time.monotonic() - start < 10
        (line,) = [record.message for record in caplog.records]
        assert re.search(
            r"did not take everything within 2 s: upload the rest with: wandb sync --include-online /", line
        )
        (folder,) = (tmp_path / "run/wandb").glob("run-*")
        assert len(history(records(folder))) == 101
        assert exit_codes(records(folder)) == [0]


class Life:
    """A run from one start of its process to the end of that: a training row per step, a validation every third."""

    def __init__(self, tmp_path, *, resume_at=None, **arguments):
        folder = Path(tmp_path) / "run"
        folder.mkdir(exist_ok=True)
        self.lines = JsonlLogger(folder / "metrics.jsonl")
        if resume_at is not None:
            self.lines.cut(resume_at)
        self.tracker = tracker(tmp_path, run_id="abc", resume=resume_at is not None, **arguments)
        self.tracker.log_hyperparams({"lr": 0.1})

    def log(self, metrics, step):
        for logger in (self.lines, self.tracker):
            logger.log_metrics(metrics, step=step)

    def train(self, first, last, *, noise=0.0, pause=0.0):
        """Returns what a checkpoint in the middle of each step, before its validation, says of metrics.jsonl."""
        sizes = {}
        for step in range(first, last + 1):
            self.log({"train/loss": 1 / step + noise, "lr": 0.1}, step)
            sizes[step] = self.lines.size()
            self.validate(step)
            time.sleep(pause)
        return sizes

    def validate(self, step):
        if step % 3 == 0:
            self.log({"val/loss": 2 / step}, step)


def killed_life(tmp_path, first, last, *, resume_at=None, rest=2.2, **arguments):
    """A life in a process of its own that SIGKILL ends, `rest` seconds after its last row; returns its sizes."""
    told = Path(tmp_path) / "sizes.json"
    pid = os.fork()
    if pid == 0:
        try:
            life = Life(tmp_path, resume_at=resume_at, **arguments)
            # ninety rows take two seconds and a half: between two uploads, of which there is one a second
            told.write_text(json.dumps(life.train(first, last, pause=0.0 if rest else 0.026)))
            time.sleep(rest)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    return {int(step): size for step, size in json.loads(told.read_text()).items()}


def points(rows):
    """(step, metrics) of rows or lines, and how often each is there."""
    own = ("step", "time", "nonfinite")
    plain = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    return Counter((row["step"], tuple(sorted((k, v) for k, v in row.items() if k not in own))) for row in plain)


def logged_offline(tmp_path):
    folders = sorted((Path(tmp_path) / "run" / "wandb").glob("offline-run-*"))
    return [row for folder in folders if list(folder.glob("*.wandb")) for row in history(records(folder))]


def next_second():
    """The client names folders by the second."""
    time.sleep(1.05)


class TestResumedOffline:
    def test_each_point_once_wherever_the_file_was_torn(self, client, tmp_path):
        original = tmp_path / "original"
        original.mkdir()
        life = Life(original)
        sizes = life.train(1, 9)
        life.tracker.finish(1)
        (log,) = original.glob("run/wandb/offline-run-*/*.wandb")
        size = log.stat().st_size
        assert (len(read_log(log).rows), read_log(log).whole) == (12, size)
        next_second()
        for resumed, kept in (
            (5, size),
            (6, size - 1),
            (6, size - 300),
            (9, size // 2),
            (3, size // 3),
            (5, 40),
            (5, 7),
        ):
            case = tmp_path / f"{resumed}-{kept}"
            shutil.copytree(original, case)
            (torn,) = case.glob("run/wandb/offline-run-*/*.wandb")
            os.truncate(torn, kept)
            life = Life(case, resume_at=sizes[resumed])
            life.validate(resumed)
            life.train(resumed + 1, 12)
            life.tracker.finish(0)
            found = points(logged_offline(case))
            assert set(found.values()) == {1}, (resumed, kept)
            assert found == points(lines_of(life.lines.path)), (resumed, kept)
            assert len(found) == 16

    def test_damage_in_the_middle_costs_no_point(self, client, tmp_path, caplog):
        caplog.set_level(logging.INFO, logger="shardwise.tracking")
        life = Life(tmp_path)
        sizes = life.train(1, 9)
        life.tracker.finish(1)
        (path,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        next_second()
        life = Life(tmp_path, resume_at=sizes[9])
        life.validate(9)
        life.tracker.finish(0)
        assert points(logged_offline(tmp_path)) == points(lines_of(life.lines.path))
        assert path.read_bytes() + path.with_name(path.name + ".torn").read_bytes() == data
        folders = " ".join(str(folder) for folder in sorted((tmp_path / "run/wandb").glob("offline-run-*")))
        told = [record.message for record in caplog.records]
        assert f"kept as *.torn: {path}" in told[1]
        assert told[2] == f"W&B: offline (not logged in); upload later with: wandb sync {folders}"

    def test_a_step_that_is_repeated_without_rates_comes_once(self, client, tmp_path):
        life = Life(tmp_path)
        sizes = life.train(1, 1)
        for step in (2, 3):
            life.log({"train/loss": 1 / step, "samples_per_second": 9.0}, step)
        life.tracker.finish(0)
        next_second()
        life = Life(tmp_path, resume_at=sizes[1])
        life.log({"train/loss": 1 / 2}, 2)  # the first step of a process has none
        life.log({"train/loss": 1 / 3, "samples_per_second": 9.0}, 3)
        life.log({"train/loss": 1 / 4, "samples_per_second": 9.0}, 4)
        life.tracker.finish(0)
        assert [row["step"] for row in logged_offline(tmp_path)] == [1, 2, 3, 4]

    def test_rows_past_a_preemption_replace_none(self, client, tmp_path):
        life = Life(tmp_path)
        sizes = life.train(1, 5)
        life.log({"train/loss": 9.0}, 5)  # as training ends out of turn, after the checkpoint
        life.tracker.finish(75)
        for last, code in ((7, 75), (9, 0)):
            next_second()
            life = Life(tmp_path, resume_at=sizes[5])
            life.train(6, last, noise=1e-9)  # another layout
            life.tracker.finish(code)
        steps = Counter(
            (row["step"], tuple(sorted(set(row) & {"train/loss", "val/loss"}))) for row in logged_offline(tmp_path)
        )
        assert steps.pop((5, ("train/loss",))) == 2
        assert steps == {(s, ("train/loss",)): 1 for s in (1, 2, 3, 4, 6, 7, 8, 9)} | {
            (s, ("val/loss",)): 1 for s in (3, 6, 9)
        }

    def test_folders_that_are_gone_are_one_line(self, client, tmp_path, caplog):
        life = Life(tmp_path)
        sizes = life.train(1, 4)
        life.tracker.finish(0)
        shutil.rmtree(tmp_path / "run/wandb")
        life = Life(tmp_path, resume_at=sizes[2])
        life.train(3, 5)
        life.tracker.finish(0)
        assert [row["step"] for row in logged_offline(tmp_path)] == [3, 3, 4, 5]
        (line,) = [record.message for record in caplog.records]
        assert line.endswith("points of this run have been logged: those since step 2 may come twice")

    def test_long_files_are_read_to_their_end(self, client, tmp_path):
        logger = tracker(tmp_path, run_id="abc")
        for step in range(1500):
            logger.log_metrics({f"metric/{'x' * (step % 97)}": 1.0, "y": math.nan}, step=step)
        logger.log_metrics({f"{'wide' * 20}/{number}": 1.0 for number in range(1000)}, step=1500)  # three blocks
        logger.finish(0)
        (path,) = offline_run(tmp_path).glob("*.wandb")
        log = read_log(path)
        assert [row.step for row in log.rows] == list(range(1501))
        assert (log.rows[96].names, len(log.rows[-1].names)) == ({f"metric/{'x' * 96}", "y"}, 1000)
        assert log.has_run
        assert log.has_end
        assert log.whole == log.size


def sync(service, *paths):
    """The command that the log line tells the user."""
    command = [str(Path(sys.executable).with_name("wandb")), "sync", *map(str, paths)]
    environment = os.environ | {"WANDB_DIR": os.environ["HOME"]}  # its log
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "ERROR" not in done.stderr
    assert done.returncode == 0, done.stderr
    return [service.history[index] for index in sorted(service.history)]


class TestResumedOnline:
    @pytest.mark.parametrize("delivered", [0, 3, 6, 10, 12])
    def test_each_point_once_however_much_had_arrived(self, service, tmp_path, delivered):
        life = Life(tmp_path, config={"trainer": {"max_steps": 9}})
        sizes = life.train(1, 9)
        life.tracker.finish(1)
        service.history = {index: row for index, row in service.history.items() if index < delivered}
        service.summary = service.history[delivered - 1] if delivered else {}  # each request brings both
        next_second()
        life = Life(tmp_path, resume_at=sizes[6], config={"trainer": {"max_steps": 12}})
        assert life.tracker.experiment.id == "abc"
        life.validate(6)
        life.train(7, 12)
        life.tracker.finish(0)
        rows = [service.history[index] for index in sorted(service.history)]
        assert points(rows) == points(lines_of(life.lines.path))
        assert [row["_step"] for row in rows] == list(range(16))
        assert service.summary["step"] == 12
        assert service.config["trainer"]["value"] == {"max_steps": 12}

    def test_a_run_that_had_failed_runs_again_and_ends_well(self, service, tmp_path):
        life = Life(tmp_path)
        sizes = life.train(1, 2)
        life.tracker.finish(1)
        assert service.states[-1] == 1
        next_second()
        life = Life(tmp_path, resume_at=sizes[1])
        life.train(2, 3)
        assert service.states[-1] == "running"
        life.tracker.finish(0)
        assert service.states[-1] == 0

    def test_a_run_that_the_service_never_saw_arrives_whole(self, service, tmp_path):
        life = Life(tmp_path, mode="disabled")
        sizes = life.train(1, 4)
        life = Life(tmp_path, resume_at=sizes[3], mode="online")
        life.validate(3)
        life.train(4, 5)
        life.tracker.finish(0)
        assert points(service.history.values()) == points(lines_of(life.lines.path))
        assert all(abs(row["_timestamp"] - time.time()) < 60 for row in service.history.values())

    @pytest.mark.slow
    def test_offline_folders_of_a_killed_and_resumed_run_make_one_run(self, service, tmp_path):
        sizes = killed_life(tmp_path, 1, 6, mode="offline")
        (torn,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
        assert len(read_log(torn).rows) == 8
        assert not read_log(torn).has_end
        os.truncate(torn, torn.stat().st_size - 300)
        killed_life(tmp_path, 7, 6, mode="offline", resume_at=sizes[6])  # before it logs anything of its own
        next_second()
        life = Life(tmp_path, resume_at=sizes[4], mode="offline")
        life.train(5, 9)
        life.tracker.finish(0)
        rows = sync(service, *sorted((tmp_path / "run/wandb").glob("offline-run-*")))
        assert points(rows) == points(lines_of(life.lines.path))
        assert [row["_step"] for row in rows] == list(range(12))
        assert service.exit_code == 0
        assert sync(service, *(tmp_path / "run/wandb").iterdir()) == rows  # nothing is left to upload

    @pytest.mark.slow
    def test_killed_while_it_uploads(self, service, tmp_path):
        often = LEAN | {"x_file_stream_transmit_interval": 1.0}
        sizes = killed_life(tmp_path, 1, 90, rest=0.0, settings=often)
        arrived = len(service.history)
        assert 0 < arrived < 120
        next_second()
        for resumed in (85, 20):
            sizes |= killed_life(tmp_path, resumed + 1, 100, rest=0.0, resume_at=sizes[resumed], settings=often)
            next_second()
        life = Life(tmp_path, resume_at=sizes[100])
        life.train(101, 102)
        life.tracker.finish(0)
        rows = [service.history[index] for index in sorted(service.history)]
        assert points(rows) == points(lines_of(life.lines.path))

    @pytest.mark.slow
    def test_the_service_comes_and_goes(self, service, tmp_path, caplog):
        caplog.set_level(logging.INFO, logger="shardwise.tracking")
        life = Life(tmp_path, mode="offline")
        sizes = life.train(1, 6)
        life.tracker.finish(75)
        (waiting,) = tmp_path.glob("run/wandb/offline-run-*")
        next_second()
        life = Life(tmp_path, resume_at=sizes[4], mode="online")
        sizes |= life.train(5, 9)
        life.tracker.finish(75)
        assert f"earlier points wait in the run folder, upload later with: wandb sync {waiting}" in caplog.text
        next_second()
        life = Life(tmp_path, resume_at=sizes[8], mode="offline")
        life.train(9, 12)
        life.tracker.finish(0)
        rows = sync(service, *tmp_path.glob("run/wandb/offline-run-*"))
        assert points(rows) == points(lines_of(life.lines.path))
        assert [row["_step"] for row in rows] == list(range(16))
