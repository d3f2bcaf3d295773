"""The order of samples: the same under every layout, complete, seekable, and exact in evaluation."""

import itertools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from shardwise.data.stream import (
    EvalBatchSampler,
    SampleKey,
    SeededDataset,
    StreamBatchSampler,
    epoch_permutation,
    first_step,
    is_sharded,
    shard_eval_loader,
    shard_train_loader,
)
from shardwise.errors import ConfigError

SIZES = [(7, 2), (10, 4), (12, 12), (13, 4), (5, 8), (3, 16), (100, 12)]  # samples, global batch


class Numbers(Dataset):
    """Sample i is i, plus noise from three generators if `noisy`."""

    def __init__(self, size, noisy=False):
        self.size, self.noisy = size, noisy

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = (torch.rand(1).item(), np.random.rand(), random.random()) if self.noisy else (0.0, 0.0, 0.0)
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, size, split_by_worker=False):
        self.size, self.split_by_worker, self.epoch = size, split_by_worker, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info() if self.split_by_worker else None
        step, start = (info.num_workers, info.id) if info else (1, 0)
        return iter(range(1000 * self.epoch + start, 1000 * self.epoch + self.size, step))


def shares(num_samples, global_size, dp_size, *, epochs, seed=3):
    """Every rank's batches, as lists of (epoch, index), over `epochs` epochs."""
    result = []
    for dp_rank in range(dp_size):
        sampler = StreamBatchSampler(num_samples, global_size=global_size, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
        batches = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            epoch_batches = [[(key.epoch, int(key)) for key in batch] for batch in sampler]
            assert len(epoch_batches) == sampler.steps_in_epoch(epoch)
            batches += epoch_batches
        result.append(batches)
    return result


def values(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(("num_samples", "global_size"), SIZES)
def test_shares_of_all_ranks_put_together_are_the_stream(num_samples, global_size):
    epochs = 5
    stream = [(e, i) for e in range(40) for i in epoch_permutation(num_samples, seed=3, epoch=e).tolist()]
    steps = first_step(epochs, num_samples=num_samples, global_size=global_size)
    expected = [stream[k * global_size : (k + 1) * global_size] for k in range(steps)]
    assert steps * global_size >= epochs * num_samples > (steps - 1) * global_size
    for dp_size in (d for d in (1, 2, 3, 4, 8) if global_size % d == 0):
        ranks = shares(num_samples, global_size, dp_size, epochs=epochs)
        assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == expected


def test_an_epoch_has_every_sample_once_and_epochs_and_seeds_differ():
    (batches,) = shares(13, 4, 1, epochs=8)
    seen = Counter(itertools.chain(*batches))
    assert set(seen.values()) == {1}
    for epoch in range(8):
        assert {i for e, i in seen if e == epoch} == set(range(13))
    assert epoch_permutation(50, seed=0, epoch=0).tolist() != epoch_permutation(50, seed=0, epoch=1).tolist()
    assert epoch_permutation(50, seed=0, epoch=0).tolist() != epoch_permutation(50, seed=1, epoch=0).tolist()


@pytest.mark.parametrize(("num_samples", "global_size"), SIZES)
def test_seek_continues_where_the_stream_was_left(num_samples, global_size):
    (expected,) = shares(num_samples, global_size, 1, epochs=5)
    for step in range(len(expected)):
        sampler = StreamBatchSampler(num_samples, global_size=global_size, dp_rank=0, dp_size=1, seed=3)
        sampler.seek(step * global_size)
        rest = []
        # the epoch that a trainer's counter shows in the middle of an epoch, or after the last one ended
        epoch = step * global_size // num_samples
        if step:
            epoch = min(epoch, (step - 1) * global_size // num_samples + 1)
        for e in range(epoch, 5):
            if e > epoch:
                sampler.set_epoch(e)
            running = iter(sampler)
            sampler.set_epoch(e)  # Lightning makes the iterator first and names the epoch afterwards
            rest += [[(key.epoch, int(key)) for key in batch] for batch in running]
        assert rest == expected[step:]


def test_seek_refuses_a_place_inside_a_global_batch():
    sampler = StreamBatchSampler(10, global_size=4, dp_rank=0, dp_size=1, seed=0)
    with pytest.raises(ConfigError, match=r"6 samples.*global_size=4"):
        sampler.seek(6)


def test_a_limit_on_steps_cuts_the_same_stream_into_shorter_epochs():
    whole = list(itertools.chain(*shares(13, 4, 1, epochs=3)))
    sampler = StreamBatchSampler(13, global_size=4, dp_rank=0, dp_size=1, seed=3, epoch_steps=2)
    cut = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        cut.append([[(key.epoch, int(key)) for key in batch] for batch in sampler])
    assert [len(batches) for batches in cut] == [2, 2, 2, 2]
    assert list(itertools.chain(*cut)) == whole[:8]


def test_sample_keys_index_anything_and_survive_pickling():
    key = pickle.loads(pickle.dumps(SampleKey(3, 7)))
    assert (key, key.epoch, [10, 11, 12, 13][key], torch.arange(5)[key].item()) == (3, 7, 13, 3)


def test_the_stream_has_no_length():
    loader = shard_train_loader(DataLoader(Numbers(10)), seed=0, global_size=4, dp_rank=0, dp_size=2)
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 8, 9, 64, 65])
def test_evaluation_sees_every_sample_once_in_equally_many_batches(num_samples):
    for dp_size, batch_size in itertools.product(range(1, min(num_samples, 8) + 1), (1, 2, 3, 100)):
        samplers = [
            EvalBatchSampler(num_samples, batch_size=batch_size, dp_rank=r, dp_size=dp_size) for r in range(dp_size)
        ]
        ranks = [list(sampler) for sampler in samplers]
        assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(num_samples))
        assert {len(batches) for batches in ranks} == {len(samplers[0])}
        sizes = [len(batch) for batches in ranks for batch in batches]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size + 1


