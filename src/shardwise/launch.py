"""Start the ranks of a job and wait for them: in this process, or under PyTorch's elastic agent.

The agent is called from here, so that one command starts every process of this machine; each job has a free port of its
own. Under torchrun the ranks exist already: rank 0 hands them the job through the agent's store.
"""

import json
import logging
import multiprocessing
import os
import signal
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job import Job
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
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
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
    )
    try:
        return elastic_launch(settings, work)(job.dumps())[0]
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise failed(job, rank, failure.message, failure.exitcode) from None


def failed(job: Job, rank: int, message: Any, exitcode: int) -> Exception:
    """What to raise for ranks that failed: the earliest record they left, or how the first of them ended."""
    record = first_failure(job.run_folder)
    if record is not None and record["config_error"]:
        return ConfigError(record["message"])
    log = f"{job.run_folder}/ranks/rank_{record['rank'] if record else rank}.log"
    if record is not None:
        return RanksFailedError(f"{record['traceback'].rstrip()}\nrank {record['rank']} failed first; its log: {log}")
    how = f"was ended by signal {-exitcode}" if exitcode < 0 else f"ended with status {exitcode}"
    hint = " (out of memory?)" if exitcode == -9 else ""
    return RanksFailedError(f"rank {rank} {how}{hint}; its log: {log}")


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
    )
    return PrefixStore(f"shardwise/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def tell_ranks(job: Job | None, status: int = 0) -> None:
    """Rank 0's word to the others: the job, or that there is none and with which status to leave."""
    _store().set("job", json.dumps({"job": None if job is None else job.dumps(), "status": status}))


def hear_from_rank_zero() -> int:
    """Wait for rank 0's word, and obey it; returns this rank's exit status."""
    word = json.loads(_store().get("job"))
    if word["job"] is None:
        return int(word["status"])
    obey(Job.loads(word["job"]))
    return 0
