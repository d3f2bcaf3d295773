"""What a plan makes of a model, for every rank in turn, in one process; and what is refused before anything starts."""

import math
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkout import TrainRun
from shardwise.build import check_slots
from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.hydra_setup import compose
from shardwise.models.convnet import ConvNet
from shardwise.models.gpt import GPT
from shardwise.models.mlp import MLP
from shardwise.models.vit import ViT
from shardwise.module import LanguageModel
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.initialise import materialise
from shardwise.parallel.layout import Layout, check_layout, lay_out
from shardwise.parallel.local_tensors import partial_parameters, sum_partial_gradients
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.plan import apply_plan, read_plan

Start = Callable[[int, ParallelDims], DeviceMesh]


@pytest.fixture
def simulated() -> Iterator[Start]:
    """`simulated(rank, dims)`: be that rank of a mesh whose other ranks do not exist; collectives do nothing."""

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds on to the meshes of groups that are gone

    def start(rank: int, dims: ParallelDims) -> DeviceMesh:
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
        return build_mesh(dims, device_type="cpu")

    yield start
    leave()


# ---- every rank's part ---------------------------------------------------------------------------------------------


def gpt(vocab_size: int = 19, **changes: object) -> GPT:
    sizes: dict = {"context": 8, "n_layer": 2, "n_head": 4, "width": 16, "multiple_of": 8}
    with torch.device("meta"):
        return GPT(vocab_size, **{**sizes, **changes})


def vit(**changes: object) -> ViT:
    sizes: dict = {"image_size": 8, "in_channels": 1, "patch_size": 4, "n_layer": 2, "n_head": 4, "width": 16}
    with torch.device("meta"):
        return ViT(10, **{**sizes, **changes})


def mlp(**changes: object) -> MLP:
    sizes: dict = {"image_size": 8, "in_channels": 1, "width": 12, "depth": 3}
    with torch.device("meta"):
        return MLP(10, **{**sizes, **changes})


def convnet() -> ConvNet:
    with torch.device("meta"):
        return ConvNet(10, in_channels=1, image_size=8, width=4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt tied": lambda: gpt(tie_embeddings=True),
    "gpt grouped": lambda: gpt(n_head=8, n_kv_head=4),
    "vit": vit,
    "mlp": mlp,
    "convnet": convnet,
}
TP2, TP4 = ParallelDims(tp=2), ParallelDims(tp=4)
DIMS = {
    "tp 2": TP2,
    "tp 4": TP4,
    "ddp+tp 2x2": ParallelDims(dp_replicate=2, tp=2),
    "fsdp+tp 2x2": ParallelDims(dp_shard=2, tp=2),
    "hybrid 2x2x2": ParallelDims(2, 2, 2),
}
SPLIT_DIM = {
    # (out, in): the first layer of a pair is split along its outputs, with its bias, the second along its inputs
    r"blocks\.\d+\.attn\.[qkv]\.(weight|bias)": 0,
    r"blocks\.\d+\.attn\.out\.weight": 1,
    r"blocks\.\d+\.mlp\.(gate|up)\.(weight|bias)": 0,
    r"blocks\.\d+\.mlp\.down\.weight": 1,
    # the mlp of three hidden layers and a head: two pairs
    r"hidden\.[02]\.(weight|bias)": 0,
    r"hidden\.1\.weight": 1,
    # the convnet's one hidden layer
    r"hidden\.(weight|bias)": 0,
}
HEAD_DIM = {"gpt": 0, "gpt tied": 0, "gpt grouped": 0, "mlp": 1, "convnet": 1}


def split_dim(kind: str, name: str) -> int | None:
    """Along which dim tensor parallelism splits a parameter; None: it is whole on every rank."""
    if name == "tok_emb.weight":
        return 0
    if name == "head.weight":
        return HEAD_DIM.get(kind)
    return next((dim for pattern, dim in SPLIT_DIM.items() if re.fullmatch(pattern, name)), None)


def part(shape: tuple[int, ...], dim: int | None, *, rank: int, ranks: int) -> tuple[int, ...]:
    """What is left of a shape on one rank; of what does not divide, the vocabulary, the last ones get less."""
    if dim is None:
        return shape
    each = math.ceil(shape[dim] / ranks)
    here = max(0, min(each, shape[dim] - rank * each))
    return (*shape[:dim], here, *shape[dim + 1 :])


def local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


