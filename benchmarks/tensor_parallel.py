"""What tensor parallelism costs: time per optimizer step over PyTorch by hand, with what else there is beside it.

The same GPT from the same weights, the same samples in the same order, AdamW with foreach, clipping to norm 1: that the
losses of all arms agree is checked. Every arm runs in fresh processes with one thread each, the arms of a round one
after the other; a ratio compares two arms of one round. The arms:

hand-written     Megatron's layers with sequence parallelism on plain local tensors: two all-gathers and two
                 reduce-scatters a block, embedding and loss parallel over the vocabulary; FSDP2 where data are split.
shardwise        ``strategy=tp|fsdp|fsdp+tp``.
stock Lightning  its ModelParallelStrategy, the plan as in its documentation: column- and rowwise layers, whole logits.
stock styles     PyTorch's DTensor styles in a loop by hand, at their best: sequence and loss parallel.

Shapes: B samples, T tokens (t of this rank), D width, V vocabulary (v of this rank).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from framework_tax import StepTimer, in_fresh_processes, median_step, run_quietly, spread
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shardwise.data.order import StreamBatchSampler
from shardwise.data.splits import as_batch
from shardwise.data.synthetic import SyntheticTokenSamples
from shardwise.launch import warm_up
from shardwise.models.gpt import GPT
from shardwise.parallel.initialise import materialise

SIZES: dict[str, dict[str, int]] = {
    "20 ms": {"n_layer": 3, "n_head": 4, "width": 128, "context": 64, "vocab_size": 512, "batch": 4, "steps": 60},
    "200 ms": {"n_layer": 4, "n_head": 8, "width": 256, "context": 128, "vocab_size": 2048, "batch": 8, "steps": 30},
}
"""Aimed time of a step by hand (``tp``) -> the GPT, samples of a global batch, and optimizer steps of a run."""

LAYOUTS: dict[str, tuple[int, int]] = {"tp": (1, 2), "fsdp": (2, 1), "fsdp+tp": (2, 2)}
"""Name, also of the strategy -> data-parallel and tensor-parallel degree."""

SKIPPED, COMPARED = 12, (0, 9)
"""Steps at the start of a run that are not measured, and those of them whose losses are compared."""

TOLERANCE = (1e-4, 1e-3)
"""Largest relative difference of those losses between two arms."""

NUM_SAMPLES, SEED, LR, MAX_NORM = 10_000, 0, 1e-3, 1.0

Result = tuple[float, list[float]]
"""Median seconds of a step, and the losses that are compared."""


# ---- what the arms share -------------------------------------------------------------------------------------------


def _model(size: dict[str, int]) -> GPT:
    sizes = {key: value for key, value in size.items() if key not in ("batch", "steps", "vocab_size")}
    with torch.device("meta"):
        model = GPT(size["vocab_size"], **sizes)  # type: ignore[arg-type]
    materialise(model, seed=SEED, device=torch.device("cpu"))
    return model


def _loader(size: dict[str, int], *, dp_rank: int, dp_size: int) -> DataLoader:
    samples = SyntheticTokenSamples(first=0, count=NUM_SAMPLES, context=size["context"], vocab_size=size["vocab_size"])
    order = StreamBatchSampler(NUM_SAMPLES, global_size=size["batch"], dp_rank=dp_rank, dp_size=dp_size, seed=SEED)
    return DataLoader(samples, batch_sampler=order, collate_fn=as_batch)


def _optimizer(parameters: Iterable[Tensor], *, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and its schedule; a group of its own for each mesh, since foreach takes no mixture."""
    groups = [{"params": group} for group in _by_mesh(parameters)]
    optimizer = torch.optim.AdamW(groups, lr=LR, foreach=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _clip_stock(parameters: Iterable[Tensor]) -> None:
    """``clip_grad_norm_``, mesh by mesh, because it refuses two at once."""
    groups = _by_mesh(parameters)
    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], MAX_NORM)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)


