"""Metrics, predictions and text from a checkpoint: what each rank does, and what can be said against it before that."""

import os
import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.build import build_data, build_task
from shardwise.checkpoint.manifest import printable
from shardwise.config import Config, to_plain
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.generation import Texts, harmless, last_logits, settled
from shardwise.job import Job, unwritable, write_json
from shardwise.module import LanguageModel
from shardwise.predictions import CollectPredictions
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved
from shardwise.slots import arguments, build, find_target
from shardwise.steps import Steps
from shardwise.tracking import WandbTracker
from shardwise.trainer import build_trainer

SPLITS = {"eval": ("test", "val"), "predict": ("test", "predict", "val")}
"""Action -> the splits it takes; without a word about it, the first of them that the data have."""
STAGES = {"test": "test", "val": "validate", "predict": "predict"}
"""Split -> Lightning's word for it."""


def check_action(action: str, config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Whether task and data are of the kind that ``action`` needs; imports them, starts nothing.

    Args:
        action: eval, predict or generate.
        config: the composed configuration, whose slots are checked already.
        options: arguments of the action.

    Returns:
        The options, with the split that is meant.

    Raises:
        ConfigError: they are not, in one line.
    """
    data = find_target("data", config.data, plugins=config.plugins)
    task = find_target("task", config.task, plugins=config.plugins)
    if action == "generate":
        _check_text(config, data, task, options["prompt"])
        return options
    there = [split for split in SPLITS[action] if _defines(data, f"{split}_dataloader", LightningDataModule)]
    if action == "eval":
        steps = {"test": "test_step", "val": "validation_step"}
        there = [split for split in there if _defines(task, steps[split], LightningModule)]
    split = options["split"] or next(iter(there), None)
    name = f"{_name(data)} and {_name(task)}" if action == "eval" else _name(data)
    if split is None:
        raise ConfigError(f"{name} have nothing for {action}: neither {' nor '.join(SPLITS[action])} data and a step")
    if split not in there:
        have = f"there is --split {' or '.join(there)}" if there else "there is no other"
        raise ConfigError(f"--split {split}: {name} have none to {action}: {have}")
    return {**options, "split": split}


def _check_text(config: Config, data: Any, task: Any, prompt: str) -> None:
    if not (isinstance(task, type) and issubclass(task, LanguageModel)):
        raise ConfigError(
            f"generate writes text with a language model, and the task of this checkpoint is {_name(task)}: predict "
            f"writes its predictions"
        )
    if not (hasattr(data, "encode") and hasattr(data, "decode")):
        raise ConfigError(
            f"{_name(data)} has no vocabulary that turns text into tokens and back (encode and decode): type data=text "
            f"or data=tokens data.path=... with the one that the model has learned"
        )
    made = build(data, arguments(config.data), where="data")
    if getattr(made, "vocab_size", None) is not None:  # else it is known only after a download
        encode(made, prompt)


def encode(data: Any, prompt: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ConfigError: there are none, or the vocabulary lacks a character.
    """
    try:
        ids = list(data.encode(prompt))
    except ConfigError as error:
        raise ConfigError(f"--prompt: {str(error).partition(': use ')[0]}: leave it out") from error
    if not ids:
        raise ConfigError("--prompt is empty: a text needs a beginning, such as --prompt $'\\n'")
    return ids


def _defines(target: Any, method: str, base: type) -> bool:
    return getattr(target, method, None) is not getattr(base, method)


def _name(target: Any) -> str:
    return getattr(target, "__name__", str(target))


# ---- on a rank -----------------------------------------------------------------------------------------------------


def act(job: Job, resolved: Resolved, rank: int) -> dict[str, Any]:
    """Do what the job says with its checkpoint, on this rank; returns what ``result.json`` holds besides its status.

    Raises:
        ConfigError: something of the data or the checkpoint shows only now to be wrong.
    """
    trainer: pl.Trainer | None = None
    exit_code = 1
    try:
        data = build_data(resolved, rank)
        steps = Steps(None, None, total=1, scheduled=1, val_check_interval=None)
        task = build_task(resolved, data, steps)
        trainer = build_trainer(job, resolved, steps)
        for logger in trainer.loggers:
            logger.log_hyperparams(without_secrets(to_plain(resolved.config)))
        if rank == 0:
            _show_start(job, resolved)
        result = ACTIONS[job.action](job, trainer, task, data)
        exit_code = 0
        return {"action": job.action, "checkpoint": printable(job.checkpoint), "step": job.options["step"], **result}
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning refuses: {' '.join(str(error).split())}") from error
    finally:
        for logger in [] if trainer is None else trainer.loggers:
            if isinstance(logger, WandbTracker):
                logger.finish(exit_code)


def _eval(job: Job, trainer: pl.Trainer, task: pl.LightningModule, data: ShardedDataModule) -> dict[str, Any]:
    """Metrics over all samples of a split."""
    split = job.options["split"]
    run = trainer.test if split == "test" else trainer.validate
    run(task, datamodule=data, ckpt_path=job.checkpoint, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not metrics:
        raise ConfigError(f"{type(task).__name__} logs no metric of --split {split}: type another, or predict")
    loaders = trainer.test_dataloaders if split == "test" else trainer.val_dataloaders
    samples = _samples(loaders)
    result = {"split": split, "samples": samples, "metrics": metrics}
    if trainer.is_global_zero:
        target = job.options["to"]
        if target is not None:
            record = {**result, "checkpoint": printable(job.checkpoint), "step": job.options["step"]}
            try:
                write_json(Path(target), record)
            except OSError as error:
                raise ConfigError(f"--to {target} cannot be written ({error.strerror or error})") from error
        many = "" if samples is None else f", {samples:,} samples"
        print(f"\n{split} split of {type(data.inner).__name__}{many}")
        width = max(map(len, metrics))
        for name, value in sorted(metrics.items()):
            print(f"  {name:<{width}}  {value!r}")
        print(f"written to {target or Path(job.run_folder) / 'result.json'}")
    return result


def _samples(loaders: Any) -> int | None:
    """Samples of the data sets of all loaders; None where one has no length."""
    loaders = loaders.values() if isinstance(loaders, dict) else loaders
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    sizes = [len(dataset) if isinstance(dataset, Sized) else None for dataset in datasets]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _predict(job: Job, trainer: pl.Trainer, task: pl.LightningModule, data: ShardedDataModule) -> dict[str, Any]:
    """Predictions of all samples of a split, in their order."""
    split = job.options["split"]
    target = Path(job.options["to"] or Path(job.run_folder) / "predictions.npz")
    data.setup(STAGES[split])
    data.predict_dataloader = getattr(data, f"{split}_dataloader")  # type: ignore[method-assign]
    with CollectPredictions(target) as predictions:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(predictions)
        trainer.predict(task, datamodule=data, ckpt_path=job.checkpoint, return_predictions=False)
        if not trainer.is_global_zero:
            return {}
        predictions.finish()
    shapes = {name: list(shape) for name, shape in predictions.shapes.items()}
    result: dict[str, Any] = {"split": split, "predictions": str(target), "arrays": shapes, "metrics": {}}
    print(f"\n{split} split of {type(data.inner).__name__}")
    for name, shape in predictions.shapes.items():
        print(f"  {name}  {' x '.join(map(str, shape))}")
    print(f"written to {target}")
    return result


def _generate(job: Job, trainer: pl.Trainer, task: pl.LightningModule, data: ShardedDataModule) -> dict[str, Any]:
    """Text of a language model.

    Each token is a step of Lightning's prediction loop, and so a forward pass of its own of the strategy's: as many on
    every rank. The first rank draws the token and tells the others.
    """
    options, model = job.options, task.get_submodule("model")
    context = getattr(model, "context", None) or getattr(data, "context", None)
    if not isinstance(context, int):
        raise ConfigError(f"neither {type(model).__name__} nor the data say how many tokens the model sees (context)")
    sampling = {name: options[name] for name in ("num", "temperature", "top_k", "seed")}
    texts = Texts(encode(data.inner, options["prompt"]), context=context, **sampling)
    known = getattr(data, "vocab_size", None)  # a model may have more, rounded up
    decode: Callable[[list[int]], str] = data.decode
    stream = _Stream(decode) if trainer.is_global_zero and options["num"] == 1 and sys.stdout.isatty() else None
    if stream is not None:
        stream.show(texts.ids[0])

    def one_token(batch: Any, batch_idx: int) -> Tensor:
        logits_BV = last_logits(model(texts.window(task.device)))[:, :known]
        tokens = torch.tensor(texts.choose(logits_BV), device=task.device)
        if dist.is_available() and dist.is_initialized():
            dist.broadcast(tokens, src=0)
        texts.add(tokens.tolist())
        if stream is not None:
            stream.show(texts.ids[0])
        return tokens

    task.predict_step = one_token  # type: ignore[method-assign]
    steps: DataLoader[Tensor] = DataLoader(range(options["tokens"]), batch_size=None)  # type: ignore[arg-type]
    trainer.predict(task, dataloaders=steps, ckpt_path=job.checkpoint, return_predictions=False)
    if not trainer.is_global_zero:
        return {}
    written = [decode(ids) for ids in texts.ids]
    if stream is not None:
        stream.end(texts.ids[0])
    else:
        _print_texts(written)
    if (target := options["to"]) is not None:
        _write_text(Path(target), "\n\n".join(written) + "\n")
        print(f"written to {target}", file=sys.stderr)
    return {"prompt": options["prompt"], "texts": written, "metrics": {}}


def _print_texts(written: list[str]) -> None:
    shown = [harmless(text) if sys.stdout.isatty() else text for text in written]
    for number, text in enumerate(shown, start=1):
        if len(shown) > 1:
            print(f"--- {number} of {len(shown)}")
        print(text, flush=True)


class _Stream:
    """Shows a text on a terminal while it grows."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self._shown = 0

    def show(self, ids: list[int], *, all_of_it: bool = False) -> None:
        text = self.decode(ids)
        text = text if all_of_it else settled(text)
        print(harmless(text[self._shown :]), end="", flush=True)
        self._shown = max(self._shown, len(text))

    def end(self, ids: list[int]) -> None:
        self.show(ids, all_of_it=True)
        print(flush=True)


def _write_text(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(target, error) from error


def _show_start(job: Job, resolved: Resolved) -> None:
    """What is about to happen; beside the text that is to come, on the error stream."""
    config, world = resolved.config, resolved.world
    kind = {"gpu": "GPU", "cpu": "CPU"}[world.accelerator]
    rows = {
        "checkpoint": printable(job.checkpoint),
        "strategy": f"{config.strategy.name}: {resolved.dims}",
        "launch": f"{world.launch}, {world.size} {kind} process{'es' if world.size > 1 else ''} ({world.reason})",
        "precision": config.precision.kind,
        "run folder": job.run_folder,
    }
    stream = sys.stderr if job.action == "generate" else sys.stdout
    for label, value in (*rows.items(), *(("note", note) for note in job.notes)):
        print(f"{label:<11} {value}", file=stream, flush=True)


ACTIONS = {"eval": _eval, "predict": _predict, "generate": _generate}
