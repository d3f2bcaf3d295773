"""The two tasks, and a user's own module: what a loss is a mean over, and metrics that are exact."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pool import RankPool
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.module import IGNORED, Classification, LanguageModel, MeanLoss
from shardwise.strategies.micro_batches import batch_samples, split_batch
from shardwise.strategies.precision import mesh_precision
from training import CONTEXT, VOCABULARY, build_module, dp_place, make_trainer, on_layout, shares

SAMPLES = 7


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for sample in range(SAMPLES):
        targets[sample, :sample] = IGNORED
    targets[SAMPLES - 1] = IGNORED  # the last rank has nothing to count
    return TensorDataset(ids[:, :-1], targets)


class Seven(pl.LightningDataModule):
    """7 samples in every loader, whatever the ranks."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=3)

    test_dataloader = train_dataloader = predict_dataloader = val_dataloader


def evaluate(kind: str, layout: str) -> list[dict[str, float]]:
    """Metrics of validate and test of an untrained model, then of the validation inside a fit, and of a test after."""
    rank, size = dp_place()
    module = build_module(kind)
    inner = Seven(tokens() if kind == "gpt" else images())
    data = ShardedDataModule(inner, seed=0, global_size=4, eval_batch_size=2, dp_rank=rank, dp_size=size)
    trainer = make_trainer(layout, max_steps=2, num_sanity_val_steps=0, precision="64-true", limit_train_batches=2)
    results = [trainer.validate(module, data, verbose=False)[0], trainer.test(module, data, verbose=False)[0]]
    trainer.fit(module, datamodule=data)
    results.append({name: float(v) for name, v in trainer.callback_metrics.items()})
    results.append(trainer.test(module, data, verbose=False)[0])
    return results


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "fsdp4", "hsdp4"])
def test_metrics_over_seven_samples_are_exact(pool: RankPool, kind: str, layout: str) -> None:
    expected = on_layout(pool, evaluate, "one", kind, "one")[0]
    for ours in on_layout(pool, evaluate, layout, kind, layout):
        for one, other in zip(expected, ours, strict=True):
            assert other == pytest.approx(one, rel=1e-12)


