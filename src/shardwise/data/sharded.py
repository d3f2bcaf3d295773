"""Any data module, sharded: the one place where data meet the data-parallel rank and size."""

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, Subset

from shardwise.data.order import epoch_permutation, step_after
from shardwise.data.seeded import seeded
from shardwise.data.stream import how_samples_are_made, shard_eval_loader, shard_train_loader
from shardwise.errors import ConfigError
from shardwise.seeds import stable_seed

_EVAL_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def preparation_lock(datamodule: LightningDataModule) -> FileLock:
    """The lock under which `datamodule` downloads: one per user, kind of data and `path`, in the temporary folder."""
    kind = type(datamodule)
    target = f"{kind.__module__}.{kind.__qualname__}:{getattr(datamodule, 'path', None)}"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    name = f"shardwise-{user}-{hashlib.sha256(target.encode()).hexdigest()[:16]}.lock"
    return FileLock(Path(tempfile.gettempdir()) / name)


class ShardedDataModule(LightningDataModule):
    """`inner`'s data as this rank's share of the stream of samples.

    Loaders are rebuilt; every other hook and attribute is `inner`'s. What `inner` does not define is not defined here
    either, so that Lightning takes the hooks of the LightningModule, or skips the validation, as it would without.

    Args:
        inner: knows nothing of ranks; its train_dataloader is a single DataLoader, the others may be lists or dicts.
        seed: decides the order of samples and the random augmentation.
        global_size: B, samples per step over all data-parallel ranks.
        eval_batch_size: samples per rank and batch in validation, test and prediction.
        dp_rank: this process's place among the data-parallel ranks.
        dp_size: the data-parallel size.
        samples_seen: the position in the stream at the start of fit, a multiple of B. Also an attribute, which a
            resumed run sets before Lightning asks for the training loader.
    """

    def __init__(
        self,
        inner: LightningDataModule,
        *,
        seed: int,
        global_size: int,
        eval_batch_size: int,
        dp_rank: int,
        dp_size: int,
        samples_seen: int = 0,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.seed = seed
        self.global_size = global_size
        self.eval_batch_size = eval_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.samples_seen = samples_seen
        self.prepare_data_per_node = inner.prepare_data_per_node
        self._prepared = False
        self._start: tuple[Any, int] | None = None
        self._num_train_samples: int | None = None
        # On the instance, because Lightning asks whether a hook is overridden before it calls it.
        for name in _TRANSFER_HOOKS:
            if is_overridden(name, inner):
                setattr(self, name, getattr(inner, name))
        for name in _EVAL_LOADERS:
            if is_overridden(name, inner):
                setattr(self, name, self._eval_hook(name))

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def num_train_samples(self) -> int | None:
        """Samples in the training set, None for a stream. Needs `setup("fit")`."""
        if self._num_train_samples is None:
            dataset: Any = self._inner_train_loader().dataset
            self._num_train_samples = None if isinstance(dataset, IterableDataset) else len(dataset)
        return self._num_train_samples

    def prepare_data(self) -> None:
        """Prepare `inner` once, while no other process on this host prepares the same data."""
        if self._prepared:
            return
        self.inner.trainer = self.trainer
        with preparation_lock(self.inner):
            self.inner.prepare_data()
        self._prepared = True

    def setup(self, stage: str) -> None:
        self.inner.trainer = self.trainer
        # A split that is drawn without a seed of its own has to be the same on every rank, in every call and every run.
        with seeded(stable_seed("setup")):
            self.inner.setup(stage)
        if stage == "fit":  # what is saved after an evaluation is of the training set too
            self._num_train_samples = None

    def teardown(self, stage: str) -> None:
        self.inner.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        self.inner.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, which means the same for every data-parallel size, and ``inner``'s own state."""
        return {
            "samples_seen": self.position,
            "global_size": self.global_size,
            "num_train_samples": self._num_train_samples,
            "inner": self.inner.state_dict(),
        }

    @property
    def position(self) -> int:
        """Samples seen up to now, in this fit and before it."""
        trainer: Any = self.trainer
        return self.samples_seen if trainer is None else self._position(trainer)()

    def check_same_data(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to go on in another data set than the one of ``state_dict``; needs ``setup("fit")``.

        The order of samples is drawn for their number, so a position means other samples in a set of another length.

        Raises:
            ConfigError: the training set is of another length now.
        """
        then, now = state_dict.get("num_train_samples"), self.num_train_samples
        if then is not None and now is not None and then != now:
            raise ConfigError(
                f"the training set had {then} samples and has {now} now, where the position means other ones: give the"
                f" data of then, or start a new run with new data, without resume= and with init_from=<checkpoint>"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the samples that were seen; an evaluation has no use for that.

        Raises:
            ConfigError: that is not at a border of global batches of the present size, or the training set is of
                another length.
        """
        if self.trainer is None or self.trainer.state.fn == "fit":
            self.check_same_data(state_dict)
            step_after(state_dict["samples_seen"], global_size=self.global_size)
            self.samples_seen = state_dict["samples_seen"]
            self._start = None
        self.inner.load_state_dict(state_dict["inner"])

    def train_dataloader(self) -> DataLoader:
        loader = self._inner_train_loader()
        epoch_steps = None
        trainer: Any = self.trainer  # Lightning sets some of its attributes where a type checker does not look
        if trainer is not None and trainer.overfit_batches:
            loader = self._overfit_loader(loader, trainer)
        elif trainer is not None:
            epoch_steps = self._epoch_steps(trainer)
        return shard_train_loader(
            loader,
            seed=self.seed,
            global_size=self.global_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            samples_seen=self.samples_seen if trainer is None else self._position(trainer),
            epoch_steps=epoch_steps,
        )

    def _inner_train_loader(self) -> DataLoader:
        loader = self.inner.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"{type(self.inner).__name__}.train_dataloader returns a {type(loader).__name__}: return one torch"
                " DataLoader (join datasets with torch.utils.data.ConcatDataset)"
            )
        return loader

    def _position(self, trainer: Any) -> Callable[[], int]:
        """The samples seen, counted by the batches that were trained on since fit first asked for a loader."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        if self._start is None or self._start[0] is not progress:
            self._start = (progress, progress.ready)
        first = self._start[1]
        return lambda: self.samples_seen + (progress.ready - first) * self.global_size

    def _epoch_steps(self, trainer: Any) -> int | None:
        """Turn `limit_train_batches` into the length of an epoch, so that a limit skips no samples of the stream.

        The loader has no length: Lightning refuses a fraction of it, and with a limit above the epoch's length it never
        recognises the last batch, after which it validates. So the trainer is given a whole number, or no limit.
        """
        limit, num_samples = trainer.limit_train_batches, self.num_train_samples
        if not limit or (isinstance(limit, float) and limit == 1.0):
            return None
        if num_samples is not None:
            longest = math.ceil(num_samples / self.global_size)
            if isinstance(limit, float):
                limit = trainer.limit_train_batches = max(1, int(limit * longest))
            if limit >= longest:
                trainer.limit_train_batches = 1.0
                return None
        return int(limit) if isinstance(limit, int) else None

    def _overfit_loader(self, loader: DataLoader, trainer: Any) -> DataLoader:
        """A loader over the samples of the first `overfit_batches` global batches, which are then every epoch."""
        num_batches, num_samples = trainer.overfit_batches, self.num_train_samples
        if num_samples is None:
            raise ConfigError(
                f"trainer.overfit_batches={num_batches} needs a map-style dataset, and"
                f" {type(loader.dataset).__name__} is a stream: give a dataset, or set it to 0"
            )
        if isinstance(num_batches, float):
            num_batches = max(1, int(num_batches * num_samples / self.global_size))
        trainer.limit_train_batches = 1.0  # the subset is the limit
        order = epoch_permutation(num_samples, seed=self.seed, epoch=0)
        subset = Subset(loader.dataset, order[: num_batches * self.global_size].tolist())
        return DataLoader(subset, **how_samples_are_made(loader))

    def _eval_hook(self, name: str) -> Callable[[], Any]:
        def dataloader() -> Any:
            return self._shard_eval(getattr(self.inner, name)(), name=name)

        return dataloader

    def _shard_eval(self, loaders: Any, *, name: str) -> Any:
        if isinstance(loaders, list | tuple):
            return [self._shard_eval(loader, name=name) for loader in loaders]
        if isinstance(loaders, dict):
            return {key: self._shard_eval(loader, name=name) for key, loader in loaders.items()}
        if isinstance(loaders, CombinedLoader):
            raise ConfigError(
                f"{type(self.inner).__name__}.{name} returns a CombinedLoader: return a list or dict of DataLoaders,"
                " which are evaluated one after the other"
            )
        return shard_eval_loader(
            loaders, batch_size=self.eval_batch_size, dp_rank=self.dp_rank, dp_size=self.dp_size, seed=self.seed
        )
