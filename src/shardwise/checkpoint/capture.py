"""What a run is at the end of a step: its tensors, and everything else in plain values; and putting it back.

Tensors are kept under the names of the plain model, as pieces of wholes, so that any layout can read them. What belongs
to a rank (its random state, metrics that are being added up) is kept under the rank's number.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import Trainer
from pytorch_lightning.trainer import call
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.model_state import PREFIX, check_stored_model, model_pieces, plain_names, plain_ties
from shardwise.checkpoint.optimizer_state import check_optimizer, optimizer_pieces
from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.rank_state import batch_statistics, between_epochs, metric_states, random_state
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.tensors import read_below
from shardwise.data.order import step_after
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces, pieces_of


def check_resumable(module: nn.Module, url: str, *, optimizer: str | None, global_size: int) -> None:
    """Whether a run can go on from a checkpoint; reads only.

    Args:
        module: not laid out yet; on any device.
        url: of the checkpoint.
        optimizer: kind of the optimizer that is to go on; None if only the module knows.
        global_size: samples of a step.

    Raises:
        ConfigError: another model, another optimizer, or a position in the data that is no step's border.
    """
    state = read_state(url)
    check_stored_model(module, StoredTensors(url), strict=getattr(module, "strict_loading", True))
    if state.get("samples_seen") is not None:
        step_after(state["samples_seen"], global_size=global_size)
    if optimizer is not None:
        for saved in state["trainer"]["optimizers"]:
            check_optimizer(saved, optimizer, where=url)


def capture(trainer: Trainer, *, constructed: list[list[dict[str, Any]]]) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """The state of a run: what this rank holds of its tensors, and the rest in plain values (the first rank's count).

    Args:
        trainer: between two steps, with everything that belongs to the last one done.
        constructed: ``group_values`` of each optimizer when it was made.

    Raises:
        ConfigError: a module, data module or callback keeps something that is neither plain nor a tensor.
    """
    module, rank = trainer.lightning_module, trainer.global_rank
    names = plain_names(module)
    keys = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    # Of a buffer that differs between ranks the first rank's counts; each has its own batch statistics besides.
    pieces = model_pieces({k: t for k, t in names.items() if rank == 0 or isinstance(t, nn.Parameter | DTensor)})
    pieces |= {f"buffers/{rank}/{name}": pieces_of(own) for name, own in batch_statistics(module).items()}
    plain: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": _loop_state(trainer)},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    optimizers = []
    for index, optimizer in enumerate(trainer.optimizers):
        own, values = optimizer_pieces(names, getattr(optimizer, "_optimizer", optimizer), index)
        pieces |= own
        optimizers.append({**values, "constructed": constructed[index]})
    pieces |= {f"random/{rank}/{name}": pieces_of(own) for name, own in random_state().items()}
    pieces |= {f"metrics/{rank}/{name}": pieces_of(own) for name, own in metric_states(trainer).items()}
    # The hooks may say of themselves what they want to keep, in the dictionary that Lightning would save.
    whole = {f"{'' if name in keys else PREFIX}{name}": tensor for name, tensor in names.items()}
    hooks: dict[str, Any] = {"state_dict": dict(whole), **plain, "callbacks": call._call_callbacks_state_dict(trainer)}
    hooks["callback_metrics"] = dict(trainer.callback_metrics)
    hooks["extra_states"] = {
        path: inner.get_extra_state()
        for path, inner in module.named_modules()
        if type(inner).get_extra_state is not nn.Module.get_extra_state
    }
    plugin: Any = trainer.precision_plugin
    if state := plugin.state_dict():
        hooks[type(plugin).__qualname__] = state
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is not None and (state := call._call_lightning_datamodule_hook(trainer, "state_dict")):
        hooks[type(datamodule).__qualname__] = state
    call._call_callbacks_on_save_checkpoint(trainer, hooks)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", hooks)
    left = hooks.pop("state_dict")
    if (name := next((name for name, tensor in left.items() if tensor is not whole.get(name)), None)) is not None:
        raise ConfigError(
            f"a callback or on_save_checkpoint has put {name} into the checkpoint's state_dict, which all ranks write "
            f"in parts: keep it under a key of its own (weight averaging: a copy of the model as a submodule)"
        )
    for name in set(whole) - set(left):  # left out on purpose, such as a frozen part
        pieces.pop(f"model/{name if name in names else name.removeprefix(PREFIX)}", None)
    extra: dict[str, Tensor] = {}
    state = {
        "lightning": to_plain(hooks, extra, at="extra"),
        "tied": plain_ties(module, names),
        "optimizers": to_plain(optimizers, extra, at="extra/optimizers"),
    }
    # What a hook keeps may differ between ranks: that of the first counts, as in Lightning.
    pieces |= {key: pieces_of(tensor) for key, tensor in extra.items() if rank == 0}
    return pieces, state


def _loop_state(trainer: Trainer) -> dict[str, Any]:
    """Lightning's counters; between two epochs, as they are when the next one begins."""
    state = trainer.fit_loop.state_dict()
    if between_epochs(trainer):
        state["epoch_loop.batch_progress"]["is_last_batch"] = False
        state["epoch_loop.val_loop.batch_progress"]["total"] = dict.fromkeys(
            state["epoch_loop.val_loop.batch_progress"]["total"], 0
        )
        for name in ("batch_progress", "scheduler_progress"):
            current = state[f"epoch_loop.{name}"]["current"]
            state[f"epoch_loop.{name}"]["current"] = dict.fromkeys(current, 0)
        steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for kind in ("step", "zero_grad"):
            steps[kind]["current"] = dict.fromkeys(steps[kind]["current"], 0)
    return state


def lightning_checkpoint(state: Mapping[str, Any], stored: StoredTensors) -> dict[str, Any]:
    """What Lightning takes for a loaded checkpoint: all but the model and the optimizers, which are read in parts.

    Args:
        state: the plain part, as ``capture`` gave it.
        stored: the checkpoint.

    Raises:
        ConfigError: ``state`` is damaged.
    """
    tensors = read_below("extra/", stored)
    try:
        checkpoint = from_plain(state["lightning"], tensors.__getitem__)
        optimizers = from_plain(state["optimizers"], tensors.__getitem__)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{stored.url}/state.json is damaged: {error!r}") from error
    return {**checkpoint, "state_dict": {}, "optimizer_states": optimizers}


def continue_epoch(trainer: Trainer) -> None:
    """Let Lightning's epoch loop go on where the counters are, and nothing else.

    It tells from them what a checkpoint was saved in the middle of, and repeats validations and steps of the schedule
    by that; a checkpoint here is of a step that is done with all that belongs to it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def reset_and_go_on() -> None:
        with warnings.catch_warnings():
            if hasattr(getattr(trainer, "datamodule", None), "samples_seen"):  # its stream goes on where it was
                warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epo")
            reset()
        loop.reset = reset
        trainer.fit_loop._restarting = False  # its property would make True of that
        loop.restarting = False  # and of all loops in it
        loop.reset_restart_stage()

    loop.reset = reset_and_go_on
