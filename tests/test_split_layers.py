"""What the styles do while a module runs: whose noise, whose memory, which gradients; and what is done to blocks."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from pool import RankError, RankPool
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT
from shardwise.models.mlp import MLP
from shardwise.module import LanguageModel
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.initialise import materialise
from shardwise.parallel.layout import Layout, check_layout, lay_out
from shardwise.parallel.local_step import ELEMENTWISE, is_elementwise, on_local_tensors
from shardwise.parallel.local_tensors import Leaves, partial_parameters, sum_partial_gradients
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.plan import apply_plan, read_plan
from test_parity import check_parity
from training import Record, Recorder, build_module, global_batch, largest_gap, make_trainer, shares, whole


class Pair(nn.Module):
    """Dropout before and after the layer that ends the region."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.inner = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)
        self.outer = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Pair()
        self.second = Pair()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


PLAN = {"first": "region", "*.up": "colwise", "*.down": "rowwise", "second.inner": "local"}


def split_net(plan: dict[str, str] = PLAN, *, leaves: bool) -> tuple[Net, Leaves | None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    net = Net().double()
    apply_plan(net, read_plan(net, plan, degree=mesh.size(), sequence_parallel=None), mesh=mesh)
    if not leaves:
        return net, None
    attached = Leaves()
    attached.attach(net)
    return net, attached


def masks() -> dict[str, list[bool]]:
    """Which elements each dropout has kept."""
    net, _ = split_net(leaves=False)
    seen: dict[str, list[bool]] = {}

    def note(name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        seen[name] = (out != 0).flatten().tolist()

    for name, module in net.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(partial(note, name))
    torch.manual_seed(7)
    net(torch.randn(4, 8, dtype=torch.float64))
    seen["next draw"] = [bool(bit) for bit in torch.randint(2, (64,))]
    return seen


def test_split_features_draw_noise_of_their_own_and_what_follows_the_region_draws_alike(pool: RankPool) -> None:
    first, second = pool.run(masks)
    assert first == pool.run(masks)[0], "repeatable"
    for name in ("first.inner", "second.inner"):
        assert first[name] != second[name]
    for name in ("first.outer", "second.outer", "next draw"):
        assert first[name] == second[name]


def gradients(leaves: bool) -> dict[str, Tensor]:
    """Two passes without dropout, a penalty on a parameter outside of its module, and a frozen layer."""
    net, attached = split_net(leaves=leaves)
    net.eval()
    x = torch.arange(32, dtype=torch.float64).view(4, 8) / 32
    for _ in range(2):
        net(x).square().sum().backward()
    penalty = net.scale.square().sum()
    (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty).backward()
    net.second.up.weight.requires_grad_(False)
    net(x).sum().backward()
    if attached is not None:
        attached.hand_over()
    sum_partial_gradients(partial_parameters(net), dist.group.WORLD)
    assert all(isinstance(p, DTensor) for p in net.parameters()), "also as attributes, outside of a pass"
    return {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None}


def test_leaves_gather_the_same_gradients_as_the_parameters_themselves(pool: RankPool) -> None:
    plain, gathered = pool.run(gradients, False)[0], pool.run(gradients, True)[0]
    assert plain.keys() == gathered.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gathered[name], gradient, rtol=1e-13, atol=0), name
    torch.manual_seed(1)
    net = Net().double().eval()
    x = torch.arange(32, dtype=torch.float64).view(4, 8) / 32
    for _ in range(2):
        net(x).square().sum().backward()
    net.scale.square().sum().backward()
    net.second.up.weight.requires_grad_(False)
    net(x).sum().backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(gathered[name], parameter.grad, rtol=1e-12, atol=1e-14), name


def steps(name: str, local: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps of an optimizer; whole parameters and state."""
    net, _ = split_net(leaves=False)
    parameters = list(net.parameters())
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    assert is_elementwise(optimizer)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for p in parameters:
            full = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        if local:
            with on_local_tensors(optimizer):
                optimizer.step()
        else:
            optimizer.step()
    assert all(group["params"][0] is parameters[0] for group in optimizer.param_groups)
    state = [optimizer.state[p][key] for p in parameters for key in sorted(optimizer.state[p])]
    state = [value for value in state if value.dim()]  # others are numbers that go with the steps
    assert state
    assert all(isinstance(value, DTensor) for value in state)
    return [p.full_tensor().detach() for p in parameters], [value.full_tensor() for value in state]


# Rprop has no step on DTensors to compare with.
@pytest.mark.parametrize("name", [kind.__name__ for kind in ELEMENTWISE if kind is not torch.optim.Rprop])
def test_a_step_on_local_tensors_is_the_same_step(pool: RankPool, name: str) -> None:
    ours, theirs = pool.run(steps, name, True)[0], pool.run(steps, name, False)[0]
    for mine, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert torch.allclose(mine, other, rtol=1e-14, atol=0)


class Scaled(torch.optim.SGD):
    """May look at norms."""


def elementwise() -> dict[str, bool]:
    net, _ = split_net(leaves=False)
    optimizers = (torch.optim.AdamW, torch.optim.SGD, Scaled, torch.optim.Adafactor)
    return {kind.__name__: is_elementwise(kind(net.parameters())) for kind in optimizers}  # type: ignore[operator]


def test_only_elementwise_optimizers_step_on_local_tensors(pool: RankPool) -> None:
    assert pool.run(elementwise)[0] == {"AdamW": True, "SGD": True, "Scaled": False, "Adafactor": False}
    assert not is_elementwise(torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))])), "nothing is sharded"


# ---- block by block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2"])
def test_compiled_blocks_have_the_gradients_of_one_device(pool: RankPool, layout: str) -> None:
    check_parity(pool, "gpt", layout, 1, strategy={"compile": True})


def test_names_stay_as_they_are() -> None:
    with torch.device("meta"):
        plain, changed = (GPT(19, context=8, n_layer=2, n_head=2, width=16) for _ in range(2))
    layout = Layout(activation_checkpointing="selective", compile=True)
    lay_out(changed, layout, mesh=None, dims=ParallelDims(), compute_dtype=None)
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in changed.named_parameters()] == [n for n, _ in plain.named_parameters()]


def refused(model: nn.Module, dims: ParallelDims, **layout: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_layout(model, Layout(**layout), dims)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_done_is_refused_before_anything_is_changed() -> None:
    with torch.device("meta"):
        mlp = MLP(10, in_features=8, width=8)
        noisy = GPT(19, context=8, n_layer=2, n_head=2, width=16, dropout=0.1)
    said = refused(mlp, ParallelDims(), activation_checkpointing="full")
    assert said.startswith("MLP has no repeated blocks, on which strategy.activation_checkpointing=full works")
    assert "strategy.compile=true works" in refused(mlp, ParallelDims(tp=2), compile=True)
    said = refused(noisy, ParallelDims(tp=2), compile=True)
    assert "strategy.compile=true, but each rank draws a dropout of its own in blocks.0." in said
    assert check_layout(noisy, Layout(compile=True), ParallelDims(dp_shard=2)) is None, "nothing is split there"
    with pytest.raises(ConfigError, match="activation_checkpointing='some': one of none, selective, full is needed"):
        Layout(activation_checkpointing="some")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"first": "region", "*.up": "colwise", "second.down": "rowwise"},
            "first is a region with no rowwise layer, and exactly one has to end",
        ),
        (
            {"first": "region", "first.inner": "region", "*.up": "colwise", "*.down": "rowwise"},
            "first.inner (region) lies in first, a region already: leave one out",
        ),
    ],
)
def test_a_region_is_entered_once_and_left_once(plan: dict[str, str], said: str) -> None:
    assert said in refused(Net(), ParallelDims(tp=2), plan=plan)


def test_a_region_around_two_pairs_is_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

    plan = {"body": "region", "body.*.up": "colwise", "body.*.down": "rowwise"}
    said = refused(Two(), ParallelDims(tp=2), plan=plan)
    assert "body is a region with 2 rowwise layers (body.first.down, body.second.down)" in said


class Rows(nn.Module):
    """Linear layers one after the other."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.rows = nn.Sequential(*(step for layer in layers for step in (layer, nn.Tanh())))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"rows.0": "colwise"}, "rows.0 is colwise, and nothing is rowwise: the layers of a pair are colwise"),
        ({"rows.2": "rowwise"}, "rows.2 is rowwise, and nothing is colwise"),
        (
            {"rows.0": "colwise", "rows.2": "rowwise", "rows.4": "colwise"},
            "rows.4 is colwise, and no rowwise layer belongs to it: in a Sequential colwise and rowwise layers take ",
        ),
        (
            {"rows.0": "colwise", "rows.2": "colwise", "rows.4": "rowwise"},
            "rows.2 is colwise, and rows.0 before it is colwise: in a Sequential",
        ),
        ({"rows.0": "rowwise", "rows.2": "colwise"}, "rows.0 is rowwise, and no colwise layer belongs to it"),
    ],
)
def test_what_is_left_split_has_to_be_taken(plan: dict[str, str], said: str) -> None:
    assert said in refused(Rows(8, 16, 8, 16), ParallelDims(tp=2), plan=plan)
    check_layout(Rows(8, 16, 8, 16), Layout(plan={"rows.0": "colwise", "rows.2": "rowwise"}), ParallelDims(tp=2))


