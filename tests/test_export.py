"""Weights leave as safetensors and come back, bit for bit: of plain models and as Llama's, at every layout."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from shardwise.__main__ import main
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT
from shardwise.weights import destination
from shardwise.weights import export as exporting
from shardwise.weights.export import export
from shardwise.weights.loading import InitFrom, check_weights, load_weights
from training import (
    CONTEXT,
    LAYOUTS,
    PLANS,
    VOCABULARY,
    LanguageModel,
    build_module,
    digits,
    make_trainer,
    on_layout,
    shares,
    tuned,
    whole,
)

STEPS = 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "context": CONTEXT, "n_layer": 2, "n_head": 4, "width": 16, "multiple_of": 8,
}  # fmt: skip


def config_of(kind: str) -> dict[str, Any]:
    """What a run's state.json says of the model."""
    if not kind.startswith("gpt"):
        return {"model": {"_target_": f"shardwise.models.{kind}"}}
    parts = kind.split("-")
    own = {"n_kv_head": 2 if "gqa" in parts else None, "tie_embeddings": "tied" in parts}
    return {
        "model": {"_target_": "shardwise.models.gpt.GPT", **SIZES, **own, "context": "auto"},
        "data": {"context": CONTEXT},
    }


def trained(kind: str, layout: str, folder: str, init_from: str | None = None, steps: int = STEPS) -> dict[str, Tensor]:
    """Train for a few steps and save; the whole parameters and buffers of the end, by name in the plain model."""
    torch.manual_seed(11)
    module = build_module(kind)
    facts = {"config": config_of(kind), "run_id": "r1"}
    callbacks: list[Any] = [SaveCheckpoints(folder, facts=lambda: facts)]
    if init_from is not None:
        callbacks.append(InitFrom(init_from))
    options: dict[str, Any] = {"precision": "64-true", "max_steps": steps, "strategy": {"plan": PLANS.get(kind)}}
    trainer = make_trainer(layout, callbacks=callbacks, **options)
    tp = LAYOUTS[layout].tp
    if kind == "convnet":
        trainer.fit(module, datamodule=digits(tp=tp))
    else:
        trainer.fit(module, shares(kind, steps, tp=tp))
    callbacks[0].wait()
    state = {name: whole(tensor) for name, tensor in module.state_dict().items()}
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def started(kind: str, layout: str, source: str) -> dict[str, Tensor]:
    """What a run that starts from ``source`` has before its first step, whole, by name in the plain model."""
    found: dict[str, Tensor] = {}

    class Look(InitFrom):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.update({n.removeprefix("model."): whole(t) for n, t in pl_module.state_dict().items()})

    torch.manual_seed(23)
    module, tp = build_module(kind), LAYOUTS[layout].tp
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 1, "strategy": {"plan": PLANS.get(kind)}}
    trainer = make_trainer(layout, callbacks=[Look(source)], **options)
    trainer.fit(module, digits(tp=tp)) if kind == "convnet" else trainer.fit(module, shares(kind, 1, tp=tp))
    return found


def plain_model(kind: str) -> nn.Module:
    """The plain model, in float64, with weights of its own."""
    torch.manual_seed(47)
    model: nn.Module = build_module(kind).model  # type: ignore[assignment]
    if any(tensor.is_meta for tensor in model.parameters()):
        model = model.to_empty(device="cpu")
    model = model.double()
    with torch.no_grad():
        for tensor in model.parameters():
            nn.init.normal_(tensor)
    if hasattr(model, "init_buffers"):
        model.init_buffers()
    return model.eval()