@pytest.mark.parametrize("dims", [TP2, TP4], ids=["tp 2", "tp 4"])
@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_gets_the_part_that_the_style_says(simulated: Start, kind: str, dims: ParallelDims) -> None:
    shapes = {name: tuple(p.shape) for name, p in MODELS[kind]().named_parameters()}
    splits = {name for name in shapes if split_dim(kind, name) is not None}
    assert splits
    assert splits < shapes.keys()
    for rank in range(dims.world_size):
        mesh = simulated(rank, dims)
        model = MODELS[kind]()
        apply_plan(model, read_plan(model, {}, degree=dims.tp, sequence_parallel=None), mesh=mesh)
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes, "names and whole shapes"
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            expected = part(shapes[name], split_dim(kind, name), rank=rank, ranks=dims.tp)
            assert tuple(local(parameter).shape) == expected, (rank, name)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in MODELS for layout in ("ddp+tp 2x2", "fsdp+tp 2x2")),
        ("gpt tied", "hybrid 2x2x2"),
        ("vit", "hybrid 2x2x2"),
        *(pytest.param(k, "hybrid 2x2x2", marks=pytest.mark.proofs) for k in ("gpt", "gpt grouped", "mlp", "convnet")),
    ],
)
def test_the_parts_of_all_ranks_make_up_the_model(simulated: Start, kind: str, layout: str) -> None:
    """Every element is on as many ranks as hold replicas of it, and no rank holds much more than its share."""
    dims = DIMS[layout]
    held: dict[str, list[Tensor]] = {}
    for rank in range(dims.world_size):
        mesh = simulated(rank, dims)
        model = MODELS[kind]()
        lay_out(model, Layout(), mesh=mesh, dims=dims, compute_dtype=None)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.device_mesh.mesh_dim_names == tuple(a for a, degree in dims.shape.items() if degree > 1)
            shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            assert shape == tuple(local(parameter).shape), name
            seen = torch.zeros(parameter.shape, dtype=torch.int8)
            seen[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))] = 1
            held.setdefault(name, []).append(seen)
    for name, parameter in MODELS[kind]().named_parameters():
        replicas = dims.dp_replicate * (1 if split_dim(kind, name) is not None else dims.tp)
        assert (torch.stack(held[name]).sum(0) == replicas).all(), name
        share = math.ceil(parameter.numel() * replicas / dims.world_size)
        # of 19 tokens one rank has 10
        assert max(int(seen.sum()) for seen in held[name]) <= share + parameter[0].numel(), name


@pytest.mark.parametrize("layout", DIMS)
def test_tied_parameters_stay_one(simulated: Start, layout: str) -> None:
    dims = DIMS[layout]
    model = gpt(tie_embeddings=True)
    lay_out(model, Layout(), mesh=simulated(0, dims), dims=dims, compute_dtype=None)
    assert model.head.weight is model.tok_emb.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tok_emb.weight" in names
    assert "head.weight" not in names


DRESSES = {
    "none": Layout(),
    "selective": Layout(activation_checkpointing="selective"),
    "full": Layout(activation_checkpointing="full"),
    "compile": Layout(compile=True),
    "both": Layout(activation_checkpointing="full", compile=True),
}


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("dims", [ParallelDims(), *DIMS.values()], ids=["one device", *DIMS])
def test_names_outlast_recomputation_and_compilation(simulated: Start, dims: ParallelDims, dress: str) -> None:
    for model in (gpt(tie_embeddings=True), vit()):
        root = LanguageModel(model)
        parameters, state = [name for name, _ in root.named_parameters()], list(root.state_dict())
        mesh = None if dims.world_size == 1 else simulated(dims.world_size - 1, dims)
        before = [block.forward for block in model.sharding_blocks()]
        lay_out(root, DRESSES[dress], mesh=mesh, dims=dims, compute_dtype=None)
        assert [name for name, _ in root.named_parameters()] == parameters
        assert list(root.state_dict()) == state
        after = [block.forward for block in model.sharding_blocks()]
        changed = [old != new for old, new in zip(before, after, strict=True)]
        assert changed == [dress != "none"] * 2, "each block is dressed"


