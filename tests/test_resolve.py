"""The rules that cross the groups: sizes, learning rate, degrees, steps, and where the ranks come from."""

import dataclasses
import itertools
from fractions import Fraction

import pytest

from shardwise.config import Config, from_plain
from shardwise.errors import ConfigError
from shardwise.resolve import Resolved, World, find_dims, find_world, resolve, resolve_in
from shardwise.steps import Done, resolve_steps
from shardwise.summary import rule_changes

DEGREES = {
    "ddp": {"dp_replicate": -1},
    "fsdp": {"name": "fsdp", "dp_shard": -1},
    "hsdp": {"name": "hsdp", "dp_replicate": "nodes", "dp_shard": -1},
    "tp": {"name": "tp", "tp": "devices"},
    "ddp+tp": {"name": "ddp+tp", "dp_replicate": -1, "tp": "auto"},
    "fsdp+tp": {"name": "fsdp+tp", "dp_shard": -1, "tp": "auto"},
    "hybrid": {"name": "hybrid", "dp_replicate": "nodes", "dp_shard": -1, "tp": 2},
}
"""What the files of conf/strategy say."""


def config(strategy: str = "ddp", typed: dict | None = None, **groups: dict) -> Config:
    """A configuration of differences from the defaults, with an optimizer and an end."""
    plain = {
        "trainer": {"max_epochs": 3, **groups.pop("trainer", {})},
        "strategy": {**DEGREES[strategy], **(typed or {})},
        "optimizer": {"lr": 0.1, **groups.pop("optimizer", {})},
    }
    return from_plain({**plain, **groups})


