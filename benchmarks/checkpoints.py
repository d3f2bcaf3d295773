"""What checkpoints cost: the stop for an asynchronous save, saving and loading over plain PyTorch, memory of a load.

A GPT with AdamW's moments (about 350 MB) is trained by Lightning's Trainer under our strategy, one thread a rank. In
every round the arms run one after the other, in turned order, in the same processes, on the same tensors and the same
file system; a ratio compares two arms of one round, each by its slowest rank. Files are read from the page cache.

copying        every tensor that a rank holds, into memory that is there (``copy_``), or is not (``clone``).
stopping       what the training waits for: ``SaveCheckpoints.save`` in the background, nothing else being written.
saving         ``Writer.save`` in the foreground: writing, reading back, checksums, manifest, fsync and rename; over
               ``torch.distributed.checkpoint.save`` as it comes, which writes and syncs.
loading        ``read_tensors``, over ``torch.distributed.checkpoint.load``; each its own checkpoint.
memory         what a rank has resident at most when a checkpoint of another layout has been loaded, beyond what it had
               before the model was made: over its share of parameters and moments, plus the largest single parameter.
"""

import ctypes
import gc
import os
import re
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from framework_tax import in_fresh_processes, spread
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardwise.checkpoint.manifest import step_name
from shardwise.checkpoint.model_state import model_pieces, plain_names
from shardwise.checkpoint.optimizer_state import optimizer_pieces
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.tensors import read_tensors
from shardwise.checkpoint.writer import Writer
from shardwise.launch import warm_up
from shardwise.models.gpt import GPT
from shardwise.module import LanguageModel
from shardwise.optim import build_optimizer
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.pieces import Pieces, pieces_of
from shardwise.strategies import MeshStrategy

LAYOUTS: dict[str, ParallelDims] = {
    "one": ParallelDims(),
    "fsdp": ParallelDims(dp_shard=2),
    "fsdp+tp": ParallelDims(dp_shard=2, tp=2),
}
"""Name -> degrees; all are measured, and keep a checkpoint for the loads at other layouts."""

TP = ParallelDims(tp=2)
PAIRS = (("one", "fsdp+tp"), ("fsdp+tp", "one"), ("fsdp", "tp"), ("fsdp+tp", "fsdp"))
"""Layout that saved -> layout that loads."""

VOCABULARY, CONTEXT, SAMPLES = 4096, 16, 4
SIZES: dict[str, int] = {"n_layer": 8, "n_head": 8, "width": 512, "hidden": 1408}
SMALL_TENSORS, SMALL_SIZE = 2000, 256
"""Tensors of the state that is all small ones, and numbers in each."""

QUIET = 4
"""Steps without a save before each one: the base of what a step costs beside a save."""

MEMORY_DISK = "/dev/shm"


# ---- what the arms share -------------------------------------------------------------------------------------------


def _model(**sizes: int) -> LanguageModel:
    with torch.device("meta"):
        model = GPT(VOCABULARY, context=CONTEXT, **sizes)  # type: ignore[arg-type]
    task: Any = LanguageModel(model)
    task.configure_optimizers = lambda: build_optimizer(task.named_parameters(), target=torch.optim.AdamW, lr=1e-3)
    return task


def _batches() -> DataLoader:
    tokens_BT = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return DataLoader([(tokens_BT[:, :-1], tokens_BT[:, 1:])] * 1000, batch_size=None)


