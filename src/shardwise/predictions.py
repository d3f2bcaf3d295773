"""What ``predict_step`` returns, of every sample in the order of the data set, into one ``.npz`` file.

Each batch is gathered on the first rank and written at once to temporary files beside the target, which are joined at
the end: the first rank holds one batch of every data-parallel rank, however many samples there are, and the disk for a
moment twice the file.
"""

import contextlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.strategies import MeshStrategy


def named_arrays(outputs: Any) -> dict[str, NDArray[Any]]:
    """What ``predict_step`` returned for a batch as arrays, samples in their first dim; a collective for DTensors.

    A tensor is called ``prediction``, those of a tuple ``output_0``, ``output_1``; a mapping names its own.

    Raises:
        ConfigError: it is something else, or the tensors differ in their numbers of samples.
    """
    if isinstance(outputs, Tensor):
        outputs = {"prediction": outputs}
    elif isinstance(outputs, tuple | list):
        outputs = {f"output_{i}": tensor for i, tensor in enumerate(outputs)}
    if not isinstance(outputs, Mapping) or not outputs or not all(isinstance(v, Tensor) for v in outputs.values()):
        raise ConfigError(
            f"predict_step returned a {type(outputs).__name__}: a tensor, or a tuple or mapping of tensors, with "
            f"samples in their first dim, can be written"
        )
    sizes = {str(name): tensor.shape[0] if tensor.dim() else None for name, tensor in outputs.items()}
    if None in sizes.values() or len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in outputs.items())
        raise ConfigError(f"predict_step returned {shown}: each tensor needs the samples of the batch in its first dim")
    return {str(name): _array(tensor) for name, tensor in outputs.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    tensor = tensor.detach().cpu()
    return np.ascontiguousarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


class CollectPredictions(Callback):
    """Writes all predictions to ``target`` (on the first rank), which is there when ``finish`` returns, or not at all.

    Ranks that split layers have the same predictions, and the first of them counts. A context manager: leaving it
    removes what is temporary.

    Args:
        target: an ``.npz`` file; one that exists is replaced.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of each array that was written."""
        self._folder: Path | None = None
        self._files: dict[tuple[str, int], IO[bytes]] = {}
        self._kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}

    def __enter__(self) -> "CollectPredictions":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        arrays = named_arrays(outputs)
        if trainer.predict_loop.num_dataloaders > 1:
            arrays = {f"loader_{dataloader_idx}/{name}": array for name, array in arrays.items()}
        if strategy.dims.tp_rank(trainer.global_rank):
            return
        parts = [arrays]
        if strategy.dp_group is not None:
            gathered: list[Any] | None = [None] * strategy.dp_size if trainer.is_global_zero else None
            dist.gather_object(arrays, gathered, dst=0, group=strategy.dp_group)
            parts = gathered or []
        if trainer.is_global_zero:
            with _told(self.target):
                for dp_rank, part in enumerate(parts):
                    for name, array in part.items():
                        self._append(name, dp_rank, array)

    def _append(self, name: str, dp_rank: int, array: NDArray[Any]) -> None:
        kind = self._kinds.setdefault(name, (array.dtype, array.shape[1:]))
        if kind != (array.dtype, array.shape[1:]):
            raise ConfigError(
                f"predict_step returned {name} as {array.dtype} with samples of {array.shape[1:]}, and before as "
                f"{kind[0]} of {kind[1]}: the same kind is needed of every batch"
            )
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        if (name, dp_rank) not in self._files:
            self._files[name, dp_rank] = (self._folder / str(len(self._files))).open("w+b")
        self._files[name, dp_rank].write(array.data)

    def finish(self) -> None:
        """Join what was collected, one data-parallel rank's share of the samples after the other's; on the first rank.

        Raises:
            ConfigError: nothing was predicted, or the target cannot be written.
        """
        if self._folder is None:
            raise ConfigError("there is nothing to predict: the data have no sample")
        partial = self._folder / "joined"
        with _told(self.target):
            with zipfile.ZipFile(partial, "w") as archive:
                for name, (dtype, shape) in self._kinds.items():
                    files = [self._files[key] for key in sorted(key for key in self._files if key[0] == name)]
                    row = max(1, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
                    self.shapes[name] = (sum(file.tell() for file in files) // row, *shape)
                    header = {
                        "descr": np.lib.format.dtype_to_descr(dtype),
                        "fortran_order": False,
                        "shape": self.shapes[name],
                    }
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array_header_1_0(member, header)
                        for file in files:
                            file.seek(0)
                            shutil.copyfileobj(file, member)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, self.target)


@contextlib.contextmanager
def _told(target: Path) -> Any:
    """What a full disk does to the target, in one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{target} cannot be written ({why}): type --to <another file>") from error
