"""What is printed before the first step and after the last."""

import itertools
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.store import checkpoints_of
from shardwise.errors import ConfigError
from shardwise.job import Job, start_command
from shardwise.logs import shown_ranks
from shardwise.metrics_file import read_lines
from shardwise.noise_scale import GradientNoiseScale
from shardwise.optim import Muon
from shardwise.optim.groups import count_decayed, count_hidden
from shardwise.parallel.blocks import repeated_blocks
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.gradient_noise import ENOUGH, verdict
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved
from shardwise.signals import PREEMPTED
from shardwise.slots import find_target
from shardwise.steps import Steps
from shardwise.telemetry.sentences import sentences

LISTED = 8
"""Ranks, or hosts, that the start-up table names one by one."""


class StartUp(Callback):
    """Prints, on rank 0, what is about to happen, and after the first step the formats that are really in use."""

    def __init__(self, job: Job, resolved: Resolved, steps: Steps, *, notes: Sequence[str] = ()) -> None:
        self.job = job
        self.resolved = resolved
        self.steps = steps
        self.notes = notes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            plan = getattr(trainer.strategy, "plan", None)
            split = plan is not None and plan.sequence
            hosts = getattr(trainer.strategy, "hosts", [])
            parts = (self.job, self.resolved, self.steps, pl_module)
            table = start_table(*parts, notes=self.notes, sequences_split=split, hosts=hosts)
            width = None if sys.stdout.isatty() else 10_000  # a file has no edge
            Console(highlight=False, soft_wrap=True, width=width).print(table)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step == 1 and trainer.optimizers:
            reduction = getattr(trainer.strategy, "reduction_dtype", None)
            print(formats_line(pl_module, trainer.optimizers[0], reduction), flush=True)


def start_table(
    job: Job,
    resolved: Resolved,
    steps: Steps,
    module: nn.Module,
    *,
    notes: Sequence[str] = (),
    sequences_split: bool = False,
    hosts: Sequence[str] = (),
) -> Table:
    """What the rules made of the configuration, a row a rule; ``hosts`` are those of the ranks, in order."""
    config, world, dims, batch = resolved.config, resolved.world, resolved.dims, resolved.batch
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    kind = {"gpu": "GPU", "cpu": "CPU"}[world.accelerator]
    processes = f"{world.size} {kind} process{'es' if world.size > 1 else ''}"
    nodes = f" on {world.num_nodes} nodes" if world.num_nodes > 1 else ""
    table.add_row("strategy", f"{config.strategy.name}: {dims}{', sequences split' if sequences_split else ''}")
    done = [f"activation checkpointing {config.strategy.activation_checkpointing}", "compiled"]
    wanted = (config.strategy.activation_checkpointing != "none", config.strategy.compile)
    if any(wanted):
        blocks = counted(len(repeated_blocks(module)), "block")
        table.add_row("blocks", f"{blocks}, {', '.join(itertools.compress(done, wanted))}")
    table.add_row("launch", f"{world.launch}, {processes}{nodes} ({world.reason})")
    if world.size > 1:
        table.add_row("ranks", rank_map(dims, hosts))
    sizes = f"micro {batch.micro_size} x data-parallel {dims.dp_size} x accumulate {batch.accumulate}"
    table.add_row("batch", f"{sizes} = global {batch.global_size}")
    length = counted(steps.total, "optimizer step")
    if brings_optimizer(module):
        table.add_row("learning rate", f"{type(module).__name__}.configure_optimizers decides")
        table.add_row("schedule", length)
    else:
        scaling = config.lr_scaling
        base = f" from base batch {scaling.base_batch_size}" if scaling.rule != "none" else ""
        rates = f"base {resolved.base_lr:g}, rule {scaling.rule}{base}: effective {resolved.lr:g}"
        table.add_row("learning rate", rates)
        if is_muon(resolved):
            by_muon, by_adamw = count_hidden(module)
            table.add_row("optimizer", f"Muon on {by_muon:,} parameters, AdamW on {by_adamw:,}")
        if amount := resolved.optimizer.get("weight_decay"):
            some, every = count_decayed(module, decay=resolved.optimizer.get("decay", "matrices"))
            table.add_row("weight decay", f"{amount:g} on {some:,} of {every:,} parameters")
        if changes := rule_changes(resolved, steps):
            table.add_row("rule changes", "; ".join(changes))
        after = f" after {counted(steps.warmup, 'step')} of warm-up" if steps.warmup else ""
        table.add_row("schedule", f"{config.schedule.kind}{after}, {length}")
    if steps.samples_per_epoch is not None and steps.steps_per_epoch is not None:
        sizes = f"{counted(steps.samples_per_epoch, 'sample')}, {counted(steps.steps_per_epoch, 'step')}"
        table.add_row("epoch", sizes)
    whole, local = count_parameters(module)
    table.add_row("parameters", f"{whole:,}, {local:,} of them on rank 0")
    if config.init_from is not None and job.checkpoint is None:
        table.add_row("weights", config.init_from)
    table.add_row("precision", config.precision.kind)
    table.add_row("run folder", job.run_folder)
    for note in (*job.notes, *notes):
        table.add_row("note", note)
    return table


