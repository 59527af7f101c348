"""Small checkpoints with random weights, in the formats that an export takes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "The boat came back before dawn, and the market smelled of salt until noon.",
    "def total(values): return sum(value for value in values if value > 0)",
    "A train travels 240 km in 3 hours, so its speed is 80 km per hour.",
    "Water boils at 100 degrees; the old pier will be gone by 2031.",
]
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE of 384 tokens; the first three are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@cache
def _tokenizer_json() -> str:
    return small_tokenizer().to_str()


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """tokenizer.json and tokenizer_config.json of the small tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")


def random_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A torch model of transformers with random weights, large enough that a wrong one shows in the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, "initializer_range": 0.2, **overrides})
    return AutoModelForCausalLM.from_config(config).float().eval()


def write_checkpoint(folder: Path, kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A Hugging Face folder: random weights, configuration, small tokenizer, chat template, card."""
    random_model(kind, seed, **overrides).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Random\n", encoding="utf-8")
    return folder


def write_gguf(path: Path, model: Any, metadata: dict[str, str] | None = None) -> Path:
    """A Llama model of `random_model` with the small tokenizer as a float32 .gguf file, as llama.cpp writes it."""
    import gguf

    config, tokenizer = model.config, json.loads(_tokenizer_json())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocabulary]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(_gguf_name(name), _llama_cpp_order(name, value.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{inner[part]}.weight"


def _llama_cpp_order(name: str, weight: Any, config: Any) -> Any:
    """llama.cpp interleaves the two halves of every rotary head of q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