def _mean_over_ranks(loss: Tensor) -> float:
    # Tensor-parallel ranks hold the same loss, data-parallel ones losses of as many tokens.
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def _loop(
    model: nn.Module,
    step_loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterator[Any],
    *,
    clip: Callable[[], None],
    steps: int,
    around: Callable[[], Any] = nullcontext,
) -> Result:
    """A loop as one writes it without any framework; ``around`` is the context of loss and backward pass."""
    optimizer, schedule = _optimizer(model.parameters(), steps=steps)
    ends, losses = [], []
    for step in range(steps):
        tokens_BT, targets_BT = next(batches)
        optimizer.zero_grad()
        with around():
            loss = step_loss(tokens_BT, targets_BT)
            loss.backward()
        clip()
        optimizer.step()
        schedule.step()
        if step in COMPARED:
            losses.append(_mean_over_ranks(loss.full_tensor() if isinstance(loss, DTensor) else loss))
        elif step % 10 == 0:
            loss.item()
        ends.append(time.perf_counter())
    return median_step(ends, skipped=SKIPPED), losses


def _start(layout: str) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("dp", "tp"))


def _shard(model: GPT, mesh: DeviceMesh) -> None:
    """FSDP2 as in its documentation: block by block, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


# ---- by hand -------------------------------------------------------------------------------------------------------


def _gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x_BtD.new_empty(group.size() * x_BtD.size(0), *x_BtD.shape[1:])
    dist.all_gather_into_tensor(parts, x_BtD.contiguous(), group=group)
    return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def _scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x_BTD.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)
    part_BtD = parts.new_empty(x_BTD.size(0), x_BTD.size(1) // group.size(), *x_BTD.shape[2:])
    dist.reduce_scatter_tensor(part_BtD, parts, group=group)
    return part_BtD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BtD, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _Embedding(nn.Module):
    def __init__(self, weight_vD: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_vD)
        self.group = group

    def forward(self, tokens_BT: Tensor) -> Tensor:
        here, outside = _local_ids(tokens_BT, self.weight.size(0), self.group)
        x_BTD = F.embedding(here, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return _Scatter.apply(x_BTD, self.group)


def _local_ids(ids: Tensor, size: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank, 0 where it does not have them, and where that is."""
    here = ids - group.rank() * size
    outside = (here < 0) | (here >= size)
    return here.masked_fill(outside, 0), outside


