"""The torch-free Llama builder against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import random_model

from omnidraft.export.llama_graph import build_graph, lora_sizes, obstacle, read_shape
from omnidraft.export.quantize import dequantize, quantize
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError

torch = pytest.importorskip("torch")
IDS = np.random.default_rng(5).integers(0, 384, 70)
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "no grouping, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "plain head size": {"head_dim": 16, "num_attention_heads": 4},
    "one kv head, other constants": {
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "odd sizes": {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 401},
}


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def build(folder: Path, model: Any, weight: Callable[[str], np.ndarray], precision: str = "fp32") -> Decoder:
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert obstacle(config) is None
    path = folder / "model.onnx"
    onnx.save(build_graph(read_shape(config), weight, precision), path)
    return Decoder(path)


def run(decoder: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of IDS, fed in uneven chunks with a wrong tail that is rolled back."""
    decoder.rollback(0)
    logits, hidden = [], []
    for begin, end in ((0, 17), (17, 19), (19, 20), (20, 70)):
        if begin == 20:
            decoder.run([1, 2, 3])
            decoder.rollback(begin)
        logits.append(decoder.run(IDS[begin:end]).copy())
        assert decoder.hidden is not None
        hidden.append(decoder.hidden.copy())
    return np.concatenate(logits), np.concatenate(hidden)


def torch_run(model: Any) -> tuple[np.ndarray, np.ndarray]:
    with torch.inference_mode():
        out = model(torch.tensor(IDS)[None], output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def random_adapter(decoder: Decoder, shapes: dict[str, tuple[int, int]], rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    adapter = {}
    for name, (rows, columns) in shapes.items():
        adapter[f"{name}.lora_A"] = rng.normal(scale=rows**-0.5, size=(rows, rank)).astype(np.float32)
        adapter[f"{name}.lora_B"] = rng.normal(scale=0.1, size=(rank, columns)).astype(np.float32)
    assert set(adapter) == set(decoder.lora_names)
    return adapter


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_fp32_logits_and_hidden_states_are_torchs(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(**overrides)
    logits, hidden = run(build(tmp_path, model, weights_of(model).__getitem__))
    expected_logits, expected_hidden = torch_run(model)
    assert np.abs(logits - expected_logits).max() <= 1e-4
    assert np.abs(hidden - expected_hidden).max() <= 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_graph_is_torch_with_the_dequantized_weights(bits: int, tmp_path: Path) -> None:
    """What is left is the rounding of activations to 8 bits, which is far smaller than that of the weights."""
    model = random_model(tie_word_embeddings=False)
    decoder = build(tmp_path, model, weights_of(model).__getitem__, f"int{bits}")
    exact, _ = torch_run(model)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("_proj.weight") or name == "lm_head.weight":
                value.copy_(torch.from_numpy(dequantize(quantize(value.numpy(), bits))))
    expected, _ = torch_run(model)
    logits, _ = run(decoder)
    spread = expected.std()
    assert np.abs(logits - expected).mean() / spread < 0.03
    if bits == 4:
        assert np.abs(logits - expected).mean() < 0.3 * np.abs(logits - exact).mean()


def test_lora_hooks_equal_merged_weights(tmp_path: Path) -> None:
    model = random_model()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    shapes = lora_sizes(read_shape(config))
    decoder = build(tmp_path, model, weights_of(model).__getitem__)
    base, _ = run(decoder)
    adapter = random_adapter(decoder, shapes, rank=3)
    decoder.set_adapter(adapter)
    adapted, _ = run(decoder)
    with torch.no_grad():
        for name in shapes:
            _, layer, part = name.split(".")
            block = "self_attn" if part in "qkvo" else "mlp"
            projection = model.get_submodule(f"model.layers.{layer}.{block}.{part}_proj")
            projection.weight += torch.from_numpy((adapter[f"{name}.lora_A"] @ adapter[f"{name}.lora_B"]).T)
    merged, _ = torch_run(model)
    assert np.abs(adapted - merged).max() <= 1e-4
    assert np.abs(adapted - base).max() > 1
    decoder.set_adapter(None)
    assert np.array_equal(run(decoder)[0], base)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_rank_zero_defaults_change_nothing(precision: str, tmp_path: Path) -> None:
    """Bit for bit: an adapter of zeros, of any rank, is the same as no adapter."""
    model = random_model()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    decoder = build(tmp_path, model, weights_of(model).__getitem__, precision)
    base, _ = run(decoder)
    adapter = random_adapter(decoder, lora_sizes(read_shape(config)), rank=4)
    decoder.set_adapter({name: value * (".lora_A" in name) for name, value in adapter.items()})
    assert np.array_equal(run(decoder)[0], base)


def test_every_projection_has_hooks(tmp_path: Path) -> None:
    model = random_model()
    decoder = build(tmp_path, model, weights_of(model).__getitem__)
    parts = ("q", "k", "v", "o", "gate", "up", "down")
    wanted = {f"layers.{i}.{p}.lora_{side}" for i in range(2) for p in parts for side in "AB"}
    assert set(decoder.lora_names) == wanted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_it_cannot_express_is_named(change: dict[str, Any], reason: str) -> None:
    config = {**random_model().config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert obstacle(config) is None
    assert reason in str(obstacle({**config, **change}))


def test_weights_of_another_shape_are_refused() -> None:
    model = random_model()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "intermediate_size": 96}
    with pytest.raises(OmniDraftError, match="do not match"):
        build_graph(read_shape(config), weights_of(model).__getitem__, "fp32")
