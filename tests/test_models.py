"""Models: their initial weights, their shapes, what attention may see, and what they say to illegal sizes."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models import resnet
from shardwise.models.batch_norm import batch_statistics_layers, group_norm
from shardwise.models.convnet import ConvNet
from shardwise.models.gpt import GPT, Rotary, swiglu_hidden
from shardwise.models.mlp import MLP
from shardwise.models.vit import ViT

CONF = Path(__file__).parents[1] / "conf"


def images() -> Tensor:
    return torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))


BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[int, ...]]] = {
    "mlp": (lambda: MLP(5, in_channels=2, image_size=8, width=16, depth=3), images, (3, 5)),
    "convnet": (lambda: ConvNet(5, in_channels=2, image_size=8, width=4), images, (3, 5)),
    "vit-cls": (lambda: ViT(5, image_size=8, in_channels=2, patch_size=4, n_layer=2, width=16), images, (3, 5)),
    "vit-mean": (lambda: ViT(5, image_size=8, in_channels=2, n_layer=2, width=16, pool="mean"), images, (3, 5)),
    "gpt": (lambda: GPT(11, context=8, n_layer=2, width=32, n_kv_head=2), tokens, (3, 7, 11)),
    "gpt-tied": (lambda: GPT(11, context=8, n_layer=2, width=32, tie_embeddings=True), tokens, (3, 7, 11)),
}
each_model = pytest.mark.parametrize("name", BUILDERS)


def initialise(model: nn.Module, *, seed: int) -> nn.Module:
    """Fill every parameter from a generator seeded by (seed, name), as the framework does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            model.init_parameter(name, parameter, generator)  # type: ignore[operator]
    model.init_buffers()  # type: ignore[operator]
    return model


def build(name: str, *, seed: int = 0) -> nn.Module:
    return initialise(BUILDERS[name][0](), seed=seed)


@each_model
def test_logits_have_the_documented_shape_and_start_near_uniform(name: str) -> None:
    _, inputs, shape = BUILDERS[name]
    logits = build(name)(inputs())
    assert logits.shape == shape
    loss = F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1], dtype=torch.long).flatten())
    assert loss.item() == pytest.approx(torch.tensor(float(shape[-1])).log().item(), abs=0.2)


@each_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, (_, inputs, _) = build(name), BUILDERS[name]
    logits = model(inputs())
    F.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % logits.shape[-1]).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        # A key's bias adds the same to all scores of a query: softmax ignores it.
        assert parameter.grad.abs().max() > (-1 if parameter_name.endswith("attn.k.bias") else 0), parameter_name


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_start_on_the_meta_device_equals_one_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    builder, inputs, _ = BUILDERS[name]
    direct = initialise(builder().to(dtype), seed=3)
    with torch.device("meta"):
        model = builder().to(dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan)  # so that what is never filled shows
    initialise(model, seed=3)
    for (left_name, left), (right_name, right) in zip(
        [*direct.named_parameters(), *direct.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    ):
        assert left_name == right_name
        assert left.dtype == right.dtype == dtype
        assert torch.equal(left, right), left_name
    x = inputs() if inputs is tokens else inputs().to(dtype)
    assert torch.equal(direct(x), model(x))


@each_model
def test_the_seed_decides_the_weights(name: str) -> None:
    first, again, other = build(name, seed=0), build(name, seed=0), build(name, seed=1)
    for parameter_name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(parameter_name))
        drawn = parameter.numel() > 1 and parameter.std() > 0  # norms and biases are constants
        assert torch.equal(parameter, other.get_parameter(parameter_name)) != drawn, parameter_name


@each_model
def test_norms_start_as_ones_and_biases_as_zeros(name: str) -> None:
    model = build(name)
    for parameter_name, parameter in model.named_parameters():
        owner = model.get_submodule(parameter_name.rpartition(".")[0])
        if parameter_name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), parameter_name
        elif isinstance(owner, nn.LayerNorm | nn.RMSNorm):
            assert torch.equal(parameter, torch.ones_like(parameter)), parameter_name
        else:
            assert parameter.std() > 0, parameter_name


def test_gpt_scales_what_ends_a_residual_branch() -> None:
    model = initialise(GPT(64, context=8, n_layer=8, width=128), seed=0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            expected = 0.02 / 4 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.1 * expected), name


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_deep_mlp_keeps_the_scale_of_its_features(activation: str) -> None:
    model = initialise(MLP(5, in_features=256, width=256, depth=8, activation=activation), seed=0)
    assert isinstance(model, MLP)
    features = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for layer in model.hidden:
        features = model.activation(layer(features))
    assert 0.3 < features.square().mean().sqrt() < 3


def test_dropout_acts_in_training_only() -> None:
    for model, inputs in (
        (MLP(5, in_channels=2, image_size=8, dropout=0.5), images()),
        (ConvNet(5, in_channels=2, image_size=8, dropout=0.5), images()),
        (ViT(5, image_size=8, in_channels=2, dropout=0.5), images()),
        (GPT(11, context=8, dropout=0.5), tokens()),
    ):
        initialise(model, seed=0)
        assert not torch.equal(model(inputs), model(inputs))
        model.eval()
        assert torch.equal(model(inputs), model(inputs))