class _CrossEntropy(torch.autograd.Function):
    """Mean over the tokens N; two all-reduces, of the maxima, and of what is summed up."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        highest_N = logits_Nv.amax(-1)
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        shifted_Nv = logits_Nv - highest_N.unsqueeze(-1)
        here_N, outside_N = _local_ids(targets_N, logits_Nv.size(-1), group)
        at_target_N = shifted_Nv.gather(-1, here_N.unsqueeze(-1)).squeeze(-1).masked_fill(outside_N, 0.0)
        sums_2N = torch.stack([shifted_Nv.exp_().sum(-1), at_target_N])
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(shifted_Nv.div_(sums_2N[0].unsqueeze(-1)), here_N, outside_N)
        return (sums_2N[0].log() - sums_2N[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax_Nv, here_N, outside_N = ctx.saved_tensors
        softmax_Nv.scatter_add_(-1, here_N.unsqueeze(-1), -(~outside_N).to(softmax_Nv.dtype).unsqueeze(-1))
        return softmax_Nv.mul_(grad / softmax_Nv.size(0)), None, None


def _split_by_hand(model: GPT, group: dist.ProcessGroup) -> None:
    """Megatron's cut, in place: this rank's part of each weight, and collectives where regions begin and end."""

    def part(weight: Tensor, dim: int) -> Tensor:
        return weight.detach().chunk(group.size(), dim)[group.rank()].clone()

    def cut(linear: nn.Linear, dim: int) -> None:
        linear.weight = nn.Parameter(part(linear.weight, dim))

    def enter(module: nn.Module, args: tuple) -> tuple:
        return _Gather.apply(args[0], group), *args[1:]

    def leave(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return _Scatter.apply(output, group)

    model.tok_emb = _Embedding(part(model.tok_emb.weight, 0), group)  # type: ignore[assignment]
    blocks: Any = model.blocks
    for block in blocks:
        for linear in (block.attn.q, block.attn.k, block.attn.v, block.mlp.gate, block.mlp.up):
            cut(linear, 0)
        for linear in (block.attn.out, block.mlp.down):
            cut(linear, 1)
            linear.register_forward_hook(leave)
        for region in (block.attn, block.mlp):
            region.register_forward_pre_hook(enter)
    cut(model.head, 0)
    model.head.register_forward_pre_hook(enter)


def _clip_by_hand(model: nn.Module, tp: dist.ProcessGroup) -> None:
    """Add up the norms' gradients, which are of this rank's tokens, then clip; two collectives."""
    whole: list[Tensor] = []
    cut: list[Tensor] = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert grad is not None
        (whole if "norm" in name else cut).append(grad)
    if tp.size() > 1:
        flat = torch.cat(whole)
        dist.all_reduce(flat, group=tp)
        torch._foreach_copy_(whole, list(flat.split([grad.numel() for grad in whole])))
    squares = [torch.stack(torch._foreach_norm(grads)).square().sum() for grads in (whole, cut)]
    square = squares[0] / tp.size() + squares[1]
    dist.all_reduce(square)
    torch._foreach_mul_(whole + cut, (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0))


def by_hand(layout: str, size: dict[str, int], output_root: str) -> Result:
    """Plain PyTorch, with the same collectives as ours."""
    mesh = _start(layout)
    dp, tp = mesh["dp"], mesh["tp"].get_group()
    model = _model(size)
    if tp.size() > 1:
        _split_by_hand(model, tp)
    if dp.size() > 1:
        _shard(model, dp)

    def step_loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_Nv, targets_N = model(tokens_BT).flatten(0, 1), targets_BT.flatten()
        return _CrossEntropy.apply(logits_Nv, targets_N, tp) if tp.size() > 1 else F.cross_entropy(logits_Nv, targets_N)

    batches = iter(_loader(size, dp_rank=dp.get_local_rank(), dp_size=dp.size()))
    return _loop(model, step_loss, batches, clip=lambda: _clip_by_hand(model, tp), steps=size["steps"])


# ---- PyTorch's styles ----------------------------------------------------------------------------------------------


def _split_by_styles(model: GPT, mesh: DeviceMesh) -> None:
    """Sequence parallel outside of attention and MLP, logits left cut: the form that torchtitan uses."""
    gathered: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    beside_rotary: dict[str, Any] = {key: (*layout, None) for key, layout in gathered.items()}
    plan = {
        "tok_emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attn": PrepareModuleInput(**beside_rotary),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(**gathered),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)


def stock_styles(layout: str, size: dict[str, int], output_root: str) -> Result:
    """PyTorch's DTensor styles at their best, and ``fully_shard``."""
    mesh = _start(layout)
    dp = mesh["dp"]
    model = _model(size)
    _split_by_styles(model, mesh["tp"])
    if dp.size() > 1:
        _shard(model, dp)

    def step_loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())

    batches = iter(_loader(size, dp_rank=dp.get_local_rank(), dp_size=dp.size()))
    return _loop(
        model,
        step_loss,
        batches,
        clip=lambda: _clip_stock(model.parameters()),
        steps=size["steps"],
        around=loss_parallel,
    )


# ---- Lightning -----------------------------------------------------------------------------------------------------


class Timer(StepTimer):
    """Also writes down the losses that are compared."""

    losses: list[float] = []  # noqa: RUF012  read by this module after the run, in the same process

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        if len(self.ends) in COMPARED:
            self.losses.append(_mean_over_ranks(outputs["loss"]))
        super().on_train_batch_end()