def test_metrics_are_means_over_samples_and_over_targets() -> None:
    untrained, _, _, trained = evaluate("mlp", "one")
    assert trained["test/loss"] != untrained["val/loss"]
    module: Any = build_module("mlp")
    make_trainer("one", precision="64-true").validate(module, shares("mlp", 1), verbose=False)  # draws the weights
    x, labels = images().tensors
    logits = module(x.double()).detach()
    assert untrained["val/loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-12)
    assert untrained["val/accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))

    untrained = evaluate("gpt", "one")[0]
    module = build_module("gpt")
    make_trainer("one", precision="64-true").validate(module, shares("gpt", 1), verbose=False)
    ids, targets = tokens().tensors
    expected = F.cross_entropy(module(ids).detach().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    assert untrained["val/loss"] == pytest.approx(float(expected), rel=1e-12)


def test_losses_that_are_no_numbers_show() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor([1.0, float("nan"), 2.0]), 3)
    assert metric.compute().isnan()


def test_a_low_format_of_the_model_leaves_the_sums_alone() -> None:
    module: Any = build_module("mlp")
    mesh_precision("bf16-true", device_type="cpu", autocast=True).convert_module(module)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    metric = module.metric("val", "loss")
    for _ in range(1000):
        metric.update(torch.tensor([1.0, 1.0], dtype=torch.bfloat16), 2)
    assert metric.to("cpu").compute().dtype == torch.float64
    assert metric.compute() == 1.0


class Fixed(nn.Module):
    """Logits that are a parameter."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_sums_in_float32_or_wider_with_their_count(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(5, 10, generator=generator).to(dtype), torch.arange(5)
    batch = (torch.empty(5, 1), labels)
    for smoothing in (0.0, 0.1):
        task = Classification(Fixed(logits), num_classes=10, label_smoothing=smoothing)
        loss, count = task.training_step(batch, 0)
        assert count == task.count_targets(batch) == 5
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        expected = F.cross_entropy(logits.double(), labels, reduction="sum", label_smoothing=smoothing)
        assert loss.item() == pytest.approx(float(expected), rel=1e-6)
    targets = torch.tensor([[0, IGNORED, 2], [IGNORED, IGNORED, 5]])
    lm_logits = torch.randn(2, 3, 10, generator=generator).to(dtype)
    lm = LanguageModel(Fixed(lm_logits))
    loss, total = lm.training_step((targets, targets), 0)
    assert int(total) == int(lm.count_targets((targets, targets))) == 3
    expected = F.cross_entropy(lm_logits.double().flatten(0, 1), targets.flatten(), ignore_index=IGNORED) * 3
    assert loss.item() == pytest.approx(float(expected), rel=1e-6)


class Returns(pl.LightningModule):
    """Its training_step returns whatever it is told to make of its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kind = kind
        self.logged: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("train/own", loss, on_step=True, on_epoch=False)
        made = {
            "mean": loss, "mapping": {"loss": loss, "extra": 1}, "sum": (loss * len(batch[0]), len(batch[0])),
            "none": None, "text": "0.5", "number": 0.5,
        }  # fmt: skip
        return made[self.kind]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def returning(kind: str, layout: str, accumulate: int) -> tuple[float, float]:
    torch.manual_seed(1)
    module = Returns(kind)
    options: dict[str, Any] = {"max_steps": 1, "log_every_n_steps": 1, "precision": "64-true"}
    trainer = make_trainer(layout, accumulate=accumulate, **options)
    trainer.fit(module, shares("plain", 1))
    return float(trainer.strategy.global_loss()), float(trainer.callback_metrics["train/own"])


def test_a_mean_a_mapping_and_a_sum_with_its_count_are_the_same_loss(pool: RankPool) -> None:
    expected = returning("mean", "one", 1)[0]
    for kind in ("mean", "mapping", "sum"):
        for layout, accumulate in (("one", 4), ("fsdp2", 2)):
            loss, own = on_layout(pool, returning, layout, kind, layout, accumulate)[0]
            assert loss == pytest.approx(expected, rel=1e-12), (kind, layout)
            assert own == pytest.approx(expected, rel=1e-12), "what a module logs is of all micro-batches and ranks"


@pytest.mark.parametrize("kind", ["none", "text", "number"])
def test_anything_else_is_an_error_that_says_what_is_needed(kind: str) -> None:
    with pytest.raises(TypeError, match=r"training_step returned \w+: a mean loss .* or \(sum, count\) is needed"):
        returning(kind, "one", 1)


class AllIgnored(Dataset):
    deterministic = True

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(4, CONTEXT, dtype=torch.long), torch.full((4, CONTEXT), IGNORED)


def test_a_batch_without_a_single_target_changes_nothing() -> None:
    module: Any = build_module("gpt")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    trainer = make_trainer("one", max_steps=1, accumulate=2)
    trainer.validate(module, shares("gpt", 1), verbose=False)
    before = module.model.head.weight.detach().clone()
    trainer.fit(module, DataLoader(AllIgnored(), batch_size=None))
    assert float(trainer.strategy.global_loss()) == 0.0
    assert torch.equal(module.model.head.weight, before)


def test_batches_are_cut_along_their_samples() -> None:
    x, weights = torch.arange(10).reshape(5, 2), torch.tensor([1.0, 2.0])
    batch = {"x": x, "names": ["a", "b", "c", "d", "e"], "weights": weights, "rate": 0.5, "pair": (x + 1, 3)}
    first, second = split_batch(batch, 2)
    assert torch.equal(first["x"], x[:3])
    assert torch.equal(second["pair"][0], x[3:] + 1)
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert first["rate"] == second["rate"] == 0.5
    assert torch.equal(first["weights"], second["weights"])
    assert batch_samples([x, torch.zeros(5)]) == 5
    assert split_batch(batch, 1)[0] is batch


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 samples cannot be cut into 4 micro-batches: batch\.accumulate=3"):
        split_batch((torch.zeros(3, 2),), 4)
    with pytest.raises(ConfigError, match=r"type object holds no tensor .*count_targets"):
        batch_samples(object())


class Anything(Dataset):
    """Yields batches of a type of its own, which on one device concerns nobody."""

    deterministic = True

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return frozenset({1.0, 2.0})


class Numbers(Returns):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer.weight.sum() * sum(batch)


def test_on_one_device_a_batch_may_be_of_any_type() -> None:
    trainer = make_trainer("one", max_steps=1)
    trainer.fit(Numbers("mean"), DataLoader(Anything(), batch_size=None))
    assert trainer.global_step == 1
