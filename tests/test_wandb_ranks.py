"""The three ways in which ranks come to W&B: the real client, offline and against a stand-in for its service."""

import logging
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.metrics_file import read_lines
from shardwise.telemetry.statistics import flat_statistics, own_values
from shardwise.telemetry.table import RankTable
from shardwise.tracking import WandbTracker
from shardwise.tracking.lines import MetricLines
from shardwise.tracking.place import Place, place
from shardwise.tracking.wandb_parts import MOST_LINES, node_row, table_row
from test_tracking import LEAN, children, client, config_of, exit_codes, history, next_second, records, service, sync

__all__ = ["client", "service"]  # fixtures

NAMES = ("time/data", "memory/resident", "node/cpu")


def table_at(step: int, ranks: int) -> RankTable:
    """Every value says whose it is and when: time/data of rank 2 at step 10 is 10.2; node/cpu is of rank 0 only."""
    values = np.array([[step + 0.1 * rank, 1e6 * (rank + 1), np.nan if rank else 50.0] for rank in range(ranks)])
    return RankTable(step=step, steps=1, names=NAMES, values=values, hosts=("here",) * ranks)


class Lives:
    """A rank's part in a training, as StepMetrics logs it, with the files that every run has."""

    def __init__(self, folder: str, *, resume: bool = False, **arguments):
        self.rank, self.size = place().rank, place().world_size
        run = Path(folder)
        (run / "ranks").mkdir(parents=True, exist_ok=True)
        self.lines = MetricLines(run / "metrics.jsonl") if self.rank == 0 else None
        self.own = MetricLines(run / "ranks" / f"rank_{self.rank}.jsonl")
        settings = LEAN | arguments.pop("settings", {})
        self.tracker = WandbTracker(save_dir=run, run_id="abc", resume=resume, settings=settings, **arguments)
        self.tracker.log_hyperparams({"lr": 0.1})

    def train(self, *steps: int) -> "Lives":
        for step in steps:
            table = table_at(step, self.size)
            line = {"train/loss": 1.0 / step, **flat_statistics(table)}
            own = own_values(table, self.rank)
            if self.lines is not None:
                self.lines.append(line, step)
            self.own.append(own, step)
            self.tracker.log_metrics(line, step=step)
            self.tracker.log_rank(own, step)
            if self.rank == 0 or self.tracker.wants_every_table:
                self.tracker.log_ranks(table)
        return self


def live(folder: str, steps: tuple[int, ...], arguments: dict) -> dict:
    """On a rank of the pool: a whole life, and what is to be known of it."""
    import wandb

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("shardwise.tracking")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        lives = Lives(folder, **arguments).train(*steps)
        version = lives.tracker.version
        lives.tracker.finish(0)
        return {"told": told, "version": version, "alive": len(children("wandb-core"))}
    finally:
        logger.removeHandler(handler)
        wandb.teardown()


def folders(run: Path, ending: str = "") -> list[Path]:
    return sorted(path for path in (run / "wandb").glob("*run-2*") if path.name.endswith(ending))


def rows(found) -> list[dict]:
    """Rows without what the client adds to them, and with histograms as the client was given them."""
    made = []
    for row in found:
        made.append({name: value for name, value in row.items() if not name.startswith("_")})
        for name in [name for name in made[-1] if "/histogram/" in name]:
            histogram, _, field = name.rpartition("/")
            made[-1].setdefault(histogram, {})[field] = made[-1].pop(name)
    return made


def run_record(found):
    return next(record.run for record in found if record.WhichOneof("record_type") == "run")


# ---- before anything starts ----------------------------------------------------------------------------------------


