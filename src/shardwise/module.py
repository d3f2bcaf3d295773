"""The two tasks: what a model's output means, what it costs, and how well it does.

Both are LightningModules around a plain ``torch.nn.Module`` and know nothing of ranks. ``training_step`` returns the
sum of the losses and what it is a sum over; ``count_targets`` says the latter before the forward pass, so that the
divisor is known over all ranks in time.
"""

import inspect
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from shardwise.errors import ConfigError
from shardwise.parallel.cross_entropy import IGNORED, cross_entropy, linear_cross_entropy, vocabulary_shard


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 or wider: a loss computed from bfloat16 logits is off in the second digit."""
    return logits if logits.dtype == torch.float64 else logits.float()


class MeanLoss(Metric):
    """The mean of losses over all ranks. A loss that is not a number shows: torchmetrics' MeanMetric leaves it out.

    Sums are in float64, which no conversion of the model's format touches.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.total: Tensor
        self.count: Tensor

    def update(self, losses: Tensor, count: Tensor | int) -> None:
        """Add ``losses`` of any shape, which are a sum over ``count`` things."""
        self.total += losses.sum(dtype=torch.float64)
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class _Task(LightningModule):
    """A model, and metrics that are exact over all data-parallel ranks."""

    logs_in_training = False
    """``training_step`` logs nothing: the strategy knows the loss, and has nothing to put together over ranks."""

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.metrics = nn.ModuleDict()

    def measure(self, stage: str, **metrics: Metric) -> None:
        """Add metrics for a stage (val or test)."""
        self.metrics[stage] = nn.ModuleDict(metrics)

    def metric(self, stage: str, name: str) -> Metric:
        """The metric ``name`` of a stage."""
        metric = self.get_submodule(f"metrics.{stage}.{name}")
        assert isinstance(metric, Metric)
        return metric

    def setup(self, stage: str) -> None:
        group = getattr(self.trainer.strategy, "dp_group", None)
        for metric in self.metrics.modules():
            if isinstance(metric, Metric):
                metric.process_group = group

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def log_stage(self, stage: str) -> None:
        """Log the metrics of a stage under ``<stage>/<name>``, reduced at the end of its loop."""
        for name, _ in self.get_submodule(f"metrics.{stage}").named_children():
            self.log(f"{stage}/{name}", self.metric(stage, name), on_step=False, on_epoch=True, prog_bar=stage == "val")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("test", batch)

    def evaluate(self, stage: str, batch: Any) -> None:
        """Update the metrics of ``stage`` with one batch and log them."""
        raise NotImplementedError


