"""The real W&B client, offline and against a small stand-in for its service on loopback."""

import contextlib
import gzip
import http.server
import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import textwrap
import threading
import time
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
        line = r"W&B takes no more metrics \(.*\): this run goes on without it; what came before is in /.*\n"
        assert re.fullmatch(line, done.stderr)

    @pytest.mark.parametrize("mode", ["disabled", "offline"])
    def test_a_mode_of_the_environment_counts_under_auto(self, client, tmp_path, monkeypatch, mode):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        logger = tracker(tmp_path)
        logger.log_metrics({"x": 1.0}, step=0)
        logger.finish(0)
        assert bool(list((tmp_path / "run").glob("wandb/offline-run-*"))) == (mode == "offline")

    def test_an_unknown_mode_is_one_line(self):
        with pytest.raises(ConfigError, match=r"logger.mode=onlin .*auto, online, offline, disabled"):
            WandbTracker(mode="onlin")


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
        self.exit_code: int | None = None
        self.config: dict = {}
        self.stream_works = True
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
            if request.get("complete"):
                self.server.exit_code = request.get("exitcode")
            return self.answer({})
        if "mutation UpsertBucket" in request.get("query", ""):
            if config := request["variables"].get("config"):
                self.server.config = json.loads(config)
            name = request["variables"].get("name")
            project = {"name": "shardwise", "entity": {"name": "someone"}}
            bucket = {"id": "aWQ=", "name": name, "displayName": name, "project": project, "historyLineCount": 0}
            return self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        return self.answer({"data": None, "errors": [{"message": "not here"}]})

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