def inputs(kind: str) -> Tensor:
    torch.manual_seed(5)
    if kind.startswith("gpt"):
        return torch.randint(VOCABULARY, (3, CONTEXT))
    return torch.randn(3, *((3, 32, 32) if kind == "vit_b_16" else (1, 8, 8)), dtype=torch.float64)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a small gpt with tied ends and grouped heads, trained on one device."""
    folder = tmp_path_factory.mktemp("tied") / "checkpoints"
    trained("gpt-tied-gqa", "one", str(folder))
    return folder


# ---- the plain layout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "one") for kind in ("gpt-gqa", "gpt-tied-gqa", "vit", "mlp", "convnet", "vit_b_16")),
        *((kind, "fsdp+tp4") for kind in ("gpt-tied-gqa", "vit_b_16", "vit")),
        ("convnet", "fsdp2"),
    ],
)
def test_the_plain_model_computes_what_was_trained(kind: str, layout: str, pool: Any, tmp_path: Path) -> None:
    end = on_layout(pool, trained, layout, kind, layout, str(tmp_path / "checkpoints"))[0]
    export(str(tmp_path / "checkpoints" / "last"), str(tmp_path / "out" / "model.safetensors"))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert same(loaded, end)
    theirs, ours, x = plain_model(kind), plain_model(kind), inputs(kind)
    theirs.load_state_dict(end)
    before = ours(x)
    ours.load_state_dict(loaded)
    assert torch.equal(ours(x), theirs(x))
    assert not torch.equal(ours(x), before)
    load_model(again := plain_model(kind), tmp_path / "out" / "model.safetensors", strict="tied" not in kind)
    assert torch.equal(again(x), theirs(x))


def test_the_header_says_what_it_is(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(tied), "--to", str(target)]) == 0
    assert f"{target}: 21 tensors, " in (said := capsys.readouterr().out)
    assert said.endswith("from step 2 of r1\n")
    with safe_open(target, "pt") as stream:
        facts = stream.metadata()
    assert (facts["format"], facts["step"], facts["run_id"]) == ("pt", "2", "r1")
    assert json.loads(facts["model"])["n_kv_head"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_dtype(dtype: str, tied: Path, tmp_path: Path) -> None:
    export(str(tied), str(tmp_path / "a.safetensors"))
    export(str(tied), str(tmp_path / "b.safetensors"), dtype=dtype)
    wide, narrow = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert same(narrow, {name: tensor.to(getattr(torch, dtype)) for name, tensor in wide.items()})


def test_whole_numbers_keep_their_dtype(tmp_path: Path) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), 1e6))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("none", torch.zeros(0, 3))

    folder = saved_model(Counted(), tmp_path / "checkpoints")
    export(folder, str(tmp_path / "model.safetensors"), dtype="bfloat16")
    loaded = load_file(tmp_path / "model.safetensors")
    assert (loaded["count"].item(), loaded["count"].dtype, loaded["none"].shape) == (7, torch.int64, (0, 3))
    with pytest.raises(ConfigError, match=r"weight has a value of 1e\+06, and float16 ends at 6.55e\+04: type --dtype"):
        export(folder, str(tmp_path / "half.safetensors"), dtype="float16")
    assert [path.name for path in tmp_path.glob("*half*")] == []
    load_weights(filled := Counted(), str(tmp_path / "model.safetensors"))
    assert torch.equal(filled.weight, torch.full((2,), 1e6).bfloat16().float())


def saved_model(model: nn.Module, folder: Path, **state: Any) -> str:
    """A checkpoint that holds nothing but a model."""
    from shardwise.checkpoint.model_state import model_pieces, plain_names
    from shardwise.checkpoint.store import Store
    from shardwise.checkpoint.writer import Writer

    facts = {"format_version": 1, "step": 1, "mesh": {}, "trainer": {}, **state}
    manifest = {
        "step": 1,
        "run_id": "r1",
        "strategy": "ddp",
        "world_size": 1,
        "mesh": {},
        "metrics": {},
        "versions": {},
    }
    writer = Writer(Store(str(folder)), group=None, background=False, published=lambda name: None)
    writer.save("step_00000001", model_pieces(plain_names(model)), facts, manifest)
    writer.wait()
    return str(folder)


def test_a_large_model_becomes_files_and_an_index(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "SHARD_BYTES", 8000)
    monkeypatch.setattr(exporting, "READ_BYTES", 6000)
    out = tmp_path / "out"
    export(str(tied), str(tmp_path / "one.safetensors"))
    done = export(str(tied), str(out))
    assert [path.name for path in done.files] == sorted(path.name for path in out.iterdir())
    assert len(done.files) > 3
    assert all(path.stat().st_size < 8000 + 3000 for path in done.files[:-1])
    one = load_file(tmp_path / "one.safetensors")
    assert same({name: t for path in done.files[:-1] for name, t in load_file(path).items()}, one)
    assert check_weights(str(out)) == sorted(one)
    load_weights(model := plain_model("gpt-tied-gqa"), str(out))
    assert same(dict(model.state_dict()), one)
    # A second export leaves nothing of the first.
    monkeypatch.setattr(destination, "SHARD_BYTES", 10**9)
    export(str(tied), str(out), force=True)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


# ---- and back in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "fsdp2", "tp2", "fsdp+tp4"])
@pytest.mark.parametrize("kind", ["gpt-tied-gqa", "vit_b_16"])
def test_every_layout_starts_from_a_file(kind: str, layout: str, pool: Any, tmp_path: Path) -> None:
    end = trained(kind, "one", str(tmp_path / "checkpoints"))
    export(str(tmp_path / "checkpoints"), str(tmp_path / "model.safetensors"))
    for source in (tmp_path / "model.safetensors", tmp_path / "checkpoints" / "last"):
        assert same(on_layout(pool, started, layout, kind, layout, str(source))[0], end)


def test_llama_files_start_a_split_model(tied: Path, pool: Any, tmp_path: Path) -> None:
    export(str(tied), str(tmp_path / "llama"), layout="llama")
    export(str(tied), str(tmp_path / "plain.safetensors"))
    found = on_layout(pool, started, "fsdp+tp4", "gpt-tied-gqa", "fsdp+tp4", str(tmp_path / "llama"))[0]
    assert same(found, load_file(tmp_path / "plain.safetensors"))


def test_buffers_come_back_and_names_of_a_lightning_module_are_known(tmp_path: Path) -> None:
    model = plain_model("convnet")
    state = dict(model.state_dict())
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path / "m.safetensors")
    load_weights(module := build_module("convnet").to_empty(device="cpu"), str(tmp_path / "m.safetensors"))
    ours = {name: tensor.double() for name, tensor in module.model.state_dict().items()}
    assert same(ours, {name: tensor.to(module.dtype).to(ours[name].dtype) for name, tensor in state.items()})


def test_a_rank_reads_its_own_part_only(pool: Any, tmp_path: Path) -> None:
    model = plain_model("gpt-gqa")
    save_file(dict(model.state_dict()), tmp_path / "m.safetensors")
    for mine, all_of_it in on_layout(pool, bytes_read, "fsdp+tp4", str(tmp_path / "m.safetensors")):
        assert mine < 0.3 * all_of_it


def bytes_read(path: str) -> tuple[int, int]:
    from shardwise.weights.safetensors_file import TensorFiles

    read, total = TensorFiles.read, 0

    def counting(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal total
        value = read(self, *args, **kwargs)
        total += value.numel() * value.element_size()
        return value

    TensorFiles.read = counting  # type: ignore[method-assign]
    try:
        started("gpt-gqa", "fsdp+tp4", path)
    finally:
        TensorFiles.read = read  # type: ignore[method-assign]
    return total, os.path.getsize(path)


# ---- Llama ---------------------------------------------------------------------------------------------------------


def llama_forward(weights: dict[str, Tensor], config: dict[str, Any], tokens_BT: Tensor) -> Tensor:
    """Llama's logits from its published formulas, and nothing of this project.

    RMSNorm (Zhang and Sennrich 2019), rotary positions in halves as ``rotate_half`` of Hugging Face's Llama, grouped
    queries by repetition, SwiGLU.
    """
    heads, groups, size = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[name]

    def rotate(x_BNTK: Tensor) -> Tensor:
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.arange(x_BNTK.shape[-2], dtype=torch.float64)[:, None] / config["rope_theta"] ** steps
        angles = torch.cat([angles, angles], -1)
        half = torch.cat([-x_BNTK[..., size // 2 :], x_BNTK[..., : size // 2]], -1)
        return x_BNTK * angles.cos() + half * angles.sin()

    batch, length = tokens_BT.shape
    hidden = weights["model.embed_tokens.weight"][tokens_BT]
    future = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        x = norm(hidden, own + "input_layernorm.weight")
        q, k, v = (
            (x @ weights[f"{own}self_attn.{name}_proj.weight"].T).view(batch, length, count, size).transpose(1, 2)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (rotate(k), v))
        mixed = ((rotate(q) @ k.mT) / size**0.5 + future).softmax(-1) @ v
        hidden = hidden + mixed.transpose(1, 2).reshape(batch, length, -1) @ weights[own + "self_attn.o_proj.weight"].T
        x = norm(hidden, own + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(x @ gate) * (x @ up)) @ down
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(hidden, "model.norm.weight") @ weights[head].T


@pytest.mark.parametrize("kind", ["gpt", "gpt-gqa", "gpt-tied-gqa"])
def test_llama_computes_the_same_logits_and_comes_back(kind: str, tmp_path: Path) -> None:
    model = plain_model(kind)
    folder = saved_model(model, tmp_path / "checkpoints", config=config_of(kind))
    export(folder, str(tmp_path / "llama"), layout="llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    weights, x = load_file(tmp_path / "llama" / "model.safetensors"), inputs(kind)
    assert ("lm_head.weight" in weights) == ("tied" not in kind)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCABULARY, CONTEXT)
    torch.testing.assert_close(llama_forward(weights, config, x), model(x), rtol=1e-11, atol=1e-11)
    load_weights(back := plain_model(kind), str(tmp_path / "llama"))
    assert same(dict(back.state_dict()), dict(model.state_dict()))
    assert torch.equal(back(x), model(x))


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = plain_model("gpt-gqa")
    folder = saved_model(model, tmp_path / "checkpoints", config=config_of("gpt-gqa"))
    export(folder, str(tmp_path / "llama"), layout="llama")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float64)
    torch.testing.assert_close(theirs(inputs("gpt")).logits, model(inputs("gpt")), rtol=1e-5, atol=1e-5)


def test_an_untied_model_starts_from_tied_llama_weights(tied: Path, tmp_path: Path) -> None:
    export(str(tied), str(tmp_path / "llama"), layout="llama")
    load_weights(model := plain_model("gpt-gqa"), str(tmp_path / "llama"))
    assert torch.equal(model.head.weight, model.tok_emb.weight)  # type: ignore[union-attr]


def test_a_tied_model_takes_two_equal_ends_and_no_others(tied: Path, tmp_path: Path) -> None:
    export(str(tied), str(tmp_path / "llama"), layout="llama")
    path = tmp_path / "llama" / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    load_weights(plain_model("gpt-tied-gqa"), str(path))
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight and lm_head.weight differ, and the model ties"):
        load_weights(plain_model("gpt-tied-gqa"), str(path))


# ---- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"soft_cap": 30.0}}, r"^model.soft_cap=30.0: Llama bounds no logits: type --layout plain$"),
        ({"model": {"_target_": "shardwise.models.vit.ViT"}}, r"this model is shardwise.models.vit.ViT"),
        ({"model": {"_target_": None}}, r"the checkpoint holds no configuration"),
        ({"data": {}}, r"^model.context=auto: the checkpoint does not say which length that is: type --context$"),
    ],
)
def test_what_llama_has_no_place_for(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of("gpt")
    config = {
        key: {**config[key], **change[key]} if change.get(key) else change.get(key, config[key]) for key in config
    }
    folder = saved_model(plain_model("gpt"), tmp_path / "checkpoints", config=config)
    with pytest.raises(ConfigError, match=message):
        export(folder, str(tmp_path / "out"), layout="llama")
    assert not (tmp_path / "out").exists()


def test_llama_has_no_biases(tmp_path: Path) -> None:
    model = plain_model("gpt")
    model.norm.bias = nn.Parameter(torch.zeros(16))  # type: ignore[union-attr]
    folder = saved_model(model, tmp_path / "checkpoints", config=config_of("gpt"))
    with pytest.raises(ConfigError, match=r"^Llama has no place for norm.bias: type --layout plain$"):
        export(folder, str(tmp_path / "out"), layout="llama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 500000.0}, r"here rope_theta=10000.0\): type model.rope_theta=500000.0$"),
        ({"num_attention_heads": 8}, r"here n_head=4\): type model.n_head=8$"),
        ({"rms_norm_eps": 1e-6}, r"type model.norm_eps=1e-06$"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"scales rotary positions \(llama3\), which gpt does not$"),
        ({"model_type": "gemma"}, r"says model_type=gemma: of those with Llama's names only llama itself can be read$"),
        ({"hidden_act": "gelu"}, r"says hidden_act=gelu, and gpt has silu$"),
    ],
)
def test_llama_weights_that_mean_something_else_here(
    change: dict[str, Any], message: str, tied: Path, tmp_path: Path
) -> None:
    export(str(tied), str(tmp_path), layout="llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    model = plain_model("gpt-tied-gqa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        load_weights(model, str(tmp_path))
    assert same(dict(model.state_dict()), before)


def test_weights_of_another_model(tmp_path: Path) -> None:
    model = plain_model("gpt")
    weights = dict(model.state_dict())
    weights["new"] = weights.pop("norm.weight")
    weights["blocks.0.attn.k.weight"] = weights["blocks.0.attn.k.weight"][:8].contiguous()
    save_file(weights, path := tmp_path / "m.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(model, str(path))
    assert str(caught.value) == (
        f"{path} is of another model: it lacks norm.weight; it has besides new; of another shape are "
        f"blocks.0.attn.k.weight (8 x 16, here 16 x 16)"
    )
    assert same(dict(model.state_dict()), before)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = plain_model("mlp")
    save_file({n: t.to(torch.int8) for n, t in model.state_dict().items()}, path := tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"is I8, and here torch.float64: quantised weights cannot be read$"):
        load_weights(model, str(path))


def damaged(path: Path, kind: str) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(
        {
            "empty": b"",
            "cut": raw[:-1],
            "header": raw[:8] + b"x" * size + raw[8 + size :],
            "length": struct.pack("<Q", 2**60) + raw[8:],
        }[kind]
    )


@pytest.mark.parametrize("kind", ["empty", "cut", "header", "length"])
@pytest.mark.parametrize("function", [check_weights, lambda path: load_weights(plain_model("mlp"), path)])
def test_a_damaged_file(kind: str, function: Any, tmp_path: Path) -> None:
    save_file(dict(plain_model("mlp").state_dict()), path := tmp_path / "m.safetensors")
    damaged(path, kind)
    with pytest.raises(ConfigError, match="is no whole safetensors file: ") as caught:
        function(str(path))
    assert "\n" not in str(caught.value)


def sources(folder: Path) -> dict[str, tuple[str, str]]:
    """Case -> what is typed, and what is said."""
    tensors = {"weight": torch.zeros(2)}
    for name in ("index", "twice", "outside", "broken"):
        (folder / name).mkdir()
    save_file(tensors, folder / "twice" / "a.safetensors")
    save_file(tensors, folder / "twice" / "b.safetensors")
    for name, file in (("index", "model-1.safetensors"), ("outside", "../twice/a.safetensors")):
        (folder / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
        save_file(tensors, folder / name / "a.safetensors")
    (folder / "broken" / "model.safetensors.index.json").write_text("[]")
    save_file(tensors, folder / "broken" / "a.safetensors")
    (folder / "notes.txt").write_text("none")
    return {
        "nothing": (f"{folder}/none.safetensors", "none.safetensors: no such file"),
        "no folder": (f"{folder}/none", "no such folder"),
        "pickled": (f"{folder}/model.bin", "pickled weights can run code when they are read"),
        "another file": (f"{folder}/notes.txt", "is no .safetensors file, and no folder of a checkpoint or a run"),
        "missing shard": (f"{folder}/index", "model-1.safetensors: no such file"),
        "twice": (f"{folder}/twice", "two of its files hold weight: type one of them"),
        "outside": (f"{folder}/outside", "lists ../twice/a.safetensors, which is no .safetensors file of this folder"),
        "broken index": (f"{folder}/broken", "index.json is damaged: a weight_map of names to files is needed"),
        "remote": ("s3://bucket/model.safetensors", ".safetensors files are read from local folders only"),
    }


@pytest.mark.parametrize(
    "case",
    ["nothing", "no folder", "pickled", "another file", "missing shard", "twice", "outside", "broken index", "remote"],
)
def test_what_no_weights_are(case: str, tmp_path: Path) -> None:
    typed, message = sources(tmp_path)[case]
    for function in (check_weights, lambda path: load_weights(plain_model("mlp"), path)):
        with pytest.raises(ConfigError) as caught:
            function(typed)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_nothing_is_overwritten(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("mine")
    assert main(["export", str(tied), "--to", str(target)]) == 2
    assert capsys.readouterr().err == f"error: {target} exists: type --force to replace it, or another --to\n"
    assert target.read_text() == "mine"
    assert main(["export", str(tied), "--to", str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert main(["export", str(tied), "--to", str(tmp_path / "l.safetensors"), "--layout", "llama"]) == 2
    assert "config.json exists and says something else: type --force" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["config.json", "model.safetensors"]
    assert main(["export", str(tied), "--to", str(target), "--force"]) == 0
    assert load_file(target)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("model.pt", "only .safetensors files are written: type --to model.safetensors"),
        ("s3://bucket/model.safetensors", "a local path is needed, such as --to model.safetensors"),
        ("", "a local path is needed"),
        ("file/model.safetensors", "is not writable"),
        ("closed/model.safetensors", "closed is not writable"),
        ("run/export/model.safetensors", "which nothing but its run writes into: type another"),
        ("run/checkpoints/step_00000001/out", "which nothing but its run writes into: type another"),
    ],
)
def test_targets_that_are_none(
    to: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_model(plain_model("mlp"), tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "closed").mkdir(mode=0o555)
    if to.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write everywhere")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert main(["export", "run", "--to", to]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_nothing(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot be written \\(No space left on device\\): type another --to"):
        export(str(tied), str(tmp_path / "model.safetensors"))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    folder = saved_model(plain_model("mlp"), tmp_path / "checkpoints")
    (data,) = Path(folder).rglob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ConfigError, match="damaged or incomplete"):
        export(folder, str(tmp_path / "model.safetensors"))


def test_ties_that_the_checkpoint_tells_of(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    folder = saved_model(model, tmp_path / "checkpoints", trainer={"tied": [["a.weight", "b.weight"]]})
    export(folder, str(tmp_path / "model.safetensors"))
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == {"a.weight", "b.weight"}
    assert torch.equal(written["a.weight"], written["b.weight"])
    model.load_state_dict(written)


def test_a_language_model_task_reads_its_models_names(tied: Path, tmp_path: Path) -> None:
    export(str(tied), str(tmp_path / "model.safetensors"))
    task = tuned(LanguageModel(GPT(**SIZES, n_kv_head=2, tie_embeddings=True)))
    load_weights(task, str(tmp_path / "model.safetensors"))
    ours = {name.removeprefix("model."): tensor.double() for name, tensor in task.state_dict().items()}
    assert same(ours, {n: t.float().double() for n, t in load_file(tmp_path / "model.safetensors").items()})