class _Module(pl.LightningModule):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.size = size
        self.model = _model(size)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            plan = {
                "tok_emb": RowwiseParallel(input_layouts=Replicate()),
                "blocks.*.attn.[qkv]": ColwiseParallel(),
                "blocks.*.attn.out": RowwiseParallel(),
                "blocks.*.mlp.gate": ColwiseParallel(),
                "blocks.*.mlp.up": ColwiseParallel(),
                "blocks.*.mlp.down": RowwiseParallel(),
                "head": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(self.model, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            _shard(self.model, mesh["data_parallel"])

    def train_dataloader(self) -> DataLoader:
        assert self.device_mesh is not None
        dp = self.device_mesh["data_parallel"]
        return _loader(self.size, dp_rank=dp.get_local_rank(), dp_size=dp.size())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = F.cross_entropy(self.model(tokens_BT).flatten(0, 1), targets_BT.flatten())
        self.log("train/loss", loss)
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning's own refuses parameters of which only some are on a mesh.
        _clip_stock(self.parameters())

    def configure_optimizers(self) -> Any:
        optimizer, schedule = _optimizer(self.parameters(), steps=self.size["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def stock_lightning(layout: str, size: dict[str, int], output_root: str) -> Result:
    """Lightning's own loop and ModelParallelStrategy, everything optional off."""
    torch.set_num_threads(1)
    dp_size, tp_size = LAYOUTS[layout]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dp_size * tp_size,
        strategy=ModelParallelStrategy(data_parallel_size=dp_size, tensor_parallel_size=tp_size),
        max_steps=size["steps"],
        logger=False,
        callbacks=[Timer()],
        log_every_n_steps=10,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(size))
    return median_step(Timer.ends, skipped=SKIPPED), Timer.losses


# ---- ours ----------------------------------------------------------------------------------------------------------


def shardwise_loop(layout: str, size: dict[str, int], output_root: str) -> Result:
    """The loop of ``train.py``: progress lines, metrics.jsonl and the run folder included."""
    dp_size, tp_size = LAYOUTS[layout]
    strategy: dict[str, Any] = {"name": layout}
    strategy |= {axis: degree for axis, degree in (("dp_shard", dp_size), ("tp", tp_size)) if degree > 1}
    data = {key: size[key] for key in ("context", "vocab_size")}
    model = {key: value for key, value in size.items() if key not in ("batch", "steps")}
    processes = dp_size * tp_size
    run_quietly(
        {
            "output_root": output_root,
            "seed": SEED,
            "plugins": ["tensor_parallel"],
            "trainer": {
                "max_steps": size["steps"],
                "devices": processes,
                "accelerator": "cpu",
                "limit_val_batches": 0,
                "limit_test_batches": 0,
                "gradient_clip_val": MAX_NORM,
            },
            "strategy": strategy,
            "batch": {"global_size": size["batch"]},
            "schedule": {"kind": "linear"},
            "task": {"_target_": "shardwise.module.LanguageModel"},
            "model": {"_target_": "shardwise.models.gpt.GPT", **model},
            "data": {"_target_": "shardwise.data.synthetic.SyntheticTokens", "num_samples": NUM_SAMPLES, **data},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": LR, "foreach": True},
            "callbacks": {"timer": {"_target_": "tensor_parallel.Timer"}},
        },
        processes=processes,
    )
    return median_step(Timer.ends, skipped=SKIPPED), Timer.losses


# ---- measuring -----------------------------------------------------------------------------------------------------

ARMS: dict[str, Callable[[str, dict[str, int], str], Result]] = {
    "hand-written": by_hand,
    "shardwise": shardwise_loop,
    "stock Lightning": stock_lightning,
    "stock styles": stock_styles,
}


def arms_of(layout: str) -> list[str]:
    """All, but the styles only where there is something to split."""
    return [name for name in ARMS if name != "stock styles" or LAYOUTS[layout][1] > 1]


def check_losses(losses: dict[str, list[float]]) -> None:
    """Whether all arms have trained the same model on the same samples in the same way.

    Raises:
        RuntimeError: two arms differ by more than rounding.
    """
    for index, (step, tolerance) in enumerate(zip(COMPARED, TOLERANCE, strict=True)):
        values = {name: found[index] for name, found in losses.items()}
        low, high = min(values.values()), max(values.values())
        print(f"  loss of step {step + 1}: {low:.6f}, the arms differ by {high - low:.1e}", flush=True)
        if high - low > tolerance * abs(low):
            raise RuntimeError(f"the arms differ in the loss of step {step + 1}: {values}")


def measure(
    rounds: int, output_root: str, *, layouts: Iterable[str] = tuple(LAYOUTS), sizes: Iterable[str] = tuple(SIZES)
) -> list[dict[str, Any]]:
    """A row for each layout and size: milliseconds of the hand-written step, and ratios to it."""
    warm_up()
    rows = []
    for layout in layouts:
        processes = LAYOUTS[layout][0] * LAYOUTS[layout][1]
        for size in sizes:
            names = arms_of(layout)
            times: dict[str, list[float]] = {name: [] for name in names}
            losses: dict[str, list[float]] = {}
            for number in range(rounds):
                for name in names:
                    run_id = f"{layout}-{size}-{number}".replace(" ", "")
                    seconds, losses[name] = in_fresh_processes(
                        ARMS[name], layout, SIZES[size], output_root, processes=processes, run_id=run_id
                    )
                    times[name].append(seconds)
            check_losses(losses)
            row: dict[str, Any] = {"layout": layout, "processes": processes, "size": size}
            row["hand ms"] = 1e3 * statistics.median(times["hand-written"])
            row |= {name: spread(times[name], times["hand-written"]) for name in names[1:]}
            rows.append(row)
            print(row, flush=True)
    return rows
