"""Small trainings whose every number is recorded, in this process (one device) or as one of the pool's live ranks."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from shardwise.data.digits import Digits
from shardwise.data.sharded import ShardedDataModule
from shardwise.models.convnet import ConvNet
from shardwise.models.gpt import GPT
from shardwise.models.mlp import MLP
from shardwise.models.vit import ViT
from shardwise.models.vit_b_16 import ViTB16
from shardwise.module import IGNORED, Classification, LanguageModel
from shardwise.optim import build_optimizer
from shardwise.parallel.dims import ParallelDims
from shardwise.strategies import MeshStrategy

GLOBAL_SIZE = 16
CONTEXT = 8
VOCABULARY = 19
LAYOUTS = {
    "one": ParallelDims(),
    "ddp2": ParallelDims(dp_replicate=2),
    "fsdp2": ParallelDims(dp_shard=2),
    "ddp4": ParallelDims(dp_replicate=4),
    "fsdp4": ParallelDims(dp_shard=4),
    "hsdp4": ParallelDims(dp_replicate=2, dp_shard=2),
    "tp2": ParallelDims(tp=2),
    "tp4": ParallelDims(tp=4),
    "ddp+tp4": ParallelDims(dp_replicate=2, tp=2),
    "fsdp+tp4": ParallelDims(dp_shard=2, tp=2),
    "hybrid8": ParallelDims(dp_replicate=2, dp_shard=2, tp=2),
}
"""Name (with the number of ranks) -> degrees."""
BLOCKS = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
PLANS = {
    "plain": BLOCKS,
    "masked": BLOCKS,
    "plan": {**BLOCKS, "norm": "replicate"},
    "net": {"blocks.*.up": "colwise", "blocks.*.drop": "local", "blocks.*.down": "rowwise"},
}
"""Kind -> what its user gives as ``strategy.plan``; the others have plans of their own."""


@dataclass
class Record:
    """What a training did, as whole tensors on the CPU (rank 0; the others keep the plain numbers)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    """Parameters when training starts."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    end: dict[str, Tensor] = field(default_factory=dict)
    """Parameters after the last step."""
    kinds: dict[str, Any] = field(default_factory=dict)
    """What a test has asked for besides."""


def world_size(layout: str) -> int:
    return LAYOUTS[layout].world_size


def dp_place(tp: int = 1) -> tuple[int, int]:
    """This process's data-parallel rank and size where ``tp`` ranks work on the same samples."""
    if dist.is_initialized():
        return dist.get_rank() // tp, dist.get_world_size() // tp
    return 0, 1


# ---- modules -------------------------------------------------------------------------------------------------------


class Regression(pl.LightningModule):
    """As a user writes it: a mean loss, layers with torch's own initial weights, tied ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)))
        self.head = nn.Linear(6, 3)
        self.again = nn.Linear(6, 3)
        self.again.weight = self.head.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.blocks(x)
        return F.mse_loss(self.head(features) + self.again(features.square()), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self, target=torch.optim.AdamW, lr=1e-2)


class Masked(Regression):
    """Returns (sum, count) and does not say beforehand what it counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        keep = y[:, 0] > 0.3
        features = self.blocks(x)
        errors = (self.head(features) + self.again(features.square()) - y).square().mean(1)
        return (errors * keep).sum(), keep.sum()