@pytest.mark.parametrize(("dims", "grouped"), [(TP2, True), (TP4, False)], ids=["tp 2, grouped heads", "tp 4"])
def test_gradients_of_all_ranks_computed_in_one_process(simulated: Start, dims: ParallelDims, grouped: bool) -> None:
    """Forward and backward pass on tensors that hold every rank's value at once (torch's local-tensor mode).

    The vocabulary stays whole: what a rank holds of it is a number here that the mode has no single value for.
    """
    torch.set_default_dtype(torch.float64)
    alone, split = (gpt(n_kv_head=2 if grouped else 4) for _ in range(2))
    materialise(alone, seed=3, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    tokens, targets = (torch.randint(19, (2, 8), generator=generator) for _ in range(2))
    expected = nn.functional.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    plan = {k: v for k, v in alone.tensor_parallel_plan().items() if v in ("region", "colwise", "rowwise")}
    simulated(0, dims)
    with LocalTensorMode(dims.world_size):
        mesh = build_mesh(dims, device_type="cpu")
        split.to_empty(device="cpu")
        split.init_buffers()
        split.load_state_dict(alone.state_dict())
        lay_out(split, Layout(plan=plan), mesh=mesh, dims=dims, compute_dtype=None)
        loss = nn.functional.cross_entropy(split(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        sum_partial_gradients(partial_parameters(split), mesh["tp"].get_group())
        everyone = {name: p.grad.full_tensor() for name, p in split.named_parameters() if p.grad is not None}
        assert isinstance(local(split.blocks[0].attn.q.weight), LocalTensor)
    assert isinstance(loss, LocalTensor)
    for rank, value in loss._local_tensors.items():
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=0, msg=f"rank {rank}")
    assert everyone.keys() == dict(alone.named_parameters()).keys()
    for name, parameter in alone.named_parameters():
        theirs = everyone[name]
        assert isinstance(theirs, LocalTensor)
        assert len(theirs._local_tensors) == dims.tp
        for rank, value in theirs._local_tensors.items():
            torch.testing.assert_close(value, parameter.grad, rtol=1e-11, atol=1e-16, msg=f"{name} on rank {rank}")


# ---- what is refused -----------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """A user's model without a plan."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8)
        self.third = nn.Linear(8, 12)
        if tied:
            self.third.weight = self.first.weight


class Attending(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **options)  # type: ignore[arg-type]


GPT_PLAN = gpt().tensor_parallel_plan()
VIT_PLAN = vit().tensor_parallel_plan()


def without(plan: dict[str, str], *patterns: str) -> dict[str, str]:
    return {pattern: style for pattern, style in plan.items() if pattern not in patterns}


def limited(**options: object) -> nn.Module:
    model = gpt()
    for name, value in options.items():
        setattr(model.tok_emb, name, value)
    return model


def refusal(
    model: nn.Module,
    *,
    plan: dict[str, str] | None = None,
    dims: ParallelDims = TP2,
    sequence_parallel: bool | None = None,
) -> str:
    before = {name: (type(p), tuple(p.shape)) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        check_layout(model, Layout(plan=plan or {}, sequence_parallel=sequence_parallel), dims)
    assert {name: (type(p), tuple(p.shape)) for name, p in model.named_parameters()} == before, "nothing is changed"
    message = str(caught.value)
    assert "\n" not in message
    return message


PLANS_REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, str], list[str]]] = {
    "a style that does not exist": (gpt, {**GPT_PLAN, "head": "colwize"}, ["'head'", "'colwize'", "'colwise'"]),
    "a style that resembles none": (gpt, {**GPT_PLAN, "head": "quux"}, ["'quux'", "colwise, rowwise, vocab_embedding"]),
    "a pattern that matches nothing": (
        gpt,
        {"block.*.attn.q": "colwise"},
        ["'block.*.attn.q'", "GPT", "'blocks.*.attn.q'"],
    ),
    "a choice that matches nothing": (
        gpt,
        {"blocks.*.attn.{q,query}": "colwise"},
        ["'blocks.*.attn.query'", "'blocks.*.attn.q'"],
    ),
    "two patterns for one module": (
        gpt,
        {**GPT_PLAN, "blocks.0.attn.q": "rowwise"},
        ["'blocks.*.attn.{q,k,v}' (colwise)", "'blocks.0.attn.q' (rowwise)", "blocks.0.attn.q", "leave one of them"],
    ),
    "colwise on an embedding": (gpt, {"tok_emb": "colwise"}, ["tok_emb", "Embedding", "colwise", "Linear"]),
    "rowwise on a convolution": (vit, {**VIT_PLAN, "patch_emb": "rowwise"}, ["patch_emb", "Conv2d", "rowwise"]),
    "an embedding's style on a layer": (vit, {**VIT_PLAN, "head": "vocab_embedding"}, ["head", "Linear", "Embedding"]),
    "local on what has parameters": (
        mlp,
        {"hidden.0": "colwise", "hidden.1": "rowwise", "head": "local"},
        ["head", "Linear", "has parameters", "local"],
    ),
    "nothing is split": (gpt, {"norm": "replicate"}, ["GPT", "colwise and rowwise"]),
    "tied, split along two dims": (
        lambda: Pairs(tied=True),
        {"first": "colwise", "second": "rowwise", "third": "rowwise"},
        ["first.weight (colwise)", "third.weight (rowwise)", "like styles"],
    ),
    "tied, one of them whole": (
        lambda: gpt(tie_embeddings=True),
        without(GPT_PLAN, "head"),
        ["tok_emb.weight (vocab_embedding)", "head.weight (replicate)", "like styles"],
    ),
    "an embedding that renormalises": (lambda: limited(max_norm=1.0), {}, ["tok_emb", "max_norm=1.0"]),
    "an embedding with sparse gradients": (lambda: limited(sparse=True), {}, ["tok_emb", "sparse=True"]),
    "packed attention without its end": (Attending, {"attn": "packed_attention"}, ["attn.out_proj: rowwise"]),
    "packed attention of another kind": (
        lambda: Attending(kdim=4),
        {"attn": "packed_attention", "attn.out_proj": "rowwise"},
        ["attn", "kdim"],
    ),
}