class Classification(_Task):
    """One label an input: ``(inputs, labels)``, logits (B, K), labels (B,) int64; loss is the mean over samples.

    Args:
        model: maps inputs to logits (B, K).
        num_classes: K.
        label_smoothing: share of the target given to all classes alike (training only).
    """

    def __init__(self, model: nn.Module, *, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__(model, label_smoothing=label_smoothing)
        self.num_classes = num_classes
        for stage in ("val", "test"):
            accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro", validate_args=False)
            self.measure(stage, loss=MeanLoss(), accuracy=accuracy)

    def count_targets(self, batch: tuple[Tensor, Tensor]) -> int:
        """Samples of the batch."""
        return batch[1].size(0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, int]:  # type: ignore[override]
        _, loss = self._losses(batch, reduction="sum", label_smoothing=self.label_smoothing)
        return loss, batch[1].size(0)

    def evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        labels_B = batch[1]
        logits_BK, losses_B = self._losses(batch, reduction="none")
        self.metric(stage, "loss").update(losses_B, labels_B.size(0))
        self.metric(stage, "accuracy").update(logits_BK, labels_B)
        self.log_stage(stage)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """``prediction`` (B,) int64, ``probabilities`` (B, K) float32, and ``label`` (B,) where the data have it."""
        inputs, *labels = batch if isinstance(batch, tuple | list) else (batch,)
        logits_BK = wide(self.model(inputs))
        probabilities_BK = logits_BK.softmax(dim=-1).float()
        predicted = {"prediction": logits_BK.argmax(dim=-1), "probabilities": probabilities_BK}
        return predicted | ({"label": labels[0]} if labels else {})

    def _losses(self, batch: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """Logits (B, K) and what ``cross_entropy`` makes of them."""
        inputs, labels_B = batch
        logits_BK = wide(self.model(inputs))
        expected = (labels_B.size(0), self.num_classes)
        if logits_BK.shape != expected:
            raise ConfigError(
                f"{type(self.model).__name__} returns {tuple(logits_BK.shape)} for a batch of {expected[0]}: "
                f"{expected} is needed, a number for each of task.num_classes={self.num_classes}"
            )
        try:
            return logits_BK, F.cross_entropy(logits_BK, labels_B, **options)
        except IndexError as error:  # on a CPU; a GPU has its own words
            low, high = int(labels_B.min()), int(labels_B.max())
            wrong = high if high >= self.num_classes else low
            raise ConfigError(
                f"a label is {wrong}, but task.num_classes={self.num_classes} allows 0 to {self.num_classes - 1}: "
                f"correct the data or the number"
            ) from error


class LanguageModel(_Task):
    """The next token: ``(tokens, targets)``, both (B, T) int64, targets already shifted; loss is the mean over targets.

    Args:
        model: maps tokens (B, T) to logits (B, T, V), which may be split over V between tensor-parallel ranks.
        label_smoothing: share of the target given to the whole vocabulary alike (training only).
        z_loss: weight of the squared logarithm of the softmax's divisor (training only; PaLM used 1e-4).
        loss_chunk: columns of the vocabulary whose logits are held at a time; None for all. Four products of the output
            layer instead of three, for the memory of the logits; the model's ``forward`` has to take ``losses``, as
            that of ``GPT`` does.
    """

    def __init__(
        self, model: nn.Module, *, label_smoothing: float = 0.0, z_loss: float = 0.0, loss_chunk: int | None = None
    ) -> None:
        super().__init__(model, label_smoothing=label_smoothing)
        if loss_chunk is not None and loss_chunk < 1:
            raise ConfigError(f"task.loss_chunk={loss_chunk}: a number of columns is needed, such as 4096, or null")
        if loss_chunk is not None and "losses" not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                f"task.loss_chunk={loss_chunk}, but {type(model).__name__}.forward takes no losses: leave it out, or "
                f"hand losses(features, weight) on to the output layer"
            )
        self.z_loss = z_loss
        self.loss_chunk = loss_chunk
        for stage in ("val", "test"):
            self.measure(stage, loss=MeanLoss())

    def count_targets(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Targets of the batch that are not ignored."""
        return (batch[1] != IGNORED).sum()

    def count_tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        """Tokens of the batch, targets that are ignored included."""
        return batch[0].numel()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        losses_BT = self._losses(batch, label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        loss = losses_BT.sum()
        return loss, self.count_targets(batch)

    def evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        losses = self._losses(batch)
        self.metric(stage, "loss").update(losses, self.count_targets(batch))
        self.log_stage(stage)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """``targets`` that are not ignored (B,) int64, and ``loss``, the mean over them (B,) float32; NaN over none."""
        losses_BT = self._losses(batch)
        targets_B = (batch[1] != IGNORED).sum(dim=-1)
        return {"loss": (losses_BT.sum(dim=-1, dtype=torch.float64) / targets_B).float(), "targets": targets_B}

    def _losses(self, batch: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        """Loss of every token (B, T), 0 where the target is ignored."""
        tokens_BT, targets_BT = batch
        if self.loss_chunk is not None:
            losses = partial(linear_cross_entropy, targets=targets_BT, chunk=self.loss_chunk, **options)
            return self.model(tokens_BT, losses=losses)
        logits_BTV = self.model(tokens_BT)
        if isinstance(logits_BTV, DTensor):
            shard = vocabulary_shard(logits_BTV)
            return cross_entropy(logits_BTV.to_local(), targets_BT, shard=shard, **options)
        return cross_entropy(logits_BTV, targets_BT, **options)