def rank_map(dims: ParallelDims, hosts: Sequence[str] = ()) -> str:
    """Which rank has which share of the batch (dp) and part of the layers (tp), and where it runs.

    ``0: dp 0 tp 0, 1: dp 0 tp 1 on node1``; the rule where there are many: ``dp = rank // 8, tp = rank % 8``.
    """
    size, named = dims.world_size, {"dp": dims.dp_size, "tp": dims.tp}
    axes = [axis for axis, degree in named.items() if degree > 1]
    if len(axes) == 2 and size <= LISTED:
        shown = ", ".join(f"{rank}: dp {dims.dp_rank(rank)} tp {dims.tp_rank(rank)}" for rank in range(size))
    elif len(axes) == 2:
        shown = f"dp = rank // {dims.tp}, tp = rank % {dims.tp}"
    else:
        shown = f"{axes[0] if axes else 'dp'} = rank, 0 to {size - 1}"
    there: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        there.setdefault(host, []).append(rank)
    if len(there) <= 1:
        return f"{shown} on {next(iter(there))}" if any(there) else shown
    places = [f"{host}: {shown_ranks(ranks)}" for host, ranks in itertools.islice(there.items(), LISTED)]
    more = f", and {len(there) - LISTED} more hosts" if len(there) > LISTED else ""
    return f"{shown}; {', '.join(places)}{more}"


def rule_changes(resolved: Resolved, steps: Steps) -> list[str]:
    """What the learning-rate rule has changed beyond the rate: ``betas 0.9, 0.999 -> 0.8, 0.998``."""

    def shown(value: Any) -> str:
        return ", ".join(f"{one:.6g}" for one in (value if isinstance(value, list | tuple) else [value]))

    changed = [
        f"{name.replace('_', ' ')} {shown(change.before)} -> {shown(change.after)}"
        for name, change in resolved.scaled.changes.items()
    ]
    if steps.warmup != steps.unscaled_warmup:
        changed.append(f"warm-up {steps.unscaled_warmup:,} -> {counted(steps.warmup, 'step')}")
    return changed


def is_muon(resolved: Resolved) -> bool:
    """Whether the optimizer steps some parameters with Muon and the others with AdamW."""
    config = resolved.config
    if not config.optimizer.get("_target_"):
        return False
    target = find_target("optimizer", config.optimizer, plugins=config.plugins)
    return isinstance(target, type) and issubclass(target, Muon)