def _trainer(dims: ParallelDims, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if dims.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return pl.Trainer(
        accelerator="cpu",
        devices=dims.world_size,
        strategy=MeshStrategy(**dims.shape, seed=0),
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _slowest(value: float) -> float:
    """The largest of all ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _seconds(act: Callable[[], Any]) -> float:
    """Of the slowest rank, all of which begin together."""
    _slowest(0.0)
    start = time.perf_counter()
    act()
    return _slowest(time.perf_counter() - start)


def _give_back() -> None:
    """Let the system have the memory that was freed, so that what comes next has to ask for it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _forget(folder: str) -> None:
    if _is_first():
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # what one arm has left must not be written in the time of the next
    _slowest(0.0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- saving and loading over PyTorch --------------------------------------------------------------------------------


class Throughput:
    """Saves and loads the same tensors in both ways, again and again.

    Args:
        folder: of this alone.
        tensors: as they are; for PyTorch.
        pieces: the same, for us.
    """

    def __init__(self, folder: str, tensors: Mapping[str, Tensor], pieces: Mapping[str, Pieces]) -> None:
        self.folder, self.tensors, self.pieces = folder, dict(tensors), dict(pieces)
        self.store = Store(f"{folder}/ours")
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.writer = Writer(self.store, group=group, background=False)
        self.times: dict[str, list[float]] = {}

    def round(self, number: int) -> None:
        """Every arm once."""
        arms = [self._ours, self._plain]
        for arm in arms if number % 2 else reversed(arms):
            arm(number)
        _forget(self.folder)

    def _note(self, name: str, act: Callable[[], Any]) -> None:
        self.times.setdefault(name, []).append(_seconds(act))

    def _ours(self, number: int) -> None:
        name = step_name(number)
        self._note("save", lambda: self.writer.save(name, self.pieces, {}, {"run_id": "bench"}))
        self._note("load", lambda: read_tensors(self.pieces, self.store.url_of(name), group=self.writer._group))
        self._note("verify", lambda: _is_first() and _whole(self.store, name))

    def _plain(self, number: int) -> None:
        path = f"{self.folder}/plain/{number}"
        self._note("plain save", lambda: dcp.save(self.tensors, checkpoint_id=path))
        self._note("plain load", lambda: dcp.load(self.tensors, checkpoint_id=path))

    def row(self) -> dict[str, Any]:
        """Throughput of ours over plain, and what verifying adds to a load; the first round is not counted."""
        times = {name: found[1:] for name, found in self.times.items()}
        size = _slowest(float(sum(p.nbytes for p in self.pieces.values())))
        return {
            "MB a rank": size / 1e6,
            "plain save s": statistics.median(times["plain save"]),
            "save": spread(times["plain save"], times["save"]),
            "plain load s": statistics.median(times["plain load"]),
            "load": spread(times["plain load"], times["load"]),
            "verify": spread(times["verify"], times["load"]),
        }


def _whole(store: Store, name: str) -> None:
    problems = store.problems(name)
    if problems:
        raise RuntimeError(f"{name}: {problems}")


# ---- the stop --------------------------------------------------------------------------------------------------------


class Measured(SaveCheckpoints):
    """Saves once a round and times it: with memory of its own that is new, and with what it has kept.

    Args:
        folder: of this layout.
        rounds: how many, after one that is not counted.
        throughput: name -> folder to compare saving and loading in, when training is over.
    """

    def __init__(self, folder: str, *, rounds: int, throughput: Mapping[str, str]) -> None:
        super().__init__(f"{folder}/checkpoints", at_end=False, keep_last=1)
        self.rounds = rounds
        self.throughput_folders = throughput
        self.times: dict[str, list[float]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self._quiet: list[float] = []
        self._beside: list[float] = []
        self._was_writing = False
        self._last_end: float | None = None
        self._copies: list[Tensor] = []

    def _decide(self, trainer: pl.Trainer) -> None:
        assert self._writer is not None
        now = time.perf_counter()
        writing = bool(_slowest(float(not self._writer.wait(0))))
        if self._last_end is not None and writing == self._was_writing:
            (self._beside if writing else self._quiet).append(now - self._last_end)
        if not writing and len(self._quiet) >= QUIET:
            self._next_round(trainer)
            writing = not trainer.should_stop
        self._was_writing, self._last_end = writing, time.perf_counter()

    def _next_round(self, trainer: pl.Trainer) -> None:
        if self._beside:
            self._note("step beside a save", statistics.median(self._beside))
            self._note("step", statistics.median(self._quiet))
            self._quiet, self._beside = [], []
        if len(self.times.get("step", [])) > self.rounds:
            trainer.should_stop = True
            return
        local = [_local(tensor).detach() for tensor in _tensors(trainer).values()]
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in local]
        assert self._writer is not None
        self._writer._buffers.clear()
        _give_back()
        self._note("clone", _seconds(lambda: [tensor.clone() for tensor in local]))
        _give_back()
        self._note("first stop", _seconds(lambda: self.save(trainer)))
        self.wait()
        into_copies = zip(self._copies, local, strict=True)
        self._note("copy", _seconds(lambda: [copy.copy_(tensor) for copy, tensor in into_copies]))
        self._note("stop", _seconds(lambda: self.save(trainer)))

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.wait()
        self._copies = []
        assert self._writer is not None
        self._writer._buffers.clear()
        pieces = _pieces(trainer)
        for name, folder in self.throughput_folders.items():
            compared = Throughput(folder, _tensors(trainer), pieces)
            for number in range(self.rounds + 1):
                compared.round(number)
            self.rows[name] = compared.row()

    def row(self) -> dict[str, Any]:
        """Stops over copies, and a step beside a save over one without."""
        times = {name: found[1:] for name, found in self.times.items()}
        return {
            "copy ms": 1e3 * statistics.median(times["copy"]),
            "stop": spread(times["stop"], times["copy"]),
            "clone ms": 1e3 * statistics.median(times["clone"]),
            "first stop": spread(times["first stop"], times["clone"]),
            "step ms": 1e3 * statistics.median(times["step"]),
            "step beside a save": spread(times["step beside a save"], times["step"]),
        }


def _optimizer(trainer: pl.Trainer) -> torch.optim.Optimizer:
    optimizer: Any = trainer.optimizers[0]
    return getattr(optimizer, "_optimizer", optimizer)


def _tensors(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Parameters and moments as they are, by the keys of ``_pieces``."""
    found, names = {}, plain_names(trainer.lightning_module)
    for name, parameter in names.items():
        found[f"model/{name}"] = parameter.detach()
        for key, value in _optimizer(trainer).state.get(parameter, {}).items():  # type: ignore[call-overload]
            found[f"optimizer/0/{name}/{key}"] = value
    return found


def _pieces(trainer: pl.Trainer) -> dict[str, Pieces]:
    module = trainer.lightning_module
    return {**model_pieces(names := plain_names(module)), **optimizer_pieces(names, _optimizer(trainer), 0)[0]}


def measured(layout: str, rounds: int, folder: str, throughput: dict[str, str]) -> tuple[dict, dict]:
    """(row of the stop, name -> row of saving and loading), in processes of their own."""
    callback = Measured(folder, rounds=rounds, throughput=throughput)
    _trainer(LAYOUTS[layout], callback, max_epochs=-1).fit(_model(**SIZES), _batches())
    return callback.row(), callback.rows


def small_tensors(rounds: int, throughput: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Rows of saving and loading, of a state that is all small tensors."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tensors = {f"model/{i}": torch.rand(SMALL_SIZE) for i in range(SMALL_TENSORS)}
    rows = {}
    for name, folder in throughput.items():
        compared = Throughput(folder, tensors, {key: pieces_of(tensor) for key, tensor in tensors.items()})
        for number in range(rounds + 1):
            compared.round(number)
        rows[name] = compared.row()
    return rows


# ---- memory of a load ------------------------------------------------------------------------------------------------


class Resident(pl.Callback):
    """What this rank has had resident at most since it was made, beyond what it had then."""

    def __init__(self) -> None:
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")
        self.allowed = self.growth = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.growth = _status("VmHWM") - self.before
        share = sum(_local(tensor).nbytes for tensor in _tensors(trainer).values())
        self.allowed = share + max(p.numel() * p.element_size() for p in pl_module.parameters())
        trainer.should_stop = True


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def loaded(layout: str, source: str, tiny: str) -> tuple[float, float]:
    """(ratio of the rank where it is largest, MB of share and largest parameter), in processes of their own."""
    dims = {**LAYOUTS, "tp": TP}[layout]
    for path, sizes in ((tiny, {"n_layer": 1, "n_head": 2, "width": 32, "hidden": 32}), (source, SIZES)):
        resident = Resident()  # the first time for what is imported on the way
        trainer = _trainer(dims, resident, max_epochs=-1)
        trainer.fit(_model(**sizes), _batches(), ckpt_path=path)
    return _slowest(resident.growth / resident.allowed), _slowest(resident.allowed) / 1e6


def _save_tiny(folder: str) -> None:
    saving = SaveCheckpoints(folder)
    _trainer(ParallelDims(), saving, max_steps=1).fit(_model(n_layer=1, n_head=2, width=32, hidden=32), _batches())
    saving.wait()


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(rounds: int, output_root: str, *, layouts: Iterable[str] = tuple(LAYOUTS)) -> dict[str, list[dict]]:
    """Rows about the ``stop``, the ``throughput`` and the ``memory`` of loads."""
    warm_up()
    rows: dict[str, list[dict]] = {"stop": [], "throughput": [], "memory": []}
    disks = {"disk": output_root}
    if os.path.isdir(MEMORY_DISK) and shutil.disk_usage(MEMORY_DISK).free > 2**30:
        disks["memory"] = MEMORY_DISK

    def note(kind: str, row: dict[str, Any]) -> None:
        rows[kind].append(row)
        print(kind, row, flush=True)

    def places(what: str) -> dict[str, str]:
        return {name: f"{root}/shardwise-bench-{os.getpid()}-{what}" for name, root in disks.items()}

    try:
        for layout in layouts:
            processes = LAYOUTS[layout].world_size
            stop, found = in_fresh_processes(
                measured, layout, rounds, f"{output_root}/{layout}", places(layout), processes=processes, run_id=layout
            )
            note("stop", {"layout": layout, "processes": processes, **stop})
            for disk, row in found.items():
                note("throughput", {"state": layout, "processes": processes, "disk": disk, **row})
        found = in_fresh_processes(small_tensors, rounds, places("small"), processes=1, run_id="small")
        for disk, row in found.items():
            state = f"{SMALL_TENSORS} tensors of {SMALL_SIZE * 4} bytes"
            note("throughput", {"state": state, "processes": 1, "disk": disk, **row})
    finally:
        for what in (*layouts, "small"):
            for folder in places(what).values():
                shutil.rmtree(folder, ignore_errors=True)
    in_fresh_processes(_save_tiny, f"{output_root}/tiny", processes=1, run_id="tiny")
    tiny = Store(f"{output_root}/tiny")
    for saved, layout in PAIRS:
        store = Store(f"{output_root}/{saved}/checkpoints")
        if saved not in layouts:
            continue
        processes = {**LAYOUTS, "tp": TP}[layout].world_size
        source, small = (one.url_of(str(one.last())) for one in (store, tiny))
        ratios = []
        for number in range(min(rounds, 3)):
            arguments = (layout, source, small)
            ratio, size = in_fresh_processes(loaded, *arguments, processes=processes, run_id=f"{layout}-{number}")
            ratios.append(ratio)
        ratio = (min(ratios), statistics.median(ratios), max(ratios))
        note("memory", {"saved": saved, "loaded": layout, "processes": processes, "MB": size, "ratio": ratio})
    return rows