def world(size: int, *, nodes: int = 1, accelerator: str = "cpu") -> World:
    return World(nodes, size // nodes, accelerator, "torchrun", "told by the test")


def resolved(size: int, *, nodes: int = 1, strategy: str = "ddp", **groups: dict) -> Resolved:
    return resolve_in(config(strategy, **groups), world(size, nodes=nodes))


def torchrun(size: int, local: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}
    return {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", **sizes}


@pytest.mark.parametrize(
    ("total", "dp", "accumulate", "micro", "rule", "lr"),
    [
        # the rate is 0.1 at a batch of 64
        (64, 1, None, 64, "linear", 0.1),
        (64, 4, None, 16, "linear", 0.1),
        (64, 4, 4, 4, "linear", 0.1),
        (256, 1, None, 256, "linear", 0.4),
        (256, 8, None, 32, "linear", 0.4),
        (256, 8, 8, 4, "linear", 0.4),
        (256, 8, 8, 4, "sqrt", 0.2),
        (16, 2, 2, 4, "sqrt", 0.05),
        (16, 2, 2, 4, "linear", 0.025),
        (1024, 2, None, 512, "none", 0.1),
    ],
)
def test_batch_and_rate_follow_the_global_batch(
    total: int, dp: int, accumulate: int | None, micro: int, rule: str, lr: float
) -> None:
    scaling = {"rule": rule, "base_batch_size": 64}
    layouts = [("ddp", 1), ("fsdp", 1)] + ([("hsdp", 2)] if dp >= 4 else [])
    for strategy, nodes in layouts:
        batch = {"global_size": total, "accumulate": accumulate}
        one = resolved(dp, nodes=nodes, strategy=strategy, batch=batch, lr_scaling=scaling)
        assert one.lr == pytest.approx(lr, rel=1e-12)
        assert one.base_lr == 0.1
        assert one.batch.micro_size == micro
        assert one.batch.accumulate == (accumulate or 1)
        assert one.batch.micro_size * one.dims.dp_size * one.batch.accumulate == total
        assert one.batch.eval_size == one.batch.micro_size
        by_micro = resolved(
            dp, nodes=nodes, strategy=strategy, batch={"global_size": total, "micro_size": micro}, lr_scaling=scaling
        )
        assert by_micro.batch == one.batch
        assert by_micro.lr == one.lr


def test_sizes_and_rate_read_the_data_parallel_size_and_never_the_world_size() -> None:
    # A mesh with an axis that is no data-parallel one: twice the ranks, the same samples.
    wide = config(batch={"global_size": 64}, lr_scaling={"rule": "linear", "base_batch_size": 32})
    narrow = resolve_in(wide, world(2))

    class Half(type(narrow.dims)):  # type: ignore[misc]
        dp_size = 2
        world_size = 4

    import shardwise.resolve as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_dims", lambda *_: Half(dp_replicate=2))
        doubled = resolve_in(wide, world(4))
    assert (doubled.batch, doubled.lr) == (narrow.batch, narrow.lr)
    assert doubled.lr == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("batch", "dp", "said"),
    [
        ({"global_size": 33}, 2, "batch.global_size=33 does not divide over 2 data-parallel ranks: .* 32 and 34"),
        ({"global_size": 3}, 4, "batch.global_size=3 does not divide over 4 data-parallel ranks: .* are 4"),
        ({"global_size": 64, "accumulate": 3}, 2, "batch.accumulate=3 x 2 data-parallel ranks .* are 60 and 66"),
        ({"global_size": 64, "micro_size": 5}, 2, "batch.micro_size=5 x 2 data-parallel ranks .* are 60 and 70"),
        (
            {"global_size": 64, "micro_size": 8, "accumulate": 2},
            2,
            "batch.micro_size=8 x 2 data-parallel ranks x batch.accumulate=2 is 32, not batch.global_size=64: "
            "leave one of them out, or type batch.global_size=32",
        ),
    ],
)
def test_a_size_that_does_not_divide_lists_the_nearest(batch: dict, dp: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(dp, batch=batch)


@pytest.mark.parametrize(
    ("strategy", "typed", "size", "nodes", "shape"),
    [
        ("ddp", {}, 1, 1, (1, 1, 1)),
        ("ddp", {}, 4, 1, (4, 1, 1)),
        ("ddp", {}, 4, 2, (4, 1, 1)),
        ("fsdp", {}, 1, 1, (1, 1, 1)),
        ("fsdp", {}, 4, 2, (1, 4, 1)),
        ("hsdp", {}, 4, 2, (2, 2, 1)),
        ("hsdp", {}, 128, 16, (16, 8, 1)),
        ("hsdp", {"dp_replicate": 2}, 4, 1, (2, 2, 1)),
        ("hsdp", {"dp_replicate": 4}, 8, 2, (4, 2, 1)),
        ("hsdp", {"dp_replicate": -1, "dp_shard": 2}, 8, 2, (4, 2, 1)),
        ("fsdp", {"dp_shard": 4}, 4, 1, (1, 4, 1)),
        ("tp", {}, 4, 1, (1, 1, 4)),
        ("ddp+tp", {}, 8, 1, (4, 1, 2)),
        ("ddp+tp", {}, 8, 2, (2, 1, 4)),
        ("fsdp+tp", {}, 4, 1, (1, 2, 2)),
        ("fsdp+tp", {}, 16, 2, (1, 2, 8)),
        ("fsdp+tp", {"tp": 4}, 16, 2, (1, 4, 4)),
        ("hybrid", {}, 16, 2, (2, 4, 2)),
        ("hybrid", {"dp_replicate": 2}, 8, 1, (2, 2, 2)),
    ],
)
def test_degrees(strategy: str, typed: dict, size: int, nodes: int, shape: tuple[int, int, int]) -> None:
    dims = find_dims(config(strategy, typed), world(size, nodes=nodes))
    assert (dims.dp_replicate, dims.dp_shard, dims.tp) == shape
    assert dims.dp_size == size // dims.tp
    # Ranks that split a layer between them are neighbours, and see the same samples.
    assert [dims.dp_rank(rank) for rank in range(size)] == [rank // dims.tp for rank in range(size)]
    assert {(dims.dp_rank(r), dims.tp_rank(r)) for r in range(size)} == {
        (dp, tp) for dp in range(dims.dp_size) for tp in range(dims.tp)
    }


def test_tensor_parallelism_stays_in_a_node() -> None:
    with pytest.raises(ConfigError, match=r"^strategy=tp splits layers inside one node, .*num_nodes=2: .*=fsdp\+tp$"):
        find_dims(config("tp"), world(4, nodes=2))
    with pytest.raises(ConfigError, match=r"^strategy=tp splits layers inside one node"):
        resolve(config("tp", trainer={"num_nodes": 2}), environ={}, gpus=0)


@pytest.mark.parametrize(
    ("strategy", "typed", "size", "said"),
    [
        ("ddp", {"dp_replicate": 3}, 4, "dp_replicate 3 makes 3 ranks, but there are 4; type trainer.devices=3"),
        ("fsdp", {"dp_replicate": 3}, 4, "dp_replicate 3 does not divide the 4 ranks; type a degree out of 1, 2, 4"),
        ("ddp", {"dp_shard": -1}, 4, "strategy.dp_replicate=-1 and strategy.dp_shard=-1: only one degree can be -1"),
        ("ddp", {"dp_shard": 0}, 4, "strategy.dp_shard=0: a degree is a positive number, or -1"),
        (
            "fsdp",
            {"dp_replicate": 2},
            4,
            "strategy=fsdp on 4 ranks comes out as dp_replicate 2 x dp_shard 2: .*hsdp",
        ),
        ("ddp", {"dp_replicate": 1, "dp_shard": -1}, 4, "strategy=ddp on 4 ranks comes out as dp_shard 4: .*=fsdp"),
        (
            "hsdp",
            {},
            1,
            "strategy=hsdp on 1 rank comes out as one device: type trainer.devices=4 strategy.dp_replicate=2, or ",
        ),
        (
            "hsdp",
            {},
            2,
            "strategy=hsdp on 2 ranks comes out as dp_shard 2: type trainer.devices=4 ",
        ),
        (
            "hsdp",
            {},
            4,
            "strategy=hsdp on 4 ranks comes out as dp_shard 4: type strategy.dp_replicate=2, or strategy=fsdp",
        ),
        ("tp", {}, 1, "strategy=tp on 1 device splits nothing: type trainer.devices=2, or strategy=ddp"),
        ("fsdp+tp", {}, 1, "strategy=fsdp.tp on 1 device splits nothing: type trainer.devices=4, or strategy=ddp"),
        ("fsdp+tp", {}, 2, "strategy=fsdp.tp on 2 ranks comes out as tp 2: type trainer.devices=4, or strategy=tp"),
        (
            "ddp+tp",
            {"tp": 4},
            4,
            "strategy=ddp.tp on 4 ranks comes out as tp 4: type trainer.devices=8, or strategy=tp",
        ),
        (
            "tp",
            {"tp": 4},
            2,
            "strategy.tp=4 does not divide the 2 devices of a node.*: type strategy.tp=2, or trainer.devices=4$",
        ),
        (
            "fsdp+tp",
            {"tp": 3},
            8,
            "strategy.tp=3 does not divide the 8 devices of a node.*: type strategy.tp=2.4, or trainer.devices=6$",
        ),
        ("tp", {"tp": 2}, 4, "tp 2 makes 2 ranks, but there are 4; type trainer.devices=2, or -1"),
        ("fsdp", {"tp": 2}, 4, "strategy=fsdp on 4 ranks comes out as dp_shard 2 x tp 2: type strategy=fsdp.tp"),
        ("hybrid", {}, 8, "comes out as dp_shard 4 x tp 2: type strategy.dp_replicate=2, or strategy=fsdp.tp"),
        ("hybrid", {}, 4, "dp_shard 2 x tp 2: type trainer.devices=8 strategy.dp_replicate=2, or strategy=fsdp.tp"),
    ],
)
def test_degrees_that_are_not_what_the_name_promises(strategy: str, typed: dict, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_dims(config(strategy, typed), world(size))


@pytest.mark.parametrize(
    ("strategy", "typed", "gpus", "devices", "launch"),
    [
        ("ddp", {}, 0, 1, "in-process"),
        ("fsdp", {}, 0, 2, "local"),
        ("hsdp", {}, 0, 4, "local"),
        ("hsdp", {"dp_replicate": 2}, 0, 4, "local"),
        ("hsdp", {"dp_replicate": 3}, 0, 6, "local"),
        ("ddp", {"dp_replicate": 3}, 0, 3, "local"),
        ("ddp", {}, 8, 8, "local"),
        ("fsdp", {}, 1, 1, "in-process"),
        ("tp", {}, 0, 2, "local"),
        ("tp", {"tp": 4}, 0, 4, "local"),
        ("ddp+tp", {}, 0, 4, "local"),
        ("fsdp+tp", {}, 0, 4, "local"),
        ("fsdp+tp", {"tp": 4}, 0, 8, "local"),
        ("fsdp+tp", {}, 8, 8, "local"),
        ("hybrid", {}, 0, 8, "local"),
    ],
)
def test_devices_auto_takes_all_gpus_or_the_fewest_that_the_strategy_needs(
    strategy: str, typed: dict, gpus: int, devices: int, launch: str
) -> None:
    where = find_world(config(strategy, typed), environ={}, gpus=gpus)
    assert (where.devices, where.launch, where.accelerator) == (devices, launch, "gpu" if gpus else "cpu")


def test_the_cpu_can_be_asked_for_where_there_are_gpus() -> None:
    where = find_world(config(trainer={"accelerator": "cpu", "devices": 16}), environ={}, gpus=8)
    assert (where.accelerator, where.devices) == ("cpu", 16)


@pytest.mark.parametrize(
    ("trainer", "launch", "environ", "gpus", "said"),
    [
        (
            {"devices": 4},
            "auto",
            {},
            2,
            "trainer.devices=4: this machine has 2 GPUs: type trainer.devices=2",
        ),
        ({"accelerator": "gpu"}, "auto", {}, 0, "trainer.accelerator=gpu: no GPU is visible here: type trainer.accel"),
        (
            {"num_nodes": 2, "devices": 8},
            "auto",
            {},
            8,
            "trainer.num_nodes=2 from one machine: .*torchrun --nnodes=2",
        ),
        ({}, "torchrun", {}, 0, "launch=torchrun, but torchrun has not started this process: type torchrun"),
        ({}, "local", torchrun(2, 2), 0, "launch=local, but torchrun has started this process already: leave launch"),
        (
            {"devices": 4},
            "auto",
            torchrun(2, 2),
            0,
            "trainer.devices=4, but torchrun started devices=2: leave",
        ),
        ({"num_nodes": 2}, "auto", torchrun(2, 2), 0, "trainer.num_nodes=2, but torchrun started num_nodes=1: leave"),
        ({"num_nodes": 4}, "auto", torchrun(16, 8), 0, "trainer.num_nodes=4, but torchrun started num_nodes=2: leave"),
        ({}, "auto", torchrun(3, 2), 0, "torchrun started 3 ranks, 2 of them on this node: every node needs the same"),
        ({}, "auto", torchrun(4, 4), 2, "trainer.devices=4: this machine has 2 GPUs"),
    ],
)
def test_contradictions_between_what_is_typed_and_what_is_there(
    trainer: dict, launch: str, environ: dict, gpus: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        find_world(config(trainer=trainer, launch={"kind": launch}), environ=environ, gpus=gpus)


SLURM = {
    "batch shell": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "one task in a job of two": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
    "left over from a step": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NNODES": "2"},
    **{f"job named {name}": {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name} for name in ("sh", "bash", "interactive")},
}


@pytest.mark.parametrize("where", SLURM)
def test_variables_of_slurm_never_change_the_choice(where: str) -> None:
    for strategy, devices in itertools.product(("ddp", "fsdp"), ("auto", 2)):
        asked = config(strategy, trainer={"devices": devices})
        assert find_world(asked, environ=SLURM[where], gpus=0) == find_world(asked, environ={}, gpus=0)
        inside = find_world(asked, environ={**SLURM[where], **torchrun(4, 2)}, gpus=0)
        assert (inside.launch, inside.num_nodes, inside.devices) == ("torchrun", 2, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"TORCHELASTIC_RUN_ID": "x"},
        {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8"},
    ],
)
def test_only_the_whole_set_of_torchruns_variables_means_torchrun(environ: dict[str, str]) -> None:
    assert find_world(config(), environ=environ, gpus=0).launch == "in-process"


def test_16_mixed_is_for_gpus() -> None:
    asked = config(precision={"kind": "16-mixed"})
    with pytest.raises(ConfigError, match=r"precision=16-mixed needs a GPU .*: type precision=bf16-mixed"):
        resolve_in(asked, world(1))
    resolve_in(asked, world(1, accelerator="gpu"))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"trainer": {"max_steps": 0}}, "trainer.max_steps=0: a positive number of optimizer steps, or -1"),
        ({"trainer": {"max_time": "1:2"}}, "trainer.max_time=1:2: DD:HH:MM:SS is needed"),
        ({"trainer": {"max_steps": 5}, "schedule": {"warmup_steps": 6}}, "schedule.warmup_steps=6 does not fit"),
        ({"trainer": {"limit_train_batches": 1.5}}, "trainer.limit_train_batches=1.5: a whole number, or a fraction"),
        ({"trainer": {"limit_val_batches": 2.0}}, "trainer.limit_val_batches=2.0: a whole number, or a fraction"),
        ({"trainer": {"limit_train_batches": 0}}, "trainer.limit_train_batches=0: at least one step is needed"),
        ({"trainer": {"val_check_interval": 1.5}}, "trainer.val_check_interval=1.5: a positive number of steps, or"),
        ({"trainer": {"val_check_interval": 0}}, "trainer.val_check_interval=0: a positive number of steps, or"),
        ({"trainer": {"val_check_interval": 0.5, "check_val_every_n_epoch": None}}, "type a whole number of steps"),
        ({"trainer": {"check_val_every_n_epoch": None}}, "val_check_interval=null is not given.*type a whole number"),
        ({"trainer": {"inference_mode": True}}, "trainer.inference_mode=true: evaluation runs under torch.no_grad"),
        ({"trainer": {"barebones": True, "fast_dev_run": 1}}, "trainer.barebones=true .* trainer.fast_dev_run: drop"),
        ({"trainer": {"overfit_batches": 2}}, "trainer.overfit_batches=2: .*use trainer.limit_train_batches"),
        ({"trainer": {"default_root_dir": "x"}}, "trainer.default_root_dir: .*output_root="),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr='fast': a number of at least 0 is needed"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr=-1: a number of at least 0 is needed"),
        ({"lr_scaling": {"rule": "linear"}}, "lr_scaling=linear needs lr_scaling.base_batch_size"),
        (
            {"lr_scaling": {"rule": "legw", "base_batch_size": 32}},
            "lr_scaling=legw scales the warm-up .* and schedule.warmup_steps=0: type schedule.warmup_epochs=<.* 32>",
        ),
        (
            {"schedule": {"warmup_steps": 5, "warmup_epochs": 2.0}},
            "schedule.warmup_steps=5 and schedule.warmup_epochs=2.0: a warm-up has one length: set all but one",
        ),
        (
            {"schedule": {"warmup_samples": 50, "warmup_epochs": 0.5}},
            "schedule.warmup_samples=50 and schedule.warmup_epochs=0.5: a warm-up has one length",
        ),
        ({"schedule": {"warmup_epochs": float("inf")}}, "schedule.warmup_epochs=inf: a finite number"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_data_are_seen(groups: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(config(**groups), environ={}, gpus=0)


@pytest.mark.parametrize(
    ("trainer", "samples", "per_epoch", "total"),
    [
        ({"max_epochs": 3}, 100, 4, 10),  # 300 samples in batches of 32, and not three times four
        ({"max_epochs": 3, "limit_train_batches": 2}, 100, 2, 6),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 100, 2, 6),
        ({"max_epochs": 3, "limit_train_batches": 1.0}, 100, 4, 10),
        ({"max_epochs": 3, "limit_train_batches": 99}, 100, 4, 10),
        ({"max_epochs": 3, "max_steps": 7}, 100, 4, 7),
        ({"max_epochs": None, "max_steps": 7}, None, None, 7),
        ({"max_epochs": 2, "limit_train_batches": 5}, None, 5, 10),
    ],
)
def test_epochs_become_optimizer_steps(trainer: dict, samples: int | None, per_epoch: int | None, total: int) -> None:
    for size, accumulate in ((1, 1), (4, 1), (2, 4)):
        one = resolved(size, trainer=trainer, batch={"global_size": 32, "accumulate": accumulate})
        steps = resolve_steps(one, samples)
        assert (steps.steps_per_epoch, steps.total, steps.scheduled) == (per_epoch, total, total)


@pytest.mark.parametrize(
    ("trainer", "done", "total"),
    [
        ({"max_epochs": 2}, Done(22, 22 * 64), 45),  # of 2,874 samples: as a run that goes through
        ({"max_epochs": 2}, Done(44, 44 * 32), 44 + 23),  # 1,466 samples are left, in batches of 64
        ({"max_epochs": 2}, Done(12, 12 * 256), 12),  # none are
        ({"max_epochs": 1}, Done(60, 60 * 64), 60),  # nor with fewer epochs than are done
        ({"max_epochs": 2, "max_steps": 50}, Done(44, 44 * 32), 50),
        ({"max_epochs": None, "max_steps": 70}, Done(44, 44 * 32), 70),
        ({"max_epochs": None, "max_steps": 70, "limit_train_batches": 5}, Done(44, 44 * 32), 70),
        ({"max_epochs": 2, "limit_train_batches": 10}, Done(5, 5 * 64), 20),
        ({"max_epochs": 2, "limit_train_batches": 10}, Done(25, 25 * 64), 25),
    ],
)
def test_a_training_that_goes_on_has_as_many_samples_left_as_its_epochs(trainer: dict, done: Done, total: int) -> None:
    one = resolved(1, trainer=trainer, batch={"global_size": 64})
    steps = resolve_steps(one, 1437, done=done)
    assert (steps.total, steps.scheduled) == (total, total)


def test_limited_epochs_do_not_go_on_with_another_batch() -> None:
    for limit in (10, 0.5):
        one = resolved(1, trainer={"max_epochs": 2, "limit_train_batches": limit}, batch={"global_size": 64})
        with pytest.raises(ConfigError, match=rf"limit_train_batches={limit} .* type batch.global_size=32, or .*steps"):
            resolve_steps(one, 1437, done=Done(6, 6 * 32))


def test_nor_does_a_warm_up_in_limited_epochs() -> None:
    """Two epochs of 10 steps of 32 lie behind; two of 10 steps of 64 would begin the warm-up again."""
    trainer = {"max_epochs": None, "max_steps": 200, "limit_train_batches": 10}
    for schedule, found in (({"warmup_epochs": 2.0}, None), ({"warmup_samples": 640}, 20), ({"warmup_steps": 20}, 20)):
        one = resolved(1, schedule=schedule, trainer=trainer, batch={"global_size": 64})
        done = Done(25, 25 * 32)
        if found is None:
            with pytest.raises(ConfigError, match=r"type batch.global_size=32, or .*epochs=null schedule.warmup"):
                resolve_steps(one, 64_000, done=done)
        else:
            assert resolve_steps(one, 64_000, done=done).warmup == found


def test_a_stream_without_a_length_needs_a_number_of_steps() -> None:
    for trainer in ({"max_epochs": 3}, {"max_steps": 5, "limit_train_batches": 0.5}):
        with pytest.raises(ConfigError, match="unknown length: type"):
            resolve_steps(resolved(1, trainer=trainer), None)
    with pytest.raises(ConfigError, match=r"trainer.val_check_interval=0.5 of an epoch of unknown length"):
        resolve_steps(resolved(1, trainer={"max_steps": 5, "val_check_interval": 0.5}), None)


def test_a_validation_interval_is_a_share_of_the_epoch_in_steps() -> None:
    for interval, steps in ((0.5, 2), (0.01, 1), (3, 3), (1.0, 1.0), (None, None)):
        one = resolved(1, trainer={"val_check_interval": interval}, batch={"global_size": 32})
        assert resolve_steps(one, 100).val_check_interval == steps


def test_a_rate_is_not_made_up() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr is missing: give it a value"):
        resolve_in(from_plain({"trainer": {"max_epochs": 3}, "optimizer": {"_target_": "torch.optim.SGD"}}), world(1))


def test_an_interval_that_no_epoch_reaches_is_refused() -> None:
    endless = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    assert resolve_steps(resolved(1, trainer=endless, batch={"global_size": 32}), 100).val_check_interval == 5
    with pytest.raises(
        ConfigError, match=r"val_check_interval=5 is more than the 4 steps .*check_val_every_n_epoch=null"
    ):
        resolve_steps(resolved(1, trainer={"val_check_interval": 5}, batch={"global_size": 32}), 100)


def test_a_trial_run_keeps_the_schedule_of_the_whole_training() -> None:
    trial = resolved(1, trainer={"fast_dev_run": 2}, schedule={"warmup_steps": 5}, batch={"global_size": 32})
    steps = resolve_steps(trial, 100)
    assert (steps.total, steps.scheduled) == (2, 10)
    endless = resolved(1, trainer={"fast_dev_run": True, "max_epochs": None}, schedule={"warmup_steps": 5})
    assert resolve_steps(endless, 100).total == 1


def test_a_warm_up_longer_than_the_training_is_told_once_the_data_are_known() -> None:
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=11 does not fit a training of 10 optimizer steps"):
        resolve_steps(resolved(1, schedule={"warmup_steps": 11}, batch={"global_size": 32}), 100)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt", "adam_sde", "legw"])
def test_the_layout_does_not_matter_to_a_rule(rule: str) -> None:
    """Nor do the ranks of which a tensor-parallel group needs more than one."""
    layouts: list[dict] = [
        {"size": 1},
        {"size": 4, "strategy": "fsdp"},
        {"size": 4, "strategy": "tp"},
        {"size": 8, "strategy": "fsdp+tp", "typed": {"tp": 4}},
        {"size": 8, "nodes": 2, "strategy": "hybrid"},
        {"size": 2, "batch": {"accumulate": 8}},
        {"size": 16, "nodes": 2, "strategy": "hsdp", "batch": {"micro_size": 2}},
    ]
    optimizer = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}
    same = []
    for layout in layouts:
        batch = {"global_size": 256, **layout.get("batch", {})}
        scaling = {"rule": rule, "base_batch_size": 64}
        schedule = {"warmup_epochs": 0.5}
        one = resolved(**{**layout, "batch": batch}, lr_scaling=scaling, schedule=schedule, optimizer=optimizer)
        same.append((one.lr, one.optimizer, resolve_steps(one, 4096)))
    assert same[0][0] == pytest.approx({"none": 0.1, "linear": 0.4}.get(rule, 0.2))
    assert same[0][2].warmup == (32 if rule == "legw" else 8)
    assert all(other == same[0] for other in same[1:])


def test_what_a_rule_changes_reaches_the_optimizer_and_what_is_saved() -> None:
    optimizer = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.999], "weight_decay": 0.5}
    sizes: dict = {"batch": {"global_size": 256}, "optimizer": optimizer}
    one = resolved(1, **sizes, lr_scaling={"rule": "adam_sde", "base_batch_size": 64})
    assert one.optimizer == {"lr": 0.2, "betas": [0.6, 0.996], "eps": 0.5e-8, "weight_decay": 0.5}
    assert one.config.optimizer["betas"] == [0.9, 0.999], "what was typed stays, for a run at another batch"
    assert one.derived().items() >= {"effective_betas": [0.6, 0.996], "effective_eps": 0.5e-8}.items()
    assert "effective_weight_decay" not in one.derived()
    root = {"rule": "sqrt", "base_batch_size": 64}
    decayed = resolved(1, **sizes, lr_scaling=root)
    assert decayed.optimizer["weight_decay"] == decayed.derived()["effective_weight_decay"] == 1.0
    assert resolved(1, **sizes, lr_scaling={**root, "corrections": False}).optimizer["weight_decay"] == 0.5
    plain = resolved(1, **sizes, lr_scaling={"rule": "linear", "base_batch_size": 64}).derived()
    assert not [name for name in plain if name.startswith("effective_") and name != "effective_lr"]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 0),
        ({"warmup_steps": 8}, 8),
        ({"warmup_samples": 256}, 8),
        ({"warmup_samples": 225}, 8),
        ({"warmup_samples": 224}, 7),
        ({"warmup_epochs": 2.56}, 8),  # of 100 samples
        ({"warmup_epochs": 0.01}, 1),
        ({"warmup_steps": 0, "warmup_samples": 0, "warmup_epochs": 2.0}, 7),
    ],
)
def test_a_warm_up_in_steps_samples_and_epochs(schedule: dict, steps: int) -> None:
    for size, accumulate in ((1, 1), (2, 4)):
        one = resolved(size, schedule=schedule, batch={"global_size": 32, "accumulate": accumulate})
        assert resolve_steps(one, 100).warmup == steps