def show_end(job: Job, result: dict[str, Any]) -> None:
    """The result, where it is, and what to type next."""
    values = sorted(result["metrics"].items())
    # What the test says is of the last step; a validation may be older.
    chosen = [pair for pair in values if pair[0].startswith("test/")] or [p for p in values if p[0].startswith("val/")]
    shown = "  ".join(f"{name} {value:.4g}" for name, value in chosen)
    again = f" (exit status {PREEMPTED}: try again)" if result["status"] == "preempted" else ""
    skipped = int(result["metrics"].get("skipped_steps", 0))
    left_out = f", {skipped:,} of them skipped" if skipped else ""
    print(f"\n{result['status']} after {counted(result['steps'], 'step')}{left_out}{again}  {shown}")
    if warning := not_finite(job, result["metrics"]):
        print(warning)
    if line := noise_verdict(job, result):
        print(line)
    if not job.in_sweep:
        for line in sentences(result.get("telemetry")):
            print(wrapped(line))
    print(f"run folder: {job.run_folder}")
    if newest := newest_checkpoint(job):
        print(f"checkpoint: {newest}")
    if not job.in_sweep:
        print("next:")
        for line in [*look_commands(job), *next_commands(job, status=result["status"])]:
            print(f"  {line}")


def shardwise_command(job: Job) -> str:
    """``python -m shardwise`` by the interpreter that the run was started with."""
    return f"{shlex.quote(shlex.split(start_command(job))[0])} -m shardwise"


def look_commands(job: Job) -> list[str]:
    """Commands that show this run: its page, and with several ranks their logs."""
    module = shardwise_command(job)
    words = ["show"] if job.action == "train" else []
    words += ["logs"] if job.resolved().world.size > 1 else []
    return [f"{module} {word} {shlex.quote(job.run_folder)}" for word in words]


def wrapped(line: str) -> str:
    """A line that a terminal breaks between words; a file has no edge."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False)


def not_finite(job: Job, metrics: Mapping[str, float]) -> str | None:
    """One line on the metrics that came out as nan or infinite, since when, and what to try; None if there is none."""
    wrong = [f"{name} is {value}" for name, value in sorted(metrics.items()) if not math.isfinite(value)]
    if not wrong:
        return None
    loss = "train/loss"
    lines = read_lines(Path(job.run_folder) / "metrics.jsonl")
    logged = [(step, line[loss]) for step, line, _ in lines if loss in line]
    first = next((step for step, value in logged if not math.isfinite(value)), None)
    if first is not None:
        since = f"; the logged {loss} was not finite first at step {first:,}"
    elif logged:
        since = f"; every logged {loss} was finite"
    else:
        since = ""
    line = f"WARNING: NOT FINITE: {', '.join(wrong)}{since}"
    if first is None and not any("loss" in one for one in wrong):
        return line  # a metric of the user's, which the steps have not brought about
    lr, clip = job.config["optimizer"].get("lr"), job.config["trainer"]["gradient_clip_val"]
    ways = ["a smaller optimizer.lr" + ("" if lr is None else f" (it is {lr:g})")]
    if clip is None or clip > 1:
        ways.append("trainer.gradient_clip_val=1.0")
    return f"{line}: try {', or '.join(ways)}"


def noise_verdict(job: Job, result: Mapping[str, Any]) -> str | None:
    """How the batch compares with the critical batch size; None where that was not measured."""
    parts = ("gradient_norm_sq", "gradient_variance", "measurements")
    found = [result["metrics"].get(f"noise_scale/{part}") for part in parts]
    if None in found:
        return None
    often, steps = max(1, result["steps"] // (4 * ENOUGH)), result["steps"]
    more = "more steps are needed"
    for name, node in job.config["callbacks"].items():
        ours = str(node.get("_target_")).endswith(GradientNoiseScale.__name__)
        if ours and steps >= 2 * ENOUGH and often < node.get("every_n_steps", math.inf):
            more = f"callbacks.{name}.every_n_steps={often}"
    return verdict(
        job.resolved().batch.global_size,
        norm_sq=found[0],
        variance=found[1],
        measurements=int(found[2]),
        more=more,
    )


def counted(number: int, noun: str) -> str:
    """``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def next_commands(job: Job, *, status: str = "completed") -> list[str]:
    """Commands that make sense after this run: to resume it where it has not come to its end, or to go on from it."""
    start = start_command(job)
    again = f"{start} rerun={shlex.quote(job.run_folder)}{_plugins(job)}"
    if status != "completed":
        return [*filter(None, [resume_command(job)]), again]

    def same_but(*changed: str) -> str:
        ends = ("sweep.", *(f"{key}{end}" for key in changed for end in "=."))
        typed = [override for override in job.overrides if not override.lstrip("+").startswith(ends)]
        return " ".join([start, *map(shlex.quote, without_secrets(typed))])

    other = "ddp" if job.config["strategy"]["name"] == "fsdp" else "fsdp"
    module = shardwise_command(job)
    export = f"{module} export {shlex.quote(job.run_folder)} --to model.safetensors" if newest_checkpoint(job) else None
    others = [
        f"{same_but('strategy', 'trainer.devices', 'nodes')} strategy={other} trainer.devices=2",
        _sweep_of_batches(job, same_but),
    ]
    if any(override.lstrip("+").startswith("sweep=") for override in job.overrides):
        others = []  # a job out of a sweep's file, which would be run whole
    return [*others, again, *filter(None, [export])]


