"""Clipping gives one device's numbers on every mesh, and torch's own on one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pool import RankPool
from shardwise.parallel.grad_norm import clip_by_norm_, clip_by_value_, local_gradients, scale_gradients_, total_norm
from training import whole

SHAPES = {"weight": (5, 4), "short": (3, 2), "single": (1,), "bias": (6,)}
"""A parameter with 3 rows on 4 ranks leaves one rank without any."""


def plain_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    parameters = []
    for shape in SHAPES.values():
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 3
        parameters.append(parameter)
    return parameters


def spread(parameters: list[nn.Parameter], mesh: Any, placements: list[Any]) -> list[nn.Parameter]:
    result = []
    for parameter in parameters:
        shared = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        shared.grad = distribute_tensor(parameter.grad, mesh, placements)  # type: ignore[arg-type]
        result.append(shared)
    return result


def on_mesh(kind: str, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    if kind == "fsdp":
        return spread(parameters, init_device_mesh("cpu", (4,)), [Shard(0)])
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if kind == "hsdp":
        return spread(parameters, two, [Replicate(), Shard(0)])
    if kind == "two axes":
        return spread(parameters, two, [Shard(0), Shard(0)])
    assert kind == "mixed"  # plain tensors beside shards of two meshes
    return [
        parameters[0],
        *spread(parameters[1:3], two, [Replicate(), Shard(0)]),
        *spread(parameters[3:], init_device_mesh("cpu", (4,)), [Shard(0)]),
    ]


def clipped(kind: str, dtype: torch.dtype, max_norm: float) -> tuple[float, list[Tensor]]:
    parameters = on_mesh(kind, plain_parameters(dtype))
    norm = clip_by_norm_(parameters, max_norm)
    assert type(norm) is Tensor
    return float(norm), [whole(p.grad) for p in parameters]  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "two axes", "mixed"])
def test_norm_and_gradients_equal_one_devices(pool: RankPool, kind: str, max_norm: float) -> None:
    expected = plain_parameters(torch.float64)
    norm = float(clip_by_norm_(expected, max_norm))
    for ours, gradients in pool.run(clipped, kind, torch.float64, max_norm, world_size=4):
        assert ours == pytest.approx(norm, rel=1e-13)
        for one, other in zip(expected, gradients, strict=True):
            torch.testing.assert_close(other, one.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_one_device_clips_as_torch_does(max_norm: float) -> None:
    ours, theirs = plain_parameters(torch.float64), plain_parameters(torch.float64)
    norm = clip_by_norm_(ours, max_norm)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, max_norm)), rel=1e-14)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0)


def test_bfloat16_gradients_have_a_norm_in_float32(pool: RankPool) -> None:
    parameters = plain_parameters(torch.bfloat16)
    exact = torch.cat([p.grad.flatten().double() for p in parameters]).norm()  # type: ignore[union-attr]
    norm = clip_by_norm_(parameters, 0.5)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)
    for ours, gradients in pool.run(clipped, "fsdp", torch.bfloat16, 0.5, world_size=4):
        assert ours == pytest.approx(float(exact), rel=1e-6)
        for one, other in zip(parameters, gradients, strict=True):
            assert other.dtype == torch.bfloat16
            assert torch.equal(one.grad, other)  # type: ignore[arg-type]


def clipped_by_value(kind: str) -> list[Tensor]:
    parameters = on_mesh(kind, plain_parameters(torch.float64))
    clip_by_value_(parameters, 0.7)
    return [whole(p.grad) for p in parameters]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "mixed"])
def test_clipping_by_value(pool: RankPool, kind: str) -> None:
    expected = plain_parameters(torch.float64)
    nn.utils.clip_grad_value_(expected, 0.7)
    for gradients in pool.run(clipped_by_value, kind, world_size=4):
        for one, other in zip(expected, gradients, strict=True):
            assert torch.equal(one.grad, other)  # type: ignore[arg-type]


def partial() -> tuple[float, bool]:
    """A gradient that is still to be added up over the ranks, for a replicated parameter."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    local = torch.tensor([3.0, 0.0]) if dist.get_rank() == 0 else torch.tensor([0.0, 4.0])
    parameter.grad = DTensor.from_local(local, mesh, [Partial()])
    norm = clip_by_norm_([parameter], 1.0)
    assert isinstance(parameter.grad, DTensor)
    return float(norm), torch.allclose(parameter.grad.to_local(), torch.tensor([0.6, 0.8]))


def test_gradients_are_added_up_first(pool: RankPool) -> None:
    assert pool.run(partial) == [(5.0, True)] * 2


def test_parameters_without_gradients_count_for_nothing() -> None:
    idle = nn.Parameter(torch.ones(3))
    assert float(clip_by_norm_([idle], 1.0)) == 0.0
    assert idle.grad is None
    assert float(total_norm(local_gradients([]))) == 0.0


def test_all_gradients_are_scaled_alike() -> None:
    parameters = plain_parameters(torch.float32)
    before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    scale_gradients_(parameters, torch.tensor(0.25, dtype=torch.float64))
    for parameter, gradient in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, gradient * 0.25)
