"""Cross-entropy over a split vocabulary against torch's over the whole one, loss and gradients, plain and chunked."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from pool import RankPool
from shardwise.errors import ConfigError
from shardwise.parallel import cross_entropy as module
from shardwise.parallel.cross_entropy import IGNORED, VocabularyShard, cross_entropy, linear_cross_entropy

WIDTH = 6
OPTIONS: list[dict[str, Any]] = [
    dict(zip(("label_smoothing", "z_loss", "soft_cap"), values, strict=True))
    for values in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 1.5))
]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@dataclass
class Case:
    """One batch: (2, 5) tokens over a vocabulary, in float64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    factors: Tensor
    """The gradient of each token's loss: all different."""


def case(vocab: int, *, ignored: str = "some") -> Case:
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight, factors = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 5, WIDTH), (vocab, WIDTH), (2, 5))
    )
    targets = torch.randint(vocab, (2, 5), generator=generator)
    targets[0, :2] = torch.tensor([0, vocab - 1])
    if ignored == "some":
        targets[1, 1:3] = IGNORED
    elif ignored == "all":
        targets[:] = IGNORED
    return Case(hidden, weight, targets, factors)


def shard_of(vocab: int) -> tuple[VocabularyShard, slice]:
    """The rows that `torch.chunk` and DTensor give to this rank."""
    rows = -(-vocab // dist.get_world_size())
    start = min(rows * dist.get_rank(), vocab)
    return VocabularyShard(dist.group.WORLD, start, vocab), slice(start, min(start + rows, vocab))


def expected(batch: Case, *, label_smoothing: float, z_loss: float, soft_cap: float | None) -> list[Tensor]:
    """Loss, gradient of the logits, of the hidden states and of the weight, by torch and by hand."""
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    logits = hidden @ weight.t()
    logits.retain_grad()
    capped = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    loss = F.cross_entropy(
        capped.flatten(0, 1), batch.targets.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view(2, 5)
    loss = loss + z_loss * torch.logsumexp(capped, -1).square() * (batch.targets != IGNORED)
    (loss * batch.factors).sum().backward()
    return [loss.detach(), logits.grad, hidden.grad, weight.grad]  # type: ignore[list-item]


def plain(batch: Case, options: dict[str, Any]) -> list[Tensor]:
    shard, columns = shard_of(batch.weight.size(0))
    logits = (batch.hidden @ batch.weight.t())[..., columns].clone().requires_grad_()
    before = logits.detach().clone()
    with CommDebugMode() as forward:
        loss = cross_entropy(logits, batch.targets, shard=shard, **options)
    with CommDebugMode() as backward:
        (loss * batch.factors).sum().backward()
    assert (forward.get_total_counts(), backward.get_total_counts()) == (2, 0)
    assert torch.equal(logits, before)
    return [loss.detach(), logits.grad]  # type: ignore[list-item]


def chunked(batch: Case, options: dict[str, Any], chunk: int) -> list[Tensor]:
    shard, rows = shard_of(batch.weight.size(0))
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight[rows].clone().requires_grad_()
    with CommDebugMode() as forward:
        loss = linear_cross_entropy(hidden, weight, batch.targets, shard=shard, chunk=chunk, **options)
    with CommDebugMode() as backward:
        (loss * batch.factors).sum().backward()
    assert (forward.get_total_counts(), backward.get_total_counts()) == (2, 0)
    assert hidden.grad is not None
    dist.all_reduce(hidden.grad)  # what the entry of a column-split layer does
    return [loss.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


def every_option(vocab: int, ignored: str, chunks: tuple[int, ...]) -> list[list[list[Tensor]]]:
    batch = case(vocab, ignored=ignored)
    return [[plain(batch, options), *(chunked(batch, options, chunk) for chunk in chunks)] for options in OPTIONS]


@pytest.mark.parametrize(
    ("world_size", "vocab", "ignored"),
    [(2, 8, "none"), (2, 101, "some"), (4, 101, "some"), (4, 5, "some"), (4, 5, "all")],  # of 5: 2, 2, 1 and 0
)
def test_split_vocabularies_equal_the_whole(pool: RankPool, world_size: int, vocab: int, ignored: str) -> None:
    ranks = pool.run(every_option, vocab, ignored, (3, 200), world_size=world_size)
    for at, options in enumerate(OPTIONS):
        loss, logits_grad, hidden_grad, weight_grad = expected(case(vocab, ignored=ignored), **options)
        by_form = zip(*(rank[at] for rank in ranks), strict=True)
        parts = next(by_form)
        for part in parts:
            torch.testing.assert_close(part[0], loss, **CLOSE)
        torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=-1), logits_grad, **CLOSE)
        for parts in by_form:
            for part in parts:
                torch.testing.assert_close(part[0], loss, **CLOSE)
                torch.testing.assert_close(part[1], hidden_grad, **CLOSE)
            torch.testing.assert_close(torch.cat([part[2] for part in parts]), weight_grad, **CLOSE)


@pytest.mark.parametrize("block", [7, 2**19])  # many rows at a time or one
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_device_equals_torch(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], block: int) -> None:
    monkeypatch.setitem(module.BLOCK, "cpu", block)
    batch = case(101)
    loss, logits_grad, hidden_grad, weight_grad = expected(batch, **options)
    logits = (batch.hidden @ batch.weight.t()).requires_grad_()
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    ours = cross_entropy(logits, batch.targets, **options)
    ours_chunked = linear_cross_entropy(hidden, weight, batch.targets, chunk=10, **options)
    for one in (ours, ours_chunked):
        torch.testing.assert_close(one, loss, **CLOSE)
        (one * batch.factors).sum().backward()
    for one, other in ((logits, logits_grad), (hidden, hidden_grad), (weight, weight_grad)):
        torch.testing.assert_close(one.grad, other, **CLOSE)
    with torch.no_grad():
        assert torch.equal(cross_entropy(logits, batch.targets, **options), ours)
        assert torch.equal(linear_cross_entropy(hidden, weight, batch.targets, chunk=10, **options), ours_chunked)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setitem(module.BLOCK, "cpu", 20)
    batch = case(8)
    logits = (batch.hidden @ batch.weight.t()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, batch.targets, **options), logits)
    inputs = (batch.hidden.requires_grad_(), batch.weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, batch.targets, chunk=3, **options), inputs)


