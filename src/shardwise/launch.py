"""Start the ranks of a job and wait for them: in this process, or under PyTorch's elastic agent.

The agent is called from here, so that one command starts every process of this machine; each job has a free port of its
own. Under torchrun the ranks exist already: rank 0 hands them the job through the agent's store.
"""

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.signals import GRACE_SECONDS, fatal_signals
from shardwise.worker import first_failure, obey, work

PRELOADED = ["shardwise.run"]
"""Imported once by the forkserver; each worker then starts in a fraction of a second."""


class RanksFailedError(RuntimeError):
    """A rank has failed; the message is its traceback."""


def warm_up() -> None:
    """Let a forkserver import what workers need while this process goes on. Call before importing torch here."""
    from multiprocessing import forkserver

    # __main__ would be imported by each worker again, for nothing: the entry point stands in a module.
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def launch(job: Job) -> dict[str, Any]:
    """Run a job to its end; returns what rank 0 returned.

    Raises:
        ConfigError: a rank found a mistake of the user's.
        RanksFailedError: a rank failed otherwise, with the traceback of the first.
    """
    if job.world["launch"] == "local":
        return _launch_local(job)
    return obey(job)


def _launch_local(job: Job) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
    # A rank that a signal does not end is killed after this many seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(GRACE_SECONDS) + 3))
    before = {one: signal.getsignal(one) for one in fatal_signals()}
    try:
        # The agent would leave its folder of logs behind; the ranks' logs are in the run folder.
        with tempfile.TemporaryDirectory(prefix="shardwise-") as logs:
            settings = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=job.world["devices"],
                run_id=job.run_id,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                rdzv_configs={"timeout": job.config["launch"]["start_timeout"]},
                local_addr="localhost",
                max_restarts=0,
                monitor_interval=0.1,
                start_method="forkserver",
                signals_to_handle=",".join(one.name for one in before),
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            return elastic_launch(settings, work)(job.dumps())[0]
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise failed(job, rank, failure.exitcode) from None
    finally:
        for one, handler in before.items():  # the agent keeps its own
            signal.signal(one, handler)


def failed(job: Job, rank: int, exitcode: int) -> Exception:
    """What to raise for ranks that failed: the earliest record they left, or how the first of them ended."""
    record = first_failure(job.run_folder)
    if record is not None and record["lost_peer"] and exitcode < 0:
        record = None  # a rank was killed, and all that the others can tell is that it is gone
    if record is not None and record["config_error"]:
        return ConfigError(record["message"])
    log = f"{job.run_folder}/ranks/rank_{record['rank'] if record else rank}.log"
    if record is not None:
        return RanksFailedError(f"{record['traceback'].rstrip()}\nrank {record['rank']} failed first; its log: {log}")
    return RanksFailedError(f"rank {rank} {how_it_ended(exitcode)}; its log: {log}")


def how_it_ended(exitcode: int | None) -> str:
    """``was ended by SIGKILL (out of memory?)`` or ``ended with status 3``, from a process's exit code."""
    if exitcode is None or exitcode >= 0:
        return f"ended with status {exitcode}"
    hint = " (out of memory?)" if exitcode == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exitcode).name}{hint}"


def _quiet_elastic() -> None:
    # The agent repeats every failure in boxes of its own; the user gets the first traceback, once.
    for name in [*logging.root.manager.loggerDict, "torch.distributed.elastic"]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True
            logging.getLogger(name).setLevel(logging.CRITICAL)


# ---- ranks that exist already --------------------------------------------------------------------------------------


def _store() -> Any:
    """The store of the agent that started this rank, apart from what else is kept there."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0",
        timeout=timedelta(seconds=600),
        multi_tenant=True,  # torch's own process group meets at the same port
    )
    return PrefixStore(f"shardwise/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def tell_ranks(job: Job | None, status: int = 0) -> None:
    """Rank 0's word to the others: the job, or that there is none and with which status to leave.

    Raises:
        ConfigError: two processes are the same rank.
    """
    store = _store()
    store.set("job", json.dumps({"job": None if job is None else job.dumps(), "status": status}))
    _meet(store, seconds=60 if job is None else job.config["launch"]["start_timeout"])


def hear_from_rank_zero() -> int:
    """Wait for rank 0's word, and obey it; returns this rank's exit status."""
    store = _store()
    word = json.loads(store.get("job"))
    job = None if word["job"] is None else Job.loads(word["job"])
    _meet(store, seconds=60 if job is None else job.config["launch"]["start_timeout"])
    if job is None:
        return int(word["status"])
    obey(job)
    return 0


def _meet(store: Any, *, seconds: float) -> None:
    """Wait until every rank is here, once: two nodes of one number would otherwise train apart, or wait for ever."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store.add(f"claims/{rank}", 1) > 1:
        store.set("conflict", str(rank))
    missing, deadline = list(range(size)), time.monotonic() + seconds
    while missing and time.monotonic() < deadline:
        if store.check(["conflict"]):
            taken = store.get("conflict").decode()
            raise ConfigError(
                f"two processes say that they are rank {taken} of {size}: give every node a --node-rank of its own, or "
                f"start them with --rdzv-backend=c10d"
            )
        missing = [other for other in missing if not store.check([f"claims/{other}"])]
        time.sleep(0.05)
    if missing:
        shown = ", ".join(map(str, missing))
        raise ConfigError(f"rank {shown} of {size} did not come within launch.start_timeout={seconds:g} s")