def test_seven_samples_on_two_ranks():
    loaders = [
        shard_eval_loader(DataLoader(Numbers(7), batch_size=3), batch_size=2, dp_rank=r, dp_size=2) for r in (0, 1)
    ]
    assert [[[int(row[0]) for row in batch] for batch in loader] for loader in loaders] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6]],
    ]


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"3 samples.*4 data-parallel ranks"):
        EvalBatchSampler(3, batch_size=2, dp_rank=0, dp_size=4)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    with pytest.raises(ConfigError, match=r"global_size=10 .*size 4: use 8 or 12"):
        shard_train_loader(DataLoader(Numbers(10)), seed=0, global_size=10, dp_rank=0, dp_size=4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_does_not_depend_on_ranks_and_workers(num_workers):
    def global_batches(dp_size, num_workers):
        ranks = []
        for dp_rank in range(dp_size):
            plain = DataLoader(Numbers(10, noisy=True), num_workers=num_workers)
            loader = shard_train_loader(plain, seed=1, global_size=4, dp_rank=dp_rank, dp_size=dp_size)
            epochs = []
            for epoch in range(2):
                loader.batch_sampler.set_epoch(epoch)
                epochs += list(loader)
            ranks.append(epochs)
        return [torch.cat(parts) for parts in zip(*ranks, strict=True)]

    expected = torch.cat(global_batches(1, 0))
    for dp_size in (1, 2, 4) if num_workers == 0 else (2,):
        assert torch.equal(torch.cat(global_batches(dp_size, num_workers)), expected)
    # noise is new for every sample and every epoch
    assert expected[:, 1].unique().numel() == expected[:, 2].unique().numel() == len(expected)


def test_loading_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    np_state, py_state = np.random.get_state()[1].tolist(), random.getstate()
    for loader in (
        shard_train_loader(DataLoader(Numbers(6, noisy=True)), seed=0, global_size=2, dp_rank=0, dp_size=1),
        shard_eval_loader(DataLoader(Numbers(6, noisy=True)), batch_size=2, dp_rank=0, dp_size=1),
    ):
        assert len(list(loader)) == 3
    assert torch.equal(torch.rand(1), expected)
    assert np.random.get_state()[1].tolist() == np_state
    assert random.getstate() == py_state


def test_evaluation_repeats_the_draws_of_epoch_0():
    loader = shard_eval_loader(DataLoader(Numbers(6, noisy=True)), batch_size=4, dp_rank=0, dp_size=1)
    assert values(loader) == values(loader)


def test_deterministic_datasets_hand_over_whole_batches():
    class Rows(Numbers):
        deterministic = True

        def __getitems__(self, keys):
            return [("batch", len(keys))]

    for dataset in (Rows(6), Subset(Rows(6), range(6))):
        seeded = SeededDataset(dataset, seed=0)
        assert seeded.__getitems__([SampleKey(1), SampleKey(2)]) == [("batch", 2)]
    plain = DataLoader(Rows(6), collate_fn=lambda batch: batch)
    assert next(iter(shard_train_loader(plain, seed=0, global_size=4, dp_rank=0, dp_size=2))) == [("batch", 2)]
    # one that is not deterministic has to be seeded sample by sample
    assert SeededDataset(Subset(Numbers(6), range(6)), seed=0).__getitems__ is None


def test_rebuilt_loaders_keep_how_samples_are_made():
    def init(worker_id):
        pass

    plain = DataLoader(
        Numbers(8), collate_fn=torch.stack, num_workers=1, worker_init_fn=init, persistent_workers=True,
        prefetch_factor=3, timeout=60, multiprocessing_context="forkserver",
    )  # fmt: skip
    for loader in (
        shard_train_loader(plain, seed=0, global_size=4, dp_rank=0, dp_size=2),
        shard_eval_loader(plain, batch_size=2, dp_rank=0, dp_size=2),
    ):
        assert is_sharded(loader)
        assert not is_sharded(plain)
        kept = ("collate_fn", "num_workers", "worker_init_fn", "persistent_workers", "prefetch_factor", "timeout")
        for name in kept:
            assert getattr(loader, name) == getattr(plain, name)
        assert loader.multiprocessing_context.get_start_method() == "forkserver"


@pytest.mark.parametrize(("dp_size", "num_workers"), [(1, 0), (2, 0), (4, 0), (2, 2), (1, 2)])
@pytest.mark.parametrize("split_by_worker", [False, True])
def test_streams_are_shared_out_in_order(dp_size, num_workers, split_by_worker):
    ranks = []
    for dp_rank in range(dp_size):
        plain = DataLoader(Stream(23, split_by_worker), batch_size=2, num_workers=num_workers)
        loader = shard_train_loader(plain, seed=0, global_size=4, dp_rank=dp_rank, dp_size=dp_size)
        ranks.append(values(loader))
    whole = [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert whole == [list(range(k * 4, k * 4 + 4)) for k in range(5)]  # the last 3 items are dropped on all ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("epoch_steps", [None, 3])
def test_streams_continue_in_the_middle_and_know_their_epoch(num_workers, epoch_steps):
    # passes of 3 global batches: after 4 of them the stream stands at the second batch of its second pass
    seen = 16
    plain = DataLoader(Stream(19 if epoch_steps else 13), num_workers=num_workers, persistent_workers=num_workers > 0)
    loader = shard_train_loader(
        plain, seed=0, global_size=4, dp_rank=1, dp_size=2, samples_seen=lambda: seen, epoch_steps=epoch_steps
    )
    running = iter(loader)
    loader.sampler.set_epoch(9)  # what the caller calls it does not matter
    assert values(running) == [[1006, 1007], [1010, 1011]]
    seen += 8
    loader.sampler.set_epoch(10)
    assert values(loader) == [[2002, 2003], [2006, 2007], [2010, 2011]]
    seen += 4  # training was cut off after one batch
    loader.sampler.set_epoch(11)
    assert values(loader) == [[2006, 2007], [2010, 2011]]


def test_streams_are_not_read_again_from_the_first_pass():
    class Counting(Stream):
        read = 0

        def __iter__(self):
            for item in super().__iter__():
                self.read += 1
                yield item

    seen, dataset = 0, Counting(8)
    loader = shard_train_loader(
        DataLoader(dataset), seed=0, global_size=4, dp_rank=0, dp_size=1, samples_seen=lambda: seen
    )
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        seen += 4 * len(list(loader))
    assert (seen, dataset.read) == (40, 40)


def test_streams_without_a_position_go_by_the_epoch():
    loader = shard_train_loader(DataLoader(Stream(9)), seed=0, global_size=4, dp_rank=0, dp_size=1)
    loader.sampler.set_epoch(3)
    assert values(loader) == [[3000, 3001, 3002, 3003], [3004, 3005, 3006, 3007]]


def test_streams_that_shard_themselves_are_used_as_they_are():
    dataset = Stream(9)
    dataset.shards_itself = True
    loader = shard_train_loader(DataLoader(dataset), seed=0, global_size=4, dp_rank=1, dp_size=2)
    assert values(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ConfigError, match=r"Stream shards itself.*sample 8.*seek"):
        shard_train_loader(DataLoader(dataset), seed=0, global_size=4, dp_rank=1, dp_size=2, samples_seen=8)


def test_streams_are_evaluated_on_one_rank_only():
    assert values(shard_eval_loader(DataLoader(Stream(5)), batch_size=2, dp_rank=0, dp_size=1)) == [[0, 1], [2, 3], [4]]
    with pytest.raises(ConfigError, match=r"Stream is a stream.*2 data-parallel ranks: give a map-style dataset"):
        shard_eval_loader(DataLoader(Stream(5)), batch_size=2, dp_rank=0, dp_size=2)


class Backwards(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Numbers(4), sampler=WeightedRandomSampler([1.0] * 4, 4)), "WeightedRandomSampler"),
        (DataLoader(Numbers(4), batch_sampler=[[0, 1], [3, 2]]), "batch sampler list"),
        (
            DataLoader(Numbers(4), sampler=torch.utils.data.RandomSampler(Numbers(4), replacement=True)),
            "RandomSampler with replacement",
        ),
        (Backwards(Numbers(4)), "Backwards"),
        (DataLoader(Numbers(4), batch_size=None), "batch_size=None"),
        ([1, 2], "list"),
    ],
)
def test_loaders_with_an_order_of_their_own_are_refused(loader, named):
    with pytest.raises(ConfigError, match=named):
        shard_train_loader(loader, seed=0, global_size=2, dp_rank=0, dp_size=1)
    with pytest.raises(ConfigError, match=named):
        shard_eval_loader(loader, batch_size=2, dp_rank=0, dp_size=1)


def test_an_empty_training_set_is_refused():
    with pytest.raises(ConfigError, match="0 samples"):
        shard_train_loader(DataLoader(TensorDataset(torch.empty(0))), seed=0, global_size=2, dp_rank=0, dp_size=1)