def extremes() -> list[tuple[Tensor, Tensor]]:
    """Logits far from zero, far apart, and -inf for all columns of the second rank."""
    results = []
    for logits in extreme_logits():
        shard, columns = shard_of(logits.size(1))
        local = logits[:, columns].clone().requires_grad_()
        loss = cross_entropy(local, torch.tensor([0, 3]), shard=shard)
        loss.sum().backward()
        results.append((loss.detach(), local.grad))
    return results  # type: ignore[return-value]


def extreme_logits() -> list[Tensor]:
    inf = float("inf")
    return [
        torch.tensor([[30001.0, 30000.0, 30000.5, 29999.0]] * 2),
        torch.tensor([[-3e38, 3.0, 3e38, -40.0]] * 2),
        torch.tensor([[1.0, 2.0, -inf, -inf], [-inf, -inf, 2.0, 1.0]]),
    ]


def test_extreme_logits(pool: RankPool) -> None:
    ranks = pool.run(extremes)
    for at, logits in enumerate(extreme_logits()):
        logits.requires_grad_()
        loss = F.cross_entropy(logits, torch.tensor([0, 3]), reduction="none")
        loss.sum().backward()
        torch.testing.assert_close(ranks[0][at][0], loss)
        torch.testing.assert_close(torch.cat([rank[at][1] for rank in ranks], dim=1), logits.grad)


def half_precision(dtype: torch.dtype) -> tuple[Tensor, Tensor, torch.dtype]:
    logits, targets = half_logits(dtype)
    shard, columns = shard_of(logits.size(1))
    local = logits[:, columns].clone().requires_grad_()
    loss = cross_entropy(local, targets, shard=shard)
    loss.sum().backward()
    assert local.grad is not None
    return loss.detach(), local.grad.float(), local.grad.dtype


def half_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (5 * torch.randn(4, 1000, generator=generator)).to(dtype), torch.tensor([0, 499, 500, 999])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_have_a_loss_in_float32(pool: RankPool, dtype: torch.dtype) -> None:
    logits, targets = half_logits(dtype)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, targets, reduction="none")
    loss.sum().backward()
    assert exact.grad is not None
    ranks = pool.run(half_precision, dtype)
    for ours, _, grad_dtype in ranks:
        assert (ours.dtype, grad_dtype) == (torch.float32, dtype)
        torch.testing.assert_close(ours.double(), loss.detach(), rtol=1e-6, atol=0)
    # rounded once: half a unit in the last place
    rounding = {"rtol": torch.finfo(dtype).eps / 2 * 1.01, "atol": torch.finfo(dtype).smallest_normal}
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in ranks], dim=1).double(), exact.grad, **rounding)
    one_device = cross_entropy(logits.requires_grad_(), targets)
    torch.testing.assert_close(one_device.double(), loss.detach(), rtol=1e-6, atol=0)