def test_a_warm_up_of_limited_epochs_is_of_these() -> None:
    for samples in (100, None):
        one = resolved(1, trainer={"limit_train_batches": 3}, schedule={"warmup_epochs": 2.0})
        assert resolve_steps(one, samples).warmup == (6 if samples is None else 4)  # 100 samples are 2 batches of 64


@pytest.mark.parametrize(
    ("global_size", "schedule", "steps"),
    [
        # at base batch 64, of 640 samples; You et al.: the epochs of warm-up grow with the batch, its steps stay
        (64, {"warmup_epochs": 0.5}, 5),
        (128, {"warmup_epochs": 0.5}, 5),
        (256, {"warmup_epochs": 0.5}, 5),
        (32, {"warmup_epochs": 0.5}, 5),
        (256, {"warmup_samples": 321}, 6),
        (48, {"warmup_samples": 320}, 5),
        (256, {"warmup_steps": 7}, 7),
    ],
)
def test_legw_keeps_the_steps_of_the_warm_up(global_size: int, schedule: dict, steps: int) -> None:
    scaling = {"rule": "legw", "base_batch_size": 64}
    one = resolved(1, schedule=schedule, batch={"global_size": global_size}, lr_scaling=scaling)
    found = resolve_steps(one, 640)
    assert found.warmup == steps
    assert one.lr == pytest.approx(0.1 * (global_size / 64) ** 0.5)
    without = resolved(1, schedule=schedule, batch={"global_size": global_size})
    plain = resolve_steps(without, 640)
    assert rule_changes(without, plain) == []
    changes = [] if plain.warmup == steps else [f"warm-up {plain.warmup} -> {steps} steps"]
    assert rule_changes(one, found) == changes
    done = Done(3, 3 * 16)
    assert resolve_steps(one, 640, done=done).warmup == steps
    trainer = {"limit_train_batches": 10, "max_epochs": 20}
    short = resolved(1, schedule=schedule, batch={"global_size": global_size}, lr_scaling=scaling, trainer=trainer)
    assert resolve_steps(short, 64_000).warmup == steps, "nor do those of an epoch of 10 batches grow"


