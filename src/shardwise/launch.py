"""Start the ranks of a job and wait for them: in this process, or under PyTorch's elastic agent.

The agent is called from here, so that one command starts every process of this machine; each job has a free port of its
own. Under torchrun the ranks exist already: rank 0 hands them the job through the agent's store.
"""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import ConfigError, DivergedError
from shardwise.job import Job
from shardwise.signals import GRACE_SECONDS, PREEMPTED, Stop, owned_signals, signals_wait
from shardwise.worker import first_failure, obey, set_failures_aside, work

PRELOADED = ["shardwise.run"]
"""Imported once by the forkserver; each worker then starts in a fraction of a second."""


class RanksFailedError(RuntimeError):
    """A rank has failed; the message is its traceback."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
        """Which rank, and what happened to it, in one line."""


def warm_up(modules: Sequence[str] = ()) -> None:
    """Let a forkserver import what workers need while this process goes on. Call before importing torch here.

    Args:
        modules: to be imported besides; where the forkserver runs already, it is too late for them.
    """
    from multiprocessing import forkserver, resource_tracker

    # __main__ would be imported by each worker again, for nothing: the entry point stands in a module.
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *modules, "shardwise.template"])
    with signals_wait():
        resource_tracker.ensure_running()
    with signals_wait():  # again, as multiprocessing lets some through after it has started its helper
        forkserver._forkserver.ensure_running()  # not the module's, which share_template() does not reach


def share_template() -> None:
    """Let what this process starts come from the forkserver that this process came from, with its imports done.

    multiprocessing means that (each child inherits what it takes to ask for more), but its ensure_running() takes a
    forkserver that it has not started itself for none, and starts another. One that has died is replaced, as always.
    """
    from multiprocessing import forkserver, resource_tracker

    server: Any = forkserver._forkserver
    origin, ensure_running = os.getppid(), server.ensure_running
    if server._forkserver_pid is not None or not server._forkserver_address or server._forkserver_alive_fd is None:
        return  # not a child of a forkserver

    def running() -> None:
        if server._forkserver_pid is None and server._forkserver_address:
            if os.getppid() == origin:
                resource_tracker.ensure_running()
                return
            os.close(server._forkserver_alive_fd)
            server._forkserver_address = server._forkserver_alive_fd = None
        ensure_running()

    server.ensure_running = running


def launch(job: Job, stop: Stop | None = None) -> dict[str, Any]:
    """Run a job to its end; returns what rank 0 returned, whose status is ``completed`` or ``preempted``.

    Args:
        job: what to run; its run folder exists.
        stop: what signals ask for, where the caller owns them; they are owned here otherwise.

    Raises:
        ConfigError: a rank found a mistake of the user's.
        DivergedError: a loss or a gradient was not finite; a restart would come to the same end.
        RanksFailedError: a rank failed otherwise, with the traceback of the first; restarts are used up.
        SystemExit: a signal has ended the job at once.
    """
    if job.world["launch"] == "torchrun":
        return obey(job)
    set_failures_aside(job.run_folder)
    if job.world["launch"] != "local":
        return obey(job)
    if stop is not None:
        return _launch_with_restarts(job, stop)
    # The workers have their own time to end before this process does.
    with owned_signals(console=True, grace=3 * GRACE_SECONDS) as stop:
        return _launch_with_restarts(job, stop)


# ---- processes of this machine -------------------------------------------------------------------------------------


def _launch_with_restarts(job: Job, stop: Stop) -> dict[str, Any]:
    """Launch a job until it ends otherwise than by a crash, or its restarts are used up.

    Each attempt has an agent of its own: this process knows best why one has failed, and from which checkpoint all
    ranks of the next one go on.
    """
    warm_up()
    restarts, origin = job.config["launch"]["max_restarts"], job.checkpoint
    for restart in range(1, restarts + 1):
        try:
            return _launch_local(job, stop)
        except RanksFailedError as error:
            if stop.requested is not None:
                raise
            job = _restarted(job, f"{error.cause}; restart {restart} of {restarts}", origin=origin)
    return _launch_local(job, stop)


def _restarted(job: Job, why: str, *, origin: str | None) -> Job:
    """The job as it goes on from its newest whole checkpoint, or begins anew; says so.

    Args:
        job: as it was launched the last time.
        why: what has befallen it, in one line.
        origin: the checkpoint of its first launch, which may lie elsewhere than those that it writes now.

    Raises:
        ConfigError: there is a checkpoint that cannot be read now, or is of a newer format.
    """
    from shardwise.checkpoint.find import find_checkpoint, newest_whole, stores_of
    from shardwise.checkpoint.manifest import split_name, step_of

    set_failures_aside(job.run_folder)
    try:
        stores = stores_of(job.run_folder)
        found, skipped = newest_whole(stores, shown=job.run_folder)
        for name, problems in skipped.items():
            url = name if "/" in name else stores[0].url_of(name)
            print(f"{url} is left out: {problems[0]}", file=sys.stderr, flush=True)
        checkpoint = None if found is None else found.url
        how = "" if found is None else f"goes on from step {step_of(found.name)}"
        if origin is not None and origin.rpartition("/")[0] not in {store.url.rstrip("/") for store in stores}:
            parts = split_name(origin.rpartition("/")[2])
            if found is None or (origin != job.parent and parts is not None and parts[0] > step_of(found.name)):
                there = find_checkpoint(origin)
                checkpoint, step = origin, there.store.manifest(there.name)["step"]
                begins = f"begins anew from {origin}, as there is no whole checkpoint of its own"
                how = begins if origin == job.parent else f"goes on from step {step}, which lies in {there.store.url}"
    except ConfigError as error:
        raise ConfigError(f"{why}, which is left to you, as nothing is to be lost: {error}") from error
    if checkpoint is None:  # which is the parent's again, where there is one
        checkpoint, how = job.parent, "begins anew, as there is no whole checkpoint"
    print(f"{why}: the run {how}", file=sys.stderr, flush=True)
    return replace(job, resumed=True, checkpoint=checkpoint)


def _launch_local(job: Job, stop: Stop) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
    # A rank that is told to end at once and does not is killed after this many seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(GRACE_SECONDS) + 3))
    try:
        # The agent would leave its folder of logs behind; the ranks' logs are in the run folder.
        with tempfile.TemporaryDirectory(prefix="shardwise-") as logs, _workers_of_agent(stop):
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
                signals_to_handle="",  # they have an owner
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            return elastic_launch(settings, work)(job.dumps())[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        record = first_failure(job.run_folder)
        if stop.requested is not None and failure.exitcode > 128 and (record is None or record["lost_peer"]):
            # The request came before training had begun, when a worker has nothing to save.
            raise SystemExit(128 + stop.signal) from None
        raise failed(job, rank, failure.exitcode) from None


@contextlib.contextmanager
def _workers_of_agent(stop: Stop) -> Iterator[None]:
    """Within this block a request reaches the agent's workers, and the agent ends them by SIGQUIT.

    It would send SIGTERM to the peers of a rank that has failed, which asks for a checkpoint that cannot be made any
    more. It has no setting for that, and does not say who its workers are: two methods are wrapped.
    """
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    start, close = MultiprocessContext._start, MultiprocessContext._close
    workers: list[Any] = []

    def send(one: signal.Signals, process: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, one)

    def end(process: Any) -> None:
        send(signal.SIGQUIT, process)
        send(signal.SIGCONT, process)  # one that has been stopped would take no notice until it is killed

    def tell(one: signal.Signals) -> None:
        for process in workers:
            send(signal.SIGUSR1, process)

    def start_workers(context: Any) -> None:
        start(context)
        workers[:] = context._pc.processes
        for process in workers:
            process.terminate = functools.partial(end, process)
        if stop.requested is not None:  # while they were being started
            tell(stop.signal)

    def close_workers(context: Any, death_sig: signal.Signals, timeout: int = 30) -> None:
        close(context, signal.SIGQUIT, timeout)

    agent: Any = MultiprocessContext
    agent._start, agent._close = start_workers, close_workers
    try:
        with stop.deferred(tell):
            yield
    finally:
        agent._start, agent._close = start, close


def failed(job: Job, rank: int, exitcode: int) -> Exception:
    """What to raise for ranks that failed: the earliest record they left, or how the first of them ended."""
    record = first_failure(job.run_folder)
    if record is not None and record["lost_peer"] and exitcode < 0:
        record = None  # a rank was killed, and all that the others can tell is that it is gone
    if record is not None and record["config_error"]:
        return ConfigError(record["message"])
    if record is not None and record.get("diverged_at") is not None:
        return DivergedError(record["message"], step=record["diverged_at"])
    log = f"{job.run_folder}/ranks/rank_{record['rank'] if record else rank}.log"
    if record is not None:
        trace = record["traceback"].rstrip()
        cause = f"rank {record['rank']} failed: {trace.splitlines()[-1]}"
        return RanksFailedError(f"{trace}\nrank {record['rank']} failed first; its log: {log}", cause=cause)
    cause = f"rank {rank} {how_it_ended(exitcode)}"
    return RanksFailedError(f"{cause}; its log: {log}", cause=cause)


def how_it_ended(exitcode: int | None) -> str:
    """``was ended by SIGKILL (out of memory?)`` or ``ended with status 3``, from a process's exit code."""
    if exitcode is None or exitcode >= 0:
        return f"ended with status {exitcode}"
    hint = " (out of memory?)" if exitcode == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exitcode).name}{hint}"


def _quiet_elastic() -> None:
    # The agent repeats every failure in boxes of its own; the user gets the first traceback, once.
    for name in [*logging.root.manager.loggerDict, "torch.distributed.elastic", "torch.multiprocessing.spawn"]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
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
    if job is not None:
        set_failures_aside(job.run_folder)
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
    return PREEMPTED if obey(job)["status"] == "preempted" else 0


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