def wrong_features() -> list[str]:
    """Plans that no table shows to be wrong, on layers that are called."""
    messages = []
    for plan in ({"first.down": "rowwise", "second.up": "colwise"}, {"second.down": "rowwise", "first.up": "colwise"}):
        net, _ = split_net(plan, leaves=False)
        with pytest.raises(ConfigError) as caught:
            net(torch.ones(2, 8, dtype=torch.float64))
        messages.append(str(caught.value))
    return messages


def test_a_layer_that_gets_the_wrong_features_says_what_its_neighbour_has_to_be(pool: RankPool) -> None:
    not_split, split = pool.run(wrong_features)[0]
    assert not_split == (
        "strategy.plan: first.down is rowwise, so it takes 8 of 16 features, and gets 16: the layer before it has to "
        "be colwise"
    )
    assert split.startswith(
        "strategy.plan: first.down takes 16 features and gets 8: the layer before it is colwise, so"
    )


def different_batches() -> None:
    make_trainer("tp2", max_steps=1).fit(build_module("gpt"), shares("gpt", 1))  # shares of two data-parallel ranks


def test_ranks_that_split_layers_and_see_different_batches_are_stopped(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the ranks that split each layer between them got different batches"):
        pool.run(different_batches)


class Encoder(nn.Module):
    """PyTorch's own layer, whose attention computes with its output layer's parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def encoder(plan: dict[str, str] | None) -> dict[str, Tensor]:
    """Output and gradients, in training and, for the output, in evaluation."""
    torch.manual_seed(5)
    model = Encoder().double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    if plan is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_plan(model, read_plan(model, plan, degree=2, sequence_parallel=None), mesh=mesh)
    out = model(x)
    out.square().sum().backward()
    found = {"out": out.detach()}
    with torch.no_grad():
        found["evaluation"] = model.eval()(x)
    if plan is not None:
        sum_partial_gradients(partial_parameters(model), dist.group.WORLD)
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return found


MLP_OF_A_LAYER = {"layer.linear1": "colwise", "layer.linear2": "rowwise"}


@pytest.mark.parametrize(
    "plan",
    [
        MLP_OF_A_LAYER,
        MLP_OF_A_LAYER | {"layer.self_attn": "packed_attention", "layer.self_attn.out_proj": "rowwise"},
    ],
    ids=["attention whole", "attention split"],
)
def test_pytorchs_own_transformer_layer(pool: RankPool, plan: dict[str, str]) -> None:
    expected = encoder(None)
    for found in pool.run(encoder, plan):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


def test_recurrent_layers_are_refused() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(8, 8)

    assert "memory is of type LSTM, which keeps a list of its weights" in refused(
        Recurrent(), ParallelDims(tp=2), plan=PLAN
    )


# ---- what would be counted several times, or not at all ------------------------------------------------------------


class Skips(nn.Module):
    """A pair whose input goes past it, whose output is scaled, or that takes a second input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(8, 16)  # its bias is no excuse for what follows the other layer
        self.down = nn.Linear(16, 8, bias=kind != "scaled")
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        out = self.down(self.up(x).tanh())
        if other is not None:
            out = out + self.down(self.up(other).tanh())
        return out + x if self.kind == "residual" else out * self.scale if self.kind == "scaled" else out


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = Skips(kind)
        self.memory = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.memory) if self.body.kind == "second" else self.body(x)