@pytest.mark.parametrize("case", PLANS_REFUSED)
def test_a_plan_that_does_not_fit_is_refused(case: str) -> None:
    build, plan, said = PLANS_REFUSED[case]
    message = refusal(build(), plan=plan)
    assert all(text in message for text in said), message


def test_a_model_without_a_plan_is_told_how_to_start_one() -> None:
    message = refusal(Pairs())
    assert message.startswith("Pairs has no tensor-parallel plan")
    assert "first, second, third" in message
    (start,) = re.findall(r"'strategy\.plan=\{(.*?)\}'", message)
    plan = dict(entry.split(":") for entry in start.split(","))
    assert read_plan(Pairs(), plan, degree=2, sequence_parallel=None).styles == plan


def test_a_model_without_linear_layers_is_told_what_else_there_is() -> None:
    message = refusal(nn.Sequential(nn.Conv2d(1, 2, 3)))
    assert "no linear layers" in message
    assert "strategy=ddp or fsdp" in message


SIZES_REFUSED: dict[str, tuple[Callable[[], nn.Module], int, list[str]]] = {
    "heads": (lambda: vit(n_head=2), 4, ["blocks.*.attn", "n_head 2", "strategy.tp=4", "type strategy.tp=2"]),
    "heads, three ranks": (vit, 3, ["n_head 4", "strategy.tp=3", "type strategy.tp=2|4"]),
    "key-value heads": (lambda: gpt(n_kv_head=2), 4, ["n_kv_head 2", "strategy.tp=4", "type strategy.tp=2"]),
    "one key-value head": (lambda: gpt(n_kv_head=1), 2, ["n_kv_head 1", "strategy.tp=2", "strategy=ddp"]),
    "hidden features": (
        lambda: gpt(hidden=6),
        4,
        ["blocks.0.mlp.gate", "out_features 6", "strategy.tp=4", "type strategy.tp=2"],
    ),
    "a layer's features": (lambda: mlp(width=9), 2, ["hidden.0", "out_features 9", "strategy.tp=3|9"]),
    "context": (
        lambda: gpt(context=6),
        4,
        ["context 6", "strategy.tp=4", "strategy.tp=2", "strategy.sequence_parallel=false"],
    ),
}


@pytest.mark.parametrize("case", SIZES_REFUSED)
def test_a_size_that_does_not_divide_is_refused_with_the_legal_degrees(case: str) -> None:
    build, tp, said = SIZES_REFUSED[case]
    message = refusal(build(), dims=ParallelDims(tp=tp))
    assert all(text in message for text in said), message
    # What it says to type is accepted, and what it does not name is not.
    legal = {int(degree) for degree in re.findall(r"\d+", "".join(re.findall(r"type strategy\.tp=([\d|]+)", message)))}
    for degree in range(2, 13):
        if degree in legal:
            check_layout(build(), Layout(), ParallelDims(tp=degree))
        else:
            refusal(build(), dims=ParallelDims(tp=degree))


def test_what_splits_nothing_need_not_divide() -> None:
    for model in (gpt(vocab_size=7), gpt(vocab_size=19)):
        check_layout(model, Layout(), TP4)  # the vocabulary may be uneven
    check_layout(gpt(context=6), Layout(sequence_parallel=False), TP4)
    check_layout(mlp(width=9), Layout(), ParallelDims(dp_shard=4))  # nothing is split over tp


@pytest.mark.parametrize("model", [vit(), mlp(), gpt()], ids=["vit", "mlp", "gpt"])
def test_sequence_parallel_where_the_plan_does_not_allow_it(model: nn.Module) -> None:
    plan = {} if not isinstance(model, GPT) else without(GPT_PLAN, "tok_emb")
    message = refusal(model, plan=plan, sequence_parallel=True)
    assert message.startswith("strategy.sequence_parallel=true, but the plan of ")
    assert "vocab_embedding" in message
    check_layout(model, Layout(plan=plan, sequence_parallel=None), TP2)