@pytest.mark.parametrize(
    ("schedule", "done", "warmup"),
    [
        ({"warmup_samples": 640}, Done(4, 4 * 64), 10),
        ({"warmup_samples": 640}, Done(8, 8 * 32), 8 + 6),
        ({"warmup_samples": 640}, Done(40, 40 * 32), 20),
        ({"warmup_epochs": 1.0}, Done(8, 8 * 32), 8 + 6),
        ({"warmup_steps": 10}, Done(8, 8 * 32), 10),
        # 8 steps of 32, 6 of 64, and 30 more: what the run was told when it changed its batch still holds.
        ({"warmup_samples": 640}, Done(44, 8 * 32 + 36 * 64, (Fraction(640), 8 + 6)), 8 + 6),
        ({"warmup_epochs": 1.0}, Done(44, 8 * 32 + 36 * 64, (Fraction(640), 8 + 6)), 8 + 6),
        ({"warmup_samples": 640}, Done(9, 9 * 32, (Fraction(640), 20)), 9 + 6),  # and does not while it lasts
        ({"warmup_samples": 320}, Done(40, 40 * 32, (Fraction(640), 20)), 10),  # nor for another warm-up
    ],
)
def test_a_warm_up_in_samples_keeps_its_place_in_a_training_that_goes_on(
    schedule: dict, done: Done, warmup: int
) -> None:
    one = resolved(1, schedule=schedule, batch={"global_size": 64}, trainer={"max_epochs": 9})
    assert resolve_steps(one, 640, done=done).warmup == warmup