def passing(kind: str, region: bool) -> tuple[str, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    model = Outer(kind).double()
    plan = {"body.up": "colwise", "body.down": "rowwise"} | ({"body": "region"} if region else {})
    apply_plan(model, read_plan(model, plan, degree=2, sequence_parallel=None), mesh=mesh)
    try:
        model(torch.ones(2, 8, dtype=torch.float64, requires_grad=True)).square().sum().backward()
    except ConfigError as error:
        return str(error), {}
    sum_partial_gradients(partial_parameters(model), dist.group.WORLD)
    return "", {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "residual",
            "a part of the input of body, a region, goes past its rowwise layer, and would be counted 2 times",
        ),
        ("scaled", "parameters follow the rowwise layer of body, a region, and would be counted 2 times"),
        ("second", "body is a region, which enters its first input only, and another one needs a gradient too"),
    ],
)
def test_what_a_region_would_count_twice_is_refused_and_right_without_it(pool: RankPool, kind: str, said: str) -> None:
    assert all(said in message for message, _ in pool.run(passing, kind, True))
    message, found = pool.run(passing, kind, False)[0]
    assert message == ""
    torch.manual_seed(2)
    model = Outer(kind).double()
    model(torch.ones(2, 8, dtype=torch.float64, requires_grad=True)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, rtol=1e-12), name