def _sweep_of_batches(job: Job, same_but: Callable[..., str]) -> str:
    """The run at two other batch sizes, by the rule that is its own, or by one that starts from its own batch."""
    resolved = job.resolved()
    size, scaling = resolved.batch.global_size, resolved.config.lr_scaling
    halves = size % (2 * resolved.dims.dp_size) == 0
    sizes = f"-m batch.global_size={size // 2},{size * 2}" if halves else f"-m batch.global_size={size * 2},{size * 4}"
    ruled = ("lr_scaling=", "lr_scaling.rule=")
    if scaling.rule != "none" or any(override.lstrip("+").startswith(ruled) for override in job.overrides):
        return f"{same_but('batch')} {sizes}"
    rule = f"lr_scaling=linear lr_scaling.base_batch_size={scaling.base_batch_size or size}"
    return f"{same_but('batch', 'lr_scaling')} {sizes} {rule}"


def resume_command(job: Job) -> str | None:
    """What continues this run, or None where it has left no checkpoint (or is a job that trains nothing)."""
    return newest_checkpoint(job) and f"{start_command(job)} resume={shlex.quote(job.run_folder)}{_plugins(job)}"


def newest_checkpoint(job: Job) -> str | None:
    """Where the newest checkpoint of a training lies; None if there is none."""
    if job.action != "train":
        return None
    try:
        store = checkpoints_of(Path(job.run_folder))
        names = store.names()
    except (ConfigError, OSError):
        return None
    return store.url_of(names[-1]) if names else None


def _plugins(job: Job) -> str:
    """The word that no folder is believed, so that it has to be typed again."""
    return f" plugins=[{','.join(job.config['plugins'])}]" if job.config["plugins"] else ""


def brings_optimizer(module: nn.Module) -> bool:
    """Whether a LightningModule has a ``configure_optimizers`` of its own, so that the configuration's does nothing."""
    return getattr(type(module), "configure_optimizers", None) is not LightningModule.configure_optimizers


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Elements of all parameters, and of those that this rank holds."""
    whole = sum(p.numel() for p in module.parameters())
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
    return whole, local


def formats_line(module: nn.Module, optimizer: torch.optim.Optimizer, reduction: torch.dtype | None) -> str:
    """The formats in use, read from the tensors after the first step."""
    gradients = {p.grad.dtype for p in module.parameters() if p.grad is not None}
    states = {v.dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()}
    rows = {
        "parameters": {p.dtype for p in module.parameters()},
        "gradients": gradients,
        "reductions": {reduction} if reduction else set(),
        "optimizer state": states,
    }
    shown = [
        f"{name} {', '.join(sorted(str(v).removeprefix('torch.') for v in values))}"
        for name, values in rows.items()
        if values
    ]
    return "formats after the first step: " + "; ".join(shown)