class TestArguments:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"ranks": "gather"}, "logger.ranks=gather: no such choice; did you mean 'gathered'?"),
            ({"ranks": 3}, "logger.ranks=3: no such choice (gathered|grouped|shared)"),
            ({"ranks": "grouped", "run_per": "nodes"}, "logger.run_per=nodes: no such choice"),
            ({"run_per": "node"}, "logger.run_per=node is for logger.ranks=grouped, not for gathered"),
            (
                {"ranks": "shared", "mode": "offline"},
                "logger.ranks=shared needs the service and logger.mode=offline is without: type logger.ranks=grouped",
            ),
        ],
    )
    def test_a_wrong_word_is_one_line(self, given, message):
        with pytest.raises(ConfigError) as error:
            WandbTracker.check_arguments(**given)
        assert message.partition(";")[0] in str(error.value)
        assert "\n" not in str(error.value)

    def test_the_environment_can_rule_out_a_shared_run(self, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "offline")
        with pytest.raises(ConfigError, match=r"needs the service and WANDB_MODE=offline .* logger\.ranks=grouped"):
            WandbTracker(ranks="shared")
        WandbTracker.check_arguments(ranks="shared", mode="online")

    def test_a_wrong_word_ends_it_before_launch(self, train_py):
        run = train_py("logger.ranks=groupd", "trainer.max_steps=1", ok=False)
        assert "logger.ranks=groupd: no such choice" in run.stderr
        assert "grouped" in run.stderr
        assert not run.run_folders

    def test_the_rank_is_asked_when_it_is_known(self, monkeypatch):
        tracker = WandbTracker(ranks="grouped", run_per="node", run_id="abc")
        launcher = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        assert place() == Place(5, 8, 1, 4)
        assert place().node == 1
        tracker.log_ranks(table_at(1, 8))  # a second rank of its node: nothing starts, which would need a folder
        assert tracker.experiment.anything() is None


class TestRows:
    def test_up_to_64_ranks_have_lines_and_more_a_histogram_only(self):
        for ranks in (2, MOST_LINES, MOST_LINES + 1):
            row = table_row(table_at(1, ranks))
            lines = {name for name in row if re.fullmatch(r".*/rank_\d+", name)}
            few = ranks <= MOST_LINES
            assert lines == {f"{name}/rank_{r}" for name in NAMES[:2] for r in range(ranks) if few}
            assert set(row) - lines == {"time/data/histogram", "memory/resident/histogram"}
            edges = row["time/data/histogram"][1]
            assert (edges[0], edges[-1]) == (1.0, pytest.approx(1 + 0.1 * (ranks - 1)))
            values = table_at(1, ranks).values[:, 1]  # whole numbers: nothing hangs on the last digit
            expected = np.histogram(values, bins=len(row["memory/resident/histogram"][0]))
            np.testing.assert_allclose(row["memory/resident/histogram"][1], expected[1])
            np.testing.assert_array_equal(row["memory/resident/histogram"][0], expected[0])
        assert table_row(table_at(1, 1)) == {}
        table = RankTable(
            step=1, steps=1, names=("a", "b"), values=np.array([[3.0, np.inf], [3.0, 1.0], [np.nan, 2.0]])
        )
        row = table_row(table)
        assert [row["a/histogram"][0].sum(), row["b/histogram"][0].sum()] == [2, 2]
        assert {name for name in row if "rank" in name} == {"a/rank_0", "a/rank_1", "b/rank_1", "b/rank_2"}

    def test_a_node_has_figures_of_its_own_ranks(self):
        row = node_row(table_at(10, 4), Place(2, 4, 0, 2))
        assert row == {
            "time/data": pytest.approx(10.25),
            "time/data/max": pytest.approx(10.3),
            "time/data/max_rank": 3,
            "memory/resident": 3.5e6,
            "memory/resident/max": 4e6,
            "memory/resident/max_rank": 3,
        }
        assert node_row(table_at(10, 4), Place(0, 4, 0, 2))["node/cpu"] == 50.0

    @pytest.mark.slow
    def test_a_thousand_ranks_are_logged_in_less_than_50_ms(self, client, tmp_path):
        tracker = WandbTracker(save_dir=tmp_path / "run", run_id="abc", settings=LEAN)
        names = tuple(f"time/{number}" for number in range(25))
        values = np.random.default_rng(0).normal(size=(1024, 25)) ** 2
        seconds = []
        for step in range(6):
            table = RankTable(step=step, steps=1, names=names, values=values, hosts=("here",) * 1024)
            start = time.process_time()
            tracker.log_ranks(table)
            seconds.append(time.process_time() - start)
        tracker.finish(0)
        assert min(seconds[1:]) < 0.05


# ---- offline -------------------------------------------------------------------------------------------------------