class Planned(Regression):
    """Wider blocks between a norm, a bias of its own and a head; nothing in it knows of plans."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(6, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)))
        self.norm = nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.full((8,), 0.1))
        self.head, self.again = nn.Linear(8, 3), nn.Linear(8, 3, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.norm(self.blocks(self.widen(x)) + self.bias)
        return F.mse_loss(self.head(features) + self.again(features.square()), y)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.0)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A user's network for 8x8 images: torch's own initial weights, and no method that any framework asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 4, stride=4)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Residual(12) for _ in range(2))
        self.head = nn.Linear(4 * 12, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.scale * self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def tuned(
    task: pl.LightningModule, *, target: Any = torch.optim.AdamW, lr: float = 1e-2, **arguments: Any
) -> pl.LightningModule:
    """The task with an optimizer, as the framework gives it one."""
    task.configure_optimizers = lambda: build_optimizer(task, target=target, lr=lr, **arguments)
    return task


def build_module(kind: str) -> pl.LightningModule:
    """A tiny LightningModule, on the meta device where it says how its parameters start.

    Names of GPTs add up, as in ``gpt-tied-dropout``; ``loss`` is a loss with everything on, and the head in chunks.
    """
    own = {"plain": Regression, "masked": Masked, "plan": Planned}
    if kind in own:
        return own[kind]()
    if kind == "net":
        return tuned(Classification(Net(), num_classes=10))
    if kind == "vit_b_16":  # torchvision's, with its initial weights, but for the head, which starts at zero
        model: nn.Module = ViTB16(10, image_size=32, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32)
        nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.1)
        return tuned(Classification(model, num_classes=10))
    parts = kind.split("-")
    with torch.device("meta"):
        if parts[0] != "gpt":
            model = image_model(kind)
        else:
            model = GPT(
                VOCABULARY, context=CONTEXT, n_layer=2, n_head=4, n_kv_head=2 if "gqa" in parts else None, width=16,
                multiple_of=8, tie_embeddings="tied" in parts, dropout=0.2 if "dropout" in parts else 0.0,
                soft_cap=2.0 if "loss" in parts else None,
            )  # fmt: skip
    if parts[0] != "gpt":
        return tuned(Classification(model, num_classes=10))
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "loss_chunk": 3} if "loss" in parts else {}
    return tuned(LanguageModel(model, **options))


def image_model(kind: str) -> nn.Module:
    """A model of ours for 8x8 images."""
    if kind == "vit":
        return ViT(10, image_size=8, in_channels=1, patch_size=4, n_layer=2, n_head=4, width=16)
    if kind == "convnet":
        return ConvNet(10, in_channels=1, image_size=8, width=3)
    if kind == "mlp":
        return MLP(10, in_channels=1, image_size=8, width=9)
    if kind == "mlp-even":
        return MLP(10, in_channels=1, image_size=8, width=12)
    raise ValueError(kind)


# ---- data ----------------------------------------------------------------------------------------------------------


def global_batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    if kind.startswith("gpt"):
        tokens = torch.randint(VOCABULARY, (GLOBAL_SIZE, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        # Few, many or no targets count, so unequally that every rank and every micro-batch has another number.
        for sample in range(GLOBAL_SIZE):
            targets[sample, : (3 * sample + step) % (CONTEXT + 1)] = IGNORED
        targets[:2] = IGNORED
        return tokens[:, :-1], targets
    if kind in ("plain", "masked", "plan"):
        x = torch.randn(GLOBAL_SIZE, 6, generator=generator)
        return x, torch.randn(GLOBAL_SIZE, 3, generator=generator)
    images = torch.randn(GLOBAL_SIZE, *((3, 32, 32) if kind == "vit_b_16" else (1, 8, 8)), generator=generator)
    return images, torch.randint(10, (GLOBAL_SIZE,), generator=generator)


class Shares(Dataset):
    """This rank's shares of the global batches."""

    deterministic = True

    def __init__(self, kind: str, steps: int, tp: int = 1) -> None:
        rank, size = dp_place(tp)
        part = slice(rank * GLOBAL_SIZE // size, (rank + 1) * GLOBAL_SIZE // size)
        self.batches = [tuple(t[part] for t in global_batch(kind, step)) for step in range(steps)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def shares(kind: str, steps: int, *, tp: int = 1) -> DataLoader:
    return DataLoader(Shares(kind, steps, tp), batch_size=None)


def digits(*, global_size: int = 64, eval_batch_size: int = 128, tp: int = 1) -> ShardedDataModule:
    rank, size = dp_place(tp)
    return ShardedDataModule(
        Digits(), seed=3, global_size=global_size, eval_batch_size=eval_batch_size, dp_rank=rank, dp_size=size
    )


# ---- training ------------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank: a collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Recorder(pl.Callback):
    """Fills a Record."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.record.start = {name: whole(p) for name, p in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.record.gradients:
            self.record.gradients = {n: whole(p.grad) for n, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.losses.append(float(trainer.strategy.global_loss()))
        norm = trainer.precision_plugin.grad_norm
        if norm is not None:
            self.record.norms.append(float(norm))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.end = {name: whole(p) for name, p in pl_module.named_parameters()}


def make_trainer(layout: str, *, callbacks: Any = (), accumulate: int = 1, strategy: Any = None, **options: Any) -> Any:
    """A Trainer around MeshStrategy that says nothing and writes nothing, unless told to."""
    dims = LAYOUTS[layout]
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", message=".*(does not have many workers|tensorboardX|no `val_dataloader`|exists and is not empty).*"
    )
    strategy = {"seed": 5, "accumulate": accumulate, **(strategy or {})}
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": -1}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=dims.world_size,
        strategy=MeshStrategy(**dims.shape, **strategy),
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **{**quiet, **options},
    )


def train(
    kind: str,
    layout: str,
    accumulate: int = 1,
    steps: int = 20,
    options: dict[str, Any] | None = None,
    observe: Callable[[Any, Any], dict[str, Any]] | None = None,
    seed_by_rank: bool = False,
    optimizer: dict[str, Any] | None = None,
) -> Record:
    """Train; `observe(trainer, module)` is called after the end for `Record.kinds`; `optimizer` is for `tuned`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(11 + (rank * 7 if seed_by_rank else 0))
    module = tuned(build_module(kind), **optimizer) if optimizer else build_module(kind)
    recorder = Recorder()
    options = {"precision": "64-true", "gradient_clip_val": 0.5, "max_steps": steps, **(options or {})}
    options["strategy"] = {"plan": PLANS.get(kind), **options.get("strategy", {})}
    trainer = make_trainer(layout, callbacks=[recorder], accumulate=accumulate, **options)
    if kind == "convnet":
        trainer.fit(module, datamodule=digits(tp=LAYOUTS[layout].tp))
    else:
        trainer.fit(module, shares(kind, steps, tp=LAYOUTS[layout].tp))
    record = recorder.record
    record.kinds = observe(trainer, module) if observe else {}
    record.kinds["digest"] = sum(float(t.double().abs().sum()) for t in record.end.values())
    if rank:
        record.start, record.gradients, record.end = {}, {}, {}
    return record


def on_layout(pool: Any, function: Callable[..., Any], layout: str, *arguments: Any, **options: Any) -> list[Any]:
    """`function(*arguments)` in this process for one device, else on the pool's ranks; a result a rank."""
    if world_size(layout) == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [function(*arguments)]
        finally:
            torch.set_num_threads(threads)
    return pool.run(function, *arguments, world_size=world_size(layout), **options)


def largest_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, floor: float = 0.0) -> float:
    """The largest |difference| / max(|theirs|, floor * norm of all of theirs) over all elements."""
    assert ours.keys() == theirs.keys()
    norm = torch.stack([t.double().norm() for t in theirs.values()]).norm()
    gaps = [
        ((ours[name].double() - t.double()).abs() / t.double().abs().clamp(min=float(floor * norm))).max()
        for name, t in theirs.items()
    ]
    return float(torch.stack(gaps).max())


def parameter_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, floor: float) -> float:
    """The largest norm(difference) / max(norm(theirs), floor * norm of all of theirs) over all parameters."""
    assert ours.keys() == theirs.keys()
    norms = {name: float(t.double().norm()) for name, t in theirs.items()}
    least = floor * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(float((ours[n].double() - t.double()).norm()) / max(norms[n], least) for n, t in theirs.items())


def relative_gap(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
