"""Where a process stands on the mesh of all ranks, and the collectives that Lightning asks of a strategy."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins import ClusterEnvironment
from lightning_fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning_fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.mesh import build_mesh, check_agreement, data_group, limit_collectives
from shardwise.parallel.timed_collectives import recorder, time_collectives
from shardwise.step_clock import StepClock
from shardwise.strategies.spawn import Spawn


class MeshProcess(ParallelStrategy):
    """One process of a mesh: its ranks, its device, its groups.

    Args:
        degrees: mesh axis -> degree, at most one of them -1.
        facts: name -> plain value on which all ranks have to agree.
        start_timeout: seconds for meeting the other ranks and for the first step.
        collective_timeout: seconds for a collective after the first step.
        cluster_environment: how the processes came to be; Lightning finds out if not given.
    """

    def __init__(
        self,
        *,
        degrees: Mapping[str, int],
        facts: Mapping[str, Any],
        start_timeout: float,
        collective_timeout: float,
        cluster_environment: ClusterEnvironment | None,
    ) -> None:
        super().__init__(cluster_environment=cluster_environment)
        self._degrees = dict(degrees)
        self._facts = dict(facts)
        self._start_timeout = timedelta(seconds=start_timeout)
        self._collective_timeout = timedelta(seconds=collective_timeout)
        self._num_nodes = 1
        self.mesh: DeviceMesh | None = None
        """All ranks; None with one process, or before they are connected."""
        self.dims = ParallelDims()
        """Degrees; known once the processes are connected."""
        self.dp_group: dist.ProcessGroup | None = None
        """The ranks that see different samples and hold the same part of the model; None if there is one only."""
        self.clock = StepClock()
        """Where this rank's time goes; it stands until ``start_clock``."""
        self._stop_timing: Callable[[], None] | None = None
        self.hosts: list[str] = []
        """Host name of every rank; empty with one process."""

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or [])

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def dp_rank(self) -> int:
        """Which of the ``dp_size`` shares of a global batch is this rank's."""
        return self.dims.dp_rank(self.global_rank)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that split each layer between them; None if layers are whole."""
        return self.mesh.get_group("tp") if self.mesh is not None and self.dims.tp > 1 else None

    @property
    def dp_size(self) -> int:
        """Ranks that see different samples."""
        return self.dims.dp_size

    @property
    def holds_parts(self) -> bool:
        """Whether a rank holds parts of parameters, which are DTensors then, and state has to be gathered."""
        return self.dims.dp_shard > 1 or self.dims.tp > 1

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to give a loader of its own making a sampler for its share."""
        return self.dp_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def set_world_ranks(self) -> None:
        """Tell Lightning's environment which process this is (called by the Trainer)."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # What logs on rank zero only has to know its rank before any group exists.
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if self.num_processes * self.num_nodes > 1 and not environment.creates_processes_externally:
            # Lightning's subprocess launcher would type the command line again in every rank.
            self._launcher = Spawn(self, start_method="spawn")

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        world_size = self.num_nodes * self.num_processes
        self.dims = ParallelDims.fill(world_size=world_size, **self._degrees)
        if world_size == 1 or self.mesh is not None:
            return
        assert self.cluster_environment is not None
        on_gpu = self.root_device.type == "cuda"
        options: dict[str, Any] = {"timeout": self._start_timeout}
        if on_gpu:
            options["device_id"] = self.root_device
        _init_dist_connection(self.cluster_environment, "nccl" if on_gpu else "gloo", **options)
        check_agreement(
            {
                "world size": dist.get_world_size(),
                "number of devices a node": self.num_processes,
                "mesh": str(self.dims),
                **self._facts,
            }
        )
        self.hosts = [""] * world_size
        dist.all_gather_object(self.hosts, socket.gethostname())
        self.mesh = build_mesh(self.dims, device_type=self.root_device.type)
        self.dp_group = data_group(self.mesh)
        limit_collectives(self.mesh, self._start_timeout, self.dp_group)

    def started(self) -> None:
        """From the limit for starting to the limit for a collective in training."""
        if self.mesh is not None:
            limit_collectives(self.mesh, self._collective_timeout, self.dp_group)

    def start_clock(self) -> None:
        """Let the clock go, and charge it with what the calling thread waits for other ranks, until ``stop_clock``."""
        self.stop_clock()
        stream = torch.cuda.current_stream(self.root_device) if self.root_device.type == "cuda" else None
        self.clock.record = None if stream is None else recorder(stream)
        groups: set[Any] = {self.dp_group} - {None}
        if self.mesh is not None:
            groups |= {self.mesh.get_group(axis) for axis in range(self.mesh.ndim)}
        self._stop_timing = time_collectives(self.clock, groups, stream=stream)
        self.clock.start()

    def stop_clock(self) -> None:
        """End what ``start_clock`` has begun; what the clock has counted is still there to be taken."""
        if self._stop_timing is not None:
            self._stop_timing()
            self._stop_timing = None
            self.clock.stop()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Belongs to the waiting for data in training; in evaluation to that."""
        with self.clock.phase("data" if self.clock.current == "other" else self.clock.current):
            return super().batch_to_device(batch, device, dataloader_idx)

    def teardown(self) -> None:
        self.stop_clock()
        super().teardown()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks (or ``group``); what is no tensor comes back as it is."""
        if not isinstance(tensor, Tensor) or self.dp_group is None:
            return tensor
        return _sync_ddp_if_available(tensor, group or self.dp_group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so; Lightning would ask data-parallel ranks, and count with all."""
        if self.mesh is None:
            return bool(decision)
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are accumulated inside the strategy; Lightning has nothing to block."""
        yield
