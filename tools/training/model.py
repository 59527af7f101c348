"""The drafter's network: its shape, its first weights, and the folder that export reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.vocabulary import VocabularyMap
from omnidraft.tools.training.target import Target
from omnidraft.tools.training.tokenizer import DIALECTS, write_settings

HEAD_SIZE = 64
MLP_BLOCK = 64  # the builder of int4 graphs takes pairs of quantization blocks only
TRAINED_ROWS = 2  # positions declared, in rows of training text: measured, acceptance falls further out


@dataclass(frozen=True)
class Shape:
    """`hidden` x number of `layers` from scratch, or (hidden 0) copies of these layers of the target.

    `family`: the model_type. A qwen3 is no drafter that export takes, but a small target of its own.
    """

    hidden: int
    layers: tuple[int, ...]
    family: str = "llama"


def parse_shape(text: str) -> Shape:
    """Read --shape. Raises OmniDraftError for anything but 256x4, qwen3:320x6 or target:0,1,29."""
    scratch = re.fullmatch(r"(qwen3:)?(\d+)x(\d+)", text)
    copied = re.fullmatch(r"target:(\d+(?:,\d+)*)", text)
    if scratch and int(scratch[2]) > 0 and int(scratch[2]) % HEAD_SIZE == 0 and int(scratch[3]) > 0:
        return Shape(int(scratch[2]), tuple(range(int(scratch[3]))), "qwen3" if scratch[1] else "llama")
    if copied:
        return Shape(0, tuple(int(layer) for layer in copied[1].split(",")))
    raise OmniDraftError(
        f"--shape {text}: write 256x4 (hidden size, a multiple of 64, x layers), qwen3:320x6 or target:0,1,29"
    )


def build_model(shape: Shape, size: int, length: int, target: Target, vocabulary: VocabularyMap) -> Any:
    """A Llama or Qwen3 model in float32 with `size` tokens: random weights, or copied from the target's.

    `length`: tokens of a training row; the model is declared for twice as many positions.
    Raises OmniDraftError if layers are to be copied that the target has not, or that are no Llama layers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common: dict[str, Any] = {
        "vocab_size": size, "num_hidden_layers": len(shape.layers), "max_position_embeddings": TRAINED_ROWS * length,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "dtype": "float16",
    }  # fmt: skip
    if shape.hidden:
        heads = shape.hidden // HEAD_SIZE
        common |= {
            "hidden_size": shape.hidden, "intermediate_size": -(-int(shape.hidden * 2.75) // MLP_BLOCK) * MLP_BLOCK,
            "num_attention_heads": heads, "head_dim": HEAD_SIZE, "tie_word_embeddings": True, "rope_theta": 10000.0,
        }  # fmt: skip
        if shape.family == "qwen3":
            shared = 2 if heads % 2 == 0 else 1
            return Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=shared)).float()
        return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=heads)).float()
    return _from_target(shape.layers, common, target, vocabulary)


def _from_target(layers: tuple[int, ...], common: dict[str, Any], target: Target, vocabulary: VocabularyMap) -> Any:
    """Copied layers; a draft token's embedding is the mean of those of the target tokens that spell it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from omnidraft.export.drafter import Weights
    from omnidraft.export.llama_graph import obstacle, read_shape

    name = target.source.name
    hindrance = obstacle(target.source.config)
    if hindrance is not None:
        raise OmniDraftError(f"--shape target:…: {name} cannot be copied from ({hindrance}); give a shape as 256x4")
    found = read_shape(target.source.config)
    if max(layers) >= found.layers:
        raise OmniDraftError(f"--shape target:…: {name} has layers 0 to {found.layers - 1}, not {max(layers)}")
    config = LlamaConfig(
        **common, hidden_size=found.hidden, intermediate_size=found.intermediate, num_attention_heads=found.heads,
        num_key_value_heads=found.kv_heads, head_dim=found.head_size, rms_norm_eps=found.epsilon,
        rope_theta=found.rope_theta, tie_word_embeddings=found.tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    weights = Weights(target.source)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key in ("model.embed_tokens.weight", "lm_head.weight"):
                continue
            number = re.match(r"model\.layers\.(\d+)\.", key)
            here = f"model.layers.{layers[int(number[1])]}." + key[number.end() :] if number else key
            value.copy_(torch.from_numpy(weights(here)))
        tables = [(model.model.embed_tokens.weight, "model.embed_tokens.weight")]
        if not found.tied:
            tables.append((model.lm_head.weight, "lm_head.weight"))
        for table, key in tables:
            rows = weights(key)
            for draft, pieces in enumerate(vocabulary.pieces):
                if pieces:
                    table[draft] = torch.from_numpy(np.mean(rows[list(pieces)], 0))
    return model


def save_drafter(model: Any, out: Path) -> None:
    """Write float16 weights and configuration beside the tokenizer.json: a folder that export reads like any other.

    The weights take their place last and at once.
    """
    import torch
    from safetensors.torch import save_file

    weights = {k: v.to("cpu", torch.float16).contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    write_settings(out, model.config.max_position_embeddings, DIALECTS[model.config.model_type])
    temporary = out / "model.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.replace(out / "model.safetensors")