# Attention


def test_gpt_does_not_look_ahead_but_does_look_back() -> None:
    model, x = build("gpt"), tokens()
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(dim=-1).all()


def test_rotary_scores_depend_on_the_distance_only() -> None:
    rotary = Rotary(16, context=64, theta=10_000.0).double()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, dtype=torch.float64, generator=generator).expand(1, 1, 64, 16) for _ in range(2))
    scores = (rotary(q) @ rotary(k).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=0, atol=1e-12)
    assert scores[0, 0] == pytest.approx((q[0, 0, 0] @ k[0, 0, 0]).item())
    assert (scores[7, 0] - scores[0, 0]).abs() > 1e-3


def test_rotary_tables_keep_their_precision_when_the_model_is_cast() -> None:
    exact = Rotary(16, context=300, theta=500.0).double()
    angles = torch.outer(torch.arange(300).double(), 500.0 ** -(torch.arange(8).double() / 8))
    torch.testing.assert_close(exact.cos_TK, angles.cos(), rtol=0, atol=1e-15)
    low = Rotary(16, context=300, theta=500.0).to(torch.bfloat16)
    assert low.cos_TK.dtype == torch.float32
    assert torch.equal(low.sin_TK, exact.sin_TK.float())
    assert low(torch.ones(1, 1, 5, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not low.state_dict()


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    grouped = GPT(11, context=8, n_layer=1, n_head=4, n_kv_head=2, width=32).double()
    full = GPT(11, context=8, n_layer=1, n_head=4, n_kv_head=4, width=32).double()
    initialise(grouped, seed=0)
    weights = grouped.state_dict()
    for letter in ("k", "v"):
        name = f"blocks.0.attn.{letter}.weight"
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=0, atol=1e-14)


def test_gpt_attention_equals_the_formula() -> None:
    attention = initialise(GPT(11, context=8, n_layer=1, n_head=2, width=8).double(), seed=0).get_submodule(
        "blocks.0.attn"
    )
    rotary = Rotary(4, context=8, theta=10_000.0).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30
    out = torch.zeros(2, 5, 8, dtype=torch.float64)
    for head in (slice(0, 4), slice(4, 8)):
        q, k, v = (x @ attention.get_parameter(f"{letter}.weight")[head].T for letter in "qkv")
        q, k = rotary(q[:, None])[:, 0], rotary(k[:, None])[:, 0]
        scores = (q @ k.transpose(1, 2) / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        out[..., head] = scores.softmax(dim=-1) @ v
    torch.testing.assert_close(attention(x, rotary), out @ attention.get_parameter("out.weight").T, rtol=0, atol=1e-13)


def test_tied_embeddings_are_one_parameter_that_collects_both_gradients() -> None:
    tied = GPT(11, context=8, n_layer=1, width=32, tie_embeddings=True).double()
    untied = GPT(11, context=8, n_layer=1, width=32).double()
    assert [name for name, _ in tied.named_parameters() if name.startswith(("tok_emb", "head"))] == ["tok_emb.weight"]
    initialise(tied, seed=0)
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    both = untied.get_parameter("tok_emb.weight").grad, untied.get_parameter("head.weight").grad
    assert both[0] is not None
    assert both[1] is not None
    torch.testing.assert_close(tied.get_parameter("tok_emb.weight").grad, both[0] + both[1], rtol=0, atol=1e-14)


def test_vit_class_token_sees_every_patch() -> None:
    model, x = build("vit-cls"), images().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).all()


# The files in conf/model

COUNTS = {
    "gpt": ({"vocab_size": 256, "context": 128}, 0.92e6),
    "gpt_10m": ({"vocab_size": 256, "context": 128}, 10.8e6),
    "gpt_160m": ({"vocab_size": 50257, "context": 1024}, 162e6),
    "gpt_1b": ({"vocab_size": 128256, "context": 1024}, 1.236e9),  # as published for Llama 3.2 1B
    "llama3_8b": ({}, 8.03e9),  # this and the next two: as published
    "llama3_70b": ({}, 70.6e9),
    "llama3_405b": ({}, 405.9e9),
    "resnet18": ({"num_classes": 1000, "in_channels": 3}, 11_689_512),  # this and the next two: torchvision's tables
    "resnet50": ({"num_classes": 1000, "in_channels": 3}, 25_557_032),
    "vit_b_16": ({"num_classes": 1000, "image_size": 224}, 86_567_656),
    "vit": ({"num_classes": 10, "image_size": 8, "in_channels": 1}, 202e3),
    "convnet": ({"num_classes": 10, "image_size": 8, "in_channels": 1}, 339e3),
    "mlp": ({"num_classes": 10, "image_size": 8, "in_channels": 1}, 85e3),
}


@pytest.fixture(scope="module")
def model_config() -> Callable[[str], dict]:
    def config(choice: str) -> dict:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = OmegaConf.to_container(compose(overrides=[f"+model={choice}"]).model, resolve=True)
        assert isinstance(composed, dict)
        return composed

    return config


def test_every_model_file_is_counted_here() -> None:
    models = {path.stem for path in (CONF / "model").glob("*.yaml")} - {"custom", "none"}  # a user's, or none at all
    assert models == set(COUNTS)


@pytest.mark.parametrize("choice", COUNTS)
def test_a_model_file_builds_a_model_of_its_size(choice: str, model_config: Callable[[str], dict]) -> None:
    arguments, expected = COUNTS[choice]
    config = model_config(choice)
    assert {key for key, value in config.items() if value == "auto"} == set(arguments)
    with torch.device("meta"):
        model = instantiate(config | arguments)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(expected, rel=0.005)


def test_swiglu_hidden_is_llamas() -> None:
    assert swiglu_hidden(4096, multiple_of=256) == 11008  # Llama 7B
    assert swiglu_hidden(5120, multiple_of=256) == 13824  # Llama 13B


# Residual networks


def test_the_output_depends_on_the_micro_batch_exactly_when_layers_are_named() -> None:
    x = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for norm, named in (("batch", 20), ("group", 0)):
        model = resnet.resnet18(5, in_channels=1, norm=norm, small_images=True)
        assert len(batch_statistics_layers(model)) == named
        whole, halves = model(x), torch.cat([model(x[:2]), model(x[2:])])
        assert whole.shape == (4, 5)
        assert torch.allclose(whole, halves, rtol=0, atol=1e-4) == (norm == "group")


def test_batch_statistics_layers_are_named_by_their_path() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.Sequential(nn.SyncBatchNorm(4)))
    assert batch_statistics_layers(model) == ["1.0"]
    assert batch_statistics_layers(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))) == []