def test_chunks_in_bfloat16_and_autocast() -> None:
    batch = case(101)
    narrow = [x.to(torch.bfloat16).requires_grad_() for x in (batch.hidden, batch.weight)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    one = linear_cross_entropy(*narrow, batch.targets, chunk=10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = linear_cross_entropy(*wide, batch.targets, chunk=10)
        other.sum().backward()
    one.sum().backward()
    assert one.dtype == other.dtype == torch.float32
    assert torch.equal(one, other)
    for ours, autocast, exact in zip(narrow, wide, expected(batch, **OPTIONS[0])[2:], strict=True):
        assert (ours.grad.dtype, autocast.grad.dtype) == (torch.bfloat16, torch.float32)  # type: ignore[union-attr]
        torch.testing.assert_close(ours.grad, autocast.grad.bfloat16())  # type: ignore[union-attr]
        assert exact.shape == ours.shape


def peak(vocab: int, *, chunk: int | None) -> int:
    """Most bytes that forward and backward add at a time, apart from the weight and its gradient."""
    hidden, weight = torch.randn(128, 32, requires_grad=True), torch.randn(vocab, 32, requires_grad=True)
    targets = torch.randint(vocab, (128,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        if chunk:
            loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
        else:
            loss = cross_entropy(hidden @ weight.t(), targets)
        loss.sum().backward()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    assert hidden.nbytes + weight.nbytes <= alive[-1] < max(alive)  # the gradients are left, of more
    return max(alive) - weight.nbytes


def test_memory_of_the_chunked_form_does_not_grow_with_the_vocabulary() -> None:
    small, large = (peak(vocab, chunk=512) for vocab in (2048, 8 * 2048))
    assert small > 0
    assert large == pytest.approx(small, rel=0.02)
    small, large = (peak(vocab, chunk=None) for vocab in (2048, 8 * 2048))
    assert large > 4 * small


def test_the_plain_form_keeps_no_copy_of_the_logits() -> None:
    logits = torch.randn(1024, 1024, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        cross_entropy(logits, torch.zeros(1024, dtype=torch.int64), z_loss=1e-4)
    assert kept.pop(logits.untyped_storage().data_ptr()) == logits.nbytes
    assert sum(kept.values()) < logits.nbytes / 50


@pytest.mark.parametrize("wrong", [-1, -99, 8, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_targets_outside_the_vocabulary(wrong: int, z_loss: float) -> None:
    targets = torch.tensor([IGNORED, 3, wrong])
    with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds for a vocabulary of 8\."):
        cross_entropy(torch.zeros(3, 8), targets, z_loss=z_loss)
    with pytest.raises(IndexError, match=rf"Target {wrong} "):
        linear_cross_entropy(torch.zeros(3, 2), torch.zeros(8, 2), targets, chunk=4, z_loss=z_loss)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_shows_targets_outside_the_vocabulary_without_a_stall() -> None:
    targets = torch.tensor([IGNORED, 3, 8], device="cuda")
    logits = torch.zeros(3, 8, device="cuda")
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = cross_entropy(logits, targets, z_loss=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"label_smoothing": 1.5}, r"label_smoothing=1\.5 is outside \[0, 1\]"),
        ({"z_loss": -1e-4}, r"z_loss=-0\.0001 is negative"),
        ({"soft_cap": 0.0}, r"soft_cap=0\.0 is not above 0"),
        ({"chunk": 0}, "chunk=0 is below 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        linear_cross_entropy(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), **{"chunk": 2, **options})


def test_targets_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="do not match"):
        cross_entropy(torch.zeros(2, 3, 8), torch.zeros(3, 2, dtype=torch.int64))
    assert cross_entropy(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), z_loss=0.1).shape == (0,)
    assert cross_entropy(torch.zeros(8), torch.tensor(1), z_loss=0.1).shape == ()
