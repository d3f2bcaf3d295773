"""The pool of live ranks gives each call what a fresh process would give it, and survives what a test does to it."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pool import RankError, RankPool


def total(start: float) -> float:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"the plan of rank {rank} is wrong")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def initialise_alone() -> None:
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))


def process_id() -> int:
    return os.getpid()


def leave_a_mess() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    os.environ["LEFT_OVER"] = "1"
    os.environ["RANK"] = "7"
    os.chdir("/")


def state() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.empty(1).device.type,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        os.environ.get("LEFT_OVER"),
        int(os.environ["RANK"]) == dist.get_rank(),
        os.getcwd(),
    )


def draw() -> float:
    return torch.rand(()).item()


def sharded_product(extra_groups: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    _kept = [dist.new_group() for _ in range(extra_groups)]  # the mesh's groups get other names than in the last call
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x: DTensor = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
    product = x @ x.t()
    assert isinstance(product, DTensor)
    return product.full_tensor().sum().item()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def lightning_view() -> tuple[str, int, int, float]:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities.rank_zero import rank_zero_only
    from torch.utils.data import DataLoader

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    first = rank_zero_only.rank  # type: ignore[attr-defined]
    assert first is not None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, DataLoader(torch.ones(8, 2), batch_size=2))  # type: ignore[arg-type]
    environment = type(trainer.strategy.cluster_environment).__name__  # type: ignore[attr-defined]
    return environment, first, trainer.world_size, model.layer.weight.sum().item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_takes_part(pool: RankPool, world_size: int) -> None:
    assert pool.run(total, 1.0, world_size=world_size) == [sum(1.0 + rank for rank in range(world_size))] * world_size


def test_calls_are_cheap_and_use_the_same_processes(pool: RankPool) -> None:
    """A call of live ranks takes less time than one of ranks that have to be started, however busy the machine is."""
    before = pool.run(process_id, world_size=2)
    start = time.perf_counter()
    for step in range(10):
        pool.run(total, float(step), world_size=2)
    ten = time.perf_counter() - start
    assert pool.run(process_id, world_size=2) == before
    start, fresh = time.perf_counter(), RankPool()
    try:
        assert set(fresh.run(process_id, world_size=2)).isdisjoint(before)
    finally:
        fresh.close()
    assert ten / 10 < time.perf_counter() - start


def test_error_names_the_rank_and_shows_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2: [\s\S]*in fail_on[\s\S]*the plan of rank 1 is wrong") as caught:
        pool.run(fail_on, 1, world_size=2)
    assert next(iter(caught.value.errors)) == 1, "the rank that failed first comes first"
    assert pool.run(total, 0.0, world_size=2) == [1.0, 1.0]


def test_rank_that_hangs_is_ended_and_the_stack_shown(pool: RankPool) -> None:
    start = time.perf_counter()
    with pytest.raises(RankError, match=r"rank 1 of 2: no answer within 1 s[\s\S]*in hang_on"):
        pool.run(hang_on, 1, world_size=2, timeout=1.0)
    assert time.perf_counter() - start < 10
    assert pool.run(total, 0.0, world_size=2) == [1.0, 1.0]


def test_rank_that_dies_is_replaced(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2: died with exit code -9"):
        pool.run(die_on, 0, world_size=2)
    assert pool.run(total, 0.0, world_size=2) == [1.0, 1.0]


def test_failed_initialisation_does_not_spoil_the_next(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2"):
        pool.run(initialise_alone, world_size=2, init=False)
    assert pool.run(total, 0.0, world_size=2, timeout=10.0) == [1.0, 1.0]


def test_state_is_fresh_in_every_call(pool: RankPool) -> None:
    pool.run(leave_a_mess, world_size=2)
    assert pool.run(state, world_size=2) == [(torch.float32, "cpu", True, False, 1, None, True, os.getcwd())] * 2
    assert pool.run(draw, world_size=2) == pool.run(draw, world_size=2)


def test_meshes_of_earlier_calls_do_not_linger(pool: RankPool) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    for extra_groups in (0, 3, 1):
        results = pool.run(sharded_product, extra_groups, world_size=4, timeout=20.0)
        assert results == [(x @ x.t()).sum().item()] * 4


def test_callers_environment_reaches_the_ranks(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID_BY_THE_TEST", "yes")
    assert pool.run(variable, "SAID_BY_THE_TEST", world_size=2) == ["yes", "yes"]
    assert pool.run(variable, "SAID", world_size=2, env={"SAID": "so"}) == ["so", "so"]
    monkeypatch.delenv("SAID_BY_THE_TEST")
    assert pool.run(variable, "SAID_BY_THE_TEST", world_size=2) == [None, None]


def test_lightning_takes_the_ranks_for_torchrun(pool: RankPool) -> None:
    (kind, first, size, weight), (other_kind, second, _, other_weight) = pool.run(lightning_view, init=False)
    assert kind == other_kind == "TorchElasticEnvironment"
    assert (first, second, size) == (0, 1, 2)
    assert weight == other_weight


def test_ranks_end_with_the_pool() -> None:
    pool = RankPool()
    ids = pool.run(process_id, world_size=2)
    pool.close()
    assert not [number for number in ids if Path(f"/proc/{number}").exists()]