def test_group_norm_divides_the_channels() -> None:
    assert {c: group_norm(c).num_groups for c in (64, 2048, 48, 20, 7, 37)} == {
        64: 32, 2048: 32, 48: 24, 20: 20, 7: 7, 37: 1
    }  # fmt: skip


def test_small_images_keep_their_size_in_the_stem() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for small, size in ((True, 32), (False, 8)):
        model = resnet.resnet50(5, norm="group", small_images=small)
        assert model.maxpool(model.conv1(x)).shape == (1, 64, size, size)


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPT(11, context=8, n_head=3),
            "model.n_head=3 does not divide model.width=128: use one of 1, 2, 4,",
        ),
        (
            lambda: GPT(11, context=8, n_kv_head=3),
            "model.n_kv_head=3 does not divide model.n_head=4: .* of 1, 2, 4",
        ),
        (
            lambda: GPT(11, context=8, n_head=4, width=12),
            "model.n_head=4 makes heads .* 12 / 4 = 3, .* one of 1, 2, 3, 6",
        ),
        (lambda: GPT(11, context=8, n_head=1, width=3), "use an even model.width"),
        (lambda: GPT(0, context=8), "model.vocab_size=0: must be an integer of at least 1"),
        (lambda: GPT(11, context=8, hidden=0), "model.hidden=0"),
        (lambda: GPT(11, context=8, dropout=1.0), "model.dropout=1.0: must be at least 0 and below 1"),
        (lambda: GPT("auto", context=8), "model.vocab_size=auto: must be an integer"),  # type: ignore[arg-type]
        (
            lambda: ViT(5, image_size=8, in_channels=1, patch_size=3),
            "model.patch_size=3 does not divide model.image_size=8: use one of 1, 2, 4, 8",
        ),
        (lambda: ViT(5, image_size=8, in_channels=1, n_head=5), "model.n_head=5 does not divide model.width=64"),
        (lambda: ViT(5, image_size=8, in_channels=1, pool="max"), "model.pool=max: must be one of cls, mean"),
        (lambda: ViT(5, image_size=8, in_channels=1, mlp_ratio=0.0), "model.mlp_ratio=0.0"),
        (lambda: ConvNet(5, in_channels=1, image_size=1), "model.image_size=1: must be at least 2"),
        (lambda: MLP(5, in_channels=1), "give in_features, or both of the others"),
        (
            lambda: MLP(5, in_features=4, activation="swish"),
            "activation=swish: must be one of relu, gelu, silu, tanh",
        ),
        (lambda: resnet.resnet18(5, norm="layer"), "model.norm=layer: must be one of batch, group"),
    ],
)
def test_an_illegal_size_is_one_line_that_names_the_legal_ones(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_an_input_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="input of 9 tokens: this model's context is 8"):
        build("gpt")(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"images of shape \(2, 9, 8\): this model takes \(C, H, W\) = \(2, 8, 8\)"):
        build("vit-cls")(torch.zeros(1, 2, 9, 8))
