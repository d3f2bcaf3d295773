"""Sharded data modules inside a stock Lightning Trainer: order, ends of epochs, validation, resume and limits."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.data.sharded import ShardedDataModule
from shardwise.data.stream import epoch_permutation, first_step
from shardwise.errors import ConfigError

SEED = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # depends on the machine's cores
    pytest.mark.filterwarnings("ignore:.*Please use the new API settings to control TF32"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return int(index)


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + 13))


class Data(pl.LightningDataModule):
    num_classes = 10

    def __init__(self, size=13, num_workers=0, dataset=None):
        super().__init__()
        self.dataset = dataset or Numbers(size)
        self.num_workers = num_workers
        self.prepared = 0

    def prepare_data(self):
        self.prepared += 1

    def train_dataloader(self):
        persistent = self.num_workers > 0
        return DataLoader(self.dataset, num_workers=self.num_workers, persistent_workers=persistent)

    def val_dataloader(self):
        return DataLoader(Numbers(7))

    def test_dataloader(self):
        return {"even": DataLoader(Numbers(5)), "odd": DataLoader(Numbers(3))}

    def predict_dataloader(self):
        return [DataLoader(Numbers(6))]


class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.validated, self.tested, self.epoch_ends = [], [], [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.global_step, batch.tolist()))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.tested.append((dataloader_idx, batch.tolist()))

    def predict_step(self, batch, batch_idx):
        return batch.tolist()

    def on_train_epoch_end(self):
        self.epoch_ends.append(self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def sharded(inner=None, *, global_size=4, dp_rank=0, dp_size=1, **kwargs):
    sizes = {"global_size": global_size, "eval_batch_size": 2, "dp_rank": dp_rank, "dp_size": dp_size}
    return ShardedDataModule(inner or Data(), seed=SEED, **sizes, **kwargs)


def trainer(**kwargs):
    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return pl.Trainer(**(options | kwargs))


def stream(num_samples, global_size, *, steps, dp_rank=0, dp_size=1):
    """The batches of a rank, worked out from the permutations alone."""
    epochs = steps * global_size // num_samples + 1
    order = list(itertools.chain(*(epoch_permutation(num_samples, seed=SEED, epoch=e).tolist() for e in range(epochs))))
    share = global_size // dp_size
    starts = (k * global_size + dp_rank * share for k in range(steps))
    return [order[start : start + share] for start in starts]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stock_trainer_follows_the_stream(num_workers):
    model = Recorder()
    trainer(max_epochs=3).fit(model, datamodule=sharded(Data(13, num_workers), dp_rank=1, dp_size=2))
    ends = [first_step(epoch + 1, num_samples=13, global_size=4) for epoch in range(3)]
    assert ends == [4, 7, 10]  # epochs of 4, 3 and 3 steps
    assert model.epoch_ends == ends
    assert model.trained == stream(13, 4, steps=10, dp_rank=1, dp_size=2)
    share = [[4, 5], [6]]
    assert model.validated == [(end, batch) for end in ends for batch in share]


def test_a_dataset_smaller_than_a_global_batch():
    model = Recorder()
    fit = trainer(max_epochs=5)
    fit.fit(model, datamodule=sharded(Data(3), global_size=8))
    assert fit.global_step == 2  # ceil(5 x 3 / 8)
    assert model.trained == stream(3, 8, steps=2)


def test_reloading_the_loaders_keeps_the_place():
    model = Recorder()
    trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model, datamodule=sharded())
    assert model.trained == stream(13, 4, steps=10)


def test_max_steps_ends_in_the_middle_of_an_epoch():
    model = Recorder()
    trainer(max_steps=6, max_epochs=-1).fit(model, datamodule=sharded())
    assert model.trained == stream(13, 4, steps=6)


class SaveAt(pl.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize("stop", [2, 4, 6, 7, 9])
def test_a_resumed_run_continues_the_stream(tmp_path, stop, reload, num_workers):
    path = tmp_path / "step.ckpt"
    trainer(max_epochs=3, callbacks=[SaveAt(stop, path)]).fit(Recorder(), datamodule=sharded())
    model = Recorder()
    data = sharded(Data(13, num_workers), samples_seen=4 * stop)
    second = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=reload)
    second.fit(model, datamodule=data, ckpt_path=path, weights_only=True)
    assert model.trained == stream(13, 4, steps=10)[stop:]
    assert [end for end in model.epoch_ends if end > stop] == [end for end in (4, 7, 10) if end > stop]
    assert [step for step, _ in model.validated[::4] if step > stop] == [end for end in (4, 7, 10) if end > stop]


def test_a_data_set_of_another_length_is_not_gone_on_in(tmp_path):
    """The same position would be in another permutation, which nobody would see."""
    first = trainer(max_steps=2, max_epochs=-1)
    first.fit(Recorder(), datamodule=sharded(Data(13)))
    first.save_checkpoint(tmp_path / "last.ckpt")
    longer, model = trainer(max_steps=4, max_epochs=-1), Recorder()
    with pytest.raises(ConfigError, match=r"had 13 samples and has 14 now.*init_from=") as raised:
        longer.fit(model, datamodule=sharded(Data(14)), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert "\n" not in str(raised.value)
    assert model.trained == []
    longer.test(Recorder(), datamodule=sharded(Data(14)), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    stream = trainer(max_steps=3, max_epochs=-1)  # of unknown length: the user's to know
    stream.fit(model, datamodule=sharded(Data(dataset=Stream())), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert len(model.trained) == 1


@pytest.mark.parametrize("stop", [2, 4, 6, 7])
@pytest.mark.parametrize("dataset", [Numbers(13), Stream()])
def test_a_run_that_ended_by_its_steps_can_go_on(tmp_path, stop, dataset):
    whole, first, second = Recorder(), Recorder(), Recorder()
    trainer(max_steps=9, max_epochs=-1).fit(whole, datamodule=sharded(Data(dataset=dataset)))
    ended = trainer(max_steps=stop, max_epochs=-1)
    ended.fit(first, datamodule=sharded(Data(dataset=dataset)))
    ended.save_checkpoint(tmp_path / "last.ckpt")
    data = sharded(Data(dataset=dataset), samples_seen=4 * stop)
    going_on = trainer(max_steps=9, max_epochs=-1)
    going_on.fit(second, datamodule=data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert first.trained + second.trained == whole.trained
    assert len(whole.trained) == 9


@pytest.mark.parametrize(("limit", "steps"), [(2, 6), (0.5, 6), (4, 10), (100, 10)])
def test_a_limit_on_batches_shortens_epochs_and_skips_nothing(limit, steps):
    model = Recorder()
    trainer(max_epochs=3, limit_train_batches=limit).fit(model, datamodule=sharded())
    assert model.trained == stream(13, 4, steps=steps)
    assert [step for step, _ in model.validated[::4]] == model.epoch_ends
    assert len(model.epoch_ends) == 3


@pytest.mark.parametrize(("overfit", "steps"), [(2, 2), (0.7, 2), (50, 4)])
def test_overfitting_sees_the_same_samples_every_epoch(overfit, steps):
    model = Recorder()
    data = sharded(Data(12 if overfit == 50 else 13), global_size=3 if overfit == 50 else 4)
    trainer(max_epochs=3, overfit_batches=overfit).fit(model, datamodule=data)
    assert model.epoch_ends == [steps, 2 * steps, 3 * steps]
    first, *others = [
        sorted(itertools.chain(*model.trained[start : start + steps])) for start in range(0, 3 * steps, steps)
    ]
    assert others == [first, first]


def test_lists_and_dicts_of_evaluation_loaders():
    tested, predicted = [], []
    for dp_rank in range(2):
        model = Recorder()
        data = sharded(dp_rank=dp_rank, dp_size=2)
        trainer().test(model, datamodule=data, verbose=False)
        tested += model.tested
        predicted += itertools.chain(*trainer().predict(model, datamodule=data))
    assert tested == [(0, [0, 1]), (0, [2]), (1, [0, 1]), (0, [3]), (0, [4]), (1, [2])]
    assert predicted == list(range(6))


def test_a_stream_trains_and_reports_no_length():
    model = Recorder()
    data = sharded(Data(dataset=Stream()), dp_rank=1, dp_size=2)
    trainer(max_epochs=2).fit(model, datamodule=data)
    assert data.num_train_samples is None
    assert model.trained == [[2, 3], [6, 7], [10, 11], [102, 103], [106, 107], [110, 111]]
    assert [step for step, _ in model.validated[::2]] == [3, 6]


def test_what_the_inner_module_does_not_have_is_not_invented():
    class TrainOnly(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(8))

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch + 100

    class Moving(Recorder):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch + 1000

    model = Moving()
    with (
        pytest.warns(UserWarning, match="Skipping val loop"),
        pytest.warns(UserWarning, match="from `LightningModule`"),
    ):
        trainer(max_epochs=1).fit(model, datamodule=sharded(TrainOnly()))
    assert model.validated == []
    assert model.trained == [[i + 1100 for i in batch] for batch in stream(8, 4, steps=2)]


def test_the_rest_of_the_inner_module_shows_through():
    class Stateful(Data):
        def state_dict(self):
            return {"position": 5}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    inner = Stateful()
    data = sharded(inner)
    assert (data.num_classes, data.num_train_samples) == (10, 13)
    data.load_state_dict(data.state_dict())
    assert inner.loaded == {"position": 5}
    with pytest.raises(AttributeError, match="vocab_size"):
        _ = data.vocab_size


def test_a_split_without_a_seed_is_the_same_in_every_process_and_call():
    class Split(Data):
        def setup(self, stage):
            self.draws = [
                torch.randperm(100).tolist(),
                np.random.permutation(100).tolist(),
                random.sample(range(99), 9),
            ]

    draws = []
    for state in (1, 2, 2):
        torch.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        data = sharded(Split())
        data.setup("fit")
        draws.append(data.draws)
        untouched = torch.randperm(100, generator=torch.Generator().manual_seed(state))
        assert torch.randperm(100).equal(untouched)
    assert draws[0] == draws[1] == draws[2]


def test_data_are_prepared_once_and_by_one_at_a_time():
    running, most = [], []

    class Slow(Data):
        def prepare_data(self):
            super().prepare_data()
            running.append(self)
            most.append(len(running))
            time.sleep(0.05)
            running.remove(self)

    modules = [sharded(Slow()) for _ in range(3)]
    threads = [threading.Thread(target=module.prepare_data) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
    modules[0].prepare_data()
    assert [module.inner.prepared for module in modules] == [1, 1, 1]


@pytest.mark.parametrize(
    ("several", "named"),
    [
        (lambda loader: [loader], "list"),
        (lambda loader: {"a": loader}, "dict"),
        (lambda loader: CombinedLoader([loader]), "CombinedLoader"),
    ],
)
def test_several_training_loaders_are_refused_by_name(several, named):
    class Several(Data):
        def train_dataloader(self):
            return several(super().train_dataloader())

    with pytest.raises(ConfigError, match=rf"Several.train_dataloader returns a {named}"):
        trainer(max_epochs=1).fit(Recorder(), datamodule=sharded(Several()))