def test_a_warm_up_that_does_not_fit_is_called_as_it_was_typed() -> None:
    for schedule, said in (
        ({"warmup_samples": 321}, "schedule.warmup_samples=321 is 11 steps"),
        ({"warmup_epochs": 3.5}, "schedule.warmup_epochs=3.5 is 11 steps"),
    ):
        with pytest.raises(ConfigError, match=rf"{said}, and does not fit a training of 10 .* up to 10") as error:
            resolve_steps(resolved(1, schedule=schedule, batch={"global_size": 32}), 100)
        assert "\n" not in str(error.value)
    scaling = {"rule": "legw", "base_batch_size": 8}
    longer = resolved(1, schedule={"warmup_epochs": 1.0}, batch={"global_size": 32}, lr_scaling=scaling)
    with pytest.raises(ConfigError, match=r"schedule.warmup_epochs=1.0 is 13 steps with lr_scaling=legw, and does not"):
        resolve_steps(longer, 100)
    endless = resolved(1, trainer={"max_steps": 9}, schedule={"warmup_epochs": 1.0})
    with pytest.raises(ConfigError, match=r"warmup_epochs=1.0 of an epoch of unknown length: type schedule.warm"):
        resolve_steps(endless, None)
    typed = resolved(1, trainer={"max_steps": 9, "max_epochs": None}, schedule={"warmup_samples": 128})
    assert resolve_steps(typed, None).warmup == 2


def test_what_is_derived_is_plain_and_complete() -> None:
    where = world(4, nodes=2)
    derived = resolve(config("hsdp"), environ=torchrun(4, 2), gpus=0).derived()
    assert all(isinstance(value, int | float | str) for value in derived.values())
    assert derived.items() >= {"dp_replicate": 2, "dp_shard": 2, "dp_size": 4, "world_size": 4}.items()
    assert derived.items() >= {"batch_micro_size": 16, "effective_lr": 0.1, "launch": where.launch}.items()
    assert {f"batch_{field.name}" for field in dataclasses.fields(resolved(1).batch)} <= set(derived)