@pytest.mark.parametrize("dims", [ParallelDims(dp_shard=3, tp=2), ParallelDims(2, 3, 2)], ids=["fsdp+tp", "hybrid"])
def test_shards_of_split_layers_have_to_be_even(dims: ParallelDims) -> None:
    """A split layer is sharded along the dim that is not split, or along the same if that divides twice."""
    message = refusal(gpt(hidden=8), dims=dims)
    assert message == (
        "tok_emb.weight (19 x 16), split over strategy.tp=2, does not divide into strategy.dp_shard=3 even shards: "
        "type strategy.dp_shard=2|4, or strategy=ddp+tp"
    )
    assert "strategy.dp_replicate" not in message
    check_layout(gpt(vocab_size=19, width=24, hidden=12), Layout(), dims)
    check_layout(gpt(vocab_size=24, width=48, hidden=48), Layout(), dims)


@pytest.mark.parametrize(("rank", "dims"), [(0, ParallelDims(dp_shard=3, tp=2))])
def test_what_is_accepted_can_be_laid_out(simulated: Start, rank: int, dims: ParallelDims) -> None:
    model = gpt(vocab_size=19, width=24, hidden=12)
    lay_out(model, Layout(), mesh=simulated(rank, dims), dims=dims, compute_dtype=None)
    assert Counter(type(p) for p in model.parameters()) == {DTensor: len(list(model.parameters()))}


# ---- before launch -------------------------------------------------------------------------------------------------


BEFORE_LAUNCH: dict[str, tuple[list[str], list[str]]] = {
    "one device": (["strategy=tp", "trainer.devices=1"], ["strategy=tp on 1 device", "trainer.devices=2"]),
    "two nodes": (["strategy=tp", "trainer.num_nodes=2"], ["trainer.num_nodes=2", "strategy=fsdp+tp"]),
    "a degree without its strategy": (["strategy.tp=3"], ["tp 3", "strategy=tp"]),
    "a size that only the data tell": (
        ["strategy=tp", "experiment=text_gpt", "model.n_kv_head=1"],
        ["n_kv_head 1", "strategy.tp=2"],
    ),
}


@pytest.mark.parametrize("case", BEFORE_LAUNCH)
def test_what_cannot_be_split_ends_before_any_rank_starts(train_py: Callable[..., TrainRun], case: str) -> None:
    overrides, said = BEFORE_LAUNCH[case]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = train_py(*overrides, ok=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 2, run
    (line,) = (run.stdout + run.stderr).splitlines()
    assert line.startswith("error: ")
    assert all(text in line for text in said), line
    assert not run.output_root.exists(), "no run has begun"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 12, "seconds of a processor"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model=gpt", "data=synthetic_tokens", "task=language_model", "strategy.plan={foo:colwise}"],
            "strategy.plan: 'foo' matches no module of GPT",
        ),
        (["model=resnet18"], "ResNet has no tensor-parallel plan; its linear layers are fc: "),
        (["model=mlp", "model.width=9"], "hidden.0 has out_features 9, which strategy.tp=2 does not divide"),
        (["model=vit", "model.n_head=1"], "blocks.*.attn has n_head 1, which strategy.tp=2 does not divide"),
        (["model=vit", "strategy.sequence_parallel=true"], "strategy.sequence_parallel=true, but the plan of ViT has "),
        (["experiment=text_gpt", "model.context=9"], "sequence has context 9, which strategy.tp=2 does not divide"),
        (["experiment=text_gpt", "strategy.plan={head:colwize}"], "strategy.plan: 'head' has the style 'colwize'"),
    ],
)
def test_a_whole_configuration_is_checked_against_the_degrees(overrides: list[str], said: str) -> None:
    config: Config = compose(["strategy=tp", *overrides])
    with pytest.raises(ConfigError) as caught:
        check_slots(config, TP2)
    assert str(caught.value).startswith(said)
    check_slots(config, ParallelDims())  # on one device there is nothing to split


def test_configurations_that_can_be_split_pass() -> None:
    for overrides in (
        [],
        ["model=vit"],
        ["model=mlp"],
        ["experiment=text_gpt"],
        ["experiment=text_gpt", "model.n_kv_head=2"],
    ):
        for dims in (TP2, ParallelDims(dp_shard=2, tp=2)):
            check_slots(compose(["strategy=tp", *overrides]), dims)