class TestOffline:
    def test_gathered_is_one_run_with_every_rank_in_it(self, client, pool, tmp_path):
        run = tmp_path / "run"
        arguments = {"config": {"batch": {"global_size": 64}}, "mode": "offline"}
        first, second = pool.run(live, str(run), (10, 20), arguments, world_size=2)
        (folder,) = folders(run)
        found = records(folder)
        of_all, of_ranks = rows(history(found))[::2], rows(history(found))[1::2]
        assert of_all == [{"step": step, **line} for step, line, _ in read_lines(run / "metrics.jsonl")]
        for step, row in zip((10, 20), of_ranks, strict=True):
            histograms = {name: row.pop(name) for name in list(row) if name.endswith("/histogram")}
            assert set(histograms) == {"time/data/histogram", "memory/resident/histogram"}
            assert all(each["_type"] == "histogram" and sum(each["values"]) == 2 for each in histograms.values())
            assert row == {
                "step": step,
                **{f"time/data/rank_{rank}": pytest.approx(step + 0.1 * rank) for rank in (0, 1)},
                **{f"memory/resident/rank_{rank}": 1e6 * (rank + 1) for rank in (0, 1)},
            }
        assert config_of(found)["batch"] == {"global_size": 64}
        assert config_of(found)["lr"] == 0.1
        assert exit_codes(found) == [0]
        assert (second["told"], first["version"], second["alive"]) == ([], "abc", 0)
        assert first["told"] == [f"W&B: offline (logger.mode=offline); upload later with: wandb sync {folder}"]

    def test_grouped_is_a_run_for_each_rank_in_one_group(self, client, pool, tmp_path):
        run = tmp_path / "run"
        arguments = {"ranks": "grouped", "config": {"batch": {"global_size": 64}}, "mode": "offline"}
        first, second = pool.run(live, str(run), (10, 20), arguments, world_size=2)
        assert [first["version"], second["version"]] == ["abc-rank-0", "abc-rank-1"]
        for rank in (0, 1):
            (folder,) = folders(run, f"-abc-rank-{rank}")
            found = records(folder)
            record = run_record(found)
            assert (record.run_id, record.display_name) == (f"abc-rank-{rank}", f"abc-rank-{rank}")
            assert (record.run_group, record.job_type) == ("abc", "rank")
            config = config_of(found)
            assert config["place"]["rank"] == rank
            assert ("batch" in config, "lr" in config) == (rank == 0, rank == 0)
            own = {"node/cpu": 50.0} if rank == 0 else {}
            expected = [
                {"step": s, "time/data": pytest.approx(s + 0.1 * rank), "memory/resident": 1e6 * (rank + 1), **own}
                for s in (10, 20)
            ]
            of_all = [row for row in rows(history(found)) if "train/loss" in row]
            assert [row for row in rows(history(found)) if "train/loss" not in row] == expected
            assert len(of_all) == (2 if rank == 0 else 0)
            assert exit_codes(found) == [0]
            if rank == 0:
                assert of_all[0]["time/data/mean"] == pytest.approx(10.05)
                assert (of_all[0]["time/data/max_rank"], "time/data" in of_all[0]) == (1, False)
        all_of_them = f"upload later with: wandb sync {run}/wandb/offline-run-*-abc*"
        assert first["told"] == [f"W&B: offline (logger.mode=offline); {all_of_them}"]
        (line,) = second["told"]
        assert line.endswith(f"wandb sync {folders(run, '-abc-rank-1')[0]}")

    def test_a_run_per_node_has_the_figures_of_its_ranks(self, client, pool, tmp_path):
        run = tmp_path / "run"
        pool.run(live_on_two_nodes, str(run), world_size=4)
        assert len(folders(run)) == 2
        for node in (0, 1):
            (folder,) = folders(run, f"-abc-node-{node}")
            record = run_record(records(folder))
            assert (record.run_group, record.job_type) == ("abc", "node")
            own = [row for row in rows(history(records(folder))) if "train/loss" not in row]
            assert [row["time/data"] for row in own] == [pytest.approx(10.05 + 0.2 * node)]
            assert [row["time/data/max_rank"] for row in own] == [1 + 2 * node]

    @pytest.mark.parametrize("way", ["gathered", "grouped"])
    def test_a_killed_and_resumed_run_has_each_point_of_each_rank_once(self, client, pool, tmp_path, way):
        run = tmp_path / "run"
        arguments = {"ranks": way, "mode": "offline"}
        pool.run(live, str(run), (1, 2, 3, 4), arguments, world_size=2)
        for path in run.glob("wandb/offline-run-*/*.wandb"):  # the machine died: each file has lost another part
            os.truncate(path, path.stat().st_size * (3 if "rank-1" in path.name else 4) // 6)
        for path in [run / "metrics.jsonl", *run.glob("ranks/*.jsonl")]:  # a checkpoint at step 3
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
        next_second()
        pool.run(live, str(run), (4, 5), {**arguments, "resume": True}, world_size=2)
        for rank in (0, 1):
            mine = folders(run, "" if way == "gathered" else f"-rank-{rank}")
            names: dict[tuple[int, frozenset], int] = {}
            for folder in mine:
                for path in folder.glob("*.wandb"):
                    for row in rows(history(records(path.parent))):
                        names[row["step"], frozenset(row)] = names.get((row["step"], frozenset(row)), 0) + 1
            kinds = 2 if rank == 0 or way == "gathered" else 1
            assert sorted(step for step, _ in names) == sorted([*range(1, 6)] * kinds)
            assert set(names.values()) == {1}

    def test_the_run_of_a_sweeps_agent_is_that_of_rank_0(self, client, pool, tmp_path, monkeypatch):
        for name, value in {"SWEEP_ID": "sweep", "RUN_ID": "agents", "PROJECT": "theirs"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        run = tmp_path / "run"
        pool.run(live, str(run), (10,), {"ranks": "grouped", "mode": "offline"}, world_size=2)
        found = {record.run_id: record for record in (run_record(records(folder)) for folder in folders(run))}
        assert set(found) == {"agents", "agents-rank-1"}
        assert {(record.project, record.run_group) for record in found.values()} == {("theirs", "agents")}
        assert [found[name].sweep_id for name in sorted(found)] == ["sweep", ""]

    def test_a_service_process_that_dies_under_one_rank_hurts_no_other(self, client, pool, tmp_path):
        run = tmp_path / "run"
        first, second = pool.run(live_and_lose_the_client, str(run), 1, world_size=2)
        assert len(first) == 1
        (folder,) = folders(run, "-rank-1")
        assert second[1:] == [
            f"W&B takes no more metrics (Connection lost): this run goes on without it; "
            f"upload what came before with: wandb sync {folder}"
        ]
        lines = {
            rank: [row["step"] for row in rows(history(records(folders(run, f"-rank-{rank}")[0])))] for rank in (0, 1)
        }
        assert lines == {0: [1, 1, 2, 2, 3, 3], 1: [1]}
        assert [step for step, _, _ in read_lines(run / "ranks" / "rank_1.jsonl")] == [1, 2, 3]

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
    @pytest.mark.parametrize("when", ["start", "middle"])
    def test_a_full_disk_is_one_line_and_ends_no_training(self, client, tmp_path, caplog, capfd, when):
        small = tmp_path / "run" / "wandb"
        small.mkdir(parents=True)
        if os.system(f"mount -t tmpfs -o size=3m tmpfs {small} 2>{tmp_path}/why") != 0:
            pytest.skip(f"no file system can be mounted here: {(tmp_path / 'why').read_text()}")
        try:
            if when == "start":
                (small / "full").write_bytes(b"0" * 2_500_000)
            tracker = WandbTracker(save_dir=tmp_path / "run", run_id="abc", settings=LEAN)
            tracker.log_hyperparams({"lr": 0.1})
            for step in range(2500):
                tracker.log_metrics({f"metric/{number}": step + number / 7 for number in range(40)}, step=step)
            tracker.finish(0)
            told = [record.message for record in caplog.records]
            where = re.escape(str(small))
            if when == "start":
                line = rf"W&B cannot start \(no space left in {where}\): this run goes on without it; .*"
            else:
                line = rf"W&B: no space left in {where}/offline.*: what comes now .* later with: wandb sync {where}/.*"
            assert len(told) == 1
            assert re.fullmatch(line, told[0])
            assert "Logging error" not in capfd.readouterr().err
        finally:
            os.system(f"umount {small}")


def live_on_two_nodes(folder: str) -> None:
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    live(folder, (10,), {"ranks": "grouped", "run_per": "node", "mode": "offline"})


def live_and_lose_the_client(folder: str, loser: int) -> list[str]:
    """As `live`, and on one rank SIGKILL ends the client's service process after the first step."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("shardwise.tracking")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        lives = Lives(folder, ranks="grouped", mode="offline").train(1)
        if lives.rank == loser:
            time.sleep(0.5)  # it writes to the disk every 0.05 s
            for pid in children("wandb-core"):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
        lives.train(2, 3).tracker.finish(0)
        return told
    finally:
        logger.removeHandler(handler)


# ---- online --------------------------------------------------------------------------------------------------------


class TestOnline:
    def test_shared_is_one_run_with_every_rank_told_apart(self, service, pool, tmp_path):
        told = pool.run(live, str(tmp_path / "run"), (10, 20), {"ranks": "shared"}, world_size=3)
        assert {run for run, _ in service.lines} == {"abc"}
        assert all(bucket["name"] == "abc" for bucket in service.buckets)
        by_rank = {}
        for (_, writer), lines in service.lines.items():
            assert writer is not None
            values = rows(lines[number] for number in sorted(lines))
            (rank,) = {name.partition("/")[0] for row in values for name in row if name.startswith("rank_")}
            by_rank[rank] = values
        assert set(by_rank) == {"rank_0", "rank_1", "rank_2"}
        for rank, name in enumerate(sorted(by_rank)):
            of_all = [row for row in by_rank[name] if "train/loss" in row]
            assert [row["step"] for row in of_all] == ([10, 20] if rank == 0 else [])
            own = [row for row in by_rank[name] if "train/loss" not in row]
            expected = {f"{name}/memory/resident": 1e6 * (rank + 1)} | ({f"{name}/node/cpu": 50.0} if rank == 0 else {})
            assert own == [
                {"step": s, f"{name}/time/data": pytest.approx(s + 0.1 * rank), **expected} for s in (10, 20)
            ]
        assert service.ends[-1] == ("abc", 0)
        assert told[0]["told"] == [f"W&B: {service.url}/someone/shardwise/runs/abc"]

    def test_a_rank_that_fails_does_not_end_a_shared_run(self, service, pool, tmp_path):
        pool.run(fail_on_rank_1, str(tmp_path / "run"), world_size=2)
        codes = [code for _, code in service.ends]
        assert codes[-1] == 0
        assert 1 not in codes

    def test_a_shared_run_ends_when_all_of_it_is_there(self, service, pool, tmp_path):
        pool.run(linger_on_rank_1, str(tmp_path / "run"), world_size=2)
        rows_of_all = sum(map(len, service.lines.values()))
        assert rows_of_all == 2 * 1 + 1 + 1
        assert service.rows_at_ends[-1] == rows_of_all

    def test_grouped_is_as_many_runs_as_ranks(self, service, pool, tmp_path):
        pool.run(live, str(tmp_path / "run"), (10, 20), {"ranks": "grouped"}, world_size=3)
        created = {b["name"]: (b["groupName"], b["jobType"]) for b in service.buckets if b["jobType"]}
        assert created == {f"abc-rank-{rank}": ("abc", "rank") for rank in range(3)}
        for rank in range(3):
            lines = service.lines[f"abc-rank-{rank}", None]
            own = [row for row in rows(lines.values()) if "train/loss" not in row]
            assert [row["time/data"] for row in own] == [pytest.approx(s + 0.1 * rank) for s in (10, 20)]
        assert sorted(service.ends) == [(f"abc-rank-{rank}", 0) for rank in range(3)]

    @pytest.mark.parametrize("way", ["gathered", "grouped", "shared"])
    def test_a_network_that_is_lost_for_a_while_loses_nothing(self, service, tmp_path, monkeypatch, way):
        settings = {"x_file_stream_transmit_interval": 1.0, "x_file_stream_retry_wait_min_seconds": 1.0}
        lives = Lives(str(tmp_path / "run"), ranks=way, settings=settings).train(1)
        time.sleep(1.2)
        service.stream_works = False
        start = time.monotonic()
        lives.train(*range(2, 40))
        assert time.monotonic() - start < 1.0  # it does not wait for the network
        time.sleep(2.2)
        service.stream_works = True
        lives.train(40, 41).tracker.finish(0)
        ((_, lines),) = service.lines.items()
        steps = [row["step"] for row in lines.values() if "train/loss" in row]
        assert sorted(steps) == list(range(1, 42))
        assert service.ends[-1][1] == 0

    def test_a_shared_run_without_a_service_is_a_run_for_each_rank(self, client, pool, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        run = tmp_path / "run"
        first, second = pool.run(live, str(run), (10,), {"ranks": "shared"}, world_size=2)
        (line,) = first["told"]
        assert line == (
            "W&B at http://127.0.0.1:9 is not reachable (Connection refused), where ranks share no run, so that each "
            "has one of its own: this run continues offline; "
            f"upload later with: wandb sync {run}/wandb/offline-run-*-abc*"
        )
        assert [first["version"], second["version"]] == ["abc-rank-0", "abc-rank-1"]
        (folder,) = folders(run, "-abc-rank-1")
        assert rows(history(records(folder)))[0]["time/data"] == pytest.approx(10.1)

    @pytest.mark.slow
    def test_the_command_that_is_told_uploads_the_runs_of_all_ranks(self, service, pool, tmp_path):
        run = tmp_path / "run"
        first, _ = pool.run(live, str(run), (10, 20), {"ranks": "grouped", "mode": "offline"}, world_size=2)
        pattern = first["told"][0].partition("wandb sync ")[2]
        sync(service, *sorted(Path("/").glob(pattern.lstrip("/"))))
        assert {name for name, _ in service.lines} == {"abc-rank-0", "abc-rank-1"}
        assert [len(lines) for _, lines in sorted(service.lines.items(), key=str)] == [4, 2]

    @pytest.mark.slow
    def test_a_resumed_shared_run_has_each_point_once(self, service, pool, tmp_path):
        run = tmp_path / "run"
        pool.run(live, str(run), (1, 2, 3), {"ranks": "shared"}, world_size=2)
        for path in [run / "metrics.jsonl", *run.glob("ranks/*.jsonl")]:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
        next_second()
        pool.run(live, str(run), (3, 4), {"ranks": "shared", "resume": True}, world_size=2)
        found = [(row["step"], frozenset(row)) for lines in service.lines.values() for row in rows(lines.values())]
        assert len(found) == len(set(found)) == 4 * 3


def linger_on_rank_1(folder: str) -> None:
    import wandb

    lives = Lives(folder, ranks="shared").train(1)
    if lives.rank == 1:
        time.sleep(1.5)
        lives.tracker.log_rank({"time/data": 1.0}, 2)
    lives.tracker.finish(0)
    wandb.teardown()


def fail_on_rank_1(folder: str) -> None:
    import wandb

    lives = Lives(folder, ranks="shared", finish_timeout=5.0)
    lives.train(1)
    if lives.rank == 1:
        lives.tracker.finish(1)
    dist.barrier()
    if lives.rank == 0:
        lives.train(2).tracker.finish(0)
    wandb.teardown()


# ---- as a user types it --------------------------------------------------------------------------------------------


STEPS = ("trainer.devices=2", "trainer.max_steps=3", "trainer.log_every_n_steps=1")
QUIET = "+logger.settings={x_disable_stats: true, x_save_requirements: false}"


def test_a_training_with_two_ranks_in_one_run(client, train_py):
    run = train_py(*STEPS, QUIET, "logger.mode=offline", ok=True)
    (folder,) = folders(run.run_folder)
    found = rows(history(records(folder)))
    assert [row["step"] for row in found if "train/loss" in row] == [1, 2, 3]
    lines = [row for row in found if "time/data/rank_1" in row]
    assert all("time/data/histogram" in row and "rank/loss/rank_0" in row for row in lines)
    assert [row["step"] for row in lines] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["rank", "node"])
def test_a_training_with_two_ranks_in_runs_of_their_own(client, train_py, unit):
    run = train_py(*STEPS, QUIET, "logger.mode=offline", "logger.ranks=grouped", f"logger.run_per={unit}", ok=True)
    found = [rows(history(records(folder))) for folder in folders(run.run_folder)]
    assert len(found) == (2 if unit == "rank" else 1)
    for each in found:
        assert [row["step"] for row in each if "rank/loss" in row] == [1, 2, 3]
        assert all("memory/peak" in row for row in each if "rank/loss" in row)
    assert [len([row for row in each if "train/loss" in row]) for each in found] == [3, 0][: len(found)]
    assert f"wandb sync {run.run_folder}/wandb/offline-run-*-" in run.stdout


@pytest.mark.slow
def test_a_training_with_two_ranks_that_share_a_run(service, train_py):
    run = train_py(*STEPS, QUIET, "logger.ranks=shared", ok=True)
    (name,) = {name for name, _ in service.lines}
    assert f"/runs/{name}" in run.stdout
    found = [rows(lines.values()) for lines in service.lines.values()]
    own = {rank: [row for each in found for row in each if f"rank_{rank}/rank/loss" in row] for rank in (0, 1)}
    assert [[row["step"] for row in own[rank]] for rank in (0, 1)] == [[1, 2, 3]] * 2
    assert [row["step"] for each in found for row in each if "train/loss" in row] == [1, 2, 3]
    assert (service.ends[-1], service.rows_at_ends[-1]) == ((name, 0), sum(map(len, found)))
