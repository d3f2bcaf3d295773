"""The layout of Hugging Face's Llama for our ``gpt``: names, and the configuration beside them.

Both turn the features i and i + K/2 of a head together (see ``Rotary``), so the weights are the same row by row: names
are all that differs. Meta's own files pair neighbours, and their q and k rows are in another order; they have other
names, too, and are not read.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT

TARGET = "shardwise.models.gpt.GPT"
EMBEDDING, HEAD = "tok_emb.weight", "head.weight"

_ENDS = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_IN_BLOCK = {
    "norm1": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OURS = {theirs: ours for ours, theirs in _ENDS.items()}
_OURS_IN_BLOCK = {theirs: ours for ours, theirs in _IN_BLOCK.items()}
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tables that older files hold, and that follow from the configuration."""


def is_llama(names: Iterable[str]) -> bool:
    """Whether a file with these names is of Llama's layout."""
    return _ENDS[EMBEDDING] in set(names)


def to_llama(name: str) -> str | None:
    """Llama's name of the tensor that is ``name`` in our ``gpt``; None if it has none."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _IN_BLOCK:
        return _ENDS.get(name)
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def from_llama(names: Iterable[str]) -> dict[str, str]:
    """Name in our ``gpt`` -> name in a file of Llama's layout; what ``gpt`` has no name for keeps its own."""
    found = {}
    for name in names:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if match is not None and match[2] in _OURS_IN_BLOCK:
            found[f"blocks.{match[1]}.{_OURS_IN_BLOCK[match[2]]}.weight"] = name
        elif not _DERIVED.fullmatch(name):
            found[_OURS.get(name, name)] = name
    return found


# ---- the configuration ---------------------------------------------------------------------------------------------


def llama_config(
    model: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, dtype: str, context: int | None
) -> dict[str, Any]:
    """The ``config.json`` that transformers reads (LlamaConfig).

    Args:
        model: the ``model`` of the resolved configuration.
        shapes: name in the plain model -> shape of each of its tensors.
        dtype: of the weights, as ``float32``.
        context: the longest input, where ``model`` does not say.

    Raises:
        ConfigError: the model is no ``gpt``, or has what Llama has no place for; names it.
    """
    if model.get("_target_") != TARGET:
        what = model.get("_target_") or "unknown: the checkpoint holds no configuration"
        raise ConfigError(f"--layout llama is for model=gpt, and this model is {what}: type --layout plain")
    defaults = {name: p.default for name, p in inspect.signature(GPT).parameters.items()}
    given = {**defaults, **model}
    if given["soft_cap"] is not None:
        raise ConfigError(f"model.soft_cap={given['soft_cap']}: Llama bounds no logits: type --layout plain")
    if foreign := [name for name in shapes if to_llama(name) is None]:
        raise ConfigError(f"Llama has no place for {', '.join(foreign[:4])}: type --layout plain")
    if isinstance(given["context"], int):
        context = given["context"]
    if context is None:
        raise ConfigError(
            f"model.context={given['context']}: the checkpoint does not say which length that is: type --context"
        )
    vocab_size, width = shapes[EMBEDDING]
    n_layer = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    head_width = width // given["n_head"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": shapes["blocks.0.mlp.up.weight"][0],
        "num_hidden_layers": n_layer,
        "num_attention_heads": given["n_head"],
        "num_key_value_heads": shapes["blocks.0.attn.k.weight"][0] // head_width,
        "head_dim": head_width,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": given["norm_eps"],
        "rope_theta": given["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": given["dropout"],
        "tie_word_embeddings": HEAD not in shapes,
        "initializer_range": 0.02,
        "use_cache": True,
        # Which tokens begin and end a text is the vocabulary's to say; transformers would take 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def check_config(config: Mapping[str, Any], model: GPT, *, where: str) -> None:
    """Whether the weights beside ``config`` mean in ``model`` what they mean in Llama; shapes do not show it.

    Raises:
        ConfigError: another kind of model, or another value; names each.
    """
    kind = config.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f"{where} says model_type={kind}: of those with Llama's names only llama itself can be read")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise ConfigError(f"{where} scales rotary positions ({scaling}), which gpt does not")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{where} says hidden_act={act}, and gpt has silu")
    heads = config.get("num_attention_heads", 32)
    theirs = {
        "n_head": heads,
        "n_kv_head": config.get("num_key_value_heads") or heads,
        "rope_theta": config.get("rope_theta", rope.get("rope_theta", 10_000.0)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "soft_cap": None,
    }
    ours = {
        "n_head": model.n_head,
        "n_kv_head": model.n_kv_head,
        "rope_theta": model.rotary.theta,
        "norm_eps": model.norm.eps,
        "soft_cap": model.head.soft_cap,
    }
    other = [name for name in theirs if theirs[name] != ours[name]]
    if other:
        typed = " ".join(f"model.{n}={'null' if theirs[n] is None else theirs[n]}" for n in other)
        here = ", ".join(f"{n}={ours[n]}" for n in other)
        raise ConfigError(f"{where} is of a model with other values (here {here}): type {typed}")