class Towers(pl.LightningModule):
    """A GPT and, beside it, what sees whole activations on every rank, with sequences split in the GPT."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = GPT(19, context=8, n_layer=2, n_head=2, width=16)
        self.tower = nn.Linear(8, 1)
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        losses = LanguageModel._losses(self, batch)  # type: ignore[arg-type]
        return losses.sum() / (targets != -100).sum() * self.temperature + self.tower(tokens.double()).square().mean()

    loss_chunk = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def towers(layout: str) -> Record:
    torch.manual_seed(4)
    module, recorder = Towers(), Recorder()
    trainer = make_trainer(layout, callbacks=[recorder], max_steps=2, precision="64-true")
    batch = tuple(part[4:] for part in global_batch("gpt", 0))
    trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
    return recorder.record


def test_what_stands_beside_the_model_counts_once(pool: RankPool) -> None:
    expected, found = towers("one"), pool.run(towers, "tp2")[0]
    assert largest_gap(found.gradients, expected.gradients, floor=1e-6) < 1e-10


def two_trainers(layout: str) -> list[float]:
    """Losses of one step each, one trainer after the other."""
    torch.manual_seed(1)
    module, losses = build_module("gpt"), []
    for _ in range(3):
        recorder = Recorder()
        trainer = make_trainer(layout, callbacks=[recorder], max_steps=1, precision="64-true")
        trainer.fit(module, shares("gpt", 1, tp=2 if layout == "tp2" else 1))
        losses += recorder.record.losses
    with pytest.raises(ConfigError, match=r"is laid out over .*, and cannot become the same mesh with"):
        make_trainer(layout, strategy={"activation_checkpointing": "full"}, precision="64-true").fit(
            module, shares("gpt", 1, tp=2)
        )
    return losses


def test_a_second_trainer_trains_on(pool: RankPool) -> None:
    losses = pool.run(two_trainers, "tp2")[0]
    assert losses[0] > losses[1] > losses[2], "the module learns from each of them"


class Packed(nn.Module):
    """Says how its parameters start, packs its projections, and ties two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(tensor, generator=generator)

    def init_buffers(self) -> None:
        """None."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"attention": "packed_attention", "attention.out_proj": "rowwise"}


def drawn(dims: ParallelDims) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Packed()
    mesh = None if dims.world_size == 1 else build_mesh(dims, device_type="cpu")
    lay_out(model, Layout(), mesh=mesh, dims=dims, compute_dtype=None)
    materialise(model, seed=3, device=torch.device("cpu"))
    assert model.first.weight is model.second.weight, "tied, also after the meta device"
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)], ids=["tp", "fsdp+tp"])
def test_packed_and_tied_weights_start_alike_from_the_meta_device(pool: RankPool, dims: ParallelDims) -> None:
    expected = drawn(ParallelDims())
    for found in pool.run(drawn, dims, world_size=dims.world_size):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_sequences_are_split_only_where_they_become_whole_again() -> None:
    with torch.device("meta"):
        gpt = GPT(19, context=8, n_layer=2, n_head=2, width=16)
    plan = gpt.tensor_parallel_plan()
    assert read_plan(gpt, plan, degree=2, sequence_parallel=None).sequence
    for left_out in ("head", "norm"):
        part = {pattern: style for pattern, style in plan.items() if pattern != left_out}
        assert not read_plan(gpt, part, degree=2, sequence_parallel=None).sequence
        with pytest.raises(ConfigError, match=r"strategy\.sequence_parallel=true"):
            read_plan(gpt, part, degree=2, sequence_parallel=True)


@pytest.mark.parametrize("between", [nn.GLU(), nn.PReLU(), nn.LayerNorm(16)])
def test_what_mixes_split_features_is_refused(between: nn.Module) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8))

    plan = {"rows.0": "colwise", "rows.2": "rowwise"}
    assert "stands between a colwise and a rowwise layer" in refused(Mixed(), ParallelDims(tp=2), plan=plan)


def test_a_vocabulary_that_leaves_a_rank_nothing_is_refused() -> None:
    with torch.device("meta"):
        gpt = GPT(5, context=8, n_layer=1, n_head=4, width=16)
    assert "tok_emb has a vocabulary of 5, of which strategy.tp=4 leaves a rank nothing" in refused(
        gpt, ParallelDims(tp=4)
    )


class Blocks(nn.Module):
    """Attention of one's own, a norm and an MLP, between two layers that are no pair."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 16)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.attn = nn.Module()
            for name in ("q", "k", "v", "o"):
                setattr(block.attn, name, nn.Linear(16, 16))
            block.norm = nn.LayerNorm(16)
            block.mlp = nn.Module()
            for name in ("gate", "up") if gated else ("up",):
                setattr(block.mlp, name, nn.Linear(16, 32))
            block.mlp.down = nn.Linear(32, 16)
            self.blocks.append(block)
        self.head = nn.Linear(16, 4)


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (Blocks(gated=False), "blocks.*.mlp.up:colwise,blocks.*.mlp.down:rowwise"),
        (Blocks(gated=True), "blocks.*.mlp.gate:colwise,blocks.*.mlp.up:colwise,blocks.*.mlp.down:rowwise"),
        (Encoder(), "layer.linear1:colwise,layer.linear2:rowwise"),
        (Rows(8, 16, 8), "rows.0:colwise,rows.2:rowwise"),
    ],
)
def test_the_plan_to_start_from_is_of_layers_beside_one_another(model: nn.Module, start: str) -> None:
    said = refused(model, ParallelDims(tp=2))
    assert f"start from 'strategy.plan={{{start}}}'" in said


def scaled_loss() -> None:
    trainer = make_trainer("tp2", max_steps=1)
    trainer.strategy._precision_name = "16-mixed"  # a Trainer on a CPU would turn it into bf16-mixed
    trainer.fit(build_module("gpt"), shares("gpt", 1, tp=2))


def test_a_scaled_loss_and_split_layers_exclude_each_other_without_a_configuration_too(pool: RankPool) -> None:
    with pytest.raises(RankError, match="precision=16-mixed scales the loss, and the ranks that split a layer"):
        pool.run(scaled_loss)
